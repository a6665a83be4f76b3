//! The process of a pjwd that does not answer: its id, and the commands that end or restart it, as text for messages to
//! the user. The commands work for a process that hangs or is stopped by a signal: `kill` without `-9` may have no
//! effect then.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::Deserialize;

use crate::service_commands::has_systemd;

/// The name of the lock file of a daemon, in the directory [`lock_dir`](crate::client::lock_dir). The daemon describes
/// itself in this file as JSON, for example with its pid and the path of its socket.
pub const LOCK_FILE_NAME: &str = "warden.lock";
/// The maximum number of bytes that are read from the lock file of a daemon. The text that a daemon writes to the file
/// is usually much shorter.
pub const MAX_LOCK_FILE_BYTES: u64 = 64 << 10;

/// A running process of pjwd, as error messages describe it: its pid, whether it is stopped by a signal, and whether
/// systemd started it. The pid or the starter can be unknown. The `Display` text is the name of the process in a
/// sentence, such as `pjwd (process 812)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DaemonProcess {
    pid: Option<u32>,
    is_stopped: bool,
    starter: Starter,
}

/// The program that started a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Starter {
    /// systemd, by the unit `pjwd.service`.
    Systemd,
    /// systemd or another program.
    Unknown,
    /// Another program than systemd.
    Other,
}

impl DaemonProcess {
    /// Describes the process with the id `pid`, which must be a running pjwd. Reads the state and the parent of the
    /// process from `/proc`.
    #[must_use]
    pub fn from_pid(pid: u32) -> Self {
        Self { pid: Some(pid), is_stopped: is_stopped(pid), starter: Starter::of_process(pid) }
    }

    /// Returns the process of the daemon with the socket `socket`. `listener` is the pid of the process that called
    /// listen(2) on the socket, as far as it is known. With a socket unit, this is systemd, and the pid of the daemon
    /// is read from the lock file at `lock_file`. It is also read there if `listener` is `None`.
    pub(crate) fn behind_socket(listener: Option<u32>, socket: Option<&Path>, lock_file: &Path) -> Self {
        let in_lock_file = || pid_in_lock_file(lock_file, socket?);
        let (pid, is_unit) = match listener {
            Some(pid) if is_service_manager(pid) => (in_lock_file(), true),
            Some(pid) => (Some(pid), false),
            None => (in_lock_file(), false),
        };
        let unknown = Self {
            pid: None,
            is_stopped: false,
            starter: if has_systemd() { Starter::Unknown } else { Starter::Other },
        };
        let process = pid.map_or(unknown, Self::from_pid);
        if is_unit { Self { starter: Starter::Systemd, ..process } } else { process }
    }

    /// Returns whether the process was stopped by a debugger or by a signal, such as SIGSTOP, when this value was made.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Returns the shell commands with which the user can end the daemon and start it again, as text for a message. The
    /// commands also end a daemon that hangs. Examples: `systemctl restart pjwd` if systemd started the daemon, and
    /// `kill -9 812, and then pjwd again` if another program started it. If the starter is unknown, the text contains
    /// the commands for both cases.
    #[must_use]
    pub fn restart_commands(&self) -> String {
        self.commands(
            "systemctl restart pjwd",
            &format!("{}, and then pjwd again", self.kill_command("kill -9")),
        )
    }

    /// Returns the shell commands with which the user can end the daemon, even if it hangs, as text for a message.
    /// Examples: `systemctl stop pjwd.socket pjwd.service` if systemd started the daemon, and `kill -9 812` if another
    /// program started it. If the starter is unknown, the text contains the commands for both cases.
    #[must_use]
    pub fn kill_commands(&self) -> String {
        self.commands("systemctl stop pjwd.socket pjwd.service", &self.kill_command("kill -9"))
    }

    /// Returns the shell commands with which the user can end the daemon, as text for a message. Examples:
    /// `systemctl stop pjwd.socket pjwd.service` if systemd started the daemon, and `kill 812` if another program
    /// started it. If the starter is unknown, the text contains the commands for both cases. `kill 812` sends SIGTERM,
    /// which may have no effect on a daemon that hangs. [`DaemonProcess::kill_commands`] uses SIGKILL instead.
    #[must_use]
    pub fn stop_commands(&self) -> String {
        self.commands("systemctl stop pjwd.socket pjwd.service", &self.kill_command("kill"))
    }

