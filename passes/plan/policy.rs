//! The policies that people know, as a table: none, selective, full, every N-th layer, the first N layers, groups of
//! layers, sub-blocks of layers.
//!
//! A policy says which forward results are kept. [`schedule`](super::saved_set) makes the schedule: a kept result that no
//! backward op reads costs nothing, and every copy has a reader. Everything outside the layers stays: embeddings, masks and
//! rotary tables that layers share, the head and the loss. What other layers read of a layer (the residual stream, shared keys
//! and values) stays too. Layers without trained parameters are left alone. [`Constraints`] may replace the layers by other
//! modules, exclude some of them, and overrule the policy for single ops.
//!
//! `selective` is the per-op rule of TorchTitan and NeMo. It keeps attention (fused: its results; decomposed: the
//! probabilities that its backward reads), convolutions, TopK, max reductions, and products with a fused bias. Of the plain
//! products of a layer it keeps the first, third, fifth, … in execution order. It recomputes everything else. In a Llama layer
//! it keeps q, v, gate and down, and recomputes k, o and up.

use super::annotations::{OpAnnotations, OpRole};
use super::constraint::{Constraint, Constraints, PolicyScope, check_constraints};
use super::index::{ByOp, ByValue, OpIdx};
use super::input::PlanInput;
use super::plan::Plan;
use super::problem::{Op, OpPhase, Problem};
use super::saved_set::{Pinned, chunked_schedule, pinned, schedule};
use super::sub_blocks::SubBlocks;
use ckpt_error::{Error, Result};
use std::collections::BTreeSet;
use std::fmt;

/// A row of [`POLICIES`].
pub struct PolicyDef {
    /// Word for the policy in options and reports, without its argument: `group`.
    pub word: &'static str,
    /// Other words for the same policy.
    pub aliases: &'static [&'static str],
    /// What must follow the word.
    pub argument: Argument,
    /// What the policy recomputes, for `--help` and the guide.
    pub help: &'static str,
    unit: Unit,
    /// The N at which budgeted plans are compared with the policy, given the number of layers; `None` leaves it out.
    compared_at: Option<fn(usize) -> usize>,
    /// The options that users write instead, without N. Only comparisons use such a policy.
    options: Option<&'static str>,
}

/// What follows the colon of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// Nothing: the word stands without a colon.
    None,
    /// A number of layers, at least 1.
    Layers,
    /// Words for [sub-blocks](SubBlocks).
    SubBlocks,
}

/// What a policy rebuilds as one. Results that leave a rebuilt unit are kept.
#[derive(Clone, Copy, Debug)]
enum Unit {
    Nothing,
    /// Single ops, by the per-op rule.
    Op,
    /// Groups of layers: the group of a layer, given its index and N; `None` leaves the layer alone.
    Layers(fn(usize, usize) -> Option<usize>),
    /// Every sub-block of a layer.
    SubBlock,
    /// The sub-blocks of the argument. Whether their results are kept is a column of their own table.
    NamedSubBlock,
    /// Every chunk of the sequence, layer by layer.
    Chunk,
}

impl Unit {
    fn needs_layers(self) -> bool {
        !matches!(self, Unit::Nothing | Unit::Op | Unit::Chunk)
    }
}

/// Every policy, in the order of `--help`, of the guide and of comparisons.
pub static POLICIES: [&PolicyDef; 9] = [
    &NONE, &SELECTIVE, &FULL, &EVERY, &FIRST, &GROUP, &SUBMODULE, &PARTS, &CHUNKS,
];

/// Returns a row without synonyms, which comparisons leave out.
const fn row(word: &'static str, argument: Argument, help: &'static str, unit: Unit) -> PolicyDef {
    PolicyDef {
        word,
        aliases: &[],
        argument,
        help,
        unit,
        compared_at: None,
        options: None,
    }
}

static NONE: PolicyDef = PolicyDef {
    aliases: &["off", "false", "no", "disabled"],
    compared_at: Some(|_| 0),
    ..row("none", Argument::None, "nothing", Unit::Nothing)
};

