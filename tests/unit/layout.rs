//! Shape arithmetic as exporters write it, sizes that typing finds, and wrong operands of the layout and index ops.

use crate::ops::cases::{self, Case, Operand, case};
use ckpt_passes::ir::op::{DeviceKind, MemoryCx, Place, Sized};
use ckpt_passes::ir::{Attrs, DType, Dim, Graph, Tensor, Ty, ValueId};
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::{Kind, ops};

fn emit(b: &mut Builder, op: &str, ins: &[ValueId], attrs: Attrs) -> ValueId {
    b.emit(ops::find(op).unwrap(), ins, attrs)
        .unwrap_or_else(|e| panic!("{e}"))
}

fn axis(a: i64) -> Attrs {
    Attrs::new().with("axis", a)
}

/// `f32[batch, seq, 64]` and what is known of values made from it.
fn start(graph: &mut Graph) -> (Builder<'_>, ValueId) {
    let dims = [Dim::symbol("batch"), Dim::symbol("seq"), Dim::from(64)];
    let x = graph.add_input("x", Some(Ty::new(DType::F32, dims)));
    (Builder::new(graph), x)
}

fn known(b: &Builder, v: ValueId) -> String {
    format!("{:?}", b.contents.get(v).expect("known"))
}

/// The split of heads and the fused attention's transpose, as `torch.onnx.export` writes them.
#[test]
fn chains_of_shape_arithmetic_are_followed() {
    let mut graph = Graph::new("chain");
    let (mut b, x) = start(&mut graph);
    let none = Attrs::new;
    let shape = emit(&mut b, "Shape", &[x], none());
    let (zero, two, last) = (b.ints(&[0]), b.ints(&[2]), b.ints(&[i64::MAX]));
    let lead = emit(&mut b, "Slice", &[shape, zero, two], none());
    assert_eq!(known(&b, lead), "[batch, seq]");
    let tail = b.ints(&[-1, 16]);
    let target = emit(&mut b, "Concat", &[lead, tail], axis(0));
    assert_eq!(known(&b, target), "[batch, seq, -1, 16]");
    let heads = emit(&mut b, "Reshape", &[x, target], none());
    assert_eq!(b.ty(heads).to_string(), "f32[batch, seq, 4, 16]");
    let perm = Attrs::new().with("perm", vec![0i64, 2, 1, 3]);
    let k = emit(&mut b, "Transpose", &[heads], perm);
    let dims = emit(&mut b, "Shape", &[k], none());
    let minus_one = b.ints(&[-1]);
    let width = emit(&mut b, "Slice", &[dims, minus_one, last], none());
    let minus_two = b.ints(&[-2]);
    let length = emit(&mut b, "Slice", &[dims, minus_two, minus_one], none());
    let flat = emit(&mut b, "Concat", &[minus_one, length, width], axis(0));
    let flat = emit(&mut b, "Reshape", &[k, flat], none());
    assert_eq!(b.ty(flat).to_string(), "f32[4*batch, seq, 16]");
    let first = b.ints(&[i64::MIN]);
    let outer = emit(&mut b, "Slice", &[dims, first, minus_two], none());
    let back = emit(&mut b, "Concat", &[outer, width, length], axis(0));
    assert_eq!(known(&b, back), "[batch, 4, 16, seq]");
}

