//! Conversations: which path each one has reached, and how long it is.
//!
//! Invariant: a session's tip is the last living block of its path. How long the sessions are that
//! pass through a block is tracked only where a policy ranks by it, at O(path) per extension.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::block::BlockId;
use crate::visits;

/// A session's number.
pub(super) type SessionId = u64;

#[derive(Clone, Debug, Default)]
struct Session {
    name: Option<String>,
    /// Blocks of its path, living or not.
    length: u32,
    tip: Option<BlockId>,
    /// Whether somebody said that it is over, and no request of it came since.
    over: bool,
}

/// All sessions that still have a block, or were named.
#[derive(Clone, Debug, Default)]
pub(super) struct Sessions {
    all: BTreeMap<SessionId, Session>,
    names: BTreeMap<String, SessionId>,
    /// Of the sessions through a block, each length and how many have it, the shortest first.
    through: FxHashMap<BlockId, SmallVec<[(u32, u32); 2]>>,
    tips: FxHashMap<BlockId, Vec<SessionId>>,
    next: SessionId,
}

impl Sessions {
    /// The session of that name, or a nameless one if somebody wants it tracked.
    pub(super) fn open(&mut self, name: Option<&str>, nameless: Option<u64>) -> Option<SessionId> {
        if let Some(&known) = name.and_then(|name| self.names.get(name)) {
            if let Some(session) = self.all.get_mut(&known) {
                session.over = false;
            }
            return Some(known);
        }
        if name.is_none() && nameless.is_none() {
            return None;
        }
        let id = self.next;
        self.next += 1;
        if let Some(name) = name {
            self.names.insert(name.to_owned(), id);
        }
        self.all.insert(id, Session { name: name.map(str::to_owned), ..Session::default() });
        Some(id)
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.tips.is_empty() && self.through.is_empty()
    }

    /// The session of that name.
    pub(super) fn find(&self, name: &str) -> Option<SessionId> {
        self.names.get(name).copied()
    }

    /// A session is over, until a request of it comes.
    pub(super) fn finish(&mut self, id: SessionId) {
        if let Some(session) = self.all.get_mut(&id) {
            session.over = true;
        }
    }

    /// The sessions whose path ends in a block and that are not over.
    pub(super) fn ends_in(&self, block: BlockId) -> impl Iterator<Item = SessionId> + '_ {
        let ids = self.tips.get(&block).into_iter().flatten().copied();
        ids.filter(|id| self.all.get(id).is_some_and(|session| !session.over))
    }

    /// The length of the shortest session through a block: its position weighs most there.
    pub(super) fn shortest(&self, block: BlockId) -> Option<u32> {
        Some(self.through.get(&block)?.first()?.0)
    }

    /// The last living block of a session's path.
    pub(super) fn tip(&self, id: SessionId) -> Option<BlockId> {
        self.all.get(&id)?.tip
    }

    /// A session's path is now `path`. Returns the former length if it changed.
    pub(super) fn extend(&mut self, id: SessionId, path: &[BlockId]) -> Option<u32> {
        let session = self.all.get_mut(&id)?;
        let length = u32::try_from(path.len()).unwrap_or(u32::MAX);
        let tip = path.last().copied();
        if session.length == length && session.tip == tip {
            return None;
        }
        let before = std::mem::replace(&mut session.length, length);
        let old = std::mem::replace(&mut session.tip, tip);
        remove(&mut self.tips, old, id);
        if let Some(tip) = tip {
            self.tips.entry(tip).or_default().push(id);
        }
        Some(before)
    }

    /// For prices that depend on sessions: a session of the length `before` passed through the
    /// blocks of `old`, one as long as `new` passes through those of `new`. Returns the blocks
    /// whose shortest session is another one now.
    pub(super) fn carry(&mut self, old: &[BlockId], before: u32, new: &[BlockId]) -> Vec<BlockId> {
        let length = u32::try_from(new.len()).unwrap_or(u32::MAX);
        let same = old.iter().zip(new).take_while(|(a, b)| a == b).count();
        let mut changed = Vec::new();
        let ends = old[same..].iter().map(|&block| (block, Some(before), None));
        let stays = new[..same].iter().map(|&block| (block, Some(before), Some(length)));
        let begins = new[same..].iter().map(|&block| (block, None, Some(length)));
        for (block, less, more) in ends.chain(stays).chain(begins) {
            let lengths = self.through.entry(block).or_default();
            let shortest = lengths.first().map(|known| known.0);
            if let Some(length) = more {
                match lengths.binary_search_by_key(&length, |known| known.0) {
                    Ok(at) => lengths[at].1 += 1,
                    Err(at) => lengths.insert(at, (length, 1)),
                }
            }
            let less = less.map(|less| lengths.binary_search_by_key(&less, |known| known.0));
            if let Some(Ok(at)) = less {
                lengths[at].1 -= 1;
                if lengths[at].1 == 0 {
                    lengths.remove(at);
                }
            }
            if lengths.first().map(|known| known.0) != shortest {
                changed.push(block);
            }
            if lengths.is_empty() {
                self.through.remove(&block);
            }
        }
        changed
    }

    /// A block is gone; sessions that ended in it end in its parent.
    pub(super) fn forget(&mut self, block: BlockId, parent: Option<BlockId>) {
        self.through.remove(&block);
        let Some(ended) = self.tips.remove(&block) else { return };
        for id in ended {
            let Some(session) = self.all.get_mut(&id) else { continue };
            session.tip = parent;
            if let Some(parent) = parent {
                self.tips.entry(parent).or_default().push(id);
            } else if let Some(session) = self.all.remove(&id)
                && let Some(name) = session.name
            {
                self.names.remove(&name);
            }
        }
    }

    /// A session's name.
    pub(super) fn name(&self, id: SessionId) -> Option<&str> {
        self.all.get(&id)?.name.as_deref()
    }

    /// Name, length in blocks and tip of every named session, by name.
    pub(super) fn named(&self) -> impl Iterator<Item = (&str, u32, Option<BlockId>)> {
        self.names.iter().filter_map(|(name, id)| {
            let session = self.all.get(id)?;
            Some((name.as_str(), session.length, session.tip))
        })
    }
}