static SELECTIVE: PolicyDef = PolicyDef {
    compared_at: Some(|_| 0),
    ..row(
        "selective",
        Argument::None,
        "cheap results; attention, convolutions, products with a bias and every second other matrix product are kept",
        Unit::Op,
    )
};

static FULL: PolicyDef = PolicyDef {
    aliases: &["on", "true", "yes", "enabled"],
    compared_at: Some(|_| 0),
    ..row(
        "full",
        Argument::None,
        "every layer; only its inputs are kept",
        Unit::Layers(|layer, _| Some(layer)),
    )
};

static EVERY: PolicyDef = PolicyDef {
    compared_at: Some(|_| 2),
    options: Some("--policy full --every"),
    ..row(
        "every",
        Argument::Layers,
        "layers N, 2N, …, counted from 1",
        Unit::Layers(|layer, n| (layer + 1).is_multiple_of(n).then_some(layer)),
    )
};

static FIRST: PolicyDef = PolicyDef {
    compared_at: Some(|layers| layers.div_ceil(2)),
    options: Some("--policy full --first"),
    ..row(
        "first",
        Argument::Layers,
        "the first N layers",
        Unit::Layers(|layer, n| (layer < n).then_some(layer)),
    )
};

static GROUP: PolicyDef = PolicyDef {
    compared_at: Some(|_| 2),
    ..row(
        "group",
        Argument::Layers,
        "every N layers as one; only the input of the first is kept",
        Unit::Layers(|layer, n| Some(layer / n)),
    )
};

static SUBMODULE: PolicyDef = row(
    "submodule",
    Argument::None,
    "every norm, attention and MLP of a layer; only their inputs are kept",
    Unit::SubBlock,
);

static PARTS: PolicyDef = row(
    "parts",
    Argument::SubBlocks,
    "these sub-blocks of layers only; norms and inner sub-blocks with their results",
    Unit::NamedSubBlock,
);

static CHUNKS: PolicyDef = PolicyDef {
    compared_at: Some(|_| 0),
    ..row(
        "chunks",
        Argument::None,
        "every chunk of the sequence, one layer at a time; only what later chunks read is kept (`--tile-sequence`)",
        Unit::Chunk,
    )
};

impl PolicyDef {
    /// Returns the word with a placeholder for its argument: `every:N`.
    pub fn form(&self) -> String {
        match self.argument {
            Argument::None => self.word.into(),
            Argument::Layers => format!("{}:N", self.word),
            Argument::SubBlocks => format!("{}:WORD,…", self.word),
        }
    }

    /// Returns the form with the words that mean the same: `none (off, false)`.
    fn form_with_synonyms(&self) -> String {
        let synonyms = match self.argument {
            Argument::SubBlocks => SubBlocks::words().collect::<Vec<_>>().join(", "),
            _ => self.aliases.join(", "),
        };
        match synonyms.as_str() {
            "" => self.form(),
            words => format!("{} ({words})", self.form()),
        }
    }
}

/// Returns the policies that users write.
fn offered() -> impl Iterator<Item = &'static PolicyDef> {
    let all = POLICIES.into_iter();
    all.filter(|rule| rule.options.is_none())
}

/// What to recompute: a row of [`POLICIES`] with its argument.
#[derive(Clone, Copy)]
pub struct Policy {
    rule: &'static PolicyDef,
    /// N where the argument is a number of layers, else 0.
    n: usize,
    sub_blocks: SubBlocks,
}

impl Policy {
    /// Keeps every result.
    pub const NONE: Policy = Policy::of(&NONE, 0);
    /// Keeps attention, convolutions and every second matrix product of a layer, by the per-op rule.
    pub const SELECTIVE: Policy = Policy::of(&SELECTIVE, 0);
    /// Recomputes every layer from its inputs.
    pub const FULL: Policy = Policy::of(&FULL, 0);
    /// Recomputes every norm, attention and MLP of a layer from its inputs.
    pub const SUBMODULE: Policy = Policy::of(&SUBMODULE, 0);
    /// Recomputes one layer of one chunk of the sequence at a time.
    pub const CHUNKS: Policy = Policy::of(&CHUNKS, 0);

