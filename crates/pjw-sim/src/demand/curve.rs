//! A curve of demand: how many cores each owner uses, and from when on.
//!
//! ```text
//! time_s,web:8,db
//! 0,2,1.5
//! 3600,7.5,1.5
//! 7200,2,0
//! ```
//!
//! The first column is the time in seconds. Each other column is an owner, with the number of cores that it uses from
//! this time on. The last line only says when the curve ends. `web:8` owns 8 cores, and `db` owns as many as it uses at
//! most. The line with the names may be missing. Lines that begin with `#`, and empty lines, are skipped.

use std::collections::BTreeSet;
use std::time::Duration;

use pjw_core::cpuset::Pu;
use pjw_core::job::{JobId, JobIdError, JobSource};
use thiserror::Error;

/// The last possible time: 100 years.
const MAX_TIME: Duration = Duration::from_secs(100 * 366 * 86_400);
/// The largest number of cores of an owner.
const MAX_CORES: u32 = Pu::MAX.0 + 1;

/// The CPU demand of jobs over time, as a file describes it. Each of these jobs is an owner: a job that owns
/// cores, and lends the cores that it does not use. The curve has at least one owner and at least two points in
/// time.
#[derive(Debug, Clone, PartialEq)]
pub struct DemandCurve {
    /// The jobs that own cores, in the order of their columns in the file.
    pub owners: Vec<CurveOwner>,
    /// The numbers of cores that the owners use, ascending by time. The last point marks only the end of the curve.
    pub points: Vec<DemandPoint>,
}

/// A job of a demand curve (the number of cores that each job needs, over time). The job owns cores, and lends to
/// other jobs the cores that it does not use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CurveOwner {
    /// The id of the job, whose name is the name of the column.
    pub job: JobId,
    /// The number of cores that the job owns.
    pub cores: u32,
}

/// A point of a curve of CPU demand: how many cores each owner uses from a certain time on. An owner is a job
/// that owns cores, and lends the cores that it does not use.
#[derive(Debug, Clone, PartialEq)]
pub struct DemandPoint {
    /// The time from which the owners use these numbers of cores, as in the file: the file may begin at any time.
    pub time: Duration,
    /// The number of cores that each owner uses, in the order of [`DemandCurve::owners`]. A number of 2.5 means 2.5 s
    /// of CPU time in each second.
    pub cores_used: Vec<f64>,
}

/// Error: the text of a file is not a valid curve of CPU demand. Most variants contain the number of the invalid
/// line. The first line has the number 1. A curve of CPU demand says how many cores each owner uses over time. An
/// owner is a job with cores of its own.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CurveError {
    /// The text has no line with a demand.
    #[error(
        "there is no demand in it: a line has the time in seconds and, for each owner, the cores in use, as in 3600,2.5"
    )]
    Empty,
    /// Only one line of the text has a demand, so the time for which this demand lasts is unknown.
    #[error(
        "line {line}: this is the only demand: another line must follow, whose time is the end of the curve"
    )]
    NoEnd {
        /// The number of the line.
        line: usize,
    },
    /// A line has a time and no number of cores, so no owner (a job that owns cores) is described.
    #[error("line {line}: there is no owner: after the time, each owner has a column")]
    NoOwner {
        /// The number of the line.
        line: usize,
    },
    /// A column has a name that no job can have.
    #[error("line {line}: the owner {name:?}: {reason}")]
    InvalidName {
        /// The number of the line.
        line: usize,
        /// The name, cut to 20 characters.
        name: String,
        /// What is wrong with the name.
        reason: JobIdError,
    },
    /// Two columns have the same name.
    #[error("line {line}: two columns have the name {name}")]
    RepeatedName {
        /// The number of the line.
        line: usize,
        /// The name of both columns.
        name: String,
    },
    /// The text after the name of an owner (a job that owns cores) is not a valid number of cores.
    #[error(
        "line {line}: {owner} can't own {text:?} cores: after the colon stands a whole number from 1 to {MAX_CORES}"
    )]
    InvalidOwnedCores {
        /// The number of the line.
        line: usize,
        /// The name of the owner.
        owner: String,
        /// The text after the colon, cut to 20 characters.
        text: String,
    },
    /// A line has more or fewer fields than the first line.
    #[error(
        "line {line} has {found} {} instead of {expected}: the time, and the cores in use of each owner",
        if *found == 1 { "field" } else { "fields" }
    )]
    WrongFieldCount {
        /// The number of the line.
        line: usize,
        /// The number of fields of this line.
        found: usize,
        /// The number of fields of the first line.
        expected: usize,
    },
    /// The first field of a line is not a valid time.
    #[error("line {line}: the time {text:?} is not a number of seconds, as in 3600 or 0.5")]
    InvalidTime {
        /// The number of the line.
        line: usize,
        /// The text of the field, cut to 20 characters.
        text: String,
    },
    /// The time of a line is not later than the time of the previous line.
    #[error("line {line}: the time {text} is not after {before} s, the time of the line before")]
    TimeNotAfter {
        /// The number of the line.
        line: usize,
        /// The text of the field, cut to 20 characters.
        text: String,
        /// The time of the line before, in seconds.
        before: String,
    },
    /// A field is no number of cores.
    #[error("line {line}: {owner}: {text:?} is not a number of cores, as in 2 or 0.5")]
    InvalidCores {
        /// The number of the line.
        line: usize,
        /// The name of the owner.
        owner: String,
        /// The text of the field, cut to 20 characters.
        text: String,
    },
    /// An owner (a job that owns cores) uses more cores than it owns.
    #[error("line {line}: {owner} uses {text} cores and owns {owned}")]
    AboveOwned {
        /// The number of the line.
        line: usize,
        /// The name of the owner.
        owner: String,
        /// The text of the field, cut to 20 characters.
        text: String,
        /// The number of cores that the owner owns.
        owned: u32,
    },
}

