//! Whether the limits of the system allow the processes of a group, and a file descriptor for each process.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Uid, getuid};

use super::error::{CheckError, SPARE_DESCRIPTORS};
use super::pids_cgroup::{CgroupMount, PidsCgroup};
use crate::instance::Instance;
use crate::kernel_files::{number_in, read_text, short_text_of};

/// The open descriptors are counted only if the instances need more than the limit divided by this number.
const UNCOUNTED_SHARE: u64 = 8;
/// Held by the thread that raises the limit of open descriptors. Another thread could set a lower limit in between.
static LIMIT_CHANGE: Mutex<()> = Mutex::new(());
const CAP_SYS_ADMIN: u64 = 1 << 21;
const CAP_SYS_RESOURCE: u64 = 1 << 24;
/// The capabilities that lift RLIMIT_NPROC in the initial user namespace: `copy_process` in kernel/fork.c of Linux
/// 6.18.
const LIFTING_CAPABILITIES: u64 = CAP_SYS_ADMIN | CAP_SYS_RESOURCE;
/// The inode number of the initial user namespace: `USER_NS_INIT_INO` in linux/nsfs.h. The same since Linux 3.8.
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// A limit on the number of processes.
#[derive(Debug)]
struct Limit {
    /// The number of further processes that the limit allows now.
    room: u64,
    name: String,
    remedy: String,
}

/// The processes that are to be started in a cgroup or below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Demand {
    instances: u64,
    starters: u64,
}

/// Checks whether the limits on the number of processes allow `instances` new processes and their starters: the threads
/// and processes that start them. `starters` is the number of starters, as [`crate::SpawnContext::starter_count`]
/// returns it. The kernel counts a thread as a process. The limits are those of the system, of the caller's user, and
/// of the cgroups that contain the caller. A limit that can't be read is not checked.
///
/// # Errors
/// [`CheckError::ProcessLimit`] if a limit is too low.
pub fn check_process_limits(instances: usize, starters: usize) -> Result<(), CheckError> {
    let (wanted, starters) = (instances as u64, starters as u64);
    let own = PidsCgroup::of_caller().map(|own| (own.directory, Demand { instances: wanted, starters }));
    check_demands(&cgroup_demands(own, CgroupMount::all_seen_by_caller()))?;
    check_limits_of_caller(wanted, starters, wanted + starters)
}

/// Checks the limits of the system and of the caller's user, as [`check_process_limits`].
pub(super) fn check_limits_of_user(instances: usize, starters: usize) -> Result<(), CheckError> {
    let (wanted, starters) = (instances as u64, starters as u64);
    check_limits_of_caller(wanted, starters, wanted + starters)
}

/// Checks the limits of the system and of users on the number of processes, if the instances change to the user
/// `uid`. `starters` threads and processes start the instances. Of these, `templates` are templates: processes from
/// which instances are forked, and which also change to this user. The others are spawner threads of the caller's
/// user.
///
/// - The user `uid` needs room for all instances and templates.
/// - The caller's user needs room for two processes for each spawner thread: the thread, and a process that has not
///   changed its user yet.
/// - If `uid` is the caller's user, the checks are those of [`check_limits_of_user`].
pub(super) fn check_limits_of_users(
    uid: u32,
    instances: usize,
    starters: usize,
    templates: usize,
) -> Result<(), CheckError> {
    if uid == getuid().as_raw() {
        return check_limits_of_user(instances, starters);
    }
    let (wanted, starters, templates) = (instances as u64, starters as u64, templates as u64);
    check_other_user(uid, wanted, templates)?;
    check_limits_of_caller(wanted, starters, 2 * starters.saturating_sub(templates))
}

/// Checks the limits of the system, and whether the caller's user has room for `needed` processes.
fn check_limits_of_caller(wanted: u64, starters: u64, needed: u64) -> Result<(), CheckError> {
    let all_threads = all_threads();
    check_limits(wanted, starters, wanted + starters, system_limits(all_threads))?;
    check_limits(wanted, starters, needed, user_limit(needed, all_threads))
}

