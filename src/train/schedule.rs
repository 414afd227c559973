//! Learning rates by step: constant, linear, cosine and warm-up–stable–decay, each with a warm-up.
//!
//! The formulas are those of `transformers.optimization` (4.57). There the first step has number 0, so a warm-up begins
//! with a learning rate of 0.

use ckpt_passes::{Error, Result};
use std::f64::consts::PI;
use std::fmt;

/// A number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Span {
    /// So many.
    Steps(u64),
    /// So many percent of all steps, rounded up.
    Percent(f64),
}

impl Default for Span {
    fn default() -> Span {
        Span::Steps(0)
    }
}

impl Span {
    /// Parses `100` or `5%`.
    ///
    /// # Errors
    /// Anything else.
    pub fn parse(text: &str) -> Result<Span> {
        let text = text.trim();
        let span = match text.strip_suffix('%') {
            None => text.parse().ok().map(Span::Steps),
            Some(number) => number.trim().parse().ok().map(Span::Percent),
        };
        let is_valid =
            |span: &Span| !matches!(span, Span::Percent(p) if !(0.0..=100.0).contains(p));
        span.filter(is_valid).ok_or_else(|| {
            Error::usage("lr-schedule", format!("`{text}` is no number of steps"))
                .expected("steps, such as 100, or a share of all steps, such as 5%")
        })
    }

    /// Returns the number of steps, of `total`.
    fn of(self, total: u64) -> u64 {
        match self {
            Span::Steps(n) => n,
            Span::Percent(p) => (total as f64 * p / 100.0).ceil() as u64,
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Span::Steps(n) => write!(f, "{n}"),
            Span::Percent(p) => write!(f, "{p}%"),
        }
    }
}

/// How the learning rate goes on after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Shape {
    /// It stays.
    #[default]
    Constant,
    /// It falls to 0 along a line.
    Linear,
    /// It falls along half a period of a cosine.
    Cosine {
        /// The share of the learning rate that is left at the end.
        min: f64,
    },
    /// It stays, and falls along half a period of a cosine at the end.
    Wsd {
        /// How long it falls.
        decay: Span,
        /// The share of the learning rate that is left at the end.
        min: f64,
    },
}

/// The share of the steps in which `wsd` decays, unless told otherwise.
const DECAY_PERCENT: f64 = 10.0;

/// A schedule of learning rates.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Schedule {
    /// After the warm-up.
    pub shape: Shape,
    /// In which the learning rate rises from 0 along a line.
    pub warmup: Span,
}

impl Shape {
    /// Parses `constant`, `linear`, `cosine` or `wsd`, perhaps with settings: `cosine:min=0.1`, `wsd:decay=20%,min=0`.
    ///
    /// # Errors
    /// An unknown shape or setting, a number out of its range.
    pub fn parse(text: &str) -> Result<Shape> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let mut shape = match name {
            "constant" => Shape::Constant,
            "linear" => Shape::Linear,
            "cosine" => Shape::Cosine { min: 0.0 },
            "wsd" => Shape::Wsd {
                decay: Span::Percent(DECAY_PERCENT),
                min: 0.0,
            },
            other => {
                return Err(fail(format!("there is no schedule `{other}`")).expected(
                    "constant, linear, cosine or wsd, perhaps with settings: cosine:min=0.1",
                ));
            }
        };
        for setting in settings.split(',').filter(|_| text.contains(':')) {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            match (&mut shape, key) {
                (Shape::Wsd { decay, .. }, "decay") => *decay = Span::parse(value)?,
                (Shape::Cosine { min } | Shape::Wsd { min, .. }, "min") => {
                    let share = value.parse().ok();
                    *min = share.filter(|m| (0.0..=1.0).contains(m)).ok_or_else(|| {
                        fail(format!("`min` cannot be `{value}`")).expected("a share from 0 to 1")
                    })?;
                }
                _ => {
                    let what = format!("the schedule `{name}` has no setting `{key}`");
                    return Err(fail(what).expected("cosine:min=R or wsd:decay=N,min=R"));
                }
            }
        }
        Ok(shape)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Constant => f.write_str("constant"),
            Shape::Linear => f.write_str("linear"),
            Shape::Cosine { min } => write!(f, "cosine:min={min}"),
            Shape::Wsd { decay, min } => write!(f, "wsd:decay={decay},min={min}"),
        }
    }
}

