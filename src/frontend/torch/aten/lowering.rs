//! A program on its way into a graph: its tensors, the memory that they share, and their element types.
//!
//! A tensor is the root of a piece of memory or a view of another tensor. The root holds the present value of the memory.
//! A view computes its value from its parent. A write makes a new value of the root, and every view reads the new value
//! the next time it is asked for one. So in-place programs become graphs of values.
//!
//! Whether `reshape` and `contiguous` share memory depends on strides. The lowering tracks only which tensors are
//! certainly row-major. If a result may share memory with its operand, a read of one after a write to the other is
//! refused.
//!
//! Element types of results follow PyTorch's promotion (c10/core/ScalarType, ATen/native/TypeProperties): tensors with
//! axes decide; a 0-d tensor, and then a plain number, counts only where its kind is higher (bool, integer, float).

use super::super::scalars;
use super::super::value::{Group, TensorId, Value};
use super::promotion::{combine, promote};
use crate::frontend::lower::number;
use ckpt_passes::analysis::ranges;
use ckpt_passes::ir::op::{Grad, OpDef};
use ckpt_passes::ir::same_dims;
use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{Attrs, DType, Dim, Graph, Loc, Origin, Same, Tensor, Ty, ValueId};
use ckpt_passes::ops::arith::DIV;
use ckpt_passes::ops::concat::CONCAT;
use ckpt_passes::ops::fill::RANGE;
use ckpt_passes::ops::logic::{EQUAL, NOT};
use ckpt_passes::ops::scatter::SCATTER_ELEMENTS;
use ckpt_passes::ops::shape::{
    EXPAND, IDENTITY, RESHAPE, SQUEEZE, STOP_GRADIENT, TRANSPOSE, UNSQUEEZE,
};
use ckpt_passes::ops::slice::SLICE;
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::transform::sizes::Sizes;
use ckpt_passes::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The place of a call in the model.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// The base of the names of the call's nodes and of its result. The graph makes them unique.
    pub name: String,
    /// The module path, outermost first, with classes (see [`Loc`]).
    pub scopes: Vec<(String, Option<String>)>,
    /// The place in messages: `node 12 "linear_3"`, `code/__torch__/m.py:42`.
    pub source: String,
}

/// The key of the metadata that names the op from which a node was lowered: `aten.linear.default`.
pub const TRACED: &str = ckpt_passes::analysis::modules::OUR_TRACED;

/// Replays a call of the op with that name. The vocabulary is above the lowering, so the lowering holds it as a function.
pub(super) type Run = fn(&mut Lowering, &str, Vec<Value>, Vec<(&str, Value)>) -> Result<Value>;

/// The elements that a weight covers: storage, element type, sizes, strides, offset.
pub(super) type Elements = (String, DType, Vec<u64>, Vec<u64>, u64);

/// A program that is being replayed into a graph.
pub struct Lowering<'g> {
    pub(super) b: Builder<'g>,
    pub(super) run: Run,
    sizes: Sizes,
    memory: Memory,
    /// The weights that are declared, by their elements.
    pub(super) weights: BTreeMap<Elements, (TensorId, ValueId)>,
    /// The bytes that were copied out of each storage because their strides fit no slice and no transpose.
    pub(super) copied_bytes: BTreeMap<String, u64>,
    /// Whether each value depends on a parameter through ops that have a gradient. A value that was not asked for yet is
    /// missing.
    depends: BTreeMap<ValueId, bool>,
    pub(super) grad_enabled: bool,
    /// The graph input with the seed of random ops, once an op needs it.
    pub(super) seed: Option<ValueId>,
    /// Tensors that stand for plain numbers. Type promotion treats them as numbers.
    pub(super) plain: BTreeSet<TensorId>,
    warnings: Vec<String>,
    pub(super) group: Option<Group>,
    /// Whether the program was decomposed. Otherwise `alias` is a slice of everything.
    pub(in crate::frontend::torch) is_decomposed: bool,
    /// How many results the program takes from the op that is called, where it says so.
    pub(in crate::frontend::torch) results: Option<usize>,
}

impl<'g> Lowering<'g> {
    /// Returns a lowering into an empty graph.
    pub(super) fn with_ops(graph: &'g mut Graph, run: Run) -> Lowering<'g> {
        let contents = Contents::of(graph);
        Lowering {
            b: Builder::resume(graph, contents),
            run,
            sizes: Sizes::default(),
            memory: Memory::default(),
            weights: BTreeMap::new(),
            copied_bytes: BTreeMap::new(),
            results: None,
            depends: BTreeMap::new(),
            grad_enabled: true,
            seed: None,
            plain: BTreeSet::new(),
            warnings: Vec::new(),
            group: None,
            is_decomposed: true,
        }
    }

    /// Declares an input of the model. Ops may refer to its named sizes from here on.
    ///
    /// # Errors
    /// A name that is empty or taken.
    pub fn input(&mut self, name: &str, ty: Ty) -> Result<TensorId> {
        self.free_name(name)?;
        let value = self.b.graph.add_input(name, Some(ty));
        self.sizes.read(self.b.graph, value);
        Ok(self.fresh(value))
    }

    /// Adds a row-major tensor that the program contains and that is neither a parameter nor a buffer.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> TensorId {
        let value = self.b.constant(name, tensor);
        self.fresh(value)
    }

