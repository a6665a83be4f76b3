//! The methods of the interface: parsed calls, replies, and errors.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::INTERFACE_NAME;
use crate::report::Report;
use crate::wire::{Abstained, Action, Event, Fits, Job, Member, Memory, Move, Status, Thread, Topology};

/// A method call of a client, parsed from JSON. The types of the parameters are correct, but their values have
/// not been checked. For example, the job that a parameter names possibly does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// Returns the state of the whole machine.
    GetStatus,
    /// Returns all jobs on the machine.
    ListJobs,
    /// Returns one job, with one page of the processes that belong to the job.
    GetJob(GetJob),
    /// Measures the memory use of a job: how much memory its processes have, and how much of it they share.
    GetMemory(GetMemory),
    /// Grants cores to a job, and adds processes to the job. Creates the job if it does not exist.
    Assign(Assign),
    /// Releases a job: its cores become free. Its threads get back the affinity masks that they would have without pjw.
    Release(JobParameter),
    /// Sets the number of cores that a job can use at present.
    Want(Want),
    /// Promises cores to a service: the daemon keeps these cores for the service, also when the service does not run.
    Provision(Provision),
    /// Releases every job that the caller may change.
    ReleaseAll,
    /// Returns the reasons why a job holds its cores.
    ExplainJob(JobParameter),
    /// Returns the reasons why a process belongs to its job or to no job, and the reasons why its threads
    /// have their affinity masks.
    ExplainPid(ExplainPid),
    /// Returns the changes of affinity masks and cpusets that the daemon would make now.
    Plan,
    /// Returns the jobs that would have to move to other cores so that larger requests for cores fit.
    PlanDefrag,
    /// Moves jobs to other cores so that larger requests for cores fit.
    Defrag,
    /// Returns the stored events of the daemon, with one reply for each event. If the client requests it, also returns
    /// new events as they happen.
    Events(Events),
    /// Returns the reports of jobs that have ended, the newest first.
    GetReports(GetReports),
    /// Returns the topology of the machine as a tree of packages, NUMA nodes, L3 caches and cores.
    GetTopology,
    /// Makes the daemon read its configuration again.
    Reload,
}

macro_rules! parameters {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* #[serde(skip_serializing_if = "is_absent")] pub $field: $type,)*
        }
    )*};
}

