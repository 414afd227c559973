//! Products by groups of rows, as mixtures of experts have them: each row of a matrix is multiplied by the matrix of its group.
//!
//! `group` holds the group of each row; a row whose group does not exist gives zeros. How many rows a group has, only the data
//! tells, but no size depends on it: as many rows are multiplied as there are. The host reads `group`. Rows of one group that follow
//! each other, as in a matrix that is sorted by group, are read where they lie. Others are copied, some at a time.
//! The bodies multiply all rows by all matrices and select, because ONNX has no such product.

use super::matmul::plan::{grouped_plan, grouped_weight_plan};
use super::matmul::{MatmulPlan, swap_last};
use super::names::*;
use super::rule::*;
use super::shape::give_shaped;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, BodyCx, CostCx, DeviceKind, Footprint, Grad, InferCx, MemoryCx, OpClass, OpDef,
    Sized, fresh,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&GROUPED_MATMUL, &GROUPED_WEIGHT_GRAD];

/// The slot of the groups of the rows.
pub const GROUP: usize = 2;
/// Attribute of the gradient of the matrices: how many there are.
pub const GROUPS: &str = "groups";

/// Most groups: a body lists them.
const MOST_GROUPS: i64 = 1 << 16;

/// Elements of copied rows, of both sides together, that a kernel holds at a time on a CPU.
const COPIED_ELEMENTS: i64 = 1 << 20;

/// x[r]·B[group[r]] for each row r, `[rows, in]` and `[groups, in, out]` to `[rows, out]`. With `transB` the matrices are
/// `[out, in]`. (`torch._grouped_mm` of a matrix and a batch of matrices.)
pub static GROUPED_MATMUL: OpDef = OpDef {
    aten: &["aten._grouped_mm"],
    attrs: &[AttrSpec::int("transB", 0)],
    ins: slots!["x", "B", "group"],
    outs: Y,
    infer: |cx| {
        let x = operands(cx, [2, 3])?;
        let b = &cx.ty(1)?.dims;
        let (inner, out) = match cx.attrs.int("transB") {
            0 => (&b[1], &b[2]),
            _ => (&b[2], &b[1]),
        };
        check_same(cx, "the inner sizes of the product", [&x[1], inner])?;
        check_groups(cx, b[0].as_const(), &b[0])?;
        Ok(vec![Ty::new(cx.ty(0)?.dtype, [x[0].clone(), out.clone()])])
    },
    grad: Grad::Rule(|cx| {
        let turned = cx.attrs().int("transB");
        let (x, b, group, dy) = (cx.x(0), cx.x(1), cx.x(GROUP), cx.dy0());
        if cx.wants(0) {
            let attrs = Attrs::new().with("transB", 1 - turned);
            let dx = cx.b.emit(&GROUPED_MATMUL, &[dy, b, group], attrs)?;
            give_shaped(cx, 0, dx)?;
        }
        if cx.wants(1) {
            let groups = cx.ty(b).dims[0].as_const().unwrap_or(0);
            let [left, right] = if turned == 0 { [x, dy] } else { [dy, x] };
            let attrs = Attrs::new().with(GROUPS, groups);
            let db =
                cx.b.emit(&GROUPED_WEIGHT_GRAD, &[left, right, group], attrs)?;
            give_shaped(cx, 1, db)?;
        }
        Ok(())
    }),
    cost: |cx| cx.work(flops(cx, cx.outs)),
    memory: |cx| {
        let sides = cx.operand(0).zip(cx.operand(1));
        let is_turned = cx.attrs.int("transB") != 0;
        buffers(
            cx,
            sides.map(|(x, b)| grouped_plan(x, b, is_turned)),
            |plan| (plan.k + plan.out[1], rows_at_once(cx.device, plan)),
        )
    },
    ..ours("GroupedMatMul", OpClass::Product, BatchAxes::Mixed, |cx| {
        let (x, mut b) = (cx.x(0), cx.x(1));
        if cx.attrs.int("transB") != 0 {
            b = swap_last(cx.b, b)?;
        }
        let groups = cx.ty(b).dims[0].as_const().unwrap_or(0);
        let is_of = rows_of_groups(cx, groups)?;
        let all = cx.b.op(MATMUL, &[x, b])?;
        let own = of_group(cx, is_of, all)?;
        let (groups, attrs) = (cx.b.ints(&[0]), Attrs::new().with("keepdims", 0));
        Ok(vec![cx.b.emit(REDUCE_SUM, &[own, groups], attrs)?])
    })
};

