//! Inputs of a program: their types, and the numbers that tensors give to named sizes.

use super::convert;
use ckpt_passes::ir::{DType, Ty};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use tch::Tensor;

pub(super) struct Input {
    pub name: String,
    pub ty: Ty,
    pub slot: usize,
}

/// Returns the numbers that `inputs` give to the named sizes of the expected inputs.
///
/// # Errors
/// A missing input, one of the wrong type, sizes that contradict each other, a named size of 0.
pub(super) fn bind(
    expected: &[Input],
    inputs: &BTreeMap<String, Tensor>,
) -> Result<BTreeMap<String, i64>> {
    let mut sizes: BTreeMap<String, i64> = BTreeMap::new();
    for input in expected {
        let Some(tensor) = inputs.get(&input.name) else {
            return Err(
                Error::usage("input", format!("input `{}` is missing", input.name))
                    .expected(input.ty.to_string()),
            );
        };
        bind_one(input, tensor, &mut sizes)?;
    }
    // A size such as `seq + 1` can only be checked once the names have numbers.
    for input in expected {
        let size_of = |name: &str| sizes.get(name).copied();
        for (dim, found) in input.ty.dims.iter().zip(inputs[&input.name].size()) {
            if dim.eval(&size_of).is_some_and(|n| n != found) {
                return Err(wrong_shape(input, &inputs[&input.name])
                    .help(format!("sizes so far: {sizes:?}")));
            }
        }
    }
    Ok(sizes)
}

fn bind_one(input: &Input, tensor: &Tensor, sizes: &mut BTreeMap<String, i64>) -> Result<()> {
    if convert::dtype(tensor.kind()) != Some(input.ty.dtype) || tensor.dim() != input.ty.rank() {
        return Err(wrong_shape(input, tensor));
    }
    for (dim, found) in input.ty.dims.iter().zip(tensor.size()) {
        let Some(name) = dim.as_symbol() else {
            continue;
        };
        if found == 0 {
            return Err(Error::usage(
                "input",
                format!("dimension `{name}` of input `{}` is 0", input.name),
            )
            .help("a named dimension is at least 1"));
        }
        let known = *sizes.entry(name.to_string()).or_insert(found);
        if known != found {
            return Err(
                wrong_shape(input, tensor).help(format!("`{name}` is {known} in another input"))
            );
        }
    }
    Ok(())
}

fn wrong_shape(input: &Input, tensor: &Tensor) -> Box<Error> {
    let dtype = convert::dtype(tensor.kind())
        .map_or_else(|| format!("{:?}", tensor.kind()), |d: DType| d.to_string());
    Error::usage(
        "input",
        format!("input `{}` has the wrong type", input.name),
    )
    .expected(input.ty.to_string())
    .found(format!("{dtype}{:?}", tensor.size()))
}
