//! Budgets as people write them: `8GiB`, `750MB`, plain bytes, `60%`, `auto`; and sizes in the same units.
//!
//! A budget is on the peak, parameters and inputs included, because that is what a device has. `P%` means the static
//! part plus `P` percent of what the unplanned step takes above it. A bare cost graph has no device to fit into: there a
//! number of bytes is on the peak above static ([`Basis`]).

use super::schedule::Score;
use ckpt_error::{Error, Result};
use std::fmt;

/// A budget as asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Bytes, counted as the [`Basis`] of the input says.
    Bytes(u64),
    /// Of what the unplanned step takes above static, in percent.
    Percent(f64),
    /// What the device has. Where none is known: [`AUTO_PERCENT`], or the smallest feasible peak where that is more.
    Auto,
}

/// What `auto` means where no device is known.
pub const AUTO_PERCENT: f64 = 60.0;

/// What a number of bytes is a limit on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// The peak: for models.
    Peak,
    /// The peak above static: for cost graphs.
    AboveStatic,
}

impl Basis {
    /// Returns a peak as this basis counts it.
    pub fn shown(self, peak_bytes: u64, static_bytes: u64) -> u64 {
        match self {
            Basis::Peak => peak_bytes,
            Basis::AboveStatic => peak_bytes.saturating_sub(static_bytes),
        }
    }

    /// Returns the peak that a number of bytes stands for.
    pub fn peak(self, bytes: u64, static_bytes: u64) -> u64 {
        match self {
            Basis::Peak => bytes,
            Basis::AboveStatic => bytes.saturating_add(static_bytes),
        }
    }

    /// Returns the words that reports use for what budgets in bytes limit.
    pub fn name(self) -> &'static str {
        match self {
            Basis::Peak => "peak",
            Basis::AboveStatic => "peak above static",
        }
    }
}

/// Units in lower case; upper case means the same. `k` alone is decimal, as in `kB`.
const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("k", 1_000),
    ("kb", 1_000),
    ("m", 1_000_000),
    ("mb", 1_000_000),
    ("g", 1_000_000_000),
    ("gb", 1_000_000_000),
    ("t", 1_000_000_000_000),
    ("tb", 1_000_000_000_000),
    ("ki", 1 << 10),
    ("kib", 1 << 10),
    ("mi", 1 << 20),
    ("mib", 1 << 20),
    ("gi", 1 << 30),
    ("gib", 1 << 30),
    ("ti", 1 << 40),
    ("tib", 1 << 40),
];

const SIZE_FORMS: &str =
    "bytes with a unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB (8GiB), in upper or lower case";

/// A number of bytes without a unit up to this one is likelier a percentage.
const LIKELY_PERCENT: f64 = 100.0;

/// Returns the percentage that a number without a unit was likely meant as.
fn likely_percent(number: f64) -> Option<String> {
    let percent = if number < 1.0 { 100.0 * number } else { number };
    (percent > 0.0 && percent <= LIKELY_PERCENT).then(|| format!("did you mean {percent}%?"))
}

/// Returns the question to ask about a budget of so few bytes.
pub fn question(bytes: u64) -> Option<String> {
    let likely = likely_percent(bytes as f64)?;
    Some(format!("{likely} {bytes} without a unit is bytes"))
}

/// Splits a size into its number, with `.` for the fraction, and its unit.
fn split(text: &str) -> Result<(String, &str), &'static str> {
    let word = text.trim();
    let end = word
        .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))
        .unwrap_or(word.len());
    let number = word[..end].replace('_', "");
    match number.is_empty() {
        true => Err("it does not start with a number"),
        false => Ok((number, word[end..].trim())),
    }
}

/// Reads a number of bytes with a unit.
///
/// # Errors
/// `error[budget-form]`: anything else, a negative number, more bytes than can be counted.
pub fn parse_bytes(text: &str) -> Result<u64> {
    bytes(text).map_err(|what| {
        Error::usage("budget-form", format!("`{text}` is not a size: {what}")).expected(SIZE_FORMS)
    })
}

fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let wanted = unit.to_ascii_lowercase();
    let (_, size) = UNITS
        .iter()
        .find(|(name, _)| *name == wanted)
        .ok_or_else(|| format!("there is no unit `{unit}`"))?;
    scaled(&number, *size).ok_or_else(|| "this is no number of bytes".into())
}

impl Budget {
    /// Reads a budget.
    ///
    /// # Errors
    /// `error[budget-form]`: anything else, a negative number, more bytes than can be counted, and a small fraction without
    /// a unit.
    pub fn parse(text: &str) -> Result<Budget> {
        let bad = |what: &str| {
            Error::usage("budget-form", format!("`{text}` is not a budget: {what}"))
                .expected(format!("auto, a percentage (60%), or {SIZE_FORMS}"))
        };
        if text.trim().eq_ignore_ascii_case("auto") {
            return Ok(Budget::Auto);
        }
        let (number, unit) = split(text).map_err(bad)?;
        if unit == "%" {
            let percent: f64 = number.parse().map_err(|_| bad("this is not a number"))?;
            return Ok(Budget::Percent(percent));
        }
        let fraction = number.parse().ok().filter(|_| number.contains('.'));
        if let Some(question) = fraction
            .filter(|_| unit.is_empty())
            .and_then(likely_percent)
        {
            return Err(bad("a part of a byte").help(question));
        }
        Ok(Budget::Bytes(bytes(text).map_err(|what| bad(&what))?))
    }

