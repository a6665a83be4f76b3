//! Requests to systemd, the addresses where systemd listens, and the faults of a call.

use std::path::PathBuf;
use std::time::Duration;

/// The maximum time for which a D-Bus call to systemd waits for the reply. After this time, the call fails.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a D-Bus call to systemd failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SystemdError {
    /// No connection to systemd could be made, or the connection broke. The text is the reason.
    #[error("systemd can't be reached: {0}")]
    Unreachable(String),
    /// No reply within [`CALL_TIMEOUT`].
    #[error("systemd did not answer within {} s", CALL_TIMEOUT.as_secs())]
    NoReply,
    /// No unit with this name is loaded.
    #[error("systemd has no such unit loaded")]
    NoSuchUnit,
    /// A unit with the name of the new unit is already loaded.
    #[error("systemd has a unit of that name already")]
    UnitExists,
    /// systemd replied with another D-Bus error.
    #[error("systemd refused the request: {text} ({name})")]
    Refused {
        /// The name of the D-Bus error, such as `org.freedesktop.DBus.Error.AccessDenied`.
        name: String,
        /// The message of the D-Bus error.
        text: String,
    },
}

/// The reply of systemd to a D-Bus call. If the call reads a property with a list of strings, these are the strings.
/// For all other calls, the list is empty.
pub(crate) type Reply = Result<Vec<String>, SystemdError>;

/// The Unix socket through which systemd can be reached: that of the D-Bus message bus, or systemd's private socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// The socket of a message bus.
    Bus(PathBuf),
    /// systemd's private socket, without a bus.
    Direct(PathBuf),
}

/// The name of a property of a systemd unit, such as `AllowedCPUs`, and the value of the property.
pub(crate) type Property = (&'static str, PropertyValue);

/// The value of a property of a systemd unit, in one of the D-Bus types that pjw uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PropertyValue {
    Text(String),
    Texts(Vec<String>),
    Number(u64),
    Pids(Vec<u32>),
    /// A set of numbers, such as PUs, as a bit mask. The first byte has the bits of the numbers 0 to 7.
    Set(Vec<u8>),
}
