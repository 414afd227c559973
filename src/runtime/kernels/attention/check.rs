//! Checks a fused kernel on a device: runs a small problem, forward and backward, twice by the kernel and once in tiles. Both
//! runs of the kernel must have the same bits and may differ from the tiles only by rounding.
//!
//! The bounds follow from the roundings of each element. Let u be the unit roundoff of the operands' type; `unit` adds the
//! error of sums and exponentials in the compute type.
//! - Log-sum-exp: u, because exponentials need not be more accurate than the later rounding.
//! - y: 3u of Σ p|v|, for probabilities rounded for the product and for either result.
//! - dv: 4u of Σ p|dy|, for the same roundings and the sum over the query heads of a group.
//! - Slopes p·(dy·v − dy·y): 4u of A = p·(|dy|·|v| + |dy|·Σ p|v|), because y is rounded and slopes are rounded for products.
//! - dq: 6u of A|k|, for the slopes and either result. dk: 7u of Aᵀ|q|, with the sum over the query heads of a group.
//!
//! One more u of each covers second-order terms. If a kernel fails or is refused, tiles replace it in this process, which
//! costs only speed, and `run` reports the reason.

use super::sdpa;
use crate::runtime::convert;
use crate::runtime::draws::Draws;
use crate::runtime::kernels::attention::{attention, attention_grad};
use crate::runtime::kernels::{Kernel, KernelCx, copy_into, empty};
use crate::runtime::swap_store::SwapStore;
use ckpt_passes::Result;
use ckpt_passes::analysis::sdpa::{Facts, SdpaBackend};
use ckpt_passes::ir::{Attrs, DType, OpDef};
use ckpt_passes::ops::attention::{ATTENTION, ATTENTION_GRAD};
use ckpt_passes::ops::rule::compute_type;
use ckpt_torch::bytes;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use tch::{Device, Kind, Tensor};

/// The properties that select a kernel. Nodes with equal properties share one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CheckedCase {
    /// Element type of the operands q, k and v.
    pub dtype: DType,
    /// Elements of a head in q and k.
    pub size: i64,
    /// Elements of a head in v and the result.
    pub value_size: i64,
    /// Whether queries see no later keys.
    pub causal: bool,
    /// Whether several query heads share a key head.
    pub grouped: bool,
}

impl CheckedCase {
    fn of(facts: &Facts) -> CheckedCase {
        CheckedCase {
            dtype: facts.dtype,
            size: facts.size,
            value_size: facts.value_size,
            causal: facts.causal,
            grouped: facts.groups > 1,
        }
    }
}

/// Verdicts of this process, by backend, device number (−1 for the CPU) and case.
static VERDICTS: Mutex<BTreeMap<(SdpaBackend, i64, CheckedCase), Option<String>>> =
    Mutex::new(BTreeMap::new());

/// Checks a backend for a node. Runs the check once per case in a process.
///
/// # Errors
/// Why the backend is not used, for people.
pub fn admitted(
    pair: SdpaBackend,
    facts: &Facts,
    device: Device,
) -> std::result::Result<(), String> {
    let case = CheckedCase::of(facts);
    let number = match device {
        Device::Cuda(n) => n as i64,
        _ => -1,
    };
    let mut verdicts = VERDICTS.lock().unwrap_or_else(PoisonError::into_inner);
    let verdict = verdicts
        .entry((pair, number, case))
        .or_insert_with(|| judge(case, device, &|cx| sdpa::run(pair, cx)).err());
    match verdict {
        None => Ok(()),
        Some(why) => Err(format!(
            "attention runs in tiles, not by {}: {why} (heads of {}, {})",
            pair.names()[0],
            case.size,
            case.dtype
        )),
    }
}

/// Batch, key heads, queries and keys; queries and keys are no multiples of the library's blocks.
const SMALL: [i64; 4] = [2, 2, 150, 190];

