//! Parameters, buffers and constants of a program, from where their bytes lie.
//!
//! Bytes stay where they are: a weight whose elements lie in row-major order is a slice of its storage, one that is the
//! transpose of such a matrix is that matrix and a `Transpose`. Only other strides are copied. Two names of the same
//! elements are one weight with two names.

use super::{Lowering, TensorId};
use bytes::Bytes;
use ckpt_passes::ir::op::contiguous_strides;
use ckpt_passes::ir::{Attrs, DType, Origin, Tensor};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// What a weight is to its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Parameter { trainable: bool },
    Buffer,
    Constant,
}

/// A tensor of the program's state.
#[derive(Clone, Debug)]
pub struct Weight<'a> {
    /// The framework's name: `model.layers.0.mlp.up_proj.weight`.
    pub name: &'a str,
    pub kind: Kind,
    /// Equal for weights that lie in the same memory.
    pub storage: &'a str,
    /// The bytes of the whole storage, little-endian.
    pub bytes: Bytes,
    pub dtype: DType,
    pub dims: &'a [u64],
    /// In elements.
    pub strides: &'a [u64],
    /// In elements.
    pub offset: u64,
}

/// Storage, element type, sizes, strides, offset: which elements a weight is.
type Elements = (String, DType, Vec<u64>, Vec<u64>, u64);

/// What all copies of parts of one storage may take, in bytes of it.
const MAX_COPIES: u64 = 4;

/// Weights that have been declared.
#[derive(Default)]
pub(super) struct Weights {
    known: BTreeMap<Elements, (TensorId, ckpt_passes::ir::ValueId)>,
    /// By storage: bytes that were copied because their strides are none of ours.
    copied_bytes: BTreeMap<String, u64>,
}

impl Lowering<'_> {
    /// Declares a weight. A second name of one that is known becomes its alias.
    ///
    /// # Errors
    /// Sizes, strides and offset that leave the storage; a name that is taken.
    pub fn weight(&mut self, weight: &Weight) -> Result<TensorId> {
        let place = |e: Box<Error>| e.at(format!("the weight `{}`", weight.name));
        let key = (
            weight.storage.to_string(),
            weight.dtype,
            weight.dims.to_vec(),
            weight.strides.to_vec(),
            weight.offset,
        );
        if let Some((tensor, value)) = self.weights.known.get(&key).copied() {
            let origin = self.b.graph.origins.entry(value).or_default();
            if !origin.names.iter().any(|n| n == weight.name) {
                origin.names.push(weight.name.to_string());
            }
            if let Kind::Parameter { trainable } = weight.kind {
                origin.is_parameter = Some(true);
                origin.frozen &= !trainable;
            }
            return Ok(tensor);
        }
        self.free_name(weight.name).map_err(place)?;
        check_extent(weight).map_err(place)?;
        let (tensor, transposed) = match in_place(weight) {
            Some(found) => found,
            None => {
                self.weights.allow_copy(weight).map_err(place)?;
                (gathered(weight), false)
            }
        };
        let value = self.b.graph.add_init(weight.name, tensor);
        self.b.contents.read_init(self.b.graph, value);
        self.b.graph.origins.insert(
            value,
            Origin {
                names: vec![weight.name.to_string()],
                transposed,
                is_parameter: Some(matches!(weight.kind, Kind::Parameter { .. })),
                frozen: weight.kind == Kind::Parameter { trainable: false },
            },
        );
        let seen = if transposed {
            self.b.prefix = format!("{}.t", weight.name);
            let attrs = Attrs::new().with("perm", vec![1, 0]);
            self.b
                .emit(&ckpt_passes::ops::shape::TRANSPOSE, &[value], attrs)?
        } else {
            value
        };
        let tensor = self.outside(seen, weight.name);
        self.weights.known.insert(key, (tensor, value));
        Ok(tensor)
    }
}

