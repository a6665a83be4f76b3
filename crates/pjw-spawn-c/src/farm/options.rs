//! Reads the options of a C program and starts its farm.

use std::ffi::{CStr, c_void};

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;
use spawn::farm::{Farm, RunningFarm, WorkItem, WorkerCpus};

use super::types::{PjwFarmBytes, PjwFarmItem, PjwFarmOptions, PjwFarmResult, ReadFunction, WorkFunction};
use crate::failure::Failure;

/// `PJW_FARM_IN_ORDER`: the results come in the order of the item numbers.
const IN_ORDER: i32 = 1;
/// `PJW_FARM_ONE_PU_EACH`: each worker is bound to one CPU of the caller's affinity mask.
const ONE_PU_EACH: i32 = 2;
/// `PJW_FARM_ALLOW_THREADS`: the calling process may have more than one thread.
const ALLOW_THREADS: i32 = 4;

/// Starts a farm (a group of worker processes that compute items) with the options that a C program passed. Fails
/// with `EINVAL` if `options` or its field `work` is NULL, if its field `size` is wrong, or if `items` is not 0
/// although a reader process reads the items. Also fails if another option is invalid, or if the processes can't be
/// started.
///
/// # Safety
/// The requirements of [`super::pjw_farm_start`].
pub(super) unsafe fn start(options: *const PjwFarmOptions) -> Result<RunningFarm<'static>, Failure> {
    // SAFETY: the caller guarantees NULL or options, whose first field says how long they are.
    let size = (!options.is_null()).then(|| unsafe { options.cast::<usize>().read() });
    let size = size.ok_or_else(|| Failure::invalid("options is NULL"))?;
    if size != size_of::<PjwFarmOptions>() {
        let expected = size_of::<PjwFarmOptions>();
        return Err(Failure::invalid(format!(
            "size is {size}: set it to sizeof(pjw_farm_options_t), {expected}"
        )));
    }
    // SAFETY: the options have this length.
    let options = unsafe { options.read() };
    let work = options.work.ok_or_else(|| Failure::invalid("work is NULL"))?;
    // SAFETY: the caller guarantees the requirements of `pjw_farm_start`.
    let farm = unsafe { farm_from_options(&options) }?;
    let work = rust_work_function(work, options.data);
    Ok(match options.read {
        Some(_) if options.items != 0 => {
            return Err(Failure::invalid("items is not 0, and the reader decides how many there are"));
        }
        Some(read) => farm.start_with_reader(rust_read_function(read, options.data), work)?,
        None => farm.start(options.items, work)?,
    })
}

/// Makes a farm (a group of worker processes that compute items) with `options`, but does not start the farm. The
/// fields `items`, `work` and `read` are not used here. The start of the farm uses them.
///
/// If `chunk`, `window`, `ring_bytes`, `input_bytes` or `attempts` is 0, the farm has the default value of the option.
/// `workers` has no default: the start of a farm with 0 workers fails.
///
/// # Errors
/// If `flags` has an unknown bit, or if the CPUs are invalid. The other options are checked at the start of the farm.
///
/// # Safety
/// The requirements of [`super::pjw_farm_start`].
unsafe fn farm_from_options(options: &PjwFarmOptions) -> Result<Farm<'static>, Failure> {
    let flags = options.flags;
    if flags & !(IN_ORDER | ONE_PU_EACH | ALLOW_THREADS) != 0 {
        return Err(Failure::invalid(format!("the flags {flags:#x} have an unknown bit")));
    }
    let mut farm = Farm::new(options.workers);
    if flags & IN_ORDER != 0 {
        farm = farm.in_order();
    }
    if flags & ALLOW_THREADS != 0 {
        // SAFETY: the caller guarantees that the functions wait for no lock of another thread.
        farm = unsafe { farm.allow_threads() };
    }
    let set_unless_0 = |farm, value: u64, set: fn(Farm<'static>, u64) -> Farm<'static>| match value {
        0 => farm,
        value => set(farm, value),
    };
    farm = set_unless_0(farm, options.chunk, Farm::chunk);
    farm = set_unless_0(farm, options.window, Farm::window);
    farm = set_unless_0(farm, options.ring_bytes, Farm::ring_bytes);
    farm = set_unless_0(farm, options.input_bytes, Farm::input_bytes);
    if options.attempts > 0 {
        farm = farm.attempts(options.attempts);
    }
    // SAFETY: the caller guarantees NULL or a C string.
    let cpus = unsafe { worker_cpus(options) }?;
    Ok(set_functions(farm.cpus(cpus), options))
}

