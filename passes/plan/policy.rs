//! The policies people know, as plans: none, full, selective, every N-th layer, the first N layers, groups of layers,
//! parts of layers.
//!
//! A policy only says which forward results may stay; [`keep`](super::saved_set) makes the schedule, so nothing is kept that
//! no backward op reads and nothing is copied that no one needs. What lies outside the layers stays: embeddings, masks
//! and rotary tables that layers share, the head and the loss. What a layer hands to others (the residual stream,
//! shared keys and values) stays too. Layers that no trained parameter flows into are left alone. [`Constraints`] may put
//! other units in the place of layers, leave some of them alone, and overrule the policy for single ops.
//!
//! `selective` is the per-op rule of TorchTitan and NeMo: attention (fused: its results; decomposed: the probabilities
//! that its backward reads), convolutions, TopK, max reductions, products with a fused bias and quantised products
//! stay; of the plain products every second one of a layer is computed again, in execution order, the odd ones stay;
//! everything else is computed again. For a Llama layer that keeps q, v, gate and down, and recomputes k, o and up.

use super::constraint::{Constraint, Constraints, Place, honours};
use super::input::{OpAnnotations, Part};
use super::plan::Plan;
use super::problem::{Phase, Problem};
use super::saved_set::{pinned, schedule};
use super::sub_blocks::{Parts, discards_output};
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::fmt;

/// What to recompute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    None,
    /// Every layer keeps only its inputs.
    Full,
    /// The per-op rule, within each layer.
    Selective,
    /// Layers N, 2N, …, counted from 1, keep only their inputs.
    Every(usize),
    /// The first N layers keep only their inputs.
    First(usize),
    /// Of every N layers in a row only the input of the first is kept.
    Group(usize),
    /// Every norm, attention and MLP of a layer keeps only its inputs.
    Submodule,
    /// Only these parts of layers are rebuilt: norms and inner parts with what leaves them, whole branches but for the
    /// residual stream.
    Parts(Parts),
}

const WORDS: &str = "none (off, false, no, disabled), full (on, true, yes, enabled), selective, submodule, every:N, first:N, \
                     group:N, parts:WORD,… (norm, attention, mlp, experts, conv, core-attn, mlp-act, moe-act)";

impl Policy {
    /// Reads a policy; upper and lower case, `-` and `_` make no difference.
    ///
    /// # Errors
    /// Any other word; the error lists the words.
    pub fn parse(text: &str) -> Result<Policy> {
        let word = text.trim().to_lowercase().replace('_', "-");
        let unknown =
            || Error::usage("policy", format!("there is no policy `{text}`")).expected(WORDS);
        Ok(match word.as_str() {
            "none" | "off" | "false" | "no" | "disabled" => Policy::None,
            "full" | "on" | "true" | "yes" | "enabled" => Policy::Full,
            "selective" => Policy::Selective,
            "submodule" => Policy::Submodule,
            _ => {
                let (name, count) = word.split_once(':').ok_or_else(unknown)?;
                if name.trim() == "parts" {
                    return Ok(Policy::Parts(Parts::parse(count)?));
                }
                let n: usize = count.trim().parse().map_err(|_| unknown())?;
                if n == 0 {
                    return Err(Error::usage(
                        "policy",
                        format!("`{text}`: the number of layers must be 1 or more"),
                    ));
                }
                match name.trim() {
                    "every" => Policy::Every(n),
                    "first" => Policy::First(n),
                    "group" => Policy::Group(n),
                    _ => return Err(unknown()),
                }
            }
        })
    }

    /// For a policy of whole units: the group of units that is recomputed as one, for each unit; `None` for a unit that
    /// is left alone.
    fn groups(self, units: usize) -> Vec<Option<usize>> {
        (0..units)
            .map(|i| match self {
                Policy::None => None,
                Policy::Full | Policy::Selective | Policy::Submodule | Policy::Parts(_) => Some(i),
                Policy::Every(n) => ((i + 1) % n == 0).then_some(i),
                Policy::First(n) => (i < n).then_some(i),
                Policy::Group(n) => Some(i / n),
            })
            .collect()
    }

    /// The plan of this policy, without any overrides.
    ///
    /// # Errors
    /// A policy of whole layers on a model in which none were found.
    pub fn plan(self, problem: &Problem, structure: &OpAnnotations) -> Result<Plan> {
        self.refined(problem, structure, &Constraints::none(structure), "")
    }