    /// Adds an output of the model.
    ///
    /// # Errors
    /// A name that is empty or belongs to another output; a tensor whose value is not certain.
    pub fn output(&mut self, name: &str, tensor: TensorId) -> Result<()> {
        let mut value = self.read(tensor)?;
        let listed = self.b.graph.outputs().contains(&value);
        if listed || self.b.graph.def_node(value).is_none() {
            value = self.emit(&IDENTITY, &[value])?;
        }
        if self.b.graph.value(value).name != name {
            if let Some(holder) = self.b.graph.find_value(name) {
                let fixed = self.b.graph.outputs().contains(&holder)
                    || self.b.graph.def_node(holder).is_none();
                if name.is_empty() || fixed {
                    bail!(
                        "name",
                        "an output is called `{name}`, and so is something else"
                    );
                }
                self.b.graph.rename_value(holder, &format!("{name}.inner"));
            }
            self.b.graph.rename_value(value, name);
        }
        self.b.graph.add_output(value);
        Ok(())
    }

    /// Turns gradients on or off for the calls that follow, as `torch.no_grad` does. Returns the previous state.
    pub fn set_grad_enabled(&mut self, enabled: bool) -> bool {
        std::mem::replace(&mut self.grad_enabled, enabled)
    }

    /// Replays a call of `name` (`aten::add`, `transformers::grouped_mm_fallback`) and returns its result. Arguments may
    /// be given by position, by name or both. Their kinds choose the overload; `overload` is only noted on the nodes.
    ///
    /// # Errors
    /// An op that is not known, arguments that it does not take, and whatever its row refuses. The error names the place.
    pub fn call(
        &mut self,
        name: &str,
        overload: Option<&str>,
        args: Vec<Value>,
        kwargs: Vec<(&str, Value)>,
        place: &Place,
    ) -> Result<Value> {
        self.b.prefix.clone_from(&place.name);
        self.b.loc = Arc::new(Loc {
            node: place.name.clone(),
            scopes: place.scopes.clone(),
        });
        let first = self.b.graph.order().len();
        let placed = |e: Box<Error>| match place.source.as_str() {
            "" => e,
            source => e.at(source),
        };
        let value = (self.run)(self, name, args, kwargs).map_err(placed)?;
        let traced = name.replacen("::", ".", 1);
        let traced = format!("{traced}.{}", overload.unwrap_or("default"));
        let new = self.b.graph.order()[first..].to_vec();
        for node in &new {
            let meta = self.b.graph.meta_mut(*node);
            meta.insert(TRACED.into(), traced.clone());
        }
        // A hostile program grows the expressions of its sizes without end.
        for tensor in value.tensors() {
            for dim in self.dims(tensor) {
                scalars::checked(dim.clone()).map_err(|e| e.at(place.source.clone()))?;
            }
        }
        if let Value::Tensor(id) = &value {
            let result = self.read(*id)?;
            let made = self.b.graph.def_node(result);
            if made.is_some_and(|n| new.contains(&n)) && !place.name.is_empty() {
                self.b.graph.rename_value(result, &place.name);
            }
        }
        Ok(value)
    }

    /// Returns the sizes of a tensor.
    pub fn dims(&self, tensor: TensorId) -> &[Dim] {
        &self.memory.handle(tensor).ty.dims
    }

    /// Returns the element type of a tensor, or that of the parts of a complex one.
    pub fn dtype(&self, tensor: TensorId) -> DType {
        self.memory.handle(tensor).ty.dtype
    }

    /// Returns the sizes of a complex tensor, without the axis of its parts.
    pub fn complex_dims(&self, pair: TensorId) -> &[Dim] {
        self.dims(pair).split_last().map_or(&[], |(_, dims)| dims)
    }

    /// Returns the sizes of a real or complex tensor, as the program sees them.
    pub fn sizes_of(&self, value: &Value) -> Option<&[Dim]> {
        match value {
            Value::Tensor(id) => Some(self.dims(*id)),
            Value::Complex(id) => Some(self.complex_dims(*id)),
            _ => None,
        }
    }

