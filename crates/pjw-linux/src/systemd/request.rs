//! Requests to systemd, the addresses where systemd listens, and the faults of a call.

use std::path::PathBuf;
use std::time::Duration;

/// The maximum duration of one D-Bus call. A call without a reply fails after this time.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a D-Bus call to systemd failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SystemdFault {
    /// No connection to systemd.
    #[error("systemd can't be reached: {0}")]
    Unreachable(String),
    /// No reply within [`CALL_TIMEOUT`].
    #[error("systemd did not answer within {} s", CALL_TIMEOUT.as_secs())]
    NoReply,
    /// The unit is not loaded.
    #[error("systemd has no such unit loaded")]
    NoSuchUnit,
    /// A unit of that name is already loaded.
    #[error("systemd has a unit of that name already")]
    UnitExists,
    /// Any other error that systemd returned.
    #[error("systemd refused the request: {text} ({name})")]
    Refused {
        /// The D-Bus error name.
        name: String,
        /// The error message.
        text: String,
    },
}

/// The reply to a call: the strings of the property that was read. Empty for other calls.
pub(crate) type Reply = Result<Vec<String>, SystemdFault>;

/// An address at which systemd can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// The socket of a message bus.
    Bus(PathBuf),
    /// systemd's private socket, without a bus.
    Direct(PathBuf),
}

/// The name of a unit property, and its value.
pub(crate) type Property = (&'static str, PropertyValue);

/// The value of a unit property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PropertyValue {
    Text(String),
    Texts(Vec<String>),
    Number(u64),
    Pids(Vec<u32>),
    /// A set of numbers as bytes, lowest bits first.
    Set(Vec<u8>),
}
