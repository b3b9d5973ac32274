//! Conversion of the hints of `kvtrie.settings.hint`, and of the replies.
//!
//! Invariant: a wrong kind or number is an error with its name. Cost: a few attribute reads and a
//! copy of the tokens.

use kvtrie_core::{HIGHEST, Hint, Release, Retain, Target};
use pyo3::prelude::*;

use crate::error::bad;
use crate::lease::Lease;
use crate::memory::items;
use crate::number::{nanos, shown, small, whole};
use crate::record::record;
use crate::scope::scope;
use crate::shared::Shared;
use crate::text::text;
use crate::tokens::Tokens;

record! {
    /// Reply to a hint.
    HintReply(kvtrie_core::HintReply) |reply, py| {
        /// "accepted", "clipped", "deferred" or "rejected".
        answer: &'static str = reply.answer.name();
        /// Number of blocks with the hint in force.
        blocks: u64 = reply.blocks;
        /// Number of named blocks without the hint in force.
        not_applied: u64 = reply.not_applied;
        /// Last reason for blocks without the hint in force, as a fixed word.
        code: &'static str = reply.code.name();
        /// The same reason as a sentence. Empty if accepted.
        reason: &str = &reply.reason;
    }
    repr format!(
        "HintReply({}, blocks={}, not_applied={}, code={}, reason={:?})",
        reply.answer.name(), reply.blocks, reply.not_applied, reply.code.name(), reply.reason
    );
}

/// Limit of hints per call.
const MOST: usize = 1 << 20;

/// Convert hints.
pub(crate) fn hints(given: &Bound<'_, PyAny>, shared: &Shared) -> PyResult<Vec<Hint>> {
    if given.try_iter().is_err() {
        return Err(bad(format!("hints are {}, a sequence of hints wanted", shown(given))));
    }
    items(given, MOST, "hints", |_, given| hint(&given, shared))
}

/// Convert a hint.
fn hint(given: &Bound<'_, PyAny>, shared: &Shared) -> PyResult<Hint> {
    let class = given.get_type();
    let tier = || shared.tier(&given.getattr("tier")?);
    let ours = class.module().is_ok_and(|module| module == "kvtrie.settings.hint");
    let name = class.name()?;
    match if ours { name.to_str()? } else { "" } {
        "Retain" => retain(given).map(Hint::Retain),
        "Release" => release(given).map(Hint::Release),
        "Prefetch" => Ok(Hint::Prefetch {
            target: target(given)?,
            tier: tier()?,
            deadline: optional(given, "deadline", nanos)?,
        }),
        "Demote" => Ok(Hint::Demote { target: target(given)?, tier: tier()? }),
        "ResumeAt" => Ok(Hint::ResumeAt {
            target: target(given)?,
            borders: items(&given.getattr("borders")?, MOST, "borders", |_, border| {
                nanos(&border, "a border")
            })?,
        }),
        "Progress" => Ok(Hint::Progress {
            name: text(&given.getattr("session")?, "session")?.to_owned(),
            scope: whose(given)?,
            tier: tier()?,
            eta: nanos(&given.getattr("eta")?, "eta")?,
        }),
        "Quota" => Ok(Hint::Quota {
            tenant: given.getattr("tenant")?.extract()?,
            tier: tier()?,
            blocks: optional(given, "blocks", nanos)?,
            share: given.getattr("share")?.extract()?,
        }),
        _ => Err(bad(format!(
            "a hint is a Retain, Release, Prefetch, Demote, ResumeAt, Progress or Quota, not '{name}'"
        ))),
    }
}

fn optional<'py, T>(
    given: &Bound<'py, PyAny>,
    name: &str,
    convert: impl Fn(&Bound<'py, PyAny>, &str) -> PyResult<T>,
) -> PyResult<Option<T>> {
    let value = given.getattr(name)?;
    if value.is_none() { Ok(None) } else { convert(&value, name).map(Some) }
}

fn priority(number: &Bound<'_, PyAny>, name: &str) -> PyResult<u8> {
    small(number, name, HIGHEST)
}

fn name(given: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<String>> {
    optional(given, name, |value, name| text(value, name).map(str::to_owned))
}

fn sequence(given: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u32>>> {
    let tokens = given.getattr("tokens")?;
    if tokens.is_none() { Ok(None) } else { Tokens::new(&tokens)?.into_vec().map(Some) }
}

fn whose(given: &Bound<'_, PyAny>) -> PyResult<kvtrie_core::Scope> {
    let named = given.getattr("scope")?;
    scope((!named.is_none()).then_some(&named))
}

fn target(given: &Bound<'_, PyAny>) -> PyResult<Target> {
    if let Some(tokens) = sequence(given)? {
        return Ok(Target::Tokens { tokens, scope: whose(given)? });
    }
    if let Some(session) = name(given, "session")? {
        return Ok(Target::Session { name: session, scope: whose(given)? });
    }
    let lease = given.getattr("lease")?;
    let id = match lease.cast::<Lease>() {
        Ok(lease) => lease.get().id,
        Err(_) => whole(&lease, "lease", u64::MAX)?,
    };
    Ok(Target::Lease(id))
}

fn retain(given: &Bound<'_, PyAny>) -> PyResult<Retain> {
    Ok(Retain {
        target: target(given)?,
        start: nanos(&given.getattr("start")?, "start")?,
        end: optional(given, "end", nanos)?,
        priority: priority(&given.getattr("priority")?, "priority")?,
        ttl: optional(given, "ttl", nanos)?,
        decode_priority: optional(given, "decode_priority", priority)?,
        decode_ttl: optional(given, "decode_ttl", nanos)?,
        owner: name(given, "owner")?,
    })
}

fn release(given: &Bound<'_, PyAny>) -> PyResult<Release> {
    let owner = name(given, "owner")?;
    if let Some(tokens) = sequence(given)? {
        return Ok(Release::Tokens { tokens, scope: whose(given)?, owner });
    }
    match (name(given, "session")?, owner) {
        (Some(name), _) => Ok(Release::Session { name, scope: whose(given)? }),
        (None, Some(name)) => Ok(Release::Owner { name, scope: whose(given)? }),
        (None, None) => Err(bad("Release is about a session, an owner or tokens")),
    }
}
