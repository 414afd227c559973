//! The memory of one rank of many, played alone: predicted = measured, whatever the plan and whatever it keeps a slice of.

use super::optimizer::{path, request, session};
use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::optimize;
use ckpt_opt::runtime::ranks::Coordinates;
use ckpt_opt::tensors::random;
use ckpt_passes::Result;
use ckpt_passes::analysis::Device;
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::op::{Effect, OpClass};
use ckpt_passes::ir::{DType, Def, Graph, Tensor, Ty};
use ckpt_passes::ops::collective::{ALL_GATHER, KEEP_SLICE, own_parts, reads_contents};
use ckpt_passes::plan::{Budget, Effort, Offload, OffloadSet, OffloadTarget, PlanRequest, Policy};
use ckpt_passes::text;
use ckpt_passes::transform::collectives::{Mesh, Shard};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::tensor_parallel::share_layers;

/// Bytes of buckets: of each gradient at once, of a few, and of all together.
const BUCKETS: [u64; 3] = [0, 20_000, 25 << 20];
const SHARDS: [Shard; 4] = [Shard::None, Shard::Optimizer, Shard::Grads, Shard::Params];

fn of_rank(name: &str, mesh: Mesh, plan: PlanRequest, is_fused: bool) -> Option<Graph> {
    with_link(name, mesh, plan, (is_fused, Device::default()))
}

fn with_link(
    name: &str,
    mesh: Mesh,
    plan: PlanRequest,
    (is_fused, device): (bool, Device),
) -> Option<Graph> {
    let request = Request {
        device,
        mesh: Some(mesh),
        loss: Loss::CausalLm,
        plan: PlanRequest {
            effort: Effort::First,
            ..plan
        },
        ..request("adamw", is_fused, None)
    };
    let mut graph = load(&path(name), &Given::default()).unwrap().graph;
    match optimize(&mut graph, &request, &mut Watch::default()) {
        Ok(_) => Some(graph),
        Err(e) if e.exit_code() == 3 => None,
        Err(e) => panic!("{name}: {e}"),
    }
}

/// Returns the measured peak and static bytes, of each of some ranks.
fn measured(graph: &Graph, mesh: &Mesh) -> Vec<(u64, u64)> {
    torch::alone();
    let ranks = mesh.ranks();
    let dims = [("batch".to_string(), 2), ("seq".to_string(), 24)];
    let inputs = random::inputs(graph, &dims, 3).unwrap();
    let session = session(graph);
    let run = |rank: u32| {
        let place = (rank as usize, ranks as usize);
        Coordinates::of(graph, place).unwrap().play();
        let run = session.run(&inputs).unwrap();
        assert_eq!(
            run.peak_bytes, run.predicted_peak_bytes,
            "rank {rank} of {ranks}"
        );
        (run.peak_bytes, run.static_bytes)
    };
    [0, ranks - 1].into_iter().map(run).collect()
}

fn plans(policies: &[&str], percents: &[f64]) -> Vec<PlanRequest> {
    let policies = policies.iter().map(|p| Policy::parse(p).unwrap().into());
    let budgets = percents.iter().map(|p| Budget::Percent(*p).into());
    policies.chain(budgets).collect()
}

/// Plays ranks alone, one after the other, by a plan. The number of the plan chooses the bucket size, and whether updates are fused.
/// Returns false if no plan fits the budget.
fn takes_what_was_predicted(
    name: &str,
    (i, plan): (usize, &PlanRequest),
    ranks: u32,
    shard: Shard,
) -> bool {
    let mesh = Mesh {
        dp: ranks,
        tp: 1,
        shard,
        bucket_bytes: BUCKETS[i % 3],
        ..Mesh::default()
    };
    let Some(graph) = of_rank(name, mesh, plan.clone(), i % 2 == 0) else {
        return false;
    };
    let all = measured(&graph, &mesh);
    assert!(all.iter().all(|rank| *rank == all[0]), "{name}: {all:?}");
    true
}

