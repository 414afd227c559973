//! The forms of ops in programs that are decomposed to core ATen. Their results include what PyTorch's backward pass
//! keeps. Ours does not need it, so such a result is unknown here, and a program that reads it is refused.

use super::signature::Formula;

/// Running statistics are not updated here, because these forms return the new ones instead.
pub const FORMULAS: &[Formula] = &[
    "_fused_rms_norm(input: t, normalized_shape: I, weight: t?, eps: f?) => \
     (rms_norm(input, normalized_shape, weight, eps), unknown)",
    "_native_batch_norm_legit(input: t, weight: t?, bias: t?, training: b, momentum: f, eps: f) => \
     (batch_norm(input, weight, bias, none, none, training, momentum, eps), unknown, unknown)",
    "_native_batch_norm_legit_functional(input: t, weight: t?, bias: t?, running_mean: t, running_var: t, training: b, momentum: f, eps: f) => \
     mean = training ? none : running_mean; var = training ? none : running_var; \
     y = batch_norm(input, weight, bias, mean, var, training, momentum, eps); (y, unknown, unknown, unknown, unknown)",
    "_native_batch_norm_legit_no_training(input: t, weight: t?, bias: t?, running_mean: t, running_var: t, momentum: f, eps: f) => \
     y = batch_norm(input, weight, bias, running_mean, running_var, false, momentum, eps); (y, unknown, unknown)",
    "_scaled_dot_product_efficient_attention(query: t, key: t, value: t, attn_mask: t?, compute_log_sumexp: b, dropout_p: f?, is_causal: b?, *, scale: f?) => \
     y = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale); \
     (y, unknown, unknown, unknown)",
    "_scaled_dot_product_flash_attention_for_cpu(query: t, key: t, value: t, dropout_p: f?, is_causal: b?, *, attn_mask: t?, scale: f?) => \
     (scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale), unknown)",
    "{native_batch_norm,_native_batch_norm_legit}(input: t, weight: t?, bias: t?, running_mean: t?, running_var: t?, training: b, momentum: f, eps: f) => \
     mean = training ? none : running_mean; var = training ? none : running_var; \
     y = batch_norm(input, weight, bias, mean, var, training, momentum, eps); (y, unknown, unknown)",
    "native_dropout(input: t, p: f, train: b = true) => (dropout(input, p, train), unknown)",
    "native_group_norm(input: t, weight: t?, bias: t?, N: i, C: i, HxW: i, group: i, eps: f) => \
     (group_norm(input, group, weight, bias, eps), unknown, unknown)",
    "native_layer_norm(input: t, normalized_shape: I, weight: t?, bias: t?, eps: f) => \
     (layer_norm(input, normalized_shape, weight, bias, eps), unknown, unknown)",
    "{nll_loss_forward,nll_loss2d_forward}(self: t, target: t, weight: t?, reduction: i, ignore_index: i) => \
     (nll_loss(self, target, weight, reduction, ignore_index), unknown)",
];
