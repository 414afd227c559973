//! Elements of constants: single numbers, ramps (`0, 1, 2, …`) and bands (`tril` of ones) that a file holds as tables.

use super::{Condition, Element, Elements, arithmetic};
use crate::ir::{Dim, Tensor, ValueId};
use std::sync::Arc;

/// Larger tables are not looked at.
const MAX_ELEMENTS: u64 = 1 << 24;

/// What a table of numbers is.
#[derive(Debug)]
pub(super) enum Table {
    Same(f64),
    /// `start + step·i` along one axis.
    Ramp {
        axis: usize,
        start: i64,
        step: i64,
    },
    /// `inside` where `-left <= column - row <= right`, else `outside`, in the last two axes. A side without a bound
    /// reaches the edge of the table everywhere.
    Band {
        left: Option<i64>,
        right: Option<i64>,
        inside: f64,
        outside: f64,
    },
}

impl Elements<'_> {
    pub(super) fn constant(&mut self, value: ValueId, at: &[Dim]) -> Option<Element> {
        let ty = self.graph.ty(value);
        let tensor = self.graph.value(value).tensor()?;
        let wrap = |x: f64| match ty.dtype {
            d if d.is_float() => Element::Number(x),
            d if d.is_int() => Element::Int(Dim::from(x as i64)),
            _ => Element::Bool(Condition::Is(x != 0.0)),
        };
        let place: Option<Vec<i64>> = at.iter().map(Dim::as_const).collect();
        if let Some(place) = place {
            let mut flat = 0i64;
            for (i, d) in place.iter().zip(&tensor.dims) {
                if *i < 0 || *i as u64 >= *d {
                    return None;
                }
                flat = flat * *d as i64 + i;
            }
            if ty.dtype.is_int() {
                return Some(Element::Int(Dim::from(tensor.get_i64(flat as usize)?)));
            }
            return tensor.get_f64(flat as usize).map(wrap);
        }
        let table = match self.tables.get(&value) {
            Some(table) => table.clone(),
            None => {
                let table = table_of(tensor).map(Arc::new);
                self.tables.insert(value, table.clone());
                table
            }
        };
        match &*table? {
            Table::Same(x) => Some(wrap(*x)),
            Table::Ramp { axis, start, step } => {
                let i = at.get(*axis)?.mul(&Dim::from(*step));
                Some(Element::Int(i.add(&Dim::from(*start))))
            }
            Table::Band {
                left,
                right,
                inside,
                outside,
            } => {
                let [.., row, column] = at else { return None };
                let across = column.sub(row);
                let mut within = Condition::Is(true);
                if let Some(left) = left {
                    within = within.and(self.at_least_0(across.add(&Dim::from(*left))))?;
                }
                if let Some(right) = right {
                    within = within.and(self.at_least_0(Dim::from(*right).sub(&across)))?;
                }
                if ty.dtype == crate::ir::DType::Bool {
                    let within = if *inside != 0.0 { within } else { within.not() };
                    return Some(Element::Bool(within));
                }
                arithmetic::choose(within, Element::Number(*inside), Element::Number(*outside))
            }
        }
    }
}

fn table_of(tensor: &Tensor) -> Option<Table> {
    if tensor.elements() == 0 || tensor.elements() > MAX_ELEMENTS {
        return None;
    }
    let first = tensor.get_f64(0)?;
    let count = tensor.elements() as usize;
    if (1..count).all(|i| tensor.get_f64(i).is_some_and(|x| same(x, first))) {
        return Some(Table::Same(first));
    }
    let long: Vec<usize> = (0..tensor.dims.len())
        .filter(|a| tensor.dims[*a] != 1)
        .collect();
    if let [axis] = long.as_slice()
        && tensor.dtype.is_int()
    {
        let start = tensor.get_i64(0)?;
        let step = tensor.get_i64(1)?.checked_sub(start)?;
        let on_line = |i: usize| {
            let expected = step.checked_mul(i as i64)?.checked_add(start)?;
            Some(tensor.get_i64(i)? == expected)
        };
        let ramp = (0..count).all(|i| on_line(i) == Some(true));
        return ramp.then_some(Table::Ramp {
            axis: *axis,
            start,
            step,
        });
    }
    let [head @ .., rows, columns] = tensor.dims.as_slice() else {
        return None;
    };
    if head.iter().any(|d| *d != 1) {
        return None;
    }
    // Two numbers; the one that stands on the diagonal is inside. A table with both on its diagonal is no band.
    let other = (1..count).find_map(|i| tensor.get_f64(i).filter(|x| !same(*x, first)))?;
    band(tensor, *rows as i64, *columns as i64, first, other)
}

fn same(a: f64, b: f64) -> bool {
    a == b && a.is_sign_negative() == b.is_sign_negative()
}

fn band(tensor: &Tensor, rows: i64, columns: i64, inside: f64, outside: f64) -> Option<Table> {
    let at = |i: i64, j: i64| tensor.get_f64((i * columns + j) as usize);
    // The first row tells how far the band reaches to the right, the first column how far to the left.
    let reach = |count: i64, get: &dyn Fn(i64) -> Option<f64>| -> Option<i64> {
        let end = (0..count).find(|k| get(*k).is_none_or(|x| !same(x, inside)));
        Some(end.unwrap_or(count) - 1)
    };
    let right = reach(columns, &|j| at(0, j))?;
    let left = reach(rows, &|i| at(i, 0))?;
    let right = (right + 1 < columns).then_some(right);
    let left = (left + 1 < rows).then_some(left);
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
