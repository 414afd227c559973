//! Chains of ops on tokens computed part by part, forward and backward: the same gradients, and a peak that computing
//! again alone does not reach.
use crate::support::torch;

use ckpt_opt::runtime::executor::Program;
use ckpt_passes::compile::{Compiled, Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{DType, Graph, Node};
use ckpt_passes::plan::{Budget, Effort, PlanRequest, Policy};
use ckpt_passes::text;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::tile::{Tile, Tiles};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};
use torch::tensor;

const NARROW: usize = 4;
const WIDE: usize = 12;

/// What lies between `%x`, activations of `batch` × `seq` tokens, and `%y`.
const CHAINS: &[(&str, &str)] = &[
    (
        "a gated MLP",
        "%a = MatMul %x, %up
  %b = MatMul %x, %gate
  %s = Sigmoid %b
  %g = Mul %b, %s
  %h = Mul %a, %g
  %y = MatMul %h, %down",
    ),
    (
        "biases, products in one op with them, and tokens as one axis",
        "%flat = Reshape %x, %tokens
  %a = Gemm %flat, %up, %wide_bias
  %g = Gelu %a
  %o = Gemm %g, %down_t, %narrow_bias {transB=1}
  %of = Shape %x
  %y = Reshape %o, %of",
    ),
    (
        "a norm of wide rows inside",
        "%a = MatMul %x, %up
  %ab = Add %a, %wide_bias
  %p = Softmax %ab {axis=-1}
  %m = ReduceMean %ab, %last
  %c = Sub %ab, %m
  %h = Mul %c, %p
  %y = MatMul %h, %down",
    ),
    (
        "a table of which every token looks up an entry",
        "%which = ArgMax %x {axis=-1, keepdims=0}
  %a = MatMul %x, %up
  %entry = Gather %gate, %which
  %b = Mul %a, %entry
  %h = Tanh %b
  %y = MatMul %h, %down",
    ),
];

fn model(chain: &str, sizes: &str, dtype: &str) -> Graph {
    let list = |n: usize, step: usize| {
        let number = |i: usize| ((i * step % 23) as f64 - 11.0) / 16.0;
        let all: Vec<String> = (0..n).map(|i| format!("{:.4}", number(i))).collect();
        all.join(", ")
    };
    let (product, up, down) = (
        NARROW * WIDE,
        list(NARROW * WIDE, 37),
        list(NARROW * WIDE, 41),
    );
    assert_eq!(product, 48);
    let used = |name: &str, rest: String| match chain.contains(&format!("%{name}")) {
        true => format!("  init %{name} : {rest}\n"),
        false => String::new(),
    };
    let inits = [
        used("up", format!("{dtype}[{NARROW}, {WIDE}] = [{up}]")),
        used(
            "gate",
            format!("{dtype}[{NARROW}, {WIDE}] = [{}]", list(48, 43)),
        ),
        used("down_t", format!("{dtype}[{NARROW}, {WIDE}] = [{down}]")),
        match chain.contains("%down_t") {
            true => String::new(),
            false => format!("  init %down : {dtype}[{WIDE}, {NARROW}] = [{down}]\n"),
        },
        used(
            "wide_bias",
            format!("{dtype}[{WIDE}] = [{}]", list(WIDE, 5)),
        ),
        used(
            "narrow_bias",
            format!("{dtype}[{NARROW}] = [{}]", list(NARROW, 7)),
        ),
        used("tokens", "i64[2] = [-1, 4]".into()),
        used("last", "i64[1] = [-1]".into()),
    ];
    text::parse(&format!(
        "graph @g imported (%in: {dtype}[{sizes}, {NARROW}]) -> (%total) {{
  init %scale : {dtype}[{NARROW}] = [1.5, -0.5, 0.75, 2]
{}  %x = Mul %in, %scale
  {chain}
  %res = Add %x, %y
  %t = Tanh %res
  %q = Mul %t, %t
  %total = ReduceSum %q {{keepdims=0}}
}}
",
        inits.concat()
    ))
    .unwrap_or_else(|e| panic!("{e}"))
}

fn training(chain: &str, sizes: &str, dtype: &str, request: Request) -> (Graph, Compiled) {
    let mut graph = model(chain, sizes, dtype);
    let mut request = Request {
        loss: Loss::Output("total".into()),
        ..request
    };
    let names = [
        "up",
        "gate",
        "down",
        "down_t",
        "wide_bias",
        "narrow_bias",
        "scale",
    ];
    request.selection.trainable = names.map(String::from).to_vec();
    request
        .selection
        .trainable
        .retain(|name| graph.find_value(name).is_some());
    let done = compile(&mut graph, &request, &mut Watch::default());
    (graph, done.unwrap_or_else(|e| panic!("{e}")))
}

fn unplanned(mlp: Tile) -> Request {
    Request {
        plan: Policy::NONE.into(),
        tile: Tiles {
            mlp,
            ..Tiles::default()
        },
        ..Request::default()
    }
}

fn feed(dtype: DType, batch: i64, seq: i64) -> BTreeMap<String, Tensor> {
    let n = (batch * seq) as usize * NARROW;
    let x: Vec<f64> = (0..n)
        .map(|i| ((i * 29 % 31) as f64 - 15.0) / 16.0)
        .collect();
    let dims = [batch, seq, NARROW as i64];
    BTreeMap::from([("in".to_string(), tensor(dtype, &dims, &x))])
}