#[test]
fn every_plan_takes_the_memory_that_was_predicted_on_every_rank() {
    let plans = plans(
        &["none", "full", "selective", "submodule"],
        &[90.0, 75.0, 60.0, 45.0],
    );
    let mut seen = 0;
    for (i, plan) in plans.iter().enumerate() {
        for name in ["gpt2", "llama32_bf16"] {
            for ranks in [2, 4] {
                let shard = SHARDS[(i + ranks as usize / 2) % 4];
                seen += usize::from(takes_what_was_predicted(name, (i, plan), ranks, shard));
            }
        }
    }
    assert!(seen > 24, "{seen} plans");
}

/// As above, with eight policies, ten budgets, and every `--shard` setting.
#[test]
#[ignore = "takes minutes"]
fn all_policies_and_ten_budgets_take_the_memory_that_was_predicted_on_every_rank() {
    let plans = plans(
        &[
            "none",
            "selective",
            "full",
            "every:2",
            "first:1",
            "group:2",
            "submodule",
            "parts:mlp",
        ],
        &[95.0, 90.0, 85.0, 80.0, 75.0, 70.0, 65.0, 60.0, 55.0, 50.0],
    );
    let (mut seen, mut infeasible) = (0, 0);
    for (i, plan) in plans.iter().enumerate() {
        for name in ["gpt2", "llama32_bf16"] {
            for ranks in [2, 4] {
                for shard in SHARDS {
                    match takes_what_was_predicted(name, (i, plan), ranks, shard) {
                        true => seen += 1,
                        false => infeasible += 1,
                    }
                }
            }
        }
    }
    println!("{seen} plans, {infeasible} budgets in which nothing fits");
    assert!(seen > 200, "{seen} plans");
}

/// Ranks that have parts of layers: all weights of a layer but norms and biases after sums are in parts.
#[test]
fn parts_of_layers_take_the_memory_that_was_predicted() {
    let policies = ["none", "full", "selective"].map(|p| Policy::parse(p).unwrap());
    let mut plans: Vec<PlanRequest> = policies.map(Into::into).into();
    plans.extend([80.0, 60.0].map(|p| Budget::Percent(p).into()));
    let mut seen = 0;
    for name in ["gpt2", "llama32", "llama32_bf16"] {
        for (i, plan) in plans.iter().enumerate() {
            let bytes = |mesh: Mesh| {
                let graph = of_rank(name, mesh, plan.clone(), i % 2 == 0)?;
                Some(measured(&graph, &mesh))
            };
            let mesh = |dp, tp| Mesh {
                dp,
                tp,
                shard: Shard::None,
                bucket_bytes: BUCKETS[i % 3],
                ..Mesh::default()
            };
            let Some(whole) = bytes(mesh(2, 1)) else {
                continue;
            };
            for (dp, tp, shard) in [
                (1, 2, Shard::None),
                (2, 2, Shard::None),
                (2, 2, SHARDS[1 + i % 3]),
            ] {
                let mesh = Mesh {
                    shard,
                    ..mesh(dp, tp)
                };
                let Some(parts) = bytes(mesh) else {
                    continue;
                };
                assert!(
                    parts.iter().all(|rank| *rank == parts[0]),
                    "{name}: {parts:?}"
                );
                assert!(parts[0].1 < whole[0].1, "{name}: static bytes do not fall");
                seen += 1;
            }
        }
    }
    assert!(seen > 30, "{seen} plans");
}

