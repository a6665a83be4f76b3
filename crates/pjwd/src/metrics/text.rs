//! The metrics table as text, in the formats that Prometheus reads.
//!
//! node_exporter reads [the classic format](https://prometheus.io/docs/instrumenting/exposition_formats/) from text
//! files. In [OpenMetrics](https://prometheus.io/docs/specs/om/open_metrics_spec/) the HELP and TYPE lines of a
//! counter omit `_total`, and the text ends in `# EOF`. Everything else is the same.

use super::family::{Escaped, MetricKind, SampleWriter, append_formatted};
use super::{facts::MetricValues, table::METRIC_FAMILIES};

/// A text format of metrics that Prometheus can read: the classic format or OpenMetrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MetricsFormat {
    /// The classic text format, version 0.0.4.
    #[default]
    Classic,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl MetricsFormat {
    /// Returns the value of the HTTP header Content-Type for a metrics text in this format.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            MetricsFormat::Classic => "text/plain; version=0.0.4; charset=utf-8",
            MetricsFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Returns all metrics of pjwd with their `values` as one text in the format `format`. The text includes the HELP and
/// TYPE lines of each metric.
#[must_use]
pub fn metrics_text(values: &MetricValues<'_>, format: MetricsFormat) -> String {
    // A first estimate. A text with many jobs grows the string a few times.
    let mut text = String::with_capacity(16 * 1024 + values.jobs.len() * 512);
    for family in METRIC_FAMILIES {
        let name = match format {
            MetricsFormat::OpenMetrics => family.name.strip_suffix("_total").unwrap_or(family.name),
            MetricsFormat::Classic => family.name,
        };
        let kind = match family.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        append_formatted(
            &mut text,
            format_args!("# HELP {name} {}\n# TYPE {name} {kind}\n", Escaped(family.help)),
        );
        (family.write_samples)(values, &mut SampleWriter::new(&mut text, family));
    }
    if format == MetricsFormat::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}
