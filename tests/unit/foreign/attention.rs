//! Attention in its spellings.

use super::one::*;
use ckpt_passes::ir::{DType, Graph};

const Q: (&str, DType, &[&str]) = ("q", DType::F32, &["b", "4", "s", "8"]);
const K: (&str, DType, &[&str]) = ("k", DType::F32, &["b", "2", "t", "8"]);
const V: (&str, DType, &[&str]) = ("v", DType::F32, &["b", "2", "t", "6"]);
const NO_PAST: [(&str, DType, &[&str]); 3] = [NONE, NONE, NONE];

#[test]
fn attention_of_the_standard() {
    let grouped = || one("", "Attention", &[Q, K, V], &["y"]);
    let graph = grouped().graph();
    let repeat = "Unsqueeze Expand Shape Shape Concat Reshape";
    assert_eq!(
        ops(&graph),
        format!("{repeat} {repeat} Mul Transpose MatMul Softmax MatMul")
    );
    assert_eq!(output(&graph, 0).1, "f32[b, 4, s, 6]");

    let equal = [
        Q,
        ("k", DType::F32, &["b", "4", "t", "8"] as &[_]),
        ("v", DType::F32, &["b", "4", "t", "6"]),
    ];
    let attention = |operands: &[_]| one("", "Attention", operands, &["y"]);
    assert_eq!(
        ops(&attention(&equal).float("scale", 1.0).graph()),
        "Transpose MatMul Softmax MatMul"
    );
    let capped = attention(&equal)
        .float("scale", 1.0)
        .float("softcap", 3.0)
        .graph();
    assert_eq!(ops(&capped), "Transpose MatMul Mul Tanh Mul Softmax MatMul");
    let precise = [Q, equal[1], equal[2]].map(|(n, _, dims)| (n, DType::F16, dims));
    let precise = attention(&precise)
        .float("scale", 1.0)
        .int("softmax_precision", 1)
        .graph();
    assert_eq!(ops(&precise), "Transpose MatMul Cast Softmax Cast MatMul");

    let mask = ("mask", DType::Bool, &["s", "t"] as &[_]);
    let masked = attention(&[equal[0], equal[1], equal[2], mask])
        .float("scale", 1.0)
        .graph();
    assert_eq!(
        ops(&masked),
        "Where ReduceMax Greater Where Transpose MatMul Add Softmax MatMul Where"
    );
}

#[test]
fn attention_takes_and_gives_keys_and_values() {
    let past_k = ("past_k", DType::F32, &["b", "2", "p", "8"] as &[_]);
    let past_v = ("past_v", DType::F32, &["b", "2", "p", "6"] as &[_]);
    let graph = one(
        "",
        "Attention",
        &[Q, K, V, NONE, past_k, past_v],
        &["y", "all_k", "all_v"],
    )
    .int("is_causal", 1)
    .graph();
    assert_eq!(
        output(&graph, 1),
        ("all_k".into(), "f32[b, 2, p + t, 8]".into())
    );
    assert_eq!(output(&graph, 2).0, "all_v");
    let graph = one("", "Attention", &[Q, K, V], &["y", "all_k"]).graph();
    assert_eq!(
        output(&graph, 1),
        ("all_k".into(), "f32[b, 2, t, 8]".into())
    );
    let said = one("", "Attention", &[Q, K, V, NONE, past_k], &["y"]).refusal();
    assert!(said.contains("go together"), "{said}");
}

