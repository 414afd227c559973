//! Devices as the planner sees them: rates for the roofline, memory, and allocator granularity.
//!
//! A device is a small readable file (`devices/*.json`) whose `sources` name the origin of each figure. Built-in devices
//! are embedded; users give files of the same form. The default device has no memory size. It is a modelling assumption
//! that the planner benchmarks price their graphs with, so that figures can be compared.

use crate::error::{Error, Result};
use crate::ir::DType;
use crate::ir::op::{Cost, DeviceKind};
use serde::{Deserialize, Serialize};

/// Arithmetic in 10¹² floating-point operations a second, by element type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Teraflops {
    /// Rate of float32, and of types without a rate of their own.
    pub f32: f64,
    /// Left out: half of f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f64: Option<f64>,
    /// Left out: as f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub f16: Option<f64>,
    /// Left out: as f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16: Option<f64>,
}

impl Teraflops {
    fn of(&self, dtype: DType) -> f64 {
        match dtype {
            DType::F64 => self.f64.unwrap_or(self.f32 / 2.0),
            DType::F16 => self.f16.unwrap_or(self.f32),
            DType::BF16 => self.bf16.unwrap_or(self.f32),
            _ => self.f32,
        }
    }

    fn given(&self) -> [f64; 4] {
        let or = |rate: Option<f64>| rate.unwrap_or(self.f32);
        [self.f32, or(self.f64), or(self.f16), or(self.bf16)]
    }
}

/// What determines the time of a node and the size of memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name for reports.
    pub name: String,
    /// The kind of device.
    #[serde(default, with = "Kind")]
    pub kind: DeviceKind,
    /// Arithmetic rates.
    pub teraflops: Teraflops,
    /// Memory traffic, in 10⁹ bytes a second.
    pub gigabytes_per_s: f64,
    /// Transfers out of this memory and back, each way, in 10⁹ bytes a second.
    #[serde(default = "outside")]
    pub outside_gigabytes_per_s: f64,
    /// The share of transfer time during which no node makes progress: 0 where a copy engine does the transfer, 1 on a
    /// CPU all of whose cores compute.
    #[serde(default)]
    pub outside_busy_share: f64,
    /// How fast a rank receives from all others together, in 10⁹ bytes a second.
    #[serde(default = "link")]
    pub link_gigabytes_per_s: f64,
    /// Time until the first byte of an exchange arrives, in microseconds.
    #[serde(default = "link_latency")]
    pub link_us: f64,
    /// Time to start one kernel, in microseconds.
    pub launch_us: f64,
    /// The size of its memory; `None` for the default device.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// The part of it that is not available: contexts, library workspaces, the system.
    #[serde(default)]
    pub reserved_bytes: u64,
    /// The allocator rounds blocks up to a multiple of this.
    #[serde(default = "one")]
    pub granularity_bytes: u64,
    /// Compute capability of a CUDA device, 8.6 as 86. Left out: attention is planned in tiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capability: Option<i64>,
    /// Streaming multiprocessors of a CUDA device. Left out: attention is planned in tiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processors: Option<i64>,
    /// The origin of each figure.
    #[serde(default)]
    pub sources: Vec<String>,
}

/// How files call the kinds of devices.
#[derive(Serialize, Deserialize)]
#[serde(remote = "DeviceKind", rename_all = "lowercase")]
enum Kind {
    Cpu,
    Cuda,
}

fn one() -> u64 {
    1
}

/// The assumption where a file gives none: what 16 lanes of PCI Express 4.0 (31.5 GB/s by specification) reach in practice.
fn outside() -> f64 {
    25.0
}

/// The assumption where a file gives none: one port of 100 Gb/s.
fn link() -> f64 {
    12.5
}

/// The assumption where a file gives none.
fn link_latency() -> f64 {
    20.0
}

/// The built-in devices, by the word that names them.
const BUILT_IN: &[(&str, &str)] = &[
    ("a100", include_str!("devices/a100.json")),
    ("h100", include_str!("devices/h100.json")),
    ("h200", include_str!("devices/h200.json")),
    ("l4", include_str!("devices/l4.json")),
    ("rtx4090", include_str!("devices/rtx4090.json")),
    ("laptop-cpu", include_str!("devices/laptop-cpu.json")),
];

