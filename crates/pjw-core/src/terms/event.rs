//! Events: what happened on the node. Log lines and `pjwctl events --json` are made from them.

use crate::basics::{CpuSet, Pid, Tid, prelude::*};
use crate::terms::job::JobId;

/// The kind of an event. Scripts read the names of the kinds in `pjwctl events --json`, so the names must not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum EventKind {
    /// A job got cores.
    Assigned,
    /// A cpuset that an earlier pjwd made was found, and no record of it: its job keeps the cores, or the cpuset is removed.
    Recovered,
    /// The cores of a job changed in number or were replaced.
    Resized,
    /// A job ended or was released; its cores are free.
    Released,
    /// Threads were restricted to the cores of their job.
    Confined,
    /// A thread tried to leave the cores of its job, or left them.
    Violation,
    /// A process is outside: it belongs to no job though its user has jobs here, or it was moved out of its
    /// job's cpuset.
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

/// An event: something that happened on the node or that pjw did. Events are shown by `pjwctl events` and in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened, as one of the fixed kinds.
    pub kind: EventKind,
    /// The job that the event is about. `None` if it is about no single job.
    pub job: Option<JobId>,
    /// The process that the event is about. `None` if it is about no single process.
    pub pid: Option<Pid>,
    /// The thread that the event is about. `None` if it is about no single thread.
    pub tid: Option<Tid>,
    /// The PUs that the event is about, such as those that a job got. `None` if it is about no PUs.
    pub cpus: Option<CpuSet>,
    /// The description of what happened, in one sentence for users.
    pub text: String,
}

impl Event {
    /// Makes an event from its kind and its description. The job, the PUs and the process that it concerns are added
    /// with `with_job`, `with_cpus` and `with_pid`.
    #[must_use]
    pub fn new(kind: EventKind, text: impl Into<String>) -> Self {
        Self { kind, job: None, pid: None, tid: None, cpus: None, text: text.into() }
    }

    /// Sets the job that the event concerns, and returns the event.
    #[must_use]
    pub fn with_job(mut self, job: &JobId) -> Self {
        self.job = Some(job.clone());
        self
    }

    /// Sets the PUs that the event concerns, and returns the event.
    #[must_use]
    pub fn with_cpus(mut self, cpus: &CpuSet) -> Self {
        self.cpus = Some(cpus.clone());
        self
    }

    /// Sets the process that the event concerns, and returns the event.
    #[must_use]
    pub fn with_pid(mut self, pid: Pid) -> Self {
        self.pid = Some(pid);
        self
    }
}
