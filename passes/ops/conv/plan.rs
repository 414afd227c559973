//! How convolutions reach BLAS: the windows of one sample, laid out as the columns of a matrix, a block at a time.
//!
//! With W the weights as a matrix [filters, window] and X the windows as one [window, places], a convolution is W·X, its
//! gradient of the image Wᵀ·dY with every window added back where it lay, and that of the weights dY·Xᵀ. One sample and
//! one group at a time, so many places that a block stays small. What a kernel takes for that is decided here alone:
//! the memory model counts it and the kernels make exactly it. 16-bit operands are computed in float32.

use crate::rule::compute_type;
use ckpt_ir::Attrs;
use ckpt_ir::layout::count;
use ckpt_ir::op::Sized;

/// The most elements of a block of windows, unless one row of places is more.
const BLOCK_ELEMENTS: i64 = 1 << 20;

/// How windows lie on the spatial axes of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Elements of a window, for each spatial axis.
    pub kernel: Vec<i64>,
    /// Distance of two windows.
    pub strides: Vec<i64>,
    /// Distance of two elements of a window.
    pub dilations: Vec<i64>,
    /// Zeros put before and after each axis.
    pub before: Vec<i64>,
    /// Padding after each spatial axis.
    pub after: Vec<i64>,
}

impl Windows {
    /// Those of a node whose attributes were checked, for a kernel of these sizes.
    pub fn of(attrs: &Attrs, kernel: &[i64]) -> Windows {
        let n = kernel.len();
        let each = |name: &str, default: i64| {
            attrs
                .opt_ints(name)
                .map_or(vec![default; n], <[i64]>::to_vec)
        };
        let mut pads = vec![0; 2 * n];
        if attrs.opt_str("auto_pad") != Some("VALID")
            && let Some(given) = attrs.opt_ints("pads")
        {
            pads.copy_from_slice(given);
        }
        let after = pads.split_off(n);
        Windows {
            kernel: kernel.to_vec(),
            strides: each("strides", 1),
            dilations: each("dilations", 1),
            before: pads,
            after,
        }
    }

    /// Elements from the first to the last of a window along each axis.
    pub fn extents(&self) -> Vec<i64> {
        let axes = self.kernel.iter().zip(&self.dilations);
        axes.map(|(k, d)| (k - 1) * d + 1).collect()
    }

    /// The sizes of an image with its padding.
    pub fn padded(&self, image: &[i64]) -> Vec<i64> {
        let pads = self.before.iter().zip(&self.after);
        image
            .iter()
            .zip(pads)
            .map(|(i, (b, a))| i + b + a)
            .collect()
    }

    /// How many windows lie along each axis of an image; at least 0.
    pub fn places(&self, image: &[i64]) -> Vec<i64> {
        let room = self.padded(image).into_iter().zip(self.extents());
        room.zip(&self.strides)
            .map(|((size, extent), stride)| match size - extent {
                free if free >= 0 => free / stride + 1,
                _ => 0,
            })
            .collect()
    }

    /// Returns true if any axis is padded.
    pub fn has_pads(&self) -> bool {
        self.before.iter().chain(&self.after).any(|p| *p != 0)
    }

    /// Whether windows of neighbouring places share elements along an axis.
    pub fn overlaps(&self, axis: usize) -> bool {
        self.strides[axis] < self.extents()[axis]
    }

    /// Windows of one element, one for each element of the image.
    fn is_pointwise(&self) -> bool {
        let ones = |v: &[i64]| v.iter().all(|n| *n == 1);
        ones(&self.kernel) && ones(&self.strides) && !self.has_pads()
    }
}

/// How a convolution or one of its gradients runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvPlan {
    /// The geometry of the windows.
    pub windows: Windows,
    /// Number of samples.
    pub samples: i64,
    /// Number of groups of channels.
    pub groups: i64,
    /// Channels of the image and of the filtered side, of one group.
    pub channels: i64,
    /// Number of filters.
    pub filters: i64,
    /// Spatial sizes of the image, and places of windows on it.
    pub image: Vec<i64>,
    /// Windows along each spatial axis.
    pub places: Vec<i64>,
    /// Rows of places, along the first spatial axis, that make a block.
    pub rows: i64,
    /// Whether operands are widened to compute.
    pub narrow: bool,
    /// Whether the windows of a sample are its channels as they lie, or lie there.
    pub direct: bool,
    element_bytes: u64,
}

/// Elements taken by each buffer of a kernel; 0 for one it does not need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// The weights, row-major, in the type computed in.
    pub weights: i64,
    /// One sample with its padding, in that type.
    pub image: i64,
    /// A block of windows.
    pub windows: i64,
    /// The filtered side of one sample, row-major, or of one block.
    pub filtered: i64,
    /// The gradient of the weights, in the type computed in.
    pub sum: i64,
}

impl ConvPlan {
    /// For an image [samples, channels, …], weights [filters, channels a group, …] and places as counted or given.
    pub fn new(attrs: &Attrs, image: &Sized, weights: &[i64], places: Option<&[i64]>) -> ConvPlan {
        let windows = Windows::of(attrs, &weights[2..]);
        let spatial = image.dims[2..].to_vec();
        let places = places.map_or_else(|| windows.places(&spatial), <[i64]>::to_vec);
        let groups = attrs.int("group");
        let narrow = compute_type(image.dtype) != image.dtype;
        let window = weights[1] * count(&windows.kernel);
        let row = window * count(&places[1..]);
        ConvPlan {
            samples: image.dims[0],
            groups,
            channels: weights[1],
            filters: weights[0] / groups.max(1),
            rows: (BLOCK_ELEMENTS / row.max(1)).clamp(1, places[0].max(1)),
            narrow,
            direct: windows.is_pointwise() && !narrow && image.is_contiguous(),
            element_bytes: compute_type(image.dtype).size_bytes(),
            image: spatial,
            places,
            windows,
        }
    }

