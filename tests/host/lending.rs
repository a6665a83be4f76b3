//! Lending: jobs of the class besteffort run on free cores, and on cores that guaranteed jobs leave idle.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use pjw_core::cpuset::CpuSet;
use pjw_linux::sys::cpu_time::process_cpu_time;
use pjw_tests::cpusets::remaining_cgroups;
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::programs::copy_program;
use pjw_tests::skipping::skip;
use pjw_tests::waiting::{wait_for, wait_until};

use crate::processes::{Shell, has_two_cores, is_frozen, is_installed, is_root, mask};

const LENDING: &str = "[lending]\nenabled = true\nbuffer = 0\nlend_after = \"200ms\"\n";
pub const SPIN: &str = "sh -c 'while :; do :; done'";

/// A daemon that lends. `None`, with a report, if this machine can't lend.
pub fn lending_daemon(config: &str) -> Option<Daemon> {
    has_two_cores().then(|| Daemon::start(config)).filter(lends)
}

/// Whether the daemon lends cores of owners. If not, reports that the test is skipped.
pub fn lends(daemon: &Daemon) -> bool {
    let job = daemon.job_id("probe");
    assert!(daemon.pjwctl(&["assign", &job, "--cores", "1", "--class", "besteffort"]).status.success());
    let text = String::from_utf8(daemon.pjwctl(&["explain", &job]).stdout).unwrap();
    daemon.release("probe").unwrap();
    // The other lines are about the probe, which has no process.
    let reason = text.lines().find(|line| line.contains("it borrows free cores only"));
    if let Some(reason) = reason {
        skip(reason.trim());
    }
    reason.is_none()
}

pub fn assign(daemon: &Daemon, job: &str, class: &str, cores: &str, shell: &Shell) {
    let (job, pid) = (daemon.job_id(job), shell.pid().to_string());
    let output = daemon.pjwctl(&["assign", &job, "--cores", cores, "--class", class, "--pid", &pid]);
    assert!(output.status.success(), "{output:?}");
}

/// The cpus and the lent CPUs of a job.
pub fn lent(daemon: &Daemon, job: &str) -> String {
    daemon.job(job).map(|job| job.lent).unwrap_or_default()
}

fn cgroups(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap()
}

fn kinds_of_events(daemon: &Daemon) -> Vec<String> {
    let output = daemon.pjwctl(&["events", "--json"]);
    let lines = String::from_utf8(output.stdout).unwrap();
    let events = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    events.map(|event| event["event"].as_str().unwrap().to_owned()).collect()
}

/// Waits until there are events of these kinds, and returns the kinds of all events. The daemon publishes the events of
/// a cycle after its status.
pub fn wait_for_kinds_of_events(daemon: &Daemon, wanted: &[&str]) -> Vec<String> {
    wait_for(&format!("there are events of the kinds {wanted:?}"), || {
        let kinds = kinds_of_events(daemon);
        wanted.iter().all(|kind| kinds.iter().any(|known| known == kind)).then_some(kinds)
    })
}

/// A guaranteed job of one core whose shell sleeps, and a besteffort job with a process that always runs.
struct WebAndBatch {
    web: Shell,
    batch: Shell,
    spinner: u32,
    own: CpuSet,
    cgroups_before: String,
}

impl WebAndBatch {
    fn start(daemon: &Daemon) -> Self {
        let (web, mut batch) = (Shell::start(), Shell::start());
        let spinner = batch.background(SPIN);
        let cgroups_before = cgroups(spinner);
        assign(daemon, "web", "guaranteed", "1", &web);
        assign(daemon, "batch", "besteffort", "64", &batch);
        let own = daemon.job("web").unwrap().cpus.parse().unwrap();
        Self { web, batch, spinner, own, cgroups_before }
    }
}

