//! Symbolic sizes as values: shape arithmetic on the shapes of values that have these sizes.
//!
//! The values are one-element int64 vectors. Each is built once, at the end of the graph, and shared by all later readers.

use crate::error::Result;
use crate::ir::{Atom, Attrs, Dim, Graph, ValueId};
use crate::ops;
use crate::ops::{Builder, EmitExt};
use std::collections::BTreeMap;

/// Where each size can be read, and what has been built from them.
#[derive(Default)]
pub struct Sizes {
    /// A value and its axis, by the size.
    sources: BTreeMap<Atom, (ValueId, usize)>,
    cache: BTreeMap<Dim, Option<ValueId>>,
    /// The sizes that one-element tensors hold.
    held: BTreeMap<ValueId, Dim>,
}

impl Sizes {
    /// Builds a store that reads the named sizes of the graph's inputs.
    pub fn of_inputs(graph: &Graph) -> Sizes {
        let mut sizes = Sizes::default();
        for input in graph.inputs() {
            sizes.read(graph, *input);
        }
        sizes
    }

    /// Reads named and data-dependent sizes of `value` from it from now on, unless they have a source already.
    pub fn read(&mut self, graph: &Graph, value: ValueId) {
        for (axis, dim) in graph.ty(value).dims.iter().enumerate() {
            if let Some(atom @ (Atom::Sym(_) | Atom::Data(_))) = dim.as_atom()
                && !self.sources.contains_key(atom)
            {
                self.sources.insert(atom.clone(), (value, axis));
                // Sizes that could not be built before may be possible now.
                self.cache.retain(|_, built| built.is_some());
            }
        }
    }

    /// Returns the size that an int64 tensor of one element holds in a run: that of a range of so many numbers, because
    /// only the axis of a value makes a size known to typing.
    ///
    /// # Errors
    /// What typing refuses: a value that does not hold one int64.
    pub fn held(&mut self, b: &mut Builder, value: ValueId) -> Result<Dim> {
        if let Some(dim) = self.held.get(&value) {
            return Ok(dim.clone());
        }
        let scalar = match b.rank(value) {
            0 => value,
            _ => {
                let shape = b.ints(&[]);
                b.emit(&ops::shape::RESHAPE, &[value, shape], Attrs::new())?
            }
        };
        let [zero, one] = [0, 1].map(|n| b.int(n));
        let range = b.emit(&ops::fill::RANGE, &[zero, scalar, one], Attrs::new())?;
        self.read(b.graph, range);
        let dim = b.graph.ty(range).dims[0].clone();
        self.held.insert(value, dim.clone());
        Ok(dim)
    }

    /// Builds an int64 vector, or a scalar, with these contents. Returns `None` where some size has no source, or is what
    /// two others broadcast to.
    ///
    /// # Errors
    /// What typing refuses: none where the contents are sizes.
    pub fn build(
        &mut self,
        b: &mut Builder,
        scalar: bool,
        dims: &[Dim],
    ) -> Result<Option<ValueId>> {
        let mut pieces = Vec::new();
        for dim in dims {
            match self.piece(b, dim)? {
                Some(piece) => pieces.push(piece),
                None => return Ok(None),
            }
        }
        let mut built = match pieces.as_slice() {
            [] => b.ints(&[]),
            [one] => *one,
            many => b.emit(&ops::concat::CONCAT, many, Attrs::new().with("axis", 0))?,
        };
        if scalar {
            let axes = b.ints(&[0]);
            built = b.emit(&ops::shape::SQUEEZE, &[built, axes], Attrs::new())?;
        }
        Ok(Some(built))
    }

    /// Builds one size.
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
            for atom in factors {
                let Some(factor) = self.piece(b, &Dim::from_atom(atom))? else {
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

    fn atom(&mut self, b: &mut Builder, atom: &Atom) -> Result<Option<ValueId>> {
        let (left, right) = match atom {
            Atom::Sym(_) | Atom::Data(_) => {
                let Some((value, axis)) = self.sources.get(atom).copied() else {
                    return Ok(None);
                };
                let attrs = Attrs::new()
                    .with("start", axis as i64)
                    .with("end", axis as i64 + 1);
                return Ok(Some(b.emit(&ops::shape::SHAPE, &[value], attrs)?));
            }
            Atom::Div(x, y) | Atom::Mod(x, y) | Atom::Min(x, y) | Atom::Max(x, y) => (x, y),
            // No arithmetic yields a value from which typing reads the same size again.
            Atom::Broadcast(..) => return Ok(None),
        };
        let (Some(x), Some(y)) = (self.piece(b, left)?, self.piece(b, right)?) else {
            return Ok(None);
        };
        let at_least = |dim: &Dim, least: i64| dim.bounds().0.is_some_and(|lo| lo >= least);
        let (op, x) = match atom {
            Atom::Div(..) | Atom::Mod(..) if !at_least(right, 1) => return Ok(None),
            Atom::Mod(..) => (&ops::arith::MOD, x),
            // ONNX integer division truncates, which is floor where neither side is negative, or nothing is left.
            Atom::Div(..) if at_least(left, 0) => (&ops::arith::DIV, x),
            Atom::Div(..) => {
                let Some(rest) = self.piece(b, &left.modulo(right))? else {
                    return Ok(None);
                };
                (&ops::arith::DIV, b.sub(x, rest)?)
            }
            Atom::Min(..) => (&ops::extreme::MIN, x),
            Atom::Max(..) => (&ops::extreme::MAX, x),
            _ => return Ok(None),
        };
        b.emit(op, &[x, y], Attrs::new()).map(Some)
    }
}
