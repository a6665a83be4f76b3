//! The settings and their defaults. The names and texts of the keys are in `keys.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use pjw_core::cpu_count_variables::CpuCountVariable;
use pjw_core::policy::{
    BindingPolicy, DaemonMode, ExhaustionPolicy, LendingPolicy, OversubscriptionPolicy, Policy,
};
use pjw_core::{cpuset_group::EnforcementMethod, housekeeping::HousekeepingRule, job::JobSource};

use super::provisions::ProvisionSettings;
use crate::memory::MemorySettings;

/// The value of the configuration key `log_level`: the lowest severity of the messages that pjwd logs. The variants
/// are in order, the highest severity first. Each level also logs the messages of all levels before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogLevel {
    /// Logs failures only.
    Error,
    /// Logs failures and possible failures, such as a program that left the cores of its job.
    Warn,
    /// Additionally logs what pjwd changed or detected, such as jobs that begin or end, and a configuration that was
    /// read again. The default.
    #[default]
    Info,
    /// Additionally logs the reasons for changes.
    Debug,
    /// Additionally logs every step of pjwd's work.
    Trace,
}

/// The value of the configuration key `scan`: how pjwd reads the state of processes and threads from the kernel. By
/// default, a BPF program reads the state of many threads at once. If the kernel can't load this program, pjwd reads
/// the files in /proc instead. The other choice is to always read the files in /proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScanInterface {
    /// A BPF program if the kernel allows it. The files in /proc otherwise.
    #[default]
    Auto,
    /// The files in /proc.
    Proc,
}

/// The value of the configuration key `log_format`: whether pjwd logs to the systemd journal or to standard error,
/// and in what format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// The journal if systemd connected standard error to the journal. Text otherwise.
    #[default]
    Auto,
    /// The journal. Each field of a message becomes a field of the journal entry. Text on standard error if
    /// the system has no journal.
    Journald,
    /// Text on standard error, one line per event.
    Text,
}

/// The values of the configuration table `[metrics]`: the file to which pjwd writes its metrics, and the addresses at
/// which pjwd serves its metrics over HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsSettings {
    /// `metrics.textfile`: the path of the file to which the metrics are written. `None` if no file is written.
    pub textfile_path: Option<PathBuf>,
    /// `metrics.interval`: the time between two writes of the metrics file.
    pub write_interval: Duration,
    /// `metrics.listen`: the addresses at which the metrics are served over HTTP. Empty if they are not served.
    pub listen_addresses: Vec<SocketAddr>,
    /// `metrics.max_jobs`: the maximum number of jobs that have metrics of their own. The metrics of all further
    /// jobs are summed.
    pub max_jobs: u32,
}

impl MetricsSettings {
    /// Returns whether pjwd collects metrics. True if the configuration names a file for the metrics, or an address
    /// at which to serve the metrics over HTTP.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.textfile_path.is_some() || !self.listen_addresses.is_empty()
    }
}

impl Default for MetricsSettings {
    fn default() -> Self {
        Self {
            textfile_path: None,
            write_interval: Duration::from_secs(15),
            listen_addresses: Vec::new(),
            max_jobs: 200,
        }
    }
}