parameters! {
    /// The parameters of the method `GetJob`, which returns a job with one page of its processes.
    GetJob {
        /// The id of the job, such as `slurm:7`.
        job: String,
        /// The last pid on the previous page, after which the page starts. `None` for the first page.
        after: Option<u32>,
        /// The maximum number of processes on the page. `None` for the daemon's default.
        limit: Option<u32>,
        /// The last tid on the previous page, if that page did not contain all threads of the process
        /// `after`. The page then starts with the further threads of this process.
        after_tid: Option<u32>,
    }
    /// The parameters of the method `GetMemory`, which measures the memory use of a job.
    GetMemory {
        /// The id of the job, such as `slurm:7`.
        job: String,
        /// Whether pjwd only reads counters of the kernel, and estimates the shared memory. If false or `None`, the
        /// kernel walks the pages of all processes, which takes 20 to 35 us per MiB.
        estimate: Option<bool>,
        /// Whether the memory on each NUMA node is measured too. If true, the kernel walks all pages once more.
        nodes: Option<bool>,
    }
    /// The parameters of the method `Assign`, which grants cores to a job and adds processes to the job. A value that
    /// is `None` is not requested: an existing job keeps its value, and a new job has the default.
    Assign {
        /// The id of the job, such as `slurm:7`.
        job: String,
        /// The requested number of cores, or of PUs (logical CPUs): see `smt`. Excludes `cpus`.
        cores: Option<u32>,
        /// Whether everything that the job can have now is requested: what is free, and what the job holds already.
        /// Excludes `cores` and `cpus`.
        all_cores: Option<bool>,
        /// The requested PUs, in the kernel's list format, such as `0-3,8`. Excludes `cores`.
        cpus: Option<String>,
        /// The pids of the processes that join the job.
        pids: Option<Vec<u32>>,
        /// The id of the session (setsid(2)) whose processes join the job.
        session: Option<u32>,
        /// The placement of the cores: `pack` (close together) or `spread` (evenly over the machine).
        policy: Option<String>,
        /// The priority class of the job: `guaranteed` (cores of its own, and idle ones may be lent), `normal` (cores
        /// of its own, which are never lent) or `besteffort` (it borrows its cores).
        class: Option<String>,
        /// The unit of `cores` and `all_cores`: `whole` for cores (the default), `pus` for PUs.
        smt: Option<String>,
        /// The name of a device near which the cores should be. An empty text removes an earlier preference.
        near: Option<String>,
        /// Whether the job's memory is allocated only from the NUMA nodes of its cores.
        bind_memory: Option<bool>,
        /// Whether the job's cores become an isolated cpuset partition.
        isolated: Option<bool>,
        /// The rule by which a NUMA node is chosen for each new process of the job: `default` (none is chosen), `rr`
        /// (in turn), `ll` (least loaded), `fill` (one node after the other) or `packed` (that of the parent process).
        within_job: Option<String>,
        /// Whether the job must be new. If true, the call is refused if the job exists already.
        fresh: Option<bool>,
        /// Whether the call is refused if one of the processes belongs to another job by any evidence, except by
        /// adoption (the configuration key `adopt_strays`). If false or `None`, the call is refused only if a command
        /// or the cgroup of a batch system assigned the process to the other job.
        keep_members: Option<bool>,
        /// Whether the call is refused with [`CallError::WouldFreeze`] if the processes of a new job would be frozen at
        /// once. Only a job of the class besteffort is frozen, while it can borrow no core. A client that is one of the
        /// processes can thus tell its user before it is frozen.
        refuse_frozen: Option<bool>,
        /// The user id of the job's owner. Only an administrator may name another user than the caller.
        owner: Option<u32>,
    }
    /// The parameters of the methods `Release` and `ExplainJob`: the id of the job.
    JobParameter {
        /// The id of the job, such as `slurm:7`.
        job: String,
    }
    /// The parameters of the method `Want`, which tells the daemon how many cores a job can use at present.
    Want {
        /// The id of the job, such as `slurm:7`.
        job: String,
        /// The number of cores that the job can use at present. `None` if the job wants all cores that it was granted.
        cores: Option<u32>,
    }
    /// The parameters of the method `Provision`, which makes the daemon keep a number of cores for a service, such as
    /// a web server.
    Provision {
        /// The name of the service, such as `web`.
        job: String,
        /// The number of cores that are promised to the service.
        cores: u32,
        /// The rule by which the processes of the service are recognised, such as `unit=nginx.service`. With `None`, an
        /// existing rule stays, and a new service has no rule.
        rule: Option<String>,
    }
    /// The parameters of the method `ExplainPid`, which explains why a process belongs to its job and has its
    /// affinity masks.
    ExplainPid {
        /// The pid of the process.
        pid: u32,
        /// The last tid on the previous page of threads, after which the page starts. `None` for the first page.
        after_tid: Option<u32>,
    }
    /// The parameters of the method `GetReports`, which returns the reports of jobs that have ended.
    GetReports {
        /// The id of the job whose reports are wanted, such as `slurm:7`. `None` for the reports of all jobs.
        job: Option<String>,
        /// The maximum number of reports, at least 1. `None` for all that are stored.
        last: Option<u32>,
    }
    /// The parameters of the method `Events`, which returns the stored events of the daemon.
    Events {
        /// Whether the daemon continues to send new events after the stored events. If not, the replies end
        /// after the stored events.
        follow: Option<bool>,
    }
}

/// Returns whether a parameter is absent. An absent parameter is not sent, although `null` would mean the same.
fn is_absent<T: Serialize>(value: &T) -> bool {
    serde_json::to_value(value).is_ok_and(|value| value.is_null())
}

