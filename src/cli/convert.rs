//! `convert`: writes trained weights as other tools load them, without training.

use super::options::convert::ConvertArgs;
use super::output::{print, print_json, warn};
use super::progress;
use ckpt_opt::export::{Export, checkpoint};
use ckpt_opt::tensors::Tensors;
use ckpt_passes::Result;
use serde::Serialize;

/// What was written, for `--format json`.
#[derive(Serialize)]
struct Report {
    written: Vec<String>,
    changed: usize,
    adapters: usize,
    warnings: Vec<String>,
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
    let lora = args.lora.as_ref().or(recorded.as_ref());
    let export = Export::new(&args.model, &args.source.given()?, &tensors, lora)?;
    drop(step);
    let step = progress::step("writing");
    let files = export.write(args.to, &args.output)?;
    drop(step);
    let files: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    let (changed, adapters) = export.counts();
    if args.console.is_json() {
        return print_json(&Report {
            written: files,
            changed,
            adapters,
            warnings: export.warnings,
        });
    }
    warn(&export.warnings);
    if args.console.quiet {
        return Ok(());
    }
    let mut text = format!("{changed} weights changed, {adapters} adapters\n");
    for file in files {
        text += &format!("wrote {file}\n");
    }
    print(&text)
}
