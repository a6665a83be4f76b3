//! How the instances were started, and why.

use pjw_spawn::proxy::{ForkError, TemplateError};

use crate::cli::{ProxyArg, SpawnArgs};

/// How many instances of `pjwctl spawn` were forked from templates, and why others were not. A template is a process
/// that has loaded the program. The values are final when all instances have begun.
#[derive(Debug, Default, Clone)]
pub(super) struct TemplateUse {
    /// The number of instances that have begun.
    pub(super) begun: usize,
    /// How many of them are forks of a template.
    pub(super) forked: usize,
    /// The first reason why a program has no template.
    pub(super) refusal: Option<TemplateError>,
    /// The first reason why an instance is no fork of the template of its program.
    pub(super) mismatch: Option<ForkError>,
    /// The name of a variable of which the instances have different values, because their parts have different sizes.
    pub(super) unequal_variable: Option<String>,
}

/// Returns a text with the reason why an instance was not forked from a template (a process that has loaded the
/// program): no other instance has the same value of the environment variable `name`.
pub(super) fn unequal_values_text(name: &str) -> String {
    format!(
        "the parts have different sizes, so instances have different values of {name}, which a program may read when it is \
         loaded, and a single instance has no use for a template of its own"
    )
}

/// How the instances of `pjwctl spawn` were started: each executed the program, or they are forks of a template (a
/// process that has loaded the program), or they share one address space.
#[derive(Debug, Clone)]
pub(super) enum StartMode {
    /// Each executed the program, as requested.
    Never,
    /// None has begun.
    NoneBegun,
    /// Each executed the program.
    Exec(TemplateUse),
    /// Some are forks of a template, or all.
    Proxy(TemplateUse),
    /// They share one address space.
    Shared,
}

impl StartMode {
    /// Returns how the instances of `pjwctl spawn` were started. `request` contains the command line options, and
    /// `templates` says how many instances were forked from templates. All instances must have begun.
    pub(super) fn from_request(request: &SpawnArgs, templates: TemplateUse) -> Self {
        if request.share.is_some() {
            return Self::Shared;
        }
        Self::of_templates(request.proxy, templates)
    }

    fn of_templates(proxy: ProxyArg, templates: TemplateUse) -> Self {
        match proxy {
            ProxyArg::Never => Self::Never,
            _ if templates.begun == 0 => Self::NoneBegun,
            _ if templates.forked == 0 => Self::Exec(templates),
            _ => Self::Proxy(templates),
        }
    }

    /// Returns the name of this way to start instances in the JSON of `pjwctl spawn`: `exec`, `proxy` or `shared`.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Never | Self::NoneBegun | Self::Exec(_) => "exec",
            Self::Proxy(_) => "proxy",
            Self::Shared => "shared",
        }
    }

    /// Returns the reason why the instances were started in this way, as text for the user.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Never => "--proxy never: each instance executes the program".to_owned(),
            Self::NoneBegun => "no instance has begun".to_owned(),
            Self::Exec(templates) => templates.cause(),
            Self::Shared => {
                "--share memory: the program was mapped once for each instance, in one address space"
                    .to_owned()
            }
            Self::Proxy(templates) if templates.forked == templates.begun => {
                "the program was loaded once, and each instance is a fork of it, which takes less CPU time than exec from about \
                 five instances on"
                    .to_owned()
            }
            Self::Proxy(templates) => format!(
                "{} of {} instances are forks of a loaded program, and the others executed it: {}",
                templates.forked,
                templates.begun,
                templates.cause()
            ),
        }
    }

    /// Returns a text for the user that says how the instances were started, and why. `proxy` is the value of the
    /// option `--proxy`. `None` if there is nothing to say: no instance has begun, or the user chose this way with an
    /// option and all instances were started in this way.
    pub(super) fn start_mode_text(&self, proxy: ProxyArg) -> Option<String> {
        match (self, proxy) {
            (Self::Never | Self::NoneBegun | Self::Shared, _) => None,
            (Self::Exec(_), _) => Some(format!("each instance executed the program: {}", self.reason())),
            (Self::Proxy(templates), ProxyArg::Late | ProxyArg::Always)
                if templates.forked == templates.begun =>
            {
                None
            }
            (Self::Proxy(_), _) => Some(self.reason()),
        }
    }
}

impl TemplateUse {
    /// Why instances executed the program.
    fn cause(&self) -> String {
        let unequal = self.unequal_variable.as_deref().filter(|_| self.begun > 1);
        match (self.refusal, self.mismatch, unequal) {
            (Some(refusal), ..) => refusal.to_string(),
            (None, Some(mismatch), _) => mismatch.to_string(),
            (None, None, Some(name)) => unequal_values_text(name),
            (None, None, None) => "a single instance has no use for a template".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(begun: usize, forked: usize, refusal: Option<TemplateError>) -> (&'static str, String) {
        let mode = StartMode::of_templates(
            ProxyArg::Auto,
            TemplateUse { begun, forked, refusal, ..TemplateUse::default() },
        );
        (mode.name(), mode.reason())
    }

    #[test]
    fn the_mode_follows_from_the_number_of_forks() {
        let refused = Some(TemplateError::Privileged);
        assert_eq!(mode(3, 3, None).0, "proxy");
        assert_eq!(mode(3, 0, refused), ("exec", TemplateError::Privileged.to_string()));
        assert_eq!(mode(1, 0, None), ("exec", "a single instance has no use for a template".to_owned()));
        assert_eq!(mode(0, 0, None), ("exec", "no instance has begun".to_owned()));
    }

    #[test]
    fn instances_with_different_sizes_execute_the_program_and_the_variable_is_named() {
        let templates = TemplateUse {
            begun: 2,
            unequal_variable: Some("OMP_NUM_THREADS".to_owned()),
            ..TemplateUse::default()
        };
        let mode = StartMode::of_templates(ProxyArg::Auto, templates);
        assert_eq!(mode.name(), "exec");
        assert!(mode.reason().contains("different values of OMP_NUM_THREADS"), "{}", mode.reason());
    }

    #[test]
    fn a_program_without_a_template_does_not_hide_the_forks_of_another() {
        let (name, why) = mode(5, 3, Some(TemplateError::Privileged));
        assert_eq!(name, "proxy");
        assert!(why.starts_with("3 of 5 instances are forks of a loaded program, and the others"), "{why}");
        assert!(why.ends_with(&TemplateError::Privileged.to_string()), "{why}");
    }
}
