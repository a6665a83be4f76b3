//! The shipped dashboard, the alert rules and the documentation agree with the metrics table.

use std::collections::BTreeSet;

use serde_json::Value;

use super::family::MetricKind;
use super::table::METRIC_FAMILIES;

const DOCUMENTED: &str = include_str!("../../../../docs/metrics.md");
const DASHBOARD: &str = include_str!("../../../../config/grafana/pjw.json");
const ALERTS: &str = include_str!("../../../../config/prometheus/pjw-alerts.yaml");

/// The names of all samples that the daemon writes.
fn samples() -> BTreeSet<String> {
    let of = |name: &str, kind: MetricKind| match kind {
        MetricKind::Histogram => {
            ["_bucket", "_sum", "_count"].iter().map(|end| format!("{name}{end}")).collect()
        }
        MetricKind::Counter | MetricKind::Gauge => vec![name.to_owned()],
    };
    METRIC_FAMILIES.iter().flat_map(|family| of(family.name, family.kind)).collect()
}

/// The names of metrics in a text.
fn metric_names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("pjw_")).map(ToOwned::to_owned).collect()
}

/// Every query of the dashboard, and the queries of its variables.
fn queries(value: &Value) -> Vec<String> {
    match value {
        Value::Object(fields) => {
            let mine = ["expr", "definition"].iter().filter_map(|name| fields.get(*name)?.as_str());
            mine.map(ToOwned::to_owned).chain(fields.values().flat_map(queries)).collect()
        }
        Value::Array(items) => items.iter().flat_map(queries).collect(),
        _ => Vec::new(),
    }
}

fn dashboard() -> Value {
    serde_json::from_str(DASHBOARD).unwrap()
}

/// The expression of each alert.
fn expressions() -> Vec<&'static str> {
    ALERTS.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).collect()
}

#[test]
fn the_documentation_lists_the_table() {
    let row = |family: &super::family::MetricFamily| {
        let kind = match family.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let labels: Vec<String> = family.label_names.iter().map(|label| format!("`{label}`")).collect();
        format!("| `{}` | {kind} | {} | {} |", family.name, labels.join(", "), family.help)
    };
    let expected: Vec<String> = METRIC_FAMILIES.iter().map(row).collect();
    let rows: Vec<&str> = DOCUMENTED.lines().filter(|line| line.starts_with("| `pjw_")).collect();
    assert_eq!(rows, expected, "docs/metrics.md should have:\n{}\n", expected.join("\n"));
}

#[test]
fn dashboard_and_alerts_use_only_existing_metrics() {
    let known = samples();
    for (file, text) in
        [("the dashboard", queries(&dashboard()).join("\n")), ("an alert", expressions().join("\n"))]
    {
        let unknown: Vec<String> = metric_names(&text).difference(&known).cloned().collect();
        assert!(unknown.is_empty(), "{file} asks for {unknown:?}, which nobody tells");
    }
}

#[test]
fn every_metric_is_used_by_the_dashboard_or_an_alert() {
    let shown = metric_names(&queries(&dashboard()).join("\n"));
    let hidden: Vec<&str> = METRIC_FAMILIES
        .iter()
        .map(|family| family.name)
        .filter(|name| !shown.iter().any(|shown| shown.starts_with(name)))
        .collect();
    assert!(hidden.is_empty(), "{hidden:?} is in no panel of the dashboard");
}

#[test]
fn queries_use_only_existing_labels() {
    // Labels that Prometheus and histograms add.
    let mut known: BTreeSet<&str> = ["instance", "le"].into();
    known.extend(METRIC_FAMILIES.iter().flat_map(|family| family.label_names));
    let all = queries(&dashboard()).join("\n") + &expressions().join("\n");
    let inside = all.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0));
    let grouped = ["by (", "on (", "group_left("]
        .iter()
        .flat_map(|word| all.split(word).skip(1).filter_map(|rest| Some(rest.split_once(')')?.0)));
    let matched = inside.flat_map(|labels| labels.split("\",")).filter_map(|label| label.split('=').next());
    let asked = matched.chain(grouped.flat_map(|labels| labels.split(',')));
    for label in asked.map(str::trim).filter(|label| !label.is_empty()) {
        assert!(known.contains(label), "{label:?} is the label of no metric");
    }
}

#[test]
fn the_dashboard_is_valid_for_grafana() {
    let dashboard = dashboard();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    let mut places = BTreeSet::new();
    for panel in panels {
        let side = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        for x in side("x")..side("x") + side("w") {
            for y in side("y")..side("y") + side("h") {
                assert!(x < 24 && places.insert((x, y)), "{} lies over another panel", panel["title"]);
            }
        }
        if panel["type"] != "row" {
            let targets = panel["targets"].as_array().unwrap();
            assert!(!targets.is_empty(), "{}", panel["title"]);
            let refs: BTreeSet<&str> =
                targets.iter().map(|target| target["refId"].as_str().unwrap()).collect();
            assert_eq!(refs.len(), targets.len(), "{}", panel["title"]);
        }
    }
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 36 && dashboard["id"].is_null());
}

#[test]
fn every_alert_states_the_problem_and_the_remedy() {
    let alerts: Vec<&str> = ALERTS.split("- alert: ").skip(1).collect();
    assert_eq!(alerts.len(), expressions().len());
    let names: BTreeSet<&str> = alerts.iter().filter_map(|alert| alert.lines().next()).collect();
    assert_eq!(names.len(), alerts.len(), "a name stands twice");
    for alert in alerts {
        for part in ["expr: ", "severity: ", "summary: ", "description: ", "Remedy: ", "$labels.instance"] {
            assert!(alert.contains(part), "{part} is missing in {alert}");
        }
    }
}
