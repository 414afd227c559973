//! The CPU. Its allocator counts every byte, and every kernel has finished when its call returns.

mod transfer_queue;

use super::backend::{Backend, Memory, Stats};
use super::convert::torch_error;
use super::library;
use super::recorder::Recorder;
use super::transfers::Transfers;
use crate::place::Place;
use ckpt_passes::Result;
use ckpt_passes::analysis::sdpa::SdpaBackends;
use ckpt_torch::{bytes, memory, product};
use std::rc::Rc;
use tch::{Device, Kind, Tensor};
use transfer_queue::TransferQueues;

/// The CPU of this machine.
pub struct Cpu;

impl Backend for Cpu {
    fn open(&self) -> Result<()> {
        library::open()
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn name(&self) -> String {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info
            .lines()
            .find_map(|l| l.strip_prefix("model name")?.split_once(':'));
        model.map_or_else(
            || Place::Cpu.to_string(),
            |(_, model)| model.trim().to_string(),
        )
    }

    fn bytes(&self) -> Result<Stats> {
        let stats = memory::stats();
        Ok(Stats {
            live_bytes: stats.live_bytes,
            peak_bytes: stats.peak_bytes,
            requested_live_bytes: stats.live_bytes,
            requested_peak_bytes: stats.peak_bytes,
            reserved_peak_bytes: None,
        })
    }

    fn reset_peak(&self) -> Result<()> {
        memory::reset_peak();
        Ok(())
    }

    /// The memory of the machine, or the limit of this process's control group if that is smaller (Linux).
    fn memory(&self) -> Result<Option<Memory>> {
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

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn workspace_bytes(&self) -> Option<u64> {
        Some(memory::workspace_bytes())
    }

    fn empty(&self, dims: &[i64], kind: Kind) -> Result<Tensor> {
        ckpt_torch::empty(dims, kind).map_err(torch_error)
    }

    fn edit_bytes(&self, x: &mut Tensor, edit: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        bytes::edit(x, edit).map_err(torch_error)
    }

    /// None, because a run on the CPU computes attention in tiles.
    fn sdpa_backends(&self) -> SdpaBackends {
        SdpaBackends::default()
    }

    fn recorder(&self) -> std::result::Result<Rc<dyn Recorder>, String> {
        Err("a run on the CPU has none".into())
    }

    fn transfers(&self) -> Box<dyn Transfers> {
        Box::new(TransferQueues::default())
    }

    fn is_host(&self) -> bool {
        true
    }

    fn has_own_products(&self) -> bool {
        product::is_ours()
    }
}

/// The files with limit and use of a control group, for cgroup versions 2 and 1.
const CONTROL_GROUPS: [(&str, &str); 2] = [
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
];

/// A field of `/proc/meminfo` or `/proc/self/status`, in bytes.
fn field_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Reads the memory of the machine from `/proc/meminfo`.
fn machine_memory(text: &str) -> Option<Memory> {
    let total_bytes = field_bytes(text, "MemTotal:")?;
    Some(Memory {
        total_bytes,
        used_bytes: total_bytes.saturating_sub(field_bytes(text, "MemAvailable:")?),
    })
}

/// Returns the resident bytes of this process's own pages (not of files); `None` where the system does not report them.
pub fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    field_bytes(&text, "RssAnon:")
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
