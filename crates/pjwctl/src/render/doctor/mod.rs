//! `doctor`: the findings, most urgent first, each with its remedy; then the jobs, then the facts about the node.

use pjw_core::diagnosis::{DiagnosisInput, Finding, MachineFact, ObservedJob, Severity};
use pjw_core::job::{CpuRequest, GrantedBy};
use serde::Serialize;

use super::text::{char_count, count_with_noun, escape_control_characters, shorten_cpu_list, wrap_text};
use super::{Terminal, UserNames, style, user_name};

/// The column in which the texts of findings begin.
const MARGIN: usize = 9;
/// The column in which the texts of facts begin.
const FACT_MARGIN: usize = 15;
/// The maximum width of a list in the table of jobs. A longer list is cut.
const LIST_WIDTH: usize = 14;
/// The maximum number of jobs in the table, unless `--all` is given. Further jobs are only counted.
const MAX_JOBS: usize = 20;

/// The report of `pjwctl doctor`, which examines the setup of the machine: the findings with their remedies, the
/// jobs, and facts about the machine. `--json` prints this type as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// The host name of the machine that was diagnosed.
    pub hostname: String,
    /// The faults and possible improvements that were found, most urgent first.
    pub findings: Vec<DoctorFinding>,
    /// The jobs on the machine, with their cores and their counts of processes and threads.
    pub jobs: Vec<DoctorJob>,
    /// Facts about the machine, such as its kernel version and its batch systems.
    pub facts: Vec<DoctorFact>,
}

/// A finding in the report of `pjwctl doctor`: a fault in the setup of the machine, or a possible improvement.
/// Contains the remedy, and the jobs, processes and PUs that are affected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// A short name of the kind of finding that scripts can rely on, such as `no-warden`.
    pub code: String,
    /// How urgent the finding is: `problem`, `advice` or `note`.
    pub severity: &'static str,
    /// What was found, in one sentence.
    pub text: String,
    /// What the user can do about the finding, as text.
    pub remedy: String,
    /// The ids of the jobs that the finding is about. Empty if it is about no job.
    pub jobs: Vec<String>,
    /// The process ids of the processes that the finding is about, at most 20. Empty if it is about no process.
    pub pids: Vec<u32>,
    /// The PUs (logical CPUs) that the finding is about, as a CPU list such as `0-3,8`. Empty if it is about no PU.
    pub cpus: String,
}

/// A job in the report of `pjwctl doctor`: its owner, the CPUs that it holds or would get from pjwd, and the numbers of
/// its processes and threads. A row of the table of jobs shows one such value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorJob {
    /// The id of the job, such as `slurm:7`.
    pub id: String,
    /// The user id of the user that owns the job.
    pub owner: u32,
    /// The number of cores that the job requested. `None` (`null` in the JSON) if this number is unknown.
    pub requested_cores: Option<u32>,
    /// The PUs (logical CPUs) that the job holds, as a CPU list. Empty if it holds none.
    pub cpus: String,
    /// Who granted the PUs in `cpus`: `scheduler` if the batch system granted them, `warden` if pjwd granted
    /// them. Empty if the job holds none.
    pub granted_by: &'static str,
    /// The PUs that are allowed for the job: the online PUs in the affinity mask of at least one thread of
    /// the job, as a CPU list.
    #[serde(rename = "allowed")]
    pub allowed_cpus: String,
    /// The PUs that pjwd would grant to the job if pjwd ran, as a CPU list. Empty if the job holds PUs already, or if
    /// its request is unknown or can't be served.
    #[serde(rename = "would_get")]
    pub expected_cpus: String,
    /// The number of processes of the job.
    pub processes: usize,
    /// The number of threads of all processes of the job.
    pub threads: usize,
    /// The number of hot threads of all processes of the job. A thread is hot if it ran or waited for a PU
    /// (logical CPU) during at least half of the time in which `pjwctl doctor` observed the machine.
    #[serde(rename = "busy")]
    pub hot_threads: usize,
}

/// A fact about the machine in the report of `pjwctl doctor`, such as its cgroup version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorFact {
    /// A short name of the fact that scripts can rely on, such as `kernel`.
    pub code: &'static str,
    /// The fact, in a few words or a sentence.
    pub text: String,
    /// Whether the fact is shown only with `--all`.
    #[serde(skip)]
    pub is_detail: bool,
}

