//! `train` on several ranks: the bits of accumulated micro-batches, whatever each rank keeps a slice of, in the memory that
//! was predicted; and no rank waits for one that is gone.

mod parts;
mod program;

use crate::support::command;

use ckpt_opt::frontend::onnx::proto::ModelProto;
use ckpt_opt::tensors::{self, Tensors};
use ckpt_opt::train::metrics;
use ckpt_passes::ir::{DType, Tensor};
use command::{call, code, command, fixture, json, stderr};
use prost::Message;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

const FIXTURES: [&str; 9] = [
    "bert",
    "gemma3n",
    "gpt2",
    "gpt2_loss",
    "llama32",
    "llama32_bf16",
    "llama32_lora",
    "llama32_mask",
    "llama32_packed",
];

/// A folder with all models, and examples that each ignore a different number of labels.
fn workplace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for model in FIXTURES {
        let name = dir.path().join(format!("{model}.onnx"));
        std::fs::copy(fixture(model, "model.onnx"), name).unwrap();
    }
    let mut state = 1u64;
    let mut token = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((state >> 33) % 50) as i64
    };
    let (examples, seq) = (32, 12);
    let tokens: Vec<i64> = (0..examples * seq).map(|_| token()).collect();
    // Each example has other padding, and documents of another length.
    let each = |of: fn(usize, usize) -> i64| -> Vec<i64> {
        (0..examples * seq).map(|i| of(i / seq, i % seq)).collect()
    };
    let mask = each(|example, place| i64::from(place < 12 - example % 5));
    let positions = each(|example, place| (place % (5 + example % 4)) as i64);
    let all = |labels: Vec<i64>| {
        let tensor = |list: &[i64]| {
            let bytes: Vec<u8> = list.iter().flat_map(|n| n.to_le_bytes()).collect();
            Tensor::new(DType::I64, [examples as u64, seq as u64], bytes)
        };
        Tensors::from([
            ("input_ids".into(), tensor(&tokens)),
            ("labels".into(), tensor(&labels)),
            ("attention_mask".into(), tensor(&mask)),
            ("position_ids".into(), tensor(&positions)),
        ])
    };
    let uneven = tokens.iter().enumerate().map(|(i, token)| {
        let (example, place) = (i / seq, i % seq);
        // One example counts nothing at all.
        match place <= example % 7 || example == 5 {
            true => -100,
            false => *token,
        }
    });
    tensors::write(
        &dir.path().join("uneven.safetensors"),
        &all(uneven.collect()),
    )
    .unwrap();
    tensors::write(&dir.path().join("even.safetensors"), &all(tokens.clone())).unwrap();
    dir
}

fn args<'a>(model: &'a str, data: &'a str, out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let loss = match model {
        "bert.onnx" => "cross-entropy",
        "gpt2_loss.onnx" => "output:loss",
        _ => "causal-lm",
    };
    let base = [
        "train",
        model,
        "--loss",
        loss,
        "--data",
        data,
        "--dim",
        "seq=12",
        "--policy",
        "full",
        "--threads",
        "1",
        "--lr",
        "1e-2",
        "--format",
        "json",
        "--out",
        out,
    ];
    [&base[..], more].concat()
}

fn run(dir: &Path, model: &str, data: &str, out: &str, more: &[&str]) -> Value {
    let report = json(&call(dir, &args(model, data, out, more)));
    assert_eq!(
        report["peak_bytes"], report["predicted_peak_bytes"],
        "{out}"
    );
    for rank in report["ranks"].as_array().unwrap() {
        assert_eq!(
            rank["peak_bytes"], rank["predicted_peak_bytes"],
            "{out}: {rank}"
        );
    }
    report
}

fn weights(dir: &Path, out: &str) -> Vec<u8> {
    std::fs::read(dir.join(out).join("model.safetensors")).unwrap()
}

fn losses(dir: &Path, out: &str) -> Vec<f64> {
    let steps = metrics::read(&dir.join(out).join(metrics::FILE)).unwrap();
    steps.iter().map(|step| step.loss).collect()
}

