//! Properties of the compiler on random models over all op rows. Nothing is run here: the numeric properties are with
//! the runtime.

use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::analysis::{Binding, MemoryProfile, Sizes};
use ckpt_passes::driver::{ALL, Cx, Pipeline, Watch, run};
use ckpt_passes::ir::verify::verify;
use ckpt_passes::ir::{DType, Graph};
use ckpt_passes::ops;
use ckpt_passes::plan::{Plan, saved_set};
use ckpt_passes::planning::BoundGraph;
use ckpt_passes::testing::models::{SIZES, random, single};
use ckpt_passes::testing::recipes::Recipe;
use ckpt_passes::testing::{Random, recipes};
use ckpt_passes::text::{parse, print, print_full};
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::remat::remat;

/// Printing and reading gives the same text and the same graph.
fn reads_back(g: &Graph) {
    let full = print_full(g);
    let again = parse(&full).unwrap_or_else(|e| panic!("{e}\n{full}"));
    assert_eq!(print_full(&again), full);
    let short = print(g);
    assert_eq!(print(&parse(&short).unwrap()), short);
    assert_eq!(print(&again), short);
    same(g, &again);
}

/// Equal node by node, up to ids.
fn same(a: &Graph, b: &Graph) {
    assert_eq!((&a.name, a.phase, &a.meta), (&b.name, b.phase, &b.meta));
    let names = |g: &Graph, ids: &[ckpt_passes::ir::ValueId]| -> Vec<String> {
        ids.iter().map(|v| g.value(*v).name.clone()).collect()
    };
    assert_eq!(names(a, a.inputs()), names(b, b.inputs()));
    assert_eq!(names(a, a.outputs()), names(b, b.outputs()));
    let consts = |g: &Graph| -> Vec<_> {
        g.inits()
            .map(|(_, v)| (v.name.clone(), v.tensor().cloned()))
            .collect()
    };
    assert_eq!(consts(a), consts(b));
    assert_eq!(a.order().len(), b.order().len());
    for (x, y) in a.order().iter().zip(b.order()) {
        let (m, n) = (a.node(*x), b.node(*y));
        assert_eq!(
            (m.op, &m.name, &m.attrs, &m.loc, m.role, m.segment, &m.meta),
            (n.op, &n.name, &n.attrs, &n.loc, n.role, n.segment, &n.meta)
        );
        let operands =
            |g: &Graph, ins: &[Option<ckpt_passes::ir::ValueId>]| -> Vec<Option<String>> {
                ins.iter()
                    .map(|v| v.map(|v| g.value(v).name.clone()))
                    .collect()
            };
        assert_eq!(operands(a, &m.ins), operands(b, &n.ins));
        assert_eq!(names(a, &m.outs), names(b, &n.outs));
        for (v, w) in m.outs.iter().zip(&n.outs) {
            assert_eq!(a.value(*v).ty, b.value(*w).ty);
        }
        let of = |g: &Graph, again: Option<ckpt_passes::ir::NodeId>| {
            again.map(|o| g.node(o).name.clone())
        };
        assert_eq!(of(a, m.recompute_of), of(b, n.recompute_of));
    }
}

#[test]
fn every_row_has_a_recipe_and_takes_it() {
    let mut r = Random(11);
    for recipe in recipes::ALL {
        assert!(recipe.row().is_some(), "no row is called `{}`", recipe.op);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let model = single(recipe, dtype, &mut r).unwrap_or_else(|e| panic!("{recipe:?}\n{e}"));
            verify(&model.graph).unwrap();
            reads_back(&model.graph);
        }
    }
    let bare: Vec<&str> = ops::all()
        .map(|op| op.name)
        .filter(|name| {
            *name != ops::opaque::OPAQUE.name && recipes::ALL.iter().all(|x| x.op != *name)
        })
        .collect();
    assert!(
        bare.is_empty(),
        "passes/testing/recipes.rs calls none of {bare:?}"
    );
}

#[test]
fn random_models_verify_and_read_back() {
    let mut r = Random(12);
    for n in 0..300 {
        let dtype = [DType::F32, DType::F64, DType::BF16][n % 3];
        let model = random(&mut r, 2 + n % 30, dtype, n % 2 == 0, &|_| true);
        verify(&model.graph).unwrap();
        reads_back(&model.graph);
    }
}

