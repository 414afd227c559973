//! Operands and attributes of a node, calls of ATen operators, and new tensors, for all kernels.
//!
//! Kernel files import all of it: `use super::context::*`.

use crate::runtime::backend::Backend;
use crate::runtime::convert::{dtype, kind};
use crate::runtime::deferred_checks::DeferredChecks;
use crate::runtime::device;
use crate::runtime::draws::Draws;
use crate::runtime::swap_store::SwapStore;
use ckpt_passes::analysis::sdpa::SdpaBackend;
use ckpt_passes::ir::op::{DeviceKind, Sized};
use ckpt_passes::ir::{Attrs, DType, Tensor as Constant};
use ckpt_torch::{Op, Ret, TorchError, bytes, cuda};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

pub use crate::runtime::convert::{tch_error, torch_error};
pub use ckpt_passes::ir::OpDef;
pub use ckpt_passes::{Error, Result};
pub use ckpt_torch::{Arg, args};
pub use tch::{Device, Kind, Tensor};

/// Computes the results of one node.
pub type Kernel = fn(&KernelCx) -> Result<Vec<Tensor>>;

/// Defines `KERNELS`, the kernels of a family. Each line names a row and its kernel, or a function of [`KernelCx`] and more
/// arguments.
macro_rules! kernels {
    (@ $kernel:ident) => { $kernel };
    (@ $kernel:ident, $($arg:expr),*) => { |cx| $kernel(cx, $($arg),*) };
    ($($row:ident => $kernel:ident $(($($arg:expr),*))?;)*) => {
        /// The kernels of this family, by op.
        pub const KERNELS: &[(&OpDef, Kernel)] = &[$((&$row, kernels!(@ $kernel $(, $($arg),*)?))),*];
    };
}
pub(crate) use kernels;

/// The input of a kernel: its node and the state of the run.
pub struct KernelCx<'a> {
    /// The op of the node; one kernel may serve several.
    pub op: &'static OpDef,
    /// Attributes of the node.
    pub attrs: &'a Attrs,
    /// Operands in order; `None` for an optional one that is absent.
    pub ins: &'a [Option<&'a Tensor>],
    /// CPU copies of small integer operands, for a run on a device; may be shorter than `ins`.
    pub host: &'a [Option<&'a Tensor>],
    /// The generators of random ops.
    pub draws: &'a Draws,
    /// Where offloaded tensors are stored.
    pub store: &'a SwapStore,
    /// Row-major contents of small integer values that depend on the input sizes alone, by slot; may be shorter.
    pub known: &'a [Option<Box<[i64]>>],
    /// The slot of each operand in `known`; may be shorter than `ins`.
    pub slots: &'a [Option<usize>],
    /// Number of results that the node declares; optional ones at the end may be absent.
    pub n_outs: usize,
    /// The operand that the first result overwrites: no later node reads it.
    pub overwrites: Option<usize>,
    /// The kind of device whose blocks kernels use.
    pub device: DeviceKind,
    /// PyTorch's attention kernels that are pinned to the node.
    pub pair: Option<SdpaBackend>,
    /// Collects deferred checks, in a step during which the host must not wait for the device.
    pub deferred: Option<&'a DeferredChecks>,
    /// Set by a kernel that has chosen among equal elements, where PyTorch leaves the choice open.
    pub ties: Option<&'a Cell<bool>>,
}

impl<'a> KernelCx<'a> {
    /// A node on its own: on the host, without facts from a specialization.
    pub fn new(
        op: &'static OpDef,
        attrs: &'a Attrs,
        ins: &'a [Option<&'a Tensor>],
        n_outs: usize,
        (draws, store): (&'a Draws, &'a SwapStore),
    ) -> KernelCx<'a> {
        KernelCx {
            op,
            attrs,
            ins,
            host: &[],
            draws,
            store,
            known: &[],
            slots: &[],
            n_outs,
            overwrites: None,
            device: DeviceKind::Cpu,
            pair: None,
            deferred: None,
            ties: None,
        }
    }
}