impl DoctorReport {
    /// Makes the report of `pjwctl doctor` about the machine with the name `hostname`. `input` contains the data that
    /// was read from the machine. `facts` and `findings` were computed from this data.
    #[must_use]
    pub fn new(
        hostname: String,
        input: &DiagnosisInput,
        facts: &[MachineFact],
        findings: &[Finding],
    ) -> Self {
        let finding = |finding: &Finding| DoctorFinding {
            code: finding.code.clone(),
            severity: finding.severity.name(),
            text: finding.text.clone(),
            remedy: finding.remedy.clone(),
            jobs: finding.jobs.iter().map(ToString::to_string).collect(),
            pids: finding.pids.iter().map(|pid| pid.0).collect(),
            cpus: finding.cpus.to_string(),
        };
        let fact = |fact: &MachineFact| DoctorFact {
            code: fact.code,
            text: fact.text.clone(),
            is_detail: fact.is_detail,
        };
        Self {
            hostname,
            findings: findings.iter().map(finding).collect(),
            jobs: input.jobs.iter().map(|job| job_row(input, job)).collect(),
            facts: facts.iter().map(fact).collect(),
        }
    }
}

/// Returns the data of a job for the table of jobs, from the results of the diagnosis.
fn job_row(input: &DiagnosisInput, job: &ObservedJob) -> DoctorJob {
    let allowed_cpus = job.threads.iter().fold(pjw_core::cpuset::CpuSet::new(), |cpus, thread| {
        cpus.union(&thread.effective_mask.intersection(&input.online))
    });
    DoctorJob {
        id: job.id.to_string(),
        owner: job.owner.0,
        requested_cores: job.requested.as_ref().map(|amount: &CpuRequest| amount.core_count(&input.topology)),
        cpus: job.grant.as_ref().map(|(cpus, _)| cpus.to_string()).unwrap_or_default(),
        granted_by: match &job.grant {
            Some((_, GrantedBy::Scheduler)) => "scheduler",
            Some((_, GrantedBy::Warden)) => "warden",
            None => "",
        },
        allowed_cpus: allowed_cpus.to_string(),
        expected_cpus: job.expected_cpus.as_ref().map(ToString::to_string).unwrap_or_default(),
        processes: job.process_count,
        threads: job.threads.len(),
        hot_threads: job.hot_thread_count(),
    }
}

/// Returns the text that `pjwctl doctor` prints. `names` contains the names of the users that own jobs. `show_all`
/// says whether the option `--all` was given. Without this option, the text lacks the findings of the severity
/// `note`, the facts with [`DoctorFact::is_detail`], and all jobs after the first 20.
#[must_use]
pub fn report_text(report: &DoctorReport, names: &UserNames, show_all: bool, term: Terminal) -> String {
    let note = Severity::Note.name();
    let shown = report.findings.iter().filter(|finding| show_all || finding.severity != note);
    let findings: String = shown.map(|finding| finding_text(finding, term)).collect();
    let mut parts = vec![summary_text(report, show_all, term)];
    if !findings.is_empty() {
        parts.push(findings);
    }
    if !report.jobs.is_empty() {
        parts.push(jobs_table(&report.jobs, names, show_all, term));
    }
    parts.push(facts_text(&report.facts, show_all, term));
    parts.join("\n")
}

/// Returns the first line of the text: the numbers of problems, pieces of advice and notes. `show_all` says whether
/// the option `--all` was given. If it was not, the line says that the option shows the notes.
fn summary_text(report: &DoctorReport, show_all: bool, term: Terminal) -> String {
    let count = |severity: Severity| {
        let findings = report.findings.iter().filter(|finding| finding.severity == severity.name());
        u32::try_from(findings.count()).unwrap_or(u32::MAX)
    };
    let mut parts = Vec::new();
    let problems = count(Severity::Problem);
    if problems > 0 {
        let text = count_with_noun(problems, "problem", "problems");
        parts.push(style::apply_style(&text, style::FAILURE, term));
    }
    let advice = count(Severity::Advice);
    if advice > 0 {
        let text = count_with_noun(advice, "piece of advice", "pieces of advice");
        parts.push(style::apply_style(&text, style::WARNING, term));
    }
    if parts.is_empty() {
        parts.push("nothing to do".to_owned());
    }
    let notes = count(Severity::Note);
    if notes > 0 {
        let text = count_with_noun(notes, "note", "notes");
        parts.push(if show_all { text } else { format!("{text} (--all shows them)") });
    }
    let title = style::apply_style(
        &format!("{}:", escape_control_characters(&report.hostname)),
        style::HEADING,
        term,
    );
    format!("{title} {}\n", parts.join(", "))
}

