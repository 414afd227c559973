//! Convolutions over any number of spatial axes and their gradients (ONNX Conv-11, ConvTranspose-11); [`plan`] says how
//! they reach BLAS.
//!
//! Two rows of our own are the gradients for the image and the weights. The sizes of the image are an operand, because
//! a stride does not determine them. The gradient of the bias is a sum. The reader rewrites `auto_pad` of SAME_UPPER
//! and SAME_LOWER.

mod body;
pub mod plan;

use super::names::*;
use super::reduce::reduce_axes;
use super::rule::*;
use super::shape::give_shaped;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Cost, CostCx, Footprint, Grad, GradCx, InferCx, MemoryCx, OpClass, OpDef, Sized,
    Slot, fresh, operand,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Same, Ty, ValueId};
use plan::{Buffers, ConvPlan};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&CONV, &CONV_TRANSPOSE, &CONV_INPUT_GRAD, &CONV_WEIGHT_GRAD];

const fn ints(name: &'static str) -> AttrSpec {
    AttrSpec::optional(name, AttrKind::Ints)
}

const AUTO_PAD: AttrSpec = AttrSpec::str("auto_pad", "NOTSET");
const GROUP: AttrSpec = AttrSpec::int("group", 1);
const DILATIONS: AttrSpec = ints("dilations");
const PADS: AttrSpec = ints("pads");
const STRIDES: AttrSpec = ints("strides");

/// Attributes as gradients have them: `VALID` means no padding.
fn window_attrs(attrs: &Attrs) -> Attrs {
    let mut window = Attrs::new().with("group", attrs.int("group"));
    for name in ["dilations", "pads", "strides"] {
        let ignored = name == "pads" && attrs.opt_str("auto_pad") == Some("VALID");
        if let Some(given) = attrs.opt_ints(name).filter(|_| !ignored) {
            window = window.with(name, given.to_vec());
        }
    }
    window
}

/// Attributes of windows by axis, as they are checked.
struct Window {
    strides: Vec<i64>,
    dilations: Vec<i64>,
    /// Before and after together.
    pads: Vec<i64>,
}

impl Window {
    /// Checks operands `image` and `weights` against each other and the attributes.
    fn checked(cx: &InferCx, image: usize, weights: usize) -> Result<Window> {
        cx.want_dtype(image, DType::is_float, "a floating-point type")?;
        cx.same_dtype(&[image, weights])?;
        let (x, w) = (cx.ty(image)?, cx.ty(weights)?);
        if x.rank() < 3 || w.rank() != x.rank() {
            return Err(cx
                .fail(
                    "shape",
                    "operand and weights do not have the same spatial axes, at least one",
                )
                .expected("[batch, channels, ...] and weights of as many axes")
                .found(format!("{x} and {w}")));
        }
        Window::of(cx, x.rank() - 2)
    }

    fn of(cx: &InferCx, n: usize) -> Result<Window> {
        let each = |name: &str, default: i64, least: i64, length: usize| -> Result<Vec<i64>> {
            let given = cx.attrs.opt_ints(name);
            let values = given.map_or(vec![default; length], <[i64]>::to_vec);
            if values.len() != length || values.iter().any(|v| *v < least) {
                return Err(cx
                    .fail(
                        "attribute",
                        format!("`{name}` does not fit {n} spatial axes"),
                    )
                    .expected(format!("{length} numbers, none below {least}"))
                    .found(format!("{values:?}")));
            }
            Ok(values)
        };
        if cx.attrs.int("group") < 1 {
            return Err(cx.fail("attribute", "`group` is not positive"));
        }
        let mut pads = each("pads", 0, 0, 2 * n)?;
        match cx.attrs.opt_str("auto_pad") {
            None | Some("NOTSET") => {}
            Some("VALID") => pads.fill(0),
            Some(other) => {
                return Err(cx
                    .fail("attribute", "unknown value of `auto_pad`")
                    .expected("NOTSET or VALID; a reader rewrites SAME_UPPER and SAME_LOWER")
                    .found(other));
            }
        }
        Ok(Window {
            strides: each("strides", 1, 1, n)?,
            dilations: each("dilations", 1, 1, n)?,
            pads: (0..n)
                .map(|i| pads[i].saturating_add(pads[n + i]))
                .collect(),
        })
    }

