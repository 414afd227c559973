//! Random ops on libtorch: the share that is dropped, the moments of what stays, and that masks depend on seed and
//! stream alone: not on threads, layout or the order of nodes. Drawn from libtorch's generator instead, one by one or
//! in turn, copies and gradients still draw what their original drew, and `eager` draws what PyTorch draws.
use crate::support::torch;

use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_passes::ir::{Attrs, DType, Dim, Graph, Phase, Tensor as Constant, Ty, ValueId};
use ckpt_passes::ops::random::{DROPOUT, Key, UNIFORM, stream};
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::transform::autodiff::autodiff;
use ckpt_passes::transform::loss::Seed;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

const ROWS: i64 = 500;
const COLUMNS: i64 = 400;

/// Dropouts of `x` with these ratios and stream names, in this order.
fn dropouts(dtype: DType, calls: &[(f64, &str)]) -> Graph {
    let mut graph = Graph::new("dropouts");
    let x = graph.add_input(
        "x",
        Some(Ty::new(dtype, vec![Dim::from(ROWS), Dim::from(COLUMNS)])),
    );
    let seed = graph.add_input("rng_seed", Some(Ty::scalar(DType::I64)));
    let mut outs: Vec<ValueId> = Vec::new();
    let mut b = Builder::new(&mut graph);
    for (ratio, name) in calls {
        let ratio = b.scalar(DType::F32, *ratio);
        let stream = b.graph.add_init(name, Constant::int(stream(name)));
        outs.push(
            b.emit(&DROPOUT, &[x, ratio, seed, stream], Attrs::new())
                .unwrap(),
        );
    }
    for (out, (_, name)) in outs.iter().zip(calls) {
        graph.rename_value(*out, &format!("{name}.y"));
    }
    graph.set_outputs(outs);
    graph.phase = Phase::Typed;
    graph
}

fn run(graph: &Graph, x: &Tensor, seed: i64) -> BTreeMap<String, Tensor> {
    run_by(Rng::Counter, graph, x, seed)
}

fn run_by(rng: Rng, graph: &Graph, x: &Tensor, seed: i64) -> BTreeMap<String, Tensor> {
    let inputs = [("x", x.shallow_clone()), ("rng_seed", Tensor::from(seed))];
    let inputs = inputs
        .into_iter()
        .map(|(k, v)| (k.to_string(), v))
        .collect();
    let mut program = Program::new(graph).unwrap();
    program.draw_by(rng);
    program.run(&inputs).unwrap().outputs.into_iter().collect()
}

fn ones() -> Tensor {
    Tensor::ones([ROWS, COLUMNS], (Kind::Float, tch::Device::Cpu))
}

const RULES: [Rng; 3] = [Rng::Counter, Rng::Native, Rng::Eager];

#[test]
fn shares_and_moments_are_right() {
    torch::alone();
    let ratios = [0.0, 0.1, 0.5, 0.9, 1.0];
    for (rng, ratio) in RULES.iter().flat_map(|rng| ratios.map(|r| (*rng, r))) {
        let graph = dropouts(DType::F32, &[(ratio, "a")]);
        let y = &run_by(rng, &graph, &ones(), 3)["a.y"];
        let n = (ROWS * COLUMNS) as f64;
        let dropped = y.eq(0.0).sum(Kind::Int64).int64_value(&[]) as f64 / n;
        // Six standard deviations of a share of n independent draws.
        let allowed = 6.0 * (ratio * (1.0 - ratio) / n).sqrt();
        assert!((dropped - ratio).abs() <= allowed, "{ratio}: {dropped}");
        if ratio < 1.0 {
            let scale = 1.0 / (1.0 - ratio as f32);
            let most = y.max().double_value(&[]);
            match rng {
                Rng::Counter => assert_eq!(most, f64::from(scale)),
                // libtorch divides by what is left of the number as it was written, not of the float32 next to it.
                _ => assert_eq!(most as f32, 1.0 / (1.0 - ratio) as f32),
            }
            let mean = y.mean(Kind::Double).double_value(&[]);
            assert!(
                (mean - 1.0).abs() <= allowed * f64::from(scale) + 1e-6,
                "{ratio}: mean {mean}"
            );
        }
        // Neighbours along either axis are independent.
        let kept = y.ne(0.0).to_kind(Kind::Double);
        for axis in [0, 1] {
            let size = kept.size()[axis as usize];
            let (a, b) = (
                kept.narrow(axis, 0, size - 1),
                kept.narrow(axis, 1, size - 1),
            );
            let both = (a * b).mean(Kind::Double).double_value(&[]);
            let expected = (1.0 - ratio) * (1.0 - ratio);
            assert!(
                (both - expected).abs() <= 8.0 * (0.25 / n).sqrt(),
                "{ratio}: {both}"
            );
        }
    }
}

