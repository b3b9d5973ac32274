//! Settings of a manager, checked before construction.
//!
//! Invariant: every manager's settings have passed `check`. Cost: none.

use crate::block::{Layers, Structure, Token};
use crate::cost::CostModel;
use crate::error::{Error, Result};
use crate::group::{Group, GroupKind, page_bytes};
use crate::policy;
use crate::residency::Arena;
use crate::tier::{Kind, Owner, TierSpec};

/// Order in which the layers of a last copy are dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DropOrder {
    /// Shallow layers first: recomputing a layer also recomputes all layers below it.
    #[default]
    Shallow,
    /// Deep layers first, as in the original design.
    Seed,
}

/// The settings of a manager.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Fingerprint of the weights, a part of every content hash.
    pub fingerprint: String,
    /// Number of layers of the model.
    pub layers: u16,
    /// Bytes of a layer of a block.
    pub layer_bytes: u64,
    /// Number of tokens of a block.
    pub block_tokens: u32,
    /// Number of real tokens per given token, above 1 for traces of block hashes.
    pub token_weight: u32,
    /// The tiers, at most four, fastest first.
    pub tiers: Vec<TierSpec>,
    /// Default policy of tiers.
    pub policy: String,
    /// Whether `retention` counts uses.
    pub reuse: bool,
    /// Policies that rank by cost / idle round costs down to classes a factor of `1 + epsilon`
    /// apart. With 0, costs are not rounded.
    pub epsilon: f64,
    /// Cost model of recomputation.
    pub cost: CostModel,
    /// Whether the user prices blocks: then `unpriced` returns new blocks.
    pub priced: bool,
    /// Default structure of scopes.
    pub structure: Structure,
    /// Order in which the layers of a last copy are dropped.
    pub drop_order: DropOrder,
    /// Number of tensor-parallel ranks. Each rank must report each move.
    pub ranks: u32,
    /// Number of events kept for `take_events`, or 0 for none.
    pub events: usize,
    /// Number of block events kept for `take_block_events`, or 0 for none.
    pub block_events: usize,
    /// Number of evictions kept for `evictions`, or 0 for none.
    pub eviction_log: usize,
    /// Whether evicted blocks are remembered for `miss` under policies that do not need them.
    pub explain: bool,
    /// Key of the hashes of producing tenants. Without a key, no scope shares blocks after a number
    /// of producers on a disk or a shared store.
    pub producer_key: Option<[u8; 32]>,
    /// Groups of a model with several groups, each with its own range of needed blocks.
    pub groups: Option<Groups>,
}

/// Derives the key for producer hashes from a secret.
#[must_use]
pub fn producer_key(secret: &[u8]) -> [u8; 32] {
    blake3::derive_key("kvtrie 2026-11 producers of blocks", secret)
}

/// Groups of layers, and the choice of resume points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups {
    /// The groups. The first group is full and has the settings' `layers` and `layer_bytes`.
    pub groups: Vec<Group>,
    /// Bytes of each tier for all groups together.
    pub bytes: Vec<u64>,
    /// Slot bytes by tier and group. They differ from the group's bytes on a tier with a different
    /// format or with headers.
    pub slots: Vec<Vec<u64>>,
    /// Number of newest resume points kept per path. Points at branches are kept in addition.
    pub newest: u32,
    /// Distance in blocks between resume points. All these points are kept. With 0, points are at
    /// branches and at the end of prompts and answers.
    pub every: u32,
}

impl Groups {
    /// Maximum number of groups.
    const MOST: usize = 64;

    /// The arenas of all tiers.
    ///
    /// # Errors
    /// [`Error::Config`] if a block of the first group and a resume point do not fit.
    pub(super) fn arenas(&self) -> Result<Vec<Arena>> {
        self.bytes
            .iter()
            .zip(&self.slots)
            .map(|(&bytes, slots)| Self::arena(bytes, slots))
            .collect()
    }

