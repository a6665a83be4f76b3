//! The table of jobs, and the lines that `assign`, `provision`, `want` and `release` print about jobs.

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, TableStyle};
use jiff::Timestamp;
use pjw_ipc::wire::Job;

use super::{Terminal, UserNames, core_map::job_symbol, style, text, user_name};

/// The headings. The first two and `cpus` are texts, the others numbers.
const HEADINGS: [&str; 10] =
    ["job", "owner", "cores", "cpus", "procs", "threads", "hot", "pinned", "viol", "since"];
/// The maximum width of a user name. `show` has the whole name.
const MAX_OWNER_WIDTH: usize = 10;
/// The maximum number of lines of a CPU list. `show` has the whole list.
const MAX_LIST_LINES: usize = 3;
/// The maximum width of a list of lent or borrowed CPUs. `show` has the whole lists.
const MAX_LOAN_LIST_WIDTH: usize = 50;
/// The minimum width of a list and of an id, also on a terminal that is too narrow.
const MIN_WIDTH: usize = 8;

/// Returns the text of `pjwctl jobs`: a table of `jobs`, or `no jobs`. `names` contains the names of the users that
/// own the jobs. The column `since` shows the age of each job at the time `now`.
#[must_use]
pub fn jobs_text(jobs: &[Job], names: &UserNames, now: Timestamp, term: Terminal) -> String {
    if jobs.is_empty() { "no jobs\n".to_owned() } else { jobs_table(jobs, names, now, term) }
}

/// Returns a table with one row per job: its id, owner, CPUs, and numbers of processes and threads. Each row begins
/// with the letter or digit that stands for the job in the core map, the part of `pjwctl status` with one character for
/// each core. `names` contains the names of the users that own the jobs. The column `since` shows how long ago, at the
/// time `now`, pjw detected or created the job. Below the table, a line for each job that is not of the class normal
/// says its class, and what it lends or borrows.
#[must_use]
pub fn jobs_table(jobs: &[Job], names: &UserNames, now: Timestamp, term: Terminal) -> String {
    let rows: Vec<[String; 10]> = jobs.iter().map(|job| job_cells(job, names, now)).collect();
    let column_width = |column: usize| {
        let cells = rows.iter().map(|row| text::char_count(&row[column]));
        cells.chain([text::char_count(HEADINGS[column])]).max().unwrap_or(0)
    };
    let other_width: usize = (0..10).filter(|column| ![0, 3].contains(column)).map(column_width).sum();
    // A letter and a blank begin each row, and a blank follows each column but the last.
    let width_left = term.width.saturating_sub(2 + other_width + 9);
    let max_id_width = width_left.saturating_sub(column_width(3)).max(width_left / 2);
    let id_width = column_width(0).min(max_id_width).max(MIN_WIDTH);
    let list_width = width_left.saturating_sub(id_width).max(MIN_WIDTH);

    let mut table = Table::new();
    table.load_style(TableStyle::new()).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(HEADINGS);
    let mut leads = vec![" ".to_owned()];
    for (n, row) in rows.into_iter().enumerate() {
        let [id, owner, cores, cpus, rest @ ..] = row;
        let cpus = text::shorten_cpu_list(&cpus, list_width * MAX_LIST_LINES);
        let id = text::break_lines(&id, id_width, |_| true);
        let cpus = text::break_lines(&cpus, list_width, |c| c == ',');
        let height = id.lines().count().max(cpus.lines().count()).max(1);
        leads.push(style::apply_style(job_symbol(n).encode_utf8(&mut [0; 4]), style::job_style(n), term));
        leads.extend(std::iter::repeat_n(" ".to_owned(), height - 1));
        table.add_row([id, owner, cores, cpus].into_iter().chain(rest).map(Cell::new));
    }
    for (n, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(n > 0), 0));
        let is_text = [0, 1, 3].contains(&n);
        column.set_cell_alignment(if is_text { CellAlignment::Left } else { CellAlignment::Right });
    }
    let rows = leads.iter().zip(table.lines()).map(|(lead, line)| format!("{lead} {}\n", line.trim_end()));
    rows.chain(class_lines(jobs)).collect()
}

