//! `doctor`: what was found, most urgent first, each with its remedy; then the jobs, then what the node is.

use pjw_core::diagnosis::{Examination, Fact, Finding, JobSeen, Severity};
use pjw_core::job::{Amount, GrantedBy};
use serde::Serialize;

use super::text::{columns, count, printable, short_list, wrap};
use super::{Page, UserNames, style, user};

/// Where the texts of findings begin.
const MARGIN: usize = 9;
/// Where the texts of facts begin.
const FACT_MARGIN: usize = 15;
/// A longer list is cut in the table of jobs.
const LIST_WIDTH: usize = 14;
/// More jobs are only counted, unless all is asked for.
const MOST_JOBS: usize = 20;

/// All of it, as it is printed for scripts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Which machine.
    pub hostname: String,
    /// What is wrong, most urgent first.
    pub findings: Vec<FindingLine>,
    /// The jobs.
    pub jobs: Vec<JobLine>,
    /// What the node is.
    pub facts: Vec<FactLine>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FindingLine {
    /// Its name.
    pub code: String,
    /// `problem`, `advice` or `note`.
    pub severity: &'static str,
    /// What.
    pub text: String,
    /// What to do.
    pub remedy: String,
    /// Which jobs.
    pub jobs: Vec<String>,
    /// Which processes.
    pub pids: Vec<u32>,
    /// Which CPUs.
    pub cpus: String,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct JobLine {
    /// Which.
    pub id: String,
    /// Whose.
    pub owner: u32,
    /// How many cores it asked for; `null` if nobody says.
    pub requested_cores: Option<u32>,
    /// What it holds.
    pub cpus: String,
    /// Who gave that to it: `scheduler`, `warden`, or nobody.
    pub granted_by: &'static str,
    /// Where its threads may run.
    pub allowed: String,
    /// What pjwd would give it.
    pub would_get: String,
    /// How many processes.
    pub processes: usize,
    /// How many threads.
    pub threads: usize,
    /// How many of them are busy.
    pub busy: usize,
}

/// A fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FactLine {
    /// Its name.
    pub code: &'static str,
    /// It.
    pub text: String,
    /// Whether it is shown only to who asks for everything.
    #[serde(skip)]
    pub detail: bool,
}

impl Report {
    /// Puts it together.
    #[must_use]
    pub fn new(hostname: String, exam: &Examination, facts: &[Fact], findings: &[Finding]) -> Self {
        let finding = |finding: &Finding| FindingLine {
            code: finding.code.clone(),
            severity: finding.severity.name(),
            text: finding.text.clone(),
            remedy: finding.remedy.clone(),
            jobs: finding.jobs.iter().map(ToString::to_string).collect(),
            pids: finding.pids.iter().map(|pid| pid.0).collect(),
            cpus: finding.cpus.to_string(),
        };
        let fact = |fact: &Fact| FactLine { code: fact.code, text: fact.text.clone(), detail: fact.detail };
        Self {
            hostname,
            findings: findings.iter().map(finding).collect(),
            jobs: exam.jobs.iter().map(|job| line_of(exam, job)).collect(),
            facts: facts.iter().map(fact).collect(),
        }
    }
}

fn line_of(exam: &Examination, job: &JobSeen) -> JobLine {
    let allowed = job.threads.iter().fold(pjw_core::cpuset::CpuSet::new(), |cpus, thread| {
        cpus.union(&thread.allowed.intersection(&exam.online))
    });
    JobLine {
        id: job.id.to_string(),
        owner: job.owner.0,
        requested_cores: job.amount.as_ref().map(|amount: &Amount| amount.in_cores(&exam.topology)),
        cpus: job.holds.as_ref().map(|(cpus, _)| cpus.to_string()).unwrap_or_default(),
        granted_by: match &job.holds {
            Some((_, GrantedBy::Scheduler)) => "scheduler",
            Some((_, GrantedBy::Warden)) => "warden",
            None => "",
        },
        allowed: allowed.to_string(),
        would_get: job.would_get.as_ref().map(ToString::to_string).unwrap_or_default(),
        processes: job.processes,
        threads: job.threads.len(),
        busy: job.busy(),
    }
}

/// The report for people; notes and details only where `all` is asked for.
#[must_use]
pub fn report(report: &Report, names: &UserNames, all: bool, page: Page) -> String {
    let note = Severity::Note.name();
    let shown = report.findings.iter().filter(|finding| all || finding.severity != note);
    let findings: String = shown.map(|finding| self::finding(finding, page)).collect();
    let mut parts = vec![summary(report, all, page)];
    if !findings.is_empty() {
        parts.push(findings);
    }
    if !report.jobs.is_empty() {
        parts.push(jobs(&report.jobs, names, all, page));
    }
    parts.push(facts(&report.facts, all, page));
    parts.join("\n")
}

