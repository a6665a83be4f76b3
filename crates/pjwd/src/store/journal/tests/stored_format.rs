//! The stored format of the journal: `records.jsonl` has an example of each kind of record, with every field. A daemon
//! reads what an earlier one wrote, so the names in it stay when a type or a field gets another name.
//!
//! Each example is here as a value too, with all its fields: a new field or a new kind does not compile, or has no
//! example.

use std::collections::BTreeSet;

use pjw_core::cpuset_group::{CgroupCreator, CpusetSpec, JobCpuset};
use pjw_core::evidence::MembershipEvidence;
use pjw_core::ids::{Pid, ProcessId, StartTime, ThreadId, Tid};
use pjw_core::job::{
    CpuRequest, Grant, GrantedBy, JobSource, Ownership, Placement, PriorityClass, Provision, ProvisionRule,
    WantedCores,
};
use pjw_core::record::{CpusetRecord, JobMembership, ReleasedJobMask, ReleasedJobMasks, UnknownOriginMasks};
use pjw_core::testing::{cpu_set, pjw_grant};
use pjw_core::time::Nanos;
use pjw_core::usage::{JobUsage, SharedMemory, TimeHistogram};

use super::*;

/// The examples, one in a line, in the order of [`examples`].
const STORED: &str = include_str!("records.jsonl");
const PROCESS: ProcessId = ProcessId { pid: Pid(71), start: StartTime(72) };
const THREAD: ThreadId = ThreadId { process: PROCESS, tid: Tid(73), start: StartTime(74) };

/// Returns all kinds of an enum, and a function that returns the kind of a value. Without one of the kinds, this does
/// not compile.
macro_rules! kinds_of {
    ($type:ident: $($kind:ident),+) => {{
        fn kind(value: &$type) -> &'static str {
            match value { $($type::$kind { .. } => stringify!($kind)),+ }
        }
        (BTreeSet::from([$(stringify!($kind)),+]), kind)
    }};
}

/// Asserts that each value of an enum is stored as this text and read again. Without one of the values, this does not
/// compile.
macro_rules! assert_stored_as {
    ($type:ident: $($kind:ident $(($content:expr))? = $text:literal),+) => {
        let _all_kinds = |value: &$type| match value { $($type::$kind { .. } => ()),+ };
        $(
            let value = $type::$kind $(($content))?;
            assert_eq!(serde_json::to_string(&value).unwrap(), $text);
            assert_eq!(serde_json::from_str::<$type>($text).unwrap(), value);
        )+
    };
}

fn job_id() -> JobId {
    "slurm:7".parse().unwrap()
}

fn job_cpuset_path() -> String {
    "/pjw.slice/slurm-7".to_owned()
}

fn full_job() -> Job {
    let request = JobRequest {
        cpu_request: CpuRequest::Cores(2),
        placement: Placement::Spread,
        class: PriorityClass::Guaranteed,
        near_device: Some("ib0".to_owned()),
        bind_memory: true,
        isolated: true,
        within_job: NumaNodeRule::RoundRobin,
    };
    let grant = Grant {
        cpus: cpu_set("2-3"),
        granted_by: GrantedBy::Scheduler,
        is_shared: true,
        may_split_cores: true,
        granted_at: Nanos(1),
        reasons: vec!["they are close together".to_owned()],
        second_best: "CPUs 4-5".to_owned(),
        ownership: Ownership::Borrowed,
    };
    let rule = ProvisionRule {
        user: Some(Uid(33)),
        comm: Some("nginx".to_owned()),
        cgroup: Some("/system.slice".to_owned()),
        unit: Some("nginx.service".to_owned()),
    };
    Job {
        id: job_id(),
        owner: Uid(1000),
        request: Some(request),
        grant: Some(grant),
        end_condition: EndCondition::Release,
        cgroup: Some("/slurm/job_7".to_owned()),
        sessions: BTreeSet::from([Pid(70)]),
        detected_at: UnixMillis(2),
        empty_since: Some(Nanos(3)),
        was_released: true,
        started_by_pjwctl_run: true,
        wanted_cores: Some(WantedCores { count: 4, given_at: Nanos(5) }),
        provision: Some(Box::new(Provision { rule: Some(rule), from_config: true })),
    }
}

