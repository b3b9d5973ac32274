//! Isolation: calls of one tenant change no state of another's, whatever names they use.

use kvtrie_core::{
    Acquire, Asked, Hint, HintReply, Kind, LeaseId, LoadMode, Release, Retain, Scope, Settings,
    Target, TierId, TierSpec, Token,
};
use proptest::prelude::*;

use crate::rig::{GPU, HOST, Rig, all_of, settings, share, tier, tokens};

/// One call of a tenant; both draw from the same names and tokens.
#[derive(Clone, Debug)]
struct Call {
    mine: bool,
    action: Action,
    name: &'static str,
    stem: u32,
    blocks: usize,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Serve,
    GiveUp,
    /// Takes a lease, or ends the current one.
    Hold,
    /// Forks the current lease, and ends the fork.
    Fork,
    /// Suspends the current lease and resumes it.
    Suspend,
    RetainSession(u8),
    RetainTokens(u8),
    RetainLease(u8),
    ReleaseSession,
    ReleaseOwner,
    ReleaseTokens,
    Demote,
    Prefetch,
}

fn scope(mine: bool, share_after: u32) -> Scope {
    let tenant = if mine { b"mine".to_vec() } else { b"other".to_vec() };
    Scope { tenant, share_after, ..Scope::default() }
}

/// A manager, and the lease that each tenant holds.
struct Managed {
    rig: Rig,
    held: [Option<LeaseId>; 2],
    /// Producers of a shared block; 0 shares none.
    share_after: u32,
}

impl Managed {
    fn scope(&self, mine: bool) -> Scope {
        scope(mine, self.share_after)
    }

    fn serve(&mut self, call: &Call, commits: bool) -> LeaseId {
        let prompt = tokens(call.stem, call.blocks);
        let ask =
            Acquire { scope: self.scope(call.mine), session: Some(call.name), ..all_of(&prompt) };
        let id = self.rig.ask(&ask).expect("there is room");
        self.rig.run();
        if commits {
            let held = self.rig.manager.lease_tokens(id).expect("held");
            self.rig.commit(id, &prompt[held..]);
        }
        id
    }

    fn carry_out(&mut self, call: &Call) -> Vec<HintReply> {
        let (name, whose) = (call.name.to_owned(), usize::from(call.mine));
        let path: Vec<Token> = tokens(call.stem, call.blocks);
        let session = || Target::Session { name: name.clone(), scope: self.scope(call.mine) };
        let retain = |target, priority, owner| {
            let decode_priority = matches!(target, Target::Session { .. }).then_some(20);
            Hint::Retain(Retain { owner, decode_priority, ..crate::rig::retain(target, priority) })
        };
        let sequence = || Target::Tokens { tokens: path.clone(), scope: self.scope(call.mine) };
        let hint = match call.action {
            Action::Serve | Action::GiveUp => {
                let id = self.serve(call, matches!(call.action, Action::Serve));
                self.rig.release(id);
                return Vec::new();
            }
            Action::Hold => {
                match self.held[whose].take() {
                    Some(id) => drop(self.rig.release(id)),
                    None => self.held[whose] = Some(self.serve(call, true)),
                }
                return Vec::new();
            }
            Action::Fork | Action::Suspend => {
                let Some(id) = self.held[whose] else { return Vec::new() };
                if matches!(call.action, Action::Fork) {
                    let forks = self.rig.call(|m, now| m.fork(id, 1, now)).expect("nothing waits");
                    self.rig.release(forks[0]);
                } else {
                    self.rig.call(|m, now| m.suspend(id, Kind::Host, now)).expect("it is active");
                    self.rig.run();
                    self.rig.call(|m, now| m.resume(id, 0, LoadMode::All, now)).expect("room");
                    self.rig.run();
                }
                return Vec::new();
            }
            Action::RetainSession(priority) => retain(session(), priority, None),
            Action::RetainTokens(priority) => retain(sequence(), priority, Some(name.clone())),
            Action::RetainLease(priority) => {
                let Some(id) = self.held[whose] else { return Vec::new() };
                retain(Target::Lease(id), priority, None)
            }
            Action::ReleaseSession => {
                Hint::Release(Release::Session { name, scope: self.scope(call.mine) })
            }
            Action::ReleaseOwner => {
                Hint::Release(Release::Owner { name, scope: self.scope(call.mine) })
            }
            Action::ReleaseTokens => {
                let (tokens, scope) = (path.clone(), self.scope(call.mine));
                Hint::Release(Release::Tokens { tokens, scope, owner: Some(name) })
            }
            Action::Demote => Hint::Demote { target: session(), tier: HOST },
            Action::Prefetch => Hint::Prefetch { target: session(), tier: GPU, deadline: None },
        };
        self.rig.call(|manager, now| manager.hint(&[hint], now)).expect("a good hint")
    }