/// Between the blocks of layers a rank has its own rows of every result, and takes less memory, whatever the plan.
#[test]
fn rows_between_blocks_take_the_memory_that_was_predicted() {
    let plans = plans(&["none", "full"], &[70.0]);
    let mut seen = 0;
    for name in ["gpt2", "llama32_bf16"] {
        for (i, plan) in plans.iter().enumerate() {
            let (dp, shard) = [(1, Shard::None), (2, SHARDS[1 + i % 3])][i % 2];
            let mesh = |shares_rows| Mesh {
                dp,
                tp: 2,
                shares_rows,
                shard,
                bucket_bytes: BUCKETS[i % 3],
            };
            let graph = |rows| of_rank(name, mesh(rows), plan.clone(), i % 2 == 0);
            let (Some(whole), Some(rows)) = (graph(false), graph(true)) else {
                continue;
            };
            let [most, peak] = [&whole, &rows].map(|graph| measured(graph, &mesh(true))[0].0);
            assert!(peak < most, "{name}, plan {i}: {peak}, not below {most}");
            // Norms have half of the rows.
            let elements = |graph: &Graph, v| {
                let all = graph.ty(v).elements();
                all.eval(&|size| Some(if size == "batch" { 2 } else { 24 }))
                    .unwrap()
            };
            let [of_whole, of_rows] = [&whole, &rows].map(|graph| {
                let norms = graph.nodes().map(|(_, node)| node);
                let norms = norms.filter(|node| {
                    let is_first = node.recompute_of.is_none() && node.is_forward();
                    is_first && node.op.class == OpClass::Norm
                });
                let results = norms.map(|node| elements(graph, node.outs[0]));
                results.collect::<Vec<i64>>()
            });
            assert!(!of_whole.is_empty() && of_whole.len() == of_rows.len());
            let halves = of_whole.iter().zip(&of_rows);
            assert!(halves.into_iter().all(|(whole, own)| *whole == 2 * own));
            seen += 1;
        }
    }
    assert!(seen > 4, "{seen} plans");
}

/// Results that all ranks have alike are kept in slices of 1/N, whatever the plan.
#[test]
fn slices_of_kept_results_take_the_memory_that_was_predicted() {
    let policies = ["none", "full", "selective"].map(|p| Policy::parse(p).unwrap());
    let mut plans: Vec<PlanRequest> = policies.map(Into::into).into();
    plans.extend([80.0, 60.0].map(|p| Budget::Percent(p).into()));
    let (mut seen, mut kept) = (0, 0);
    for name in ["gpt2", "llama32", "llama32_bf16"] {
        for (i, plan) in plans.iter().enumerate() {
            for (dp, tp, shard) in [(1, 2, Shard::None), (2, 2, SHARDS[1 + i % 3])] {
                let mesh = Mesh {
                    dp,
                    tp,
                    shard,
                    bucket_bytes: BUCKETS[i % 3],
                    ..Mesh::default()
                };
                let whole = of_rank(name, mesh, plan.clone(), true);
                let offload = Offload {
                    set: OffloadSet::All,
                    to: OffloadTarget::Ranks,
                    ..Offload::default()
                };
                let plan = PlanRequest {
                    offload,
                    ..plan.clone()
                };
                let (Some(whole), Some(graph)) = (whole, of_rank(name, mesh, plan, true)) else {
                    continue;
                };
                let peak = measured(&graph, &mesh)[0].0;
                seen += 1;
                if i < 3 {
                    let most = measured(&whole, &mesh)[0].0;
                    assert!(peak < most, "{name}, plan {i}: {peak}, not below {most}");
                }
                let nodes = graph.nodes().map(|(_, node)| node);
                for node in nodes.filter(|node| node.op == &KEEP_SLICE) {
                    let dims = [("batch".to_string(), 2), ("seq".to_string(), 24)];
                    let elements = |id| {
                        let all = graph.ty(id).elements();
                        let size = |name: &str| Some(dims.iter().find(|d| d.0 == name)?.1);
                        all.eval(&size).unwrap()
                    };
                    let value = node.operand(0).unwrap();
                    assert_eq!(elements(node.outs[0]), (elements(value) + 1) / 2);
                    kept += 1;
                }
            }
        }
    }
    assert!(seen > 20 && kept > 80, "{seen} plans, {kept} slices");
}

/// What a rank keeps of a layer falls by both numbers of ranks.
#[test]
fn slices_of_parts_fall_by_the_number_of_ranks() {
    for name in ["gpt2", "llama32"] {
        let own = |dp| {
            let mesh = Mesh {
                dp,
                tp: 2,
                shard: Shard::Params,
                bucket_bytes: 0,
                ..Mesh::default()
            };
            let graph = of_rank(name, mesh, Policy::NONE.into(), true).unwrap();
            let (peak, _) = measured(&graph, &mesh)[0];
            let elements = |id| graph.ty(id).elements().as_const().unwrap();
            let parts = own_parts(&graph);
            assert!(parts.len() >= 12, "{name}: {} weights", parts.len());
            for part in &parts {
                let (whole, size) = (elements(part.parameter), part.part.size());
                let mine = elements(part.input) as u32;
                let of_two = (whole / size * ((size + 1) / 2)) as u32;
                assert_eq!(mine, of_two.div_ceil(dp), "{name}");
            }
            peak
        };
        assert!(own(8) < own(2), "{name}");
    }
}

