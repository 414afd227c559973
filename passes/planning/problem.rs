//! The planning problem of a graph, with the way back to its nodes and values.

use crate::analysis::{Costs, Device, MemoryProfile, Sizes};
use crate::error::{Error, Result};
use crate::ir::op::Effect;
use crate::ir::{Graph, NodeId, Role, SecondaryMap, ValueId};
use crate::ops::collective::{is_exchange, received_bytes};
use crate::plan::index::{ByOp, ByValue, OpIdx, ValueIdx};
use crate::plan::problem::{Op, OpPhase, Problem, Transfer, Value, ValueKind};

/// The problem of a graph, and how its indices correspond to the ids of the graph.
#[derive(Clone, Debug)]
pub struct GraphProblem {
    /// The problem that planners solve; it knows ops and values by index only.
    pub problem: Problem,
    /// The node of each op: `order` when the problem was made.
    pub nodes: ByOp<NodeId>,
    /// The graph's value of each value of the problem.
    pub values: ByValue<ValueId>,
    /// The problem's index of each graph value.
    pub index_of: SecondaryMap<ValueId, Option<ValueIdx>>,
}

/// No value: a check of the problem refuses it.
const UNKNOWN: ValueIdx = ValueIdx(usize::MAX);

impl GraphProblem {
    /// Builds the problem of a graph without copies, at the sizes that `sizes` was made for.
    ///
    /// # Errors
    /// A bug for a graph that has copies: they are removed before it is planned again.
    pub fn new(
        graph: &Graph,
        sizes: &Sizes,
        memory: &MemoryProfile,
        device: &Device,
    ) -> Result<GraphProblem> {
        let costs = Costs::new(graph, sizes);
        let mut problem = Problem {
            transfer: Some(Transfer {
                us_per_megabyte: 1e3 / device.outside_gigabytes_per_s,
                start_us: device.launch_us,
                busy_share: device.outside_busy_share,
            }),
            is_bound: sizes.is_bound(),
            ..Problem::default()
        };
        let mut values = ByValue::default();
        let mut index_of = SecondaryMap::new(graph.value_bound(), None);
        for (id, value) in graph.values() {
            index_of[id] = Some(values.push(id));
            let storage = memory.storage(id);
            let producer = graph.def_node(id).is_some();
            problem.values.push(Value {
                bytes: match storage.renews {
                    None if storage.first == id && !storage.is_outside => storage.bytes,
                    _ => 0,
                },
                kind: match storage.is_static && storage.renews.is_none() {
                    true => ValueKind::Static,
                    false => ValueKind::Activation,
                },
                producer: producer.then_some(OpIdx(usize::MAX)),
                view_of: None,
                integral: !value.ty().dtype.is_real(),
            });
        }
        for (at, id) in graph.order().iter().enumerate() {
            let node = graph.node(*id);
            if node.recompute_of.is_some() {
                return Err(
                    Error::bug("plan", "the graph is planned already").at(graph.describe(*id))
                );
            }
            let index = |v: &ValueId| index_of[*v].unwrap_or(UNKNOWN);
            for out in &node.outs {
                let value = &mut problem.values[index(out)];
                value.producer = Some(OpIdx(at));
                value.view_of = memory
                    .layout(*out)
                    .view_of
                    .and_then(|slot| node.ins[slot])
                    .map(|v| index(&v));
            }
            let cost = costs.of(*id);
            let link_bytes = received_bytes(node, &|v| sizes.of(v).bytes());
            problem.ops.push(Op {
                name: node.name.clone(),
                kind: node.op.name.into(),
                ins: node.ins.iter().flatten().map(index).collect(),
                outs: node.outs.iter().map(index).collect(),
                phase: match node.role {
                    Role::Backward => OpPhase::Backward,
                    _ => OpPhase::Forward,
                },
                cost: match is_exchange(node.op) {
                    true => device.exchange_us(link_bytes),
                    false => device.time_us(cost, costs.dtype(*id)),
                },
                flops: cost.flops,
                bytes: cost.bytes,
                temp_bytes: memory.temp_bytes[at],
                link_bytes,
                in_place_operands: memory.in_place_operands[at]
                    .iter()
                    .filter_map(|slot| node.ins[*slot].as_ref().map(index))
                    .collect(),
                recomputable: node.op.effect.recomputable(),
                must_recompute: node.must_recompute(),
                ordered: !matches!(node.op.effect, Effect::Pure),
                layer: None,
            });
        }
        for update in &memory.fused_updates {
            // A copy of one of its nodes would read what only the call completes.
            for at in update.states.iter().copied().chain([update.at]) {
                problem.ops[OpIdx(at)].recomputable = false;
            }
            let gradient = index_of[update.gradient].unwrap_or(UNKNOWN);
            let ins = &mut problem.ops[OpIdx(update.at)].ins;
            if !ins.contains(&gradient) {
                ins.push(gradient);
            }
        }
        problem.outputs = graph
            .outputs()
            .iter()
            .map(|v| index_of[*v].unwrap_or(UNKNOWN))
            .collect();
        Ok(GraphProblem {
            problem,
            nodes: graph.order().to_vec().into(),
            values,
            index_of,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Binding;
    use crate::plan::constraint::{Constraint, check_constraints, first_violation};
    use crate::plan::saved_set::{Pinned, pinned, schedule};
    use crate::plan::schedule::evaluate;
    use crate::testing::{Random, random_graph};

    /// Returns a random graph, its problem and its memory profile.
    fn random_problem(r: &mut Random, forward: usize) -> (Graph, Problem, MemoryProfile) {
        let g = random_graph(r, forward);
        let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
        let memory = MemoryProfile::new(&g, &sizes).unwrap();
        let made = GraphProblem::new(&g, &sizes, &memory, &Device::default()).unwrap();
        (g, made.problem, memory)
    }

    /// A schedule made from constraints honours them, and for every constraint some schedule violates it. Such schedules are
    /// those of policies, which keep graph outputs.
    #[test]
    fn schedules_made_from_constraints_honour_them() {
        let mut r = Random(5);
        let (mut refused_keep, mut refused_recompute) = (0, 0);
        for n in 0..300 {
            let (_, p, _) = random_problem(&mut r, 3 + n % 25);
            let pins = pinned(&p);
            let leaves = |o: OpIdx| {
                let mut outs = p.ops[o].outs.iter();
                outs.any(|v| pins[*v] == Some(Pinned::Output))
            };
            let overrides: ByOp<Option<Constraint>> = p
                .ops
                .indices()
                .map(|o| match r.below(3) {
                    _ if p.ops[o].phase == OpPhase::Backward => None,
                    0 => None,
                    1 => Some(Constraint::Keep),
                    _ if leaves(o) => None,
                    _ => Some(Constraint::Recompute),
                })
                .collect();
            let keep_all = |dropped: Constraint| -> ByValue<bool> {
                let constraint = |v: &Value| v.producer.and_then(|o| overrides[o]);
                p.values
                    .iter()
                    .map(|v| constraint(v) != Some(dropped))
                    .collect()
            };
            let good = schedule(&p, &keep_all(Constraint::Recompute));
            assert!(
                check_constraints(&p, &good, &overrides).is_ok(),
                "graph {n}"
            );
            // Keeping nothing runs ops again that were to run once.
            let none = schedule(&p, &keep_all(Constraint::Keep));
            let mut runs = p.by_op(0);
            none.iter().for_each(|o| runs[*o] += 1);
            let twice =
                |o: OpIdx| runs[o] > 1 && overrides[o] == Some(Constraint::Keep) && !p.is_view(o);
            if p.ops.indices().any(twice) {
                refused_keep += 1;
                assert!(
                    first_violation(&p, &none, &overrides).is_some(),
                    "graph {n}"
                );
            }
            // Running nothing again violates the other constraint wherever the backward pass reads what was to be recomputed.
            if good != p.given_order() {
                refused_recompute += 1;
                assert!(
                    first_violation(&p, &p.given_order(), &overrides).is_some(),
                    "graph {n}"
                );
            }
        }
        assert!(
            refused_keep > 50 && refused_recompute > 50,
            "{refused_keep} {refused_recompute}"
        );
    }

    #[test]
    fn copies_have_consumers_and_nothing_alive_is_recomputed() {
        let mut r = Random(11);
        let (mut copies, mut lower) = (0, 0);
        for n in 0..400 {
            let (_, p, _) = random_problem(&mut r, 3 + n % 25);
            let keep: ByValue<bool> = p.values.iter().map(|_| r.below(2) == 0).collect();
            let s = schedule(&p, &keep);
            let (before, after) = (
                evaluate(&p, &p.given_order()).unwrap(),
                evaluate(&p, &s).unwrap(),
            );
            copies += s.len() - p.ops.len();
            lower += (after.peak_bytes < before.peak_bytes) as usize;
            // First computations come in the given order, and no op runs more than twice.
            let mut runs = p.by_op(0);
            let mut firsts = Vec::new();
            for (t, o) in s.iter().enumerate() {
                runs[*o] += 1;
                if runs[*o] == 1 {
                    firsts.push(*o);
                    continue;
                }
                assert_eq!((runs[*o], p.ops[*o].phase), (2, OpPhase::Forward));
                // Something later, before any further computation of it, reads what it made.
                let outs = &p.ops[*o].outs;
                assert!(
                    s[t + 1..]
                        .iter()
                        .any(|x| p.ops[*x].ins.iter().any(|v| outs.contains(v)))
                );
            }
            assert_eq!(firsts, p.given_order());
            let all = p.by_value(true);
            assert_eq!(schedule(&p, &all), p.given_order());
        }
        assert!(copies > 500 && lower > 20, "{copies} {lower}");
    }

    #[test]
    fn the_problem_of_a_graph_in_its_own_order_has_the_graphs_peak() {
        let mut r = Random(3);
        for n in 0..300 {
            let (g, problem, m) = random_problem(&mut r, 3 + n % 20);
            problem.check().unwrap();
            let score = evaluate(&problem, &problem.given_order()).unwrap();
            assert_eq!(
                (score.peak_bytes, score.static_bytes),
                (m.peak_bytes, m.static_bytes)
            );
            assert_eq!(score.at_step.map(|s| g.order()[s]), m.at);
            let text = serde_json::to_string(&problem).unwrap();
            assert_eq!(serde_json::from_str::<Problem>(&text).unwrap(), problem);
        }
    }
}
