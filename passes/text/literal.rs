//! Contents of constants as text, and back.
//!
//! Numbers print so that they read back to the same bits; a NaN prints its bits.

use super::scan::{Number, Scan};
use crate::error::{Error, Result};
use crate::ir::{DType, Data, External, Tensor, float8};
use half::{bf16, f16};
use std::fmt::{self, Write};
use std::sync::Arc;

/// Largest constants that print their contents. Integers carry shapes, which typing looks into (up to
/// `typing::MAX_KNOWN_ELEMENTS`); a longer list of floats tells a reader nothing.
fn short(dtype: DType) -> u64 {
    if dtype.is_real() { 8 } else { 64 }
}

/// Largest constant that a `splat` may stand for: a line of text must not be able to ask for all memory.
const MAX_SPLAT_BYTES: u64 = 1 << 26;

/// Largest constant that is filled with invented content.
const MAX_FILL_BYTES: u64 = 1 << 32;

/// The `External::location` of a constant of which only the hash is known.
const HASHED: &str = "ckir-hash:";

/// What follows `=` in the text of a constant.
pub(super) struct Content<'a> {
    pub tensor: &'a Tensor,
    pub show: Show,
}

/// How much of a constant is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Show {
    /// Everything, however long.
    Full,
    /// A large one as the hash of its bytes.
    Short,
    /// Where its bytes are: nothing is read. For comparing states of one graph within one run.
    Identity,
}

impl fmt::Display for Content<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = self.tensor;
        let bytes = match &t.data {
            Data::Absent(e) => return absent(f, e),
            Data::Here { bytes, .. } => bytes,
        };
        if self.show == Show::Identity {
            return write!(f, "at {:p} {}", bytes.as_ptr(), bytes.len());
        }
        let size = t.dtype.size_bytes() as usize;
        if bytes.len() as u64 != t.size_bytes() {
            return write!(f, "hash \"{:016x}\"", hash(bytes));
        }
        if t.dims.is_empty() {
            return element(f, t.dtype, bytes);
        }
        let n = t.elements();
        if n > short(t.dtype) {
            let first = &bytes[..size];
            if t.size_bytes() <= MAX_SPLAT_BYTES && bytes.chunks_exact(size).all(|b| b == first) {
                f.write_str("splat ")?;
                return element(f, t.dtype, first);
            }
            if self.show == Show::Short {
                return write!(f, "hash \"{:016x}\"", hash(bytes));
            }
        }
        f.write_char('[')?;
        for (i, b) in bytes.chunks_exact(size).enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            element(f, t.dtype, b)?;
        }
        f.write_char(']')
    }
}

fn absent(f: &mut fmt::Formatter<'_>, e: &External) -> fmt::Result {
    if let Some(digits) = e.location.strip_prefix(HASHED) {
        return write!(f, "hash {}", crate::ir::name::Quoted(digits));
    }
    write!(
        f,
        "file {} offset {} length {}",
        crate::ir::name::Quoted(&e.location),
        e.offset,
        e.length
    )
}

fn element(f: &mut fmt::Formatter<'_>, dtype: DType, b: &[u8]) -> fmt::Result {
    fn le<const N: usize>(b: &[u8]) -> [u8; N] {
        b.try_into().expect("one element")
    }
    match dtype {
        DType::F32 => float32(f, f32::from_le_bytes(le(b))),
        DType::F64 => {
            let v = f64::from_le_bytes(le(b));
            float(f, v, v.is_nan().then_some(v.to_bits()))
        }
        DType::F16 => {
            let v = f16::from_le_bytes(le(b));
            float(f, v.to_f32(), v.is_nan().then_some(v.to_bits()))
        }
        DType::BF16 => {
            let v = bf16::from_le_bytes(le(b));
            float(f, v.to_f32(), v.is_nan().then_some(v.to_bits()))
        }
        _ if dtype.is_float8() => {
            let v = float8::decoded(dtype, b[0]);
            float(f, v, v.is_nan().then_some(b[0]))
        }
        DType::I64 => write!(f, "{}", i64::from_le_bytes(le(b))),
        DType::I32 => write!(f, "{}", i32::from_le_bytes(le(b))),
        DType::I16 => write!(f, "{}", i16::from_le_bytes(le(b))),
        DType::I8 => write!(f, "{}", b[0] as i8),
        DType::U64 => write!(f, "{}", u64::from_le_bytes(le(b))),
        DType::U32 => write!(f, "{}", u32::from_le_bytes(le(b))),
        DType::U16 => write!(f, "{}", u16::from_le_bytes(le(b))),
        DType::U8 => write!(f, "{}", b[0]),
        DType::Bool => match b[0] {
            0 => f.write_str("false"),
            1 => f.write_str("true"),
            other => write!(f, "{other}"),
        },
        _ => Ok(()),
    }
}

