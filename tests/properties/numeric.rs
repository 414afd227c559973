//! Numeric properties on random models over all op rows, run on libtorch.
//!
//! - A rewritten graph gives the bits of the unplanned one and takes exactly the predicted memory.
//! - Every gradient, by a rule or through a body, agrees with finite differences in float64.
//! - Every kernel takes exactly the memory that its row declares.
//! - Every op of our own agrees with its body in standard ops.

use crate::support::torch;

use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::analysis::{Binding, MemoryProfile, Sizes};
use ckpt_passes::driver::{Cx, Pipeline, Watch, run};
use ckpt_passes::ir::op::{Body, Grad};
use ckpt_passes::ir::{DType, Graph, ValueId};
use ckpt_passes::ops::body_of;
use ckpt_passes::plan::{Plan, saved_set};
use ckpt_passes::planning::BoundGraph;
use ckpt_passes::testing::Random;
use ckpt_passes::testing::models::{Model, SIZES, random, single, tensor};
use ckpt_passes::testing::recipes::{self, Recipe};
use ckpt_passes::text::print;
use ckpt_passes::transform::autodiff::autodiff;
use ckpt_passes::transform::loss::{Loss, Seed};
use ckpt_passes::transform::remat::remat;
use std::collections::{BTreeMap, BTreeSet};
use tch::{Kind, Tensor};

type Inputs = BTreeMap<String, Tensor>;

fn to_torch(dtype: DType, dims: &[i64], values: &[f64]) -> Tensor {
    convert::tensor("feed", &tensor(dtype, dims, values))
        .unwrap()
        .copy()
}

/// What a model is run on; a cotangent that a loss added is made up.
fn inputs(model: &Model, g: &Graph, dtype: DType, r: &mut Random) -> Inputs {
    let mut all = Inputs::new();
    for (id, dims, values) in &model.feeds {
        all.insert(
            model.graph.value(*id).name.clone(),
            to_torch(dtype, dims, values),
        );
    }
    for id in g.inputs() {
        let value = g.value(*id);
        if all.contains_key(&value.name) {
            continue;
        }
        let size = |name: &str| SIZES.iter().find(|(n, _)| *n == name).map(|(_, n)| *n);
        let dims: Vec<i64> = value
            .ty()
            .dims
            .iter()
            .map(|d| d.eval(&size).unwrap())
            .collect();
        let n: i64 = dims.iter().product();
        let values: Vec<f64> = (0..n)
            .map(|_| 0.1 + r.below(1000) as f64 / 1000.0)
            .collect();
        all.insert(
            value.name.clone(),
            to_torch(value.ty().dtype, &dims, &values),
        );
    }
    all
}

fn outputs(g: &Graph, inputs: &Inputs) -> Vec<(String, Tensor)> {
    let program = Program::new(g).unwrap_or_else(|e| panic!("{e}\n{}", print(g)));
    program
        .run(inputs)
        .unwrap_or_else(|e| panic!("{e}\n{}", print(g)))
        .outputs
}

/// Equal bits: NaNs too.
fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let bits = |t: &Tensor| {
        let t = t.contiguous();
        match t.kind() {
            Kind::Float => t.view_dtype(Kind::Int),
            Kind::Double => t.view_dtype(Kind::Int64),
            Kind::Half | Kind::BFloat16 => t.view_dtype(Kind::Int16),
            _ => t,
        }
    };
    a.kind() == b.kind() && a.size() == b.size() && bits(a) == bits(b)
}

