//! Layer and RMS normalisation and their gradients.
//!
//! libtorch's layer norm takes a scale of exactly one row. For 16-bit operands statistics are in float32; its kernels take
//! parameters in float32 too on a CPU, and in the operands' type on a CUDA device. Any other scale is applied after
//! normalisation. libtorch has no backward of RMS norm on the CPU, so it is computed op by op.

use super::context::*;
use super::reduce::{sum, sum_to};
use ckpt_passes::ops::norm::*;
use ckpt_torch::Ret;

kernels! {
    LAYER_NORM => layer_norm;
    LAYER_NORM_GRAD => layer_norm_grad;
    RMS_NORM => rms_norm;
    RMS_NORM_GRAD => rms_norm_grad;
}

/// Returns the sizes of the statistics: 1 on the normalised axes.
fn stats_size(size: &[i64], axis: usize) -> Vec<i64> {
    let kept = size[..axis].iter().copied();
    kept.chain(size[axis..].iter().map(|_| 1)).collect()
}

/// Returns the type in which libtorch's kernels take the parameters of an operand.
fn parameter_kind(x: &Tensor) -> Kind {
    match x.device().is_cuda() {
        true => x.kind(),
        false => compute_kind(x.kind()),
    }
}

fn layer_norm(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = dense(cx.x(0)?)?;
    let size = x.size();
    let axis = cx.axis(size.len());
    let (scale, bias) = (cx.x(1)?, cx.opt(2));
    let kind = compute_kind(x.kind());
    let row = &size[axis..];
    let fused =
        scale_is_row(cx.attrs, &size, &scale.size()) && bias.is_none_or(|b| b.size() == row);
    let (weight, offset) = match fused {
        true => (
            Some(dense_as(scale, parameter_kind(&x))?),
            bias.map(|b| dense_as(b, parameter_kind(&x))).transpose()?,
        ),
        // Without a scale in float32, the statistics have the type of `x`.
        false if parameter_kind(&x) != x.kind() => {
            let ones = empty(row, kind, x.device())?;
            fill(&ones, &scalar(kind, 1.0)?)?;
            (Some(ones), None)
        }
        false => (None, None),
    };
    let epsilon = cx.number("epsilon");
    let [y, mean, inv_std] = normalised(&x, axis, weight.as_ref(), offset.as_ref(), epsilon, kind)?;
    if !fused {
        mul_into(&y, scale)?;
        if let Some(bias) = bias {
            add_into(&y, bias)?;
        }
    }
    let mut outs = vec![y];
    for statistic in [&mean, &inv_std].into_iter().take(cx.n_outs - 1) {
        outs.push(dense_as(statistic, Kind::Float)?);
    }
    Ok(outs)
}

/// Returns result, mean and 1/σ of `aten::native_layer_norm`; the statistics have type `kind`.
fn normalised(
    x: &Tensor,
    axis: usize,
    weight: Option<&Tensor>,
    offset: Option<&Tensor>,
    epsilon: f64,
    kind: Kind,
) -> Result<[Tensor; 3]> {
    let size = x.size();
    if x.numel() == 0 {
        // libtorch requires a row of at least one element; the statistics of an empty row are NaN.
        let stats = empty(&stats_size(&size, axis), kind, x.device())?;
        fill(&stats, &scalar(kind, f64::NAN)?)?;
        return Ok([empty_like(x)?, stats.copy(), stats]);
    }
    let args = args![x, &size[axis..], weight, offset, epsilon];
    call_tensors("aten::native_layer_norm", args)
}

