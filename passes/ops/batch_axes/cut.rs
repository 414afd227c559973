//! A node for some of the rows of its operands; see the module above for what rows are.

use super::*;
use crate::builder::Builder;
use crate::rule::EmitExt;
use ckpt_ir::error::{Error, Result};
use ckpt_ir::op::BatchAxes;
use ckpt_ir::{DType, Emit, Ty};

/// A node to be emitted for some of the rows.
pub struct CutCx<'a, 'g> {
    /// Where the node is emitted.
    pub b: &'a mut Builder<'g>,
    /// The row of the node.
    pub op: &'static OpDef,
    /// The node's own, but for a reduction that the caller has changed.
    pub attrs: Attrs,
    /// Operands: parts where they have rows, of which the axes are merged into one; whole where not.
    pub ins: Vec<Option<ValueId>>,
    /// Types of the whole operands and results.
    pub in_types: Vec<Option<Ty>>,
    /// Types of the whole results.
    pub out_types: Vec<Ty>,
    /// How rows lie in operands and results.
    pub fit: &'a Fit,
    /// The axes that the node reduces or slices, if it does.
    pub axes: Option<Vec<usize>>,
    /// How many elements the axes of the rows have in a part of the result: an int64 vector of length 1.
    pub count: ValueId,
}

impl CutCx<'_, '_> {
    /// Sets the operand `slot` to the sizes of a part of the result, whose first `lead` axes are the rows. The operand lists
    /// those of the whole.
    fn list_sizes(&mut self, slot: usize, lead: usize) -> Result<()> {
        let dims = self.out_types[0].dims.clone();
        let is_constant = dims[lead..].iter().all(|d| d.as_const().is_some());
        let row = match self.ins[slot] {
            Some(all) if !is_constant => {
                let bounds = [lead, dims.len()].map(|at| self.b.ints(&[at as i64]));
                self.b.slice(all, bounds, 0)?
            }
            _ => self.b.ints(&row_dims(&dims[lead..])),
        };
        self.ins[slot] = Some(self.b.concat(&[self.count, row], 0)?);
        Ok(())
    }
}

/// The axes that `node` reduces or slices; `None` for other ops.
pub fn own_axes(graph: &Graph, contents: &Contents, node: &Node) -> Option<Vec<usize>> {
    let rank = graph.ty(node.operand(0)?).rank();
    match node.op.axes {
        BatchAxes::Reduced => reduced_axes(node, rank, contents),
        BatchAxes::Sliced => sliced_axes(node, rank, contents),
        _ => None,
    }
}

