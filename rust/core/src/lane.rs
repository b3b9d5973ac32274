//! Lane: a FIFO queue of transmissions between two neighbouring tiers or two machines.
//!
//! Invariant: the jobs of a queue never overlap, and `first + (layers - 1) * per_layer == end`.
//! Lanes with the same `shares` use a common queue, each with its own bandwidth and latency. Cost:
//! a few integer operations per transmission.

use crate::time::{NEVER, Nanos};

const NANOS_PER_S: u64 = 1_000_000_000;

/// Index of a lane in its [`Lanes`].
pub type LaneId = usize;

/// Description of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneSpec {
    /// User-visible name.
    pub name: String,
    /// Bandwidth in bytes per second. With 0 a transmission never ends.
    pub bytes_per_s: u64,
    /// Latency of each transmission, in nanoseconds.
    pub latency_ns: u64,
    /// Name of the queue. `None` means the lane's own name.
    pub shares: Option<String>,
}

impl LaneSpec {
    /// A transmission starting at `start`.
    #[inline]
    fn transmission(&self, bytes: u64, start: Nanos, layers: u16) -> Transmission {
        let start = start.saturating_add(self.latency_ns);
        let end = start.saturating_add(duration(bytes, self.bytes_per_s));
        let layers = u64::from(layers.max(1));
        let per_layer = (end - start) / layers;
        Transmission { end, first: end - (layers - 1) * per_layer, per_layer }
    }
}

/// Arrival times of a transmission: layer `i` arrives at `first + i * per_layer`.
///
/// Exact for the last layer. For all layers, never earlier than their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Transmission {
    /// Arrival of the last layer.
    pub end: Nanos,
    /// Arrival of the first layer.
    pub first: Nanos,
    /// Nanoseconds between two layers.
    pub per_layer: Nanos,
}

#[derive(Clone, Debug)]
struct Lane {
    spec: LaneSpec,
    queue: usize,
    predicted: Nanos,
    waited: Nanos,
    seen: Nanos,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct Queue {
    name: String,
    free_at: Nanos,
}

/// All lanes of one manager with their queues.
#[derive(Clone, Debug, Default)]
pub struct Lanes {
    lanes: Vec<Lane>,
    queues: Vec<Queue>,
}

impl Lanes {
    /// Number of lanes. Ids count from 0.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Whether there is no lane.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Adds a lane to the queue named by `shares`, or by the lane's name if `None`. Two lanes of
    /// the same name therefore share a queue too.
    pub fn add(&mut self, spec: LaneSpec) -> LaneId {
        let name = spec.shares.as_ref().unwrap_or(&spec.name);
        let queue = self.queues.iter().position(|queue| queue.name == *name).unwrap_or_else(|| {
            self.queues.push(Queue { name: name.clone(), free_at: 0 });
            self.queues.len() - 1
        });
        self.lanes.push(Lane { spec, queue, predicted: 0, waited: 0, seen: 0, bytes: 0 });
        self.lanes.len() - 1
    }

    /// The lane's description.
    #[must_use]
    pub fn spec(&self, lane: LaneId) -> &LaneSpec {
        &self.lanes[lane].spec
    }

    /// The first lane of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<LaneId> {
        self.lanes.iter().position(|lane| lane.spec.name == name)
    }

    /// Adds measured busy time to all lanes of a name. Returns false if there is no such lane.
    pub(crate) fn add_busy(&mut self, name: &str, busy: Nanos) -> bool {
        let mut found = false;
        for lane in self.lanes.iter_mut().filter(|lane| lane.spec.name == name) {
            lane.seen = lane.seen.saturating_add(busy);
            found = true;
        }
        found
    }

    /// Appends `bytes` to the lane's queue and returns the times of its `layers` equal parts.
    ///
    /// 0 layers count as 1. Latency counts once, and fractions are rounded up.
    pub fn transmit(&mut self, lane: LaneId, bytes: u64, now: Nanos, layers: u16) -> Transmission {
        let lane = &mut self.lanes[lane];
        let free_at = &mut self.queues[lane.queue].free_at;
        let start = now.max(*free_at);
        let transmission = lane.spec.transmission(bytes, start, layers);
        lane.predicted = lane.predicted.saturating_add(transmission.end - start);
        lane.waited = lane.waited.saturating_add(start - now);
        lane.bytes = lane.bytes.saturating_add(bytes);
        *free_at = transmission.end;
        transmission
    }

