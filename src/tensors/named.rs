//! Tensors by name, as files hold them.

use ckpt_passes::ir::Tensor;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// Returns the bytes of a tensor.
///
/// # Errors
/// A tensor whose file is absent.
pub(super) fn content<'a>(name: &str, tensor: &'a Tensor) -> Result<&'a [u8]> {
    tensor.bytes().map(AsRef::as_ref).ok_or_else(|| {
        Error::environment("weights", format!("the file that holds `{name}` is absent"))
    })
}
