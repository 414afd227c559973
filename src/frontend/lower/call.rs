//! The node that a recipe lowers: its operands, its attributes, and a builder that emits nodes in its place.

use ckpt_passes::ir::{Attr, AttrKind, DType, Dim, Same, Tensor, Ty, ValueId};
use ckpt_passes::ops::random::{self, SEED};
use ckpt_passes::ops::shape::IDENTITY;
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

/// One result of a lowered node.
pub enum Out {
    /// A value of the graph that is being built.
    Value(ValueId),
    /// A result that is not computed, and the reason, for errors about its readers.
    Absent(&'static str),
}

/// The reason of an [`Out::Absent`] that the file does not name, so that nothing reads it.
pub(super) const UNREAD: &str = "the file does not name this result";

/// The results of a lowered node, in slot order; `None` where the recipe leaves the node to its row.
pub type Lowered = Result<Option<Vec<Out>>>;

/// Returns a value as the only result.
pub(super) fn one(v: ValueId) -> Lowered {
    Ok(Some(vec![Out::Value(v)]))
}

/// Attributes of a foreign node; `None` for a value of a kind that no recipe reads.
pub type Attributes = BTreeMap<String, Option<Attr>>;

/// What a reader knows of quantised values.
#[derive(Debug, Default)]
pub struct QuantisedValues {
    /// Values that nodes quantised, by the integers that came out.
    pub integers: BTreeMap<ValueId, Quantised>,
    /// Initializers of four bits, which are bytes in the graph.
    pub packed: BTreeMap<ValueId, Packed>,
}

/// An initializer of integers of four bits, two in a byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The sizes.
    pub shape: Vec<i64>,
    /// INT4, not UINT4.
    pub signed: bool,
}

/// The operands that quantised numbers were computed from.
#[derive(Clone, Copy, Debug)]
pub struct Quantised {
    pub(super) real: ValueId,
    pub(super) scale: ValueId,
    pub(super) zero_point: Option<ValueId>,
    pub(super) layout: Layout,
}

/// The axis along which scales vary, and the number of its elements that share one scale (0: none do).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) axis: i64,
    pub(super) block: i64,
}

/// A foreign node as a recipe sees it. It dereferences to the builder.
pub struct Call<'c, 'g> {
    /// Emits nodes in place of the foreign node.
    pub b: Builder<'g>,
    op_type: &'c str,
    attributes: Attributes,
    ins: &'c [Option<ValueId>],
    /// Operands that some line of the recipe asked for.
    seen: Vec<bool>,
    /// Whether each result has a name in the file.
    wanted: Vec<bool>,
    pub(super) opset: i64,
    first_new: usize,
    /// For a dropout node: whether it is active.
    pub dropout: Option<bool>,
    /// For a quantising node: what it made its integers of.
    pub quantised: Option<Quantised>,
    known_quantised: &'c QuantisedValues,
}

impl<'g> Deref for Call<'_, 'g> {
    type Target = Builder<'g>;

    fn deref(&self) -> &Builder<'g> {
        &self.b
    }
}

impl DerefMut for Call<'_, '_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.b
    }
}

impl<'c, 'g> Call<'c, 'g> {
    /// Describes a node of `op_type` in a file of `opset`.
    pub fn new(
        b: Builder<'g>,
        op_type: &'c str,
        opset: i64,
        attributes: Attributes,
        ins: &'c [Option<ValueId>],
        wanted: Vec<bool>,
        known_quantised: &'c QuantisedValues,
    ) -> Call<'c, 'g> {
        let first_new = b.graph.order().len();
        Call {
            b,
            op_type,
            attributes,
            ins,
            seen: vec![false; ins.len()],
            wanted,
            opset,
            first_new,
            dropout: None,
            quantised: None,
            known_quantised,
        }
    }

