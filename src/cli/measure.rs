//! `calibrate` and `profile` measure the costs of plans, `overhead` the time that a plan adds.

use super::launch::{check_count, launch};
use super::options::runtime::{CalibrateArgs, OverheadArgs, ProfileArgs};
use super::output::{print, print_json, warn, write_json, wrote};
use super::progress;
use ckpt_opt::measure::link::link;
use ckpt_opt::measure::{calibrate as device, overhead as turns, profile as nodes};
use ckpt_opt::runtime::ranks::RankOptions;
use ckpt_opt::units::bytes;
use ckpt_passes::Result;
use std::fmt::Write;
use std::time::Duration;

/// How long ranks wait for each other.
const RANK_LIMIT: Duration = Duration::from_secs(600);

/// Returns the exit code.
pub fn calibrate(args: &CalibrateArgs) -> Result<u8> {
    let place = RankOptions::from_environment(RANK_LIMIT)?;
    if let (Some(wanted), None) = (args.ranks.filter(|n| *n > 1), &place) {
        return launch(wanted);
    }
    check_count(args.ranks, place.as_ref().map_or(1, |place| place.ranks))?;
    let request = device::Request {
        place: place.as_ref().map_or(args.measuring.on.device, |rank| {
            rank.place(args.measuring.on.device)
        }),
        threads: args.measuring.on.threads,
        name: args.name.clone(),
        runs: args.measuring.runs,
        max_rows: args.max_rows,
        vector: args.vector_bytes / 4,
    };
    let link = place.as_ref().map(|place| link(&request, place));
    let link = link.transpose()?;
    if place.is_some_and(|place| place.rank > 0) {
        return Ok(0);
    }
    let measured = {
        let _progress = progress::step("measuring the device");
        device::calibrate(&request, link)?
    };
    write_json(&args.output, &measured)?;
    if args.console.is_json() {
        return print_json(&measured).map(|()| 0);
    }
    let mut out = format!("{}\n", measured.name);
    for source in &measured.sources {
        let _ = writeln!(out, "  {source}");
    }
    let rates = &measured.teraflops;
    let rate =
        |name: &str, x: Option<f64>| x.map_or(String::new(), |x| format!(", {:.4} in {name}", x));
    let _ = writeln!(
        out,
        "\n{:.4} TFLOP/s in f32{}{}{}\n{:.1} GB/s, {:.2} us a node, blocks of {} bytes{}\nwrote {}",
        rates.f32,
        rate("f64", rates.f64),
        rate("f16", rates.f16),
        rate("bf16", rates.bf16),
        measured.gigabytes_per_s,
        measured.launch_us,
        measured.granularity_bytes,
        measured
            .usable_bytes()
            .map_or(String::new(), |usable| format!(
                ", {} of memory to use",
                bytes(usable)
            )),
        args.output.display()
    );
    print(&out).map(|()| 0)
}

pub fn profile(args: &ProfileArgs) -> Result<()> {
    let measured = {
        let _progress = progress::step("measuring the nodes");
        nodes::profile(
            &args.model,
            &args.training.source.given()?,
            &nodes::Request {
                step: args.training.request(),
                inputs: args.training.source.examples.clone(),
                seed: args.seed,
                threads: args.measuring.on.threads,
                place: args.measuring.on.device,
                runs: args.measuring.runs,
                warm_up: args.warm_up,
                attention: args.kernels.attention,
            },
        )?
    };
    if let Some(path) = &args.output {
        write_json(path, &measured.profile)?;
    }
    warn(&measured.warnings);
    args.console.print(&measured.profile, &[], || {
        measured.human() + &wrote(args.output.as_deref())
    })
}

pub fn overhead(args: &OverheadArgs) -> Result<()> {
    let measured = {
        let _progress = progress::step("running both in turns");
        turns::overhead(
            &args.pair.request(),
            Duration::from_secs(args.seconds.into()),
        )?
    };
    args.console
        .print(&measured, &measured.warnings, || measured.human())
}
