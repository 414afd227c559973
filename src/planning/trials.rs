//! The chunk counts that the planner tried, for people.

use crate::units::bytes;
use ckpt_passes::plan::{Trial, Tried};
use std::fmt::Write;

/// Returns the chunk counts that were planned; none where they were given.
pub fn list(tried: Option<&Tried>) -> Vec<Trial> {
    tried.map_or(Vec::new(), |t| t.trials.clone())
}

/// Returns one line for each chunk count, with why it was taken or not; empty where nothing was tried.
pub fn human(trials: &[Trial]) -> String {
    let mut out = String::new();
    let Some(chosen) = trials.iter().find(|t| t.chosen) else {
        return out;
    };
    let _ = writeln!(
        out,
        "  numbers of parts, each planned quickly; overhead is on the step with nothing cut:"
    );
    for trial in trials {
        let parts = trial.words();
        let found = match trial.overhead_pct {
            Some(percent) => format!("{percent:.2} % at {}", bytes(trial.peak_bytes)),
            None => format!("no plan fits, {} at least", bytes(trial.peak_bytes)),
        };
        let _ = writeln!(out, "    {parts:<26}{found}{}", why(trial, chosen));
    }
    out
}

fn why(trial: &Trial, chosen: &Trial) -> &'static str {
    if trial.chosen {
        return match trial.fits {
            true => "   <- taken",
            false => "   <- taken: the smallest",
        };
    }
    match (trial.overhead_pct, chosen.overhead_pct) {
        (Some(own), Some(other)) if own < other => "   too little less for more parts",
        _ => "",
    }
}
