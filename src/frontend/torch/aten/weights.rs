//! Parameters, buffers and constants of a program, declared from the storages that hold their bytes.
//!
//! Bytes stay in place. A row-major weight is a slice of its storage. The transpose of a row-major matrix is that matrix
//! and a `Transpose`. A weight with any other strides is copied. Two names of the same elements are one weight.

use super::super::value::TensorId;
use super::lowering::{Elements, Lowering};
use bytes::Bytes;
use ckpt_passes::ir::op::contiguous_strides;
use ckpt_passes::ir::{Attrs, DType, Origin, Tensor};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::{Error, Result};

/// The role of a weight in its module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An `nn.Parameter` of a module.
    Parameter {
        /// The parameter's `requires_grad` in PyTorch; false freezes the weight.
        trainable: bool,
    },
    /// A registered buffer of a module.
    Buffer {
        /// True if the module's state dictionary holds it.
        persistent: bool,
    },
    /// A tensor that no module registers as parameter or buffer.
    Constant,
}

/// A tensor of the program's state.
#[derive(Clone, Debug)]
pub struct Weight<'a> {
    /// The name in PyTorch: `model.layers.0.mlp.up_proj.weight`.
    pub name: &'a str,
    /// Whether the tensor is a parameter, buffer or constant.
    pub kind: Kind,
    /// The name of the storage. Weights in one storage share memory.
    pub storage: &'a str,
    /// The bytes of the whole storage, little-endian.
    pub bytes: Bytes,
    /// Element type that the bytes are read as.
    pub dtype: DType,
    /// Sizes of the axes, in elements.
    pub dims: &'a [u64],
    /// Strides in elements.
    pub strides: &'a [u64],
    /// The offset of the first element, in elements.
    pub offset: u64,
}

/// All weights copied out of one storage may take this many times its bytes.
const MAX_COPIES: u64 = 4;

impl Lowering<'_> {
    /// Declares a weight. A second name of one that is known becomes its alias.
    ///
    /// # Errors
    /// Sizes, strides and offset that leave the storage; a name that is taken.
    pub fn weight(&mut self, weight: &Weight) -> Result<TensorId> {
        let place = |e: Box<Error>| e.at(format!("the weight `{}`", weight.name));
        let key: Elements = (
            weight.storage.to_string(),
            weight.dtype,
            weight.dims.to_vec(),
            weight.strides.to_vec(),
            weight.offset,
        );
        if let Some((tensor, value)) = self.weights.get(&key).copied() {
            let origin = self.b.graph.origins.entry(value).or_default();
            if !origin.names.iter().any(|n| n == weight.name) {
                origin.names.push(weight.name.to_string());
            }
            if let Kind::Parameter { trainable } = weight.kind {
                origin.is_parameter = Some(true);
                origin.frozen &= !trainable;
            }
            origin.is_persistent |= weight.kind == Kind::Buffer { persistent: true };
            return Ok(tensor);
        }
        self.free_name(weight.name).map_err(place)?;
        check_extent(weight).map_err(place)?;
        let (tensor, transposed) = match in_place(weight) {
            Some(found) => found,
            None => {
                self.allow_copy(weight).map_err(place)?;
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
                is_persistent: weight.kind == Kind::Buffer { persistent: true },
                frozen: weight.kind == Kind::Parameter { trainable: false },
                folded_from: Vec::new(),
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
        let tensor = self.root(seen, Some(weight.name));
        self.weights.insert(key, (tensor, value));
        Ok(tensor)
    }

    /// Fails if weights would copy too much of one storage: a small file could fill the memory.
    fn allow_copy(&mut self, weight: &Weight) -> Result<()> {
        let bytes = weight.dims.iter().product::<u64>() * weight.dtype.size_bytes();
        let copied = self.copied_bytes.entry(weight.storage.to_string());
        let copied = copied.or_insert(0);
        *copied = copied.saturating_add(bytes);
        match *copied <= MAX_COPIES.saturating_mul(weight.bytes.len() as u64) {
            true => Ok(()),
            false => bail!("data", "too many weights are strided parts of one storage"),
        }
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

/// Returns the elements as a slice of the storage, and whether the slice is the transpose of the weight.
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

/// Copies the elements of a weight with any strides.
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
