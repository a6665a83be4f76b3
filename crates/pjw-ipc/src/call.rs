//! The methods of the interface: a call as it is understood, a reply as it is sent, and the errors between.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::INTERFACE;
use crate::wire::{Abstained, Action, Event, Fits, Job, Member, Move, Status, Thread, Topology};

/// A call of one method, its parameters checked for name and type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// The whole machine in one answer.
    GetStatus,
    /// The jobs.
    ListJobs,
    /// One job with its members.
    GetJob(GetJob),
    /// Give a job cores, and processes.
    Assign(Assign),
    /// Let a job go.
    Release(JobName),
    /// Let every job go that the caller may change.
    ReleaseAll,
    /// Why a job holds what it holds.
    ExplainJob(JobName),
    /// Why a process is where it is.
    ExplainPid(PidNumber),
    /// What the next cycle would change.
    Plan,
    /// Which jobs would have to move so that larger requests fit again.
    PlanDefrag,
    /// Move them.
    Defrag,
    /// What happened, one reply an event.
    Events(Events),
    /// The machine as a tree.
    GetTopology,
    /// Read the configuration again.
    Reload,
}

/// The methods' names, in the interface's order.
pub const METHODS: [&str; 14] = [
    "GetStatus",
    "ListJobs",
    "GetJob",
    "Assign",
    "Release",
    "ReleaseAll",
    "ExplainJob",
    "ExplainPid",
    "Plan",
    "PlanDefrag",
    "Defrag",
    "Events",
    "GetTopology",
    "Reload",
];

macro_rules! parameters {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* #[serde(skip_serializing_if = "skip")] pub $field: $type,)*
        }
    )*};
}

parameters! {
    /// The parameters of `GetJob`.
    GetJob {
        /// Which job.
        job: String,
        /// After which pid the page starts.
        after: Option<u32>,
        /// How many members the page may hold.
        limit: Option<u32>,
        /// After which thread of `after` it starts, if that process was not told of to its end.
        after_tid: Option<u32>,
    }
    /// The parameters of `Assign`.
    Assign {
        /// Which job.
        job: String,
        /// How many cores.
        cores: Option<u32>,
        /// Or which PUs.
        cpus: Option<String>,
        /// Which processes join.
        pids: Option<Vec<u32>>,
        /// The session that joins.
        session: Option<u32>,
        /// `pack` or `spread`.
        policy: Option<String>,
        /// `guaranteed`, `normal` or `besteffort`.
        class: Option<String>,
        /// `whole`: `cores` counts cores; `pus`: it counts logical CPUs.
        smt: Option<String>,
        /// The device to be near; empty: none any more.
        near: Option<String>,
        /// Whether its memory comes from its cores' NUMA nodes only.
        bind_memory: Option<bool>,
        /// Whether its cores are a partition of their own.
        isolated: Option<bool>,
        /// Whether the job must be new.
        fresh: Option<bool>,
        /// Whose job it is.
        owner: Option<u32>,
    }
    /// A job by name.
    JobName {
        /// Which job.
        job: String,
    }
    /// A process by number.
    PidNumber {
        /// Which process.
        pid: u32,
        /// After which of its threads the page starts.
        after_tid: Option<u32>,
    }
    /// The parameters of `Events`.
    Events {
        /// Whether to go on when the past is told.
        follow: Option<bool>,
    }
}

/// Absent parameters are left out; `null` would do as well.
fn skip<T: Serialize>(value: &T) -> bool {
    serde_json::to_value(value).is_ok_and(|value| value.is_null())
}

/// A reply, or one of several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Reply {
    /// To `GetStatus`.
    Status {
        /// The machine.
        status: Arc<Status>,
    },
    /// To `ListJobs`.
    Jobs {
        /// The jobs.
        jobs: Vec<Job>,
    },
    /// To `GetJob`.
    JobDetail(Box<JobDetail>),
    /// To `Assign`.
    Job {
        /// The job as it is now.
        job: Job,
    },
    /// To `Release` and `ReleaseAll`.
    Released {
        /// The jobs that were let go.
        released: Vec<String>,
    },
    /// To `ExplainJob`.
    JobReasons(JobReasons),
    /// To `ExplainPid`.
    PidReasons(PidReasons),
    /// To `Plan`.
    Plan(Arc<PlanReply>),
    /// To `PlanDefrag` and `Defrag`.
    Defrag(Arc<DefragReply>),
    /// To `Events`.
    Event {
        /// What happened.
        event: Arc<Event>,
    },
    /// To `GetTopology`.
    Topology {
        /// The machine.
        topology: Topology,
    },
    /// To `Reload`.
    Reloaded {
        /// What changed, one sentence each.
        changes: Vec<String>,
    },
}

