//! `report.html`: the curves of a run as a page that loads nothing and has no script.

use super::metrics::StepMetrics;
use crate::report::svg::Axis;
use crate::units::bytes;
use std::fmt::Write;

/// Name of the file in the folder of a run.
pub const FILE: &str = "report.html";

const STYLE: &str = include_str!("../report/page/style.css");
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 76.0;
const BOTTOM: f64 = 34.0;
const TOP: f64 = 10.0;
/// More points than a line is wide say nothing.
const MAX_POINTS: usize = 800;

/// A line of a chart.
struct Line {
    name: &'static str,
    /// A colour of the style sheet.
    colour: &'static str,
    points: Vec<(f64, f64)>,
}

fn line(
    name: &'static str,
    colour: &'static str,
    steps: &[StepMetrics],
    of: impl Fn(&StepMetrics) -> Option<f64>,
) -> Line {
    let points = steps.iter().filter_map(|s| Some((s.step as f64, of(s)?)));
    let points: Vec<(f64, f64)> = points.collect();
    let every = points.len().div_ceil(MAX_POINTS).max(1);
    let last = points.last().copied();
    let mut points: Vec<(f64, f64)> = points.into_iter().step_by(every).collect();
    points.extend(last.filter(|last| points.last() != Some(last)));
    Line {
        name,
        colour,
        points,
    }
}

/// Returns the bytes alive over the nodes of a step: of each few nodes the most.
fn memory_of_step(timeline_bytes: &[u64]) -> Line {
    let every = timeline_bytes.len().div_ceil(MAX_POINTS).max(1);
    let most = |part: &[u64]| part.iter().max().copied().unwrap_or(0) as f64;
    let points = timeline_bytes.chunks(every).enumerate();
    Line {
        name: "predicted bytes after each node",
        colour: "--budget",
        points: points
            .map(|(i, part)| ((i * every) as f64, most(part)))
            .collect(),
    }
}

/// Returns a section with a chart; nothing without points.
fn chart(title: &str, lines: &[Line], label: &dyn Fn(f64) -> String) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    if points().next().is_none() {
        return String::new();
    }
    let range = |of: fn(&(f64, f64)) -> f64| {
        let numbers = points().map(of);
        numbers.fold((f64::MAX, f64::MIN), |(low, high), x| {
            (low.min(x), high.max(x))
        })
    };
    let (x, y) = (range(|p| p.0), range(|p| p.1));
    let (across, up) = (Axis::new(x.0, x.1), Axis::new(y.0, y.1));
    let at_x = |x: f64| LEFT + across.at(x) * (WIDTH - LEFT - 10.0);
    let at_y = |y: f64| HEIGHT - BOTTOM - up.at(y) * (HEIGHT - BOTTOM - TOP);
    let mut out = format!("<section><h2>{title}</h2>\n<p class=\"hint\">");
    for line in lines.iter().filter(|line| !line.points.is_empty()) {
        let (name, colour) = (line.name, line.colour);
        let _ = write!(
            out,
            "<span class=\"key\" style=\"background: var({colour})\"></span>{name} "
        );
    }
    let _ = write!(
        out,
        "</p>\n<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\" style=\"width: 100%; font-size: 12px\">\n"
    );
    for tick in up.ticks() {
        let (y, text) = (at_y(*tick), label(*tick));
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"var(--line)\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"var(--soft)\">{text}</text>",
            WIDTH - 10.0,
            LEFT - 6.0,
            y + 4.0
        );
    }
    for tick in across.ticks().iter().filter(|tick| tick.fract() == 0.0) {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"var(--soft)\">{tick}</text>",
            at_x(*tick),
            HEIGHT - 12.0
        );
    }
    for line in lines.iter().filter(|line| !line.points.is_empty()) {
        let mut path = String::new();
        for (x, y) in &line.points {
            let _ = write!(path, "{:.1},{:.1} ", at_x(*x), at_y(*y));
        }
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"var({})\" stroke-width=\"1.6\"/>",
            path.trim_end(),
            line.colour
        );
    }
    out + "</svg></section>\n"
}

