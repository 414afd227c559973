//! Types that the file gives: those of graph inputs must be valid, those of results are only used where they are.

use crate::onnx::proto::{TypeProto, ValueInfoProto, tensor_shape_proto::dimension, type_proto};
use ckpt_passes::ir::{DType, Dim, Ty};
use ckpt_passes::text::parse_dim_param;
use ckpt_passes::{Error, Result};

/// Returns the type of a graph input; `None` if the file gives no shape, because the user may give it. A size without a name
/// is named after the input and the axis.
///
/// # Errors
/// An input that is no tensor, an element type that is not supported, a negative size.
pub fn input_type(input: &ValueInfoProto, ty: &TypeProto) -> Result<Option<Ty>> {
    let wrong =
        |what: String| Error::model("type", format!("graph input `{}`: {what}", input.name()));
    let Some(type_proto::Value::TensorType(tensor)) = &ty.value else {
        return Err(wrong("not a tensor".into()));
    };
    let code = tensor.elem_type();
    let dtype = DType::from_onnx_code(code)
        .ok_or_else(|| wrong(format!("element type {code} is not supported")))?;
    let Some(shape) = &tensor.shape else {
        return Ok(None);
    };
    let mut dims = Vec::new();
    for (axis, dim) in shape.dim.iter().enumerate() {
        dims.push(match &dim.value {
            Some(dimension::Value::DimValue(n)) if *n < 0 => {
                return Err(wrong(format!("axis {axis} has size {n}")));
            }
            Some(dimension::Value::DimValue(n)) => Dim::from(*n),
            Some(dimension::Value::DimParam(name)) if !name.is_empty() => parse_dim_param(name),
            _ => Dim::symbol(&format!("{}.{axis}", input.name())),
        });
    }
    Ok(Some(Ty::new(dtype, dims)))
}

/// Returns the type of a result; `None` if any part of it is missing or not valid.
pub fn lenient_type(ty: &TypeProto) -> Option<Ty> {
    let Some(type_proto::Value::TensorType(tensor)) = &ty.value else {
        return None;
    };
    let dtype = DType::from_onnx_code(tensor.elem_type())?;
    let dims = tensor.shape.as_ref()?.dim.iter().map(|d| match &d.value {
        Some(dimension::Value::DimValue(n)) if *n >= 0 => Some(Dim::from(*n)),
        Some(dimension::Value::DimParam(name)) if !name.is_empty() => Some(parse_dim_param(name)),
        _ => None,
    });
    Some(Ty::new(dtype, dims.collect::<Option<Vec<_>>>()?))
}
