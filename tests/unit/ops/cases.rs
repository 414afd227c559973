//! Small uses of the ops: types and known contents of the operands, and which of them are differentiated.

use ckpt_passes::ir::op::GradCx;
use ckpt_passes::ir::{Attrs, DType, Def, Dim, Graph, Tensor, Ty, ValueId};
use ckpt_passes::ops;
use ckpt_passes::ops::{Builder, EmitExt};

/// Sizes of the named dims in every case.
pub const SIZES: &[(&str, i64)] = &[("b", 2), ("s", 3), ("one", 1), ("n", 4)];

pub enum Operand {
    /// A graph input; text such as `f32[b, 3]`.
    In(&'static str),
    /// A float constant of one element.
    Scalar(DType, f64),
    /// A frozen float32 vector.
    Floats(Vec<f32>),
    Ints(Vec<i64>),
    Int(i64),
    None,
}

pub struct Case {
    pub name: String,
    pub op: &'static str,
    pub attrs: Attrs,
    pub operands: Vec<Operand>,
    pub outs: usize,
    /// Results through which a cotangent arrives.
    pub through: Vec<usize>,
}

pub fn case(op: &'static str, operands: Vec<Operand>) -> Case {
    Case {
        name: op.into(),
        op,
        attrs: Attrs::new(),
        operands,
        outs: 1,
        through: vec![0],
    }
}

impl Case {
    pub fn attrs(mut self, attrs: Attrs) -> Case {
        self.attrs = attrs;
        self
    }
    pub fn outs(mut self, outs: usize, through: &[usize]) -> Case {
        (self.outs, self.through) = (outs, through.to_vec());
        self
    }
}

pub fn ty(text: &str) -> Ty {
    let (dtype, rest) = text.split_once('[').unwrap();
    let dims: Vec<Dim> = rest
        .trim_end_matches(']')
        .split(',')
        .map(str::trim)
        .filter(|t| !t.is_empty())
        .map(|t| t.parse::<i64>().map_or_else(|_| Dim::symbol(t), Dim::from))
        .collect();
    Ty::new(DType::from_name(dtype).unwrap(), dims)
}

/// A graph with the op alone, its cotangents as inputs, and its gradients; outputs are results, then gradients.
pub struct Built {
    pub graph: Graph,
    /// The graph inputs that stand for operands, by slot.
    pub operands: Vec<Option<ValueId>>,
    pub gradients: Vec<(usize, ValueId)>,
}

/// The operands of a case, as values of the graph.
pub fn operands(graph: &mut Graph, case: &Case) -> Vec<Option<ValueId>> {
    let mut ins = Vec::new();
    for (i, operand) in case.operands.iter().enumerate() {
        ins.push(match operand {
            Operand::In(text) => Some(graph.add_input(&format!("x{i}"), Some(ty(text)))),
            Operand::Scalar(dtype, v) => {
                Some(graph.add_init(&format!("x{i}"), Tensor::scalar(*dtype, *v)))
            }
            Operand::Floats(v) => {
                let bytes: Vec<u8> = v.iter().flat_map(|x| x.to_le_bytes()).collect();
                let tensor = Tensor::new(DType::F32, [v.len() as u64], bytes);
                Some(graph.add_init(&format!("x{i}"), tensor))
            }
            Operand::Ints(v) => Some(graph.add_init(&format!("x{i}"), Tensor::ints(v))),
            Operand::Int(v) => Some(graph.add_init(&format!("x{i}"), Tensor::int(*v))),
            Operand::None => None,
        });
    }
    ins
}

pub fn build(case: &Case) -> Built {
    let mut graph = Graph::new("case");
    let ins = operands(&mut graph, case);
    let mut b = Builder::new(&mut graph);
    let op = ops::find(case.op).unwrap();
    let outs = b
        .emit_n(op, ins.clone(), case.attrs.clone(), case.outs)
        .unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let Def::Node { node, .. } = b.graph.value(outs[0]).def else {
        panic!("a result has a node");
    };
    let mut dys = vec![None; case.outs];
    for slot in &case.through {
        let ty = b.ty(outs[*slot]).clone();
        let dy = b.graph.add_input(&format!("dy{slot}"), Some(ty));
        dys[*slot] = Some(dy);
    }
    let wants: Vec<bool> = ins
        .iter()
        .map(|v| v.is_some_and(|v| b.graph.value(v).def == Def::Input && b.ty(v).dtype.is_float()))
        .collect();
    b.prefix = "grad".into();
    let mut gradients = Vec::new();
    let mut cx = GradCx {
        b: &mut b,
        node,
        dys,
        wants: wants.clone(),
        dxs: vec![None; ins.len()],
        so_far: vec![None; ins.len()],
    };
    let has_rule = op.grad.apply(&mut cx);
    if has_rule.unwrap_or_else(|e| panic!("{}: {e}", case.name)) {
        let dxs = cx.dxs;
        for (i, dx) in dxs.iter().enumerate() {
            if wants[i] {
                let dx = dx.unwrap_or_else(|| panic!("{}: no gradient {i}", case.name));
                gradients.push((i, dx));
            }
        }
    }
    let results = graph.node(node).outs.clone();
    graph.set_outputs(results.into_iter().take(case.outs).collect());
    for (_, dx) in &gradients {
        graph.add_output(*dx);
    }
    Built {
        graph,
        operands: ins,
        gradients,
    }
}

use Operand::{Floats, In, Int, Ints, Scalar};

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    let f = DType::F32;
    for op in ["Add", "Sub", "Mul", "Max", "Min"] {
        all.push(case(op, vec![In("f32[b, s, 4]"), In("f32[s, 1]")]));
        all.push(case(op, vec![In("f32[]"), In("f32[0, 3]")]));
    }
    all.push(case("Div", vec![In("f32[b, 1]"), In("f32[one, s]")]));
    all.push(case(
        "Max",
        vec![In("f32[b, s]"), In("f32[s]"), In("f32[b, 1]")],
    ));
    all.push(case(
        "Min",
        vec![In("f32[b, s]"), In("f32[s]"), In("f32[]"), In("f32[b, s]")],
    ));
    all.push(case(
        "Sum",
        vec![In("f32[b, s]"), In("f32[s]"), In("f32[]")],
    ));
    for op in [
        "Neg", "Abs", "Exp", "Erf", "Sin", "Cos", "Tanh", "Sigmoid", "Relu", "Gelu", "Softplus",
    ] {
        all.push(case(op, vec![In("f32[b, s, 4]")]));
        all.push(case(op, vec![In("f32[]")]));
    }
    all.push(case("Gelu", vec![In("f32[b, 5]")]).attrs(Attrs::new().with("approximate", "tanh")));
    for op in [
        "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh",
    ] {
        all.push(case(op, vec![In("f32[b, s, 4]")]));
        all.push(case(op, vec![In("bf16[]")]));
    }
    for op in ["Log", "Sqrt", "Reciprocal"] {
        all.push(case(op, vec![In("f32[b, s, 4]")]));
    }
    for op in ["LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Mish"] {
        all.push(case(op, vec![In("f32[b, s, 4]")]));
        all.push(case(op, vec![In("f16[b, s]")]));
    }
    all.push(case("Elu", vec![In("f32[b, s]")]).attrs(Attrs::new().with("alpha", 0.5f32)));
    all.push(case("PRelu", vec![In("f32[b, s, 4]"), In("f32[s, 1]")]));
    for op in ["ArgMax", "ArgMin"] {
        let last = Attrs::new().with("axis", 1i64).with("keepdims", 0i64);
        all.push(case(op, vec![In("f32[b, s]")]).attrs(last));
    }
    all.push(case("TopK", vec![In("f32[b, s, 4]"), Ints(vec![2])]).outs(2, &[0]));
    let smallest = Attrs::new().with("axis", 1i64).with("largest", 0i64);
    all.push(
        case("TopK", vec![In("f32[b, 3, 4]"), Ints(vec![3])])
            .attrs(smallest)
            .outs(2, &[0]),
    );
    for op in ["Floor", "Ceil", "Round", "Sign"] {
        all.push(case(op, vec![In("f32[b, s]")]));
    }
    let fmod = || Attrs::new().with("fmod", 1i64);
    all.push(case("Mod", vec![In("f32[b, s]"), In("f32[s]")]).attrs(fmod()));
    for k in [0.0, 1.0, 2.0, 3.0, 0.5, -1.5] {
        all.push(case("Pow", vec![In("f32[b, s]"), Scalar(f, k)]));
    }
    all.push(case("Pow", vec![In("f32[b, s]"), Int(3)]));
    all.push(case("Pow", vec![In("f32[b, 1]"), In("f32[s]")]));
    all.push(case("Pow", vec![In("f32[b, 1]"), In("i64[s]")]));
    all.push(case(
        "Clip",
        vec![In("f32[b, s, 4]"), Scalar(f, -0.5), In("f32[]")],
    ));
    all.push(case(
        "Clip",
        vec![In("f32[b, s, 4]"), Operand::None, Scalar(f, 0.5)],
    ));
    all.push(case("Clip", vec![In("f32[b, s, 4]")]));
    all.push(case(
        "Where",
        vec![In("bool[s, 1]"), In("f32[b, s, 4]"), In("f32[4]")],
    ));
    all.push(case(
        "Where",
        vec![In("bool[b, s]"), In("f32[]"), In("f32[s]")],
    ));
    for op in ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"] {
        all.push(case(op, vec![In("f32[b, s]"), In("f32[s]")]));
    }
    for op in ["And", "Or", "Xor"] {
        all.push(case(op, vec![In("bool[b, s]"), In("bool[s]")]));
    }
    for op in ["IsNaN", "IsInf"] {
        all.push(case(op, vec![In("f32[b, s]")]));
    }
    all.push(case("Not", vec![In("bool[b, s]")]));
    let reductions = [
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceSumSquare",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
    ];
    for op in reductions {
        for keep in [0i64, 1] {
            let keep = || Attrs::new().with("keepdims", keep);
            all.push(case(op, vec![In("f32[b, s, 4]"), Ints(vec![-1])]).attrs(keep()));
            all.push(case(op, vec![In("f32[b, s, 4]"), Ints(vec![2, 0])]).attrs(keep()));
            all.push(case(op, vec![In("f32[b, s, 4]")]).attrs(keep()));
            all.push(case(op, vec![In("f32[]")]).attrs(keep()));
        }
    }
    for op in ["ReduceSum", "ReduceMean"] {
        let noop = Attrs::new().with("noop_with_empty_axes", 1i64);
        all.push(case(op, vec![In("f32[b, s]")]).attrs(noop));
        all.push(case(op, vec![In("f32[0, s]"), Ints(vec![1])]));
    }
    all.push(case("ReduceProd", vec![In("i64[b, s]"), Ints(vec![0])]));
    for (exclusive, reverse) in [(0i64, 0i64), (0, 1), (1, 0), (1, 1)] {
        let attrs = Attrs::new()
            .with("exclusive", exclusive)
            .with("reverse", reverse);
        all.push(case("CumSum", vec![In("f32[b, s]"), Int(-1)]).attrs(attrs));
    }
    for (a, b, upper, left) in [
        ("f32[s, s]", "f32[s, 4]", 1i64, 1i64),
        ("f32[b, 4, 4]", "f32[4, s]", 0, 1),
        ("f32[n, n]", "f32[b, s, n]", 0, 0),
    ] {
        let attrs = Attrs::new().with("upper", upper).with("left", left);
        all.push(case("SolveTriangular", vec![In(a), In(b)]).attrs(attrs));
    }
    // Sums down: provable, undecidable and mixed targets; a scalar; equal at run time though not provably.
    for (from, to) in [
        ("f32[b, s, 4]", "f32[s, 1]"),
        ("f32[b, s, 4]", "f32[one, s, n]"),
        ("f32[b, s, 4]", "f32[one, n]"),
        ("f32[b, s]", "f32[]"),
        ("f32[b, 0]", "f32[one, 1]"),
    ] {
        all.push(case("Add", vec![In(from), In(to)]));
    }
    for axis in [-1i64, 1, 0] {
        let at = || Attrs::new().with("axis", axis);
        all.push(case("Softmax", vec![In("f32[b, s, 4]")]).attrs(at()));
        all.push(case("LogSoftmax", vec![In("f32[b, s, 4]")]).attrs(at()));
        all.push(case("Softmax", vec![In("f32[b, 0]")]).attrs(at().with("axis", -1i64)));
    }
    let norm = |axis: i64| Attrs::new().with("axis", axis).with("epsilon", 1e-3f32);
    all.push(
        case(
            "LayerNormalization",
            vec![In("f32[b, s, 4]"), In("f32[4]"), In("f32[4]")],
        )
        .attrs(norm(-1)),
    );
    all.push(
        case(
            "LayerNormalization",
            vec![In("f32[b, s, 4]"), In("f32[s, 4]")],
        )
        .attrs(norm(1)),
    );
    all.push(
        case(
            "LayerNormalization",
            vec![In("f32[b, s, 4]"), In("f32[1, 4]"), In("f32[]")],
        )
        .attrs(norm(-2)),
    );
    all.push(
        case(
            "LayerNormalization",
            vec![In("f32[b, s, 4]"), In("f32[4]"), In("f32[4]")],
        )
        .attrs(norm(-1))
        .outs(3, &[0]),
    );
    all.push(
        case(
            "LayerNormalization",
            vec![In("f64[b, s, 4]"), In("f64[4]"), In("f64[4]")],
        )
        .attrs(norm(-1)),
    );
    all.push(
        case(
            "LayerNormalization",
            vec![In("f16[b, s, 4]"), In("f16[4]"), In("f16[4]")],
        )
        .attrs(norm(-1)),
    );
    all.push(case("RMSNormalization", vec![In("f32[b, s, 4]"), In("f32[4]")]).attrs(norm(-1)));
    all.push(
        case(
            "RMSNormalization",
            vec![In("f32[b, s, 4]"), In("f32[1, 4]")],
        )
        .attrs(norm(1)),
    );
    all.push(case("RMSNormalization", vec![In("f16[b, s, 4]"), In("f32[4]")]).attrs(norm(-1)));
    for reduction in ["none", "sum", "mean"] {
        for ignore in [None, Some(1i64), Some(-100)] {
            let mut attrs = Attrs::new().with("reduction", reduction);
            if let Some(i) = ignore {
                attrs = attrs.with("ignore_index", i);
            }
            let a = || attrs.clone();
            let loss = |ins| case("SoftmaxCrossEntropyLoss", ins).attrs(a());
            all.push(loss(vec![In("f32[n, 3]"), In("i64[n]")]));
            all.push(loss(vec![In("f32[n, 3]"), In("i64[n]")]).outs(2, &[0, 1]));
            all.push(loss(vec![In("f32[b, 3, s, 2]"), In("i32[b, s, 2]")]));
            let weights = || Floats(vec![0.5, 2.0, 1.5]);
            all.push(loss(vec![In("f32[n, 3]"), In("i64[n]"), weights()]));
            all.push(loss(vec![In("f32[b, 3, s]"), In("i64[b, s]"), weights()]));
            let nll = |ins| case("NegativeLogLikelihoodLoss", ins).attrs(a());
            all.push(nll(vec![In("f32[n, 3]"), In("i64[n]")]));
            all.push(nll(vec![In("f32[b, 3, s]"), In("i64[b, s]")]));
            all.push(nll(vec![In("f32[b, 3, s]"), In("i64[b, s]"), weights()]));
        }
    }
    all.extend(super::layout_cases::cases());
    all.extend(convolutions());
    all
}

