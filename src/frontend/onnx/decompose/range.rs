//! `Range` of floating-point bounds (ONNX Range-11, -27).
//!
//! How many elements it has is known only of integers. Bounds that are whole numbers, or casts of integers, as exporters
//! write `arange(n)` of floats, are counted as integers, and the numbers cast: the same elements while they are below what
//! the type tells apart. 16-bit bounds are added up in float32, which `stash_type` of opset 27 says.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, DType, Def, ValueId};
use ckpt_passes::ops::cast::CAST;
use ckpt_passes::ops::fill::RANGE;

const FLOAT: i64 = 1;

pub fn range(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let bounds = [
        call.need(0, "start")?,
        call.need(1, "limit")?,
        call.need(2, "delta")?,
    ];
    let stash = call.opt_int("stash_type")?;
    let dtype = call.dtype(bounds[0]);
    let alike = bounds.iter().all(|v| call.dtype(*v) == dtype);
    let narrow = matches!(dtype, DType::F16 | DType::BF16);
    if narrow && stash.is_some_and(|s| s != FLOAT) {
        return Err(call.unsupported(format!("`stash_type` = {}", stash.unwrap_or_default())));
    }
    // The cast of an integer to 16 bits may be another number.
    let exact = |w: &Whole| !narrow || matches!(w, Whole::Number(_));
    let whole: Option<Vec<Whole>> = bounds
        .iter()
        .map(|v| Whole::of(call, *v).filter(exact))
        .collect();
    let counted = match whole {
        _ if !alike => None, // The row refuses it.
        Some(whole) if dtype.is_float() => {
            let ints = whole.into_iter().map(|w| w.emit(call));
            Some(ints.collect::<Result<Vec<_>>>()?)
        }
        _ if narrow => {
            let wide = bounds.iter().map(|v| call.b.cast(*v, DType::F32));
            Some(wide.collect::<Result<Vec<_>>>()?)
        }
        // The attribute says nothing about the other types.
        _ => stash.map(|_| bounds.to_vec()),
    };
    let Some(counted) = counted else {
        return Ok(None);
    };
    let all = call.b.emit(&RANGE, &counted, Attrs::new())?;
    Ok(Some(vec![Out::Value(call.b.cast(all, dtype)?)]))
}

/// What makes a floating-point scalar a whole number.
enum Whole {
    Number(i64),
    /// The integer that was cast.
    Cast(ValueId),
}

impl Whole {
    fn of(call: &Call, v: ValueId) -> Option<Whole> {
        if call.b.rank(v) != 0 {
            return None;
        }
        let graph = &*call.b.graph;
        if let Def::Init(tensor) = &graph.value(v).def {
            let number = tensor.get_f64(0)?;
            // Above, doubles do not tell neighbours apart.
            let fits = number.fract() == 0.0 && number.abs() <= (1_i64 << 53) as f64;
            return fits.then_some(Whole::Number(number as i64));
        }
        let node = graph.node(graph.def_node(v)?);
        let from = node.ins.first().copied().flatten()?;
        let integer = call.dtype(from).int_range().is_some();
        (std::ptr::eq(node.op, &CAST) && integer).then_some(Whole::Cast(from))
    }

    /// As an int64 scalar.
    fn emit(self, call: &mut Call) -> Result<ValueId> {
        match self {
            Whole::Number(n) => Ok(call.b.int(n)),
            Whole::Cast(from) => call.b.cast(from, DType::I64),
        }
    }
}
