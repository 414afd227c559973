//! What an element of a tensor is, as a function of where it stands: `arange[i] = i`, `mask[b, h, i, j] = j <= i`.
//!
//! Exporters write masks and positions as long chains of integer and boolean ops over sizes that nobody knows yet. Asked
//! for the element at symbolic indices, [`Elements`] follows such a chain backwards: layout ops move the indices,
//! arithmetic makes polynomials of indices and named sizes, comparisons make conditions ([`Condition`]). Every answer is
//! true for all sizes and all data; what cannot be followed is the element of some value at some place, and no more.
//! Index variables are [`Dim`] atoms named `#0`, `#1`, …, one an axis, which are at least 0 and less than their sizes.
//!
//! Answers are remembered, so asking every attention of a model about one mask costs one walk. Depth and work are
//! bounded: a graph made to be hard gets fewer answers, not a long wait.

mod arithmetic;
mod condition;
mod constant;
mod layout;

pub use condition::Condition;

use crate::analysis::residual_stream::Flow;
use crate::ir::{Atom, Def, Dim, Graph, NodeId, Same, ValueId};
use crate::ops::{concat, fill, index, logic, scan, shape};
use constant::Table;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Longest chain of nodes that is followed.
const MAX_DEPTH: usize = 150;
/// Most nodes that one question visits.
const MAX_VISITS: usize = 20_000;

/// What an element is.
#[derive(Clone, Debug, PartialEq)]
pub enum Element {
    /// An integer: a polynomial in sizes and index variables.
    Int(Dim),
    /// A number that is the same at all indices.
    Number(f64),
    Bool(Condition),
    /// The first number where the condition holds, else the second.
    Either(Condition, f64, f64),
    /// The element of a value that is not followed further.
    Of(ValueId, Vec<Dim>),
}

impl Element {
    pub fn int(self) -> Option<Dim> {
        match self {
            Element::Int(d) => Some(d),
            Element::Number(x) if x.fract() == 0.0 && x.abs() < 1e15 => Some(Dim::from(x as i64)),
            _ => None,
        }
    }

    /// A number that is the same everywhere.
    pub fn number(&self) -> Option<f64> {
        match self {
            Element::Int(d) => d.as_const().map(|n| n as f64),
            Element::Number(x) => Some(*x),
            _ => None,
        }
    }
}

/// The index variable of axis `axis` of what is asked for.
pub fn index_variable(axis: usize) -> Dim {
    Dim::data(&variable_name(axis))
}

fn variable_name(axis: usize) -> String {
    format!("#{axis}")
}

/// Answers about the elements of one graph's values.
pub struct Elements<'g> {
    graph: &'g Graph,
    flow: &'g Flow,
    /// Sizes of the axes that index variables run over, by the variable's name.
    sizes: BTreeMap<Arc<str>, Dim>,
    /// Every tuple of sizes that was asked about, and its number.
    scopes: BTreeMap<Vec<Dim>, u32>,
    scope: u32,
    memo: FxHashMap<(u32, ValueId, usize, Vec<Dim>), Element>,
    tables: BTreeMap<ValueId, Option<Arc<Table>>>,
    depth: usize,
    visits: usize,
}

impl<'g> Elements<'g> {
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

