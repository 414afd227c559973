//! Products over axes: matrices, convolutions, einsum and the ops that are one in other words; distances and weight norms.

use super::super::value::{TensorId, Value};
use super::arrange::{id, promoted};
use super::reduce::over;
use super::signature::{Call, Formula, Op};
use crate::frontend::lower::standard;
use ckpt_passes::Result;
use ckpt_passes::ir::same_dims;
use ckpt_passes::ir::{Attrs, DType, Dim, Emit, OpDef, Same, ValueId};
use ckpt_passes::ops::cast::CAST;
use ckpt_passes::ops::fill::RANGE;
use ckpt_passes::ops::reduce::REDUCE_SUM;
use ckpt_passes::ops::scan::CUM_SUM;
use ckpt_passes::ops::select::TOP_K;
use ckpt_passes::ops::{EmitExt, conv, grouped, logic, matmul, shape};

pub const FORMULAS: &[Formula] = &[
    "_cdist_forward(x1: t, x2: t, p: f, compute_mode: i?) => cdist(x1, x2, p)",
    // With β = 0, nothing of `self` counts.
    "addmm(self: t, mat1: t, mat2: t, *, beta: s?, alpha: s?) => \
     y = times(MatMul(mat1, mat2), alpha); \
     given(beta) ? beta == 0 ? y : Add(y, times(self, beta)) : Add(y, self)",
    "addmv(self: t, mat: t, vec: t, *, beta: s?, alpha: s?) => \
     y = mv(mat, vec); y = given(alpha) ? y * alpha : y; \
     given(beta) ? beta == 0 ? y : self * beta + y : self + y",
    "addr(self: t, vec1: t, vec2: t, *, beta: s?, alpha: s?) => \
     y = outer(vec1, vec2); y = given(alpha) ? y * alpha : y; \
     given(beta) ? beta == 0 ? y : self * beta + y : self + y",
    "baddbmm(self: t, batch1: t, batch2: t, *, beta: s?, alpha: s?) => \
     y = times(MatMul(batch1, batch2), alpha); \
     given(beta) ? beta == 0 ? y : Add(y, times(self, beta)) : Add(y, self)",
    "{bmm,mm}(self: t, mat2: t) => MatMul(self, mat2)",
    // The root of equal rows has no slope, so their gradient is 0.
    "cdist(x1: t, x2: t, p: f = 2.0, compute_mode: i?) => \
     off = unsqueeze(x1, -2) - unsqueeze(x2, -3); \
     p != 2.0 ? linalg_vector_norm(off, p, -1) : (square = sum(off * off, -1); zero = square == 0; \
     where(zero, 0.0, sqrt(where(zero, 1.0, square))))",
    "dot(self: t, tensor: t) => MatMul(self, tensor)",
    "ger(self: t, vec2: t) => outer(self, vec2)",
    "linalg_solve_triangular(self: t, B: t, *, upper: b, left: b = true, unitriangular: b = false) => \
     SolveTriangular(self, B, upper=upper, left=left, unitriangular=unitriangular)",
    "linalg_vecdot(x: t, y: t, *, dim: i = -1) => sum(x * y, dim)",
    "matmul(self: t, other: t) => MatMul(self, other)",
    "mv(self: t, vec: t) => MatMul(self, vec)",
    "outer(self: t, vec2: t) => unsqueeze(self, 1) * vec2",
    "vdot(self: t, other: t) => dot(self, other)",
];

