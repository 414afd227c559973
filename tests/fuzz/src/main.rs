//! Fuzzes the readers: `cargo run --release -p ckpt-fuzz -- --target onnx --seconds 600 --seed 1`.
//!
//! Targets: `onnx` (decode, import, type, verify), `text` (parse, print, parse), of TorchScript `archive`, `pickle`
//! and `code`, and `pt2`, the JSON of exported programs and of their weights. Deterministic: the same seed and number of
//! runs give the same inputs. A finding (a panic, an error of kind bug, a run beyond the limits of time or
//! memory) is written to `fuzz-<target>-<hash>.bin` in the current folder, and the exit code is 1.

use ckpt_fuzz::{Finding, TARGETS, fuzz};
use std::time::Duration;

fn option(args: &[String], name: &str, default: &str) -> String {
    let at = args.iter().position(|a| a == name);
    at.and_then(|i| args.get(i + 1))
        .map_or(default.to_string(), String::clone)
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let name = option(&args, "--target", "onnx");
    let Some(target) = TARGETS.iter().find(|t| t.name == name) else {
        eprintln!(
            "no target `{name}`; there are: {}",
            TARGETS.map(|t| t.name).join(", ")
        );
        std::process::exit(2);
    };
    let number = |option_name: &str, default: &str| -> u64 {
        option(&args, option_name, default)
            .parse()
            .unwrap_or_else(|_| {
                eprintln!("{option_name} takes a number");
                std::process::exit(2);
            })
    };
    let (seconds, seed) = (number("--seconds", "60"), number("--seed", "1"));
    let report = fuzz(target, seed, Duration::from_secs(seconds), u64::MAX);
    println!(
        "{}: {} runs, {} accepted, {} findings",
        target.name,
        report.runs,
        report.accepted,
        report.findings.len()
    );
    for Finding { what, input } in &report.findings {
        let hash = input.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
            (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)
        });
        let file = format!("fuzz-{}-{hash:016x}.bin", target.name);
        match std::fs::write(&file, input) {
            Ok(()) => println!("{what}\n  input: {file}"),
            Err(e) => println!("{what}\n  input not written: {e}"),
        }
    }
    std::process::exit(i32::from(!report.findings.is_empty()));
}
