//! The calls that a run makes to a manager, and their log.
//!
//! The log is all that a manager was asked and all that it handed out: played into another manager
//! of the same settings it must give the same moves, slot for slot. Invariant: no manager is changed
//! but through here. Cost: none except the call if nothing is logged.

mod handed;

use std::sync::{Arc, MutexGuard};

use kvtrie_core::{
    Acquire, BlockEvent, DAY, Error, Handle, Hint, Kind, LeaseId, LoadMode, Locked, Manager, Mark,
    MoveId, Nanos, Outcome, PinId, Release, Result, Scope, Settings, Target, TierId, Token,
};

use crate::request::Request;

pub use handed::Handed;

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// `acquire`, with the lease, or 0 for no room.
    Acquire {
        /// The prompt.
        tokens: Vec<Token>,
        /// Tokens that stay to be computed.
        keep: usize,
        /// Tokens after the prompt.
        reserve: usize,
        /// Whether loads overlap with computation.
        layerwise: bool,
        /// Whose blocks, and the conversation.
        scope: Scope,
        /// Its name.
        session: Option<String>,
        /// The lease's id, 0 if there was no room.
        lease: LeaseId,
        /// When.
        now: Nanos,
    },
    /// `moves`, with what it handed out.
    Moves(Vec<Handed>),
    /// `complete`.
    Complete(Vec<MoveId>, Nanos),
    /// `commit`.
    Commit(LeaseId, Vec<Token>, Nanos),
    /// `release`.
    Release(LeaseId, Nanos),
    /// `hint` that a conversation is over.
    End(String, Nanos),
    /// `hint` of when a conversation goes on: the time until then.
    Progress(String, Nanos, Nanos),
    /// `hint` that a conversation's blocks be brought to memory, at once or by a time.
    Bring(String, Option<Nanos>, Nanos),
    /// `hint` that a conversation's blocks go to the last tier.
    Demote(String, Nanos),
    /// `hint` without one: loads that wait are due.
    LoadsDue(Nanos),
    /// `reserve` of a number of tokens, with whether there was room.
    Reserve(LeaseId, usize, bool, Nanos),
    /// `suspend` to the tier below the first.
    Suspend(LeaseId, Kind, Nanos),
    /// `resume`, with whether there was room.
    Resume(LeaseId, bool, Nanos),
    /// `hint` that a sequence's blocks be brought to the first tier.
    Prefetch(Vec<Token>, Nanos),
    /// `mark` of the blocks after the first ones, with whether there was room.
    Mark {
        /// The prompt up to the last block.
        tokens: Vec<Token>,
        /// Where.
        tier: TierId,
        /// Blocks at the front that stay as they are.
        skip: usize,
        /// When the first layer and all layers are there.
        times: (Nanos, Nanos),
        /// Whether there was room.
        fits: bool,
        /// When.
        now: Nanos,
    },
    /// `mark` that the blocks after the first ones have left, with whether that could be.
    Clear {
        /// The prompt up to the last block.
        tokens: Vec<Token>,
        /// Where.
        tier: TierId,
        /// Blocks at the front that stay as they are.
        skip: usize,
        /// Whether no request, move or other block needed them.
        fits: bool,
        /// When.
        now: Nanos,
    },
    /// `pin_copies`, with the pin.
    Pin(Vec<Handle>, TierId, PinId, Nanos),
    /// `unpin_copies`.
    Unpin(PinId, Nanos),
}

/// Report of a tool.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// The conversation that waits for it, and whose.
    session: String,
    scope: Scope,
    /// The time left that it states.
    left: Nanos,
    /// Whether it is the tool's first one.
    first: bool,
}

/// The hint that a report becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReportHint {
    /// `Progress`.
    #[default]
    Progress,
    /// `Prefetch` by the time that it states.
    Late,
    /// `Prefetch` at once.
    Early,
}

/// How reports of tools become hints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reporting {
    /// Which hint.
    pub hint: ReportHint,
    /// The tier on which the blocks are wanted.
    pub tier: TierId,
    /// Whether the blocks go to the last tier when the tool begins.
    pub demote: bool,
}

/// A manager with its log.
#[derive(Debug)]
pub struct Calls {
    manager: Arc<Locked>,
    settings: Settings,
    load: LoadMode,
    log: Option<Vec<Call>>,
    /// Slots that the last lease without room lacked.
    lacked: u64,
    /// Reports of tools to come, and when.
    reports: Vec<(Nanos, Report)>,
    /// How they become hints.
    pub(crate) reporting: Reporting,
}

impl Calls {
    /// Calls of a manager. With `logged` all calls are kept.
    #[must_use]
    pub fn new(manager: Arc<Locked>, load: LoadMode, logged: bool) -> Self {
        let settings = manager.lock().settings().clone();
        let (log, reports, reporting) = (logged.then(Vec::new), Vec::new(), Reporting::default());
        Self { manager, settings, load, log, lacked: 0, reports, reporting }
    }