/// Fails unless every element lies in the storage.
fn check_extent(weight: &Weight) -> Result<()> {
    let size = weight.dtype.size_bytes();
    let fail = |what: &str| Err(Error::model("data", what.to_string()));
    if weight.strides.len() != weight.dims.len() {
        return fail("as many strides as sizes are needed");
    }
    let count = weight
        .dims
        .iter()
        .try_fold(size, |n, d| n.checked_mul(*d))
        .filter(|n| *n <= i64::MAX as u64);
    let Some(count) = count else {
        return fail("the sizes are out of range");
    };
    if count == 0 {
        return Ok(());
    }
    let last = weight
        .dims
        .iter()
        .zip(weight.strides)
        .try_fold(weight.offset, |at, (d, s)| {
            at.checked_add((d - 1).checked_mul(*s)?)
        });
    let end = last
        .and_then(|l| l.checked_add(1))
        .and_then(|n| n.checked_mul(size));
    match end {
        Some(end) if end <= weight.bytes.len() as u64 => match count > weight.bytes.len() as u64 {
            true => fail("a weight that is larger than its storage is not supported"),
            false => Ok(()),
        },
        _ => Err(
            Error::model("data", "the storage ends before the tensor does")
                .found(format!("{} bytes", weight.bytes.len())),
        ),
    }
}

impl Weights {
    /// Fails where many weights are each a copy of much of one storage: a small file would fill the memory.
    fn allow_copy(&mut self, weight: &Weight) -> Result<()> {
        let bytes = weight.dims.iter().product::<u64>() * weight.dtype.size_bytes();
        let copied = self
            .copied_bytes
            .entry(weight.storage.to_string())
            .or_insert(0);
        *copied = copied.saturating_add(bytes);
        match *copied <= MAX_COPIES.saturating_mul(weight.bytes.len() as u64) {
            true => Ok(()),
            false => Err(Error::model(
                "data",
                "too many weights are strided parts of one storage",
            )),
        }
    }
}

/// The elements as a slice of the storage, and whether that is the transpose of the weight.
fn in_place(weight: &Weight) -> Option<(Tensor, bool)> {
    let size = weight.dtype.size_bytes();
    let slice = |dims: Vec<u64>| {
        let length = (dims.iter().product::<u64>() * size) as usize;
        let bytes = if length == 0 {
            Bytes::new()
        } else {
            let start = (weight.offset * size) as usize;
            weight.bytes.slice(start..start + length)
        };
        Tensor::new(weight.dtype, dims, bytes)
    };
    if weight.dims.contains(&0) || is_row_major(weight.dims, weight.strides) {
        return Some((slice(weight.dims.to_vec()), false));
    }
    if let ([rows, columns], [down, across]) = (weight.dims, weight.strides)
        && is_row_major(&[*columns, *rows], &[*across, *down])
    {
        return Some((slice(vec![*columns, *rows]), true));
    }
    None
}

/// The elements of a weight of any strides, copied.
fn gathered(weight: &Weight) -> Tensor {
    let size = weight.dtype.size_bytes();
    let start = (weight.offset * size) as usize;
    let mut bytes = Vec::new();
    let mut at = vec![0u64; weight.dims.len()];
    'all: loop {
        let element: u64 = at.iter().zip(weight.strides).map(|(i, s)| i * s).sum();
        let from = start + (element * size) as usize;
        bytes.extend_from_slice(&weight.bytes[from..from + size as usize]);
        for axis in (0..at.len()).rev() {
            at[axis] += 1;
            if at[axis] < weight.dims[axis] {
                continue 'all;
            }
            at[axis] = 0;
        }
        break;
    }
    Tensor::new(weight.dtype, weight.dims.to_vec(), bytes)
}

fn is_row_major(dims: &[u64], strides: &[u64]) -> bool {
    let signed: Vec<i64> = dims.iter().map(|d| *d as i64).collect();
    let wanted = contiguous_strides(&signed);
    let mut axes = dims.iter().zip(strides).zip(wanted);
    axes.all(|((d, s), w)| *d == 1 || *s as i64 == w)
}
