//! Products of ours against float64, over sizes, layouts and summands; skipped by name where the processor has none.

use crate::support::torch::alone;
use ckpt_torch::{product, tch};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A matrix: row-major, transposed, or with gaps in both directions.
fn matrix(rows: i64, columns: i64, layout: i64) -> Tensor {
    match layout % 3 {
        0 => Tensor::randn([rows, columns], CPU),
        1 => Tensor::randn([columns, rows], CPU).tr(),
        _ => Tensor::randn([2 * rows, 3 * columns], CPU)
            .slice(0, 0, 2 * rows, 2)
            .slice(1, 0, 3 * columns, 3),
    }
}

/// Sizes around panels and blocks, and the smallest.
const SIZES: [(i64, i64, i64); 10] = [
    (1, 1, 1),
    (1, 33, 7),
    (12, 32, 384),
    (13, 31, 385),
    (47, 64, 16),
    (50, 65, 33),
    (7, 400, 90),
    (200, 5, 800),
    (1600, 40, 17),
    (130, 450, 400),
];

#[test]
fn products_are_right_in_every_layout_and_with_any_threads() {
    alone();
    if !product::is_ours() {
        eprintln!("skipped: this processor has no products of ours");
        return;
    }
    let before = tch::get_num_threads();
    for (at, (m, n, k)) in SIZES.into_iter().enumerate() {
        for layout in 0..9 {
            let (a, b) = (matrix(m, k, layout), matrix(k, n, layout / 3));
            let c = match (at as i64 + layout) % 5 {
                0 => None,
                1 => Some(Tensor::randn([n], CPU).expand([m, n], false)),
                2 => Some(Tensor::randn([m, 1], CPU).expand([m, n], false)),
                other => Some(matrix(m, n, other)),
            };
            let (alpha, beta) = if layout % 2 == 0 {
                (1.0, 1.0)
            } else {
                (0.5, -0.25)
            };
            let mut right = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double)) * alpha;
            if let Some(c) = &c {
                right += c.to_kind(Kind::Double) * beta;
            }
            let mut bits: Option<Tensor> = None;
            for threads in [1, 2, 3] {
                tch::set_num_threads(threads);
                // A result within a wider one, whose other columns stay.
                let wide = Tensor::full([m, n + 5], 7.0, CPU);
                let out = wide.slice(1, 0, n, 1);
                product::write(&a, &b, c.as_ref(), alpha, beta, &out).unwrap();
                let what = format!("{m} x {n} over {k}, layout {layout}, {threads} threads");
                let error =
                    f64::try_from((out.to_kind(Kind::Double) - &right).abs().max()).unwrap();
                let allowed = 1e-5 * (1.0 + f64::try_from(right.abs().max()).unwrap());
                assert!(error < allowed, "{what}: {error:e}, allowed {allowed:e}");
                let rest = wide.slice(1, n, n + 5, 1);
                assert!(rest.equal(&Tensor::full([m, 5], 7.0, CPU)), "{what}");
                let found = out.contiguous();
                assert!(
                    found.equal(bits.get_or_insert_with(|| found.copy())),
                    "{what}"
                );
            }
            // Added to what is there.
            let sum = c
                .as_ref()
                .map_or_else(|| matrix(m, n, 0), Tensor::contiguous)
                .copy();
            let right = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double))
                + sum.to_kind(Kind::Double);
            product::write(&a, &b, Some(&sum), 1.0, 1.0, &sum).unwrap();
            let error = f64::try_from((sum.to_kind(Kind::Double) - &right).abs().max()).unwrap();
            assert!(error < 1e-5 * (1.0 + f64::try_from(right.abs().max()).unwrap()));
        }
    }
    tch::set_num_threads(before);
}

#[test]
fn each_product_of_a_batch_is_that_product_alone() {
    alone();
    if !product::is_ours() {
        eprintln!("skipped: this processor has no products of ours");
        return;
    }
    let before = tch::get_num_threads();
    for (m, n, k) in SIZES {
        for (count, layout) in [(1, 0), (2, 1), (5, 2), (4, 3), (0, 0)] {
            // Matrices one after the other, with the batch axis between theirs, or one for all.
            let batch = |rows: i64, columns: i64, layout: i64| match layout {
                0 => Tensor::randn([count, rows, columns], CPU),
                1 => Tensor::randn([rows, count, columns], CPU).transpose(0, 1),
                2 => Tensor::randn([count, columns, rows], CPU).transpose(1, 2),
                _ => matrix(rows, columns, 0).expand([count, rows, columns], false),
            };
            let (a, b) = (batch(m, k, layout), batch(k, n, (layout + 1) % 4));
            let c = batch(m, n, layout);
            let alone: Vec<Tensor> = (0..count)
                .map(|i| {
                    let out = Tensor::zeros([m, n], CPU);
                    let (a, b, c) = (a.get(i), b.get(i), c.get(i));
                    product::write(&a, &b, Some(&c), 0.5, 2.0, &out).unwrap();
                    out
                })
                .collect();
            for threads in [1, 2, 3] {
                tch::set_num_threads(threads);
                let out = Tensor::zeros([m, count, n], CPU).transpose(0, 1);
                product::write(&a, &b, Some(&c), 0.5, 2.0, &out).unwrap();
                for (i, alone) in alone.iter().enumerate() {
                    let what = format!("{count} of {m} x {n} over {k}, {threads} threads");
                    assert!(out.get(i as i64).equal(alone), "{what}");
                }
            }
        }
    }
    tch::set_num_threads(before);
}

#[test]
fn what_is_no_product_is_refused() {
    alone();
    if !product::is_ours() {
        eprintln!("skipped: this processor has no products of ours");
        return;
    }
    let x = |dims: &[i64]| Tensor::zeros(dims, CPU);
    let refused =
        |a: &Tensor, b: &Tensor, out: &Tensor| product::write(a, b, None, 1.0, 0.0, out).is_err();
    assert!(!refused(&x(&[2, 3]), &x(&[3, 4]), &x(&[2, 4])));
    assert!(refused(&x(&[2, 3]), &x(&[2, 4]), &x(&[2, 4])));
    assert!(refused(&x(&[2, 3]), &x(&[3, 4]), &x(&[4, 2])));
    assert!(refused(&x(&[2, 3]), &x(&[3, 4]), &x(&[4, 2]).tr()));
    assert!(refused(&x(&[2, 0]), &x(&[0, 4]), &x(&[2, 4])));
    assert!(refused(&x(&[2, 3, 1]), &x(&[3, 4]), &x(&[2, 4])));
    assert!(!refused(&x(&[5, 2, 3]), &x(&[5, 3, 4]), &x(&[5, 2, 4])));
    assert!(refused(&x(&[1, 2, 3]), &x(&[5, 3, 4]), &x(&[5, 2, 4])));
    assert!(refused(&x(&[2, 3]), &x(&[3, 4]), &x(&[1, 2, 4])));
    assert!(refused(
        &x(&[2, 3]).to_kind(Kind::Double),
        &x(&[3, 4]),
        &x(&[2, 4])
    ));
    assert!(!refused(&x(&[0, 3]), &x(&[3, 4]), &x(&[0, 4])));
}