fn full_usage() -> JobUsage {
    let (mut crowded_threads, mut levels) = (TimeHistogram::default(), TimeHistogram::default());
    crowded_threads.add(17, 34);
    levels.add(32, 33);
    JobUsage {
        began_at: Nanos(1),
        read_until: Nanos(2),
        cpu_ns: 3,
        ended_cpu_ns: 4,
        sampled_ns: 5,
        held_ns: 6,
        stranded_ns: 7,
        serial_ns: 8,
        open_serial_ns: 9,
        serial_phases: 10,
        serial_longest_ns: 11,
        asleep_ns: 12,
        without_pus_ns: 13,
        without_pus_cpu_ns: 35,
        crowded_ns: 14,
        crowded_wanted_ns: 15,
        crowded_threads,
        bound_ns: 18,
        displaced_ns: 19,
        threads_max: 20,
        threads_ns: 21,
        cores_max: 22,
        pus_max: 23,
        repairs: 24,
        violations: 25,
        memory_peak: Some(26),
        memory_limit: Some(27),
        largest_pss: Some(28),
        largest_rss: Some(29),
        shared: Some(SharedMemory { permille: 30, is_estimate: true }),
        tasks: Some(31),
        levels,
    }
}

fn cpuset_examples() -> Vec<CpusetRecord> {
    let spec = CpusetSpec {
        cpus: cpu_set("2-3"),
        mems: Some(cpu_set("0")),
        isolated: true,
        idle: true,
        frozen: true,
    };
    let (path, from) = (job_cpuset_path(), "/user.slice".to_owned());
    let job_cpuset =
        JobCpuset { job: job_id(), creator: CgroupCreator::Systemd, path: job_cpuset_path(), spec };
    vec![
        CpusetRecord::Created(job_cpuset),
        CpusetRecord::Unwanted { path: path.clone() },
        CpusetRecord::Removed { path: path.clone() },
        CpusetRecord::Moved { process: PROCESS, from: from.clone(), to: path.clone() },
        CpusetRecord::Origin { path, from },
    ]
}

fn unknown_mask_examples() -> Vec<UnknownMaskRecord> {
    let mask = UnknownOriginMasks {
        first_thread: Some(cpu_set("2")),
        other_threads: BTreeSet::from([cpu_set("3")]),
    };
    vec![
        UnknownMaskRecord::RecordsLost,
        UnknownMaskRecord::SearchBegun { recorded: BTreeSet::from([PROCESS]) },
        UnknownMaskRecord::Searched,
        UnknownMaskRecord::Found { process: PROCESS, mask },
        UnknownMaskRecord::Settled { process: PROCESS },
        UnknownMaskRecord::CpusetFound { job: job_id(), cpus: cpu_set("2-3") },
        UnknownMaskRecord::CpusetLeft { job: job_id() },
    ]
}

/// The records that [`STORED`] has as text.
fn examples() -> Vec<Record> {
    let joined = JobMembership {
        process: PROCESS,
        job: job_id(),
        evidence: MembershipEvidence::Cgroup,
        inherited_mask: Some(cpu_set("0-7")),
        first_seen: Some(Nanos(6)),
    };
    let left = JobMembership {
        evidence: MembershipEvidence::Parent,
        inherited_mask: None,
        first_seen: None,
        ..joined.clone()
    };
    let released = ReleasedJobMasks {
        job: job_id(),
        user_ids: BTreeSet::from([Uid(1000)]),
        masks: BTreeSet::from([ReleasedJobMask { mask: cpu_set("2-3"), original_mask: cpu_set("0-7") }]),
        first_used_at: Nanos(9),
        released_at: Nanos(10),
        // Not stored.
        last_pending_restore_at: None,
    };
    let (before, set) = (cpu_set("0-7"), cpu_set("2-3"));
    let mut examples = vec![
        Record::Job(full_job()),
        Record::Ended(job_id()),
        Record::Joined(joined),
        Record::Left(left),
        Record::MaskSet { thread: THREAD, before, set, since: Nanos(7), at: Some(Nanos(8)) },
        fork_mask_set(),
        Record::MaskReleased(THREAD),
        Record::ReleasedMasks(released),
        Record::ReleaseSettled(job_id()),
    ];
    examples.extend(cpuset_examples().into_iter().map(Record::Cpuset));
    examples.extend(unknown_mask_examples().into_iter().map(Record::UnknownMasks));
    examples.push(Record::Usage { job: job_id(), usage: Box::new(full_usage()) });
    examples
}

