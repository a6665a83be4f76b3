//! The processes that are not reported as unassigned although their user has jobs: those of a login itself, and pjw's
//! own programs.

use crate::basics::Comm;
use crate::terms::snapshot::Process;

/// The names of pjw's own programs. Their processes never count as unassigned. `pjw-thaw` is the process of pjwd that
/// thaws frozen jobs after pjwd was killed.
const OUR_PROGRAMS: [&str; 3] = ["pjw-thaw", "pjwctl", "pjwd"];

/// The programs of a login itself: the session of an ssh client and of the server, the user's systemd and its services
/// that every login has, and terminal multiplexers. Longer names are cut as the kernel cuts them (`TASK_COMM_LEN`).
const LOGIN_PROGRAMS: [&str; 20] = [
    "(sd-pam)",
    "(systemd)",
    "dbus-broker",
    "dbus-broker-launch",
    "dbus-daemon",
    "gpg-agent",
    "login",
    "mosh-server",
    "screen",
    "sftp-server",
    "ssh",
    "ssh-agent",
    "sshd",
    "sshd-session",
    "su",
    "sudo",
    "systemd",
    "systemd-userwork",
    "tmux: client",
    "tmux: server",
];

/// The programs that start the shell of a login. The shell does not lead its session if the program keeps the session
/// of its caller (`su` of util-linux) or leads the session itself (`sudo` with `use_pty`).
const LOGIN_SHELL_STARTERS: [&str; 9] =
    ["login", "mosh-server", "runuser", "screen", "sshd", "sshd-session", "su", "sudo", "tmux: server"];

/// Shells. A shell that leads its session is the shell of a login, of a terminal, or of a command over ssh.
const SHELLS: [&str; 10] = ["ash", "bash", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "zsh"];

impl Process {
    /// Whether the command name of the process is that of a program of pjw (`pjwctl`, `pjwd` or `pjw-thaw`). pjw never
    /// counts such a process as unassigned. A process is unassigned if it belongs to no job although its user
    /// has a job.
    #[must_use]
    pub fn has_pjw_program_name(&self) -> bool {
        self.has_name_of(&OUR_PROGRAMS)
    }

    /// Whether the process is a part of a login, such as sshd, sudo, a login shell or a terminal multiplexer. The
    /// command name of the process decides. A shell is a part of a login only if it leads its session, or if its parent
    /// has the name of a program that starts login shells, such as sshd. `parent` is the parent of the process. `None`
    /// if the parent is not known.
    #[must_use]
    pub fn belongs_to_login(&self, parent: Option<&Self>) -> bool {
        let is_first_shell = || {
            self.session == self.id.pid
                || parent.is_some_and(|parent| parent.has_name_of(&LOGIN_SHELL_STARTERS))
        };
        self.has_name_of(&LOGIN_PROGRAMS) || (self.has_name_of(&SHELLS) && is_first_shell())
    }

    fn has_name_of(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.comm == Comm::from(*name))
    }
}