/// Checks that a model trains to the same bits on two ranks as in one process that accumulates micro-batches, whatever each rank
/// keeps a slice of. Returns the weights.
fn two_ranks_are_micro_batches(dir: &Path, model: &str) -> Vec<u8> {
    let two = ["--dim", "batch=2", "--ranks", "2"];
    let (alone, sums) = twenty_steps(dir, model, &["--dim", "batch=2", "--accumulate", "2"]);
    assert_eq!(alone["ranks"].as_array().unwrap().len(), 0);
    let (ddp, summed) = twenty_steps(dir, model, &two);
    assert_eq!(ddp["ranks"].as_array().unwrap().len(), 2);
    // A rank sends its gradients in the model's type, and accumulated ones are added in float32.
    if model != "llama32_bf16" {
        assert!(sums == summed, "{model}: DDP differs from micro-batches");
    }
    let peak = |report: &Value| report["peak_bytes"].as_u64().unwrap();
    for shard in ["optimizer", "grads", "params"] {
        let (sliced, same) = twenty_steps(dir, model, &[&two[..], &["--shard", shard]].concat());
        assert!(same == summed, "{model}: {shard} differs from DDP");
        assert!(peak(&sliced) < peak(&ddp), "{model}: {shard} takes no less");
    }
    summed
}

/// Checks that a model trains to the same bits on four ranks, whichever of `shards` each keeps a slice of.
fn four_ranks_agree(dir: &Path, model: &str, shards: &[&str]) {
    let four = ["--dim", "batch=1", "--ranks", "4"];
    let (_, ddp) = twenty_steps(dir, model, &[&four[..], &["--bucket", "20KB"]].concat());
    for shard in shards {
        let (_, same) = twenty_steps(dir, model, &[&four[..], &["--shard", shard]].concat());
        assert!(same == ddp, "{model}: {shard} differs from DDP on 4 ranks");
    }
}

/// Trains for 20 steps. Returns the report and the weights.
fn twenty_steps(dir: &Path, model: &str, more: &[&str]) -> (Value, Vec<u8>) {
    let (file, out) = (format!("{model}.onnx"), format!("{model}{}", more.concat()));
    let all = [&["--steps", "20"], more].concat();
    let report = run(dir, &file, "even.safetensors", &out, &all);
    (report, weights(dir, &out))
}

#[test]
fn two_ranks_are_accumulated_micro_batches_and_slices_change_no_bit() {
    let dir = workplace();
    let dir = dir.path();
    for model in ["gpt2", "llama32_bf16"] {
        two_ranks_are_micro_batches(dir, model);
    }
    let summed = two_ranks_are_micro_batches(dir, "llama32");
    four_ranks_agree(dir, "llama32", &["params"]);
    // One bucket holds all gradients so far.
    let two = ["--dim", "batch=2", "--ranks", "2"];
    for (bucket, shard) in [("0", "none"), ("20KB", "none"), ("20KB", "params")] {
        let more = [&two[..], &["--shard", shard, "--bucket", bucket]].concat();
        let (_, same) = twenty_steps(dir, "llama32", &more);
        assert!(same == summed, "--bucket {bucket} changes bits");
    }
}

/// As above, for all fixtures, and with each kind of slice on four ranks.
#[test]
#[ignore = "takes minutes"]
fn all_fixtures_train_to_the_same_bits_on_ranks() {
    let dir = workplace();
    let dir = dir.path();
    for model in FIXTURES {
        two_ranks_are_micro_batches(dir, model);
        four_ranks_agree(dir, model, &["optimizer", "grads", "params"]);
    }
}

