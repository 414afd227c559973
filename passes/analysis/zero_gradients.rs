//! Trained parameters whose gradient is zero whatever the data is: the loss does not reach them, or multiplies by 0.

use super::gradients::trained;
use crate::ir::op::{Domain, OpClass};
use crate::ir::{Def, Graph, Node, SecondaryMap, ValueId};
use crate::ops::{arith, reduce, sum_to};

/// Returns the parameters of a training graph whose gradients are zeros.
pub fn zero_gradients(graph: &Graph) -> Vec<ValueId> {
    let gradients = trained(graph);
    let mut is_zero = SecondaryMap::new(graph.value_bound(), false);
    for (id, value) in graph.inits() {
        // A parameter of 0 changes with training.
        is_zero[id] = value.ty().dtype.is_float()
            && !gradients.contains_key(&id)
            && value
                .tensor()
                .filter(|t| t.elements() == 1)
                .is_some_and(|t| t.get_f64(0) == Some(0.0));
    }
    for id in graph.order() {
        let node = graph.node(*id);
        if keeps_zero(node, &|v| is_zero[v]) {
            for out in &node.outs {
                is_zero[*out] = graph.ty(*out).dtype.is_real();
            }
        }
    }
    let zero = gradients.into_iter();
    let zero = zero.filter(|(_, gradient)| is_zero[*gradient]);
    let initializers = zero.filter(|(p, _)| matches!(graph.value(*p).def, Def::Init(_)));
    initializers.map(|(parameter, _)| parameter).collect()
}

/// Returns true if zero operands make the results zero.
fn keeps_zero(node: &Node, is_zero: &dyn Fn(ValueId) -> bool) -> bool {
    let operand = |slot: usize| node.operand(slot).is_some_and(is_zero);
    let op = node.op;
    if op == &arith::MUL || op.class == OpClass::Product {
        return operand(0) || operand(1);
    }
    if [&arith::ADD, &arith::SUB].contains(&op) {
        return operand(0) && operand(1);
    }
    let of_first = [
        &arith::NEG,
        &reduce::REDUCE_SUM,
        &reduce::REDUCE_MEAN,
        &sum_to::SUM_TO_SHAPE,
    ];
    if op.is_layout() || op.class == OpClass::Cast || of_first.contains(&op) {
        return operand(0);
    }
    // Gradient ops are linear in their cotangent, and some add to a sum.
    let named = |names: &[&str]| op.ins.iter().position(|slot| names.contains(&slot.name));
    let sum = named(&["sum"]).and_then(|slot| node.operand(slot));
    op.domain == Domain::Ckpt
        && named(&["dy", "dloss"]).is_some_and(operand)
        && sum.is_none_or(is_zero)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{Request, compile};
    use crate::driver::Watch;
    use crate::transform::loss::Loss;

    #[test]
    fn parameters_that_the_loss_does_not_reach_are_named() {
        let source = "graph @g imported (%x: f32[n, 4]) -> (%total, %other) {
  init %w : f32[4, 3] = splat 0.5
  init %scale : f32[3] = splat 1.0
  init %aside : f32[4, 3] = splat 0.5
  init %gate : f32[] = 1
  init %steps : f32[4] = splat 0.5
  init %unread : f32[4, 3] = splat 0.5
  init %none : f32[] = 0.0
  init %axis : i64[1] = [-1]
  %y = MatMul %x, %w
  %s = Mul %y, %scale
  %a = MatMul %x, %aside
  %n = LayerNormalization %a, %scale {axis = -1}
  %no = Mul %n, %none
  %open = Mul %s, %gate
  %far = Mul %x, %steps
  %whole = Floor %far
  %sum = ReduceSum %whole, %axis
  %both = Add %open, %no
  %all = Add %both, %sum
  %total = ReduceSum %all {keepdims = 0}
  %other = MatMul %x, %unread
}
";
        let mut graph = crate::text::parse(source).unwrap();
        let request = Request {
            loss: Loss::Output("total".into()),
            ..Request::default()
        };
        let done = compile(&mut graph, &request, &mut Watch::default()).unwrap();
        let named = |id: &ValueId| graph.value(*id).name.clone();
        let mut names: Vec<String> = zero_gradients(&graph).iter().map(named).collect();
        names.sort();
        assert_eq!(names, ["aside", "steps", "unread"]);
        let warning = done.warnings.join("\n");
        for name in ["`aside`", "`steps`", "`unread`"] {
            assert!(warning.contains(name), "{warning}");
        }
        assert!(
            !warning.contains("`w`") && !warning.contains("`scale`"),
            "{warning}"
        );
    }
}
