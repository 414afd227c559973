//! Attention whose scores are joined with a sink: fused or as exported, whole, in chunks of the sequence, or with padding.
use crate::support::torch;

use ckpt_opt::runtime::{convert, executor::Program};
use ckpt_opt::tensors::{Tensors, feed::Feed, random};
use ckpt_passes::analysis::sdpa::{SdpaBackend, SdpaBackends};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Dim, Graph};
use ckpt_passes::ops::attention::{ATTENTION, ATTENTION_GRAD, DLSE};
use ckpt_passes::plan::{Budget, Effort, PlanRequest, Policy};
use ckpt_passes::text;
use ckpt_passes::transform::loss::Loss;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Weights are ones times random inputs. The first layer has a window of three keys.
const INITS: &str = "
  init %table.w : f32[7, 8] = splat 1
  init %q.w : f32[8, 8] = splat 1
  init %k.w : f32[8, 8] = splat 1
  init %sink : f32[2] = [0.5, -1.5]
  init %zero : i64[] = 0
  init %one : i64[] = 1
  init %two : i64[] = 2
  init %a0 : i64[1] = [0]
  init %a1 : i64[1] = [1]
  init %a3 : i64[1] = [3]
  init %apart : i64[4] = [0, 0, 2, 4]
  init %wide : i64[4] = [1, 2, 1, 1]
  init %flat : i64[3] = [0, 0, 8]
  init %scale : f32[] = 0.5
  init %none : f32[] = 0.0
  init %low : f32[] = -3.4028235e38
  %table = Mul %xt, %table.w
  %qw = Mul %xq, %q.w
  %kw = Mul %xk, %k.w
  %len = Shape %ids {start=1, end=2}
  %count = Squeeze %len
  %range = Range %zero, %count, %one
  %row = Unsqueeze %range, %a1
  %column = Unsqueeze %range, %a0
  %past = LessOrEqual %column, %row
  %seen1 = Identity %past
  %from = Sub %row, %two
  %near = GreaterOrEqual %column, %from
  %seen0 = And %past, %near
  %x0 = Gather %table, %ids
";

fn layer(i: usize) -> String {
    format!(
        "  %q{i} = MatMul %x{i}, %qw
  %qa{i} = Reshape %q{i}, %apart
  %qh{i} = Transpose %qa{i} {{perm=[0, 2, 1, 3]}}
  %k{i} = MatMul %x{i}, %kw
  %ka{i} = Reshape %k{i}, %apart
  %kh{i} = Transpose %ka{i} {{perm=[0, 2, 1, 3]}}
  %kt{i} = Transpose %kh{i} {{perm=[0, 1, 3, 2]}}
  %qk{i} = MatMul %qh{i}, %kt{i}
  %scaled{i} = Mul %qk{i}, %scale
  %mask{i} = Where %seen{i}, %none, %low
  %masked{i} = Add %scaled{i}, %mask{i}
  %sink{i} = Reshape %sink, %wide
  %rows{i} = Shape %qh{i} {{start=0, end=3}}
  %shape{i} = Concat %rows{i}, %a1 {{axis=0}}
  %column{i} = Expand %sink{i}, %shape{i}
  %all{i} = Concat %masked{i}, %column{i} {{axis=3}}
  %max{i} = ReduceMax %all{i}, %a3 {{keepdims=1}}
  %less{i} = Sub %all{i}, %max{i}
  %both{i} = Softmax %less{i} {{axis=3}}
  %p{i} = Slice %both{i}, %a0, %len, %a3
  %y{i} = MatMul %p{i}, %kh{i}
  %yt{i} = Transpose %y{i} {{perm=[0, 2, 1, 3]}}
  %yf{i} = Reshape %yt{i}, %flat
  %x{next} = Add %x{i}, %yf{i}
",
        next = i + 1
    )
}

fn source() -> String {
    let head = "  %headt = Transpose %table {perm=[1, 0]}\n  %logits = MatMul %x2, %headt\n";
    format!(
        "graph @g imported (%ids: i64[batch, seq], %xt: f32[7, 8], %xq: f32[8, 8], %xk: f32[8, 8]) \
         -> (%logits) {{{INITS}{}{}{head}}}\n",
        layer(0),
        layer(1)
    )
}

/// Also returns the predicted peak.
fn compiled(
    source: &str,
    fuse: bool,
    sequence_chunks: usize,
    plan: PlanRequest,
) -> (Graph, Option<u64>) {
    let request = Request {
        loss: Loss::parse("causal-lm").unwrap(),
        plan,
        dims: dims(),
        drop_outputs: vec!["logits".into()],
        fuse,
        sequence_chunks,
        ..Request::default()
    };
    let mut graph = text::parse(source).unwrap();
    let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
    let peak = done.planned.map(|p| p.outcome.plan.after.peak_bytes);
    (graph, peak)
}

fn dims() -> Vec<(String, i64)> {
    vec![("batch".into(), 2), ("seq".into(), 29)]
}

type Outputs = BTreeMap<String, Tensor>;

