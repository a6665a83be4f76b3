//! The hooks of LSF, Torque, Grid Engine, HTCondor and Flux, called as by their schedulers.

use pjw_core::cpuset::CpuSet;
use pjw_tests::daemon::Daemon;
use pjw_tests::programs::program_path;
use pjw_tests::waiting::wait_until;

use serde_json::{Value, json};

use super::{Call, NOBODY, OTHER, core_count_of, hook_for_daemon, make_accessible, use_cpu_time};
use crate::permissions::programs_are_reachable;
use crate::processes::{Shell, has_two_cores, is_root, mask};

const LSF: &str = include_str!("../../../crates/pjw-sources/tests/fixtures/openlava-job.environ.txt");

/// Returns the call of an LSF hook for the recorded job, with the name of this machine.
fn lsf(daemon: &Daemon, name: &str) -> Call {
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let call = Call::new(hook_for_daemon(daemon, &format!("lsf/{name}.sh"))).with_environment(LSF);
    call.with_variable("LSB_MCPU_HOSTS", &format!("elsewhere 7 {host} 1 ")).with_variable("LSB_HOSTS", &host)
}

/// A script that prints its arguments, and then the variables with the cores.
const PRINT_ARGUMENTS: &str = "for word; do echo \"[$word]\"; done; echo $PJW_CPUS $PJW_NCORES $PJW_JOB_DIR $OMP_NUM_THREADS $MKL_NUM_THREADS $GOMAXPROCS";
const ODD_ARGUMENTS: [&str; 4] = ["a  b", "", "--strict", "new\nline"];
const ODD_OUTPUT: &str = "[a  b]\n[]\n[--strict]\n[new\nline]\n";

/// Runs a starter and returns the variables with the cores and stderr. On a busy machine, the hook may start the job
/// without these variables, and says so. Then the starter is run again.
fn run_starter(call: &impl Fn() -> Call) -> (String, String) {
    let mut calls = (0..10).map(|_| run_starter_once(call()));
    calls.find(|(_, stderr)| !stderr.contains(" within ")).expect("every call took too long")
}

fn run_starter_once(call: Call) -> (String, String) {
    let output = call
        .args(&["/bin/sh", "-c", &format!("{PRINT_ARGUMENTS}; exit 42"), "sh"])
        .args(&ODD_ARGUMENTS)
        .output();
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (printed, stderr) = (text(output.stdout), text(output.stderr));
    let rest =
        printed.strip_prefix(ODD_OUTPUT).unwrap_or_else(|| panic!("the arguments were changed: {printed}"));
    (rest.trim().to_owned(), stderr)
}

/// Checks a starter: it sets the variables with the job's cores, and starts the job also without a daemon.
fn check_starter(daemon: &mut Daemon, job: &str, call: impl Fn(&Daemon) -> Call) {
    // The job belongs to another user. Else the daemon would take the call for a process of the job, by its
    // environment, and its process group with it.
    let _: Value = daemon.call("Assign", &json!({ "job": job, "cores": 1, "owner": OTHER })).unwrap();
    let cpus = daemon.job(job).unwrap().cpus;
    let cores = core_count_of(daemon, &cpus);
    let directory = daemon.state_dir().join("jobs").join(job).display().to_string();
    let pus = cpus.parse::<CpuSet>().unwrap().len();
    let all = (format!("{cpus} {cores} {directory} {cores} {cores} {pus}"), String::new());
    assert_eq!(run_starter(&|| call(daemon)), all);
    let (printed, _) = run_starter(&|| call(daemon).with_variable("OMP_NUM_THREADS", "7"));
    assert_eq!(
        printed,
        format!("{cpus} {cores} {directory} 7 {cores} {pus}"),
        "variables of the user are not changed"
    );
    daemon.release(job).unwrap();
    let (printed, stderr) = run_starter(&|| call(daemon));
    assert!(
        printed.is_empty() && stderr.lines().count() == 1 && stderr.contains("knows no job"),
        "{printed} {stderr}"
    );
    daemon.stop();
    let (printed, stderr) = run_starter(&|| call(daemon));
    assert!(
        printed.is_empty() && stderr.lines().count() == 1 && stderr.contains("not running"),
        "{printed} {stderr}"
    );
    daemon.spawn();
}

