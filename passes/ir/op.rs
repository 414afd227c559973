//! The row of an operation, [`OpDef`], and the contexts that its rules receive.
//!
//! Everything the compiler knows about an op stands in its row. A rule that does not apply states the reason, so a
//! forgotten rule and an impossible one never look alike. The vocabulary is ONNX's standard ops at one opset, which
//! frontends normalise into, plus a few ops of our own with bodies in standard ops.

use super::arithmetic::{Expr, ScalarCx};
use super::attr::{AttrSpec, Attrs};
use super::dim::Dim;
use super::id::{NodeId, ValueId};
use super::tensor::Tensor;
use super::ty::{DType, Ty};
use crate::error::{Error, Result};

/// One row of the op table.
pub struct OpDef {
    /// The name in the text form, and in ONNX for a standard op.
    pub name: &'static str,
    /// The vocabulary that the op belongs to.
    pub domain: Domain,
    /// ATen ops (`aten.mm`, without overload) that exporters write as this op, alone or with others. Options that
    /// select ops by name accept them.
    pub aten: &'static [&'static str],
    /// The attribute schema, sorted by name.
    pub attrs: &'static [AttrSpec],
    /// Operand slots.
    pub ins: &'static [Slot],
    /// Result slots.
    pub outs: &'static [Slot],
    /// Whether a second run computes the same bits.
    pub effect: Effect,
    /// The role of the op for analyses, policies and fusion.
    pub class: OpClass,
    /// How the op treats batch axes, which chunking cuts.
    pub axes: BatchAxes,
    /// Which operand holds indices, and their range: random inputs of tests and measurements are drawn from it.
    pub indices: Indices,
    /// The largest value of a size that only the op's data decides.
    pub data_sizes: DataSizes,
    /// Element types that the op takes only since a later opset than its form, from the ONNX schemas.
    pub later_types: &'static [(DType, i64)],
    /// Checks the operands and returns the types of the results, from the operands' types and known contents.
    pub infer: fn(&InferCx) -> Result<Vec<Ty>>,
    /// Known contents of small integer or boolean results: shape arithmetic. `None` where nothing is known.
    pub fold: fn(&InferCx, &[Ty]) -> Option<Vec<Vec<Dim>>>,
    /// How the op is differentiated.
    pub grad: Grad,
    /// The work of one run: FLOPs and bytes moved.
    pub cost: fn(&CostCx) -> Cost,
    /// Which results are views, and what the kernel allocates besides its results.
    pub memory: fn(&MemoryCx) -> Footprint,
    /// The op in standard ONNX.
    pub body: Body,
    /// Each result as arithmetic on elements, from which kernels are generated; `None` where it is not.
    pub scalar: fn(&ScalarCx) -> Option<Vec<Expr>>,
}

impl OpDef {
    /// Returns the slot of operand `at`.
    pub fn slot(&self, at: usize) -> Option<&Slot> {
        self.ins.get(at).or(self.ins.last())
    }

    /// Returns true for view ops: reshape, transpose, slice and the like. They compute and move nothing.
    pub fn is_layout(&self) -> bool {
        self.class == OpClass::Layout
    }

    /// Returns true for ops that move their operand out of device memory or back. The result equals the operand.
    pub fn is_transfer(&self) -> bool {
        self.class == OpClass::Transfer
    }

    /// Returns true for optimizer steps: the result is the first operand one training step later.
    ///
    /// Where nothing reads the operand afterwards, the result is written over it. This holds for static operands too:
    /// parameters, and inputs that are optimizer state.
    pub fn is_update(&self) -> bool {
        self.class == OpClass::Update
    }
}

