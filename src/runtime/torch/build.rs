//! Compiles `cpp/` against the libtorch in `LIBTORCH` and hands its library folder on as `DEP_CKPT_TORCH_RPATH`.
//!
//! The folder comes from the environment (`.cargo/config.toml` sets it), not from torch-sys, for two reasons: this
//! script then need not wait for the minutes that torch-sys compiles, and it is the one that says what to do when
//! libtorch is missing.

use std::path::{Path, PathBuf};
use std::{env, fs, process};

/// The libtorch that tch 0.24 binds; its C++ interface changes between releases.
const VERSION: &str = "2.11.0";

const SOURCES: [&str; 5] = [
    "alloc.cpp",
    "bytes.cpp",
    "dispatch.cpp",
    "rng.cpp",
    "status.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_LIBTORCH").is_none() {
        return;
    }
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    println!("cargo:rerun-if-changed=cpp");
    let libtorch = libtorch().unwrap_or_else(|message| {
        eprintln!("error: {message}\nRun `tools/get-libtorch` in the root of the checkout, then build again.");
        process::exit(1)
    });
    println!(
        "cargo:rerun-if-changed={}",
        libtorch.join("build-version").display()
    );

    let include = libtorch.join("include");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .pic(true)
        // The warnings of libtorch's own headers are not ours to mend: they are included as system headers.
        .flag("-isystem")
        .flag(&include)
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include"))
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .extra_warnings(true);
    for source in SOURCES {
        build.file(Path::new("cpp").join(source));
    }
    build.compile("ckpt_torch");

    let lib = libtorch.join("lib");
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    // For this package's own tests; the packages above set it from the metadata, since link arguments do not travel.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:rpath={}", lib.display());
}

/// The real path of a libtorch of the right version, or what is wrong.
fn libtorch() -> Result<PathBuf, String> {
    let given = env::var_os("LIBTORCH")
        .map(PathBuf::from)
        .ok_or("the runtime needs libtorch, and LIBTORCH is not set (was cargo started outside the checkout?)")?;
    let missing = || {
        format!(
            "the runtime needs libtorch {VERSION}, and there is none in {}",
            given.display()
        )
    };
    let found = fs::canonicalize(&given).map_err(|_| missing())?;
    if !found.join("lib/libtorch_cpu.so").exists() || !found.join("include/ATen/ATen.h").exists() {
        return Err(missing());
    }
    // The libtorch archives have `build-version`; a Python package has `version.py`, with the version quoted.
    let version = fs::read_to_string(found.join("build-version"))
        .or_else(|_| fs::read_to_string(found.join("version.py")))
        .map_err(|_| format!("cannot tell which libtorch is in {}", found.display()))?;
    let is_version = |text: &str| text.split(['+', '\'']).any(|part| part.trim() == VERSION);
    if !version.lines().any(is_version) {
        return Err(format!(
            "the libtorch in {} is not {VERSION}",
            found.display()
        ));
    }
    Ok(found)
}
