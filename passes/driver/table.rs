//! The table of passes.

use super::pass::{After, Changed, Pass, Planned};
use crate::analysis::params::parameters;
use crate::analysis::sizes::Binding;
use crate::analysis::zero_gradients::zero_gradients;
use crate::error::{Error, Result};
use crate::ir::{Graph, Phase, ValueId};
use crate::ops::collective::drop_shared;
use crate::plan::chunks::Chunks;
use crate::plan::offload;
use crate::plan::plan::Plan;
use crate::plan::planner::plan;
use crate::plan::request::Goal;
use crate::planning::bound_graph::BoundGraph;
use crate::planning::chunk_search;
use crate::request::Request;
use crate::transform;
use crate::transform::collectives::{Mesh, Shard, reduce_gradients, take_own, weigh_loss};
use crate::transform::gather::shard_parameters;
use crate::transform::loss::Loss;
use crate::transform::optimizer::{add_updates, scale_loss};
use crate::transform::overlap::overlap;
use crate::transform::sequence::prefixes::flatten;
use crate::transform::sequence::{Chunked, chunk_sequence};
use crate::transform::sequence_parallel::{scatter_sums, share_rows};
use crate::transform::stop_gradient::self_differences;
use crate::transform::tensor_parallel::share_layers;
use crate::transform::tile::{self, Tile, Tiled, Tiles};

const ANY: &[Phase] = &[
    Phase::Imported,
    Phase::Typed,
    Phase::Training,
    Phase::Rewritten,
];

/// Every pass.
pub static ALL: &[&Pass] = &[
    &INFER,
    &TIE,
    &SIMPLIFY,
    &LORA,
    &FUSE,
    &LOSS,
    &SEQUENCE,
    &AUTODIFF,
    &STRIP,
    &ATTENTION,
    &TILE,
    &COLLECTIVES,
    &OPTIMIZER,
    &GATHER,
    &OVERLAP,
    &PLAN,
    &REMAT,
    &DCE,
];

static INFER: Pass = Pass {
    name: "infer",
    from: ANY,
    to: After::AtLeast(Phase::Typed),
    follows: &[],
    idempotent: true,
    run: |graph, _| {
        transform::infer::infer(graph)?;
        Ok(Changed::Yes)
    },
};

static TIE: Pass = Pass {
    name: "tie",
    from: &[Phase::Typed],
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, cx| {
        let tied = transform::tie::tie(graph, &cx.request.selection, &cx.request.ties)?;
        cx.done.warnings.extend(tied.lines);
        cx.done.tied.extend(tied.pairs);
        Ok((!cx.done.tied.is_empty()).into())
    },
};

