//! Conversion of Python's settings dataclasses to the core's.
//!
//! Invariant: a wrong name or number is a `ConfigError` listing the accepted values. Cost: once per
//! manager.

use kvtrie_core::{
    CostModel, DropOrder, Group, GroupKind, Groups, Kind, LaneSpec, Objective, Owner, Settings,
    Structure, TierSpec, Write,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::error::{bad, raise};
use crate::memory::items;
use crate::number::{nanos, shown, small};
use crate::text::{choice, chosen, text};

/// Limit of tiers. The core checks their combination.
const MOST_TIERS: usize = 16;

/// Default `free_low` above a remote tier.
const WRITTEN_AHEAD: f64 = 0.25;

/// Arguments defining blocks and tiers.
pub(crate) struct Given<'a, 'py> {
    pub(crate) model: &'a Bound<'py, PyAny>,
    pub(crate) tiers: &'a [Bound<'py, PyAny>],
    pub(crate) block_tokens: u32,
    pub(crate) token_weight: u32,
    pub(crate) cost: Option<&'a Bound<'py, PyAny>>,
    pub(crate) resume: Option<&'a Bound<'py, PyAny>>,
}

impl Given<'_, '_> {
    /// Real tokens per block, each with its KV.
    fn real_tokens(&self) -> PyResult<u32> {
        let (block, weight, most) = (self.block_tokens, self.token_weight, u32::MAX);
        block.checked_mul(weight).ok_or_else(|| {
            bad(format!("block_tokens {block} times token_weight {weight} is above {most}"))
        })
    }
}

/// Convert the arguments, with defaults for all remaining settings. The core checks their
/// consistency.
pub(crate) fn settings(given: &Given<'_, '_>) -> PyResult<Settings> {
    let model = given.model;
    instance(model, "model", "kvtrie.model.shape", "ModelShape")?;
    for tier in given.tiers {
        instance(tier, "a tier", "kvtrie.settings.tier", "Tier")?;
    }
    if given.block_tokens == 0 || given.token_weight == 0 {
        return Err(bad(format!(
            "block_tokens is {} and token_weight is {}, at least 1 wanted",
            given.block_tokens, given.token_weight
        )));
    }
    let resume = given.resume.map(|resume| groups(resume, given)).transpose()?.flatten();
    let blocks = |at: usize| resume.as_ref().map(|resume| resume.blocks[at]);
    let specs = given.tiers.iter().enumerate().map(|(at, tier)| spec(tier, given, blocks(at)));
    let mut tiers = specs.collect::<PyResult<Vec<_>>>()?;
    if let [.., above, last] = &mut tiers[..]
        && last.kind == Kind::Remote
        && above.free_low == 0.0
    {
        // No victim is written to a shared store, so blocks are written ahead of eviction.
        above.free_low = WRITTEN_AHEAD;
    }
    let (layers, layer_bytes) = if let Some(resume) = &resume {
        (resume.layers, resume.layer_bytes)
    } else {
        let bytes = model.call_method1("layer_bytes", (given.real_tokens()?,))?;
        let layers = small(&model.getattr("layers")?, "layers", u16::MAX)?;
        (layers, nanos(&bytes, "bytes of a layer of a block")?)
    };
    Ok(Settings {
        fingerprint: model.call_method0("identity")?.extract()?,
        layers,
        layer_bytes,
        block_tokens: given.block_tokens,
        token_weight: given.token_weight,
        tiers,
        policy: "learned".to_owned(),
        reuse: true,
        epsilon: 0.015_625,
        cost: cost(given.cost, model)?,
        priced: given.cost.is_some_and(|cost| cost.eq("python").unwrap_or(false)),
        structure: Structure::LeafOnly,
        drop_order: DropOrder::Shallow,
        ranks: 1,
        events: 0,
        block_events: 0,
        eviction_log: 0,
        groups: resume.map(|resume| resume.groups),
        explain: false,
        producer_key: None,
    })
}

/// Key for hashing producers, derived from a manager's `secret`.
pub(crate) fn secret_key(given: &Bound<'_, PyAny>) -> PyResult<Option<[u8; 32]>> {
    if given.is_none() {
        return Ok(None);
    }
    let Ok(secret) = given.cast::<PyBytes>() else {
        let kind = given.get_type();
        return Err(bad(format!("secret is of type {kind}, bytes or None wanted")));
    };
    if secret.as_bytes().is_empty() {
        return Err(bad("secret is empty"));
    }
    Ok(Some(kvtrie_core::producer_key(secret.as_bytes())))
}

