//! libpjw_spawn.so: the crate pjw-spawn for C programs. `include/pjw_spawn.h` and the manual page pjw_spawn(3) describe
//! the functions that start groups of processes. `include/pjw_farm.h` and pjw_farm(3) describe farms.
//!
//! The names are those of the pspawn slides ("Optimizing Latency and Throughput for Spawning Processes on Massively
//! Multicore Processors"). Each function reads the caller's arguments, which may be anything, before it starts a
//! process. A failure sets `errno` and a text of the calling thread.

mod arguments;
mod background;
mod failure;
pub mod farm;
mod group;
mod late;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use libc::{cpu_set_t, pid_t};
use pjw_core::cpuset::{CpuSet, Pu};
use spawn::SpawnContext;

use crate::arguments::{StringLists, read_masks};
use crate::failure::{Failure, to_c_result};
use crate::group::{PidArray, StartArguments, check_count};

/// The C type `pspawn_context_t`: a program that can be started many times, and the CPUs on which its processes run.
/// [`pspawn_context_create`] initialises a value, and [`pspawn_context_destroy`] frees its memory.
#[repr(C)]
pub struct PspawnContext {
    /// The memory of the library for this value.
    private: *mut c_void,
}

/// The value to which [`PspawnContext::private`] points: a program, and the CPUs on which its processes run.
struct ContextOnCpus {
    context: SpawnContext,
    /// `None` for the CPUs of the calling thread.
    cpus: Option<CpuSet>,
}

/// Initialises the context `ctx`, from which processes of the program at `path` can be started. A name without a slash
/// is searched in `PATH`. `core` is the number of the logical CPU on which the processes will run, or -1 for all CPUs
/// of the calling thread. Returns 0, or -1 with `errno`. Frequent values of `errno` are:
///
/// - `EINVAL`: `ctx` or `path` is NULL, or the calling thread can't use the CPU `core`.
/// - `ENOENT`: there is no such program.
/// - `EACCES`: the program can't be executed.
///
/// # Safety
/// `ctx` must be NULL or point to memory for a context. `path` must be NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pspawn_context_create(
    ctx: *mut PspawnContext,
    path: *const c_char,
    core: c_int,
) -> c_int {
    to_c_result(|| {
        if ctx.is_null() || path.is_null() {
            return Err(Failure::invalid("a pointer is NULL"));
        }
        // SAFETY: the caller gives a C string.
        let path = Path::new(std::ffi::OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
        let cpus = if core == -1 { None } else { Some(read_core(core)?) };
        let context = SpawnContext::new(path)?;
        let arguments = StringLists::single_string(path.as_os_str());
        let masks = cpus.iter().cloned().collect();
        context.check_instances(
            &StartArguments { count: 1, arguments, environments: StringLists::none(), masks }.instances()?,
        )?;
        let private = Box::into_raw(Box::new(ContextOnCpus { context, cpus })).cast();
        // SAFETY: the caller gives room for a context.
        unsafe { ctx.write(PspawnContext { private }) };
        Ok(0)
    })
}

/// Frees the memory of `ctx`, a context from which processes of a program are started. Processes that were already
/// started continue to run. Does nothing if `ctx` is NULL, or if the context was freed before.
///
/// # Safety
/// `ctx` must be NULL or point to a context of [`pspawn_context_create`]. No other thread may use the context during
/// the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pspawn_context_destroy(ctx: *mut PspawnContext) {
    // SAFETY: the caller gives NULL or a context.
    let Some(ctx) = (unsafe { ctx.as_mut() }) else { return };
    let private = std::mem::replace(&mut ctx.private, ptr::null_mut()).cast::<ContextOnCpus>();
    if !private.is_null() {
        // SAFETY: the value is from `pspawn_context_create`, and nothing else knows it any more.
        drop(unsafe { Box::from_raw(private) });
    }
}

