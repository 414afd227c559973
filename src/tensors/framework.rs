//! Tensors of a graph under the framework's names and in its layout.
//!
//! An exporter renames the weight of a linear layer to `val_39` and transposes it. Gradients, updated weights and optimizer
//! states carry the initializer's name and layout. Whoever loads them into the framework needs its own.

use super::Tensors;
use super::safetensors::{Entry, stream};
use crate::emit::file::Batch;
use ckpt_passes::Result;
use ckpt_passes::analysis::gradients::framework_names;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::ir::{DType, Graph, Tensor, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;

/// The most bytes of a matrix that are transposed at a time.
const BLOCK_BYTES: usize = 1 << 20;

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
    let mut turned = Vec::with_capacity(tensor.bytes()?.len());
    write_transposed((&dims, tensor.dtype), tensor.bytes()?, &mut turned).ok()?;
    Some(Tensor::new(tensor.dtype, dims, turned))
}

/// Writes the contents of a matrix of these dims, of which `bytes` are the transpose. Holds a few rows at a time.
///
/// # Errors
/// Errors of `out`.
pub fn write_transposed(
    (dims, dtype): (&[u64], DType),
    bytes: &[u8],
    out: &mut dyn Write,
) -> io::Result<()> {
    let &[rows, columns] = dims else {
        return out.write_all(bytes);
    };
    let (rows, columns, size) = (rows as usize, columns as usize, dtype.size_bytes() as usize);
    let row_bytes = columns * size;
    let most = (BLOCK_BYTES / row_bytes.max(1)).clamp(1, rows.max(1));
    let mut block = vec![0; most * row_bytes];
    for first in (0..rows).step_by(most) {
        let n = most.min(rows - first);
        for column in 0..columns {
            let from = &bytes[(column * rows + first) * size..][..n * size];
            for (row, element) in from.chunks_exact(size).enumerate() {
                let at = row * row_bytes + column * size;
                block[at..at + size].copy_from_slice(element);
            }
        }
        out.write_all(&block[..n * row_bytes])?;
    }
    Ok(())
}

/// A tensor of a state dictionary: a parameter or a buffer as the framework has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateEntry {
    /// The framework's name.
    pub name: String,
    /// The initializer that holds it.
    pub initializer: ValueId,
    /// The initializer is its transpose.
    pub transposed: bool,
    /// The element type.
    pub dtype: DType,
    /// The sizes in the framework.
    pub dims: Vec<u64>,
}

/// What the framework saves of a model.
#[derive(Clone, Debug, Default)]
pub struct StateDict {
    /// The parameters; a tied weight under all of its names.
    pub parameters: Vec<StateEntry>,
    /// The persistent buffers.
    pub buffers: Vec<StateEntry>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Returns what the framework saves of a typed model. Parameters that the exporter computed others from are not there.
///
/// # Errors
/// See [`parameters`].
pub fn state_dict(graph: &Graph) -> Result<StateDict> {
    let mut dict = StateDict::default();
    let mut folded = BTreeSet::new();
    let parameters = parameters(graph, &Selection::default())?;
    for parameter in &parameters {
        folded.extend(parameter.folded_from.iter().map(String::as_str));
        if parameter.folded_from.is_empty() {
            let names = std::iter::once(&parameter.name).chain(&parameter.aliases);
            let entries = names.filter_map(|n| entry(graph, parameter.value, n));
            dict.parameters.extend(entries);
        }
    }
    let known: BTreeSet<ValueId> = parameters.iter().map(|p| p.value).collect();
    for (id, origin) in graph.origins.iter().filter(|(_, o)| o.is_persistent) {
        if graph.contains_value(*id) && !known.contains(id) {
            let entries = origin.names.iter().filter_map(|n| entry(graph, *id, n));
            dict.buffers.extend(entries);
        }
    }
    if !folded.is_empty() {
        let names: Vec<&str> = folded.into_iter().collect();
        dict.notes.push(format!(
            "the exporter computed other weights from these parameters, which are not written: {}",
            names.join(", ")
        ));
    }
    Ok(dict)
}

fn entry(graph: &Graph, initializer: ValueId, name: &str) -> Option<StateEntry> {
    let tensor = graph.value(initializer).tensor()?;
    let origin = graph.origins.get(&initializer);
    let transposed = origin.is_some_and(|o| o.transposed) && tensor.dims.len() == 2;
    let mut dims = tensor.dims.clone();
    if transposed {
        dims.reverse();
    }
    Some(StateEntry {
        name: name.into(),
        initializer,
        transposed,
        dtype: tensor.dtype,
        dims,
    })
}

/// Passes the contents of an entry, in the layout of the graph, to its last argument.
pub type Look<'a> =
    &'a mut dyn FnMut(&StateEntry, &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()>;

impl StateDict {
    /// Writes everything to a safetensors file, one tensor at a time. The file appears whole or not at all.
    ///
    /// # Errors
    /// A disk that refuses; errors of `look`.
    pub fn write(&self, path: &Path, look: Look) -> Result<()> {
        let all = self.parameters.iter().chain(&self.buffers);
        let by_name: BTreeMap<&str, &StateEntry> = all
            .clone()
            .map(|entry| (entry.name.as_str(), entry))
            .collect();
        let entries = all.map(|entry| Entry {
            name: entry.name.clone(),
            dtype: entry.dtype,
            dims: entry.dims.clone(),
        });
        // `transformers` asks which framework wrote a file.
        let meta = [("format".to_string(), "pt".to_string())].into();
        let mut batch = Batch::new();
        batch.add(path, |out| {
            stream(out, meta, entries.collect(), &mut |entry, out| {
                let Some(source) = by_name.get(entry.name.as_str()) else {
                    return Ok(());
                };
                let layout = (entry.dims.as_slice(), entry.dtype);
                look(source, &mut |bytes| match source.transposed {
                    true => write_transposed(layout, bytes, out),
                    false => out.write_all(bytes),
                })
            })
        })?;
        batch.publish()
    }
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
