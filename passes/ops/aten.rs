//! ATen's names for the rows of the table: what a user of PyTorch calls the ops that a policy is about.
//!
//! A row's own `imports` list the names that mean exactly that op. Many ATen ops have no such row: exporters write them
//! as one of several ops, or as a few. [`WRITTEN_AS`] lists the ops that carry their meaning, so that `aten.linear`
//! selects the products it becomes. Where the file says which ATen op a node was traced from, that is matched as well
//! (see `plan::refine`).

use super::{all, find};
use crate::ir::OpDef;
use crate::ir::op::Import;
use std::collections::BTreeSet;

/// ATen ops (without overload) that exporters write as one or more rows; see PyTorch's ONNX exporter.
const WRITTEN_AS: &[(&str, &[&str])] = &[
    ("aten._log_softmax", &["LogSoftmax"]),
    ("aten._softmax", &["Softmax"]),
    ("aten._unsafe_view", &["Reshape"]),
    ("aten.addmm", &["Gemm", "MatMul"]),
    ("aten.amax", &["ReduceMax"]),
    ("aten.amin", &["ReduceMin"]),
    ("aten.argmax", &["ArgMax"]),
    ("aten.argmin", &["ArgMin"]),
    ("aten.baddbmm", &["MatMul"]),
    ("aten.bitwise_and", &["And"]),
    ("aten.bitwise_not", &["Not"]),
    ("aten.bitwise_or", &["Or"]),
    ("aten.chunk", &["Split"]),
    ("aten.clamp", &["Clip"]),
    ("aten.constant_pad_nd", &["Pad"]),
    ("aten.cross_entropy_loss", &["SoftmaxCrossEntropyLoss"]),
    ("aten.cumsum", &["CumSum"]),
    ("aten.elu", &["Elu"]),
    ("aten.embedding", &["Gather"]),
    ("aten.flatten", &["Flatten", "Reshape"]),
    ("aten.gather", &["GatherElements"]),
    ("aten.hardsigmoid", &["HardSigmoid"]),
    ("aten.hardswish", &["HardSwish"]),
    ("aten.index", &["Gather", "GatherND"]),
    ("aten.index_select", &["Gather"]),
    ("aten.layer_norm", &["LayerNormalization"]),
    ("aten.leaky_relu", &["LeakyRelu"]),
    ("aten.linalg_vector_norm", &["ReduceL1", "ReduceL2"]),
    ("aten.linear", &["Gemm", "MatMul"]),
    ("aten.log_softmax", &["LogSoftmax"]),
    ("aten.logsumexp", &["ReduceLogSumExp"]),
    ("aten.masked_fill", &["Where"]),
    ("aten.mean", &["ReduceMean"]),
    ("aten.mish", &["Mish"]),
    ("aten.native_layer_norm", &["LayerNormalization"]),
    ("aten.nll_loss", &["NegativeLogLikelihoodLoss"]),
    ("aten.nll_loss_forward", &["NegativeLogLikelihoodLoss"]),
    ("aten.one_hot", &["OneHot"]),
    ("aten.pad", &["Pad"]),
    ("aten.prelu", &["PRelu"]),
    ("aten.prod", &["ReduceProd"]),
    ("aten.remainder", &["Mod"]),
    ("aten.repeat", &["Tile"]),
    ("aten.rms_norm", &["RMSNormalization"]),
    ("aten.rsqrt", &["Reciprocal", "Sqrt"]),
    ("aten.scatter", &["ScatterElements"]),
    ("aten.scatter_add", &["ScatterElements"]),
    // Of a decomposed one the sigmoid; the product by its operand is an ordinary product.
    ("aten.silu", &["Sigmoid", "Silu", "SwiGlu"]),
    ("aten.slice", &["Slice"]),
    ("aten.softmax", &["Softmax"]),
    ("aten.softplus", &["Softplus"]),
    ("aten.split", &["Split"]),
    ("aten.split_with_sizes", &["Split"]),
    ("aten.squeeze", &["Squeeze"]),
    ("aten.stack", &["Concat"]),
    ("aten.sum", &["ReduceSum"]),
    ("aten.t", &["Transpose"]),
    ("aten.to", &["Cast"]),
    ("aten.topk", &["TopK"]),
    ("aten.transpose", &["Transpose"]),
    ("aten.tril", &["Trilu"]),
    ("aten.triu", &["Trilu"]),
    ("aten.unsqueeze", &["Unsqueeze"]),
    ("aten.view", &["Reshape"]),
];

/// ATen's names for a whole attention: of a fused op, or of the scores, softmax and product that it was written as.
const ATTENTION: &[&str] = &[
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten.scaled_dot_product_attention",
];

/// The rows that the ATen op of that name (`aten.mm`) is written as; empty for a name that no row has.
pub fn rows(name: &str) -> Vec<&'static OpDef> {
    let means = |op: &&OpDef| {
        op.imports
            .iter()
            .any(|i| matches!(i, Import::Aten(n) if *n == name))
    };
    let exact = all().filter(means);
    let written = WRITTEN_AS.iter().filter(|(n, _)| *n == name);
    let written = written.flat_map(|(_, rows)| rows.iter().filter_map(|row| find(row)));
    let mut found: Vec<&'static OpDef> = Vec::new();
    for row in exact.chain(written) {
        if !found.contains(&row) {
            found.push(row);
        }
    }
    found
}

/// Whether the name means a whole attention.
pub fn is_attention(name: &str) -> bool {
    ATTENTION.contains(&name)
}

/// Every ATen name that is known here, sorted.
pub fn names() -> BTreeSet<&'static str> {
    let exact = all().flat_map(|op| op.imports).filter_map(|i| match i {
        Import::Aten(name) => Some(*name),
        Import::Onnx(..) => None,
    });
    exact
        .chain(WRITTEN_AS.iter().map(|(name, _)| *name))
        .chain(ATTENTION.iter().copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_to_rows() {
        for (name, written) in WRITTEN_AS {
            assert_eq!(
                rows(name).iter().map(|r| r.name).collect::<BTreeSet<_>>(),
                written.iter().copied().collect(),
                "{name}"
            );
        }
        for name in names() {
            assert!(is_attention(name) || !rows(name).is_empty(), "{name}");
            assert!(name.starts_with("aten.") && name.matches('.').count() == 1);
        }
        let sorted = |list: &[&str]| list.windows(2).all(|p| p[0] < p[1]);
        assert!(sorted(
            &WRITTEN_AS.iter().map(|(n, _)| *n).collect::<Vec<_>>()
        ));
        let products: Vec<&str> = rows("aten.mm").iter().map(|r| r.name).collect();
        assert_eq!(products, ["MatMul"]);
        assert!(rows("aten.nothing").is_empty());
    }
}
