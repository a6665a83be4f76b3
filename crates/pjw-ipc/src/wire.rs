//! The types of the interface, as they are sent and as `pjwctl --json` prints them.
//!
//! Their field names are public. Fields may be added. To rename or remove one needs a new [`SCHEMA_VERSION`] and an
//! entry in the CHANGELOG. A test compares the types with the `.varlink` file.

use serde::{Deserialize, Serialize};

/// The version of the JSON format of [`Status`], which is sent in its field `schema`. The version is increased
/// when a field is renamed or removed.
pub const SCHEMA_VERSION: u32 = 1;

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
    )*};
}

wire! {
    /// The state of the whole machine.
    Status {
        /// The version of this form: [`SCHEMA_VERSION`].
        schema: u32,
        /// The daemon's version.
        version: String,
        /// The process id of the daemon.
        pid: u32,
        /// `enforce` or `observe`.
        mode: String,
        /// How new processes are found: `netlink` or `polling`.
        discovery: String,
        /// The machine.
        node: Node,
        /// The PUs by holder.
        pool: Pool,
        /// The largest requests that fit now.
        fits: Fits,
        /// The jobs.
        jobs: Vec<Job>,
        /// Conditions that an administrator should know.
        warnings: Vec<Warning>,
        /// Every core, in the machine's order.
        cores: Vec<Core>,
    }
    /// The machine in numbers.
    Node {
        /// The host name.
        hostname: String,
        /// The PUs of the machine, in the kernel's list form.
        cpus: String,
        /// The number of physical cores.
        cores: u32,
        /// The number of packages.
        packages: u32,
        /// The number of NUMA nodes with PUs.
        numa_nodes: u32,
        /// The number of L3 caches.
        l3: u32,
    }
    /// The PUs by holder, in the kernel's list form.
    Pool {
        /// Housekeeping: PUs that no job gets.
        housekeeping: String,
        /// Free PUs.
        free: String,
        /// PUs that jobs hold.
        allocated: String,
    }
    /// The largest requests that fit now, in cores, by the level of the machine.
    Fits {
        /// The largest request that fits one L3.
        l3: u32,
        /// The largest request that fits one NUMA node.
        numa_node: u32,
        /// The largest request that fits one package.
        package: u32,
        /// The largest request that fits the machine.
        machine: u32,
    }
    /// A physical core and its place in the machine.
    Core {
        /// The PUs of the core.
        cpus: String,
        /// The number of the package.
        package: Option<u32>,
        /// The number of the NUMA node.
        numa_node: Option<u32>,
        /// The number of the L3 cache.
        l3: Option<u32>,
    }
    /// A job.
    Job {
        /// `source:id`.
        id: String,
        /// The system that the job comes from: `slurm`, `manual`, ...
        source: String,
        /// The user id of the owner.
        owner: u32,
        /// `running`, `reserved` (no process yet), `waiting` (for cores) or `observed` (count unknown).
        state: String,
        /// `guaranteed`, `normal` or `besteffort`, which is treated as `normal` now.
        class: String,
        /// The requested number of cores on this machine, converted from the unit of the request. 0 if unknown.
        requested_cores: u32,
        /// The PUs that the job holds.
        cpus: String,
        /// The party that granted the PUs: `warden` or `scheduler`.
        granted_by: String,
        /// Whether another job holds some of these PUs too.
        shared: bool,
        /// How the job is kept on its PUs: `cpuset`, `affinity` or `none`.
        enforcement: String,
        /// The number of processes of the job.
        processes: u32,
        /// The number of threads of the job.
        threads: u32,
        /// The number of hot threads of the job: threads that run or wait for a PU most of the time.
        hot: u32,
        /// The number of threads of the job that are pinned to one PU.
        pinned: u32,
        /// The number of threads of the job whose affinity mask has PUs outside the job's PUs now.
        violations: u32,
        /// The number of the owner's processes that belong to no job, plus the number of the job's processes outside
        /// the scheduler's cgroup for the job.
        strays: u32,
        /// The time at which the job was first seen.
        since: String,
    }
    /// A condition that an administrator should know.
    Warning {
        /// The name of the condition, for scripts.
        code: String,
        /// The id of the job. Empty if the condition concerns the machine.
        job: String,
        /// The description of the condition, in one sentence.
        text: String,
        /// What the user can do.
        remedy: String,
    }
    /// A process of a job.
    Member {
        /// The process id.
        pid: u32,
        /// The start time of the process, in clock ticks since boot.
        start_time: u64,
        /// The name of the program.
        comm: String,
        /// The user id of the process.
        uid: u32,
        /// The evidence that the process belongs to the job: `registered`, `cgroup`, `parent`, `session`,
        /// `environment` or `adopted`.
        evidence: String,
        /// The threads of the process.
        threads: Vec<Thread>,
    }
    /// A thread of a member.
    Thread {
        /// The thread id.
        tid: u32,
        /// The name of the thread.
        comm: String,
        /// The kernel's letter for the state of the thread.
        state: String,
        /// The demand of the thread: the share of time in which it wants a PU, in permille.
        demand: u32,
        /// Whether the thread is hot: it wants a PU most of the time.
        hot: bool,
        /// The PU on which the thread ran last.
        last_cpu: u32,
        /// The effective affinity mask.
        allowed: String,
        /// The PU that the thread is pinned to.
        pinned: Option<u32>,
        /// The reason for this mask.
        because: String,
    }
    /// An event.
    Event {
        /// The time of the event.
        time: String,
        /// The kind of event.
        event: String,
        /// The id of the job. Empty if the event concerns the machine.
        job: String,
        /// The event in one sentence.
        text: String,
        /// The process of the event.
        pid: Option<u32>,
        /// The thread of the event.
        tid: Option<u32>,
        /// The PUs of the event.
        cpus: Option<String>,
    }
    /// An action that the next cycle would carry out.
    Action {
        /// `confine`, `repair`, `pin`, `float` or `restore`.
        action: String,
        /// The id of the job.
        job: String,
        /// The process id.
        pid: u32,
        /// The thread id.
        tid: u32,
        /// The present mask.
        from: String,
        /// The mask after the action.
        to: String,
        /// The reason.
        why: String,
    }
    /// An action that is skipped.
    Abstained {
        /// The name of the condition, for scripts.
        code: String,
        /// The id of the job. Empty if it concerns the machine.
        job: String,
        /// The process id, if it concerns one process.
        pid: Option<u32>,
        /// The action that is skipped, and the reason.
        why: String,
        /// What the user can do.
        remedy: String,
    }
    /// A job that moves to other cores so that larger requests fit.
    Move {
        /// The id of the job.
        job: String,
        /// The PUs that the job holds before the move.
        from: String,
        /// The PUs that the job holds after the move: as many cores, of the same kinds.
        to: String,
        /// The benefit of the move.
        why: String,
    }
    /// The machine as a tree.
    Topology {
        /// The number of packages.
        packages: u32,
        /// The number of dies, if packages have several; else 0.
        #[serde(default)] dies: u32,
        /// The number of NUMA nodes that are the nearest of some PU.
        numa_nodes: u32,
        /// The number of NUMA nodes that are the nearest of no PU: memory without CPUs.
        #[serde(default)] memory_nodes: u32,
        /// The number of L3 caches.
        l3: u32,
        /// The number of physical cores.
        cores: u32,
        /// The number of PUs.
        pus: u32,
        /// The numbers of PUs that a core can have, each number once.
        #[serde(default)] smt: Vec<u32>,
        /// The number of kinds of core.
        kinds: u32,
        /// The kinds of core, the most efficient first. Empty if all cores are alike.
        #[serde(default)] core_kinds: Vec<CoreKind>,
        /// All PUs that run.
        cpus: String,
        /// PUs that do not run, or that were hidden from the process that saved the topology.
        #[serde(default)] offline: String,
        /// PUs that the daemon's own cpuset forbids.
        #[serde(default)] disallowed: String,
        /// Devices: graphics cards, network cards and others.
        #[serde(default)] devices: Vec<Device>,
        /// The largest requests that fit now. Only of a machine with a warden.
        #[serde(default)] fits: Option<Fits>,
        /// The largest parts of the machine, with the parts in them.
        tree: Vec<Domain>,
    }
    /// A part of the machine.
    Domain {
        /// `package`, `die`, `numa_node`, `l3` or `core`.
        kind: String,
        /// The number of the part, among the parts of this kind.
        number: u32,
        /// The PUs of the part. For a NUMA node of memory without CPUs: the PUs for which it is near.
        cpus: String,
        /// The local memory of the part, in bytes.
        memory_bytes: u64,
        /// For a core on a machine of several kinds of core: its index in `core_kinds`.
        #[serde(default)] core_kind: Option<u32>,
        /// The number of its free cores, which is the largest request that fits it. Only of a machine with a warden.
        #[serde(default)] fits: Option<u32>,
        /// The parts in it.
        children: Vec<Domain>,
    }
    /// A kind of core.
    CoreKind {
        /// The name of the kind: `efficiency`, `performance`, or the vendor's name.
        name: String,
        /// The PUs of the kind.
        cpus: String,
    }
    /// A device and its place in the machine.
    Device {
        /// `gpu`, `coprocessor`, `network` or `storage`.
        class: String,
        /// The names that the system gives to it.
        names: Vec<String>,
        /// The PCI address of the device. Empty if the device has none.
        address: String,
        /// Vendor and model, if known.
        model: String,
        /// The PUs near it.
        cpus: String,
        /// The NUMA nodes near it.
        numa_nodes: Vec<u32>,
    }
}
