//! `explain`: the decision about a value, node, module or layer, the reason, and the cost of the alternative.

use super::account::{Account, AtPeak, LayerRow};
use super::console::{cut, largest, layer_name};
use super::verdict::{Alternative, Fate, Verdict};
use crate::planning::trials;
use crate::units::{at_most, bytes, micros};
use ckpt_passes::glob;
use ckpt_passes::near::nearest;
use ckpt_passes::plan::{Plan, Trial};
use ckpt_passes::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Rows in a table for people; JSON has all rows.
const SHOWN: usize = 20;

/// The answer. Bytes are predicted; times come from the cost model or from measurements.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The policy, or `budget`, with the options that constrained it.
    pub policy: String,
    /// The loss that was differentiated; null where that was not done here.
    pub loss: Option<String>,
    /// Name of the device that times and memory are predicted for.
    pub device: String,
    /// Numbers of named sizes that the figures are for.
    pub dims: BTreeMap<String, i64>,
    /// The budget of the plan; null for policies and for plans that were read.
    pub budget_bytes: Option<u64>,
    /// Peak of a step without the plan, static bytes included.
    pub peak_before_bytes: u64,
    /// Peak of a step with the plan, static bytes included.
    pub peak_after_bytes: u64,
    /// Whether peaks are upper bounds, for data decides some sizes.
    pub peak_is_bound: bool,
    /// Parameters and inputs: resident throughout.
    pub static_bytes: u64,
    /// Microseconds of a step without the plan.
    pub step_us: f64,
    /// Microseconds that recomputations and transfers of the plan add.
    pub recompute_us: f64,
    /// The added time, in percent of `step_us`.
    pub overhead_pct: f64,
    /// Proven least overhead of any such plan within the budget, by the objective; null without a proof.
    pub lower_bound_pct: Option<f64>,
    /// The most that the plan may be above the best one, in the same percent; null without a proof.
    pub gap_pct: Option<f64>,
    /// Chunk count of the loss; null where it is whole.
    pub loss_parts: Option<usize>,
    /// Chunk count of chains of ops on tokens; null where they are whole.
    pub mlp_parts: Option<usize>,
    /// Chunk counts that the planner tried (`auto` only); empty where they were given.
    pub parts_tried: Vec<Trial>,
    /// What is held at the peak without the plan.
    pub at_peak_before: AtPeak,
    /// What is held at the peak with the plan.
    pub at_peak_after: AtPeak,
    /// The name in the question; null for everything.
    pub about: Option<String>,
    /// The layers in question.
    pub layers: Vec<LayerRow>,
    /// The values in question, in the model's order.
    pub values: Vec<Verdict>,
}

/// Returns the name of the node that a copy was made of: without `/recompute` (older files: `/again`) and its number.
fn original_name(name: &str) -> &str {
    let split = name
        .rsplit_once("/recompute")
        .or_else(|| name.rsplit_once("/again"));
    match split {
        Some((original, "")) => original,
        Some((original, n))
            if n.strip_prefix('.')
                .is_some_and(|n| n.parse::<u32>().is_ok()) =>
        {
            original
        }
        _ => name,
    }
}

/// Reads the number from `layer 3` or `layer:3`.
fn layer_number(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("layer")?;
    rest.trim_start_matches([' ', ':', '=']).trim().parse().ok()
}

impl Explanation {
    /// Explains everything, or what `name` refers to: `layer:3`, a value, a node or its copy, the path of a module, or a
    /// pattern over these.
    ///
    /// # Errors
    /// `error[name]` for an unknown name; the error lists similar ones.
    pub fn new(account: &Account, name: Option<&str>) -> Result<Explanation> {
        let (layers, values) = match name {
            None => (account.layers.clone(), account.verdicts.clone()),
            Some(name) => select(account, name)?,
        };
        let (training, plan) = (account.step, account.plan);
        let certificate = plan.certificate.as_ref();
        Ok(Explanation {
            policy: plan.policy.clone(),
            loss: training.loss.clone(),
            device: training.device.name.clone(),
            dims: training.dims.clone(),
            budget_bytes: certificate.map(|c| training.shown(c.budget_bytes)),
            peak_before_bytes: plan.before.peak_bytes,
            peak_after_bytes: plan.after.peak_bytes,
            peak_is_bound: plan.peak_is_bound,
            static_bytes: plan.after.static_bytes,
            step_us: plan.before.cost,
            recompute_us: plan.after.cost - plan.before.cost,
            overhead_pct: plan.after.overhead_pct(&plan.before),
            lower_bound_pct: certificate.map(|c| c.lower_bound_pct),
            gap_pct: certificate.map(|c| c.gap_pct),
            loss_parts: plan.loss_chunks,
            mlp_parts: plan.mlp_chunks,
            parts_tried: trials::list(training.input.chunks.tried.as_ref()),
            at_peak_before: account.at_peak(&account.before),
            at_peak_after: account.at_peak(&account.after),
            about: name.map(str::to_string),
            layers,
            values,
        })
    }

