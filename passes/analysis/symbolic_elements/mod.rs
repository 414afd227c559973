//! An element of a tensor as a function of its indices: `arange[i] = i`, `mask[b, h, i, j] = j <= i`.
//!
//! Exporters write masks and positions as long chains of integer and boolean ops over sizes that are not known yet. Asked
//! for the element at symbolic indices, [`Elements`] follows such a chain backwards. Layout ops move the indices,
//! arithmetic makes polynomials of indices and named sizes, comparisons make conditions ([`Condition`]). Every answer
//! holds for all sizes and all data. What cannot be followed is reported as the element of some value at some index.
//! Index variables are [`Dim`] atoms named `#0`, `#1`, …, one per axis; each is at least 0 and less than its size.
//!
//! Answers are remembered, so asking every attention of a model about one mask costs one walk. Depth and work are
//! bounded: an adversarial graph gets fewer answers, not a long wait.

mod condition;
mod element;
mod layout;
mod table;

pub use condition::Condition;
pub use element::Element;
pub(crate) use layout::axis_of;

use crate::analysis::residual_stream::Flow;
use crate::ir::{Atom, DType, Def, Dim, Graph, Id, Node, NodeId, OpDef, Same, ValueId};
use crate::ops::{arith, cast, concat, extreme, fill, index, logic, scan, shape, slice};
use element::{apply, choose, choose_bool, is_numeric, rounded};
use layout::{broadcast, permutation};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;
use table::Table;

/// Longest chain of nodes that is followed.
const MAX_DEPTH: usize = 150;
/// Most nodes that one question visits.
const MAX_VISITS: usize = 20_000;

/// Returns the index variable of an axis of the space that is asked about.
pub fn index_variable(axis: usize) -> Dim {
    Dim::data(&variable_name(axis))
}

fn variable_name(axis: usize) -> String {
    format!("#{axis}")
}

/// Returns true if no index variable occurs in a polynomial.
pub fn is_index_free(d: &Dim) -> bool {
    let mut is_free = true;
    d.for_each_leaf(&mut |atom| is_free &= !matches!(atom, Atom::Data(n) if n.starts_with('#')));
    is_free
}

/// Answers about the elements of one graph's values.
pub struct Elements<'g> {
    graph: &'g Graph,
    flow: &'g Flow,
    /// Sizes of the axes that index variables run over, by the variable's name.
    sizes: BTreeMap<Arc<str>, Dim>,
    /// The number of every tuple of sizes that was asked about.
    scopes: BTreeMap<Vec<Dim>, u32>,
    scope: u32,
    memo: FxHashMap<(u32, ValueId, Vec<Dim>), Element>,
    tables: BTreeMap<ValueId, Option<Arc<Table>>>,
    depth: usize,
    visits: usize,
}

