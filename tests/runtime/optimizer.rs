//! Optimizers in the graph, on the fixtures: planned and unplanned, fused or not, give the same bits in the memory that
//! was predicted; training goes on from step to step as the formulas say; files and tensors of a caller are never written.

use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::{optimize, write};
use ckpt_opt::place::Place;
use ckpt_opt::planning::step::TrainingStep;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::{Tensors, feed::Feed, random};
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::analysis::{Binding, Device, MemoryProfile, Sizes};
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ir::{Graph, NodeId, Tensor};
use ckpt_passes::ops::norm::LAYER_NORM_GRAD;
use ckpt_passes::plan::plan::Reasons;
use ckpt_passes::plan::{Budget, Effort, OpAnnotations, Plan, PlanInput, PlanRequest, Policy};
use ckpt_passes::planning::GraphProblem;
use ckpt_passes::testing::Random;
use ckpt_passes::testing::dags::random_schedule;
use ckpt_passes::testing::updates::random_updates;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_passes::transform::remat::remat;
use std::path::{Path, PathBuf};

const FIXTURES: [&str; 6] = [
    "bert",
    "gemma3n",
    "gpt2",
    "llama32",
    "llama32_bf16",
    "llama32_mask",
];

pub fn path(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    root.join(name).join("model.onnx")
}

pub fn dims() -> Vec<(String, i64)> {
    vec![("batch".into(), 2), ("seq".into(), 24)]
}

pub fn request(optimizer: &str, fuse_optimizer: bool, budget: Option<f64>) -> Request {
    Request {
        plan: PlanRequest {
            effort: Effort::First,
            ..budget.map_or(Policy::NONE.into(), |p| Budget::Percent(p).into())
        },
        dims: dims(),
        fuse: true,
        drop_outputs: vec!["*".into()],
        updates: UpdateOptions {
            optimizer: Some(Optimizer::parse(optimizer).unwrap()),
            fuse: fuse_optimizer,
            ..UpdateOptions::default()
        },
        ..Request::default()
    }
}

/// `None` where nothing fits into the budget.
pub fn compiled(name: &str, request: &Request) -> Option<Graph> {
    let mut graph = load(&path(name), &Given::default()).unwrap().graph;
    match optimize(&mut graph, request, &mut Watch::default()) {
        Ok(_) => Some(graph),
        Err(e) if e.exit_code() == 3 => None,
        Err(e) => panic!("{name}: {e}"),
    }
}

pub fn session(graph: &Graph) -> Session<'_> {
    Session::new(graph, &Default::default(), None, Place::Cpu, Rng::default()).unwrap()
}

/// The sizes that a graph names.
fn named_dims(graph: &Graph) -> Vec<(String, i64)> {
    let named = dim_kinds(graph);
    let is_named = |(name, _): &(String, i64)| named.iter().any(|(n, _)| n == name);
    dims().into_iter().filter(is_named).collect()
}

fn memory(graph: &Graph, device: DeviceKind) -> MemoryProfile {
    let binding = Binding::new(graph, &named_dims(graph)).unwrap();
    MemoryProfile::of_device(graph, &Sizes::new(graph, &binding).unwrap(), device, 1).unwrap()
}

fn run(graph: &Graph, arena: bool) -> Measured {
    run_as(graph, arena, DeviceKind::Cpu)
}

/// Runs a graph on the CPU, with the kernels and blocks of a kind of device.
pub fn run_as(graph: &Graph, arena: bool, device: DeviceKind) -> Measured {
    torch::alone();
    let inputs = random::inputs(graph, &named_dims(graph), 3).unwrap();
    let mut session = session(graph);
    session.use_arena(arena);
    session.use_blocks_of(device);
    let first = session.run(&inputs).unwrap();
    let again = session.run(&inputs).unwrap();
    // A run starts from what was given, whatever the one before has written.
    assert!(first.outputs == again.outputs);
    assert_eq!(first.peak_bytes, again.peak_bytes);
    first
}

#[test]
fn planned_updates_are_the_unplanned_ones_in_the_memory_predicted() {
    let (mut budgets, mut lower) = (0, 0);
    for (i, name) in FIXTURES.into_iter().enumerate() {
        let optimizer = ["adamw", "sgd:momentum=0.9,weight_decay=0.1", "sgd"][i % 3];
        let plain = compiled(name, &request(optimizer, false, None)).unwrap();
        let plain = run(&plain, true);
        assert_eq!(plain.peak_bytes, plain.predicted_peak_bytes, "{name}");
        let updated = |run: &Measured| -> Tensors {
            let ours = run.outputs.iter().filter(|(n, _)| n.ends_with(".updated"));
            ours.map(|(n, t)| (n.clone(), t.clone())).collect()
        };
        let expected = updated(&plain);
        assert!(expected.len() > 10 && plain.outputs.keys().any(|n| n.ends_with(".grad")));
        for fuse in [false, true] {
            let some = [None, Some(80.0), Some(60.0), Some(45.0)];
            let some = match name {
                "gpt2" => &some[..],
                _ => &some[2..3],
            };
            for budget in some.iter().copied() {
                let Some(graph) = compiled(name, &request(optimizer, fuse, budget)) else {
                    continue;
                };
                let arena = !fuse;
                let planned = run(&graph, arena);
                let what = format!("{name} {optimizer} fused {fuse} at {budget:?}");
                assert!(updated(&planned) == expected, "{what}");
                assert_eq!(planned.peak_bytes, planned.predicted_peak_bytes, "{what}");
                assert_eq!(planned.static_bytes, plain.static_bytes, "{what}");
                let gradients = planned.outputs.keys().filter(|n| n.ends_with(".grad"));
                assert_eq!(gradients.count() == 0, fuse, "{what}");
                budgets += budget.is_some() as usize;
                lower += (planned.peak_bytes < plain.peak_bytes) as usize;
            }
        }
    }
    assert!(budgets > 8 && lower > 8, "{budgets} {lower}");
}

