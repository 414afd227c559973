//! An HTML page that loads nothing: the account as data, and a script that draws it.
//!
//! Names come from models, so text is escaped as HTML, and JSON writes `<` as an escape, so that it cannot end its
//! element. The page's policy forbids it to load or send anything. Data is stored by columns, which keeps the page of a
//! model with hundreds of layers small.

use super::account::Account;
use super::console::sizes;
use super::explain::alternative;
use super::memory::{Kind, Memory};
use super::verdict::Fate;
use crate::report::frontier::Frontier;
use crate::units::{at_most, bytes, flops, micros};
use ckpt_passes::plan::{Budget, Effort, Objective, OpIdx, OpPhase, PlanRequest, Step};
use ckpt_passes::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/script.js");

/// Budgets on the curve: fewer where a problem has many ops.
const POINTS: usize = 12;
const FEW_POINTS: usize = 5;
const MANY_OPS: usize = 20_000;

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Returns the page. `title` names the model.
///
/// # Errors
/// A frontier that cannot be planned.
pub fn page(account: &Account, title: &str) -> Result<String> {
    let data = data(account)?;
    let data = serde_json::to_string(&data).map_err(|e| Error::bug("json", e.to_string()))?;
    let pieces = [
        ("title", escaped(title)),
        ("version", escaped(env!("CARGO_PKG_VERSION"))),
        ("sentence", escaped(&sentence(account))),
        ("figures", list(&figures(account), true)),
        ("facts", list(&facts(account), false)),
        ("style", STYLE.into()),
        ("script", SCRIPT.into()),
        ("data", data.replace('<', "\\u003c")),
    ];
    let pieces: BTreeMap<&str, String> = pieces.into_iter().collect();
    let mut out =
        String::with_capacity(PAGE.len() + pieces.values().map(String::len).sum::<usize>());
    // Inserted text is not searched for names of pieces.
    let mut rest = PAGE;
    while let Some((before, after)) = rest.split_once("{{") {
        let Some((name, after)) = after.split_once("}}") else {
            break;
        };
        out.push_str(before);
        let piece = pieces.get(name);
        out.push_str(piece.ok_or_else(|| Error::bug("page", format!("no piece `{name}`")))?);
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

fn list(rows: &[(String, String)], boxed: bool) -> String {
    let mut out = String::new();
    for (name, value) in rows {
        let row = format!("<dt>{}</dt><dd>{}</dd>", escaped(name), escaped(value));
        let _ = match boxed {
            true => writeln!(out, "<div>{row}</div>"),
            false => writeln!(out, "{row}"),
        };
    }
    out
}

fn dims(account: &Account) -> String {
    let training = account.step;
    sizes(&training.dims, |name| {
        match training.assumed_dims.contains(name) {
            true => " (assumed)".into(),
            false => String::new(),
        }
    })
}

fn sentence(account: &Account) -> String {
    let labels = &account.step.labels;
    format!(
        "A training step of {} layers, {} parameters trained and {} frozen, planned at {} by {}.",
        labels.layers.len(),
        labels.trained,
        labels.frozen,
        dims(account),
        account.plan.policy
    )
}

fn figures(account: &Account) -> Vec<(String, String)> {
    let plan = account.plan;
    let (before, after) = (plan.before.peak_bytes, plan.after.peak_bytes);
    let less = 100.0 * (before as f64 - after as f64) / (before.max(1)) as f64;
    let most = at_most(plan.peak_is_bound);
    let mut rows = vec![
        (
            "Peak, unplanned".to_string(),
            format!("{most}{}", bytes(before)),
        ),
        (
            "Peak, planned".to_string(),
            format!("{most}{}", bytes(after)),
        ),
        ("Less memory".to_string(), format!("{less:.1} %")),
        (
            "More time".to_string(),
            format!("{:.2} %", plan.after.overhead_pct(&plan.before)),
        ),
    ];
    if let Some(c) = &plan.certificate {
        let budget = account.step.shown(c.budget_bytes);
        rows.push(("Budget".into(), bytes(budget)));
        rows.push(("Proven least".into(), format!("{:.2} %", c.lower_bound_pct)));
        rows.push(("Gap to it".into(), format!("{:.2} %", c.gap_pct)));
    }
    rows
}

fn facts(account: &Account) -> Vec<(String, String)> {
    let (training, plan) = (account.step, account.plan);
    let device = &training.device;
    let mut rows: Vec<(&str, String)> = vec![
        ("Loss", training.loss.clone().unwrap_or("the backward that the source has".into())),
        ("Sizes", dims(account)),
        ("Policy", plan.policy.clone()),
        (
            "Memory",
            "parameters, inputs, outputs, gradients, activations and temporaries of kernels, at every node of the schedule; storages \
             are counted, not tensors: views share. Predicted by the rules that the runtime is checked against"
                .into(),
        ),
        (
            "Times",
            match training.is_measured {
                true => "measured by node, from a profile".into(),
                false => format!(
                    "a roofline of device `{}`: the larger of arithmetic and memory traffic ({} GB/s), and {} µs a kernel",
                    device.name, device.gigabytes_per_s, device.launch_us
                ),
            },
        ),
        ("Device figures", device.sources.join("; ")),
        (
            "Step",
            format!(
                "{} ops, {}, {} by the cost model; the plan runs {} and adds {} and {}",
                training.input.problem.ops.len(),
                flops(plan.before.flops),
                micros(plan.before.cost),
                plan.schedule.steps.len(),
                flops(plan.recompute_flops()),
                micros(plan.after.cost - plan.before.cost)
            ),
        ),
        ("Planned in", format!("{:.3} s", account.outcome.seconds)),
    ];
    if let Some(c) = &plan.certificate {
        rows.push(("Proof speaks of", c.class.clone()));
    }
    if let Some(smallest) = account.outcome.min_peak_bytes {
        let shown = training.shown(smallest);
        rows.push((
            "Smallest feasible",
            format!("{} ({shown} bytes)", bytes(shown)),
        ));
    }
    for s in &training.kv_sharing {
        let from = s
            .producer
            .map_or("outside the layers".into(), |p| format!("layer {p}"));
        let shared = s.shared.replace('+', " and ");
        rows.push((
            "Shared",
            format!(
                "{shared} of {from} are read by {}",
                crate::report::sharing::layers(&s.consumers)
            ),
        ));
    }
    for warning in &training.warnings {
        rows.push(("Warning", warning.clone()));
    }
    rows.push(("Made by", format!("ckpt-opt {}", env!("CARGO_PKG_VERSION"))));
    rows.into_iter()
        .map(|(name, value)| (name.to_string(), value))
        .collect()
}

/// Numbers texts; equal texts get one number.
#[derive(Default)]
struct Texts {
    list: Vec<String>,
    number: BTreeMap<String, usize>,
}

impl Texts {
    fn of(&mut self, text: &str) -> usize {
        if let Some(n) = self.number.get(text) {
            return *n;
        }
        self.number.insert(text.into(), self.list.len());
        self.list.push(text.into());
        self.list.len() - 1
    }
}

fn layer(layer: Option<usize>) -> i64 {
    layer.map_or(-1, |l| l as i64)
}

/// Returns the memory of a schedule. `schedule` is its own, by the op indices of the page.
fn memory(memory: &Memory, schedule: &[usize]) -> Value {
    let tenants = || memory.tenants.iter();
    let temporaries: Vec<(usize, u64)> = memory
        .temp_bytes
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, b)| *b > 0)
        .collect();
    json!({
        "s": schedule,
        "m": temporaries,
        "t": {
            "v": tenants().map(|t| t.value).collect::<Vec<_>>(),
            "k": tenants().map(|t| t.kind as usize).collect::<Vec<_>>(),
            "l": tenants().map(|t| layer(t.layer)).collect::<Vec<_>>(),
            "b": tenants().map(|t| t.bytes).collect::<Vec<_>>(),
            "f": tenants().map(|t| t.from).collect::<Vec<_>>(),
            "e": tenants().map(|t| t.until).collect::<Vec<_>>(),
        },
    })
}

