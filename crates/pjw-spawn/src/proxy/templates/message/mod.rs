//! The message to a template that makes it fork instances: system calls, and the bytes to which their arguments point.
//! A pure computation.

pub(super) mod addresses;
pub(super) mod block;
pub(super) mod strings;
pub(super) mod stub;

use std::mem;
use std::os::fd::RawFd;

use self::block::{MAX_MESSAGE, MemoryMap, TemplateBlock};
use self::stub::{
    BEGIN_PROGRAM, COPY_BYTES, EXPECT_RESULT, FORK_PROCESS, IGNORE_ERROR, INDIRECT_DESCRIPTOR, LAST_CALL,
    MAX_INSTANCES, TemplateCall, WAIT_FOR_MESSAGE,
};
use super::load::flag_argument;
use super::load::tracee::bytes_of;

/// `PR_SET_MM_MAP` of prctl(2), which libc has for some targets only.
const PR_SET_MM_MAP: i32 = 14;

/// The most bytes of a message that one instance needs: its copied strings, its mask, its nodes, and their calls. A
/// further instance is added to a message only if so many bytes are free.
const MAX_INSTANCE_BYTES: usize = 4096;
/// The most bytes of a message that copy the strings of one instance, with their calls.
const MAX_COPIES: usize = 1024;

/// A message to a template (a process from which further processes, the instances, are forked). Contains the system
/// calls that the template and its new instances execute, and the file descriptors that are sent with the message.
#[derive(Debug, Default)]
pub(super) struct TemplateMessage {
    template: CallList,
    instances: Vec<CallList>,
    pub(super) descriptors: Vec<RawFd>,
}

/// The system calls that one process executes in order, with the data to which their arguments point.
#[derive(Debug, Default)]
struct CallList {
    calls: Vec<TemplateCall>,
    /// The bytes to which an argument points, with the index of the call and the index of this argument.
    data: Vec<(Vec<u8>, usize, usize)>,
}

/// The parameters of the system calls that a new instance (a process that is forked from a template) executes before
/// its program begins. This type contains the parameters that are the same for all instances of the template.
#[derive(Debug, Clone, Copy)]
pub(super) struct CommonSetup {
    /// The address at which the C library keeps the thread id.
    pub(super) thread_id_address: Option<u64>,
    /// The address and the length of the list of robust futexes, set_robust_list(2). A forked process does not inherit
    /// it.
    pub(super) robust_list: (u64, u64),
    /// The number of the descriptor by which the template receives messages.
    pub(super) channel: u64,
    /// The process id of the process that started the template, if the kernel is to kill the instance at its end.
    /// Otherwise `None`.
    pub(super) launcher: Option<u64>,
}

/// The parameters of the system calls that a new instance (a process that is forked from a template) executes before
/// its program begins. This type contains the parameters of one instance.
#[derive(Debug, Default)]
pub(super) struct InstanceSetup {
    /// The affinity mask of the instance. `None` if the instance inherits the right mask.
    pub(super) mask: Option<Vec<u8>>,
    /// The set with the preferred NUMA node of the instance, and the length of the set in bits. `None` if the instance
    /// inherits the memory policy.
    pub(super) nodes: Option<(Vec<u8>, u64)>,
    /// The standard streams that the instance does not inherit: the number of each stream, and its new descriptor.
    pub(super) streams: Vec<(u64, RawFd)>,
    /// The bytes of the map for `PR_SET_MM_MAP`, unless the process has inherited it.
    pub(super) memory_map: Option<Vec<u8>>,
    /// The address of the bytes of `AT_RANDOM` (getauxval(3)), and the new bytes. The instance writes them itself,
    /// because it writes to this page of its stack anyway.
    pub(super) random: Option<(u64, Vec<u8>)>,
}