/// Kind, window, sinks, slot bytes and layers of a group.
type GroupRow = (String, u64, u64, u64, u16);

/// Of a tier: maximum blocks of the first group, bytes, and slot bytes of each group.
type RoomRow = (u32, u64, Vec<u64>);

/// Groups, bytes per layer of the first group, room of each tier, and resume points.
type Plan = (Vec<GroupRow>, u64, Vec<RoomRow>, (u32, u32));

/// Groups of a model, and the size of the first group.
struct Resume {
    groups: Groups,
    layers: u16,
    layer_bytes: u64,
    /// Blocks by tier.
    blocks: Vec<u32>,
}

/// Page size shared by slots of these sizes.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "pyo3 converts to a value")]
pub(crate) fn page_bytes(slots: Vec<u64>) -> PyResult<u64> {
    kvtrie_core::page_bytes(&slots).map_err(raise)
}

/// Groups of the model, each with the blocks required by resume points. `None` for a single group.
fn groups(resume: &Bound<'_, PyAny>, given: &Given<'_, '_>) -> PyResult<Option<Resume>> {
    instance(resume, "resume", "kvtrie.settings.resume", "ResumePoints")?;
    let tiers = PyTuple::new(resume.py(), given.tiers)?;
    let plan = resume.call_method1("_plan", (given.model, tiers, given.real_tokens()?))?;
    let Some((rows, layer_bytes, rooms, points)) = plan.extract::<Option<Plan>>()? else {
        return Ok(None);
    };
    let layers = rows.first().map_or(1, |row| row.4);
    let group = |(kind, window, sinks, slot_bytes, layers): GroupRow| {
        let kinds = [
            ("full", GroupKind::Full),
            ("sliding", GroupKind::Sliding { window, sinks }),
            ("chunked", GroupKind::Chunked { chunk: window }),
            ("state", GroupKind::State),
        ];
        Ok(Group { kind: chosen(&kind, "kind", &kinds)?, slot_bytes, layers })
    };
    let groups = rows.into_iter().map(group).collect::<PyResult<_>>()?;
    let blocks = rooms.iter().map(|room| room.0).collect();
    let (bytes, slots) = rooms.into_iter().map(|(_, bytes, slots)| (bytes, slots)).unzip();
    let groups = Groups { groups, bytes, slots, newest: points.0, every: points.1 };
    Ok(Some(Resume { groups, layers, layer_bytes, blocks }))
}

/// Unconverted tiers of an argument.
pub(crate) fn tiers<'py>(given: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if given.is_instance_of::<PyString>() || given.try_iter().is_err() {
        return Err(bad(format!("tiers are {}, a sequence of Tiers wanted", shown(given))));
    }
    items(given, MOST_TIERS, "tiers", |_, tier| Ok(tier))
}

/// Check for an instance of our class.
fn instance(given: &Bound<'_, PyAny>, what: &str, module: &str, class: &str) -> PyResult<()> {
    if given.is_instance(&given.py().import(module)?.getattr(class)?)? {
        return Ok(());
    }
    Err(bad(format!("{what} is {}, a {class} wanted", shown(given))))
}

/// Parse a policy argument. The core checks its name.
pub(crate) fn policy(given: &Bound<'_, PyAny>) -> PyResult<String> {
    text(given, "policy").map(str::to_owned)
}

/// Whether events are residency events instead of evictions.
pub(crate) fn of_residency(given: &Bound<'_, PyAny>) -> PyResult<bool> {
    choice(given, "events_of", &[("evictions", false), ("residency", true)])
}

/// Parse an objective.
pub(crate) fn objective(given: &Bound<'_, PyAny>) -> PyResult<Objective> {
    choice(
        given,
        "objective",
        &[("cost", Objective::Cost), ("balanced", Objective::Balanced), ("hits", Objective::Hits)],
    )
}

/// Parse a drop order.
pub(crate) fn drop_order(given: &Bound<'_, PyAny>) -> PyResult<DropOrder> {
    choice(given, "drop_order", &[("shallow", DropOrder::Shallow), ("seed", DropOrder::Seed)])
}

/// Parse the destination tier of a suspension.
pub(crate) fn to(given: &Bound<'_, PyAny>) -> PyResult<Kind> {
    kind(text(given, "to")?)
}

