//! `simulate --demand`: the result of the replay of a curve of demand, as JSON for scripts and as a table for people.

use std::fmt::Write;
use std::time::Duration;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, TableStyle};
use pjw_core::policy::LendingPolicy;
use pjw_sim::demand::replay::{DemandReplayResult, OwnerTotals};
use serde::Serialize;

use super::simulate::duration_text;
use super::{Terminal, style, text::count_with_noun};

const SECONDS_PER_HOUR: f64 = 3600.0;

/// The result of `pjwctl simulate --demand`: how well the machine is used without and with the lending of idle cores.
/// The command replays a curve (the numbers of cores that some jobs use over time, from a file), once without lending
/// and once with lending. The jobs in the curve are called owners: they own cores, and lend the cores that they do not
/// use. One more job, the besteffort job, uses all free and lent cores. A core hour is one core for one hour. `--json`
/// prints this type as JSON.
#[derive(Debug, Clone, Serialize)]
pub struct LendingSimulationResult {
    /// The results of the owners, in the order of the columns of the curve.
    pub owners: Vec<OwnerSummary>,
    /// The number of cores of the machine that jobs can use: all except the cores that are reserved for the system.
    pub usable: u32,
    /// The time from the first line of the curve to the last line, in seconds.
    pub duration_s: f64,
    /// The settings of lending in the replay with lending.
    pub lending: LendingSettings,
    /// The use of the machine if no core of an owner is lent. The besteffort job then has only the free cores.
    pub without_lending: UtilisationSummary,
    /// The use of the machine if the besteffort job also has the cores that the owners lend.
    pub with_lending: UtilisationSummary,
    /// The core hours for which cores of owners were lent.
    pub lent_core_hours: f64,
    /// The number of times that a core was lent. Two cores that are lent at the same time count as two.
    pub loans: u64,
    /// The number of times that a lent core was taken back. Two cores that are taken back at the same time count as
    /// two.
    pub revocations: u64,
    /// `revocations`, divided by the number of cores of all owners and by the duration of the curve in hours.
    pub revocations_per_core_hour: f64,
}

/// The results of `pjwctl simulate --demand` for one owner: a job that owns cores and lends the cores that it does
/// not use.
#[derive(Debug, Clone, Serialize)]
pub struct OwnerSummary {
    /// The name of the owner.
    pub name: String,
    /// The number of cores that the job owns.
    pub cores: u32,
    /// The mean number of cores that the job used.
    pub mean_cores_used: f64,
    /// The core hours for which cores of the owner were lent. A core hour is one core for one hour.
    pub lent_core_hours: f64,
    /// The number of times that a core of the owner was lent.
    pub loans: u64,
    /// The number of times that a lent core of the owner was taken back.
    pub revocations: u64,
    /// `revocations`, divided by the number of cores of the owner and by the duration of the replay in hours.
    pub revocations_per_core_hour: f64,
}

/// The settings of lending in the result of `pjwctl simulate --demand`. Jobs lend cores that they own and do not
/// use. The settings are the number of idle cores that each job does not lend (configuration key `lending.buffer`),
/// the time for which a core must be idle before it is lent (`lending.lend_after`), and the maximum number of cores
/// that a job lends at the same moment (`lending.at_once`).
#[derive(Debug, Clone, Serialize)]
pub struct LendingSettings {
    /// The number of idle cores of each owner that are not lent.
    pub buffer: u32,
    /// The time for which a core must be idle before it is lent, in seconds.
    pub lend_after_s: f64,
    /// The maximum number of cores of one owner that are lent at once.
    pub at_once: u32,
}

/// The use of the machine in one replay of `pjwctl simulate --demand`: the utilisation of the cores that jobs can use,
/// and the core hours of the besteffort job. The besteffort job is a job that the simulation adds to the replayed jobs.
/// The besteffort job uses the free cores, and the cores that the replayed jobs lend.
#[derive(Debug, Clone, Serialize)]
pub struct UtilisationSummary {
    /// The utilisation of the machine, from 0 to 1: the core time that the owners and the besteffort job used, divided
    /// by the core time of all usable cores. Core time is a number of cores multiplied by a time.
    pub utilisation: f64,
    /// The core hours that the besteffort job used. A core hour is one core for one hour.
    pub besteffort_core_hours: f64,
}

