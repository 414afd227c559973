//! Products by groups of rows, as mixtures of experts have them: each row of a matrix is multiplied by the matrix of its group.
//!
//! The rows lie sorted by group, and `ends` holds the row at which each group ends. The rows before `ends[0]` are of group 0, the
//! others before `ends[1]` of group 1, and so on; rows behind all ends are of no group, and their results are zeros. How many
//! rows a group has, only the data tells, but no size depends on it: as many rows are multiplied as there are. The host
//! reads `ends`. The bodies multiply all rows by all matrices and select, because ONNX has no such product.

use super::matmul::plan::{grouped_plan, grouped_weight_plan};
use super::matmul::swap_last;
use super::names::*;
use super::rule::*;
use super::shape::give_shaped;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, BodyCx, CostCx, Footprint, Grad, InferCx, OpClass, OpDef, Place, Sized,
};
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Same, Ty, ValueId};
use std::ops::Range;

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&GROUPED_MATMUL, &GROUPED_WEIGHT_GRAD];

/// The slot of the rows at which groups end.
pub const ENDS: usize = 2;

/// x[r]·B[g] for each row r of group g, `[rows, in]` and `[groups, in, out]` to `[rows, out]`. With `transB` the matrices are
/// `[out, in]`. (`torch._grouped_mm` of a matrix and a batch of matrices.)
pub static GROUPED_MATMUL: OpDef = OpDef {
    aten: &["aten._grouped_mm"],
    attrs: &[AttrSpec::int("transB", 0)],
    ins: slots!["x", "B", "ends"],
    outs: Y,
    infer: |cx| {
        let (x, groups) = operands(cx, [2, 3])?;
        let b = &cx.ty(1)?.dims;
        let (inner, out) = match cx.attrs.int("transB") {
            0 => (&b[1], &b[2]),
            _ => (&b[2], &b[1]),
        };
        check_same(cx, "the inner sizes of the product", [&x[1], inner])?;
        check_same(cx, "the numbers of groups", [&groups, &b[0]])?;
        Ok(vec![Ty::new(cx.ty(0)?.dtype, [x[0].clone(), out.clone()])])
    },
    grad: Grad::Rule(|cx| {
        let turned = cx.attrs().int("transB");
        let (x, b, ends, dy) = (cx.x(0), cx.x(1), cx.x(ENDS), cx.dy0());
        if cx.wants(0) {
            let attrs = Attrs::new().with("transB", 1 - turned);
            let dx = cx.b.emit(&GROUPED_MATMUL, &[dy, b, ends], attrs)?;
            give_shaped(cx, 0, dx)?;
        }
        if cx.wants(1) {
            let [left, right] = if turned == 0 { [x, dy] } else { [dy, x] };
            let db = cx.b.op(&GROUPED_WEIGHT_GRAD, &[left, right, ends])?;
            give_shaped(cx, 1, db)?;
        }
        Ok(())
    }),
    cost: |cx| cx.work(flops(cx, cx.outs)),
    memory: |cx| {
        let sides = cx.operand(0).zip(cx.operand(1));
        let is_turned = cx.attrs.int("transB") != 0;
        copies(sides.map(|(x, b)| grouped_plan(x, b, is_turned).temp_bytes))
    },
    ..ours("GroupedMatMul", OpClass::Product, BatchAxes::Mixed, |cx| {
        let (x, mut b) = (cx.x(0), cx.x(1));
        if cx.attrs.int("transB") != 0 {
            b = swap_last(cx.b, b)?;
        }
        let is_of = rows_of_groups(cx, x)?;
        let all = cx.b.op(MATMUL, &[x, b])?;
        let own = of_group(cx, is_of, all)?;
        let (groups, attrs) = (cx.b.ints(&[0]), Attrs::new().with("keepdims", 0));
        Ok(vec![cx.b.emit(REDUCE_SUM, &[own, groups], attrs)?])
    })
};

