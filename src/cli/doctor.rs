//! `doctor`: lists what this machine and this build have, and what to do where something is missing.

use super::output::Console;
use ckpt_opt::units::bytes;
use ckpt_passes::Result;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// How to get a build that runs graphs.
#[cfg(not(feature = "torch"))]
pub const INSTALL_RUNTIME: &str =
    "in the repository: tools/get-libtorch && cargo build --release --features torch";

/// Less free space than this is reported as little.
const LITTLE_BYTES: u64 = 1 << 30;

#[derive(Serialize)]
struct Finding {
    name: &'static str,
    /// `good`, `missing` (something optional is not there) or `little`.
    state: &'static str,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    help: Option<String>,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    target: String,
    runtime: bool,
    findings: Vec<Finding>,
}

pub fn run(console: Console) -> Result<()> {
    let mut findings = vec![processors(), memory(), room("disk, here", Path::new("."))];
    findings.push(room("disk, temporary files", &std::env::temp_dir()));
    findings.extend(runtime());
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        runtime: cfg!(feature = "torch"),
        findings,
    };
    console.print(&report, &[], || report.human())
}

impl Report {
    fn human(&self) -> String {
        let mut out = format!("ckpt-opt {} on {}\n", self.version, self.target);
        for f in &self.findings {
            let _ = writeln!(out, "  {:<8}{:<24}{}", f.state, f.name, f.found);
            if let Some(help) = &f.help {
                let _ = writeln!(out, "  {:<32}{help}", "");
            }
        }
        out
    }
}

fn good(name: &'static str, found: String) -> Finding {
    Finding {
        name,
        state: "good",
        found,
        help: None,
    }
}

fn missing(name: &'static str, found: String, help: String) -> Finding {
    Finding {
        name,
        state: "missing",
        found,
        help: Some(help),
    }
}

fn processors() -> Finding {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    good("processors", count.to_string())
}

fn sized(name: &'static str, free: u64, what: &str, help: &str) -> Finding {
    let is_little = free < LITTLE_BYTES;
    Finding {
        name,
        state: if is_little { "little" } else { "good" },
        found: format!("{} {what}", bytes(free)),
        help: is_little.then(|| help.to_string()),
    }
}

fn memory() -> Finding {
    let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = table.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    match kib {
        Some(kib) => sized(
            "memory",
            kib.saturating_mul(1024),
            "available",
            "planning needs no weights in memory; running does",
        ),
        None => missing(
            "memory",
            "not known on this system".into(),
            "give budgets in bytes".into(),
        ),
    }
}

fn room(name: &'static str, folder: &Path) -> Finding {
    match rustix::fs::statvfs(folder) {
        Ok(disk) => sized(
            name,
            disk.f_bavail.saturating_mul(disk.f_frsize),
            "free",
            "a training graph takes about as much as its model; --link-weights takes less",
        ),
        Err(_) => missing(
            name,
            format!("{} cannot be looked at", folder.display()),
            "choose a folder that exists".into(),
        ),
    }
}

#[cfg(not(feature = "torch"))]
fn runtime() -> Vec<Finding> {
    vec![missing(
        "runtime",
        "this build plans and writes, and cannot run graphs".into(),
        INSTALL_RUNTIME.into(),
    )]
}

#[cfg(feature = "torch")]
fn runtime() -> Vec<Finding> {
    use ckpt_opt::place::Place;
    use ckpt_opt::runtime::{device, session};
    let mut found = vec![good(
        "runtime",
        format!(
            "libtorch is loaded, {} threads a kernel",
            session::threads()
        ),
    )];
    let cuda = device::of(Place::Cuda(0)).open();
    if cuda.is_ok() {
        found.push(nccl(Place::Cuda(0)));
    }
    found.push(match cuda {
        Ok(()) => good("cuda", "cuda:0 can be used".into()),
        Err(e) => {
            let mut notes = e.notes().filter(|(label, _)| *label == "found");
            let why = notes
                .next()
                .map_or(String::new(), |(_, note)| format!(": {note}"));
            missing(
                "cuda",
                format!("{}{why}", e.message()),
                "run on the CPU, or see --device in ckpt-opt run --help".into(),
            )
        }
    });
    found
}

/// Tries to exchange tensors on a CUDA device.
#[cfg(feature = "torch")]
fn nccl(place: ckpt_opt::place::Place) -> Finding {
    match ckpt_opt::runtime::ranks::try_nccl(place) {
        Ok(version) => good("nccl", format!("version {version} works for one rank")),
        Err(e) => missing(
            "nccl",
            e.to_string(),
            "train by one process: leave --ranks out".into(),
        ),
    }
}
