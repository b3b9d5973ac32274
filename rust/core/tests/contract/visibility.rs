//! Sharing after a number of producers: which tenants match which blocks, against a naive model.

use std::collections::{BTreeMap, BTreeSet};

use kvtrie_core::internals::SHARED;
use kvtrie_core::{
    Acquire, Asked, BlockKey, Hint, Kind, Label, LeaseId, LoadMode, Mark, MissCause, Row, Scope,
    Settings, Target, Token,
};
use proptest::prelude::*;

use crate::rig::{DISK, GPU, HOST, Rig, SIZE, all_of, settings, share, tier, tokens};

/// The scope of a tenant that shares after `after` producers.
fn tenant(number: u8, after: u32) -> Scope {
    Scope { tenant: vec![b't', number], share_after: after, ..Scope::default() }
}

fn three(blocks: u32) -> Settings {
    let tiers = vec![tier(Kind::Gpu, blocks), tier(Kind::Host, blocks), tier(Kind::Disk, blocks)];
    Settings { producer_key: Some([7; 32]), ..settings(tiers) }
}

/// A complete request of a tenant.
fn serve(rig: &mut Rig, scope: &Scope, prompt: &[Token]) {
    let ask = Acquire { scope: scope.clone(), ..all_of(prompt) };
    let id = rig.ask(&ask).expect("there is room");
    rig.run();
    let held = rig.manager.lease_tokens(id).expect("held");
    rig.commit(id, &prompt[held..]);
    rig.release(id);
    rig.run();
}

fn matched(rig: &Rig, scope: &Scope, prompt: &[Token]) -> usize {
    rig.manager.matched(prompt, scope, 0).expect("a good lookup") / SIZE
}

#[test]
fn a_block_is_shared_once_three_tenants_have_computed_it() {
    let mut rig = Rig::new(three(16));
    let prompt = tokens(1, 3);
    let (a, b, c, d) = (tenant(0, 3), tenant(1, 3), tenant(2, 3), tenant(3, 3));
    serve(&mut rig, &a, &prompt);
    serve(&mut rig, &a, &prompt);
    // A tenant counts once, and finds its own.
    let all = |rig: &Rig| [&a, &b, &c, &d].map(|scope| matched(rig, scope, &prompt));
    assert_eq!(all(&rig), [3, 0, 0, 0]);
    serve(&mut rig, &b, &prompt[..2 * SIZE]);
    assert_eq!(all(&rig), [3, 2, 0, 0]);
    // There is one copy of the bytes.
    assert_eq!(rig.manager.occupancy(GPU).free, 16 - 3);
    serve(&mut rig, &c, &prompt[..SIZE]);
    assert_eq!(all(&rig), [3, 2, 1, 1]);
}

#[test]
fn a_request_finds_what_its_admission_found() {
    let mut rig = Rig::new(three(16));
    let prompt = tokens(1, 3);
    serve(&mut rig, &tenant(0, 2), &prompt);
    let ask = Acquire { scope: tenant(1, 2), ..all_of(&prompt) };
    let id = rig.ask(&ask).unwrap();
    assert_eq!(rig.manager.lease_tokens(id).unwrap(), 0);
    let out = rig.commit(id, &prompt[..SIZE]);
    assert!(out.new.is_empty(), "the block was there");
    // The block that it made shared brings it no further one.
    assert_eq!(matched(&rig, &tenant(1, 2), &prompt), 1);
    assert_eq!(rig.manager.lease_tokens(id).unwrap(), SIZE);
    assert_eq!(matched(&rig, &tenant(2, 2), &prompt), 1);
}

#[test]
fn a_miss_reveals_nothing_of_blocks_of_others() {
    let mut rig = Rig::new(Settings { explain: true, ..three(16) });
    let (mine, other) = (tenant(0, 2), tenant(1, 2));
    serve(&mut rig, &other, &tokens(1, 3));
    let mut prompt = tokens(1, 3);
    prompt[5] = 9;
    for tokens in [tokens(1, 3), prompt] {
        let asked = Asked { tokens: &tokens, scope: &mine, session: Some("s"), limit: 4 };
        let now = rig.now;
        let miss = rig.manager.miss(&asked, now).unwrap().close();
        assert_eq!((miss.diverged_at, miss.divergence, miss.branches.len()), (None, None, 0));
        assert_eq!((miss.evicted, miss.in_flight, miss.other_scope), (0, 0, 0));
        assert_eq!(miss.causes, [(0, tokens.len(), MissCause::New)]);
        assert_eq!(rig.manager.known(&tokens, &mine).unwrap(), 0);
        assert_eq!(rig.manager.cached_blocks(&tokens, &mine).unwrap(), []);
    }
}

