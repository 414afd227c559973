//! Systems of linear equations: `SolveTriangular`.

use super::matmul::swap_last;
use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::layout::expand_strides;
use ckpt_ir::op::{
    BodyCx, DeviceKind, Footprint, Grad, GradCx, InferCx, MemoryCx, OpDef, Sized, fresh, operand,
};
use ckpt_ir::{AttrSpec, Attrs, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&SOLVE_TRIANGULAR];

/// `X` of `A·X = B`, or of `X·A = B` where not `left`; `aten::linalg_solve_triangular`.
///
/// A [.., n, n] is read above the diagonal (`upper`) or below it. With `unitriangular`, its diagonal counts as ones and is
/// not read. Batch axes are broadcast.
pub static SOLVE_TRIANGULAR: OpDef = OpDef {
    aten: &["aten.linalg_solve_triangular"],
    attrs: &[
        AttrSpec::int("left", 1),
        AttrSpec::int("unitriangular", 0),
        AttrSpec::int("upper", 1),
    ],
    ins: A_B,
    outs: slots!["X"],
    infer: infer_solve,
    grad: Grad::Rule(grad_solve),
    cost: |cx| {
        let n = operand(cx.ins, 0).and_then(|a| a.dims.last().copied());
        cx.elementwise(n.unwrap_or(0) as u64)
    },
    memory: solve_memory,
    ..our_mixed("SolveTriangular", solve_body)
};

fn infer_solve(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, |d| d.is_float(), "a floating-point type")?;
    let dtype = cx.same_dtype(&[0, 1])?;
    let (a, b) = (&cx.ty(0)?.dims, &cx.ty(1)?.dims);
    let ([batch_a @ .., rows, columns], [batch_b @ .., m, n]) = (&a[..], &b[..]) else {
        return Err(cx.fail("shape", "an operand has fewer than two axes"));
    };
    if rows.same(columns) == Same::No {
        return Err(cx
            .fail("shape", "`A` is not square")
            .found(format!("{rows} x {columns}")));
    }
    let inner = if cx.attrs.int("left") != 0 { m } else { n };
    if rows.same(inner) == Same::No {
        return Err(cx
            .fail("shape", "`A` and `B` do not fit")
            .expected(format!("{rows}, the size of A"))
            .found(format!("{inner} in B")));
    }
    let mut dims = broadcast_two(batch_a, batch_b).ok_or_else(|| {
        cx.fail("shape", "batch axes do not broadcast")
            .expected(format!("{batch_a:?}"))
            .found(format!("{batch_b:?}"))
    })?;
    dims.extend([m.clone(), n.clone()]);
    Ok(vec![Ty::new(dtype, dims)])
}

/// dB solves the transposed system for dX. dA = −dB·Xᵀ, or −Xᵀ·dB where not `left`, in the triangle that is read. Both are
/// summed over broadcast batch axes.
fn grad_solve(cx: &mut GradCx) -> Result<()> {
    let attrs = cx.attrs();
    let (upper, left) = (attrs.int("upper"), attrs.int("left") != 0);
    let (a, x) = (cx.x(0), cx.y(0));
    let at = swap_last(cx.b, a)?;
    let transposed = attrs.clone().with("upper", 1 - upper);
    let db = cx.b.emit(&SOLVE_TRIANGULAR, &[at, cx.dy0()], transposed)?;
    if cx.wants(0) {
        let xt = swap_last(cx.b, x)?;
        let factors = if left { [db, xt] } else { [xt, db] };
        let product = cx.b.op(MATMUL, &factors)?;
        let product = cx.b.sum_to(product, a)?;
        let product = cx.b.neg(product)?;
        let off_diagonal = match (attrs.int("unitriangular") != 0, upper != 0) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => -1,
        };
        let off_diagonal = cx.b.int(off_diagonal);
        let triangle = Attrs::new().with("upper", upper);
        let da = cx.b.emit(TRILU, &[product, off_diagonal], triangle)?;
        cx.give(0, da);
    }
    if cx.wants(1) {
        let db = cx.b.sum_to(db, cx.x(1))?;
        cx.give(1, db);
    }
    Ok(())
}

