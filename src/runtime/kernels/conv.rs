//! Convolutions as products of matrices, in the blocks and buffers that `ops::conv` plans.
//!
//! The kernels allocate only these buffers and results. Sums have one order, whatever the number of threads.

use super::context::*;
use super::product::Product;
use ckpt_passes::ir::op::contiguous_strides;
use ckpt_passes::ops::conv::plan::{Buffers, ConvPlan};
use ckpt_passes::ops::conv::*;

kernels! {
    CONV => conv;
    CONV_TRANSPOSE => conv_transpose;
    CONV_INPUT_GRAD => input_grad;
    CONV_WEIGHT_GRAD => weight_grad;
}

/// `target = a·b`, or `target += a·b`.
fn product(target: &Tensor, a: &Tensor, b: &Tensor, add: bool) -> Result<()> {
    Product::onto(target, a, b, 1.0, add).write()
}

/// Returns a buffer as a row-major tensor of these sizes.
fn laid(buffer: &Tensor, size: &[i64]) -> Result<Tensor> {
    strided(buffer, size, &contiguous_strides(size))
}

/// The buffers of a plan, in the compute type, and the loops over groups and blocks.
struct Work<'a> {
    plan: &'a ConvPlan,
    weights: Option<Tensor>,
    image: Option<Tensor>,
    windows: Option<Tensor>,
    filtered: Option<Tensor>,
    sum: Option<Tensor>,
}