/// With x̂ = (x − μ)·s and g = dy·scale: dx = s·(g − mean g − x̂·mean(g·x̂)), dscale = Σ dy·x̂, dB = Σ dy. libtorch's
/// kernel computes dx. The sums are computed here, because the memory of libtorch's sums depends on the number of threads.
fn layer_norm_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let scale = cx.x(2)?;
    let (target, size) = (cx.x(1)?.kind(), cx.x(1)?.size());
    let (axis, kind) = (cx.axis(size.len()), compute_kind(target));
    let wants = cx.attrs.ints("wants");
    let device = scale.device();
    if size.contains(&0) {
        let zeros = wants.iter().map(|want| {
            let out = match want {
                0 => empty(&size, target, device)?,
                _ => empty(&scale.size(), scale.kind(), device)?,
            };
            zero(&out).map(|()| out)
        });
        return zeros.collect();
    }
    let fused = scale_is_row(cx.attrs, &size, &scale.size());
    let (dy, x) = match fused {
        true => (dense(cx.x(0)?)?, dense(cx.x(1)?)?),
        false => (dense_as(cx.x(0)?, kind)?, dense_as(cx.x(1)?, kind)?),
    };
    let weight = dense_as(scale, if fused { parameter_kind(&x) } else { kind })?;
    let gamma = fused.then_some(&weight);
    let (mean, inv_std) = match (cx.opt(3), cx.opt(4)) {
        (Some(mean), Some(inv_std)) => (dense_as(mean, kind)?, dense_as(inv_std, kind)?),
        _ => {
            let epsilon = cx.number("epsilon");
            let [_, mean, inv_std] = normalised(&x, axis, gamma, None, epsilon, kind)?;
            (mean, inv_std)
        }
    };
    let rows: i64 = size[..axis].iter().product();
    // The kernel of a CPU adds up 16-bit terms in 16 bits.
    let is_exact = x.device().is_cuda() || x.kind() == kind;
    let by_library = is_exact && sums_by_library(cx.device, fused, rows);
    if let Some(weight) = gamma.filter(|_| by_library) {
        let mask = [0, 1, 2].map(|slot| wants.contains(&slot));
        let row = &size[axis..];
        // A bias has the sizes of the scale, and its values do not matter.
        let args = args![&dy, &x, row, &mean, &inv_std, weight, weight, &mask];
        let results = call_n("aten::native_layer_norm_backward", args)?;
        let mut outs = Vec::new();
        for (slot, result) in results.into_iter().enumerate() {
            match result {
                Ret::Tensor(gradient) if mask[slot] => {
                    let like = if slot == 0 { target } else { scale.kind() };
                    outs.push(dense_as(&gradient, like)?);
                }
                _ => {}
            }
        }
        return Ok(outs);
    }
    let mut outs = Vec::new();
    for want in wants {
        outs.push(match (want, fused) {
            (0, _) => {
                let g = match fused {
                    true => dy.alias(),
                    false => {
                        let g = empty_as(&dy, kind)?;
                        mul_to(&dy, &weight, &g)?;
                        g
                    }
                };
                let (row, only_dx) = (&size[axis..], &[true, false, false]);
                let args = args![&g, &x, row, &mean, &inv_std, gamma, Arg::None, only_dx];
                let [dx] = call_tensors("aten::native_layer_norm_backward", args)?;
                dense_as(&dx, target)?
            }
            (_, true) => {
                let flat = |t: &Tensor| t.reshape([rows, -1]);
                let normal = (flat(&x), flat(&mean), flat(&inv_std));
                let normal = (*want == 1).then_some(&normal);
                row_sums(cx, &flat(&dy), normal, kind, scale)?
            }
            (1, false) => {
                let terms = empty(&size, kind, device)?;
                write("aten::sub.out", args![&x, &mean, 1, &terms])?;
                mul_into(&terms, &inv_std)?;
                mul_into(&terms, &dy)?;
                summed_like(&terms, scale)?
            }
            _ => summed_like(&dy, scale)?,
        });
    }
    Ok(outs)
}

fn mul_to(a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    write("aten::mul.out", args![a, b, out])
}

/// Returns Σ dy, or Σ dy·(x − μ)·s with `normal` = (x, μ, s), over rows, in sizes and type of `like`. Computes the terms of a
/// few rows at a time (`ops::norm::rows_at_once`), so that they take little memory.
fn row_sums(
    cx: &KernelCx,
    dy: &Tensor,
    normal: Option<&(Tensor, Tensor, Tensor)>,
    kind: Kind,
    like: &Tensor,
) -> Result<Tensor> {
    let (rows, width, device) = (dy.size()[0], dy.size()[1], dy.device());
    let step = rows_at_once(cx.device, rows, width);
    let out = empty(&like.size(), like.kind(), device)?;
    let total = match like.kind() == kind {
        true => out.view([width]),
        false => empty(&[width], kind, device)?,
    };
    let part = (step < rows)
        .then(|| empty(&[width], kind, device))
        .transpose()?;
    let narrow = dy.kind() != kind;
    let block = || empty(&[step, width], kind, device);
    let terms = (narrow || normal.is_some()).then(block).transpose()?;
    let wide_dy = (narrow && normal.is_some()).then(block).transpose()?;
    for (start, count) in blocks(rows, step) {
        let these = |t: &Tensor| t.narrow(0, start, count);
        let first = |t: &Tensor| t.narrow(0, 0, count);
        let mut summands = these(dy);
        if let Some(terms) = &terms {
            let terms = first(terms);
            match normal {
                None => copy_into(&terms, &summands)?,
                Some((x, mean, inv_std)) => {
                    if let Some(wide) = &wide_dy {
                        copy_into(&first(wide), &summands)?;
                        summands = first(wide);
                    }
                    match narrow {
                        true => {
                            copy_into(&terms, &these(x))?;
                            sub_into(&terms, &these(mean))?;
                        }
                        false => write("aten::sub.out", args![&these(x), &these(mean), 1, &terms])?,
                    }
                    mul_into(&terms, &these(inv_std))?;
                    mul_into(&terms, &summands)?;
                }
            }
            summands = terms;
        }
        match &part {
            Some(part) if start > 0 => {
                sum(&summands, &[0], false, part)?;
                add_into(&total, part)?;
            }
            _ => sum(&summands, &[0], false, &total)?,
        }
    }
    if like.kind() != kind {
        copy_into(&out.view([width]), &total)?;
    }
    Ok(out)
}

