//! Measures a device: the rates of its roofline, the launch cost of a node, the allocator's granularity.
//!
//! Each figure comes from a small graph that our runtime executes:
//! - Arithmetic: products of square matrices in each floating-point type, growing until one takes long enough to time.
//! - Bandwidth: a sum of vectors that do not fit into any cache.
//! - Offloading: such a vector moved out of the device's memory and back, alone and overlapping products.
//! - Launch cost: a chain of sums of a few numbers.
//!
//! So the rates are those that a plan gets in this runtime with these threads, not the vendor's.

use super::median;
use crate::place::Place;
use crate::rng::Rng;
use crate::runtime::device;
use crate::runtime::session::{self, Session};
use crate::tensors::random;
use ckpt_passes::analysis::Device;
use ckpt_passes::analysis::device::Teraflops;
use ckpt_passes::ir::{DType, Graph};
use ckpt_passes::{Error, Result, text};
use std::collections::BTreeMap;
use std::fmt::Write;

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Request {
    /// The device to measure.
    pub place: Place,
    /// CPU threads that one kernel may use; libtorch's default if `None`.
    pub threads: Option<u16>,
    /// A name for the device; its own name if `None`.
    pub name: Option<String>,
    /// Runs per median.
    pub runs: u32,
    /// The largest number of rows of a matrix.
    pub max_rows: u64,
    /// Elements of the vectors whose sum is timed. All three vectors together should exceed every cache.
    pub vector: u64,
}

impl Default for Request {
    fn default() -> Request {
        Request {
            place: Place::Cpu,
            threads: None,
            name: None,
            runs: 5,
            max_rows: 8192,
            vector: 16 << 20,
        }
    }
}

impl Request {
    fn session<'g>(&self, graph: &'g Graph) -> Result<Session<'g>> {
        let weights = BTreeMap::new();
        Session::new(graph, &weights, self.threads, self.place, Rng::default())
    }
}

/// What the link of a device profile is, and how each figure was measured.
pub struct Link {
    /// Bytes that a rank receives from all others together, in 10⁹ a second.
    pub gigabytes_per_s: f64,
    /// Time until the first byte arrives, in microseconds.
    pub us: f64,
    /// A line for each collective.
    pub sources: Vec<String>,
}

/// Parses a graph in text form.
fn parse(source: &str) -> Result<Graph> {
    text::parse(source).map_err(|e| Error::bug("calibrate", e.to_string()))
}

const MIN_ROWS: u64 = 256;
/// A product of this duration is long enough to time.
const LONG_US: f64 = 20_000.0;
/// Nodes of the chain that measures the launch cost.
const CHAIN: usize = 512;
const BLOCKS: u64 = 64;

/// Measures a device. Without ranks the link of the profile is an assumption.
///
/// # Errors
/// A device that cannot be opened or has too little memory.
pub fn calibrate(request: &Request, link: Option<Link>) -> Result<Device> {
    let mut sources = Vec::new();
    let mut rate = |dtype| -> Result<f64> {
        let (teraflops, source) = arithmetic(request, dtype)?;
        sources.push(source);
        Ok(teraflops)
    };
    let teraflops = Teraflops {
        f64: Some(rate(DType::F64)?),
        f32: rate(DType::F32)?,
        f16: Some(rate(DType::F16)?),
        bf16: Some(rate(DType::BF16)?),
    };
    let (gigabytes_per_s, source) = bandwidth(request)?;
    sources.push(source);
    let (outside_gigabytes_per_s, source) = transfer(request)?;
    sources.push(source);
    let (outside_busy_share, source) = beside(request)?;
    sources.push(source);
    let launch_us = dispatch(request)?;
    sources.push(format!(
        "launch_us: one of {CHAIN} sums of 8 numbers in a row, median of {} runs",
        request.runs
    ));
    let granularity_bytes = granularity(request)?;
    sources.push(
        "granularity_bytes: what the allocator counts for tensors of 4 bytes; 1 where it counts what was asked for"
            .into(),
    );
    let memory = device::of(request.place).memory()?;
    sources.push(match (memory, request.place) {
        (None, _) => "memory_bytes: not known here".into(),
        (Some(_), Place::Cpu) => {
            "memory_bytes: of the machine, or what this process may have; reserved_bytes: what of it was in use".into()
        }
        (Some(_), Place::Cuda(_)) => {
            "memory_bytes: as the driver says; reserved_bytes: what of it was in use, our own context included".into()
        }
    });
    let threads = session::threads();
    let own_name = match request.place {
        Place::Cpu if threads == 1 => format!("{}, one thread", device::of(request.place).name()),
        Place::Cpu => format!("{}, {threads} threads", device::of(request.place).name()),
        Place::Cuda(_) => device::of(request.place).name(),
    };
    let found = device::of(request.place).sdpa_backends();
    let attention = (found.capability > 0).then_some((found.capability, found.processors));
    if attention.is_some() {
        sources.push("capability and processors: as the driver says".into());
    }
    let assumed = Device::default();
    let (link_gigabytes_per_s, link_us) = match link {
        Some(link) => {
            sources.extend(link.sources);
            (link.gigabytes_per_s, link.us)
        }
        None => (assumed.link_gigabytes_per_s, assumed.link_us),
    };
    let device = Device {
        name: request.name.clone().unwrap_or(own_name),
        kind: request.place.kind(),
        teraflops,
        gigabytes_per_s,
        outside_gigabytes_per_s,
        outside_busy_share,
        launch_us,
        memory_bytes: memory.map(|m| m.total_bytes),
        reserved_bytes: memory.map_or(0, |m| m.used_bytes),
        granularity_bytes,
        capability: attention.map(|(capability, _)| capability),
        processors: attention.map(|(_, processors)| processors),
        sources,
        link_gigabytes_per_s,
        link_us,
    };
    // Checks that the written profile can be read.
    let written = serde_json::to_string(&device).map_err(|e| Error::bug("json", e.to_string()))?;
    Device::parse(&written)
}