/// Emits a node for some rows. A result with rows has them as its first axis; a sum over rows has the shape of the whole
/// result or one that reshapes to it.
///
/// # Errors
/// What typing refuses.
pub fn cut(mut cx: CutCx) -> Result<Vec<ValueId>> {
    let n_outs = cx.out_types.len();
    let op = cx.op;
    let lead_in = |i: usize| match cx.fit.ins.get(i).copied().flatten() {
        Some(Rows::Lead(k)) => k,
        _ => 0,
    };
    let lead_out = match cx.fit.outs[0] {
        Rows::Lead(k) => k,
        _ => 0,
    };
    if op == &IDENTITY {
        return Ok(cx.ins.into_iter().flatten().collect());
    }
    if is_of_columns(&cx) {
        return of_columns(cx);
    }
    if op.axes == BatchAxes::Pointwise {
        if lead_out > 0 {
            let trailing = cx.out_types[0].rank() - lead_out;
            whole_operands(&mut cx, trailing)?;
        }
    } else if op.axes == BatchAxes::Product && cx.out_types[0].rank() >= lead_out + 2 {
        // A product for each row.
        let trailing = cx.out_types[0].rank() - lead_out;
        if lead_out > 0 {
            whole_operands(&mut cx, trailing)?;
        }
    } else if op.axes == BatchAxes::Regrouped {
        let x = cx.ins[0].expect("I4: a layout op has an operand");
        let row = row_dims(&cx.out_types[0].dims[lead_out..]);
        if cx.b.ty(x).dims[1..]
            .iter()
            .map(Dim::as_const)
            .eq(row.iter().map(|d| Some(*d)))
        {
            return Ok(vec![x]);
        }
        return Ok(vec![regrouped(&mut cx, x, &row, lead_out)?]);
    } else if op.axes == BatchAxes::Permuted && cx.fit.ins[0] != Some(Rows::Last) && lead_out > 0 {
        let rank = cx.out_types[0].rank();
        let perm = permutation(&cx.attrs, rank);
        let moved = perm[lead_out..].iter().map(|p| (p - lead_out + 1) as i64);
        let perm: Vec<i64> = std::iter::once(0).chain(moved).collect();
        cx.attrs = Attrs::new().with("perm", perm);
    } else if op.axes == BatchAxes::SummedToShape {
        let (k, rank) = (lead_in(0), cx.in_types[0].as_ref().map_or(0, Ty::rank));
        let out = &cx.out_types[0].dims;
        let row = row_dims(&out[out.len() - out.len().min(rank - k)..]);
        match lead_out {
            0 if row.contains(&-1) => {
                let (x, first) = (cx.ins[0], cx.b.ints(&[0]));
                let none_kept = Attrs::new().with("keepdims", 0);
                return cx.b.emit_n(&REDUCE_SUM, vec![x, Some(first)], none_kept, 1);
            }
            0 => cx.ins[1] = Some(cx.b.ints(&row)),
            _ => cx.list_sizes(1, lead_out)?,
        }
    } else if let (BatchAxes::Sliced, Some(axes)) = (op.axes, &cx.axes) {
        let moved: Vec<i64> = axes.iter().map(|a| (a - lead_out + 1) as i64).collect();
        cx.ins[3] = Some(cx.b.ints(&moved));
    } else if let Some(axes) = &cx.axes {
        let k = lead_in(0);
        let mut shifted: Vec<i64> = axes
            .iter()
            .filter(|a| **a >= k)
            .map(|a| (a - k + 1) as i64)
            .collect();
        if lead_out == 0 {
            shifted.insert(0, 0);
            cx.attrs.set("keepdims", 0.into());
        }
        cx.attrs.set("noop_with_empty_axes", 1.into());
        cx.ins.truncate(1);
        let axes = cx.b.ints(&shifted);
        cx.ins.push(Some(axes));
    } else if (op == &GATHER || op == &GATHER_GRAD) && cx.fit.ins[1].is_some() {
        // The rows read entries of a table. Its axis and its shape stay as they are.
    } else if op.axes == BatchAxes::AlongAxis
        || op.axes == BatchAxes::OneHot
        || ALONG.contains(&op)
        || norm::ROWS.contains(&op)
        || op == &GATHER
        || op == &GATHER_GRAD
    {
        // Of one-hot vectors and the gradient of a lookup it is an axis of the result, else of the data.
        let rank = match op.axes == BatchAxes::OneHot || op == &GATHER_GRAD {
            true => cx.out_types[0].rank(),
            false => cx.in_types[0].as_ref().map_or(0, Ty::rank),
        };
        let axis = from_start(cx.attrs.int("axis"), rank);
        let is_norm = norm::ROWS.contains(&op);
        let lead = if is_norm { lead_in(0) } else { lead_out };
        cx.attrs.set("axis", ((axis + 1 - lead) as i64).into());
        if op == &GATHER_GRAD {
            cx.list_sizes(0, lead_out)?;
        }
        if is_norm {
            whole_operands(&mut cx, rank - lead)?;
        }
    } else if op == &SLICE_GRAD {
        let axes = cx.attrs.ints("axes").iter();
        let moved: Vec<i64> = axes.map(|a| a + 1 - lead_out as i64).collect();
        cx.attrs.set("axes", moved.into());
        cx.list_sizes(1, lead_out)?;
    } else if op == &CUM_SUM {
        let axis = cx.ins[1].and_then(|v| cx.b.known(v)?.first()?.as_const());
        let axis = axis.ok_or_else(|| Error::bug("tile", "an axis is not known"))?;
        let axis = from_start(axis, cx.out_types[0].rank()) + 1 - lead_out;
        cx.ins[1] = Some(cx.b.scalar(DType::I64, axis as f64));
    } else if op == &CONV_INPUT_GRAD {
        cx.list_sizes(2, lead_out)?;
    } else if op.axes == BatchAxes::Broadcast {
        let trailing = cx.out_types[0].rank() - lead_out;
        let shape = cx.ins[1].take();
        whole_operands(&mut cx, trailing)?;
        debug_assert!(shape.is_some(), "I4: Expand has a shape");
        cx.ins[1] = shape;
        cx.list_sizes(1, lead_out)?;
    }
    cx.b.emit_n(op, cx.ins, cx.attrs, n_outs)
}

