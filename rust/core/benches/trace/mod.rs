//! A multi-turn trace: conversations over shared system prompts, many of them open at a time.
//!
//! Invariant: the same seed gives the same requests. The shape is that of the comparison with
//! other managers: 4 to 6 turns of a question and an answer of 150 to 250 tokens each after one of
//! 20 system prompts of 512 tokens; 1000 conversations open, 64 requests running; mean prompt about
//! 96 blocks of 16 tokens. Cost: one sequence per open conversation.

use kvtrie_core::Token;

const ACTIVE: u64 = 1000;
const SYSTEM_PROMPTS: u64 = 20;
const SYSTEM_TOKENS: usize = 512;
const VOCABULARY: u64 = 128_000;

/// Small, seeded, and good enough for token ids.
pub(crate) struct Random(u64);

impl Random {
    /// The stream of that seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (bits ^ (bits >> 31)) % bound
    }

    /// `number` token ids.
    pub(crate) fn tokens(&mut self, number: usize) -> Vec<Token> {
        let token = |random: &mut Self| u32::try_from(1 + random.below(VOCABULARY - 1));
        (0..number).map(|_| token(self).expect("a small number")).collect()
    }
}

struct Conversation {
    tokens: Vec<Token>,
    turns_left: u64,
}

/// One turn: the tokens of prompt and answer, and where the answer begins.
pub(crate) struct Request {
    /// Prompt and answer.
    pub(crate) tokens: Vec<Token>,
    /// Number of them that are the prompt.
    pub(crate) prompt: usize,
}

/// Requests in order of arrival, without end.
pub(crate) struct Trace {
    random: Random,
    system: Vec<Vec<Token>>,
    open: Vec<Conversation>,
}

impl Trace {
    /// The trace of that seed, in the middle of the day: the conversations are in different turns.
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let system = (0..SYSTEM_PROMPTS).map(|_| random.tokens(SYSTEM_TOKENS)).collect();
        let mut trace = Self { random, system, open: Vec::new() };
        for _ in 0..ACTIVE {
            let fresh = trace.conversation();
            trace.open.push(fresh);
        }
        trace
    }

    fn conversation(&mut self) -> Conversation {
        let which = usize::try_from(self.random.below(SYSTEM_PROMPTS)).expect("a small number");
        Conversation { tokens: self.system[which].clone(), turns_left: 4 + self.random.below(3) }
    }

    fn some_tokens(&mut self) -> Vec<Token> {
        let number = usize::try_from(150 + self.random.below(101)).expect("a small number");
        self.random.tokens(number)
    }

    /// The next request; there is always one.
    pub(crate) fn take_next(&mut self) -> Request {
        let at = usize::try_from(self.random.below(ACTIVE)).expect("a small number");
        let (question, answer) = (self.some_tokens(), self.some_tokens());
        let conversation = &mut self.open[at];
        conversation.tokens.extend(question);
        let prompt = conversation.tokens.len();
        conversation.tokens.extend(answer);
        conversation.turns_left -= 1;
        let tokens = conversation.tokens.clone();
        if conversation.turns_left == 0 {
            self.open[at] = self.conversation();
        }
        Request { tokens, prompt }
    }
}
