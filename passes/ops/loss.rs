//! Losses over classes and their gradients (ONNX SoftmaxCrossEntropyLoss-13, NegativeLogLikelihoodLoss-13).
//!
//! The class axis is 1. The gradient of `SoftmaxCrossEntropyLoss` reads the scores and recomputes the softmax in its
//! result. So only the scores are kept for the backward pass, whose peak is scores plus gradient. PyTorch keeps
//! log-probabilities and needs one more buffer of that size. Labels equal to `ignore_index` have weight 0. If all
//! labels are ignored, the mean is 0/0 = NaN and the gradient is 0, as in PyTorch.

use super::collective::{OF_GROUP, OF_RANKS, RANKS, SIZE as ALL_CLASSES};
use super::index::widened_bytes;
use super::names::*;
use super::reduce::{reduce_axes, sum_kept};
use super::rule::*;
use ckpt_ir::error::{Error, Result};
use ckpt_ir::op::{
    BatchAxes, BodyCx, DeviceKind, Footprint, Grad, GradCx, Indices, InferCx, MemoryCx, OpClass,
    OpDef, Sized, fresh,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Emit, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &SOFTMAX_CROSS_ENTROPY_LOSS,
    &SOFTMAX_CROSS_ENTROPY_LOSS_GRAD,
    &NEGATIVE_LOG_LIKELIHOOD_LOSS,
    &NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD,
    &CLASS_LOSS,
    &CLASS_TERMS,
    &CLASS_TERMS_GRAD,
];

const ATTRS: &[AttrSpec] = &[
    AttrSpec::str("reduction", "mean"),
    AttrSpec::optional("ignore_index", AttrKind::Int),
];

/// PyTorch's label of a row that does not count, which holds where a loss names none.
pub const NO_LABEL: i64 = -100;

/// Checks scores `[N, C, …]`, labels `[N, …]` and weights `[C]` in the slots from `at` on. Returns the type of a loss
/// with one element for each label.
fn label_type(cx: &InferCx, at: usize) -> Result<Ty> {
    let dtype = cx.want_dtype(at, DType::is_float, "a floating-point type")?;
    let is_label = |d| matches!(d, DType::I32 | DType::I64);
    cx.want_dtype(at + 1, is_label, "int32 or int64")?;
    let (scores, labels) = (cx.ty(at)?, cx.ty(at + 1)?);
    if scores.rank() < 2 {
        return Err(cx
            .fail("shape", "the scores have no class axis")
            .expected("[N, C, ...]")
            .found(scores.to_string()));
    }
    let mut dims = scores.dims.clone();
    let classes = dims.remove(1);
    if !may_be_same(&dims, &labels.dims) {
        return Err(cx
            .fail(
                "shape",
                "the labels do not have the shape of the scores without the class axis",
            )
            .expected(format!("{dims:?}"))
            .found(labels.to_string()));
    }
    if let Some(weights) = cx.opt_ty(at + 2)
        && (weights.dtype != dtype || !may_be_same(&weights.dims, &[classes]))
    {
        return Err(cx
            .fail("type", "the weights are not one number a class")
            .found(weights.to_string()));
    }
    Ok(Ty::new(dtype, dims))
}

/// Returns the type of the loss whose operands begin at slot `at`.
fn loss_type(cx: &InferCx, at: usize) -> Result<Ty> {
    let each = label_type(cx, at)?;
    match cx.attrs.str("reduction") {
        "none" => Ok(each),
        "mean" | "sum" => Ok(Ty::scalar(each.dtype)),
        other => Err(cx
            .fail("attribute", "unknown value of `reduction`")
            .expected("none, mean or sum")
            .found(other)),
    }
}

/// Types of a gradient row. Its operands are dloss and those of the loss; its result has the type of the scores.
fn infer_loss_grad(cx: &InferCx) -> Result<Vec<Ty>> {
    let loss = loss_type(cx, 1)?;
    let dloss = cx.ty(0)?;
    if dloss.dtype != loss.dtype || !may_be_same(&dloss.dims, &loss.dims) {
        return Err(cx
            .fail("type", "`dloss` does not have the type of the loss")
            .expected(loss.to_string())
            .found(dloss.to_string()));
    }
    Ok(vec![cx.ty(1)?.clone()])
}