/// Returns a line for each job whose class is not `normal`. The line has the letter of the job in the core map, its
/// class, and the CPUs that it lends or borrows.
fn class_lines(jobs: &[Job]) -> impl Iterator<Item = String> {
    let with_class = jobs.iter().enumerate().filter(|(_, job)| job.class != "normal");
    with_class.map(|(n, job)| {
        let class = text::escape_control_characters(&job.class);
        let mut line = format!("{} is {class}", job_symbol(n));
        for (verb, cpus) in [("lends", &job.lent), ("borrows", &job.borrowed)] {
            if !cpus.is_empty() {
                line += &format!(", {verb} {}", text::cpus_phrase(cpus, MAX_LOAN_LIST_WIDTH));
            }
        }
        line + "\n"
    })
}

/// Returns the cells of the table row of a job, without the letter of the job.
fn job_cells(job: &Job, names: &UserNames, now: Timestamp) -> [String; 10] {
    let cores = if job.requested_cores == 0 { "-".to_owned() } else { job.requested_cores.to_string() };
    // A job without cores has its state in this column.
    let cpus = if job.cpus.is_empty() {
        format!("({})", text::escape_control_characters(&job.state))
    } else {
        job.cpus.clone()
    };
    [
        text::escape_control_characters(&job.id),
        user_name(names, job.owner).chars().take(MAX_OWNER_WIDTH).collect(),
        cores,
        text::escape_control_characters(&cpus),
        job.processes.to_string(),
        job.threads.to_string(),
        job.hot.to_string(),
        job.pinned.to_string(),
        job.violations.to_string(),
        text::age_text(&job.since, now),
    ]
}

/// Returns the line that `pjwctl assign` prints for a job: the id of the job and its CPUs. If the job holds no CPUs,
/// because it still waits for cores, the line is only the id.
#[must_use]
pub fn assigned_job_line(job: &Job) -> String {
    let line = format!(
        "{} {}",
        text::escape_control_characters(&job.id),
        text::escape_control_characters(&job.cpus)
    );
    line.trim_end().to_owned() + "\n"
}

/// Returns the message that `pjwctl assign` prints if the kernel has not yet completed the isolated partition of the
/// job. An isolated partition is a cpuset on whose PUs (logical CPUs) the kernel balances no load.
#[must_use]
pub fn unfinished_partition_message(job: &Job) -> String {
    let id = text::escape_control_characters(&job.id);
    format!(
        "the kernel has not completed the isolated partition of {id} yet: until then its processes may run on other CPUs; \
         pjwctl explain {id} says whether it has"
    )
}

/// Returns the message that `pjwctl assign` prints if `pjwd` no longer replies while the kernel makes the isolated
/// partition of the job. An isolated partition is a cpuset on whose PUs (logical CPUs) the kernel balances no load.
/// `error` is the reason why `pjwd` does not reply.
#[must_use]
pub fn unknown_partition_message(job: &Job, error: &str) -> String {
    let id = text::escape_control_characters(&job.id);
    format!(
        "{id} has its cores, but whether the kernel has completed its isolated partition is unknown: {error}; \
         pjwctl explain {id} says whether it has"
    )
}

/// Returns the message that `pjwctl assign` prints if the job got no cores. The message depends on the job:
///
/// - For a job that waits for cores of its own, the message says how to cancel the request.
/// - For a job of the class besteffort that can borrow no core, the message says whether its processes are frozen. If
///   the job has no process, the message says how to add one.
/// - For any other job, the message names the state of the job.
#[must_use]
pub fn no_cores_message(job: &Job) -> String {
    if job.class == "besteffort" && ["waiting", "reserved"].contains(&job.state.as_str()) {
        return no_borrowed_cores_message(job);
    }
    if job.state != "waiting" {
        return format!("{} has no CPU: it is {}", job.id, job.state);
    }
    let meanwhile =
        if job.processes == 0 { "" } else { "; until then its processes run with their present masks" };
    format!(
        "{} waits for {} and gets its cores as soon as enough are free{meanwhile}; pjwctl release {} cancels the request",
        job.id,
        text::count_with_noun(job.requested_cores, "core", "cores"),
        job.id
    )
}

