//! `TensorProto` to [`Tensor`]: little-endian bytes, whichever of ONNX's fields holds the content.
//!
//! Sizes come from a file, so the element count is checked before any allocation, and the content must fill it exactly.
//! `raw_data` and external data are shared; typed fields are small and converted.

use super::external::Files;
use crate::frontend::lower::Packed;
use crate::onnx::proto::{TensorProto, tensor_proto};
use bytes::Bytes;
use ckpt_passes::ir::{DType, Data, Tensor};
use ckpt_passes::{Error, Result};

/// Reads the tensor of a message. The caller reads external data.
pub type ReadTensor<'a> = dyn FnMut(&TensorProto) -> Result<Tensor> + 'a;

/// Element type of an ONNX code.
///
/// # Errors
/// `type` for strings, complex numbers, numbers of less than 8 bits, `FLOAT8E8M0`, and codes that mean nothing.
pub fn dtype(code: i32) -> Result<DType> {
    DType::from_onnx_code(code).ok_or_else(|| {
        let name = match tensor_proto::DataType::try_from(code) {
            Ok(tensor_proto::DataType::Undefined) => "no element type".to_string(),
            Ok(known) => format!("element type {}", known.as_str_name()),
            Err(_) => format!("element type code {code}, which ONNX does not define"),
        };
        let known: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
        Error::model("type", "element type not supported")
            .expected(known.join(", "))
            .found(name)
    })
}

/// A tensor with its content.
///
/// # Errors
/// `shape` for a negative size or a product beyond 63 bits, `data` for content that is missing or of another size,
/// `type` for an element type we do not have, `external` as in [`Files::read`]. None names the tensor; callers do.
pub fn read(proto: &TensorProto, files: &mut Files) -> Result<Tensor> {
    let dtype = dtype(proto.data_type())?;
    let (dims, elements) = read_dims(&proto.dims)?;
    let size_bytes = elements
        .checked_mul(dtype.size_bytes())
        .filter(|n| *n <= i64::MAX as u64)
        .ok_or_else(|| {
            Error::model("shape", "the tensor's size does not fit 63 bits")
                .found(format!("{dims:?}"))
        })?;
    if proto.segment.is_some() {
        bail!("data", "tensors in segments are not supported");
    }
    let data = if proto.data_location() == tensor_proto::DataLocation::External {
        if fields(proto).next().is_some() {
            bail!("data", "a tensor has both external and inline content");
        }
        files.read(&proto.external_data, size_bytes)?
    } else {
        Data::Here {
            bytes: inline(proto, dtype, elements, size_bytes)?,
            origin: None,
        }
    };
    if dtype == DType::Bool
        && let Data::Here { bytes, .. } = &data
        && bytes.iter().any(|b| *b > 1)
    {
        bail!("data", "a boolean tensor holds bytes other than 0 and 1");
    }
    Ok(Tensor { dtype, dims, data })
}

/// Returns the message of a tensor of INT4 or UINT4 as one of bytes, each of which holds two of its elements, and what these
/// are; `None` for other element types.
///
/// # Errors
/// `shape`, as in [`read`].
pub fn of_four_bits(proto: &TensorProto) -> Result<Option<(TensorProto, Packed)>> {
    let signed = match tensor_proto::DataType::try_from(proto.data_type()) {
        Ok(tensor_proto::DataType::Int4) => true,
        Ok(tensor_proto::DataType::Uint4) => false,
        _ => return Ok(None),
    };
    let (_, elements) = read_dims(&proto.dims)?;
    let mut bytes = proto.clone();
    bytes.data_type = Some(DType::U8.onnx_code());
    bytes.dims = vec![elements.div_ceil(2) as i64];
    let shape = proto.dims.clone();
    Ok(Some((bytes, Packed { shape, signed })))
}

/// Sizes and their product.
///
/// # Errors
/// `shape`, as in [`read`].
pub fn read_dims(dims: &[i64]) -> Result<(Vec<u64>, u64)> {
    let mut sizes = Vec::with_capacity(dims.len());
    for dim in dims {
        let size = u64::try_from(*dim).map_err(|_| {
            Error::model("shape", "a tensor has a negative size").found(format!("{dims:?}"))
        })?;
        sizes.push(size);
    }
    if sizes.contains(&0) {
        return Ok((sizes, 0));
    }
    let elements = sizes
        .iter()
        .try_fold(1u64, |n, d| n.checked_mul(*d))
        .filter(|n| *n <= i64::MAX as u64);
    let elements = elements.ok_or_else(|| {
        Error::model("shape", "the tensor's size does not fit 63 bits").found(format!("{dims:?}"))
    })?;
    Ok((sizes, elements))
}

