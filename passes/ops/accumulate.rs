//! Sums of narrow terms in a wider type. Gradients that are computed in chunks are added up with them.
//!
//! `Cast` and `Add` would hold a wide copy of every term. A row of its own casts some rows of the term at a time and
//! overwrites the sum. If the term is a matrix product, BLAS adds it to the sum directly, so the product never exists
//! as a tensor. If the sum is wider than the operands, some rows and columns of the operands are cast at a time. So no
//! term is rounded to the narrow type before it is added.

use super::matmul::{MatmulPlan, gemm_plan};
use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    Cost, DeviceKind, Footprint, Grad, GradCx, InferCx, MemoryCx, OpDef, Sized, fresh, rows_within,
};
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Same, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&ACCUMULATE, &ADD_PRODUCT];

/// Elements that are widened at a time on a CPU, in whole rows.
const BLOCK_ELEMENTS: i64 = 1 << 20;

/// Elements of each operand of a product that are widened at a time, in whole rows of A' and columns of B': enough that
/// widening them costs little beside the product.
const PRODUCT_BLOCK_ELEMENTS: i64 = 1 << 22;

/// sum + part, in the type of the sum: float32 where the part has 16 bits. Both have one shape.
pub static ACCUMULATE: OpDef = OpDef {
    ins: slots!["sum", "part"],
    outs: slots!["total"],
    infer,
    grad: Grad::Rule(|cx| {
        let dy = cx.dy0();
        cx.give(0, dy);
        let narrow = cx.b.ty(cx.x(1)).dtype;
        let part = cx.b.cast(dy, narrow)?;
        cx.give(1, part);
        Ok(())
    }),
    cost: one_flop,
    scalar: |_| Some(vec![scalar::x(0) + scalar::x(1)]),
    memory,
    ..our_mixed("Accumulate", |cx| {
        let wide = cx.b.ty(cx.x(0)).dtype;
        let part = cx.b.cast(cx.x(1), wide)?;
        Ok(vec![cx.b.add(cx.x(0), part)?])
    })
};

/// Whether terms of one type are added up in another without loss of range.
fn holds(sum: DType, part: DType) -> bool {
    sum == part || part.size_bytes() < sum.size_bytes()
}

fn infer(cx: &InferCx) -> Result<Vec<Ty>> {
    for slot in [0, 1] {
        cx.want_dtype(slot, DType::is_float, "a floating-point type")?;
    }
    let (sum, part) = (cx.ty(0)?, cx.ty(1)?);
    if !holds(sum.dtype, part.dtype) {
        return Err(cx
            .fail("dtype", "the part is wider than the sum")
            .expected(format!("{} or narrower", sum.dtype.name()))
            .found(part.dtype.name()));
    }
    if !may_be_same(&sum.dims, &part.dims) {
        return Err(cx
            .fail("shape", "the part has another shape than the sum")
            .expected(sum.to_string())
            .found(part.to_string()));
    }
    Ok(vec![sum.clone()])
}

/// How many rows of a tensor of `dims` are widened at a time.
pub fn rows_at_once(device: DeviceKind, dims: &[i64]) -> i64 {
    let rows = dims.first().copied().unwrap_or(1);
    device.rows_at_once(BLOCK_ELEMENTS, rows, dims.iter().skip(1).product())
}

/// How many rows of A', or columns of B', are widened at a time where there are `count` of them with `inner` elements each.
pub fn product_rows_at_once(count: i64, inner: i64) -> i64 {
    rows_within(PRODUCT_BLOCK_ELEMENTS, count, inner)
}

fn memory(cx: &MemoryCx) -> Footprint {
    let (Some(sum), Some(part)) = (&cx.ins[0], &cx.ins[1]) else {
        return fresh(cx);
    };
    let row: i64 = part.dims.iter().skip(1).product();
    let temp_bytes = match sum.dtype == part.dtype || part.elements() == 0 {
        true => 0,
        false => (rows_at_once(cx.device, &part.dims) * row) as u64 * sum.dtype.size_bytes(),
    };
    fresh(cx).with_temp(temp_bytes).in_place_operands(cx, &[0])
}

