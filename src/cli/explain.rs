//! `explain`: shows what a plan decides, and why.

use super::options::plan::ExplainArgs;
use super::progress;
use ckpt_opt::frontend::load;
use ckpt_opt::planning::read;
use ckpt_opt::planning::step::TrainingStep;
use ckpt_opt::report::account::Account;
use ckpt_opt::report::explain::{Explanation, decisions};
use ckpt_opt::report::written;
use ckpt_passes::plan::{Plan, PlanOutcome};
use ckpt_passes::{Error, Result};

pub fn run(args: &ExplainArgs) -> Result<()> {
    if let Some(plan) = stored(args)? {
        if !args.views.files.is_empty() {
            return Err(
                Error::usage("report", "a plan by itself has too little to show")
                    .help("ckpt-opt explain MODEL --plan-in PLAN --report FILE"),
            );
        }
        return args.console.print(&plan, &[], || decisions(&plan));
    }
    let (step, outcome) = {
        let _progress = progress::step("planning");
        planned(args)?
    };
    let account = Account::new(&step, &outcome)?;
    args.views.write(&args.source, &account)?;
    let explanation = Explanation::new(&account, args.name.as_deref())?;
    args.console
        .print(&explanation, &step.warnings, || explanation.human())
}

/// Returns the source as a stored plan, if it is one.
fn stored(args: &ExplainArgs) -> Result<Option<Plan>> {
    let plan = match read::is_cost_graph(&args.source) {
        true => read::plan(&args.source).ok(),
        false => None,
    };
    let Some(mut plan) = plan.filter(|p| !p.fingerprint.is_empty()) else {
        return Ok(None);
    };
    if let Some(name) = &args.name {
        plan.decisions
            .retain(|d| d.name == *name || ckpt_passes::glob::matches(name, &d.name));
        if plan.decisions.is_empty() {
            return Err(Error::usage(
                "name",
                format!("the plan decides nothing about `{name}`"),
            )
            .help("a plan knows nodes by name; ckpt-opt explain MODEL NAME --plan-in PLAN knows more"));
        }
    }
    Ok(Some(plan))
}

fn planned(args: &ExplainArgs) -> Result<(TrainingStep, PlanOutcome)> {
    let mut request = args.step.request();
    args.goal.apply(&mut request)?;
    let given = args.step.training.source.given()?;
    let step = if read::is_cost_graph(&args.source) {
        TrainingStep::read(&args.source, &given, &request)?
    } else {
        let mut model = load(&args.source, &given)?;
        if !args.goal.is_given() && written::is_planned(&model.graph) {
            let (mut step, outcome) = written::read(&mut model.graph, &request)?;
            step.warnings.splice(0..0, model.warnings);
            return Ok((step, outcome));
        }
        let mut step = TrainingStep::of_graph(&mut model.graph, &request)?;
        step.warnings.splice(0..0, model.warnings);
        step
    };
    let outcome = step.plan(&request)?;
    Ok((step, outcome))
}
