//! The documents of packed sequences: which keys a block of queries has to read.
//!
//! Keys before the first and after the last one of any segment that the queries have are not read, so documents that follow each
//! other cost no products with each other. This depends on the data, but no buffer does. On a device the segments stay there,
//! and all keys are read.

use crate::runtime::kernels::context::*;
use ckpt_passes::ops::attention::AttentionPlan;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// The segments of all keys.
pub struct Segments {
    /// int64 [L…, keys].
    pub of: Tensor,
    /// What the host knows of each index of the leading axes; empty where it reads nothing.
    known: Vec<Known>,
}

struct Known {
    /// The keys that each block of queries meets.
    met: Vec<Range<i64>>,
    /// For each key, where the run of keys of its segment around it ends.
    run_ends: Vec<i64>,
}

impl Segments {
    /// Reads the segments for the blocks of queries of a plan.
    ///
    /// # Errors
    /// Segments that do not number the keys; fewer keys than queries.
    pub fn new(cx: &KernelCx, segments: &Tensor, plan: &AttentionPlan) -> Result<Segments> {
        let (queries, keys) = (plan.band.queries, plan.band.keys);
        let dims: Vec<i64> = plan.lead.iter().copied().chain([keys]).collect();
        let fits = segments.size().last() == Some(&keys) && queries <= keys;
        let of = segments
            .f_expand(dims.as_slice(), false)
            .ok()
            .filter(|_| fits);
        let of = of.ok_or_else(|| {
            cx.shape_error("the segments do not number the keys")
                .expected(format!(
                    "{dims:?}, at least as many keys as the {queries} queries"
                ))
                .found(format!("{:?}", segments.size()))
        })?;
        let is_read =
            of.device() == Device::Cpu && of.stride().last() == Some(&1) && plan.skips_keys();
        let leads = if is_read { plan.lead_count() } else { 0 };
        let known = (0..leads).map(|lead| {
            let own = at_lead(&of, &plan.lead, lead);
            let numbers = Vec::<i64>::try_from(&own).map_err(|e| tch_error(&e))?;
            Ok(Known::new(&numbers, queries, plan.rows_at_once))
        });
        let known = known.collect::<Result<_>>()?;
        Ok(Segments { of, known })
    }

    /// Returns those of `keys` that a block of queries meets.
    pub fn met(&self, lead: i64, block: i64, keys: Range<i64>) -> Range<i64> {
        let Some(known) = self.known.get(lead as usize) else {
            return keys;
        };
        let met = &known.met[block as usize];
        let start = met.start.clamp(keys.start, keys.end);
        start..met.end.clamp(start, keys.end)
    }

    /// Returns true if all these keys are known to be of one segment.
    pub fn are_one(&self, lead: i64, ranges: [&Range<i64>; 2]) -> bool {
        let [a, b] = ranges;
        let (start, end) = (a.start.min(b.start), a.end.max(b.end));
        let known = self.known.get(lead as usize);
        known.is_some_and(|k| k.run_ends[start as usize] >= end)
    }
}

/// Returns `x` at index `lead` of its leading axes: [heads, rows, columns]. Axes of size 1 are broadcast.
pub fn at_lead(x: &Tensor, dims: &[i64], lead: i64) -> Tensor {
    let mut at = x.alias();
    let (mut rest, mut after) = (lead, dims.iter().product::<i64>());
    for dim in dims {
        after /= dim;
        let index = if at.size()[0] == 1 { 0 } else { rest / after };
        rest %= after;
        at = at.select(0, index);
    }
    at
}

impl Known {
    fn new(segments: &[i64], queries: i64, step: i64) -> Known {
        let mut spans: FxHashMap<i64, Range<i64>> = FxHashMap::default();
        for (key, segment) in (0..).zip(segments) {
            let span = spans.entry(*segment).or_insert(key..key);
            span.end = key + 1;
        }
        let own = &segments[segments.len() - queries as usize..];
        let met = own.chunks(step as usize).map(|block| {
            let all = block.iter().map(|s| spans[s].clone());
            let join = |a: Range<i64>, b: Range<i64>| a.start.min(b.start)..a.end.max(b.end);
            all.reduce(join).unwrap_or(0..0)
        });
        let met = met.collect();
        let mut run_ends = vec![segments.len() as i64; segments.len()];
        for key in (1..segments.len()).rev() {
            run_ends[key - 1] = match segments[key - 1] == segments[key] {
                true => run_ends[key],
                false => key as i64,
            };
        }
        Known { met, run_ends }
    }
}