/// Makes pseudo-random numbers between −1 and 1, with the heads of a row side by side as after a projection.
fn numbers(dims: [i64; 4], salt: u32, kind: Kind, device: Device) -> Result<Tensor> {
    let [batch, heads, rows, columns] = dims;
    let count = (batch * heads * rows * columns) as u32;
    let number = |i: u32| {
        let mixed = (i ^ salt.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B);
        let mixed = (mixed ^ (mixed >> 13)).wrapping_mul(0xC2B2_AE35);
        f64::from((mixed ^ (mixed >> 16)) & 0xffff) / 32768.0 - 1.0
    };
    let values: Vec<f64> = (0..count).map(number).collect();
    let x = Tensor::from_slice(&values).view([batch, rows, heads, columns]);
    let there = empty(&[batch, rows, heads, columns], kind, device)?;
    copy_into(&there, &x)?;
    Ok(there.transpose(1, 2))
}

/// A small attention problem.
struct Problem {
    attrs: Attrs,
    /// dy, q, k, v.
    ins: [Tensor; 4],
}

impl Problem {
    fn new(case: CheckedCase, device: Device) -> Result<Problem> {
        let [batch, heads, queries, keys] = SMALL;
        let keys = if case.causal { queries } else { keys };
        let query_heads = heads * if case.grouped { 2 } else { 1 };
        let kind = convert::kind(case.dtype)?;
        let make =
            |heads, rows, columns, salt| numbers([batch, heads, rows, columns], salt, kind, device);
        let mut attrs = Attrs::new()
            .with("scale", 2.0 / (case.size as f32).sqrt())
            .with("causal", i64::from(case.causal))
            .with("wants", vec![0, 1, 2]);
        for spec in ATTENTION.attrs {
            if let (None, Some(value)) = (attrs.get(spec.name), spec.default_value()) {
                attrs.set(spec.name, value);
            }
        }
        Ok(Problem {
            attrs,
            ins: [
                make(query_heads, queries, case.value_size, 1)?,
                make(query_heads, queries, case.size, 2)?,
                make(heads, keys, case.size, 3)?,
                make(heads, keys, case.value_size, 4)?,
            ],
        })
    }

    /// Computes y, the log-sum-exp, and dq, dk and dv without these as operands and with them, y in either layout, and moves
    /// all to the CPU.
    fn results(&self, attend: &dyn Fn(&KernelCx) -> Result<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        let [dy, q, k, v] = &self.ins;
        let (draws, store) = (Draws::default(), SwapStore::default());
        let run = |op: &'static OpDef, ins: &[Option<&Tensor>], n_outs| {
            attend(&KernelCx::new(
                op,
                &self.attrs,
                ins,
                n_outs,
                (&draws, &store),
            ))
        };
        let mut all = run(&ATTENTION, &[Some(q), Some(k), Some(v)], 2)?;
        let back = [dy, q, k, v].map(Some);
        all.extend(run(&ATTENTION_GRAD, &back, 3)?);
        let heads_inside = all[0].transpose(1, 2).flatten(2, 3);
        for i in 0..2 {
            let saved = [None, Some([&all[0], &heads_inside][i]), Some(&all[1])];
            let gradients = run(&ATTENTION_GRAD, &[&back[..], &saved].concat(), 3)?;
            all.extend(gradients);
        }
        Ok(all.iter().map(|x| x.to_device(Device::Cpu)).collect())
    }

    /// Returns how far rounding may move each result from that of the tiles.
    fn allowed(&self, case: CheckedCase) -> Result<[Tensor; 5]> {
        let wide = |x: &Tensor| x.to_device(Device::Cpu).to_kind(Kind::Double);
        let [dy, q, k, v] = self.ins.each_ref().map(wide);
        let groups = q.size()[1] / k.size()[1];
        let spread = |x: &Tensor| x.repeat_interleave_self_int(groups, 1, None);
        let (k, v) = (spread(&k), spread(&v));
        let turned = |x: &Tensor| x.transpose(2, 3);
        let scale = f64::from(self.attrs.float("scale"));
        let mut scores = q.matmul(&turned(&k)) * scale;
        if case.causal {
            let hidden = scores.ones_like().triu(1).to_kind(Kind::Bool);
            scores = scores.masked_fill(&hidden, f64::NEG_INFINITY);
        }
        let p = scores.softmax(-1, Kind::Double);
        let (q, k, v, dy) = (q.abs(), k.abs(), v.abs(), dy.abs());
        let largest = (q.matmul(&turned(&k)) * scale).max().double_value(&[]);
        let (roundoff, computed) = (roundoff(case.dtype), roundoff(compute_type(case.dtype)));
        let (size, keys) = (case.size.max(case.value_size) as f64, k.size()[2] as f64);
        let unit = roundoff + (size + keys + size * largest) * computed;
        let y = p.matmul(&v);
        let along = (&dy * &y).sum_dim_intlist([-1i64].as_slice(), true, Kind::Double);
        let slopes = &p * (dy.matmul(&turned(&v)) + along);
        // Sums over the query heads of a group.
        let gathered = |x: Tensor| {
            let size = x.size();
            let apart = [size[0], size[1] / groups, groups, size[2], size[3]];
            let apart = x.contiguous().view(apart);
            apart.sum_dim_intlist([2i64].as_slice(), false, Kind::Double)
        };
        let lse = scores.logsumexp([-1i64].as_slice(), false).abs() + largest;
        Ok([
            &y * (4.0 * unit),
            lse * ((size + keys) * computed) + unit,
            slopes.matmul(&k) * (7.0 * scale * unit),
            gathered(turned(&slopes).matmul(&q)) * (8.0 * scale * unit),
            gathered(turned(&p).matmul(&dy)) * (5.0 * unit),
        ])
    }
}

