//! A thin client of systemd's manager: scopes, their cpusets, and an end.
//!
//! In v2 systemd is the only writer of the cgroup tree (systemd's CGROUP_DELEGATION.md), so it is asked to make and to
//! change what a wall needs: org.freedesktop.systemd1(5). Each call is a connection of its own and ends within
//! [`PATIENCE`], whatever the bus and systemd do; after one that nobody answered, none is tried for a while.

mod talk;
mod wire;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pjw_core::cpuset::CpuSet;
use pjw_core::process::Pid;

/// The longest that one call may take.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// For so long nobody is asked after a call without an answer.
const SULK: Duration = Duration::from_secs(10);
/// Why systemd did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Nobody listens where systemd should.
    #[error("systemd can't be reached: {0}")]
    Unreachable(String),
    /// No answer came in time.
    #[error("systemd did not answer within {} s", PATIENCE.as_secs())]
    Silent,
    /// The unit is not loaded.
    #[error("systemd knows no such unit")]
    NoSuchUnit,
    /// There is a unit of that name.
    #[error("systemd has a unit of that name already")]
    Exists,
    /// Anything else that it answered.
    #[error("systemd said no: {text} ({name})")]
    Refused {
        /// The error's name on the bus.
        name: String,
        /// What it said.
        text: String,
    },
}

/// A scope to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// Its name, with `.scope`.
    pub unit: String,
    /// The slice it lies in; `-.slice` is the top.
    pub slice: String,
    /// What people are told it is.
    pub description: String,
    /// Who is moved in; there is no scope without one.
    pub founders: Vec<Pid>,
    /// `cpuset.cpus`.
    pub cpus: CpuSet,
    /// `cpuset.mems`.
    pub mems: Option<CpuSet>,
}

/// One place where systemd may be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Door {
    /// The socket of a message bus.
    Bus(PathBuf),
    /// A socket on which systemd itself listens, without a bus.
    Direct(PathBuf),
}

