//! AdamW with states of eight bits: steps are those of bitsandbytes, in blocks of any device and from gradients of any layout,
//! in the memory that was predicted.

use crate::support::torch;

use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::{self, Tensors};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ir::{Attrs, DType, Graph, Tensor, Ty};
use ckpt_passes::ops::{Builder, EmitExt, names};
use ckpt_passes::plan::Policy;
use ckpt_passes::testing::models;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use std::path::Path;

/// Numbers of `fixtures/adamw8bit/make.py`: of a parameter for step 0, else of its gradient.
fn values(elements: i64, step: i64) -> Vec<f64> {
    let value = |index: i64| {
        let number = (index * 7919 + step * 104_729 + (index * step) % 97 * 31) % 2003;
        let scaled = (number - 1001) as f64 / 1001.0;
        match step {
            0 => scaled,
            _ => scaled / 10f64.powi((index % 5) as i32),
        }
    };
    (0..elements).map(value).collect()
}

/// A training step of the sum of w·x, of which x is the gradient by w, or its transpose.
fn training(dims: [i64; 2], dtype: DType, is_turned: bool, updates: UpdateOptions) -> Graph {
    let mut graph = Graph::new("sum");
    let [rows, columns] = dims;
    let shown = if is_turned { [columns, rows] } else { dims };
    let x = graph.add_input("x", Some(Ty::new(dtype, shown.map(Into::into))));
    let start = models::tensor(dtype, &dims, &values(rows * columns, 0));
    let w = graph.add_init("w", start);
    let mut b = Builder::new(&mut graph);
    let seen = match is_turned {
        true => b.transpose(w, &[1, 0]).unwrap(),
        false => w,
    };
    let product = b.mul(seen, x).unwrap();
    let attrs = Attrs::new().with("keepdims", 0);
    let loss = b.emit(names::REDUCE_SUM, &[product], attrs).unwrap();
    graph.rename_value(loss, "loss");
    graph.set_outputs(vec![loss]);
    let request = Request {
        loss: Loss::parse("output:loss").unwrap(),
        plan: Policy::NONE.into(),
        updates,
        ..Request::default()
    };
    compile(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{e}"));
    graph
}

fn options(settings: &str) -> UpdateOptions {
    UpdateOptions {
        optimizer: Some(Optimizer::parse(settings).unwrap()),
        ..UpdateOptions::default()
    }
}

/// Inputs of a step, of which states are not given: zeros.
fn inputs(graph: &Graph, step: i64) -> Tensors {
    let mut inputs = Tensors::new();
    for input in graph.inputs() {
        let (name, ty) = (graph.value(*input).name.clone(), graph.ty(*input).clone());
        let dims = ty.static_dims().unwrap();
        let elements: i64 = dims.iter().product();
        let dims: Vec<u64> = dims.iter().map(|n| *n as u64).collect();
        let tensor = match name.as_str() {
            "x" => Tensor::rounded(ty.dtype, &dims, values(elements, step).into_iter()),
            "lr" => Tensor::scalar(DType::F32, 1e-2),
            "step" => Tensor::int(step),
            "apply" => Tensor::new(DType::Bool, [], vec![u8::from(step % 2 == 0)]),
            "restart" => Tensor::new(DType::Bool, [], vec![u8::from(step % 2 == 1)]),
            _ => Tensor::new(
                ty.dtype,
                dims,
                vec![0; (elements as u64 * ty.dtype.size_bytes()) as usize],
            ),
        };
        inputs.insert(name, tensor);
    }
    inputs
}

/// Runs steps, each from the results of the one before, and calls `seen` with what each one made.
fn train(graph: &Graph, steps: i64, device: DeviceKind, mut seen: impl FnMut(i64, &Measured)) {
    let mut now = Tensors::new();
    for step in 1..=steps {
        let weights: Tensors = now.remove_entry("w").into_iter().collect();
        let mut session = Session::new(graph, &weights, None, Place::Cpu, Rng::default()).unwrap();
        session.use_blocks_of(device);
        let mut given = inputs(graph, step);
        given.extend(
            std::mem::take(&mut now)
                .into_iter()
                .filter(|(n, _)| n != "restart"),
        );
        let done = session.run(&given).unwrap();
        seen(step, &done);
        let updated = done.outputs.iter();
        let updated = updated.filter_map(|(n, t)| Some((n.strip_suffix(".updated")?, t)));
        now = updated.map(|(n, t)| (n.to_string(), t.clone())).collect();
    }
}

#[test]
fn steps_are_those_of_bitsandbytes() {
    torch::alone();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/adamw8bit/case.npz");
    let wanted = tensors::read(&fixture).unwrap();
    for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
        let graph = training(
            [48, 105],
            DType::F32,
            false,
            options("adamw8bit:weight_decay=0.1"),
        );
        let mut compared = 0;
        train(&graph, 24, device, |step, done| {
            assert_eq!(done.peak_bytes, done.predicted_peak_bytes, "step {step}");
            for (name, own) in &done.outputs {
                let Some(part) = name.strip_suffix(".updated") else {
                    continue;
                };
                let key = part.strip_prefix("w.").unwrap_or("parameter");
                let Some(other) = wanted.get(&format!("{step}.{key}")) else {
                    continue;
                };
                compared += 1;
                assert_eq!((own.dtype, own.elements()), (other.dtype, other.elements()));
                let numbers = |t: &Tensor| -> Vec<f64> {
                    let count = t.elements() as usize;
                    (0..count).map(|i| t.get_f64(i).unwrap()).collect()
                };
                let [own, other] = [own, other].map(numbers);
                if key.ends_with("exp_avg") || key.ends_with("exp_avg_sq") {
                    assert!(own == other, "{name} of step {step}");
                    continue;
                }
                let largest = other.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                for (i, (a, b)) in own.iter().zip(&other).enumerate() {
                    let is_near = (a - b).abs() <= 1e-6 * largest;
                    assert!(is_near, "{name} of step {step} at {i}: {a} and {b}");
                }
            }
        });
        assert_eq!(compared, 4 * 5);
    }
}