    /// The plan of this policy with a user's overrides; `overrides` is how they were said.
    ///
    /// # Errors
    /// A policy of whole layers on a model in which none were found.
    pub fn refined(
        self,
        problem: &Problem,
        structure: &OpAnnotations,
        choices: &Constraints,
        overrides: &str,
    ) -> Result<Plan> {
        let verdicts = self.verdicts(problem, structure, choices)?;
        let keep: Vec<bool> = verdicts.iter().map(|v| v.keep).collect();
        let reasons: Vec<String> = verdicts.into_iter().map(|v| v.reason).collect();
        let schedule = schedule(problem, &keep);
        honours(problem, &schedule, &choices.constraints(problem))?;
        Plan::new(
            format!("{self} {overrides}").trim_end(),
            problem,
            schedule,
            &structure.block_of,
            &reasons,
        )
    }

    /// What becomes of every storage, by its owner, and why.
    fn verdicts(
        self,
        problem: &Problem,
        structure: &OpAnnotations,
        choices: &Constraints,
    ) -> Result<Vec<Verdict>> {
        let whole = !matches!(self, Policy::None | Policy::Selective);
        if whole && choices.units == 0 {
            return Err(Error::usage(
                "policy",
                format!("`{self}` needs layers, and no repeated layers were found"),
            )
            .help(
                "use --policy selective, which works on any graph, or name modules with --layers",
            ));
        }
        let groups = self.groups(choices.units);
        let meant = |op: usize| match self {
            Policy::Parts(parts) => word_of(parts, structure, op),
            _ => None,
        };
        let group_of = |op: usize| match choices.place[op] {
            Place::Unit(_) if self == Policy::Submodule => structure.submodule_of[op],
            // What leaves a part that is no group is no output: whoever reads it has it rebuilt.
            Place::Unit(_) if matches!(self, Policy::Parts(_)) => structure.submodule_of[op]
                .filter(|_| meant(op).is_some_and(|word| !discards_output(word))),
            place => place.unit().and_then(|u| groups[u]),
        };
        let by_op: Vec<Verdict> = match self {
            Policy::None => vec![Verdict::keep("policy none keeps everything"); problem.ops.len()],
            Policy::Selective => selective(problem, structure, choices),
            Policy::Parts(_) => {
                let ops = 0..problem.ops.len();
                let in_layer = |op: &usize| choices.place[*op].unit().is_some();
                if !ops.clone().any(|op| in_layer(&op) && meant(op).is_some()) {
                    return Err(no_part(structure, self));
                }
                ops.map(|op| match (choices.place[op], meant(op)) {
                    (Place::Unit(_), Some(word)) => {
                        Verdict::drop(&format!("inside a recomputed {word}"))
                    }
                    (Place::Unit(_), None) => Verdict::keep("in no part that was asked for"),
                    (place, _) => alone(place),
                })
                .collect()
            }
            _ => {
                let whole = |op: usize| match (choices.place[op], group_of(op)) {
                    (Place::Unit(_), Some(part)) if self == Policy::Submodule => Verdict::drop(
                        &format!("inside a recomputed {}", structure.submodules[part]),
                    ),
                    (Place::Unit(_), Some(_)) => Verdict::drop("inside a recomputed layer"),
                    (Place::Unit(_), None) => Verdict::keep("this layer is left alone"),
                    (place, _) => alone(place),
                };
                (0..problem.ops.len()).map(whole).collect()
            }
        };
        let roots = problem.roots();
        let mut verdicts: Vec<Verdict> = problem
            .values
            .iter()
            .map(|v| {
                v.producer
                    .map_or(Verdict::keep("resident throughout"), |op| by_op[op].clone())
            })
            .collect();
        // What another group, or anything outside the layers, reads is an output of the layer.
        for (o, op) in problem
            .ops
            .iter()
            .enumerate()
            .filter(|(_, op)| op.phase == Phase::Forward)
        {
            for v in &op.ins {
                let root = roots[*v];
                if let Some(group) = problem.values[root].producer.and_then(group_of)
                    && group_of(o) != Some(group)
                    && !verdicts[root].keep
                {
                    verdicts[root] = Verdict::keep("other layers read it");
                }
            }
        }
        for (root, value) in problem.values.iter().enumerate() {
            if let Some(op) = value.producer
                && problem.ops[op].phase == Phase::Forward
                && let Some(forced) = &choices.forced[op]
            {
                verdicts[root] = match forced.choice {
                    Constraint::Keep => Verdict::keep(&forced.by),
                    Constraint::Recompute => Verdict::drop(&forced.by),
                };
            }
        }
        for (verdict, pin) in verdicts.iter_mut().zip(pinned(problem)) {
            if let Some(pin) = pin.filter(|_| !verdict.keep) {
                *verdict = Verdict::keep(pin.reason());
            }
        }
        Ok(verdicts)
    }
}

