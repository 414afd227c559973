//! A thousand steps are as many times one: from the end of the warm-up on, live bytes and the peak stay exactly the same and
//! resident pages do not grow, wherever results lie. Each test runs in a process of
//! its own, because resident pages are counted by process.

use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::device;
use ckpt_opt::runtime::session::Session;
use ckpt_opt::tensors::random;
use ckpt_passes::compile::{self, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::{Offload, OffloadSet, OffloadTarget, PlanRequest, Policy};
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_torch::memory;
use std::path::Path;

const STEPS: usize = 1000;
/// Steps in which malloc and the libraries take what they keep.
const WARM_UP: usize = 100;
/// By so much resident pages may differ afterwards: threads touch pages of their stacks that they had not touched before.
/// A leak of 330 bytes a step is more.
const LEEWAY_BYTES: u64 = 256 << 10;

fn dims() -> Vec<(String, i64)> {
    vec![("batch".into(), 2), ("seq".into(), 32)]
}

fn compiled(offload: Offload, optimizer: Option<&str>) -> Graph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/gpt2/model.onnx");
    let mut graph = load(&path, &Given::default()).unwrap().graph;
    let request = compile::Request {
        plan: PlanRequest {
            offload,
            ..match offload.set {
                OffloadSet::Nothing => Policy::FULL.into(),
                _ => Policy::NONE.into(),
            }
        },
        dims: dims(),
        updates: UpdateOptions {
            optimizer: optimizer.map(|o| Optimizer::parse(o).unwrap()),
            ..UpdateOptions::default()
        },
        ..compile::Request::default()
    };
    compile(&mut graph, &request, &mut Watch::default()).unwrap();
    graph
}

/// A thousand steps of one session.
fn stays(what: &str, graph: &Graph, use_arena: bool) {
    torch::alone();
    let folder = tempfile::tempdir().unwrap();
    let inputs = random::inputs(graph, &dims(), 3).unwrap();
    let mut session = Session::new(
        graph,
        &Default::default(),
        Some(1),
        Place::Cpu,
        Rng::default(),
    )
    .unwrap();
    session.use_arena(use_arena);
    session.wait_in(folder.path().into());
    session.go_on(true);
    let mut live = Vec::with_capacity(STEPS);
    let mut resident = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let run = session.step(&inputs, &|_| false).unwrap();
        assert_eq!(run.peak_bytes, run.predicted_peak_bytes, "{what}");
        assert_eq!(
            run.outside_peak_bytes, run.predicted_outside_bytes,
            "{what}"
        );
        assert_eq!(run.arena_bytes > 0, use_arena, "{what}");
        drop(run);
        live.push((memory::live_bytes(), memory::workspace_bytes()));
        // Where the system does not say, live bytes are all there is to see.
        resident.push(device::resident_bytes().unwrap_or(0));
    }
    let (live, resident) = (&live[WARM_UP..], &resident[WARM_UP..]);
    assert!(live.iter().all(|l| *l == live[0]), "{what}: {live:?}");
    let most = |resident: &[u64]| resident.iter().copied().max().unwrap_or(0);
    let (early, ever) = (most(&resident[..WARM_UP]), most(resident));
    assert!(
        ever <= early + LEEWAY_BYTES,
        "{what}: {early} bytes resident up to step {}, {ever} up to step {STEPS}",
        2 * WARM_UP
    );
}

#[test]
fn a_thousand_steps_take_what_one_takes() {
    if !torch::is_own_process("long_runs::a_thousand_steps_take_what_one_takes") {
        return;
    }
    let graph = compiled(Offload::default(), None);
    stays("with an arena", &graph, true);
    stays("without an arena", &graph, false);
}

#[test]
fn a_thousand_steps_of_training_take_what_one_takes() {
    if !torch::is_own_process("long_runs::a_thousand_steps_of_training_take_what_one_takes") {
        return;
    }
    let graph = compiled(Offload::default(), Some("adamw"));
    stays("with updates", &graph, true);
}

#[test]
fn a_thousand_steps_with_results_outside_take_what_one_takes() {
    if !torch::is_own_process(
        "long_runs::a_thousand_steps_with_results_outside_take_what_one_takes",
    ) {
        return;
    }
    for (to, streams) in [
        (OffloadTarget::Host, true),
        (OffloadTarget::Disk, true),
        (OffloadTarget::Disk, false),
    ] {
        let offload = Offload {
            set: OffloadSet::All,
            to,
            streams,
            ..Offload::default()
        };
        let what = format!("outside, {to:?}, beside other nodes: {streams}");
        stays(&what, &compiled(offload, None), true);
    }
}
