//! Reports calls of sched_setaffinity(2): a BPF program at the end of the call, and the ring buffer that it
//! writes.

use std::io;

use aya::Ebpf;
use aya::maps::{Array, MapData, RingBuf};
use aya::programs::fexit::FExitLink;
use aya::programs::{FExit, ProgramError};
use pjw_core::ids::{Pid, Tid};
use pjw_core::{cpuset::CpuSet, snapshot::AffinityRequest, time::Nanos};

use super::fault::{AffinityMonitorUnavailable, TaskScanUnavailable};
use super::object::{BpfPlatform, load_program, refusal_error, take_map, unavailable_reason};
use super::record::{parse_comm, u32_at, u64_at};
use super::task::DrainedRequests;
use crate::sys::affinity;

/// The kernel function whose calls the BPF program reports.
const FUNCTION: &str = "sched_setaffinity";
/// The name of the BPF program in the object file.
const PROGRAM: &str = "asked";
/// The size of the ring buffer that is requested (`max_entries`), in bytes. On a machine with larger pages, the
/// kernel makes it larger. Then one call of [`AffinityMonitor::drain_requests`] may leave records in it.
const RING_BYTES: usize = 65_536;
/// The size of the header that the kernel puts before each record of the ring buffer, in bytes.
const RING_HEADER_BYTES: usize = 8;
/// `offsetof(struct ask, mask)`.
const HEADER_BYTES: usize = 48;

/// The settings and the loss count of the BPF program: `struct listening` of `tasks.bpf.c`. Its values are, by index:
///
/// - 0: The pid of this process. Its calls are not reported.
/// - 1: 1 during the check after loading, in which only the calls of this process are reported. Otherwise 0.
/// - 2: The size of an affinity mask, in bytes.
/// - 3: The number of calls that were not reported because the ring buffer was full.
type MonitorValue = [u64; 4];

/// A BPF program in the kernel that reports the calls of sched_setaffinity(2) by other processes: the caller, the
/// thread whose mask is set, and the requested mask. Reports the calls that succeed, and the calls that the kernel
/// refuses with `EINVAL`. Dropping this value removes the program from the kernel.
pub struct AffinityMonitor {
    /// The ring buffer that the program fills with the reported calls.
    ring: RingBuf<MapData>,
    /// The BPF map with the settings of the program. The program adds the number of calls that it could not report.
    settings: Array<MapData, MonitorValue>,
    /// The number of calls that the program could not report, as last read from `settings`.
    lost: u64,
    /// Keeps the program attached to the kernel function.
    _link: FExitLink,
}

impl std::fmt::Debug for AffinityMonitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AffinityMonitor").field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl AffinityMonitor {
    /// Loads the BPF program into the kernel, and attaches the program to the kernel function of
    /// sched_setaffinity(2). As a test, this process then makes one call of sched_setaffinity(2), and checks
    /// that the BPF program reports the call. Afterwards, the BPF program reports the calls of all processes
    /// except this process.
    ///
    /// # Errors
    /// If a requirement is missing, the kernel refuses the program, or the test fails. The error names the
    /// reason and a remedy.
    pub fn load() -> Result<Self, AffinityMonitorUnavailable> {
        Self::load_with_platform(&mut BpfPlatform::detect()?)
    }

    /// Loads the BPF program that reports calls of sched_setaffinity(2), as [`AffinityMonitor::load`] does.
    /// `platform` contains the facts about the running kernel, such as its type information.
    ///
    /// # Errors
    /// If the kernel refuses the program, or the test of the program fails.
    pub(super) fn load_with_platform(platform: &mut BpfPlatform) -> Result<Self, AffinityMonitorUnavailable> {
        // The monitor does not use the map of the processes that a task scan reports, so one entry suffices.
        let mut object = platform.load(1, |object, btf| {
            let loaded = program(object).and_then(|program| load_program(|| program.load(FUNCTION, btf)));
            loaded.map_err(|error| match unavailable_reason("verifying", &error) {
                TaskScanUnavailable::KernelTooOld(_) => refusal_error("finding the function", &error),
                other => other,
            })
        })?;
        let mut settings: Array<MapData, MonitorValue> = take_map(&mut object, "LISTENING")?
            .try_into()
            .map_err(|error| refusal_error("LISTENING", &error))?;
        let configure = |settings: &mut Array<MapData, MonitorValue>, check: bool| {
            let values = [std::process::id().into(), check.into(), platform.mask_bytes as u64, 0];
            settings.set(0, values, 0).map_err(|error| refusal_error("configuring", &error))
        };
        configure(&mut settings, true)?;
        let attach = |program: &mut FExit| program.attach().and_then(|link| program.take_link(link));
        let link =
            program(&mut object).and_then(attach).map_err(|error| unavailable_reason("attaching", &error))?;
        let ring =
            take_map(&mut object, "ASKS")?.try_into().map_err(|error| refusal_error("ASKS", &error))?;
        let mut monitor = Self { ring, settings, lost: 0, _link: link };
        monitor.check_own_call_is_reported()?;
        configure(&mut monitor.settings, false)?;
        Ok(monitor)
    }

    /// Returns the affinity requests (calls of sched_setaffinity(2)) that the BPF program has reported since the last
    /// call of this function. Does not wait. The requests are in a ring buffer in shared memory, so that reading them
    /// takes no system call.
    ///
    /// While the ring buffer is full, requests are lost. The result has the number of requests that were lost since
    /// the last call.
    pub fn drain_requests(&mut self) -> DrainedRequests {
        let mut drained = DrainedRequests::default();
        let mut read_bytes = 0;
        while read_bytes < RING_BYTES
            && let Some(record) = self.ring.next()
        {
            read_bytes += RING_HEADER_BYTES + record.len();
            drained.requests.extend(parse_request(&record));
        }
        // The program loses a record only while the ring buffer is full, and the records in the buffer stay there until
        // they are read. So a ring buffer that is less than half full was not full since the last call. Then the BPF
        // map with the count of lost records need not be read.
        if read_bytes >= RING_BYTES / 2
            && let Ok([_, _, _, lost]) = self.settings.get(&0, 0)
        {
            drained.lost_count = lost.saturating_sub(self.lost);
            self.lost = lost;
        }
        drained
    }

    /// Makes one call of sched_setaffinity(2), and checks that the BPF program reports the call. The call sets the mask
    /// that the thread already has. The kernel then counts this mask as requested, so the call is made in a thread that
    /// ends afterwards.
    ///
    /// # Errors
    /// If the call fails, or if the BPF program does not report the call.
    fn check_own_call_is_reported(&mut self) -> Result<(), AffinityMonitorUnavailable> {
        let set_own_mask = || {
            let tid = affinity::own_thread();
            let mask = affinity::get_mask(tid)?;
            affinity::set_mask(tid, &mask).map(|()| (tid, mask))
        };
        let Ok(result) = std::thread::scope(|scope| scope.spawn(set_own_mask).join()) else {
            let reported = String::from("nothing: the thread of the check failed");
            return Err(AffinityMonitorUnavailable::SelfCheckFailed(reported));
        };
        let (tid, mask) =
            result.map_err(|errno| refusal_error("setting the mask of pjwd", &io::Error::from(errno)))?;
        let reported = self.drain_requests().requests;
        let own_pid = Pid(std::process::id());
        let is_own_call = |request: &AffinityRequest| {
            (request.caller_pid, request.caller) == (own_pid, tid)
                && request.target.is_none()
                && request.requested_mask == mask
        };
        // During the check no other process is reported, so that many requests of a job can't fill the ring
        // buffer.
        if reported.iter().any(is_own_call) {
            Ok(())
        } else {
            Err(AffinityMonitorUnavailable::SelfCheckFailed(format!("{reported:?}")))
        }
    }
}

