//! The connection to the daemon, and helpers for requests and replies that several verbs need.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::unistd::{Uid, User, geteuid};
use pjw_core::cpu_count_variables::CpuCountVariable;
use pjw_core::job::JobId;
use pjw_ipc::call::Assign;
use pjw_ipc::client::{Client, ClientError, ConnectError, runtime_dir, socket_path};
use pjw_ipc::wire::{Job, Status};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{output, render::UserNames};

/// The time between two calls of a user who sends commands too often.
const TIME_BETWEEN_CALLS: Duration = Duration::from_millis(250);
/// The time after which a command says that it waits because its user sends commands too often.
const MAX_SILENT_TIME: Duration = Duration::from_secs(1);
/// How long a command waits because its user sends commands too often.
const MAX_TIME_TOO_OFTEN: Duration = Duration::from_secs(600);

/// The address of the daemon: the path of the socket in the option `--socket` of the command line. Without this option,
/// the daemon's default socket is used.
#[derive(Debug)]
pub(super) struct DaemonAddress {
    pub(super) socket: Option<PathBuf>,
}

impl DaemonAddress {
    /// Returns the path in the command line option `--socket`. `None` if the option was not given, or if the path is
    /// empty.
    pub(super) fn socket_option(&self) -> Option<&Path> {
        self.socket.as_deref().filter(|path| !path.as_os_str().is_empty())
    }

    /// Returns the path of the daemon's socket: the path in the option `--socket`, or else the default path of the
    /// user.
    pub(super) fn path(&self) -> PathBuf {
        let xdg = std::env::var_os("XDG_RUNTIME_DIR");
        socket_path(self.socket_option(), geteuid().as_raw(), xdg.as_deref().map(Path::new))
    }

    /// Connects to the daemon. Prints a warning if the daemon of the system answers because the user's own daemon does
    /// not run. If the connection fails, the error contains the path of the socket, and says how to start the daemon.
    pub(super) fn connect(&self) -> anyhow::Result<Client> {
        let path = self.path();
        let client = Client::connect(&path)?;
        let (uid, xdg) = (geteuid().as_raw(), std::env::var_os("XDG_RUNTIME_DIR"));
        let own = runtime_dir(uid, xdg.as_deref().map(Path::new));
        if self.socket_option().is_none()
            && let Some(warning) = other_daemon_warning(&path, &own, uid)
        {
            output::print_error(&warning);
        }
        Ok(client)
    }

    /// Connects to the daemon. `timeout` is the maximum time for the connection attempt, and for each call on the
    /// connection.
    pub(super) fn connect_with_timeout(&self, timeout: Duration) -> Result<Client, ConnectError> {
        Client::connect_with_timeout(&self.path(), timeout)
    }
}

/// Returns a warning if the daemon of the system answers although the user `uid` has a daemon of their own, which
/// does not run now. The two daemons do not know each other's jobs. `path` is the socket that answers, and `own` the
/// directory of the user's daemon. `None` if `path` is in `own`, or if `own` does not exist or belongs to another
/// user.
fn other_daemon_warning(path: &Path, own: &Path, uid: u32) -> Option<String> {
    let own_exists = own.symlink_metadata().is_ok_and(|dir| dir.is_dir() && dir.uid() == uid);
    (own_exists && !path.starts_with(own)).then(|| {
        format!(
            "your own pjwd, which listens in {}, is not running: {} answers instead; start yours again with: pjwd",
            own.display(),
            path.display()
        )
    })
}

/// Calls the method `method` of the daemon, and returns the field `field` of the reply, parsed as a `T`. All other
/// fields of the reply are ignored.
pub(super) fn call_for_field<T: DeserializeOwned>(
    client: &mut Client,
    method: &str,
    parameters: &impl Serialize,
    field: &str,
) -> Result<T, ClientError> {
    let mut reply: Map<String, Value> = client.call(method, parameters)?;
    let value = reply.remove(field).unwrap_or_default();
    serde_json::from_value(value).map_err(|error| ClientError::Malformed(error.to_string()))
}

/// Makes or changes a job by the call `Assign` with `parameters`, and returns the job. If the daemon refuses the call
/// because this user sends commands too often, sends the call again for up to ten minutes. After a second, prints why
/// the command waits.
///
/// # Errors
/// If the daemon refuses the call for another reason, or also after this time. If the connection breaks.
pub(super) fn assign_persistently(client: &mut Client, parameters: &Assign) -> Result<Job, ClientError> {
    repeat_while_too_often(MAX_TIME_TOO_OFTEN, || call_for_field(client, "Assign", parameters, "job"))
}

