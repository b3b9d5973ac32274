//! Endless conversations: memory and examined entries per request stay constant.
//!
//! Invariant: sessions are bounded by blocks and leases. Cost: the full count takes minutes; `cargo
//! test` plays a tenth of it.

#![cfg(debug_assertions)]
#![allow(dead_code, reason = "the benches use the rest")]

#[path = "../benches/pool/mod.rs"]
mod pool;

use kvtrie_core::internals::visits_during;
use kvtrie_core::{Acquire, Hint, Manager, Release, Scope, Token};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const SIZE: usize = 16;
const POOL: u32 = 64;

fn over(name: &str) -> Hint {
    Hint::Release(Release::Session { name: name.to_owned(), scope: Scope::default() })
}

/// One conversation of any kind: it ends in a shared prefix, has an unshared block, or is given up
/// before its first commit; some are hinted to be over, some have no name.
fn converse(manager: &mut Manager, number: u32) {
    let now = u64::from(number) * 1000;
    let name = format!("session {number}");
    let session = (!number.is_multiple_of(7)).then_some(name.as_str());
    let shared = 1 + number as usize % 3;
    let own = usize::from(number.is_multiple_of(4));
    let prompt: Vec<Token> = [vec![1; shared * SIZE], vec![10 + number; own * SIZE]].concat();
    let ask = Acquire { tokens: &prompt, session, scope: Scope::default(), ..Acquire::default() };
    let id = manager.acquire(&ask, now).expect("there is room");
    let matched = manager.lease(id).expect("held").matched();
    if !number.is_multiple_of(5) {
        manager.commit(id, &prompt[matched..], now).expect("there is room");
    }
    manager.release(id, now).expect("held");
    let fresh = vec![10 + number; 2 * SIZE];
    let gives_up = format!("given up {number}");
    let ask = Acquire { tokens: &fresh, session: Some(&gives_up), ..Acquire::default() };
    let id = manager.acquire(&ask, now).expect("there is room");
    manager.release(id, now).expect("held");
    if number.is_multiple_of(9) {
        manager.hint(&[over(&name), over(&gives_up)], now).expect("good hints");
    }
}

/// Bytes and the most entries that a turn examined, after a tenth of the sessions and after all.
fn endless(policy: &str, sessions: u32) -> [(usize, u64); 2] {
    let before = HEAP.current_usage();
    let mut manager = pool::manager(policy, POOL);
    let mut most = 0;
    let mut tenth = (0, 0);
    for number in 0..sessions {
        if number == sessions / 10 {
            tenth = (HEAP.current_usage() - before, most);
            most = 0;
        }
        let ((), looked_at) = visits_during(|| converse(&mut manager, number));
        most = most.max(looked_at);
    }
    manager.audit().expect("sound");
    [tenth, (HEAP.current_usage() - before, most)]
}

fn neither_memory_nor_looks_grow(policy: &str, sessions: u32) {
    let [(few_bytes, few_looks), (bytes, looks)] = endless(policy, sessions);
    assert!(
        bytes.abs_diff(few_bytes) < 1 << 20,
        "{policy}: {few_bytes} bytes after a tenth, {bytes} after {sessions} sessions"
    );
    assert!(
        looks <= few_looks && looks > 0,
        "{policy}: {few_looks} entries looked at in a turn of the first tenth, {looks} later"
    );
}

// One test, so that no other one allocates at the same time.
#[test]
fn memory_and_examined_entries_do_not_grow_with_sessions() {
    for policy in ["lru", "weighted"] {
        neither_memory_nor_looks_grow(policy, 100_000);
    }
}

#[test]
#[ignore = "the full count takes minutes; alone, because it counts bytes"]
fn memory_and_examined_entries_do_not_grow_over_a_million_sessions() {
    for policy in ["lru", "weighted", "checkerboard"] {
        neither_memory_nor_looks_grow(policy, 1_000_000);
    }
}