/// The word under which an op is meant: that of its inner part, or of the part of a layer that it is in.
fn word_of(parts: Parts, structure: &OpAnnotations, op: usize) -> Option<&str> {
    let core = structure.core_of[op].as_deref();
    let part = structure.submodule_of[op].map(|s| structure.submodules[s].as_str());
    let whole = part.filter(|word| parts.has(word));
    whole.or(core.filter(|word| parts.has(word)))
}

fn no_part(structure: &OpAnnotations, policy: Policy) -> Box<Error> {
    let mut found: BTreeSet<&str> = structure.submodules.iter().map(String::as_str).collect();
    found.extend(structure.core_of.iter().flatten().map(String::as_str));
    let found: Vec<&str> = found.into_iter().collect();
    Error::usage("policy", format!("`{policy}`: no layer has such a part"))
        .found(format!("parts {}", found.join(", ")))
}

/// Why an op that is in no unit stays.
fn alone(place: Place) -> Verdict {
    Verdict::keep(match place {
        Place::Unit(_) => "this layer is left alone",
        Place::NoLayer => "outside the layers",
        Place::Elsewhere => "outside what was asked for",
        Place::Frozen => "nothing trained flows into it",
    })
}

#[derive(Clone, Debug)]
struct Verdict {
    keep: bool,
    reason: String,
}

impl Verdict {
    fn keep(reason: &str) -> Verdict {
        Verdict {
            keep: true,
            reason: reason.into(),
        }
    }
    fn drop(reason: &str) -> Verdict {
        Verdict {
            keep: false,
            reason: reason.into(),
        }
    }
}

