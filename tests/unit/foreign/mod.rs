//! Foreign ops are read as the standard nodes they stand for: which nodes, under which names, and what is refused.
//!
//! Values and gradients are compared with ONNX Runtime's by `python tools foreign_ops`, which needs the Python environment
//! that `tools/test --setup` makes.

mod attention;
mod conv;
mod dropout;
mod numbers;
mod one;
mod sequences;

use ckpt_passes::ir::{DType, Graph};
use one::*;

#[test]
fn residual_norms_give_their_sum_too() {
    let operands = [X, SKIP, vector("g"), vector("beta"), vector("bias")];
    let graph = one(
        ORT,
        "SkipLayerNormalization",
        &operands,
        &["y", "", "", "sum"],
    )
    .float("epsilon", 1e-3)
    .graph();
    assert_eq!(ops(&graph), "Add Add LayerNormalization");
    assert_eq!(output(&graph, 0), ("y".into(), "f32[b, s, 8]".into()));
    assert_eq!(output(&graph, 1), ("sum".into(), "f32[b, s, 8]".into()));
    let norm = graph.node(graph.order()[2]);
    assert_eq!(norm.attrs.float("epsilon"), 1e-3);

    let graph = one(
        ORT,
        "SkipSimplifiedLayerNormalization",
        &operands[..3],
        &["y"],
    )
    .graph();
    assert_eq!(ops(&graph), "Add RMSNormalization");
    assert_eq!(graph.node(graph.order()[1]).attrs.float("epsilon"), 1e-12);
    for domain in ["", ORT] {
        let graph = one(
            domain,
            "SimplifiedLayerNormalization",
            &[X, vector("g")],
            &["y"],
        )
        .graph();
        assert_eq!(ops(&graph), "RMSNormalization");
        assert_eq!(graph.node(graph.order()[0]).attrs.float("epsilon"), 1e-5);
    }
}

#[test]
fn statistics_may_be_named_but_not_read() {
    let operands = [X, SKIP, vector("g"), vector("beta")];
    let named = || {
        one(
            ORT,
            "SkipLayerNormalization",
            &operands,
            &["y", "mean", "inv"],
        )
    };
    named().outputs(&["y"]).graph();
    let said = named().refusal();
    assert!(
        said.contains("`mean` is not computed") && said.contains("block/op"),
        "{said}"
    );
}

#[test]
fn embeddings_are_gathers_and_a_norm() {
    let ids: &[&str] = &["b", "s"];
    let operands = [
        ("ids", DType::I32, ids),
        ("segments", DType::I32, ids),
        ("words", DType::F32, &["99", "8"]),
        ("places", DType::F32, &["16", "8"]),
        ("kinds", DType::F32, &["2", "8"]),
        vector("g"),
        vector("beta"),
        ("mask", DType::I32, ids),
    ];
    let op = "EmbedLayerNormalization";
    let graph = one(ORT, op, &operands, &["y", "index", "sum"]).graph();
    assert_eq!(
        ops(&graph),
        "Gather Shape Gather Range Gather Add Gather Add LayerNormalization Equal Cast ReduceSum"
    );
    assert_eq!(output(&graph, 0).1, "f32[b, s, 8]");
    assert_eq!(output(&graph, 1), ("index".into(), "i32[b]".into()));
    let mut lone = operands;
    lone[1] = NONE;
    let said = one(ORT, op, &lone, &["y", ""]).refusal();
    assert!(said.contains("segment"), "{said}");
}

#[test]
fn gelus() {
    let read = |op, operands: &[_]| one(ORT, op, operands, &["y"]).graph();
    let kind = |graph: &Graph| {
        let last = graph.node(*graph.order().last().unwrap());
        format!(
            "{} {}",
            ops(graph),
            last.attrs.opt_str("approximate").unwrap_or("")
        )
    };
    assert_eq!(kind(&read("Gelu", &[X])), "Gelu none");
    assert_eq!(
        kind(&read("BiasGelu", &[X, vector("bias")])),
        "Add Gelu none"
    );
    assert_eq!(kind(&read("FastGelu", &[X])), "Gelu tanh");
    assert_eq!(
        kind(&read("FastGelu", &[X, vector("bias")])),
        "Add Gelu tanh"
    );
    assert_eq!(ops(&read("QuickGelu", &[X])), "Mul Sigmoid Mul");
}

