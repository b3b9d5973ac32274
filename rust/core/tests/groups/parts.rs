//! Windows and states that leave by themselves, and pins that keep them.

use kvtrie_core::{Handle, Manager, Place, Scope};

use super::{STATE, WINDOW, held, of};
use crate::group_story::FULL;
use crate::rig::{GPU, Rig, SIZE, tokens};

const WINDOWS: Place = Place::new(GPU, 1);

fn evict(count: u64) -> impl Fn(&mut Manager, u64) -> kvtrie_core::Result<Vec<Handle>> {
    move |m, now| m.evict_parts(WINDOWS, count, now)
}

fn known(rig: &Rig, stem: u32, blocks: usize) -> usize {
    rig.manager.known(&tokens(stem, blocks), &Scope::default()).unwrap()
}

#[test]
fn windows_leave_before_their_blocks_released_ones_first() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 100_000));
    rig.serve(&tokens(1, 9));
    rig.serve(&tokens(2, 9));
    let released = held(&rig)[1];
    assert!(released.1 > 0);
    // Both ends stay while released windows are enough.
    assert_eq!(rig.call(evict(released.1)).unwrap().len() as u64, released.1);
    assert_eq!((rig.matched(&tokens(1, 9)), rig.matched(&tokens(2, 9))), (9 * SIZE, 9 * SIZE));
    assert_eq!(rig.call(evict(1)).unwrap().len(), 1);
    assert_eq!((rig.matched(&tokens(1, 9)), known(&rig, 1, 9)), (0, 9 * SIZE));
    assert_eq!(rig.matched(&tokens(2, 9)), 9 * SIZE);
    // All that is left.
    rig.call(evict(1000)).unwrap();
    assert_eq!(held(&rig)[1], (0, 0));
    assert_eq!((rig.matched(&tokens(2, 9)), known(&rig, 2, 9)), (0, 9 * SIZE));
    rig.serve(&tokens(2, 9));
    assert_eq!(rig.matched(&tokens(2, 9)), 9 * SIZE);
}

#[test]
fn a_pinned_window_stays_until_the_pin_ends() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 100_000));
    rig.serve(&tokens(1, 9));
    let blocks = rig.blocks(&tokens(1, 9));
    let last = blocks[8..].to_vec();
    let pin = rig.call(|m, now| m.pin_copies(&last, WINDOWS, now)).unwrap();
    assert!(!rig.call(evict(1000)).unwrap().contains(&last[0]));
    assert_eq!(held(&rig)[1], (1, 0));
    assert!(rig.call(|m, now| m.clear_parts(WINDOWS, &last, now)).is_err());
    rig.call(|m, now| m.unpin_copies(pin, now)).unwrap();
    assert_eq!(rig.call(|m, now| m.clear_parts(WINDOWS, &last, now)).unwrap(), last);
    assert_eq!(held(&rig)[1], (0, 0));
    // Nothing is there to be pinned.
    assert!(rig.call(|m, now| m.pin_copies(&last, WINDOWS, now)).is_err());
}

#[test]
fn points_that_need_a_cleared_part_end() {
    let mut rig = Rig::new(of(&[FULL, WINDOW, STATE], 100_000));
    rig.serve(&tokens(1, 9));
    let blocks = rig.blocks(&tokens(1, 9));
    let state = Place::new(GPU, 2);
    let cleared = rig.call(|m, now| m.clear_parts(state, &blocks, now)).unwrap();
    assert_eq!(cleared, [blocks[8]]);
    assert_eq!((rig.matched(&tokens(1, 9)), known(&rig, 1, 9)), (0, 9 * SIZE));
    // The windows of the point are released.
    assert_eq!(held(&rig)[1].0, 0);
}

#[test]
fn parts_are_of_groups_after_the_first() {
    let mut rig = Rig::new(of(&[FULL, WINDOW], 100_000));
    rig.serve(&tokens(1, 4));
    for place in [Place::new(GPU, 0), Place::new(GPU, 2), Place::new(7, 1)] {
        assert!(rig.call(|m, now| m.evict_parts(place, 1, now)).is_err());
        assert!(rig.call(|m, now| m.clear_parts(place, &[], now)).is_err());
    }
    assert!(rig.call(|m, now| m.pin_copies(&[], Place::new(GPU, 2), now)).is_err());
}
