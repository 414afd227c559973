//! Random numbers as functions of a seed, a stream and the index of the element.
//!
//! Each random node has its own stream number (see [`stream`]). The seed is a graph input. So a recompute node draws
//! the same bits as its original, whatever the order, threads, device or runtime. No mask is saved: the gradient of a
//! dropout is the same dropout of the cotangent.
//!
//! The generator is an integer hash over 32-bit words: two rounds of a mixer with low bias (C. Wellons, "Prospecting for
//! hash functions", 2018) over the index of the element, keyed by 64 bits that four rounds make of seed and stream. The
//! body says the same in int64, whose products of a word and a multiplier below 2³¹ in magnitude never overflow.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, BodyCx, Cost, CostCx, DeviceKind, Effect, Grad, InferCx, OpClass, OpDef, Sized,
    fresh,
};
use ckpt_ir::{DType, Emit, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&DROPOUT, &UNIFORM, &STOCHASTIC_ROUND];

/// Draws are whole multiples of 2⁻²⁴: what float32 holds exactly.
pub const BITS: u32 = 24;

/// The graph input that random ops draw by: an int64 scalar.
pub const SEED: &str = "rng_seed";

const WORD: i64 = 0xffff_ffff;
const FIRST: [u32; 2] = [0x9e37_79b9, 0x85eb_ca6b];
/// What the mixer multiplies words by, in this order, after shifts by 16 and by 15.
pub const MULTIPLIERS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

/// Elements whose draws are made at a time, of `elements`. On a CPU each draw is used at once. A device makes a block of
/// them; its size is a power of two, so that all indices of a block have the same high word.
pub fn drawn_at_once(device: DeviceKind, elements: u64) -> u64 {
    match device {
        DeviceKind::Cpu => 0,
        DeviceKind::Cuda => elements.min(1 << 24),
    }
}

/// A bijection of 32-bit words that mixes their bits.
fn mix(mut word: u32) -> u32 {
    word ^= word >> 16;
    word = word.wrapping_mul(MULTIPLIERS[0]);
    word ^= word >> 15;
    word = word.wrapping_mul(MULTIPLIERS[1]);
    word ^ (word >> 16)
}

/// The key of the draws of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u32; 2]);

impl Key {
    /// Returns the key of a stream of a seed.
    pub fn new(seed: i64, stream: i64) -> Key {
        let words = [seed, seed >> 32, stream, stream >> 32];
        let fold = |first: u32| words.iter().fold(first, |key, w| mix(key ^ *w as u32));
        Key(FIRST.map(fold))
    }

    /// Returns the two words.
    pub fn words(self) -> [u32; 2] {
        self.0
    }

    /// Returns both words as one number, the seed of another generator.
    pub fn number(self) -> u64 {
        u64::from(self.0[0]) | u64::from(self.0[1]) << 32
    }

    /// Returns the draw for element `index` (row-major), an integer below 2²⁴.
    pub fn draw(self, index: u64) -> u32 {
        let inner = mix(index as u32 ^ self.0[0]);
        let outer = inner.wrapping_add((index >> 32) as u32);
        mix(outer ^ self.0[1]) >> (32 - BITS)
    }
}

/// Returns the stream number of a node: the FNV-1a hash of its name, without the sign bit.
pub fn stream(name: &str) -> i64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash & i64::MAX as u64) as i64
}

/// Returns the slots in which a random op reads its seed and the number of its stream.
pub fn key_slots(op: &OpDef) -> Option<(usize, usize)> {
    match op.effect {
        Effect::Seeded => Some((slot_of(op, "seed")?, slot_of(op, "stream")?)),
        _ => None,
    }
}

/// Returns the slot of the scalar that a random op reads beside its key: the ratio of a dropout.
pub fn ratio_slot(op: &OpDef) -> Option<usize> {
    slot_of(op, "ratio")
}

