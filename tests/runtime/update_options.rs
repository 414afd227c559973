//! Options of updates: clipping, accumulation, scaled losses, master weights, decay groups. Planned and unplanned they give
//! the same bits in the memory that was predicted, and compute what their formulas say.

use crate::optimizer::{compiled, dims, request, run_as, session};
use crate::support::torch;

use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::session::Session;
use ckpt_opt::tensors::{Tensors, feed::Feed, random};
use ckpt_passes::compile::Request;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ir::{Attrs, DType, Graph, Tensor, Ty};
use ckpt_passes::ops::random::STOCHASTIC_ROUND;
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};

const LR: f64 = 0.0625;

fn options(optimizer: &str) -> UpdateOptions {
    UpdateOptions {
        optimizer: Some(Optimizer::parse(optimizer).unwrap()),
        ..UpdateOptions::default()
    }
}

fn with(updates: UpdateOptions, budget: Option<f64>) -> Request {
    Request {
        updates,
        loss: Loss::CausalLm,
        ..request("sgd", false, budget)
    }
}

fn graph(model: &str, updates: UpdateOptions) -> Graph {
    compiled(model, &with(updates, None)).unwrap()
}

/// The gradients of the model, without an optimizer.
fn plain(model: &str) -> Graph {
    graph(model, UpdateOptions::default())
}

fn feed(graph: &Graph, seed: u64) -> Feed {
    let mut feed = Feed::default();
    feed.start_training(graph);
    random::fill(graph, &mut feed, &dims(), seed).unwrap();
    set(&mut feed, "lr", LR);
    feed
}

fn set(feed: &mut Feed, name: &str, value: f64) {
    feed.inputs
        .insert(name.into(), Tensor::scalar(DType::F32, value));
}

fn truth(x: bool) -> Tensor {
    Tensor::new(DType::Bool, [], vec![u8::from(x)])
}

fn numbers(t: &Tensor) -> Vec<f64> {
    let n = t.elements() as usize;
    (0..n).map(|i| t.get_f64(i).unwrap()).collect()
}

fn number(t: &Tensor) -> f64 {
    numbers(t)[0]
}

/// The elements of each tensor whose name ends so, by the name without the end.
fn ending(tensors: &Tensors, end: &str) -> Vec<(String, Vec<f64>)> {
    let own = tensors
        .iter()
        .filter_map(|(n, t)| Some((n.strip_suffix(end)?, t)));
    own.map(|(name, t)| (name.to_string(), numbers(t)))
        .collect()
}

fn weight(graph: &Graph, name: &str) -> Vec<f64> {
    let value = graph.find_value(name).unwrap();
    numbers(graph.value(value).tensor().unwrap())
}

fn norm(gradients: &[(String, Vec<f64>)]) -> f64 {
    let elements = gradients.iter().flat_map(|(_, g)| g);
    elements.map(|x| x * x).sum::<f64>().sqrt()
}

fn close(found: &[f64], wanted: &[f64], share: f64, what: &str) {
    let most = wanted.iter().fold(1e-30, |a: f64, x| a.max(x.abs()));
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(wanted).enumerate() {
        assert!(
            (a - b).abs() <= share * most,
            "{what} element {i}: {a} against {b}"
        );
    }
}

/// Gradients of the model at given weights.
fn gradients(model: &Graph, inputs: &Tensors, weights: &Tensors) -> Vec<(String, Vec<f64>)> {
    let session = Session::new(model, weights, None, Place::Cpu, Rng::default()).unwrap();
    let named = |name: &String| {
        let value = model.find_value(name);
        value.is_some_and(|v| model.inputs().contains(&v))
    };
    let own = inputs.iter().filter(|(name, _)| named(name));
    let own: Tensors = own.map(|(n, t)| (n.clone(), t.clone())).collect();
    ending(&session.run(&own).unwrap().outputs, ".grad")
}

