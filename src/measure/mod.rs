//! What planning may rest on instead of assumptions, measured in our own runtime: [`calibrate`] a device, [`profile`] the
//! nodes of a model; and what came of a plan, the [`overhead`] of its step.
//!
//! All run graphs through the executor that runs everything else, so that a time contains what a node really takes
//! here: dispatch, the kernel, first touches of fresh memory, and giving memory back.

pub mod calibrate;
pub mod overhead;
pub mod profile;

/// The median; of an even number of samples the lower one of the middle. Samples are finite.
fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len().saturating_sub(1) / 2;
    samples.get(middle).copied().unwrap_or(0.0)
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
