//! Events: what happened on the node. Log lines and `pjwctl events --json` are made from them.

use crate::basics::{CpuSet, Pid, Tid, prelude::*};
use crate::terms::job::JobId;

/// The kind of an event. The names of the kinds in `pjwctl events --json` are stable, because scripts rely on
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum EventKind {
    /// A job got cores.
    Assigned,
    /// A cpuset of an earlier pjwd was found without a journal record. Its job gets the cores of the cpuset,
    /// or the cpuset is removed.
    Recovered,
    /// The cores of a job changed in number or were replaced.
    Resized,
    /// A job ended or was released; its cores are free.
    Released,
    /// Threads were restricted to the cores of their job.
    Confined,
    /// A thread left the cores of its job, or tried to.
    Violation,
    /// A process is outside of its job. Either it belongs to no job although its user has a job here, or it
    /// was moved out of its job's cpuset.
    Stray,
    /// A mask, a cpuset or the cgroup of a process was restored after another program changed it.
    Repaired,
    /// A request was refused.
    Refused,
    /// Cores were taken back from a job, because a scheduler granted them to another job.
    Revoked,
    /// Running threads were pinned to other PUs of their job.
    Rebalanced,
    /// PUs went online or offline.
    Hotplug,
    /// Kernel events were lost, and the whole node was scanned again.
    Overrun,
    /// pjw started.
    Started,
    /// pjw stopped.
    Stopped,
    /// The configuration was read again.
    Reloaded,
}

impl EventKind {
    /// Returns the name of the kind in `pjwctl events --json`, such as `assigned`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// An event: something that happened on the node, or that pjw did. `pjwctl events` and the log show the
/// events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The kind of the event.
    pub kind: EventKind,
    /// The job that the event is about. `None` if it is about no single job.
    pub job: Option<JobId>,
    /// The process that the event is about. `None` if it is about no single process.
    pub pid: Option<Pid>,
    /// The thread that the event is about. `None` if it is about no single thread.
    pub tid: Option<Tid>,
    /// The PUs that the event is about, such as those that a job got. `None` if it is about no PUs.
    pub cpus: Option<CpuSet>,
    /// A description of what happened, in one sentence for users.
    pub text: String,
}

impl Event {
    /// Makes an event that names no job, PUs or process. To add these, call `with_job`, `with_cpus` and
    /// `with_pid`. `text` describes what happened, for users.
    #[must_use]
    pub fn new(kind: EventKind, text: impl Into<String>) -> Self {
        Self { kind, job: None, pid: None, tid: None, cpus: None, text: text.into() }
    }

    /// Sets the job that the event is about, and returns the event.
    #[must_use]
    pub fn with_job(mut self, job: &JobId) -> Self {
        self.job = Some(job.clone());
        self
    }

    /// Sets the PUs that the event is about, and returns the event.
    #[must_use]
    pub fn with_cpus(mut self, cpus: &CpuSet) -> Self {
        self.cpus = Some(cpus.clone());
        self
    }

    /// Sets the process that the event is about, and returns the event.
    #[must_use]
    pub fn with_pid(mut self, pid: Pid) -> Self {
        self.pid = Some(pid);
        self
    }
}
