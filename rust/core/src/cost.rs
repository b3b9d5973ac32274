//! Cost model of recomputing a block, with the weights of layers and position.
//!
//! Invariant: costs are finite, never negative and never fall with context, so a class number is
//! always defined. Cost: a formula, or a binary search in a table of a few dozen points.

use crate::block::{Departure, Layers};
use crate::error::{Error, Result};
use crate::time::Nanos;

/// Cost 1 in class units. Costs are ranked as integers in units of 2^-40.
pub(crate) const ONE: u64 = 1 << 40;

/// Largest class number. A class times an idle time fits in 128 bits.
const MOST: u64 = 1 << 62;

/// Context at which attention costs as much as everything else on the Pensieve paper's A100s.
const EVEN_CONTEXT: f64 = 10_700.0;

/// Cost over context length.
#[derive(Clone, Debug, PartialEq)]
enum Curve {
    /// `(alpha * context + beta) + constant`.
    Affine {
        /// Cost of attention per token of context.
        alpha: f64,
        /// Cost of attention without context.
        beta: f64,
        /// Cost of everything but attention.
        constant: f64,
    },
    /// Points (context in tokens, cost), ascending in both. Linear between points and constant
    /// before the first point. The last slope continues after the last point.
    Table(Vec<(u64, f64)>),
}

/// Quantity saved by value-based policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// The cost of computing blocks again.
    #[default]
    Cost,
    /// Cost and blocks: a block is worth the square root of its cost.
    Balanced,
    /// Number of blocks, all worth the same.
    Hits,
}

impl Objective {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::Balanced => "balanced",
            Self::Hits => "hits",
        }
    }

    /// Weight of a block of this cost per token.
    #[must_use]
    pub(crate) fn weight(self, cost: f64) -> f64 {
        match self {
            Self::Cost => cost,
            Self::Balanced => cost.sqrt(),
            Self::Hits => 1.0,
        }
    }
}

/// Cost of computing tokens, relative and in nanoseconds, and the value of saving it.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    curve: Curve,
    ns_per_token: f64,
    objective: Objective,
}

impl CostModel {
    /// The default, `1 + context / 10 700`. `ns_per_token` is the prefill time of one token without
    /// context.
    ///
    /// # Errors
    /// `Config` if `ns_per_token` is negative or not finite.
    pub fn default_curve(ns_per_token: f64) -> Result<Self> {
        Self::affine(1.0 / EVEN_CONTEXT, 1.0, 0.0, ns_per_token)
    }

    /// The constants of the source document: alpha .001, beta .01, constant .005.
    ///
    /// # Errors
    /// `Config` if `ns_per_token` is negative or not finite.
    pub fn seed(ns_per_token: f64) -> Result<Self> {
        Self::affine(0.001, 0.01, 0.005, ns_per_token)
    }

    /// `(alpha * context + beta) + constant`.
    ///
    /// # Errors
    /// `Config` if a number is negative or not finite, or if the cost at context 0 is 0.
    pub fn affine(alpha: f64, beta: f64, constant: f64, ns_per_token: f64) -> Result<Self> {
        for (name, value) in [("alpha", alpha), ("beta", beta), ("constant", constant)] {
            check(name, value)?;
        }
        Self::new(Curve::Affine { alpha, beta, constant }, ns_per_token)
    }

    /// Costs measured at some context lengths, for example powers of two.
    ///
    /// # Errors
    /// `Config` if there is no point, if contexts do not ascend, if costs fall or if a number is
    /// negative or not finite.
    pub fn table(points: Vec<(u64, f64)>, ns_per_token: f64) -> Result<Self> {
        if points.is_empty() {
            return Err(Error::config("a cost table needs at least one point"));
        }
        for &(context, cost) in &points {
            check(&format!("the cost at context {context}"), cost)?;
        }
        for pair in points.windows(2) {
            let ((a, low), (b, high)) = (pair[0], pair[1]);
            if a >= b {
                return Err(Error::config(format!(
                    "contexts of a cost table must ascend: {a} comes before {b}"
                )));
            }
            if low > high {
                return Err(Error::config(format!(
                    "costs must not fall with context: {low} at {a}, {high} at {b}"
                )));
            }
        }
        Self::new(Curve::Table(points), ns_per_token)
    }

