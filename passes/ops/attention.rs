//! Attention as one op: softmax(cap(scale·q·kᵀ) + bias)·v, for every head and query, and its gradient.
//!
//! The scores are no tensor of the graph. The kernel computes them for a few queries at a time ([`plan`]), in float32
//! for 16-bit types and else in the operands' type. Heads stand on the axis before the queries; query head `h` reads
//! key head `h / (query heads / key heads)`.
//!
//! A query `i` may see key `j` if `j <= i + keys − queries` (causal), within `window_left` keys before and
//! `window_right` after that place, and where a boolean bias is true; a floating-point bias is added. With segments, which
//! number the documents of a packed sequence, it sees only keys whose segment is that of its own place. For a query
//! without keys, the attribute `empty_rows` selects zeros, as in guarded graphs and ONNX Attention, or NaN, as in a
//! softmax over −∞. A finite bias hides no key.
//!
//! The gradient computes the probabilities again from scores, row by row, rather than from the saved log-sum-exp: exact
//! also where a bias of −10000 or the lowest finite number has swallowed the digits of the log-sum-exp, and then neither
//! the result nor the log-sum-exp has to stay for it (Rabe and Staats 2021, arXiv 2112.05682). The fused kernels of a device
//! read both (Dao et al. 2022, arXiv 2205.14135): for such a device they are operands of the gradient.

mod body;
pub mod plan;

pub use body::repeated;
pub use plan::{AttentionPlan, Band, DLSE, GRAD_SEGMENTS, SEGMENTS, Span, empty_is_nan, groups};

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Cost, CostCx, DeviceKind, Footprint, Grad, GradCx, InferCx, MemoryCx, OpClass,
    OpDef, Slot, fresh, moves,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Same, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&ATTENTION, &ATTENTION_GRAD];

const SCALE: AttrSpec = AttrSpec::float("scale", 1.0);
/// 0 or 1.
const CAUSAL: AttrSpec = AttrSpec::int("causal", 0);
/// Keys that a query sees before its own place; −1: all.
const WINDOW_LEFT: AttrSpec = AttrSpec::int("window_left", -1);
/// Keys that a query sees after its own place; −1: all.
const WINDOW_RIGHT: AttrSpec = AttrSpec::int("window_right", -1);
/// c in c·tanh(score/c), before the bias; 0: none.
const SOFTCAP: AttrSpec = AttrSpec::float("softcap", 0.0);
/// `zeros` or `nan`: what a query gives that may see no key.
const EMPTY_ROWS: AttrSpec = AttrSpec::str("empty_rows", "zeros");
/// Which gradients the gradient row returns, as slots of the forward node, ascending.
const WANTS: AttrSpec = AttrSpec::required("wants", AttrKind::Ints);

/// Names of what [`ATTENTION`] and [`ATTENTION_GRAD`] have in common.
pub const SHARED: [&str; 6] = [
    "scale",
    "causal",
    "window_left",
    "window_right",
    "softcap",
    "empty_rows",
];

/// The slot of the saved result among the operands of [`ATTENTION_GRAD`].
pub const Y: usize = 5;
/// The slot of the saved log-sum-exp among the operands of [`ATTENTION_GRAD`].
pub const LSE: usize = 6;

/// `q` [L…, Hq, Sq, D], `k` [L…, H, Sk, D], `v` [L…, H, Sk, Dv], `bias` (floating point or bool) broadcast to
/// [L…, Hq, Sq, Sk]. `segments` [L…, Sk] are int64; their axes before the last broadcast, and there are at least as many keys as
/// queries. Operands without an axis for heads have rank 2. `y` [L…, Hq, Sq, Dv]; `lse` [L…, Hq, Sq] is the log-sum-exp
/// of the scores, −∞ for a query that sees no key, in the type computed in.
pub static ATTENTION: OpDef = OpDef {
    attrs: &[
        SCALE,
        CAUSAL,
        WINDOW_LEFT,
        WINDOW_RIGHT,
        SOFTCAP,
        EMPTY_ROWS,
    ],
    ins: slots!["q", "k", "v"; "bias", "segments"],
    outs: slots!["y"; "lse"],
    infer: |cx| infer_forward(cx, 0, SEGMENTS),
    grad: Grad::Rule(grad_attention),
    cost: |cx| match AttentionPlan::forward(cx.attrs, cx.ins) {
        Some(plan) => priced(cx, &plan, 1, 1),
        None => moves(cx),
    },
    memory: |cx| footprint(cx, AttentionPlan::forward(cx.attrs, cx.ins), [3, SEGMENTS]),
    ..ours(
        "Attention",
        OpClass::Attention,
        BatchAxes::Mixed,
        body::forward,
    )
};

