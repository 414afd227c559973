//! Constant tensors: weights and small literals.
//!
//! Bytes are little-endian, row-major and shared: a weight is a slice of the mapped model file from reader to writer. A
//! weight whose file is absent is a constant without bytes.

use super::dim::Dim;
use super::float8;
use super::ty::{DType, Ty};
use bytes::Bytes;
use std::sync::Arc;

/// A tensor whose content is part of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The element type.
    pub dtype: DType,
    /// The sizes.
    pub dims: Vec<u64>,
    /// The contents.
    pub data: Data,
}

/// Where the content is.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// In memory or mapped.
    Here {
        /// Its bytes, row-major.
        bytes: Bytes,
        /// The external file that they are mapped from, if any.
        origin: Option<External>,
    },
    /// In an external file that is not there.
    Absent(External),
}

/// A slice of a file in the model's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct External {
    /// Path relative to the model's folder.
    pub location: Arc<str>,
    /// Bytes before the contents in the file.
    pub offset: u64,
    /// Bytes of the contents.
    pub length: u64,
}

impl Tensor {
    /// A tensor from bytes in memory; `bytes` must be `elements × size`.
    pub fn new(dtype: DType, dims: impl Into<Vec<u64>>, bytes: impl Into<Bytes>) -> Tensor {
        let tensor = Tensor {
            dtype,
            dims: dims.into(),
            data: Data::Here {
                bytes: bytes.into(),
                origin: None,
            },
        };
        debug_assert_eq!(
            Some(tensor.size_bytes()),
            tensor.bytes().map(|b| b.len() as u64)
        );
        tensor
    }

    /// A vector of int64.
    pub fn ints(values: &[i64]) -> Tensor {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor::new(DType::I64, [values.len() as u64], bytes)
    }

    /// An int64 scalar.
    pub fn int(value: i64) -> Tensor {
        Tensor::new(DType::I64, [], value.to_le_bytes().to_vec())
    }

    /// A scalar of an integer or boolean type, without the rounding of [`Tensor::scalar`]; what does not fit wraps.
    pub fn scalar_int(dtype: DType, value: i64) -> Tensor {
        match dtype {
            DType::I64 => Tensor::int(value),
            DType::U64 => Tensor::new(dtype, [], (value as u64).to_le_bytes().to_vec()),
            _ => Tensor::scalar(dtype, value as f64),
        }
    }

    /// A scalar of any type, rounded to nearest; integers and 8-bit floats saturate, a boolean is `value != 0`.
    pub fn scalar(dtype: DType, value: f64) -> Tensor {
        let bytes = match dtype {
            DType::F32 => (value as f32).to_le_bytes().to_vec(),
            DType::F64 => value.to_le_bytes().to_vec(),
            DType::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
            DType::BF16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
            DType::I64 => (value as i64).to_le_bytes().to_vec(),
            DType::I32 => (value as i32).to_le_bytes().to_vec(),
            DType::I16 => (value as i16).to_le_bytes().to_vec(),
            DType::I8 => (value as i8).to_le_bytes().to_vec(),
            DType::U64 => (value as u64).to_le_bytes().to_vec(),
            DType::U32 => (value as u32).to_le_bytes().to_vec(),
            DType::U16 => (value as u16).to_le_bytes().to_vec(),
            DType::U8 => vec![value as u8],
            DType::Bool => vec![(value != 0.0) as u8],
            float8 => vec![float8::encoded(float8, value, true)],
        };
        Tensor::new(dtype, [], bytes)
    }

    /// A tensor of a floating-point type from row-major numbers, each rounded to nearest.
    pub fn rounded(dtype: DType, dims: &[u64], numbers: impl Iterator<Item = f64>) -> Tensor {
        let elements: u64 = dims.iter().product();
        let mut bytes = Vec::with_capacity((elements * dtype.size_bytes()) as usize);
        for number in numbers {
            match dtype {
                DType::F32 => bytes.extend((number as f32).to_le_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f64(number).to_le_bytes()),
                DType::BF16 => bytes.extend(half::bf16::from_f64(number).to_le_bytes()),
                _ if dtype.is_float8() => bytes.push(float8::encoded(dtype, number, true)),
                _ => bytes.extend(number.to_le_bytes()),
            }
        }
        Tensor::new(dtype, dims, bytes)
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().fold(1u64, |n, d| n.saturating_mul(*d))
    }

    /// Returns the size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.elements().saturating_mul(self.dtype.size_bytes())
    }

    /// Returns the type.
    pub fn ty(&self) -> Ty {
        Ty::new(
            self.dtype,
            self.dims
                .iter()
                .map(|d| Dim::from(i64::try_from(*d).unwrap_or(i64::MAX)))
                .collect::<Vec<_>>(),
        )
    }

    /// Returns the contents, if they are in memory.
    pub fn bytes(&self) -> Option<&Bytes> {
        match &self.data {
            Data::Here { bytes, .. } => Some(bytes),
            Data::Absent(_) => None,
        }
    }

    /// Element `i` as a number, for any type; `None` if out of range or absent.
    pub fn get_f64(&self, i: usize) -> Option<f64> {
        let size = self.dtype.size_bytes() as usize;
        let b = self.bytes()?.get(i * size..(i + 1) * size)?;
        Some(match self.dtype {
            DType::F32 => f32::from_le_bytes(b.try_into().ok()?) as f64,
            DType::F64 => f64::from_le_bytes(b.try_into().ok()?),
            DType::F16 => half::f16::from_le_bytes(b.try_into().ok()?).to_f64(),
            DType::BF16 => half::bf16::from_le_bytes(b.try_into().ok()?).to_f64(),
            _ if self.dtype.is_float8() => float8::decoded(self.dtype, b[0]),
            _ => self.get_i64(i)? as f64,
        })
    }

    /// Element `i` of an integer or boolean tensor; `None` for floats, out of range, absent, or above `i64::MAX`.
    pub fn get_i64(&self, i: usize) -> Option<i64> {
        let size = self.dtype.size_bytes() as usize;
        let b = self.bytes()?.get(i * size..(i + 1) * size)?;
        Some(match self.dtype {
            DType::I64 => i64::from_le_bytes(b.try_into().ok()?),
            DType::I32 => i32::from_le_bytes(b.try_into().ok()?) as i64,
            DType::I16 => i16::from_le_bytes(b.try_into().ok()?) as i64,
            DType::I8 => b[0] as i8 as i64,
            DType::U64 => i64::try_from(u64::from_le_bytes(b.try_into().ok()?)).ok()?,
            DType::U32 => u32::from_le_bytes(b.try_into().ok()?) as i64,
            DType::U16 => u16::from_le_bytes(b.try_into().ok()?) as i64,
            DType::U8 => b[0] as i64,
            DType::Bool => (b[0] != 0) as i64,
            _ => return None,
        })
    }
}