fn run(graph: &Graph, feed: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let program = Program::new(graph).unwrap_or_else(|e| panic!("{e}"));
    let done = program.run(feed).unwrap_or_else(|e| panic!("{e}"));
    let doubles = done.outputs.into_iter();
    doubles
        .map(|(name, x)| (name, x.to_kind(Kind::Double)))
        .collect()
}

fn gap(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

#[test]
fn parts_of_chains_make_the_whole() {
    torch::alone();
    for (name, chain) in CHAINS {
        for (sizes, batch, seq) in [("batch, seq", 3, 5), ("3, 5", 3, 5), ("batch, seq", 1, 1)] {
            let whole = run(
                &training(chain, sizes, "f64", unplanned(Tile::Off)).0,
                &feed(DType::F64, batch, seq),
            );
            for n in [2, 4, 15, 40] {
                let (graph, done) = training(chain, sizes, "f64", unplanned(Tile::Chunks(n)));
                assert_eq!(done.warnings, Vec::<String>::new(), "{name}");
                assert_eq!(done.tiled_mlps.len(), 1, "{name}");
                let parts = run(&graph, &feed(DType::F64, batch, seq));
                assert!(whole.keys().eq(parts.keys()), "{name}");
                for (output, a) in &whole {
                    assert_eq!(a.size(), parts[output].size(), "{name}: {output}");
                    let least = if output == "loss" { 1e-6 } else { 1e-12 };
                    let most = a.abs().max().double_value(&[]).max(1e-3);
                    let gap = gap(a, &parts[output]);
                    assert!(
                        gap <= least * most,
                        "{name}, {n} parts: {output} is off by {gap}"
                    );
                }
            }
        }
    }
}

#[test]
fn sums_over_parts_are_wide_where_numbers_are_narrow() {
    torch::alone();
    for (name, chain) in CHAINS {
        let exact = training(chain, "6, 50", "f64", unplanned(Tile::Off)).0;
        let whole = training(chain, "6, 50", "bf16", unplanned(Tile::Off)).0;
        let parts = training(chain, "6, 50", "bf16", unplanned(Tile::Chunks(20))).0;
        let mut nodes = parts.order().iter().map(|id| parts.node(*id));
        let is_wide = |n: &Node| parts.ty(n.outs[0]).dtype == DType::F32;
        assert!(
            nodes.all(|n| n.op.name != "GatherGrad" || is_wide(n)),
            "{name}"
        );
        let exact = run(&exact, &feed(DType::F64, 6, 50));
        let whole = run(&whole, &feed(DType::BF16, 6, 50));
        let parts = run(&parts, &feed(DType::BF16, 6, 50));
        for (output, exact) in &exact {
            let (own, other) = (gap(&parts[output], exact), gap(&whole[output], exact));
            let rounding = exact.abs().max().double_value(&[]) / 256.0;
            assert!(
                own <= 1.1 * other + rounding,
                "{name}: {output} is off by {own}, whole by {other}"
            );
        }
    }
}

#[test]
fn the_peak_falls_below_what_computing_again_reaches() {
    torch::alone();
    let budget = |mlp: Tile, budget: Budget| Request {
        plan: PlanRequest {
            effort: Effort::First,
            ..budget.into()
        },
        ..unplanned(mlp)
    };
    let (_, chain) = CHAINS[0];
    let sizes = "64, 64";
    let plain = training(chain, sizes, "f32", budget(Tile::Off, Budget::Auto)).1;
    let untiled = plain.planned.unwrap().outcome.plan;
    let below = untiled.after.static_bytes + untiled.after.peak_above_static_bytes / 2;
    let mut impossible = model(chain, sizes, "f32");
    let mut request = budget(Tile::Off, Budget::Bytes(below));
    request.loss = Loss::Output("total".into());
    let refused = compile(&mut impossible, &request, &mut Watch::default());
    assert_eq!(refused.err().unwrap().exit_code(), 3);
    let (graph, done) = training(
        chain,
        sizes,
        "f32",
        budget(Tile::Auto, Budget::Bytes(below)),
    );
    let plan = done.planned.unwrap().outcome.plan;
    assert!(plan.after.peak_bytes <= below, "{}", plan.after.peak_bytes);
    assert!(plan.mlp_chunks.unwrap() > 1);
    assert!(plan.recompute_flops() > 0, "parts are computed again");
    let program = Program::new(&graph).unwrap();
    let run = program.run(&feed(DType::F32, 64, 64)).unwrap();
    assert_eq!(run.peak_bytes, plan.after.peak_bytes);
    let (unplanned, _) = training(
        chain,
        sizes,
        "f32",
        unplanned(Tile::Chunks(plan.mlp_chunks.unwrap())),
    );
    let kept = Program::new(&unplanned).unwrap();
    let kept = kept.run(&feed(DType::F32, 64, 64)).unwrap();
    let bits: BTreeMap<String, Tensor> = kept.outputs.into_iter().collect();
    for (name, x) in run.outputs {
        assert!(
            x.equal(&bits[&name]),
            "{name} has other bits than without a plan"
        );
    }
}
