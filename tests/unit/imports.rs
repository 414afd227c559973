//! What a file may claim, name or share, and what becomes of it: metadata that lies, functions whose insides bear the
//! names of outputs, overloads, results that are outputs at once, older forms.

use ckpt_opt::emit::onnx::{Weights, package};
use ckpt_opt::frontend::onnx::import::{Imported, import};
use ckpt_opt::frontend::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};
use ckpt_opt::frontend::onnx::tensor;
use ckpt_passes::Result;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, Phase};
use ckpt_passes::plan::Constraint;
use ckpt_passes::planning::overrides::{Override, PolicyOverrides, Target};
use ckpt_passes::transform::infer::infer;

fn node(name: &str, op: &str, ins: &[&str], outs: &[&str]) -> NodeProto {
    NodeProto {
        name: Some(name.into()),
        op_type: Some(op.into()),
        input: ins.iter().map(|s| s.to_string()).collect(),
        output: outs.iter().map(|s| s.to_string()).collect(),
        ..NodeProto::default()
    }
}

fn said(mut node: NodeProto, key: &str, value: &str) -> NodeProto {
    node.metadata_props
        .push(StringStringEntryProto::new(key, value));
    node
}

fn in_domain(mut node: NodeProto, domain: &str) -> NodeProto {
    node.domain = Some(domain.into());
    node
}

