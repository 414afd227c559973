//! All choices in one plan, run for real: the loss in parts, results computed again and moved out, updates as soon as
//! gradients are there. The same bits as without a plan, in the memory that was predicted.

#![cfg(feature = "torch")]

mod torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::optimize::load;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::random;
use ckpt_passes::analysis::Device;
use ckpt_passes::compile::{Compiled, Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::offload::{Offloading, What};
use ckpt_passes::plan::{Budget, Budgeted, Effort, Policy};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::Optimizer;
use ckpt_passes::transform::tile::{Tile, Tiles};
use std::path::Path;

fn dims() -> Vec<(String, i64)> {
    vec![("batch".into(), 4), ("seq".into(), 24)]
}

/// Moving costs next to nothing there, and so does reading weights for every part.
fn device() -> Device {
    Device {
        outside_gigabytes_per_s: 2000.0,
        launch_us: 0.001,
        ..Device::default()
    }
}

/// Everything but the plan.
fn step(tile: Tiles, fuse_optimizer: bool) -> Request {
    Request {
        loss: Loss::parse("causal-lm").unwrap(),
        policy: Policy::None,
        dims: dims(),
        fuse: true,
        device: device(),
        drop_outputs: vec!["*".into()],
        tile,
        optimizer: Some(Optimizer::parse("sgd:momentum=0.9").unwrap()),
        fuse_optimizer,
        ..Request::default()
    }
}

fn compiled(model: &str, request: &Request) -> (Graph, Compiled) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let path = root.join(model).join("model.onnx");
    let mut graph = load(&path, &Given::default()).unwrap().graph;
    let done = compile(&mut graph, request, &mut Watch::default()).unwrap();
    (graph, done)
}

fn run(graph: &Graph) -> Measured {
    let inputs = random::inputs(graph, &dims(), 3).unwrap();
    let session =
        Session::new(graph, &Default::default(), None, Place::Cpu, Rng::default()).unwrap();
    session.run(&inputs).unwrap()
}

#[test]
fn one_plan_of_all_choices_is_the_unplanned_step_in_the_memory_predicted() {
    let _turn = torch::alone();
    let (model, percent, fuse_optimizer) = ("llama32", 35.0, true);
    let open = Tiles {
        loss: Tile::Auto,
        mlp: Tile::Auto,
    };
    let request = Request {
        budget: Some(Budgeted {
            budget: Budget::Percent(percent),
            effort: Effort::First,
            ..Budgeted::default()
        }),
        offload: Offloading {
            what: What::Auto,
            min_bytes: 4096,
            ..Offloading::default()
        },
        ..step(open, fuse_optimizer)
    };
    let (graph, done) = compiled(model, &request);
    let made = done.made.as_ref().unwrap();
    let plan = &made.plan;
    let tiles = done.tried.as_ref().unwrap().tiles();
    let (plain, _) = compiled(model, &step(tiles, fuse_optimizer));
    let (ours, theirs) = (run(&graph), run(&plain));
    assert_eq!(ours.peak_bytes, ours.predicted_peak_bytes);
    assert_eq!(ours.peak_bytes, plan.after.peak_bytes);
    assert_eq!(theirs.peak_bytes, theirs.predicted_peak_bytes);
    assert!(ours.peak_bytes < theirs.peak_bytes);
    assert!(ours.outputs == theirs.outputs);
    assert!(ours.outputs.keys().any(|n| n.ends_with(".updated")));
    assert!(!ours.outputs.keys().any(|n| n.ends_with(".grad")));
    assert!(!done.tiled.is_empty() && !plan.offloaded.is_empty());
    assert!(plan.schedule.len() > made.subject.problem.ops.len());
}
