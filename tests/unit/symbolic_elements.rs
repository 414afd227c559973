//! Elements as functions of their indices, against contents that typing computes in its own way.

use ckpt_passes::analysis::residual_stream::Flow;
use ckpt_passes::analysis::symbolic_elements::{Condition, Element, Elements};
use ckpt_passes::ir::{Attrs, DType, Dim, Graph, Tensor, Ty, ValueId};
use ckpt_passes::ops::{Builder, EmitExt, arith, cast, concat, index, logic, rule, shape, slice};
use ckpt_passes::testing::Random;
use ckpt_passes::text::parse;
use ckpt_passes::transform::infer::infer;

/// A polynomial at indices.
fn number(d: &Dim, at: &[i64]) -> i64 {
    d.eval(&|name| {
        at.get(name.strip_prefix('#')?.parse::<usize>().ok()?)
            .copied()
    })
    .unwrap_or_else(|| panic!("{d} at {at:?}"))
}

/// Contents of a value at constant indices.
type Look<'a> = &'a dyn Fn(ValueId, &[i64]) -> Option<i64>;

fn truth(c: &Condition, at: &[i64], look: Look) -> Option<bool> {
    Some(match c {
        Condition::Is(x) => *x,
        Condition::AtLeast0(d) => number(d, at) >= 0,
        Condition::Data {
            value,
            at: to,
            holds,
        } => {
            let place: Vec<i64> = to.iter().map(|d| number(d, at)).collect();
            (look(*value, &place)? != 0) == *holds
        }
        Condition::Difference {
            value,
            at: [a, b],
            least,
        } => {
            let place = |to: &[Dim]| to.iter().map(|d| number(d, at)).collect::<Vec<i64>>();
            look(*value, &place(a))? - look(*value, &place(b))? >= *least
        }
        Condition::All(list) => {
            let all: Option<Vec<bool>> = list.iter().map(|c| truth(c, at, look)).collect();
            all?.into_iter().all(|x| x)
        }
        Condition::Any(list) => {
            let all: Option<Vec<bool>> = list.iter().map(|c| truth(c, at, look)).collect();
            all?.into_iter().any(|x| x)
        }
    })
}

fn value(e: &Element, at: &[i64], look: Look) -> Option<f64> {
    Some(match e {
        Element::Int(d) => number(d, at) as f64,
        Element::Number(x) => *x,
        Element::Bool(c) => f64::from(u8::from(truth(c, at, look)?)),
        Element::Either(c, a, b) => {
            if truth(c, at, look)? {
                *a
            } else {
                *b
            }
        }
        Element::Of(v, to) => {
            let place: Vec<i64> = to.iter().map(|d| number(d, at)).collect();
            look(*v, &place)? as f64
        }
    })
}

fn flat(dims: &[i64], at: &[i64]) -> usize {
    at.iter().zip(dims).fold(0, |f, (i, d)| f * d + i) as usize
}

/// All indices into a shape.
fn places(dims: &[i64]) -> Vec<Vec<i64>> {
    let total: i64 = dims.iter().product();
    (0..total)
        .map(|mut f| {
            let mut at = vec![0; dims.len()];
            for (i, d) in dims.iter().enumerate().rev() {
                at[i] = f % d;
                f /= d;
            }
            at
        })
        .collect()
}

