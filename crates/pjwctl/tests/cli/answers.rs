//! The requests and the output of pjwctl with a daemon that sends given replies.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_ipc::call::{
    Call, DefragReply, ExplainJobReply, ExplainPidReply, GetJob, GetJobReply, JobParameter, PlanReply, Reply,
};
use pjw_ipc::report::Report;
use pjw_ipc::wire::{
    Abstained, Action, Core, Domain, Event, Fits, Job, Member, Memory, Move, ProcessMemory, Status, Thread,
    Topology,
};
use serde_json::{Value, json};

use super::daemon::{CallReplies, Daemon};
use super::{answer, assert_refused, pjwctl};

fn job() -> Job {
    Job {
        id: "manual:a".into(),
        source: "manual".into(),
        state: "running".into(),
        requested_cores: 1,
        cpus: "1".into(),
        since: "2026-05-04T12:00:00Z".into(),
        processes: 3,
        ..Job::default()
    }
}

fn member(pid: u32) -> Member {
    let thread = Thread { tid: pid, comm: "x".into(), ..Thread::default() };
    Member {
        pid,
        comm: "x".into(),
        evidence: "registered".into(),
        threads: vec![thread],
        ..Member::default()
    }
}

/// The memory of the processes 1 to 3. The processes 1 and 2 share an address space.
fn memory(nodes: Option<bool>) -> Memory {
    let process =
        |pid, space| ProcessMemory { pid, rss: 4096, address_space: Some(space), ..ProcessMemory::default() };
    let by_node = nodes.map(|_| ("0".to_owned(), 8192)).into_iter().collect();
    let processes = vec![process(1, 0), process(2, 0), process(3, 1)];
    Memory { source: "smaps".into(), rss: 8192, address_spaces: 2, by_node, processes, ..Memory::default() }
}

fn status() -> Status {
    let core = |n: u32| Core { cpus: n.to_string(), package: Some(0), numa_node: Some(0), l3: Some(0) };
    Status { schema: 1, jobs: vec![job()], cores: vec![core(0), core(1)], ..Status::default() }
}

fn event(text: &str) -> Event {
    let time = "2026-05-04T12:00:00Z".into();
    Event { time, event: "assigned".into(), job: "manual:a".into(), text: text.into(), ..Event::default() }
}

fn topology() -> Topology {
    let core = Domain { kind: "core".into(), cpus: "0-1".into(), ..Domain::default() };
    Topology { cores: 1, pus: 2, cpus: "0-1".into(), tree: vec![core], ..Topology::default() }
}

fn pid_reasons() -> ExplainPidReply {
    ExplainPidReply {
        pid: 7,
        job: None,
        membership_reasons: vec!["nobody claims it".into()],
        threads: vec![],
        last_tid: None,
    }
}

fn job_reasons() -> ExplainJobReply {
    let grant_reasons = vec!["it fits".into()];
    ExplainJobReply { job: "manual:a".into(), cpus: "1".into(), grant_reasons, second_best: String::new() }
}

fn report() -> Report {
    let advice = vec!["ask for `--cores 1`.".into()];
    Report { id: "manual:a".into(), verdict: Some("serial".into()), advice, ..Report::default() }
}

fn plan() -> PlanReply {
    let actions = vec![Action { action: "confine".into(), to: "1".into(), ..Action::default() }];
    PlanReply { actions, warnings: vec![Abstained { code: "stray".into(), ..Abstained::default() }] }
}

fn defrag_reply() -> DefragReply {
    let moved = Move { job: "manual:a".into(), from: "1".into(), to: "0".into(), why: "closer".into() };
    let fits = |l3| Fits { l3, ..Fits::default() };
    DefragReply { moves: vec![moved], largest_requests_before: fits(3), largest_requests_after: fits(6) }
}

