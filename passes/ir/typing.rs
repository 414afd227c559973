//! Types of nodes, and known contents of small integer tensors.
//!
//! Graphs compute shapes with small integer tensors. `Reshape` can be typed only if the contents of its shape operand
//! are known, as [`Dim`]s. Contents are kept in a side table, not in the graph.

use super::dim::Dim;
use super::graph::{Def, Graph};
use super::id::{NodeId, SecondaryMap, ValueId};
use super::op::{Domain, InferCx, Known, SlotKind};
use super::ty::{DType, Ty};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Contents of tensors with more elements are not known.
pub const MAX_KNOWN_ELEMENTS: u64 = 64;

/// Contents of constant lists with more elements are not known, such as the sizes of the parts of a long sequence.
const MAX_KNOWN_LIST: u64 = 4096;

/// Known contents of integer and boolean values, row-major; booleans are 0 and 1.
#[derive(Clone)]
pub struct Contents(SecondaryMap<ValueId, Option<Arc<[Dim]>>>);

impl Contents {
    /// Returns the contents of the initializers. Those of nodes are added as the nodes are typed.
    pub fn of(graph: &Graph) -> Contents {
        let mut contents = Contents(SecondaryMap::new(graph.value_bound(), None));
        for (id, _) in graph.inits() {
            contents.read_init(graph, id);
        }
        contents
    }

    /// Returns the contents of every value of a typed graph.
    ///
    /// # Errors
    /// See [`type_node`].
    pub fn known(graph: &Graph) -> Result<Contents> {
        let mut contents = Contents::of(graph);
        for id in graph.order() {
            if graph.node(*id).op.domain == Domain::Opaque {
                continue;
            }
            let typed = type_node(graph, *id, &contents)?;
            for (value, (_, ints)) in graph.node(*id).outs.iter().zip(typed) {
                contents.set(*value, ints);
            }
        }
        Ok(contents)
    }

    /// Adds the contents of one initializer.
    pub fn read_init(&mut self, graph: &Graph, id: ValueId) {
        let Def::Init(tensor) = &graph.value(id).def else {
            return;
        };
        let limit = match tensor.dims.len() {
            1 => MAX_KNOWN_LIST,
            _ => MAX_KNOWN_ELEMENTS,
        };
        if tensor.dtype.is_real() || tensor.elements() > limit {
            return;
        }
        let dims: Option<Vec<Dim>> = (0..tensor.elements() as usize)
            .map(|i| tensor.get_i64(i).map(Dim::from))
            .collect();
        self.0[id] = dims.map(Arc::from);
    }

    /// Returns the known contents of a value.
    pub fn get(&self, id: ValueId) -> Option<&[Dim]> {
        self.0[id].as_deref()
    }

    /// Sets what is known of the contents of a value.
    pub fn set(&mut self, id: ValueId, ints: Option<Vec<Dim>>) {
        self.0[id] = ints.map(Arc::from);
    }
}

/// Checks the operands of a node and returns the type and known contents of each result.
///
/// # Errors
/// Operands that are missing, untyped, or that the op's rule refuses; the error names the node.
pub fn type_node(
    graph: &Graph,
    id: NodeId,
    contents: &Contents,
) -> Result<Vec<(Ty, Option<Vec<Dim>>)>> {
    let node = graph.node(id);
    let place = |e: Box<Error>| {
        let operands: Vec<String> = node
            .ins
            .iter()
            .flatten()
            .map(|v| {
                let value = graph.value(*v);
                format!(
                    "{}: {}",
                    value.name,
                    value.ty.as_ref().map_or("?".into(), Ty::to_string)
                )
            })
            .collect();
        e.at(graph.describe(id))
            .found(format!("operands {}", operands.join(", ")))
    };
    check_arity(graph, id).map_err(place)?;
    let mut ins = Vec::with_capacity(node.ins.len());
    for value in &node.ins {
        ins.push(match value {
            None => None,
            Some(v) => {
                let ty = graph.value(*v).ty.as_ref().ok_or_else(|| {
                    place(Error::model(
                        "type",
                        format!("`{}` has no known type", graph.value(*v).name),
                    ))
                })?;
                Some(Known {
                    ty,
                    ints: contents.get(*v),
                })
            }
        });
    }
    let out_names: Vec<String> = node
        .outs
        .iter()
        .map(|v| graph.value(*v).name.clone())
        .collect();
    let cx = InferCx {
        op: node.op,
        attrs: &node.attrs,
        ins: &ins,
        out_names: &out_names,
    };
    refuse_float8(&cx).map_err(place)?;
    let types = (node.op.infer)(&cx).map_err(place)?;
    if types.len() < node.outs.len() {
        return Err(Error::bug(
            "infer",
            format!("{} typed {} of its results", node.op.name, types.len()),
        )
        .at(graph.describe(id)));
    }
    let folded = (node.op.fold)(&cx, &types);
    let known = |slot: usize, ty: &Ty| -> Option<Vec<Dim>> {
        let ints = folded.as_ref()?.get(slot)?;
        let elements = ty.elements().as_const()?;
        (ints.len() as i64 == elements
            && elements as u64 <= MAX_KNOWN_ELEMENTS
            && ints.iter().all(|d| holds(ty.dtype, d, &ins)))
        .then(|| ints.clone())
    };
    let n = node.outs.len();
    Ok(types
        .into_iter()
        .take(n)
        .enumerate()
        .map(|(i, ty)| {
            let k = known(i, &ty);
            (ty, k)
        })
        .collect())
}

