//! Models that take gradients themselves: a training graph of ours that is differentiated once more, and an exported
//! program with its backward pass inside.

use crate::support::command;

use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Attrs, Graph};
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::{ops, text};
use command::{call, code, fixture, json, stderr};

/// A norm whose statistics its gradient reads, a softmax and a GELU; all smooth.
fn model(dtype: &str) -> String {
    let weight: Vec<String> = (0..12)
        .map(|i| format!("{:.2}", f64::from(i * 7 % 12) / 6.0 - 0.9))
        .collect();
    format!(
        "graph @m typed (%x: {dtype}[n, 3], %t: {dtype}[n, 4]) -> (%loss) {{
  init %w : {dtype}[3, 4] = [{}]
  init %s : {dtype}[4] = [1, 0.5, -1, 2]
  %a = MatMul %x, %w : {dtype}[n, 4]
  %h = LayerNormalization %a, %s, %s : {dtype}[n, 4]
  %p = Softmax %h : {dtype}[n, 4]
  %g = Gelu %p : {dtype}[n, 4]
  %d = Sub %g, %t : {dtype}[n, 4]
  %q = Mul %d, %d : {dtype}[n, 4]
  %loss = ReduceMean %q {{keepdims=0}} : {dtype}[]
}}
",
        weight.join(", ")
    )
}

/// The training graph of [`model`] with an output `penalty`: its loss and the squares of a gradient.
fn penalised(dtype: &str) -> Graph {
    let mut graph = text::parse(&model(dtype)).unwrap();
    let request = request(Loss::Output("loss".into()));
    compile(&mut graph, &request, &mut Watch::default()).unwrap();
    let value = |name: &str| graph.find_value(name).unwrap();
    let (gradient, loss) = (value("w.grad"), value("q"));
    let mut b = Builder::new(&mut graph);
    let whole = Attrs::new().with("keepdims", 0);
    let square = b.emit(&ops::reduce::REDUCE_SUM_SQUARE, &[gradient], whole.clone());
    let loss = b.emit(&ops::reduce::REDUCE_MEAN, &[loss], whole);
    let penalty = b.add(loss.unwrap(), square.unwrap()).unwrap();
    graph.rename_value(penalty, "penalty");
    graph.add_output(penalty);
    graph
}

fn request(loss: Loss) -> Request {
    Request {
        loss,
        plan: Policy::NONE.into(),
        ..Request::default()
    }
}

fn outputs(graph: &Graph) -> Vec<&str> {
    let names = graph.outputs().iter();
    names.map(|v| graph.value(*v).name.as_str()).collect()
}

#[test]
fn a_training_graph_is_differentiated_once_more() {
    let mut graph = penalised("f32");
    let request = request(Loss::Output("penalty".into()));
    let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
    assert_eq!(done.loss, Some(Loss::Output("penalty".into())));
    let earlier = ["before.loss", "before.w.grad", "before.s.grad", "penalty"];
    let names = outputs(&graph);
    assert_eq!(names[0], "loss");
    assert_eq!(names[1..5], earlier);
    assert_eq!(names[5..], ["w.grad", "s.grad"]);
    let said = "gradients of gradients are taken through bodies in standard ops, for want of rules: 1 GeluGrad, 1 LayerNormGrad, 1 SoftmaxGrad";
    assert!(
        done.warnings.iter().any(|w| w == said),
        "{:?}",
        done.warnings
    );
    // Without a loss that is named it is planned as it is.
    let mut graph = penalised("f32");
    let done = compile(&mut graph, &Request::default(), &mut Watch::default()).unwrap();
    assert_eq!(done.loss, None);
    assert_eq!(outputs(&graph), ["loss", "w.grad", "s.grad", "penalty"]);
}

#[test]
fn what_came_before_may_be_the_loss_again() {
    for name in ["loss", "before.loss"] {
        let mut graph = penalised("f32");
        let request = request(Loss::Output(name.into()));
        let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
        assert_eq!(done.loss, Some(Loss::Output("before.loss".into())));
        assert!(done.warnings.is_empty(), "{:?}", done.warnings);
    }
}

#[test]
fn a_step_that_updates_is_not_differentiated_once_more() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    std::fs::write(here.join("m.ckir"), model("f32")).unwrap();
    let step = ["m.ckir", "-o", "step.onnx", "--optimizer", "sgd"];
    let made = call(here, &step);
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    let refused = call(
        here,
        &["step.onnx", "-o", "t.onnx", "--loss", "output:loss"],
    );
    assert_eq!(code(&refused), 2, "{}", stderr(&refused));
    assert!(stderr(&refused).contains("without --optimizer"));
    let other = call(here, &["step.onnx", "-o", "t.onnx", "--loss", "mse"]);
    assert_eq!(code(&other), 2, "{}", stderr(&other));
}

