//! A service that gives a complete reply to every method, and a server for it on a socket of its own.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pjw_ipc::bind::bind;
use pjw_ipc::call::{
    Call, CallError, DefragReply, ExplainJobReply, ExplainPidReply, GetJobReply, PlanReply, Reply,
};
use pjw_ipc::report::Report;
use pjw_ipc::server::{Peer, Replies, ServerLimits, Service, serve};
use pjw_ipc::wire::{
    Abstained, Action, Core, CoreKind, Device, Domain, Event, FarMemory, Fits, Job, Member, Memory,
    MemoryDenied, MemorySample, Move, ProcessMemory, Status, Thread, Topology, Warning,
};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

/// The longest time for which a test waits. Only a test that fails waits so long.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Replies to all calls. Some names of jobs have a special meaning: `refused`, `forbidden`, and `slow`, which gets
/// its reply only after the gate is opened.
struct TestService {
    recorded_event_count: usize,
    gate: watch::Receiver<bool>,
    call_count: watch::Sender<usize>,
    streams: watch::Sender<usize>,
}

impl Service for TestService {
    async fn call(&self, peer: Peer, call: Call, _more: bool) -> Result<Replies, CallError> {
        self.call_count.send_modify(|call_count| *call_count += 1);
        let reply = match call {
            Call::GetStatus => Reply::Status { status: Arc::new(status(peer)) },
            Call::ListJobs => Reply::Jobs { jobs: vec![job("manual:a")] },
            Call::GetJob(request) => Reply::JobDetail(Box::new(GetJobReply {
                job: job(&request.job),
                members: vec![member()],
                history: vec![event(0).into()],
                last_pid: request.limit,
                last_tid: request.after_tid,
            })),
            Call::GetMemory(request) => Reply::Memory { memory: Box::new(memory(&request.job)) },
            Call::Assign(request) => match request.job.as_str() {
                "refused" => return Err(CallError::Refused("there is no room".to_owned())),
                "forbidden" => return Err(CallError::NotAllowed("it is not yours".to_owned())),
                name => {
                    if name == "slow" {
                        let _ = self.gate.clone().wait_for(|open| *open).await;
                    }
                    let requested_cores = request.cores.unwrap_or_default();
                    Reply::Job { job: Job { requested_cores, ..job(name) } }
                }
            },
            Call::Release(request) => Reply::Released { released: vec![request.job] },
            Call::Want(request) => Reply::Job { job: Job { wants: request.cores, ..job(&request.job) } },
            Call::Provision(request) => {
                Reply::Job { job: Job { provision: request.rule.clone(), ..job(&request.job) } }
            }
            Call::ReleaseAll => Reply::Released { released: vec!["manual:a".to_owned()] },
            Call::ExplainJob(request) => Reply::JobReasons(ExplainJobReply {
                job: request.job,
                cpus: "2-3".to_owned(),
                grant_reasons: vec!["it asked for two cores".to_owned()],
                second_best: String::new(),
            }),
            Call::ExplainPid(request) => Reply::PidReasons(ExplainPidReply {
                pid: request.pid,
                job: None,
                membership_reasons: vec!["it belongs to no job".to_owned()],
                threads: vec![thread()],
                last_tid: request.after_tid,
            }),
            Call::Plan => {
                Reply::Plan(Arc::new(PlanReply { actions: vec![action()], warnings: vec![abstained()] }))
            }
            Call::PlanDefrag => Reply::Defrag(Arc::new(defrag_reply("it would lie on 1 L3 instead of 2"))),
            Call::Defrag => Reply::Defrag(Arc::new(defrag_reply("it lies on 1 L3 instead of 2"))),
            Call::Events(request) => {
                return Ok(Replies::Stream(self.events(request.follow.unwrap_or(false))));
            }
            Call::GetReports(request) => {
                let report =
                    Report { id: request.job.unwrap_or_default(), memory_peak: Some(1), ..Report::default() };
                Reply::Reports { reports: vec![Arc::new(Report { advice: vec!["a".to_owned()], ..report })] }
            }
            Call::GetTopology => Reply::Topology { topology: topology() },
            Call::Reload => Reply::Reloaded { changes: vec!["interval is 2s now".to_owned()] },
        };
        Ok(Replies::Single(Box::new(reply)))
    }
}

impl TestService {
    /// The recorded events. A stream with `follow` gets no further events, and is counted until it ends.
    fn events(&self, follow: bool) -> mpsc::Receiver<Reply> {
        let (events, receiver) = mpsc::channel(4);
        let (recorded_event_count, streams) = (self.recorded_event_count, self.streams.clone());
        tokio::task::spawn_local(async move {
            streams.send_modify(|streams| *streams += 1);
            for number in 0..recorded_event_count {
                if events.send(Reply::Event { event: event(number).into() }).await.is_err() {
                    break;
                }
            }
            if follow {
                events.closed().await;
            }
            streams.send_modify(|streams| *streams -= 1);
        });
        receiver
    }
}

fn status(peer: Peer) -> Status {
    Status {
        schema: 1,
        pid: peer.pid.and_then(|pid| pid.try_into().ok()).unwrap_or_default(),
        jobs: vec![Job { owner: peer.uid, ..job("manual:a") }],
        warnings: vec![Warning { code: "oversubscribed".to_owned(), ..Warning::default() }],
        cores: vec![Core { cpus: "0,8".to_owned(), l3: Some(0), ..Core::default() }],
        ..Status::default()
    }
}

