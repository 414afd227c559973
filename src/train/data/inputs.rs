//! The inputs of a graph that data must supply, and what each of them may hold.

use crate::tensors::random::index_bounds;
use ckpt_passes::analysis::{Binding, Sizes, gradients, planned_sizes};
use ckpt_passes::ir::{DType, Graph, Phase, Role, Tensor, Ty, float8};
use ckpt_passes::{Error, Result};
use half::{bf16, f16};

/// The label that no loss counts.
pub(super) const IGNORED: i64 = -100;
/// The input with the labels of a loss.
pub(super) const LABELS: &str = "labels";
/// The input with the places of tokens in their documents.
pub(super) const POSITIONS: &str = "position_ids";

/// An input of the graph that data supplies.
#[derive(Clone, Debug)]
pub(super) struct DataInput {
    pub name: String,
    pub ty: Ty,
    /// One more than the largest valid number, for tokens and labels.
    pub below: Option<i64>,
}

/// The inputs that data supplies, and the sizes of a batch.
#[derive(Clone, Debug)]
pub(super) struct DataInputs {
    pub inputs: Vec<DataInput>,
    /// Whether the loss compares the scores of a token with the label after it.
    pub is_causal: bool,
    /// The loss that the graph was made with, where it says so.
    pub loss: Option<String>,
    planned: std::collections::BTreeMap<String, i64>,
}

impl DataInputs {
    /// Finds the inputs that the forward pass or the loss reads. Numbers without axes, optimizer states and what only
    /// updates read are left to the trainer.
    ///
    /// # Errors
    /// A graph without types or without such inputs; sizes that the graph cannot have.
    pub fn of(graph: &Graph) -> Result<DataInputs> {
        if graph.phase < Phase::Typed {
            return Err(Error::bug("data", "the graph has no types yet"));
        }
        let planned = planned_sizes::of(graph)?;
        // Tables and classes have the same sizes at any binding.
        let sizes = Sizes::new(graph, &Binding::new(graph, &[])?)?;
        let bounds = index_bounds(graph, &sizes);
        let states = gradients::states(graph);
        let is_read = |id| {
            let mut uses = graph.value(id).uses().iter();
            let forward = |role| matches!(role, Role::Forward | Role::Loss);
            uses.len() == 0 || uses.any(|u| forward(graph.node(u.node).role))
        };
        let ids = graph.inputs().iter().copied();
        let ids = ids.filter(|id| graph.ty(*id).rank() > 0 && !states.contains(id) && is_read(*id));
        let inputs: Vec<DataInput> = ids
            .map(|id| DataInput {
                name: graph.value(id).name.clone(),
                ty: graph.ty(id).clone(),
                below: bounds.get(&id).copied(),
            })
            .collect();
        if inputs.is_empty() {
            return Err(Error::usage("data", "the graph has no input for data")
                .expected("an input with a batch axis that the model reads"));
        }
        let loss = graph.meta.get(crate::provenance::keys::LOSS).cloned();
        Ok(DataInputs {
            inputs,
            // A model that takes labels itself shifts them, as those of transformers do.
            is_causal: loss
                .as_deref()
                .is_none_or(|l| l == "causal-lm" || l.starts_with("output:")),
            loss,
            planned,
        })
    }

    /// Returns an input by its name.
    pub fn get(&self, name: &str) -> Option<&DataInput> {
        self.inputs.iter().find(|input| input.name == name)
    }

    /// Returns the number of an axis of an input: fixed by the graph, or planned for.
    pub fn size(&self, input: &DataInput, axis: usize) -> Option<u64> {
        let dim = input.ty.dims.get(axis)?;
        let planned = || self.planned.get(dim.as_symbol()?).copied();
        dim.as_const()
            .or_else(planned)
            .and_then(|n| u64::try_from(n).ok())
    }

    /// Returns the size of a batch that the graph fixes, if it does. Positions may be the same for all examples.
    pub fn fixed_batch(&self) -> Option<u64> {
        let inputs = self.inputs.iter().filter(|input| input.name != POSITIONS);
        let mut sizes = inputs.filter_map(|input| input.ty.dims[0].as_const());
        sizes.find_map(|n| u64::try_from(n).ok())
    }
}

/// Appends a number to the bytes of a tensor, rounded to its type.
pub(super) fn put(bytes: &mut Vec<u8>, dtype: DType, value: f64) {
    match dtype {
        DType::F32 => bytes.extend((value as f32).to_le_bytes()),
        DType::F64 => bytes.extend(value.to_le_bytes()),
        DType::F16 => bytes.extend(f16::from_f64(value).to_le_bytes()),
        DType::BF16 => bytes.extend(bf16::from_f64(value).to_le_bytes()),
        _ if dtype.is_float8() => bytes.push(float8::encoded(dtype, value, true)),
        _ => put_int(bytes, dtype, value as i64),
    }
}

/// Appends a number that an integer or boolean type has.
pub(super) fn put_int(bytes: &mut Vec<u8>, dtype: DType, value: i64) {
    bytes.extend_from_slice(&value.to_le_bytes()[..dtype.size_bytes() as usize]);
}

/// Returns the lowest finite number of a floating-point type.
pub(super) fn lowest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::MIN.to_f64(),
        DType::BF16 => bf16::MIN.to_f64(),
        DType::F32 => f64::from(f32::MIN),
        _ => f64::MIN,
    }
}

/// Returns the first element of a tensor that its input cannot take, as its index and number.
pub(super) fn first_invalid(input: &DataInput, tensor: &Tensor) -> Option<(u64, i64)> {
    let below = input.below?;
    let fits = |n: i64| (0..below).contains(&n) || (input.name == LABELS && n == IGNORED);
    let numbers =
        (0..tensor.elements()).map(|i| (i, tensor.get_i64(i as usize).unwrap_or(i64::MAX)));
    numbers.into_iter().find(|(_, n)| !fits(*n))
}