/// Gradients of [`ATTENTION`] for the operands in `wants` (0 q, 1 k, 2 v, 3 bias), in that order. `y` and `lse` are the
/// results of the forward node; they change what a kernel has to compute, and not what it returns. A `y` of another rank has
/// the elements in the order [L…, Sq, Hq, Dv], as what follows attention usually reads them. `dlse` is the cotangent of the
/// log-sum-exp, zeros if it is missing.
pub static ATTENTION_GRAD: OpDef = OpDef {
    attrs: &[
        SCALE,
        CAUSAL,
        WINDOW_LEFT,
        WINDOW_RIGHT,
        SOFTCAP,
        EMPTY_ROWS,
        WANTS,
    ],
    ins: slots!["dy", "q", "k", "v"; "bias", "y", "lse", "segments", "dlse"],
    outs: &[Slot::var("gradients")],
    infer: infer_backward,
    grad: Grad::Body,
    cost: |cx| match AttentionPlan::backward(cx.attrs, cx.ins) {
        Some(plan) => {
            let wants = cx.attrs.ints("wants");
            let want = |i: i64| u64::from(wants.contains(&i));
            // Scores, and a product each for dq and dk; dp, and one for dv.
            priced(cx, &plan, 1 + want(0) + want(1), 1 + want(2))
        }
        None => moves(cx),
    },
    memory: |cx| {
        footprint(
            cx,
            AttentionPlan::backward(cx.attrs, cx.ins),
            [4, GRAD_SEGMENTS],
        )
    },
    ..our_mixed("AttentionGrad", body::backward)
};

/// Products over the size of a head and over that of a value, for each pair of a query and a key that it may see.
fn priced(cx: &CostCx, plan: &AttentionPlan, sized: u64, valued: u64) -> Cost {
    let each = 2 * (sized * plan.size as u64 + valued * plan.value_size as u64) + 10;
    let heads = plan.lead_count().saturating_mul(plan.heads * plan.groups);
    let pairs = plan.band.pairs().saturating_mul(heads as u64);
    cx.work(pairs.saturating_mul(each))
}

/// Temporary memory is the workspace. With a mask, a kernel on a CUDA device also takes one number that holds −∞.
fn footprint(
    cx: &MemoryCx,
    plan: Option<AttentionPlan>,
    [bias, segments]: [usize; 2],
) -> Footprint {
    let is_mask = cx.operand(bias).is_some_and(|b| b.dtype == DType::Bool);
    let has_mask = is_mask || cx.operand(segments).is_some();
    fresh(cx).with_temp(plan.map_or(0, |p| {
        let number = match has_mask && cx.device == DeviceKind::Cuda {
            true => p.dtype.size_bytes(),
            false => 0,
        };
        p.workspace_bytes() + number
    }))
}

/// Fails unless the sizes are equal in some run.
fn want_same(cx: &InferCx, what: &str, a: &Dim, b: &Dim) -> Result<()> {
    if a.same(b) == Same::No {
        return Err(cx
            .fail("shape", format!("{what} differ"))
            .expected(a.to_string())
            .found(b.to_string()));
    }
    Ok(())
}