impl LendingSimulationResult {
    /// Computes the result from two replays of the same curve of demand (the numbers of cores that jobs use over
    /// time). Idle cores are lent only in the replay `with_lending`. `lending` contains the settings of this lending.
    #[must_use]
    pub fn new(
        without_lending: &DemandReplayResult,
        with_lending: &DemandReplayResult,
        lending: &LendingPolicy,
    ) -> Self {
        let owners = &with_lending.owners;
        let revocations = owners.iter().map(|totals| totals.revocations).sum();
        let cores = owners.iter().map(|totals| f64::from(totals.owner.cores)).sum();
        Self {
            owners: owners.iter().map(|totals| OwnerSummary::new(totals, with_lending.duration)).collect(),
            usable: with_lending.usable_cores,
            duration_s: with_lending.duration.as_secs_f64(),
            lending: LendingSettings {
                buffer: lending.buffer_cores,
                lend_after_s: lending.lend_after.as_secs_f64(),
                at_once: lending.cores_at_once,
            },
            without_lending: UtilisationSummary::new(without_lending),
            with_lending: UtilisationSummary::new(with_lending),
            lent_core_hours: owners.iter().map(|totals| totals.lent_core_s).sum::<f64>() / SECONDS_PER_HOUR,
            loans: owners.iter().map(|totals| totals.loans).sum(),
            revocations,
            revocations_per_core_hour: per_core_hour(revocations, cores, with_lending.duration),
        }
    }
}

impl OwnerSummary {
    /// Computes the summary of an owner from its totals. `duration` is the simulated time.
    fn new(totals: &OwnerTotals, duration: Duration) -> Self {
        let cores = totals.owner.cores;
        Self {
            name: totals.owner.job.name().to_owned(),
            cores,
            mean_cores_used: totals.used_core_s / duration.as_secs_f64(),
            lent_core_hours: totals.lent_core_s / SECONDS_PER_HOUR,
            loans: totals.loans,
            revocations: totals.revocations,
            revocations_per_core_hour: per_core_hour(totals.revocations, f64::from(cores), duration),
        }
    }
}

