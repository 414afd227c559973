//! What tests of the command line share: calling the binary, a folder to work in.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub fn fixture(model: &str, file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(model)
        .join(file)
}

/// The commands that need the runtime.
pub const EXECUTING: [&str; 7] = [
    "train",
    "run",
    "verify",
    "calibrate",
    "profile",
    "overhead",
    "doctor",
];

/// The binary for a command line of these words: one without the runtime, which `CKPT_OPT_PLANNER` may name, where no graph
/// is executed. It starts in milliseconds, while libtorch takes a third of a second to load.
pub fn binary<'a>(words: impl IntoIterator<Item = &'a str>) -> PathBuf {
    let planner = std::env::var_os("CKPT_OPT_PLANNER").map(PathBuf::from);
    planner
        .filter(|_| !words.into_iter().any(|word| EXECUTING.contains(&word)))
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_ckpt-opt").into())
}

/// The binary with the features of this build, started in `folder`.
pub fn command(folder: &Path) -> Command {
    started(env!("CARGO_BIN_EXE_ckpt-opt").as_ref(), folder)
}

/// The binary for these words, started in `folder` with them.
pub fn command_with(folder: &Path, args: &[&str]) -> Command {
    let mut command = started(&binary(args.iter().copied()), folder);
    command.args(args);
    command
}

fn started(binary: &Path, folder: &Path) -> Command {
    let mut command = Command::new(binary);
    command.current_dir(folder).env_remove("RUST_BACKTRACE");
    command
}

pub fn call(folder: &Path, args: &[&str]) -> Output {
    command_with(folder, args).output().unwrap()
}

pub fn code(output: &Output) -> i32 {
    output.status.code().expect("the process ended by itself")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn json(output: &Output) -> Value {
    assert_eq!(code(output), 0, "{}", stderr(output));
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON object")
}

/// A folder with `model.onnx`, the GPT-2 fixture, its `case.npz`, and the cost graph `graph.json.gz`.
pub fn workplace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("gpt2", "model.onnx"), dir.path().join("model.onnx")).unwrap();
    std::fs::copy(fixture("gpt2", "case.npz"), dir.path().join("case.npz")).unwrap();
    let graph = dir.path().join("graph.json.gz");
    std::fs::copy(fixture("graphs", "layers.json.gz"), graph).unwrap();
    dir
}

pub fn files(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

pub fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

pub fn has_keys(value: &Value, wanted: &[&str]) {
    for key in wanted {
        assert!(
            value.get(key).is_some(),
            "no `{key}` among {:?}",
            keys(value)
        );
    }
}
