//! NumPy's `.npz`: a zip archive of `.npy` arrays.

use super::named::{Tensors, content};
use super::npy;
use bytes::Bytes;
use ckpt_passes::{Error, Result};
use std::io::{Cursor, Read, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// The largest compression ratio of deflate. Limits what is allocated for an array to what its archive can hold.
const MAX_RATIO: u64 = 1100;

fn bad(e: impl std::fmt::Display) -> Box<Error> {
    Error::usage("npz", format!("the archive is damaged: {e}"))
}

/// Reads all arrays of an archive.
///
/// # Errors
/// A damaged archive, or an array that [`npy::read`] refuses.
pub fn read(bytes: &[u8]) -> Result<Tensors> {
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(bad)?;
    let mut tensors = Tensors::new();
    for i in 0..archive.len() {
        let entry = archive.by_index(i).map_err(bad)?;
        let name = array_name(entry.name());
        let mut array = Vec::new();
        entry
            .take(limit(bytes))
            .read_to_end(&mut array)
            .map_err(bad)?;
        let tensor = npy::read(&array).map_err(|e| e.at(format!("array `{name}`")))?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// Returns all arrays of an archive. Those that are not compressed are slices of the mapped bytes, and their checksums are
/// not computed; others are given to `unpack`.
///
/// # Errors
/// A damaged archive, an array that [`npy::view`] refuses, or what `unpack` refuses.
pub fn view(bytes: &Bytes, unpack: impl Fn(&mut dyn Read) -> Result<Bytes>) -> Result<Tensors> {
    let mut archive = ZipArchive::new(Cursor::new(bytes)).map_err(bad)?;
    let mut tensors = Tensors::new();
    for i in 0..archive.len() {
        let entry = archive.by_index(i).map_err(bad)?;
        let name = array_name(entry.name());
        let begin = entry.data_start().and_then(|at| usize::try_from(at).ok());
        let span = begin.and_then(|b| Some(b..b.checked_add(usize::try_from(entry.size()).ok()?)?));
        let array = match span.filter(|_| entry.compression() == CompressionMethod::Stored) {
            Some(span) if span.end <= bytes.len() => bytes.slice(span),
            Some(_) => return Err(bad(format!("array `{name}` is cut off"))),
            None => unpack(&mut entry.take(limit(bytes)))?,
        };
        let tensor = npy::view(&array).map_err(|e| e.at(format!("array `{name}`")))?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// Returns the name of an array by that of its file in the archive.
fn array_name(file: &str) -> String {
    file.strip_suffix(".npy").unwrap_or(file).to_string()
}

/// Returns more bytes than an array of the archive can have.
fn limit(archive: &[u8]) -> u64 {
    (archive.len() as u64).saturating_mul(MAX_RATIO)
}

/// Writes an archive of uncompressed arrays.
///
/// # Errors
/// An element type NumPy does not have.
pub fn write(tensors: &Tensors) -> Result<Vec<u8>> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    let failed = |e: &dyn std::fmt::Display| {
        Error::environment("npz", format!("cannot write the archive: {e}"))
    };
    for (name, tensor) in tensors {
        let header = npy::header(name, tensor)?;
        let bytes = content(name, tensor)?;
        let large = bytes.len() as u64 >= u32::MAX as u64 - (1 << 20);
        // A fixed date, so that equal tensors give equal files.
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .last_modified_time(zip::DateTime::default())
            .large_file(large);
        archive
            .start_file(format!("{name}.npy"), options)
            .map_err(|e| failed(&e))?;
        archive
            .write_all(&header)
            .and_then(|()| archive.write_all(bytes))
            .map_err(|e| failed(&e))?;
    }
    Ok(archive.finish().map_err(|e| failed(&e))?.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::ir::{DType, Tensor};

    #[test]
    fn an_archive_comes_back_and_is_the_same_every_time() {
        let mut tensors = Tensors::new();
        tensors.insert(
            "in.x/y:0".into(),
            Tensor::new(DType::F16, [2, 2], vec![1, 2, 3, 4, 5, 6, 7, 8]),
        );
        tensors.insert("flag".into(), Tensor::new(DType::Bool, [], vec![1]));
        let bytes = write(&tensors).unwrap();
        assert_eq!(read(&bytes).unwrap(), tensors);
        assert_eq!(write(&tensors).unwrap(), bytes);
        assert!(read(&bytes[..bytes.len() / 2]).is_err());
    }
}