/// Parses `bytes`, the content of a file with a curve of CPU demand. The curve says how many cores each owner
/// uses over time. An owner is a job that owns cores, and lends the cores that it does not use. The
/// documentation of this module describes the format.
///
/// # Errors
/// If the text is no valid curve. The error says what is wrong, and on which line. If the text contains no
/// demand, the error contains no line number.
pub fn parse(bytes: &[u8]) -> Result<DemandCurve, CurveError> {
    let text = String::from_utf8_lossy(bytes);
    // Spreadsheet programs begin a file with a byte order mark.
    let lines = (1..).zip(text.trim_start_matches('\u{feff}').lines());
    let mut lines =
        lines.map(|(number, text)| Line::new(number, text)).filter(|line| !line.is_skipped()).peekable();
    let first = lines.peek().ok_or(CurveError::Empty)?;
    let columns = if first.has_names() {
        let columns = named_columns(first)?;
        lines.next();
        columns
    } else {
        unnamed_columns(first)?
    };
    let mut points: Vec<DemandPoint> = Vec::new();
    let mut last_line = 0;
    for line in lines {
        let point = parse_point(&line, &columns)?;
        if let Some(before) = points.last().map(|last| last.time).filter(|before| point.time <= *before) {
            let before = before.as_secs_f64().to_string();
            return Err(CurveError::TimeNotAfter {
                line: line.number,
                text: line.shortened_field(0),
                before,
            });
        }
        last_line = line.number;
        points.push(point);
    }
    match points.len() {
        0 => Err(CurveError::Empty),
        1 => Err(CurveError::NoEnd { line: last_line }),
        _ => Ok(DemandCurve { owners: owners(&columns, &points), points }),
    }
}

/// A line of the file, with its number.
struct Line<'t> {
    number: usize,
    fields: Vec<&'t str>,
}

impl<'t> Line<'t> {
    fn new(number: usize, text: &'t str) -> Self {
        Self { number, fields: text.split(',').map(str::trim).collect() }
    }

    fn is_skipped(&self) -> bool {
        self.fields == [""] || self.fields[0].starts_with('#')
    }

    /// Returns whether the line names the columns. A line whose only wrong field is the time is a demand with a wrong
    /// time.
    fn has_names(&self) -> bool {
        let others = &self.fields[1..];
        parse_time(self.fields[0]).is_none() && others.iter().any(|field| parse_cores(field).is_none())
    }

    /// Returns the field with the index `index`, cut to a length that fits into a message.
    fn shortened_field(&self, index: usize) -> String {
        shortened(self.fields[index])
    }
}

/// A column of the file.
struct Column {
    job: JobId,
    /// The number of cores that the owner owns. `None` if the file does not say it.
    owned: Option<u32>,
}

