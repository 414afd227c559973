//! PyTorch's fused attention kernels (SDPA backends), each a forward and a backward, and the nodes that may use them.
//!
//! A backend is used only if the library's arguments mean exactly what our row means. The choice is a pure function of the
//! device and of the sizes, type and attributes of a node. Recomputations and the gradient share these, so all of them use the
//! same backend. The choice does not depend on layouts: operands that a backend cannot read in place are copied
//! (the runtime's `kernels/attention/sdpa`). The planner chooses for a device profile, and a run for its device when a program is
//! compiled for its sizes, after a check of these assumptions on the device (`kernels/attention/check`). Both use [`choice`].
//!
//! The assumptions, with their sources in PyTorch 2.11 (`aten/src/ATen/native/transformers/cuda`):
//! - Both backwards are deterministic under `setDeterministicAlgorithms(true)`: flash sums dq in parts of its own
//!   (`_flash_attention_backward`), efficient does not split keys (`_efficient_attention_backward`).
//! - Both are used for 16-bit types only. Flash supports no others. Efficient multiplies float32 on tensor cores in three parts
//!   of TF32, regardless of the TF32 switches (`DefaultGemmType`, `OpMultiplyAddFastF32`), which is not full precision.
//! - There is no mask, or a causal one with equally many queries and keys. So every query sees a key, and the alignment of the
//!   causal mask does not matter (flash aligns it to the last key, efficient to the first).
//! - The log-sum-exp is a natural logarithm in float32.
//! - There are no segments, and the log-sum-exp has no cotangent.
//! - There is no bias. The backwards compute probabilities from the saved log-sum-exp. A bias of the lowest number, the usual
//!   mask for padding, leaves no digit of the scores in it, and a query whose keys are all hidden gives NaN.
//! - The scale is positive, because flash searches the largest score before it scales.

pub mod choice;
pub mod layout;
pub mod scratch;

use crate::analysis::Device;
use crate::ir::op::{DeviceKind, Sized};
use crate::ir::{Attrs, DType};
use crate::ops::attention::{AttentionPlan, SEGMENTS};
use layout::ALIGNMENT_ELEMENTS;

/// A fused forward kernel and its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SdpaBackend {
    /// `aten::_scaled_dot_product_flash_attention`.
    Flash,
    /// `aten::_scaled_dot_product_efficient_attention`.
    Efficient,
    /// `aten::_scaled_dot_product_flash_attention_for_cpu`. Only tests use it: it follows the same path without a device.
    Cpu,
}

impl SdpaBackend {
    /// Returns the names of PyTorch's forward and backward operators.
    pub fn names(self) -> [&'static str; 2] {
        match self {
            SdpaBackend::Flash => [
                "aten::_scaled_dot_product_flash_attention",
                "aten::_scaled_dot_product_flash_attention_backward",
            ],
            SdpaBackend::Efficient => [
                "aten::_scaled_dot_product_efficient_attention",
                "aten::_scaled_dot_product_efficient_attention_backward",
            ],
            SdpaBackend::Cpu => [
                "aten::_scaled_dot_product_flash_attention_for_cpu",
                "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            ],
        }
    }
}

/// The properties of a node that the choice depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Element type of the queries.
    pub dtype: DType,
    /// The product of the axes before the heads.
    pub batch: i64,
    /// Key heads.
    pub heads: i64,
    /// Query heads of one key head.
    pub groups: i64,
    /// Query positions of one head.
    pub queries: i64,
    /// Key positions of one head.
    pub keys: i64,
    /// Elements of a query and of a key.
    pub size: i64,
    /// Elements of a value.
    pub value_size: i64,
    /// Factor on the products of queries and keys, before the softmax.
    pub scale: f32,
    /// Whether a causal mask hides later keys.
    pub causal: bool,
    /// Whether a sliding window limits keys on either side.
    pub has_window: bool,
    /// Whether scores are capped before the softmax.
    pub has_softcap: bool,
    /// Whether the node has a bias or mask operand.
    pub has_bias: bool,
    /// Whether a query sees only keys of its own segment.
    pub has_segments: bool,
}

