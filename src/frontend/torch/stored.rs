//! Tensors as pickles describe them: windows into storages, which are entries of the archive.
//!
//! Several tensors may be windows into one storage. They have the key of the storage in common.

use super::pickle::{Object, Pickle, Ref};
use super::value::{TensorId, Value};
use ckpt_passes::ir::DType;
use ckpt_passes::{Error, Result};

/// The largest rank: PyTorch's own limit for most kernels.
pub const MAX_RANK: usize = 64;

/// The place of a tensor in its storage. Offset and strides count elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Position of the first element, in elements from the start of the storage.
    pub offset: u64,
    /// Length of each axis.
    pub sizes: Vec<u64>,
    /// Elements between neighbors along each axis; as many as `sizes`.
    pub strides: Vec<u64>,
}

impl Window {
    /// Returns the window of the parts of a complex tensor, which have a last axis of size 2.
    ///
    /// # Errors
    /// Numbers that are out of range.
    pub fn of_pairs(&self) -> Result<Window> {
        let strides: Option<Vec<u64>> = self.strides.iter().map(|s| s.checked_mul(2)).collect();
        let (Some(offset), Some(mut strides)) = (self.offset.checked_mul(2), strides) else {
            bail!("data", "a tensor's strides are out of range");
        };
        let mut sizes = self.sizes.clone();
        sizes.push(2);
        strides.push(1);
        Ok(Window {
            offset,
            sizes,
            strides,
        })
    }
}

/// A tensor as its pickle describes it. A complex tensor is described by its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// The name of the storage, unique in its pickle.
    pub key: String,
    /// Element type of the storage; for a complex tensor, that of its real and imaginary parts.
    pub dtype: DType,
    /// Whether it is complex: the last axis of `window` then holds the two parts.
    pub is_complex: bool,
    /// Elements of the whole storage; a complex number counts as two.
    pub storage_elements: u64,
    /// The part of the storage that the tensor covers.
    pub window: Window,
    /// PyTorch's flag of the same name, as stored in the pickle.
    pub requires_grad: bool,
}

impl StoredTensor {
    /// Returns the size of the whole storage.
    pub fn storage_bytes(&self) -> u64 {
        self.storage_elements
            .saturating_mul(self.dtype.size_bytes())
    }

    /// Returns the value that the program sees once the tensor is declared.
    pub fn seen(&self, declared: TensorId) -> Value {
        match self.is_complex {
            true => Value::Complex(declared),
            false => Value::Tensor(declared),
        }
    }
}

/// Returns true for the globals that describe tensors.
pub fn is_tensor_global(module: &str, name: &str) -> bool {
    match module {
        "torch._utils" => matches!(name, "_rebuild_tensor_v2" | "_rebuild_parameter"),
        "collections" => name == "OrderedDict",
        "torch" => storage_dtype(name).is_some() || complex_storage_dtype(name).is_some(),
        _ => false,
    }
}

fn storage_dtype(name: &str) -> Option<DType> {
    Some(match name {
        "FloatStorage" => DType::F32,
        "DoubleStorage" => DType::F64,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::BF16,
        "Float8_e4m3fnStorage" => DType::F8E4M3FN,
        "Float8_e5m2Storage" => DType::F8E5M2,
        "Float8_e4m3fnuzStorage" => DType::F8E4M3FNUZ,
        "Float8_e5m2fnuzStorage" => DType::F8E5M2FNUZ,
        "LongStorage" => DType::I64,
        "IntStorage" => DType::I32,
        "ShortStorage" => DType::I16,
        "CharStorage" => DType::I8,
        "ByteStorage" => DType::U8,
        "BoolStorage" => DType::Bool,
        _ => return None,
    })
}

/// Returns the type of the parts of a complex storage.
fn complex_storage_dtype(name: &str) -> Option<DType> {
    Some(match name {
        "ComplexFloatStorage" => DType::F32,
        "ComplexDoubleStorage" => DType::F64,
        _ => return None,
    })
}

