//! Index arithmetic of layout ops.

use crate::ir::{Dim, Node};

/// Returns an axis in `-rank..rank` as one in `0..rank`.
pub(crate) fn axis_of(axis: i64, rank: usize) -> Option<usize> {
    let at = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(at).ok().filter(|a| *a < rank)
}

/// Returns the permutation of a `Transpose`; all axes in reverse where its attribute is not given.
pub(super) fn permutation(node: &Node, rank: usize) -> Vec<usize> {
    match node.attrs.opt_ints("perm") {
        Some(perm) => perm.iter().filter_map(|a| axis_of(*a, rank)).collect(),
        None => (0..rank).rev().collect(),
    }
}

/// Returns the index, in an operand of shape `from` that broadcasts to shape `to`, of the element at `at`.
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