    /// From the first to the last element of a window.
    fn extent(&self, kernel: &[Dim], axis: usize) -> Dim {
        let steps = kernel[axis].sub(&Dim::ONE);
        steps.mul(&Dim::from(self.dilations[axis])).add(&Dim::ONE)
    }

    /// How many windows lie along each axis of an image.
    fn places(&self, cx: &InferCx, image: &[Dim], kernel: &[Dim]) -> Result<Vec<Dim>> {
        let axes = image.iter().enumerate();
        axes.map(|(i, size)| {
            let room = size.add(&Dim::from(self.pads[i]));
            let free = room.sub(&self.extent(kernel, i));
            if free.bounds().1.is_some_and(|hi| hi < 0) {
                return Err(cx
                    .fail("shape", format!("no window fits spatial axis {i}"))
                    .expected(format!("at least {}", self.extent(kernel, i)))
                    .found(format!("{room} with padding")));
            }
            Ok(free.div(&Dim::from(self.strides[i])).add(&Dim::ONE))
        })
        .collect()
    }
}

/// Fails unless two sizes may be equal.
fn agree(cx: &InferCx, what: &str, expected: &Dim, found: &Dim) -> Result<()> {
    if expected.same(found) == Same::No {
        return Err(cx
            .fail("shape", format!("{what} do not fit"))
            .expected(expected.to_string())
            .found(found.to_string()));
    }
    Ok(())
}

/// Fails where a number of channels is known not to be a multiple of the groups.
fn divides(cx: &InferCx, channels: &Dim) -> Result<()> {
    let groups = cx.attrs.int("group");
    match channels.as_const() {
        Some(n) if n % groups != 0 => Err(cx
            .fail("shape", "`group` does not divide the channels")
            .found(format!("{n} channels, {groups} groups"))),
        _ => Ok(()),
    }
}

fn check_kernel_shape(cx: &InferCx, kernel: &[Dim]) -> Result<()> {
    let Some(given) = cx.attrs.opt_ints("kernel_shape") else {
        return Ok(());
    };
    let fits = given.len() == kernel.len()
        && given
            .iter()
            .zip(kernel)
            .all(|(g, k)| Dim::from(*g).same(k) != Same::No);
    match fits {
        true => Ok(()),
        false => Err(cx
            .fail("attribute", "`kernel_shape` is not that of the weights")
            .expected(format!("{kernel:?}"))
            .found(format!("{given:?}"))),
    }
}

fn check_bias(cx: &InferCx, filters: &Dim) -> Result<()> {
    let Some(bias) = cx.opt_ty(2) else {
        return Ok(());
    };
    cx.same_dtype(&[0, 2])?;
    match bias.dims.as_slice() {
        [n] => agree(cx, "bias and filters", filters, n),
        _ => Err(cx
            .fail("shape", "the bias is not a vector")
            .found(bias.to_string())),
    }
}

fn priced(cx: &CostCx, plan: Option<ConvPlan>) -> Cost {
    Cost {
        flops: plan.as_ref().map_or(0, ConvPlan::flops),
        bytes: cx.traffic_bytes() + plan.map_or(0, |p| p.window_bytes()),
    }
}

fn taking(cx: &MemoryCx, plan: Option<(ConvPlan, Buffers)>) -> Footprint {
    fresh(cx).with_temp(plan.map_or(0, |(plan, buffers)| plan.temp_bytes(buffers)))
}

const IMAGE_WEIGHTS_BIAS: &[Slot] = &[
    Slot::req("X"),
    Slot::req("W").weight(),
    Slot::opt("B").weight(),
];

