//! Properties of the compiler on random models over all op rows. Nothing is run here: the numeric properties are with
//! the runtime.

use ckpt_passes::driver::{ALL, Cx, Pipeline, Watch, run};
use ckpt_passes::ir::verify::verify;
use ckpt_passes::ir::{DType, Graph};
use ckpt_passes::ops;
use ckpt_passes::testing::models::{random, single};
use ckpt_passes::testing::{Random, recipes};
use ckpt_passes::text::{parse, print, print_full};

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
        assert_eq!(of(a, m.again), of(b, n.again));
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

/// Runs a pipeline, checks the result after every pass, and that it reads back.
fn holds(names: &str, g: &mut Graph) {
    let mut texts = Vec::new();
    let mut dump = |_: &str, text: &str| texts.push(text.to_string());
    let mut watch = Watch {
        dump: Some(&mut dump),
        stop_after: None,
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
