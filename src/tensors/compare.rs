//! Compares tensors, bit for bit or within tolerances.

use ckpt_passes::ir::Tensor;
use serde::Serialize;

/// The largest allowed differences. Both are 0 for a comparison of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Tolerance {
    /// Allowed difference relative to the magnitude of the reference element.
    pub rtol: f64,
    /// Allowed absolute difference, in addition to the relative one.
    pub atol: f64,
}

impl Tolerance {
    /// Returns whether elements must be equal bit for bit.
    pub fn is_exact(&self) -> bool {
        self.rtol == 0.0 && self.atol == 0.0
    }
}

/// The comparison of two tensors of one name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Name that both tensors have.
    pub name: String,
    /// Whether types and shapes are the same and all elements are equal within the tolerance.
    pub equal: bool,
    /// Number of elements of the reference.
    pub elements: u64,
    /// Number of elements outside the tolerance; 0 where types or shapes differ.
    pub different: u64,
    /// The largest finite difference.
    pub max_abs_difference: f64,
    /// The first element with that difference; `None` where all are equal or types or shapes differ.
    pub largest: Option<Difference>,
    /// First element outside the tolerance, in row-major order; `None` where there is none.
    pub first: Option<Difference>,
    /// Both types, if types or shapes differ.
    pub types: Option<(String, String)>,
}

/// A pair of elements that are not equal.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Index of the element along each axis.
    pub index: Vec<u64>,
    /// Element of the reference, as float64.
    pub a: f64,
    /// Element of the compared tensor, as float64.
    pub b: f64,
}

/// Compares `b` with the reference `a`. Elements are equal if their bits are. With a tolerance, they are also equal if
/// `|b − a| ≤ atol + rtol·|a|` or both are NaN.
pub fn compare(name: &str, a: &Tensor, b: &Tensor, tolerance: Tolerance) -> Comparison {
    let mut result = Comparison {
        name: name.into(),
        equal: true,
        elements: a.elements(),
        different: 0,
        max_abs_difference: 0.0,
        largest: None,
        first: None,
        types: None,
    };
    let (left, right) = match (a.bytes(), b.bytes()) {
        (Some(left), Some(right)) if a.dtype == b.dtype && a.dims == b.dims => (left, right),
        _ => {
            result.equal = false;
            result.types = Some((a.ty().to_string(), b.ty().to_string()));
            return result;
        }
    };
    if left == right {
        return result;
    }
    let size = a.dtype.size_bytes() as usize;
    for (i, (x, y)) in left
        .chunks_exact(size)
        .zip(right.chunks_exact(size))
        .enumerate()
    {
        if x == y {
            continue;
        }
        let (x, y) = (
            a.get_f64(i).unwrap_or(f64::NAN),
            b.get_f64(i).unwrap_or(f64::NAN),
        );
        let difference = (y - x).abs();
        let here = || Difference {
            index: index(i as u64, &a.dims),
            a: x,
            b: y,
        };
        if difference.is_finite() && difference > result.max_abs_difference {
            result.max_abs_difference = difference;
            result.largest = Some(here());
        }
        let within =
            difference <= tolerance.atol + tolerance.rtol * x.abs() || (x.is_nan() && y.is_nan());
        if !tolerance.is_exact() && within {
            continue;
        }
        result.equal = false;
        result.different += 1;
        if result.first.is_none() {
            result.first = Some(here());
        }
    }
    result
}

/// Returns the indices of element `at` of a row-major tensor.
fn index(mut at: u64, dims: &[u64]) -> Vec<u64> {
    let mut index = vec![0; dims.len()];
    for (i, d) in index.iter_mut().zip(dims).rev() {
        *i = at % d;
        at /= d;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::ir::DType;

    fn within(rtol: f64, atol: f64) -> Tolerance {
        Tolerance { rtol, atol }
    }

    fn floats(values: &[f32]) -> Tensor {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor::new(DType::F32, [values.len() as u64 / 2, 2], bytes)
    }

    #[test]
    fn bits_decide_unless_there_is_a_tolerance() {
        let a = floats(&[0.0, 1.0, f32::NAN, 2.0]);
        let same = compare("x", &a, &a.clone(), Tolerance::default());
        assert!(same.equal && same.different == 0);
        let b = floats(&[-0.0, 1.0, f32::NAN, 2.5]);
        let exact = compare("x", &a, &b, Tolerance::default());
        assert_eq!(
            (exact.equal, exact.different, exact.max_abs_difference),
            (false, 2, 0.5)
        );
        assert_eq!(exact.first.unwrap().index, [0, 0]);
        assert_eq!(exact.largest.unwrap().index, [1, 1]);
        let loose = compare("x", &a, &b, within(0.0, 0.4));
        assert_eq!(
            (loose.different, loose.first.unwrap().index),
            (1, vec![1, 1])
        );
        assert!(compare("x", &a, &b, within(0.25, 0.0)).equal);
    }

    #[test]
    fn infinities_and_nans_are_not_close_to_numbers() {
        let wide = within(1.0, 1e9);
        let (a, b) = (floats(&[1.0, 1.0]), floats(&[f32::NAN, 1.0]));
        assert!(!compare("x", &a, &b, wide).equal && !compare("x", &b, &a, wide).equal);
        let b = floats(&[f32::INFINITY, 1.0]);
        assert!(!compare("x", &a, &b, wide).equal);
    }

    #[test]
    fn other_types_are_not_equal() {
        let (a, b) = (
            floats(&[1.0, 1.0]),
            Tensor::new(DType::F32, [2], vec![0; 8]),
        );
        let c = compare("x", &a, &b, within(1.0, 1e9));
        assert_eq!((c.equal, c.types.unwrap().1.as_str()), (false, "f32[2]"));
    }
}