/// Reads the tensor at `at`; returns nothing for any other object.
///
/// # Errors
/// `pickle` for a tensor with a damaged description, or one that reaches out of its storage.
pub fn stored_tensor(pickle: &Pickle, at: Ref) -> Result<Option<StoredTensor>> {
    let Object::Call {
        function,
        arguments,
        ..
    } = pickle.get(at)
    else {
        return Ok(None);
    };
    let arguments = pickle.items(*arguments).unwrap_or(&[]);
    let damaged = || Error::model("pickle", "a tensor's description is damaged");
    match pickle.global(*function) {
        Some(("torch._utils", "_rebuild_tensor_v2")) => rebuild(pickle, arguments).map(Some),
        Some(("torch._utils", "_rebuild_parameter")) => {
            // (data, requires_grad, hooks), where data is a tensor, never another parameter.
            let [data, requires_grad, ..] = *arguments else {
                return Err(damaged());
            };
            let (
                Object::Call {
                    function,
                    arguments,
                    ..
                },
                Object::Bool(requires_grad),
            ) = (pickle.get(data), pickle.get(requires_grad))
            else {
                return Err(damaged());
            };
            if pickle.global(*function) != Some(("torch._utils", "_rebuild_tensor_v2")) {
                return Err(damaged());
            }
            let tensor = rebuild(pickle, pickle.items(*arguments).unwrap_or(&[]))?;
            Ok(Some(StoredTensor {
                requires_grad: *requires_grad,
                ..tensor
            }))
        }
        _ => Ok(None),
    }
}

/// Returns true if the metadata of a tensor has any content.
fn is_marked(pickle: &Pickle, at: Ref, depth: usize) -> bool {
    match pickle.get(at) {
        Object::None => false,
        Object::Dict(items) => {
            let mut values = items.iter().map(|(_, value)| pickle.get(*value));
            values.any(|value| *value != Object::Bool(false))
        }
        // A dictionary with a type: `restore_type_tag(dictionary, type)`.
        Object::Call { arguments, .. } if depth == 0 => match pickle.items(*arguments) {
            Some([first, ..]) => is_marked(pickle, *first, 1),
            _ => true,
        },
        _ => true,
    }
}

