//! The device that a program runs on: made ready, measured, waited for.
//!
//! The CPU is always there, and its allocator counts every byte. A CUDA device is opened before anything else asks
//! libtorch about CUDA; kernels are deterministic there, in the full precision of their types. What the CUDA allocator
//! reports are its blocks; library workspaces (cuBLAS) come from it too and stay, so that they are in `live_bytes`
//! before the first step that is measured.

use super::convert::{tch_error, torch_error};
use super::kernels::attention::pairs::Available;
use crate::place::Place;
use ckpt_passes::{Error, Result};
use ckpt_torch::{cuda, memory, version};
use tch::{Device, Tensor};

/// The settings under which libtorch runs cuBLAS deterministically.
const CUBLAS_DETERMINISTIC: [&str; 2] = [":4096:8", ":16:8"];

/// Makes a place ready.
///
/// # Errors
/// No CUDA library, no such device, a cuBLAS setting that is not deterministic: the environment's.
pub fn open(place: Place) -> Result<()> {
    expect_version(&version::loaded().map_err(torch_error)?)?;
    memory::install();
    let Place::Cuda(index) = place else {
        return Ok(());
    };
    let (name, wanted) = Place::CUBLAS_SETTING;
    let found = std::env::var(name).unwrap_or_default();
    if !CUBLAS_DETERMINISTIC.contains(&found.as_str()) {
        return Err(
            Error::environment("cuda", "cuBLAS is not set to be deterministic")
                .expected(format!("{name}={wanted} in the environment"))
                .found(match found.as_str() {
                    "" => format!("{name} is not set"),
                    other => format!("{name}={other}"),
                }),
        );
    }
    let devices = cuda::load().map_err(|e| {
        Error::environment("cuda", "libtorch's CUDA library cannot be loaded")
            .expected(format!("libtorch_cuda.so and the CUDA libraries that it needs, in {}", folders()))
            .found(e.message)
            .help(
                "install torch 2.11.0 for Python with its nvidia packages, and put its `lib` folder and theirs into \
                 LD_LIBRARY_PATH, as tools/cuda-checks does; or run on the CPU: --device cpu",
            )
    })?;
    if devices == 0 {
        return Err(Error::environment("cuda", "there is no CUDA device")
            .expected("an NVIDIA driver (libcuda.so.1) and a device that it can use")
            .found("libtorch's CUDA library is loaded and sees 0 devices")
            .help("run on the CPU: --device cpu"));
    }
    if index >= devices {
        return Err(
            Error::environment("cuda", format!("there is no device cuda:{index}"))
                .found(format!("cuda:0 to cuda:{}", devices - 1)),
        );
    }
    cuda::open(index).map_err(|e| {
        Error::environment("cuda", format!("the device cuda:{index} cannot be used"))
            .found(e.message)
    })
}

/// Refuses a libtorch that is not the one we were built with: its C++ interface changes between releases.
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

/// Where the loader looks for libraries, for a message.
fn folders() -> String {
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

/// The same place as tch names it.
pub fn torch(place: Place) -> Device {
    match place {
        Place::Cpu => Device::Cpu,
        Place::Cuda(n) => Device::Cuda(n),
    }
}

/// The tensor, at that place: itself if it is there already.
///
/// # Errors
/// Not enough memory there.
pub fn moved(tensor: Tensor, to: Place) -> Result<Tensor> {
    let device = torch(to);
    if tensor.device() == device {
        return Ok(tensor);
    }
    tensor.f_to_device(device).map_err(|e| tch_error(&e))
}

/// The pairs of kernels of attention that a place has: none where the device does not say what it is.
pub fn pairs(place: Place) -> Available {
    let Place::Cuda(index) = place else {
        return Available::default();
    };
    match cuda::properties(index) {
        Ok(found) => Available::cuda(found.capability, found.processors),
        Err(e) => Available {
            refused: Some(format!("attention runs in tiles: {}", e.message)),
            ..Available::default()
        },
    }
}

/// Bytes at a place, as its allocator counts them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bytes {
    pub live: u64,
    pub peak: u64,
    /// Largest sum of what was asked for, before blocks were rounded; what is live now of it is `requested_live`.
    pub requested_peak: u64,
    pub requested_live: u64,
}