/// Checks the limits `pids.max` of the cgroups in which the instances and the starters start, and of all cgroups
/// above. Of the `starters` threads and processes that start instances, `templates` are templates: processes from
/// which instances are forked. A cgroup whose directory the caller doesn't see is not checked.
///
/// Since Linux 5.7, a process that clone3(2) makes in another cgroup of version 2 (`CLONE_INTO_CGROUP`) counts in
/// that cgroup only: `pids_can_fork` in kernel/cgroup/pids.c. With a pids controller of version 1, it counts in the
/// caller's cgroup.
pub(super) fn check_cgroups(
    instances: &[Instance],
    starters: usize,
    templates: usize,
) -> Result<(), CheckError> {
    let mut by_descriptor: BTreeMap<RawFd, u64> = BTreeMap::new();
    for cgroup in instances.iter().filter_map(|instance| instance.placement.cgroup.as_ref()) {
        *by_descriptor.entry(cgroup.as_raw_fd()).or_default() += 1;
    }
    // Several descriptors may be of one cgroup. Two cgroups may have the same path: each in another mount namespace.
    let mut by_cgroup: BTreeMap<(u64, u64), (PathBuf, Demand)> = BTreeMap::new();
    for (descriptor, wanted) in by_descriptor {
        let link = PathBuf::from(format!("/proc/self/fd/{descriptor}"));
        let (Ok(cgroup), Ok(directory)) = (fs::metadata(&link), fs::read_link(&link)) else { continue };
        let id = |cgroup: &fs::Metadata| (cgroup.dev(), cgroup.ino());
        if fs::metadata(&directory).is_ok_and(|visible| id(&visible) == id(&cgroup)) {
            let (_, demand) = by_cgroup.entry(id(&cgroup)).or_insert((directory, Demand::default()));
            demand.instances += wanted;
        }
    }
    let mut placed: Vec<(PathBuf, Demand)> = by_cgroup.into_values().collect();
    let own = PidsCgroup::of_caller();
    let without_cgroup = instances.iter().filter(|instance| instance.placement.cgroup.is_none()).count();
    let is_v1 = own.as_ref().is_some_and(|own| own.is_v1);
    let in_own = if is_v1 { instances.len() } else { without_cgroup };
    // A template starts in the cgroup of its first instance. With several cgroups it is not known in which one, and the
    // templates count in the caller's.
    let placed_templates = match placed.as_mut_slice() {
        [(_, only)] if in_own == 0 => {
            only.starters = templates as u64;
            templates
        }
        _ => 0,
    };
    let demand = Demand { instances: in_own as u64, starters: (starters - placed_templates) as u64 };
    let placed = own.map(|own| (own.directory, demand)).into_iter().chain(placed);
    check_demands(&cgroup_demands(placed, CgroupMount::all_seen_by_caller()))
}

/// Adds up the processes that are to be started in or below each cgroup. `demands` has the cgroups in which processes
/// start, by directory. The result also has all cgroups above them, up to the mount point in `mounts` that contains
/// them. Without such a mount point, it has all directories above them.
fn cgroup_demands(
    demands: impl IntoIterator<Item = (PathBuf, Demand)>,
    mounts: &[CgroupMount],
) -> BTreeMap<PathBuf, Demand> {
    let mut sums: BTreeMap<PathBuf, Demand> = BTreeMap::new();
    for (directory, demand) in demands {
        let mount = mounts.iter().find(|mount| directory.starts_with(&mount.directory));
        let is_cgroup = |directory: &&Path| mount.is_none_or(|mount| directory.starts_with(&mount.directory));
        for cgroup in directory.ancestors().take_while(is_cgroup) {
            let sum = sums.entry(cgroup.to_owned()).or_default();
            sum.instances += demand.instances;
            sum.starters += demand.starters;
        }
    }
    sums
}

fn check_demands(demands: &BTreeMap<PathBuf, Demand>) -> Result<(), CheckError> {
    demands.iter().try_for_each(|(cgroup, Demand { instances, starters })| {
        check_limits(*instances, *starters, instances + starters, pids_limit(cgroup))
    })
}

/// Checks that each of `limits` has room for `needed` processes. Otherwise returns [`CheckError::ProcessLimit`] for the
/// limit with the least room. `wanted` and `starters` are the numbers of instances and starters in this error.
fn check_limits(
    wanted: u64,
    starters: u64,
    needed: u64,
    limits: impl IntoIterator<Item = Limit>,
) -> Result<(), CheckError> {
    match limits.into_iter().min_by_key(|limit| limit.room).filter(|limit| limit.room < needed) {
        None => Ok(()),
        Some(Limit { room, name, remedy }) => {
            Err(CheckError::ProcessLimit { wanted, starters, room, limit: name, remedy })
        }
    }
}

