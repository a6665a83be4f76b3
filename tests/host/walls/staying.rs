//! Who is behind a wall stays there: by the kernel, also while the daemon sleeps, and by the daemon against everybody who
//! may move processes and write cpusets.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Barrier};

use nix::sys::signal::Signal;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;
use pjw_tests::daemon::{Daemon, Keeping};
use pjw_tests::patience::{until, until_true};
use pjw_tests::walls::{of_process, place};
use serde_json::{Value, json};

use super::{cgroup, daemon, directory, enforcement, everything, history, put, read, warnings, write};
use crate::processes::{EndOf, Shell, mask, masks, two_cores, walls};

/// So many threads a fugitive has.
const THREADS: usize = 64;
const FLEES: &str = "PJW_TEST_FLEES";

/// A daemon that does nothing at all until this goes.
struct Asleep<'a>(&'a Daemon);

impl<'a> Asleep<'a> {
    fn new(daemon: &'a Daemon) -> Self {
        daemon.signal(Signal::SIGSTOP);
        Self(daemon)
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::SIGCONT);
    }
}

/// Not a test but the fugitive of the next one; without the variable there is nothing to do. It opens many threads and
/// allows each of them every CPU, tells in one line that it has, and waits until its input ends.
#[test]
fn fugitive_process() {
    if std::env::var_os(FLEES).is_none() {
        return;
    }
    let all_are_there = Arc::new(Barrier::new(THREADS + 1));
    let flee = |_| {
        let all_are_there = Arc::clone(&all_are_there);
        std::thread::spawn(move || {
            affinity::set_full_mask(Tid(u32::try_from(nix::unistd::gettid().as_raw()).unwrap())).unwrap();
            all_are_there.wait();
            std::thread::park();
        })
    };
    let _threads: Vec<_> = (0..THREADS).map(flee).collect();
    all_are_there.wait();
    println!("fled");
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Whether the daemon hears who asks for what; says why not.
fn hears_asks(daemon: &Daemon) -> bool {
    let log = daemon.log();
    let line = log
        .lines()
        .find(|line| line.contains("affinity requests beyond a job's cpuset are reported"))
        .unwrap();
    let hears = line.contains("(BPF program on sched_setaffinity)");
    if !hears {
        pjw_tests::skipping::skip(format_args!("its part on what is asked: {line}"));
    }
    hears
}

/// The sentences on who tried to leave job a.
fn violations(daemon: &Daemon) -> Vec<String> {
    let told = history(daemon, "a").into_iter().filter(|(event, _)| event == "violation");
    told.map(|(_, text)| text).collect()
}

/// A shell's words that start a fugitive and wait for it to flee.
fn words_of_fugitive() -> String {
    let program = std::env::current_exe().unwrap();
    format!("{FLEES}=1 {} --exact walls::staying::fugitive_process --nocapture", program.display())
}

#[test]
fn a_job_stays_in_its_cpuset_while_the_daemon_is_stopped() {
    let Some(daemon) = daemon("interval = \"10m\"\nrescan_interval = \"10m\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let wall = cgroup(&daemon, "a");
    assert_eq!(enforcement(&daemon, "a"), "cpuset");
    let asleep = Asleep::new(&daemon);
    let child = shell.background("sleep 1000");
    let orphan: u32 = shell.ask("setsid sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!' | cat").parse().unwrap();
    let (input, output) = (daemon.dir().join("in"), daemon.dir().join("out"));
    nix::unistd::mkfifo(&input, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let line = format!("{} <{} >{} & echo $!", words_of_fugitive(), input.display(), output.display());
    let fugitive: u32 = shell.ask(&line).parse().unwrap();
    let _ends = (EndOf(orphan), EndOf(fugitive));
    let _input = std::fs::File::options().write(true).open(&input).unwrap();
    until_true("it has fled", || std::fs::read_to_string(&output).is_ok_and(|told| told.contains("fled")));
    let all = [shell.pid(), child, orphan, fugitive];
    for pid in all {
        affinity::set_full_mask(Tid(pid)).unwrap();
    }
    let seen = masks(&all);
    assert!(seen.len() >= 3 + THREADS, "{seen:?}");
    assert!(seen.iter().all(|(_, mask)| *mask == cpus.to_string()), "{seen:?}");
    for pid in all {
        assert_eq!(of_process(pid).as_deref(), Some(wall.as_str()));
    }
    drop(asleep);
    until_true("whoever was born meanwhile is known", || {
        let job = daemon.job("a").unwrap();
        (job.processes, job.violations, job.enforcement.as_str()) == (4, 0, "cpuset")
    });
    if !hears_asks(&daemon) {
        return;
    }
    let told =
        until("it is told that it tried", || Some(violations(&daemon)).filter(|told| !told.is_empty()));
    let [text] = told.as_slice() else { panic!("once for the process: {told:?}") };
    let got = format!(
        "asked for {}: the cpuset of {} kept it on {cpus} (and 63 times more)",
        everything(&daemon),
        daemon.id("a")
    );
    assert!(text.contains(&format!(" of process {fugitive} ")) && text.ends_with(&got), "{text}");
}

#[test]
fn a_request_for_cpus_beyond_the_cpuset_is_reported() {
    let Some(daemon) = daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let others = everything(&daemon).difference(&cpus);
    let taskset = |shell: &mut Shell, cpus: &CpuSet| shell.ask(&format!("taskset -c {cpus} true; echo $?"));
    if taskset(&mut shell, &cpus) != "0" {
        pjw_tests::skipping::skip("there is no taskset here");
        return;
    }
    assert_eq!(taskset(&mut shell, &everything(&daemon)), "0", "the kernel gives it what it may have");
    if !hears_asks(&daemon) {
        return;
    }
    until_true("it is told", || violations(&daemon).iter().any(|text| text.contains("(taskset) asked for")));
    assert_eq!(taskset(&mut shell, &others), "1", "and nothing where it may have nothing");
    let refused =
        format!("(taskset) asked for {others}: the kernel refused, for none of them is in {cpus} of ");
    until_true("that is told too", || violations(&daemon).iter().any(|text| text.contains(&refused)));
    let told = violations(&daemon);
    assert_eq!(told.len(), 2, "what it may have is its own business: {told:?}");
    assert_eq!(daemon.job("a").unwrap().violations, 0, "it was never outside");
}

#[test]
fn a_request_beyond_the_pin_is_reported_and_the_thread_pinned_again() {
    let Some(daemon) = daemon("interval = \"200ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
    let busy = [0, 1].map(|_| shell.background("while :; do :; done"));
    let _ends = busy.map(EndOf);
    let are_pinned = || busy.iter().all(|&pid| mask(pid).len() < cpus.len());
    until_true("both are pinned", are_pinned);
    affinity::set_full_mask(Tid(busy[0])).unwrap();
    until_true("it is told of", || {
        let told = history(&daemon, "a");
        let at =
            told.iter().position(|(event, text)| event == "violation" && text.contains(&busy[0].to_string()));
        at.is_some_and(|at| told[at..].iter().any(|(event, _)| event == "repaired"))
    });
    until_true("both are pinned again", are_pinned);
}

#[test]
fn a_command_is_inside_before_its_first_instruction() {
    let Some(daemon) = daemon("") else { return };
    let id = daemon.id("a");
    for _ in 0..10 {
        // cat does nothing before it reads these two.
        let words =
            ["run", "--cores", "1", "--job", &id, "--", "cat", "/proc/self/status", "/proc/self/cgroup"];
        let output = daemon.pjwctl(&words);
        assert!(output.status.success(), "{output:?}");
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        let list = told.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let core: CpuSet = daemon.status().cores[0].cpus.parse().unwrap();
        assert_eq!(list.trim().parse::<CpuSet>().unwrap().len(), core.len(), "{told}");
        let wall = cgroup(&daemon, "a");
        assert!(told.lines().any(|line| line.ends_with(&format!(":{wall}"))), "{told}");
        until_true("the job is over, and its wall is gone", || {
            daemon.status().jobs.is_empty() && !directory(&wall).exists()
        });
    }
}

#[test]
fn a_cpuset_that_another_program_widens_is_repaired_and_reported() {
    let Some(daemon) = daemon("interval = \"50ms\"\n") else { return };
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let wall = cgroup(&daemon, "a");
    let repairs = || history(&daemon, "a").iter().filter(|(event, _)| event == "repaired").count();
    for again in 1..=2 {
        write(&wall, "cpuset.cpus", &everything(&daemon));
        until_true("the wall is narrow", || read(&wall, "cpuset.cpus") == cpus.to_string());
        assert_eq!(mask(shell.pid()), cpus);
        until_true("it is told of", || repairs() == again);
        // What is written over too often between two full looks is somebody else's to write.
        until_true("it is kept again", || enforcement(&daemon, "a") == "cpuset");
    }
    let told = history(&daemon, "a");
    let (_, text) = told.iter().find(|(event, _)| event == "repaired").unwrap();
    assert!(text.contains(&wall) && text.contains(&cpus.to_string()), "{text}");
}

#[test]
fn a_member_moved_to_another_cgroup_is_moved_back_and_reported() {
    let Some(daemon) = daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let wall = cgroup(&daemon, "a");
    let child = shell.background("sleep 1000");
    let _end = EndOf(child);
    put(shell.pid(), "/");
    // Born outside, of a member.
    let late = shell.background("sleep 1000");
    let _end_of_late = EndOf(late);
    until_true("all are back", || {
        [shell.pid(), child, late].iter().all(|&pid| of_process(pid).as_deref() == Some(wall.as_str()))
    });
    until_true("they are inside", || [shell.pid(), child, late].iter().all(|&pid| mask(pid) == cpus));
    let told = until("it is told of", || {
        let told = history(&daemon, "a");
        let of_shell = |(event, text): &&(String, String)| {
            ["stray", "repaired"].contains(&event.as_str()) && text.contains(&shell.pid().to_string())
        };
        let told: Vec<_> = told.iter().filter(of_shell).cloned().collect();
        (told.len() >= 2).then_some(told)
    });
    assert_eq!((told[0].0.as_str(), told[1].0.as_str()), ("stray", "repaired"));
    assert!(told[0].1.contains("had been moved to /"), "{told:?}");
    assert!(told[1].1.contains(&wall), "{told:?}");
    until_true("it is kept again", || enforcement(&daemon, "a") == "cpuset");
}

#[test]
fn a_mask_that_a_program_sets_inside_its_cpuset_is_kept() {
    let Some(daemon) = daemon("interval = \"50ms\"\n") else { return };
    let mut shell = Shell::start();
    let own = shell.background("sleep 1000");
    let _end = EndOf(own);
    let cpus = daemon.assign("a", 2, &[shell.pid()]).unwrap();
    let one = CpuSet::from(cpus.last().unwrap());
    affinity::set_mask(Tid(own), &one).unwrap();
    // A look that would have changed it: the newcomer is known after it.
    let late = shell.background("sleep 1000");
    let _end_of_late = EndOf(late);
    until_true("the newcomer is known", || daemon.job("a").unwrap().processes == 3);
    assert_eq!((mask(own), mask(shell.pid()), mask(late)), (one, cpus.clone(), cpus));
    assert!(history(&daemon, "a").iter().all(|(event, _)| event != "violation"), "nothing was wrong");
}

#[test]
fn a_cpuset_follows_the_size_of_its_job() {
    let Some(daemon) = daemon("") else { return };
    let shell = Shell::start();
    let wall = cgroup(&daemon, "a");
    for cores in [1, 2, 1] {
        let cpus = daemon.assign("a", cores, &[shell.pid()]).unwrap();
        assert_eq!((read(&wall, "cpuset.cpus"), mask(shell.pid())), (cpus.to_string(), cpus));
        assert_eq!(enforcement(&daemon, "a"), "cpuset");
    }
}

#[test]
fn memory_is_bound_on_request() {
    let Some(daemon) = daemon("") else { return };
    let shell = Shell::start();
    let (id, pid) = (daemon.id("a"), shell.pid().to_string());
    let words = ["assign", &id, "--cores", "1", "--bind-memory", "--pid", &pid];
    let output = daemon.pjwctl(&words);
    assert!(output.status.success(), "{output:?}");
    let topology = pjw_linux::topology::load(pjw_linux::topology::TopologySource::Live).unwrap();
    let cpus = mask(shell.pid());
    let nodes =
        topology.domains(pjw_core::topology::Level::NumaNode).filter(|node| node.cpus.intersects(&cpus));
    let nodes: CpuSet = nodes.map(|node| pjw_core::cpuset::Pu(node.number)).collect();
    assert_eq!(read(&cgroup(&daemon, "a"), "cpuset.mems"), nodes.to_string());
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:")).unwrap();
    assert_eq!(list.trim(), nodes.to_string());
    assert_eq!(enforcement(&daemon, "a"), "cpuset");
}

#[test]
fn a_job_that_cgroup_v1_cannot_isolate_is_kept_by_masks_with_a_warning() {
    let Some(daemon) = daemon("interval = \"50ms\"\n") else { return };
    if place().unwrap().unified {
        pjw_tests::skipping::skip("cgroup v2 isolates: the virtual machine shows that");
        return;
    }
    let shell = Shell::start();
    let (id, pid) = (daemon.id("a"), shell.pid().to_string());
    let output = daemon.pjwctl(&["assign", &id, "--cores", "1", "--isolated", "--pid", &pid]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(mask(shell.pid()).len(), everything(&daemon).len() / 2);
    assert_eq!(enforcement(&daemon, "a"), "affinity");
    assert_eq!(of_process(shell.pid()).as_deref(), Some("/"));
    let told = warnings(&daemon, "no-wall", "a");
    assert!(told.len() == 1 && told[0].contains("can't be isolated"), "{told:?}");
}

/// A cgroup of somebody else's, which counts by it. It is gone with the test.
struct Made(PathBuf, String);

impl Made {
    /// One whose name no warden takes for its own, and which keeps nobody anywhere.
    fn new() -> Self {
        let name = format!("/made-by-test-{}.service", std::process::id());
        let tree = place().unwrap();
        let dir = tree.cgroup(&name).unwrap().dir;
        std::fs::create_dir(&dir).unwrap();
        let made = Self(dir, name);
        // v2 has a cgroup without a cpuset of its own, and with the one above.
        if !tree.unified {
            for file in ["cpuset.mems", "cpuset.cpus"] {
                write(&made.1, file, &read("/", file));
            }
        }
        made
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        until_true("nobody is left in it", || std::fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn a_process_in_a_foreign_cgroup_is_not_moved_unless_pjwctl_started_it() {
    if !two_cores() || !walls() {
        return;
    }
    let theirs = Made::new();
    let daemon = Daemon::keeping(Keeping::Walls, "interval = \"50ms\"\n");
    let mut shell = Shell::start();
    put(shell.pid(), &theirs.1);
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    assert_eq!((mask(shell.pid()), of_process(shell.pid())), (cpus, Some(theirs.1.clone())));
    assert_eq!(enforcement(&daemon, "a"), "affinity");
    let told = warnings(&daemon, "no-wall", "a");
    assert!(told.len() == 1 && told[0].contains(&theirs.1), "{told:?}");
    for question in [shell.pid().to_string(), daemon.id("a")] {
        let output = daemon.pjwctl(&["explain", &question]);
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(told.contains(&theirs.1), "explain {question}: {told}");
    }
    daemon.release("a").unwrap();
    assert_eq!((mask(shell.pid()), of_process(shell.pid())), (everything(&daemon), Some(theirs.1.clone())));

    let ctl = daemon.pjwctl_command(&["run", "--cores", "1", "--job", &daemon.id("b")]);
    let words: Vec<&str> =
        std::iter::once(ctl.get_program()).chain(ctl.get_args()).map(|word| word.to_str().unwrap()).collect();
    let wall = cgroup(&daemon, "b");
    let told = shell.ask(&format!("{} -- grep -c ':{wall}$' /proc/self/cgroup", words.join(" ")));
    assert_eq!(told, "1", "the command that pjwctl became is behind its own wall");
    drop(shell);
}

#[test]
fn in_observe_mode_no_cpuset_is_changed() {
    let Some(mut daemon) = daemon("interval = \"50ms\"\n") else { return };
    let shell = Shell::start();
    let cpus = daemon.assign("a", 1, &[shell.pid()]).unwrap();
    let wall = cgroup(&daemon, "a");
    daemon.stop();
    daemon.configure("mode = \"observe\"\ninterval = \"50ms\"\n");
    daemon.spawn();
    write(&wall, "cpuset.cpus", &everything(&daemon));
    until_true("it is seen outside", || daemon.job("a").is_some_and(|job| job.violations >= 1));
    assert_eq!(read(&wall, "cpuset.cpus"), everything(&daemon).to_string());
    write(&wall, "cpuset.cpus", &cpus);
    let reply: Value = daemon.call("ExplainPid", &json!({ "pid": shell.pid() })).unwrap();
    assert_eq!(reply["job"], daemon.id("a"));
    let mut undo = Command::new(pjw_tests::programs::program("pjwd"));
    daemon.stop();
    let done = undo.arg("--release-all").arg("--state-dir").arg(daemon.state_dir()).output().unwrap();
    assert!(done.status.success() && !directory(&wall).exists(), "{done:?}");
}
