//! Computes shapes from the inputs' shapes, never from activations.
//!
//! In and out: `Typed` or `Training`. Exporters and gradient rules ask for `Shape(x)` of some activation `x`, which
//! would keep `x` alive for its shape alone. Every small integer value whose contents are known is therefore replaced:
//! by a constant where the contents are numbers, else by one shared computation from `Shape` of a graph input. The
//! graph stays as dynamic as it was. A second run changes nothing.

use super::dce::dce;
use crate::error::Result;
use crate::ir::op::{Domain, Effect};
use crate::ir::{Atom, Attrs, Builder, DType, Def, Dim, Graph, NodeId, Side, Tensor, ValueId};
use crate::ops;
use crate::transform::infer::infer;
use std::collections::BTreeMap;

/// Type, shape and contents: what makes two small integer values the same.
type Key = (DType, Vec<i64>, Vec<Dim>);

/// Returns whether anything changed.
pub fn simplify(graph: &mut Graph) -> Result<bool> {
    let contents = infer(graph)?;
    let mut known: Vec<(ValueId, Key)> = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        if node.again.is_some()
            || node.op.effect != Effect::Pure
            || node.op.domain == Domain::Opaque
        {
            continue;
        }
        for out in &node.outs {
            if let (Some(ints), Some(dims)) = (contents.get(*out), graph.ty(*out).static_dims()) {
                known.push((*out, (graph.ty(*out).dtype, dims, ints.to_vec())));
            }
        }
    }
    if known.is_empty() {
        return Ok(false);
    }
    let moved = hoist(graph, &known);
    let mut found: BTreeMap<Key, ValueId> = BTreeMap::new();
    for (id, key) in &known {
        if moved.from_inputs[*id] {
            found.entry(key.clone()).or_insert(*id);
        }
    }
    let sources = symbol_sources(graph);
    let first_new = graph.order().len();
    let mut changed = moved.changed;
    let mut builder = Builder::new(graph);
    builder.prefix = "shape".into();
    let mut pieces = Pieces {
        sources: &sources,
        cache: BTreeMap::new(),
    };
    for (id, key) in known {
        if builder.graph.value(id).uses().is_empty() && !builder.graph.is_output(id) {
            continue;
        }
        let replacement = match key
            .2
            .iter()
            .map(Dim::as_const)
            .collect::<Option<Vec<i64>>>()
        {
            Some(numbers) => Some(constant(&mut builder, &key, &numbers)),
            None => match found.get(&key) {
                Some(rep) => Some(*rep),
                None if key.0 == DType::I64 && key.1.len() <= 1 => {
                    let built = pieces.build(&mut builder, &key)?;
                    if let Some(built) = built {
                        found.insert(key, built);
                    }
                    built
                }
                None => None,
            },
        };
        if let Some(new) = replacement
            && new != id
            && !builder.graph.is_output(id)
        {
            builder.graph.replace_uses(id, new);
            changed = true;
        }
    }
    let order = graph.order();
    if order.len() > first_new {
        let (old, new) = order.split_at(first_new);
        // What is built reads graph inputs, and what was hoisted: behind the hoisted nodes, before all others.
        let (hoisted, rest) = old.split_at(moved.count);
        graph.set_order([hoisted, new, rest].concat());
    }
    Ok(dce(graph) || changed)
}

/// The outcome of moving input-only shape arithmetic to the front.
struct Hoisted {
    from_inputs: Side<ValueId, bool>,
    count: usize,
    changed: bool,
}

/// Moves known values that only depend on the shapes of graph inputs to the front of the order.
fn hoist(graph: &mut Graph, known: &[(ValueId, Key)]) -> Hoisted {
    let mut is_known: Side<ValueId, bool> = Side::new(graph.value_bound(), false);
    for (id, _) in known {
        is_known[*id] = true;
    }
    let mut from_inputs: Side<ValueId, bool> = Side::new(graph.value_bound(), false);
    for (id, _) in graph.inits() {
        from_inputs[id] = true;
    }
    let (mut front, mut rest): (Vec<NodeId>, Vec<NodeId>) = Default::default();
    for id in graph.order() {
        let node = graph.node(*id);
        let of_input = node.op == &ops::shape::SHAPE
            && node
                .ins
                .iter()
                .flatten()
                .all(|v| graph.value(*v).def == Def::Input);
        let derived = node.ins.iter().flatten().all(|v| from_inputs[*v]);
        if node.outs.iter().all(|v| is_known[*v]) && (of_input || derived) {
            for out in &node.outs {
                from_inputs[*out] = true;
            }
            front.push(*id);
        } else {
            rest.push(*id);
        }
    }
    let count = front.len();
    front.extend(rest);
    let changed = front != graph.order();
    graph.set_order(front);
    Hoisted {
        from_inputs,
        count,
        changed,
    }
}

/// Which graph input and axis tells each named size.
fn symbol_sources(graph: &Graph) -> BTreeMap<String, (ValueId, usize)> {
    let mut sources = BTreeMap::new();
    for input in graph.inputs() {
        for (axis, dim) in graph.ty(*input).dims.iter().enumerate() {
            if let Some(name) = dim.as_symbol() {
                sources.entry(name.to_string()).or_insert((*input, axis));
            }
        }
    }
    sources
}