/// Returns the sum over the axes along which `like` was broadcast, in the type of `like`.
fn summed_like(x: &Tensor, like: &Tensor) -> Result<Tensor> {
    let out = empty_like(like)?;
    if like.kind() == x.kind() {
        sum_to(x, &out)?;
    } else {
        let total = empty_as(like, x.kind())?;
        sum_to(x, &total)?;
        copy_into(&out, &total)?;
    }
    Ok(out)
}

/// Returns the mean over the normalised axes, which are kept.
fn row_means(x: &Tensor, axis: usize) -> Result<Tensor> {
    let out = empty(&stats_size(&x.size(), axis), x.kind(), x.device())?;
    let axes: Vec<i64> = (axis..x.dim()).map(|a| a as i64).collect();
    sum(x, &axes, true, &out)?;
    let n: i64 = x.size()[axis..].iter().product();
    div_into(&out, &scalar(x.kind(), n as f64)?)?;
    Ok(out)
}

/// Returns 1/√(mean x² + ε) over the normalised axes. Overwrites `buffer`, which may be `x`.
fn root_factor(x: &Tensor, buffer: &Tensor, axis: usize, epsilon: f64) -> Result<Tensor> {
    mul_to(x, x, buffer)?;
    let factor = row_means(buffer, axis)?;
    add_into(&factor, &scalar(x.kind(), epsilon)?)?;
    write("aten::rsqrt_", args![&factor])?;
    Ok(factor)
}

fn joint(a: Kind, b: Kind) -> Kind {
    match a == Kind::Double || b == Kind::Double {
        true => Kind::Double,
        false => Kind::Float,
    }
}

/// The blocks of rows in which RMS norm is computed, and the parts of tensors that belong to them.
struct RmsRows {
    rows: i64,
    step: i64,
    /// The first normalised axis of a block.
    axis: usize,
}

impl RmsRows {
    /// Chooses the blocks. Where no buffer is needed, one block has all rows.
    fn new(cx: &KernelCx, operands: &[&Tensor], scale: &Tensor, needs_buffer: bool) -> RmsRows {
        let size = operands[0].size();
        let axis = cx.axis(size.len());
        let rows = size[..axis].iter().product();
        let is_row_major = operands.iter().all(|x| x.is_contiguous());
        let most = rms_rows_at_once(cx.device, cx.attrs, &size, &scale.size(), is_row_major);
        let step = if needs_buffer { most } else { rows };
        let is_split = step < rows;
        RmsRows {
            rows,
            step,
            axis: if is_split { 1 } else { axis },
        }
    }

    fn is_split(&self) -> bool {
        self.step < self.rows
    }

    /// The first row and the number of rows of each block.
    fn blocks(&self) -> impl Iterator<Item = (i64, i64)> {
        // A tensor without rows is one block, too.
        blocks(self.rows.max(1), self.step.max(1))
    }

    /// Returns a buffer as large as a block of `like`.
    fn buffer(&self, like: &Tensor, kind: Kind) -> Result<Tensor> {
        match self.is_split() {
            true => empty(
                &[self.step, like.numel() as i64 / self.rows],
                kind,
                like.device(),
            ),
            false => empty_as(like, kind),
        }
    }

    /// Returns the first `count` rows of a buffer.
    fn first(&self, buffer: &Tensor, count: i64) -> Tensor {
        match self.is_split() {
            true => buffer.narrow(0, 0, count),
            false => buffer.alias(),
        }
    }

    /// Returns the rows of a block.
    fn these(&self, x: &Tensor, (start, count): (i64, i64)) -> Tensor {
        match self.is_split() {
            true => x.view([self.rows, -1]).narrow(0, start, count),
            false => x.alias(),
        }
    }

    /// Returns the scale in a shape that multiplies a block.
    fn scale(&self, scale: &Tensor) -> Tensor {
        match self.is_split() {
            true => scale.reshape([-1]),
            false => scale.alias(),
        }
    }
}