    /// Whether there is nothing to multiply: the result is zeros, or the bias.
    pub fn is_empty(&self) -> bool {
        let sizes = [self.samples, self.groups, self.channels, self.filters];
        sizes.contains(&0) || self.windows.kernel.contains(&0) || self.places.contains(&0)
    }

    /// Elements of a window.
    pub fn window(&self) -> i64 {
        self.channels * count(&self.windows.kernel)
    }

    /// Places in one row of them.
    pub fn row(&self) -> i64 {
        count(&self.places[1..])
    }

    fn padded_sample(&self) -> i64 {
        self.groups * self.channels * count(&self.windows.padded(&self.image))
    }

    fn block(&self) -> i64 {
        match self.direct {
            true => 0,
            false => self.window() * self.rows * self.row(),
        }
    }

    fn weights(&self, weights: &Sized) -> i64 {
        match self.narrow || !weights.is_contiguous() {
            true => weights.elements() as i64,
            false => 0,
        }
    }

    fn filtered_sample(&self, filtered: &Sized) -> i64 {
        match self.narrow || !filtered.is_contiguous() {
            true => self.groups * self.filters * count(&self.places),
            false => 0,
        }
    }

    /// What filtering an image takes.
    pub fn forward(&self, weights: &Sized) -> Buffers {
        if self.is_empty() {
            return Buffers::default();
        }
        Buffers {
            weights: self.weights(weights),
            image: if self.windows.has_pads() {
                self.padded_sample()
            } else {
                0
            },
            windows: self.block(),
            filtered: if self.narrow {
                self.filters * self.rows * self.row()
            } else {
                0
            },
            sum: 0,
        }
    }

    /// What adding windows back into an image takes; the image is the result.
    pub fn backward(&self, filtered: &Sized, weights: &Sized) -> Buffers {
        if self.is_empty() {
            return Buffers::default();
        }
        Buffers {
            weights: self.weights(weights),
            image: if self.windows.has_pads() || self.narrow {
                self.padded_sample()
            } else {
                0
            },
            windows: self.block(),
            filtered: self.filtered_sample(filtered),
            sum: 0,
        }
    }

    /// What the gradient of the weights takes.
    pub fn of_weights(&self, filtered: &Sized) -> Buffers {
        if self.is_empty() {
            return Buffers::default();
        }
        let sum = self.groups * self.filters * self.window();
        Buffers {
            weights: 0,
            image: if self.windows.has_pads() {
                self.padded_sample()
            } else {
                0
            },
            windows: self.block(),
            filtered: self.filtered_sample(filtered),
            sum: if self.narrow { sum } else { 0 },
        }
    }

    /// Bytes of buffers, all of which are alive together.
    pub fn temp_bytes(&self, buffers: Buffers) -> u64 {
        let all = [
            buffers.weights,
            buffers.image,
            buffers.windows,
            buffers.filtered,
            buffers.sum,
        ];
        all.iter().map(|n| *n as u64).sum::<u64>() * self.element_bytes
    }

    /// Two a multiplication and addition.
    pub fn flops(&self) -> u64 {
        let filters = (self.samples * self.groups * self.filters) as u64;
        let places = count(&self.places) as u64;
        2u64.saturating_mul(filters)
            .saturating_mul(places)
            .saturating_mul(self.window() as u64)
    }

    /// Bytes of all windows written and read once, where they are laid out anew.
    pub fn window_bytes(&self) -> u64 {
        if self.direct || self.is_empty() {
            return 0;
        }
        let all = self.samples * self.groups * self.window() * count(&self.places);
        2 * all as u64 * self.element_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_ir::DType;

    #[test]
    fn places_are_those_of_the_formula() {
        let attrs = Attrs::new()
            .with("strides", vec![2, 1])
            .with("dilations", vec![1, 3])
            .with("pads", vec![1, 0, 2, 0]);
        let w = Windows::of(&attrs, &[3, 2]);
        assert_eq!(w.extents(), [3, 4]);
        assert_eq!(w.padded(&[6, 9]), [9, 9]);
        assert_eq!(w.places(&[6, 9]), [4, 6]);
        assert_eq!(w.places(&[0, 9]), [1, 6]);
        assert_eq!(w.places(&[6, 3]), [4, 0]);
        assert!(w.overlaps(0) && w.overlaps(1));
        let valid = Windows::of(&attrs.with("auto_pad", "VALID"), &[3, 2]);
        assert!(!valid.has_pads());
    }

    #[test]
    fn blocks_stay_small_but_hold_a_row() {
        let attrs = Attrs::new().with("group", 1);
        let image = |h, w| Sized::contiguous(DType::F32, vec![2, 64, h, w]);
        let plan = ConvPlan::new(&attrs, &image(66, 66), &[8, 64, 3, 3], None);
        assert_eq!(plan.places, [64, 64]);
        assert_eq!(plan.rows, (1 << 20) / (64 * 9 * 64));
        let wide = ConvPlan::new(&attrs, &image(5, 100_000), &[8, 64, 3, 3], None);
        assert_eq!(wide.rows, 1);
        let pointwise = ConvPlan::new(&attrs, &image(7, 7), &[8, 64, 1, 1], None);
        assert!(pointwise.direct);
        let weights = Sized::contiguous(DType::F32, vec![8, 64, 1, 1]);
        assert_eq!(pointwise.temp_bytes(pointwise.forward(&weights)), 0);
    }
}