/// Returns the columns that the line `header` names after the time column, as `NAME` or `NAME:CORES`. Returns an error
/// if a name is invalid or occurs twice, or if a number of cores is invalid.
fn named_columns(header: &Line<'_>) -> Result<Vec<Column>, CurveError> {
    let line = header.number;
    let mut names = BTreeSet::new();
    let mut column = |field: &&str| {
        let (name, owned) = match field.rsplit_once(':') {
            Some((name, owned)) => (name.trim_end(), Some(owned.trim_start())),
            None => (*field, None),
        };
        let job = JobId::new(JobSource::Manual, name).map_err(|reason| CurveError::InvalidName {
            line,
            name: shortened(name),
            reason,
        })?;
        let owned = owned.map(|text| {
            parse_owned_cores(text).ok_or_else(|| CurveError::InvalidOwnedCores {
                line,
                owner: name.to_owned(),
                text: shortened(text),
            })
        });
        if !names.insert(job.clone()) {
            return Err(CurveError::RepeatedName { line, name: name.to_owned() });
        }
        Ok(Column { job, owned: owned.transpose()? })
    };
    header.fields[1..].iter().map(&mut column).collect()
}

/// Returns the columns of a file without names, as many as the first line has fields after the time. Their owners are
/// named `owner`, or `owner1`, `owner2` and so on if there are several. Returns an error if there is no such field.
fn unnamed_columns(first: &Line<'_>) -> Result<Vec<Column>, CurveError> {
    let line = first.number;
    let names: Vec<String> = match first.fields.len() - 1 {
        0 if parse_time(first.fields[0]).is_none() => {
            return Err(CurveError::InvalidTime { line, text: first.shortened_field(0) });
        }
        0 => return Err(CurveError::NoOwner { line }),
        1 => vec!["owner".to_owned()],
        many => (1..=many).map(|number| format!("owner{number}")).collect(),
    };
    let column = |name: String| match JobId::new(JobSource::Manual, &name) {
        Ok(job) => Ok(Column { job, owned: None }),
        Err(reason) => Err(CurveError::InvalidName { line, name, reason }),
    };
    names.into_iter().map(column).collect()
}

/// Parses a line: a time, and the number of cores that each owner uses from this time on. Returns an error if a field
/// is missing or invalid, or if an owner uses more cores than it owns.
fn parse_point(line: &Line<'_>, columns: &[Column]) -> Result<DemandPoint, CurveError> {
    let number = line.number;
    if line.fields.len() != columns.len() + 1 {
        let (found, expected) = (line.fields.len(), columns.len() + 1);
        return Err(CurveError::WrongFieldCount { line: number, found, expected });
    }
    let time = parse_time(line.fields[0])
        .ok_or_else(|| CurveError::InvalidTime { line: number, text: line.shortened_field(0) })?;
    let used = columns.iter().zip(&line.fields[1..]).map(|(column, field)| {
        let (owner, text) = (column.job.name().to_owned(), shortened(field));
        match (parse_cores(field), column.owned) {
            (None, _) => Err(CurveError::InvalidCores { line: number, owner, text }),
            (Some(used), Some(owned)) if used > f64::from(owned) => {
                Err(CurveError::AboveOwned { line: number, owner, text, owned })
            }
            (Some(used), _) => Ok(used),
        }
    });
    Ok(DemandPoint { time, cores_used: used.collect::<Result<_, _>>()? })
}

/// Returns the owners of the columns, with the numbers of cores that they own. If the file does not say how many
/// cores an owner owns, the owner owns as many whole cores as it uses at most.
fn owners(columns: &[Column], points: &[DemandPoint]) -> Vec<CurveOwner> {
    let most_used = |index: usize| {
        let most = points.iter().map(|point| point.cores_used[index]).fold(0.0, f64::max);
        (1..=MAX_CORES).find(|&whole| f64::from(whole) >= most).unwrap_or(MAX_CORES)
    };
    let owner = |(index, column): (usize, &Column)| CurveOwner {
        job: column.job.clone(),
        cores: column.owned.unwrap_or_else(|| most_used(index)),
    };
    columns.iter().enumerate().map(owner).collect()
}

fn parse_time(text: &str) -> Option<Duration> {
    let seconds = text.parse::<f64>().ok()?;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| *time <= MAX_TIME)
}

fn parse_cores(text: &str) -> Option<f64> {
    text.parse::<f64>().ok().filter(|cores| (0.0..=f64::from(MAX_CORES)).contains(cores))
}