fn memory(job: &str) -> Memory {
    let by_node = BTreeMap::from([("0".to_owned(), 4096)]);
    let process = ProcessMemory { pid: 7, rss: 4096, by_node: by_node.clone(), ..ProcessMemory::default() };
    let denied = MemoryDenied { pid: 8, uid: 0, why: "only root may read it".to_owned() };
    Memory {
        source: "smaps".to_owned(),
        uss: Some(4096),
        by_node,
        processes: vec![process],
        denied: vec![denied],
        history: vec![MemorySample::default()],
        far: vec![FarMemory { thread_nodes: vec![0], ..FarMemory::default() }],
        warning: Some(Warning { code: "memory".to_owned(), job: job.to_owned(), ..Warning::default() }),
        ..Memory::default()
    }
}

fn job(id: &str) -> Job {
    Job { id: id.to_owned(), cpus: "2-3".to_owned(), ..Job::default() }
}

fn member() -> Member {
    Member { pid: 7, comm: "a b) \n\"".to_owned(), threads: vec![thread()], ..Member::default() }
}

fn thread() -> Thread {
    Thread { tid: 7, pinned: Some(2), ..Thread::default() }
}

fn action() -> Action {
    Action { action: "pin".to_owned(), ..Action::default() }
}

fn abstained() -> Abstained {
    Abstained { code: "unknown-count".to_owned(), pid: Some(7), ..Abstained::default() }
}

fn defrag_reply(why: &str) -> DefragReply {
    let moved = Move { job: "manual:a".to_owned(), why: why.to_owned(), ..Move::default() };
    let largest_requests_after = Fits { l3: 2, ..Fits::default() };
    DefragReply { moves: vec![moved], largest_requests_before: Fits::default(), largest_requests_after }
}

fn topology() -> Topology {
    let core = Domain { kind: "core".to_owned(), ..Domain::default() };
    Topology {
        smt: vec![2],
        core_kinds: vec![CoreKind::default()],
        devices: vec![Device { names: vec![String::new()], numa_nodes: vec![0], ..Device::default() }],
        fits: Some(Fits::default()),
        tree: vec![Domain { fits: Some(1), children: vec![core], ..Domain::default() }],
        ..Topology::default()
    }
}

fn event(number: usize) -> Event {
    Event { text: number.to_string(), tid: Some(7), ..Event::default() }
}

/// A server that runs until it is stopped or dropped.
pub(crate) struct TestServer {
    path: PathBuf,
    stop: watch::Sender<bool>,
    gate: watch::Sender<bool>,
    call_count: watch::Receiver<usize>,
    streams: watch::Receiver<usize>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl TestServer {
    pub(crate) fn start(limits: ServerLimits) -> Self {
        Self::with_recorded_events(limits, 3)
    }

    /// A server with `recorded_event_count` recorded events.
    pub(crate) fn with_recorded_events(limits: ServerLimits, recorded_event_count: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let owned = bind(&path).unwrap();
        let (stop, stopped) = watch::channel(false);
        let (gate, opened) = watch::channel(false);
        let (call_count, counted_calls) = watch::channel(0);
        let (streams, counted_streams) = watch::channel(0);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let service = Rc::new(TestService { recorded_event_count, gate: opened, call_count, streams });
            let serving = serve(owned.dup_listener().unwrap(), service, limits, stopped);
            tokio::task::LocalSet::new().block_on(&runtime, serving).unwrap();
        });
        Self {
            path,
            stop,
            gate,
            call_count: counted_calls,
            streams: counted_streams,
            thread: Some(thread),
            _dir: dir,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn connect(&self) -> RawClient {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        RawClient(stream)
    }

    /// Releases the replies to `slow` calls.
    pub(crate) fn open_gate(&self) {
        self.gate.send(true).unwrap();
    }

    /// Waits until `calls` calls of `slow` wait at the gate.
    pub(crate) fn wait_for_slow_calls(&self, calls: usize) {
        // The service itself has one receiver.
        wait_until("the calls that wait are as many as expected", || self.gate.receiver_count() == calls + 1);
    }

    pub(crate) fn request_stop(&self) {
        self.stop.send(true).unwrap();
    }

    /// Waits until `calls` calls have reached the service.
    pub(crate) fn wait_for_calls(&self, calls: usize) {
        wait_until("the calls arrive", || *self.call_count.borrow() >= calls);
    }

    /// Waits until `streams` streams are open.
    pub(crate) fn wait_for_streams(&self, streams: usize) {
        wait_until("the streams are as many as expected", || *self.streams.borrow() == streams);
    }

    pub(crate) fn wait_for_end(&mut self) {
        if let Some(thread) = self.thread.take() {
            wait_until("the server ends", || thread.is_finished());
            thread.join().unwrap();
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let _ = self.gate.send(true);
        let _ = self.stop.send(true);
        if !std::thread::panicking() {
            self.wait_for_end();
        }
    }
}

/// Waits until a condition holds. `what` describes it for the message of a failure.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A client that sends the given bytes.
pub(crate) struct RawClient(pub(crate) UnixStream);

impl RawClient {
    /// Sends a message with the zero byte at its end.
    pub(crate) fn send(&mut self, text: &str) {
        self.0.write_all(format!("{text}\0").as_bytes()).unwrap();
    }

    /// Reads one reply. Returns `None` if the server closed the connection.
    pub(crate) fn receive(&mut self) -> Option<Value> {
        let mut bytes = Vec::new();
        let mut byte = [0];
        loop {
            match self.0.read(&mut byte) {
                Ok(0) => return None,
                Ok(_) if byte[0] == 0 => return Some(serde_json::from_slice(&bytes).unwrap()),
                Ok(_) => bytes.push(byte[0]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Sends a message, and returns the reply to it.
    pub(crate) fn exchange(&mut self, text: &str) -> Value {
        self.send(text);
        self.receive().expect("an answer")
    }

    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.exchange(&json!({ "method": method, "parameters": parameters }).to_string())
    }
}
