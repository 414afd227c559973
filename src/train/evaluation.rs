//! The loss on data that is not trained on: the forward pass of the training graph, on its weights as they are.

use super::data::{Batches, Position};
use super::inputs::{Number, loss, numbers};
use super::peers::Peers;
use crate::rng::Rng;
use crate::runtime::session::Session;
use ckpt_passes::ir::Graph;
use ckpt_passes::transform::dce::dce;
use ckpt_passes::transform::gather::with_whole_parameters;
use ckpt_passes::transform::remat::strip_plan;
use ckpt_passes::{Error, Result};

/// Returns the forward pass of a training graph. Its only output is the loss.
///
/// # Errors
/// A graph without a scalar loss.
pub fn forward(graph: &Graph) -> Result<Graph> {
    let mut forward = graph.clone();
    strip_plan(&mut forward);
    let loss = loss(&forward)?;
    // Ranks gather what they keep slices of before they evaluate.
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

/// Evaluates the weights of `training` on all batches of an epoch, with all ranks. Returns the mean loss of a token.
///
/// # Errors
/// Data that cannot be read; a loss that is not finite.
pub(super) fn evaluate(
    training: &Session,
    forward: &Graph,
    batches: &mut Batches,
    (seed, peers): (u64, Option<&Peers>),
) -> Result<f64> {
    let session = training.beside(forward, Rng::Counter)?;
    batches.seek(Position::default())?;
    let (mut sum, mut tokens) = (0.0, 0);
    while let Some(batch) = batches.next()? {
        let mut inputs = batch.inputs;
        numbers(forward, &mut inputs, &|number| match number {
            Number::Seed => Some(seed as f64),
            _ => None,
        })?;
        let run = session.step(&inputs, &|_| true)?;
        let loss = run.outputs.values().next().and_then(|loss| loss.get_f64(0));
        let loss = loss.ok_or_else(|| Error::bug("eval", "the loss has no number"))?;
        let counted = match peers {
            Some(peers) => peers.sum(batch.tokens)?,
            None => batch.tokens,
        };
        sum += loss * counted as f64;
        tokens += counted;
    }
    let loss = sum / tokens.max(1) as f64;
    match loss.is_finite() {
        true => Ok(loss),
        false => Err(Error::verification(
            "finite",
            "the loss on the evaluation data is not finite",
        )),
    }
}