/// The largest distance of two files' tensors, each relative to its own norm.
fn distance(dir: &Path, a: &str, b: &str) -> f64 {
    let read = |out: &str| tensors::read(&dir.join(out).join("model.safetensors")).unwrap();
    let (a, b) = (read(a), read(b));
    let all = a.iter().map(|(name, x)| {
        let y = &b[name];
        let numbers = (0..x.elements() as usize).map(|i| (x.get_f64(i), y.get_f64(i)));
        let (mut apart, mut norm) = (0.0, 0.0);
        for (x, y) in numbers {
            let (x, y) = (x.unwrap(), y.unwrap());
            apart += (x - y) * (x - y);
            norm += x * x;
        }
        (apart / f64::max(norm, 1e-30)).sqrt()
    });
    all.fold(0.0, f64::max)
}

#[test]
fn ranks_are_one_process_with_the_whole_batch_whatever_labels_count() {
    let dir = workplace();
    let dir = dir.path();
    let common = [
        "--steps",
        "8",
        "--optimizer",
        "sgd:momentum=0.9",
        "--clip",
        "0.7",
    ];
    let with = |more: &[&'static str]| [&common[..], more].concat();
    let data = "uneven.safetensors";
    let one = run(
        dir,
        "llama32.onnx",
        data,
        "one",
        &with(&["--dim", "batch=4"]),
    );
    for (out, more) in [
        ("ddp", &["--dim", "batch=2", "--ranks", "2"][..]),
        (
            "slices",
            &["--dim", "batch=2", "--ranks", "2", "--shard", "grads"],
        ),
        (
            "four",
            &["--dim", "batch=1", "--ranks", "4", "--shard", "optimizer"],
        ),
    ] {
        let report = run(dir, "llama32.onnx", data, out, &with(more));
        assert_eq!(report["tokens"], one["tokens"], "{out}");
        for (x, y) in losses(dir, "one").iter().zip(losses(dir, out)) {
            assert!((x - y).abs() <= 1e-5 * x.abs(), "{out}: loss {y}, not {x}");
        }
        let apart = distance(dir, "one", out);
        assert!(apart <= 1e-5, "{out}: weights {apart:e} apart");
    }
}

#[test]
fn a_run_goes_on_with_the_same_bits_and_on_another_number_of_ranks() {
    let dir = workplace();
    let dir = dir.path();
    let data = "even.safetensors";
    let two = ["--dim", "batch=2", "--ranks", "2", "--shard", "grads"];
    let of =
        |steps: &'static str, more: &[&'static str]| [&["--steps", steps], &two[..], more].concat();
    let bf16 = "llama32_bf16.onnx";
    run(dir, bf16, data, "whole", &of("6", &[]));
    run(dir, bf16, data, "halves", &of("3", &[]));
    let saved = command::files(&dir.join("halves/checkpoints/step-3"));
    let expected = [
        "manifest.json",
        "parameters.safetensors",
        "states-1.safetensors",
        "states.safetensors",
    ];
    assert_eq!(saved, expected);
    // The same step of one process, and of four ranks, begins from both files.
    goes_on_elsewhere(
        dir,
        (bf16, data),
        &[
            ("alone", &["--dim", "batch=4", "--steps", "4"][..]),
            (
                "four",
                &[
                    "--dim", "batch=1", "--steps", "4", "--ranks", "4", "--shard", "params",
                ],
            ),
        ],
    );
    run(dir, bf16, data, "halves", &of("6", &["--resume"]));
    assert!(weights(dir, "whole") == weights(dir, "halves"));
    assert_eq!(losses(dir, "whole"), losses(dir, "halves"));
}

/// Checks that other ranks go on from the third step of the run `halves`, to about the loss of the run `whole`.
fn goes_on_elsewhere(dir: &Path, (model, data): (&str, &str), others: &[(&str, &[&str])]) {
    for (out, more) in others {
        let copied = call_copy(&dir.join("halves"), &dir.join(out));
        assert!(copied, "the folder is copied");
        let report = run(dir, model, data, out, &[more, &["--resume"][..]].concat());
        assert_eq!(report["resumed_from"], 3, "{out}");
        let (before, after) = (losses(dir, "whole")[3], losses(dir, out)[3]);
        assert!(
            (before - after).abs() <= 1e-2 * before,
            "{out}: {after}, not {before}"
        );
    }
}

