//! The vocabulary: all families of ops, and the way from a name to an op.
//!
//! An in-place op `x.op_(…)` is its namesake `op` and a write. `op_copy` is `op` and a copy.

use super::super::value::Value;
use super::lowering::{Lowering, View};
use super::signature::{Bound, Formula, Op, Vocabulary};
use super::{
    activation, arrange, attention, backward, complex, composed, create, fourier, image, index,
    loss, native, norm, pointwise, products, reduce, views,
};
use ckpt_passes::ir::Graph;
use ckpt_passes::ops::EmitExt;
use ckpt_passes::{Error, Result};
use std::sync::LazyLock;

/// The ops of each family: those with a function, and those with a formula.
const FAMILIES: &[(&[Op], &[Formula])] = &[
    (activation::OPS, activation::FORMULAS),
    (arrange::OPS, arrange::FORMULAS),
    (attention::OPS, &[]),
    (backward::OPS, backward::FORMULAS),
    (complex::OPS, &[]),
    (composed::OPS, composed::FORMULAS),
    (create::OPS, create::FORMULAS),
    (fourier::OPS, &[]),
    (image::OPS, &[]),
    (index::OPS, index::FORMULAS),
    (loss::OPS, loss::FORMULAS),
    (&[], native::FORMULAS),
    (norm::OPS, &[]),
    (pointwise::OPS, pointwise::FORMULAS),
    (products::OPS, products::FORMULAS),
    (reduce::OPS, reduce::FORMULAS),
    (views::OPS, views::FORMULAS),
];

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| Vocabulary::new(FAMILIES));

/// Ops whose results are views. Their in-place forms change the sizes of a tensor and write nothing.
const VIEWS: &str = "squeeze swapaxes swapdims t transpose unsqueeze";

/// Ops that are refused for a reason of their own: the names, and what to do instead.
const REFUSED: &[&str] = &[
    "_adaptive_avg_pool2d_backward avg_pool2d_backward convolution_backward max_pool2d_with_indices_backward \
     native_group_norm_backward: it is of a backward pass; export the forward pass alone",
    "_embedding_bag embedding_bag: use embedding, and sum or mean over an axis",
    "_pdist_forward: use cdist, and the indices of its triangle",
    "_thnn_fused_lstm_cell gru gru_cell lstm lstm_cell rnn_relu rnn_tanh: write its products and gates as ops of \
     their own",
    "_unique2 bincount unique_consecutive unique_dim: the size of its result depends on data; mask with \
     torch.where, or compute it outside of the model",
    "as_strided: it looks at memory by strides; use views of sizes, or unfold",
    "bernoulli exponential exponential_ multinomial normal rand_like randn_like randperm uniform: it draws random \
     numbers; draw them outside of the model and make them an input",
    "bernoulli_ normal_ rand randint randn uniform_: it fills a tensor with random numbers, as initialising does; \
     export the initialised model",
    "ctc_loss _ctc_loss multi_margin_loss: compute it outside of the model, with --loss vjp",
    "cummax: use max over windows that are masked",
    "cummin: use min over windows that are masked",
    "cumprod: use exp of cumsum of logarithms",
    "digamma i0 lgamma special_i0 polygamma: there is no such function in ONNX; compute it outside of the model",
    "diagonal_scatter: choose with where and eye instead",
    "grid_sampler grid_sampler_2d: sample with gather and weights of your own",
    "hamming_window hann_window blackman_window bartlett_window kaiser_window: a window is a constant: make it a \
     buffer of the model",
    "index_reduce: use scatter_reduce",
    "linalg_cholesky linalg_cholesky_ex linalg_det linalg_inv linalg_inv_ex linalg_solve_triangular _linalg_det: \
     factorise matrices outside of the model",
    "logcumsumexp: use logsumexp over windows that are masked",
    "mode: it has no gradient; compute it outside of the model",
    "quantile: sort, and interpolate between the two in the middle",
    "renorm: normalise the weights after the step instead",
    "sym_storage_offset sym_stride stride: programs here have sizes and no strides; ask for sizes alone",
];

/// Returns true if a name is in a list of names with spaces between.
fn is_listed(name: &str, list: &str) -> bool {
    list.split_whitespace().any(|one| one == name)
}

