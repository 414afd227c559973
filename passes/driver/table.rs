//! The passes there are, and what they are given.

use super::{After, Changed, Pass};
use crate::analysis::Device;
use crate::analysis::params::{Parameter, Selection, parameters};
use crate::analysis::sizes::Binding;
use crate::error::{Error, Result};
use crate::ir::{Graph, Phase, ValueId};
use crate::plan::offload::By;
use crate::plan::{
    Basis, BudgetGoal, Constraints, Offloading, Plan, PlanContext, PlanInput, Policy,
    PolicyOverrides, Times, Tried, refine::refine, tiling,
};
use crate::transform;
use crate::transform::fuse::Fused;
use crate::transform::loss::{Loss, Seed};
use crate::transform::optimizer::{Optimizer, Updates, add_updates};
use crate::transform::tile::{self, Tile, Tiled, Tiles};
use std::time::Instant;

/// What was asked for: the options that passes read.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers for named sizes, for planning only.
    pub dims: Vec<(String, i64)>,
    pub loss: Loss,
    pub selection: Selection,
    /// Patterns over names of forward outputs that the result does without.
    pub drop_outputs: Vec<String>,
    pub policy: Policy,
    pub overrides: PolicyOverrides,
    /// Takes the place of the policy.
    pub budget: Option<BudgetGoal>,
    /// Takes the place of both: a plan that was made before.
    pub stored: Option<Plan>,
    pub device: Device,
    /// Measured times of nodes: they take the place of the model's.
    pub times: Option<Times>,
    /// What is cut into how many parts.
    pub tile: Tiles,
    /// What waits outside the device's memory.
    pub offload: Offloading,
    /// What updates the parameters.
    pub optimizer: Option<Optimizer>,
    /// Each update as soon as its gradient is complete; gradients are no outputs then.
    pub fuse_optimizer: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            dims: Vec::new(),
            loss: Loss::Auto,
            selection: Selection::default(),
            drop_outputs: Vec::new(),
            policy: Policy::Selective,
            overrides: PolicyOverrides::default(),
            budget: None,
            stored: None,
            device: Device::default(),
            times: None,
            tile: Tiles::default(),
            offload: Offloading::default(),
            optimizer: None,
            fuse_optimizer: false,
        }
    }
}

/// A plan with what it was made for.
pub struct Made {
    pub plan: Plan,
    /// The overrides of the request, by op.
    pub choices: Constraints,
    pub subject: PlanInput,
    pub binding: Binding,
    /// Time that the plan took once the problem was there, in seconds.
    pub seconds: f64,
    /// The smallest peak for which a plan is known; for a budget only.
    pub smallest_bytes: Option<u64>,
}

/// What passes share: the request, and what one pass leaves for the next.
#[derive(Default)]
pub struct Cx {
    pub options: Options,
    /// What the user should know.
    pub warnings: Vec<String>,
    /// What `fuse` put in, and how often.
    pub fused: Fused,
    /// What `tile` cut: the node that makes the scores, and the number of parts.
    pub tiled: Vec<(String, usize)>,
    /// The same for chains in the middle of the model, by their first nodes.
    pub tiled_mlps: Vec<(String, usize)>,
    /// Numbers of parts that were planned, where that was left to the planner.
    pub tried: Option<Tried>,
    /// What `optimizer` added.
    pub updates: Updates,
    /// Left by `loss` for `autodiff`.
    pub seeds: Vec<Seed>,
    /// The loss that was meant, left by `loss`.
    pub loss: Option<Loss>,
    /// Left by `autodiff`.
    pub parameters: Vec<Parameter>,
    /// Left by `plan` for `remat`.
    pub made: Option<Made>,
}

const ANY: &[Phase] = &[
    Phase::Imported,
    Phase::Typed,
    Phase::Training,
    Phase::Rewritten,
];

/// Every pass.
pub static ALL: &[&Pass] = &[
    &INFER, &SIMPLIFY, &FUSE, &LOSS, &AUTODIFF, &STRIP, &TILE, &OPTIMIZER, &PLAN, &REMAT, &DCE,
];

static INFER: Pass = Pass {
    name: "infer",
    from: ANY,
    to: After::AtLeast(Phase::Typed),
    follows: None,
    idempotent: true,
    run: |graph, _| {
        transform::infer::infer(graph)?;
        Ok(Changed::Yes)
    },
};

static SIMPLIFY: Pass = Pass {
    name: "simplify",
    from: &[Phase::Typed, Phase::Training],
    to: After::Same,
    follows: None,
    idempotent: true,
    run: |graph, _| Ok(transform::simplify::simplify(graph)?.into()),
};

static FUSE: Pass = Pass {
    name: "fuse",
    from: &[Phase::Typed],
    to: After::Same,
    follows: None,
    idempotent: true,
    run: |graph, cx| {
        let fused = transform::fuse::fuse(graph)?;
        let changed = !fused.is_empty();
        for (word, count) in fused {
            *cx.fused.entry(word).or_insert(0) += count;
        }
        Ok(changed.into())
    },
};

