//! `Range` of floating-point bounds (ONNX Range-11, -27).
//!
//! The number of elements is known only for integers. So bounds that are whole numbers or casts of integers, as exporters
//! write `arange(n)` of floats, are counted as integers, and the results are cast. The elements are the same as long as the
//! type tells whole numbers of that size apart. 16-bit bounds are added up in float32, as `stash_type` of opset 27 says.

use super::call::{Call, Lowered, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Def, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::cast::CAST;
use ckpt_passes::ops::fill::RANGE;

const FLOAT: i64 = 1;

/// `Range` in steps of `delta` from `start` to below `limit`.
pub fn range(call: &mut Call) -> Lowered {
    let bounds = call.operands(["start", "limit", "delta"])?;
    let stash = call.attr_opt_int("stash_type")?;
    let dtype = call.dtype(bounds[0]);
    let alike = bounds.iter().all(|v| call.dtype(*v) == dtype);
    let narrow = matches!(dtype, DType::F16 | DType::BF16);
    if narrow && stash.is_some_and(|s| s != FLOAT) {
        return Err(call.unsupported(format!("`stash_type` = {}", stash.unwrap_or_default())));
    }
    // The cast of an integer to 16 bits may change it.
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
            let wide = bounds.iter().map(|v| call.cast(*v, DType::F32));
            Some(wide.collect::<Result<Vec<_>>>()?)
        }
        // The attribute does not matter to the other types.
        _ => stash.map(|_| bounds.to_vec()),
    };
    let Some(counted) = counted else {
        return Ok(None);
    };
    let all = call.op(&RANGE, &counted)?;
    one(call.cast(all, dtype)?)
}

/// A floating-point scalar that is a whole number.
enum Whole {
    Number(i64),
    /// A cast of this integer.
    Cast(ValueId),
}

impl Whole {
    fn of(call: &Call, v: ValueId) -> Option<Whole> {
        if call.rank(v) != 0 {
            return None;
        }
        let graph = &*call.graph;
        if let Def::Init(tensor) = &graph.value(v).def {
            let number = tensor.get_f64(0)?;
            // Larger doubles do not tell neighbours apart.
            let fits = number.fract() == 0.0 && number.abs() <= (1_i64 << 53) as f64;
            return fits.then_some(Whole::Number(number as i64));
        }
        let node = graph.node(graph.def_node(v)?);
        let from = node.ins.first().copied().flatten()?;
        let integer = call.dtype(from).int_range().is_some();
        (std::ptr::eq(node.op, &CAST) && integer).then_some(Whole::Cast(from))
    }

    /// Returns the number as an int64 scalar.
    fn emit(self, call: &mut Call) -> Result<ValueId> {
        match self {
            Whole::Number(n) => Ok(call.int(n)),
            Whole::Cast(from) => call.cast(from, DType::I64),
        }
    }
}
