//! Matrix products and convolutions.

use super::Value;
use super::signature::{Call, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, Same, ValueId};
use ckpt_passes::ops::{conv, logic, matmul, shape};

pub const OPS: &[Op] = &[
    (
        "_convolution(input: t, weight: t, bias: t?, stride: I, padding: I, dilation: I, transposed: b, output_padding: I, groups: i, benchmark, deterministic, cudnn_enabled, allow_tf32)",
        convolution,
    ),
    (
        "_convolution_mode(input: t, weight: t, bias: t?, stride: I, padding: S, dilation: I, groups: i)",
        padded_by_name,
    ),
    (
        "_grouped_mm(self: t, mat2: t, offs: t?, bias: t?, out_dtype: d?)",
        |c| grouped(c, "self", "mat2"),
    ),
    (
        "addmm(self: t, mat1: t, mat2: t, *, beta: s?, alpha: s?)",
        addmm,
    ),
    (
        "baddbmm(self: t, batch1: t, batch2: t, *, beta: s?, alpha: s?)",
        baddbmm,
    ),
    ("bmm(self: t, mat2: t)", |c| product(c, "self", "mat2")),
    (
        "conv1d(input: t, weight: t, bias: t?, stride: I?, padding: I?, dilation: I?, groups: i?)",
        convolution,
    ),
    (
        "conv1d(input: t, weight: t, bias: t?, stride: I?, padding: S?, dilation: I?, groups: i?)",
        padded_by_name,
    ),
    (
        "conv2d(input: t, weight: t, bias: t?, stride: I?, padding: I?, dilation: I?, groups: i?)",
        convolution,
    ),
    (
        "conv2d(input: t, weight: t, bias: t?, stride: I?, padding: S?, dilation: I?, groups: i?)",
        padded_by_name,
    ),
    (
        "conv3d(input: t, weight: t, bias: t?, stride: I?, padding: I?, dilation: I?, groups: i?)",
        convolution,
    ),
    (
        "conv3d(input: t, weight: t, bias: t?, stride: I?, padding: S?, dilation: I?, groups: i?)",
        padded_by_name,
    ),
    (
        "conv_transpose1d(input: t, weight: t, bias: t?, stride: I?, padding: I?, output_padding: I?, groups: i?, dilation: I?)",
        transposed,
    ),
    (
        "conv_transpose2d(input: t, weight: t, bias: t?, stride: I?, padding: I?, output_padding: I?, groups: i?, dilation: I?)",
        transposed,
    ),
    (
        "conv_transpose3d(input: t, weight: t, bias: t?, stride: I?, padding: I?, output_padding: I?, groups: i?, dilation: I?)",
        transposed,
    ),
    (
        "convolution(input: t, weight: t, bias: t?, stride: I, padding: I, dilation: I, transposed: b, output_padding: I, groups: i)",
        convolution,
    ),
    ("dot(self: t, tensor: t)", |c| product(c, "self", "tensor")),
    ("linear(input: t, weight: t, bias: t?)", linear),
    ("matmul(self: t, other: t)", |c| product(c, "self", "other")),
    ("mm(self: t, mat2: t)", |c| product(c, "self", "mat2")),
    ("mv(self: t, vec: t)", |c| product(c, "self", "vec")),
    (
        "transformers::grouped_mm_fallback(input: t, weight: t, offs: t)",
        |c| grouped(c, "input", "weight"),
    ),
];

fn product(c: &mut Call, a: &str, b: &str) -> Result<Value> {
    let (a, b) = (c.value(a)?, c.value(b)?);
    let y = c.low.emit(&matmul::MATMUL, &[a, b])?;
    c.made(y)
}

/// `x·wᵀ + bias`; the weight stays as it is stored, seen transposed.
pub(super) fn affine(
    c: &mut Call,
    x: ValueId,
    weight: ValueId,
    bias: Option<ValueId>,
) -> Result<ValueId> {
    let turned = match c.low.b.rank(weight) {
        2 => shape::transpose(&mut c.low.b, weight, vec![1, 0])?,
        _ => weight,
    };
    let y = c.low.emit(&matmul::MATMUL, &[x, turned])?;
    match bias {
        Some(bias) => c.low.b.add(y, bias),
        None => Ok(y),
    }
}

