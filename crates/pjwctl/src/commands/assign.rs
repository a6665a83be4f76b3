//! `pjwctl assign JOB`: gives a job cores, and processes.

use std::process::ExitCode;

use pjw_ipc::call;
use pjw_ipc::wire::Job;
use serde::Deserialize;

use super::{Warden, job_id};
use crate::cli::{Assign, Policy, name_of};
use crate::output;
use crate::render;

/// The reply to `Assign`.
#[derive(Deserialize)]
pub(super) struct Reply {
    pub(super) job: Job,
}

pub(super) fn run(warden: &Warden, wish: &Assign) -> anyhow::Result<ExitCode> {
    let wish_on_the_wire = call::Assign {
        job: job_id(&wish.job)?,
        cores: wish.amount.cores,
        cpus: wish.amount.cpus.as_ref().map(ToString::to_string),
        pids: (!wish.pids.is_empty()).then(|| wish.pids.clone()),
        session: wish.session,
        // A list of CPUs is explicit by itself.
        policy: wish.policy.filter(|&policy| policy != Policy::Explicit).map(|policy| name_of(&policy)),
        class: wish.class.map(|class| name_of(&class)),
        smt: wish.smt.map(|smt| name_of(&smt)),
        near: wish.amount.near.clone(),
        bind_memory: wish.amount.bind_memory,
        isolated: wish.amount.isolated,
        fresh: None,
        owner: None,
    };
    let Reply { job } = warden.connect()?.call("Assign", &wish_on_the_wire)?;
    if wish.json.json {
        output::print_json(&job)?;
    } else {
        output::print(&render::jobs::assigned(&job))?;
        if job.cpus.is_empty() {
            output::complain(&render::jobs::without_cores(&job));
        }
    }
    Ok(ExitCode::SUCCESS)
}
