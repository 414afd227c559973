//! Integers as values of the graph.

use super::{Lowering, TensorId, Value};
use ckpt_passes::ir::{DType, Dim, Tensor, ValueId};
use ckpt_passes::{Error, Result};

impl Lowering<'_> {
    /// An int64 vector of these integers.
    pub(super) fn int_vector(&mut self, dims: &[Dim]) -> Result<ValueId> {
        let numbers: Option<Vec<i64>> = dims.iter().map(Dim::as_const).collect();
        match numbers {
            Some(numbers) => Ok(self.b.ints(&numbers)),
            None => self.built(false, dims),
        }
    }

    /// An int64 scalar.
    pub(super) fn int_scalar(&mut self, dim: &Dim) -> Result<ValueId> {
        match dim.as_const() {
            Some(n) => Ok(self.b.int(n)),
            None => self.built(true, std::slice::from_ref(dim)),
        }
    }

    fn built(&mut self, scalar: bool, dims: &[Dim]) -> Result<ValueId> {
        let built = self.sizes.build(&mut self.b, scalar, dims)?;
        built.ok_or_else(|| {
            let text: Vec<String> = dims.iter().map(Dim::to_string).collect();
            Error::model("shape", "a size can be read from no tensor of the program")
                .found(text.join(", "))
                .help("export with the sizes of the inputs as the only free ones")
        })
    }

    /// The data-dependent sizes of a value can be read from it from here on.
    pub(super) fn read_sizes(&mut self, value: ValueId) {
        self.sizes.read(self.b.graph, value);
    }

    /// `value` with axes of size 1 put in.
    pub(super) fn apply_unsqueeze(&mut self, value: ValueId, axes: &[i64]) -> Result<ValueId> {
        if axes.is_empty() {
            return Ok(value);
        }
        let axes = self.b.ints(axes);
        self.emit(&ckpt_passes::ops::shape::UNSQUEEZE, &[value, axes])
    }

    /// What an integer tensor of one element holds, where it is known.
    pub(super) fn as_int(&mut self, tensor: TensorId) -> Result<Option<Dim>> {
        if self.dtype(tensor).is_float() {
            return Ok(None);
        }
        Ok(match self.known(tensor)?.as_deref() {
            Some([one]) => Some(one.clone()),
            _ => None,
        })
    }

    /// A number as a scalar of an element type.
    pub(super) fn scalar_of(&mut self, value: &Value, dtype: DType) -> Result<ValueId> {
        match value {
            Value::Bool(b) => Ok(self.b.scalar(dtype, f64::from(u8::from(*b)))),
            Value::Float(x) => Ok(self.b.scalar(dtype, *x)),
            Value::Int(dim) => match dim.as_const() {
                Some(n) if dtype.is_float() => Ok(self.b.scalar(dtype, n as f64)),
                Some(n) => {
                    let name = format!("const.{dtype}.{n}");
                    Ok(self.b.constant(&name, Tensor::scalar_int(dtype, n)))
                }
                None => {
                    let int = self.int_scalar(dim)?;
                    self.b.cast(int, dtype)
                }
            },
            Value::Tensor(id) => {
                let value = self.read(*id)?;
                self.b.cast(value, dtype)
            }
            other => Err(Error::model("op", "a number is needed").found(other.kind())),
        }
    }
}
