//! Requests that wait for answers: of clients, each turn a time to think after the last answer has ended; of a
//! trace, each a pause after the ends of those that it names.

use std::collections::BTreeMap;

use kvtrie_core::{Error, Kind, Write};
use kvtrie_sim::engine::Wait;
use kvtrie_sim::record::Record;
use kvtrie_sim::request::Request;
use kvtrie_sim::simulation::{Config, Simulation};

use crate::rig::{Dice, config, drawn, play, requests, settings, tier, together};

/// Conversations of one to four turns with times to think, some of which are none, and single requests.
fn conversations(seed: u64) -> Vec<Request> {
    let (_, _, mut trace) = drawn(seed);
    let mut dice = Dice(seed + 1);
    let (mut number, mut left) = (0, 0);
    for request in &mut trace {
        if left == 0 {
            (number, left) = (number + 1, 1 + dice.below(4));
        }
        left -= 1;
        request.arrival = u64::from(dice.below(2) * dice.below(200_000));
        request.session = (number % 3 > 0).then(|| format!("chat {number}"));
    }
    trace
}

fn configs(seed: u64) -> Vec<Config> {
    let (settings, limits, _) = drawn(seed);
    vec![config(settings.clone(), 2, Wait::All), together(settings, 2, limits, Wait::Layer)]
}

/// Plays conversations by clients.
fn closed(config: Config, clients: usize, trace: &[Request]) -> Vec<Record> {
    let mut simulation = Simulation::new(config).expect("settings");
    simulation.close(clients);
    let mut records = Vec::new();
    let tell = |record| {
        records.push(record);
        Ok(())
    };
    simulation.run(trace.iter().cloned().map(Ok), tell).expect("a run");
    records
}

/// Order of the clients' requests, by hand: a client takes the next conversation when its last one
/// is over. The ends of requests are taken from the records, which are matched by prompt.
fn replayed(records: &[Record], clients: usize, trace: &[Request]) -> Vec<Request> {
    let mut chats: Vec<Vec<Request>> = Vec::new();
    for request in trace {
        match chats.last_mut() {
            Some(chat) if request.session.is_some() && chat[0].session == request.session => {
                chat.push(request.clone());
            }
            _ => chats.push(vec![request.clone()]),
        }
    }
    let mut chats = chats.into_iter();
    let mut turns: Vec<std::vec::IntoIter<Request>> = Vec::new();
    // By time and place: the client that asks then.
    let mut coming: BTreeMap<(u64, u64), (usize, Request)> = BTreeMap::new();
    for client in 0..clients {
        turns.push(chats.next().unwrap_or_default().into_iter());
        if let Some(first) = turns[client].next() {
            coming.insert((first.arrival, first.id), (client, first));
        }
    }
    let mut asked: Vec<Request> = Vec::new();
    // By end and number: what runs.
    let mut running: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    while !coming.is_empty() || !running.is_empty() {
        let arrives = coming.keys().next().map_or(u64::MAX, |key| key.0);
        let ends = running.keys().next().map_or(u64::MAX, |key| key.0);
        // Requests that end at a time end before those that arrive then.
        if ends <= arrives {
            let ((now, _), client) = running.pop_first().expect("it runs");
            let next = turns[client].next().or_else(|| {
                turns[client] = chats.next().unwrap_or_default().into_iter();
                turns[client].next()
            });
            if let Some(next) = next {
                coming.insert((now + next.arrival, next.id), (client, next));
            }
        } else {
            let ((now, _), (client, request)) = coming.pop_first().expect("it comes");
            let id = asked.len() as u64;
            let end = records[asked.len()].end.expect("served");
            running.insert((end, id), client);
            asked.push(Request { id, arrival: now, ..request });
        }
    }
    asked
}

#[test]
fn a_closed_run_is_the_open_run_of_what_its_clients_asked() {
    let mut played = 0;
    for seed in 0..60 {
        let trace = conversations(seed);
        for clients in [1, 2, 5, 100] {
            for (config, same) in std::iter::zip(configs(seed), configs(seed)) {
                let records = closed(config, clients, &trace);
                assert_eq!(records.len(), trace.len());
                assert!(records.is_sorted_by_key(|record| record.arrival));
                // A refused one ends when it would have begun, which no record has.
                if records.iter().any(|record| record.end.is_none()) {
                    continue;
                }
                let asked = replayed(&records, clients, &trace);
                let (open, _) = play(same, asked);
                assert_eq!(open, records, "seed {seed}, {clients} clients");
                played += 1;
            }
        }
    }
    assert!(played > 100, "{played}");
}

