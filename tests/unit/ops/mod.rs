//! Every op in small: it types, its gradients have the operands' types, its body is standard and types the same, its
//! cost and memory rules take what typing lets through.

pub mod cases;
mod layout_cases;

use cases::{Built, Operand, SIZES, build, case, cases};
use ckpt_passes::ir::op::{CostCx, DeviceKind, Domain, Grad, InferCx, Known, MemoryCx, Sized};
use ckpt_passes::ir::same_dims;
use ckpt_passes::ir::{Attrs, DType, Dim, Graph, Phase, Ty, verify::verify};
use ckpt_passes::ops::body_of;
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::{Kind, ops};
use std::slice::from_ref;

fn sized(ty: &Ty) -> Option<Sized> {
    let size_of = |name: &str| SIZES.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
    let dims: Option<Vec<i64>> = ty.dims.iter().map(|d| d.eval(&size_of)).collect();
    Some(Sized::contiguous(ty.dtype, dims?))
}

#[test]
fn gradients_have_the_operands_types() {
    for case in cases() {
        let Built {
            mut graph,
            operands,
            gradients,
            ..
        } = build(&case);
        for (i, dx) in gradients {
            let (want, got) = (graph.ty(operands[i].unwrap()), graph.ty(dx));
            assert!(
                want.dtype == got.dtype && same_dims(&want.dims, &got.dims),
                "{}: gradient {i} is {got}, the operand {want}",
                case.name
            );
        }
        graph.phase = Phase::Training;
        verify(&graph).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    }
}

#[test]
fn rows_with_a_gradient_rule_are_compared_with_pytorch() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/oracle/");
    let read = |name: &str| std::fs::read_to_string(format!("{root}{name}")).unwrap();
    let examples = read("autograd_examples.py") + &read("autograd.py");
    let mut rules = 0;
    for op in ops::all() {
        if let Grad::Rule(_) | Grad::First(_) = op.grad {
            rules += 1;
            assert!(
                examples.contains(&format!("\"{}\"", op.name)),
                "{}: tools/oracle has neither an example nor a reason in LEFT_OUT",
                op.name
            );
        }
    }
    assert!(rules > 80, "{rules} rules");
}

#[test]
fn bodies_are_standard_and_type_the_same() {
    let mut bodies = 0;
    for case in cases() {
        let graph = build(&case).graph;
        for id in graph.order() {
            let Some(body) = body_of(&graph, *id) else {
                continue;
            };
            let body = body.unwrap_or_else(|e| panic!("{}: {e}", case.name));
            bodies += 1;
            verify(&body).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            assert!(
                body.nodes()
                    .all(|(_, n)| matches!(n.op.domain, Domain::Onnx { .. })),
                "{}: a body has ops of our own",
                case.name
            );
            let node = graph.node(*id);
            assert_eq!(body.outputs().len(), node.outs.len(), "{}", case.name);
            for (inner, outer) in body.outputs().iter().zip(&node.outs) {
                let (inner, outer) = (body.ty(*inner), graph.ty(*outer));
                assert_eq!(inner.dtype, outer.dtype, "{}: {}", case.name, node.op.name);
                assert_eq!(
                    inner.rank(),
                    outer.rank(),
                    "{}: {}",
                    case.name,
                    node.op.name
                );
            }
        }
    }
    assert!(bodies > 100, "{bodies} bodies");
}

fn costs(graph: &Graph) -> Vec<(String, u64, u64)> {
    let mut all = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        let ins: Vec<Option<Sized>> = node
            .ins
            .iter()
            .map(|v| v.and_then(|v| sized(graph.ty(v))))
            .collect();
        let Some(outs) = node
            .outs
            .iter()
            .map(|v| sized(graph.ty(*v)))
            .collect::<Option<Vec<_>>>()
        else {
            continue;
        };
        let (attrs, op) = (&node.attrs, node.op);
        let cost = (op.cost)(&CostCx {
            attrs,
            ins: &ins,
            outs: &outs,
        });
        let footprint = (op.memory)(&MemoryCx {
            attrs,
            ins: &ins,
            outs: &outs,
            device: DeviceKind::Cpu,
        });
        assert_eq!(footprint.outs.len(), outs.len(), "{}", op.name);
        all.push((op.name.to_string(), cost.bytes, footprint.temp_bytes));
    }
    all
}

#[test]
fn cost_and_memory_rules_take_what_typing_takes() {
    let mut seen = 0;
    for case in cases() {
        seen += costs(&build(&case).graph).len();
    }
    assert!(seen > 500, "{seen} nodes");
}

