//! Grouped products: rows in any order, and groups with more rows than the kernel copies at a time.

use crate::support::torch;

use ckpt_opt::runtime::executor::Program;
use ckpt_passes::text;
use ckpt_passes::transform::infer::infer;
use tch::{Kind, Tensor};

const ROWS: i64 = 5000;
const WIDTH: i64 = 512;

/// Returns the largest error of `found` beyond one rounding to its type, as a share of the largest element.
fn excess(found: &Tensor, exact: &Tensor) -> f64 {
    let rounding = if found.kind() == Kind::BFloat16 {
        0.5f64.powi(8)
    } else {
        0.0
    };
    let gap = (found.to_kind(Kind::Double) - exact).abs() - exact.abs() * rounding;
    gap.max().double_value(&[]) / exact.abs().max().double_value(&[])
}

#[test]
fn rows_in_any_order_are_multiplied_by_their_matrix() {
    torch::alone();
    for (name, kind) in [("f32", Kind::Float), ("bf16", Kind::BFloat16)] {
        let source = format!(
            "graph @g imported (%x: {name}[{ROWS}, {WIDTH}], %dy: {name}[{ROWS}, {WIDTH}], %group: i64[{ROWS}],
    %b: {name}[2, {WIDTH}, {WIDTH}]) -> (%y, %dx, %db) {{
  %y = GroupedMatMul %x, %b, %group
  %dx = GroupedMatMul %dy, %b, %group {{transB=1}}
  %db = GroupedWeightGrad %x, %dy, %group {{groups=2}}
}}
"
        );
        let mut graph = text::parse(&source).unwrap_or_else(|e| panic!("{e}"));
        infer(&mut graph).unwrap();
        tch::manual_seed(3);
        let random =
            |dims: &[i64]| Tensor::randn(dims, (Kind::Float, tch::Device::Cpu)).to_kind(kind);
        let (x, dy) = (random(&[ROWS, WIDTH]), random(&[ROWS, WIDTH]));
        let b = random(&[2, WIDTH, WIDTH]);
        // Groups 0, 1 and one that does not exist.
        let numbers: Vec<i64> = (0..ROWS).map(|row| row * 7 % 5 % 3).collect();
        let group = Tensor::from_slice(&numbers);
        let given = [("x", &x), ("dy", &dy), ("b", &b), ("group", &group)];
        let given = given.map(|(name, tensor)| (name.to_string(), tensor.shallow_clone()));
        let run = Program::new(&graph).unwrap().run(&given.into()).unwrap();
        let found = |at: usize| &run.outputs[at].1;
        let [x, dy, b] = [&x, &dy, &b].map(|t| t.to_kind(Kind::Double));
        let (mut y, mut dx, db) = (x.zeros_like(), x.zeros_like(), b.zeros_like());
        for at in 0..2 {
            let own = group.eq(at).to_kind(Kind::Double).unsqueeze(1);
            let matrix = b.select(0, at);
            y += &own * x.matmul(&matrix);
            dx += &own * dy.matmul(&matrix.transpose(0, 1));
            db.select(0, at)
                .copy_(&(&own * &x).transpose(0, 1).matmul(&dy));
        }
        for (at, exact) in [(0, &y), (1, &dx), (2, &db)] {
            let excess = excess(found(at), exact);
            assert!(excess < 1e-5, "{name}, output {at}: {excess}");
        }
        let without = group.ge(2).unsqueeze(1);
        let rest = found(0).to_kind(Kind::Double).masked_select(&without);
        assert!(rest.numel() > 0 && rest.abs().max().double_value(&[]) == 0.0);
    }
}
