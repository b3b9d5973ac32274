//! Calls of a run to a manager, and their log.
//!
//! The log has all calls and all issued moves. Replayed into a manager with the same
//! settings, it gives the same moves, slot for slot. Invariant: all changes of a manager go through
//! this module. Cost: only the call itself without a log.

mod handed;

use std::sync::{Arc, MutexGuard};

use kvtrie_core::{
    Acquire, BlockEvent, DAY, Error, Handle, Hint, Kind, LeaseId, LoadMode, Locked, Manager, Mark,
    MoveId, Nanos, Outcome, PinId, Release, Result, Scope, Settings, Target, TierId, Token,
};

use crate::request::Request;

pub use handed::Handed;

/// A logged call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// `acquire`, with the lease or 0 without room.
    Acquire {
        /// The prompt.
        tokens: Vec<Token>,
        /// Tokens at the end of the prompt to compute in any case.
        keep: usize,
        /// Tokens after the prompt.
        reserve: usize,
        /// Whether loads overlap with computation.
        layerwise: bool,
        /// Cache scope of the blocks and of the conversation.
        scope: Scope,
        /// Conversation name.
        session: Option<String>,
        /// Lease id, 0 without room.
        lease: LeaseId,
        /// Time of the call.
        now: Nanos,
    },
    /// `moves`, with the issued moves.
    Moves(Vec<Handed>),
    /// `complete`.
    Complete(Vec<MoveId>, Nanos),
    /// `commit`.
    Commit(LeaseId, Vec<Token>, Nanos),
    /// `release`.
    Release(LeaseId, Nanos),
    /// Session-end `hint`.
    End(String, Nanos),
    /// Progress `hint`: time until the next request of a conversation.
    Progress(String, Nanos, Nanos),
    /// Prefetch `hint` of a conversation to a memory tier, at once or by a deadline.
    Bring(String, Option<Nanos>, Nanos),
    /// Demotion `hint` of a conversation to the last tier.
    Demote(String, Nanos),
    /// Empty `hint`, to start the loads due now.
    LoadsDue(Nanos),
    /// `reserve` of a number of tokens, with its success.
    Reserve(LeaseId, usize, bool, Nanos),
    /// `suspend` to the tier below the first.
    Suspend(LeaseId, Kind, Nanos),
    /// `resume`, with its success.
    Resume(LeaseId, bool, Nanos),
    /// Prefetch `hint` of a token sequence to the first tier.
    Prefetch(Vec<Token>, Nanos),
    /// `mark` of the blocks after the first `skip`, with its success.
    Mark {
        /// The prompt up to the last block.
        tokens: Vec<Token>,
        /// Tier of the copies.
        tier: TierId,
        /// Leading blocks to leave unchanged.
        skip: usize,
        /// Arrival times of the first layer and of all layers.
        times: (Nanos, Nanos),
        /// Whether there was room.
        fits: bool,
        /// Time of the call.
        now: Nanos,
    },
    /// `mark` of the blocks after the first `skip` as removed, with its success.
    Clear {
        /// The prompt up to the last block.
        tokens: Vec<Token>,
        /// Tier of the copies.
        tier: TierId,
        /// Leading blocks to leave unchanged.
        skip: usize,
        /// False if a request, a move or a child block needs them.
        fits: bool,
        /// Time of the call.
        now: Nanos,
    },
    /// `pin_copies`, with the pin.
    Pin(Vec<Handle>, TierId, PinId, Nanos),
    /// `unpin_copies`.
    Unpin(PinId, Nanos),
}

/// Progress report of a tool.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// Conversation waiting for the tool, and its scope.
    session: String,
    scope: Scope,
    /// Reported time left.
    left: Nanos,
    /// Whether this is the first report of the tool.
    first: bool,
}

/// Hint made from a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReportHint {
    /// `Progress`.
    #[default]
    Progress,
    /// `Prefetch` with the reported time as its deadline.
    Late,
    /// `Prefetch` without a deadline.
    Early,
}

/// Conversion of tool reports to hints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reporting {
    /// Kind of hint.
    pub hint: ReportHint,
    /// Target tier of the blocks.
    pub tier: TierId,
    /// Whether the first report of a tool demotes the blocks to the last tier.
    pub demote: bool,
}