impl Facts {
    /// Reads the facts from the attributes and operands of [`ATTENTION`](crate::ops::attention::ATTENTION); `None` for operands
    /// that typing refuses.
    pub fn of(attrs: &Attrs, ins: &[Option<Sized>]) -> Option<Facts> {
        let plan = AttentionPlan::forward(attrs, ins)?;
        Some(Facts {
            dtype: ins.first()?.as_ref()?.dtype,
            batch: plan.lead_count(),
            heads: plan.heads,
            groups: plan.groups,
            queries: plan.band.queries,
            keys: plan.band.keys,
            size: plan.size,
            value_size: plan.value_size,
            scale: attrs.float("scale"),
            causal: attrs.int("causal") != 0,
            has_window: attrs.int("window_left") >= 0 || attrs.int("window_right") >= 0,
            has_softcap: attrs.float("softcap") != 0.0,
            has_bias: ins.get(3).is_some_and(Option::is_some),
            has_segments: ins.get(SEGMENTS).is_some_and(Option::is_some),
        })
    }

    /// Returns the number of query heads: key heads times query heads per key head.
    pub fn query_heads(&self) -> i64 {
        self.heads.saturating_mul(self.groups)
    }

    /// Returns whether every query sees a key and its weights are a plain softmax of scaled products.
    fn is_plain(&self) -> bool {
        let sizes = [
            self.batch,
            self.heads,
            self.groups,
            self.queries,
            self.keys,
            self.size,
            self.value_size,
        ];
        sizes.iter().all(|n| *n > 0)
            && self.scale > 0.0
            && !self.has_window
            && !self.has_softcap
            && !self.has_bias
            && !self.has_segments
            && (!self.causal || self.queries == self.keys)
    }

    /// Returns the most elements that an operand or a result has.
    fn most_elements(&self) -> i64 {
        let rows = self.batch.saturating_mul(self.query_heads());
        rows.saturating_mul(self.queries.max(self.keys))
            .saturating_mul(self.size.max(self.value_size))
    }
}

/// The backends that a run may use, and the properties of its device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SdpaBackends {
    /// Backends in order of preference; empty where attention always runs in tiles.
    pub list: Vec<SdpaBackend>,
    /// Compute capability of a CUDA device, 8.6 as 86; 0 elsewhere.
    pub capability: i64,
    /// Streaming multiprocessors of a CUDA device; 0 elsewhere.
    pub processors: i64,
    /// Why there are none although there should be.
    pub refused: Option<String>,
}

/// CUDA's limit on the second and third axis of a grid: places of the batch, and heads.
const GRID: i64 = 65_535;

impl SdpaBackends {
    /// The backends that a CUDA device may have.
    pub fn cuda(capability: i64, processors: i64) -> SdpaBackends {
        SdpaBackends {
            list: vec![SdpaBackend::Flash, SdpaBackend::Efficient],
            capability,
            processors,
            refused: None,
        }
    }

    /// The backends that a run on the device of a profile may use; none on a CPU.
    pub fn of_profile(device: &Device) -> SdpaBackends {
        match (device.kind, device.capability, device.processors) {
            (DeviceKind::Cuda, Some(capability), Some(processors)) => {
                SdpaBackends::cuda(capability, processors)
            }
            _ => SdpaBackends::default(),
        }
    }

    /// Returns the first backend of the device that computes what the node means.
    pub fn choose(&self, facts: &Facts) -> Option<SdpaBackend> {
        if !facts.is_plain() || facts.most_elements() > i64::from(i32::MAX) {
            return None;
        }
        let fits = |pair: &&SdpaBackend| self.has(**pair, facts);
        self.list.iter().find(fits).copied()
    }

    /// Returns whether a backend accepts the node, by the conditions of `sdp_utils.cpp` and of the calls themselves.
    fn has(&self, pair: SdpaBackend, facts: &Facts) -> bool {
        let is_even = |n: i64| n % ALIGNMENT_ELEMENTS == 0;
        let on_device = matches!(facts.dtype, DType::F16 | DType::BF16)
            && (80..=121).contains(&self.capability)
            && facts.batch <= GRID
            && facts.query_heads() <= GRID
            && is_even(facts.size)
            && is_even(facts.value_size);
        match pair {
            SdpaBackend::Flash => {
                // Wide heads need more shared memory to go back than these have.
                let is_small = matches!(self.capability, 86..=89 | 120..=121);
                on_device
                    && facts.size == facts.value_size
                    && facts.size <= if is_small { 192 } else { 256 }
                    // A single query of grouped heads is turned into several: another way, with copies of its own.
                    && (facts.groups == 1 || facts.queries > 1)
            }
            // It takes no groups: as many key heads as query heads.
            SdpaBackend::Efficient => on_device && facts.groups == 1,
            SdpaBackend::Cpu => facts.dtype.is_float() && facts.size == facts.value_size,
        }
    }
}

