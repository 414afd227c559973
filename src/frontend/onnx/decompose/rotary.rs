//! `RotaryEmbedding` of ONNX 23 and of ONNX Runtime: pairs of elements turned by an angle that depends on the position
//! (paper: RoFormer, arXiv 2104.09864).
//!
//! Exporters write tables [1, sequence, …] where the text asks for [batch, sequence, …]: tables broadcast here.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::ValueId;

/// How the elements of a head pair up, and how many of them turn.
struct Turn {
    /// Elements 2i and 2i + 1 are a pair; else i and i + half.
    interleaved: bool,
    /// How many leading elements of a head turn.
    turned: i64,
    /// Elements of a head.
    size: i64,
}

/// ONNX RotaryEmbedding-23.
pub fn standard(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, cos) = (call.need(0, "X")?, call.need(1, "cos_cache")?);
    let sin = call.need(2, "sin_cache")?;
    let heads = call.int("num_heads", 0)?;
    let tables = match call.opt(3) {
        Some(positions) => {
            call.want_rank(positions, &[2], "position_ids")?;
            looked_up(call, [cos, sin], positions)?
        }
        None => [cos, sin],
    };
    if heads <= 0 && call.b.rank(x) == 3 {
        return Err(call.fail("attribute", "`num_heads` must be given for a 3-D operand"));
    }
    turn(call, x, tables, heads).map(Some)
}

/// `com.microsoft::RotaryEmbedding`. Not supported: ragged batches and a scale.
pub fn ort(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let (x, positions) = (call.need(0, "input")?, call.need(1, "position_ids")?);
    let (cos, sin) = (call.need(2, "cos_cache")?, call.need(3, "sin_cache")?);
    call.refuse_attribute("is_packed_batching")?;
    let scale = call.float("scale", 1.0)?;
    if scale != 1.0 {
        return Err(call.unsupported(format!("`scale` = {scale}")));
    }
    call.want_rank(x, &[3, 4], "input")?;
    call.want_rank(positions, &[1, 2], "position_ids")?;
    let mut heads = call.int("num_heads", 0)?;
    if heads <= 0 && call.b.rank(x) == 3 {
        // Without a number of heads the whole head turns: the tables say how wide it is.
        let half = call.size(cos, call.b.rank(cos) - 1, "the width of the tables")?;
        let hidden = call.size(x, 2, "the hidden size")?;
        if half == 0 || hidden % (2 * half) != 0 {
            return Err(call
                .fail("shape", "the tables do not fit the hidden size")
                .found(format!("{} and {}", call.b.ty(cos), call.b.ty(x))));
        }
        heads = hidden / (2 * half);
    }
    let positions = if call.b.rank(positions) == 1 {
        // One number for all: where the sequence starts.
        let axis = call.b.rank(x) - 2;
        let along = call.positions(x, axis)?;
        let along = call.b.add(along, positions)?;
        call.unsqueeze(along, &[0])?
    } else {
        positions
    };
    let tables = looked_up(call, [cos, sin], positions)?;
    turn(call, x, tables, heads).map(Some)
}

/// The rows of both tables at these positions: [batch, sequence, half].
fn looked_up(call: &mut Call, tables: [ValueId; 2], rows: ValueId) -> Result<[ValueId; 2]> {
    for table in tables {
        call.want_rank(table, &[2], "cos_cache and sin_cache with position_ids")?;
    }
    let [cos, sin] = tables;
    Ok([call.gather_rows(cos, rows)?, call.gather_rows(sin, rows)?])
}

