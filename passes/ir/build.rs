//! Emits typed nodes at the end of a graph: what autodiff, bodies and rewrites build with.
//!
//! Every emitted node is typed at once, and what is known of small integer results is remembered, so rules can look at
//! ranks, sizes and shape contents of anything they made. Constants and `Shape` nodes are shared.

use super::attr::Attrs;
use super::dim::{Dim, Same};
use super::edit::NewNode;
use super::graph::{Graph, Loc, Role};
use super::id::ValueId;
use super::op::OpDef;
use super::tensor::Tensor;
use super::ty::{DType, Ty};
use super::typing::{Contents, type_node};
use crate::error::Result;
use crate::ops;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// A cursor at the end of a graph.
pub struct Builder<'g> {
    pub graph: &'g mut Graph,
    /// Known contents of small integer values.
    pub contents: Contents,
    /// Origin of what is emitted from here on.
    pub loc: Arc<Loc>,
    pub role: Role,
    /// Emitted nodes are named `<prefix>/<Op>`, or `<Op>` where it is empty.
    pub prefix: String,
    constants: FxHashMap<(DType, Vec<u64>, Vec<u8>), ValueId>,
    shapes: FxHashMap<ValueId, ValueId>,
}

impl<'g> Builder<'g> {
    pub fn new(graph: &'g mut Graph) -> Builder<'g> {
        let contents = Contents::of(graph);
        Builder::resume(graph, contents)
    }

    /// A cursor where contents are known already; [`Builder::new`] looks at every initializer.
    pub fn resume(graph: &'g mut Graph, contents: Contents) -> Builder<'g> {
        Builder {
            graph,
            contents,
            loc: Arc::default(),
            role: Role::Forward,
            prefix: String::new(),
            constants: FxHashMap::default(),
            shapes: FxHashMap::default(),
        }
    }

    /// Emits a node with one result.
    pub fn emit(&mut self, op: &'static OpDef, ins: &[ValueId], attrs: Attrs) -> Result<ValueId> {
        let ins = ins.iter().map(|v| Some(*v)).collect();
        Ok(self.emit_n(op, ins, attrs, 1)?[0])
    }

    /// Emits a node with `n_outs` results, some operands perhaps not given.
    pub fn emit_n(
        &mut self,
        op: &'static OpDef,
        ins: Vec<Option<ValueId>>,
        attrs: Attrs,
        n_outs: usize,
    ) -> Result<Vec<ValueId>> {
        let name = if self.prefix.is_empty() {
            op.name.to_string()
        } else {
            format!("{}/{}", self.prefix, op.name)
        };
        let outs = (0..n_outs)
            .map(|i| {
                (
                    if i == 0 {
                        name.clone()
                    } else {
                        format!("{name}:{i}")
                    },
                    None,
                )
            })
            .collect();
        let id = self.graph.add_node(NewNode {
            op,
            name: &name,
            attrs,
            ins,
            outs,
            loc: self.loc.clone(),
            role: self.role,
        });
        let typed = type_node(self.graph, id, &self.contents)?;
        let outs = self.graph.node(id).outs.clone();
        for (value, (ty, ints)) in outs.iter().zip(typed) {
            self.graph.set_type(*value, ty);
            self.contents.set(*value, ints);
        }
        Ok(outs)
    }

    pub fn ty(&self, v: ValueId) -> &Ty {
        self.graph.ty(v)
    }

    pub fn rank(&self, v: ValueId) -> usize {
        self.graph.ty(v).rank()
    }

    /// A shared constant.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let Some(bytes) = tensor.bytes() else {
            return self.graph.add_init(name, tensor);
        };
        let key = (tensor.dtype, tensor.dims.clone(), bytes.to_vec());
        if let Some(id) = self.constants.get(&key) {
            return *id;
        }
        let id = self.graph.add_init(name, tensor);
        self.contents.read_init(self.graph, id);
        self.constants.insert(key, id);
        id
    }

    /// A shared scalar constant.
    pub fn scalar(&mut self, dtype: DType, value: f64) -> ValueId {
        self.constant(
            &format!("const.{dtype}.{value}"),
            Tensor::scalar(dtype, value),
        )
    }

    /// A shared int64 vector.
    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        let text: Vec<String> = values.iter().map(|v| v.to_string()).collect();
        self.constant(
            &format!("const.i64.[{}]", text.join("_")),
            Tensor::ints(values),
        )
    }

    /// A shared int64 scalar.
    pub fn int(&mut self, value: i64) -> ValueId {
        self.constant(&format!("const.i64.{value}"), Tensor::int(value))
    }

    /// The shape of `v` as an int64 vector: a constant where it is known, else one shared `Shape` node.
    pub fn shape(&mut self, v: ValueId) -> Result<ValueId> {
        if let Some(dims) = self.ty(v).static_dims() {
            return Ok(self.ints(&dims));
        }
        if let Some(shape) = self.shapes.get(&v) {
            return Ok(*shape);
        }
        let shape = self.emit(&ops::shape::SHAPE, &[v], Attrs::new())?;
        self.shapes.insert(v, shape);
        Ok(shape)
    }

    /// `v` summed down to the shape of `like`, undoing a broadcast; `v` itself where the shapes are provably equal.
    pub fn sum_to(&mut self, v: ValueId, like: ValueId) -> Result<ValueId> {
        let (from, to) = (self.ty(v).dims.clone(), self.ty(like).dims.clone());
        if same_dims(&from, &to) {
            return Ok(v);
        }
        let shape = self.shape(like)?;
        self.emit(&ops::sum_to::SUM_TO_SHAPE, &[v, shape], Attrs::new())
    }

    /// `v` as `dtype`; itself where it is that already.
    pub fn cast(&mut self, v: ValueId, dtype: DType) -> Result<ValueId> {
        if self.ty(v).dtype == dtype {
            return Ok(v);
        }
        self.emit(&ops::cast::CAST, &[v], Attrs::new().with("to", dtype))
    }

    /// A tensor of the shape of `like` filled with one value.
    pub fn filled_like(&mut self, like: ValueId, value: f64) -> Result<ValueId> {
        let dtype = self.ty(like).dtype;
        let shape = self.shape(like)?;
        let scalar = self.scalar(dtype, value);
        self.emit(&ops::shape::EXPAND, &[scalar, shape], Attrs::new())
    }

    pub fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.emit(&ops::arith::ADD, &[a, b], Attrs::new())
    }

    pub fn sub(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.emit(&ops::arith::SUB, &[a, b], Attrs::new())
    }

    pub fn mul(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.emit(&ops::arith::MUL, &[a, b], Attrs::new())
    }

    pub fn div(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.emit(&ops::arith::DIV, &[a, b], Attrs::new())
    }

    pub fn neg(&mut self, a: ValueId) -> Result<ValueId> {
        self.emit(&ops::arith::NEG, &[a], Attrs::new())
    }
}

/// Whether two shapes are equal in every valid run.
pub fn same_dims(a: &[Dim], b: &[Dim]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.same(y) == Same::Yes)
}