/// A manager with its log.
#[derive(Debug)]
pub struct Calls {
    manager: Arc<Locked>,
    settings: Settings,
    load: LoadMode,
    log: Option<Vec<Call>>,
    /// Slots missing at the last failed acquire.
    lacked: u64,
    /// Future tool reports, with their times.
    reports: Vec<(Nanos, Report)>,
    /// Conversion of reports to hints.
    pub(crate) reporting: Reporting,
}

impl Calls {
    /// Wrap a manager, and log its calls if `logged`.
    #[must_use]
    pub fn new(manager: Arc<Locked>, load: LoadMode, logged: bool) -> Self {
        let settings = manager.lock().settings().clone();
        let (log, reports, reporting) = (logged.then(Vec::new), Vec::new(), Reporting::default());
        Self { manager, settings, load, log, lacked: 0, reports, reporting }
    }

    /// Lock the manager for reading.
    pub fn manager(&self) -> MutexGuard<'_, Manager> {
        self.manager.lock()
    }

    /// The manager's settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Take the block events. This changes no decision.
    ///
    /// # Errors
    /// As [`Manager::take_block_events`].
    pub fn take_events(&mut self) -> Result<Vec<BlockEvent>> {
        self.manager.call(Manager::take_block_events)
    }

    /// Logged calls. Empty without a log.
    #[must_use]
    pub fn log(&self) -> &[Call] {
        self.log.as_deref().unwrap_or_default()
    }

    /// Slots missing at the last failed acquire.
    #[must_use]
    pub fn lacked(&self) -> u64 {
        self.lacked
    }

    fn note(&mut self, call: impl FnOnce() -> Call) {
        if let Some(log) = &mut self.log {
            log.push(call());
        }
    }

    /// A manager accepts a time jump of more than a day only if the next call confirms it. Traces
    /// may pause for longer, so an empty call confirms the time first.
    fn at(&mut self, now: Nanos) -> Result<()> {
        if now > self.manager().now().saturating_add(DAY) {
            self.note(|| Call::Complete(Vec::new(), now));
            self.manager.call(|manager| manager.complete(&[], &Outcome::default(), now))?;
        }
        Ok(())
    }

    /// Acquire a lease. Returns `None` without room.
    ///
    /// # Errors
    /// As [`Manager::acquire`], except for missing room.
    pub fn acquire(
        &mut self,
        tokens: &[Token],
        (keep, reserve): (usize, usize),
        layerwise: bool,
        (scope, session): (&Scope, Option<&str>),
        now: Nanos,
    ) -> Result<Option<LeaseId>> {
        self.at(now)?;
        let ask = Acquire {
            tokens,
            scope: scope.clone(),
            session,
            keep,
            reserve,
            load: self.load,
            layerwise,
            ..Acquire::default()
        };
        let found = match self.manager.call(|manager| manager.acquire(&ask, now)) {
            Ok(lease) => Some(lease),
            Err(Error::NoSpace { wanted, free, .. }) => {
                self.lacked = wanted.saturating_sub(free);
                None
            }
            Err(error) => return Err(error),
        };
        self.note(|| Call::Acquire {
            tokens: tokens.to_vec(),
            keep,
            reserve,
            layerwise,
            scope: scope.clone(),
            session: session.map(String::from),
            lease: found.unwrap_or(0),
            now,
        });
        Ok(found)
    }

    /// Take all pending moves, with stores of at most `stores` blocks to a remote tier.
    ///
    /// # Errors
    /// As [`Manager::hand_out`].
    pub fn moves(&mut self, stores: usize) -> Result<Vec<Handed>> {
        let handed =
            self.manager.call(|manager| manager.hand_out(usize::MAX, stores, Handed::of))?;
        if !handed.is_empty() {
            self.note(|| Call::Moves(handed.clone()));
        }
        Ok(handed)
    }

    /// Report successfully completed moves.
    ///
    /// # Errors
    /// As [`Manager::complete`].
    pub fn complete(&mut self, moves: &[MoveId], now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.complete(moves, &Outcome::default(), now))?;
        self.note(|| Call::Complete(moves.to_vec(), now));
        Ok(())
    }

    /// Append tokens with written KV.
    ///
    /// # Errors
    /// As [`Manager::commit`].
    pub fn commit(&mut self, lease: LeaseId, tokens: &[Token], now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.commit(lease, tokens, now))?;
        self.note(|| Call::Commit(lease, tokens.to_vec(), now));
        Ok(())
    }

    /// Prefetch the cached blocks of a sequence to the first tier, as far as there is room.
    ///
    /// # Errors
    /// As [`Manager::hint`].
    pub fn prefetch(&mut self, tokens: &[Token], now: Nanos) -> Result<()> {
        self.at(now)?;
        let target = Target::Tokens { tokens: tokens.to_vec(), scope: Scope::default() };
        self.manager.call(|manager| {
            manager.hint(&[Hint::Prefetch { target, tier: 0, deadline: None }], now)
        })?;
        self.note(|| Call::Prefetch(tokens.to_vec(), now));
        Ok(())
    }

    /// Mark the blocks after the first `skip` as arriving. Returns whether there is room.
    ///
    /// # Errors
    /// As [`Manager::mark_after`], except for missing room.
    pub fn mark(
        &mut self,
        tokens: &[Token],
        tier: TierId,
        skip: usize,
        times: (Nanos, Nanos),
        now: Nanos,
    ) -> Result<bool> {
        self.at(now)?;
        let (first, ready) = (Some(times.0), Some(times.1));
        let mark = Mark { tokens, scope: Scope::default(), tier, present: true, ready, first };
        let fits = match self.manager.call(|manager| manager.mark_after(&mark, skip, now)) {
            Ok(_) => true,
            Err(Error::NoSpace { .. }) => false,
            Err(error) => return Err(error),
        };
        self.note(|| Call::Mark { tokens: tokens.to_vec(), tier, skip, times, fits, now });
        Ok(fits)
    }

    /// Clear the copies of the blocks after the first `skip`. Returns false if a copy is in use.
    ///
    /// # Errors
    /// As [`Manager::mark_after`], except for copies in use by requests, moves or child blocks.
    pub fn clear(
        &mut self,
        tokens: &[Token],
        tier: TierId,
        skip: usize,
        now: Nanos,
    ) -> Result<bool> {
        self.at(now)?;
        let scope = Scope::default();
        let mark = Mark { tokens, scope, tier, present: false, ready: None, first: None };
        let fits = match self.manager.call(|manager| manager.mark_after(&mark, skip, now)) {
            Ok(_) => true,
            Err(Error::Config(_)) => false,
            Err(error) => return Err(error),
        };
        self.note(|| Call::Clear { tokens: tokens.to_vec(), tier, skip, fits, now });
        Ok(fits)
    }

    /// Pin copies on their tier.
    ///
    /// # Errors
    /// As [`Manager::pin_copies`].
    pub fn pin(&mut self, blocks: &[Handle], tier: TierId, now: Nanos) -> Result<PinId> {
        self.at(now)?;
        let pin = self.manager.call(|manager| manager.pin_copies(blocks, tier, now))?;
        self.note(|| Call::Pin(blocks.to_vec(), tier, pin, now));
        Ok(pin)
    }

    /// End a pin.
    ///
    /// # Errors
    /// As [`Manager::unpin_copies`].
    pub fn unpin(&mut self, pin: PinId, now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.unpin_copies(pin, now))?;
        self.note(|| Call::Unpin(pin, now));
        Ok(())
    }

    /// End a lease.
    ///
    /// # Errors
    /// As [`Manager::release`].
    pub fn release(&mut self, lease: LeaseId, now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.release(lease, now))?;
        self.note(|| Call::Release(lease, now));
        Ok(())
    }

    /// End the lease of a request, and its conversation after the last request.
    ///
    /// # Errors
    /// As [`Manager::release`] and [`Manager::hint`].
    pub fn end(&mut self, lease: LeaseId, request: &Request, now: Nanos) -> Result<()> {
        self.release(lease, now)?;
        if let Some(session) = request.ends() {
            let (name, scope) = (session.to_owned(), request.scope.clone());
            self.manager.call(|manager| {
                manager.hint(&[Hint::Release(Release::Session { name, scope })], now)
            })?;
            self.note(|| Call::End(session.to_owned(), now));
        }
        if let (Some(tool), Some(session)) = (&request.tool, &request.session) {
            let (session, scope) = (session.clone(), request.scope.clone());
            let reports = tool.reports(now).enumerate().map(|(number, (at, left))| {
                let (session, scope) = (session.clone(), scope.clone());
                (at, Report { session, scope, left, first: number == 0 })
            });
            self.reports.extend(reports);
        }
        Ok(())
    }

    /// Take the future reports, with their times.
    pub(crate) fn take_reports(&mut self) -> Vec<(Nanos, Report)> {
        std::mem::take(&mut self.reports)
    }

    /// Send a report to the manager as a hint.
    ///
    /// # Errors
    /// As [`Manager::hint`].
    pub(crate) fn report(&mut self, report: Report, now: Nanos) -> Result<()> {
        self.at(now)?;
        let Report { session, scope, left: eta, first } = report;
        let Reporting { hint, tier, demote } = self.reporting;
        let target = Target::Session { name: session.clone(), scope: scope.clone() };
        if demote && first {
            let tier = self.settings.tiers.len() - 1;
            self.hint(Hint::Demote { target: target.clone(), tier }, now)?;
            self.note(|| Call::Demote(session.clone(), now));
        }
        if hint == ReportHint::Progress {
            self.hint(Hint::Progress { name: session.clone(), scope, tier, eta }, now)?;
            self.note(|| Call::Progress(session, eta, now));
        } else {
            let deadline = (hint == ReportHint::Late).then(|| now.saturating_add(eta));
            self.hint(Hint::Prefetch { target, tier, deadline }, now)?;
            self.note(|| Call::Bring(session, deadline, now));
        }
        Ok(())
    }

    fn hint(&mut self, hint: Hint, now: Nanos) -> Result<()> {
        self.manager.call(|manager| manager.hint(&[hint], now)).map(drop)
    }

    /// Time of the next load with a deadline.
    ///
    /// # Errors
    /// As [`Manager::next_due`].
    pub(crate) fn next_due(&self) -> Result<Option<Nanos>> {
        self.manager.call(|manager| manager.next_due())
    }

    /// Start the loads due at `now`.
    ///
    /// # Errors
    /// As [`Manager::hint`].
    pub fn loads_due(&mut self, now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.hint(&[], now))?;
        self.note(|| Call::LoadsDue(now));
        Ok(())
    }

    /// Make room for `tokens` after the end of a lease. Returns whether there is room.
    ///
    /// # Errors
    /// As [`Manager::reserve`], except for missing room.
    pub fn reserve(&mut self, lease: LeaseId, tokens: usize, now: Nanos) -> Result<bool> {
        self.at(now)?;
        let fits = room(self.manager.call(|manager| manager.reserve(lease, tokens, now)))?;
        self.note(|| Call::Reserve(lease, tokens, fits, now));
        Ok(fits)
    }

    /// Preempt a lease. It keeps its tokens.
    ///
    /// # Errors
    /// As [`Manager::suspend`].
    pub fn suspend(&mut self, lease: LeaseId, now: Nanos) -> Result<()> {
        self.at(now)?;
        let below = self.settings.tiers.get(1).map_or(Kind::Host, |tier| tier.kind);
        self.manager.call(|manager| manager.suspend(lease, below, now))?;
        self.note(|| Call::Suspend(lease, below, now));
        Ok(())
    }

    /// Plan a suspended lease again. Returns whether there is room.
    ///
    /// # Errors
    /// As [`Manager::resume`], except for missing room.
    pub fn resume(&mut self, lease: LeaseId, now: Nanos) -> Result<bool> {
        self.at(now)?;
        let load = self.load;
        let fits = room(self.manager.call(|manager| manager.resume(lease, 0, load, now)))?;
        self.note(|| Call::Resume(lease, fits, now));
        Ok(fits)
    }
}

/// Convert `NoSpace` to false.
fn room(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Error::NoSpace { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