fn call_copy(from: &Path, to: &Path) -> bool {
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .arg(from)
        .arg(to)
        .status();
    copied.is_ok_and(|status| status.success())
}

/// Starts one rank of two by itself, as `torchrun` does.
fn rank(dir: &Path, n: usize, args: &[&str], variables: &[(&str, &str)]) -> Child {
    let mut command = command(dir);
    command
        .args(args)
        .env("RANK", n.to_string())
        .env("WORLD_SIZE", "2")
        .env("TORCH_CPP_LOG_LEVEL", "ERROR")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn ended(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

/// A port that is free.
fn port() -> String {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().port().to_string()
}

#[test]
fn ranks_meet_over_tcp_and_a_rank_with_another_plan_ends_both_before_a_step() {
    let dir = workplace();
    let dir = dir.path();
    let args = |more: &[&'static str]| args("llama32.onnx", "even.safetensors", "out", more);
    let port = port();
    let meet = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &*port)];
    let common = ["--dim", "batch=2", "--steps", "2"];
    let ranks = [0, 1].map(|n| rank(dir, n, &args(&common), &meet));
    for done in ranks.map(ended) {
        assert_eq!(code(&done), 0, "{}", stderr(&done));
    }
    std::fs::remove_dir_all(dir.join("out")).unwrap();
    for (changed, what) in [
        (&["--seed", "7"][..], "data"),
        (&["--lr", "2e-2"], "settings"),
        (&["--layers", "0"], "plan"),
        (&["--freeze", "*norm*"], "model"),
    ] {
        let mut other = args(&common);
        if changed[0] == "--lr" {
            let at = other.iter().position(|word| *word == "--lr").unwrap();
            other.drain(at..at + 2);
        }
        other.extend(changed);
        let store = dir.join(format!("store-{what}"));
        let store = [("CKPT_OPT_STORE", store.to_str().unwrap())];
        let first = rank(dir, 0, &args(&common), &store);
        let second = rank(dir, 1, &other, &store);
        for done in [first, second].map(ended) {
            assert_eq!(code(&done), 5, "{what}: {}", stderr(&done));
            assert!(
                stderr(&done).contains(&format!("the same {what}")),
                "{}",
                stderr(&done)
            );
        }
        let steps = std::fs::read(dir.join("out").join(metrics::FILE));
        assert!(steps.is_err(), "{what}: no step may have run");
    }
}

/// Waits until the run has written so many steps.
fn reaches(run: &Path, steps: usize) {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        let text = std::fs::read(run.join(metrics::FILE)).unwrap_or_default();
        if text.iter().filter(|b| **b == b'\n').count() >= steps {
            return;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    panic!("{} has no {steps} steps", run.display());
}

fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    let done = std::process::Command::new("kill")
        .args(["-s", name, &id])
        .status();
    assert!(done.unwrap().success());
}

/// Sends a signal to one of two ranks. Returns how the other one ended, and how long that took.
fn left_alone(ranks: [Child; 2], victim: usize, name: &str) -> (Output, Duration) {
    let [first, second] = ranks;
    let (mut lost, other) = match victim {
        0 => (first, second),
        _ => (second, first),
    };
    signal(&lost, name);
    let since = Instant::now();
    let left = ended(other);
    let took = since.elapsed();
    // One that was stopped stays so.
    let _ = lost.kill();
    let _ = lost.wait();
    (left, took)
}

#[test]
fn a_rank_that_is_killed_or_stopped_ends_the_others_in_time() {
    let dir = workplace();
    let dir = dir.path();
    for (i, (name, victim)) in [("KILL", 1), ("KILL", 0), ("STOP", 1), ("KILL", 1)]
        .into_iter()
        .enumerate()
    {
        let out = format!("out-{i}");
        let more = [
            "--dim",
            "batch=2",
            "--steps",
            "100000",
            "--rank-timeout",
            "2",
        ];
        let all = args("llama32.onnx", "even.safetensors", &out, &more);
        let store = dir.join(format!("store-{i}"));
        let store = [("CKPT_OPT_STORE", store.to_str().unwrap())];
        let ranks = [0, 1].map(|n| rank(dir, n, &all, &store));
        reaches(&dir.join(&out), 2 + 3 * i);
        let (left, took) = left_alone(ranks, victim, name);
        let says = stderr(&left);
        assert_eq!(code(&left), 5, "{name} {victim}: {says}");
        assert!(took < Duration::from_secs(3 + 1), "{name}: {took:?}");
        assert!(
            says.contains("error[rank]") && says.contains("step "),
            "{says}"
        );
        assert!(says.contains("has lost another rank"), "{says}");
    }
}

/// As above, at as many random moments as `CKPT_OPT_KILLS` says (100), once the first step is done.
#[test]
#[ignore = "takes minutes"]
fn ranks_are_killed_and_stopped_at_random_moments() {
    let dir = workplace();
    let dir = dir.path();
    let count = std::env::var("CKPT_OPT_KILLS").map_or(100, |n| n.parse().unwrap());
    let limit = 2;
    let more = [
        "--dim",
        "batch=2",
        "--steps",
        "100000",
        "--bucket",
        "20KB",
        "--rank-timeout",
        "2",
    ];
    let mut random = 1u64;
    let mut below = |n: u64| {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (random >> 33) % n
    };
    for i in 0..count {
        let out = format!("out-{i}");
        let shard = ["none", "optimizer", "grads", "params"][below(4) as usize];
        let more = [&more[..], &["--shard", shard]].concat();
        let all = args("llama32.onnx", "even.safetensors", &out, &more);
        let store = dir.join(format!("store-{i}"));
        let store = [("CKPT_OPT_STORE", store.to_str().unwrap())];
        let ranks = [0, 1].map(|n| rank(dir, n, &all, &store));
        let (victim, name) = (below(2) as usize, ["KILL", "STOP"][below(2) as usize]);
        reaches(&dir.join(&out), 1 + below(3) as usize);
        std::thread::sleep(Duration::from_micros(below(300_000)));
        let (left, took) = left_alone(ranks, victim, name);
        let what = format!("{i}: {name} {victim}, --shard {shard}");
        assert_eq!(code(&left), 5, "{what}: {}", stderr(&left));
        let most = Duration::from_secs(limit + 1);
        assert!(took < most, "{what}: {took:?}");
        std::fs::remove_dir_all(dir.join(&out)).unwrap_or_default();
    }
}

/// Returns the processes that one has started.
fn children(of: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parent = format!("PPid:\t{of}\n");
    ids.filter(|id: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{id}/status"));
        status.is_ok_and(|text| text.contains(&parent))
    })
    .collect()
}