/// The reply to `GetJob`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobDetail {
    /// The job.
    pub job: Job,
    /// A page of its members.
    pub members: Vec<Member>,
    /// What happened to it lately.
    pub history: Vec<Arc<Event>>,
    /// After which process the next page starts, if there is one.
    pub next: Option<u32>,
    /// After which of its threads, if it was not told of to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_tid: Option<u32>,
}

/// The reply to `ExplainJob`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobReasons {
    /// The job.
    pub job: String,
    /// What it holds.
    pub cpus: String,
    /// Why.
    pub because: Vec<String>,
    /// The second-best choice, or nothing.
    pub runner_up: String,
}

/// The reply to `ExplainPid`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PidReasons {
    /// The process.
    pub pid: u32,
    /// Its job, if it has one.
    pub job: Option<String>,
    /// Why.
    pub because: Vec<String>,
    /// Its threads, if it is a member.
    pub threads: Vec<Thread>,
    /// After which thread the next page starts, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_tid: Option<u32>,
}

/// The reply to `Plan`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanReply {
    /// What would be changed.
    pub actions: Vec<Action>,
    /// What would not, and why.
    pub abstained: Vec<Abstained>,
}

/// The reply to `PlanDefrag` and `Defrag`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefragReply {
    /// The jobs that would move, or were moved, each once.
    pub moves: Vec<Move>,
    /// What fits where before.
    pub fits_before: Fits,
    /// What fits where after.
    pub fits_after: Fits,
}

/// An error reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallError {
    /// The wish was not granted.
    Refused(String),
    /// The caller may not do this.
    NotAllowed(String),
    /// Too many connections, requests or unread replies, or the daemon is stopping.
    Busy(String),
    /// No such interface.
    InterfaceNotFound(String),
    /// No such method.
    MethodNotFound(String),
    /// A parameter is missing, unknown, or of the wrong type.
    InvalidParameter(String),
    /// The method has several replies and the call didn't ask for `more`.
    ExpectedMore,
}

impl CallError {
    /// Its name and parameters on the wire.
    #[must_use]
    pub fn on_the_wire(&self) -> (String, Map<String, Value>) {
        let own = |name: &str| format!("{INTERFACE}.{name}");
        let standard = |name: &str| format!("org.varlink.service.{name}");
        let (name, key, text) = match self {
            CallError::Refused(text) => (own("Refused"), "message", text.as_str()),
            CallError::NotAllowed(text) => (own("NotAllowed"), "message", text.as_str()),
            CallError::Busy(text) => (own("Busy"), "message", text.as_str()),
            CallError::InterfaceNotFound(text) => (standard("InterfaceNotFound"), "interface", text.as_str()),
            CallError::MethodNotFound(text) => (standard("MethodNotFound"), "method", text.as_str()),
            CallError::InvalidParameter(text) => (standard("InvalidParameter"), "parameter", text.as_str()),
            CallError::ExpectedMore => return (standard("ExpectedMore"), Map::new()),
        };
        (name, Map::from_iter([(key.to_owned(), Value::from(text))]))
    }
}

impl Call {
    /// Understands a call of `method` (its full name) with these parameters.
    ///
    /// # Errors
    /// The standard ones, with the name of what is wrong.
    pub fn parse(method: &str, parameters: Option<Value>) -> Result<Self, CallError> {
        let (interface, name) = method.rsplit_once('.').unwrap_or(("", method));
        if interface != INTERFACE {
            return Err(CallError::InterfaceNotFound(interface.to_owned()));
        }
        let parameters = parameters.unwrap_or_else(|| Value::Object(Map::new()));
        match name {
            "GetStatus" => none(&parameters).map(|()| Call::GetStatus),
            "ListJobs" => none(&parameters).map(|()| Call::ListJobs),
            "GetJob" => read(&parameters).map(Call::GetJob),
            "Assign" => read(&parameters).map(Call::Assign),
            "Release" => read(&parameters).map(Call::Release),
            "ReleaseAll" => none(&parameters).map(|()| Call::ReleaseAll),
            "ExplainJob" => read(&parameters).map(Call::ExplainJob),
            "ExplainPid" => read(&parameters).map(Call::ExplainPid),
            "Plan" => none(&parameters).map(|()| Call::Plan),
            "PlanDefrag" => none(&parameters).map(|()| Call::PlanDefrag),
            "Defrag" => none(&parameters).map(|()| Call::Defrag),
            "Events" => read(&parameters).map(Call::Events),
            "GetTopology" => none(&parameters).map(|()| Call::GetTopology),
            "Reload" => none(&parameters).map(|()| Call::Reload),
            _ => Err(CallError::MethodNotFound(method.to_owned())),
        }
    }
}