    /// All state of the first tenant's blocks (residencies, hints, values, order of eviction) and
    /// sessions.
    fn mine(&self) -> String {
        let manager = &self.rig.manager;
        let mut all = Vec::new();
        let mut ranked: Vec<(TierId, usize, u32, usize)> = Vec::new();
        for stem in 0..STEMS {
            let known = manager
                .cached_blocks(&tokens(stem, BLOCKS), &self.scope(true))
                .expect("a good scope");
            for (at, &block) in known.iter().enumerate() {
                all.push(format!("{stem} {at} {:?}", manager.priority(block)));
                for tier in [GPU, HOST] {
                    let Ok(mut why) = manager.explain(block, tier, self.rig.now) else { continue };
                    if let Some(rank) = why.rank.take() {
                        ranked.push((tier, rank, stem, at));
                    }
                    all.push(format!("{tier} {why:?}"));
                }
            }
        }
        ranked.sort_unstable();
        all.extend(ranked.iter().map(|(tier, _, stem, at)| format!("{tier}: {stem} {at}")));
        let sessions = manager.sessions(&self.scope(true)).expect("a good scope");
        let held =
            self.held[1].map(|id| manager.session_name(id).expect("held").map(str::to_owned));
        all.push(format!("{held:?}"));
        all.extend(
            sessions.iter().map(|(name, length, path)| format!("{name} {length} {}", path.len())),
        );
        all.join("\n")
    }

    /// All that the first tenant can learn of blocks.
    fn seen(&mut self) -> String {
        let (mine, now) = (self.scope(true), self.rig.now);
        let mut all = Vec::new();
        for stem in 0..STEMS {
            let tokens = tokens(stem, BLOCKS);
            let asked = Asked { tokens: &tokens, scope: &mine, session: Some("s"), limit: 4 };
            let miss = self.rig.manager.miss(&asked, now).expect("a good question").close();
            let known = self.rig.manager.cached_blocks(&tokens, &mine).expect("a good scope");
            let matched = self.rig.manager.matched(&tokens, &mine, 0).expect("a good lookup");
            let causes = (miss.causes, miss.diverged_at, miss.in_flight, miss.evicted);
            all.push(format!(
                "{stem} {} {matched} {causes:?} {:?}",
                known.len(),
                miss.branches.len()
            ));
        }
        let sessions = self.rig.manager.sessions(&mine).expect("a good scope");
        all.extend(
            sessions.iter().map(|(name, length, path)| format!("{name} {length} {}", path.len())),
        );
        all.join("\n")
    }
}

const STEMS: u32 = 3;
const BLOCKS: usize = 3;

