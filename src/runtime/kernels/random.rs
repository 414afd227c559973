//! Random numbers.
//!
//! Our hash is integer arithmetic. On a CPU it runs in a loop of ours, on as many threads as libtorch may use; on a device, in
//! libtorch's ops on blocks of words. An element depends only on its index, so every split of the work gives the same bits.
//! `native` and `eager` use libtorch's kernels instead, which allocate an int32 for each element of a call.

use super::context::*;
use crate::rng::Rng;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ops::random::*;
use ckpt_torch::rng::Generator;
use half::{bf16, f16};

/// Kernels of the ops that draw random numbers.
pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&DROPOUT, dropout),
    (&UNIFORM, uniform),
    (&STOCHASTIC_ROUND, stochastic_round),
];

/// The fewest elements per thread.
const LEAST_OF_A_THREAD: usize = 1 << 16;

/// Elements per call in `native`, which bounds the temporaries of libtorch's kernel.
const DRAWN_AT_ONCE: i64 = 1 << 16;

fn key(cx: &KernelCx, slot: usize) -> Result<Key> {
    Ok(Key::new(cx.ints(slot)?[0], cx.ints(slot + 1)?[0]))
}

/// The two words of a key for kernels of a device.
enum Words<'a> {
    Known([u32; 2]),
    /// Scalars on the device.
    There(&'a [Tensor; 2]),
}

impl Words<'_> {
    /// Combines int32 elements with word `at`.
    fn xor_into(&self, to: &Tensor, at: usize) -> Result<()> {
        match self {
            Words::Known(words) => write("aten::bitwise_xor_.Scalar", args![to, signed(words[at])]),
            Words::There(words) => write("aten::bitwise_xor_.Tensor", args![to, &words[at]]),
        }
    }
}

/// Words are signed in tensors. Their sums and products have the same bits.
fn signed(word: u32) -> i64 {
    i64::from(word as i32)
}

/// Returns the key of seed and stream in `slot` and the next one.
fn words<'a>(cx: &'a KernelCx, slot: usize) -> Result<Words<'a>> {
    let fixed = cx.draws.fixed.as_deref();
    let there = fixed.and_then(|fixed| fixed.key(cx.slot(slot)?, cx.slot(slot + 1)?));
    // What the host computes by itself reads its own numbers.
    let device = cx.x(slot)?.device();
    match there.filter(|words| words[0].device() == device) {
        Some(words) => Ok(Words::There(words)),
        None => Ok(Words::Known(key(cx, slot)?.words())),
    }
}

/// Returns the ratio of a dropout.
fn ratio(cx: &KernelCx) -> Result<f64> {
    let fixed = cx.draws.fixed.as_deref();
    match fixed.and_then(|fixed| fixed.ratio(cx.slot(1)?)) {
        Some(ratio) => Ok(ratio),
        None => scalar_number(cx.awaited(1)?),
    }
}

/// Edits the bytes of a tensor on the host.
fn edited(mut out: Tensor, edit: &mut dyn FnMut(&mut [u8])) -> Result<Vec<Tensor>> {
    backend(&out).edit_bytes(&mut out, edit)?;
    Ok(vec![out])
}

/// Calls `change(index, element)` for every element, held in `N` bytes each.
fn each<const N: usize>(bytes: &mut [u8], change: impl Fn(u64, [u8; N]) -> [u8; N] + Sync) {
    let (elements, _) = bytes.as_chunks_mut::<N>();
    let run = |first: usize, part: &mut [[u8; N]]| {
        for (index, element) in (first as u64..).zip(part) {
            *element = change(index, *element);
        }
    };
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1).max(1);
    let share = elements.len().div_ceil(threads).max(LEAST_OF_A_THREAD);
    if elements.len() <= share {
        return run(0, elements);
    }
    std::thread::scope(|scope| {
        for (i, part) in elements.chunks_mut(share).enumerate() {
            let run = &run;
            scope.spawn(move || run(i * share, part));
        }
    });
}

/// Calls `each` with every block of `out`, its draws and the index of its first element.
fn for_draws(
    key: &Words,
    out: &Tensor,
    each: impl Fn(&Tensor, &Tensor, i64) -> Result<()>,
) -> Result<()> {
    let flat = call("aten::view", args![out, &[-1]])?;
    let total = flat.size()[0];
    if total == 0 {
        return Ok(());
    }
    let most = drawn_at_once(DeviceKind::Cuda, total as u64) as i64;
    let room = || empty(&[most], Kind::Int, out.device());
    let (words, spare) = (room()?, room()?);
    for (first, count) in blocks(total, most) {
        let [words, spare] = [&words, &spare].map(|room| narrow(room, 0, 0, count));
        let words = words?;
        draw(key, first as u64, &words, &spare?)?;
        each(&narrow(&flat, 0, first, count)?, &words, first)?;
    }
    Ok(())
}

