//! Parts: the parts of a sequence on the tiers by group, and the borders resumable from given
//! parts.
//!
//! A shared store has a value per block and group. The store is queried only for parts missing on
//! faster tiers, and before and after its answer, the rules of a match apply. Invariant: nothing
//! changes. Cost: O(groups · blocks).

use crate::block::{Part, Token};
use crate::error::{Error, Result};
use crate::group::{Needed, longest};
use crate::manager::Manager;
use crate::scope::Scope;

impl Manager {
    /// Whether each group has or expects each known full block of a sequence on the first `tiers`
    /// tiers.
    ///
    /// # Errors
    /// The errors of [`Manager::lookup`].
    pub fn parts_above(
        &self,
        tokens: &[Token],
        scope: &Scope,
        tiers: usize,
    ) -> Result<Vec<Vec<bool>>> {
        self.open()?;
        self.scopes.digests.check(scope, tokens)?;
        self.scopes.find(scope)?;
        let content = self.scopes.digests.content(scope, 0, tokens);
        let (path, all) = (self.visible_path(scope, &content), self.all_layers());
        let has = |group: usize| {
            path.iter().map(move |&block| match group {
                0 => (0..tiers).any(|tier| self.expected(tier, block) == all),
                _ => self.part_on(Part { group, block }, tiers),
            })
        };
        Ok((0..self.points.groups.len()).map(|group| has(group).collect()).collect())
    }

    /// The longest border, up to `most` blocks, resumable in every group after the first with the
    /// given blocks.
    ///
    /// # Errors
    /// [`Error::Config`] for a wrong number of groups, or fewer than `most` blocks of a group.
    pub fn longest_resume(&self, parts: &[Vec<bool>], most: usize) -> Result<u32> {
        let groups = self.points.groups.len() - 1;
        if parts.len() != groups || parts.iter().any(|blocks| blocks.len() < most) {
            let blocks: Vec<usize> = parts.iter().map(Vec::len).collect();
            return Err(Error::config(format!(
                "{blocks:?} blocks of groups are given, {most} of each of {groups} wanted"
            )));
        }
        let most = u32::try_from(most).map_err(|_| Error::config(format!("{most} blocks")))?;
        let has = |group: usize, place: u32| parts[group][place as usize];
        Ok(longest(&self.points.groups[1..], self.points.block_tokens, most, has))
    }

    /// The needs of each group after the first for a resume after `border` blocks.
    #[must_use]
    pub fn resume_needs(&self, border: u32) -> Vec<Needed> {
        let points = &self.points;
        points.others().map(|(_, group)| group.needed(border, points.block_tokens)).collect()
    }
}
