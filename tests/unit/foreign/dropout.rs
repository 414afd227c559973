//! Dropouts of the file: which drop, by which seed, and what is said of those that an export lost.

use super::one::*;
use ckpt_passes::ir::DType;

const HALF: (&str, DType, &[&str]) = ("ratio", DType::F32, &[]);
const FLAG: (&str, DType, &[&str]) = ("on", DType::Bool, &[]);

fn dropout(results: &[&str]) -> One {
    let mut one = one("", "Dropout", &[X, HALF, FLAG], results).opset(13);
    one.inputs.retain(|i| i.name() != "on");
    one
}

#[test]
fn off_is_the_operand_itself() {
    let graph = dropout(&["y", "mask"]).flag("on", false).graph();
    assert_eq!(ops(&graph), "Identity Shape Expand");
    assert_eq!(output(&graph, 1), ("mask".into(), "bool[b, s, 8]".into()));
    let old = one("", "Dropout", &[X], &["y", "mask"])
        .opset(11)
        .float("ratio", 0.3);
    assert_eq!(ops(&old.outputs(&["y"]).graph()), "Identity");
}

#[test]
fn on_draws_by_the_seed_of_the_step() {
    let graph = dropout(&["y", "mask"]).flag("on", true).graph();
    assert_eq!(ops(&graph), "Dropout Shape SeededUniform GreaterOrEqual");
    assert_eq!(output(&graph, 0), ("y".into(), "f32[b, s, 8]".into()));
    assert_eq!(output(&graph, 1), ("mask".into(), "bool[b, s, 8]".into()));
    let seed = graph.find_value("rng_seed").unwrap();
    assert_eq!(graph.inputs().last(), Some(&seed));
    assert_eq!(graph.ty(seed).to_string(), "i64[]");
    // The mask draws what the dropout draws.
    let node = |i: usize| graph.node(graph.order()[i]);
    assert_eq!(node(0).ins[2..4], node(2).ins[1..3]);

    let taken = one(
        "",
        "Dropout",
        &[X, HALF, FLAG, ("rng_seed", DType::F32, &[])],
        &["y"],
    );
    let mut taken = taken.opset(13).flag("on", true);
    taken.inputs.retain(|i| i.name() != "on");
    taken.node.input.truncate(3);
    assert!(taken.refusal().contains("`rng_seed` is taken"));
}

#[test]
fn a_mode_known_only_at_run_time_scales_the_ratio() {
    let graph = one("", "Dropout", &[X, HALF, FLAG], &["y"])
        .opset(13)
        .graph();
    assert_eq!(ops(&graph), "Where Dropout");
}

#[test]
fn what_an_export_lost_is_named() {
    // q ─ softmax ─ product, with a dropout before them that drops and one inside that does not.
    let mut lost = dropout(&["y"]).flag("on", true);
    let node = |name: &str, op: &str, ins: &[&str], out: &str| {
        let mut node = lost.node.clone();
        node.name = Some(name.into());
        node.op_type = Some(op.into());
        node.input = ins.iter().map(|n| n.to_string()).collect();
        node.output = vec![out.into()];
        node
    };
    let more = vec![
        node("/m/attn/Softmax", "Softmax", &["y"], "p"),
        node("/m/attn/Dropout", "Dropout", &["p", "ratio"], "q"),
        node("/m/attn/MatMul", "MatMul", &["q", "k"], "z"),
        node("/m/bare/Softmax", "Softmax", &["y"], "p2"),
        node("/m/bare/MatMul", "MatMul", &["p2", "k"], "z2"),
        node("/m/a/inner/Relu", "Relu", &["y"], "z3"),
        node("/m/b/Relu", "Relu", &["y"], "z4"),
    ];
    lost.node.name = Some("/m/a/drop/Dropout".into());
    lost.inputs.push(input("k", DType::F32, &["8", "8"]));
    lost.more = more;
    let read = lost.outputs(&["z", "z2", "z3", "z4"]).read();
    let said = read.unwrap_or_else(|e| panic!("{e}")).warnings.join("\n");
    assert!(said.contains("1 of 2 dropouts drop nothing"), "{said}");
    assert!(said.contains("`/m/attn/Dropout`"), "{said}");
    assert!(
        said.contains("one dropout serves several modules: `/m/a/drop/Dropout`"),
        "{said}"
    );
    assert!(said.contains("attention: `/m/bare/Softmax`;"), "{said}");
    // A model whose dropouts are all off was exported for evaluation.
    let quiet = dropout(&["y"]).flag("on", false).read();
    assert_eq!(
        quiet.unwrap_or_else(|e| panic!("{e}")).warnings,
        Vec::<String>::new()
    );
}