    /// Fails if an operand or attribute was never asked for; gives each named result a node of its own.
    pub(super) fn finish(&mut self, outs: Vec<Out>) -> Lowered {
        let unread = match self.attributes.keys().next() {
            Some(name) => Some(format!("attribute `{name}`")),
            None => {
                let mut operands = self.ins.iter().zip(&self.seen);
                let slot = operands.position(|(v, seen)| v.is_some() && !seen);
                slot.map(|slot| format!("operand {slot}"))
            }
        };
        if let Some(what) = unread {
            return Err(self
                .unsupported(what)
                .help("export without it, or without this fusion"));
        }
        let mut named: Vec<ValueId> = Vec::new();
        let mut own = Vec::with_capacity(outs.len());
        for (slot, out) in outs.into_iter().enumerate() {
            own.push(match out {
                Out::Value(v) if self.wants(slot) => {
                    let node = self.graph.def_node(v);
                    let emitted =
                        node.is_some_and(|n| self.graph.order()[self.first_new..].contains(&n));
                    let v = match emitted && !named.contains(&v) {
                        true => v,
                        false => self.op(&IDENTITY, &[v])?,
                    };
                    named.push(v);
                    Out::Value(v)
                }
                other => other,
            });
        }
        Ok(Some(own))
    }

    pub(super) fn unsupported(&self, what: impl std::fmt::Display) -> Box<Error> {
        Error::model("op", format!("{}: {what} is not supported", self.op_type))
    }

    pub(super) fn fail(&self, kind: &'static str, what: impl std::fmt::Display) -> Box<Error> {
        Error::model(kind, format!("{}: {what}", self.op_type))
    }

    /// Returns operand `slot`, if given.
    pub(super) fn opt(&mut self, slot: usize) -> Option<ValueId> {
        if let Some(seen) = self.seen.get_mut(slot) {
            *seen = true;
        }
        self.ins.get(slot).copied().flatten()
    }

    /// Returns operand `slot`, called `name` in the op's specification.
    pub(super) fn need(&mut self, slot: usize, name: &str) -> Result<ValueId> {
        self.opt(slot)
            .ok_or_else(|| self.fail("arity", format!("operand {slot} (`{name}`) is missing")))
    }