fn data(account: &Account) -> Result<Value> {
    let plan = account.plan;
    let terms = account.terms();
    let problem = &terms.problem;
    let (mut kinds, mut modules, mut texts) =
        (Texts::default(), Texts::default(), Texts::default());
    // As in files of plans, an offloaded op counts three: it runs, its results leave, and they are released.
    let schedule = &account.after.schedule;
    let rows = problem.ops.indices().flat_map(|op| {
        let all = [Step::Run(op), Step::Offload(op), Step::Release(op)];
        let is_offloaded = schedule.offloaded.binary_search(&op).is_ok();
        all.into_iter().take(if is_offloaded { 3 } else { 1 })
    });
    let rows: Vec<Step> = rows.collect();
    let ops = || rows.iter().map(|row| &problem.ops[row.op()]);
    let numbers: Vec<usize> = ops().map(|op| kinds.of(&op.kind)).collect();
    let phase = |row: &Step| match (row.is_move(), problem.ops[row.op()].phase) {
        (true, _) => 2,
        (false, OpPhase::Backward) => 1,
        (false, OpPhase::Forward) => 0,
    };
    let module = |row: &Step| terms.labels.modules[row.op()].as_deref();
    let module_of = rows.iter().map(|row| modules.of(module(row).unwrap_or("")));
    let module_of: Vec<usize> = module_of.collect();
    let values = || account.verdicts.iter();
    let why: Vec<usize> = values().map(|v| texts.of(&v.reason)).collect();
    let peak_bytes = plan.after.peak_bytes;
    let other = values().map(|v| match &v.alternative {
        Some(a) => texts.of(&alternative(a, peak_bytes)),
        None => texts.of(""),
    });
    let other: Vec<usize> = other.collect();
    let unplanned = account.before.schedule.steps.iter();
    let unplanned: Vec<usize> = unplanned.map(|step| schedule.number(*step)).collect();
    // The row that makes a value: where it is offloaded, the one that moves it.
    let row_of = |op: OpIdx| match schedule.offloaded.binary_search(&op) {
        Ok(_) => schedule.number(Step::Offload(op)),
        Err(_) => schedule.number(Step::Run(op)),
    };
    Ok(json!({
        "kinds": Kind::ALL.map(Kind::word),
        "fates": Fate::ALL.map(Fate::word),
        "most": at_most(plan.peak_is_bound),
        "budget": plan.certificate.as_ref().map(|c| c.budget_bytes),
        "names": terms.labels.names,
        "opkinds": kinds.list,
        "modules": modules.list,
        "texts": texts.list,
        "ops": {
            "n": ops().map(|op| op.name.as_str()).collect::<Vec<_>>(),
            "k": numbers,
            "l": rows.iter().map(|row| layer(terms.annotations.layer_of[row.op()])).collect::<Vec<_>>(),
            "m": module_of,
            "p": rows.iter().map(phase).collect::<Vec<_>>(),
            "us": rows.iter().map(|row| (problem.cost(*row) * 1e3).round() / 1e3).collect::<Vec<_>>(),
        },
        "before": memory(&account.before, &unplanned),
        "after": memory(&account.after, &schedule.numbers()),
        "values": {
            "v": values().map(|v| v.value).collect::<Vec<_>>(),
            "o": values().map(|v| row_of(v.at)).collect::<Vec<_>>(),
            "f": values().map(|v| v.fate as usize).collect::<Vec<_>>(),
            "b": values().map(|v| v.bytes).collect::<Vec<_>>(),
            "r": values().map(|v| v.runs).collect::<Vec<_>>(),
            "w": why,
            "a": other,
        },
        "layers": account.layers,
        "frontier": frontier(account)?,
    }))
}

fn frontier(account: &Account) -> Result<Value> {
    let (training, plan) = (account.step, account.plan);
    let by_flops = plan
        .certificate
        .as_ref()
        .is_some_and(|c| c.objective == "flops");
    let request = PlanRequest {
        objective: match by_flops {
            true => Objective::Flops,
            false => Objective::Cost,
        },
        effort: Effort::First,
        ..Budget::Auto.into()
    };
    let count = if training.input.problem.ops.len() > MANY_OPS {
        FEW_POINTS
    } else {
        POINTS
    };
    let frontier = Frontier::new(training, &request, &[], count)?;
    let overhead_pct = match by_flops {
        true => plan.after.flops_overhead_pct(&plan.before),
        false => plan.after.overhead_pct(&plan.before),
    };
    let mut value =
        serde_json::to_value(&frontier).map_err(|e| Error::bug("json", e.to_string()))?;
    value["chosen"] = json!({
        "peak_bytes": training.shown(plan.after.peak_bytes), "overhead_pct": overhead_pct,
    });
    Ok(value)
}
