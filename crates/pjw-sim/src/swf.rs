//! A parser for job logs in the Standard Workload Format: one job per line, 18 numbers. Lines that begin with `;` are
//! comments.
//!
//! The Parallel Workloads Archive (Feitelson and others) defines the format. A replay needs four of the columns: the
//! number of the job, its submit time, its run time, and its number of processors. -1 means unknown. A job with an
//! unknown run time or size cannot be replayed: it is skipped and counted.

use thiserror::Error;

/// The number of fields in a line.
const FIELDS: usize = 18;

/// The columns that are used, with their names in errors. Columns are counted from 1, as in the description of the
/// format.
const JOB: (usize, &str) = (1, "job number");
const SUBMIT: (usize, &str) = (2, "submit time");
const RUN: (usize, &str) = (4, "run time");
const PROCESSORS: (usize, &str) = (5, "processors");
const REQUESTED: (usize, &str) = (8, "requested processors");

/// One job of a job log: its submit time, its run time, and its number of processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedJob {
    /// The number by which the log identifies the job.
    pub number: u64,
    /// The submit time, in seconds since the start of the log.
    pub submit_s: u64,
    /// The time for which the job ran, in seconds.
    pub run_s: u64,
    /// The number of processors that the job used, or the number that it requested if the log does not state
    /// the used number. The log does not state whether a processor is a core or a PU.
    pub processors: u32,
}

/// A parsed job log in the Standard Workload Format: the jobs that ran on a cluster, as the cluster's batch
/// system recorded them. A replay simulates how pjw or another system would choose the cores of these jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobLog {
    /// The jobs, ascending by submit time. Jobs with the same submit time are in the order of their lines in
    /// the log.
    pub jobs: Vec<LoggedJob>,
    /// The number of jobs in the log that are missing in `jobs`, because they can't be replayed. Their run
    /// time or number of processors is unknown, or they used no processor.
    pub skipped_jobs: u32,
}

/// Error: a text is not a job log in the Standard Workload Format, or contains no job that can be replayed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SwfError {
    /// A line does not have exactly 18 fields.
    #[error(
        "line {line} has {found} {} and a job in the Standard Workload Format has {FIELDS}: is it such a log?",
        if *found == 1 { "field" } else { "fields" }
    )]
    WrongFieldCount {
        /// The line number, counted from 1.
        line: usize,
        /// The number of fields in the line.
        found: usize,
    },
    /// A field is not an integer, or is an integer that does not fit into 64 bits.
    #[error("line {line}, field {field} ({name}): {text:?} is not a whole number that can be used")]
    InvalidNumber {
        /// The line number, counted from 1.
        line: usize,
        /// The position of the field in the line, counted from 1.
        field: usize,
        /// The name of the field, such as `run time`.
        name: &'static str,
        /// The text of the field, cut to 20 characters.
        text: String,
    },
    /// A field has a negative value that is not allowed. Only -1 is allowed, in the run time and in the
    /// numbers of processors, where it means unknown.
    #[error(
        "line {line}, field {field} ({name}): {value} is negative: only -1, for unknown sizes and run times, is"
    )]
    Negative {
        /// The line number, counted from 1.
        line: usize,
        /// The position of the field in the line, counted from 1.
        field: usize,
        /// The name of the field, such as `run time`.
        name: &'static str,
        /// The value of the field.
        value: i64,
    },
    /// The log has no line that describes a job.
    #[error("there is no job in it: a log has one line of {FIELDS} numbers for each")]
    NoJobs,
    /// The log has jobs, but none can be replayed: the run time or the number of processors of each job is
    /// unknown or 0.
    #[error("none of its {skipped} jobs has a known size and run time: there is nothing to replay")]
    NoReplayableJobs {
        /// The number of jobs in the log.
        skipped: u32,
    },
}

/// Parses `bytes`, the content of a job log in the Standard Workload Format. Lines that begin with `;` are
/// comments, in any character encoding. A job can't be replayed if its run time or its number of processors is
/// unknown, or if it used no processor. Such jobs are left out, and counted in [`JobLog::skipped_jobs`].
///
/// # Errors
/// - If a line does not have 18 fields. The error contains the line number and the number of fields.
/// - If a field of a line is invalid. The error contains the line number and the field.
/// - If the log has no job that can be replayed.
pub fn parse(bytes: &[u8]) -> Result<JobLog, SwfError> {
    let mut log = JobLog { jobs: Vec::new(), skipped_jobs: 0 };
    for (line, bytes) in (1..).zip(bytes.split(|&byte| byte == b'\n')) {
        let bytes = bytes.trim_ascii();
        if bytes.is_empty() || bytes.starts_with(b";") {
            continue;
        }
        match parse_job(line, &String::from_utf8_lossy(bytes))? {
            Some(job) => log.jobs.push(job),
            None => log.skipped_jobs += 1,
        }
    }
    match (log.jobs.is_empty(), log.skipped_jobs) {
        (true, 0) => Err(SwfError::NoJobs),
        (true, skipped) => Err(SwfError::NoReplayableJobs { skipped }),
        (false, _) => {
            log.jobs.sort_by_key(|job| job.submit_s);
            Ok(log)
        }
    }
}

