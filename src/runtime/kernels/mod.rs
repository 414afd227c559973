//! One kernel per op, in files that mirror `passes/ops`.
//!
//! A kernel keeps the promise of its row's `memory` rule: results are new and row-major unless the rule says "view",
//! and beside results it takes no more than `temp_bytes`. Where the rule names operands that the result can be written
//! over, the kernel takes its first result from [`KernelCx::result`]. An op without a kernel is executed through its body.

use super::convert::{tch_error, torch_error};
use super::draws::Draws;
use super::later::Later;
use super::outside::Outside;
use attention::pairs::Pair;
use ckpt_passes::ir::{Attrs, OpDef};
use ckpt_passes::{Error, Result, ops};
use ckpt_torch::{Arg, Op, Ret, TorchError, bytes};
pub use product::write_product;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

pub mod accumulate;
pub mod activation;
pub mod arith;
pub mod attention;
pub mod bits;
pub mod cast;
pub mod concat;
pub mod conv;
pub mod extreme;
pub mod fill;
pub mod gated;
pub mod index;
pub mod logic;
pub mod loss;
pub mod math;
pub mod matmul;
pub mod norm;
pub mod optimizer;
pub mod piecewise;
pub mod pool;
pub mod power;
mod product;
pub mod random;
pub mod reduce;
pub mod rotary;
pub mod scan;
pub mod scatter;
pub mod select;
pub mod shape;
pub mod slice;
pub mod softmax;
pub mod sum_to;
pub mod transfer;
pub mod trig;

/// Computes the results of one node.
pub type Kernel = fn(&KernelCx) -> Result<Vec<Tensor>>;

/// Every family's kernels.
const FAMILIES: &[&[(&OpDef, Kernel)]] = &[
    accumulate::KERNELS,
    activation::KERNELS,
    arith::KERNELS,
    attention::KERNELS,
    bits::KERNELS,
    cast::KERNELS,
    concat::KERNELS,
    conv::KERNELS,
    extreme::KERNELS,
    fill::KERNELS,
    gated::KERNELS,
    index::KERNELS,
    logic::KERNELS,
    loss::KERNELS,
    math::KERNELS,
    matmul::KERNELS,
    norm::KERNELS,
    optimizer::KERNELS,
    piecewise::KERNELS,
    pool::KERNELS,
    power::KERNELS,
    random::KERNELS,
    reduce::KERNELS,
    rotary::KERNELS,
    scan::KERNELS,
    scatter::KERNELS,
    select::KERNELS,
    shape::KERNELS,
    slice::KERNELS,
    softmax::KERNELS,
    sum_to::KERNELS,
    transfer::KERNELS,
    trig::KERNELS,
];

/// The kernel of an op.
pub fn find(op: &OpDef) -> Option<Kernel> {
    FAMILIES
        .iter()
        .flat_map(|rows| rows.iter())
        .find(|(row, _)| *row == op)
        .map(|(_, kernel)| *kernel)
}

/// Whether a result that is a view begins where its operand does, so that its sizes and strides say all of it.
pub fn begins_with_operand(op: &OpDef) -> bool {
    op.is_layout() && op != &ops::slice::SLICE && op != &ops::concat::SPLIT
}

/// What a kernel sees of its node.
pub struct KernelCx<'a> {
    pub op: &'static OpDef,
    pub attrs: &'a Attrs,
    pub ins: &'a [Option<&'a Tensor>],
    /// Copies on the CPU of small integer operands, where the graph runs elsewhere; may be shorter.
    pub host: &'a [Option<&'a Tensor>],
    /// What random ops draw from.
    pub draws: &'a Draws,
    /// Where results wait that leave the device's memory.
    pub outside: &'a Outside,
    /// Contents of small integer values that follow from the sizes of the inputs, row-major, by slot; may be shorter.
    pub known: &'a [Option<Box<[i64]>>],
    /// The slot of each operand in `known`; may be shorter.
    pub slots: &'a [Option<usize>],
    pub n_outs: usize,
    /// The operand that the first result is written over: nobody reads it after this node.
    pub over: Option<usize>,
    /// PyTorch's kernels that are pinned to the node, of attention.
    pub pair: Option<Pair>,
    /// Where questions to the device go, in a step that the host must not wait in.
    pub later: Option<&'a Later>,
}

impl KernelCx<'_> {
    /// Operand `i`, which the op requires.
    pub fn x(&self, i: usize) -> Result<&Tensor> {
        self.opt(i).ok_or_else(|| {
            Error::bug(
                "kernel",
                format!("{}: operand {i} is missing", self.op.name),
            )
        })
    }

    pub fn opt(&self, i: usize) -> Option<&Tensor> {
        self.ins.get(i).copied().flatten()
    }

    /// Where the first result goes: a new row-major tensor, not filled, or the operand that it is written over.
    pub fn result(&self, dims: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
        let Some(slot) = self.over else {
            return empty(dims, kind, device);
        };
        let operand = self.x(slot)?;
        let alike = operand.size() == dims && operand.kind() == kind && operand.is_contiguous();
        if !alike || operand.device() != device {
            return Err(Error::bug(
                "kernel",
                format!(
                    "{}: the result cannot be written over operand {slot}",
                    self.op.name
                ),
            ));
        }
        Ok(operand.shallow_clone())
    }

    /// The contents of an integer operand, row-major. Waits for the device where it was computed there.
    pub fn ints(&self, i: usize) -> Result<Vec<i64>> {
        let slot = self.slots.get(i).copied().flatten();
        if let Some(ints) = slot.and_then(|s| self.known.get(s)?.as_deref()) {
            return Ok(ints.to_vec());
        }
        let tensor = match self.host.get(i).copied().flatten() {
            Some(copy) => copy,
            None => self.x(i)?,
        };
        Vec::<i64>::try_from(tensor.to_kind(Kind::Int64).contiguous().reshape([-1]))
            .map_err(|e| Error::bug("kernel", format!("{}: operand {i}: {e}", self.op.name)))
    }
}