#[test]
fn planned_equals_unplanned_bit_for_bit_in_the_memory_predicted() {
    torch::alone();
    let mut r = Random(21);
    let (mut compared, mut copies) = (0, 0);
    for n in 0..400 {
        let dtype = [DType::F32, DType::F64, DType::BF16][n % 3];
        let model = random(&mut r, 4 + n % 25, dtype, n % 2 == 0, &Recipe::is_trainable);
        let mut g = model.graph.clone();
        let mut cx = Cx::default();
        cx.request.loss = Loss::Vjp;
        let named = dim_kinds(&g);
        let sizes = SIZES.iter().filter(|(name, _)| named.contains_key(*name));
        cx.request.dims = sizes.map(|(name, n)| (name.to_string(), *n)).collect();
        let start = Pipeline::parse("infer,simplify,loss,autodiff,simplify").unwrap();
        if run(&start, &mut g, &mut cx, &mut Watch::default()).is_err() {
            continue;
        }
        let feed = inputs(&model, &g, dtype, &mut r);
        let before = outputs(&g, &feed);
        let binding = Binding::new(&g, &cx.request.dims).unwrap();
        let bound = BoundGraph::new(&g, &binding, cx.request.planning_options(None)).unwrap();
        let p = &bound.input.problem;
        let kept = p.values.iter().map(|_| r.below(4) == 0).collect();
        let none = p.by_op(None);
        let plan = Plan::new(
            "random",
            p,
            &saved_set::schedule(p, &kept),
            &none,
            &Default::default(),
        )
        .unwrap();
        copies += remat(&mut g, &bound.input, &bound.nodes, &plan).unwrap();
        let done = Program::new(&g).unwrap().run(&feed).unwrap();
        assert_eq!(before.len(), done.outputs.len());
        for ((name, a), (other, b)) in before.iter().zip(&done.outputs) {
            assert_eq!(name, other);
            assert!(same_bits(a, b), "`{name}` differs\n{}", print(&g));
        }
        let memory = MemoryProfile::new(&g, &Sizes::new(&g, &binding).unwrap()).unwrap();
        assert_eq!(
            done.peak_bytes,
            memory.peak_bytes,
            "measured and predicted at {:?}\n{}",
            done.peak_at,
            print(&g)
        );
        compared += 1;
    }
    assert!(
        compared > 80 && copies > 100,
        "{compared} models, {copies} copies"
    );
}

/// The sum over float outputs of output · weight, with the weights of the cotangents.
fn objective(g: &Graph, feed: &Inputs, weights: &[Option<Tensor>]) -> f64 {
    let outs = outputs(g, feed);
    outs.iter()
        .zip(weights)
        .filter_map(|((_, y), w)| Some((y * w.as_ref()?).sum(Kind::Double).double_value(&[])))
        .sum()
}

/// An input for the cotangent of each of `ys`, as the seeds of a backward.
fn seeds(g: &mut Graph, ys: &[ValueId]) -> Vec<Seed> {
    let seed = |(i, y): (usize, &ValueId)| {
        let ty = g.ty(*y).clone();
        Seed {
            value: *y,
            cotangent: Some(g.add_input(&format!("dy{i}"), Some(ty))),
        }
    };
    ys.iter().enumerate().map(seed).collect()
}

