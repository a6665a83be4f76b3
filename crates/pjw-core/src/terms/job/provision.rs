//! Provisions: cores that are promised to a service, whether the service runs or not.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::basics::{Comm, Uid, is_cgroup_within, prelude::*};

/// The properties of a provision: a job whose cores are promised to a service. The job keeps its cores even
/// while no process of the service runs. The job ends when a command releases the job. A provision from the
/// configuration file also ends when its entry is removed from the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provision {
    /// The rule by which pjw recognises the processes of the service. `None` if processes join the job only
    /// by commands.
    #[serde(default)]
    pub rule: Option<ProvisionRule>,
    /// Whether the provision comes from the configuration file. Such a provision ends when its entry is
    /// removed from the file.
    #[serde(default)]
    pub from_config: bool,
}

/// A rule by which pjw recognises the processes of a service. Each field that is not `None` is a condition. A
/// process matches the rule if all conditions hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvisionRule {
    /// The real user id of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<Uid>,
    /// The command name (comm) of the process, as in `/proc/PID/comm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm: Option<String>,
    /// The path of a cgroup, as in `/proc/PID/cgroup`. The process must be in this cgroup or in a cgroup
    /// below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The name of a systemd unit, such as `nginx.service`. The process must be in this unit of the system's service
    /// manager. If the rule has a user, the unit may also be one of this user's service manager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
}

/// The reason why a text is not a valid [`ProvisionRule`]: a rule by which pjw recognises the processes of a service.
/// A valid text is a list of conditions that such a process fulfils. Each condition has the form `KEY=VALUE`. The
/// conditions are separated by commas, as in `user=www,comm=nginx`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ProvisionRuleError {
    /// A part of the text (parts are separated by commas) is not `KEY=VALUE` with a known key.
    #[error(
        "{part:?} is not a condition: write user=NAME, comm=NAME, cgroup=/PATH or unit=NAME, separated by commas"
    )]
    UnknownCondition {
        /// The invalid part of the text.
        part: String,
    },
    /// The value of a condition is empty or invalid. For example, no user has the given name.
    #[error("{part:?} {problem}")]
    WrongValue {
        /// The condition, as `KEY=VALUE`.
        part: String,
        /// What is wrong with the value.
        problem: &'static str,
    },
    /// The only condition is the user root: all processes of root match, also those of the system.
    #[error(
        "{part:?} alone matches every process of root, also those of the system: add comm=NAME, cgroup=/PATH or unit=NAME"
    )]
    AllOfRoot {
        /// The condition, as `user=UID`.
        part: String,
    },
    /// The text has two conditions with the same key.
    #[error("{key} stands twice in the rule")]
    Twice {
        /// The key of the two conditions.
        key: String,
    },
}

impl ProvisionRule {
    /// The largest number of bytes in the name of a process (`TASK_COMM_LEN` of the kernel, less the final zero).
    const MAX_COMM_LENGTH: usize = 15;

    /// Parses a rule such as `user=www,comm=nginx` or `unit=nginx.service`. The value of `user` is a user id or
    /// a user name. `find_user` returns the user id for a user name, or `None` if no user has this name.
    ///
    /// # Errors
    /// - If a part of `rule_text` is not `KEY=VALUE` with a known key. The keys are `user`, `comm`, `cgroup`
    ///   and `unit`. Parts are separated by commas.
    /// - If a key appears twice.
    /// - If a value is empty or invalid, such as the name of a user that does not exist, the root of the cgroups, or a
    ///   path with `..`.
    /// - If the only condition is the user root.
    pub fn parse(
        rule_text: &str,
        find_user: impl Fn(&str) -> Option<Uid>,
    ) -> Result<Self, ProvisionRuleError> {
        let mut rule = Self::default();
        for part in rule_text.split(',').map(str::trim) {
            let unknown = || ProvisionRuleError::UnknownCondition { part: part.to_owned() };
            let wrong = |problem| ProvisionRuleError::WrongValue { part: part.to_owned(), problem };
            let (key, value) = part.split_once('=').ok_or_else(unknown)?;
            if value.is_empty() {
                return Err(wrong("has no value"));
            }
            let was_set_before = match key {
                "user" => {
                    let user = value.parse().ok().map(Uid).or_else(|| find_user(value));
                    rule.user.replace(user.ok_or_else(|| wrong("names no user of this machine"))?).is_some()
                }
                "comm" if value.len() > Self::MAX_COMM_LENGTH => {
                    return Err(wrong("is too long: the kernel keeps 15 bytes of the name of a process"));
                }
                "comm" => rule.comm.replace(value.to_owned()).is_some(),
                "cgroup" if !value.starts_with('/') => {
                    return Err(wrong("does not begin with /: write the path as in /proc/PID/cgroup"));
                }
                "cgroup" if value.trim_end_matches('/').is_empty() => {
                    return Err(wrong(
                        "is the root of the cgroups, which every process matches: name a cgroup below it",
                    ));
                }
                "cgroup" if has_empty_or_dot_component(value) => {
                    return Err(wrong(
                        "has an empty component, . or .. and matches no process: write the path as in /proc/PID/cgroup",
                    ));
                }
                "cgroup" => rule.cgroup.replace(value.trim_end_matches('/').to_owned()).is_some(),
                "unit" if value.contains('/') => {
                    return Err(wrong(
                        "has a / and matches no process: write the name of a unit, such as nginx.service",
                    ));
                }
                "unit" => rule.unit.replace(value.to_owned()).is_some(),
                _ => return Err(unknown()),
            };
            if was_set_before {
                return Err(ProvisionRuleError::Twice { key: key.to_owned() });
            }
        }
        if rule.has_only_root_user() {
            return Err(ProvisionRuleError::AllOfRoot { part: rule_text.trim().to_owned() });
        }
        Ok(rule)
    }

