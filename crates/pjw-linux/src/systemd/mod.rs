//! Client of systemd's manager: creates, changes and stops scopes.
//!
//! In v2 systemd is the only writer of the cgroup tree (systemd's CGROUP_DELEGATION.md). So the client
//! requests changes from systemd: org.freedesktop.systemd1(5). There is one exception: pjw itself first writes the new
//! cpuset of an existing scope, and systemd then writes the same values. Each call uses a connection of its own and
//! ends within [`CALL_TIMEOUT`]. After a timeout, calls fail at once for some time.

pub mod activation;
mod connection;
mod request;
mod wire;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pjw_core::{cpuset::CpuSet, ids::Pid};

use connection::MethodCall;
use request::{Property, PropertyValue, Reply};
use wire::CallArguments;

pub(crate) use request::Address;
pub use request::{CALL_TIMEOUT, SystemdError};

/// The CPU weight (`CPUWeight=`) that gives a systemd unit idle priority (`CGROUP_WEIGHT_IDLE`). systemd accepts this
/// value since version 252.
pub(crate) const IDLE_WEIGHT: u64 = 0;
/// The lowest CPU weight (`CPUWeight=`) of a systemd unit. Every version of systemd accepts this weight.
pub(crate) const MIN_WEIGHT: u64 = 1;

/// After a timeout, calls fail at once for this long.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Returns whether systemd is the init system of this machine (sd_booted(3)).
pub(crate) fn is_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// The properties of a transient scope, which [`SystemdClient::start_scope`] starts. A scope is a systemd unit
/// with a cgroup, for processes that systemd did not start itself. A transient scope has no unit file. systemd
/// removes the scope when its last process has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransientScope {
    /// The name of the unit, which ends in `.scope`.
    pub unit: String,
    /// The name of the slice (a group of units) that contains the scope. `-.slice` is the root slice.
    pub slice: String,
    /// The description of the unit, which `systemctl status` shows.
    pub description: String,
    /// The ids of the processes that systemd moves into the scope. At least one process is required.
    pub pids: Vec<Pid>,
    /// The PUs on which processes of the scope may run (`AllowedCPUs=`).
    pub cpus: CpuSet,
    /// The NUMA nodes whose memory processes of the scope may use (`AllowedMemoryNodes=`). `None` for no
    /// restriction.
    pub mems: Option<CpuSet>,
}

/// A D-Bus client for the systemd manager of this machine. Starts scopes and slices (units with a cgroup), stops
/// units, and sets the cpusets and CPU weights of units. Each call waits at most [`CALL_TIMEOUT`] for the reply
/// of systemd. After a timeout, calls made in the next 10 s fail immediately.
#[derive(Debug)]
pub struct SystemdClient {
    addresses: Vec<Address>,
    /// The time of the last call to which systemd did not reply in time. `None` if the last call did not time out.
    silent_since: Option<Instant>,
}

impl Default for SystemdClient {
    fn default() -> Self {
        // The bus is the documented way. systemd's private socket, which systemctl uses as root, serves if
        // there is no bus or the bus does not reply.
        let [bus, direct] = ["/run/dbus/system_bus_socket", "/run/systemd/private"].map(PathBuf::from);
        Self::with_addresses(vec![Address::Bus(bus), Address::Direct(direct)])
    }
}

impl SystemdClient {
    /// Makes a client that connects to systemd at the first of `addresses` that replies.
    pub(crate) fn with_addresses(addresses: Vec<Address>) -> Self {
        Self { addresses, silent_since: None }
    }

