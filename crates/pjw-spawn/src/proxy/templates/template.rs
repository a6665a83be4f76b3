//! A template: a process that has loaded a program, and from which further processes (instances) are forked.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::{fmt, mem};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Pid;

use super::load::{LoadedTemplate, load, load_until_fork_here};
use super::memory::write;
use super::message::addresses::MAX_POINTERS;
use super::message::block::{MemoryMap, TemplateBlock};
use super::message::strings::{InstanceStrings, PlacedStrings};
use super::message::stub::{MAX_INSTANCES, TemplateReply};
use super::message::{CommonSetup, InstanceSetup, TemplateMessage};
use super::processes::{has_streams, online_cpus, open_child};
use super::properties::{TemplateProperties, is_linker_variable};
use crate::child::Child;
use crate::context::SpawnContext;
use crate::failure::{SpawnError, SpawnStep};
use crate::instance::{Instance, Stdio};
use crate::layout::ExecArrays;
use crate::own_policy::MemoryPolicy;
use crate::placement::Placement;
use crate::proxy::refusal::{ForkError, TemplateError};
use crate::setup::{Setup, TemplateStopPoint};

/// Makes the dynamic linker of glibc bind all functions at once: in the template, and not again in each instance.
const BIND_NOW: &CStr = c"LD_BIND_NOW=1";
/// The longest argument or variable of execve(2), with its NUL byte: `MAX_ARG_STRLEN`.
const MAX_STRING: usize = 32 * 4096;
/// The bounds of the bytes that execve(2) allows for all strings together: a quarter of `RLIMIT_STACK`, but at least
/// 128 KiB and at most three quarters of 8 MiB.
const MIN_STRINGS: u64 = 128 * 1024;
const MAX_STRINGS: u64 = 6 * 1024 * 1024;
/// The number of bytes at `AT_RANDOM` (getauxval(3)), and the number of instances for which they are got at once.
const RANDOM_SIZE: usize = 16;
const RANDOM_COUNT: usize = 16;

/// A process that has loaded a program and is stopped before `main`, or in a call of [`super::fork_here`]. Further
/// processes of the program, called instances, are forked from the template, which costs less CPU time than exec. Other
/// names for a template are zygote and fork server. A stopped template uses no CPU.
///
/// The thread that loads the template is the parent of the template and of the instances. The template ends when this
/// value is dropped, or when the process that loaded it ends. With [`SpawnContext::kill_when_launcher_ends`], the
/// kernel kills the instances when the thread that loaded the template ends.
pub struct Template {
    pub(super) loaded: LoadedTemplate,
    // Its pointers lead into `setup`.
    layout: ExecArrays,
    setup: Arc<Setup>,
    pub(super) common: CommonSetup,
    /// The fixed properties of the template. `None` if the template has stopped in `fork_here`.
    properties: Option<TemplateProperties>,
    /// The strings of the last instance, which are still in the memory of the template.
    pub(super) written_strings: PlacedStrings,
    /// The address and the size of the memory for strings.
    pub(super) string_memory: (u64, u64),
    /// The memory map that the template has set for itself, and that its instances inherit. `None` for its first map.
    pub(super) inherited_map: Option<MemoryMap>,
    /// The mask that the template has requested, and that its instances inherit.
    inherited_mask: Option<CpuSet>,
    max_strings: u64,
    /// The directory of the cgroup. Held open: the number of a closed one could be that of another cgroup later.
    cgroup: Option<Arc<OwnedFd>>,
    online_cpus: CpuSet,
    has_streams: bool,
    /// The message that was not sent yet.
    pub(super) message: TemplateMessage,
    /// For each message that has no reply yet, the number of its instances. The oldest message is first.
    unanswered: VecDeque<usize>,
    /// The results that were received and not returned yet: process ids and negative errnos.
    results: VecDeque<i32>,
    /// Random bytes for the next instances.
    random: Vec<u8>,
}