/// Aᵀ·B over the rows of each group, `[rows, m]` and `[rows, n]` to `[groups, m, n]`; zeros for a group without rows.
pub static GROUPED_WEIGHT_GRAD: OpDef = OpDef {
    attrs: &[AttrSpec::required(GROUPS, AttrKind::Int)],
    ins: slots!["A", "B", "group"],
    outs: Y,
    infer: |cx| {
        let a = operands(cx, [2, 2])?;
        let b = &cx.ty(1)?.dims;
        check_same(cx, "the numbers of rows", [&a[0], &b[0]])?;
        let groups = cx.attrs.int(GROUPS);
        check_groups(cx, Some(groups), &groups)?;
        let dims = [groups.into(), a[1].clone(), b[1].clone()];
        Ok(vec![Ty::new(cx.ty(0)?.dtype, dims)])
    },
    grad: Grad::Rule(|cx| {
        let (group, dy) = (cx.x(GROUP), cx.dy0());
        for (slot, other, turned) in [(0, 1, 1), (1, 0, 0)] {
            if cx.wants(slot) {
                let (x, attrs) = (cx.x(other), Attrs::new().with("transB", turned));
                let dx = cx.b.emit(&GROUPED_MATMUL, &[x, dy, group], attrs)?;
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
        let groups = cx.attrs.int(GROUPS);
        buffers(
            cx,
            sides.map(|(a, b)| grouped_weight_plan(a, b, groups)),
            |plan| {
                (
                    plan.out[1] + plan.out[2],
                    weight_rows_at_once(cx.device, plan, cx.outs[0].dtype),
                )
            },
        )
    },
    ..ours(
        "GroupedWeightGrad",
        OpClass::Product,
        BatchAxes::Mixed,
        |cx| {
            let (a, b) = (cx.x(0), cx.x(1));
            let is_of = rows_of_groups(cx, cx.attrs.int(GROUPS))?;
            let own = of_group(cx, is_of, a)?;
            let own = swap_last(cx.b, own)?;
            Ok(vec![cx.b.op(MATMUL, &[own, b])?])
        },
    )
};

/// How many rows a product copies at a time.
pub fn rows_at_once(device: DeviceKind, plan: &MatmulPlan) -> i64 {
    device.rows_at_once(COPIED_ELEMENTS, plan.out[0], plan.k + plan.out[1])
}

/// The same for the gradient of the matrices. All rows where a sum of parts would be rounded each time.
pub fn weight_rows_at_once(device: DeviceKind, plan: &MatmulPlan, dtype: DType) -> i64 {
    match dtype == compute_type(dtype) {
        true => device.rows_at_once(COPIED_ELEMENTS, plan.k, plan.out[1] + plan.out[2]),
        false => plan.k,
    }
}

/// The rows of each group, ascending.
pub fn rows_of(group: &[i64], groups: i64) -> Vec<Vec<i64>> {
    let mut rows = vec![Vec::new(); groups as usize];
    for (row, group) in (0..).zip(group) {
        let own = usize::try_from(*group).ok().and_then(|at| rows.get_mut(at));
        own.into_iter().for_each(|own| own.push(row));
    }
    rows
}

/// Checks types and ranks of the operands; returns the sizes of the first one.
fn operands<'a>(cx: &InferCx<'a>, ranks: [usize; 2]) -> Result<&'a [Dim]> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    cx.same_dtype(&[0, 1])?;
    cx.want_dtype(GROUP, |dtype| dtype == DType::I64, "int64")?;
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
    let rows = [&cx.ty(0)?.dims[0], &cx.ty(GROUP)?.dims[0]];
    check_same(cx, "the numbers of rows", rows)?;
    Ok(&cx.ty(0)?.dims)
}

fn check_groups(cx: &InferCx, groups: Option<i64>, found: &dyn std::fmt::Display) -> Result<()> {
    if groups.is_some_and(|n| (0..=MOST_GROUPS).contains(&n)) {
        return Ok(());
    }
    Err(cx
        .fail("shape", "the number of groups is unknown or out of range")
        .expected(format!("a constant, 0 to {MOST_GROUPS}"))
        .found(found.to_string()))
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

/// Copies of what BLAS cannot read, and of so many rows of this width at a time, with their numbers.
fn buffers(
    cx: &MemoryCx,
    plan: Option<MatmulPlan>,
    copied: impl Fn(&MatmulPlan) -> (i64, i64),
) -> Footprint {
    let Some(plan) = plan.filter(|plan| !plan.is_empty()) else {
        return fresh(cx);
    };
    let (width, rows) = copied(&plan);
    let row_bytes = 8 + width as u64 * cx.outs[0].dtype.size_bytes();
    fresh(cx).with_temp(plan.temp_bytes + rows as u64 * row_bytes + strided_bytes(cx, &[GROUP]))
}

/// Returns whether each row is of each group: `[groups, rows, 1]`.
fn rows_of_groups(cx: &mut BodyCx, groups: i64) -> Result<ValueId> {
    let numbers: Vec<i64> = (0..groups).collect();
    let numbers = cx.b.ints(&numbers);
    let numbers = cx.b.unsqueeze(numbers, &[1])?;
    let is_of = cx.b.op(EQUAL, &[cx.x(GROUP), numbers])?;
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
    fn rows_without_a_group_are_left_out() {
        let found = rows_of(&[2, 0, -1, 2, 3, 0], 3);
        assert_eq!(found, [vec![1, 5], vec![], vec![0, 3]]);
        assert!(rows_of(&[0, 1], 0).is_empty());
    }
}
