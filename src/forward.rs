//! The loss of a training graph, and the forward pass that evaluates it.

use crate::provenance::keys;
use ckpt_passes::ir::{Graph, ValueId};
use ckpt_passes::transform::dce::dce;
use ckpt_passes::transform::gather::with_whole_parameters;
use ckpt_passes::transform::remat::strip_plan;
use ckpt_passes::{Error, Result};

/// Returns the output of a training graph that is its loss.
///
/// # Errors
/// A graph that was differentiated from cotangents, or has no scalar output of that name.
pub fn loss(graph: &Graph) -> Result<ValueId> {
    // A compiled loss is called so, also with `--loss output:NAME`.
    let is_loss = |id: &ValueId| graph.value(*id).name == "loss" && graph.ty(*id).rank() == 0;
    let mut named = graph.outputs().iter().copied().filter(is_loss);
    named.next().ok_or_else(|| {
        let error = Error::usage("loss", "the training graph has no loss that could fall");
        let error = error.expected("a scalar output `loss`");
        match graph.meta.get(keys::LOSS) {
            Some(loss) => error.found(format!("a graph made with --loss {loss}")),
            None => error,
        }
        .help("name one: --loss causal-lm, cross-entropy, mse or output:NAME")
    })
}

/// Returns the forward pass of a training graph. Its only output is the loss.
///
/// # Errors
/// A graph without a scalar loss.
pub fn forward(graph: &Graph) -> Result<Graph> {
    let mut forward = graph.clone();
    strip_plan(&mut forward);
    let loss = loss(&forward)?;
    // Ranks gather what they keep slices of before they evaluate. Parts are read as they are.
    let mut forward = with_whole_parameters(&forward).into_owned();
    forward.set_outputs(vec![loss]);
    dce(&mut forward);
    let is_unread = |id| forward.value(id).uses().is_empty();
    let unread = forward.inputs().iter().copied().filter(|id| is_unread(*id));
    for id in unread.collect::<Vec<_>>() {
        forward.remove_source(id);
    }
    Ok(forward)
}
