//! The smallest peak: a bound that no schedule goes below, and the smallest peak that a search reached.
//!
//! Where it has a choice, the search recomputes ops of little weight. Which weights lead furthest depends on the model: on
//! convolutional networks, bytes of results reach peaks a tenth to a sixth below those by time, on encoders it is the other
//! way. So the search runs for each of three weights ([`WEIGHTS`]), and for each with repairs that weigh in the room that repeats
//! need and without. None of the weights is an op's cost: costs may be measured, and a reported smallest budget has to be
//! feasible when it is asked for in another run.

use super::answer::{Query, allowed_seeds};
use super::compact::{Dag, NONE};
use super::exact::{Outcome, exact};
use super::local_search::{EXACT_UNITS, FITTED, Search};
use super::work::{Effort, Work};
use super::writer::with_drops;
use crate::index::{OpIdx, ValueIdx};
use crate::objective::Objective;
use crate::problem::{Op, Problem};
use crate::schedule::{Score, evaluate};
use ckpt_error::{Error, Result};
use rayon::prelude::*;

/// The smallest peak of a problem. Bytes include static ones.
#[derive(Clone, Debug)]
pub struct MinPeak {
    /// No schedule has a smaller peak: an op needs its operands, results and temporaries at once, less what it writes over.
    pub least_bytes: u64,
    /// The smallest peak for which a plan was found.
    pub reached_bytes: u64,
    /// A plan with that peak.
    pub schedule: Vec<OpIdx>,
    /// Bytes of static values, which are resident throughout; both peaks include them.
    pub static_bytes: u64,
    /// The op whose working set is the largest; `None` where the outputs together are larger.
    pub op: Option<OpIdx>,
    /// What it needs beside static values, largest first: values of the problem and their bytes.
    pub tensors: Vec<(ValueIdx, u64)>,
}

impl MinPeak {
    /// Returns whether nothing smaller is possible.
    pub fn is_proven(&self) -> bool {
        self.reached_bytes <= self.least_bytes
    }
}

/// Returns the smallest peak that a plan was found for; no seed that honours the constraints has a smaller one. The budget does
/// not matter. [`Effort::Thorough`] looks [`THOROUGH`] times as long as others, and a number of units limits each part of the
/// search.
///
/// # Errors
/// A problem whose own order is not a schedule of it.
pub fn min_peak(problem: &Problem, query: &Query) -> Result<MinPeak> {
    let before = evaluate(problem, &problem.given_order())?;
    let seed = allowed_seeds(problem, query).min_by_key(|(peak_bytes, _)| *peak_bytes);
    let seed = seed.map(|(_, seed)| seed);
    let search = |(weigh, fitted): &(Weigh, f64)| {
        let mut weighed = problem.clone();
        for op in weighed.ops.iter_mut() {
            op.cost = weigh(problem, op);
        }
        let dag = Dag::new(&weighed, Objective::Cost, &query.constraints)?;
        of_dag(problem, &dag, &before, seed, query.effort, *fitted)
    };
    let ways = WEIGHTS.map(|weigh| [(weigh, FITTED), (weigh, 0.0)]);
    let ways = ways.as_flattened().par_iter();
    let found: Result<Vec<MinPeak>> = ways.map(search).collect();
    let lowest = found?.into_iter().min_by_key(|peak| peak.reached_bytes);
    lowest.ok_or_else(|| Error::bug("plan", "no weights were tried"))
}

/// Returns what an op weighs in a search.
type Weigh = fn(&Problem, &Op) -> f64;

/// What ops weigh: about their time, the bytes of their results, and the bytes that they read and write.
const WEIGHTS: [Weigh; 3] = [
    |problem, op| traffic_bytes(problem, op) + op.flops as f64 / FLOPS_A_BYTE,
    |problem, op| sum_of_bytes(problem, &op.outs),
    traffic_bytes,
];

/// FLOPs in the time that a byte takes; their order of magnitude on processors is all that matters here.
const FLOPS_A_BYTE: f64 = 10.0;

fn traffic_bytes(problem: &Problem, op: &Op) -> f64 {
    sum_of_bytes(problem, &op.ins) + sum_of_bytes(problem, &op.outs)
}

fn sum_of_bytes(problem: &Problem, values: &[ValueIdx]) -> f64 {
    values.iter().map(|v| problem.values[*v].bytes as f64).sum()
}

/// Returns the largest working set above static, and its op; [`NONE`] where the outputs are larger.
pub fn working_set_bytes(dag: &Dag) -> (i64, u32) {
    // At the last step all outputs are there, and what makes one of them; or it is the last op of the given order.
    let outputs: i64 = dag.outputs.iter().map(|v| dag.size[*v as usize]).sum();
    let beside = |o: u32| {
        let both = dag.ins(o).iter().chain(dag.outs(o));
        let more = both.filter(|v| !dag.is_output[**v as usize]);
        let over = dag
            .in_place_operands(o)
            .iter()
            .any(|v| !dag.is_output[*v as usize]);
        let over_bytes = if over { dag.over_bytes(o) } else { 0 };
        let sum: i64 = more.map(|v| dag.size[*v as usize]).sum();
        sum + dag.temp_bytes[o as usize] - over_bytes
    };
    let makers = dag.outputs.iter().map(|v| dag.maker[*v as usize]);
    let last = makers
        .filter(|o| *o != NONE)
        .chain((dag.ops() as u32).checked_sub(1));
    let mut most = (outputs + last.map(beside).min().unwrap_or(0), NONE);
    for o in 0..dag.ops() as u32 {
        let bytes = dag.least_bytes(o);
        if bytes >= most.0 {
            most = (bytes, o);
        }
    }
    most
}

