//! A copy of a graph that computes in float64: what the same model gives without the rounding of its own types.
//!
//! In and out: any phase from `Typed`. Element types, constants and attributes change; ops, order and names stay. It serves as
//! the reference for graphs in 16 bits, whose own results differ from each other as much as from the truth.

use super::infer::infer;
use crate::error::{Error, Result};
use crate::ir::edit::NewNode;
use crate::ir::{Attr, Attrs, DType, Graph, SecondaryMap, Tensor, Ty, ValueId};

fn wide(dtype: DType) -> DType {
    match dtype.is_float() {
        true => DType::F64,
        false => dtype,
    }
}

fn wide_type(ty: &Ty) -> Ty {
    Ty::new(wide(ty.dtype), ty.dims.clone())
}

/// Returns a tensor of floats in float64, which holds them exactly; other tensors as they are.
///
/// # Errors
/// A tensor whose file is absent.
pub fn wide_tensor(name: &str, tensor: &Tensor) -> Result<Tensor> {
    if !tensor.dtype.is_float() || tensor.dtype == DType::F64 {
        return Ok(tensor.clone());
    }
    let numbers = (0..tensor.elements() as usize).map(|i| tensor.get_f64(i));
    let bytes: Option<Vec<[u8; 8]>> = numbers.map(|x| x.map(f64::to_le_bytes)).collect();
    let Some(bytes) = bytes else {
        let what = format!("the file that holds `{name}` is absent");
        return Err(
            Error::environment("weights", what).help("put the external data file beside the model")
        );
    };
    Ok(Tensor::new(DType::F64, tensor.dims.clone(), bytes.concat()))
}

/// Returns the graph in float64.
///
/// # Errors
/// A weight whose file is absent; an op that takes no float64.
pub fn widened(graph: &Graph) -> Result<Graph> {
    let mut out = Graph::new(&graph.name);
    let mut new: SecondaryMap<ValueId, Option<ValueId>> =
        SecondaryMap::new(graph.value_bound(), None);
    for id in graph.inputs() {
        let value = graph.value(*id);
        new[*id] = Some(out.add_input(&value.name, value.ty.as_ref().map(wide_type)));
    }
    for (id, value) in graph.inits() {
        if let Some(tensor) = value.tensor() {
            let tensor = wide_tensor(&value.name, tensor)?;
            new[id] = Some(out.add_init(&value.name, tensor));
        }
    }
    for id in graph.order() {
        let node = graph.node(*id);
        let mut attrs = Attrs::new();
        for (name, attr) in node.attrs.iter() {
            let attr = match attr {
                Attr::DType(dtype) => Attr::DType(wide(*dtype)),
                Attr::Tensor(tensor) => Attr::Tensor(wide_tensor(name, tensor)?),
                other => other.clone(),
            };
            attrs.set(name, attr);
        }
        let outs = node.outs.iter().map(|v| graph.value(*v));
        let made = out.add_node(NewNode {
            op: node.op,
            name: &node.name,
            attrs,
            ins: node.ins.iter().map(|v| v.and_then(|v| new[v])).collect(),
            outs: outs
                .map(|v| (v.name.clone(), v.ty.as_ref().map(wide_type)))
                .collect(),
            loc: node.loc.clone(),
            role: node.role,
        });
        let results = out.node(made).outs.clone();
        for (old, result) in node.outs.iter().zip(results) {
            new[*old] = Some(result);
        }
    }
    out.set_outputs(graph.outputs().iter().filter_map(|v| new[*v]).collect());
    infer(&mut out)?;
    out.phase = graph.phase;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    #[test]
    fn types_constants_and_attributes_are_wide_and_numbers_stay() {
        let source = "graph @g typed (%x: bf16[n, 2], %i: i64[n]) -> (%y, %j) {
  init %w : bf16[2] = [0.5, -1.5]
  init %table : f16[3, 2] = [1, 2, 3, 4, 5, 6]
  %a = Mul %x, %w : bf16[n, 2]
  %wide = Cast %a {to = f32} : f32[n, 2]
  %row = Gather %table, %i {axis = 0} : f16[n, 2]
  %other = Cast %row {to = f32} : f32[n, 2]
  %y = Add %wide, %other : f32[n, 2]
  %j = Neg %i : i64[n]
}
";
        let graph = text::parse(source).unwrap();
        let wide = widened(&graph).unwrap();
        crate::ir::verify::verify(&wide).unwrap();
        for (_, value) in wide.values() {
            let is_whole = ["i", "j"].contains(&value.name.as_str());
            let expected = if is_whole { DType::I64 } else { DType::F64 };
            assert_eq!(value.ty().dtype, expected, "{}", value.name);
        }
        let w = wide.find_value("w").unwrap();
        let numbers: Vec<Option<f64>> = (0..2)
            .map(|i| wide.value(w).tensor().unwrap().get_f64(i))
            .collect();
        assert_eq!(numbers, [Some(0.5), Some(-1.5)]);
        assert_eq!(wide.order().len(), graph.order().len());
    }
}
