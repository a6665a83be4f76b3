//! The request that a job has after an assign command, and the requests that are refused whatever cores are free.

use crate::basics::prelude::*;
use crate::machine::{Device, Topology};
use crate::phases::commands::types::AssignCommand;
use crate::terms::{CpuRequest, Job, JobId, JobRequest, Placement, Refusal};

/// Makes the request of a job from the command `args`. A setting that is `None` in `args` is taken from the request of
/// `existing`, the job before the command. If there was no request, the setting has its default. A list of PUs (logical
/// CPUs) always has the placement [`Placement::Explicit`], and a number of cores never has it. Refused if `args` names
/// a device that the machine does not have. Also refused if neither `args` nor `existing` has a number of cores or a
/// list of PUs.
pub(super) fn build_job_request(
    topology: &Topology,
    existing: Option<&Job>,
    args: &AssignCommand,
) -> Result<JobRequest, Refusal> {
    let before = existing.and_then(|job| job.request.clone());
    let amount =
        args.cpu_request.clone().or_else(|| before.as_ref().map(|request| request.cpu_request.clone()));
    let cpu_request = amount.ok_or_else(|| Refusal::NoCpuRequest { job: args.job.clone() })?;
    let before = before.unwrap_or_else(|| JobRequest::with_core_count(0));
    let placement = if matches!(cpu_request, CpuRequest::Exactly(_)) {
        Placement::Explicit
    } else {
        // An earlier list of PUs says nothing about the placement of a number of cores.
        let is_for_count = |placement: &Placement| *placement != Placement::Explicit;
        let earlier = Some(before.placement).filter(is_for_count);
        args.placement.filter(is_for_count).or(earlier).unwrap_or_default()
    };
    let near_device = match args.near_device.as_deref() {
        None => before.near_device,
        Some("") => None,
        Some(name) => Some(find_device_name(topology, name)?),
    };
    Ok(JobRequest {
        cpu_request,
        placement,
        class: args.class.unwrap_or(before.class),
        near_device,
        bind_memory: args.bind_memory.unwrap_or(before.bind_memory),
        isolated: args.isolated.unwrap_or(before.isolated),
        within_job: args.within_job.unwrap_or(before.within_job),
    })
}

/// Returns `name` if the machine has a device with this name. The refusal names the devices of the machine.
fn find_device_name(topology: &Topology, name: &str) -> Result<String, Refusal> {
    if topology.device_by_name(name).is_some() {
        return Ok(name.to_owned());
    }
    let name_of = |device: &Device| device.names.first().unwrap_or(&device.pci_address).clone();
    let names: Vec<String> = topology.details().devices.iter().map(name_of).collect();
    let known = if names.is_empty() { "none that hwloc knows".to_owned() } else { names.join(", ") };
    Err(Refusal::NoSuchDevice { device: name.to_owned(), known })
}

/// Refuses `request` if the job `id` can't be a borrower (a job that runs on borrowed cores) with it. Refused are a job
/// of a batch system, a request for no cores, and a property that borrowed cores can't have, such as an isolated
/// partition.
pub(super) fn check_borrower(id: &JobId, request: &JobRequest) -> Result<(), Refusal> {
    if id.source().is_batch_system() {
        return Err(Refusal::SchedulerJobBorrows { job: id.clone() });
    }
    let properties = [
        (matches!(request.cpu_request, CpuRequest::Exactly(_)), "a CPU list"),
        (request.isolated, "an isolated partition"),
        (request.near_device.is_some(), "a device"),
        (request.bind_memory, "bound memory"),
        (!request.within_job.is_default(), "a rule for its NUMA nodes (--within-job)"),
    ];
    match properties.into_iter().find(|(is_requested, _)| *is_requested) {
        Some((_, property)) => Err(Refusal::BorrowerWithProperty { job: id.clone(), property }),
        None if request.cpu_request.requests_no_cpus() => Err(Refusal::ZeroCores),
        None => Ok(()),
    }
}

/// Returns the reason why a job does not wait for cores although the configuration lets jobs wait. The reason is a text
/// for users. `None` if the job waits. `has_cores` says whether the job holds cores already. `must_be_new` is true for
/// `pjwctl run` and `pjwctl spawn`.
pub(super) fn why_not_wait(has_cores: bool, must_be_new: bool) -> Option<&'static str> {
    // The command of `pjwctl run` would start without cores.
    if must_be_new {
        return Some("run does not wait for cores, also with on_exhausted = \"wait\": try again later");
    }
    has_cores.then_some(
        "a job that has cores keeps them and does not wait for others, also with on_exhausted = \"wait\": try again later",
    )
}
