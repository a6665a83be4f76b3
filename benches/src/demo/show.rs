//! The output of the demo: the table of times, and what `pjwctl` shows of the running jobs.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, bail};

use super::experiment::{Experiment, ExperimentTimes, Medians, SettingTimes};
use crate::{
    measure::other_programs::BUSY_CPUS, programs::daemon::PrivateWarden, programs::interrupt::StopSignal,
    programs::program::wait_for, setup::scale::Scale,
};

/// The largest ratio of two times of B that counts as no slowdown.
const MAX_SLOWDOWN: f64 = 1.05;
/// How long the demo waits until pjwd has seen a running thread of a job.
const HOT_TIMEOUT: Duration = Duration::from_secs(15);

/// Returns the text that the demo prints before the first measurement. It describes the two jobs, with their numbers of
/// cores and workers.
#[must_use]
pub fn introduction(scale: &Scale) -> String {
    let Scale { core_count, b_cores, a_cores, a_workers, .. } = scale;
    format!(
        "Two jobs on {core_count} cores. Job B asked for {b_cores} and runs {b_cores} {}. Job A asked for \
         {a_cores} and starts {a_workers}.\nAll of them compute in steps and spin at a barrier after each. How long \
         does B take?\n",
        if *b_cores == 1 { "worker" } else { "workers" }
    )
}

/// Returns a warning that the demo prints if other programs keep the machine busy before the first measurement.
/// `others` is the number of CPUs that other programs use. `None` if this is less than [`BUSY_CPUS`].
#[must_use]
pub fn busy_warning(others: f64, scale: &Scale) -> Option<String> {
    let cpus = scale.usable_pus.len();
    (others >= BUSY_CPUS).then(|| {
        format!(
            "! Other programs use {others:.1} of these {cpus} CPUs now. The figures will say little about \
             pjwd. Run the demo on an idle machine.\n"
        )
    })
}

/// Returns the line that the demo prints after the repetition with the number `number`: the last run times of job B in
/// `times`. The line has a mark if other programs kept the machine busy.
#[must_use]
pub fn repetition_line(number: usize, times: &ExperimentTimes) -> String {
    let last = |row: &SettingTimes| row.seconds.last().copied().unwrap_or_default();
    let others =
        times.settings().into_iter().filter_map(|row| row.others_cpus.last().copied()).fold(0.0, f64::max);
    let mark =
        if others >= BUSY_CPUS { format!("  ! other programs used {others:.1} CPUs") } else { String::new() };
    format!(
        "  run {number}: alone {:.2} s, beside A {:.2} s, beside A with pjwd {:.2} s{mark}",
        last(&times.alone),
        last(&times.beside),
        last(&times.under_warden)
    )
}

/// Returns the table that the demo prints at its end: the run times of job B alone, beside job A, and beside job A with
/// pjwd. The last line says whether job A made job B slower. If other programs kept the machine busy, the last line
/// says that the times prove nothing.
#[must_use]
pub fn table(times: &ExperimentTimes, medians: &Medians) -> String {
    let Medians { repetitions, alone_s, beside_s, under_warden_s, .. } = medians;
    let mut text = format!(
        "\n  job B                      median of {repetitions}   against alone   fastest .. slowest\n"
    );
    let rows = [
        ("alone", alone_s, &times.alone),
        ("beside A", beside_s, &times.beside),
        ("beside A, with pjwd", under_warden_s, &times.under_warden),
    ];
    for (name, seconds, row) in rows {
        let least = row.seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let most = row.seconds.iter().copied().fold(0.0, f64::max);
        let against = seconds / alone_s;
        let mark = if row.is_busy() { '!' } else { ' ' };
        let _ = writeln!(
            text,
            "{mark} {name:<26} {seconds:>9.2} s   {against:>13.2}   {least:.2} .. {most:.2} s"
        );
    }
    let conclusion = if times.settings().into_iter().any(SettingTimes::is_busy) {
        no_verdict(medians)
    } else {
        verdict(medians)
    };
    let _ = writeln!(text, "\n{conclusion}");
    text
}

/// The text instead of a verdict, if the machine was busy.
fn no_verdict(medians: &Medians) -> String {
    format!(
        "No verdict: other programs used up to {:.1} CPUs while the rows marked ! were measured, and B \
         waited for them too.\nThese figures say nothing about pjwd. Run make demo again on an idle machine.",
        medians.others_cpus
    )
}