    /// Starts a new scope (a systemd unit with a cgroup of its own) and moves the processes in
    /// [`TransientScope::pids`] into this scope. Returns when systemd has accepted the request. The move can
    /// still be incomplete then: the cgroup does not exist yet, does not contain all processes, or does not
    /// have its cpuset. So the caller must read the cgroup and check.
    ///
    /// # Errors
    /// If systemd refuses the request, can't be reached, or does not reply in time.
    pub fn start_scope(&mut self, scope: &TransientScope) -> Result<(), SystemdError> {
        let initial_processes = scope.pids.iter().map(|pid| pid.0).collect();
        let mut properties = vec![
            ("PIDs", PropertyValue::Pids(initial_processes)),
            ("Slice", PropertyValue::Text(scope.slice.clone())),
            ("Description", PropertyValue::Text(scope.description.clone())),
            // A failed scope is unloaded, so that its name can be used again.
            ("CollectMode", PropertyValue::Text("inactive-or-failed".to_owned())),
            // Delegation makes the cgroups below the scope the job's own. Only this controller is delegated:
            // others would change how CPU time is shared.
            ("DelegateControllers", PropertyValue::Texts(vec!["cpuset".to_owned()])),
            // The default would limit the number of threads of a job.
            ("TasksMax", PropertyValue::Number(u64::MAX)),
        ];
        properties.extend(cpuset_properties(Some(&scope.cpus), scope.mems.as_ref()));
        // Scopes have this property since systemd 253. Its default ends the whole job when one process is
        // killed for lack of memory.
        let oom_policy = ("OOMPolicy", PropertyValue::Text("continue".to_owned()));
        let request = |properties: &[Property]| {
            let body = CallArguments::default().text(&scope.unit).text("fail");
            MethodCall::manager_method("StartTransientUnit", body.properties(properties).no_auxiliary_units())
        };
        match self.call(&request(&[properties.as_slice(), &[oom_policy]].concat())) {
            Err(SystemdError::Refused { name, .. })
                if name == "org.freedesktop.DBus.Error.PropertyReadOnly" =>
            {
                self.call(&request(&properties)).map(drop)
            }
            other => other.map(drop),
        }
    }

    /// Sets the cpuset of the systemd unit named `unit`. `cpus` has the PUs (logical CPUs) on which the
    /// processes of the unit can run (`AllowedCPUs=`). With `None`, the present PUs stay. `mems` has the NUMA
    /// nodes whose memory these processes can use (`AllowedMemoryNodes=`). With `None`, the present NUMA nodes
    /// stay. The setting is valid until the next boot.
    ///
    /// # Errors
    /// [`SystemdError::NoSuchUnit`] if the unit is not loaded. Other errors if systemd refuses the request,
    /// can't be reached, or does not reply in time.
    pub fn set_cpuset(
        &mut self,
        unit: &str,
        cpus: Option<&CpuSet>,
        mems: Option<&CpuSet>,
    ) -> Result<(), SystemdError> {
        // True: the change lasts until the next boot.
        let properties = cpuset_properties(cpus, mems);
        let body = CallArguments::default().text(unit).boolean_true().properties(&properties);
        self.call(&MethodCall::manager_method("SetUnitProperties", body)).map(drop)
    }

    /// Starts a new slice: a group of systemd units with a cgroup. `slice` is the name of the slice.
    /// `description` is the text that `systemctl status` shows. `weight` is the CPU weight of the slice
    /// (`CPUWeight=`, systemd.resource-control(5)).
    ///
    /// # Errors
    /// [`SystemdError::UnitExists`] if a slice with this name is already loaded. Other errors if systemd
    /// refuses the request, can't be reached, or does not reply in time.
    pub fn start_slice(&mut self, slice: &str, description: &str, weight: u64) -> Result<(), SystemdError> {
        let properties = [
            ("Description", PropertyValue::Text(description.to_owned())),
            ("CPUWeight", PropertyValue::Number(weight)),
        ];
        let body =
            CallArguments::default().text(slice).text("fail").properties(&properties).no_auxiliary_units();
        self.call(&MethodCall::manager_method("StartTransientUnit", body)).map(drop)
    }

    /// Sets the CPU weight (`CPUWeight=`, systemd.resource-control(5)) of the systemd unit named `unit` to
    /// `weight`. The setting is valid until the next boot.
    ///
    /// # Errors
    /// [`SystemdError::NoSuchUnit`] if the unit is not loaded. Other errors if systemd refuses the request,
    /// can't be reached, or does not reply in time.
    pub fn set_cpu_weight(&mut self, unit: &str, weight: u64) -> Result<(), SystemdError> {
        let property = ("CPUWeight", PropertyValue::Number(weight));
        let body = CallArguments::default().text(unit).boolean_true().properties(&[property]);
        self.call(&MethodCall::manager_method("SetUnitProperties", body)).map(drop)
    }