fn slot_of(op: &OpDef, name: &str) -> Option<usize> {
    op.ins.iter().position(|slot| slot.name == name)
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
    ins: slots!["data", "ratio", "seed", "stream"],
    outs: OUTPUT,
    effect: Effect::Seeded,
    infer: |cx| {
        scalar_of(cx, 1, DType::is_float)?;
        seeded(cx, 2)?;
        unary_float(cx)
    },
    // The same elements are dropped from the cotangent; the ratio is no trained quantity.
    grad: Grad::First(|cx| {
        let ins = [cx.dy0(), cx.x(1), cx.x(2), cx.x(3)];
        cx.b.op(&DROPOUT, &ins)
    }),
    cost: draws,
    // Two words and a mask for each draw of a block.
    memory: |cx| {
        let at_once = drawn_at_once(cx.device, cx.elements(0));
        fresh(cx).with_temp(9 * at_once)
    },
    ..ours("Dropout", OpClass::Elementwise, BatchAxes::Mixed, |cx| {
        let (x, ratio) = (cx.x(0), cx.x(1));
        let shape = cx.b.shape(x)?;
        let count = cx.eval(unary_op(SIZE, x))?;
        let draw = uniform(cx, shape, count, 2)?;
        let off = cx.bind(binary_op(LESS, draw, cast(ratio, DType::F32)))?;
        let x = cx.widened(x)?;
        let computed = cx.ty(x.0).dtype;
        let [one, zero] = [1.0, 0.0].map(|n| cx.number(x, n));
        let scale = cx.bind(one / (one - cast(ratio, computed)))?;
        narrow(cx, select(off, zero, x * scale))
    })
};

/// `SeededUniform(shape, seed, stream)`: float32 in [0, 1), multiples of 2⁻²⁴.
pub static UNIFORM: OpDef = OpDef {
    ins: slots!["shape", "seed", "stream"],
    outs: OUTPUT,
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
    grad: Grad::Zero("a draw depends on the seed alone"),
    cost: draws,
    memory: |cx| {
        let elements = cx.outs.first().map_or(0, Sized::elements);
        fresh(cx).with_temp(8 * drawn_at_once(cx.device, elements))
    },
    ..our_mixed("SeededUniform", |cx| {
        let shape = cx.b.cast(cx.x(0), DType::I64)?;
        let count = if cx.outs[0].rank() == 0 {
            cx.b.int(1)
        } else {
            let count = cx.b.op(REDUCE_PROD, &[shape])?;
            cx.b.reshape(count, &[])?
        };
        Ok(vec![uniform(cx, shape, count, 1)?])
    })
};

/// Of the size of a bfloat16 number, the share that is added to come to a neighbour: between 0.62 and 1.25 of the distance
/// to it, so that the sum rounds to the neighbour.
pub const TO_NEIGHBOUR: f64 = 5.0 / 1024.0;