    /// Returns `of_systemd` if systemd started the daemon, `of_others` if another program did, and both if this is not
    /// known.
    fn commands(&self, of_systemd: &str, of_others: &str) -> String {
        match self.starter {
            Starter::Systemd => of_systemd.to_owned(),
            Starter::Unknown => format!("{of_systemd} (if systemd did not start it: {of_others})"),
            Starter::Other => of_others.to_owned(),
        }
    }

    /// Returns the command `kill` with the pid as its argument. If the pid is unknown, with the command that shows it.
    fn kill_command(&self, kill: &str) -> String {
        match self.pid {
            Some(pid) => format!("{kill} {pid}"),
            None => format!("{kill} PID (ps -C pjwd shows it)"),
        }
    }
}

impl fmt::Display for DaemonProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) if self.is_stopped => write!(f, "pjwd (process {pid}, which is stopped by a signal)"),
            Some(pid) => write!(f, "pjwd (process {pid})"),
            None => write!(f, "pjwd"),
        }
    }
}

impl Starter {
    /// Returns the program that possibly started the daemon with the pid `pid`. The unit of the system runs as root,
    /// and its parent is the first process. A daemon whose shell has ended can have this parent too.
    ///
    /// Does not read `/proc/PID/cgroup`: while the kernel does not complete a change of cgroups, for which the daemon
    /// may be waiting, this read does not return either.
    fn of_process(pid: u32) -> Self {
        let is_of_root = fs::metadata(format!("/proc/{pid}")).is_ok_and(|meta| meta.uid() == 0);
        let parent = stat_field(pid, 1);
        if has_systemd() && is_of_root && parent.as_deref() == Some("1") {
            Self::Unknown
        } else {
            Self::Other
        }
    }
}

/// Returns whether the process `pid` is stopped by a signal or a debugger: the states T and t of proc_pid_stat(5).
fn is_stopped(pid: u32) -> bool {
    matches!(stat_field(pid, 0).as_deref(), Some("T" | "t"))
}

/// Returns a field after the name of the program in `/proc/PID/stat` (proc_pid_stat(5)): 0 is the state, 1 the parent.
fn stat_field(pid: u32, index: usize) -> Option<String> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name may have spaces and parentheses.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(index).map(str::to_owned)
}

/// Returns whether the process `pid`, which called listen(2) on the socket of a daemon, is systemd or another first
/// process. In a container, pjwd can be the first process itself.
fn is_service_manager(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) if name.trim_end() == "pjwd" => false,
        Ok(name) => pid == 1 || name.starts_with("systemd"),
        Err(_) => pid == 1,
    }
}

