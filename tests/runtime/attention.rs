//! Attention at sizes of several tiles against its body in float64, and the rows that see nothing or next to nothing.
use crate::support::torch;

use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_passes::ir::{Attrs, DType, Graph, Phase, Ty};
use ckpt_passes::ops::attention::{ATTENTION, ATTENTION_GRAD, AttentionPlan, DLSE};
use ckpt_passes::ops::body_of;
use ckpt_passes::ops::{Builder, EmitExt};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// Sizes of one attention: places of the leading axis, query heads, key heads, queries, keys, sizes of head and value.
#[derive(Clone, Copy, Debug)]
struct Shape {
    lead: i64,
    heads: [i64; 2],
    rows: [i64; 2],
    sizes: [i64; 2],
}

const LARGE: Shape = Shape {
    lead: 2,
    heads: [4, 2],
    rows: [90, 130],
    sizes: [8, 12],
};

impl Shape {
    fn q(self) -> [i64; 4] {
        [self.lead, self.heads[0], self.rows[0], self.sizes[0]]
    }
    fn k(self) -> [i64; 4] {
        [self.lead, self.heads[1], self.rows[1], self.sizes[0]]
    }
    fn v(self) -> [i64; 4] {
        [self.lead, self.heads[1], self.rows[1], self.sizes[1]]
    }
    fn y(self) -> [i64; 4] {
        [self.lead, self.heads[0], self.rows[0], self.sizes[1]]
    }

    /// q, k, v and dy as a projection leaves them: heads inside, seen from outside.
    fn operands(self) -> [Tensor; 4] {
        tch::manual_seed(5);
        [self.q(), self.k(), self.v(), self.y()].map(|[l, h, s, d]| {
            Tensor::randn([l, s, h, d], (Kind::Double, tch::Device::Cpu)).transpose(1, 2)
        })
    }
}

/// The results of one node on operands as they lie; through the kernel, or in float64 through the body.
fn results(backward: bool, attrs: &Attrs, ins: &[&Tensor], outs: usize, body: bool) -> Vec<Tensor> {
    let ins: Vec<Option<&Tensor>> = ins.iter().map(|x| Some(*x)).collect();
    results_of(backward, attrs, &ins, outs, body)
}

/// As [`results`], with operands left out.
fn results_of(
    backward: bool,
    attrs: &Attrs,
    ins: &[Option<&Tensor>],
    outs: usize,
    body: bool,
) -> Vec<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let mut graph = Graph::new("one");
    let mut feed = BTreeMap::new();
    let mut slots = Vec::new();
    for (i, x) in ins.iter().enumerate() {
        let Some(x) = x else {
            slots.push(None);
            continue;
        };
        let x = match (body, x.kind()) {
            (true, kind) if kind != Kind::Bool && kind != Kind::Int64 => x.to_kind(Kind::Double),
            _ => x.shallow_clone(),
        };
        let dims: Vec<ckpt_passes::ir::Dim> = x.size().into_iter().map(Into::into).collect();
        let name = format!("x{i}");
        let ty = Ty::new(convert::dtype(x.kind()).unwrap(), dims);
        slots.push(Some(graph.add_input(&name, Some(ty))));
        feed.insert(name, x);
    }
    let row = if backward {
        &ATTENTION_GRAD
    } else {
        &ATTENTION
    };
    let found = Builder::new(&mut graph)
        .emit_n(row, slots, attrs.clone(), outs)
        .unwrap_or_else(|e| panic!("{e}"));
    graph.set_outputs(found);
    graph.phase = Phase::Typed;
    if body {
        let node = graph.order()[0];
        let names: Vec<String> = graph
            .inputs()
            .iter()
            .map(|v| graph.value(*v).name.clone())
            .collect();
        let body = body_of(&graph, node)
            .unwrap()
            .unwrap_or_else(|e| panic!("{e}"));
        let inner = body.inputs().iter().map(|v| body.value(*v).name.clone());
        feed = inner
            .zip(names.iter().map(|n| feed[n].shallow_clone()))
            .collect();
        graph = body;
    }
    let program = Program::new(&graph).unwrap_or_else(|e| panic!("{e}"));
    let run = program.run(&feed).unwrap_or_else(|e| panic!("{e}"));
    run.outputs.into_iter().map(|(_, x)| x).collect()
}