fn rms_norm(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, scale) = (cx.x(0)?, cx.x(1)?);
    let kind = joint(x.kind(), scale.kind());
    let epsilon = cx.number("epsilon");
    let out = empty(&x.size(), scale.kind(), x.device())?;
    let is_narrow = scale.kind() != kind;
    let rows = RmsRows::new(cx, &[x], scale, is_narrow);
    let buffer = is_narrow.then(|| rows.buffer(x, kind)).transpose()?;
    let scale = rows.scale(&laid_as(scale, kind)?);
    for block in rows.blocks() {
        let (x, out) = (rows.these(x, block), rows.these(&out, block));
        let work = match &buffer {
            Some(buffer) => rows.first(buffer, block.1),
            None => out.alias(),
        };
        if x.kind() == kind {
            let factor = root_factor(&x, &work, rows.axis, epsilon)?;
            mul_to(&x, &factor, &work)?;
        } else {
            copy_into(&work, &x)?;
            let factor = root_factor(&work, &work, rows.axis, epsilon)?;
            copy_into(&work, &x)?;
            mul_into(&work, &factor)?;
        }
        mul_into(&work, &scale)?;
        if is_narrow {
            copy_into(&out, &work)?;
        }
    }
    Ok(vec![out])
}

/// With r the factor and g = dy·scale: dx = r·(g − x̂·mean(g·x̂)), dscale = Σ dy·x̂. Two buffers suffice, because x̂ is
/// computed twice. The first buffer is the result where the types allow.
fn rms_norm_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (dy, x, scale) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let kind = joint(x.kind(), scale.kind());
    let wants = cx.attrs.ints("wants");
    let rows = RmsRows::new(cx, &[x, dy], scale, true);
    let dx = wants
        .contains(&0)
        .then(|| empty_as(x, x.kind()))
        .transpose()?;
    let dscale = wants.contains(&1).then(|| empty_like(scale)).transpose()?;
    let total = match &dscale {
        Some(dscale) if scale.kind() != kind => Some(empty_as(scale, kind)?),
        other => other.as_ref().map(Tensor::alias),
    };
    let part = match &total {
        Some(total) if rows.is_split() => Some(empty_like(total)?),
        _ => None,
    };
    let wide_scale = match dx {
        Some(_) => rows.scale(&laid_as(scale, kind)?),
        None => scale.alias(),
    };
    let writes_over = dx.as_ref().filter(|_| x.kind() == kind);
    let buffer = match writes_over {
        Some(_) => None,
        None => Some(rows.buffer(x, kind)?),
    };
    let normal = rows.buffer(x, kind)?;
    for block in rows.blocks() {
        let (x, dy) = (rows.these(x, block), rows.these(dy, block));
        let dx = dx.as_ref().map(|dx| rows.these(dx, block));
        let normal = rows.first(&normal, block.1);
        let work = match (&buffer, &dx) {
            (Some(buffer), _) => rows.first(buffer, block.1),
            (None, Some(dx)) => dx.alias(),
            (None, None) => return Err(Error::bug("kernel", "a gradient without a buffer")),
        };
        copy_into(&normal, &x)?;
        let factor = root_factor(&normal, &work, rows.axis, cx.number("epsilon"))?;
        mul_into(&normal, &factor)?;
        if let Some(total) = &total {
            copy_into(&work, &dy)?;
            mul_into(&work, &normal)?;
            match &part {
                Some(part) if block.0 > 0 => {
                    sum(&work, &[0], false, &part.view([-1]))?;
                    add_into(total, part)?;
                }
                Some(_) => sum(&work, &[0], false, &total.view([-1]))?,
                None => sum_to(&work, total)?,
            }
        }
        if let Some(dx) = &dx {
            copy_into(&work, &dy)?;
            mul_into(&work, &wide_scale)?;
            mul_into(&normal, &work)?;
            let along = row_means(&normal, rows.axis)?;
            copy_into(&normal, &x)?;
            mul_into(&normal, &factor)?;
            mul_into(&normal, &along)?;
            sub_into(&work, &normal)?;
            mul_into(&work, &factor)?;
            if dx.kind() != kind {
                copy_into(dx, &work)?;
            }
        }
    }
    if let (Some(dscale), Some(total)) = (&dscale, &total)
        && scale.kind() != kind
    {
        copy_into(dscale, total)?;
    }
    Ok(dx.into_iter().chain(dscale).collect())
}

/// Returns the tensor itself if it is of type `kind`, whatever its strides; else a row-major copy of that type.
fn laid_as(x: &Tensor, kind: Kind) -> Result<Tensor> {
    match x.kind() == kind {
        true => Ok(x.alias()),
        false => copied_as(x, kind),
    }
}