/// Returns the text of a finding: its severity in the left margin, and its text beside it. The remedy, if there is
/// one, follows on further lines.
fn finding_text(finding: &DoctorFinding, term: Terminal) -> String {
    let lead = format!("{:<MARGIN$}", finding.severity);
    let style = match finding.severity {
        "problem" => style::FAILURE,
        "advice" => style::WARNING,
        _ => style::SECONDARY,
    };
    let blank = " ".repeat(MARGIN);
    let text = wrap_text(&finding.text, term.width.max(MARGIN * 2), &blank, &blank);
    let text = text.replacen(&blank, &style::apply_style(&lead, style, term), 1);
    if finding.remedy.is_empty() {
        return text;
    }
    text + &wrap_text(
        &finding.remedy,
        term.width.max(MARGIN * 2),
        &format!("{blank}→ "),
        &format!("{blank}  "),
    )
}

/// Returns the text of the facts about the machine, each with its code in the left margin. Without `show_all`, facts
/// that are details are left out.
fn facts_text(facts: &[DoctorFact], show_all: bool, term: Terminal) -> String {
    let shown = facts.iter().filter(|fact| show_all || !fact.is_detail);
    let blank = " ".repeat(FACT_MARGIN);
    let line = |fact: &DoctorFact| {
        let name = format!("{:<FACT_MARGIN$}", fact.code);
        let text = wrap_text(&fact.text, term.width.max(FACT_MARGIN * 2), &blank, &blank);
        text.replacen(&blank, &style::apply_style(&name, style::HEADING, term), 1)
    };
    shown.map(line).collect()
}

/// The headings of the table of jobs.
const HEADINGS: [&str; 9] =
    ["job", "owner", "cores", "holds", "may use", "procs", "threads", "hot", "would get"];

/// The indexes of the columns with numbers.
const NUMBER_COLUMNS: [usize; 4] = [2, 5, 6, 7];

/// Returns the table of jobs. Without `show_all`, the table has at most [`MAX_JOBS`] jobs.
fn jobs_table(jobs: &[DoctorJob], names: &UserNames, show_all: bool, term: Terminal) -> String {
    let shown = if show_all { jobs.len() } else { jobs.len().min(MAX_JOBS) };
    let cell = |list: &str| if list.is_empty() { "-".to_owned() } else { shorten_cpu_list(list, LIST_WIDTH) };
    let row = |job: &DoctorJob| {
        [
            escape_control_characters(&job.id),
            user_name(names, job.owner),
            match job.requested_cores {
                Some(cores) => cores.to_string(),
                None if job.cpus.is_empty() => "?".to_owned(),
                None => "-".to_owned(),
            },
            cell(&job.cpus),
            cell(&job.allowed_cpus),
            job.processes.to_string(),
            job.threads.to_string(),
            job.hot_threads.to_string(),
            cell(&job.expected_cpus),
        ]
    };
    let rows: Vec<[String; 9]> = jobs[..shown].iter().map(row).collect();
    // The last column, with the PUs that pjwd would grant, is shown only if a job has such PUs.
    let columns = if jobs.iter().any(|job| !job.expected_cpus.is_empty()) { 9 } else { 8 };
    let heading = HEADINGS.map(str::to_owned);
    let widths: Vec<usize> = (0..columns)
        .map(|at| rows.iter().chain([&heading]).map(|row| char_count(&row[at])).max().unwrap_or(0))
        .collect();
    let width_left = term.width.saturating_sub(widths.iter().sum());
    let gap = if width_left >= 2 * (columns - 1) { "  " } else { " " };
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, &width))| {
            if NUMBER_COLUMNS.contains(&at) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<_>>().join(gap).trim_end().to_owned()
    };
    let mut text = style::apply_style(&line(&heading), style::HEADING, term) + "\n";
    rows.iter().for_each(|row| text += &(line(row) + "\n"));
    if shown < jobs.len() {
        text += &format!("and {} more (--all shows them)\n", jobs.len() - shown);
    }
    text
}

#[cfg(test)]
mod tests;
