//! `as_strided`: memory seen through other sizes and strides, such as windows that overlap.
//!
//! The lowering knows where the elements of a tensor lie if it is a view of row-major memory of fixed sizes. The memory is
//! then cut into axes: those that the new view only walks through stay as they are, and one gather reads the others.

use super::super::value::{TensorId, Value};
use super::create::MAX_TABLE;
use super::lowering::{Lowering, View};
use super::signature::{Call, Op, along};
use ckpt_passes::Result;
use ckpt_passes::ir::layout::{
    count, expand_strides, squeeze_strides, transpose_strides, unsqueeze_strides, view_strides,
};
use ckpt_passes::ir::op::contiguous_strides;
use ckpt_passes::ir::{DType, Dim, Tensor};
use ckpt_passes::ops::index::GATHER;
use ckpt_passes::ops::shape::transpose;

pub const OPS: &[Op] = &[(
    "as_strided(self: t, size: I, stride: I, storage_offset: i?)",
    as_strided,
)];

/// Where the elements of a tensor lie.
struct Layout {
    /// The row-major tensor that has the whole memory.
    memory: TensorId,
    dims: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
}

impl Layout {
    /// Returns the layout of a tensor of fixed sizes, where it is known.
    fn of(low: &Lowering, tensor: TensorId) -> Option<Layout> {
        let mut steps = Vec::new();
        let mut memory = tensor;
        while let Some((parent, view)) = low.seen_through(memory) {
            steps.push((memory, view));
            memory = parent;
        }
        if !low.is_dense(memory) {
            return None;
        }
        let dims = fixed(low.dims(memory))?;
        let mut layout = Layout {
            memory,
            strides: contiguous_strides(&dims),
            dims,
            offset: 0,
        };
        for (seen, view) in steps.into_iter().rev() {
            layout.see(seen, &view)?;
            layout.dims = fixed(low.dims(seen))?;
        }
        Some(layout)
    }

    /// Moves on to the tensor `seen` that sees this one through a view.
    fn see(&mut self, seen: TensorId, view: &View) -> Option<()> {
        let indices = |axes: &[i64]| axes.iter().map(|a| *a as usize).collect::<Vec<_>>();
        self.strides = match view {
            View::Reshape(dims) => {
                let dims = fixed(dims)?;
                match view_strides(&self.dims, &self.strides, &dims) {
                    Some(strides) => strides,
                    None => {
                        // PyTorch copies it, row-major.
                        (self.memory, self.offset) = (seen, 0);
                        contiguous_strides(&dims)
                    }
                }
            }
            View::Permute(perm) => transpose_strides(&self.strides, &indices(perm)),
            View::Slice {
                axis, start, step, ..
            } => {
                let mut strides = self.strides.clone();
                self.offset += start.as_const()?.checked_mul(strides[*axis])?;
                strides[*axis] = strides[*axis].checked_mul(*step)?;
                strides
            }
            View::Squeeze(axes) => squeeze_strides(&self.strides, &indices(axes)),
            View::Unsqueeze(axes) => unsqueeze_strides(&self.dims, &self.strides, &indices(axes)),
            View::Expand(dims) => expand_strides(&self.dims, &self.strides, &fixed(dims)?),
            View::Detach => self.strides.clone(),
        };
        Some(())
    }
}

/// Returns true if the axes of a tensor certainly lie in their order in memory, be it with gaps. What kernels make of such
/// tensors is row-major (ATen/TensorIterator.cpp, `reorder_dimensions`).
pub fn is_ordered(low: &Lowering, tensor: TensorId) -> bool {
    let in_order = |layout: Layout| {
        let axes = layout.dims.iter().zip(&layout.strides);
        let moving = axes.filter(|(size, stride)| **size > 1 && **stride > 0);
        moving
            .map(|(_, stride)| *stride)
            .is_sorted_by(|a, b| a >= b)
    };
    low.is_dense(tensor) || Layout::of(low, tensor).is_some_and(in_order)
}

fn fixed(dims: &[Dim]) -> Option<Vec<i64>> {
    dims.iter().map(Dim::as_const).collect()
}

/// An axis of the new view: elements between neighbours, size, and number.
#[derive(Clone, Copy)]
struct Axis {
    stride: i64,
    size: i64,
    at: usize,
}

/// Memory cut into axes: `outer`, the elements that a table selects, and `inner`.
struct Cut {
    outer: Vec<Axis>,
    selected: Vec<Axis>,
    /// Innermost first.
    inner: Vec<Axis>,
    /// The number of elements that the table selects from, and the first one of them.
    elements: i64,
    offset: i64,
}

impl Cut {
    fn new(axes: Vec<Axis>, elements: i64, offset: i64) -> Cut {
        let mut cut = Cut {
            outer: Vec::new(),
            selected: axes,
            inner: Vec::new(),
            elements,
            offset,
        };
        while cut.take_inner() || cut.take_outer() {}
        cut
    }

    /// Takes an axis of which all others step over whole rows.
    fn take_inner(&mut self) -> bool {
        let is_inner = |i: &usize| {
            let axis = self.selected[*i];
            let mut others = self.selected.iter().enumerate().filter(|(j, _)| j != i);
            let whole = |n: i64| n % axis.size == 0;
            axis.stride == 1
                && whole(self.elements)
                && whole(self.offset)
                && others.all(|(_, other)| whole(other.stride))
        };
        let Some(i) = (0..self.selected.len()).find(is_inner) else {
            return false;
        };
        let axis = self.selected.remove(i);
        for other in &mut self.selected {
            other.stride /= axis.size;
        }
        self.elements /= axis.size;
        self.offset /= axis.size;
        self.inner.push(axis);
        true
    }

