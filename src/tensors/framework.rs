//! Tensors of a graph under the framework's names and in its layout.
//!
//! An exporter renames the weight of a linear layer to `val_39` and transposes it. Gradients, updated weights and optimizer
//! states carry the initializer's name and layout. Whoever loads them into the framework needs its own.

use super::Tensors;
use ckpt_passes::Result;
use ckpt_passes::analysis::gradients::framework_names;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::ir::{DType, Graph, Tensor};
use std::collections::BTreeSet;

/// Renames tensors that are called after an initializer (`val_39.grad`, `val_39.updated`) by the first of the framework's
/// names (`fc.weight.grad`), and transposes those whose initializer is a transpose. Other tensors stay as they are.
pub fn in_framework(graph: &Graph, tensors: &Tensors) -> Tensors {
    let name_of = framework_names(graph);
    let renamed = tensors.iter().map(|(name, tensor)| match name_of(name) {
        Some(own) => {
            let turned = own.transposed.then(|| transposed(tensor)).flatten();
            (own.name, turned.unwrap_or_else(|| tensor.clone()))
        }
        None => (name.clone(), tensor.clone()),
    });
    renamed.collect()
}

/// Returns the transpose of a matrix whose contents are in memory.
pub fn transposed(tensor: &Tensor) -> Option<Tensor> {
    let [rows, columns] = tensor.dims.as_slice() else {
        return None;
    };
    let dims = [*columns, *rows];
    let turned = transposed_bytes(&dims, tensor.dtype, tensor.bytes()?);
    Some(Tensor::new(tensor.dtype, dims, turned))
}

/// Returns the contents of a matrix of these dims, of which `bytes` are the transpose.
pub fn transposed_bytes(dims: &[u64], dtype: DType, bytes: &[u8]) -> Vec<u8> {
    let &[rows, columns] = dims else {
        return bytes.to_vec();
    };
    let (rows, columns, size) = (rows as usize, columns as usize, dtype.size_bytes() as usize);
    let mut turned = Vec::with_capacity(bytes.len());
    for row in 0..rows {
        for column in 0..columns {
            let at = (column * rows + row) * size;
            turned.extend_from_slice(&bytes[at..at + size]);
        }
    }
    turned
}

/// A parameter as the framework has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateEntry {
    /// The framework's name.
    pub name: String,
    /// The initializer that holds it.
    pub initializer: String,
    /// The initializer is its transpose.
    pub transposed: bool,
    /// The element type.
    pub dtype: DType,
    /// The sizes in the framework.
    pub dims: Vec<u64>,
}

/// The parameters of a graph as the framework has them.
#[derive(Clone, Debug, Default)]
pub struct StateDict {
    /// Each parameter; a tied weight under all of its names.
    pub entries: Vec<StateEntry>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Returns the parameters of a graph as the framework has them.
///
/// # Errors
/// See [`parameters`].
pub fn state_dict(graph: &Graph) -> Result<StateDict> {
    let mut dict = StateDict::default();
    let mut folded = BTreeSet::new();
    for parameter in parameters(graph, &Selection::default())? {
        let value = graph.value(parameter.value);
        folded.extend(parameter.folded_from.iter().cloned());
        let Some(tensor) = value.tensor() else {
            continue;
        };
        let mut dims = tensor.dims.clone();
        if parameter.transposed {
            dims.reverse();
        }
        for name in std::iter::once(&parameter.name).chain(&parameter.aliases) {
            dict.entries.push(StateEntry {
                name: name.clone(),
                initializer: value.name.clone(),
                transposed: parameter.transposed,
                dtype: tensor.dtype,
                dims: dims.clone(),
            });
        }
    }
    if !folded.is_empty() {
        let names: Vec<&str> = folded.iter().map(String::as_str).collect();
        dict.notes.push(format!(
            "the exporter computed other weights from these parameters, which are not written: {}",
            names.join(", ")
        ));
    }
    Ok(dict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::text;

    #[test]
    fn what_is_called_after_a_weight_takes_its_name_and_layout() {
        let source = "graph @g typed (%x: f32[n, 2]) -> (%y) {
  init %val_3 : f32[2, 3] = [1, 2, 3, 4, 5, 6] origin \"fc.weight\", \"head.weight\" transposed
  %y = MatMul %x, %val_3 : f32[n, 3]
}
";
        let graph = text::parse(source).unwrap();
        let matrix = graph.inits().next().unwrap().1.tensor().unwrap().clone();
        let mut tensors = Tensors::new();
        for name in ["val_3.grad", "val_3.exp_avg.updated", "val_30.grad", "y"] {
            tensors.insert(name.into(), matrix.clone());
        }
        let found = in_framework(&graph, &tensors);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "fc.weight.exp_avg.updated",
                "fc.weight.grad",
                "val_30.grad",
                "y"
            ]
        );
        let grad = &found["fc.weight.grad"];
        assert_eq!(grad.dims, [3, 2]);
        let numbers: Vec<f64> = (0..6).filter_map(|i| grad.get_f64(i)).collect();
        assert_eq!(numbers, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!(found["y"].dims, [2, 3]);
    }
}
