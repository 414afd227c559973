//! Random numbers: functions of a seed, a stream and the place of the element, and of nothing else.
//!
//! A stream is a number of its own for each random node (see [`stream`]); the seed is an input of the graph. So a copy of
//! a node draws the bits of its original, in any order, with any number of threads, on any device and in any runtime,
//! and nothing random is ever saved: the gradient of a dropout is the same dropout of the cotangent.
//!
//! The generator is an integer hash over 32-bit words: two rounds of a mixer with low bias (C. Wellons, "Prospecting for
//! hash functions", 2018) over the index of the element, keyed by 64 bits that four rounds make of seed and stream. The
//! body says the same in int64, whose products of a word and a multiplier below 2³¹ in magnitude never overflow.

use super::axes::int_vector;
use super::bits::{BITWISE_AND, BITWISE_XOR};
use super::fill::RANGE;
use super::index::GATHER;
use super::logic::LESS;
use super::reduce::REDUCE_PROD;
use super::rules::*;
use super::shape::{RESHAPE, SIZE};
use crate::error::Result;
use crate::ir::op::{
    Body, BodyCx, Cost, CostCx, Domain, Effect, Grad, InferCx, OpDef, Slot, fresh, no_fold,
};
use crate::ir::{Attrs, Builder, DType, Ty, ValueId};

pub const ROWS: &[&OpDef] = &[&DROPOUT, &UNIFORM];

/// Draws are whole multiples of 2⁻²⁴: what float32 holds exactly.
pub const BITS: u32 = 24;

/// The graph input that random ops draw by: an int64 scalar.
pub const SEED: &str = "rng_seed";

const WORD: i64 = 0xffff_ffff;
const FIRST: [u32; 2] = [0x9e37_79b9, 0x85eb_ca6b];
const MULTIPLIERS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

/// A bijection of 32-bit words that looks random.
fn mix(mut word: u32) -> u32 {
    word ^= word >> 16;
    word = word.wrapping_mul(MULTIPLIERS[0]);
    word ^= word >> 15;
    word = word.wrapping_mul(MULTIPLIERS[1]);
    word ^ (word >> 16)
}

/// What the draws of one node are made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u32; 2]);

impl Key {
    pub fn new(seed: i64, stream: i64) -> Key {
        let words = [seed, seed >> 32, stream, stream >> 32];
        let fold = |first: u32| words.iter().fold(first, |key, w| mix(key ^ *w as u32));
        Key(FIRST.map(fold))
    }

    /// Both words as one number, to seed another generator with.
    pub fn number(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }

    /// The draw for element `index` (row-major): a whole number below 2²⁴.
    pub fn draw(self, index: u64) -> u32 {
        let inner = mix(index as u32 ^ self.0[0]);
        let outer = inner.wrapping_add((index >> 32) as u32);
        mix(outer ^ self.0[1]) >> (32 - BITS)
    }
}

/// The number of the stream of a node of that name: its FNV-1a hash, without the sign bit.
pub fn stream(name: &str) -> i64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash & i64::MAX as u64) as i64
}

/// The least draw that is not below `ratio`: an element is dropped if its draw is less.
pub fn threshold(ratio: f32) -> u32 {
    let scaled = f64::from(ratio) * f64::from(1u32 << BITS);
    // What is out of range stops at its ends; not a number drops nothing, as a comparison would.
    scaled.ceil() as u32
}

