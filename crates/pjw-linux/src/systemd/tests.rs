//! The client with a private message bus, and with misbehaving peers.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;

fn scope() -> TransientScope {
    TransientScope {
        unit: "pjw-a.scope".to_owned(),
        slice: "pjw.slice".to_owned(),
        description: String::new(),
        pids: vec![Pid(1)],
        cpus: CpuSet::from(pjw_core::cpuset::Pu(3)),
        mems: None,
    }
}

#[test]
fn a_set_is_encoded_with_the_lowest_bits_first() {
    let set = |text: &str| bit_mask(&text.parse().unwrap());
    assert_eq!(set("0,2,9"), [0b101, 0b10]);
    assert_eq!(set("64"), [0, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(set("1031").len(), 129);
    assert_eq!(set(""), [0; 0]);
}

#[test]
fn a_missing_socket_is_reported_with_its_path() {
    let mut manager = SystemdClient::with_addresses(vec![
        Address::Bus(PathBuf::from("/nonexistent/bus")),
        Address::Direct(PathBuf::from("/nonexistent/private")),
    ]);
    let said = manager.stop_unit("pjw-a.scope").unwrap_err().to_string();
    assert!(said.contains("can't be reached") && said.contains("/nonexistent/private"), "{said}");
}

/// A peer that passes each connection to a function.
fn peer(dir: &Path, does: impl Fn(UnixStream) + Send + 'static) -> Address {
    let path = dir.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || listener.incoming().flatten().for_each(does));
    Address::Direct(path)
}

/// Accepts the authentication as systemd does. Returns the stream of the following messages.
fn greeted(stream: UnixStream) -> BufReader<UnixStream> {
    let mut reader = BufReader::new(stream);
    let mut connection = String::new();
    reader.read_line(&mut connection).unwrap();
    let user: String = nix::unistd::geteuid().to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(connection, format!("\0AUTH EXTERNAL {user}\r\n"));
    connection.clear();
    reader.read_line(&mut connection).unwrap();
    assert_eq!(connection, "BEGIN\r\n");
    reader.get_mut().write_all(b"OK 0123456789abcdef0123456789abcdef\r\n").unwrap();
    reader
}

#[test]
fn a_peer_without_reply_is_a_timeout_and_is_not_called_again_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let (count, calls) = std::sync::mpsc::channel();
    let held = std::sync::Mutex::new(Vec::new());
    let address = peer(dir.path(), move |stream| {
        count.send(()).unwrap();
        held.lock().unwrap().push(stream);
    });
    let mut manager = SystemdClient::with_addresses(vec![address]);
    for _ in 0..50 {
        assert_eq!(manager.stop_unit("pjw-a.scope"), Err(SystemdError::NoReply));
    }
    assert_eq!(calls.try_iter().count(), 1);
}

#[test]
fn a_peer_that_accepts_no_connection_is_a_timeout() {
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(std::os::fd::AsRawFd::as_raw_fd(&listener), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    // No connection is accepted. Once the queue is full, connect(2) itself waits.
    let _first = UnixStream::connect(&path).unwrap();
    let stop = MethodCall::manager_method("StopUnit", CallArguments::default().text(""));
    let called = connection::call_systemd(&Address::Direct(path), &stop, Duration::from_millis(50));
    assert_eq!(called, Err(SystemdError::NoReply));
}

#[test]
fn malformed_replies_and_closed_connections_are_no_timeouts() {
    let words: [(&[u8], &str); 4] = [
        (b"REJECTED EXTERNAL\r\n", "rejects this user"),
        (&[b'x'; 4000], "does not speak D-Bus"),
        (b"", "closed the connection"),
        (b"OK 00\r\nHTTP/1.1 400 Bad Request", "malformed message"),
    ];
    for (answer, expected) in words {
        let dir = tempfile::tempdir().unwrap();
        let address = peer(dir.path(), move |mut stream| {
            let _ = stream.read(&mut [0; 256]);
            let _ = stream.write_all(answer);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let said =
            SystemdClient::with_addresses(vec![address]).stop_unit("pjw-a.scope").unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
}

/// An error reply to call 1.
fn error(name: &str) -> Vec<u8> {
    let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(8), 0);
    let mut fields = vec![5, 1, b'u', 0, 1, 0, 0, 0, 4, 1, b's', 0];
    fields.extend(u32::try_from(name.len()).unwrap().to_le_bytes());
    fields.extend(name.as_bytes());
    fields.push(0);
    let mut bytes = vec![b'l', 3, 1, 1, 0, 0, 0, 0, 9, 0, 0, 0];
    bytes.extend(u32::try_from(fields.len()).unwrap().to_le_bytes());
    bytes.extend(fields);
    pad(&mut bytes);
    bytes
}

#[test]
fn an_older_systemd_is_called_without_unknown_properties() {
    let dir = tempfile::tempdir().unwrap();
    let (sender, requests) = std::sync::mpsc::channel();
    let address = peer(dir.path(), move |stream| {
        let mut reader = greeted(stream);
        let mut call = vec![0; 1024];
        let length = reader.read(&mut call).unwrap();
        let text = String::from_utf8_lossy(&call[..length]).into_owned();
        let knows_all = !text.contains("OOMPolicy");
        sender.send(text).unwrap();
        let name = if knows_all {
            "org.freedesktop.systemd1.UnitExists"
        } else {
            "org.freedesktop.DBus.Error.PropertyReadOnly"
        };
        reader.get_mut().write_all(&error(name)).unwrap();
    });
    assert_eq!(
        SystemdClient::with_addresses(vec![address]).start_scope(&scope()),
        Err(SystemdError::UnitExists)
    );
    let requests: Vec<String> = requests.try_iter().collect();
    let has = |word: &str| requests.iter().map(|text| text.contains(word)).collect::<Vec<_>>();
    assert_eq!(has("OOMPolicy"), [true, false]);
    for word in
        ["StartTransientUnit", "pjw-a.scope", "PIDs", "AllowedCPUs", "DelegateControllers", "TasksMax"]
    {
        assert_eq!(has(word), [true, true], "{word}");
    }
}

/// A private message bus without systemd.
struct Bus(Child, tempfile::TempDir);

impl Bus {
    fn start() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("bus");
        let config = dir.path().join("bus.conf");
        let text = format!(
            "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\" \
             \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\"><busconfig><listen>unix:path={}</listen>\
             <auth>EXTERNAL</auth><policy context=\"default\"><allow send_destination=\"*\"/><allow receive_sender=\"*\"/><allow own=\"*\"/>\
             </policy></busconfig>",
            socket.display()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new("dbus-daemon");
        command.arg(format!("--config-file={}", config.display())).args(["--nofork", "--nopidfile"]);
        match command.stdout(Stdio::null()).spawn() {
            Ok(child) => Some(Self(child, dir)),
            Err(fault) => {
                let _ = writeln!(std::io::stderr(), "skipped: dbus-daemon: {fault}");
                None
            }
        }
    }

    fn address(&self) -> Address {
        Address::Bus(self.1.path().join("bus"))
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_bus_without_systemd_differs_from_a_missing_bus() {
    let Some(bus) = Bus::start() else { return };
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        // The bus replies only if authentication, Hello and the call follow the specification.
        let said =
            SystemdClient::with_addresses(vec![bus.address()]).start_scope(&scope()).unwrap_err().to_string();
        if said.contains("org.freedesktop.systemd1") {
            break;
        }
        assert!(Instant::now() < deadline, "{said}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
