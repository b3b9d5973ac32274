//! Borders named by hints: resume points that newer points of their path do not replace.
//!
//! A border becomes a point at once if a tier has all its needs. Otherwise it waits for the next
//! request with a pass that can end there. Invariant: all errors are found before the first change.
//! Cost: O(path) per border, and a hash per block of the path.

use std::collections::BTreeSet;

use crate::block::{BlockId, Structure};
use crate::error::{Error, Result};
use crate::hint::{Answer, HintCode, HintReply, Target};
use crate::manager::Manager;
use crate::manager::points::Stay;
use crate::manager::points::named::MOST_NAMED;
use crate::record::BlockKey;

use super::rejected;

impl Manager {
    /// Fails for a model with a single group, and for borders that are not between blocks of the
    /// path.
    pub(super) fn check_borders(&self, target: &Target, borders: &[u64]) -> Result<()> {
        self.check_target(target)?;
        if !self.points.several() {
            return Err(Error::config(
                "resume points are for models of several groups: with one group a request resumes \
                 after any cached block",
            ));
        }
        if borders.is_empty() {
            return Err(Error::config("0 borders are named, at least 1 wanted"));
        }
        let size = self.block_tokens() as u64;
        let known = match target {
            Target::Tokens { tokens, .. } => Some(tokens.len() as u64),
            Target::Lease(_) | Target::Session { .. } => {
                self.target_path(target).ok().map(|path| path.len() as u64 * size)
            }
        };
        for &border in borders {
            if border == 0 || !border.is_multiple_of(size) {
                return Err(Error::config(format!(
                    "a resume point at {border} tokens is not at the end of a block of {size}"
                )));
            }
            if let Some(known) = known.filter(|&known| border > known) {
                return Err(Error::config(format!(
                    "a resume point at {border} tokens is off the path, which has {known}"
                )));
            }
        }
        Ok(())
    }

    /// Makes borders of a target's path resume points. Borders that cannot be points yet wait.
    pub(super) fn keep_borders(&mut self, target: &Target, borders: &[u64]) -> HintReply {
        let path = match self.target_path(target) {
            Ok(path) => path,
            Err(reason) => return rejected(reason),
        };
        let places: BTreeSet<usize> = borders
            .iter()
            .map(|&border| usize::try_from(border).unwrap_or(usize::MAX) / self.block_tokens())
            .collect();
        let Some(keys) = self.border_keys(target, &path) else {
            return rejected("the scope is not known");
        };
        let (mut made, mut waiting, mut over) = (0, 0, 0);
        for border in places {
            // An earlier hint of the call may have evicted the end of the path.
            let Some(&(scope, key)) = keys.get(border - 1) else {
                over += 1;
                continue;
            };
            if self.make_point(&path, border) {
                made += 1;
            } else if self.name_border(scope, key) {
                waiting += 1;
            } else {
                over += 1;
            }
        }
        let left = waiting + over;
        let (answer, code, reason) = match (made, over) {
            (_, 0) if left == 0 => (Answer::Accepted, HintCode::Accepted, String::new()),
            (_, 0) => {
                let reason = format!("{waiting} borders wait for a request that computes them");
                (Answer::Deferred, HintCode::Waiting, reason)
            }
            (made, over) => {
                let some = made + waiting > 0;
                let answer = if some { Answer::Clipped } else { Answer::Rejected };
                let reason =
                    format!("{over} borders are beyond the {MOST_NAMED} that can wait in a scope");
                (answer, HintCode::Full, reason)
            }
        };
        HintReply { answer, blocks: made, not_applied: left, code, reason }
    }

    /// The scope's key and the content key of each block of a hint's path.
    fn border_keys(
        &mut self,
        target: &Target,
        path: &[BlockId],
    ) -> Option<Vec<(BlockKey, BlockKey)>> {
        if let Target::Tokens { tokens, scope } = target {
            let first = self.scope_key(scope.owner(), &scope.lora);
            let keys = self.keys(scope, tokens).ok()?;
            return Some(keys.into_iter().map(|key| (first, key)).collect());
        }
        let Some(&last) = path.last() else { return Some(Vec::new()) };
        let first = self.scope_key_of(last);
        Some(path.iter().map(|&block| (first, self.key(block))).collect())
    }

    /// Makes a border of a path a lasting point, on the first tier with all its needs. Returns
    /// whether the point exists.
    fn make_point(&mut self, path: &[BlockId], border: usize) -> bool {
        let Some(&block) = path.get(border - 1) else { return false };
        let blocks = u32::try_from(border).expect("fewer than 2^32 blocks");
        let path = &path[..border];
        // A lease may keep blocks after a lost block, also in a leaf-only scope.
        let whole = self.covered(path) == border;
        let fills = || {
            self.structure(block) == Structure::Holes
                && self.usable_border(path, self.tiers.len()) == blocks
        };
        if !whole && !fills() {
            return false;
        }
        let mut tiers = 0..self.tiers.len();
        let Some(tier) = tiers.find(|&tier| self.can_resume(tier, path, blocks)) else {
            return false;
        };
        self.add_point(tier, path, blocks, Stay::Always);
        self.points.has(block)
    }

    fn name_border(&mut self, scope: BlockKey, key: BlockKey) -> bool {
        self.points.named.add(scope, key)
    }
}
