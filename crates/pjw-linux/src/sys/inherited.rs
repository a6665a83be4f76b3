//! What a program inherits by execve(2): open descriptors and ignored signals.

use std::fs;
use std::io;
use std::os::fd::RawFd;

use nix::sys::signal::{SigHandler, Signal, signal};

/// The standard streams have the descriptors up to this one.
const LAST_STANDARD_DESCRIPTOR: RawFd = libc::STDERR_FILENO;

/// Sets the flag `FD_CLOEXEC` (fcntl(2)) of each descriptor of this process, except those of the standard streams. So a
/// program that this process starts afterwards inherits only its standard streams. This process keeps all descriptors.
///
/// # Errors
/// If `/proc/self/fd` can't be read.
pub fn close_descriptors_on_exec() -> io::Result<()> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let number: Option<RawFd> = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(number) = number.filter(|number| *number > LAST_STANDARD_DESCRIPTOR) {
            // SAFETY: the call takes numbers and accesses no memory. The descriptor stays open in this process. If
            // another thread has closed it meanwhile, the call fails, or sets the flag of a new descriptor.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
    Ok(())
}

/// Sets the disposition of each signal except `SIGPIPE` to the default (signal(7)). Without this call, this process
/// ignores signals that its parent process had ignored. Rust programs ignore `SIGPIPE`, so that a write to a closed
/// pipe is an error and does not kill the process.
pub fn reset_signal_dispositions() {
    for number in Signal::iterator().filter(|number| *number != Signal::SIGPIPE) {
        // SAFETY: the default action is the kernel's and runs no code of this process.
        // SIGKILL and SIGSTOP always have the default action, and are refused.
        let _ = unsafe { signal(number, SigHandler::SigDfl) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};

    use super::*;

    #[test]
    fn a_program_that_is_started_afterwards_inherits_only_its_standard_streams() {
        let file = tempfile::tempfile().unwrap();
        fcntl(&file, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        close_descriptors_on_exec().unwrap();
        let descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
        let found = Command::new("test").args(["-e", &descriptor]).status().unwrap();
        assert!(!found.success(), "{descriptor}");
        assert!(file.metadata().is_ok(), "this process keeps it");
    }
}