/// `Dropout(data, ratio, seed, stream)`: elements are 0 with probability `ratio`, else divided by `1 - ratio` (ONNX
/// Dropout in training mode). A ratio of 0 changes nothing.
pub static DROPOUT: OpDef = OpDef {
    name: "Dropout",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[
        Slot::req("data"),
        Slot::req("ratio"),
        Slot::req("seed"),
        Slot::req("stream"),
    ],
    outs: &[Slot::req("output")],
    effect: Effect::Seeded,
    infer: |cx| {
        scalar_of(cx, 1, DType::is_float)?;
        seeded(cx, 2)?;
        unary_float(cx)
    },
    fold: no_fold,
    // The same elements are dropped from the cotangent; the ratio is no trained quantity.
    grad: Grad::Rule(|cx| {
        let ins = [cx.dy0(), cx.x(1), cx.x(2), cx.x(3)];
        let dx = emit(cx.b, &DROPOUT, &ins)?;
        cx.give(0, dx);
        Ok(())
    }),
    cost: draws,
    memory: fresh,
    body: Body::Function(|cx| {
        let (x, ratio) = (cx.x(0), cx.x(1));
        let dtype = cx.ty(x).dtype;
        let shape = cx.b.shape(x)?;
        let count = emit(cx.b, &SIZE, &[x])?;
        let draw = uniform(cx, shape, count, 2)?;
        let bound = cx.b.cast(ratio, DType::F32)?;
        let off = emit(cx.b, &LESS, &[draw, bound])?;
        let wide = widen(cx.b, x)?;
        let computed = cx.ty(wide).dtype;
        let (one, zero) = (cx.b.scalar(computed, 1.0), cx.b.scalar(computed, 0.0));
        let rest = cx.b.cast(ratio, computed)?;
        let rest = cx.b.sub(one, rest)?;
        let scale = cx.b.div(one, rest)?;
        let scaled = cx.b.mul(wide, scale)?;
        let kept = choose(cx.b, off, zero, scaled)?;
        Ok(vec![cx.b.cast(kept, dtype)?])
    }),
};

/// `SeededUniform(shape, seed, stream)`: float32 in [0, 1), multiples of 2⁻²⁴.
pub static UNIFORM: OpDef = OpDef {
    name: "SeededUniform",
    domain: Domain::Ckpt,
    imports: &[],
    attrs: &[],
    ins: &[Slot::req("shape"), Slot::req("seed"), Slot::req("stream")],
    outs: &[Slot::req("output")],
    effect: Effect::Seeded,
    infer: |cx| {
        seeded(cx, 1)?;
        let rank = int_vector(cx, 0)?;
        let dims = match (cx.ints(0), rank) {
            (Some(dims), _) => dims.to_vec(),
            (None, Some(rank)) => (0..rank).map(|i| cx.fresh(0, i)).collect(),
            (None, None) => return Err(cx.fail("shape", "the rank of the result is not known")),
        };
        Ok(vec![Ty::new(DType::F32, dims)])
    },
    fold: no_fold,
    grad: Grad::Zero("a draw depends on the seed alone"),
    cost: draws,
    memory: fresh,
    body: Body::Function(|cx| {
        let shape = cx.b.cast(cx.x(0), DType::I64)?;
        let count = if cx.outs[0].rank() == 0 {
            cx.b.int(1)
        } else {
            let count = emit(cx.b, &REDUCE_PROD, &[shape])?;
            to_scalar(cx.b, count)?
        };
        Ok(vec![uniform(cx, shape, count, 1)?])
    }),
};

/// A scalar: rank 0, or a vector of one element as files sometimes have it.
fn scalar_of(cx: &InferCx, slot: usize, allowed: fn(DType) -> bool) -> Result<()> {
    let ty = cx.ty(slot)?;
    let one = ty.rank() == 0 || (ty.rank() == 1 && ty.dims[0].as_const() == Some(1));
    if allowed(ty.dtype) && one {
        return Ok(());
    }
    let name = cx.op.ins[slot].name;
    Err(cx
        .fail(
            "type",
            format!("operand `{name}` is not a scalar of its type"),
        )
        .found(ty.to_string()))
}

/// Operands `slot` and the next are the seed and the stream.
fn seeded(cx: &InferCx, slot: usize) -> Result<()> {
    scalar_of(cx, slot, |d| d == DType::I64)?;
    scalar_of(cx, slot + 1, |d| d == DType::I64)
}

/// About twenty operations a draw. Unmeasured; only ratios matter.
fn draws(cx: &CostCx) -> Cost {
    cx.elementwise(20)
}

/// float32 draws of `shape`, which has `count` elements; seed and stream are operands `slot` and the next.
fn uniform(cx: &mut BodyCx, shape: ValueId, count: ValueId, slot: usize) -> Result<ValueId> {
    let key = key(cx, slot)?;
    let b = &mut *cx.b;
    let (zero, one) = (b.int(0), b.int(1));
    let (mask, word) = (b.int(WORD), b.int(WORD + 1));
    let index = emit(b, &RANGE, &[zero, count, one])?;
    let low = emit(b, &BITWISE_AND, &[index, mask])?;
    let high = b.div(index, word)?;
    let first = emit(b, &GATHER, &[key, zero])?;
    let inner = emit(b, &BITWISE_XOR, &[low, first])?;
    let inner = mixed(b, inner)?;
    let outer = b.add(inner, high)?;
    let outer = emit(b, &BITWISE_AND, &[outer, mask])?;
    let second = emit(b, &GATHER, &[key, one])?;
    let outer = emit(b, &BITWISE_XOR, &[outer, second])?;
    let outer = mixed(b, outer)?;
    let unit = b.int(1 << (32 - BITS));
    let draw = b.div(outer, unit)?;
    let draw = b.cast(draw, DType::F32)?;
    let step = b.scalar(DType::F32, 1.0 / f64::from(1u32 << BITS));
    let draw = b.mul(draw, step)?;
    b.emit(&RESHAPE, &[draw, shape], Attrs::new().with("allowzero", 1))
}