impl KernelCx<'_> {
    /// Returns operand `i`, which the op requires.
    pub fn x(&self, i: usize) -> Result<&Tensor> {
        self.opt(i)
            .ok_or_else(|| self.bug(format!("operand {i} is missing")))
    }

    /// Returns operand `i` if it is given.
    pub fn opt(&self, i: usize) -> Option<&Tensor> {
        self.ins.get(i).copied().flatten()
    }

    /// Returns all operands that are given.
    pub fn all(&self) -> Vec<&Tensor> {
        self.ins.iter().flatten().copied().collect()
    }

    /// Returns a float attribute.
    pub fn number(&self, name: &str) -> f64 {
        f64::from(self.attrs.float(name))
    }

    /// Returns an integer attribute as a boolean.
    pub fn flag(&self, name: &str) -> bool {
        self.attrs.int(name) != 0
    }

    /// Returns the attribute `axis`, in `0..rank`.
    pub fn axis(&self, rank: usize) -> usize {
        in_rank(self.attrs.int("axis"), rank)
    }

    /// Returns the axes in operand `i`, each in `0..rank`; `None` if it is not given.
    pub fn axes(&self, i: usize, rank: usize) -> Result<Option<Vec<usize>>> {
        let list = self.opt(i).map(|_| self.ints(i)).transpose()?;
        Ok(list.map(|axes| axes_of(&axes, rank)))
    }

    /// Returns the tensor for the first result: a new row-major one, not filled, or the operand that the result overwrites.
    pub fn result(&self, dims: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
        let Some(slot) = self.overwrites else {
            return empty(dims, kind, device);
        };
        let operand = self.x(slot)?;
        let alike = operand.size() == dims && operand.kind() == kind && operand.is_contiguous();
        if !alike || operand.device() != device {
            return Err(self.bug(format!("the result cannot be written over operand {slot}")));
        }
        Ok(operand.shallow_clone())
    }

    /// As [`KernelCx::result`], with the sizes, type and device of `x`.
    pub fn result_like(&self, x: &Tensor) -> Result<Tensor> {
        self.result(&x.size(), x.kind(), x.device())
    }

    /// Returns the result of a kernel that changes `x` in place: what it overwrites, or a copy of `x`.
    pub fn result_from(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.result_like(x)?;
        if self.overwrites.is_none() {
            copy_into(&out, x)?;
        }
        Ok(out)
    }

    /// Returns the slot of operand `i` in `known`.
    pub fn slot(&self, i: usize) -> Option<usize> {
        self.slots.get(i).copied().flatten()
    }

    /// Returns the row-major contents of an integer operand. Waits for the device if they were computed there.
    ///
    /// # Errors
    /// The step must not wait for the device.
    pub fn ints(&self, i: usize) -> Result<Vec<i64>> {
        if let Some(ints) = self.slot(i).and_then(|s| self.known.get(s)?.as_deref()) {
            return Ok(ints.to_vec());
        }
        let tensor = match self.host.get(i).copied().flatten() {
            Some(copy) => copy,
            None => self.awaited(i)?,
        };
        Vec::<i64>::try_from(tensor.to_kind(Kind::Int64).contiguous().reshape([-1]))
            .map_err(|e| self.bug(format!("operand {i}: {e}")))
    }

    /// Returns operand `i`, for the host to read it from the device.
    ///
    /// # Errors
    /// The step must not wait for the device.
    pub fn awaited(&self, i: usize) -> Result<&Tensor> {
        if self.deferred.is_some() && self.device == DeviceKind::Cuda {
            return Err(self.bug(format!(
                "operand {i} would be read from the device in a step that must not wait for it"
            )));
        }
        self.x(i)
    }

    /// Returns sizes and strides of the operands from `i` on, as rules see them.
    pub fn sized_from(&self, i: usize) -> Result<Vec<Option<Sized>>> {
        let ins = self.ins.get(i..).unwrap_or_default().iter();
        ins.map(|x| x.map(sized).transpose()).collect()
    }

    /// Makes the error for a bug in the kernel; it names the op.
    pub fn bug(&self, what: impl std::fmt::Display) -> Box<Error> {
        Error::bug("kernel", format!("{}: {what}", self.op.name))
    }

    /// Makes an error of the model about the operands' shapes.
    pub fn shape_error(&self, what: impl std::fmt::Display) -> Box<Error> {
        Error::model("shape", format!("{}: {what}", self.op.name))
    }

    /// Makes an error of the model about sizes that do not fit.
    pub fn misfit(&self, what: impl std::fmt::Display) -> Box<Error> {
        self.shape_error(format!("the sizes do not fit: {what}"))
    }
}

