//! Opens libtorch: checks its version, installs the counting allocator and has the vector math library choose its code.

use super::convert::torch_error;
use ckpt_passes::{Error, Result};
use ckpt_torch::{Op, TorchError, args, memory, version};
use std::sync::OnceLock;
use tch::{Kind, Tensor};

/// The elementwise operators that libtorch computes by MKL's vector math functions (`ATen/cpu/vml.h`).
const VECTOR_MATH: [&str; 16] = [
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin",
    "sqrt", "tan", "tanh", "trunc",
];

/// Checks the version of the loaded libtorch, installs the counting allocator and chooses the vector math code.
///
/// # Errors
/// Of kind environment: another libtorch than the one we were built with.
pub fn open() -> Result<()> {
    expect_version(&version::loaded().map_err(torch_error)?)?;
    memory::install();
    static CHOSEN: OnceLock<Result<(), TorchError>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(choose_vector_math);
    chosen.clone().map_err(torch_error)
}

/// Calls each vector math function once, on one thread.
///
/// MKL chooses the code of such a function in its first call. Where several threads make that call at once, one of them may
/// compute its share with code of low accuracy, off by thousands of units in the last place (pytorch/pytorch#188792).
fn choose_vector_math() -> Result<(), TorchError> {
    let _no_grad = tch::no_grad_guard();
    for kind in [Kind::Float, Kind::Double] {
        let x = Tensor::from_slice(&[0.5]).to_kind(kind);
        for name in VECTOR_MATH {
            drop(Op::find(&format!("aten::{name}"))?.call_one(args![&x])?);
        }
    }
    Ok(())
}

/// Refuses any libtorch but the one we were built with, because its C++ interface changes between releases.
fn expect_version(found: &str) -> Result<()> {
    let wanted = version::built_with();
    if found == wanted {
        return Ok(());
    }
    Err(Error::environment("libtorch", "the libtorch that was loaded is not the one we were built with")
        .expected(format!("libtorch {wanted}"))
        .found(format!("libtorch {found}, looked for in {}", folders()))
        .help("take other libraries out of LD_LIBRARY_PATH and LD_PRELOAD, or build again after tools/get-libtorch"))
}

/// Lists the directories in which the loader looks for libraries, for a message.
pub fn folders() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let loaded = maps.lines().find_map(|line| {
        let path = &line[line.find('/')?..];
        Some(path.strip_suffix("/libtorch_cpu.so")?.to_string())
    });
    let mut folders: Vec<String> = loaded.into_iter().collect();
    folders.push("LD_LIBRARY_PATH".into());
    folders.push("the system's library folders".into());
    folders.join(", ")
}

#[cfg(test)]
mod tests {
    use super::{VECTOR_MATH, folders, open};

    #[test]
    fn all_vector_math_functions_of_libtorch_are_chosen() {
        open().unwrap();
        let folders = folders();
        let library = folders.split(", ").next().unwrap();
        let header = format!("{library}/../include/ATen/cpu/vml.h");
        let text = std::fs::read_to_string(&header).unwrap();
        let mut expected: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("IMPLEMENT_VML_MKL("))
            .filter_map(|rest| Some(rest.split_once(',')?.0))
            .collect();
        expected.sort_unstable();
        let mut found = VECTOR_MATH;
        found.sort_unstable();
        assert_eq!(found[..], expected[..], "{header}");
    }
}