/// Parses `text`, the line of one job. `line` is the number of the line in the file. Returns `None` if the job can't be
/// replayed: its run time is unknown, or its number of processors is unknown or 0. Returns an error if the line has
/// another number of fields, or if a field is not a valid number.
fn parse_job(line: usize, text: &str) -> Result<Option<LoggedJob>, SwfError> {
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    if fields.len() != FIELDS {
        return Err(SwfError::WrongFieldCount { line, found: fields.len() });
    }
    let number = |(field, name): (usize, &'static str)| {
        let text = fields[field - 1];
        let error = || SwfError::InvalidNumber { line, field, name, text: text.chars().take(20).collect() };
        text.parse::<i64>().map_err(|_| error())
    };
    // Returns the value of a field in which -1 means unknown.
    let known_value = |column: (usize, &'static str)| match number(column)? {
        -1 => Ok(None),
        value => natural(line, column, value).map(Some),
    };
    let id = natural(line, JOB, number(JOB)?)?;
    let submit_s = natural(line, SUBMIT, number(SUBMIT)?)?;
    let (run_s, used, requested) = (known_value(RUN)?, known_value(PROCESSORS)?, known_value(REQUESTED)?);
    let processors = used.or(requested).filter(|&processors| processors > 0);
    let (Some(run_s), Some(processors)) = (run_s, processors) else { return Ok(None) };
    // A larger number is refused later, like any request that is too large.
    let processors = u32::try_from(processors).unwrap_or(u32::MAX);
    Ok(Some(LoggedJob { number: id, submit_s, run_s, processors }))
}

/// Converts the value of a field to an unsigned number. Returns an error if the value is negative.
fn natural(line: usize, (field, name): (usize, &'static str), value: i64) -> Result<u64, SwfError> {
    u64::try_from(value).map_err(|_| SwfError::Negative { line, field, name, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line with these numbers in their fields and -1 in all other fields.
    fn line(job: &str, submit: &str, run: &str, processors: &str, requested: &str) -> String {
        format!("{job} {submit} -1 {run} {processors} -1 -1 {requested} -1 -1 1 1 1 -1 -1 -1 -1 -1\n")
    }

    fn error(text: &str) -> String {
        parse(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn jobs_are_ordered_by_submit_time() {
        let text = format!(
            "; Version: 2.2\r\n\n  ; a remark\n{}{}{}",
            line("1", "10", "5", "4", "8"),
            line("2", "3", "0", "-1", "2"),
            line("3", "10", "1", "1", "-1"),
        );
        let log = parse(text.as_bytes()).unwrap();
        let job = |number, submit_s, run_s, processors| LoggedJob { number, submit_s, run_s, processors };
        assert_eq!(log.jobs, [job(2, 3, 0, 2), job(1, 10, 5, 4), job(3, 10, 1, 1)]);
        assert_eq!(log.skipped_jobs, 0);
    }

    #[test]
    fn jobs_with_unknown_values_are_skipped_and_counted() {
        let text = [
            line("1", "0", "-1", "4", "4"),
            line("2", "0", "9", "-1", "-1"),
            line("3", "0", "9", "0", "4"),
            line("4", "0", "9", "1", "1"),
        ];
        let log = parse(text.concat().as_bytes()).unwrap();
        assert_eq!((log.jobs.len(), log.skipped_jobs), (1, 3));
        assert_eq!(error(&text[..3].concat()), SwfError::NoReplayableJobs { skipped: 3 }.to_string());
    }

    #[test]
    fn a_comment_may_be_in_any_encoding() {
        let mut bytes = b"; Universit\xe9\n".to_vec();
        bytes.extend(line("1", "0", "1", "1", "1").bytes());
        assert_eq!(parse(&bytes).unwrap().jobs.len(), 1);
    }

    #[test]
    fn a_text_that_is_no_log_is_refused_with_line_and_field() {
        for (text, expected) in [
            (String::new(), "no job in it"),
            ("; only remarks\n".to_owned(), "no job in it"),
            ("<?xml version=\"1.0\"?>\n".to_owned(), "line 1 has 2 fields"),
            ("1 2 3\n".to_owned(), "line 1 has 3 fields"),
            (format!("; x\n{} 1", line("1", "0", "1", "1", "1").trim()), "line 2 has 19 fields"),
            (line("a", "0", "1", "1", "1"), "line 1, field 1 (job number): \"a\" is not"),
            (line("1", "1.5", "1", "1", "1"), "field 2 (submit time): \"1.5\" is not"),
            (line("1", "-1", "1", "1", "1"), "field 2 (submit time): -1 is negative"),
            (line("1", "0", "-7", "1", "1"), "line 1, field 4 (run time): -7 is negative"),
            (line("1", "0", "1", "-2", "1"), "field 5 (processors): -2 is negative"),
            (line("1", "0", "1", "1", "-3"), "field 8 (requested processors): -3 is negative"),
            (line("1", "0", "1", "99999999999999999999", "1"), "is not a whole number that can be used"),
        ] {
            assert!(error(&text).contains(expected), "{text}: {}", error(&text));
        }
        let long = error(&line("1", "0", &"x".repeat(10_000), "1", "1"));
        assert!(long.len() < 120, "{long}");
    }

    #[test]
    fn a_job_larger_than_any_machine_is_a_job() {
        let log = parse(line("1", "0", "1", "9999999999999", "1").as_bytes()).unwrap();
        assert_eq!(log.jobs[0].processors, u32::MAX);
    }
}
