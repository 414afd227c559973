//! Result types of the ops in ONNX Runtime's training graphs (contrib operators of onnxruntime 1.19,
//! `orttraining/core/graph/training_op_defs.cc`).
//!
//! Such a graph contains its backward pass and is planned as it is. Its gradient nodes are opaque: they are never
//! differentiated or recomputed, and are written as they were read. Planning needs the types of their results, which the
//! files do not give. An op that is not in the table keeps the types of the file, or has none.

use crate::onnx::proto::NodeProto;
use ckpt_passes::ir::{DType, Dim, Ty};

/// An operand as far as it is known.
pub struct Operand<'a> {
    pub ty: &'a Ty,
    /// The contents of a small integer tensor.
    pub ints: Option<&'a [Dim]>,
}

/// A rule for the type of one result. Numbers are slots of operands.
enum Rule {
    /// The type of this operand.
    Like(usize),
    /// The shape in the first operand, with the element type of the second.
    Shaped(usize, usize),
    /// A vector with one element for each channel, which is axis 1 of the operand.
    Channels(usize),
    /// A vector of one bool.
    Flag,
    /// A bool tensor of the operand's shape.
    Mask(usize),
}

use Rule::{Channels, Flag, Like, Mask, Shaped};

/// Op types with spaces between, and the rules of their results, in order.
const RULES: &[(&str, &[Rule])] = &[
    // The gradient of a pointwise op: (dy, an operand or result of the op, …).
    (
        "AbsGrad BiasFastGeluGrad_dX BiasGeluGrad_dX BitmaskDropoutGrad DropoutGrad EluGrad FakeQuantGrad FastGeluGrad \
         GeluGrad HardSigmoidGrad LeakyReluGrad LogSoftmaxGrad LogSoftmaxGrad_13 QuickGeluGrad ReluGrad ScaledSum \
         SigmoidGrad SinGrad SoftmaxDropoutGrad SoftmaxGrad SoftmaxGrad_13 TanhGrad",
        &[Like(0)],
    ),
    ("Scale ZeroGradient InPlaceAccumulator", &[Like(0)]),
    ("InPlaceAccumulatorV2", &[Flag, Like(0)]),
    // (dy, x, scale, mean, inverse deviation).
    (
        "LayerNormalizationGrad InvertibleLayerNormalizationGrad BatchNormalizationGrad",
        &[Like(1), Like(2), Like(2)],
    ),
    ("SimplifiedLayerNormalizationGrad", &[Like(1), Like(2)]),
    // (dy, logarithms of probabilities, labels, …).
    (
        "SoftmaxCrossEntropyGrad SoftmaxCrossEntropyLossGrad SoftmaxCrossEntropyLossInternalGrad \
         SparseSoftmaxCrossEntropyGrad",
        &[Like(1)],
    ),
    // (shape, indices, dy), or dy first and the shape second.
    ("GatherGrad GatherNDGrad", &[Shaped(0, 2)]),
    ("GatherElementsGrad SliceGrad", &[Shaped(1, 0)]),
    // (dy, x, w).
    (
        "ConvGrad ConvTransposeGrad",
        &[Like(1), Like(2), Channels(0)],
    ),
    ("DivGrad", &[Like(1), Like(2)]),
    ("BiasDropout BitmaskDropout", &[Like(0), Mask(0)]),
];

/// Returns the types of the results of a node, in order; `None` for those that are not known.
pub fn types(domain: &str, node: &NodeProto, ins: &[Option<Operand>]) -> Vec<Option<Ty>> {
    // ONNX Runtime registers the gradient of the standard loss in the standard domain.
    if !matches!(domain, "com.microsoft" | "") {
        return Vec::new();
    }
    let op = node.op_type();
    match op {
        "ConcatTraining" => return joined(node, ins),
        "BroadcastGradientArgs" => return broadcast_axes(ins),
        _ => {}
    }
    let Some((_, rules)) = RULES
        .iter()
        .find(|(ops, _)| ops.split_whitespace().any(|o| o == op))
    else {
        return Vec::new();
    };
    rules.iter().map(|rule| rule.apply(op, ins)).collect()
}

fn operand<'a>(ins: &'a [Option<Operand<'a>>], slot: usize) -> Option<&'a Operand<'a>> {
    ins.get(slot)?.as_ref()
}

impl Rule {
    fn apply(&self, op: &str, ins: &[Option<Operand>]) -> Option<Ty> {
        Some(match *self {
            Like(slot) => operand(ins, slot)?.ty.clone(),
            Shaped(shape, like) => {
                let dims = operand(ins, shape)?.ints?;
                operand(ins, like)?.ty.with_dims(dims.to_vec())
            }
            Channels(slot) => {
                let ty = operand(ins, slot)?.ty;
                ty.with_dims([ty.dims.get(1)?.clone()])
            }
            Flag => Ty::new(DType::Bool, [Dim::ONE]),
            // These masks are bits packed into words, in another shape.
            Mask(_) if op.starts_with("Bitmask") => return None,
            Mask(slot) => operand(ins, slot)?.ty.with_dtype(DType::Bool),
        })
    }
}

/// Returns the types for `ConcatTraining`: the joined tensor, and the sizes of the operands along the axis.
fn joined(node: &NodeProto, ins: &[Option<Operand>]) -> Vec<Option<Ty>> {
    let axis = node.attribute.iter().find(|a| a.name() == "axis");
    let whole = || -> Option<Ty> {
        let first = operand(ins, 0)?.ty;
        let rank = first.rank() as i64;
        let axis = axis.map(|a| a.i())?;
        let axis = usize::try_from(if axis < 0 { axis + rank } else { axis }).ok()?;
        let mut dims = first.dims.clone();
        let mut size = Dim::ZERO;
        for slot in 0..ins.len() {
            size = size.add(operand(ins, slot)?.ty.dims.get(axis)?);
        }
        *dims.get_mut(axis)? = size;
        Some(first.with_dims(dims))
    };
    let sizes = Ty::new(DType::I64, [Dim::from(ins.len() as i64)]);
    vec![whole(), Some(sizes)]
}