/// `aten::_log_softmax` into `log_prob`, or into a buffer where that is not a result, then `aten::nll_loss_forward`.
/// Both want row-major operands, and int64 labels; the sum of weights is one more scalar.
pub static SOFTMAX_CROSS_ENTROPY_LOSS: OpDef = OpDef {
    aten: &["aten.cross_entropy_loss"],
    attrs: ATTRS,
    ins: slots!["scores", "labels"; "weights"],
    outs: slots!["output"; "log_prob"],
    indices: Indices::Classes,
    infer: |cx| Ok(vec![loss_type(cx, 0)?, cx.ty(0)?.clone()]),
    grad: Grad::Rule(grad_cross_entropy),
    cost: |cx| cx.per_largest_operand(10),
    memory: |cx| {
        let scores = cx.bytes(0);
        let buffer = if cx.outs.len() > 1 { 0 } else { scores };
        loss_memory(cx, buffer)
    },
    ..standard(
        "SoftmaxCrossEntropyLoss",
        onnx(12, 13),
        OpClass::Other,
        BatchAxes::ClassLoss,
    )
};

/// Returns true if an operand is the class weights of a loss, which are not trained.
pub fn is_class_weight(op: &OpDef, slot: usize) -> bool {
    let is_loss = op == &SOFTMAX_CROSS_ENTROPY_LOSS || op == &NEGATIVE_LOG_LIKELIHOOD_LOSS;
    slot == 2 && (is_loss || op == &CLASS_LOSS)
}

/// Returns the error for a gradient of class weights. PyTorch has none either.
fn weights_are_constants(cx: &GradCx) -> Box<Error> {
    let error = no_rule(cx, "class weights of a loss are taken as constants");
    let mut v = cx.x(2);
    while let Some(node) = cx.b.def_node(v)
        && let Some(Some(from)) = cx.b.node(node).ins.first()
    {
        v = *from;
    }
    error.help(format!("freeze them: --freeze '{}'", cx.b.name(v)))
}

/// Emits a gradient row with the scores, labels and weights of the loss.
fn grad_of_scores(
    cx: &mut GradCx,
    op: &'static OpDef,
    dloss: ValueId,
    attrs: Attrs,
) -> Result<ValueId> {
    if cx.wants(2) {
        return Err(weights_are_constants(cx));
    }
    let mut ins = vec![Some(dloss), Some(cx.x(0)), Some(cx.x(1))];
    ins.extend(cx.opt_x(2).map(Some));
    Ok(cx.b.emit_n(op, ins, attrs, 1)?[0])
}

fn grad_cross_entropy(cx: &mut GradCx) -> Result<()> {
    if cx.wants(2) {
        return Err(weights_are_constants(cx));
    }
    let mut dx = None;
    if let Some(dloss) = cx.dy(0) {
        let attrs = cx.attrs();
        dx = Some(grad_of_scores(
            cx,
            &SOFTMAX_CROSS_ENTROPY_LOSS_GRAD,
            dloss,
            attrs,
        )?);
    }
    if let Some(dlog) = cx.dy(1) {
        let axis = Attrs::new().with("axis", 1);
        let through = cx.b.emit(LOG_SOFTMAX_GRAD, &[cx.y(1), dlog], axis)?;
        dx = Some(match dx {
            None => through,
            Some(dx) => cx.b.add(dx, through)?,
        });
    }
    if let Some(dx) = dx {
        cx.give(0, dx);
    }
    Ok(())
}

/// Temporaries of a loss kernel beside `buffer_bytes`: row-major copies, int64 labels, one scalar.
fn loss_memory(cx: &MemoryCx, buffer_bytes: u64) -> Footprint {
    let size = cx.ins[0].as_ref().map_or(0, |x| x.dtype.size_bytes());
    let copies = strided_bytes(cx, &[0, 2]) + label_bytes(cx, 1);
    fresh(cx).with_temp(copies + buffer_bytes + size)
}