    /// Returns the elements of a small integer or boolean tensor, row-major, if they are known.
    ///
    /// # Errors
    /// A tensor whose value is not certain.
    pub fn known(&mut self, tensor: TensorId) -> Result<Option<Vec<Dim>>> {
        let value = self.read(tensor)?;
        Ok(self.b.contents.get(value).map(<[Dim]>::to_vec))
    }

    /// Returns an int64 scalar tensor that holds an integer: `prim::NumToTensor`.
    ///
    /// # Errors
    /// A data-dependent size that no tensor of the program has.
    pub fn number(&mut self, int: &Dim) -> Result<TensorId> {
        let value = self.int_scalar(int)?;
        Ok(self.fresh(value))
    }

    /// Returns a 0-d tensor that holds a float: float32, or float64 for a plain number of the program.
    pub fn real(&mut self, value: f64, plain: bool) -> TensorId {
        let dtype = if plain { DType::F64 } else { DType::F32 };
        let value = self.b.scalar(dtype, value);
        let tensor = self.fresh(value);
        if plain {
            self.plain.insert(tensor);
        }
        tensor
    }

    /// Returns a 0-d float32 tensor that holds a size by a number.
    pub fn ratio(&mut self, of: &Dim, by: i64) -> Result<TensorId> {
        let of = self.int_scalar(of)?;
        let of = self.b.cast(of, DType::F32)?;
        let by = self.b.scalar(DType::F32, by as f64);
        let value = self.b.emit(&DIV, &[of, by], Attrs::new())?;
        Ok(self.fresh(value))
    }

    /// Ends the program. Returns warnings for the user, each one line.
    ///
    /// # Errors
    /// A program without outputs.
    pub fn finish(mut self) -> Result<Vec<String>> {
        if self.b.graph.outputs().is_empty() {
            bail!("outputs", "the program returns no tensor");
        }
        self.warn_of_lost_writes();
        self.settle_group();
        // Only the program's own parameters are parameters. The tables that ops are lowered with are not.
        let inits = self.b.graph.inits();
        let inits: Vec<(ValueId, String)> = inits.map(|(id, v)| (id, v.name.clone())).collect();
        for (value, name) in inits {
            let origin = Origin::constant(&name);
            self.b.graph.origins.entry(value).or_insert(origin);
        }
        Ok(self.warnings)
    }

    /// Fails if a name is empty or taken.
    pub(super) fn free_name(&self, name: &str) -> Result<()> {
        if name.is_empty() || self.b.graph.has_value_name(name) {
            bail!("name", "`{name}` is defined twice");
        }
        Ok(())
    }
}
/// The way in which a view sees its parent.
#[derive(Clone, Debug)]
pub(super) enum View {
    /// The same elements in the same order, in these sizes.
    Reshape(Vec<Dim>),
    Permute(Vec<i64>),
    /// The elements `start`, `start + step`, … below `end` of an axis. `start` and `end` are not negative.
    Slice {
        axis: usize,
        start: Dim,
        end: Dim,
        step: i64,
    },
    /// Removes these axes of size 1.
    Squeeze(Vec<i64>),
    /// Inserts axes of size 1, given in ascending order.
    Unsqueeze(Vec<i64>),
    Expand(Vec<Dim>),
    /// The same tensor without a gradient.
    Detach,
}

impl View {
    /// Returns the view of `start..end` along an axis.
    pub fn range(axis: usize, start: impl Into<Dim>, end: impl Into<Dim>) -> View {
        View::Slice {
            axis,
            start: start.into(),
            end: end.into(),
            step: 1,
        }
    }
}

#[derive(Clone, Debug)]
struct Handle {
    parent: Option<(TensorId, View)>,
    root: usize,
    ty: Ty,
    /// Whether the tensor is certainly row-major.
    dense: bool,
    /// The tensor that this one reshapes, which may share its memory. The root is another one then.
    reshaped: Option<TensorId>,
    /// The value of the tensor at `version` of the root.
    value: ValueId,
    version: u64,
}

#[derive(Clone, Debug)]
struct Root {
    version: u64,
    /// Roots of one group may share memory.
    group: usize,
    /// Whether a write to another root of the group made this value uncertain.
    lost: bool,
    /// The name of the input or weight that lies here, and whether it was written to.
    source: Option<(String, bool)>,
}

/// All tensors of a program.
#[derive(Default)]
pub(super) struct Memory {
    handles: Vec<Handle>,
    roots: Vec<Root>,
    /// The roots of each group with several.
    groups: BTreeMap<usize, Vec<usize>>,
}

impl Memory {
    fn handle(&self, id: TensorId) -> &Handle {
        &self.handles[id.0 as usize]
    }

    fn handle_mut(&mut self, id: TensorId) -> &mut Handle {
        &mut self.handles[id.0 as usize]
    }

