//! `pjwctl provision` and `pjwctl unprovision`: promises cores to a service, and takes the promise back.

use std::process::ExitCode;

use anyhow::{anyhow, bail};
use nix::unistd::{User, geteuid};
use pjw_core::ids::Uid;
use pjw_core::job::ProvisionRule;
use pjw_ipc::call::{self, JobParameter};
use pjw_ipc::refused_provision::refused_provision_error;
use pjw_ipc::wire::{Job, Warning};

use super::connection::{DaemonAddress, call_for_field, parse_job_id, read_status};
use crate::cli::ProvisionArgs;
use crate::{output, render};

/// Runs `pjwctl provision`: makes the daemon keep cores for a service. Without the name of a service in `request`,
/// lists the provisions instead. A provision is a job that holds the cores of a service.
pub(super) fn run(daemon: &DaemonAddress, request: &ProvisionArgs) -> anyhow::Result<ExitCode> {
    let (Some(name), Some(cores)) = (&request.name, request.cores) else { return list(daemon, request) };
    let find_user = |name: &str| User::from_name(name).ok().flatten().map(|user| Uid(user.uid.as_raw()));
    let rule = request.rule.as_deref().map(|rule| ProvisionRule::parse(rule, find_user)).transpose();
    let rule = rule.map_err(|error| anyhow!("--match: {error}"))?;
    let parameters =
        call::Provision { job: parse_job_id(name)?, cores, rule: rule.map(|rule| rule.to_string()) };
    let job: Job = call_for_field(&mut daemon.connect()?, "Provision", &parameters, "job")?;
    output::print_reply(request.json, &job, |job, _| render::jobs::provision_line(job))
}

fn list(daemon: &DaemonAddress, request: &ProvisionArgs) -> anyhow::Result<ExitCode> {
    let status = read_status(&mut daemon.connect()?)?;
    let provisions: Vec<Job> = status.jobs.into_iter().filter(|job| job.provision.is_some()).collect();
    output::print_reply(request.json, &provisions, |jobs, _| render::jobs::provisions_text(jobs))
}

/// Runs `pjwctl unprovision`: ends the provision with the name `name`, so that its cores become free. A provision is a
/// job that holds the cores of a service.
pub(super) fn unprovision(daemon: &DaemonAddress, name: &str) -> anyhow::Result<ExitCode> {
    let job = parse_job_id(name)?;
    let mut client = daemon.connect()?;
    let status = read_status(&mut client)?;
    match status.jobs.iter().find(|other| other.id == job) {
        None => bail!(missing_job_text(&job, &status.warnings)),
        Some(found) if found.provision.is_none() => bail!(other_job_text(found, geteuid().as_raw())),
        Some(_) => {}
    }
    let released: Vec<String> = call_for_field(&mut client, "Release", &JobParameter { job }, "released")?;
    output::print(&render::jobs::released_jobs_text(&released))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the error text for the job with the id `job`, which does not exist. `warnings` are those of the status. If
/// pjwd refused a provision of this name in its configuration, a warning and this text have the reason and the remedy.
fn missing_job_text(job: &str, warnings: &[Warning]) -> String {
    refused_provision_error(job, warnings)
        .unwrap_or_else(|| format!("there is no job {job}: pjwctl provision --list shows the provisions"))
}

/// Returns the error text for the job `job`, which is not a provision. `uid` is the user of this process. The text
/// advises the user to release the job only if the user surely may: pjwctl does not know the administrators.
fn other_job_text(job: &Job, uid: u32) -> String {
    let Job { id, owner, .. } = job;
    if uid == 0 || uid == *owner {
        format!("{id} is not a provision: pjwctl release {id} releases it")
    } else {
        format!(
            "{id} is no provision, and belongs to user {owner}: only its owner or an administrator may release it"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_about_a_provision_that_pjwd_refused_has_the_reason_and_the_remedy() {
        let refused = Warning {
            code: "provision".to_owned(),
            job: "manual:web".to_owned(),
            text: "manual:web does not get its cores".to_owned(),
            remedy: "change its table".to_owned(),
        };
        let warnings = [Warning { job: String::new(), ..refused.clone() }, refused];
        let expected = "there is no job manual:web, because pjwd refused the provision of this name in its \
                        configuration: manual:web does not get its cores; to change that: change its table";
        assert_eq!(missing_job_text("manual:web", &warnings), expected);
        let unknown = missing_job_text("manual:a", &warnings);
        assert_eq!(unknown, "there is no job manual:a: pjwctl provision --list shows the provisions");
    }

    #[test]
    fn only_a_user_who_may_release_a_job_that_is_no_provision_is_advised_to_do_so() {
        let job = Job { id: "manual:web".to_owned(), owner: 4002, ..Job::default() };
        for uid in [0, 4002] {
            let text = other_job_text(&job, uid);
            assert_eq!(text, "manual:web is not a provision: pjwctl release manual:web releases it");
        }
        let text = other_job_text(&job, 4001);
        assert!(!text.contains("pjwctl release") && text.contains("belongs to user 4002"), "{text}");
    }
}
