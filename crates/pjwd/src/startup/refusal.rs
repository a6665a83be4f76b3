//! What the user can do if a task of pjwd is refused because another pjwd runs. The commands in the message work also
//! if the other pjwd hangs or is stopped by a signal.

use std::path::Path;
use std::time::Duration;

use pjw_ipc::daemon_process::DaemonProcess;

use crate::host::other_pjwd::{Answer, check_answer};
use crate::options::DaemonOptions;
use crate::store::{journal::JournalError, lock::LockError};

/// The longest time to wait for an answer of the other pjwd.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A task that is refused while another pjwd runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    /// To run as the daemon.
    Serve,
    /// `--release-all`.
    ReleaseAll,
    /// `--thaw`.
    Thaw,
}

impl Task {
    /// Returns the task in the command line `options`. `None` for a task that no user waits for.
    fn of_options(options: &DaemonOptions) -> Option<Self> {
        if options.release_all {
            Some(Self::ReleaseAll)
        } else if options.thaw {
            Some(Self::Thaw)
        } else {
            (!options.thaw_after_end).then_some(Self::Serve)
        }
    }

    /// Returns the command for the task, without the options that the user adds.
    fn command(self) -> &'static str {
        match self {
            Self::Serve => "pjwd",
            Self::ReleaseAll => "pjwd --release-all",
            Self::Thaw => "pjwd --thaw",
        }
    }
}

/// Replaces the remedy in `error`, if this error says that another pjwd runs: the new remedy fits the task in the
/// command line `options`, and the state of the other pjwd. For this, waits up to 5 s for an answer of the other pjwd.
/// Returns any other error unchanged.
pub(super) fn name_remedy(options: &DaemonOptions, mut error: anyhow::Error) -> anyhow::Error {
    let Some(task) = Task::of_options(options) else { return error };
    if let Some(LockError::Held { holder, remedy, .. }) = error.downcast_mut::<LockError>() {
        let other = holder.as_ref().map(|holder| (holder.pid(), holder.socket()));
        if let Some(better) = remedy_for(task, other) {
            *remedy = better;
        }
    } else if let Some(journal) = error.downcast_mut::<JournalError>().filter(|error| error.is_in_use())
        && let Some(better) = remedy_for(task, journal.user_pid().map(|pid| (pid, None)))
    {
        journal.set_remedy(better);
    }
    error
}

/// Returns what the user can do if `task` is refused because of another pjwd. `other` is the pid of the other pjwd, if
/// it is known, with the path of its socket, if that is known. `None` if the usual remedy fits.
fn remedy_for(task: Task, other: Option<(u32, Option<&Path>)>) -> Option<String> {
    let Some((pid, socket)) = other else {
        let unknown = "stop this pjwd first (ps -C pjwd shows it; if it hangs: kill -9 PID), or release its jobs with \
                       pjwctl release --all";
        return (task == Task::ReleaseAll).then(|| unknown.to_owned());
    };
    let process = DaemonProcess::from_pid(pid);
    let answer =
        if process.is_stopped() { Answer::Missing } else { check_answer(pid, socket, ANSWER_TIMEOUT) };
    remedy_after(task, &process, &answer)
}

/// Returns what [`remedy_for`] returns, if `process` is the other pjwd and `answer` the result of a call.
fn remedy_after(task: Task, process: &DaemonProcess, answer: &Answer) -> Option<String> {
    let (kill, stop, command) = (process.kill_commands(), process.stop_commands(), task.command());
    let and_again = format!("and then run {command} again (jobs keep their cores meanwhile)");
    match answer {
        Answer::OnSocket(socket) if task == Task::ReleaseAll => Some(format!(
            "release its jobs with pjwctl release --all --socket {}, or stop it with {stop}, {and_again}",
            socket.display()
        )),
        Answer::NoSocket if task == Task::ReleaseAll => Some(format!(
            "release its jobs with pjwctl release --all, or wait for its end; if it hangs, end it with {kill}, \
             {and_again}"
        )),
        Answer::OnSocket(_) | Answer::NoSocket => None,
        Answer::Missing if process.is_stopped() => {
            Some(format!("that process is stopped by a signal; end it with {kill}, {and_again}"))
        }
        Answer::Missing => Some(format!(
            "that process does not answer within {} s; if it hangs, end it with {kill}, {and_again}",
            ANSWER_TIMEOUT.as_secs()
        )),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::store::lock::{DaemonLock, LockDirectories, LockHolder};

    fn options(words: &[&str]) -> DaemonOptions {
        DaemonOptions::try_parse_from(["pjwd"].iter().chain(words)).unwrap()
    }

    #[test]
    fn each_task_and_each_state_of_the_other_pjwd_has_its_remedy() {
        let own = std::process::id();
        let process = DaemonProcess::from_pid(own);
        let remedy = |task, answer: Answer| remedy_after(task, &process, &answer);
        let on_socket = || Answer::OnSocket("/run/a.sock".into());
        let release = remedy(Task::ReleaseAll, on_socket()).unwrap();
        assert!(release.contains("pjwctl release --all --socket /run/a.sock, or stop it with"), "{release}");
        assert!(release.contains(&format!("kill {own}")) && !release.contains("kill -9"), "{release}");
        let unknown = remedy(Task::ReleaseAll, Answer::NoSocket).unwrap();
        assert!(unknown.contains("pjwctl release --all") && unknown.contains("kill -9"), "{unknown}");
        for task in [Task::Serve, Task::ReleaseAll, Task::Thaw] {
            let hangs = remedy(task, Answer::Missing).unwrap();
            assert!(hangs.contains("does not answer within 5 s; if it hangs, end it with"), "{hangs}");
            assert!(hangs.contains(&format!("kill -9 {own}")), "{hangs}");
            assert!(hangs.contains(&format!("and then run {} again", task.command())), "{hangs}");
            assert!(hangs.contains("jobs keep their cores meanwhile"), "{hangs}");
        }
        for task in [Task::Serve, Task::Thaw] {
            assert_eq!([remedy(task, on_socket()), remedy(task, Answer::NoSocket)], [None, None]);
        }
        assert!(remedy_for(Task::ReleaseAll, None).unwrap().contains("kill -9 PID"));
        assert_eq!(remedy_for(Task::Serve, None), None);
    }

    #[test]
    fn the_remedy_is_named_for_a_held_lock_and_other_errors_and_unattended_tasks_keep_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = LockDirectories { usual: dir.path().join("lock"), ..LockDirectories::default() };
        // This process holds the lock and does not listen at the path.
        let holder = || LockHolder::for_this_process(Some(&dir.path().join("none")), dir.path());
        let _lock = DaemonLock::acquire(&dirs, holder()).unwrap();
        let refusal = || anyhow::Error::from(DaemonLock::acquire(&dirs, holder()).unwrap_err());
        let text = name_remedy(&options(&["--release-all"]), refusal()).to_string();
        assert!(text.contains(&format!("process {}, socket", std::process::id())), "{text}");
        assert!(text.contains("and then run pjwd --release-all again"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        let unattended = name_remedy(&options(&["--thaw-after-end"]), refusal()).to_string();
        assert!(unattended.contains("stop it first"), "{unattended}");
        let other = name_remedy(&options(&["--release-all"]), anyhow::anyhow!("no space"));
        assert_eq!(other.to_string(), "no space");
    }
}
