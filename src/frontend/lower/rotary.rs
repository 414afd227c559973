//! `RotaryEmbedding` of ONNX 23 and of ONNX Runtime: pairs of elements are rotated by an angle that depends on the position
//! (RoFormer, arXiv 2104.09864).
//!
//! Exporters write tables [1, sequence, …] where the specification asks for [batch, sequence, …], so tables broadcast here.

use super::call::{Call, Lowered, one};
use ckpt_passes::Result;
use ckpt_passes::ir::ValueId;
use ckpt_passes::ops::EmitExt;

/// Which elements of a head form pairs, and how many of them rotate.
struct Rotation {
    /// Elements 2i and 2i + 1 are a pair if true, else i and i + half.
    interleaved: bool,
    /// Number of leading elements of a head that rotate.
    rotated: i64,
    /// Number of elements of a head.
    size: i64,
}

/// ONNX RotaryEmbedding-23.
pub fn standard(call: &mut Call) -> Lowered {
    let [x, cos, sin] = call.operands(["X", "cos_cache", "sin_cache"])?;
    let heads = call.attr_int("num_heads", 0)?;
    let tables = match call.opt(3) {
        Some(positions) => {
            call.want_rank(positions, &[2], "position_ids")?;
            looked_up(call, [cos, sin], positions)?
        }
        None => [cos, sin],
    };
    if heads <= 0 && call.rank(x) == 3 {
        return Err(call.fail("attribute", "`num_heads` must be given for a 3-D operand"));
    }
    one(rotate(call, x, tables, heads)?)
}

/// `com.microsoft::RotaryEmbedding`. Not supported: ragged batches and a scale.
pub fn ort(call: &mut Call) -> Lowered {
    let [x, positions, cos, sin] =
        call.operands(["input", "position_ids", "cos_cache", "sin_cache"])?;
    call.refuse_attr("is_packed_batching")?;
    let scale = call.attr_float("scale", 1.0)?;
    if scale != 1.0 {
        return Err(call.unsupported(format!("`scale` = {scale}")));
    }
    call.want_rank(x, &[3, 4], "input")?;
    call.want_rank(positions, &[1, 2], "position_ids")?;
    let mut heads = call.attr_int("num_heads", 0)?;
    if heads <= 0 && call.rank(x) == 3 {
        // Without a number of heads the whole head rotates, and the tables give its width.
        let half = call.size(cos, call.rank(cos) - 1, "the width of the tables")?;
        let hidden = call.size(x, 2, "the hidden size")?;
        if half == 0 || hidden % (2 * half) != 0 {
            return Err(call
                .fail("shape", "the tables do not fit the hidden size")
                .found(format!("{} and {}", call.ty(cos), call.ty(x))));
        }
        heads = hidden / (2 * half);
    }
    let positions = if call.rank(positions) == 1 {
        // One number for all samples: the position at which the sequence starts.
        let axis = call.rank(x) - 2;
        let along = call.positions(x, axis)?;
        let along = call.add(along, positions)?;
        call.unsqueeze(along, &[0])?
    } else {
        positions
    };
    let tables = looked_up(call, [cos, sin], positions)?;
    one(rotate(call, x, tables, heads)?)
}

/// Returns the rows of both tables at these positions: [batch, sequence, half].
fn looked_up(call: &mut Call, tables: [ValueId; 2], rows: ValueId) -> Result<[ValueId; 2]> {
    for table in tables {
        call.want_rank(table, &[2], "cos_cache and sin_cache with position_ids")?;
    }
    let [cos, sin] = tables;
    Ok([call.gather(cos, rows, 0)?, call.gather(sin, rows, 0)?])
}

