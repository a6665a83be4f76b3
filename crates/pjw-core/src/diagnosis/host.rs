//! Findings about the host: kernel features, boot parameters, other programs that move threads, limits of the
//! observation, and the state of pjw.

use crate::basics::{Comm, CpuSet, Pid, Uid, cpus_text, prelude::*};
use crate::diagnosis::examination::{
    ConfigurationProblem, ConflictingProgram, DaemonStatus, DiagnosisInput, Finding, OrphanedJob, Severity,
    push_limited,
};
use crate::diagnosis::words::{counted_noun, join_names};
use crate::machine::TopologyLevel;
use crate::terms::own_cgroups::OwnCgroupNames;
use crate::terms::{CpusetHierarchy, JobId};

/// The short name of the finding that no pjwd looks after jobs.
const NO_DAEMON_CODE: &str = "no-warden";

/// The remedy if processes of other users are hidden.
const HIDDEN_PROCESSES: &str = "look as root, or mount /proc without hidepid=";

/// Programs that move threads, move interrupts or change cpusets: (name, effect, remedy, whether the program
/// undoes changes of pjw). A name that ends with `_` stands for all programs whose names begin with it.
const CONFLICTING_PROGRAMS: [(&str, &str, &str, bool); 6] = [
    (
        "numad",
        "moves processes between NUMA nodes by masks and cpusets",
        "stop numad on nodes where pjwd runs",
        true,
    ),
    (
        "cgrulesengd",
        "moves processes between cgroups by its rules",
        "take the jobs' users and programs out of /etc/cgrules.conf, or stop cgrulesengd",
        true,
    ),
    (
        "tuned",
        "may set masks of processes and interrupts (cpu-partitioning, [scheduler] plugin)",
        "use a profile without isolated_cores and without ps_blacklist tricks: tuned-adm active shows which is in force",
        false,
    ),
    (
        "irqbalance",
        "moves interrupts, also to the CPUs of jobs",
        "ban the jobs' CPUs there if interrupts disturb them",
        false,
    ),
    (
        "ananicy-cpp",
        "sets priorities of programs by name",
        "leave the jobs' programs out of its rules",
        false,
    ),
    (
        "scx_",
        "replaces the kernel's scheduler by a BPF program, which may ignore where a thread ran best",
        "use it with its own cpuset support, or stop it on nodes where pjwd runs",
        false,
    ),
];

/// Returns the running programs that can undo the work of pjw or disturb its jobs. For example, numad changes affinity
/// masks and cpusets, and irqbalance moves interrupts to the PUs (logical CPUs) of jobs. `processes` has the pid, the
/// user id and the command name of each process. The result has:
///
/// - One entry for each such program. A program is recognised by the command name of its process. Processes with a user
///   id of at least `first_person_uid` are ignored: they belong to persons, and a person can give any name to a
///   process.
/// - One entry for each user with two or more processes named `pjwd`. Here, the processes of persons count too. Two
///   daemons of one user conflict, because they may grant the same PUs to different jobs.
#[must_use]
pub fn conflicting_programs(
    processes: impl IntoIterator<Item = (Pid, Uid, Comm)>,
    first_person_uid: u32,
) -> Vec<ConflictingProgram> {
    let mut found: Vec<ConflictingProgram> = Vec::new();
    let mut daemons: BTreeMap<Uid, BTreeSet<Pid>> = BTreeMap::new();
    for (pid, uid, comm) in processes {
        let name = comm.to_string();
        if name == "pjwd" {
            daemons.entry(uid).or_default().insert(pid);
        }
        let has_name = |known: &str| {
            if known.ends_with('_') { name.starts_with(known) } else { name == known }
        };
        let program = CONFLICTING_PROGRAMS.iter().find(|(known, ..)| has_name(known));
        if let Some(&(_, effect, remedy, undoes_pjw_changes)) = program.filter(|_| uid.0 < first_person_uid)
            && !found.iter().any(|earlier| earlier.name == name)
        {
            let text = format!("{name} is here too: it {effect}");
            let pids = BTreeSet::from([pid]);
            found.push(ConflictingProgram { name, pids, text, remedy, undoes_pjw_changes });
        }
    }
    for (user, pids) in daemons.into_iter().filter(|(_, pids)| pids.len() > 1) {
        let remedy = match user {
            Uid::ROOT => "end all but one",
            _ => "end all but one: pjwctl release --all --socket PATH first, of those that have jobs",
        };
        let whose = if user == Uid::ROOT { "root".to_owned() } else { format!("user {user}") };
        found.push(ConflictingProgram {
            name: "pjwd".to_owned(),
            text: format!(
                "{} pjwd of {whose} run here (processes {}): each may give the same CPUs to its jobs",
                pids.len(),
                join_names(&pids)
            ),
            pids,
            remedy,
            undoes_pjw_changes: true,
        });
    }
    found
}