#[test]
fn static_bytes_of_parts_fall_by_the_number_of_ranks() {
    for name in ["gpt2", "llama32"] {
        let graph = |mesh| of_rank(name, mesh, Policy::NONE.into(), true).unwrap();
        let part = graph(Mesh {
            tp: 2,
            ..Mesh::default()
        });
        let own = own_parts(&part);
        assert!(own.len() >= 12, "{name}: {} weights", own.len());
        let bytes = |id| {
            let ty: &Ty = part.ty(id);
            ty.elements().as_const().unwrap() as u64 * ty.dtype.size_bytes()
        };
        let parted: u64 = own.iter().map(|p| bytes(p.parameter)).sum();
        let mine: u64 = own.iter().map(|p| bytes(p.input)).sum();
        // Of the vocabulary of 347, both ranks have 174 rows, and one of them is empty.
        let (size, rows) = (own.iter().map(|p| p.part.size()).max(), 347);
        assert_eq!(size, Some(rows), "{name}");
        let row: u64 = own
            .iter()
            .filter(|p| p.part.size() == rows)
            .map(|p| bytes(p.parameter) / rows as u64)
            .sum();
        assert_eq!(2 * mine, parted + row, "{name}");
        // Sizes and numbers that nodes read differ.
        let constants = |graph: &Graph| -> u64 {
            let read = graph.inits().filter(|(id, _)| reads_contents(graph, *id));
            let small = read.filter(|(_, v)| v.ty().dtype.is_int() || v.ty().rank() == 0);
            small.map(|(_, v)| v.tensor().unwrap().size_bytes()).sum()
        };
        let statics = |graph: &Graph, mesh: Mesh| measured(graph, &mesh)[0].1 - constants(graph);
        let tp = Mesh {
            tp: 2,
            ..Mesh::default()
        };
        let dp = Mesh {
            dp: 2,
            ..Mesh::default()
        };
        let saved = statics(&graph(dp), dp) - statics(&part, tp);
        // The parameter and both states of AdamW.
        assert_eq!(saved, 3 * (parted - mine), "{name}");
    }
}

#[test]
fn states_fall_with_the_number_of_ranks() {
    let bytes = |ranks, shard| {
        let mesh = Mesh {
            dp: ranks,
            tp: 1,
            shard,
            bucket_bytes: 0,
            ..Mesh::default()
        };
        let graph = of_rank("gpt2", mesh, Policy::NONE.into(), true).unwrap();
        measured(&graph, &mesh)[0]
    };
    let (whole, statics) = bytes(2, Shard::None);
    let mut last = whole;
    for ranks in [2, 8, 1024] {
        let (peak, sliced) = bytes(ranks, Shard::Grads);
        assert!(peak < last, "{ranks} ranks: {peak}, not below {last}");
        assert!(sliced < statics);
        last = peak;
    }
}

/// A parameter that was gathered for the forward pass is kept, or gathered again in the backward pass, as the link says.
#[test]
fn a_budget_gathers_parameters_again_where_the_link_is_fast() {
    let mesh = Mesh {
        dp: 8,
        tp: 1,
        shard: Shard::Params,
        bucket_bytes: BUCKETS[1],
        ..Mesh::default()
    };
    let again = |gigabytes_per_s: f64| -> usize {
        let device = || Device {
            link_gigabytes_per_s: gigabytes_per_s,
            link_us: 0.0,
            ..Device::default()
        };
        let repeats = [90.0, 80.0, 70.0].map(|percent| {
            let plan = Budget::Percent(percent).into();
            let Some(graph) = with_link("llama32", mesh, plan, (true, device())) else {
                return 0;
            };
            measured(&graph, &mesh);
            let nodes = graph.nodes().map(|(_, node)| node);
            let gathers = nodes.filter(|n| n.op == &ALL_GATHER && n.recompute_of.is_some());
            gathers.count()
        });
        repeats.iter().sum()
    };
    let (fast, slow) = (again(1e3), again(1e-3));
    assert!(fast > slow, "{fast} gathers again, {slow} over a slow link");
}