/// Understands the parameters of a method that has none.
pub(crate) fn none(parameters: &Value) -> Result<(), CallError> {
    match parameters.as_object() {
        Some(object) => {
            object.keys().next().map_or(Ok(()), |key| Err(CallError::InvalidParameter(key.clone())))
        }
        None => Err(CallError::InvalidParameter("parameters".to_owned())),
    }
}

/// Reads parameters; the error names the one that is wrong.
pub(crate) fn read<T: DeserializeOwned>(parameters: &Value) -> Result<T, CallError> {
    // Serde would take a list for an object whose names were left out.
    if !parameters.is_object() {
        return Err(CallError::InvalidParameter("parameters".to_owned()));
    }
    let keys: Vec<String> = parameters.as_object().into_iter().flat_map(Map::keys).cloned().collect();
    serde_json::from_value(parameters.clone()).map_err(|error| {
        let text = error.to_string();
        let quoted = text.split('`').nth(1).filter(|_| text.contains("field"));
        // Of a wrong type serde names the value only: it is the key without which another error appears.
        let guilty = keys.iter().find(|key| {
            let mut without = parameters.clone();
            without.as_object_mut().and_then(|object| object.remove(key.as_str()));
            serde_json::from_value::<T>(without).err().is_none_or(|other| other.to_string() != text)
        });
        let name = quoted.map(str::to_owned).or_else(|| guilty.cloned());
        CallError::InvalidParameter(name.unwrap_or_else(|| "parameters".to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn call(method: &str, parameters: Value) -> Result<Call, CallError> {
        Call::parse(&format!("{INTERFACE}.{method}"), Some(parameters))
    }

    #[test]
    fn every_method_is_understood() {
        for method in METHODS {
            let parameters = json!({});
            let understood = call(method, parameters);
            assert!(!matches!(understood, Err(CallError::MethodNotFound(_))), "{method}");
        }
        let wish = Assign { job: "a".into(), cores: Some(2), pids: Some(vec![1, 2]), ..Assign::default() };
        assert_eq!(call("Assign", serde_json::to_value(&wish).unwrap()), Ok(Call::Assign(wish)));
        assert_eq!(
            call("Assign", json!({"job": "a", "cores": null})),
            Ok(Call::Assign(Assign { job: "a".into(), ..Assign::default() }))
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |name: &str| Err(CallError::InvalidParameter(name.to_owned()));
        assert_eq!(call("Assign", json!({})), wrong("job"));
        assert_eq!(call("Assign", json!({"job": 7})), wrong("job"));
        assert_eq!(call("Assign", json!({"job": "a", "cores": "two"})), wrong("cores"));
        assert_eq!(call("Assign", json!({"job": "a", "cores": -1})), wrong("cores"));
        assert_eq!(call("Assign", json!({"job": "a", "coers": 1})), wrong("coers"));
        assert_eq!(call("GetStatus", json!({"x": 1})), wrong("x"));
        assert_eq!(call("GetStatus", json!([])), wrong("parameters"));
        assert_eq!(call("Release", json!(["a"])), wrong("parameters"), "there is no position, only names");
        assert_eq!(
            call("Nonsense", json!({})),
            Err(CallError::MethodNotFound("org.pjw.Warden.Nonsense".into()))
        );
        assert_eq!(Call::parse("org.other.Get", None), Err(CallError::InterfaceNotFound("org.other".into())));
        assert_eq!(Call::parse("", None), Err(CallError::InterfaceNotFound(String::new())));
    }
}
