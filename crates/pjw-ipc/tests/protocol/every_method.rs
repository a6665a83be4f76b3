//! Two independent clients call every method. One of them reads the list of methods from the server.

use std::process::Command;

use pjw_ipc::call::{DefragReply, ExplainJobReply, ExplainPidReply, GetJobReply, PlanReply};
use pjw_ipc::report::Report;
use pjw_ipc::server::ServerLimits;
use pjw_ipc::wire::{Event, Job, Memory, Status, Topology};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use zlink::futures_util::stream::StreamExt;
use zlink::varlink_service::Proxy;

use super::fixture::TestServer;
use super::interface::{all_parameters, parsed_interface};

#[derive(Debug, PartialEq, zlink::ReplyError)]
#[zlink(interface = "org.pjw.Warden")]
enum Failure {
    Refused { message: String },
    NotAllowed { message: String },
    Busy { message: String },
}

macro_rules! replies {
    ($($name:ident { $field:ident: $type:ty })*) => {$(
        #[derive(Debug, Serialize, Deserialize)]
        struct $name {
            $field: $type,
        }
    )*};
}

replies! {
    StatusReply { status: Status }
    JobsReply { jobs: Vec<Job> }
    MemoryReply { memory: Memory }
    JobReply { job: Job }
    Released { released: Vec<String> }
    EventReply { event: Option<Event> }
    ReportsReply { reports: Vec<Report> }
    TopologyReply { topology: Topology }
    Changes { changes: Vec<String> }
}

#[zlink::proxy("org.pjw.Warden")]
trait Warden {
    async fn get_status(&mut self) -> zlink::Result<Result<StatusReply, Failure>>;
    async fn list_jobs(&mut self) -> zlink::Result<Result<JobsReply, Failure>>;
    async fn get_job(
        &mut self,
        job: &str,
        after: Option<i64>,
        limit: Option<i64>,
    ) -> zlink::Result<Result<GetJobReply, Failure>>;
    async fn get_memory(&mut self, job: &str) -> zlink::Result<Result<MemoryReply, Failure>>;
    async fn assign(
        &mut self,
        job: &str,
        cores: Option<i64>,
        pids: Option<Vec<i64>>,
    ) -> zlink::Result<Result<JobReply, Failure>>;
    async fn release(&mut self, job: &str) -> zlink::Result<Result<Released, Failure>>;
    async fn want(&mut self, job: &str, cores: Option<i64>) -> zlink::Result<Result<JobReply, Failure>>;
    async fn release_all(&mut self) -> zlink::Result<Result<Released, Failure>>;
    async fn explain_job(&mut self, job: &str) -> zlink::Result<Result<ExplainJobReply, Failure>>;
    async fn explain_pid(&mut self, pid: i64) -> zlink::Result<Result<ExplainPidReply, Failure>>;
    async fn plan(&mut self) -> zlink::Result<Result<PlanReply, Failure>>;
    async fn plan_defrag(&mut self) -> zlink::Result<Result<DefragReply, Failure>>;
    async fn defrag(&mut self) -> zlink::Result<Result<DefragReply, Failure>>;
    #[zlink(more)]
    async fn events(
        &mut self,
        follow: Option<bool>,
    ) -> zlink::Result<impl zlink::futures_util::Stream<Item = zlink::Result<Result<EventReply, Failure>>>>;
    async fn get_reports(
        &mut self,
        job: Option<&str>,
        last: Option<i64>,
    ) -> zlink::Result<Result<ReportsReply, Failure>>;
    async fn get_topology(&mut self) -> zlink::Result<Result<TopologyReply, Failure>>;
    async fn reload(&mut self) -> zlink::Result<Result<Changes, Failure>>;
}

