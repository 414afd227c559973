//! Goldens: a graph, the passes to run on it, and what must come out, all in one `.ckir` file.
//!
//! ```text
//! test infer,simplify dim.batch=4 loss=vjp     passes, then options
//! graph @in … { … }
//! ---
//! graph @out … { … }                           itself legal input
//! ; peak 4096 -> 2048 B, recompute 512 flops   where there is a plan
//! ```
//!
//! A test of a refusal marks the guilty line with `; error[code]`, and the whole message follows `---`.
//! `BLESS=1 cargo test --test golden` rewrites what follows `---`; a failure prints the difference and that command.

use ckpt_passes::driver::{Cx, Pipeline, Watch, run};
use ckpt_passes::plan::{Constraint, Policy};
use ckpt_passes::planning::overrides::{NamePattern, Override, Target};
use ckpt_passes::transform::collectives::{Mesh, Shard};
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_passes::transform::sequence::parse_chunks;
use ckpt_passes::transform::tile::Tile;
use ckpt_passes::{Error, Kind, text};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A half longer than this proves nothing to a reader: big models assert a table.
const MAX_LINES: usize = 40;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "ckir") {
            found.push(path);
        }
    }
}

#[test]
fn goldens() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    files(&root.join("tests/golden"), &mut all);
    assert!(!all.is_empty(), "no goldens found");
    let bless = std::env::var_os("BLESS").is_some_and(|v| v == "1");
    let mut failures = Vec::new();
    for path in &all {
        let name = path.strip_prefix(root).unwrap().display();
        let file = std::fs::read_to_string(path).unwrap();
        let result = check(&file).and_then(|expected| {
            if expected == file {
                return Ok(());
            }
            if bless {
                std::fs::write(path, &expected).unwrap();
                return Ok(());
            }
            Err(format!(
                "{}\nto accept it: BLESS=1 cargo test --test golden",
                diff(&file, &expected)
            ))
        });
        if let Err(message) = result {
            failures.push(format!("{name}\n{message}"));
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} goldens fail\n\n{}",
        failures.len(),
        all.len(),
        failures.join("\n\n")
    );
}

/// What the file should be, or why it cannot be a golden.
fn check(file: &str) -> Result<String, String> {
    let input = match file.split_once("\n---\n") {
        Some((input, _)) => format!("{input}\n"),
        None => file.to_string(),
    };
    let (header, body) = input.split_once('\n').ok_or("no header")?;
    let header = header
        .strip_prefix("test")
        .ok_or("the first line does not start with `test`")?;
    let mut words = header.split(';').next().unwrap_or("").split_whitespace();
    let first = words.next().unwrap_or("");
    let mut cx = Cx::default();
    for word in words {
        let (key, value) = word
            .split_once('=')
            .ok_or(format!("`{word}` is not key=value"))?;
        option(&mut cx, key, value)?;
    }
    let guilty: Vec<(usize, &str)> = input
        .lines()
        .enumerate()
        .filter_map(|(i, l)| Some((i, l.split_once("; error[")?.1.split_once(']')?.0)))
        .collect();
    let mut out = String::new();
    // An empty first line in place of the header: line numbers are those of the file.
    match execute(first, &format!("\n{body}"), &mut cx) {
        Ok(text) => {
            if !guilty.is_empty() {
                return Err(format!("an error was expected, but this came out:\n{text}"));
            }
            let again =
                text::parse(&text).map_err(|e| format!("the result does not read back: {e}"))?;
            if text::print(&again) != text {
                return Err("the result prints differently after reading it back".into());
            }
            out.push_str(&text);
            if let Some(summary) = summary(&cx) {
                let _ = writeln!(out, "; {summary}");
            }
        }
        Err(e) => {
            blame(&e, &guilty, &input)?;
            let _ = writeln!(out, "{e}");
        }
    }
    for (half, lines) in [
        ("input", body.lines().count()),
        ("output", out.lines().count()),
    ] {
        if lines > MAX_LINES {
            return Err(format!(
                "the {half} has {lines} lines, more than {MAX_LINES}"
            ));
        }
    }
    Ok(format!("{input}---\n{out}"))
}

fn execute(passes: &str, body: &str, cx: &mut Cx) -> Result<String, Box<Error>> {
    let mut graph = text::parse(body)?;
    if passes != "parse" {
        run(
            &Pipeline::parse(passes)?,
            &mut graph,
            cx,
            &mut Watch::default(),
        )?;
    }
    Ok(text::print(&graph))
}

/// The error must be the one that is marked: its code, and its line or the node on that line.
fn blame(e: &Error, guilty: &[(usize, &str)], input: &str) -> Result<(), String> {
    let [(line, code)] = guilty else {
        return Err(format!(
            "{} lines are marked `; error[code]`, one should be:\n{e}",
            guilty.len()
        ));
    };
    if e.code() != *code || e.kind() == Kind::Bug {
        return Err(format!("error[{code}] was expected:\n{e}"));
    }
    let marked = input.lines().nth(*line).unwrap_or("");
    let place = e
        .notes()
        .find(|(label, _)| *label == "at")
        .map_or("", |(_, text)| text);
    let by_line = place.starts_with(&format!("line {},", line + 1));
    let by_node = place.split('"').nth(1).is_some_and(|node| {
        marked.contains(&format!("%{node} =")) || marked.contains(&format!("\"{node}\""))
    });
    // What concerns the graph as a whole is marked at its first line, or at the header of the test.
    if by_line || by_node || marked.starts_with("graph") || *line == 0 {
        return Ok(());
    }
    Err(format!(
        "the error is not about line {line} (`{}`):\n{e}",
        marked.trim()
    ))
}

