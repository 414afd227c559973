//! The safetensors format, which supports bfloat16 and floats of 8 bits.

use super::named::{Tensors, content};
use ::safetensors::tensor::{Metadata, TensorInfo};
use ::safetensors::{Dtype, SafeTensors};
use bytes::Bytes;
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::{Error, Result};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

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
        DType::F8E4M3FN => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::F8E4M3FNUZ => Dtype::F8_E4M3FNUZ,
        DType::F8E5M2FNUZ => Dtype::F8_E5M2FNUZ,
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

/// Reads all tensors. Their contents stay where they are.
///
/// # Errors
/// A damaged file, or an element type we do not have.
pub fn read(bytes: &Bytes) -> Result<Tensors> {
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
            Tensor::new(dtype, dims, bytes.slice_ref(view.data())),
        );
    }
    Ok(tensors)
}

/// Alignment of the contents in a written file. libtorch takes mapped bytes that are aligned so without a copy.
const ALIGNMENT_BYTES: usize = 64;

/// A tensor to write, without its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name in the file.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its sizes.
    pub dims: Vec<u64>,
}

impl Entry {
    /// Returns the bytes of its contents.
    pub fn bytes(&self) -> usize {
        self.dims.iter().product::<u64>() as usize * self.dtype.size_bytes() as usize
    }
}

/// Brings entries into the order in which a file holds their contents.
pub fn sort(entries: &mut [Entry]) {
    // Contents follow each other without gaps, so those that end at a multiple of the alignment come first.
    let is_odd = |entry: &Entry| !entry.bytes().is_multiple_of(ALIGNMENT_BYTES);
    entries.sort_by(|a, b| {
        let key = |e: &Entry| (is_odd(e), Reverse(e.dtype.size_bytes()));
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
}

/// Writes a file to `out`. `content` writes the contents of one entry, and is called once for each.
///
/// # Errors
/// A name that is given twice; errors of `out` and `content`.
pub fn stream(
    out: &mut dyn Write,
    meta: Meta,
    mut entries: Vec<Entry>,
    content: &mut dyn FnMut(&Entry, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    sort(&mut entries);
    let mut infos = Vec::with_capacity(entries.len());
    let mut end = 0;
    for entry in &entries {
        let (from, dims) = (end, entry.dims.iter());
        end += entry.bytes();
        let info = TensorInfo {
            dtype: theirs(entry.dtype),
            shape: dims.map(|d| *d as usize).collect(),
            data_offsets: (from, end),
        };
        infos.push((entry.name.clone(), info));
    }
    let names: BTreeSet<&str> = entries.iter().map(|e| e.name.as_str()).collect();
    if names.len() < entries.len() {
        return Err(io::Error::other("two tensors have the same name"));
    }
    let meta = (!meta.is_empty()).then(|| meta.into_iter().collect());
    let header = Metadata::new(meta, infos).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&header)?;
    let length = size_of::<u64>();
    header.resize(
        (header.len() + length).next_multiple_of(ALIGNMENT_BYTES) - length,
        b' ',
    );
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    entries.iter().try_for_each(|entry| content(entry, out))
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
/// See [`write()`].
pub fn write_with(tensors: &Tensors, meta: Meta) -> Result<Vec<u8>> {
    let mut entries = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        content(name, tensor)?;
        entries.push(Entry {
            name: name.clone(),
            dtype: tensor.dtype,
            dims: tensor.dims.clone(),
        });
    }
    let mut file = Vec::new();
    let written = stream(&mut file, meta, entries, &mut |entry, out| {
        let bytes = tensors.get(&entry.name).and_then(Tensor::bytes);
        bytes.map_or(Ok(()), |bytes| out.write_all(bytes))
    });
    written.map_err(|e| Error::bug("safetensors", e.to_string()))?;
    Ok(file)
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
        let bytes = Bytes::from(write_with(&tensors, meta.clone()).unwrap());
        assert_eq!(metadata(&bytes), meta);
        assert!(metadata(&bytes[..9]).is_empty());
        assert_eq!(read(&bytes).unwrap(), tensors);
        for end in [0, 7, 40, bytes.len() - 1] {
            assert_eq!(read(&bytes.slice(..end)).unwrap_err().exit_code(), 2);
        }
    }

    #[test]
    fn large_contents_are_aligned() {
        let tensor = |n: u64| Tensor::new(DType::F32, [n], vec![1u8; 4 * n as usize]);
        let sizes = [("a", 1), ("b", 64), ("c", 16), ("d", 3)];
        let tensors: Tensors = sizes
            .iter()
            .map(|(name, n)| (name.to_string(), tensor(*n)))
            .collect();
        let bytes = Bytes::from(write(&tensors).unwrap());
        let read = read(&bytes).unwrap();
        assert_eq!(read, tensors);
        for name in ["b", "c"] {
            let at = read[name].bytes().unwrap().as_ptr() as usize - bytes.as_ptr() as usize;
            assert!(at.is_multiple_of(ALIGNMENT_BYTES), "{name} is at {at}");
        }
    }
}