/// Σ over a window and the channels of its group (ONNX Conv-11).
pub static CONV: OpDef = OpDef {
    aten: &["aten.convolution"],
    attrs: &[
        AUTO_PAD,
        DILATIONS,
        GROUP,
        ints("kernel_shape"),
        PADS,
        STRIDES,
    ],
    ins: IMAGE_WEIGHTS_BIAS,
    outs: Y,
    later_types: BF16_SINCE_22,
    infer: infer_conv,
    grad: Grad::Rule(grad_conv),
    cost: |cx| priced(cx, forward_plan(cx.attrs, cx.ins)),
    memory: |cx| {
        let plan = forward_plan(cx.attrs, cx.ins).zip(operand(cx.ins, 1));
        taking(cx, plan.map(|(plan, w)| (plan.clone(), plan.forward(w))))
    },
    ..standard("Conv", onnx(1, 11), OpClass::Convolution, BatchAxes::Mixed)
};

fn forward_plan(attrs: &Attrs, ins: &[Option<Sized>]) -> Option<ConvPlan> {
    let (x, w) = (operand(ins, 0)?, operand(ins, 1)?);
    Some(ConvPlan::new(attrs, x, &w.dims, None))
}

fn infer_conv(cx: &InferCx) -> Result<Vec<Ty>> {
    let window = Window::checked(cx, 0, 1)?;
    let (x, w) = (cx.ty(0)?, cx.ty(1)?);
    let channels = w.dims[1].mul(&Dim::from(cx.attrs.int("group")));
    agree(cx, "channels and weights", &channels, &x.dims[1])?;
    divides(cx, &w.dims[0])?;
    check_kernel_shape(cx, &w.dims[2..])?;
    check_bias(cx, &w.dims[0])?;
    let mut dims = vec![x.dims[0].clone(), w.dims[0].clone()];
    dims.extend(window.places(cx, &x.dims[2..], &w.dims[2..])?);
    Ok(vec![x.with_dims(dims)])
}

