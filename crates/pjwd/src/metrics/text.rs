//! The table as text, in the formats that Prometheus reads.
//!
//! [The classic format](https://prometheus.io/docs/instrumenting/exposition_formats/) is what node_exporter takes from
//! text files; in [OpenMetrics](https://prometheus.io/docs/specs/om/open_metrics_spec/) a counter is called without its
//! `_total` where it is described, and the text has an end. Everything else is the same in both.

use std::fmt::{Display, Write};
use std::time::Duration;

use super::counters::{BOUNDS, Times};
use super::facts::Facts;
use super::table::{FAMILIES, Family, Kind};

/// Which format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// The classic one, version 0.0.4.
    #[default]
    Classic,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Dialect {
    /// What HTTP calls it.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Dialect::Classic => "text/plain; version=0.0.4; charset=utf-8",
            Dialect::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The whole table.
#[must_use]
pub fn write(facts: &Facts<'_>, dialect: Dialect) -> String {
    // Some hundred bytes a line; a text of many jobs grows a few times.
    let mut text = String::with_capacity(16 * 1024 + facts.jobs.len() * 512);
    for family in FAMILIES {
        let name = match dialect {
            Dialect::OpenMetrics => family.name.strip_suffix("_total").unwrap_or(family.name),
            Dialect::Classic => family.name,
        };
        let kind = match family.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        put(&mut text, format_args!("# HELP {name} {}\n# TYPE {name} {kind}\n", Escaped(family.help)));
        (family.read)(facts, &mut Samples { text: &mut text, family });
    }
    if dialect == Dialect::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

/// Where the values of one family go.
#[derive(Debug)]
pub struct Samples<'t> {
    text: &'t mut String,
    family: &'t Family,
}

impl Samples<'_> {
    /// One value without labels.
    pub fn value(&mut self, value: impl Display) {
        self.labelled(&[], value);
    }

    /// One value; `labels` are the values of the family's labels, in their order.
    pub fn labelled(&mut self, labels: &[&str], value: impl Display) {
        debug_assert_eq!(labels.len(), self.family.labels.len(), "{}", self.family.name);
        self.line("", self.family.labels.iter().copied().zip(labels.iter().copied()), value);
    }

    /// A length of time in seconds.
    pub fn seconds(&mut self, time: Duration) {
        self.value(time.as_secs_f64());
    }

    /// A whole histogram: buckets hold what is in those below them too.
    pub fn times(&mut self, times: &Times) {
        let mut below = 0;
        for ((_, bound), bucket) in BOUNDS.iter().zip(times.buckets) {
            below += bucket;
            self.line("_bucket", [("le", *bound)], below);
        }
        self.line("_bucket", [("le", "+Inf")], times.count);
        self.line("_sum", [], times.sum.as_secs_f64());
        self.line("_count", [], times.count);
    }

    fn line<'l>(
        &mut self,
        suffix: &str,
        labels: impl IntoIterator<Item = (&'l str, &'l str)>,
        value: impl Display,
    ) {
        put(self.text, format_args!("{}{suffix}", self.family.name));
        let mut before = '{';
        for (label, value) in labels {
            put(self.text, format_args!("{before}{label}=\"{}\"", Escaped(value)));
            before = ',';
        }
        if before == ',' {
            self.text.push('}');
        }
        put(self.text, format_args!(" {value}\n"));
    }
}

fn put(text: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a String can't fail.
    let _ = text.write_fmt(what);
}

/// A text as either format wants it inside quotation marks, which serves for what stands outside them too: nothing in
/// it can end the label, the line or the file.
struct Escaped<'t>(&'t str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for character in self.0.chars() {
            match character {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}
