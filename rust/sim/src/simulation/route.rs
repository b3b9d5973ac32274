//! Routing of a request, and the report of the decision.
//!
//! Invariant: a router not using hits causes no lookup, except for reported decisions. Cost: the
//! directory's query.

use kvtrie_core::{Error, Result, Scope};

use super::{Server, Simulation};
use crate::decision::{Backlog, Choice, Decision, Work};
use crate::directory::{Directory, Exact};
use crate::event::MachineId;
use crate::request::Request;
use crate::router::Candidate;

impl Simulation {
    /// Route a request and start it. Returns the decision, if reported.
    pub(super) fn arrive(&mut self, request: Request) -> Result<Option<Decision>> {
        // Routers, peers and shared stores look up prompts without a scope.
        let several = self.servers.len() > 1 || self.remote.is_some() || self.prefetches;
        if several && request.scope != Scope::default() {
            return Err(Error::config(format!(
                "request {} has a scope, with {} machines, a store of theirs or prefetches on \
                 arrival: requests with a scope need one machine without them",
                request.id,
                self.servers.len()
            )));
        }
        let candidates = self.candidates(&request)?;
        let chosen = self.router.route(&request, &candidates);
        let mut work = Work { tokens: request.input, compute: 0 };
        let mut decision = None;
        if let (Some(count), Some(backlog)) = (self.decisions, &self.backlog) {
            let choices = self.choices(&request, backlog)?;
            work.compute = choices[chosen].cost.saturating_sub(backlog.of(chosen).compute);
            decision = Some(Decision::new((request.id, self.now), chosen, choices, count));
        }
        if let Some(backlog) = &mut self.backlog {
            backlog.sent(request.id, chosen, work);
        }
        let Server { machine, engine, .. } = &mut self.servers[chosen];
        if self.prefetches {
            let weight = u64::from(machine.calls.settings().token_weight);
            let keep = machine.find(&request.tokens, request.keep(self.keep, weight), self.now)?;
            let usable = request.tokens.len().saturating_sub(keep);
            machine.calls.prefetch(&request.tokens[..usable], self.now)?;
            machine.take(self.now)?;
        }
        engine.push(request, self.now);
        self.follow(chosen)?;
        Ok(decision)
    }

    /// Machine states for the router.
    pub(super) fn candidates(&self, request: &Request) -> Result<Vec<Candidate>> {
        let fronts = self.servers.iter().take(self.fronts());
        let loads = fronts.map(|server| server.engine.load());
        let mut all: Vec<Candidate> =
            loads.map(|load| Candidate { load, ..Candidate::default() }).collect();
        if self.router.looks() {
            let hits = self.hits(request, &*self.directory)?;
            for (machine, (candidate, hit)) in all.iter_mut().zip(hits).enumerate() {
                candidate.hit = hit;
                candidate.queued = self.backlog.as_ref().map_or(0, |all| all.of(machine).tokens);
            }
        }
        Ok(all)
    }

    /// Cost of each machine for a request, from exact lookups.
    pub(super) fn choices(&self, request: &Request, backlog: &Backlog) -> Result<Vec<Choice>> {
        let hits = self.hits(request, &Exact)?.into_iter().take(self.fronts()).enumerate();
        let choice = |(machine, hit): (MachineId, u64)| {
            let Work { tokens: queued, compute } = backlog.of(machine);
            let own = self.servers[machine].cost.span(hit, request.input - hit);
            Choice { machine, hit, queued, cost: compute.saturating_add(own) }
        };
        Ok(hits.map(choice).collect())
    }

    /// Prompt tokens cached on each machine, according to a directory.
    pub(super) fn hits(&self, request: &Request, directory: &dyn Directory) -> Result<Vec<u64>> {
        let settings = self.servers[0].machine.calls.settings();
        let weight = u64::from(settings.token_weight);
        let block = u64::from(settings.block_tokens) * weight;
        let prompt = request.prompt(self.keep, weight);
        let blocks = directory.resident(prompt, &mut self.machines())?;
        Ok(blocks.into_iter().map(|blocks| (blocks as u64 * block).min(request.input)).collect())
    }
}