/// Types of `y` and `lse`; operands are q, k, v, bias from slot `q` on, and segments.
fn infer_forward(cx: &InferCx, q: usize, segments: usize) -> Result<Vec<Ty>> {
    let dtype = cx.want_dtype(q, DType::is_float, "a floating-point type")?;
    cx.same_dtype(&[q, q + 1, q + 2])?;
    check_attributes(cx)?;
    let (qt, kt, vt) = (cx.ty(q)?, cx.ty(q + 1)?, cx.ty(q + 2)?);
    let rank = qt.rank();
    if rank < 2 || kt.rank() != rank || vt.rank() != rank {
        return Err(cx
            .fail(
                "shape",
                "`q`, `k` and `v` do not have the same two or more axes",
            )
            .found(format!("{qt}, {kt}, {vt}")));
    }
    let (at_s, at_d) = (rank - 2, rank - 1);
    want_same(
        cx,
        "sizes of a head in `q` and `k`",
        &qt.dims[at_d],
        &kt.dims[at_d],
    )?;
    want_same(cx, "lengths of `k` and `v`", &kt.dims[at_s], &vt.dims[at_s])?;
    for i in 0..at_s {
        want_same(cx, "axes of `k` and `v`", &kt.dims[i], &vt.dims[i])?;
        if i + 1 < at_s {
            want_same(cx, "leading axes of `q` and `k`", &qt.dims[i], &kt.dims[i])?;
        }
    }
    if rank > 2 {
        groups(&qt.dims[rank - 3], &kt.dims[rank - 3]).ok_or_else(|| {
            cx.fail(
                "shape",
                "the query heads are no known multiple of the key heads",
            )
            .found(format!("{} and {}", qt.dims[rank - 3], kt.dims[rank - 3]))
        })?;
    }
    let mut scores = qt.dims.clone();
    scores[at_d] = kt.dims[at_s].clone();
    check_bias(cx, q + 3, dtype, &scores)?;
    check_segments(cx, segments, &scores)?;
    let mut y = qt.dims.clone();
    y[at_d] = vt.dims[at_d].clone();
    let rows = qt.dims[..at_d].to_vec();
    Ok(vec![Ty::new(dtype, y), Ty::new(compute_type(dtype), rows)])
}

fn check_attributes(cx: &InferCx) -> Result<()> {
    let wrong = |name: &str, found: String, expected: &str| {
        Err(cx
            .fail("attribute", format!("`{name}` has no meaning"))
            .expected(expected)
            .found(found))
    };
    for name in ["window_left", "window_right"] {
        let n = cx.attrs.int(name);
        if !(-1..=i64::from(i32::MAX)).contains(&n) {
            return wrong(name, n.to_string(), "-1, or a number of keys");
        }
    }
    let causal = cx.attrs.int("causal");
    if !(0..2).contains(&causal) {
        return wrong("causal", causal.to_string(), "0 or 1");
    }
    let (scale, cap) = (cx.attrs.float("scale"), cx.attrs.float("softcap"));
    if !scale.is_finite() {
        return wrong("scale", scale.to_string(), "a finite number");
    }
    if !cap.is_finite() || cap < 0.0 {
        return wrong("softcap", cap.to_string(), "0 or more");
    }
    let empty = cx.attrs.str("empty_rows");
    if !matches!(empty, "zeros" | "nan") {
        return wrong("empty_rows", empty.to_string(), "`zeros` or `nan`");
    }
    Ok(())
}

fn check_bias(cx: &InferCx, slot: usize, dtype: DType, scores: &[Dim]) -> Result<()> {
    let Some(bias) = cx.opt_ty(slot) else {
        return Ok(());
    };
    let fits_type = bias.dtype == DType::Bool
        || bias.dtype.is_float() && bias.dtype.size_bytes() <= compute_type(dtype).size_bytes();
    if !fits_type {
        return Err(cx
            .fail(
                "type",
                format!("operand `bias` has element type {}", bias.dtype),
            )
            .expected("bool or a floating-point type no wider than is computed in"));
    }
    let fits = bias.rank() <= scores.len()
        && bias
            .dims
            .iter()
            .zip(&scores[scores.len() - bias.rank()..])
            .all(|(b, s)| b.is_one() || b.same(s) != Same::No);
    if !fits {
        return Err(cx
            .fail("shape", "`bias` does not broadcast to the scores")
            .expected(format!("{scores:?}"))
            .found(bias.to_string()));
    }
    Ok(())
}