fn fork_mask_set() -> Record {
    let (before, set) = (cpu_set("0-7"), cpu_set("2-3"));
    Record::ForkMaskSet { process: PROCESS, ancestor: Pid(70), before, set, since: Nanos(7), at: Nanos(8) }
}

/// Asserts that there is an example of each kind of record, and that each is read and written as it is stored.
fn assert_examples_are_complete() {
    let (all, kind) = kinds_of!(
        Record: Job, Ended, Joined, Left, MaskSet, ForkMaskSet, MaskReleased, ReleasedMasks, ReleaseSettled, Cpuset,
        UnknownMasks, Usage
    );
    assert_eq!(examples().iter().map(kind).collect::<BTreeSet<_>>(), all);
    let (all, kind) = kinds_of!(CpusetRecord: Created, Unwanted, Removed, Moved, Origin);
    assert_eq!(cpuset_examples().iter().map(kind).collect::<BTreeSet<_>>(), all);
    let (all, kind) = kinds_of!(
        UnknownMaskRecord: RecordsLost, SearchBegun, Searched, Found, Settled, CpusetFound, CpusetLeft
    );
    assert_eq!(unknown_mask_examples().iter().map(kind).collect::<BTreeSet<_>>(), all);
    let examples = examples();
    assert_eq!(examples.len(), STORED.lines().count());
    for (record, stored) in examples.iter().zip(STORED.lines()) {
        assert_eq!(serde_json::from_str::<Record>(stored).unwrap(), *record);
        assert_eq!(serde_json::to_string(record).unwrap(), stored);
    }
}

/// The content of `journal.jsonl` with one batch, with these records as text.
fn journal_text(records: &str) -> String {
    format!("{{\"boot_id\":\"boot\",\"number\":1,\"records\":[{records}]}}\n")
}

#[test]
fn journal_jsonl_with_every_record_is_read_and_written_the_same() {
    assert_examples_are_complete();
    let dir = tempfile::tempdir().unwrap();
    let text = journal_text(&STORED.lines().collect::<Vec<_>>().join(","));
    std::fs::write(dir.path().join(LINES), &text).unwrap();
    let (_, found) = reopen(dir.path());
    assert_eq!((found.records, found.remarks), (examples(), Vec::<String>::new()));
    let dir = tempfile::tempdir().unwrap();
    reopen(dir.path()).0.append(&examples()).unwrap();
    assert_eq!(std::fs::read_to_string(dir.path().join(LINES)).unwrap(), text);
}

#[test]
fn state_json_with_every_record_is_read_and_written_the_same() {
    assert_examples_are_complete();
    let dir = tempfile::tempdir().unwrap();
    let records = STORED.lines().collect::<Vec<_>>().join(",");
    let text = format!(
        "{{\"schema\":1,\"boot_id\":\"boot\",\"last\":1,\"is_followed\":true,\"records\":[{records}]}}"
    );
    std::fs::write(dir.path().join(STATE), &text).unwrap();
    std::fs::write(dir.path().join(LINES), journal_text("")).unwrap();
    let (_, found) = reopen(dir.path());
    assert_eq!((found.records, found.remarks), (examples(), Vec::<String>::new()));
    let dir = tempfile::tempdir().unwrap();
    reopen(dir.path()).0.rewrite(&examples()).unwrap();
    assert_eq!(std::fs::read_to_string(dir.path().join(STATE)).unwrap(), text);
    assert_eq!(std::fs::read_to_string(dir.path().join(LINES)).unwrap(), journal_text(""));
}