impl<'a> Work<'a> {
    fn new(plan: &'a ConvPlan, buffers: Buffers, like: &Tensor) -> Result<Work<'a>> {
        let kind = compute_kind(like.kind());
        let new = |n: i64| empty(&[n], kind, like.device());
        let buffer = |n: i64| (n > 0).then(|| new(n)).transpose();
        Ok(Work {
            plan,
            weights: buffer(buffers.weights)?,
            image: buffer(buffers.image)?,
            windows: buffer(buffers.windows)?,
            filtered: buffer(buffers.filtered)?,
            sum: buffer(buffers.sum)?,
        })
    }

    /// Returns the weights of each group as a matrix [filters, window].
    fn weights(&self, w: &Tensor) -> Result<Vec<Tensor>> {
        let plan = self.plan;
        let source = match &self.weights {
            Some(buffer) => {
                copy_into(&laid(buffer, &w.size())?, w)?;
                buffer
            }
            None => w,
        };
        let (rows, columns) = (plan.filters, plan.window());
        let all = strided(
            source,
            &[plan.groups, rows, columns],
            &[rows * columns, columns, 1],
        )?;
        Ok((0..plan.groups).map(|g| all.select(0, g)).collect())
    }

    fn padded_size(&self) -> Vec<i64> {
        let plan = self.plan;
        let mut size = vec![plan.groups * plan.channels];
        size.extend(plan.windows.padded(&plan.image));
        size
    }

    /// Returns the buffer for a padded sample, and the part inside the padding.
    fn padded(&self) -> Result<Option<(Tensor, Tensor)>> {
        let Some(buffer) = &self.image else {
            return Ok(None);
        };
        let size = self.padded_size();
        let all = laid(buffer, &size)?;
        let mut inner = all.alias();
        for (axis, extent) in self.plan.image.iter().enumerate() {
            inner = inner.narrow(axis as i64 + 1, self.plan.windows.before[axis], *extent);
        }
        Ok(Some((all, inner)))
    }

    /// Returns the first row and the number of rows of each block.
    fn blocks(&self) -> impl Iterator<Item = (i64, i64)> + use<> {
        blocks(self.plan.places[0], self.plan.rows)
    }

    /// Returns the windows of a block on one group of a padded sample: [channels, kernel…, places…].
    fn windows_of(&self, image: &Tensor, group: i64, (first, rows): (i64, i64)) -> Result<Tensor> {
        let (plan, w) = (self.plan, &self.plan.windows);
        let image = image.narrow(0, group * plan.channels, plan.channels).slice(
            1,
            first * w.strides[0],
            None,
            1,
        );
        let strides = image.stride();
        let mut size = vec![plan.channels];
        size.extend(&w.kernel);
        size.push(rows);
        size.extend(&plan.places[1..]);
        let along = |steps: &[i64]| -> Vec<i64> {
            let axes = steps.iter().zip(&strides[1..]);
            axes.map(|(step, stride)| step * stride).collect()
        };
        let mut walk = vec![strides[0]];
        walk.extend(along(&w.dilations));
        walk.extend(along(&w.strides));
        strided(&image, &size, &walk)
    }

    /// Returns the buffer for a block of windows as a matrix [window, places] and as [channels, kernel…, places…].
    fn block(&self, rows: i64) -> Result<Option<(Tensor, Tensor)>> {
        let Some(buffer) = &self.windows else {
            return Ok(None);
        };
        let (plan, w) = (self.plan, &self.plan.windows);
        let mut size = vec![plan.channels];
        size.extend(&w.kernel);
        size.push(rows);
        size.extend(&plan.places[1..]);
        let matrix = [plan.window(), rows * plan.row()];
        Ok(Some((laid(buffer, &matrix)?, laid(buffer, &size)?)))
    }

    /// Returns a block's windows as a matrix, copied into the buffer or in place.
    fn columns(&self, image: &Tensor, group: i64, block: (i64, i64)) -> Result<Tensor> {
        let lying = self.windows_of(image, group, block)?;
        if let Some((matrix, windows)) = self.block(block.1)? {
            copy_into(&windows, &lying)?;
            return Ok(matrix);
        }
        let size = [self.plan.window(), block.1 * self.plan.row()];
        strided(&lying, &size, &[lying.stride()[0], 1])
    }

    /// Returns the filtered side of a sample as matrices [filters, places], one per group, in place or copied.
    fn filtered_of(&self, y: &Tensor, sample: i64) -> Result<Tensor> {
        let plan = self.plan;
        let places = plan.places[0] * plan.row();
        let size = [plan.groups, plan.filters, places];
        let strides = contiguous_strides(&size);
        let one = y.select(0, sample);
        match &self.filtered {
            None => strided(&one, &size, &strides),
            Some(buffer) => {
                let whole = one.size();
                copy_into(&laid(buffer, &whole)?, &one)?;
                strided(buffer, &size, &strides)
            }
        }
    }
}

/// Fails if an operand is smaller than the kernel, which typing cannot see for symbolic sizes.
fn check_places(cx: &KernelCx, plan: &ConvPlan) -> Result<()> {
    let room = plan.windows.padded(&plan.image);
    let fits = room
        .iter()
        .zip(plan.windows.extents())
        .all(|(size, extent)| *size >= extent);
    if fits && plan.windows.places(&plan.image) == plan.places {
        return Ok(());
    }
    let found = format!(
        "an image of {:?}, kernels of {:?}",
        plan.image, plan.windows.kernel
    );
    Err(cx
        .shape_error("the windows do not fit the operands")
        .expected(format!("{:?} windows", plan.places))
        .found(found))
}

fn conv(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, w, bias) = (cx.x(0)?, cx.x(1)?, cx.opt(2));
    let plan = ConvPlan::new(cx.attrs, &sized(x)?, &w.size(), None);
    check_places(cx, &plan)?;
    check_channels(cx, x.size()[1], w.size()[1] * plan.groups)?;
    let mut size = vec![plan.samples, plan.groups * plan.filters];
    size.extend(&plan.places);
    let out = empty(&size, x.kind(), x.device())?;
    if plan.is_empty() {
        filled(&out, bias)?;
        return Ok(vec![out]);
    }
    let work = Work::new(&plan, plan.forward(&sized(w)?), x)?;
    let weights = work.weights(w)?;
    let padded = work.padded()?;
    if let Some((all, _)) = &padded {
        zero(all)?;
    }
    let places = plan.places[0] * plan.row();
    let results = out.view([plan.samples, plan.groups, plan.filters, places]);
    for sample in 0..plan.samples {
        let mut image = x.select(0, sample);
        if let Some((all, inner)) = &padded {
            copy_into(inner, &image)?;
            image = all.alias();
        }
        for group in 0..plan.groups {
            let result = results.select(0, sample).select(0, group);
            let offset = bias.map(|b| b.narrow(0, group * plan.filters, plan.filters).unsqueeze(1));
            for block in work.blocks() {
                let columns = work.columns(&image, group, block)?;
                let here = result.narrow(1, block.0 * plan.row(), block.1 * plan.row());
                let target = match &work.filtered {
                    None => here.alias(),
                    Some(buffer) => laid(buffer, &here.size())?,
                };
                if let Some(offset) = &offset {
                    copy_into(&target, offset)?;
                }
                product(
                    &target,
                    &weights[group as usize],
                    &columns,
                    offset.is_some(),
                )?;
                if work.filtered.is_some() {
                    copy_into(&here, &target)?;
                }
            }
        }
    }
    Ok(vec![out])
}

fn check_channels(cx: &KernelCx, found: i64, expected: i64) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(cx
        .shape_error("channels and weights do not fit")
        .expected(expected.to_string())
        .found(found.to_string()))
}

/// Fills a result [samples, channels, …] with the bias, or with zeros.
fn filled(out: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    match bias {
        Some(bias) => copy_into(out, &over_channels(bias, out.dim(), 1)),
        None => zero(out),
    }
}

/// Returns a vector as a tensor of rank `rank`, along the axis of the channels.
fn over_channels(bias: &Tensor, rank: usize, axis: usize) -> Tensor {
    let mut size = vec![1; rank];
    size[axis] = bias.size()[0];
    bias.reshape(size)
}