impl Template {
    /// Starts a template: a process of the program of `context`, from which instances (further processes of the
    /// program) are forked. Waits until the template has stopped before `main`. The template has the arguments, the
    /// environment variables and the cgroup of the instance `first`, and runs on the CPUs of the calling thread. The
    /// template is not an instance itself: [`Template::fork`] must also be called for `first`.
    ///
    /// # Errors
    /// If the program can't have a template. [`TemplateError::is_program_failure`] returns whether its start by exec
    /// would fail too.
    pub fn load_until_main(context: &SpawnContext, first: &Instance) -> Result<Self, TemplateError> {
        Self::load_linked(Arc::clone(&context.setup), first)
    }

    /// Starts a template: a process from which further processes of the program in `setup` (instances) are forked. The
    /// template gets the arguments and variables of `first`, the first instance. Instances with the mask
    /// `requested_mask`, which the calling thread has set, inherit this mask. If `is_cancelled` becomes true, a wait
    /// for a call of `fork_here` ends with an error.
    pub(crate) fn from_setup(
        setup: Arc<Setup>,
        first: &Instance,
        requested_mask: Option<CpuSet>,
        is_cancelled: &AtomicBool,
    ) -> Result<Self, TemplateError> {
        let mut template = match setup.template_stop_point {
            Some(TemplateStopPoint::Late) => Self::late(setup, first, is_cancelled),
            _ => Self::load_linked(setup, first),
        }?;
        template.inherited_mask = requested_mask;
        Ok(template)
    }

    /// Loads this template again until `main`, after its process has ended. `first` is the first instance.
    pub(crate) fn reload(&mut self, first: &Instance) -> Result<(), TemplateError> {
        *self = Self::load_linked(Arc::clone(&self.setup), first)?;
        Ok(())
    }

    /// Starts a template that stops before `main`. In the template, [`BIND_NOW`] replaces the last variable that the
    /// dynamic linker does not read. So the number of variables is right, and the instances keep their own variables.
    fn load_linked(setup: Arc<Setup>, first: &Instance) -> Result<Self, TemplateError> {
        let mut layout = ExecArrays::new(&setup.environment, setup.has_rank_variables);
        let (arguments, mut variables) = texts(&mut layout, first);
        let properties = TemplateProperties::for_program(&setup.program, &variables);
        let is_replaceable = |variable: &&mut &CStr| !is_linker_variable(variable.to_bytes());
        if let Some(replaced) = variables.iter_mut().rev().find(is_replaceable) {
            *replaced = BIND_NOW;
        }
        // Instances take their masks and nodes themselves. If the template changed PUs, each fork would flush the TLB
        // of the PU before.
        let loaded = load(&setup, cgroup(&first.placement), &arguments, &variables)?;
        Ok(Self::from_loaded(setup, layout, loaded, Some(properties), first))
    }

    /// Starts a template for a program that calls [`super::fork_here`], and waits until the program has called this
    /// function. The template stops in the call. Instances (further processes of the program) are forked from the
    /// template, and continue after the call.
    ///
    /// The template has the arguments, the environment variables and the cgroup of the instance `first`. The template
    /// is not an instance itself: [`Template::fork`] must also be called for `first`. [`Template::fork`] fails for an
    /// instance with more than 4094 strings: its arguments, and the variables that only this instance has.
    ///
    /// # Errors
    /// If the program does not start, or ends before it calls [`super::fork_here`]. Also if a system call fails.
    pub fn load_until_fork_here(context: &SpawnContext, first: &Instance) -> Result<Self, TemplateError> {
        Self::late(Arc::clone(&context.setup), first, &AtomicBool::new(false))
    }