#[test]
fn a_program_that_takes_gradients_is_announced() {
    let dir = tempfile::tempdir().unwrap();
    let program = fixture("exported", "forces.pt2");
    let made = json(&call(
        dir.path(),
        &[
            program.to_str().unwrap(),
            "-o",
            "t.onnx",
            "--loss",
            "vjp",
            "--policy",
            "none",
            "--format",
            "json",
        ],
    ));
    let warnings = made["warnings"].as_array().unwrap();
    let said = warnings.iter().filter_map(|w| w.as_str());
    let said: Vec<&str> = said.filter(|w| w.contains("through bodies")).collect();
    assert_eq!(said.len(), 1, "{warnings:?}");
    for op in ["1 AttentionGrad", "2 LayerNormGrad", "1 SoftmaxGrad"] {
        assert!(said[0].contains(op), "{op}: {}", said[0]);
    }
}

#[cfg(feature = "torch")]
mod runs {
    use super::*;
    use crate::support::torch;
    use ckpt_opt::frontend::load;
    use ckpt_opt::optimize::{optimize, write};
    use ckpt_opt::provenance::keys;
    use ckpt_opt::runtime::executor::Program;
    use std::collections::BTreeMap;
    use std::path::Path;
    use tch::{Kind, Tensor};

    fn run(graph: &Graph, inputs: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
        let program = Program::new(graph).unwrap();
        program.run(inputs).unwrap().outputs.into_iter().collect()
    }

    #[test]
    fn gradients_of_a_penalty_on_gradients_agree_with_differences() {
        torch::alone();
        let once = penalised("f64");
        let mut twice = once.clone();
        let request = request(Loss::Output("penalty".into()));
        compile(&mut twice, &request, &mut Watch::default()).unwrap();
        let numbers = |n: i64, by: f64| {
            let spread: Vec<f64> = (0..n).map(|i| (i as f64 * by).sin()).collect();
            Tensor::from_slice(&spread)
        };
        let mut feed = BTreeMap::from([
            ("x".to_string(), numbers(15, 1.3).view([5, 3])),
            ("t".to_string(), numbers(20, 0.7).view([5, 4])),
        ]);
        let found = run(&twice, &feed);
        let weight = once.find_value("w").unwrap();
        let weight = once.value(weight).tensor().unwrap();
        let start: Vec<f64> = (0..12).map(|i| weight.get_f64(i).unwrap()).collect();
        // The weight as an input, so that it can be moved.
        let open = text::print_full(&once);
        let line = open.lines().find(|l| l.trim().starts_with("init %w :"));
        let open = open.replace(&format!("{}\n", line.unwrap()), "");
        let open = text::parse(&open.replacen("(%x:", "(%w: f64[3, 4], %x:", 1)).unwrap();
        let mut at = |moved: &[f64]| {
            feed.insert("w".into(), Tensor::from_slice(moved).view([3, 4]));
            run(&open, &feed)["penalty"].double_value(&[])
        };
        for i in 0..12 {
            let mut side = |step: f64| {
                let mut moved = start.clone();
                moved[i] += step;
                at(&moved)
            };
            let slope = (side(1e-6) - side(-1e-6)) / 2e-6;
            let gradient = found["w.grad"].view([-1]).double_value(&[i as i64]);
            assert!(
                (slope - gradient).abs() <= 1e-7 * (1.0 + slope.abs()),
                "w[{i}]: differences {slope}, found {gradient}"
            );
        }
    }

