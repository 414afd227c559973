//! Constant tensors that follow a rule: one number, ramps (`0, 1, 2, …`), lists of index tuples and bands (`tril` of ones).

use crate::ir::{Dim, Tensor};

/// Larger tensors, by elements, are not examined.
const MAX_ELEMENTS: u64 = 1 << 24;
/// The most parts of a tuple.
const MAX_PARTS: u64 = 8;

/// The rule that a constant tensor follows.
#[derive(Debug)]
pub(super) enum Table {
    /// Every element is this number.
    Same(f64),
    /// A ramp along all axes.
    Ramp(Ramp),
    /// Along the last axis lie the parts of a tuple: for each a ramp along the axes before.
    Tuples(Vec<Ramp>),
    /// `inside` where `-left <= column - row <= right`, else `outside`, in the last two axes. A side without a bound
    /// reaches the edge of the table everywhere.
    Band {
        left: Option<i64>,
        right: Option<i64>,
        inside: f64,
        outside: f64,
    },
}

/// Integers `start + Σ steps[axis]·index[axis]`.
#[derive(Debug)]
pub(super) struct Ramp {
    start: i64,
    steps: Vec<i64>,
}

impl Ramp {
    /// Returns the element at an index.
    pub(super) fn at(&self, at: &[Dim]) -> Dim {
        let terms = self.steps.iter().zip(at);
        let terms = terms.map(|(step, i)| i.mul(&Dim::from(*step)));
        terms.fold(Dim::from(self.start), |sum, term| sum.add(&term))
    }

    /// Returns the ramp that each `every`-th element from `first` on makes, in a tensor of these sizes.
    fn of(tensor: &Tensor, dims: &[u64], first: usize, every: usize) -> Option<Ramp> {
        let number = |i: usize| tensor.get_i64(first + i * every);
        let (start, mut stride) = (number(0)?, 1);
        let mut steps = vec![0; dims.len()];
        for (step, size) in steps.iter_mut().zip(dims).rev() {
            if *size > 1 {
                *step = number(stride)?.checked_sub(start)?;
            }
            stride *= *size as usize;
        }
        let expected = |mut i: usize| {
            let mut number = start;
            for (step, size) in steps.iter().zip(dims).rev() {
                let index = (i % *size as usize) as i64;
                number = number.checked_add(step.checked_mul(index)?)?;
                i /= *size as usize;
            }
            Some(number)
        };
        let is_ramp = (0..stride).all(|i| number(i).is_some_and(|n| expected(i) == Some(n)));
        is_ramp.then_some(Ramp { start, steps })
    }
}

impl Table {
    /// Returns the rule that a tensor follows, if it follows one.
    pub(super) fn of(tensor: &Tensor) -> Option<Table> {
        if tensor.elements() == 0 || tensor.elements() > MAX_ELEMENTS {
            return None;
        }
        let first = tensor.get_f64(0)?;
        let count = tensor.elements() as usize;
        let other = (1..count).find(|i| !tensor.get_f64(*i).is_some_and(|x| same(x, first)));
        let Some(other) = other else {
            return Some(Table::Same(first));
        };
        let is_int = tensor.dtype.is_int();
        if is_int && let Some(ramp) = Ramp::of(tensor, &tensor.dims, 0, 1) {
            return Some(Table::Ramp(ramp));
        }
        let [head @ .., rows, columns] = tensor.dims.as_slice() else {
            return None;
        };
        // The number on the diagonal is inside the band. A tensor with both numbers on its diagonal is no band.
        let outside = tensor.get_f64(other)?;
        let is_matrix = head.iter().all(|d| *d == 1);
        let band = || Table::band(tensor, *rows as i64, *columns as i64, first, outside);
        if let Some(band) = is_matrix.then(band).flatten() {
            return Some(band);
        }
        if !is_int || *columns > MAX_PARTS {
            return None;
        }
        let (list, parts) = (&tensor.dims[..tensor.dims.len() - 1], *columns as usize);
        let ramps = (0..parts).map(|part| Ramp::of(tensor, list, part, parts));
        Some(Table::Tuples(ramps.collect::<Option<_>>()?))
    }

    fn band(tensor: &Tensor, rows: i64, columns: i64, inside: f64, outside: f64) -> Option<Table> {
        let at = |i: i64, j: i64| tensor.get_f64((i * columns + j) as usize);
        // The first row tells how far the band reaches to the right, the first column how far to the left.
        let reach = |count: i64, get: &dyn Fn(i64) -> Option<f64>| {
            let end = (0..count).find(|k| get(*k).is_none_or(|x| !same(x, inside)));
            end.map(|end| end - 1)
        };
        let right = reach(columns, &|j| at(0, j));
        let left = reach(rows, &|i| at(i, 0));
        for i in 0..rows {
            for j in 0..columns {
                let within = left.is_none_or(|l| j - i >= -l) && right.is_none_or(|r| j - i <= r);
                let expected = if within { inside } else { outside };
                if !at(i, j).is_some_and(|x| same(x, expected)) {
                    return None;
                }
            }
        }
        Some(Table::Band {
            left,
            right,
            inside,
            outside,
        })
    }
}

fn same(a: f64, b: f64) -> bool {
    a == b && a.is_sign_negative() == b.is_sign_negative()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;

    fn table(dims: &[u64], numbers: &[i64]) -> Option<Table> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        Table::of(&Tensor::new(DType::I64, dims.to_vec(), bytes))
    }

    #[test]
    fn tuples_that_name_each_place_are_ramps() {
        let places = [0, 0, 0, 1, 0, 2, 1, 0, 1, 1, 1, 2];
        let Some(Table::Tuples(ramps)) = table(&[2, 1, 3, 2], &places) else {
            panic!("no tuples");
        };
        let at = [1, 0, 2].map(Dim::from);
        assert_eq!([ramps[0].at(&at), ramps[1].at(&at)], [1, 2].map(Dim::from));
        let mut wrong = places;
        wrong[11] = 1;
        assert!(table(&[2, 1, 3, 2], &wrong).is_none());
    }

    #[test]
    fn rows_of_a_ramp_are_a_ramp_and_triangles_are_bands() {
        let Some(Table::Ramp(ramp)) = table(&[2, 3], &[0, 1, 2, 0, 1, 2]) else {
            panic!("no ramp");
        };
        assert_eq!(ramp.at(&[1, 2].map(Dim::from)), Dim::from(2));
        let triangle = table(&[2, 2], &[1, 0, 1, 1]);
        assert!(matches!(triangle, Some(Table::Band { .. })));
    }
}
