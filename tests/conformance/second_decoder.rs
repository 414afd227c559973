//! Files as two independent protobuf implementations see them: prost with our vendored `onnx.proto`, and rust-protobuf
//! with the one of the onnx-protobuf crate. Every field of the fixtures and of what we write must be the same in both.

use ckpt_opt::emit::save::{INSIDE_LIMIT_BYTES, Saving, save};
use ckpt_opt::frontend::{self, onnx::proto as ours};
use onnx_protobuf::{self as theirs, Message, tensor_shape_proto::dimension, type_proto};
use std::path::{Path, PathBuf};

/// Compares fields by name; the second decoder knows no absence, so ours is read through accessors with defaults.
macro_rules! same {
    ($a:expr, $b:expr, $at:expr; $($scalar:ident),* ; $($list:ident),*) => {
        $( assert_eq!($a.$scalar(), $b.$scalar, "{}.{}", $at, stringify!($scalar)); )*
        $( assert_eq!($a.$list, $b.$list, "{}.{}", $at, stringify!($list)); )*
        assert!($b.special_fields.unknown_fields().iter().next().is_none(), "{}: a field only we know", $at);
    };
}

/// Compares lists of messages.
fn each<A, B>(a: &[A], b: &[B], at: &str, compare: impl Fn(&A, &B, &str)) {
    assert_eq!(a.len(), b.len(), "{at}: how many");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        compare(a, b, &format!("{at}[{i}]"));
    }
}

/// Compares messages that may be absent.
fn maybe<A, B>(a: Option<&A>, b: Option<&B>, at: &str, compare: impl Fn(&A, &B, &str)) {
    match (a, b) {
        (Some(a), Some(b)) => compare(a, b, at),
        (a, b) => assert_eq!(a.is_some(), b.is_some(), "{at}: there or not"),
    }
}

fn entry(a: &ours::StringStringEntryProto, b: &theirs::StringStringEntryProto, at: &str) {
    same!(a, b, at; key, value;);
}

fn opset(a: &ours::OperatorSetIdProto, b: &theirs::OperatorSetIdProto, at: &str) {
    same!(a, b, at; domain, version;);
}

fn tensor(a: &ours::TensorProto, b: &theirs::TensorProto, at: &str) {
    same!(a, b, at; data_type, name, doc_string; dims, int32_data, int64_data, uint64_data, string_data);
    assert_eq!(
        a.raw_data.as_deref().unwrap_or_default(),
        &b.raw_data[..],
        "{at}.raw_data"
    );
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&a.float_data), bits(&b.float_data), "{at}.float_data");
    let bits = |v: &[f64]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(
        bits(&a.double_data),
        bits(&b.double_data),
        "{at}.double_data"
    );
    assert_eq!(
        a.data_location() as i32,
        b.data_location.value(),
        "{at}.data_location"
    );
    assert_eq!(a.segment.is_some(), b.segment.is_some(), "{at}.segment");
    each(
        &a.external_data,
        &b.external_data,
        &format!("{at}.external_data"),
        entry,
    );
    each(
        &a.metadata_props,
        &b.metadata_props,
        &format!("{at}.metadata_props"),
        entry,
    );
}

fn attribute(a: &ours::AttributeProto, b: &theirs::AttributeProto, at: &str) {
    same!(a, b, at; name, ref_attr_name, doc_string, i, s; ints, strings);
    assert_eq!(a.r#type() as i32, b.type_.value(), "{at}.type");
    assert_eq!(a.f().to_bits(), b.f.to_bits(), "{at}.f");
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&a.floats), bits(&b.floats), "{at}.floats");
    maybe(a.t.as_ref(), b.t.as_ref(), &format!("{at}.t"), tensor);
    maybe(a.g.as_ref(), b.g.as_ref(), &format!("{at}.g"), graph);
    each(&a.tensors, &b.tensors, &format!("{at}.tensors"), tensor);
    each(&a.graphs, &b.graphs, &format!("{at}.graphs"), graph);
    assert!(
        a.sparse_tensor.is_none() && b.sparse_tensor.is_none() && a.tp.is_none() && b.tp.is_none(),
        "{at}"
    );
}

