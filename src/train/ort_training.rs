//! What ONNX Runtime's on-device training loads, of a model that was trained here (`--export ort-training`).

use crate::comparison::ready;
use crate::export::checkpoint;
use crate::export::ort_training::{Artifacts, FOLDER};
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::optimize::optimize;
use ckpt_passes::Result;
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use std::path::Path;

/// Plans the training graph of a request again, without its updates: there the optimizer is a model of its own. Returns it
/// with what the user should know.
///
/// # Errors
/// No plan fits, because all gradients live at once; see [`Artifacts::new`].
pub fn plan(
    (source, given): (&Path, &Given),
    request: &Request,
) -> Result<(Artifacts, Vec<String>)> {
    let updates = &request.updates;
    let optimizer = updates.optimizer.unwrap_or(Optimizer::ADAMW);
    let request = Request {
        updates: UpdateOptions::default(),
        mesh: None,
        ..request.clone()
    };
    let mut graph = load(source, given)?.graph;
    ready(&mut graph, source)?;
    let planned = optimize(&mut graph, &request, &mut Watch::default());
    planned.map_err(|e| e.at(format!("the training graph of --export {FOLDER}")))?;
    let mut notes = Vec::new();
    let has_groups = updates.no_decay_vectors || !updates.no_decay.is_empty();
    if let Optimizer::AdamW { weight_decay, .. } = optimizer
        && weight_decay != 0.0
        && has_groups
    {
        notes.push(format!(
            "{FOLDER}: ONNX Runtime decays all parameters alike, norms and biases too; give --weight-decay 0 for the same updates"
        ));
    }
    if updates.clip.is_some() {
        notes.push(format!(
            "{FOLDER}: the optimizer model does not clip gradients"
        ));
    }
    Ok((Artifacts::new(graph, &optimizer)?, notes))
}

/// Writes the folder in that of a run, with the parameters of a checkpoint.
///
/// # Errors
/// A checkpoint that cannot be read again; a disk that refuses.
pub fn write(artifacts: &mut Artifacts, saved: &Path, out: &Path) -> Result<()> {
    artifacts.set(&checkpoint::read(saved)?.tensors)?;
    artifacts.write(&out.join(FOLDER))?;
    Ok(())
}