#[test]
fn every_option_gives_the_unplanned_bits_in_the_memory_predicted() {
    let clipped = |optimizer| UpdateOptions {
        clip: Some(0.5),
        ..options(optimizer)
    };
    let summed = |updates| UpdateOptions {
        accumulate: Some(4),
        ..updates
    };
    let half = |updates| UpdateOptions {
        loss_scale: true,
        master_weights: true,
        ..updates
    };
    let fused = |updates| UpdateOptions {
        fuse: true,
        ..updates
    };
    let by_chance = |updates| UpdateOptions {
        stochastic_rounding: true,
        ..updates
    };
    let cases = [
        ("gpt2", clipped("adamw")),
        ("gpt2", summed(clipped("sgd:momentum=0.9"))),
        ("gpt2", fused(summed(options("adamw")))),
        ("gpt2", fused(options("lion:weight_decay=0.1"))),
        ("llama32_bf16", clipped("lion")),
        ("llama32_bf16", half(clipped("adamw"))),
        (
            "llama32_bf16",
            summed(half(clipped("sgd:momentum=0.9,nesterov=true"))),
        ),
        ("llama32_bf16", fused(summed(options("adamw")))),
        ("gpt2", fused(options("adafactor:weight_decay=0.1"))),
        ("llama32_bf16", summed(half(clipped("adafactor")))),
        ("gpt2", fused(options("adamw8bit"))),
        ("llama32_bf16", summed(half(clipped("adamw8bit")))),
        ("llama32_bf16", by_chance(fused(options("adamw8bit")))),
        ("gpt2", fused(options("muon"))),
        ("llama32_bf16", half(clipped("muon:match_rms_adamw=true"))),
        (
            "llama32_bf16",
            UpdateOptions {
                master_weights: true,
                ..fused(options("adamw"))
            },
        ),
        ("llama32_bf16", by_chance(fused(options("adamw")))),
        ("llama32_bf16", by_chance(summed(options("muon")))),
    ];
    let mut planned = 0;
    for (model, updates) in cases {
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            let mut expected = None;
            for budget in [None, Some(75.0)] {
                let what = format!("{model} {updates:?} at {budget:?} on {device:?}");
                let graph = compiled(model, &with(updates.clone(), budget));
                let Some(graph) = graph else {
                    continue;
                };
                planned += usize::from(budget.is_some());
                let run = run_as(&graph, budget.is_none(), device);
                let is_bound = run.peak_bytes == run.predicted_peak_bytes;
                assert!(
                    is_bound || device == DeviceKind::Cuda,
                    "{what}: {} measured, {} predicted",
                    run.peak_bytes,
                    run.predicted_peak_bytes
                );
                let outputs = run.outputs.clone();
                assert!(
                    outputs == *expected.get_or_insert(outputs.clone()),
                    "{what}"
                );
            }
        }
    }
    assert!(planned > 12, "{planned}");
}

#[test]
fn a_gradient_is_clipped_by_its_global_norm() {
    torch::alone();
    let model = plain("gpt2");
    for most in [0.5f32, 1e6] {
        let graph = graph(
            "gpt2",
            UpdateOptions {
                clip: Some(most),
                ..options("sgd")
            },
        );
        let feed = feed(&graph, 3);
        let found = session(&graph).run(&feed.inputs).unwrap().outputs;
        let own = gradients(&model, &feed.inputs, &Tensors::new());
        let norm = norm(&own);
        let factor = (f64::from(most) / (norm + 1e-6)).min(1.0);
        assert!((factor == 1.0) == (most > 1.0), "{norm}");
        close(&[number(&found["grad_norm"])], &[norm], 1e-5, "norm");
        for (name, g) in own {
            let p = weight(&graph, &name);
            let wanted: Vec<f64> = p.iter().zip(&g).map(|(p, g)| p - LR * factor * g).collect();
            close(
                &numbers(&found[&format!("{name}.updated")]),
                &wanted,
                1e-6,
                &name,
            );
        }
    }
}