/// Writes a float; a NaN as its bits.
fn float(f: &mut impl Write, v: impl fmt::Debug, nan: Option<impl fmt::LowerHex>) -> fmt::Result {
    match nan {
        Some(bits) => write!(f, "nan(0x{bits:x})"),
        None => write!(f, "{v:?}"),
    }
}

/// Writes a float attribute or element, which never looks like an integer.
pub(super) fn float32(f: &mut impl Write, v: f32) -> fmt::Result {
    float(f, v, v.is_nan().then_some(v.to_bits()))
}

/// A float with the bits that were printed.
pub(super) fn to_f32(s: &Scan, n: Number) -> Result<f32> {
    Ok(match n {
        Number::Int(v) => v as f32,
        Number::Float(text) => finite(s, &text, text.parse().ok().filter(|v: &f32| v.is_finite()))?,
        Number::Nan(bits) => f32::from_bits(
            u32::try_from(bits)
                .ok()
                .filter(|b| f32::from_bits(*b).is_nan())
                .ok_or_else(|| s.fail("not the bits of a NaN"))?,
        ),
    })
}

/// What `text` spells: an infinity only where it says so.
fn finite<T: std::str::FromStr>(s: &Scan, text: &str, value: Option<T>) -> Result<T> {
    let infinite = || text.ends_with("inf").then(|| text.parse().ok()).flatten();
    value
        .or_else(infinite)
        .ok_or_else(|| s.fail(format!("{text} is out of range")))
}

/// Returns the bits of a number in a 16-bit float type, given its conversions.
///
/// # Errors
/// Finite numbers that the type does not hold, and NaNs of more than 16 bits.
fn half_bits(s: &Scan, n: Number, narrow: fn(f32) -> u16, widen: fn(u16) -> f32) -> Result<u16> {
    if let Number::Nan(bits) = n {
        let bits = u16::try_from(bits);
        return bits.map_err(|_| s.fail("the bits of a NaN do not fit"));
    }
    let wide = to_f32(s, n)?;
    let bits = narrow(wide);
    if wide.is_finite() && widen(bits).is_infinite() {
        return Err(s.fail(format!("{wide} is out of range")));
    }
    Ok(bits)
}

/// 64 bits that tell contents apart; not cryptographic. Four lanes of eight bytes, because weights are gigabytes.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    const K: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |h: u64, w: u64| (h ^ w).wrapping_mul(K).rotate_left(29);
    let word = |b: &[u8]| {
        let mut w = [0; 8];
        w[..b.len()].copy_from_slice(b);
        u64::from_le_bytes(w)
    };
    let mut lanes = [1, 2, 3, 4u64];
    let mut blocks = bytes.chunks_exact(32);
    for block in &mut blocks {
        for (lane, b) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            *lane = mix(*lane, word(b));
        }
    }
    for (i, b) in blocks.remainder().chunks(8).enumerate() {
        lanes[i] = mix(lanes[i], word(b));
    }
    let all = lanes.into_iter().fold(bytes.len() as u64, mix);
    mix(all ^ (all >> 31), K)
}

/// Reads what [`Content`] prints. `fill` asks for invented content where only a hash is known.
pub(super) fn content(s: &mut Scan, dtype: DType, dims: Vec<u64>, fill: bool) -> Result<Tensor> {
    let total = dims
        .iter()
        .try_fold(1u64, |n, d| n.checked_mul(*d))
        .and_then(|n| Some((n, n.checked_mul(dtype.size_bytes())?)))
        .filter(|(_, bytes)| i64::try_from(*bytes).is_ok());
    let Some((elements, length)) = total else {
        return Err(s.fail("the constant is larger than any memory"));
    };
    let elsewhere = |location: String, offset, length| Tensor {
        dtype,
        dims: dims.clone(),
        data: Data::Absent(External {
            location: Arc::from(location),
            offset,
            length,
        }),
    };
    if s.eat_word("hash") {
        let digits = s.string()?;
        if fill {
            return invent(s, dtype, dims, length, &digits);
        }
        return Ok(elsewhere(format!("{HASHED}{digits}"), 0, length));
    }
    if s.eat_word("file") {
        let location = s.string()?;
        s.expect_word("offset")?;
        let offset = s.uint()?;
        s.expect_word("length")?;
        return Ok(elsewhere(location, offset, s.uint()?));
    }
    let mut bytes = Vec::new();
    if s.eat_word("splat") {
        if length > MAX_SPLAT_BYTES {
            return Err(s
                .fail("a splat this large is not accepted")
                .expected(format!("at most {MAX_SPLAT_BYTES} bytes"))
                .found(format!("{length} bytes")));
        }
        read_element(s, dtype, &mut bytes)?;
        bytes = bytes.repeat(elements as usize);
    } else if dims.is_empty() {
        read_element(s, dtype, &mut bytes)?;
    } else {
        s.expect("[")?;
        if !s.eat("]") {
            loop {
                read_element(s, dtype, &mut bytes)?;
                if s.eat("]") {
                    break;
                }
                s.expect(",")?;
                s.lines();
            }
        }
    }
    if bytes.len() as u64 != length {
        return Err(s
            .fail("wrong number of elements")
            .expected(elements.to_string())
            .found((bytes.len() as u64 / dtype.size_bytes()).to_string()));
    }
    Ok(Tensor::new(dtype, dims, bytes))
}