#[test]
fn the_lsf_hooks_register_the_job_as_root_and_pass_it_its_cores() {
    let mut daemon = Daemon::start("");
    check_starter(&mut daemon, "lsf:204", |daemon| lsf(daemon, "job-starter"));
    if !is_root() {
        return;
    }
    for _ in 0..2 {
        lsf(&daemon, "pre-exec").assert_silent_success();
        let job = daemon.job("lsf:204").unwrap();
        assert_eq!((job.owner, job.requested_cores), (NOBODY, 1), "LSFUSER is nobody");
    }
    for _ in 0..2 {
        lsf(&daemon, "post-exec").assert_silent_success();
        assert!(daemon.status().jobs.is_empty());
    }
    lsf(&daemon, "pre-exec").assert_silent_success();
    let left = use_cpu_time(&daemon, "lsf:204");
    lsf(&daemon, "post-exec").assert_line_about("lsf:204");
    drop(left);
    lsf(&daemon, "pre-exec").with_variable("LSB_MCPU_HOSTS", "a 1").assert_warning("does not name this node");
    lsf(&daemon, "pre-exec")
        .with_variable("LSB_JOB_EXECUSER", "no-such-user")
        .assert_warning("no user \"no-such-user\"");
}

#[test]
fn a_hook_of_the_jobs_owner_registers_nothing_and_still_passes_the_cores() {
    if !is_root() || !programs_are_reachable() {
        return;
    }
    let daemon = Daemon::start("");
    make_accessible(&daemon);
    lsf(&daemon, "pre-exec").with_user(NOBODY).assert_silent_success();
    lsf(&daemon, "post-exec").with_user(NOBODY).assert_silent_success();
    assert!(daemon.status().jobs.is_empty());
    let cpus = daemon.assign("lsf:204", 1, &[]).unwrap().to_string();
    let (printed, _) = run_starter(&|| lsf(&daemon, "job-starter").with_user(NOBODY));
    assert!(printed.starts_with(&cpus), "{printed}");
}

