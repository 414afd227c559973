//! The vocabulary: all families of ops, and the way from a name to an op.
//!
//! An in-place op `x.op_(…)` is its namesake `op` and a write. `op_copy` is `op` and a copy.

use super::super::value::Value;
use super::lowering::{Lowering, View};
use super::signature::{Bound, Formula, Op, Vocabulary};
use super::{
    activation, arrange, attention, backward, complex, composed, create, fourier, image, index,
    loss, native, norm, pointwise, products, quantised, random, ranks, recurrent, reduce, strided,
    views,
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
    (quantised::OPS, quantised::FORMULAS),
    (random::OPS, random::FORMULAS),
    (ranks::OPS, ranks::FORMULAS),
    (recurrent::OPS, recurrent::FORMULAS),
    (reduce::OPS, reduce::FORMULAS),
    (strided::OPS, &[]),
    (views::OPS, views::FORMULAS),
];

static VOCABULARY: LazyLock<Vocabulary> = LazyLock::new(|| Vocabulary::new(FAMILIES));

/// Ops whose results are views. Their in-place forms make the tensor such a view of its memory and write nothing.
const VIEWS: &str = "squeeze swapaxes swapdims t transpose unsqueeze";

/// Ops that are refused for a reason of their own: the names, and what to do instead.
const REFUSED: &[&str] = &[
    "_adaptive_avg_pool2d_backward avg_pool2d_backward convolution_backward max_pool2d_with_indices_backward \
     native_group_norm_backward: it is of a backward pass; export the forward pass alone",
    "_c10d_functional::broadcast: there is no such op over ranks; multiply by 0 on the other ranks, and sum with all_reduce",
    "_c10d_functional::all_to_all_single _c10d_functional_autograd::all_to_all_single: there is no such op over ranks; gather \
     all rows, and take those that are wanted",
    "_c10d_functional::all_reduce_coalesced _c10d_functional::all_gather_into_tensor_coalesced \
     _c10d_functional::reduce_scatter_tensor_coalesced: call it once for each tensor",
    "_embedding_bag embedding_bag: use embedding, and sum or mean over an axis",
    "_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros: its weight is packed for one \
     kind of device; export the layout that unpacks on all",
    "_pdist_forward: use cdist, and the indices of its triangle",
    "_thnn_fused_lstm_cell: write its products and gates as ops of their own",
    "_unique2 bincount unique_dim: the size of its result depends on data; mask with \
     torch.where, or compute it outside of the model",
    "multinomial: it draws random numbers; draw them outside of the model and make them an input",
    "ctc_loss _ctc_loss: compute it outside of the model, with --loss vjp",
    "cumprod: use exp of cumsum of logarithms",
    "digamma i0 lgamma special_i0 polygamma: there is no such function in ONNX; compute it outside of the model",
    "diagonal_scatter: choose with where and eye instead",
    "blackman_window bartlett_window kaiser_window: a window is a constant: make it a \
     buffer of the model",
    "index_reduce: use scatter_reduce",
    "linalg_cholesky linalg_cholesky_ex linalg_det linalg_inv linalg_inv_ex _linalg_det: \
     factorise matrices outside of the model",
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
            let bound = bind(low, base)?;
            viewed_in_place(low, base, bound)?
        }
        Some(base) if let Some(base) = in_place_base(short, base) => {
            let named = kwargs.iter().find(|(n, _)| *n == "self" || *n == "input");
            let target = args.first().or(named.map(|(_, value)| value));
            let bound = |low: &mut Lowering| bind(low, &base);
            in_place(low, &base, target, bound)?
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

/// Ops whose results are row-major, whatever their operands are (ATen/native): products and what else allocates its result
/// itself. `matmul` of a matrix and a batch returns the transpose of a product, so it is none of them.
const ROW_MAJOR: &str = "_log_softmax _softmax addmm baddbmm bmm embedding gather index_select layer_norm linear \
    log_softmax mm native_layer_norm new_empty new_full new_ones new_zeros softmax";

/// Returns true if a result of this rank is row-major, whatever the operands are.
fn makes_row_major(name: &str, rank: usize) -> bool {
    // Images with their channels last stay so when they are padded.
    let padded = rank < 4 && is_listed(name, "constant_pad_nd pad");
    padded || is_listed(name, ROW_MAJOR)
}

fn plain(low: &mut Lowering, name: &str, bound: Bound) -> Result<Value> {
    let operands = bound.tensors();
    // The second operand of `type_as` only lends its element type.
    let ordered = if name == "type_as" { 1 } else { operands.len() };
    let mut first = operands.iter().take(ordered);
    let dense = first.all(|t| strided::is_ordered(low, *t));
    let value = bound.lower(low, name)?;
    if !dense {
        // Elementwise kernels keep the order that their operands have in memory.
        for id in value.tensors() {
            if !operands.contains(&id) && !makes_row_major(name, low.dims(id).len()) {
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

/// Returns the op of which `name` is the in-place form: `add_` of `base`, `__ior__` of `__or__`.
fn in_place_base(name: &str, base: &str) -> Option<String> {
    let operator = name.strip_prefix("__i").and_then(|n| n.strip_suffix("__"));
    let names = operator.map_or(vec![base.to_string()], |operator| {
        vec![format!("__{operator}__"), operator.to_string()]
    });
    names.into_iter().find(|name| VOCABULARY.has(name))
}

/// Makes a tensor the view of its memory that `op` returns.
fn viewed_in_place(low: &mut Lowering, op: &str, bound: Bound) -> Result<Value> {
    let targets = bound.tensors();
    match (targets.as_slice(), plain(low, op, bound)?) {
        ([target], Value::Tensor(view)) => {
            low.become_view(*target, view);
            Ok(Value::Tensor(*target))
        }
        _ => Err(unsupported(&format!("{op}_"), "")),
    }
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