/// Adds to `findings` what the diagnosis (`pjwctl doctor`) finds about the host: the kernel and its boot parameters,
/// other programs that work against pjw, batch schedulers, cpusets, and the state of pjwd.
pub(super) fn add_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    findings.extend(input.configuration_problems.iter().map(configuration_finding));
    push_limited(orphaned_job_findings(input), findings);
    findings.extend(daemon_finding(input));
    add_conflicting_program_findings(input, findings);
    findings.extend(several_schedulers(input));
    add_visibility_findings(input, findings);
    add_cpuset_support_findings(input, findings);
    add_kernel_findings(input, findings);
    add_boot_parameter_findings(input, findings);
}

/// Returns the finding that pjwd can't start with a configuration file, or that the file could not be checked.
fn configuration_finding(problem: &ConfigurationProblem) -> Finding {
    match problem {
        ConfigurationProblem::Wrong { first_mistake, has_further_mistakes, check_command } => {
            let more = if *has_further_mistakes { " (and further mistakes)" } else { "" };
            let text = format!("pjwd can't start with its configuration: {first_mistake}{more}");
            let remedy = format!("correct the file: {check_command} lists the mistakes; then start pjwd");
            Finding::problem("wrong-configuration", text, remedy)
        }
        ConfigurationProblem::CheckTimedOut { time_limit_s, check_command } => {
            let text = format!(
                "it is unknown whether pjwd can start with its configuration: the check did not end within \
                 {time_limit_s} s, and was killed"
            );
            let remedy = format!(
                "check that the disk or the server of the file responds: {check_command} must end; then start pjwd"
            );
            Finding::problem("unchecked-configuration", text, remedy)
        }
    }
}

/// Returns the finding about the state of pjwd: the first of these cases that applies. `None` if no case applies.
///
/// - pjwd does not run. Not reported on a machine without jobs. Jobs that an ended pjwd left in its cpusets do not
///   count: they have a finding of their own.
/// - pjwd does not answer.
/// - pjwd is of another version than `pjwctl`.
/// - pjwd changes nothing (mode `observe`). Not reported on a machine without jobs.
fn daemon_finding(input: &DiagnosisInput) -> Option<Finding> {
    let is_orphaned = |id: &JobId| input.orphaned_jobs.iter().any(|orphaned| orphaned.id == *id);
    let unmanaged_jobs = input.jobs.iter().filter(|job| !is_orphaned(&job.id)).count();
    match &input.daemon {
        DaemonStatus::Absent(_) if unmanaged_jobs > 0 => {
            let jobs = counted_noun(unmanaged_jobs, "job");
            let text =
                format!("pjwd is not running: the processes of {jobs} are not kept on cores of their own");
            let or_as_user = if input.host.has_systemd { ", or as yourself: pjwd" } else { "" };
            let start = input.host.pjwd_start_command();
            let remedy = format!("{start}{or_as_user}; with mode = \"observe\" it changes nothing");
            Some(Finding::advice(NO_DAEMON_CODE, text, remedy))
        }
        DaemonStatus::Unresponsive(why) => {
            let text = format!("pjwd does not answer: {why}");
            let log = if input.host.has_systemd { "see its log: journalctl -u pjwd" } else { "see its log" };
            let remedy = format!("{log}; jobs keep their CPUs meanwhile");
            Some(Finding::problem("mute-warden", text, remedy))
        }
        DaemonStatus::Responsive { version, own_version, .. } if version != own_version => {
            let text = format!("pjwd is version {version}, pjwctl {own_version}");
            let remedy = format!("{}: jobs keep their CPUs", input.host.restart_command());
            Some(Finding::advice("version", text, remedy))
        }
        DaemonStatus::Responsive { observes: true, .. } if !input.jobs.is_empty() => {
            let text = "pjwd changes nothing (mode = \"observe\")".to_owned();
            let remedy =
                "set mode = \"enforce\" in pjwd.toml and pjwctl reload, if it is to keep jobs on their CPUs";
            Some(Finding::advice("observes", text, remedy))
        }
        DaemonStatus::Absent(_) | DaemonStatus::Responsive { .. } => None,
    }
}