fn convolutions() -> Vec<Case> {
    let window = |pads: &[i64], strides: &[i64], group: i64| {
        Attrs::new()
            .with("pads", pads.to_vec())
            .with("strides", strides.to_vec())
            .with("group", group)
    };
    let spread = |more: &[i64]| window(&[0, 1], &[3], 2).with("output_padding", more.to_vec());
    vec![
        case("Conv", vec![In("f32[b, 4, n, n]"), In("f32[6, 4, 3, 2]")]).attrs(window(
            &[1, 0, 1, 0],
            &[2, 1],
            1,
        )),
        case(
            "Conv",
            vec![In("f16[b, 4, n]"), In("f16[6, 2, 3]"), In("f16[6]")],
        )
        .attrs(window(&[0, 1], &[1], 2)),
        case("Conv", vec![In("f32[0, 4, 5]"), In("f32[6, 4, 3]")]),
        case(
            "Conv",
            vec![In("f32[b, 2, 3, 3, 3]"), In("f32[4, 2, 2, 2, 2]")],
        )
        .attrs(Attrs::new().with("auto_pad", "VALID")),
        case(
            "ConvTranspose",
            vec![In("f32[b, 4, n]"), In("f32[4, 3, 5]"), In("f32[6]")],
        )
        .attrs(spread(&[2])),
        case(
            "ConvTranspose",
            vec![In("bf16[b, 4, n]"), In("bf16[4, 3, 5]")],
        )
        .attrs(spread(&[0])),
    ]
}