/// Returns half the distance between 1 and the next larger number.
fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F64 => 2f64.powi(-53),
        _ => 2f64.powi(-24),
    }
}

/// Checks attention kernels on a small problem.
///
/// # Errors
/// The first violation.
pub fn judge(
    case: CheckedCase,
    device: Device,
    attend: &dyn Fn(&KernelCx) -> Result<Vec<Tensor>>,
) -> std::result::Result<(), String> {
    let _no_grad = tch::no_grad_guard();
    let failed = |e: Box<ckpt_passes::Error>| {
        let text = e.to_string();
        let line = text.lines().next().unwrap_or_default();
        format!("it failed in a check: {line}")
    };
    let problem = Problem::new(case, device).map_err(failed)?;
    let first = problem.results(attend).map_err(failed)?;
    let second = problem.results(attend).map_err(failed)?;
    let tiles = |cx: &KernelCx| {
        let kernel: Kernel = match cx.op == &ATTENTION_GRAD {
            true => attention_grad,
            false => attention,
        };
        kernel(cx)
    };
    let expected = problem.results(&tiles).map_err(failed)?;
    let allowed = problem.allowed(case).map_err(failed)?;
    let names = ["the result", "the log-sum-exp", "dq", "dk", "dv"];
    for i in 0..first.len() {
        // The gradients come three times.
        let of = if i < 2 { i } else { 2 + (i - 2) % 3 };
        let name = names[of];
        let (a, b, c) = (&first[i], &second[i], &expected[of]);
        if a.size() != c.size() || a.kind() != c.kind() || !a.is_contiguous() {
            return Err(format!(
                "{name} is no row-major {:?} of {:?}",
                c.kind(),
                c.size()
            ));
        }
        if bytes::read(a).ok() != bytes::read(b).ok() {
            return Err(format!("{name} had other bits in a second run"));
        }
        let gap = (a.to_kind(Kind::Double) - c.to_kind(Kind::Double)).abs();
        // NaN is within nothing.
        let within = gap.le_tensor(&allowed[of]).all();
        if !bool::try_from(within).unwrap_or(false) {
            let most = gap.max().double_value(&[]);
            return Err(format!(
                "{name} was up to {most:.3e} from that of tiles, beyond rounding"
            ));
        }
    }
    Ok(())
}