/// `torchrun` starts all ranks again after one was killed, and they go on from the last checkpoint.
#[test]
#[ignore = "needs CKPT_OPT_PYTHON, a Python that has PyTorch"]
fn torchrun_starts_ranks_again_and_they_end_with_the_same_bits() {
    let python = std::env::var("CKPT_OPT_PYTHON").unwrap();
    let dir = workplace();
    let dir = dir.path();
    for shard in ["none", "params"] {
        let whole = format!("whole-{shard}");
        let common = ["--dim", "batch=2", "--steps", "60", "--shard", shard];
        let data = "even.safetensors";
        let all = [&common[..], &["--ranks", "2"]].concat();
        run(dir, "llama32.onnx", data, &whole, &all);
        let killed = format!("killed-{shard}");
        let more = [&common[..], &["--save-every", "4", "--resume"]].concat();
        let mut start = std::process::Command::new(&python);
        start
            .current_dir(dir)
            .args(["-m", "torch.distributed.run", "--no-python", "--standalone"])
            .args(["--nproc-per-node", "2"])
            .args(["--max-restarts", "1", "--monitor-interval", "0.1"])
            .arg(command(dir).get_program())
            .args(args("llama32.onnx", data, &killed, &more))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut start = start.spawn().unwrap();
        reaches(&dir.join(&killed), 10);
        let victim = *children(start.id()).last().unwrap();
        let done = std::process::Command::new("kill")
            .args(["-s", "KILL", &victim.to_string()])
            .status();
        assert!(done.unwrap().success());
        assert!(start.wait().unwrap().success(), "{shard}");
        assert!(weights(dir, &whole) == weights(dir, &killed), "{shard}");
        assert_eq!(losses(dir, &whole), losses(dir, &killed), "{shard}");
    }
}

