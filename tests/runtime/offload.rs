//! Results that wait outside the device's memory, on the fixtures: the same bits, the memory that was predicted, files
//! that leave nothing behind.

use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::optimize;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::random;
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::{
    Budget, Effort, Goal, Offload, OffloadSet, OffloadTarget, PlanRequest, Policy,
};
use std::path::Path;

fn fixture(name: &str) -> Graph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name);
    load(&path.join("model.onnx"), &Given::default())
        .unwrap()
        .graph
}

fn compiled(name: &str, request: &Request) -> Graph {
    let mut graph = fixture(name);
    optimize(&mut graph, request, &mut Watch::default()).unwrap();
    graph
}

fn request(offload: Offload) -> Request {
    Request {
        plan: PlanRequest {
            offload,
            ..Policy::NONE.into()
        },
        dims: vec![("batch".into(), 2), ("seq".into(), 24)],
        fuse: true,
        ..Request::default()
    }
}

fn run(graph: &Graph, folder: &Path) -> Measured {
    let mut runs = runs(graph, folder, true, 1);
    runs.remove(0)
}

/// Several runs of one session, with transfers beside other nodes or not.
fn runs(graph: &Graph, folder: &Path, streams: bool, count: usize) -> Vec<Measured> {
    torch::alone();
    let dims = vec![("batch".into(), 2), ("seq".into(), 24)];
    let inputs = random::inputs(graph, &dims, 3).unwrap();
    let mut session =
        Session::new(graph, &Default::default(), None, Place::Cpu, Rng::default()).unwrap();
    session.wait_in(folder.into());
    session.use_streams(streams);
    (0..count).map(|_| session.run(&inputs).unwrap()).collect()
}

/// A budget on a slow device with fast transfers: then something must be worth one.
fn within_a_budget(offload: Offload) -> Request {
    let mut request = request(offload);
    request.device.teraflops.f32 = 1e-3;
    request.device.outside_gigabytes_per_s = 1e6;
    request.device.launch_us = 0.0;
    request.plan = PlanRequest {
        effort: Effort::First,
        offload,
        ..Budget::Percent(90.0).into()
    };
    request
}

#[test]
fn whether_transfers_run_beside_other_nodes_changes_no_bit_and_no_byte() {
    let folder = tempfile::tempdir().unwrap();
    let wish = |set, to, in_flight| Offload {
        set,
        to,
        in_flight,
        ..Offload::default()
    };
    let plain = run(
        &compiled("gpt2", &request(Offload::default())),
        folder.path(),
    );
    let one_by_one = Offload {
        streams: false,
        ..wish(OffloadSet::All, OffloadTarget::Host, 5)
    };
    for (wish, repeats) in [
        (wish(OffloadSet::All, OffloadTarget::Host, 5), 100),
        (wish(OffloadSet::All, OffloadTarget::Disk, 5), 100),
        (wish(OffloadSet::LayerInputs, OffloadTarget::Host, 5), 100),
        (wish(OffloadSet::Auto, OffloadTarget::Host, 5), 100),
        (wish(OffloadSet::All, OffloadTarget::Host, 1), 3),
        (wish(OffloadSet::LayerInputs, OffloadTarget::Host, 100), 3),
        (one_by_one, 3),
    ] {
        let request = match wish.set {
            OffloadSet::Auto => within_a_budget(wish),
            _ => request(wish),
        };
        let graph = compiled("gpt2", &request);
        assert!(graph.nodes().any(|(_, n)| n.op.is_transfer()), "{wish:?}");
        for beside in [true, false] {
            for moved in runs(&graph, folder.path(), beside, repeats) {
                assert_eq!(moved.outputs, plain.outputs, "{wish:?} {beside}");
                assert_eq!(moved.peak_bytes, moved.predicted_peak_bytes);
                assert!(moved.outside_peak_bytes > 0);
                assert_eq!(moved.outside_peak_bytes, moved.predicted_outside_bytes);
            }
        }
    }
}

#[test]
fn whatever_waits_outside_no_bit_changes_and_memory_is_as_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let plain = run(
        &compiled("gpt2", &request(Offload::default())),
        folder.path(),
    );
    assert_eq!(plain.outside_peak_bytes, 0);
    let mut last = None;
    for (set, to) in [
        (OffloadSet::LayerInputs, OffloadTarget::Host),
        (OffloadSet::All, OffloadTarget::Host),
        (OffloadSet::All, OffloadTarget::Disk),
    ] {
        let wish = Offload {
            set,
            to,
            ..Offload::default()
        };
        for policy in [Policy::NONE, Policy::FULL] {
            let mut request = request(wish);
            request.plan.goal = Goal::Policy(policy);
            let moved = run(&compiled("gpt2", &request), folder.path());
            assert_eq!(moved.outputs, plain.outputs, "{wish} {policy}");
            assert_eq!(moved.peak_bytes, moved.predicted_peak_bytes);
            assert!(moved.peak_bytes < plain.peak_bytes, "{wish} {policy}");
            assert!(moved.outside_peak_bytes > 0);
            assert_eq!(moved.outside_peak_bytes, moved.predicted_outside_bytes);
            last = Some(moved.outside_peak_bytes);
        }
    }
    assert!(last.is_some());
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_planner_moves_what_is_dear_and_keeps_to_its_budgets() {
    let folder = tempfile::tempdir().unwrap();
    let none = compiled("gpt2", &within_a_budget(Offload::default()));
    let auto = Offload {
        set: OffloadSet::Auto,
        ..Offload::default()
    };
    let moved = compiled("gpt2", &within_a_budget(auto));
    let out = |g: &Graph| g.nodes().filter(|(_, n)| n.op.is_transfer()).count();
    assert!(out(&none) == 0 && out(&moved) > 0);
    let (plain, moved) = (run(&none, folder.path()), run(&moved, folder.path()));
    assert_eq!(moved.outputs, plain.outputs);
    assert_eq!(moved.peak_bytes, moved.predicted_peak_bytes);

    let room = moved.outside_peak_bytes / 2;
    let little = Offload {
        host_bytes: Some(room),
        ..auto
    };
    let moved = run(&compiled("gpt2", &within_a_budget(little)), folder.path());
    assert_eq!(moved.outputs, plain.outputs);
    assert!(moved.outside_peak_bytes <= room);
}

#[test]
fn what_cannot_be_is_refused() {
    torch::alone();
    let mut graph = fixture("gpt2");
    let all = Offload {
        set: OffloadSet::All,
        host_bytes: Some(1000),
        ..Offload::default()
    };
    let error = optimize(&mut graph, &request(all), &mut Watch::default())
        .err()
        .unwrap();
    assert_eq!((error.code(), error.exit_code()), ("offload", 2));
    let mut graph = fixture("gpt2");
    let auto = Offload {
        set: OffloadSet::Auto,
        ..Offload::default()
    };
    let error = optimize(&mut graph, &request(auto), &mut Watch::default())
        .err()
        .unwrap();
    assert_eq!(error.code(), "offload");

    // A folder that is not there.
    let graph = compiled(
        "gpt2",
        &request(Offload {
            set: OffloadSet::All,
            ..Offload::default()
        }),
    );
    let dims = vec![("batch".into(), 2), ("seq".into(), 24)];
    let inputs = random::inputs(&graph, &dims, 3).unwrap();
    let mut session = Session::new(
        &graph,
        &Default::default(),
        None,
        Place::Cpu,
        Rng::default(),
    )
    .unwrap();
    session.wait_in("/does/not/exist".into());
    let error = session.run(&inputs).err().unwrap();
    assert_eq!((error.code(), error.exit_code()), ("offload", 5));
}
