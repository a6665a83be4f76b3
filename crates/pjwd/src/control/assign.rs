//! The call `Assign` of a client, as a command for the event loop.

use pjw_core::command::{AssignCommand, Caller};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::{Pid, Uid};
use pjw_core::job::{CpuRequest, JobId, Placement, PriorityClass};
use pjw_core::refusal::CpuUnit;
use pjw_core::within_job::NumaNodeRule;
use pjw_ipc::call::{self, CallError};

/// The longest name of a device, in bytes. The job keeps the name for as long as it lives.
const MAX_DEVICE_BYTES: usize = 256;

/// Returns the command that `request` of the client `caller` asks for. `id` is the job in the request.
///
/// # Errors
/// If a parameter has no known value, or if two parameters exclude each other. The error is the reply to the client.
pub(super) fn assign_command(
    request: call::Assign,
    id: JobId,
    caller: Caller,
) -> Result<AssignCommand, CallError> {
    Ok(AssignCommand {
        job: id,
        cpu_request: requested_cpus(&request)?,
        everything: unit_of_all_cores(&request)?,
        placement: request.policy.as_deref().map(parse_placement).transpose()?,
        class: request.class.as_deref().map(parse_class).transpose()?,
        near_device: request.near.map(checked_device_name).transpose()?,
        bind_memory: request.bind_memory,
        isolated: request.isolated,
        within_job: request.within_job.as_deref().map(parse_numa_node_rule).transpose()?,
        pids: request.pids.unwrap_or_default().into_iter().map(Pid).collect(),
        session: request.session.map(Pid),
        must_be_new: request.fresh.unwrap_or(false),
        keeps_members: request.keep_members.unwrap_or(false),
        refuses_frozen: request.refuse_frozen.unwrap_or(false),
        owner: request.owner.map(Uid),
        caller,
    })
}

/// Returns the number or list of CPUs that `request`, a call of `Assign`, asks for. `None` if the call asks for none.
///
/// # Errors
/// If the call has both a number and a list, an invalid list, or an unknown value of `smt`. The error is the reply to
/// the client.
fn requested_cpus(request: &call::Assign) -> Result<Option<CpuRequest>, CallError> {
    let by_pus = match request.smt.as_deref() {
        None | Some("whole") => false,
        Some("pus") => true,
        Some(_) => return Err(CallError::InvalidParameter("smt".to_owned())),
    };
    match (request.cores, &request.cpus) {
        (Some(_), Some(_)) => {
            Err(CallError::Refused("give either a count of cores or a CPU list, not both".to_owned()))
        }
        (None, Some(list)) => match list.parse::<CpuSet>() {
            Ok(cpus) => Ok(Some(CpuRequest::Exactly(cpus))),
            Err(error) => Err(CallError::Refused(error.to_string())),
        },
        (Some(n), None) if by_pus => Ok(Some(CpuRequest::Pus(n))),
        (Some(n), None) => Ok(Some(CpuRequest::Cores(n))),
        (None, None) => Ok(None),
    }
}

/// Returns the unit (core or PU) in which `request` asks for everything that is free. `None` if it does not ask for
/// this.
///
/// # Errors
/// If `request` also has a number of cores or a list of CPUs. The error is the reply to the client.
fn unit_of_all_cores(request: &call::Assign) -> Result<Option<CpuUnit>, CallError> {
    if !request.all_cores.unwrap_or(false) {
        return Ok(None);
    }
    if request.cores.is_some() || request.cpus.is_some() {
        let why = "give either all cores, or a count of cores, or a CPU list";
        return Err(CallError::Refused(why.to_owned()));
    }
    Ok(Some(if request.smt.as_deref() == Some("pus") { CpuUnit::Pu } else { CpuUnit::Core }))
}

/// Returns `name`, the name of a device, unless it is too long.
fn checked_device_name(name: String) -> Result<String, CallError> {
    if name.len() > MAX_DEVICE_BYTES {
        let bytes = name.len();
        let why =
            format!("the name of the device in near has {bytes} bytes, and may have {MAX_DEVICE_BYTES}");
        return Err(CallError::Refused(why));
    }
    Ok(name)
}

fn parse_placement(text: &str) -> Result<Placement, CallError> {
    match text {
        "pack" => Ok(Placement::Pack),
        "spread" => Ok(Placement::Spread),
        "explicit" => Ok(Placement::Explicit),
        _ => Err(CallError::InvalidParameter("policy".to_owned())),
    }
}

fn parse_class(text: &str) -> Result<PriorityClass, CallError> {
    match text {
        "guaranteed" => Ok(PriorityClass::Guaranteed),
        "normal" => Ok(PriorityClass::Normal),
        "besteffort" => Ok(PriorityClass::Besteffort),
        _ => Err(CallError::InvalidParameter("class".to_owned())),
    }
}

fn parse_numa_node_rule(text: &str) -> Result<NumaNodeRule, CallError> {
    text.parse().map_err(|_| CallError::InvalidParameter("within_job".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_device_has_at_most_256_bytes() {
        assert_eq!(checked_device_name("mlx5_0".to_owned()), Ok("mlx5_0".to_owned()));
        assert!(checked_device_name("d".repeat(256)).is_ok());
        assert!(
            matches!(checked_device_name("d".repeat(257)), Err(CallError::Refused(why)) if why.contains("has 257 bytes, and may have 256"))
        );
    }
}
