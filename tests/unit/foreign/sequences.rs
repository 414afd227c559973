//! Sequences of tensors become the tensors that they hold.

use super::*;
use ckpt_opt::frontend::onnx::proto::NodeProto;

fn node(op: &str, ins: &[&str], out: &str) -> NodeProto {
    NodeProto {
        name: Some(format!("block/{op}")),
        op_type: Some(op.into()),
        input: ins.iter().map(|n| n.to_string()).collect(),
        output: vec![out.into()],
        ..NodeProto::default()
    }
}

/// A model that takes `x` f32[6, b] apart along axis 0 and goes on with `more`.
fn split(lengths: &[(&str, i64)], more: Vec<NodeProto>, outputs: &[&str]) -> One {
    let names: Vec<&str> = lengths.iter().map(|(name, _)| *name).collect();
    let mut operands = vec![("x", DType::F32, ["6", "b"].as_slice())];
    operands.extend(names.iter().map(|n| (*n, DType::I64, [].as_slice())));
    let mut model = one("", "SplitToSequence", &operands, &["all"]);
    for (name, number) in lengths {
        model = model.whole(name, *number);
    }
    for (name, number) in [("zero", 0), ("last", -1), ("two", 2)] {
        model = model.whole(name, number);
    }
    model.more = more;
    model.outputs(outputs)
}

fn read(model: One) -> Graph {
    model.read().unwrap_or_else(|e| panic!("{e}")).graph
}

#[test]
fn elements_of_a_split_axis() {
    let pick = vec![
        node("SequenceAt", &["all", "zero"], "first"),
        node("SequenceAt", &["all", "last"], "end"),
        node("Add", &["first", "end"], "y"),
    ];
    let graph = read(split(&[], pick.clone(), &["y"]).int("keepdims", 0));
    assert_eq!(output(&graph, 0), ("y".into(), "f32[b]".into()));
    let graph = read(split(&[("each", 4)], pick[..2].to_vec(), &["first", "end"]));
    assert_eq!(output(&graph, 0), ("first".into(), "f32[4, b]".into()));
    assert_eq!(output(&graph, 1), ("end".into(), "f32[2, b]".into()));
}

#[test]
fn sequences_that_are_built_and_joined() {
    let more = vec![
        node("SequenceAt", &["all", "zero"], "first"),
        node("SequenceConstruct", &["first", "first"], "pair"),
        node("SequenceInsert", &["pair", "first", "zero"], "three"),
        node("SequenceErase", &["three", "two"], "two_left"),
        node("Identity", &["two_left"], "same"),
        node("SequenceLength", &["same"], "count"),
        node("ConcatFromSequence", &["same"], "y"),
    ];
    let mut model = split(&[("each", 3)], more, &["y", "count"]);
    for (name, value) in [("axis", 0), ("new_axis", 1)] {
        model.more[6].attribute.push(int(name, value));
    }
    let graph = read(model);
    assert_eq!(output(&graph, 0), ("y".into(), "f32[2, 3, b]".into()));
    assert_eq!(output(&graph, 1).1, "i64[]");
}

#[test]
fn what_is_no_list_of_tensors_is_refused() {
    let said = split(&[], vec![node("Relu", &["all"], "y")], &["y"]).refusal();
    assert!(said.contains("`all` is a sequence"), "{said}");
    let said = split(&[], Vec::new(), &["all"]).refusal();
    assert!(said.contains("`all` is a sequence"), "{said}");
    let beyond = split(&[], vec![node("SequenceAt", &["all", "far"], "y")], &["y"]);
    let said = beyond.whole("far", 6).refusal();
    assert!(said.contains("no element 6"), "{said}");
}

#[test]
fn bounds_that_are_constants_in_floating_point() {
    // The exporter writes `arange(n)` so where its optimizer is off.
    let operands: [(&str, DType, &[&str]); 2] =
        [("zero", DType::F32, &[]), ("count", DType::I64, &[])];
    let mut model = one("", "CastLike", &operands, &["start"]).number("zero", 0.0);
    model = model.whole("count", 5).number("unit", 1.0);
    model.more = vec![
        node("CastLike", &["unit", "count"], "step"),
        node("Range", &["start", "count", "step"], "y"),
    ];
    let graph = read(model.outputs(&["y"]));
    assert_eq!(output(&graph, 0), ("y".into(), "i64[5]".into()));
}

#[test]
fn padding_of_some_axes_is_one_of_all() {
    let operands = [
        X,
        ("pads", DType::I64, ["2"].as_slice()),
        NONE,
        ("axes", DType::I64, &["1"]),
    ];
    let mut model = one("", "Pad", &operands, &["y"]);
    model.node.input[3] = "axes".into();
    let graph = read(model.list("pads", &[1, 2]).list("axes", &[-2]));
    assert_eq!(output(&graph, 0), ("y".into(), "f32[b, s + 3, 8]".into()));
    assert_eq!(ops(&graph), "Pad");
    let pad = graph.node(graph.order()[0]);
    let pads = graph.value(pad.operand(1).unwrap()).tensor().unwrap();
    let pads: Vec<i64> = (0..6).filter_map(|i| pads.get_i64(i)).collect();
    assert_eq!((pads, pad.ins.get(3)), (vec![0, 1, 0, 0, 2, 0], None));
}

#[test]
fn bounds_that_are_computed_in_floating_point() {
    let mut model = one("", "Cast", &[("n", DType::I64, &[])], &["f"]).int("to", 1);
    model = model.whole("n", 7).whole("zero", 0).whole("unit", 1);
    let mut back = node("Cast", &["c"], "m");
    back.attribute.push(int("to", 7));
    model.more = vec![
        node("Div", &["f", "two"], "h"),
        node("Ceil", &["h"], "c"),
        back,
        node("Range", &["zero", "m", "unit"], "y"),
    ];
    let graph = read(model.number("two", 2.0).outputs(&["y"]));
    assert_eq!(output(&graph, 0), ("y".into(), "i64[4]".into()));
}