/// Returns the message for a job of the class besteffort that borrows no core: the state of its processes, and a
/// remedy.
fn no_borrowed_cores_message(job: &Job) -> String {
    let id = &job.id;
    if job.processes == 0 {
        return format!(
            "{id} has no process and borrows no core until it has one: pjwctl assign {id} --pid PID adds one, pjwctl release \
             {id} removes the job"
        );
    }
    // Only a job that can't be frozen is not confined.
    let meanwhile = match job.enforcement.as_str() {
        "none" => "its processes run with their present masks until it can",
        _ => "its processes are frozen until it can",
    };
    format!("{id} can borrow no core at present: {meanwhile}; pjwctl release {id} lets them run without pjwd")
}

/// Returns the text of `pjwctl provision --list`: a line for each of the `jobs`, or `no provisions` if there are none.
/// All `jobs` must be provisions: jobs that hold the cores that pjwd keeps for a service.
#[must_use]
pub fn provisions_text(jobs: &[Job]) -> String {
    if jobs.is_empty() { "no provisions\n".to_owned() } else { jobs.iter().map(provision_line).collect() }
}

/// Returns the line that `pjwctl provision` prints for a provision: cores that pjwd keeps for a service. The line
/// contains the id of the job that holds the cores, its CPUs, and the rule by which pjwd recognises the processes of
/// the service. If the job still waits for its cores, the line says so.
#[must_use]
pub fn provision_line(job: &Job) -> String {
    let id = text::escape_control_characters(&job.id);
    let cpus = if job.cpus.is_empty() { "waits for its cores" } else { job.cpus.as_str() };
    let rule = job.provision.as_deref().filter(|rule| !rule.is_empty());
    let rule = rule.map(|rule| format!(" {}", text::escape_control_characters(rule))).unwrap_or_default();
    format!("{id} {cpus}{rule}\n")
}

/// Returns the line that `pjwctl want` prints: the id of the job, and the number of cores that the job now wants.
/// `requested` is the number on the command line, or `None` for the word `default`. With `default`, the line says
/// that the job wants the cores that pjwd or the batch system granted to the job. If pjwd lowered the number to the
/// limit for the job, the line contains both numbers. The limit is the number of cores that the job requested or
/// holds, whichever is larger. For a job of the class besteffort, the limit is the number of cores of the machine.
#[must_use]
pub fn wanted_cores_line(job: &Job, requested: Option<u32>) -> String {
    let id = text::escape_control_characters(&job.id);
    let Some(wanted) = job.wants else { return format!("{id} wants what it was granted\n") };
    let cores = text::count_with_noun(wanted, "core", "cores");
    let clipped = requested.filter(|&requested| requested > wanted);
    let more = clipped.map(|requested| format!(" ({requested} were asked for, and it may have {wanted})"));
    format!("{id} wants {cores}{}\n", more.unwrap_or_default())
}

/// Returns the text that `pjwctl release` prints: one line for each job that was released. When a job is released,
/// its cores become free, and its processes get back their original affinity masks. `jobs` contains the ids of the
/// released jobs. If `jobs` is empty, the text says that there was nothing to release.
#[must_use]
pub fn released_jobs_text(jobs: &[String]) -> String {
    let lines: Vec<String> = jobs.iter().map(|job| format!("released {job}")).collect();
    text::sentence_lines("there was nothing to release", &lines)
}

#[cfg(test)]
mod tests;
