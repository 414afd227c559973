//! Measurements in our own runtime: [`calibrate`] a device and the [`link`] between ranks, [`profile`] the nodes of a model, and the [`overhead`] of a plan.
//!
//! All run graphs through the same executor as `run`. So a time contains everything that a node costs: dispatch, the kernel,
//! first touches of fresh memory, and freeing memory.

pub mod calibrate;
pub mod link;
pub mod overhead;
pub mod profile;

use std::collections::BTreeMap;

/// Returns the median of finite samples; for an even number, the lower of the two in the middle.
fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len().saturating_sub(1) / 2;
    samples.get(middle).copied().unwrap_or(0.0)
}

/// Formats sizes as ` at batch=2, seq=7`; empty without sizes.
pub fn at_sizes(dims: &BTreeMap<String, i64>) -> String {
    let dims: Vec<String> = dims.iter().map(|(n, size)| format!("{n}={size}")).collect();
    match dims.is_empty() {
        true => String::new(),
        false => format!(" at {}", dims.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.0);
        assert_eq!(median(vec![]), 0.0);
    }
}