    fn new(curve: Curve, ns_per_token: f64) -> Result<Self> {
        check("ns_per_token", ns_per_token)?;
        let model = Self { curve, ns_per_token, objective: Objective::Cost };
        let (least, most) = (model.base(0), model.base(u64::MAX));
        if least <= 0.0 || !most.is_finite() {
            return Err(Error::config(format!(
                "costs must be above 0 and finite: {least} at context 0, {most} at {}",
                u64::MAX
            )));
        }
        Ok(model)
    }

    /// The cost of a token after `context` tokens: the source's `base_cost`.
    #[must_use]
    pub fn base(&self, context: u64) -> f64 {
        match &self.curve {
            Curve::Affine { alpha, beta, constant } => (alpha * real(context) + beta) + constant,
            Curve::Table(points) => interpolate(points, context),
        }
    }

    /// The same model with the weights of an objective.
    #[must_use]
    pub fn with_objective(self, objective: Objective) -> Self {
        Self { objective, ..self }
    }

    /// Quantity saved by value-based policies.
    #[must_use]
    pub fn objective(&self) -> Objective {
        self.objective
    }

    /// Weight of a token after `context` tokens under the objective. By default it is the cost.
    #[must_use]
    pub(crate) fn worth(&self, context: u64) -> f64 {
        self.objective.weight(self.base(context))
    }

    /// Weight by the cost without the constant, `alpha * context + beta`. Tables have no constant.
    #[must_use]
    pub(crate) fn flat_worth(&self, context: u64) -> f64 {
        self.objective.weight(match &self.curve {
            Curve::Affine { alpha, beta, .. } => alpha * real(context) + beta,
            Curve::Table(points) => interpolate(points, context),
        })
    }

    /// Nanoseconds to prefill `tokens` tokens after `context` tokens.
    ///
    /// The cost is evaluated at the middle of the span, relative to `base(0)`. The result is
    /// rounded and saturates.
    #[must_use]
    pub fn compute_ns(&self, context: u64, tokens: u64) -> Nanos {
        self.priced_ns(self.base(context.saturating_add(tokens / 2)), tokens)
    }

    /// Nanoseconds to prefill `tokens` tokens at a cost of `price` each.
    #[must_use]
    pub(crate) fn priced_ns(&self, price: f64, tokens: u64) -> Nanos {
        whole(self.ns_per_token * real(tokens) * (price / self.base(0)))
    }
}

/// Weight of a layer in a model of `L = layers` layers.
///
/// Demotion: `(L - layer) / L`, since later layers load while earlier layers are computed. Drop:
/// `(layer + 1) / L`, since computing a layer requires all layers below it.
#[must_use]
pub fn layer_weight(layer: u16, layers: u16, departure: Departure) -> f64 {
    layers_weight(Layers::new(layer, layer.saturating_add(1)), layers, departure)
}

/// The sum of [`layer_weight`] over `resident`, cut to the model's `layers`.
#[must_use]
pub(crate) fn layers_weight(resident: Layers, layers: u16, departure: Departure) -> f64 {
    let resident = resident.meet(Layers::new(0, layers));
    if resident.is_empty() {
        return 0.0;
    }
    let (lo, hi, all) = (u64::from(resident.lo), u64::from(resident.hi), u64::from(layers));
    let number = hi - lo;
    let indices = number * (lo + hi - 1) / 2;
    let sum = match departure {
        Departure::Demote => number * all - indices,
        Departure::Drop => indices + number,
    };
    real(sum) / real(all)
}