/// Raises the soft limit of open descriptors (`RLIMIT_NOFILE`) of the calling process if this limit does not allow
/// `wanted` more descriptors and a reserve of 64. [`crate::SpawnContext::start`] calls this function, because each
/// started process needs a pidfd. The started processes do not get the raised limit. Their limit is that of the calling
/// process when the [`crate::SpawnContext`] was made.
///
/// # Errors
/// [`CheckError::DescriptorLimit`] if the hard limit is too low. [`CheckError::SystemCall`] if the limit can't be
/// changed.
pub fn raise_descriptor_limit(wanted: usize) -> Result<(), CheckError> {
    let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(()) };
    // Counting the open descriptors takes longer than the start of a process.
    if (wanted as u64 + SPARE_DESCRIPTORS) * UNCOUNTED_SHARE <= soft {
        return Ok(());
    }
    let _changing = LIMIT_CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((needed, hard)) = needed_descriptor_limit(wanted)? else { return Ok(()) };
    setrlimit(Resource::RLIMIT_NOFILE, needed, hard).map_err(|errno| CheckError::SystemCall {
        what: "the limit of open descriptors can't be raised",
        errno,
    })
}

/// Checks whether the hard limit of open descriptors of the calling process allows `wanted` more descriptors and a
/// reserve of 64. If so, [`raise_descriptor_limit`] can raise the soft limit far enough. Changes no limit. A limit that
/// can't be read is not checked.
///
/// # Errors
/// [`CheckError::DescriptorLimit`] if the hard limit is too low.
pub fn check_descriptor_limit(wanted: usize) -> Result<(), CheckError> {
    needed_descriptor_limit(wanted).map(|_| ())
}

/// Returns the soft limit of open descriptors that the calling process needs for `wanted` more descriptors and the
/// reserve, and its hard limit. `None` if the present soft limit is high enough, or can't be read.
///
/// # Errors
/// [`CheckError::DescriptorLimit`] if the hard limit is too low.
fn needed_descriptor_limit(wanted: usize) -> Result<Option<(u64, u64)>, CheckError> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(None) };
    // One of them is that of the directory itself.
    let open = fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.skip(1).count() as u64);
    let needed = wanted as u64 + SPARE_DESCRIPTORS + open;
    if needed > hard {
        return Err(CheckError::DescriptorLimit { wanted, open, needed, limit: hard });
    }
    Ok((needed > soft).then_some((needed, hard)))
}

