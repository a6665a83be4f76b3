//! `pjwctl assign JOB`: gives cores to a job and adds processes to it.

use std::process::ExitCode;

use pjw_ipc::{call, wire::Job};

use super::connection::{DaemonAddress, call_for_field, parse_job_id};
use crate::cli::{AssignArgs, CoreCountArg, PolicyArg, value_name};
use crate::{output, render};

/// Runs `pjwctl assign`: requests cores for a job from the daemon, and adds processes to the job. `request` contains
/// the command line options.
pub(super) fn run(warden: &DaemonAddress, request: &AssignArgs) -> anyhow::Result<ExitCode> {
    let parameters = call::Assign {
        job: parse_job_id(&request.job)?,
        cores: request.core_args.cores.and_then(CoreCountArg::core_count),
        all_cores: (request.core_args.cores == Some(CoreCountArg::All)).then_some(true),
        cpus: request.core_args.cpus.as_ref().map(ToString::to_string),
        pids: (!request.pids.is_empty()).then(|| request.pids.clone()),
        session: request.session,
        // A list of CPUs is explicit in itself, so the policy `explicit` is not sent.
        policy: request.policy.filter(|&kind| kind != PolicyArg::Explicit).map(|kind| value_name(&kind)),
        class: request.core_args.class.map(|class| value_name(&class)),
        smt: request.cores_unit.map(|smt| value_name(&smt)),
        near: request.core_args.near_device.clone(),
        bind_memory: request.core_args.bind_memory,
        isolated: request.core_args.isolated,
        within_job: request.core_args.within_job.map(|rule| value_name(&rule)),
        ..call::Assign::default()
    };
    let job: Job = call_for_field(&mut warden.connect()?, "Assign", &parameters, "job")?;
    let printed = output::print_reply(request.json, &job, |job, _| render::jobs::assigned_job_line(job))?;
    if job.cpus.is_empty() && !request.json.json {
        output::print_error(&render::jobs::no_cores_message(&job));
    }
    Ok(printed)
}