    fn arena(bytes: u64, slots: &[u64]) -> Result<Arena> {
        let page = page_bytes(slots)?;
        let pages = u32::try_from(bytes / page).unwrap_or(u32::MAX);
        let per_page = |&slot: &u64| {
            u16::try_from(page / slot).map_err(|_| {
                Error::config(format!("a page of {page} bytes has more than 65535 slots of {slot}"))
            })
        };
        let per_page: Vec<u16> = slots.iter().map(per_page).collect::<Result<_>>()?;
        let most = u64::from(pages) * u64::from(per_page.iter().copied().max().unwrap_or(1));
        if most >= u64::from(Token::MAX) {
            return Err(Error::config(format!(
                "{bytes} bytes are {most} slots of one group, at most 2^32 - 2 wanted"
            )));
        }
        let arena = Arena::new(pages, &per_page);
        if !arena.fits(&vec![1; slots.len()]) {
            return Err(Error::config(format!(
                "{bytes} bytes are {pages} pages of {page}: {} are wanted for one block and one \
                 resume point",
                slots.len()
            )));
        }
        Ok(arena)
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let (groups, tiers) = (self.groups.len(), settings.tiers.len());
        if !(1..=Self::MOST).contains(&groups) || self.groups[0].kind != GroupKind::Full {
            return Err(Error::config(format!(
                "{groups} groups, the first of kind {:?}: 1 to {} wanted, the first one full",
                self.groups.first().map(|group| group.kind),
                Self::MOST
            )));
        }
        // With a single group every block border is a resume point, and tiers have room for whole
        // blocks.
        if groups == 1 {
            return Ok(());
        }
        if self.bytes.len() != tiers {
            let bytes = self.bytes.len();
            return Err(Error::config(format!("bytes of {bytes} tiers are given, of {tiers}")));
        }
        if self.slots.len() != tiers || self.slots.iter().any(|slots| slots.len() != groups) {
            return Err(Error::config(format!(
                "slots of {:?} groups are given for {tiers} tiers, of {groups} each wanted",
                self.slots.iter().map(Vec::len).collect::<Vec<_>>()
            )));
        }
        for tier in &settings.tiers {
            check_tier(tier, groups)?;
        }
        for group in &self.groups {
            let bad = match group.kind {
                GroupKind::Sliding { window, .. } => window == 0,
                GroupKind::Chunked { chunk } => chunk == 0,
                GroupKind::Full | GroupKind::State => false,
            };
            if bad {
                return Err(Error::config(format!("{:?} wants a window above 0", group.kind)));
            }
        }
        if self.newest == 0 {
            return Err(Error::config("0 resume points of a path are kept, at least 1 wanted"));
        }
        self.arenas().map(drop)
    }
}

impl Settings {
    /// Default settings of a model with a single group of layers.
    ///
    /// They have blocks of 16 tokens, the policy `learned`, a single rank, no events, and the
    /// default cost at 20 000 prefill tokens per second.
    #[must_use]
    pub fn new(
        fingerprint: impl Into<String>,
        layers: u16,
        layer_bytes: u64,
        tiers: Vec<TierSpec>,
    ) -> Self {
        Self {
            fingerprint: fingerprint.into(),
            layers,
            layer_bytes,
            block_tokens: 16,
            token_weight: 1,
            tiers,
            policy: "learned".to_owned(),
            reuse: true,
            epsilon: 1.0 / 64.0,
            cost: CostModel::default_curve(50_000.0).expect("a finite time"),
            priced: false,
            structure: Structure::LeafOnly,
            drop_order: DropOrder::Shallow,
            ranks: 1,
            events: 0,
            block_events: 0,
            eviction_log: 0,
            explain: false,
            producer_key: None,
            groups: None,
        }
    }

    /// Bytes of layers of a block in a group.
    pub(super) fn move_bytes(&self, group: u8, layers: Layers) -> u64 {
        match &self.groups {
            Some(groups) if group > 0 => groups.groups[usize::from(group)].slot_bytes,
            _ => self.layer_bytes * u64::from(layers.len()),
        }
    }

    /// Whether blocks outlive the manager, but producers have no hash key.
    pub(super) fn lacks_producer_key(&self) -> bool {
        let outlives =
            |tier: &TierSpec| tier.kept || matches!(tier.kind, Kind::Disk | Kind::Remote);
        self.producer_key.is_none() && self.tiers.iter().any(outlives)
    }

    /// Checks every field, and the tiers against each other.
    pub(super) fn check(&self) -> Result<()> {
        let tiers = &self.tiers;
        if tiers.is_empty() || tiers.len() > 4 {
            return Err(Error::config(format!("{} tiers given, one to four wanted", tiers.len())));
        }
        if self.layers == 0 || self.block_tokens == 0 || self.token_weight == 0 {
            return Err(Error::config(format!(
                "layers {}, block_tokens {} and token_weight {} must be positive",
                self.layers, self.block_tokens, self.token_weight
            )));
        }
        if !(1..=64).contains(&self.ranks) {
            return Err(Error::config(format!("ranks is {}, 1 to 64 wanted", self.ranks)));
        }
        if !(0.0..=1.0).contains(&self.epsilon) {
            return Err(Error::config(format!("epsilon is {}, 0 to 1 wanted", self.epsilon)));
        }
        policy::check(&self.policy)?;
        let policies = tiers.iter().map(|tier| tier.policy.as_ref().unwrap_or(&self.policy));
        policy::check_objective(policies.map(String::as_str), self.cost.objective())?;
        for at in 0..tiers.len() {
            self.check_tier(at)?;
        }
        if let Some(groups) = &self.groups {
            groups.check(self)?;
        }
        self.check_remote()
    }

