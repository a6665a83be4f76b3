//! The options of `pjwctl provision`.

use clap::{ArgGroup, Args};

use super::json::JsonArg;
use super::number::at_least_one;

/// The examples and remarks below the help of `pjwctl provision`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl provision web --cores 4 --match unit=nginx.service\n  \
    pjwctl provision db --cores 8 --match user=postgres,comm=postgres\n  \
    pjwctl provision --list\n\n\
    The cores are the service's own, whether it runs or not; those that it leaves idle may be lent. Processes that the rule \
    recognises join the job. All conditions of a rule must hold: user=NAME, comm=NAME (as in /proc/PID/comm), cgroup=/PATH, \
    unit=NAME. A rule with comm= alone recognises only processes of system users (user ids below first_person_uid in the \
    configuration): add user=NAME for a service of another user. Without --match, a provision that exists keeps its rule, and \
    gets the new number of cores; to have it without a rule, end it first. pjwctl unprovision NAME ends it. For administrators. The \
    configuration can promise cores too: [[provision]].";

/// The command line options of `pjwctl provision`, which lets pjwd keep cores for a service, or lists the cores that
/// are kept for services.
#[derive(Debug, Clone, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["name", "list"]))]
pub struct ProvisionArgs {
    /// The name of the service
    #[arg(requires = "cores")]
    pub name: Option<String>,
    /// The number of cores that are promised to the service
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub cores: Option<u32>,
    /// The rule by which its processes are recognised; without it, the rule stays as it is
    #[arg(long = "match", value_name = "RULE", requires = "name")]
    pub rule: Option<String>,
    /// List the provisions
    #[arg(long, conflicts_with_all = ["cores", "rule"])]
    pub list: bool,
    /// Whether JSON is printed.
    #[command(flatten)]
    pub json: JsonArg,
}
