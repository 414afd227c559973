//! Measures the link between ranks: how long each collective takes, by the bytes that a rank receives.
//!
//! A small tensor gives the latency of a collective, a large one its bandwidth. The times are those of rank 0, and include the
//! wait for the slowest rank.

use super::calibrate::{Link, Request, times};
use crate::runtime::ranks::{DATA_PARALLEL, RankOptions, Ranks};
use ckpt_passes::Result;
use ckpt_passes::ops::collective::slice_size;

/// Elements of the small tensor for each rank.
const SMALL: u64 = 1024;

/// A collective: how a graph calls it, and how often a rank receives the slices of all others.
struct Collective {
    op: &'static str,
    takes_slice: bool,
    gives_slice: bool,
    times: u64,
}

/// The one that plans may repeat: its figures price the link.
const GATHER: Collective = Collective {
    op: "AllGather",
    takes_slice: true,
    gives_slice: false,
    times: 1,
};

const SUMS: [Collective; 2] = [
    Collective {
        op: "ReduceScatter",
        takes_slice: false,
        gives_slice: true,
        times: 1,
    },
    Collective {
        op: "AllReduce",
        takes_slice: false,
        gives_slice: false,
        times: 2,
    },
];

impl Collective {
    /// Returns a graph of one node over tensors of so many elements.
    fn graph(&self, elements: u64, ranks: usize) -> String {
        let (whole, slice) = (
            format!("f32[{elements}]"),
            format!("f32[{}]", slice_size(elements as i64, ranks as i64)),
        );
        let (more, operands) = match self.takes_slice {
            true => (format!(", %s: {slice}"), "%x, %s"),
            false => (String::new(), "%x"),
        };
        let result = if self.gives_slice { &slice } else { &whole };
        format!(
            "graph @exchange typed (%x: {whole}{more}) -> (%y) {{\n  %y = {} {operands} {{group=\"{DATA_PARALLEL}\", \
             ranks={ranks}}} : {result}\n}}\n",
            self.op
        )
    }

    /// Returns the bandwidth in 10⁹ bytes a second, the latency in microseconds, and how both were measured.
    fn measure(&self, request: &Request, ranks: usize) -> Result<(f64, f64, String)> {
        let time_us = |elements: u64| -> Result<f64> {
            let nodes = times(request, &self.graph(elements, ranks))?;
            Ok(nodes.iter().sum::<f64>().max(1e-3))
        };
        let n = ranks as u64;
        let received = |elements: u64| self.times * (4 * elements - 4 * elements / n);
        let (small, large) = (SMALL * n, request.vector.max(2 * SMALL * n));
        let (small_us, large_us) = (time_us(small)?, time_us(large)?);
        // Where noise hides what the bytes take, they get the whole time: the bandwidth is at least that.
        let (bytes, us) = match large_us > 1.1 * small_us {
            true => (received(large) - received(small), large_us - small_us),
            false => (received(large), large_us),
        };
        let gigabytes_per_s = bytes as f64 / us / 1e3;
        let how = format!(
            "{} over {ranks} ranks: {small_us:.0} us for {} bytes that a rank receives, {large_us:.0} us for {}: \
             {gigabytes_per_s:.3} GB/s; medians of {} runs",
            self.op,
            received(small),
            received(large),
            request.runs
        );
        Ok((gigabytes_per_s, small_us, how))
    }
}

/// Measures the link between the ranks that run this.
///
/// # Errors
/// Another rank is gone, too late, or measures something else.
pub fn link(request: &Request, options: &RankOptions) -> Result<Link> {
    let ranks = Ranks::join(options, request.place)?;
    let settings = format!("{} runs of {} numbers", request.runs, request.vector);
    ranks.agree("measurement", &settings)?;
    ranks.open(DATA_PARALLEL)?;
    let (gigabytes_per_s, us, how) = GATHER.measure(request, ranks.ranks)?;
    let mut sources = vec![format!("link_gigabytes_per_s and link_us: {how}")];
    for collective in &SUMS {
        sources.push(collective.measure(request, ranks.ranks)?.2);
    }
    // Rank 0 may serve the store.
    ranks.agree("end of the measurement", "")?;
    Ok(Link {
        gigabytes_per_s,
        us,
        sources,
    })
}