/// The role of an op for analyses, policies and fusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpClass {
    /// A matrix product of the first two operands and nothing else.
    Product,
    /// A matrix product that adds its third operand, if given.
    BiasedProduct,
    /// A softmax over one axis.
    Softmax,
    /// Scores, softmax and the product with the values in one op.
    Attention,
    /// A convolution, or its transpose.
    Convolution,
    /// Selects elements by size. A recomputation must select the same ones.
    Selection,
    /// A maximum over axes.
    MaxReduction,
    /// A sum or an average over axes.
    SumReduction,
    /// Divides by the spread over some axes.
    Norm,
    /// A power or a root of each element.
    Power,
    /// Scales, masks, caps, drops or selects elements where they stand. Attention search looks through these.
    Elementwise,
    /// Converts the element type.
    Cast,
    /// Changes only how the elements of the first operand are laid out, or which of them are visible.
    Layout,
    /// Moves its operand out of device memory or back.
    Transfer,
    /// One optimizer step of the first operand.
    Update,
    /// Exchanges tensors with other ranks.
    Exchange,
    /// None of these.
    Other,
}

/// Which operand of an op holds indices, and what they index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indices {
    /// None.
    None,
    /// None, but the op passes integers on as they are.
    PassedOn,
    /// Operand 1 indexes the axis of operand 0 that the attribute `axis` names.
    OfAxis,
    /// Operand 1 holds tuples of indices of the leading axes of operand 0.
    Tuples,
    /// Operand 1 indexes the class axis, axis 1, of operand 0.
    Classes,
    /// Operand 0 indexes an axis of the size that operand 1 holds.
    Depth,
    /// Operand 0 indexes an axis of the size that the attribute `size` names.
    OfSize,
}

/// The largest value of a size that only an op's data decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSizes {
    /// The op introduces no such size, or none with a known bound.
    Unbounded,
    /// The number of elements of the first operand.
    Elements,
    /// The longest axis of the first operand.
    LongestAxis,
}

/// How an op treats batch axes ("rows"); `ops::batch_axes` acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchAxes {
    /// The result at an index depends on the operands, broadcast, at that index.
    Pointwise,
    /// Groups the elements into other axes without moving them.
    Regrouped,
    /// Permutes the axes.
    Permuted,
    /// Broadcasts to a shape.
    Broadcast,
    /// A matrix product: rows of the first operand, or summed over.
    Product,
    /// The same with transposed operands and a bias.
    BiasedProduct,
    /// Sums down to a shape.
    SummedToShape,
    /// Reduces the axes that the second operand lists.
    Reduced,
    /// Takes stretches of the axes that operand 3 lists.
    Sliced,
    /// Works along the axis that the attribute `axis` names. Operands of fewer axes than the first hold no rows.
    AlongAxis,
    /// A loss over classes, operands scores and labels.
    ClassLoss,
    /// The gradient of such a loss; its cotangent comes first.
    ClassLossGrad,
    /// The same for each row of scores and its label by itself.
    EachClassLoss,
    /// Adds an axis of classes.
    OneHot,
    /// Mixes rows, or has no rule: chunking stops here.
    Mixed,
}

impl PartialEq for OpDef {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl std::fmt::Debug for OpDef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The vocabulary that an op belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// `ai.onnx`. Files from opset `first` on mean the row's form; written files need opset `since`.
    Onnx {
        /// The oldest opset whose attributes and operands are the row's own.
        first: i64,
        /// The oldest opset in which the row's form is valid for all element types but [`OpDef::later_types`].
        since: i64,
    },
    /// Ours; written with a body in standard ops.
    Ckpt,
    /// A foreign op that passes through unchanged.
    Opaque,
}

impl Domain {
    /// The domain of our own ops in files.
    pub const CKPT: &'static str = "ckpt";
}

/// One operand or result of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its name in the schema.
    pub name: &'static str,
    /// Whether it may be left out or repeated.
    pub kind: SlotKind,
    /// A floating-point initializer that arrives here is a parameter, whatever the other operands are.
    pub weight: bool,
    /// The operand gets no gradient, although its type allows one.
    pub stopped: bool,
}

/// How often an operand or result slot occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotKind {
    /// Exactly once.
    Required,
    /// At most once.
    Optional,
    /// The last slot, any number of times (at least once).
    Variadic,
}

impl Slot {
    const fn new(name: &'static str, kind: SlotKind) -> Slot {
        Slot {
            name,
            kind,
            weight: false,
            stopped: false,
        }
    }