/// Contents of a node's only result, from known contents of its operands.
fn contents(op: &str, attrs: Attrs, operands: &[(DType, &[u64], &[Dim])]) -> Option<Vec<Dim>> {
    let types: Vec<Ty> = operands
        .iter()
        .map(|(d, dims, _)| {
            Ty::new(
                *d,
                dims.iter()
                    .map(|n| Dim::from(*n as i64))
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    let ins: Vec<Option<Known>> = types
        .iter()
        .zip(operands)
        .map(|(ty, (_, _, ints))| {
            Some(Known {
                ty,
                ints: Some(ints),
            })
        })
        .collect();
    let op = ops::find(op).unwrap();
    let mut complete = attrs;
    for spec in op.attrs {
        if complete.get(spec.name).is_none()
            && let Some(value) = spec.default_value()
        {
            complete.set(spec.name, value);
        }
    }
    let cx = InferCx {
        op,
        attrs: &complete,
        ins: &ins,
        out_names: &["y".to_string()],
    };
    let types = (op.infer)(&cx).unwrap();
    Some((op.fold)(&cx, &types)?.remove(0))
}

fn ints(values: &[i64]) -> Vec<Dim> {
    values.iter().map(|v| Dim::from(*v)).collect()
}

#[test]
fn sizes_fold() {
    let (s, i, b) = (Dim::symbol("s"), DType::I64, DType::Bool);
    let next = s.add(&Dim::ONE);
    let none = Attrs::new;
    let two = |op: &str, x: &Dim, y: &Dim| {
        contents(op, none(), &[(i, &[1], from_ref(x)), (i, &[], from_ref(y))])
    };
    assert_eq!(two("Equal", &s, &s), Some(ints(&[1])));
    assert_eq!(two("Equal", &s, &next), Some(ints(&[0])));
    assert_eq!(two("Equal", &s, &Dim::from(7)), None);
    assert_eq!(two("Less", &s, &next), Some(ints(&[1])));
    assert_eq!(two("Less", &next, &s), Some(ints(&[0])));
    assert_eq!(two("LessOrEqual", &s, &s), Some(ints(&[1])));
    assert_eq!(two("Greater", &s, &Dim::ZERO), Some(ints(&[1])));
    assert_eq!(two("GreaterOrEqual", &Dim::from(5), &s), None);
    assert_eq!(two("Max", &s, &next), Some(vec![next.clone()]));
    assert_eq!(two("Min", &s, &Dim::ONE), Some(ints(&[1])));
    assert_eq!(
        two("Mod", &s.mul(&Dim::from(4)), &Dim::from(4)),
        Some(ints(&[0]))
    );
    assert_eq!(two("Pow", &s, &Dim::from(2)), Some(vec![s.mul(&s)]));
    let data = Dim::data("k");
    assert_eq!(
        contents("Sign", none(), &[(i, &[], from_ref(&s))]),
        Some(ints(&[1]))
    );
    assert_eq!(contents("Sign", none(), &[(i, &[], &[data])]), None);
    assert_eq!(
        contents("Abs", none(), &[(i, &[], &ints(&[-3]))]),
        Some(ints(&[3]))
    );
    let logic = |op: &str, x: i64, y: i64| {
        contents(op, none(), &[(b, &[], &ints(&[x])), (b, &[], &ints(&[y]))]).unwrap()
    };
    for (x, y) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        assert_eq!(logic("And", x, y), ints(&[x & y]));
        assert_eq!(logic("Or", x, y), ints(&[x | y]));
        assert_eq!(logic("Xor", x, y), ints(&[x ^ y]));
    }
    assert_eq!(
        contents("Not", none(), &[(b, &[2], &ints(&[0, 1]))]),
        Some(ints(&[1, 0]))
    );
    let picked = contents(
        "Where",
        none(),
        &[
            (b, &[2], &ints(&[1, 0])),
            (i, &[1], from_ref(&s)),
            (i, &[2], &ints(&[8, 9])),
        ],
    );
    assert_eq!(picked, Some(vec![s.clone(), Dim::from(9)]));
}

#[test]
fn reductions_of_sizes_fold() {
    let (s, i) = (Dim::symbol("s"), DType::I64);
    let grid = [
        Dim::from(2),
        s.clone(),
        Dim::from(3),
        Dim::from(4),
        Dim::ONE,
        s.clone(),
    ];
    let over = |op: &str, axis: i64| {
        contents(
            op,
            Attrs::new(),
            &[(i, &[2, 3], &grid), (i, &[1], &ints(&[axis]))],
        )
    };
    let n = |k: i64| Dim::from(k);
    assert_eq!(
        over("ReduceProd", 0),
        Some(vec![n(8), s.clone(), s.mul(&n(3))])
    );
    assert_eq!(
        over("ReduceSum", -1),
        Some(vec![s.add(&n(5)), s.add(&n(5))])
    );
    let all = |op: &str| contents(op, Attrs::new(), &[(i, &[3], &ints(&[4, 9, 2]))]);
    assert_eq!(all("ReduceMax"), Some(ints(&[9])));
    assert_eq!(all("ReduceMin"), Some(ints(&[2])));
    assert_eq!(
        contents("ReduceProd", Attrs::new(), &[(i, &[0], &[])]),
        Some(ints(&[1]))
    );
    for (exclusive, reverse, sums) in [
        (0i64, 0i64, [1, 3, 6]),
        (0, 1, [6, 5, 3]),
        (1, 0, [0, 1, 3]),
        (1, 1, [5, 3, 0]),
    ] {
        let attrs = Attrs::new()
            .with("exclusive", exclusive)
            .with("reverse", reverse);
        let folded = contents(
            "CumSum",
            attrs,
            &[(i, &[3], &ints(&[1, 2, 3])), (i, &[], &ints(&[0]))],
        );
        assert_eq!(folded, Some(ints(&sums)));
    }
}

/// The operands' faults that each rule must find.
#[test]
fn wrong_operands_are_refused() {
    use Operand::{In, Int, Ints};
    let with = |name: &str, value: i64| Attrs::new().with(name, value);
    let wrong = [
        case("Add", vec![In("f32[3]"), In("f32[4]")]),
        case("Add", vec![In("f32[3]"), In("f64[3]")]),
        case("Max", vec![In("f32[3]"), In("i64[3]")]),
        case("Sum", vec![In("i64[3]"), In("i64[3]")]),
        case("Mod", vec![In("f32[3]"), In("f32[3]")]),
        case("Exp", vec![In("i64[3]")]),
        case("And", vec![In("f32[3]"), In("f32[3]")]),
        case("Less", vec![In("bool[3]"), In("bool[3]")]),
        case("Where", vec![In("f32[3]"), In("f32[3]"), In("f32[3]")]),
        case("Clip", vec![In("f32[3]"), In("f32[3]")]),
        case("Gelu", vec![In("f32[3]")]).attrs(Attrs::new().with("approximate", "fast")),
        case("ReduceSum", vec![In("f32[2, 3]"), Ints(vec![2])]),
        case("ReduceSum", vec![In("f32[2, 3]"), Ints(vec![1, -1])]),
        case("ReduceSum", vec![In("f32[2, 3]"), In("i64[1]")]).attrs(with("keepdims", 0)),
        case("ReduceL2", vec![In("f32[2, 3]")]).attrs(with("noop_with_empty_axes", 1)),
        case("CumSum", vec![In("f32[2]"), Int(1)]),
        case("Softmax", vec![In("f32[]")]),
        case("SoftmaxGrad", vec![In("f32[2, 3]"), In("f32[2, 4]")]),
        case("TanhGrad", vec![In("f32[2, 3]"), In("f32[3]")]),
        case("LayerNormalization", vec![In("f32[2, 3]"), In("f32[4]")]),
        case("LayerNormalization", vec![In("f32[3]"), In("f32[2, 3]")]),
        case("LayerNormalization", vec![In("f32[2, 3]"), In("f32[3]")])
            .attrs(with("stash_type", 16)),
        case("SoftmaxCrossEntropyLoss", vec![In("f32[3]"), In("i64[3]")]),
        case(
            "SoftmaxCrossEntropyLoss",
            vec![In("f32[2, 3]"), In("i64[3]")],
        ),
        case(
            "SoftmaxCrossEntropyLoss",
            vec![In("f32[2, 3]"), In("f32[2]")],
        ),
        case(
            "SoftmaxCrossEntropyLoss",
            vec![In("f32[2, 3]"), In("i64[2]"), In("f32[2]")],
        ),
        case("SumToShape", vec![In("f32[3]"), Ints(vec![1, 3])]),
        // No window fits, channels differ, groups do not divide, padding takes more than there is.
        case("Conv", vec![In("f32[1, 2, 3]"), In("f32[1, 2, 4]")]),
        case("Conv", vec![In("f32[1, 2, 3]"), In("f32[1, 3, 1]")]),
        case("Conv", vec![In("f32[1, 2, 3]"), In("f32[3, 1, 1]")]).attrs(with("group", 2)),
        case("Conv", vec![In("f32[1, 2]"), In("f32[3, 2]")]),
        case(
            "ConvTranspose",
            vec![In("f32[1, 2, 1]"), In("f32[2, 1, 2]")],
        )
        .attrs(Attrs::new().with("pads", vec![2i64, 2])),
        case(
            "ConvTranspose",
            vec![In("f32[1, 2, 3]"), In("f32[2, 1, 2]")],
        )
        .attrs(Attrs::new().with("output_padding", vec![1i64])),
    ];
    for case in wrong {
        let mut graph = Graph::new("wrong");
        let ins = cases::operands(&mut graph, &case);
        let op = ops::find(case.op).unwrap();
        let result = Builder::new(&mut graph).emit_n(op, ins, case.attrs.clone(), 1);
        let error = result
            .err()
            .unwrap_or_else(|| panic!("{} was accepted", case.name));
        assert_eq!(error.kind(), Kind::Model, "{error}");
    }
}

#[test]
fn opsets_follow_element_types() {
    for (op, dtype, opset) in [
        ("Round", "f32[3]", 11),
        ("Round", "bf16[3]", 22),
        ("IsInf", "f32[3]", 10),
        ("IsInf", "f16[3]", 20),
        ("Exp", "bf16[3]", 13),
        ("Gelu", "f32[3]", 20),
        ("GeluGrad", "f32[3]", 0),
    ] {
        let operands = || match op {
            "GeluGrad" => vec![Operand::In(dtype), Operand::In(dtype)],
            _ => vec![Operand::In(dtype)],
        };
        let graph = build(&case(op, operands())).graph;
        assert_eq!(
            ops::first_opset(&graph, graph.order()[0]),
            opset,
            "{op} {dtype}"
        );
    }
}