fn constant(b: &mut Builder, key: &Key, numbers: &[i64]) -> ValueId {
    let mut bytes = Vec::new();
    for n in numbers {
        let Some(one) = Tensor::scalar_int(key.0, *n).bytes().cloned() else {
            continue;
        };
        bytes.extend_from_slice(&one);
    }
    let dims: Vec<u64> = key.1.iter().map(|d| *d as u64).collect();
    let text: Vec<String> = numbers.iter().map(i64::to_string).collect();
    b.constant(
        &format!("const.{}.[{}]", key.0, text.join("_")),
        Tensor::new(key.0, dims, bytes),
    )
}

/// One-element vectors for sizes, each built once.
struct Pieces<'a> {
    sources: &'a BTreeMap<String, (ValueId, usize)>,
    cache: BTreeMap<Dim, Option<ValueId>>,
}

impl Pieces<'_> {
    /// A vector or scalar with these contents; `None` where some size has no source among the inputs.
    fn build(&mut self, b: &mut Builder, key: &Key) -> Result<Option<ValueId>> {
        let mut parts = Vec::new();
        for dim in &key.2 {
            match self.piece(b, dim)? {
                Some(part) => parts.push(part),
                None => return Ok(None),
            }
        }
        let vector = match parts.as_slice() {
            [one] => *one,
            many => b.emit(&ops::concat::CONCAT, many, Attrs::new().with("axis", 0))?,
        };
        if key.1.is_empty() {
            let axes = b.ints(&[0]);
            return Ok(Some(b.emit(
                &ops::shape::SQUEEZE,
                &[vector, axes],
                Attrs::new(),
            )?));
        }
        Ok(Some(vector))
    }

    fn piece(&mut self, b: &mut Builder, dim: &Dim) -> Result<Option<ValueId>> {
        if let Some(piece) = self.cache.get(dim) {
            return Ok(*piece);
        }
        let piece = self.make(b, dim)?;
        self.cache.insert(dim.clone(), piece);
        Ok(piece)
    }

    fn make(&mut self, b: &mut Builder, dim: &Dim) -> Result<Option<ValueId>> {
        if let Some(n) = dim.as_const() {
            return Ok(Some(b.ints(&[n])));
        }
        if let Some(atom) = dim.as_atom() {
            return self.atom(b, atom);
        }
        let mut sum: Option<ValueId> = None;
        for (factors, coefficient) in dim.terms() {
            let mut product: Option<ValueId> = None;
            for atom in &factors {
                let Some(factor) = self.atom_piece(b, atom)? else {
                    return Ok(None);
                };
                product = Some(match product {
                    None => factor,
                    Some(p) => b.mul(p, factor)?,
                });
            }
            let term = match product {
                None => b.ints(&[coefficient]),
                Some(p) if coefficient == 1 => p,
                Some(p) => {
                    let c = b.ints(&[coefficient]);
                    b.mul(p, c)?
                }
            };
            sum = Some(match sum {
                None => term,
                Some(s) => b.add(s, term)?,
            });
        }
        Ok(sum)
    }

    fn atom_piece(&mut self, b: &mut Builder, atom: &Atom) -> Result<Option<ValueId>> {
        self.piece(b, &Dim::from_atom(atom.clone()))
    }

    fn atom(&mut self, b: &mut Builder, atom: &Atom) -> Result<Option<ValueId>> {
        let (left, right) = match atom {
            Atom::Sym(name) => {
                let Some((input, axis)) = self.sources.get(&**name).copied() else {
                    return Ok(None);
                };
                let attrs = Attrs::new()
                    .with("start", axis as i64)
                    .with("end", axis as i64 + 1);
                return Ok(Some(b.emit(&ops::shape::SHAPE, &[input], attrs)?));
            }
            Atom::Data(_) => return Ok(None),
            Atom::Div(x, y)
            | Atom::Mod(x, y)
            | Atom::Min(x, y)
            | Atom::Max(x, y)
            | Atom::Broadcast(x, y) => (x, y),
        };
        let (Some(x), Some(y)) = (self.piece(b, left)?, self.piece(b, right)?) else {
            return Ok(None);
        };
        let floors =
            left.bounds().0.is_some_and(|lo| lo >= 0) && right.bounds().0.is_some_and(|lo| lo >= 1);
        Ok(match atom {
            // ONNX integer division truncates: the same as floor where neither side is negative.
            Atom::Div(..) if floors => Some(b.div(x, y)?),
            Atom::Mod(..) if floors => Some(b.emit(&ops::arith::MOD, &[x, y], Attrs::new())?),
            Atom::Min(..) => Some(b.emit(&ops::extreme::MIN, &[x, y], Attrs::new())?),
            Atom::Max(..) => Some(b.emit(&ops::extreme::MAX, &[x, y], Attrs::new())?),
            Atom::Broadcast(..) => {
                let one = b.ints(&[1]);
                let is_one = b.emit(&ops::logic::EQUAL, &[x, one], Attrs::new())?;
                Some(b.emit(&ops::logic::WHERE, &[is_one, y, x], Attrs::new())?)
            }
            _ => None,
        })
    }
}
