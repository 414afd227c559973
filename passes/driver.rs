//! Runs passes: names, phases, verification, time, dumps.
//!
//! A pipeline is text (`infer,simplify,loss,autodiff,plan,remat,dce`), and the same names serve `--passes`, test
//! headers, dump files and the timing table. A pipeline whose phases do not chain is refused before anything runs.
//! After each pass the graph is verified, and a pass that says it changed nothing is held to it.
//!
//! Passes are plain functions in [`transform`](crate::transform); a [`Pass`] is a row that says what one takes and
//! leaves, and hands it what it needs from the [`Cx`]. What a pass leaves for the next one only (the seeds of the
//! backward, a plan) lives in the `Cx` too, and is good for the very next pass and no later: any other pass may change
//! the graph under it.

use crate::error::{Error, Kind, Result};
use crate::ir::verify::verify;
use crate::ir::{Graph, Phase};
use crate::text;
use std::fmt;
use std::time::Instant;

pub mod pass;
pub mod table;

pub use pass::{After, Changed, Compiled, Cx, Pass, Planned, Timing, Timings};
pub use table::ALL;

/// Passes in the order they run.
pub struct Pipeline(Vec<&'static Pass>);

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|p| p.name).collect();
        f.write_str(&names.join(","))
    }
}

impl Pipeline {
    /// Reads a pipeline: names of passes between commas.
    ///
    /// # Errors
    /// `error[pass]`: a name that is no pass, or a pass without the one it must follow.
    pub fn parse(names: &str) -> Result<Pipeline> {
        let mut passes: Vec<&'static Pass> = Vec::new();
        for name in names.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            let pass = ALL
                .iter()
                .copied()
                .find(|p| p.name == name)
                .ok_or_else(|| {
                    let known: Vec<&str> = ALL.iter().map(|p| p.name).collect();
                    Error::usage("pass", format!("there is no pass `{name}`"))
                        .expected(known.join(", "))
                })?;
            let before = passes.last().map(|p| p.name);
            let follows = pass.follows;
            if !follows.is_empty() && !before.is_some_and(|b| follows.contains(&b)) {
                let needed = follows.join("` or `");
                return Err(Error::usage(
                    "pass",
                    format!("`{name}` must come right after `{needed}`"),
                )
                .found(before.map_or("nothing before it".into(), |b| format!("`{b}` before it"))));
            }
            passes.push(pass);
        }
        Ok(Pipeline(passes))
    }

    /// The phase a graph in phase `start` ends in.
    ///
    /// # Errors
    /// `error[phase]`: a pass that does not take the phase the one before it leaves.
    pub fn check(&self, start: Phase) -> Result<Phase> {
        let mut phase = start;
        for pass in &self.0 {
            if !pass.from.contains(&phase) {
                let takes: Vec<&str> = pass.from.iter().map(|p| text::phase_word(*p)).collect();
                return Err(
                    Error::usage("phase", format!("`{}` cannot run here", pass.name))
                        .expected(format!("a graph that is {}", takes.join(" or ")))
                        .found(format!("one that is {}", text::phase_word(phase))),
                );
            }
            phase = pass.leaves(phase);
        }
        Ok(phase)
    }

    /// Returns the names of the passes in the order they run.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.0.iter().map(|p| p.name)
    }
}

/// What the caller wants to see of a run.
#[derive(Default)]
pub struct Watch<'a> {
    /// Called after each pass with a file name (`03-autodiff.ckir`) and the text of the graph; also for a graph that
    /// fails verification.
    pub dump: Option<&'a mut dyn FnMut(&str, &str)>,
    /// Called before each pass with its name.
    pub pass: Option<&'a mut dyn FnMut(&'static str)>,
    /// Stop after so many passes.
    pub stop_after: Option<usize>,
}

/// Runs a pipeline on a graph.
///
/// # Errors
/// What a pass refuses; `error[phase]` before anything ran; `bug[…]` where a pass broke an invariant or its word.
pub fn run(pipeline: &Pipeline, graph: &mut Graph, cx: &mut Cx, watch: &mut Watch) -> Result<()> {
    pipeline.check(graph.phase)?;
    let total = pipeline.0.len();
    let mut before = text::digest(graph);
    for (i, pass) in pipeline.0.iter().enumerate() {
        if watch.stop_after.is_some_and(|n| i >= n) {
            break;
        }
        if let Some(say) = &mut watch.pass {
            say(pass.name);
        }
        let expected = pass.leaves(graph.phase);
        let started = Instant::now();
        let said = (pass.run)(graph, cx).map_err(|e| match e.kind() {
            Kind::Bug => e.at(format!("pass `{}` ({} of {total})", pass.name, i + 1)),
            _ => e,
        })?;
        let run_us = started.elapsed().as_secs_f64() * 1e6;
        if let Some(dump) = &mut watch.dump {
            dump(
                &format!("{:02}-{}.ckir", i + 1, pass.name),
                &text::print(graph),
            );
        }
        let started = Instant::now();
        let after = text::digest(graph);
        let changed = before != after;
        // What a pass left as it was has been verified.
        let verified = match changed || i == 0 {
            true => verify(graph),
            false => Ok(()),
        };
        verified.and_then(|()| promise(pass, said, changed, expected, graph.phase)).map_err(|e| {
            e.at(format!("after pass `{}` ({} of {total})", pass.name, i + 1))
                .help("look at the graph with --dump DIR; the dump before this pass and its name replay it")
        })?;
        cx.done.timings.0.push(Timing {
            pass: pass.name,
            changed,
            nodes: graph.order().len(),
            run_us,
            verify_us: started.elapsed().as_secs_f64() * 1e6,
        });
        before = after;
    }
    Ok(())
}

