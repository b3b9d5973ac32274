//! Two-stage pipeline over layers: layer `i + 1` is loaded while layer `i` is computed.
//!
//! Invariant: a layer is computed when it is resident and the previous layer is done. Cost: a pass.

use crate::time::Nanos;

/// Completion time of the last layer.
///
/// `layers` has, in order, the ready time of each layer and the time to compute it. The result is 0
/// without layers, and saturates.
///
/// If a single lane loads layer after layer from time 0 on, this is `max_j (load_0 + .. + load_j +
/// compute_j + .. + compute_last)`.
#[must_use]
pub fn finish(layers: impl IntoIterator<Item = (Nanos, Nanos)>) -> Nanos {
    layers.into_iter().fold(0, |done, (arrival, compute)| done.max(arrival).saturating_add(compute))
}

#[cfg(test)]
mod tests {
    use super::finish;
    use crate::plan::twin::Random;

    /// Consecutive loads, with the time to compute each layer.
    fn one_lane(load: &[u64], compute: &[u64]) -> u64 {
        let mut loaded: u64 = 0;
        let arrival = load.iter().map(|load| {
            loaded = loaded.saturating_add(*load);
            loaded
        });
        finish(arrival.zip(compute.iter().copied()).collect::<Vec<_>>())
    }

    /// The documented formula.
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
            assert_eq!(one_lane(&load, &compute), formula(&load, &compute), "{load:?} {compute:?}");
        }
    }

    #[test]
    fn only_the_first_load_is_seen_when_computing_takes_longer() {
        assert_eq!(one_lane(&[3; 40], &[5; 40]), 3 + 40 * 5);
        assert_eq!(one_lane(&[5; 40], &[3; 40]), 40 * 5 + 3);
        assert_eq!(one_lane(&[], &[]), 0);
        assert_eq!(one_lane(&[u64::MAX, 1], &[1, 1]), u64::MAX);
    }
}