#[test]
fn attention_on_flat_operands() {
    let operands = [
        ("q", DType::F32, &["b", "s", "32"] as &[_]),
        ("k", DType::F32, &["b", "t", "16"]),
        ("v", DType::F32, &["b", "t", "6"]),
    ];
    let flat = || one("", "Attention", &operands, &["y"]).int("q_num_heads", 4);
    let graph = flat().int("kv_num_heads", 2).graph();
    assert_eq!(output(&graph, 0).1, "f32[b, s, 12]");
    let said = flat().refusal();
    assert!(said.contains("`kv_num_heads` must be given"), "{said}");
    let said = flat().int("kv_num_heads", 5).refusal();
    assert!(said.contains("5 heads do not divide"), "{said}");
    let shown = |mode| {
        one("", "Attention", &[Q, K, V], &["y", "", "", "qk"])
            .int("qk_matmul_output_mode", mode)
            .float("softcap", 2.0)
    };
    for (mode, op) in [(0, "MatMul"), (1, "Mul"), (2, "Mul"), (3, "Softmax")] {
        let graph = shown(mode).graph();
        let qk = graph.def_node(graph.outputs()[1]).unwrap();
        assert_eq!(graph.node(qk).op.name, op, "mode {mode}");
    }
    let said = shown(4).refusal();
    assert!(said.contains("`qk_matmul_output_mode` = 4"), "{said}");
    let said = one("", "Attention", &[Q, K, V], &["y"])
        .int("invented", 1)
        .refusal();
    assert!(
        said.contains("attribute `invented` is not supported"),
        "{said}"
    );
}

#[test]
fn attention_with_packed_weights() {
    let weights = ("w", DType::F32, &["8", "24"] as &[_]);
    let bias = ("bias", DType::F32, &["24"] as &[_]);
    let packed = |more: &[_]| {
        let operands: Vec<_> = [X, weights, bias].iter().chain(more).copied().collect();
        one(ORT, "Attention", &operands, &["y"]).int("num_heads", 2)
    };
    let graph = packed(&[]).graph();
    assert_eq!(
        ops(&graph),
        "MatMul Add Split Reshape Transpose Reshape Transpose Reshape Transpose Mul Transpose MatMul Softmax MatMul \
         Transpose Reshape"
    );
    assert_eq!(output(&graph, 0).1, "f32[b, s, 8]");
    for dims in [&["b", "s"] as &[_], &["b", "s", "s"], &["b"]] {
        packed(&[("mask", DType::I32, dims)]).graph();
    }
    for (dims, shape) in [
        (&["2"] as &[_], "i32[2]"),
        (&["b", "1", "s", "s"], "i32[b, 1, s, s]"),
    ] {
        let said = packed(&[("mask", DType::I32, dims)]).refusal();
        assert!(
            said.contains("a mask of this shape is not supported") && said.contains(shape),
            "{said}"
        );
    }
    let past = ("past", DType::F32, &["2", "b", "2", "p", "4"] as &[_]);
    let said = packed(&[NONE, past]).refusal();
    assert!(said.contains("`past`"), "{said}");
    let said = packed(&[]).int("do_rotary", 1).refusal();
    assert!(said.contains("`do_rotary` = 1 is not supported"), "{said}");
}

#[test]
fn attention_of_many_heads() {
    let heads = |operands: &[_], results: &[&str]| {
        one(ORT, "MultiHeadAttention", operands, results).int("num_heads", 2)
    };
    let (q, k, v) = (X, SKIP, ("v", DType::F32, &["b", "s", "6"] as &[_]));
    let bias = ("bias", DType::F32, &["22"] as &[_]);
    let graph = heads(&[q, k, v, bias], &["y", "keys"]).graph();
    assert_eq!(output(&graph, 0).1, "f32[b, s, 6]");
    assert_eq!(output(&graph, 1).1, "f32[b, 2, s, 4]");
    assert!(heads(&[q], &["y"]).refusal().contains("`a packed query`"));
    let packed = ("q", DType::F32, &["b", "s", "2", "3", "4"] as &[_]);
    let graph = heads(&[packed], &["y"]).graph();
    assert!(
        ops(&graph).starts_with("Split Reshape Reshape Reshape"),
        "{}",
        ops(&graph)
    );
    assert_eq!(output(&graph, 0).1, "f32[b, s, 8]");
    let pair = ("k", DType::F32, &["b", "t", "2", "2", "4"] as &[_]);
    assert_eq!(
        output(&heads(&[q, pair], &["y"]).graph(), 0).1,
        "f32[b, s, 8]"
    );
    let said = heads(&[q, packed], &["y"]).refusal();
    assert!(
        said.contains("a packed key does not hold 2 operands"),
        "{said}"
    );
    let apart = ("k", DType::F32, &["b", "2", "t", "4"] as &[_]);
    let graph = heads(&[q, apart, ("v", apart.1, apart.2)], &["y"]).graph();
    assert_eq!(output(&graph, 0).1, "f32[b, s, 8]");
    let past = ("past", DType::F32, &["b", "2", "p", "4"] as &[_]);
    let [a, b, c] = NO_PAST;
    let said = heads(&[q, k, v, a, b, c, past], &["y"]).refusal();
    assert!(said.contains("`past_key`"), "{said}");
}