/// Rotates [batch, heads, sequence, size] or [batch, sequence, heads·size] by tables [batch or 1, sequence, half].
fn rotate(call: &mut Call, x: ValueId, tables: [ValueId; 2], heads: i64) -> Result<ValueId> {
    call.want_rank(x, &[3, 4], "X")?;
    let flat = call.rank(x) == 3;
    let last = if flat { 2 } else { 3 };
    let mut size = call.size(x, last, "the size of a head")?;
    if flat {
        size = call.head_size(x, size, heads)?;
    }
    let rotated = match call.attr_int("rotary_embedding_dim", 0)? {
        0 => size,
        n => n,
    };
    if rotated % 2 != 0 || !(0..=size).contains(&rotated) {
        return Err(call
            .fail(
                "attribute",
                "`rotary_embedding_dim` has to be even and no wider than a head",
            )
            .found(format!("{rotated} of {size}")));
    }
    let shape = Rotation {
        interleaved: call.attr_flag("interleaved")?,
        rotated,
        size,
    };
    // The tables are the same for each head.
    let axis = if flat { 2 } else { 1 };
    let mut wide = tables;
    for table in &mut wide {
        call.want_rank(*table, &[3], "cos_cache and sin_cache without position_ids")?;
        let half = call.size(*table, 2, "the width of the tables")?;
        if half != rotated / 2 {
            return Err(call
                .fail("shape", "the tables do not have half the rotated width")
                .expected((rotated / 2).to_string())
                .found(call.ty(*table).to_string()));
        }
        *table = call.unsqueeze(*table, &[axis])?;
    }
    let apart = if flat {
        call.reshape(x, &[0, 0, heads, size])?
    } else {
        x
    };
    let mut y = rotate_heads(call, apart, wide, &shape)?;
    if flat {
        y = call.reshape(y, &[0, 0, heads * size])?;
    }
    Ok(y)
}

/// Rotates the heads [batch, heads, sequence, size] by the rows of tables [rows, half] at `positions` [batch, sequence], or
/// at 0, 1, …. Elements beyond twice the width of the tables stay.
pub(super) fn rotated_at(
    call: &mut Call,
    x: ValueId,
    tables: [ValueId; 2],
    positions: Option<ValueId>,
    interleaved: bool,
) -> Result<ValueId> {
    let positions = match positions {
        Some(given) => {
            call.want_rank(given, &[2], "position_ids")?;
            given
        }
        None => {
            let along = call.positions(x, 2)?;
            call.unsqueeze(along, &[0])?
        }
    };
    let mut wide = looked_up(call, tables, positions)?;
    let size = call.size(x, 3, "the size of a head")?;
    let rotated = 2 * call.size(tables[0], 1, "the width of the tables")?;
    if rotated > size {
        return Err(call
            .fail("shape", "the tables are wider than half a head")
            .found(format!("{rotated} of {size}")));
    }
    for table in &mut wide {
        *table = call.unsqueeze(*table, &[1])?;
    }
    let shape = Rotation {
        interleaved,
        rotated,
        size,
    };
    rotate_heads(call, x, wide, &shape)
}

/// Rotates the last axis of a 4-D operand.
fn rotate_heads(
    call: &mut Call,
    x: ValueId,
    tables: [ValueId; 2],
    shape: &Rotation,
) -> Result<ValueId> {
    let half = shape.rotated / 2;
    let rest = shape.size - shape.rotated;
    let (a, b, still) = if shape.interleaved {
        let (moving, still) = match rest {
            0 => (x, None),
            rest => {
                let pieces = call.split(x, &[shape.rotated, rest], -1)?;
                (pieces[0], Some(pieces[1]))
            }
        };
        let mut dims = call.axis_vectors(x, 0..3)?;
        dims.push(call.ints(&[half, 2]));
        let pairs = call.reshape_to_all(moving, &dims)?;
        let pieces = call.split(pairs, &[1, 1], -1)?;
        (pieces[0], pieces[1], still)
    } else {
        let mut sizes = vec![half, half];
        sizes.extend((rest > 0).then_some(rest));
        let pieces = call.split(x, &sizes, -1)?;
        (pieces[0], pieces[1], pieces.get(2).copied())
    };
    let [mut cos, mut sin] = tables;
    if shape.interleaved {
        (cos, sin) = (call.unsqueeze(cos, &[-1])?, call.unsqueeze(sin, &[-1])?);
    }
    let (ac, bs) = (call.mul(a, cos)?, call.mul(b, sin)?);
    let (bc, ad) = (call.mul(b, cos)?, call.mul(a, sin)?);
    let first = call.sub(ac, bs)?;
    let second = call.add(bc, ad)?;
    let mut pieces = vec![first, second];
    if shape.interleaved {
        let pairs = call.concat(&pieces, -1)?;
        let mut dims = call.axis_vectors(pairs, 0..3)?;
        dims.push(call.ints(&[shape.rotated]));
        pieces = vec![call.reshape_to_all(pairs, &dims)?];
    }
    pieces.extend(still);
    match pieces.as_slice() {
        [all] => Ok(*all),
        pieces => call.concat(pieces, -1),
    }
}