#[test]
fn the_process_that_starts_ranks_ends_all_of_them_and_says_what_the_first_said() {
    let dir = workplace();
    let dir = dir.path();
    let all = args(
        "llama32.onnx",
        "none.bin",
        "out",
        &["--ranks", "2", "--steps", "1"],
    );
    let done = call(dir, &all);
    assert_eq!(code(&done), 2, "{}", stderr(&done));
    let more = ["--dim", "batch=2", "--ranks", "2", "--steps", "100000"];
    let all = args("llama32.onnx", "even.safetensors", "stopped", &more);
    let mut starter = command(dir);
    starter
        .args(&all)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let starter = starter.spawn().unwrap();
    reaches(&dir.join("stopped"), 3);
    signal(&starter, "TERM");
    let done = ended(starter);
    assert_eq!(code(&done), 130, "{}", stderr(&done));
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["is_interrupted"], true);
    let last = report["steps"].as_u64().unwrap();
    assert!(
        dir.join(format!("stopped/checkpoints/step-{last}/manifest.json"))
            .exists()
    );
}

#[test]
fn what_ranks_cannot_share_is_refused_by_name() {
    let dir = workplace();
    let dir = dir.path();
    let model = |nodes: &str| {
        format!(
            "graph @g imported (%x: f32[batch, 4], %t: f32[batch, 4]) -> (%loss) {{
  init %w : f32[4, 4] = splat 0.5 origin \"w\" parameter
  init %first : i64[1] = [0]
{nodes}  %loss = ReduceMean %d {{keepdims = 0}}
}}
"
        )
    };
    let statistics = "  %h = MatMul %x, %w
  %mean = ReduceMean %h, %first
  %c = Sub %h, %mean
  %e = Sub %c, %t
  %d = Mul %e, %e
";
    let sums = "  %h = MatMul %x, %w
  %e = Sub %h, %t
  %s = ReduceSum %e, %first
  %d = Mul %s, %s
";
    let across = "  %h = MatMul %x, %w
  %u = Transpose %h
  %d = MatMul %h, %u
";
    let apart = "  %h = MatMul %x, %w
  %e = Sub %h, %t
  %d = Mul %e, %e
";
    let count = "  %h = MatMul %x, %w
  %all = Shape %h
  %n = Gather %all, %first
  %m = Cast %n {to = f32}
  %d = Mul %h, %m
";
    let picked = "  init %places : i64[2, 1] = [1, 0]
  %h = MatMul %x, %w
  %d = GatherND %h, %places
";
    let backwards = "  init %last : i64[1] = [-1]
  init %before : i64[1] = [-9223372036854775807]
  %h = MatMul %x, %w
  %r = Slice %h, %last, %before, %first, %last
  %d = Mul %r, %h
