//! `plan`, `frontier` and `diff`: plan without writing a model.

use super::options::plan::{DiffArgs, FrontierArgs, PlanArgs};
use super::output::{warn, write_json};
use super::progress;
use ckpt_opt::emit::file::write_whole;
use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::planning::maximize::{self, maximize};
use ckpt_opt::planning::read;
use ckpt_opt::planning::report::{Report, compare, left_out};
use ckpt_opt::planning::step::TrainingStep;
use ckpt_opt::report::ablation::ablation;
use ckpt_opt::report::advice::advice;
use ckpt_opt::report::difference::Difference;
use ckpt_opt::report::frontier::Frontier;
use ckpt_opt::report::svg::svg;
use ckpt_opt::report::written;
use ckpt_passes::compile::Request;
use ckpt_passes::plan::{Budget, Goal, Plan};
use ckpt_passes::{Error, Result};

pub fn run(args: &PlanArgs) -> Result<()> {
    let mut request = args.step.request();
    args.goal.apply(&mut request)?;
    request.plan.wants_min_peak = !args.no_smallest;
    request.plan.skips_proof = args.no_proof;
    let (step, outcome, maximized) = match &args.maximize {
        Some(dim) => {
            if read::is_cost_graph(&args.source) {
                return Err(Error::usage("maximize", "a cost graph has no named sizes"));
            }
            let _progress = progress::step("looking for the largest size");
            let model = load(&args.source, &args.step.training.source.given()?)?;
            let goal = maximize::Goal {
                dim,
                max_overhead_pct: args.max_overhead,
            };
            let (step, outcome, found) = maximize(&model.graph, &request, &goal)?;
            (step, outcome, Some(found))
        }
        None => {
            let _progress = progress::step("planning");
            let given = args.step.training.source.given()?;
            let step = TrainingStep::read(&args.source, &given, &request)?;
            let outcome = step.plan(&request)?;
            (step, outcome, None)
        }
    };
    let mut report = Report::new(&step, &outcome, args.goal.search.objective);
    report.maximized = maximized;
    report.warnings.extend(advice(&step, &outcome)?);
    if args.compare {
        report.compare = Some(compare(&step, &request.plan)?);
        report.compare_left_out = left_out(&step);
    }
    if let Some(path) = &args.plan_out {
        write_json(path, &outcome.plan)?;
    }
    args.views.write_plan(&args.source, &step, &outcome)?;
    let has_written = args.plan_out.is_some() || !args.views.files.is_empty();
    if args.console.quiet && has_written && !args.console.is_json() {
        return Ok(());
    }
    args.console
        .print(&report, &report.warnings, || report.human())
}

pub fn frontier(args: &FrontierArgs) -> Result<()> {
    let mut request = args.step.request();
    args.prices.apply(&mut request)?;
    let frontier = {
        let _progress = progress::step("planning");
        let given = args.step.training.source.given()?;
        let step = TrainingStep::read(&args.source, &given, &request)?;
        let goal = args.search.request(Goal::Budget(Budget::Auto));
        let points = args.points as usize;
        let mut frontier = Frontier::new(&step, &goal, &args.budgets, points)?;
        if args.ablation {
            if read::is_cost_graph(&args.source) {
                return Err(Error::usage(
                    "ablation",
                    "a cost graph has no ops to chunk or move",
                ));
            }
            let model = load(&args.source, &args.step.training.source.given()?)?;
            frontier.ablation = ablation(&model.graph, &request, &goal, points)?;
        }
        frontier
    };
    if let Some(path) = &args.svg {
        let name = args
            .source
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        let dims: Vec<String> = frontier
            .dims
            .iter()
            .map(|(n, size)| format!("{n}={size}"))
            .collect();
        let title = format!("{name} {}", dims.join(" "));
        write_whole(path, svg(&frontier, title.trim_end()).as_bytes())?;
    }
    if args.console.quiet && args.svg.is_some() && !args.console.is_json() {
        return Ok(());
    }
    args.console
        .print(&frontier, &frontier.warnings, || frontier.human())
}

pub fn diff(args: &DiffArgs) -> Result<()> {
    let (a, b) = (stored(args, &args.a)?, stored(args, &args.b)?);
    let difference = Difference::new(&a, &b)?;
    args.console.print(&difference, &[], || difference.human())
}

/// Reads a plan: from JSON, or from the nodes of a training graph.
fn stored(args: &DiffArgs, path: &std::path::Path) -> Result<Plan> {
    if read::is_cost_graph(path) {
        return read::plan(path);
    }
    let mut model = load(path, &Given::default())?;
    let request = Request {
        dims: args.dims.clone(),
        ..Request::default()
    };
    warn(&model.warnings);
    let read = written::read(&mut model.graph, &request);
    let (_, outcome) = read.map_err(|e| e.at(path.display().to_string()))?;
    Ok(outcome.plan)
}