/// How often the interval between what is impossible and what is known is halved.
const HALVINGS: usize = 10;

/// Work of the repairs that go as low as they can.
const LOWEST_UNITS: u64 = 40_000_000;
const LOWEST_UNITS_AN_OP: u64 = 10_000;

/// Work of each halving. A larger problem needs more cuts, and each cut needs more work. So a part grows with the square of the
/// number of ops, up to a limit.
const HALVING_UNITS: u64 = 4_000_000;
const HALVING_UNITS_AN_OP: u64 = 1_000;
const HALVING_UNITS_A_PAIR: u64 = 2;
const MOST_PAIR_UNITS: u64 = 160_000_000;

/// A quick search divides that part by this number.
const QUICK_SHARE: u64 = 4;

/// How much more of both where that is wanted.
const THOROUGH: u64 = 16;

/// Returns the smallest peak of a reduced problem. The search starts from the given order, then from `seed` if that is lower than
/// what it found.
///
/// # Errors
/// A bug, if the search returns no schedule of the problem.
fn of_dag(
    problem: &Problem,
    dag: &Dag,
    before: &Score,
    seed: Option<&Vec<OpIdx>>,
    effort: Effort,
    fitted: f64,
) -> Result<MinPeak> {
    let limited = |units: u64| match effort {
        Effort::First | Effort::Normal => units,
        Effort::Thorough => THOROUGH * units,
        Effort::Units(n) => units.min(n),
    };
    let (least, op) = working_set_bytes(dag);
    let held: Vec<u32> = match op {
        NONE => dag.outputs.clone(),
        op => dag.ins(op).iter().chain(dag.outs(op)).copied().collect(),
    };
    let tensor = |v: &u32| {
        (
            dag.value_in_problem[*v as usize],
            dag.size[*v as usize] as u64,
        )
    };
    let mut tensors: Vec<(ValueIdx, u64)> = held.iter().map(tensor).collect();
    tensors.sort_by_key(|(v, bytes)| (std::cmp::Reverse(*bytes), *v));
    let mut found = MinPeak {
        least_bytes: before.static_bytes + least as u64,
        // Where results must be recomputed, the given order is no plan.
        reached_bytes: match dag.turn {
            NONE => before.peak_bytes,
            _ => u64::MAX,
        },
        schedule: problem.given_order(),
        static_bytes: before.static_bytes,
        op: (op != NONE).then(|| dag.op_in_problem[op as usize]),
        tensors,
    };
    let mut note = |steps: Vec<u32>| -> Result<i64> {
        let schedule = problem.unfold(&dag.op_in_problem, &steps);
        let score = evaluate(problem, &schedule)?;
        if score.peak_bytes < found.reached_bytes {
            found.reached_bytes = score.peak_bytes;
            found.schedule = schedule;
        }
        Ok(score.peak_above_static_bytes as i64)
    };
    let given = with_drops(dag)
        .ok_or_else(|| Error::bug("plan", "a result that must be recomputed cannot be"))?;
    let mut high = match dag.turn {
        NONE => before.peak_above_static_bytes as i64,
        _ => note(given.clone())?,
    };
    // Small problems are solved exactly, wherever a search would start.
    let (below, is_small) = match exact(dag, least, &mut Work::new(EXACT_UNITS)) {
        Outcome::Unknown => (least - 1, false),
        Outcome::Optimal(made) => {
            high = note(made)?;
            (least - 1, true)
        }
        Outcome::Infeasible => (least, true),
    };
    let seed = seed.map(|seed| dag.from_problem(seed));
    for (nth, start) in [given].into_iter().chain(seed).enumerate() {
        if nth > 0 {
            let peak = note(start.clone())?;
            if peak >= high {
                break;
            }
            high = peak;
        }
        let mut low = below;
        if !is_small {
            let units = LOWEST_UNITS + LOWEST_UNITS_AN_OP * dag.ops() as u64;
            let mut work = Work::new(limited(units));
            let mut search = Search::new(dag, least, &mut work);
            search.fitted = fitted;
            if let Some(made) = search.lowest(&start) {
                high = high.min(note(made)?);
            }
        }
        let ops = dag.ops() as u64;
        let of_pairs = (HALVING_UNITS_A_PAIR * ops * ops).min(MOST_PAIR_UNITS);
        let of_pairs = match effort {
            Effort::First => of_pairs / QUICK_SHARE,
            _ => of_pairs,
        };
        let units = limited(HALVING_UNITS + HALVING_UNITS_AN_OP * ops + of_pairs);
        for _ in 0..HALVINGS {
            let middle = low + (high - low) / 2;
            if middle <= low || middle < least {
                break;
            }
            let found = match exact(dag, middle, &mut Work::new(EXACT_UNITS)) {
                Outcome::Optimal(made) => Some(made),
                Outcome::Infeasible => None,
                Outcome::Unknown => {
                    let mut work = Work::new(units);
                    let mut search = Search::new(dag, middle, &mut work);
                    search.fitted = fitted;
                    search.any()
                }
            };
            match found {
                Some(made) => high = middle.min(note(made)?),
                None => low = middle,
            }
        }
    }
    Ok(found)
}