#[test]
fn a_core_that_its_owner_leaves_idle_is_lent_and_comes_back_when_the_owner_works() {
    let Some(daemon) = lending_daemon(LENDING) else { return };
    let mut jobs = WebAndBatch::start(&daemon);
    let own = jobs.own.clone();
    let is_on_own = |jobs: &WebAndBatch| mask(jobs.spinner).intersects(&own);
    for round in 0..2 {
        wait_until("the idle core is lent", || lent(&daemon, "web") == own.to_string());
        wait_until("the borrower may use it", || is_on_own(&jobs));
        assert_eq!(mask(jobs.web.pid()), own, "the owner may use it all the time, in round {round}");
        let spinner = jobs.web.background(SPIN);
        wait_until("the core is back", || lent(&daemon, "web").is_empty() && !is_on_own(&jobs));
        jobs.web.run(&format!("kill {spinner}; wait; echo"));
    }
    wait_for_kinds_of_events(&daemon, &["lent", "revoked", "returned"]);
    for job in ["batch", "web"] {
        daemon.release(job).unwrap();
        let remaining = || remaining_cgroups(&format!("{job}.{}", daemon.tag()));
        daemon.check_after_reply(&daemon.job_id(job), &Vec::<PathBuf>::new(), remaining);
    }
    daemon.check_after_reply(&daemon.job_id("batch"), &jobs.cgroups_before, || cgroups(jobs.spinner));
    assert_eq!(remaining_cgroups(daemon.tag()), Vec::<PathBuf>::new());
}

#[test]
fn release_all_undoes_what_a_killed_daemon_lent() {
    let Some(mut daemon) = lending_daemon(LENDING) else { return };
    let jobs = WebAndBatch::start(&daemon);
    let before = mask(std::process::id());
    wait_until("the idle core is lent", || lent(&daemon, "web") == jobs.own.to_string());
    daemon.kill();
    let undone = daemon.release_all_command().output().unwrap();
    assert!(undone.status.success(), "{undone:?}");
    for pid in [jobs.spinner, jobs.batch.pid()] {
        assert_eq!((mask(pid), cgroups(pid)), (before.clone(), jobs.cgroups_before.clone()), "process {pid}");
    }
    assert_eq!(remaining_cgroups(daemon.tag()), Vec::<PathBuf>::new());
}

/// Whether the job `batch` has the CPUs `cpus`, and this process of it is on them.
fn has_cores(daemon: &Daemon, pid: u32, cpus: &CpuSet) -> bool {
    daemon.job("batch").map(|job| job.cpus) == Some(cpus.to_string()) && mask(pid) == *cpus
}

/// Whether the process uses CPU time.
pub fn runs(pid: u32) -> bool {
    let before = process_cpu_time(daemon_pid(pid)).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    process_cpu_time(daemon_pid(pid)).unwrap() > before
}

fn daemon_pid(pid: u32) -> pjw_core::ids::Pid {
    pjw_core::ids::Pid(pid)
}

#[test]
fn a_borrower_without_a_core_is_frozen_and_thawed_when_a_core_is_free() {
    let Some(mut daemon) = lending_daemon(&format!("{LENDING}starved = \"freeze\"\n")) else { return };
    let mut batch = Shell::start();
    let spinner = batch.background(SPIN);
    let before = (mask(spinner), cgroups(spinner));
    assign(&daemon, "batch", "besteffort", "64", &batch);
    let all: CpuSet = daemon.job("batch").unwrap().cpus.parse().unwrap();
    let other = Shell::start();
    let take_all = |daemon: &Daemon| {
        let cores = crate::processes::core_count().to_string();
        assign(daemon, "all", "normal", &cores, &other);
    };
    take_all(&daemon);
    wait_until("the borrower is frozen", || is_frozen(spinner));
    let shown = || daemon.job("batch").map(|job| (job.state, job.cpus));
    wait_until("it waits for a core", || shown() == Some(("waiting".to_owned(), String::new())));
    let why = daemon.pjwctl(&["explain", &daemon.job_id("batch")]).stdout;
    assert!(String::from_utf8(why).unwrap().contains("its processes are frozen, because"));
    daemon.release("all").unwrap();
    wait_until("the borrower runs again", || runs(spinner));
    wait_until("it has the cores again", || has_cores(&daemon, spinner, &all));
    for is_killed in [false, true] {
        take_all(&daemon);
        wait_until("the borrower is frozen", || is_frozen(spinner));
        if is_killed {
            daemon.kill();
            let thawed = daemon.thaw_command().output().unwrap();
            assert!(thawed.status.success(), "{thawed:?}");
        } else {
            daemon.stop();
        }
        wait_until("the borrower runs while there is no daemon", || runs(spinner));
        daemon.spawn();
        wait_until("the borrower is frozen again", || is_frozen(spinner));
        daemon.release("all").unwrap();
    }
    take_all(&daemon);
    wait_until("the borrower is frozen", || is_frozen(spinner));
    daemon.release("batch").unwrap();
    wait_until("the released job runs", || runs(spinner));
    daemon.check_after_reply(&daemon.job_id("batch"), &before, || (mask(spinner), cgroups(spinner)));
    daemon.release("all").unwrap();
    assign(&daemon, "batch", "besteffort", "64", &batch);
    take_all(&daemon);
    wait_until("the borrower is frozen", || is_frozen(spinner));
    daemon.kill();
    let undone = daemon.release_all_command().output().unwrap();
    assert!(undone.status.success(), "{undone:?}");
    wait_until("the borrower runs again", || runs(spinner));
    assert_eq!((mask(spinner), cgroups(spinner)), before);
    assert_eq!(remaining_cgroups(daemon.tag()), Vec::<PathBuf>::new());
}