/// Calls `call` until its result is another one than the refusal that this user sends commands too often, but for at
/// most `max_time`. Returns the last result. After [`MAX_SILENT_TIME`], prints the refusal once.
fn repeat_while_too_often<T>(
    max_time: Duration,
    mut call: impl FnMut() -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let begin = Instant::now();
    let mut is_reported = false;
    loop {
        let refusal = match call() {
            Err(error) if error.is_commands_too_often() && begin.elapsed() < max_time => error.to_string(),
            result => return result,
        };
        if !is_reported && begin.elapsed() >= MAX_SILENT_TIME {
            is_reported = true;
            // The rest is the advice to try again.
            let reason = refusal.split(';').next().unwrap_or_default();
            output::print_error(&format!("{reason}; pjwctl tries again for at most ten minutes"));
        }
        std::thread::sleep(TIME_BETWEEN_CALLS);
    }
}

/// Requests the status of the daemon (`GetStatus`): the machine, its cores, the jobs and warnings.
pub(super) fn read_status(client: &mut Client) -> Result<Status, ClientError> {
    call_for_field(client, "GetStatus", &NoParameters {}, "status")
}

/// Returns the directory in which the daemon publishes the core map of the job with the id `job`. `None` if there is no
/// such directory.
pub(super) fn job_directory(status: &Status, job: &str) -> Option<PathBuf> {
    let base = Path::new(&status.job_files);
    Some(base.join(job)).filter(|directory| base.is_absolute() && directory.is_dir())
}

/// Returns the environment variables that tell the programs of a job how many cores or CPUs the job has, such as
/// `OMP_NUM_THREADS`. They are taken from `status`. If `status` comes from an older daemon and lacks them, returns the
/// default variables. Variables of a newer daemon that this pjwctl can't parse are left out.
pub(super) fn cpu_count_variables(status: &Status) -> Vec<CpuCountVariable> {
    match &status.variables {
        None => CpuCountVariable::defaults(),
        Some(variables) => variables.iter().filter_map(|variable| variable.parse().ok()).collect(),
    }
}

/// The parameters of a call without parameters: an empty JSON object.
#[derive(Serialize)]
pub(super) struct NoParameters {}

/// Returns the full id of the job that the user named `text`: for `make-7`, the id is `manual:make-7`. If `text` is no
/// valid job id, returns an error.
pub(super) fn parse_job_id(text: &str) -> anyhow::Result<String> {
    Ok(text.parse::<JobId>()?.to_string())
}

/// Looks up the names of the users with the ids `uids`. A user id without a name is left out of the result.
pub(super) fn user_names(uids: impl IntoIterator<Item = u32>) -> UserNames {
    let uids: BTreeSet<u32> = uids.into_iter().collect();
    let name = |uid| Some((uid, User::from_uid(Uid::from_raw(uid)).ok()??.name));
    uids.into_iter().filter_map(name).collect::<BTreeMap<_, _>>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_that_is_sent_too_often_is_repeated_and_only_for_a_time() {
        let too_often = "you send commands too often: wait a little and try again";
        for (message, max_time, is_repeated) in [
            (too_often, Duration::from_millis(100), true),
            (too_often, Duration::ZERO, false),
            ("too many connections", Duration::from_secs(60), false),
        ] {
            let mut calls = 0;
            let result: Result<(), ClientError> = repeat_while_too_often(max_time, || {
                calls += 1;
                let error = "org.pjw.Warden.Busy".to_owned();
                Err(ClientError::Refused { error, message: message.to_owned() })
            });
            assert_eq!(result.unwrap_err().to_string(), message);
            assert_eq!(calls > 1, is_repeated, "{message}: {calls} calls");
        }
    }

    #[test]
    fn a_reply_of_the_systems_daemon_instead_of_the_users_own_is_noticed() {
        let (dir, uid) = (tempfile::tempdir().unwrap(), geteuid().as_raw());
        let (own, system) = (dir.path().join("pjwd"), dir.path().join("run/pjwd.sock"));
        assert_eq!(other_daemon_warning(&system, &own, uid), None, "the user never had a daemon");
        std::fs::create_dir(&own).unwrap();
        let warning = other_daemon_warning(&system, &own, uid).unwrap();
        assert!(
            warning.contains(own.to_str().unwrap()) && warning.contains(system.to_str().unwrap()),
            "{warning}"
        );
        assert_eq!(
            other_daemon_warning(&own.join("pjwd.sock"), &own, uid),
            None,
            "the user's own daemon answers"
        );
        assert_eq!(
            other_daemon_warning(&system, &own, uid + 1),
            None,
            "the directory of another user is no sign of an own daemon"
        );
    }
}