/// Names and lengths of the content fields that are used.
fn fields(proto: &TensorProto) -> impl Iterator<Item = (&'static str, usize)> {
    [
        ("raw_data", proto.raw_data.as_ref().map_or(0, Bytes::len)),
        ("float_data", proto.float_data.len()),
        ("int32_data", proto.int32_data.len()),
        ("string_data", proto.string_data.len()),
        ("int64_data", proto.int64_data.len()),
        ("double_data", proto.double_data.len()),
        ("uint64_data", proto.uint64_data.len()),
    ]
    .into_iter()
    .filter(|(_, n)| *n > 0)
}

/// The field that holds elements of a type (onnx.proto, `TensorProto`).
fn typed_field(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float_data",
        DType::F64 => "double_data",
        DType::I64 => "int64_data",
        DType::U32 | DType::U64 => "uint64_data",
        _ => "int32_data",
    }
}

fn inline(proto: &TensorProto, dtype: DType, elements: u64, size_bytes: u64) -> Result<Bytes> {
    let used: Vec<_> = fields(proto).collect();
    let expected_field = typed_field(dtype);
    match used.as_slice() {
        [] if elements == 0 => return Ok(Bytes::new()),
        [] => {
            return Err(Error::model("data", "a tensor has no content")
                .expected(format!("{size_bytes} bytes for {dtype}{:?}", proto.dims))
                .found("neither raw, typed nor external data"));
        }
        [("raw_data", n)] => {
            if *n as u64 != size_bytes {
                return Err(
                    Error::model("data", "a tensor's content has the wrong size")
                        .expected(format!("{size_bytes} bytes for {dtype}{:?}", proto.dims))
                        .found(format!("{n} bytes of raw data")),
                );
            }
            return Ok(proto.raw_data.clone().unwrap_or_default());
        }
        [(field, n)] if *field == expected_field => {
            if *n as u64 != elements {
                return Err(
                    Error::model("data", "a tensor's content has the wrong size")
                        .expected(format!("{elements} elements for {dtype}{:?}", proto.dims))
                        .found(format!("{n} in {field}")),
                );
            }
        }
        [(field, _)] => {
            return Err(
                Error::model("data", "a tensor's content is in the wrong field")
                    .expected(format!("{expected_field} or raw_data for {dtype}"))
                    .found(*field),
            );
        }
        many => {
            let names: Vec<&str> = many.iter().map(|(f, _)| *f).collect();
            return Err(
                Error::model("data", "a tensor has more than one content").found(names.join(", "))
            );
        }
    }
    typed(proto, dtype).map(Bytes::from)
}

/// Returns the bytes of a typed field. Fails if an element does not fit the type.
fn typed(proto: &TensorProto, dtype: DType) -> Result<Vec<u8>> {
    let numbers: Vec<i128> = match dtype {
        DType::F32 => {
            return Ok(proto
                .float_data
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect());
        }
        DType::F64 => {
            return Ok(proto
                .double_data
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect());
        }
        DType::I64 => proto.int64_data.iter().map(|v| i128::from(*v)).collect(),
        DType::U32 | DType::U64 => proto.uint64_data.iter().map(|v| i128::from(*v)).collect(),
        _ => proto.int32_data.iter().map(|v| i128::from(*v)).collect(),
    };
    let (least, greatest) = match (dtype, dtype.int_range()) {
        (DType::U64, _) => (0, i128::from(u64::MAX)),
        (_, Some((least, greatest))) => (least.into(), greatest.into()),
        // Floats of 16 and 8 bits are unsigned integers with the same bits.
        (_, None) if dtype.is_float8() => (0, u8::MAX.into()),
        (_, None) => (0, u16::MAX.into()),
    };
    let mut bytes = Vec::new();
    for v in numbers {
        if !(least..=greatest).contains(&v) {
            bail!("data", "{v} does not fit {dtype}");
        }
        bytes.extend_from_slice(&v.to_le_bytes()[..dtype.size_bytes() as usize]);
    }
    Ok(bytes)
}