fn program(object: &mut Ebpf) -> Result<&mut FExit, ProgramError> {
    object.program_mut(PROGRAM).ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

/// Parses `record`, which the BPF program wrote about one call of sched_setaffinity(2). In the result, the target is
/// `None` if the calling thread set its own mask. Returns `None` if the record is shorter than its fixed part.
fn parse_request(record: &[u8]) -> Option<AffinityRequest> {
    let (header, mask) = record.split_first_chunk::<HEADER_BYTES>()?;
    let (caller, named_target) = (u32_at(header, 0), u32_at(header, 12));
    let words: Vec<u64> = mask.chunks_exact(8).map(|word| u64_at(word, 0)).collect();
    Some(AffinityRequest {
        caller: Tid(caller),
        caller_pid: Pid(u32_at(header, 4)),
        caller_parent: Pid(u32_at(header, 8)),
        comm: parse_comm(&header[32..]),
        called_at: Nanos(u64_at(header, 24)),
        // 0 names the caller.
        target: Some(Tid(named_target)).filter(|_| named_target != 0 && named_target != caller),
        requested_mask: CpuSet::from_words(&words),
        refused: u64_at(header, 16) != 0,
    })
}

#[cfg(test)]
mod tests {
    use pjw_core::ids::Comm;

    use super::*;

    #[test]
    fn a_record_is_parsed_with_a_mask_of_any_length() {
        let mut record: Vec<u8> = [7_u32, 6, 5, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        record.extend((-22_i64).to_ne_bytes());
        record.extend(9_u64.to_ne_bytes());
        record.extend(b"mpirun\0\0\0\0\0\0\0\0\0\0");
        let mut expected = AffinityRequest {
            caller: Tid(7),
            caller_pid: Pid(6),
            caller_parent: Pid(5),
            comm: Comm::from("mpirun"),
            called_at: Nanos(9),
            target: None,
            requested_mask: CpuSet::new(),
            refused: true,
        };
        assert_eq!(parse_request(&record), Some(expected.clone()));
        for end in 0..record.len() {
            assert_eq!(parse_request(&record[..end]), None, "{end}");
        }
        record.extend([0_u64; 99].into_iter().flat_map(u64::to_ne_bytes));
        record.extend(0b101_u64.to_ne_bytes());
        expected.requested_mask = "6336,6338".parse().unwrap();
        assert_eq!(parse_request(&record), Some(expected));
    }

    #[test]
    fn a_thread_that_names_itself_has_no_other_target() {
        let target = |named_target: u32| {
            let record = [[7_u32, 6, 5, named_target].map(u32::to_ne_bytes).concat(), vec![0; 32]].concat();
            parse_request(&record).unwrap().target
        };
        assert_eq!([target(0), target(7), target(6)], [None, None, Some(Tid(6))]);
    }
}