/// Returns the number of threads of the system: the fourth field of /proc/loadavg, proc(5).
fn all_threads() -> Option<u64> {
    let text = short_text_of(Path::new("/proc/loadavg"))?;
    text.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

/// Returns the limits `kernel.pid_max` and `kernel.threads-max`, without a limit that can't be read. `all_threads` is
/// the number of threads of the system, and counts as 0 if it is unknown.
fn system_limits(all_threads: Option<u64>) -> Vec<Limit> {
    let limit = |file: &str| {
        let most = number_in(Path::new("/proc/sys/kernel").join(file).as_path())?;
        Some(Limit {
            room: most.saturating_sub(all_threads.unwrap_or(0)),
            name: format!("kernel.{file} is {most}"),
            remedy: format!("start fewer, or raise it: sysctl kernel.{file}=N"),
        })
    };
    ["pid_max", "threads-max"].into_iter().filter_map(limit).collect()
}

/// Returns the limit of the caller's user, as [`limit_of_user`].
fn user_limit(needed: u64, all_threads: Option<u64>) -> Option<Limit> {
    limit_of_user(getuid(), needed, all_threads, effective_capabilities)
}

/// Checks whether `RLIMIT_NPROC` has room for `wanted` instances and `templates` templates of the user `uid`. Above the
/// limit, a process that has taken this user can't execute its program, also if the caller has capabilities: execve(2).
/// Since Linux 5.14 the last process may be one too many; then the next one fails.
fn check_other_user(uid: u32, wanted: u64, templates: u64) -> Result<(), CheckError> {
    let needed = wanted + templates;
    let limit = limit_of_user(Uid::from_raw(uid), needed, all_threads(), || 0);
    check_limits(wanted, templates, needed, limit)
}

/// Returns the limit `RLIMIT_NPROC` (setrlimit(2)) of the calling process for threads of the real user `uid`. `None`
/// in each of these cases:
///
/// - The limit has room for `needed` threads even if all threads of the system, `all_threads`, belong to this user.
/// - The limit does not hold for this user: [`is_unlimited`]. For this case, `capabilities` returns the capabilities
///   of the process for which the kernel checks the limit. In the first case, `capabilities` is not called.
/// - The limit can't be read.
///
/// Since Linux 5.14, a user namespace has another limit: the `RLIMIT_NPROC` that its creator had when creating the
/// namespace. This limit holds for all processes of the creator in the namespace: `is_rlimit_overlimit` in
/// kernel/ucount.c of Linux 6.18. It can't be read, and is not checked.
fn limit_of_user(
    uid: Uid,
    needed: u64,
    all_threads: Option<u64>,
    capabilities: impl FnOnce() -> u64,
) -> Option<Limit> {
    let (most, _) = getrlimit(Resource::RLIMIT_NPROC).ok()?;
    if all_threads.is_some_and(|threads| most.saturating_sub(threads) >= needed) {
        return None;
    }
    let namespace = user_namespace(Path::new("/proc/self"));
    let uid_map = || read_text(Path::new("/proc/self/uid_map")).unwrap_or_default();
    if is_unlimited(uid, namespace, uid_map, capabilities()) {
        return None;
    }
    let used = threads_of_user(uid.as_raw(), namespace);
    let user = if uid == getuid() { "this user".to_owned() } else { format!("the user {uid}") };
    Some(Limit {
        room: most.saturating_sub(used),
        name: format!("RLIMIT_NPROC of {user} is {most}, and {used} threads run"),
        remedy: "start fewer, or raise it: ulimit -u N".to_owned(),
    })
}

/// Returns whether `RLIMIT_NPROC` does not hold for a process with the user `uid` and `capabilities`. The process is
/// in the user namespace `namespace`, or in the initial one if this is `None`. `uid_map` returns the text of
/// `/proc/self/uid_map`. Also returns `true` if this text does not say which user of the initial namespace `uid` is.
///
/// The limit never holds for root of the initial user namespace (`INIT_USER`), whatever its namespace. Capabilities
/// of another namespace than the initial one lift nothing: `copy_process` in kernel/fork.c, and `flag_nproc_exceeded`
/// in kernel/sys.c, of Linux 6.18.
fn is_unlimited(
    uid: Uid,
    namespace: Option<u64>,
    uid_map: impl FnOnce() -> String,
    capabilities: u64,
) -> bool {
    if is_initial(namespace) {
        return uid.is_root() || capabilities & LIFTING_CAPABILITIES != 0;
    }
    may_be_initial_root(&uid_map(), uid)
}

/// Returns whether the user `uid` may be root of the initial user namespace. `uid_map` maps users to ids in the
/// namespace above, which may not be the initial one, user_namespaces(7). A user that is not in it may have any id.
fn may_be_initial_root(uid_map: &str, uid: Uid) -> bool {
    let id_above = uid_map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let (first, above, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        let offset = uid.as_raw().checked_sub(first).filter(|offset| *offset < count)?;
        above.checked_add(offset)
    });
    id_above.is_none_or(|id| id == 0)
}

/// Returns whether `namespace` is the initial user namespace. If it can't be read (`None`), it counts as the initial
/// one, because the kernel may have no others (`CONFIG_USER_NS`).
fn is_initial(namespace: Option<u64>) -> bool {
    namespace.is_none_or(|namespace| namespace == INITIAL_USER_NAMESPACE)
}

/// Returns the inode number of the user namespace of the process with the directory `process` in /proc. `None` if it
/// can't be read. For example, that of a process in a namespace above can't be read.
fn user_namespace(process: &Path) -> Option<u64> {
    Some(fs::metadata(process.join("ns/user")).ok()?.ino())
}

/// Returns whether the calling thread may make a mount namespace.
pub(super) fn is_system_administrator() -> bool {
    effective_capabilities() & CAP_SYS_ADMIN != 0
}

fn effective_capabilities() -> u64 {
    let status = read_text(Path::new("/proc/thread-self/status")).unwrap_or_default();
    field(&status, "CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0)
}

/// Counts the threads of the real user `uid` in the user namespace `namespace`. Counts those in all namespaces if
/// this is the initial namespace or unknown. Returns 0 if /proc can't be read.
///
/// Since Linux 5.14, only the threads in the namespace count for its limit. On older kernels, those in the namespaces
/// above count too. The result is then too low, and the kernel may refuse a process later.
fn threads_of_user(uid: u32, namespace: Option<u64>) -> u64 {
    let Ok(processes) = fs::read_dir("/proc") else { return 0 };
    let is_process =
        |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit);
    let threads = |entry: fs::DirEntry| {
        let process = entry.path();
        let status = read_text(&process.join("status"))?;
        let has_user = field(&status, "Uid:")?.parse::<u32>().ok()? == uid;
        let counts = has_user && (is_initial(namespace) || user_namespace(&process) == namespace);
        counts.then(|| field(&status, "Threads:")?.parse::<u64>().ok()).flatten()
    };
    processes.flatten().filter(is_process).filter_map(threads).sum()
}