#[test]
fn each_word_in_a_record_is_read_and_written_the_same() {
    assert_stored_as!(
        CpuRequest: Cores(2) = r#"{"cores":2}"#, Pus(3) = r#"{"pus":3}"#,
        Exactly(cpu_set("4-5")) = r#"{"exactly":"4-5"}"#
    );
    assert_stored_as!(Placement: Pack = "\"pack\"", Spread = "\"spread\"", Explicit = "\"explicit\"");
    assert_stored_as!(
        PriorityClass: Guaranteed = "\"guaranteed\"", Normal = "\"normal\"", Besteffort = "\"besteffort\""
    );
    assert_stored_as!(
        NumaNodeRule: Default = "\"default\"", RoundRobin = "\"rr\"", LeastLoaded = "\"ll\"", Fill = "\"fill\"",
        Packed = "\"packed\""
    );
    assert_stored_as!(GrantedBy: Warden = "\"warden\"", Scheduler = "\"scheduler\"");
    assert_stored_as!(
        Ownership: Owned = "\"owned\"", Borrowed = "\"borrowed\"", Squeezed = "\"squeezed\"",
        Frozen = "\"frozen\""
    );
    assert_stored_as!(
        EndCondition: LastProcessExit = "\"members\"", Timeout = "\"reservation\"", Release = "\"provision\""
    );
    assert_stored_as!(
        CgroupCreator: Scheduler = "\"scheduler\"", Systemd = "\"systemd\"", Warden = "\"warden\""
    );
    assert_stored_as!(
        MembershipEvidence: Adopted = "\"adopted\"", Environment = "\"environment\"", Provision = "\"provision\"",
        Session = "\"session\"", Parent = "\"parent\"", JobCpuset = "\"enclosure\"", Cgroup = "\"cgroup\"",
        Registered = "\"registered\""
    );
    let ids = ["slurm:1", "lsf:1", "pbs:1", "sge:1", "condor:1", "flux:1", "oar:1", "manual:1", "session:1"];
    let stored: Vec<String> =
        JobSource::ALL.iter().map(|&source| JobId::new(source, "1").unwrap().to_string()).collect();
    assert_eq!(stored, ids);
}

/// The fields that earlier versions did not write are those that are left out here.
#[test]
fn records_of_earlier_versions_are_read() {
    let read = |text: &str| serde_json::from_str::<Record>(text).unwrap();
    let job = read(
        r#"{"job":{"id":"slurm:7","owner":1000,
            "request":{"amount":{"cores":2},"placement":"pack","class":"normal"},
            "grant":{"cpus":"2-3","granted_by":"warden","shared":false,"because":[],"runner_up":""},
            "lifetime":"members","cgroup":null,"sessions":[],"since":2}}"#,
    );
    let expected = Job::new(job_id(), Uid(1000), EndCondition::LastProcessExit, UnixMillis(2));
    let (request, grant) = (Some(JobRequest::with_core_count(2)), Some(pjw_grant(cpu_set("2-3"))));
    assert_eq!(job, Record::Job(Job { request, grant, ..expected }));
    let thread = r#"{"process":{"pid":71,"start":72},"tid":73,"start":74}"#;
    assert_eq!(
        read(&format!(r#"{{"touched":{{"thread":{thread},"before":"0-7","set":"2-3"}}}}"#)),
        Record::MaskSet {
            thread: THREAD,
            before: cpu_set("0-7"),
            set: cpu_set("2-3"),
            since: Nanos(0),
            at: None
        }
    );
    let usage = Box::new(JobUsage { cpu_ns: 1, ..JobUsage::default() });
    assert_eq!(
        read(r#"{"usage":{"job":"slurm:7","usage":{"cpu_ns":1}}}"#),
        Record::Usage { job: job_id(), usage }
    );
    let joined = r#"{"joined":{"process":{"pid":71,"start":72},"job":"slurm:7","evidence":"cgroup","inherited":"0-7"}}"#;
    assert!(matches!(read(joined), Record::Joined(JobMembership { first_seen: None, .. })));
    let raised = r#"{"wall":{"raised":{"job":"slurm:7","mason":"warden","path":"/7","bounds":{"cpus":"2-3","mems":null,"isolated":false}}}}"#;
    let spec = CpusetSpec::from_cpus(cpu_set("2-3"));
    let job_cpuset = JobCpuset { job: job_id(), creator: CgroupCreator::Warden, path: "/7".to_owned(), spec };
    assert_eq!(read(raised), Record::Cpuset(CpusetRecord::Created(job_cpuset)));
}