#[test]
fn a_borrower_without_a_core_is_squeezed_onto_the_housekeeping_pus_until_a_core_is_free() {
    let Some(daemon) = lending_daemon(&format!("housekeeping = \"0\"\n{LENDING}")) else { return };
    let (mut batch, other) = (Shell::start(), Shell::start());
    let spinner = batch.background(SPIN);
    let before = (mask(spinner), cgroups(spinner));
    assign(&daemon, "batch", "besteffort", "64", &batch);
    let own = mask(spinner);
    let housekeeping: CpuSet = "0".parse().unwrap();
    assert!(!own.intersects(&housekeeping), "{own}");
    for _ in 0..2 {
        assign(&daemon, "all", "normal", "all", &other);
        wait_until("the borrower is on the housekeeping PU", || mask(spinner) == housekeeping);
        wait_until("the borrower runs there", || runs(spinner));
        daemon.release("all").unwrap();
        wait_until("it has the free cores again", || has_cores(&daemon, spinner, &own));
    }
    daemon.release("batch").unwrap();
    daemon.check_after_reply(&daemon.job_id("batch"), &before, || (mask(spinner), cgroups(spinner)));
}

#[test]
fn a_borrower_that_pjwd_may_not_signal_is_one_warning_and_one_line_in_the_log() {
    if !is_root() || !is_installed("setpriv") || !has_two_cores() {
        return;
    }
    let config = format!("{LENDING}revocation_signal = \"SIGWINCH\"\n");
    let mut daemon = Daemon::prepare_with(Enforcement::Cpuset, &config);
    daemon.spawn_by(&["setpriv", "--bounding-set", "-kill", "--"]);
    if !lends(&daemon) {
        return;
    }
    let mut command = Command::new("sh");
    command.uid(65_534).gid(65_534);
    let (mut web, mut batch) = (Shell::start(), Shell::from_command(command));
    let borrower = batch.background(SPIN);
    assign(&daemon, "web", "guaranteed", "1", &web);
    assign(&daemon, "batch", "besteffort", "64", &batch);
    let warnings = || -> Vec<_> {
        let warnings = daemon.status().warnings.into_iter();
        warnings.filter(|warning| warning.code == "revocation-signal").collect()
    };
    for round in 0..2 {
        wait_until("the idle core is lent", || !lent(&daemon, "web").is_empty());
        let spinner = web.background(SPIN);
        wait_until("the core is back", || lent(&daemon, "web").is_empty());
        wait_until("the status has a warning", || !warnings().is_empty());
        let told = warnings();
        assert!(told.len() == 1 && told[0].job == daemon.job_id("batch"), "round {round}: {told:?}");
        assert!(told[0].text.contains("SIGWINCH") && told[0].text.contains("EPERM"), "{told:?}");
        assert!(told[0].remedy.contains("CAP_KILL"), "{told:?}");
        web.run(&format!("kill {spinner}; wait; echo"));
    }
    assert_eq!(daemon.log().matches("did not get SIGWINCH").count(), 1, "{}", daemon.log());
    wait_until("the process itself goes on", || runs(borrower));
    daemon.release("batch").unwrap();
    wait_until("the warning ends with the job", || warnings().is_empty());
}