/// Starts one process of the program of the context `ctx`. `argv` has the arguments of the process, from `argv[0]`
/// on. Waits until the process has begun the program, which means that its execve(2) has succeeded. Returns the
/// process id. Returns -1 with `errno` if the process could not be started. `errno` is `EINVAL` if `ctx` or `argv` is
/// NULL, or if `argv` has no argument.
///
/// # Safety
/// `ctx` must be NULL or point to a context of [`pspawn_context_create`]. `argv` must be NULL or an array of C
/// strings that ends with NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pspawn(ctx: *mut PspawnContext, argv: *const *const c_char) -> pid_t {
    let mut pid = -1;
    // SAFETY: the caller guarantees the same, and `pid` has room for one number.
    match unsafe { pspawn_n(&raw mut pid, ctx, 1, argv) } {
        1 => pid,
        failure => failure,
    }
}

/// Starts `nspawns` processes of the program of the context `ctx`, all with the arguments `argv`. `nspawns` must be
/// at least 1. Waits until each process has begun the program (its execve(2) has succeeded) or has failed to start.
/// Writes one value per process into `pids`: the process id, or a negative `errno` if the process could not be
/// started. If `pids` is NULL, writes nothing.
///
/// Returns the number of processes that have begun the program. Returns -1 with `errno` if no process has begun the
/// program, for example because an argument is invalid (`EINVAL`).
///
/// # Safety
/// The requirements of [`pspawn`]. `pids` must be NULL or point to memory for `nspawns` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pspawn_n(
    pids: *mut pid_t,
    ctx: *mut PspawnContext,
    nspawns: c_int,
    argv: *const *const c_char,
) -> c_int {
    to_c_result(|| {
        // SAFETY: the caller gives NULL or a context.
        let private = unsafe { ctx.as_ref() }.map_or(ptr::null_mut(), |ctx| ctx.private);
        // SAFETY: a context that was not freed has a value of `pspawn_context_create`.
        let context = unsafe { private.cast::<ContextOnCpus>().as_ref() };
        let ContextOnCpus { context, cpus } =
            context.ok_or_else(|| Failure::invalid("the context is NULL or was destroyed"))?;
        let count = c_uint::try_from(nspawns).map_err(|_| Failure::invalid("nspawns is negative"))?;
        check_count(count)?;
        // SAFETY: the caller gives NULL or such a list.
        let arguments = unsafe { StringLists::one_for_all(argv) }?;
        let masks = cpus.iter().cloned().collect();
        let instances =
            StartArguments { count, arguments, environments: StringLists::none(), masks }.instances()?;
        let results = context.spawn_n(instances)?;
        // SAFETY: the caller guarantees NULL or memory for so many values.
        unsafe { PidArray::new(pids, count) }.write(&results)
    })
}

/// Starts `nspawns` processes of the program at `filename`, which is not searched in `PATH`. `mask` is an array of
/// `clen` CPU sets. Process number i, from 0, runs on the CPUs `mask[i % clen]`. Sets that no process uses are not
/// read. If `clen` is 0, `mask` is not read, and the processes run on the CPUs of the calling thread. If `envp` is
/// NULL, the processes have the environment of the caller.
///
/// `flags` is 0 or a combination of these values:
///
/// - `PSPAWN_ARGV_EACH` (1): `argv` contains one argument list for each process, one after the other. Each list ends
///   with NULL. Without this flag, `argv` is one list for all processes.
/// - `PSPAWN_ENVP_EACH` (2): `envp` contains one environment for each process, one after the other. Each environment
///   ends with NULL. Without this flag, `envp` is one environment for all processes.
/// - `PSPAWN_FORK_LATE` (4): the processes are forked when the program has done its start-up. First, one or a few
///   processes of the program run until they call [`pspawn_fork_here`]. Such a process is a template. The `nspawns`
///   processes are forks of the templates. If a process can't be forked in this way, or if `nspawns` is 1, the
///   library uses execve(2) instead.
///
/// With `PSPAWN_ARGV_EACH` or `PSPAWN_ENVP_EACH`, the arguments and the environment of some processes may be too large
/// for execve(2). These processes fail with `E2BIG`, and the others are started. If the arguments and the environment
/// of every process are too large, the call returns -1 with `E2BIG`.
///
/// Waits until each process has begun the program or has failed to start. A process has begun the program when its
/// execve(2) has succeeded, or when it was forked from a template. The values in `pids` and the return value are
/// those of [`pspawn_n`].
///
/// # Safety
/// `filename` must be NULL or a C string. `argv` and `envp` must be NULL or contain as many lists as `flags` says,
/// each ended by NULL. `mask` must be NULL or an array of `clen` pointers, each NULL or to a CPU set. `pids` must be
/// NULL or point to memory for `nspawns` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pspawn_v(
    filename: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
    nspawns: c_uint,
    clen: c_uint,
    mask: *const *const cpu_set_t,
    flags: c_int,
    pids: *mut pid_t,
) -> c_int {
    to_c_result(|| {
        check_count(nspawns)?;
        // With more sets than processes, the further ones are not used.
        // SAFETY: the caller guarantees the same.
        let masks = unsafe { read_masks(mask, clen.min(nspawns)) }?;
        // SAFETY: the caller guarantees the same.
        let (context, group) = unsafe { read_start_arguments(filename, argv, envp, nspawns, masks, flags) }?;
        let results = context.spawn_n(group.instances()?)?;
        // SAFETY: the caller guarantees NULL or memory for so many values.
        unsafe { PidArray::new(pids, nspawns) }.write(&results)
    })
}

