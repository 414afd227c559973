//! Options and policies that were renamed. Their old spelling is an error that names the new one.

use ckpt_passes::Error;
use ckpt_passes::plan::Policy;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Command (any, where empty), old spelling without dashes, and new spelling. The first that fits counts.
const REPLACED: [(&str, &str, &str); 7] = [
    ("", "no-fuse", "--fuse off"),
    ("", "no-arena", "--arena off"),
    ("", "levers", "--ablation"),
    ("run", "offload-streams", "--async-transfers on|off"),
    ("", "offload-streams", "--overlap-transfers on|off"),
    ("plan", "o", "--plan-out FILE"),
    ("plan", "output", "--plan-out FILE"),
];

/// Returns the new spelling of an option, given without dashes, if it was renamed.
pub fn spelling(verb: &str, old: &str) -> Option<&'static str> {
    let found = REPLACED
        .iter()
        .find(|(of, name, _)| (of.is_empty() || *of == verb) && *name == old);
    found.map(|(.., new)| *new)
}

/// Returns what to write instead of a policy, if it is only for comparisons: these options go with every policy.
pub fn policy(policy: &Policy) -> Option<String> {
    let instead = policy.options()?;
    Some(format!(
        "`{policy}` is no policy of its own any more: write {instead}"
    ))
}

/// Returns an error that names the new spelling, if the option parser stopped at an old one.
pub fn explained(verb: &str, error: &clap::Error) -> Option<Box<Error>> {
    let (ErrorKind::UnknownArgument, Some(ContextValue::String(word))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    let new = spelling(verb, word.trim_start_matches('-'))?;
    let what = format!("`{word}` is no option of this command any more");
    Some(Error::usage("option", what).help(format!("write {new}")))
}