    /// Stops the systemd unit named `unit`. systemd kills all processes of the unit, so the caller must make sure that
    /// the unit has no processes. Returns when systemd has accepted the request. The unit and its cgroup can still
    /// exist then.
    ///
    /// # Errors
    /// [`SystemdError::NoSuchUnit`] if the unit is not loaded. Other errors if systemd refuses the request, can't be
    /// reached, or does not reply in time.
    pub fn stop_unit(&mut self, unit: &str) -> Result<(), SystemdError> {
        let body = CallArguments::default().text(unit).text("replace");
        self.call(&MethodCall::manager_method("StopUnit", body)).map(drop)
    }

    /// Returns whether the systemd slice (a group of units) named `slice` disables the cpuset controller for
    /// all units in the slice, with the setting `DisableControllers=`.
    ///
    /// # Errors
    /// If systemd refuses the request, can't be reached, or does not reply in time.
    pub fn slice_disables_cpusets(&mut self, slice: &str) -> Result<bool, SystemdError> {
        let kind = "org.freedesktop.systemd1.Slice";
        let disabled = self.call(&MethodCall::get_unit_property(slice, kind, "DisableControllers"))?;
        Ok(disabled.iter().any(|controller| controller == "cpuset"))
    }

    fn call(&mut self, request: &MethodCall) -> Reply {
        // With a hanging systemd, each cpuset of the node would otherwise cost a full timeout.
        if self.silent_since.is_some_and(|since| since.elapsed() < RETRY_AFTER) {
            return Err(SystemdError::NoReply);
        }
        let reply = self.call_each(request);
        self.silent_since = matches!(reply, Err(SystemdError::NoReply)).then(Instant::now);
        reply
    }

    /// Sends `request` to systemd at its addresses one after another until one replies, and returns this reply. Each
    /// address gets an equal share of the remaining time.
    ///
    /// If an address does not reply in time, systemd may have processed the request nevertheless. At the next
    /// address, the same request then has no further effect, or fails because the unit already exists. This failure
    /// counts as success.
    ///
    /// # Errors
    /// [`SystemdError::NoReply`] if an address did not reply in time, and otherwise why the last one can't be reached.
    /// An error in a reply is returned too.
    fn call_each(&self, request: &MethodCall) -> Reply {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let mut last_error = SystemdError::Unreachable("no address is known".to_owned());
        let mut was_silent = false;
        for (address, addresses_left) in self.addresses.iter().zip((1..=self.addresses.len()).rev()) {
            let time_left = deadline.saturating_duration_since(Instant::now());
            match connection::call_systemd(
                address,
                request,
                time_left / u32::try_from(addresses_left).unwrap_or(1),
            ) {
                Err(SystemdError::Unreachable(why)) => last_error = SystemdError::Unreachable(why),
                Err(SystemdError::NoReply) => was_silent = true,
                Err(SystemdError::UnitExists) if was_silent => return Ok(Vec::new()),
                other => return other,
            }
        }
        Err(if was_silent { SystemdError::NoReply } else { last_error })
    }
}

fn cpuset_properties(cpus: Option<&CpuSet>, mems: Option<&CpuSet>) -> Vec<Property> {
    let set = |name, set: &CpuSet| (name, PropertyValue::Set(bit_mask(set)));
    let cpus = cpus.map(|cpus| set("AllowedCPUs", cpus));
    cpus.into_iter().chain(mems.map(|mems| set("AllowedMemoryNodes", mems))).collect()
}

/// Returns `set` as a bit mask in systemd's form: bit n of byte b is the number 8b+n.
fn bit_mask(set: &CpuSet) -> Vec<u8> {
    let mut bytes: Vec<u8> = set.words().iter().flat_map(|word| word.to_le_bytes()).collect();
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    bytes
}

#[cfg(test)]
mod tests;