    /// A slot that must be given.
    pub const fn req(name: &'static str) -> Slot {
        Slot::new(name, SlotKind::Required)
    }

    /// A slot that may be left out.
    pub const fn opt(name: &'static str) -> Slot {
        Slot::new(name, SlotKind::Optional)
    }

    /// A last slot that takes one or more values.
    pub const fn var(name: &'static str) -> Slot {
        Slot::new(name, SlotKind::Variadic)
    }

    /// The same slot, where the op takes its parameter: the table of `Gather`, the weights of a convolution.
    pub const fn weight(self) -> Slot {
        Slot {
            weight: true,
            ..self
        }
    }

    /// The same slot, into which no gradient flows.
    pub const fn stopped(self) -> Slot {
        Slot {
            stopped: true,
            ..self
        }
    }
}

/// What running an op twice means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A function of its operands.
    Pure,
    /// Random, but a function of its operands: the seed is one of them.
    Seeded,
    /// Never copied.
    Stateful,
    /// Never copied unless priced and agreed by every rank.
    Collective,
}

impl Effect {
    /// Whether a copy computes the same bits.
    pub fn recomputable(self) -> bool {
        matches!(self, Effect::Pure | Effect::Seeded)
    }
}

/// How an op is differentiated.
pub enum Grad {
    /// Emits nodes that compute the operands' gradients.
    Rule(fn(&mut GradCx) -> Result<()>),
    /// Emits the gradient of the first operand, the only one that has a gradient.
    First(fn(&mut GradCx) -> Result<ValueId>),
    /// The nodes of the op's body are emitted and differentiated in its place. Gradient ops use this: only a model
    /// that takes gradients itself differentiates them.
    Body,
    /// The gradient is zero; the reason says why.
    Zero(&'static str),
    /// There is none; the reason is shown to the user.
    Missing(&'static str),
}

impl Grad {
    /// Runs the rule on a node, if the op has one; returns false where it has none.
    ///
    /// # Errors
    /// What the rule refuses.
    pub fn apply(&self, cx: &mut GradCx) -> Result<bool> {
        match self {
            Grad::Rule(rule) => rule(cx)?,
            Grad::First(rule) => {
                let dx = rule(cx)?;
                cx.give(0, dx);
            }
            Grad::Body | Grad::Zero(_) | Grad::Missing(_) => return Ok(false),
        }
        Ok(true)
    }
}

/// What an op means in standard ONNX.
pub enum Body {
    /// It is standard ONNX.
    Standard,
    /// Builds the same computation from standard ops; see [`BodyCx`].
    Function(fn(&mut BodyCx) -> Result<Vec<ValueId>>),
    /// It has none; it cannot be written unless the file it came from is ONNX.
    None(&'static str),
}

/// One operand as typing sees it.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// Its type.
    pub ty: &'a Ty,
    /// Row-major contents of a small integer or boolean tensor, where known.
    pub ints: Option<&'a [Dim]>,
}

/// What an `infer` or `fold` rule sees.
pub struct InferCx<'a> {
    /// The row of the node.
    pub op: &'static OpDef,
    /// Its attributes.
    pub attrs: &'a Attrs,
    /// Its operands; `None` for one that is not given.
    pub ins: &'a [Option<Known<'a>>],
    /// Names of the results: the base of names for data-dependent sizes.
    pub out_names: &'a [String],
}

