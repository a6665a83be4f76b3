//! LSF, PBS, Grid Engine, HTCondor and Flux: their hooks as they call them.

use pjw_tests::daemon::Daemon;
use pjw_tests::patience::until_true;
use pjw_tests::programs::program;

use serde_json::{Value, json};

use super::{Call, NOBODY, OTHER, asking, cores_of, open_to_all};
use crate::permissions::reachable;
use crate::processes::{Shell, mask, root, two_cores};

const LSF: &str = include_str!("../../../crates/pjw-sources/tests/fixtures/openlava-job.environ.txt");

/// The recorded job, on a host of this machine's name.
fn lsf(daemon: &Daemon, name: &str) -> Call {
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let call = Call::of(asking(daemon, &format!("lsf/{name}.sh"))).recorded(LSF);
    call.with("LSB_MCPU_HOSTS", &format!("elsewhere 7 {host} 1 ")).with("LSB_HOSTS", &host)
}

/// What a starter's command saw: its arguments, then those of its variables that tell of cores.
const SEEN: &str = "for word; do echo \"[$word]\"; done; echo $PJW_CPUS $PJW_NCORES $OMP_NUM_THREADS";
const ODD: [&str; 4] = ["a  b", "", "--strict", "new\nline"];
const ODD_SEEN: &str = "[a  b]\n[]\n[--strict]\n[new\nline]\n";

/// On a machine that is too busy the job starts without being told of its cores, and the hook says so: then once more.
fn started(call: &impl Fn() -> Call) -> (String, String) {
    let mut calls = (0..10).map(|_| started_once(call()));
    calls.find(|(_, told)| !told.contains("not done within")).expect("every call took too long")
}

fn started_once(call: Call) -> (String, String) {
    let output = call.args(&["/bin/sh", "-c", &format!("{SEEN}; exit 42"), "sh"]).args(&ODD).output();
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (seen, told) = (text(output.stdout), text(output.stderr));
    let rest = seen.strip_prefix(ODD_SEEN).unwrap_or_else(|| panic!("not as given: {seen}"));
    (rest.trim().to_owned(), told)
}

/// A starter tells the job its cores, and starts it whatever happens.
fn starts(daemon: &mut Daemon, job: &str, call: impl Fn(&Daemon) -> Call) {
    // Another's job: else the call would count as its process by what it has in its environment, and its group with it.
    let _: Value = daemon.call("Assign", &json!({ "job": job, "cores": 1, "owner": OTHER })).unwrap();
    let cpus = daemon.job(job).unwrap().cpus;
    let cores = cores_of(daemon, &cpus);
    let all = (format!("{cpus} {cores} {cores}"), String::new());
    assert_eq!(started(&|| call(daemon)), all);
    let (seen, _) = started(&|| call(daemon).with("OMP_NUM_THREADS", "7"));
    assert_eq!(seen, format!("{cpus} {cores} 7"), "what the user set stays");
    daemon.release(job).unwrap();
    let (seen, told) = started(&|| call(daemon));
    assert!(seen.is_empty() && told.lines().count() == 1 && told.contains("knows no job"), "{seen} {told}");
    daemon.stop();
    let (seen, told) = started(&|| call(daemon));
    assert!(seen.is_empty() && told.lines().count() == 1 && told.contains("not running"), "{seen} {told}");
    daemon.spawn();
}

#[test]
fn the_lsf_hooks_register_the_job_as_root_and_pass_it_its_cores() {
    let mut daemon = Daemon::start("");
    starts(&mut daemon, "lsf:204", |daemon| lsf(daemon, "job-starter"));
    if !root() {
        return;
    }
    for _ in 0..2 {
        lsf(&daemon, "pre-exec").goes_silently();
        let job = daemon.job("lsf:204").unwrap();
        assert_eq!((job.owner, job.requested_cores), (NOBODY, 1), "LSFUSER is nobody");
    }
    for _ in 0..2 {
        lsf(&daemon, "post-exec").goes_silently();
        assert!(daemon.status().jobs.is_empty());
    }
    lsf(&daemon, "pre-exec").with("LSB_MCPU_HOSTS", "a 1").warns("does not name this node");
    lsf(&daemon, "pre-exec").with("LSB_JOB_EXECUSER", "no-such-user").warns("no user \"no-such-user\"");
}