/// Where the memory of the plan allows it, other nodes run between a gather and the first reader of the parameter.
#[test]
fn parameters_are_gathered_beside_other_nodes() {
    let mesh = Mesh {
        dp: 2,
        tp: 1,
        shard: Shard::Params,
        bucket_bytes: BUCKETS[1],
        ..Mesh::default()
    };
    for plan in [Policy::NONE.into(), Budget::Percent(80.0).into()] {
        let graph = of_rank("gpt2", mesh, plan, true).unwrap();
        measured(&graph, &mesh);
        let order = || graph.order().iter().map(|id| graph.node(*id));
        let (mut beside, mut all) = (0, 0);
        for (at, gather) in order().enumerate().filter(|(_, n)| n.op == &ALL_GATHER) {
            let mut later = order().skip(at + 1).filter(|n| n.op != &ALL_GATHER);
            let next = later.next().unwrap();
            beside += usize::from(next.operands().all(|v| v != gather.outs[0]));
            all += 1;
        }
        assert!(2 * beside > all, "{beside} of {all}");
    }
}

#[test]
fn a_plan_neither_repeats_nor_drops_nor_reorders_what_ranks_do_together() {
    let collectives = |graph: &Graph| -> Vec<String> {
        let nodes = graph.order().iter().map(|id| graph.node(*id));
        let all = nodes.filter(|n| n.op.effect == Effect::Collective);
        all.map(|n| {
            assert!(n.recompute_of.is_none(), "{}", n.name);
            n.name.clone()
        })
        .collect()
    };
    for shard in SHARDS {
        let mesh = Mesh {
            dp: 2,
            tp: 1,
            shard,
            bucket_bytes: BUCKETS[1],
            ..Mesh::default()
        };
        let plain = of_rank("gpt2", mesh, Policy::NONE.into(), true).unwrap();
        let expected = collectives(&plain);
        assert!(expected.len() > 20, "{shard}: {}", expected.len());
        for plan in [Policy::FULL.into(), Budget::Percent(50.0).into()] {
            let plan = PlanRequest {
                reorder: true,
                ..plan
            };
            if let Some(graph) = of_rank("gpt2", mesh, plan, true) {
                assert_eq!(collectives(&graph), expected, "{shard}");
            }
        }
    }
}

/// Returns the values of the output `loss`, for random scores; `labels` are six.
fn losses(graph: &Graph, labels: &[i64]) -> Result<Vec<f64>> {
    let mut inputs = random::inputs(graph, &[], 3)?;
    let bytes: Vec<u8> = labels.iter().flat_map(|l| l.to_le_bytes()).collect();
    inputs.insert("l".into(), Tensor::new(DType::I64, [6], bytes));
    for part in own_parts(graph) {
        let Def::Init(whole) = &graph.value(part.parameter).def else {
            panic!("a part of no weight");
        };
        let own = graph.value(part.input).name.clone();
        inputs.insert(own, whole.clone());
    }
    let run = session(graph).run(&inputs)?;
    let losses = &run.outputs["loss"];
    Ok((0..losses.elements() as usize)
        .map(|i| losses.get_f64(i).unwrap())
        .collect())
}

