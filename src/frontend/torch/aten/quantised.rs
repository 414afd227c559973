//! Numbers that are stored as codes: what `torch.ao.quantization` (`quantized_decomposed`, `pt2e_quant`) and torchao export.
//!
//! Weights of 8 bits become nodes of [`DEQUANTIZE`], so that they stay codes in memory until a node reads them. Layouts that PyTorch
//! packs for one kind of device (`_weight_int4pack_mm`) are refused: only that device's kernel knows them.

use super::super::value::Value;
use super::products::affine;
use super::promotion::promote;
use super::signature::{Call, Formula, Op};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::quantised::{AXIS, BITS, BLOCK, DEQUANTIZE, SHAPE};

pub const FORMULAS: &[Formula] = &[
    // 6 is float32.
    "quantized_decomposed::dequantize_per_tensor(input: t, scale: st, zero_point: st, quant_min, quant_max, dtype, *, out_dtype: d?) => \
     real = given(out_dtype) ? out_dtype : 6; to((to(input, real) - zero_point) * scale, real)",
];

pub const OPS: &[Op] = &[
    (
        "_weight_int8pack_mm(self: t, mat2: t, scales: t)",
        int8_product,
    ),
    (
        "quantized_decomposed::dequantize_per_channel(input: t, scales: t, zero_points: t?, axis: i, quant_min, quant_max, dtype, *, out_dtype: d?)",
        per_channel,
    ),
    (
        "quantized_decomposed::dequantize_per_channel_group(input: t, scales: t, zero_points: t?, quant_min, quant_max, dtype, group_size: i = 128, output_dtype: d?)",
        per_group,
    ),
    (
        "{pt2e_quant,torchao}::dequantize_affine(input: t, block_size: I, scale: t, zero_point: t?, input_dtype, quant_min: _?, quant_max: _?, output_dtype: d?); \
         {pt2e_quant,torchao}::dequantize_affine(input: t, block_size: I, scale: t, zero_point: t?, input_dtype, quant_min: _?, quant_max: _?, zero_point_domain: S, output_dtype: d?)",
        per_block,
    ),
];

/// Lowers `self · (mat2 · scales)ᵀ`, with one scale for each row of `mat2`.
fn int8_product(c: &mut Call) -> Result<Value> {
    let (x, scales) = (c.value("self")?, c.value("scales")?);
    let real = c.low.b.dtype(x);
    let (codes, sizes) = codes(c, "mat2")?;
    let mut blocks = sizes.clone();
    blocks[0] = 1;
    let w = dequantised(c, (codes, &sizes), &blocks, (scales, None), real)?;
    let y = affine(c, x, w, None)?;
    c.made(y)
}

fn per_channel(c: &mut Call) -> Result<Value> {
    let (codes, sizes) = codes(c, "input")?;
    let axis = c.axis("axis", 0, sizes.len())?;
    let mut blocks = sizes.clone();
    blocks[axis] = 1;
    lowered(
        c,
        (codes, sizes),
        &blocks,
        ["scales", "zero_points", "out_dtype"],
    )
}

fn per_group(c: &mut Call) -> Result<Value> {
    let (codes, sizes) = codes(c, "input")?;
    let mut blocks = vec![1; sizes.len()];
    if let Some(last) = blocks.last_mut() {
        *last = c.int("group_size", 128)?;
    }
    lowered(
        c,
        (codes, sizes),
        &blocks,
        ["scales", "zero_points", "output_dtype"],
    )
}

fn per_block(c: &mut Call) -> Result<Value> {
    if let Some(Value::Str(domain)) = c.get("zero_point_domain")
        && domain.as_str() != "INT"
    {
        return Err(c.fail(
            "op",
            format!("zero points of the domain {domain} are not supported"),
        ));
    }
    let (codes, sizes) = codes(c, "input")?;
    let blocks = c.ints("block_size")?.unwrap_or_default();
    lowered(
        c,
        (codes, sizes),
        &blocks,
        ["scale", "zero_point", "output_dtype"],
    )
}

/// Returns codes of 8 bits, integers or floats, and their sizes.
fn codes(c: &mut Call, name: &str) -> Result<(ValueId, Vec<i64>)> {
    let v = c.value(name)?;
    let ty = c.low.b.ty(v);
    let is_narrow = matches!(ty.dtype, DType::I8 | DType::U8) || ty.dtype.is_float8();
    match ty
        .static_dims()
        .filter(|dims| is_narrow && !dims.is_empty())
    {
        Some(sizes) => Ok((v, sizes)),
        None => {
            let found = ty.to_string();
            Err(c
                .fail("type", format!("`{name}` holds no quantised weight"))
                .expected("int8, uint8 or a float of 8 bits, and sizes that the file fixes")
                .found(found))
        }
    }
}

/// Dequantises by the arguments for scale, zero point and element type of the result.
fn lowered(
    c: &mut Call,
    (codes, sizes): (ValueId, Vec<i64>),
    blocks: &[i64],
    [scale, zero, real]: [&str; 3],
) -> Result<Value> {
    let by = (c.value(scale)?, c.opt_value(zero)?);
    let real = match c.get(real) {
        Some(Value::DType(dtype)) => *dtype,
        _ => DType::F32,
    };
    let y = dequantised(c, (codes, &sizes), blocks, by, real)?;
    c.made(y)
}

/// Emits (codes − zero point)·scale. A scale and a zero point stand for a block of as many elements along each axis as `blocks` says.
fn dequantised(
    c: &mut Call,
    (codes, sizes): (ValueId, &[i64]),
    blocks: &[i64],
    (scale, zero): (ValueId, Option<ValueId>),
    real: DType,
) -> Result<ValueId> {
    let fit = |(size, block): (&i64, &i64)| (*block > 0 && size % block == 0).then(|| size / block);
    let counts: Option<Vec<i64>> = sizes.iter().zip(blocks).map(fit).collect();
    let is_cut = |i: &usize| blocks[*i] > 1 && blocks[*i] < sizes[*i];
    let Some(counts) = counts.filter(|counts| {
        blocks.len() == sizes.len() && (0..counts.len()).filter(is_cut).count() < 2
    }) else {
        return Err(c
            .fail("shape", "blocks do not fit the quantised weight")
            .expected("blocks that fill each axis, and are cut along one axis")
            .found(format!("blocks {blocks:?} of {sizes:?}")));
    };
    let axis = (0..counts.len()).find(is_cut).unwrap_or(0);
    let block = if is_cut(&axis) { blocks[axis] } else { 1 };
    let wide = promote(real, c.low.b.dtype(scale));
    let mut ins = vec![Some(codes)];
    for v in [Some(scale), zero].into_iter().flatten() {
        let n = c.low.b.ty(v).elements();
        if n.as_const() != Some(counts.iter().product()) {
            return Err(c
                .fail(
                    "shape",
                    "a scale or zero point does not fit the quantised weight",
                )
                .expected(format!("{counts:?} elements"))
                .found(Dim::to_string(&n)));
        }
        let v = c.low.b.cast(v, wide)?;
        ins.push(Some(c.low.b.reshape(v, &counts)?));
    }
    let attrs = Attrs::new()
        .with(SHAPE, sizes.to_vec())
        .with(BITS, 8)
        .with(AXIS, axis as i64)
        .with(BLOCK, block);
    let y = c.low.b.emit_n(&DEQUANTIZE, ins, attrs, 1)?[0];
    c.low.b.cast(y, real)
}
