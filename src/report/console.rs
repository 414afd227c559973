//! Parts of the console output: bars of the peak before and after, and the largest storages at the peak.

use super::memory::Held;
use crate::units::{at_most, bytes};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Width of the longest bar.
const WIDTH: usize = 40;

/// Draws two bars and the mark of a budget on one axis. Peaks may be upper bounds.
pub fn bars(
    before_bytes: u64,
    after_bytes: u64,
    budget_bytes: Option<u64>,
    is_bound: bool,
) -> String {
    let most = before_bytes
        .max(after_bytes)
        .max(budget_bytes.unwrap_or(0))
        .max(1);
    let cells = |bytes: u64| (bytes as u128 * WIDTH as u128).div_ceil(most as u128) as usize;
    let mut out = String::new();
    for (name, size) in [("before", before_bytes), ("after", after_bytes)] {
        let filled = cells(size);
        let bar = format!("{}{}", "█".repeat(filled), "·".repeat(WIDTH - filled));
        let most = at_most(is_bound);
        let _ = writeln!(out, "  {name:<8}{bar} {most}{}", bytes(size));
    }
    if let Some(budget) = budget_bytes {
        let at = cells(budget).max(1);
        let mark = format!("{}^", " ".repeat(at - 1));
        let _ = writeln!(out, "  {:<8}{mark:<WIDTH$} {}", "budget", bytes(budget));
    }
    out
}

/// Lists storages that are live at the peak, one per line.
pub fn largest(held: &[Held]) -> String {
    let mut out = String::new();
    for h in held {
        let place = layer_name(h.layer);
        let _ = writeln!(
            out,
            "    {:>10}  {:<12}{place:<11}{}",
            bytes(h.bytes),
            h.kind.word(),
            cut(&h.name, 48)
        );
    }
    out
}

/// Lists named sizes, each with a note.
pub fn sizes(dims: &BTreeMap<String, i64>, note: impl Fn(&String) -> String) -> String {
    let one = |(name, size): (&String, &i64)| format!("{name}={size}{}", note(name));
    let all: Vec<String> = dims.iter().map(one).collect();
    match all.is_empty() {
        true => "the file's fixed sizes".into(),
        false => all.join(", "),
    }
}

/// Returns `layer 3`, or `-` outside the layers.
pub fn layer_name(layer: Option<usize>) -> String {
    layer.map_or("-".into(), |l| format!("layer {l}"))
}

/// Shortens a name to its end, which tells more than its beginning.
pub fn cut(name: &str, width: usize) -> String {
    let letters = name.chars().count();
    match letters <= width {
        true => name.into(),
        false => {
            let end: String = name.chars().skip(letters + 1 - width).collect();
            format!("…{end}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_lose_their_beginning() {
        assert_eq!(cut("transformer.h.0", 6), "…r.h.0");
        assert_eq!(cut("short", 6), "short");
    }

    #[test]
    fn bars_share_an_axis() {
        let text = bars(400, 100, Some(200), false);
        let lines: Vec<&str> = text.lines().collect();
        let filled = |line: &str| line.matches('█').count();
        assert_eq!((filled(lines[0]), filled(lines[1])), (40, 10));
        assert_eq!(lines[2].find('^'), Some(10 + 19));
        assert_eq!(bars(0, 0, None, false).lines().count(), 2);
        assert!(bars(1, 2, None, true).contains("at most 2 B"));
        assert_eq!(bars(u64::MAX, u64::MAX, Some(1), false).lines().count(), 3);
    }
}
