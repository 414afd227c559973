//! Whether a bias can hide a key.

use crate::analysis::residual_stream::Flow;
use crate::analysis::symbolic_elements::Elements;
use crate::ir::op::OpClass;
use crate::ir::{Def, Graph, Id, ValueId};
use crate::ops::logic;
use rustc_hash::FxHashSet;

/// Beside what is at [`super::mask::HIDDEN`] a number nearer to 0 than this hides nothing.
const VAST: f64 = 1e20;
/// Most values that are looked at for one bias; a mask is made of a few dozen.
const MAX_VISITS: usize = 512;

/// Whether some element of a bias may be so low that it hides a key, as far as the file tells: some number that it is
/// made of is, or comes from outside. What is trained, and what products and lookups make of it, is taken to be an
/// ordinary number.
pub fn may_hide(graph: &Graph, flow: &Flow, elements: &mut Elements, bias: ValueId) -> bool {
    let (mut open, mut seen) = (vec![bias], FxHashSet::default());
    while let Some(v) = open.pop() {
        if !seen.insert(Id::index(v)) {
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
            Def::Node { .. } => open.extend(sources(graph, flow, v)),
            Def::Input => {}
        }
    }
    false
}

/// Of either sign: a mask may be subtracted, or multiplied by what is negative.
fn is_vast(number: f64) -> bool {
    !(number.abs() < VAST)
}

/// The operands whose numbers a result is made of.
fn sources(graph: &Graph, flow: &Flow, v: ValueId) -> Vec<ValueId> {
    let Some(node) = graph.def_node(v).map(|n| graph.node(n)) else {
        return Vec::new();
    };
    let ins = || node.ins.iter().flatten().copied();
    if node.op == &logic::WHERE {
        return ins().skip(1).collect();
    }
    match node.op.class {
        OpClass::Elementwise | OpClass::Cast => ins().collect(),
        _ if flow.active[v] && !node.op.is_layout() => Vec::new(),
        _ => ins()
            .filter(|x| graph.ty(*x).dtype == graph.ty(v).dtype)
            .collect(),
    }
}