/// The per-op rule. Without layers the whole forward part counts as one.
fn selective(problem: &Problem, structure: &OpAnnotations, choices: &Constraints) -> Vec<Verdict> {
    let mut products = vec![0usize; choices.units.max(1)];
    let verdict = |o: usize| {
        let unit = match choices.place[o] {
            Place::Unit(unit) => unit,
            Place::NoLayer if choices.units == 0 => 0,
            place => return alone(place),
        };
        match structure.part_of[o] {
            Part::PlainProduct => {
                products[unit] += 1;
                let n = products[unit];
                if n % 2 == 1 {
                    Verdict::keep(&format!("product {n} of its layer: odd ones stay"))
                } else {
                    Verdict::drop(&format!("product {n} of its layer: every second one"))
                }
            }
            Part::BiasedProduct => Verdict::keep("a product with a fused bias"),
            Part::Probabilities => Verdict::keep("attention probabilities"),
            Part::FusedAttention => Verdict::keep("attention"),
            Part::Convolution => Verdict::keep("a convolution"),
            Part::Choice => Verdict::keep("a choice that must not change"),
            Part::MaxReduction => Verdict::keep("a max reduction"),
            Part::Other => Verdict::drop("not on the list of what stays"),
        }
    };
    (0..problem.ops.len()).map(verdict).collect()
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::None => f.write_str("none"),
            Policy::Full => f.write_str("full"),
            Policy::Selective => f.write_str("selective"),
            Policy::Submodule => f.write_str("submodule"),
            Policy::Parts(parts) => write!(f, "parts:{parts}"),
            Policy::Every(n) => write!(f, "every:{n}"),
            Policy::First(n) => write!(f, "first:{n}"),
            Policy::Group(n) => write!(f, "group:{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_their_synonyms() {
        for (text, policy) in [
            ("none", Policy::None),
            ("OFF", Policy::None),
            ("False", Policy::None),
            ("disabled", Policy::None),
            ("no", Policy::None),
            ("Full", Policy::Full),
            ("true", Policy::Full),
            ("on", Policy::Full),
            ("yes", Policy::Full),
            ("ENABLED", Policy::Full),
            (" Selective", Policy::Selective),
            ("every:2", Policy::Every(2)),
            ("First:3", Policy::First(3)),
            ("group:4", Policy::Group(4)),
            ("SubModule", Policy::Submodule),
            (
                "parts:MLP, core_attn",
                Policy::Parts(Parts::parse("core-attn,mlp").unwrap()),
            ),
        ] {
            assert_eq!(Policy::parse(text).unwrap(), policy, "{text}");
            assert_eq!(Policy::parse(&policy.to_string()).unwrap(), policy);
        }
        for text in [
            "",
            "ful",
            "every",
            "every:",
            "every:x",
            "every:0",
            "first:-1",
            "last:2",
            "parts:",
            "parts:mlp,tail",
            "__import__('os')",
        ] {
            let e = Policy::parse(text).unwrap_err();
            assert_eq!(e.exit_code(), 2, "{text}");
        }
        assert!(
            Policy::parse("ful")
                .unwrap_err()
                .to_string()
                .contains("selective, submodule, every:N")
        );
    }

    #[test]
    fn which_layers_are_recomputed() {
        let groups = |p: Policy| p.groups(5);
        assert_eq!(
            groups(Policy::Every(2)),
            [None, Some(1), None, Some(3), None]
        );
        assert_eq!(
            groups(Policy::First(2)),
            [Some(0), Some(1), None, None, None]
        );
        assert_eq!(
            groups(Policy::Group(2)),
            [Some(0), Some(0), Some(1), Some(1), Some(2)]
        );
        assert_eq!(groups(Policy::Full), [0, 1, 2, 3, 4].map(Some));
    }

    use crate::compile::{Request, compile};
    use crate::driver::Made;
    use crate::driver::Watch;
    use crate::ir::{Graph, Role};
    use crate::testing::{Style, transformer};
    use crate::transform::loss::Loss;

    fn compiled(style: Style, layers: usize, policy: Policy) -> (Graph, Made) {
        let mut g = transformer(layers, style);
        let request = Request {
            loss: Loss::Vjp,
            policy,
            dims: vec![("b".into(), 2), ("s".into(), 64)],
            ..Request::default()
        };
        let done = compile(&mut g, &request, &mut Watch::default()).unwrap();
        (g, done.made.unwrap())
    }

    /// Products of a layer by the weight they read, and what became of them: kept, recomputed, or not needed.
    fn products(g: &Graph, plan: &Plan, layer: usize) -> Vec<(&'static str, Option<bool>)> {
        let names = ["q", "k", "v", "o", "gate", "up", "down"];
        let first = 2 + 9 * layer;
        let weights = [1, 2, 3, 4, 6, 7, 8].map(|w| format!("w{}", first + w));
        let decide = |w: &String| {
            let reads =
                |n: &crate::ir::Node| n.ins.iter().flatten().any(|v| g.value(*v).name == *w);
            let forward = |n: &crate::ir::Node| n.role == Role::Forward && n.recompute_of.is_none();
            let (_, node) = g.nodes().find(|(_, n)| forward(n) && reads(n)).unwrap();
            plan.decisions
                .iter()
                .find(|d| d.name == node.name)
                .map(|d| d.kept)
        };
        names.into_iter().zip(weights.iter().map(decide)).collect()
    }

    #[test]
    fn selective_takes_seven_decisions_in_a_gated_layer() {
        let (g, done) = compiled(Style::PreNorm, 3, Policy::Selective);
        for layer in 0..3 {
            let expected = [
                ("q", Some(true)),
                ("k", Some(false)),
                ("v", Some(true)),
                ("o", Some(false)),
                ("gate", Some(true)),
                ("up", Some(false)),
                // The rule keeps it, but no backward op reads it: neither kept nor recomputed.
                ("down", None),
            ];
            assert_eq!(products(&g, &done.plan, layer), expected, "layer {layer}");
        }
        let probabilities: Vec<bool> = done
            .plan
            .decisions
            .iter()
            .filter(|d| d.reason == "attention probabilities")
            .map(|d| d.kept)
            .collect();
        assert_eq!(probabilities, [true; 3]);
    }

    #[test]
    fn every_policy_saves_memory_and_copies_only_what_is_read() {
        for style in [Style::PreNorm, Style::PostNorm] {
            let unplanned = compiled(style, 4, Policy::None).1.plan;
            assert_eq!(unplanned.before, unplanned.after);
            for policy in [
                Policy::Full,
                Policy::Selective,
                Policy::Every(2),
                Policy::First(3),
                Policy::Group(2),
            ] {
                let (g, done) = compiled(style, 4, policy);
                let plan = &done.plan;
                assert!(plan.after.peak_bytes < plan.before.peak_bytes, "{policy}");
                assert!(plan.recompute_flops() > 0);
                let layers: Vec<Option<usize>> = match policy {
                    Policy::Every(_) => vec![Some(1), Some(3)],
                    Policy::First(_) => vec![Some(0), Some(1), Some(2)],
                    _ => (0..4).map(Some).collect(),
                };
                let mut rebuilt: Vec<Option<usize>> =
                    plan.segments.iter().map(|s| s.block).collect();
                rebuilt.sort_unstable();
                assert_eq!(rebuilt, layers, "{policy}");
                for (_, node) in g.nodes().filter(|(_, n)| n.recompute_of.is_some()) {
                    let read = node.outs.iter().any(|v| !g.value(*v).uses().is_empty());
                    assert!(read, "{policy}: nothing reads {}", node.name);
                    assert_eq!(node.role, Role::Forward);
                }
                // The mask lies outside the layers and is shared by them: it stays.
                assert!(plan.decisions.iter().all(|d| d.block.is_some() || d.kept));
            }
        }
    }

    #[test]
    fn a_recomputed_layer_keeps_only_the_stream() {
        let (_, done) = compiled(Style::PreNorm, 4, Policy::Full);
        let inside = done.plan.decisions.iter().filter(|d| d.block.is_some());
        let kept: Vec<&str> = inside
            .filter(|d| d.kept)
            .map(|d| d.reason.as_str())
            .collect();
        assert_eq!(kept, ["other layers read it"; 4]);
        // In groups of two, the stream between the two is dropped as well.
        let (_, done) = compiled(Style::PreNorm, 4, Policy::Group(2));
        let kept = done
            .plan
            .decisions
            .iter()
            .filter(|d| d.block.is_some() && d.kept);
        assert_eq!(
            kept.map(|d| d.block).collect::<Vec<_>>(),
            [Some(1), Some(3)]
        );
    }

    #[test]
    fn whole_layer_policies_need_layers() {
        let structure = OpAnnotations::default();
        let e = Policy::Full
            .plan(&Problem::default(), &structure)
            .unwrap_err();
        assert!(
            e.to_string().contains("no repeated layers were found"),
            "{e}"
        );
        assert!(
            Policy::Selective
                .plan(&Problem::default(), &structure)
                .is_ok()
        );
    }

    #[test]
    fn a_stored_plan_is_replayed_only_on_its_own_problem() {
        let (_, done) = compiled(Style::PreNorm, 2, Policy::Full);
        let text = serde_json::to_string(&done.plan).unwrap();
        let stored: Plan = serde_json::from_str(&text).unwrap();
        assert_eq!(stored, done.plan);
        let mut g = transformer(2, Style::PreNorm);
        let mut cx = crate::driver::Cx::default();
        cx.options.loss = Loss::Vjp;
        cx.options.dims = vec![("b".into(), 2), ("s".into(), 64)];
        let pipeline =
            crate::driver::Pipeline::parse("infer,simplify,loss,autodiff,simplify,plan").unwrap();
        crate::driver::run(&pipeline, &mut g, &mut cx, &mut Watch::default()).unwrap();
        let subject = cx.made.unwrap().subject;
        let block_of = &subject.structure.block_of;
        assert_eq!(
            stored.clone().replay(&subject.problem, block_of).unwrap(),
            stored
        );
        // Without one copy its readers read the original, which lives that much longer.
        let mut edited = stored.clone();
        let copy = edited.segments[0].steps[0];
        let op = edited.schedule.remove(copy);
        let judged = edited.replay(&subject.problem, block_of).unwrap();
        assert_eq!(judged.after.steps + 1, stored.after.steps);
        assert!(judged.decisions.iter().any(|d| d.op == op && d.kept));
        let mut broken = stored.clone();
        broken.schedule.retain(|o| *o != op);
        assert!(broken.replay(&subject.problem, block_of).is_err());
        let mut other = subject.problem.clone();
        other.ops[0].kind = "Other".into();
        let e = stored.replay(&other, block_of).unwrap_err();
        assert!(e.to_string().contains("made for another graph"), "{e}");
    }
}