#[test]
fn a_hook_of_the_jobs_owner_registers_nothing_and_still_passes_the_cores() {
    if !root() || !reachable() {
        return;
    }
    let daemon = Daemon::start("");
    open_to_all(&daemon);
    lsf(&daemon, "pre-exec").by(NOBODY).goes_silently();
    lsf(&daemon, "post-exec").by(NOBODY).goes_silently();
    assert!(daemon.status().jobs.is_empty());
    let cpus = daemon.assign("lsf:204", 1, &[]).unwrap().to_string();
    let (seen, _) = started(&|| lsf(&daemon, "job-starter").by(NOBODY));
    assert!(seen.starts_with(&cpus), "{seen}");
}

#[test]
fn hooks_of_root_ignore_path_and_socket_of_the_jobs_environment() {
    if !root() {
        return;
    }
    let daemon = Daemon::start("");
    lsf(&daemon, "pre-exec").with("PATH", "/nowhere").with("PJW_SOCKET", "/nowhere").goes_silently();
    assert!(daemon.job("lsf:204").is_some());
    let names = ["lsf/pre-exec.sh", "lsf/post-exec.sh", "sge/prolog.sh", "sge/epilog.sh", "flux/prolog.sh"];
    for name in names {
        let trap = daemon.dir().join("bin");
        std::fs::create_dir_all(&trap).unwrap();
        super::executable(&trap.join("pjwctl"), "#!/bin/sh\necho trapped\n");
        let file = super::original(name);
        let installed = std::path::Path::new("/usr/bin/pjwctl").exists();
        if !installed {
            Call::of("/bin/sh").args(&[&file]).with("PATH", trap.to_str().unwrap()).goes_silently();
        }
    }
}

#[test]
fn the_grid_engine_hooks_register_the_job_by_the_hostfile_and_pass_it_its_cores() {
    let mut daemon = Daemon::start("");
    let hostfile = daemon.dir().join("pe_hostfile");
    let host = daemon.status().node.hostname;
    std::fs::write(&hostfile, format!("elsewhere 5 all.q@elsewhere <NULL>\n{host} 1 all.q@{host} <NULL>\n"))
        .unwrap();
    let sge = |daemon: &Daemon, name: &str| {
        let call = Call::of(asking(daemon, &format!("sge/{name}.sh")))
            .recorded("JOB_ID=31\nSGE_TASK_ID=undefined\n");
        call.recorded("NSLOTS=6\nNHOSTS=2\n").with("PE_HOSTFILE", hostfile.to_str().unwrap())
    };
    starts(&mut daemon, "sge:31.1", |daemon| sge(daemon, "starter"));
    if !root() {
        return;
    }
    sge(&daemon, "prolog").args(&["nobody"]).goes_silently();
    let job = daemon.job("sge:31.1").unwrap();
    assert_eq!((job.owner, job.requested_cores), (NOBODY, 1));
    sge(&daemon, "epilog").goes_silently();
    assert!(daemon.status().jobs.is_empty());
    sge(&daemon, "prolog").warns("$job_owner");
}