    /// Both statistics reach the loss, with the result of the norm and without.
    #[test]
    fn statistics_of_a_norm_have_the_gradients_of_what_they_are() {
        torch::alone();
        let source = |norm: &str, result: &str| {
            format!(
                "graph @m typed (%x: f32[n, 4], %c: f32[n, 1]) -> (%y) {{
  init %w : f32[4] = [1, 0.5, -1, 2]
  init %eps : f32[] = 0.001
  init %last : i64[1] = [-1]
  %a = Mul %x, %w : f32[n, 4]
{norm}  %u = Mul %m, %m : f32[n, 1]
  %v = Mul %r, %c : f32[n, 1]
  %z = Add %u, %v : f32[n, 1]
  %b = {result} : f32[n, 4]
  %p = Mul %b, %b : f32[n, 4]
  %y = ReduceSum %p {{keepdims=0}} : f32[]
}}
"
            )
        };
        let whole = "  %h, %m, %r = LayerNormalization %a, %w {epsilon=0.001} : f32[n, 4], f32[n, 1], f32[n, 1]\n";
        let parts = "  %m = ReduceMean %a, %last : f32[n, 1]
  %o = Sub %a, %m : f32[n, 4]
  %q = Mul %o, %o : f32[n, 4]
  %e = ReduceMean %q, %last : f32[n, 1]
  %f = Add %e, %eps : f32[n, 1]
  %k = Sqrt %f : f32[n, 1]
  %r = Reciprocal %k : f32[n, 1]
  %i = Mul %o, %r : f32[n, 4]
  %h = Mul %i, %w : f32[n, 4]
";
        let feed = BTreeMap::from([
            (
                "x".to_string(),
                Tensor::from_slice(&[0.3f32, -1.0, 0.7, 2.0, 1.5, -0.2, 0.1, 0.4]).view([2, 4]),
            ),
            (
                "c".to_string(),
                Tensor::from_slice(&[0.6f32, -1.1]).view([2, 1]),
            ),
        ]);
        for result in ["Add %h, %z", "Expand %z, %shape"] {
            let gradient = |norm: &str| {
                let shape = "  %shape = Shape %x : i64[2]\n";
                let norm = match result.contains("shape") {
                    true => format!("{norm}{shape}"),
                    false => norm.to_string(),
                };
                let mut graph = text::parse(&source(&norm, result)).unwrap();
                let request = request(Loss::Output("y".into()));
                compile(&mut graph, &request, &mut Watch::default()).unwrap();
                run(&graph, &feed).remove("w.grad").unwrap()
            };
            let (whole, parts) = (gradient(whole), gradient(parts));
            let largest = parts.abs().max().double_value(&[]);
            let gap = (&whole - &parts).abs().max().double_value(&[]);
            assert!(gap <= 1e-5 * largest, "{result}: {gap} of {largest}");
            assert!(largest > 0.1 && whole.kind() == Kind::Float);
        }
    }

    fn equal(here: &Path, a: &str, b: &str) {
        let done = call(here, &["verify", a, b]);
        assert_eq!(code(&done), 0, "{}", stderr(&done));
    }

    #[test]
    fn planned_at_a_budget_they_are_equal_bit_for_bit() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        let program = fixture("exported", "forces.pt2");
        let program = program.to_str().unwrap();
        let made = json(&call(
            here,
            &[
                program, "-o", "t.onnx", "--loss", "vjp", "--budget", "90%", "--format", "json",
            ],
        ));
        assert!(
            made["recomputed_bytes"].as_u64().is_some_and(|n| n > 0),
            "{made}"
        );
        equal(here, program, "t.onnx");
    }

    #[test]
    fn the_file_of_a_second_differentiation_tells_how_it_was_made() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        let mut graph = penalised("f32");
        let earlier = [(keys::LOSS, "output:loss"), (keys::TILE, "4")];
        let earlier = earlier.map(|(k, v)| (k.to_string(), v.to_string()));
        graph.meta.extend(earlier);
        let once = here.join("once.onnx");
        write(&graph, &once, &once, Default::default()).unwrap();
        let given = Default::default();
        let mut read = load(&once, &given).unwrap().graph;
        let request = request(Loss::Output("penalty".into()));
        optimize(&mut read, &request, &mut Watch::default()).unwrap();
        let twice = here.join("twice.onnx");
        write(&read, &once, &twice, Default::default()).unwrap();
        let read = load(&twice, &given).unwrap().graph;
        let said = |key: &str| read.meta.get(key).map(String::as_str);
        assert_eq!(said(keys::ORDER), Some("2"));
        assert_eq!(said(keys::LOSS), Some("output:penalty"));
        assert_eq!(said(keys::TILE), None);
        equal(here, "once.onnx", "twice.onnx");
        std::fs::write(here.join("m.ckir"), model("f32")).unwrap();
        for (a, b) in [("m.ckir", "twice.onnx"), ("twice.onnx", "once.onnx")] {
            let refused = call(here, &["verify", a, b]);
            assert_eq!(code(&refused), 2, "{a} {b}: {}", stderr(&refused));
        }
    }
}
