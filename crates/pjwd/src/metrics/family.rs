//! A metric family, and how its samples are written as text.

use std::fmt::{Display, Write};
use std::time::Duration;

use super::counters::{BUCKET_BOUNDS, DurationHistogram};
use super::facts::MetricValues;

/// The Prometheus type of a metric: counter, gauge or histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// The value only grows. It starts at 0 again when the daemon restarts, and when metrics are switched on again. The
    /// name of the metric ends in `_total`.
    Counter,
    /// The value can grow and shrink.
    Gauge,
    /// A distribution of values over buckets. The metric has several samples (values), whose names end in `_bucket`,
    /// `_sum` and `_count`.
    Histogram,
}

/// The definition of one metric (a metric family in the terms of Prometheus): its name, type, help text and labels,
/// and the function that writes its samples (values).
#[derive(Debug)]
pub struct MetricFamily {
    /// The name of the metric in the Prometheus format.
    pub name: &'static str,
    /// The Prometheus type of the metric, such as counter.
    pub kind: MetricKind,
    /// The names of the labels by which the samples of this metric differ, except the label `le` of a
    /// histogram. Empty if there are no such labels.
    pub label_names: &'static [&'static str],
    /// The meaning of the metric in one sentence, for the HELP line and the documentation.
    pub help: &'static str,
    /// The function that writes the samples of this metric from the computed values.
    pub write_samples: fn(&MetricValues<'_>, &mut SampleWriter<'_>),
}

/// Writes the samples (values) of one metric as lines of text in the Prometheus format.
#[derive(Debug)]
pub struct SampleWriter<'t> {
    text: &'t mut String,
    family: &'t MetricFamily,
}

impl<'t> SampleWriter<'t> {
    /// Makes a writer that appends the samples of the metric `family` to `text`.
    pub fn new(text: &'t mut String, family: &'t MetricFamily) -> Self {
        Self { text, family }
    }
}

impl SampleWriter<'_> {
    /// Writes `value` as the only sample of the metric of this writer. The metric must have no labels.
    pub fn write_value(&mut self, value: impl Display) {
        self.write_labelled(&[], value);
    }

    /// Writes `value` as one sample of the metric of this writer, with the label values `labels`. `labels` must have
    /// one value for each label name of the metric, in the same order.
    pub fn write_labelled(&mut self, labels: &[&str], value: impl Display) {
        debug_assert_eq!(labels.len(), self.family.label_names.len(), "{}", self.family.name);
        self.append_sample("", self.family.label_names.iter().copied().zip(labels.iter().copied()), value);
    }

    /// Writes the duration `time`, in seconds, as the only sample of the metric of this writer. The metric must have
    /// no labels.
    pub fn write_seconds(&mut self, time: Duration) {
        self.write_value(time.as_secs_f64());
    }

    /// Writes `histogram` as the samples of the metric of this writer: one sample for each bucket, the sum in
    /// seconds, and the number of durations. As Prometheus requires, the sample of a bucket includes the counts of
    /// all buckets with lower bounds.
    pub fn write_histogram(&mut self, histogram: &DurationHistogram) {
        let mut cumulative = 0;
        for ((_, bound), bucket) in BUCKET_BOUNDS.iter().zip(histogram.bucket_counts) {
            cumulative += bucket;
            self.append_sample("_bucket", [("le", *bound)], cumulative);
        }
        self.append_sample("_bucket", [("le", "+Inf")], histogram.count);
        self.append_sample("_sum", [], histogram.sum.as_secs_f64());
        self.append_sample("_count", [], histogram.count);
    }

    /// Appends one sample of the metric family as a line: the name of the family with `suffix`, the labels (name and
    /// value) and `value`.
    fn append_sample<'l>(
        &mut self,
        suffix: &str,
        labels: impl IntoIterator<Item = (&'l str, &'l str)>,
        value: impl Display,
    ) {
        append_formatted(self.text, format_args!("{}{suffix}", self.family.name));
        let mut separator = '{';
        for (label, value) in labels {
            append_formatted(self.text, format_args!("{separator}{label}=\"{}\"", Escaped(value)));
            separator = ',';
        }
        if separator == ',' {
            self.text.push('}');
        }
        append_formatted(self.text, format_args!(" {value}\n"));
    }
}

/// Appends the formatted text of `arguments` to `text`.
pub(super) fn append_formatted(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a String can't fail.
    let _ = text.write_fmt(arguments);
}

/// Displays a text with escaped quotation marks, backslashes and line ends, as the Prometheus formats require for the
/// value of a label. Also used for HELP lines, so that a line end in the text does not end the HELP line.
pub(super) struct Escaped<'t>(pub(super) &'t str);

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
