//! A small LLM engine: batching, preemption, and KV in GPU and host memory.
//!
//! The engine owns its GPU memory: it allocates slots, keeps a block table per request, and preempts
//! a request when slots run out. kvtrie decides which blocks of a prompt are found, which copies
//! between GPU and host memory are made, and which blocks the host evicts.
//!
//! The model is an integer function that reads the KV of all tokens before, so that one wrong row
//! changes the answer. `cargo run -p kvtrie-core --example engine` serves four conversations.

use std::collections::VecDeque;

use kvtrie_core::{
    Acquire, Kind, LeaseId, LoadMode, Manager, Move, MoveId, NO_MOVE, Nanos, Outcome, Owner,
    Result, Settings, Slot, TierId, TierSpec, Token,
};

const GPU: TierId = 0;
const HOST: TierId = 1;
const LAYERS: usize = 3;
const BLOCK: usize = 4; // tokens of a block
const ANSWER: usize = 6; // tokens of an answer
const SYSTEM: [Token; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

/// KV of one block: a row per layer and token.
type Block = [[u64; BLOCK]; LAYERS];

/// Memory of both tiers, by slot.
struct Memory([Vec<Block>; 2]);

impl Memory {
    /// The row of a token on the GPU.
    fn row(&mut self, table: &[Slot], layer: usize, at: usize) -> &mut u64 {
        &mut self.0[GPU][table[at / BLOCK] as usize][layer][at % BLOCK]
    }

    /// Carries out a move of the manager.
    fn copy(&mut self, copy: &Move) {
        for layer in copy.layers.iter().map(usize::from) {
            let rows = self.0[copy.src][copy.src_slot as usize][layer];
            self.0[copy.dst][copy.dst_slot as usize][layer] = rows;
        }
    }
}

/// The model: writes the KV of the tokens from `start` on, and returns the token that follows.
fn forward(memory: &mut Memory, table: &[Slot], tokens: &[Token], start: usize) -> Token {
    let mut hidden = 0;
    for (at, &token) in tokens.iter().enumerate().skip(start) {
        hidden = u64::from(token);
        for layer in 0..LAYERS {
            *memory.row(table, layer, at) = hidden;
            for before in 0..=at {
                hidden ^= *memory.row(table, layer, before);
                hidden = hidden.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23);
            }
        }
    }
    Token::try_from(hidden % 50_000).expect("a small number")
}

/// Allocator of the GPU's slots.
struct Slots {
    free: Vec<Slot>,
    /// Slots of ended leases, with the moves that still read them.
    leaving: Vec<(Vec<MoveId>, Vec<Slot>)>,
}

impl Slots {
    /// Extends a block table to `tokens` tokens. Returns false if there are too few slots.
    fn extend(&mut self, table: &mut Vec<Slot>, tokens: usize) -> bool {
        let wanted = tokens.div_ceil(BLOCK) - table.len();
        let Some(rest) = self.free.len().checked_sub(wanted) else { return false };
        table.extend(self.free.drain(rest..));
        true
    }

    /// Takes a block table back. Its slots are free when no move reads them.
    fn leave(&mut self, reading: Vec<MoveId>, table: Vec<Slot>) {
        self.leaving.push((reading, table));
        self.ended(NO_MOVE);
    }

    /// Notes the end of a move.
    fn ended(&mut self, id: MoveId) {
        for (reading, _) in &mut self.leaving {
            reading.retain(|&other| other != id);
        }
        for (_, table) in self.leaving.extract_if(.., |(reading, _)| reading.is_empty()) {
            self.free.extend(table);
        }
    }
}

/// A request that waits.
struct Request {
    name: &'static str,
    /// The prompt, and the answer so far.
    tokens: Vec<Token>,
    /// Length at which it ends.
    end: usize,
}

/// A request that runs.
struct Running {
    request: Request,
    lease: LeaseId,
    table: Vec<Slot>,
    /// Tokens whose KV is in the block table.
    computed: usize,
}

struct Engine {
    manager: Manager,
    memory: Memory,
    slots: Slots,
    waiting: VecDeque<Request>,
    running: Vec<Running>,
    ended: Vec<Request>,
    log: Vec<String>,
    now: Nanos,
}

impl Engine {
    /// An engine with memory for that many blocks.
    #[expect(clippy::cast_possible_truncation, reason = "small constants")]
    fn new(gpu: u32, host: u32) -> Result<Self> {
        let first = TierSpec { owner: Owner::Engine, ..TierSpec::new(Kind::Gpu, gpu) };
        let tiers = vec![first, TierSpec::new(Kind::Host, host)];
        let layer_bytes = size_of::<[u64; BLOCK]>() as u64;
        let settings = Settings {
            block_tokens: BLOCK as u32,
            events: 100,
            ..Settings::new("a digest of the weights", LAYERS as u16, layer_bytes, tiers)
        };
        Ok(Self {
            manager: Manager::new(settings)?,
            memory: Memory([gpu, host].map(|blocks| vec![Block::default(); blocks as usize])),
            slots: Slots { free: (0..gpu).collect(), leaving: Vec::new() },
            waiting: VecDeque::new(),
            running: Vec::new(),
            ended: Vec::new(),
            log: Vec::new(),
            now: 0,
        })
    }

    /// Queues a request.
    fn submit(&mut self, name: &'static str, prompt: Vec<Token>) {
        let end = prompt.len() + ANSWER;
        assert!(end <= self.memory.0[GPU].len() * BLOCK, "{end} tokens do not fit on the GPU");
        self.waiting.push_back(Request { name, tokens: prompt, end });
    }

