//! A process of a test with its attributes, and its claims as text.

use std::collections::BTreeSet;

use pjw_core::ids::{Comm, Uid};
use pjw_core::job::{CpuRequest, JobSource};
use pjw_core::snapshot::{BatchAttributes, BatchIdentity, BatchRole, JobIdAttribute, JobProcessGrouping};
use pjw_sources::{LocalHost, recognise_jobs};

/// A process, built attribute by attribute. It runs on the host `n1`, where Flux runs as user 64.
pub(crate) struct TestProcess {
    comm: Comm,
    attributes: BatchAttributes,
}

impl TestProcess {
    pub(crate) fn of(comm: &str) -> Self {
        Self { comm: Comm::from(comm), attributes: BatchAttributes::default() }
    }

    pub(crate) fn in_cgroup(self, path: &str) -> Self {
        self.on_line("", path)
    }

    /// Adds a line of /proc/PID/cgroup.
    pub(crate) fn on_line(mut self, controllers: &str, path: &str) -> Self {
        self.attributes.cgroups.lines.push((controllers.to_owned(), path.to_owned()));
        self
    }

    pub(crate) fn with(mut self, variable: &str, value: &str) -> Self {
        self.attributes.environ.insert(variable.to_owned(), value.to_owned());
        self
    }

    /// Adds variables such as `A=1 B=2`.
    pub(crate) fn with_all(self, variables: &str) -> Self {
        variables
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('='))
            .fold(self, |process, (name, value)| process.with(name, value))
    }

    pub(crate) fn in_groups(mut self, groups: &[u32]) -> Self {
        self.attributes.supplementary_groups = groups.to_vec();
        self
    }

    pub(crate) fn run_as(mut self, command_line: &str) -> Self {
        self.attributes.command_line = command_line.to_owned();
        self
    }

    pub(crate) fn claims(&self) -> BatchIdentity {
        self.claims_among(&JobSource::ALL.iter().copied().collect())
    }

    pub(crate) fn claims_among(&self, enabled: &BTreeSet<JobSource>) -> BatchIdentity {
        let host = LocalHost { name: "n1".to_owned(), flux_user: Some(Uid(64)) };
        recognise_jobs(&self.comm, &self.attributes, &host, enabled)
    }

    /// The role if there is one, and the claims, strongest first.
    pub(crate) fn claims_text(&self) -> String {
        describe(&self.claims())
    }
}

/// The role and the claims as text.
pub(crate) fn describe(claims: &BatchIdentity) -> String {
    let role = match claims.role {
        BatchRole::Ordinary => None,
        BatchRole::Launcher(source) => Some(format!("launcher of {source}")),
        BatchRole::Helper(source) => Some(format!("helper of {source}")),
    };
    let claims = claims.job_references.iter().map(|claim| {
        let request = match &claim.cpu_request {
            None => String::new(),
            Some(CpuRequest::Cores(n)) => format!(", {n} cores"),
            Some(CpuRequest::Pus(n)) => format!(", {n} PUs"),
            Some(CpuRequest::Exactly(cpus)) => format!(", PUs {cpus}"),
        };
        let evidence = match &claim.kind {
            JobIdAttribute::Cgroup(path) => format!("cgroup {path}"),
            JobIdAttribute::Environment { process_scope: JobProcessGrouping::ProcessGroup } => {
                "environment (own group)".to_owned()
            }
            JobIdAttribute::Environment { process_scope: JobProcessGrouping::Session } => {
                "environment (own session)".to_owned()
            }
            JobIdAttribute::Environment { process_scope: JobProcessGrouping::Neither } => {
                "environment".to_owned()
            }
        };
        let tasks = claim.tasks.map_or_else(String::new, |tasks| format!(", {tasks} tasks"));
        format!("{} by {evidence}{request}{tasks}", claim.job)
    });
    let claims_text: Vec<String> = role.into_iter().chain(claims).collect();
    if claims_text.is_empty() { "nothing".to_owned() } else { claims_text.join("; ") }
}
