//! Tensors as PyTorch has them: handles on memory, some of them views of others.
//!
//! A tensor is the root of a piece of memory or a view of another tensor. The root holds the memory's present value; a
//! view is made from its parent's. A write makes a new value of the root, and every view reads it from there the next
//! time it is asked for: nothing that is read before changes, everything read after sees the write, as in PyTorch.
//!
//! Whether `reshape` and `contiguous` share memory depends on strides. They are followed as far as to know which tensors
//! are certainly row-major; of a result that may or may not share memory with its operand, nothing may be read after a
//! write to the other one: that is refused, never guessed.

use super::Lowering;
use ckpt_passes::ir::{Attrs, DType, Dim, OpDef, Same, Ty, ValueId};
use ckpt_passes::ops::concat::CONCAT;
use ckpt_passes::ops::fill;
use ckpt_passes::ops::scatter::SCATTER_ELEMENTS;
use ckpt_passes::ops::shape::{EXPAND, RESHAPE, SQUEEZE, STOP_GRADIENT, TRANSPOSE, UNSQUEEZE};
use ckpt_passes::ops::slice::SLICE;
use ckpt_passes::{Error, Result};

/// A tensor of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TensorId(u32);

/// How a view sees its parent.
#[derive(Clone, Debug)]
pub(super) enum View {
    /// The same elements in the same order, in these sizes.
    Reshape(Vec<Dim>),
    Permute(Vec<i64>),
    /// Elements `start`, `start + step`, … below `end` of an axis; `start` and `end` are not negative.
    Slice {
        axis: usize,
        start: Dim,
        end: Dim,
        step: i64,
    },
    /// Without the axes, of size 1.
    Squeeze(Vec<i64>),
    /// With axes of size 1 put in, ascending.
    Unsqueeze(Vec<i64>),
    Expand(Vec<Dim>),
    /// The same tensor, of which no gradient is taken.
    Detach,
}

#[derive(Clone, Debug)]
struct Handle {
    parent: Option<(TensorId, View)>,
    root: usize,
    ty: Ty,
    /// Certainly row-major.
    dense: bool,
    /// The value as of that version of the root.
    value: ValueId,
    version: u64,
}

#[derive(Clone, Debug)]
struct Root {
    version: u64,
    /// Roots of one group may share memory.
    group: usize,
    /// Why it cannot be read any more.
    lost: Option<String>,
    /// The input or weight that lies here, and whether it was written to.
    outside: Option<(String, bool)>,
}

/// All tensors of a program.
#[derive(Default)]
pub(super) struct Memory {
    handles: Vec<Handle>,
    roots: Vec<Root>,
    /// Roots by group; only groups of several.
    groups: std::collections::BTreeMap<usize, Vec<usize>>,
}

impl Memory {
    fn handle(&self, id: TensorId) -> &Handle {
        &self.handles[id.0 as usize]
    }

    pub fn dims(&self, id: TensorId) -> &[Dim] {
        &self.handle(id).ty.dims
    }

    pub fn dtype(&self, id: TensorId) -> DType {
        self.handle(id).ty.dtype
    }

    fn add(&mut self, handle: Handle) -> TensorId {
        self.handles.push(handle);
        TensorId(u32::try_from(self.handles.len() - 1).expect("fewer than 2^32 tensors"))
    }

    fn root(&mut self, value: ValueId, ty: Ty, dense: bool, outside: Option<String>) -> TensorId {
        let root = self.roots.len();
        self.roots.push(Root {
            version: 0,
            group: root,
            lost: None,
            outside: outside.map(|name| (name, false)),
        });
        self.add(Handle {
            parent: None,
            root,
            ty,
            dense,
            value,
            version: 0,
        })
    }
}

