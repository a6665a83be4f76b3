//! `advise`: how well a farm uses its cores, as JSON for scripts and as a table for people.

use std::fmt::Write;

use pjw_spawn::farm::advise::FarmCosts;
use serde::Serialize;

use super::text::count_with_noun;
use super::{Terminal, style};

/// The efficiencies of the table, in thousandths.
const EFFICIENCIES: [u32; 5] = [500, 750, 900, 950, 990];
/// The efficiency that the advice aims at, in thousandths.
const GOOD_EFFICIENCY: u32 = 900;
/// A part of the advice if no number of items that a farm can have is enough: the reason, and what helps. The advised
/// number of workers follows. The serial part is the part of the program's run in which only one process works.
const TOO_LONG: &str = "because the serial part is too long for items of this length: make the serial part shorter or \
                        the items longer, or take";

/// The input and the result of `pjwctl advise`, which computes how well a farm uses its cores. A farm is a group of
/// worker processes that compute numbered work items. The input is the time of the serial part, the time of one item
/// and the number of workers. The result is an estimate for a given number of items, a table of numbers of items for
/// several efficiencies ([`FarmEstimate::efficiency`]), and a sentence of advice. `--json` prints this type as JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FarmAdvice {
    /// The time of the serial part in seconds: the time in which only one process works.
    pub serial_s: f64,
    /// The time of one item on one core, in seconds.
    pub item_s: f64,
    /// The number of workers.
    pub workers: u32,
    /// The estimate for the number of items that the option `--items` gives. `None` without this option.
    pub job: Option<FarmEstimate>,
    /// The numbers of items that the farm needs for several efficiencies.
    pub needed: Vec<NeededItems>,
    /// The advice in one sentence.
    pub advice: String,
}

/// The estimated times and the estimated efficiency of a farm for the number of items in the option `--items`. A farm
/// is a group of worker processes that compute numbered work items. The efficiency is a number from 0 to 1: the time
/// that a single process on one core needs for the same items, divided by the core time that the farm occupies (its
/// wall-clock time multiplied by its number of workers). Part of the JSON of `pjwctl advise`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FarmEstimate {
    /// The number of items.
    pub items: u64,
    /// The wall-clock time that the farm needs, in seconds.
    pub wall_s: f64,
    /// The wall-clock time that a single process on one core needs, in seconds.
    pub one_core_s: f64,
    /// The speedup: `one_core_s / wall_s`.
    pub speedup: f64,
    /// The efficiency, from 0 to 1: `one_core_s / held_core_s`.
    pub efficiency: f64,
    /// The core time that the farm occupies, in core seconds: `wall_s` multiplied by the number of workers.
    pub held_core_s: f64,
    /// The idle part of `held_core_s`, in core seconds.
    pub idle_core_s: f64,
    /// The largest number of workers with an efficiency of at least 0.9, at most the given number of workers. 1 if no
    /// number of workers has this efficiency.
    pub workers_for_90_percent: u32,
}

/// The smallest number of items with which a farm reaches the efficiency in the field `efficiency`. A farm is a group
/// of worker processes that compute numbered work items. The efficiency is a number from 0 to 1: the time that a single
/// process on one core needs for the same items, divided by the core time that the farm occupies (its wall-clock time
/// multiplied by its number of workers). Part of the JSON of `pjwctl advise`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NeededItems {
    /// The efficiency to reach, from 0 to 1.
    pub efficiency: f64,
    /// The smallest number of items. `None` if it is larger than the number of items that a farm can have.
    pub items: Option<u64>,
    /// The wall-clock time that the farm needs for `items` items, in seconds. `None` if `items` is `None`.
    pub wall_s: Option<f64>,
}

impl FarmAdvice {
    /// Computes the advice for a farm, a group of worker processes that compute numbered work items. `costs` contains
    /// the time in which only one process works, the time of one item, and the number of workers.
    ///
    /// - If `items` is `Some`, the advice is about a run with this number of items, and the result contains an estimate
    ///   of the run time.
    /// - If `items` is `None`, the advice says how many items the farm needs for an efficiency of 90 %
    ///   ([`FarmEstimate::efficiency`]), or that no number of items is enough.
    ///
    /// For a farm with a single worker, the advice is always to use more workers.
    #[must_use]
    pub fn new(costs: &FarmCosts, items: Option<u64>) -> Self {
        let needed = EFFICIENCIES.map(|permille| {
            let items = costs.min_items_for_efficiency(permille);
            let wall_s = items.map(|items| costs.wall_time(items).as_secs_f64());
            NeededItems { efficiency: share(permille), items, wall_s }
        });
        Self {
            serial_s: costs.serial.as_secs_f64(),
            item_s: costs.item.as_secs_f64(),
            workers: costs.workers,
            job: items.map(|items| FarmEstimate::new(costs, items)),
            needed: needed.into(),
            advice: advice_sentence(costs, items),
        }
    }
}