fn to_scalar(b: &mut Builder, v: ValueId) -> Result<ValueId> {
    let shape = b.ints(&[]);
    emit(b, &RESHAPE, &[v, shape])
}

/// [`Key::new`] of two operands: int64 [2].
fn key(cx: &mut BodyCx, slot: usize) -> Result<ValueId> {
    let (seed, stream) = (cx.x(slot), cx.x(slot + 1));
    let b = &mut *cx.b;
    let (mask, word) = (b.int(WORD), b.int(WORD + 1));
    let mut key = b.ints(&FIRST.map(i64::from));
    for number in [seed, stream] {
        let number = to_scalar(b, number)?;
        let low = emit(b, &BITWISE_AND, &[number, mask])?;
        // A multiple of 2³², so that the division is exact for negative numbers too.
        let rest = b.sub(number, low)?;
        let high = b.div(rest, word)?;
        let high = emit(b, &BITWISE_AND, &[high, mask])?;
        for part in [low, high] {
            key = emit(b, &BITWISE_XOR, &[key, part])?;
            key = mixed(b, key)?;
        }
    }
    Ok(key)
}

/// [`mix`] of words that int64 holds.
fn mixed(b: &mut Builder, word: ValueId) -> Result<ValueId> {
    let mask = b.int(WORD);
    let mut word = word;
    for (shift, multiplier) in [
        (16, Some(MULTIPLIERS[0])),
        (15, Some(MULTIPLIERS[1])),
        (16, None),
    ] {
        let unit = b.int(1 << shift);
        let shifted = b.div(word, unit)?;
        word = emit(b, &BITWISE_XOR, &[word, shifted])?;
        if let Some(multiplier) = multiplier {
            // As a signed number it is the same multiplier modulo 2³², and small enough.
            let multiplier = b.int(i64::from(multiplier as i32));
            word = b.mul(word, multiplier)?;
            word = emit(b, &BITWISE_AND, &[word, mask])?;
        }
    }
    Ok(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_spread_and_streams_differ() {
        let n = 1 << 16;
        let keys = [
            Key::new(0, 1),
            Key::new(1, 1),
            Key::new(0, 2),
            Key::new(1 << 32, 1),
            Key::new(-1, 1),
        ];
        for (i, key) in keys.iter().enumerate() {
            let mean = (0..n).map(|k| f64::from(key.draw(k))).sum::<f64>() / n as f64;
            let unit = mean / f64::from(1u32 << BITS);
            // Five standard deviations of a mean of uniform numbers.
            assert!(
                (unit - 0.5).abs() < 5.0 / (12.0 * n as f64).sqrt(),
                "{unit}"
            );
            for other in &keys[..i] {
                let equal = (0..n).filter(|k| key.draw(*k) == other.draw(*k)).count();
                assert!(equal < 4, "{key:?} and {other:?} share {equal} draws");
                let both = (0..n)
                    .filter(|k| key.draw(*k) >> 23 == other.draw(*k) >> 23)
                    .count();
                assert!((both as f64 - n as f64 / 2.0).abs() < 2.5 * (n as f64).sqrt());
            }
        }
        assert_ne!(keys[0].draw(5), keys[0].draw(5 + (1 << 32)));
    }

    #[test]
    fn thresholds_are_where_the_comparison_changes() {
        for ratio in [0.0f32, 0.1, 0.5, 0.75, 1.0, 1e-9, f32::NAN, -1.0] {
            let t = threshold(ratio);
            for draw in [t.saturating_sub(1), t, t + 1] {
                let below = draw as f32 / (1u32 << BITS) as f32;
                assert_eq!(draw < t, below < ratio, "{ratio} {draw}");
            }
        }
    }
}