/// Returns the pid in the lock file at `lock_file`, if the file says that this process has the socket `socket`, and the
/// process exists. `None` also if this user may not read the file.
///
/// Another user can make the directory of the file below `/tmp`. So a file of another user is not read, and a pipe does
/// not block.
fn pid_in_lock_file(lock_file: &Path, socket: &Path) -> Option<u32> {
    /// The fields of the lock file that are read here.
    #[derive(Deserialize)]
    struct Holder {
        pid: u32,
        socket: Option<String>,
    }

    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(lock_file).ok()?;
    file.metadata().ok().filter(|meta| meta.is_file() && meta.uid() == geteuid().as_raw())?;
    let mut text = Vec::new();
    file.take(MAX_LOCK_FILE_BYTES).read_to_end(&mut text).ok()?;
    // The rest of an earlier, longer text may follow.
    let holder: Holder = serde_json::Deserializer::from_slice(&text).into_iter().next()?.ok()?;
    let exists = Path::new(&format!("/proc/{}", holder.pid)).exists();
    (exists && holder.socket.as_deref().map(Path::new) == Some(socket)).then_some(holder.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: Option<u32>, starter: Starter) -> DaemonProcess {
        DaemonProcess { pid, is_stopped: false, starter }
    }

    #[test]
    fn the_commands_name_the_process_and_fit_its_starter() {
        let restart = |pid, starter| process(pid, starter).restart_commands();
        assert_eq!(restart(Some(812), Starter::Other), "kill -9 812, and then pjwd again");
        assert_eq!(restart(None, Starter::Other), "kill -9 PID (ps -C pjwd shows it), and then pjwd again");
        assert_eq!(restart(Some(812), Starter::Systemd), "systemctl restart pjwd");
        assert_eq!(
            restart(Some(812), Starter::Unknown),
            "systemctl restart pjwd (if systemd did not start it: kill -9 812, and then pjwd again)"
        );
        let other = process(Some(812), Starter::Other);
        let stopped = DaemonProcess { is_stopped: true, ..other };
        assert_eq!(stopped.to_string(), "pjwd (process 812, which is stopped by a signal)");
        assert_eq!(
            (other.kill_commands().as_str(), other.stop_commands().as_str()),
            ("kill -9 812", "kill 812")
        );
        let of_systemd = process(None, Starter::Systemd);
        assert_eq!(of_systemd.kill_commands(), "systemctl stop pjwd.socket pjwd.service");
        assert_eq!(
            (other.to_string().as_str(), of_systemd.to_string().as_str()),
            ("pjwd (process 812)", "pjwd")
        );
    }

    #[test]
    fn a_daemon_that_accepts_no_connection_is_known_by_its_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        let (lock_file, socket) = (dir.path().join(LOCK_FILE_NAME), dir.path().join("s"));
        let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
        let pid = |listener| DaemonProcess::behind_socket(listener, Some(&socket), &lock_file).pid;
        assert_eq!((pid(Some(own)), pid(None)), (Some(own), None), "without a lock file");
        let write = |pid: u32, socket: &Path| {
            let text =
                serde_json::json!({ "pid": pid, "socket": socket, "state_dir": "/x", "is_stopping": false });
            fs::write(&lock_file, format!("{text}\nrest\":1}}\n")).unwrap();
        };
        write(parent, &socket);
        assert_eq!((pid(Some(own)), pid(None)), (Some(own), Some(parent)));
        write(parent, &dir.path().join("other"));
        assert_eq!(pid(None), None, "the lock file of a daemon with another socket");
        write(u32::MAX >> 1, &socket);
        assert_eq!(pid(None), None, "the process has ended");
    }

    #[test]
    fn a_lock_file_of_another_user_or_that_is_no_regular_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let (lock_file, target, socket) =
            (dir.path().join(LOCK_FILE_NAME), dir.path().join("target"), dir.path().join("s"));
        let text = serde_json::json!({ "pid": std::process::id(), "socket": socket }).to_string();
        fs::write(&target, text).unwrap();
        assert_eq!(pid_in_lock_file(&target, &socket), Some(std::process::id()));
        std::os::unix::fs::symlink(&target, &lock_file).unwrap();
        assert_eq!(pid_in_lock_file(&lock_file, &socket), None, "a link");
        // In a user namespace with a single user, the owner can't be changed.
        if geteuid().is_root() && std::os::unix::fs::chown(&target, Some(1), None).is_ok() {
            assert_eq!(pid_in_lock_file(&target, &socket), None, "a file of another user");
        }
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (sender, result) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(pid_in_lock_file(&pipe, &socket)));
        assert_eq!(result.recv_timeout(std::time::Duration::from_secs(10)), Ok(None));
    }

    #[test]
    fn the_state_and_the_parent_of_a_process_are_read() {
        let own = std::process::id();
        assert_eq!(stat_field(own, 1), Some(std::os::unix::process::parent_id().to_string()));
        assert!(!DaemonProcess::from_pid(own).is_stopped());
        assert_eq!(stat_field(u32::MAX >> 1, 0), None);
    }

    #[test]
    fn the_first_process_is_no_daemon_unless_it_is_pjwd() {
        let is_pjwd = fs::read_to_string("/proc/1/comm").is_ok_and(|name| name.trim_end() == "pjwd");
        assert_eq!(is_service_manager(1), !is_pjwd);
        assert!(!is_service_manager(std::process::id()));
    }
}