/// Content made up from a hash: floats uniform in ±0.1 (a float is never far from what training would see), integers 0
/// (always a valid index), booleans true.
fn invent(s: &Scan, dtype: DType, dims: Vec<u64>, length: u64, seed: &str) -> Result<Tensor> {
    if length > MAX_FILL_BYTES {
        return Err(Error::environment(
            "memory",
            format!("refusing to invent {length} bytes for one constant"),
        )
        .at(s.place()));
    }
    let mut state = hash(seed.as_bytes()) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 * 0.2 - 0.1
    };
    let n = (length / dtype.size_bytes()) as usize;
    let mut bytes = Vec::with_capacity(length as usize);
    for _ in 0..n {
        match dtype {
            DType::F32 => bytes.extend((next() as f32).to_le_bytes()),
            DType::F64 => bytes.extend(next().to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f64(next()).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f64(next()).to_le_bytes()),
            DType::Bool => bytes.push(1),
            _ if dtype.is_float8() => bytes.push(float8::encoded(dtype, next(), true)),
            _ => bytes.resize(bytes.len() + dtype.size_bytes() as usize, 0),
        }
    }
    Ok(Tensor::new(dtype, dims, bytes))
}

fn read_element(s: &mut Scan, dtype: DType, to: &mut Vec<u8>) -> Result<()> {
    if dtype == DType::Bool {
        if s.eat_word("true") {
            to.push(1);
            return Ok(());
        }
        if s.eat_word("false") {
            to.push(0);
            return Ok(());
        }
    }
    let n = s.number()?;
    match dtype {
        DType::F32 => to.extend(to_f32(s, n)?.to_le_bytes()),
        DType::F64 => {
            let v = match n {
                Number::Int(v) => v as f64,
                Number::Float(text) => {
                    finite(s, &text, text.parse().ok().filter(|v: &f64| v.is_finite()))?
                }
                Number::Nan(bits) => f64::from_bits(bits),
            };
            to.extend(v.to_le_bytes());
        }
        DType::F16 => {
            let narrow = |v| f16::from_f32(v).to_bits();
            let bits = half_bits(s, n, narrow, |bits| f16::from_bits(bits).to_f32())?;
            to.extend(bits.to_le_bytes());
        }
        DType::BF16 => {
            let narrow = |v| bf16::from_f32(v).to_bits();
            let bits = half_bits(s, n, narrow, |bits| bf16::from_bits(bits).to_f32())?;
            to.extend(bits.to_le_bytes());
        }
        _ if dtype.is_float8() => {
            if let Number::Nan(bits) = n {
                let bits = u8::try_from(bits);
                to.push(bits.map_err(|_| s.fail("the bits of a NaN do not fit"))?);
                return Ok(());
            }
            let wide = f64::from(to_f32(s, n)?);
            let code = float8::encoded(dtype, wide, false);
            if wide.is_finite() && !float8::decoded(dtype, code).is_finite() {
                return Err(s.fail(format!("{wide} is out of range")));
            }
            to.push(code);
        }
        _ => {
            let Number::Int(v) = n else {
                return Err(s.fail(format!("expected a value of type {dtype}")));
            };
            let range = match dtype {
                DType::I64 => i64::MIN as i128..=i64::MAX as i128,
                DType::I32 => i32::MIN as i128..=i32::MAX as i128,
                DType::I16 => i16::MIN as i128..=i16::MAX as i128,
                DType::I8 => i8::MIN as i128..=i8::MAX as i128,
                DType::U64 => 0..=u64::MAX as i128,
                DType::U32 => 0..=u32::MAX as i128,
                DType::U16 => 0..=u16::MAX as i128,
                _ => 0..=u8::MAX as i128,
            };
            if !range.contains(&v) {
                return Err(s.fail(format!("{v} does not fit {dtype}")));
            }
            to.extend(&v.to_le_bytes()[..dtype.size_bytes() as usize]);
        }
    }
    Ok(())
}