    /// Result of [`Lanes::transmit`] without queueing.
    #[must_use]
    pub fn preview(&self, lane: LaneId, bytes: u64, now: Nanos, layers: u16) -> Transmission {
        self.lanes[lane].spec.transmission(bytes, now.max(self.free_at(lane)), layers)
    }

    /// Nanoseconds of a transmission over an idle lane.
    #[must_use]
    pub(crate) fn takes(&self, lane: LaneId, bytes: u64) -> Nanos {
        let spec = &self.lanes[lane].spec;
        spec.latency_ns.saturating_add(duration(bytes, spec.bytes_per_s))
    }

    /// Time at which the lane's queue becomes idle.
    #[must_use]
    pub fn free_at(&self, lane: LaneId) -> Nanos {
        self.queues[self.lanes[lane].queue].free_at
    }

    /// Keeps the lane's queue busy until a time, for transmissions not in these lanes.
    pub fn hold(&mut self, lane: LaneId, until: Nanos) {
        let free_at = &mut self.queues[self.lanes[lane].queue].free_at;
        *free_at = until.max(*free_at);
    }

    /// Empties all queues. Counters stay.
    pub fn reset(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.free_at = 0);
    }

    /// Predicted busy time of this lane in nanoseconds, including latency.
    #[must_use]
    pub fn predicted(&self, lane: LaneId) -> Nanos {
        self.lanes[lane].predicted
    }

    /// Total queueing time of this lane's transmissions in nanoseconds.
    #[must_use]
    pub fn waited(&self, lane: LaneId) -> Nanos {
        self.lanes[lane].waited
    }

    /// Measured busy time of this lane in nanoseconds. See
    /// [`Manager::add_lane_busy`](crate::manager::Manager::add_lane_busy).
    #[must_use]
    pub fn seen(&self, lane: LaneId) -> Nanos {
        self.lanes[lane].seen
    }

    /// Bytes given to this lane so far.
    #[must_use]
    pub fn bytes(&self, lane: LaneId) -> u64 {
        self.lanes[lane].bytes
    }
}