#[test]
fn micro_batches_make_one_update_by_their_mean() {
    torch::alone();
    let (model, n) = (plain("gpt2"), 3);
    let graph = graph(
        "gpt2",
        UpdateOptions {
            accumulate: Some(n),
            clip: Some(0.5),
            ..options("sgd:momentum=0.9")
        },
    );
    let mut session = session(&graph);
    session.go_on(true);
    let mut weights = Tensors::new();
    let mut momentum: Tensors = Tensors::new();
    for window in 0..2u64 {
        let mut sums: Vec<(String, Vec<f64>)> = Vec::new();
        let mut last = Tensors::new();
        for micro in 0..n {
            let mut feed = feed(&graph, 10 * window + u64::from(micro));
            feed.inputs.insert("apply".into(), truth(micro + 1 == n));
            let own = gradients(&model, &feed.inputs, &weights);
            match sums.is_empty() {
                true => sums = own,
                false => {
                    for ((_, sum), (_, g)) in sums.iter_mut().zip(own) {
                        sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
                    }
                }
            }
            last = session.run(&feed.inputs).unwrap().outputs;
            assert!(!last.keys().any(|name| name.ends_with(".grad")));
            for (name, sum) in &sums {
                let found = numbers(&last[&format!("{name}.accumulated.updated")]);
                close(&found, sum, 1e-5, name);
                if micro + 1 < n && window > 0 {
                    assert!(last[&format!("{name}.updated")] == weights[name], "{name}");
                    let state = format!("{name}.momentum");
                    assert!(
                        last[&format!("{state}.updated")] == momentum[&state],
                        "{name}"
                    );
                }
            }
        }
        for (_, sum) in &mut sums {
            sum.iter_mut().for_each(|g| *g /= f64::from(n));
        }
        let norm = norm(&sums);
        close(&[number(&last["grad_norm"])], &[norm], 1e-5, "norm");
        let factor = (0.5 / (norm + 1e-6)).min(1.0);
        for (name, g) in sums {
            let old = weights
                .get(&name)
                .map_or_else(|| weight(&graph, &name), numbers);
            let state = format!("{name}.momentum");
            let m = momentum
                .get(&state)
                .map_or_else(|| vec![0.0; g.len()], numbers);
            let wanted: Vec<f64> = (0..g.len())
                .map(|i| old[i] - LR * (0.9 * m[i] + factor * g[i]))
                .collect();
            let found = &last[&format!("{name}.updated")];
            close(&numbers(found), &wanted, 1e-6, &name);
            weights.insert(name.clone(), found.clone());
            momentum.insert(state.clone(), last[&format!("{state}.updated")].clone());
        }
    }
}

#[test]
fn a_scaled_loss_changes_nothing_but_a_step_with_an_infinity() {
    torch::alone();
    let updates = UpdateOptions {
        loss_scale: true,
        ..options("adamw")
    };
    let graph = graph("gpt2", updates);
    let run = |scale: f64| {
        let mut feed = feed(&graph, 3);
        set(&mut feed, "loss_scale", scale);
        session(&graph).run(&feed.inputs).unwrap().outputs
    };
    let [one, scaled, infinite] = [1.0, 4096.0, f64::INFINITY].map(run);
    assert_eq!(one["loss"], scaled["loss"]);
    for (outputs, found_inf) in [(&one, 0), (&scaled, 0), (&infinite, 1)] {
        assert_eq!(outputs["found_inf"].get_i64(0), Some(found_inf));
    }
    close(
        &[number(&scaled["grad_norm"])],
        &[number(&one["grad_norm"])],
        1e-6,
        "norm",
    );
    for (name, wanted) in ending(&one, ".exp_avg.updated") {
        let state = format!("{name}.exp_avg.updated");
        close(&numbers(&scaled[&state]), &wanted, 1e-6, &state);
        assert!(
            numbers(&infinite[&state]).iter().all(|x| *x == 0.0),
            "{state}"
        );
        let found = numbers(&infinite[&format!("{name}.updated")]);
        assert_eq!(found, weight(&graph, &name), "{name}");
    }
}