#[test]
fn run_of_a_borrower_without_a_core_begins_its_command_when_a_core_is_free() {
    let Some(mut daemon) = lending_daemon(&format!("{LENDING}starved = \"freeze\"\n")) else { return };
    let other = Shell::start();
    assign(&daemon, "all", "normal", &crate::processes::core_count().to_string(), &other);
    let job = daemon.job_id("late");
    let mut run = daemon.pjwctl_command(&["run", "--job", &job, "--class", "besteffort", "--cores", "1"]);
    let errors = daemon.dir().join("errors");
    run.stdout(Stdio::piped()).stderr(fs::File::create(&errors).unwrap());
    let mut run = run.args(["--", "sh", "-c", "echo $PJW_CPUS"]).spawn().unwrap();
    wait_until("the job waits", || daemon.job("late").is_some_and(|job| job.state == "waiting"));
    let text = fs::read_to_string(&errors).unwrap();
    assert!(text.starts_with("pjwctl: no core is free to borrow: sh waits frozen until one is"), "{text:?}");
    assert!(run.try_wait().unwrap().is_none(), "the command has not begun");
    daemon.stop();
    daemon.spawn();
    wait_until("the job waits again", || daemon.job("late").is_some_and(|job| job.state == "waiting"));
    assert!(run.try_wait().unwrap().is_none(), "the stop of the daemon did not end it");
    daemon.release("all").unwrap();
    let output = wait_for("the command ends", || run.try_wait().unwrap()).success();
    let mut cpus = String::new();
    run.stdout.take().unwrap().read_to_string(&mut cpus).unwrap();
    assert!(output && cpus.trim().parse::<CpuSet>().is_ok_and(|cpus| !cpus.is_empty()), "{cpus:?}");
}