/// Fills a vector of int32 with the draws from index `first` on, which all have one high word ([`Key::draw`]). `spare` is of
/// the same size.
fn draw(key: &Words, first: u64, words: &Tensor, spare: &Tensor) -> Result<()> {
    let shifted = |by: i64, to: &Tensor| {
        write(
            "aten::bitwise_right_shift.Tensor_Scalar_out",
            args![words, by, to],
        )?;
        // The sign was shifted in.
        write(
            "aten::bitwise_and_.Scalar",
            args![to, (1i64 << (32 - by)) - 1],
        )
    };
    let mix = || -> Result<()> {
        for (by, multiplier) in [
            (16, Some(MULTIPLIERS[0])),
            (15, Some(MULTIPLIERS[1])),
            (16, None),
        ] {
            shifted(by, spare)?;
            write("aten::bitwise_xor_.Tensor", args![words, spare])?;
            if let Some(multiplier) = multiplier {
                write("aten::mul_.Scalar", args![words, signed(multiplier)])?;
            }
        }
        Ok(())
    };
    let add = |word: u32| write("aten::add_.Scalar", args![words, signed(word), 1]);
    write(
        "aten::arange.start_out",
        args![0, words.size()[0], 1, words],
    )?;
    add(first as u32)?;
    key.xor_into(words, 0)?;
    mix()?;
    add((first >> 32) as u32)?;
    key.xor_into(words, 1)?;
    mix()?;
    shifted(i64::from(32 - BITS), words)
}

/// Copies the operand into the result and changes it there. 16-bit elements are computed in float32 and rounded once.
fn dropout(cx: &KernelCx) -> Result<Vec<Tensor>> {
    if cx.draws.rng() != Rng::Counter {
        return torch_dropout(cx);
    }
    let (x, ratio) = (cx.x(0)?, ratio(cx)?);
    let least = threshold(ratio as f32);
    let (wide, scale) = (1.0 / (1.0 - ratio), 1.0 / (1.0 - ratio as f32));
    let kind = x.kind();
    let out = copied_as(x, kind)?;
    if cx.device == DeviceKind::Cuda {
        let scale = if kind == Kind::Double {
            wide
        } else {
            f64::from(scale)
        };
        mul_into(&out, &scalar(Kind::Double, scale)?)?;
        for_draws(&words(cx, 2)?, &out, |part, draws, _| {
            let off = empty(&draws.size(), Kind::Bool, draws.device())?;
            write("aten::lt.Scalar_out", args![draws, i64::from(least), &off])?;
            write("aten::masked_fill_.Scalar", args![part, &off, 0.0])
        })?;
        return Ok(vec![out]);
    }
    let key = key(cx, 2)?;
    let off = |index: u64| key.draw(index) < least;
    // A kept element is scaled in the compute type and rounded once. The row takes floating-point types only.
    edited(out, &mut |all| match kind {
        Kind::Double => drop_out(all, off, |e| (f64::from_le_bytes(e) * wide).to_le_bytes()),
        Kind::Float => drop_out(all, off, |e| (f32::from_le_bytes(e) * scale).to_le_bytes()),
        Kind::Half => drop_out(all, off, |e| {
            f16::from_f32(f16::from_le_bytes(e).to_f32() * scale).to_le_bytes()
        }),
        _ => drop_out(all, off, |e| {
            bf16::from_f32(bf16::from_le_bytes(e).to_f32() * scale).to_le_bytes()
        }),
    })
}

/// Sets the elements whose index is `off` to 0 and changes the others by `keep`.
fn drop_out<const N: usize>(
    bytes: &mut [u8],
    off: impl Fn(u64) -> bool + Sync,
    keep: impl Fn([u8; N]) -> [u8; N] + Sync,
) {
    each(bytes, |i, e| if off(i) { [0; N] } else { keep(e) })
}

/// Fills a new CPU tensor by calling `draw` with the generator and the whole tensor (`eager`) or each block in turn.
fn drawn(
    cx: &KernelCx,
    slot: usize,
    (dims, kind): (&[i64], Kind),
    draw: impl Fn(&Generator, &Tensor) -> Result<()>,
) -> Result<Tensor> {
    let out = empty(dims, kind, Device::Cpu)?;
    let flat = out.view(-1);
    let step = match cx.draws.rng() {
        // PyTorch fills a tensor in one call.
        Rng::Eager => flat.numel() as i64,
        _ => DRAWN_AT_ONCE,
    };
    let (seed, stream) = (cx.ints(slot)?[0], cx.ints(slot + 1)?[0]);
    cx.draws.with(cx.op, seed, stream, |generator| {
        flat.split(step.max(1), 0)
            .iter()
            .try_for_each(|part| draw(generator, part))
    })?;
    Ok(out)
}