/// Holds a pass to its word.
fn promise(pass: &Pass, said: Changed, changed: bool, expected: Phase, found: Phase) -> Result<()> {
    if said == Changed::No && changed {
        return Err(Error::bug(
            "pass",
            format!("`{}` changed the graph and says it did not", pass.name),
        ));
    }
    if expected != found {
        return Err(
            Error::bug("pass", format!("`{}` leaves the wrong phase", pass.name))
                .expected(text::phase_word(expected))
                .found(text::phase_word(found)),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "graph @g imported (%x: f32[n]) -> (%y) {\n  %y = Neg %x\n  %z = Neg %y\n}\n";

    fn graph() -> Graph {
        text::parse(TEXT).unwrap()
    }

    #[test]
    fn runs_in_order_times_and_dumps() {
        let (mut g, mut seen) = (graph(), Vec::new());
        let mut dump = |name: &str, text: &str| seen.push((name.to_string(), text.to_string()));
        let mut watch = Watch {
            dump: Some(&mut dump),
            ..Watch::default()
        };
        let pipeline = Pipeline::parse("infer, dce,dce").unwrap();
        let mut cx = Cx::default();
        run(&pipeline, &mut g, &mut cx, &mut watch).unwrap();
        let times = cx.done.timings.0.iter();
        let rows: Vec<_> = times.map(|t| (t.pass, t.changed, t.nodes)).collect();
        assert_eq!(
            rows,
            [("infer", true, 2), ("dce", true, 1), ("dce", false, 1)]
        );
        assert_eq!(seen[1].0, "02-dce.ckir");
        assert_eq!(seen[1].1, text::print(&g));
        assert!(seen[0].1.contains("%z = Neg %y : f32[n]"));
    }

    #[test]
    fn stops_where_told() {
        let mut g = graph();
        let mut watch = Watch {
            stop_after: Some(1),
            ..Watch::default()
        };
        let pipeline = Pipeline::parse("infer,dce").unwrap();
        let mut cx = Cx::default();
        run(&pipeline, &mut g, &mut cx, &mut watch).unwrap();
        assert_eq!((cx.done.timings.0.len(), g.order().len()), (1, 2));
    }

    #[test]
    fn a_pass_is_held_to_its_word() {
        static LIAR: Pass = Pass {
            name: "liar",
            from: &[Phase::Imported],
            to: After::Same,
            follows: &[],
            idempotent: true,
            run: |g, _| {
                g.meta.insert("touched".into(), "yes".into());
                Ok(Changed::No)
            },
        };
        static BREAKER: Pass = Pass {
            name: "breaker",
            from: &[Phase::Imported],
            to: After::Same,
            follows: &[],
            idempotent: true,
            run: |g, _| {
                let reversed = g.order().iter().rev().copied().collect();
                g.set_order(reversed);
                Ok(Changed::Yes)
            },
        };
        static JUMPER: Pass = Pass {
            name: "jumper",
            from: &[Phase::Imported],
            to: After::Exactly(Phase::Typed),
            follows: &[],
            idempotent: true,
            run: |_, _| Ok(Changed::No),
        };
        for (pass, says) in [
            (&LIAR, "says it did not"),
            (&BREAKER, "I2 `z` reads `y`"),
            (&JUMPER, "leaves the wrong phase"),
        ] {
            let error = run(
                &Pipeline(vec![pass]),
                &mut graph(),
                &mut Cx::default(),
                &mut Watch::default(),
            )
            .unwrap_err();
            assert_eq!(error.kind(), Kind::Bug);
            let text = error.to_string();
            assert!(text.contains(says) && text.contains(pass.name), "{text}");
        }
    }

    #[test]
    fn pipelines_that_cannot_run_are_refused() {
        let error = Pipeline::parse("infer,inline").unwrap_err();
        assert_eq!((error.code(), error.exit_code()), ("pass", 2));
        let error = Pipeline::parse("dce").unwrap().check(Phase::Imported);
        assert_eq!(error.unwrap(), Phase::Imported);
    }
}
