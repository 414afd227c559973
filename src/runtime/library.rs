//! Opens libtorch: checks its version and installs the counting allocator.

use super::convert::torch_error;
use ckpt_passes::{Error, Result};
use ckpt_torch::{memory, version};

/// Checks the version of the loaded libtorch and installs the counting allocator.
///
/// # Errors
/// Of kind environment: another libtorch than the one we were built with.
pub fn open() -> Result<()> {
    expect_version(&version::loaded().map_err(torch_error)?)?;
    memory::install();
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