    fn has_only_root_user(&self) -> bool {
        self.user == Some(Uid::ROOT) && self.comm.is_none() && self.cgroup.is_none() && self.unit.is_none()
    }

    /// Whether the only condition of the rule is the command name (`comm`) of the process. Such a rule is weak
    /// evidence, because any user can give any name to a program.
    #[must_use]
    pub fn has_only_comm(&self) -> bool {
        self.user.is_none() && self.cgroup.is_none() && self.unit.is_none()
    }

    /// Returns whether all conditions of the rule hold for a process.
    ///
    /// - `uid` is the real user id of the process.
    /// - `command_name` is the name of its program, as in `/proc/PID/comm`.
    /// - `cgroup` is the path of its cgroup. `None` if unknown: a condition about the cgroup then does not hold.
    /// - `unit_cgroup` is the path of its cgroup in the hierarchy in which systemd has its units. `None` if unknown: a
    ///   condition about the systemd unit then does not hold.
    /// - `only_user` is the only user whose processes pjwd manages. `None` if pjwd manages the processes of all users.
    ///   If the rule names no user, the process must belong to `only_user`.
    #[must_use]
    pub fn matches(
        &self,
        uid: Uid,
        command_name: Comm,
        cgroup: Option<&str>,
        unit_cgroup: Option<&str>,
        only_user: Option<Uid>,
    ) -> bool {
        let user = self.user.or(only_user);
        let (path, unit_path) = (cgroup.unwrap_or_default(), unit_cgroup.unwrap_or_default());
        let is_below = |cgroup: &String| is_cgroup_within(path, cgroup);
        let is_inside = |unit: &String| {
            is_in_unit(unit_path, unit)
                || user.is_some_and(|user| is_in_unit(path_below_manager(unit_path, user), unit))
        };
        user.is_none_or(|user| user == uid)
            && self.comm.as_ref().is_none_or(|comm| command_name.as_bytes() == comm.as_bytes())
            && self.cgroup.as_ref().is_none_or(is_below)
            && self.unit.as_ref().is_none_or(is_inside)
    }
}

/// Whether the cgroup `path` is in a systemd unit. The unit is the first component that is not a slice, as for systemd
/// itself (`cg_path_get_unit`). The names below the unit prove nothing: users and containers choose the names of the
/// cgroups that were delegated to them.
fn is_in_unit(path: &str, unit: &str) -> bool {
    let mut names = path.trim_start_matches('/').split('/');
    names.find(|name| *name == unit || !name.ends_with(".slice")) == Some(unit)
}

/// Returns the part of the cgroup path `path` below the service manager of `user`. Empty if the path is not below it.
fn path_below_manager(path: &str, user: Uid) -> &str {
    let manager = format!("/user.slice/user-{user}.slice/user@{user}.service/");
    path.strip_prefix(manager.as_str()).unwrap_or_default()
}