impl UtilisationSummary {
    fn new(replay: &DemandReplayResult) -> Self {
        Self {
            utilisation: replay.utilisation(),
            besteffort_core_hours: replay.besteffort_core_s / SECONDS_PER_HOUR,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people: 53 bits are plenty")]
fn per_core_hour(revocations: u64, cores: f64, duration: Duration) -> f64 {
    revocations as f64 * SECONDS_PER_HOUR / (cores * duration.as_secs_f64())
}

/// Returns the text of `pjwctl simulate --demand`: how well the machine is used without and with lending, and a table
/// of the owners. An owner is a job that owns cores and lends the cores that it does not use.
#[must_use]
pub fn demand_text(result: &LendingSimulationResult, term: Terminal) -> String {
    let owners = u32::try_from(result.owners.len()).unwrap_or(u32::MAX);
    let owned: u32 = result.owners.iter().map(|owner| owner.cores).fold(0, u32::saturating_add);
    let heading = format!(
        "{} with {} of {}, for {}",
        count_with_noun(owners, "owner", "owners"),
        count_with_noun(owned, "core", "cores"),
        result.usable,
        duration_text(Duration::from_secs_f64(result.duration_s).as_secs())
    );
    let mut text = style::apply_style(&heading, style::HEADING, term) + "\n\n";
    let (without, with) = (&result.without_lending, &result.with_lending);
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let hours = |hours: f64| format!("{hours:.1}");
    let mut row = |name: &str, without: &str, with: &str| {
        let _ = writeln!(text, "{name:<26}{without:>16}{with:>15}");
    };
    row("", "without lending", "with lending");
    row("utilisation", &percent(without.utilisation), &percent(with.utilisation));
    row("besteffort, core hours", &hours(without.besteffort_core_hours), &hours(with.besteffort_core_hours));
    row("lent, core hours", "0.0", &hours(result.lent_core_hours));
    row("loans of a core", "0", &result.loans.to_string());
    row("revocations of a core", "0", &result.revocations.to_string());
    row("  per core and hour", "0.00", &format!("{:.2}", result.revocations_per_core_hour));
    text + "\n" + &owner_table(&result.owners)
}

/// Returns a table with one row for each owner: a job that lends its idle cores.
fn owner_table(owners: &[OwnerSummary]) -> String {
    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["owner", "cores", "used", "lent, core hours", "revocations", "per core and hour"]);
    for owner in owners {
        table.add_row(
            [
                owner.name.clone(),
                owner.cores.to_string(),
                format!("{:.2}", owner.mean_cores_used),
                format!("{:.1}", owner.lent_core_hours),
                owner.revocations.to_string(),
                format!("{:.2}", owner.revocations_per_core_hour),
            ]
            .map(Cell::new),
        );
    }
    for (n, column) in table.column_iter_mut().enumerate() {
        let alignment = if n > 0 { CellAlignment::Right } else { CellAlignment::Left };
        column.set_padding((if n > 0 { 2 } else { 0 }, 0)).set_cell_alignment(alignment);
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use pjw_core::cpuset::CpuSet;
    use pjw_core::testing::regular_topology;
    use pjw_sim::demand::curve::parse;
    use pjw_sim::demand::replay::{DemandReplayOptions, replay_demand};

    use super::*;

    fn result() -> LendingSimulationResult {
        let topology = regular_topology(1, 1, 2, 4, 2);
        let curve = parse(b"time_s,web:4,db\n0,0.25,2\n36000,4,2\n72000,0.25,0\n108000,0,0\n").unwrap();
        let replayed = |enabled| {
            let lending = LendingPolicy { enabled, ..LendingPolicy::default() };
            let options = DemandReplayOptions { housekeeping_cpus: CpuSet::new(), lending };
            replay_demand(&topology, &curve, &options).unwrap()
        };
        LendingSimulationResult::new(&replayed(false), &replayed(true), &LendingPolicy::default())
    }

    #[test]
    fn the_text_for_people_compares_both_replays_and_lists_the_owners() {
        insta::assert_snapshot!(demand_text(&result(), Terminal { width: 80, has_colours: false }), @r"
        2 owners with 6 cores of 8, for 1d 06:00:00

                                   without lending   with lending
        utilisation                         60.4 %         81.2 %
        besteffort, core hours                60.0          110.0
        lent, core hours                       0.0           50.0
        loans of a core                          0              5
        revocations of a core                    0              2
          per core and hour                   0.00           0.01

        owner  cores  used  lent, core hours  revocations  per core and hour
        web        4  1.50              40.0            2               0.02
        db         2  1.33              10.0            0               0.00
        ");
    }

    #[test]
    fn scripts_get_the_names_of_the_contract() {
        let json = serde_json::to_value(result()).unwrap();
        for name in ["duration_s", "lent_core_hours", "revocations_per_core_hour"] {
            assert!(json[name].is_f64(), "{name}: {json}");
        }
        for name in ["usable", "loans", "revocations"] {
            assert!(json[name].is_u64(), "{name}: {json}");
        }
        for part in ["without_lending", "with_lending"] {
            assert!(json[part]["utilisation"].is_f64() && json[part]["besteffort_core_hours"].is_f64());
        }
        assert_eq!(json["lending"], serde_json::json!({"buffer": 1, "lend_after_s": 2.0, "at_once": 4}));
        assert_eq!((&json["owners"][1]["name"], &json["owners"][1]["cores"]), (&"db".into(), &2.into()));
        assert!(
            json["owners"][0]["mean_cores_used"].is_f64() && json["owners"][0]["lent_core_hours"].is_f64()
        );
    }
}
