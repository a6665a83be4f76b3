//! The hook of OpenPBS, in Python, with a replacement for the module that pbs_mom provides.

use std::path::Path;

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::Daemon;

use super::{Call, OTHER, core_count_of, hook_for_daemon, use_cpu_time, write_executable};
use crate::processes::is_installed;

/// The part of the module `pbs` that the hook uses. It reads its values from variables and prints the decision of the
/// hook.
const PBS_MODULE: &str = r#"
import os
EXECJOB_BEGIN, EXECJOB_LAUNCH, EXECJOB_END, EXECJOB_ABORT, EXECJOB_EPILOGUE = 1, 2, 3, 4, 5
LOG_WARNING = 4
def logmsg(level, text):
    print("log: " + text)
def logjobmsg(job, text):
    print("log of " + job + ": " + text)
def get_local_nodename():
    return os.environ["NODE"]
class Job:
    id, euser, exec_vnode = os.environ["ID"], "65533", os.environ.get("EXEC_VNODE", "")
class Event:
    type, job = int(os.environ["TYPE"]), Job()
    env = {name[4:]: value for name, value in os.environ.items() if name.startswith("ENV_")}
    def accept(self):
        print(" ".join(["accepted"] + ["%s=%s" % item for item in sorted(self.env.items())]))
        raise SystemExit(0)
    def reject(self, why):
        print("rejected: " + why)
        raise SystemExit(1)
_event = Event()
def event():
    return _event
"#;

