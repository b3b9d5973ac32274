//! Tokens that are looked for, as wide as the caller holds them.
//!
//! To narrow a long prompt before it is compared would send it through memory twice more. Invariant: a
//! number that is no token is like none. Cost: one pass over what is compared.

use std::borrow::Cow;

use crate::block::Token;

/// A sequence to be looked up.
#[derive(Clone, Copy, Debug)]
pub enum Query<'a> {
    /// Tokens as they are.
    Tokens(&'a [Token]),
    /// Tokens below 2³¹; negative numbers are none.
    Signed(&'a [i32]),
    /// Tokens that take eight bytes each; larger numbers are none.
    Wide(&'a [u64]),
}

impl<'a> Query<'a> {
    /// How many there are.
    #[must_use]
    pub fn len(self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Signed(numbers) => numbers.len(),
            Self::Wide(numbers) => numbers.len(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The first `len` of them.
    #[must_use]
    pub fn first(self, len: usize) -> Self {
        match self {
            Self::Tokens(tokens) => Self::Tokens(&tokens[..len]),
            Self::Signed(numbers) => Self::Signed(&numbers[..len]),
            Self::Wide(numbers) => Self::Wide(&numbers[..len]),
        }
    }

    /// All but the first `at`.
    #[must_use]
    pub(super) fn from(self, at: usize) -> Self {
        match self {
            Self::Tokens(tokens) => Self::Tokens(&tokens[at..]),
            Self::Signed(numbers) => Self::Signed(&numbers[at..]),
            Self::Wide(numbers) => Self::Wide(&numbers[at..]),
        }
    }

    /// The tokens, up to the first number that is none.
    #[inline]
    #[must_use]
    pub fn tokens(self) -> Cow<'a, [Token]> {
        match self {
            Self::Tokens(tokens) => Cow::Borrowed(tokens),
            Self::Signed(numbers) => Cow::Owned(narrowed(numbers)),
            Self::Wide(numbers) => Cow::Owned(narrowed(numbers)),
        }
    }

    /// How many blocks of `size` tokens are those that are `known`, before the first that is not.
    /// There are at least as many numbers as known tokens.
    pub(super) fn alike(self, known: &[Token], size: usize) -> usize {
        match self {
            Self::Tokens(tokens) if *known == tokens[..known.len()] => known.len() / size,
            Self::Tokens(tokens) => alike(known, tokens, size, |known, asked| known == asked),
            // Without a branch per token: the processor takes several at once.
            Self::Signed(numbers) => alike(known, numbers, size, |known, asked| {
                let pairs = known.iter().zip(asked);
                let differ = |all: u32, (known, asked): (&Token, &i32)| {
                    let asked = asked.cast_unsigned();
                    all | (known ^ asked) | (asked & (1 << 31))
                };
                pairs.fold(0, differ) == 0
            }),
            Self::Wide(numbers) => alike(known, numbers, size, |known, asked| {
                let pairs = known.iter().zip(asked);
                pairs.fold(0, |all, (&known, asked)| all | (u64::from(known) ^ asked)) == 0
            }),
        }
    }
}

/// Numbers as tokens, up to the first that is none.
fn narrowed<T: Copy + TryInto<Token>>(numbers: &[T]) -> Vec<Token> {
    numbers.iter().map_while(|&number| number.try_into().ok()).collect()
}

/// How many blocks are the same, up to the first that is not.
fn alike<T>(
    known: &[Token],
    asked: &[T],
    size: usize,
    same: impl Fn(&[Token], &[T]) -> bool,
) -> usize {
    let pairs = known.chunks_exact(size).zip(asked.chunks_exact(size));
    pairs.take_while(|(known, asked)| same(known, asked)).count()
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
        /// All widths find the same, and nothing where a number is no token.
        #[test]
        fn widths_are_alike(
            known in prop::collection::vec(token(), 0..40),
            more in 0..9_usize,
            change in prop::option::of((0..40_usize, 0..4_u32)),
            size in 1..9_usize,
        ) {
            let mut tokens: Vec<Token> = known.iter().copied().chain(0..).take(known.len() + more).collect();
            if let Some((at, token)) = change
                && let Some(here) = tokens.get_mut(at)
            {
                *here = token;
            }
            let signed: Vec<i32> = tokens.iter().map(|token| token.cast_signed()).collect();
            let mut wide: Vec<u64> = tokens.iter().copied().map(u64::from).collect();
            let known = &known[..known.len() - known.len() % size];
            let pairs = || known.iter().zip(&tokens);
            let plain = pairs().take_while(|(a, b)| a == b).count() / size;
            let small = pairs().take_while(|(a, b)| a == b && **b < 1 << 31).count() / size;
            prop_assert_eq!(Query::Tokens(&tokens).alike(known, size), plain);
            prop_assert_eq!(Query::Signed(&signed).alike(known, size), small);
            prop_assert_eq!(Query::Wide(&wide).alike(known, size), plain);
            prop_assert_eq!(Query::Wide(&wide).tokens().into_owned(), tokens.clone());
            let below = tokens.iter().position(|&token| token >= 1 << 31).unwrap_or(tokens.len());
            prop_assert_eq!(Query::Signed(&signed).tokens().into_owned(), &tokens[..below]);
            if let Some(last) = wide.last_mut() {
                *last |= 1 << 40;
                let whole = if more > 0 { plain } else { plain.min((tokens.len() - 1) / size) };
                prop_assert_eq!(Query::Wide(&wide).alike(known, size), whole);
            }
        }
    }
}