static LOSS: Pass = Pass {
    name: "loss",
    from: &[Phase::Typed],
    to: After::Same,
    follows: None,
    idempotent: false,
    run: |graph, cx| {
        let outputs = graph.outputs().to_vec();
        let made =
            transform::joint::loss_and_outputs(graph, &cx.options.loss, &cx.options.drop_outputs)?;
        cx.seeds = made.seeds;
        let mut changed = graph.outputs() != outputs || made.loss == Loss::Vjp;
        if cx.options.tile.loss != Tile::Off {
            let instead = tile::early::settle_rows(graph)?;
            changed |= !instead.is_empty();
            let own = |v: ValueId| instead.get(&v).copied().unwrap_or(v);
            for seed in &mut cx.seeds {
                (seed.value, seed.cotangent) = (own(seed.value), seed.cotangent.map(own));
            }
        }
        cx.loss = Some(made.loss);
        Ok(changed.into())
    },
};

static AUTODIFF: Pass = Pass {
    name: "autodiff",
    from: &[Phase::Typed],
    to: After::Exactly(Phase::Training),
    follows: Some("loss"),
    idempotent: false,
    run: |graph, cx| {
        cx.parameters = parameters(graph, &cx.options.selection)?;
        let trained: Vec<_> = cx
            .parameters
            .iter()
            .filter(|p| p.trainable)
            .map(|p| p.value)
            .collect();
        if trained.is_empty() {
            return Err(Error::usage("parameters", "there is no parameter to train")
                .help("see `ckpt-opt inspect MODEL`, --trainable and --freeze"));
        }
        let bodies = transform::autodiff::autodiff(graph, &cx.seeds, &trained)?;
        if !bodies.is_empty() {
            let each: Vec<String> = bodies.iter().map(|(op, n)| format!("{n} {op}")).collect();
            cx.warnings.push(format!(
                "gradients of gradients are taken through bodies in standard ops, for want of rules: {}",
                each.join(", ")
            ));
        }
        Ok(Changed::Yes)
    },
};

static STRIP: Pass = Pass {
    name: "strip",
    from: &[Phase::Training, Phase::Rewritten],
    to: After::Exactly(Phase::Training),
    follows: None,
    idempotent: true,
    run: |graph, _| {
        transform::remat::strip_again(graph);
        Ok(Changed::Yes)
    },
};

static TILE: Pass = Pass {
    name: "tile",
    from: &[Phase::Training],
    to: After::Same,
    follows: None,
    idempotent: false,
    run: |graph, cx| {
        let wish = cx.options.tile;
        if wish == Tiles::default() {
            return Ok(Changed::No);
        }
        let binding = Binding::new(graph, &cx.options.dims)?;
        let options = &mut cx.options;
        let open = |wish: Tile, stored: Option<usize>, plan: &Plan| match (wish, stored) {
            (Tile::Auto, Some(parts)) => Tile::Chunks(parts),
            // A schedule without anything else does not say what it was made for.
            (Tile::Auto, None) if !plan.fingerprint.is_empty() => Tile::Off,
            (wish, _) => wish,
        };
        let wish = match (&options.stored, &options.budget) {
            (Some(plan), _) => Tiles {
                loss: open(wish.loss, plan.loss_parts, plan),
                mlp: open(wish.mlp, plan.mlp_parts, plan),
            },
            (None, Some(budgeted)) if wish.is_open() => {
                let question = tiling::Question {
                    graph,
                    tiles: wish,
                    budgeted,
                    offload: &options.offload,
                    usable_bytes: options.device.usable_bytes(),
                    tiled: &|graph, wish| {
                        let (loss, mlps) = cut(graph, wish, &binding)?;
                        update(graph, options)?;
                        Ok((loss.most_chunks(), mlps.most_chunks()))
                    },
                    subject: &|graph| {
                        let subject = priced(graph, &binding, options)?.0;
                        let choices = refine(&options.overrides, graph, &subject)?;
                        Ok((subject, choices))
                    },
                };
                cx.tried = tiling::search(&question)?;
                cx.tried.as_ref().map_or(wish, Tried::tiles)
            }
            (None, _) => wish,
        };
        if let (Some(tried), Some(budgeted)) = (&cx.tried, &mut options.budget) {
            *budgeted = tried.settled(budgeted);
        }
        let (loss, mlps) = cut(graph, wish, &binding)?;
        if wish.loss != Tile::Off && !loss.found {
            cx.warnings
                .push("there is no loss over classes whose rows could be tiled".into());
        }
        if wish.mlp != Tile::Off && mlps.regions.is_empty() {
            cx.warnings.push(match mlps.refused.first() {
                Some(why) => format!("no MLP could be tiled: {why}"),
                None => "there is no MLP whose rows could be tiled".into(),
            });
        }
        cx.warnings.extend(loss.refused);
        let changed = loss.regions.len() + mlps.regions.len() > 0;
        cx.tiled.extend(loss.regions);
        cx.tiled_mlps.extend(mlps.regions);
        Ok(changed.into())
    },
};