/// Whether the path of a cgroup has an empty component, `.` or `..`. No path of a known cgroup in `/proc/PID/cgroup`
/// has such a component. The kernel prints `..` only for cgroups outside the cgroup namespace of the reader,
/// cgroup_namespaces(7).
fn has_empty_or_dot_component(path: &str) -> bool {
    let mut components = path.trim_start_matches('/').trim_end_matches('/').split('/');
    components.any(|component| matches!(component, "" | "." | ".."))
}

impl core::fmt::Display for ProvisionRule {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let user = self.user.map(|user| format!("user={user}"));
        let named = [("comm", &self.comm), ("cgroup", &self.cgroup), ("unit", &self.unit)];
        let named = named.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value.as_ref()?)));
        let parts: Vec<String> = user.into_iter().chain(named).collect();
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    fn parse(text: &str) -> Result<ProvisionRule, String> {
        let find_user = |name: &str| match name {
            "www" => Some(Uid(33)),
            "root" => Some(Uid::ROOT),
            _ => None,
        };
        ProvisionRule::parse(text, find_user).map_err(|error| error.to_string())
    }

    #[test]
    fn a_rule_is_parsed_and_printed() {
        for (text, printed) in [
            ("user=www,comm=nginx", "user=33,comm=nginx"),
            ("user=1000", "user=1000"),
            ("cgroup=/system.slice/nginx.service/", "cgroup=/system.slice/nginx.service"),
            ("unit=nginx.service , comm=nginx", "comm=nginx,unit=nginx.service"),
            ("user=0,comm=nginx", "user=0,comm=nginx"),
            ("cgroup=/a..b/.c", "cgroup=/a..b/.c"),
        ] {
            assert_eq!(parse(text).unwrap().to_string(), printed);
            assert_eq!(parse(printed).unwrap(), parse(text).unwrap());
        }
    }

    #[test]
    fn a_unit_is_the_first_component_that_is_not_a_slice() {
        let manager = "/user.slice/user-33.slice/user@33.service";
        for (rule, path, only_user, expected) in [
            ("unit=nginx.service", "/system.slice/nginx.service".to_owned(), None, true),
            (
                "unit=nginx.service",
                "/system.slice/system-web.slice/nginx.service/worker".to_owned(),
                None,
                true,
            ),
            ("unit=system-web.slice", "/system.slice/system-web.slice/nginx.service".to_owned(), None, true),
            (
                "unit=nginx.service",
                "/system.slice/docker-1.scope/system.slice/nginx.service".to_owned(),
                None,
                false,
            ),
            ("unit=nginx.service", "/docker/1/nginx.service".to_owned(), None, false),
            ("unit=nginx.service", format!("{manager}/app.slice/nginx.service"), None, false),
            ("unit=nginx.service", String::new(), None, false),
            ("unit=nginx.service,user=33", format!("{manager}/app.slice/nginx.service"), None, true),
            ("unit=nginx.service", format!("{manager}/nginx.service"), Some(Uid(33)), true),
            ("unit=nginx.service,user=33", "/system.slice/nginx.service".to_owned(), None, true),
            ("unit=user@33.service", format!("{manager}/app.slice/nginx.service"), None, true),
            ("unit=nginx.service,user=34", format!("{manager}/app.slice/nginx.service"), None, false),
        ] {
            let matched =
                parse(rule).unwrap().matches(Uid(33), Comm::from("x"), None, Some(&path), only_user);
            assert_eq!(matched, expected, "{rule} {path}");
        }
    }

    #[test]
    fn a_wrong_rule_is_refused_with_its_part() {
        for (text, expected) in [
            ("", "\"\" is not a condition"),
            ("name=nginx", "\"name=nginx\" is not a condition"),
            ("user=www,nginx", "\"nginx\" is not a condition"),
            ("comm=", "\"comm=\" has no value"),
            ("user=nobody-here", "names no user of this machine"),
            ("comm=a-name-of-16-byt", "is too long"),
            ("cgroup=system.slice", "does not begin with /"),
            ("cgroup=/", "\"cgroup=/\" is the root of the cgroups"),
            ("comm=nginx,cgroup=///", "is the root of the cgroups"),
            ("cgroup=/../..", "matches no process: write the path as in /proc/PID/cgroup"),
            ("cgroup=/system.slice/../x", "matches no process"),
            ("cgroup=/a//b", "matches no process"),
            ("unit=system.slice/nginx.service", "has a / and matches no process"),
            ("user=0", "\"user=0\" alone matches every process of root"),
            (" user=root", "\"user=root\" alone matches every process of root"),
            ("comm=a,comm=b", "comm stands twice"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
