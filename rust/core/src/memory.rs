//! Check before a large allocation, because a failed allocation aborts the process.
//!
//! Used for amounts derived from arguments. Invariant: nothing stays allocated. Cost: a comparison.
//! Large amounts are reserved once, untouched, and freed.

use crate::error::{Error, Result};

/// Smaller amounts are not tried.
const LARGE: usize = 64 << 20;

/// Checks that `bytes` more bytes can be allocated.
///
/// # Errors
/// [`Error::Config`] with their purpose `what`, if not.
pub(crate) fn check(bytes: usize, what: impl FnOnce() -> String) -> Result<()> {
    if bytes < LARGE {
        return Ok(());
    }
    let mut tried: Vec<u8> = Vec::new();
    let available = tried.try_reserve_exact(bytes).is_ok();
    // Keeps the compiler from eliding an unused allocation.
    std::hint::black_box(tried.as_ptr());
    if available {
        return Ok(());
    }
    Err(Error::config(format!("{} takes {bytes} bytes of memory, more than available", what())))
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn an_impossible_allocation_is_refused() {
        assert!(check(1 << 20, || unreachable!()).is_ok());
        assert!(check(1 << 27, || unreachable!()).is_ok());
        for bytes in [1 << 60, usize::MAX] {
            let text = check(bytes, || "a reserve of 7 tokens".to_owned()).unwrap_err().to_string();
            assert!(text.contains("a reserve of 7 tokens") && text.contains(&bytes.to_string()));
        }
    }
}