fn option(cx: &mut Cx, key: &str, value: &str) -> Result<(), String> {
    let options = &mut cx.request;
    match key.split_once('.').unwrap_or((key, "")) {
        ("dim", name) => {
            let n = value
                .parse()
                .map_err(|_| format!("`{value}` is not a size"))?;
            options.dims.push((name.into(), n));
        }
        ("loss", "") => options.loss = Loss::parse(value).map_err(|e| e.to_string())?,
        ("policy", "") => options.plan = Policy::parse(value).map_err(|e| e.to_string())?.into(),
        ("lora", "") => options.lora = Some(Lora::parse(value).map_err(|e| e.to_string())?),
        ("optimizer", "") => {
            options.updates.optimizer = Some(Optimizer::parse(value).map_err(|e| e.to_string())?);
        }
        ("clip", "") => {
            let most = UpdateOptions::parse_clip(value);
            options.updates.clip = Some(most.map_err(|e| e.to_string())?);
        }
        ("accumulate", "") => options.updates.accumulate = value.parse().ok(),
        ("no_decay", "") => options.updates.no_decay.push(value.into()),
        ("no_decay_vectors", "") => options.updates.no_decay_vectors = value == "true",
        ("loss_scale", "") => options.updates.loss_scale = value == "true",
        ("stochastic_rounding", "") => options.updates.stochastic_rounding = value == "true",
        ("master_weights", "") => options.updates.master_weights = value == "true",
        ("fuse_optimizer", "") => options.updates.fuse = value == "true",
        ("mesh", "") => {
            let mesh = Mesh::parse(value).map_err(|e| e.to_string())?;
            options.mesh = Some(mesh);
        }
        ("bucket", "") => {
            let mesh = options.mesh.as_mut().ok_or("`bucket` follows `mesh`")?;
            mesh.bucket_bytes = value.parse().map_err(|_| "bytes")?;
        }
        ("sequence_parallel", "") => {
            let mesh = options.mesh.as_mut().ok_or("it follows `mesh`")?;
            mesh.shares_rows = value == "true";
        }
        ("shard", "") => {
            let mesh = options.mesh.as_mut().ok_or("`shard` follows `mesh`")?;
            mesh.shard = Shard::parse(value).map_err(|e| e.to_string())?;
        }
        ("tile", "") => options.tile.loss = Tile::parse(value).map_err(|e| e.to_string())?,
        ("tile-mlp", "") => options.tile.mlp = Tile::parse(value).map_err(|e| e.to_string())?,
        ("tile-sequence", "") => {
            let chunks = parse_chunks(value).map_err(|e| e.to_string())?;
            options.sequence_chunks = chunks;
        }
        ("every", "") => options.overrides.every = value.parse().ok(),
        ("first", "") => options.overrides.first = value.parse().ok(),
        ("layers" | "scope", "") => {
            let pattern = NamePattern::parse(value).map_err(|e| e.to_string())?;
            match key {
                "layers" => options.overrides.layers.push(pattern),
                _ => options.overrides.scope.push(pattern),
            }
        }
        ("save-ops" | "recompute-ops" | "recompute", "") => {
            let target = match key {
                "recompute" => Target::module(value),
                _ => Target::op(value),
            };
            let constraint = match key {
                "save-ops" => Constraint::Keep,
                _ => Constraint::Recompute,
            };
            let target = target.map_err(|e| e.to_string())?;
            options
                .overrides
                .overrides
                .push(Override { constraint, target });
        }
        ("trainable", "") => options.selection.trainable.push(value.into()),
        ("freeze", "") => options.selection.freeze.push(value.into()),
        _ => return Err(format!("there is no option `{key}`")),
    }
    Ok(())
}

/// What a plan did, for the closing comment.
fn summary(cx: &Cx) -> Option<String> {
    let plan = &cx.done.planned.as_ref()?.outcome.plan;
    let (before, after) = (&plan.before, &plan.after);
    Some(format!(
        "peak {} -> {} B, saved {} B, recompute {} flops",
        before.peak_bytes,
        after.peak_bytes,
        plan.saved_bytes(),
        plan.recompute_flops()
    ))
}

/// Lines that go (`-`) and come (`+`), with the rest around them.
fn diff(old: &str, new: &str) -> String {
    let (a, b): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let mut common = vec![vec![0usize; b.len() + 1]; a.len() + 1];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            common[i][j] = if a[i] == b[j] {
                common[i + 1][j + 1] + 1
            } else {
                common[i + 1][j].max(common[i][j + 1])
            };
        }
    }
    let (mut i, mut j, mut out) = (0, 0, String::new());
    while i < a.len() || j < b.len() {
        let (mark, line) = if i < a.len() && j < b.len() && a[i] == b[j] {
            (i, j) = (i + 1, j + 1);
            (' ', a[i - 1])
        } else if j < b.len() && (i == a.len() || common[i][j + 1] >= common[i + 1][j]) {
            j += 1;
            ('+', b[j - 1])
        } else {
            i += 1;
            ('-', a[i - 1])
        };
        let _ = writeln!(out, "{mark} {line}");
    }
    out
}