/// The values of all configuration keys of pjwd. A key that is missing in the file has its default value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// `mode`: whether pjwd changes affinity masks and cpusets, or only shows the changes that it would make.
    pub mode: DaemonMode,
    /// `housekeeping`: the rule that selects the housekeeping PUs, which are reserved for the system.
    /// [`Config::policy`](super::Config::policy) has the PUs that the rule selects on the machine.
    pub housekeeping: HousekeepingRule,
    /// `interval`: the time between two scans of the processes of jobs. Each scan reads the processes that
    /// ran since the scan before, with their threads.
    pub scan_interval: Duration,
    /// `rescan_interval`: the time between two periodic scans. A periodic scan reads the processes of jobs,
    /// and also the processes that belong to no job. Most periodic scans read only processes that may have
    /// changed. Never shorter than `interval`: a configuration with a shorter time is refused.
    pub rescan_interval: Duration,
    /// `scan`: the kernel interface through which pjwd reads the state of many threads at once.
    pub scan_interface: ScanInterface,
    /// `cpu_budget_permille`: the share of one PU (logical CPU), in permille, that pjwd may use to handle
    /// process events, such as starts of processes. Up to 50 ms of unused CPU time can be used later. When
    /// the share is used up, further events wait, and pjwd then handles several of them together. Other work
    /// of pjwd is not limited, such as commands and the scans that a timer starts.
    pub cpu_budget_permille: u32,
    /// `realtime`: whether pjwd runs with a real-time priority, if the system allows this.
    pub use_realtime_priority: bool,
    /// `enforcement`: whether pjwd restricts jobs to their cores by cpusets or by affinity masks.
    pub enforcement: EnforcementMethod,
    /// `affinity`: whether the affinity masks that programs request for their own threads are kept.
    pub binding_policy: BindingPolicy,
    /// `share_smt`: whether the PUs (hardware threads) of one core may belong to two jobs.
    pub share_smt: bool,
    /// `on_exhausted`: what happens to a request for more cores than are free. The request is refused, waits
    /// for cores, or gets cores that another job also holds.
    pub exhaustion_policy: ExhaustionPolicy,
    /// `adopt_strays`: whether pjwd assigns processes that belong to no job (strays) to a job of their user.
    /// A process joins only if its user has exactly one job. If the user has several jobs, pjwd keeps the
    /// process off the cores of all jobs.
    pub adopt_unassigned_processes: bool,
    /// `first_person_uid`: the lowest user id that belongs to a human user. Lower user ids belong to root and
    /// to services. pjwd never reports their processes as strays (processes that belong to no job).
    pub first_person_uid: u32,
    /// `admin_groups`: the groups whose members are administrators of pjwd, by name or number.
    pub admin_groups: Vec<String>,
    /// `user_max_cores`: the maximum number of cores for a user who is not an administrator, summed over all jobs of
    /// the user. Cores for which a job waits count too. Cores that a besteffort job may borrow also count. A request of
    /// the user that exceeds this number is refused. 0 means that only administrators may assign cores. The jobs that a
    /// batch system starts for the user are counted, but never refused.
    pub user_max_cores: u32,
    /// `reservation_timeout`: the longest time that a reservation keeps its cores without a process. A reservation is a
    /// job that was created before its processes. After this time, the job ends and its cores are free.
    pub reservation_timeout: Duration,
    /// `report_keep`: the maximum number of reports of ended jobs that are kept. The oldest is dropped first. 0 if
    /// no job leaves a report.
    pub report_keep: u32,
    /// `log_level`: the lowest severity of the messages that are logged.
    pub log_level: LogLevel,
    /// `log_format`: where messages are logged, and in what format.
    pub log_format: LogFormat,
    /// `balance.pin`: whether pjwd pins each hot thread to one PU. A thread is hot if it runs or waits for a
    /// PU most of the time.
    pub pin_hot_threads: bool,
    /// `balance.hot_permille`: the CPU demand from which on a thread counts as hot, in permille of one PU.
    /// The CPU demand is the share of time in which the thread runs or waits for a PU.
    pub hot_threshold_permille: u32,
    /// `balance.cold_permille`: the CPU demand at which a hot thread stops counting as hot, in permille of
    /// one PU. The CPU demand is the share of time in which the thread runs or waits for a PU. Always below
    /// `hot_permille`.
    pub cold_threshold_permille: u32,
    /// `balance.smoothing_permille`: the weight of the newest reading in the smoothed CPU demand of a thread,
    /// in permille. The CPU demand is the share of time in which the thread runs or waits for a PU. The
    /// earlier smoothed value has the rest of the weight. At 1000, only the newest reading counts.
    pub smoothing_weight_permille: u32,
    /// `balance.oversubscribed`: whether pjwd pins the hot threads of a job evenly to the PUs (logical CPUs)
    /// of the job, or pins none of them, if the job has more hot threads than PUs. A thread is hot if it runs
    /// or waits for a PU most of the time.
    pub oversubscription_policy: OversubscriptionPolicy,
    /// `lending.…`: how idle cores are lent. A job of the class guaranteed lends the cores that it leaves idle. A job
    /// of the class besteffort borrows them.
    pub lending: LendingPolicy,
    /// `lending.revocation_signal`: the signal that pjwd sends to each process of a borrower (a job that uses lent
    /// cores). It is sent when cores are taken from the borrower, or soon will be. `None` for no signal.
    pub revocation_signal: Option<Signal>,
    /// `[[provision]]`: the cores that pjwd keeps for services, also when the services do not run.
    pub provisions: Vec<ProvisionSettings>,
    /// `run.variables`: the environment variables that tell a program in a job how many cores or PUs it has.
    pub cpu_count_variables: Vec<CpuCountVariable>,
    /// `memory.…`: how often pjwd measures the memory use of jobs without a request of a client, and how much CPU time
    /// this may take.
    pub memory: MemorySettings,
    /// `metrics.…`: the file and the addresses at which metrics are published.
    pub metrics: MetricsSettings,
    /// `sources.NAME.enabled`: the batch systems whose jobs pjwd detects. `NAME` is the name of a batch
    /// system.
    pub enabled_sources: BTreeSet<JobSource>,
    /// `sources.NAME.cores`: for each batch system, the number of cores for a job that does not say how many cores it
    /// needs. If its batch system has no entry here, this job gets no cores.
    pub source_cores: BTreeMap<JobSource, u32>,
}

/// The defaults of [`Policy`], and the defaults of all other keys.
impl Default for Settings {
    fn default() -> Self {
        let policy = Policy::default();
        Self {
            mode: policy.mode,
            housekeeping: HousekeepingRule::default(),
            scan_interval: Duration::from_secs(1),
            rescan_interval: Duration::from_secs(10),
            scan_interface: ScanInterface::default(),
            cpu_budget_permille: 200,
            use_realtime_priority: true,
            enforcement: EnforcementMethod::default(),
            binding_policy: BindingPolicy::default(),
            share_smt: policy.share_smt,
            exhaustion_policy: policy.exhaustion_policy,
            adopt_unassigned_processes: policy.adopt_unassigned_processes,
            first_person_uid: policy.first_person_uid,
            admin_groups: Vec::new(),
            user_max_cores: policy.user_max_cores,
            reservation_timeout: policy.reservation_timeout,
            report_keep: 1000,
            log_level: LogLevel::default(),
            log_format: LogFormat::default(),
            pin_hot_threads: policy.pin_hot_threads,
            hot_threshold_permille: policy.hot_threshold_permille,
            cold_threshold_permille: policy.cold_threshold_permille,
            smoothing_weight_permille: policy.smoothing_weight_permille,
            oversubscription_policy: policy.oversubscription,
            lending: policy.lending,
            revocation_signal: None,
            provisions: Vec::new(),
            cpu_count_variables: CpuCountVariable::defaults(),
            memory: MemorySettings::default(),
            metrics: MetricsSettings::default(),
            enabled_sources: policy.sources.into_iter().filter(|source| source.is_batch_system()).collect(),
            source_cores: policy.source_cores,
        }
    }
}
