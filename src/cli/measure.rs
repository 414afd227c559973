//! `calibrate` and `profile` measure what plans are priced with, `overhead` what a plan costs.

use super::args::measuring::{CalibrateArgs, OverheadArgs, ProfileArgs};
use ckpt_passes::Result;

#[cfg(not(feature = "torch"))]
pub fn calibrate(_: &CalibrateArgs) -> Result<()> {
    Err(super::no_runtime("calibrate"))
}

#[cfg(not(feature = "torch"))]
pub fn profile(_: &ProfileArgs) -> Result<()> {
    Err(super::no_runtime("profile"))
}

#[cfg(not(feature = "torch"))]
pub fn overhead(_: &OverheadArgs) -> Result<()> {
    Err(super::no_runtime("overhead"))
}

#[cfg(feature = "torch")]
pub use with_torch::{calibrate, overhead, profile};

#[cfg(feature = "torch")]
mod with_torch {
    use super::super::args::Format;
    use super::super::{progress, result, result_json, warn, write_json};
    use super::{CalibrateArgs, OverheadArgs, ProfileArgs, Result};
    use ckpt_opt::measure::{calibrate as device, overhead as turns, profile as nodes};
    use ckpt_opt::units::bytes;
    use std::fmt::Write;
    use std::time::Duration;

    pub fn calibrate(args: &CalibrateArgs) -> Result<()> {
        let measured = {
            let _progress = progress::step("measuring the device");
            device::calibrate(&device::Request {
                place: args.measuring.device,
                threads: args.measuring.threads,
                name: args.name.clone(),
                runs: args.measuring.runs,
                max_rows: args.max_rows,
                vector: args.vector_bytes / 4,
            })?
        };
        write_json(&args.output, &measured)?;
        if args.report.format == Format::Json {
            return result_json(&measured);
        }
        let mut out = format!("{}\n", measured.name);
        for source in &measured.sources {
            let _ = writeln!(out, "  {source}");
        }
        let rates = &measured.teraflops;
        let rate = |name: &str, x: Option<f64>| {
            x.map_or(String::new(), |x| format!(", {:.4} in {name}", x))
        };
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
        result(&out)
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
                    threads: args.measuring.threads,
                    place: args.measuring.device,
                    runs: args.measuring.runs,
                    warm_up: args.warm_up,
                    attention: args.attention,
                },
            )?
        };
        if let Some(path) = &args.output {
            write_json(path, &measured.profile)?;
        }
        warn(&measured.warnings);
        if args.report.format == Format::Json {
            return result_json(&measured.profile);
        }
        let wrote = args
            .output
            .as_ref()
            .map_or(String::new(), |o| format!("\nwrote {}\n", o.display()));
        result(&(measured.human() + &wrote))
    }

    pub fn overhead(args: &OverheadArgs) -> Result<()> {
        let measured = {
            let _progress = progress::step("running both in turns");
            turns::overhead(
                &args.pair.setting(),
                Duration::from_secs(args.seconds.into()),
            )?
        };
        if args.report.format == Format::Json {
            return result_json(&measured);
        }
        warn(&measured.warnings);
        result(&measured.human())
    }
}