impl<'a> InferCx<'a> {
    /// The type of a required operand.
    pub fn ty(&self, slot: usize) -> Result<&'a Ty> {
        self.opt_ty(slot).ok_or_else(|| {
            let name = self.op.ins.get(slot).map_or("?", |s| s.name);
            Error::model(
                "arity",
                format!("{}: operand {slot} (`{name}`) is missing", self.op.name),
            )
        })
    }

    /// Returns the type of an operand, if it is given.
    pub fn opt_ty(&self, slot: usize) -> Option<&'a Ty> {
        self.ins.get(slot).copied().flatten().map(|k| k.ty)
    }

    /// Known contents of an integer operand.
    pub fn ints(&self, slot: usize) -> Option<&'a [Dim]> {
        self.ins.get(slot).copied().flatten().and_then(|k| k.ints)
    }

    /// Known constant contents of an integer operand.
    pub fn const_ints(&self, slot: usize) -> Option<Vec<i64>> {
        self.ints(slot)?.iter().map(Dim::as_const).collect()
    }

    /// A size that only the data decides; the same name every time the node is typed.
    pub fn fresh(&self, slot: usize, axis: usize) -> Dim {
        Dim::data(&format!(
            "{}.{axis}",
            self.out_names.get(slot).map_or("?", |n| n.as_str())
        ))
    }

    /// An axis attribute or operand in `-rank..rank`, as `0..rank`.
    pub fn axis(&self, axis: i64, rank: usize) -> Result<usize> {
        let r = rank as i64;
        let at = if axis < 0 { axis + r } else { axis };
        if (0..r).contains(&at) {
            return Ok(at as usize);
        }
        Err(self
            .fail("axis", format!("axis {axis} is out of range"))
            .expected(format!("-{r}..{r}")))
    }

    /// An error of this op; the caller adds the node.
    pub fn fail(&self, code: &'static str, message: impl std::fmt::Display) -> Box<Error> {
        Error::model(code, format!("{}: {message}", self.op.name))
    }

    /// Fails unless the operand's element type is one that `allowed` accepts.
    pub fn want_dtype(&self, slot: usize, allowed: fn(DType) -> bool, what: &str) -> Result<DType> {
        let dtype = self.ty(slot)?.dtype;
        if allowed(dtype) {
            return Ok(dtype);
        }
        let name = self.op.ins.get(slot).map_or("?", |s| s.name);
        Err(self
            .fail("type", format!("operand `{name}` has element type {dtype}"))
            .expected(what))
    }

    /// Fails unless all given operands have the same element type; returns it.
    pub fn same_dtype(&self, slots: &[usize]) -> Result<DType> {
        let first = self.ty(slots[0])?.dtype;
        for slot in &slots[1..] {
            let other = self.ty(*slot)?.dtype;
            if other != first {
                return Err(self
                    .fail("type", "operands have different element types")
                    .expected(format!("{first}, as operand {}", slots[0]))
                    .found(format!("{other}, operand {slot}")));
            }
        }
        Ok(first)
    }
}

/// A rule for typing ops whose contents are never known.
pub fn no_fold(_: &InferCx, _: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    None
}

/// One operand at known sizes.
#[derive(Clone, Debug)]
pub struct Sized {
    /// The element type.
    pub dtype: DType,
    /// The sizes.
    pub dims: Vec<i64>,
    /// In elements; 0 on expanded axes.
    pub strides: Vec<i64>,
    /// Contents of a small integer tensor, where known.
    pub ints: Option<Vec<i64>>,
}

impl Sized {
    /// Returns a row-major tensor.
    pub fn contiguous(dtype: DType, dims: Vec<i64>) -> Sized {
        let strides = contiguous_strides(&dims);
        Sized {
            dtype,
            dims,
            strides,
            ints: None,
        }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().map(|d| *d as u64).product()
    }

    /// Returns the size in bytes, without gaps.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size_bytes()
    }

    /// Whether the elements lie in row-major order without holes; strides of axes of size 1 do not matter.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (dim, stride) in self.dims.iter().zip(&self.strides).rev() {
            if *dim == 0 {
                return true;
            }
            if *dim != 1 {
                if *stride != expected {
                    return false;
                }
                expected *= dim;
            }
        }
        true
    }
}

/// Row-major strides, in elements.
pub fn contiguous_strides(dims: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; dims.len()];
    for i in (0..dims.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(dims[i + 1].max(1));
    }
    strides
}

/// What a `cost` rule sees: everything at known sizes.
pub struct CostCx<'a> {
    /// Attributes of the node.
    pub attrs: &'a Attrs,
    /// Its operands; `None` for one that is not given.
    pub ins: &'a [Option<Sized>],
    /// Its results.
    pub outs: &'a [Sized],
}

/// The work of one run of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read plus bytes written.
    pub bytes: u64,
}

