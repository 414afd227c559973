//! The effect of each memory-saving technique alone, and of all together: `frontier --ablation`.
//!
//! All curves share their budgets. Percentages are of the same plain step: no chunks, no offloading, no recomputation, and
//! updates of the optimizer at the end. Where several chunk counts are planned, each budget takes the cheapest.

use crate::planning::step::TrainingStep;
use ckpt_passes::compile::Request;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::on_device::{frontier, smallest_peak};
use ckpt_passes::plan::solve::min_peak::MinPeak;
use ckpt_passes::plan::{
    Budget, Objective, Offload, OffloadSet, PlanRequest, Policy, Score, offload,
};
use ckpt_passes::transform::tile::{Tile, Tiles};
use ckpt_passes::{Error, Result};
use serde::Serialize;

/// One technique at every budget.
#[derive(Clone, Debug, Serialize)]
pub struct Technique {
    /// `recompute`, `chunks`, `offload`, `fused optimizer` or `all`.
    pub technique: &'static str,
    /// The smallest peak of a known plan.
    pub smallest_feasible_bytes: u64,
    /// One point for each budget, smallest first; all techniques share the budgets.
    pub points: Vec<AblationPoint>,
}

/// One budget; the other fields are null where no plan fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AblationPoint {
    /// The budget, as a peak with static bytes.
    pub budget_bytes: u64,
    /// Peak of the plan, at most the budget.
    pub peak_bytes: Option<u64>,
    /// Overhead of the plan by the objective, in percent of the plain step.
    pub overhead_pct: Option<f64>,
    /// Chunk counts of the loss and of chains of ops on tokens.
    pub loss_parts: Option<usize>,
    /// Chunk count of those chains; null where they are whole.
    pub mlp_parts: Option<usize>,
}

/// Returns budgets in equal steps over the whole range, both ends included.
pub(super) fn spread(least: u64, most: u64, count: usize) -> Vec<u64> {
    let steps = count.saturating_sub(1).max(1) as u128;
    let width = most.saturating_sub(least) as u128;
    let mut all: Vec<u64> = (0..=steps)
        .map(|i| least + (width * i / steps) as u64)
        .collect();
    all.dedup();
    all
}

/// Chunkings that are tried where the request names none.
const TILES: [Tiles; 4] = {
    const fn tiles(loss: Tile, mlp: Tile) -> Tiles {
        Tiles { loss, mlp }
    }
    [
        tiles(Tile::Off, Tile::Off),
        tiles(Tile::Auto, Tile::Off),
        tiles(Tile::Doubled(1), Tile::Off),
        tiles(Tile::Auto, Tile::Auto),
    ]
};

/// Plans with each technique at `count` budgets, in equal steps from the smallest feasible one to the peak of the plain
/// step. `graph` is the model, not yet differentiated unless its file is.
///
/// # Errors
/// What any pass or planner refuses, except budgets without a plan.
pub fn ablation(
    graph: &Graph,
    request: &Request,
    goal: &PlanRequest,
    count: usize,
) -> Result<Vec<Technique>> {
    let plain = Request {
        tile: Tiles::default(),
        // Chunk counts follow their rules.
        plan: PlanRequest {
            offload: request.plan.offload,
            ..Policy::NONE.into()
        },
        ..request.clone()
    };
    let step = |tile: Tiles, fuse: bool| {
        let mut request = Request {
            tile,
            ..plain.clone()
        };
        request.updates.fuse = fuse;
        TrainingStep::of_graph(&mut graph.clone(), &request)
    };
    let chunkings: Vec<Tiles> = match request.tile == Tiles::default() {
        true => TILES.to_vec(),
        false => vec![Tiles::default(), request.tile],
    };
    let planned = |tiles: &[Tiles], fused: bool| -> Result<Vec<Candidate>> {
        let mut candidates: Vec<Candidate> = Vec::new();
        for tiles in tiles {
            let step = step(*tiles, fused)?;
            // Chunkings with equal counts are planned once.
            let same = |s: &Candidate| chunks(&s.step) == chunks(&step);
            if !candidates.iter().any(same) {
                let floor = smallest_peak(&step.input, goal)?;
                candidates.push(Candidate { step, floor });
            }
        }
        Ok(candidates)
    };
    let whole = [Tiles::default()];
    let mut sets = vec![
        ("recompute", planned(&whole, false)?),
        ("chunks", planned(&chunkings, false)?),
    ];
    if request.updates.may_fuse() {
        sets.push(("fused optimizer", planned(&whole, true)?));
        sets.push(("all", planned(&chunkings, true)?));
    }
    let before = sets[0].1[0].step.before.clone();
    // Offloading and recomputation are compared by time.
    let offloads = goal.objective == Objective::Cost && !goal.reorder;
    let least = |candidates: &[Candidate]| candidates.iter().map(|s| s.floor.reached_bytes).min();
    let floors = sets.iter().filter_map(|(_, candidates)| least(candidates));
    let budgets = spread(
        floors.min().unwrap_or(before.peak_bytes),
        before.peak_bytes,
        count,
    );
    let mut techniques = Vec::new();
    for (technique, candidates) in &sets {
        let points = points(candidates, goal, &budgets, &before)?;
        let alone = Technique {
            technique,
            smallest_feasible_bytes: least(candidates).unwrap_or(before.peak_bytes),
            points,
        };
        if offloads && *technique == "recompute" {
            techniques.push(with_offload("offload", &alone, candidates, goal, &before)?);
        }
        techniques.push(alone);
    }
    let (_, most) = &sets[sets.len() - 1];
    let last = techniques
        .pop()
        .ok_or_else(|| Error::bug("ablation", "there is no technique"))?;
    let all = match offloads {
        true => with_offload("all", &last, most, goal, &before)?,
        false => Technique {
            technique: "all",
            ..last.clone()
        },
    };
    if last.technique != "all" {
        techniques.push(last);
    }
    techniques.push(all);
    techniques.sort_by_key(|l| ORDER.iter().position(|name| *name == l.technique));
    Ok(techniques)
}

