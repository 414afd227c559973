//! Foreign ops are read as the standard nodes they stand for: which nodes, under which names, and what is refused.
//!
//! Values and gradients are compared with ONNX Runtime's by `tools/foreign_ops.py`, which needs the Python environment
//! that `tools/test --setup` makes.

use ckpt_opt::frontend::onnx::import::{Imported, import};
use ckpt_opt::frontend::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};
use ckpt_opt::frontend::onnx::tensor;
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Graph, Phase, Ty};

const ORT: &str = "com.microsoft";

/// One node under test and its operands: name, element type, sizes or names of sizes; an empty name for none.
struct One {
    node: NodeProto,
    inputs: Vec<ValueInfoProto>,
    opset: i64,
    initializers: Vec<TensorProto>,
    outputs: Vec<String>,
}

fn one(domain: &str, op: &str, operands: &[(&str, DType, &[&str])], results: &[&str]) -> One {
    let node = NodeProto {
        name: Some("block/op".into()),
        domain: Some(domain.into()),
        op_type: Some(op.into()),
        input: operands.iter().map(|(n, ..)| n.to_string()).collect(),
        output: results.iter().map(|n| n.to_string()).collect(),
        metadata_props: vec![StringStringEntryProto::new("from", "a test")],
        ..NodeProto::default()
    };
    let given = operands.iter().filter(|(n, ..)| !n.is_empty());
    One {
        node,
        inputs: given.map(|(n, d, dims)| input(n, *d, dims)).collect(),
        opset: 23,
        initializers: Vec::new(),
        outputs: results
            .iter()
            .filter(|n| !n.is_empty())
            .map(|n| n.to_string())
            .collect(),
    }
}

fn input(name: &str, dtype: DType, dims: &[&str]) -> ValueInfoProto {
    let dim = dims.iter().map(|d| Dimension {
        denotation: None,
        value: Some(match d.parse() {
            Ok(n) => dimension::Value::DimValue(n),
            Err(_) => dimension::Value::DimParam(d.to_string()),
        }),
    });
    let tensor = type_proto::Tensor {
        elem_type: Some(dtype.onnx_code()),
        shape: Some(TensorShapeProto { dim: dim.collect() }),
    };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto {
            denotation: None,
            value: Some(type_proto::Value::TensorType(tensor)),
        }),
        ..ValueInfoProto::default()
    }
}

impl One {
    fn int(self, name: &str, value: i64) -> One {
        self.attribute(AttributeProto {
            name: Some(name.into()),
            r#type: Some(AttributeType::Int as i32),
            i: Some(value),
            ..AttributeProto::default()
        })
    }

    fn float(self, name: &str, value: f32) -> One {
        self.attribute(AttributeProto {
            name: Some(name.into()),
            r#type: Some(AttributeType::Float as i32),
            f: Some(value),
            ..AttributeProto::default()
        })
    }

    fn attribute(mut self, attribute: AttributeProto) -> One {
        self.node.attribute.push(attribute);
        self
    }

    fn opset(mut self, opset: i64) -> One {
        self.opset = opset;
        self
    }

    /// A boolean scalar that is part of the file.
    fn flag(mut self, name: &str, on: bool) -> One {
        self.initializers.push(TensorProto {
            name: Some(name.into()),
            data_type: Some(DType::Bool.onnx_code()),
            raw_data: Some(vec![u8::from(on)].into()),
            ..TensorProto::default()
        });
        self
    }

    fn outputs(mut self, outputs: &[&str]) -> One {
        self.outputs = outputs.iter().map(|n| n.to_string()).collect();
        self
    }

