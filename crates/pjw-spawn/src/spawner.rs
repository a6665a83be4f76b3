//! A spawner thread: it takes the mask of a placement itself, and the instances that it starts inherit the mask.
//!
//! So an instance has its mask before its first instruction, and makes no system call for it. The thread has a table
//! of descriptors of its own: the pidfds of many instances would be copied for each new process, and closed again.
//!
//! For one instance, a thread would take longer than it saves: [`start_single_instance`] starts the instance from the
//! calling thread, whose mask stays as it is. This instance sets its mask itself before it executes its program.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;

use crate::child::Child;
use crate::clone::{self, ChildStack, ProcessSettings, StartParameters};
use crate::failure::{SpawnError, SpawnStep};
use crate::instance::Instance;
use crate::layout::ExecArrays;
use crate::own_policy::{MemoryPolicy, own_mask, set_own_mask};
use crate::placement::Placement;
use crate::setup::Setup;
use crate::signals;

/// The state of a spawner thread, which starts one instance (process) after the other.
pub(crate) struct Spawner<'a> {
    program: &'a CStr,
    settings: ProcessSettings<'a>,
    layout: ExecArrays,
    stack: ChildStack,
    inherited: Inherited,
    /// The placement whose mask and memory policy the thread has.
    current: Option<Arc<Placement>>,
}

/// The affinity mask and the memory policy that the spawner thread inherited from the caller. An instance whose
/// placement has no CPUs gets this mask. An instance whose placement has no NUMA node gets this policy.
struct Inherited {
    mask: CpuSet,
    memory_policy: Option<MemoryPolicy>,
    /// Whether the thread still has the inherited mask and memory policy.
    is_in_force: bool,
}

/// Returns the parameters of a new process that are the same for all instances with the setup `setup`, such as the
/// working directory and the credentials.
pub(crate) fn settings(setup: &Setup) -> ProcessSettings<'_> {
    ProcessSettings {
        directory: setup.directory.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
        credentials: setup.credentials.as_ref(),
        launcher: if setup.ends_with_launcher { std::process::id().cast_signed() } else { 0 },
        blocked_signals: setup.blocked_signals,
        descriptor_limit: setup.descriptor_limit_to_restore(),
    }
}

/// Starts the process `instance` from the calling thread, and keeps the affinity mask and the memory policy of this
/// thread. The new process sets its own mask and policy. Returns when the process has begun its program or has failed.
pub(crate) fn start_single_instance(setup: &Setup, instance: &Instance) -> Result<Child, SpawnError> {
    let mask_failed = |errno| SpawnError { step: SpawnStep::Mask, errno };
    let node = instance.placement.preferred_numa_node;
    let memory_policy = node.map(MemoryPolicy::prefer_node).transpose().map_err(mask_failed)?;
    let (settings, mut stack) = (settings(setup), ChildStack::new());
    let mut layout = ExecArrays::new(&setup.environment, setup.has_rank_variables);
    let start = StartParameters {
        mask: instance.placement.cpus.as_ref(),
        memory_policy: memory_policy.as_ref(),
        ..start_parameters(&setup.program, &settings, &mut layout, instance)
    };
    let blocked = signals::block_all_signals();
    let result = clone::clone_and_exec(&start, &mut stack);
    signals::set_blocked_signals(blocked);
    result
}

/// Returns the parameters for the start of the process `instance`, with the mask and the memory policy of the calling
/// thread. Fills `layout` with the arguments and the environment. The pointers in the result are valid until `layout`
/// is filled for the next instance.
fn start_parameters<'a>(
    program: &CStr,
    settings: &'a ProcessSettings<'a>,
    layout: &mut ExecArrays,
    instance: &Instance,
) -> StartParameters<'a> {
    let (arguments, environment) = layout.fill(instance);
    let number = |stream: &Option<Arc<OwnedFd>>| stream.as_ref().map_or(-1, |fd| fd.as_raw_fd());
    let stdio = &instance.stdio;
    StartParameters {
        program: program.as_ptr(),
        arguments,
        environment,
        settings,
        streams: [number(&stdio.input), number(&stdio.output), number(&stdio.error)],
        cgroup: instance.placement.cgroup.as_ref().map(|cgroup| cgroup.as_raw_fd()),
        mask: None,
        memory_policy: None,
        template: None,
    }
}