fn duration(bytes: u64, bytes_per_s: u64) -> Nanos {
    if bytes == 0 {
        return 0;
    }
    if bytes_per_s == 0 {
        return NEVER;
    }
    // The product mostly fits in 64 bits, and a 128-bit division takes several times as long.
    if let Some(product) = bytes.checked_mul(NANOS_PER_S) {
        return product.div_ceil(bytes_per_s);
    }
    let product = u128::from(bytes) * u128::from(NANOS_PER_S);
    Nanos::try_from(product.div_ceil(u128::from(bytes_per_s))).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use super::{LaneSpec, Lanes, Transmission};
    use crate::time::NEVER;

    fn spec(name: &str, bytes_per_s: u64, latency_ns: u64, shares: Option<&str>) -> LaneSpec {
        LaneSpec { name: name.into(), bytes_per_s, latency_ns, shares: shares.map(String::from) }
    }

    #[test]
    fn a_job_waits_for_a_queue_that_is_held() {
        let mut lanes = Lanes::default();
        let lane = lanes.add(spec("down", 1_000_000_000, 5, None));
        lanes.hold(lane, 40);
        lanes.hold(lane, 30);
        assert_eq!(lanes.free_at(lane), 40);
        assert_eq!(lanes.transmit(lane, 10, 20, 1).end, 55);
        assert_eq!((lanes.waited(lane), lanes.predicted(lane)), (20, 15));
    }

    #[test]
    fn a_later_job_waits_for_the_earlier_ones() {
        let mut lanes = Lanes::default();
        let lane = lanes.add(spec("down", 1_000_000_000, 5, None));
        let first = lanes.transmit(lane, 100, 10, 4);
        assert_eq!(first, Transmission { end: 115, first: 40, per_layer: 25 });
        let second = lanes.transmit(lane, 20, 11, 1);
        assert_eq!(second, Transmission { end: 140, first: 140, per_layer: 20 });
        let third = lanes.transmit(lane, 0, 500, 1);
        assert_eq!((third.end, lanes.free_at(lane)), (505, 505));
        assert_eq!((lanes.predicted(lane), lanes.bytes(lane)), (105 + 25 + 5, 120));
        assert_eq!(lanes.waited(lane), 115 - 11);
    }

    #[test]
    fn measured_time_depends_on_no_speed() {
        let mut lanes = Lanes::default();
        let lane = lanes.add(spec("up", 1, 5, None));
        lanes.transmit(lane, 100, 0, 1);
        assert!(lanes.add_busy("up", 3) && lanes.add_busy("up", 4));
        assert!(!lanes.add_busy("down", 1));
        assert_eq!((lanes.seen(lane), lanes.predicted(lane)), (7, 100 * 1_000_000_000 + 5));
    }

    #[test]
    fn a_preview_queues_nothing_and_tells_the_truth() {
        let mut lanes = Lanes::default();
        let lane = lanes.add(spec("up", 3, 7, None));
        let preview = lanes.preview(lane, 10, 4, 3);
        assert_eq!((lanes.free_at(lane), lanes.predicted(lane), lanes.bytes(lane)), (0, 0, 0));
        assert_eq!((lanes.takes(lane, 10), lanes.takes(lane, 0)), (preview.end - 4, 7));
        assert_eq!(lanes.transmit(lane, 10, 4, 3), preview);
        assert_eq!(lanes.takes(lane, 10), preview.end - 4);
        assert_eq!(preview.end, 4 + 7 + 3_333_333_334);
    }

    #[test]
    fn directions_that_share_a_queue_keep_their_own_bandwidth() {
        let mut lanes = Lanes::default();
        let read = lanes.add(spec("read", 1_000_000_000, 0, Some("disk")));
        let store = lanes.add(spec("store", 500_000_000, 0, Some("disk")));
        let other = lanes.add(spec("net", 1_000_000_000, 0, None));
        let named = lanes.add(spec("disk", 1_000_000_000, 0, None));
        assert_eq!(lanes.transmit(read, 10, 0, 1).end, 10);
        assert_eq!(lanes.transmit(store, 10, 0, 1).end, 30);
        assert_eq!(lanes.transmit(other, 10, 0, 1).end, 10);
        assert_eq!(lanes.transmit(named, 10, 0, 1).end, 40);
        assert_eq!(
            (lanes.free_at(read), lanes.predicted(read), lanes.predicted(store)),
            (40, 10, 20)
        );
        assert_eq!((lanes.find("store"), lanes.find("none")), (Some(store), None));
        assert_eq!(lanes.spec(store).bytes_per_s, 500_000_000);
    }

    #[test]
    fn no_layer_is_promised_before_its_bytes() {
        for bytes in 0..60 {
            for layers in 1..9 {
                let mut lanes = Lanes::default();
                let lane = lanes.add(spec("x", 1_000_000_000, 3, None));
                let sent = lanes.transmit(lane, bytes, 2, layers);
                for layer in 0..u64::from(layers) {
                    let arrived = 5 + (bytes * (layer + 1)).div_ceil(u64::from(layers));
                    assert!(sent.first + layer * sent.per_layer >= arrived);
                }
                let last = u64::from(layers) - 1;
                assert_eq!((sent.first + last * sent.per_layer, sent.end), (sent.end, 5 + bytes));
            }
        }
    }

    #[test]
    fn huge_numbers_saturate() {
        let mut lanes = Lanes::default();
        let slow = lanes.add(spec("slow", 1, 1, None));
        let dead = lanes.add(spec("dead", 0, 1, None));
        let fast = lanes.add(spec("fast", u64::MAX, 0, None));
        assert_eq!(lanes.transmit(slow, u64::MAX, 0, 2).end, NEVER);
        assert_eq!(lanes.transmit(slow, 1, 0, 2).end, NEVER);
        assert_eq!(lanes.transmit(dead, 1, 0, 1).end, NEVER);
        assert_eq!(lanes.transmit(fast, u64::MAX, 0, 1).end, 1_000_000_000);
    }
}