/// What queue_conf(5) leaves to a starter, which starts `words` here.
fn grid_engine_starts(mode: &str, spool: &str, words: &[&str]) -> String {
    let call = Call::of("/bin/sh").args(&[&super::original("sge/starter.sh")]).args(words);
    let call = call.with("SGE_STARTER_SHELL_PATH", "/bin/bash").with("SGE_STARTER_SHELL_START_MODE", mode);
    let call = call.with("SGE_STARTER_USE_LOGIN_SHELL", "true").with("SGE_JOB_SPOOL_DIR", spool);
    let output = call.given("echo $0 by its standard input $*").output();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn the_grid_engine_starter_runs_the_configured_shell() {
    let dir = tempfile::tempdir().unwrap();
    let spool = dir.path().to_str().unwrap();
    let script = format!("{spool}/job_scripts/7");
    std::fs::create_dir(dir.path().join("job_scripts")).unwrap();
    super::executable(script.as_ref(), "IFS='|'; shopt -q login_shell 2>/dev/null && echo login \"$*\"");
    let starts = |mode, words: &[&str]| grid_engine_starts(mode, spool, words);
    assert_eq!(starts("posix_compliant", &[&script, "a b", "c"]), "login a b|c");
    assert_eq!(starts("unix_behavior", &[&script, "a b"]), "", "by no shell but its own");
    assert_eq!(starts("script_from_stdin", &["-s", "a", "b"]), "-bash by its standard input a b");
    let line = ["/bin/echo", "$0 'a  b'", "$((1", "+ 1))"];
    for mode in ["posix_compliant", "unix_behavior"] {
        std::fs::write(dir.path().join("config"), "handle_as_binary=1\nno_shell=0\n").unwrap();
        assert_eq!(starts(mode, &line), "-bash a  b 2", "a command line, not words");
        std::fs::write(dir.path().join("config"), "handle_as_binary=1\nno_shell=1\n").unwrap();
        assert_eq!(starts(mode, &line), "$0 'a  b' $((1 + 1))", "words, with -shell n");
    }
}

#[test]
fn the_torque_hooks_read_their_arguments() {
    let daemon = Daemon::start("");
    let torque = |name: &str| Call::of(asking(&daemon, &format!("pbs/{name}")));
    let words = ["7.srv", "0", "root", "name", "neednodes=1:ppn=1,nodes=1:ppn=1", "batch", ""];
    torque("prologue").args(&words).goes_silently();
    assert_eq!(daemon.job("pbs:7.srv").unwrap().requested_cores, 1);
    torque("epilogue").args(&["7.srv", "0", "root", "name", "4711"]).goes_silently();
    assert!(daemon.status().jobs.is_empty());
    torque("prologue").args(&["7.srv", "0", "root"]).warns("call the hook with --cores N");
    torque("prologue").warns("first argument is not set");
}

#[test]
fn the_htcondor_wrapper_passes_the_job_its_cores() {
    let mut daemon = Daemon::start("");
    let ad = daemon.dir().join("machine.ad");
    std::fs::write(&ad, "Name = \"slot1_3@n1\"\nCpus = 1\n").unwrap();
    let condor = |daemon: &Daemon, name: &str| {
        let call = Call::of(asking(daemon, &format!("htcondor/{name}.sh"))).with("_CONDOR_SLOT", "slot1_3");
        call.with("_CONDOR_MACHINE_AD", ad.to_str().unwrap())
    };
    starts(&mut daemon, "condor:slot1_3@n1", |daemon| condor(daemon, "job-wrapper"));
    if root() {
        condor(&daemon, "prepare-job").given("ClusterId = 7\nOwner = \"nobody\"\n").goes_silently();
        assert_eq!(daemon.job("condor:slot1_3@n1").unwrap().owner, NOBODY);
    }
}

#[test]
fn the_flux_hook_registers_the_job_if_the_core_count_is_set() {
    let daemon = Daemon::start("");
    let flux = |call: Call| call.with("FLUX_JOB_ID", "ƒ3ETxsR9H").with("FLUX_JOB_USERID", "1001");
    flux(Call::of(asking(&daemon, "flux/prolog.sh")))
        .warns("flux does not give its hook the number of cores");
    assert!(daemon.status().jobs.is_empty());
    let set = Call::of(program("pjwctl")).at(&daemon.socket()).args(&["hook", "flux-prolog", "--cores", "1"]);
    flux(set).goes_silently();
    assert_eq!(daemon.job("flux:f3ETxsR9H").unwrap().owner, 1001);
    flux(Call::of(asking(&daemon, "flux/epilog.sh"))).goes_silently();
    assert!(daemon.status().jobs.is_empty());
}

#[test]
fn an_epilog_restores_the_masks_of_remaining_processes() {
    if !two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let left = Shell::start();
    let before = mask(left.pid());
    daemon.assign("slurm:77", 1, &[left.pid()]).unwrap();
    assert_ne!(mask(left.pid()), before);
    let end = |id: &str| {
        let call = Call::of(program("pjwctl")).at(&daemon.socket()).with("SLURM_JOB_ID", id);
        call.with("SLURM_SCRIPT_CONTEXT", "epilog_slurmd").args(&["hook", "slurm-epilog"])
    };
    end("78").goes_silently();
    assert_ne!(mask(left.pid()), before, "that was another job's end");
    end("77").goes_silently();
    assert_eq!(mask(left.pid()), before);
    assert_eq!(daemon.status().pool.free, daemon.status().node.cpus);
    drop(left);
    until_true("nothing of it is left", || daemon.status().jobs.is_empty());
}
