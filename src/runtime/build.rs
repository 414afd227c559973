//! Build script of the package: with feature `torch`, tells the binaries and tests where libtorch lies.
//!
//! Link arguments do not travel between packages, so the path comes from `ckpt-torch` as metadata and is set here.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=src/runtime/build.rs");
    if env::var_os("CARGO_FEATURE_TORCH").is_some() {
        let rpath =
            env::var("DEP_CKPT_TORCH_RPATH").expect("ckpt-torch hands on the folder of libtorch");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{rpath}");
    }
}
