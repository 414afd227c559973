//! Kernels that work on some rows at a time: a CUDA device takes larger blocks than a CPU, in the memory that is predicted
//! for it, and with fewer calls of libtorch. Here the CPU runs the blocks of both.

use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::runtime::executor::{Program, Run};
use ckpt_opt::runtime::{convert, kernels};
use ckpt_opt::tensors::random;
use ckpt_passes::analysis::sdpa::{SdpaBackend, SdpaBackends};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ir::{Attrs, DType, Dim, Graph, Ty};
use ckpt_passes::ops::{Builder, EmitExt, matmul, norm, random as rng};
use ckpt_passes::plan::Policy;
use ckpt_passes::testing::{Style, models, transformer};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_passes::transform::tile::{Tile, Tiles};
use std::collections::BTreeMap;
use std::path::Path;

/// A norm and a head. Gradients of the norm, the loss and the optimizer take several blocks of a CPU.
fn norm_and_head(dtype: DType) -> Graph {
    let (width, classes) = (256, 6000);
    let mut graph = Graph::new("head");
    let x = graph.add_input(
        "x",
        Some(Ty::new(
            dtype,
            [Dim::symbol("b"), Dim::symbol("s"), width.into()],
        )),
    );
    let mut weight = |name: &str, dims: &[i64]| {
        let count = dims.iter().product::<i64>();
        let values: Vec<f64> = (0..count).map(|i| (i % 13) as f64 / 16.0 - 0.375).collect();
        graph.add_init(name, models::tensor(dtype, dims, &values))
    };
    let [scale, bias] = ["scale", "bias"].map(|name| weight(name, &[width]));
    let head = weight("head", &[width, classes]);
    let mut b = Builder::new(&mut graph);
    let normal = b.emit(&norm::LAYER_NORM, &[x, scale, bias], Attrs::new());
    let logits = b.emit(&matmul::MATMUL, &[normal.unwrap(), head], Attrs::new());
    let logits = logits.unwrap();
    graph.rename_value(logits, "logits");
    graph.set_outputs(vec![logits]);
    graph
}