impl CostCx<'_> {
    /// `flops`, plus all traffic.
    pub fn work(&self, flops: u64) -> Cost {
        Cost {
            flops,
            bytes: self.traffic_bytes(),
        }
    }

    /// Elements of operand `slot`; 0 where it is not given.
    pub fn elements(&self, slot: usize) -> u64 {
        operand(self.ins, slot).map_or(0, Sized::elements)
    }

    /// Bytes of all operands and results.
    pub fn traffic_bytes(&self) -> u64 {
        self.ins.iter().flatten().map(Sized::bytes).sum::<u64>()
            + self.outs.iter().map(Sized::bytes).sum::<u64>()
    }

    /// `flops_each` per element of the first result, plus all traffic.
    pub fn elementwise(&self, flops_each: u64) -> Cost {
        self.work(self.outs.first().map_or(0, Sized::elements) * flops_each)
    }

    /// `flops_each` per element of the largest operand, plus all traffic.
    pub fn per_largest_operand(&self, flops_each: u64) -> Cost {
        let largest = self.ins.iter().flatten().map(Sized::elements).max();
        self.work(largest.unwrap_or(0) * flops_each)
    }
}

/// Operand `slot` at known sizes, where it is given.
pub fn operand(ins: &[Option<Sized>], slot: usize) -> Option<&Sized> {
    ins.get(slot)?.as_ref()
}

/// Cost of a view: nothing moves.
pub fn free(_: &CostCx) -> Cost {
    Cost::default()
}

/// Cost of moving data without arithmetic.
pub fn moves(cx: &CostCx) -> Cost {
    cx.work(0)
}

/// The kind of device that kernels run on, as far as the memory they take depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// Blocks of elements fit into the caches.
    #[default]
    Cpu,
    /// Blocks of elements are large: each one costs several kernel launches, and must fill the device.
    Cuda,
}

impl DeviceKind {
    /// The least elements of a block on a CUDA device: 256 MiB of float32.
    const CUDA_BLOCK: i64 = 1 << 26;

    /// Rows, of `rows` rows of `width` elements, that a kernel works on at a time, where it needs memory for them beside
    /// operands and results. On a CPU they have at most `elements` elements, but there is always one row.
    pub fn rows_at_once(self, elements: i64, rows: i64, width: i64) -> i64 {
        let most = match self {
            DeviceKind::Cpu => elements,
            DeviceKind::Cuda => elements.max(DeviceKind::CUDA_BLOCK),
        };
        rows_within(most, rows, width)
    }
}

/// Returns how many of `rows` rows, each of `width` elements, fit into `elements` elements; at least one.
pub fn rows_within(elements: i64, rows: i64, width: i64) -> i64 {
    (elements / width.max(1)).clamp(1, rows.max(1))
}

/// What a `memory` rule sees: operands at known sizes and strides, results at known sizes.
pub struct MemoryCx<'a> {
    /// Attributes of the node.
    pub attrs: &'a Attrs,
    /// Its operands; `None` for one that is not given.
    pub ins: &'a [Option<Sized>],
    /// Strides here are row-major; a view states its own.
    pub outs: &'a [Sized],
    /// The device that it runs on.
    pub device: DeviceKind,
}

impl<'a> MemoryCx<'a> {
    /// Operand `slot`, where it is given.
    pub fn operand(&self, slot: usize) -> Option<&'a Sized> {
        operand(self.ins, slot)
    }

    /// Elements of operand `slot`; 0 where it is not given.
    pub fn elements(&self, slot: usize) -> u64 {
        self.operand(slot).map_or(0, Sized::elements)
    }

    /// Bytes of operand `slot`; 0 where it is not given.
    pub fn bytes(&self, slot: usize) -> u64 {
        self.operand(slot).map_or(0, Sized::bytes)
    }
}

/// Where a result lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// New storage, row-major.
    Fresh,
    /// The storage of an operand.
    View {
        /// The operand.
        of: usize,
        /// Strides of the result in that storage, in elements.
        strides: Vec<i64>,
    },
    /// New storage, row-major, that is not in the device's memory.
    Outside,
}