/// Legacy exports: `Gather` of one size, `Unsqueeze`, `Concat`, `ConstantOfShape`.
#[test]
fn legacy_shape_arithmetic_is_followed() {
    let mut graph = Graph::new("legacy");
    let (mut b, x) = start(&mut graph);
    let none = Attrs::new;
    let shape = emit(&mut b, "Shape", &[x], none());
    let (one, back) = (b.int(1), b.int(-3));
    let seq = emit(&mut b, "Gather", &[shape, one], none());
    let batch = emit(&mut b, "Gather", &[shape, back], none());
    assert_eq!(
        (known(&b, seq), known(&b, batch)),
        ("[seq]".into(), "[batch]".into())
    );
    let zero = b.ints(&[0]);
    let seq1 = emit(&mut b, "Unsqueeze", &[seq, zero], none());
    let again = emit(&mut b, "Squeeze", &[seq1, zero], none());
    assert_eq!(known(&b, again), "[seq]");
    let pair = emit(&mut b, "Concat", &[seq1, seq1], axis(0));
    let zeros = emit(&mut b, "ConstantOfShape", &[pair], none());
    assert_eq!(b.ty(zeros).to_string(), "f32[seq, seq]");
    let (from, step) = (b.int(0), b.int(1));
    let positions = emit(&mut b, "Range", &[from, seq, step], none());
    assert_eq!(b.ty(positions).to_string(), "i64[seq]");
    let twice = b.ints(&[2]);
    let tiled = emit(&mut b, "Tile", &[pair, twice], none());
    assert_eq!(known(&b, tiled), "[seq, seq, seq, seq]");
    let mut value = Attrs::new();
    value.set("value", ckpt_passes::ir::Attr::Tensor(Tensor::ints(&[7])));
    let sevens = emit(&mut b, "ConstantOfShape", &[twice], value);
    assert_eq!(known(&b, sevens), "[7, 7]");
    let (picked, depth) = (b.ints(&[1, -3]), b.int(3));
    let values = emit(&mut b, "Concat", &[zero, seq1], axis(0));
    let hot = emit(&mut b, "OneHot", &[picked, depth, values], none());
    assert_eq!(known(&b, hot), "[0, seq, 0, seq, 0, 0]");
    let elements = emit(&mut b, "Size", &[x], none());
    assert_eq!(known(&b, elements), "[64*batch*seq]");
}

#[test]
fn contents_are_rearranged() {
    let mut graph = Graph::new("grid");
    let mut b = Builder::new(&mut graph);
    let none = Attrs::new;
    let row = b.ints(&[1, 2, 3, 4, 5, 6]);
    let shape = b.ints(&[2, 3]);
    let grid = emit(&mut b, "Reshape", &[row, shape], none());
    let turned = emit(&mut b, "Transpose", &[grid], none());
    assert_eq!(known(&b, turned), "[1, 4, 2, 5, 3, 6]");
    let side = emit(&mut b, "Concat", &[grid, grid], axis(1));
    assert_eq!(known(&b, side), "[1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6]");
    let (starts, ends, axes, steps) = (
        b.ints(&[-1, 0]),
        b.ints(&[i64::MIN, 3]),
        b.ints(&[0, 1]),
        b.ints(&[-1, 2]),
    );
    let sliced = emit(&mut b, "Slice", &[grid, starts, ends, axes, steps], none());
    assert_eq!(known(&b, sliced), "[4, 6, 1, 3]");
    let picks = b.ints(&[2, -3]);
    let columns = emit(&mut b, "Gather", &[grid, picks], axis(1));
    assert_eq!(known(&b, columns), "[3, 1, 6, 4]");
    let lengths = b.ints(&[1, 2]);
    let split = ops::find("Split").unwrap();
    let parts = b
        .emit_n(split, vec![Some(grid), Some(lengths)], axis(1), 2)
        .unwrap();
    assert_eq!(
        (known(&b, parts[0]), known(&b, parts[1])),
        ("[1, 4]".into(), "[2, 3, 5, 6]".into())
    );
    let wide = b.ints(&[2, 2, 3]);
    let wide = emit(&mut b, "Expand", &[grid, wide], none());
    assert_eq!(known(&b, wide), "[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]");
    let (from, to, step) = (b.int(7), b.int(0), b.int(-3));
    let down = emit(&mut b, "Range", &[from, to, step], none());
    assert_eq!(known(&b, down), "[7, 4, 1]");
    let repeats = b.ints(&[1, 2]);
    let tiled = emit(&mut b, "Tile", &[grid, repeats], none());
    assert_eq!(known(&b, tiled), known(&b, side));
}