/// A block's weight within its session, `(block + 1) / session_blocks`: from 1/n to 1.
#[must_use]
pub fn position_weight(block: u32, session_blocks: u32) -> f64 {
    let place = u64::from(block) + 1;
    real(place) / real(place.max(u64::from(session_blocks)))
}

/// Cost as a class number, rounded to units of 2^-40.
///
/// At most 2^62, and at least 1 for a positive cost.
#[must_use]
pub(crate) fn fixed(cost: f64) -> u64 {
    let class = whole(cost * real(ONE)).min(MOST);
    if class == 0 && cost > 0.0 { 1 } else { class }
}

fn check(name: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::config(format!("{name} must be finite and not negative, got {value}")))
}

fn interpolate(points: &[(u64, f64)], context: u64) -> f64 {
    let after = points.partition_point(|&(place, _)| place <= context);
    if after == 0 || points.len() == 1 {
        return points[0].1;
    }
    let right = after.min(points.len() - 1);
    let ((a, low), (b, high)) = (points[right - 1], points[right]);
    low + (high - low) * (real(context - a) / real(b - a))
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53; above it a cost rounds")]
fn real(value: u64) -> f64 {
    value as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "never negative, and the cast saturates"
)]
fn whole(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::{
        CostModel, MOST, ONE, Objective, fixed, layer_weight, layers_weight, position_weight, real,
    };
    use crate::block::Departure::{Demote, Drop};
    use crate::block::Layers;
    use crate::error::{Error, Result};

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * b.abs()
    }

    fn refused(model: Result<CostModel>) -> String {
        match model {
            Err(Error::Config(message)) => message,
            other => panic!("{other:?} was not refused"),
        }
    }

    #[test]
    fn an_objective_weighs_costs() -> Result<()> {
        let weights = |objective| {
            let cost = CostModel::default_curve(1.0)?.with_objective(objective);
            Ok::<_, Error>([0, 32_100].map(|context| fixed(cost.worth(context)) / ONE))
        };
        assert_eq!(weights(Objective::Cost)?, [1, 4]);
        assert_eq!(weights(Objective::Balanced)?, [1, 2]);
        assert_eq!(weights(Objective::Hits)?, [1, 1]);
        Ok(())
    }

    #[test]
    fn the_default_doubles_at_10_700_tokens() -> Result<()> {
        let cost = CostModel::default_curve(1.0)?;
        assert!(close(cost.base(0), 1.0) && close(cost.base(10_700), 2.0));
        assert!(close(cost.flat_worth(10_700), 2.0) && close(cost.base(107_000), 11.0));
        Ok(())
    }

    #[test]
    fn the_seed_preset_has_the_documents_constants() -> Result<()> {
        let cost = CostModel::seed(1.0)?;
        assert!(close(cost.base(0), 0.015) && close(cost.base(32), 0.047));
        assert!(close(cost.flat_worth(0), 0.01) && close(cost.flat_worth(32), 0.042));
        Ok(())
    }

    #[test]
    fn a_table_is_interpolated_and_its_last_slope_goes_on() -> Result<()> {
        let cost = CostModel::table(vec![(1024, 1.0), (2048, 2.0), (4096, 6.0)], 1.0)?;
        let points = [
            (0, 1.0),
            (1024, 1.0),
            (1536, 1.5),
            (2048, 2.0),
            (3072, 4.0),
            (4096, 6.0),
            (8192, 14.0),
        ];
        for (context, expected) in points {
            assert!(close(cost.base(context), expected), "{context}: {}", cost.base(context));
            assert!(close(cost.flat_worth(context), expected));
        }
        let constant = CostModel::table(vec![(7, 3.0)], 1.0)?;
        assert!(close(constant.base(0), 3.0) && close(constant.base(1 << 40), 3.0));
        Ok(())
    }

    #[test]
    fn bad_numbers_are_refused_with_the_numbers() {
        let affine = |alpha, beta, ns| refused(CostModel::affine(alpha, beta, 0.0, ns));
        assert!(affine(-1.0, 1.0, 1.0).contains("alpha") && affine(-1.0, 1.0, 1.0).contains("-1"));
        assert!(affine(0.0, f64::NAN, 1.0).contains("NaN"));
        assert!(affine(0.0, 1.0, f64::INFINITY).contains("ns_per_token"));
        assert!(affine(1.0, 0.0, 1.0).contains("above 0"));
        assert!(affine(1e300, 1.0, 1.0).contains("finite"));
        let table = |points: &[(u64, f64)]| refused(CostModel::table(points.to_vec(), 1.0));
        assert!(table(&[]).contains("at least one"));
        assert!(table(&[(8, 1.0), (8, 2.0)]).contains("8 comes before 8"));
        assert!(table(&[(4, 2.0), (8, 1.5)]).contains("2 at 4, 1.5 at 8"));
        assert!(table(&[(4, -2.0)]).contains("-2"));
        assert!(refused(CostModel::default_curve(-0.5)).contains("-0.5"));
        assert!(refused(CostModel::seed(f64::NAN)).contains("NaN"));
    }

    #[test]
    fn prefill_time_grows_with_tokens_and_context() -> Result<()> {
        let cost = CostModel::default_curve(100.0)?;
        assert_eq!(cost.compute_ns(0, 0), 0);
        assert_eq!(cost.compute_ns(10_692, 16), 3200);
        assert_eq!(cost.compute_ns(0, 16), 1601);
        assert_eq!(cost.compute_ns(u64::MAX, u64::MAX), u64::MAX);
        let seed = CostModel::seed(100.0)?;
        assert_eq!(seed.compute_ns(0, 2), 213);
        Ok(())
    }

    #[test]
    fn layer_0_weighs_40_times_layer_39() {
        let weights = [(0, 1.0), (19, 0.525), (39, 0.025)];
        for (layer, expected) in weights {
            assert!(close(layer_weight(layer, 40, Demote), expected));
            assert!(close(layer_weight(39 - layer, 40, Drop), expected));
        }
        assert!(close(layer_weight(0, 40, Demote), 40.0 * layer_weight(39, 40, Demote)));
    }

    #[test]
    fn the_weight_of_a_range_is_the_sum_over_its_layers() {
        for (lo, hi, layers) in [(0, 40, 40), (7, 19, 40), (39, 40, 40), (0, 1, 1), (3, 9, 6)] {
            for departure in [Demote, Drop] {
                let single = |layer| layer_weight(layer, layers, departure);
                let sum: f64 = (lo..hi.min(layers)).map(single).sum();
                let range = Layers::new(lo, hi);
                assert!(close(layers_weight(range, layers, departure), sum), "{range} of {layers}");
            }
        }
        assert!(layers_weight(Layers::NONE, 40, Demote) == 0.0);
        assert!(layer_weight(40, 40, Demote) == 0.0 && layer_weight(u16::MAX, 40, Drop) == 0.0);
    }

    #[test]
    fn four_blocks_weigh_a_quarter_to_one() {
        let weights: Vec<f64> = (0..4).map(|block| position_weight(block, 4)).collect();
        assert_eq!(weights, [0.25, 0.5, 0.75, 1.0]);
        assert!(close(position_weight(0, 0), 1.0) && close(position_weight(9, 4), 1.0));
        assert!(close(position_weight(u32::MAX, u32::MAX), 1.0));
    }

    #[test]
    fn class_numbers_keep_the_order_and_saturate() {
        assert_eq!((fixed(0.0), fixed(1.0), fixed(0.5)), (0, ONE, ONE / 2));
        assert_eq!((fixed(f64::MIN_POSITIVE), fixed(1e30), fixed(f64::MAX)), (1, MOST, MOST));
        assert_eq!(fixed(real(MOST) / real(ONE)), MOST);
        assert!(fixed(0.003_75) < fixed(0.0075) && fixed(0.0235) < fixed(0.047));
    }
}