fn float(name: &str, dims: &[&str]) -> ValueInfoProto {
    let dim = dims.iter().map(|d| Dimension {
        denotation: None,
        value: Some(match d.parse() {
            Ok(n) => dimension::Value::DimValue(n),
            Err(_) => dimension::Value::DimParam(d.to_string()),
        }),
    });
    let tensor = type_proto::Tensor {
        elem_type: Some(1),
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

fn import_of(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto {
        domain: Some(domain.into()),
        version: Some(version),
    }
}

/// Input x[n, 2], weight w[2, 2].
fn model(nodes: Vec<NodeProto>, outputs: Vec<ValueInfoProto>) -> ModelProto {
    let weight = TensorProto {
        name: Some("w".into()),
        dims: vec![2, 2],
        data_type: Some(1),
        float_data: vec![1.0, 2.0, 3.0, 4.0],
        ..TensorProto::default()
    };
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![import_of("", 18), import_of("f", 3)],
        graph: Some(GraphProto {
            name: Some("g".into()),
            node: nodes,
            input: vec![float("x", &["n", "2"])],
            output: outputs,
            initializer: vec![weight],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    }
}

fn function(overload: &str, outs: &[&str], nodes: Vec<NodeProto>) -> FunctionProto {
    FunctionProto {
        name: Some("F".into()),
        domain: Some("f".into()),
        overload: Some(overload.into()),
        input: vec!["q".into()],
        output: outs.iter().map(|s| s.to_string()).collect(),
        node: nodes,
        opset_import: vec![import_of("", 18)],
        ..FunctionProto::default()
    }
}

fn read(model: &ModelProto) -> Result<Imported> {
    let mut files = ckpt_opt::frontend::onnx::external::Files::beside("none.onnx".as_ref());
    let mut imported = import(model, &mut |t| tensor::read(t, &mut files))?;
    infer(&mut imported.graph)?;
    ckpt_passes::ir::verify::verify(&imported.graph)?;
    Ok(imported)
}

fn reread(graph: &Graph) -> Graph {
    read(&package(graph, &Weights::Inside).unwrap().model)
        .unwrap_or_else(|e| panic!("{e}"))
        .graph
}

fn outputs(graph: &Graph) -> Vec<&str> {
    let names = graph.outputs().iter();
    names.map(|v| graph.value(*v).name.as_str()).collect()
}

fn ops(graph: &Graph) -> Vec<&str> {
    let order = graph.order().iter();
    order.map(|n| graph.node(*n).op.name).collect()
}

fn train(graph: &mut Graph) {
    compile(graph, &Request::default(), &mut Watch::default()).unwrap_or_else(|e| panic!("{e}"));
    assert!(outputs(graph).contains(&"w.grad"));
}

fn claiming(of: [&str; 3]) -> ModelProto {
    let names = ["a", "b", "c"];
    let tanh = |i: usize| {
        said(
            node(names[i], "Tanh", &["x"], &[names[i]]),
            "ckpt.of",
            of[i],
        )
    };
    let nodes = vec![
        tanh(0),
        tanh(1),
        tanh(2),
        node("s", "Add", &["a", "c"], &["s"]),
        node("y", "MatMul", &["s", "w"], &["y"]),
    ];
    model(nodes, vec![float("y", &["n", "2"])])
}

#[test]
fn claims_of_recomputation_never_form_a_cycle_nor_point_forward() {
    // Each of these computes the same, so only the order can refute them.
    let mut lies = read(&claiming(["b", "c", "a"])).unwrap();
    assert_eq!(lies.warnings.len(), 2, "{:?}", lies.warnings);
    let copies = |g: &Graph| g.nodes().filter(|(_, n)| n.recompute_of.is_some()).count();
    assert_eq!(copies(&lies.graph), 1);
    assert_eq!(copies(&reread(&lies.graph)), 1);
    train(&mut lies.graph);
    // A copy of a copy, the middle one read by nobody, in a graph that is no training graph yet.
    let mut chain = read(&claiming(["none", "a", "b"])).unwrap();
    assert_eq!(copies(&chain.graph), 2);
    ckpt_passes::transform::dce::dce(&mut chain.graph);
    ckpt_passes::ir::verify::verify(&chain.graph).unwrap();
    train(&mut chain.graph);
}

#[test]
fn a_backward_without_gradients_is_a_forward_graph() {
    let y = said(
        node("y", "MatMul", &["x", "w"], &["y"]),
        "ckpt.role",
        "backward",
    );
    let mut imported = read(&model(vec![y], vec![float("y", &["n", "2"])])).unwrap();
    assert_eq!(imported.warnings.len(), 1);
    assert_eq!(imported.graph.phase, Phase::Typed);
    train(&mut imported.graph);
}

#[test]
fn outputs_keep_their_names_whatever_functions_call_things_inside() {
    let nodes = vec![
        in_domain(node("call", "F", &["x"], &["z", "again", "x2"]), "f"),
        node("y", "MatMul", &["z", "w"], &["y"]),
    ];
    let outs = ["y", "again", "x2", "z"].map(|n| float(n, &["n", "2"]));
    let mut file = model(nodes, outs.to_vec());
    // Inside, `y` is another value; one value is two results; the operand is a result.
    let inside = vec![
        node("", "Tanh", &["q"], &["y"]),
        node("", "Neg", &["y"], &["t"]),
    ];
    file.functions = vec![function("", &["t", "t", "q"], inside)];
    let mut graph = read(&file).unwrap().graph;
    assert_eq!(outputs(&graph), ["y", "again", "x2", "z"]);
    let y = graph.def_node(graph.outputs()[0]).unwrap();
    assert_eq!(graph.node(y).op.name, "MatMul");
    assert_eq!(outputs(&reread(&graph)), ["y", "again", "x2", "z"]);
    train(&mut graph);
}

#[test]
fn a_call_of_a_function_is_a_module_of_its_class() {
    let call = |name: &str, from: &str, to: &str| NodeProto {
        name: Some(name.into()),
        ..in_domain(node("", "F", &[from], &[to]), "f")
    };
    let nodes = vec![
        call("net/layer_0", "x", "a"),
        call("net/layer_1", "a", "b"),
        node("y", "MatMul", &["b", "w"], &["y"]),
    ];
    let mut file = model(nodes, vec![float("y", &["n", "2"])]);
    file.functions = vec![function("", &["t"], vec![node("", "Tanh", &["q"], &["t"])])];
    let mut graph = read(&file).unwrap().graph;
    let scopes: Vec<_> = graph
        .order()
        .iter()
        .map(|n| graph.node(*n).loc.scopes.clone())
        .collect();
    let module = |path: &str| vec![(path.to_string(), Some("F".to_string()))];
    assert_eq!(
        scopes,
        [module("net.layer_0"), module("net.layer_1"), Vec::new()]
    );
    let again = reread(&graph);
    let kept = again
        .order()
        .iter()
        .map(|n| again.node(*n).loc.scopes.clone());
    assert_eq!(kept.collect::<Vec<_>>(), scopes);
    let mut request = Request {
        plan: ckpt_passes::plan::Policy::FULL.into(),
        ..Request::default()
    };
    request.overrides.layers =
        vec![ckpt_passes::planning::overrides::NamePattern::parse("F").unwrap()];
    compile(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_call_takes_the_overload_that_it_names() {
    let mut call = in_domain(node("call", "F", &["x"], &["z"]), "f");
    call.overload = Some("one".into());
    let mut file = model(
        vec![call, node("y", "MatMul", &["z", "w"], &["y"])],
        vec![float("y", &["n", "2"])],
    );
    let of =
        |overload: &str, op: &str| function(overload, &["t"], vec![node("", op, &["q"], &["t"])]);
    file.functions = vec![of("one", "Tanh"), of("two", "Neg")];
    assert_eq!(ops(&read(&file).unwrap().graph), ["Tanh", "MatMul"]);
    file.functions.push(of("one", "Exp"));
    let twice = read(&file).err().unwrap();
    assert_eq!((twice.code(), twice.exit_code()), ("function", 2));
}

#[test]
fn an_unknown_op_may_define_an_output_of_any_size_expression() {
    let nodes = vec![
        node("y", "MatMul", &["x", "w"], &["y"]),
        in_domain(node("z", "Foo", &["y"], &["z"]), "f"),
    ];
    let outs = vec![float("y", &["n", "2"]), float("z", &["2*n + 1", "2"])];
    let graph = read(&model(nodes, outs)).unwrap().graph;
    let back = reread(&graph);
    for g in [&graph, &back] {
        assert_eq!(g.ty(g.outputs()[1]).to_string(), "f32[2*n + 1, 2]");
    }
}

#[test]
fn the_types_of_the_file_are_not_of_names_inside_a_function() {
    let nodes = vec![
        in_domain(node("call", "F", &["x"], &["z"]), "f"),
        node("t", "Neg", &["x"], &["t"]),
    ];
    let mut file = model(nodes, vec![float("z", &["n"]), float("t", &["n", "2"])]);
    let mut foo = in_domain(node("", "Foo", &["q"], &["t"]), "other");
    foo.name = None;
    let mut f = function("", &["t"], vec![foo]);
    f.opset_import.push(import_of("other", 1));
    file.functions = vec![f];
    let graph = read(&file).unwrap().graph;
    assert_eq!(graph.ty(graph.outputs()[0]).to_string(), "f32[n]");
    assert_eq!(graph.ty(graph.outputs()[1]).to_string(), "f32[n, 2]");
}

#[test]
fn what_is_defined_or_listed_twice_is_refused() {
    let y = || node("y", "MatMul", &["x", "w"], &["y"]);
    let out = || float("y", &["n", "2"]);
    let listed = read(&model(vec![y()], vec![out(), out()])).err().unwrap();
    assert_eq!((listed.code(), listed.exit_code()), ("name", 2));
    let split = node("p", "Split", &["x"], &["p", "p"]);
    let defined = read(&model(vec![split, y()], vec![out()])).err().unwrap();
    assert_eq!((defined.code(), defined.exit_code()), ("name", 2));
}

#[test]
fn a_split_of_an_older_opset_is_into_equal_parts() {
    let mut split = node("p", "Split", &["x"], &["p", "q"]);
    split.attribute.push(AttributeProto {
        name: Some("axis".into()),
        i: Some(1),
        r#type: Some(AttributeType::Int as i32),
        ..AttributeProto::default()
    });
    let outs = vec![float("p", &["n", "1"]), float("q", &["n", "1"])];
    let mut file = model(vec![split], outs);
    file.opset_import[0].version = Some(13);
    let graph = reread(&read(&file).unwrap().graph);
    for out in graph.outputs() {
        assert_eq!(graph.ty(*out).to_string(), "f32[n, 1]");
    }
}

/// The weights of an interpolation are made here, and are no parameters of the model.
#[test]
fn tables_that_a_node_is_lowered_with_are_not_trained() {
    let mut resize = node("r", "Resize", &["x", "", "scales"], &["r"]);
    resize.attribute.push(AttributeProto {
        name: Some("mode".into()),
        s: Some(b"linear".to_vec()),
        r#type: Some(AttributeType::String as i32),
        ..AttributeProto::default()
    });
    let nodes = vec![node("m", "MatMul", &["r", "w"], &["y"]), resize];
    let mut file = model(
        nodes.into_iter().rev().collect(),
        vec![float("y", &["n", "2"])],
    );
    let graph = file.graph.as_mut().unwrap();
    graph.input[0] = float("x", &["3", "1"]);
    graph.initializer.push(TensorProto {
        name: Some("scales".into()),
        dims: vec![2],
        data_type: Some(1),
        float_data: vec![1.0, 2.0],
        ..TensorProto::default()
    });
    let graph = read(&file).unwrap().graph;
    let trained = parameters(&graph, &Selection::default()).unwrap();
    let names: Vec<&str> = trained.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["w"]);
}

/// The TorchScript exporter writes such axes, and ONNX Runtime refuses them, so they are counted from the front in our files.
#[test]
fn axes_of_a_transpose_may_be_counted_from_the_back() {
    let mut transpose = node("t", "Transpose", &["x"], &["t"]);
    transpose.attribute.push(AttributeProto {
        name: Some("perm".into()),
        ints: vec![-1, 0],
        r#type: Some(AttributeType::Ints as i32),
        ..AttributeProto::default()
    });
    let file = model(vec![transpose], vec![float("t", &["2", "n"])]);
    let graph = reread(&read(&file).unwrap().graph);
    let (_, node) = graph.nodes().next().unwrap();
    assert_eq!(node.attrs.opt_ints("perm"), Some(&[1, 0][..]));
}

#[test]
fn an_identity_of_a_weight_is_another_name_of_it() {
    let nodes = || {
        vec![
            node("again", "Identity", &["w"], &["second.weight"]),
            node("one", "MatMul", &["x", "w"], &["a"]),
            node("two", "MatMul", &["a", "second.weight"], &["y"]),
        ]
    };
    let graph_of = |outputs| read(&model(nodes(), outputs)).unwrap().graph;
    let graph = graph_of(vec![float("y", &["n", "2"])]);
    assert_eq!(ops(&graph), ["MatMul", "MatMul"]);
    let weight = graph.node(graph.order()[1]).ins[1].unwrap();
    assert_eq!(graph.value(weight).name, "w");
    assert_eq!(graph.origins[&weight].names, ["w", "second.weight"]);
    // As a result of the model it is a value of its own.
    let outputs = vec![float("second.weight", &["2", "2"]), float("y", &["n", "2"])];
    let graph = graph_of(outputs);
    assert_eq!(graph.value(graph.outputs()[0]).name, "second.weight");
    assert!(graph.def_node(graph.outputs()[0]).is_some());
}

#[test]
fn a_constant_that_repeats_one_number_is_no_parameter() {
    let literal = |name: &str, numbers: [f32; 2]| {
        let mut constant = node(name, "Constant", &[], &[name]);
        constant.attribute.push(AttributeProto {
            name: Some("value".into()),
            r#type: Some(AttributeType::Tensor as i32),
            t: Some(TensorProto {
                dims: vec![2],
                data_type: Some(1),
                raw_data: Some(numbers.map(f32::to_le_bytes).concat().into()),
                ..TensorProto::default()
            }),
            ..AttributeProto::default()
        });
        constant
    };
    let nodes = vec![
        literal("nothing", [0.0, 0.0]),
        literal("bias", [1.0, 2.0]),
        node("m", "MatMul", &["x", "w"], &["m"]),
        node("a", "Add", &["m", "nothing"], &["a"]),
        node("y", "Add", &["a", "bias"], &["y"]),
    ];
    let graph = read(&model(nodes, vec![float("y", &["n", "2"])]))
        .unwrap()
        .graph;
    let names = |graph: &Graph| {
        let found = parameters(graph, &Selection::default()).unwrap();
        let mut names: Vec<String> = found.into_iter().map(|p| p.name).collect();
        names.sort();
        names
    };
    assert_eq!(names(&graph), ["bias", "w"]);
    assert_eq!(names(&reread(&graph)), ["bias", "w"]);
}

/// The graph that another tool differentiated: its gradient nodes have no types in the file, and stay what they are
/// while the forward is planned around them.
#[test]
fn a_backward_of_contrib_ops_is_typed_and_planned_around() {
    let ort = |name: &str, op: &str, ins: &[&str], outs: &[&str]| {
        in_domain(node(name, op, ins, outs), "com.microsoft")
    };
    let transposed = AttributeProto {
        name: Some("transA".into()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(1),
        ..AttributeProto::default()
    };
    let mut product = ort("n6", "FusedMatMul", &["x", "dm"], &["w_grad"]);
    product.attribute.push(transposed);
    let nodes = vec![
        node("n0", "MatMul", &["x", "w"], &["m"]),
        node("n1", "Tanh", &["m"], &["t"]),
        node("n2", "Sigmoid", &["t"], &["u"]),
        node("n3", "ReduceMean", &["u"], &["loss"]),
        ort("n4", "SigmoidGrad", &["u", "u"], &["dt"]),
        ort("n5", "TanhGrad", &["dt", "t"], &["dm"]),
        product,
    ];
    let outs = ["loss", "w_grad"].map(|n| ValueInfoProto {
        name: Some(n.into()),
        ..ValueInfoProto::default()
    });
    let mut file = model(nodes, outs.to_vec());
    file.opset_import.push(import_of("com.microsoft", 1));
    let mut graph = read(&file).unwrap_or_else(|e| panic!("{e}")).graph;
    for name in ["dt", "dm"] {
        let ty = graph.ty(graph.find_value(name).unwrap());
        assert_eq!(ty.to_string(), "f32[n, 2]");
    }
    let gradient = graph.find_value("w_grad").unwrap();
    assert_eq!(graph.ty(gradient).to_string(), "f32[2, 2]");

    let again = Override {
        constraint: Constraint::Recompute,
        target: Target::op("Tanh").unwrap(),
    };
    let request = Request {
        overrides: PolicyOverrides {
            overrides: vec![again],
            ..PolicyOverrides::default()
        },
        dims: vec![("n".into(), 1024)],
        ..Request::default()
    };
    for _ in 0..2 {
        compile(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{e}"));
        let named: Vec<&str> = ops(&graph);
        assert_eq!(named.iter().filter(|op| **op == "Opaque").count(), 2);
        assert_eq!(
            named.iter().filter(|op| **op == "Tanh").count(),
            2,
            "{named:?}"
        );
        let reader = graph
            .find_value("dm")
            .and_then(|v| graph.def_node(v))
            .unwrap();
        let read = graph.node(reader).ins[1]
            .and_then(|v| graph.def_node(v))
            .unwrap();
        assert!(
            graph.node(read).recompute_of.is_some(),
            "the gradient reads the copy"
        );
        // What is written is planned again as it was.
        graph = reread(&graph);
    }
}

#[test]
fn a_gradient_stops_where_an_export_says_so() {
    let nodes = vec![
        node("a", "MatMul", &["x", "w"], &["h"]),
        in_domain(node("b", "StopGradient", &["h"], &["d"]), "ckpt"),
        node("c", "Add", &["d", "x"], &["y"]),
    ];
    let mut file = model(nodes, vec![float("y", &["n", "2"])]);
    file.opset_import.push(import_of("ckpt", 1));
    let graph = read(&file).unwrap().graph;
    let stops = graph
        .order()
        .iter()
        .map(|id| graph.node(*id).op.name)
        .filter(|name| *name == "StopGradient");
    assert_eq!(stops.count(), 1);
}

/// Weight q, [2, 2] integers of four bits, which nodes dequantise by `scale` and `zero`.
fn of_four_bits(mut nodes: Vec<NodeProto>, zero: (i32, &[i32])) -> ModelProto {
    nodes.push(node("m", "MatMul", &["x", "w"], &["y"]));
    let mut model = model(nodes, vec![float("y", &["n", "2"])]);
    model.opset_import[0].version = Some(21);
    let tensor = |name: &str, code: i32, dims: &[i64], ints: &[i32]| TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(code),
        int32_data: ints.to_vec(),
        ..TensorProto::default()
    };
    let graph = model.graph.as_mut().unwrap();
    graph.initializer[0].name = Some("scale".into());
    graph.initializer[0].dims = vec![1, 2];
    graph.initializer[0].float_data = vec![1.0, 2.0];
    graph
        .initializer
        .push(tensor("q", 22, &[2, 2], &[0x21, 0xf7]));
    graph
        .initializer
        .push(tensor("zero", zero.0, &[1, 2], zero.1));
    model
}

/// Floats of 8 bits: values by a scale, weights by one, and both again after they were written.
#[test]
fn floats_of_eight_bits_are_quantised_stored_and_dequantised() {
    let with = |mut made: NodeProto, attrs: &[(&str, i64)]| {
        let attr = |(name, value): &(&str, i64)| AttributeProto {
            name: Some((*name).into()),
            r#type: Some(AttributeType::Int.into()),
            i: Some(*value),
            ..AttributeProto::default()
        };
        made.attribute.extend(attrs.iter().map(attr));
        made
    };
    let made = |nodes: Vec<NodeProto>| {
        let mut model = model(nodes, vec![float("y", &["n", "2"])]);
        model.opset_import[0].version = Some(21);
        let tensor = |name: &str, code: i32, dims: &[i64], ints: &[i32]| TensorProto {
            name: Some(name.into()),
            dims: dims.to_vec(),
            data_type: Some(code),
            int32_data: ints.to_vec(),
            ..TensorProto::default()
        };
        let graph = model.graph.as_mut().unwrap();
        graph
            .initializer
            .push(tensor("codes", 17, &[2, 2], &[0x38, 0xb8, 0x7e, 0]));
        graph.initializer.push(tensor("zero", 17, &[], &[0x80]));
        graph.initializer.push(tensor("other", 17, &[], &[0x38]));
        graph.initializer.push(TensorProto {
            name: Some("scale".into()),
            data_type: Some(1),
            float_data: vec![0.5],
            ..TensorProto::default()
        });
        model
    };
    let to = |name: &str, ins: &[&str], out: &str, attrs: &[(&str, i64)]| {
        with(node(out, name, ins, &[out]), attrs)
    };
    let graph = read(&made(vec![
        to(
            "QuantizeLinear",
            &["x", "scale"],
            "q",
            &[("output_dtype", 17), ("saturate", 0)],
        ),
        to("DequantizeLinear", &["q", "scale", "zero"], "dq", &[]),
        to("DequantizeLinear", &["codes", "scale", "zero"], "w8", &[]),
        to("MatMul", &["dq", "w8"], "m", &[]),
        to("Cast", &["m"], "c", &[("saturate", 0), ("to", 19)]),
        to("Cast", &["c"], "y", &[("saturate", 1), ("to", 1)]),
    ]))
    .unwrap_or_else(|e| panic!("{e}"))
    .graph;
    let expected = [
        "QuantizeFloat8",
        "DequantizeFloat8",
        "Dequantize",
        "MatMul",
        "Cast",
        "Cast",
    ];
    assert_eq!(ops(&graph), expected);
    let saturates = |graph: &Graph| -> Vec<Option<i64>> {
        let nodes = graph.order().iter().map(|id| graph.node(*id));
        nodes.map(|n| n.attrs.opt_int("saturate")).collect()
    };
    assert_eq!(
        saturates(&graph),
        [Some(0), None, None, None, Some(0), None]
    );
    let codes = graph.inits().find(|(_, v)| v.name == "codes").unwrap().1;
    assert_eq!(codes.tensor().unwrap().size_bytes(), 4);
    assert_eq!(codes.tensor().unwrap().get_f64(2), Some(448.0));
    let again = reread(&graph);
    assert_eq!(ops(&again), expected);
    assert_eq!(saturates(&again), saturates(&graph));

    let refusal = |nodes: Vec<NodeProto>| read(&made(nodes)).err().unwrap().to_string();
    let shifted = refusal(vec![to(
        "DequantizeLinear",
        &["codes", "scale", "other"],
        "y",
        &[],
    )]);
    assert!(
        shifted.contains("a zero point of floats of 8 bits"),
        "{shifted}"
    );
    let computed = refusal(vec![
        to("Cast", &["x"], "q", &[("to", 17)]),
        to("Add", &["q", "q"], "s", &[]),
        to("Cast", &["s"], "y", &[("to", 1)]),
    ]);
    assert!(
        computed.contains("Add: the op takes no f8e4m3fn"),
        "{computed}"
    );
}

#[test]
fn integers_of_four_bits_stay_two_in_a_byte_and_are_only_dequantised() {
    let blocks = |ins: &[&str]| {
        let mut made = node("d", "DequantizeLinear", ins, &["w"]);
        for (name, value) in [("axis", 0), ("block_size", 2)] {
            made.attribute.push(AttributeProto {
                name: Some(name.into()),
                r#type: Some(AttributeType::Int.into()),
                i: Some(value),
                ..AttributeProto::default()
            });
        }
        vec![made]
    };
    let whole = of_four_bits(blocks(&["q", "scale", "zero"]), (22, &[0x10]));
    let graph = read(&whole).unwrap().graph;
    let codes = graph.inits().find(|(_, v)| v.name == "q").unwrap().1;
    assert_eq!(codes.tensor().unwrap().size_bytes(), 2);
    assert_eq!(ops(&graph), ["Dequantize", "Dequantize", "MatMul"]);
    assert_eq!(ops(&reread(&graph)), ops(&graph));
    let refusal = |model: ModelProto| read(&model).err().unwrap().to_string();
    // A zero point of another type, and another reader.
    let signs = refusal(of_four_bits(blocks(&["q", "scale", "zero"]), (21, &[0x10])));
    assert!(
        signs.contains("another element type than the codes"),
        "{signs}"
    );
    let cast = node("c", "Transpose", &["q"], &["w"]);
    let other = refusal(of_four_bits(vec![cast], (22, &[0x10])));
    assert!(
        other.contains("Transpose reads `q`, integers of four bits"),
        "{other}"
    );
    let mut output = whole.clone();
    output
        .graph
        .as_mut()
        .unwrap()
        .output
        .push(float("q", &["2", "2"]));
    let told = refusal(output);
    assert!(
        told.contains("`q` is an initializer of integers of four bits"),
        "{told}"
    );
    let mut short = whole;
    short.graph.as_mut().unwrap().initializer[1]
        .int32_data
        .pop();
    assert!(refusal(short).contains("wrong size"));
}
