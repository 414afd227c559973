//! `train` from outside: what it writes, that it goes on bit for bit wherever it was ended, and what it refuses.

use crate::support::command;

use ckpt_opt::tensors::{self, Tensors};
use ckpt_opt::train::metrics::{self, StepMetrics};
use command::{call, code, command, files, fixture, has_keys, json, stderr};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

/// What every run here says: a small Llama on tokens.
const TRAIN: &str = "train model.onnx --loss causal-lm --data tokens.bin --dim batch=2 --dim seq=16 --policy full --threads 1 --lr 1e-2";
pub(crate) const STEPS: &str = "--steps 40 --schedule cosine --warmup 10%";
/// Steps that are saved and evaluated again and again.
pub(crate) const SAVED: &str = "--save-every 2 --eval-data other.bin --eval-every 7";

/// A folder with the model, tokens, and other tokens.
pub(crate) fn workplace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (model, name) in [("llama32", "model.onnx"), ("gpt2", "other.onnx")] {
        std::fs::copy(fixture(model, "model.onnx"), dir.path().join(name)).unwrap();
    }
    let mut state = 1u64;
    let mut token = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 33) % 50) as u16
    };
    for name in ["tokens.bin", "other.bin"] {
        let bytes: Vec<u8> = (0..16 * 30).flat_map(|_| token().to_le_bytes()).collect();
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// Returns the arguments of a run that writes to `out`, followed by the words of `more`.
pub(crate) fn args<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let own = TRAIN.split_whitespace().chain(["--out", out]);
    own.chain(more.iter().flat_map(|text| text.split_whitespace()))
        .collect()
}

/// Runs a command that must succeed.
pub(crate) fn done(dir: &Path, args: &[&str]) -> Output {
    let done = call(dir, args);
    assert_eq!(code(&done), 0, "{args:?}: {}", stderr(&done));
    done
}

/// Runs a command that must fail, and whose error must hold all of `says`.
pub(crate) fn fails(dir: &Path, args: &[&str], code_wanted: i32, says: &[&str]) {
    let done = call(dir, args);
    let said = stderr(&done);
    assert_eq!(code(&done), code_wanted, "{args:?}: {said}");
    for part in says {
        assert!(said.contains(part), "{args:?}: no `{part}` in {said}");
    }
}

pub(crate) fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Puts another word in the place of one.
pub(crate) fn with<'a>(mut args: Vec<&'a str>, old: &str, new: &'a str) -> Vec<&'a str> {
    let place = args.iter().position(|word| *word == old).unwrap();
    args[place] = new;
    args
}

/// Metrics without times.
pub(crate) fn steps(run: &Path) -> Vec<StepMetrics> {
    let mut steps = metrics::read(&run.join(metrics::FILE)).unwrap();
    for step in &mut steps {
        (step.seconds, step.data_seconds) = (0.0, 0.0);
    }
    steps
}

pub(crate) fn checkpoints(run: &Path) -> Vec<String> {
    let folder = run.join("checkpoints");
    match folder.is_dir() {
        true => files(&folder),
        false => Vec::new(),
    }
}

