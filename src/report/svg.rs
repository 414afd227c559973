//! The frontier as a picture: overhead over memory, with plans and lower bounds as curves and policies as points.
//!
//! The file is plain SVG 1.1 without scripts or fonts. Text is escaped.

use super::ablation::{AblationPoint, Technique};
use super::frontier::Frontier;
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 62.0;
const BOTTOM: f64 = 62.0;

/// Colours of techniques after the first.
const COLOURS: [&str; 4] = ["#2e8b57", "#8e44ad", "#b8860b", "#222222"];

/// A linear axis with round ticks.
pub struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
    /// Decimals that distinguish the ticks.
    decimals: usize,
}

impl Axis {
    /// Returns an axis that holds a range.
    pub fn new(low: f64, high: f64) -> Axis {
        let span = if high > low {
            high - low
        } else {
            high.abs().max(1.0)
        };
        let rough = span / 6.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|m| m * power)
            .find(|s| *s >= rough)
            .unwrap_or(rough);
        let first = (low / step).floor();
        let last = ((low + span) / step).ceil();
        let ticks: Vec<f64> = (0..=(last - first) as i64)
            .map(|i| (first + i as f64) * step)
            .collect();
        Axis {
            low: first * step,
            high: last * step,
            ticks,
            decimals: (-step.log10().floor()).max(0.0) as usize,
        }
    }

    /// Returns the position of a number, from 0 to 1.
    pub fn at(&self, x: f64) -> f64 {
        (x - self.low) / (self.high - self.low)
    }

    /// Returns the numbers to label.
    pub fn ticks(&self) -> &[f64] {
        &self.ticks
    }
}