/// Types of results where sizes are symbolic.
#[test]
fn sizes_are_found() {
    use Operand::{In, Ints};
    let found = |case: Case| -> Vec<String> {
        let mut graph = Graph::new("types");
        let ins = cases::operands(&mut graph, &case);
        let mut b = Builder::new(&mut graph);
        let op = ops::find(case.op).unwrap();
        let outs = b
            .emit_n(op, ins, case.attrs, case.outs)
            .unwrap_or_else(|e| panic!("{e}"));
        outs.iter().map(|v| b.ty(*v).to_string()).collect()
    };
    let parts = axis(1).with("num_outputs", 3);
    assert_eq!(
        found(
            case("Split", vec![In("f32[2, 8]")])
                .attrs(parts.clone())
                .outs(3, &[])
        ),
        ["f32[2, 3]", "f32[2, 3]", "f32[2, 2]"]
    );
    let halves = axis(0).with("num_outputs", 2);
    assert_eq!(
        found(case("Split", vec![In("f32[s]")]).attrs(halves).outs(2, &[])),
        ["f32[floordiv(s + 1, 2)]", "f32[s - floordiv(s + 1, 2)]"]
    );
    let matmul = |a, b| found(case("MatMul", vec![In(a), In(b)])).remove(0);
    assert_eq!(matmul("f32[b, 1, s, 4]", "f32[n, 4, 2]"), "f32[b, n, s, 2]");
    assert_eq!(matmul("f32[4]", "f32[b, 4, s]"), "f32[b, s]");
    assert_eq!(matmul("f32[4]", "f32[4]"), "f32[]");
    let pad = vec![In("f32[b, s]"), Ints(vec![1, 0, 2, -1])];
    assert_eq!(found(case("Pad", pad)), ["f32[b + 3, s - 1]"]);
    assert_eq!(
        found(case(
            "Reshape",
            vec![In("f32[b, s, 6]"), Ints(vec![0, -1, 4])]
        )),
        ["f32[b, floordiv(3*s, 2), 4]"]
    );
    let gather = vec![In("f32[9, 4]"), In("i64[b, s]")];
    assert_eq!(
        found(case("Gather", gather).attrs(axis(-1))),
        ["f32[9, b, s]"]
    );
    let tuples = vec![In("f32[b, s, 4]"), In("i64[b, n, 1]")];
    let batched = Attrs::new().with("batch_dims", 1i64);
    assert_eq!(
        found(case("GatherND", tuples).attrs(batched)),
        ["f32[b, n, 4]"]
    );
    assert_eq!(
        found(case("NonZero", vec![In("f32[b, s]")])),
        ["i64[2, ?NonZero.1]"]
    );
}

