//! Copies the files of a program into a tmpfs on one NUMA node, and mounts the copies over the files in the mount
//! namespace of the calling thread.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use nix::errno::Errno;
use pjw_core::ids::Pid;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree,
    unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use thiserror::Error;

use crate::tasks::descriptors::{close_descriptor_range, unshare_descriptor_table};

/// The directory at which the tmpfs with the copies is attached, while each copy is mounted over its original. No
/// file of a program lies below this directory. Only the calling thread sees the tmpfs there.
const ATTACHED_AT: &str = "/proc";
/// The memory in bytes that a tmpfs needs for each file, beside the pages of the file.
const BYTES_PER_FILE: u64 = 4096;
/// The copies on a NUMA node take at most the free memory of the node divided by this number.
const PARTS_OF_FREE: u64 = 4;
/// The first descriptor after those of the standard streams.
const FIRST_AFTER_STREAMS: RawFd = 3;

/// The files of a program, and the NUMA nodes to which they are copied. Processes of the program on these nodes then
/// read the files from local memory. `Display` shows the memory of the copies, such as `2 x 20 MB` for two NUMA
/// nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replicas {
    files: Vec<(PathBuf, u64)>,
    nodes: BTreeSet<u32>,
}

/// Error: the files of a program can't be copied to NUMA nodes, or the copies can't be mounted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReplicaError {
    /// The caller may not create a mount namespace: this needs `CAP_SYS_ADMIN`.
    #[error(
        "replicas need a mount namespace, which may be made only with CAP_SYS_ADMIN: run as root, in a user namespace \
         (unshare -Ur), or without replicas"
    )]
    NotPermitted,
    /// The copies would take more than a quarter of the free memory of a NUMA node.
    #[error(
        "replicas would take {} MB on NUMA node {node}, and at most {} MB are allowed, a quarter of its free memory: \
         run without replicas",
        megabytes(*needed), most / 1_000_000
    )]
    NotEnoughMemory {
        /// The number of the NUMA node.
        node: u32,
        /// The number of bytes that the copies need on this NUMA node.
        needed: u64,
        /// The number of bytes that the copies may take on this NUMA node: a quarter of its free memory.
        most: u64,
    },
    /// A system call has failed.
    #[error("no replica of {}: {step}: {}; {}", path.display(), errno.desc(), remedy(step, *errno))]
    Failed {
        /// The path of the file that is copied, or of the mount point.
        path: PathBuf,
        /// The operation that failed, such as `open` or `move_mount`.
        step: &'static str,
        /// The error number of the system call.
        errno: Errno,
    },
}

impl Replicas {
    /// Selects the files to copy to the NUMA nodes with the numbers in `nodes`: the files that the process `pid` has
    /// mapped into its memory now. Copies nothing yet.
    ///
    /// `pid` can be a [template](crate::proxy::Template), a process of the program that is stopped before `main`. The
    /// files are then the program and the libraries with which it is linked. Libraries that the program loads later
    /// by dlopen(3) are not among them.
    ///
    /// # Errors
    /// If the memory map of the process can't be read.
    pub fn of_process(pid: Pid, nodes: impl IntoIterator<Item = u32>) -> Result<Self, ReplicaError> {
        let maps = PathBuf::from(format!("/proc/{pid}/maps"));
        let text = fs::read_to_string(&maps).map_err(failed(&maps, "read"))?;
        let regular_file = |path: &str| {
            let file = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
            Some((PathBuf::from(path), file.len()))
        };
        let files = mapped_files(&text).into_iter().filter_map(regular_file).collect();
        Ok(Self { files, nodes: nodes.into_iter().collect() })
    }

    /// Returns the number of bytes of memory that the copies of the files occupy on each NUMA node.
    #[must_use]
    pub fn bytes_per_node(&self) -> u64 {
        self.files.iter().map(|(_, size)| size.next_multiple_of(4096) + BYTES_PER_FILE).sum()
    }

