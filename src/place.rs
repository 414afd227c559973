//! The device that runs a graph: the CPU or one CUDA device.

use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::{Error, Result};
use std::fmt;

/// A device of the runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// The CPU, in the host's memory.
    #[default]
    Cpu,
    /// A CUDA device, by its number.
    Cuda(usize),
}

impl Place {
    /// Environment variable that makes cuBLAS deterministic; it must be set before the first use. Source: PyTorch's notes
    /// on reproducibility.
    pub const CUBLAS_SETTING: (&str, &str) = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8");

    /// Environment variable by which libtorch's CUDA allocator splits its segments at 512 bytes; otherwise blocks keep
    /// remainders of up to 1 MiB. It must be set before the first use.
    pub const ALLOCATOR_SETTING: (&str, &str) = ("PYTORCH_ALLOC_CONF", "expandable_segments:True");

    /// The older name of that variable.
    pub const OLD_ALLOCATOR_VARIABLE: &str = "PYTORCH_CUDA_ALLOC_CONF";

    /// Reads `cpu`, `cuda` or `cuda:N`.
    ///
    /// # Errors
    /// Any other word.
    pub fn parse(text: &str) -> Result<Place> {
        let word = text.trim().to_lowercase();
        let number = match word.strip_prefix("cuda") {
            None if word == "cpu" => return Ok(Place::Cpu),
            Some("") => return Ok(Place::Cuda(0)),
            Some(rest) => rest.strip_prefix(':').and_then(|n| n.parse::<u8>().ok()),
            None => None,
        };
        // libtorch numbers devices in a signed byte.
        match number.filter(|n| *n <= i8::MAX as u8) {
            Some(n) => Ok(Place::Cuda(n.into())),
            None => Err(
                Error::usage("device", format!("there is no device `{text}`"))
                    .expected("cpu, cuda or cuda:N"),
            ),
        }
    }

    /// Returns the kind of device.
    pub fn kind(self) -> DeviceKind {
        match self {
            Place::Cpu => DeviceKind::Cpu,
            Place::Cuda(_) => DeviceKind::Cuda,
        }
    }

    /// Returns the bytes that block sizes are multiples of. Blocks on the CPU are counted as requested; CUDA's caching
    /// allocator rounds up to 512 (`kMinBlockSize`).
    pub fn granularity_bytes(self) -> u64 {
        match self {
            Place::Cpu => 1,
            Place::Cuda(_) => 512,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Place;

    #[test]
    fn words() {
        assert_eq!(Place::parse("CPU").unwrap(), Place::Cpu);
        assert_eq!(Place::parse("cuda").unwrap(), Place::Cuda(0));
        assert_eq!(Place::parse("cuda:3").unwrap(), Place::Cuda(3));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:200", "cuda0", "cpu:0"] {
            assert_eq!(Place::parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }
}
