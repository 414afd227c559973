//! Raw bytes of tensors: little-endian elements, row-major, as in ONNX, npz and safetensors.
//!
//! libtorch's kernels may take other code paths for data that is not 64-byte aligned. Such bytes are copied, so that the same
//! weights give the same bits whether they were mapped or read.

use crate::error::{TorchError, check};
use crate::handle;
use crate::op::scalar_type;
use crate::sys;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use tch::{Kind, Tensor};

/// Owner of the bytes of a tensor; the tensor keeps it alive.
pub type Owner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Alignment of libtorch's own storages.
pub const ALIGNMENT_BYTES: usize = 64;

/// Makes a CPU tensor over the owner's bytes, without a copy if they are aligned to [`ALIGNMENT_BYTES`], else as
/// [`copy_from`]. Lent bytes do not count in [`crate::memory`].
///
/// A tensor over lent bytes is read-only. [`crate::Op::call`] and [`copy`] refuse to write to it. tch's in-place methods
/// do not check this and must not be used on it.
///
/// # Errors
/// As [`copy_from`].
pub fn from_bytes(owner: Owner, kind: Kind, dims: &[i64]) -> Result<Tensor, TorchError> {
    let bytes = (*owner).as_ref();
    check_bytes(bytes, kind, dims)?;
    if bytes.is_empty() || bytes.as_ptr().align_offset(ALIGNMENT_BYTES) != 0 {
        return copy_checked(bytes, kind, dims);
    }
    let data = bytes.as_ptr();
    let context = Box::into_raw(Box::new(owner));
    // SAFETY: the box shares the owner, so the bytes stay in place and unchanged. The C++ side drops the box once, when the
    // storage is freed or the tensor cannot be made. Dims and number of bytes agree.
    handle::new_tensor(|tensor| unsafe {
        sys::ck_tensor_borrow(
            data.cast(),
            dims.as_ptr(),
            dims.len() as i64,
            scalar_type(kind),
            context.cast(),
            drop_owner,
            tensor,
        )
    })
}

extern "C" fn drop_owner(context: *mut c_void) {
    // SAFETY: made by `from_bytes` and handed here once.
    drop(unsafe { Box::from_raw(context.cast::<Owner>()) });
}

/// Makes a CPU tensor with a copy of `bytes`.
///
/// # Errors
/// `Refused` if a dim is negative, if the number of bytes is not what `kind` and `dims` need, if a bool is neither 0
/// nor 1, or for a kind that has no plain bytes (complex, quantized); `OutOfMemory` as it says.
pub fn copy_from(bytes: &[u8], kind: Kind, dims: &[i64]) -> Result<Tensor, TorchError> {
    check_bytes(bytes, kind, dims)?;
    copy_checked(bytes, kind, dims)
}

fn copy_checked(bytes: &[u8], kind: Kind, dims: &[i64]) -> Result<Tensor, TorchError> {
    // SAFETY: the bytes and dims are lent for the call.
    handle::new_tensor(|tensor| unsafe {
        sys::ck_tensor_copy(
            bytes.as_ptr().cast(),
            bytes.len() as i64,
            dims.as_ptr(),
            dims.len() as i64,
            scalar_type(kind),
            tensor,
        )
    })
}

/// Returns the bytes of a contiguous CPU tensor.
///
/// # Errors
/// `Refused` if the tensor is not contiguous, not on the CPU, or of a kind that has no plain bytes.
pub fn read(tensor: &Tensor) -> Result<Vec<u8>, TorchError> {
    look(tensor, <[u8]>::to_vec)
}

/// Calls `look` with the bytes of a contiguous CPU tensor, without a copy.
///
/// # Errors
/// As [`read`].
pub fn look<T>(tensor: &Tensor, look: impl FnOnce(&[u8]) -> T) -> Result<T, TorchError> {
    let (data, len) = span(tensor, false)?;
    if len == 0 {
        return Ok(look(&[]));
    }
    // SAFETY: the span is the tensor's, which lives through the call.
    Ok(look(unsafe { std::slice::from_raw_parts(data, len) }))
}

/// Copies the bytes of a contiguous CPU tensor.
///
/// # Errors
/// As [`read`]; and `Refused` if the number of bytes differs.
pub fn read_into(tensor: &Tensor, to: &mut [u8]) -> Result<(), TorchError> {
    let (data, len) = span(tensor, false)?;
    if to.len() != len {
        return Err(TorchError::refused(format!(
            "the tensor has {len} bytes, there is room for {}",
            to.len()
        )));
    }
    if len > 0 {
        // SAFETY: the span is the tensor's, which lives through the call; `to` is ours alone.
        unsafe { ptr::copy_nonoverlapping(data, to.as_mut_ptr(), len) };
    }
    Ok(())
}

