//! Files of results that wait outside, from outside the process: there while it runs, gone however it ends; what is
//! moved, how much of it, and what never is.

use crate::support::command;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_passes::analysis::{Binding, MemoryProfile, Sizes};
use ckpt_passes::ir::{Graph, ValueId};
use ckpt_passes::ops::transfer::{FETCH, OFFLOAD, RELEASE};
use command::{call, code, json, stderr, workplace};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A training graph that moves what it may, as a file.
fn made(dir: &Path, more: &[&str]) {
    let wish = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--loss",
        "causal-lm",
        "--policy",
        "none",
    ];
    let sizes = ["--dim", "batch=2", "--dim", "seq=24", "--offload", "disk"];
    let args: Vec<&str> = wish.iter().chain(&sizes).chain(more).copied().collect();
    let done = call(dir, &args);
    assert_eq!(code(&done), 0, "{}", stderr(&done));
}

fn graph(path: &Path) -> Graph {
    load(path, &Given::default()).unwrap().graph
}

fn measured(path: &Path) -> (Graph, MemoryProfile) {
    let graph = graph(path);
    let dims = [("batch".to_string(), 2), ("seq".to_string(), 24)];
    let sizes = Sizes::new(&graph, &Binding::new(&graph, &dims).unwrap()).unwrap();
    let memory = MemoryProfile::new(&graph, &sizes).unwrap();
    (graph, memory)
}