impl TemplateMessage {
    /// Returns a message that makes the template map `size` bytes of anonymous memory.
    pub(super) fn for_memory_mapping(size: u64) -> Self {
        let mut message = Self::default();
        let protection = flag_argument(libc::PROT_READ | libc::PROT_WRITE);
        let private = flag_argument(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        message.template.add(libc::SYS_mmap, &[0, size, protection, private, u64::MAX, 0], 0);
        message
    }

    /// Returns the number of instances (processes) that the template forks for this message.
    pub(super) fn instance_count(&self) -> usize {
        self.instances.len()
    }

    /// Returns whether one more instance (a process that the template forks) can be added to the message. False if the
    /// message contains too many instances or bytes already. Also false if the message contains file descriptors,
    /// because a further instance would inherit them.
    pub(super) fn has_room(&self) -> bool {
        self.instances.len() < MAX_INSTANCES
            && self.descriptors.is_empty()
            && self.size() <= MAX_MESSAGE - MAX_INSTANCE_BYTES
    }

    /// Returns whether a message has room for copies of `changes`, each an address and the bytes there, for one
    /// process. Otherwise they are written directly into the memory of the template by process_vm_writev(2).
    pub(super) fn can_copy(changes: &[(u64, Vec<u8>)]) -> bool {
        let size = |bytes: &Vec<u8>| size_of::<TemplateCall>() + bytes.len().next_multiple_of(8);
        changes.iter().map(|(_, bytes)| size(bytes)).sum::<usize>() <= MAX_COPIES
    }

    /// Adds an operation to the message: the template copies `bytes` to `address` in its own memory.
    pub(super) fn add_copy(&mut self, address: u64, bytes: Vec<u8>) {
        let length = bytes.len() as u64;
        self.template.add_with_data(0, &[address, 0, length], COPY_BYTES, bytes, 1);
    }

    /// Adds an operation to the message: the template sets its memory map to `map` (`PR_SET_MM_MAP`). Processes that
    /// are forked later inherit the map.
    pub(super) fn add_memory_map(&mut self, map: &MemoryMap) {
        self.template.add_memory_map(bytes_of(map).to_vec());
    }

    /// Adds the fork of an instance (a process of the program) to the message. `block` is the memory in which the
    /// template receives messages. `common` has the parameters that all instances have in common, and `own` the
    /// parameters of this instance.
    pub(super) fn add_instance(&mut self, block: TemplateBlock, common: &CommonSetup, own: InstanceSetup) {
        self.add_fork(block, common);
        // The template keeps no end of an instance's pipe.
        for (index, _) in (0..).zip(&own.streams) {
            self.template.add(
                libc::SYS_close,
                &[block.descriptor_address(index)],
                INDIRECT_DESCRIPTOR | IGNORE_ERROR,
            );
        }
        let mut calls = CallList::default();
        calls.add_stream_calls(block, &own.streams);
        self.descriptors.extend(own.streams.iter().map(|(_, descriptor)| *descriptor));
        calls.add_program_start(common, own);
        self.instances.push(calls);
    }

    /// Adds an operation to the message: the template forks a spare. A spare is a process that waits for a message to
    /// itself ([`TemplateMessage::make_message_to_spare`]), which turns the spare into an instance. `channel` is the
    /// descriptor of the socket by which the spare receives this message. `block` is the memory in which the template
    /// receives messages. `common` has the parameters that all instances have in common.
    pub(super) fn add_spare(&mut self, block: TemplateBlock, common: &CommonSetup, channel: RawFd) {
        self.add_fork(block, common);
        let received = block.descriptor_address(self.descriptors.len() as u64);
        self.descriptors.push(channel);
        self.template.add(libc::SYS_close, &[received], INDIRECT_DESCRIPTOR | IGNORE_ERROR);
        let mut calls = CallList::default();
        calls.add(
            libc::SYS_dup2,
            &[received, common.channel, 0, 0, 0, common.channel],
            INDIRECT_DESCRIPTOR | EXPECT_RESULT,
        );
        calls.add(libc::SYS_close, &[received], INDIRECT_DESCRIPTOR | IGNORE_ERROR);
        calls.calls.push(TemplateCall { flags: WAIT_FOR_MESSAGE, ..TemplateCall::default() });
        self.instances.push(calls);
    }

    /// Makes this a message to a spare. A spare is a stopped process that this message turns into an instance: it then
    /// begins its program. `block` is the memory in which the spare receives messages. `common` has the parameters of
    /// all instances, and `own` those of this instance. A spare sends no reply.
    pub(super) fn make_message_to_spare(
        &mut self,
        block: TemplateBlock,
        common: &CommonSetup,
        own: InstanceSetup,
    ) {
        let mut calls = mem::take(&mut self.template);
        calls.add_stream_calls(block, &own.streams);
        self.descriptors.extend(own.streams.iter().map(|(_, descriptor)| *descriptor));
        calls.add_program_start(common, own);
        self.template = calls;
    }

    /// Adds the call of clone(2) by which the template forks one process, the next element of `instances`. The
    /// template stores the process id of the new process, or the negative errno, in `block`: see
    /// [`TemplateBlock::pid_address`].
    fn add_fork(&mut self, block: TemplateBlock, common: &CommonSetup) {
        let mut flags = flag_argument(libc::CLONE_PARENT | libc::SIGCHLD);
        if common.thread_id_address.is_some() {
            flags |= flag_argument(libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID);
        }
        let result = block.pid_address(self.instances.len());
        self.template.add(
            libc::SYS_clone,
            &[flags, 0, 0, common.thread_id_address.unwrap_or(0), result],
            FORK_PROCESS,
        );
    }

    fn size(&self) -> usize {
        self.template.size() + self.instances.iter().map(CallList::size).sum::<usize>()
    }

    /// Returns the bytes of the message: the system calls of the template, then those of each new instance. Each list
    /// of system calls is followed by the data for their arguments. `block` is the memory in which the template
    /// receives the message. `None` if the message is larger than [`MAX_MESSAGE`].
    pub(super) fn into_bytes(mut self, block: TemplateBlock) -> Option<Vec<u8>> {
        if let Some(last) = self.template.calls.last_mut() {
            last.flags |= LAST_CALL;
        }
        let mut at = block.message_address() + self.template.size() as u64;
        let forks = self.template.calls.iter_mut().filter(|call| call.flags & FORK_PROCESS != 0);
        for (fork, instance) in forks.zip(&self.instances) {
            fork.arguments[5] = at;
            at += instance.size() as u64;
        }
        let mut bytes = Vec::new();
        for list in std::iter::once(self.template).chain(self.instances) {
            list.append_to(&mut bytes, block.message_address());
        }
        (bytes.len() <= MAX_MESSAGE).then_some(bytes)
    }
}

impl CallList {
    /// Adds the system call `number` with `arguments`. All further arguments are 0.
    fn add(&mut self, number: i64, arguments: &[u64], flags: u64) {
        let mut padded = [0; 6];
        padded[..arguments.len()].copy_from_slice(arguments);
        self.calls.push(TemplateCall { number, arguments: padded, flags });
    }