/// Turns [batch, heads, sequence, size] or [batch, sequence, heads·size] by tables [batch or 1, sequence, half].
fn turn(call: &mut Call, x: ValueId, tables: [ValueId; 2], heads: i64) -> Result<Vec<Out>> {
    call.want_rank(x, &[3, 4], "X")?;
    let flat = call.b.rank(x) == 3;
    let last = if flat { 2 } else { 3 };
    let mut size = call.size(x, last, "the size of a head")?;
    if flat {
        if size % heads != 0 {
            return Err(call
                .fail(
                    "shape",
                    format!("{heads} heads do not divide the hidden size"),
                )
                .found(call.b.ty(x).to_string()));
        }
        size /= heads;
    }
    let turned = match call.int("rotary_embedding_dim", 0)? {
        0 => size,
        n => n,
    };
    if turned % 2 != 0 || !(0..=size).contains(&turned) {
        return Err(call
            .fail(
                "attribute",
                "`rotary_embedding_dim` has to be even and no wider than a head",
            )
            .found(format!("{turned} of {size}")));
    }
    let shape = Turn {
        interleaved: call.int("interleaved", 0)? != 0,
        turned,
        size,
    };
    // The axis of the heads: the tables are the same for each.
    let axis = if flat { 2 } else { 1 };
    let mut wide = tables;
    for table in &mut wide {
        call.want_rank(*table, &[3], "cos_cache and sin_cache without position_ids")?;
        let half = call.size(*table, 2, "the width of the tables")?;
        if half != turned / 2 {
            return Err(call
                .fail("shape", "the tables do not have half the width that turns")
                .expected((turned / 2).to_string())
                .found(call.b.ty(*table).to_string()));
        }
        *table = call.unsqueeze(*table, &[axis])?;
    }
    let apart = if flat {
        call.reshape(x, &[0, 0, heads, size])?
    } else {
        x
    };
    let mut y = turn_heads(call, apart, wide, &shape)?;
    if flat {
        y = call.reshape(y, &[0, 0, heads * size])?;
    }
    Ok(vec![Out::Value(y)])
}

/// Turns the heads [batch, heads, sequence, size] by the rows of tables [rows, half] at `positions` [batch, sequence], or
/// at 0, 1, …; elements beyond twice the width of the tables stay.
pub(super) fn turned_at(
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
    let turned = 2 * call.size(tables[0], 1, "the width of the tables")?;
    if turned > size {
        return Err(call
            .fail("shape", "the tables are wider than half a head")
            .found(format!("{turned} of {size}")));
    }
    for table in &mut wide {
        *table = call.unsqueeze(*table, &[1])?;
    }
    let shape = Turn {
        interleaved,
        turned,
        size,
    };
    turn_heads(call, x, wide, &shape)
}

/// Turns the last axis of a 4-D operand.
fn turn_heads(call: &mut Call, x: ValueId, tables: [ValueId; 2], shape: &Turn) -> Result<ValueId> {
    let half = shape.turned / 2;
    let rest = shape.size - shape.turned;
    let (a, b, still) = if shape.interleaved {
        let (moving, still) = match rest {
            0 => (x, None),
            rest => {
                let parts = call.split(x, &[shape.turned, rest], -1)?;
                (parts[0], Some(parts[1]))
            }
        };
        let dims = [
            call.axis_vector(x, 0)?,
            call.axis_vector(x, 1)?,
            call.axis_vector(x, 2)?,
            call.b.ints(&[half, 2]),
        ];
        let dims = call.concat(&dims, 0)?;
        let pairs = call.reshape_to(moving, dims)?;
        let parts = call.split(pairs, &[1, 1], -1)?;
        (parts[0], parts[1], still)
    } else {
        let mut sizes = vec![half, half];
        sizes.extend((rest > 0).then_some(rest));
        let parts = call.split(x, &sizes, -1)?;
        (parts[0], parts[1], parts.get(2).copied())
    };
    let [mut cos, mut sin] = tables;
    if shape.interleaved {
        (cos, sin) = (call.unsqueeze(cos, &[-1])?, call.unsqueeze(sin, &[-1])?);
    }
    let (ac, bs) = (call.b.mul(a, cos)?, call.b.mul(b, sin)?);
    let (bc, ad) = (call.b.mul(b, cos)?, call.b.mul(a, sin)?);
    let first = call.b.sub(ac, bs)?;
    let second = call.b.add(bc, ad)?;
    let mut parts = vec![first, second];
    if shape.interleaved {
        let pairs = call.concat(&parts, -1)?;
        let dims = [
            call.axis_vector(pairs, 0)?,
            call.axis_vector(pairs, 1)?,
            call.axis_vector(pairs, 2)?,
            call.b.ints(&[shape.turned]),
        ];
        let dims = call.concat(&dims, 0)?;
        parts = vec![call.reshape_to(pairs, dims)?];
    }
    parts.extend(still);
    match parts.as_slice() {
        [one] => Ok(*one),
        parts => call.concat(parts, -1),
    }
}
