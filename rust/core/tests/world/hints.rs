//! The world's model of hints: a list of priorities per block.
//!
//! After every operation each block's priority is compared with it, and ranks with priorities. In
//! worlds with rounded costs there are also hints about leases and sessions; the model does not
//! follow those, but ranks are still compared.

use std::collections::{BTreeMap, BTreeSet};

use kvtrie_core::{
    Answer, HIGHEST, Handle, Hint, NORMAL, Priority, Release, Retain, Scope, Settings, Target,
    Token,
};

use super::{Raw, World};

/// An owner: a name, and whether its scope is the plain one.
type Who = (&'static str, bool);

type Retained = (Who, Priority, Option<u64>);

struct Waiting {
    tokens: Vec<Token>,
    scope: Scope,
    range: std::ops::Range<usize>,
    /// The identity by which another hint of the owner replaces it.
    about: About,
    retained: Retained,
    known: Vec<Handle>,
}

/// The full blocks up to the range's end, their owner, and the range as hinted.
type About = (Vec<Token>, Scope, usize, Option<usize>);

/// All hints that have not ended.
#[derive(Default)]
pub(super) struct Hints {
    retained: BTreeMap<Handle, Vec<Retained>>,
    released: BTreeSet<Handle>,
    waiting: Vec<Waiting>,
    quotas: bool,
    steps: u64,
}

impl Hints {
    /// Notes a use of blocks by requests.
    pub(super) fn used(&mut self, blocks: impl Iterator<Item = Handle>) {
        for block in blocks {
            self.released.remove(&block);
        }
    }

    fn add(&mut self, block: Handle, retained: Retained) {
        let all = self.retained.entry(block).or_default();
        all.retain(|known| known.0 != retained.0);
        all.push(retained);
    }

    fn expire(&mut self, now: u64) {
        for all in self.retained.values_mut() {
            all.retain(|retained| retained.2.is_none_or(|until| until > now));
        }
        self.retained.retain(|_, all| !all.is_empty());
    }

    fn priority(&self, block: Handle) -> Priority {
        let strongest =
            self.retained.get(&block).and_then(|all| all.iter().map(|retained| retained.1).max());
        strongest.unwrap_or(if self.released.contains(&block) { 0 } else { NORMAL })
    }
}

impl World {
    fn loose(&self) -> bool {
        self.manager.settings().epsilon > 0.0
    }

    pub(super) fn used(&mut self, tokens: &[Token], scope: &Scope) {
        let known = self.manager.cached_blocks(tokens, scope).unwrap();
        self.hints.used(known.into_iter());
    }

    pub(super) fn hint(&mut self, a: usize, b: usize) {
        let tokens = Self::sequence(a, b);
        let scope = Self::scope(a / 60);
        let last = self.manager.settings().tiers.len() - 1;
        let path = || Target::Tokens { tokens: tokens.clone(), scope: scope.clone() };
        let target = match a % 5 {
            0 if self.loose() => {
                Target::Session { name: ["s", "t", "u"][b % 3].to_owned(), scope: scope.clone() }
            }
            1 if self.loose() && !self.held.is_empty() => {
                Target::Lease(self.held[b % self.held.len()].id)
            }
            _ => path(),
        };
        let hint = match b % 9 {
            0..=3 => return self.retain(target, (a, b)),
            4 => return self.release_hint((tokens, scope), (a, b)),
            5 => {
                let deadline = b.is_multiple_of(5).then_some(self.now + 50);
                Hint::Prefetch { target, tier: a % (last + 1), deadline }
            }
            6 => Hint::Demote { target, tier: a % (last + 1) },
            7 => Hint::Quota {
                tenant: scope.tenant,
                tier: a % (last + 1),
                blocks: (!b.is_multiple_of(4)).then_some(b as u64 / 9 % 5),
                share: b.is_multiple_of(8).then_some(0.25),
            },
            _ => Hint::Quota { tenant: Vec::new(), tier: 9, blocks: None, share: Some(2.0) },
        };
        let replies = self.attempt("hint", |m, now| m.hint(std::slice::from_ref(&hint), now));
        let Some(replies) = replies else { return };
        self.count_answer(replies[0].answer);
        self.hints.quotas |= matches!(hint, Hint::Quota { .. });
    }

    fn count_answer(&mut self, answer: Answer) {
        self.count(match answer {
            Answer::Accepted => "hint accepted",
            Answer::Clipped => "hint clipped",
            Answer::Deferred => "hint deferred",
            Answer::Rejected => "hint rejected",
        });
    }

    fn retain(&mut self, target: Target, (a, b): (usize, usize)) {
        let priority = [0, 20, 35, 60, 80, 100, 60, 101][b / 9 % 8];
        let ttl = b.is_multiple_of(2).then_some(1 + (a as u64 / 7) % 60);
        let (start, end) = ((a / 5 % 3) * 3, [None, None, Some(3), Some(9)][a / 3 % 4]);
        let owner = ["a", "b", ""][a / 11 % 3];
        let decode =
            matches!(target, Target::Lease(_) | Target::Session { .. }) && a.is_multiple_of(2);
        let hint = Hint::Retain(Retain {
            target: target.clone(),
            start: start as u64,
            end: end.map(|end| end as u64),
            priority,
            ttl,
            decode_priority: decode.then_some(10),
            decode_ttl: (decode && b.is_multiple_of(3)).then_some(20),
            owner: Some(owner.to_owned()),
        });
        let replies = self.attempt("hint", |m, now| m.hint(&[hint], now));
        assert_eq!(replies.is_none(), priority > HIGHEST || end.is_some_and(|end| end < start));
        let Some(reply) = replies.map(|mut replies| replies.remove(0)) else { return };
        self.count_answer(reply.answer);
        let Target::Tokens { tokens, scope } = target else { return };
        let who = (owner, scope.tenant.is_empty());
        let size = self.size();
        let full = tokens.len() / size;
        let inside = |at: usize| {
            let first = at * size;
            start <= first && first < end.unwrap_or(tokens.len())
        };
        let known = self.manager.cached_blocks(&tokens, &scope).unwrap();
        let retained = (who, priority, ttl.map(|ttl| self.manager.now() + ttl));
        for (at, &block) in known.iter().enumerate() {
            if inside(at) {
                self.hints.add(block, retained);
            }
        }
        let waits = (known.len()..full).filter(|&at| inside(at)).count() as u64;
        let cached = (0..known.len()).filter(|&at| inside(at)).count() as u64;
        assert_eq!(reply.blocks + reply.not_applied, cached + waits, "{reply:?}");
        if waits > 0 {
            let range = start..end.unwrap_or(tokens.len());
            let last = full.min(end.map_or(full, |end| end.div_ceil(size)));
            let mut whose = scope.clone();
            whose.extra.retain(|(at, _)| *at < (last * size) as u64);
            let about = (tokens[..last * size].to_vec(), whose, start, end);
            self.hints.waiting.retain(|w| (w.retained.0, &w.about) != (who, &about));
            self.hints.waiting.push(Waiting { tokens, scope, range, about, retained, known });
        }
    }

    fn release_hint(&mut self, (tokens, scope): (Vec<Token>, Scope), (a, b): (usize, usize)) {
        let owner = ["a", "b", ""][a / 11 % 3];
        let who = (owner, scope.tenant.is_empty());
        let known = self.manager.cached_blocks(&tokens, &scope).unwrap();
        let all = a.is_multiple_of(2);
        let release = match (self.loose() && a % 3 == 0, all) {
            (true, _) => Release::Session { name: ["s", "t", "u"][b % 3].to_owned(), scope },
            (_, true) => Release::Owner { name: owner.to_owned(), scope: scope.clone() },
            _ => Release::Tokens { tokens, scope, owner: Some(owner.to_owned()) },
        };
        let hint = [Hint::Release(release)];
        let reply = self.attempt("hint", |m, now| m.hint(&hint, now)).unwrap().remove(0);
        self.count_answer(reply.answer);
        if self.loose() {
            return;
        }
        self.hints.expire(self.manager.now());
        let about: Vec<Handle> = if all {
            self.hints.waiting.retain(|waiting| waiting.retained.0 != who);
            let mine = self.hints.retained.iter();
            let mine = mine.filter(|(_, all)| all.iter().any(|retained| retained.0 == who));
            mine.map(|(block, _)| *block).collect()
        } else {
            known
        };
        let mut released = 0;
        for block in about {
            if let Some(all) = self.hints.retained.get_mut(&block) {
                all.retain(|retained| retained.0 != who);
                if all.is_empty() {
                    self.hints.retained.remove(&block);
                }
            }
            // Whether another owner wants it is taken from the manager, but no lease may hold it.
            let claimed = self.hints.retained.contains_key(&block);
            if !claimed && self.manager.priority(block).unwrap() == 0 {
                released += 1;
                self.hints.released.insert(block);
                for held in self.held.iter().filter(|held| !held.suspended) {
                    let whose = Self::scope(held.scope);
                    let count = self.manager.lease_tokens(held.id).unwrap() / self.size();
                    let path = self.manager.cached_blocks(&held.tokens, &whose).unwrap();
                    let path = &path[..count.min(path.len())];
                    assert!(!path.contains(&block), "a leased block was released");
                }
            }
        }
        assert_eq!(reply.blocks, released, "{reply:?}");
    }

    /// Updates the model after an operation, and compares.
    pub(super) fn follow_hints(&mut self, raw: Raw) {
        let now = self.manager.now();
        self.hints.steps += 1;
        self.hints.expire(now);
        let manager = &self.manager;
        self.hints.retained.retain(|block, _| manager.priority(*block).is_ok());
        self.hints.released.retain(|block| manager.priority(*block).is_ok());
        let mut applied = 0;
        for mut waiting in std::mem::take(&mut self.hints.waiting) {
            if waiting.retained.2.is_some_and(|until| until <= now) {
                continue;
            }
            let known = self.manager.cached_blocks(&waiting.tokens, &waiting.scope).unwrap();
            let same = known.iter().zip(&waiting.known).take_while(|(a, b)| a == b).count();
            for (at, &block) in known.iter().enumerate().skip(same) {
                if waiting.range.contains(&(at * self.size())) {
                    applied += 1;
                    self.hints.add(block, waiting.retained);
                }
            }
            let wanted = waiting.range.end.div_ceil(self.size());
            if known.len() < wanted.min(waiting.tokens.len() / self.size()) {
                waiting.known = known;
                self.hints.waiting.push(waiting);
            }
        }
        for _ in 0..applied {
            self.count("pending hint applied");
        }
        if !self.loose() {
            for block in self.hints.retained.keys().chain(&self.hints.released) {
                let (ours, wanted) = (self.manager.priority(*block), self.hints.priority(*block));
                assert_eq!(ours, Ok(wanted), "after {raw:?}: block {:#x} at {now}", block.0);
            }
        }
        if self.hints.steps.is_multiple_of(4) {
            self.compare_ranks(raw);
        }
    }

    /// No block ranks before one of a lower priority, no block ranks higher than hinted, and of one
    /// priority none ranks before one that is worth less by more than the rounding.
    fn compare_ranks(&mut self, raw: Raw) {
        let (now, a, b) = (self.manager.now(), usize::from(raw.1), usize::from(raw.2));
        let scope = Self::scope(a / 60);
        let mut blocks: BTreeSet<Handle> = self.hints.retained.keys().copied().collect();
        blocks.extend(&self.hints.released);
        blocks.extend(self.manager.cached_blocks(&Self::sequence(a, b), &scope).unwrap());
        for tier in 0..self.manager.settings().tiers.len() {
            let (kept, most) = self.manager.retained(tier);
            assert!(kept <= most, "after {raw:?}: tier {tier} retains {kept} of {most}");
            let (mut ranks, mut values) = (Vec::new(), BTreeMap::new());
            for &block in &blocks {
                let Ok(price) = self.manager.explain(block, tier, now) else { continue };
                let retained = self.manager.priority(block).unwrap();
                let clipped = retained > NORMAL && price.priority == NORMAL;
                assert!(
                    clipped || price.priority == retained,
                    "after {raw:?}: {retained}, {price:?}"
                );
                if !self.loose() {
                    assert_eq!(retained, self.hints.priority(block), "after {raw:?}");
                }
                if let Some(rank) = price.rank {
                    ranks.push((rank, price.priority));
                    values.insert(rank, price.value);
                }
            }
            ranks.sort_unstable();
            self.compare_values(tier, &ranks, &values, raw);
            let ordered = ranks.is_sorted_by_key(|&(_, priority)| priority);
            assert!(self.hints.quotas || ordered, "after {raw:?}: tier {tier} ranks {ranks:?}");
            if ranks.len() > 1 && !self.hints.quotas {
                self.count("ranks compared");
            }
        }
    }

    fn compare_values(
        &mut self,
        tier: usize,
        ranks: &[(usize, Priority)],
        values: &BTreeMap<usize, f64>,
        raw: Raw,
    ) {
        let Settings { policy, tiers, epsilon, .. } = self.manager.settings();
        let name = tiers[tier].policy.as_ref().unwrap_or(policy);
        let by_value = ["retention", "flat", "weighted", "restore"].contains(&name.as_str());
        if self.hints.quotas || !by_value {
            return;
        }
        let most = (1.0 + epsilon) * (1.0 + 1e-9);
        let mut rounded = false;
        for (at, &(first, priority)) in ranks.iter().enumerate() {
            for &(later, _) in ranks[at + 1..].iter().filter(|later| later.1 == priority) {
                let (value, least) = (values[&first], values[&later]);
                assert!(value <= least * most, "after {raw:?}: {value} before {least} on {tier}");
                rounded |= value > least * (1.0 + 1e-9);
            }
        }
        if rounded {
            self.count("ranked otherwise by rounding");
        }
    }
}
