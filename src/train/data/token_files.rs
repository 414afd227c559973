//! Files of tokens: raw ones, as nanoGPT writes them, Megatron's with an index, and NumPy vectors. They stay mapped.

use super::request::TokenType;
use super::spill::Spill;
use super::tokens::Stream;
use crate::frontend::file::map;
use crate::tensors::npy;
use bytes::Bytes;
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::{Error, Result};
use std::path::Path;

/// The first bytes of an index of Megatron, with its version.
const MAGIC: &[u8] = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0";

/// Maps a `.bin`, with the documents of an `.idx` beside it.
///
/// # Errors
/// A length that is no number of tokens; a damaged index.
pub(super) fn raw(path: &Path, token_type: TokenType) -> Result<Stream> {
    let content = map(path)?;
    let index = path.with_extension("idx");
    if index.is_file() {
        return indexed(path, content, &index);
    }
    let dtype = match token_type {
        TokenType::U16 => DType::U16,
        TokenType::U32 => DType::U32,
    };
    Ok(Stream {
        name: path.display().to_string(),
        tokens: vector(path, dtype, content)?,
        has_masks: false,
        documents: None,
    })
}

/// Maps a vector of integers.
///
/// # Errors
/// A damaged file, another shape or element type.
pub(super) fn numpy(path: &Path) -> Result<Stream> {
    let name = path.display().to_string();
    let tokens = npy::view(&map(path)?).map_err(|e| e.at(name.clone()))?;
    if tokens.dims.len() != 1 || !tokens.dtype.is_int() {
        return Err(Error::usage("data", "this array holds no tokens")
            .at(name)
            .expected("a vector of integers")
            .found(tokens.ty().to_string())
            .help("save tensors as .npz, by the names of the graph's inputs"));
    }
    Ok(Stream {
        name,
        tokens,
        has_masks: false,
        documents: None,
    })
}

fn vector(path: &Path, dtype: DType, content: Bytes) -> Result<Tensor> {
    let (bytes, size) = (content.len() as u64, dtype.size_bytes());
    if !bytes.is_multiple_of(size) {
        return Err(Error::usage("data", "the file ends within a token")
            .at(path.display().to_string())
            .expected(format!(
                "a multiple of {size} bytes, for tokens of type {dtype}"
            ))
            .found(format!("{bytes} bytes")));
    }
    Ok(Tensor::new(dtype, [bytes / size], content))
}

/// Reads an index: counts of sequences and documents, then lengths (int32) and offsets (int64) of sequences, and the first
/// sequence of each document (int64), with their number at the end.
fn indexed(path: &Path, content: Bytes, index: &Path) -> Result<Stream> {
    let bad = |what: &str| {
        Error::usage("data", format!("the index is damaged: {what}"))
            .at(index.display().to_string())
    };
    let bytes = map(index)?;
    let rest = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| bad("it is not an index of Megatron, version 1"))?;
    let (code, rest) = rest
        .split_first()
        .ok_or_else(|| bad("it ends within its header"))?;
    let dtype = match code {
        1 => DType::U8,
        2 => DType::I8,
        3 => DType::I16,
        4 => DType::I32,
        5 => DType::I64,
        8 => DType::U16,
        _ => return Err(bad("its tokens are no integers")),
    };
    let number = |at: u64| {
        let at = usize::try_from(at).ok()?;
        let bytes = rest.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    let (sequences, documents) = number(0)
        .zip(number(8))
        .ok_or_else(|| bad("it ends within its header"))?;
    let offsets = sequences.checked_mul(4).and_then(|n| n.checked_add(16));
    let firsts = offsets.and_then(|n| n.checked_add(sequences.checked_mul(8)?));
    let end = firsts.and_then(|n| n.checked_add(documents.checked_mul(8)?));
    let (Some(offsets), Some(firsts), true) = (offsets, firsts, end == Some(rest.len() as u64))
    else {
        return Err(bad("its length does not fit its counts"));
    };
    let tokens = vector(path, dtype, content)?;
    let mut begin = 0;
    for sequence in 0..sequences {
        let at = 16 + sequence as usize * 4;
        let length = rest[at..at + 4].try_into().map(i32::from_le_bytes);
        let length = length.ok().and_then(|n| u64::try_from(n).ok());
        let place = number(offsets + 8 * sequence);
        if place != Some(begin * dtype.size_bytes()) {
            return Err(bad(&format!(
                "sequence {sequence} does not follow the one before"
            )));
        }
        let after = length
            .and_then(|n| begin.checked_add(n))
            .filter(|end| *end <= tokens.elements());
        begin =
            after.ok_or_else(|| bad(&format!("sequence {sequence} is longer than the tokens")))?;
    }
    if begin != tokens.elements() {
        return Err(bad("it lists fewer tokens than the file has")
            .expected(format!("{} tokens", tokens.elements()))
            .found(format!("{begin} tokens")));
    }
    let mut starts = Spill::new()?;
    let mut last = 0;
    for document in 0..documents.saturating_sub(1) {
        let first = number(firsts + 8 * document).filter(|s| (last..=sequences).contains(s));
        last = first.ok_or_else(|| bad(&format!("document {document} is out of order")))?;
        let start = match last == sequences {
            true => begin,
            false => number(offsets + 8 * last).unwrap_or(0) / dtype.size_bytes(),
        };
        starts.put_u64(start)?;
    }
    Ok(Stream {
        name: path.display().to_string(),
        tokens,
        has_masks: false,
        documents: Some(starts.finish(DType::I64)?),
    })
}