fn linear(c: &mut Call) -> Result<Value> {
    let (x, weight, bias) = (c.value("input")?, c.value("weight")?, c.opt_value("bias")?);
    let y = affine(c, x, weight, bias)?;
    c.made(y)
}

/// A number that scales a term, unless it is 1.
fn factor(c: &mut Call, x: ValueId, name: &str) -> Result<ValueId> {
    match c.get(name).cloned() {
        None => Ok(x),
        Some(Value::Int(n)) if n.is_one() => Ok(x),
        Some(Value::Float(1.0)) => Ok(x),
        Some(value) => {
            let factor = c.low.scalar_of(&value, c.low.b.ty(x).dtype)?;
            c.low.b.mul(x, factor)
        }
    }
}

/// β·self + α·mat1·mat2; with β = 0 nothing of `self` counts, not even a NaN.
fn added_product(c: &mut Call, a: &str, b: &str) -> Result<Value> {
    let (a, b) = (c.value(a)?, c.value(b)?);
    let y = c.low.emit(&matmul::MATMUL, &[a, b])?;
    let y = factor(c, y, "alpha")?;
    let skipped = match c.get("beta") {
        Some(Value::Int(n)) => *n == Dim::ZERO,
        Some(Value::Float(x)) => *x == 0.0,
        _ => false,
    };
    if skipped {
        return c.made(y);
    }
    let term = c.value("self")?;
    let term = factor(c, term, "beta")?;
    let y = c.low.b.add(y, term)?;
    c.made(y)
}

fn addmm(c: &mut Call) -> Result<Value> {
    added_product(c, "mat1", "mat2")
}

fn baddbmm(c: &mut Call) -> Result<Value> {
    added_product(c, "batch1", "batch2")
}

/// A list with one entry an axis: one number stands for all.
fn per_axis(c: &Call, name: &str, default: i64, axes: usize) -> Result<Vec<i64>> {
    let list = c.ints(name)?.unwrap_or_else(|| vec![default]);
    match list.len() {
        1 => Ok(vec![list[0]; axes]),
        n if n == axes => Ok(list),
        0 => Ok(vec![default; axes]),
        n => Err(c
            .fail("shape", format!("`{name}` has {n} entries"))
            .expected(format!("{axes}"))),
    }
}

/// A batch axis for operands without one, and whether it was put in.
fn batched(c: &mut Call, weight: ValueId) -> Result<(ValueId, bool)> {
    let x = c.value("input")?;
    if c.low.b.rank(x) + 1 == c.low.b.rank(weight) {
        return Ok((c.low.apply_unsqueeze(x, &[0])?, true));
    }
    Ok((x, false))
}

fn convolved(c: &mut Call, turned: bool, pads: Option<&str>) -> Result<Value> {
    let weight = c.value("weight")?;
    let axes = c.low.b.rank(weight).saturating_sub(2);
    let (x, alone) = batched(c, weight)?;
    let padding = match pads {
        None => per_axis(c, "padding", 0, axes)?,
        Some(_) => vec![0; axes],
    };
    let dilation = per_axis(c, "dilation", 1, axes)?;
    let mut attrs = Attrs::new()
        .with("strides", per_axis(c, "stride", 1, axes)?)
        .with("dilations", dilation.clone())
        .with("group", c.int("groups", 1)?);
    let both = match pads {
        Some("same") => {
            // The odd one goes behind, as in PyTorch.
            let mut before = Vec::with_capacity(axes);
            let mut behind = Vec::with_capacity(axes);
            for (axis, d) in dilation.iter().enumerate() {
                let kernel = c.low.b.ty(weight).dims[axis + 2].as_const();
                let kernel =
                    kernel.ok_or_else(|| c.fail("shape", "the kernel's size is not known"))?;
                let total = d * (kernel - 1).max(0);
                before.push(total / 2);
                behind.push(total - total / 2);
            }
            [before, behind].concat()
        }
        _ => [padding.clone(), padding].concat(),
    };
    attrs = attrs.with("pads", both);
    let op = if turned {
        attrs = attrs.with("output_padding", per_axis(c, "output_padding", 0, axes)?);
        &conv::CONV_TRANSPOSE
    } else {
        &conv::CONV
    };
    let bias = c.opt_value("bias")?;
    let ins = match bias {
        Some(bias) => vec![Some(x), Some(weight), Some(bias)],
        None => vec![Some(x), Some(weight)],
    };
    let mut y = c.low.b.emit_n(op, ins, attrs, 1)?[0];
    if alone {
        let first = c.low.b.ints(&[0]);
        y = c.low.emit(&shape::SQUEEZE, &[y, first])?;
    }
    c.made(y)
}

