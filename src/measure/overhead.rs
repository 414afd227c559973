//! Measures how much longer a step of one graph takes than a step of another.
//!
//! Both graphs run once, so that their pages are mapped. Then they run in turns, in the order AB, BA, AB, …, so that slow
//! phases of the machine affect both and drifts cancel. Each pair gives the ratio of the two times. A disturbance is as
//! likely to slow one step of a pair as the other, so the logarithms of the ratios are distributed symmetrically around the
//! logarithm of the true ratio. The method further assumes only that pairs are independent. The centre is the Hodges–Lehmann
//! estimate (Estimates of Location Based on Rank Tests, 1963): the median of the means of all pairs of samples. The 95 %
//! interval is Tukey's, from the signed-rank test (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 2014,
//! §3.2 and §3.3). The duration is fixed beforehand, because stopping at a pleasing result would bias it.

use super::{at_sizes, median};
use crate::comparison::{Pair, PairRequest};
use crate::runtime::device;
use crate::runtime::session::{self, Session};
use crate::tensors::feed::Feed;
use crate::tensors::random;
use crate::units::bytes;
use ckpt_passes::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The fewest pairs that give an interval with 95 % confidence.
pub const LEAST_PAIRS: usize = 6;
/// The evaluation takes time quadratic in the number of pairs.
pub const MOST_PAIRS: usize = 1000;

/// One of the two graphs.
#[derive(Clone, Debug, Serialize)]
pub struct Ran {
    /// Path of the graph's file, as it was given.
    pub file: String,
    /// Elapsed and processor time of the median step, in microseconds.
    pub step_time_us: f64,
    /// Processor time of all threads.
    pub step_cpu_us: f64,
    /// Measured peak of a step; 0 where the device does not say.
    pub peak_bytes: u64,
    /// Bytes of inputs and weights, which are part of the peak.
    pub static_bytes: u64,
}

/// How much more B takes, in percent of A's step.
#[derive(Clone, Debug, Serialize)]
pub struct More {
    /// The estimate; negative where B takes less.
    pub pct: f64,
    /// The 95 % confidence interval.
    pub low_pct: f64,
    /// Upper end of the interval.
    pub high_pct: f64,
}

/// The result of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The graph that B is compared with.
    pub a: Ran,
    /// The graph whose overhead is measured.
    pub b: Ran,
    /// Steps that each graph ran. A warm-up step before them is not counted.
    pub pairs: usize,
    /// How much more elapsed time B takes than A, measured for each pair of steps.
    pub time: More,
    /// The same for processor time. Other load disturbs it less, but it counts waiting threads as busy.
    pub cpu: More,
    /// The median difference of two consecutive steps of A, in percent.
    pub noise_pct: f64,
    /// Named sizes of the run.
    pub dims: BTreeMap<String, i64>,
    /// Name of the device that both graphs ran on.
    pub device: String,
    /// Threads that one kernel may use.
    pub threads: usize,
    /// Warnings from loading the graphs and their tensors.
    pub warnings: Vec<String>,
}

/// Elapsed and processor time, in microseconds.
type Took = [f64; 2];

/// Measures two graphs. New pairs begin until `time` has passed and there are [`LEAST_PAIRS`], at most [`MOST_PAIRS`].
///
/// # Errors
/// Graphs that are not a pair, or that cannot be run.
pub fn overhead(request: &PairRequest, time: Duration) -> Result<Measured> {
    let tensors = request.tensors()?;
    let mut pair = Pair::load(&request.a, &request.b, &tensors)?;
    let mut feed = Feed::new(&pair.b, tensors)?;
    feed.start_training(&pair.b);
    let mut warnings = std::mem::take(&mut pair.warnings);
    warnings.append(&mut feed.notes);
    let binding = random::fill(&pair.b, &mut feed, &request.dims, request.seed)?;
    let open = |graph| -> Result<Session<'_>> {
        let mut session = request.open(graph, &feed.weights)?;
        session.go_on(true);
        Ok(session)
    };
    let graphs = [request.on_device(&pair.a)?, request.on_device(&pair.b)?];
    let sessions = [open(&graphs[0])?, open(&graphs[1])?];
    let files = [&request.a, &request.b];
    let mut steps: [Vec<Took>; 2] = Default::default();
    let mut peaks = [(0, 0); 2];
    let mut step = |which: usize| -> Result<Took> {
        let done = sessions[which]
            .step(&feed.inputs, &|_| false)
            .map_err(|e| e.at(files[which].display().to_string()))?;
        peaks[which] = (done.peak_bytes, done.static_bytes);
        Ok([done.time_us as f64, done.cpu_us as f64])
    };
    step(0)?;
    step(1)?;
    let started = Instant::now();
    let is_enough = |pairs| pairs >= LEAST_PAIRS && started.elapsed() >= time;
    while !is_enough(steps[0].len()) && steps[0].len() < MOST_PAIRS {
        let first = steps[0].len() % 2;
        for which in [first, 1 - first] {
            let took = step(which)?;
            steps[which].push(took);
        }
    }
    let [of_a, of_b] = &steps;
    let more = |kind: usize| {
        let pairs = of_a.iter().zip(of_b);
        more(&pairs.map(|(a, b)| (a[kind], b[kind])).collect::<Vec<_>>())
    };
    let apart = of_a.windows(2).map(|w| percent(w[0][0], w[1][0]).abs());
    let ran = |which: usize| Ran {
        file: files[which].display().to_string(),
        step_time_us: median(steps[which].iter().map(|s| s[0]).collect()),
        step_cpu_us: median(steps[which].iter().map(|s| s[1]).collect()),
        peak_bytes: peaks[which].0,
        static_bytes: peaks[which].1,
    };
    let named = binding.iter().filter(|(n, _)| !n.starts_with('?'));
    Ok(Measured {
        a: ran(0),
        b: ran(1),
        pairs: of_a.len(),
        time: more(0),
        cpu: more(1),
        noise_pct: median(apart.collect()),
        dims: named.map(|(n, size)| (n.to_string(), size)).collect(),
        device: device::of(request.place).name(),
        threads: session::threads(),
        warnings,
    })
}