/// Runs the hook and returns its log and its decision.
fn run_hook(hook: &Path, event: u32, variables: &[(&str, &str)]) -> String {
    let dir = hook.parent().unwrap().to_str().unwrap();
    let call = Call::new("/usr/bin/env").args(&["python3", hook.to_str().unwrap()]);
    let call = call
        .with_variable("PATH", "/usr/local/bin:/usr/bin:/bin")
        .with_variable("PYTHONPATH", dir)
        .with_variable("ID", "124[3].srv");
    let call = call
        .with_variable("NODE", "n1")
        .with_variable("TYPE", &event.to_string())
        .with_variable("PYTHONDONTWRITEBYTECODE", "1");
    let output = variables.iter().fold(call, |call, (name, value)| call.with_variable(name, value)).output();
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[test]
fn the_openpbs_hook_registers_the_job_passes_its_cores_and_releases_it() {
    if !is_installed("python3") {
        return;
    }
    let mut daemon = Daemon::start("[run]\nvariables = [\"OMP_NUM_THREADS=cores\", \"GOMAXPROCS=pus\"]\n");
    let hook = hook_for_daemon(&daemon, "pbs/pjw.py");
    std::fs::write(daemon.dir().join("pbs.py"), PBS_MODULE).unwrap();
    let chunk = ("EXEC_VNODE", "(n0:ncpus=9)+(n1:ncpus=1:mem=4gb)");
    for _ in 0..2 {
        assert_eq!(run_hook(&hook, 1, &[chunk]), "accepted");
        let job = daemon.job("pbs:124[3].srv").unwrap();
        assert_eq!((job.owner, job.requested_cores), (OTHER, 1));
    }
    let cpus = daemon.job("pbs:124[3].srv").unwrap().cpus;
    let cores = core_count_of(&daemon, &cpus);
    let accepted = run_hook(&hook, 2, &[("ENV_OMP_NUM_THREADS", "7")]);
    let directory = daemon.state_dir().join("jobs/pbs:124[3].srv");
    let directory = format!("PJW_JOB_DIR={}", directory.display());
    let pus = cpus.parse::<CpuSet>().unwrap().len();
    let told = |omp: usize, gomaxprocs: usize| {
        let record = format!("PJW_VARIABLES=OMP_NUM_THREADS={cores}:GOMAXPROCS={pus}");
        let grant = format!("PJW_CPUS={} {directory} PJW_NCORES={cores} {record}", cpus.replace(',', "\\,"));
        format!("accepted GOMAXPROCS={gomaxprocs} OMP_NUM_THREADS={omp} {grant}")
    };
    assert_eq!(accepted, told(7, pus), "a variable of the user is not changed");
    assert_eq!(run_hook(&hook, 2, &[]), told(cores, pus));
    let record = ("ENV_PJW_VARIABLES", "OMP_NUM_THREADS=5:GOMAXPROCS=5");
    let submitted_in_a_job = [("ENV_OMP_NUM_THREADS", "5"), ("ENV_GOMAXPROCS", "6"), record];
    assert_eq!(run_hook(&hook, 2, &submitted_in_a_job), told(cores, 6), "only the user's own value stays");
    for event in [3, 4, 5] {
        assert_eq!(run_hook(&hook, event, &[]), "accepted");
        assert!(daemon.status().jobs.is_empty());
    }
    assert_eq!(run_hook(&hook, 1, &[chunk]), "accepted");
    let left = use_cpu_time(&daemon, "pbs:124[3].srv");
    let told = run_hook(&hook, 3, &[]);
    assert!(told.starts_with("log of 124[3].srv: pjw: pbs:124[3].srv "), "{told}");
    assert!(told.ends_with("of 1 core used\naccepted") && told.lines().count() == 2, "{told}");
    drop(left);
    let unknown = run_hook(&hook, 1, &[("EXEC_VNODE", "(n9:ncpus=1)")]);
    assert!(unknown.starts_with("log: pjw: pjwctl: hook pbs-begin: exec_vnode does not name"), "{unknown}");
    assert!(unknown.ends_with("\naccepted"), "{unknown}");

    let strict = daemon.dir().join("strict.py");
    let text = std::fs::read_to_string(&hook).unwrap().replace("STRICT = False", "STRICT = True");
    std::fs::write(&strict, text).unwrap();
    daemon.stop();
    for event in [1, 2, 3] {
        let output = run_hook(&hook, event, &[chunk]);
        assert!(output.contains("pjwd is not running") && output.ends_with("\naccepted"), "{output}");
    }
    let output = run_hook(&strict, 1, &[chunk]);
    assert!(
        output.ends_with("rejected: pjw can't give the job its cores: see the log of pbs_mom"),
        "{output}"
    );
    assert!(run_hook(&strict, 3, &[chunk]).ends_with("\naccepted"), "the end of a job is never rejected");
    daemon.spawn();
}

#[test]
fn a_cpu_list_is_escaped_for_openpbs() {
    if !is_installed("python3") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (hook, ctl) = (dir.path().join("pjw.py"), dir.path().join("pjwctl"));
    write_executable(&ctl, "#!/bin/sh\necho PJW_CPUS=0-3,8\n");
    let text = std::fs::read_to_string(super::hook_path("pbs/pjw.py")).unwrap();
    std::fs::write(&hook, text.replace("/usr/bin/pjwctl", ctl.to_str().unwrap())).unwrap();
    std::fs::write(dir.path().join("pbs.py"), PBS_MODULE).unwrap();
    assert_eq!(run_hook(&hook, 2, &[]), r"accepted PJW_CPUS=0-3\,8");
}

#[test]
fn without_pjwctl_the_openpbs_hook_accepts_every_event() {
    if !is_installed("python3") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let hook = dir.path().join("pjw.py");
    let text = std::fs::read_to_string(super::hook_path("pbs/pjw.py")).unwrap();
    std::fs::write(&hook, text.replace("/usr/bin/pjwctl", "/nowhere/pjwctl")).unwrap();
    std::fs::write(dir.path().join("pbs.py"), PBS_MODULE).unwrap();
    for event in [1, 2, 3, 4] {
        assert_eq!(run_hook(&hook, event, &[("EXEC_VNODE", "(n1:ncpus=1)")]), "accepted");
    }
}