/// Calls an ATen operator that returns one tensor; `name` includes the overload (`aten::add.Tensor`).
pub fn call(name: &str, args: &[Arg]) -> Result<Tensor> {
    dispatched(name, args, Op::call_one)
}

/// Calls an ATen operator that writes into one of its arguments, and drops what it returns.
pub fn write(name: &str, args: &[Arg]) -> Result<()> {
    dispatched(name, args, Op::run)
}

/// As [`write`], for writes by index into the first argument of which no two meet. Their order makes no difference then,
/// so on a device they need not be sorted, as libtorch's deterministic kernels do.
pub fn write_apart(name: &str, args: &[Arg]) -> Result<()> {
    let is_there = matches!(args.first(), Some(Arg::Tensor(out)) if !backend(out).is_host());
    if !is_there {
        return write(name, args);
    }
    cuda::refuse_nondeterministic(false);
    let done = write(name, args);
    cuda::refuse_nondeterministic(true);
    done
}

/// Calls an ATen operator that returns several values.
pub fn call_n(name: &str, args: &[Arg]) -> Result<Vec<Ret>> {
    dispatched(name, args, Op::call)
}

/// As [`write`], with the arguments `first`, `extra` and `out`.
pub fn write_with(name: &str, first: &[Arg], extra: &[Arg], out: &Tensor) -> Result<()> {
    write(name, &[first, extra, args![out]].concat())
}

/// Returns the first `N` results of an operator, all tensors.
pub fn call_tensors<const N: usize>(name: &str, args: &[Arg]) -> Result<[Tensor; N]> {
    let mut tensors = Vec::with_capacity(N);
    for result in call_n(name, args)?.into_iter().take(N) {
        tensors.push(result.into_tensor().map_err(torch_error)?);
    }
    <[Tensor; N]>::try_from(tensors)
        .map_err(|found| Error::bug("kernel", format!("{name} returned {} tensors", found.len())))
}

thread_local! {
    static CALLS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// Returns how often this thread has called each operator of libtorch by its name.
pub fn calls() -> BTreeMap<&'static str, u64> {
    CALLS.with_borrow(Clone::clone)
}

/// Calls an operator. Scalars are CPU tensors ([`scalar`]), and most operators accept them together with tensors on a device.
/// If an operator refuses them, it is called again with copies of the scalars on the device.
fn dispatched<T>(
    name: &str,
    args: &[Arg],
    call: impl Fn(&Op, &[Arg]) -> Result<T, TorchError>,
) -> Result<T> {
    let op = Op::find(name).map_err(torch_error)?;
    CALLS.with_borrow_mut(|calls| *calls.entry(op.name()).or_default() += 1);
    let refusal = match call(&op, args) {
        Ok(done) => return Ok(done),
        Err(e) if !e.message.contains("same device") => return Err(torch_error(e)),
        Err(e) => e,
    };
    let tensor = |arg: &Arg| match arg {
        Arg::Tensor(t) | Arg::OptTensor(Some(t)) => Some(t.shallow_clone()),
        _ => None,
    };
    let devices = args.iter().filter_map(tensor).map(|t| t.device());
    let Some(device) = devices.into_iter().find(|d| *d != Device::Cpu) else {
        return Err(torch_error(refusal));
    };
    let moved = |arg: &Arg| match tensor(arg) {
        Some(t) if t.device() == Device::Cpu && t.dim() == 0 => number_at(&t, device).map(Some),
        _ => Ok(None),
    };
    let moved: Vec<Option<Tensor>> = args.iter().map(moved).collect::<Result<_>>()?;
    let there: Vec<Arg> = (args.iter().zip(&moved))
        .map(|(arg, moved)| moved.as_ref().map_or(*arg, Arg::Tensor))
        .collect();
    call(&op, &there).map_err(torch_error)
}

/// Returns the backend of the place where a tensor lies.
pub fn backend(x: &Tensor) -> &'static dyn Backend {
    device::at(x.device())
}

/// Makes a row-major tensor, not filled.
///
/// # Errors
/// Not enough memory.
pub fn empty(dims: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    device::at(device).empty(dims, kind)
}