/// Returns the CPUs of the workers: the lists in `options.cpus`. If `options.cpus` is NULL, the flag
/// `PJW_FARM_ONE_PU_EACH` decides: with it, each worker has one CPU, and without it, each worker has the CPUs of the
/// caller.
///
/// # Errors
/// If `options.cpus` is no list of CPU lists separated by `;`, or is given together with `PJW_FARM_ONE_PU_EACH`.
///
/// # Safety
/// `options.cpus` must be NULL or a C string.
unsafe fn worker_cpus(options: &PjwFarmOptions) -> Result<WorkerCpus, Failure> {
    let has_one_pu_each = options.flags & ONE_PU_EACH != 0;
    if options.cpus.is_null() {
        return Ok(if has_one_pu_each { WorkerCpus::OnePuEach } else { WorkerCpus::Inherit });
    }
    if has_one_pu_each {
        return Err(Failure::invalid("cpus and PJW_FARM_ONE_PU_EACH exclude each other"));
    }
    // SAFETY: the caller guarantees a C string.
    let text = unsafe { CStr::from_ptr(options.cpus) }.to_string_lossy();
    let lists = text.split(';').map(|list| {
        list.parse::<CpuSet>().map_err(|error| Failure::invalid(format!("cpus: {list:?}: {error}")))
    });
    Ok(WorkerCpus::PerWorker(lists.collect::<Result<_, _>>()?))
}

/// Returns `farm` with the optional functions in `options`, such as `write`. Functions that are NULL are left out.
fn set_functions(mut farm: Farm<'static>, options: &PjwFarmOptions) -> Farm<'static> {
    let data = options.data;
    if let Some(start) = options.worker_start {
        farm = farm.on_worker_start(move |worker| start(data, worker));
    }
    if let Some(end) = options.worker_end {
        farm = farm.on_worker_end(move |worker| end(data, worker));
    }
    if let Some(write) = options.write {
        farm = farm.writer(move |result| {
            let result = PjwFarmResult::from_result(result);
            match write(data, &raw const result) {
                0 => Ok(()),
                code => Err(code),
            }
        });
    }
    if let Some(end) = options.writer_end {
        farm = farm.on_writer_end(move || match end(data) {
            0 => Ok(()),
            code => Err(code),
        });
    }
    if let Some(fork) = options.fork_process {
        farm = farm.fork_with(move || Errno::result(fork(data)));
    }
    farm
}

/// Calls `call`, which passes the pointer to a C function. The C function appends to `bytes` by this pointer.
fn with_c_bytes<T>(bytes: &mut Vec<u8>, call: impl FnOnce(*mut PjwFarmBytes) -> T) -> T {
    let mut appended = PjwFarmBytes(std::mem::take(bytes));
    let result = call(&raw mut appended);
    *bytes = appended.0;
    result
}

/// Returns a work function that calls the C function `work` with the pointer `data`. A result of `work` other than 0 is
/// the error code of the item.
fn rust_work_function(
    work: WorkFunction,
    data: *mut c_void,
) -> impl FnMut(WorkItem<'_>, &mut Vec<u8>) -> Result<(), i32> + 'static {
    move |item, result| {
        let item = PjwFarmItem::from_item(&item);
        match with_c_bytes(result, |result| work(data, &raw const item, result)) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}

/// Returns a read function that calls the C function `read` with the pointer `data`. The result 0 of `read` means that
/// there is no item with the number. A negative result is an error code.
fn rust_read_function(
    read: ReadFunction,
    data: *mut c_void,
) -> impl FnMut(u64, &mut Vec<u8>) -> Result<bool, i32> + 'static {
    move |number, bytes| match with_c_bytes(bytes, |bytes| read(data, number, bytes)) {
        0 => Ok(false),
        code if code < 0 => Err(code),
        _ => Ok(true),
    }
}
