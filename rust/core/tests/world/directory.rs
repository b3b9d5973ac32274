//! Directory: a plain map built from block events, compared with residency.
//!
//! Invariant: it reads block events and snapshots, nothing else of the manager.

use std::collections::{BTreeMap, BTreeSet};

use kvtrie_core::{BlockEvent, BlockEventKind, BlockKey, Layers, Manager, TierId, Token};

/// Content of a block's key: the key before it and its tokens.
type Named = (BlockKey, Vec<Token>);

/// The valid layers of each copy.
#[derive(Debug, Default)]
pub(super) struct Directory {
    copies: BTreeMap<(u64, TierId), Vec<u16>>,
    /// The copies that events call complete.
    whole: BTreeSet<(u64, TierId)>,
    keys: BTreeMap<BlockKey, Named>,
    next: u64,
}

impl Directory {
    /// Replays the events since; with `compared` the map must equal the manager's residency.
    pub(super) fn check(&mut self, manager: &mut Manager, compared: bool) {
        if manager.settings().block_events == 0 {
            return;
        }
        let events = manager.take_block_events().expect("the manager is open");
        for batch in events.chunk_by(|one, next| one.at == next.at) {
            self.replay(batch);
        }
        if compared {
            let state = String::from_utf8(manager.snapshot()).expect("text");
            let resident: BTreeMap<_, _> = state.lines().flat_map(copies).collect();
            assert_eq!(self.copies, resident, "of {events:?} and {state}");
            self.compare_contents(manager);
        }
    }

    /// The listed contents are the copies, parents before children.
    fn compare_contents(&self, manager: &mut Manager) {
        let all = usize::from(manager.settings().layers);
        let (next, contents) = manager.block_contents().expect("the manager is open");
        assert_eq!(next, self.next);
        let (mut listed_keys, mut parents) = (BTreeSet::new(), BTreeSet::new());
        let mut listed = BTreeMap::new();
        for event in contents {
            assert_eq!((event.number, event.kind), (next, BlockEventKind::Stored));
            assert_eq!(self.keys[&event.key], (event.parent, event.tokens.to_vec()));
            let layers: Vec<u16> = event.layers.iter().collect();
            assert_eq!(event.whole, layers.len() == all, "{event:?}");
            assert!(listed.insert((event.block.0, event.tier), layers).is_none(), "{event:?}");
            // No child of it was listed before it.
            assert!(listed_keys.contains(&event.key) || !parents.contains(&event.key), "{event:?}");
            listed_keys.insert(event.key);
            parents.insert(event.parent);
        }
        assert_eq!(listed, self.copies);
        let whole = listed.into_iter().filter(|(_, layers)| layers.len() == all);
        assert_eq!(whole.map(|(copy, _)| copy).collect::<BTreeSet<_>>(), self.whole);
    }

    fn replay(&mut self, batch: &[BlockEvent]) {
        for event in batch {
            assert_eq!(event.number, self.next, "no event is lost or sent twice");
            self.next += 1;
            let place = (event.block.0, event.tier);
            let held = self.copies.entry(place).or_default();
            for layer in event.layers.iter() {
                let known = held.iter().position(|&one| one == layer);
                match (event.kind, known) {
                    (BlockEventKind::Stored, None) => held.push(layer),
                    (BlockEventKind::Removed, Some(at)) => drop(held.swap_remove(at)),
                    _ => panic!("{event:?} of a copy that has {held:?}"),
                }
            }
            if event.whole {
                let changed = match event.kind {
                    BlockEventKind::Stored => self.whole.insert(place),
                    BlockEventKind::Removed => self.whole.remove(&place),
                };
                assert!(changed, "{event:?}");
            }
            held.sort_unstable();
            if held.is_empty() {
                self.copies.remove(&place);
            }
            if event.kind == BlockEventKind::Removed {
                assert!(event.tokens.is_empty(), "{event:?}");
                assert_eq!(self.keys[&event.key].0, event.parent, "{event:?}");
                continue;
            }
            let named = (event.parent, event.tokens.to_vec());
            let known = self.keys.insert(event.key, named.clone());
            let same = known.is_none_or(|known| known == named);
            assert!(same, "one key, two blocks: {event:?}");
        }
        // Of one time: copies that left, each before its parent's, then those that came.
        let came = batch.partition_point(|event| event.kind == BlockEventKind::Removed);
        let (left, came) = batch.split_at(came);
        assert!(came.iter().all(|event| event.kind == BlockEventKind::Stored), "{batch:?}");
        for (from, to) in [(left, false), (came, true)] {
            let keys: Vec<_> = from.iter().map(|event| (event.key, event.parent)).collect();
            for (at, &(key, parent)) in keys.iter().enumerate() {
                let wrong = keys[at + 1..]
                    .iter()
                    .any(|&(other, above)| if to { other == parent } else { above == key });
                assert!(!wrong, "{:?} is in the wrong place of {batch:?}", from[at]);
            }
        }
    }
}

/// The copies of a line of a snapshot, with the layers that are valid.
fn copies(line: &str) -> Vec<((u64, TierId), Vec<u16>)> {
    let Some(rest) = line.strip_prefix("block 0x") else { return Vec::new() };
    let (handle, rest) = rest.split_once(' ').expect("a handle");
    let handle = u64::from_str_radix(handle, 16).expect("a number");
    let number = |text: &str, name: &str| {
        let (_, behind) = text.split_once(name)?;
        behind.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u16>().ok()
    };
    let parts: Vec<&str> = rest.split(":Residency {").collect();
    let tiers = parts.windows(2).filter_map(|two| {
        let tier = two[0].rsplit(' ').next()?.parse().ok()?;
        let layers = Layers::new(number(two[1], "lo: ")?, number(two[1], "hi: ")?);
        let bad = two[1].split('}').nth(1)?.contains("state: Bad");
        (!bad && !layers.is_empty()).then(|| ((handle, tier), layers.iter().collect()))
    });
    tiers.collect()
}
