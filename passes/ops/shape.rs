//! Shapes, and ops that only change how elements are laid out: views wherever the operand's strides allow.

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::layout::{
    expand_strides, squeeze_strides, transpose_strides, unsqueeze_strides, view_strides,
};
use ckpt_ir::op::{
    BatchAxes, Cost, CostCx, Footprint, Grad, GradCx, InferCx, MemoryCx, OpDef, contiguous_strides,
    free, fresh, moves,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Emit, Same, Ty, ValueId, same_dims};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &SHAPE,
    &SIZE,
    &EXPAND,
    &RESHAPE,
    &FLATTEN,
    &TRANSPOSE,
    &SQUEEZE,
    &UNSQUEEZE,
    &IDENTITY,
    &STOP_GRADIENT,
];

/// ONNX `Shape`.
pub static SHAPE: OpDef = OpDef {
    attrs: &[
        AttrSpec::int("start", 0),
        AttrSpec::optional("end", AttrKind::Int),
    ],
    ins: slots!["data"],
    outs: slots!["shape"],
    infer: |cx| {
        Ok(vec![Ty::new(
            DType::I64,
            [Dim::from(span(cx)?.len() as i64)],
        )])
    },
    fold: |cx, _| Some(vec![cx.ty(0).ok()?.dims[span(cx).ok()?].to_vec()]),
    grad: Grad::Zero("a shape does not change with the data"),
    cost: free,
    later_types: FLOAT8_SINCE_19,
    ..mixed("Shape", onnx(1, 15))
};

/// The axes `Shape` returns: `start..end`, clamped (ONNX Shape-15).
fn span(cx: &InferCx) -> Result<std::ops::Range<usize>> {
    let rank = cx.ty(0)?.rank() as i64;
    let clamp = |at: i64| {
        let at = if at < 0 { at.saturating_add(rank) } else { at };
        at.clamp(0, rank) as usize
    };
    let start = clamp(cx.attrs.int("start"));
    let end = clamp(cx.attrs.opt_int("end").unwrap_or(rank));
    Ok(start..end.max(start))
}

/// The number of elements, as a scalar.
pub static SIZE: OpDef = OpDef {
    ins: slots!["data"],
    outs: slots!["size"],
    infer: |_| Ok(vec![Ty::scalar(DType::I64)]),
    fold: |cx, _| Some(vec![vec![cx.ty(0).ok()?.elements()]]),
    grad: Grad::Zero("a shape does not change with the data"),
    cost: free,
    later_types: FLOAT8_SINCE_19,
    ..mixed("Size", onnx(1, 13))
};

/// Broadcasts to a shape; a view of its operand.
pub static EXPAND: OpDef = OpDef {
    aten: &["aten.expand"],
    ins: slots!["input", "shape"],
    outs: OUTPUT,
    fold: |cx, types| {
        let (out, dims) = (types.first()?.static_dims()?, cx.ty(0).ok()?.static_dims()?);
        let strides = expand_strides(&dims, &contiguous_strides(&dims), &out);
        Some(vec![strided_contents(cx.ints(0)?, &out, &strides, 0)?])
    },
    grad: Grad::Rule(|cx| cx.give_summed(0, cx.dy0())),
    memory: |cx| {
        view_of_first(cx, |x| {
            expand_strides(&x.dims, &x.strides, &cx.outs[0].dims)
        })
    },
    ..layout("Expand", onnx(8, 13), BatchAxes::Broadcast, |cx| {
        let x = cx.ty(0)?;
        let rank = int_vector(cx, 1)?;
        let Some(target) = cx.ints(1) else {
            let rank = rank.ok_or_else(|| cx.fail("shape", "the target's rank is not known"))?;
            let dims: Vec<Dim> = (0..x.rank().max(rank)).map(|i| cx.fresh(0, i)).collect();
            return Ok(vec![x.with_dims(dims)]);
        };
        let dims = broadcast_two(&x.dims, target).ok_or_else(|| {
            cx.fail("shape", "the operand does not broadcast to the target")
                .expected(format!("{target:?}"))
        })?;
        Ok(vec![x.with_dims(dims)])
    })
};

/// The same elements in another shape (ONNX Reshape-14): a view where the strides allow, else a contiguous copy.
pub static RESHAPE: OpDef = OpDef {
    aten: &[
        "aten._unsafe_view",
        "aten.flatten",
        "aten.reshape",
        "aten.view",
    ],
    attrs: &[AttrSpec::int("allowzero", 0)],
    ins: slots!["data", "shape"],
    outs: slots!["reshaped"],
    grad: Grad::Rule(grad_reshape),
    cost: reshape_cost,
    memory: reshape_memory,
    later_types: FLOAT8_SINCE_21,
    ..layout("Reshape", onnx(5, 14), BatchAxes::Regrouped, infer_reshape)
};

