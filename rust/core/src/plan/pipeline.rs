//! The layer pipeline: layer `i + 1` is loaded while layer `i` is computed.
//!
//! Invariant: loads run one after another, computations likewise, and a layer is computed when it
//! is loaded and the layer before is done. Cost: one pass.

use crate::time::Nanos;

/// When the last layer is computed: `max_j (load_0 + .. + load_j + compute_j + .. + compute_last)`.
/// `load` and `compute` hold one duration per layer. The result is 0 without layers and saturates.
#[must_use]
pub fn finish(load: &[Nanos], compute: &[Nanos]) -> Nanos {
    debug_assert_eq!(load.len(), compute.len(), "one duration per layer in both");
    let mut loaded: Nanos = 0;
    let mut done: Nanos = 0;
    for (load, compute) in load.iter().zip(compute) {
        loaded = loaded.saturating_add(*load);
        done = done.max(loaded).saturating_add(*compute);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::finish;
    use crate::plan::twin::Random;

    /// The formula as it is written.
    fn formula(load: &[u64], compute: &[u64]) -> u64 {
        let at = |j: usize| load[..=j].iter().sum::<u64>() + compute[j..].iter().sum::<u64>();
        (0..load.len()).map(at).max().unwrap_or(0)
    }

    #[test]
    fn one_pass_equals_the_formula() {
        let mut random = Random::new(1);
        for _ in 0..20_000 {
            let layers = random.below(9);
            let load: Vec<u64> = (0..layers).map(|_| random.below(20)).collect();
            let compute: Vec<u64> = (0..layers).map(|_| random.below(20)).collect();
            assert_eq!(finish(&load, &compute), formula(&load, &compute), "{load:?} {compute:?}");
        }
    }

    #[test]
    fn only_the_first_load_is_seen_when_computing_takes_longer() {
        assert_eq!(finish(&[3; 40], &[5; 40]), 3 + 40 * 5);
        assert_eq!(finish(&[5; 40], &[3; 40]), 40 * 5 + 3);
        assert_eq!(finish(&[], &[]), 0);
        assert_eq!(finish(&[u64::MAX, 1], &[1, 1]), u64::MAX);
    }
}
