//! The two text formats of metrics: OpenMetrics 1.0.0, and the text format 0.0.4 of Prometheus.
//!
//! They differ in the name of a counter's family, which has the suffix `_total` in the older
//! format, and in the last line, which only OpenMetrics has.

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// OpenMetrics 1.0.0: for a client that accepts it.
    OpenMetrics,
    /// Prometheus 0.0.4: for all other clients.
    Prometheus,
}

impl MetricsFormat {
    /// The format for the value of an `Accept` header, as Prometheus' own libraries choose it.
    pub fn of_accept(accept: &str) -> MetricsFormat {
        let accepts = accept.split(',').any(|range| {
            let mut parts = range.split(';').map(str::trim);
            let is_open = parts.next().is_some_and(|it| it == "application/openmetrics-text");
            // RFC 9110 12.4.2: a weight of 0 is not acceptable.
            let is_refused = |it: &str| {
                let weight = it.strip_prefix("q=").and_then(|weight| weight.parse::<f64>().ok());
                weight == Some(0.0)
            };
            is_open && !parts.any(is_refused)
        });
        if accepts { MetricsFormat::OpenMetrics } else { MetricsFormat::Prometheus }
    }

    /// The content type of an answer.
    pub const fn content_type(self) -> &'static str {
        match self {
            MetricsFormat::OpenMetrics => {
                "application/openmetrics-text; version=1.0.0; charset=utf-8"
            }
            MetricsFormat::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// A text in OpenMetrics in this format. Each family begins with `# HELP`, then `# TYPE`.
    pub(super) fn convert(self, open_metrics: String) -> String {
        if self == MetricsFormat::OpenMetrics {
            return open_metrics;
        }
        let mut text = String::with_capacity(open_metrics.len());
        let mut lines = open_metrics.lines().peekable();
        while let Some(line) = lines.next() {
            let is_counter = |line: &str| line.starts_with("# TYPE ") && line.ends_with(" counter");
            let of_counter = match line.split(' ').nth(1) {
                Some("HELP") => lines.peek().is_some_and(|next| is_counter(next)),
                _ => is_counter(line),
            };
            let mut words = line.splitn(4, ' ');
            match (words.next(), words.next(), words.next(), words.next()) {
                (Some("#"), Some("EOF"), None, None) => {}
                (Some("#"), Some(what), Some(name), Some(rest)) if of_counter => {
                    text.push_str(&format!("# {what} {name}_total {rest}\n"));
                }
                _ => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_open_metrics_if_it_accepts_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.75,\
                          application/openmetrics-text;version=0.0.1;q=0.5,\
                          text/plain;version=0.0.4;q=0.25,*/*;q=0.1";
        for (accept, format) in [
            (prometheus, MetricsFormat::OpenMetrics),
            ("application/openmetrics-text", MetricsFormat::OpenMetrics),
            ("text/plain, application/openmetrics-text", MetricsFormat::OpenMetrics),
            ("", MetricsFormat::Prometheus),
            ("*/*", MetricsFormat::Prometheus),
            ("text/plain;version=0.0.4", MetricsFormat::Prometheus),
            ("application/openmetrics-text;q=0.0, */*", MetricsFormat::Prometheus),
            (";,;q=x", MetricsFormat::Prometheus),
        ] {
            assert_eq!(MetricsFormat::of_accept(accept), format, "{accept}");
        }
    }

    #[test]
    fn counters_have_the_suffix_in_their_help_and_type() {
        let open = "# HELP a A counter\n# TYPE a counter\na_total{x=\"# EOF\"} 1\n\
                    # HELP g A gauge\n# TYPE g gauge\ng 2\n# EOF\n";
        let expected = "# HELP a_total A counter\n# TYPE a_total counter\na_total{x=\"# EOF\"} 1\n\
                        # HELP g A gauge\n# TYPE g gauge\ng 2\n";
        assert_eq!(MetricsFormat::Prometheus.convert(open.to_owned()), expected);
        assert_eq!(MetricsFormat::OpenMetrics.convert(open.to_owned()), open);
    }
}
