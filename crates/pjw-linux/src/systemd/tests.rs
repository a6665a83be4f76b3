//! The client against a bus that is nobody's, and against peers that behave as none should.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;

fn scope() -> Scope {
    Scope {
        unit: "pjw-a.scope".to_owned(),
        slice: "pjw.slice".to_owned(),
        description: String::new(),
        founders: vec![Pid(1)],
        cpus: CpuSet::from(pjw_core::cpuset::Pu(3)),
        mems: None,
    }
}

#[test]
fn a_set_is_bytes_with_the_lowest_bits_first() {
    let set = |text: &str| bytes(&text.parse().unwrap());
    assert_eq!(set("0,2,9"), [0b101, 0b10]);
    assert_eq!(set("64"), [0, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(set("1031").len(), 129);
    assert_eq!(set(""), [0; 0]);
}

#[test]
fn nobody_where_systemd_should_be_is_told_with_the_place() {
    let mut manager = Manager::behind(vec![
        Door::Bus(PathBuf::from("/nonexistent/bus")),
        Door::Direct(PathBuf::from("/nonexistent/private")),
    ]);
    let said = manager.stop("pjw-a.scope").unwrap_err().to_string();
    assert!(said.contains("can't be reached") && said.contains("/nonexistent/private"), "{said}");
}

/// A peer that does to each connection what it is told to.
fn peer(dir: &Path, does: impl Fn(UnixStream) + Send + 'static) -> Door {
    let path = dir.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || listener.incoming().flatten().for_each(does));
    Door::Direct(path)
}

/// The greeting as systemd answers it; then the peer's messages.
fn greeted(stream: UnixStream) -> BufReader<UnixStream> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let user: String = nix::unistd::geteuid().to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(line, format!("\0AUTH EXTERNAL {user}\r\n"));
    line.clear();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line, "BEGIN\r\n");
    reader.get_mut().write_all(b"OK 0123456789abcdef0123456789abcdef\r\n").unwrap();
    reader
}

#[test]
fn who_never_answers_is_silent_and_not_asked_again_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let (count, calls) = std::sync::mpsc::channel();
    let held = std::sync::Mutex::new(Vec::new());
    let door = peer(dir.path(), move |stream| {
        count.send(()).unwrap();
        held.lock().unwrap().push(stream);
    });
    let mut manager = Manager::behind(vec![door]);
    for _ in 0..50 {
        assert_eq!(manager.stop("pjw-a.scope"), Err(Fault::Silent));
    }
    assert_eq!(calls.try_iter().count(), 1);
}

#[test]
fn who_takes_no_connection_is_silent_too() {
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(std::os::fd::AsRawFd::as_raw_fd(&listener), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    // Nobody accepts: once the queue is full, connecting itself waits.
    let _first = UnixStream::connect(&path).unwrap();
    let stop = Request::Stop { unit: String::new() };
    let called = talk::call(&Door::Direct(path), &stop, Duration::from_millis(50));
    assert_eq!(called, Err(Fault::Silent));
}

#[test]
fn nonsense_and_a_hang_up_are_told_apart_from_silence() {
    let words: [(&[u8], &str); 4] = [
        (b"REJECTED EXTERNAL\r\n", "does not know this user"),
        (&[b'x'; 4000], "speaks no D-Bus"),
        (b"", "hung up"),
        (b"OK 00\r\nHTTP/1.1 400 Bad Request", "no message"),
    ];
    for (answer, expected) in words {
        let dir = tempfile::tempdir().unwrap();
        let door = peer(dir.path(), move |mut stream| {
            let _ = stream.read(&mut [0; 256]);
            let _ = stream.write_all(answer);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let said = Manager::behind(vec![door]).stop("pjw-a.scope").unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
}

/// The error that answers call 1.
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
fn an_older_systemd_is_asked_without_what_it_does_not_know() {
    let dir = tempfile::tempdir().unwrap();
    let (tell, asked) = std::sync::mpsc::channel();
    let door = peer(dir.path(), move |stream| {
        let mut reader = greeted(stream);
        let mut call = vec![0; 1024];
        let length = reader.read(&mut call).unwrap();
        let text = String::from_utf8_lossy(&call[..length]).into_owned();
        let knows_all = !text.contains("OOMPolicy");
        tell.send(text).unwrap();
        let name = if knows_all {
            "org.freedesktop.systemd1.UnitExists"
        } else {
            "org.freedesktop.DBus.Error.PropertyReadOnly"
        };
        reader.get_mut().write_all(&error(name)).unwrap();
    });
    assert_eq!(Manager::behind(vec![door]).start(&scope()), Err(Fault::Exists));
    let asked: Vec<String> = asked.try_iter().collect();
    let has = |word: &str| asked.iter().map(|text| text.contains(word)).collect::<Vec<_>>();
    assert_eq!(has("OOMPolicy"), [true, false]);
    for word in
        ["StartTransientUnit", "pjw-a.scope", "PIDs", "AllowedCPUs", "DelegateControllers", "TasksMax"]
    {
        assert_eq!(has(word), [true, true], "{word}");
    }
}

/// A message bus without systemd on it.
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

    fn door(&self) -> Door {
        Door::Bus(self.1.path().join("bus"))
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_bus_without_systemd_is_told_from_one_that_is_not_there() {
    let Some(bus) = Bus::start() else { return };
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        // The bus answers only if greeting, Hello and the call itself are as the specification wants them.
        let said = Manager::behind(vec![bus.door()]).start(&scope()).unwrap_err().to_string();
        if said.contains("org.freedesktop.systemd1") {
            break;
        }
        assert!(Instant::now() < deadline, "{said}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
