//! Tensors of a graph under the framework's names and in its layout.
//!
//! An exporter renames the weight of a linear layer to `val_39` and transposes it. Gradients, updated weights and optimizer
//! states carry the initializer's name and layout. Whoever loads them into the framework needs its own.

use super::Tensors;
use ckpt_passes::analysis::gradients::framework_names;
use ckpt_passes::ir::{Graph, Tensor};

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
    let (bytes, size) = (tensor.bytes()?, tensor.dtype.size_bytes() as usize);
    let (m, n) = (*rows as usize, *columns as usize);
    let mut turned = Vec::with_capacity(bytes.len());
    for column in 0..n {
        for row in 0..m {
            let at = (row * n + column) * size;
            turned.extend_from_slice(bytes.get(at..at + size)?);
        }
    }
    Some(Tensor::new(tensor.dtype, [*columns, *rows], turned))
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