    const fn of(rule: &'static PolicyDef, n: usize) -> Policy {
        Policy {
            rule,
            n,
            sub_blocks: SubBlocks::EMPTY,
        }
    }

    /// Returns the policy that recomputes layers `n`, 2`n`, …; `n` is at least 1.
    pub const fn every(n: usize) -> Policy {
        Policy::of(&EVERY, n)
    }

    /// Returns the policy that recomputes the first `n` layers.
    pub const fn first(n: usize) -> Policy {
        Policy::of(&FIRST, n)
    }

    /// Returns the policy that recomputes every `n` layers as one; `n` is at least 1.
    pub const fn group(n: usize) -> Policy {
        Policy::of(&GROUP, n)
    }

    /// Returns one policy of each row of the table.
    pub fn examples() -> impl Iterator<Item = Policy> {
        let example = |rule: &PolicyDef| match rule.argument {
            Argument::None => Policy::parse(rule.word),
            Argument::Layers => Policy::parse(&format!("{}:2", rule.word)),
            Argument::SubBlocks => Policy::parse(&format!("{}:core-attn", rule.word)),
        };
        POLICIES.iter().filter_map(move |rule| example(rule).ok())
    }

    /// Returns the options that users write instead of the policy, if there are such.
    pub fn options(&self) -> Option<String> {
        let options = self.rule.options?;
        Some(format!("{options} {}", self.n))
    }

    /// Returns the forms of all policies that users write in a sentence, for `--help`.
    pub fn help() -> String {
        let forms: Vec<String> = offered().map(PolicyDef::form).collect();
        let sub_blocks: Vec<&str> = SubBlocks::words().collect();
        format!(
            "{} (N counts layers; WORD is {})",
            forms.join(", "),
            sub_blocks.join(", ")
        )
    }

    /// Reads a policy. Upper and lower case are the same, and so are `-` and `_`.
    ///
    /// # Errors
    /// `error[policy]` for any other word; the error lists the words.
    pub fn parse(text: &str) -> Result<Policy> {
        let unknown = || {
            let forms: Vec<String> = offered().map(PolicyDef::form_with_synonyms).collect();
            Error::usage("policy", format!("there is no policy `{text}`"))
                .expected(forms.join(", "))
        };
        let text_in_lower_case = text.trim().to_lowercase().replace('_', "-");
        let (word, argument) = match text_in_lower_case.split_once(':') {
            Some((word, argument)) => (word.trim(), Some(argument.trim())),
            None => (text_in_lower_case.as_str(), None),
        };
        let is_meant = |rule: &&&PolicyDef| rule.word == word || rule.aliases.contains(&word);
        let rule = *POLICIES.iter().find(is_meant).ok_or_else(unknown)?;
        match (rule.argument, argument) {
            (Argument::None, None) => Ok(Policy::of(rule, 0)),
            (Argument::SubBlocks, Some(words)) => Ok(Policy {
                sub_blocks: SubBlocks::parse(words)?,
                ..Policy::of(rule, 0)
            }),
            (Argument::Layers, Some(count)) => match count.parse().map_err(|_| unknown())? {
                0 => {
                    let what = format!("`{text}`: the number of layers must be 1 or more");
                    Err(Error::usage("policy", what))
                }
                n => Ok(Policy::of(rule, n)),
            },
            _ => Err(unknown()),
        }
    }

    /// Returns the policies that budgeted plans start from and are compared with, for a step of that many layers. Without chunks
    /// of the sequence there is no policy of chunks.
    pub fn compared(annotations: &OpAnnotations) -> impl Iterator<Item = Policy> {
        let (layers, chunked) = (annotations.layers, annotations.has_chunks());
        let is_meant =
            move |rule: &&&'static PolicyDef| chunked || !matches!(rule.unit, Unit::Chunk);
        let at =
            move |rule: &&'static PolicyDef| rule.compared_at.map(|n| Policy::of(rule, n(layers)));
        POLICIES.iter().filter(is_meant).filter_map(at)
    }

