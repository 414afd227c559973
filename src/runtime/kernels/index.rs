//! Lookups. ONNX allows negative indices and libtorch does not, so indices are wrapped in a copy, which the rows declare.

use super::context::*;
use ckpt_passes::ops::index::*;

kernels! {
    GATHER => gather;
    GATHER_GRAD => gather_grad;
    GATHER_ELEMENTS => gather_elements;
    GATHER_ND => gather_nd;
    NON_ZERO => non_zero;
}

/// Returns indices into an axis of size `n`, all in `0..n`, as int64. Always makes a new row-major tensor, so that the memory
/// does not depend on the data.
pub fn wrapped(cx: &KernelCx, indices: &Tensor, n: i64) -> Result<Tensor> {
    let at = copied_as(indices, Kind::Int64)?;
    if let (Some(deferred), true) = (cx.deferred, n > 0 && at.numel() > 0) {
        let op = cx.op.name;
        deferred.defer(&at, Box::new(move |low, high| in_range(op, n, low, high)))?;
        // Indices out of range are reported later and must not read out of bounds.
        write("aten::clamp_", args![&at, -n, n - 1])?;
        wrap(&at, n)?;
        return Ok(at);
    }
    let found = Vec::<i64>::try_from(at.view([-1])).map_err(|e| cx.bug(format!("indices: {e}")))?;
    let (Some(low), Some(high)) = (found.iter().min(), found.iter().max()) else {
        return Ok(at);
    };
    in_range(cx.op.name, n, *low, *high)?;
    if *low < 0 {
        wrap(&at, n)?;
    }
    Ok(at)
}

fn in_range(op: &str, n: i64, low: i64, high: i64) -> Result<()> {
    if low >= -n && high < n {
        return Ok(());
    }
    Err(
        Error::model("index", format!("{op}: an index is out of range"))
            .expected(format!("{}..{n}", -n))
            .found(format!("{low}..={high}")),
    )
}

fn wrap(at: &Tensor, n: i64) -> Result<()> {
    let n = scalar(Kind::Int64, n as f64)?;
    write("aten::remainder_.Tensor", args![at, &n])
}

/// Writes `values` at row-major places of `out`, or adds them there. libtorch's own deterministic kernels make the host wait for
/// a check of the places.
pub fn put(out: &Tensor, at: &Tensor, values: &Tensor, add: bool) -> Result<()> {
    let flat = call("aten::view", args![out, &[-1]])?;
    put_along(&flat, 0, at, values, add)
}

/// As [`put`], for places along one axis.
pub fn put_along(out: &Tensor, axis: usize, at: &Tensor, values: &Tensor, add: bool) -> Result<()> {
    let mut places = vec![None; axis];
    places.push(Some(at));
    write(
        "aten::_index_put_impl_",
        args![out, &places, values, add, true],
    )
}

/// Returns the elements in row-major order along one axis; a view where the strides allow one.
pub fn flat(x: &Tensor) -> Tensor {
    x.reshape([-1])
}

fn gather(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (data, indices) = (cx.x(0)?, cx.x(1)?);
    let size = data.size();
    let axis = cx.axis(size.len());
    let at = flat(&wrapped(cx, indices, size[axis])?);
    let mut dims = size[..axis].to_vec();
    dims.extend(indices.size());
    dims.extend(&size[axis + 1..]);
    let out = empty(&dims, data.kind(), data.device())?;
    let mut lines = size.clone();
    lines[axis] = at.numel() as i64;
    let target = out.view(lines.as_slice());
    // libtorch copies an operand that is not row-major along axis 1, but along no other axis.
    let aside = axis == 1 && !data.is_contiguous();
    let (data, target) = match aside {
        true => (data.unsqueeze(0), target.unsqueeze(0)),
        false => (data.alias(), target),
    };
    write(
        "aten::index_select.out",
        args![&data, (axis + usize::from(aside)) as i64, &at, &target],
    )?;
    Ok(vec![out])
}

/// Adds rows of `dy` to zeros, in the order of the indices, so bits are reproducible.
fn gather_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (size, indices, dy) = (cx.ints(0)?, cx.x(1)?, cx.x(2)?);
    let axis = cx.axis(size.len());
    let at = flat(&wrapped(cx, indices, size[axis])?);
    let out = cx.result(&size, dy.kind(), dy.device())?;
    match cx.opt(3) {
        Some(sum) if sum.size() != size => {
            return Err(cx
                .shape_error("the sum is no gradient of the same table")
                .expected(format!("{size:?}"))
                .found(format!("{:?}", sum.size())));
        }
        Some(sum) if sum.data_ptr() == out.data_ptr() => {}
        Some(sum) => copy_into(&out, sum)?,
        None => zero(&out)?,
    }
    let mut rows = size.clone();
    rows[axis] = at.numel() as i64;
    let dy = dy.reshape(rows.as_slice());
    // Along the first or last axis libtorch adds 16-bit numbers in wider buffers, along other axes in place.
    let (mut lines, mut dy) = (out.unsqueeze(0), dy.unsqueeze(0));
    if is_narrow(out.kind()) && axis + 1 == size.len() {
        (lines, dy) = (lines.unsqueeze(-1), dy.unsqueeze(-1));
    }
    if backend(&out).sorts_indices() {
        put_along(&lines, axis + 1, &at, &dy, true)?;
        return Ok(vec![out]);
    }
    write(
        "aten::index_add_",
        args![&lines, axis as i64 + 1, &at, &dy, 1],
    )?;
    Ok(vec![out])
}

