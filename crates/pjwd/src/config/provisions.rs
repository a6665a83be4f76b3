//! The tables `[[provision]]`: cores that are promised to services.

use nix::unistd::User;
use pjw_core::ids::Uid;
use pjw_core::job::{CpuRequest, JobId, JobSource, ProvisionRule};
use toml::de::DeValue;

use super::values::{self, ValueError};

/// The values of one table `[[provision]]` of the configuration file. A provision is a number of cores that pjwd
/// keeps for a service, such as a web server. pjwd keeps these cores free for the service even while no process of
/// the service runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvisionSettings {
    /// `name`: the id of the job to which the cores and the processes of the service belong.
    pub job: JobId,
    /// `cores`: the number of cores that are promised to the service.
    pub cores: u32,
    /// `match`: the rule by which pjwd recognises the processes of the service. `None` if the table has no rule.
    /// Processes then join the job only by a command, such as `pjwctl assign`.
    pub rule: Option<ProvisionRule>,
}

impl ProvisionSettings {
    /// Returns the provision (the cores that pjwd keeps for one service) as text for messages. The text has the name
    /// of the provision, its number of cores, and the rule by which pjwd recognises the processes of the service.
    /// Example: `web: 4 cores, unit=nginx.service`. A provision without a rule gives `web: 4 cores`.
    #[must_use]
    pub fn describe(&self) -> String {
        let rule = self.rule.as_ref().map(|rule| format!(", {rule}")).unwrap_or_default();
        format!("{}: {} cores{rule}", self.job.name(), self.cores)
    }

    /// Returns the size of the provision (the cores that pjwd keeps for one service) as a request for CPUs: a number
    /// of whole cores.
    #[must_use]
    pub fn cpu_request(&self) -> CpuRequest {
        CpuRequest::Cores(self.cores)
    }
}

/// Parses `value`, the tables `[[provision]]` of the configuration file. `max_cores` is the maximum number of cores of
/// one provision.
///
/// # Errors
/// The first mistake in the tables.
pub(super) fn parse_provisions(
    value: &DeValue<'_>,
    max_cores: u32,
) -> Result<Vec<ProvisionSettings>, ValueError> {
    let tables = value
        .as_array()
        .ok_or_else(|| ValueError::with_message("write [[provision]] above its keys".to_owned()))?;
    let mut provisions: Vec<ProvisionSettings> = Vec::new();
    for table in tables.iter() {
        let next = provision(table.get_ref(), max_cores)?;
        if provisions.iter().any(|known| known.job == next.job) {
            return Err(ValueError::with_message(format!(
                "{:?} stands twice: give each provision a name of its own",
                next.job.name()
            )));
        }
        if let Some(same) = provisions.iter().find(|known| known.rule.is_some() && known.rule == next.rule) {
            let (one, other) = (same.job.name(), next.job.name());
            return Err(ValueError::with_message(format!(
                "{one:?} and {other:?} have the same match: a process can belong to one provision only"
            )));
        }
        provisions.push(next);
    }
    Ok(provisions)
}

fn provision(table: &DeValue<'_>, max_cores: u32) -> Result<ProvisionSettings, ValueError> {
    let with_message = ValueError::with_message;
    let table =
        table.as_table().ok_or_else(|| with_message("write [[provision]] above its keys".to_owned()))?;
    let (mut job, mut cores, mut rule) = (None, None, None);
    for (key, value) in table.iter() {
        match &**key.get_ref() {
            "name" => {
                let name = values::text(value.get_ref(), "the name of a service, such as \"web\"")?;
                let id = JobId::new(JobSource::Manual, name)
                    .map_err(|error| with_message(format!("name: {error}")))?;
                job = Some(id);
            }
            "cores" => cores = Some(values::parse_number(value.get_ref(), 1..=max_cores)?),
            "match" => {
                let text = values::text(value.get_ref(), "a rule such as \"unit=nginx.service\"")?;
                let parsed = ProvisionRule::parse(text, user_id);
                rule = Some(parsed.map_err(|error| with_message(format!("match: {error}")))?);
            }
            other => {
                return Err(with_message(format!(
                    "{other:?} is no key of a provision: there are name, cores and match"
                )));
            }
        }
    }
    let job = job.ok_or_else(|| with_message("a provision has no name: write name = \"web\"".to_owned()))?;
    let missing = || with_message(format!("{:?} has no number of cores: write cores = 4", job.name()));
    let cores = cores.ok_or_else(missing)?;
    Ok(ProvisionSettings { job, cores, rule })
}

/// The id of the user with this name. `None` if there is no such user, or if the directory of users can't be read.
fn user_id(name: &str) -> Option<Uid> {
    User::from_name(name).ok().flatten().map(|user| Uid(user.uid.as_raw()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::Config;

    #[test]
    fn a_rule_that_takes_all_processes_of_the_system_is_refused_with_its_line() {
        for (rule, expected) in [
            ("user=root", "match: \"user=root\" alone matches every process of root"),
            ("user=0", "match: \"user=0\" alone matches every process of root"),
            ("cgroup=/", "match: \"cgroup=/\" is the root of the cgroups"),
            ("cgroup=/../..", "match: \"cgroup=/../..\" has an empty component, . or .."),
        ] {
            let text = format!("[[provision]]\nname = \"web\"\ncores = 4\nmatch = \"{rule}\"\n");
            let problems = Config::parse(Path::new("pjwd.toml"), &text).unwrap_err();
            let told = problems.iter().map(ToString::to_string).collect::<String>();
            assert!(told.starts_with("pjwd.toml:") && told.contains(expected), "{rule}: {told}");
        }
        let text = "[[provision]]\nname = \"web\"\ncores = 4\nmatch = \"user=root,comm=nginx\"\n";
        assert!(Config::parse(Path::new("pjwd.toml"), text).is_ok());
    }
}