/// Returns the types for `BroadcastGradientArgs`: for each of two operands, the axes along which its gradient is summed. The
/// op reads the shapes of the operands.
fn broadcast_axes(ins: &[Option<Operand>]) -> Vec<Option<Ty>> {
    let shapes = operand(ins, 0)
        .and_then(|o| o.ints)
        .zip(operand(ins, 1).and_then(|o| o.ints));
    let Some((a, b)) = shapes else {
        return Vec::new();
    };
    let rank = a.len().max(b.len());
    let size = |dims: &[Dim], axis: usize| match (axis + dims.len()).checked_sub(rank) {
        Some(at) => dims[at].clone(),
        None => Dim::ONE,
    };
    // An axis is summed if the operand lacks it, or has one element there and the other operand has more.
    let count = |own: &[Dim], other: &[Dim]| -> Option<Ty> {
        let lacking = rank - own.len();
        let mut summed = lacking;
        for axis in lacking..rank {
            let (mine, theirs) = (size(own, axis), size(other, axis));
            match (mine.as_const(), theirs.as_const()) {
                _ if mine == theirs => {}
                (Some(1), Some(_)) => summed += 1,
                (Some(_), _) if mine.as_const() != Some(1) => {}
                (_, Some(1)) => {}
                // One of the sizes is not known and may be 1.
                _ => return None,
            }
        }
        Some(Ty::new(DType::I64, [Dim::from(summed as i64)]))
    };
    vec![count(a, b), count(b, a)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::AttributeProto;

    fn node(op: &str) -> NodeProto {
        NodeProto {
            op_type: Some(op.into()),
            ..NodeProto::default()
        }
    }

    fn ty(dims: &[i64]) -> Ty {
        Ty::new(
            DType::F32,
            dims.iter().map(|d| Dim::from(*d)).collect::<Vec<_>>(),
        )
    }

    fn told(node: &NodeProto, operands: &[Ty], ints: &[Option<Vec<Dim>>]) -> Vec<String> {
        let ins: Vec<Option<Operand>> = operands
            .iter()
            .enumerate()
            .map(|(i, ty)| {
                Some(Operand {
                    ty,
                    ints: ints.get(i).and_then(Option::as_deref),
                })
            })
            .collect();
        let found = types("com.microsoft", node, &ins);
        found
            .iter()
            .map(|t| t.as_ref().map_or("?".into(), Ty::to_string))
            .collect()
    }

    #[test]
    fn every_rule_says_its_operands() {
        let shape = Some(vec![Dim::from(9), Dim::from(4)]);
        let plain = |op| told(&node(op), &[ty(&[2, 3]), ty(&[2, 4]), ty(&[4])], &[]);
        assert_eq!(plain("GeluGrad"), ["f32[2, 3]"]);
        assert_eq!(
            plain("LayerNormalizationGrad"),
            ["f32[2, 4]", "f32[4]", "f32[4]"]
        );
        assert_eq!(plain("SoftmaxCrossEntropyLossGrad"), ["f32[2, 4]"]);
        assert_eq!(plain("InPlaceAccumulatorV2"), ["bool[1]", "f32[2, 3]"]);
        assert_eq!(plain("ConvGrad"), ["f32[2, 4]", "f32[4]", "f32[3]"]);
        assert_eq!(plain("BiasDropout"), ["f32[2, 3]", "bool[2, 3]"]);
        assert!(plain("NoSuchGrad").is_empty());
        assert!(types("elsewhere", &node("GeluGrad"), &[]).is_empty());
        let operands = [ty(&[2]), ty(&[5]), ty(&[5, 4])];
        assert_eq!(
            told(&node("GatherGrad"), &operands, &[shape]),
            ["f32[9, 4]"]
        );
        // A shape that only data tells.
        assert_eq!(told(&node("GatherGrad"), &operands, &[]), ["?"]);
    }

    #[test]
    fn joined_operands_and_axes_of_sums() {
        let mut concat = node("ConcatTraining");
        concat.attribute.push(AttributeProto {
            name: Some("axis".into()),
            i: Some(-1),
            ..AttributeProto::default()
        });
        assert_eq!(
            told(&concat, &[ty(&[2, 3]), ty(&[2, 4])], &[]),
            ["f32[2, 7]", "i64[2]"]
        );
        let axes = |a: &[Dim], b: &[Dim]| {
            let operands = [ty(&[a.len() as i64]), ty(&[b.len() as i64])];
            let ints = [Some(a.to_vec()), Some(b.to_vec())];
            told(&node("BroadcastGradientArgs"), &operands, &ints)
        };
        let (n, one, four) = (Dim::symbol("n"), Dim::ONE, Dim::from(4));
        let whole = [n.clone(), Dim::from(2), four.clone()];
        assert_eq!(
            axes(&whole, std::slice::from_ref(&four)),
            ["i64[0]", "i64[2]"]
        );
        assert_eq!(
            axes(&[Dim::from(3), one.clone()], &[one, four]),
            ["i64[1]", "i64[1]"]
        );
        // Whether a size is 1 is not known.
        assert_eq!(axes(&[n], &[Dim::symbol("m")]), ["?", "?"]);
    }
}