/// Aᵀ·B over the rows of each group, `[rows, m]` and `[rows, n]` to `[groups, m, n]`; zeros for a group without rows.
pub static GROUPED_WEIGHT_GRAD: OpDef = OpDef {
    ins: slots!["A", "B", "ends"],
    outs: Y,
    infer: |cx| {
        let (a, groups) = operands(cx, [2, 2])?;
        let b = &cx.ty(1)?.dims;
        check_same(cx, "the numbers of rows", [&a[0], &b[0]])?;
        let dims = [groups, a[1].clone(), b[1].clone()];
        Ok(vec![Ty::new(cx.ty(0)?.dtype, dims)])
    },
    grad: Grad::Rule(|cx| {
        let (ends, dy) = (cx.x(ENDS), cx.dy0());
        for (slot, other, turned) in [(0, 1, 1), (1, 0, 0)] {
            if cx.wants(slot) {
                let (x, attrs) = (cx.x(other), Attrs::new().with("transB", turned));
                let dx = cx.b.emit(&GROUPED_MATMUL, &[x, dy, ends], attrs)?;
                give_shaped(cx, slot, dx)?;
            }
        }
        Ok(())
    }),
    cost: |cx| {
        let b = cx.ins.get(1).and_then(Option::as_ref);
        cx.work(b.map_or(0, |b| flops(cx, std::slice::from_ref(b))))
    },
    memory: |cx| {
        let sides = cx.operand(0).zip(cx.operand(1));
        let groups = cx.operand(ENDS).map_or(0, |ends| ends.dims[0]);
        copies(sides.map(|(a, b)| grouped_weight_plan(a, b, groups).temp_bytes))
    },
    ..ours(
        "GroupedWeightGrad",
        OpClass::Product,
        BatchAxes::Mixed,
        |cx| {
            let (a, b) = (cx.x(0), cx.x(1));
            let is_of = rows_of_groups(cx, a)?;
            let own = of_group(cx, is_of, a)?;
            let own = swap_last(cx.b, own)?;
            Ok(vec![cx.b.op(MATMUL, &[own, b])?])
        },
    )
};

/// The rows of each group, in turn, of `rows` rows.
pub fn groups(ends: &[i64], rows: i64) -> Vec<Range<i64>> {
    let mut start = 0;
    let group = |end: &i64| {
        let group = start..(*end).clamp(start, rows);
        start = group.end;
        group
    };
    ends.iter().map(group).collect()
}

/// Checks types and ranks of the operands; returns the sizes of the first one and the number of groups.
fn operands<'a>(cx: &InferCx<'a>, ranks: [usize; 2]) -> Result<(&'a [Dim], Dim)> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    cx.same_dtype(&[0, 1])?;
    cx.want_dtype(ENDS, DType::is_int, "an integer type")?;
    for (slot, rank) in ranks.into_iter().chain([1]).enumerate() {
        let found = cx.ty(slot)?;
        if found.rank() != rank {
            let name = cx.op.ins[slot].name;
            return Err(cx
                .fail("shape", format!("operand `{name}` has the wrong rank"))
                .expected(rank.to_string())
                .found(found.to_string()));
        }
    }
    Ok((&cx.ty(0)?.dims, cx.ty(ENDS)?.dims[0].clone()))
}

fn check_same(cx: &InferCx, what: &str, [a, b]: [&Dim; 2]) -> Result<()> {
    if a.same(b) != Same::No {
        return Ok(());
    }
    Err(cx
        .fail("shape", format!("{what} differ"))
        .expected(a.to_string())
        .found(b.to_string()))
}

/// Two for each element of the first operand and each column of `wide`.
fn flops(cx: &CostCx, wide: &[Sized]) -> u64 {
    let columns = wide.first().and_then(|y| y.dims.last()).copied();
    let columns = columns.unwrap_or(0) as u64;
    cx.elements(0).saturating_mul(2).saturating_mul(columns)
}

fn copies(temp_bytes: Option<u64>) -> Footprint {
    Footprint::new(vec![Place::Fresh]).with_temp(temp_bytes.unwrap_or(0))
}

/// Returns whether each row of `x` is of each group: `[groups, rows, 1]`.
fn rows_of_groups(cx: &mut BodyCx, x: ValueId) -> Result<ValueId> {
    let places = cx.b.positions(x, 0)?;
    let ends = cx.b.cast(cx.x(ENDS), DType::I64)?;
    let ends = cx.b.unsqueeze(ends, &[1])?;
    let is_before = cx.b.op(LESS, &[places, ends])?;
    // A row is of the first group that ends behind it.
    let number = cx.b.cast(is_before, DType::I64)?;
    let (zero, attrs) = (cx.b.int(0), Attrs::new().with("exclusive", 1));
    let earlier = cx.b.emit(CUM_SUM, &[number, zero], attrs)?;
    let is_first = cx.b.op(EQUAL, &[earlier, zero])?;
    let is_of = cx.b.op(AND, &[is_before, is_first])?;
    cx.b.unsqueeze(is_of, &[2])
}

/// Returns `x` with zeros in rows of other groups: `[groups, rows, columns]`.
fn of_group(cx: &mut BodyCx, is_of: ValueId, x: ValueId) -> Result<ValueId> {
    let none = cx.b.scalar(cx.b.dtype(x), 0.0);
    cx.b.op(WHERE, &[is_of, x, none])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_of_the_first_group_that_ends_behind_it() {
        for ends in [
            vec![2, 5, 5, 6],
            vec![0, 9, 3],
            vec![4, -1, 2, 7],
            vec![-3],
            vec![],
        ] {
            let groups = groups(&ends, 7);
            for row in 0..7 {
                let first = ends.iter().position(|end| row < *end);
                let of = groups.iter().position(|group| group.contains(&row));
                assert_eq!(of, first, "{ends:?} {row}");
            }
        }
    }
}
