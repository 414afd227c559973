//! Compiles `cpp/` against libtorch and hands its library folder on as `DEP_CKPT_TORCH_RPATH`.
//!
//! The folder comes from `ckpt-libtorch`, not from torch-sys, so that this need not wait for the minutes that torch-sys
//! compiles.

use std::env;
use std::path::{Path, PathBuf};

const SOURCES: [&str; 15] = [
    "alloc.cpp",
    "attention.cpp",
    "bytes.cpp",
    "cuda.cpp",
    "dispatch.cpp",
    "gemm.cpp",
    "graph.cpp",
    "kernel.cpp",
    "ranks.cpp",
    "rng.cpp",
    "rows.cpp",
    "status.cpp",
    "sums.cpp",
    "team.cpp",
    "version.cpp",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_LIBTORCH").is_none() {
        return;
    }
    println!("cargo:rerun-if-changed=cpp");
    let libtorch =
        env::var_os("DEP_CKPT_LIBTORCH_ROOT").expect("ckpt-libtorch hands on the folder");
    let libtorch = PathBuf::from(libtorch);

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
        // Declarations of gloo, for the headers of libtorch that name it.
        .flag("-isystem")
        .flag("cpp/declared")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .extra_warnings(true);
    for source in SOURCES {
        build.file(Path::new("cpp").join(source));
    }
    // One level for all builds: a product that was not optimised would take a hundred times as long.
    build.opt_level(2);
    build.compile("ckpt_torch");

    let lib = libtorch.join("lib");
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");
    println!("cargo:rustc-link-lib=dl");
    // For this package's own tests; the packages above set it from the metadata, since link arguments do not travel.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo:rpath={}", lib.display());
}