/// Where results live: views state libtorch's strides, what cannot be a view is new.
#[test]
fn views_and_copies() {
    let place = |op: &str, attrs: Attrs, x: &Sized, ints: &[Option<Vec<i64>>], out: &[i64]| {
        let mut ins = vec![Some(x.clone())];
        ins.extend(ints.iter().map(|v| {
            v.as_ref().map(|v| Sized {
                ints: Some(v.clone()),
                ..Sized::contiguous(DType::I64, vec![v.len() as i64])
            })
        }));
        let outs = [Sized::contiguous(DType::F32, out.to_vec())];
        let cx = MemoryCx {
            attrs: &attrs,
            ins: &ins,
            outs: &outs,
            device: DeviceKind::Cpu,
        };
        match (ops::find(op).unwrap().memory)(&cx).outs.remove(0) {
            Place::View { of: 0, strides } => Some(strides),
            Place::View { of, .. } => panic!("a view of operand {of}"),
            Place::Fresh | Place::Outside => None,
        }
    };
    let none = Attrs::new;
    let x = Sized::contiguous(DType::F32, vec![2, 3, 8]);
    let turned = Sized {
        strides: vec![8, 16, 1],
        ..x.clone()
    };
    let shape = |dims: &[i64]| [Some(dims.to_vec())];
    assert_eq!(
        place("Reshape", none(), &x, &shape(&[6, 8]), &[6, 8]),
        Some(vec![8, 1])
    );
    assert_eq!(
        place("Reshape", none(), &turned, &shape(&[6, 8]), &[6, 8]),
        None
    );
    assert_eq!(
        place(
            "Reshape",
            none(),
            &turned,
            &shape(&[2, 3, 2, 4]),
            &[2, 3, 2, 4]
        ),
        Some(vec![8, 16, 4, 1])
    );
    assert_eq!(
        place("Flatten", axis(2), &x, &[], &[6, 8]),
        Some(vec![8, 1])
    );
    assert_eq!(
        place("Identity", none(), &turned, &[], &[2, 3, 8]),
        Some(vec![8, 16, 1])
    );
    let slice = |steps: i64, out: &[i64]| {
        let operands = [vec![1], vec![i64::MAX], vec![-1], vec![steps]].map(Some);
        place("Slice", none(), &turned, &operands, out)
    };
    assert_eq!(slice(2, &[2, 3, 4]), Some(vec![8, 16, 2]));
    assert_eq!(slice(-1, &[2, 3, 2]), None);
    let expanded = place("Expand", none(), &x, &shape(&[5, 2, 3, 8]), &[5, 2, 3, 8]);
    assert_eq!(expanded, Some(vec![0, 24, 8, 1]));
    assert_eq!(
        place("Unsqueeze", none(), &x, &shape(&[-1, 0]), &[1, 2, 3, 8, 1]),
        Some(vec![48, 24, 8, 1, 1])
    );
    assert_eq!(
        place("Split", axis(1), &x, &[], &[2, 1, 8]),
        Some(vec![24, 8, 1])
    );
    assert_eq!(place("Concat", axis(1), &x, &[], &[2, 3, 8]), None);
    let perm = Attrs::new().with("perm", vec![2i64, 0, 1]);
    assert_eq!(
        place("Transpose", perm, &x, &[], &[8, 2, 3]),
        Some(vec![1, 24, 8])
    );
}