#[test]
fn hooks_of_root_ignore_path_and_socket_of_the_jobs_environment() {
    if !is_root() {
        return;
    }
    let daemon = Daemon::start("");
    lsf(&daemon, "pre-exec")
        .with_variable("PATH", "/nowhere")
        .with_variable("PJW_SOCKET", "/nowhere")
        .assert_silent_success();
    assert!(daemon.job("lsf:204").is_some());
    let names = ["lsf/pre-exec.sh", "lsf/post-exec.sh", "sge/prolog.sh", "sge/epilog.sh", "flux/prolog.sh"];
    for name in names {
        let fake_dir = daemon.dir().join("bin");
        std::fs::create_dir_all(&fake_dir).unwrap();
        super::write_executable(&fake_dir.join("pjwctl"), "#!/bin/sh\necho trapped\n");
        let file = super::hook_path(name);
        let is_installed = std::path::Path::new("/usr/bin/pjwctl").exists();
        if !is_installed {
            Call::new("/bin/sh")
                .args(&[&file])
                .with_variable("PATH", fake_dir.to_str().unwrap())
                .assert_silent_success();
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
        let call = Call::new(hook_for_daemon(daemon, &format!("sge/{name}.sh")))
            .with_environment("JOB_ID=31\nSGE_TASK_ID=undefined\n");
        call.with_environment("NSLOTS=6\nNHOSTS=2\n").with_variable("PE_HOSTFILE", hostfile.to_str().unwrap())
    };
    check_starter(&mut daemon, "sge:31.1", |daemon| sge(daemon, "starter"));
    if !is_root() {
        return;
    }
    sge(&daemon, "prolog").args(&["nobody"]).assert_silent_success();
    let job = daemon.job("sge:31.1").unwrap();
    assert_eq!((job.owner, job.requested_cores), (NOBODY, 1));
    sge(&daemon, "epilog").assert_silent_success();
    assert!(daemon.status().jobs.is_empty());
    sge(&daemon, "prolog").assert_warning("$job_owner");
    sge(&daemon, "prolog").args(&["nobody"]).assert_silent_success();
    let _left = use_cpu_time(&daemon, "sge:31.1");
    sge(&daemon, "epilog").assert_line_about("sge:31.1");
}

/// Runs the starter with the variables of queue_conf(5), and returns what the started shell prints.
fn run_grid_engine_starter(mode: &str, spool: &str, words: &[&str]) -> String {
    let call = Call::new("/bin/sh").args(&[&super::hook_path("sge/starter.sh")]).args(words);
    let call = call
        .with_variable("SGE_STARTER_SHELL_PATH", "/bin/bash")
        .with_variable("SGE_STARTER_SHELL_START_MODE", mode);
    let call =
        call.with_variable("SGE_STARTER_USE_LOGIN_SHELL", "true").with_variable("SGE_JOB_SPOOL_DIR", spool);
    let output = call.with_input("echo $0 by its standard input $*").output();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn the_grid_engine_starter_runs_the_configured_shell() {
    let dir = tempfile::tempdir().unwrap();
    let spool = dir.path().to_str().unwrap();
    let script = format!("{spool}/job_scripts/7");
    std::fs::create_dir(dir.path().join("job_scripts")).unwrap();
    super::write_executable(
        script.as_ref(),
        "IFS='|'; shopt -q login_shell 2>/dev/null && echo login \"$*\"",
    );
    let run = |mode, words: &[&str]| run_grid_engine_starter(mode, spool, words);
    assert_eq!(run("posix_compliant", &[&script, "a b", "c"]), "login a b|c");
    assert_eq!(run("unix_behavior", &[&script, "a b"]), "", "only the shell of the script runs it");
    assert_eq!(run("script_from_stdin", &["-s", "a", "b"]), "-bash by its standard input a b");
    let line = ["/bin/echo", "$0 'a  b'", "$((1", "+ 1))"];
    for mode in ["posix_compliant", "unix_behavior"] {
        std::fs::write(dir.path().join("config"), "handle_as_binary=1\nno_shell=0\n").unwrap();
        assert_eq!(run(mode, &line), "-bash a  b 2", "one command line, not separate words");
        std::fs::write(dir.path().join("config"), "handle_as_binary=1\nno_shell=1\n").unwrap();
        assert_eq!(run(mode, &line), "$0 'a  b' $((1 + 1))", "separate words, with -shell n");
    }
}

#[test]
fn the_torque_hooks_read_their_arguments() {
    let daemon = Daemon::start("");
    let torque = |name: &str| Call::new(hook_for_daemon(&daemon, &format!("pbs/{name}")));
    let words = ["7.srv", "0", "root", "name", "neednodes=1:ppn=1,nodes=1:ppn=1", "batch", ""];
    torque("prologue").args(&words).assert_silent_success();
    assert_eq!(daemon.job("pbs:7.srv").unwrap().requested_cores, 1);
    torque("epilogue").args(&["7.srv", "0", "root", "name", "4711"]).assert_silent_success();
    assert!(daemon.status().jobs.is_empty());
    torque("prologue").args(&words).assert_silent_success();
    let _left = use_cpu_time(&daemon, "pbs:7.srv");
    torque("epilogue").args(&["7.srv", "0", "root", "name", "4711"]).assert_line_about("pbs:7.srv");
    torque("prologue").args(&["7.srv", "0", "root"]).assert_warning("call the hook with --cores N");
    torque("prologue").assert_warning("first argument is not set");
}

#[test]
fn the_htcondor_wrapper_passes_the_job_its_cores() {
    let mut daemon = Daemon::start("");
    let ad = daemon.dir().join("machine.ad");
    std::fs::write(&ad, "Name = \"slot1_3@n1\"\nCpus = 1\n").unwrap();
    let condor = |daemon: &Daemon, name: &str| {
        let call = Call::new(hook_for_daemon(daemon, &format!("htcondor/{name}.sh")))
            .with_variable("_CONDOR_SLOT", "slot1_3");
        call.with_variable("_CONDOR_MACHINE_AD", ad.to_str().unwrap())
    };
    check_starter(&mut daemon, "condor:slot1_3@n1", |daemon| condor(daemon, "job-wrapper"));
    if is_root() {
        condor(&daemon, "prepare-job")
            .with_input("ClusterId = 7\nOwner = \"nobody\"\n")
            .assert_silent_success();
        assert_eq!(daemon.job("condor:slot1_3@n1").unwrap().owner, NOBODY);
        let exit =
            || condor(&daemon, "job-exit").args(&["exit"]).with_input("ClusterId = 7\nOwner = \"nobody\"\n");
        let left = use_cpu_time(&daemon, "condor:slot1_3@n1");
        exit().assert_line_about("condor:slot1_3@n1");
        drop(left);
        wait_until("the job is over", || daemon.status().jobs.is_empty());
        // The second call releases nothing, and the line is the same.
        exit().with_variable("PJW_SOCKET", "/nowhere").assert_line_about("condor:slot1_3@n1");
        if programs_are_reachable() {
            make_accessible(&daemon);
            exit().with_user(NOBODY).assert_silent_success();
        }
    }
}

#[test]
fn the_flux_hook_registers_the_job_if_the_core_count_is_set() {
    let daemon = Daemon::start("");
    let flux =
        |call: Call| call.with_variable("FLUX_JOB_ID", "ƒ3ETxsR9H").with_variable("FLUX_JOB_USERID", "1001");
    flux(Call::new(hook_for_daemon(&daemon, "flux/prolog.sh")))
        .assert_warning("flux does not give its hook the number of cores");
    assert!(daemon.status().jobs.is_empty());
    let set = || {
        let call = Call::new(program_path("pjwctl")).with_socket(&daemon.socket());
        call.args(&["hook", "flux-prolog", "--timeout", "60", "--cores", "1"])
    };
    flux(set()).assert_silent_success();
    assert_eq!(daemon.job("flux:f3ETxsR9H").unwrap().owner, 1001);
    let epilog = || flux(Call::new(hook_for_daemon(&daemon, "flux/epilog.sh")));
    epilog().assert_silent_success();
    assert!(daemon.status().jobs.is_empty());
    flux(set()).assert_silent_success();
    let _left = use_cpu_time(&daemon, "flux:f3ETxsR9H");
    epilog().assert_line_about("flux:f3ETxsR9H");
}

#[test]
fn an_epilog_restores_the_masks_of_remaining_processes() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let remaining = Shell::start();
    let before = mask(remaining.pid());
    daemon.assign("slurm:77", 1, &[remaining.pid()]).unwrap();
    assert_ne!(mask(remaining.pid()), before);
    let end = |id: &str| {
        let call =
            Call::new(program_path("pjwctl")).with_socket(&daemon.socket()).with_variable("SLURM_JOB_ID", id);
        let hook = ["hook", "slurm-epilog", "--timeout", "60"];
        call.with_variable("SLURM_SCRIPT_CONTEXT", "epilog_slurmd").args(&hook)
    };
    end("78").assert_silent_success();
    assert_ne!(mask(remaining.pid()), before, "the epilog of another job changes nothing");
    end("77").assert_silent_success();
    daemon.check_after_reply("slurm:77", &before, || mask(remaining.pid()));
    assert_eq!(daemon.status().pool.free, daemon.status().node.cpus);
    drop(remaining);
    wait_until("the job is over", || daemon.status().jobs.is_empty());
}