    fn add(&mut self, handle: Handle) -> TensorId {
        self.handles.push(handle);
        TensorId(u32::try_from(self.handles.len() - 1).expect("fewer than 2^32 tensors"))
    }
}

impl Lowering<'_> {
    /// Returns a row-major tensor in memory of its own.
    pub(super) fn fresh(&mut self, value: ValueId) -> TensorId {
        self.root(value, None)
    }

    /// Returns a row-major tensor in memory of its own; `source` names an input or weight.
    pub(super) fn root(&mut self, value: ValueId, source: Option<&str>) -> TensorId {
        let root = self.memory.roots.len();
        self.memory.roots.push(Root {
            version: 0,
            group: root,
            lost: false,
            source: source.map(|name| (name.to_string(), false)),
        });
        self.memory.add(Handle {
            parent: None,
            root,
            ty: self.b.ty(value).clone(),
            dense: true,
            reshaped: None,
            value,
            version: 0,
        })
    }

    /// Returns the tensor that this one is seen in, and how, if it is a view, or a reshape that may be one.
    pub(super) fn seen_through(&self, id: TensorId) -> Option<(TensorId, View)> {
        let handle = self.memory.handle(id);
        match handle.reshaped {
            Some(of) => Some((of, View::Reshape(handle.ty.dims.clone()))),
            None => handle.parent.clone(),
        }
    }

    /// Returns true if a write to one tensor may be a write to the other.
    pub fn may_share(&self, a: TensorId, b: TensorId) -> bool {
        let group = |id| self.memory.roots[self.memory.handle(id).root].group;
        group(a) == group(b)
    }

    /// Returns true if the tensor is certainly row-major.
    pub(super) fn is_dense(&self, id: TensorId) -> bool {
        self.memory.handle(id).dense
    }

    /// Notes that the tensor may not be row-major.
    pub(super) fn set_strided(&mut self, id: TensorId) {
        self.memory.handle_mut(id).dense = false;
    }

    /// Emits a node without attributes.
    pub(super) fn emit(&mut self, op: &'static OpDef, ins: &[ValueId]) -> Result<ValueId> {
        self.b.emit(op, ins, Attrs::new())
    }

    /// Returns the value of a tensor at this place of the program.
    ///
    /// # Errors
    /// A tensor that may share memory with one that was written to.
    pub(super) fn read(&mut self, id: TensorId) -> Result<ValueId> {
        // Walks up to the first tensor that is up to date, then back down. Chains may be long, so nothing recurses.
        let mut stale = Vec::new();
        let mut at = id;
        loop {
            let handle = self.memory.handle(at);
            let root = &self.memory.roots[handle.root];
            if root.lost {
                let what =
                    "a tensor is read after a write to another one that may share its memory";
                return Err(Error::model("memory", what).help(
                    "clone the tensor before it is written to, or export without the write",
                ));
            }
            match handle.parent {
                Some((parent, _)) if handle.version < root.version => {
                    stale.push(at);
                    at = parent;
                }
                _ => break,
            }
        }
        while let Some(child) = stale.pop() {
            let parent = self.memory.handle(at).value;
            let handle = self.memory.handle(child).clone();
            let Some((_, view)) = &handle.parent else {
                continue;
            };
            let value = self.apply(view, parent)?;
            let version = self.memory.roots[handle.root].version;
            let handle = self.memory.handle_mut(child);
            (handle.value, handle.version) = (value, version);
            at = child;
        }
        Ok(self.memory.handle(id).value)
    }

    /// Returns a view of a tensor.
    pub(super) fn view(&mut self, of: TensorId, view: View) -> Result<TensorId> {
        let before = self.read(of)?;
        let value = self.apply(&view, before)?;
        Ok(self.view_as(of, view, value))
    }

    /// Makes a tensor the given view of itself, as `unsqueeze_` does. Views that were made of it before keep what they see.
    pub(super) fn become_view(&mut self, target: TensorId, view: TensorId) {
        let before = self.memory.add(self.memory.handle(target).clone());
        for handle in &mut self.memory.handles {
            if let Some((parent, _)) = &mut handle.parent
                && *parent == target
            {
                *parent = before;
            }
        }
        let now = self.memory.handle(view).clone();
        *self.memory.handle_mut(target) = now;
    }

    /// Returns a view of a tensor whose present value is known.
    pub(super) fn view_as(&mut self, of: TensorId, view: View, value: ValueId) -> TensorId {
        let handle = self.memory.handle(of);
        let dense = handle.dense
            && match &view {
                View::Reshape(_) | View::Squeeze(_) | View::Unsqueeze(_) | View::Detach => true,
                View::Permute(perm) => perm.iter().enumerate().all(|(i, p)| i as i64 == *p),
                View::Slice { axis, step, .. } => {
                    *step == 1 && handle.ty.dims[..*axis].iter().all(Dim::is_one)
                }
                View::Expand(_) => false,
            };
        let root = handle.root;
        let version = self.memory.roots[root].version;
        self.memory.add(Handle {
            parent: Some((of, view)),
            root,
            ty: self.b.ty(value).clone(),
            dense,
            reshaped: None,
            value,
            version,
        })
    }

    /// Returns a tensor with the elements of `of` in these sizes: a view if `of` is certainly row-major, else a tensor
    /// that may share its memory.
    pub(super) fn reshaped(&mut self, of: TensorId, dims: Vec<Dim>) -> Result<TensorId> {
        if self.is_dense(of) {
            return self.view(of, View::Reshape(dims));
        }
        let value = self.read(of)?;
        let value = self.apply(&View::Reshape(dims), value)?;
        let new = self.perhaps_shared(of, value);
        self.memory.handle_mut(new).reshaped = Some(of);
        Ok(new)
    }

    /// Returns a row-major tensor that may share the memory of `of`.
    pub(super) fn perhaps_shared(&mut self, of: TensorId, value: ValueId) -> TensorId {
        let new = self.fresh(value);
        let group = self.memory.roots[self.memory.handle(of).root].group;
        let root = self.memory.handle(new).root;
        self.memory.roots[root].group = group;
        let members = self.memory.groups.entry(group);
        members.or_insert_with(|| vec![group]).push(root);
        new
    }

    /// Writes `value`, which has the tensor's type, into the tensor.
    ///
    /// # Errors
    /// A write whose gradient PyTorch would not take, and one through an expanded view.
    pub(super) fn write(&mut self, id: TensorId, value: ValueId) -> Result<()> {
        let root = self.memory.handle(id).root;
        let mut value = value;
        if !self.grad_enabled {
            let old = self.read(id)?;
            if self.depends(old) {
                return Err(Error::model(
                    "memory",
                    "a tensor that needs a gradient is written to where gradients are off",
                )
                .help("PyTorch takes no gradient of such a write: assign to a new tensor"));
            }
            value = self.stopped(value)?;
        }
        let (target, written) = (id, value);
        let mut at = id;
        while let Some((parent, view)) = self.memory.handle(at).parent.clone() {
            let whole = self.read(parent)?;
            value = self.unapply(&view, whole, value)?;
            at = parent;
        }
        self.memory.roots[root].version += 1;
        let version = self.memory.roots[root].version;
        for (handle, value) in [(at, value), (target, written)] {
            let handle = self.memory.handle_mut(handle);
            (handle.value, handle.version) = (value, version);
        }
        if let Some((_, changed)) = &mut self.memory.roots[root].source {
            *changed = true;
        }
        let group = self.memory.roots[root].group;
        for other in self.memory.groups.get(&group).into_iter().flatten() {
            self.memory.roots[*other].lost |= *other != root;
        }
        Ok(())
    }

    /// Returns the value of a view of a tensor with value `x`.
    pub(super) fn apply(&mut self, view: &View, x: ValueId) -> Result<ValueId> {
        match view {
            View::Reshape(dims) if same_dims(&self.b.ty(x).dims, dims) => Ok(x),
            View::Reshape(dims) => {
                let shape = self.int_vector(dims)?;
                let attrs = Attrs::new().with("allowzero", 1);
                self.b.emit(&RESHAPE, &[x, shape], attrs)
            }
            View::Permute(perm) => {
                let attrs = Attrs::new().with("perm", perm.clone());
                self.b.emit(&TRANSPOSE, &[x], attrs)
            }
            View::Slice {
                axis,
                start,
                end,
                step,
            } => {
                let size = &self.b.ty(x).dims[*axis];
                if *start == Dim::ZERO && *step == 1 && end.same(size) == Same::Yes {
                    return Ok(x);
                }
                let (starts, ends) = (
                    self.int_vector(std::slice::from_ref(start))?,
                    self.int_vector(std::slice::from_ref(end))?,
                );
                let (axes, steps) = (self.b.ints(&[*axis as i64]), self.b.ints(&[*step]));
                self.emit(&SLICE, &[x, starts, ends, axes, steps])
            }
            View::Squeeze(axes) => {
                let axes = self.b.ints(axes);
                self.emit(&SQUEEZE, &[x, axes])
            }
            View::Unsqueeze(axes) => {
                let axes = self.b.ints(axes);
                self.emit(&UNSQUEEZE, &[x, axes])
            }
            View::Expand(dims) => self.broadcast_to(x, dims),
            View::Detach => self.stopped(x),
        }
    }

    /// Returns the parent's value `whole` with `part` at the place that the view sees.
    fn unapply(&mut self, view: &View, whole: ValueId, part: ValueId) -> Result<ValueId> {
        match view {
            View::Reshape(_) => {
                let dims = self.b.ty(whole).dims.clone();
                self.apply(&View::Reshape(dims), part)
            }
            View::Permute(perm) => self.apply(&View::Permute(inverse(perm)), part),
            View::Squeeze(axes) => self.apply(&View::Unsqueeze(axes.clone()), part),
            View::Unsqueeze(axes) => self.apply(&View::Squeeze(axes.clone()), part),
            View::Slice {
                axis,
                start,
                end,
                step,
            } => self.replaced(whole, part, *axis, start, end, *step),
            View::Expand(dims) if same_dims(&self.b.ty(whole).dims, dims) => Ok(part),
            View::Expand(_) => Err(Error::model(
                "memory",
                "an expanded tensor is written to: several of its elements are one in memory",
            )
            .help("clone it before the write")),
            View::Detach if self.depends(whole) => Err(Error::model(
                "memory",
                "a tensor that needs a gradient is written to through `detach`",
            )
            .help("PyTorch takes no gradient of such a write: clone the detached tensor")),
            View::Detach => Ok(part),
        }
    }

    /// Returns `whole` with `part` at `start`, `start + step`, … below `end` of an axis.
    fn replaced(
        &mut self,
        whole: ValueId,
        part: ValueId,
        axis: usize,
        start: &Dim,
        end: &Dim,
        step: i64,
    ) -> Result<ValueId> {
        let size = self.b.ty(whole).dims[axis].clone();
        if step == 1 {
            let mut pieces = Vec::new();
            if *start != Dim::ZERO {
                let before = View::range(axis, Dim::ZERO, start.clone());
                pieces.push(self.apply(&before, whole)?);
            }
            pieces.push(part);
            if end.same(&size) != Same::Yes {
                let behind = View::range(axis, end.clone(), size);
                pieces.push(self.apply(&behind, whole)?);
            }
            return self.concat(&pieces, axis);
        }
        let (first, limit) = (self.int_scalar(start)?, self.int_scalar(end)?);
        let step = self.b.int(step);
        let places = self.emit(&RANGE, &[first, limit, step])?;
        let rank = self.b.rank(whole);
        let others: Vec<i64> = (0..rank as i64).filter(|a| *a != axis as i64).collect();
        let places = self.apply(&View::Unsqueeze(others), places)?;
        let shape = self.b.shape(part)?;
        let places = self.emit(&EXPAND, &[places, shape])?;
        let attrs = Attrs::new().with("axis", axis as i64);
        self.b
            .emit(&SCATTER_ELEMENTS, &[whole, places, part], attrs)
    }

    /// Returns the values one after the other along an axis; one value stays as it is.
    pub(super) fn concat(&mut self, values: &[ValueId], axis: usize) -> Result<ValueId> {
        match values {
            [one] => Ok(*one),
            many => {
                let attrs = Attrs::new().with("axis", axis as i64);
                self.b.emit(&CONCAT, many, attrs)
            }
        }
    }

    /// Returns `value` without its gradient; `value` itself if it has none.
    pub(super) fn stopped(&mut self, value: ValueId) -> Result<ValueId> {
        if !self.depends(value) {
            return Ok(value);
        }
        self.emit(&STOP_GRADIENT, &[value])
    }

    /// Returns true if a value depends on a parameter through ops that have a gradient.
    pub(super) fn depends(&mut self, value: ValueId) -> bool {
        let mut open = vec![value];
        while let Some(v) = open.last().copied() {
            if self.depends.contains_key(&v) {
                open.pop();
                continue;
            }
            let graph = &*self.b.graph;
            let answer = match graph.def_node(v) {
                _ if !graph.ty(v).dtype.is_real() => Some(false),
                None => {
                    let origin = graph.origins.get(&v);
                    Some(origin.is_some_and(|o| o.is_parameter == Some(true)))
                }
                Some(node) => {
                    let node = graph.node(node);
                    let ins = node.ins.iter().flatten();
                    if matches!(node.op.grad, Grad::Zero(_)) {
                        Some(false)
                    } else if ins.clone().any(|i| self.depends.get(i) == Some(&true)) {
                        Some(true)
                    } else {
                        let unknown: Vec<ValueId> = ins
                            .copied()
                            .filter(|i| !self.depends.contains_key(i))
                            .collect();
                        let done = unknown.is_empty();
                        open.extend(unknown);
                        done.then_some(false)
                    }
                }
            };
            if let Some(answer) = answer {
                self.depends.insert(v, answer);
                open.pop();
            }
        }
        self.depends[&value]
    }

    /// Warns of writes to inputs, buffers and parameters, which are lost after the step.
    fn warn_of_lost_writes(&mut self) {
        for root in &self.memory.roots {
            if let Some((name, true)) = &root.source {
                self.warnings.push(format!(
                    "the model writes to `{name}`; the written value is used in the step and not kept after it"
                ));
            }
        }
    }

    /// Warns once if the program detached a tensor that its own backward pass saved.
    pub(super) fn warn_of_detached(&mut self, saved: ValueId) {
        let node = self.b.graph.def_node(saved);
        if node.is_some_and(|n| self.b.graph.node(n).op == &STOP_GRADIENT) {
            self.warn_once(
                "the program detaches what its backward pass saved: gradients of its gradients lack what flows through \
                 that; trace it with decomposition_table={torch.ops.aten.detach.default: lambda x: x}",
            );
        }
    }

    /// Limits a named size so that `dim`, which tells whether the index `at` is negative, is not negative, and says so.
    /// Returns false if that cannot be done.
    pub(super) fn assume_not_negative(&mut self, dim: &Dim, at: &Dim) -> Result<bool> {
        let Some((name, range)) = ranges::of_natural(dim) else {
            return Ok(false);
        };
        if !ranges::narrow(self.b.graph, &name, range)? {
            return Ok(false);
        }
        let sizes = match range {
            (least, i64::MAX) => format!("below {least}"),
            (1, most) => format!("above {most}"),
            (least, most) => format!("outside {least} to {most}"),
        };
        self.warn_once(&format!(
            "sizes of `{name}` {sizes} are refused: the index {at} of the program has another sign there, \
             and only a negative one counts from the end"
        ));
        Ok(true)
    }

    pub(super) fn warn_once(&mut self, text: &str) {
        if !self.warnings.iter().any(|w| w == text) {
            self.warnings.push(text.into());
        }
    }

    /// Returns an int64 vector of these integers.
    pub(super) fn int_vector(&mut self, dims: &[Dim]) -> Result<ValueId> {
        let numbers: Option<Vec<i64>> = dims.iter().map(Dim::as_const).collect();
        match numbers {
            Some(numbers) => Ok(self.b.ints(&numbers)),
            None => self.built(false, dims),
        }
    }

    /// Returns an int64 scalar.
    pub(super) fn int_scalar(&mut self, dim: &Dim) -> Result<ValueId> {
        match dim.as_const() {
            Some(n) => Ok(self.b.int(n)),
            None => self.built(true, std::slice::from_ref(dim)),
        }
    }

    fn built(&mut self, scalar: bool, dims: &[Dim]) -> Result<ValueId> {
        let built = self.sizes.build(&mut self.b, scalar, dims)?;
        built.ok_or_else(|| {
            let text: Vec<String> = dims.iter().map(Dim::to_string).collect();
            Error::model("shape", "a size can be read from no tensor of the program")
                .found(text.join(", "))
                .help("export with the sizes of the inputs as the only free ones")
        })
    }

    /// Notes that data-dependent sizes can be read from this value.
    pub(super) fn read_sizes(&mut self, value: ValueId) {
        self.sizes.read(self.b.graph, value);
    }

    /// Returns a tensor or a number as a tensor of an element type; `None` stays `None`.
    pub(super) fn converted(&mut self, value: &Value, dtype: DType) -> Result<Value> {
        match value {
            Value::None => Ok(Value::None),
            value => {
                let value = self.operand(value, dtype)?;
                Ok(Value::Tensor(self.fresh(value)))
            }
        }
    }

    /// Inserts axes of size 1.
    pub(super) fn unsqueeze(&mut self, value: ValueId, axes: &[i64]) -> Result<ValueId> {
        match axes {
            [] => Ok(value),
            axes => self.apply(&View::Unsqueeze(axes.to_vec()), value),
        }
    }

    /// Returns the content that a tensor has now; later writes to it do not change the copy.
    pub fn snapshot(&mut self, tensor: TensorId) -> Result<TensorId> {
        let value = self.read(tensor)?;
        Ok(self.fresh(value))
    }

    /// Returns the size that an integer tensor of one element holds in a run; nothing for any other tensor.
    pub(super) fn size_in_run(&mut self, tensor: TensorId) -> Result<Option<Dim>> {
        if self.dtype(tensor) != DType::I64 || !self.dims(tensor).iter().all(Dim::is_one) {
            return Ok(None);
        }
        let value = self.read(tensor)?;
        self.sizes.held(&mut self.b, value).map(Some)
    }

    /// Returns the content of an integer tensor of one element, if it is known.
    pub(super) fn as_int(&mut self, tensor: TensorId) -> Result<Option<Dim>> {
        if self.dtype(tensor).is_float() {
            return Ok(None);
        }
        self.known_scalar(tensor)
    }

    /// Returns a value in another element type. A number that the file fixes becomes a known integer.
    pub(super) fn cast(&mut self, value: ValueId, dtype: DType) -> Result<ValueId> {
        let is_float = self.b.dtype(value).is_float();
        if is_float
            && dtype.is_int()
            && let Some(number) = number(self.b.graph, &self.b.contents, value)
            && number.is_finite()
        {
            let whole = self.b.int(number as i64);
            let shape = vec![Dim::ONE; self.b.rank(value)];
            let whole = self.broadcast_to(whole, &shape)?;
            return self.b.cast(whole, dtype);
        }
        self.b.cast(value, dtype)
    }

    /// Returns the content of a tensor of one element, if it is known.
    ///
    /// # Errors
    /// A tensor whose value is not certain.
    pub fn known_scalar(&mut self, tensor: TensorId) -> Result<Option<Dim>> {
        let known = self.known(tensor)?;
        Ok(known.and_then(|all| <[Dim; 1]>::try_from(all).ok().map(|[one]| one)))
    }

    /// Returns a tensor or a number as a value of an element type.
    ///
    /// # Errors
    /// Any other kind of value.
    pub(super) fn operand(&mut self, value: &Value, dtype: DType) -> Result<ValueId> {
        match value {
            Value::Bool(b) => Ok(self.b.scalar(dtype, f64::from(u8::from(*b)))),
            Value::Float(x) => Ok(self.b.scalar(dtype, *x)),
            Value::Int(dim) => match dim.as_const() {
                Some(n) if dtype.is_float() => Ok(self.b.scalar(dtype, n as f64)),
                Some(n) => {
                    let name = format!("const.{dtype}.{n}");
                    Ok(self.b.constant(&name, Tensor::scalar_int(dtype, n)))
                }
                None => {
                    let int = self.int_scalar(dim)?;
                    self.b.cast(int, dtype)
                }
            },
            Value::Tensor(id) => {
                let value = self.read(*id)?;
                self.b.cast(value, dtype)
            }
            other => Err(Error::model("op", "a number is needed").found(other.kind())),
        }
    }
}
/// The element type of floats if nothing else decides it.
pub(super) const DEFAULT_FLOAT: DType = DType::F32;

