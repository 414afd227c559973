//! Products by groups of rows, as mixtures of experts have them: each row of a matrix is multiplied by the matrix of its group.
//!
//! `group` holds the group of each row. A row whose group does not exist gives zeros. The number of rows in a group depends on
//! the data, but no tensor's size does. The host reads `group`. Consecutive rows of one group, as in a matrix sorted by group, are
//! read in place. Other rows are copied, a limited number at a time.
//! The bodies multiply all rows by all matrices and select, because ONNX has no such product.

use super::matmul::plan::{grouped_plan, grouped_weight_plan};
use super::matmul::{MatmulPlan, swap_last};
use super::names::*;
use super::rule::*;
use super::shape::give_shaped;
use ckpt_ir::error::{Error, Result};
use ckpt_ir::op::{
    BatchAxes, BodyCx, CostCx, DeviceKind, Footprint, Grad, InferCx, MemoryCx, OpClass, OpDef,
    Sized, fresh, rows_within,
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

/// The most elements in a kernel's copies of rows, both matrices together: on a CPU, and on a CUDA device.
const COPIED_ELEMENTS: i64 = 1 << 20;
const CUDA_COPIED_ELEMENTS: i64 = 1 << 24;

/// `x[r]·B[group[r]]` for each row r, `[rows, in]` and `[groups, in, out]` to `[rows, out]`. With `transB` the matrices are
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
            let groups = group_count(&cx.ty(b))?;
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
        let plan = sides.map(|(x, b)| grouped_plan(x, b, is_turned));
        buffers(cx, plan, |plan, bytes| {
            let width = plan.k + plan.out[1];
            rows_at_once(cx.device, plan.out[0], width) as u64 * (8 + width as u64 * bytes)
        })
    },
    ..ours("GroupedMatMul", OpClass::Product, BatchAxes::Mixed, |cx| {
        let (x, mut b) = (cx.x(0), cx.x(1));
        if cx.attrs.int("transB") != 0 {
            b = swap_last(cx.b, b)?;
        }
        let groups = group_count(cx.b.ty(b))?;
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
        let plan = sides.map(|(a, b)| grouped_weight_plan(a, b, groups));
        buffers(cx, plan, |plan, bytes| {
            let (m, n) = (plan.out[1], plan.out[2]);
            // Narrow rows are widened, so that no part of a sum is rounded.
            let (wide, sum) = match compute_type(cx.outs[0].dtype).size_bytes() {
                wide if wide == bytes => (0, 0),
                wide => (wide, wide * (m * n) as u64),
            };
            let row_bytes = 8 + (m + n) as u64 * (bytes + wide);
            rows_at_once(cx.device, plan.k, m + n) as u64 * row_bytes + sum
        })
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

/// Returns how many of `rows` rows a kernel copies at a time. `width` is the length of a row in both matrices together.
pub fn rows_at_once(device: DeviceKind, rows: i64, width: i64) -> i64 {
    let most = match device {
        DeviceKind::Cpu => COPIED_ELEMENTS,
        DeviceKind::Cuda => CUDA_COPIED_ELEMENTS,
    };
    rows_within(most, rows, width)
}

/// The indices of the rows, sorted by group, and ascending within a group.
pub struct GroupedRows {
    rows: Vec<i64>,
    ends: Vec<usize>,
}

impl GroupedRows {
    /// Sorts rows by group; those without one are left out.
    pub fn new(group: &[i64], groups: i64) -> GroupedRows {
        let of = |group: &i64| {
            usize::try_from(*group)
                .ok()
                .filter(|g| *g < groups as usize)
        };
        let mut ends = vec![0; groups as usize];
        group.iter().filter_map(of).for_each(|g| ends[g] += 1);
        let mut sum = 0;
        for end in &mut ends {
            // The start of the group. Filling the group moves it to the end.
            sum += std::mem::replace(end, sum);
        }
        let mut rows = vec![0; sum];
        for (row, g) in (0..).zip(group) {
            if let Some(g) = of(g) {
                rows[ends[g]] = row;
                ends[g] += 1;
            }
        }
        GroupedRows { rows, ends }
    }

    /// Returns the rows of each group.
    pub fn of_groups(&self) -> impl Iterator<Item = &[i64]> {
        let starts = [0].into_iter().chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.rows[start..*end])
    }

    /// Returns the number of rows that have a group.
    pub fn count(&self) -> i64 {
        self.rows.len() as i64
    }
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

fn group_count(matrices: &Ty) -> Result<i64> {
    let groups = matrices.dims[0].as_const();
    groups.ok_or_else(|| Error::bug("grouped", "the number of groups is not a constant"))
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

/// Returns two FLOPs for each element of the first operand and each column of `wide`.
fn flops(cx: &CostCx, wide: &[Sized]) -> u64 {
    let columns = wide.first().and_then(|y| y.dims.last()).copied();
    let columns = columns.unwrap_or(0) as u64;
    cx.elements(0).saturating_mul(2).saturating_mul(columns)
}

/// Returns the memory of a node: its result, copies of operands that BLAS cannot read, and buffers for copied rows.
/// `copied_bytes` gives the size of these buffers from the plan and the bytes of an element.
fn buffers(
    cx: &MemoryCx,
    plan: Option<MatmulPlan>,
    copied_bytes: impl Fn(&MatmulPlan, u64) -> u64,
) -> Footprint {
    let Some(plan) = plan.filter(|plan| !plan.is_empty()) else {
        return fresh(cx);
    };
    let copied_bytes = copied_bytes(&plan, cx.outs[0].dtype.size_bytes());
    fresh(cx).with_temp(plan.temp_bytes + copied_bytes + strided_bytes(cx, &[GROUP]))
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
        let found = GroupedRows::new(&[2, 0, -1, 2, 3, 0], 3);
        let rows: Vec<&[i64]> = found.of_groups().collect();
        assert_eq!(rows, [&[1, 5][..], &[], &[0, 3]]);
        assert_eq!(found.count(), 4);
        assert_eq!(GroupedRows::new(&[0, 1], 0).of_groups().count(), 0);
    }
}
