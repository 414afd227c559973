//! Writes `src/onnx/proto/generated.rs` from the vendored `onnx.proto`: `cargo run -p ckpt-protogen`.
//!
//! The generated file is committed, so that building the compiler needs neither `protoc` nor this tool. The test below
//! fails when the committed file is not what the proto file gives.

use std::error::Error;
use std::path::{Path, PathBuf};

fn onnx_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src/onnx")
}

/// The Rust types of `onnx.proto`, as source text.
///
/// `raw_data` becomes `bytes::Bytes`: decoding a mapped file then shares its pages instead of copying weights.
fn generate() -> Result<String, Box<dyn Error>> {
    let proto_dir = onnx_dir();
    let descriptors = protox::compile([proto_dir.join("onnx.proto")], [&proto_dir])?;
    let out = std::env::temp_dir().join(format!("ckpt-protogen-{}", std::process::id()));
    std::fs::create_dir_all(&out)?;
    let mut config = prost_build::Config::new();
    config.bytes([".onnx.TensorProto.raw_data"]).out_dir(&out);
    config.disable_comments(["."]);
    let compiled = config.compile_fds(descriptors);
    let text = compiled.and_then(|()| std::fs::read_to_string(out.join("onnx.rs")));
    std::fs::remove_dir_all(&out)?;
    Ok(text?)
}

fn main() -> Result<(), Box<dyn Error>> {
    std::fs::write(onnx_dir().join("proto/generated.rs"), generate()?)?;
    Ok(())
}

#[test]
fn generated_file_is_current() {
    let committed = std::fs::read_to_string(onnx_dir().join("proto/generated.rs")).unwrap();
    let fresh = generate().unwrap();
    assert!(
        committed == fresh,
        "generated.rs is out of date; run `cargo run -p ckpt-protogen`"
    );
}