fn step(mut graph: Graph, loss: &str, chunks: Tile, optimizer: Option<&str>) -> Graph {
    let request = Request {
        loss: Loss::parse(loss).unwrap(),
        plan: Policy::NONE.into(),
        dims: [("b", 2), ("s", 256)]
            .map(|(name, n)| (name.to_string(), n))
            .to_vec(),
        tile: Tiles {
            loss: chunks,
            ..Tiles::default()
        },
        drop_outputs: vec!["logits".into()],
        updates: UpdateOptions {
            optimizer: optimizer.map(|text| Optimizer::parse(text).unwrap()),
            ..UpdateOptions::default()
        },
        ..Request::default()
    };
    compile(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{e}"));
    graph
}

/// How often each operator of libtorch was called.
type Calls = BTreeMap<&'static str, u64>;

fn total(calls: &Calls) -> u64 {
    calls.values().sum()
}

/// Runs a graph with the blocks of a device. Returns the first step, the calls of the
/// second, and the predicted peak.
fn run(graph: &Graph, device: DeviceKind) -> (Run, Calls, u64) {
    let dims = [("b", 2), ("s", 256)].map(|(name, n)| (name.to_string(), n));
    run_at(graph, device, &dims)
}

fn run_at(graph: &Graph, device: DeviceKind, dims: &[(String, i64)]) -> (Run, Calls, u64) {
    let given = random::inputs(graph, dims, 3).unwrap();
    let tensors = given
        .iter()
        .map(|(name, t)| (name.clone(), convert::tensor(name, t).unwrap()));
    let inputs = tensors.collect::<BTreeMap<_, _>>();
    let mut program = Program::new(graph).unwrap();
    program.use_blocks_of(device);
    if device == DeviceKind::Cuda {
        program.attend_with(SdpaBackends {
            list: vec![SdpaBackend::Cpu],
            ..SdpaBackends::default()
        });
    }
    program.go_on(true);
    let done = program.run(&inputs).unwrap_or_else(|e| panic!("{e}"));
    // Training goes on: a second step copies no parameters that were given.
    let before = kernels::calls();
    program.run(&inputs).unwrap_or_else(|e| panic!("{e}"));
    let mut calls = kernels::calls();
    for (name, count) in before {
        *calls.get_mut(name).unwrap() -= count;
    }
    let predicted = program.specialization(&inputs).unwrap().memory.peak_bytes;
    (done, calls, predicted)
}

#[test]
fn a_device_takes_larger_blocks_in_the_memory_predicted() {
    torch::alone();
    for (dtype, optimizer) in [(DType::F32, "adamw"), (DType::BF16, "adamw")] {
        let graph = step(
            norm_and_head(dtype),
            "causal-lm",
            Tile::Off,
            Some(optimizer),
        );
        let both = [DeviceKind::Cpu, DeviceKind::Cuda].map(|device| {
            let (done, calls, predicted) = run(&graph, device);
            assert_eq!(done.peak_bytes, predicted, "{dtype:?} {device:?}");
            (done, total(&calls))
        });
        let [(cpu, often), (cuda, seldom)] = &both;
        assert!(*often > seldom + 40, "{dtype:?}: {often} {seldom}");
        // Only sums over blocks are rounded in another order.
        for ((name, a), (_, b)) in cpu.outputs.iter().zip(&cuda.outputs) {
            let [a, b] = [a, b].map(torch::numbers);
            let largest = a.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
            let most = if dtype == DType::F32 { 1e-6 } else { 1e-2 };
            let off = off.fold(0.0, f64::max);
            assert!(off <= most * largest, "{name}: {off} of {largest}");
        }
    }
}

/// On a device each call costs the host time, so a loss in chunks must not make many more of them.
#[test]
fn a_loss_in_chunks_adds_few_calls() {
    torch::alone();
    let [whole, chunks] = [Tile::Off, Tile::Chunks(16)].map(|chunks| {
        let graph = step(transformer(16, Style::PreNorm), "causal-lm", chunks, None);
        total(&run(&graph, DeviceKind::Cuda).1)
    });
    println!("{chunks} calls, {whole} with the loss as a whole");
    assert!(
        10 * chunks <= 13 * whole,
        "{chunks} calls, {whole} with the loss as a whole"
    );
}

/// One call updates all parameters of a step, whatever the formula.
#[test]
fn a_device_updates_all_parameters_in_one_call() {
    torch::alone();
    let of = |optimizer| {
        step(
            transformer(2, Style::PreNorm),
            "causal-lm",
            Tile::Off,
            optimizer,
        )
    };
    let (plain, calls, predicted) = run(&of(None), DeviceKind::Cuda);
    // What libtorch takes on a device only, and not on the CPU, where this runs.
    let (without, on_devices) = (total(&calls), predicted - plain.peak_bytes);
    for optimizer in [
        "adamw",
        "adamw:beta1=0.8,weight_decay=0,eps=1e-6",
        "sgd",
        "sgd:weight_decay=0.1",
        "sgd:momentum=0.9,weight_decay=0.1",
        "sgd:momentum=0.9,nesterov=true,weight_decay=0.1",
    ] {
        let graph = of(Some(optimizer));
        let (cpu, ..) = run(&graph, DeviceKind::Cpu);
        let (cuda, calls, predicted) = run(&graph, DeviceKind::Cuda);
        assert_eq!(cuda.peak_bytes + on_devices, predicted, "{optimizer}");
        // AdamW converts the number of the step.
        let (name, others) = match optimizer.starts_with("adamw") {
            true => ("aten::_fused_adamw_.tensor_lr", 1),
            false => ("aten::_fused_sgd_.tensor_lr", 0),
        };
        assert_eq!(calls[name], 1, "{optimizer}");
        assert_eq!(total(&calls), without + 1 + others, "{optimizer}");
        let mut updated = 0;
        for ((name, a), (_, b)) in cpu.outputs.iter().zip(&cuda.outputs) {
            let [a, b] = [a, b].map(torch::numbers);
            let largest = a.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
            assert!(
                off.fold(0.0, f64::max) <= 2e-6 * largest,
                "{optimizer} {name}"
            );
            updated += name.ends_with(".updated") as usize;
        }
        assert!(updated > 10);
    }
}

/// The calls of a step of the GPT-2 fixture in eager PyTorch, as `python tools eager_calls` counts them: kernels, and
/// together with views.
const EAGER_CALLS: [u64; 2] = [122, 276];

/// Operators that only make views.
const VIEWS: [&str; 6] = [
    "aten::as_strided",
    "aten::expand",
    "aten::narrow",
    "aten::reshape",
    "aten::slice.Tensor",
    "aten::view",
];

#[test]
fn gpt2_makes_hardly_more_calls_than_eager_pytorch() {
    torch::alone();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/gpt2/model.onnx");
    let mut graph = load(&file, &Given::default()).unwrap().graph;
    let dims = [("batch", 2), ("seq", 24)].map(|(name, n)| (name.to_string(), n));
    let request = Request {
        loss: Loss::parse("causal-lm").unwrap(),
        plan: Policy::NONE.into(),
        dims: dims.to_vec(),
        fuse: true,
        drop_outputs: vec!["*".into()],
        ..Request::default()
    };
    compile(&mut graph, &request, &mut Watch::default()).unwrap();
    let (_, calls, _) = run_at(&graph, DeviceKind::Cuda, &dims);
    let views: u64 = VIEWS.iter().filter_map(|name| calls.get(name)).sum();
    let ours = [total(&calls) - views, total(&calls)];
    println!("{ours:?} calls, {EAGER_CALLS:?} in eager PyTorch");
    let is_few = |(ours, eager): (u64, u64)| 5 * ours <= 6 * eager;
    let few = ours.into_iter().zip(EAGER_CALLS).all(is_few);
    assert!(
        few,
        "{ours:?}, {EAGER_CALLS:?} in eager PyTorch: {calls:#?}"
    );
}

/// What a device draws by libtorch's ops are the draws of our loop, bit for bit.
#[test]
fn a_device_drops_the_same_elements() {
    torch::alone();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let mut graph = Graph::new("drop");
        let dims = ["b", "s"].map(Dim::symbol);
        let x = graph.add_input("x", Some(Ty::new(dtype, dims)));
        let mut b = Builder::new(&mut graph);
        let [seed, stream] = [-7, 1 << 40].map(|n| b.int(n));
        let (rows, ratio) = (b.ints(&[5, 77]), b.scalar(dtype, 0.3));
        let drawn = b
            .emit(&rng::UNIFORM, &[rows, seed, stream], Attrs::new())
            .unwrap();
        let kept = b
            .emit(&rng::DROPOUT, &[x, ratio, seed, stream], Attrs::new())
            .unwrap();
        graph.set_outputs(vec![drawn, kept]);
        let both = [DeviceKind::Cpu, DeviceKind::Cuda].map(|device| {
            let (done, _, predicted) = run(&graph, device);
            // Scalars of libtorch's ops lie in the host's memory, which is measured here.
            let scalars_bytes = if device == DeviceKind::Cuda { 16 } else { 0 };
            let bounds = predicted..=predicted + scalars_bytes;
            assert!(bounds.contains(&done.peak_bytes), "{dtype:?} {device:?}");
            done.outputs
        });
        for ((name, a), (_, b)) in both[0].iter().zip(&both[1]) {
            assert!(a.equal(b), "{dtype:?} {name}");
        }
        let kept = torch::numbers(&both[0][1].1);
        let share = kept.iter().filter(|x| **x == 0.0).count() as f64 / kept.len() as f64;
        assert!((0.2..0.4).contains(&share), "{share}");
    }
}