impl<'g> Elements<'g> {
    /// Builds an empty store of answers.
    pub fn new(graph: &'g Graph, flow: &'g Flow) -> Elements<'g> {
        Elements {
            graph,
            flow,
            sizes: BTreeMap::new(),
            scopes: BTreeMap::new(),
            scope: 0,
            memo: FxHashMap::default(),
            tables: BTreeMap::new(),
            depth: 0,
            visits: 0,
        }
    }

    /// Returns the element of `value` at index variables that run over `sizes`, one per axis of the space. The value
    /// broadcasts to that space from the right.
    pub fn ask(&mut self, value: ValueId, sizes: &[Dim]) -> Element {
        self.enter(sizes);
        let variables: Vec<Dim> = (0..sizes.len()).map(index_variable).collect();
        let dims = &self.graph.ty(value).dims;
        match broadcast(dims, sizes, &variables) {
            Some(at) => self.at(value, &at),
            None => Element::Of(value, variables),
        }
    }

    /// Sets the space that index variables run over.
    pub fn enter(&mut self, sizes: &[Dim]) {
        let next = self.scopes.len() as u32;
        self.scope = *self.scopes.entry(sizes.to_vec()).or_insert(next);
        self.sizes.retain(|name, _| name.starts_with("#n"));
        for (axis, size) in sizes.iter().enumerate() {
            self.sizes.insert(variable_name(axis).into(), size.clone());
        }
        self.visits = 0;
    }

    /// Returns all elements of a small constant integer tensor of at most one axis.
    pub fn constants(&mut self, value: ValueId) -> Option<Vec<i64>> {
        let dims = self.graph.ty(value).static_dims()?;
        let count: i64 = dims.iter().product();
        if dims.len() > 1 || count > 64 {
            return None;
        }
        (0..count)
            .map(|i| {
                let at: Vec<Dim> = dims.iter().map(|_| Dim::from(i)).collect();
                self.at(value, &at).int()?.as_const()
            })
            .collect()
    }

    /// Returns the number that every element of a value is.
    pub fn number(&mut self, value: ValueId) -> Option<f64> {
        let dims = self.graph.ty(value).dims.clone();
        self.ask(value, &dims).number()
    }

    /// Returns the first element of an integer tensor.
    fn first(&mut self, value: ValueId) -> Option<Dim> {
        let at = vec![Dim::ZERO; self.graph.ty(value).rank()];
        self.at(value, &at).int()
    }

    /// Returns proven bounds of an index polynomial over all indices.
    pub fn range(&self, d: &Dim) -> (Option<i64>, Option<i64>) {
        (
            self.extreme(d, false).bounds().0,
            self.extreme(d, true).bounds().1,
        )
    }

    /// Returns true if an index polynomial is proven to be at least `least` at all indices.
    fn is_at_least(&self, d: &Dim, least: i64) -> bool {
        self.range(d).0.is_some_and(|lo| lo >= least)
    }

    /// Returns `d` where it is largest over all indices. Index variables of no known direction stay in it.
    pub fn largest(&self, d: &Dim) -> Dim {
        self.extreme(d, true)
    }

    /// Returns `d` where it is smallest over all indices; see [`Elements::largest`].
    pub fn smallest(&self, d: &Dim) -> Dim {
        self.extreme(d, false)
    }

    /// Returns `d` with every index variable of known direction at the end that makes it smallest, or largest.
    fn extreme(&self, d: &Dim, largest: bool) -> Dim {
        let mut out = d.clone();
        let mut names: Vec<Arc<str>> = Vec::new();
        for atom in d.terms().into_iter().flat_map(|(monomial, _)| monomial) {
            if let Atom::Data(name) = atom
                && self.sizes.contains_key(&name)
                && !names.contains(&name)
            {
                names.push(name);
            }
        }
        for name in names {
            let Some(slope) = slope(&out, &name) else {
                continue;
            };
            let size = &self.sizes[&name];
            let end = match slope.bounds() {
                (Some(lo), _) if lo >= 0 => largest,
                (_, Some(hi)) if hi <= 0 => !largest,
                _ => continue,
            };
            let at = if end { size.sub(&Dim::ONE) } else { Dim::ZERO };
            out = replaced(&out, &name, &at);
        }
        out
    }

    /// Returns `d >= 0` as a condition.
    fn at_least_0(&self, d: Dim) -> Condition {
        match self.range(&d) {
            (Some(lo), _) if lo >= 0 => Condition::Is(true),
            (_, Some(hi)) if hi < 0 => Condition::Is(false),
            _ => Condition::AtLeast0(d),
        }
    }

    /// Returns the element of `value` at index `at`.
    pub(crate) fn at(&mut self, value: ValueId, at: &[Dim]) -> Element {
        let key = (self.scope, value, at.to_vec());
        if let Some(known) = self.memo.get(&key) {
            return known.clone();
        }
        let unknown = Element::Of(value, at.to_vec());
        if self.depth > MAX_DEPTH || self.visits > MAX_VISITS {
            return unknown;
        }
        self.depth += 1;
        self.visits += 1;
        let found = match &self.graph.value(value).def {
            Def::Input => None,
            // A trained tensor is no constant, whatever values the file gives it.
            Def::Init(_) if self.flow.active[value] => None,
            Def::Init(_) => self.constant(value, at),
            Def::Node { node, slot } => self.computed(*node, *slot, at),
        };
        self.depth -= 1;
        let found = found.unwrap_or(unknown);
        self.memo.insert(key, found.clone());
        found
    }

    /// Returns the element of a boolean value as a condition; see [`Elements::at`].
    fn condition(&mut self, value: ValueId, at: &[Dim]) -> Condition {
        let (value, at) = match self.at(value, at) {
            Element::Bool(condition) => return condition,
            Element::Of(value, at) => (value, at),
            // A boolean is never a number; kept whole if it ever is.
            _ => (value, at.to_vec()),
        };
        Condition::Data {
            value,
            at,
            holds: true,
        }
    }

    /// Returns the element of an initializer.
    fn constant(&mut self, value: ValueId, at: &[Dim]) -> Option<Element> {
        let dtype = self.graph.ty(value).dtype;
        let tensor = self.graph.value(value).tensor()?;
        let place: Option<Vec<i64>> = at.iter().map(Dim::as_const).collect();
        if let Some(place) = place {
            let mut flat = 0i64;
            for (i, d) in place.iter().zip(&tensor.dims) {
                if *i < 0 || *i as u64 >= *d {
                    return None;
                }
                flat = flat * *d as i64 + i;
            }
            if dtype.is_int() {
                return Some(Element::Int(Dim::from(tensor.get_i64(flat as usize)?)));
            }
            let x = tensor.get_f64(flat as usize)?;
            return Some(Element::constant(dtype, x));
        }
        let table = self.tables.entry(value);
        let table = table.or_insert_with(|| Table::of(tensor).map(Arc::new));
        match &*table.clone()? {
            Table::Same(x) => Some(Element::constant(dtype, *x)),
            Table::Ramp(ramp) => Some(Element::Int(ramp.at(at))),
            Table::Tuples(ramps) => {
                let (part, list) = at.split_last()?;
                let part = usize::try_from(part.as_const()?).ok()?;
                Some(Element::Int(ramps.get(part)?.at(list)))
            }
            Table::Band {
                left,
                right,
                inside,
                outside,
            } => {
                let [.., row, column] = at else { return None };
                let across = column.sub(row);
                let mut within = Condition::Is(true);
                if let Some(left) = left {
                    within = within.and(self.at_least_0(across.add(&Dim::from(*left))))?;
                }
                if let Some(right) = right {
                    within = within.and(self.at_least_0(Dim::from(*right).sub(&across)))?;
                }
                if dtype == DType::Bool {
                    return Some(choose_bool(within, *inside != 0.0, *inside == 0.0));
                }
                choose(within, Element::Number(*inside), Element::Number(*outside))
            }
        }
    }

    /// Returns an element of result `slot` of a node.
    fn computed(&mut self, id: NodeId, slot: usize, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let op = node.op;
        let lookups = [&index::GATHER, &index::GATHER_ND, &index::GATHER_ELEMENTS];
        if op.is_layout() || op == &concat::TILE || lookups.contains(&op) {
            let (x, to) = self.source(id, slot, at)?;
            return Some(self.at(x, &to));
        }
        if op == &shape::SHAPE {
            let dims = &self.graph.ty(node.ins[0]?).dims;
            let rank = dims.len() as i64;
            let first = node.attrs.opt_int("start").unwrap_or(0).clamp(-rank, rank);
            let first = if first < 0 { first + rank } else { first };
            let k = usize::try_from(at[0].as_const()? + first).ok()?;
            return dims.get(k).cloned().map(Element::Int);
        }
        if op == &shape::SIZE {
            return Some(Element::Int(self.graph.ty(node.ins[0]?).elements()));
        }
        if op == &fill::RANGE {
            if !self.graph.ty(node.outs[0]).dtype.is_int() {
                return None;
            }
            let (start, delta) = (self.first(node.ins[0]?)?, self.first(node.ins[2]?)?);
            return Some(Element::Int(start.add(&delta.mul(&at[0]))));
        }
        if op == &fill::CONSTANT_OF_SHAPE {
            let value = node.attrs.opt_tensor("value");
            let dtype = self.graph.ty(node.outs[0]).dtype;
            if dtype.is_int() {
                return Some(Element::Int(Dim::from(value?.get_i64(0)?)));
            }
            let x = value.map_or(Some(0.0), |t| t.get_f64(0))?;
            return Some(Element::constant(dtype, x));
        }
        if op == &fill::TRILU {
            return self.triangle(node, at);
        }
        if op == &concat::CONCAT {
            return self.concatenated(id, at);
        }
        if op == &scan::CUM_SUM {
            return self.summed(id, at);
        }
        self.elementwise(node, at)
    }

    /// Returns the operand that a layout op or lookup copies an element of result `slot` from, and the index there; `None` for other ops and
    /// where the index cannot be told.
    pub fn source(&mut self, id: NodeId, slot: usize, at: &[Dim]) -> Option<(ValueId, Vec<Dim>)> {
        let node = self.graph.node(id);
        let x = node.operand(0)?;
        let from = self.graph.ty(x).dims.clone();
        let out = &self.graph.ty(node.outs[0]).dims;
        let op = node.op;
        let to = if op == &shape::IDENTITY {
            at.to_vec()
        } else if op == &shape::TRANSPOSE {
            let mut to = vec![Dim::ZERO; at.len()];
            for (i, axis) in permutation(node, at.len()).into_iter().enumerate() {
                *to.get_mut(axis)? = at[i].clone();
            }
            to
        } else if op == &shape::EXPAND {
            broadcast(&from, out, at)?
        } else if op == &shape::UNSQUEEZE {
            let added = self.axes(node, from.len().max(out.len()))?;
            let kept = (0..at.len()).filter(|i| !added.contains(i));
            kept.map(|i| at[i].clone()).collect()
        } else if op == &shape::SQUEEZE {
            let dropped = self.axes(node, from.len().max(out.len()))?;
            let mut rest = at.iter();
            let index = |i: usize| match dropped.contains(&i) {
                true => Some(Dim::ZERO),
                false => rest.next().cloned(),
            };
            (0..from.len()).map(index).collect::<Option<Vec<Dim>>>()?
        } else if op == &shape::RESHAPE || op == &shape::FLATTEN {
            self.reshaped(&from, out, at)?
        } else if op == &slice::SLICE {
            self.sliced(node, &from, at)?
        } else if op == &concat::SPLIT {
            let axis = axis_of(node.attrs.int("axis"), from.len())?;
            let before = node.outs[..slot].iter();
            let offset = before.fold(Dim::ZERO, |sum, v| sum.add(&self.graph.ty(*v).dims[axis]));
            let mut to = at.to_vec();
            to[axis] = to[axis].add(&offset);
            to
        } else if op == &concat::TILE {
            at.iter()
                .zip(&from)
                .map(|(i, d)| self.divided(i, d).1)
                .collect()
        } else if op == &index::GATHER {
            let indices = node.operand(1)?;
            let axis = axis_of(node.attrs.int("axis"), from.len())?;
            let rank = self.graph.ty(indices).rank();
            let picked = self.index(indices, at.get(axis..axis + rank)?, &from[axis])?;
            [&at[..axis], &[picked], &at[axis + rank..]].concat()
        } else if op == &index::GATHER_ELEMENTS {
            let axis = axis_of(node.attrs.int("axis"), from.len())?;
            let mut to = at.to_vec();
            to[axis] = self.index(node.operand(1)?, at, &from[axis])?;
            to
        } else if op == &index::GATHER_ND {
            self.named(node, &from, at)?
        } else {
            return None;
        };
        (to.len() == from.len()).then_some((x, to))
    }

    /// Returns the axes that the second operand lists, or all axes of size 1 where it is not given.
    fn axes(&mut self, node: &Node, rank: usize) -> Option<Vec<usize>> {
        if let Some(axes) = node.operand(1) {
            let listed = self.constants(axes)?;
            return listed.into_iter().map(|a| axis_of(a, rank)).collect();
        }
        let dims = &self.graph.ty(node.ins[0]?).dims;
        Some((0..dims.len()).filter(|i| dims[*i].is_one()).collect())
    }

    /// Returns an index into `size` elements that the data gives: not negative, or a constant counted from the end.
    fn index(&mut self, indices: ValueId, at: &[Dim], size: &Dim) -> Option<Dim> {
        let picked = self.at(indices, at).int()?;
        if self.is_at_least(&picked, 0) {
            return Some(picked);
        }
        (picked.as_const()? < 0).then(|| picked.add(size))
    }

    fn sliced(&mut self, node: &Node, from: &[Dim], at: &[Dim]) -> Option<Vec<Dim>> {
        let starts = node.operand(1)?;
        let count = self.graph.ty(starts).elements().as_const()?;
        let axes = match node.operand(3) {
            Some(axes) => self.constants(axes)?,
            None => (0..count).collect(),
        };
        let steps = match node.operand(4) {
            Some(steps) => self.constants(steps)?,
            None => vec![1; axes.len()],
        };
        let mut to = at.to_vec();
        for (k, (axis, step)) in axes.into_iter().zip(steps).enumerate() {
            let axis = axis_of(axis, from.len())?;
            let start = self.at(starts, &[Dim::from(k as i64)]).int()?;
            let first = match start.bounds() {
                // A start beyond the end leaves no elements to ask for.
                (Some(lo), _) if lo >= 0 => start,
                (_, Some(hi)) if hi < 0 => {
                    let first = start.add(&from[axis]);
                    // A start before the beginning is clamped.
                    let is_inside = first.bounds().0.is_some_and(|lo| lo >= 0);
                    (is_inside || start == Dim::from(-1)).then_some(first)?
                }
                _ => return None,
            };
            if step < 1 {
                return None;
            }
            to[axis] = to[axis].mul(&Dim::from(step)).add(&first);
        }
        Some(to)
    }

    /// Returns the index, in a tensor of shape `from`, of the element at `at` in shape `dims`, in row-major order.
    fn reshaped(&self, from: &[Dim], dims: &[Dim], at: &[Dim]) -> Option<Vec<Dim>> {
        // Equal leading and trailing axes keep their indices; the axes between are one number.
        let head = from.iter().zip(dims).take_while(|(a, b)| a == b).count();
        let most = from.len().min(dims.len()) - head;
        let ends = from.iter().rev().zip(dims.iter().rev());
        let tail = ends.take_while(|(a, b)| a == b).count().min(most);
        let middle = &dims[head..dims.len() - tail];
        let mut flat = Dim::ZERO;
        for (size, i) in middle.iter().zip(&at[head..]) {
            flat = flat.mul(size).add(i);
        }
        let into = &from[head..from.len() - tail];
        let mut to = at[..head].to_vec();
        let mut stride = Dim::product(into);
        for size in into {
            if size.is_one() {
                to.push(Dim::ZERO);
                continue;
            }
            stride = stride.exact_div(size)?;
            let (quotient, rest) = self.divided(&flat, &stride);
            to.push(quotient);
            flat = rest;
        }
        to.extend_from_slice(&at[dims.len() - tail..]);
        Some(to)
    }

    /// Returns floor quotient and remainder of an index that is not negative.
    fn divided(&self, flat: &Dim, by: &Dim) -> (Dim, Dim) {
        if by.is_one() {
            return (flat.clone(), Dim::ZERO);
        }
        let (mut quotient, mut rest) = (Dim::ZERO, Dim::ZERO);
        for (monomial, coefficient) in flat.terms() {
            let factors: Vec<Dim> = monomial.into_iter().map(Dim::from_atom).collect();
            let term = Dim::product(&factors).mul(&Dim::from(coefficient));
            match term.exact_div(by) {
                Some(q) => quotient = quotient.add(&q),
                None => rest = rest.add(&term),
            }
        }
        let room = by.sub(&Dim::ONE).sub(&rest);
        if self.is_at_least(&rest, 0) && self.is_at_least(&room, 0) {
            return (quotient, rest);
        }
        (quotient.add(&rest.div(by)), rest.modulo(by))
    }

    /// Returns an element of `Trilu`: the triangle that is kept, zero elsewhere.
    fn triangle(&mut self, node: &Node, at: &[Dim]) -> Option<Element> {
        let k = match node.operand(1) {
            Some(k) => self.first(k)?,
            None => Dim::ZERO,
        };
        let [.., row, column] = at else { return None };
        // Upper: column - row >= k; lower: column - row <= k.
        let above = column.sub(row).sub(&k);
        let keep = match node.attrs.int("upper") {
            0 => self.at_least_0(Dim::ZERO.sub(&above)),
            _ => self.at_least_0(above),
        };
        let x = node.ins[0]?;
        if self.graph.ty(x).dtype == DType::Bool {
            let inside = self.condition(x, at);
            return keep.and(inside).map(Element::Bool);
        }
        let inside = self.at(x, at);
        choose(keep, inside, Element::Number(0.0))
    }

    fn concatenated(&mut self, id: NodeId, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let axis = axis_of(node.attrs.int("axis"), at.len())?;
        let mut offset = Dim::ZERO;
        let mut pieces: Vec<(ValueId, Dim)> = Vec::new();
        for x in node.operands() {
            let size = self.graph.ty(x).dims[axis].clone();
            let inside = at[axis].sub(&offset);
            let after = size.sub(&Dim::ONE).sub(&inside);
            if self.is_at_least(&inside, 0) && self.is_at_least(&after, 0) {
                let to = with_index(at, axis, inside);
                return Some(self.at(x, &to));
            }
            pieces.push((x, offset.clone()));
            offset = offset.add(&size);
        }
        self.unified(id, axis, at, &pieces, &offset)
    }

    /// Returns the element of a `Concat` by one polynomial that all its pieces agree with: pieces of one element are
    /// points on it.
    fn unified(
        &mut self,
        id: NodeId,
        axis: usize,
        at: &[Dim],
        pieces: &[(ValueId, Dim)],
        total: &Dim,
    ) -> Option<Element> {
        let name = self.inner_variable(id, total);
        let variable = Dim::data(&name);
        let is_point = |graph: &Graph, x: ValueId| graph.ty(x).dims[axis].is_one();
        let mut line: Option<Dim> = None;
        for (x, offset) in pieces.iter().filter(|(x, _)| !is_point(self.graph, *x)) {
            let to = with_index(at, axis, variable.sub(offset));
            let piece = self.at(*x, &to).int()?;
            if line.as_ref().is_some_and(|l| *l != piece) {
                return None;
            }
            line = Some(piece);
        }
        let line = line?;
        for (x, offset) in pieces.iter().filter(|(x, _)| is_point(self.graph, *x)) {
            let point = self.at(*x, &with_index(at, axis, Dim::ZERO)).int()?;
            if point.same(&replaced(&line, &name, offset)) != Same::Yes {
                return None;
            }
        }
        Some(Element::Int(replaced(&line, &name, &at[axis])))
    }

    /// Adds a variable for an axis of `size` elements inside a node and returns its name.
    fn inner_variable(&mut self, id: NodeId, size: &Dim) -> Arc<str> {
        let name: Arc<str> = format!("#n{}", Id::index(id)).into();
        self.sizes.insert(name.clone(), size.clone());
        name
    }

    /// Returns an element of a running sum of equal elements.
    fn summed(&mut self, id: NodeId, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let (x, axis) = (node.ins[0]?, node.ins[1]?);
        let axis = axis_of(self.first(axis)?.as_const()?, at.len())?;
        let size = self.graph.ty(x).dims[axis].clone();
        let name = self.inner_variable(id, &size);
        let each = self.at(x, &with_index(at, axis, Dim::data(&name))).int()?;
        // All elements along the axis have to be equal.
        if has_leaf(&each, &Atom::Data(name)) || !self.graph.ty(x).dtype.is_int() {
            return None;
        }
        let inclusive = Dim::from((node.attrs.int("exclusive") == 0) as i64);
        let count = match node.attrs.int("reverse") {
            0 => at[axis].add(&inclusive),
            _ => size.sub(&Dim::ONE).sub(&at[axis]).add(&inclusive),
        };
        Some(Element::Int(each.mul(&count)))
    }

    fn named(&mut self, node: &Node, from: &[Dim], at: &[Dim]) -> Option<Vec<Dim>> {
        let indices = node.operand(1)?;
        let batch = usize::try_from(node.attrs.int("batch_dims")).ok()?;
        let rank = self.graph.ty(indices).rank();
        let named = self.graph.ty(indices).dims.last()?.as_const()?;
        let head = at.get(..rank - 1)?;
        let mut to = at.get(..batch)?.to_vec();
        for k in 0..named {
            let tuple = [head, &[Dim::from(k)]].concat();
            let axis = batch + k as usize;
            to.push(self.index(indices, &tuple, from.get(axis)?)?);
        }
        to.extend_from_slice(&at[rank - 1..]);
        Some(to)
    }

    /// Returns an element of the result of an elementwise op.
    fn elementwise(&mut self, node: &Node, at: &[Dim]) -> Option<Element> {
        let op = node.op;
        let boolean = [&logic::AND, &logic::OR, &logic::XOR, &logic::NOT];
        let other = [&logic::WHERE, &cast::CAST, &arith::MOD];
        if !is_numeric(op) && !boolean.into_iter().chain(other).any(|known| op == known) {
            return None;
        }
        let to = &self.graph.ty(*node.outs.first()?).dims;
        let mut places = Vec::new();
        for x in &node.ins {
            let x = (*x)?;
            places.push((x, broadcast(&self.graph.ty(x).dims, to, at)?));
        }
        let (a, at_a) = places.first()?;
        let from = self.graph.ty(*a).dtype;
        let dtype = self.graph.ty(node.outs[0]).dtype;
        if op == &cast::CAST {
            return self.converted(*a, at_a, from, dtype);
        }
        if from == DType::Bool {
            let mut conditions = places.iter().map(|(x, at)| self.condition(*x, at));
            let condition = conditions.next()?;
            if op == &logic::NOT {
                return Some(Element::Bool(condition.negated()));
            }
            if op == &logic::WHERE {
                let [_, (x, at_x), (y, at_y)] = places.as_slice() else {
                    return None;
                };
                if self.graph.ty(*x).dtype != DType::Bool {
                    let (x, y) = (self.at(*x, at_x), self.at(*y, at_y));
                    return choose(condition, x, y);
                }
                let (x, y) = (self.condition(*x, at_x), self.condition(*y, at_y));
                let then = condition.clone().and(x)?;
                return then.or(condition.negated().and(y)?).map(Element::Bool);
            }
            let (b, None) = (conditions.next()?, conditions.next()) else {
                return None;
            };
            let joined = if op == &logic::AND {
                condition.and(b)
            } else if op == &logic::OR {
                condition.or(b)
            } else if op == &logic::XOR {
                condition.same(b.negated())
            } else {
                // `Equal` of two booleans.
                condition.same(b)
            };
            return joined.map(Element::Bool);
        }
        let known: Vec<Element> = places.iter().map(|(x, at)| self.at(*x, at)).collect();
        if known.iter().any(|e| matches!(e, Element::Of(..))) {
            return self.compared_data(op, from, &places).map(Element::Bool);
        }
        let ints = || known.iter().map(|e| e.clone().int());
        if from.is_int()
            && let Some(ints) = ints().collect::<Option<Vec<Dim>>>()
        {
            return self.integers(node, from, &ints);
        }
        apply(op, from, dtype, &known)
    }

    /// Returns the outcome of a comparison of integers that only the data decides, where it is about two elements of one value.
    fn compared_data(
        &mut self,
        op: &OpDef,
        dtype: DType,
        places: &[(ValueId, Vec<Dim>)],
    ) -> Option<Condition> {
        let [(a, at_a), (b, at_b)] = places else {
            return None;
        };
        if !is_wide(dtype) {
            return None;
        }
        let mut difference = Sum::default();
        self.add_to(&mut difference, *a, at_a, 1)?;
        self.add_to(&mut difference, *b, at_b, -1)?;
        if op == &logic::LESS {
            difference.condition(-1, 1)
        } else if op == &logic::GREATER {
            difference.condition(1, 1)
        } else if op == &logic::LESS_OR_EQUAL {
            difference.condition(-1, 0)
        } else if op == &logic::GREATER_OR_EQUAL {
            difference.condition(1, 0)
        } else if op == &logic::EQUAL {
            let up = difference.condition(1, 0)?;
            up.and(difference.condition(-1, 0)?)
        } else {
            None
        }
    }

    /// Adds the element of `value` at `at`, times `sign`; `None` where it is no small sum of elements and numbers.
    fn add_to(&mut self, sum: &mut Sum, value: ValueId, at: &[Dim], sign: i64) -> Option<()> {
        let (value, at) = match self.at(value, at) {
            Element::Of(value, at) => (value, at),
            known => {
                let number = known.int()?.as_const()?.checked_mul(sign)?;
                sum.number = sum.number.checked_add(number)?;
                return Some(());
            }
        };
        if self.depth > MAX_DEPTH || self.visits > MAX_VISITS {
            return None;
        }
        if let Def::Node { node, .. } = self.graph.value(value).def {
            let node = self.graph.node(node);
            let is_sub = node.op == &arith::SUB;
            if (is_sub || node.op == &arith::ADD) && is_wide(self.graph.ty(value).dtype) {
                let to = &self.graph.ty(value).dims;
                let signs = [sign, if is_sub { -sign } else { sign }];
                self.visits += 1;
                self.depth += 1;
                let added = node.operands().zip(signs).try_for_each(|(x, sign)| {
                    let at = broadcast(&self.graph.ty(x).dims, to, &at)?;
                    self.add_to(sum, x, &at, sign)
                });
                self.depth -= 1;
                return added;
            }
        }
        sum.add(value, at, sign)
    }

    /// Returns true if equal elements of `counter` say that the elements of `value` at the same two places differ by as much as
    /// the places do. Both indices are given as functions of the index variable of `axis`, which is the last index of `counter`.
    ///
    /// That holds for a running sum of booleans which are true wherever an element of `value` is not one more than the element
    /// before it: where the sum stays the same, no element was.
    pub fn counts_jumps(
        &mut self,
        (counter, at): (ValueId, &[Dim]),
        (value, of): (ValueId, &[Dim]),
        axis: usize,
    ) -> bool {
        self.jumps_of(counter, at).is_some_and(|(jumps, step)| {
            let variable = variable_name(axis).into();
            let moved =
                |to: &Dim| -> Vec<Dim> { of.iter().map(|d| replaced(d, &variable, to)).collect() };
            let (before, after) = (moved(&step), moved(&step.add(&Dim::ONE)));
            let goes_on = jumps.negated();
            let differ = |a: &Vec<Dim>, b: &Vec<Dim>, least| Condition::Difference {
                value,
                at: [a.clone(), b.clone()],
                least,
            };
            [differ(&after, &before, 1), differ(&before, &after, -1)]
                .iter()
                .all(|c| goes_on.conjuncts().contains(c))
        })
    }

    /// Returns when a running sum of booleans along the last axis grows by one from a place to the next, and the variable that
    /// stands for that place.
    fn jumps_of(&mut self, sum: ValueId, at: &[Dim]) -> Option<(Condition, Dim)> {
        let Def::Node { node: id, .. } = self.graph.value(sum).def else {
            return None;
        };
        let node = self.graph.node(id);
        let is_plain = node.op == &scan::CUM_SUM
            && node.attrs.int("exclusive") == 0
            && node.attrs.int("reverse") == 0;
        let (x, axis) = (node.operand(0)?, node.operand(1)?);
        let last = at.len().checked_sub(1)?;
        let axis = axis_of(self.first(axis)?.as_const()?, at.len())?;
        let ty = self.graph.ty(x);
        if !is_plain || axis != last || !is_wide(ty.dtype) {
            return None;
        }
        let name: Arc<str> = format!("#n{}.step", Id::index(id)).into();
        self.sizes
            .insert(name.clone(), ty.dims[last].sub(&Dim::ONE));
        let step = Dim::data(&name);
        match self.at(x, &with_index(at, last, step.add(&Dim::ONE))) {
            Element::Either(jumps, 1.0, 0.0) => Some((jumps, step)),
            Element::Either(stays, 0.0, 1.0) => Some((stays.negated(), step)),
            _ => None,
        }
    }

    fn integers(&self, node: &Node, dtype: DType, ints: &[Dim]) -> Option<Element> {
        let op = node.op;
        if let [a, b] = ints
            && let Some(condition) = self.compared(op, a, b)
        {
            return condition.map(Element::Bool);
        }
        let result = match ints {
            [a] if op == &arith::NEG => Dim::ZERO.sub(a),
            [a] if op == &arith::ABS && self.is_at_least(a, 0) => a.clone(),
            [a, b] if op == &arith::ADD => a.add(b),
            [a, b] if op == &arith::SUB => a.sub(b),
            [a, b] if op == &arith::MUL => a.mul(b),
            // Truncation is floor where neither side is negative.
            [a, b] if op == &arith::DIV || (op == &arith::MOD && node.attrs.int("fmod") == 0) => {
                let is_floor = self.is_at_least(a, 0) && self.is_at_least(b, 1);
                match (is_floor, op == &arith::DIV) {
                    (false, _) => return None,
                    (_, true) => a.div(b),
                    (_, false) => a.modulo(b),
                }
            }
            [a, b] if op == &extreme::MIN || op == &extreme::MAX => {
                let least = op == &extreme::MIN;
                match self.range(&a.sub(b)) {
                    (Some(lo), _) if lo >= 0 => if least { b } else { a }.clone(),
                    (_, Some(hi)) if hi <= 0 => if least { a } else { b }.clone(),
                    _ => return None,
                }
            }
            _ => return None,
        };
        // Narrow types wrap around; so would 64 bits where a polynomial saturated.
        let fits = match (result.as_const(), dtype.int_range()) {
            (Some(n), Some((least, greatest))) => (least..=greatest).contains(&n),
            _ => is_wide(dtype),
        };
        (fits && !result.may_be_saturated()).then_some(Element::Int(result))
    }

    /// Returns the outcome of a comparison of integers, itself `None` where it is too large to follow; `None` for ops
    /// that do not compare.
    fn compared(&self, op: &OpDef, left: &Dim, right: &Dim) -> Option<Option<Condition>> {
        let (up, down) = (right.sub(left), left.sub(right));
        let greater = |d: Dim| Some(Some(self.at_least_0(d.sub(&Dim::ONE))));
        if op == &logic::LESS {
            greater(up)
        } else if op == &logic::GREATER {
            greater(down)
        } else if op == &logic::LESS_OR_EQUAL {
            Some(Some(self.at_least_0(up)))
        } else if op == &logic::GREATER_OR_EQUAL {
            Some(Some(self.at_least_0(down)))
        } else {
            (op == &logic::EQUAL).then(|| self.at_least_0(up).and(self.at_least_0(down)))
        }
    }

    fn converted(&mut self, x: ValueId, at: &[Dim], from: DType, to: DType) -> Option<Element> {
        if from == DType::Bool {
            let condition = self.condition(x, at);
            if to == DType::Bool {
                return Some(Element::Bool(condition));
            }
            return choose(condition, Element::Number(1.0), Element::Number(0.0));
        }
        match (self.at(x, at), to) {
            (Element::Either(c, a, b), DType::Bool) => Some(choose_bool(c, a != 0.0, b != 0.0)),
            (Element::Int(d), DType::Bool) if d.as_const().is_none() => {
                let up = self.at_least_0(d.clone());
                let is_zero = up.and(self.at_least_0(Dim::ZERO.sub(&d)))?;
                Some(Element::Bool(is_zero.negated()))
            }
            (known, DType::Bool) => Some(Element::constant(to, known.number()?)),
            (Element::Int(d), _) if d.as_const().is_none() => {
                (is_wide(from) && is_wide(to)).then_some(Element::Int(d))
            }
            (Element::Either(c, a, b), _) => {
                Some(Element::Either(c, rounded(to, a)?, rounded(to, b)?))
            }
            (known, _) => Some(Element::constant(to, rounded(to, known.number()?)?)),
        }
    }
}