/// sum + A'·B', where `'` transposes if the attribute says so, in the type of the sum. A and B are matrices of one type,
/// as wide as the sum's or narrower: then they are widened, so that their product is in the type of the sum, too, unless a
/// library multiplies narrow matrices into a wide sum (float32 on a CUDA device).
pub static ADD_PRODUCT: OpDef = OpDef {
    attrs: &[AttrSpec::int("transA", 0), AttrSpec::int("transB", 0)],
    ins: slots!["sum", "A", "B"],
    outs: slots!["total"],
    infer: infer_product,
    grad: Grad::Rule(grad_product),
    cost: |cx| {
        let Some((plan, buffers_bytes)) = product(cx.attrs, cx.ins) else {
            return Cost::default();
        };
        let elements: u64 = plan.out.iter().map(|d| *d as u64).product();
        Cost {
            flops: plan.flops().saturating_add(elements),
            bytes: cx.traffic_bytes() + 2 * buffers_bytes,
        }
    },
    memory: |cx| {
        let wide = cx.operand(0).map(|sum| sum.dtype);
        // A CUDA device adds products of 16-bit matrices to float32.
        let adds_narrow = cx.device == DeviceKind::Cuda && wide == Some(DType::F32);
        let buffers_bytes =
            product(cx.attrs, cx.ins).map_or(0, |(plan, bytes)| match adds_narrow {
                true => plan.temp_bytes,
                false => bytes,
            });
        fresh(cx)
            .with_temp(buffers_bytes)
            .in_place_operands(cx, &[0])
    },
    ..our_mixed("AddProduct", |cx| {
        let (sum, a, b) = (cx.x(0), cx.x(1), cx.x(2));
        let wide = cx.b.ty(sum).dtype;
        let attrs = cx.attrs.clone();
        let (a, b) = (cx.b.cast(a, wide)?, cx.b.cast(b, wide)?);
        let part = cx.b.emit(GEMM, &[a, b], attrs)?;
        Ok(vec![cx.b.add(sum, part)?])
    })
};

/// How the product runs, and the bytes it takes beside operands and result: copies that BLAS can read, or what is widened.
fn product(attrs: &Attrs, ins: &[Option<Sized>]) -> Option<(MatmulPlan, u64)> {
    let (sum, a, b) = (ins[0].as_ref()?, ins[1].as_ref()?, ins[2].as_ref()?);
    let flip = |name: &str| attrs.int(name) != 0;
    let plan = gemm_plan(a, b, flip("transA"), flip("transB"));
    if sum.dtype == a.dtype {
        let copies_bytes = plan.temp_bytes;
        return Some((plan, copies_bytes));
    }
    let inner = a.dims[usize::from(!flip("transA"))];
    let widened = |count: i64| (product_rows_at_once(count, inner) * inner) as u64;
    let elements = match plan.is_empty() {
        true => 0,
        false => widened(plan.out[0]) + widened(plan.out[1]),
    };
    Some((plan, elements * sum.dtype.size_bytes()))
}

fn infer_product(cx: &InferCx) -> Result<Vec<Ty>> {
    for slot in [0, 1] {
        cx.want_dtype(slot, DType::is_float, "a floating-point type")?;
    }
    let narrow = cx.same_dtype(&[1, 2])?;
    let sum = cx.ty(0)?;
    if !holds(sum.dtype, narrow) {
        return Err(cx
            .fail("dtype", "the product is wider than the sum")
            .expected(format!("{} or narrower", sum.dtype.name()))
            .found(narrow.name()));
    }
    let matrix = |slot: usize, flip: &str| -> Result<(Dim, Dim)> {
        match cx.ty(slot)?.dims.as_slice() {
            [rows, columns] if cx.attrs.int(flip) == 0 => Ok((rows.clone(), columns.clone())),
            [rows, columns] => Ok((columns.clone(), rows.clone())),
            _ => Err(cx.fail("shape", format!("operand {slot} is not a matrix"))),
        }
    };
    let ((m, left), (right, n)) = (matrix(1, "transA")?, matrix(2, "transB")?);
    if left.same(&right) == Same::No {
        return Err(cx
            .fail("shape", "the inner sizes of the product differ")
            .expected(format!("{left}, from A"))
            .found(format!("{right} in B")));
    }
    let dims = [m, n];
    if !may_be_same(&sum.dims, &dims) {
        return Err(cx
            .fail("shape", "the product has another shape than the sum")
            .expected(sum.to_string())
            .found(format!("{dims:?}")));
    }
    Ok(vec![sum.clone()])
}

/// dsum = dy; of the product as of Gemm, with dy rounded to its type.
fn grad_product(cx: &mut GradCx) -> Result<()> {
    let dy = cx.dy0();
    cx.give(0, dy);
    let attrs = cx.attrs();
    let flip = |name: &str| attrs.int(name);
    let (flip_a, flip_b) = (flip("transA"), flip("transB"));
    let (a, b) = (cx.x(1), cx.x(2));
    let narrow = cx.b.ty(a).dtype;
    let dy = cx.b.cast(dy, narrow)?;
    let product = |left: i64, right: i64| Attrs::new().with("transA", left).with("transB", right);
    if cx.wants(1) {
        let (attrs, ins) = match flip_a {
            0 => (product(0, 1 - flip_b), [dy, b]),
            _ => (product(flip_b, 1), [b, dy]),
        };
        let da = cx.b.emit(GEMM, &ins, attrs)?;
        cx.give(1, da);
    }
    if cx.wants(2) {
        let (attrs, ins) = match flip_b {
            0 => (product(1 - flip_a, 0), [a, dy]),
            _ => (product(1, flip_a), [dy, a]),
        };
        let db = cx.b.emit(GEMM, &ins, attrs)?;
        cx.give(2, db);
    }
    Ok(())
}
