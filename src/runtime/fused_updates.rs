//! Updates that a device's library computes in one call: a parameter and its states, or those of many parameters.
//!
//! The nodes of such an update make their results where the memory rules say, in place or as copies of the old tensors,
//! and leave the arithmetic to the call at the last node. Updates whose gradients are alive to the end, and that nothing
//! separates in the order, share one call.

use super::kernels::optimizer::UpdatedTensors;
use super::kernels::{copy_into, empty};
use ckpt_passes::analysis::MemoryProfile;
use ckpt_passes::analysis::fused_updates::{FusedUpdate, UpdateFormula};
use ckpt_passes::ir::{Graph, Id, NodeId, ValueId};
use ckpt_passes::{Error, Result};
use tch::Tensor;

/// The most bytes of parameters that one call updates.
const CALL_BYTES: u64 = 1 << 30;

/// A call that computes updates of one formula.
pub(super) struct UpdateCall {
    pub formula: UpdateFormula,
    updates: Vec<UpdateSlots>,
}

/// The slots of one update.
struct UpdateSlots {
    gradient: usize,
    /// The new parameter.
    parameter: usize,
    /// The new states.
    states: Vec<usize>,
}

/// The positions of the nodes that make up fused updates. Those that make a call have it.
pub(super) fn calls(graph: &Graph, memory: &MemoryProfile) -> Vec<(usize, Option<UpdateCall>)> {
    let mut made = Vec::new();
    let mut calls: Vec<(usize, Vec<&FusedUpdate>)> = Vec::new();
    for update in &memory.fused_updates {
        let shared = calls
            .last_mut()
            .filter(|(_, call)| may_share(graph, memory, call, update));
        match shared {
            Some((at, call)) => {
                *at = update.at;
                call.push(update);
            }
            None => calls.push((update.at, vec![update])),
        }
    }
    let result = |at: usize| Id::index(graph.node(graph.order()[at]).outs[0]);
    for (last, call) in calls {
        let slots = |update: &&FusedUpdate| UpdateSlots {
            gradient: Id::index(update.gradient),
            parameter: result(update.at),
            states: update.states.iter().map(|at| result(*at)).collect(),
        };
        let updates: Vec<UpdateSlots> = call.iter().map(slots).collect();
        for update in &call {
            let own = [update.at];
            let deferred = update.states.iter().chain(&own).filter(|at| **at != last);
            made.extend(deferred.map(|at| (*at, None)));
        }
        let formula = call[0].formula;
        made.push((last, Some(UpdateCall { formula, updates })));
    }
    made
}

/// Returns whether an update can join a call: same formula and types, only updates in between, and gradients that live on
/// anyway.
fn may_share(
    graph: &Graph,
    memory: &MemoryProfile,
    call: &[&FusedUpdate],
    update: &FusedUpdate,
) -> bool {
    let (first, last) = (call[0], call[call.len() - 1]);
    let is_update = |id: &NodeId| graph.node(*id).op.is_update();
    let lives_on = |v: ValueId| memory.storage(v).dies.is_none();
    let bytes = |u: &FusedUpdate| memory.storage(u.parameter).bytes;
    let call_bytes: u64 = call.iter().map(|u| bytes(u)).sum();
    let dtype = |u: &FusedUpdate| graph.ty(u.parameter).dtype;
    (first.formula, &first.scalars, dtype(first))
        == (update.formula, &update.scalars, dtype(update))
        && graph.order()[last.at..update.at].iter().all(is_update)
        && lives_on(first.gradient)
        && lives_on(update.gradient)
        && call_bytes + bytes(update) <= CALL_BYTES
}

impl UpdateCall {
    /// Returns the tensors of all updates. The result of the last node is made.
    pub fn tensors(&self, values: &[Option<Tensor>]) -> Result<Vec<UpdatedTensors>> {
        let of = |update: &UpdateSlots| {
            let states = update.states.iter().map(|slot| tensor(values, *slot));
            Ok(UpdatedTensors {
                parameter: tensor(values, update.parameter)?,
                gradient: tensor(values, update.gradient)?,
                states: states.collect::<Result<_>>()?,
            })
        };
        self.updates.iter().map(of).collect()
    }
}

