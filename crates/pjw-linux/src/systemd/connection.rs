//! One D-Bus call over a Unix socket, with one deadline for all of it.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use nix::unistd::Uid;

use super::request::{Address, Reply, SystemdError};
use super::wire::{self, CallArguments, CallDestination};

const BUS_NAME: &str = "org.freedesktop.systemd1";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";
const MANAGER_INTERFACE: &str = "org.freedesktop.systemd1.Manager";
const PROPERTIES_INTERFACE: &str = "org.freedesktop.DBus.Properties";
/// Maximum length of the authentication reply, in bytes.
const MAX_LINE_BYTES: usize = 1024;

/// A D-Bus method call to systemd: the object path, the interface, the method and its arguments.
pub(super) struct MethodCall {
    path: String,
    interface: &'static str,
    method: &'static str,
    body: CallArguments,
}

impl MethodCall {
    /// Returns a call of the method `method` of systemd's manager object (`org.freedesktop.systemd1.Manager`). `body`
    /// contains the arguments.
    pub(super) fn manager_method(method: &'static str, body: CallArguments) -> Self {
        Self { path: MANAGER_PATH.to_owned(), interface: MANAGER_INTERFACE, method, body }
    }

    /// Returns a call that reads the property `name` of the systemd unit `unit` (the method `Get` of
    /// `org.freedesktop.DBus.Properties`). `interface` is the D-Bus interface with this property, such as
    /// `org.freedesktop.systemd1.Slice`.
    pub(super) fn get_unit_property(unit: &str, interface: &str, name: &str) -> Self {
        let path = format!("{MANAGER_PATH}/unit/{}", wire::escape_unit(unit));
        let body = CallArguments::default().text(interface).text(name);
        Self { path, interface: PROPERTIES_INTERFACE, method: "Get", body }
    }
}

/// Connects to systemd at `address`, sends the method call `request`, and returns the reply. All of this takes at
/// most the time `within`.
///
/// # Errors
/// If systemd can't be reached, does not reply in time, or refuses the request.
pub(super) fn call_systemd(address: &Address, request: &MethodCall, within: Duration) -> Reply {
    let (socket, bus_name) = match address {
        Address::Bus(socket) => (socket, Some(BUS_NAME)),
        Address::Direct(socket) => (socket, None),
    };
    let mut connection = Connection::open(socket, Instant::now() + within)?;
    connection.authenticate()?;
    if bus_name.is_some() {
        // A bus accepts no message before Hello.
        let bus = "org.freedesktop.DBus";
        let hello =
            CallDestination { to: Some(bus), path: "/org/freedesktop/DBus", interface: bus, method: "Hello" };
        connection.call(&hello, &CallArguments::default())?;
    }
    let MethodCall { path, interface, method, body } = request;
    connection.call(&CallDestination { to: bus_name, path, interface, method }, body)
}

/// A connection to a Unix socket of systemd that is used until a deadline.
struct Connection<'a> {
    stream: UnixStream,
    socket: &'a Path,
    deadline: Instant,
    serial: u32,
}

