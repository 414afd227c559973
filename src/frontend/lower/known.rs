//! Numbers that a file computes in floating point and that are known when it is read: `ceil((length - kernel) / stride)`.
//!
//! Every step is rounded as the runtime rounds it, so only operations count whose result IEEE 754 fixes.

use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{DType, Graph, ValueId};
use ckpt_passes::ops::arith::{ABS, ADD, CEIL, DIV, FLOOR, MUL, NEG, ROUND, SUB};
use ckpt_passes::ops::cast::CAST;
use ckpt_passes::ops::math::SQRT;

/// The largest number of operations behind one number.
const MAX_STEPS: u32 = 64;

/// Larger doubles do not tell neighbours apart.
const MAX_WHOLE: i64 = 1 << 53;

/// Returns the only element of a value, if it is known.
pub fn number(graph: &Graph, contents: &Contents, v: ValueId) -> Option<f64> {
    let mut left = MAX_STEPS;
    element(graph, contents, v, &mut left)
}

fn element(graph: &Graph, contents: &Contents, v: ValueId, left: &mut u32) -> Option<f64> {
    *left = left.checked_sub(1)?;
    let ty = graph.value(v).ty.as_ref()?;
    if !ty.elements().is_one() {
        return None;
    }
    if let Some([known]) = contents.get(v) {
        let whole = known.as_const()?;
        return (whole.abs() <= MAX_WHOLE).then_some(whole as f64);
    }
    if let Some(tensor) = graph.value(v).tensor() {
        let is_parameter = graph.origins.get(&v).and_then(|o| o.is_parameter);
        return tensor.get_f64(0).filter(|_| is_parameter != Some(true));
    }
    let node = graph.node(graph.def_node(v)?);
    let mut operand = |slot: usize| element(graph, contents, node.operand(slot)?, left);
    let x = operand(0)?;
    let y = match node.op {
        op if op == &ADD => x + operand(1)?,
        op if op == &SUB => x - operand(1)?,
        op if op == &MUL => x * operand(1)?,
        op if op == &DIV => x / operand(1)?,
        op if op == &NEG => -x,
        op if op == &ABS => x.abs(),
        op if op == &SQRT => x.sqrt(),
        op if op == &CEIL => x.ceil(),
        op if op == &FLOOR => x.floor(),
        op if op == &ROUND => x.round_ties_even(),
        op if op == &CAST || op.is_layout() => x,
        _ => return None,
    };
    // Rounding a double that was rounded itself gives the same float32.
    match ty.dtype {
        DType::F64 => Some(y),
        DType::F32 => Some(f64::from(y as f32)),
        _ => None,
    }
}
