//! Small uses of the ops that move, select, index and multiply.

use super::cases::Operand::{In, Int, Ints};
use super::cases::{Case, Operand, case};
use ckpt_passes::ir::Attrs;

fn with(name: &str, value: i64) -> Attrs {
    Attrs::new().with(name, value)
}

pub fn cases() -> Vec<Case> {
    let mut all = shapes();
    all.extend(slices());
    all.extend(joins());
    all.extend(products());
    all.extend(indices());
    all
}

fn shapes() -> Vec<Case> {
    let mut all = Vec::new();
    for target in [vec![0, -1], vec![-1], vec![-1, 2, 2], vec![0, 0, 2, 2]] {
        all.push(case("Reshape", vec![In("f32[b, s, 4]"), Ints(target)]));
    }
    all.push(case("Reshape", vec![In("f32[b, s, 4]"), In("i64[2]")]));
    all.push(case("Reshape", vec![In("f32[b, s, 4]"), In("i64[1]")]));
    all.push(case("Reshape", vec![In("f32[0, 3]"), Ints(vec![3, 0])]).attrs(with("allowzero", 1)));
    all.push(case("Reshape", vec![In("f32[0, 3]"), Ints(vec![0, 1, 3])]));
    all.push(case("Reshape", vec![In("f32[]"), Ints(vec![1, 1])]));
    all.push(case("Reshape", vec![In("f32[1, 1]"), Ints(vec![])]));
    for axis in [0, 1, 3, -1] {
        all.push(case("Flatten", vec![In("f32[b, s, 4]")]).attrs(with("axis", axis)));
    }
    let perm = |p: &[i64]| Attrs::new().with("perm", p.to_vec());
    all.push(case("Transpose", vec![In("f32[b, s, 4]")]).attrs(perm(&[2, 0, 1])));
    all.push(case("Transpose", vec![In("f32[b, s, 4]")]).attrs(perm(&[0, 1, 2])));
    all.push(case("Transpose", vec![In("f32[b, s, 4]")]));
    all.push(case("Transpose", vec![In("f32[]")]));
    all.push(case(
        "Squeeze",
        vec![In("f32[b, 1, s, one]"), Ints(vec![1, -1])],
    ));
    all.push(case("Squeeze", vec![In("f32[1, 3, 1]")]));
    all.push(case("Unsqueeze", vec![In("f32[b, s]"), Ints(vec![-1, 0])]));
    all.push(case("Unsqueeze", vec![In("f32[]"), Ints(vec![0])]));
    all.push(case("Identity", vec![In("f32[b, s]")]));
    all.push(case("StopGradient", vec![In("f32[b, s]")]));
    all.push(case("Expand", vec![In("f32[s, 1]"), Ints(vec![2, 1, 5])]));
    all.push(case("Expand", vec![In("f32[b, 1, 4]"), In("i64[3]")]));
    all.push(case("Expand", vec![In("f32[]"), Ints(vec![0])]));
    for op in ["Shape", "Size"] {
        all.push(case(op, vec![In("f32[b, s, 4]")]));
    }
    all.push(case("Shape", vec![In("f32[b, s, 4]")]).attrs(with("start", -2).with("end", 7)));
    all.push(case("ConstantOfShape", vec![In("i64[2]")]));
    all.push(case("ConstantOfShape", vec![Ints(vec![3, 0])]));
    all.push(case("Range", vec![Int(0), In("i64[]"), Int(1)]));
    all.push(case("Range", vec![Int(7), Int(-2), Int(-2)]));
    for upper in [0, 1] {
        let upper = || with("upper", upper);
        all.push(case("Trilu", vec![In("f32[b, s, 4]")]).attrs(upper()));
        all.push(case("Trilu", vec![In("f32[4, s]"), Int(-1)]).attrs(upper()));
        all.push(case("Trilu", vec![In("f32[0, 3]"), Int(1)]).attrs(upper()));
    }
    all
}