/// Steps of Adam and of SGD with momentum, worked out here in float64 from the gradients of each step.
#[test]
fn training_goes_on_from_step_to_step() {
    torch::alone();
    for optimizer in ["adamw:weight_decay=0.1", "sgd:momentum=0.9,dampening=0.5"] {
        let graph = compiled("gpt2", &request(optimizer, false, Some(80.0))).unwrap();
        let mut feed = Feed::default();
        feed.start_training(&graph);
        random::fill(&graph, &mut feed, &dims(), 3).unwrap();
        feed.inputs.insert(
            "lr".into(),
            Tensor::scalar(ckpt_passes::ir::DType::F32, 0.0625),
        );
        let mut session = session(&graph);
        session.go_on(true);
        let name = "transformer.h.0.mlp.c_fc.weight";
        let weight = graph
            .value(graph.find_value(name).unwrap())
            .tensor()
            .unwrap();
        let numbers = |t: &Tensor| -> Vec<f64> {
            (0..t.elements() as usize)
                .map(|i| t.get_f64(i).unwrap())
                .collect()
        };
        let mut p = numbers(weight);
        let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
        for step in 1..=3 {
            feed.inputs.insert("step".into(), Tensor::int(step));
            let done = session.run(&feed.inputs).unwrap();
            let g = numbers(&done.outputs[&format!("{name}.grad")]);
            let found = numbers(&done.outputs[&format!("{name}.updated")]);
            let most = p.iter().fold(0.0f64, |a, x| a.max(x.abs()));
            for i in 0..p.len() {
                if optimizer.starts_with("adamw") {
                    m[i] = 0.9 * m[i] + 0.1 * g[i];
                    v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
                    let mean = m[i] / (1.0 - 0.9f64.powi(step as i32));
                    let square = v[i] / (1.0 - 0.999f64.powi(step as i32));
                    p[i] -= 0.0625 * (0.1 * p[i] + mean / (square.sqrt() + 1e-8));
                } else {
                    m[i] = if step == 1 {
                        g[i]
                    } else {
                        0.9 * m[i] + 0.5 * g[i]
                    };
                    p[i] -= 0.0625 * m[i];
                }
                assert!(
                    (found[i] - p[i]).abs() <= 2e-6 * most,
                    "{optimizer} step {step} element {i}: {} against {}",
                    found[i],
                    p[i]
                );
            }
        }
    }
}

#[test]
fn a_written_file_keeps_its_updates_and_is_never_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("train.onnx");
    let graph = compiled("gpt2", &request("adamw", true, Some(70.0))).unwrap();
    write(&graph, &path("gpt2"), &file, Default::default()).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let mut back = load(&file, &Given::default()).unwrap().graph;
    ckpt_opt::comparison::ready(&mut back, &file).unwrap();
    let (ours, theirs) = (run(&graph, true), run(&back, true));
    assert!(ours.outputs == theirs.outputs);
    assert!(std::fs::read(&file).unwrap() == bytes);
    // Planned anew: the updates stay, and a second optimizer is refused.
    let anew = Request {
        updates: UpdateOptions::default(),
        ..request("adamw", true, None)
    };
    let anew = Request {
        drop_outputs: Vec::new(),
        ..anew
    };
    let mut again = load(&file, &Given::default()).unwrap().graph;
    optimize(&mut again, &anew, &mut Watch::default()).unwrap();
    let unplanned = run(&again, true);
    assert!(unplanned.outputs == ours.outputs);
    assert!(unplanned.peak_bytes > ours.peak_bytes);
    let mut twice = load(&file, &Given::default()).unwrap().graph;
    let second = Request {
        updates: UpdateOptions {
            optimizer: Some(Optimizer::parse("sgd").unwrap()),
            ..UpdateOptions::default()
        },
        ..anew
    };
    let error = optimize(&mut twice, &second, &mut Watch::default());
    assert_eq!(error.err().unwrap().code(), "optimizer");
}

