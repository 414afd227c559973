//! Products over chosen axes: einsum and what is one in other words; distances; weights by direction and length.

use super::composed::id;
use super::signature::{Call, Op};
use super::{TensorId, Value};
use crate::frontend::lower::standard;
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, Same};

pub const OPS: &[Op] = &[
    (
        "_cdist_forward(x1: t, x2: t, p: f, compute_mode: i?)",
        distances,
    ),
    ("_weight_norm(v: t, g: t, dim: i?)", weight_norm),
    ("_weight_norm_interface(v: t, g: t, dim: i?)", |c| {
        Ok(Value::Tuple(vec![weight_norm(c)?, Value::Unknown]))
    }),
    (
        "_trilinear(i1: t, i2: t, i3: t, expand1: I, expand2: I, expand3: I, sumdim: I, unroll_dim: i?)",
        trilinear,
    ),
    (
        "addmv(self: t, mat: t, vec: t, *, beta: s?, alpha: s?)",
        |c| {
            let y = c.run("mv", [c.given("mat"), c.given("vec")])?;
            added(c, y)
        },
    ),
    (
        "addr(self: t, vec1: t, vec2: t, *, beta: s?, alpha: s?)",
        |c| {
            let y = c.run("outer", [c.given("vec1"), c.given("vec2")])?;
            added(c, y)
        },
    ),
    (
        "bilinear(input1: t, input2: t, weight: t, bias: t?)",
        bilinear,
    ),
    ("cdist(x1: t, x2: t, p: f?, compute_mode: i?)", distances),
    ("chain_matmul(matrices: l)", |c| chained(c, "matrices")),
    ("einsum(equation: S, tensors: l, *, path: I?)", |c| {
        let tensors = c.tensors("tensors")?;
        let equation = c.str("equation", "")?.to_string();
        sum_of_products(c, &equation, &tensors)
    }),
    ("ger(self: t, vec2: t)", |c| {
        c.run("outer", [c.given("self"), c.given("vec2")])
    }),
    ("linalg_matrix_power(self: t, n: i)", power),
    ("linalg_multi_dot(tensors: l)", |c| chained(c, "tensors")),
    ("linalg_vecdot(x: t, y: t, *, dim: i?)", |c| {
        let y = c.run("mul", [c.given("x"), c.given("y")])?;
        let axis = Value::ints(&[c.int("dim", -1)?]);
        c.run("sum", [y, axis])
    }),
    ("outer(self: t, vec2: t)", |c| {
        let a = c.run("unsqueeze", [c.given("self"), 1.into()])?;
        c.run("mul", [a, c.given("vec2")])
    }),
    (
        "tensordot(self: t, other: t, dims_self: I, dims_other: I)",
        tensordot,
    ),
    ("vdot(self: t, other: t)", |c| {
        c.run("dot", [c.given("self"), c.given("other")])
    }),
];

/// Sums of products over labelled axes (ONNX Einsum); operands in one element type.
fn sum_of_products(c: &mut Call, equation: &str, tensors: &[TensorId]) -> Result<Value> {
    let listed: Vec<Value> = tensors.iter().map(|t| Value::Tensor(*t)).collect();
    let dtype = c.low.promoted(&listed.iter().collect::<Vec<_>>())?;
    let mut ins = Vec::with_capacity(tensors.len());
    for operand in &listed {
        ins.push(Some(c.low.operand(operand, dtype)?));
    }
    let attrs = Attrs::new().with("equation", equation);
    let y = standard(&mut c.low.b, "Einsum", &attrs, &ins, 1)?[0];
    c.made(y)
}

/// β·self + α·y; with β = 0 nothing of `self` counts.
fn added(c: &mut Call, y: Value) -> Result<Value> {
    let y = match c.get("alpha").cloned() {
        Some(alpha) => c.run("mul", [y, alpha])?,
        None => y,
    };
    match c.get("beta").cloned() {
        Some(Value::Int(n)) if n == Dim::ZERO => Ok(y),
        Some(Value::Float(0.0)) => Ok(y),
        Some(beta) => {
            let term = c.run("mul", [c.given("self"), beta])?;
            c.run("add", [term, y])
        }
        None => c.run("add", [c.given("self"), y]),
    }
}

fn bilinear(c: &mut Call) -> Result<Value> {
    let operands = [
        c.tensor("input1")?,
        c.tensor("weight")?,
        c.tensor("input2")?,
    ];
    let y = sum_of_products(c, "...i,oij,...j->...o", &operands)?;
    match c.has("bias") {
        true => c.run("add", [y, c.given("bias")]),
        false => Ok(y),
    }
}

fn chained(c: &mut Call, name: &str) -> Result<Value> {
    let mut product: Option<Value> = None;
    for matrix in c.tensors(name)? {
        product = Some(match product {
            None => matrix.into(),
            Some(so_far) => c.run("matmul", [so_far, matrix.into()])?,
        });
    }
    product.ok_or_else(|| c.fail("op", "no matrices"))
}

fn power(c: &mut Call) -> Result<Value> {
    let n = c.int("n", 1)?;
    if !(1..=1 << 20).contains(&n) {
        return Err(c.unsupported(format!("a power of {n}")));
    }
    let (mut square, mut left) = (c.given("self"), n);
    let mut product: Option<Value> = None;
    while left > 0 {
        if left % 2 == 1 {
            product = Some(match product {
                None => square.clone(),
                Some(so_far) => c.run("matmul", [so_far, square.clone()])?,
            });
        }
        left /= 2;
        if left > 0 {
            square = c.run("matmul", [square.clone(), square])?;
        }
    }
    product.ok_or_else(|| c.fail("op", "no product"))
}