/// Returns the unit for the labels of an axis of bytes.
fn unit(largest: u64) -> (f64, &'static str) {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")];
    let (bits, name) = units
        .into_iter()
        .find(|(bits, _)| largest >> bits > 0)
        .unwrap_or((0, "B"));
    ((1u64 << bits) as f64, name)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Returns the picture; `title` names what was planned.
pub fn svg(frontier: &Frontier, title: &str) -> String {
    let planned: Vec<_> = frontier
        .points
        .iter()
        .filter_map(|p| {
            Some((
                p.peak_bytes?,
                p.budget_bytes,
                p.overhead_pct?,
                p.lower_bound_pct?,
            ))
        })
        .collect();
    let all_bytes = planned
        .iter()
        .flat_map(|p| [p.0, p.1])
        .chain(frontier.policies.iter().map(|p| p.peak_bytes))
        .chain([frontier.smallest_feasible_bytes, frontier.unplanned_bytes]);
    let (mut least, mut most) = (u64::MAX, 0);
    for b in all_bytes {
        (least, most) = (least.min(b), most.max(b));
    }
    let alone = |l: &Technique| -> Vec<(u64, f64)> {
        let known = |p: &AblationPoint| Some((p.peak_bytes?, p.overhead_pct?));
        l.points.iter().filter_map(known).collect()
    };
    // The first technique is the curve itself.
    let techniques: Vec<_> = frontier.ablation.iter().skip(1).collect();
    for (b, _) in techniques.iter().flat_map(|l| alone(l)) {
        (least, most) = (least.min(b), most.max(b));
    }
    let (scale, unit) = unit(most);
    let overheads = planned
        .iter()
        .map(|p| p.2)
        .chain(frontier.policies.iter().map(|p| p.overhead_pct))
        .chain(techniques.iter().flat_map(|l| alone(l)).map(|p| p.1));
    let (lowest, highest) = overheads.fold((0.0f64, 1.0f64), |(l, h), x| (l.min(x), h.max(x)));
    let (x_axis, y_axis) = (
        Axis::new(least as f64 / scale, most as f64 / scale),
        Axis::new(lowest, highest),
    );
    let x = |bytes: u64| LEFT + x_axis.at(bytes as f64 / scale) * (WIDTH - LEFT - RIGHT);
    let y = |percent: f64| HEIGHT - BOTTOM - y_axis.at(percent) * (HEIGHT - TOP - BOTTOM);
    let mut out = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#222">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="24" font-size="16" font-weight="bold">{}</text>
"##,
        escaped(title)
    );
    frame(&mut out, &x_axis, &y_axis);
    let objective = match frontier.objective {
        "flops" => "extra FLOPs, %",
        _ => "extra time by the cost model, %",
    };
    let _ = writeln!(
        out,
        r##"<text x="{}" y="{}" text-anchor="middle">{}, {unit}</text>"##,
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 18.0,
        frontier.bytes_on
    );
    let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
    let _ = writeln!(
        out,
        r##"<text x="22" y="{middle}" text-anchor="middle" transform="rotate(-90 22 {middle})">{objective}</text>"##
    );
    // No plan is known left of this line.
    let floor = x(frontier.smallest_feasible_bytes);
    let _ = writeln!(
        out,
        r##"<line x1="{floor:.1}" y1="{TOP}" x2="{floor:.1}" y2="{}" stroke="#999" stroke-dasharray="2 3"/>
<text x="{:.1}" y="{}" font-size="11" fill="#666">smallest feasible</text>"##,
        HEIGHT - BOTTOM,
        floor + 5.0,
        HEIGHT - BOTTOM - 8.0
    );
    let line = |out: &mut String, style: &str, points: &[(u64, f64)]| {
        let at = points
            .iter()
            .map(|(b, p)| format!("{:.1},{:.1}", x(*b), y(*p)));
        let at: Vec<String> = at.collect();
        let _ = writeln!(
            out,
            r##"<polyline fill="none" {style} points="{}"/>"##,
            at.join(" ")
        );
    };
    let bound: Vec<_> = planned.iter().map(|p| (p.1, p.3.max(0.0))).collect();
    let style = r##"stroke="#c0392b" stroke-width="1.5" stroke-dasharray="6 4""##;
    line(&mut out, style, &bound);
    let plans: Vec<_> = planned.iter().map(|p| (p.0, p.2)).collect();
    let style = r##"stroke="#1f5fa8" stroke-width="2""##;
    line(&mut out, style, &plans);
    for (peak, overhead) in plans {
        let _ = writeln!(
            out,
            r##"<circle cx="{:.1}" cy="{:.1}" r="3" fill="#1f5fa8"/>"##,
            x(peak),
            y(overhead)
        );
    }
    for (technique, colour) in techniques.iter().zip(COLOURS) {
        let points = alone(technique);
        let style = format!(r#"stroke="{colour}" stroke-width="2""#);
        line(&mut out, &style, &points);
        if let Some((peak, percent)) = points.first() {
            let _ = writeln!(
                out,
                r##"<text x="{:.1}" y="{:.1}" font-size="12" fill="{colour}">{}</text>"##,
                x(*peak) + 4.0,
                y(*percent) - 6.0,
                escaped(technique.technique)
            );
        }
    }
    policies(&mut out, frontier, &x, &y);
    legend(&mut out);
    out.push_str("</svg>\n");
    out
}

/// Draws axes, ticks and grid.
fn frame(out: &mut String, x_axis: &Axis, y_axis: &Axis) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in &y_axis.ticks {
        let y = bottom - y_axis.at(*tick) * (bottom - TOP);
        let _ = writeln!(
            out,
            r##"<line x1="{LEFT}" y1="{y:.1}" x2="{right}" y2="{y:.1}" stroke="#e4e4e4"/><text x="{}" y="{:.1}" text-anchor="end">{tick:.*}</text>"##,
            LEFT - 8.0,
            y + 4.5,
            y_axis.decimals
        );
    }
    for tick in &x_axis.ticks {
        let x = LEFT + x_axis.at(*tick) * (right - LEFT);
        let _ = writeln!(
            out,
            r##"<line x1="{x:.1}" y1="{bottom}" x2="{x:.1}" y2="{}" stroke="#222"/><text x="{x:.1}" y="{}" text-anchor="middle">{tick:.*}</text>"##,
            bottom + 5.0,
            bottom + 20.0,
            x_axis.decimals
        );
    }
    let _ = writeln!(
        out,
        r##"<path d="M{LEFT} {TOP} V{bottom} H{right}" fill="none" stroke="#222"/>"##
    );
}