/// Returns the median times of the nodes of a graph in text form, on random inputs.
pub(super) fn times(request: &Request, source: &str) -> Result<Vec<f64>> {
    let graph = parse(source)?;
    let inputs = random::inputs(&graph, &[], 0)?;
    let runs = request
        .session(&graph)?
        .time_nodes(&inputs, 1, request.runs)?;
    let nodes = runs.first().map_or(0, Vec::len);
    Ok((0..nodes)
        .map(|node| median(runs.iter().map(|r| r[node]).collect()))
        .collect())
}

/// Returns the rate of a matrix product in 10¹² operations per second, and its source.
fn arithmetic(request: &Request, dtype: DType) -> Result<(f64, String)> {
    let mut rows = MIN_ROWS.min(request.max_rows);
    loop {
        let matrix = format!("{dtype}[{rows}, {rows}]");
        let source = format!(
            "graph @product typed (%x: {matrix}, %y: {matrix}) -> (%z) {{\n  %z = MatMul %x, %y : {matrix}\n}}\n"
        );
        let time_us = times(request, &source)?.iter().sum::<f64>().max(1e-3);
        if time_us < LONG_US && rows < request.max_rows {
            // Twice the rows take eight times as long.
            rows = (2 * rows).min(request.max_rows);
            continue;
        }
        let flops = 2.0 * (rows as f64).powi(3);
        let how = format!(
            "teraflops.{dtype}: a product of {rows} x {rows} matrices in {time_us:.0} us, median of {} runs",
            request.runs
        );
        return Ok((flops / time_us / 1e6, how));
    }
}

/// Returns the bandwidth of a sum of two vectors in 10⁹ bytes per second: two are read, one is written.
fn bandwidth(request: &Request) -> Result<(f64, String)> {
    let vector = format!("f32[{}]", request.vector);
    let source = format!(
        "graph @sum typed (%x: {vector}, %y: {vector}) -> (%z) {{\n  %z = Add %x, %y : {vector}\n}}\n"
    );
    let time_us = times(request, &source)?.iter().sum::<f64>().max(1e-3);
    let bytes = 3.0 * 4.0 * request.vector as f64;
    let how = format!(
        "gigabytes_per_s: a sum of two vectors of {} bytes into a third in {time_us:.0} us, median of {} runs",
        4 * request.vector,
        request.runs
    );
    Ok((bytes / time_us / 1e3, how))
}

/// Returns the rate of transfers in 10⁹ bytes per second, in the slower direction.
fn transfer(request: &Request) -> Result<(f64, String)> {
    let vector = format!("f32[{}]", request.vector);
    let source = format!(
        "graph @move typed (%x: {vector}) -> (%y) {{\n  %out = Offload %x : {vector}\n  %y = Fetch %out : {vector}\n}}\n"
    );
    let slower_us = times(request, &source)?.into_iter().fold(1e-3, f64::max);
    let bytes = 4 * request.vector;
    let how = format!(
        "outside_gigabytes_per_s: a vector of {bytes} bytes moved out or back in {slower_us:.0} us, median of {} runs",
        request.runs
    );
    Ok((bytes as f64 / slower_us / 1e3, how))
}

