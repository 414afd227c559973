//! The safetensors format, which supports bfloat16.

use super::named::{Tensors, content};
use ::safetensors::tensor::TensorView;
use ::safetensors::{Dtype, SafeTensors};
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// Words about a file, by key.
pub type Meta = BTreeMap<String, String>;

fn ours(dtype: Dtype) -> Option<DType> {
    DType::ALL.into_iter().find(|d| theirs(*d) == dtype)
}

fn theirs(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}

/// Reads all tensors.
///
/// # Errors
/// A damaged file, or an element type we do not have.
pub fn read(bytes: &[u8]) -> Result<Tensors> {
    let bad = |e: ::safetensors::SafeTensorError| {
        Error::usage("safetensors", format!("the file is damaged: {e}"))
    };
    let file = SafeTensors::deserialize(bytes).map_err(bad)?;
    let mut tensors = Tensors::new();
    for (name, view) in file.iter() {
        let dtype = ours(view.dtype()).ok_or_else(|| {
            Error::usage(
                "safetensors",
                format!("`{name}` has element type {:?}", view.dtype()),
            )
            .expected("an element type that ONNX models compute with")
        })?;
        if dtype == DType::Bool && view.data().iter().any(|b| *b > 1) {
            return Err(Error::usage(
                "safetensors",
                format!("`{name}` holds a boolean that is neither 0 nor 1"),
            ));
        }
        let dims: Vec<u64> = view.shape().iter().map(|d| *d as u64).collect();
        tensors.insert(
            name.to_string(),
            Tensor::new(dtype, dims, view.data().to_vec()),
        );
    }
    Ok(tensors)
}

/// Returns the metadata of a file; none of one that is damaged or of another format.
pub fn metadata(bytes: &[u8]) -> Meta {
    let read = SafeTensors::read_metadata(bytes).ok();
    let meta = read.and_then(|(_, meta)| meta.metadata().clone());
    meta.into_iter().flatten().collect()
}

/// Writes all tensors as one file.
///
/// # Errors
/// A tensor whose content is missing.
pub fn write(tensors: &Tensors) -> Result<Vec<u8>> {
    write_with(tensors, Meta::new())
}

/// Writes all tensors as one file, with metadata.
///
/// # Errors
/// See [`write`].
pub fn write_with(tensors: &Tensors, meta: Meta) -> Result<Vec<u8>> {
    let failed = |e: ::safetensors::SafeTensorError| Error::bug("safetensors", e.to_string());
    let mut views = Vec::new();
    for (name, tensor) in tensors {
        let dims = tensor.dims.iter().map(|d| *d as usize).collect();
        let view =
            TensorView::new(theirs(tensor.dtype), dims, content(name, tensor)?).map_err(failed)?;
        views.push((name.as_str(), view));
    }
    let meta = (!meta.is_empty()).then(|| meta.into_iter().collect());
    ::safetensors::serialize(views, meta).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_comes_back() {
        let mut tensors = Tensors::new();
        for dtype in DType::ALL {
            let content = (0..2 * dtype.size_bytes())
                .map(|i| (i % 2) as u8)
                .collect::<Vec<u8>>();
            tensors.insert(dtype.to_string(), Tensor::new(dtype, [2, 1], content));
        }
        let meta = Meta::from([("format".to_string(), "pt".to_string())]);
        let bytes = write_with(&tensors, meta.clone()).unwrap();
        assert_eq!(metadata(&bytes), meta);
        assert!(metadata(&bytes[..9]).is_empty());
        assert_eq!(read(&bytes).unwrap(), tensors);
        for end in [0, 7, 40, bytes.len() - 1] {
            assert_eq!(read(&bytes[..end]).unwrap_err().exit_code(), 2);
        }
    }
}
