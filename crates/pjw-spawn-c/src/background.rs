//! Groups of processes whose start the caller does not wait for. Each group has a descriptor, which becomes readable
//! when every process of the group has begun or has failed.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use spawn::{Child, Instance, SpawnBatch, SpawnContext, SpawnError};

use crate::failure::Failure;

/// The result for each process of a group: the process that has begun its program, or the reason why it could not
/// start.
type Results = Vec<Result<Child, SpawnError>>;

/// A group of processes whose start the C program does not wait for.
struct Background {
    /// The descriptor that the C program has. It is closed when the group is collected. Before that, the kernel can't
    /// give its number to another group.
    event: Arc<EventFd>,
    /// The thread that waits for the results.
    thread: JoinHandle<Results>,
}

/// The groups that were started and not collected yet ([`collect`]). The key is the descriptor that [`start`]
/// returned. `None` before the first group.
static GROUPS: Mutex<Option<HashMap<RawFd, Background>>> = Mutex::new(None);

/// Starts the processes `instances` of the program in `context`, and does not wait until they have begun the program.
/// Returns a file descriptor that becomes readable when all of them have begun the program or have failed to start. The
/// descriptor must be passed to [`collect`].
pub(crate) fn start(context: SpawnContext, instances: Vec<Instance>) -> Result<c_int, Failure> {
    let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
    let event = Arc::new(event.map_err(|errno| Failure::from_errno("eventfd", errno))?);
    let fd = event.as_raw_fd();
    let waker = Arc::clone(&event);
    // The thread is made before the processes are started. So no process is left without a thread that waits for it.
    let (sender, receiver) = mpsc::channel::<(SpawnContext, SpawnBatch)>();
    let thread = std::thread::Builder::new().name("pspawn".into()).spawn(move || {
        let Ok((context, batch)) = receiver.recv() else { return Results::new() };
        let results = batch.into_results();
        drop(context);
        // The write can't fail, because the counter is still 0.
        let _ = waker.write(1);
        results
    });
    let thread = thread.map_err(|error| Failure::from_errno("a thread can't be made", errno_of(&error)))?;
    let batch = context.start(instances)?;
    // The thread waits for this message, so the send can't fail.
    let _ = sender.send((context, batch));
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.get_or_insert_default().insert(fd, Background { event, thread });
    Ok(fd)
}

/// Waits for the processes of an earlier call of [`start`], which returned the descriptor `fd`. Returns when each
/// process has begun its program or has failed to start. The result contains each process or its error. Fails with
/// `EBADF` if `fd` is not such a descriptor, or was passed to this function before.
pub(crate) fn collect(fd: c_int) -> Result<Results, Failure> {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    let group = groups.as_mut().and_then(|groups| groups.remove(&fd));
    drop(groups);
    let not_a_group =
        Failure::from_errno("the descriptor is not from ipspawn(), or was collected before", Errno::EBADF);
    let Background { event, thread } = group.ok_or(not_a_group)?;
    let results = thread.join();
    drop(event);
    results.map_err(|_| Failure::from_errno("a fault in libpjw_spawn", Errno::EIO))
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(Errno::EAGAIN as i32))
}
