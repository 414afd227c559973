//! Symbolic sizes as values: shape arithmetic that starts at the shapes of values that have these sizes.
//!
//! One-element int64 vectors, each built once and at the end of the graph, so they can be shared by all that follows.

use crate::error::Result;
use crate::ir::{Atom, Attrs, Builder, Dim, Graph, ValueId};
use crate::ops;
use std::collections::BTreeMap;

/// Where each size can be read, and what has been built from them.
#[derive(Default)]
pub struct Sizes {
    /// A value and its axis.
    sources: BTreeMap<Atom, (ValueId, usize)>,
    cache: BTreeMap<Dim, Option<ValueId>>,
}

impl Sizes {
    /// The named sizes of the graph's inputs.
    pub fn of_inputs(graph: &Graph) -> Sizes {
        let mut sizes = Sizes::default();
        for input in graph.inputs() {
            sizes.read(graph, *input);
        }
        sizes
    }

    /// The named and data-dependent sizes of `value` can be read from it, unless they can already.
    pub fn read(&mut self, graph: &Graph, value: ValueId) {
        for (axis, dim) in graph.ty(value).dims.iter().enumerate() {
            if let Some(atom @ (Atom::Sym(_) | Atom::Data(_))) = dim.as_atom()
                && !self.sources.contains_key(atom)
            {
                self.sources.insert(atom.clone(), (value, axis));
                // What could not be built before may be now.
                self.cache.retain(|_, built| built.is_some());
            }
        }
    }

    /// An int64 vector, or a scalar, with these contents; `None` where some size cannot be read anywhere, or is what two
    /// others broadcast to.
    ///
    /// # Errors
    /// What typing refuses: none where the contents are sizes.
    pub fn build(
        &mut self,
        b: &mut Builder,
        scalar: bool,
        dims: &[Dim],
    ) -> Result<Option<ValueId>> {
        let mut parts = Vec::new();
        for dim in dims {
            match self.piece(b, dim)? {
                Some(part) => parts.push(part),
                None => return Ok(None),
            }
        }
        let vector = match parts.as_slice() {
            [] => b.ints(&[]),
            [one] => *one,
            many => b.emit(&ops::concat::CONCAT, many, Attrs::new().with("axis", 0))?,
        };
        if scalar {
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
            // No arithmetic says it so that typing reads the same size out of it again.
            Atom::Broadcast(..) => return Ok(None),
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
            _ => None,
        })
    }
}
