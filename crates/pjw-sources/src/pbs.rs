//! How pjw recognises the jobs of OpenPBS, PBS Professional and Torque.
//!
//! Job ids are kept as they are, with the server name: `123.server`, `124[3].server` for members of arrays. Cgroups:
//! OpenPBS's hook creates `<prefix>.service/jobid/<id>` (v1; the prefix is `pbs_jobs` unless configured otherwise),
//! Torque creates `torque/<id>`. pbs_mom starts every task in a session of its own, so a session belongs to one job.
//!
//! Cores: OpenPBS sets `NCPUS` to the threads of the job's *first chunk*, not of its share of the node. With
//! `select=4:ncpus=1` four processes would end up on one core, so `NCPUS` is not read. The cpuset of the cgroup hook
//! has the number, or pjw's own hook gives it. Torque's `PBS_NUM_PPN` is the share of a node if the job has one node
//! and `PBS_NP`, the total of the job, agrees.

use std::collections::BTreeSet;

use pjw_core::job::{CpuRequest, JobId, JobSource};
use pjw_core::snapshot::JobProcessGrouping;

use crate::system::{
    BatchEnvironment, BatchSystem, CgroupDirectoryRole, EnvironClaim, ProcessAttributes, valid_cpu_count,
};
use crate::{counts, error::HookInputError, host::LocalHost, number::parse_digits};

/// How pjw recognises the processes and jobs of PBS (OpenPBS and Torque). An entry of the table of batch systems.
pub(crate) const BATCH_SYSTEM: BatchSystem = BatchSystem {
    source: JobSource::Pbs,
    launchers: &["pbs_mom"],
    variables: &["PBS_JOBID", "PBS_NUM_PPN", "PBS_NUM_NODES", "PBS_NP"],
    process_grouping: JobProcessGrouping::Session,
    has_narrowable_cpuset: false,
    find_directory_role,
    environ_claim,
};

/// Returns the role of the outermost job directory of PBS on the cgroup path of `process`. The role says to which job
/// the directory belongs: the name of the directory is the job id. `None` if there is no such directory.
fn find_directory_role(process: &ProcessAttributes<'_>) -> Option<CgroupDirectoryRole> {
    let directories = process.directories;
    (0..directories.len()).find_map(|at| {
        let depth = match (directories[at], directories.get(at + 1)) {
            ("torque", _) => at + 1,
            (service, Some(&"jobid")) if service.ends_with(".service") => at + 2,
            _ => return None,
        };
        Some(CgroupDirectoryRole::job_directory(parse_job_id(directories.get(depth)?)?, depth))
    })
}

fn environ_claim(environ: BatchEnvironment<'_>, _host: &LocalHost) -> Option<EnvironClaim> {
    let job = parse_job_id(environ.get("PBS_JOBID")?)?;
    let processors_per_node = environ.positive_number("PBS_NUM_PPN");
    let has_one_node = environ.positive_number("PBS_NUM_NODES") == Some(1);
    let is_whole_job = has_one_node && environ.positive_number("PBS_NP") == processors_per_node;
    let cpu_request =
        processors_per_node.filter(|_| is_whole_job).and_then(valid_cpu_count).map(CpuRequest::Cores);
    Some(EnvironClaim { cpu_request, ..EnvironClaim::from_job_id(job) })
}

/// Returns the number of CPUs that a job has on the machine `node`. `exec_vnode` is OpenPBS's list of the vnodes of the
/// job with their resources, such as `(n1:ncpus=2:mem=1gb)+(n2[0]:ncpus=1+n2[1]:ncpus=1)`. A vnode is a part of a
/// machine or the whole machine. Its name is the name of the machine, or this name with an index, such as `n2[0]`.
/// OpenPBS's own cgroup hook reads the list in the same way.
///
/// # Errors
/// If a number of CPUs is invalid, or if the list has no vnode of `node`.
pub(crate) fn cpu_count_of_node(exec_vnode: &str, node: &str) -> Result<u32, HookInputError> {
    const WHAT: &str = "exec_vnode";
    let mut sum: Option<u32> = None;
    for (at, piece) in exec_vnode.split('+').enumerate() {
        let mut parts = piece.trim().trim_start_matches('(').trim_end_matches(')').split(':');
        let vnode = parts.next().unwrap_or_default();
        let count = match parts.find_map(|part| part.strip_prefix("ncpus=")) {
            Some(text) => parse_digits(text).ok_or_else(|| {
                HookInputError::invalid_list(WHAT, &counts::CountsError::NotACount { part: at + 1 })
            })?,
            None => 0,
        };
        if vnode.split('[').next() == Some(node) {
            sum = Some(sum.unwrap_or(0).saturating_add(count));
        }
    }
    sum.ok_or_else(|| HookInputError::host_not_listed(WHAT, node))
}

/// Returns the number of processors that a Torque job has on this machine: the value of `ppn` (processors per node) in
/// `limits`, or 1 without `ppn`. `limits` is the list of the job's resource limits, such as
/// `nodes=1:ppn=2,walltime=60`. `hosts` is the list of the job's machines. Torque may put several of the requested
/// nodes on one machine. So for a job with several nodes, `hosts` must have as many different machines.
///
/// # Errors
/// If `limits` has no valid number of processors, has different numbers for several kinds of nodes (joined with `+`),
/// or does not agree with `hosts`.
pub(crate) fn processors_per_node(limits: &str, hosts: &str) -> Result<u32, HookInputError> {
    const WHAT: &str = "the list of limits";
    let no_count = || HookInputError::CountNotProvided(JobSource::Pbs);
    let nodes =
        limits.split(',').find_map(|limit| limit.trim().strip_prefix("nodes=")).ok_or_else(no_count)?;
    let mut parts = nodes.split(':');
    let node_count = parts.next().unwrap_or_default();
    let per_node = match parts.find_map(|part| part.strip_prefix("ppn=")) {
        Some(text) if !nodes.contains('+') => {
            parse_digits(text).ok_or_else(|| HookInputError::invalid_number(WHAT, text))?
        }
        Some(_) => return Err(no_count()),
        None => 1,
    };
    let machines: BTreeSet<&str> = hosts.split(',').filter(|host| !host.is_empty()).collect();
    match parse_digits::<u32>(node_count) {
        Some(1) => Ok(per_node),
        // The list has the name of a host instead of a number of nodes.
        None if !nodes.contains('+') => Ok(per_node),
        Some(nodes) if machines.len() == nodes as usize && !limits.contains('+') => Ok(per_node),
        _ => Err(no_count()),
    }
}

/// Parses a job id of PBS, such as `123.server` or `124[3].server`. Returns `None` if `id` does not have this form.
pub(crate) fn parse_job_id(id: &str) -> Option<JobId> {
    let number = id.split(['[', '.', '-']).next()?;
    crate::system::job_number(number)?;
    JobId::new(JobSource::Pbs, id).ok()
}
