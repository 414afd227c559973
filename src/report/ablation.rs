//! The effect of each memory-saving technique alone, and of all together: `frontier --ablation`.
//!
//! All curves share their budgets. Percentages are of the same plain step: no chunks, no offloading, no recomputation, and
//! updates of the optimizer at the end. Where several chunk counts are planned, each budget takes the cheapest.

use crate::planning::task::Task;
use ckpt_passes::compile::Request;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::offload::{By, What};
use ckpt_passes::plan::solve::MinPeak;
use ckpt_passes::plan::{Budget, BudgetGoal, Objective, Score, budgeted};
use ckpt_passes::transform::tile::{Tile, Tiles};
use ckpt_passes::{Error, Kind, Result};
use serde::Serialize;

/// One technique at every budget.
#[derive(Clone, Debug, Serialize)]
pub struct Technique {
    pub technique: &'static str,
    /// The smallest peak of a known plan.
    pub smallest_feasible_bytes: u64,
    pub points: Vec<AblationPoint>,
}

/// One budget; the other fields are null where no plan fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AblationPoint {
    pub budget_bytes: u64,
    pub peak_bytes: Option<u64>,
    pub overhead_pct: Option<f64>,
    /// Chunk counts of the loss and of chains of ops on tokens.
    pub loss_parts: Option<usize>,
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
    goal: &BudgetGoal,
    count: usize,
) -> Result<Vec<Technique>> {
    let plain = Request {
        tile: Tiles::default(),
        budget: None,
        stored: None,
        fuse_optimizer: false,
        ..request.clone()
    };
    let task = |tile: Tiles, fuse_optimizer: bool| {
        let request = Request {
            tile,
            fuse_optimizer,
            ..plain.clone()
        };
        Task::of_graph(&mut graph.clone(), &request)
    };
    let chunkings: Vec<Tiles> = match request.tile == Tiles::default() {
        true => TILES.to_vec(),
        false => vec![Tiles::default(), request.tile],
    };
    let planned = |tiles: &[Tiles], fused: bool| -> Result<Vec<Candidate>> {
        let mut candidates: Vec<Candidate> = Vec::new();
        for tiles in tiles {
            let task = task(*tiles, fused)?;
            // Chunkings with equal counts are planned once.
            let same = |s: &Candidate| {
                (s.task.loss_parts, s.task.mlp_parts) == (task.loss_parts, task.mlp_parts)
            };
            if !candidates.iter().any(same) {
                let floor = goal.smallest(&task.setting())?;
                candidates.push(Candidate { task, floor });
            }
        }
        Ok(candidates)
    };
    let whole = [Tiles::default()];
    let mut sets = vec![
        ("recompute", planned(&whole, false)?),
        ("chunks", planned(&chunkings, false)?),
    ];
    if request.optimizer.is_some() {
        sets.push(("fused optimizer", planned(&whole, true)?));
        sets.push(("all", planned(&chunkings, true)?));
    }
    let before = sets[0].1[0].task.before.clone();
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
    task: Task,
    floor: MinPeak,
}

/// Returns the cheapest of all candidates at every budget.
fn points(
    candidates: &[Candidate],
    goal: &BudgetGoal,
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
    for Candidate { task, floor } in candidates {
        let known = vec![floor.schedule.clone()];
        let solutions = goal.frontier(&task.setting(), budgets, known)?;
        for (point, solution) in points.iter_mut().zip(solutions) {
            if let Some(solution) = solution {
                better(point, &solution.score, task, goal, before);
            }
        }
    }
    Ok(points)
}

fn better(
    point: &mut AblationPoint,
    score: &Score,
    task: &Task,
    goal: &BudgetGoal,
    before: &Score,
) {
    let percent = budgeted::overhead_pct(goal.objective, score, before);
    if point.overhead_pct.is_none_or(|known| percent < known) {
        *point = AblationPoint {
            peak_bytes: Some(score.peak_bytes),
            overhead_pct: Some(percent),
            loss_parts: task.loss_parts,
            mlp_parts: task.mlp_parts,
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
    goal: &BudgetGoal,
    before: &Score,
) -> Result<Technique> {
    let mut points = alone.points.clone();
    let mut smallest = alone.smallest_feasible_bytes;
    for point in &mut points {
        let taken = |s: &&Candidate| {
            (s.task.loss_parts, s.task.mlp_parts) == (point.loss_parts, point.mlp_parts)
        };
        let smallest_of = || candidates.iter().min_by_key(|s| s.floor.reached_bytes);
        let found = match point.overhead_pct {
            Some(_) => candidates.iter().find(taken),
            None => smallest_of(),
        };
        let Some(Candidate { task, .. }) = found else {
            continue;
        };
        let mut auto = task.offload;
        auto.what = What::Auto;
        let own = BudgetGoal {
            budget: Budget::Bytes(point.budget_bytes),
            ..*goal
        };
        match auto.plan(&task.setting(), By::Budget(&own)) {
            Ok(plan) => {
                smallest = smallest.min(plan.after.peak_bytes);
                better(point, &plan.after, task, goal, before);
            }
            Err(error) if error.kind() == Kind::Budget => {}
            Err(error) => return Err(error),
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
