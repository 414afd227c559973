//! What a recipe sees of a foreign node: its operands, its attributes, and a builder that emits in its place.

use super::super::proto::attribute_proto::AttributeType;
use super::super::proto::{AttributeProto, NodeProto};
use super::Quantised;
use ckpt_passes::ir::{Attrs, Builder, DType, Dim, Same, Tensor, Ty, ValueId};
use ckpt_passes::ops::random::SEED;
use ckpt_passes::ops::shape::{EXPAND, RESHAPE, TRANSPOSE, UNSQUEEZE};
use ckpt_passes::ops::{concat, fill, index, random, shape};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// One result of a foreign node.
pub(in super::super) enum Out {
    Value(ValueId),
    /// Not computed; who reads it is told this.
    Absent(&'static str),
}

pub(in super::super) struct Call<'c, 'g> {
    pub(in super::super) b: Builder<'g>,
    op_type: &'c str,
    attributes: BTreeMap<&'c str, &'c AttributeProto>,
    ins: &'c [Option<ValueId>],
    /// Operands that some line of the recipe asked for.
    seen: Vec<bool>,
    outputs: &'c [String],
    pub(super) opset: i64,
    first_new: usize,
    /// Whether the node was a dropout, and one that drops.
    pub(super) dropout: Option<bool>,
    /// What a quantising node made its integers of.
    pub(super) quantised: Option<Quantised>,
    /// What the integers of the nodes before were made of.
    known_quantised: &'c BTreeMap<ValueId, Quantised>,
}

impl<'c, 'g> Call<'c, 'g> {
    pub(super) fn new(
        b: Builder<'g>,
        node: &'c NodeProto,
        ins: &'c [Option<ValueId>],
        opset: i64,
        known_quantised: &'c BTreeMap<ValueId, Quantised>,
    ) -> Call<'c, 'g> {
        let first_new = b.graph.order().len();
        Call {
            b,
            op_type: node.op_type(),
            attributes: node.attribute.iter().map(|a| (a.name(), a)).collect(),
            ins,
            seen: vec![false; ins.len()],
            outputs: &node.output,
            opset,
            first_new,
            dropout: None,
            quantised: None,
            known_quantised,
        }
    }

    /// Fails if an operand or attribute was never asked for; gives each result a name of its own.
    pub(super) fn finish(&mut self, outs: Vec<Out>) -> Result<Option<Vec<Out>>> {
        if let Some(name) = self.attributes.keys().next() {
            return Err(self
                .unsupported(format!("attribute `{name}`"))
                .help("export without it, or without this fusion"));
        }
        let unseen = self
            .ins
            .iter()
            .zip(&self.seen)
            .position(|(v, seen)| v.is_some() && !seen);
        if let Some(slot) = unseen {
            return Err(self
                .unsupported(format!("operand {slot}"))
                .help("export without it, or without this fusion"));
        }
        let first = self.first_new;
        super::own_results(self, outs, first).map(Some)
    }

    pub(super) fn unsupported(&self, what: impl std::fmt::Display) -> Box<Error> {
        Error::model("op", format!("{}: {what} is not supported", self.op_type))
    }

    pub(super) fn fail(&self, kind: &'static str, what: impl std::fmt::Display) -> Box<Error> {
        Error::model(kind, format!("{}: {what}", self.op_type))
    }

    /// Operand `slot`, if given.
    pub(super) fn opt(&mut self, slot: usize) -> Option<ValueId> {
        if let Some(seen) = self.seen.get_mut(slot) {
            *seen = true;
        }
        self.ins.get(slot).copied().flatten()
    }

    /// Operand `slot`, called `name` in the op's text.
    pub(super) fn need(&mut self, slot: usize, name: &str) -> Result<ValueId> {
        self.opt(slot)
            .ok_or_else(|| self.fail("arity", format!("operand {slot} (`{name}`) is missing")))
    }

    /// Fails if operand `slot` is given.
    pub(super) fn refuse(&mut self, slot: usize, name: &str) -> Result<()> {
        match self.opt(slot) {
            Some(_) => Err(self
                .unsupported(format!("operand {slot} (`{name}`)"))
                .help("export the model without caches and without this fusion")),
            None => Ok(()),
        }
    }

    /// Whether the file names result `slot`.
    pub(super) fn wants(&self, slot: usize) -> bool {
        self.outputs.get(slot).is_some_and(|n| !n.is_empty())
    }

    fn attribute(&mut self, name: &str, kind: AttributeType) -> Result<Option<&'c AttributeProto>> {
        match self.attributes.remove(name) {
            None => Ok(None),
            Some(a) if a.r#type() == kind => Ok(Some(a)),
            Some(_) => Err(self
                .fail("attribute", format!("`{name}` is of the wrong kind"))
                .expected(kind.as_str_name())),
        }
    }

