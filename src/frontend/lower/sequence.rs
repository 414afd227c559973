//! Sequences of tensors whose number the file fixes: `SplitToSequence`-24, `ConcatFromSequence`-11.
//!
//! There are no sequences in the graph. The reader of ONNX keeps the elements of each, so these recipes take and return
//! elements.

use super::call::{Call, Lowered, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Dim, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::concat::{CONCAT, SPLIT};

/// The largest number of elements of a sequence.
const MAX_ELEMENTS: i64 = 1 << 16;

/// `SplitToSequence`: one result for each piece along an axis.
pub fn split(call: &mut Call) -> Lowered {
    let x = call.need(0, "input")?;
    let lengths = call.opt(1);
    let axis = call.attr_int("axis", 0)?;
    let keeps = call.attr_int("keepdims", 1)? != 0;
    let axis = call.axis_of(axis, call.rank(x))?;
    let (count, cuts) = match lengths {
        None => {
            let count = call.size(x, axis, "an axis of which each index is an element")?;
            let ones = vec![1; fitting(call, count)?];
            (count, call.ints(&ones))
        }
        Some(each) if call.rank(each) == 0 => equal(call, x, axis, each)?,
        Some(list) => {
            call.want_rank(list, &[1], "split")?;
            let count = call.size(list, 0, "the number of elements of a sequence")?;
            (count, call.cast(list, DType::I64)?)
        }
    };
    let count = fitting(call, count)?;
    let attrs = Attrs::new().with("axis", axis as i64);
    let mut pieces = call.emit_n(&SPLIT, vec![Some(x), Some(cuts)], attrs, count)?;
    if lengths.is_none() && !keeps {
        for piece in &mut pieces {
            *piece = call.squeeze(*piece, &[axis as i64])?;
        }
    }
    Ok(Some(pieces.into_iter().map(Out::Value).collect()))
}

/// Returns a number of elements that a sequence may have.
fn fitting(call: &Call, count: i64) -> Result<usize> {
    let fits = usize::try_from(count)
        .ok()
        .filter(|_| (1..=MAX_ELEMENTS).contains(&count));
    fits.ok_or_else(|| {
        call.fail("shape", "a sequence of this length is not supported")
            .expected(format!("1 to {MAX_ELEMENTS}"))
            .found(count.to_string())
    })
}

/// Returns the number and the lengths of pieces of `each` elements, of which the last one may be shorter.
fn equal(call: &mut Call, x: ValueId, axis: usize, each: ValueId) -> Result<(i64, ValueId)> {
    let size = call.dims(x)[axis].clone();
    let known = call
        .contents
        .get(each)
        .and_then(|ints| ints.first())
        .cloned();
    let count = known
        .as_ref()
        .filter(|each| each.bounds().0.is_some_and(|lo| lo >= 1));
    let count = count.and_then(|each| size.ceil_div(each).as_const());
    let (Some(each_size), Some(count)) = (known, count) else {
        return Err(call
            .fail("shape", "the number of elements of a sequence is not known")
            .found(format!("pieces of an axis of {size} elements"))
            .help("export with fixed sizes along that axis"));
    };
    fitting(call, count)?;
    let before = each_size.mul(&Dim::from(count - 1));
    if let (Some(each), Some(last)) = (each_size.as_const(), size.sub(&before).as_const()) {
        let mut lengths = vec![each; count as usize];
        lengths[count as usize - 1] = last;
        return Ok((count, call.ints(&lengths)));
    }
    let each = call.cast(each, DType::I64)?;
    let each = call.reshape(each, &[1])?;
    let whole = call.axis_vector(x, axis)?;
    let others = call.ints(&[count - 1]);
    let before = call.mul(each, others)?;
    let last = call.sub(whole, before)?;
    let mut lengths = vec![each; count as usize - 1];
    lengths.push(last);
    Ok((count, call.concat(&lengths, 0)?))
}

/// `ConcatFromSequence`: the elements one after another along an axis, or along a new one.
pub fn concat(call: &mut Call) -> Lowered {
    let mut elements = Vec::new();
    while let Some(element) = call.opt(elements.len()) {
        elements.push(element);
    }
    let Some(first) = elements.first().copied() else {
        return Err(call.fail("shape", "an empty sequence is concatenated"));
    };
    let is_new = call.attr_flag("new_axis")?;
    let axis = call.attr_int("axis", 0)?;
    let axis = call.axis_of(axis, call.rank(first) + usize::from(is_new))? as i64;
    if is_new {
        for element in &mut elements {
            *element = call.unsqueeze(*element, &[axis])?;
        }
    }
    let attrs = Attrs::new().with("axis", axis);
    let y = call.emit(&CONCAT, &elements, attrs)?;
    Ok(Some(vec![Out::Value(y)]))
}