/// Starts `nspawns` processes as [`pspawn_v`] does, but does not wait for them: returns before the processes have
/// begun the program (`i` as in `MPI_Isend`). `mask` contains one CPU set for each process. If `mask` is NULL, the
/// processes run on the CPUs of the calling thread.
///
/// Returns a file descriptor, or -1 with `errno`. The descriptor becomes readable once all processes have begun
/// the program or have failed to start. The caller must pass the descriptor to [`pspawn_collect`], which returns the
/// process ids.
///
/// # Safety
/// The requirements of [`pspawn_v`]. `mask` must be NULL or an array of `nspawns` pointers to CPU sets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ipspawn(
    filename: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
    nspawns: c_uint,
    mask: *const *const cpu_set_t,
    flags: c_int,
) -> c_int {
    to_c_result(|| {
        check_count(nspawns)?;
        // SAFETY: the caller guarantees the same.
        let masks = unsafe { read_masks(mask, if mask.is_null() { 0 } else { nspawns }) }?;
        // SAFETY: the caller guarantees the same.
        let (context, group) = unsafe { read_start_arguments(filename, argv, envp, nspawns, masks, flags) }?;
        background::start(context, group.instances()?)
    })
}

/// Waits until each process of a call of [`ipspawn`] has begun the program or has failed to start, and closes `fd`,
/// the descriptor that [`ipspawn`] returned. The values in `pids` and the return value are those of [`pspawn_n`].
/// Returns -1 with `EBADF` if `fd` is not from [`ipspawn`], or was closed by an earlier call.
///
/// `nspawns` is the number of values for which `pids` has memory, normally the number that was passed to [`ipspawn`].
/// If `nspawns` is smaller, only the first values are written. If it is larger, the further values stay unchanged.
/// The return value is the number of all started processes, also of those whose ids were not written.
///
/// # Safety
/// `pids` must be NULL or point to memory for `nspawns` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pspawn_collect(fd: c_int, pids: *mut pid_t, nspawns: c_uint) -> c_int {
    to_c_result(|| {
        let results = background::collect(fd)?;
        // SAFETY: the caller guarantees NULL or memory for so many values.
        unsafe { PidArray::new(pids, nspawns) }.write(&results)
    })
}