    /// Checks a tier and its position in the list.
    fn check_tier(&self, at: usize) -> Result<()> {
        let (tiers, tier) = (&self.tiers, &self.tiers[at]);
        let name = tier.kind.name();
        if let Some(policy) = &tier.policy {
            policy::check(policy)?;
        }
        // `Kind` is ordered from fast to slow.
        if tiers[..at].iter().any(|above| above.kind >= tier.kind) {
            return Err(Error::config(format!(
                "tier {at} is '{name}': tiers go gpu, host, disk, remote, each at most once"
            )));
        }
        let slots =
            u64::from(tier.blocks) * if tier.layer_slots { u64::from(self.layers) } else { 1 };
        if tier.blocks == 0 || slots >= u64::from(Token::MAX) {
            return Err(Error::config(format!(
                "tier '{name}' has {} blocks and {slots} slots, 1 to 2^32 - 2 wanted",
                tier.blocks
            )));
        }
        // A tier with a single slot per block could not give single layers to the tier below.
        if tier.layer_slots && at > 0 && !tiers[at - 1].layer_slots {
            return Err(Error::config(format!(
                "tier '{name}' has layer_slots, so '{}' above it must have them too",
                tiers[at - 1].kind.name()
            )));
        }
        if tier.layer_slots && matches!(tier.kind, Kind::Disk | Kind::Remote) {
            return Err(Error::config(format!(
                "tier '{name}' stores whole objects and cannot have layer_slots"
            )));
        }
        if tier.owner == Owner::Engine && (at > 0 || tiers.len() == 1 || tier.layer_slots) {
            return Err(Error::config(format!(
                "tier '{name}' has owner 'engine': only a first tier of several, without \
                 layer_slots, can"
            )));
        }
        check_shares(tier)
    }

    /// Checks that blocks can pass through host to remote.
    fn check_remote(&self) -> Result<()> {
        let tiers = &self.tiers;
        let remote = tiers.iter().any(|tier| tier.kind == Kind::Remote);
        if remote && !tiers.iter().any(|tier| tier.kind == Kind::Host) {
            return Err(Error::config(
                "tier 'remote' exchanges bytes with 'host', which is missing",
            ));
        }
        let host = tiers.iter().find(|tier| tier.kind == Kind::Host);
        // A block passes through host from disk to remote. This needs a slot in addition to the
        // reserved slot.
        let passes = remote && tiers.iter().any(|tier| tier.kind == Kind::Disk);
        if let (true, Some(host)) = (passes, host)
            && (host.blocks < 2 || host.layer_slots)
        {
            return Err(Error::config(format!(
                "tier 'host' has {} blocks and layer_slots {}: blocks on their way from disk to \
                 remote pass through it and want at least 2 blocks of whole slots",
                host.blocks, host.layer_slots
            )));
        }
        Ok(())
    }
}

/// Checks that groups can share a tier.
fn check_tier(tier: &TierSpec, groups: usize) -> Result<()> {
    let no = |why: String| {
        Err(Error::config(format!("tier '{}' with {groups} groups: {why}", tier.kind.name())))
    };
    if tier.layer_slots {
        return no("a slot is cut out of a page, so layer_slots must be false".to_owned());
    }
    Ok(())
}

/// Checks a tier's shares of its capacity.
fn check_shares(tier: &TierSpec) -> Result<()> {
    let name = tier.kind.name();
    for (what, share) in [("free_low", tier.free_low), ("growth_reserve", tier.growth_reserve)] {
        if !(0.0..1.0).contains(&share) {
            return Err(Error::config(format!(
                "{what} of tier '{name}' is {share}, 0 to below 1 wanted"
            )));
        }
    }
    if !(0.0..=1.0).contains(&tier.retained_share) {
        return Err(Error::config(format!(
            "retained_share of tier '{name}' is {}, 0 to 1 wanted",
            tier.retained_share
        )));
    }
    Ok(())
}