/// Returns the permutation that undoes `perm`.
pub(super) fn inverse(perm: &[i64]) -> Vec<i64> {
    let mut inverse = vec![0; perm.len()];
    for (i, p) in perm.iter().enumerate() {
        inverse[*p as usize] = i as i64;
    }
    inverse
}

impl Lowering<'_> {
    /// Returns the element type in which operands are computed.
    ///
    /// # Errors
    /// An operand that is neither a tensor nor a number.
    pub(super) fn promoted(&self, operands: &[&Value]) -> Result<DType> {
        let (mut dims, mut zeros, mut numbers) = (None, None, None);
        for operand in operands {
            let (group, dtype) = match operand {
                Value::Tensor(id) if self.plain.contains(id) => (&mut numbers, DEFAULT_FLOAT),
                Value::Tensor(id) if self.dims(*id).is_empty() => (&mut zeros, self.dtype(*id)),
                Value::Tensor(id) => (&mut dims, self.dtype(*id)),
                Value::Int(_) => (&mut numbers, DType::I64),
                Value::Float(_) => (&mut numbers, DEFAULT_FLOAT),
                Value::Bool(_) => (&mut numbers, DType::Bool),
                other => {
                    return Err(
                        Error::model("op", "a tensor or a number is needed").found(other.kind())
                    );
                }
            };
            *group = Some(group.map_or(dtype, |known| promote(known, dtype)));
        }
        let all = combine(dims, combine(zeros, numbers));
        all.ok_or_else(|| Error::bug("aten", "promotion of no operands"))
    }

    /// Returns the floating-point type for operands: their own, or the default one.
    pub(super) fn promoted_float(&self, operands: &[&Value]) -> Result<DType> {
        let dtype = self.promoted(operands)?;
        let natural = Some(dtype).filter(|d| d.is_float());
        Ok(natural.unwrap_or(DEFAULT_FLOAT))
    }

    /// Returns true where an element is not 0.
    pub(super) fn truth(&mut self, x: ValueId) -> Result<ValueId> {
        let dtype = self.b.dtype(x);
        if dtype == DType::Bool {
            return Ok(x);
        }
        let zero = self.b.scalar(dtype, 0.0);
        let y = self.emit(&EQUAL, &[x, zero])?;
        self.emit(&NOT, &[y])
    }

    /// Expands `x` to these sizes.
    pub(super) fn broadcast_to(&mut self, x: ValueId, dims: &[Dim]) -> Result<ValueId> {
        if same_dims(&self.b.ty(x).dims, dims) {
            return Ok(x);
        }
        let shape = self.int_vector(dims)?;
        self.emit(&EXPAND, &[x, shape])
    }
}
