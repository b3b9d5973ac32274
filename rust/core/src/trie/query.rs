//! Query: the tokens to look up, in the caller's integer width.
//!
//! Converting a long prompt first would stream it through memory two more times. Invariant: numbers
//! beyond the token range match nothing. Cost: a pass over the compared numbers.

use std::borrow::Cow;

use crate::block::Token;

/// Tokens to look up.
#[derive(Clone, Copy, Debug)]
pub enum Query<'a> {
    /// Tokens as stored.
    Tokens(&'a [Token]),
    /// Signed tokens. Negative numbers match nothing.
    Signed(&'a [i32]),
    /// 8-byte tokens. Numbers beyond 32 bits match nothing.
    Wide(&'a [u64]),
}

impl<'a> Query<'a> {
    /// Number of numbers.
    #[must_use]
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Signed(numbers) => numbers.len(),
            Self::Wide(numbers) => numbers.len(),
        }
    }

    /// The first `len` numbers.
    #[must_use]
    pub(crate) fn first(self, len: usize) -> Self {
        match self {
            Self::Tokens(tokens) => Self::Tokens(&tokens[..len]),
            Self::Signed(numbers) => Self::Signed(&numbers[..len]),
            Self::Wide(numbers) => Self::Wide(&numbers[..len]),
        }
    }

    /// All but the first `at` numbers.
    #[must_use]
    pub(super) fn from(self, at: usize) -> Self {
        match self {
            Self::Tokens(tokens) => Self::Tokens(&tokens[at..]),
            Self::Signed(numbers) => Self::Signed(&numbers[at..]),
            Self::Wide(numbers) => Self::Wide(&numbers[at..]),
        }
    }

    /// The tokens, up to the first number out of range.
    #[inline]
    #[must_use]
    pub(crate) fn tokens(self) -> Cow<'a, [Token]> {
        match self {
            Self::Tokens(tokens) => Cow::Borrowed(tokens),
            Self::Signed(numbers) => Cow::Owned(narrowed(numbers)),
            Self::Wide(numbers) => Cow::Owned(narrowed(numbers)),
        }
    }

    /// Number of leading blocks of `size` tokens equal to the blocks of `known`. The query is at
    /// least as long as `known`.
    pub(super) fn equal_blocks(self, known: &[Token], size: usize) -> usize {
        match self {
            // A single comparison for the usual case of equal blocks.
            Self::Tokens(tokens) if *known == tokens[..known.len()] => known.len() / size,
            Self::Tokens(tokens) => count_equal(known, tokens, size, |known, given| known == given),
            // Accumulate differences instead of branching per token: the loop vectorizes.
            Self::Signed(numbers) => count_equal(known, numbers, size, |known, given| {
                let pairs = known.iter().zip(given);
                let differ = |all: u32, (known, given): (&Token, &i32)| {
                    let given = given.cast_unsigned();
                    all | (known ^ given) | (given & (1 << 31))
                };
                pairs.fold(0, differ) == 0
            }),
            Self::Wide(numbers) => count_equal(known, numbers, size, |known, given| {
                let pairs = known.iter().zip(given);
                pairs.fold(0, |all, (&known, given)| all | (u64::from(known) ^ given)) == 0
            }),
        }
    }
}

/// Converts numbers up to the first out of range.
fn narrowed<T: Copy + TryInto<Token>>(numbers: &[T]) -> Vec<Token> {
    numbers.iter().map_while(|&number| number.try_into().ok()).collect()
}

/// Counts leading equal blocks.
fn count_equal<T>(
    known: &[Token],
    given: &[T],
    size: usize,
    same: impl Fn(&[Token], &[T]) -> bool,
) -> usize {
    let pairs = known.chunks_exact(size).zip(given.chunks_exact(size));
    pairs.take_while(|(known, given)| same(known, given)).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Query;
    use crate::block::Token;

    fn token() -> impl Strategy<Value = Token> {
        prop_oneof![0..3_u32, (1_u32 << 31) - 1..=(1 << 31) + 1]
    }

    proptest! {
        /// All widths find the same blocks, and none where a number is out of range.
        #[test]
        fn all_widths_match_the_same(
            known in prop::collection::vec(token(), 0..40),
            more in 0..9_usize,
            change in prop::option::of((0..40_usize, 0..4_u32)),
            size in 1..9_usize,
        ) {
            let mut tokens: Vec<Token> = known.iter().copied().chain(0..).take(known.len() + more).collect();
            if let Some((at, token)) = change
                && let Some(known_token) = tokens.get_mut(at)
            {
                *known_token = token;
            }
            let signed: Vec<i32> = tokens.iter().map(|token| token.cast_signed()).collect();
            let mut wide: Vec<u64> = tokens.iter().copied().map(u64::from).collect();
            let known = &known[..known.len() - known.len() % size];
            let pairs = || known.iter().zip(&tokens);
            let plain = pairs().take_while(|(a, b)| a == b).count() / size;
            let small = pairs().take_while(|(a, b)| a == b && **b < 1 << 31).count() / size;
            prop_assert_eq!(Query::Tokens(&tokens).equal_blocks(known, size), plain);
            prop_assert_eq!(Query::Signed(&signed).equal_blocks(known, size), small);
            prop_assert_eq!(Query::Wide(&wide).equal_blocks(known, size), plain);
            prop_assert_eq!(Query::Wide(&wide).tokens().into_owned(), tokens.clone());
            let below = tokens.iter().position(|&token| token >= 1 << 31).unwrap_or(tokens.len());
            prop_assert_eq!(Query::Signed(&signed).tokens().into_owned(), &tokens[..below]);
            if let Some(last) = wide.last_mut() {
                *last |= 1 << 40;
                let whole = if more > 0 { plain } else { plain.min((tokens.len() - 1) / size) };
                prop_assert_eq!(Query::Wide(&wide).equal_blocks(known, size), whole);
            }
        }
    }
}
