//! Files that are broken or mean harm: each gives the documented kind of error, and nothing else happens.

mod external;

use ckpt_opt::frontend;
use ckpt_opt::frontend::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    SparseTensorProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};
use ckpt_passes::ir::DType;
use ckpt_passes::{Error, Kind};
use prost::Message;
use std::path::Path;

fn info(name: &str, elem: i32, dims: &[i64]) -> ValueInfoProto {
    let dim = |d: &i64| Dimension {
        denotation: None,
        value: Some(dimension::Value::DimValue(*d)),
    };
    let shape = TensorShapeProto {
        dim: dims.iter().map(dim).collect(),
    };
    let tensor = type_proto::Tensor {
        elem_type: Some(elem),
        shape: Some(shape),
    };
    let ty = TypeProto {
        denotation: None,
        value: Some(type_proto::Value::TensorType(tensor)),
    };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(ty),
        ..Default::default()
    }
}

fn node(op: &str, ins: &[&str], outs: &[&str]) -> NodeProto {
    NodeProto {
        op_type: Some(op.into()),
        name: Some(format!("the_{op}")),
        input: ins.iter().map(|s| s.to_string()).collect(),
        output: outs.iter().map(|s| s.to_string()).collect(),
        ..Default::default()
    }
}

fn weight(dims: &[i64], raw: &[u8]) -> TensorProto {
    TensorProto {
        name: Some("w".into()),
        data_type: Some(1),
        dims: dims.to_vec(),
        raw_data: Some(raw.to_vec().into()),
        ..Default::default()
    }
}

/// y = x + w, all f32[2].
fn good() -> ModelProto {
    let graph = GraphProto {
        name: Some("g".into()),
        node: vec![node("Add", &["x", "w"], &["y"])],
        initializer: vec![weight(&[2], &[0; 8])],
        input: vec![info("x", 1, &[2])],
        output: vec![info("y", 1, &[2])],
        ..Default::default()
    };
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![OperatorSetIdProto {
            domain: None,
            version: Some(18),
        }],
        graph: Some(graph),
        ..Default::default()
    }
}

fn changed(change: impl FnOnce(&mut GraphProto)) -> ModelProto {
    let mut model = good();
    change(model.graph.as_mut().unwrap());
    model
}

fn read(dir: &Path, model: &ModelProto) -> Result<frontend::Model, Box<Error>> {
    let path = dir.join("m.onnx");
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    let mut read = frontend::read(&path)?;
    ckpt_passes::transform::infer::infer(&mut read.graph)?;
    Ok(read)
}

#[track_caller]
fn refused(model: &ModelProto, code: &str, says: &str) {
    let dir = tempfile::tempdir().unwrap();
    refused_in(dir.path(), model, code, says);
}

#[track_caller]
fn refused_in(dir: &Path, model: &ModelProto, code: &str, says: &str) {
    let e = match read(dir, model) {
        Ok(_) => panic!("the file was accepted"),
        Err(e) => e,
    };
    assert_eq!(
        (e.kind(), e.exit_code(), e.code()),
        (Kind::Model, 2, code),
        "{e}"
    );
    assert!(e.to_string().contains(says), "{e}\n  lacks: {says}");
}

#[test]
fn the_good_one_is_good() {
    let dir = tempfile::tempdir().unwrap();
    let model = read(dir.path(), &good()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(model.graph.order().len(), 1);
}

#[test]
fn other_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    for (bytes, says) in [
        (&b"import torch\nprint('x')\n"[..], "text file"),
        (b"", "empty file"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"\x10\0\0\0\0\0\0\0{\"a\":1}", "safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let e = frontend::read(&path).err().expect(says);
        assert_eq!((e.exit_code(), e.code()), (2, "format"), "{e}");
        assert!(e.to_string().contains(says), "{e}");
    }
    assert_eq!(frontend::read(dir.path()).err().unwrap().exit_code(), 2);
    assert_eq!(
        frontend::read(&dir.path().join("none.onnx"))
            .err()
            .unwrap()
            .exit_code(),
        2
    );
}

#[test]
fn every_truncation_and_every_flipped_byte_is_survived() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let bytes = good().encode_to_vec();
    let check = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        if let Err(e) = frontend::read(&path) {
            assert_eq!(e.exit_code(), 2, "{e}");
        }
    };
    for end in 0..bytes.len() {
        check(&bytes[..end]);
    }
    for at in 0..bytes.len() {
        for flip in [0x01, 0x08, 0x80, 0xff] {
            let mut bad = bytes.clone();
            bad[at] ^= flip;
            check(&bad);
        }
    }
}