fn slices() -> Vec<Case> {
    let mut all = Vec::new();
    let x = || In("f32[b, s, 7]");
    let max = i64::MAX;
    for (starts, ends, axes, steps) in [
        (vec![1], vec![max], vec![2], vec![1]),
        (vec![-5], vec![-1], vec![-1], vec![2]),
        (vec![-1], vec![i64::MIN], vec![2], vec![-1]),
        (vec![100], vec![-100], vec![2], vec![-3]),
        (vec![0, 1], vec![1, 6], vec![1, 2], vec![1, 3]),
        (vec![1, -2], vec![100, 0], vec![1, 2], vec![1, -2]),
        (vec![2], vec![2], vec![1], vec![1]),
        (vec![-1], vec![-max], vec![1], vec![-2]),
        (vec![], vec![], vec![], vec![]),
    ] {
        let operands = vec![x(), Ints(starts), Ints(ends), Ints(axes), Ints(steps)];
        all.push(case("Slice", operands));
    }
    all.push(case("Slice", vec![x(), In("i64[2]"), In("i64[2]")]));
    let bounds = vec![x(), In("i64[1]"), In("i64[1]"), Ints(vec![1])];
    all.push(case("Slice", bounds));
    let narrow = vec![x(), In("i32[1]"), In("i32[1]")];
    all.push(case("Slice", narrow));
    all.push(case(
        "Slice",
        vec![
            In("f32[0, 3]"),
            Ints(vec![0]),
            Ints(vec![2]),
            Ints(vec![0]),
            Ints(vec![1]),
        ],
    ));
    all
}

fn joins() -> Vec<Case> {
    let mut all = Vec::new();
    let axis = |a: i64| with("axis", a);
    let wide = vec![In("f32[b, 3]"), In("f32[b, 1]"), In("f32[b, 0]")];
    all.push(case("Concat", wide).attrs(axis(-1)));
    all.push(case("Concat", vec![In("f32[b, s, 2]"), In("f32[b, n, 2]")]).attrs(axis(1)));
    all.push(case("Concat", vec![In("f32[b, s]")]).attrs(axis(0)));
    let lengths = || vec![In("f32[b, 6]"), Ints(vec![1, 0, 5])];
    all.push(case("Split", lengths()).attrs(axis(1)).outs(3, &[0, 1, 2]));
    all.push(case("Split", lengths()).attrs(axis(-1)).outs(3, &[2]));
    all.push(case("Split", vec![In("f32[5, s]"), In("i64[2]")]).outs(2, &[0, 1]));
    let parts = |a: i64, n: i64| axis(a).with("num_outputs", n);
    all.push(
        case("Split", vec![In("f32[b, 5]")])
            .attrs(parts(1, 3))
            .outs(3, &[0, 2]),
    );
    all.push(
        case("Split", vec![In("f32[b, s]")])
            .attrs(parts(1, 2))
            .outs(2, &[1]),
    );
    all.push(case("Split", vec![In("f32[b, s]")]).attrs(parts(0, 1)));
    all.push(case("Tile", vec![In("f32[b, s, 2]"), Ints(vec![2, 1, 3])]));
    all.push(case("Tile", vec![In("f32[b, s]"), In("i64[2]")]));
    all.push(case("Tile", vec![In("f32[2, 3]"), Ints(vec![2, 0])]));
    all.push(case("Tile", vec![In("f32[]"), Ints(vec![])]));
    all.push(case("Pad", vec![In("f32[b, s]"), Ints(vec![1, 0, 2, -1])]));
    let one = vec![
        In("f32[b, s]"),
        Ints(vec![-1, 3]),
        Operand::None,
        Ints(vec![-1]),
    ];
    all.push(case("Pad", one));
    all.push(case("Pad", vec![In("f32[b, s]"), In("i64[4]")]));
    all
}