    /// Returns the number of bytes of memory that the copies of the files occupy on all NUMA nodes together.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.bytes_per_node() * self.nodes.len() as u64
    }

    /// Returns the number of files of the program that are copied to each NUMA node.
    #[must_use]
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Checks on each NUMA node that the copies in `replicas` together need at most a quarter of the free memory.
    /// `replicas` contains one value for each program whose files are copied. Memory that caches files counts as free.
    ///
    /// # Errors
    /// [`ReplicaError::NotEnoughMemory`] if the copies need more than a quarter on a node. [`ReplicaError::Failed`] if
    /// the free memory of a node can't be read.
    pub fn check_free_memory<'a>(replicas: impl IntoIterator<Item = &'a Self>) -> Result<(), ReplicaError> {
        let mut needed_per_node = BTreeMap::new();
        for program in replicas {
            let bytes = program.bytes_per_node();
            program.nodes.iter().for_each(|node| *needed_per_node.entry(*node).or_insert(0) += bytes);
        }
        for (node, needed) in needed_per_node {
            let path = PathBuf::from(format!("/sys/devices/system/node/node{node}/meminfo"));
            let text = fs::read_to_string(&path).map_err(failed(&path, "read"))?;
            let most = free_bytes(&text) / PARTS_OF_FREE;
            if needed > most {
                return Err(ReplicaError::NotEnoughMemory { node, needed, most });
            }
        }
        Ok(())
    }

    /// Copies the files into the memory of the NUMA node `node`, and moves the calling thread into a new mount
    /// namespace, where the copies are mounted over the files. The thread stays in this namespace. The processes that
    /// the thread starts afterwards are also in this namespace and use the copies.
    ///
    /// The caller needs `CAP_SYS_ADMIN`. [`SpawnContext::start`](crate::SpawnContext::start) calls this function in
    /// each thread that starts processes for a NUMA node, if
    /// [`SpawnContext::set_replicas`](crate::SpawnContext::set_replicas) was called.
    ///
    /// # Errors
    /// [`ReplicaError::NotPermitted`] without `CAP_SYS_ADMIN`. [`ReplicaError::Failed`] if a step fails. The thread
    /// may then be in a namespace with only some of the copies, and must not start processes.
    pub fn enter_namespace_with_copies(&self, node: u32) -> Result<(), ReplicaError> {
        let root = Path::new("/");
        // SAFETY: the descriptors of the thread stay those of the process.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(|error| match error {
            rustix::io::Errno::PERM => ReplicaError::NotPermitted,
            error => failed(root, "unshare")(error),
        })?;
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change(root, private).map_err(failed(root, "make private"))?;
        let mount = self.make_tmpfs(node)?;
        self.copy_files(mount.as_fd())?;
        // A file of a mount that is attached nowhere can be mounted since Linux 6.15 only.
        let attached = Path::new(ATTACHED_AT);
        move_mount(mount.as_fd(), "", CWD, attached, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(failed(attached, "move_mount"))?;
        for (number, (path, _)) in self.files.iter().enumerate() {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let tree = open_tree(mount.as_fd(), number.to_string(), flags);
            let tree = tree.map_err(failed(path, "open_tree"))?;
            move_mount(tree.as_fd(), "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
                .map_err(failed(path, "move_mount"))?;
        }
        unmount(attached, UnmountFlags::DETACH).map_err(failed(attached, "umount"))
    }

    /// Copies the files into the directory `to`. A new thread with a table of descriptors of its own writes the
    /// copies.
    ///
    /// The table must be the thread's own because of execve(2), which fails with `ETXTBSY` for a file that is open
    /// for writing. In a common table, a process that another thread forks meanwhile would inherit the open copy.
    ///
    /// At its start, the table of the new thread has all descriptors of this process. The thread closes them,
    /// except `to` and the standard streams. Otherwise a pipe that this process closes meanwhile would stay open.
    fn copy_files(&self, to: BorrowedFd<'_>) -> Result<(), ReplicaError> {
        let root = Path::new("/");
        let copy_all = || -> Result<(), ReplicaError> {
            unshare_descriptor_table().map_err(failed(root, "unshare"))?;
            close_other_descriptors(to.as_raw_fd());
            self.files.iter().enumerate().try_for_each(|(number, (path, _))| copy(path, to, number))
        };
        thread::scope(|scope| {
            let writer = thread::Builder::new().spawn_scoped(scope, copy_all);
            let writer = writer.map_err(failed(root, "start a thread"))?;
            writer.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Makes a tmpfs whose memory is on the NUMA node `node`, with room for one copy of each file. Returns a descriptor
    /// of the mount, which is not attached to a directory yet.
    fn make_tmpfs(&self, node: u32) -> Result<OwnedFd, ReplicaError> {
        let tmpfs = Path::new("tmpfs");
        let step_failed = |step| failed(tmpfs, step);
        let context = fsopen(tmpfs, FsOpenFlags::FSOPEN_CLOEXEC).map_err(step_failed("fsopen"))?;
        let size = (self.bytes_per_node() + BYTES_PER_FILE).to_string();
        fsconfig_set_string(context.as_fd(), "size", &size).map_err(step_failed("size"))?;
        fsconfig_set_string(context.as_fd(), "mode", "0755").map_err(step_failed("mode"))?;
        fsconfig_set_string(context.as_fd(), "mpol", format!("bind:{node}"))
            .map_err(step_failed("memory policy"))?;
        fsconfig_create(context.as_fd()).map_err(step_failed("fsconfig"))?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(step_failed("fsmount"))
    }
}

impl fmt::Display for Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} MB", self.nodes.len(), megabytes(self.bytes_per_node()))
    }
}

