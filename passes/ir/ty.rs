//! Types of values: an element type and symbolic sizes.

use super::dim::Dim;
use std::fmt;

/// Element types; the names are those of the text form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// float32.
    F32,
    /// float64.
    F64,
    /// float16.
    F16,
    /// bfloat16.
    BF16,
    /// float8e4m3fn: up to 448, no infinity.
    F8E4M3FN,
    /// float8e5m2: up to 57344.
    F8E5M2,
    /// float8e4m3fnuz: up to 240, no infinity and no negative zero.
    F8E4M3FNUZ,
    /// float8e5m2fnuz: up to 57344, no infinity and no negative zero.
    F8E5M2FNUZ,
    /// int64.
    I64,
    /// int32.
    I32,
    /// int16.
    I16,
    /// int8.
    I8,
    /// uint64.
    U64,
    /// uint32.
    U32,
    /// uint16.
    U16,
    /// uint8.
    U8,
    /// bool, one byte an element.
    Bool,
}

impl DType {
    /// All element types.
    pub const ALL: [DType; 17] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::F8E4M3FN,
        DType::F8E5M2,
        DType::F8E4M3FNUZ,
        DType::F8E5M2FNUZ,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
        DType::Bool,
    ];

    /// Returns the name in the text form: `f32`, `i64`, `bool`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3FN => "f8e4m3fn",
            DType::F8E5M2 => "f8e5m2",
            DType::F8E4M3FNUZ => "f8e4m3fnuz",
            DType::F8E5M2FNUZ => "f8e5m2fnuz",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I16 => "i16",
            DType::I8 => "i8",
            DType::U64 => "u64",
            DType::U32 => "u32",
            DType::U16 => "u16",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// Returns the element type of that name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Returns the ONNX `TensorProto.DataType` of the element type.
    pub fn onnx_code(self) -> i32 {
        match self {
            DType::F32 => 1,
            DType::U8 => 2,
            DType::I8 => 3,
            DType::U16 => 4,
            DType::I16 => 5,
            DType::I32 => 6,
            DType::I64 => 7,
            DType::Bool => 9,
            DType::F16 => 10,
            DType::F64 => 11,
            DType::U32 => 12,
            DType::U64 => 13,
            DType::BF16 => 16,
            DType::F8E4M3FN => 17,
            DType::F8E4M3FNUZ => 18,
            DType::F8E5M2 => 19,
            DType::F8E5M2FNUZ => 20,
        }
    }

    /// Returns the element type of an ONNX `TensorProto.DataType`.
    pub fn from_onnx_code(code: i32) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.onnx_code() == code)
    }

    /// Returns the bytes of one element.
    pub fn size_bytes(self) -> u64 {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F8E4M3FN | DType::F8E5M2 | DType::F8E4M3FNUZ | DType::F8E5M2FNUZ => 1,
        }
    }

    /// Floating-point types that ops compute in: all but those of 8 bits.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    /// Floating-point types of 8 bits: numbers of them are stored and converted, nothing else.
    pub fn is_float8(self) -> bool {
        matches!(
            self,
            DType::F8E4M3FN | DType::F8E5M2 | DType::F8E4M3FNUZ | DType::F8E5M2FNUZ
        )
    }

    /// Types of real numbers, through which gradients flow.
    pub fn is_real(self) -> bool {
        self.is_float() || self.is_float8()
    }

    /// Returns the largest relative error of rounding to a floating-point type; 0 for other types.
    pub fn roundoff(self) -> f64 {
        let digits = match self {
            DType::F64 => 53,
            DType::F32 => 24,
            DType::F16 => 11,
            DType::BF16 => 8,
            DType::F8E4M3FN | DType::F8E4M3FNUZ => 4,
            DType::F8E5M2 | DType::F8E5M2FNUZ => 3,
            _ => return 0.0,
        };
        0.5f64.powi(digits)
    }

    /// Returns the least and greatest number of an integer or boolean type, limited to int64; `None` for floats.
    pub fn int_range(self) -> Option<(i64, i64)> {
        Some(match self {
            DType::I64 => (i64::MIN, i64::MAX),
            DType::I32 => (i32::MIN.into(), i32::MAX.into()),
            DType::I16 => (i16::MIN.into(), i16::MAX.into()),
            DType::I8 => (i8::MIN.into(), i8::MAX.into()),
            DType::U64 => (0, i64::MAX),
            DType::U32 => (0, u32::MAX.into()),
            DType::U16 => (0, u16::MAX.into()),
            DType::U8 => (0, u8::MAX.into()),
            DType::Bool => (0, 1),
            _ => return None,
        })
    }

    /// Signed or unsigned integers, not booleans.
    pub fn is_int(self) -> bool {
        !self.is_real() && self != DType::Bool
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An element type and the size of each axis, outermost first. A scalar has no axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ty {
    /// The element type.
    pub dtype: DType,
    /// The sizes.
    pub dims: Vec<Dim>,
}

impl Ty {
    /// Returns a type.
    pub fn new(dtype: DType, dims: impl Into<Vec<Dim>>) -> Ty {
        Ty {
            dtype,
            dims: dims.into(),
        }
    }

    /// Returns the type of a tensor without axes.
    pub fn scalar(dtype: DType) -> Ty {
        Ty::new(dtype, [])
    }

    /// Returns the number of axes.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Elements, symbolically.
    pub fn elements(&self) -> Dim {
        Dim::product(&self.dims)
    }

    /// All sizes as numbers, if they are numbers.
    pub fn static_dims(&self) -> Option<Vec<i64>> {
        self.dims.iter().map(Dim::as_const).collect()
    }

    /// Returns the type with other sizes.
    pub fn with_dims(&self, dims: impl Into<Vec<Dim>>) -> Ty {
        Ty::new(self.dtype, dims)
    }

    /// Returns the type with another element type.
    pub fn with_dtype(&self, dtype: DType) -> Ty {
        Ty::new(dtype, self.dims.clone())
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, dim) in self.dims.iter().enumerate() {
            write!(f, "{}{dim}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}
