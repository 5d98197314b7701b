//! Quantities for people: three digits, a prefix, a unit.

/// A value in its unit: `1.36 M/s`, `85.3 ns`, `1.50 GB/s`.
pub fn quantity(value: f64, unit: &str) -> String {
    match unit {
        "ns" => scaled(value, &[(1e9, " s"), (1e6, " ms"), (1e3, " us"), (1.0, " ns")]),
        "1/s" => scaled(value, &[(1e9, " G/s"), (1e6, " M/s"), (1e3, " k/s"), (1.0, " /s")]),
        "B/s" => scaled(value, &[(1e9, " GB/s"), (1e6, " MB/s"), (1e3, " kB/s"), (1.0, " B/s")]),
        "B" => scaled(value, &[(1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " B")]),
        "" => scaled(value, &[(1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, "")]),
        other => scaled(value, &[(1.0, &format!(" {other}"))]),
    }
}

/// A count: whole below 10000, with a prefix above.
pub fn count(value: u64) -> String {
    if value < 10_000 { value.to_string() } else { quantity(value as f64, "") }
}

/// A ratio: `3.01x`.
pub fn ratio(value: f64) -> String {
    format!("{}x", digits(rounded(value)))
}

/// A value in the first scale that it reaches; in the last one if it reaches none.
fn scaled(value: f64, scales: &[(f64, &str)]) -> String {
    let value = rounded(value);
    let scale = scales.iter().find(|(scale, _)| value.abs() >= *scale).or(scales.last());
    let (scale, unit) = scale.copied().unwrap_or((1.0, ""));
    format!("{}{unit}", digits(value / scale))
}

/// To three significant digits.
fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let step = 10_f64.powi(value.abs().log10().floor() as i32 - 2);
    (value / step).round() * step
}

fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        // Less half a unit of the last digit, because powers of ten are not exact in binary.
        abs if abs >= 99.95 || abs == 0.0 => 0,
        abs if abs >= 9.995 => 1,
        abs if abs >= 0.0995 => 2,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

/// Parses the output of [`quantity`] or [`ratio`]. Seconds are those of nanoseconds.
pub fn read_back(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '-')));
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let scale = match unit.trim() {
        "G/s" | "GB/s" | "GB" | "G" | "s" => 1e9,
        "M/s" | "MB/s" | "MB" | "M" | "ms" => 1e6,
        "k/s" | "kB/s" | "kB" | "k" | "us" => 1e3,
        _ => 1.0,
    };
    Some(number.parse::<f64>().ok()? * scale)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn values_have_three_digits_and_a_unit() {
        let cases = [
            (0.0, "ns", "0 ns"),
            (4.254, "ns", "4.25 ns"),
            (85.34, "ns", "85.3 ns"),
            (999.6, "ns", "1.00 us"),
            (1_361_000.0, "1/s", "1.36 M/s"),
            (99_960.0, "1/s", "100 k/s"),
            (1.5e9, "B/s", "1.50 GB/s"),
            (1.85, "", "1.85"),
            (100.0, "%", "100 %"),
        ];
        for (value, unit, text) in cases {
            assert_eq!(quantity(value, unit), text);
        }
        assert_eq!(ratio(3.0096), "3.01x");
        assert_eq!(count(9999), "9999");
        assert_eq!(count(1_234_567), "1.23 M");
    }

    proptest! {
        #[test]
        fn a_quantity_round_trips_to_three_digits(
            mantissa in 1.0..10.0_f64,
            exponent in 0..12,
            unit in prop::sample::select(vec!["ns", "1/s", "B/s", ""]),
        ) {
            let value = mantissa * 10_f64.powi(exponent);
            let back = read_back(&quantity(value, unit)).unwrap();
            prop_assert!((back / value - 1.0).abs() <= 0.005_001, "{value} {unit}: {back}");
        }
    }
}