/// What `pjwctl explain PID` prints, without line breaks.
fn explanation(daemon: &Daemon, pid: u32) -> String {
    let text = String::from_utf8(daemon.pjwctl(&["explain", &pid.to_string()]).stdout).unwrap();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_borrower_that_changes_its_mask_or_its_policy_loses_nothing_and_is_told_in_one_line() {
    // A pin could not be told from a mask of the borrower's own.
    let Some(daemon) = lending_daemon(&format!("{LENDING}[balance]\npin = false\n")) else { return };
    let mut jobs = WebAndBatch::start(&daemon);
    wait_until("the idle core is lent", || lent(&daemon, "web") == jobs.own.to_string());
    // The core may be taken back for a short time, and the mask be lost with it.
    wait_until("the borrower has a mask of its own, and explain says so in one line", || {
        let (pid, allowed) = (jobs.spinner, mask(jobs.spinner));
        let first = allowed.first().unwrap();
        if allowed.len() > 1 {
            jobs.batch.run(&format!("taskset -pc {first} {pid} >/dev/null 2>&1; echo"));
        }
        let lines = explanation(&daemon, pid);
        lines.matches(&format!("- thread {pid}: it chose CPU {first} itself, inside CPUs ")).count() == 1
    });
    let web = jobs.web.background(SPIN);
    wait_until("the core is back", || lent(&daemon, "web").is_empty());
    let cpus = || daemon.job("batch").unwrap().cpus.parse::<CpuSet>().unwrap();
    wait_until("the borrower has left it", || mask(jobs.spinner).is_subset(&cpus()));
    wait_until("it still has a core", || runs(jobs.spinner));
    jobs.web.run(&format!("kill {web}; wait; echo"));
    wait_until("the idle core is lent again", || lent(&daemon, "web") == jobs.own.to_string());

    let refused = jobs.batch.run(&format!("chrt -r -p 1 {} 2>/dev/null; echo $?", jobs.spinner));
    if refused != "0" {
        return skip("the kernel refuses a real-time priority in the cgroup of a borrower");
    }
    let told = || {
        let warnings =
            daemon.status().warnings.into_iter().filter(|warning| warning.code == "realtime-borrower");
        warnings.map(|warning| warning.text).collect::<Vec<_>>()
    };
    wait_until("the status has a warning", || !told().is_empty());
    let (told, pid) = (told(), jobs.spinner);
    assert!(told.len() == 1 && told[0].contains(&format!("process {pid} of")), "{told:?}");
    wait_until("nothing is lent to it", || lent(&daemon, "web").is_empty());
    jobs.batch.run(&format!("chrt -o -p 0 {pid}; echo"));
    wait_until("the warning ends", || {
        daemon.status().warnings.iter().all(|warning| warning.code != "realtime-borrower")
    });
    wait_until("the idle core is lent once more", || lent(&daemon, "web") == jobs.own.to_string());
}

#[test]
fn a_borrower_that_runs_now_and_then_at_a_real_time_priority_gets_no_lent_core() {
    let Some(daemon) = lending_daemon(LENDING) else { return };
    let (web, mut batch) = (Shell::start(), Shell::start());
    // Little work: on a slow machine too, the process must not be busy for most of the time.
    let work = "n=0; while [ $n -lt 1500 ]; do n=$((n+1)); done";
    let worker = batch.background(&format!("sh -c 'while :; do {work}; sleep 0.02; done'"));
    assign(&daemon, "web", "guaranteed", "1", &web);
    assign(&daemon, "batch", "besteffort", "64", &batch);
    wait_until("the idle core is lent", || !lent(&daemon, "web").is_empty());
    if batch.run(&format!("chrt -r -p 1 {worker} 2>/dev/null; echo $?")) != "0" {
        return skip("the kernel refuses a real-time priority in the cgroup of a borrower");
    }
    // A thread at idle priority that waits for a busy CPU may be hot until then.
    wait_until("a thread that is not hot causes the warning", || {
        let status = daemon.status();
        let is_told = status.warnings.iter().any(|warning| {
            warning.code == "realtime-borrower" && warning.text.contains(&format!("process {worker} of"))
        });
        is_told && status.jobs.iter().any(|job| job.id == daemon.job_id("batch") && job.hot == 0)
    });
    wait_until("nothing is lent to the job", || lent(&daemon, "web").is_empty());
    batch.run(&format!("chrt -o -p 0 {worker}; echo"));
    wait_until("the idle core is lent again", || !lent(&daemon, "web").is_empty());
}

#[test]
fn status_and_doctor_say_why_owners_are_sampled_and_that_lending_is_switched_off() {
    if !is_root() || !is_installed("setpriv") || !has_two_cores() {
        return;
    }
    let mut daemon = Daemon::prepare_with(Enforcement::Cpuset, LENDING);
    daemon.spawn_by(&["setpriv", "--bounding-set", "-bpf,-perfmon,-sys_admin", "--"]);
    if !lends(&daemon) {
        return;
    }
    let _jobs = WebAndBatch::start(&daemon);
    let lending = || daemon.status().lending.unwrap();
    let doctor = || {
        let output = daemon.pjwctl(&["doctor", "--json"]);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let facts = report["facts"].as_array().unwrap();
        let fact = facts.iter().find(|fact| fact["code"] == "lending").unwrap();
        fact["text"].as_str().unwrap().to_owned()
    };
    wait_until("pjwd has tried to load the BPF program", || lending().demand == "sampled");
    let why = lending().why_sampled;
    assert!(why.contains("CAP_BPF") || why.contains("not compiled in"), "{why}");
    assert_eq!(lending().why_not, "");
    let status = String::from_utf8(daemon.pjwctl(&["status"]).stdout).unwrap();
    assert!(status.contains("their owners are sampled each 2 ms"), "{status}");
    assert!(doctor().ends_with(&why), "{}", doctor());
    daemon.configure("[lending]\nenabled = false\n");
    assert!(daemon.pjwctl(&["reload"]).status.success());
    wait_until("the status says that nothing is lent", || {
        lending().why_not == "the configuration says lending.enabled = false"
    });
    assert!(doctor().ends_with("the configuration says lending.enabled = false"), "{}", doctor());
}

#[test]
fn a_rule_that_matches_no_process_and_a_process_that_matches_two_rules_are_one_warning_each() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let program = daemon.dir().join("pjw_both");
    copy_program("/bin/sh", &program);
    let provision = |name: &str, rule: &str| {
        let job = daemon.job_id(name);
        let output = daemon.pjwctl(&["provision", &job, "--cores", "1", "--match", rule]);
        assert!(output.status.success(), "{output:?}");
    };
    let texts = |code: &str| {
        let warnings = daemon.status().warnings.into_iter().filter(|warning| warning.code == code);
        warnings.map(|warning| warning.text).collect::<Vec<_>>()
    };
    provision("one", "comm=pjw_both");
    provision("two", &format!("comm=pjw_both,user={}", nix::unistd::getuid()));
    assert_eq!(texts("unmatched-rule").len(), 2, "neither has a process");
    let mut shell = Shell::from_command(Command::new(&program));
    shell.run("echo");
    assert!(daemon.pjwctl(&["reload"]).status.success(), "it scans all processes");
    wait_until("the first provision has the process", || {
        daemon.job("one").is_some_and(|job| job.processes == 1)
    });
    wait_until("the status names the other rule", || texts("ambiguous-rule").len() == 1);
    let text = texts("ambiguous-rule").remove(0);
    assert!(
        text.contains(&format!("process {} of", shell.pid())) && text.contains("comm=pjw_both"),
        "{text}"
    );
    assert_eq!(texts("unmatched-rule").len(), 1, "only the second has none");
}