#[test]
fn without_a_secret_nothing_that_outlives_the_manager_shares() {
    let scope = tenant(0, 2);
    let prompt = tokens(1, 1);
    for (kinds, needs) in [
        (vec![Kind::Gpu, Kind::Host], false),
        (vec![Kind::Gpu, Kind::Disk], true),
        (vec![Kind::Host, Kind::Remote], true),
    ] {
        let tiers: Vec<_> = kinds.into_iter().map(|kind| tier(kind, 4)).collect();
        let mut rig = Rig::new(settings(tiers));
        let ask = Acquire { scope: scope.clone(), ..all_of(&prompt) };
        if needs {
            rig.refused("needs a secret", |manager, now| manager.acquire(&ask, now));
        } else {
            rig.ask(&ask).unwrap();
        }
    }
    let mut rig = Rig::new(three(4));
    for (scope, text) in [
        (Scope { share_after: 2, ..Scope::default() }, "without a tenant"),
        (tenant(0, 1), "share_after is 1"),
        (tenant(0, 33), "share_after is 33"),
        (Scope { tenant: SHARED.to_vec(), ..Scope::default() }, "is reserved"),
    ] {
        let ask = Acquire { scope, ..all_of(&prompt) };
        rig.refused(text, |manager, now| manager.acquire(&ask, now));
    }
}

/// One step of the property: a tenant, its number of producers, a prompt of two choices per block.
#[derive(Clone, Debug)]
struct Step {
    tenant: u8,
    after: u32,
    prompt: Vec<bool>,
    action: Action,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Serve,
    /// Takes a lease, without a commit.
    Begin,
    /// Commits one more block of the oldest lease that has any left.
    Commit,
    /// Ends the oldest lease.
    End,
    Suspend,
    Demote,
    Mark,
    /// Forgets everything.
    Reset,
    /// Another manager over what is on disk.
    Restart,
}

fn any_step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![
        8 => Just(Action::Serve),
        4 => Just(Action::Begin),
        5 => Just(Action::Commit),
        3 => Just(Action::End),
        1 => Just(Action::Suspend),
        2 => Just(Action::Demote),
        1 => Just(Action::Mark),
        1 => Just(Action::Reset),
        2 => Just(Action::Restart),
    ];
    let prompt = prop::collection::vec(prop::bool::weighted(0.8), 1..5);
    (0..5_u8, 2..4_u32, prompt, action).prop_map(|(tenant, after, prompt, action)| Step {
        tenant,
        after,
        prompt,
        action,
    })
}

fn content(prompt: &[bool]) -> Vec<Token> {
    prompt.iter().flat_map(|&choice| [Token::from(choice); SIZE]).collect()
}

struct Held {
    id: LeaseId,
    scope: Scope,
    prompt: Vec<Token>,
}

/// A manager next to a list of who has computed which block.
struct Pair {
    rig: Rig,
    held: Vec<Held>,
    /// Tenants that have produced a block, and whether all match it.
    naive: BTreeMap<BlockKey, (BTreeSet<u8>, bool)>,
    after: usize,
}

impl Pair {
    fn keys(&self, prompt: &[Token]) -> Vec<BlockKey> {
        self.rig.manager.keys(&tenant(0, 2), prompt).expect("plain tokens")
    }

    /// Drops the blocks that are on no tier.
    fn forget(&mut self) {
        let now = self.rig.now;
        let rows = [GPU, HOST, DISK].map(|tier| self.rig.manager.index(tier, now).unwrap());
        let living: BTreeSet<BlockKey> =
            rows.iter().flatten().map(|row| row.label.record.key()).collect();
        self.naive.retain(|key, _| living.contains(key));
    }

    fn computed(&mut self, who: u8, after: u32, keys: &[BlockKey]) {
        self.after = self.after.max(after as usize);
        for &key in keys {
            let (producers, shared) = self.naive.entry(key).or_default();
            producers.insert(who);
            *shared |= producers.len() >= self.after;
        }
    }

    /// Commits up to a number of blocks of a lease.
    fn commit(&mut self, at: usize, blocks: usize) {
        let Held { id, scope, prompt } = &self.held[at];
        let (id, who, after) = (*id, scope.tenant[1], scope.share_after);
        let from = self.rig.manager.lease_tokens(id).unwrap();
        let to = prompt.len().min(from + blocks * SIZE);
        let prompt = prompt.clone();
        self.rig.commit(id, &prompt[from..to]);
        let keys = self.keys(&prompt);
        self.computed(who, after, &keys[from / SIZE..to / SIZE]);
    }

