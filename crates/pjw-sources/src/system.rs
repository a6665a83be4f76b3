//! What each batch system's file fills in: one row of the table of sources.

use pjw_core::job::{Amount, JobId, Source};
use pjw_core::process::Comm;
use pjw_core::snapshot::{Marks, OwnUnit};

use crate::Host;
use crate::announcement::Flaw;

/// No machine has more cores; a larger count is a mistake or a lie.
const MOST_CORES: u32 = 65_536;

/// How one batch system is recognised.
pub(crate) struct System {
    /// Which.
    pub(crate) source: Source,
    /// The names of those of its processes whose children are job processes, cut to 15 bytes as the kernel
    /// does.
    pub(crate) launchers: &'static [&'static str],
    /// The variables that [`System::ticket`] reads; it can't see others.
    pub(crate) variables: &'static [&'static str],
    /// What it gives each job of its own, beside the place.
    pub(crate) own: OwnUnit,
    /// Whether the warden may narrow the cpuset of a job's directory: the system never writes it, unless it grants
    /// cores by it.
    pub(crate) narrowable: bool,
    /// Finds the outermost directory of this system on a cgroup path.
    pub(crate) place: fn(&Sight<'_>) -> Option<Place>,
    /// Reads the job and its core count from the environment.
    pub(crate) ticket: fn(Environ<'_>, &Host) -> Option<Ticket>,
}

/// What can be seen of a process when its place is judged.
pub(crate) struct Sight<'a> {
    /// The directories of its cgroup path, outermost first, as far as they can be believed.
    pub(crate) parts: &'a [&'a str],
    /// Its name.
    pub(crate) comm: &'a Comm,
    /// Its command line.
    pub(crate) command_line: &'a str,
}

/// What a directory on a cgroup path is to a system.
pub(crate) enum Place {
    /// A job's own directory: the `depth`-th on the path, counted from 0.
    Job {
        /// The job.
        job: JobId,
        /// Where it stands on the path.
        depth: usize,
        /// Whether the process is known by more than its name to be the scheduler's, not the job's.
        helper: bool,
    },
    /// A directory in which only the scheduler puts processes, and only its own.
    Staff {
        /// Where it stands on the path.
        depth: usize,
    },
}

impl Place {
    /// A job's own directory, with a job's process in it.
    pub(crate) fn job(job: JobId, depth: usize) -> Self {
        Place::Job { job, depth, helper: false }
    }

    pub(crate) fn depth(&self) -> usize {
        match self {
            Place::Job { depth, .. } | Place::Staff { depth } => *depth,
        }
    }
}

/// What the environment says.
pub(crate) struct Ticket {
    /// The job it names.
    pub(crate) job: JobId,
    /// Another id of the same job, which the cgroup may go by.
    pub(crate) alias: Option<JobId>,
    /// How many cores the job has on this node.
    pub(crate) amount: Option<Amount>,
}

impl Ticket {
    /// A job of whose cores nothing is known.
    pub(crate) fn of(job: JobId) -> Self {
        Self { job, alias: None, amount: None }
    }

    /// Whether it is a ticket for this job.
    pub(crate) fn names(&self, job: &JobId) -> bool {
        self.job == *job || self.alias.as_ref() == Some(job)
    }
}

/// A process's environment as one system sees it: the variables of its own row only.
#[derive(Clone, Copy)]
pub(crate) struct Environ<'a> {
    variables: &'static [&'static str],
    marks: &'a Marks,
}

impl<'a> Environ<'a> {
    pub(crate) fn new(system: &System, marks: &'a Marks) -> Self {
        Self { variables: system.variables, marks }
    }

    /// A hook's own environment, of which these variables count.
    pub(crate) fn of(variables: &'static [&'static str], marks: &'a Marks) -> Self {
        Self { variables, marks }
    }

    /// The variable's value, or the flaw that it has none.
    pub(crate) fn need(self, variable: &'static str) -> Result<&'a str, Flaw> {
        self.get(variable).ok_or(Flaw::Missing { variable })
    }

    /// The first of two variables that is set, with its value, or the flaw that none is.
    pub(crate) fn first(self, names: [&'static str; 2]) -> Result<(&'static str, &'a str), Flaw> {
        let set = names.into_iter().find_map(|name| Some((name, self.get(name)?)));
        set.ok_or(Flaw::Missing { variable: names[0] })
    }

    /// The variable's value, if it is set and not empty.
    pub(crate) fn get(self, name: &str) -> Option<&'a str> {
        let value = self.variables.contains(&name).then(|| self.marks.environ.get(name))??;
        (!value.is_empty()).then_some(value)
    }

    /// The variable's value, if it is a whole number above 0.
    pub(crate) fn number(self, name: &str) -> Option<u32> {
        self.get(name).and_then(|text| text.parse().ok()).filter(|&n| n > 0)
    }
}

/// The text, if it is a number as schedulers write their ids: digits only, not 0, no zeros in front. Two
/// spellings of one number would be two jobs.
pub(crate) fn plain_number(text: &str) -> Option<&str> {
    let digits = !text.is_empty() && text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits && !text.starts_with('0')).then_some(text)
}

/// The count, if any machine could have it.
pub(crate) fn plausible(count: u32) -> Option<u32> {
    (1..=MOST_CORES).contains(&count).then_some(count)
}