fn convolution(c: &mut Call) -> Result<Value> {
    let turned = c.bool("transposed", false)?;
    convolved(c, turned, None)
}

fn transposed(c: &mut Call) -> Result<Value> {
    convolved(c, true, None)
}

fn padded_by_name(c: &mut Call) -> Result<Value> {
    let name = c.str("padding", "valid")?.to_string();
    match name.as_str() {
        "valid" | "same" => convolved(c, false, Some(&name)),
        other => Err(c.unsupported(format!("`padding` {other}"))),
    }
}

/// Rows of `x` [rows, in] by groups: those before `offs[0]` times `weight[0]`, those before `offs[1]` times `weight[1]`,
/// and so on; `weight` is [groups, in, out]. Which rows are whose only the data tells, so every group's product is
/// computed and chosen from: the work of a dense mixture, in sizes that are known.
fn grouped(c: &mut Call, x: &str, weight: &str) -> Result<Value> {
    let (x, weight) = (c.value(x)?, c.value(weight)?);
    let Some(ends) = c.opt_value("offs")? else {
        return Err(c.unsupported("a grouped product without `offs`"));
    };
    if c.low.b.rank(x) != 2 || c.low.b.rank(weight) != 3 || c.has("bias") {
        return Err(c
            .unsupported("this grouped product")
            .expected("a matrix, a matrix a group, and no bias")
            .help("export with experts_implementation=\"batched_mm\""));
    }
    let (rows, groups) = (
        c.low.b.ty(x).dims[0].clone(),
        c.low.b.ty(weight).dims[0].clone(),
    );
    if c.low.b.ty(ends).dims[0].same(&groups) == Same::No {
        return Err(c.fail(
            "shape",
            "`offs` has another number of groups than the weights",
        ));
    }
    let rows = c.low.int_scalar(&rows)?;
    let (zero, one) = (c.low.b.int(0), c.low.b.int(1));
    let places = c
        .low
        .emit(&ckpt_passes::ops::fill::RANGE, &[zero, rows, one])?;
    let ends = c.low.b.cast(ends, ckpt_passes::ir::DType::I64)?;
    // before[g, r]: row r lies before the end of group g. It is in the first such group.
    let ends = c.low.apply_unsqueeze(ends, &[1])?;
    let before = c.low.emit(&logic::LESS, &[places, ends])?;
    let earlier = {
        let as_int = c.low.b.cast(before, ckpt_passes::ir::DType::I64)?;
        let first = c.low.b.int(0);
        let attrs = Attrs::new().with("exclusive", 1);
        let sum = c
            .low
            .b
            .emit(&ckpt_passes::ops::scan::CUM_SUM, &[as_int, first], attrs)?;
        c.low.emit(&logic::EQUAL, &[sum, zero])?
    };
    let mine = c.low.emit(&logic::AND, &[before, earlier])?;
    let mine = c.low.apply_unsqueeze(mine, &[2])?;
    let all = c.low.emit(&matmul::MATMUL, &[x, weight])?;
    let none = c.low.b.scalar(c.low.b.ty(all).dtype, 0.0);
    let chosen = c.low.emit(&logic::WHERE, &[mine, all, none])?;
    let mut y = super::reduce::over(
        c,
        &ckpt_passes::ops::reduce::REDUCE_SUM,
        chosen,
        &[0],
        false,
    )?;
    if let Some(dtype) = c.opt_dtype("out_dtype").unwrap_or(None) {
        y = c.low.b.cast(y, dtype)?;
    }
    c.made(y)
}
