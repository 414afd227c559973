//! NumPy's `.npy`: a short text header (type, order, shape), then the elements.
//!
//! Source: NumPy Enhancement Proposal 1, versions 1.0 to 3.0.

use bytes::Bytes;
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::{Error, Result};

const MAGIC: &[u8] = b"\x93NUMPY";
/// Alignment of the content.
const ALIGN_BYTES: usize = 64;

fn bad(what: impl Into<String>) -> Box<Error> {
    Error::usage("npy", what)
}

/// Reads one array.
///
/// # Errors
/// As [`view`].
pub fn read(bytes: &[u8]) -> Result<Tensor> {
    let (dtype, dims, content, fortran) = parse(bytes)?;
    let content = match fortran {
        true => row_major(content, dtype, &dims),
        false => content.to_vec(),
    };
    Ok(Tensor::new(dtype, dims, content))
}

/// Returns one array as a slice of mapped bytes. A column-major one is copied.
///
/// # Errors
/// A damaged header, an element type we do not have, big-endian content, a length that the shape does not explain.
pub fn view(bytes: &Bytes) -> Result<Tensor> {
    let (dtype, dims, content, fortran) = parse(bytes)?;
    let content = match fortran {
        true => row_major(content, dtype, &dims).into(),
        false => bytes.slice_ref(content),
    };
    Ok(Tensor::new(dtype, dims, content))
}

/// Returns element type, shape and content of an array, and whether it is column-major.
fn parse(bytes: &[u8]) -> Result<(DType, Vec<u64>, &[u8], bool)> {
    let rest = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| bad("this is not an npy array"))?;
    let (size_bytes, rest) = match rest {
        [1, _, a, b, rest @ ..] => (u16::from_le_bytes([*a, *b]) as usize, rest),
        [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
        _ => return Err(bad("an npy array of an unknown version")),
    };
    if rest.len() < size_bytes {
        return Err(bad("the array ends within its header"));
    }
    let (header, content) = rest.split_at(size_bytes);
    let header = std::str::from_utf8(header).map_err(|_| bad("the header is not text"))?;
    let (dtype, fortran, dims) = fields(header)?;
    let elements = dims.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    let wanted = elements.and_then(|n| n.checked_mul(dtype.size_bytes()));
    if wanted != Some(content.len() as u64) {
        return Err(bad("the content has the wrong length")
            .expected(format!("{dtype}{dims:?}"))
            .found(format!("{} bytes", content.len())));
    }
    if dtype == DType::Bool && content.iter().any(|b| *b > 1) {
        return Err(bad("a boolean that is neither 0 nor 1"));
    }
    let is_turned = fortran && dims.len() > 1;
    Ok((dtype, dims, content, is_turned))
}

/// Parses the dictionary of the header: `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`.
fn fields(header: &str) -> Result<(DType, bool, Vec<u64>)> {
    let after = |key: &str| {
        let at = header
            .find(&format!("'{key}'"))
            .ok_or_else(|| bad(format!("the header has no {key}")))?;
        let rest = &header[at + key.len() + 2..];
        Ok::<&str, Box<Error>>(
            rest.trim_start()
                .strip_prefix(':')
                .unwrap_or(rest)
                .trim_start(),
        )
    };
    let descr = after("descr")?;
    let word = descr.strip_prefix('\'').and_then(|d| d.split('\'').next());
    let word = word.ok_or_else(|| bad("arrays of records are not supported"))?;
    let dtype = dtype(word)?;
    let fortran = match after("fortran_order")? {
        t if t.starts_with("True") => true,
        f if f.starts_with("False") => false,
        _ => {
            return Err(bad(
                "the header does not say in which order the elements are",
            ));
        }
    };
    let shape = after("shape")?
        .strip_prefix('(')
        .and_then(|s| s.split_once(')'));
    let (shape, _) = shape.ok_or_else(|| bad("the header has no shape"))?;
    let sizes = shape.split(',').map(str::trim).filter(|s| !s.is_empty());
    let dims = sizes.map(|s| {
        s.trim_end_matches('L')
            .parse()
            .map_err(|_| bad(format!("`{s}` is not a size")))
    });
    Ok((dtype, fortran, dims.collect::<Result<_>>()?))
}

fn dtype(word: &str) -> Result<DType> {
    if word.starts_with('>') {
        return Err(bad(format!("`{word}` is big-endian"))
            .help("save it as little-endian: array.astype('<f4')"));
    }
    let all = DType::ALL.into_iter().filter(|d| is_numpys(*d));
    let mut named = all.filter(|d| code(*d)[1..] == *word.trim_start_matches(['<', '|', '=']));
    named.next().ok_or_else(|| {
        bad(format!("element type `{word}` is not supported"))
            .help("bfloat16 and 8-bit floats travel as safetensors; other types as one of f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 b1")
    })
}