#[test]
fn deep_nesting_does_not_exhaust_the_stack() {
    // An attribute holding a graph holding a node holding an attribute …, far beyond the decoder's limit.
    let mut bytes: Vec<u8> = Vec::new();
    for i in 0..20_000 {
        let tag = [0x32, 0x0a, 0x2a][i % 3];
        let mut outer = vec![tag];
        prost::encoding::encode_varint(bytes.len() as u64, &mut outer);
        outer.append(&mut bytes);
        bytes = outer;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let mut file = good().encode_to_vec();
    file.push(0x3a);
    prost::encoding::encode_varint(bytes.len() as u64, &mut file);
    file.extend(bytes);
    std::fs::write(&path, file).unwrap();
    assert_eq!(frontend::read(&path).err().unwrap().exit_code(), 2);
}

#[test]
fn shapes_and_contents_must_agree() {
    let huge = |dims: &[i64]| {
        changed(|g| {
            g.initializer[0] = TensorProto {
                raw_data: None,
                ..weight(dims, &[])
            }
        })
    };
    refused(&huge(&[1_000_000_000]), "data", "no content");
    refused(&huge(&[i64::MAX, i64::MAX]), "shape", "63 bits");
    refused(&huge(&[i64::MAX / 4]), "data", "no content");
    refused(&huge(&[-1]), "shape", "negative");
    refused(
        &changed(|g| g.initializer[0] = weight(&[2], &[0; 7])),
        "data",
        "wrong size",
    );
    refused(
        &changed(|g| g.initializer[0] = weight(&[3], &[0; 8])),
        "data",
        "wrong size",
    );
    refused(
        &changed(|g| g.initializer[0].data_type = Some(8)),
        "type",
        "STRING",
    );
    refused(
        &changed(|g| g.initializer[0].data_type = Some(99)),
        "type",
        "99",
    );
    refused(
        &changed(|g| g.initializer[0].float_data = vec![0.0; 2]),
        "data",
        "more than one content",
    );
    refused(&changed(|g| g.input[0] = info("x", 1, &[-3])), "type", "-3");
    refused(
        &changed(|g| {
            g.initializer[0] = TensorProto {
                raw_data: None,
                data_type: Some(3),
                int32_data: vec![1, 300],
                ..weight(&[2], &[])
            }
        }),
        "data",
        "300 does not fit i8",
    );
    refused(
        &changed(|g| {
            g.initializer[0].data_type = Some(9);
            g.initializer[0].raw_data = Some(vec![1, 2].into());
        }),
        "data",
        "boolean",
    );
    refused(
        &changed(|g| g.initializer[0] = weight(&[3], &[0; 12])),
        "shape",
        "broadcast",
    );
}

#[test]
fn typed_fields_become_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(TensorProto, DType, Vec<u8>); 5] = [
        (
            TensorProto {
                float_data: vec![1.0, -2.0],
                ..weight(&[2], &[])
            },
            DType::F32,
            [1.0f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat(),
        ),
        (
            TensorProto {
                data_type: Some(16),
                int32_data: vec![0x3f80, 0xc000],
                ..weight(&[2], &[])
            },
            DType::BF16,
            vec![0x80, 0x3f, 0x00, 0xc0],
        ),
        (
            TensorProto {
                data_type: Some(9),
                int32_data: vec![1, 0],
                ..weight(&[2], &[])
            },
            DType::Bool,
            vec![1, 0],
        ),
        (
            TensorProto {
                data_type: Some(3),
                int32_data: vec![-1, 5],
                ..weight(&[2], &[])
            },
            DType::I8,
            vec![255, 5],
        ),
        (
            TensorProto {
                data_type: Some(12),
                uint64_data: vec![7, u32::MAX as u64],
                ..weight(&[2], &[])
            },
            DType::U32,
            vec![7, 0, 0, 0, 255, 255, 255, 255],
        ),
    ];
    for (mut tensor, dtype, bytes) in cases {
        tensor.raw_data = None;
        let model = changed(|g| {
            g.initializer[0] = tensor;
            g.node = vec![node("Identity", &["w"], &["y"])];
        });
        let graph = read(dir.path(), &model)
            .unwrap_or_else(|e| panic!("{e}"))
            .graph;
        let w = graph
            .value(graph.find_value("w").unwrap())
            .tensor()
            .unwrap();
        assert_eq!((w.dtype, w.bytes().unwrap().to_vec()), (dtype, bytes));
    }
}

#[test]
fn names_must_resolve() {
    refused(
        &changed(|g| g.initializer.clear()),
        "name",
        "nothing defines `w`",
    );
    refused(
        &changed(|g| g.node[0].input[0] = "y".into()),
        "cycle",
        "its own result",
    );
    refused(
        &changed(|g| {
            g.node = vec![
                node("Neg", &["b"], &["a"]),
                node("Neg", &["a"], &["b"]),
                node("Neg", &["a"], &["y"]),
            ]
        }),
        "cycle",
        "before it is computed",
    );
    refused(
        &changed(|g| g.node.push(node("Neg", &["x"], &["y"]))),
        "name",
        "`y` is defined twice",
    );
    refused(
        &changed(|g| g.initializer.push(weight(&[2], &[0; 8]))),
        "name",
        "`w` is defined twice",
    );
    refused(
        &changed(|g| g.output[0].name = Some("z".into())),
        "name",
        "`z` is never defined",
    );
    refused(&changed(|g| g.output.clear()), "onnx", "no outputs");
    refused(
        &changed(|g| g.node[0].input.truncate(1)),
        "arity",
        "missing",
    );
}