/// Returns a finding for each pjwd that has ended and has left jobs in its cpusets. It is a problem: the jobs stay
/// limited to their cores, but nothing keeps other jobs off these cores, or frees them at the end of a job.
fn orphaned_job_findings(input: &DiagnosisInput) -> Vec<Finding> {
    let mut jobs_by_daemon: BTreeMap<&str, Vec<&OrphanedJob>> = BTreeMap::new();
    for job in &input.orphaned_jobs {
        jobs_by_daemon.entry(job.daemon.name_prefix()).or_default().push(job);
    }
    jobs_by_daemon.into_values().filter_map(|jobs| orphaned_jobs_finding(input, &jobs)).collect()
}

/// Returns the finding that the pjwd of `jobs` has ended. `None` if `jobs` is empty.
fn orphaned_jobs_finding(input: &DiagnosisInput, jobs: &[&OrphanedJob]) -> Option<Finding> {
    let first = jobs.first()?;
    let (limits, pronoun) = if jobs.len() == 1 {
        ("its cpuset still limits the job", "it")
    } else {
        ("its cpusets still limit the jobs", "them")
    };
    let text = format!(
        "the pjwd of {} has ended, and {limits}: {}",
        counted_noun(jobs.len(), "job"),
        join_names(jobs.iter().map(|job| format!("{} (cgroup {})", job.id, job.cgroup)))
    );
    let (start, options) = if first.daemon != OwnCgroupNames::default() {
        (
            "start pjwd again with --beside and its --state-dir",
            " --beside --state-dir DIR, with the same directory,",
        )
    } else if input.host.has_systemd {
        (input.host.pjwd_start_command(), "")
    } else {
        ("start pjwd again, as root", "")
    };
    let remedy = format!(
        "{start}: it takes {pronoun} up again; or pjwd --release-all{options} as root: it undoes what pjwd changed"
    );
    let cpus = jobs.iter().fold(CpuSet::new(), |cpus, job| cpus.union(&job.cpus));
    let pids = jobs.iter().flat_map(|job| job.processes.iter().map(|process| process.pid));
    let ids = jobs.iter().map(|job| &job.id);
    Some(Finding::problem(NO_DAEMON_CODE, text, remedy).with_jobs(ids).with_pids(pids).with_cpus(&cpus))
}

/// Adds a finding for each running program that can undo the work of pjw or disturb its jobs.
fn add_conflicting_program_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    for program in &input.conflicting_programs {
        let severity = if program.undoes_pjw_changes { Severity::Advice } else { Severity::Note };
        let remedy = match &input.daemon {
            DaemonStatus::Responsive { pid, .. } if program.pids.contains(pid) => {
                format!("{}; pjwctl talks to process {pid}", program.remedy)
            }
            _ => program.remedy.to_owned(),
        };
        let finding = Finding::new(severity, "master", program.text.clone(), remedy);
        findings.push(finding.with_pids(program.pids.iter().copied()));
    }
}

/// Finds several batch systems on one node. Each of them allocates all CPUs of the node.
fn several_schedulers(input: &DiagnosisInput) -> Option<Finding> {
    let names = input.schedulers.iter().map(|scheduler| scheduler.name.as_str());
    let text = format!("{} are all here, and each hands out the same CPUs", join_names(names));
    let remedy = "pjwd keeps the jobs of all batch systems apart, but pods and Nomad's tasks are no jobs to it: give \
                  those CPUs of their own by housekeeping in pjwd.toml";
    (input.schedulers.len() > 1).then(|| Finding::advice("several-schedulers", text, remedy))
}

/// Adds a finding for each reason why the diagnosis did not see everything, such as hidden processes.
fn add_visibility_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    if input.host.hides_processes {
        let text = "processes of others are hidden here: their jobs were not seen".to_owned();
        findings.push(Finding::advice("hidden", text, HIDDEN_PROCESSES));
    }
    if input.caller_uid != Uid::ROOT {
        let text = format!(
            "looked as user {}: environments of others can't be read, so jobs that are marked there only (LSF, PBS, \
             Grid Engine, Flux) and core counts may be missing",
            input.caller_uid
        );
        let severity = if input.schedulers.is_empty() { Severity::Note } else { Severity::Advice };
        findings.push(Finding::new(severity, "not-root", text, "sudo pjwctl doctor"));
    }
    if let Some(why) = &input.host.incomplete_scan_reason {
        let text = format!("not everything could be looked at: {why}");
        let remedy = "the other findings are valid; run doctor again, with more open files (ulimit -n) if that is the cause";
        findings.push(Finding::advice("blind", text, remedy));
    }
    if input.host.in_container {
        let text = "this is a container: jobs outside of it, and interrupts, are not seen in full".to_owned();
        findings.push(Finding::note("container", text, "look on the host"));
    }
}

