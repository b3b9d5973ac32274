//! Memory that a call is about to take: whether it is there.
//!
//! An allocation that fails ends the process, so a large amount that an argument asks for is tried
//! first. Invariant: nothing is kept. Cost: one comparison; a large amount is taken once, untouched,
//! and given back.

use crate::error::{Error, Result};

/// Less than this is not tried.
const LARGE: usize = 64 << 20;

/// Whether so many bytes more can be had.
///
/// # Errors
/// [`Error::Config`], which says what they are for.
pub fn check(bytes: usize, what: impl FnOnce() -> String) -> Result<()> {
    if bytes < LARGE {
        return Ok(());
    }
    let mut tried: Vec<u8> = Vec::new();
    let there = tried.try_reserve_exact(bytes).is_ok();
    // What nobody looks at need not be allocated.
    std::hint::black_box(tried.as_ptr());
    if there {
        return Ok(());
    }
    Err(Error::config(format!("{} takes {bytes} bytes of memory, which are not there", what())))
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn what_no_machine_has_is_refused_and_the_rest_is_not() {
        assert!(check(1 << 20, || unreachable!()).is_ok());
        assert!(check(1 << 27, || unreachable!()).is_ok());
        for bytes in [1 << 60, usize::MAX] {
            let said = check(bytes, || "a reserve of 7 tokens".to_owned()).unwrap_err().to_string();
            assert!(said.contains("a reserve of 7 tokens") && said.contains(&bytes.to_string()));
        }
    }
}