/// Coarsest granularity of an allocator that is accepted.
const MAX_GRANULARITY_BYTES: u64 = 1 << 30;

impl Default for Device {
    fn default() -> Device {
        Device {
            name: "reference".into(),
            kind: DeviceKind::Cpu,
            teraflops: Teraflops {
                f32: 600.0,
                f64: Some(600.0),
                f16: None,
                bf16: None,
            },
            gigabytes_per_s: 2500.0,
            outside_gigabytes_per_s: outside(),
            outside_busy_share: 0.0,
            link_gigabytes_per_s: link(),
            link_us: link_latency(),
            launch_us: 1.5,
            memory_bytes: None,
            reserved_bytes: 0,
            granularity_bytes: 1,
            capability: None,
            processors: None,
            sources: vec![
                "an assumption: the device that the planner benches are priced with".into(),
            ],
        }
    }
}

impl Device {
    /// Returns the words of the built-in devices.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// Returns a built-in device. Case, blanks, `-` and `_` make no difference.
    pub fn built_in(word: &str) -> Option<Device> {
        let plain = |text: &str| text.to_lowercase().replace([' ', '-', '_'], "");
        let (_, text) = BUILT_IN
            .iter()
            .find(|(name, _)| plain(name) == plain(word))?;
        Some(Device::parse(text).unwrap_or_else(|e| panic!("built-in device {word}: {e}")))
    }

    /// Parses the text of a device file.
    ///
    /// # Errors
    /// `error[device]`: not JSON of the form, an unknown field, a rate that is not positive and finite.
    pub fn parse(text: &str) -> Result<Device> {
        let device: Device = serde_json::from_str(text)
            .map_err(|e| Error::usage("device", format!("this is not a device profile: {e}")))?;
        let rate = |what: &str, x: f64| {
            if x.is_finite() && x > 0.0 {
                return Ok(());
            }
            let what = format!("{what} must be a positive number, not {x}");
            Err(Error::usage("device", what))
        };
        for x in device.teraflops.given() {
            rate("a rate of `teraflops`", x)?;
        }
        rate("`gigabytes_per_s`", device.gigabytes_per_s)?;
        rate("`outside_gigabytes_per_s`", device.outside_gigabytes_per_s)?;
        rate("`link_gigabytes_per_s`", device.link_gigabytes_per_s)?;
        rate("`link_us`", device.link_us)?;
        if !(0.0..=1.0).contains(&device.outside_busy_share) {
            return Err(
                Error::usage("device", "`outside_busy_share` is a part of 1")
                    .expected("0 to 1")
                    .found(device.outside_busy_share.to_string()),
            );
        }
        for (what, number) in [
            ("capability", device.capability),
            ("processors", device.processors),
        ] {
            if let Some(found) = number.filter(|n| !(1..=10_000).contains(n)) {
                return Err(Error::usage("device", format!("`{what}` is out of range"))
                    .expected("1 to 10000")
                    .found(found.to_string()));
            }
        }
        if !device.launch_us.is_finite() || device.launch_us < 0.0 {
            let launch_us = device.launch_us;
            let what = format!("`launch_us` must not be negative, and is {launch_us}");
            return Err(Error::usage("device", what));
        }
        if !(1..=MAX_GRANULARITY_BYTES).contains(&device.granularity_bytes) {
            return Err(
                Error::usage("device", "`granularity_bytes` is out of range")
                    .expected(format!("1 to {MAX_GRANULARITY_BYTES}"))
                    .found(device.granularity_bytes.to_string()),
            );
        }
        Ok(device)
    }

    /// Returns the memory that a plan may use, if the device has a size.
    pub fn usable_bytes(&self) -> Option<u64> {
        Some(self.memory_bytes?.saturating_sub(self.reserved_bytes))
    }