    /// Returns whether the policy means something for such a step.
    pub fn applies(&self, annotations: &OpAnnotations) -> bool {
        match self.rule.unit {
            Unit::Nothing => true,
            Unit::Chunk => annotations.has_chunks(),
            _ => annotations.layers > 0,
        }
    }

    /// Returns the word, with a placeholder for a number of layers where no layers are known.
    pub fn form(&self, layers: usize) -> String {
        match layers {
            0 => self.rule.form(),
            _ => self.to_string(),
        }
    }

    /// Plans by this policy under the constraints of `input`.
    ///
    /// # Errors
    /// `error[policy]` for a policy of layers on a step without layers.
    pub fn plan(self, input: &PlanInput) -> Result<Plan> {
        self.constrained_plan(input, &input.constraints, &input.overrides)
    }

    /// Plans by this policy without the user's overrides.
    ///
    /// # Errors
    /// See [`Policy::plan`].
    pub fn unconstrained_plan(self, input: &PlanInput) -> Result<Plan> {
        self.constrained_plan(input, &Constraints::none(&input.annotations), "")
    }

    fn constrained_plan(
        self,
        input: &PlanInput,
        constraints: &Constraints,
        overrides: &str,
    ) -> Result<Plan> {
        let PlanInput {
            problem,
            annotations,
            ..
        } = input;
        let hard = constraints.of_policy(problem)?;
        let retentions = self.retentions(problem, annotations, constraints)?;
        let keep: ByValue<bool> = retentions.iter().map(|r| r.keep).collect();
        let reasons: ByValue<String> = retentions.into_iter().map(|r| r.reason).collect();
        let schedule = match self.rule.unit {
            Unit::Chunk => chunked_schedule(problem, &keep, &annotations.layer_chunk_of),
            _ => schedule(problem, &keep),
        };
        check_constraints(problem, &schedule, &hard)?;
        let name = format!("{self} {overrides}");
        let layer_of = &annotations.layer_of;
        Plan::new(name.trim_end(), problem, &schedule, layer_of, &reasons)
    }

