//! Pieces of the table that `optimize` ends in: memory before and after as bars on one axis, and what lives at the peak.

use super::explain::cut;
use super::memory::Held;
use crate::units::bytes;
use std::fmt::Write;

/// Width of the longest bar.
const WIDTH: usize = 40;

/// Two bars and the mark of a budget, on one axis.
pub fn bars(before_bytes: u64, after_bytes: u64, budget_bytes: Option<u64>) -> String {
    let most = before_bytes
        .max(after_bytes)
        .max(budget_bytes.unwrap_or(0))
        .max(1);
    let cells = |bytes: u64| (bytes as u128 * WIDTH as u128).div_ceil(most as u128) as usize;
    let mut out = String::new();
    for (name, size) in [("before", before_bytes), ("after", after_bytes)] {
        let filled = cells(size);
        let bar = format!("{}{}", "█".repeat(filled), "·".repeat(WIDTH - filled));
        let _ = writeln!(out, "  {name:<8}{bar} {}", bytes(size));
    }
    if let Some(budget) = budget_bytes {
        let at = cells(budget).max(1);
        let mark = format!("{}^", " ".repeat(at - 1));
        let _ = writeln!(out, "  {:<8}{mark:<WIDTH$} {}", "budget", bytes(budget));
    }
    out
}

/// The largest of what lives at the peak.
pub fn largest(held: &[Held]) -> String {
    let mut out = String::new();
    for h in held {
        let place = h.layer.map_or("-".into(), |l| format!("layer {l}"));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_share_an_axis() {
        let text = bars(400, 100, Some(200));
        let lines: Vec<&str> = text.lines().collect();
        let filled = |line: &str| line.matches('█').count();
        assert_eq!((filled(lines[0]), filled(lines[1])), (40, 10));
        assert_eq!(lines[2].find('^'), Some(10 + 19));
        assert_eq!(bars(0, 0, None).lines().count(), 2);
        assert!(bars(1, 2, None).contains("2 B"));
        assert_eq!(bars(u64::MAX, u64::MAX, Some(1)).lines().count(), 3);
    }
}
