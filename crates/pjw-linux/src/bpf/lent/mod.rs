//! Reports when an owner's thread runs on a lent PU: a BPF program at each change of the running thread.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use aya::Ebpf;
use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use aya::programs::tp_btf::BtfTracePointLink;
use aya::programs::{BtfTracePoint, ProgramError};
use nix::time::{ClockId, clock_gettime};
use pjw_core::cpuset::{CpuSet, Pu};

use super::fault::LentCpuMonitorUnavailable;
use super::object::{BpfPlatform, load_program, refusal_error, take_map, unavailable_reason};
use super::record::u32_at;
use super::task::OwnerRunTime;
use crate::sys::{affinity, online};

type Result<T, E = LentCpuMonitorUnavailable> = std::result::Result<T, E>;

/// Compiled from `lent.bpf.c` by `make bpf`. A test compares the checksums of both files.
const OBJECT: &[u8] = aya::include_bytes_aligned!("lent.bpf.o");
/// The tracepoint of the kernel to which the BPF program is attached.
const TRACEPOINT: &str = "sched_switch";
/// The name of the BPF program in the object file.
const PROGRAM: &str = "switched";
/// How often the thread of the check sleeps and runs again.
const CHECK_ROUNDS: usize = 50;
/// How long the thread of the check sleeps each time.
const CHECK_SLEEP: Duration = Duration::from_micros(100);

/// What the BPF program has measured on one PU while the PU was lent: `struct seen` of `lent.bpf.c`. Times are in ns
/// of `CLOCK_MONOTONIC`. The values are, by index:
///
/// - 0: The time from which the run time of the owner counts. The other values belong to this time.
/// - 1: Since when a thread of the owner runs, or waits for a thread at idle priority. 0 if none does.
/// - 2: How long threads of the owner ran, or waited so, before, in ns.
/// - 3: 1 if the program has reported the PU, otherwise 0.
/// - 4: 1 if the kernel has idle priority of cgroups (`cpu.idle`), otherwise 0.
/// - 5: 1 if the thread of the owner waits, otherwise 0.
type Measurement = [u64; 6];

/// A BPF program in the kernel that watches the lent PUs. A lent PU is a PU (logical CPU) that a job, the owner, lends
/// to another job, the borrower. The program reports a lent PU when a thread of the owner has run on this PU. Every
/// thread that runs on a lent PU counts as a thread of the owner, except these:
///
/// - A thread at idle priority: its policy is `SCHED_IDLE`, or `cpu.idle` is set for its cgroup or for a cgroup above.
///   The threads of the borrower are at idle priority.
/// - A thread whose affinity mask has more PUs than the owner has: this thread belongs to another program. This rule
///   does not apply to io_uring worker threads, because the kernel may give them a mask of all PUs.
/// - A kernel thread, and a thread of this process.
///
/// A thread at idle priority can preempt a thread of the owner for some milliseconds. The thread of the owner then
/// waits for the PU. This wait counts as run time of the owner.
///
/// The program reports each lent PU once, and once more after each call of [`LentCpuMonitor::report_again`] for the PU.
/// While PUs are lent, the program runs at each context switch on any PU. Dropping this value removes the program from
/// the kernel.
pub struct LentCpuMonitor {
    object: Ebpf,
    /// The ring buffer to which the program writes the PUs that it reports.
    ring: RingBuf<MapData>,
    /// The pid of the process whose threads the program does not count.
    ignored_process: Array<MapData, u64>,
    /// For each PU, the `struct armed` of `lent.bpf.c`: the time from which the run time of the owner counts (in ns of
    /// `CLOCK_MONOTONIC`, 0 if the PU is not lent), the number of PUs of the owner, and 1 if the PU is not reported.
    armed: Array<MapData, [u64; 3]>,
    /// What the program has measured on each PU.
    measurements: PerCpuArray<MapData, Measurement>,
    /// The lent PUs, each with the time from which the run time of the owner counts, in ns of `CLOCK_MONOTONIC`.
    armed_at: BTreeMap<Pu, u64>,
    /// The lent PUs, each with the number of PUs of its owner.
    lent: BTreeMap<Pu, u32>,
    /// The lent PUs that the program only measures, until [`LentCpuMonitor::report_again`].
    silent: CpuSet,
    /// The possible PUs, in the order of the values of `measurements`.
    possible: Vec<Pu>,
    /// The attachment to the kernel. `None` while no PU is lent.
    link: Option<BtfTracePointLink>,
}