fn check_segments(cx: &InferCx, slot: usize, scores: &[Dim]) -> Result<()> {
    let Some(segments) = cx.opt_ty(slot) else {
        return Ok(());
    };
    if segments.dtype != DType::I64 {
        return Err(cx
            .fail(
                "type",
                format!("operand `segments` has element type {}", segments.dtype),
            )
            .expected("i64"));
    }
    let [lead @ .., queries, keys] = scores else {
        return Err(cx.fail("shape", "the scores have no two axes"));
    };
    // Without the axis of heads.
    let lead = &lead[..lead.len().saturating_sub(1)];
    let fits = match segments.dims.as_slice() {
        [outer @ .., last] => {
            let broadcasts = |(s, l): (&Dim, &Dim)| s.is_one() || s.same(l) != Same::No;
            last.same(keys) != Same::No
                && outer.len() <= lead.len()
                && outer
                    .iter()
                    .zip(&lead[lead.len() - outer.len()..])
                    .all(broadcasts)
        }
        [] => false,
    };
    if !fits {
        return Err(cx
            .fail("shape", "`segments` does not number the keys")
            .expected(format!("{lead:?}, then {keys}"))
            .found(segments.to_string()));
    }
    match keys.sub(queries).bounds().1 {
        Some(most) if most < 0 => Err(cx
            .fail(
                "shape",
                "`segments` says nothing of queries before the first key",
            )
            .expected("no fewer keys than queries")
            .found(format!("{queries} queries, {keys} keys"))),
        _ => Ok(()),
    }
}

fn grad_attention(cx: &mut GradCx) -> Result<()> {
    let (dy, dlse) = (cx.dy(0), cx.dy(1));
    if dy.is_none() && dlse.is_none() {
        return Ok(());
    }
    let wants: Vec<i64> = (0..4).filter(|i| cx.wants(*i)).map(|i| i as i64).collect();
    if wants.is_empty() {
        return Ok(());
    }
    let given = cx.attrs();
    let mut attrs = Attrs::new().with("wants", wants.clone());
    for name in SHARED {
        if let Some(value) = given.get(name) {
            attrs.set(name, value.clone());
        }
    }
    let dy = match dy {
        Some(dy) => dy,
        None => cx.b.filled_like(cx.y(0), 0.0)?,
    };
    let mut ins = vec![Some(dy), Some(cx.x(0)), Some(cx.x(1)), Some(cx.x(2))];
    let (bias, segments) = (cx.opt_x(3), cx.opt_x(SEGMENTS));
    if bias.is_some() || segments.is_some() {
        ins.push(bias);
    }
    if segments.is_some() {
        ins.resize(GRAD_SEGMENTS, None);
        ins.push(segments);
    }
    if dlse.is_some() {
        ins.resize(DLSE, None);
        ins.push(dlse);
    }
    let gradients = cx.b.emit_n(&ATTENTION_GRAD, ins, attrs, wants.len())?;
    for (slot, gradient) in wants.into_iter().zip(gradients) {
        cx.give(slot as usize, gradient);
    }
    Ok(())
}

fn infer_backward(cx: &InferCx) -> Result<Vec<Ty>> {
    let types = infer_forward(cx, 1, GRAD_SEGMENTS)?;
    for (slot, name, result) in [
        (0, "dy", 0),
        (Y, "y", 0),
        (LSE, "lse", 1),
        (DLSE, "dlse", 1),
    ] {
        let expected = &types[result];
        let found = match slot {
            0 => Some(cx.ty(0)?),
            _ => cx.opt_ty(slot),
        };
        let Some(found) = found else { continue };
        if slot == Y && found.dtype == expected.dtype && found.rank() != expected.rank() {
            continue;
        }
        if found.dtype != expected.dtype || !may_be_same(&found.dims, &expected.dims) {
            return Err(cx
                .fail("shape", format!("`{name}` is not of the result's type"))
                .expected(expected.to_string())
                .found(found.to_string()));
        }
    }
    let wants = cx.attrs.ints("wants");
    if wants.windows(2).any(|w| w[0] >= w[1]) || wants.iter().any(|w| !(0..4).contains(w)) {
        return Err(cx
            .fail(
                "attribute",
                "`wants` does not list operands in ascending order",
            )
            .found(format!("{wants:?}")));
    }
    let mut types = Vec::new();
    for want in wants {
        let ty = cx.ty(*want as usize + 1)?;
        if !ty.dtype.is_float() {
            return Err(cx.fail("attribute", "`wants` lists a boolean bias"));
        }
        types.push(ty.clone());
    }
    Ok(types)
}