/// Returns how much larger `b` is, in percent.
fn percent(a: f64, b: f64) -> f64 {
    100.0 * (b / a.max(f64::MIN_POSITIVE) - 1.0)
}

/// Estimates how much more the second of each pair takes, with its confidence interval.
fn more(pairs: &[(f64, f64)]) -> More {
    let logs: Vec<f64> = pairs
        .iter()
        .map(|(a, b)| (b.max(f64::MIN_POSITIVE) / a.max(f64::MIN_POSITIVE)).ln())
        .collect();
    // Walsh averages: the means of all pairs of samples, each sample with itself included.
    let mut means: Vec<f64> = (0..logs.len())
        .flat_map(|i| logs[i..].iter().map(move |y| (i, y)))
        .map(|(i, y)| (logs[i] + y) / 2.0)
        .collect();
    means.sort_by(f64::total_cmp);
    let out = left_out(logs.len());
    let at = |i: usize| means.get(i).map_or(0.0, |log| 100.0 * (log.exp() - 1.0));
    let last = means.len().saturating_sub(1);
    More {
        pct: (at(last / 2) + at(last - last / 2)) / 2.0,
        low_pct: at(out),
        high_pct: at(last - out),
    }
}

/// Returns how many Walsh averages of `n` samples to drop at each end for a 95 % interval of the centre: the 2.5 % quantile of
/// the signed-rank sum.
fn left_out(n: usize) -> usize {
    if n > 50 {
        // The normal approximation is exact to a fraction of a percent.
        let n = n as f64;
        let deviation = (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
        return (n * (n + 1.0) / 4.0 - 1.96 * deviation) as usize;
    }
    // The distribution of the sum of the first ranks.
    let mut shares = vec![1.0];
    for rank in 1..=n {
        let mut longer = vec![0.0; shares.len() + rank];
        for (sum, share) in shares.iter().enumerate() {
            longer[sum] += share / 2.0;
            longer[sum + rank] += share / 2.0;
        }
        shares = longer;
    }
    let mut below = 0.0;
    let within = shares.iter().take_while(|share| {
        below += **share;
        below <= 0.025
    });
    within.count().saturating_sub(1)
}

impl More {
    fn human(&self) -> String {
        format!(
            "{:.1} % ({:.1} to {:.1})",
            self.pct, self.low_pct, self.high_pct
        )
    }
}

impl Measured {
    /// Formats the result in a few lines.
    pub fn human(&self) -> String {
        let ran = |name: &str, ran: &Ran| {
            format!(
                "{name}  step {:.3} ms, peak {}  {}\n",
                ran.step_time_us / 1e3,
                bytes(ran.peak_bytes),
                ran.file
            )
        };
        format!(
            "{}{}B takes {} more time, {} more processor time\nof {} pairs of steps{}, with 95 % intervals; steps of A after each other are {:.1} % apart\n",
            ran("A", &self.a),
            ran("B", &self.b),
            self.time.human(),
            self.cpu.human(),
            self.pairs,
            at_sizes(&self.dims),
            self.noise_pct
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_holds_the_centre_19_times_of_20() {
        // Tables of the signed-rank test, two-sided, 5 %: the largest sum that is significant.
        for (n, sum) in [
            (6, 0),
            (7, 2),
            (8, 3),
            (10, 8),
            (15, 25),
            (20, 52),
            (30, 137),
            (50, 434),
        ] {
            assert_eq!(left_out(n), sum, "{n}");
        }
        assert_eq!((left_out(0), left_out(5)), (0, 0));
        // Exactly these are 453, 1955 and 8444: an interval is never narrower.
        assert_eq!([51, 100, 200].map(left_out), [453, 1954, 8443]);
        let pairs: Vec<(f64, f64)> = (-3..=3)
            .map(|i| (1.0, (f64::from(i) / 100.0).exp()))
            .collect();
        let found = more(&pairs);
        let ends = [found.low_pct, found.pct, found.high_pct].map(|p| (p / 100.0).ln_1p());
        for (end, expected) in ends.iter().zip([-0.02, 0.0, 0.02]) {
            assert!((end - expected).abs() < 1e-9, "{found:?}");
        }
    }

    #[test]
    fn a_drift_that_both_share_cancels() {
        // The machine slows by a percent a step; B takes a tenth more.
        let took = |n: i32, work: f64| work * 1.01f64.powi(n);
        let pairs = (0..40).map(|i| match i % 2 {
            0 => (took(2 * i, 1.0), took(2 * i + 1, 1.1)),
            _ => (took(2 * i + 1, 1.0), took(2 * i, 1.1)),
        });
        let found = more(&pairs.collect::<Vec<_>>());
        assert!((found.pct - 10.0).abs() < 1e-6, "{found:?}");
    }
}