    /// Returns the text for people.
    pub fn human(&self) -> String {
        let mut out = String::new();
        match &self.about {
            None => self.whole(&mut out),
            Some(_) => {
                layer_table(&mut out, &self.layers);
                match self.values.as_slice() {
                    few if few.len() <= 3 => few.iter().for_each(|v| self.one(&mut out, v)),
                    many => value_table(&mut out, &many.iter().collect::<Vec<_>>(), usize::MAX),
                }
            }
        }
        out
    }

    fn whole(&self, out: &mut String) {
        let goal = match self.budget_bytes {
            Some(n) => self
                .policy
                .replacen("budget", &format!("budget {}", bytes(n)), 1),
            None => self.policy.clone(),
        };
        let most = at_most(self.peak_is_bound);
        let _ = writeln!(
            out,
            "{goal}: peak {most}{} -> {most}{}, {} more time ({:.2} % by the cost model)\n",
            bytes(self.peak_before_bytes),
            bytes(self.peak_after_bytes),
            micros(self.recompute_us),
            self.overhead_pct
        );
        for (what, parts) in [("the loss", self.loss_parts), ("MLPs", self.mlp_parts)] {
            if let Some(parts) = parts {
                let _ = writeln!(out, "  {what} in {parts} chunks");
            }
        }
        let parts_tried = trials::human(&self.parts_tried);
        if !parts_tried.is_empty() {
            let _ = writeln!(out, "{parts_tried}");
        }
        let mut fates: BTreeMap<Fate, (usize, u64)> = BTreeMap::new();
        for v in &self.values {
            let entry = fates.entry(v.fate).or_default();
            (entry.0, entry.1) = (entry.0 + 1, entry.1 + v.bytes);
        }
        for (fate, (count, size)) in fates {
            let what = match fate {
                Fate::Kept => "held for the backward pass",
                Fate::Recomputed => "freed and recomputed",
                Fate::Offloaded => "moved out of the device's memory",
                Fate::Freed => "not read by the backward pass",
                Fate::Output => "outputs of the graph",
                Fate::View => "views, without memory of their own",
                Fate::Backward => "computed by the backward pass",
            };
            let _ = writeln!(
                out,
                "  {:<11}{count:>7} values{:>12}  {what}",
                fate.word(),
                bytes(size)
            );
        }
        out.push('\n');
        layer_table(out, &self.layers);
        let mut decided: Vec<&Verdict> = self
            .values
            .iter()
            .filter(|v| {
                matches!(v.fate, Fate::Kept | Fate::Recomputed | Fate::Offloaded) && v.bytes > 0
            })
            .collect();
        decided.sort_by_key(|v| std::cmp::Reverse(v.bytes));
        value_table(out, &decided, SHOWN);
        self.peak(out);
    }

    fn peak(&self, out: &mut String) {
        let at = &self.at_peak_after;
        let _ = writeln!(
            out,
            "\nat the peak, {}{} while `{}` runs",
            at_most(self.peak_is_bound),
            bytes(at.bytes),
            at.node.as_deref().unwrap_or("-")
        );
        out.push_str(&largest(&at.largest[..at.largest.len().min(SHOWN / 2)]));
        if let Some(more) = at.largest.len().checked_sub(SHOWN / 2 + 1) {
            let _ = writeln!(out, "  and {} smaller ones", more + 1);
        }
    }