/// The largest gap, as a part of the largest finite element (of `least`, where sums cancel to less). NaN and infinities have to stand in the same places.
fn gap(found: &Tensor, expected: &Tensor, least: f64) -> f64 {
    let (a, b) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    assert_eq!(a.size(), b.size());
    assert!(a.isnan().equal(&b.isnan()), "NaN in other places");
    let same = a.eq_tensor(&b).logical_or(&b.isnan());
    let finite = b.masked_fill(&b.isfinite().logical_not(), 0.0).abs().max();
    let gap = (&a - &b).abs().masked_fill(&same, 0.0).max();
    gap.double_value(&[]) / finite.double_value(&[]).max(least)
}

/// Forward (with log-sum-exp) and all gradients, without and with a cotangent of the log-sum-exp, in a type: the gaps to the
/// float64 body on the same, rounded operands.
fn gaps(shape: Shape, attrs: &Attrs, bias: Option<&Tensor>, kind: Kind) -> Vec<f64> {
    let round = |x: &Tensor| x.to_kind(kind);
    let [q, k, v, dy] = shape.operands().map(|x| round(&x));
    let dlse = Tensor::randn(&shape.y()[..3], (computed_in(kind), tch::Device::Cpu));
    let mut ins = vec![Some(&q), Some(&k), Some(&v), bias];
    let mut all = Vec::new();
    let mut compare = |backward: bool, attrs: &Attrs, ins: &[Option<&Tensor>], outs: usize| {
        let found = results_of(backward, attrs, ins, outs, false);
        let expected = results_of(backward, attrs, ins, outs, true);
        all.extend(found.iter().zip(&expected).enumerate().map(|(i, (a, b))| {
            // A bias that is the same for all keys of a query changes nothing: its gradient is only rounding.
            let cancels = backward && i == 3 && a.size().last().is_none_or(|n| *n == 1);
            gap(a, b, if cancels { 5.0 } else { 0.5 })
        }));
    };
    compare(false, attrs, &ins, 2);
    ins.insert(0, Some(&dy));
    let mut wants = vec![0, 1, 2];
    if bias.is_some_and(|b| b.kind() != Kind::Bool) {
        wants.push(3);
    }
    let outs = wants.len();
    let attrs = attrs.clone().with("wants", wants);
    compare(true, &attrs, &ins, outs);
    ins.resize(DLSE, None);
    ins.push(Some(&dlse));
    compare(true, &attrs, &ins, outs);
    all
}