/// Draws policies as points with labels that do not overlap.
fn policies(out: &mut String, frontier: &Frontier, x: &dyn Fn(u64) -> f64, y: &dyn Fn(f64) -> f64) {
    let mut taken: Vec<(f64, f64, f64)> = Vec::new();
    for policy in &frontier.policies {
        let (px, py) = (x(policy.peak_bytes), y(policy.overhead_pct));
        let width = 7.0 * policy.policy.len() as f64;
        let is_right = px + 10.0 + width < WIDTH - 4.0;
        let left = if is_right { px + 9.0 } else { px - 9.0 - width };
        // Not on the axis.
        let mut ty = (py + 4.5).min(HEIGHT - BOTTOM - 6.0);
        let clashes = |ty: f64, taken: &[(f64, f64, f64)]| {
            taken
                .iter()
                .any(|(l, r, t)| left < *r && left + width > *l && (ty - t).abs() < 13.0)
        };
        while clashes(ty, &taken) && ty > TOP {
            ty -= 6.5;
        }
        taken.push((left, left + width, ty));
        let _ = writeln!(
            out,
            r##"<rect x="{:.1}" y="{:.1}" width="8" height="8" fill="#e08e0b" stroke="#7a4d00"/><text x="{left:.1}" y="{ty:.1}" font-size="12">{}</text>"##,
            px - 4.0,
            py - 4.0,
            escaped(&policy.policy)
        );
    }
}

fn legend(out: &mut String) {
    let y = 46.0;
    let _ = writeln!(
        out,
        r##"<line x1="{LEFT}" y1="{0}" x2="{1}" y2="{0}" stroke="#1f5fa8" stroke-width="2"/><circle cx="{2}" cy="{0}" r="3" fill="#1f5fa8"/><text x="{3}" y="{y}">plan within a budget</text>
<line x1="{4}" y1="{0}" x2="{5}" y2="{0}" stroke="#c0392b" stroke-width="1.5" stroke-dasharray="6 4"/><text x="{6}" y="{y}">proven lower bound</text>
<rect x="{7}" y="{8}" width="8" height="8" fill="#e08e0b" stroke="#7a4d00"/><text x="{9}" y="{y}">policy</text>"##,
        y - 4.5,
        LEFT + 30.0,
        LEFT + 15.0,
        LEFT + 37.0,
        LEFT + 190.0,
        LEFT + 220.0,
        LEFT + 227.0,
        LEFT + 390.0,
        y - 8.5,
        LEFT + 405.0
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        for (low, high) in [
            (0.0, 1.0),
            (1.23, 3.37),
            (0.0, 0.03),
            (25.1, 56.4),
            (5.0, 5.0),
            (0.0, 1234.0),
        ] {
            let axis = Axis::new(low, high);
            assert!(
                axis.low <= low && axis.high >= high && axis.high > axis.low,
                "{low} {high}"
            );
            assert!(
                (4..=9).contains(&axis.ticks.len()),
                "{low} {high}: {:?}",
                axis.ticks
            );
            for t in &axis.ticks {
                let shown: f64 = format!("{t:.*}", axis.decimals).parse().unwrap();
                assert!((shown - t).abs() < 1e-9 * (axis.high - axis.low));
            }
        }
        assert_eq!(unit(3 << 30).1, "GiB");
        assert_eq!(unit(0).1, "B");
    }
}
