//! The start of a farm: errors that are reported before a process is forked, and forks that fail.

use pjw_core::cpuset::CpuSet;
use pjw_spawn::farm::{Farm, FarmError, WorkerCpus};

use super::farm;

fn refusal(options: Farm<'_>, items: u64) -> String {
    options.start(items, |_, _| Ok(())).unwrap_err().to_string()
}

#[test]
fn each_wrong_option_is_refused_with_its_limits() {
    assert_eq!(refusal(farm(0), 1), "workers is 0: give a number from 1 to 16384");
    assert_eq!(refusal(farm(1).chunk(0), 1), "chunk is 0: give a number from 1 to 4096");
    assert_eq!(refusal(farm(1).attempts(0), 1), "attempts is 0: give a number from 1 to 1000");
    assert!(refusal(farm(1).window(0), 1).starts_with("window is 0: "));
    assert!(refusal(farm(1).ring_bytes(1), 1).starts_with("ring_bytes is 1: "));
    assert!(refusal(farm(1).input_bytes(1), 1).starts_with("input_bytes is 1: "));
    assert!(refusal(farm(1), u64::MAX).starts_with("items is 18446744073709551615: "));
    let list = WorkerCpus::PerWorker(vec!["8191".parse::<CpuSet>().unwrap()]);
    assert!(refusal(farm(1).cpus(list), 1).contains("give only CPUs on which this process may run"));
    assert!(refusal(farm(1).cpus(WorkerCpus::PerWorker(Vec::new())), 1).contains("the list has no entry"));
}

#[test]
fn a_master_with_threads_is_refused_with_their_number() {
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || receiver.recv());
    let error = Farm::new(1).start(1, |_, _| Ok(())).unwrap_err();
    assert!(matches!(error, FarmError::MultipleThreads(2..)), "{error}");
    drop(sender);
    assert!(thread.join().unwrap().is_err());
}

#[test]
fn a_master_that_ignores_sigchld_is_refused() {
    // SAFETY: the new process changes its own signal action, tries to start a farm, and ends.
    let master = unsafe { libc::fork() };
    if master == 0 {
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        let is_refused = matches!(farm(1).start(1, |_, _| Ok(())), Err(FarmError::ChildSignalIgnored));
        // SAFETY: as above.
        unsafe { libc::_exit(if is_refused { 0 } else { 1 }) };
    }
    let end = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(master), None).unwrap();
    assert_eq!(end, nix::sys::wait::WaitStatus::Exited(nix::unistd::Pid::from_raw(master), 0));
}

#[test]
fn a_fork_that_fails_at_the_start_is_an_error_with_its_remedy() {
    let mut forks = 0;
    let options = farm(2).fork_with(move || {
        forks += 1;
        if forks == 2 {
            return Err(nix::errno::Errno::EAGAIN);
        }
        // SAFETY: the new process computes nothing.
        nix::errno::Errno::result(unsafe { libc::fork() })
    });
    let error = refusal(options, 10);
    assert!(error.contains("no process can be forked") && error.contains("ulimit -u"), "{error}");
}

#[test]
fn a_function_for_the_fork_that_returns_no_process_id_is_refused_and_no_process_is_killed() {
    for invalid_pid in [i32::MIN, 0] {
        let error = refusal(farm(1).fork_with(move || Ok(invalid_pid)), 10);
        assert!(error.contains("the function for the fork must return 0 only in the new process"), "{error}");
    }
}

#[test]
fn without_a_free_descriptor_no_process_is_forked_and_the_error_names_the_remedy() {
    // The farm takes the lock of the output. A thread that prints the result of another test would hold it for ever in
    // the new process.
    let stdout = std::io::stdout().lock();
    // SAFETY: the new process limits its own descriptors, tries to start a farm, and ends.
    let master = unsafe { libc::fork() };
    if master == 0 {
        let limit = libc::rlimit { rlim_cur: 128, rlim_max: 128 };
        // SAFETY: as above.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        let mut files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        // The farm itself needs two descriptors.
        files.truncate(files.len().saturating_sub(2));
        let mut is_forked = false;
        let options = farm(1).fork_with(|| {
            is_forked = true;
            Err(nix::errno::Errno::EAGAIN)
        });
        let error = options.start(10, |_, _| Ok(())).err().map_or(String::new(), |error| error.to_string());
        let is_right = error.contains("raise ulimit -n") && !is_forked;
        // SAFETY: as above.
        unsafe { libc::_exit(if is_right { 0 } else { 1 }) };
    }
    drop(stdout);
    let end = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(master), None).unwrap();
    assert_eq!(end, nix::sys::wait::WaitStatus::Exited(nix::unistd::Pid::from_raw(master), 0));
}

#[test]
fn a_fork_that_fails_at_a_replacement_is_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let killed = directory.path().join("killed");
    let mut forks = 0;
    let options = farm(1).fork_with(move || {
        forks += 1;
        if (2..5).contains(&forks) {
            return Err(nix::errno::Errno::EAGAIN);
        }
        // SAFETY: the new process computes, and ends by a signal.
        nix::errno::Errno::result(unsafe { libc::fork() })
    });
    let running = options.start(10, |item, _| {
        if item.number == 4 && super::is_first(&killed) {
            super::end_by(libc::SIGKILL);
        }
        Ok(())
    });
    assert_eq!(running.unwrap().map(Result::unwrap).count(), 10);
}