    /// Adds a call whose argument with the index `index` is the address of `data`.
    fn add_with_data(&mut self, number: i64, arguments: &[u64], flags: u64, data: Vec<u8>, index: usize) {
        self.data.push((data, self.calls.len(), index));
        self.add(number, arguments, flags);
    }

    fn size(&self) -> usize {
        let data_sizes = self.data.iter().map(|(data, ..)| data.len().next_multiple_of(8));
        size_of_val(self.calls.as_slice()) + data_sizes.sum::<usize>()
    }

    /// Appends the calls and then their data to `bytes`, the earlier part of a message. A process receives the message
    /// at the address `message_at`. So the arguments that stand for data become addresses in the received message.
    fn append_to(mut self, bytes: &mut Vec<u8>, message_at: u64) {
        let mut data_at = message_at + (bytes.len() + size_of_val(self.calls.as_slice())) as u64;
        for (data, call, argument) in &self.data {
            self.calls[*call].arguments[*argument] = data_at;
            data_at += data.len().next_multiple_of(8) as u64;
        }
        self.calls.iter().for_each(|call| bytes.extend_from_slice(bytes_of(call)));
        for (data, ..) in &self.data {
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
    }

    /// Adds the calls by which a process makes the received descriptors its standard streams. Each element of `streams`
    /// begins with the number of a stream.
    fn add_stream_calls(&mut self, block: TemplateBlock, streams: &[(u64, RawFd)]) {
        for (index, (stream, _)) in (0..).zip(streams) {
            let arguments = [block.descriptor_address(index), *stream, 0, 0, 0, *stream];
            self.add(libc::SYS_dup2, &arguments, INDIRECT_DESCRIPTOR | EXPECT_RESULT);
        }
        for (index, _) in (0..).zip(streams) {
            self.add(libc::SYS_close, &[block.descriptor_address(index)], INDIRECT_DESCRIPTOR | IGNORE_ERROR);
        }
    }

    fn add_memory_map(&mut self, map: Vec<u8>) {
        let arguments = [flag_argument(libc::PR_SET_MM), flag_argument(PR_SET_MM_MAP), 0, map.len() as u64];
        self.add_with_data(libc::SYS_prctl, &arguments, IGNORE_ERROR, map, 2);
    }

    /// Adds the calls that a new instance makes for itself, such as the call for its affinity mask, and then the
    /// operation that begins its program. `common` has the parameters of all instances, and `own` those of this
    /// instance.
    fn add_program_start(&mut self, common: &CommonSetup, own: InstanceSetup) {
        if let Some((address, bytes)) = own.random {
            let length = bytes.len() as u64;
            self.add_with_data(0, &[address, 0, length], COPY_BYTES, bytes, 1);
        }
        if let Some(mask) = own.mask {
            self.add_with_data(libc::SYS_sched_setaffinity, &[0, mask.len() as u64], EXPECT_RESULT, mask, 2);
        }
        if let Some((nodes, bits)) = own.nodes {
            let arguments = [flag_argument(libc::MPOL_PREFERRED), 0, bits];
            self.add_with_data(libc::SYS_set_mempolicy, &arguments, EXPECT_RESULT, nodes, 1);
        }
        if let Some(map) = own.memory_map {
            self.add_memory_map(map);
        }
        let (head, length) = common.robust_list;
        if head != 0 {
            self.add(libc::SYS_set_robust_list, &[head, length], IGNORE_ERROR);
        }
        if let Some(launcher) = common.launcher {
            let arguments = [flag_argument(libc::PR_SET_PDEATHSIG), flag_argument(libc::SIGKILL), 0, 0, 0, 0];
            self.add(libc::SYS_prctl, &arguments, EXPECT_RESULT);
            // If the launcher has ended before, the instance has another parent.
            self.add(libc::SYS_getppid, &[0, 0, 0, 0, 0, launcher], EXPECT_RESULT);
        }
        self.add(libc::SYS_close, &[common.channel], IGNORE_ERROR);
        self.calls.push(TemplateCall { flags: BEGIN_PROGRAM, ..TemplateCall::default() });
    }
}