/// The reply of the daemon to a successful call of a client. The daemon answers the call `Events` with a series of
/// replies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Reply {
    /// Reply to `GetStatus`.
    Status {
        /// The state of the whole machine.
        status: Arc<Status>,
    },
    /// Reply to `ListJobs`.
    Jobs {
        /// All jobs on the machine.
        jobs: Vec<Job>,
    },
    /// Reply to `GetJob`.
    JobDetail(Box<GetJobReply>),
    /// Reply to `GetMemory`.
    Memory {
        /// The memory of the job.
        memory: Box<Memory>,
    },
    /// Reply to `Assign`, `Want` and `Provision`.
    Job {
        /// The job as it is after the call.
        job: Job,
    },
    /// Reply to `Release` and `ReleaseAll`.
    Released {
        /// The ids of the released jobs.
        released: Vec<String>,
    },
    /// Reply to `ExplainJob`.
    JobReasons(ExplainJobReply),
    /// Reply to `ExplainPid`.
    PidReasons(ExplainPidReply),
    /// Reply to `Plan`.
    Plan(Arc<PlanReply>),
    /// Reply to `PlanDefrag` and `Defrag`.
    Defrag(Arc<DefragReply>),
    /// Reply to `Events`.
    Event {
        /// One event. Each event has a reply of its own.
        event: Arc<Event>,
    },
    /// Reply to `GetReports`.
    Reports {
        /// The reports, the newest first.
        reports: Vec<Arc<Report>>,
    },
    /// Reply to `GetTopology`.
    Topology {
        /// The topology of the machine, with the numbers of free cores.
        topology: Topology,
    },
    /// Reply to `Reload`.
    Reloaded {
        /// The changed settings, described in one sentence each.
        changes: Vec<String>,
    },
}

/// The reply to the call `GetJob`: a job, one page of its processes, and its latest events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetJobReply {
    /// The job: its id, its owner, its state, its PUs, and the numbers of its processes and threads.
    pub job: Job,
    /// One page of the processes that belong to the job, with their threads.
    pub members: Vec<Member>,
    /// The latest events of the job, oldest first. Only the first page has them.
    pub history: Vec<Arc<Event>>,
    /// The pid of the last process on this page. `None` if this is the last page. To get the next page, call
    /// `GetJob` with this pid as `after`, and with [`GetJobReply::last_tid`] as `after_tid`. The processes are
    /// in ascending order of their pids. The next page begins as follows:
    ///
    /// - If `last_tid` is `None`: with the first process whose pid is larger than this pid.
    /// - Otherwise: with the same process again, and with the threads of the process that are missing here.
    #[serde(rename = "next")]
    pub last_pid: Option<u32>,
    /// The tid of the last thread on this page, if the last process on this page has threads with larger
    /// tids. `None` if there are no such threads. To get the next page, call `GetJob` with this tid as
    /// `after_tid`, and with [`GetJobReply::last_pid`] as `after`. The next page begins with the thread
    /// that has the next larger tid.
    #[serde(rename = "next_tid", default, skip_serializing_if = "Option::is_none")]
    pub last_tid: Option<u32>,
}

/// The reply to the call `ExplainJob`: the reasons why a job holds its PUs (logical CPUs).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainJobReply {
    /// The id of the job, such as `slurm:7`.
    pub job: String,
    /// The PUs (logical CPUs) that the job holds, as a CPU list such as `0-3,8`.
    pub cpus: String,
    /// The reasons why the daemon chose the PUs in [`ExplainJobReply::cpus`] for the job, in one sentence each.
    #[serde(rename = "because")]
    pub grant_reasons: Vec<String>,
    /// The choice of PUs that the daemon rated second best when it chose the PUs of the job, described in one sentence.
    /// Empty if the daemon compared no choices.
    #[serde(rename = "runner_up")]
    pub second_best: String,
}

/// The reply to the call `ExplainPid`: why a process belongs to its job or to no job, and why its threads
/// have their affinity masks. One reply contains one page of the threads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainPidReply {
    /// The pid of the process, as in the call.
    pub pid: u32,
    /// The id of the job to which the process belongs. `None` if the process belongs to no job.
    pub job: Option<String>,
    /// The reasons why the process belongs to the job or to no job, in one sentence each.
    #[serde(rename = "because")]
    pub membership_reasons: Vec<String>,
    /// One page of the threads of the process. Empty if the process belongs to no job.
    pub threads: Vec<Thread>,
    /// The tid of the last thread on this page. `None` on the last page. To get the next page, call
    /// `ExplainPid` with this tid as `after_tid`: that page begins with the next larger tid.
    #[serde(rename = "next_tid", default, skip_serializing_if = "Option::is_none")]
    pub last_tid: Option<u32>,
}