    /// The manager, to look at.
    pub fn manager(&self) -> MutexGuard<'_, Manager> {
        self.manager.lock()
    }

    /// The manager's settings.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes the block events; this changes no decision.
    ///
    /// # Errors
    /// As [`Manager::take_block_events`].
    pub fn take_events(&mut self) -> Result<Vec<BlockEvent>> {
        self.manager.call(Manager::take_block_events)
    }

    /// The log, if one is kept.
    #[must_use]
    pub fn log(&self) -> &[Call] {
        self.log.as_deref().unwrap_or_default()
    }

    /// Slots that the last lease without room lacked.
    #[must_use]
    pub fn lacked(&self) -> u64 {
        self.lacked
    }

    fn note(&mut self, call: impl FnOnce() -> Call) {
        if let Some(log) = &mut self.log {
            log.push(call());
        }
    }

    /// Managers doubt a jump of more than a day until the next call bears it out: a trace may pause
    /// for longer.
    fn at(&mut self, now: Nanos) -> Result<()> {
        if now > self.manager().now().saturating_add(DAY) {
            self.note(|| Call::Complete(Vec::new(), now));
            self.manager.call(|manager| manager.complete(&[], &Outcome::default(), now))?;
        }
        Ok(())
    }

    /// Asks for a lease; `None` if there is no room.
    ///
    /// # Errors
    /// As [`Manager::acquire`], but for room.
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

    /// All moves that wait to be handed out, with stores of at most `stores` blocks to a remote tier.
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

    /// Reports moves that have ended well.
    ///
    /// # Errors
    /// As [`Manager::complete`].
    pub fn complete(&mut self, moves: &[MoveId], now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.complete(moves, &Outcome::default(), now))?;
        self.note(|| Call::Complete(moves.to_vec(), now));
        Ok(())
    }

    /// Appends tokens whose KV is written.
    ///
    /// # Errors
    /// As [`Manager::commit`].
    pub fn commit(&mut self, lease: LeaseId, tokens: &[Token], now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.commit(lease, tokens, now))?;
        self.note(|| Call::Commit(lease, tokens.to_vec(), now));
        Ok(())
    }

    /// Brings what is cached of a sequence to the first tier, as far as there is room.
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

    /// Marks the blocks after the first `skip` as arriving; returns whether there is room.
    ///
    /// # Errors
    /// As [`Manager::mark_behind`], but for room.
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
        let fits = match self.manager.call(|manager| manager.mark_behind(&mark, skip, now)) {
            Ok(_) => true,
            Err(Error::NoSpace { .. }) => false,
            Err(error) => return Err(error),
        };
        self.note(|| Call::Mark { tokens: tokens.to_vec(), tier, skip, times, fits, now });
        Ok(fits)
    }

    /// Clears the copies of the blocks after the first `skip`; returns whether that can be.
    ///
    /// # Errors
    /// As [`Manager::mark_behind`], but for copies that requests, moves or other blocks need.
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
        let fits = match self.manager.call(|manager| manager.mark_behind(&mark, skip, now)) {
            Ok(_) => true,
            Err(Error::Config(_)) => false,
            Err(error) => return Err(error),
        };
        self.note(|| Call::Clear { tokens: tokens.to_vec(), tier, skip, fits, now });
        Ok(fits)
    }

    /// Keeps copies where they are.
    ///
    /// # Errors
    /// As [`Manager::pin_copies`].
    pub fn pin(&mut self, blocks: &[Handle], tier: TierId, now: Nanos) -> Result<PinId> {
        self.at(now)?;
        let pin = self.manager.call(|manager| manager.pin_copies(blocks, tier, now))?;
        self.note(|| Call::Pin(blocks.to_vec(), tier, pin, now));
        Ok(pin)
    }

    /// Ends a pin.
    ///
    /// # Errors
    /// As [`Manager::unpin_copies`].
    pub fn unpin(&mut self, pin: PinId, now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.unpin_copies(pin, now))?;
        self.note(|| Call::Unpin(pin, now));
        Ok(())
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// As [`Manager::release`].
    pub fn release(&mut self, lease: LeaseId, now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.release(lease, now))?;
        self.note(|| Call::Release(lease, now));
        Ok(())
    }

    /// Ends a request: its lease, and its conversation if that ends with it.
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

    /// Takes the reports to come, and when.
    pub(crate) fn take_reports(&mut self) -> Vec<(Nanos, Report)> {
        std::mem::take(&mut self.reports)
    }

    /// Passes on when a conversation goes on.
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

    /// When loads that wait are due.
    ///
    /// # Errors
    /// As [`Manager::next_due`].
    pub(crate) fn next_due(&self) -> Result<Option<Nanos>> {
        self.manager.call(|manager| manager.next_due())
    }

    /// Begins the loads that are due.
    ///
    /// # Errors
    /// As [`Manager::hint`].
    pub fn loads_due(&mut self, now: Nanos) -> Result<()> {
        self.at(now)?;
        self.manager.call(|manager| manager.hint(&[], now))?;
        self.note(|| Call::LoadsDue(now));
        Ok(())
    }

    /// Makes room for `tokens` after a lease's end; returns whether there is any.
    ///
    /// # Errors
    /// As [`Manager::reserve`], but for room.
    pub fn reserve(&mut self, lease: LeaseId, tokens: usize, now: Nanos) -> Result<bool> {
        self.at(now)?;
        let fits = room(self.manager.call(|manager| manager.reserve(lease, tokens, now)))?;
        self.note(|| Call::Reserve(lease, tokens, fits, now));
        Ok(fits)
    }

    /// Preempts a lease: it keeps its tokens.
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

    /// Plans again for a suspended lease; returns whether there is room for it.
    ///
    /// # Errors
    /// As [`Manager::resume`], but for room.
    pub fn resume(&mut self, lease: LeaseId, now: Nanos) -> Result<bool> {
        self.at(now)?;
        let load = self.load;
        let fits = room(self.manager.call(|manager| manager.resume(lease, 0, load, now)))?;
        self.note(|| Call::Resume(lease, fits, now));
        Ok(fits)
    }
}

/// Whether a call found room.
fn room(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Error::NoSpace { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}
