//! The element types in which PyTorch computes operands of different types.

use ckpt_passes::ir::DType;

/// Returns the smallest type that holds both (torch.promote_types).
pub(super) fn promote(a: DType, b: DType) -> DType {
    if a == b {
        return a;
    }
    match (a.is_float(), b.is_float()) {
        (true, false) => return a,
        (false, true) => return b,
        (true, true) if [a, b].contains(&DType::F64) => return DType::F64,
        (true, true) => return DType::F32,
        (false, false) => {}
    }
    let unsigned = |t: DType| t.int_range().is_some_and(|(least, _)| least == 0);
    let size = |t: DType| t.size_bytes();
    let (wide, narrow) = if size(a) >= size(b) { (a, b) } else { (b, a) };
    match (wide, narrow) {
        (DType::Bool, other) | (other, DType::Bool) => other,
        // An unsigned type needs a signed one that is wider.
        _ if unsigned(wide) != unsigned(narrow) && (unsigned(wide) || size(a) == size(b)) => {
            match size(wide) {
                1 => DType::I16,
                2 => DType::I32,
                _ => DType::I64,
            }
        }
        _ => wide,
    }
}

/// Combines the types of two groups of operands, of which the first takes precedence.
pub(super) fn combine(higher: Option<DType>, lower: Option<DType>) -> Option<DType> {
    match (higher, lower) {
        (Some(h), _) if h.is_float() => Some(h),
        (Some(h), Some(l)) if h == DType::Bool || l.is_float() => Some(promote(h, l)),
        (Some(h), _) => Some(h),
        (None, l) => l,
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
