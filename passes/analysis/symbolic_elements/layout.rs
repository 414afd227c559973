//! Where an element of a result of a layout op lies in the operand.

use super::{Elements, scaled_index};
use crate::ir::{Dim, Node, ValueId};
use crate::ops::{concat, index, shape, slice};

impl Elements<'_> {
    /// The operand's element that element `at` of a layout op's result `slot` is; `None` for other ops and where it
    /// cannot be told.
    pub(super) fn moved(
        &mut self,
        node: &Node,
        slot: usize,
        at: &[Dim],
    ) -> Option<(ValueId, Vec<Dim>)> {
        let x = node.ins.first().copied().flatten()?;
        let from = self.graph.ty(x).dims.clone();
        let op = node.op;
        let to = if op == &shape::IDENTITY {
            at.to_vec()
        } else if op == &shape::TRANSPOSE {
            let mut to = vec![Dim::ZERO; at.len()];
            for (i, axis) in permutation(node, at.len()).into_iter().enumerate() {
                *to.get_mut(axis)? = at[i].clone();
            }
            to
        } else if op == &shape::EXPAND {
            broadcast(&from, &self.graph.ty(node.outs[0]).dims, at)?
        } else if op == &shape::UNSQUEEZE || op == &shape::SQUEEZE {
            // Both only add or drop axes of size 1: the others stay in order.
            let wide = self.graph.ty(node.outs[0]).dims.clone();
            let listed = self.axes(node, from.len().max(wide.len()))?;
            if op == &shape::UNSQUEEZE {
                let kept = (0..at.len()).filter(|i| !listed.contains(i));
                kept.map(|i| at[i].clone()).collect()
            } else {
                let mut rest = at.iter();
                (0..from.len())
                    .map(|i| {
                        if listed.contains(&i) {
                            Some(Dim::ZERO)
                        } else {
                            rest.next().cloned()
                        }
                    })
                    .collect::<Option<Vec<Dim>>>()?
            }
        } else if op == &shape::RESHAPE || op == &shape::FLATTEN {
            let dims = self.graph.ty(node.outs[0]).dims.clone();
            self.reshaped(&from, &dims, at)?
        } else if op == &slice::SLICE {
            self.sliced(node, &from, at)?
        } else if op == &concat::SPLIT {
            let axis = axis_of(node.attrs.int("axis"), from.len())?;
            let before = node.outs[..slot].iter();
            let offset = before.fold(Dim::ZERO, |sum, v| sum.add(&self.graph.ty(*v).dims[axis]));
            let mut to = at.to_vec();
            to[axis] = to[axis].add(&offset);
            to
        } else if op == &concat::TILE {
            at.iter()
                .zip(&from)
                .map(|(i, d)| if d.is_one() { Dim::ZERO } else { i.modulo(d) })
                .collect()
        } else if op == &index::GATHER {
            let indices = node.ins.get(1).copied().flatten()?;
            let axis = axis_of(node.attrs.int("axis"), from.len())?;
            let rank = self.graph.ty(indices).rank();
            let picked = self.index(indices, at.get(axis..axis + rank)?, &from[axis])?;
            let mut to = at[..axis].to_vec();
            to.push(picked);
            to.extend_from_slice(&at[axis + rank..]);
            to
        } else {
            return None;
        };
        (to.len() == from.len()).then_some((x, to))
    }

    /// The axes that the second operand lists, or, where there is none, all axes of size 1.
    fn axes(&mut self, node: &Node, rank: usize) -> Option<Vec<usize>> {
        match node.ins.get(1).copied().flatten() {
            Some(axes) => {
                let listed = self.constants(axes)?;
                listed.into_iter().map(|a| axis_of(a, rank)).collect()
            }
            None => {
                let dims = &self.graph.ty(node.ins[0]?).dims;
                Some((0..dims.len()).filter(|i| dims[*i].is_one()).collect())
            }
        }
    }

    /// An index into `size` elements that the data gives: not negative, or a constant from the end.
    pub(super) fn index(&mut self, indices: ValueId, at: &[Dim], size: &Dim) -> Option<Dim> {
        let picked = self.at(indices, at).int()?;
        if self.range(&picked).0.is_some_and(|lo| lo >= 0) {
            return Some(picked);
        }
        (picked.as_const()? < 0).then(|| picked.add(size))
    }

    fn sliced(&mut self, node: &Node, from: &[Dim], at: &[Dim]) -> Option<Vec<Dim>> {
        let starts = node.ins.get(1).copied().flatten()?;
        let count = self.graph.ty(starts).elements().as_const()?;
        let axes = match node.ins.get(3).copied().flatten() {
            Some(axes) => self.constants(axes)?,
            None => (0..count).collect(),
        };
        let steps = match node.ins.get(4).copied().flatten() {
            Some(steps) => self.constants(steps)?,
            None => vec![1; axes.len()],
        };
        let mut to = at.to_vec();
        for (k, (axis, step)) in axes.into_iter().zip(steps).enumerate() {
            let axis = axis_of(axis, from.len())?;
            let start = self.at(starts, &[Dim::from(k as i64)]).int()?;
            let first = match start.bounds() {
                // Beyond the end there are no elements to ask for.
                (Some(lo), _) if lo >= 0 => start,
                (_, Some(hi)) if hi < 0 => {
                    let first = start.add(&from[axis]);
                    // A start before the beginning is clamped.
                    match first.bounds().0 {
                        Some(lo) if lo >= 0 => first,
                        _ if start == Dim::from(-1) => first,
                        _ => return None,
                    }
                }
                _ => return None,
            };
            if step < 1 {
                return None;
            }
            to[axis] = scaled_index(&to[axis], step).add(&first);
        }
        Some(to)
    }

    /// The element of a tensor of shape `from` that lies where `at` does in shape `dims`, in row-major order.
    fn reshaped(&mut self, from: &[Dim], dims: &[Dim], at: &[Dim]) -> Option<Vec<Dim>> {
        // Equal leading and trailing axes stay as they are: what is between is one number.
        let head = from.iter().zip(dims).take_while(|(a, b)| a == b).count();
        let most = from.len().min(dims.len()) - head;
        let tail = from
            .iter()
            .rev()
            .zip(dims.iter().rev())
            .take_while(|(a, b)| a == b)
            .count()
            .min(most);
        let middle = &dims[head..dims.len() - tail];
        let mut flat = Dim::ZERO;
        for (size, i) in middle.iter().zip(&at[head..]) {
            flat = flat.mul(size).add(i);
        }
        let into = &from[head..from.len() - tail];
        let mut to = at[..head].to_vec();
        let mut stride = Dim::product(into);
        for size in into {
            if size.is_one() {
                to.push(Dim::ZERO);
                continue;
            }
            stride = stride.exact_div(size)?;
            let (quotient, rest) = self.divided(&flat, &stride);
            to.push(quotient);
            flat = rest;
        }
        to.extend_from_slice(&at[dims.len() - tail..]);
        Some(to)
    }

    /// Floor quotient and remainder of an index that is not negative.
    fn divided(&self, flat: &Dim, by: &Dim) -> (Dim, Dim) {
        if by.is_one() {
            return (flat.clone(), Dim::ZERO);
        }
        let (mut quotient, mut rest) = (Dim::ZERO, Dim::ZERO);
        for (monomial, coefficient) in flat.terms() {
            let factors: Vec<Dim> = monomial.into_iter().map(Dim::from_atom).collect();
            let term = Dim::product(&factors).mul(&Dim::from(coefficient));
            match term.exact_div(by) {
                Some(q) => quotient = quotient.add(&q),
                None => rest = rest.add(&term),
            }
        }
        let room = by.sub(&Dim::ONE).sub(&rest);
        let (low, high) = (self.range(&rest).0, self.range(&room).0);
        if low.is_some_and(|x| x >= 0) && high.is_some_and(|x| x >= 0) {
            return (quotient, rest);
        }
        (quotient.add(&rest.div(by)), rest.modulo(by))
    }
}

/// An axis in `-rank..rank` as `0..rank`.
pub(super) fn axis_of(axis: i64, rank: usize) -> Option<usize> {
    let at = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(at).ok().filter(|a| *a < rank)
}

fn permutation(node: &Node, rank: usize) -> Vec<usize> {
    match node.attrs.opt_ints("perm") {
        Some(perm) => perm.iter().filter_map(|a| axis_of(*a, rank)).collect(),
        None => (0..rank).rev().collect(),
    }
}

/// Where element `at` of a result of shape `to` comes from in an operand of shape `from` that broadcasts to it.
pub(super) fn broadcast(from: &[Dim], to: &[Dim], at: &[Dim]) -> Option<Vec<Dim>> {
    let skip = to.len().checked_sub(from.len())?;
    from.iter()
        .zip(&to[skip..])
        .zip(&at[skip..])
        .map(|((f, t), i)| match (f.is_one(), f == t) {
            (true, _) => Some(Dim::ZERO),
            (_, true) => Some(i.clone()),
            _ => None,
        })
        .collect()
}