fn parse_owned_cores(text: &str) -> Option<u32> {
    text.parse().ok().filter(|cores| (1..=MAX_CORES).contains(cores))
}

fn shortened(text: &str) -> String {
    text.chars().take(20).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str, cores: u32) -> CurveOwner {
        CurveOwner { job: JobId::new(JobSource::Manual, name).unwrap(), cores }
    }

    fn point(seconds: f64, cores_used: &[f64]) -> DemandPoint {
        DemandPoint { time: Duration::from_secs_f64(seconds), cores_used: cores_used.to_vec() }
    }

    #[test]
    fn the_first_line_names_the_owners_and_says_how_many_cores_they_own() {
        let curve =
            parse(b"\xef\xbb\xbftime_s, web:8 ,db\r\n# a day\r\n\r\n0, 2, 1.5\r\n0.5,7.25,0\r\n").unwrap();
        assert_eq!(curve.owners, [owner("web", 8), owner("db", 2)]);
        assert_eq!(curve.points, [point(0.0, &[2.0, 1.5]), point(0.5, &[7.25, 0.0])]);
    }

    #[test]
    fn two_columns_of_numbers_are_the_demand_of_one_owner() {
        let curve = parse(b"10,0\n20,3.5\n30,0\n").unwrap();
        assert_eq!((curve.owners, curve.points.len()), (vec![owner("owner", 4)], 3));
        let curve = parse(b"10,0,1\n20,3,1").unwrap();
        assert_eq!(curve.owners, [owner("owner1", 3), owner("owner2", 1)]);
    }

    #[test]
    fn an_owner_that_uses_nothing_owns_one_core() {
        assert_eq!(parse(b"0,0\n1,0\n").unwrap().owners, [owner("owner", 1)]);
    }

    #[test]
    fn a_text_that_is_no_curve_is_refused_with_the_line() {
        for (text, expected) in [
            ("", "there is no demand in it"),
            ("# only a remark\n\n", "there is no demand in it"),
            ("time_s,web\n", "there is no demand in it"),
            ("hello\n", "line 1: the time \"hello\" is not a number of seconds"),
            ("7\n", "line 1: there is no owner"),
            ("time_s,web\n0,1\n", "line 2: this is the only demand"),
            ("time_s,web\n0,1,2\n", "line 2 has 3 fields instead of 2"),
            ("0,1\n1\n", "line 2 has 1 field instead of 2"),
            ("x,1\n1,1\n", "line 1: the time \"x\" is not a number of seconds"),
            ("0,1\n\nnoon,1\n", "line 3: the time \"noon\" is not a number of seconds"),
            ("-1,1\n", "line 1: the time \"-1\" is not a number of seconds"),
            ("0,1\n1e30,1\n", "line 2: the time \"1e30\" is not a number of seconds"),
            ("0,1\ninf,1\n", "line 2: the time \"inf\" is not a number of seconds"),
            ("0,1\n5.5,1\n5.5,2\n", "line 3: the time 5.5 is not after 5.5 s, the time of the line before"),
            ("0,1\n5,1\n4,2\n", "line 3: the time 4 is not after 5 s"),
            ("time_s,web\n0,one\n", "line 2: web: \"one\" is not a number of cores"),
            ("0,1\n1,-2\n", "line 2: owner: \"-2\" is not a number of cores"),
            ("0,1\n1,NaN\n", "line 2: owner: \"NaN\" is not a number of cores"),
            ("0,1\n1,\n", "line 2: owner: \"\" is not a number of cores"),
            ("0,1\n1,99999\n", "line 2: owner: \"99999\" is not a number of cores"),
            ("time_s,web:8\n0,1\n1,8.5\n", "line 3: web uses 8.5 cores and owns 8"),
            ("time_s,web:0\n", "line 1: web can't own \"0\" cores"),
            ("time_s,web:many\n", "line 1: web can't own \"many\" cores"),
            ("time_s,web,web\n", "line 1: two columns have the name web"),
            ("time_s,the web\n", "line 1: the owner \"the web\": "),
            ("time_s,\n", "line 1: the owner \"\": "),
        ] {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{text:?}: {error}");
        }
        let long = parse(format!("0,{}\n", "x".repeat(10_000)).as_bytes()).unwrap_err().to_string();
        assert!(long.len() < 160, "{long}");
    }
}