impl Lowering<'_> {
    /// A tensor in memory of its own, row-major.
    pub(super) fn fresh(&mut self, value: ValueId) -> TensorId {
        let ty = self.b.ty(value).clone();
        self.memory.root(value, ty, true, None)
    }

    /// A tensor that exists before the program runs.
    pub(super) fn outside(&mut self, value: ValueId, name: &str) -> TensorId {
        let ty = self.b.ty(value).clone();
        self.memory.root(value, ty, true, Some(name.to_string()))
    }

    pub(super) fn is_dense(&self, id: TensorId) -> bool {
        self.memory.handle(id).dense
    }

    pub(super) fn set_strided(&mut self, id: TensorId) {
        self.memory.handles[id.0 as usize].dense = false;
    }

    pub(super) fn emit(&mut self, op: &'static OpDef, ins: &[ValueId]) -> Result<ValueId> {
        self.b.emit(op, ins, Attrs::new())
    }

    /// The value of a tensor at this place of the program.
    pub(super) fn read(&mut self, id: TensorId) -> Result<ValueId> {
        // From the tensor up to the first that is up to date, then back down; chains may be long.
        let mut stale = Vec::new();
        let mut at = id;
        loop {
            let handle = self.memory.handle(at);
            let root = &self.memory.roots[handle.root];
            if let Some(why) = &root.lost {
                return Err(Error::model("memory", why.clone()).help(
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
            let handle = &mut self.memory.handles[child.0 as usize];
            (handle.value, handle.version) = (value, version);
            at = child;
        }
        Ok(self.memory.handle(id).value)
    }

    /// A view of a tensor.
    pub(super) fn view(&mut self, of: TensorId, view: View) -> Result<TensorId> {
        let before = self.read(of)?;
        let value = self.apply(&view, before)?;
        Ok(self.view_as(of, view, value))
    }

    /// A view of a tensor whose present value is known.
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
            value,
            version,
        })
    }

    /// A tensor with the elements of `of` in these sizes: a view where `of` is certainly row-major, else one that may
    /// share its memory.
    pub(super) fn reshaped(&mut self, of: TensorId, dims: Vec<Dim>) -> Result<TensorId> {
        if self.is_dense(of) {
            return self.view(of, View::Reshape(dims));
        }
        let value = self.read(of)?;
        let value = self.apply(&View::Reshape(dims), value)?;
        Ok(self.perhaps_shared(of, value))
    }

    /// A row-major tensor that may share the memory of `of`.
    pub(super) fn perhaps_shared(&mut self, of: TensorId, value: ValueId) -> TensorId {
        let new = self.fresh(value);
        let group = self.memory.roots[self.memory.handle(of).root].group;
        let root = self.memory.handle(new).root;
        self.memory.roots[root].group = group;
        let members = self
            .memory
            .groups
            .entry(group)
            .or_insert_with(|| vec![group]);
        members.push(root);
        new
    }

    /// Puts `value` (of the tensor's own type) in the place of the tensor's elements.
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
        // Through the views up to the root.
        let mut at = id;
        while let Some((parent, view)) = self.memory.handle(at).parent.clone() {
            let whole = self.read(parent)?;
            value = self.unapply(&view, whole, value)?;
            at = parent;
        }
        self.memory.roots[root].version += 1;
        let version = self.memory.roots[root].version;
        for (handle, value) in [(at, value), (target, written)] {
            let handle = &mut self.memory.handles[handle.0 as usize];
            (handle.value, handle.version) = (value, version);
        }
        if let Some((_, changed)) = &mut self.memory.roots[root].outside {
            *changed = true;
        }
        let group = self.memory.roots[root].group;
        for other in self.memory.groups.get(&group).cloned().unwrap_or_default() {
            if other != root {
                self.memory.roots[other].lost = Some(
                    "a tensor is read after a write to another one that may share its memory"
                        .into(),
                );
            }
        }
        Ok(())
    }

    /// What a view makes of its parent's value.
    pub(super) fn apply(&mut self, view: &View, x: ValueId) -> Result<ValueId> {
        match view {
            View::Reshape(dims) => {
                if ckpt_passes::ir::build::same_dims(&self.b.ty(x).dims, dims) {
                    return Ok(x);
                }
                let shape = self.int_vector(dims)?;
                self.b
                    .emit(&RESHAPE, &[x, shape], Attrs::new().with("allowzero", 1))
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
            View::Expand(dims) => {
                if ckpt_passes::ir::build::same_dims(&self.b.ty(x).dims, dims) {
                    return Ok(x);
                }
                let shape = self.int_vector(dims)?;
                self.emit(&EXPAND, &[x, shape])
            }
            View::Detach => self.stopped(x),
        }
    }

    /// The parent's value `whole` with `part` in the place that the view sees.
    fn unapply(&mut self, view: &View, whole: ValueId, part: ValueId) -> Result<ValueId> {
        match view {
            View::Reshape(_) => {
                let dims = self.b.ty(whole).dims.clone();
                self.apply(&View::Reshape(dims), part)
            }
            View::Permute(perm) => {
                let mut inverse = vec![0; perm.len()];
                for (i, p) in perm.iter().enumerate() {
                    inverse[*p as usize] = i as i64;
                }
                self.apply(&View::Permute(inverse), part)
            }
            View::Squeeze(axes) => self.apply(&View::Unsqueeze(axes.clone()), part),
            View::Unsqueeze(axes) => self.apply(&View::Squeeze(axes.clone()), part),
            View::Slice {
                axis,
                start,
                end,
                step,
            } => self.replaced(whole, part, *axis, start, end, *step),
            View::Expand(dims) => {
                if ckpt_passes::ir::build::same_dims(&self.b.ty(whole).dims, dims) {
                    return Ok(part);
                }
                Err(Error::model(
                    "memory",
                    "an expanded tensor is written to: several of its elements are one in memory",
                )
                .help("clone it before the write"))
            }
            View::Detach if self.depends(whole) => Err(Error::model(
                "memory",
                "a tensor that needs a gradient is written to through `detach`",
            )
            .help("PyTorch takes no gradient of such a write: clone the detached tensor")),
            View::Detach => Ok(part),
        }
    }

    /// `whole` with `part` at `start`, `start + step`, … below `end` of an axis.
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
            let piece = |start: &Dim, end: &Dim| View::Slice {
                axis,
                start: start.clone(),
                end: end.clone(),
                step: 1,
            };
            let mut pieces = Vec::new();
            if *start != Dim::ZERO {
                pieces.push(self.apply(&piece(&Dim::ZERO, start), whole)?);
            }
            pieces.push(part);
            if end.same(&size) != Same::Yes {
                pieces.push(self.apply(&piece(end, &size), whole)?);
            }
            if let [one] = pieces[..] {
                return Ok(one);
            }
            let attrs = Attrs::new().with("axis", axis as i64);
            return self.b.emit(&CONCAT, &pieces, attrs);
        }
        let (first, limit) = (self.int_scalar(start)?, self.int_scalar(end)?);
        let step = self.b.int(step);
        let places = self.emit(&fill::RANGE, &[first, limit, step])?;
        let rank = self.b.rank(whole);
        let others: Vec<i64> = (0..rank as i64).filter(|a| *a != axis as i64).collect();
        let places = self.apply(&View::Unsqueeze(others), places)?;
        let shape = self.b.shape(part)?;
        let places = self.emit(&EXPAND, &[places, shape])?;
        let attrs = Attrs::new().with("axis", axis as i64);
        self.b
            .emit(&SCATTER_ELEMENTS, &[whole, places, part], attrs)
    }

    /// `value` of which no gradient is taken; itself where there is none to take.
    pub(super) fn stopped(&mut self, value: ValueId) -> Result<ValueId> {
        if !self.depends(value) {
            return Ok(value);
        }
        self.emit(&STOP_GRADIENT, &[value])
    }

    /// Whether a value depends on a parameter through ops that have a gradient.
    pub(super) fn depends(&mut self, value: ValueId) -> bool {
        let mut open = vec![value];
        while let Some(v) = open.last().copied() {
            if self.depends.contains_key(&v) {
                open.pop();
                continue;
            }
            let graph = &*self.b.graph;
            let answer = match graph.def_node(v) {
                _ if !graph.ty(v).dtype.is_float() => Some(false),
                None => {
                    let origin = graph.origins.get(&v);
                    Some(origin.is_some_and(|o| o.is_parameter == Some(true)))
                }
                Some(node) => {
                    let node = graph.node(node);
                    let ins = node.ins.iter().flatten();
                    if matches!(node.op.grad, ckpt_passes::ir::op::Grad::Zero(_)) {
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

    /// Writes to inputs, buffers and parameters end with the step.
    pub(super) fn warn_of_lost_writes(&mut self) {
        for root in &self.memory.roots {
            if let Some((name, true)) = &root.outside {
                self.warnings.push(format!(
                    "the model writes to `{name}`; the written value is used in the step and not kept after it"
                ));
            }
        }
    }
    /// What a backward pass in the program saved is cut off: gradients of its gradients lack a part.
    pub(super) fn warn_of_detached(&mut self, saved: ValueId) {
        let node = self.b.graph.def_node(saved);
        let cut = node
            .is_some_and(|n| self.b.graph.node(n).op == &ckpt_passes::ops::shape::STOP_GRADIENT);
        let text = "the program detaches what its backward pass saved: gradients of its gradients lack what flows through \
                    that; trace it with decomposition_table={torch.ops.aten.detach.default: lambda x: x}";
        if cut && !self.warnings.iter().any(|w| w == text) {
            self.warnings.push(text.into());
        }
    }
    /// A decomposed program writes `detach` as `alias`, and the stop is lost.
    pub(super) fn warn_of_aliases(&mut self) {
        let text = "the program was decomposed, which turns `detach` into `alias`: what was detached is trained here; \
                    save it as torch.export gives it if it detaches anything";
        if !self.warnings.iter().any(|w| w == text) {
            self.warnings.push(text.into());
        }
    }
}