/// Returns A broadcast to the batch axes of the result, as strides, if LAPACK can read it in place: row-major or
/// column-major matrices without holes, of float32 or float64. Returns none if A is copied.
pub fn read_in_place(a: &Sized, out: &[i64]) -> Option<Sized> {
    let matrix = a.dims.len() - 2;
    let dims = [&out[..out.len() - 2], &a.dims[matrix..]].concat();
    let strides = expand_strides(&a.dims, &a.strides, &dims);
    let wide = Sized {
        dims,
        strides,
        ..a.clone()
    };
    let mut turned = wide.clone();
    let rank = turned.dims.len();
    turned.dims.swap(rank - 1, rank - 2);
    turned.strides.swap(rank - 1, rank - 2);
    let is_read = compute_type(a.dtype) == a.dtype;
    (is_read && (wide.is_contiguous() || turned.is_contiguous())).then_some(wide)
}

/// The kernel solves in its result, which may be B. It copies A where it cannot be read in place, and both for 16-bit types.
fn solve_memory(cx: &MemoryCx) -> Footprint {
    let (Some(a), Some(out)) = (cx.operand(0), cx.outs.first()) else {
        return fresh(cx);
    };
    let (mut elements, computed) = (0, compute_type(a.dtype));
    if out.elements() > 0 && read_in_place(a, &out.dims).is_none() {
        let batch: i64 = out.dims[..out.dims.len() - 2].iter().product();
        let n = a.dims[a.dims.len() - 1];
        elements += (batch * n * n) as u64;
    }
    if computed != a.dtype {
        elements += out.elements();
    }
    let batch: i64 = out.dims[..out.dims.len() - 2].iter().product();
    // A CUDA device solves small systems together, and takes their addresses.
    let is_together = batch > 8 || a.dims[a.dims.len() - 1] < 64;
    let addresses = match cx.device == DeviceKind::Cuda && is_together && out.elements() > 0 {
        true => 16 * batch as u64,
        false => 0,
    };
    fresh(cx)
        .with_temp(elements * computed.size_bytes() + addresses)
        .in_place_operands(cx, &[1])
}

/// Levels of the body where the size of A is not known: enough for a million rows.
const MOST_LEVELS: u32 = 20;

/// The inverse of A times B. With C below P and Q on the diagonal, the inverse of [P 0; C Q] is [P⁻¹ 0; −Q⁻¹·C·P⁻¹ Q⁻¹].
/// So, from the inverses of all diagonal blocks of one size, V, those of twice the size are V − V·C·V, where C holds the blocks
/// that two neighbours enclose. This is about as exact as substitution; powers of A would cancel.
fn solve_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let flag = |name: &str| cx.attrs.int(name) != 0;
    let (upper, left, unit) = (flag("upper"), flag("left"), flag("unitriangular"));
    let [a, b] = wide(cx)?;
    let last = cx.b.rank(a.0) - 1;
    let size = cx.b.dims(a.0)[last].bounds().1;
    let levels = size.map_or(MOST_LEVELS, |n| i64::BITS - (n.max(1) - 1).leading_zeros());
    let places = cx.b.positions(a.0, last)?;
    let row = Term(cx.b.unsqueeze(places, &[1])?);
    let column = Term(cx.b.unsqueeze(places, &[0])?);
    let (zero, one) = (cx.number(a, 0.0), cx.number(a, 1.0));
    let diagonal = cx.bind(if unit {
        one.into()
    } else {
        unary_op(RECIPROCAL, a)
    })?;
    let mut inverse = cx.bind(select(binary_op(EQUAL, row, column), diagonal, zero))?;
    for level in 0..levels {
        let block = |cx: &mut BodyCx, place: Term, size: i64| {
            let size = cx.b.int(size);
            cx.bind(place / Term(size))
        };
        let (small_row, small_column) =
            (block(cx, row, 1 << level)?, block(cx, column, 1 << level)?);
        let (large_row, large_column) =
            (block(cx, row, 2 << level)?, block(cx, column, 2 << level)?);
        let triangle = if upper { LESS } else { GREATER };
        let enclosed = binary_op(
            AND,
            binary_op(EQUAL, large_row, large_column),
            binary_op(triangle, small_row, small_column),
        );
        let product = binary_op(MATMUL, inverse, select(enclosed, a, zero));
        inverse = cx.bind(inverse - binary_op(MATMUL, product, inverse))?;
    }
    let (first, second) = if left { (inverse, b) } else { (b, inverse) };
    narrow(cx, binary_op(MATMUL, first, second))
}