impl<'a> Connection<'a> {
    /// Connects to the Unix socket at `path`. connect(2) waits while the queue of the socket is full, but not longer
    /// than `deadline`.
    ///
    /// # Errors
    /// [`SystemdError::NoReply`] if the time has passed. [`SystemdError::Unreachable`] if the connection fails.
    fn open(path: &'a Path, deadline: Instant) -> Result<Self, SystemdError> {
        let fault = |errno: nix::Error| match errno {
            nix::Error::EAGAIN | nix::Error::EINPROGRESS => SystemdError::NoReply,
            errno => SystemdError::Unreachable(format!("{}: {}", path.display(), errno.desc())),
        };
        let fd =
            socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(fault)?;
        let left =
            i64::try_from(deadline.saturating_duration_since(Instant::now()).as_micros()).unwrap_or(1).max(1);
        setsockopt(&fd, sockopt::SendTimeout, &TimeVal::microseconds(left)).map_err(fault)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path).map_err(fault)?).map_err(fault)?;
        Ok(Self { stream: UnixStream::from(fd), socket: path, deadline, serial: 0 })
    }

    /// Authenticates as this user; the kernel passes the credentials (D-Bus specification, "Authentication Protocol",
    /// EXTERNAL).
    ///
    /// `BEGIN` is sent together with `AUTH`, as systemd's own clients do. On its private socket, systemd 252 does not
    /// process a call that it receives in the same read as `BEGIN`, until more data arrives.
    ///
    /// # Errors
    /// If the peer rejects this user, does not speak D-Bus, or does not reply in time.
    fn authenticate(&mut self) -> Result<(), SystemdError> {
        let user: String = Uid::effective().to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
        self.send(format!("\0AUTH EXTERNAL {user}\r\nBEGIN\r\n").as_bytes())?;
        let mut response = Vec::new();
        while !response.ends_with(b"\r\n") {
            if response.len() > MAX_LINE_BYTES {
                return Err(self.connection_error("the peer does not speak D-Bus"));
            }
            let mut byte = [0];
            self.receive(&mut byte)?;
            response.push(byte[0]);
        }
        if response.starts_with(b"OK ") {
            Ok(())
        } else {
            Err(self.connection_error("the peer rejects this user"))
        }
    }

    /// Sends a method call, and waits for its reply. Drops other messages that arrive meanwhile, such as signals.
    ///
    /// # Errors
    /// If the connection fails, if the time has passed, or if the reply is an error.
    fn call(&mut self, destination: &CallDestination<'_>, arguments: &CallArguments) -> Reply {
        self.serial += 1;
        self.send(&wire::encode_call(destination, arguments, self.serial))?;
        loop {
            let mut prefix = [0; wire::PREFIX_BYTES];
            self.receive(&mut prefix)?;
            let remaining_size = wire::remaining_size(&prefix)
                .ok_or_else(|| self.connection_error("the peer sent a malformed message"))?;
            let mut message = prefix.to_vec();
            message.resize(wire::PREFIX_BYTES + remaining_size, 0);
            self.receive(&mut message[wire::PREFIX_BYTES..])?;
            if let Some(reply) = wire::parse_reply(&message, self.serial) {
                return reply;
            }
        }
    }

    /// Returns the time until the deadline.
    ///
    /// # Errors
    /// [`SystemdError::NoReply`] if the time has passed.
    fn time_left(&self) -> Result<Duration, SystemdError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(SystemdError::NoReply) } else { Ok(left) }
    }

    fn connection_error(&self, why: &str) -> SystemdError {
        SystemdError::Unreachable(format!("{}: {why}", self.socket.display()))
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), SystemdError> {
        while !bytes.is_empty() {
            let left = self.time_left()?;
            let sent = self.stream.set_write_timeout(Some(left)).and_then(|()| self.stream.write(bytes));
            bytes = &bytes[self.transferred_bytes(sent)?..];
        }
        Ok(())
    }

    /// Fills `bytes` with the next bytes from the peer, and waits until all have arrived.
    ///
    /// # Errors
    /// [`SystemdError::NoReply`] if the time has passed. [`SystemdError::Unreachable`] if the connection fails or is
    /// closed.
    fn receive(&mut self, bytes: &mut [u8]) -> Result<(), SystemdError> {
        let mut received = 0;
        while received < bytes.len() {
            let left = self.time_left()?;
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(&mut bytes[received..]));
            if matches!(read, Ok(0)) {
                return Err(self.connection_error("the peer closed the connection"));
            }
            received += self.transferred_bytes(read)?;
        }
        Ok(())
    }

    /// Returns how many bytes a call of read(2) or write(2) with the result `result` has transferred. 0 if a signal
    /// interrupted the call.
    ///
    /// # Errors
    /// [`SystemdError::NoReply`] if the time has passed. [`SystemdError::Unreachable`] if the connection fails.
    fn transferred_bytes(&self, result: std::io::Result<usize>) -> Result<usize, SystemdError> {
        match result {
            Ok(length) => Ok(length),
            Err(fault) if fault.kind() == ErrorKind::Interrupted => self.time_left().map(|_| 0),
            Err(fault) if matches!(fault.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Err(SystemdError::NoReply)
            }
            Err(fault) => Err(self.connection_error(&fault.to_string())),
        }
    }
}
