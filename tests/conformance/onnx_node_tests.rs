//! A fixed part of ONNX's own node conformance cases, through the binary; all of them are for `python tools conformance`.

#[test]
fn every_eleventh_case_of_onnx_passes_or_is_listed() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join(".venv/bin/python");
    assert!(
        python.exists(),
        "no Python environment: run `tools/test --setup`"
    );
    let output = std::process::Command::new(python)
        .arg(root.join("tools"))
        .arg("conformance")
        .args([
            "--ckpt-opt",
            env!("CARGO_BIN_EXE_ckpt-opt"),
            "--every",
            "11",
        ])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{said}");
}
