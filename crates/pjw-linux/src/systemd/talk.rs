//! One call over a socket, with a deadline for all of it.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use nix::unistd::Uid;

use super::wire::{self, Body, Call};
use super::{Door, Fault, Request};

const NAME: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// The longest line of the greeting that is read.
const LONGEST_LINE: usize = 1024;

/// Asks through one door and waits for the answer.
pub(super) fn call(door: &Door, request: &Request, within: Duration) -> Result<Vec<String>, Fault> {
    let (socket, name) = match door {
        Door::Bus(socket) => (socket, Some(NAME)),
        Door::Direct(socket) => (socket, None),
    };
    let mut line = Line::open(socket, Instant::now() + within)?;
    line.greet()?;
    if name.is_some() {
        // A bus takes no other message first.
        let bus = "org.freedesktop.DBus";
        let hello = Call { to: Some(bus), path: "/org/freedesktop/DBus", interface: bus, method: "Hello" };
        line.ask(&hello, &Body::default())?;
    }
    let unit_path;
    let (path, interface, method, body) = match request {
        Request::Start { unit, properties } => {
            let body = Body::default().text(unit).text("fail").properties(properties).no_units();
            (PATH, MANAGER, "StartTransientUnit", body)
        }
        Request::Set { unit, properties } => {
            // yes: until the next boot.
            (PATH, MANAGER, "SetUnitProperties", Body::default().text(unit).yes().properties(properties))
        }
        Request::Stop { unit } => (PATH, MANAGER, "StopUnit", Body::default().text(unit).text("replace")),
        Request::Get { unit, kind, name } => {
            unit_path = format!("{PATH}/unit/{}", wire::label(unit));
            (&*unit_path, PROPERTIES, "Get", Body::default().text(kind).text(name))
        }
    };
    line.ask(&Call { to: name, path, interface, method }, &body)
}

/// A connection, and the moment at which everything on it must be done.
struct Line<'a> {
    stream: UnixStream,
    socket: &'a Path,
    until: Instant,
    serial: u32,
}

impl<'a> Line<'a> {
    /// Connects; that waits too, while the peer takes no connection of those that came before.
    fn open(path: &'a Path, until: Instant) -> Result<Self, Fault> {
        let fault = |errno: nix::Error| match errno {
            nix::Error::EAGAIN | nix::Error::EINPROGRESS => Fault::Silent,
            errno => Fault::Unreachable(format!("{}: {}", path.display(), errno.desc())),
        };
        let made =
            socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(fault)?;
        let left =
            i64::try_from(until.saturating_duration_since(Instant::now()).as_micros()).unwrap_or(1).max(1);
        setsockopt(&made, sockopt::SendTimeout, &TimeVal::microseconds(left)).map_err(fault)?;
        connect(made.as_raw_fd(), &UnixAddr::new(path).map_err(fault)?).map_err(fault)?;
        Ok(Self { stream: UnixStream::from(made), socket: path, until, serial: 0 })
    }

    /// Says who we are: the kernel vouches for that (D-Bus specification, "Authentication Protocol", EXTERNAL).
    ///
    /// The last word goes with the first, as systemd's own clients send it: on its own socket systemd 252 leaves a call
    /// lying that it reads together with that word, until more comes.
    fn greet(&mut self) -> Result<(), Fault> {
        let user: String = Uid::effective().to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
        self.send(format!("\0AUTH EXTERNAL {user}\r\nBEGIN\r\n").as_bytes())?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n") {
            if answer.len() > LONGEST_LINE {
                return Err(self.lost("it speaks no D-Bus"));
            }
            let mut byte = [0];
            self.receive(&mut byte)?;
            answer.push(byte[0]);
        }
        if answer.starts_with(b"OK ") { Ok(()) } else { Err(self.lost("it does not know this user")) }
    }

    fn ask(&mut self, what: &Call<'_>, body: &Body) -> Result<Vec<String>, Fault> {
        self.serial += 1;
        self.send(&wire::call(what, body, self.serial))?;
        loop {
            let mut prefix = [0; wire::PREFIX];
            self.receive(&mut prefix)?;
            let rest = wire::rest(&prefix).ok_or_else(|| self.lost("it sent what is no message"))?;
            let mut message = prefix.to_vec();
            message.resize(wire::PREFIX + rest, 0);
            self.receive(&mut message[wire::PREFIX..])?;
            if let Some(answer) = wire::answer(&message, self.serial) {
                return answer;
            }
        }
    }

    fn left(&self) -> Result<Duration, Fault> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Fault::Silent) } else { Ok(left) }
    }

    fn lost(&self, why: &str) -> Fault {
        Fault::Unreachable(format!("{}: {why}", self.socket.display()))
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let left = self.left()?;
            let sent = self.stream.set_write_timeout(Some(left)).and_then(|()| self.stream.write(bytes));
            bytes = &bytes[self.progress(sent)?..];
        }
        Ok(())
    }

    fn receive(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        let mut got = 0;
        while got < bytes.len() {
            let left = self.left()?;
            let read =
                self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(&mut bytes[got..]));
            if matches!(read, Ok(0)) {
                return Err(self.lost("it hung up"));
            }
            got += self.progress(read)?;
        }
        Ok(())
    }

    fn progress(&self, result: std::io::Result<usize>) -> Result<usize, Fault> {
        match result {
            Ok(length) => Ok(length),
            Err(fault) if fault.kind() == ErrorKind::Interrupted => self.left().map(|_| 0),
            Err(fault) if matches!(fault.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Err(Fault::Silent)
            }
            Err(fault) => Err(self.lost(&fault.to_string())),
        }
    }
}