/// Returns true for integers that indices and sizes do not leave.
fn is_wide(dtype: DType) -> bool {
    matches!(dtype, DType::I64 | DType::I32)
}

/// A number and elements of integer values, each times 1 or −1.
#[derive(Default)]
struct Sum {
    number: i64,
    terms: Vec<(ValueId, Vec<Dim>, i64)>,
}

impl Sum {
    /// Adds an element; `None` where there are too many to follow.
    fn add(&mut self, value: ValueId, at: Vec<Dim>, sign: i64) -> Option<()> {
        let is_opposite =
            |(v, a, s): &(ValueId, Vec<Dim>, i64)| *v == value && *a == at && *s == -sign;
        match self.terms.iter().position(is_opposite) {
            Some(i) => drop(self.terms.swap_remove(i)),
            None => self.terms.push((value, at, sign)),
        }
        (self.terms.len() <= 2).then_some(())
    }

    /// Returns the condition that the sum, times `sign`, is at least `least`.
    fn condition(&self, sign: i64, least: i64) -> Option<Condition> {
        let least = least.checked_sub(self.number.checked_mul(sign)?)?;
        let of = |s: i64| self.terms.iter().find(|term| term.2 == s);
        match (self.terms.len(), of(sign), of(-sign)) {
            (0, ..) => Some(Condition::Is(least <= 0)),
            (2, Some((v, a, _)), Some((w, b, _))) if v == w => Some(Condition::Difference {
                value: *v,
                at: [a.clone(), b.clone()],
                least,
            }),
            _ => None,
        }
    }
}

