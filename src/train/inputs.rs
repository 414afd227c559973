//! The numbers without axes that a training graph takes beside data and states (learning rate, step, seeds and the like)
//! and gives.

use crate::provenance::keys;
use crate::tensors::Tensors;
use ckpt_passes::analysis::gradients::{STEP, states};
use ckpt_passes::ir::{DType, Graph, Tensor};
use ckpt_passes::transform::optimizer::{APPLY, LOSS_SCALE, LR};
use ckpt_passes::{Error, Result};

/// What a number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// The learning rate.
    Rate,
    /// The number of the update, from 1.
    Step,
    /// Whether this run of several that gradients are accumulated over makes the update.
    Apply,
    /// The factor of the loss.
    LossScale,
    /// The seed of random ops.
    Seed,
}

/// The seed of random ops; `rng_seed.NAME` is the seed of a stream.
const SEED: &str = "rng_seed";

fn number(name: &str) -> Option<Number> {
    Some(match name {
        LR => Number::Rate,
        STEP => Number::Step,
        APPLY => Number::Apply,
        LOSS_SCALE => Number::LossScale,
        SEED => Number::Seed,
        _ if name.starts_with("rng_seed.") => Number::Seed,
        _ => return None,
    })
}

/// Returns whether a graph takes a number.
pub fn takes(graph: &Graph, wanted: Number) -> bool {
    let mut names = graph.inputs().iter().map(|id| &graph.value(*id).name);
    names.any(|name| number(name) == Some(wanted))
}

/// Adds the numbers that a graph takes to its inputs.
///
/// # Errors
/// An input that neither data, states nor numbers give.
pub fn numbers(
    graph: &Graph,
    inputs: &mut Tensors,
    of: &dyn Fn(Number) -> Option<f64>,
) -> Result<()> {
    let states = states(graph);
    for id in graph.inputs() {
        let (name, ty) = (&graph.value(*id).name, graph.ty(*id));
        if inputs.contains_key(name) || states.contains(id) {
            continue;
        }
        let number = number(name).filter(|_| ty.rank() == 0).and_then(of);
        let number = number.ok_or_else(|| {
            Error::usage(
                "input",
                format!("neither the data nor the trainer gives `{name}`"),
            )
            .expected(ty.to_string())
        })?;
        let tensor = match ty.dtype {
            DType::I64 => Tensor::int(number as i64),
            dtype => Tensor::scalar(dtype, number),
        };
        inputs.insert(name.clone(), tensor);
    }
    Ok(())
}

/// Returns how many runs of a training graph make an update.
///
/// # Errors
/// A graph that accumulates, and does not say over how many runs.
pub fn runs_per_update(graph: &Graph) -> Result<u64> {
    if !takes(graph, Number::Apply) {
        return Ok(1);
    }
    let recorded = graph.meta.get(keys::ACCUMULATE);
    let runs = recorded.and_then(|text| text.parse().ok());
    runs.filter(|n| *n > 0).ok_or_else(|| {
        let what = format!(
            "metadata `{}` does not say how many runs make an update",
            keys::ACCUMULATE
        );
        Error::model("metadata", what).expected("a number from 1")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::text;

    #[test]
    fn a_graph_gets_the_numbers_that_it_takes() {
        let source = "graph @g typed (%x: f32[n], %lr: f32[], %rng_seed.drop: i64[]) -> (%y) {
  %y = Mul %x, %lr : f32[n]
}
";
        let graph = text::parse(source).unwrap();
        assert!(
            takes(&graph, Number::Rate)
                && takes(&graph, Number::Seed)
                && !takes(&graph, Number::Step)
        );
        let mut inputs = Tensors::new();
        inputs.insert("x".into(), Tensor::new(DType::F32, [1], vec![0; 4]));
        let of = |number| match number {
            Number::Rate => Some(0.5),
            Number::Seed => Some(7.0),
            _ => None,
        };
        numbers(&graph, &mut inputs, &of).unwrap();
        assert_eq!(inputs["lr"].get_f64(0), Some(0.5));
        assert_eq!(inputs["rng_seed.drop"].get_i64(0), Some(7));
        let failed = numbers(&graph, &mut Tensors::new(), &of).unwrap_err();
        assert!(failed.to_string().contains("`x`"), "{failed}");
    }
}