";
    for (name, nodes, says) in [
        ("statistics", statistics, Some("(ReduceMean)")),
        ("count", count, Some("data of the number of examples")),
        ("picked", picked, Some("mixes the examples")),
        ("backwards", backwards, Some("mixes the examples")),
        ("sums", sums, Some("(ReduceSum)")),
        ("across", across, Some("examples have no axis of their own")),
        ("apart", apart, None),
    ] {
        let file = format!("{name}.ckir");
        std::fs::write(dir.join(&file), model(nodes)).unwrap();
        let plan = |more: &[&str]| {
            let all = [
                &["plan", &file, "--loss", "output:loss", "--policy", "none"],
                more,
            ]
            .concat();
            call(dir, &all)
        };
        assert_eq!(code(&plan(&[])), 0, "{}", stderr(&plan(&[])));
        let done = plan(&["--mesh", "dp=2"]);
        let found = stderr(&done);
        match says {
            None => assert_eq!(code(&done), 0, "{found}"),
            Some(says) => {
                assert_eq!(code(&done), 2, "{name}");
                assert!(
                    found.contains("error[mesh]") && found.contains(says),
                    "{found}"
                );
            }
        }
    }
    for (more, says) in [
        (&["--mesh", "dp=2,pp=2"][..], "dp=N"),
        (&["--mesh", "tp=2,tp=2"], "dp=N"),
        (&["--mesh", "tp=3"], "no multiple of 3"),
        (
            &["--mesh", "tp=2", "--shard", "grads"],
            "none to share its slices with",
        ),
        (&["--shard", "grads"], "needs ranks that share the step"),
        (
            &["--mesh", "dp=2", "--sequence-parallel"],
            "needs ranks that share layers",
        ),
        (
            &["--mesh", "tp=2", "--optimizer", "muon"],
            "no rank can have a part",
        ),
        (
            &["--mesh", "tp=2", "--optimizer", "adamw8bit"],
            "has other blocks",
        ),
        (&["--mesh", "dp=2", "--shard", "weights"], "can be sharded"),
        (&["--mesh", "dp=2", "--loss", "vjp"], "name a loss"),
        (
            &["--mesh", "dp=2", "--shard", "grads", "--optimizer", "muon"],
            "no rank can keep a slice",
        ),
    ] {
        let mut all = vec!["plan", "gpt2.onnx", "--policy", "none"];
        all.extend(more);
        if !more.contains(&"--loss") {
            all.extend(["--loss", "causal-lm"]);
        }
        let done = call(dir, &all);
        assert_eq!(code(&done), 2, "{more:?}");
        assert!(stderr(&done).contains(says), "{more:?}: {}", stderr(&done));
    }
}

#[test]
fn a_written_step_of_ranks_is_trained_by_as_many_and_run_by_no_other() {
    let dir = workplace();
    let dir = dir.path();
    let write = |out: &str, more: &[&str]| {
        let base = [
            "llama32.onnx",
            "-o",
            out,
            "--loss",
            "causal-lm",
            "--policy",
            "full",
            "--dim",
            "batch=2",
            "--dim",
            "seq=12",
            "--optimizer",
            "adamw:weight_decay=0",
            "--fuse-optimizer",
            "--drop-output",
            "*",
        ];
        let done = call(dir, &[&base[..], more].concat());
        assert_eq!(code(&done), 0, "{}", stderr(&done));
        std::fs::read(dir.join(out)).unwrap()
    };
    // One rank is one process.
    assert!(write("plain.onnx", &[]) == write("one.onnx", &["--mesh", "dp=1"]));
    write("step.onnx", &["--mesh", "dp=2", "--shard", "grads"]);
    let data = "even.safetensors";
    let written = |ranks: &[&'static str]| {
        let all = [
            "train",
            "step.onnx",
            "--data",
            data,
            "--lr",
            "1e-2",
            "--steps",
            "4",
            "--threads",
            "1",
        ];
        [&all[..], ranks].concat()
    };
    let done = call(dir, &written(&["--out", "written", "--ranks", "2", "-q"]));
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    let more = [
        "--dim",
        "batch=2",
        "--ranks",
        "2",
        "--steps",
        "4",
        "--optimizer",
        "adamw:weight_decay=0",
    ];
    run(dir, "llama32.onnx", data, "model", &more);
    assert!(weights(dir, "written") == weights(dir, "model"));
    // Ranks that share the layers and the vocabulary.
    write("parts.onnx", &["--mesh", "tp=2"]);
    let mut all = written(&["--out", "written-parts", "--ranks", "2", "-q"]);
    all[1] = "parts.onnx";
    let done = call(dir, &all);
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    run(
        dir,
        "llama32.onnx",
        data,
        "parts",
        &[&more[..], &["--mesh", "tp=2"]].concat(),
    );
    assert!(weights(dir, "written-parts") == weights(dir, "parts"));
    for (more, says) in [
        (&["--out", "alone"][..], "this is one process"),
        (
            &["--out", "three", "--ranks", "3"],
            "another number of ranks",
        ),
    ] {
        let done = call(dir, &written(more));
        assert_eq!(code(&done), 2, "{}", stderr(&done));
        assert!(stderr(&done).contains(says), "{}", stderr(&done));
    }
    let done = call(
        dir,
        &[
            "train",
            "plain.onnx",
            "--data",
            data,
            "--out",
            "x",
            "--ranks",
            "2",
        ],
    );
    assert_eq!(code(&done), 2);
    assert!(
        stderr(&done).contains("each would train by itself"),
        "{}",
        stderr(&done)
    );
}

