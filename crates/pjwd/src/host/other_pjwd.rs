//! Another pjwd that runs already: whether it answers its clients.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pjw_ipc::client::{Client, ClientError};
use serde_json::{Value, json};

/// The flag in `/proc/PID/net/unix` of a socket on which a process listens (`__SO_ACCEPTCON`).
const LISTENS: u32 = 0x1_0000;

/// Whether another pjwd answers its clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It answers on the socket with this path.
    OnSocket(PathBuf),
    /// It has not answered in time.
    Missing,
    /// It has no socket, or its socket is unknown.
    NoSocket,
}

/// Returns whether the pjwd with the pid `pid` answers a call. `socket` is the path of its control socket. With `None`,
/// tries all Unix sockets on which the process listens. On each socket, waits for at most `timeout` for the connection,
/// and for the same time for the answer.
pub(crate) fn check_answer(pid: u32, socket: Option<&Path>, timeout: Duration) -> Answer {
    let sockets = socket.map_or_else(|| listening_sockets(pid), |path| vec![path.to_owned()]);
    if sockets.is_empty() {
        return Answer::NoSocket;
    }
    let answering = sockets.into_iter().find(|socket| answers(socket, timeout));
    answering.map_or(Answer::Missing, Answer::OnSocket)
}

/// Returns whether a pjwd answers a call on the socket at the path `socket`. A refusal is an answer too.
fn answers(socket: &Path, timeout: Duration) -> bool {
    let Ok(mut client) = Client::connect_with_timeout(socket, timeout) else { return false };
    let answer = client.call::<Value>("GetStatus", &json!({}));
    matches!(answer, Ok(_) | Err(ClientError::Refused { .. }))
}

/// Returns the paths of the Unix sockets on which the process `pid` listens. Leaves out a socket with a relative path.
/// Empty if this user may not read which files the process has open.
fn listening_sockets(pid: u32) -> Vec<PathBuf> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let open_files: BTreeSet<PathBuf> =
        descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok()).collect();
    let table = fs::read(format!("/proc/{pid}/net/unix")).unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    let listeners = table.lines().filter_map(listener_in_line);
    let of_process =
        listeners.filter(|(inode, _)| open_files.contains(Path::new(&format!("socket:[{inode}]"))));
    of_process.map(|(_, path)| path).collect()
}

/// Returns the inode and the path of a socket in a line of `/proc/PID/net/unix` (unix(7)). `None` if no process listens
/// on the socket, or if its path is not absolute.
fn listener_in_line(line: &str) -> Option<(&str, PathBuf)> {
    // The columns are Num, RefCount, Protocol, Flags, Type, St, Inode and Path.
    let mut columns = line.split_whitespace();
    let flags = u32::from_str_radix(columns.nth(3)?, 16).ok()?;
    let inode = columns.nth(2)?;
    let (_, path) = line.split_once(" /")?;
    (flags & LISTENS != 0).then(|| (inode, PathBuf::from(format!("/{path}"))))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(1);

    /// Answers the first call on the listener with `reply`.
    fn answer_once(listener: &UnixListener, reply: &str) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut byte = [1];
        while byte != [0] {
            stream.read_exact(&mut byte).unwrap();
        }
        stream.write_all(reply.as_bytes()).unwrap();
    }

    #[test]
    fn a_pjwd_that_answers_or_refuses_is_distinguished_from_one_that_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let (path, own) = (dir.path().join("s"), std::process::id());
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(check_answer(own, Some(&path), TIMEOUT), Answer::Missing);
        // The connection of the first check is still in the queue.
        drop(listener.accept().unwrap());
        for reply in ["{\"parameters\":{}}\0", "{\"error\":\"org.pjw.Warden.Busy\"}\0"] {
            std::thread::scope(|scope| {
                scope.spawn(|| answer_once(&listener, reply));
                // The time is long: the thread may have to wait for a CPU.
                let answer = check_answer(own, Some(&path), TIMEOUT * 60);
                assert_eq!(answer, Answer::OnSocket(path.clone()));
            });
        }
        assert_eq!(check_answer(own, Some(&dir.path().join("none")), TIMEOUT), Answer::Missing);
    }

    #[test]
    fn the_sockets_on_which_a_process_listens_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a socket");
        let listener = UnixListener::bind(&path).unwrap();
        let _connected = (UnixStream::connect(&path).unwrap(), listener.accept().unwrap());
        let own = |sockets: Vec<PathBuf>| sockets.into_iter().filter(|found| *found == path).count();
        assert_eq!(own(listening_sockets(std::process::id())), 1, "and not the accepted connection");
        drop(listener);
        assert_eq!(own(listening_sockets(std::process::id())), 0);
        assert_eq!(check_answer(u32::MAX >> 1, None, TIMEOUT), Answer::NoSocket, "no such process");
    }

    #[test]
    fn a_line_of_the_table_of_sockets_is_read() {
        let line =
            |flags: &str, rest: &str| format!("0000000000000000: 00000002 00000000 {flags} 0001 01 {rest}");
        let listens = line("00010000", "  812 /run/a b.sock");
        assert_eq!(listener_in_line(&listens), Some(("812", PathBuf::from("/run/a b.sock"))));
        for other in [
            line("00000000", "812 /run/connected"),
            line("00010000", "812 relative"),
            line("00010000", "812 @abstract"),
            line("00010000", "812"),
            "Num       RefCount Protocol Flags    Type St Inode Path".to_owned(),
            String::new(),
        ] {
            assert_eq!(listener_in_line(&other), None, "{other}");
        }
    }
}
