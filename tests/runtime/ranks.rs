//! The memory of one rank of many, played alone: predicted = measured, whatever the plan and whatever it keeps a slice of.

use super::optimizer::{path, request, session};
use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::optimize;
use ckpt_opt::runtime::ranks::{DATA_PARALLEL, alone};
use ckpt_opt::tensors::random;
use ckpt_passes::analysis::Device;
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::ir::op::Effect;
use ckpt_passes::ops::collective::ALL_GATHER;
use ckpt_passes::plan::{Budget, Effort, PlanRequest, Policy};
use ckpt_passes::transform::collectives::{Mesh, Shard};
use ckpt_passes::transform::loss::Loss;

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
fn measured(graph: &Graph, ranks: u32) -> Vec<(u64, u64)> {
    let _turn = torch::alone();
    let dims = [("batch".to_string(), 2), ("seq".to_string(), 24)];
    let inputs = random::inputs(graph, &dims, 3).unwrap();
    let session = session(graph);
    let run = |rank: u32| {
        alone(DATA_PARALLEL, (rank as usize, ranks as usize));
        let run = session.run(&inputs).unwrap();
        assert_eq!(
            run.peak_bytes, run.predicted_peak_bytes,
            "rank {rank} of {ranks}"
        );
        (run.peak_bytes, run.static_bytes)
    };
    [0, ranks - 1].into_iter().map(run).collect()
}

#[test]
fn every_plan_takes_the_memory_that_was_predicted_on_every_rank() {
    let policies = ["none", "full", "selective", "submodule"].map(|p| Policy::parse(p).unwrap());
    let mut plans: Vec<PlanRequest> = policies.map(Into::into).into();
    plans.extend([90.0, 75.0, 60.0, 45.0].map(|p| Budget::Percent(p).into()));
    let mut seen = 0;
    for (i, plan) in plans.iter().enumerate() {
        for name in ["gpt2", "llama32_bf16"] {
            for ranks in [2, 4] {
                let shard = SHARDS[(i + ranks as usize / 2) % 4];
                let mesh = Mesh {
                    ranks,
                    shard,
                    bucket_bytes: BUCKETS[i % 3],
                };
                let Some(graph) = of_rank(name, mesh, plan.clone(), i % 2 == 0) else {
                    continue;
                };
                let all = measured(&graph, ranks);
                assert!(all.iter().all(|rank| *rank == all[0]), "{name}: {all:?}");
                seen += 1;
            }
        }
    }
    assert!(seen > 24, "{seen} plans");
}

#[test]
fn states_fall_with_the_number_of_ranks() {
    let bytes = |ranks, shard| {
        let mesh = Mesh {
            ranks,
            shard,
            bucket_bytes: 0,
        };
        let graph = of_rank("gpt2", mesh, Policy::NONE.into(), true).unwrap();
        measured(&graph, ranks)[0]
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
        ranks: 8,
        shard: Shard::Params,
        bucket_bytes: BUCKETS[1],
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
            measured(&graph, 8);
            let nodes = graph.nodes().map(|(_, node)| node);
            let gathers = nodes.filter(|n| n.op == &ALL_GATHER && n.recompute_of.is_some());
            gathers.count()
        });
        repeats.iter().sum()
    };
    let (fast, slow) = (again(1e3), again(1e-3));
    assert!(fast > slow, "{fast} gathers again, {slow} over a slow link");
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
            ranks: 2,
            shard,
            bucket_bytes: BUCKETS[1],
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