/// Whether a node reduces a matrix whose columns are the rows, or is broadcast to one.
fn is_of_columns(cx: &CutCx) -> bool {
    let reads = cx.fit.ins[0] == Some(Rows::Last);
    match cx.op.axes {
        BatchAxes::SummedToShape | BatchAxes::Reduced => reads,
        BatchAxes::Broadcast => cx.fit.outs[0] == Rows::Last,
        _ => false,
    }
}

/// Emits such a node. Columns stay where they are.
fn of_columns(mut cx: CutCx) -> Result<Vec<ValueId>> {
    let dims = &cx.out_types[0].dims;
    let lists_sizes = cx.op.axes != BatchAxes::Reduced && cx.fit.outs[0] != Rows::Sum;
    if lists_sizes {
        let before = row_dims(&dims[..dims.len() - 1]);
        let before = cx.b.ints(&before);
        cx.ins[1] = Some(cx.b.concat(&[before, cx.count], 0)?);
    }
    cx.b.emit_n(cx.op, cx.ins, cx.attrs, cx.out_types.len())
}

/// Returns the rows of `x` in the shape `row`, of which a size that no constant tells is -1.
fn regrouped(cx: &mut CutCx, x: ValueId, row: &[i64], lead_out: usize) -> Result<ValueId> {
    let unknown = row.iter().filter(|n| **n < 0).count();
    let ones = |dims: &[Dim]| -> Vec<i64> {
        let ones = (0..dims.len()).filter(|at| dims[*at].is_one());
        ones.map(|at| at as i64 + 1).collect()
    };
    if unknown == 0 {
        let target: Vec<i64> = std::iter::once(-1).chain(row.iter().copied()).collect();
        return cx.b.reshape(x, &target);
    }
    let from = cx.b.ty(x).dims[1..].to_vec();
    let to = cx.out_types[0].dims[lead_out..].to_vec();
    if sizes_match(&from, &to) {
        let gone = ones(&from);
        let x = match gone.is_empty() {
            true => x,
            false => cx.b.squeeze(x, &gone)?,
        };
        return cx.b.unsqueeze(x, &ones(&to));
    }
    let row = if unknown > 1 {
        let all = cx.ins[1].ok_or_else(|| Error::bug("tile", "a shape is missing"))?;
        let bounds = [lead_out, to.len() + lead_out].map(|at| cx.b.ints(&[at as i64]));
        cx.b.slice(all, bounds, 0)?
    } else {
        // A size of -1 has no meaning where a chunk has no rows.
        let bounds = [1, from.len() + 1].map(|at| cx.b.ints(&[at as i64]));
        let sizes = cx.b.shape(x)?;
        let sizes = cx.b.slice(sizes, bounds, 0)?;
        let all = cx.b.emit(&REDUCE_PROD, &[sizes], Attrs::new())?;
        let known = cx.b.ints(&[row.iter().filter(|n| **n > 0).product()]);
        let rest = cx.b.div(all, known)?;
        let size = |n: &i64| if *n < 0 { rest } else { cx.b.ints(&[*n]) };
        let sizes: Vec<ValueId> = row.iter().map(size).collect();
        cx.b.concat(&sizes, 0)?
    };
    let target = cx.b.concat(&[cx.count, row], 0)?;
    cx.b.emit(&RESHAPE, &[x, target], Attrs::new())
}

/// Sizes of a row; -1 for one that is not constant. [`fit`] has made sure that the node can do without it.
fn row_dims(dims: &[Dim]) -> Vec<i64> {
    dims.iter().map(|d| d.as_const().unwrap_or(-1)).collect()
}

/// Takes axes of size 1 that stand for rows away from operands that have none, now that rows are one axis.
fn whole_operands(cx: &mut CutCx, trailing: usize) -> Result<()> {
    for i in 0..cx.ins.len() {
        let (Some(v), None) = (cx.ins[i], cx.fit.ins[i]) else {
            continue;
        };
        let over = cx.b.rank(v).saturating_sub(trailing);
        if over > 0 {
            let axes: Vec<i64> = (0..over as i64).collect();
            cx.ins[i] = Some(cx.b.squeeze(v, &axes)?);
        }
    }
    Ok(())
}
