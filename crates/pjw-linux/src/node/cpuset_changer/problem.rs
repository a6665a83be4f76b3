//! What keeps the thread that changes cpusets from its work, with the texts for users.

use std::time::Duration;

use pjw_core::ids::Tid;

/// The reason why pjwd can't change cpusets at present. pjwd makes the changes of cpusets on a separate thread. Either
/// a system call of this thread does not return, or the thread has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpusetThreadProblem {
    /// A request to the thread is not complete, because a system call of the thread has not returned.
    Blocked {
        /// The path of the cgroup that the request concerns. `None` if the thread restores affinity masks after the end
        /// of a partition whose cgroup pjwd changed earlier.
        cgroup: Option<String>,
        /// The time since the thread completed the request before, or since it got this request if there was no other.
        duration: Duration,
        /// The id of the thread.
        thread: Tid,
    },
    /// The thread has ended by a panic, which is a bug of pjw.
    Ended {
        /// The message of the panic.
        cause: String,
    },
}

impl CpusetThreadProblem {
    /// Returns a text for users that says why pjwd can't change cpusets at present. If the kernel has not completed a
    /// change, the text says how long pjwd has waited. This time is rounded down: to a multiple of 10 s if it is less
    /// than two minutes, and to whole minutes otherwise.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Blocked { cgroup, duration, .. } => {
                let work = match cgroup {
                    Some(path) => format!("a change of the cgroup {path}"),
                    None => "the restore of affinity masks after the end of a partition".to_owned(),
                };
                let time = duration_text(*duration);
                format!(
                    "no cpuset can be changed at present: the kernel has not completed {work} for {time}; \
                     jobs without a cpuset are kept by masks"
                )
            }
            Self::Ended { cause } => format!(
                "no cpuset can be changed until pjwd is restarted: the thread that does so ended by a panic \
                 ({cause}); cpusets stay as they are, and jobs without a cpuset are kept by masks"
            ),
        }
    }

    /// Returns a text for users that says what to do when pjwd can't change cpusets because of this problem.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Blocked { thread, .. } => format!(
                "as root, cat /proc/{thread}/stack shows what the kernel waits for: usually a process in state \
                 D (ps -eo pid,stat,wchan,comm) that can't end a fork or holds the lock of its memory, as one \
                 that waits for a file server; changes continue by themselves once that process does, and a \
                 restart of pjwd does not help"
            ),
            Self::Ended { .. } => {
                "restart pjwd: jobs keep their cores; and report this bug of pjw with the log".to_owned()
            }
        }
    }
}

fn duration_text(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 120 { format!("{} s", seconds / 10 * 10) } else { format!("{} min", seconds / 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_the_cgroup_and_changes_each_ten_seconds_or_minutes() {
        let text = |cgroup: Option<&str>, seconds| {
            let (cgroup, duration) = (cgroup.map(str::to_owned), Duration::from_secs(seconds));
            CpusetThreadProblem::Blocked { cgroup, duration, thread: Tid(7) }.text()
        };
        let expected = "no cpuset can be changed at present: the kernel has not completed a change of the \
                        cgroup /pjw/a for 20 s; jobs without a cpuset are kept by masks";
        assert_eq!(text(Some("/pjw/a"), 20), expected);
        assert_eq!(text(Some("/pjw/a"), 29), expected);
        assert!(text(None, 200).contains("masks after the end of a partition for 3 min;"));
    }
}