/// `StochasticRound(old, new, seed, stream)`: `new`, as float32, in bfloat16, written over `old`. A number between two neighbours
/// becomes one of them, each with the probability by which the mean is the number.
pub static STOCHASTIC_ROUND: OpDef = OpDef {
    ins: slots!["old", "new", "seed", "stream"],
    outs: slots!["updated"],
    effect: Effect::Seeded,
    infer: |cx| {
        seeded(cx, 2)?;
        cx.want_dtype(0, |d| d == DType::BF16, "bf16")?;
        cx.want_dtype(1, DType::is_float, "a floating-point type")?;
        let (old, new) = (cx.ty(0)?, cx.ty(1)?);
        match may_be_same(&old.dims, &new.dims) {
            true => Ok(vec![old.clone()]),
            false => Err(cx
                .fail("type", "operand `new` does not fit")
                .expected(old.to_string())
                .found(new.to_string())),
        }
    },
    grad: Grad::Missing("a step of an optimizer is not differentiated"),
    cost: draws,
    // Two words, three numbers, the neighbour and a mask for each draw of a block.
    memory: |cx| {
        let is_copied = |x: &&Sized| x.dtype != DType::F32 || !x.is_contiguous();
        let copied = cx.operand(1).filter(is_copied);
        let copied_bytes = copied.map_or(0, |x| 4 * x.elements());
        let at_once = drawn_at_once(cx.device, cx.elements(0));
        fresh(cx)
            .with_temp(copied_bytes + 23 * at_once)
            .in_place_operands(cx, &[0])
    },
    ..ours("StochasticRound", OpClass::Update, BatchAxes::Mixed, |cx| {
        let shape = cx.b.shape(cx.x(1))?;
        let count = cx.eval(unary_op(SIZE, cx.x(1)))?;
        let draw = uniform(cx, shape, count, 2)?;
        let new = cx.bind(cast(cx.x(1), DType::F32))?;
        let near = cx.bind(cast(new, DType::BF16))?;
        let wide = cx.bind(cast(near, DType::F32))?;
        let away = cx.bind(new - wide)?;
        let step = unary_op(ABS, wide) * TO_NEIGHBOUR * unary_op(SIGN, away);
        let other = cx.bind(cast(wide + step, DType::BF16))?;
        let distance = cx.bind(unary_op(ABS, cast(other, DType::F32) - wide))?;
        let share = cx.bind(unary_op(ABS, away) / distance)?;
        let moves = cx.bind(binary_op(LESS, draw, share))?;
        Ok(vec![cx.eval(select(moves, other, near))?])
    })
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
    let [zero, one] = [0, 1].map(|n| b.int(n));
    let (mask, word) = (b.int(WORD), b.int(WORD + 1));
    let index = Term(b.op(RANGE, &[zero, count, one])?);
    let low = b.bind(binary_op(BITWISE_AND, index, mask))?;
    let high = b.bind(index / word)?;
    let inner = binary_op(BITWISE_XOR, low, binary_op(GATHER, key, zero));
    let inner = mixed(b, inner)?;
    let outer = b.bind(binary_op(BITWISE_AND, inner + high, mask))?;
    let outer = binary_op(BITWISE_XOR, outer, binary_op(GATHER, key, one));
    let outer = mixed(b, outer)?;
    let unit = b.int(1 << (32 - BITS));
    let draw = b.bind(cast(outer / unit, DType::F32))?;
    let draw = b.eval(draw * (1.0 / f64::from(1u32 << BITS)))?;
    b.reshape_to(draw, shape)
}

/// [`Key::new`] of two operands: int64 [2].
fn key(cx: &mut BodyCx, slot: usize) -> Result<Term> {
    let (seed, stream) = (cx.x(slot), cx.x(slot + 1));
    let b = &mut *cx.b;
    let (mask, word) = (b.int(WORD), b.int(WORD + 1));
    let mut key = Term(b.ints(&FIRST.map(i64::from)));
    for number in [seed, stream] {
        let number = Term(b.reshape(number, &[])?);
        let low = b.bind(binary_op(BITWISE_AND, number, mask))?;
        // A multiple of 2³², so that the division is exact for negative numbers too.
        let high = b.bind(binary_op(BITWISE_AND, (number - low) / word, mask))?;
        for part in [low, high] {
            key = mixed(b, binary_op(BITWISE_XOR, key, part))?;
        }
    }
    Ok(key)
}

/// [`mix`] of words that int64 holds.
fn mixed(b: &mut dyn Emit, word: Expr) -> Result<Term> {
    let mut word = b.bind(word)?;
    let mask = b.int(WORD);
    let steps = [
        (16, Some(MULTIPLIERS[0])),
        (15, Some(MULTIPLIERS[1])),
        (16, None),
    ];
    for (shift, multiplier) in steps {
        let unit = b.int(1 << shift);
        word = b.bind(binary_op(BITWISE_XOR, word, word / unit))?;
        if let Some(multiplier) = multiplier {
            // As a signed number it is the same multiplier modulo 2³², and small enough.
            let multiplier = b.int(i64::from(multiplier as i32));
            word = b.bind(binary_op(BITWISE_AND, word * multiplier, mask))?;
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