pub const OPS: &[Op] = &[
    (
        "_convolution(input: t, weight: t, bias: t?, stride: I, padding: I, dilation: I, transposed: b, output_padding: I, groups: i, benchmark, deterministic, cudnn_enabled, allow_tf32); \
         conv{1,2,3}d(input: t, weight: t, bias: t?, stride: I?, padding: I?, dilation: I?, groups: i?); \
         conv_transpose{1,2,3}d(input: t, weight: t, bias: t?, stride: I?, padding: I?, output_padding: I?, groups: i?, dilation: I?); \
         convolution(input: t, weight: t, bias: t?, stride: I, padding: I, dilation: I, transposed: b, output_padding: I, groups: i)",
        convolution,
    ),
    (
        "_convolution_mode(input: t, weight: t, bias: t?, stride: I, padding: S, dilation: I, groups: i); \
         conv{1,2,3}d(input: t, weight: t, bias: t?, stride: I?, padding: S?, dilation: I?, groups: i?)",
        padded_by_name,
    ),
    (
        "_grouped_mm(self: t, mat2: t, offs: t?, bias: t?, out_dtype: d?)",
        |c| grouped(c, "self", "mat2"),
    ),
    ("_weight_norm(v: t, g: t, dim: i?)", weight_norm),
    ("_weight_norm_interface(v: t, g: t, dim: i?)", |c| {
        Ok(Value::Tuple(vec![weight_norm(c)?, Value::Unknown]))
    }),
    (
        "_trilinear(i1: t, i2: t, i3: t, expand1: I, expand2: I, expand3: I, sumdim: I, unroll_dim: i?)",
        trilinear,
    ),
    (
        "bilinear(input1: t, input2: t, weight: t, bias: t?)",
        bilinear,
    ),
    (
        "chain_matmul(matrices: l); linalg_multi_dot(tensors: l)",
        chained,
    ),
    ("einsum(equation: S, tensors: l, *, path: I?)", |c| {
        let tensors = c.tensors("tensors")?;
        let equation = c.str("equation", "")?.to_string();
        sum_of_products(c, &equation, &tensors)
    }),
    ("linalg_matrix_power(self: t, n: i)", matrix_power),
    ("linear(input: t, weight: t, bias: t?)", |c| {
        let (x, weight, bias) = (c.value("input")?, c.value("weight")?, c.opt_value("bias")?);
        let y = affine(c, x, weight, bias)?;
        c.made(y)
    }),
    (
        "tensordot(self: t, other: t, dims_self: I, dims_other: I)",
        tensordot,
    ),
    (
        "transformers::grouped_mm_fallback(input: t, weight: t, offs: t)",
        |c| grouped(c, "input", "weight"),
    ),
];

/// Emits `x·wᵀ + bias`. The weight stays as it is stored and is read through a transpose.
pub(super) fn affine(
    c: &mut Call,
    x: ValueId,
    weight: ValueId,
    bias: Option<ValueId>,
) -> Result<ValueId> {
    let turned = match c.rank(weight) {
        2 => shape::transpose(&mut c.low.b, weight, vec![1, 0])?,
        _ => weight,
    };
    let y = c.emit(&matmul::MATMUL, &[x, turned])?;
    match bias {
        Some(bias) => c.low.b.add(y, bias),
        None => Ok(y),
    }
}

/// Returns a list with one entry for each axis, which all have the same default. A single number counts for all axes.
fn per_axis(c: &Call, name: &str, default: i64, axes: usize) -> Result<Vec<i64>> {
    each(c, name, &vec![default; axes])
}

/// Returns a list with one entry for each axis. A single number counts for all axes, an empty list for `default`.
pub(super) fn each(c: &Call, name: &str, default: &[i64]) -> Result<Vec<i64>> {
    let list = c.ints(name)?.unwrap_or_default();
    match list.len() {
        0 => Ok(default.to_vec()),
        1 => Ok(vec![list[0]; default.len()]),
        n if n == default.len() => Ok(list),
        n => Err(c
            .fail("shape", format!("`{name}` has {n} entries"))
            .expected(default.len().to_string())),
    }
}

/// Returns the operand with a batch axis, and whether the axis is new.
fn batched(c: &mut Call, weight: ValueId) -> Result<(ValueId, bool)> {
    let x = c.value("input")?;
    let alone = c.rank(x) + 1 == c.rank(weight);
    let new: &[i64] = if alone { &[0] } else { &[] };
    Ok((c.low.unsqueeze(x, new)?, alone))
}

/// Lowers a convolution, or its transpose if `turned`; `pads` is the name of a padding.
fn convolved(c: &mut Call, turned: bool, pads: Option<&str>) -> Result<Value> {
    let weight = c.value("weight")?;
    let axes = c.rank(weight).saturating_sub(2);
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
    let (before, behind) = match pads {
        Some("same") => {
            // The odd one goes behind, as in PyTorch.
            let kernel = c.low.b.ty(weight).dims.get(2..).unwrap_or_default();
            let totals = dilation.iter().zip(kernel).map(|(d, kernel)| {
                let kernel = kernel.as_const();
                let kernel =
                    kernel.ok_or_else(|| c.fail("shape", "the kernel's size is not known"));
                kernel.map(|n| d * (n - 1).max(0))
            });
            let totals = totals.collect::<Result<Vec<i64>>>()?;
            let half = |n: &i64| (n / 2, n - n / 2);
            totals.iter().map(half).unzip()
        }
        _ => (padding.clone(), padding),
    };
    attrs = attrs.with("pads", [before, behind].concat());
    let op = if turned {
        attrs = attrs.with("output_padding", per_axis(c, "output_padding", 0, axes)?);
        &conv::CONV_TRANSPOSE
    } else {
        &conv::CONV
    };
    let mut ins = vec![Some(x), Some(weight)];
    if let Some(bias) = c.opt_value("bias")? {
        ins.push(Some(bias));
    }
    let mut y = c.low.b.emit_n(op, ins, attrs, 1)?[0];
    if alone {
        let first = c.low.b.ints(&[0]);
        y = c.emit(&shape::SQUEEZE, &[y, first])?;
    }
    c.made(y)
}