    fn begin(&mut self, step: &Step, prompt: &[Token]) -> bool {
        let scope = tenant(step.tenant, step.after);
        let visible = matched(&self.rig, &scope, prompt);
        let asked = self.rig.ask(&Acquire { scope: scope.clone(), ..all_of(prompt) });
        let Ok(id) = asked else { return false };
        self.after = self.after.max(step.after as usize);
        assert!(self.rig.manager.lease_tokens(id).unwrap() <= visible * SIZE);
        self.held.push(Held { id, scope, prompt: prompt.to_vec() });
        true
    }

    fn end(&mut self, at: usize) {
        let id = self.held.remove(at).id;
        self.rig.release(id);
    }

    fn carry_out(&mut self, step: &Step) {
        let prompt = content(&step.prompt);
        let scope = tenant(step.tenant, step.after);
        match step.action {
            Action::Serve if self.begin(step, &prompt) => {
                self.rig.run();
                // Blocks that left for its room have lost their producers.
                self.forget();
                let last = self.held.len() - 1;
                self.commit(last, usize::MAX / SIZE / 2);
                self.end(last);
            }
            Action::Begin if self.held.len() < 3 => drop(self.begin(step, &prompt)),
            Action::Commit if !self.held.is_empty() => self.commit(0, 1),
            Action::End if !self.held.is_empty() => self.end(0),
            Action::Suspend if !self.held.is_empty() => {
                let (id, room) = (self.held[0].id, self.held[0].prompt.len());
                self.rig.call(|m, now| m.suspend(id, Kind::Host, now)).unwrap();
                self.rig.run();
                self.forget();
                if self.rig.call(|m, now| m.resume(id, room, LoadMode::All, now)).is_err() {
                    self.end(0);
                }
            }
            Action::Demote => {
                let target = Target::Tokens { tokens: prompt, scope };
                let hint = Hint::Demote { target, tier: DISK };
                self.rig.call(|m, now| m.hint(&[hint], now)).unwrap();
            }
            Action::Mark => {
                let mark = Mark {
                    tokens: &prompt,
                    scope,
                    tier: HOST,
                    present: true,
                    ready: None,
                    first: None,
                };
                if self.rig.call(|m, now| m.mark(&mark, now)).is_ok() {
                    let keys = self.keys(&prompt);
                    self.computed(step.tenant, step.after, &keys);
                }
                self.after = self.after.max(step.after as usize);
            }
            Action::Reset if self.held.is_empty() => {
                self.rig.call(|m, _| m.reset()).unwrap();
                self.naive.clear();
                self.after = 0;
            }
            Action::Restart if self.held.is_empty() => self.restart(),
            _ => {}
        }
    }

    fn restart(&mut self) {
        let now = self.rig.now;
        let rows = self.rig.manager.index(DISK, now).unwrap();
        // The records are kept as bytes.
        let read = |mut row: Row| {
            row.label = Label::decode(&row.label.encode()).unwrap();
            row
        };
        let rows: Vec<_> = rows.into_iter().map(read).collect();
        self.rig = Rig::new(three(6));
        self.rig.now = now;
        self.rig.call(|m, now| m.load_index(DISK, &rows, now)).unwrap();
        self.after = 0;
    }

    /// Every tenant matches what the list allows.
    fn compare(&mut self, prompts: &[Vec<bool>]) {
        self.forget();
        for prompt in prompts.iter().map(|prompt| content(prompt)) {
            let keys = self.keys(&prompt);
            for who in 0..5 {
                let may = |key: &&BlockKey| {
                    self.naive.get(*key).is_some_and(|(them, all)| *all || them.contains(&who))
                };
                let allowed = keys.iter().take_while(may).count();
                let found = matched(&self.rig, &tenant(who, 2), &prompt);
                assert_eq!(found, allowed, "tenant {who} of {prompt:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: share(600),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn tenants_match_their_own_blocks_and_those_that_enough_have_computed(
        steps in prop::collection::vec(any_step(), 1..60),
    ) {
        let mut pair = Pair { rig: Rig::new(three(6)), held: vec![], naive: BTreeMap::new(), after: 0 };
        let prompts: Vec<Vec<bool>> = steps.iter().map(|step| step.prompt.clone()).collect();
        for step in &steps {
            pair.rig.now += 1000;
            pair.carry_out(step);
            pair.rig.run();
            pair.compare(&prompts);
        }
    }
}