impl<'g> Lowering<'g> {
    /// Returns a lowering into an empty graph.
    pub fn new(graph: &'g mut Graph) -> Lowering<'g> {
        Lowering::with_ops(graph, run)
    }
}

/// Replays a call. Its result has no gradient if gradients are off.
#[expect(
    clippy::needless_pass_by_value,
    reason = "a `Run`: other dialects consume the arguments"
)]
fn run(
    low: &mut Lowering,
    name: &str,
    args: Vec<Value>,
    kwargs: Vec<(&str, Value)>,
) -> Result<Value> {
    let short = name.strip_prefix("aten::").unwrap_or(name);
    if short.starts_with("_assert") {
        return Ok(Value::None);
    }
    let mut refused = REFUSED.iter().filter_map(|text| text.split_once(": "));
    if let Some((_, why)) = refused.find(|(names, _)| is_listed(short, names)) {
        return Err(unsupported(short, &format!(": {why}")));
    }
    let bind = |low: &mut Lowering, name: &str| VOCABULARY.bind(low, name, &args, &kwargs);
    let value = match short.strip_suffix('_') {
        _ if VOCABULARY.has(short) => {
            let bound = bind(low, short)?;
            plain(low, short, bound)?
        }
        Some(base) if is_listed(base, VIEWS) => {
            let why = ": it changes the sizes of a tensor in place";
            return Err(unsupported(short, why).help(format!("use {base} in the model")));
        }
        Some(base) if VOCABULARY.has(base) => {
            let named = kwargs.iter().find(|(n, _)| *n == "self" || *n == "input");
            let target = args.first().or(named.map(|(_, value)| value));
            let bound = |low: &mut Lowering| bind(low, base);
            in_place(low, base, target, bound)?
        }
        None if let Some(base) = short.strip_suffix("_copy")
            && VOCABULARY.has(base) =>
        {
            let bound = bind(low, base)?;
            let view = plain(low, base, bound)?;
            copied(low, view)?
        }
        _ => {
            let bound = bind(low, short)?;
            plain(low, short, bound)?
        }
    };
    match low.grad_enabled {
        true => Ok(value),
        false => detached(low, value),
    }
}

fn unsupported(name: &str, why: &str) -> Box<Error> {
    Error::model("op", format!("PyTorch's op {name} is not supported{why}"))
}

/// Returns the tensors of a value without their gradients.
fn detached(low: &mut Lowering, value: Value) -> Result<Value> {
    match &value {
        Value::Tensor(id) | Value::Complex(id) => {
            let result = low.read(*id)?;
            match (low.depends(result), &value) {
                (false, _) => Ok(value),
                (true, Value::Complex(_)) => low.view(*id, View::Detach).map(Value::Complex),
                (true, _) => low.view(*id, View::Detach).map(Value::Tensor),
            }
        }
        Value::Tuple(items) | Value::List(items) => {
            let items = items.iter().map(|item| detached(low, item.clone()));
            items.collect::<Result<_>>().map(Value::Tuple)
        }
        _ => Ok(value),
    }
}

fn plain(low: &mut Lowering, name: &str, bound: Bound) -> Result<Value> {
    let operands = bound.tensors();
    let dense = operands.iter().all(|t| low.is_dense(*t));
    let value = bound.lower(low, name)?;
    if !dense {
        // Elementwise kernels keep the order that their operands have in memory.
        for id in value.tensors() {
            if !operands.contains(&id) {
                low.set_strided(id);
            }
        }
    }
    Ok(value)
}

/// Copies views into memory of their own.
fn copied(low: &mut Lowering, view: Value) -> Result<Value> {
    Ok(match view {
        Value::Tensor(id) => {
            let value = low.read(id)?;
            Value::Tensor(low.fresh(value))
        }
        Value::Complex(id) => {
            let value = low.read(id)?;
            Value::Complex(low.fresh(value))
        }
        Value::List(items) | Value::Tuple(items) => {
            let items = items.into_iter().map(|item| copied(low, item));
            Value::List(items.collect::<Result<_>>()?)
        }
        other => other,
    })
}

/// Writes the result of `x.op(…)` into `x`, in the element type and sizes of `x`.
fn in_place(
    low: &mut Lowering,
    base: &str,
    target: Option<&Value>,
    bound: impl Fn(&mut Lowering) -> Result<Bound>,
) -> Result<Value> {
    let target = match target {
        Some(Value::Tensor(id)) => *id,
        Some(Value::Complex(_)) => {
            return Err(Error::model(
                "op",
                format!("{base}_: a complex tensor is written to, which is not supported"),
            )
            .help("write to what view_as_real gives of it, or make a new tensor"));
        }
        _ => {
            bail!("op", "{base}_: there is no tensor to write to");
        }
    };
    let Value::Tensor(result) = bound(low)?.lower(low, base)? else {
        return Err(unsupported(&format!("{base}_"), ""));
    };
    let value = low.read(result)?;
    let value = low.b.cast(value, low.dtype(target))?;
    let dims = low.dims(target).to_vec();
    if low.b.rank(value) > dims.len() {
        bail!("shape", "{base}_: the result does not fit the tensor");
    }
    let value = low.broadcast_to(value, &dims)?;
    low.write(target, value)?;
    Ok(Value::Tensor(target))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::ops;

    #[test]
    fn formulas_call_rows_that_exist() {
        let texts = FAMILIES.iter().flat_map(|(_, formulas)| formulas.iter());
        for text in texts {
            let (_, body) = text.split_once(") => ").expect(text);
            for (at, _) in body.match_indices('(') {
                let before = body[..at].rsplit(|c: char| !c.is_ascii_alphanumeric());
                let name = before.into_iter().next().unwrap_or("");
                let is_row = name.starts_with(|c: char| c.is_ascii_uppercase());
                assert!(!is_row || ops::find(name).is_some(), "{name} in {text}");
            }
        }
    }
}
