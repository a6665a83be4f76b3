//! The limit of open descriptors (`RLIMIT_NOFILE`) of the daemon.

use anyhow::bail;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pjw_ipc::server::ServerLimits;
use tracing::warn;

/// The number of descriptors that pjwd needs besides those of its clients. These are sockets, epoll and event
/// descriptors, the files of its state, directories in `/proc`, watches, BPF programs and their maps, and files that
/// pjwd opens for a short time. An estimate, rounded up generously.
const OWN_DESCRIPTORS: u64 = 112;

/// Raises the soft limit of open descriptors to the hard limit. If that fails, logs a warning, and the soft limit stays
/// as it is.
///
/// # Errors
/// If the limit is then too low: pjwd needs descriptors for itself ([`OWN_DESCRIPTORS`]), and one for each connection
/// that is reserved for administrators ([`ServerLimits::reserved_connections`]).
pub(crate) fn raise_descriptor_limit() -> anyhow::Result<()> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(()) };
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(errno) => {
            warn!("the limit of open files stays as it is: {errno}");
            soft
        }
    };
    check_limit(limit)
}

/// Fails if `limit` is fewer descriptors than pjwd needs.
fn check_limit(limit: u64) -> anyhow::Result<()> {
    let needed = OWN_DESCRIPTORS + ServerLimits::default().reserved_connections as u64;
    if limit < needed {
        bail!(
            "at most {limit} files may be open (RLIMIT_NOFILE), and pjwd needs {needed}: raise the hard limit \
             (ulimit -Hn {needed}, or LimitNOFILE={needed} of its unit)"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_need_of_the_daemon_is_refused_with_the_number_that_it_needs() {
        assert!(check_limit(128).is_ok() && check_limit(1024).is_ok());
        let error = check_limit(127).unwrap_err().to_string();
        assert_eq!(
            error,
            "at most 127 files may be open (RLIMIT_NOFILE), and pjwd needs 128: raise the hard limit \
             (ulimit -Hn 128, or LimitNOFILE=128 of its unit)"
        );
    }
}