/// Adds windows of `y` back into an image of that size, which starts as the bias or zeros.
fn spread(
    cx: &KernelCx,
    y: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    size: &[i64],
) -> Result<Vec<Tensor>> {
    let out = empty(size, y.kind(), y.device())?;
    let plan = ConvPlan::new(cx.attrs, &sized(&out)?, &w.size(), Some(&y.size()[2..]));
    check_places(cx, &plan)?;
    check_channels(cx, y.size()[1], w.size()[0])?;
    if plan.is_empty() {
        filled(&out, bias)?;
        return Ok(vec![out]);
    }
    let work = Work::new(&plan, plan.backward(&sized(y)?, &sized(w)?), y)?;
    let weights = work.weights(w)?;
    let padded = work.padded()?;
    for sample in 0..plan.samples {
        let result = out.select(0, sample);
        let image = match &padded {
            Some((all, _)) => all.alias(),
            None => result.alias(),
        };
        match bias {
            Some(bias) => copy_into(&image, &over_channels(bias, image.dim(), 0))?,
            None => zero(&image)?,
        }
        let filtered = work.filtered_of(y, sample)?;
        for group in 0..plan.groups {
            let turned = weights[group as usize].transpose(0, 1);
            let of_group = filtered.select(0, group);
            for block in work.blocks() {
                let values = of_group.narrow(1, block.0 * plan.row(), block.1 * plan.row());
                let lying = work.windows_of(&image, group, block)?;
                match work.block(block.1)? {
                    Some((matrix, windows)) => {
                        product(&matrix, &turned, &values, false)?;
                        add_back(&plan, &lying, &windows)?;
                    }
                    None => {
                        let size = [plan.window(), block.1 * plan.row()];
                        let target = strided(&lying, &size, &[lying.stride()[0], 1])?;
                        product(&target, &turned, &values, true)?;
                    }
                }
            }
        }
        if let Some((_, inner)) = &padded {
            copy_into(&result, inner)?;
        }
    }
    Ok(vec![out])
}

/// Adds windows [channels, kernel…, places…] to the image. Axes on which windows do not overlap are added at once, the others
/// one kernel element at a time.
fn add_back(plan: &ConvPlan, lying: &Tensor, windows: &Tensor) -> Result<()> {
    let axes = 0..plan.windows.kernel.len();
    let shared: Vec<usize> = axes.filter(|axis| plan.windows.overlaps(*axis)).collect();
    let turns: i64 = shared
        .iter()
        .map(|axis| plan.windows.kernel[*axis])
        .product();
    for turn in 0..turns {
        let (mut to, mut from, mut rest) = (lying.alias(), windows.alias(), turn);
        for axis in &shared {
            let (size, at) = (plan.windows.kernel[*axis], *axis as i64 + 1);
            to = to.narrow(at, rest % size, 1);
            from = from.narrow(at, rest % size, 1);
            rest /= size;
        }
        add_into(&to, &from)?;
    }
    Ok(())
}

fn input_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let size = cx.ints(2)?;
    spread(cx, cx.x(0)?, cx.x(1)?, None, &size)
}

fn conv_transpose(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, w) = (cx.x(0)?, cx.x(1)?);
    let windows = plan::Windows::of(cx.attrs, &w.size()[2..]);
    let more = cx.attrs.opt_ints("output_padding");
    let mut size = vec![x.size()[0], w.size()[1] * cx.attrs.int("group")];
    for (axis, places) in x.size()[2..].iter().enumerate() {
        let full = (places - 1) * windows.strides[axis] + windows.extents()[axis];
        let more = more.map_or(0, |m| m[axis]);
        size.push((full + more - windows.before[axis] - windows.after[axis]).max(0));
    }
    spread(cx, x, w, cx.opt(2), &size)
}

fn weight_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, dy, size) = (cx.x(0)?, cx.x(1)?, cx.ints(2)?);
    let plan = ConvPlan::new(cx.attrs, &sized(x)?, &size, Some(&dy.size()[2..]));
    check_places(cx, &plan)?;
    check_channels(cx, x.size()[1], size[1] * plan.groups)?;
    check_channels(cx, dy.size()[1], size[0])?;
    let out = empty(&size, x.kind(), x.device())?;
    if plan.is_empty() {
        zero(&out)?;
        return Ok(vec![out]);
    }
    let work = Work::new(&plan, plan.of_weights(&sized(dy)?), x)?;
    let padded = work.padded()?;
    if let Some((all, _)) = &padded {
        zero(all)?;
    }
    let total = match &work.sum {
        Some(buffer) => laid(buffer, &size)?,
        None => out.alias(),
    };
    zero(&total)?;
    let sums = total.view([plan.groups, plan.filters, plan.window()]);
    for sample in 0..plan.samples {
        let mut image = x.select(0, sample);
        if let Some((all, inner)) = &padded {
            copy_into(inner, &image)?;
            image = all.alias();
        }
        let filtered = work.filtered_of(dy, sample)?;
        for group in 0..plan.groups {
            let sum = sums.select(0, group);
            let of_group = filtered.select(0, group);
            for block in work.blocks() {
                let columns = work.columns(&image, group, block)?;
                let values = of_group.narrow(1, block.0 * plan.row(), block.1 * plan.row());
                product(&sum, &values, &columns.transpose(0, 1), true)?;
            }
        }
    }
    if work.sum.is_some() {
        copy_into(&out, &total)?;
    }
    Ok(vec![out])
}