/// Overwrites the bytes of a contiguous CPU tensor with those of another of its kind. Runs no operator and allocates
/// nothing, so any thread may do it.
///
/// # Errors
/// As [`read`]; and `Refused` if kinds or numbers of bytes differ, or if the target's bytes are lent.
pub fn copy(from: &Tensor, to: &mut Tensor) -> Result<(), TorchError> {
    let (source, source_len) = span(from, false)?;
    let (data, len) = span(to, true)?;
    if from.kind() != to.kind() || source_len != len {
        return Err(TorchError::refused(format!(
            "{source_len} bytes of {:?} do not fill {len} bytes of {:?}",
            from.kind(),
            to.kind()
        )));
    }
    if len > 0 {
        // SAFETY: the spans are the tensors', which live through the call; `copy` allows them to overlap.
        unsafe { ptr::copy(source, data, len) };
    }
    Ok(())
}

/// Rows and columns of the blocks that [`copy_transposed`] copies, so that a block of each tensor stays in the cache.
const BLOCK: usize = 32;

/// Overwrites a contiguous matrix on the CPU with one of its kind and sizes that lies in column-major order. Allocates
/// nothing; `aten::copy_` takes a block of 60 × 60 elements for it.
///
/// # Errors
/// As [`copy`]; and `Refused` for tensors that are no such matrices.
pub fn copy_transposed(from: &Tensor, to: &Tensor) -> Result<(), TorchError> {
    let turned = from
        .f_transpose(0, 1)
        .map_err(|e| TorchError::refused(e.to_string()))?;
    let (source, source_len) = span(&turned, false)?;
    let (data, len) = span(to, true)?;
    let &[rows, columns] = to.size().as_slice() else {
        return Err(TorchError::refused("this is no matrix".to_string()));
    };
    if from.kind() != to.kind() || from.size() != to.size() || source_len != len {
        return Err(TorchError::refused(format!(
            "{:?} of {:?} does not fill {:?} of {:?}",
            from.size(),
            from.kind(),
            to.size(),
            to.kind()
        )));
    }
    if len == 0 {
        return Ok(());
    }
    let sizes = (rows as usize, columns as usize);
    // SAFETY: the spans are the tensors', which live through the call; results never share a storage with what they copy.
    let (source, data) = unsafe {
        (
            std::slice::from_raw_parts(source, len),
            std::slice::from_raw_parts_mut(data, len),
        )
    };
    match element_bytes(to.kind())? {
        1 => transpose::<1>(source, data, sizes),
        2 => transpose::<2>(source, data, sizes),
        4 => transpose::<4>(source, data, sizes),
        _ => transpose::<8>(source, data, sizes),
    }
    Ok(())
}

/// Writes the transpose of `columns` × `rows` elements as `rows` × `columns`.
fn transpose<const SIZE: usize>(source: &[u8], data: &mut [u8], (rows, columns): (usize, usize)) {
    let (source, data) = (source.as_chunks::<SIZE>().0, data.as_chunks_mut::<SIZE>().0);
    for top in (0..rows).step_by(BLOCK) {
        for left in (0..columns).step_by(BLOCK) {
            for row in top..rows.min(top + BLOCK) {
                for column in left..columns.min(left + BLOCK) {
                    data[row * columns + column] = source[column * rows + row];
                }
            }
        }
    }
}

/// Returns whether no element of a CPU tensor is NaN or an infinity. Allocates nothing where the elements are dense, in any
/// order of axes. True for kinds that have no such numbers.
///
/// # Errors
/// `Refused` if the tensor is not on the CPU; libtorch fails.
pub fn is_finite(tensor: &Tensor) -> Result<bool, TorchError> {
    let check: fn(&[u8]) -> bool = match tensor.kind() {
        Kind::Float => |bytes| {
            let bits = |e: [u8; 4]| u32::from_le_bytes(e) & 0x7f80_0000;
            below(bytes.as_chunks().0, bits, 0x7f80_0000)
        },
        Kind::BFloat16 => |bytes| {
            let bits = |e: [u8; 2]| u16::from_le_bytes(e) & 0x7f80;
            below(bytes.as_chunks().0, bits, 0x7f80)
        },
        Kind::Half => |bytes| {
            let bits = |e: [u8; 2]| u16::from_le_bytes(e) & 0x7c00;
            below(bytes.as_chunks().0, bits, 0x7c00)
        },
        Kind::Double => |bytes| {
            let bits = |e: [u8; 8]| u64::from_le_bytes(e) & (0x7ff << 52);
            below(bytes.as_chunks().0, bits, 0x7ff << 52)
        },
        Kind::Float8e4m3fn => |bytes| below(bytes.as_chunks().0, |[b]: [u8; 1]| b & 0x7f, 0x7f),
        Kind::Float8e5m2 => |bytes| below(bytes.as_chunks().0, |[b]: [u8; 1]| b & 0x7f, 0x7c),
        Kind::Float8e4m3fnuz | Kind::Float8e5m2fnuz => {
            |bytes| below(bytes.as_chunks().0, |[b]: [u8; 1]| b == 0x80, true)
        }
        _ => return Ok(true),
    };
    if tensor.is_contiguous() {
        return look(tensor, check);
    }
    let mut axes: Vec<(i64, i64)> = tensor.stride().into_iter().zip(tensor.size()).collect();
    axes.retain(|(_, size)| *size != 1);
    axes.sort_unstable();
    let mut elements = 1;
    let is_dense = axes.iter().all(|(stride, size)| {
        let follows = *stride == elements;
        elements *= size;
        follows
    });
    match is_dense {
        true => look(&crate::view(tensor, &[elements], &[1])?, check),
        false => look(&tensor.contiguous(), check),
    }
}