#[test]
fn a_training_graph_of_ranks_is_written_for_onnx_runtime() {
    let dir = workplace();
    let made = |more: &[&str]| {
        let args = [
            "gpt2.onnx",
            "-o",
            "ort.onnx",
            "--loss",
            "causal-lm",
            "--policy",
            "full",
            "--mesh",
            "dp=2",
            "--optimizer",
            "sgd",
            "--collectives",
            "onnxruntime",
        ];
        call(dir.path(), &[&args[..], more].concat())
    };
    let written = made(&[]);
    assert_eq!(code(&written), 0, "{}", stderr(&written));
    assert!(
        stderr(&written).contains("by rounding"),
        "{}",
        stderr(&written)
    );
    let bytes = std::fs::read(dir.path().join("ort.onnx")).unwrap();
    let model = ModelProto::decode(bytes.as_slice()).unwrap();
    let nodes = model.graph.unwrap().node;
    let sums = nodes.iter().filter(|n| n.op_type() == "NcclAllReduce");
    let gradients = nodes
        .iter()
        .filter(|n| n.op_type().starts_with("Sgd"))
        .count();
    // Of each gradient, and of the number of labels and the loss.
    assert!(gradients > 20);
    assert_eq!(sums.count(), gradients + 2);
    assert!(nodes.iter().all(|n| n.op_type() != "Wait"));
    let refused = made(&["--shard", "grads"]);
    assert_eq!(code(&refused), 2);
    assert!(
        stderr(&refused)
            .contains("error[collectives]: ONNX Runtime has no op for this node: it depends on"),
        "{}",
        stderr(&refused)
    );
}

/// Where there are two CUDA devices, `tools/cuda-checks` trains on them.
#[test]
fn nccl_is_found_in_the_cuda_library_or_refused() {
    if ckpt_torch::cuda::load().is_ok() {
        // Its names are found, and a group is begun, also where there is no device.
        assert!(ckpt_torch::ranks::nccl_version().unwrap() > 20_000);
        let (dir, limit) = (tempfile::tempdir().unwrap(), Duration::from_secs(9));
        let path = dir.path().join("store").display().to_string();
        let store = ckpt_torch::ranks::Store::file(&path, 1, limit, "").unwrap();
        let made = ckpt_torch::ranks::join(&store, "n", (0, 1), limit, Some("127.0.0.1"), true);
        assert!(made.is_ok() || made.unwrap_err().message.contains("no GPUs found"));
        return;
    }
    let missing = ckpt_torch::ranks::nccl_version().unwrap_err().message;
    assert!(missing.contains("CUDA library is not loaded"), "{missing}");
    let dir = workplace();
    let more = [
        "--dim", "batch=2", "--steps", "1", "--ranks", "2", "--device", "cuda",
    ];
    let refused = call(
        dir.path(),
        &args("gpt2.onnx", "even.safetensors", "out", &more),
    );
    assert_eq!(code(&refused), 5);
    assert!(
        stderr(&refused).contains("libtorch_cuda.so"),
        "{}",
        stderr(&refused)
    );
}