#[test]
fn masks_depend_on_seed_and_stream_alone() {
    torch::alone();
    let calls = [(0.3, "a"), (0.3, "b"), (0.6, "c")];
    let forward = dropouts(DType::F32, &calls);
    let backward = dropouts(DType::F32, &[calls[2], calls[1], calls[0]]);
    let turned = ones().permute([1, 0]).contiguous().permute([1, 0]);
    for rng in RULES {
        tch::set_num_threads(1);
        let first = run_by(rng, &forward, &ones(), 11);
        for threads in [1, 2, 3, 4] {
            tch::set_num_threads(threads);
            if rng != Rng::Eager {
                assert_eq!(run_by(rng, &backward, &ones(), 11), first, "{rng}");
            }
            assert_eq!(run_by(rng, &forward, &turned, 11), first, "{rng}");
        }
        assert_ne!(first["a.y"], first["b.y"], "{rng}");
        assert_ne!(run_by(rng, &forward, &ones(), 12)["a.y"], first["a.y"]);
    }
    tch::set_num_threads(1);
    let first = run(&forward, &ones(), 11);
    // A wider type changes no draw.
    let wide = run(
        &dropouts(DType::F64, &calls),
        &ones().to_kind(Kind::Double),
        11,
    );
    for (name, y) in &first {
        assert_eq!(y.eq(0.0), wide[name].eq(0.0), "{name}");
    }
}

#[test]
fn the_cotangent_loses_the_same_elements() {
    torch::alone();
    for rng in RULES {
        let mut graph = dropouts(DType::F32, &[(0.4, "a"), (0.3, "b")]);
        let (x, y) = (graph.inputs()[0], graph.outputs()[0]);
        let cotangent = graph.add_input("dy", Some(graph.ty(y).clone()));
        let seeds = [Seed {
            value: y,
            cotangent: Some(cotangent),
        }];
        autodiff(&mut graph, &seeds, &[x]).unwrap();
        let value = ones() * 3.0;
        let inputs = [
            ("x", value),
            ("rng_seed", Tensor::from(8i64)),
            ("dy", ones()),
        ];
        let inputs = inputs
            .into_iter()
            .map(|(k, v)| (k.to_string(), v))
            .collect();
        let mut program = Program::new(&graph).unwrap();
        program.draw_by(rng);
        let done = program.run(&inputs).unwrap();
        let outs: BTreeMap<String, Tensor> = done.outputs.into_iter().collect();
        assert_eq!(&outs["x.grad"] * 3.0, outs["a.y"], "{rng}");
    }
}

#[test]
fn eager_draws_what_pytorch_draws() {
    torch::alone();
    let calls = [(0.1, "a"), (0.0, "none"), (0.55, "b"), (0.3, "c")];
    let x = Tensor::randn([ROWS, COLUMNS], (Kind::Float, tch::Device::Cpu));
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let x = x.to_kind(convert::kind(dtype).unwrap());
        tch::manual_seed(77);
        let expected: Vec<Tensor> = calls.iter().map(|(p, _)| x.dropout(*p, true)).collect();
        let found = run_by(Rng::Eager, &dropouts(dtype, &calls), &x, 77);
        for ((_, name), expected) in calls.iter().zip(&expected) {
            let found = &found[&format!("{name}.y")];
            assert!(torch::same_bits(found, expected), "{dtype} {name}");
        }
    }
}

#[test]
fn a_dropout_and_its_mask_have_no_common_draws_in_libtorch() {
    torch::alone();
    let mut graph = dropouts(DType::F32, &[(0.4, "a")]);
    let dropout = graph.def_node(graph.outputs()[0]).unwrap();
    let [x, _, seed, stream] = graph.node(dropout).ins[..] else {
        panic!("four operands");
    };
    let mut b = Builder::new(&mut graph);
    let shape = b.shape(x.unwrap()).unwrap();
    let operands = [shape, seed.unwrap(), stream.unwrap()];
    let mask = b.emit(&UNIFORM, &operands, Attrs::new()).unwrap();
    graph.set_outputs(vec![graph.outputs()[0], mask]);
    let inputs = BTreeMap::from([
        ("x".to_string(), ones()),
        ("rng_seed".to_string(), Tensor::from(1i64)),
    ]);
    let mut program = Program::new(&graph).unwrap();
    assert!(program.run(&inputs).is_ok());
    for rng in [Rng::Native, Rng::Eager] {
        program.draw_by(rng);
        let refused = program.run(&inputs).err().unwrap();
        assert_eq!((refused.code(), refused.exit_code()), ("rng", 2));
    }
}

#[test]
fn draws_are_those_of_the_definition() {
    torch::alone();
    let mut graph = Graph::new("draws");
    let mut b = Builder::new(&mut graph);
    let (shape, seed) = (b.ints(&[3, 5]), b.int(-9));
    let number = b.int(stream("here"));
    let out = b
        .emit(&UNIFORM, &[shape, seed, number], Attrs::new())
        .unwrap();
    graph.set_outputs(vec![out]);
    graph.phase = Phase::Typed;
    let done = Program::new(&graph).unwrap().run(&BTreeMap::new()).unwrap();
    let key = Key::new(-9, stream("here"));
    for i in 0..15 {
        let found = done.outputs[0].1.double_value(&[i / 5, i % 5]);
        assert_eq!(found * f64::from(1 << 24), f64::from(key.draw(i as u64)));
    }
}
