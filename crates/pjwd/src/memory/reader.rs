//! The thread that reads the memory of jobs. It begins with the first request.
//!
//! A reading of many gigabytes takes seconds of CPU time. So it delays neither a cycle nor the answer to another call.
//! The thread has a low priority, and reads one job at a time.

use std::cell::RefCell;
use std::sync::Weak;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use pjw_linux::sys::nice::set_own_nice_value_and_slice;
use tokio::sync::oneshot;

use super::reading::{JobProcess, JobReading, ReadingError, ReadingKind, measure_job_memory};
use super::turns::TurnQueue;

/// The nice value of the thread.
const NICE: i32 = 10;
/// The slice of the thread. A reading stays in the kernel for long. The thread of the control server, which answers
/// `status`, may wake up on the same PU meanwhile, and waits until the slice has ended.
const SLICE: Duration = Duration::from_micros(100);

/// A request to read the memory of the processes of a job.
#[derive(Debug)]
struct ReadRequest {
    processes: Vec<JobProcess>,
    kind: ReadingKind,
    watches_threads: bool,
    wanted: Weak<()>,
    reply: oneshot::Sender<Result<JobReading, ReadingError>>,
}

/// Measures the memory use of jobs in a background thread, one job at a time. The first request starts the thread.
/// After this value is dropped, the thread handles the requests that were already sent, and then ends.
#[derive(Debug, Default)]
pub struct MemoryReader {
    requests: RefCell<Option<Sender<ReadRequest>>>,
    /// The turns of the callers. A caller requests a reading only in its turn.
    pub turns: TurnQueue,
}

impl MemoryReader {
    /// Requests that the background thread measures the memory use of a job by the method `kind`. `processes` are the
    /// processes of the job. The returned future waits for the result. If `watches_threads` is true, the measurement
    /// also finds threads of the job that wait for one another to map or unmap memory ([`measure_job_memory`]).
    ///
    /// The caller must keep the `Arc` behind `wanted` for as long as the result is wanted. When the last clone of
    /// this `Arc` has been dropped, the background thread skips the request. If the thread is already reading the pages
    /// of processes, the thread stops before the next process. The result is then [`ReadingError::Abandoned`].
    ///
    /// # Errors
    /// The future returns [`ReadingError::NoThread`] if the background thread can't be started or has ended.
    /// Otherwise, the errors of [`measure_job_memory`].
    pub fn request_reading(
        &self,
        processes: Vec<JobProcess>,
        kind: ReadingKind,
        watches_threads: bool,
        wanted: Weak<()>,
    ) -> impl Future<Output = Result<JobReading, ReadingError>> + use<> {
        let (reply, reading) = oneshot::channel();
        let sent = self.send(ReadRequest { processes, kind, watches_threads, wanted, reply });
        async move {
            sent?;
            reading.await.map_err(|_| ReadingError::NoThread("it has ended".to_owned()))?
        }
    }

    fn send(&self, request: ReadRequest) -> Result<(), ReadingError> {
        let mut requests = self.requests.borrow_mut();
        let sender = match requests.take() {
            Some(sender) => sender,
            None => start_thread()?,
        };
        let sent = sender.send(request).map_err(|_| ReadingError::NoThread("it has ended".to_owned()));
        // A thread that has ended is started again for the next request.
        *requests = sent.is_ok().then_some(sender);
        sent
    }
}

fn start_thread() -> Result<Sender<ReadRequest>, ReadingError> {
    let (sender, requests) = mpsc::channel();
    let thread = std::thread::Builder::new().name("memory-reader".to_owned()).spawn(move || serve(&requests));
    thread.map_err(|error| ReadingError::NoThread(error.to_string()))?;
    Ok(sender)
}

fn serve(requests: &Receiver<ReadRequest>) {
    // Without the low priority the readings are as right, and other programs have a little less.
    let _ = set_own_nice_value_and_slice(NICE, SLICE);
    while let Ok(ReadRequest { processes, kind, watches_threads, wanted, reply }) = requests.recv() {
        let is_wanted = || wanted.strong_count() > 0;
        let reading = match is_wanted() {
            true => measure_job_memory(&processes, kind, watches_threads, &is_wanted),
            false => Err(ReadingError::Abandoned),
        };
        let _ = reply.send(reading);
    }
}