/// A graph of integer and boolean ops whose contents are all known, and the values in it.
fn random(r: &mut Random) -> (Graph, Vec<ValueId>) {
    let mut g = Graph::new("g");
    let x = g.add_input("x", Some(Ty::new(DType::F32, [Dim::from(1)])));
    g.set_outputs(vec![x]);
    let mut b = Builder::new(&mut g);
    let ramp = |b: &mut Builder, r: &mut Random, dims: &[u64]| {
        let total: u64 = dims.iter().product();
        let step = r.below(4) as i64 - 1;
        let start = r.below(5) as i64 - 2;
        let odd = r.below(3) == 0;
        let bytes: Vec<u8> = (0..total as i64)
            .map(|i| {
                if odd {
                    (i * 7 + start) % 5
                } else {
                    start + step * i
                }
            })
            .flat_map(i64::to_le_bytes)
            .collect();
        b.constant("c", Tensor::new(DType::I64, dims.to_vec(), bytes))
    };
    let mut pool = vec![
        ramp(&mut b, r, &[4]),
        ramp(&mut b, r, &[3, 4]),
        ramp(&mut b, r, &[2, 1, 4]),
    ];
    for _ in 0..14 {
        let a = pool[r.below(pool.len())];
        let c = pool[r.below(pool.len())];
        let dims = b.ty(a).static_dims().unwrap();
        let is_bool = b.ty(a).dtype == DType::Bool;
        let rank = dims.len();
        let ints = |b: &mut Builder, n: &[i64]| b.ints(n);
        let made = match r.below(12) {
            0 if rank > 0 => {
                let mut perm: Vec<i64> = (0..rank as i64).collect();
                perm.rotate_left(r.below(rank));
                b.emit(&shape::TRANSPOSE, &[a], Attrs::new().with("perm", perm))
            }
            1 => {
                let axes = ints(&mut b, &[r.below(rank + 1) as i64]);
                b.emit(&shape::UNSQUEEZE, &[a, axes], Attrs::new())
            }
            2 => {
                let mut to = dims.clone();
                to.insert(0, 2);
                let to = ints(&mut b, &to);
                b.emit(&shape::EXPAND, &[a, to], Attrs::new())
            }
            3 => {
                let total: i64 = dims.iter().product();
                let target = match r.below(3) {
                    0 => vec![total],
                    1 if total % 2 == 0 => vec![2, total / 2],
                    _ if total % 4 == 0 => vec![total / 4, 1, 4],
                    _ => vec![1, total],
                };
                let to = ints(&mut b, &target);
                b.emit(&shape::RESHAPE, &[a, to], Attrs::new())
            }
            4 if rank > 0 => {
                let axis = r.below(rank);
                let start = r.below(dims[axis].max(1) as usize) as i64;
                let start = if r.below(2) == 0 {
                    start
                } else {
                    start - dims[axis]
                };
                let parts: Vec<ValueId> = [start, i64::MAX, axis as i64, 1 + r.below(2) as i64]
                    .iter()
                    .map(|n| b.ints(&[*n]))
                    .collect();
                b.emit(
                    &slice::SLICE,
                    &[a, parts[0], parts[1], parts[2], parts[3]],
                    Attrs::new(),
                )
            }
            5 if rank > 0 => {
                let axis = r.below(rank) as i64;
                b.emit(&concat::CONCAT, &[a, a], Attrs::new().with("axis", axis))
            }
            6 if rank > 0 && dims[0] > 0 => {
                let picks: Vec<i64> = (0..2)
                    .map(|_| r.below(dims[0] as usize) as i64 - dims[0])
                    .collect();
                let picks = ints(&mut b, &picks);
                b.emit(&index::GATHER, &[a, picks], Attrs::new())
            }
            7 if is_bool => b.emit(&logic::NOT, &[a], Attrs::new()),
            7 => {
                let k = b.int(r.below(3) as i64);
                b.emit(&arith::MUL, &[a, k], Attrs::new())
            }
            8 => b.emit(
                &cast::CAST,
                &[a],
                Attrs::new().with("to", if is_bool { DType::I64 } else { DType::Bool }),
            ),
            9 if rank > 0 => {
                let repeats: Vec<i64> = (0..rank).map(|_| 1 + r.below(2) as i64).collect();
                let repeats = ints(&mut b, &repeats);
                b.emit(&concat::TILE, &[a, repeats], Attrs::new())
            }
            _ => {
                if rule::broadcast_two(&b.ty(a).dims, &b.ty(c).dims).is_none() {
                    continue;
                }
                let both_bool = is_bool && b.ty(c).dtype == DType::Bool;
                let op = match (both_bool, is_bool == (b.ty(c).dtype == DType::Bool)) {
                    (true, _) => [&logic::AND, &logic::OR, &logic::XOR][r.below(3)],
                    (_, true) => [
                        &arith::ADD,
                        &arith::SUB,
                        &logic::LESS,
                        &logic::GREATER_OR_EQUAL,
                        &logic::EQUAL,
                    ][r.below(5)],
                    _ => continue,
                };
                b.emit(op, &[a, c], Attrs::new())
            }
        };
        if let Ok(v) = made
            && b.ty(v).elements().as_const().is_some_and(|n| n <= 64)
        {
            pool.push(v);
        }
    }
    (g, pool)
}

#[test]
fn elements_are_what_typing_computes() {
    let (mut compared, mut closed) = (0, 0);
    for seed in 1..=400 {
        let (mut g, pool) = random(&mut Random(seed * 7919));
        let contents = infer(&mut g).unwrap();
        let flow = Flow::new(&g).unwrap();
        let mut elements = Elements::new(&g, &flow);
        let look = |v: ValueId, at: &[i64]| -> Option<i64> {
            let dims = g.ty(v).static_dims()?;
            contents.get(v)?.get(flat(&dims, at))?.as_const()
        };
        for v in pool {
            let Some(known) = contents.get(v) else {
                continue;
            };
            let dims = g.ty(v).static_dims().unwrap();
            let sizes = g.ty(v).dims.clone();
            let element = elements.ask(v, &sizes);
            closed += usize::from(!matches!(element, Element::Of(..)));
            for at in places(&dims) {
                let expected = known[flat(&dims, &at)].as_const().unwrap() as f64;
                assert_eq!(
                    value(&element, &at, &look),
                    Some(expected),
                    "seed {seed}, `{}` at {at:?}: {element:?}\n{}",
                    g.value(v).name,
                    ckpt_passes::text::print(&g)
                );
                compared += 1;
            }
        }
    }
    assert!(
        compared > 20_000 && closed > 2_000,
        "{compared} compared, {closed} closed"
    );
}