    pub(super) fn int(&mut self, name: &str, default: i64) -> Result<i64> {
        let found = self.attribute(name, AttributeType::Int)?;
        Ok(found.map_or(default, |a| a.i()))
    }

    /// An integer attribute that may be asked for again.
    pub(super) fn peek_int(&self, name: &str) -> Option<i64> {
        let found = self.attributes.get(name)?;
        (found.r#type() == AttributeType::Int).then(|| found.i())
    }

    /// An integer attribute that has no default.
    pub(super) fn opt_int(&mut self, name: &str) -> Result<Option<i64>> {
        let found = self.attribute(name, AttributeType::Int)?;
        Ok(found.map(AttributeProto::i))
    }

    pub(super) fn float(&mut self, name: &str, default: f32) -> Result<f32> {
        let found = self.attribute(name, AttributeType::Float)?;
        Ok(found.map_or(default, |a| a.f()))
    }

    pub(super) fn str(&mut self, name: &str, default: &'c str) -> Result<&'c str> {
        let found = self.attribute(name, AttributeType::String)?;
        let text = found.map_or(Ok(default), |a| std::str::from_utf8(a.s()));
        text.map_err(|_| self.fail("attribute", format!("`{name}` is no text")))
    }

    pub(super) fn ints(&mut self, name: &str) -> Result<Option<Vec<i64>>> {
        let found = self.attribute(name, AttributeType::Ints)?;
        Ok(found.map(|a| a.ints.clone()))
    }

    pub(super) fn string(&mut self, name: &str, default: &str) -> Result<String> {
        let found = self.attribute(name, AttributeType::String)?;
        let text = found.map_or(Ok(default.to_string()), |a| {
            String::from_utf8(a.s().to_vec())
        });
        text.map_err(|_| self.fail("attribute", format!("`{name}` is no text")))
    }

    /// An attribute that names an element type by ONNX's number.
    pub(super) fn dtype_attribute(&mut self, name: &str) -> Result<Option<DType>> {
        let Some(found) = self.attribute(name, AttributeType::Int)? else {
            return Ok(None);
        };
        let dtype = i32::try_from(found.i())
            .ok()
            .and_then(DType::from_onnx_code);
        dtype
            .map(Some)
            .ok_or_else(|| self.unsupported(format!("element type {}", found.i())))
    }

    /// An attribute whose value does not matter here.
    pub(super) fn ignore(&mut self, name: &str) {
        self.attributes.remove(name);
    }

    /// Fails unless the attribute is absent or 0.
    pub(super) fn refuse_attribute(&mut self, name: &str) -> Result<()> {
        match self.int(name, 0)? {
            0 => Ok(()),
            other => Err(self.unsupported(format!("`{name}` = {other}"))),
        }
    }

    /// An attribute that says how many heads there are.
    pub(super) fn heads(&mut self, name: &str) -> Result<i64> {
        match self.int(name, 0)? {
            n if n > 0 => Ok(n),
            n => Err(self
                .fail("attribute", format!("`{name}` must be given and positive"))
                .found(n.to_string())),
        }
    }

    /// The seed that comes with every step; the graph gets an input for it with its first random op.
    pub(super) fn seed(&mut self) -> Result<ValueId> {
        let ty = Ty::scalar(DType::I64);
        let graph = &mut *self.b.graph;
        let found = graph
            .inputs()
            .iter()
            .copied()
            .find(|v| graph.value(*v).name == SEED);
        match found {
            Some(seed) if graph.value(seed).ty.as_ref() == Some(&ty) => return Ok(seed),
            None if !graph.has_value_name(SEED) => return Ok(graph.add_input(SEED, Some(ty))),
            _ => {}
        }
        Err(self
            .fail(
                "name",
                format!("`{SEED}` is taken, and random ops need it for the seed"),
            )
            .help("rename it in the model"))
    }

    /// The number of a stream of random numbers that no other call draws from.
    pub(super) fn stream(&mut self) -> ValueId {
        let mut name = format!("{}.stream", self.b.prefix);
        if self.b.graph.has_value_name(&name) {
            name = format!("{name}.{}", self.b.graph.value_bound());
        }
        let number = random::stream(&name);
        self.b.graph.add_init(&name, Tensor::int(number))
    }

    /// What integers were made of, if a quantising node made them.
    pub(super) fn quantised_as(&self, integers: ValueId) -> Option<Quantised> {
        self.known_quantised.get(&integers).copied()
    }

    pub(super) fn dtype(&self, v: ValueId) -> DType {
        self.b.ty(v).dtype
    }

    pub(super) fn dims(&self, v: ValueId) -> &[Dim] {
        &self.b.ty(v).dims
    }

    /// Size of `axis` of `v`, which has to be a number.
    pub(super) fn size(&self, v: ValueId, axis: usize, what: &str) -> Result<i64> {
        let dim = self.dims(v).get(axis).cloned();
        dim.as_ref().and_then(Dim::as_const).ok_or_else(|| {
            self.fail("shape", format!("{what} has to be a fixed number"))
                .found(format!("axis {axis} of {}", self.b.ty(v)))
        })
    }

    /// Fails unless `v` has one of these ranks.
    pub(super) fn want_rank(&self, v: ValueId, ranks: &[usize], what: &str) -> Result<()> {
        if ranks.contains(&self.b.rank(v)) {
            return Ok(());
        }
        let expected: Vec<String> = ranks.iter().map(usize::to_string).collect();
        Err(self
            .fail("shape", format!("`{what}` has the wrong number of axes"))
            .expected(expected.join(" or "))
            .found(self.b.ty(v).to_string()))
    }

    /// Whether two sizes are equal in every run.
    pub(super) fn same(&self, a: &Dim, b: &Dim) -> bool {
        a.same(b) == Same::Yes
    }

    /// Reshape that copies where `dims` says 0 and computes where it says -1 (ONNX Reshape, `allowzero` = 0).
    pub(super) fn reshape(&mut self, v: ValueId, dims: &[i64]) -> Result<ValueId> {
        let dims = self.b.ints(dims);
        self.b.emit(&RESHAPE, &[v, dims], Attrs::new())
    }

    pub(super) fn transpose(&mut self, v: ValueId, perm: &[i64]) -> Result<ValueId> {
        let attrs = Attrs::new().with("perm", perm.to_vec());
        self.b.emit(&TRANSPOSE, &[v], attrs)
    }

    pub(super) fn unsqueeze(&mut self, v: ValueId, axes: &[i64]) -> Result<ValueId> {
        let axes = self.b.ints(axes);
        self.b.emit(&UNSQUEEZE, &[v, axes], Attrs::new())
    }

    pub(super) fn expand(&mut self, v: ValueId, shape: ValueId) -> Result<ValueId> {
        self.b.emit(&EXPAND, &[v, shape], Attrs::new())
    }

    pub(super) fn gather_rows(&mut self, table: ValueId, rows: ValueId) -> Result<ValueId> {
        let attrs = Attrs::new().with("axis", 0);
        self.b.emit(&index::GATHER, &[table, rows], attrs)
    }

    pub(super) fn concat(&mut self, parts: &[ValueId], axis: i64) -> Result<ValueId> {
        let attrs = Attrs::new().with("axis", axis);
        self.b.emit(&concat::CONCAT, parts, attrs)
    }

    /// `v` cut along `axis` into parts of these sizes.
    pub(super) fn split(&mut self, v: ValueId, sizes: &[i64], axis: i64) -> Result<Vec<ValueId>> {
        let cuts = self.b.ints(sizes);
        let attrs = Attrs::new().with("axis", axis);
        let ins = vec![Some(v), Some(cuts)];
        self.b.emit_n(&concat::SPLIT, ins, attrs, sizes.len())
    }

    /// `v` times a number.
    pub(super) fn scaled(&mut self, v: ValueId, factor: f64) -> Result<ValueId> {
        let factor = self.b.scalar(self.dtype(v), factor);
        self.b.mul(v, factor)
    }

    /// The size of one axis as an int64 scalar.
    pub(super) fn axis_size(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        if let Some(n) = self.dims(v)[axis].as_const() {
            return Ok(self.b.int(n));
        }
        let all = self.b.emit(&shape::SHAPE, &[v], Attrs::new())?;
        let at = self.b.int(axis as i64);
        self.gather_rows(all, at)
    }

    /// The size of one axis as an int64 vector of one element.
    pub(super) fn axis_vector(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        if let Some(n) = self.dims(v)[axis].as_const() {
            return Ok(self.b.ints(&[n]));
        }
        let attrs = Attrs::new()
            .with("start", axis as i64)
            .with("end", axis as i64 + 1);
        self.b.emit(&shape::SHAPE, &[v], attrs)
    }

    /// `v` in the shape that an int64 vector says, zero meaning zero.
    pub(super) fn reshape_to(&mut self, v: ValueId, shape: ValueId) -> Result<ValueId> {
        let attrs = Attrs::new().with("allowzero", 1);
        self.b.emit(&RESHAPE, &[v, shape], attrs)
    }

    /// 0, 1, … up to the size of an axis: int64 [size].
    pub(super) fn positions(&mut self, v: ValueId, axis: usize) -> Result<ValueId> {
        let (zero, one) = (self.b.int(0), self.b.int(1));
        let size = self.axis_size(v, axis)?;
        self.b.emit(&fill::RANGE, &[zero, size, one], Attrs::new())
    }
}