/// Calls an ATen operator that returns one tensor.
pub fn call(name: &str, overload: &str, args: &[Arg]) -> Result<Tensor> {
    dispatched(name, overload, args, Op::call_one)
}

/// Calls an ATen operator that writes into one of its arguments; what it returns is that argument.
pub fn write(name: &str, overload: &str, args: &[Arg]) -> Result<()> {
    dispatched(name, overload, args, Op::run)
}

/// Calls an ATen operator that returns several values.
pub fn call_n(name: &str, overload: &str, args: &[Arg]) -> Result<Vec<Ret>> {
    dispatched(name, overload, args, Op::call)
}

/// Numbers of ours lie on the CPU ([`scalar`]). Most operators of a device take them so; where one does not, it gets
/// copies of them there.
fn dispatched<T>(
    name: &str,
    overload: &str,
    args: &[Arg],
    call: impl Fn(&Op, &[Arg]) -> Result<T, TorchError>,
) -> Result<T> {
    let op = Op::find(name, overload).map_err(torch_error)?;
    let refusal = match call(&op, args) {
        Ok(done) => return Ok(done),
        Err(e) if !e.message.contains("same device") => return Err(torch_error(e)),
        Err(e) => e,
    };
    let tensors = || {
        args.iter().filter_map(|arg| match arg {
            Arg::Tensor(t) | Arg::OptTensor(Some(t)) => Some(*t),
            _ => None,
        })
    };
    let Some(device) = tensors().map(Tensor::device).find(|d| *d != Device::Cpu) else {
        return Err(torch_error(refusal));
    };
    let is_number = |t: &Tensor| t.device() == Device::Cpu && t.dim() == 0;
    let moved = tensors()
        .filter(|t| is_number(t))
        .map(|t| number_at(t, device))
        .collect::<Result<Vec<Tensor>>>()?;
    let mut rest = moved.iter();
    let there: Vec<Arg> = args
        .iter()
        .map(|arg| match arg {
            Arg::Tensor(t) | Arg::OptTensor(Some(t)) if is_number(t) => {
                rest.next().map_or(*arg, Arg::Tensor)
            }
            other => *other,
        })
        .collect();
    call(&op, &there).map_err(torch_error)
}

/// A new row-major tensor, not filled.
///
/// # Errors
/// Not enough memory.
pub fn empty(dims: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    match device {
        Device::Cpu => ckpt_torch::empty(dims, kind).map_err(torch_error),
        _ => Tensor::f_empty(dims, (kind, device)).map_err(|e| tch_error(&e)),
    }
}

/// A number as a tensor of rank 0, in bytes that the allocator does not count: what libtorch makes of a bare number in
/// `mul_.Scalar` and the like would be a temporary of its own.
pub fn scalar(kind: Kind, value: f64) -> Result<Tensor> {
    let dtype = super::convert::dtype(kind)
        .ok_or_else(|| Error::bug("kernel", format!("a number of element type {kind:?}")))?;
    lent_scalar(&ckpt_passes::ir::Tensor::scalar(dtype, value))
}

/// The only element of a constant, as [`scalar`].
pub fn lent_scalar(constant: &ckpt_passes::ir::Tensor) -> Result<Tensor> {
    #[repr(align(64))]
    struct Aligned([u8; 64]);
    struct Number(Box<Aligned>, usize);
    impl AsRef<[u8]> for Number {
        fn as_ref(&self) -> &[u8] {
            &self.0.0[..self.1]
        }
    }
    let kind = super::convert::kind(constant.dtype)?;
    let size = constant.dtype.size_bytes() as usize;
    let number = constant.bytes().and_then(|b| b.get(..size));
    let number = number.ok_or_else(|| Error::bug("kernel", "a number without its bytes"))?;
    let mut block = Box::new(Aligned([0; 64]));
    block.0[..size].copy_from_slice(number);
    bytes::from_bytes(Arc::new(Number(block, size)), kind, &[]).map_err(torch_error)
}

/// A number of ours where a device reads it like any tensor. The host waits for nothing.
pub fn number_at(number: &Tensor, device: Device) -> Result<Tensor> {
    if device == Device::Cpu {
        return Ok(number.shallow_clone());
    }
    let there = empty(&[], number.kind(), device)?;
    copy_into(&there, number)?;
    Ok(there)
}

/// Copies `from` into `to`, converting and broadcasting.
pub fn copy_into(to: &Tensor, from: &Tensor) -> Result<()> {
    if from.dim() == 0 && from.device() == Device::Cpu && to.device() != Device::Cpu {
        // A number of ours: a copy would make as many of it on the host as `to` has elements, and wait for the transfer.
        let args = [Arg::Tensor(to), Arg::Tensor(from)];
        return write("aten::fill_", "Tensor", &args);
    }
    let args = [Arg::Tensor(to), Arg::Tensor(from), Arg::Bool(false)];
    write("aten::copy_", "", &args)
}

/// The shape that tensors broadcast to; the operator itself refuses what does not fit.
pub fn broadcast(tensors: &[&Tensor]) -> Vec<i64> {
    let rank = tensors.iter().map(|t| t.dim()).max().unwrap_or(0);
    let mut dims = vec![1; rank];
    for tensor in tensors {
        let size = tensor.size();
        for (dim, found) in dims[rank - size.len()..].iter_mut().zip(size) {
            if found != 1 {
                *dim = found;
            }
        }
    }
    dims
}