/// Returns the share of a transfer's time that overlapping nodes lose, and its source. Times two products alone, with a vector
/// offloaded during the first and fetched during the second, and with the same transfers between them.
fn beside(request: &Request) -> Result<(f64, String)> {
    let vector = format!("f32[{}]", request.vector);
    let bytes = 4 * request.vector;
    let leaves = format!("  %out = Offload %x : {vector}\n");
    let comes = format!("  %left = Release %x, %out : {vector}\n  %y = Fetch %left : {vector}\n");
    let mut rows = MIN_ROWS.min(request.max_rows);
    loop {
        let matrix = format!("f32[{rows}, {rows}]");
        let graph = |leaves: &str, comes: &str, result: &str| {
            let source = format!(
                "graph @beside typed (%a: {matrix}, %x: {vector}) -> (%q{result}) {{\n{leaves}  %p = MatMul %a, %a : {matrix}\n\
                 {comes}  %q = MatMul %p, %a : {matrix}\n}}\n"
            );
            parse(&source)
        };
        let (plain, moving) = (graph("", "", "")?, graph(&leaves, &comes, ", %y")?);
        let inputs = random::inputs(&plain, &[], 0)?;
        let (plain, mut moving) = (request.session(&plain)?, request.session(&moving)?);
        // Alone, between, overlapping: in turns; the first run of each is dropped.
        let mut times_us = [const { Vec::new() }; 3];
        for run in 0..=request.runs {
            let mut of = |n: usize, time_us: u64| {
                if run > 0 {
                    times_us[n].push(time_us as f64);
                }
            };
            of(0, plain.step(&inputs, &|_| false)?.time_us);
            for (n, streams) in [(1, false), (2, true)] {
                moving.use_streams(streams);
                of(n, moving.step(&inputs, &|_| false)?.time_us);
            }
        }
        let [alone_us, between_us, beside_us] = times_us.map(median);
        let moving_us = (between_us - alone_us).max(1e-3);
        if alone_us < moving_us && rows < request.max_rows {
            // A shorter product cannot hide the whole transfer.
            rows = (2 * rows).min(request.max_rows);
            continue;
        }
        let share = ((beside_us - alone_us) / moving_us).clamp(0.0, 1.0);
        let how = format!(
            "outside_busy_share: two products of {rows} x {rows} matrices in {alone_us:.0} us, {beside_us:.0} us with {bytes} bytes \
             moved out and back beside them, {between_us:.0} us with that in between, medians of {} runs",
            request.runs
        );
        return Ok((share, how));
    }
}

/// Returns the microseconds of a node with almost no work.
fn dispatch(request: &Request) -> Result<f64> {
    let mut source = String::from("graph @chain typed (%v0: f32[8]) -> (");
    let _ = writeln!(source, "%v{CHAIN}) {{");
    for i in 0..CHAIN {
        let _ = writeln!(source, "  %v{} = Add %v{i}, %v0 : f32[8]", i + 1);
    }
    source.push_str("}\n");
    Ok(median(times(request, &source)?))
}

/// Returns the number of bytes to whose multiples the allocator rounds blocks up.
fn granularity(request: &Request) -> Result<u64> {
    let outputs: Vec<String> = (0..BLOCKS).map(|i| format!("%y{i}")).collect();
    let mut source = format!(
        "graph @blocks typed (%x: f32[1]) -> ({}) {{\n",
        outputs.join(", ")
    );
    for output in &outputs {
        let _ = writeln!(source, "  {output} = Neg %x : f32[1]");
    }
    source.push_str("}\n");
    let graph = parse(&source)?;
    let inputs = random::inputs(&graph, &[], 0)?;
    let run = request.session(&graph)?.run(&inputs)?;
    if run.peak_bytes == run.requested_peak_bytes {
        return Ok(1);
    }
    Ok(((run.peak_bytes - run.static_bytes) / BLOCKS).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_what_a_profile_needs() {
        let request = Request {
            threads: Some(1),
            runs: 3,
            max_rows: 128,
            vector: 1 << 16,
            ..Request::default()
        };
        let device = calibrate(&request, None).unwrap();
        let t = device.teraflops;
        for rate in [Some(t.f32), t.f64, t.f16, t.bf16] {
            // Bounds for any plausible machine.
            assert!((1e-6..1e4).contains(&rate.unwrap()), "{device:?}");
        }
        assert!((1e-3..1e6).contains(&device.gigabytes_per_s), "{device:?}");
        assert!((1e-3..1e5).contains(&device.launch_us), "{device:?}");
        assert_eq!(device.granularity_bytes, 1);
        assert!(
            (1e-4..1e4).contains(&device.outside_gigabytes_per_s),
            "{device:?}"
        );
        assert!((0.0..=1.0).contains(&device.outside_busy_share));
        assert_eq!(device.sources.len(), 10);
        let named = Request {
            name: Some("mine".into()),
            ..request
        };
        assert_eq!(calibrate(&named, None).unwrap().name, "mine");
    }
}