/// Cuts losses, then chains.
fn cut(graph: &mut Graph, wish: Tiles, binding: &Binding) -> Result<(Tiled, Tiled)> {
    let (mut loss, mut mlps) = (Tiled::default(), Tiled::default());
    if wish.loss != Tile::Off {
        loss = tile::tile(graph, &|graph, region| {
            wish.loss.chunks(graph, region, binding)
        })?;
    }
    if wish.mlp != Tile::Off {
        mlps = tile::tile_chains(graph, &|graph, region| {
            wish.mlp.chunks(graph, region, binding)
        })?;
    }
    Ok((loss, mlps))
}

/// A graph as a problem, its times as measured where they were; and what is to be said about these.
fn priced(graph: &Graph, binding: &Binding, options: &Options) -> Result<(PlanInput, Vec<String>)> {
    let mut subject = PlanInput::new(graph, binding, &options.device)?;
    let mut warnings = Vec::new();
    if let Some(times) = &options.times {
        times.check_dims(binding.iter())?;
        warnings.extend(times.price(&mut subject.problem)?);
    }
    Ok((subject, warnings))
}

/// Adds the updates that are asked for.
fn update(graph: &mut Graph, options: &Options) -> Result<Option<Updates>> {
    let add = |optimizer| add_updates(graph, &optimizer, options.fuse_optimizer);
    options.optimizer.map(add).transpose()
}

static OPTIMIZER: Pass = Pass {
    name: "optimizer",
    from: &[Phase::Training],
    to: After::Same,
    follows: None,
    idempotent: false,
    run: |graph, cx| {
        let Some(updates) = update(graph, &cx.options)? else {
            return Ok(Changed::No);
        };
        cx.warnings.extend(
            updates
                .unreached
                .iter()
                .map(|name| format!("the loss does not depend on `{name}`: it is not updated")),
        );
        cx.updates = updates;
        Ok(Changed::Yes)
    },
};

static PLAN: Pass = Pass {
    name: "plan",
    from: &[Phase::Training],
    to: After::Same,
    follows: None,
    idempotent: true,
    run: |graph, cx| {
        let binding = Binding::new(graph, &cx.options.dims)?;
        let options = &mut cx.options;
        let (subject, warnings) = priced(graph, &binding, options)?;
        cx.warnings.extend(warnings);
        cx.warnings
            .extend(options.offload.warning(&subject.structure));
        let started = Instant::now();
        let choices = refine(&options.overrides, graph, &subject)?;
        let overrides = options.overrides.to_string();
        let setting = PlanContext {
            problem: &subject.problem,
            structure: &subject.structure,
            choices: &choices,
            overrides: &overrides,
            basis: Basis::Peak,
            usable_bytes: options.device.usable_bytes(),
        };
        let mut plan = match (options.stored.take(), &options.budget) {
            (Some(stored), _) => stored.replay(&subject.problem, &subject.structure.block_of)?,
            (None, Some(budgeted)) => options.offload.plan(&setting, By::Budget(budgeted))?,
            (None, None) => options.offload.plan(&setting, By::Policy(options.policy))?,
        };
        let seconds = started.elapsed().as_secs_f64();
        let smallest_bytes = match (&plan.certificate, &options.budget) {
            (Some(_), Some(budgeted)) => budgeted.smallest_bytes(&setting, &plan)?,
            _ => None,
        };
        plan.loss_parts = cx.tiled.iter().map(|(_, parts)| *parts).max();
        plan.mlp_parts = cx.tiled_mlps.iter().map(|(_, parts)| *parts).max();
        if let Some(tried) = &cx.tried {
            tried.qualify(&mut plan);
        }
        cx.made = Some(Made {
            plan,
            choices,
            subject,
            binding,
            seconds,
            smallest_bytes,
        });
        Ok(Changed::No)
    },
};

static REMAT: Pass = Pass {
    name: "remat",
    from: &[Phase::Training],
    to: After::Exactly(Phase::Rewritten),
    follows: Some("plan"),
    idempotent: false,
    run: |graph, cx| {
        let Some(made) = &cx.made else {
            return Err(Error::bug("driver", "there is no plan to apply"));
        };
        let s = &made.subject;
        transform::remat::remat(graph, &s.problem, &s.map, &made.plan, &s.structure.block_of)?;
        Ok(Changed::Yes)
    },
};

static DCE: Pass = Pass {
    name: "dce",
    from: ANY,
    to: After::Same,
    follows: None,
    idempotent: true,
    run: |graph, _| Ok(transform::dce::dce(graph).into()),
};