#[test]
fn no_more_requests_run_than_there_are_clients() {
    for seed in 0..20 {
        for clients in [1, 3] {
            for config in configs(seed) {
                let records = closed(config, clients, &conversations(seed));
                for record in &records {
                    let at = record.arrival;
                    let open = |other: &&Record| {
                        other.arrival <= at && other.end.is_some_and(|end| end > at)
                    };
                    assert!(records.iter().filter(open).count() <= clients);
                }
            }
        }
    }
}

#[test]
fn by_hand_two_clients_take_turns() {
    // 64 us for a prompt that is new, then 1 us for each further token of its answer.
    let mut trace = requests(&[(1, 0), (2, 0), (3, 0)]);
    for (request, (session, output)) in
        std::iter::zip(&mut trace, [(Some("a"), 1), (Some("a"), 11), (None, 1)])
    {
        (request.arrival, request.session) = (5_000, session.map(String::from));
        request.output = output;
    }
    let room = settings(vec![tier(Kind::Gpu, 16, Write::Never)]);
    let records = closed(config(room, 1, Wait::All), 2, &trace);
    // Both come at 5 us and the second waits for the machine; the first client's next turn comes
    // 5 us after its answer, and has to wait as well.
    let times: Vec<_> = records.iter().map(|one| (one.arrival, one.first_token, one.end)).collect();
    assert_eq!(
        times,
        [
            (5_000, Some(69_000), Some(69_000)),
            (5_000, Some(133_000), Some(133_000)),
            (74_000, Some(197_000), Some(207_000)),
        ]
    );
}

/// A trace of which some requests wait for up to three above them.
fn waiting(seed: u64) -> Vec<Request> {
    let (_, _, mut trace) = drawn(seed);
    let mut dice = Dice(seed + 2);
    for place in 0..trace.len() {
        for _ in 0..dice.below(4) * dice.below(2) {
            let parent = dice.below(u32::try_from(place.max(1)).expect("short")) as usize;
            if parent < place {
                trace[parent].named = true;
                trace[place].after.push(parent as u64);
            }
        }
        trace[place].pause = u64::from(dice.below(2) * dice.below(200_000));
    }
    trace
}

/// Order in which requests come in, by hand: of those whose parents have come in, the next one is the first by
/// time. The ends are taken from the records.
fn in_turn(records: &[Record], trace: &[Request]) -> Vec<Request> {
    let mut ends: BTreeMap<u64, u64> = BTreeMap::new();
    let mut left = trace.to_vec();
    let mut came = Vec::new();
    while !left.is_empty() {
        let due = |request: &Request| {
            let ends: Option<Vec<u64>> =
                request.after.iter().map(|one| ends.get(one).copied()).collect();
            let last = ends?.into_iter().max().map_or(0, |end| end + request.pause);
            Some((request.arrival.max(last), request.id))
        };
        let (at, place) = left.iter().filter_map(due).min().expect("one can come");
        let next = left.iter().position(|request| request.id == place).expect("it is left");
        let request = left.remove(next);
        let id = came.len() as u64;
        ends.insert(place, records[came.len()].end.expect("served"));
        let (after, pause) = (Vec::new(), 0);
        came.push(Request { id, arrival: at, after, pause, named: false, ..request });
    }
    came
}

#[test]
fn a_run_that_waits_is_the_open_run_of_what_came_in() {
    let (mut played, mut held) = (0, 0);
    for seed in 0..100 {
        let trace = waiting(seed);
        for (config, same) in std::iter::zip(configs(seed), configs(seed)) {
            let (records, _) = play(config, trace.clone());
            assert_eq!(records.len(), trace.len());
            if records.iter().any(|record| record.end.is_none()) {
                continue;
            }
            let came = in_turn(&records, &trace);
            held += usize::from(came.iter().zip(&trace).any(|(one, of)| one.arrival != of.arrival));
            let (open, _) = play(same, came);
            assert_eq!(open, records, "seed {seed}");
            played += 1;
        }
    }
    assert!(played > 50 && held > 25, "{played}, {held}");
}

#[test]
fn a_request_that_waits_for_one_below_it_or_without_a_name_is_refused() {
    let refused = |after: u64, named: bool| {
        let mut trace = requests(&[(1, 0), (2, 1)]);
        trace[0].named = named;
        trace[1].after.push(after);
        let room = settings(vec![tier(Kind::Gpu, 16, Write::Never)]);
        let mut simulation = Simulation::new(config(room, 1, Wait::All)).expect("settings");
        simulation.run(trace.into_iter().map(Ok), |_| Ok(()))
    };
    assert!(refused(0, true).is_ok());
    for (after, named, message) in [(1, true, "waits for request 1"), (0, false, "not named")] {
        let Err(Error::Config(text)) = refused(after, named) else { panic!("it was played") };
        assert!(text.contains(message), "{text}");
    }
}