fn convolution(c: &mut Call) -> Result<Value> {
    let turned = c.bool("transposed", c.name.starts_with("conv_transpose"))?;
    convolved(c, turned, None)
}

fn padded_by_name(c: &mut Call) -> Result<Value> {
    let name = c.str("padding", "valid")?.to_string();
    match name.as_str() {
        "valid" | "same" => convolved(c, false, Some(&name)),
        other => Err(c.unsupported(format!("`padding` {other}"))),
    }
}

/// Lowers products of rows by groups. The rows of `x` [rows, in] before `offs[0]` are multiplied by `weight[0]`, those
/// before `offs[1]` by `weight[1]`, and so on; `weight` is [groups, in, out]. A product of two matrices, [in, rows] and [rows, out], is one
/// for each group, of its rows: the gradient of the weights.
fn grouped(c: &mut Call, x: &str, weight: &str) -> Result<Value> {
    let (x, weight) = (c.value(x)?, c.value(weight)?);
    let Some(ends) = c.opt_value("offs")? else {
        return Err(c.unsupported("a grouped product without `offs`"));
    };
    let ranks = [x, weight, ends].map(|v| c.rank(v));
    if !matches!(ranks, [2, 2 | 3, 1]) || c.has("bias") {
        return Err(c
            .unsupported("this grouped product")
            .expected("a matrix, then a matrix or one for each group, and no bias")
            .help("export with experts_implementation=\"batched_mm\""));
    }
    let mut y = if c.rank(weight) == 2 {
        let groups = known_size(c, ends, 0)?;
        let group = groups_of_rows(c, ends, weight)?;
        let rows = shape::transpose(&mut c.low.b, x, vec![1, 0])?;
        let attrs = Attrs::new().with(grouped::GROUPS, groups);
        c.emit_with(&grouped::GROUPED_WEIGHT_GRAD, &[rows, weight, group], attrs)?
    } else {
        if known_size(c, ends, 0)? != known_size(c, weight, 0)? {
            return Err(c.fail(
                "shape",
                "`offs` has another number of groups than the weights",
            ));
        }
        let group = groups_of_rows(c, ends, x)?;
        // A weight that is stored transposed keeps its layout, and so does its gradient.
        let (weight, turned) = match shape::transposed(&c.low.b, weight) {
            Some((stored, axes)) if axes == [0, 2, 1] => (stored, 1),
            _ => (weight, 0),
        };
        let attrs = Attrs::new().with("transB", turned);
        c.emit_with(&grouped::GROUPED_MATMUL, &[x, weight, group], attrs)?
    };
    if let Some(dtype) = c.opt_dtype("out_dtype")? {
        y = c.low.b.cast(y, dtype)?;
    }
    c.made(y)
}

/// Returns a size that has to be a constant.
fn known_size(c: &Call, v: ValueId, axis: usize) -> Result<i64> {
    let size = c.low.b.ty(v).dims[axis].as_const();
    size.ok_or_else(|| c.fail("shape", "the number of groups is not known"))
}

/// Returns the group of each row of `x`: the number of groups that end at this row or before it.
fn groups_of_rows(c: &mut Call, ends: ValueId, x: ValueId) -> Result<ValueId> {
    let rows = c.low.b.ty(x).dims[0].clone();
    let sorted = counted(&c.low.b, ends);
    if let Some(sorted) = sorted.filter(|v| c.low.b.ty(*v).dims[0].same(&rows) == Same::Yes) {
        return c.low.b.cast(sorted, DType::I64);
    }
    let places = c.low.b.positions(x, 0)?;
    let ends = c.low.b.cast(ends, DType::I64)?;
    let ends = c.low.unsqueeze(ends, &[1])?;
    let is_behind = c.emit(&logic::LESS_OR_EQUAL, &[ends, places])?;
    let number = c.low.b.cast(is_behind, DType::I64)?;
    over(c, &REDUCE_SUM, number, &[0], false)
}

