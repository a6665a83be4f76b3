//! The tables `[[provision]]`: cores that are promised to services.

use std::ops::Range;

use nix::unistd::User;
use pjw_core::ids::Uid;
use pjw_core::job::{CpuRequest, JobId, JobSource, ProvisionRule};
use toml::de::{DeTable, DeValue};

use super::problem::{quote_and_cut, suggestion_text};
use super::values::{self, ValueError};

/// The name of the tables `[[provision]]` in the configuration file: each table keeps cores free for one service.
/// The list of all keys does not contain this name.
pub(super) const PROVISION_KEY: &str = "provision";

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
        let noun = if self.cores == 1 { "core" } else { "cores" };
        format!("{}: {} {noun}{rule}", self.job.name(), self.cores)
    }

    /// Returns the size of the provision (the cores that pjwd keeps for one service) as a request for CPUs: a number
    /// of whole cores.
    #[must_use]
    pub fn cpu_request(&self) -> CpuRequest {
        CpuRequest::Cores(self.cores)
    }
}

/// Parses `value`, the tables `[[provision]]` of the configuration file. `max_cores` is the maximum number of cores
/// of one provision. `has_syntax_errors` says whether the file has syntax errors. If it has, missing keys are not
/// reported, because the parser may only have failed to understand them.
///
/// # Errors
/// All mistakes in the tables, each with its key and its position.
pub(super) fn parse_provisions(
    value: &DeValue<'_>,
    max_cores: u32,
    has_syntax_errors: bool,
) -> Result<Vec<ProvisionSettings>, Vec<ValueError>> {
    let header = || ValueError::with_message("write [[provision]] above its keys");
    let tables = value.as_array().ok_or_else(header)?;
    let (mut provisions, mut mistakes) = (Vec::new(), Vec::new());
    let mut earlier_names: Vec<JobId> = Vec::new();
    let mut earlier_rules: Vec<(ProvisionRule, String)> = Vec::new();
    for value in tables.iter() {
        let Some(table) = value.get_ref().as_table() else {
            mistakes.push(header().at_span(value.span()));
            continue;
        };
        let mut draft = ProvisionDraft::parse(table, max_cores);
        mistakes.append(&mut draft.mistakes);
        if !has_syntax_errors {
            mistakes.extend(draft.missing_keys(table).map(|mistake| mistake.at_span(value.span())));
        }
        if let KeyState::Valid(job, span) = &draft.job {
            if earlier_names.contains(job) {
                let text = format!("{:?} stands twice: give each provision a name of its own", job.name());
                mistakes.push(ValueError::with_message(text).at_span(span.clone()).in_key(full_key("name")));
            }
            earlier_names.push(job.clone());
        }
        mistakes.extend(draft.same_rule_mistake(&earlier_rules));
        if let KeyState::Valid(rule, _) = &draft.rule {
            earlier_rules.push((rule.clone(), draft.shown_name()));
        }
        provisions.extend(draft.into_settings());
    }
    if mistakes.is_empty() { Ok(provisions) } else { Err(mistakes) }
}

/// The full name of the key `name` of a table `[[provision]]`, as error messages name it.
fn full_key(name: &str) -> String {
    format!("{PROVISION_KEY}.{name}")
}

/// What a table has for one of its keys.
enum KeyState<T> {
    /// The table does not have the key.
    Missing,
    /// The value has a mistake.
    Wrong,
    /// The value, and its bytes in the file.
    Valid(T, Range<usize>),
}

/// The keys of one table `[[provision]]`, some of which may have mistakes.
struct ProvisionDraft {
    job: KeyState<JobId>,
    cores: KeyState<u32>,
    rule: KeyState<ProvisionRule>,
    mistakes: Vec<ValueError>,
}

