//! `pjwctl assign JOB`: gives cores to a job and adds processes to it.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Instant;

use anyhow::anyhow;
use pjw_ipc::client::Client;
use pjw_ipc::{call, wire::Job};

use super::connection::{DaemonAddress, call_for_field, call_persistently, parse_job_id, read_status};
use super::run::{MAX_TIME_FOR_PARTITION, TIME_BETWEEN_CHECKS, print_missing_cpuset};
use crate::cli::{AssignArgs, CoreCountArg, PlacementArg, value_name};
use crate::{output, render};

/// Runs `pjwctl assign`: requests cores for a job from the daemon, and adds processes to the job. `request` contains
/// the command line options.
pub(super) fn run(daemon: &DaemonAddress, request: &AssignArgs) -> anyhow::Result<ExitCode> {
    let parameters = call::Assign {
        job: parse_job_id(&request.job)?,
        cores: request.core_args.cores.and_then(CoreCountArg::core_count),
        all_cores: (request.core_args.cores == Some(CoreCountArg::All)).then_some(true),
        cpus: request.core_args.cpus.as_ref().map(ToString::to_string),
        pids: (!request.pids.is_empty()).then(|| request.pids.clone()),
        session: request.session,
        // A list of CPUs is explicit in itself, so the policy `explicit` is not sent.
        policy: request.policy.filter(|&kind| kind != PlacementArg::Explicit).map(|kind| value_name(&kind)),
        class: request.core_args.class.map(|class| value_name(&class)),
        smt: request.cores_unit.map(|smt| value_name(&smt)),
        near: request.core_args.near_device.clone(),
        bind_memory: request.core_args.bind_memory,
        isolated: request.core_args.isolated,
        within_job: request.core_args.within_job.map(|rule| value_name(&rule)),
        ..call::Assign::default()
    };
    let (mut client, mut job): (Client, Job) =
        call_persistently(daemon, |client| call_for_field(client, "Assign", &parameters, "job"))?;
    if is_unconfined(&job) {
        job = wait_for_partition(&mut client, job)?;
    }
    let printed = output::print_reply(request.json, &job, |job, _| render::jobs::assigned_job_line(job))?;
    if job.cpus.is_empty() && !request.json.json {
        output::print_error(&render::jobs::no_cores_message(&job));
    }
    print_missing_cpuset(&mut client, &job.id, &request.core_args);
    Ok(printed)
}

/// Whether the job `job` holds cores, and nothing keeps all its processes there: the kernel is still changing its
/// isolated partition, or the daemon only watches.
fn is_unconfined(job: &Job) -> bool {
    !job.cpus.is_empty() && job.enforcement == "none"
}

/// Waits until the kernel has made the isolated partition of the job `job` (a cpuset whose cores are only for this
/// job, without load balancing of the kernel). Returns the job as it is after the wait.
///
/// Does not wait if the daemon only watches (mode `observe`). Prints a message and stops waiting if the partition is
/// not complete after [`MAX_TIME_FOR_PARTITION`], or if the daemon does not answer. The job has its cores in any
/// case.
///
/// # Errors
/// If the job ended or was released meanwhile.
fn wait_for_partition(client: &mut Client, mut job: Job) -> anyhow::Result<Job> {
    let begin = Instant::now();
    while is_unconfined(&job) {
        if begin.elapsed() >= MAX_TIME_FOR_PARTITION {
            output::print_error(&render::jobs::unfinished_partition_message(&job));
            break;
        }
        let status = match read_status(client) {
            Ok(status) => status,
            Err(error) => {
                output::print_error(&render::jobs::unknown_partition_message(&job, &error.to_string()));
                break;
            }
        };
        if status.mode != "enforce" {
            break;
        }
        let held = status.jobs.into_iter().find(|other| other.id == job.id && other.state != "released");
        job = held.ok_or_else(|| anyhow!("{} was released before its partition was complete", job.id))?;
        if is_unconfined(&job) {
            sleep(TIME_BETWEEN_CHECKS);
        }
    }
    Ok(job)
}