/// Bytes of a row-major int64 copy of labels that are not like that.
fn label_bytes(cx: &MemoryCx, slot: usize) -> u64 {
    match &cx.ins[slot] {
        Some(l) if l.dtype != DType::I64 => 8 * l.elements(),
        _ => strided_bytes(cx, &[slot]),
    }
}

/// Temporaries of a loss gradient: labels clamped to the classes, and one factor for each label in the type computed
/// in. Beside them exist, one after the other, class weights in that type, a mask of ignored labels, the sum of
/// factors, and the cotangent in that type. `last_bytes` is what the last step takes, factors included.
fn loss_grad_memory(cx: &MemoryCx, last_bytes: u64) -> Footprint {
    let (Some(dloss), Some(x), Some(labels)) = (&cx.ins[0], &cx.ins[1], &cx.ins[2]) else {
        return fresh(cx);
    };
    let (dtype, labels) = (compute_type(x.dtype), labels.elements());
    let wide = dtype.size_bytes();
    let converted = |x: &Sized| {
        if x.dtype == dtype {
            0
        } else {
            x.elements() * wide
        }
    };
    let weights = cx.operand(3).map_or(0, converted);
    let ignored = cx.attrs.opt_int("ignore_index").map_or(0, |_| labels);
    let total = if cx.attrs.str("reduction") == "mean" {
        wide
    } else {
        0
    };
    let own = labels * wide;
    let beside = [weights, ignored, total, converted(dloss)];
    let most = beside
        .into_iter()
        .map(|b| own + b)
        .fold(last_bytes, u64::max);
    fresh(cx).with_temp(label_bytes(cx, 2) + 8 * labels + most)
}

/// Elements of scores that are processed at a time on a CPU in the type computed in, in whole rows.
const BLOCK_ELEMENTS: i64 = 1 << 20;

/// Returns the number of rows of scores `[N, C, …]` that are processed at a time.
pub fn rows_at_once(device: DeviceKind, dims: &[i64]) -> i64 {
    let rows = dims.first().copied().unwrap_or(1);
    device.rows_at_once(BLOCK_ELEMENTS, rows, dims.iter().skip(1).product())
}

/// Bytes of that many rows of scores in the type computed in.
fn block_bytes(device: DeviceKind, scores: &Sized) -> u64 {
    let row: i64 = scores.dims.iter().skip(1).product();
    (rows_at_once(device, &scores.dims) * row) as u64 * compute_type(scores.dtype).size_bytes()
}

/// The gradient of the scores. The kernel computes `aten::_softmax` in its result and continues there. It processes
/// some rows of 16-bit scores at a time in float32, so that only the result is rounded.
pub static SOFTMAX_CROSS_ENTROPY_LOSS_GRAD: OpDef = OpDef {
    attrs: ATTRS,
    ins: slots!["dloss", "scores", "labels"; "weights"],
    outs: slots!["dscores"],
    infer: infer_loss_grad,
    grad: Grad::Body,
    cost: |cx| cx.per_largest_operand(12),
    memory: |cx| {
        let scores = cx.ins[1].as_ref();
        let wide = scores.is_some_and(|x| x.dtype == compute_type(x.dtype));
        let (copy_bytes, last_bytes) = match scores {
            Some(x) if !wide && x.elements() > 0 => {
                let labels = cx.elements(2);
                let factors = labels * compute_type(x.dtype).size_bytes();
                (0, factors + block_bytes(cx.device, x))
            }
            _ => (strided_bytes(cx, &[1]), 0),
        };
        let mut memory = loss_grad_memory(cx, last_bytes);
        memory.temp_bytes += copy_bytes;
        memory.in_place_operands(cx, &[1])
    },
    ..ours(
        "SoftmaxCrossEntropyLossGrad",
        OpClass::Other,
        BatchAxes::ClassLossGrad,
        |cx| {
            let scores = cx.widened(cx.x(1))?;
            let picks = label_factors(cx)?;
            let classes = Attrs::new().with("axis", 1);
            let probability = Term(cx.b.emit(SOFTMAX, &[scores.0], classes)?);
            let slope = select(picks.hot, probability - 1.0, probability);
            narrow_as(cx, 1, slope * picks.factor)
        },
    )
};