fn infer_reshape(cx: &InferCx) -> Result<Vec<Ty>> {
    let x = cx.ty(0)?;
    let rank = int_vector(cx, 1)?;
    let Some(target) = cx.ints(1) else {
        return match rank {
            None => Err(cx.fail("shape", "the target's rank is not known")),
            Some(1) => Ok(vec![x.with_dims([x.elements()])]),
            Some(rank) => {
                let dims: Vec<Dim> = (0..rank).map(|i| cx.fresh(0, i)).collect();
                Ok(vec![x.with_dims(dims)])
            }
        };
    };
    let keeps_zero = cx.attrs.int("allowzero") != 0;
    let mut dims = Vec::with_capacity(target.len());
    let mut open = None;
    for (i, size) in target.iter().enumerate() {
        dims.push(match size.as_const() {
            Some(0) if !keeps_zero => x.dims.get(i).cloned().ok_or_else(|| {
                cx.fail(
                    "shape",
                    format!("size {i} of the target copies an axis that the operand lacks"),
                )
            })?,
            Some(-1) if open.is_some() => {
                return Err(cx.fail("shape", "more than one size of the target is -1"));
            }
            Some(-1) => {
                open = Some(i);
                Dim::ONE
            }
            Some(n) if n < -1 => {
                return Err(cx.fail("shape", format!("size {i} of the target is {n}")));
            }
            _ => size.clone(),
        });
    }
    // Sizes that both shapes have say nothing about the others.
    let mut left = x.dims.clone();
    let mut right = dims.clone();
    right.retain(|size| {
        let shared = left.iter().position(|d| d == size);
        match shared.filter(|_| size.bounds().0.is_some_and(|lo| lo >= 1)) {
            Some(at) => {
                left.remove(at);
                false
            }
            None => true,
        }
    });
    let (total, rest) = (Dim::product(&left), Dim::product(&right));
    let mismatch = || {
        cx.fail("shape", "the target has another number of elements")
            .expected(format!("{} elements", x.elements()))
            .found(format!("{target:?}"))
    };
    match open {
        Some(_) if rest.as_const() == Some(0) => {
            return Err(cx.fail("shape", "-1 beside a size of 0 has no value"));
        }
        Some(i) => {
            let size = total.div(&rest);
            if size.mul(&rest).same(&total) == Same::No {
                return Err(mismatch());
            }
            dims[i] = size;
        }
        None if total.same(&rest) == Same::No => return Err(mismatch()),
        None => {}
    }
    Ok(vec![x.with_dims(dims)])
}

/// Emits the gradient in the operand's shape. All sizes are given, so 0 means 0.
fn grad_reshape(cx: &mut GradCx) -> Result<()> {
    let x = cx.x(0);
    let d = reshape_like(cx, cx.dy0(), x)?;
    cx.give(0, d);
    Ok(())
}

/// Reshapes `v` to the shape of `like`.
pub fn reshape_like(cx: &mut GradCx, v: ValueId, like: ValueId) -> Result<ValueId> {
    let shape = cx.b.shape(like)?;
    cx.b.reshape_to(v, shape)
}

/// Sets the gradient of operand `i`. If the shapes are equal but not provably so, it adds a `Reshape`.
pub fn give_shaped(cx: &mut GradCx, i: usize, gradient: ValueId) -> Result<()> {
    let x = cx.x(i);
    let proven = same_dims(&cx.b.ty(gradient).dims, &cx.b.ty(x).dims);
    let d = match proven {
        true => gradient,
        false => reshape_like(cx, gradient, x)?,
    };
    cx.give(i, d);
    Ok(())
}

/// No cost for a view, else one read and one write of all elements.
pub fn reshape_cost(cx: &CostCx) -> Cost {
    match (cx.ins.first(), cx.outs.first()) {
        (Some(Some(x)), Some(y)) if view_strides(&x.dims, &x.strides, &y.dims).is_none() => {
            moves(cx)
        }
        _ => Cost::default(),
    }
}

fn reshape_memory(cx: &MemoryCx) -> Footprint {
    match (cx.ins.first(), cx.outs.first()) {
        (Some(Some(x)), Some(y)) => match view_strides(&x.dims, &x.strides, &y.dims) {
            Some(strides) => view(0, strides),
            None => fresh(cx),
        },
        _ => fresh(cx),
    }
}