    /// Returns the time of one node that computes in `dtype`, in microseconds. A node without cost takes no time.
    ///
    /// The roofline: `max(FLOPs / rate, bytes / bandwidth) + launch` (Williams, Waterman, Patterson, CACM 2009).
    pub fn time_us(&self, cost: Cost, dtype: DType) -> f64 {
        if cost == Cost::default() {
            return 0.0;
        }
        let arithmetic = cost.flops as f64 / (self.teraflops.of(dtype) * 1e12);
        let traffic = cost.bytes as f64 / (self.gigabytes_per_s * 1e9);
        arithmetic.max(traffic) * 1e6 + self.launch_us
    }

    /// Returns the time of an exchange between ranks in which each of them receives so many bytes, in microseconds.
    pub fn exchange_us(&self, bytes: u64) -> f64 {
        self.link_us + bytes as f64 / (self.link_gigabytes_per_s * 1e3)
    }

    /// Returns the bytes that the allocator takes for a block.
    pub fn rounded(&self, bytes: u64) -> u64 {
        round_up(bytes, self.granularity_bytes)
    }
}

/// Rounds up to a multiple of `granularity_bytes`, which is not 0.
pub fn round_up(bytes: u64, granularity_bytes: u64) -> u64 {
    bytes
        .div_ceil(granularity_bytes)
        .saturating_mul(granularity_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_devices_say_where_they_come_from() {
        for name in Device::names() {
            let d = Device::built_in(name).unwrap();
            assert!(d.sources.len() >= 4, "{name}");
            assert!(d.usable_bytes().unwrap() > 10_000_000_000, "{name}");
            let again = serde_json::to_string(&d).unwrap();
            assert_eq!(Device::parse(&again).unwrap(), d);
        }
        assert_eq!(Device::built_in("RTX 4090"), Device::built_in("rtx4090"));
        assert_eq!(Device::built_in("Laptop_CPU").unwrap().granularity_bytes, 1);
        assert!(Device::built_in("h1000").is_none());
    }

    #[test]
    fn the_roofline() {
        let d = Device::default();
        let cost = |flops, bytes| Cost { flops, bytes };
        assert_eq!(d.time_us(cost(0, 0), DType::F32), 0.0);
        assert_eq!(d.time_us(cost(600_000_000, 1), DType::F64), 2.5);
        assert_eq!(d.time_us(cost(1, 2_500_000), DType::BF16), 2.5);
        let h = Device::built_in("h100").unwrap();
        let products = cost(1 << 40, 1 << 20);
        let ratio = h.time_us(products, DType::F32) / h.time_us(products, DType::BF16);
        assert!((14.0..15.0).contains(&ratio), "{ratio}");
        assert_eq!(
            (h.rounded(0), h.rounded(1), h.rounded(512), h.rounded(513)),
            (0, 512, 512, 1024)
        );
        assert_eq!(round_up(u64::MAX, 512), u64::MAX);
    }

    #[test]
    fn files_that_are_not_devices() {
        let with = |field: &str, value: &str| {
            let mut v: serde_json::Value = serde_json::to_value(Device::default()).unwrap();
            v[field] = serde_json::from_str(value).unwrap();
            Device::parse(&v.to_string())
        };
        assert!(with("launch_us", "0").is_ok() && with("memory_bytes", "12").is_ok());
        for (field, value) in [
            ("gigabytes_per_s", "0"),
            ("gigabytes_per_s", "-3"),
            ("gigabytes_per_s", "\"fast\""),
            ("teraflops", "{}"),
            ("teraflops", "{\"f32\": 0}"),
            ("teraflops", "{\"f32\": 1, \"f8\": 1}"),
            ("teraflops", "{\"f32\": 1, \"f16\": -1}"),
            ("launch_us", "-1"),
            ("memory_bytes", "-1"),
            ("granularity_bytes", "0"),
            ("granularity_bytes", "18446744073709551615"),
            ("bandwidth", "3"),
        ] {
            let e = with(field, value).unwrap_err();
            assert_eq!((e.code(), e.exit_code()), ("device", 2), "{field} {value}");
        }
        assert!(Device::parse("").is_err() && Device::parse("[]").is_err());
    }
}