/// Adds a finding if pjw can't use cpusets, or if the kernel forgets affinity masks when a cpuset is written.
fn add_cpuset_support_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    if let CpusetHierarchy::Unavailable { why } = &input.cpuset_support.hierarchy {
        let text = format!("jobs can only be kept by masks, which they can undo for a moment: {why}");
        let remedy = "nothing, if masks will do: pjwd puts threads back in each cycle; else see the cause";
        findings.push(Finding::note("no-cpusets", text, remedy));
    } else if !input.cpuset_support.affinity_persists {
        let text = format!(
            "Linux {} forgets masks whenever a cpuset is written (before 6.2): bindings of MPI and OpenMP are lost then",
            input.host.kernel_release
        );
        let remedy = "pjwd puts masks back after each write; a kernel from 6.2 on needs none of that";
        findings.push(Finding::note("masks-forgotten", text, remedy));
    }
}

/// Adds a finding for each of these kernel features that is missing: the waiting times of threads (schedstat), the
/// pressure of PUs and memory (PSI), and events about new processes.
fn add_kernel_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    let host = &input.host;
    if !host.has_schedstat {
        let text = "this kernel doesn't report how long threads wait (schedstat): a thread that waits for a CPU looks idle";
        let remedy = "a kernel with CONFIG_SCHED_INFO; until then demand counts run time only";
        findings.push(Finding::advice("no-schedstat", text.to_owned(), remedy));
    }
    if !host.has_psi {
        let text = "this kernel reports no pressure (/proc/pressure)".to_owned();
        let remedy = "psi=1 on the kernel's command line, if you want it: pjw works without";
        findings.push(Finding::note("no-psi", text, remedy));
    }
    if let Some(why) = &host.no_fork_events_reason {
        let remedy = "run pjwd as root on the host; polling finds new processes within interval (1s)";
        findings.push(Finding::note("no-events", why.clone(), remedy));
    }
}

/// Adds a finding for each of these settings of the kernel that can slow down jobs:
///
/// - PUs are isolated at boot (`isolcpus=`).
/// - Automatic NUMA balancing is on, and the machine has several NUMA nodes and at least one job.
/// - PUs have different frequency governors.
fn add_boot_parameter_findings(input: &DiagnosisInput, findings: &mut Vec<Finding>) {
    let host = &input.host;
    let isolated = host.isolated_cpus.intersection(&input.online);
    if !isolated.is_empty() {
        let text = format!(
            "{} {} isolated at boot (isolcpus=): the kernel balances nothing there, so a job's threads pile up",
            cpus_text(&isolated),
            if isolated.len() == 1 { "is" } else { "are" }
        );
        let remedy = format!(
            "housekeeping = \"{isolated}\" in pjwd.toml keeps jobs off them; or boot without isolcpus="
        );
        findings.push(Finding::advice("isolated", text, remedy).with_cpus(&isolated));
    }
    let nodes = input.topology.domains(TopologyLevel::NumaNode).filter(|node| !node.cpus.is_empty()).count();
    if host.numa_balancing_enabled == Some(true) && nodes > 1 && !input.jobs.is_empty() {
        let text = "the kernel moves memory after threads (numa_balancing): a cost for jobs that stay where they are";
        let remedy = "sysctl kernel.numa_balancing=0, if jobs are kept on one node each";
        findings.push(Finding::note("numa-balancing", text.to_owned(), remedy));
    }
    if host.cpufreq_governors.len() > 1 {
        let each = host
            .cpufreq_governors
            .iter()
            .map(|(governor, cpus)| format!("{governor} on {}", cpus_text(cpus)));
        let text = format!("CPUs run under different frequency governors: {}", join_names(each));
        let remedy = "cpupower frequency-set -g performance makes them alike";
        findings.push(Finding::advice("governors", text, remedy));
    }
}