    /// Takes an axis between whose steps all others stay.
    fn take_outer(&mut self) -> bool {
        let is_outer = |i: &usize| {
            let axis = self.selected[*i];
            let others = self.selected.iter().enumerate().filter(|(j, _)| j != i);
            let last: i64 = others.map(|(_, o)| (o.size - 1) * o.stride).sum();
            axis.stride > 0
                && axis.stride * axis.size == self.elements
                && self.offset + last < axis.stride
        };
        let Some(i) = (0..self.selected.len()).find(is_outer) else {
            return false;
        };
        let axis = self.selected.remove(i);
        self.elements = axis.stride;
        self.outer.push(axis);
        true
    }

    /// Returns the places of the selected elements, row-major.
    fn places(&self) -> Vec<i64> {
        let mut places = vec![self.offset];
        for axis in &self.selected {
            let each = |place: &i64| {
                let place = *place;
                (0..axis.size).map(move |i| place + i * axis.stride)
            };
            places = places.iter().flat_map(each).collect();
        }
        places
    }
}

fn as_strided(c: &mut Call) -> Result<Value> {
    let x = c.tensor("self")?;
    let sizes = c.ints("size")?.unwrap_or_default();
    let strides = c.ints("stride")?.unwrap_or_default();
    let unknown = |c: &Call| {
        c.unsupported("a tensor of which the file does not tell where its elements lie")
            .help("use views of sizes, or unfold; with fixed sizes, call contiguous() before it")
    };
    let Some(layout) = Layout::of(c.low, x) else {
        return Err(unknown(c));
    };
    let elements = fixed(c.low.dims(layout.memory)).map_or(0, |dims| count(&dims));
    if count(&layout.dims) != elements {
        // PyTorch gives no gradient to memory beside the tensor.
        return Err(unknown(c));
    }
    let offset = c.int("storage_offset", layout.offset)?;
    let mut last = Some(offset);
    for (size, stride) in sizes.iter().zip(&strides) {
        let span = (size - 1).max(0).checked_mul(*stride);
        last = span.and_then(|span| last?.checked_add(span));
    }
    let fits = strides.len() == sizes.len()
        && strides.iter().chain(&sizes).all(|n| *n >= 0)
        && offset >= 0
        && last.is_some_and(|last| last < elements);
    if !fits || sizes.contains(&0) {
        return Err(c
            .fail("shape", "the view does not fit the memory of the tensor")
            .expected(format!("{elements} elements"))
            .found(format!("{sizes:?} by {strides:?} from {offset}")));
    }
    let axes = sizes.iter().zip(&strides).enumerate();
    let axes = axes.map(|(at, (size, stride))| Axis {
        stride: *stride,
        size: *size,
        at,
    });
    let walked: Vec<Axis> = axes.filter(|a| a.size > 1 && a.stride > 0).collect();
    let cut = Cut::new(walked, elements, offset);
    read(c, x, layout.memory, &cut, &sizes)
}

/// Reads the memory along a cut, in the sizes of the view.
fn read(c: &mut Call, x: TensorId, memory: TensorId, cut: &Cut, sizes: &[i64]) -> Result<Value> {
    let dims_of = |axes: &mut dyn Iterator<Item = &Axis>| -> Vec<Dim> {
        axes.map(|axis| Dim::from(axis.size)).collect()
    };
    let outer = dims_of(&mut cut.outer.iter());
    let inner = dims_of(&mut cut.inner.iter().rev());
    let mut y = c.low.read(memory)?;
    let apart = [outer.clone(), vec![Dim::from(cut.elements)], inner].concat();
    y = c.low.apply(&View::Reshape(apart), y)?;
    let table = cut
        .selected
        .iter()
        .try_fold(1i64, |n, axis| n.checked_mul(axis.size));
    if table.is_none_or(|n| n > MAX_TABLE) {
        return Err(c.unsupported("a view of this many elements"));
    }
    let places = cut.places();
    let bytes: Vec<u8> = places.iter().flat_map(|n| n.to_le_bytes()).collect();
    let dims: Vec<u64> = cut.selected.iter().map(|a| a.size as u64).collect();
    let name = format!("{}.places", c.low.b.prefix);
    let places = Tensor::new(DType::I64, dims, bytes);
    let places = c.low.b.constant(&name, places);
    y = c.emit_with(&GATHER, &[y, places], along(outer.len()))?;
    // The axes in the order of the view; those of one element or without a stride follow.
    let order = cut
        .outer
        .iter()
        .chain(&cut.selected)
        .chain(cut.inner.iter().rev());
    let mut order: Vec<(usize, i64)> = order.zip(0..).map(|(axis, i)| (axis.at, i)).collect();
    order.sort_unstable();
    y = transpose(&mut c.low.b, y, order.iter().map(|(_, i)| *i).collect())?;
    let walked = |at: usize| order.iter().any(|(own, _)| *own == at);
    let alone: Vec<i64> = (0..sizes.len())
        .filter(|at| !walked(*at))
        .map(|at| at as i64)
        .collect();
    y = c.low.unsqueeze(y, &alone)?;
    let sizes: Vec<Dim> = sizes.iter().map(|n| Dim::from(*n)).collect();
    y = c.low.broadcast_to(y, &sizes)?;
    Ok(Value::Tensor(c.low.perhaps_shared(x, y)))
}