#[test]
fn the_configuration_promises_cores_to_a_service_that_is_recognised_when_it_starts() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let name = format!("web.{}", daemon.tag());
    let table =
        |cores: u32| format!("[[provision]]\nname = \"{name}\"\ncores = {cores}\nmatch = \"comm=pjw_web\"\n");
    daemon.configure(&table(1));
    assert!(daemon.pjwctl(&["reload"]).status.success());
    let promised =
        wait_for("the cores are promised", || daemon.job("web").filter(|job| !job.cpus.is_empty()));
    assert_eq!((promised.state.as_str(), promised.provision.as_deref()), ("reserved", Some("comm=pjw_web")));
    // A program of this name: sh, under another name.
    let program = daemon.dir().join("pjw_web");
    copy_program("/bin/sh", &program);
    let mut shell = Shell::from_command(Command::new(&program));
    shell.run("echo");
    assert!(daemon.pjwctl(&["reload"]).status.success(), "it scans all processes");
    wait_until("the service is recognised", || mask(shell.pid()).to_string() == promised.cpus);
    drop(shell);
    wait_until("the service has ended", || daemon.job("web").is_some_and(|job| job.processes == 0));
    assert_eq!(daemon.job("web").unwrap().cpus, promised.cpus, "the cores stay with it");
    assert!(daemon.pjwctl(&["unprovision", &name]).status.success());
    wait_until("the promise is taken back", || daemon.job("web").is_none());
    let told = || String::from_utf8(daemon.pjwctl(&["reload"]).stdout).unwrap();
    assert!(told().ends_with("1 core, comm=pjw_web] was missing or changed, and is made again\n"));
    assert_eq!(daemon.job("web").unwrap().cpus, promised.cpus);
    assert_eq!(told(), "the configuration was read: nothing changed\n");
    daemon.configure(&table(65_000));
    assert!(told().contains("does not get the cores that the configuration promises: 65000 cores"));
    let warning = wait_for("the status has a warning", || {
        daemon.status().warnings.into_iter().find(|warning| warning.code == "provision")
    });
    assert!(warning.text.contains("65000 cores"), "{}", warning.text);
    daemon.configure(&format!("{}{}", table(1), table(65_000).replace("web", "absent")));
    assert!(told().contains("does not get the cores that the configuration promises: 65000 cores"));
    let absent = name.replace("web", "absent");
    let explained = daemon.pjwctl(&["explain", &absent]);
    let text = String::from_utf8(explained.stdout).unwrap();
    assert!(text.contains("65000 cores") && text.contains("[[provision]]"), "{text}");
    for verb in ["show", "release", "assign", "unprovision"] {
        let refused = daemon.pjwctl(&[verb, &absent]);
        let text = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{verb}: {text}");
        assert!(text.contains("65000 cores") && text.contains("[[provision]]"), "{verb}: {text}");
    }
    let cores = crate::processes::core_count();
    let other = table(cores).replace("web", "other");
    daemon.configure(&format!("{}{other}", table(1)));
    let reloaded = daemon.pjwctl(&["reload"]);
    assert!(reloaded.status.success(), "{reloaded:?}");
    let sum = format!("promise {} cores, and jobs can have {cores}", cores + 1);
    wait_until("the status says that the sum is too large", || {
        daemon
            .status()
            .warnings
            .iter()
            .any(|warning| warning.code == "provision" && warning.text.contains(&sum))
    });
    daemon.configure("");
    assert!(daemon.pjwctl(&["reload"]).status.success());
    wait_until("the promise ends with its table", || daemon.job("web").is_none());
    assert!(daemon.status().warnings.iter().all(|warning| warning.code != "provision"));
}