fn fail(what: String) -> Box<Error> {
    Error::usage("lr-schedule", what)
}

impl Schedule {
    /// Returns the factor of the learning rate in a step (from 1) of `total` steps.
    pub fn factor(&self, step: u64, total: u64) -> f64 {
        let (t, warmup) = (step.saturating_sub(1), self.warmup.of(total));
        let share = |n: u64, of: u64| n as f64 / of.max(1) as f64;
        let half_cosine = |progress: f64| 0.5 * (1.0 + (PI * progress).cos());
        let above = |factor: f64, min: f64| (factor * (1.0 - min) + min).max(0.0);
        if t < warmup {
            let min = match self.shape {
                Shape::Wsd { min, .. } => min,
                _ => 0.0,
            };
            return above(share(t, warmup), min);
        }
        match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear => share(total.saturating_sub(t), total.saturating_sub(warmup)),
            Shape::Cosine { min } => above(
                half_cosine(share(t - warmup, total.saturating_sub(warmup))),
                min,
            ),
            Shape::Wsd { decay, min } => {
                let decay = decay.of(total);
                let from = total.saturating_sub(decay).max(warmup);
                match t {
                    t if t < from => 1.0,
                    t if t < from + decay => above(half_cosine(share(t - from, decay)), min),
                    _ => min,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(shape: &str, warmup: &str, total: u64, steps: &[u64]) -> Vec<f64> {
        let schedule = Schedule {
            shape: Shape::parse(shape).unwrap(),
            warmup: Span::parse(warmup).unwrap(),
        };
        steps
            .iter()
            .map(|step| schedule.factor(*step, total))
            .collect()
    }

    fn are_close(found: &[f64], expected: &[f64]) {
        let is_close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
        assert!(
            found.len() == expected.len() && found.iter().zip(expected).all(is_close),
            "{found:?}"
        );
    }

    /// The numbers are those of PyTorch 2.11: `LinearLR`, `CosineAnnealingLR`, and `LambdaLR` with the functions of
    /// transformers.
    #[test]
    fn they_are_those_of_the_framework() {
        let at = [1, 3, 5, 6, 15, 24, 25];
        are_close(
            &factors("constant", "4", 25, &at),
            &[0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0],
        );
        are_close(
            &factors("linear", "4", 25, &at),
            &[
                0.0,
                0.5,
                1.0,
                20.0 / 21.0,
                11.0 / 21.0,
                2.0 / 21.0,
                1.0 / 21.0,
            ],
        );
        // CosineAnnealingLR(T_max=8): 0.5 (1 + cos(pi t / 8)).
        are_close(
            &factors("cosine", "0", 8, &[1, 3, 5, 7, 8]),
            &[
                1.0,
                0.8535533905932737,
                0.5,
                0.14644660940672627,
                0.03806023374435663,
            ],
        );
        are_close(&factors("cosine:min=0.1", "0", 8, &[1, 5]), &[1.0, 0.55]);
        are_close(
            &factors(
                "wsd:decay=20%,min=0.1",
                "10%",
                20,
                &[1, 2, 3, 16, 17, 19, 21],
            ),
            &[0.1, 0.55, 1.0, 1.0, 1.0, 0.55, 0.1],
        );
    }

    #[test]
    fn words_are_read() {
        assert_eq!(Span::parse("5%").unwrap().of(101), 6);
        for text in [
            "constant",
            "linear",
            "cosine:min=0.25",
            "wsd:decay=30%,min=0.5",
            "wsd:decay=7,min=0",
        ] {
            assert_eq!(Shape::parse(text).unwrap().to_string(), text);
        }
        for wrong in [
            "",
            "cos",
            "cosine:",
            "cosine:min=2",
            "linear:min=0",
            "wsd:decay=x",
            "cosine:decay=1",
        ] {
            assert_eq!(Shape::parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
        for wrong in ["", "-1", "x", "101%", "nan%"] {
            assert_eq!(Span::parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
        }
    }
}