fn any_call() -> impl Strategy<Value = Call> {
    let action = prop_oneof![
        4 => Just(Action::Serve),
        1 => Just(Action::GiveUp),
        2 => Just(Action::Hold),
        1 => Just(Action::Fork),
        1 => Just(Action::Suspend),
        1 => (0..=100_u8).prop_map(Action::RetainSession),
        1 => (0..=100_u8).prop_map(Action::RetainTokens),
        1 => (0..=100_u8).prop_map(Action::RetainLease),
        1 => Just(Action::ReleaseSession),
        1 => Just(Action::ReleaseOwner),
        1 => Just(Action::ReleaseTokens),
        1 => Just(Action::Demote),
        1 => Just(Action::Prefetch),
    ];
    let name = prop_oneof![Just("s"), Just("t")];
    (any::<bool>(), action, name, 0..STEMS, 1..=BLOCKS)
        .prop_map(|(mine, action, name, stem, blocks)| Call { mine, action, name, stem, blocks })
}

/// Room for all blocks of both tenants, so that they do not compete.
fn roomy(policy: &str) -> Settings {
    let spec = |kind| TierSpec { retained_share: 1.0, ..tier(kind, 64) };
    Settings { policy: policy.to_owned(), ..settings(vec![spec(Kind::Gpu), spec(Kind::Host)]) }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_call_of_one_tenant_changes_ranks_places_or_hints_of_another(
        calls in prop::collection::vec(any_call(), 1..30),
        policy in prop_oneof![Just("lru"), Just("weighted"), Just("checkerboard"), Just("restore")],
    ) {
        let shop = || Managed { rig: Rig::new(roomy(policy)), held: [None, None], share_after: 0 };
        let (mut shared, mut alone) = (shop(), shop());
        for (at, call) in calls.iter().enumerate() {
            for shop in [&mut shared, &mut alone] {
                shop.rig.now = 1000 * (2 + at as u64);
            }
            let replies = shared.carry_out(call);
            shared.rig.run();
            if call.mine {
                prop_assert_eq!(replies, alone.carry_out(call), "{:?}", call);
                alone.rig.run();
            }
            // Time passes in both.
            for shop in [&mut shared, &mut alone] {
                let now = shop.rig.now;
                shop.rig.call(|manager, _| manager.hint(&[], now)).expect("time passes");
            }
            prop_assert_eq!(shared.mine(), alone.mine(), "after {:?}", call);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: share(200),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Of two tenants, where three must have produced a block. Which tier has a block that both have
    /// produced depends on both, as does whether a prefetch moves it.
    #[test]
    fn no_answer_to_a_tenant_depends_on_blocks_of_another_before_enough_have_produced_them(
        calls in prop::collection::vec(any_call(), 1..30),
    ) {
        let shop = || Managed { rig: Rig::new(roomy("lru")), held: [None, None], share_after: 3 };
        let (mut shared, mut alone) = (shop(), shop());
        for (at, call) in calls.iter().enumerate() {
            for shop in [&mut shared, &mut alone] {
                shop.rig.now = 1000 * (2 + at as u64);
            }
            let replies = shared.carry_out(call);
            shared.rig.run();
            if call.mine {
                let same = alone.carry_out(call);
                alone.rig.run();
                if !matches!(call.action, Action::Prefetch) {
                    prop_assert_eq!(replies, same, "{:?}", call);
                }
            }
            prop_assert_eq!(shared.seen(), alone.seen(), "after {:?}", call);
        }
    }
}

#[test]
fn the_sessions_of_two_adapters_are_two() {
    let mut rig = Rig::new(settings(vec![tier(Kind::Gpu, 16)]));
    let lora = |name: &str| Scope { lora: name.to_owned(), ..Scope::default() };
    for (name, blocks) in [("a", 1), ("b", 2)] {
        let prompt = tokens(1, blocks);
        let ask = Acquire { scope: lora(name), session: Some("s"), ..all_of(&prompt) };
        let id = rig.ask(&ask).unwrap();
        rig.commit(id, &prompt);
        rig.release(id);
    }
    let lengths = |name: &str| -> Vec<u32> {
        rig.manager.sessions(&lora(name)).unwrap().iter().map(|known| known.1).collect()
    };
    assert_eq!((lengths("a"), lengths("b"), lengths("")), (vec![1], vec![2], vec![]));
}