impl std::fmt::Debug for LentCpuMonitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentCpuMonitor").field("lent", &self.lent).finish_non_exhaustive()
    }
}

impl LentCpuMonitor {
    /// Loads the BPF program that watches the lent PUs: the PUs (logical CPUs) that jobs lend to other jobs. Tests
    /// the program: a thread of this process runs on a PU, and the program must report this PU. After the test, the
    /// program ignores the threads of this process. It watches no PU until [`LentCpuMonitor::set_lent_pus`] is
    /// called.
    ///
    /// # Errors
    /// - This process lacks `CAP_BPF` or `CAP_PERFMON`, or is not in the initial pid namespace.
    /// - The kernel has no BTF type information, or no idle priority of cgroups (`cpu.idle`, Linux 5.15).
    /// - The machine is big-endian, or has more than 8192 possible PUs.
    /// - The kernel refuses the program for another reason, or the test fails.
    ///
    /// The error names the reason.
    pub fn new() -> Result<Self> {
        let mut platform = BpfPlatform::detect()?;
        let possible: Vec<Pu> = online::possible_cpus().iter().collect();
        let count = possible.last().map_or(1, |last| last.0 + 1);
        let mut object = platform.load_object(OBJECT, ("ARMED", count), |object, btf| {
            let loaded = program(object).and_then(|program| load_program(|| program.load(TRACEPOINT, btf)));
            loaded.map_err(|error| unavailable_reason("verifying", &error))
        })?;
        let ring =
            take_map(&mut object, "HEARD")?.try_into().map_err(|error| refusal_error("HEARD", &error))?;
        let ignored_process =
            take_map(&mut object, "ORDERS")?.try_into().map_err(|error| refusal_error("ORDERS", &error))?;
        let armed =
            take_map(&mut object, "ARMED")?.try_into().map_err(|error| refusal_error("ARMED", &error))?;
        let measurements =
            take_map(&mut object, "SEEN")?.try_into().map_err(|error| refusal_error("SEEN", &error))?;
        let mut monitor = Self {
            object,
            ring,
            ignored_process,
            armed,
            measurements,
            armed_at: BTreeMap::new(),
            lent: BTreeMap::new(),
            silent: CpuSet::new(),
            possible,
            link: None,
        };
        monitor.check_own_thread_is_reported()?;
        monitor.count_threads_except(std::process::id())?;
        Ok(monitor)
    }

    /// Sets the lent PUs that the BPF program watches. A lent PU is a PU (logical CPU) that a job, the owner, lends to
    /// another job. `lent` replaces the lent PUs of the previous call. The value for each PU is the number of PUs of
    /// the owner, including the PUs that the owner lends. A thread whose affinity mask has more PUs than this number
    /// does not count as a thread of the owner, as [`LentCpuMonitor`] describes. If the number is 0, the size of the
    /// mask does not matter.
    ///
    /// The program reports a newly lent PU once, when a thread of the owner starts to run there. If such a thread
    /// already runs there during this call, the program reports the PU when the thread stops running. For a PU that was
    /// already lent before this call, the [run time](LentCpuMonitor::owner_run_times) of the owner goes on, and an
    /// earlier report is not repeated. While `lent` is empty, the program is detached from the kernel.
    ///
    /// A newly lent PU in `silent` is not reported before [`LentCpuMonitor::report_again`]. Its run time is measured.
    ///
    /// # Errors
    /// If the kernel refuses to attach the program, or to change its BPF map. Afterwards [`LentCpuMonitor::lent_pus`]
    /// is empty.
    pub fn set_lent_pus(&mut self, lent: &BTreeMap<Pu, u32>, silent: &CpuSet) -> Result<()> {
        let before = std::mem::take(&mut self.lent);
        let is_new = |pu: &Pu| lent.contains_key(pu) && !before.contains_key(pu);
        let newly_silent: CpuSet = silent.iter().filter(is_new).collect();
        self.silent = self.silent.iter().filter(|pu| lent.contains_key(pu)).collect();
        self.silent = self.silent.union(&newly_silent);
        for &pu in before.keys().filter(|pu| !lent.contains_key(pu)) {
            self.disarm(pu)?;
        }
        for (&pu, &owner_pus) in lent.iter().filter(|(pu, owner_pus)| before.get(pu) != Some(owner_pus)) {
            let counts_from = self.armed_at.get(&pu).copied().unwrap_or_else(now);
            self.arm(pu, counts_from, owner_pus)?;
        }
        if lent.is_empty() {
            self.link = None;
        } else if self.link.is_none() {
            let attach =
                |program: &mut BtfTracePoint| program.attach().and_then(|link| program.take_link(link));
            let link = program(&mut self.object).and_then(attach);
            self.link = Some(link.map_err(|error| unavailable_reason("attaching", &error))?);
        }
        self.lent.clone_from(lent);
        Ok(())
    }