    /// Returns whether each storage is kept, by its owner, and why.
    fn retentions(
        self,
        problem: &Problem,
        annotations: &OpAnnotations,
        constraints: &Constraints,
    ) -> Result<ByValue<Retention>> {
        let unit = self.rule.unit;
        if unit.needs_layers() && constraints.layers == 0 {
            let what = format!("`{self}` needs layers, and no repeated layers were found");
            return Err(Error::usage("policy", what).help(match annotations.has_chunks() {
                true => "use --policy chunks: the sequence goes through the model in chunks",
                false => {
                    "use --policy selective, which works on any graph, or name modules with --layers"
                }
            }));
        }
        if matches!(unit, Unit::Chunk) && !annotations.has_chunks() {
            let what = format!("`{self}` needs a sequence in chunks, and it is whole");
            return Err(Error::usage("policy", what).help("cut it with --tile-sequence N"));
        }
        let ops = || problem.ops.indices();
        let scope = |op: OpIdx| constraints.scope[op];
        // The group that an op is rebuilt with; what leaves it is kept.
        let group_of = |op: OpIdx| {
            if matches!(unit, Unit::Chunk) {
                let place = annotations.layer_chunk_of[op].filter(|_| !scope(op).is_exempt());
                return place.map(|place| place.chunk as usize);
            }
            let layer = scope(op).layer()?;
            let sub_block = annotations.sub_block_of[op];
            match unit {
                Unit::Nothing | Unit::Chunk => None,
                Unit::Op => Some(layer),
                Unit::Layers(group) => group(layer, self.n),
                Unit::SubBlock => sub_block,
                Unit::NamedSubBlock => {
                    let word = self.sub_blocks.word_of(annotations, op)?;
                    sub_block.filter(|_| SubBlocks::keeps_output(word))
                }
            }
        };
        // What an op of a layer is rebuilt with, in words.
        let rebuilt_with = |op: OpIdx| match unit {
            Unit::SubBlock => group_of(op).map(|s| annotations.sub_blocks[s].as_str()),
            Unit::NamedSubBlock => self.sub_blocks.word_of(annotations, op),
            Unit::Chunk => group_of(op).map(|_| "chunk"),
            _ => group_of(op).map(|_| "layer"),
        };
        let in_layer = |op: OpIdx| scope(op).layer().is_some();
        let is_found = ops().any(|op| in_layer(op) && rebuilt_with(op).is_some());
        let by_op: ByOp<Retention> = match unit {
            Unit::Nothing => problem.by_op(Retention::keep("policy none keeps everything")),
            Unit::Op => selective(problem, annotations, constraints),
            Unit::NamedSubBlock if !is_found => return Err(no_sub_block(annotations, self)),
            _ => ops()
                .map(|op| match (scope(op), rebuilt_with(op)) {
                    (PolicyScope::Layer(_), Some(word)) => {
                        Retention::drop(&format!("inside a recomputed {word}"))
                    }
                    (PolicyScope::Layer(_), None) if matches!(unit, Unit::NamedSubBlock) => {
                        Retention::keep("in no part that was asked for")
                    }
                    (_, Some(word)) if matches!(unit, Unit::Chunk) => {
                        Retention::drop(&format!("inside a recomputed {word}"))
                    }
                    (scope, _) => Retention::keep(scope.reason()),
                })
                .collect(),
        };
        let roots = problem.roots();
        let mut retentions: ByValue<Retention> = problem
            .values
            .iter()
            .map(|v| {
                v.producer
                    .map_or(Retention::keep(Pinned::Static.reason()), |op| {
                        by_op[op].clone()
                    })
            })
            .collect();
        let is_forward = |(_, op): &(OpIdx, &Op)| op.phase == OpPhase::Forward;
        let forward = || problem.ops.enumerated().filter(is_forward);
        // What another group, or anything outside the layers, reads is an output of the group.
        for (o, op) in forward() {
            for root in op.ins.iter().map(|v| roots[*v]) {
                if let Some(group) = problem.values[root].producer.and_then(group_of)
                    && group_of(o) != Some(group)
                    && !retentions[root].keep
                {
                    retentions[root] = Retention::keep(match unit {
                        Unit::Chunk => "later chunks read it",
                        _ => "other layers read it",
                    });
                }
            }
        }
        for (o, op) in forward() {
            let Some(forced) = &constraints.forced[o] else {
                continue;
            };
            for v in &op.outs {
                retentions[*v] = match forced.constraint {
                    Constraint::Keep => Retention::keep(&forced.by),
                    Constraint::Recompute => Retention::drop(&forced.by),
                };
            }
        }
        for (retention, pin) in retentions.iter_mut().zip(pinned(problem)) {
            if let Some(pin) = pin.filter(|_| !retention.keep) {
                *retention = Retention::keep(pin.reason());
            }
        }
        Ok(retentions)
    }
}

fn no_sub_block(annotations: &OpAnnotations, policy: Policy) -> Box<Error> {
    let mut found: BTreeSet<&str> = annotations.sub_blocks.iter().map(String::as_str).collect();
    found.extend(annotations.core_of.iter().flatten().map(String::as_str));
    let found: Vec<&str> = found.into_iter().collect();
    Error::usage(
        "policy",
        format!("`{policy}`: no layer has such a sub-block"),
    )
    .found(format!("sub-blocks {}", found.join(", ")))
}

/// Whether a result is kept, and why.
#[derive(Clone, Debug)]
struct Retention {
    keep: bool,
    reason: String,
}

impl Retention {
    fn keep(reason: &str) -> Retention {
        let (keep, reason) = (true, reason.into());
        Retention { keep, reason }
    }

    fn drop(reason: &str) -> Retention {
        let (keep, reason) = (false, reason.into());
        Retention { keep, reason }
    }
}

