//! An arena changes where tensors lie and nothing else: every bit and every count is the same with and without it.
#![cfg(feature = "torch")]

mod torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::optimize::load;
use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_opt::tensors::feed::Feed;
use ckpt_opt::tensors::{Tensors, random};
use ckpt_passes::compile::{self, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::plan::Policy;
use std::collections::BTreeMap;
use std::path::Path;
use tch::Tensor;

/// Sizes at which most results are large enough for the arena.
const DIMS: [(&str, i64); 2] = [("batch", 4), ("seq", 64)];

#[test]
fn an_arena_changes_no_bit_and_no_count() {
    let _turn = torch::alone();
    for name in ["gpt2", "bert", "llama32"] {
        for policy in [Policy::None, Policy::Full] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"));
            let path = path.join("fixtures").join(name).join("model.onnx");
            let mut graph = load(&path, &Given::default()).unwrap().graph;
            let dims: Vec<(String, i64)> = DIMS.map(|(n, size)| (n.to_string(), size)).to_vec();
            let request = compile::Request {
                policy,
                dims: dims.clone(),
                ..compile::Request::default()
            };
            compile(&mut graph, &request, &mut Watch::default()).unwrap();
            let mut feed = Feed::new(&graph, Tensors::new()).unwrap();
            random::fill(&graph, &mut feed, &dims, 7).unwrap();
            let inputs: BTreeMap<String, Tensor> = (feed.inputs.iter())
                .map(|(n, x)| (n.clone(), convert::tensor(n, x).unwrap()))
                .collect();
            for threads in [1, 2] {
                tch::set_num_threads(threads);
                let run = |arena: bool| {
                    let mut program = Program::new(&graph).unwrap();
                    program.use_arena(arena);
                    let mut seen = Vec::new();
                    // A second step finds the arena as the first left it, with that one's outputs still in it.
                    let mut held = Vec::new();
                    for _ in 0..3 {
                        let run = program.run(&inputs).unwrap();
                        let bits: Vec<Vec<u8>> = (run.outputs.iter())
                            .map(|(_, x)| ckpt_torch::bytes::read(&x.contiguous()).unwrap())
                            .collect();
                        seen.push((bits, run.peak_bytes));
                        held.push(run.outputs);
                    }
                    let schedule = program.schedule(&inputs).unwrap();
                    (seen, schedule.arena_bytes(), schedule.placed())
                };
                let (with, without) = (run(true), run(false));
                assert_eq!(with.0[0], without.0[0], "{name}, {threads} threads");
                assert!(
                    with.0.iter().all(|step| step.0 == with.0[0].0),
                    "{name}: steps differ"
                );
                assert!(
                    with.1 > 0 && with.2 > 10,
                    "{name}: {} bytes, {} blocks",
                    with.1,
                    with.2
                );
                assert_eq!((without.1, without.2), (0, 0));
            }
        }
    }
    tch::set_num_threads(1);
}