fn grad_conv(cx: &mut GradCx) -> Result<()> {
    let (x, w, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let attrs = window_attrs(&cx.attrs());
    if cx.wants(0) {
        let shape = cx.b.shape(x)?;
        let dx =
            cx.b.emit(&CONV_INPUT_GRAD, &[dy, w, shape], attrs.clone())?;
        give_shaped(cx, 0, dx)?;
    }
    if cx.wants(1) {
        let shape = cx.b.shape(w)?;
        let dw = cx.b.emit(&CONV_WEIGHT_GRAD, &[x, dy, shape], attrs)?;
        give_shaped(cx, 1, dw)?;
    }
    grad_bias(cx, dy)
}

fn grad_bias(cx: &mut GradCx, dy: ValueId) -> Result<()> {
    if cx.wants(2) {
        let axes: Vec<usize> = (0..cx.b.rank(dy)).filter(|axis| *axis != 1).collect();
        let db = reduce_axes(cx.b, REDUCE_SUM, dy, &axes, false)?;
        give_shaped(cx, 2, db)?;
    }
    Ok(())
}

/// The image that a convolution would filter, each element spread over its window (ONNX ConvTranspose-11).
///
/// Not supported: `output_shape`, which a reader rewrites as padding; output padding as wide as a stride.
pub static CONV_TRANSPOSE: OpDef = OpDef {
    attrs: &[
        AUTO_PAD,
        DILATIONS,
        GROUP,
        ints("kernel_shape"),
        ints("output_padding"),
        PADS,
        STRIDES,
    ],
    ins: IMAGE_WEIGHTS_BIAS,
    outs: Y,
    later_types: BF16_SINCE_22,
    infer: infer_transpose,
    grad: Grad::Rule(grad_transpose),
    cost: |cx| priced(cx, spread_plan(cx.attrs, cx.ins, cx.outs)),
    memory: |cx| spreading(cx),
    ..standard(
        "ConvTranspose",
        onnx(1, 11),
        OpClass::Convolution,
        BatchAxes::Mixed,
    )
};

/// Of a node that spreads operand 0 with the weights of operand 1 over its result.
fn spread_plan(attrs: &Attrs, ins: &[Option<Sized>], outs: &[Sized]) -> Option<ConvPlan> {
    let (y, w) = (operand(ins, 0)?, operand(ins, 1)?);
    Some(ConvPlan::new(
        attrs,
        outs.first()?,
        &w.dims,
        Some(&y.dims[2..]),
    ))
}

fn spreading(cx: &MemoryCx) -> Footprint {
    let operands = operand(cx.ins, 0).zip(operand(cx.ins, 1));
    let plan = spread_plan(cx.attrs, cx.ins, cx.outs).zip(operands);
    taking(
        cx,
        plan.map(|(plan, (y, w))| (plan.clone(), plan.backward(y, w))),
    )
}

fn infer_transpose(cx: &InferCx) -> Result<Vec<Ty>> {
    let window = Window::checked(cx, 0, 1)?;
    let (x, w) = (cx.ty(0)?, cx.ty(1)?);
    agree(cx, "channels and weights", &w.dims[0], &x.dims[1])?;
    divides(cx, &w.dims[0])?;
    check_kernel_shape(cx, &w.dims[2..])?;
    let filters = w.dims[1].mul(&Dim::from(cx.attrs.int("group")));
    check_bias(cx, &filters)?;
    let n = x.rank() - 2;
    let more = cx
        .attrs
        .opt_ints("output_padding")
        .map_or(vec![0; n], <[i64]>::to_vec);
    let fits = more.len() == n
        && more
            .iter()
            .zip(&window.strides)
            .all(|(m, stride)| (0..*stride).contains(m));
    if !fits {
        return Err(cx
            .fail("attribute", "`output_padding` is not supported")
            .expected(format!(
                "{n} numbers below the strides {:?}",
                window.strides
            ))
            .found(format!("{more:?}")));
    }
    let mut dims = vec![x.dims[0].clone(), filters];
    for (i, size) in x.dims[2..].iter().enumerate() {
        let steps = size.sub(&Dim::ONE).mul(&Dim::from(window.strides[i]));
        let full = steps.add(&window.extent(&w.dims[2..], i));
        let size = full
            .add(&Dim::from(more[i]))
            .sub(&Dim::from(window.pads[i]));
        if size.bounds().1.is_some_and(|hi| hi < 0) {
            return Err(cx
                .fail(
                    "shape",
                    format!("`pads` take more than spatial axis {i} has"),
                )
                .found(full.to_string()));
        }
        dims.push(size);
    }
    Ok(vec![x.with_dims(dims)])
}

/// The convolution of dy, and the gradient of its weights with the roles exchanged.
fn grad_transpose(cx: &mut GradCx) -> Result<()> {
    let (x, w, dy) = (cx.x(0), cx.x(1), cx.dy0());
    let attrs = window_attrs(&cx.attrs());
    if cx.wants(0) {
        let dx = cx.b.emit(&CONV, &[dy, w], attrs.clone())?;
        give_shaped(cx, 0, dx)?;
    }
    if cx.wants(1) {
        let shape = cx.b.shape(w)?;
        let dw = cx.b.emit(&CONV_WEIGHT_GRAD, &[dy, x, shape], attrs)?;
        give_shaped(cx, 1, dw)?;
    }
    grad_bias(cx, dy)
}

/// `ConvInputGrad(dy, w, shape)`: the gradient of [`CONV`] for its first operand, of that shape.
pub static CONV_INPUT_GRAD: OpDef = OpDef {
    attrs: &[DILATIONS, GROUP, PADS, STRIDES],
    ins: slots!["dy", "w", "shape"],
    outs: DX,
    infer: |cx| {
        let window = Window::checked(cx, 0, 1)?;
        let (dy, w) = (cx.ty(0)?, cx.ty(1)?);
        agree(cx, "`dy` and weights", &w.dims[0], &dy.dims[1])?;
        let dims = told(cx, 2, dy.rank())?;
        agree(cx, "`dy` and `shape`", &dims[0], &dy.dims[0])?;
        let channels = w.dims[1].mul(&Dim::from(cx.attrs.int("group")));
        agree(cx, "`shape` and weights", &channels, &dims[1])?;
        let places = window.places(cx, &dims[2..], &w.dims[2..])?;
        for (place, found) in places.iter().zip(&dy.dims[2..]) {
            agree(cx, "`dy` and `shape`", place, found)?;
        }
        Ok(vec![dy.with_dims(dims)])
    },
    grad: Grad::Rule(grad_input_grad),
    cost: |cx| priced(cx, spread_plan(cx.attrs, cx.ins, cx.outs)),
    memory: |cx| spreading(cx),
    ..our_mixed("ConvInputGrad", body::input_grad)
};

/// Linear in both: the convolution of what arrives, and its gradient for the weights.
fn grad_input_grad(cx: &mut GradCx) -> Result<()> {
    let (dy, w, dz, attrs) = (cx.x(0), cx.x(1), cx.dy0(), cx.attrs());
    if cx.wants(0) {
        let d = cx.b.emit(&CONV, &[dz, w], attrs.clone())?;
        give_shaped(cx, 0, d)?;
    }
    if cx.wants(1) {
        let shape = cx.b.shape(w)?;
        let d = cx.b.emit(&CONV_WEIGHT_GRAD, &[dz, dy, shape], attrs)?;
        give_shaped(cx, 1, d)?;
    }
    Ok(())
}

/// `ConvWeightGrad(x, dy, shape)`: the gradient of [`CONV`] for its weights, of that shape.
pub static CONV_WEIGHT_GRAD: OpDef = OpDef {
    attrs: &[DILATIONS, GROUP, PADS, STRIDES],
    ins: slots!["x", "dy", "shape"],
    outs: slots!["dw"],
    infer: |cx| {
        let window = Window::checked(cx, 0, 1)?;
        let (x, dy) = (cx.ty(0)?, cx.ty(1)?);
        agree(cx, "the batches of `x` and `dy`", &x.dims[0], &dy.dims[0])?;
        let dims = told(cx, 2, x.rank())?;
        agree(cx, "`dy` and `shape`", &dims[0], &dy.dims[1])?;
        let channels = dims[1].mul(&Dim::from(cx.attrs.int("group")));
        agree(cx, "`x` and `shape`", &channels, &x.dims[1])?;
        let places = window.places(cx, &x.dims[2..], &dims[2..])?;
        for (place, found) in places.iter().zip(&dy.dims[2..]) {
            agree(cx, "`x` and `dy`", place, found)?;
        }
        Ok(vec![x.with_dims(dims)])
    },
    grad: Grad::Rule(grad_weight_grad),
    cost: |cx| priced(cx, weight_plan(cx.attrs, cx.ins, cx.outs)),
    memory: |cx| {
        let plan = weight_plan(cx.attrs, cx.ins, cx.outs).zip(operand(cx.ins, 1));
        taking(
            cx,
            plan.map(|(plan, dy)| (plan.clone(), plan.of_weights(dy))),
        )
    },
    ..our_mixed("ConvWeightGrad", body::weight_grad)
};

/// Linear in both, as above, with what arrives in the place of the weights.
fn grad_weight_grad(cx: &mut GradCx) -> Result<()> {
    let (x, dy, dz, attrs) = (cx.x(0), cx.x(1), cx.dy0(), cx.attrs());
    if cx.wants(0) {
        let shape = cx.b.shape(x)?;
        let d =
            cx.b.emit(&CONV_INPUT_GRAD, &[dy, dz, shape], attrs.clone())?;
        give_shaped(cx, 0, d)?;
    }
    if cx.wants(1) {
        let d = cx.b.emit(&CONV, &[x, dz], attrs)?;
        give_shaped(cx, 1, d)?;
    }
    Ok(())
}

fn weight_plan(attrs: &Attrs, ins: &[Option<Sized>], outs: &[Sized]) -> Option<ConvPlan> {
    let (x, dy) = (operand(ins, 0)?, operand(ins, 1)?);
    Some(ConvPlan::new(
        attrs,
        x,
        &outs.first()?.dims,
        Some(&dy.dims[2..]),
    ))
}

/// The shape of the result, which an operand of that many elements tells.
fn told(cx: &InferCx, slot: usize, rank: usize) -> Result<Vec<Dim>> {
    if int_vector(cx, slot)?.is_some_and(|n| n != rank) {
        return Err(cx
            .fail("shape", "`shape` does not have an entry an axis")
            .expected(rank.to_string())
            .found(cx.ty(slot)?.to_string()));
    }
    Ok(match cx.ints(slot) {
        Some(known) => known.to_vec(),
        None => (0..rank).map(|axis| cx.fresh(0, axis)).collect(),
    })
}
