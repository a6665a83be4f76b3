//! How the instances were started, and why.

use pjw_spawn::proxy::TemplateError;

use super::group::Group;
use crate::cli::{ProxyArg, SpawnArgs};

/// How the instances were started.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mode {
    /// Each executed the program, as requested.
    Exec,
    /// Each executed the program, because there are fewer than two of it.
    Single,
    /// Each executed the program, because it can't have a template.
    Refused(TemplateError),
    /// They are forks of a template.
    Proxy,
    /// They share one address space.
    Shared,
}

impl Mode {
    /// Returns how the instances of a group were started. It is known when all have begun.
    pub(super) fn of(request: &SpawnArgs, group: &Group) -> Self {
        match (request.proxy, group.refusal) {
            _ if request.share.is_some() => Self::Shared,
            (ProxyArg::Never, _) => Self::Exec,
            (_, Some(refusal)) => Self::Refused(refusal),
            _ if group.states.len() < 2 => Self::Single,
            _ => Self::Proxy,
        }
    }

    /// Returns the name of the mode in the JSON of `pjwctl spawn`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Exec | Self::Single | Self::Refused(_) => "exec",
            Self::Proxy => "proxy",
            Self::Shared => "shared",
        }
    }

    /// Returns why the instances were started in this way.
    pub(super) fn why(self) -> String {
        match self {
            Self::Exec => "--proxy never: each instance executes the program".to_owned(),
            Self::Single => "a single instance has no use for a template".to_owned(),
            Self::Refused(refusal) => refusal.to_string(),
            Self::Shared => {
                "--share memory: the program was mapped once for each instance, in one address space"
                    .to_owned()
            }
            Self::Proxy => "the program was loaded once, and each instance is a fork of it".to_owned(),
        }
    }
}
