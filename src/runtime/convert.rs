//! Conversions between our types and errors and libtorch's.

use ckpt_passes::ir::{DType, Tensor as Constant};
use ckpt_passes::{Error, Result};
use ckpt_torch::{TorchError, bytes};
use std::sync::Arc;
use tch::{Kind, Tensor};

/// Returns libtorch's name of an element type.
///
/// # Errors
/// Unsigned types wider than 8 bits, which libtorch cannot compute with.
pub fn kind(dtype: DType) -> Result<Kind> {
    Ok(match dtype {
        DType::F32 => Kind::Float,
        DType::F64 => Kind::Double,
        DType::F16 => Kind::Half,
        DType::BF16 => Kind::BFloat16,
        DType::F8E4M3FN => Kind::Float8e4m3fn,
        DType::F8E5M2 => Kind::Float8e5m2,
        DType::F8E4M3FNUZ => Kind::Float8e4m3fnuz,
        DType::F8E5M2FNUZ => Kind::Float8e5m2fnuz,
        DType::I64 => Kind::Int64,
        DType::I32 => Kind::Int,
        DType::I16 => Kind::Int16,
        DType::I8 => Kind::Int8,
        DType::U8 => Kind::Uint8,
        DType::Bool => Kind::Bool,
        DType::U64 | DType::U32 | DType::U16 => {
            return Err(Error::model(
                "type",
                format!("the runtime has no tensors of element type {dtype}"),
            ));
        }
    })
}

/// Returns our name of an element type, if we have one.
pub fn dtype(kind: Kind) -> Option<DType> {
    DType::ALL
        .into_iter()
        .find(|d| self::kind(*d).is_ok_and(|k| k == kind))
}

/// The error code of a kernel that has no deterministic form on its device.
pub const NONDETERMINISTIC: &str = "nondeterministic";

/// Converts a failure inside libtorch. Running out of memory is an environment error; anything else is a wrong call of
/// ours.
#[expect(
    clippy::needless_pass_by_value,
    reason = "`map_err` gives the error by value"
)]
pub fn torch_error(error: TorchError) -> Box<Error> {
    match error.kind {
        ckpt_torch::ErrorKind::OutOfMemory => Error::environment("memory", error.to_string()),
        _ if ckpt_torch::cuda::is_nondeterministic(&error) => {
            Error::usage(NONDETERMINISTIC, error.to_string())
        }
        _ if is_lookup_failure(&error.to_string()) => Error::model("index", error.to_string())
            .help("a tensor holds an index that what it looks up does not have; look at the inputs and sizes"),
        _ => Error::bug("torch", error.to_string()),
    }
}

/// Returns whether a kernel reports an index out of range: indices are data.
fn is_lookup_failure(text: &str) -> bool {
    text.contains("index")
        && ["out of range", "out of bounds"]
            .iter()
            .any(|w| text.contains(w))
}

/// As [`torch_error`], for a call through tch.
pub fn tch_error(error: &tch::TchError) -> Box<Error> {
    let text = error.to_string();
    // The words of CUDA's allocator and of ours.
    match text.contains("out of memory") || text.contains("cannot allocate") {
        true => Error::environment("memory", text),
        false => Error::bug("torch", text),
    }
}

/// Returns the error for a weight without bytes.
pub fn absent(name: &str) -> Box<Error> {
    let what = format!("the file that holds `{name}` is absent");
    Error::environment("weights", what).help("put the external data file beside the model")
}

/// Returns a weight as a tensor: over the mapped file where its bytes are aligned, else a copy.
///
/// # Errors
/// The weight's file is absent.
pub fn tensor(name: &str, constant: &Constant) -> Result<Tensor> {
    let Some(data) = constant.bytes() else {
        return Err(absent(name));
    };
    let dims: Vec<i64> = constant.dims.iter().map(|d| *d as i64).collect();
    bytes::from_bytes(Arc::new(data.clone()), kind(constant.dtype)?, &dims).map_err(torch_error)
}