impl<'a> Spawner<'a> {
    /// Makes the state of a spawner for the calling thread. All signals must be blocked in this thread.
    ///
    /// # Errors
    /// If the affinity mask of the calling thread can't be read.
    pub(crate) fn new(setup: &'a Setup) -> Result<Self, Errno> {
        let inherited = Inherited {
            mask: own_mask()?,
            memory_policy: MemoryPolicy::of_calling_thread(),
            is_in_force: true,
        };
        Ok(Self {
            program: &setup.program,
            settings: settings(setup),
            layout: ExecArrays::new(&setup.environment, setup.has_rank_variables),
            stack: ChildStack::new(),
            inherited,
            current: None,
        })
    }

    /// Starts the process `instance`. First sets the affinity mask and the memory policy of the calling thread to those
    /// of the instance, so that the process inherits them. Returns when the process has begun its program or has
    /// failed.
    pub(crate) fn start(&mut self, instance: &Instance) -> Result<Child, SpawnError> {
        self.apply_placement(&instance.placement)?;
        let start = start_parameters(self.program, &self.settings, &mut self.layout, instance);
        clone::clone_and_exec(&start, &mut self.stack)
    }

    /// Gives the calling thread the affinity mask and the memory policy for the placement `placement`. Does nothing
    /// if this is the placement of the last instance. A failure has the step [`SpawnStep::Mask`].
    fn apply_placement(&mut self, placement: &Arc<Placement>) -> Result<(), SpawnError> {
        if self.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, placement)) {
            return Ok(());
        }
        self.current = None;
        self.set_policies(placement).map_err(|errno| SpawnError { step: SpawnStep::Mask, errno })?;
        self.current = Some(Arc::clone(placement));
        Ok(())
    }

    /// Sets the affinity mask and the memory policy of the calling thread to those of `placement`.
    ///
    /// - If the placement has no CPUs, sets the mask that the thread has inherited.
    /// - If the placement has no preferred NUMA node, sets the memory policy that the thread has inherited.
    /// - If the placement has neither, and the thread still has what it inherited, makes no system call.
    fn set_policies(&mut self, placement: &Placement) -> Result<(), Errno> {
        if placement.cpus.is_none() && placement.preferred_numa_node.is_none() && self.inherited.is_in_force {
            return Ok(());
        }
        self.inherited.is_in_force = false;
        set_own_mask(placement.cpus.as_ref().unwrap_or(&self.inherited.mask))?;
        match placement.preferred_numa_node {
            Some(node) => MemoryPolicy::prefer_node(node)?.set_for_calling_thread(),
            None => {
                self.inherited.memory_policy.as_ref().map_or(Ok(()), MemoryPolicy::set_for_calling_thread)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Arguments;
    use crate::context::SpawnContext;
    use crate::instance::Stdio;
    use crate::syscall_filter::refuse_call;

    #[test]
    fn an_instance_whose_mask_the_kernel_refuses_is_not_started_and_has_the_step_and_the_errno() {
        let directory = tempfile::tempdir().unwrap();
        let started = directory.path().join("started");
        let arguments = Arc::new(Arguments::literal(&["touch", started.to_str().unwrap()]).unwrap());
        // The checks before the start let only masks through that the kernel does not refuse at that time.
        let placement = Arc::new(Placement::on_cpus(own_mask().unwrap()));
        let context = SpawnContext::new("touch").unwrap();
        // A single instance sets its mask itself. For several instances, a thread sets its own.
        for count in [1, 3] {
            let instance = |rank| Instance {
                rank,
                size: count,
                arguments: Arc::clone(&arguments),
                variables: Vec::new(),
                placement: Arc::clone(&placement),
                stdio: Stdio::default(),
            };
            let (context, group) = (context.clone(), (0..count).map(instance).collect());
            // The filter applies to this thread, and to the threads and processes that it starts.
            let start = move || {
                refuse_call(libc::SYS_sched_setaffinity, Errno::EINVAL);
                context.spawn_n(group)
            };
            let results = std::thread::spawn(start).join().unwrap().unwrap();
            let errors: Vec<SpawnError> = results.into_iter().map(Result::unwrap_err).collect();
            let expected = SpawnError { step: SpawnStep::Mask, errno: Errno::EINVAL };
            assert_eq!(errors, vec![expected; count as usize]);
            assert_eq!(expected.to_string(), "step mask failed: Invalid argument");
        }
        assert!(!started.exists(), "an instance was started");
    }
}
