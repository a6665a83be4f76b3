//! The NUMA nodes of pages of a process: move_pages(2), which moves nothing here.

use std::ptr;

use nix::errno::Errno;
use pjw_core::ids::Pid;

/// Looks up on which NUMA nodes the pages of the process `pid` at `addresses` are. Returns the kernel's number of the
/// node for each of the `addresses`, in the same order. `None` stands for a page that is not in memory, for the page of
/// zeros that the kernel shares until the first write, and for an address that the process does not map.
///
/// No page is moved, and none is read into memory. The kernel takes 0.2 to 0.5 us for each address. The call blocks
/// while another thread holds the lock of the address space (`mmap_lock`).
///
/// # Errors
/// `ESRCH` if the process has ended. `EPERM` if this user has no permission to read the memory of the process
/// (ptrace(2)), or a container forbids the call. `EINVAL` if the process has no memory, such as a zombie. `ENOSYS` if
/// the kernel has no NUMA support.
pub fn page_nodes(pid: Pid, addresses: &[u64]) -> Result<Vec<Option<u32>>, Errno> {
    let pid = libc::pid_t::try_from(pid.0).map_err(|_| Errno::ESRCH)?;
    // Addresses that this kernel can't have are not mapped, like address 0.
    let pages: Vec<usize> =
        addresses.iter().map(|&address| usize::try_from(address).unwrap_or_default()).collect();
    let mut statuses: Vec<libc::c_int> = vec![-libc::ENOENT; pages.len()];
    let no_targets = ptr::null::<libc::c_int>();
    // SAFETY: the kernel reads `pages.len()` words from `pages`, and writes as many numbers to `statuses`. Both are so
    // long, and outlive the call. Without a list of target nodes, the call changes nothing else.
    let done = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid,
            pages.len(),
            pages.as_ptr(),
            no_targets,
            statuses.as_mut_ptr(),
            0,
        )
    };
    Errno::result(done)?;
    // A negative status is an error number.
    Ok(statuses.into_iter().map(|status| u32::try_from(status).ok()).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const PAGE: usize = 4096;

    /// Looks up pages of this process. `None` if that is not possible here.
    fn own_page_nodes(addresses: &[u64]) -> Option<Vec<Option<u32>>> {
        match page_nodes(Pid(std::process::id()), addresses) {
            Err(Errno::ENOSYS | Errno::EPERM) => {
                println!(
                    "skipped: this kernel has no move_pages, or it is forbidden here, as in a container"
                );
                None
            }
            nodes => Some(nodes.unwrap()),
        }
    }

    #[test]
    fn pages_that_were_written_are_on_a_node_of_the_machine() {
        let buffer = vec![7_u8; 100 * PAGE];
        let addresses: Vec<u64> = buffer.chunks(PAGE).map(|page| page.as_ptr().addr() as u64).collect();
        let Some(nodes) = own_page_nodes(&addresses) else { return };
        assert_eq!(nodes.len(), 100);
        for node in nodes {
            let node = node.expect("the page is in memory");
            assert!(Path::new(&format!("/sys/devices/system/node/node{node}")).exists(), "node {node}");
        }
        assert!(buffer.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn pages_that_were_never_used_are_on_no_node() {
        // Only the beginning is in memory: the allocator has its size there, and a huge page may contain it.
        let buffer: Vec<u8> = Vec::with_capacity(64 << 20);
        let middle = buffer.as_ptr().addr() as u64 + (32 << 20);
        let Some(nodes) = own_page_nodes(&[middle, middle + (16 << 20), 0]) else { return };
        assert_eq!(nodes, [None; 3]);
        assert_eq!(own_page_nodes(&[]), Some(Vec::new()));
    }

    #[test]
    fn a_process_that_has_ended_is_gone() {
        if own_page_nodes(&[0]).is_none() {
            return;
        }
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Pid(child.id());
        child.wait().unwrap();
        assert_eq!(page_nodes(ended, &[0]), Err(Errno::ESRCH));
        assert_eq!(page_nodes(Pid(u32::MAX), &[0]), Err(Errno::ESRCH));
    }
}