/// The loss of every label, in float32 or float64. A chunked loss adds these up. Equals `SoftmaxCrossEntropyLoss`, or
/// `NegativeLogLikelihoodLoss` for log-probabilities, without reduction. Unlike those it returns float32 for 16-bit
/// scores and takes scores without rows, which other runtimes refuse. The kernel processes some rows at a time, so no
/// second tensor of the size of the scores exists.
pub static CLASS_LOSS: OpDef = OpDef {
    attrs: &[
        AttrSpec::optional("ignore_index", AttrKind::Int),
        // Whether the scores are log-probabilities.
        AttrSpec::int("normalized", 0),
    ],
    ins: slots!["scores", "labels"; "weights"],
    outs: slots!["losses"],
    indices: Indices::Classes,
    infer: |cx| {
        let each = label_type(cx, 0)?;
        Ok(vec![Ty::new(compute_type(each.dtype), each.dims)])
    },
    grad: Grad::First(grad_each),
    cost: |cx| {
        cx.per_largest_operand(match cx.attrs.int("normalized") {
            0 => 10,
            _ => 1,
        })
    },
    memory: |cx| each_memory(cx, |wide| [wide, wide]),
    ..ours(
        "ClassLoss",
        OpClass::Other,
        BatchAxes::EachClassLoss,
        each_body,
    )
};

/// The group of ranks that have the scores of other classes, how many ranks these are, and the number of all classes; 0 where the scores
/// are those of all classes.
const TERMS_ATTRS: &[AttrSpec] = &[OF_GROUP, OF_RANKS, AttrSpec::int(ALL_CLASSES, 0)];

/// Returns the error for a body of what only ranks compute.
fn of_one_process(cx: &BodyCx) -> Result<()> {
    match cx.attrs.int(RANKS) {
        1 => Ok(()),
        _ => Err(Error::usage("mesh", "standard ops know one process only")),
    }
}

/// The terms of [`CLASS_LOSS`] without weights, for every label: the logarithm of the sum of the exponentials of all scores, and the
/// score of the label. The loss is their difference. Where each rank has the scores of some of the classes, these are its own terms, and
/// its padding is left out.
pub static CLASS_TERMS: OpDef = OpDef {
    attrs: TERMS_ATTRS,
    ins: slots!["scores", "labels"],
    outs: slots!["log_sums", "label_scores"],
    indices: Indices::Classes,
    infer: |cx| {
        let each = label_type(cx, 0)?;
        Ok(vec![Ty::new(compute_type(each.dtype), each.dims); 2])
    },
    grad: Grad::Rule(|cx| {
        let (scores, labels) = (cx.x(0), cx.x(1));
        let mut ins = Vec::new();
        for slot in 0..2 {
            let dy = cx.dy(slot);
            ins.push(match dy {
                Some(dy) => dy,
                None => cx.b.filled_like(cx.y(slot), 0.0)?,
            });
        }
        ins.extend([scores, labels]);
        let attrs = cx.attrs();
        let dx = cx.b.emit(&CLASS_TERMS_GRAD, &ins, attrs)?;
        cx.give(0, dx);
        Ok(())
    }),
    cost: |cx| cx.per_largest_operand(10),
    memory: |cx| each_memory(cx, |wide| [wide + INDEX_BYTES, 0]),
    ..ours(
        "ClassTerms",
        OpClass::Other,
        BatchAxes::EachClassLoss,
        |cx| {
            of_one_process(cx)?;
            let scores = cx.b.widen(cx.x(0))?;
            let sums = reduce_axes(cx.b, REDUCE_LOG_SUM_EXP, Term(scores), &[1], false)?;
            let labels = cx.b.cast(cx.x(1), DType::I64)?;
            let at = cx.b.unsqueeze(labels, &[1])?;
            let along = Attrs::new().with("axis", 1);
            let label = cx.b.emit(GATHER_ELEMENTS, &[scores, at], along)?;
            Ok(vec![sums, cx.b.squeeze(label, &[1])?])
        },
    )
};

