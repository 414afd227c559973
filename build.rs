//! Build script of the package: generates the messages of ONNX, and with feature `torch` tells the linker where libtorch is.

use std::env;
use std::error::Error;

const PROTO: &str = "src/onnx/onnx.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={PROTO}");
    let mut config = prost_build::Config::new();
    // Decoding a mapped file shares its pages instead of copying weights.
    config.bytes([".onnx.TensorProto.raw_data"]);
    config.disable_comments(["."]);
    config.compile_fds(protox::compile([PROTO], ["src/onnx"])?)?;
    if env::var_os("CARGO_FEATURE_TORCH").is_some() {
        // Link arguments do not travel between packages, so `ckpt-torch` passes the folder as metadata.
        let rpath = env::var("DEP_CKPT_TORCH_RPATH")?;
        println!("cargo:rustc-link-arg=-Wl,-rpath,{rpath}");
    }
    Ok(())
}
