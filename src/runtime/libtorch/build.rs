//! Finds the libtorch in `LIBTORCH` (`.cargo/config.toml` sets it) and checks its version.

use std::path::PathBuf;
use std::{env, fs, process};

/// The libtorch that tch 0.24 binds; its C++ interface changes between releases.
const VERSION: &str = "2.11.0";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_LIBTORCH").is_none() {
        return;
    }
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    match libtorch() {
        Ok(root) => {
            // A file that is absent would make cargo run this every time.
            for file in ["build-version", "version.py"] {
                let file = root.join(file);
                if file.exists() {
                    println!("cargo:rerun-if-changed={}", file.display());
                }
            }
            println!("cargo:root={}", root.display());
        }
        Err(message) => {
            eprintln!(
                "\nerror: {message}\nRun `tools/get-libtorch` in the root of the checkout, then build again.\n"
            );
            process::exit(1);
        }
    }
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