/// Memory of one run of a node: a promise that the kernel keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// One entry a result.
    pub outs: Vec<Place>,
    /// Largest total of temporaries that are alive beside operands and results.
    pub temp_bytes: u64,
    /// Operands that the kernel can write its first result over, where nothing reads them afterwards; the first of them
    /// that dies is taken. Each has the type, the sizes and the strides of that result. No other operand lies in the
    /// storage of one that is taken.
    pub in_place_operands: Vec<usize>,
}

impl Footprint {
    /// Results at `outs`, nothing else taken.
    pub fn new(outs: Vec<Place>) -> Footprint {
        Footprint {
            outs,
            temp_bytes: 0,
            in_place_operands: Vec::new(),
        }
    }

    /// The same with `temp_bytes` of temporaries.
    pub fn with_temp(mut self, temp_bytes: u64) -> Footprint {
        self.temp_bytes = temp_bytes;
        self
    }

    /// The same for a kernel that can write over those operands in `slots` that lie as the first result does.
    pub fn in_place_operands(mut self, cx: &MemoryCx, slots: &[usize]) -> Footprint {
        let Some(out) = cx.outs.first() else {
            return self;
        };
        let lies_alike = |x: &Sized| {
            x.dtype.is_float()
                && (x.dtype, &x.dims, &x.strides) == (out.dtype, &out.dims, &out.strides)
        };
        let given = |slot: &usize| cx.ins.get(*slot).and_then(Option::as_ref);
        let fits = |slot: &&usize| given(slot).is_some_and(lies_alike);
        self.in_place_operands = slots.iter().filter(fits).copied().collect();
        self
    }
}

/// Every result is new, nothing else is taken.
pub fn fresh(cx: &MemoryCx) -> Footprint {
    Footprint::new(vec![Place::Fresh; cx.outs.len()])
}

/// A new result, written over any operand that lies like it and is not read again: elementwise kernels.
pub fn elementwise(cx: &MemoryCx) -> Footprint {
    let slots: Vec<usize> = (0..cx.ins.len()).collect();
    fresh(cx).in_place_operands(cx, &slots)
}

/// The row of an op, or its name in the op table.
///
/// Rules emit rows of other families by name, because families refer to each other in circles: the gradient of `Expand`
/// is a sum, and that of a sum expands.
#[derive(Clone, Copy, Debug)]
pub enum OpRef {
    /// The row itself.
    Row(&'static OpDef),
    /// The name of a row of the table.
    Name(&'static str),
}

impl From<&'static OpDef> for OpRef {
    fn from(row: &'static OpDef) -> OpRef {
        OpRef::Row(row)
    }
}

impl From<&OpRef> for OpRef {
    fn from(op: &OpRef) -> OpRef {
        *op
    }
}

/// A node of the graph that rules emit into.
pub struct NodeView<'a> {
    /// Its row.
    pub op: &'static OpDef,
    /// Its attributes, defaults included.
    pub attrs: &'a Attrs,
    /// Its operands; `None` for one that is not given.
    pub ins: &'a [Option<ValueId>],
    /// Its results.
    pub outs: &'a [ValueId],
}

/// A graph that rules append nodes to. Every value in it has a type.
pub trait Emit {
    /// Appends a node with `n_outs` results and types it. Operands may be missing.
    ///
    /// # Errors
    /// What the typing rule of the op refuses.
    fn emit_node(
        &mut self,
        op: OpRef,
        ins: Vec<Option<ValueId>>,
        attrs: Attrs,
        n_outs: usize,
    ) -> Result<Vec<ValueId>>;

    /// Returns a shared constant. The first request names it.
    fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId;

    /// Returns the shape of `v` as an int64 vector: a constant where it is known, else the result of a shared node.
    ///
    /// # Errors
    /// None for a value that has a type.
    fn shape(&mut self, v: ValueId) -> Result<ValueId>;

    /// Returns the type of a value.
    fn ty(&self, v: ValueId) -> &Ty;

    /// Returns the name of a value.
    fn name(&self, v: ValueId) -> &str;

    /// Returns the contents of a small integer value, row-major, where they are known.
    fn known(&self, v: ValueId) -> Option<&[Dim]>;