/// Returns whether NumPy has the element type. It has neither bfloat16 nor floats of 8 bits.
fn is_numpys(dtype: DType) -> bool {
    dtype != DType::BF16 && !dtype.is_float8()
}

/// Returns NumPy's name of an element type, where it has one.
fn code(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "<f4",
        DType::F64 => "<f8",
        DType::F16 => "<f2",
        DType::BF16 => "<V2",
        DType::I64 => "<i8",
        DType::I32 => "<i4",
        DType::I16 => "<i2",
        DType::I8 => "|i1",
        DType::U64 => "<u8",
        DType::U32 => "<u4",
        DType::U16 => "<u2",
        DType::U8 => "|u1",
        DType::Bool => "|b1",
        _ => "|V1",
    }
}

/// Converts column-major content to row-major.
fn row_major(content: &[u8], dtype: DType, dims: &[u64]) -> Vec<u8> {
    let size = dtype.size_bytes() as usize;
    let mut out = Vec::with_capacity(content.len());
    let mut index = vec![0u64; dims.len()];
    for _ in 0..content.len() / size {
        let (mut at, mut stride) = (0, 1);
        for (i, d) in index.iter().zip(dims) {
            at += i * stride;
            stride *= d;
        }
        let at = at as usize * size;
        out.extend_from_slice(&content[at..at + size]);
        for axis in (0..dims.len()).rev() {
            index[axis] += 1;
            if index[axis] < dims[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    out
}

/// Writes the header of an array; the raw content follows it in the file.
///
/// # Errors
/// A type that NumPy does not have.
pub fn header(name: &str, tensor: &Tensor) -> Result<Vec<u8>> {
    if !is_numpys(tensor.dtype) {
        return Err(bad(format!(
            "`{name}` is of type {}, which npz does not have",
            tensor.dtype
        ))
        .help("write to a name that ends in .safetensors"));
    }
    let sizes: Vec<String> = tensor.dims.iter().map(|d| format!("{d},")).collect();
    let mut text = format!(
        "{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}",
        code(tensor.dtype),
        sizes.join(" ")
    );
    let before = MAGIC.len() + 6;
    let padding = (before + text.len() + 1).next_multiple_of(ALIGN_BYTES) - before - text.len() - 1;
    text.push_str(&" ".repeat(padding));
    text.push('\n');
    let mut out = MAGIC.to_vec();
    out.extend([2, 0]);
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_and_rank_comes_back() {
        for dtype in DType::ALL.into_iter().filter(|d| is_numpys(*d)) {
            for dims in [vec![], vec![0], vec![3], vec![2, 3], vec![2, 0, 4]] {
                let n = dims.iter().product::<u64>() * dtype.size_bytes();
                let content: Vec<u8> = (0..n)
                    .map(|i| if dtype == DType::Bool { i % 2 } else { i } as u8)
                    .collect();
                let tensor = Tensor::new(dtype, dims, content.clone());
                let mut bytes = header("x", &tensor).unwrap();
                assert_eq!(bytes.len() % ALIGN_BYTES, 0);
                bytes.extend(content);
                assert_eq!(read(&bytes).unwrap(), tensor);
            }
        }
    }

    #[test]
    fn column_major_content_is_turned() {
        let text = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3), }\n";
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.extend([1, 4, 2, 5, 3, 6]);
        assert_eq!(
            read(&bytes).unwrap().bytes().unwrap().as_ref(),
            [1, 2, 3, 4, 5, 6]
        );
    }

    #[test]
    fn damaged_arrays_are_refused() {
        let tensor = Tensor::new(DType::F32, [2], vec![0; 8]);
        let mut good = header("x", &tensor).unwrap();
        good.extend([0; 8]);
        assert!(read(&good).is_ok());
        for end in [0, 5, 9, 20, good.len() - 1] {
            assert_eq!(read(&good[..end]).unwrap_err().exit_code(), 2);
        }
        let swap = |from: &str, to: &str| {
            let text = String::from_utf8_lossy(&good[12..]).replace(from, to);
            let mut bytes = good[..12].to_vec();
            bytes.extend(text.as_bytes());
            read(&bytes)
        };
        assert!(swap("<f4", ">f4").is_err() && swap("<f4", "|O8").is_err());
        assert!(swap("(2,)", "(9,)").is_err() && swap("(2,)", "(-2)").is_err());
        assert!(header("x", &Tensor::new(DType::BF16, [], vec![0; 2])).is_err());
        assert!(header("x", &Tensor::new(DType::F8E4M3FN, [], vec![0])).is_err());
    }
}