/// Starts a run.
pub(crate) fn started(dir: &Path, args: &[&str]) -> Child {
    let mut command = command(dir);
    command
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Waits until the run has written so many steps; false if it ended before.
pub(crate) fn reaches(child: &mut Child, run: &Path, steps: usize) -> bool {
    loop {
        let text = std::fs::read(run.join(metrics::FILE)).unwrap_or_default();
        if text.iter().filter(|b| **b == b'\n').count() >= steps {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub(crate) fn same_bits(a: &Path, b: &Path) {
    for name in [
        "model.safetensors",
        "checkpoints/step-40/parameters.safetensors",
        "checkpoints/step-40/states.safetensors",
    ] {
        assert!(
            std::fs::read(a.join(name)).unwrap() == std::fs::read(b.join(name)).unwrap(),
            "{name} differs"
        );
    }
    assert_eq!(steps(a), steps(b));
}

#[test]
fn a_run_reports_and_writes_what_the_contract_lists() {
    let dir = workplace();
    let more = "--eval-data other.bin --eval-every 20 --keep 3 --format json";
    let report = json(&call(dir.path(), &args("out", &[STEPS, more])));
    has_keys(
        &report,
        &[
            "steps",
            "total_steps",
            "tokens",
            "first_loss",
            "last_loss",
            "peak_bytes",
            "model",
            "checkpoint",
        ],
    );
    assert_eq!(report["peak_bytes"], report["predicted_peak_bytes"]);
    assert_eq!(report["warnings"], serde_json::json!([]));
    let out = dir.path().join("out");
    assert_eq!(checkpoints(&out), ["step-32", "step-36", "step-40"]);
    let steps = steps(&out);
    assert_eq!(steps.len(), 40);
    assert!(
        steps[39].loss < steps[0].loss - 1.0,
        "{} -> {}",
        steps[0].loss,
        steps[39].loss
    );
    assert!(
        steps
            .iter()
            .all(|s| s.peak_bytes == s.predicted_peak_bytes && s.tokens == 30)
    );
    // 15 batches, and 4 steps of warm-up from 0 on.
    assert_eq!((steps[0].lr, steps[4].lr), (0.0, 1e-2));
    let evaluated: Vec<u64> = steps
        .iter()
        .filter(|s| s.eval_loss.is_some())
        .map(|s| s.step)
        .collect();
    assert_eq!(evaluated, [20, 40]);
    assert_eq!(steps[39].perplexity, steps[39].eval_loss.map(f64::exp));
    let line: Value = serde_json::from_str(
        std::fs::read_to_string(out.join("metrics.jsonl"))
            .unwrap()
            .lines()
            .next()
            .unwrap(),
    )
    .unwrap();
    has_keys(
        &line,
        &["step", "loss", "lr", "tokens", "seconds", "peak_bytes"],
    );
}

#[test]
fn evaluation_is_the_loss_of_the_steps() {
    let dir = workplace();
    let more = "--epochs 1 --shuffle off --eval-data tokens.bin --weight-decay 0 --format json";
    let report = json(&call(dir.path(), &with(args("out", &[more]), "1e-2", "0")));
    let steps = steps(&dir.path().join("out"));
    assert_eq!(steps.len(), 15);
    let mean = steps.iter().map(|s| s.loss).sum::<f64>() / 15.0;
    let eval = report["eval_loss"].as_f64().unwrap();
    assert!((eval - mean).abs() < 1e-6, "{eval} and {mean}");
}

/// The weights of a step of the library's own run, by the same names.
#[test]
fn the_weights_have_the_names_and_layout_of_the_framework() {
    let dir = workplace();
    done(dir.path(), &args("out", &["--steps 1 --optimizer sgd"]));
    let found = tensors::read(&dir.path().join("out/model.safetensors")).unwrap();
    let gradients = tensors::read(&fixture("llama32", "grads_causal_lm.npz")).unwrap();
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<String>>();
    let mut expected: Vec<String> = names(&gradients)
        .iter()
        .map(|n| n.strip_prefix("grad.").unwrap_or(n).to_string())
        .collect();
    expected.retain(|name| found.contains_key(name));
    assert!(expected.len() >= 20, "{expected:?} of {:?}", names(&found));
    for name in &expected {
        let own = gradients
            .get(name)
            .or(gradients.get(&format!("grad.{name}")))
            .unwrap();
        assert_eq!(own.dims, found[name].dims, "{name}");
    }
    // A tied weight has all of its names.
    assert_eq!(found["lm_head.weight"], found["model.embed_tokens.weight"]);
}

pub(crate) fn uninterrupted(dir: &Path) -> PathBuf {
    done(dir, &args("whole", &[STEPS, SAVED]));
    dir.join("whole")
}

#[test]
fn a_signal_finishes_the_step_and_saves() {
    let dir = workplace();
    let whole = uninterrupted(dir.path());
    let run = dir.path().join("out");
    for (signal, more_steps) in [(libc::SIGINT, 3), (libc::SIGTERM, 9)] {
        let resume = if more_steps > 3 { "--resume" } else { "" };
        let mut child = started(dir.path(), &args("out", &[STEPS, SAVED, resume]));
        assert!(reaches(&mut child, &run, more_steps));
        // SAFETY: the child has not been waited for, so its number is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let last = steps(&run).last().unwrap().step;
        assert!(
            checkpoints(&run).contains(&format!("step-{last}")),
            "{:?}",
            checkpoints(&run)
        );
        assert!(!run.join("model.safetensors").exists());
    }
    // What is done already is done.
    for _ in 0..2 {
        done(dir.path(), &args("out", &[STEPS, SAVED, "--resume"]));
        same_bits(&whole, &run);
    }
}

#[test]
fn a_written_graph_trains_as_the_model_does() {
    let dir = workplace();
    let written = "model.onnx -o step.onnx --loss causal-lm --dim batch=2 --dim seq=16 --policy none --optimizer adamw \
        --no-decay-vectors --fuse-optimizer --drop-output logits";
    done(dir.path(), &words(written));
    done(dir.path(), &args("planned", &["--steps 3"]));
    let own = "train step.onnx --data tokens.bin --threads 1 --lr 1e-2 --steps 3 --out written";
    done(dir.path(), &words(own));
    let read = |run: &str| std::fs::read(dir.path().join(run).join("model.safetensors")).unwrap();
    assert!(read("planned") == read("written"));
}

#[test]
fn a_loss_is_needed_and_one_run_has_a_folder() {
    let dir = workplace();
    let one = args("out", &["--steps 1"]);
    let vjp = with(one.clone(), "causal-lm", "vjp");
    fails(dir.path(), &vjp, 2, &["--loss causal-lm"]);
    let held = ckpt_opt::train::checkpoint::lock(&dir.path().join("out")).unwrap();
    fails(dir.path(), &one, 2, &["another run"]);
    drop(held);
}

#[test]
fn a_file_holds_the_options() {
    let dir = workplace();
    std::fs::write(
        dir.path().join("train.toml"),
        "loss = \"causal-lm\"\ndata = [\"tokens.bin\"]\nlr = 1e-2\npolicy = \"full\"\nthreads = 1\nsteps = 2\nout = \"a\"\nseed = 3\n[dim]\nbatch = 2\nseq = 16\n",
    )
    .unwrap();
    let file = "--config train.toml train model.onnx";
    done(dir.path(), &words(file));
    done(dir.path(), &words(&format!("{file} --out b --steps 3")));
    let (a, b) = (steps(&dir.path().join("a")), steps(&dir.path().join("b")));
    assert_eq!((a.len(), b.len()), (2, 3));
    assert_eq!(a, b[..2]);
}

#[test]
fn adapters_are_trained_alone_merged_and_written() {
    let dir = workplace();
    done(
        dir.path(),
        &words("convert model.onnx --to safetensors -o base.safetensors"),
    );
    let lora = "--lora r=4,alpha=8,targets=*q_proj*,*v_proj* --steps 4";
    done(dir.path(), &args("out", &[lora]));
    let out = dir.path().join("out");
    let read = |path: PathBuf| tensors::read(&path).unwrap();
    let (base, merged) = (
        read(dir.path().join("base.safetensors")),
        read(out.join("model.safetensors")),
    );
    assert!(base.keys().eq(merged.keys()));
    for (name, tensor) in &base {
        let is_adapted = name.contains("q_proj") || name.contains("v_proj");
        assert_eq!(tensor != &merged[name], is_adapted, "{name}");
    }
    let adapter = read(out.join("adapter/adapter_model.safetensors"));
    assert_eq!(adapter.len(), 8);
    let checkpoint =
        "convert model.onnx out/checkpoints/step-4 --to safetensors -o again.safetensors";
    done(dir.path(), &words(checkpoint));
    assert_eq!(read(dir.path().join("again.safetensors")), merged);
    // Frozen weights are in no checkpoint.
    let saved = read(out.join("checkpoints/step-4/parameters.safetensors"));
    assert_eq!(saved.len(), 8);
}

#[test]
fn every_update_goes_on_bit_for_bit_with_the_predicted_peak() {
    let dir = workplace();
    std::fs::copy(
        fixture("llama32_bf16", "model.onnx"),
        dir.path().join("narrow.onnx"),
    )
    .unwrap();
    std::fs::write(dir.path().join("narrow.toml"), "clip = 1.0\n").unwrap();
    for (i, options) in [
        "--clip 0.5 --accumulate 2",
        "--optimizer lion --accumulate 3",
        "--optimizer muon --no-decay *embed*",
        "--optimizer adamw8bit --accumulate 2 --clip 1",
        "--optimizer adamw8bit --config narrow.toml",
        "--optimizer adamw8bit --lora r=256,alpha=8,targets=*proj*",
        "--optimizer adafactor --clip 1 --weight-decay 0.1",
        "--config narrow.toml",
        "--stochastic-rounding",
    ]
    .into_iter()
    .enumerate()
    {
        let is_clipped = options.contains("--clip") || options.contains("narrow");
        let is_narrow = options.contains("narrow") || options.contains("stochastic");
        let model = if is_narrow {
            "narrow.onnx"
        } else {
            "model.onnx"
        };
        let run = |out: &str, more: &str| {
            let fixed = "--save-every 2 --format json";
            let words = args(out, &[fixed, options, more]);
            json(&call(dir.path(), &with(words, "model.onnx", model)))
        };
        let (whole, halves) = (format!("whole-{i}"), format!("halves-{i}"));
        let done = run(&whole, "--steps 4");
        assert_eq!(
            done["peak_bytes"], done["predicted_peak_bytes"],
            "{options:?}"
        );
        // The schedule is constant, so two steps of two are two of four.
        run(&halves, "--steps 2");
        run(&halves, "--steps 4 --resume");
        let folders = [whole, halves].map(|name| dir.path().join(name));
        for name in ["model.safetensors", "checkpoints/step-4/states.safetensors"] {
            let [a, b] = folders
                .each_ref()
                .map(|folder| std::fs::read(folder.join(name)).unwrap());
            assert!(a == b, "{options:?}: {name} differs");
        }
        let [all, resumed] = folders.each_ref().map(|folder| steps(folder));
        assert_eq!(all, resumed, "{options:?}");
        assert_eq!(all[0].grad_norm.is_some(), is_clipped, "{options:?}");
    }
}

#[test]
fn buffers_are_saved_with_the_parameters() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["buffers.pt2", "buffers.onnx", "case.npz"] {
        std::fs::copy(fixture("buffers", name), dir.path().join(name)).unwrap();
    }
    let wanted = tensors::read(&fixture("buffers", "state.npz")).unwrap();
    let is_statistic = |name: &str| name.contains("running");
    for (model, out) in [("buffers.pt2", "a"), ("buffers.onnx", "b")] {
        let train = "--loss mse --data case.npz --optimizer sgd --lr 0.1 --steps 1 --out";
        let run = done(dir.path(), &words(&format!("train {model} {train} {out}")));
        let warning = "running statistics stay as they are in the model (`norm.running_mean`, `norm.running_var`)";
        assert!(stderr(&run).contains(warning), "{}", stderr(&run));
        let base = format!("convert {model} --to safetensors -o base.safetensors");
        done(dir.path(), &words(&base));
        let [trained, base] = [&format!("{out}/model.safetensors"), "base.safetensors"]
            .map(|name| tensors::read(&dir.path().join(name)).unwrap());
        assert!(base.keys().eq(trained.keys()));
        for (name, tensor) in &wanted {
            // PyTorch completes this one, which no graph reads; the legacy exporter folds `shift`.
            if name == "norm.num_batches_tracked" || (name == "shift" && out == "b") {
                continue;
            }
            let own = &trained[name];
            assert_eq!(own.dims, tensor.dims, "{name}");
            for i in 0..tensor.elements() as usize {
                let (a, b) = (own.get_f64(i).unwrap(), tensor.get_f64(i).unwrap());
                assert!((a - b).abs() < 1e-6, "{name}: {a} and {b}");
            }
            let is_kept = is_statistic(name) || name == "shift";
            assert_eq!(*own == base[name], is_kept, "{name}");
        }
        assert!(!trained.contains_key("fleeting"));
    }
}

#[test]
fn master_weights_start_from_the_parameters() {
    let dir = workplace();
    let model = fixture("llama32_bf16", "model.onnx");
    let same = (0..32u16).flat_map(|n| (n * 7 % 50).to_le_bytes());
    std::fs::write(dir.path().join("same.bin"), same.collect::<Vec<u8>>()).unwrap();
    let line = format!(
        "train {} --loss causal-lm --data same.bin --shuffle off --dim batch=2 --dim seq=16 --policy none \
         --steps 3 --lr 0 --out still -q",
        model.display()
    );
    done(dir.path(), &words(&line));
    // Nothing is learned, and each step sees the same examples.
    let losses: Vec<f64> = steps(&dir.path().join("still"))
        .iter()
        .map(|s| s.loss)
        .collect();
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
}
