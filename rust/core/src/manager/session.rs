//! Conversations: which path each one has reached, and how long it is.
//!
//! Invariant: a session's tip is the last living block of its path. Which sessions pass through a
//! block is tracked only where a policy ranks by it, at O(path) per extension.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::block::BlockId;

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
    through: FxHashMap<BlockId, Vec<SessionId>>,
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
        let through = self.through.get(&block)?;
        through.iter().filter_map(|id| self.all.get(id)).map(|session| session.length).min()
    }

    /// The last living block of a session's path.
    pub(super) fn tip(&self, id: SessionId) -> Option<BlockId> {
        self.all.get(&id)?.tip
    }

    /// A session's path is now `path`. Returns whether it changed.
    pub(super) fn extend(&mut self, id: SessionId, path: &[BlockId]) -> bool {
        let Some(session) = self.all.get_mut(&id) else { return false };
        let length = u32::try_from(path.len()).unwrap_or(u32::MAX);
        let tip = path.last().copied();
        if session.length == length && session.tip == tip {
            return false;
        }
        session.length = length;
        let old = std::mem::replace(&mut session.tip, tip);
        remove(&mut self.tips, old, id);
        if let Some(tip) = tip {
            self.tips.entry(tip).or_default().push(id);
        }
        true
    }

    /// For prices that depend on sessions: the blocks of `old` no longer carry the session,
    /// those of `new` do.
    pub(super) fn carry(&mut self, id: SessionId, old: &[BlockId], new: &[BlockId]) {
        for &block in old {
            remove(&mut self.through, Some(block), id);
        }
        for &block in new {
            self.through.entry(block).or_default().push(id);
        }
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
        ids.retain(|other| *other != id);
        if ids.is_empty() {
            of.remove(&block);
        }
    }
}
