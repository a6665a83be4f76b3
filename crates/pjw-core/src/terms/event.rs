//! Events: what happened on the node. Log lines and `pjwctl events --json` are made from them.

use crate::basics::{CpuSet, Pid, Tid, prelude::*};
use crate::terms::job::JobId;

/// The kind of an event. An event is something that happened on the machine, or that pjw did. The names of the
/// kinds in `pjwctl events --json` never change, because scripts rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum EventKind {
    /// Cores were granted to a job that had no cores.
    Assigned,
    /// A job began to wait for cores: its request can't be served at present. It gets its cores as soon as enough are
    /// free. The text has the reason.
    Queued,
    /// At its start, the daemon detected a job cpuset of an earlier run that is missing in the journal (the file from
    /// which a restarted daemon restores its state). The job gets the cores of this cpuset, or the cpuset is removed.
    Recovered,
    /// The grant of a job changed: the job got more, fewer or other cores.
    Resized,
    /// A job ended, a command (`pjwctl release`) released the job, or the kernel refused to keep a new job on its
    /// cores. pjw no longer controls the threads of the job, and frees the cores that pjw had granted to the job.
    Released,
    /// A job ended or was released, and pjw made a report on what the job used. The text has the run time, the CPU time
    /// and the mean number of used cores. If pjw can judge how well the job used its cores, the text begins with this
    /// verdict in one word, such as `serial`.
    Ended,
    /// Threads of a job were restricted to the cores of the job, or threads that belong to no job were kept
    /// off the cores of jobs. If a program had asked for other PUs, the text names these and the PUs that it got
    /// instead.
    Confined,
    /// A thread of a job requested an affinity mask with PUs outside the job's cores, or a scan read such a
    /// mask.
    Violation,
    /// A process belongs to no job although the user of the process has a job on this machine. Also used if a
    /// process of a job was moved out of the cpuset of the job.
    Stray,
    /// pjw restored an affinity mask, a cpuset or the cgroup of a process after another program had changed it. Also
    /// used if pjw gave other PUs to hot threads (threads that run or wait for a PU most of the time), because their
    /// program had bound too many of them to the same PUs. Also used if pjw gave these threads their old PUs back.
    Repaired,
    /// A command of a client to change a job was refused.
    Refused,
    /// Idle cores of a job of the class guaranteed were lent to a job of the class besteffort.
    Lent,
    /// pjw took cores back from a job, or announced that it will take them back after the time `revocation_grace`.
    /// Either a batch system granted the cores to another job, or the job had borrowed the cores. Borrowed cores are
    /// taken back mostly because the job that owns them needs them, or because the borrower has free ones instead.
    /// Borrowed cores that were free are taken because another job gets them.
    Revoked,
    /// A job of the class guaranteed has cores back that were lent to another job.
    Returned,
    /// Hot threads of a job (threads that run or wait for a PU most of the time) were pinned to one PU each. Also used
    /// if pjw lifted the bindings of threads because the configuration demands it (`affinity = "override"`).
    Rebalanced,
    /// PUs of the machine went online or offline.
    Hotplug,
    /// Kernel events were lost, and all processes are scanned again. Also sent to a client that read its
    /// events too slowly and missed some of them.
    Overrun,
    /// The daemon (pjwd) started.
    Started,
    /// The daemon (pjwd) stopped.
    Stopped,
    /// The daemon read its configuration again.
    Reloaded,
}

impl EventKind {
    /// Returns the name of the kind in `pjwctl events --json`, such as `assigned`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// An event: something that happened on the machine, or that pjw did. `pjwctl events` and the log show the
/// events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The kind of the event.
    pub kind: EventKind,
    /// The job that the event is about. `None` if the event is about no job or about several jobs.
    pub job: Option<JobId>,
    /// The process that the event is about. `None` if the event is about no process or about several
    /// processes.
    pub pid: Option<Pid>,
    /// The thread that the event is about. `None` if the event is about no thread or about several threads.
    pub tid: Option<Tid>,
    /// The PUs that the event is about, such as the PUs that were granted to a job. `None` if the event is
    /// about no PUs.
    pub cpus: Option<CpuSet>,
    /// A description of what happened, in one sentence for users.
    pub text: String,
}

impl Event {
    /// Makes an event that names no job, no PUs (logical CPUs) and no process. To add these, call `with_job`,
    /// `with_cpus` and `with_pid`. `text` describes what happened, for users.
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

    /// Sets the PUs (logical CPUs) that the event is about, and returns the event.
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
