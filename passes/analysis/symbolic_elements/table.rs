//! Constant tensors that follow a rule: one number, ramps (`0, 1, 2, …`) and bands (`tril` of ones).

use crate::ir::Tensor;

/// Larger tensors, by elements, are not examined.
const MAX_ELEMENTS: u64 = 1 << 24;

/// The rule that a constant tensor follows.
#[derive(Debug)]
pub(super) enum Table {
    /// Every element is this number.
    Same(f64),
    /// `start + step·i` along one axis.
    Ramp { axis: usize, start: i64, step: i64 },
    /// `inside` where `-left <= column - row <= right`, else `outside`, in the last two axes. A side without a bound
    /// reaches the edge of the table everywhere.
    Band {
        left: Option<i64>,
        right: Option<i64>,
        inside: f64,
        outside: f64,
    },
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
        let axes = 0..tensor.dims.len();
        let long: Vec<usize> = axes.filter(|a| tensor.dims[*a] != 1).collect();
        if let [axis] = long[..]
            && tensor.dtype.is_int()
        {
            let start = tensor.get_i64(0)?;
            let step = tensor.get_i64(1)?.checked_sub(start)?;
            let on_line = |i: usize| {
                let expected = step.checked_mul(i as i64)?.checked_add(start)?;
                Some(tensor.get_i64(i)? == expected)
            };
            let is_ramp = (0..count).all(|i| on_line(i) == Some(true));
            return is_ramp.then_some(Table::Ramp { axis, start, step });
        }
        let [head @ .., rows, columns] = tensor.dims.as_slice() else {
            return None;
        };
        if head.iter().any(|d| *d != 1) {
            return None;
        }
        // The number on the diagonal is inside the band. A tensor with both numbers on its diagonal is no band.
        let outside = tensor.get_f64(other)?;
        Table::band(tensor, *rows as i64, *columns as i64, first, outside)
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