#[test]
fn gradients_agree_with_finite_differences() {
    torch::alone();
    let mut r = Random(22);
    let (mut checked, mut bodies) = (0, BTreeSet::new());
    for recipe in recipes::ALL {
        let row = recipe.row().unwrap();
        // A cast to a narrower type has no difference quotient, and what rounds pretends to have one.
        if !matches!(row.grad, Grad::Rule(_) | Grad::First(_) | Grad::Body)
            || matches!(recipe.op, "Cast" | "DequantizeFloat8" | "QuantizeFloat8" | "RoundThrough")
            // Slices of elements are taken once all is differentiated.
            || (recipe.op == "OwnSlice" && recipe.attrs.is_empty())
        {
            continue;
        }
        let model = single(recipe, DType::F64, &mut r).unwrap();
        let wanted: Vec<ValueId> = model.feeds.iter().map(|(id, ..)| *id).collect();
        let mut g = model.graph.clone();
        let mut ys = g.outputs().to_vec();
        if !matches!(row.grad, Grad::Body) {
            // The others are statistics or indices.
            ys.truncate(1);
        }
        if !ys.iter().all(|y| g.ty(*y).dtype.is_float()) || wanted.is_empty() {
            continue;
        }
        g.set_outputs(ys.clone());
        let forward = g.clone();
        let from = seeds(&mut g, &ys);
        match autodiff(&mut g, &from, &wanted) {
            Ok(notes) => bodies.extend(notes.through_bodies.into_keys()),
            Err(e) => {
                assert_eq!(e.code(), "gradient", "{e}");
                // One operand has no rule (class weights, a pair of values): the others have.
                g = forward.clone();
                let from = seeds(&mut g, &ys);
                autodiff(&mut g, &from, &wanted[..1]).unwrap_or_else(|e| panic!("{recipe:?}\n{e}"));
            }
        }
        let feed = inputs(&model, &g, DType::F64, &mut r);
        let weight = |i| Some(feed[&format!("dy{i}")].shallow_clone());
        let weights: Vec<Option<Tensor>> = (0..ys.len()).map(weight).collect();
        let plain: Inputs = feed
            .iter()
            .filter(|(k, _)| !k.starts_with("dy"))
            .map(|(k, v)| (k.clone(), v.shallow_clone()))
            .collect();
        for (name, gradient) in outputs(&g, &feed) {
            let Some(x) = name.strip_suffix(".grad") else {
                continue;
            };
            let base = plain[x].copy();
            for i in 0..base.numel() as i64 {
                let step = 1e-6;
                let at = |delta: f64| {
                    let moved = base.copy();
                    let _ = moved.view([-1]).get(i).g_add_scalar_(delta);
                    let mut feed: Inputs = plain
                        .iter()
                        .map(|(k, v)| (k.clone(), v.shallow_clone()))
                        .collect();
                    feed.insert(x.into(), moved);
                    objective(&forward, &feed, &weights)
                };
                let slope = (at(step) - at(-step)) / (2.0 * step);
                let found = gradient.contiguous().view([-1]).double_value(&[i]);
                assert!(
                    (slope - found).abs() <= 1e-6 * (1.0 + slope.abs()),
                    "{recipe:?}\nd/d{x}[{i}]: differences {slope}, rule {found}\n{}",
                    print(&g)
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 500, "only {checked} elements were checked");
    let without_rule = ckpt_passes::ops::all().filter(|op| matches!(op.grad, Grad::Body));
    assert_eq!(bodies, without_rule.map(|op| op.name).collect());
}

#[test]
fn our_ops_agree_with_their_bodies() {
    torch::alone();
    let mut r = Random(23);
    let mut compared = 0;
    for recipe in recipes::ALL {
        if !recipe
            .row()
            .is_some_and(|op| matches!(op.body, Body::Function(_)))
        {
            continue;
        }
        for dtype in [DType::F64, DType::F32] {
            let model = single(recipe, dtype, &mut r).unwrap();
            let node = model.graph.order()[0];
            let body = body_of(&model.graph, node).unwrap().unwrap();
            let feed = inputs(&model, &model.graph, dtype, &mut r);
            let fused = outputs(&model.graph, &feed);
            let operands = model.graph.node(node).ins.iter().flatten();
            let of_body: Inputs = body
                .inputs()
                .iter()
                .zip(operands)
                .map(|(id, v)| {
                    let value = model.graph.value(*v);
                    let t = match value.tensor() {
                        Some(t) => convert::tensor(&value.name, t).unwrap().copy(),
                        None => feed[&value.name].shallow_clone(),
                    };
                    (body.value(*id).name.clone(), t)
                })
                .collect();
            for ((_, a), (_, b)) in fused.iter().zip(outputs(&body, &of_body)) {
                let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
                assert_eq!(a.size(), b.size(), "{recipe:?}");
                if a.numel() == 0 {
                    continue;
                }
                // Equal infinities have no gap.
                let finite = b.abs().masked_fill(&b.isinf(), 0.0);
                let scale = 1.0 + finite.max().double_value(&[]);
                let gap = (&a - &b).abs().masked_fill(&a.eq_tensor(&b), 0.0);
                let gap = gap.max().double_value(&[]);
                let allowed = if dtype == DType::F64 { 1e-12 } else { 2e-6 } * scale;
                assert!(
                    gap <= allowed,
                    "{recipe:?} {dtype}: {gap}\n{}",
                    print(&body)
                );
            }
            compared += 1;
        }
    }
    assert!(compared > 20, "only {compared} comparisons");
}

#[test]
fn kernels_take_the_memory_their_rows_declare() {
    torch::alone();
    let mut r = Random(24);
    let mut gaps = Vec::new();
    for recipe in recipes::ALL {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let g = single(recipe, dtype, &mut r).unwrap();
            let feed = inputs(&g, &g.graph, dtype, &mut r);
            let binding = Binding::new(&g.graph, &[]).unwrap();
            let Ok(sizes) = Sizes::new(&g.graph, &binding) else {
                continue;
            };
            let memory = MemoryProfile::new(&g.graph, &sizes).unwrap();
            let done = Program::new(&g.graph).unwrap().run(&feed).unwrap();
            let (measured, predicted) = (done.peak_bytes, memory.peak_bytes);
            // A size that data decide has only an upper bound.
            let is_bound = !sizes.bounded.is_empty();
            if measured > predicted || (measured < predicted && !is_bound) {
                gaps.push(format!(
                    "{recipe:?} {dtype}: measured {measured} B, predicted {predicted} B"
                ));
            }
        }
    }
    assert!(gaps.is_empty(), "{}", gaps.join("\n"));
}