/// A daemon with one job of three members, each on a page of its own.
fn daemon() -> Daemon {
    Daemon::start(|call| {
        CallReplies::reply(match call {
            Call::GetStatus => Reply::Status { status: Arc::new(status()) },
            Call::ListJobs => Reply::Jobs { jobs: vec![job()] },
            Call::GetJob(GetJob { after, .. }) => Reply::JobDetail(Box::new(GetJobReply {
                job: job(),
                members: vec![member(after.unwrap_or(0) + 1)],
                history: vec![event("1 core: 1").into()],
                last_pid: Some(after.unwrap_or(0) + 1).filter(|&last| last < 3),
                last_tid: None,
            })),
            Call::GetMemory(request) if request.estimate == Some(true) => {
                return CallReplies::refusal("the job has no memory cgroup of its own");
            }
            Call::GetMemory(request) => Reply::Memory { memory: Box::new(memory(request.nodes)) },
            Call::Assign(_) => Reply::Job { job: job() },
            Call::Want(want) => Reply::Job { job: Job { wants: want.cores.map(|n| n.min(4)), ..job() } },
            Call::Provision(request) => Reply::Job { job: Job { provision: request.rule.clone(), ..job() } },
            Call::Release(_) | Call::ReleaseAll => Reply::Released { released: vec!["manual:a".into()] },
            Call::ExplainJob(_) => Reply::JobReasons(job_reasons()),
            Call::ExplainPid(_) => Reply::PidReasons(pid_reasons()),
            Call::Plan => Reply::Plan(plan().into()),
            Call::PlanDefrag | Call::Defrag => Reply::Defrag(defrag_reply().into()),
            Call::Events(_) => {
                let events =
                    [event("first"), event("second")].map(|event| Reply::Event { event: event.into() });
                return CallReplies::stream(events.into(), false);
            }
            Call::GetReports(_) => Reply::Reports { reports: vec![report().into()] },
            Call::GetTopology => Reply::Topology { topology: topology() },
            Call::Reload => Reply::Reloaded { changes: vec!["interval: 1s → 2s".into()] },
        })
    })
}

#[test]
fn the_json_output_of_each_command_is_the_reply_of_the_daemon() {
    let daemon = daemon();
    let mut details = serde_json::to_value(job()).unwrap();
    details["members"] = json!([member(1), member(2), member(3)]);
    details["history"] = json!([event("1 core: 1")]);
    let cases: [(&[&str], Value); 13] = [
        (&["status"], json!(status())),
        (&["jobs"], json!([job()])),
        (&["show", "a"], details),
        (&["report", "a"], json!(report())),
        (&["report", "--last", "3"], json!([report()])),
        (&["jobs", "--ended"], json!([report()])),
        (&["explain", "7"], json!(pid_reasons())),
        (&["explain", "a"], json!(job_reasons())),
        (&["plan"], json!(plan())),
        (&["plan", "--defrag"], json!(defrag_reply())),
        (&["defrag"], json!(defrag_reply())),
        (&["topology"], json!(topology())),
        (&["assign", "a", "--cores", "1"], json!(job())),
    ];
    for (arguments, expected) in cases {
        let answer = answer(pjwctl(&daemon.socket(), arguments).arg("--json"));
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert_eq!(serde_json::from_str::<Value>(&answer.stdout).unwrap(), expected, "{arguments:?}");
    }
}

