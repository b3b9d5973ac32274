//! Simulator run: settings, trace as a Python iterator, and records as tuples.
//!
//! Invariant: settings are checked at creation, before the trace is read. Cost: a conversion per
//! request and per record.

mod calls;
mod machines;
mod price;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvtrie_core::{DropOrder, Error, LoadMode, Objective, Settings, Structure};
use kvtrie_sim::call::{ReportHint, Reporting};
use kvtrie_sim::cost::Affine;
use kvtrie_sim::directory::Learning;
use kvtrie_sim::engine::{Kind, Limits, Service, Wait};
use kvtrie_sim::network::{LANE, PeerSpec};
use kvtrie_sim::remote::Lookup;
use kvtrie_sim::request::{Request, Tool};
use kvtrie_sim::router::RoundRobin;
use kvtrie_sim::simulation::{Config, Simulation as Run};
use kvtrie_sim::timeline::{Span, Track};
use kvtrie_sim::transfer::{Mode, Transfer};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arrays::numbers;
use crate::error::{bad, raise};
use crate::lease::load_mode;
use crate::manager::BlockManager;
use crate::number::{self, Clients, DirectoryTime, Running, nanos, whole};
use crate::routing::{decision_row, routed};
use crate::scope::scope;
use crate::settings;
use crate::text::{choice, text};
use crate::tokens::Tokens;
use calls::{call_row, row};
use machines::machines_of;
use price::prices;

/// `(arrival_ns, tokens, input_tokens, output_tokens, session)`.
type RequestRow<'py, T = Bound<'py, PyAny>> = (T, T, T, T, Option<T>);

/// `(hits, tokens_hit, evicted_clean, evicted_dirty, dropped)` of a tier.
type TierCounts = (u64, u64, u64, u64, u64);

/// Machines serving a trace, each with a manager, on the trace's clock.
#[pyclass(frozen, module = "kvtrie._kvtrie")]
pub(crate) struct Simulation {
    /// `None` while running.
    run: Mutex<Option<Run>>,
    tiers: usize,
}

impl Simulation {
    fn take(&self) -> PyResult<Run> {
        let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
        run.take().ok_or_else(|| bad("the simulation runs: it answers when the run has ended"))
    }

    fn put(&self, run: Run) {
        *self.run.lock().unwrap_or_else(PoisonError::into_inner) = Some(run);
    }

    fn look<T>(&self, at: impl FnOnce(&mut Run) -> PyResult<T>) -> PyResult<T> {
        let mut run = self.take()?;
        let found = at(&mut run);
        self.put(run);
        found
    }
}