fn tensordot(c: &mut Call) -> Result<Value> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let (left, right) = (c.low.dims(a).len(), c.low.dims(b).len());
    if left + right > 26 {
        return Err(c.unsupported("that many axes"));
    }
    let axes = |c: &Call, name: &str, rank: usize| -> Result<Vec<usize>> {
        let listed = c.ints(name)?.unwrap_or_default();
        listed.iter().map(|a| c.in_rank(*a, rank)).collect()
    };
    let (ours, theirs) = (axes(c, "dims_self", left)?, axes(c, "dims_other", right)?);
    let held = |t: TensorId, axes: &[usize]| axes.iter().try_for_each(|x| c.size(t, *x).map(drop));
    held(a, &ours)?;
    held(b, &theirs)?;
    if ours.len() != theirs.len() {
        return Err(c.fail(
            "axis",
            "`dims_self` and `dims_other` have different lengths",
        ));
    }
    let first: Vec<char> = (0..left).map(letter).collect();
    let mut second: Vec<char> = (left..left + right).map(letter).collect();
    for (a, b) in ours.iter().zip(&theirs) {
        second[*b] = first[*a];
    }
    let kept = |labels: &[char], summed: &[usize]| -> String {
        let each = labels.iter().enumerate();
        each.filter(|(i, _)| !summed.contains(i))
            .map(|(_, l)| *l)
            .collect()
    };
    let equation = format!(
        "{},{}->{}{}",
        first.iter().collect::<String>(),
        second.iter().collect::<String>(),
        kept(&first, &ours),
        kept(&second, &theirs)
    );
    sum_of_products(c, &equation, &[a, b])
}

/// The label of an axis in an equation of at most 26.
fn letter(axis: usize) -> char {
    char::from(b'a' + axis as u8)
}

/// The product of three tensors, each with axes of size 1 put in, summed over `sumdim`.
fn trilinear(c: &mut Call) -> Result<Value> {
    let (mut tensors, mut labels) = (Vec::with_capacity(3), Vec::with_capacity(3));
    let mut rank = None;
    for (name, expanded) in [("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")] {
        let tensor = c.tensor(name)?;
        let put_in = c.ints(expanded)?.unwrap_or_default();
        let all = c.low.dims(tensor).len() + put_in.len();
        if all > 26 || *rank.get_or_insert(all) != all {
            return Err(c.fail("shape", "the operands have different ranks"));
        }
        let put_in: Vec<usize> = put_in
            .iter()
            .map(|a| c.in_rank(*a, all))
            .collect::<Result<_>>()?;
        let own = (0..all).filter(|axis| !put_in.contains(axis));
        labels.push(own.map(letter).collect::<String>());
        tensors.push(tensor);
    }
    let rank = rank.unwrap_or(0);
    let summed = c.ints("sumdim")?.unwrap_or_default();
    let summed: Vec<usize> = summed
        .iter()
        .map(|a| c.in_rank(*a, rank))
        .collect::<Result<_>>()?;
    // An axis that no operand has is of size 1.
    let held = |axis: &usize| labels.iter().any(|l| l.contains(letter(*axis)));
    if let Some(axis) = (0..rank).find(|axis| !held(axis)) {
        return Err(c.unsupported(format!("an axis {axis} that no operand has")));
    }
    let kept: String = (0..rank)
        .filter(|a| !summed.contains(a))
        .map(letter)
        .collect();
    let equation = format!("{}->{kept}", labels.join(","));
    sum_of_products(c, &equation, &tensors)
}

/// The p-norms of the differences of all pairs of rows.
fn distances(c: &mut Call) -> Result<Value> {
    let a = c.run("unsqueeze", [c.given("x1"), (-2).into()])?;
    let b = c.run("unsqueeze", [c.given("x2"), (-3).into()])?;
    let off = c.run("sub", [a, b])?;
    let p = c.float("p", 2.0)?;
    let axes = Value::ints(&[-1]);
    if p != 2.0 {
        return c.run("linalg_vector_norm", [off, p.into(), axes]);
    }
    // Where two rows are one, the root has no slope, and its gradient is 0.
    let square = c.run("mul", [off.clone(), off])?;
    let sum = c.run("sum", [square, axes])?;
    let zero = c.run("eq", [sum.clone(), 0.into()])?;
    let safe = c.run("where", [zero.clone(), 1.0.into(), sum])?;
    let root = c.run("sqrt", [safe])?;
    c.run("where", [zero, 0.0.into(), root])
}

/// `g·v/|v|`, the length over all axes but `dim`.
fn weight_norm(c: &mut Call) -> Result<Value> {
    let v = c.tensor("v")?;
    let rank = c.low.dims(v).len();
    let kept = match c.int("dim", 0)? {
        -1 => None,
        axis => Some(c.in_rank(axis, rank)?),
    };
    let axes = (0..rank).filter(|a| Some(*a) != kept);
    let axes: Vec<i64> = axes.map(|a| a as i64).collect();
    let length = c.run(
        "linalg_vector_norm",
        [v.into(), 2.0.into(), Value::ints(&axes), true.into()],
    )?;
    let scale = c.run("div", [c.given("g"), length])?;
    let y = c.run("mul", [v.into(), scale])?;
    let whole = c.low.dims(id(c, &y)?).to_vec();
    let own = c.low.dims(v);
    let fits =
        whole.len() == own.len() && whole.iter().zip(own).all(|(a, b)| a.same(b) == Same::Yes);
    match fits {
        true => Ok(y),
        false => Err(c.fail("shape", "`g` does not fit the axes that are kept")),
    }
}