    /// Adds everything about one value.
    fn one(&self, out: &mut String, v: &Verdict) {
        let mut row = |what: &str, text: String| {
            let _ = writeln!(out, "  {what:<13}{text}");
        };
        row("value", format!("{} {}", v.name, v.ty).trim_end().into());
        row("node", format!("{} ({})", v.node, v.op));
        let place = [
            v.layer.map(|l| format!("layer {l}")),
            v.part.clone(),
            v.module.clone(),
        ];
        let place: Vec<String> = place.into_iter().flatten().collect();
        if !place.is_empty() {
            row("place", place.join(", "));
        }
        row("decision", v.fate.word().into());
        row("memory", bytes(v.bytes));
        row(
            "time",
            match v.runs {
                1 => format!("{} a run, runs once", micros(v.us)),
                n => format!("{} a run, runs {n} times", micros(v.us)),
            },
        );
        row("because", v.reason.clone());
        if let Some(other) = &v.alternative {
            row("otherwise", alternative(other, self.peak_after_bytes));
        }
        out.push('\n');
    }
}

/// Returns the decisions of a stored plan as text. Costs would need the model.
pub fn decisions(plan: &Plan) -> String {
    let mut out = String::new();
    let most = at_most(plan.peak_is_bound);
    let _ = writeln!(
        out,
        "{}: peak {most}{} -> {most}{}, {:.2} % more time by the cost model\n",
        plan.policy,
        bytes(plan.before.peak_bytes),
        bytes(plan.after.peak_bytes),
        plan.after.overhead_pct(&plan.before)
    );
    let _ = writeln!(
        out,
        "  {:<44}{:<12}{:>10}  {:<10}because",
        "node", "decision", "memory", "place"
    );
    for d in &plan.decisions {
        let layer = layer_name(d.block);
        let verb = match (d.kept, d.offloaded) {
            (true, _) => Fate::Kept,
            (false, true) => Fate::Offloaded,
            (false, false) => Fate::Recomputed,
        };
        let _ = writeln!(
            out,
            "  {:<44}{:<12}{:>10}  {layer:<10}{}",
            cut(&d.name, 43),
            verb.word(),
            bytes(d.bytes),
            d.reason
        );
    }
    out.push_str(
        "\n  ckpt-opt explain MODEL --plan-in PLAN adds times and the cost of the alternative\n",
    );
    out
}

/// Returns the cost of the alternative as a phrase.
pub fn alternative(other: &Alternative, peak_bytes: u64) -> String {
    match other {
        Alternative::Recompute { us, ops: 1 } => {
            format!("recomputing it takes {}", micros(*us))
        }
        Alternative::Recompute { us, ops } => {
            format!("recomputing it takes {} in {ops} ops", micros(*us))
        }
        Alternative::Keep {
            bytes: held,
            peak_bytes: peak,
            saved_us,
        } => match peak.saturating_sub(peak_bytes) {
            0 => format!(
                "keeping {} would save {} and not raise the peak",
                bytes(*held),
                micros(*saved_us)
            ),
            more => format!(
                "keeping {} would save {} and raise the peak by {} to {}",
                bytes(*held),
                micros(*saved_us),
                bytes(more),
                bytes(*peak)
            ),
        },
    }
}

fn layer_table(out: &mut String, layers: &[LayerRow]) {
    if layers.is_empty() {
        return;
    }
    let moves = layers.iter().any(|l| l.offloaded_bytes > 0);
    let outside = |text: String| match moves {
        true => format!("{text:>12}"),
        false => String::new(),
    };
    let _ = writeln!(
        out,
        "  {:<6}{:<26}{:<18}{:>10}{:>12}{}{:>12}{:>14}{:>12}",
        "layer",
        "module",
        "made of",
        "kept",
        "recomputed",
        outside("offloaded".into()),
        "re-run ops",
        "more time",
        "at the peak"
    );
    // Equal neighbours share a row.
    let same = |a: &LayerRow, b: &LayerRow| {
        (a.run, a.kept_bytes, a.recomputed_bytes, a.recomputed_ops)
            == (b.run, b.kept_bytes, b.recomputed_bytes, b.recomputed_ops)
            && (a.offloaded_bytes, a.peak_after_bytes) == (b.offloaded_bytes, b.peak_after_bytes)
    };
    for rows in layers.chunk_by(same) {
        let (first, last) = (&rows[0], &rows[rows.len() - 1]);
        let number = match rows.len() {
            1 => first.index.to_string(),
            _ => format!("{}-{}", first.index, last.index),
        };
        let _ = writeln!(
            out,
            "  {number:<5} {:<26}{:<17} {:>10} {:>11}{} {:>11} {:>13} {:>11}",
            cut(&first.name, 25),
            first.kind,
            bytes(first.kept_bytes),
            bytes(first.recomputed_bytes),
            outside(bytes(first.offloaded_bytes)),
            format!("{}/{}", first.recomputed_ops, first.ops),
            micros(first.recompute_us + first.transfer_us),
            bytes(first.peak_after_bytes)
        );
    }
    out.push('\n');
}

