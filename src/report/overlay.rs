//! Node data for Model Explorer: the decision about every node of the written graph, as a word and a colour.
//!
//! Source: Model Explorer's node data (`GraphNodeData` by graph id, `results` by node id). Its ONNX adapter uses names as
//! ids. With words instead of numbers, groups show how many nodes of each kind they hold.

use super::account::Account;
use super::verdict::Fate;
use ckpt_passes::plan::OpPhase;
use serde_json::{Map, Value, json};

/// Returns the colour of a decision.
fn colour(fate: Fate) -> &'static str {
    match fate {
        Fate::Kept => "#e69f00",
        Fate::Recomputed => "#cc79a7",
        Fate::Offloaded => "#0072b2",
        Fate::Freed => "#dde3ea",
        Fate::Output => "#56b4e9",
        Fate::View => "#f4f6f8",
        Fate::Backward => "#8fd3bd",
    }
}

/// Returns the file's content.
pub fn overlay(account: &Account) -> Value {
    let mut results = Map::new();
    for group in account.verdicts.chunk_by(|a, b| a.at == b.at) {
        // The results of a node share its fate, except those without readers.
        let first = group.iter().max_by_key(|v| v.bytes).unwrap_or(&group[0]);
        let is_backward = account.terms().problem.ops[first.at].phase == OpPhase::Backward;
        let fate = if is_backward {
            Fate::Backward
        } else {
            first.fate
        };
        let entry = json!({"value": fate.word(), "bgColor": colour(fate), "textColor": "#111111"});
        results.insert(first.node.clone(), entry);
        for copy in 1..first.runs {
            let number = if copy == 1 {
                String::new()
            } else {
                format!(".{copy}")
            };
            let name = format!("{}/recompute{number}", first.node);
            let entry = json!({"value": "recompute", "bgColor": "#7b3f8f", "textColor": "#ffffff"});
            results.insert(name, entry);
        }
    }
    let data = json!({"results": results, "showExpandedSummaryOnGroupNode": true});
    match account.step.labels.graph.as_str() {
        "" => data,
        graph => json!({ graph: data }),
    }
}