/// Returns an index with another index along one axis.
fn with_index(at: &[Dim], axis: usize, i: Dim) -> Vec<Dim> {
    let mut to = at.to_vec();
    to[axis] = i;
    to
}

/// Returns `d` with `to` in the place of a variable.
fn replaced(d: &Dim, name: &Arc<str>, to: &Dim) -> Dim {
    d.substitute(&|atom| match atom {
        Atom::Data(n) if n == name => Some(to.clone()),
        _ => None,
    })
}

fn has_leaf(d: &Dim, wanted: &Atom) -> bool {
    let mut found = false;
    d.for_each_leaf(&mut |leaf| found |= leaf == wanted);
    found
}

/// Returns by how much `d` grows with a variable; `None` where it is not linear in it.
fn slope(d: &Dim, name: &Arc<str>) -> Option<Dim> {
    let variable = Atom::Data(name.clone());
    let mut sum = Dim::ZERO;
    for (monomial, coefficient) in d.terms() {
        let mut factor = Dim::from(coefficient);
        let mut times = 0;
        for atom in monomial {
            if atom == variable {
                times += 1;
                continue;
            }
            let atom = Dim::from_atom(atom);
            if has_leaf(&atom, &variable) {
                return None;
            }
            factor = factor.mul(&atom);
        }
        match times {
            0 => {}
            1 => sum = sum.add(&factor),
            _ => return None,
        }
    }
    Some(sum)
}