/// A value of a unit's property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Property {
    Text(&'static str, String),
    Texts(&'static str, Vec<String>),
    Number(&'static str, u64),
    Pids(&'static str, Vec<u32>),
    /// A set of numbers: bytes, the lowest bits first.
    Set(&'static str, Vec<u8>),
}

/// One call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    Start { unit: String, properties: Vec<Property> },
    Set { unit: String, properties: Vec<Property> },
    Stop { unit: String },
    Get { unit: String, kind: &'static str, name: &'static str },
}

/// systemd, as the first process of this machine.
#[derive(Debug)]
pub struct Manager {
    doors: Vec<Door>,
    silent_since: Option<Instant>,
}

impl Default for Manager {
    fn default() -> Self {
        // The bus is the documented way. systemd's own socket, which systemctl takes as root, serves where there is no
        // bus or it hangs.
        let [bus, direct] = ["/run/dbus/system_bus_socket", "/run/systemd/private"].map(PathBuf::from);
        Self::behind(vec![Door::Bus(bus), Door::Direct(direct)])
    }
}

impl Manager {
    pub(crate) fn behind(doors: Vec<Door>) -> Self {
        Self { doors, silent_since: None }
    }

    /// Makes a scope with the founders in it. systemd has begun when this returns, and may not be done.
    ///
    /// # Errors
    /// If systemd refused or can't be reached.
    pub fn start(&mut self, scope: &Scope) -> Result<(), Fault> {
        let founders = scope.founders.iter().map(|pid| pid.0).collect();
        let mut properties = vec![
            Property::Pids("PIDs", founders),
            Property::Text("Slice", scope.slice.clone()),
            Property::Text("Description", scope.description.clone()),
            // A scope that failed leaves no name behind that would be in the next one's way.
            Property::Text("CollectMode", "inactive-or-failed".to_owned()),
            // The tree below is not systemd's then; only this controller, for others change how CPU time is shared.
            Property::Texts("DelegateControllers", vec!["cpuset".to_owned()]),
            // The default would limit a job's threads to a share of the machine's.
            Property::Number("TasksMax", u64::MAX),
        ];
        properties.extend(cpuset(Some(&scope.cpus), scope.mems.as_ref()));
        // systemd 253 gives scopes this, and a default that ends the whole job when one process was out of memory.
        let newer = Property::Text("OOMPolicy", "continue".to_owned());
        let request = |properties| Request::Start { unit: scope.unit.clone(), properties };
        let with = [properties.as_slice(), &[newer]].concat();
        match self.ask(&request(with)) {
            Err(Fault::Refused { name, .. }) if name == "org.freedesktop.DBus.Error.PropertyReadOnly" => {
                self.ask(&request(properties))
            }
            other => other,
        }
    }

    /// Changes the cpuset of a unit until the next boot.
    ///
    /// # Errors
    /// If systemd refused or can't be reached.
    pub fn set(&mut self, unit: &str, cpus: Option<&CpuSet>, mems: Option<&CpuSet>) -> Result<(), Fault> {
        self.ask(&Request::Set { unit: unit.to_owned(), properties: cpuset(cpus, mems) })
    }

    /// Stops a unit, which ends whatever is in it: only for empty ones.
    ///
    /// # Errors
    /// If systemd refused or can't be reached.
    pub fn stop(&mut self, unit: &str) -> Result<(), Fault> {
        self.ask(&Request::Stop { unit: unit.to_owned() })
    }

    /// Whether a slice is told to keep cpusets from everything below it (`DisableControllers=`).
    ///
    /// # Errors
    /// If systemd refused or can't be reached.
    pub fn withholds_cpusets(&mut self, slice: &str) -> Result<bool, Fault> {
        let kind = "org.freedesktop.systemd1.Slice";
        let disabled =
            self.answer(&Request::Get { unit: slice.to_owned(), kind, name: "DisableControllers" })?;
        Ok(disabled.iter().any(|controller| controller == "cpuset"))
    }

    fn ask(&mut self, request: &Request) -> Result<(), Fault> {
        self.answer(request).map(drop)
    }

    fn answer(&mut self, request: &Request) -> Result<Vec<String>, Fault> {
        // A hung systemd must not cost the warden two seconds for each wall of the node.
        if self.silent_since.is_some_and(|since| since.elapsed() < SULK) {
            return Err(Fault::Silent);
        }
        let answer = self.ask_each(request);
        self.silent_since = matches!(answer, Err(Fault::Silent)).then(Instant::now);
        answer
    }

    /// Each door has its share of the time. A call that came through twice is refused as known the second time, or does
    /// the same again.
    fn ask_each(&self, request: &Request) -> Result<Vec<String>, Fault> {
        let until = Instant::now() + PATIENCE;
        let mut last = Fault::Unreachable("no address is known".to_owned());
        let mut was_silent = false;
        for (door, doors_left) in self.doors.iter().zip((1..=self.doors.len()).rev()) {
            let left = until.saturating_duration_since(Instant::now());
            match talk::call(door, request, left / u32::try_from(doors_left).unwrap_or(1)) {
                Err(Fault::Unreachable(why)) => last = Fault::Unreachable(why),
                Err(Fault::Silent) => was_silent = true,
                Err(Fault::Exists) if was_silent => return Ok(Vec::new()),
                other => return other,
            }
        }
        Err(if was_silent { Fault::Silent } else { last })
    }
}

fn cpuset(cpus: Option<&CpuSet>, mems: Option<&CpuSet>) -> Vec<Property> {
    let set = |name, set: &CpuSet| Property::Set(name, bytes(set));
    let cpus = cpus.map(|cpus| set("AllowedCPUs", cpus));
    cpus.into_iter().chain(mems.map(|mems| set("AllowedMemoryNodes", mems))).collect()
}

/// A set as systemd takes it: bit n of byte b is the number 8b+n.
fn bytes(set: &CpuSet) -> Vec<u8> {
    let mut bytes: Vec<u8> = set.words().iter().flat_map(|word| word.to_le_bytes()).collect();
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    bytes
}

#[cfg(test)]
mod tests;