/// Fails for a standard op that takes no floats of 8 bits and gets some: ONNX lists the ops that do.
fn refuse_float8(cx: &InferCx) -> Result<()> {
    let types = || cx.ins.iter().flatten().map(|known| known.ty.dtype);
    let lists = |dtype| cx.op.later_types.iter().any(|(later, _)| *later == dtype);
    let is_standard = matches!(cx.op.domain, Domain::Onnx { .. });
    match types().find(|dtype| is_standard && dtype.is_float8() && !lists(*dtype)) {
        Some(dtype) => Err(cx
            .fail("type", format!("the op takes no {dtype}"))
            .help("convert with Cast or DequantizeLinear first")),
        None => Ok(()),
    }
}

/// Returns true if the op computes exactly this element. [`Dim`] arithmetic saturates at 64 bits and ignores the
/// element type, so a number out of the range of its type, or one that may have saturated, is not known. An element
/// that an operand already has is known.
fn holds(dtype: DType, element: &Dim, ins: &[Option<Known>]) -> bool {
    let in_range = match (dtype.int_range(), element.as_const()) {
        (None, _) => false,
        (Some((least, greatest)), Some(n)) => (least..=greatest).contains(&n),
        // A size may be larger than a narrow type holds.
        (Some(_), None) => dtype == DType::I64,
    };
    let passed_on = || {
        let mut known = ins.iter().flatten().filter_map(|k| k.ints).flatten();
        known.any(|d| d == element)
    };
    in_range && (!element.may_be_saturated() || passed_on())
}

/// Checks that operand and result counts fit the op's slots (invariant I4).
pub fn check_arity(graph: &Graph, id: NodeId) -> Result<()> {
    let node = graph.node(id);
    let (ins, outs) = (node.op.ins, node.op.outs);
    let fail = |what: &str, expected: usize, found: usize| {
        Err(
            Error::model("arity", format!("{}: wrong number of {what}", node.op.name))
                .expected(format!("at most {expected}"))
                .found(found.to_string()),
        )
    };
    let variadic =
        |slots: &[super::op::Slot]| slots.last().is_some_and(|s| s.kind == SlotKind::Variadic);
    if node.ins.len() > ins.len() && !variadic(ins) {
        return fail("operands", ins.len(), node.ins.len());
    }
    if node.outs.len() > outs.len() && !variadic(outs) {
        return fail("results", outs.len(), node.outs.len());
    }
    // What an unknown op needs, its file knows.
    let strict = node.op.domain != Domain::Opaque;
    for (i, slot) in ins.iter().enumerate() {
        if strict && slot.kind != SlotKind::Optional && node.ins.get(i).copied().flatten().is_none()
        {
            return Err(Error::model(
                "arity",
                format!("{}: operand {i} (`{}`) is missing", node.op.name, slot.name),
            ));
        }
    }
    if node.outs.is_empty() {
        return Err(Error::model(
            "arity",
            format!("{}: a node without results", node.op.name),
        ));
    }
    Ok(())
}
