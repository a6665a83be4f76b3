//! The connection to the daemon, and helpers for requests and replies that several verbs need.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::unistd::{Uid, User, geteuid};
use pjw_core::cpu_count_variables::CpuCountVariable;
use pjw_core::job::JobId;
use pjw_ipc::client::{Client, ClientError, ConnectError, runtime_dir, socket_path};
use pjw_ipc::wire::Status;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{output, render::UserNames};

/// The longest first pause of a command that waits because pjwd is busy. Each pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause between two attempts of such a command.
const MAX_PAUSE: Duration = Duration::from_secs(4);
/// A command that waits for a longer time says so.
const MAX_SILENT_TIME: Duration = Duration::from_secs(1);
/// How long a command waits because pjwd is busy.
const MAX_TIME_BUSY: Duration = Duration::from_secs(600);

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

/// Connects to the daemon, and calls `attempt` with the connection. Returns the connection and the result. If pjwd is
/// busy and executed nothing, for example because this user sends commands too often, connects and calls `attempt`
/// again for up to ten minutes. If this takes more than a second, prints why the command waits.
///
/// # Errors
/// The last error, if pjwd was busy for this time. Another error, at once. Except: after the first attempt, the command
/// also waits for a pjwd that does not run, because it may be restarting.
pub(super) fn call_persistently<T>(
    daemon: &DaemonAddress,
    mut attempt: impl FnMut(&mut Client) -> Result<T, ClientError>,
) -> anyhow::Result<(Client, T)> {
    let (begin, path) = (Instant::now(), daemon.path());
    let mut pauses = Pauses::of_process(std::process::id());
    let mut first_client = Some(daemon.connect()?);
    loop {
        // A connection is closed before the pause: a user has a limited number, and other commands need some.
        let error = match first_client.take().map_or_else(|| Client::connect(&path), Ok) {
            Ok(mut client) => match attempt(&mut client) {
                Ok(value) => return Ok((client, value)),
                // After another error, the daemon may have executed the call.
                Err(error) if !error.is_busy_before_execution() => return Err(error.into()),
                Err(error) => anyhow::Error::from(error),
            },
            Err(error @ ConnectError::NotRunning { .. }) => error.into(),
            Err(error) => return Err(error.into()),
        };
        let Some((pause, is_report_due)) = pauses.next_pause(begin.elapsed()) else { return Err(error) };
        if is_report_due {
            output::print_error(&format!("{}; pjwctl tries again for at most ten minutes", reason(&error)));
        }
        std::thread::sleep(pause);
    }
}

/// Returns the text of `error` without the advice at its end.
fn reason(error: &anyhow::Error) -> String {
    let text = error.to_string();
    let reason = text.split(';').next().unwrap_or_default();
    reason.split(": try again").next().unwrap_or_default().to_owned()
}

/// The pauses between the attempts of a command that waits because pjwd is busy.
struct Pauses {
    /// The share of `longest` that a pause takes.
    permille: u32,
    /// The longest time of the next pause.
    longest: Duration,
    is_reported: bool,
}

impl Pauses {
    /// The pauses of the process `pid`. Processes that begin at the same time have different pauses, so that their next
    /// attempts are at different times.
    fn of_process(pid: u32) -> Self {
        Self { permille: 500 + pid.wrapping_mul(389) % 500, longest: FIRST_PAUSE, is_reported: false }
    }

    /// Returns the next pause of a command that has waited for the time `waited`, and whether the command must now say
    /// that it waits. `None` if it has waited for [`MAX_TIME_BUSY`].
    fn next_pause(&mut self, waited: Duration) -> Option<(Duration, bool)> {
        if waited >= MAX_TIME_BUSY {
            return None;
        }
        let pause = self.longest * self.permille / 1000;
        self.longest = (self.longest * 2).min(MAX_PAUSE);
        let is_report_due = !self.is_reported && waited + pause > MAX_SILENT_TIME;
        self.is_reported |= is_report_due;
        Some((pause, is_report_due))
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
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use serde_json::json;

    use super::*;

    /// Reads one call on `stream` and answers with `reply`. Returns after the client has closed the connection. Fails
    /// if the client sends another call.
    fn answer_only_call(mut stream: &UnixStream, reply: &Value) {
        let (mut reader, mut message) = (BufReader::new(stream), Vec::new());
        reader.read_until(0, &mut message).unwrap();
        write!(stream, "{reply}\0").unwrap();
        assert_eq!(reader.read_until(0, &mut message).unwrap(), 0, "the connection is closed");
    }

    #[test]
    fn a_call_that_a_busy_pjwd_did_not_execute_is_repeated_on_a_new_connection() {
        for (message, is_repeated) in [
            ("you send commands too often: wait a little and try again", true),
            ("too many connections: try again later", true),
            (
                "pjwd closed this idle connection, because another user needed one and all were taken: try again",
                true,
            ),
            ("too many replies of pjwd wait to be read by your programs: try again later", false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let socket = dir.path().join("pjwd.sock");
            let listener = UnixListener::bind(&socket).unwrap();
            let daemon = DaemonAddress { socket: Some(socket.clone()) };
            let server = std::thread::spawn(move || {
                let (stream, _) = listener.accept().unwrap();
                // pjwd restarts during the first pause.
                drop(listener);
                std::fs::remove_file(&socket).unwrap();
                let error = json!({"error": "org.pjw.Warden.Busy", "parameters": {"message": message}});
                answer_only_call(&stream, &error);
                if is_repeated {
                    std::thread::sleep(FIRST_PAUSE);
                    let (stream, _) = UnixListener::bind(&socket).unwrap().accept().unwrap();
                    answer_only_call(&stream, &json!({"parameters": {"n": 1}}));
                }
            });
            let reply = call_persistently(&daemon, |client| client.call::<Value>("Want", &NoParameters {}));
            match reply.map(|(_client, reply)| reply) {
                Ok(reply) => assert!(is_repeated && reply == json!({"n": 1}), "{message}: {reply}"),
                Err(error) => assert!(!is_repeated && error.to_string() == message, "{error}"),
            }
            server.join().unwrap();
        }
    }

    #[test]
    fn pauses_become_longer_and_differ_and_are_reported_once_after_a_second_and_end() {
        for pid in [1, 4711, u32::MAX] {
            let (mut pauses, mut waited, mut reported_at) = (Pauses::of_process(pid), Duration::ZERO, vec![]);
            while let Some((pause, is_report_due)) = pauses.next_pause(waited) {
                assert!(pause >= FIRST_PAUSE / 2 && pause <= MAX_PAUSE, "{pause:?}");
                waited += pause;
                reported_at.extend(is_report_due.then_some(waited));
            }
            assert!(waited >= MAX_TIME_BUSY && waited < MAX_TIME_BUSY + MAX_PAUSE, "{waited:?}");
            let [end] = reported_at[..] else { panic!("{reported_at:?}") };
            assert!(end > MAX_SILENT_TIME && end < 3 * MAX_SILENT_TIME, "{end:?}");
        }
        let first_pause = |pid| Pauses::of_process(pid).next_pause(Duration::ZERO);
        assert_ne!(first_pause(4711), first_pause(4712));
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
