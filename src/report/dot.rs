//! A Graphviz graph of the layers of a model, in execution order, with the bytes that each keeps and recomputes.
//!
//! Equal neighbours share a box. Nodes are left out, because a graph of all nodes is unreadable.

use super::account::{Account, LayerRow};
use crate::units::{at_most, bytes, micros};
use std::fmt::Write;

fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

/// Returns the share of recomputed bytes as a colour from white to violet.
fn fill(row: &LayerRow) -> String {
    let all = (row.kept_bytes + row.recomputed_bytes).max(1);
    format!(
        "0.83 {:.2} 1.0",
        0.45 * row.recomputed_bytes as f64 / all as f64
    )
}

/// Returns the graph as DOT text.
pub fn dot(account: &Account, title: &str) -> String {
    let most = at_most(account.plan.peak_is_bound);
    let mut out = String::from("digraph layers {\n");
    let _ = writeln!(
        out,
        "  label=\"{}: peak {most}{} to {most}{}\"; labelloc=t; rankdir=TB;",
        quoted(title),
        bytes(account.plan.before.peak_bytes),
        bytes(account.plan.after.peak_bytes)
    );
    out.push_str("  node [shape=box, style=\"filled,rounded\", fontname=\"sans-serif\"];\n");
    let same = |a: &LayerRow, b: &LayerRow| {
        (a.run, a.kept_bytes, a.recomputed_bytes) == (b.run, b.kept_bytes, b.recomputed_bytes)
    };
    // By layer: the index of its box.
    let mut box_of = Vec::new();
    let mut boxes = 0;
    for rows in account.layers.chunk_by(same) {
        let row = &rows[0];
        let name = match rows.len() {
            1 => format!("layer {}: {}", row.index, row.name),
            n => format!(
                "layers {} to {}: {}",
                row.index,
                row.index + n - 1,
                row.kind
            ),
        };
        let _ = writeln!(
            out,
            "  b{boxes} [label=\"{}\\nkept {}, recomputed {}\\n{} more{}\", fillcolor=\"{}\"];",
            quoted(&name),
            bytes(row.kept_bytes),
            bytes(row.recomputed_bytes),
            micros(row.recompute_us),
            if rows.len() > 1 { " each" } else { "" },
            fill(row)
        );
        box_of.extend(rows.iter().map(|_| boxes));
        boxes += 1;
    }
    for b in 1..boxes {
        let _ = writeln!(out, "  b{} -> b{b};", b - 1);
    }
    let mut edges: Vec<(usize, usize, &str)> = Vec::new();
    for s in &account.step.kv_sharing {
        for consumer in &s.consumers {
            if let Some(producer) = s.producer {
                edges.push((box_of[producer], box_of[*consumer], s.shared));
            }
        }
    }
    edges.sort_unstable();
    edges.dedup();
    for (from, to, what) in edges.iter().filter(|e| e.0 != e.1) {
        let _ = writeln!(out, "  b{from} -> b{to} [style=dashed, label=\"{what}\"];");
    }
    out.push_str("}\n");
    out
}