#[test]
fn what_is_not_supported_says_so() {
    let nested = |op: &str| {
        let mut n = node(op, &["x"], &["y"]);
        n.attribute.push(AttributeProto {
            name: Some("body".into()),
            r#type: Some(AttributeType::Graph as i32),
            g: Some(GraphProto::default()),
            ..Default::default()
        });
        changed(|g| g.node = vec![n])
    };
    for op in ["If", "Loop", "Scan"] {
        refused(&nested(op), "op", op);
    }
    refused(
        &changed(|g| {
            g.sparse_initializer.push(SparseTensorProto::default());
        }),
        "onnx",
        "sparse",
    );
    // An op nobody knows, whose type the file does not give either.
    refused(
        &changed(|g| {
            g.node[0].output[0] = "t".into();
            g.node[0].op_type = Some("Frobnicate".into());
            g.node.push(node("Neg", &["t"], &["y"]));
        }),
        "op",
        "no type for `t`",
    );
    let mut model = good();
    model.opset_import[0].version = Some(99);
    refused(&model, "opset", "99");
    model.opset_import.clear();
    refused(&model, "version", "operator set");
    let mut model = good();
    model.ir_version = Some(1000);
    refused(&model, "version", "1000");
}

#[test]
fn an_op_nobody_knows_travels_through() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = changed(|g| {
        g.node[0].output[0] = "t".into();
        g.node.push(NodeProto {
            domain: Some("com.acme".into()),
            ..node("Frobnicate", &["t"], &["u"])
        });
        g.node.push(node("Neg", &["u"], &["y"]));
        g.value_info.push(info("u", 1, &[2]));
    });
    model.opset_import.push(OperatorSetIdProto {
        domain: Some("com.acme".into()),
        version: Some(7),
    });
    let graph = read(dir.path(), &model)
        .unwrap_or_else(|e| panic!("{e}"))
        .graph;
    let made = ckpt_opt::emit::onnx::package(&graph, &ckpt_opt::emit::onnx::Weights::Inside)
        .unwrap()
        .model;
    let back = &made.graph.as_ref().unwrap().node[1];
    assert_eq!((back.op_type(), back.domain()), ("Frobnicate", "com.acme"));
    let import = made
        .opset_import
        .iter()
        .find(|o| o.domain() == "com.acme")
        .unwrap();
    assert_eq!(
        import.version(),
        7,
        "the domain's version must be the one that was read"
    );
}

#[test]
fn functions_cannot_run_away() {
    let call = |name: &str, ins: &[&str], outs: &[&str]| NodeProto {
        domain: Some("f".into()),
        ..node(name, ins, outs)
    };
    let function = |name: &str, nodes: Vec<NodeProto>| FunctionProto {
        name: Some(name.into()),
        domain: Some("f".into()),
        input: vec!["a".into()],
        output: vec!["c".into()],
        node: nodes,
        opset_import: vec![OperatorSetIdProto {
            domain: None,
            version: Some(18),
        }],
        ..Default::default()
    };
    let mut model = changed(|g| g.node = vec![call("F0", &["x"], &["y"])]);
    model.opset_import.push(OperatorSetIdProto {
        domain: Some("f".into()),
        version: Some(1),
    });
    // One that calls itself.
    model.functions = vec![function("F0", vec![call("F0", &["a"], &["c"])])];
    refused(&model, "function", "deep");
    // Forty that each call the next one twice: 2^40 nodes.
    model.functions = (0..40)
        .map(|i| {
            let next = format!("F{}", i + 1);
            function(
                &format!("F{i}"),
                vec![call(&next, &["a"], &["b"]), call(&next, &["b"], &["c"])],
            )
        })
        .collect();
    model
        .functions
        .push(function("F40", vec![node("Neg", &["a"], &["c"])]));
    refused(&model, "function", "nodes");
}

#[test]
fn a_decoded_weight_is_a_slice_of_the_file() {
    let model = changed(|g| g.initializer[0] = weight(&[1000], &[7; 4000]));
    let bytes = bytes::Bytes::from(model.encode_to_vec());
    let range = bytes.as_ptr_range();
    let decoded = ckpt_opt::frontend::onnx::file::decode(bytes.clone()).unwrap();
    let raw = decoded.graph.unwrap().initializer[0]
        .raw_data
        .clone()
        .unwrap();
    assert!(
        range.contains(&raw.as_ptr()) && raw.len() == 4000,
        "the content was copied"
    );
}