/// The reply to the call `Plan`, a dry run: the changes of affinity masks and cpusets that the daemon would make now.
/// The reply also contains the warnings of the daemon, each with a reason and a remedy. Most warnings name a change
/// that is needed but that the daemon does not make. The other warnings name a state of the machine that the user
/// should correct.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanReply {
    /// The changes of affinity masks and cpusets that the daemon would make now.
    pub actions: Vec<Action>,
    /// The warnings of the daemon, each with the reason and a remedy. Most warnings name a change that the
    /// daemon does not make, although the change is needed to restrict processes to their PUs. For example,
    /// the daemon grants no PUs to a job whose number of cores is unknown. The other warnings name a state of
    /// the machine that the user should correct.
    #[serde(rename = "abstained")]
    pub warnings: Vec<Abstained>,
}

/// The reply to the calls `PlanDefrag` and `Defrag`. `Defrag` moves jobs to other cores, so that the free cores lie
/// closer together and a larger request for cores can be granted. `PlanDefrag` computes the same moves, but does not
/// make them. The reply contains the moves, and the size of the largest request that fits into the free cores before
/// and after the moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefragReply {
    /// The jobs that would move, or were moved, with their old and new PUs. Each job occurs once.
    pub moves: Vec<Move>,
    /// The sizes, in whole cores, of the largest requests that the free cores could serve before the moves:
    /// inside one L3, NUMA node or package, and on the whole machine.
    #[serde(rename = "fits_before")]
    pub largest_requests_before: Fits,
    /// The sizes, in whole cores, of the largest requests that the free cores can serve after the moves:
    /// inside one L3, NUMA node or package, and on the whole machine.
    #[serde(rename = "fits_after")]
    pub largest_requests_after: Fits,
}

/// An error that the daemon sends as the reply to a call, such as a refusal or an unknown method. Most
/// variants contain a text for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallError {
    /// The daemon refused the request. The text contains the reason and the remedy.
    Refused(String),
    /// The caller has no permission for this call. The text contains the reason.
    NotAllowed(String),
    /// The daemon can't serve the call now, because it is stopping, because there are too many connections, requests or
    /// unread replies, or because it has closed this idle connection for another user. The text contains the reason.
    Busy(String),
    /// The daemon made no job, because the new job could borrow no core and its processes would be frozen at once. Only
    /// a call of `Assign` with `refuse_frozen` gets this error. The text contains the reason and the remedy.
    WouldFreeze(String),
    /// The method belongs to an unknown Varlink interface. The text is the name of the interface.
    InterfaceNotFound(String),
    /// The interface has no such method. The text is the full name of the method.
    MethodNotFound(String),
    /// A parameter is missing, unknown, or of the wrong type. The text is the name of the parameter.
    InvalidParameter(String),
    /// The method sends a series of replies, but the client did not set the Varlink flag `more` in the call.
    ExpectedMore,
}

impl CallError {
    /// Returns this error in the form in which the Varlink protocol sends it to the client: the full name of
    /// the error, such as `org.pjw.Warden.Refused`, and the parameters of the error.
    #[must_use]
    pub fn to_varlink(&self) -> (String, Map<String, Value>) {
        let own = |name: &str| format!("{INTERFACE_NAME}.{name}");
        let standard = |name: &str| format!("org.varlink.service.{name}");
        let (name, key, text) = match self {
            CallError::Refused(text) => (own("Refused"), "message", text.as_str()),
            CallError::NotAllowed(text) => (own("NotAllowed"), "message", text.as_str()),
            CallError::Busy(text) => (own("Busy"), "message", text.as_str()),
            CallError::WouldFreeze(text) => (own("WouldFreeze"), "message", text.as_str()),
            CallError::InterfaceNotFound(text) => (standard("InterfaceNotFound"), "interface", text.as_str()),
            CallError::MethodNotFound(text) => (standard("MethodNotFound"), "method", text.as_str()),
            CallError::InvalidParameter(text) => (standard("InvalidParameter"), "parameter", text.as_str()),
            CallError::ExpectedMore => return (standard("ExpectedMore"), Map::new()),
        };
        (name, Map::from_iter([(key.to_owned(), Value::from(text))]))
    }
}