/// Fails unless two devices made the same. They compute factors in different ways, which can differ in the last bit of a float32.
/// Few of such results lie so close to the middle between two bfloat16 numbers that they are rounded apart.
fn assert_near(what: &str, found: &Tensor, expected: &Tensor) {
    if found.dtype != DType::BF16 {
        return torch::assert_close(what, found, expected, 1e-6);
    }
    assert_eq!(found.dims, expected.dims, "{what}");
    let mut apart = 0;
    for i in 0..expected.elements() as usize {
        let (a, b) = (found.get_f64(i).unwrap(), expected.get_f64(i).unwrap());
        apart += u64::from(a != b);
        assert!(
            (a - b).abs() <= a.abs().max(b.abs()) / 128.0,
            "{what}[{i}]: {a} and {b} are not neighbours"
        );
    }
    assert!(
        apart <= expected.elements() / 10_000,
        "{what}: {apart} elements differ"
    );
}

/// Blocks of both kinds of devices, parameters of several of them, sums over micro-batches, clipped gradients.
#[test]
fn any_blocks_and_layouts_give_the_same_bits_in_the_memory_predicted() {
    torch::alone();
    let summed = |updates| UpdateOptions {
        accumulate: Some(2),
        ..updates
    };
    let clipped = UpdateOptions {
        clip: Some(0.5),
        ..options("adamw8bit")
    };
    let master = UpdateOptions {
        master_weights: true,
        ..options("adamw8bit")
    };
    let cases = [
        (DType::F32, false, options("adamw8bit")),
        (DType::F32, true, options("adamw8bit")),
        (DType::F32, true, clipped.clone()),
        (DType::F32, false, summed(clipped)),
        (DType::BF16, false, options("adamw8bit")),
        (DType::BF16, true, summed(master)),
    ];
    for (dtype, is_turned, updates) in cases {
        let graph = training([301, 700], dtype, is_turned, updates.clone());
        let mut expected = Vec::new();
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            let what = format!("{dtype:?} turned {is_turned} {updates:?} on {device:?}");
            train(&graph, 4, device, |step, done| {
                assert_eq!(
                    done.peak_bytes, done.predicted_peak_bytes,
                    "{what} step {step}"
                );
                let updated = done.outputs.clone();
                let updated: Tensors = updated
                    .into_iter()
                    .filter(|(n, _)| n.ends_with(".updated"))
                    .collect();
                match expected.get(step as usize - 1) {
                    Some(wanted) => {
                        for (name, tensor) in wanted {
                            let what = format!("{what} step {step}: {name}");
                            assert_near(&what, &updated[name], tensor);
                        }
                    }
                    None => expected.push(updated),
                }
            });
        }
        let moved = |a: usize, b: usize, name: &str| expected[a][name] != expected[b][name];
        // Micro-batches move nothing before the last one.
        let is_summed = updates.accumulate.is_some();
        for name in [
            "w.updated",
            "w.exp_avg.updated",
            "w.exp_avg_sq_absmax.updated",
        ] {
            assert_eq!(moved(1, 2, name), !is_summed, "{name}");
            assert!(moved(2, 3, name), "{name}");
        }
    }
}

#[test]
fn a_small_parameter_has_states_as_adamw() {
    let states = |dims, dtype| {
        let graph = training(dims, dtype, false, options("adamw8bit"));
        let inputs = graph.inputs().iter();
        let states = inputs.filter(|v| graph.value(**v).name.starts_with("w."));
        let states = states.map(|v| (graph.value(*v).name.clone(), graph.ty(*v).to_string()));
        states.collect::<Vec<_>>()
    };
    let small = [
        ("w.exp_avg", "f32[63, 65]"),
        ("w.exp_avg_sq", "f32[63, 65]"),
    ];
    assert_eq!(
        states([63, 65], DType::F32),
        small.map(|(n, t)| (n.into(), t.into()))
    );
    let large = [
        ("w.exp_avg", "u8[4096]"),
        ("w.exp_avg_absmax", "f32[16]"),
        ("w.exp_avg_sq", "u8[4096]"),
        ("w.exp_avg_sq_absmax", "f32[16]"),
    ];
    assert_eq!(
        states([64, 64], DType::BF16),
        large.map(|(n, t)| (n.into(), t.into()))
    );
    assert_eq!(states([64, 64], DType::F64).len(), 2);
}