/// Makes the calling process a template: a process that stops in this call, and from which [`pspawn_v`] or
/// [`ipspawn`] forks processes. The call never returns in the template. It returns 1 in each forked process. Before
/// that, it writes the number of arguments of the forked process to `argc`, and the list of these arguments to
/// `argv`. `argc` and `argv` can be NULL: then nothing is written there.
///
/// The process becomes a template only if it was started for the flag `PSPAWN_FORK_LATE` or by
/// `pjwctl spawn --proxy late`. Otherwise the call returns 0 at once and writes nothing. The call returns -1 with
/// `errno` if a system call failed, or if the process has more than one thread (`EBUSY`).
///
/// # Safety
/// `argc` must be NULL or point to memory for a `c_int`. `argv` must be NULL or point to memory for a pointer. The
/// process must have only one thread. The call can check this only if `/proc` is mounted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pspawn_fork_here(argc: *mut c_int, argv: *mut *mut *mut c_char) -> c_int {
    to_c_result(|| {
        let Some(parameters) = late::fork_here()? else { return Ok(0) };
        // SAFETY: the caller guarantees NULL or memory for a value. The list is never freed, like that of main().
        unsafe {
            if !argc.is_null() {
                argc.write(c_int::try_from(parameters.arguments().count()).unwrap_or(c_int::MAX));
            }
            if !argv.is_null() {
                argv.write(parameters.argv().cast_mut().cast());
            }
        }
        Ok(1)
    })
}

/// Returns the message about the last failure of a function of this library in the calling thread, as a C string. The
/// message is empty if no function failed. The pointer is valid until the next failure in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn pspawn_error() -> *const c_char {
    failure::last_failure_message()
}

/// Returns the CPU set with the CPU `core`. Fails with `EINVAL` if no CPU can have this number.
fn read_core(core: c_int) -> Result<CpuSet, Failure> {
    let pu = u32::try_from(core).ok().map(Pu).filter(|pu| *pu <= Pu::MAX);
    let pu =
        pu.ok_or_else(|| Failure::invalid(format!("core {core} is no CPU: give its number, or -1 for all")))?;
    Ok(CpuSet::from_iter([pu]))
}

/// Converts the C arguments that [`pspawn_v`] and [`ipspawn`] have in common. Returns a context for the program
/// `filename`, and the arguments, environments and CPUs of the processes.
///
/// # Errors
/// - `EINVAL` if `flags` has an unknown bit, if `filename` or `argv` is NULL, or if a list of arguments is empty.
/// - The error of [`SpawnContext::new`] if the program can't be executed.
///
/// # Safety
/// As [`pspawn_v`].
unsafe fn read_start_arguments(
    filename: *const c_char,
    argv: *const *const c_char,
    envp: *const *const c_char,
    count: c_uint,
    masks: Vec<CpuSet>,
    flags: c_int,
) -> Result<(SpawnContext, StartArguments), Failure> {
    /// `argv` has one list of arguments for each process, and not one list for all.
    const ARGV_EACH: c_int = 1;
    /// `envp` has one environment for each process, and not one environment for all.
    const ENVP_EACH: c_int = 2;
    /// The processes are forked from a process of the program that has called `fork_here`.
    const FORK_LATE: c_int = 4;
    if flags & !(ARGV_EACH | ENVP_EACH | FORK_LATE) != 0 {
        return Err(Failure::invalid(format!("the flags {flags:#x} have an unknown bit")));
    }
    if filename.is_null() {
        return Err(Failure::invalid("filename is NULL"));
    }
    // SAFETY: the caller guarantees lists as the flags say.
    let (arguments, mut environments) = unsafe {
        (
            StringLists::read(argv, count, flags & ARGV_EACH != 0)?,
            StringLists::read_environments(envp, count, flags & ENVP_EACH != 0)?,
        )
    };
    // SAFETY: the caller gives a C string.
    let path = std::ffi::OsStr::from_bytes(unsafe { CStr::from_ptr(filename) }.to_bytes());
    // Like execve(2), and unlike execvp(3), the call does not search PATH.
    let path =
        if path.as_bytes().contains(&b'/') { path.to_owned() } else { Path::new(".").join(path).into() };
    let mut context = SpawnContext::new(path)?;
    if let Some(variables) = environments.one_of_assignments() {
        // As the environment of the context, it is laid out in memory only once for all processes.
        context = context.set_environment(variables);
        environments = StringLists::none();
    } else if !environments.is_empty() {
        context = context.set_environment::<&str, &str>([]);
    }
    if flags & FORK_LATE != 0 {
        context = context.use_fork_here_templates();
    }
    Ok((context, StartArguments { count, arguments, environments, masks }))
}