    /// Serves all requests, and returns them with their answers.
    fn serve(&mut self) -> Result<Vec<Request>> {
        while !(self.waiting.is_empty() && self.running.is_empty()) {
            self.step()?;
        }
        let (evicted, host) = (self.manager.take_events()?.len(), self.manager.stats(HOST));
        self.log.push(format!("{evicted} blocks evicted, {} hits in the host so far", host.hits));
        Ok(std::mem::take(&mut self.ended))
    }

    /// A step of the scheduler: admits requests, and computes a token of each that runs.
    fn step(&mut self) -> Result<()> {
        self.now += 1_000_000; // another engine reads a monotonic clock
        self.admit()?;
        self.copy()?;
        let mut at = 0;
        while at < self.running.len() {
            at += usize::from(self.decode(at)?);
        }
        self.copy()
    }

    /// Admits waiting requests as long as there are slots.
    fn admit(&mut self) -> Result<()> {
        while let Some(request) = self.waiting.front() {
            let (tokens, mut table) = (&request.tokens, Vec::new());
            if !self.slots.extend(&mut table, tokens.len()) {
                break;
            }
            // One token is computed in any case: the model needs it for the first answer.
            let ask = Acquire { tokens, keep: 1, load: LoadMode::All, ..Acquire::default() };
            let lease = self.manager.acquire(&ask, self.now)?;
            self.manager.bind(lease, 0, &table)?;
            let computed = self.manager.lease_tokens(lease)?;
            self.log.push(format!("{}: {computed} of {} tokens found", request.name, tokens.len()));
            let request = self.waiting.pop_front().expect("seen above");
            self.running.push(Running { request, lease, table, computed });
        }
        Ok(())
    }

    /// Makes the copies that the manager asks for. An engine with streams starts them here, reports
    /// each at its end, and runs a request once `awaits` of its lease is empty.
    fn copy(&mut self) -> Result<()> {
        for copy in self.manager.moves(usize::MAX)? {
            self.memory.copy(&copy);
            self.manager.complete(&[copy.id], &Outcome::default(), self.now)?;
            self.slots.ended(copy.id);
        }
        Ok(())
    }

    /// Computes the next token of a request. Returns false if the batch has changed: the place `at` is
    /// decoded again then.
    fn decode(&mut self, at: usize) -> Result<bool> {
        let Running { request, lease, table, computed } = &mut self.running[at];
        let bound = table.len();
        if !self.slots.extend(table, request.tokens.len()) {
            self.preempt()?;
            return Ok(false);
        }
        self.manager.bind(*lease, bound, &table[bound..])?;
        let next = forward(&mut self.memory, table, &request.tokens, *computed);
        self.manager.commit(*lease, &request.tokens[*computed..], self.now)?;
        *computed = request.tokens.len();
        request.tokens.push(next);
        if request.tokens.len() < request.end {
            return Ok(true);
        }
        let request = self.stop(at)?;
        self.ended.push(request);
        Ok(false)
    }

    /// Takes the slots of the latest request. It finds its blocks in the host when it is admitted again.
    fn preempt(&mut self) -> Result<()> {
        let request = self.stop(self.running.len() - 1)?;
        self.log.push(format!("{}: preempted after {} tokens", request.name, request.tokens.len()));
        self.waiting.push_front(request);
        self.copy()
    }

    /// Ends a lease. Its blocks are stored in the host, from slots that are free after that.
    fn stop(&mut self, at: usize) -> Result<Request> {
        let Running { request, lease, table, .. } = self.running.remove(at);
        let reading = self.manager.release(lease, self.now)?;
        self.slots.leave(reading, table);
        Ok(request)
    }
}

/// Three rounds of four conversations with one system prompt. Returns all requests.
fn converse(engine: &mut Engine) -> Result<Vec<Request>> {
    let mut chats = ["ada", "ben", "cleo", "dan"].map(|name| (name, Vec::from(SYSTEM)));
    let mut all = Vec::new();
    for round in 1..=3 {
        engine.log.push(format!("round {round}"));
        for (at, (name, tokens)) in (1..).zip(&mut chats) {
            tokens.extend((0..5).map(|word| 1000 * at + 10 * round + word));
            engine.submit(name, tokens.clone());
        }
        let mut ended = engine.serve()?;
        ended.sort_by_key(|request| request.name);
        for ((_, tokens), request) in chats.iter_mut().zip(&ended) {
            tokens.clone_from(&request.tokens);
        }
        all.extend(ended);
    }
    Ok(all)
}

#[expect(clippy::print_stdout, reason = "the program exists to print")]
fn main() -> Result<()> {
    let mut engine = Engine::new(16, 24)?;
    converse(&mut engine)?;
    println!("{}", engine.log.join("\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of a request, each computed from the first token on.
    fn alone(request: &Request) -> Vec<Token> {
        let mut memory = Memory([vec![Block::default(); 16], Vec::new()]);
        let table: Vec<Slot> = (0..16).collect();
        let mut tokens = request.tokens[..request.end - ANSWER].to_vec();
        while tokens.len() < request.end {
            tokens.push(forward(&mut memory, &table, &tokens, 0));
        }
        tokens
    }

    #[test]
    fn answers_are_those_of_an_engine_without_a_cache() {
        let mut engine = Engine::new(16, 24).unwrap();
        for request in converse(&mut engine).unwrap() {
            assert_eq!(request.tokens, alone(&request), "{}", request.name);
        }
        engine.manager.audit().unwrap();
        assert_eq!(engine.slots.free.len(), 16, "every slot is free again");
        let (log, host) = (engine.log.join("\n"), engine.manager.stats(HOST));
        assert!(log.contains("preempted"), "{log}");
        assert!(host.hits > 40 && host.evicted.iter().sum::<u64>() > 20, "{log}");
    }
}