#[test]
fn zlink_calls_every_method() {
    let server = TestServer::start(ServerLimits::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut warden = zlink::tokio::unix::connect(server.path()).await.unwrap();
        assert_eq!(warden.get_status().await.unwrap().unwrap().status.schema, 1);
        assert_eq!(warden.list_jobs().await.unwrap().unwrap().jobs[0].id, "manual:a");
        let detail = warden.get_job("b", None, Some(5)).await.unwrap().unwrap();
        assert_eq!((detail.members[0].comm.as_str(), detail.last_pid), ("a b) \n\"", Some(5)));
        let memory = warden.get_memory("b").await.unwrap().unwrap().memory;
        assert_eq!((memory.uss, memory.by_node["0"], memory.denied[0].pid), (Some(4096), 4096, 8));
        let job = warden.assign("b", Some(2), Some(vec![1, 2])).await.unwrap().unwrap().job;
        assert_eq!((job.id.as_str(), job.requested_cores), ("b", 2));
        assert_eq!(warden.release("b").await.unwrap().unwrap().released, ["b"]);
        assert_eq!(warden.want("b", Some(3)).await.unwrap().unwrap().job.wants, Some(3));
        assert_eq!(warden.release_all().await.unwrap().unwrap().released, ["manual:a"]);
        assert_eq!(warden.explain_job("b").await.unwrap().unwrap().cpus, "2-3");
        assert_eq!(warden.explain_pid(7).await.unwrap().unwrap().job, None);
        assert_eq!(warden.plan().await.unwrap().unwrap().actions[0].action, "pin");
        let (planned, done) = (warden.plan_defrag().await, warden.defrag().await);
        let reasons = [planned, done].map(|reply| reply.unwrap().unwrap().moves.remove(0).why);
        assert_eq!(reasons, ["it would lie on 1 L3 instead of 2", "it lies on 1 L3 instead of 2"]);
        let reports = warden.get_reports(Some("b"), Some(1)).await.unwrap().unwrap().reports;
        assert_eq!((reports[0].id.as_str(), reports[0].memory_peak), ("b", Some(1)));
        assert_eq!(warden.get_topology().await.unwrap().unwrap().topology.tree[0].children[0].kind, "core");
        assert_eq!(warden.reload().await.unwrap().unwrap().changes.len(), 1);
        let refused = warden.assign("refused", None, None).await.unwrap().unwrap_err();
        assert_eq!(refused, Failure::Refused { message: "there is no room".to_owned() });
        let forbidden = warden.assign("forbidden", None, None).await.unwrap().unwrap_err();
        assert_eq!(forbidden, Failure::NotAllowed { message: "it is not yours".to_owned() });
    });
}

#[test]
fn zlink_reads_a_stream_to_its_end_even_if_it_is_empty() {
    for event_count in [3, 0] {
        let server = TestServer::with_recorded_events(ServerLimits::default(), event_count);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut warden = zlink::tokio::unix::connect(server.path()).await.unwrap();
            let events: Vec<_> = warden.events(None).await.unwrap().collect().await;
            let texts = events.into_iter().filter_map(|reply| reply.unwrap().unwrap().event);
            let expected: Vec<String> = (0..event_count).map(|number| number.to_string()).collect();
            assert_eq!(texts.map(|event| event.text).collect::<Vec<_>>(), expected);
        });
    }
}

#[test]
fn zlink_reads_the_service_info_and_the_interface_description() {
    let server = TestServer::start(ServerLimits::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut connection = zlink::tokio::unix::connect(server.path()).await.unwrap();
        let info = connection.get_info().await.unwrap().unwrap();
        assert_eq!(info.version, env!("CARGO_PKG_VERSION"));
        let name = "org.pjw.Warden".try_into().unwrap();
        let description = connection.get_interface_description(name).await.unwrap().unwrap();
        assert_eq!(description.parse().unwrap(), parsed_interface());
    });
}

/// Calls every method that the server describes. The second argument has the parameters of each method in JSON.
const PYTHON: &str = r#"
import json, sys, varlink
samples = json.loads(sys.argv[2])
with varlink.Client.new_with_address("unix:" + sys.argv[1]) as client, client.open("org.pjw.Warden") as warden:
    interface = client.get_interface("org.pjw.Warden")
    methods = [name for name, member in interface.members.items() if type(member).__name__ == "_Method"]
    assert sorted(methods) == sorted(samples), methods
    for name in methods:
        if name != "Events":
            reply = getattr(warden, name)(**samples[name])
            assert reply, name
    assert [reply["event"]["text"] for reply in warden.Events(_more=True)] == ["0", "1", "2"]
    for job, error in [("refused", "Refused"), ("forbidden", "NotAllowed")]:
        try:
            warden.Assign(job)
            sys.exit("no error")
        except varlink.VarlinkError as caught:
            assert caught.error() == "org.pjw.Warden." + error, caught
            assert caught.parameters()["message"], caught
    assert warden.Release("b", _oneway=True) is None
    assert warden.GetStatus()["status"]["schema"] == 1
print("all called:", len(methods))
"#;

#[test]
fn python_calls_every_method_that_the_server_describes() {
    let python = std::env::var("PJW_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let probe = Command::new(&python).args(["-c", "import varlink"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        skip(&format!("{python} has no module varlink (make python installs it)"));
        return;
    }
    let server = TestServer::start(ServerLimits::default());
    let samples: serde_json::Map<String, Value> = parsed_interface()
        .methods()
        .map(|method| (method.name().as_str().to_owned(), Value::Object(all_parameters(method))))
        .collect();
    let expected = format!("all called: {}", samples.len());
    let samples = Value::Object(samples).to_string();
    let output = Command::new(&python).args(["-c", PYTHON]).arg(server.path()).arg(samples).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected);
}

/// Writes to stderr directly, because the captured output of a test is shown only if the test fails.
fn skip(why: &str) {
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("skipped: {why}\n"));
}
