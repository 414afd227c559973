//! Triangular systems beside libtorch's own, with its autograd.

use crate::support::torch;

use ckpt_opt::runtime::executor::Program;
use ckpt_passes::ir::{Attrs, DType, Dim, Graph, Ty};
use ckpt_passes::ops::{Builder, EmitExt, linalg};
use ckpt_passes::testing::Random;
use ckpt_passes::transform::autodiff::autodiff;
use ckpt_passes::transform::loss::Seed;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// What lies in the triangle that is not read, and on a diagonal that is not read, changes nothing.
#[test]
fn triangular_systems_and_their_gradients_are_those_of_libtorch() {
    torch::alone();
    let mut r = Random(5);
    for case in 0..160 {
        let (upper, left, unit) = (case % 2 == 0, case / 2 % 2 == 0, case / 4 % 2 == 0);
        let (n, m) = (1 + r.below(9) as i64, 1 + r.below(4) as i64);
        let mut dims = |matrix: [i64; 2]| {
            let batch: [&[i64]; 5] = [&[], &[3], &[1], &[2, 1], &[2, 3]];
            [batch[r.below(5)], &matrix].concat()
        };
        let (size_a, size_b) = (dims([n, n]), dims(if left { [n, m] } else { [m, n] }));
        let mut graph = Graph::new("solve");
        let mut input = |name: &str, dims: &[i64]| {
            let dims: Vec<Dim> = dims.iter().map(|d| Dim::from(*d)).collect();
            graph.add_input(name, Some(Ty::new(DType::F64, dims)))
        };
        let (a, b) = (input("a", &size_a), input("b", &size_b));
        let attrs = Attrs::new()
            .with("upper", i64::from(upper))
            .with("left", i64::from(left))
            .with("unitriangular", i64::from(unit));
        let mut builder = Builder::new(&mut graph);
        let x = (builder.emit(&linalg::SOLVE_TRIANGULAR, &[a, b], attrs)).unwrap();
        graph.set_outputs(vec![x]);
        let ty = graph.ty(x).clone();
        let cotangent = Some(graph.add_input("dx", Some(ty)));
        autodiff(
            &mut graph,
            &[Seed {
                value: x,
                cotangent,
            }],
            &[a, b],
        )
        .unwrap();

        let eye = Tensor::eye(n, (Kind::Double, tch::Device::Cpu));
        let mut feed = BTreeMap::new();
        feed.insert("a".to_string(), &random(&mut r, &size_a) + eye * 2.0);
        feed.insert("b".to_string(), random(&mut r, &size_b));
        let leaf = |name: &str| feed[name].copy().set_requires_grad(true);
        let (a, b) = (leaf("a"), leaf("b"));
        let x = a.linalg_solve_triangular(&b, upper, left, unit);
        feed.insert("dx".to_string(), random(&mut r, &x.size()));
        let loss = (&x * &feed["dx"]).sum(Kind::Double);
        let mut expected = vec![x];
        expected.extend(Tensor::run_backward(&[loss], &[&a, &b], false, false));

        let done = Program::new(&graph).unwrap().run(&feed).unwrap();
        assert_eq!(done.outputs.len(), expected.len());
        for ((name, found), expected) in done.outputs.iter().zip(&expected) {
            assert_eq!(found.size(), expected.size(), "{name}");
            let scale = expected.abs().max().double_value(&[]);
            let gap = (found - expected).abs().max().double_value(&[]);
            assert!(
                gap <= 1e-12 * (1.0 + scale),
                "case {case}, {name}: {gap} of {scale}"
            );
        }
    }
}

fn random(r: &mut Random, dims: &[i64]) -> Tensor {
    let count: i64 = dims.iter().product();
    let numbers: Vec<f64> = (0..count)
        .map(|_| r.below(2000) as f64 / 1000.0 - 1.0)
        .collect();
    torch::tensor(DType::F64, dims, &numbers)
}
