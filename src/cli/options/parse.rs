//! Readers of option values.

use crate::cli::replaced;
use ckpt_passes::plan::budget::parse_bytes;
use ckpt_passes::plan::{Effort, Policy};
use std::ops::RangeInclusive;

/// Turns a reader of the library into one for the option parser.
pub fn by<T: 'static>(
    read: fn(&str) -> ckpt_passes::Result<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| read(text).map_err(one_line)
}

/// Returns the message and the notes of an error in one line.
#[expect(
    clippy::boxed_local,
    clippy::needless_pass_by_value,
    reason = "`map_err` gives the error by value"
)]
fn one_line(error: Box<ckpt_passes::Error>) -> String {
    let mut text = error.message().to_string();
    for (label, note) in error.notes() {
        text.push_str(&format!("; {label}: {note}"));
    }
    text
}

/// Reads a policy.
pub fn policy(text: &str) -> Result<Policy, String> {
    if text.trim().eq_ignore_ascii_case("budget") {
        return Err("write --budget auto".into());
    }
    let policy = Policy::parse(text).map_err(one_line)?;
    match replaced::policy(&policy) {
        Some(instead) => Err(instead),
        None => Ok(policy),
    }
}

/// Reads `NAME=N`.
pub fn dim(text: &str) -> Result<(String, i64), String> {
    let (name, size) = text
        .split_once('=')
        .ok_or("expected NAME=N, such as batch=8")?;
    let size = size
        .trim()
        .parse()
        .map_err(|_| format!("`{size}` is not a whole number"))?;
    match name.trim() {
        "" => Err("the size has no name".into()),
        name => Ok((name.to_string(), size)),
    }
}

/// Reads `on` or `off`.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected on or off".into()),
    }
}

/// Reads a whole number that is at least 1.
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number, 1 or more".into()),
    }
}

/// Reads `RANK/N`, a rank from 0 and the number of ranks.
pub fn rank(text: &str) -> Result<(usize, usize), String> {
    let read = |text: &str| text.trim().parse::<usize>().ok();
    let place = text.split_once('/');
    let place = place.and_then(|(rank, ranks)| Some((read(rank)?, read(ranks)?)));
    match place {
        Some((rank, ranks)) if rank < ranks => Ok((rank, ranks)),
        _ => Err("expected RANK/N with RANK below N, such as 5/1024".into()),
    }
}

/// Reads a finite number that is not negative; a percent sign may follow.
pub fn not_negative(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(x) if x >= 0.0 && x.is_finite() => Ok(x),
        _ => Err("expected a number that is not negative".into()),
    }
}

/// Reads a number of bytes, such as 16GiB.
pub fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(one_line)
}

/// Reads a number of bytes in a range.
pub fn bytes_in(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    move |text| match bytes(text)? {
        n if range.contains(&n) => Ok(n),
        n => Err(format!(
            "{n} bytes are not in {}..={}",
            range.start(),
            range.end()
        )),
    }
}

/// Reads how long to search.
pub fn effort(text: &str) -> Result<Effort, String> {
    match text {
        "first" => Ok(Effort::First),
        "normal" => Ok(Effort::Normal),
        "thorough" => Ok(Effort::Thorough),
        _ => Err("expected first, normal or thorough".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_no_policy() {
        assert_eq!(policy("FULL").unwrap(), Policy::FULL);
        assert!(policy("Budget").unwrap_err().contains("--budget auto"));
        assert!(policy("ful").unwrap_err().contains("there is no policy"));
        let every = policy("every:3").unwrap_err();
        assert!(every.contains("write --policy full --every 3"), "{every}");
    }

    #[test]
    fn sizes_and_tolerances() {
        assert_eq!(dim("batch=8").unwrap(), ("batch".into(), 8));
        for wrong in ["batch", "=3", "batch=x", "batch=1.5"] {
            assert!(dim(wrong).is_err(), "{wrong}");
        }
        let number = not_negative;
        assert!(number("-1").is_err() && number("nan").is_err() && number("1e-5").is_ok());
        assert_eq!(rank("5/1024").unwrap(), (5, 1024));
        assert!(["2/2", "1", "a/2"].iter().all(|text| rank(text).is_err()));
        assert!(count("0").is_err() && switch("yes").is_err() && bytes("60%").is_err());
        let some = bytes_in(4..=1 << 20);
        assert_eq!((some("700k"), some("1 MiB")), (Ok(700_000), Ok(1 << 20)));
        assert!(some("3").is_err() && some("2MiB").is_err());
    }
}