/// Returns the first word of the field `name` in the text of /proc/PID/status.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()
}

/// Returns the limit `pids.max` of the cgroup with the directory `cgroup`. `None` if it is `max` or can't be read.
fn pids_limit(cgroup: &Path) -> Option<Limit> {
    let file = cgroup.join("pids.max");
    let most = number_in(&file)?;
    let used = number_in(&cgroup.join("pids.current"))?;
    Some(Limit {
        room: most.saturating_sub(used),
        name: format!("{} is {most}, and {used} threads run there", file.display()),
        remedy: "start fewer, or raise it".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_of_the_system_are_checked_also_if_its_threads_cannot_be_counted() {
        let limits = system_limits(None);
        assert_eq!(limits.len(), 2, "{limits:?}");
        assert!(limits.iter().all(|limit| limit.room > 0), "{limits:?}");
        let wanted = u64::from(u32::MAX);
        assert!(check_limits(wanted, 0, wanted, limits).is_err());
    }

    #[test]
    fn more_descriptors_than_the_hard_limit_allows_are_refused() {
        let wanted = u32::MAX as usize;
        for refusal in [check_descriptor_limit(wanted), raise_descriptor_limit(wanted)] {
            assert!(matches!(refusal, Err(CheckError::DescriptorLimit { .. })), "{refusal:?}");
        }
        assert_eq!(check_descriptor_limit(1), Ok(()));
    }

    #[test]
    fn root_and_capabilities_lift_the_limit_of_processes_in_the_initial_user_namespace_only() {
        let (root, user) = (Uid::from_raw(0), Uid::from_raw(1000));
        let map = || "0 100000 65536\n".to_owned();
        for (namespace, is_lifted) in [(None, true), (Some(INITIAL_USER_NAMESPACE), true), (Some(1), false)] {
            assert_eq!(is_unlimited(root, namespace, map, 0), is_lifted, "{namespace:?}");
            assert_eq!(is_unlimited(user, namespace, map, CAP_SYS_RESOURCE), is_lifted, "{namespace:?}");
            assert!(!is_unlimited(user, namespace, map, 0), "{namespace:?}");
        }
    }

    #[test]
    fn the_machines_root_has_no_limit_of_processes_in_any_user_namespace() {
        let is_unlimited = |map: &str, uid| is_unlimited(Uid::from_raw(uid), Some(1), || map.to_owned(), 0);
        let whole = "         0          0 4294967295\n";
        assert!(is_unlimited(whole, 0) && !is_unlimited(whole, 1000));
        let other = "0 1000 1\n1 100000 65536\n70000 0 1\n";
        assert!(!is_unlimited(other, 0) && !is_unlimited(other, 1));
        assert!(is_unlimited(other, 70_000), "another number of the machine's root");
        assert!(is_unlimited(other, 70_001) && is_unlimited("", 0), "an unknown id is left to the kernel");
    }

    #[test]
    fn an_instance_counts_in_its_own_cgroup_and_in_those_above_only() {
        let placed = [("/cg/a", 5, 2), ("/cg/a/b", 3, 1), ("/cg/c", 4, 0)];
        let placed =
            placed.map(|(path, instances, starters)| (PathBuf::from(path), Demand { instances, starters }));
        let mount = |directory: &str| CgroupMount::at(directory);
        let demands = cgroup_demands(placed.clone(), &[mount("/else"), mount("/cg")]);
        let sum = |path: &str| demands.get(Path::new(path)).map(|demand| (demand.instances, demand.starters));
        assert_eq!([sum("/cg/a"), sum("/cg/a/b"), sum("/cg/c")], [Some((8, 3)), Some((3, 1)), Some((4, 0))]);
        assert_eq!([sum("/cg"), sum("/")], [Some((12, 3)), None]);
        assert!(cgroup_demands(placed, &[]).contains_key(Path::new("/")), "the mount point is unknown");
    }

    #[test]
    fn only_processes_of_the_user_namespace_count_in_one_that_is_not_the_initial_one() {
        let uid = getuid().as_raw();
        assert!(threads_of_user(uid, Some(INITIAL_USER_NAMESPACE)) > 0);
        assert_eq!(threads_of_user(uid, Some(1)), 0);
    }
}