const ORDER: [&str; 5] = ["recompute", "chunks", "offload", "fused optimizer", "all"];

/// The step with one chunking.
struct Candidate {
    step: TrainingStep,
    floor: MinPeak,
}

/// Returns the cheapest of all candidates at every budget.
fn points(
    candidates: &[Candidate],
    goal: &PlanRequest,
    budgets: &[u64],
    before: &Score,
) -> Result<Vec<AblationPoint>> {
    let empty = |budget: &u64| AblationPoint {
        budget_bytes: *budget,
        peak_bytes: None,
        overhead_pct: None,
        loss_parts: None,
        mlp_parts: None,
    };
    let mut points: Vec<AblationPoint> = budgets.iter().map(empty).collect();
    for Candidate { step, floor } in candidates {
        let known = vec![floor.schedule.clone()];
        let solutions = frontier(&step.input, goal, budgets, known)?;
        for (point, solution) in points.iter_mut().zip(solutions) {
            if let Some(solution) = solution {
                better(point, &solution.score, step, goal, before);
            }
        }
    }
    Ok(points)
}

/// Returns the chunk counts of the loss and of chains of ops on tokens.
fn chunks(step: &TrainingStep) -> (Option<usize>, Option<usize>) {
    (step.input.chunks.loss, step.input.chunks.mlp)
}

fn better(
    point: &mut AblationPoint,
    score: &Score,
    step: &TrainingStep,
    goal: &PlanRequest,
    before: &Score,
) {
    let percent = goal.objective.overhead_pct(score, before);
    if point.overhead_pct.is_none_or(|known| percent < known) {
        let (loss_parts, mlp_parts) = chunks(step);
        *point = AblationPoint {
            peak_bytes: Some(score.peak_bytes),
            overhead_pct: Some(percent),
            loss_parts,
            mlp_parts,
            ..*point
        };
    }
}

/// Adds offloading to a technique: at every budget with the chunk counts that are best without it, or those with the
/// smallest peak where no plan fits.
fn with_offload(
    technique: &'static str,
    alone: &Technique,
    candidates: &[Candidate],
    goal: &PlanRequest,
    before: &Score,
) -> Result<Technique> {
    let mut points = alone.points.clone();
    let mut smallest = alone.smallest_feasible_bytes;
    for point in &mut points {
        let taken = |s: &&Candidate| chunks(&s.step) == (point.loss_parts, point.mlp_parts);
        let smallest_of = || candidates.iter().min_by_key(|s| s.floor.reached_bytes);
        let found = match point.overhead_pct {
            Some(_) => candidates.iter().find(taken),
            None => smallest_of(),
        };
        let Some(Candidate { step, .. }) = found else {
            continue;
        };
        let own = PlanRequest {
            offload: Offload {
                set: OffloadSet::Auto,
                ..goal.offload
            },
            ..goal.with_budget(Budget::Bytes(point.budget_bytes))
        };
        match offload::plan(&step.input, &own) {
            Ok(plan) => {
                smallest = smallest.min(plan.after.peak_bytes);
                better(point, &plan.after, step, goal, before);
            }
            Err(failure) if failure.is_infeasible() => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(Technique {
        technique,
        smallest_feasible_bytes: smallest,
        points,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_in_equal_steps() {
        assert_eq!(spread(10, 20, 3), [10, 15, 20]);
        assert_eq!(spread(10, 10, 5), [10]);
        assert_eq!(spread(0, u64::MAX, 2), [0, u64::MAX]);
        assert_eq!(spread(3, 9, 1), [3, 9]);
    }
}
