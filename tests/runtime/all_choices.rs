//! All choices in one plan, run for real: the loss in parts, results computed again and moved out, updates as soon as
//! gradients are there. The same bits as without a plan, in the memory that was predicted.

use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::random;
use ckpt_passes::analysis::Device;
use ckpt_passes::compile::{Compiled, Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::{Budget, Effort, Offload, OffloadSet, PlanRequest, Policy};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
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
        plan: Policy::NONE.into(),
        dims: dims(),
        fuse: true,
        device: device(),
        drop_outputs: vec!["*".into()],
        tile,
        updates: UpdateOptions {
            optimizer: Some(Optimizer::parse("sgd:momentum=0.9").unwrap()),
            fuse: fuse_optimizer,
            ..UpdateOptions::default()
        },
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

/// A step in parts of which results are moved and computed again, within a share of its memory.
fn runs_as_the_unplanned_step(model: &str, percent: f64, open: Tiles, fuse_optimizer: bool) {
    torch::alone();
    let request = Request {
        plan: PlanRequest {
            effort: Effort::First,
            offload: Offload {
                set: OffloadSet::Auto,
                min_bytes: 4096,
                ..Offload::default()
            },
            ..Budget::Percent(percent).into()
        },
        ..step(open, fuse_optimizer)
    };
    let (graph, done) = compiled(model, &request);
    let made = done.planned.as_ref().unwrap();
    let plan = &made.outcome.plan;
    let trials = &done.tried.as_ref().unwrap().trials;
    let chosen = trials.iter().find(|t| t.chosen).unwrap();
    let tile = |chunks: usize| match chunks {
        1 => Tile::Off,
        n => Tile::Chunks(n),
    };
    let tiles = Tiles {
        loss: tile(chosen.loss_chunks),
        mlp: tile(chosen.mlp_chunks),
    };
    let (plain, alike) = compiled(model, &step(tiles, fuse_optimizer));
    assert_eq!(
        (&done.tiled, &done.tiled_mlps),
        (&alike.tiled, &alike.tiled_mlps)
    );
    let (ours, theirs) = (run(&graph), run(&plain));
    assert_eq!(ours.peak_bytes, ours.predicted_peak_bytes);
    assert_eq!(ours.peak_bytes, plan.after.peak_bytes);
    assert_eq!(theirs.peak_bytes, theirs.predicted_peak_bytes);
    assert!(ours.peak_bytes < theirs.peak_bytes);
    assert!(ours.outputs == theirs.outputs);
    let has = |end: &str| ours.outputs.keys().any(|n| n.ends_with(end));
    assert!(has(".updated") && has(".grad") != fuse_optimizer);
    assert!(!done.tiled.is_empty() && !plan.schedule.offloaded.is_empty());
    assert_eq!(done.tiled_mlps.is_empty(), open.mlp == Tile::Off);
    assert!(plan.schedule.steps.len() > made.bound.input.problem.ops.len());
    // Parts do not hide the head from what says which results stay for it.
    assert_eq!(
        made.bound
            .input
            .annotations
            .feeds_scores
            .iter()
            .filter(|f| **f)
            .count(),
        1
    );
}

#[test]
fn one_plan_of_all_choices_is_the_unplanned_step_in_the_memory_predicted() {
    let open = Tiles {
        loss: Tile::Auto,
        mlp: Tile::Off,
    };
    runs_as_the_unplanned_step("llama32", 35.0, open, true);
}

#[test]
fn so_it_is_with_mlps_in_parts() {
    let open = Tiles {
        loss: Tile::Auto,
        mlp: Tile::Chunks(3),
    };
    runs_as_the_unplanned_step("llama32", 35.0, open, true);
}

#[test]
fn so_it_is_in_16_bits_with_mlps_in_parts() {
    let open = Tiles {
        loss: Tile::Auto,
        mlp: Tile::Chunks(2),
    };
    runs_as_the_unplanned_step("llama32_bf16", 50.0, open, true);
}

#[test]
fn so_it_is_in_16_bits_with_gradients() {
    let open = Tiles {
        loss: Tile::Auto,
        mlp: Tile::Off,
    };
    runs_as_the_unplanned_step("llama32_bf16", 55.0, open, false);
}