/// Returns whether the bits of all elements are below `limit`. Has no branch for each element, so that it is vectorized.
fn below<const SIZE: usize, W: Ord + Copy>(
    elements: &[[u8; SIZE]],
    bits: impl Fn([u8; SIZE]) -> W,
    limit: W,
) -> bool {
    const PIECE: usize = 4096;
    let is_below =
        |piece: &[[u8; SIZE]]| piece.iter().fold(true, |all, e| all & (bits(*e) < limit));
    elements.chunks(PIECE).all(is_below)
}

/// Changes the bytes of a contiguous CPU tensor in place. Nothing else may use its storage meanwhile.
///
/// # Errors
/// As [`read`]; and `Refused` if the tensor's bytes are lent, or for a bool, whose bytes may only be 0 or 1.
pub fn edit(tensor: &mut Tensor, change: impl FnOnce(&mut [u8])) -> Result<(), TorchError> {
    let (data, len) = span(tensor, true)?;
    if tensor.kind() == Kind::Bool {
        return Err(TorchError::refused(
            "a bool tensor cannot be edited as bytes".to_string(),
        ));
    }
    if len > 0 {
        // SAFETY: the span is the tensor's, which is borrowed for the call; libtorch's threads are idle between calls.
        change(unsafe { std::slice::from_raw_parts_mut(data, len) });
    }
    Ok(())
}

fn span(tensor: &Tensor, for_writing: bool) -> Result<(*mut u8, usize), TorchError> {
    let (mut data, mut len) = (ptr::null_mut(), 0);
    // SAFETY: the tensor is lent for the call, and there are two places to write to.
    check(unsafe {
        sys::ck_tensor_bytes(
            handle::lend(tensor),
            for_writing.into(),
            &mut data,
            &mut len,
        )
    })?;
    element_bytes(tensor.kind())?;
    Ok((data.cast(), usize::try_from(len).unwrap_or(0)))
}

/// Returns the bytes per element of a kind that has plain bytes.
///
/// # Errors
/// `Refused` for complex and quantized kinds.
pub fn element_bytes(kind: Kind) -> Result<usize, TorchError> {
    match kind {
        Kind::ComplexHalf
        | Kind::ComplexFloat
        | Kind::ComplexDouble
        | Kind::QInt8
        | Kind::QUInt8
        | Kind::QInt32 => Err(TorchError::refused(format!("{kind:?} has no plain bytes"))),
        _ => Ok(kind.elt_size_in_bytes()),
    }
}

fn check_bytes(bytes: &[u8], kind: Kind, dims: &[i64]) -> Result<(), TorchError> {
    let element = element_bytes(kind)?;
    let wanted = dims.iter().try_fold(element, |product, &dim| {
        usize::try_from(dim)
            .ok()
            .and_then(|dim| product.checked_mul(dim))
    });
    match wanted {
        Some(wanted) if wanted == bytes.len() => check_bools(bytes, kind),
        Some(wanted) => Err(TorchError::refused(format!(
            "a {kind:?} tensor of dims {dims:?} has {wanted} bytes, {} were given",
            bytes.len()
        ))),
        None => Err(TorchError::refused(format!(
            "dims {dims:?} are negative or too large"
        ))),
    }
}

/// Refuses bytes other than 0 and 1, which are undefined behaviour for a bool in C++.
fn check_bools(bytes: &[u8], kind: Kind) -> Result<(), TorchError> {
    if kind != Kind::Bool {
        return Ok(());
    }
    match bytes.iter().position(|&byte| byte > 1) {
        Some(at) => Err(TorchError::refused(format!(
            "byte {at} of a bool tensor is {}, neither 0 nor 1",
            bytes[at]
        ))),
        None => Ok(()),
    }
}
