//! The limit of open descriptors (`RLIMIT_NOFILE`) of the daemon, and the number of connections that it leaves to
//! clients.

use anyhow::bail;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pjw_ipc::server::ServerLimits;
use tracing::warn;

/// The number of descriptors that pjwd needs besides those of its clients. These are sockets, epoll and event
/// descriptors, the files of its state, directories in `/proc`, watches, BPF programs and their maps, connections for
/// metrics, and files that pjwd opens for a short time, such as the core map of a job. The files of a cgroup that show
/// whether its processes ran stay open only if many descriptors are left. An estimate, rounded up generously.
const OWN_DESCRIPTORS: u64 = 112;

/// Raises the soft limit of open descriptors to the hard limit. If that fails, logs a warning, and the soft limit stays
/// as it is. Returns the limits for clients: so many connections that clients leave pjwd the descriptors that it needs.
///
/// # Errors
/// The error of [`client_limits`].
pub(crate) fn raise_descriptor_limit() -> anyhow::Result<ServerLimits> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(ServerLimits::default()) };
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(errno) => {
            warn!("the limit of open files stays as it is: {errno}");
            soft
        }
    };
    let limits = client_limits(limit)?;
    let usual = ServerLimits::default().max_connections;
    if limits.max_connections < usual {
        warn!(
            "clients can have {} connections instead of {usual}, because only {limit} files may be open \
             (RLIMIT_NOFILE)",
            limits.max_connections
        );
    }
    Ok(limits)
}

/// Returns the limits for clients if at most `limit` descriptors may be open. All connections are refused that would
/// take the descriptors which pjwd needs for itself ([`OWN_DESCRIPTORS`]).
///
/// # Errors
/// If `limit` is too low: pjwd needs its own descriptors, one for each connection that is reserved for administrators
/// ([`ServerLimits::reserved_connections`]), and as many for other users.
fn client_limits(limit: u64) -> anyhow::Result<ServerLimits> {
    let usual = ServerLimits::default();
    let needed = OWN_DESCRIPTORS + 2 * usual.reserved_connections as u64;
    if limit < needed {
        bail!(
            "at most {limit} files may be open (RLIMIT_NOFILE), and pjwd needs {needed}: raise the hard limit \
             (ulimit -Hn {needed}, or LimitNOFILE={needed} of its unit)"
        );
    }
    let left = usize::try_from(limit - OWN_DESCRIPTORS).unwrap_or(usize::MAX);
    Ok(ServerLimits { max_connections: usual.max_connections.min(left), ..usual })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_need_of_the_daemon_is_refused_with_the_number_that_it_needs() {
        assert!(client_limits(144).is_ok() && client_limits(1024).is_ok());
        let error = client_limits(143).unwrap_err().to_string();
        assert_eq!(
            error,
            "at most 143 files may be open (RLIMIT_NOFILE), and pjwd needs 144: raise the hard limit \
             (ulimit -Hn 144, or LimitNOFILE=144 of its unit)"
        );
    }

    #[test]
    fn clients_leave_the_daemon_the_descriptors_that_it_needs() {
        let connections = |limit| client_limits(limit).unwrap().max_connections;
        let usual = ServerLimits::default().max_connections;
        assert_eq!([144, 200, 1024, u64::MAX].map(connections), [32, 88, usual, usual]);
        assert!(connections(144) > ServerLimits::default().reserved_connections, "users have some too");
    }
}
