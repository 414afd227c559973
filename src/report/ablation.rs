//! What each way to save memory does alone, and all of them together: `frontier --levers`.
//!
//! All curves are on the same budgets and percentages are on the same step: nothing cut, moved or computed again, updates
//! of an optimizer at the end. Of several numbers of parts every budget takes the one that is cheapest there.

use super::frontier::spread;
use crate::planning::task::Task;
use ckpt_passes::compile::Request;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::offload::{By, What};
use ckpt_passes::plan::solve::MinPeak;
use ckpt_passes::plan::{Budget, BudgetGoal, Objective, Score, budgeted};
use ckpt_passes::transform::tile::{Tile, Tiles};
use ckpt_passes::{Error, Kind, Result};
use serde::Serialize;

/// One way to save memory, at every budget.
#[derive(Clone, Debug, Serialize)]
pub struct Lever {
    pub lever: &'static str,
    /// The smallest peak for which a plan is known.
    pub smallest_feasible_bytes: u64,
    pub points: Vec<LeverPoint>,
}

/// One budget; the rest is null where nothing fits into it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeverPoint {
    pub budget_bytes: u64,
    pub peak_bytes: Option<u64>,
    pub overhead_pct: Option<f64>,
    /// Into how many parts a loss and chains of ops on tokens are cut.
    pub loss_parts: Option<usize>,
    pub mlp_parts: Option<usize>,
}

/// What is tried where nothing was said about parts.
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

/// The curves; `count` budgets in equal steps from the smallest feasible one to the peak of the plain step. `graph` is
/// the model, not yet differentiated unless its file is.
///
/// # Errors
/// What any pass or planner refuses, but for budgets that nothing fits into.
pub fn levers(
    graph: &Graph,
    request: &Request,
    wish: &BudgetGoal,
    count: usize,
) -> Result<Vec<Lever>> {
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
    let cuts: Vec<Tiles> = match request.tile == Tiles::default() {
        true => TILES.to_vec(),
        false => vec![Tiles::default(), request.tile],
    };
    let planned = |tiles: &[Tiles], fused: bool| -> Result<Vec<PlanInput>> {
        let mut subjects: Vec<PlanInput> = Vec::new();
        for tiles in tiles {
            let task = task(*tiles, fused)?;
            // Cuts that change nothing are planned once.
            let same = |s: &PlanInput| {
                (s.task.loss_parts, s.task.mlp_parts) == (task.loss_parts, task.mlp_parts)
            };
            if !subjects.iter().any(same) {
                let floor = wish.smallest(&task.setting())?;
                subjects.push(PlanInput { task, floor });
            }
        }
        Ok(subjects)
    };
    let whole = [Tiles::default()];
    let mut sets = vec![
        ("recompute", planned(&whole, false)?),
        ("parts", planned(&cuts, false)?),
    ];
    if request.optimizer.is_some() {
        sets.push(("fused optimizer", planned(&whole, true)?));
        sets.push(("all", planned(&cuts, true)?));
    }
    let before = sets[0].1[0].task.before.clone();
    // Moving is weighed against computing by time.
    let moves = wish.objective == Objective::Cost && !wish.reorder;
    let least = |subjects: &[PlanInput]| subjects.iter().map(|s| s.floor.reached_bytes).min();
    let floors = sets.iter().filter_map(|(_, subjects)| least(subjects));
    let budgets = spread(
        floors.min().unwrap_or(before.peak_bytes),
        before.peak_bytes,
        count,
    );
    let mut levers = Vec::new();
    for (lever, subjects) in &sets {
        let points = points(subjects, wish, &budgets, &before)?;
        let alone = Lever {
            lever,
            smallest_feasible_bytes: least(subjects).unwrap_or(before.peak_bytes),
            points,
        };
        if moves && *lever == "recompute" {
            levers.push(moved("offload", &alone, subjects, wish, &before)?);
        }
        levers.push(alone);
    }
    let (_, most) = &sets[sets.len() - 1];
    let last = levers
        .pop()
        .ok_or_else(|| Error::bug("levers", "there is no lever"))?;
    let all = match moves {
        true => moved("all", &last, most, wish, &before)?,
        false => Lever {
            lever: "all",
            ..last.clone()
        },
    };
    if last.lever != "all" {
        levers.push(last);
    }
    levers.push(all);
    // As they are named: recompute first.
    levers.sort_by_key(|l| ORDER.iter().position(|name| *name == l.lever));
    Ok(levers)
}

const ORDER: [&str; 5] = ["recompute", "parts", "offload", "fused optimizer", "all"];

/// A step cut in one way.
struct PlanInput {
    task: Task,
    floor: MinPeak,
}

/// The cheapest of all subjects at every budget.
fn points(
    subjects: &[PlanInput],
    wish: &BudgetGoal,
    budgets: &[u64],
    before: &Score,
) -> Result<Vec<LeverPoint>> {
    let empty = |budget: &u64| LeverPoint {
        budget_bytes: *budget,
        peak_bytes: None,
        overhead_pct: None,
        loss_parts: None,
        mlp_parts: None,
    };
    let mut points: Vec<LeverPoint> = budgets.iter().map(empty).collect();
    for PlanInput { task, floor } in subjects {
        let known = vec![floor.schedule.clone()];
        let solutions = wish.frontier(&task.setting(), budgets, known)?;
        for (point, solution) in points.iter_mut().zip(solutions) {
            if let Some(solution) = solution {
                better(point, &solution.score, task, wish, before);
            }
        }
    }
    Ok(points)
}

fn better(point: &mut LeverPoint, score: &Score, task: &Task, wish: &BudgetGoal, before: &Score) {
    let percent = budgeted::overhead_pct(wish.objective, score, before);
    if point.overhead_pct.is_none_or(|known| percent < known) {
        *point = LeverPoint {
            peak_bytes: Some(score.peak_bytes),
            overhead_pct: Some(percent),
            loss_parts: task.loss_parts,
            mlp_parts: task.mlp_parts,
            ..*point
        };
    }
}

/// A lever with moving beside it: at every budget with the numbers of parts that are best without it, or that take the
/// least memory where nothing fits.
fn moved(
    lever: &'static str,
    alone: &Lever,
    subjects: &[PlanInput],
    wish: &BudgetGoal,
    before: &Score,
) -> Result<Lever> {
    let mut points = alone.points.clone();
    let mut smallest = alone.smallest_feasible_bytes;
    for point in &mut points {
        let taken = |s: &&PlanInput| {
            (s.task.loss_parts, s.task.mlp_parts) == (point.loss_parts, point.mlp_parts)
        };
        let smallest_of = || subjects.iter().min_by_key(|s| s.floor.reached_bytes);
        let found = match point.overhead_pct {
            Some(_) => subjects.iter().find(taken),
            None => smallest_of(),
        };
        let Some(PlanInput { task, .. }) = found else {
            continue;
        };
        let mut auto = task.offload;
        auto.what = What::Auto;
        let own = BudgetGoal {
            budget: Budget::Bytes(point.budget_bytes),
            ..*wish
        };
        match auto.plan(&task.setting(), By::Budget(&own)) {
            Ok(plan) => {
                smallest = smallest.min(plan.after.peak_bytes);
                better(point, &plan.after, task, wish, before);
            }
            Err(error) if error.kind() == Kind::Budget => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Lever {
        lever,
        smallest_feasible_bytes: smallest,
        points,
    })
}
