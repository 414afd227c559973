//! The oracle check on the fixtures: ONNX checker, ONNX Runtime and PyTorch's gradients against what we write and run.
//!
//! The work is done by `python tools corpus`, which takes any folder of exports; this test runs it on the repository's own.
//! It needs the Python environment that `tools/test --setup` makes. `llama32_bf16` is not among the cases: its gradients
//! are further from float64 than PyTorch's, whose fused attention works in float32 where the exported graph rounds.

use std::path::Path;
use std::process::Command;

/// Runs a command of the tools; fails unless it succeeds, with the lines that say why.
fn agree(arguments: &[&str]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join(".venv/bin/python");
    assert!(
        python.exists(),
        "no Python environment: run `tools/test --setup`"
    );
    let output = Command::new(python)
        .arg(root.join("tools"))
        .args(arguments)
        .args(["--ckpt-opt", env!("CARGO_BIN_EXE_ckpt-opt")])
        .current_dir(root)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let failed: Vec<&str> = text.lines().filter(|l| l.contains("fail ")).collect();
    assert!(
        output.status.success(),
        "{}\n{}",
        failed.join("\n"),
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[test]
fn fixtures_agree_with_pytorch_and_onnx_runtime() {
    let cases = "bert,gpt2,gpt2_loss,llama32,llama32_mask,llama32_packed,gemma3n";
    let text = agree(&["corpus", "--case", cases]);
    assert!(text.contains(" 0 failed"), "{text}");
}

/// Files that hold values in floats of 8 bits, with the default optimizations of ONNX Runtime and without.
#[test]
fn training_in_8_bits_gives_pytorchs_gradients_in_onnx_runtime() {
    let text = agree(&["float8"]);
    assert_eq!(text.matches("pass ").count(), 16, "{text}");
}

/// Files whose weights are dequantised by a function of ours, with the default optimizations of ONNX Runtime.
#[test]
fn quantised_weights_train_in_onnx_runtime() {
    let text = agree(&["qlora"]);
    assert_eq!(text.matches("pass ").count(), 16, "{text}");
}