    /// Returns the largest peak that this budget allows, for a step whose unplanned score is `before`, on a device that has
    /// `usable_bytes`.
    pub fn peak_bytes(self, before: &Score, basis: Basis, usable_bytes: Option<u64>) -> u64 {
        let part = |percent: f64| {
            let above = before.peak_above_static_bytes as f64 * percent / 100.0;
            // `as` saturates.
            before.static_bytes.saturating_add(above as u64)
        };
        match (self, usable_bytes) {
            (Budget::Bytes(bytes), _) => basis.peak(bytes, before.static_bytes),
            (Budget::Percent(percent), _) => part(percent),
            (Budget::Auto, Some(usable)) => usable,
            (Budget::Auto, None) => part(AUTO_PERCENT),
        }
    }
}

/// `number` times `size`, exactly, rounded down; `None` where it is no number or does not fit.
fn scaled(number: &str, size: u64) -> Option<u64> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    // More digits than this are below one byte in every unit.
    let part = &part[..part.len().min(18)];
    if !part.bytes().all(|b| b.is_ascii_digit()) || (whole.is_empty() && part.is_empty()) {
        return None;
    }
    let digits = |text: &str| match text {
        "" => Some(0u128),
        text => text.parse::<u128>().ok(),
    };
    let scale = 10u128.pow(part.len() as u32);
    let total = digits(whole)?
        .checked_mul(scale)?
        .checked_add(digits(part)?)?;
    u64::try_from(total.checked_mul(size as u128)? / scale).ok()
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Bytes(bytes) => write!(f, "{bytes}"),
            Budget::Percent(percent) => write!(f, "{percent}%"),
            Budget::Auto => f.write_str("auto"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write() {
        for (text, budget) in [
            ("8GiB", Budget::Bytes(8 << 30)),
            (" 8 GiB ", Budget::Bytes(8 << 30)),
            ("750MB", Budget::Bytes(750_000_000)),
            ("1.2352GB", Budget::Bytes(1_235_200_000)),
            ("0.1KiB", Budget::Bytes(102)),
            (".5kB", Budget::Bytes(500)),
            ("1740000000", Budget::Bytes(1_740_000_000)),
            ("1_000", Budget::Bytes(1000)),
            ("18446744073709551615", Budget::Bytes(u64::MAX)),
            ("0", Budget::Bytes(0)),
            ("8gib", Budget::Bytes(8 << 30)),
            ("8G", Budget::Bytes(8_000_000_000)),
            ("700k", Budget::Bytes(700_000)),
            ("1.5 GB", Budget::Bytes(1_500_000_000)),
            ("64 mi", Budget::Bytes(64 << 20)),
            ("60", Budget::Bytes(60)),
            ("60%", Budget::Percent(60.0)),
            ("12.5 %", Budget::Percent(12.5)),
            ("Auto", Budget::Auto),
        ] {
            assert_eq!(Budget::parse(text).unwrap(), budget, "{text}");
            assert_eq!(Budget::parse(&budget.to_string()).unwrap(), budget);
        }
        for text in [
            "",
            "%",
            "GiB",
            "-1",
            "-5%",
            "0.5",
            ".6",
            "60.0",
            "1e9",
            "nan",
            "inf",
            "1.2.3MB",
            "1..2",
            "18446744073709551616",
            "99999999999TiB",
            "8 Gi B",
            "60%%",
            "..%",
            "0x10",
        ] {
            let e = Budget::parse(text).unwrap_err();
            assert_eq!((e.code(), e.exit_code()), ("budget-form", 2), "{text}");
            if !text.starts_with(['0', '.', '6']) || text.contains('x') {
                let e = parse_bytes(text).unwrap_err();
                assert_eq!((e.code(), e.exit_code()), ("budget-form", 2), "{text}");
            }
        }
        assert_eq!(parse_bytes("1GiB").unwrap(), 1 << 30);
        assert!(parse_bytes("60%").is_err() && parse_bytes("auto").is_err());
        for (text, question) in [("0.5", "50%?"), ("60.5", "60.5%?")] {
            let e = Budget::parse(text).unwrap_err().to_string();
            assert!(e.contains(&format!("did you mean {question}")), "{e}");
        }
        assert!(question(60).unwrap().starts_with("did you mean 60%?"));
        assert_eq!((question(101), question(0)), (None, None));
    }

    #[test]
    fn what_they_mean() {
        let before = Score {
            peak_bytes: 1000,
            static_bytes: 400,
            peak_above_static_bytes: 600,
            ..Score::default()
        };
        let peak = |b: Budget, basis, usable| b.peak_bytes(&before, basis, usable);
        assert_eq!(peak(Budget::Bytes(500), Basis::Peak, None), 500);
        assert_eq!(peak(Budget::Bytes(500), Basis::AboveStatic, Some(3)), 900);
        assert_eq!(
            peak(Budget::Bytes(u64::MAX), Basis::AboveStatic, None),
            u64::MAX
        );
        for basis in [Basis::Peak, Basis::AboveStatic] {
            assert_eq!(peak(Budget::Percent(50.0), basis, Some(3)), 700);
            assert_eq!(peak(Budget::Percent(0.0), basis, None), 400);
            assert_eq!(peak(Budget::Auto, basis, None), 760);
            assert_eq!(peak(Budget::Auto, basis, Some(800)), 800);
        }
        assert_eq!(Basis::AboveStatic.shown(900, 400), 500);
        assert_eq!(Basis::Peak.shown(900, 400), 900);
    }
}
