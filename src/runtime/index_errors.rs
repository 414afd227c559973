//! Explains an index out of range: the input that holds it, where it is, and what it may be.
//!
//! Kernels see operands that were reshaped, padded and sliced. The caller knows its own tensors, so the index is looked for
//! there.

use super::values::Values;
use ckpt_passes::Error;
use ckpt_passes::analysis::index_bounds::initializer;
use ckpt_passes::ir::op::Indices;
use ckpt_passes::ir::{Def, Graph, Id, Node, NodeId, ValueId};
use ckpt_passes::ops::loss::NO_LABEL;
use std::collections::BTreeSet;
use tch::{Kind, Tensor};

/// The numbers that an operand may hold.
struct Range {
    low: i64,
    high: i64,
    /// A number outside of the range that is allowed too.
    also: Option<i64>,
}

impl Range {
    fn holds(&self, n: i64) -> bool {
        (self.low..=self.high).contains(&n) || self.also == Some(n)
    }
}

/// Returns `error`, of node `id`, in terms of the input that holds the index; unchanged for other errors and for indices
/// that the model computes.
pub(super) fn explained(
    graph: &Graph,
    id: NodeId,
    values: &Values,
    error: Box<Error>,
) -> Box<Error> {
    if error.code() != "index" {
        return error;
    }
    let node = graph.node(id);
    let found = (|| {
        let range = range(node, values)?;
        let slot = usize::from(node.op.indices != Indices::OfSize);
        let mut inputs = sources(graph, node.operand(slot)?).into_iter();
        inputs.find_map(|input| {
            let (n, at) = first_outside(values.tensors[Id::index(input)].as_ref()?, &range)?;
            Some((input, n, at, range.low, range.high, range.also))
        })
    })();
    let table = node.operand(0).and_then(|v| initializer(graph, v));
    let table = table.map(|v| format!("`{}`", graph.value(v).name));
    let Some((input, n, at, low, high, also)) = found else {
        return match table {
            Some(table) => error.found(format!("the table is {table}")),
            None => error,
        };
    };
    let name = &graph.value(input).name;
    let what = format!("input `{name}` holds {n} at {at:?}, which is out of range");
    let rows = table.unwrap_or("what it looks up".into());
    Error::usage("data", what).expected(match also {
        Some(ignored) => {
            format!("a class from {low} to {high}, or {ignored} for a position without a label")
        }
        None => format!("a row of {rows}, from 0 to {high}, or from {low} counted from the end"),
    })
}

/// Returns what the indices of a node may be.
fn range(node: &Node, values: &Values) -> Option<Range> {
    if node.op.indices == Indices::OfSize {
        let n = node.attrs.opt_int("size")?;
        let ignored = node.attrs.opt_int("ignore_index");
        return Some(Range {
            low: if ignored.is_some() { 0 } else { -n },
            high: n - 1,
            also: ignored,
        });
    }
    let size = values.tensors[Id::index(node.operand(0)?)].as_ref()?.size();
    let rows = |axis: i64| {
        let axis = if axis < 0 {
            axis + size.len() as i64
        } else {
            axis
        };
        let n = *size.get(usize::try_from(axis).ok()?)?;
        Some(Range {
            low: -n,
            high: n - 1,
            also: None,
        })
    };
    match node.op.indices {
        Indices::OfAxis => rows(node.attrs.opt_int("axis").unwrap_or(0)),
        Indices::Tuples => rows(node.attrs.opt_int("batch_dims").unwrap_or(0)),
        Indices::Classes => Some(Range {
            low: 0,
            high: size.get(1)? - 1,
            also: Some(node.attrs.opt_int("ignore_index").unwrap_or(NO_LABEL)),
        }),
        Indices::None | Indices::PassedOn | Indices::Depth | Indices::OfSize => None,
    }
}

/// Returns the integer inputs whose numbers a value passes on as they are.
fn sources(graph: &Graph, value: ValueId) -> Vec<ValueId> {
    let (mut stack, mut seen, mut inputs) = (vec![value], BTreeSet::new(), Vec::new());
    while let Some(value) = stack.pop() {
        if !graph.ty(value).dtype.is_int() || !seen.insert(value) {
            continue;
        }
        match &graph.value(value).def {
            Def::Input => inputs.push(value),
            Def::Init(_) => {}
            Def::Node { node, .. } => {
                let node = graph.node(*node);
                if node.op.is_layout() || node.op.indices == Indices::PassedOn {
                    stack.extend(node.operands());
                }
            }
        }
    }
    inputs
}

/// Returns the first number outside of a range, and its index.
fn first_outside(tensor: &Tensor, range: &Range) -> Option<(i64, Vec<i64>)> {
    let numbers = tensor.to_kind(Kind::Int64).contiguous().view([-1]);
    let numbers = Vec::<i64>::try_from(numbers).ok()?;
    let flat = numbers.iter().position(|n| !range.holds(*n))?;
    let (mut rest, mut at) = (flat as i64, tensor.size());
    for i in at.iter_mut().rev() {
        (rest, *i) = (rest / *i, rest % *i);
    }
    Some((numbers[flat], at))
}
