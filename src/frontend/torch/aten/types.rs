//! Element types of results: PyTorch's promotion (c10/core/ScalarType, ATen/native/TypeProperties).
//!
//! Tensors with axes decide; a 0-d tensor, and then a plain number, only where it is of a higher kind (bool, integer,
//! floating point).

use super::{Lowering, Value};
use ckpt_passes::ir::{DType, Dim, ValueId};
use ckpt_passes::ops::shape::EXPAND;
use ckpt_passes::{Error, Result};

/// The element type of floats that nothing else decides.
pub(super) const DEFAULT_FLOAT: DType = DType::F32;

/// The smallest type that holds both (torch.promote_types).
pub(super) fn promote(a: DType, b: DType) -> DType {
    if a == b {
        return a;
    }
    match (a.is_float(), b.is_float()) {
        (true, false) => return a,
        (false, true) => return b,
        (true, true) => {
            let either = |t: DType| a == t || b == t;
            return if either(DType::F64) {
                DType::F64
            } else {
                DType::F32
            };
        }
        (false, false) => {}
    }
    match (a, b) {
        (DType::Bool, other) | (other, DType::Bool) => other,
        _ => {
            let unsigned = |t: DType| t.int_range().is_some_and(|(least, _)| least == 0);
            let (wide, narrow) = if a.size_bytes() >= b.size_bytes() {
                (a, b)
            } else {
                (b, a)
            };
            let mixed = unsigned(wide) != unsigned(narrow);
            let as_wide = wide.size_bytes() == narrow.size_bytes();
            // An unsigned type needs a signed one that is wider.
            if mixed && (unsigned(wide) || as_wide) {
                match wide.size_bytes() {
                    1 => DType::I16,
                    2 => DType::I32,
                    _ => DType::I64,
                }
            } else {
                wide
            }
        }
    }
}

/// Of two groups of operands of which the first takes precedence.
fn combine(higher: Option<DType>, lower: Option<DType>) -> Option<DType> {
    match (higher, lower) {
        (Some(h), _) if h.is_float() => Some(h),
        (Some(h), Some(l)) if h == DType::Bool || l.is_float() => Some(promote(h, l)),
        (Some(h), _) => Some(h),
        (None, l) => l,
    }
}

impl Lowering<'_> {
    /// The element type that operands are computed in.
    ///
    /// # Errors
    /// An operand that is neither a tensor nor a number.
    pub(super) fn promoted(&self, operands: &[&Value]) -> Result<DType> {
        let (mut dims, mut zeros, mut numbers) = (None, None, None);
        for operand in operands {
            let (group, dtype) = match operand {
                Value::Tensor(id) if self.plain.contains(id) => (&mut numbers, DEFAULT_FLOAT),
                Value::Tensor(id) if self.dims(*id).is_empty() => (&mut zeros, self.dtype(*id)),
                Value::Tensor(id) => (&mut dims, self.dtype(*id)),
                Value::Int(_) => (&mut numbers, DType::I64),
                Value::Float(_) => (&mut numbers, DEFAULT_FLOAT),
                Value::Bool(_) => (&mut numbers, DType::Bool),
                other => {
                    return Err(
                        Error::model("op", "a tensor or a number is needed").found(other.kind())
                    );
                }
            };
            *group = Some(group.map_or(dtype, |known| promote(known, dtype)));
        }
        let all = combine(dims, combine(zeros, numbers));
        all.ok_or_else(|| Error::bug("aten", "promotion of no operands"))
    }

    /// The floating-point type for operands: their own, or the default one.
    pub(super) fn promoted_float(&self, operands: &[&Value]) -> Result<DType> {
        let dtype = self.promoted(operands)?;
        Ok(if dtype.is_float() {
            dtype
        } else {
            DEFAULT_FLOAT
        })
    }

    /// A tensor or a number as a value of that type.
    pub(super) fn operand(&mut self, value: &Value, dtype: DType) -> Result<ValueId> {
        self.scalar_of(value, dtype)
    }

    /// `x` expanded to these sizes.
    pub(super) fn broadcast_to(&mut self, x: ValueId, dims: &[Dim]) -> Result<ValueId> {
        if ckpt_passes::ir::build::same_dims(&self.b.ty(x).dims, dims) {
            return Ok(x);
        }
        let shape = self.int_vector(dims)?;
        self.emit(&EXPAND, &[x, shape])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_is_pytorchs() {
        use DType::*;
        for (a, b, both) in [
            (F16, BF16, F32),
            (I64, F16, F16),
            (U8, I8, I16),
            (U8, I64, I64),
            (Bool, U8, U8),
            (F32, F64, F64),
            (I32, I16, I32),
        ] {
            assert_eq!((promote(a, b), promote(b, a)), (both, both), "{a} {b}");
        }
        assert_eq!(combine(Some(F16), Some(F64)), Some(F16));
        assert_eq!(combine(Some(I32), Some(F32)), Some(F32));
        assert_eq!(combine(Some(I32), Some(I64)), Some(I32));
        assert_eq!(combine(Some(Bool), Some(I64)), Some(I64));
    }
}