static SIMPLIFY: Pass = Pass {
    name: "simplify",
    from: &[Phase::Typed, Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, _| Ok(transform::simplify::simplify(graph)?.into()),
};

static LORA: Pass = Pass {
    name: "lora",
    from: &[Phase::Typed],
    to: After::Same,
    follows: &[],
    idempotent: false,
    run: |graph, cx| {
        let Some(lora) = &cx.request.lora else {
            return Ok(Changed::No);
        };
        cx.adapters = transform::lora::add_adapters(graph, lora)?;
        cx.done
            .warnings
            .extend(cx.adapters.warnings.iter().cloned());
        Ok(Changed::Yes)
    },
};

static FUSE: Pass = Pass {
    name: "fuse",
    from: &[Phase::Typed],
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, cx| {
        let fused = transform::fuse::fuse(graph)?;
        let changed = !fused.is_empty();
        for (word, count) in fused {
            *cx.done.fused.entry(word).or_insert(0) += count;
        }
        Ok(changed.into())
    },
};

static LOSS: Pass = Pass {
    name: "loss",
    from: &[Phase::Typed],
    to: After::Same,
    follows: &[],
    idempotent: false,
    run: |graph, cx| {
        let outputs = graph.outputs().to_vec();
        let made =
            transform::joint::loss_and_outputs(graph, &cx.request.loss, &cx.request.drop_outputs)?;
        cx.seeds = made.seeds;
        cx.done.warnings.extend(made.warnings);
        let mut changed = graph.outputs() != outputs || made.loss == Loss::Vjp;
        if cx.request.tile.loss != Tile::Off || cx.request.sequence_chunks > 1 {
            let instead = tile::early::settle_rows(graph)?;
            cx.done.settled = !instead.is_empty();
            changed |= cx.done.settled;
            let own = |v: ValueId| instead.get(&v).copied().unwrap_or(v);
            for seed in &mut cx.seeds {
                (seed.value, seed.cotangent) = (own(seed.value), seed.cotangent.map(own));
            }
        }
        cx.done.loss = Some(made.loss);
        Ok(changed.into())
    },
};

static SEQUENCE: Pass = Pass {
    name: "sequence",
    from: &[Phase::Typed],
    to: After::Same,
    follows: &["loss"],
    idempotent: false,
    run: |graph, cx| {
        let count = cx.request.sequence_chunks;
        if count < 2 {
            return Ok(Changed::No);
        }
        let binding = Binding::new(graph, &cx.request.dims)?;
        let chunked = chunk_sequence(graph, &mut cx.seeds, count, &binding)?;
        if !chunked.joined.is_empty() {
            cx.done.warnings.push(format!(
                "outputs exist for all positions at once: {}; leave them out with --drop-output",
                chunked.joined.join(", ")
            ));
        }
        if let Some(first) = chunked.biased.first() {
            cx.done.warnings.push(format!(
                "`{first}` and others like it ({} in all) are causal by a bias: a query that sees no key, such as padding at the \
                 start of a sequence, gives another result in chunks",
                chunked.biased.len()
            ));
        }
        cx.done.sequence = Some(chunked);
        Ok(Changed::Yes)
    },
};

static AUTODIFF: Pass = Pass {
    name: "autodiff",
    from: &[Phase::Typed],
    to: After::Exactly(Phase::Training),
    follows: &["loss", "sequence"],
    idempotent: false,
    run: |graph, cx| {
        let selection = &cx.request.selection;
        cx.done.parameters = match cx.request.lora {
            Some(_) => parameters(graph, &cx.adapters.selection(selection))?,
            None => parameters(graph, selection)?,
        };
        let mut trained: Vec<_> = cx
            .done
            .parameters
            .iter()
            .filter(|p| p.trainable)
            .map(|p| p.value)
            .collect();
        if trained.is_empty() {
            return Err(Error::usage("parameters", "there is no parameter to train")
                .help("see `ckpt-opt inspect MODEL`, --trainable and --freeze"));
        }
        if cx.request.updates.optimizer.is_some() && cx.request.updates.loss_scale {
            scale_loss(graph, &mut cx.seeds)?;
        }
        let seeds: Vec<ValueId> = cx.seeds.iter().map(|seed| seed.value).collect();
        let zero_ratios = self_differences(graph, &trained, &seeds);
        let mesh = cx.request.mesh.unwrap_or_default();
        if mesh.ranks() > 1 && take_own(graph, &mesh)? {
            cx.done.warnings.push(
                "the model has collectives of its own, so ranks need batches of one size: see --drop-last".into(),
            );
        }
        if mesh.dp > 1 {
            weigh_loss(graph, &mut cx.seeds, &mesh)?;
        }
        if mesh.tp > 1 {
            let weights: Vec<ValueId> = cx.done.parameters.iter().map(|p| p.value).collect();
            let shared = share_layers(graph, &mut cx.seeds, &weights, &mut trained, mesh.tp)?;
            cx.done.warnings.push(shared.note(mesh.tp));
            if mesh.shares_rows {
                let rows = share_rows(graph, &mut cx.seeds, &shared, &trained, mesh.tp)?;
                cx.done.warnings.push(rows.note());
            }
        }
        let notes = transform::autodiff::autodiff(graph, &cx.seeds, &trained)?;
        drop_shared(graph);
        if mesh.shares_rows {
            scatter_sums(graph)?;
        }
        if let Some(chunked) = &cx.done.sequence {
            flatten(graph, &chunked.prefixes)?;
        }
        let zero: Vec<String> = zero_gradients(graph)
            .into_iter()
            .map(|v| format!("`{}`", graph.value(v).name))
            .collect();
        if !zero.is_empty() {
            cx.done.warnings.push(format!(
                "the loss does not depend on {}, or multiplies by 0: the gradient is zero; leave them out with --freeze",
                zero.join(", ")
            ));
        }
        for id in zero_ratios {
            let node = graph.node(id);
            cx.done.warnings.push(format!(
                "`{0}` takes a value and itself, so no gradient flows through it; if the model detaches one of them, the \
                 export lost that: --stop-gradient '{0}#1' stops the gradient of the second, or export a .pt2 file",
                node.name
            ));
        }
        for ((op, operand), n) in &notes.stopped {
            cx.done.warnings.push(format!(
                "no gradient flows into `{operand}` of {n} {op}, which depends on trained parameters: it counts as a constant"
            ));
        }
        if notes.rounded > 0 {
            cx.done.warnings.push(format!(
                "{} gradients are rounded to floats of 8 bits, as PyTorch rounds those of casts: small ones become 0, and large ones \
                 infinite or NaN; QuantizeLinear and DequantizeLinear pass them on as they are",
                notes.rounded
            ));
        }
        if !notes.through_bodies.is_empty() {
            let each = notes.through_bodies.iter();
            let each: Vec<String> = each.map(|(op, n)| format!("{n} {op}")).collect();
            cx.done.warnings.push(format!(
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
    follows: &[],
    idempotent: true,
    run: |graph, _| {
        transform::remat::strip_plan(graph);
        Ok(Changed::Yes)
    },
};

static ATTENTION: Pass = Pass {
    name: "attention",
    from: &[Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, cx| {
        let binding = Binding::new(graph, &cx.request.dims)?;
        let device = &cx.request.device;
        Ok(transform::saved_attention::save_attention(graph, &binding, device)?.into())
    },
};

static TILE: Pass = Pass {
    name: "tile",
    from: &[Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: false,
    run: |graph, cx| {
        let asked = cx.request.tile;
        if asked == Tiles::default() {
            return Ok(Changed::No);
        }
        let binding = Binding::new(graph, &cx.request.dims)?;
        let (request, sequence) = (&cx.request, cx.done.sequence.as_ref());
        let open = |asked: Tile, stored: Option<usize>, plan: &Plan| match (asked, stored) {
            (Tile::Auto, Some(chunks)) => Tile::Chunks(chunks),
            // A bare schedule does not say what it was made for.
            (Tile::Auto, None) if !plan.fingerprint.is_empty() => Tile::Off,
            (asked, _) => asked,
        };
        let tiles = match &request.plan.goal {
            Goal::Stored(plan) => Tiles {
                loss: open(asked.loss, plan.loss_chunks, plan),
                mlp: open(asked.mlp, plan.mlp_chunks, plan),
            },
            Goal::Budget(budget) if asked.is_open() => {
                let question = chunk_search::Question {
                    graph,
                    tiles: asked,
                    budget: *budget,
                    request: &request.plan,
                    cut: &|graph, tiles| {
                        let (loss, mlps) = cut(graph, tiles, &binding)?;
                        if let Some(mesh) = reducing(request) {
                            reduce_gradients(graph, mesh)?;
                        }
                        add_updates(graph, &request.updates, request.mesh.as_ref())?;
                        if shards_parameters(request) {
                            shard_parameters(graph)?;
                        }
                        if let Some(bytes) = bucket_bytes(request) {
                            overlap(graph, bytes)?;
                        }
                        Ok((loss.most_chunks(), mlps.most_chunks()))
                    },
                    input: &|graph| Ok(bound(graph, &binding, request, sequence)?.input),
                };
                let found = chunk_search::search(&question)?;
                let (tiles, tried) = found.unzip();
                cx.done.tried = tried;
                tiles.unwrap_or(asked)
            }
            Goal::Budget(_) | Goal::Policy(_) => asked,
        };
        let (loss, mlps) = cut(graph, tiles, &binding)?;
        let mut whole = loss.refused;
        if tiles.loss != Tile::Off && !loss.found {
            whole.push("there is no loss over classes whose rows could be tiled".into());
        }
        if let (true, Some(why)) = (request.tile_required, whole.first()) {
            return Err(Error::usage("tile", format!("--tile-loss required: {why}"))
                .help("--tile-loss auto makes this a warning"));
        }
        if tiles.mlp != Tile::Off && mlps.regions.is_empty() {
            cx.done.warnings.push(match mlps.refused.first() {
                Some(why) => format!("no MLP could be tiled: {why}"),
                None => "there is no MLP whose rows could be tiled".into(),
            });
        }
        cx.done.warnings.extend(whole);
        let changed = loss.rewritten || loss.regions.len() + mlps.regions.len() > 0;
        cx.done.tiled.extend(loss.regions);
        cx.done.tiled_mlps.extend(mlps.regions);
        Ok(changed.into())
    },
};

/// Cuts losses, then chains.
fn cut(graph: &mut Graph, tiles: Tiles, binding: &Binding) -> Result<(Tiled, Tiled)> {
    let (mut loss, mut mlps) = (Tiled::default(), Tiled::default());
    if tiles.loss != Tile::Off {
        loss = tile::tile(graph, &|graph, region| {
            tiles.loss.chunks(graph, region, binding)
        })?;
    }
    if tiles.mlp != Tile::Off {
        mlps = tile::tile_chains(graph, &|graph, region| {
            tiles.mlp.chunks(graph, region, binding)
        })?;
    }
    Ok((loss, mlps))
}

fn bound(
    graph: &Graph,
    binding: &Binding,
    request: &Request,
    sequence: Option<&Chunked>,
) -> Result<BoundGraph> {
    BoundGraph::new(graph, binding, request.planning_options(sequence))
}

/// Returns the mesh whose ranks sum whole gradients: updates take slices of them otherwise.
fn reducing(request: &Request) -> Option<&Mesh> {
    let mesh = request.mesh.as_ref().filter(|mesh| mesh.dp > 1)?;
    let takes_slices = mesh.shard >= Shard::Grads && request.updates.optimizer.is_some();
    (!takes_slices).then_some(mesh)
}

static COLLECTIVES: Pass = Pass {
    name: "collectives",
    from: &[Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: false,
    run: |graph, cx| {
        let Some(mesh) = reducing(&cx.request) else {
            return Ok(Changed::No);
        };
        reduce_gradients(graph, mesh)?;
        Ok(Changed::Yes)
    },
};

static OPTIMIZER: Pass = Pass {
    name: "optimizer",
    from: &[Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: false,
    run: |graph, cx| {
        let Some(updates) = add_updates(graph, &cx.request.updates, cx.request.mesh.as_ref())?
        else {
            return Ok(Changed::No);
        };
        cx.done.warnings.extend(
            updates
                .unreached
                .iter()
                .map(|name| format!("`{name}` has no gradient: it is not updated")),
        );
        cx.done.updates = updates;
        Ok(Changed::Yes)
    },
};

fn shards_parameters(request: &Request) -> bool {
    request.mesh.is_some_and(|mesh| mesh.shard >= Shard::Params)
}

static GATHER: Pass = Pass {
    name: "gather",
    from: &[Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, cx| match shards_parameters(&cx.request) {
        true => Ok(shard_parameters(graph)?.into()),
        false => Ok(Changed::No),
    },
};

/// Returns the bytes of a bucket, where sums run beside other nodes.
fn bucket_bytes(request: &Request) -> Option<u64> {
    let mesh = request.mesh.filter(|mesh| mesh.dp > 1);
    mesh.map(|mesh| mesh.bucket_bytes).filter(|n| *n > 0)
}

static OVERLAP: Pass = Pass {
    name: "overlap",
    from: &[Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, cx| match bucket_bytes(&cx.request) {
        Some(bytes) => Ok(overlap(graph, bytes)?.into()),
        None => Ok(Changed::No),
    },
};

static PLAN: Pass = Pass {
    name: "plan",
    from: &[Phase::Training],
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, cx| {
        let binding = Binding::new(graph, &cx.request.dims)?;
        let mut bound = bound(graph, &binding, &cx.request, cx.done.sequence.as_ref())?;
        let most = |tiled: &[(String, usize)]| tiled.iter().map(|(_, chunks)| *chunks).max();
        bound.input.chunks = Chunks {
            loss: most(&cx.done.tiled),
            mlp: most(&cx.done.tiled_mlps),
            tried: cx.done.tried.clone(),
        };
        cx.done.warnings.append(&mut bound.warnings);
        cx.done
            .warnings
            .extend(offload::warning(&bound.input, &cx.request.plan));
        let outcome = plan(&bound.input, &cx.request.plan)?;
        cx.done.planned = Some(Planned {
            outcome,
            bound,
            binding,
        });
        Ok(Changed::No)
    },
};

static REMAT: Pass = Pass {
    name: "remat",
    from: &[Phase::Training],
    to: After::Exactly(Phase::Rewritten),
    follows: &["plan"],
    idempotent: false,
    run: |graph, cx| {
        let Some(planned) = &cx.done.planned else {
            return Err(Error::bug("driver", "there is no plan to apply"));
        };
        let bound = &planned.bound;
        transform::remat::remat(graph, &bound.input, &bound.nodes, &planned.outcome.plan)?;
        Ok(Changed::Yes)
    },
};

static DCE: Pass = Pass {
    name: "dce",
    from: ANY,
    to: After::Same,
    follows: &[],
    idempotent: true,
    run: |graph, _| Ok(transform::dce::dce(graph).into()),
};