#[test]
fn attention_of_grouped_queries() {
    let wide = ("q", DType::F32, &["b", "s", "64"] as &[_]);
    let narrow = |name| (name, DType::F32, &["b", "s", "32"] as &[_]);
    let lengths = ("lengths", DType::I32, &["b"] as &[_]);
    let total = ("total", DType::I32, &[] as &[_]);
    let table = |name| (name, DType::F32, &["64", "8"] as &[_]);
    let plain = [wide, narrow("k"), narrow("v"), NONE, NONE, lengths, total];
    let grouped = |operands: &[_]| {
        one(
            ORT,
            "GroupQueryAttention",
            operands,
            &["y", "keys", "values"],
        )
        .int("num_heads", 4)
        .int("kv_num_heads", 2)
    };
    let graph = grouped(&plain).graph();
    assert_eq!(output(&graph, 0), ("y".into(), "f32[b, s, 64]".into()));
    assert_eq!(
        output(&graph, 1),
        ("keys".into(), "f32[b, 2, s, 16]".into())
    );
    let turned: Vec<_> = plain
        .into_iter()
        .chain([table("cos"), table("sin")])
        .collect();
    let graph = grouped(&turned).int("do_rotary", 1).graph();
    assert_eq!(ops(&graph).matches("Sub").count(), 2);
    // Tables that nothing turns by are not read; a window is one more comparison.
    let graph = grouped(&turned).int("local_window_size", 3).graph();
    assert_eq!(ops(&graph).matches("LessOrEqual").count(), 2);
    assert!(!ops(&graph).contains("Split"));
    let packed = [
        ("q", DType::F32, &["b", "s", "128"] as &[_]),
        NONE,
        NONE,
        NONE,
        NONE,
        lengths,
        total,
    ];
    assert_eq!(output(&grouped(&packed).graph(), 2).1, "f32[b, 2, s, 16]");

    let mut cached = plain;
    cached[3] = ("past", DType::F32, &["b", "2", "p", "16"]);
    let said = grouped(&cached).refusal();
    assert!(said.contains("`past_key`) that is not empty"), "{said}");
    cached[3] = ("past", DType::F32, &["b", "2", "0", "16"]);
    grouped(&cached).graph();
    let said = grouped(&plain).int("local_window_size", 0).refusal();
    assert!(said.contains("`local_window_size` = 0"), "{said}");
    let joined = |graph: &Graph| {
        let ops = ops(graph);
        ops.contains("Concat") && ops.contains("Slice")
    };
    assert!(!joined(&grouped(&plain).graph()));
    assert!(joined(&grouped(&plain).int("smooth_softmax", 1).graph()));
    let mut sunk = plain.to_vec();
    sunk.resize(11, NONE);
    sunk.push(("sink", DType::F32, &["4"]));
    assert!(joined(&grouped(&sunk).graph()));
    sunk[11].2 = &["4", "1"];
    let said = grouped(&sunk).refusal();
    assert!(said.contains("head_sink"), "{said}");
}