/// A run that ends only if somebody ends it.
fn endless(dir: &Path, folder: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_ckpt-opt"))
        .args([
            "run", "t.onnx", "--seed", "1", "--dim", "batch=2", "--dim", "seq=24",
        ])
        .args(["--steps", "1000000", "--offload-dir"])
        .arg(folder)
        .current_dir(dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits until the process has a file in the folder mapped.
fn until_something_waits(child: &mut Child, folder: &Path) {
    let maps = format!("/proc/{}/maps", child.id());
    let folder = folder.to_str().unwrap();
    let begun = Instant::now();
    loop {
        let text = std::fs::read_to_string(&maps).unwrap_or_default();
        if text.contains(folder) {
            return;
        }
        assert!(child.try_wait().unwrap().is_none(), "the run has ended");
        assert!(begun.elapsed() < Duration::from_secs(120), "nothing waits");
    }
}

fn count(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// The number of the signal of Ctrl-C (POSIX).
const SIGINT: u32 = 2;

/// Whether this process ignores a signal, and with it every process that it starts.
fn is_ignored(signal: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok());
    mask.is_some_and(|m| m >> (signal - 1) & 1 == 1)
}

#[test]
fn files_are_gone_after_success_error_and_any_signal() {
    let dir = workplace();
    made(dir.path(), &[]);
    let folder = dir.path().join("outside");
    std::fs::create_dir(&folder).unwrap();
    let run = [
        "run", "t.onnx", "--seed", "1", "--dim", "batch=2", "--dim", "seq=24",
    ];
    let to = ["--offload-dir", "outside", "--format", "json"];
    let report = json(&call(dir.path(), &[&run[..], &to].concat()));
    assert!(report["outside_peak_bytes"].as_u64().unwrap() > 0);
    assert_eq!(count(&folder), 0);
    // Interrupt, terminate, kill; who is started in the background may be deaf to the first, and so is what it starts.
    let deaf = is_ignored(SIGINT);
    let signals = ["-INT", "-TERM", "-KILL"];
    for signal in signals.iter().filter(|s| !(deaf && **s == "-INT")) {
        let mut child = endless(dir.path(), &folder);
        until_something_waits(&mut child, &folder);
        assert_eq!(count(&folder), 0, "a file has a name");
        let id = child.id().to_string();
        assert!(
            Command::new("kill")
                .args([*signal, &id])
                .status()
                .unwrap()
                .success()
        );
        assert!(!child.wait().unwrap().success());
        assert_eq!(count(&folder), 0, "{signal}");
    }
    // A limit on the size of files that the largest does not keep to: an error of the environment in the middle of the run.
    let (graph, memory) = measured(&dir.path().join("t.onnx"));
    let moved = graph.nodes().filter(|(_, n)| n.op == &OFFLOAD);
    let largest = moved
        .map(|(_, n)| memory.storage(n.outs[0]).bytes)
        .max()
        .unwrap();
    let limit = format!(
        "trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"",
        (largest - 1) / 512
    );
    let limited = Command::new("sh")
        .args(["-c", &limit])
        .arg(env!("CARGO_BIN_EXE_ckpt-opt"))
        .args(run)
        .args(to)
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert_eq!(limited.status.code(), Some(5), "{}", stderr(&limited));
    assert_eq!(count(&folder), 0);
}

#[test]
fn parameters_views_and_what_feeds_the_head_never_move_and_each_storage_once() {
    for freeze in [&[][..], &["--freeze", "*.weight"]] {
        let dir = workplace();
        made(dir.path(), freeze);
        let (graph, memory) = measured(&dir.path().join("t.onnx"));
        let mut moved = BTreeSet::new();
        for (_, node) in graph.nodes().filter(|(_, n)| n.op == &OFFLOAD) {
            let value = node.ins[0].unwrap();
            let storage = memory.storage(value);
            // Results of one node move together.
            let maker = graph.node(graph.def_node(value).unwrap());
            let bytes: u64 = maker.outs.iter().map(|v| memory.storage(*v).bytes).sum();
            assert!(!storage.is_static && bytes >= 1024);
            assert_eq!(storage.first, value, "a view is moved");
            assert!(moved.insert(value), "a storage is moved twice");
        }
        assert!(!moved.is_empty());
        let count = |op| graph.nodes().filter(|(_, n)| n.op == op).count();
        assert_eq!(count(&RELEASE), moved.len());
        assert!(count(&FETCH) >= moved.len());
        // What the product reads that makes the scores stays.
        let named = |v: &&ValueId| graph.value(**v).name == "logits";
        let scores = graph.outputs().iter().find(named).expect("scores");
        let head = graph.node(graph.def_node(*scores).unwrap());
        assert_eq!(head.op.name, "MatMul");
        for value in head.ins.iter().flatten() {
            let read = memory.storage(*value).first;
            assert!(!moved.contains(&read));
        }
    }
}

#[test]
fn results_of_at_most_so_many_nodes_are_held_for_their_transfer() {
    let dir = workplace();
    for n in [1usize, 2, 5] {
        let most = n.to_string();
        made(dir.path(), &["--max-forward-stash", &most]);
        let graph = graph(&dir.path().join("t.onnx"));
        // Nodes whose results have begun to leave and are not released.
        let (mut held, mut found) = (BTreeSet::new(), 0);
        for id in graph.order() {
            let node = graph.node(*id);
            let maker = || graph.def_node(node.ins[0].unwrap()).unwrap();
            match node.op {
                op if op == &OFFLOAD => held.insert(maker()),
                op if op == &RELEASE => held.remove(&maker()),
                _ => continue,
            };
            found = found.max(held.len());
        }
        assert!(0 < found && found <= n, "{found} of {n}");
    }
    let none = [
        "model.onnx",
        "-o",
        "u.onnx",
        "--offload",
        "cpu",
        "--max-forward-stash",
        "0",
    ];
    assert_eq!(code(&call(dir.path(), &none)), 2);
}

#[test]
fn the_host_never_holds_more_than_it_may() {
    let dir = workplace();
    made(dir.path(), &[]);
    let run = [
        "run", "t.onnx", "--seed", "1", "--dim", "batch=2", "--dim", "seq=24", "--format", "json",
    ];
    let measured = |dir: &Path| {
        json(&call(dir, &run))["outside_peak_bytes"]
            .as_u64()
            .unwrap()
    };
    let all = measured(dir.path());
    let exactly = all.to_string();
    made(dir.path(), &["--host-budget", &exactly]);
    assert_eq!(measured(dir.path()), all);
    let less = (all - 1).to_string();
    let wish = [
        "model.onnx",
        "-o",
        "u.onnx",
        "--loss",
        "causal-lm",
        "--policy",
        "none",
    ];
    let sizes = [
        "--dim",
        "batch=2",
        "--dim",
        "seq=24",
        "--offload",
        "disk",
        "--host-budget",
        &less,
    ];
    let refused = call(dir.path(), &[&wish[..], &sizes].concat());
    assert_eq!(code(&refused), 2, "{}", stderr(&refused));
    assert!(!dir.path().join("u.onnx").exists());
}