    /// Returns the tensor of an initializer; `None` for any other value.
    fn tensor(&self, v: ValueId) -> Option<&Tensor>;

    /// Returns the node that computes a value, if one does.
    fn def_node(&self, v: ValueId) -> Option<NodeId>;

    /// Returns a node.
    fn node(&self, node: NodeId) -> NodeView<'_>;

    /// Returns a node in words, for error messages.
    fn describe(&self, node: NodeId) -> String;

    /// Appends an optional result to a node.
    fn add_result(&mut self, node: NodeId, name: &str, ty: Ty) -> ValueId;
}

/// What a gradient rule sees: the node, the cotangents of its results, and the graph that it emits into.
pub struct GradCx<'a> {
    /// The graph, with the node in it.
    pub b: &'a mut dyn Emit,
    /// The node that is differentiated.
    pub node: NodeId,
    /// Cotangent of each result; `None` where the result does not reach the loss.
    pub dys: Vec<Option<ValueId>>,
    /// Whether each operand needs a gradient.
    pub wants: Vec<bool>,
    /// The answer: one gradient an operand, of the operand's type.
    pub dxs: Vec<Option<ValueId>>,
    /// What other readers of each operand have already given to its gradient. A rule that can add to it in one op takes
    /// it, and gives the sum.
    pub so_far: Vec<Option<ValueId>>,
}

impl GradCx<'_> {
    /// Operand in slot `i`; rules only ask for operands that the op requires.
    pub fn x(&self, i: usize) -> ValueId {
        self.opt_x(i)
            .unwrap_or_else(|| panic!("I4: operand {i} is missing"))
    }

    /// Returns the operand in slot `i`, if it is given.
    pub fn opt_x(&self, i: usize) -> Option<ValueId> {
        self.b.node(self.node).ins.get(i).copied().flatten()
    }

    /// Returns result `i`.
    pub fn y(&self, i: usize) -> ValueId {
        self.b.node(self.node).outs[i]
    }

    /// Cotangent of result `i`.
    pub fn dy(&self, i: usize) -> Option<ValueId> {
        self.dys.get(i).copied().flatten()
    }

    /// Cotangent of the only result; a rule runs only if some result has one.
    pub fn dy0(&self) -> ValueId {
        self.dy(0)
            .expect("a rule runs only where a cotangent arrives")
    }

    /// Whether operand `i` needs a gradient.
    pub fn wants(&self, i: usize) -> bool {
        self.wants.get(i).copied().unwrap_or(false)
    }

    /// Returns the attributes of the node.
    pub fn attrs(&self) -> Attrs {
        self.b.node(self.node).attrs.clone()
    }

    /// Returns the type of a value.
    pub fn ty(&self, v: ValueId) -> Ty {
        self.b.ty(v).clone()
    }

    /// Sets the gradient of operand `i`.
    pub fn give(&mut self, i: usize, gradient: ValueId) {
        self.dxs[i] = Some(gradient);
    }
}

/// What a body sees: a graph of its own whose inputs stand for the operands.
pub struct BodyCx<'a> {
    /// The graph that the body is emitted into.
    pub b: &'a mut dyn Emit,
    /// Attributes of the node.
    pub attrs: &'a Attrs,
    /// One input a given operand, `None` for one that is not given.
    pub ins: Vec<Option<ValueId>>,
    /// Types of the results: what typing knew from contents that the body's own inputs do not carry.
    pub outs: Vec<Ty>,
}

impl BodyCx<'_> {
    /// Operand `i`, where it is given.
    pub fn opt_x(&self, i: usize) -> Option<ValueId> {
        self.ins.get(i).copied().flatten()
    }

    /// Returns the operand in slot `i`; bodies only ask for operands that the op requires.
    pub fn x(&self, i: usize) -> ValueId {
        self.ins[i].unwrap_or_else(|| panic!("I4: operand {i} is missing"))
    }

    /// Returns the type of a value.
    pub fn ty(&self, v: ValueId) -> Ty {
        self.b.ty(v).clone()
    }
}
