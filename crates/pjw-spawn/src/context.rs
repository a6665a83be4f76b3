//! What all instances of a program have in common.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit};

use crate::checks::program::find_program;
use crate::checks::{self, CheckError};
use crate::credentials::Credentials;
use crate::instance::Instance;
use crate::layout::RANK_VARIABLES;
use crate::own_policy::own_mask;
use crate::setup::Setup;
use crate::signals;

/// What all instances of a program have in common: the program, the environment, the credentials, and how they end.
///
/// With [`Context::end_with_launcher`], the instances end when this value is dropped.
#[derive(Debug)]
pub struct Context {
    pub(crate) setup: Arc<Setup>,
    /// The most spawner threads of a batch.
    pub(crate) max_spawners: usize,
    /// The spawner threads that live until the instances have ended. Each ends when its sender is dropped.
    spawners: Mutex<Vec<Sender<()>>>,
}

impl Context {
    /// Makes the context of a program. A name without a slash is searched in `PATH`. The instances get the environment of
    /// the caller, the signals that the calling thread has blocked now, and the present limit of open descriptors.
    ///
    /// # Errors
    /// If there is no such program, or if it is a directory or not executable.
    pub fn new(program: impl AsRef<OsStr>) -> Result<Self, CheckError> {
        let path = find_program(program.as_ref())?;
        Ok(Self::of_path(&path))
    }

    /// Makes the context of the program at a path, without a check of the program.
    #[must_use]
    pub fn of_path(program: &Path) -> Self {
        let environment = std::env::vars_os().filter_map(|(name, value)| variable(&name, &value));
        let setup = Setup {
            program: CString::new(program.as_os_str().as_bytes()).unwrap_or_default(),
            environment: environment.collect(),
            credentials: None,
            directory: None,
            ends_with_launcher: false,
            has_rank_variables: false,
            uses_templates: false,
            blocked_signals: signals::blocked(),
            descriptor_limit: getrlimit(Resource::RLIMIT_NOFILE).ok(),
        };
        let max_spawners = own_mask().map_or(1, |mask| mask.len()).max(1);
        Self { setup: Arc::new(setup), max_spawners, spawners: Mutex::default() }
    }

    /// Replaces the environment. A variable with a NUL byte in it is left out.
    #[must_use]
    pub fn environment<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let variables = variables.into_iter();
        let variables = variables.filter_map(|(name, value)| variable(name.as_ref(), value.as_ref()));
        self.setup_mut().environment = variables.collect();
        self
    }

    /// Sets one variable of the environment.
    #[must_use]
    pub fn variable(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let name = name.as_ref();
        let environment = &mut self.setup_mut().environment;
        environment.retain(|variable| !is_named(variable, name.as_bytes()));
        environment.extend(variable(name, value.as_ref()));
        self
    }

    /// Gives each instance the variables `PJW_RANK`, `PJW_SIZE` and `PJW_CPUS`.
    #[must_use]
    pub fn rank_variables(mut self) -> Self {
        let setup = self.setup_mut();
        let is_own =
            |variable: &CString| RANK_VARIABLES.iter().any(|name| is_named(variable, name.as_bytes()));
        setup.environment.retain(|variable| !is_own(variable));
        setup.has_rank_variables = true;
        self
    }

    /// Sets the user and the groups of the instances. This needs `CAP_SETUID` and `CAP_SETGID`.
    #[must_use]
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.setup_mut().credentials = Some(credentials);
        self
    }

    /// Sets the working directory of the instances. A path with a NUL byte is the caller's own directory.
    #[must_use]
    pub fn directory(mut self, directory: &Path) -> Self {
        self.setup_mut().directory = CString::new(directory.as_os_str().as_bytes()).ok();
        self
    }

    /// Lets the kernel kill each instance when the launcher ends, or when this context is dropped
    /// (`PR_SET_PDEATHSIG`, prctl(2)).
    ///
    /// The kernel forgets this for a program that is setuid, setgid or has file capabilities. The processes that an
    /// instance itself has started are not killed.
    #[must_use]
    pub fn end_with_launcher(mut self) -> Self {
        self.setup_mut().ends_with_launcher = true;
        self
    }

    /// Makes instances by fork of a [template](crate::proxy::Template), which each spawner thread loads for itself. Instances
    /// that can't be made so are started by exec: see [`Batch::refusal`](crate::Batch::refusal).
    #[must_use]
    pub fn templates(mut self) -> Self {
        self.setup_mut().uses_templates = true;
        self
    }

    /// Sets the most spawner threads of a batch. The default is one for each PU of the caller's mask. There are never more
    /// than different placements. 0 means 1.
    #[must_use]
    pub fn max_spawners(mut self, most: usize) -> Self {
        self.max_spawners = most.max(1);
        self
    }

    /// Returns the path of the program.
    #[must_use]
    pub fn program(&self) -> &CStr {
        &self.setup.program
    }

    /// Keeps a spawner thread until this context is dropped.
    pub(crate) fn keep(&self, spawner: Sender<()>) {
        self.spawners.lock().unwrap_or_else(PoisonError::into_inner).push(spawner);
    }

    /// Checks what can be known beforehand: the number of instances, the room for processes, the masks, the sizes of
    /// arguments and environments, the working directory. A single instance that is too large is left to fail on its own.
    ///
    /// # Errors
    /// What is wrong, why, and the remedy.
    pub fn check(&self, instances: &[Instance]) -> Result<(), CheckError> {
        checks::check(&self.setup, instances)
    }

    fn setup_mut(&mut self) -> &mut Setup {
        Arc::make_mut(&mut self.setup)
    }
}

/// Returns a variable as `NAME=value`. `None` for a text with a NUL byte.
fn variable(name: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

fn is_named(variable: &CStr, name: &[u8]) -> bool {
    variable.to_bytes().strip_prefix(name).is_some_and(|rest| rest.starts_with(b"="))
}
