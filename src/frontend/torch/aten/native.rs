//! The forms that ops have once a program is decomposed to core ATen: their results include what PyTorch's backward
//! keeps, which ours does not need. Such a result is unknown here, and who reads it is refused.

use super::Value;
use super::signature::{Call, Op};
use ckpt_passes::Result;

pub const OPS: &[Op] = &[
    (
        "_fused_rms_norm(input: t, normalized_shape: I, weight: t?, eps: f?)",
        |c| {
            let y = forwarded(
                c,
                "rms_norm",
                ["input", "normalized_shape", "weight", "eps"],
            )?;
            with_unknown(y, 1)
        },
    ),
    (
        "_native_batch_norm_legit(input: t, weight: t?, bias: t?, training: b, momentum: f, eps: f)",
        |c| batch_norm(c, 2),
    ),
    (
        "_native_batch_norm_legit(input: t, weight: t?, bias: t?, running_mean: t, running_var: t, training: b, momentum: f, eps: f)",
        |c| batch_norm(c, 2),
    ),
    (
        "_native_batch_norm_legit_functional(input: t, weight: t?, bias: t?, running_mean: t, running_var: t, training: b, momentum: f, eps: f)",
        |c| batch_norm(c, 4),
    ),
    (
        "_native_batch_norm_legit_no_training(input: t, weight: t?, bias: t?, running_mean: t, running_var: t, momentum: f, eps: f)",
        |c| batch_norm(c, 2),
    ),
    (
        "_scaled_dot_product_efficient_attention(query: t, key: t, value: t, attn_mask: t?, compute_log_sumexp: b, dropout_p: f?, is_causal: b?, *, scale: f?)",
        |c| attention(c, 3),
    ),
    (
        "_scaled_dot_product_flash_attention(query: t, key: t, value: t, dropout_p: f?, is_causal: b?, return_debug_mask: b?, *, scale: f?)",
        |c| attention(c, 8),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu(query: t, key: t, value: t, dropout_p: f?, is_causal: b?, *, attn_mask: t?, scale: f?)",
        |c| attention(c, 1),
    ),
    (
        "native_batch_norm(input: t, weight: t?, bias: t?, running_mean: t?, running_var: t?, training: b, momentum: f, eps: f)",
        |c| batch_norm(c, 2),
    ),
    ("native_dropout(input: t, p: f, train: b?)", |c| {
        let train = c.bool("train", true)?;
        let y = c.run("dropout", [c.given("input"), c.given("p"), train.into()])?;
        with_unknown(y, 1)
    }),
    (
        "native_group_norm(input: t, weight: t?, bias: t?, N: i, C: i, HxW: i, group: i, eps: f)",
        |c| {
            let y = forwarded(c, "group_norm", ["input", "group", "weight", "bias", "eps"])?;
            with_unknown(y, 2)
        },
    ),
    (
        "native_layer_norm(input: t, normalized_shape: I, weight: t?, bias: t?, eps: f)",
        |c| {
            let named = ["input", "normalized_shape", "weight", "bias", "eps"];
            let y = forwarded(c, "layer_norm", named)?;
            with_unknown(y, 2)
        },
    ),
    (
        "nll_loss_forward(self: t, target: t, weight: t?, reduction: i, ignore_index: i)",
        loss,
    ),
    (
        "nll_loss2d_forward(self: t, target: t, weight: t?, reduction: i, ignore_index: i)",
        loss,
    ),
];

/// Another op with these arguments, in its own order.
fn forwarded<const N: usize>(c: &mut Call, name: &str, arguments: [&str; N]) -> Result<Value> {
    let given = arguments.map(|a| c.given(a));
    c.run(name, given)
}

/// The result and `more` that nothing here computes.
fn with_unknown(y: Value, more: usize) -> Result<Value> {
    let mut all = vec![y];
    all.resize(more + 1, Value::Unknown);
    Ok(Value::Tuple(all))
}

/// With the statistics of the batch in training; running ones are not touched here.
fn batch_norm(c: &mut Call, more: usize) -> Result<Value> {
    let training = c.bool("training", false)?;
    let running = |c: &Call, name: &str| match training {
        true => Value::None,
        false => c.given(name),
    };
    let (mean, var) = (running(c, "running_mean"), running(c, "running_var"));
    let y = c.run(
        "batch_norm",
        [
            c.given("input"),
            c.given("weight"),
            c.given("bias"),
            mean,
            var,
            training.into(),
            c.given("momentum"),
            c.given("eps"),
        ],
    )?;
    with_unknown(y, more)
}

fn attention(c: &mut Call, more: usize) -> Result<Value> {
    if c.bool("return_debug_mask", false)? {
        return Err(c.unsupported("`return_debug_mask`"));
    }
    let args = [
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
    ];
    let args = args.map(|a| c.given(a)).to_vec();
    let scale = c.get("scale").cloned().map(|s| ("scale", s));
    let kwargs = scale.into_iter().collect();
    let y = super::vocabulary::run(c.low, "scaled_dot_product_attention", args, kwargs)?;
    with_unknown(y, more)
}

fn loss(c: &mut Call) -> Result<Value> {
    let named = ["self", "target", "weight", "reduction", "ignore_index"];
    let y = forwarded(c, "nll_loss", named)?;
    with_unknown(y, 1)
}
