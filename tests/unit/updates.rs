//! Updates that are written over static values, in random schedules: the judge of schedules and the memory of the
//! rewritten graph agree, whoever reads what was updated afterwards; plans of the solver keep their budgets.

use ckpt_passes::analysis::{Binding, Device, MemoryProfile, Sizes};
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ir::verify::verify;
use ckpt_passes::ir::{Graph, NodeId, ValueId};
use ckpt_passes::plan::plan::Reasons;
use ckpt_passes::plan::{Budget, ByOp, Effort, OpAnnotations, Plan, PlanInput, PlanRequest, plan};
use ckpt_passes::planning::GraphProblem;
use ckpt_passes::testing::Random;
use ckpt_passes::testing::dags::random_schedule;
use ckpt_passes::testing::updates::random_updates;
use ckpt_passes::transform::remat::{remat, strip_plan};

fn measure(g: &Graph, device: DeviceKind) -> (Sizes, MemoryProfile) {
    let sizes = Sizes::new(g, &Binding::new(g, &[]).unwrap()).unwrap();
    let memory = MemoryProfile::of_device(g, &sizes, device, 1).unwrap();
    (sizes, memory)
}

fn planning_input(g: &Graph, device: DeviceKind) -> (PlanInput, ByOp<NodeId>) {
    let (sizes, memory) = measure(g, device);
    let made = GraphProblem::new(g, &sizes, &memory, &Device::default()).unwrap();
    let annotations = OpAnnotations::unknown(made.problem.ops.len());
    (PlanInput::new(made.problem, annotations), made.nodes)
}

/// Bytes of updates that are not written over what they update, counted here: a node reads it later, or an output shows it.
fn paid_bytes(g: &Graph) -> u64 {
    let base = |mut v: ValueId| {
        while let Some(node) = g.def_node(v).filter(|n| g.node(*n).op.is_layout()) {
            v = g.node(node).ins[0].unwrap();
        }
        v
    };
    let mut paid = 0;
    for (at, id) in g.order().iter().enumerate() {
        let node = g.node(*id);
        if !node.op.is_update() {
            continue;
        }
        let old = node.ins[0].unwrap();
        // Made of a view of what it updates, a result is as any other.
        if node.ins[1..].iter().flatten().any(|v| base(*v) == old) {
            continue;
        }
        let later = g.order()[at + 1..]
            .iter()
            .flat_map(|n| g.node(*n).ins.iter());
        let shown = g.outputs().iter().any(|v| base(*v) == old);
        if shown || later.flatten().any(|v| base(*v) == old) {
            paid += 36;
        }
    }
    paid
}

#[test]
fn a_late_reader_costs_the_bytes_of_a_second_tensor_and_never_more() {
    let mut r = Random(41);
    let (mut free, mut paid) = (0, 0);
    for n in 0..500 {
        let mut g = random_updates(&mut r, 4 + n % 20);
        verify(&g).unwrap();
        let device = [DeviceKind::Cpu, DeviceKind::Cuda][n % 2];
        let (_, memory) = measure(&g, device);
        let (input, nodes) = planning_input(&g, device);
        let p = &input.problem;
        p.check().unwrap();
        let plan = Plan::new(
            "test",
            p,
            &random_schedule(&mut r, p, 10),
            &p.by_op(None),
            &Reasons::default(),
        );
        let plan = plan.unwrap();
        assert_eq!(plan.before.peak_bytes, memory.peak_bytes);
        assert_eq!(plan.before.static_bytes, memory.static_bytes);
        let order = g.order().to_vec();
        remat(&mut g, &input, &nodes, &plan).unwrap();
        verify(&g).unwrap();
        let (_, after) = measure(&g, device);
        assert_eq!(after.peak_bytes, plan.after.peak_bytes, "graph {n}");
        let made = after.storages.iter().filter(|s| s.renews.is_some());
        let bytes: u64 = made.map(|s| s.bytes).sum();
        assert_eq!(bytes, paid_bytes(&g), "graph {n}");
        (free, paid) = (free + (bytes == 0) as usize, paid + (bytes > 0) as usize);
        strip_plan(&mut g);
        assert_eq!(g.order(), order);
    }
    assert!(free > 20 && paid > 200, "{free} {paid}");
}

#[test]
fn the_solver_keeps_budgets_that_updates_count_in() {
    let mut r = Random(43);
    let (mut plans, mut repeats) = (0, 0);
    for n in 0..150 {
        let mut g = random_updates(&mut r, 6 + n % 24);
        let device = [DeviceKind::Cpu, DeviceKind::Cuda][n % 2];
        let (input, nodes) = planning_input(&g, device);
        let p = &input.problem;
        let budget = Budget::Percent(50.0 + 10.0 * r.below(5) as f64);
        let request = PlanRequest {
            effort: Effort::First,
            ..budget.into()
        };
        let Ok(outcome) = plan(&input, &request) else {
            continue;
        };
        let plan = outcome.plan;
        let certificate = plan.certificate.as_ref().unwrap();
        assert!(
            plan.after.peak_bytes <= certificate.budget_bytes,
            "graph {n}"
        );
        (plans, repeats) = (
            plans + 1,
            repeats + (plan.schedule.steps.len() > p.ops.len()) as usize,
        );
        remat(&mut g, &input, &nodes, &plan).unwrap();
        verify(&g).unwrap();
        let after = measure(&g, device).1.peak_bytes;
        assert_eq!(after, plan.after.peak_bytes, "graph {n}");
    }
    assert!(plans > 40 && repeats > 20, "{plans} {repeats}");
}