/// Parse a tier kind.
fn kind(name: &str) -> PyResult<Kind> {
    Kind::parse(name)
        .ok_or_else(|| bad(format!("a tier is 'gpu', 'host', 'disk' or 'remote', not '{name}'")))
}

/// Require a fingerprint of the model for KV readable by different processes.
pub(crate) fn require_fingerprint(model: &Bound<'_, PyAny>, what: &str) -> PyResult<()> {
    let shapes = model.py().import("kvtrie.model.shape")?;
    shapes.call_method1("require_fingerprint", (model, what)).map(drop)
}

/// Convert a tier. `shared` is its number of blocks if the model's groups share its bytes.
fn spec(tier: &Bound<'_, PyAny>, given: &Given<'_, '_>, shared: Option<u32>) -> PyResult<TierSpec> {
    let word = |name: &str| tier.getattr(name)?.extract::<String>();
    let block = (given.model, given.real_tokens()?);
    let outlives: bool = tier.call_method0("outlives")?.extract()?;
    if outlives {
        require_fingerprint(given.model, &format!("tier '{}'", word("kind")?))?;
    }
    let (read, store) = tier.call_method1("paced", block)?.extract()?;
    let blocks = match shared {
        Some(blocks) => blocks,
        None => small(&tier.call_method1("room", block)?, "blocks of a tier", u32::MAX)?,
    };
    let owners = [("kvtrie", Owner::Kvtrie), ("engine", Owner::Engine), ("none", Owner::Nobody)];
    let writes = [("back", Write::Back), ("through", Write::Through), ("never", Write::Never)];
    Ok(TierSpec {
        kind: kind(&word("kind")?)?,
        blocks,
        owner: chosen(&word("owner")?, "owner", &owners)?,
        write: chosen(&word("write")?, "write", &writes)?,
        admit_after: small(&tier.getattr("admit_after")?, "admit_after", u32::MAX)?,
        free_low: tier.getattr("free_low")?.extract()?,
        growth_reserve: tier.getattr("growth_reserve")?.extract()?,
        retained_share: tier.getattr("retained_share")?.extract()?,
        layer_slots: tier.getattr("layer_slots")?.extract()?,
        kept: outlives,
        policy: tier.getattr("policy")?.extract()?,
        read: lane(&read)?,
        store: lane(&store)?,
    })
}

pub(crate) fn lane(lane: &Bound<'_, PyAny>) -> PyResult<LaneSpec> {
    instance(lane, "a lane", "kvtrie.settings.tier", "Lane")?;
    // Bandwidths are often floats, for example 12e9.
    let whole =
        lane.py().get_type::<pyo3::types::PyInt>().call1((lane.getattr("bytes_per_s")?,))?;
    Ok(LaneSpec {
        name: lane.getattr("name")?.extract()?,
        bytes_per_s: nanos(&whole, "bytes_per_s of a lane")?,
        latency_ns: nanos(&lane.getattr("latency_ns")?, "latency_ns of a lane")?,
        shares: lane.getattr("shares")?.extract()?,
    })
}

/// Convert a `Cost` or a name. `None` is the default cost.
fn cost(given: Option<&Bound<'_, PyAny>>, model: &Bound<'_, PyAny>) -> PyResult<CostModel> {
    let class = model.py().import("kvtrie.model.cost")?.getattr("Cost")?;
    let named = given.map(|given| given.extract::<String>().unwrap_or_default());
    let cost = match (named.as_deref(), given) {
        (None | Some("default" | "python"), _) => class.call_method1("default", (model,))?,
        (Some("seed"), _) => class.call_method0("seed")?,
        (_, Some(cost)) if cost.is_instance(&class)? => cost.clone(),
        (_, other) => {
            let other = other.map(shown).unwrap_or_default();
            return Err(bad(format!("cost is 'default', 'seed', 'python' or a Cost, not {other}")));
        }
    };
    let number = |name: &str| cost.getattr(name)?.extract::<f64>();
    let ns_per_token = match cost.getattr("ns_per_token")?.extract::<Option<f64>>()? {
        Some(stated) => stated,
        None => class.call_method1("ns_of", (model,))?.extract()?,
    };
    match cost.getattr("table")?.extract::<Option<Vec<(u64, f64)>>>()? {
        Some(points) => CostModel::table(points, ns_per_token),
        None => {
            CostModel::affine(number("alpha")?, number("beta")?, number("constant")?, ns_per_token)
        }
    }
    .map_err(raise)
}
