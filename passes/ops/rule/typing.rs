//! Typing, folding, cost and memory rules that several families share.

use ckpt_ir::error::{Error, Result};
use ckpt_ir::op::{Cost, CostCx, Footprint, GradCx, InferCx, MemoryCx, Sized, fresh};
use ckpt_ir::{DType, Dim, Same, Ty};

/// Returns true for every element type that ops compute in.
pub fn is_number(d: DType) -> bool {
    d.is_float() || d.is_int()
}

/// The shape several operands broadcast to (ONNX, "Multidirectional Broadcasting").
pub fn broadcast_dims(cx: &InferCx, slots: std::ops::Range<usize>) -> Result<Vec<Dim>> {
    let mut dims: Vec<Dim> = Vec::new();
    for slot in slots {
        let Some(ty) = cx.opt_ty(slot) else { continue };
        dims = broadcast_two(&dims, &ty.dims).ok_or_else(|| {
            cx.fail("shape", "shapes do not broadcast")
                .expected(format!("{dims:?}, up to operand {}", slot.max(1) - 1))
        })?;
    }
    Ok(dims)
}

/// The shape two shapes broadcast to; `None` where no run can be valid.
pub fn broadcast_two(a: &[Dim], b: &[Dim]) -> Option<Vec<Dim>> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Dim], i: usize| {
        (i + dims.len())
            .checked_sub(rank)
            .map_or(Dim::ONE, |k| dims[k].clone())
    };
    (0..rank).map(|i| at(a, i).broadcast(&at(b, i))).collect()
}

/// Two operands of one numeric type, broadcast.
pub fn binary_number(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let dtype = cx.same_dtype(&[0, 1])?;
    Ok(vec![Ty::new(dtype, broadcast_dims(cx, 0..2)?)])
}

/// Two operands of one type, compared: broadcast, boolean.
pub fn binary_compare(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.same_dtype(&[0, 1])?;
    Ok(vec![Ty::new(DType::Bool, broadcast_dims(cx, 0..2)?)])
}

/// One floating-point operand, same type out.
pub fn unary_float(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    same_type(cx)
}

/// One numeric operand, same type out.
pub fn unary_number(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    same_type(cx)
}

/// The type of the first operand.
pub fn same_type(cx: &InferCx) -> Result<Vec<Ty>> {
    Ok(vec![cx.ty(0)?.clone()])
}

/// Contents of a broadcast elementwise op over known operands; `f` sees one element of each operand.
pub fn fold_elementwise(
    cx: &InferCx,
    types: &[Ty],
    f: impl Fn(&[&Dim]) -> Option<Dim>,
) -> Option<Vec<Vec<Dim>>> {
    let out = types.first()?.static_dims()?;
    let mut operands = Vec::new();
    for slot in 0..cx.ins.len() {
        operands.push((cx.opt_ty(slot)?.static_dims()?, cx.ints(slot)?));
    }
    let total: i64 = out.iter().product();
    let mut result = Vec::new();
    for flat in 0..total {
        let mut picked = Vec::new();
        for (dims, ints) in &operands {
            picked.push(ints.get(broadcast_index(flat, &out, dims))?);
        }
        result.push(f(&picked)?);
    }
    Some(vec![result])
}

/// The result of arithmetic, unless it may have stopped at the end of 64 bits, where the op wraps around.
pub fn exact(result: Dim) -> Option<Dim> {
    (!result.may_be_saturated()).then_some(result)
}

/// Where element `flat` of the broadcast shape `out` lies in an operand of shape `dims`.
pub fn broadcast_index(flat: i64, out: &[i64], dims: &[i64]) -> usize {
    let (mut rest, mut index, mut step) = (flat, 0, 1);
    for (i, size) in out.iter().enumerate().rev() {
        let at = rest % size;
        rest /= size;
        if let Some(k) = (i + dims.len()).checked_sub(out.len()) {
            if dims[k] != 1 {
                index += at * step;
            }
            step *= dims[k];
        }
    }
    index as usize
}

/// Cost of one floating-point operation for each element of the result.
pub fn one_flop(cx: &CostCx) -> Cost {
    cx.elementwise(1)
}

/// For ops such as `exp` that take several instructions an element. Unmeasured; only ratios matter.
pub fn ten_flops(cx: &CostCx) -> Cost {
    cx.elementwise(10)
}

/// The message for a rule that was asked for something its op cannot have.
pub fn no_rule(cx: &GradCx, why: &str) -> Box<Error> {
    Error::model("gradient", format!("no gradient: {why}")).at(cx.b.describe(cx.node))
}

/// Any number of operands of one numeric type, broadcast.
pub fn variadic_number(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    let slots: Vec<usize> = (0..cx.ins.len()).collect();
    let dtype = cx.same_dtype(&slots)?;
    Ok(vec![Ty::new(dtype, broadcast_dims(cx, 0..cx.ins.len())?)])
}

/// Whether two shapes could be equal in some run.
pub fn may_be_same(a: &[Dim], b: &[Dim]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.same(y) != Same::No)
}

/// The type that kernels compute in: float32 for the 16-bit types.
pub fn compute_type(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// A gradient kernel's operands: two floating-point tensors of one type, not broadcast.
pub fn two_alike(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    cx.same_dtype(&[0, 1])?;
    let (a, b) = (cx.ty(0)?, cx.ty(1)?);
    if a.rank() != b.rank() || !may_be_same(&a.dims, &b.dims) {
        return Err(cx
            .fail("shape", "the operands have different shapes")
            .expected(a.to_string())
            .found(b.to_string()));
    }
    Ok(vec![a.clone()])
}

/// New results; the kernel reads its operands in row-major order and copies those that are not.
pub fn dense_operands(cx: &MemoryCx) -> Footprint {
    let slots: Vec<usize> = (0..cx.ins.len()).collect();
    fresh(cx).with_temp(strided_bytes(cx, &slots))
}

/// Bytes of those operands in `slots` that do not lie in row-major order.
pub fn strided_bytes(cx: &MemoryCx, slots: &[usize]) -> u64 {
    let given = slots.iter().filter_map(|i| cx.ins.get(*i)?.as_ref());
    given.filter(|x| !x.is_contiguous()).map(Sized::bytes).sum()
}