fn value_table(out: &mut String, values: &[&Verdict], most: usize) {
    let _ = writeln!(
        out,
        "  {:<44}{:<12}{:>10}{:>12}  {:<10}because",
        "value", "decision", "memory", "time", "place"
    );
    for v in values.iter().take(most) {
        let layer = layer_name(v.layer);
        let time = match v.runs {
            1 => micros(v.us),
            n => format!("{n} x {}", micros(v.us)),
        };
        let _ = writeln!(
            out,
            "  {:<44}{:<12}{:>10} {time:>11}  {layer:<9} {}",
            cut(&v.name, 43),
            v.fate.word(),
            bytes(v.bytes),
            v.reason
        );
    }
    if let Some(more) = values.len().checked_sub(most.saturating_add(1)) {
        let _ = writeln!(
            out,
            "  and {} smaller ones (--format json has all)",
            more + 1
        );
    }
}

/// Returns the layers and values that a name refers to.
fn select(account: &Account, name: &str) -> Result<(Vec<LayerRow>, Vec<Verdict>)> {
    let all = &account.verdicts;
    let layer = layer_number(name).or_else(|| {
        let mut layers = account.step.labels.layers.iter();
        layers.position(|l| l.path.as_deref() == Some(name))
    });
    if let Some(number) = layer {
        let Some(row) = account.layers.get(number) else {
            return Err(Error::usage("name", format!("there is no layer {number}"))
                .found(format!("{} layers, counted from 0", account.layers.len())));
        };
        let inside = all.iter().filter(|v| v.layer == Some(number)).cloned();
        return Ok((vec![row.clone()], inside.collect()));
    }
    let plain = original_name(name);
    let tests: [&dyn Fn(&Verdict) -> bool; 3] = [
        &|v| v.name == plain || v.name == name || v.node == plain,
        &|v| {
            v.module.as_deref().is_some_and(|m| {
                m == name
                    || m.strip_prefix(name)
                        .is_some_and(|rest| rest.starts_with('.'))
            })
        },
        &|v| {
            glob::matches(name, &v.name)
                || glob::matches(name, &v.node)
                || v.module.as_deref().is_some_and(|m| glob::matches(name, m))
        },
    ];
    for test in tests {
        let found: Vec<Verdict> = all.iter().filter(|v| test(v)).cloned().collect();
        if !found.is_empty() {
            return Ok((Vec::new(), found));
        }
    }
    let names = &account.terms().labels.names;
    if names.iter().any(|n| n == name) {
        return Err(Error::usage(
            "name",
            format!(
                "`{name}` is an input or a parameter: it is resident throughout, and no plan decides about it"
            ),
        ));
    }
    let known = all
        .iter()
        .flat_map(|v| [v.name.as_str(), v.node.as_str()])
        .chain(all.iter().filter_map(|v| v.module.as_deref()));
    let error = Error::usage(
        "name",
        format!("nothing in the training step is called `{name}`"),
    )
    .expected("`layer:N`, a value, a node, a module, or a pattern of these");
    Err(match nearest(name, known, 3).as_slice() {
        [] => error,
        near => error.help(format!("did you mean {}?", near.join(", "))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_copies_and_layers() {
        assert_eq!(original_name("a/b/recompute"), "a/b");
        assert_eq!(original_name("a/recompute.2"), "a");
        assert_eq!(original_name("a/against"), "a/against");
        assert_eq!(original_name("a/recompute.x"), "a/recompute.x");
        assert_eq!(layer_number("layer 12"), Some(12));
        assert_eq!(layer_number("layer:3"), Some(3));
        assert_eq!(layer_number("layers.3"), None);
    }
}