    fn late(setup: Arc<Setup>, first: &Instance, is_cancelled: &AtomicBool) -> Result<Self, TemplateError> {
        let mut layout = ExecArrays::new(&setup.environment, setup.has_rank_variables);
        let (arguments, variables) = texts(&mut layout, first);
        let cgroup = cgroup(&first.placement);
        let loaded = load_until_fork_here(&setup, cgroup, &arguments, &variables, is_cancelled)?;
        Ok(Self::from_loaded(setup, layout, loaded, None, first))
    }

    /// Makes the template with the process in `loaded`. `layout` must have been made for the environment in `setup`.
    /// `properties` has the fixed properties of the template, and is `None` if the process has stopped in `fork_here`.
    fn from_loaded(
        setup: Arc<Setup>,
        layout: ExecArrays,
        loaded: LoadedTemplate,
        properties: Option<TemplateProperties>,
        first: &Instance,
    ) -> Self {
        let common = CommonSetup {
            thread_id_address: loaded.thread_id_address,
            robust_list: loaded.robust_list,
            channel: loaded.descriptor,
            launcher: setup.ends_with_launcher.then(|| u64::from(std::process::id())),
        };
        let stack_limit = getrlimit(Resource::RLIMIT_STACK).map_or(0, |(soft, _)| soft);
        Self {
            layout,
            setup,
            common,
            properties,
            written_strings: PlacedStrings::default(),
            string_memory: (loaded.block.strings_address(), TemplateBlock::strings_size()),
            inherited_map: None,
            inherited_mask: None,
            max_strings: (stack_limit / 4).clamp(MIN_STRINGS, MAX_STRINGS),
            cgroup: first.placement.cgroup.clone(),
            online_cpus: online_cpus(),
            has_streams: has_streams(loaded.child.pid),
            message: TemplateMessage::default(),
            unanswered: VecDeque::new(),
            results: VecDeque::new(),
            random: Vec::new(),
            loaded,
        }
    }