/// The gradient of the scores: their softmax times the first cotangent, and the second one at the label.
pub static CLASS_TERMS_GRAD: OpDef = OpDef {
    attrs: TERMS_ATTRS,
    ins: slots!["dlog_sums", "dlabel_scores", "scores", "labels"],
    outs: slots!["dscores"],
    infer: |cx| {
        let each = label_type(cx, 2)?;
        let each = Ty::new(compute_type(each.dtype), each.dims);
        for slot in 0..2 {
            let dy = cx.ty(slot)?;
            if dy.dtype != each.dtype || !may_be_same(&dy.dims, &each.dims) {
                return Err(cx
                    .fail("type", "a cotangent has not the type of the result")
                    .expected(each.to_string())
                    .found(dy.to_string()));
            }
        }
        Ok(vec![cx.ty(2)?.clone()])
    },
    grad: Grad::Body,
    cost: |cx| cx.per_largest_operand(12),
    memory: |cx| {
        let Some(scores) = &cx.ins[2] else {
            return fresh(cx);
        };
        let is_wide = scores.dtype == compute_type(scores.dtype);
        let buffer_bytes = match is_wide || scores.elements() == 0 {
            true => strided_bytes(cx, &[2]),
            false => block_bytes(cx.device, scores),
        };
        fresh(cx)
            .with_temp(label_bytes(cx, 3) + strided_bytes(cx, &[0, 1]) + buffer_bytes)
            .in_place_operands(cx, &[2])
    },
    ..ours(
        "ClassTermsGrad",
        OpClass::Other,
        BatchAxes::EachClassLoss,
        |cx| {
            of_one_process(cx)?;
            let scores = cx.widened(cx.x(2))?;
            let along = || Attrs::new().with("axis", 1);
            let probability = Term(cx.b.emit(SOFTMAX, &[scores.0], along())?);
            let sums = cx.b.unsqueeze(cx.x(0), &[1])?;
            let slope = cx.bind(probability * Term(sums))?;
            let labels = cx.b.cast(cx.x(3), DType::I64)?;
            let at = cx.b.unsqueeze(labels, &[1])?;
            let own = cx.b.unsqueeze(cx.x(1), &[1])?;
            let adding = along().with("reduction", "add");
            let sum = cx.b.emit(SCATTER_ELEMENTS, &[slope.0, at, own], adding)?;
            narrow_as(cx, 2, Term(sum))
        },
    )
};

/// Labels in a form that broadcasts against the scores.
struct Picks {
    /// `[N, C, …]`: whether the class is the label and the label counts.
    hot: Term,
    /// `[N, 1, …]`: the weight of the label's class times the loss's cotangent, 0 for a label that is ignored.
    factor: Term,
}

/// Operands are dloss, scores, labels, weights.
fn label_factors(cx: &mut BodyCx) -> Result<Picks> {
    let (dloss, scores) = (cx.widened(cx.x(0))?, cx.x(1));
    let (rank, dtype) = (cx.ty(scores).rank(), cx.ty(dloss.0).dtype);
    let labels = cx.b.cast(cx.x(2), DType::I64)?;
    let class_axis = cx.b.ints(&[1]);
    let labels = cx.b.op(UNSQUEEZE, &[labels, class_axis])?;
    let counts = counting(cx.b, labels, cx.attrs)?;
    // 0, 1, …, C − 1 along the class axis: a running sum of ones.
    let span = Attrs::new().with("start", 1).with("end", 2);
    let n_classes = cx.b.emit(SHAPE, &[scores], span)?;
    let (one, first) = (cx.b.int(1), cx.b.int(0));
    let ones = cx.b.expand(one, n_classes)?;
    let from_zero = Attrs::new().with("exclusive", 1);
    let classes = cx.b.emit(CUM_SUM, &[ones, first], from_zero)?;
    let classes = along_classes(cx, classes, rank)?;
    let hot = binary_op(AND, binary_op(EQUAL, labels, classes), counts);
    let hot = cx.bind(hot)?;
    let zero = cx.number(dloss, 0.0);
    let weight = match cx.opt_x(3) {
        Some(weights) => {
            let weights = cx.b.cast(weights, dtype)?;
            let weights = along_classes(cx, weights, rank)?;
            sum_kept(cx.b, select(hot, weights, zero), &[1])?
        }
        None => cx.b.cast(counts, dtype)?,
    };
    let weight = Term(weight);
    let factor = match cx.attrs.str("reduction") {
        "none" => weight * binary_op(UNSQUEEZE, dloss, class_axis),
        "sum" => weight * dloss,
        _ => {
            let total = sum_of_all(cx.b, weight.0)?;
            weight * (dloss / total)
        }
    };
    let factor = cx.bind(select(counts, factor, zero))?;
    Ok(Picks { hot, factor })
}