#[test]
fn a_narrow_parameter_is_the_rounding_of_its_master() {
    torch::alone();
    let updates = UpdateOptions {
        master_weights: true,
        ..options("sgd:momentum=0.9")
    };
    let graph = graph("llama32_bf16", updates);
    let mut session = session(&graph);
    session.go_on(true);
    let mut feed = feed(&graph, 3);
    set(&mut feed, "lr", 1e-4);
    let masters = ending(&feed.inputs, ".master");
    assert!(masters.len() > 10);
    let mut state: Vec<(String, Vec<f64>, Vec<f64>)> = masters
        .into_iter()
        .map(|(name, master)| {
            assert_eq!(master, weight(&graph, &name), "{name}");
            let zeros = vec![0.0; master.len()];
            (name, master, zeros)
        })
        .collect();
    let mut finer = 0;
    for _ in 0..4 {
        let found = session.run(&feed.inputs).unwrap().outputs;
        for (name, p, m) in &mut state {
            let g = numbers(&found[&format!("{name}.grad")]);
            let master = &found[&format!("{name}.master.updated")];
            for i in 0..g.len() {
                m[i] = 0.9 * m[i] + g[i];
                p[i] -= 1e-4 * m[i];
            }
            assert_eq!(found[&format!("{name}.momentum.updated")].dtype, DType::F32);
            close(&numbers(master), p, 1e-6, name);
            let rounded = &found[&format!("{name}.updated")];
            assert_eq!(rounded.dtype, DType::BF16);
            for (narrow, wide) in numbers(rounded).into_iter().zip(numbers(master)) {
                assert_eq!(narrow, half::bf16::from_f32(wide as f32).to_f64(), "{name}");
                finer += usize::from(narrow != wide);
            }
        }
    }
    assert!(finer > 1000, "{finer}");
}

/// Elements of one number that are rounded by chance.
const ROUNDED: u64 = 1 << 14;

fn rounded_by_chance(number: f32, seed: i64, device: DeviceKind) -> Vec<f64> {
    let mut graph = Graph::new("g");
    let ty = |dtype| Some(Ty::new(dtype, [(ROUNDED as i64).into()]));
    let old = graph.add_input("old", ty(DType::BF16));
    let new = graph.add_input("new", ty(DType::F32));
    let key = graph.add_input("rng_seed", Some(Ty::scalar(DType::I64)));
    let mut b = Builder::new(&mut graph);
    let stream = b.int(9);
    let ins = [old, new, key, stream];
    let y = b.emit(&STOCHASTIC_ROUND, &ins, Attrs::new()).unwrap();
    graph.set_outputs(vec![y]);
    let mut session =
        Session::new(&graph, &Tensors::new(), None, Place::Cpu, Rng::default()).unwrap();
    session.use_blocks_of(device);
    let of = |dtype, x: f32| Tensor::rounded(dtype, &[ROUNDED], (0..ROUNDED).map(|_| x.into()));
    let inputs = [
        ("old", of(DType::BF16, 7.0)),
        ("new", of(DType::F32, number)),
        ("rng_seed", Tensor::int(seed)),
    ];
    let inputs = inputs.map(|(name, tensor)| (name.to_string(), tensor));
    let run = session.run(&inputs.into()).unwrap();
    assert_eq!(run.peak_bytes, run.predicted_peak_bytes, "{device:?}");
    numbers(run.outputs.values().next().unwrap())
}

#[test]
fn rounding_by_chance_is_right_on_average() {
    torch::alone();
    // The last two are halfway in the binades below and above a power of two, and next to one.
    for number in [
        1.001_f32,
        -2.718_281_7,
        1.0e-3,
        3.0e30,
        1.0,
        0.0,
        255.75,
        -256.75,
    ] {
        let cut = |bits: u32| f64::from(f32::from_bits(bits));
        let below = number.to_bits() & 0xffff_0000;
        let (low, high) = (cut(below), cut(below + 0x1_0000));
        let wide = f64::from(number);
        let share = (wide - low) / (high - low);
        let (mut sum, mut count) = (0.0, 0.0);
        for seed in 0..8 {
            let found = rounded_by_chance(number, seed, DeviceKind::Cpu);
            assert_eq!(found, rounded_by_chance(number, seed, DeviceKind::Cuda));
            for x in found {
                assert!(x == low || (x == high && share > 0.0), "{x} of {number}");
                sum += (x - low) / (high - low);
                count += 1.0;
            }
        }
        let deviation = (share * (1.0 - share) / count).sqrt();
        let away = (sum / count - share).abs();
        assert!(
            away <= 5.0 * deviation,
            "{number}: {share}, but {}",
            sum / count
        );
    }
    let of = |seed| rounded_by_chance(1.001, seed, DeviceKind::Cpu);
    assert_eq!(of(3), of(3));
    assert_ne!(of(3), of(4));
}