/// The loss of classes that ranks share is the loss, with every reduction, with class weights and with labels that do not count.
/// One rank has all of them here.
#[test]
fn the_loss_of_shared_classes_is_the_loss() {
    torch::alone();
    for reduction in ["none", "sum", "mean"] {
        for (ignored, labels) in [
            ("", [0, 4, -100, 2, 2, 1]),
            (", ignore_index=2", [0, 4, 3, 2, 2, 1]),
            (", ignore_index=-7", [0, 4, 3, -7, 2, -7]),
        ] {
            for weights in ["", ", %weights"] {
                let source = format!(
                    "graph @g imported (%x: f32[6, 4], %l: i64[6]) -> (%loss) {{\n  init %w : f32[5, 4] = splat 0.5\n  \
                     init %weights : f32[5] = [0.5, 2.0, 1.5, 1.0, 3.0]\n  init %five : f32[5] = [1.0, -2.0, 0.5, 0.0, 4.0]\n  \
                     %turned = Transpose %w\n  %product = MatMul %x, %turned\n  %scores = Add %product, %five\n  \
                     %loss = SoftmaxCrossEntropyLoss %scores, %l{weights} {{reduction=\"{reduction}\"{ignored}}}\n}}\n"
                );
                let mut graph = text::parse(&source).unwrap();
                infer(&mut graph).unwrap();
                let expected = losses(&graph, &labels).unwrap();
                let all = ["w", "five"].map(|name| graph.find_value(name).unwrap());
                share_layers(&mut graph, &mut [], &all, &mut all.clone(), 1).unwrap();
                let own = own_parts(&graph);
                assert_eq!(own.len(), 2);
                let found = losses(&graph, &labels).unwrap();
                for (x, y) in expected.iter().zip(&found) {
                    assert!(
                        // A difference of numbers of the size of scores.
                        (x - y).abs() <= 5e-7 * (4.0 + x.abs()),
                        "{reduction}{ignored}{weights}: {found:?}, not {expected:?}"
                    );
                }
                let wrong = losses(&graph, &[0, 5, 0, 0, 0, 0]).unwrap_err();
                assert_eq!(wrong.code(), "data", "{wrong}");
                assert_eq!(losses(&graph, &[-1; 6]).unwrap_err().code(), "data");
            }
        }
    }
}

/// The second rank has two of five classes, and a place for a third: what is there counts nothing, and where all of its classes are excluded
/// no gradient is NaN.
#[test]
fn padding_and_excluded_classes_count_nothing() {
    torch::alone();
    let of = "{group=\"tp\", ranks=2, size=5}";
    let source = format!(
        "graph @g imported (%s: f32[2, 3], %l: i64[2], %a: f32[2], %b: f32[2]) -> (%sums, %own, %d, %at) {{\n  \
         %sums, %own = ClassTerms %s, %l {of}\n  %d = ClassTermsGrad %a, %b, %s, %l {of}\n  %at, %is_own = OwnIndices %l {of}\n}}\n"
    );
    let mut graph = text::parse(&source).unwrap();
    infer(&mut graph).unwrap();
    Coordinates::of(&graph, (1, 2)).unwrap().play();
    let floats =
        |dims: &[u64], numbers: &[f64]| Tensor::rounded(DType::F32, dims, numbers.iter().copied());
    let none = f64::NEG_INFINITY;
    let labels = Tensor::new(DType::I64, [2], [1i64, 0].map(i64::to_le_bytes).concat());
    let inputs = [
        ("s", floats(&[2, 3], &[1.0, 2.0, 100.0, none, none, 5.0])),
        ("l", labels),
        ("a", floats(&[2], &[2.0, 0.0])),
        ("b", floats(&[2], &[-1.0, 0.0])),
    ];
    let inputs = inputs.map(|(name, tensor)| (name.to_string(), tensor));
    let run = session(&graph).run(&inputs.into_iter().collect()).unwrap();
    let numbers = |name: &str| -> Vec<f64> {
        let tensor = &run.outputs[name];
        (0..tensor.elements() as usize)
            .map(|i| tensor.get_f64(i).unwrap())
            .collect()
    };
    let sum = 1f64.exp() + 2f64.exp();
    let sums = numbers("sums");
    assert!(
        (sums[0] - sum.ln()).abs() < 1e-6 && sums[1] < -3e38,
        "{sums:?}"
    );
    assert_eq!(numbers("own"), [2.0, none]);
    let [first, second] = [1.0, 2.0].map(|x: f64| 2.0 * x.exp() / sum);
    let expected = [first, second - 1.0, 0.0, 0.0, 0.0, 0.0];
    for (x, y) in numbers("d").iter().zip(expected) {
        assert!((x - y).abs() < 1e-6, "{:?}", numbers("d"));
    }
}