/// The sum of all elements, as a scalar.
fn sum_of_all(b: &mut dyn Emit, v: ValueId) -> Result<ValueId> {
    b.emit(REDUCE_SUM, &[v], Attrs::new().with("keepdims", 0))
}

/// Returns for each label whether it counts, that is, differs from `ignore_index`.
pub fn counting(b: &mut dyn Emit, labels: ValueId, attrs: &Attrs) -> Result<ValueId> {
    let Some(index) = attrs.opt_int("ignore_index") else {
        return b.eval(binary_op(EQUAL, labels, labels));
    };
    let index = b.int(index);
    let dtype = b.ty(labels).dtype;
    let ignored = binary_op(EQUAL, labels, cast(index, dtype));
    b.eval(unary_op(NOT, ignored))
}

/// Returns the weight of all labels that count, as a scalar of `dtype`. A mean divides by it.
pub fn label_weight(
    b: &mut dyn Emit,
    labels: ValueId,
    weights: Option<ValueId>,
    attrs: &Attrs,
    dtype: DType,
) -> Result<ValueId> {
    let counts = counting(b, labels, attrs)?;
    let counted = match weights {
        None => b.cast(counts, dtype)?,
        Some(weights) => {
            // Labels that are ignored may be no class at all.
            let label_type = b.ty(labels).dtype;
            let first = b.int(0);
            let at = b.eval(select(counts, labels, cast(first, label_type)))?;
            let weights = b.cast(weights, dtype)?;
            let each = b.gather(weights, at, 0)?;
            b.eval(select(counts, each, 0.0))?
        }
    };
    sum_of_all(b, counted)
}

/// A vector over classes as `[C, 1, …]`, to broadcast against scores of that rank.
fn along_classes(cx: &mut BodyCx, v: ValueId, rank: usize) -> Result<ValueId> {
    if rank == 2 {
        return Ok(v);
    }
    let axes: Vec<i64> = (1..rank as i64 - 1).collect();
    cx.b.unsqueeze(v, &axes)
}

/// `aten::nll_loss_forward`.
pub static NEGATIVE_LOG_LIKELIHOOD_LOSS: OpDef = OpDef {
    aten: &["aten.nll_loss", "aten.nll_loss_forward"],
    attrs: ATTRS,
    ins: slots!["input", "target"; "weight"],
    outs: slots!["loss"],
    indices: Indices::Classes,
    later_types: BF16_SINCE_22,
    infer: |cx| Ok(vec![loss_type(cx, 0)?]),
    grad: Grad::First(|cx| {
        let (dloss, attrs) = (cx.dy0(), cx.attrs());
        grad_of_scores(cx, &NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD, dloss, attrs)
    }),
    cost: one_flop,
    memory: |cx| loss_memory(cx, 0),
    ..standard(
        "NegativeLogLikelihoodLoss",
        onnx(12, 13),
        OpClass::Other,
        BatchAxes::ClassLoss,
    )
};

/// The gradient of the log-probabilities. It reads only their shape. The gradient of the op that computes them keeps
/// them alive anyway.
pub static NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD: OpDef = OpDef {
    attrs: ATTRS,
    ins: slots!["dloss", "input", "target"; "weight"],
    outs: slots!["dinput"],
    infer: infer_loss_grad,
    grad: Grad::Body,
    memory: |cx| {
        // The factors as the scores' type, and the scores that they are added to in float32.
        let narrow = |x: &&Sized| x.dtype != compute_type(x.dtype);
        let (scores, labels) = (cx.ins[1].as_ref(), cx.ins[2].as_ref());
        let last_bytes = match scores.filter(narrow).zip(labels) {
            Some((x, labels)) => {
                let own = labels.elements() * compute_type(x.dtype).size_bytes();
                let factors = labels.elements() * x.dtype.size_bytes();
                factors + own.max(widened_bytes(cx.device, &cx.outs[0]))
            }
            None => 0,
        };
        loss_grad_memory(cx, last_bytes)
    },
    ..ours(
        "NegativeLogLikelihoodLossGrad",
        OpClass::Other,
        BatchAxes::ClassLossGrad,
        |cx| {
            let picks = label_factors(cx)?;
            let zero = cx.number(picks.factor, 0.0);
            narrow_as(cx, 1, select(picks.hot, -picks.factor, zero))
        },
    )
};