impl FarmEstimate {
    /// Computes the estimate for a farm with the costs `costs` that computes `items` items.
    fn new(costs: &FarmCosts, items: u64) -> Self {
        let wall_s = costs.wall_time(items).as_secs_f64();
        let one_core_s = costs.time_on_one_core(items).as_secs_f64();
        let held_core_s = costs.occupied_core_time(items).as_secs_f64();
        Self {
            items,
            wall_s,
            one_core_s,
            speedup: one_core_s / wall_s,
            efficiency: share(costs.efficiency_permille(items)),
            held_core_s,
            idle_core_s: (held_core_s - one_core_s).max(0.0),
            workers_for_90_percent: costs.max_workers_for_efficiency(items, GOOD_EFFICIENCY),
        }
    }
}

fn share(permille: u32) -> f64 {
    f64::from(permille) / 1000.0
}

/// Returns a sentence of advice about a farm with the costs `costs`. A farm is a group of worker processes that
/// compute numbered work items.
///
/// - Without `items`, the sentence says how many items the farm needs, so that 90 % of its core time is used.
/// - With `items`, the sentence says which share of its core time the farm uses for this number of items. Below 90 %,
///   the sentence also proposes other numbers of items and of workers.
/// - If the farm would need more items than it can have, the sentence says so, and what helps.
/// - For one worker, the sentence says that it gains nothing.
fn advice_sentence(costs: &FarmCosts, items: Option<u64>) -> String {
    if costs.workers == 1 {
        return "A farm of 1 worker gains nothing over a program without one: take 2 workers or more."
            .to_owned();
    }
    let workers = count_with_noun(costs.workers, "worker", "workers");
    let enough = costs.min_items_for_efficiency(GOOD_EFFICIENCY);
    let Some(items) = items else {
        return match enough {
            Some(enough) => format!(
                "Give a farm of {workers} at least {} in one job: then 90 % of its core time is used.",
                count_with_noun(enough, "item", "items")
            ),
            None => format!(
                "No number of items that a farm can have uses 90 % of the core time of {workers}, {TOO_LONG} fewer \
                 workers."
            ),
        };
    };
    let used = costs.efficiency_permille(items) / 10;
    if used >= GOOD_EFFICIENCY / 10 {
        return format!("{used} % of the core time of {workers} is used.");
    }
    let fewer = match costs.max_workers_for_efficiency(items, GOOD_EFFICIENCY) {
        1 => "a program without a farm".to_owned(),
        max_workers => format!("{max_workers} workers"),
    };
    match enough {
        Some(enough) if enough > items => {
            format!(
                "Only {used} % of the core time of {workers} is used: take {enough} items in one job, or {fewer}."
            )
        }
        None => format!(
            "Only {used} % of the core time of {workers} is used, and no number of items that a farm can have uses \
             90 %, {TOO_LONG} {fewer}."
        ),
        // There are enough items, but the last round has fewer items than workers.
        Some(_) => format!(
            "Only {used} % of the core time of {workers} is used: take a multiple of {} items, or {fewer}.",
            costs.workers
        ),
    }
}

/// Returns the text that `pjwctl advise` prints: how many items a farm (a group of worker processes that compute
/// numbered items) should compute in one run, so that its workers are used well. The text has the measured costs of the
/// farm, the estimate for the number of items of the option `--items`, a table, and the advice in one sentence. The
/// table shows for several efficiencies ([`FarmEstimate::efficiency`]) from 50 % to 99 % how many items are needed to
/// reach the efficiency, and how long the farm takes for these items.
#[must_use]
pub fn advice_text(advice: &FarmAdvice, term: Terminal) -> String {
    let heading = format!(
        "serial part {}, item {}, {}",
        time(advice.serial_s),
        time(advice.item_s),
        count_with_noun(advice.workers, "worker", "workers")
    );
    let mut text = style::apply_style(&heading, style::HEADING, term) + "\n\n";
    if let Some(job) = &advice.job {
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(text, "{name:<24}{value:>14}");
        };
        line("items", &job.items.to_string());
        line("the farm takes", &time(job.wall_s));
        line("one core takes", &time(job.one_core_s));
        line("speedup", &format!("{:.1}", job.speedup));
        line("core time used", &format!("{:.1} %", job.efficiency * 100.0));
        line("core time idle", &time(job.idle_core_s));
        text.push('\n');
    }
    let _ = writeln!(text, "{:>14}{:>20}{:>14}", "core time used", "items needed", "that take");
    for needed in &advice.needed {
        let items = needed.items.map_or_else(|| "-".to_owned(), |items| items.to_string());
        let wall = needed.wall_s.map_or_else(|| "-".to_owned(), time);
        let _ = writeln!(text, "{:>12.0} %{items:>20}{wall:>14}", needed.efficiency * 100.0);
    }
    text + "\n" + &advice.advice + "\n"
}

