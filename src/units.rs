//! Formats bytes, FLOPs and times for people.

/// Formats bytes in binary units, with three significant digits.
pub fn bytes(n: u64) -> String {
    scaled(n, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// Returns the words before a figure that is an upper bound; none before others.
pub fn at_most(is_bound: bool) -> &'static str {
    match is_bound {
        true => "at most ",
        false => "",
    }
}

/// Formats floating-point operations in decimal units.
pub fn flops(n: u64) -> String {
    scaled(
        n,
        1000.0,
        &["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"],
    )
}

/// Formats microseconds in the unit that fits.
pub fn micros(us: f64) -> String {
    match us {
        _ if us >= 1e6 => format!("{:.2} s", us / 1e6),
        _ if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        _ => format!("{us:.2} µs"),
    }
}

/// Returns a share in percent; 0 of nothing.
pub fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

fn scaled(n: u64, base: f64, units: &[&str]) -> String {
    let (mut x, mut unit) = (n as f64, 0);
    while x >= base && unit + 1 < units.len() {
        x /= base;
        unit += 1;
    }
    match unit {
        0 => format!("{n} {}", units[0]),
        _ if x < 9.995 => format!("{x:.2} {}", units[unit]),
        _ if x < 99.95 => format!("{x:.1} {}", units[unit]),
        _ => format!("{x:.0} {}", units[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(100 << 20), "100 MiB");
        assert_eq!(flops(12_340_000), "12.3 MFLOP");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(
            (micros(0.5), micros(1234.0)),
            ("0.50 µs".into(), "1.23 ms".into())
        );
        assert_eq!(micros(2.5e6), "2.50 s");
    }
}