/// Returns what the user can do after the operation `step` of making a replica has failed with `errno`.
fn remedy(step: &str, errno: Errno) -> &'static str {
    match (step, errno) {
        (_, Errno::EFBIG) => "raise the limit of the file size (ulimit -f), or run without replicas",
        (_, Errno::EMFILE | Errno::ENFILE) => "too many descriptors are open: see ulimit -n, and fs.file-max",
        (_, Errno::EAGAIN) => "a limit on processes is reached: raise pids.max of the cgroup, or ulimit -u",
        ("unshare" | "open_tree" | "move_mount", Errno::ENOSPC) => {
            "a limit is reached: raise user.max_mnt_namespaces or fs.mount-max, or run without replicas"
        }
        (_, Errno::ENOMEM | Errno::ENOSPC) => {
            "the memory of the NUMA node is exhausted: run without replicas"
        }
        ("open" | "stat", _) => "check that this file is there and can be read, or run without replicas",
        // The caller has CAP_SYS_ADMIN, with which it has made the mount namespace.
        (_, Errno::EPERM | Errno::EACCES | Errno::ENOSYS) => {
            "a seccomp filter, a security module or a kernel before Linux 5.2 refuses this call: allow mount(2), umount2(2), \
             open_tree(2), fsopen(2), fsconfig(2), fsmount(2) and move_mount(2), or run without replicas"
        }
        _ => "run without replicas",
    }
}

/// Closes all descriptors in the calling thread's own table except `kept` and the standard streams, to which a panic
/// would write. A descriptor that can't be closed is closed when the thread ends.
fn close_other_descriptors(kept: RawFd) {
    for (first, last) in [(0, kept - 1), (kept + 1, RawFd::MAX)] {
        let first = first.max(FIRST_AFTER_STREAMS);
        if first <= last {
            let _ = close_descriptor_range(first, last);
        }
    }
}

fn megabytes(bytes: u64) -> u64 {
    bytes.div_ceil(1_000_000)
}

/// Copies the file at `path` into the directory `to`. The name of the copy is `number`. The copy has the permission
/// bits of the file, but nobody may write to it.
fn copy(path: &Path, to: BorrowedFd<'_>, number: usize) -> Result<(), ReplicaError> {
    let mut source = File::open(path).map_err(failed(path, "open"))?;
    let mode = source.metadata().map_err(failed(path, "stat"))?.permissions().mode();
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let target = openat(to, number.to_string(), flags, Mode::RUSR).map_err(failed(path, "create"))?;
    let mut target = File::from(target);
    io::copy(&mut source, &mut target).map_err(failed(path, "copy"))?;
    target.set_permissions(fs::Permissions::from_mode(mode & 0o555)).map_err(failed(path, "chmod"))
}

/// Returns a function that makes the error of the operation `step` on `path` from the error of a system call.
fn failed<E: Into<io::Error>>(path: &Path, step: &'static str) -> impl Fn(E) -> ReplicaError {
    let path = path.to_owned();
    move |error| {
        let errno = error.into().raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        ReplicaError::Failed { path: path.clone(), step, errno }
    }
}

/// Returns the paths of the files that a process has mapped. `maps` is the text of `/proc/PID/maps`. Leaves out
/// memory without a file, and files that were removed.
fn mapped_files(maps: &str) -> BTreeSet<&str> {
    let paths = maps.lines().filter_map(mapped_path);
    paths.filter(|path| path.starts_with('/') && !path.ends_with(" (deleted)")).collect()
}

/// Returns the path in one line of `/proc/PID/maps`. `None` for memory without a file, which has the inode number 0.
fn mapped_path(line: &str) -> Option<&str> {
    // The path follows five fields: the addresses, the permissions, the offset, the device and the inode number.
    let mut field = "";
    let mut remaining = line;
    for _ in 0..5 {
        (field, remaining) = remaining.trim_start().split_once(' ')?;
    }
    (field != "0").then_some(remaining.trim_start())
}