/// Makes a row-major tensor of the same sizes and type, not filled.
pub fn empty_like(x: &Tensor) -> Result<Tensor> {
    empty_as(x, x.kind())
}

/// Makes a row-major tensor of the same sizes and another type, not filled.
pub fn empty_as(x: &Tensor, kind: Kind) -> Result<Tensor> {
    empty(&x.size(), kind, x.device())
}

/// Makes a row-major copy in the type `kind`.
pub fn copied_as(x: &Tensor, kind: Kind) -> Result<Tensor> {
    let out = empty_as(x, kind)?;
    copy_into(&out, x)?;
    Ok(out)
}

/// Returns the elements of a row-major tensor as a vector.
pub fn as_vector(x: &Tensor) -> Result<Tensor> {
    call("aten::view", args![x, &[-1]])
}

/// Returns the tensor itself if it is row-major, else a row-major copy. Rows declare the copy.
pub fn dense(x: &Tensor) -> Result<Tensor> {
    dense_as(x, x.kind())
}

/// Returns the tensor itself if it is row-major and of type `kind`, else a row-major copy of that type.
pub fn dense_as(x: &Tensor, kind: Kind) -> Result<Tensor> {
    match x.kind() == kind && x.is_contiguous() {
        true => Ok(x.alias()),
        false => copied_as(x, kind),
    }
}