/// Returns the sorted group numbers of which `ends` are the running counts, if they are: each is the group of the row at the same
/// place. Group numbers are indices, so none is negative.
fn counted(b: &dyn Emit, ends: ValueId) -> Option<ValueId> {
    // Looks through casts that keep counts and indices, and through reshapes of vectors.
    let uncast = |mut v: ValueId| {
        while let Some(node) = b.def_node(v).map(|id| b.node(id)) {
            let x = node.ins.first().copied().flatten()?;
            let keeps = [DType::I32, DType::I64, DType::F32, DType::F64];
            let is_cast = node.op == &CAST && keeps.contains(&b.ty(v).dtype);
            let is_vector = node.op == &shape::RESHAPE && b.rank(x) == 1 && b.rank(v) == 1;
            match is_cast || is_vector {
                true => v = x,
                false => break,
            }
        }
        Some(v)
    };
    let operands = |v: ValueId, op: &'static OpDef| {
        let node = b.node(b.def_node(uncast(v)?)?);
        let ins = (node.ins[0]?, (*node.ins.get(1)?)?);
        (node.op == op).then_some(ins)
    };
    let number = |v: ValueId| b.known(v)?.first()?.as_const();
    let is_axis = |v: ValueId, axis: i64| b.known(v).is_some_and(|k| *k == [Dim::from(axis)]);
    let groups = b.ty(ends).dims.first()?.as_const()?;
    let counts_groups = |v: ValueId| {
        let v = uncast(v)?;
        if let Some(known) = b.known(v) {
            return Some(known.iter().map(Dim::as_const).eq((0..groups).map(Some)));
        }
        let node = b.node(b.def_node(v)?);
        let is_range =
            node.op == &RANGE && number(node.ins[0]?)? == 0 && number(node.ins[2]?)? == 1;
        Some(is_range && number(node.ins[1]?)? == groups)
    };
    let (counts, axis) = operands(ends, &CUM_SUM)?;
    let running = b.node(b.def_node(uncast(ends)?)?).attrs;
    let is_plain = running.int("exclusive") == 0 && running.int("reverse") == 0;
    let (hits, axes) = operands(counts, &REDUCE_SUM)?;
    let (column, numbers) = operands(hits, &logic::EQUAL)?;
    let (sorted, behind) = operands(column, &shape::UNSQUEEZE)?;
    let is_counted = is_axis(axis, 0) && is_axis(axes, 0) && is_axis(behind, 1);
    if !is_plain || !is_counted || !counts_groups(numbers)? {
        return None;
    }
    let sorted = uncast(sorted)?;
    let node = b.node(b.def_node(sorted)?);
    let is_sorted = node.op == &TOP_K && node.attrs.int("largest") == 0 && node.outs[0] == sorted;
    let is_all = b.ty(node.ins[0]?).dims == b.ty(sorted).dims;
    (is_sorted && is_all && b.ty(sorted).dtype.is_int()).then_some(sorted)
}

/// Lowers sums of products over labelled axes (ONNX Einsum). The operands get one element type.
fn sum_of_products(c: &mut Call, equation: &str, tensors: &[TensorId]) -> Result<Value> {
    let ins: Vec<_> = promoted(c, tensors)?.into_iter().map(Some).collect();
    let attrs = Attrs::new().with("equation", equation);
    let y = standard(&mut c.low.b, "Einsum", &attrs, &ins, 1)?[0];
    c.made(y)
}

fn bilinear(c: &mut Call) -> Result<Value> {
    let operands = ["input1", "weight", "input2"].map(|name| c.tensor(name));
    let operands: Vec<TensorId> = operands.into_iter().collect::<Result<_>>()?;
    let y = sum_of_products(c, "...i,oij,...j->...o", &operands)?;
    c.formula(&[("y", y)], "given(bias) ? y + bias : y")
}

/// Multiplies a list of matrices from the left.
fn chained(c: &mut Call) -> Result<Value> {
    let matrices = c.tensors(c.either(&["matrices", "tensors"]))?;
    let mut all = matrices.into_iter().map(Value::Tensor);
    let first = all.next().ok_or_else(|| c.fail("op", "no matrices"))?;
    all.try_fold(first, |so_far, matrix| c.run("matmul", [so_far, matrix]))
}