fn run(graph: &Graph) -> (Outputs, u64) {
    let program = Program::new(graph).unwrap();
    let done = program.run(&inputs(graph)).unwrap();
    (done.outputs.into_iter().collect(), done.peak_bytes)
}

fn inputs(graph: &Graph) -> Outputs {
    let mut feed = Feed::new(graph, Tensors::new()).unwrap();
    random::fill(graph, &mut feed, &dims(), 7).unwrap();
    let inputs = feed.inputs.iter();
    inputs
        .map(|(n, x)| (n.clone(), convert::tensor(n, x).unwrap()))
        .collect()
}

#[test]
fn sinks_leave_no_scores_and_change_no_gradient() {
    torch::alone();
    let (exported, _) = run(&compiled(&source(), false, 1, Policy::NONE.into()).0);
    assert!(exported.contains_key("sink.grad"));
    for chunks in [1, 2, 5] {
        let (graph, _) = compiled(&source(), true, chunks, Policy::NONE.into());
        let nodes = || graph.order().iter().map(|id| graph.node(*id));
        assert_eq!(nodes().filter(|n| n.op == &ATTENTION).count(), 2 * chunks);
        let gradients = nodes().filter(|n| n.op == &ATTENTION_GRAD);
        let of_lse = gradients.filter(|n| n.operand(DLSE).is_some());
        assert_eq!(of_lse.count(), 2 * chunks);
        let has_scores = |dims: &[Dim]| dims.len() == 4 && dims[2] == dims[3] && !dims[3].is_one();
        let mut results = nodes().flat_map(|n| &n.outs);
        assert!(!results.any(|v| graph.ty(*v).dtype.is_float() && has_scores(&graph.ty(*v).dims)));
        let (unplanned, peak) = run(&graph);
        torch::assert_within(&unplanned, &exported, 1e-5, "sinks");
        let budget = PlanRequest {
            effort: Effort::First,
            ..Budget::Percent(90.0).into()
        };
        let (graph, predicted) = compiled(&source(), true, chunks, budget);
        let (planned, measured) = run(&graph);
        assert_eq!(Some(measured), predicted);
        assert!(measured < peak);
        for (name, x) in &planned {
            assert!(torch::same_bits(x, &unplanned[name]), "{chunks}: {name}");
        }
    }
}

/// No kernel of PyTorch takes the cotangent of the log-sum-exp.
#[test]
fn a_gradient_beside_a_sink_runs_in_tiles() {
    torch::alone();
    let (graph, _) = compiled(&source(), true, 1, Policy::NONE.into());
    let inputs = inputs(&graph);
    let mut program = Program::new(&graph).unwrap();
    program.attend_with(SdpaBackends {
        list: vec![SdpaBackend::Cpu],
        ..SdpaBackends::default()
    });
    let taken = program.specialization(&inputs).unwrap().taken();
    // The first layer has a window.
    assert_eq!((taken.flash, taken.tiles), (1, 3));
    let found = program.run(&inputs).unwrap().outputs.into_iter().collect();
    torch::assert_within(&found, &run(&graph).0, 1e-5, "sinks");
}

/// A query that sees no key gives all its weight to the sink, whatever number hides the keys.
#[test]
fn padding_leaves_queries_to_the_sink() {
    torch::alone();
    for low in ["-3.4028235e38", "-inf"] {
        let padded = source()
            .replace(
                "%xk: f32[8, 8])",
                "%xk: f32[8, 8], %pad: bool[batch, 1, 1, seq])",
            )
            .replace("%seen1 = Identity %past", "%seen1 = And %past, %pad")
            .replace(
                "%low : f32[] = -3.4028235e38",
                &format!("%low : f32[] = {low}"),
            );
        let (exported, _) = compiled(&padded, false, 1, Policy::NONE.into());
        let pad = &inputs(&exported)["pad"];
        let sees = pad.select(-1, 0).flatten(0, -1).to_kind(Kind::Int64);
        assert!(
            i64::try_from(sees.min()).unwrap() == 0,
            "every first query sees itself"
        );
        let (fused, _) = compiled(&padded, true, 1, Policy::NONE.into());
        let nodes = fused.order().iter().map(|id| fused.node(*id));
        assert_eq!(nodes.filter(|n| n.op == &ATTENTION).count(), 2, "{low}");
        torch::assert_within(&run(&fused).0, &run(&exported).0, 1e-5, low);
    }
}

/// The exported and the fused form round bfloat16 numbers in different places.
#[test]
fn sinks_beside_16_bit_operands() {
    torch::alone();
    let narrow = source()
        .replace("f32", "bf16")
        .replace("-3.4028235e38", "-3e38");
    let (exported, _) = compiled(&narrow, false, 1, Policy::NONE.into());
    let (fused, _) = compiled(&narrow, true, 1, Policy::NONE.into());
    let nodes = fused.order().iter().map(|id| fused.node(*id));
    assert_eq!(nodes.filter(|n| n.op == &ATTENTION).count(), 2);
    torch::assert_within(&run(&fused).0, &run(&exported).0, 8.0 / 256.0, "sinks");
}
