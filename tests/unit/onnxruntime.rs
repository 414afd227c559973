//! Collectives as ops of ONNX Runtime.

use ckpt_opt::emit::onnx::{Weights, package};
use ckpt_opt::emit::onnxruntime::use_onnxruntime;
use ckpt_opt::frontend::onnx::proto::{ModelProto, NodeProto};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::{Result, text};

/// Writes a graph of `x: f32[4, 6]` and the slice of 12 elements of a rank.
fn written(dtype: &str, nodes: &str) -> Result<ModelProto> {
    let source = format!("graph @g imported (%x: {dtype}[4, 6]) -> (%y) {{\n{nodes}\n}}\n");
    let mut graph = text::parse(&source)?;
    infer(&mut graph)?;
    let plain = package(&graph, &Weights::Inside)?.model;
    let warnings = use_onnxruntime(&mut graph)?;
    let model = package(&graph, &Weights::Inside)?.model;
    assert_eq!(!warnings.is_empty(), plain != model);
    Ok(model)
}

/// Formats a node: its op, integer attributes, inputs and outputs.
fn shown(node: &NodeProto) -> String {
    let attrs: Vec<String> = node
        .attribute
        .iter()
        .map(|a| format!("{}={}", a.name(), a.i()))
        .collect();
    let (ins, outs) = (node.input.join(","), node.output.join(","));
    format!(
        "{}.{} {} {ins} -> {outs}",
        node.domain(),
        node.op_type(),
        attrs.join(",")
    )
}

fn nodes(source: &str) -> Vec<String> {
    let model = written("f32", source).unwrap_or_else(|e| panic!("{e}"));
    let mut imports: Vec<_> = model.opset_import.iter().map(|i| i.domain()).collect();
    imports.retain(|domain| !domain.is_empty());
    assert_eq!(imports, ["com.microsoft"]);
    model.graph.unwrap().node.iter().map(shown).collect()
}

#[test]
fn sums_and_gathers_are_ops_of_onnx_runtime() {
    let source = "  %a = AllReduce %x {ranks=2}\n  %b = StartAllReduce %a {bucket=64, ranks=2}\n  %c = Wait %b\n  \
                  %y = ConcatRanks %c {ranks=2}";
    assert_eq!(
        nodes(source),
        [
            "com.microsoft.NcclAllReduce group_type=0 x -> a",
            "com.microsoft.NcclAllReduce group_type=0 a -> b",
            ".Identity  b -> c",
            "com.microsoft.AllGather axis=0,group_size=2 c -> y",
        ]
    );
    let source = "  %a = AllReduce %x {ranks=2}\n  %y = AllReduce %a {group=\"tp\", ranks=4}";
    assert_eq!(
        nodes(source),
        [
            "com.microsoft.NcclAllReduce group_type=1 x -> a",
            "com.microsoft.NcclAllReduce group_type=4 a -> y",
        ]
    );
    let plain = written("f32", "  %y = Relu %x").unwrap().graph.unwrap();
    assert_eq!(
        plain.node.iter().map(shown).collect::<Vec<_>>(),
        [".Relu  x -> y"]
    );
}

#[test]
fn what_onnx_runtime_has_no_op_for_is_refused_by_name() {
    let of_rank = "it depends on the number of the rank";
    for (dtype, source, node, why) in [
        (
            "f32",
            "  %y = ReduceScatter %x {ranks=2}",
            "ReduceScatter",
            of_rank,
        ),
        ("f32", "  %y = OwnSlice %x {ranks=5}", "OwnSlice", of_rank),
        (
            "f32",
            "  %s, %p = StartReduceScatter %x {ranks=2}\n  %y = Wait %p, %s",
            "StartReduceScatter",
            of_rank,
        ),
        (
            "bf16",
            "  %y = AllReduce %x {ranks=2}",
            "AllReduce",
            "found: bf16",
        ),
        (
            "f32",
            "  %a = AllReduce %x {group=\"tp\", ranks=2}\n  %y = ConcatRanks %a {ranks=2}",
            "ConcatRanks",
            "over all ranks",
        ),
    ] {
        let error = written(dtype, source).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(
            text.contains(why) && text.contains(&format!("({node})")),
            "{text}"
        );
    }
}
