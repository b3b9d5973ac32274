//! Hash router: a fixed machine per session.
//!
//! Invariant: all requests of a session, or with the same first block if they have no session, go
//! to the same machine. Cost: O(block).

use super::{Candidate, Router};
use crate::event::MachineId;
use crate::request::Request;

/// Routes by the hash (64-bit FNV-1a) of the session, else of the first block.
#[derive(Debug)]
pub struct Hash {
    /// Tokens of a block.
    pub block_tokens: usize,
}

impl Router for Hash {
    fn route(&mut self, request: &Request, machines: &[Candidate]) -> MachineId {
        let first = request.tokens.iter().take(self.block_tokens);
        let hash = request.session.as_ref().map_or_else(
            || fnv1a(first.flat_map(|token| token.to_le_bytes())),
            |session| fnv1a(session.bytes()),
        );
        usize::try_from(hash % machines.len() as u64).unwrap_or(0)
    }
}

fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::{Hash, fnv1a};
    use crate::request::Request;
    use crate::router::{Candidate, LeastLoaded, RoundRobin, Router};

    fn loads<const N: usize>(loads: [u64; N]) -> [Candidate; N] {
        loads.map(|load| Candidate { load, ..Candidate::default() })
    }

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a(b"".iter().copied()), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar".iter().copied()), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_session_stays_and_the_first_block_decides_without_one() {
        let mut hash = Hash { block_tokens: 2 };
        let request = |tokens: &[u32], session: Option<&str>| Request {
            tokens: tokens.to_vec(),
            session: session.map(String::from),
            ..Request::default()
        };
        let mut seen = [0; 8];
        for name in 0..64 {
            let name = format!("session {name}");
            let chosen = hash.route(&request(&[1], Some(&name)), &loads([0; 8]));
            assert_eq!(chosen, hash.route(&request(&[7, 8], Some(&name)), &loads([9; 8])));
            seen[chosen] += 1;
        }
        assert!(seen.iter().all(|&count| count > 0), "{seen:?}");
        let ends = |end| hash.route(&request(&[1, 2, end], None), &loads([0; 64]));
        assert_eq!([3, 4, 5].map(ends), [hash.route(&request(&[1, 2], None), &loads([0; 64])); 3]);
    }

    #[test]
    fn turns_and_the_least_load() {
        let (mut turns, request) = (RoundRobin::default(), Request::default());
        assert_eq!([0; 4].map(|_: i32| turns.route(&request, &loads([5, 0, 5]))), [0, 1, 2, 0]);
        assert_eq!(LeastLoaded.route(&request, &loads([3, 1, 1])), 1);
    }
}