/// Returns what the per-op rule keeps. Without layers the whole forward pass counts as one.
fn selective(
    problem: &Problem,
    annotations: &OpAnnotations,
    constraints: &Constraints,
) -> ByOp<Retention> {
    let mut products = vec![0usize; constraints.layers.max(1)];
    let retention = |o: OpIdx| {
        let layer = match constraints.scope[o] {
            PolicyScope::Layer(layer) => layer,
            PolicyScope::NoLayer if constraints.layers == 0 => 0,
            scope => return Retention::keep(scope.reason()),
        };
        match annotations.role_of[o] {
            OpRole::PlainProduct => {
                products[layer] += 1;
                let n = products[layer];
                match n % 2 {
                    1 => Retention::keep(&format!("product {n} of its layer: odd ones stay")),
                    _ => Retention::drop(&format!("product {n} of its layer: every second one")),
                }
            }
            OpRole::BiasedProduct => Retention::keep("a product with a fused bias"),
            OpRole::Probabilities => Retention::keep("attention probabilities"),
            OpRole::FusedAttention => Retention::keep("attention"),
            OpRole::Convolution => Retention::keep("a convolution"),
            OpRole::TopK => Retention::keep("a choice that must not change"),
            OpRole::MaxReduction => Retention::keep("a max reduction"),
            OpRole::Other => Retention::drop("not on the list of what stays"),
        }
    };
    problem.ops.indices().map(retention).collect()
}

impl PartialEq for Policy {
    fn eq(&self, other: &Policy) -> bool {
        self.rule.word == other.rule.word
            && (self.n, self.sub_blocks) == (other.n, other.sub_blocks)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = self.rule.word;
        match self.rule.argument {
            Argument::None => f.write_str(word),
            Argument::Layers => write!(f, "{word}:{}", self.n),
            Argument::SubBlocks => write!(f, "{word}:{}", self.sub_blocks),
        }
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_and_written_back() {
        let examples: Vec<Policy> = Policy::examples().collect();
        assert_eq!(examples.len(), POLICIES.len());
        for policy in examples {
            assert_eq!(Policy::parse(&policy.to_string()).unwrap(), policy);
            for word in policy.rule.aliases {
                assert_eq!(Policy::parse(word).unwrap(), policy, "{word}");
            }
        }
        for (text, policy) in [
            ("OFF", Policy::NONE),
            ("Full", Policy::FULL),
            (" Selective", Policy::SELECTIVE),
            ("every: 2", Policy::every(2)),
            ("First:3", Policy::first(3)),
            ("group:4", Policy::group(4)),
            ("SubModule", Policy::SUBMODULE),
            (
                "parts:MLP, core_attn",
                Policy::parse("parts:core-attn,mlp").unwrap(),
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
            "full:2",
            "parts",
            "parts:",
            "parts:mlp,tail",
            "__import__('os')",
        ] {
            let e = Policy::parse(text).unwrap_err();
            assert_eq!(e.exit_code(), 2, "{text}");
        }
        let unknown = Policy::parse("ful").unwrap_err().to_string();
        assert!(
            unknown.contains("enabled), group:N, submodule"),
            "{unknown}"
        );
    }

    #[test]
    fn which_layers_are_recomputed() {
        let groups = |policy: Policy| match policy.rule.unit {
            Unit::Layers(group) => [0, 1, 2, 3, 4].map(|layer| group(layer, policy.n)),
            _ => [None; 5],
        };
        assert_eq!(
            groups(Policy::every(2)),
            [None, Some(1), None, Some(3), None]
        );
        assert_eq!(
            groups(Policy::first(2)),
            [Some(0), Some(1), None, None, None]
        );
        assert_eq!(
            groups(Policy::group(2)),
            [Some(0), Some(0), Some(1), Some(1), Some(2)]
        );
        assert_eq!(groups(Policy::FULL), [0, 1, 2, 3, 4].map(Some));
    }

    #[test]
    fn whole_layer_policies_need_layers() {
        let input = PlanInput::new(Problem::default(), OpAnnotations::default());
        let e = Policy::FULL.plan(&input).unwrap_err();
        assert!(
            e.to_string().contains("no repeated layers were found"),
            "{e}"
        );
        assert!(Policy::SELECTIVE.plan(&input).is_ok());
    }

    #[test]
    fn the_guide_lists_every_policy() {
        let guide = include_str!("../../docs/guides/policies.md");
        for rule in offered() {
            let row = format!("| `{}` | {} |", rule.form(), rule.help);
            assert!(guide.contains(&row), "the guide lacks the line\n{row}");
        }
    }
}