impl ProvisionDraft {
    /// Parses the keys of `table`, one table `[[provision]]`. `max_cores` is the maximum number of cores. Stores
    /// wrong values and unknown keys as mistakes in the returned draft. Does not check whether keys are missing.
    fn parse(table: &DeTable<'_>, max_cores: u32) -> Self {
        let (job, cores, rule) = (KeyState::Missing, KeyState::Missing, KeyState::Missing);
        let mut draft = Self { job, cores, rule, mistakes: Vec::new() };
        for (key, value) in table.iter() {
            let (name, content, span) = (&**key.get_ref(), value.get_ref(), value.span());
            match name {
                "name" => draft.job = draft.key_state(name, parse_name(content), span),
                "cores" => {
                    let cores = values::parse_number(content, 1..=max_cores);
                    draft.cores = draft.key_state(name, cores, span);
                }
                "match" => draft.rule = draft.key_state(name, parse_rule(content), span),
                other => {
                    let text = format!(
                        "{} is no key of a provision: there are name, cores and match{}",
                        quote_and_cut(other),
                        suggestion_text(other, ["name", "cores", "match"])
                    );
                    let mistake = ValueError::with_message(text);
                    draft.mistakes.push(mistake.at_span(key.span()).in_key(full_key(name)));
                }
            }
        }
        draft
    }

    /// Returns what the table has for the key `name`. Stores a mistake with its key and its position.
    fn key_state<T>(&mut self, name: &str, parsed: Result<T, ValueError>, span: Range<usize>) -> KeyState<T> {
        match parsed {
            Ok(value) => KeyState::Valid(value, span),
            Err(mistake) => {
                self.mistakes.push(mistake.at_span(span).in_key(full_key(name)));
                KeyState::Wrong
            }
        }
    }

    /// Returns the mistakes that the table lacks the key `name` or `cores`. `table` has the name for the messages.
    /// Empty if the table has both keys, even with wrong values.
    fn missing_keys(&self, table: &DeTable<'_>) -> impl Iterator<Item = ValueError> + use<> {
        let name = table.get("name").and_then(|value| value.get_ref().as_str()).map(quote_and_cut);
        let name = name.unwrap_or_else(|| "a provision".to_owned());
        let missing = |text: String, key| ValueError::with_message(text).in_key(full_key(key));
        let job = matches!(self.job, KeyState::Missing)
            .then(|| missing("a provision has no name: write name = \"web\"".to_owned(), "name"));
        let cores = matches!(self.cores, KeyState::Missing)
            .then(|| missing(format!("{name} has no number of cores: write cores = 4"), "cores"));
        job.into_iter().chain(cores)
    }

    /// The name of the provision, for messages.
    fn shown_name(&self) -> String {
        match &self.job {
            KeyState::Valid(job, _) => format!("{:?}", job.name()),
            KeyState::Missing | KeyState::Wrong => "a provision".to_owned(),
        }
    }

    /// Returns the mistake that an earlier table has the same rule. `earlier` has the rules of the earlier tables, each
    /// with the name of its provision.
    fn same_rule_mistake(&self, earlier: &[(ProvisionRule, String)]) -> Option<ValueError> {
        let KeyState::Valid(rule, span) = &self.rule else { return None };
        let (_, one) = earlier.iter().find(|(earlier_rule, _)| earlier_rule == rule)?;
        let other = self.shown_name();
        let text =
            format!("{one} and {other} have the same match: a process can belong to one provision only");
        Some(ValueError::with_message(text).at_span(span.clone()).in_key(full_key("match")))
    }

    /// Returns the provision. `None` if the name or the number of cores is missing or wrong. A wrong rule is left
    /// out.
    fn into_settings(self) -> Option<ProvisionSettings> {
        let (KeyState::Valid(job, _), KeyState::Valid(cores, _)) = (self.job, self.cores) else {
            return None;
        };
        let rule = match self.rule {
            KeyState::Valid(rule, _) => Some(rule),
            KeyState::Missing | KeyState::Wrong => None,
        };
        Some(ProvisionSettings { job, cores, rule })
    }
}

fn parse_name(value: &DeValue<'_>) -> Result<JobId, ValueError> {
    let name = values::parse_text(value, "the name of a service, such as \"web\"")?;
    let id = JobId::new(JobSource::Manual, name);
    id.map_err(|error| ValueError::with_message(error.to_string()))
}

