//! The affinity mask and the memory policy of the calling thread. A new process inherits both.

use std::ptr;

use nix::errno::Errno;
use pjw_core::cpuset::{CpuSet, Pu};

use crate::bare;

/// The size of the first buffer for a mask in words: 8,192 PUs, the largest `NR_CPUS`. If the kernel has longer masks,
/// the buffer is enlarged.
const MASK_WORDS: usize = 128;
/// The size of the largest buffer for a mask in words.
const MAX_MASK_WORDS: usize = (Pu::MAX.0 as usize + 1) / 64;
/// The most NUMA nodes of a kernel: `NODES_SHIFT` is at most 10.
const MAX_NODES: usize = 1024;
/// `MPOL_PREFERRED`, set_mempolicy(2).
const MPOL_PREFERRED: i32 = 1;
/// `MPOL_F_MEMS_ALLOWED`, get_mempolicy(2).
const MPOL_F_MEMS_ALLOWED: usize = 1 << 2;

/// The NUMA memory policy of a thread: a mode and a set of NUMA nodes, set_mempolicy(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryPolicy {
    mode: i32,
    nodes: [u64; MAX_NODES / 64],
}

/// Returns the affinity mask of the calling thread, sched_getaffinity(2): the online PUs (logical CPUs) on which the
/// kernel may run the thread.
pub(crate) fn own_mask() -> Result<CpuSet, Errno> {
    let mut words = vec![0_u64; MASK_WORDS];
    loop {
        let bytes = size_of_val(&words[..]);
        // SAFETY: the kernel writes at most `bytes` bytes into `words`, which is that long. 0 is the calling thread.
        let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, bytes, words.as_mut_ptr()) };
        match Errno::result(written) {
            Err(Errno::EINVAL) if words.len() < MAX_MASK_WORDS => words.resize(words.len() * 2, 0),
            Err(errno) => return Err(errno),
            Ok(written) => {
                let written = usize::try_from(written).unwrap_or(0).div_ceil(8).min(words.len());
                return Ok(CpuSet::from_words(&words[..written]));
            }
        }
    }
}

/// Sets the affinity mask of the calling thread to `cpus`. Returns the error of sched_setaffinity(2).
pub(crate) fn set_own_mask(cpus: &CpuSet) -> Result<(), Errno> {
    let words = cpus.words();
    // SAFETY: the kernel reads `words`, which has the length that is given. 0 is the calling thread.
    let set = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size_of_val(words), words.as_ptr()) };
    Errno::result(set).map(drop)
}

/// Returns the numbers of the NUMA nodes from which the calling thread can have memory: the nodes of its cpuset that
/// have memory. `None` if get_mempolicy(2) fails, for example because the kernel does not support NUMA.
pub(crate) fn own_memory_nodes() -> Option<CpuSet> {
    let mut nodes = [0_u64; MAX_NODES / 64];
    let no_mode = ptr::null_mut::<i32>();
    // SAFETY: the kernel writes at most MAX_NODES bits, which `nodes` has room for.
    let read = unsafe {
        let (bits, flags) = (nodes.as_mut_ptr(), MPOL_F_MEMS_ALLOWED);
        libc::syscall(libc::SYS_get_mempolicy, no_mode, bits, MAX_NODES, 0_usize, flags)
    };
    Errno::result(read).ok().map(|_| CpuSet::from_words(&nodes))
}

impl MemoryPolicy {
    /// Returns the memory policy that prefers the memory of the NUMA node with the number `node` (`MPOL_PREFERRED`).
    ///
    /// # Errors
    /// `EINVAL` if no NUMA node can have this number: the largest number is 1023.
    pub(crate) fn prefer_node(node: u32) -> Result<Self, Errno> {
        let node = usize::try_from(node).map_err(|_| Errno::EINVAL)?;
        let mut nodes = [0; MAX_NODES / 64];
        *nodes.get_mut(node / 64).ok_or(Errno::EINVAL)? |= 1 << (node % 64);
        Ok(Self { mode: MPOL_PREFERRED, nodes })
    }

    /// Returns the memory policy of the calling thread, get_mempolicy(2). `None` if the system call fails, for example
    /// because the kernel does not support NUMA.
    pub(crate) fn of_calling_thread() -> Option<Self> {
        let mut policy = Self { mode: 0, nodes: [0; MAX_NODES / 64] };
        let (mode, nodes) = (&raw mut policy.mode, policy.nodes.as_mut_ptr());
        // SAFETY: the kernel writes one int, and at most MAX_NODES bits, which `nodes` has room for.
        let read = unsafe { libc::syscall(libc::SYS_get_mempolicy, mode, nodes, MAX_NODES, 0_usize, 0) };
        Errno::result(read).ok().map(|_| policy)
    }

    /// Returns the set of NUMA nodes in the form that set_mempolicy(2) takes: the bytes of the bit mask, and the number
    /// of bits in the mask.
    pub(crate) fn node_mask(&self) -> (Vec<u8>, u64) {
        (self.nodes.iter().flat_map(|word| word.to_ne_bytes()).collect(), MAX_NODES as u64)
    }

    /// Makes this policy the memory policy of the calling thread. Does not change the variable `errno` of the C
    /// library.
    pub(crate) fn set_for_calling_thread(&self) -> Result<(), Errno> {
        // The kernel reads one bit less than the number that it is given: get_nodes() in mm/mempolicy.c, Linux 6.18.
        let arguments = [self.mode.into(), bare::address(self.nodes.as_ptr()), MAX_NODES as i64, 0, 0];
        // SAFETY: the kernel reads at most MAX_NODES bits of `nodes`.
        let set = unsafe { bare::raw_syscall(libc::SYS_set_mempolicy, arguments) };
        set.map(drop).map_err(Errno::from_raw)
    }
}