/// Reads a tensor from `(storage, offset, sizes, strides, requires_grad, hooks, metadata)`.
fn rebuild(pickle: &Pickle, arguments: &[Ref]) -> Result<StoredTensor> {
    let damaged = |what: &str| Error::model("pickle", format!("a tensor's {what} is damaged"));
    let [
        storage,
        offset,
        sizes,
        strides,
        requires_grad,
        ref more @ ..,
    ] = *arguments
    else {
        return Err(damaged("description"));
    };
    // The metadata behind the hooks says whether the storage holds the conjugate or the negative of the tensor.
    if more.get(1).is_some_and(|at| is_marked(pickle, *at, 0)) {
        return Err(
            Error::model("pickle", "a tensor is stored as a conjugate or a negative")
                .help("save what `resolve_conj` and `resolve_neg` of it give"),
        );
    }
    let Object::Persistent(id) = pickle.get(storage) else {
        return Err(damaged("storage"));
    };
    // ('storage', class, key, device, elements)
    let Some([kind, class, key, _device, elements]) = pickle.items(*id) else {
        return Err(damaged("storage"));
    };
    let (Some("storage"), Some(key)) = (pickle.str(*kind), pickle.str(*key)) else {
        return Err(damaged("storage"));
    };
    let (dtype, parts) = match pickle.global(*class) {
        Some(("torch", name)) => (storage_dtype(name), complex_storage_dtype(name)),
        _ => (None, None),
    };
    let natural = |at: Ref| pickle.int(at).and_then(|n| u64::try_from(n).ok());
    let naturals =
        |at: Ref| -> Option<Vec<u64>> { pickle.items(at)?.iter().map(|n| natural(*n)).collect() };
    let mut tensor = StoredTensor {
        key: key.to_string(),
        dtype: dtype.or(parts).ok_or_else(|| damaged("element type"))?,
        is_complex: parts.is_some(),
        storage_elements: natural(*elements).ok_or_else(|| damaged("storage"))?,
        window: Window {
            offset: natural(offset).ok_or_else(|| damaged("offset"))?,
            sizes: naturals(sizes).ok_or_else(|| damaged("shape"))?,
            strides: naturals(strides).ok_or_else(|| damaged("strides"))?,
        },
        requires_grad: *pickle.get(requires_grad) == Object::Bool(true),
    };
    if tensor.window.sizes.len() != tensor.window.strides.len()
        || tensor.window.sizes.len() > MAX_RANK
    {
        return Err(damaged("shape"));
    }
    if tensor.is_complex {
        tensor.storage_elements = tensor.storage_elements.saturating_mul(2);
        tensor.window = tensor.window.of_pairs()?;
    }
    let Window {
        offset,
        sizes,
        strides,
    } = &tensor.window;
    let reach = sizes
        .iter()
        .zip(strides)
        .try_fold(*offset, |reach, (size, stride)| {
            reach.checked_add(size.saturating_sub(1).checked_mul(*stride)?)
        });
    // A size or product that does not fit is refused even if a zero makes the tensor empty.
    let elements = sizes
        .iter()
        .try_fold(1u64, |n, d| n.checked_mul((*d).max(1)));
    let empty = sizes.contains(&0);
    let inside = elements.is_some_and(|n| n <= i64::MAX as u64)
        && reach.is_some_and(|r| empty || r < tensor.storage_elements);
    if !inside {
        return Err(
            Error::model("pickle", "a tensor reaches out of its storage").found(format!(
                "shape {:?}, strides {:?} from element {} of {}",
                sizes, strides, offset, tensor.storage_elements
            )),
        );
    }
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::torch::pickle::load;

    /// `_rebuild_tensor_v2(storage of 6 floats, offset, sizes, strides, True, OrderedDict())`.
    fn tensor(offset: u8, sizes: [u8; 2], strides: [u8; 2]) -> Result<StoredTensor> {
        let mut bytes = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x007X\x03\0\0\0cpuK\x06tQ".to_vec();
        bytes.extend([b'K', offset]);
        for pair in [sizes, strides] {
            bytes.extend([b'K', pair[0], b'K', pair[1], 0x86]);
        }
        bytes.extend(b"\x88ccollections\nOrderedDict\n)RtR.");
        let pickle = load(&bytes, &is_tensor_global)?;
        Ok(stored_tensor(&pickle, pickle.root())?.unwrap())
    }

    #[test]
    fn what_is_stored_as_a_conjugate_is_refused() {
        let of = |marks: &[u8]| {
            let mut bytes = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nComplexFloatStorage\nX\x01\0\0\x007X\x03\0\0\0cpuK\x06tQ".to_vec();
            bytes.extend(b"K\x01K\x02K\x02\x86K\x02K\x01\x86\x88ccollections\nOrderedDict\n)R");
            bytes.extend(marks);
            bytes.extend(b"tR.");
            let pickle = load(&bytes, &is_tensor_global).unwrap();
            stored_tensor(&pickle, pickle.root())
        };
        // Of complex numbers, their parts.
        let plain = of(b"").unwrap().unwrap();
        assert!(plain.is_complex && !plain.window.sizes.is_empty());
        assert_eq!((plain.dtype, plain.storage_elements), (DType::F32, 12));
        assert_eq!(plain.window.offset, 2);
        assert_eq!(plain.window.sizes, [2, 2, 2]);
        assert_eq!(plain.window.strides, [4, 2, 1]);
        assert_eq!(of(b"}").unwrap().unwrap(), plain);
        let marked = of(b"}X\x04\0\0\0conj\x88s").unwrap_err().to_string();
        assert!(marked.contains("resolve_conj"), "{marked}");
    }

    #[test]
    fn windows_into_a_storage() {
        let whole = tensor(0, [2, 3], [3, 1]).unwrap();
        assert!(whole.requires_grad);
        assert_eq!((whole.key.as_str(), whole.storage_bytes()), ("7", 24));
        for (offset, sizes, strides) in [
            (0, [3, 2], [1, 3]),
            (1, [1, 5], [9, 1]),
            (200, [0, 9], [9, 1]),
        ] {
            assert!(tensor(offset, sizes, strides).is_ok());
        }
        for (offset, sizes, strides) in [
            (1, [2, 3], [3, 1]),
            (0, [2, 3], [4, 1]),
            (6, [1, 1], [1, 1]),
            (0, [200, 200], [200, 200]),
        ] {
            let error = tensor(offset, sizes, strides).unwrap_err();
            assert!(error.to_string().contains("out of its storage"), "{error}");
        }
    }
}
