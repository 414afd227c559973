//! Examples of tensors: row `i` of each tensor, for the input of its name.

use super::batches::Source;
use super::inputs::{DataInput, DataInputs, IGNORED, LABELS, first_invalid};
use super::request::Batch;
use crate::tensors::Tensors;
use ckpt_passes::ir::Tensor;
use ckpt_passes::{Error, Result};

/// The tensors of one file.
struct Shard {
    name: String,
    tensors: Tensors,
}

/// Tensors whose first axis counts examples.
pub(super) struct TensorSource {
    inputs: Vec<DataInput>,
    shards: Vec<Shard>,
    /// The first example of each shard, and the end.
    offsets: Vec<u64>,
    is_causal: bool,
}

impl TensorSource {
    /// Returns a source without files.
    pub fn new(wanted: &DataInputs) -> TensorSource {
        TensorSource {
            inputs: wanted.inputs.clone(),
            shards: Vec::new(),
            offsets: vec![0],
            is_causal: wanted.is_causal,
        }
    }

    /// Adds the tensors of a file. Returns the names of those that no input takes.
    ///
    /// # Errors
    /// A missing tensor, one of the wrong type or shape, or tensors with different numbers of examples.
    pub fn add(&mut self, name: String, mut tensors: Tensors) -> Result<Vec<String>> {
        let mut taken = Tensors::new();
        let mut examples = None;
        for input in &self.inputs {
            let found = tensors
                .remove(&input.name)
                .or_else(|| tensors.remove(&format!("in.{}", input.name)));
            let tensor = found.ok_or_else(|| {
                let names: Vec<&str> = tensors.keys().map(String::as_str).take(10).collect();
                Error::usage(
                    "data",
                    format!("there is no tensor for input `{}`", input.name),
                )
                .at(name.clone())
                .expected(input.ty.to_string())
                .found(if names.is_empty() {
                    "no others".into()
                } else {
                    names.join(", ")
                })
            })?;
            let like = self.shards.first().map(|s| &s.tensors[&input.name]);
            check(input, &tensor, like).map_err(|e| e.at(name.clone()))?;
            let count = tensor.dims[0];
            if *examples.get_or_insert(count) != count {
                return Err(
                    Error::usage("data", "the tensors have different numbers of examples")
                        .at(name)
                        .expected(format!(
                            "{} in the first axis of `{}`",
                            examples.unwrap_or(0),
                            input.name
                        ))
                        .found(tensor.ty().to_string()),
                );
            }
            taken.insert(input.name.clone(), tensor);
        }
        let examples = examples.unwrap_or(0);
        if examples == 0 {
            return Err(Error::usage("data", "the file holds no examples").at(name));
        }
        self.offsets
            .push(self.offsets[self.offsets.len() - 1] + examples);
        self.shards.push(Shard {
            name,
            tensors: taken,
        });
        Ok(tensors.into_keys().collect())
    }
}

/// Checks the tensor of an input, and that its rows have the shape of those before.
fn check(input: &DataInput, tensor: &Tensor, like: Option<&Tensor>) -> Result<()> {
    let dims = &tensor.dims;
    let fits = |(dim, size): (&ckpt_passes::ir::Dim, &u64)| {
        dim.as_const().is_none_or(|n| u64::try_from(n) == Ok(*size))
    };
    let same = input.ty.dtype == tensor.dtype && input.ty.rank() == dims.len();
    let fits = same && input.ty.dims.iter().zip(dims).skip(1).all(fits);
    if fits && like.is_none_or(|like| like.dims[1..] == dims[1..]) {
        return Ok(());
    }
    let expected = match like.filter(|_| fits) {
        Some(like) => format!("rows as in the first file, {}", like.ty()),
        None => format!("{}, with an example in each row", input.ty),
    };
    Err(Error::usage(
        "data",
        format!("input `{}` cannot take this tensor", input.name),
    )
    .expected(expected)
    .found(tensor.ty().to_string()))
}

impl Source for TensorSource {
    fn examples(&self) -> u64 {
        self.offsets.last().copied().unwrap_or(0)
    }

    fn batch(&self, examples: &[u64]) -> Result<Batch> {
        let mut inputs = Tensors::new();
        let mut tokens = examples.len() as u64;
        for input in &self.inputs {
            let mut bytes = Vec::new();
            let mut row_dims = &[][..];
            let mut counted = 0;
            for example in examples {
                let shard = self.offsets.partition_point(|o| o <= example) - 1;
                let (Shard { name, tensors }, i) =
                    (&self.shards[shard], example - self.offsets[shard]);
                let whole = &tensors[&input.name];
                row_dims = &whole.dims[1..];
                let row = row(whole, i)
                    .ok_or_else(|| Error::bug("data", "a tensor is shorter than its shape"))?;
                let row_tensor = Tensor::new(input.ty.dtype, row_dims, row);
                if let Some((at, number)) = first_invalid(input, &row_tensor) {
                    let most = input.below.unwrap_or(0) - 1;
                    return Err(Error::usage(
                        "data",
                        format!("`{}` has {number}, which is out of range", input.name),
                    )
                    .at(format!("{name}, row {i}, element {at}"))
                    .expected(match input.name == LABELS {
                        true => format!("0 to {most}, or {IGNORED}"),
                        false => format!("0 to {most}"),
                    }));
                }
                if input.name == LABELS {
                    counted += counted_labels(&row_tensor, self.is_causal);
                }
                bytes.extend_from_slice(row_tensor.bytes().map_or(&[], AsRef::as_ref));
            }
            if input.name == LABELS {
                tokens = counted;
            }
            let dims = [&[examples.len() as u64], row_dims].concat();
            inputs.insert(input.name.clone(), Tensor::new(input.ty.dtype, dims, bytes));
        }
        Ok(Batch { inputs, tokens })
    }
}

/// Returns a row of a tensor, as a slice of its file.
fn row(tensor: &Tensor, i: u64) -> Option<bytes::Bytes> {
    let bytes = tensor.bytes()?;
    let size = tensor.size_bytes().checked_div(tensor.dims[0])? as usize;
    let begin = (i as usize).checked_mul(size)?;
    let end = begin.checked_add(size).filter(|end| *end <= bytes.len())?;
    Some(bytes.slice(begin..end))
}

/// Returns how many labels of an example count. A causal loss has no scores for the first of a sequence.
fn counted_labels(labels: &Tensor, is_causal: bool) -> u64 {
    let sequence = labels.dims.last().copied().filter(|_| is_causal);
    let is_first = |i: u64| sequence.is_some_and(|n| i.is_multiple_of(n));
    let all = 0..labels.elements();
    all.filter(|i| !is_first(*i) && labels.get_i64(*i as usize) != Some(IGNORED))
        .count() as u64
}