#[pymethods]
impl Simulation {
    #[new]
    #[pyo3(signature = (
        model, tiers, *, price, machines=None, block_tokens=16, token_weight=1,
        policy=String::from("learned"), cost=None, structure=Structure::LeafOnly,
        drop_order=DropOrder::Shallow, reuse=true, epsilon=0.015_625, load=None, keep=1,
        wait=None, router=None, transfer=None, moves_per_job=64, peers=None, engine=None,
        token_budget=2048, max_running=256, token_by_token=false, answers=None, prefill=1,
        network=None, directory_ns=None, prefetch=None, clients=None, logged=false, objective=Objective::Cost,
        resume=None, remote=None, reports=None
    ), text_signature = "(model, tiers, *, price, machines=1, block_tokens=16, token_weight=1, \
        policy='learned', cost='default', structure='leaf-only', drop_order='shallow', reuse=True, \
        epsilon=0.015625, load='all', keep=1, wait='all', router='round-robin', \
        transfer='executor', moves_per_job=64, peers=None, engine='serial', token_budget=2048, \
        max_running=256, token_by_token=False, answers='released', prefill=1, network=None, \
        directory_ns=None, \
        prefetch='never', clients=None, logged=False, objective='cost', resume=None, remote=None, \
        reports=('progress', 0, False))")]
    fn new(
        model: &Bound<'_, PyAny>,
        tiers: &Bound<'_, PyAny>,
        price: &Bound<'_, PyAny>,
        machines: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::block_tokens)] block_tokens: u32,
        #[pyo3(from_py_with = number::token_weight)] token_weight: u32,
        #[pyo3(from_py_with = settings::policy)] policy: String,
        cost: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = crate::scope::structure_of)] structure: Structure,
        #[pyo3(from_py_with = settings::drop_order)] drop_order: DropOrder,
        #[pyo3(from_py_with = number::reuse)] reuse: bool,
        #[pyo3(from_py_with = number::epsilon)] epsilon: f64,
        load: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::keep)] keep: usize,
        wait: Option<&Bound<'_, PyAny>>,
        router: Option<&Bound<'_, PyAny>>,
        transfer: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::moves_per_job)] moves_per_job: usize,
        peers: Option<&Bound<'_, PyAny>>,
        engine: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::token_budget)] token_budget: u64,
        #[pyo3(from_py_with = number::max_running)] max_running: u64,
        token_by_token: bool,
        answers: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::prefill)] prefill: usize,
        network: Option<&Bound<'_, PyAny>>,
        directory_ns: Option<DirectoryTime>,
        prefetch: Option<&Bound<'_, PyAny>>,
        clients: Option<Clients>,
        logged: bool,
        #[pyo3(from_py_with = settings::objective)] objective: Objective,
        resume: Option<&Bound<'_, PyAny>>,
        remote: Option<&Bound<'_, PyAny>>,
        reports: Option<(Bound<'_, PyAny>, usize, bool)>,
    ) -> PyResult<Self> {
        let tiers = settings::tiers(tiers)?;
        let given =
            settings::Given { model, tiers: &tiers, block_tokens, token_weight, cost, resume };
        let given = settings::settings(&given)?;
        let settings = Settings {
            policy,
            structure,
            drop_order,
            reuse,
            epsilon,
            cost: given.cost.with_objective(objective),
            ..given
        };
        let (machines, hardware) = machines_of(machines, |tiers, cost| {
            let own = settings::Given { model, tiers, block_tokens, token_weight, cost, resume };
            let own = settings::settings(&own)?;
            Ok((own.tiers, own.cost.with_objective(objective)))
        })?;
        let word = |given: Option<&Bound<'_, PyAny>>, name: &str, known: [&'static str; 2]| {
            let known = [(known[0], false), (known[1], true)];
            given.map_or(Ok(false), |given| choice(given, name, &known))
        };
        let waits = [("all", Wait::All), ("layer", Wait::Layer), ("step", Wait::Step)];
        let wait = wait.map_or(Ok(Wait::All), |given| choice(given, "wait", &waits))?;
        let layerwise = wait == Wait::Layer;
        let cache_answers = word(answers, "answers", ["released", "cached"])?;
        let limits = Limits { token_budget, max_running, token_by_token, cache_answers };
        let kinds = [
            ("serial", Kind::Serial),
            ("continuous", Kind::Continuous(limits)),
            ("disaggregated", Kind::Disaggregated(limits, prefill)),
        ];
        let predicted = word(transfer, "transfer", ["executor", "predicted"])?;
        let between = |lane: &Bound<'_, PyAny>| {
            settings::lane(lane).map(|lane| PeerSpec {
                bytes_per_s: lane.bytes_per_s,
                latency_ns: lane.latency_ns,
                shares: lane.shares,
            })
        };
        let (peers, network) = (peers.map(between).transpose()?, network.map(between).transpose()?);
        let lookups = [("all", Lookup::All), ("local", Lookup::Local)];
        let remote = remote.map(|given| choice(given, "remote", &lookups)).transpose()?;
        let config = Config {
            machines,
            hardware,
            load: load.map_or(Ok(LoadMode::All), load_mode)?,
            service: Service {
                kind: engine.map_or(Ok(Kind::Serial), |given| choice(given, "engine", &kinds))?,
                cost: prices(price)?,
                wait,
                keep: keep as u64,
                gap: u64::from(predicted),
                held: 0,
            },
            transfer: Transfer {
                mode: if predicted { Mode::Predicted } else { Mode::Executor },
                moves_per_job,
                layerwise,
            },
            router: routed(router, block_tokens)?,
            settings,
            peers,
            network,
            remote,
            directory: directory_ns.map_or(Learning::Exact, |time| Learning::Events(time.0)),
            logged,
        };
        let mut run = Run::new(config).map_err(raise)?;
        if word(prefetch, "prefetch", ["never", "arrival"])? {
            run.prefetch();
        }
        if let Some((hint, tier, demote)) = reports {
            let hints = [
                ("progress", ReportHint::Progress),
                ("prefetch", ReportHint::Late),
                ("prefetch-now", ReportHint::Early),
            ];
            let hint = choice(&hint, "reports", &hints)?;
            run.report_as(Reporting { hint, tier, demote }).map_err(raise)?;
        }
        run.close(clients.map_or(0, |clients| clients.0));
        Ok(Self { run: Mutex::new(Some(run)), tiers: tiers.len() })
    }

    /// A machine with a given manager, and an engine computing in no time.
    #[staticmethod]
    #[pyo3(signature = (manager, *, load=None, running=None), text_signature = "(manager, *, load='all', running=1)")]
    fn over(
        py: Python<'_>,
        manager: &BlockManager,
        load: Option<&Bound<'_, PyAny>>,
        running: Option<Running>,
    ) -> PyResult<Self> {
        let shared = &manager.shared;
        let settings = shared.call(py, |manager| Ok(manager.settings().clone()))?;
        let transfer = Transfer { mode: Mode::Predicted, moves_per_job: 1, layerwise: false };
        let config = Config {
            settings,
            machines: 1,
            hardware: Vec::new(),
            load: load.map_or(Ok(LoadMode::All), load_mode)?,
            service: Service {
                kind: Kind::Serial,
                cost: Arc::new(Affine { base: 0, slope: 0 }),
                wait: Wait::All,
                keep: 0,
                gap: 1,
                held: running.map_or(1, |running| running.0) - 1,
            },
            transfer,
            router: Box::new(RoundRobin::default()),
            peers: None,
            network: None,
            remote: None,
            directory: Learning::Exact,
            logged: false,
        };
        let run = Run::with(config, |_| Ok(shared.manager())).map_err(raise)?;
        Ok(Self { run: Mutex::new(Some(run)), tiers: shared.tiers() })
    }

    /// Play a trace to its end.
    #[pyo3(signature = (requests, on_record, decide=None, *, best=0))]
    fn run(
        &self,
        requests: &Bound<'_, PyAny>,
        on_record: &Bound<'_, PyAny>,
        decide: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::best)] best: usize,
    ) -> PyResult<()> {
        let py = requests.py();
        let report = on_record.as_unbound();
        let requests = requests.try_iter()?.unbind();
        let decide = decide.map(Bound::as_unbound);
        let mut run = self.take()?;
        run.report_decisions(decide.map(|_| best));
        let failed = Mutex::new(None);
        // The error itself is raised below. The run only has to stop.
        let stop = |error: PyErr| {
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            Error::closed("the trace failed")
        };
        // Threads may run Python between two requests.
        let played = py.detach(|| {
            let next = |id| {
                Python::attach(|py| {
                    let request = requests.bind(py).clone().next()?;
                    Some(request.and_then(|request| read(id, &request)).map_err(stop))
                })
            };
            let on_record = |record| {
                Python::attach(|py| report.call1(py, (row(&record),)).map(drop)).map_err(stop)
            };
            let on_decision = |decision| {
                let Some(decide) = decide else { return Ok(()) };
                let row = decision_row(&decision);
                Python::attach(|py| decide.call1(py, (row,)).map(drop)).map_err(stop)
            };
            run.run_deciding((0..).map_while(next), on_record, on_decision)
        });
        self.put(run);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => played.map_err(raise),
        }
    }

    /// Time of the last event, in nanoseconds.
    #[getter]
    fn now(&self) -> PyResult<u64> {
        self.look(|run| Ok(run.now()))
    }

    /// Per tier, over all machines: hits in blocks and tokens, and evictions by reason. All blocks
    /// evicted from a shared store count as dropped.
    fn tiers(&self) -> PyResult<Vec<TierCounts>> {
        self.look(|run| {
            let of = |tier| {
                let stats = run.machines().map(|machine| machine.calls.manager().stats(tier));
                stats.fold((0, 0, 0, 0, 0), |sum: TierCounts, tier| {
                    (
                        sum.0 + tier.hits,
                        sum.1 + tier.tokens_hit,
                        sum.2 + tier.evicted_clean,
                        sum.3 + tier.evicted_dirty,
                        sum.4 + tier.dropped,
                    )
                })
            };
            let mut tiers: Vec<TierCounts> = (0..self.tiers).map(of).collect();
            if let (Some(evicted), Some(last)) = (run.remote_evicted(), tiers.last_mut()) {
                (last.2, last.3, last.4) = (0, 0, evicted);
            }
            Ok(tiers)
        })
    }

    /// Per tier, over all machines: byte-seconds of prefetched blocks before their first use.
    fn prefetched_byte_s(&self) -> PyResult<Vec<u64>> {
        self.look(|run| Ok((0..self.tiers).map(|tier| run.prefetched(tier)).collect()))
    }

    /// Bytes, busy nanoseconds and queueing nanoseconds of each lane by name, over all machines.
    fn lanes(&self) -> PyResult<BTreeMap<String, (u64, u64, u64)>> {
        self.look(|run| {
            let lanes = run.lanes().into_iter();
            Ok(lanes.map(|(name, lane)| (name, (lane.bytes, lane.busy, lane.waited))).collect())
        })
    }

    /// Record each step and transmission, or a sample of the tiers every `sample_ns` nanoseconds (0
    /// disables samples).
    #[pyo3(signature = (*, spans=false, sample_ns=0), text_signature = "($self, *, spans=False, sample_ns=0)")]
    fn watch(
        &self,
        #[pyo3(from_py_with = number::spans)] spans: bool,
        #[pyo3(from_py_with = number::sample_ns)] sample_ns: u64,
    ) -> PyResult<()> {
        self.look(|run| {
            run.watch(spans, sample_ns);
            Ok(())
        })
    }

    /// Recorded spans: `(machine, lane, start_ns, end_ns, bytes)`. The lane of a step is None.
    fn spans(&self) -> PyResult<Vec<SpanRow>> {
        self.look(|run| {
            let names: Vec<_> = run.machines().map(|machine| machine.executor.lanes()).collect();
            let row = |span: Span| {
                let lane = match span.track {
                    Track::Step => None,
                    Track::Lane(lane) => Some(names[span.machine].spec(lane).name.clone()),
                    Track::Peers => Some(LANE.into()),
                };
                (span.machine, lane, span.start, span.end, span.bytes)
            };
            Ok(run.spans().into_iter().map(row).collect())
        })
    }

    /// Recorded samples: `(at_ns, machine, resident blocks by tier)`.
    fn samples(&self) -> PyResult<Vec<(u64, usize, Vec<u64>)>> {
        self.look(|run| {
            let samples = run.samples().iter();
            Ok(samples.map(|one| (one.at, one.machine, one.resident.clone())).collect())
        })
    }

    /// Logged calls to a machine's manager, in order.
    fn log<'py>(&self, py: Python<'py>, machine: usize) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        self.look(|run| {
            if machine >= run.machines().count() {
                return Err(bad(format!("there is no machine {machine}")));
            }
            run.log(machine).iter().map(|call| call_row(py, call)).collect()
        })
    }
}

