//! All families of ops, and how a name leads to one: in-place ops are their namesakes without the `_`, and a write.

use super::signature::{Call, Op};
use super::tensors::View;
use super::{
    Lowering, Value, activation, arrange, assemble, attention, backward, compare, complex,
    composed, create, fourier, image, index, linear, lookup, loss, native, norm, pointwise,
    products, reduce, resample, special, views,
};
use ckpt_passes::{Error, Result};

/// Every family's ops.
pub(super) const FAMILIES: &[&[Op]] = &[
    activation::OPS,
    arrange::OPS,
    assemble::OPS,
    attention::OPS,
    backward::OPS,
    compare::OPS,
    complex::OPS,
    composed::OPS,
    create::OPS,
    fourier::OPS,
    image::OPS,
    index::OPS,
    linear::OPS,
    lookup::OPS,
    loss::OPS,
    native::OPS,
    norm::OPS,
    pointwise::OPS,
    products::OPS,
    reduce::OPS,
    resample::OPS,
    special::OPS,
    views::OPS,
];

/// Ops whose results are views: their in-place forms change what a name stands for, not memory.
const VIEWS: &[&str] = &[
    "squeeze",
    "swapaxes",
    "swapdims",
    "t",
    "transpose",
    "unsqueeze",
];

const INITIALISES: &str =
    "it fills a tensor with random numbers, as initialising does; export the initialised model";
const RANDOM: &str =
    "it draws random numbers; draw them outside of the model and make them an input";
const DATA_SIZES: &str = "the size of its result depends on data; mask with torch.where, or compute it outside of the model";
const DECOMPOSED: &str = "factorise matrices outside of the model";
const SPECIAL: &str = "there is no such function in ONNX; compute it outside of the model";
const BACKWARD: &str = "it is of a backward pass; export the forward pass alone";
const BAG: &str = "use embedding, and sum or mean over an axis";
const STRIDES: &str = "programs here have sizes and no strides; ask for sizes alone";
const WINDOW: &str = "a window is a constant: make it a buffer of the model";
const RECURRENT: &str = "write its products and gates as ops of their own";

