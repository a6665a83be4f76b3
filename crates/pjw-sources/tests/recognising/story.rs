//! A process with marks on it, and what is read from them as text.

use std::collections::BTreeSet;

use pjw_core::job::{Amount, Source};
use pjw_core::process::{Comm, Uid};
use pjw_core::snapshot::{Claims, Mark, Marks, OwnUnit, Role};
use pjw_sources::{Host, recognise};

/// A process, built up mark by mark. It runs on the host `n1`, where Flux runs as user 64.
pub(crate) struct Story {
    comm: Comm,
    marks: Marks,
}

impl Story {
    pub(crate) fn of(comm: &str) -> Self {
        Self { comm: Comm::from(comm), marks: Marks::default() }
    }

    pub(crate) fn in_cgroup(self, path: &str) -> Self {
        self.on_line("", path)
    }

    pub(crate) fn on_line(mut self, controllers: &str, path: &str) -> Self {
        self.marks.cgroups.push((controllers.to_owned(), path.to_owned()));
        self
    }

    pub(crate) fn with(mut self, variable: &str, value: &str) -> Self {
        self.marks.environ.insert(variable.to_owned(), value.to_owned());
        self
    }

    /// Words such as `A=1 B=2`.
    pub(crate) fn with_all(self, variables: &str) -> Self {
        variables
            .split_ascii_whitespace()
            .filter_map(|word| word.split_once('='))
            .fold(self, |story, (name, value)| story.with(name, value))
    }

    pub(crate) fn in_groups(mut self, groups: &[u32]) -> Self {
        self.marks.groups = groups.to_vec();
        self
    }

    pub(crate) fn run_as(mut self, command_line: &str) -> Self {
        self.marks.command_line = command_line.to_owned();
        self
    }

    pub(crate) fn claims(&self) -> Claims {
        self.claims_among(&Source::ALL.into_iter().collect())
    }

    pub(crate) fn claims_among(&self, enabled: &BTreeSet<Source>) -> Claims {
        let host = Host { name: "n1".to_owned(), flux_user: Some(Uid(64)) };
        recognise(&self.comm, &self.marks, &host, enabled)
    }

    /// The role if there is one, and the claims, strongest first.
    pub(crate) fn told(&self) -> String {
        tell(&self.claims())
    }
}

pub(crate) fn tell(claims: &Claims) -> String {
    let role = match claims.role {
        Role::Ordinary => None,
        Role::Launcher(source) => Some(format!("launcher of {source}")),
        Role::Helper(source) => Some(format!("helper of {source}")),
    };
    let claims = claims.claims.iter().map(|claim| {
        let amount = match &claim.amount {
            None => String::new(),
            Some(Amount::Cores(n)) => format!(", {n} cores"),
            Some(Amount::Pus(n)) => format!(", {n} PUs"),
            Some(Amount::Exactly(cpus)) => format!(", PUs {cpus}"),
        };
        let mark = match &claim.mark {
            Mark::Cgroup(path) => format!("cgroup {path}"),
            Mark::ExtraGroup(group) => format!("group {group}"),
            Mark::Environment { own: OwnUnit::Group } => "environment (own group)".to_owned(),
            Mark::Environment { own: OwnUnit::Session } => "environment (own session)".to_owned(),
            Mark::Environment { own: OwnUnit::Nothing } => "environment".to_owned(),
        };
        format!("{} by {mark}{amount}", claim.job)
    });
    let told: Vec<String> = role.into_iter().chain(claims).collect();
    if told.is_empty() { "nothing".to_owned() } else { told.join("; ") }
}
