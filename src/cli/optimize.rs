//! `optimize`: writes the training graph of a model and reports its memory and overhead.

use super::options::plan::OptimizeArgs;
use super::output::{print, print_json, warn, write_json, wrote};
use super::progress;
use ckpt_opt::emit::file::write_whole;
use ckpt_opt::emit::onnxruntime::use_onnxruntime;
use ckpt_opt::emit::save::WeightOptions;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::{Outcome, optimize, write};
use ckpt_passes::driver::Watch;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::{Error, Result, text};
use std::path::Path;

pub fn run(args: &OptimizeArgs) -> Result<()> {
    if args.output.is_none() && args.stop_after.is_none() {
        return Err(
            Error::usage("output", "there is no place to write the training graph to")
                .help(format!("ckpt-opt {} -o OUT", args.model.display())),
        );
    }
    let mut model = {
        let _progress = progress::step("reading the model");
        load(&args.model, &args.step.training.source.given()?)?
    };
    let asked = args.step.training.loss.as_ref();
    if asked.is_some_and(|loss| !matches!(loss, Loss::Output(_)))
        && ckpt_passes::analysis::gradients::has_backward(&model.graph)
    {
        return Err(Error::usage(
            "loss",
            "the model holds its backward already: there is no loss to choose",
        )
        .help("leave --loss out, and the graph is planned as it is; --loss output:NAME differentiates it once more"));
    }
    let outcome = {
        let progress = progress::step("compiling");
        compiled(args, &mut model, &progress)?
    };
    if args.console.verbose {
        anstream::eprint!("{}", outcome.timings);
    }
    let mut warnings = std::mem::take(&mut model.warnings);
    warnings.extend(outcome.warnings);
    if let Some(output) = &args.output {
        let _progress = progress::step("writing");
        let weights = WeightOptions {
            link: args.link_weights,
            as_inputs: args.weights_as_inputs,
        };
        if args.collectives == "onnxruntime" {
            warnings.extend(use_onnxruntime(&mut model.graph)?);
        }
        warnings.extend(write(&model.graph, &args.model, output, weights)?);
    }
    if let Some((step, planned)) = &outcome.planned {
        if let Some(path) = &args.plan_out {
            write_json(path, &planned.plan)?;
        }
        args.views.write_plan(&args.model, step, planned)?;
    }
    match outcome.summary {
        Some(mut summary) => {
            summary.warnings = warnings.clone();
            if args.console.is_json() {
                return print_json(&summary);
            }
            warn(&warnings);
            if args.console.quiet {
                return Ok(());
            }
            print(&(summary.human() + &wrote(args.output.as_deref())))
        }
        None => {
            warn(&warnings);
            match &args.output {
                Some(_) => Ok(()),
                None => print(&text::print(&model.graph)),
            }
        }
    }
}

fn compiled(
    args: &OptimizeArgs,
    model: &mut ckpt_opt::frontend::Model,
    progress: &progress::Progress,
) -> Result<Outcome> {
    let request = args.request()?;
    let mut failed = None;
    let mut write = |name: &str, text: &str| {
        if let Some(folder) = &args.dump
            && failed.is_none()
        {
            failed = dump(folder, name, text).err();
        }
    };
    if let Some(folder) = &args.dump {
        std::fs::create_dir_all(folder).map_err(|e| dump_error(folder, &e))?;
    }
    let mut say = |pass: &'static str| progress.say(format!("compiling: {pass}"));
    let mut watch = Watch {
        pass: Some(&mut say),
        dump: args.dump.is_some().then_some(&mut write),
        ..Watch::default()
    };
    let outcome = optimize(&mut model.graph, &request, &mut watch);
    match failed {
        // A dump that cannot be written must not hide why a pass failed.
        Some(e) if outcome.is_ok() => Err(e),
        _ => outcome,
    }
}

fn dump(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    write_whole(&path, text.as_bytes())
}

fn dump_error(path: &Path, e: &std::io::Error) -> Box<Error> {
    Error::environment("dump", format!("cannot write a dump: {e}")).at(path.display().to_string())
}