    /// Returns the process id of the template: the process from which further processes of the program are forked.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.loaded.child.pid
    }

    /// Returns whether the template still matches the file of its program: true as long as the file has not been
    /// changed or replaced since the template was loaded. Changes of libraries are not detected. For a template of
    /// [`Template::load_until_fork_here`], the file is not checked, and the result is always true.
    #[must_use]
    pub fn is_up_to_date(&self) -> bool {
        let Some(properties) = &self.properties else { return true };
        properties.is_current(&self.setup.program)
    }

    /// Makes an instance, which is a process of the program, as a fork of the template. The instance has the
    /// arguments, the environment variables and the placement in `instance`, and is a child of the calling process.
    ///
    /// The call fails if the affinity mask in `instance` has no online CPU, or if the preferred NUMA node does not
    /// exist. If the kernel rejects the mask or the node for another reason, the call succeeds, and the instance
    /// exits with status 125 before its program runs.
    ///
    /// # Errors
    /// - [`ForkError::Mismatch`] if the instance differs from the template in a fixed property, such as the cgroup.
    ///   The text of the error names the property.
    /// - [`ForkError::WriteForbidden`] if the instance has long arguments or variables, and the kernel forbids to write
    ///   them into the memory of the template.
    /// - [`ForkError::Ended`] if the process of the template has ended.
    /// - [`ForkError::Failed`] if the start of this instance failed. The template can make further instances.
    pub fn fork(&mut self, instance: &Instance) -> Result<Child, ForkError> {
        self.add_fork_to_message(instance)?;
        self.send()?;
        self.next_child()
    }

    /// Makes one process of the program for each element of `instances`, as [`Template::fork`] does. Calls
    /// `on_result` once for each element, with the started process or the error. This is faster than single calls of
    /// [`Template::fork`], because the template gets up to 16 requests in one message. The first messages contain
    /// fewer requests, so that the first processes run early.
    pub fn fork_all<'a>(
        &mut self,
        instances: impl IntoIterator<Item = &'a Instance>,
        mut on_result: impl FnMut(&'a Instance, Result<Child, ForkError>),
    ) {
        let mut added = VecDeque::new();
        let mut batch_size = 1;
        for instance in instances {
            match self.add_fork_to_message(instance) {
                Ok(()) => added.push_back(instance),
                Err(error) => on_result(instance, Err(error)),
            }
            if self.message.instance_count() >= batch_size {
                batch_size = (2 * batch_size).min(MAX_INSTANCES);
                // An error shows again when the results are received.
                let _ = self.send();
            }
            while self.unanswered.len() > 1 {
                let children = self.results.len() + self.unanswered.front().copied().unwrap_or(0);
                added.drain(..children).for_each(|earlier| on_result(earlier, self.next_child()));
            }
        }
        let _ = self.send();
        added.into_iter().for_each(|earlier| on_result(earlier, self.next_child()));
    }

    /// Adds the request to fork `instance` to the next message to the template. Sends the message first if it is full.
    fn add_fork_to_message(&mut self, instance: &Instance) -> Result<(), ForkError> {
        let mut own = self.instance_setup(instance)?;
        let strings = self.instance_strings(instance);
        self.check_fit(instance, &strings)?;
        if !self.message.has_room() || !own.streams.is_empty() && self.message.instance_count() > 0 {
            self.send()?;
        }
        if strings.size() > self.string_memory.1 {
            self.map_string_memory(2 * strings.size())?;
        }
        let placed = strings.place_at(self.string_memory.0);
        own.random = self.new_random_bytes();
        let changes = placed.changes(&self.written_strings, self.pointers_at());
        if TemplateMessage::can_copy(&changes) {
            changes.into_iter().for_each(|(address, bytes)| self.message.add_copy(address, bytes));
        } else {
            // This sends what the message has, so the calls for this instance are added afterwards.
            self.wait_until_idle()?;
            let written = write(&self.loaded.child, &changes);
            if !matches!(written, Ok(()) | Err(ForkError::WriteForbidden(_))) {
                // A part of the strings may have been written: the next instance writes all of its own.
                self.written_strings = PlacedStrings::default();
            }
            written?;
        }
        let map = self.memory_map_for(&placed);
        if let Some(map) = map.filter(|_| map != self.inherited_map) {
            self.message.add_memory_map(&map);
            self.inherited_map = Some(map);
        }
        self.message.add_instance(self.loaded.block, &self.common, own);
        self.written_strings = placed;
        Ok(())
    }

    /// Returns the arguments and environment variables of `instance`, a new process. For a script, the interpreter's
    /// arguments replace argument 0. For a template in `fork_here`, the variables of the context are left out: the
    /// program already has them.
    pub(super) fn instance_strings(&mut self, instance: &Instance) -> InstanceStrings {
        let (arguments, variables) = texts(&mut self.layout, instance);
        let interpreter = &self.loaded.interpreter;
        let given = arguments.iter().skip(usize::from(!interpreter.is_empty())).map(|text| text.to_bytes());
        let inherited_count = if self.properties.is_some() { 0 } else { self.setup.environment.len() };
        let variables = variables.iter().skip(inherited_count).map(|text| text.to_bytes());
        InstanceStrings::new(interpreter.iter().map(Vec::as_slice).chain(given), variables)
    }

    /// Sends the prepared message to the template. Does nothing if the message does not fork a process.
    pub(super) fn send(&mut self) -> Result<(), ForkError> {
        let message = mem::take(&mut self.message);
        let count = message.instance_count();
        if count == 0 {
            return Ok(());
        }
        let descriptors = message.descriptors.clone();
        let bytes = message.into_bytes(self.loaded.block);
        if bytes.is_none_or(|bytes| self.loaded.channel.send(&bytes, &descriptors).is_err()) {
            return Err(self.end());
        }
        self.unanswered.push_back(count);
        Ok(())
    }

    /// Ends the template after a message that can't be sent, because the results of later messages would be taken for
    /// those of this one, and after a result that is wrong. The results of earlier messages are kept.
    fn end(&mut self) -> ForkError {
        while self.receive().is_ok() {}
        let _ = self.loaded.child.send_signal(libc::SIGKILL);
        ForkError::Ended
    }

    /// Returns the oldest result that was not returned yet: a process that the template has forked, or an error.
    pub(super) fn next_child(&mut self) -> Result<Child, ForkError> {
        if self.results.is_empty() {
            self.receive()?;
        }
        match self.results.pop_front() {
            Some(pid @ 1..) => open_child(pid).map_err(|error| match error {
                ForkError::Ended => self.end(),
                error => error,
            }),
            Some(negative) => {
                let errno = Errno::from_raw(negative.saturating_neg());
                Err(SpawnError { step: SpawnStep::Clone, errno }.into())
            }
            None => Err(ForkError::Ended),
        }
    }

    /// Waits until the template has handled its oldest message.
    fn receive(&mut self) -> Result<(), ForkError> {
        let count = self.unanswered.pop_front().ok_or(ForkError::Ended)?;
        let reply = self.reply()?;
        self.results.extend(reply.pids.iter().take(count));
        Ok(())
    }

    fn reply(&self) -> Result<TemplateReply, ForkError> {
        self.loaded.channel.receive(&self.loaded.child, None).ok().flatten().ok_or(ForkError::Ended)
    }

    /// Sends the prepared message, and waits until the template has handled all messages.
    pub(super) fn wait_until_idle(&mut self) -> Result<(), ForkError> {
        self.send()?;
        while !self.unanswered.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    /// Returns the affinity mask, the NUMA node and the standard streams that the process `instance` sets for itself.
    pub(super) fn instance_setup(&self, instance: &Instance) -> Result<InstanceSetup, ForkError> {
        let invalid_placement = SpawnError { step: SpawnStep::Mask, errno: Errno::EINVAL };
        let Placement { cpus, preferred_numa_node, .. } = &*instance.placement;
        let mask = match cpus {
            Some(cpus) if self.inherited_mask.as_ref() == Some(cpus) => None,
            Some(cpus) if !cpus.intersects(&self.online_cpus) => return Err(invalid_placement.into()),
            Some(cpus) => Some(cpus.words().iter().flat_map(|word| word.to_ne_bytes()).collect()),
            None => None,
        };
        let nodes = match preferred_numa_node {
            Some(node) if !Path::new(&format!("/sys/devices/system/node/node{node}")).exists() => {
                return Err(invalid_placement.into());
            }
            Some(node) => Some(MemoryPolicy::prefer_node(*node).map_err(|_| invalid_placement)?.node_mask()),
            None => None,
        };
        let Stdio { input, output, error } = &instance.stdio;
        let streams = (0..).zip([input, output, error]);
        let streams = streams.filter_map(|(number, stream)| Some((number, stream.as_ref()?.as_raw_fd())));
        Ok(InstanceSetup { mask, nodes, streams: streams.collect(), ..InstanceSetup::default() })
    }

    /// Returns the memory map of a process with the strings `placed`. `None` if the map of the template is unknown.
    pub(super) fn memory_map_for(&self, placed: &PlacedStrings) -> Option<MemoryMap> {
        let map = self.loaded.memory_map?;
        let variables =
            if self.properties.is_some() { placed.variable_range() } else { map.env_start..map.env_end };
        Some(map.with_strings(placed.argument_range(), variables))
    }

    /// Returns the address, in the memory of the template, of the pointers to the arguments and environment variables.
    pub(super) fn pointers_at(&self) -> u64 {
        self.loaded.stack.address + 8
    }

    /// Returns random bytes for a new process, and their address (`AT_RANDOM`). `None` for a template in `fork_here`.
    pub(super) fn new_random_bytes(&mut self) -> Option<(u64, Vec<u8>)> {
        let address = self.loaded.stack.auxiliary_value(libc::AT_RANDOM)?;
        if self.random.len() < RANDOM_SIZE {
            self.random.resize(RANDOM_SIZE * RANDOM_COUNT, 0);
            // SAFETY: the kernel writes at most the bytes of the buffer.
            unsafe { libc::getrandom(self.random.as_mut_ptr().cast(), self.random.len(), 0) };
        }
        Some((address, self.random.split_off(self.random.len() - RANDOM_SIZE)))
    }

    /// Checks whether a process for `instance` can be forked from this template. The properties that can't be changed
    /// after the template was loaded must be equal, and `strings` must not exceed the limits of execve(2).
    pub(super) fn check_fit(&self, instance: &Instance, strings: &InstanceStrings) -> Result<(), ForkError> {
        match &self.properties {
            Some(properties) => properties.check(strings, &self.loaded.stack)?,
            None if strings.pointer_count() > MAX_POINTERS => {
                return Err(ForkError::Mismatch("number of pointers"));
            }
            None => {}
        }
        if self.cgroup.as_ref().map(AsRawFd::as_raw_fd) != cgroup(&instance.placement) {
            return Err(ForkError::Mismatch("cgroup"));
        }
        let Stdio { input, output, error } = &instance.stdio;
        if !self.has_streams && [input, output, error].iter().any(|stream| stream.is_some()) {
            return Err(ForkError::Mismatch("set of open streams"));
        }
        let pointers = 8 * strings.pointer_count() as u64;
        if strings.size() + pointers > self.max_strings || strings.longest() > MAX_STRING {
            return Err(SpawnError { step: SpawnStep::Exec, errno: Errno::E2BIG }.into());
        }
        Ok(())
    }

    /// Makes the template map `size` bytes for strings. The old memory stays: it is less than half as large.
    fn map_string_memory(&mut self, size: u64) -> Result<(), ForkError> {
        self.wait_until_idle()?;
        let size = size.next_multiple_of(4096);
        let bytes =
            TemplateMessage::for_memory_mapping(size).into_bytes(self.loaded.block).unwrap_or_default();
        self.loaded.channel.send(&bytes, &[]).map_err(|_| ForkError::Ended)?;
        let no_memory = SpawnError { step: SpawnStep::Exec, errno: Errno::ENOMEM };
        self.string_memory = (u64::try_from(self.reply()?.result).map_err(|_| no_memory)?, size);
        Ok(())
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        self.loaded.child.kill_and_wait();
        // An instance first requests to be killed with this thread, which may end next, and then closes its channel.
        if self.common.launcher.is_some() {
            self.loaded.channel.wait_closed();
        }
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").field("loaded", &self.loaded).finish_non_exhaustive()
    }
}

/// Returns the arguments and the variables of an instance.
fn texts<'a>(layout: &'a mut ExecArrays, instance: &'a Instance) -> (Vec<&'a CStr>, Vec<&'a CStr>) {
    let (arguments, variables) = layout.fill(instance);
    // SAFETY: both arrays end with a null pointer. They and their texts live as long as the layout and the instance are
    // borrowed; the texts of the context live as long as the layout, by the condition of `ExecArrays::new`.
    unsafe { (c_strings(arguments), c_strings(variables)) }
}

/// Returns the C strings of `array`, a list of pointers.
///
/// # Safety
/// `array` must end with a null pointer, and each string with a NUL byte. All must live for `'a`.
unsafe fn c_strings<'a>(mut array: *const *const c_char) -> Vec<&'a CStr> {
    let mut texts = Vec::new();
    // SAFETY: guaranteed by the caller.
    unsafe {
        while !(*array).is_null() {
            texts.push(CStr::from_ptr(*array));
            array = array.add(1);
        }
    }
    texts
}

fn cgroup(placement: &Placement) -> Option<RawFd> {
    placement.cgroup.as_ref().map(|directory| directory.as_raw_fd())
}