    /// Returns the lent PUs that were passed to the last call of [`LentCpuMonitor::set_lent_pus`]. Empty if that call
    /// failed. A lent PU is a PU (logical CPU) that a job, the owner, lends to another job. The value for each lent PU
    /// says how many PUs the owner has, including the PUs that it lends.
    #[must_use]
    pub fn lent_pus(&self) -> &BTreeMap<Pu, u32> {
        &self.lent
    }

    /// Returns a file descriptor that poll(2) shows as readable when the BPF program has reported a PU (logical
    /// CPU) that a job lends to another job. A PU is reported when a thread of the lending job has run there.
    /// The caller then calls [`LentCpuMonitor::take_reported_pus`], which returns the reported PUs.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Returns the lent PUs that the BPF program has reported since the last call of this function, and that are still
    /// lent. A lent PU is a PU (logical CPU) that a job, the owner, lends to another job. The program reports a PU when
    /// a thread of the owner runs there. After a report, the program does not report this PU again until
    /// [`LentCpuMonitor::report_again`] is called for the PU. Makes no system call.
    pub fn take_reported_pus(&mut self) -> CpuSet {
        let mut reported = CpuSet::new();
        while let Some(record) = self.ring.next() {
            if record.len() >= size_of::<u32>() {
                reported.insert(Pu(u32_at(&record, 0)));
            }
        }
        reported.iter().filter(|pu| self.lent.contains_key(pu)).collect()
    }

    /// Makes the BPF program report each lent PU in `cpus` again, when a thread of the owner next starts or stops
    /// running there. Without this call, the program reports a lent PU only once. A lent PU is a PU (logical CPU) that
    /// a job, the owner, lends to another job. Also sets the run time of the owner on these PUs
    /// ([`LentCpuMonitor::owner_run_times`]) to zero. PUs in `cpus` that are not lent are ignored.
    ///
    /// # Errors
    /// If the kernel refuses to change the BPF map of the program.
    pub fn report_again(&mut self, cpus: &CpuSet) -> Result<()> {
        for pu in cpus.iter() {
            if let Some(&owner_pus) = self.lent.get(&pu) {
                self.silent.remove(pu);
                self.arm(pu, now(), owner_pus)?;
            }
        }
        Ok(())
    }

    /// Returns the run time of the owner on each lent PU. A lent PU is a PU (logical CPU) that a job, the owner, lends
    /// to another job. The run time is the time for which threads of the owner have run on the PU, or have waited there
    /// for a thread at idle priority that preempted them. [`LentCpuMonitor`] says which threads count as the owner's.
    /// The time counts since the PU was lent, or since the last call of [`LentCpuMonitor::report_again`] for the PU.
    /// The list is empty if the kernel refuses to read the BPF map of the program.
    #[must_use]
    pub fn owner_run_times(&self) -> Vec<OwnerRunTime> {
        // The clock is read first. Otherwise a thread that stops running between the two readings would get time in
        // which it did not run.
        let now = now();
        let Ok(measurements) = self.measurements.get(&0, 0) else { return Vec::new() };
        let run_time_on = |(pu, &[armed_at, started, ran, ..]): (&Pu, &Measurement)| {
            let expected = self.armed_at.get(pu)?;
            // If no thread was switched since the PU was armed, the measurement belongs to an earlier time.
            let is_current = armed_at == *expected;
            let is_running = is_current && started != 0;
            let running = if is_running { now.saturating_sub(started) } else { 0 };
            let run_time = Duration::from_nanos(if is_current { ran + running } else { 0 });
            Some(OwnerRunTime { pu: *pu, run_time, is_running })
        };
        self.possible.iter().zip(measurements.iter()).filter_map(run_time_on).collect()
    }