/// Lowers a power of a matrix by repeated squares.
fn matrix_power(c: &mut Call) -> Result<Value> {
    let n = c.int("n", 1)?;
    if !(1..=1 << 20).contains(&n) {
        return Err(c.unsupported(format!("a power of {n}")));
    }
    let (mut square, mut left) = (c.given("self"), n);
    let mut product = Value::None;
    while left > 0 {
        if left % 2 == 1 {
            product = match product {
                Value::None => square.clone(),
                so_far => c.run("matmul", [so_far, square.clone()])?,
            };
        }
        left /= 2;
        if left > 0 {
            square = c.run("matmul", [square.clone(), square])?;
        }
    }
    Ok(product)
}

fn tensordot(c: &mut Call) -> Result<Value> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let (left, right) = (c.low.dims(a).len(), c.low.dims(b).len());
    if left + right > 26 {
        return Err(c.unsupported("that many axes"));
    }
    let ours = c.listed_axes("dims_self", left)?;
    let theirs = c.listed_axes("dims_other", right)?;
    let held = |t: TensorId, axes: &[usize]| axes.iter().try_for_each(|x| c.size(t, *x).map(drop));
    held(a, &ours)?;
    held(b, &theirs)?;
    if ours.len() != theirs.len() {
        return Err(c.fail(
            "axis",
            "`dims_self` and `dims_other` have different lengths",
        ));
    }
    let first: Vec<char> = (0..left).map(letter).collect();
    let mut second: Vec<char> = (left..left + right).map(letter).collect();
    for (a, b) in ours.iter().zip(&theirs) {
        second[*b] = first[*a];
    }
    let kept = |labels: &[char], summed: &[usize]| -> String {
        let each = labels.iter().enumerate();
        each.filter(|(i, _)| !summed.contains(i))
            .map(|(_, l)| *l)
            .collect()
    };
    let equation = format!(
        "{},{}->{}{}",
        first.iter().collect::<String>(),
        second.iter().collect::<String>(),
        kept(&first, &ours),
        kept(&second, &theirs)
    );
    sum_of_products(c, &equation, &[a, b])
}

/// Returns the label of an axis in an equation of at most 26 axes.
fn letter(axis: usize) -> char {
    char::from(b'a' + axis as u8)
}

/// Lowers the product of three tensors, each with new axes of size 1, summed over `sumdim`.
fn trilinear(c: &mut Call) -> Result<Value> {
    let (mut tensors, mut labels) = (Vec::with_capacity(3), Vec::with_capacity(3));
    let mut rank = None;
    for (name, expanded) in [("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")] {
        let tensor = c.tensor(name)?;
        let new = c.dims(expanded)?.map_or(0, |d| d.len());
        let all = c.low.dims(tensor).len() + new;
        if all > 26 || *rank.get_or_insert(all) != all {
            return Err(c.fail("shape", "the operands have different ranks"));
        }
        let new = c.listed_axes(expanded, all)?;
        let own = (0..all).filter(|axis| !new.contains(axis));
        labels.push(own.map(letter).collect::<String>());
        tensors.push(tensor);
    }
    let rank = rank.unwrap_or(0);
    let summed = c.listed_axes("sumdim", rank)?;
    // An axis that no operand has is of size 1.
    let held = |axis: &usize| labels.iter().any(|l| l.contains(letter(*axis)));
    if let Some(axis) = (0..rank).find(|axis| !held(axis)) {
        return Err(c.unsupported(format!("an axis {axis} that no operand has")));
    }
    let kept: String = (0..rank)
        .filter(|a| !summed.contains(a))
        .map(letter)
        .collect();
    let equation = format!("{}->{kept}", labels.join(","));
    sum_of_products(c, &equation, &tensors)
}

/// Lowers `g·v/|v|`, with the length over all axes but `dim`.
fn weight_norm(c: &mut Call) -> Result<Value> {
    let v = c.tensor("v")?;
    let rank = c.low.dims(v).len();
    let kept = match c.int("dim", 0)? {
        -1 => None,
        axis => Some(c.in_rank(axis, rank)?),
    };
    let axes = (0..rank).filter(|a| Some(*a) != kept);
    let axes: Vec<i64> = axes.map(|a| a as i64).collect();
    let y = c.formula(
        &[("axes", axes.into())],
        "v * (g / linalg_vector_norm(v, 2.0, axes, true))",
    )?;
    let fits = same_dims(c.low.dims(id(c, &y)?), c.low.dims(v));
    match fits {
        true => Ok(y),
        false => Err(c.fail("shape", "`g` does not fit the axes that are kept")),
    }
}