/// Returns the free memory of a NUMA node in bytes, with the memory of the page cache. `meminfo` is the text of the
/// node's `meminfo`, which has lines such as `Node 0 MemFree: 10 kB`.
fn free_bytes(meminfo: &str) -> u64 {
    let free_kib = |line: &str| {
        let (_, entry) = line.split_once(' ')?.1.split_once(' ')?;
        let (name, value) = entry.split_once(':')?;
        let is_free = ["MemFree", "Active(file)", "Inactive(file)"].contains(&name.trim());
        is_free.then(|| value.trim().trim_end_matches(" kB").parse::<u64>().ok()).flatten()
    };
    meminfo.lines().filter_map(free_kib).sum::<u64>() * 1024
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;

    use nix::poll::{PollFd, PollFlags, poll};
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn the_end_of_a_pipe_that_the_caller_closes_while_files_are_copied_is_seen_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let (source, copies) = (directory.path().join("source"), directory.path().join("copies"));
        mkfifo(&source, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::create_dir(&copies).unwrap();
        let to = File::open(&copies).unwrap();
        let replicas = Replicas { files: vec![(source.clone(), 0)], nodes: BTreeSet::from([0]) };
        let (reader, writer) = io::pipe().unwrap();
        thread::scope(|scope| {
            let copying = scope.spawn(|| replicas.copy_files(to.as_fd()));
            // This succeeds when the thread opens the source. The copying goes on until this end is closed.
            let feed = loop {
                match File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&source) {
                    Ok(feed) => break feed,
                    Err(error) => assert!(!copying.is_finished(), "the source was not opened: {error}"),
                }
                thread::yield_now();
            };
            drop(writer);
            let mut ready = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut ready, 60_000_u16), Ok(1), "the pipe is still open");
            assert!(!copying.is_finished());
            drop(feed);
            assert_eq!(copying.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn a_replica_that_is_not_made_has_a_remedy_that_fits_the_cause() {
        let error = |step, errno| ReplicaError::Failed { path: "/lib/x".into(), step, errno }.to_string();
        assert_eq!(
            error("copy", Errno::EFBIG),
            "no replica of /lib/x: copy: File too large; raise the limit of the file size (ulimit -f), or run without \
             replicas"
        );
        for (step, errno, remedy) in [
            ("make private", Errno::EPERM, "refuses this call: allow mount(2), umount2(2), open_tree(2), "),
            ("fsopen", Errno::ENOSYS, "a kernel before Linux 5.2"),
            ("open", Errno::EACCES, "; check that this file is there and can be read"),
            ("open", Errno::EMFILE, "; too many descriptors are open: see ulimit -n"),
            ("umount", Errno::EBUSY, "; run without replicas"),
        ] {
            assert!(error(step, errno).contains(remedy), "{}", error(step, errno));
        }
    }

    #[test]
    fn only_files_that_are_there_are_copied() {
        let maps = "55d0-55d1 r-xp 00001000 08:01 123                       /usr/bin/a program\n\
                    7f00-7f01 r--p 00000000 08:01 124    /lib/libc.so.6\n\
                    7f01-7f02 rw-p 00001000 08:01 124    /lib/libc.so.6\n\
                    7f02-7f03 rw-p 00000000 00:00 0 \n\
                    7f03-7f04 r--p 00000000 00:05 99    /memfd:x (deleted)\n\
                    7ffd-7ffe rw-p 00000000 00:00 0                          [stack]\n";
        assert_eq!(mapped_files(maps), BTreeSet::from(["/lib/libc.so.6", "/usr/bin/a program"]));
    }

    #[test]
    fn free_memory_is_with_the_page_cache_of_files() {
        let text = "Node 0 MemTotal:       100 kB\nNode 0 MemFree:         10 kB\nNode 0 Active(file):     2 kB\n\
                    Node 0 Inactive(file):   3 kB\nNode 0 Active(anon):     7 kB\n";
        assert_eq!(free_bytes(text), 15 * 1024);
    }

    #[test]
    fn replicas_that_do_not_fit_are_refused_with_what_they_need() {
        let with_file_of = |bytes| Replicas { files: vec![("/x".into(), bytes)], nodes: BTreeSet::from([0]) };
        assert_eq!(with_file_of(1_000_000).to_string(), "1 x 2 MB");
        if !Path::new("/sys/devices/system/node/node0").exists() {
            eprintln!("skipped: this kernel has no NUMA nodes");
            return;
        }
        assert_eq!(Replicas::check_free_memory([&with_file_of(4096), &with_file_of(4096)]), Ok(()));
        let refused = Replicas::check_free_memory([&with_file_of(4096), &with_file_of(1 << 50)]).unwrap_err();
        assert!(matches!(refused, ReplicaError::NotEnoughMemory { node: 0, .. }), "{refused}");
        let message = refused.to_string();
        assert!(message.contains("1125899907 MB on NUMA node 0"), "{message}");
        assert!(message.contains("run without replicas"), "{message}");
    }
}