fn gather_elements(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (data, indices) = (cx.x(0)?, cx.x(1)?);
    let axis = cx.axis(data.dim());
    let at = wrapped(cx, indices, data.size()[axis])?;
    let out = empty(&at.size(), data.kind(), data.device())?;
    write(
        "aten::gather.out",
        args![data, axis as i64, &at, false, &out],
    )?;
    Ok(vec![out])
}

/// Returns row-major positions of index tuples (last axis of `indices`) in the axes of `size` after `batch_dims`.
pub fn nd_positions(
    cx: &KernelCx,
    indices: &Tensor,
    size: &[i64],
    batch_dims: usize,
) -> Result<Tensor> {
    let tuple = indices.size()[indices.dim() - 1];
    let mut at: Option<Tensor> = None;
    for k in 0..tuple {
        let n = size[batch_dims + k as usize];
        let one = wrapped(cx, &indices.select(-1, k), n)?;
        at = Some(match at {
            None => one,
            Some(sum) => {
                let n = scalar(Kind::Int64, n as f64)?;
                mul_into(&sum, &n)?;
                add_into(&sum, &one)?;
                sum
            }
        });
    }
    Ok(at.unwrap_or_else(|| {
        Tensor::zeros(
            &indices.size()[..indices.dim() - 1],
            (Kind::Int64, indices.device()),
        )
    }))
}

/// ONNX GatherND-13. Batches become one more leading coordinate of the flattened table.
fn gather_nd(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (data, indices) = (cx.x(0)?, cx.x(1)?);
    let batch_dims = cx.attrs.int("batch_dims") as usize;
    let size = data.size();
    let isize = indices.size();
    let tuple = isize[isize.len() - 1] as usize;
    if batch_dims + tuple > size.len() {
        return Err(cx.shape_error(format!("{tuple} coordinates into {size:?}")));
    }
    let batches: i64 = size[..batch_dims].iter().product();
    let rows: i64 = size[batch_dims..batch_dims + tuple].iter().product();
    let width: i64 = size[batch_dims + tuple..].iter().product();
    let mut dims = isize[..isize.len() - 1].to_vec();
    dims.extend(&size[batch_dims + tuple..]);
    let out = empty(&dims, data.kind(), data.device())?;
    let table = data.reshape([batches * rows, width]);
    let at = flat(&nd_positions(cx, indices, &size, batch_dims)?);
    for batch in 1..batches {
        let each = at.numel() as i64 / batches;
        let part = at.narrow(0, batch * each, each);
        let offset = scalar(Kind::Int64, (batch * rows) as f64)?;
        write("aten::add_.Tensor", args![&part, &offset, 1])?;
    }
    let target = out.view([at.numel() as i64, width]);
    write("aten::index_select.out", args![&table, 0, &at, &target])?;
    Ok(vec![out])
}

/// Returns the indices of the non-zero elements: one column per element, one row per axis.
fn non_zero(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let found = call("aten::nonzero", args![cx.x(0)?])?;
    Ok(vec![copied_as(&found.transpose(0, 1), Kind::Int64)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn put_agrees_with_scatter() {
        let zeros = || Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let (places, values) = (
            Tensor::from_slice(&[4i64, 0]),
            Tensor::from_slice(&[1.5f32, 2.0]),
        );
        let out = zeros();
        for (add, expected) in [
            (true, [2.0, 0., 0., 0., 1.5, 0.]),
            (true, [4.0, 0., 0., 0., 3.0, 0.]),
            (false, [2.0, 0., 0., 0., 1.5, 0.]),
        ] {
            put(&out, &places, &values, add).unwrap();
            assert_eq!(
                out,
                Tensor::from_slice(&expected)
                    .view([2, 3])
                    .to_kind(Kind::Float)
            );
        }
        // As rows are added along an axis.
        let rows = Tensor::from_slice(&[1i64, 0, 1]);
        let dy = Tensor::arange(9, (Kind::Float, Device::Cpu)).view([1, 3, 3]);
        let (ours, theirs) = (zeros().unsqueeze(0), zeros().unsqueeze(0));
        put_along(&ours, 1, &rows, &dy, true).unwrap();
        write("aten::index_add_", args![&theirs, 1, &rows, &dy, 1]).unwrap();
        assert_eq!(ours, theirs);
    }
}