/// Random steps, random schedules: whatever reads a parameter after its update reads the old one.
#[test]
fn no_schedule_makes_an_update_wrong() {
    let mut r = Random(47);
    let mut later = 0;
    for n in 0..80 {
        let plain = random_updates(&mut r, 4 + n % 20);
        let mut planned = plain.clone();
        let sizes = Sizes::new(&plain, &Binding::new(&plain, &[]).unwrap()).unwrap();
        let device = [DeviceKind::Cpu, DeviceKind::Cuda][n % 2];
        let memory = MemoryProfile::of_device(&plain, &sizes, device, 1).unwrap();
        let made = GraphProblem::new(&plain, &sizes, &memory, &Device::default()).unwrap();
        let annotations = OpAnnotations::unknown(made.problem.ops.len());
        let input = PlanInput::new(made.problem, annotations);
        let p = &input.problem;
        let schedule = random_schedule(&mut r, p, 10);
        let none = p.by_op(None);
        let plan = Plan::new("test", p, &schedule, &none, &Reasons::default()).unwrap();
        remat(&mut planned, &input, &made.nodes, &plan).unwrap();
        // All updates at the end, every one over nothing that is read again.
        let mut last = plain.clone();
        let is_update = |id: &NodeId| plain.node(*id).op.is_update();
        let (updates, others): (Vec<NodeId>, _) =
            plain.order().iter().partition(|id| is_update(id));
        last.set_order([others, updates].concat());
        let [plain, planned, last] = [plain, planned, last].map(|graph| {
            let done = run_as(&graph, n % 4 < 2, device);
            assert_eq!(done.peak_bytes, done.predicted_peak_bytes, "graph {n}");
            done
        });
        assert!(plain.outputs == planned.outputs, "graph {n}");
        assert!(plain.outputs == last.outputs, "graph {n}");
        later += (planned.peak_bytes > last.peak_bytes) as usize;
    }
    assert!(later > 5, "{later}");
}

/// The buffers of the kernel that stands for a device's on a CPU: sums of scale and bias for each thread, in float32.
fn norm_buffer_bytes(graph: &Graph) -> u64 {
    let norms = graph.nodes().filter(|(_, n)| n.op == &LAYER_NORM_GRAD);
    let widths = norms.filter_map(|(_, n)| graph.ty(n.operand(2)?).dims.last()?.as_const());
    widths.max().unwrap_or(0) as u64 * 8 * u64::try_from(tch::get_num_threads()).unwrap()
}

/// On a device an update is one call that reads the gradient. Planned and unplanned, applied at once or at the end, it
/// computes the same bits in the memory that the planner counts.
#[test]
fn a_device_plans_and_runs_updates_of_one_call() {
    for (name, optimizer) in [
        ("gpt2", "sgd:momentum=0.9"),
        ("llama32_bf16", "adamw"),
        ("bert", "adamw"),
        ("gemma3n", "sgd"),
    ] {
        let on_device = |fuse, budget| Request {
            device: Device {
                kind: DeviceKind::Cuda,
                ..Device::default()
            },
            ..request(optimizer, fuse, budget)
        };
        let mut expected = None;
        for (fuse, budget) in [(false, None), (false, Some(60.0)), (true, Some(60.0))] {
            let mut graph = load(&path(name), &Given::default()).unwrap().graph;
            let request = on_device(fuse, budget);
            let done = optimize(&mut graph, &request, &mut Watch::default()).unwrap();
            let run = run_as(&graph, !fuse, DeviceKind::Cuda);
            let what = format!("{name} fused {fuse} at {budget:?}");
            let predicted = run.predicted_peak_bytes;
            let bounds = predicted..=predicted + norm_buffer_bytes(&graph);
            assert!(bounds.contains(&run.peak_bytes), "{what}");
            let memory = memory(&graph, DeviceKind::Cuda);
            let fused = memory.fused_updates.iter().map(|u| 1 + u.states.len());
            let updates = graph.nodes().filter(|(_, n)| n.op.is_update());
            assert_eq!(fused.sum::<usize>(), updates.count(), "{what}");
            let planned = &done.planned.as_ref().unwrap().1.plan;
            assert_eq!(predicted, planned.after.peak_bytes, "{what}");
            let updated = run.outputs.into_iter();
            let updated: Tensors = updated.filter(|(n, _)| n.ends_with(".updated")).collect();
            assert!(
                updated == *expected.get_or_insert_with(|| updated.clone()),
                "{what}"
            );
        }
    }
}

/// `plan` prices the step with its updates in it.
#[test]
fn a_plan_counts_gradients_that_are_applied_at_once() {
    let peak = |fuse_optimizer| {
        let request = Request {
            plan: Policy::FULL.into(),
            ..request("sgd", fuse_optimizer, None)
        };
        let step = TrainingStep::read(&path("llama32"), &Given::default(), &request).unwrap();
        let plan = step.plan(&request).unwrap().plan;
        let graph = compiled("llama32", &request).unwrap();
        assert_eq!(run(&graph, true).peak_bytes, plan.after.peak_bytes);
        plan.after.peak_bytes
    };
    assert!(peak(true) < peak(false));
}
