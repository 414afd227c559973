//! An arena changes where tensors lie, a plan when they are computed, and neither a bit: every combination of the two
//! gives the same results at a given number of threads, step after step, and no step leaves anything behind.
use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_opt::tensors::feed::Feed;
use ckpt_opt::tensors::{Tensors, random};
use ckpt_passes::analysis::arena::Arena;
use ckpt_passes::compile::{self, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::Graph;
use ckpt_passes::plan::Policy;
use ckpt_torch::arena::HEADER_BYTES;
use ckpt_torch::memory;
use std::collections::BTreeMap;
use std::path::Path;
use tch::Tensor;

/// Sizes at which most results are large enough for the arena.
const DIMS: [(&str, i64); 2] = [("batch", 4), ("seq", 64)];

fn dims() -> Vec<(String, i64)> {
    DIMS.map(|(n, size)| (n.to_string(), size)).to_vec()
}

fn compiled(name: &str, policy: Policy) -> Graph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = path.join("fixtures").join(name).join("model.onnx");
    let mut graph = load(&path, &Given::default()).unwrap().graph;
    let request = compile::Request {
        plan: policy.into(),
        dims: dims(),
        ..compile::Request::default()
    };
    compile(&mut graph, &request, &mut Watch::default()).unwrap();
    graph
}

fn inputs(graph: &Graph) -> BTreeMap<String, Tensor> {
    let mut feed = Feed::new(graph, Tensors::new()).unwrap();
    random::fill(graph, &mut feed, &dims(), 7).unwrap();
    (feed.inputs.iter())
        .map(|(n, x)| (n.clone(), convert::tensor(n, x).unwrap()))
        .collect()
}

/// The results of a step, by name.
type Bits = BTreeMap<String, Vec<u8>>;

/// Three steps: what came out of the first, which the others repeat, and its peak.
fn steps(graph: &Graph, what: &str, arena: bool) -> (Bits, u64) {
    let inputs = inputs(graph);
    let mut program = Program::new(graph).unwrap();
    program.use_arena(arena);
    let mut first: Option<(Bits, u64)> = None;
    // A second step finds the arena as the first left it, with that one's outputs still in it.
    let mut held = Vec::new();
    for _ in 0..3 {
        let run = program.run(&inputs).unwrap();
        let bits: Bits = (run.outputs.iter())
            .map(|(name, x)| {
                let bytes = ckpt_torch::bytes::read(&x.contiguous()).unwrap();
                (name.clone(), bytes)
            })
            .collect();
        match &first {
            Some((expected, _)) => assert!(*expected == bits, "{what}: steps differ"),
            None => first = Some((bits, run.peak_bytes)),
        }
        held.push(run.outputs);
    }
    let specialization = program.specialization(&inputs).unwrap();
    let (bytes, placed) = (specialization.arena_bytes(), specialization.placed());
    match arena {
        true => assert!(
            bytes > 0 && placed > 10,
            "{what}: {bytes} bytes, {placed} blocks"
        ),
        false => assert_eq!((bytes, placed), (0, 0)),
    }
    first.unwrap()
}

#[test]
fn neither_a_plan_nor_an_arena_changes_a_bit() {
    torch::alone();
    for name in ["gpt2", "bert", "llama32"] {
        let graphs = [Policy::NONE, Policy::FULL, Policy::SELECTIVE].map(|p| compiled(name, p));
        for threads in [1, 2] {
            tch::set_num_threads(threads);
            let mut expected: Option<Bits> = None;
            let mut peaks = Vec::new();
            for (at, graph) in graphs.iter().enumerate() {
                let of = |arena: bool| {
                    let what = format!("{name}, plan {at}, arena {arena}, {threads} threads");
                    (steps(graph, &what, arena), what)
                };
                let ((with, peak), what) = of(true);
                let ((without, bare_peak), _) = of(false);
                assert!(with == without, "{what}: not the bits without an arena");
                assert_eq!(peak, bare_peak, "{what}");
                let expected = expected.get_or_insert_with(|| with.clone());
                assert!(*expected == with, "{what}: not the bits without a plan");
                peaks.push(peak);
            }
            assert!(peaks[1] < peaks[0], "{name}: {peaks:?}");
        }
    }
    tch::set_num_threads(1);
}

#[test]
fn every_block_of_a_place_finds_it() {
    torch::alone();
    tch::set_num_threads(1);
    for name in ["gpt2", "bert", "llama32"] {
        let graph = compiled(name, Policy::NONE);
        let inputs = inputs(&graph);
        let mut program = Program::new(&graph).unwrap();
        program.use_arena(true);
        let specialization = program.specialization(&inputs).unwrap();
        let planned = Arena::new(&specialization.memory, HEADER_BYTES);
        let results: usize = planned.made.iter().map(Vec::len).sum();
        for step in 1..=2 {
            let before = specialization.placed();
            drop(program.run(&inputs).unwrap());
            let placed = specialization.placed() - before;
            // Temporaries find their stretches beside.
            assert!(
                placed >= results as u64,
                "{name}, step {step}: {placed} of {results} blocks"
            );
        }
        assert!(results >= 8, "{name}: {results}");
    }
}

#[test]
fn an_arena_is_no_larger_than_its_plan() {
    torch::alone();
    for name in ["gpt2", "bert", "llama32"] {
        for policy in [Policy::NONE, Policy::FULL, Policy::SELECTIVE] {
            let graph = compiled(name, policy);
            let inputs = inputs(&graph);
            let specialization = Program::new(&graph)
                .unwrap()
                .specialization(&inputs)
                .unwrap();
            let planned = specialization.memory.peak_bytes - specialization.memory.static_bytes;
            let (reserved, what) = (specialization.arena_bytes(), (name, policy));
            assert!(
                reserved * 100 <= planned * 103 && reserved * 2 > planned,
                "{what:?}: {reserved} reserved, {planned} planned"
            );
        }
    }
}

#[test]
fn no_step_leaves_anything_behind() {
    torch::alone();
    let graph = compiled("gpt2", Policy::FULL);
    let inputs = inputs(&graph);
    for arena in [true, false] {
        let mut program = Program::new(&graph).unwrap();
        program.use_arena(arena);
        let mut seen = Vec::new();
        for _ in 0..50 {
            let run = program.run(&inputs).unwrap();
            let peak_bytes = run.peak_bytes;
            drop(run);
            seen.push((memory::live_bytes(), memory::workspace_bytes(), peak_bytes));
        }
        // The first step makes what the process keeps.
        assert!(seen[1..].iter().all(|s| *s == seen[1]), "{seen:?}");
        assert!(seen[1].2 > seen[1].0);
    }
}