#[test]
fn random_models_become_training_graphs_and_plans_are_taken_back() {
    let mut r = Random(14);
    let (mut trained, mut copies) = (0, 0);
    for n in 0..200 {
        let model = random(
            &mut r,
            4 + n % 25,
            DType::F32,
            n % 2 == 0,
            &Recipe::is_trainable,
        );
        let mut g = model.graph;
        if !g.outputs().iter().any(|v| g.ty(*v).dtype.is_float()) {
            continue;
        }
        let mut cx = Cx::default();
        cx.request.loss = Loss::Vjp;
        let named = dim_kinds(&g);
        let sizes = SIZES.iter().filter(|(name, _)| named.contains_key(*name));
        cx.request.dims = sizes.map(|(name, n)| (name.to_string(), *n)).collect();
        let before = print(&g);
        let start = |g: &mut Graph, cx: &mut Cx| {
            let pipeline = Pipeline::parse("infer,simplify,loss,autodiff,simplify").unwrap();
            run(&pipeline, g, cx, &mut Watch::default())
        };
        if let Err(e) = start(&mut g, &mut cx) {
            // Nothing to train, or a gradient that has no rule: said, not guessed.
            assert!(
                matches!(e.code(), "parameters" | "gradient"),
                "{e}\n{before}"
            );
            continue;
        }
        reads_back(&g);
        let joint = print(&g);
        copies += rewrite(&mut g, &cx, &mut r);
        verify(&g).unwrap();
        reads_back(&g);
        trained += 1;
        let strip = Pipeline::parse("strip").unwrap();
        run(&strip, &mut g, &mut cx, &mut Watch::default()).unwrap();
        assert_eq!(print(&g), joint);
    }
    assert!(
        trained > 100,
        "only {trained} models had something to train"
    );
    assert!(copies > 100, "only {copies} copies");
}

/// Keeps a random fifth of what could be recomputed; returns the number of copies.
fn rewrite(g: &mut Graph, cx: &Cx, r: &mut Random) -> usize {
    let binding = Binding::new(g, &cx.request.dims).unwrap();
    let bound = BoundGraph::new(g, &binding, cx.request.planning_options(None)).unwrap();
    let p = &bound.input.problem;
    let kept = p.values.iter().map(|_| r.below(5) == 0).collect();
    let none = p.by_op(None);
    let plan = Plan::new(
        "random",
        p,
        &saved_set::schedule(p, &kept),
        &none,
        &Default::default(),
    )
    .unwrap();
    let copies = remat(g, &bound.input, &bound.nodes, &plan).unwrap();
    let memory = MemoryProfile::new(g, &Sizes::new(g, &binding).unwrap()).unwrap();
    assert_eq!(memory.peak_bytes, plan.after.peak_bytes);
    copies
}

/// Runs a pipeline, checks the result after every pass, and that it reads back.
fn holds(names: &str, g: &mut Graph) {
    let mut texts = Vec::new();
    let mut dump = |_: &str, text: &str| texts.push(text.to_string());
    let mut watch = Watch {
        dump: Some(&mut dump),
        ..Watch::default()
    };
    run(
        &Pipeline::parse(names).unwrap(),
        g,
        &mut Cx::default(),
        &mut watch,
    )
    .unwrap_or_else(|e| panic!("{e}\n{}", print(g)));
    for text in texts {
        assert_eq!(
            print(&parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))),
            text
        );
    }
    reads_back(g);
}

#[test]
fn passes_keep_the_invariants_and_settle() {
    let mut r = Random(13);
    for n in 0..120 {
        let mut g = random(&mut r, 2 + n % 25, DType::F32, n % 2 == 0, &|_| true).graph;
        holds("infer,dce", &mut g);
        let once = print(&g);
        for pass in ALL.iter().filter(|p| p.idempotent) {
            if !pass.from.contains(&g.phase) {
                continue;
            }
            holds(pass.name, &mut g);
            let settled = print(&g);
            holds(pass.name, &mut g);
            assert_eq!(
                print(&g),
                settled,
                "a second `{}` changed something after\n{once}",
                pass.name
            );
        }
    }
}