fn node(a: &ours::NodeProto, b: &theirs::NodeProto, at: &str) {
    same!(a, b, at; name, op_type, domain, overload, doc_string; input, output);
    each(
        &a.attribute,
        &b.attribute,
        &format!("{at}.attribute"),
        attribute,
    );
    each(
        &a.metadata_props,
        &b.metadata_props,
        &format!("{at}.metadata_props"),
        entry,
    );
}

fn dim(
    a: &ours::tensor_shape_proto::Dimension,
    b: &theirs::tensor_shape_proto::Dimension,
    at: &str,
) {
    use ours::tensor_shape_proto::dimension::Value as Mine;
    same!(a, b, at; denotation;);
    match (&a.value, &b.value) {
        (None, None) => {}
        (Some(Mine::DimValue(a)), Some(dimension::Value::DimValue(b))) => assert_eq!(a, b, "{at}"),
        (Some(Mine::DimParam(a)), Some(dimension::Value::DimParam(b))) => assert_eq!(a, b, "{at}"),
        (a, b) => panic!("{at}: {a:?} and {b:?}"),
    }
}

fn ty(a: &ours::TypeProto, b: &theirs::TypeProto, at: &str) {
    same!(a, b, at; denotation;);
    let (Some(ours::type_proto::Value::TensorType(a)), Some(type_proto::Value::TensorType(b))) =
        (&a.value, &b.value)
    else {
        panic!("{at}: {a:?} and {b:?}");
    };
    same!(a, b, at; elem_type;);
    maybe(a.shape.as_ref(), b.shape.as_ref(), at, |a, b, at| {
        each(&a.dim, &b.dim, at, dim)
    });
}

fn info(a: &ours::ValueInfoProto, b: &theirs::ValueInfoProto, at: &str) {
    same!(a, b, at; name, doc_string;);
    maybe(
        a.r#type.as_ref(),
        b.type_.as_ref(),
        &format!("{at}.type"),
        ty,
    );
    each(
        &a.metadata_props,
        &b.metadata_props,
        &format!("{at}.metadata_props"),
        entry,
    );
}

fn graph(a: &ours::GraphProto, b: &theirs::GraphProto, at: &str) {
    same!(a, b, at; name, doc_string;);
    each(&a.node, &b.node, &format!("{at}.node"), node);
    each(
        &a.initializer,
        &b.initializer,
        &format!("{at}.initializer"),
        tensor,
    );
    each(&a.input, &b.input, &format!("{at}.input"), info);
    each(&a.output, &b.output, &format!("{at}.output"), info);
    each(
        &a.value_info,
        &b.value_info,
        &format!("{at}.value_info"),
        info,
    );
    each(
        &a.metadata_props,
        &b.metadata_props,
        &format!("{at}.metadata_props"),
        entry,
    );
    assert!(
        a.sparse_initializer.is_empty() && b.sparse_initializer.is_empty(),
        "{at}"
    );
    assert!(
        a.quantization_annotation.is_empty() && b.quantization_annotation.is_empty(),
        "{at}"
    );
}

fn function(a: &ours::FunctionProto, b: &theirs::FunctionProto, at: &str) {
    same!(a, b, at; name, domain, overload, doc_string; input, output, attribute);
    each(
        &a.attribute_proto,
        &b.attribute_proto,
        &format!("{at}.attribute_proto"),
        attribute,
    );
    each(&a.node, &b.node, &format!("{at}.node"), node);
    each(
        &a.opset_import,
        &b.opset_import,
        &format!("{at}.opset_import"),
        opset,
    );
    each(
        &a.value_info,
        &b.value_info,
        &format!("{at}.value_info"),
        info,
    );
    each(
        &a.metadata_props,
        &b.metadata_props,
        &format!("{at}.metadata_props"),
        entry,
    );
}