fn remove(of: &mut FxHashMap<BlockId, Vec<SessionId>>, block: Option<BlockId>, id: SessionId) {
    let Some(block) = block else { return };
    if let Some(ids) = of.get_mut(&block) {
        visits::note(ids.len());
        ids.retain(|other| *other != id);
        if ids.is_empty() {
            of.remove(&block);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::Sessions;
    use crate::block::BlockId;

    proptest! {
        /// Beside a list of what every session has left of its path: blocks of a tree are numbered
        /// as they come, and leaves go.
        #[test]
        fn the_shortest_session_through_a_block_is_known(
            steps in prop::collection::vec((0_usize..4, prop::collection::vec(0_u8..2, 0..5), any::<bool>()), 1..60),
        ) {
            let mut sessions = Sessions::default();
            let ids: Vec<_> = (0..4).filter_map(|at| sessions.open(None, Some(at))).collect();
            let mut held: [(Vec<BlockId>, u32); 4] = Default::default();
            let (mut tree, mut next) = (BTreeMap::<Vec<u8>, BlockId>::new(), 0);
            for (who, way, goes) in steps {
                if goes {
                    let leaf = |at: &Vec<u8>| !tree.keys().any(|other| other.len() > at.len() && other.starts_with(at));
                    let Some(gone) = tree.keys().find(|at| at.starts_with(&way) && leaf(at)).cloned() else { continue };
                    let parent = tree.get(&gone[..gone.len() - 1]).copied();
                    let block = tree.remove(&gone).unwrap();
                    sessions.forget(block, parent);
                    for (path, length) in &mut held {
                        if path.last() == Some(&block) {
                            path.pop();
                            // A session without a block is over.
                            *length = if path.is_empty() { 0 } else { *length };
                        }
                    }
                } else if sessions.all.contains_key(&ids[who]) {
                    let new: Vec<BlockId> = (1..=way.len()).map(|to| {
                        *tree.entry(way[..to].to_vec()).or_insert_with(|| { next += 1; next })
                    }).collect();
                    let (path, length) = &mut held[who];
                    if let Some(before) = sessions.extend(ids[who], &new) {
                        prop_assert_eq!(before, *length);
                        let shortest = |sessions: &Sessions| -> Vec<_> {
                            (0..=next).map(|block| sessions.shortest(block)).collect()
                        };
                        let then = shortest(&sessions);
                        let mut changed = sessions.carry(path, before, &new);
                        changed.sort_unstable();
                        let now = shortest(&sessions);
                        let differ: Vec<BlockId> = (0..=next).filter(|&at| then[at as usize] != now[at as usize]).collect();
                        prop_assert_eq!(changed, differ);
                        *length = u32::try_from(new.len()).unwrap();
                    }
                    *path = new;
                }
                for &block in tree.values() {
                    let through = held.iter().filter(|(path, _)| path.contains(&block));
                    prop_assert_eq!(sessions.shortest(block), through.map(|held| held.1).min());
                }
            }
        }
    }
}
