//! `show JOB`: the job, its processes with their threads, and its events.

use std::sync::Arc;

use pjw_ipc::wire::{Event, Job, Member, Thread};
use serde::Serialize;

use super::text::{percent_text, plural, printable, wrap};
use super::{Terminal, UserNames, style, text, user_name};

/// A job with its processes (`members`) and its latest events (`history`), as `pjwctl show` prints it. In JSON the
/// fields of the job stand beside the two lists.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct JobDetails {
    /// The job: its id, owner, cores and state.
    #[serde(flatten)]
    pub job: Job,
    /// All processes that belong to the job, with their threads.
    pub members: Vec<Member>,
    /// The latest events of the job, oldest first.
    pub history: Vec<Arc<Event>>,
}

/// Returns the text of `pjwctl show`: a job, its processes with their threads, and its latest events.
#[must_use]
pub fn job_details_text(details: &JobDetails, names: &UserNames, term: Terminal) -> String {
    let mut parts = vec![header(&details.job, names, term)];
    if !details.members.is_empty() {
        parts.push(details.members.iter().map(|member| self::member(member, names, term)).collect());
    }
    if !details.history.is_empty() {
        let history = details.history.iter().map(|event| {
            let line = format!("{} {}", event.event, event.text);
            wrap(&line, term.width, &format!("{}  ", printable(&event.time)), "    ")
        });
        parts.push(style::paint("history", style::HEADING, term) + "\n" + &history.collect::<String>());
    }
    parts.join("\n")
}

fn header(job: &Job, names: &UserNames, term: Terminal) -> String {
    let requested = if job.requested_cores == 0 {
        "number of cores unknown".to_owned()
    } else {
        format!("requested {}", plural(job.requested_cores, "core", "cores"))
    };
    let holds = if job.cpus.is_empty() {
        "holds no CPU".to_owned()
    } else {
        let shared = if job.shared { ", some of them shared with another job" } else { "" };
        format!(
            "holds {} (granted by the {}, kept by {}{shared})",
            text::cpus_phrase(&job.cpus, usize::MAX),
            job.granted_by,
            job.enforcement
        )
    };
    let threads = format!(
        "{}, {} ({} hot, {} pinned), {}, {}",
        plural(job.processes, "process", "processes"),
        plural(job.threads, "thread", "threads"),
        job.hot,
        job.pinned,
        plural(job.violations, "violation", "violations"),
        plural(job.strays, "stray", "strays"),
    );
    let remark = if job.class == "besteffort" { " (treated as normal)" } else { "" };
    let state = format!(
        "{}, class {}{remark}, of {}, since {}",
        printable(&job.state),
        printable(&job.class),
        user_name(names, job.owner),
        printable(&job.since)
    );
    let title = style::paint(&printable(&job.id), style::HEADING, term);
    let state = if text::column_count(&job.id) + text::column_count(&state) + 2 > term.width {
        format!("{title}\n  {state}\n")
    } else {
        format!("{title}: {state}\n")
    };
    let wants = job.wants.map(|wants| format!(", wants {} at present", plural(wants, "core", "cores")));
    let wants = wants.unwrap_or_default();
    state
        + &wrap(&format!("{requested}, {holds}{wants}"), term.width, "  ", "  ")
        + &wrap(&threads, term.width, "  ", "  ")
}

fn member(member: &Member, names: &UserNames, term: Terminal) -> String {
    let title = format!("{} {}", member.pid, printable(&member.comm));
    let known = format!(" of {}, known by {}", user_name(names, member.uid), known_by(&member.evidence));
    let title = style::paint(&title, style::HEADING, term) + &known + "\n";
    title + &threads_table(&member.threads, term)
}

fn known_by(evidence: &str) -> String {
    match evidence {
        "registered" => "registration".to_owned(),
        "cgroup" => "its cgroup".to_owned(),
        "parent" => "its parent".to_owned(),
        "session" => "its session".to_owned(),
        "environment" => "its environment".to_owned(),
        "adopted" => "its user, who has this job only".to_owned(),
        other => printable(other),
    }
}

/// Returns a table with one row per thread: its state, CPU demand, last PU (logical CPU), affinity mask and
/// name. The CPU demand is the share of time in which the thread runs or waits for a PU. Returns an empty
/// text if there are no threads.
#[must_use]
pub fn threads_table(threads: &[Thread], term: Terminal) -> String {
    if threads.is_empty() {
        return String::new();
    }
    let heading = "       tid st  demand   cpu  allowed CPUs      name";
    let mut lines = style::paint(heading, style::SECONDARY, term) + "\n";
    for thread in threads {
        let allowed = match thread.pinned {
            Some(pu) => format!("{pu} (pinned)"),
            None => text::short_cpu_list(&thread.allowed, 16),
        };
        let line = format!(
            "{:>10} {:2} {:>7} {:>5}  {allowed:16}  {}",
            thread.tid,
            printable(&thread.state),
            percent_text(thread.demand),
            thread.last_cpu,
            printable(&thread.comm)
        );
        let style = if thread.hot { anstyle::Style::new() } else { style::SECONDARY };
        lines.push_str(&style::paint(line.trim_end(), style, term));
        lines.push('\n');
    }
    lines
}

#[cfg(test)]
mod tests;