fn summary(report: &Report, all: bool, page: Page) -> String {
    let of = |severity: Severity| {
        let with = report.findings.iter().filter(|finding| finding.severity == severity.name());
        u32::try_from(with.count()).unwrap_or(u32::MAX)
    };
    let (problems, advice, notes) = (of(Severity::Problem), of(Severity::Advice), of(Severity::Note));
    let mut told = Vec::new();
    if problems > 0 {
        let words = count(problems, "problem", "problems");
        told.push(style::paint(&words, style::ALARM, page));
    }
    if advice > 0 {
        let words = count(advice, "piece of advice", "pieces of advice");
        told.push(style::paint(&words, style::NOTICE, page));
    }
    if told.is_empty() {
        told.push("nothing to do".to_owned());
    }
    if notes > 0 {
        let words = count(notes, "note", "notes");
        told.push(if all { words } else { format!("{words} (--all shows them)") });
    }
    let title = style::paint(&format!("{}:", printable(&report.hostname)), style::HEADING, page);
    format!("{title} {}\n", told.join(", "))
}

/// The severity in the margin, the text beside it, the remedy below.
fn finding(finding: &FindingLine, page: Page) -> String {
    let lead = format!("{:<MARGIN$}", finding.severity);
    let style = match finding.severity {
        "problem" => style::ALARM,
        "advice" => style::NOTICE,
        _ => style::QUIET,
    };
    let blank = " ".repeat(MARGIN);
    let told = wrap(&finding.text, page.width.max(MARGIN * 2), &blank, &blank);
    let told = told.replacen(&blank, &style::paint(&lead, style, page), 1);
    if finding.remedy.is_empty() {
        return told;
    }
    told + &wrap(&finding.remedy, page.width.max(MARGIN * 2), &format!("{blank}→ "), &format!("{blank}  "))
}

fn facts(facts: &[FactLine], all: bool, page: Page) -> String {
    let shown = facts.iter().filter(|fact| all || !fact.detail);
    let blank = " ".repeat(FACT_MARGIN);
    let line = |fact: &FactLine| {
        let name = format!("{:<FACT_MARGIN$}", fact.code);
        let told = wrap(&fact.text, page.width.max(FACT_MARGIN * 2), &blank, &blank);
        told.replacen(&blank, &style::paint(&name, style::HEADING, page), 1)
    };
    shown.map(line).collect()
}

const HEADINGS: [&str; 9] =
    ["job", "owner", "cores", "holds", "may use", "procs", "threads", "busy", "would get"];

/// The columns that hold numbers.
const NUMBERS: [usize; 4] = [2, 5, 6, 7];

fn jobs(jobs: &[JobLine], names: &UserNames, all: bool, page: Page) -> String {
    let shown = if all { jobs.len() } else { jobs.len().min(MOST_JOBS) };
    let list = |list: &str| if list.is_empty() { "-".to_owned() } else { short_list(list, LIST_WIDTH) };
    let row = |job: &JobLine| {
        [
            printable(&job.id),
            user(names, job.owner),
            match job.requested_cores {
                Some(cores) => cores.to_string(),
                None if job.cpus.is_empty() => "?".to_owned(),
                None => "-".to_owned(),
            },
            list(&job.cpus),
            list(&job.allowed),
            job.processes.to_string(),
            job.threads.to_string(),
            job.busy.to_string(),
            list(&job.would_get),
        ]
    };
    let rows: Vec<[String; 9]> = jobs[..shown].iter().map(row).collect();
    // What pjwd would give is of interest where nothing is held yet.
    let last = if jobs.iter().any(|job| !job.would_get.is_empty()) { 9 } else { 8 };
    let heading = HEADINGS.map(str::to_owned);
    let widths: Vec<usize> = (0..last)
        .map(|at| rows.iter().chain([&heading]).map(|row| columns(&row[at])).max().unwrap_or(0))
        .collect();
    let room = page.width.saturating_sub(widths.iter().sum());
    let gap = if room >= 2 * (last - 1) { "  " } else { " " };
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, &width))| {
            if NUMBERS.contains(&at) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        cells.collect::<Vec<_>>().join(gap).trim_end().to_owned()
    };
    let mut text = style::paint(&line(&heading), style::HEADING, page) + "\n";
    rows.iter().for_each(|row| text += &(line(row) + "\n"));
    if shown < jobs.len() {
        text += &format!("and {} more (--all shows them)\n", jobs.len() - shown);
    }
    text
}

#[cfg(test)]
#[path = "doctor/tests.rs"]
mod tests;
