//! The writer: one process that writes all results.

use std::sync::atomic::Ordering;

use super::functions::{WriteFunction, WriterEndFunction};
use super::io_failure::IoFailureReason;
use super::memory::SharedMemory;
use super::result::{ItemResult, Outcome};
use super::ring::{PartialResult, ResultHeader, ResultRing, RingReadOutcome};
use super::wake::MasterWaker;

/// The item number that stands for the end of all results.
const END: u64 = u64::MAX;

/// Returns the ring buffer that transfers results from the master to the writer process. `shared` is the shared memory
/// of the farm.
pub(crate) fn ring(shared: &SharedMemory) -> ResultRing<'_> {
    ResultRing { control: &shared.control().to_writer, bytes: shared.result_ring(shared.sizes.workers) }
}

/// Tells the writer process, by a message in its ring buffer, that there are no more results. The ring buffer must be
/// empty.
pub(crate) fn send_end_of_results(shared: &SharedMemory) {
    let ring = ring(shared);
    let _ = ring.write_piece(ResultHeader::from_outcome(END, &Outcome::Done(Vec::new())), &[]);
    ring.control.filled.notify();
}

/// Runs the writer process: calls `write` for each result until the master sends the message that there are no more
/// results, and then calls `end`. Wakes the master by `waker` after each result. Returns the exit status for the
/// process: 0, or another value after an error.
pub(crate) fn run_writer(
    shared: &SharedMemory,
    waker: &MasterWaker,
    write: &mut WriteFunction<'_>,
    end: &mut Option<WriterEndFunction<'_>>,
) -> i32 {
    let (control, ring) = (shared.control(), ring(shared));
    let mut partial = PartialResult::default();
    loop {
        let received = ring.control.filled.wait_until(|| match ring.read_piece(&mut partial) {
            RingReadOutcome::Nothing => None,
            received => Some(received),
        });
        match received {
            RingReadOutcome::Result(END, _) => {
                let Some(end) = end else { return 0 };
                return end().err().map_or(0, status_of);
            }
            RingReadOutcome::Result(number, outcome) => {
                if let Err(code) = write(&ItemResult { number, outcome }) {
                    return control.writer_failure.store(IoFailureReason::FunctionFailed { number, code });
                }
                control.written.fetch_add(1, Ordering::SeqCst);
            }
            RingReadOutcome::Piece | RingReadOutcome::Nothing => {}
            // The master could send the result again. But another process has written to the memory of the farm, and
            // may also have changed the bytes of results, which nothing would notice.
            RingReadOutcome::Invalid => return control.writer_failure.store(IoFailureReason::InvalidMessage),
        }
        waker.wake_if_sleeping(&control.is_master_sleeping.0);
    }
}

/// Returns the exit status for an error code of the program: the code, or 1 if the code is not from 1 to 255.
fn status_of(code: i32) -> i32 {
    if (1..=255).contains(&code) { code } else { 1 }
}
