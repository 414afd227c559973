//! Whether a bias can hide a key.

use crate::analysis::residual_stream::Flow;
use crate::analysis::symbolic_elements::Elements;
use crate::ir::op::OpClass;
use crate::ir::{Def, Graph, Node, ValueId};
use crate::ops::logic;
use rustc_hash::FxHashSet;

/// A smaller magnitude hides nothing beside a number at [`super::mask::HIDDEN`].
const VAST: f64 = 1e20;
/// Most values that are visited for one bias. A mask consists of a few dozen.
const MAX_VISITS: usize = 512;

/// Returns true if some element of a bias may be so low that it hides a key: a number that it is made of is, or comes
/// from outside the model. Trained tensors, and what products and lookups make of them, are assumed to hold ordinary
/// numbers.
pub fn may_hide(graph: &Graph, flow: &Flow, elements: &mut Elements, bias: ValueId) -> bool {
    let (mut open, mut seen) = (vec![bias], FxHashSet::default());
    while let Some(v) = open.pop() {
        if !seen.insert(v) {
            continue;
        }
        if seen.len() > MAX_VISITS {
            return true;
        }
        if let Some(number) = elements.number(v) {
            if is_vast(number) {
                return true;
            }
            continue;
        }
        match &graph.value(v).def {
            Def::Input if graph.ty(v).dtype.is_float() => return true,
            Def::Init(_) if flow.is_parameter[v] => {}
            Def::Init(tensor) => {
                let mut numbers = (0..tensor.elements() as usize).map(|i| tensor.get_f64(i));
                if numbers.any(|n| n.is_none_or(is_vast)) {
                    return true;
                }
            }
            Def::Node { node, .. } => open.extend(sources(graph, flow, graph.node(*node), v)),
            Def::Input => {}
        }
    }
    false
}

/// Returns true for vast numbers of either sign: a mask may be subtracted, or multiplied by a negative number.
fn is_vast(number: f64) -> bool {
    number.is_nan() || number.abs() >= VAST
}

/// Returns the operands whose numbers the result `v` of a node is made of.
fn sources(graph: &Graph, flow: &Flow, node: &Node, v: ValueId) -> Vec<ValueId> {
    let ins = node.operands();
    if node.op == &logic::WHERE {
        return ins.skip(1).collect();
    }
    match node.op.class {
        OpClass::Elementwise | OpClass::Cast => ins.collect(),
        _ if flow.active[v] && !node.op.is_layout() => Vec::new(),
        _ => ins
            .filter(|x| graph.ty(*x).dtype == graph.ty(v).dtype)
            .collect(),
    }
}