/// Ops that are refused for a reason of their own, and what to do.
const REFUSED: &[(&str, &str)] = &[
    ("_adaptive_avg_pool2d_backward", BACKWARD),
    ("_embedding_bag", BAG),
    (
        "_pdist_forward",
        "use cdist, and the indices of its triangle",
    ),
    ("_thnn_fused_lstm_cell", RECURRENT),
    ("_unique2", DATA_SIZES),
    (
        "as_strided",
        "it looks at memory by strides; use views of sizes, or unfold",
    ),
    ("avg_pool2d_backward", BACKWARD),
    ("bernoulli", RANDOM),
    ("bernoulli_", INITIALISES),
    ("bincount", DATA_SIZES),
    (
        "ctc_loss",
        "compute it outside of the model, with --loss vjp",
    ),
    (
        "_ctc_loss",
        "compute it outside of the model, with --loss vjp",
    ),
    ("convolution_backward", BACKWARD),
    ("cummax", "use max over windows that are masked"),
    ("cummin", "use min over windows that are masked"),
    ("cumprod", "use exp of cumsum of logarithms"),
    ("exponential", RANDOM),
    ("digamma", SPECIAL),
    ("diagonal_scatter", "choose with where and eye instead"),
    ("embedding_bag", BAG),
    ("exponential_", RANDOM),
    ("grid_sampler", "sample with gather and weights of your own"),
    (
        "grid_sampler_2d",
        "sample with gather and weights of your own",
    ),
    ("gru", RECURRENT),
    ("hamming_window", WINDOW),
    ("hann_window", WINDOW),
    ("blackman_window", WINDOW),
    ("bartlett_window", WINDOW),
    ("kaiser_window", WINDOW),
    ("i0", SPECIAL),
    ("lgamma", SPECIAL),
    ("special_i0", SPECIAL),
    ("polygamma", SPECIAL),
    ("index_reduce", "use scatter_reduce"),
    ("linalg_cholesky", DECOMPOSED),
    ("linalg_cholesky_ex", DECOMPOSED),
    ("linalg_det", DECOMPOSED),
    ("linalg_inv", DECOMPOSED),
    ("linalg_inv_ex", DECOMPOSED),
    ("linalg_solve_triangular", DECOMPOSED),
    ("_linalg_det", DECOMPOSED),
    ("logcumsumexp", "use logsumexp over windows that are masked"),
    ("gru_cell", RECURRENT),
    ("lstm", RECURRENT),
    ("lstm_cell", RECURRENT),
    ("max_pool2d_with_indices_backward", BACKWARD),
    (
        "mode",
        "it has no gradient; compute it outside of the model",
    ),
    (
        "multi_margin_loss",
        "compute it outside of the model, with --loss vjp",
    ),
    ("multinomial", RANDOM),
    ("native_group_norm_backward", BACKWARD),
    ("normal", RANDOM),
    ("normal_", INITIALISES),
    (
        "quantile",
        "sort, and interpolate between the two in the middle",
    ),
    ("rand", INITIALISES),
    ("rand_like", RANDOM),
    ("randint", INITIALISES),
    ("randn", INITIALISES),
    ("randn_like", RANDOM),
    ("randperm", RANDOM),
    ("renorm", "normalise the weights after the step instead"),
    ("rnn_relu", RECURRENT),
    ("rnn_tanh", RECURRENT),
    ("sym_storage_offset", STRIDES),
    ("sym_stride", STRIDES),
    ("stride", STRIDES),
    ("uniform", RANDOM),
    ("uniform_", INITIALISES),
    ("unique_consecutive", DATA_SIZES),
    ("unique_dim", DATA_SIZES),
];

/// Replays a call; what it gives where gradients are off has none.
pub(super) fn run(
    low: &mut Lowering,
    name: &str,
    args: Vec<Value>,
    kwargs: Vec<(&str, Value)>,
) -> Result<Value> {
    let short = name.strip_prefix("aten::").unwrap_or(name);
    if short.starts_with("_assert") {
        return Ok(Value::None);
    }
    if let Some((_, why)) = REFUSED.iter().find(|(op, _)| *op == short) {
        return Err(Error::model(
            "op",
            format!("PyTorch's op {short} is not supported: {why}"),
        ));
    }
    let value = if low.vocabulary.has(short) {
        plain(low, short, &args, &kwargs)?
    } else {
        match short.strip_suffix('_') {
            Some(base) if VIEWS.contains(&base) => {
                return Err(Error::model(
                    "op",
                    format!("PyTorch's op {short} is not supported: it changes the sizes of a tensor in place"),
                )
                .help(format!("use {base} in the model")));
            }
            Some(base) if low.vocabulary.has(base) => in_place(low, base, &args, &kwargs)?,
            None if let Some(base) = short.strip_suffix("_copy")
                && low.vocabulary.has(base) =>
            {
                copied(low, base, &args, &kwargs)?
            }
            _ => plain(low, short, &args, &kwargs)?,
        }
    };
    match (&value, low.grad_enabled) {
        (Value::Tensor(id), false) => {
            let result = low.read(*id)?;
            match low.depends(result) {
                true => low.view(*id, View::Detach).map(Value::Tensor),
                false => Ok(value),
            }
        }
        (Value::Complex(id), false) => low.view(*id, View::Detach).map(Value::Complex),
        (Value::Tuple(items) | Value::List(items), false) => {
            let mut stopped = Vec::with_capacity(items.len());
            for item in items {
                stopped.push(match item {
                    Value::Tensor(id) => Value::Tensor(low.view(*id, View::Detach)?),
                    Value::Complex(id) => Value::Complex(low.view(*id, View::Detach)?),
                    other => other.clone(),
                });
            }
            Ok(Value::Tuple(stopped))
        }
        _ => Ok(value),
    }
}