/// What is alive now, and the most that was since [`reset_peak`].
///
/// # Errors
/// The device fails.
pub fn bytes(place: Place) -> Result<Bytes> {
    Ok(match place {
        Place::Cpu => {
            let stats = memory::stats();
            Bytes {
                live: stats.live_bytes,
                peak: stats.peak_bytes,
                requested_peak: stats.peak_bytes,
                requested_live: stats.live_bytes,
            }
        }
        Place::Cuda(n) => {
            let stats = cuda::stats(n).map_err(torch_error)?;
            Bytes {
                live: stats.live_bytes,
                peak: stats.peak_bytes,
                requested_peak: stats.requested_peak_bytes,
                requested_live: stats.requested_live_bytes,
            }
        }
    })
}

/// # Errors
/// The device fails.
pub fn reset_peak(place: Place) -> Result<()> {
    match place {
        Place::Cpu => {
            memory::reset_peak();
            Ok(())
        }
        Place::Cuda(n) => cuda::reset_peak(n).map_err(torch_error),
    }
}

/// The memory of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub total_bytes: u64,
    /// What of it is taken, by whoever.
    pub used_bytes: u64,
}

/// How much memory there is; `None` where nobody says. Of the CPU, what the machine has or, if that is less, what the
/// control group of this process may have (Linux).
///
/// # Errors
/// The device fails.
pub fn memory(place: Place) -> Result<Option<Memory>> {
    if let Place::Cuda(n) = place {
        let (free_bytes, total_bytes) = cuda::memory_info(n).map_err(torch_error)?;
        return Ok(Some(Memory {
            total_bytes,
            used_bytes: total_bytes.saturating_sub(free_bytes),
        }));
    }
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some(machine) = machine_memory(&text) else {
        return Ok(None);
    };
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse().ok();
    let group = |(limit, used): (&str, &str)| {
        Some(Memory {
            total_bytes: number(limit)?,
            used_bytes: number(used)?,
        })
    };
    let groups = CONTROL_GROUPS.into_iter().filter_map(group);
    Ok(groups
        .chain([machine])
        .min_by_key(|m: &Memory| m.total_bytes))
}

/// Refuses what can never be had at a place: more than all of its memory. The system may grant it all the same and end the
/// process once it is used.
///
/// # Errors
/// `environment[memory]`; the device fails.
pub fn expect_room(place: Place, bytes: u64) -> Result<()> {
    let Some(memory) = memory(place)? else {
        return Ok(());
    };
    if bytes <= memory.total_bytes {
        return Ok(());
    }
    Err(Error::environment(
        "memory",
        format!("a run takes {bytes} bytes beside weights and inputs"),
    )
    .found(format!("{place} has {} bytes", memory.total_bytes))
    .help("plan for a smaller --budget, or choose smaller sizes"))
}

/// Where Linux says what a control group may have and has, in its versions 2 and 1.
const CONTROL_GROUPS: [(&str, &str); 2] = [
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
];

/// What `/proc/meminfo` says.
fn machine_memory(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
        kibibytes.checked_mul(1024)
    };
    let total_bytes = field("MemTotal:")?;
    Some(Memory {
        total_bytes,
        used_bytes: total_bytes.saturating_sub(field("MemAvailable:")?),
    })
}

/// Bytes of this process's own pages (not of files) that are in memory; `None` where nobody says (Linux does).
pub fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes * 1024)
}

/// What a place calls itself.
pub fn name(place: Place) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    match (place, model) {
        (Place::Cpu, Some((_, model))) => model.trim().to_string(),
        _ => place.to_string(),
    }
}

/// Waits until everything that was sent there is done.
///
/// # Errors
/// A kernel that failed meanwhile.
pub fn synchronize(place: Place) -> Result<()> {
    match place {
        Place::Cpu => Ok(()),
        Place::Cuda(n) => cuda::synchronize(n).map_err(torch_error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_machine() {
        let text = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    400 kB\n";
        let memory = machine_memory(text).unwrap();
        assert_eq!(
            (memory.total_bytes, memory.used_bytes),
            (1_024_000, 614_400)
        );
        assert_eq!(machine_memory("MemTotal: x kB\nMemAvailable: 1 kB\n"), None);
        assert_eq!(machine_memory(""), None);
    }
}