#[cfg(test)]
impl Facts {
    /// A causal node that every backend of a CUDA device accepts.
    fn example() -> Facts {
        Facts {
            dtype: DType::BF16,
            batch: 2,
            heads: 4,
            groups: 1,
            queries: 128,
            keys: 128,
            size: 64,
            value_size: 64,
            scale: 0.125,
            causal: true,
            has_window: false,
            has_softcap: false,
            has_bias: false,
            has_segments: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an H200 chooses after a change of the facts.
    fn chosen(change: impl Fn(&mut Facts)) -> Option<SdpaBackend> {
        chosen_by(90, change)
    }

    fn chosen_by(capability: i64, change: impl Fn(&mut Facts)) -> Option<SdpaBackend> {
        let mut facts = Facts::example();
        change(&mut facts);
        SdpaBackends::cuda(capability, 132).choose(&facts)
    }

    #[test]
    fn what_means_the_same_takes_a_pair() {
        let (flash, efficient) = (Some(SdpaBackend::Flash), Some(SdpaBackend::Efficient));
        assert_eq!(chosen(|_| ()), flash);
        assert_eq!(chosen(|f| f.dtype = DType::F16), flash);
        assert_eq!(chosen(|f| f.groups = 4), flash);
        assert_eq!(chosen(|f| (f.causal, f.keys) = (false, 300)), flash);
        assert_eq!(chosen(|f| (f.size, f.value_size) = (256, 256)), flash);
        // Sizes that flash lacks.
        assert_eq!(chosen(|f| (f.size, f.value_size) = (264, 264)), efficient);
        assert_eq!(chosen(|f| (f.size, f.value_size) = (192, 128)), efficient);
        for capability in [80, 86, 90, 100, 121] {
            assert_eq!(chosen_by(capability, |_| ()), flash, "{capability}");
        }
        let wide = |f: &mut Facts| (f.size, f.value_size) = (224, 224);
        assert_eq!(chosen_by(86, wide), efficient);
        assert_eq!(chosen_by(120, wide), efficient);
        assert_eq!(chosen_by(80, wide), flash);
    }

    #[test]
    fn what_does_not_takes_tiles() {
        let changes: [fn(&mut Facts); 20] = [
            |f| f.dtype = DType::F32,
            |f| f.dtype = DType::F64,
            |f| f.has_bias = true,
            |f| f.has_segments = true,
            |f| f.has_window = true,
            |f| f.has_softcap = true,
            |f| f.scale = 0.0,
            |f| f.scale = -1.0,
            |f| f.scale = f32::NAN,
            |f| f.keys = 300,
            |f| f.queries = 300,
            |f| (f.size, f.value_size) = (36, 36),
            |f| f.value_size = 60,
            |f| (f.groups, f.value_size) = (2, 128),
            |f| (f.groups, f.queries, f.keys) = (2, 1, 1),
            |f| f.batch = 0,
            |f| (f.queries, f.keys) = (0, 0),
            |f| f.batch = 70_000,
            |f| f.heads = 70_000,
            |f| (f.queries, f.keys) = (1 << 22, 1 << 22),
        ];
        for (i, change) in changes.iter().enumerate() {
            assert_eq!(chosen(change), None, "change {i}");
        }
        for capability in [0, 70, 75, 130] {
            assert_eq!(chosen_by(capability, |_| ()), None, "{capability}");
        }
        assert_eq!(SdpaBackends::default().choose(&Facts::example()), None);
    }

    #[test]
    fn facts_are_read_off_a_node() {
        let attrs = Attrs::new()
            .with("scale", 0.5f32)
            .with("causal", 1)
            .with("window_left", -1)
            .with("window_right", 3)
            .with("softcap", 2.0f32)
            .with("empty_rows", "nan");
        let sized = |dims: &[i64]| Some(Sized::contiguous(DType::F16, dims.to_vec()));
        let ins = [
            sized(&[2, 3, 8, 10, 16]),
            sized(&[2, 3, 2, 11, 16]),
            sized(&[2, 3, 2, 11, 24]),
            sized(&[11]),
            sized(&[11]),
        ];
        let expected = Facts {
            dtype: DType::F16,
            batch: 6,
            heads: 2,
            groups: 4,
            queries: 10,
            keys: 11,
            size: 16,
            value_size: 24,
            scale: 0.5,
            causal: true,
            has_window: true,
            has_softcap: true,
            has_bias: true,
            has_segments: true,
        };
        assert_eq!(Facts::of(&attrs, &ins), Some(expected));
        let flat = [sized(&[10, 16]), sized(&[11, 16]), sized(&[11, 16])];
        let found = Facts::of(&attrs, &flat).unwrap();
        assert_eq!((found.batch, found.heads, found.groups), (1, 1, 1));
        assert!(!found.has_bias && !found.has_segments);
    }
}
