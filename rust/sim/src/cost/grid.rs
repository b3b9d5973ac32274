//! Two-dimensional table: nanoseconds by context and count.
//!
//! Invariant: both axes ascend, and values never decrease along them. Between points the grid is
//! linear along both axes. After the last point the slope continues. Before the first point it is
//! constant. Cost: O(log points).

use super::PART_BITS;

/// Largest cell value, nanoseconds: the product of two differences then fits in 128 bits.
const MOST: u64 = 1 << 50;

/// Nanoseconds by context and count.
#[derive(Clone, Debug)]
pub struct Grid {
    contexts: Vec<u64>,
    counts: Vec<u64>,
    /// A row per context.
    rows: Vec<Vec<u64>>,
}

impl Grid {
    /// Create a grid, or `None` if the axes or rows violate the invariant.
    #[must_use]
    pub fn new(contexts: Vec<u64>, counts: Vec<u64>, rows: Vec<Vec<u64>>) -> Option<Self> {
        let ascends = |axis: &[u64]| !axis.is_empty() && axis.is_sorted_by(|a, b| a < b);
        let right = ascends(&contexts)
            && ascends(&counts)
            && rows.len() == contexts.len()
            && rows.iter().all(|row| row.len() == counts.len() && row.is_sorted())
            && rows.windows(2).all(|two| two[0].iter().zip(&two[1]).all(|(a, b)| a <= b))
            && rows.iter().flatten().all(|&cell| cell <= MOST);
        right.then_some(Self { contexts, counts, rows })
    }

    /// Largest measured count.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.counts.last().copied().unwrap_or(1)
    }

    /// Price of `count` after `context`, in fractions of a nanosecond.
    #[must_use]
    pub fn at(&self, context: u64, count: u64) -> u128 {
        let (low, high) = neighbours(&self.contexts, context);
        let along = |row: usize| {
            let (left, right) = neighbours(&self.counts, count);
            let cells = (parts(self.rows[row][left]), parts(self.rows[row][right]));
            between((self.counts[left], self.counts[right]), cells, count)
        };
        if low == high {
            return along(low);
        }
        let ends = (self.contexts[low], self.contexts[high]);
        // After the last count the slopes differ by row. A row with a smaller slope would cross the
        // row above it, so the difference is then taken as zero.
        let (first, second) = (along(low), along(high));
        between(ends, (first, second.max(first)), context)
    }
}

fn parts(nanos: u64) -> u128 {
    u128::from(nanos) << PART_BITS
}

/// Indices of the points around a value, or of the last two points if the value is after them.
/// Equal before the first point.
fn neighbours(axis: &[u64], value: u64) -> (usize, usize) {
    let after = axis.partition_point(|&point| point <= value);
    let high = after.min(axis.len() - 1);
    if after == 0 || high == 0 { (0, 0) } else { (high - 1, high) }
}

/// Evaluate the line through two points at a value not before the first point.
fn between((first, second): (u64, u64), (low, high): (u128, u128), value: u64) -> u128 {
    if first == second || value <= first {
        return low;
    }
    let (rise, run) = (high.saturating_sub(low), u128::from(second - first));
    let far = u128::from(value - first);
    // Whole runs first, to avoid overflow for a value far after the last point.
    let whole = rise.saturating_mul(far / run);
    low.saturating_add(whole).saturating_add(rise.saturating_mul(far % run) / run)
}

#[cfg(test)]
mod tests {
    use super::Grid;
    use crate::cost::PART_BITS;

    fn grid() -> Grid {
        Grid::new(vec![0, 100], vec![1, 5, 9], vec![vec![10, 20, 20], vec![30, 60, 100]]).unwrap()
    }

    #[test]
    fn it_is_linear_between_points_and_behind_them() {
        let grid = grid();
        let at = |context, count| grid.at(context, count) >> PART_BITS;
        assert_eq!([at(0, 1), at(0, 5), at(0, 3), at(0, 7)], [10, 20, 15, 20]);
        assert_eq!([at(100, 1), at(100, 7), at(50, 1), at(50, 3)], [30, 80, 20, 30]);
        assert_eq!([at(200, 1), at(100, 13), at(0, 13)], [50, 140, 20]);
        assert_eq!(at(0, 0), 10, "constant before the first count");
        assert_eq!(grid.last(), 9);
        let one = Grid::new(vec![7], vec![3], vec![vec![4]]).unwrap();
        assert_eq!(one.at(0, 99) >> PART_BITS, 4);
        assert!(grid.at(u64::MAX, u64::MAX) > 0);
    }

    #[test]
    fn what_falls_or_does_not_fit_is_no_grid() {
        let make = |contexts: &[u64], counts: &[u64], rows: &[&[u64]]| {
            let rows = rows.iter().map(|row| row.to_vec()).collect();
            Grid::new(contexts.to_vec(), counts.to_vec(), rows).is_some()
        };
        assert!(make(&[0], &[1, 2], &[&[3, 3]]));
        assert!(!make(&[0], &[1, 1], &[&[3, 3]]));
        assert!(!make(&[0], &[1, 2], &[&[3, 2]]));
        assert!(!make(&[0, 1], &[1], &[&[3], &[2]]));
        assert!(!make(&[0, 1], &[1], &[&[3]]));
        assert!(!make(&[], &[1], &[]));
        assert!(!make(&[0], &[1], &[&[u64::MAX]]));
    }
}