fn products() -> Vec<Case> {
    let mut all = Vec::new();
    for (a, b) in [
        ("f32[4]", "f32[4]"),
        ("f32[4]", "f32[4, s]"),
        ("f32[4]", "f32[b, 4, s]"),
        ("f32[s, 4]", "f32[4]"),
        ("f32[b, s, 4]", "f32[4]"),
        ("f32[b, s]", "f32[s, 5]"),
        ("f32[b, s, 4]", "f32[4, 5]"),
        ("f32[b, 2, s, n]", "f32[n, 5]"),
        ("f32[b, s, 4]", "f32[b, 4, 5]"),
        ("f32[s, 4]", "f32[b, 4, 5]"),
        ("f32[b, 1, s, 4]", "f32[n, 4, 2]"),
        ("f32[one, s, 4]", "f32[b, 4, 2]"),
        ("f32[b, 0, 4]", "f32[4, 2]"),
        ("f32[b, s, 0]", "f32[0, 2]"),
        ("f32[b, s, 0]", "f32[b, 0, 2]"),
        ("f32[b, s, n]", "f32[4, 5]"),
        ("f32[b, s, 4]", "f32[b, n, 5]"),
    ] {
        all.push(case("MatMul", vec![In(a), In(b)]));
    }
    for (x, b, turned) in [
        ("f32[s, 4]", "f32[2, 4, n]", 0),
        ("f32[s, 4]", "f32[3, 5, 4]", 1),
        ("bf16[s, 4]", "bf16[1, 4, 2]", 0),
        ("f32[s, 4]", "f32[0, 4, 2]", 0),
        ("f32[s, 0]", "f32[2, 0, 3]", 0),
    ] {
        let attrs = Attrs::new().with("transB", turned);
        all.push(case("GroupedMatMul", vec![In(x), In(b), In("i64[s]")]).attrs(attrs));
    }
    for (a, b, groups) in [
        ("f32[s, 4]", "f32[s, n]", 3),
        ("f32[s, 4]", "f32[s, 2]", 0),
        ("f32[s, 0]", "f32[s, 2]", 1),
    ] {
        let attrs = Attrs::new().with("groups", groups);
        all.push(case("GroupedWeightGrad", vec![In(a), In(b), In("i64[s]")]).attrs(attrs));
    }
    for (ta, tb) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let a = if ta == 0 { "f32[s, 4]" } else { "f32[4, s]" };
        let b = if tb == 0 { "f32[4, b]" } else { "f32[b, 4]" };
        let attrs = || {
            let scaled = Attrs::new().with("alpha", 0.5f32).with("beta", -2f32);
            scaled.with("transA", ta).with("transB", tb)
        };
        all.push(case("Gemm", vec![In(a), In(b)]).attrs(attrs()));
        for c in ["f32[b]", "f32[s, 1]", "f32[]", "f32[s, b]"] {
            all.push(case("Gemm", vec![In(a), In(b), In(c)]).attrs(attrs()));
        }
    }
    all.push(case(
        "Gemm",
        vec![In("f32[s, 4]"), In("f32[4, 0]"), In("f32[1, 1]")],
    ));
    all
}

fn indices() -> Vec<Case> {
    let mut all = Vec::new();
    let axis = |a: i64| with("axis", a);
    all.push(case("Gather", vec![In("f32[6, 4]"), In("i64[b, s]")]));
    all.push(case("Gather", vec![In("f32[n, 4]"), In("i32[b]")]));
    all.push(case("Gather", vec![In("f32[b, s, 4]"), In("i64[2, s]")]).attrs(axis(1)));
    all.push(case("Gather", vec![In("f32[b, s, 4]"), Ints(vec![-1, 0, -1])]).attrs(axis(-1)));
    all.push(case("Gather", vec![In("f32[b, s, 4]"), Int(-2)]).attrs(axis(1)));
    all.push(case("Gather", vec![In("f32[5, 2]"), In("i64[0]")]));
    all.push(case("GatherElements", vec![In("f32[b, s]"), In("i64[b, 5]")]).attrs(axis(1)));
    all.push(case(
        "GatherElements",
        vec![In("f32[b, s]"), In("i32[n, s]")],
    ));
    all.push(case("GatherND", vec![In("f32[b, s, 4]"), In("i64[n, 2]")]));
    all.push(case(
        "GatherND",
        vec![In("f32[b, s, 4]"), In("i64[n, s, 1]")],
    ));
    all.push(case("GatherND", vec![In("f32[b, s]"), In("i64[2]")]));
    for reduction in ["none", "add"] {
        let a = || Attrs::new().with("reduction", reduction);
        let grid = || Ints(vec![0, 2, -1]);
        let row = vec![In("f32[4]"), grid(), In("f32[3]")];
        all.push(case("ScatterElements", row).attrs(a()));
        let table = vec![In("f32[4, s]"), In("i64[1, s]"), In("f32[1, s]")];
        all.push(case("ScatterElements", table).attrs(a().with("axis", -2i64)));
        let rows = vec![In("f32[b, s]"), In("i64[1, 1]"), In("f32[1, s]")];
        all.push(case("ScatterND", rows).attrs(a()));
        let cells = vec![In("f32[b, s]"), In("i64[1, 2]"), In("f32[1]")];
        all.push(case("ScatterND", cells).attrs(a()));
    }
    let pair = || Operand::Floats(vec![-1.0, 2.0]);
    all.push(case("OneHot", vec![In("i64[b, s]"), Int(3), pair()]));
    all.push(case("OneHot", vec![In("i64[b, s]"), In("i64[]"), pair()]).attrs(axis(0)));
    all.push(case("NonZero", vec![In("f32[b, s]")]));
    all
}
