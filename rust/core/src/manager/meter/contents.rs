//! Contents: the copies of a manager, as the block events that would store them.
//!
//! Invariants: parents come before children, and each copy is listed once. Cost: O(listed blocks),
//! and at most a hash per block.

use crate::block::{BlockId, Handle, Place, TierId};
use crate::error::Result;
use crate::manager::Manager;
use crate::manager::keys::BlockName;

use super::block_event::{BlockEvent, BlockEventKind};

impl Manager {
    /// Lists the present copies as events at the present time, parents before children. Also
    /// returns the number of the next event. Cost: O(blocks), and at most a hash per block.
    ///
    /// # Errors
    /// [`crate::error::Error::Closed`] or [`crate::error::Error::Invariant`].
    pub fn block_contents(&mut self) -> Result<(u64, Contents<'_>)> {
        self.open()?;
        self.end_block_events();
        let roots = self.scopes.all();
        let firsts = roots.flat_map(|(_, scope)| self.trie().first_blocks(scope.root));
        let open = firsts.map(|block| (block, None)).collect();
        Ok((self.block_events.next, Contents { manager: self, open, of_block: Vec::new() }))
    }

    /// Lists the complete copies of the first group on a tier that follow a block there without a
    /// gap. Omits blocks with a true `skip`, and their descendants.
    #[must_use]
    pub fn copies_after(
        &self,
        block: Handle,
        tier: TierId,
        skip: impl Fn(Handle) -> bool,
    ) -> Vec<BlockEvent> {
        let Some(block) = self.trie().resolve(block) else { return Vec::new() };
        let Some(name) = self.keys.get(block) else { return Vec::new() };
        let children = |block, name| {
            let complete = |&child: &BlockId| {
                self.residency(tier, child).usable() == self.all_layers()
                    && !skip(self.trie().handle(child))
            };
            self.trie().children(block).filter(complete).map(move |child| (child, name))
        };
        let (mut open, mut found): (Vec<_>, _) = (children(block, name).collect(), Vec::new());
        while let Some((block, above)) = open.pop() {
            let name = self.keys.get(block);
            let name = name.unwrap_or_else(|| self.name_under(block, Some(above)));
            found.extend(self.stored_event(block, name, Some(above), (tier, 0)));
            open.extend(children(block, name));
        }
        found
    }

    /// Number of children of a block, at most 2.
    #[must_use]
    pub fn ways_after(&self, block: Handle) -> usize {
        let block = self.trie().resolve(block);
        block.map_or(0, |block| self.trie().children(block).take(2).count())
    }

    /// The event that would store a copy now, if the copy exists.
    fn stored_event(
        &self,
        block: BlockId,
        name: BlockName,
        above: Option<BlockName>,
        (tier, group): (TierId, usize),
    ) -> Option<BlockEvent> {
        let layers = self.residency(Place::new(tier, group), block).usable();
        let group = u8::try_from(group).expect("few groups");
        (!layers.is_empty()).then(|| BlockEvent {
            number: self.block_events.next,
            at: self.clock.last(),
            kind: BlockEventKind::Stored,
            block: self.trie().handle(block),
            key: name.key,
            parent: above.map_or_else(|| self.scope_key_of(block), |above| above.key),
            first: above.is_none(),
            tokens: self.real_tokens(block),
            owner: self.adapter_owner(block),
            private: name.private,
            tier,
            group,
            layers,
            whole: layers == self.layers_of(group, layers),
        })
    }
}

/// Iterator over the copies of a manager.
#[derive(Debug)]
pub struct Contents<'a> {
    manager: &'a Manager,
    /// Blocks to list, each with the name of its parent.
    open: Vec<(BlockId, Option<BlockName>)>,
    /// Copies of the current block.
    of_block: Vec<BlockEvent>,
}

impl Iterator for Contents<'_> {
    type Item = BlockEvent;

    fn next(&mut self) -> Option<BlockEvent> {
        loop {
            if let Some(event) = self.of_block.pop() {
                return Some(event);
            }
            let (block, above) = self.open.pop()?;
            let name = self.manager.keys.get(block);
            let name = name.unwrap_or_else(|| self.manager.name_under(block, above));
            self.list(block, name, above);
            let children = self.manager.trie().children(block);
            self.open.extend(children.map(|child| (child, Some(name))));
        }
    }
}

impl Contents<'_> {
    /// Lists the copies of a block.
    fn list(&mut self, block: BlockId, name: BlockName, above: Option<BlockName>) {
        let manager = self.manager;
        for tier in 0..manager.tiers.len() {
            for group in 0..manager.points.other_numbers().end {
                self.of_block.extend(manager.stored_event(block, name, above, (tier, group)));
            }
        }
    }
}