impl Call {
    /// Parses the method call of a client. `method` is the full name, such as `org.pjw.Warden.GetJob`. If
    /// `parameters` is `None`, the call has no parameters.
    ///
    /// # Errors
    /// If the interface or the method is unknown, or if a parameter is missing, unknown or of the wrong type.
    /// The error contains the name of the interface, method or parameter.
    pub fn parse(method: &str, parameters: Option<Value>) -> Result<Self, CallError> {
        let (interface, name) = method.rsplit_once('.').unwrap_or(("", method));
        if interface != INTERFACE_NAME {
            return Err(CallError::InterfaceNotFound(interface.to_owned()));
        }
        let parameters = parameters.unwrap_or_else(|| Value::Object(Map::new()));
        match name {
            "GetStatus" => check_no_parameters(&parameters).map(|()| Call::GetStatus),
            "ListJobs" => check_no_parameters(&parameters).map(|()| Call::ListJobs),
            "GetJob" => parse_parameters(&parameters).map(Call::GetJob),
            "GetMemory" => parse_parameters(&parameters).map(Call::GetMemory),
            "Assign" => parse_parameters(&parameters).map(Call::Assign),
            "Release" => parse_parameters(&parameters).map(Call::Release),
            "Want" => parse_parameters(&parameters).map(Call::Want),
            "Provision" => parse_parameters(&parameters).map(Call::Provision),
            "ReleaseAll" => check_no_parameters(&parameters).map(|()| Call::ReleaseAll),
            "ExplainJob" => parse_parameters(&parameters).map(Call::ExplainJob),
            "ExplainPid" => parse_parameters(&parameters).map(Call::ExplainPid),
            "Plan" => check_no_parameters(&parameters).map(|()| Call::Plan),
            "PlanDefrag" => check_no_parameters(&parameters).map(|()| Call::PlanDefrag),
            "Defrag" => check_no_parameters(&parameters).map(|()| Call::Defrag),
            "Events" => parse_parameters(&parameters).map(Call::Events),
            "GetReports" => parse_parameters(&parameters).map(Call::GetReports),
            "GetTopology" => check_no_parameters(&parameters).map(|()| Call::GetTopology),
            "Reload" => check_no_parameters(&parameters).map(|()| Call::Reload),
            _ => Err(CallError::MethodNotFound(method.to_owned())),
        }
    }

    /// Returns whether the server abandons this call when its client closes the connection. True for `Assign`, which
    /// takes cores for the client, and for the costly calls `Defrag`, `GetMemory`, `Plan` and `PlanDefrag`. False for
    /// all other calls. For example, the server completes a `Release`, because a batch system does not repeat this call
    /// if it took too long.
    pub(crate) fn is_abandoned_on_disconnect(&self) -> bool {
        matches!(self, Call::Assign(_) | Call::Defrag | Call::GetMemory(_) | Call::Plan | Call::PlanDefrag)
    }
}

/// Checks the JSON parameters of a call whose method has no parameters.
///
/// # Errors
/// If `parameters` is not an empty JSON object. The error contains the name of one parameter.
pub(crate) fn check_no_parameters(parameters: &Value) -> Result<(), CallError> {
    match parameters.as_object() {
        Some(object) => {
            object.keys().next().map_or(Ok(()), |key| Err(CallError::InvalidParameter(key.clone())))
        }
        None => Err(CallError::InvalidParameter("parameters".to_owned())),
    }
}

/// Parses the JSON parameters of a call as a value of the type `T`.
///
/// # Errors
/// If a parameter is missing, unknown or of the wrong type. The error contains the name of this parameter.
pub(crate) fn parse_parameters<T: DeserializeOwned>(parameters: &Value) -> Result<T, CallError> {
    // Serde would accept a list as an object without names.
    if !parameters.is_object() {
        return Err(CallError::InvalidParameter("parameters".to_owned()));
    }
    let keys: Vec<String> = parameters.as_object().into_iter().flat_map(Map::keys).cloned().collect();
    serde_json::from_value(parameters.clone()).map_err(|error| {
        let text = error.to_string();
        let quoted = text.split('`').nth(1).filter(|_| text.contains("field"));
        // For a wrong type serde names the value only. The wrong key is the one whose removal changes the error.
        let wrong_key = || {
            keys.iter().find(|key| {
                let mut without = parameters.clone();
                without.as_object_mut().and_then(|object| object.remove(key.as_str()));
                serde_json::from_value::<T>(without).err().is_none_or(|other| other.to_string() != text)
            })
        };
        let name = quoted.map(str::to_owned).or_else(|| wrong_key().cloned());
        CallError::InvalidParameter(name.unwrap_or_else(|| "parameters".to_owned()))
    })
}

#[cfg(test)]
mod tests;
