//! The nice value of a thread: setpriority(2).

use nix::errno::Errno;

/// Sets the nice value of the calling thread to `value`, from -20 to 19. The higher the nice value, the smaller
/// is the thread's share of a busy PU (logical CPU). With 10, the share is about a tenth of the share of a
/// thread with 0. Other threads of the process are not affected: on Linux, each thread has a nice value of its
/// own (sched(7)).
///
/// # Errors
/// `EACCES` if `value` is lower than the present nice value, and this user has no permission to lower it.
pub fn set_own_nice_value(value: i32) -> Result<(), Errno> {
    // SAFETY: the call takes numbers and accesses no memory. The id 0 is the calling thread.
    Errno::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, value) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_becomes_nice() {
        let value = |tid: i32| {
            std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).map(|stat| {
                let rest = stat.rsplit_once(')').unwrap().1.to_owned();
                rest.split_whitespace().nth(16).unwrap().parse::<i32>().unwrap()
            })
        };
        let own = nix::unistd::gettid().as_raw();
        let before = value(own).unwrap();
        let nice = std::thread::spawn(move || {
            set_own_nice_value(19).unwrap();
            value(nix::unistd::gettid().as_raw()).unwrap()
        });
        assert_eq!(nice.join().unwrap(), 19);
        assert_eq!(value(own).unwrap(), before);
    }
}