/// Returns whether the type has 16 bits and is computed in float32.
pub fn is_narrow(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

/// Returns the type in which kernels compute operands of a type: float32 for 16-bit types.
pub fn compute_kind(kind: Kind) -> Kind {
    if is_narrow(kind) { Kind::Float } else { kind }
}

/// Returns whether the type is a floating-point type.
pub fn is_float(kind: Kind) -> bool {
    is_narrow(kind) || matches!(kind, Kind::Float | Kind::Double)
}

/// Returns sizes and strides of a tensor, as rules see them.
pub fn sized(x: &Tensor) -> Result<Sized> {
    Ok(Sized {
        dtype: dtype_of(x.kind())?,
        dims: x.size(),
        strides: x.stride(),
        ints: None,
    })
}

/// Returns our name of an element type.
pub fn dtype_of(kind: Kind) -> Result<DType> {
    dtype(kind).ok_or_else(|| Error::bug("kernel", format!("a tensor of element type {kind:?}")))
}

/// Makes a tensor of rank 0 in bytes that the allocator does not count. For a plain number, `mul_.Scalar` and the like would
/// allocate a temporary.
pub fn scalar(kind: Kind, value: f64) -> Result<Tensor> {
    lent_scalar(&Constant::scalar(dtype_of(kind)?, value))
}

/// As [`scalar`], from the only element of a constant.
pub fn lent_scalar(constant: &Constant) -> Result<Tensor> {
    #[repr(align(64))]
    struct Aligned([u8; 64]);
    struct Number(Box<Aligned>, usize);
    impl AsRef<[u8]> for Number {
        fn as_ref(&self) -> &[u8] {
            &self.0.0[..self.1]
        }
    }
    let size = constant.dtype.size_bytes() as usize;
    let number = constant.bytes().and_then(|b| b.get(..size));
    let number = number.ok_or_else(|| Error::bug("kernel", "a number without its bytes"))?;
    let mut block = Box::new(Aligned([0; 64]));
    block.0[..size].copy_from_slice(number);
    let owner = Arc::new(Number(block, size));
    bytes::from_bytes(owner, kind(constant.dtype)?, &[]).map_err(torch_error)
}

/// Returns the number in a tensor of one element. Waits for the device.
pub fn scalar_number(x: &Tensor) -> Result<f64> {
    x.f_double_value(&vec![0; x.dim()])
        .map_err(|e| tch_error(&e))
}

/// Returns a scalar at a place, as a copy if it is not there. The host does not wait.
pub fn number_at(number: &Tensor, device: Device) -> Result<Tensor> {
    if number.device() == device {
        return Ok(number.shallow_clone());
    }
    let there = empty(&[], number.kind(), device)?;
    copy_into(&there, number)?;
    Ok(there)
}

/// Copies `from` into `to`, converting and broadcasting.
pub fn copy_into(to: &Tensor, from: &Tensor) -> Result<()> {
    if from.dim() == 0 && backend(from).is_host() && !backend(to).is_host() {
        // A copy would expand the number on the host to the size of `to` and wait for the transfer.
        return fill(to, from);
    }
    if backend(to).is_host() && is_turned(to, from) {
        return bytes::copy_transposed(from, to).map_err(torch_error);
    }
    write("aten::copy_", args![to, from, false])
}

/// Returns true for a row-major and a column-major matrix of one kind and size, between which libtorch copies with a buffer.
fn is_turned(to: &Tensor, from: &Tensor) -> bool {
    let size = from.size();
    from.dim() == 2
        && to.size() == size
        && to.kind() == from.kind()
        && from.stride() == [1, size[0]]
        && size[1] > 1
        && to.is_contiguous()
        && backend(from).is_host()
}

/// Sets all elements to a number, a tensor of one element.
pub fn fill(to: &Tensor, number: &Tensor) -> Result<()> {
    write("aten::fill_.Tensor", args![to, number])
}

/// Sets all elements to 0.
pub fn zero(x: &Tensor) -> Result<()> {
    write("aten::zero_", args![x])
}

/// `to` += `x`.
pub fn add_into(to: &Tensor, x: &Tensor) -> Result<()> {
    write("aten::add_.Tensor", args![to, x, 1])
}

/// `to` -= `x`.
pub fn sub_into(to: &Tensor, x: &Tensor) -> Result<()> {
    write("aten::sub_.Tensor", args![to, x, 1])
}

/// `to` *= `x`.
pub fn mul_into(to: &Tensor, x: &Tensor) -> Result<()> {
    write("aten::mul_.Tensor", args![to, x])
}

/// `to` /= `x`.
pub fn div_into(to: &Tensor, x: &Tensor) -> Result<()> {
    write("aten::div_.Tensor", args![to, x])
}

/// Returns a view of `count` places of an axis, from place `at` on.
pub fn narrow(x: &Tensor, axis: i64, at: i64, count: i64) -> Result<Tensor> {
    call("aten::narrow", args![x, axis, at, count])
}

/// Returns a view of other sizes and strides that begins at the first element.
pub fn strided(x: &Tensor, dims: &[i64], strides: &[i64]) -> Result<Tensor> {
    call("aten::as_strided", args![x, dims, strides, Arg::None])
}

/// Returns a copy with some axes reversed.
pub fn flip(x: &Tensor, axes: &[i64]) -> Result<Tensor> {
    call("aten::flip", args![x, axes])
}

/// Splits `0..total` into blocks of at most `most` places. Returns the first place and the length of each.
pub fn blocks(total: i64, most: i64) -> impl Iterator<Item = (i64, i64)> {
    let starts = (0..total).step_by(most.max(1) as usize);
    starts.map(move |at| (at, most.min(total - at)))
}

/// Returns an axis in `0..rank`; a negative one counts from the end.
pub fn in_rank(axis: i64, rank: usize) -> usize {
    (if axis < 0 { axis + rank as i64 } else { axis }) as usize
}

/// Returns axes in `0..rank`; negative ones count from the end.
pub fn axes_of(axes: &[i64], rank: usize) -> Vec<usize> {
    axes.iter().map(|a| in_rank(*a, rank)).collect()
}

/// Returns the shape that tensors broadcast to. Does not check that they fit; the operators do.
pub fn broadcast(tensors: &[&Tensor]) -> Vec<i64> {
    let sizes: Vec<Vec<i64>> = tensors.iter().map(|t| t.size()).collect();
    broadcast_sizes(&sizes)
}

/// As [`broadcast`], for sizes. Where sizes do not fit, the last one that is not 1 counts.
pub fn broadcast_sizes(sizes: &[impl AsRef<[i64]>]) -> Vec<i64> {
    let sizes = sizes.iter().map(AsRef::as_ref);
    let rank = sizes.clone().map(<[i64]>::len).max().unwrap_or(0);
    let mut dims = vec![1; rank];
    for size in sizes {
        for (dim, found) in dims[rank - size.len()..].iter_mut().zip(size) {
            if *found != 1 {
                *dim = *found;
            }
        }
    }
    dims
}