    fn read(self) -> Result<Imported> {
        let import_of = |domain: &str, version| OperatorSetIdProto {
            domain: Some(domain.into()),
            version: Some(version),
        };
        let mut imports = vec![import_of("", self.opset)];
        if !self.node.domain().is_empty() {
            imports.push(import_of(self.node.domain(), 1));
        }
        let outputs = self.outputs.iter().map(|name| ValueInfoProto {
            name: Some(name.clone()),
            ..ValueInfoProto::default()
        });
        let model = ModelProto {
            ir_version: Some(10),
            opset_import: imports,
            graph: Some(GraphProto {
                name: Some("g".into()),
                output: outputs.collect(),
                node: vec![self.node],
                input: self.inputs,
                initializer: self.initializers,
                ..GraphProto::default()
            }),
            ..ModelProto::default()
        };
        let mut files = ckpt_opt::frontend::onnx::external::Files::beside("none.onnx".as_ref());
        let imported = import(&model, &mut |t| tensor::read(t, &mut files))?;
        ckpt_passes::ir::verify::verify(&imported.graph)?;
        Ok(imported)
    }

    /// A graph whose nodes all have the standing of the node they come from.
    fn graph(self) -> Graph {
        let graph = self.read().unwrap_or_else(|e| panic!("{e}")).graph;
        assert_eq!(graph.phase, Phase::Typed);
        for id in graph.order() {
            let node = graph.node(*id);
            assert!(node.name.starts_with("block/op/"), "{}", node.name);
            assert_eq!(node.loc.node, "block/op");
            assert_eq!(node.meta.get("from").map(String::as_str), Some("a test"));
        }
        graph
    }

    /// The words of the error.
    fn refusal(self) -> String {
        match self.read() {
            Ok(_) => panic!("it was read"),
            Err(e) => e.to_string(),
        }
    }
}

fn ops(graph: &Graph) -> String {
    let names: Vec<&str> = graph
        .order()
        .iter()
        .map(|n| graph.node(*n).op.name)
        .collect();
    names.join(" ")
}

fn output(graph: &Graph, slot: usize) -> (String, String) {
    let value = graph.value(graph.outputs()[slot]);
    (
        value.name.clone(),
        value.ty.as_ref().map_or("?".into(), Ty::to_string),
    )
}

const X: (&str, DType, &[&str]) = ("x", DType::F32, &["b", "s", "8"]);
const SKIP: (&str, DType, &[&str]) = ("skip", DType::F32, &["b", "s", "8"]);
const NONE: (&str, DType, &[&str]) = ("", DType::F32, &[]);

fn vector(name: &'static str) -> (&'static str, DType, &'static [&'static str]) {
    (name, DType::F32, &["8"])
}

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
    let said = one("", "Attention", &[Q, K, V], &["y", "", "", "qk"]).refusal();
    assert!(said.contains("`qk` is not computed"), "{said}");
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
    assert!(heads(&[q], &["y"]).refusal().contains("a packed query"));
    let past = ("past", DType::F32, &["b", "2", "p", "4"] as &[_]);
    let [a, b, c] = NO_PAST;
    let said = heads(&[q, k, v, a, b, c, past], &["y"]).refusal();
    assert!(said.contains("`past_key`"), "{said}");
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
    assert!(said.contains("half the width that turns"), "{said}");
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
fn dropout_that_drops_nothing() {
    let half = ("ratio", DType::F32, &[] as &[_]);
    let flag = ("on", DType::Bool, &[] as &[_]);
    let dropout = |results: &[&str]| {
        let mut one = one("", "Dropout", &[X, half, flag], results).opset(13);
        one.inputs.retain(|i| i.name() != "on");
        one
    };
    let graph = dropout(&["y", "mask"]).flag("on", false).graph();
    assert_eq!(ops(&graph), "Identity Shape Expand");
    assert_eq!(output(&graph, 1), ("mask".into(), "bool[b, s, 8]".into()));
    let old = one("", "Dropout", &[X], &["y", "mask"])
        .opset(11)
        .float("ratio", 0.3);
    assert_eq!(ops(&old.outputs(&["y"]).graph()), "Identity");
    // What does drop stays as it is, and has no gradient here.
    let drops = dropout(&["y"])
        .flag("on", true)
        .read()
        .unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(ops(&drops.graph), "Opaque");
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
        .arg(root.join("tools/foreign_ops.py"))
        .args(["--ckpt-opt", env!("CARGO_BIN_EXE_ckpt-opt")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{said}");
}
