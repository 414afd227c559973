//! `plan`, `frontier` and `diff`: plans without writing a model.

use super::args::Format;
use super::args::planning::{DiffArgs, FrontierArgs, PlanArgs};
use super::{progress, result, result_json, warn, write_json};
use ckpt_opt::emit::file::write_whole;
use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::planning::maximize::{self, PolicyOverride};
use ckpt_opt::planning::read;
use ckpt_opt::planning::report::{Report, compare, left_out};
use ckpt_opt::planning::task::{Goal, Task};
use ckpt_opt::report::ablation::levers;
use ckpt_opt::report::difference::Difference;
use ckpt_opt::report::frontier::Frontier;
use ckpt_opt::report::svg::svg;
use ckpt_opt::report::written;
use ckpt_passes::compile::Request;
use ckpt_passes::plan::Plan;
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::joint::joint;
use ckpt_passes::{Error, Result};

pub fn run(args: &PlanArgs) -> Result<()> {
    let budgeting = &args.budgeting;
    let mut request = args.step.request();
    budgeting.apply(args.policy, &mut request)?;
    let (task, planned, maximized) = match &args.maximize {
        Some(dim) => {
            if read::is_cost_graph(&args.source) {
                return Err(Error::usage("maximize", "a cost graph has no named sizes"));
            }
            let _progress = progress::step("looking for the largest size");
            let model = load(&args.source, &args.step.training.source.given()?)?;
            let wish = PolicyOverride {
                dim,
                budgeted: budgeting.budgeted(),
                max_overhead_pct: args.max_overhead,
            };
            let (task, planned, found) = maximize::maximize(&model.graph, &request, &wish)?;
            (task, planned, Some(found))
        }
        None => {
            let _progress = progress::step("planning");
            let task = Task::read(&args.source, &args.step.training.source.given()?, &request)?;
            let planned = task.plan(Goal::of(&request))?;
            (task, planned, None)
        }
    };
    let mut report = Report::new(&task, &planned, budgeting.objective);
    report.maximized = maximized;
    if args.compare {
        report.compare = Some(compare(&task, &budgeting.budgeted())?);
        report.compare_left_out = left_out(&task);
    }
    for path in [&args.output, &budgeting.plan_out].into_iter().flatten() {
        write_json(path, &planned.plan)?;
    }
    super::show(&args.show, &args.source, &task, &planned)?;
    let wrote =
        args.output.is_some() || budgeting.plan_out.is_some() || !args.show.files.is_empty();
    match args.report.format {
        Format::Json => result_json(&report),
        Format::Human if args.report.quiet && wrote => Ok(()),
        Format::Human => {
            warn(&report.warnings);
            result(&report.human())
        }
    }
}

pub fn frontier(args: &FrontierArgs) -> Result<()> {
    let mut request = args.step.request();
    args.prices.apply(&mut request)?;
    let frontier = {
        let _progress = progress::step("planning");
        let task = Task::read(&args.source, &args.step.training.source.given()?, &request)?;
        let wish = ckpt_passes::plan::BudgetGoal {
            objective: args.objective,
            effort: args.effort,
            reorder: args.reorder,
            ..Default::default()
        };
        let points = args.points as usize;
        let mut frontier = Frontier::new(&task, &wish, &args.budgets, points)?;
        if args.levers {
            if read::is_cost_graph(&args.source) {
                return Err(Error::usage(
                    "levers",
                    "a cost graph has nothing that could be cut",
                ));
            }
            let model = load(&args.source, &args.step.training.source.given()?)?;
            frontier.levers = levers(&model.graph, &request, &wish, points)?;
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
    match args.report.format {
        Format::Json => result_json(&frontier),
        Format::Human if args.report.quiet && args.svg.is_some() => Ok(()),
        Format::Human => {
            warn(&frontier.warnings);
            result(&frontier.human())
        }
    }
}

pub fn diff(args: &DiffArgs) -> Result<()> {
    let (a, b) = (stored(args, &args.a)?, stored(args, &args.b)?);
    let difference = Difference::new(&a, &b)?;
    match args.report.format {
        Format::Json => result_json(&difference),
        Format::Human => result(&difference.human()),
    }
}

/// The plan in a file: as JSON, or as the nodes of a training graph.
fn stored(args: &DiffArgs, path: &std::path::Path) -> Result<Plan> {
    if read::is_cost_graph(path) {
        return read::plan(path);
    }
    let mut model = load(path, &Given::default())?;
    infer(&mut model.graph)?;
    joint(&mut model.graph).map_err(|e| e.at(path.display().to_string()))?;
    let request = Request {
        dims: args.dims.clone(),
        ..Request::default()
    };
    warn(&model.warnings);
    Ok(written::read(&model.graph, &request)?.1.plan)
}
