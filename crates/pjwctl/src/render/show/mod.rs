//! `show JOB`: the job, its processes with their threads, and its events.

mod memory;

use std::collections::BTreeMap;
use std::sync::Arc;

use pjw_core::ids::TASK_HOST_NAME;
use pjw_ipc::wire::{Event, Job, Member, Memory, Thread};
use serde::Serialize;

use super::text::{count_with_noun, escape_control_characters, percent_text, wrap_text};
use super::{Terminal, UserNames, style, text, user_name};

/// The maximum number of process ids in the line about an address space.
const MAX_PIDS_IN_A_LINE: usize = 8;

/// The data that `pjwctl show` prints about one job: the properties of the job, its processes (`members`), its latest
/// events (`history`), and its use of memory (`memory`). In JSON, this is a single object. The properties of the job
/// are fields of this object, next to the fields `members`, `history` and `memory`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct JobDetails {
    /// The job: its id, owner, cores and state.
    #[serde(flatten)]
    pub job: Job,
    /// All processes that belong to the job, with their threads.
    pub members: Vec<Member>,
    /// The latest events of the job, oldest first.
    pub history: Vec<Arc<Event>>,
    /// The memory use of the job: as measured with the option `--memory`, or an estimate without this option. `None` if
    /// the memory use can't be estimated, or if the job has no processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// The reason why the memory use can't be estimated. Only the text contains this reason, and not the JSON. `None`
    /// if `memory` has a value, or if the job has no processes.
    #[serde(skip)]
    pub no_memory_reason: Option<String>,
}

/// Returns the text of `pjwctl show`: the properties of a job, its memory, its processes with their threads, and its
/// latest events. `names` contains the names of the users that own the job and its processes.
#[must_use]
pub fn job_details_text(details: &JobDetails, names: &UserNames, term: Terminal) -> String {
    let header = job_header(&details.job, names, term) + &shared_address_spaces(&details.members, term);
    let mut parts = vec![header];
    parts.extend(details.memory.as_ref().map(|memory| memory::memory_text(memory, term)));
    parts.extend(details.no_memory_reason.as_ref().map(|why| {
        let heading = style::apply_style("memory", style::HEADING, term);
        wrap_text(why, term.width, &format!("{heading}: "), "  ")
    }));
    if !details.members.is_empty() {
        parts.push(details.members.iter().map(|member| member_text(member, names, term)).collect());
    }
    if !details.history.is_empty() {
        let history = details.history.iter().map(|event| {
            let line = format!("{} {}", event.event, event.text);
            wrap_text(&line, term.width, &format!("{}  ", escape_control_characters(&event.time)), "    ")
        });
        parts.push(style::apply_style("history", style::HEADING, term) + "\n" + &history.collect::<String>());
    }
    parts.join("\n")
}

/// Returns the first lines about a job: its state, class and owner, its request and its CPUs, and the numbers of its
/// processes and threads.
fn job_header(job: &Job, names: &UserNames, term: Terminal) -> String {
    let requested = if job.requested_cores == 0 {
        "number of cores unknown".to_owned()
    } else {
        format!("requested {}", count_with_noun(job.requested_cores, "core", "cores"))
    };
    let holds = if job.cpus.is_empty() {
        "holds no CPU".to_owned()
    } else {
        let shared = if job.shared { ", some of them shared with another job" } else { "" };
        format!(
            "holds {} (granted by {}, kept by {}{shared})",
            text::cpus_phrase(&job.cpus, usize::MAX),
            if job.granted_by == "warden" { "pjwd" } else { "the scheduler" },
            job.enforcement
        )
    };
    let threads = format!(
        "{}, {} ({} hot, {} pinned), {}, {}",
        count_with_noun(job.processes, "process", "processes"),
        count_with_noun(job.threads, "thread", "threads"),
        job.hot,
        job.pinned,
        count_with_noun(job.violations, "violation", "violations"),
        count_with_noun(job.strays, "stray", "strays"),
    );
    let lent = match (job.borrowed.as_str(), job.lent.as_str()) {
        ("", "") => String::new(),
        (borrowed, "") => format!(" (borrows {})", text::cpus_phrase(borrowed, usize::MAX)),
        (_, lent) => format!(" (lends {})", text::cpus_phrase(lent, usize::MAX)),
    };
    let state = format!(
        "{}, class {}{lent}, of {}, since {}",
        escape_control_characters(&job.state),
        escape_control_characters(&job.class),
        user_name(names, job.owner),
        escape_control_characters(&job.since)
    );
    let title = style::apply_style(&escape_control_characters(&job.id), style::HEADING, term);
    let state = if text::char_count(&job.id) + text::char_count(&state) + 2 > term.width {
        format!("{title}\n  {state}\n")
    } else {
        format!("{title}: {state}\n")
    };
    let wants =
        job.wants.map(|wants| format!(", wants {} at present", count_with_noun(wants, "core", "cores")));
    let wants = wants.unwrap_or_default();
    let within_job = job.within_job.as_ref();
    let within_job =
        within_job.map(|rule| format!(", new processes by --within-job {}", escape_control_characters(rule)));
    let within_job = within_job.unwrap_or_default();
    state
        + &wrap_text(&format!("{requested}, {holds}{wants}{within_job}"), term.width, "  ", "  ")
        + &wrap_text(&threads, term.width, "  ", "  ")
}