/// The axes before `axis` as one, those from it on as another (ONNX Flatten-13).
pub static FLATTEN: OpDef = OpDef {
    aten: &["aten.flatten"],
    attrs: &[AttrSpec::int("axis", 1)],
    ins: INPUT,
    outs: OUTPUT,
    grad: Grad::Rule(grad_reshape),
    cost: reshape_cost,
    memory: reshape_memory,
    later_types: FLOAT8_SINCE_21,
    ..layout("Flatten", onnx(1, 13), BatchAxes::Regrouped, |cx| {
        let x = cx.ty(0)?;
        let axis = match cx.attrs.int("axis") {
            at if at == x.rank() as i64 => x.rank(),
            at => cx.axis(at, x.rank())?,
        };
        let (outer, inner) = x.dims.split_at(axis);
        Ok(vec![
            x.with_dims([Dim::product(outer), Dim::product(inner)]),
        ])
    })
};

/// Permutes axes; a view.
pub static TRANSPOSE: OpDef = OpDef {
    aten: &["aten.permute", "aten.t", "aten.transpose"],
    attrs: &[AttrSpec::optional("perm", AttrKind::Ints)],
    ins: slots!["data"],
    outs: slots!["transposed"],
    fold: |cx, types| {
        let (out, dims) = (types.first()?.static_dims()?, cx.ty(0).ok()?.static_dims()?);
        let perm = permutation(cx.attrs, dims.len())?;
        let strides = transpose_strides(&contiguous_strides(&dims), &perm);
        Some(vec![strided_contents(cx.ints(0)?, &out, &strides, 0)?])
    },
    grad: Grad::First(|cx| {
        let rank = cx.b.rank(cx.x(0));
        let perm = permutation(&cx.attrs(), rank)
            .ok_or_else(|| no_rule(cx, "`perm` is not a permutation of the axes"))?;
        let mut inverse = vec![0; rank];
        for (i, p) in perm.iter().enumerate() {
            inverse[*p] = i as i64;
        }
        let dy = cx.dy0();
        transpose(cx.b, dy, inverse)
    }),
    memory: |cx| {
        view_of_first(cx, |x| {
            let perm = permutation(cx.attrs, x.dims.len()).unwrap_or_default();
            transpose_strides(&x.strides, &perm)
        })
    },
    later_types: FLOAT8_SINCE_21,
    ..layout("Transpose", onnx(1, 13), BatchAxes::Permuted, |cx| {
        let x = cx.ty(0)?;
        let perm = permutation(cx.attrs, x.rank()).ok_or_else(|| {
            cx.fail("attribute", "`perm` is not a permutation of the axes")
                .expected(format!("each of 0..{} once", x.rank()))
                .found(format!("{:?}", cx.attrs.opt_ints("perm")))
        })?;
        let dims: Vec<Dim> = perm.iter().map(|p| x.dims[*p].clone()).collect();
        Ok(vec![x.with_dims(dims)])
    })
};

/// `perm`, or the axes reversed where it is not given; `None` if it is not a permutation.
fn permutation(attrs: &Attrs, rank: usize) -> Option<Vec<usize>> {
    let Some(perm) = attrs.opt_ints("perm") else {
        return Some((0..rank).rev().collect());
    };
    let mut seen = vec![false; rank];
    for p in perm {
        let slot = seen.get_mut(usize::try_from(*p).ok()?)?;
        if std::mem::replace(slot, true) {
            return None;
        }
    }
    (perm.len() == rank).then(|| perm.iter().map(|p| *p as usize).collect())
}

/// Permutes the axes of `v`. Returns `v` for the identity, and merges two permutations into one.
pub fn transpose(b: &mut dyn Emit, v: ValueId, perm: Vec<i64>) -> Result<ValueId> {
    if let Some((x, first)) = transposed(b, v) {
        let both = perm.iter().map(|p| first[*p as usize] as i64).collect();
        return transpose(b, x, both);
    }
    if perm.iter().enumerate().all(|(i, p)| i as i64 == *p) {
        return Ok(v);
    }
    b.emit(&TRANSPOSE, &[v], Attrs::new().with("perm", perm))
}

/// Returns the operand and the permutation if `v` is the result of a `Transpose`.
pub fn transposed(b: &dyn Emit, v: ValueId) -> Option<(ValueId, Vec<usize>)> {
    let node = b.node(b.def_node(v)?);
    let x = (node.op == &TRANSPOSE).then_some(node.ins[0])??;
    Some((x, permutation(node.attrs, b.ty(v).rank())?))
}

