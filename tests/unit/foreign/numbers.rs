//! Numbers that are counted or moved bit by bit: `Range` of floats, `Mod`, `BitShift`, and the oldest opsets.

use super::one::*;
use ckpt_passes::ir::DType;

const START: (&str, DType, &[&str]) = ("start", DType::F32, &[]);
const LIMIT: (&str, DType, &[&str]) = ("limit", DType::F32, &[]);
const DELTA: (&str, DType, &[&str]) = ("delta", DType::F32, &[]);

fn range() -> One {
    one("", "Range", &[START, LIMIT, DELTA], &["y"])
}

#[test]
fn a_range_of_whole_floats_has_a_known_size() {
    let graph = range()
        .number("start", 1.0)
        .number("limit", 8.0)
        .number("delta", 2.0)
        .graph();
    assert_eq!(ops(&graph), "Range Cast");
    assert_eq!(output(&graph, 0).1, "f32[4]");
    // A fraction is left to the op.
    let read = range()
        .number("start", 0.5)
        .number("limit", 8.0)
        .number("delta", 2.0)
        .read();
    let graph = read.unwrap().graph;
    assert_eq!(ops(&graph), "Range");
    assert!(output(&graph, 0).1.starts_with("f32[?"));
}

#[test]
fn a_range_to_the_cast_of_a_size_has_that_size() {
    let x = ("x", DType::F32, &["s"] as &[_]);
    let mut file = one("", "Size", &[x], &["n"])
        .number("start", 0.0)
        .number("delta", 1.0);
    let mut cast = file.node.clone();
    cast.name = Some("cast".into());
    cast.op_type = Some("Cast".into());
    cast.input = vec!["n".into()];
    cast.output = vec!["limit".into()];
    let to = i64::from(DType::F32.onnx_code());
    cast.attribute = one("", "Cast", &[], &[]).int("to", to).node.attribute;
    file.more = vec![cast, range().node];
    let graph = file.outputs(&["y"]).read().unwrap().graph;
    assert_eq!(output(&graph, 0).1, "f32[s]");
}

#[test]
fn sixteen_bit_bounds_are_added_up_in_float32() {
    let half = |name| (name, DType::F16, &[] as &[_]);
    let range = || {
        let operands = [half("start"), half("limit"), half("delta")];
        one("", "Range", &operands, &["y"]).opset(27)
    };
    assert_eq!(ops(&range().graph()), "Cast Cast Cast Range Cast");
    let said = range().int("stash_type", 11).refusal();
    assert!(said.contains("`stash_type` = 11"), "{said}");
}

#[test]
fn a_float_remainder_takes_the_sign_of_the_divisor() {
    let x = ("x", DType::F32, &["b", "3"] as &[_]);
    let y = ("by", DType::F32, &["3"] as &[_]);
    let graph = one("", "Mod", &[x, y], &["y"]).opset(28).graph();
    assert!(ops(&graph).starts_with("Mod Less Less Xor"));
    assert_eq!(output(&graph, 0).1, "f32[b, 3]");
    let plain = one("", "Mod", &[x, y], &["y"])
        .opset(28)
        .int("fmod", 1)
        .read();
    assert_eq!(ops(&plain.unwrap().graph), "Mod");
}

#[test]
fn signed_bits_are_moved_by_arithmetic() {
    let x = ("x", DType::I8, &["b", "3"] as &[_]);
    let by = ("by", DType::I8, &["3"] as &[_]);
    let shift = |direction| {
        one("", "BitShift", &[x, by], &["y"])
            .opset(28)
            .attribute(text("direction", direction))
    };
    for direction in ["LEFT", "RIGHT"] {
        assert_eq!(output(&shift(direction).graph(), 0).1, "i8[b, 3]");
    }
    let said = shift("UP").refusal();
    assert!(said.contains("LEFT or RIGHT"), "{said}");
}

#[test]
fn of_the_first_opsets_only_what_never_changed_is_read() {
    let truth = ("x", DType::Bool, &["b"] as &[_]);
    let not = one("", "Not", &[truth], &["y"]).opset(1).read();
    assert_eq!(ops(&not.unwrap().graph), "Not");
    // Broadcasting was an attribute.
    let said = one("", "Add", &[X, SKIP], &["y"]).opset(6).refusal();
    assert!(said.contains("Add as it was in opset 6"), "{said}");
    let said = one("", "Dropout", &[X], &["y"]).opset(1).refusal();
    assert!(said.contains("Dropout as it was in opset 1"), "{said}");
}