/// A time with the unit in which it is easy to read.
fn time(seconds: f64) -> String {
    const LONG_UNITS: [(f64, &str); 3] = [(86_400.0, "d"), (3600.0, "h"), (60.0, "min")];
    match LONG_UNITS.into_iter().find(|(size, _)| seconds >= 2.0 * size) {
        Some((size, unit)) => format!("{} {unit}", rounded(seconds / size, 1)),
        None if seconds > 0.0 && seconds < 1.0 => format!("{} ms", rounded(seconds * 1000.0, 3)),
        None => format!("{} s", rounded(seconds, 1)),
    }
}

/// Returns `value` as text with at most `digits` digits after the point, without zeros at its end.
fn rounded(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const PLAIN: Terminal = Terminal { width: 80, has_colours: false };

    fn advice(items: Option<u64>) -> FarmAdvice {
        let (serial, item) = (Duration::from_secs(300), Duration::from_secs(2));
        FarmAdvice::new(&FarmCosts { serial, item, workers: 8 }, items)
    }

    #[test]
    fn without_items_the_table_says_how_many_are_needed() {
        let text = advice_text(&advice(None), PLAIN);
        assert_eq!(
            text,
            "serial part 5 min, item 2 s, 8 workers\n\n\
             core time used        items needed     that take\n\
             \u{20}         50 %                 904       8.8 min\n\
             \u{20}         75 %                3000      17.5 min\n\
             \u{20}         90 %                9304      43.8 min\n\
             \u{20}         95 %               19800      87.5 min\n\
             \u{20}         99 %              103800         7.3 h\n\n\
             Give a farm of 8 workers at least 9304 items in one job: then 90 % of its core time is used.\n"
        );
    }

    #[test]
    fn with_items_the_sentence_names_a_number_of_items_or_of_workers() {
        let few = advice(Some(1000));
        assert_eq!(
            few.advice,
            "Only 52 % of the core time of 8 workers is used: take 9304 items in one job, or a program without a farm."
        );
        let job = few.job.unwrap();
        assert_eq!((job.wall_s, job.one_core_s, job.held_core_s), (550.0, 2300.0, 4400.0));
        assert!(advice(Some(4000)).advice.ends_with("or 4 workers."), "{}", advice(Some(4000)).advice);
        assert_eq!(advice(Some(9304)).advice, "90 % of the core time of 8 workers is used.");
        let text = advice_text(&advice(Some(1000)), PLAIN);
        assert!(text.contains("\nthe farm takes                 9.2 min\none core takes"), "{text}");
    }

    #[test]
    fn items_that_leave_workers_idle_in_the_last_round_are_advised_to_be_a_multiple() {
        let costs = FarmCosts { serial: Duration::ZERO, item: Duration::from_secs(1), workers: 8 };
        assert_eq!(
            FarmAdvice::new(&costs, Some(9)).advice,
            "Only 56 % of the core time of 8 workers is used: take a multiple of 8 items, or 5 workers."
        );
    }

    #[test]
    fn a_serial_part_that_no_number_of_items_makes_up_for_is_named_with_what_helps() {
        let (serial, item) = (Duration::from_secs(3600), Duration::from_micros(10));
        let costs = FarmCosts { serial, item, workers: 16_384 };
        let without_items = FarmAdvice::new(&costs, None);
        assert_eq!(
            without_items.advice,
            "No number of items that a farm can have uses 90 % of the core time of 16384 workers, because the \
             serial part is too long for items of this length: make the serial part shorter or the items \
             longer, or take fewer workers."
        );
        assert_eq!(
            FarmAdvice::new(&costs, Some(1_000_000)).advice,
            "Only 0 % of the core time of 16384 workers is used, and no number of items that a farm can have uses \
             90 %, because the serial part is too long for items of this length: make the serial part shorter or \
             the items longer, or take a program without a farm."
        );
        let json = serde_json::to_value(&without_items).unwrap();
        assert!(json["needed"][0]["items"].is_number(), "{json}");
        assert!(json["needed"][2]["items"].is_null() && json["needed"][2]["wall_s"].is_null(), "{json}");
    }

    #[test]
    fn a_farm_of_one_worker_is_said_to_gain_nothing() {
        let (serial, item) = (Duration::from_secs(300), Duration::from_secs(2));
        for items in [None, Some(1000)] {
            let advice = FarmAdvice::new(&FarmCosts { serial, item, workers: 1 }, items).advice;
            assert!(advice.starts_with("A farm of 1 worker gains nothing"), "{advice}");
        }
    }

    #[test]
    fn json_has_the_names_that_scripts_rely_on() {
        let json = serde_json::to_value(advice(Some(1000))).unwrap();
        for name in ["serial_s", "item_s", "workers", "job", "needed", "advice"] {
            assert!(json.get(name).is_some(), "{name}");
        }
        for name in ["items", "wall_s", "speedup", "efficiency", "held_core_s", "idle_core_s"] {
            assert!(json["job"].get(name).is_some(), "{name}");
        }
        assert_eq!(json["needed"][2]["items"], 9304);
        assert!(serde_json::to_value(advice(None)).unwrap()["job"].is_null());
    }
}