/// Returns the page of a run, whose steps have this memory over their nodes.
pub fn page(steps: &[StepMetrics], timeline_bytes: &[u64]) -> String {
    let plain = |x: f64| {
        format!("{x:.4}")
            .trim_end_matches('0')
            .trim_end_matches('.')
            .to_string()
    };
    let of_bytes = |x: f64| bytes(x.max(0.0) as u64);
    let loss = [
        line("training", "--k2", steps, |s| Some(s.loss)),
        line("evaluation", "--k8", steps, |s| s.eval_loss),
    ];
    let memory = [
        line("measured peak", "--k2", steps, |s| {
            Some(s.peak_bytes as f64)
        }),
        line("predicted peak", "--budget", steps, |s| {
            Some(s.predicted_peak_bytes as f64)
        }),
    ];
    let rate = [line("learning rate", "--k7", steps, |s| Some(s.lr))];
    let norm = [line("norm of the gradients", "--k5", steps, |s| {
        s.grad_norm
    })];
    let speed = [line("tokens per second", "--k4", steps, |s| {
        Some(s.tokens as f64 / s.seconds.max(1e-9))
    })];
    let body = [
        chart("Loss", &loss, &plain),
        chart("Peak of memory", &memory, &of_bytes),
        chart(
            "Memory within a step, by node",
            &[memory_of_step(timeline_bytes)],
            &of_bytes,
        ),
        chart("Learning rate", &rate, &|x| format!("{x:.1e}")),
        chart("Norm of the gradients", &norm, &plain),
        chart("Tokens per second", &speed, &|x| format!("{x:.0}")),
    ]
    .concat();
    let mut figures = String::new();
    if let (Some(first), Some(last)) = (steps.first(), steps.last()) {
        let tokens: u64 = steps.iter().map(|s| s.tokens).sum();
        let rows = [
            ("steps", last.step.to_string()),
            ("tokens", tokens.to_string()),
            ("first loss", format!("{:.4}", first.loss)),
            ("last loss", format!("{:.4}", last.loss)),
        ];
        for (name, value) in rows {
            let _ = write!(figures, "<div><dt>{name}</dt><dd>{value}</dd></div>");
        }
    }
    format!(
        "<!doctype html>
<html lang=\"en\">
<head>
<meta charset=\"utf-8\">
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">
<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">
<meta name=\"color-scheme\" content=\"light dark\">
<title>Training · ckpt-opt</title>
<link rel=\"icon\" href=\"data:,\">
<style>
{STYLE}</style>
</head>
<body>
<header><p class=\"brand\">ckpt-opt {}</p><h1>Training</h1>
<dl class=\"figures\">{figures}</dl></header>
<main>
{body}</main>
</body>
</html>
",
        env!("CARGO_PKG_VERSION")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_chart_for_what_was_measured() {
        let step = |step: u64| StepMetrics {
            step,
            loss: 3.0 / step as f64,
            tokens: 10,
            seconds: 0.5,
            peak_bytes: 1 << 20,
            predicted_peak_bytes: 1 << 20,
            eval_loss: (step == 4).then_some(1.0),
            ..StepMetrics::default()
        };
        let steps: Vec<StepMetrics> = (1..=5000).map(step).collect();
        let timeline_bytes: Vec<u64> = (0..20_000).map(|i| i % 7 * 1024).collect();
        let page = page(&steps, &timeline_bytes);
        for title in [
            "Loss",
            "Peak of memory",
            "Memory within a step, by node",
            "Learning rate",
            "Tokens per second",
        ] {
            assert!(page.contains(&format!("<h2>{title}</h2>")), "{title}");
        }
        assert!(!page.contains("Norm of the gradients") && !page.contains("NaN"));
        assert!(page.len() < 100_000, "{} bytes", page.len());
        assert!(super::page(&[], &[]).contains("</html>"));
    }
}
