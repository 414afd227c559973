//! `train`: trains a model on data, and writes its weights.

use super::launch::{check_count, launch};
use super::options::train::TrainArgs;
use super::output::{print, print_json, warn};
use super::progress;
use super::steps::Steps;
use ckpt_opt::runtime::ranks::RankOptions;
use ckpt_opt::train::data::{DataRequest, Packing, TokenType};
use ckpt_opt::train::schedule::Schedule;
use ckpt_opt::train::trainer::{Event, Length, TrainOptions, Trained, Trainer};
use ckpt_opt::units::bytes;
use ckpt_passes::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The exit code of a run that a signal ended.
const INTERRUPTED: u8 = 130;

/// Returns the exit code.
pub fn run(args: &TrainArgs) -> Result<u8> {
    let limit = Duration::try_from_secs_f64(args.rank_timeout);
    let limit = limit.map_err(|e| Error::usage("ranks", format!("--rank-timeout: {e}")))?;
    let place = RankOptions::from_environment(limit)?;
    let ranks = place.as_ref().map_or(1, |place| place.ranks);
    if let (Some(wanted), None) = (args.ranks.filter(|n| *n > 1), &place) {
        return start(args, wanted);
    }
    check_count(args.ranks, ranks)?;
    let leads = place.as_ref().is_none_or(|place| place.rank == 0);
    let options = TrainOptions {
        place: place
            .as_ref()
            .map_or(args.on.device, |rank| rank.place(args.on.device)),
        ranks: place,
        ..options(args)
    };
    let trainer = {
        let _progress = progress::step("planning");
        let given = args.step.training.source.given()?;
        Trainer::load(&args.model, &given, &args.request(ranks as u32)?)?
    };
    let is_shown = leads && !args.console.is_json() && !args.console.quiet;
    if let Some(summary) = trainer
        .summary
        .as_ref()
        .filter(|_| is_shown && args.console.verbose)
    {
        print(&summary.human())?;
    }
    let mut steps: Option<Steps> = None;
    let mut registered = Ok(());
    let done = trainer.train(&options, &mut |event| match event {
        Event::Begin { done, total } => {
            registered = stop_on_signals(&options.stop);
            steps = leads.then(|| Steps::new(done, total, args.console.verbose));
        }
        Event::Step(metrics) => {
            if let Some(steps) = &mut steps {
                steps.show(metrics);
            }
        }
        Event::Warning(_) if !leads => {}
        Event::Warning(warning) => match &steps {
            Some(steps) => steps.pause(|| warn(&[warning.to_string()])),
            None => warn(&[warning.to_string()]),
        },
    });
    drop(steps);
    registered?;
    let done = done?;
    match args.console.is_json() {
        true if leads => print_json(&done)?,
        _ if is_shown => print(&human(&done))?,
        _ => {}
    }
    Ok(if done.is_interrupted { INTERRUPTED } else { 0 })
}

/// Starts the ranks.
fn start(args: &TrainArgs, ranks: usize) -> Result<u8> {
    if args
        .data
        .iter()
        .chain(&args.eval_data)
        .any(|path| path.as_os_str() == "-")
    {
        return Err(Error::usage("data", "several ranks cannot read stdin").help("give a file"));
    }
    launch(ranks)
}

fn options(args: &TrainArgs) -> TrainOptions {
    let wide = |n: usize| n as u64;
    let data = |paths: &[PathBuf]| DataRequest {
        paths: paths.to_vec(),
        tokenizer: args.tokenizer.clone(),
        chat_template: args.chat_template.clone(),
        token_type: match args.token_type.as_str() {
            "u32" => TokenType::U32,
            _ => TokenType::U16,
        },
        packing: match args.packing.as_str() {
            "pad" => Packing::Pad,
            _ => Packing::Pack,
        },
        shuffle: args.shuffle,
        drop_last: args.drop_last,
        text_column: args.text_column.clone(),
        ..DataRequest::default()
    };
    TrainOptions {
        data: data(&args.data),
        eval_data: (!args.eval_data.is_empty()).then(|| data(&args.eval_data)),
        length: match args.steps {
            Some(steps) => Length::Steps(wide(steps)),
            None => Length::Epochs(args.epochs.map_or(1, wide)),
        },
        lr: args.lr,
        schedule: Schedule {
            shape: args.schedule,
            warmup: args.warmup,
        },
        eval_every: args.eval_every.map(wide),
        save_every: args.save_every.map(wide),
        keep: args.keep,
        resume: args.resume,
        seed: args.seed,
        out: args.out.clone(),
        threads: args.on.threads,
        place: args.on.device,
        attention: args.kernels.attention,
        offload_dir: args.offload_dir.clone(),
        ranks: None,
        trace: args.trace.clone(),
        ort_training: args.export.is_some(),
        stop: Arc::default(),
    }
}

/// Has the first SIGINT or SIGTERM set `stop`, and the second end the process.
fn stop_on_signals(stop: &Arc<AtomicBool>) -> Result<()> {
    let failed =
        |e: std::io::Error| Error::environment("signal", format!("no handler for signals: {e}"));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), stop.clone())
            .map_err(failed)?;
        flag::register(signal, stop.clone()).map_err(failed)?;
    }
    Ok(())
}

fn human(done: &Trained) -> String {
    let mut out = String::new();
    let state = match done.is_interrupted {
        true => format!(
            "interrupted after step {} of {}",
            done.steps, done.total_steps
        ),
        false => format!("trained {} steps", done.steps),
    };
    let _ = write!(
        out,
        "{state}: {} tokens, {:.1} s",
        done.tokens, done.seconds
    );
    if let (Some(first), Some(last)) = (done.first_loss, done.last_loss) {
        let _ = write!(out, ", loss {first:.4} -> {last:.4}");
    }
    out.push('\n');
    if let (Some(loss), Some(perplexity)) = (done.eval_loss, done.perplexity) {
        let _ = writeln!(
            out,
            "evaluation: loss {loss:.4}, perplexity {perplexity:.2}"
        );
    }
    if done.peak_bytes > 0 {
        let _ = writeln!(
            out,
            "peak {} measured, {} predicted",
            bytes(done.peak_bytes),
            bytes(done.predicted_peak_bytes)
        );
    }
    if done.seconds > 0.0 {
        let _ = writeln!(
            out,
            "waited {:.2} % of that time for data, and {:.2} s for checkpoints",
            100.0 * done.data_seconds / done.seconds,
            done.checkpoint_seconds
        );
    }
    for rank in &done.ranks {
        let _ = writeln!(
            out,
            "rank {}: peak {} measured, {} predicted; buffers of exchanges beside it: {}",
            rank.rank,
            bytes(rank.peak_bytes),
            bytes(rank.predicted_peak_bytes),
            bytes(rank.exchange_bytes)
        );
    }
    if let Some(path) = &done.checkpoint {
        let _ = writeln!(out, "checkpoint {}", path.display());
    }
    if let Some(path) = &done.model {
        let _ = writeln!(out, "wrote {}", path.display());
    } else {
        let _ = writeln!(out, "go on with --resume");
    }
    out
}
