//! What the cost model rests on, from files: device profiles and measured times of nodes.

use ckpt_passes::analysis::Device;
use ckpt_passes::plan::Times;
use ckpt_passes::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// A built-in device by its name, else the file of that name.
///
/// # Errors
/// `error[device]` where it is neither.
pub fn device(word: &str) -> Result<Device> {
    if let Some(device) = Device::built_in(word) {
        return Ok(device);
    }
    let text = std::fs::read_to_string(word).map_err(|e| {
        let names: Vec<&str> = Device::names().collect();
        Error::usage(
            "device",
            format!("there is no device `{word}`, and no such file can be read: {e}"),
        )
        .expected(format!(
            "{}, or a file like those of passes/analysis/devices",
            names.join(", ")
        ))
    })?;
    Device::parse(&text).map_err(|e| e.at(word))
}

/// Measured times, by node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name of the device that the nodes ran on.
    pub device: String,
    /// Threads that one kernel was allowed.
    pub threads: usize,
    /// Steps measured; a time is the median.
    pub steps: u32,
    /// The sizes they were measured at.
    pub dims: BTreeMap<String, i64>,
    /// Microseconds, by the name of the node.
    pub nodes_us: BTreeMap<String, f64>,
}

/// Reads the times of a profile.
///
/// # Errors
/// `error[profile]` where the file cannot be read or holds none.
pub fn times(path: &Path) -> Result<Times> {
    let failed = |what: String| Error::usage("profile", what).at(path.display().to_string());
    let text = std::fs::read_to_string(path)
        .map_err(|e| failed(format!("cannot read the profile: {e}")))?;
    let profile: Profile =
        serde_json::from_str(&text).map_err(|e| failed(format!("this is not a profile: {e}")))?;
    Ok(Times {
        dims: profile.dims,
        nodes_us: profile.nodes_us,
    })
}