fn parse_rule(value: &DeValue<'_>) -> Result<ProvisionRule, ValueError> {
    let text = values::parse_text(value, "a rule such as \"unit=nginx.service\"")?;
    let rule = ProvisionRule::parse(text, user_id);
    rule.map_err(|error| ValueError::with_message(error.to_string()))
}

/// The id of the user with this name. `None` if there is no such user, or if the directory of users can't be read.
fn user_id(name: &str) -> Option<Uid> {
    User::from_name(name).ok().flatten().map(|user| Uid(user.uid.as_raw()))
}

#[cfg(test)]
mod tests {
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
            let problems = Config::parse_in_test("pjwd.toml", &text).unwrap_err();
            let messages = problems.iter().map(ToString::to_string).collect::<String>();
            assert!(
                messages.starts_with("pjwd.toml:4:9: provision.") && messages.contains(expected),
                "{rule}: {messages}"
            );
        }
        let text = "[[provision]]\nname = \"web\"\ncores = 4\nmatch = \"user=root,comm=nginx\"\n";
        assert!(Config::parse_in_test("pjwd.toml", text).is_ok());
    }

    #[test]
    fn a_misspelt_key_is_reported_with_the_key_that_was_meant() {
        for (key, expected) in [
            ("macth", "there are name, cores and match; did you mean \"match\"?"),
            ("rule", "there are name, cores and match"),
        ] {
            let text = format!("[[provision]]\nname = \"web\"\ncores = 4\n{key} = \"comm=nginx\"\n");
            let problems = Config::parse_in_test("pjwd.toml", &text).unwrap_err();
            assert!(problems.len() == 1 && problems[0].log_line().ends_with(expected), "{problems:?}");
        }
    }

    #[test]
    fn each_mistake_in_each_table_is_reported_with_its_key_and_place() {
        let text = "[[provision]]\nname=\"a\"\ncores=1\nmatch=\"comm=x\"\n\n\
                    [[provision]]\nname=\"b\"\ncores=0\nmatch=\"comm=x\"\n\n\
                    [[provision]]\nname=\"c d\"\ncores=1\nmatch=\"foo=1\"\nbar=2\n\n\
                    [[provision]]\nname=\"a\"\n";
        let problems = Config::parse_in_test("pjwd.toml", text).unwrap_err();
        let places: Vec<String> = problems.iter().map(super::super::ConfigError::location).collect();
        assert_eq!(
            places,
            [
                "pjwd.toml:8:7: provision.cores",
                "pjwd.toml:9:7: provision.match",
                "pjwd.toml:12:6: provision.name",
                "pjwd.toml:14:7: provision.match",
                "pjwd.toml:15:1: provision.bar",
                "pjwd.toml:17:1: provision.cores",
                "pjwd.toml:18:6: provision.name",
            ]
        );
        let message = problems[5].log_line();
        assert!(message.ends_with("\"a\" has no number of cores: write cores = 4"), "{message}");
    }

    #[test]
    fn a_mistake_hides_neither_a_missing_key_nor_a_rule_that_stands_twice() {
        let text = "mode = \"x\"\n[[provision]]\nname=\"a\"\nmatch=\"comm=x\"\n\n\
                    [[provision]]\nname=\"b\"\ncores=1\nmatch=\"comm=x\"\n";
        let problems = Config::parse_in_test("pjwd.toml", text).unwrap_err();
        let places: Vec<String> = problems.iter().map(super::super::ConfigError::location).collect();
        assert_eq!(
            places,
            ["pjwd.toml:1:8: mode", "pjwd.toml:2:1: provision.cores", "pjwd.toml:9:7: provision.match"]
        );
        assert!(problems[2].log_line().contains("\"a\" and \"b\" have the same match"), "{problems:?}");
    }

    #[test]
    fn a_key_that_was_not_understood_is_not_reported_as_missing() {
        let problems = Config::parse_in_test("pjwd.toml", "[[provision]]\nname=web\ncores=1\n").unwrap_err();
        assert!(problems.len() == 1 && problems[0].log_line().contains("syntax: "), "{problems:?}");
    }
}
