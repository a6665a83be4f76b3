//! A process stays in its job's cpuset: by the kernel, also while the daemon is stopped, and by the daemon, if
//! another program moves the process or writes the cpuset.

use std::path::PathBuf;
use std::sync::{Arc, Barrier};

use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_core::text::cpus_text;
use pjw_linux::sys::affinity;
use pjw_tests::cpusets::{cgroup_of_process, find_hierarchy};
use pjw_tests::daemon::{Daemon, Enforcement};
use pjw_tests::waiting::{wait_for, wait_until};
use serde_json::{Value, json};

use super::{
    all_cpus, cgroup_dir, cgroup_of_job, check_kept_by_cpuset, enforcement, history, move_process, read_file,
    start_daemon, warning_texts, write_file,
};
use crate::processes::{KillOnDrop, Shell, has_cpusets, has_two_cores, is_asleep, mask, masks};

/// The number of threads of the process that tries to leave its cpuset.
const THREADS: usize = 64;
const FUGITIVE_VARIABLE: &str = "PJW_TEST_FLEES";

/// Not a test, but the process of the next test that tries to leave its cpuset. Without the variable, the function
/// returns at once. The process starts 64 threads, sets the mask of each of them to all CPUs, prints one line, and
/// waits for the end of its input.
#[test]
fn fugitive_process() {
    if std::env::var_os(FUGITIVE_VARIABLE).is_none() {
        return;
    }
    let all_started = Arc::new(Barrier::new(THREADS + 1));
    let start_thread = |_| {
        let all_started = Arc::clone(&all_started);
        std::thread::spawn(move || {
            affinity::set_full_mask(Tid(u32::try_from(nix::unistd::gettid().as_raw()).unwrap())).unwrap();
            all_started.wait();
            std::thread::park();
        })
    };
    let _threads: Vec<_> = (0..THREADS).map(start_thread).collect();
    all_started.wait();
    println!("fled");
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Whether the daemon reports affinity requests beyond a cpuset. If not, reports that this part of the test is
/// skipped.
fn reports_affinity_requests(daemon: &Daemon) -> bool {
    let log = daemon.log();
    let line = log
        .lines()
        .find(|line| line.contains("affinity requests beyond a job's cpuset are reported"))
        .unwrap();
    let is_reported = line.contains("(BPF program on sched_setaffinity)");
    if !is_reported {
        pjw_tests::skipping::skip(format_args!("the part on affinity requests: {line}"));
    }
    is_reported
}

/// Returns the texts of the violations of job a.
fn violation_texts(daemon: &Daemon) -> Vec<String> {
    let texts = history(daemon, "a").into_iter().filter(|(event, _)| event == "violation");
    texts.map(|(_, text)| text).collect()
}

/// Returns the shell command that starts the process that tries to leave its cpuset.
fn fugitive_command() -> String {
    let program = std::env::current_exe().unwrap();
    format!(
        "{FUGITIVE_VARIABLE}=1 {} --exact cpusets::staying::fugitive_process --nocapture",
        program.display()
    )
}

#[test]
fn a_job_stays_in_its_cpuset_while_the_daemon_is_stopped() {
    let Some(daemon) = start_daemon("interval = \"10m\"\nrescan_interval = \"10m\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let cgroup = cgroup_of_job(&daemon, "a");
    check_kept_by_cpuset(&daemon, "a");
    let (input, output) = (daemon.dir().join("in"), daemon.dir().join("out"));
    nix::unistd::mkfifo(&input, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let line = format!("{} <{} >{} & echo $!", fugitive_command(), input.display(), output.display());
    // The daemon reports all requests of a process at once only if it has stopped before the first one.
    let (fugitive, _ends, _input) = daemon.while_stopped(|| {
        let child = shell.background("sleep 1000");
        let orphan: u32 =
            shell.run("setsid sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!' | cat").parse().unwrap();
        let fugitive: u32 = shell.run(&line).parse().unwrap();
        let ends = [orphan, fugitive].map(KillOnDrop);
        let input = std::fs::File::options().write(true).open(&input).unwrap();
        wait_until("all threads have set their masks", || {
            std::fs::read_to_string(&output).is_ok_and(|texts| texts.contains("fled"))
        });
        let all = [shell.pid(), child, orphan, fugitive];
        for pid in all {
            affinity::set_full_mask(Tid(pid)).unwrap();
        }
        let seen = masks(&all);
        assert!(seen.len() >= 3 + THREADS, "{seen:?}");
        assert!(seen.iter().all(|(_, mask)| *mask == cpus.to_string()), "{seen:?}");
        for pid in all {
            assert_eq!(cgroup_of_process(pid).as_deref(), Some(cgroup.as_str()));
        }
        (fugitive, ends, input)
    });
    wait_until("all processes are members", || {
        let job = daemon.job("a").unwrap();
        (job.processes, job.violations, job.enforcement.as_str()) == (4, 0, "cpuset")
    });
    if !reports_affinity_requests(&daemon) {
        return;
    }
    let texts = wait_for("the request is reported", || {
        Some(violation_texts(&daemon)).filter(|texts| !texts.is_empty())
    });
    let [text] = texts.as_slice() else { panic!("not one report for the process: {texts:?}") };
    let expected = format!(
        "asked for {}: the cpuset of {} kept it on {} (and 63 times more)",
        cpus_text(&all_cpus(&daemon)),
        daemon.job_id("a"),
        cpus_text(&cpus)
    );
    assert!(text.contains(&format!(" of process {fugitive} ")) && text.ends_with(&expected), "{text}");
}

#[test]
fn a_request_for_cpus_beyond_the_cpuset_is_reported() {
    let Some(daemon) = start_daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    let others = all_cpus(&daemon).difference(&cpus);
    let taskset = |shell: &mut Shell, cpus: &CpuSet| shell.run(&format!("taskset -c {cpus} true; echo $?"));
    if taskset(&mut shell, &cpus) != "0" {
        pjw_tests::skipping::skip("taskset is not installed");
        return;
    }
    assert_eq!(taskset(&mut shell, &all_cpus(&daemon)), "0", "the kernel grants the part in the cpuset");
    if !reports_affinity_requests(&daemon) {
        return;
    }
    wait_until("the request is reported", || {
        violation_texts(&daemon).iter().any(|text| text.contains("(taskset) asked for"))
    });
    assert_eq!(taskset(&mut shell, &others), "1", "the kernel refuses a mask outside the cpuset");
    let refused =
        format!("(taskset) asked for {others}: the kernel refused, for none of them is in {cpus} of ");
    wait_until("the refused request is reported too", || {
        violation_texts(&daemon).iter().any(|text| text.contains(&refused))
    });
    let texts = violation_texts(&daemon);
    assert_eq!(texts.len(), 2, "a request inside the cpuset is not reported: {texts:?}");
    assert_eq!(daemon.job("a").unwrap().violations, 0, "the process was never outside its cpuset");
}

#[test]
fn a_request_beyond_the_pin_is_reported_and_the_thread_pinned_again() {
    let Some(daemon) = start_daemon("interval = \"200ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    let busy = [0, 1].map(|_| shell.background("while :; do :; done"));
    let _ends = busy.map(KillOnDrop);
    let are_pinned = || busy.iter().all(|&pid| mask(pid).len() < cpus.len());
    // A daemon that runs may change the pins between the two. A request of a thread that is not pinned is not beyond a
    // pin.
    wait_until("both are pinned, and one requests every PU", || {
        let request = || are_pinned() && affinity::set_full_mask(Tid(busy[0])).is_ok();
        are_pinned() && daemon.while_stopped(request)
    });
    if cpus == all_cpus(&daemon) {
        // There are no other CPUs that the thread could have requested.
        wait_until("both are pinned again", are_pinned);
        let kinds: Vec<String> = history(&daemon, "a").into_iter().map(|(event, _)| event).collect();
        let is_reported = kinds.iter().any(|kind| kind == "violation" || kind == "repaired");
        assert!(!is_reported, "{kinds:?}");
        return;
    }
    wait_until("the events are reported", || {
        let texts = history(&daemon, "a");
        let at = texts
            .iter()
            .position(|(event, text)| event == "violation" && text.contains(&busy[0].to_string()));
        at.is_some_and(|at| texts[at..].iter().any(|(event, _)| event == "repaired"))
    });
    wait_until("both are pinned again", are_pinned);
}

#[test]
fn a_command_is_inside_before_its_first_instruction() {
    let Some(daemon) = start_daemon("") else { return };
    let id = daemon.job_id("a");
    for _ in 0..10 {
        // cat reads these two files first of all.
        let arguments =
            ["run", "--cores", "1", "--job", &id, "--", "cat", "/proc/self/status", "/proc/self/cgroup"];
        let delayed_before = daemon.delayed_cpuset_changes(&id);
        let output = daemon.pjwctl(&arguments);
        assert!(output.status.success(), "{output:?}");
        let texts = String::from_utf8_lossy(&output.stdout).into_owned();
        let list = texts.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let core: CpuSet = daemon.status().cores[0].cpus.parse().unwrap();
        assert_eq!(list.trim().parse::<CpuSet>().unwrap().len(), core.len(), "{texts}");
        let cgroup = cgroup_of_job(&daemon, "a");
        // Until a delayed move to the cpuset is made, the mask keeps the command on its cores.
        let is_in_cpuset = texts.lines().any(|line| line.ends_with(&format!(":{cgroup}")));
        assert!(is_in_cpuset || daemon.delayed_cpuset_changes(&id) > delayed_before, "{texts}");
        wait_until("the job is over, and its cgroup is removed", || {
            daemon.status().jobs.is_empty() && !cgroup_dir(&cgroup).exists()
        });
    }
}

#[test]
fn a_cpuset_that_another_program_widens_is_repaired_and_reported() {
    // The job sleeps, and no rescan follows: the write itself is noticed.
    let config = "interval = \"50ms\"\nrescan_interval = \"1h\"\n";
    let Some(daemon) = start_daemon(config) else { return };
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    let cgroup = cgroup_of_job(&daemon, "a");
    let repairs = || history(&daemon, "a").iter().filter(|(event, _)| event == "repaired").count();
    for again in 1..=2 {
        write_file(&cgroup, "cpuset.cpus", &all_cpus(&daemon));
        wait_until("the cpuset is repaired", || read_file(&cgroup, "cpuset.cpus") == cpus.to_string());
        // The kernel shows a new cpuset before it has changed the masks of all threads.
        wait_until("the mask is repaired", || mask(shell.pid()) == cpus);
        wait_until("the repair is reported", || repairs() == again);
        // If another program changes a cpuset too often between two full scans, the daemon does not write it any
        // more.
        wait_until("the job is kept by a cpuset again", || enforcement(&daemon, "a") == "cpuset");
    }
    let texts = history(&daemon, "a");
    let (_, text) = texts.iter().find(|(event, _)| event == "repaired").unwrap();
    assert!(text.contains(&cgroup) && text.contains(&cpus.to_string()), "{text}");
}

#[test]
fn a_member_moved_to_another_cgroup_is_moved_back_and_reported() {
    let Some(daemon) = start_daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    let cgroup = cgroup_of_job(&daemon, "a");
    let child = shell.background("sleep 1000");
    let _end = KillOnDrop(child);
    move_process(shell.pid(), "/");
    // A child of a member, started outside the cpuset.
    let late = shell.background("sleep 1000");
    let _end_of_late = KillOnDrop(late);
    wait_until("all processes are in the cgroup again", || {
        [shell.pid(), child, late]
            .iter()
            .all(|&pid| cgroup_of_process(pid).as_deref() == Some(cgroup.as_str()))
    });
    wait_until("all masks are those of the job", || {
        [shell.pid(), child, late].iter().all(|&pid| mask(pid) == cpus)
    });
    let texts = wait_for("the events are reported", || {
        let texts = history(&daemon, "a");
        let of_shell = |(event, text): &&(String, String)| {
            ["stray", "repaired"].contains(&event.as_str()) && text.contains(&shell.pid().to_string())
        };
        let texts: Vec<_> = texts.iter().filter(of_shell).cloned().collect();
        (texts.len() >= 2).then_some(texts)
    });
    assert_eq!((texts[0].0.as_str(), texts[1].0.as_str()), ("stray", "repaired"));
    assert!(texts[0].1.contains("had been moved to /"), "{texts:?}");
    assert!(texts[1].1.contains(&cgroup), "{texts:?}");
    wait_until("the job is kept by a cpuset again", || enforcement(&daemon, "a") == "cpuset");
}

#[test]
fn a_mask_that_a_program_sets_inside_its_cpuset_is_kept() {
    let Some(daemon) = start_daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let own = shell.background("sleep 1000");
    let _end = KillOnDrop(own);
    // Before, it may wait for a CPU for so long that it is pinned, and its mask would be beyond the pin.
    wait_until("the process sleeps", || is_asleep(own));
    let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    let one = CpuSet::from(cpus.last().unwrap());
    affinity::set_mask(Tid(own), &one).unwrap();
    // A scan that would have changed the mask: the new process is known after the scan.
    let late = shell.background("sleep 1000");
    let _end_of_late = KillOnDrop(late);
    wait_until("the new process is a member", || daemon.job("a").unwrap().processes == 3);
    assert_eq!(mask(own), one);
    // On a busy machine, the others may have waited for a CPU for so long that they counted as busy.
    wait_until("the others are not pinned", || [shell.pid(), late].iter().all(|&pid| mask(pid) == cpus));
    assert_eq!(mask(own), one);
    assert!(history(&daemon, "a").iter().all(|(event, _)| event != "violation"), "there was no violation");
}

#[test]
fn a_cpuset_follows_the_size_of_its_job() {
    let Some(daemon) = start_daemon("") else { return };
    let shell = Shell::start();
    let cgroup = cgroup_of_job(&daemon, "a");
    for cores in [1, 2, 1] {
        let cpus = daemon.assign("a", cores, &[shell.pid()]).unwrap();
        check_kept_by_cpuset(&daemon, "a");
        assert_eq!((read_file(&cgroup, "cpuset.cpus"), mask(shell.pid())), (cpus.to_string(), cpus));
    }
}

#[test]
fn memory_is_bound_on_request() {
    let Some(daemon) = start_daemon("") else { return };
    let shell = Shell::start();
    let (id, pid) = (daemon.job_id("a"), shell.pid().to_string());
    let arguments = ["assign", &id, "--cores", "1", "--bind-memory", "--pid", &pid];
    let output = daemon.pjwctl(&arguments);
    assert!(output.status.success(), "{output:?}");
    check_kept_by_cpuset(&daemon, "a");
    let topology = pjw_linux::topology::load_topology(pjw_linux::topology::TopologySource::Live).unwrap();
    let cpus = mask(shell.pid());
    let nodes = topology
        .domains(pjw_core::topology::TopologyLevel::NumaNode)
        .filter(|node| node.cpus.intersects(&cpus));
    let nodes: CpuSet = nodes.map(|node| pjw_core::cpuset::Pu(node.number)).collect();
    assert_eq!(read_file(&cgroup_of_job(&daemon, "a"), "cpuset.mems"), nodes.to_string());
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:")).unwrap();
    assert_eq!(list.trim(), nodes.to_string());
}

#[test]
fn a_job_that_cgroup_v1_cannot_isolate_has_an_ordinary_cpuset_with_a_warning() {
    let Some(daemon) = start_daemon("interval = \"50ms\"\n") else { return };
    if find_hierarchy().unwrap().is_unified {
        pjw_tests::skipping::skip("cgroup v2 isolates the job: the tests on the virtual machine cover that");
        return;
    }
    let shell = Shell::start();
    let (id, pid) = (daemon.job_id("a"), shell.pid().to_string());
    let output = daemon.pjwctl(&["assign", &id, "--cores", "1", "--isolated", "--pid", &pid]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(mask(shell.pid()).len(), all_cpus(&daemon).len() / 2);
    check_kept_by_cpuset(&daemon, "a");
    let texts = warning_texts(&daemon, "no-partition", "a");
    assert!(texts.len() == 1 && texts[0].contains("asked for --isolated"), "{texts:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(&texts[0]) && said.contains("needs cgroup v2"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_job_without_a_process_is_shown_with_the_cpuset_that_its_first_process_gets() {
    let Some(daemon) = start_daemon("") else { return };
    let output = daemon.pjwctl(&["assign", &daemon.job_id("a"), "--cores", "1"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(enforcement(&daemon, "a"), "cpuset");
    let shell = Shell::start();
    daemon.assign("a", 1, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
}

/// A cgroup that pjw did not make. It is removed when this value is dropped.
struct ForeignCgroup(PathBuf, String);

impl ForeignCgroup {
    /// Makes the cgroup. Its name is not one of pjw's, and it has every CPU.
    fn new() -> Self {
        let name = format!("/made-by-test-{}.service", std::process::id());
        let tree = find_hierarchy().unwrap();
        let dir = tree.cgroup(&name).unwrap().dir;
        std::fs::create_dir(&dir).unwrap();
        let foreign = Self(dir, name);
        // In cgroup v2, a cgroup without a cpuset of its own has that of its parent.
        if !tree.is_unified {
            for file in ["cpuset.mems", "cpuset.cpus"] {
                write_file(&foreign.1, file, &read_file("/", file));
            }
        }
        foreign
    }
}

impl Drop for ForeignCgroup {
    fn drop(&mut self) {
        wait_until("the cgroup has no process", || std::fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn a_process_in_a_foreign_cgroup_is_not_moved_unless_pjwctl_started_it() {
    if !has_two_cores() || !has_cpusets() {
        return;
    }
    let foreign = ForeignCgroup::new();
    let daemon = Daemon::start_with(Enforcement::Cpuset, "interval = \"50ms\"\n");
    let mut shell = Shell::start();
    move_process(shell.pid(), &foreign.1);
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    assert_eq!((mask(shell.pid()), cgroup_of_process(shell.pid())), (cpus, Some(foreign.1.clone())));
    assert_eq!(enforcement(&daemon, "a"), "affinity");
    let texts = warning_texts(&daemon, "no-wall", "a");
    assert!(texts.len() == 1 && texts[0].contains(&foreign.1), "{texts:?}");
    for argument in [shell.pid().to_string(), daemon.job_id("a")] {
        let output = daemon.pjwctl(&["explain", &argument]);
        let texts = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(texts.contains(&foreign.1), "explain {argument}: {texts}");
    }
    daemon.release("a").unwrap();
    assert_eq!(
        (mask(shell.pid()), cgroup_of_process(shell.pid())),
        (all_cpus(&daemon), Some(foreign.1.clone()))
    );

    let ctl = daemon.pjwctl_command(&["run", "--cores", "1", "--job", &daemon.job_id("b")]);
    let arguments: Vec<&str> =
        std::iter::once(ctl.get_program()).chain(ctl.get_args()).map(|word| word.to_str().unwrap()).collect();
    let cgroup = cgroup_of_job(&daemon, "b");
    let delayed_before = daemon.delayed_cpuset_changes(&daemon.job_id("b"));
    let texts = shell.run(&format!("{} -- grep -c ':{cgroup}$' /proc/self/cgroup", arguments.join(" ")));
    let is_delayed = daemon.delayed_cpuset_changes(&daemon.job_id("b")) > delayed_before;
    assert!(texts == "1" || is_delayed, "the command of pjwctl run is in its own cpuset: {texts}");
    drop(shell);
}

#[test]
fn in_observe_mode_no_cpuset_is_changed() {
    let Some(mut daemon) = start_daemon("interval = \"50ms\"\n") else { return };
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    check_kept_by_cpuset(&daemon, "a");
    let cgroup = cgroup_of_job(&daemon, "a");
    daemon.stop();
    daemon.configure("mode = \"observe\"\ninterval = \"50ms\"\n");
    daemon.spawn();
    write_file(&cgroup, "cpuset.cpus", &all_cpus(&daemon));
    wait_until("the violation is counted", || daemon.job("a").is_some_and(|job| job.violations >= 1));
    assert_eq!(read_file(&cgroup, "cpuset.cpus"), all_cpus(&daemon).to_string());
    write_file(&cgroup, "cpuset.cpus", &cpus);
    let reply: Value = daemon.call("ExplainPid", &json!({ "pid": shell.pid() })).unwrap();
    assert_eq!(reply["job"], daemon.job_id("a"));
    daemon.stop();
    let done = daemon.release_all_command().output().unwrap();
    assert!(done.status.success() && !cgroup_dir(&cgroup).exists(), "{done:?}");
}