#[test]
fn wrong_operands_are_refused() {
    use Operand::{In, Int, Ints, None};
    let x = || In("f32[2, 3, 4]");
    let slice = |starts: &[i64], ends: &[i64], axes: &[i64], steps: &[i64]| {
        let ints = [starts, ends, axes, steps].map(|v| Ints(v.to_vec()));
        case("Slice", [x()].into_iter().chain(ints).collect())
    };
    let wrong = [
        case("Reshape", vec![x(), Ints(vec![5, -1])]),
        case("Reshape", vec![x(), Ints(vec![4, 5])]),
        case("Reshape", vec![x(), Ints(vec![-1, -1])]),
        case("Reshape", vec![x(), Ints(vec![-2, 12])]),
        case("Reshape", vec![x(), Ints(vec![2, 3, 4, 0])]),
        case("Reshape", vec![In("f32[0, 2]"), Ints(vec![0, -1])]),
        case("Reshape", vec![x(), In("f32[2]")]),
        case("Reshape", vec![x(), In("i64[n]")]),
        case("Expand", vec![x(), Ints(vec![2, 5, 4])]),
        case("Flatten", vec![x()]).attrs(axis(4)),
        case("Transpose", vec![x()]).attrs(Attrs::new().with("perm", vec![0i64, 1])),
        case("Transpose", vec![x()]).attrs(Attrs::new().with("perm", vec![0i64, 1, 1])),
        case("Squeeze", vec![x(), Ints(vec![0])]),
        case("Squeeze", vec![In("f32[b, 3]")]),
        case("Squeeze", vec![x(), In("i64[1]")]),
        case("Unsqueeze", vec![x(), Ints(vec![0, 0])]),
        case("Unsqueeze", vec![x(), Ints(vec![4])]),
        case("Concat", vec![x(), In("f32[2, 3]")]).attrs(axis(0)),
        case("Concat", vec![x(), In("f32[2, 2, 4]")]).attrs(axis(0)),
        case("Concat", vec![x(), In("f64[2, 3, 4]")]).attrs(axis(0)),
        case("Split", vec![x()]).attrs(axis(0)),
        case("Split", vec![x(), Ints(vec![1, 2])])
            .attrs(axis(0))
            .outs(2, &[]),
        case("Split", vec![x(), Ints(vec![3, -1])])
            .attrs(axis(0))
            .outs(2, &[]),
        case("Split", vec![x()])
            .attrs(axis(0).with("num_outputs", 3i64))
            .outs(2, &[]),
        case("Split", vec![In("f32[1]")])
            .attrs(axis(0).with("num_outputs", 3i64))
            .outs(3, &[]),
        case("Tile", vec![x(), Ints(vec![2])]),
        case("Pad", vec![x(), Ints(vec![0, 0, 0, -3, 0, 0])]),
        case("Pad", vec![x(), Ints(vec![1, 1])]),
        case("Pad", vec![x(), Ints(vec![1, 1]), None, Ints(vec![3])]),
        case("Pad", vec![x(), Ints(vec![0; 6])]).attrs(Attrs::new().with("mode", "wrap")),
        slice(&[0], &[1], &[3], &[1]),
        slice(&[0], &[1], &[0], &[0]),
        slice(&[0, 0], &[1], &[0], &[1]),
        slice(&[0, 0], &[1, 1], &[0, -3], &[1, 1]),
        case(
            "Slice",
            vec![x(), Ints(vec![0]), Ints(vec![1]), In("i64[1]")],
        ),
        case("Trilu", vec![In("f32[3]")]),
        case("Range", vec![Int(0), Int(1), Int(0)]),
        case("Range", vec![Int(0), Ints(vec![1]), Int(1)]),
        case("ConstantOfShape", vec![In("i64[n]")]),
        case("MatMul", vec![In("f32[2, 3]"), In("f32[4, 2]")]),
        case("MatMul", vec![In("f32[]"), In("f32[4, 2]")]),
        case("MatMul", vec![In("f32[2, 3, 4]"), In("f32[3, 4, 2]")]),
        case("MatMul", vec![In("f32[2, 3]"), In("f64[3, 2]")]),
        case("Gemm", vec![In("f32[2, 3]"), In("f32[2, 3]")]),
        case("Gemm", vec![In("f32[2, 3]"), In("f32[3, 4]"), In("f32[3]")]),
        case(
            "Gemm",
            vec![In("f32[1, 3]"), In("f32[3, 4]"), In("f32[2, 4]")],
        ),
        case("Gemm", vec![x(), In("f32[3, 4]")]),
        case("Gather", vec![x(), In("f32[2]")]),
        case("Gather", vec![x(), In("i64[2]")]).attrs(axis(3)),
        case("GatherElements", vec![x(), In("i64[2]")]),
        case("GatherND", vec![In("f32[2, 3]"), In("i64[5, 3]")]),
        case("GatherND", vec![In("f32[2, 3]"), In("i64[5, n]")]),
        case("GatherND", vec![x(), In("i64[3, 1]")]).attrs(Attrs::new().with("batch_dims", 1i64)),
        case(
            "ScatterElements",
            vec![In("f32[3]"), In("i64[2]"), In("f32[1]")],
        ),
        case("ScatterND", vec![x(), In("i64[5, 1]"), In("f32[5, 3]")]),
        case("ScatterND", vec![x(), In("i64[5, 1]"), In("f32[5, 3, 4]")])
            .attrs(Attrs::new().with("reduction", "sum")),
        case("OneHot", vec![In("i64[2]"), Int(3), In("f32[3]")]),
    ];
    for case in wrong {
        let mut graph = Graph::new("wrong");
        let ins = cases::operands(&mut graph, &case);
        let op = ops::find(case.op).unwrap();
        let result = Builder::new(&mut graph).emit_n(op, ins, case.attrs.clone(), case.outs);
        let error = result
            .err()
            .unwrap_or_else(|| panic!("{} was accepted", case.name));
        assert_eq!(error.kind(), Kind::Model, "{error}");
    }
}