/// Leaves out axes of size 1; a view. Without `axes`, every axis of size 1.
pub static SQUEEZE: OpDef = OpDef {
    aten: &["aten.squeeze"],
    ins: slots!["data"; "axes"],
    outs: slots!["squeezed"],
    grad: Grad::Rule(|cx| {
        let Some(axes) = cx.opt_x(1) else {
            return grad_reshape(cx);
        };
        let d = cx.b.op(&UNSQUEEZE, &[cx.dy0(), axes])?;
        give_shaped(cx, 0, d)
    }),
    memory: |cx| {
        view_of_first(cx, |x| {
            let axes: Vec<usize> = match cx.ins.get(1) {
                Some(Some(axes)) => known_axes(axes.ints.as_deref(), x.dims.len()),
                _ => (0..x.dims.len()).filter(|i| x.dims[*i] == 1).collect(),
            };
            squeeze_strides(&x.strides, &axes)
        })
    },
    later_types: FLOAT8_SINCE_21,
    ..layout("Squeeze", onnx(13, 13), BatchAxes::Regrouped, |cx| {
        let x = cx.ty(0)?;
        let axes = squeezed_axes(cx)?;
        let kept = (0..x.rank()).filter(|i| !axes.contains(i));
        let dims: Vec<Dim> = kept.map(|i| x.dims[i].clone()).collect();
        Ok(vec![x.with_dims(dims)])
    })
};

/// The axes that `Squeeze` leaves out.
fn squeezed_axes(cx: &InferCx) -> Result<Vec<usize>> {
    let x = cx.ty(0)?;
    let Some(axes) = const_axes(cx, 1, x.rank())? else {
        let mut axes = Vec::new();
        for (i, dim) in x.dims.iter().enumerate() {
            match dim.same(&Dim::ONE) {
                Same::Yes => axes.push(i),
                Same::No => {}
                Same::Unknown => {
                    return Err(cx
                        .fail(
                            "shape",
                            format!("whether axis {i} goes depends on the size {dim}"),
                        )
                        .expected("`axes` to be given"));
                }
            }
        }
        return Ok(axes);
    };
    for axis in &axes {
        if x.dims[*axis].same(&Dim::ONE) == Same::No {
            return Err(cx
                .fail("shape", format!("axis {axis} cannot be left out"))
                .expected("size 1")
                .found(x.dims[*axis].to_string()));
        }
    }
    Ok(axes)
}

/// Puts in axes of size 1; a view.
pub static UNSQUEEZE: OpDef = OpDef {
    aten: &["aten.unsqueeze"],
    ins: slots!["data", "axes"],
    outs: slots!["expanded"],
    grad: Grad::Rule(|cx| {
        let axes = cx.x(1);
        let d = cx.b.op(&SQUEEZE, &[cx.dy0(), axes])?;
        give_shaped(cx, 0, d)
    }),
    memory: |cx| {
        view_of_first(cx, |x| {
            let axes = cx.ins.get(1).and_then(|a| a.as_ref()?.ints.as_deref());
            unsqueeze_strides(
                &x.dims,
                &x.strides,
                &known_axes(axes, cx.outs[0].dims.len()),
            )
        })
    },
    later_types: FLOAT8_SINCE_21,
    ..layout("Unsqueeze", onnx(13, 13), BatchAxes::Regrouped, |cx| {
        let x = cx.ty(0)?;
        let count = int_vector(cx, 1)?
            .ok_or_else(|| cx.fail("shape", "the number of axes put in is not known"))?;
        let rank = x.rank() + count;
        let axes = const_axes(cx, 1, rank)?.unwrap_or_default();
        let mut old = x.dims.iter().cloned();
        let dims: Vec<Dim> = (0..rank)
            .map(|i| match axes.contains(&i) {
                true => Dim::ONE,
                false => old.next().unwrap_or(Dim::ONE),
            })
            .collect();
        Ok(vec![x.with_dims(dims)])
    })
};

/// Its operand.
pub static IDENTITY: OpDef = OpDef {
    aten: &["aten.alias"],
    ins: INPUT,
    outs: OUTPUT,
    grad: Grad::First(|cx| Ok(cx.dy0())),
    memory: |cx| view_of_first(cx, |x| x.strides.clone()),
    later_types: FLOAT8_SINCE_19,
    ..layout("Identity", onnx(1, 13), BatchAxes::Pointwise, same_type)
};

/// Its operand, of which no gradient is taken: `detach`, and what is computed without gradients.
pub static STOP_GRADIENT: OpDef = OpDef {
    aten: &["aten.detach"],
    ins: INPUT,
    outs: OUTPUT,
    fold: fold_same,
    grad: Grad::Zero("it is what stops the gradient"),
    cost: free,
    memory: |cx| view_of_first(cx, |x| x.strides.clone()),
    axes: BatchAxes::Pointwise,
    ..our_mixed("StopGradient", |cx| {
        Ok(vec![cx.b.op(&IDENTITY, &[cx.x(0)])?])
    })
};