/// Computes what `torch.nn.functional.dropout` computes on a CPU, op by op and bit for bit.
fn torch_dropout(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, ratio) = (cx.x(0)?, cx.x(1)?);
    let ratio = match ratio.kind() {
        // The model's author wrote 0.1, not the nearest float32.
        Kind::Float => as_written(scalar_number(ratio)? as f32),
        _ => scalar_number(ratio)?,
    };
    let (dims, kind) = (x.size(), x.kind());
    if !(ratio > 0.0 && ratio < 1.0) || x.numel() == 0 {
        let out = copied_as(x, kind)?;
        if ratio >= 1.0 {
            mul_into(&out, &scalar(Kind::Double, 0.0)?)?;
        }
        return Ok(vec![out]);
    }
    let keep = 1.0 - ratio;
    let divisor = scalar(Kind::Double, keep)?;
    let mask = drawn(cx, 2, (&dims, kind), |generator, part| {
        write("aten::bernoulli_.float", args![part, keep, generator])?;
        div_into(part, &divisor)
    })?;
    let out = mask.to_device(x.device());
    mul_into(&out, x)?;
    Ok(vec![out])
}

/// Returns the shortest decimal number that rounds to `ratio`.
fn as_written(ratio: f32) -> f64 {
    ratio.to_string().parse().unwrap_or(f64::from(ratio))
}

fn uniform(cx: &KernelCx) -> Result<Vec<Tensor>> {
    if cx.draws.rng() != Rng::Counter {
        let dims = cx.ints(0)?;
        let drawn = drawn(cx, 1, (&dims, Kind::Float), |generator, part| {
            write("aten::uniform_", args![part, 0.0, 1.0, generator])
        })?;
        return Ok(vec![drawn.to_device(cx.x(0)?.device())]);
    }
    let out = empty(&cx.ints(0)?, Kind::Float, cx.x(0)?.device())?;
    let step = 1.0 / (1u32 << BITS) as f32;
    if cx.device == DeviceKind::Cuda {
        for_draws(&words(cx, 1)?, &out, |part, draws, _| {
            copy_into(part, draws)
        })?;
        mul_into(&out, &scalar(Kind::Double, f64::from(step))?)?;
        return Ok(vec![out]);
    }
    let key = key(cx, 1)?;
    edited(out, &mut |all| {
        each(all, |i, _: [u8; 4]| {
            (key.draw(i) as f32 * step).to_le_bytes()
        })
    })
}

/// Rounds to one of the two neighbours in bfloat16 of each number.
fn stochastic_round(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let out = cx.result_like(cx.x(0)?)?;
    let new = dense_as(cx.x(1)?, Kind::Float)?;
    if cx.device == DeviceKind::Cuda {
        round_there(cx, &out, &new)?;
        return Ok(vec![out]);
    }
    let key = key(cx, 2)?;
    let unit = 1.0 / (1u32 << BITS) as f32;
    let round = |index: u64, new: f32| -> bf16 {
        let near = bf16::from_f32(new);
        let wide = near.to_f32();
        let away = new - wide;
        let sign = f32::from(i8::from(away > 0.0) - i8::from(away < 0.0));
        let other = bf16::from_f32(wide + wide.abs() * TO_NEIGHBOUR as f32 * sign);
        let share = away.abs() / (other.to_f32() - wide).abs();
        // Not a number where both are one.
        match (key.draw(index) as f32 * unit) < share {
            true => other,
            false => near,
        }
    };
    let edit = |from: &[u8]| {
        let numbers = from.as_chunks::<4>().0;
        edited(out, &mut |all| {
            each(all, |i, _: [u8; 2]| {
                round(i, f32::from_le_bytes(numbers[i as usize])).to_le_bytes()
            });
        })
    };
    ckpt_torch::bytes::look(&new, edit).map_err(torch_error)?
}

/// The same in libtorch's ops on blocks.
fn round_there(cx: &KernelCx, out: &Tensor, new: &Tensor) -> Result<()> {
    let flat = call("aten::view", args![new, &[-1]])?;
    for_draws(&words(cx, 2)?, out, |part, draws, first| {
        let (dims, device) = (part.size(), part.device());
        let room = |kind| empty(&dims, kind, device);
        let (wide, away, next) = (room(Kind::Float)?, room(Kind::Float)?, room(Kind::Float)?);
        let (other, moves) = (room(Kind::BFloat16)?, room(Kind::Bool)?);
        let new = narrow(&flat, 0, first, dims[0])?;
        copy_into(part, &new)?;
        copy_into(&wide, part)?;
        write("aten::sub.out", args![&new, &wide, 1.0, &away])?;
        // wide + |wide|·c·sign(away)
        write("aten::abs.out", args![&wide, &next])?;
        mul_into(&next, &scalar(Kind::Float, TO_NEIGHBOUR)?)?;
        write("aten::copysign.out", args![&next, &away, &next])?;
        add_into(&next, &wide)?;
        copy_into(&other, &next)?;
        copy_into(&next, &other)?;
        write("aten::sub_.Tensor", args![&next, &wide, 1.0])?;
        write("aten::abs_", args![&next])?;
        write("aten::abs_", args![&away])?;
        div_into(&away, &next)?;
        mul_into(&away, &scalar(Kind::Float, f64::from(1u32 << BITS))?)?;
        copy_into(&wide, draws)?;
        write("aten::lt.Tensor_out", args![&wide, &away, &moves])?;
        write("aten::where.self_out", args![&moves, &other, part, part])
    })
}
