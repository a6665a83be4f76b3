//! What all instances of a program have in common.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
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
use crate::replicate::Replicas;
use crate::setup::{Setup, TemplateStopPoint};
use crate::signals;
use crate::tasks::{directory, image::TaskProgram, room::AddressSpaceError};

/// The properties that all processes of a group have in common: the program, the environment, the credentials and the
/// working directory. The processes are called the instances of the group. [`SpawnContext::start`] starts them. Each
/// [`Instance`] contains what is different for one process, such as its arguments.
///
/// If [`SpawnContext::kill_when_launcher_ends`] was called, dropping this value kills the instances.
#[derive(Debug)]
pub struct SpawnContext {
    /// The properties that all instances share.
    pub(crate) setup: Arc<Setup>,
    /// The maximum number of threads that start the instances of a batch.
    pub(crate) max_spawner_threads: usize,
    /// The threads that must live until the instances have ended. Each thread ends when its sender is dropped.
    spawners: Mutex<Vec<Sender<()>>>,
}

/// The copy has the same properties. It has started no process: dropping it kills no process that the original has
/// started, and the other way round.
impl Clone for SpawnContext {
    fn clone(&self) -> Self {
        Self {
            setup: Arc::clone(&self.setup),
            max_spawner_threads: self.max_spawner_threads,
            spawners: Mutex::default(),
        }
    }
}

impl SpawnContext {
    /// Makes a context, which starts processes of the program `program`. `program` is a path, or a name without a
    /// slash, which is searched in the directories of `PATH`. The arguments of each process are in its [`Instance`].
    ///
    /// The started processes inherit the environment, the limit of open descriptors and the blocked signals that the
    /// calling thread has now. They do not inherit the variable `PJW_TASKS`, which is meant only for
    /// [tasks](crate::tasks): processes that share one address space.
    ///
    /// # Errors
    /// [`CheckError::NoProgram`] if there is no such file. [`CheckError::NotExecutable`] if the file can't be
    /// executed.
    pub fn new(program: impl AsRef<OsStr>) -> Result<Self, CheckError> {
        let path = find_program(program.as_ref())?;
        Ok(Self::from_path(&path))
    }

    /// Makes a context, which starts processes of the program in the file `program`. Unlike [`SpawnContext::new`], this
    /// function does not search `PATH` and checks nothing. If the file does not exist or can't be executed, each
    /// start of a process fails.
    #[must_use]
    pub fn from_path(program: &Path) -> Self {
        let environment = std::env::vars_os().filter_map(|(name, value)| inherited(&name, &value));
        let setup = Setup {
            program: CString::new(program.as_os_str().as_bytes()).unwrap_or_default(),
            environment: environment.collect(),
            credentials: None,
            directory: None,
            ends_with_launcher: false,
            has_rank_variables: false,
            template_stop_point: None,
            task_program: None,
            replicas: None,
            blocked_signals: signals::blocked_signals(),
            descriptor_limit: getrlimit(Resource::RLIMIT_NOFILE).ok(),
        };
        let max_spawner_threads = own_mask().map_or(1, |mask| mask.len()).max(1);
        Self { setup: Arc::new(setup), max_spawner_threads, spawners: Mutex::default() }
    }