/// The element of `%y` in the space of its own shape, as text.
fn element(body: &str) -> String {
    let text = format!(
        "graph @g imported (%x: i64[batch, seq], %w: f32[seq]) -> (%y) {{\n  init %zero : i64[] = 0\n  \
         init %one : i64[] = 1\n  init %a0 : i64[1] = [0]\n  init %a1 : i64[1] = [1]\n  \
         init %end : i64[1] = [9223372036854775807]\n  init %last : i64[1] = [-1]\n  \
         %n = Shape %x {{start=1, end=2}}\n  %m = Shape %x {{start=0, end=1}}\n  %len = Squeeze %n\n  \
         %r = Range %zero, %len, %one\n{body}}}\n"
    );
    let mut g = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    infer(&mut g).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let flow = Flow::new(&g).unwrap();
    let y = g.outputs()[0];
    let sizes = g.ty(y).dims.clone();
    let said = match Elements::new(&g, &flow).ask(y, &sizes) {
        Element::Int(d) => d.to_string(),
        Element::Of(v, at) => format!("%{} {at:?}", g.value(v).name),
        other => format!("{other:?}"),
    };
    // Index variables are data-dependent sizes with names that need quotes.
    said.replace("?\"", "").replace('"', "")
}

#[test]
fn positions_and_packed_sequences() {
    assert_eq!(element("  %y = Add %r, %len\n"), "seq + #0");
    // Differences of positions, with one before the first: 1 everywhere, so no document begins.
    let packed = "
  %rows = Concat %m, %n {axis=0}
  %u = Unsqueeze %r, %a0
  %p = Expand %u, %rows
  %first = Slice %p, %a0, %a1, %a1
  %before = Sub %first, %one
  %all = Concat %before, %p {axis=1}
  %head = Slice %all, %a0, %last, %a1
  %tail = Slice %all, %a1, %end, %a1
  %step = Sub %tail, %head
  %same = Equal %step, %one
  %new = Not %same
  %flags = Cast %new {to=i64}
  %y = CumSum %flags, %one
";
    assert_eq!(element(packed), "0");
    // One that starts elsewhere is no continuation: nothing is said.
    let jump = packed.replace("%before = Sub %first, %one", "%before = Sub %first, %len");
    assert!(element(&jump).starts_with('%'), "{}", element(&jump));
    // A running sum of ones, from either end.
    let ones = "  %ones = ConstantOfShape %n {value=tensor i64[1] [1]}\n";
    assert_eq!(
        element(&format!("{ones}  %y = CumSum %ones, %zero\n")),
        "#0 + 1"
    );
    assert_eq!(
        element(&format!(
            "{ones}  %y = CumSum %ones, %zero {{reverse=1, exclusive=1}}\n"
        )),
        "seq - #0 - 1"
    );
}

#[test]
fn gathers_through_flat_indices() {
    // x[b, i] looked up at b*seq + i of the flattened operand.
    let body = "
  init %turn : i64[2] = [-1, 1]
  %flat = Reshape %x, %turn
  %blen = Squeeze %m
  %b = Range %zero, %blen, %one
  %bu = Unsqueeze %b, %a1
  %base = Mul %bu, %n
  %i = Unsqueeze %r, %a0
  %at = Add %base, %i
  %got = Gather %flat, %at
  init %a2 : i64[1] = [2]
  %y = Squeeze %got, %a2
";
    assert_eq!(element(body), "%x [#0, #1]");
    // Negative indices count from the end; which of both a symbolic one is, is not always told.
    assert_eq!(
        element("  %y = Gather %x, %last {axis=1}\n"),
        "%x [#0, seq - 1]"
    );
    let unsure = element("  %k = Sub %r, %one\n  %y = Gather %x, %k {axis=1}\n");
    assert_eq!(unsure, "%y [#0, #1]");
}

#[test]
fn what_is_trained_is_no_constant() {
    let text = "graph @g imported (%x: f32[4]) -> (%y) {
  init %w : f32[4] = [1, 1, 1, 1]
  %z = Mul %x, %w
  %y = Add %z, %w
}
";
    let mut g = parse(text).unwrap();
    infer(&mut g).unwrap();
    let flow = Flow::new(&g).unwrap();
    let w = g.find_value("w").unwrap();
    assert_eq!(Elements::new(&g, &flow).number(w), None);
}