    /// Makes the program watch `pu`. The run time of the owner counts from `counts_from`, in ns of `CLOCK_MONOTONIC`.
    fn arm(&mut self, pu: Pu, counts_from: u64, owner_pus: u32) -> Result<()> {
        let is_silent = u64::from(self.silent.contains(pu));
        self.armed
            .set(pu.0, [counts_from, u64::from(owner_pus), is_silent], 0)
            .map_err(|error| refusal_error("arming", &error))?;
        self.armed_at.insert(pu, counts_from);
        Ok(())
    }

    fn disarm(&mut self, pu: Pu) -> Result<()> {
        self.armed.set(pu.0, [0; 3], 0).map_err(|error| refusal_error("arming", &error))?;
        self.armed_at.remove(&pu);
        Ok(())
    }

    fn count_threads_except(&mut self, process: u32) -> Result<()> {
        self.ignored_process
            .set(0, u64::from(process), 0)
            .map_err(|error| refusal_error("configuring", &error).into())
    }

    /// Tests the BPF program with a thread of this process. For the time of the test, one PU (logical CPU) counts as
    /// lent, so that the program watches this PU. The thread runs and sleeps repeatedly on the PU. The program must
    /// report the PU, and measure the run time of the thread.
    ///
    /// # Errors
    /// If the program does not report the PU or measures no run time, if a step of the test fails, or if the kernel has
    /// no idle priority of cgroups.
    fn check_own_thread_is_reported(&mut self) -> Result<()> {
        self.count_threads_except(0)?;
        let own = affinity::own_thread();
        let allowed = affinity::get_mask(own)
            .map_err(|errno| refusal_error("reading the mask of pjwd", &io_error(errno)))?;
        let pu = allowed
            .first()
            .ok_or_else(|| refusal_error("reading the mask of pjwd", &io::Error::other("it is empty")))?;
        // The mask of the test's thread has one PU.
        self.set_lent_pus(&BTreeMap::from([(pu, 1)]), &CpuSet::new())?;
        let sleep_often = || {
            let tid = affinity::own_thread();
            affinity::set_mask(tid, &CpuSet::from(pu))?;
            (0..CHECK_ROUNDS).for_each(|_| std::thread::sleep(CHECK_SLEEP));
            Ok(())
        };
        let slept = std::thread::scope(|scope| scope.spawn(sleep_often).join());
        if let Ok(Err(errno)) = slept {
            return Err(refusal_error("setting the mask of pjwd", &io_error(errno)).into());
        }
        let (reported, times) = (self.take_reported_pus(), self.owner_run_times());
        let has_idle_priority = self.measurements.get(&0, 0).is_ok_and(|pus| pus.iter().any(|pu| pu[4] != 0));
        self.set_lent_pus(&BTreeMap::new(), &CpuSet::new())?;
        let has_run = times.iter().any(|owner| owner.pu == pu && !owner.run_time.is_zero());
        if !reported.contains(pu) || !has_run {
            let text = format!("the PUs \"{reported}\" and the run times {times:?}");
            return Err(LentCpuMonitorUnavailable::SelfCheckFailed(text));
        }
        if has_idle_priority { Ok(()) } else { Err(LentCpuMonitorUnavailable::NoIdlePriority) }
    }
}

fn io_error(errno: nix::errno::Errno) -> io::Error {
    errno.into()
}

fn program(object: &mut Ebpf) -> Result<&mut BtfTracePoint, ProgramError> {
    object.program_mut(PROGRAM).ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

/// The time of bpf_ktime_get_ns(), which is never zero.
fn now() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).max(1)
}
