//! `convert`: writes trained weights as other tools load them, without training.

use super::options::convert::ConvertArgs;
use super::output::{print, print_json, warn};
use super::progress;
use ckpt_opt::export::{Export, Target, checkpoint, ort_training};
use ckpt_opt::tensors::Tensors;
use ckpt_passes::transform::optimizer::Optimizer;
use ckpt_passes::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;

/// What was written, for `--format json`.
#[derive(Serialize)]
struct Report {
    written: Vec<String>,
    changed: usize,
    adapters: usize,
    warnings: Vec<String>,
}

impl Report {
    fn new(
        files: &[PathBuf],
        (changed, adapters): (usize, usize),
        warnings: Vec<String>,
    ) -> Report {
        Report {
            written: files.iter().map(|f| f.display().to_string()).collect(),
            changed,
            adapters,
            warnings,
        }
    }
}

pub fn run(args: &ConvertArgs) -> Result<()> {
    let step = progress::step("reading the weights");
    let (tensors, recorded) = match &args.weights {
        Some(path) => {
            let read = checkpoint::read(path)?;
            (read.tensors, read.lora)
        }
        None => (Tensors::new(), None),
    };
    let given = args.source.given()?;
    let report = if args.to == Target::OrtTraining {
        let optimizer = args.optimizer.unwrap_or(Optimizer::ADAMW);
        let mut artifacts = ort_training::read(&args.model, &given, &optimizer)?;
        let (changed, warnings) = artifacts.set(&tensors)?;
        drop(step);
        let _step = progress::step("writing");
        Report::new(&artifacts.write(&args.output)?, (changed, 0), warnings)
    } else {
        if args.optimizer.is_some() {
            let what = "only --to ort-training writes an optimizer";
            return Err(Error::usage("convert", what).help("leave --optimizer out"));
        }
        let lora = args.lora.as_ref().or(recorded.as_ref());
        let export = Export::new(&args.model, &given, &tensors, lora)?;
        drop(step);
        let _step = progress::step("writing");
        let files = export.write(args.to, &args.output)?;
        Report::new(&files, export.counts(), export.warnings)
    };
    if args.console.is_json() {
        return print_json(&report);
    }
    warn(&report.warnings);
    if args.console.quiet {
        return Ok(());
    }
    let mut text = format!(
        "{} weights changed, {} adapters\n",
        report.changed, report.adapters
    );
    for file in report.written {
        text += &format!("wrote {file}\n");
    }
    print(&text)
}