fn plain(
    low: &mut Lowering,
    name: &str,
    args: &[Value],
    kwargs: &[(&str, Value)],
) -> Result<Value> {
    let (lower, bound) = bind(low, name, args, kwargs)?;
    let operands: Vec<_> = bound.iter().flat_map(|(_, v)| tensors(v)).collect();
    let dense = operands.iter().all(|t| low.is_dense(*t));
    let value = lower(&mut Call::new(low, name, bound))?;
    if !dense {
        // Elementwise kernels keep the order that their operands have in memory.
        for id in tensors(&value) {
            if !operands.contains(&id) {
                low.set_strided(id);
            }
        }
    }
    Ok(value)
}

/// `x_copy(…)`: a view of `x` in memory of its own.
fn copied(
    low: &mut Lowering,
    base: &str,
    args: &[Value],
    kwargs: &[(&str, Value)],
) -> Result<Value> {
    let view = plain(low, base, args, kwargs)?;
    let mut alone = |value: &Value| match value {
        Value::Tensor(id) => {
            let value = low.read(*id)?;
            Ok(Value::Tensor(low.fresh(value)))
        }
        Value::Complex(id) => {
            let value = low.read(*id)?;
            Ok(Value::Complex(low.fresh(value)))
        }
        other => Ok(other.clone()),
    };
    match &view {
        Value::List(items) | Value::Tuple(items) => items
            .iter()
            .map(alone)
            .collect::<Result<_>>()
            .map(Value::List),
        one => alone(one),
    }
}

type Bound = (super::signature::Lower, Vec<(&'static str, Value)>);

fn bind(low: &mut Lowering, name: &str, args: &[Value], kwargs: &[(&str, Value)]) -> Result<Bound> {
    // The vocabulary is only read, and binding reads tensors.
    let vocabulary = std::rc::Rc::clone(&low.vocabulary);
    vocabulary.bind(low, name, args, kwargs)
}

/// `x.op_(…)`: the result of `x.op(…)`, in the element type of `x`, in its place.
fn in_place(
    low: &mut Lowering,
    base: &str,
    args: &[Value],
    kwargs: &[(&str, Value)],
) -> Result<Value> {
    let named = kwargs.iter().find(|(n, _)| *n == "self" || *n == "input");
    let target = match (args.first(), named) {
        (Some(Value::Tensor(id)), _) | (None, Some((_, Value::Tensor(id)))) => *id,
        (Some(Value::Complex(_)), _) | (None, Some((_, Value::Complex(_)))) => {
            return Err(Error::model(
                "op",
                format!("{base}_: a complex tensor is written to, which is not supported"),
            )
            .help("write to what view_as_real gives of it, or make a new tensor"));
        }
        _ => {
            return Err(Error::model(
                "op",
                format!("{base}_: there is no tensor to write to"),
            ));
        }
    };
    let (lower, bound) = bind(low, base, args, kwargs)?;
    let result = lower(&mut Call::new(low, base, bound))?;
    let Value::Tensor(result) = result else {
        return Err(Error::model(
            "op",
            format!("PyTorch's op {base}_ is not supported"),
        ));
    };
    let value = low.read(result)?;
    let value = low.b.cast(value, low.dtype(target))?;
    let dims = low.dims(target).to_vec();
    if low.b.rank(value) > dims.len() {
        return Err(Error::model(
            "shape",
            format!("{base}_: the result does not fit the tensor"),
        ));
    }
    let value = low.broadcast_to(value, &dims)?;
    low.write(target, value)?;
    Ok(Value::Tensor(target))
}

fn tensors(value: &Value) -> Vec<super::TensorId> {
    match value {
        Value::Tensor(id) | Value::Complex(id) => vec![*id],
        Value::List(items) | Value::Tuple(items) => items.iter().flat_map(tensors).collect(),
        _ => Vec::new(),
    }
}