/// The gradient of [`CLASS_LOSS`]: that of the loss with no reduction.
fn grad_each(cx: &mut GradCx) -> Result<ValueId> {
    let (dy, narrow) = (cx.dy0(), cx.b.dtype(cx.x(0)));
    let dloss = cx.b.cast(dy, narrow)?;
    let own = cx.attrs();
    let mut attrs = Attrs::new().with("reduction", "none");
    if let Some(index) = own.opt_int("ignore_index") {
        attrs.set("ignore_index", index.into());
    }
    let op = match own.int("normalized") {
        0 => &SOFTMAX_CROSS_ENTROPY_LOSS_GRAD,
        _ => &NEGATIVE_LOG_LIKELIHOOD_LOSS_GRAD,
    };
    grad_of_scores(cx, op, dloss, attrs)
}

/// Bytes of an index.
const INDEX_BYTES: u64 = 8;

/// Some rows of scores in the type computed in; labels and weights as libtorch wants them. `beside` gives, from the bytes of that type, what is
/// there for each of these rows, and once.
fn each_memory(cx: &MemoryCx, beside: fn(u64) -> [u64; 2]) -> Footprint {
    let (Some(scores), Some(labels)) = (&cx.ins[0], &cx.ins[1]) else {
        return fresh(cx);
    };
    if labels.elements() == 0 {
        return fresh(cx);
    }
    let wide = compute_type(scores.dtype).size_bytes();
    let weights = match cx.operand(2) {
        Some(w) if w.dtype.size_bytes() < wide => wide * w.elements(),
        _ => strided_bytes(cx, &[2]),
    };
    let row: i64 = labels.dims.iter().skip(1).product();
    let [row_bytes, once] = beside(wide);
    let rows = (rows_at_once(cx.device, &scores.dims) * row) as u64 * row_bytes;
    fresh(cx).with_temp(label_bytes(cx, 1) + weights + block_bytes(cx.device, scores) + rows + once)
}

/// [`CLASS_LOSS`] in standard ops.
fn each_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let mut scores = cx.b.widen(cx.x(0))?;
    let dtype = cx.ty(scores).dtype;
    if cx.attrs.int("normalized") == 0 {
        scores =
            cx.b.emit(LOG_SOFTMAX, &[scores], Attrs::new().with("axis", 1))?;
    }
    let labels = cx.b.cast(cx.x(1), DType::I64)?;
    // Labels that are ignored may be no class at all.
    let (counts, labels) = match cx.attrs.opt_int("ignore_index") {
        Some(_) => {
            let counts = counting(cx.b, labels, cx.attrs)?;
            let first = cx.b.int(0);
            (Some(counts), cx.eval(select(counts, labels, first))?)
        }
        None => (None, labels),
    };
    let along = |axis: i64| Attrs::new().with("axis", axis);
    let axis = cx.b.ints(&[1]);
    let at = cx.eval(binary_op(UNSQUEEZE, labels, axis))?;
    let picked = cx.b.emit(GATHER_ELEMENTS, &[scores, at], along(1))?;
    let mut loss = cx.bind(-binary_op(SQUEEZE, picked, axis))?;
    if let Some(weights) = cx.opt_x(2) {
        let weights = cx.b.cast(weights, dtype)?;
        let weight = cx.b.emit(GATHER, &[weights, labels], along(0))?;
        loss = cx.bind(loss * weight)?;
    }
    if let Some(counts) = counts {
        loss = cx.bind(select(counts, loss, 0.0))?;
    }
    Ok(vec![loss.0])
}