    /// Sets the whole environment of the processes that will be started: `variables` contains the name and the value
    /// of each variable. The processes do not inherit the environment of the caller then. A variable with a NUL byte
    /// is left out. The variable `PJW_TASKS` is also left out, because pjw itself sets this variable for processes
    /// that share memory ([`SpawnContext::share_memory`]).
    #[must_use]
    pub fn set_environment<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let variables = variables.into_iter();
        let variables = variables.filter_map(|(name, value)| inherited(name.as_ref(), value.as_ref()));
        self.setup_mut().environment = variables.collect();
        self
    }

    /// Sets one environment variable of the processes that will be started: the variable `name` gets the value
    /// `value`, instead of any earlier value. If `name` or `value` contains a NUL byte, the variable is removed.
    #[must_use]
    pub fn set_variable(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        let name = name.as_ref();
        self = self.remove_variable(name);
        self.setup_mut().environment.extend(variable(name, value.as_ref()));
        self
    }

    /// Removes one environment variable from the processes that will be started: the variable `name`, which they would
    /// inherit from the caller. Has no effect if there is no such variable.
    #[must_use]
    pub fn remove_variable(mut self, name: impl AsRef<OsStr>) -> Self {
        let name = name.as_ref();
        self.setup_mut().environment.retain(|variable| !is_named(variable, name.as_bytes()));
        self
    }

    /// Gives each started process (instance) three environment variables:
    ///
    /// - `PJW_RANK`: the rank of the instance, which is its position in the group, counted from 0.
    /// - `PJW_SIZE`: the number of instances.
    /// - `PJW_CPUS`: the CPUs in the affinity mask that the [`Placement`](crate::Placement) of the instance contains,
    ///   as a list such as `0-3`. Empty if the placement contains no mask.
    #[must_use]
    pub fn add_rank_variables(mut self) -> Self {
        let setup = self.setup_mut();
        let is_rank_variable =
            |variable: &CString| RANK_VARIABLES.iter().any(|name| is_named(variable, name.as_bytes()));
        setup.environment.retain(|variable| !is_rank_variable(variable));
        setup.has_rank_variables = true;
        self
    }

    /// Sets the user and the groups as which the processes will run. Without this call, they run as the user and the
    /// groups of the caller. Processes with other credentials do not inherit the ambient capabilities of the caller,
    /// capabilities(7). The caller needs `CAP_SETUID` and `CAP_SETGID` when it starts the processes. Processes
    /// that share memory ([`SpawnContext::share_memory`]) can't be started with other credentials: the start fails.
    #[must_use]
    pub fn set_credentials(mut self, credentials: Credentials) -> Self {
        self.setup_mut().credentials = Some(credentials);
        self
    }

    /// Sets the working directory of the processes that will be started. Without this call, or if `directory` contains
    /// a NUL byte, the processes have the working directory of the caller. If the path of the program is relative, this
    /// call completes it with the present working directory of the caller, not with `directory`.
    #[must_use]
    pub fn set_working_directory(mut self, directory: &Path) -> Self {
        let setup = self.setup_mut();
        setup.directory = CString::new(directory.as_os_str().as_bytes()).ok();
        // A process changes its directory before it executes the program.
        let program = std::path::absolute(OsStr::from_bytes(setup.program.to_bytes()));
        if let Some(program) =
            program.ok().and_then(|path| CString::new(path.into_os_string().into_vec()).ok())
        {
            setup.program = program;
        }
        self
    }

    /// Makes the kernel kill each started process (instance) when the launcher ends, or when this context is dropped.
    /// The launcher is the process that starts the instances. Each instance requests `SIGKILL` for the end of the
    /// thread that started it (`PR_SET_PDEATHSIG`, prctl(2)). This thread, a spawner thread, waits until the context
    /// is dropped, and then ends.
    ///
    /// Instances of a program that is setuid, is setgid or has file capabilities are not killed. Instances that change
    /// their own effective user or group, or gain a capability, are not killed either: the kernel clears the request
    /// then. The child processes of an instance are not killed.
    #[must_use]
    pub fn kill_when_launcher_ends(mut self) -> Self {
        self.setup_mut().ends_with_launcher = true;
        self
    }

    /// Configures this context so that its processes (instances) are started by fork instead of exec, which costs less
    /// CPU time. The instances will be forked from a [template](crate::proxy::Template): a process that has loaded the
    /// program and is stopped before `main`. Each thread that starts instances loads a template of its own.
    ///
    /// An instance is started by exec instead in these cases:
    ///
    /// - The program can't have a template. [`SpawnBatch::template_error`](crate::SpawnBatch::template_error) returns
    ///   the reason.
    /// - The instance differs from the template in a property that a fork can't change, such as the cgroup or the
    ///   number of arguments. [`SpawnBatch::fork_error`](crate::SpawnBatch::fork_error) returns the reason.
    /// - The template has ended, or the arguments can't be written into the memory of the template.
    ///   [`SpawnBatch::fork_error`](crate::SpawnBatch::fork_error) returns the reason.
    /// - The batch has a single instance.
    ///
    /// This call undoes an earlier call of [`SpawnContext::share_memory`].
    #[must_use]
    pub fn fork_from_templates(self) -> Self {
        self.with_templates(TemplateStopPoint::Linked)
    }

    /// Configures this context so that its processes (instances) will share one address space. Such processes are
    /// called [tasks](crate::tasks). The program must be for x86-64, and must be a static executable that runs at any
    /// address (linked with `-static-pie`). Undoes earlier calls of [`SpawnContext::fork_from_templates`],
    /// [`SpawnContext::use_fork_here_templates`] and [`SpawnContext::set_replicas`].
    ///
    /// # Errors
    /// [`CheckError::AddressSpace`] if the program can't run as a task. The error contains the reason.
    pub fn share_memory(mut self) -> Result<Self, CheckError> {
        let task_program = TaskProgram::read(&self.setup.program).map_err(|why| {
            AddressSpaceError::Program { program: self.setup.program.to_string_lossy().into_owned(), why }
        })?;
        let setup = self.setup_mut();
        setup.task_program = Some(Arc::new(task_program));
        setup.template_stop_point = None;
        setup.replicas = None;
        Ok(self)
    }

    /// Returns whether the processes (instances) of this context will share one address space
    /// ([`SpawnContext::share_memory`]).
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        self.setup.task_program.is_some()
    }

    /// Configures this context so that its processes (instances) will be forked from a template that has already run
    /// a part of the program. The template is a process of the program that runs until it calls
    /// [`fork_here`](crate::proxy::fork_here), and stops in this call. Each instance continues after this call, with
    /// the memory and the open files that the template has at the call. In all other respects, this function is like
    /// [`SpawnContext::fork_from_templates`]. Undoes an earlier call of [`SpawnContext::share_memory`].
    #[must_use]
    pub fn use_fork_here_templates(self) -> Self {
        self.with_templates(TemplateStopPoint::Late)
    }

    /// Lets each process (instance) read the files in `replicas` from copies in the memory of its own NUMA node. This
    /// is the preferred NUMA node of the instance's [`Placement`](crate::Placement). An instance without a preferred
    /// node uses the original files. In the mount namespace of the instance, the copies are mounted over the files.
    /// The caller does not see the copies.
    ///
    /// [`SpawnContext::start`] makes the copies. They are removed after the last instance has ended. One thread starts
    /// all instances of a NUMA node, so [`SpawnContext::set_max_spawner_threads`] has no effect.
    ///
    /// Undoes an earlier call of [`SpawnContext::share_memory`].
    #[must_use]
    pub fn set_replicas(mut self, replicas: Replicas) -> Self {
        let setup = self.setup_mut();
        setup.replicas = Some(Arc::new(replicas));
        setup.task_program = None;
        self
    }

    /// Sets the maximum number of threads that start the processes (instances) of a [`SpawnBatch`](crate::SpawnBatch)
    /// in parallel. The default is the number of CPUs in the affinity mask of the caller. 0 counts as 1. All instances
    /// with the same [placement](crate::Placement) are started by the same thread. So a batch uses at most one thread
    /// for each placement.
    #[must_use]
    pub fn set_max_spawner_threads(mut self, threads: usize) -> Self {
        self.max_spawner_threads = threads.max(1);
        self
    }

    /// Returns the path of the program whose processes this context starts. If [`SpawnContext::new`] received a name
    /// without a slash, returns the path that was found in `PATH`.
    #[must_use]
    pub fn program_path(&self) -> &CStr {
        &self.setup.program
    }

    /// Keeps a spawner thread (a thread that has started processes) alive until this context is dropped, because the
    /// kernel kills the started processes when the thread ends. The thread waits on a channel, and ends when
    /// `end_signal`, the sender of this channel, is dropped.
    pub(crate) fn keep_spawner_thread(&self, end_signal: Sender<()>) {
        self.spawners.lock().unwrap_or_else(PoisonError::into_inner).push(end_signal);
    }

    /// Checks whether one process for each element of `instances` can be started, and starts nothing. The checks are:
    ///
    /// - `instances` is not empty.
    /// - The affinity mask of each instance is not empty, and is inside the mask of the caller.
    /// - The preferred NUMA node of each instance has memory, and the caller may use this memory.
    /// - The arguments and the environment are within the limits of execve(2). This check fails only if they are too
    ///   large for every instance. If they are too large for some instances, only the starts of these instances fail.
    /// - If the instances are to share memory ([`SpawnContext::share_memory`]), one address space has room for all of
    ///   them.
    /// - The caller has `CAP_SYS_ADMIN`, if [`SpawnContext::set_replicas`] requests copies.
    /// - There is enough free memory for the copies that [`SpawnContext::set_replicas`] requests.
    /// - The limits on the number of processes allow all instances, and the threads and processes that start the
    ///   instances ([`SpawnContext::starter_count`]). This is not checked for a single instance.
    ///
    /// # Errors
    /// The first check that failed, with the reason and the remedy as text.
    pub fn check_instances(&self, instances: &[Instance]) -> Result<(), CheckError> {
        checks::check_all(&self.setup, instances, self.starter_count(instances))
    }

    /// Returns how many threads and processes [`SpawnContext::start`] uses to start `instances`. The limits on the
    /// number of processes count all of these:
    ///
    /// - The spawner threads, which start the instances (processes).
    /// - One template for each spawner thread, if the context uses templates. Instances are forked from a template.
    /// - The process that owns the common address space, if the instances share memory
    ///   ([`SpawnContext::share_memory`]).
    #[must_use]
    pub fn starter_count(&self, instances: &[Instance]) -> usize {
        let threads = self.spawner_count(instances);
        let templates = if self.setup.template_stop_point.is_some() { threads } else { 0 };
        threads + templates + usize::from(self.setup.task_program.is_some())
    }

    /// Sets that instances are forked from templates, which stop at `stop_point`. Undoes an earlier call of
    /// [`SpawnContext::share_memory`], because an instance is either a task or a fork of a template.
    fn with_templates(mut self, stop_point: TemplateStopPoint) -> Self {
        let setup = self.setup_mut();
        setup.template_stop_point = Some(stop_point);
        setup.task_program = None;
        self
    }

    fn setup_mut(&mut self) -> &mut Setup {
        Arc::make_mut(&mut self.setup)
    }
}

/// Returns an environment variable as `NAME=value`. `None` if the name or the value contains a NUL byte.
fn variable(name: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

/// Returns an environment variable that instances inherit, as [`variable`]. `None` also for `PJW_TASKS`, which pjw sets
/// for each task itself.
fn inherited(name: &OsStr, value: &OsStr) -> Option<CString> {
    if name == directory::TASKS_VARIABLE { None } else { variable(name, value) }
}

/// Returns whether `variable`, which has the form `NAME=value`, has the name `name`.
fn is_named(variable: &CStr, name: &[u8]) -> bool {
    variable.to_bytes().strip_prefix(name).is_some_and(|after_name| after_name.starts_with(b"="))
}