/// Makes the result of a node of an update from the old tensor: that itself where it is overwritten, else a copy.
pub(super) fn make_result(
    (from, to): (usize, usize),
    overwrites: bool,
    values: &mut [Option<Tensor>],
) -> Result<()> {
    let old = tensor(values, from)?;
    let new = match overwrites {
        true => old,
        false => {
            let new = empty(&old.size(), old.kind(), old.device())?;
            copy_into(&new, &old)?;
            new
        }
    };
    values[to] = Some(new);
    Ok(())
}

fn tensor(values: &[Option<Tensor>], slot: usize) -> Result<Tensor> {
    let tensor = values[slot].as_ref();
    tensor.map(Tensor::shallow_clone).ok_or_else(gone)
}

fn gone() -> Box<Error> {
    Error::bug("run", "a tensor of an update is gone")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::analysis::{Binding, Sizes};
    use ckpt_passes::ir::op::DeviceKind;
    use ckpt_passes::ir::{Attrs, DType, Dim, Ty};
    use ckpt_passes::ops::optimizer::{ADAM_MEAN, ADAM_SQUARE, ADAMW};
    use ckpt_passes::ops::{Builder, EmitExt};

    /// AdamW of the parameters of Llama-3.2-1B: 2.3 GiB in bfloat16.
    #[test]
    fn a_call_updates_up_to_one_gibibyte() {
        let layer: [&[i64]; 9] = [
            &[2048],
            &[2048, 2048],
            &[2048, 512],
            &[2048, 512],
            &[2048, 2048],
            &[2048],
            &[2048, 8192],
            &[2048, 8192],
            &[8192, 2048],
        ];
        let layers = std::iter::repeat_n(layer, 16).flatten();
        let shapes: Vec<&[i64]> = layers.chain([&[128256, 2048][..], &[2048]]).collect();
        let mut graph = Graph::new("updates");
        let lr = graph.add_input("lr", Some(Ty::new(DType::F32, [])));
        let step = graph.add_input("step", Some(Ty::new(DType::I64, [])));
        let mut tensors = Vec::new();
        for (i, shape) in shapes.iter().enumerate() {
            let dims: Vec<Dim> = shape.iter().copied().map(Dim::from).collect();
            let ty = Ty::new(DType::BF16, dims);
            let input = |word| graph.add_input(&format!("{word}{i}"), Some(ty.clone()));
            tensors.push(["p", "m", "v", "x"].map(input));
        }
        let mut b = Builder::new(&mut graph);
        let gradients: Vec<ValueId> = tensors.iter().map(|t| b.neg(t[3]).unwrap()).collect();
        let mut outputs = gradients.clone();
        for ([p, m, v, _], g) in tensors.into_iter().zip(gradients) {
            let mut update = |op, ins: &[ValueId]| b.emit(op, ins, Attrs::new()).unwrap();
            let (m, v) = (update(&ADAM_MEAN, &[m, g]), update(&ADAM_SQUARE, &[v, g]));
            outputs.extend([update(&ADAMW, &[p, m, v, lr, step]), m, v]);
        }
        graph.set_outputs(outputs);
        let sizes = Sizes::new(&graph, &Binding::new(&graph, &[]).unwrap()).unwrap();
        let memory = MemoryProfile::of_device(&graph, &sizes, DeviceKind::Cuda, 512).unwrap();
        let made = calls(&graph, &memory);
        assert_eq!(made.len(), 3 * shapes.len());
        let calls: Vec<usize> = made
            .into_iter()
            .filter_map(|(_, c)| Some(c?.updates.len()))
            .collect();
        assert_eq!(calls.iter().sum::<usize>(), shapes.len());
        assert_eq!(calls.len(), 3, "{calls:?}");
    }
}