#[test]
fn fused_products() {
    let operands = [X, ("w", DType::F32, &["5", "8"] as &[_])];
    let fused = || one(ORT, "FusedMatMul", &operands, &["y"]).int("transB", 1);
    let graph = fused().float("alpha", 0.5).graph();
    assert_eq!(ops(&graph), "Transpose MatMul Mul");
    assert_eq!(output(&graph, 0).1, "f32[b, s, 5]");
    assert_eq!(ops(&fused().graph()), "Transpose MatMul");
    let said = fused().int("transBatchB", 1).refusal();
    assert!(
        said.contains("`transBatchB` = 1 is not supported"),
        "{said}"
    );
    let said = one(ORT, "FusedMatMul", &[vector("a"), operands[1]], &["y"]).int("transA", 1);
    assert!(said.refusal().contains("of a vector"));
}

#[test]
fn rotary_tables_broadcast() {
    let x = ("x", DType::F32, &["b", "3", "s", "8"] as &[_]);
    let table = |name| (name, DType::F32, &["1", "s", "4"] as &[_]);
    let rotary = || {
        one(
            "",
            "RotaryEmbedding",
            &[x, table("cos"), table("sin")],
            &["y"],
        )
    };
    let graph = rotary().graph();
    assert_eq!(
        ops(&graph),
        "Unsqueeze Unsqueeze Split Mul Mul Mul Mul Sub Add Concat"
    );
    assert_eq!(output(&graph, 0).1, "f32[b, 3, s, 8]");
    rotary().int("interleaved", 1).graph();
    let said = rotary().int("rotary_embedding_dim", 4).refusal();
    assert!(said.contains("half the rotated width"), "{said}");
    let said = rotary().int("rotary_embedding_dim", 5).refusal();
    assert!(said.contains("5 of 8"), "{said}");
    let flat = ("x", DType::F32, &["b", "s", "24"] as &[_]);
    let said = one(
        "",
        "RotaryEmbedding",
        &[flat, table("cos"), table("sin")],
        &["y"],
    )
    .refusal();
    assert!(said.contains("`num_heads` must be given"), "{said}");
    let places = ("places", DType::I64, &["b", "s"] as &[_]);
    let rows = |name| (name, DType::F32, &["64", "4"] as &[_]);
    let ort = || {
        one(
            ORT,
            "RotaryEmbedding",
            &[flat, places, rows("cos"), rows("sin")],
            &["y"],
        )
    };
    assert_eq!(output(&ort().graph(), 0).1, "f32[b, s, 24]");
    assert!(ort().float("scale", 2.0).refusal().contains("`scale` = 2"));
    assert!(
        ort()
            .int("is_packed_batching", 1)
            .refusal()
            .contains("`is_packed_batching` = 1")
    );
}

#[test]
fn results_keep_their_names_and_are_not_defined_twice() {
    let said = one(
        ORT,
        "SkipLayerNormalization",
        &[X, SKIP, vector("g")],
        &["y", "", "", "y"],
    );
    assert!(
        said.outputs(&["y"])
            .refusal()
            .contains("`y` is defined twice")
    );
    let said = one(ORT, "Gelu", &[X], &["y", "z"])
        .outputs(&["y"])
        .refusal();
    assert!(said.contains("more results than the op has"), "{said}");
    let said = one(ORT, "BiasGelu", &[X], &["y"]).refusal();
    assert!(said.contains("operand 1 (`B`) is missing"), "{said}");
    let said = one(ORT, "Gelu", &[X, vector("g")], &["y"]).refusal();
    assert!(said.contains("operand 1 is not supported"), "{said}");
    let said = one(ORT, "QuickGelu", &[X], &["y"])
        .int("alpha", 1)
        .refusal();
    assert!(said.contains("`alpha` is of the wrong kind"), "{said}");
}

#[cfg(feature = "torch")]
#[test]
fn values_and_gradients_are_those_of_onnx_runtime() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join(".venv/bin/python");
    assert!(
        python.exists(),
        "no Python environment: run `tools/test --setup`"
    );
    let output = std::process::Command::new(python)
        .arg(root.join("tools"))
        .arg("foreign_ops")
        .args(["--ckpt-opt", env!("CARGO_BIN_EXE_ckpt-opt")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{said}");
}