/// Returns a line for each address space that several processes share. `members` are the processes of the job. A
/// process that shares an address space only with a process outside of the job gets a line too. If the address space
/// belongs to a task host (the process that owns the address space of `--share memory`), the line has the process id
/// of this host.
fn shared_address_spaces(members: &[Member], term: Terminal) -> String {
    let mut pids: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut hosts: BTreeMap<u32, u32> = BTreeMap::new();
    for member in members {
        let Some(space) = member.address_space else { continue };
        if member.comm.as_bytes() == TASK_HOST_NAME.to_bytes() {
            hosts.insert(space, member.pid);
        } else {
            pids.entry(space).or_default().push(member.pid);
        }
    }
    let line = |(space, pids): (&u32, &Vec<u32>)| {
        let shown: Vec<String> = pids.iter().take(MAX_PIDS_IN_A_LINE).map(u32::to_string).collect();
        let more = pids.len().saturating_sub(MAX_PIDS_IN_A_LINE);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let count = u64::try_from(pids.len()).unwrap_or(u64::MAX);
        let space = match (hosts.get(space), pids.len()) {
            (Some(host), _) => {
                format!("the address space of process {host} ({})", TASK_HOST_NAME.to_string_lossy())
            }
            (None, 1) => "an address space with a process outside of this job".to_owned(),
            (None, _) => "an address space".to_owned(),
        };
        let tasks = count_with_noun(count, "task", "tasks");
        let verb = if pids.len() == 1 { "shares" } else { "share" };
        let text = format!("{tasks} {verb} {space}: {}{more}", shown.join(", "));
        wrap_text(&text, term.width, "  ", "    ")
    };
    pids.iter().map(line).collect()
}

fn member_text(member: &Member, names: &UserNames, term: Terminal) -> String {
    let title = format!("{} {}", member.pid, escape_control_characters(&member.comm));
    let evidence = evidence_text(&member.evidence);
    let origin = format!(" of {}, known by {evidence}", user_name(names, member.uid));
    let title = style::apply_style(&title, style::HEADING, term) + &origin + "\n";
    title + &threads_table(&member.threads, term)
}

fn evidence_text(evidence: &str) -> String {
    match evidence {
        "registered" => "registration".to_owned(),
        "cgroup" => "its cgroup".to_owned(),
        "parent" => "its parent".to_owned(),
        "session" => "its session".to_owned(),
        "environment" => "its environment".to_owned(),
        "adopted" => "its user, who has this job only".to_owned(),
        other => escape_control_characters(other),
    }
}

/// Returns a table with one row per thread: its thread id, state, CPU demand, last PU (logical CPU), affinity mask and
/// name. The CPU demand is the share of the recent time in which the thread ran or waited for a PU, in percent. If
/// there are no threads, the text is empty.
#[must_use]
pub fn threads_table(threads: &[Thread], term: Terminal) -> String {
    if threads.is_empty() {
        return String::new();
    }
    let heading = "       tid st  demand   cpu  allowed CPUs      name";
    let mut lines = style::apply_style(heading, style::SECONDARY, term) + "\n";
    for thread in threads {
        let allowed = match thread.pinned {
            Some(pu) => format!("{pu} (pinned)"),
            None => text::shorten_cpu_list(&thread.allowed, 16),
        };
        let line = format!(
            "{:>10} {:2} {:>7} {:>5}  {allowed:16}  {}",
            thread.tid,
            escape_control_characters(&thread.state),
            percent_text(thread.demand),
            thread.last_cpu,
            escape_control_characters(&thread.comm)
        );
        let style = if thread.hot { anstyle::Style::new() } else { style::SECONDARY };
        lines.push_str(&style::apply_style(line.trim_end(), style, term));
        lines.push('\n');
    }
    lines
}

#[cfg(test)]
mod tests;