fn model(a: &ours::ModelProto, b: &theirs::ModelProto, at: &str) {
    same!(a, b, at; ir_version, producer_name, producer_version, domain, model_version, doc_string;);
    each(
        &a.opset_import,
        &b.opset_import,
        &format!("{at}.opset_import"),
        opset,
    );
    each(
        &a.metadata_props,
        &b.metadata_props,
        &format!("{at}.metadata_props"),
        entry,
    );
    each(
        &a.functions,
        &b.functions,
        &format!("{at}.functions"),
        function,
    );
    maybe(
        a.graph.as_ref(),
        b.graph.as_ref(),
        &format!("{at}.graph"),
        graph,
    );
    assert!(
        a.training_info.is_empty() && b.training_info.is_empty(),
        "{at}"
    );
}

/// Decodes a file with both and compares.
fn compare(path: &Path) -> ours::ModelProto {
    let mine = frontend::onnx::file::open(path).unwrap_or_else(|e| panic!("{e}"));
    let other = theirs::ModelProto::parse_from_bytes(&std::fs::read(path).unwrap()).unwrap();
    model(&mine, &other, &path.file_name().unwrap().to_string_lossy());
    mine
}

fn fixtures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path().join("model.onnx"))
        .filter(|p| p.exists())
        .collect();
    found.sort();
    assert!(found.len() >= 5, "{found:?}");
    found
}

#[test]
fn fixtures_and_what_we_write_of_them() {
    let dir = tempfile::tempdir().unwrap();
    for fixture in fixtures() {
        compare(&fixture);
        let mut graph = frontend::read(&fixture)
            .unwrap_or_else(|e| panic!("{e}"))
            .graph;
        ckpt_passes::transform::infer::infer(&mut graph).unwrap_or_else(|e| panic!("{e}"));
        for (name, inside_limit_bytes) in [("inside.onnx", INSIDE_LIMIT_BYTES), ("beside.onnx", 0)]
        {
            let path = dir.path().join(name);
            let how = Saving {
                input: Some(&fixture),
                weights: Default::default(),
                inside_limit_bytes,
            };
            save(&graph, &path, &how).unwrap_or_else(|e| panic!("{e}"));
            compare(&path);
        }
    }
}

#[test]
fn our_functions() {
    use ckpt_passes::ir::{DType, Dim, Graph, Ty};
    use ckpt_passes::ops::{Builder, EmitExt};
    let mut g = Graph::new("functions");
    let matrix = Ty::new(DType::F32, [Dim::symbol("n"), 3.into()]);
    let x = g.add_input("x", Some(matrix));
    let like = g.add_input("like", Some(Ty::new(DType::F32, [3.into()])));
    let mut b = Builder::new(&mut g);
    let y = b.sum_to(x, like).unwrap();
    g.set_outputs(vec![y]);
    ckpt_passes::transform::infer::infer(&mut g).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let how = Saving {
        input: None,
        weights: Default::default(),
        inside_limit_bytes: INSIDE_LIMIT_BYTES,
    };
    save(&g, &path, &how).unwrap_or_else(|e| panic!("{e}"));
    let written = compare(&path);
    assert_eq!(written.functions.len(), 1);
    let back = frontend::read(&path).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(
        back.graph.order().len(),
        1,
        "the function comes back as its row: {:?}",
        back.warnings
    );
}

#[test]
fn a_difference_is_seen() {
    let path = &fixtures()[0];
    let mine = frontend::onnx::file::open(path).unwrap();
    let mut other = theirs::ModelProto::parse_from_bytes(&std::fs::read(path).unwrap()).unwrap();
    let last = other
        .graph
        .as_mut()
        .unwrap()
        .initializer
        .last_mut()
        .unwrap();
    last.dims.push(1);
    assert!(std::panic::catch_unwind(|| model(&mine, &other, "changed")).is_err());
}