/// Convert a request. The optional sixth item is a mapping with `last` (its session ends with it),
/// `answer` (its tokens), `scope`, `tool` (end of the session's tool and its reports), `after`
/// (positions of the requests to wait for), `pause` (delay between their ends and its arrival) and
/// `named` (later requests may wait for it).
fn read(id: u64, request: &Bound<'_, PyAny>) -> PyResult<Request> {
    let request = request.cast::<PyTuple>()?;
    let (arrival, tokens, input, output, session): RequestRow<'_> =
        request.get_slice(0, 5).extract()?;
    let more = request.get_item(5).ok();
    let more = more.as_ref().map(|more| more.cast::<PyDict>()).transpose()?;
    let more = |name| more.map_or(Ok(None), |more| more.get_item(name));
    let last = more("last")?.map_or(Ok(false), |last| last.extract())?;
    let (answer, tool, whose) = (more("answer")?, more("tool")?, more("scope")?);
    let (after, pause) = (more("after")?, more("pause")?);
    Ok(Request {
        id,
        arrival: nanos(&arrival, "arrival_ns")?,
        tokens: Tokens::new(&tokens)?.into_vec()?,
        answer: answer.map(|answer| Tokens::new(&answer)?.into_vec()).transpose()?,
        input: whole(&input, "input_tokens", u64::from(u32::MAX))?,
        output: whole(&output, "output_tokens", u64::from(u32::MAX))?,
        last,
        after: after.map_or(Ok(Vec::new()), |after| numbers(&after, "after", id))?,
        pause: pause.map_or(Ok(0), |pause| nanos(&pause, "pause"))?,
        named: more("named")?.map_or(Ok(false), |named| named.extract())?,
        scope: scope(whose.as_ref())?,
        tool: tool.map(|tool| read_tool(&tool)).transpose()?,
        session: session.map(|name| text(&name, "session").map(String::from)).transpose()?,
    })
}

/// `(ends_ns, [(when, states), ...])`, in thousandths.
fn read_tool(tool: &Bound<'_, PyAny>) -> PyResult<Tool> {
    let (ends, reports): (Bound<'_, PyAny>, Vec<(u32, u32)>) = tool.extract()?;
    Ok(Tool { ends: nanos(&ends, "ends_ns")?, reports })
}

/// `(machine, lane, start, end, bytes)`.
type SpanRow = (usize, Option<String>, u64, u64, u64);