    /// Returns the first operands, which are all required, by their names in the op's specification.
    pub(super) fn operands<const N: usize>(&mut self, names: [&str; N]) -> Result<[ValueId; N]> {
        let mut found = [None; N];
        for (slot, name) in names.into_iter().enumerate() {
            found[slot] = Some(self.need(slot, name)?);
        }
        Ok(found.map(|v| v.expect("every operand was found")))
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

    /// Returns true if the file names result `slot`.
    pub(super) fn wants(&self, slot: usize) -> bool {
        self.wanted.get(slot).is_some_and(|wanted| *wanted)
    }

    fn attr(&mut self, name: &str, kind: AttrKind) -> Result<Option<Attr>> {
        match self.attributes.remove(name) {
            None => Ok(None),
            Some(Some(value)) if value.kind() == kind => Ok(Some(value)),
            Some(_) => Err(self
                .fail("attribute", format!("`{name}` is of the wrong kind"))
                .expected(kind.to_string())),
        }
    }

    pub(super) fn attr_opt_int(&mut self, name: &str) -> Result<Option<i64>> {
        Ok(match self.attr(name, AttrKind::Int)? {
            Some(Attr::Int(n)) => Some(n),
            _ => None,
        })
    }

    pub(super) fn attr_int(&mut self, name: &str, default: i64) -> Result<i64> {
        Ok(self.attr_opt_int(name)?.unwrap_or(default))
    }

    /// Returns true unless the attribute is absent or 0.
    pub(super) fn attr_flag(&mut self, name: &str) -> Result<bool> {
        Ok(self.attr_int(name, 0)? != 0)
    }

    /// Returns an integer attribute without marking it as read.
    pub(super) fn peek_int(&self, name: &str) -> Option<i64> {
        match self.attributes.get(name)? {
            Some(Attr::Int(n)) => Some(*n),
            _ => None,
        }
    }

    pub(super) fn attr_float(&mut self, name: &str, default: f32) -> Result<f32> {
        Ok(match self.attr(name, AttrKind::Float)? {
            Some(Attr::Float(x)) => x,
            _ => default,
        })
    }

    pub(super) fn attr_text(&mut self, name: &str, default: &str) -> Result<String> {
        Ok(match self.attr(name, AttrKind::Str)? {
            Some(Attr::Str(text)) => text,
            _ => default.to_string(),
        })
    }

    pub(super) fn attr_ints(&mut self, name: &str) -> Result<Option<Vec<i64>>> {
        Ok(match self.attr(name, AttrKind::Ints)? {
            Some(Attr::Ints(list)) => Some(list),
            _ => None,
        })
    }

    pub(super) fn attr_texts(&mut self, name: &str) -> Result<Option<Vec<String>>> {
        Ok(match self.attr(name, AttrKind::Strs)? {
            Some(Attr::Strs(list)) => Some(list),
            _ => None,
        })
    }

    /// Returns the element type that an attribute names by ONNX's number.
    pub(super) fn attr_dtype(&mut self, name: &str) -> Result<Option<DType>> {
        let Some(code) = self.attr_opt_int(name)? else {
            return Ok(None);
        };
        let dtype = i32::try_from(code).ok().and_then(DType::from_onnx_code);
        dtype
            .map(Some)
            .ok_or_else(|| self.unsupported(format!("element type {code}")))
    }

    /// Returns true if a text attribute is the second of two words, false if it is the first.
    pub(super) fn attr_choice(
        &mut self,
        name: &str,
        words: [&str; 2],
        default: &str,
    ) -> Result<bool> {
        let word = self.attr_text(name, default)?;
        match words.iter().position(|w| *w == word) {
            Some(at) => Ok(at == 1),
            None => Err(self
                .fail("attribute", format!("unknown value of `{name}`"))
                .expected(words.join(" or "))
                .found(word)),
        }
    }

    /// Marks an attribute as read whose value does not matter here.
    pub(super) fn ignore_attr(&mut self, name: &str) {
        self.attributes.remove(name);
    }

    /// Fails unless the attribute is absent or 0.
    pub(super) fn refuse_attr(&mut self, name: &str) -> Result<()> {
        match self.attr_int(name, 0)? {
            0 => Ok(()),
            other => Err(self.unsupported(format!("`{name}` = {other}"))),
        }
    }

    /// Returns an integer attribute that must be given and positive, such as a number of heads.
    pub(super) fn attr_positive(&mut self, name: &str) -> Result<i64> {
        match self.attr_int(name, 0)? {
            n if n > 0 => Ok(n),
            n => Err(self
                .fail("attribute", format!("`{name}` must be given and positive"))
                .found(n.to_string())),
        }
    }

    /// Returns one value a spatial axis, each at least `least`, which is also the default.
    pub(super) fn attr_each(&mut self, name: &str, n: usize, least: i64) -> Result<Vec<i64>> {
        let length = if name == "pads" { 2 * n } else { n };
        let given = self.attr_ints(name)?;
        let values = given.unwrap_or_else(|| vec![least; length]);
        if values.len() != length || values.iter().any(|v| *v < least) {
            return Err(self
                .fail(
                    "attribute",
                    format!("`{name}` does not fit {n} spatial axes"),
                )
                .found(format!("{values:?}")));
        }
        Ok(values)
    }

    /// Returns the seed of the step. The first random op of a graph adds the input for it.
    pub(super) fn seed(&mut self) -> Result<ValueId> {
        let ty = Ty::scalar(DType::I64);
        let mut inputs = self.graph.inputs().iter().copied();
        match inputs.find(|v| self.graph.value(*v).name == SEED) {
            Some(seed) if self.graph.value(seed).ty.as_ref() == Some(&ty) => return Ok(seed),
            None if !self.graph.has_value_name(SEED) => {
                return Ok(self.graph.add_input(SEED, Some(ty)));
            }
            _ => {}
        }
        Err(self
            .fail(
                "name",
                format!("`{SEED}` is taken, and random ops need it for the seed"),
            )
            .help("rename it in the model"))
    }

    /// Returns the number of an RNG stream that no other call draws from.
    pub(super) fn stream(&mut self) -> ValueId {
        let mut name = format!("{}.stream", self.prefix);
        if self.graph.has_value_name(&name) {
            name = format!("{name}.{}", self.graph.value_bound());
        }
        let number = random::stream(&name);
        self.graph.add_init(&name, Tensor::int(number))
    }

    /// Returns what integers were quantised from, if a node of this graph quantised them.
    pub(super) fn quantised_as(&self, integers: ValueId) -> Option<Quantised> {
        self.known_quantised.integers.get(&integers).copied()
    }

    /// Returns what an initializer of bytes holds, if it holds integers of four bits.
    pub(super) fn packed(&self, v: ValueId) -> Option<Packed> {
        self.known_quantised.packed.get(&v).cloned()
    }

    /// Returns the contents of a small integer value, where all of them are known numbers.
    pub(super) fn known_ints(&self, v: ValueId) -> Option<Vec<i64>> {
        let known = self.contents.get(v)?;
        known.iter().map(Dim::as_const).collect()
    }

    /// Returns the size of an axis, which must be a fixed number.
    pub(super) fn size(&self, v: ValueId, axis: usize, what: &str) -> Result<i64> {
        let dim = self.dims(v).get(axis).cloned();
        dim.as_ref().and_then(Dim::as_const).ok_or_else(|| {
            self.fail("shape", format!("{what} has to be a fixed number"))
                .found(format!("axis {axis} of {}", self.ty(v)))
        })
    }

    /// Returns `axis` of a tensor of `rank` axes, counted from 0.
    pub(super) fn axis_of(&self, axis: i64, rank: usize) -> Result<usize> {
        from_start(axis, rank).ok_or_else(|| self.fail("axis", format!("axis {axis} of {rank}")))
    }

    /// Fails unless `v` has one of these ranks.
    pub(super) fn want_rank(&self, v: ValueId, ranks: &[usize], what: &str) -> Result<()> {
        if ranks.contains(&self.rank(v)) {
            return Ok(());
        }
        let expected: Vec<String> = ranks.iter().map(usize::to_string).collect();
        Err(self
            .fail("shape", format!("`{what}` has the wrong number of axes"))
            .expected(expected.join(" or "))
            .found(self.ty(v).to_string()))
    }

    /// Returns the number of axes behind batch and channels, along which images and signals are laid out.
    pub(super) fn spatial_axes(&self, x: ValueId) -> Result<std::ops::Range<usize>> {
        let rank = self.rank(x);
        if rank < 3 {
            return Err(self
                .fail("shape", "the operand has no axes after batch and channels")
                .found(self.ty(x).to_string()));
        }
        Ok(2..rank)
    }

    /// Returns `width / heads`, and fails where heads do not divide the hidden size of `x`.
    pub(super) fn head_size(&self, x: ValueId, width: i64, heads: i64) -> Result<i64> {
        if heads > 0 && width % heads == 0 {
            return Ok(width / heads);
        }
        Err(self
            .fail(
                "shape",
                format!("{heads} heads do not divide the hidden size"),
            )
            .found(self.ty(x).to_string()))
    }
}

/// Returns `axis` counted from 0, where it is one of `rank`.
pub(super) fn from_start(axis: i64, rank: usize) -> Option<usize> {
    let axis = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(axis).ok().filter(|a| *a < rank)
}

/// Returns true if two sizes are equal in every run.
pub(super) fn same(a: &Dim, b: &Dim) -> bool {
    a.same(b) == Same::Yes
}
