//! The reports of jobs that have ended: one page for a job, a table, and single lines.

use comfy_table::{CellAlignment, ContentArrangement, Table, TableStyle};
use jiff::Timestamp;
use pjw_core::text::duration_text;
use pjw_ipc::report::{Report, Thousandths};

use super::{Terminal, UserNames, text, user_name};

mod jobstats;

pub use jobstats::jobstats_line;

/// The headings of the table. The first two and the last are texts.
const HEADINGS: [&str; 9] =
    ["job", "owner", "cores", "used", "p95", "cpu time", "wall time", "ended", "verdict"];

/// The minimum width of an id, also on a terminal that is too narrow.
const MIN_ID_WIDTH: usize = 8;

/// Returns the text of `pjwctl report JOB` about a job that has ended: the verdict, the advice, and the measured
/// values. The verdict is one word that says how well the job used its cores, such as `serial` ([`Report::verdict`]).
/// The advice says what was wrong and what the user can do ([`Report::advice`]). `names` contains the name of the user
/// that owned the job.
#[must_use]
pub fn report_text(report: &Report, names: &UserNames, term: Terminal) -> String {
    let escaped = text::escape_control_characters;
    let owner = user_name(names, report.owner);
    let mut lines = vec![format!("{} of {owner}: {}", escaped(&report.id), held_cores_text(report))];
    let mut add = |name: &str, value: String| {
        lines.push(text::wrap_text(&value, term.width, &format!("  {name:<12}"), &" ".repeat(14)));
    };
    add("verdict", report.verdict.as_deref().map_or_else(|| no_verdict_text(report), escaped));
    report.advice.iter().for_each(|advice| add("", escaped(advice)));
    add("started", escaped(&report.started));
    add("ended", escaped(&report.ended));
    let held_no_core = held_no_core(report);
    if has_time_without_cores(report) && !held_no_core {
        add("no core", format!("for {}", time(report.without_cores_s)));
    }
    add("cpu time", cpu_time_text(report));
    if !held_no_core {
        let (mean, most) = (tenths(report.cores_used_mean), tenths(report.cores_used_p95));
        add("cores used", format!("{mean} on average, at most {most} for 95 % of the time"));
    }
    if !report.use_levels.is_empty() {
        add("over time", levels_text(report));
    }
    add("threads", threads_text(report));
    if !held_no_core {
        let waited = time(report.waited_s);
        add("waiting", format!("{waited} of its threads' time while it did not use all its cores"));
    }
    if report.serial_s.0 > 0 {
        add("serial", serial_text(report));
    }
    if report.repairs > 0 || report.violations > 0 {
        let attempts = text::count_with_noun(report.violations, "attempt", "attempts");
        let repairs = text::count_with_noun(report.repairs, "repair", "repairs");
        add("leaving", format!("{attempts} to leave its cores, {repairs}"));
    }
    if let Some(bytes) = report.memory_peak {
        add("memory", memory_text(report, bytes));
    }
    if let Some(permille) = report.shared_permille {
        let percent = text::percent_text(permille);
        let shared = match report.shared_source.as_deref() {
            Some("cgroup") => format!("about {percent} of its anonymous memory, as last estimated"),
            _ => format!("{percent} of its memory, as last read"),
        };
        add("shared", shared);
    }
    if let Some(why) = &report.incomplete {
        add("incomplete", escaped(why));
    }
    lines.iter().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Whether the job held no core for so long that the time is not 0.0 s as text.
fn has_time_without_cores(report: &Report) -> bool {
    report.without_cores_s.0 >= 50
}

/// Whether the job is known to have held no core at any time.
fn held_no_core(report: &Report) -> bool {
    report.cores == 0 && has_time_without_cores(report)
}

/// Returns for how long the job ran and which cores it held, as in `120 s on 4 cores (0-3)`. If it held no core for a
/// part of the time, also returns for how long it held cores, as in `35.0 s, 20.0 s of it on 1 core (0)`.
fn held_cores_text(report: &Report) -> String {
    let wall = time(report.wall_s);
    let cores = text::count_with_noun(report.cores, "core", "cores");
    let cpus = text::escape_control_characters(&report.cpus);
    let cpus = if cpus.is_empty() { String::new() } else { format!(" ({cpus})") };
    if held_no_core(report) {
        format!("{wall} without a core")
    } else if has_time_without_cores(report) {
        format!("{wall}, {} of it on {cores}{cpus}", time(jobstats::time_with_cores(report)))
    } else {
        format!("{wall} on {cores}{cpus}")
    }
}

/// Returns the CPU time of the job as text. If the job held no core for a part of the time, the text has the CPU time of
/// this part as a number of its own: the processes then ran on cores that the job did not hold.
fn cpu_time_text(report: &Report) -> String {
    let share = share_of_held_time_text(report);
    if held_no_core(report) {
        format!("{} without a core", time(report.cpu_s))
    } else if has_time_without_cores(report) {
        let (held, other) = (time(cpu_time_on_cores(report)), time(report.without_cores_cpu_s));
        format!("{held}{share}, and {other} without a core")
    } else {
        format!("{}{share}", time(report.cpu_s))
    }
}

/// Returns the CPU time of the job while it held cores.
fn cpu_time_on_cores(report: &Report) -> Thousandths {
    Thousandths(report.cpu_s.0.saturating_sub(report.without_cores_cpu_s.0))
}

fn no_verdict_text(report: &Report) -> String {
    // A report of an older pjwd has no reason.
    let usual = "too short, without cores, or a provision";
    format!("none: {}", text::escape_control_characters(report.no_verdict.as_deref().unwrap_or(usual)))
}

/// Returns for how long the job used how many CPUs, as in `1 CPU for 5 s, 4 CPUs for 60 s`. Leaves out numbers of
/// CPUs that the job used for less than a hundredth of the time.
fn levels_text(report: &Report) -> String {
    let all: u64 = report.use_levels.iter().map(|level| level.seconds.0).sum();
    let levels = report.use_levels.iter().filter(|level| level.seconds.0 * 100 >= all);
    let mut texts = levels.map(|level| {
        let cpus = text::count_with_noun(level.cpus, "CPU", "CPUs");
        format!("{cpus} for {}", time(level.seconds))
    });
    let first = texts.next().unwrap_or_default();
    texts.fold(first, |list, text| list + ", " + &text)
}

/// Returns the largest memory use of the job, how it was measured, and the limit of the job's cgroup if there is one.
/// `bytes` is the largest memory use.
fn memory_text(report: &Report, bytes: u64) -> String {
    let mebibytes = bytes.div_ceil(1 << 20);
    let peak = match report.memory_peak_source.as_deref() {
        Some("smaps") => format!("{mebibytes} MiB in the largest reading of its pages (PSS)"),
        Some("rss") => format!("at most {mebibytes} MiB, with shared pages counted for each process (RSS)"),
        _ => format!("{mebibytes} MiB at most"),
    };
    let limit = report.memory_limit.map(|bytes| format!(", of {} MiB that its cgroup allows", bytes >> 20));
    peak + &limit.unwrap_or_default()
}

fn threads_text(report: &Report) -> String {
    let most = report.threads_max;
    match report.threads_mean.0 {
        0 => format!("{most} wanted a core at the same time"),
        _ => format!("{} wanted a core on average, {most} at most", tenths(report.threads_mean)),
    }
}

fn serial_text(report: &Report) -> String {
    let alone = format!("{} with one thread alone", time(report.serial_s));
    match report.serial_phases {
        // Older daemons did not count the phases.
        0 | 1 => alone,
        phases => format!("{alone}, in {phases} phases, the longest {}", time(report.serial_longest_s)),
    }
}

/// Returns the text of `pjwctl report --last N` and `pjwctl jobs --ended`: a table with one row for each job that has
/// ended. If `reports` is empty, the text is `no job has ended`. `names` contains the names of the users that owned the
/// jobs. The column `ended` shows the time between the end of the job and `now`. A long id is broken at the width of
/// `term`.
#[must_use]
pub fn reports_text(reports: &[Report], names: &UserNames, now: Timestamp, term: Terminal) -> String {
    if reports.is_empty() {
        return "no job has ended\n".to_owned();
    }
    let row = |report: &Report| {
        [
            text::escape_control_characters(&report.id),
            user_name(names, report.owner),
            report.cores.to_string(),
            tenths(report.cores_used_mean),
            tenths(report.cores_used_p95),
            time(report.cpu_s),
            time(report.wall_s),
            text::age_text(&report.ended, now),
            text::escape_control_characters(report.verdict.as_deref().unwrap_or("-")),
        ]
    };
    let mut rows: Vec<[String; 9]> = reports.iter().map(row).collect();
    let column_width = |column: usize| {
        let cells = rows.iter().map(|row| text::char_count(&row[column]));
        cells.chain([text::char_count(HEADINGS[column])]).max().unwrap_or(0)
    };
    // A blank stands before each column but the first. A long id continues on the next line.
    let other_width: usize = (1..9).map(|column| 1 + column_width(column)).sum();
    let id_width = term.width.saturating_sub(other_width).max(MIN_ID_WIDTH);
    rows.iter_mut().for_each(|row| row[0] = text::break_lines(&row[0], id_width, |_| true));
    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(HEADINGS);
    table.add_rows(rows);
    for (n, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(n > 0), 0));
        let is_text = [0, 1, 8].contains(&n);
        column.set_cell_alignment(if is_text { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Returns the line that `pjwctl hook` prints when a job of a batch system has ended. The line contains the CPU time of
/// the job, the verdict (one word that says how well the job used its cores, such as `serial`), and the first sentence
/// of advice to the user.
#[must_use]
pub fn report_line(report: &Report) -> String {
    let verdict = report.verdict.as_deref().map(|word| format!("{word}, ")).unwrap_or_default();
    let advice = report.advice.first().map(|advice| format!(". {advice}")).unwrap_or_default();
    let used = if held_no_core(report) {
        " without a core".to_owned()
    } else {
        let without = if has_time_without_cores(report) {
            format!(", {} of it without a core", time(report.without_cores_s))
        } else {
            String::new()
        };
        let cores = text::count_with_noun(report.cores, "core", "cores");
        format!("{without}, {} of {cores} used", tenths(report.cores_used_mean))
    };
    let (cpu, wall) = (time(report.cpu_s), time(report.wall_s));
    let line = format!("pjw: {} {verdict}{cpu} of CPU time in {wall}{used}{advice}", report.id);
    text::escape_control_characters(&line) + "\n"
}

/// Returns which share of the CPU time of its cores the job used, as in `, 19 % of 1920 s on 4 cores`. The time is
/// the time for which the job held cores. Empty for a job that held no cores.
fn share_of_held_time_text(report: &Report) -> String {
    let held_time = jobstats::time_with_cores(report);
    // In millionths of a second.
    let held = u128::from(held_time.0) * u128::from(jobstats::held_pus(report).0);
    if held == 0 {
        return String::new();
    }
    let percent = u128::from(cpu_time_on_cores(report).0) * 100_000 / held;
    let held_mean = report.cores_held_mean;
    // An older pjwd reports no mean. With one decimal place, a mean that is this near shows the same number.
    let cores = if held_mean.0 == 0 || held_mean.0.abs_diff(u64::from(report.cores) * 1000) < 50 {
        text::count_with_noun(report.cores, "core", "cores")
    } else {
        format!("{} cores on average", tenths(held_mean))
    };
    format!(", {percent} % of {} on {cores}", time(held_time))
}

/// Returns a time as text, as [`duration_text`] does.
fn time(seconds: Thousandths) -> String {
    duration_text(seconds.0)
}

/// Returns the number as text with one decimal place.
fn tenths(number: Thousandths) -> String {
    let tenths = number.0.saturating_add(50) / 100;
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests;