/// A page of `GetJob` may end between two threads of a process.
#[test]
fn the_threads_of_a_process_on_several_pages_are_printed_together() {
    let threads =
        |after: Option<u32>| vec![Thread { tid: after.map_or(1, |tid| tid + 1), ..Thread::default() }];
    let more = |after: Option<u32>| Some(after.map_or(1, |tid| tid + 1)).filter(|&tid| tid < 3);
    let daemon = Daemon::start(move |call| {
        CallReplies::reply(match call {
            Call::GetJob(request) => {
                let last = request.after == Some(7) && request.after_tid.is_none();
                let first_member = Member { threads: threads(request.after_tid), ..member(7) };
                Reply::JobDetail(Box::new(GetJobReply {
                    job: job(),
                    members: vec![if last { member(8) } else { first_member }],
                    history: vec![],
                    last_pid: Some(7).filter(|_| !last),
                    last_tid: more(request.after_tid).filter(|_| !last),
                }))
            }
            Call::GetMemory(_) => return CallReplies::refusal("the job has no memory cgroup of its own"),
            Call::ExplainPid(request) => Reply::PidReasons(ExplainPidReply {
                threads: threads(request.after_tid),
                last_tid: more(request.after_tid),
                ..pid_reasons()
            }),
            other => panic!("{other:?}"),
        })
    });
    let json_of = |arguments: &[&str]| {
        let answer = answer(&mut pjwctl(&daemon.socket(), arguments));
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        serde_json::from_str::<Value>(&answer.stdout).unwrap()
    };
    let tids = |threads: &Value| {
        threads.as_array().unwrap().iter().map(|thread| thread["tid"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let details = json_of(&["show", "a", "--json"]);
    assert_eq!((&details["members"][0]["pid"], &details["members"][1]["pid"]), (&json!(7), &json!(8)));
    assert_eq!(tids(&details["members"][0]["threads"]), [1, 2, 3]);
    let reasons = json_of(&["explain", "7", "--json"]);
    assert_eq!(tids(&reasons["threads"]), [1, 2, 3]);
    assert!(reasons.get("next_tid").is_none());
}

#[test]
fn every_command_that_reads_has_an_output_in_plain_text() {
    let daemon = daemon();
    let cases: [(&[&str], &str); 13] = [
        (&["status"], "a manual:a"),
        (&["jobs"], "a manual:a"),
        (&["show", "a"], "3 x of"),
        (&["report", "a"], "ask for `--cores 1`."),
        (&["report", "--last", "3"], "serial"),
        (&["jobs", "--ended"], "manual:a"),
        (&["explain", "7"], "- nobody claims it"),
        (&["explain", "a"], "manual:a: CPU 1"),
        (&["plan"], "restrict thread 0"),
        (&["plan", "--defrag"], "fits one L3: 3 now, 6 after"),
        (&["defrag"], "fits one L3: 3 before, 6 now"),
        (&["topology"], "1 core of 2 PUs"),
        (&["events"], "assigned   manual:a second"),
    ];
    for (arguments, expected) in cases {
        let answer = answer(&mut pjwctl(&daemon.socket(), arguments));
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(answer.stdout.contains(expected), "{arguments:?}: {}", answer.stdout);
        assert!(!answer.stdout.contains('\x1b'), "{arguments:?}: there are no colours in a pipe");
    }
}

#[test]
fn the_variables_for_colours_take_effect_and_json_has_no_colours() {
    let daemon = daemon();
    let coloured = |arguments: &[&str], variable: &str| {
        let mut command = pjwctl(&daemon.socket(), arguments);
        answer(command.env(variable, "1")).stdout.contains("\x1b[32m")
    };
    assert!(coloured(&["status"], "CLICOLOR_FORCE"));
    assert!(!coloured(&["status"], "NO_COLOR"));
    assert!(!coloured(&["status", "--json"], "CLICOLOR_FORCE"));
}

#[test]
fn events_in_json_are_one_object_in_each_line() {
    let answer = answer(&mut pjwctl(&daemon().socket(), &["events", "--json"]));
    let lines: Vec<Event> = answer.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines, [event("first"), event("second")]);
}

#[test]
fn the_options_of_assign_are_in_its_request() {
    let daemon = daemon();
    let line = "assign slurm:7 --cpus 0-1 --pid 5 --pid 6 --session 4 --policy explicit --class besteffort";
    let arguments: Vec<&str> = line.split(' ').collect();
    let assigned = answer(&mut pjwctl(&daemon.socket(), &arguments));
    assert_eq!((assigned.code, assigned.stdout.as_str()), (Some(0), "manual:a 1\n"), "{assigned:?}");
    answer(&mut pjwctl(
        &daemon.socket(),
        &["assign", "b", "--cores", "2", "--policy", "spread", "--smt", "pus", "--within-job", "ll"],
    ));
    let calls: Vec<Value> = daemon
        .calls()
        .into_iter()
        .map(|call| match call {
            Call::Assign(request) => json!(request),
            other => panic!("{other:?}"),
        })
        .collect();
    let first = json!({"job": "slurm:7", "cpus": "0-1", "pids": [5, 6], "session": 4, "class": "besteffort"});
    let second = json!({"job": "manual:b", "cores": 2, "policy": "spread", "smt": "pus", "within_job": "ll"});
    assert_eq!(calls, [first, second]);
}

#[test]
fn run_and_spawn_pass_the_unit_of_the_number_of_cores() {
    let daemon = daemon();
    for line in ["run --cores 2 --smt pus -- true", "spawn -n 2 --smt pus -- true"] {
        let arguments: Vec<&str> = line.split(' ').collect();
        answer(&mut pjwctl(&daemon.socket(), &arguments));
    }
    let units: Vec<_> = daemon
        .calls()
        .into_iter()
        .filter_map(|call| match call {
            Call::Assign(request) => Some((request.cores, request.smt)),
            _ => None,
        })
        .collect();
    let pus = (Some(2), Some("pus".to_owned()));
    assert_eq!(units, [pus.clone(), pus]);
    let refused =
        answer(&mut pjwctl(&daemon.socket(), &["spawn", "-n", "2", "--local", "--smt", "pus", "--", "true"]));
    assert_eq!(refused.code, Some(2), "{refused:?}");
}

#[test]
fn release_and_reload_print_their_results() {
    let daemon = daemon();
    let stdout_of = |arguments: &[&str]| answer(&mut pjwctl(&daemon.socket(), arguments)).stdout;
    assert_eq!(stdout_of(&["release", "a"]), "released manual:a\n");
    assert_eq!(stdout_of(&["release", "--all"]), "released manual:a\n");
    assert!(stdout_of(&["plan", "--defrag"]).contains("manual:a 1    0  closer"));
    assert!(stdout_of(&["defrag"]).contains("manual:a"));
    assert_eq!(stdout_of(&["reload"]), "interval: 1s → 2s\n");
    let release = Call::Release(JobParameter { job: "manual:a".into() });
    assert_eq!(daemon.calls(), [release, Call::ReleaseAll, Call::PlanDefrag, Call::Defrag, Call::Reload]);
}

#[test]
fn want_prints_the_number_of_cores_that_the_daemon_accepted() {
    let daemon = daemon();
    let stdout_of = |arguments: &[&str]| answer(&mut pjwctl(&daemon.socket(), arguments)).stdout;
    assert_eq!(stdout_of(&["want", "a", "2"]), "manual:a wants 2 cores\n");
    assert_eq!(
        stdout_of(&["want", "a", "9"]),
        "manual:a wants 4 cores (9 were asked for, and it may have 4)\n"
    );
    assert_eq!(stdout_of(&["want", "a", "default"]), "manual:a wants what it was granted\n");
    let json: Job = serde_json::from_str(&stdout_of(&["want", "a", "0", "--json"])).unwrap();
    assert_eq!(json.wants, Some(0));
    let wrong = answer(&mut pjwctl(&daemon.socket(), &["want", "a", "many"]));
    assert_eq!(wrong.code, Some(2), "{wrong:?}");
}

#[test]
fn a_refusal_is_printed_on_one_line_with_exit_code_one() {
    let daemon =
        Daemon::start(|_| CallReplies::refusal("0 cores were asked for:\nask for at least 1\x1b[2J"));
    let answer = answer(&mut pjwctl(&daemon.socket(), &["assign", "a", "--cores", "0"]));
    assert_refused(&answer, "0 cores were asked for: ask for at least 1\\u{1b}[2J");
}

#[test]
fn an_invalid_job_id_is_not_sent() {
    let daemon = daemon();
    let long = "x".repeat(10_000);
    for (id, reason) in
        [("a b", "' '"), (long.as_str(), "10000 characters"), ("", "empty"), ("slrm:1", "slrm")]
    {
        for verb in ["show", "release", "assign", "explain"] {
            assert_refused(&answer(&mut pjwctl(&daemon.socket(), &[verb, id])), reason);
        }
    }
    assert_refused(&answer(&mut pjwctl(&daemon.socket(), &["explain", "99999999999"])), "too large");
    assert_eq!(daemon.calls(), []);
}

#[test]
fn explain_of_an_unknown_process_id_that_is_the_name_of_a_job_gives_the_command_for_the_job() {
    let daemon = Daemon::start(|call| match call {
        Call::ExplainJob(JobParameter { job }) if job == "manual:12" => {
            CallReplies::reply(Reply::JobReasons(ExplainJobReply { job: job.clone(), ..job_reasons() }))
        }
        _ => CallReplies::refusal("there is no such thing"),
    });
    let explained = |subject| answer(&mut pjwctl(&daemon.socket(), &["explain", subject]));
    assert_refused(
        &explained("12"),
        "there is no such thing; there is a job of that name: pjwctl explain manual:12",
    );
    assert!(!explained("13").stderr.contains("a job of that name"));
}

#[test]
fn a_closed_pipe_ends_the_command_silently() {
    for is_followed in [true, false] {
        let daemon = Daemon::start(move |_| {
            let many = if is_followed { 1 } else { 100_000 };
            let event = || Reply::Event { event: event(&"x".repeat(100)).into() };
            CallReplies::stream((0..many).map(|_| event()).collect(), is_followed)
        });
        let mut arguments = vec!["events"];
        arguments.extend(is_followed.then_some("--follow"));
        let mut child = pjwctl(&daemon.socket(), &arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut reader = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert!(line.contains("assigned"), "{line}");
        drop(reader);
        let deadline = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the command still runs after its pipe was closed");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "follow: {is_followed}");
    }
}

#[test]
fn show_of_an_unknown_job_that_is_a_number_gives_the_command_for_the_process() {
    let daemon = Daemon::start(|call| match call {
        Call::GetJob(request) => CallReplies::refusal(&format!(
            "there is no job {0}: pjwctl jobs lists them; if it has ended: pjwctl report {0}",
            request.job
        )),
        other => panic!("{other:?}"),
    });
    let shown = |job: &str| answer(&mut pjwctl(&daemon.socket(), &["show", job])).stderr;
    let of_number = "there is no job manual:4711: pjwctl jobs lists them; if it has ended: pjwctl report manual:4711; \
                     for the process 4711: pjwctl explain 4711";
    assert_eq!(shown("4711"), format!("pjwctl: {of_number}\n"));
    let of_name =
        "there is no job manual:web: pjwctl jobs lists them; if it has ended: pjwctl report manual:web";
    assert_eq!(shown("web"), format!("pjwctl: {of_name}\n"));
}

#[test]
fn a_provision_is_printed_with_its_cores_and_its_rule_and_an_invalid_rule_is_refused() {
    let daemon = daemon();
    let provision = |more: &[&str]| {
        let arguments = [&["provision", "web", "--cores", "2"], more].concat();
        answer(&mut pjwctl(&daemon.socket(), &arguments))
    };
    let provisioned = provision(&["--match", "user=root,comm=nginx"]);
    assert_eq!(
        (provisioned.code, provisioned.stdout.as_str()),
        (Some(0), "manual:a 1 user=0,comm=nginx\n"),
        "{provisioned:?}"
    );
    let wrong = provision(&["--match", "nginx"]);
    assert!(wrong.stderr.contains("--match: \"nginx\" is not a condition"), "{wrong:?}");
    for (rule, expected) in [
        ("user=root", "--match: \"user=root\" alone matches every process of root, also those of the system"),
        ("cgroup=/", "--match: \"cgroup=/\" is the root of the cgroups, which every process matches"),
        (
            "cgroup=/../..",
            "--match: \"cgroup=/../..\" has an empty component, . or .. and matches no process",
        ),
    ] {
        assert_refused(&provision(&["--match", rule]), expected);
    }
    let unknown_user = provision(&["--match", "user=no-such-user"]);
    assert!(unknown_user.stderr.contains("names no user of this machine"), "{unknown_user:?}");
    let unknown = answer(&mut pjwctl(&daemon.socket(), &["unprovision", "web"]));
    assert!(unknown.stderr.contains("provision --list"), "{unknown:?}");
}

#[test]
fn show_reads_the_memory_of_a_job_on_request_and_names_shared_address_spaces() {
    let daemon = daemon();
    let shown = |arguments: &[&str]| {
        let answer = answer(&mut pjwctl(&daemon.socket(), arguments));
        assert_eq!((answer.code, answer.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        answer.stdout
    };
    let json = |arguments: &[&str]| serde_json::from_str::<Value>(&shown(arguments)).unwrap();
    let plain = json(&["show", "a", "--json"]);
    assert!(plain["memory"].is_null(), "there is no estimate: {plain}");
    let without = shown(&["show", "a"]);
    assert!(without.contains("memory: the job has no memory cgroup of its own"), "{without}");
    let with_memory = json(&["show", "a", "--memory", "--nodes", "--json"]);
    let spaces: Vec<&Value> = with_memory["memory"]["processes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|process| &process["address_space"])
        .collect();
    assert_eq!(spaces, [0, 0, 1]);
    assert_eq!(with_memory["memory"]["by_node"]["0"], 8192);
    assert!(shown(&["show", "a", "--memory"]).contains("same address space as 2"), "process 1");
    let alone = answer(&mut pjwctl(&daemon.socket(), &["show", "a", "--nodes"]));
    assert_eq!(alone.code, Some(2), "{alone:?}");
}

#[test]
fn the_text_about_a_job_without_processes_does_not_mention_memory() {
    let daemon = Daemon::start(|call| match call {
        Call::GetJob(_) => CallReplies::reply(Reply::JobDetail(Box::new(GetJobReply {
            job: Job { processes: 0, ..job() },
            members: vec![],
            history: vec![],
            last_pid: None,
            last_tid: None,
        }))),
        other => CallReplies::refusal(&format!("unexpected: {other:?}")),
    });
    let shown = answer(&mut pjwctl(&daemon.socket(), &["show", "a"]));
    assert_eq!((shown.code, shown.stdout.contains("memory")), (Some(0), false), "{shown:?}");
}