/// Returns a sentence that says how much job A slowed job B down with pjwd and without pjwd.
fn verdict(medians: &Medians) -> String {
    let slowdown_without = medians.beside_s / medians.alone_s;
    let slowdown_with = medians.under_warden_s / medians.alone_s;
    if slowdown_without <= MAX_SLOWDOWN {
        format!(
            "Here A did not slow B down (x {slowdown_without:.2}), so pjwd had nothing to protect B from."
        )
    } else if slowdown_with <= MAX_SLOWDOWN {
        format!(
            "A alone pays for its extra workers: B takes x {slowdown_with:.2} of its time alone, not \
             x {slowdown_without:.2}."
        )
    } else {
        format!(
            "Here B is slower with pjwd than alone: x {slowdown_with:.2}; without pjwd x {slowdown_without:.2}. \
             Other programs used at most {:.1} CPUs during the measurements.",
            medians.others_cpus
        )
    }
}

/// Starts both jobs of the demo once more with pjwd. Prints what `pjwctl status` and `pjwctl explain` show about the
/// running jobs. `print_line` prints the command before its output.
///
/// # Errors
/// If a program fails, or if the demo was interrupted.
pub fn show_live_jobs(experiment: &Experiment<'_>, print_line: impl Fn(&str)) -> anyhow::Result<()> {
    let Experiment { programs, scale, interrupt } = experiment;
    let warden = PrivateWarden::start_alone_if_possible(programs, &scale.unusable_pus, interrupt)?;
    let _a = experiment.start_a(Some(&warden))?;
    let b = experiment.start_b(Some(&warden), 0)?;
    wait_until_hot(&warden, "manual:demo-a", interrupt)?;
    wait_until_hot(&warden, "manual:demo-b", interrupt)?;
    let pid = b.pid().to_string();
    for arguments in [&["status"][..], &["explain", "demo-b"], &["explain", &pid]] {
        print_line(&format!("\n$ pjwctl {}", arguments.join(" ")));
        let status = warden.pjwctl_command(arguments).status().context("can't start pjwctl")?;
        if !status.success() {
            bail!("pjwctl {} failed: {status}", arguments.join(" "));
        }
    }
    Ok(())
}

/// Waits until pjwd has seen a running thread of the job.
fn wait_until_hot(warden: &PrivateWarden, id: &str, interrupt: &StopSignal) -> anyhow::Result<()> {
    wait_for(&format!("pjwd sees no running thread of {id}"), HOT_TIMEOUT, interrupt, || {
        Ok(warden.job(id)?.filter(|job| job["hot"].as_u64().is_some_and(|hot| hot > 0)).map(drop))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn medians(beside_s: f64, under_warden_s: f64) -> Medians {
        Medians { repetitions: 3, alone_s: 2.0, beside_s, under_warden_s, others_cpus: 1.7 }
    }

    #[test]
    fn the_verdict_says_what_the_medians_show() {
        assert!(verdict(&medians(5.0, 2.02)).starts_with("A alone pays"));
        assert!(verdict(&medians(5.0, 2.4)).starts_with("Here B is slower with pjwd"));
        assert!(verdict(&medians(2.0, 2.0)).starts_with("Here A did not slow B down"));
    }

    /// The times of three repetitions. `others` is the CPU use of other programs in the repetitions with pjwd.
    fn times(others: [f64; 3]) -> ExperimentTimes {
        let row = |seconds: [f64; 3], others: [f64; 3]| SettingTimes {
            seconds: seconds.into(),
            others_cpus: others.into(),
        };
        ExperimentTimes {
            alone: row([1.9, 2.0, 2.1], [0.0; 3]),
            beside: row([4.0, 5.0, 6.0], [0.0; 3]),
            under_warden: row([2.0, 2.02, 3.0], others),
        }
    }

    #[test]
    fn on_a_busy_machine_the_row_is_marked_and_there_is_no_verdict() {
        let busy = times([0.1, 1.7, 0.9]);
        let medians = busy.medians().unwrap();
        assert!((medians.others_cpus - 1.7).abs() < 1e-9);
        let text = table(&busy, &medians);
        assert!(text.contains("\n! beside A, with pjwd ") && text.contains("\n  beside A  "), "{text}");
        assert!(text.contains("No verdict: other programs used up to 1.7 CPUs"), "{text}");
        assert!(!text.contains("A alone pays"), "{text}");
        assert!(
            repetition_line(3, &busy).ends_with("3.00 s  ! other programs used 0.9 CPUs"),
            "{}",
            repetition_line(3, &busy)
        );
        // One busy repetition of three does not affect the median.
        let once = times([0.1, 1.7, 0.1]);
        assert!(table(&once, &medians).contains("A alone pays"));
        assert!(repetition_line(3, &once).ends_with("3.00 s"));
    }

    #[test]
    fn the_table_compares_every_setting_with_alone() {
        let times = times([0.0; 3]);
        let text = table(&times, &times.medians().unwrap());
        assert!(
            text.contains("beside A                        5.00 s            2.50   4.00 .. 6.00 s"),
            "{text}"
        );
        assert!(
            text.contains("beside A, with pjwd             2.02 s            1.01   2.00 .. 3.00 s"),
            "{text}"
        );
    }
}
