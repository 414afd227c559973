//! [`Builder`]: emits typed nodes at the end of a graph. Autodiff, bodies and rewrites build with it.
//!
//! A node is typed as soon as it is emitted, and known contents of small integer results are kept. So rules can look at
//! ranks, sizes and shape contents of anything that they emitted. Constants and `Shape` nodes are shared.

use crate::find;
use crate::rule::{EmitExt, Formulas};
use crate::shape::{IDENTITY, SHAPE};
use ckpt_ir::edit::NewNode;
use ckpt_ir::error::Result;
use ckpt_ir::op::{Body, BodyCx, NodeView};
use ckpt_ir::typing::{Contents, type_node};
use ckpt_ir::{Attrs, DType, Def, Dim, Emit, Graph, Loc, NodeId, OpRef, Role, Tensor, Ty, ValueId};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// A cursor at the end of a graph.
pub struct Builder<'g> {
    /// The graph that nodes are appended to.
    pub graph: &'g mut Graph,
    /// Known contents of small integer values.
    pub contents: Contents,
    /// Origin of what is emitted from here on.
    pub loc: Arc<Loc>,
    /// Role of what is emitted from here on.
    pub role: Role,
    /// Emitted nodes are named `<prefix>/<Op>`, or `<Op>` where it is empty.
    pub prefix: String,
    constants: FxHashMap<(DType, Vec<u64>, Vec<u8>), ValueId>,
    shapes: FxHashMap<ValueId, ValueId>,
}

impl<'g> Builder<'g> {
    /// Returns a builder that knows the contents of all small initializers.
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

    /// Returns the type of a value.
    pub fn ty(&self, v: ValueId) -> &Ty {
        self.graph.ty(v)
    }

    /// Returns a shared constant. The first request names it.
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

    /// The shape of `v` as an int64 vector: a constant where it is known, else one shared `Shape` node.
    pub fn shape(&mut self, v: ValueId) -> Result<ValueId> {
        if let Some(dims) = self.ty(v).static_dims() {
            return Ok(self.ints(&dims));
        }
        if let Some(shape) = self.shapes.get(&v) {
            return Ok(*shape);
        }
        let shape = self.op(&SHAPE, &[v])?;
        self.shapes.insert(v, shape);
        Ok(shape)
    }
}

impl Emit for Builder<'_> {
    fn emit_node(
        &mut self,
        op: OpRef,
        ins: Vec<Option<ValueId>>,
        attrs: Attrs,
        n_outs: usize,
    ) -> Result<Vec<ValueId>> {
        let op = match op {
            OpRef::Row(row) => row,
            OpRef::Name(name) => find(name).unwrap_or_else(|| panic!("no row is called {name}")),
        };
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

    fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        Builder::constant(self, name, tensor)
    }

    fn shape(&mut self, v: ValueId) -> Result<ValueId> {
        Builder::shape(self, v)
    }

    fn ty(&self, v: ValueId) -> &Ty {
        self.graph.ty(v)
    }

    fn name(&self, v: ValueId) -> &str {
        &self.graph.value(v).name
    }

    fn known(&self, v: ValueId) -> Option<&[Dim]> {
        self.contents.get(v)
    }

    fn tensor(&self, v: ValueId) -> Option<&Tensor> {
        self.graph.value(v).tensor()
    }

    fn def_node(&self, v: ValueId) -> Option<NodeId> {
        self.graph.def_node(v)
    }

    fn node(&self, node: NodeId) -> NodeView<'_> {
        let n = self.graph.node(node);
        NodeView {
            op: n.op,
            attrs: &n.attrs,
            ins: &n.ins,
            outs: &n.outs,
        }
    }

    fn describe(&self, node: NodeId) -> String {
        self.graph.describe(node)
    }

    fn add_result(&mut self, node: NodeId, name: &str, ty: Ty) -> ValueId {
        self.graph.add_result(node, name, ty)
    }
}

impl Formulas for Builder<'_> {
    fn emitter(&mut self) -> &mut dyn Emit {
        self
    }
}

/// Builds the body of `node` as a graph of standard ops: inputs are its operands in slot order, outputs its results.
///
/// Returns `None` for an op that is standard already.
pub fn body_of(graph: &Graph, node: NodeId) -> Option<Result<Graph>> {
    let n = graph.node(node);
    let build = match n.op.body {
        Body::Standard | Body::None(_) => return None,
        Body::Function(build) => build,
    };
    let mut body = Graph::new(n.op.name);
    let ins: Vec<Option<ValueId>> = n
        .ins
        .iter()
        .enumerate()
        .map(|(i, v)| {
            let slot = n.op.ins[i.min(n.op.ins.len() - 1)].name;
            v.map(|v| body.add_input(slot, Some(graph.ty(v).clone())))
        })
        .collect();
    let mut b = Builder::new(&mut body);
    let outs = build(&mut BodyCx {
        b: &mut b,
        attrs: &n.attrs,
        ins,
        outs: n.outs.iter().map(|v| graph.ty(*v).clone()).collect(),
    });
    // A function's result is never its operand: runtimes refuse that.
    let outs = outs.and_then(|outs| {
        outs.into_iter()
            .map(|v| match b.graph.value(v).def {
                Def::Node { .. } => Ok(v),
                _ => b.op(&IDENTITY, &[v]),
            })
            .collect::<Result<Vec<ValueId>>>()
    });
    Some(outs.map(|outs| {
        body.set_outputs(outs);
        body
    }))
}