/// The type that attention of a type computes in.
fn computed_in(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

fn close(what: &str, gaps: &[f64], allowed: f64) {
    assert!(
        gaps.iter().all(|g| *g <= allowed),
        "{what}: {gaps:?}, allowed {allowed}"
    );
}

/// One rounding of the result's type, and the float32 sums.
const KINDS: [(Kind, f64); 4] = [
    (Kind::Double, 1e-13),
    (Kind::Float, 3e-6),
    (Kind::Half, 1.0 / 2048.0 + 3e-6),
    (Kind::BFloat16, 1.0 / 256.0 + 3e-6),
];

/// Where a processor lacks AVX-512, libtorch adds the terms of a float32 sum one after the other. The rounding errors then grow
/// with the square root of their number.
fn rounding_of_sums(terms: i64) -> f64 {
    (terms as f64).sqrt() * 2f64.powi(-24)
}

fn plan_of(shape: Shape) -> AttentionPlan {
    use ckpt_passes::ir::op::Sized;
    let sized = |dims: [i64; 4]| Some(Sized::contiguous(DType::F32, dims.to_vec()));
    let attrs = full(Attrs::new());
    AttentionPlan::forward(
        &attrs,
        &[sized(shape.q()), sized(shape.k()), sized(shape.v())],
    )
    .unwrap()
}

/// With all defaults.
fn full(mut attrs: Attrs) -> Attrs {
    for spec in ATTENTION.attrs {
        if let (None, Some(value)) = (attrs.get(spec.name), spec.default_value()) {
            attrs.set(spec.name, value);
        }
    }
    attrs
}

#[test]
fn several_tiles_give_what_the_body_gives() {
    torch::alone();
    let plan = plan_of(LARGE);
    assert!(plan.rows_at_once < 90, "one tile only: {plan:?}");
    let scale = || Attrs::new().with("scale", 0.25f32);
    let bands = [
        scale(),
        scale().with("causal", 1),
        scale().with("causal", 1).with("window_left", 20),
        scale().with("window_left", 70).with("window_right", 3),
        scale().with("window_right", 60).with("softcap", 5.0f32),
    ];
    for attrs in bands {
        for (kind, allowed) in KINDS {
            let gaps = gaps(LARGE, &attrs, None, kind);
            close(&format!("{attrs:?} {kind:?}"), &gaps, allowed);
        }
    }
}

#[test]
fn more_queries_than_keys_and_single_ones() {
    torch::alone();
    let shapes = [
        Shape {
            rows: [90, 20],
            ..LARGE
        },
        Shape {
            rows: [1, 300],
            heads: [2, 1],
            ..LARGE
        },
        Shape {
            rows: [65, 1],
            ..LARGE
        },
        Shape {
            rows: [1, 70_000],
            heads: [1, 1],
            lead: 1,
            sizes: [4, 4],
        },
        // Two of three heads at once.
        Shape {
            rows: [70, 1750],
            heads: [3, 3],
            lead: 1,
            sizes: [4, 4],
        },
    ];
    assert!(plan_of(shapes[4]).heads_at_once == 2);
    for shape in shapes {
        for attrs in [
            Attrs::new().with("causal", 1),
            Attrs::new().with("window_left", 9),
        ] {
            for (kind, mut allowed) in KINDS {
                if kind == Kind::Float {
                    allowed = allowed.max(rounding_of_sums(shape.rows[1]));
                }
                let gaps = gaps(shape, &attrs, None, kind);
                close(&format!("{shape:?} {attrs:?} {kind:?}"), &gaps, allowed);
            }
        }
    }
}

#[test]
fn biases_of_every_broadcast_shape_and_type() {
    torch::alone();
    tch::manual_seed(8);
    let dims: [&[i64]; 7] = [
        &[2, 4, 90, 130],
        &[4, 1, 130],
        &[2, 1, 1, 130],
        &[90, 130],
        &[1, 4, 90, 1],
        &[2, 1, 1, 1],
        &[],
    ];
    let attrs = Attrs::new()
        .with("scale", 0.25f32)
        .with("causal", 1)
        .with("softcap", 3.0f32);
    for dims in dims {
        let bias = Tensor::randn(dims, (Kind::Float, tch::Device::Cpu));
        for (kind, allowed) in [KINDS[1], KINDS[3]] {
            for bias_kind in [Kind::Float, Kind::BFloat16] {
                let gaps = gaps(LARGE, &attrs, Some(&bias.to_kind(bias_kind)), kind);
                let allowed = if bias_kind == Kind::BFloat16 {
                    KINDS[3].1
                } else {
                    allowed
                };
                close(&format!("{dims:?} {bias_kind:?} {kind:?}"), &gaps, allowed);
            }
        }
        let seen = bias.gt(-1.0);
        let gaps = gaps(LARGE, &attrs, Some(&seen), Kind::Float);
        close(&format!("{dims:?} bool"), &gaps, KINDS[1].1);
    }
}

/// Documents of several lengths, one of which comes back, as the runtime gets them from a packed sequence; against a boolean
/// bias that says the same, and against the body.
#[test]
fn segments_are_a_mask_that_is_not_there() {
    torch::alone();
    let numbers = |lengths: &[(i64, i64)]| -> Vec<i64> {
        let repeated = |(segment, count): &(i64, i64)| vec![*segment; *count as usize];
        lengths.iter().flat_map(repeated).collect()
    };
    // One document of several tiles, and short ones; then one that goes on behind another.
    let rows = [
        numbers(&[(4, 100), (-7, 11), (9, 19)]),
        numbers(&[(0, 60), (1, 40), (0, 30)]),
    ];
    let segments = Tensor::from_slice(&rows.concat()).view([2, 130]);
    let own = segments.narrow(1, 40, 90).unsqueeze(-1);
    let seen = own.eq_tensor(&segments.unsqueeze(1)).unsqueeze(1);
    tch::manual_seed(8);
    let bias = Tensor::randn([2, 4, 90, 130], (Kind::Float, tch::Device::Cpu));
    for attrs in [
        Attrs::new().with("scale", 0.25f32),
        Attrs::new().with("causal", 1).with("empty_rows", "nan"),
        Attrs::new().with("causal", 1).with("window_left", 20),
        Attrs::new().with("softcap", 5.0f32),
    ] {
        for (kind, allowed) in KINDS {
            let [q, k, v, dy] = LARGE.operands().map(|x| x.to_kind(kind));
            let back = attrs.clone().with("wants", vec![0, 1, 2]);
            for bias in [None, Some(&bias)] {
                let mut masked = seen.shallow_clone();
                if let Some(bias) = bias {
                    let hidden = bias
                        .zeros_like()
                        .masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
                    masked = bias + hidden;
                }
                let expected = results(false, &attrs, &[&q, &k, &v, &masked], 2, false);
                let expected_back = results(true, &back, &[&dy, &q, &k, &v, &masked], 3, false);
                let given = [Some(&q), Some(&k), Some(&v), bias, Some(&segments)];
                let found = results_of(false, &attrs, &given, 2, false);
                let given = [
                    Some(&dy),
                    Some(&q),
                    Some(&k),
                    Some(&v),
                    bias,
                    None,
                    None,
                    Some(&segments),
                ];
                let found_back = results_of(true, &back, &given, 3, false);
                let body = results_of(true, &back, &given, 3, true);
                let all = found
                    .iter()
                    .chain(&found_back)
                    .zip(expected.iter().chain(&expected_back));
                let gaps: Vec<f64> = all.map(|(a, b)| gap(a, b, 0.5)).collect();
                close(&format!("{attrs:?} {kind:?}"), &gaps, allowed);
                let to_body = found_back.iter().zip(&body).map(|(a, b)| gap(a, b, 0.5));
                close(
                    &format!("{attrs:?} {kind:?} body"),
                    &to_body.collect::<Vec<_>>(),
                    allowed,
                );
            }
        }
    }
}

/// Row 3 of the first place sees nothing, by a boolean or a bias of −∞: zeros and no gradient, or NaN.
#[test]
fn queries_that_see_nothing_give_zeros_or_nan() {
    torch::alone();
    let seen = Tensor::ones([2, 1, 90, 130], (Kind::Bool, tch::Device::Cpu));
    let _ = seen.get(0).select(1, 3).fill_(0);
    let bias = Tensor::zeros([2, 1, 90, 130], (Kind::Float, tch::Device::Cpu));
    let bias = bias.masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
    for mask in [&seen, &bias] {
        for empty in ["zeros", "nan"] {
            for causal in [0, 1] {
                let attrs = Attrs::new()
                    .with("empty_rows", empty)
                    .with("causal", causal);
                let gaps = gaps(LARGE, &attrs, Some(mask), Kind::Float);
                close(&format!("{empty} {causal}"), &gaps, KINDS[1].1);
                let [q, k, v, _] = LARGE.operands().map(|x| x.to_kind(Kind::Float));
                let y = &results(false, &attrs, &[&q, &k, &v, mask], 2, false);
                let row = y[0].get(0).select(1, 3);
                let expected = if empty == "nan" {
                    row.isnan()
                } else {
                    row.eq(0.0)
                };
                assert!(bool::try_from(expected.all()).unwrap(), "{empty} {causal}");
                let lse = y[1].get(0).select(1, 3).eq(f64::NEG_INFINITY);
                assert!(bool::try_from(lse.all()).unwrap());
            }
        }
    }
    // Queries before the first key, in tiles of their own and in one with others.
    let shape = Shape {
        rows: [90, 20],
        ..LARGE
    };
    for empty in ["zeros", "nan"] {
        let attrs = Attrs::new().with("empty_rows", empty).with("causal", 1);
        close(empty, &gaps(shape, &attrs, None, Kind::Float), KINDS[1].1);
    }
}

/// A query all of whose keys have the same low bias is a softmax like any other, and its gradient is as exact: no digit
/// is lost in a log-sum-exp of −10000.
#[test]
fn low_finite_biases_hide_nothing() {
    torch::alone();
    let bias = Tensor::zeros([1, 1, 90, 130], (Kind::Float, tch::Device::Cpu));
    let _ = bias.select(2, 3).fill_(-1e4);
    let _ = bias.select(2, 7).narrow(2, 0, 60).fill_(-1e4);
    // Whole numbers: float32 loses digits of a score beside 10⁴, and the body in float64 would not.
    let [q, k, v, dy] = LARGE.operands().map(|x| x.round().to_kind(Kind::Float));
    let attrs = Attrs::new().with("wants", vec![0, 1, 2]);
    let ins = [&dy, &q, &k, &v, &bias];
    let found = results(true, &attrs, &ins, 3, false);
    let expected = results(true, &attrs, &ins, 3, true);
    for (a, b) in found.iter().zip(&expected) {
        close("-1e4", &[gap(a, b, 0.5)], KINDS[1].1);
    }
    // The lowest number swallows every score: all weights are equal.
    let single = Shape {
        rows: [1, 130],
        ..LARGE
    };
    let [q, k, v, dy] = single.operands().map(|x| x.to_kind(Kind::Float));
    let lowest = Tensor::full([1], f64::from(f32::MIN), (Kind::Float, tch::Device::Cpu));
    let y = results(false, &Attrs::new(), &[&q, &k, &v, &lowest], 1, false);
    let mean = v.mean_dim([2i64].as_slice(), true, Kind::Float);
    let mean = mean.repeat_interleave_self_int(2, 1, None);
    close("mean", &[gap(&y[0], &mean, 0.5)], KINDS[1].1);
    let found = results(true, &attrs, &[&dy, &q, &k, &v, &lowest], 3, false);
    let both = dy.reshape([2, 2, 2, 1, 12]);
    let both = both.sum_dim_intlist([2i64].as_slice(), false, Kind::Float) / 130.0;
    close(
        "dv",
        &[gap(&found[2], &both.expand_as(&found[2]), 0.01)],
        KINDS[1].1,
    );
}

/// The order of sums never changes: heads shared out whole, and each cut among several. Where products are ours, no number
/// of threads changes it either; MKL's float32 products on Intel's processors depend on it.
#[test]
fn runs_repeat_bit_for_bit() {
    torch::alone();
    let before = tch::get_num_threads();
    let single = Shape {
        lead: 1,
        heads: [2, 1],
        rows: [150, 190],
        sizes: [40, 36],
    };
    for (shape, kind) in [
        (LARGE, Kind::BFloat16),
        (LARGE, Kind::Float),
        (single, Kind::BFloat16),
        (single, Kind::Float),
    ] {
        let attrs = Attrs::new().with("causal", 1).with("softcap", 9.0f32);
        let back = attrs.clone().with("wants", vec![0, 1, 2]);
        let [q, k, v, dy] = shape.operands().map(|x| x.to_kind(kind));
        let run = || {
            let mut found = results(false, &attrs, &[&q, &k, &v], 2, false);
            found.extend(results(true, &back, &[&dy, &q, &k, &v], 3, false));
            found.iter().map(Tensor::copy).collect::<Vec<_>>()
        };
        let mut first: Option<Vec<Tensor>> = None;
        for threads in [1, 2, 3] {
            tch::set_num_threads(threads);
            let found = run();
            if !ckpt_torch::product::is_ours() {
                first = None;
            }
            let first = first.get_or_insert(found);
            let mut pairs = first.iter().zip(run());
            assert!(
                pairs.all(|(a, b)| torch::same_bits(a, &b)),
                "{shape:?} {kind:?}, {threads} threads"
            );
        }
    }
    tch::set_num_threads(before);
}
