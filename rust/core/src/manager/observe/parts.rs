//! Parts: what tiers have of each group of a sequence, and the borders that a number of parts resumes at.
//!
//! A shared store has a value per block and group. Before it is asked for those that no faster tier has,
//! and after its answer, the rules are those of a match. Invariant: nothing changes. Cost: O(groups ·
//! blocks).

use crate::block::{Part, Token};
use crate::error::{Error, Result};
use crate::group::{Needed, longest};
use crate::manager::Manager;
use crate::scope::Scope;

impl Manager {
    /// Which known full blocks of a sequence each group has, or expects, on the first `tiers` tiers.
    ///
    /// # Errors
    /// As [`Manager::lookup`].
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

    /// The longest border up to `most` blocks at which every group after the first has what a resume
    /// needs, by the blocks that each of them has.
    ///
    /// # Errors
    /// [`Error::Config`] for another number of groups, or fewer than `most` blocks of one.
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

    /// What a resume at the border after `border` blocks needs of each group after the first.
    #[must_use]
    pub fn resume_needs(&self, border: u32) -> Vec<Needed> {
        let points = &self.points;
        points.others().map(|(_, group)| group.needed(border, points.block_tokens)).collect()
    }
}