    /// The element of `value` at index variables that run over `sizes`, one an axis of the space asked about. The value
    /// broadcasts to that space from the right.
    pub fn ask(&mut self, value: ValueId, sizes: &[Dim]) -> Element {
        self.enter(sizes);
        let variables: Vec<Dim> = (0..sizes.len()).map(index_variable).collect();
        let dims = &self.graph.ty(value).dims;
        match layout::broadcast(dims, sizes, &variables) {
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

    /// All elements of a small constant integer tensor.
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

    /// The number that every element of a value is.
    pub fn number(&mut self, value: ValueId) -> Option<f64> {
        let dims = self.graph.ty(value).dims.clone();
        self.ask(value, &dims).number()
    }

    /// The operand's element that element `at` of a layout op's result is; `None` for other ops.
    pub fn source(&mut self, id: NodeId, slot: usize, at: &[Dim]) -> Option<(ValueId, Vec<Dim>)> {
        self.moved(self.graph.node(id), slot, at)
    }

    /// Proven bounds of an index polynomial, over all indices.
    pub fn range(&self, d: &Dim) -> (Option<i64>, Option<i64>) {
        (
            self.extreme(d, false).bounds().0,
            self.extreme(d, true).bounds().1,
        )
    }

    /// `d` where it is largest over all indices; index variables of no known direction stay in it.
    pub fn largest(&self, d: &Dim) -> Dim {
        self.extreme(d, true)
    }

    /// `d` with every index variable of known direction at the end that makes it smallest, or largest.
    fn extreme(&self, d: &Dim, largest: bool) -> Dim {
        let mut out = d.clone();
        let mut names: Vec<Arc<str>> = Vec::new();
        for (monomial, _) in d.terms() {
            for atom in monomial {
                if let Atom::Data(name) = atom
                    && self.sizes.contains_key(&name)
                    && !names.contains(&name)
                {
                    names.push(name);
                }
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

    /// `d >= 0` as a condition.
    fn at_least_0(&self, d: Dim) -> Condition {
        match self.range(&d) {
            (Some(lo), _) if lo >= 0 => Condition::Is(true),
            (_, Some(hi)) if hi < 0 => Condition::Is(false),
            _ => Condition::AtLeast0(d),
        }
    }

    /// The element of `value` at `at`.
    pub(crate) fn at(&mut self, value: ValueId, at: &[Dim]) -> Element {
        let slot = match self.graph.value(value).def {
            Def::Node { slot, .. } => slot,
            _ => 0,
        };
        let key = (self.scope, value, slot, at.to_vec());
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
            // What is trained is no constant, whatever its file says it starts with.
            Def::Init(_) if self.flow.active[value] => None,
            Def::Init(_) => self.constant(value, at),
            Def::Node { node, slot } => self.computed(*node, *slot, at),
        };
        self.depth -= 1;
        let found = found.unwrap_or(unknown);
        self.memo.insert(key, found.clone());
        found
    }

    /// As [`Elements::at`], as a condition; of a value that is boolean.
    fn condition(&mut self, value: ValueId, at: &[Dim]) -> Condition {
        match self.at(value, at) {
            Element::Bool(condition) => condition,
            Element::Of(value, at) => Condition::Data {
                value,
                at,
                holds: true,
            },
            // A boolean is never a number; kept whole if it ever is.
            _ => Condition::Data {
                value,
                at: at.to_vec(),
                holds: true,
            },
        }
    }

    fn computed(&mut self, id: NodeId, slot: usize, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        if node.op.is_layout() || node.op == &concat::TILE || node.op == &index::GATHER {
            let (x, to) = self.moved(node, slot, at)?;
            return Some(self.at(x, &to));
        }
        if node.op == &shape::SHAPE {
            let x = node.ins[0]?;
            let first = node.attrs.opt_int("start").unwrap_or(0);
            let dims = &self.graph.ty(x).dims;
            let first = first.clamp(-(dims.len() as i64), dims.len() as i64);
            let first = if first < 0 {
                first + dims.len() as i64
            } else {
                first
            };
            let k = usize::try_from(at[0].as_const()? + first).ok()?;
            return dims.get(k).cloned().map(Element::Int);
        }
        if node.op == &shape::SIZE {
            return Some(Element::Int(self.graph.ty(node.ins[0]?).elements()));
        }
        if node.op == &fill::RANGE {
            let dtype = self.graph.ty(node.outs[0]).dtype;
            if !dtype.is_int() {
                return None;
            }
            let (start, delta) = (
                self.at(node.ins[0]?, &[]).int()?,
                self.at(node.ins[2]?, &[]).int()?,
            );
            return Some(Element::Int(start.add(&delta.mul(&at[0]))));
        }
        if node.op == &fill::CONSTANT_OF_SHAPE {
            let value = node.attrs.opt_tensor("value");
            let x = value.map_or(Some(0.0), |t| t.get_f64(0))?;
            return Some(match self.graph.ty(node.outs[0]).dtype {
                d if d.is_float() => Element::Number(x),
                d if d.is_int() => Element::Int(Dim::from(value?.get_i64(0)?)),
                _ => Element::Bool(Condition::Is(x != 0.0)),
            });
        }
        if node.op == &fill::TRILU {
            return self.triangle(id, at);
        }
        if node.op == &concat::CONCAT {
            return self.concatenated(id, at);
        }
        if node.op == &scan::CUM_SUM {
            return self.summed(id, at);
        }
        if node.op == &index::GATHER_ND {
            return self.gathered(id, at);
        }
        if node.op == &index::GATHER_ELEMENTS {
            let (x, indices) = (node.ins[0]?, node.ins[1]?);
            let dims = &self.graph.ty(x).dims;
            let axis = layout::axis_of(node.attrs.int("axis"), dims.len())?;
            let mut to = at.to_vec();
            to[axis] = self.index(indices, at, &dims[axis])?;
            return Some(self.at(x, &to));
        }
        self.arithmetic(id, at)
    }

    /// The triangle that is kept, zero elsewhere.
    fn triangle(&mut self, id: NodeId, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let k = match node.ins.get(1).copied().flatten() {
            Some(k) => {
                let place: Vec<Dim> = self.graph.ty(k).dims.iter().map(|_| Dim::ZERO).collect();
                self.at(k, &place).int()?
            }
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
        if self.graph.ty(x).dtype == crate::ir::DType::Bool {
            let inside = self.condition(x, at);
            return keep.and(inside).map(Element::Bool);
        }
        let inside = self.at(x, at);
        arithmetic::choose(keep, inside, Element::Number(0.0))
    }

    fn concatenated(&mut self, id: NodeId, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let axis = layout::axis_of(node.attrs.int("axis"), at.len())?;
        let place = &at[axis];
        let mut offset = Dim::ZERO;
        let mut pieces: Vec<(ValueId, Dim)> = Vec::new();
        for x in node.ins.iter().flatten() {
            let size = self.graph.ty(*x).dims[axis].clone();
            let inside = place.sub(&offset);
            let after = size.sub(&Dim::ONE).sub(&inside);
            if self.range(&inside).0.is_some_and(|lo| lo >= 0)
                && self.range(&after).0.is_some_and(|lo| lo >= 0)
            {
                let mut to = at.to_vec();
                to[axis] = inside;
                return Some(self.at(*x, &to));
            }
            pieces.push((*x, offset.clone()));
            offset = offset.add(&size);
        }
        self.unified(id, axis, at, &pieces, &offset)
    }

    /// One polynomial that all pieces of a `Concat` agree with: pieces of one element are points on it.
    fn unified(
        &mut self,
        id: NodeId,
        axis: usize,
        at: &[Dim],
        pieces: &[(ValueId, Dim)],
        total: &Dim,
    ) -> Option<Element> {
        let name: Arc<str> = format!("#n{}", crate::ir::Id::index(id)).into();
        self.sizes.insert(name.clone(), total.clone());
        let variable = Dim::data(&name);
        let mut line: Option<Dim> = None;
        for (x, offset) in pieces {
            if self.graph.ty(*x).dims[axis].is_one() {
                continue;
            }
            let mut to = at.to_vec();
            to[axis] = variable.sub(offset);
            let piece = self.at(*x, &to).int()?;
            if line.as_ref().is_some_and(|l| *l != piece) {
                return None;
            }
            line = Some(piece);
        }
        let line = line?;
        for (x, offset) in pieces {
            if !self.graph.ty(*x).dims[axis].is_one() {
                continue;
            }
            let mut to = at.to_vec();
            to[axis] = Dim::ZERO;
            let point = self.at(*x, &to).int()?;
            if point.same(&replaced(&line, &name, offset)) != Same::Yes {
                return None;
            }
        }
        Some(Element::Int(replaced(&line, &name, &at[axis])))
    }

    /// A running sum of equal elements.
    fn summed(&mut self, id: NodeId, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let (x, axis) = (node.ins[0]?, node.ins[1]?);
        let place: Vec<Dim> = self.graph.ty(axis).dims.iter().map(|_| Dim::ZERO).collect();
        let axis = self.at(axis, &place).int()?.as_const()?;
        let axis = layout::axis_of(axis, at.len())?;
        let size = self.graph.ty(x).dims[axis].clone();
        let name: Arc<str> = format!("#n{}", crate::ir::Id::index(id)).into();
        self.sizes.insert(name.clone(), size.clone());
        let mut to = at.to_vec();
        to[axis] = Dim::data(&name);
        let each = self.at(x, &to).int()?;
        // Every element along the axis is the same one.
        let mut moves = false;
        each.for_each_leaf(&mut |atom| moves |= *atom == Atom::Data(name.clone()));
        if moves || !self.graph.ty(x).dtype.is_int() {
            return None;
        }
        let inclusive = Dim::from((node.attrs.int("exclusive") == 0) as i64);
        let count = match node.attrs.int("reverse") {
            0 => at[axis].add(&inclusive),
            _ => size.sub(&Dim::ONE).sub(&at[axis]).add(&inclusive),
        };
        Some(Element::Int(each.mul(&count)))
    }

    fn gathered(&mut self, id: NodeId, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let (x, indices) = (node.ins[0]?, node.ins[1]?);
        let batch = usize::try_from(node.attrs.int("batch_dims")).ok()?;
        let dims = self.graph.ty(x).dims.clone();
        let rank = self.graph.ty(indices).rank();
        let named = self.graph.ty(indices).dims.last()?.as_const()?;
        let head = at.get(..rank - 1)?;
        let mut to = at.get(..batch)?.to_vec();
        for k in 0..named {
            let mut tuple = head.to_vec();
            tuple.push(Dim::from(k));
            let axis = batch + k as usize;
            to.push(self.index(indices, &tuple, dims.get(axis)?)?);
        }
        to.extend_from_slice(&at[rank - 1..]);
        (to.len() == dims.len()).then(|| self.at(x, &to))
    }

    fn compared(&mut self, op: &crate::ir::OpDef, left: Dim, right: Dim) -> Option<Condition> {
        let up = right.sub(&left);
        let down = left.sub(&right);
        if op == &logic::LESS {
            return Some(self.at_least_0(up.sub(&Dim::ONE)));
        }
        if op == &logic::LESS_OR_EQUAL {
            return Some(self.at_least_0(up));
        }
        if op == &logic::GREATER {
            return Some(self.at_least_0(down.sub(&Dim::ONE)));
        }
        if op == &logic::GREATER_OR_EQUAL {
            return Some(self.at_least_0(down));
        }
        if op == &logic::EQUAL {
            let (up, down) = (self.at_least_0(up), self.at_least_0(down));
            return up.and(down);
        }
        None
    }
}

/// `at * step`.
fn scaled_index(at: &Dim, step: i64) -> Dim {
    at.mul(&Dim::from(step))
}

/// `d` with `to` in the place of a variable.
fn replaced(d: &Dim, name: &Arc<str>, to: &Dim) -> Dim {
    d.substitute(&|atom| match atom {
        Atom::Data(n) if n == name => Some(to.clone()),
        _ => None,
    })
}

/// By how much `d` grows with a variable; `None` where it is not linear in it.
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
            let mut inside = false;
            atom.for_each_leaf(&mut |leaf| inside |= *leaf == variable);
            if inside {
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
