//! The types of the interface, as they are sent and as `pjwctl --json` prints them.
//!
//! The field names of the types are public. Fields may be added. Renaming or removing a field needs a new
//! [`SCHEMA_VERSION`] and an entry in the CHANGELOG. A test compares the types with the `.varlink` file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::lending::Lending;

/// The version of the JSON format in which the daemon sends its replies. The field `schema` of [`Status`] contains
/// this version. When a field of a reply is renamed or removed, the version is increased.
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
    /// The state of the whole machine as the daemon sees it: the PUs (logical CPUs), the jobs, and warnings. The
    /// reply to the call `GetStatus` contains this value.
    Status {
        /// The version of the JSON format of this type: [`SCHEMA_VERSION`].
        schema: u32,
        /// The daemon's version.
        version: String,
        /// The process id of the daemon.
        pid: u32,
        /// `enforce` if the daemon changes affinity masks and cpusets, `observe` if it changes nothing.
        mode: String,
        /// How the daemon detects new processes: `netlink` (the kernel reports process events) or `polling`
        /// (of `/proc`).
        discovery: String,
        /// The host name, the PUs, and the numbers of cores, packages, NUMA nodes and L3 caches of the machine.
        node: Node,
        /// The PUs that are reserved for the system, the free PUs, and the PUs that are granted to jobs.
        pool: Pool,
        /// The largest requests for cores that the free cores can serve now.
        fits: Fits,
        /// The jobs on this machine, ordered by their ids.
        jobs: Vec<Job>,
        /// The conditions that need the attention of an administrator.
        warnings: Vec<Warning>,
        /// All cores of the machine, in hwloc's logical order.
        cores: Vec<Core>,
        /// The directory, such as `/run/pjwd/jobs`, that has a subdirectory with files for each job.
        #[serde(default)] job_files: String,
        /// The environment variables that tell a program the size of its job, each as `NAME=cores` or `NAME=pus`.
        /// `None` if the daemon is older than this field.
        #[serde(default)] variables: Option<Vec<String>>,
        /// Whether and how pjwd lends idle cores to other jobs. `None` if the daemon is older than this field.
        #[serde(default)] lending: Option<Lending>,
    }
    /// The machine: its host name, its PUs, and the numbers of its cores, packages, NUMA nodes and L3 caches.
    Node {
        /// The host name.
        hostname: String,
        /// The PUs of the machine, in the kernel's list format, such as `0-3,8`.
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
    /// The PUs of the machine by their use: for the system, free, or granted to jobs. Each field is a list in
    /// the kernel's format, such as `0-3,8`.
    Pool {
        /// The housekeeping PUs: the PUs that are reserved for the system and are not granted to jobs.
        housekeeping: String,
        /// The free PUs: the PUs that can be granted to a job now.
        free: String,
        /// The PUs that are granted to jobs.
        allocated: String,
        /// The lent PUs: those PUs in `allocated` that a job leaves idle, and that pjwd lends to another job.
        lent: String,
    }
    /// The sizes, in whole cores, of the largest requests that the free cores can serve now: inside one L3 cache, one
    /// NUMA node and one package, and on the whole machine. A core is free if all its online PUs are free. If the
    /// machine has no parts of a level, such as L3 caches, the field has the value of the next larger level.
    Fits {
        /// The largest request that a single L3 cache can serve: the most free cores in one L3 cache.
        l3: u32,
        /// The largest request that a single NUMA node can serve: the most free cores in one NUMA node.
        numa_node: u32,
        /// The largest request that a single package can serve: the most free cores in one package.
        package: u32,
        /// The largest request that the whole machine can serve: the number of its free cores.
        machine: u32,
    }
    /// A physical core, with its PUs and with the package, the NUMA node and the L3 cache that contain it.
    Core {
        /// The PUs of the core, in the kernel's list format, such as `0,64`.
        cpus: String,
        /// The kernel's number of the package that contains the core. `None` if unknown.
        package: Option<u32>,
        /// The kernel's number of the NUMA node that contains the core. `None` if unknown.
        numa_node: Option<u32>,
        /// hwloc's logical index of the L3 cache that contains the core. `None` if unknown.
        l3: Option<u32>,
    }
    /// A job on this machine: its request, the PUs that are granted to it, and counts of its processes and threads.
    Job {
        /// The id of the job, in the form `SOURCE:NAME`, such as `slurm:4711`.
        id: String,
        /// The origin of the job: a batch system such as `slurm`, or `manual` for a job that a user created.
        source: String,
        /// The user id of the owner.
        owner: u32,
        /// The state of the job:
        ///
        /// - `running`: it holds PUs and has processes.
        /// - `reserved`: it has no process. It holds PUs, or (class besteffort) gets PUs when it has a process.
        /// - `waiting`: it waits for cores. The key `starved` says whether a besteffort job is frozen meanwhile.
        /// - `observed`: the number of cores that it needs is unknown.
        /// - `released`: a command took its PUs back, although its batch system still runs the job.
        state: String,
        /// The class of the job: `guaranteed` (it has cores of its own, and the idle ones may be lent), `normal`
        /// (it has cores of its own, which are never lent), or `besteffort` (it borrows its cores).
        class: String,
        /// The number of cores that the job requested on this machine. A request for PUs is rounded up to
        /// whole cores. 0 if the number is unknown.
        requested_cores: u32,
        /// The PUs that are granted to the job, in the kernel's list format. Empty if no PUs are granted.
        cpus: String,
        /// Who chose the PUs of the job: `warden` (pjwd) or `scheduler` (the batch system). `warden` if no
        /// PUs are granted.
        granted_by: String,
        /// Whether some of the PUs in `cpus` may also be granted to another job.
        shared: bool,
        /// How pjwd restricts the job to its PUs: by a `cpuset`, by the `affinity` masks of its threads, or
        /// not at all (`none`).
        enforcement: String,
        /// The number of processes of the job.
        processes: u32,
        /// The number of threads of the job.
        threads: u32,
        /// The number of hot threads of the job: threads that run or wait for a PU most of the time.
        hot: u32,
        /// The number of threads of the job that pjwd has pinned to one PU.
        pinned: u32,
        /// The number of threads of the job whose effective affinity mask contains PUs that are not granted to the job.
        violations: u32,
        /// The number of the owner's processes that belong to no job, plus the number of processes of the job
        /// outside the cgroup that the batch system made for the job.
        strays: u32,
        /// The UTC time at which the daemon first detected or created the job (RFC 3339).
        since: String,
        /// Those of the PUs in `cpus` that the job borrows: free PUs, and PUs of other jobs.
        borrowed: String,
        /// Those of the PUs in `cpus` that other jobs borrow from this job.
        lent: String,
        /// The rule by which the processes are recognised, if the job is a provision (cores that pjwd keeps for a
        /// service). Empty for a provision without a rule. `None` if the job is not a provision.
        provision: Option<String>,
        /// The number of cores that the job can use at present, as a user or a program of the job told pjwd. At most
        /// the number that the job may have. `None` if no number was given: the job wants the cores that it was
        /// granted.
        wants: Option<u32>,
        /// The rule by which a NUMA node is chosen for each new process of the job: `rr` (in turn), `ll` (least
        /// loaded), `fill` (one after the other) or `packed` (that of the parent). `None` if no rule was requested.
        #[serde(default)] within_job: Option<String>,
    }
    /// A lasting condition that needs the attention of an administrator.
    Warning {
        /// The name of the condition, for scripts.
        code: String,
        /// The id of the job that the condition concerns. Empty if the condition concerns the whole machine.
        job: String,
        /// The description of the condition, in one sentence.
        text: String,
        /// What the user can do.
        remedy: String,
    }
    /// A process that belongs to a job, with its threads.
    Member {
        /// The process id.
        pid: u32,
        /// The start time of the process, in clock ticks of 10 ms since boot.
        start_time: u64,
        /// The name (comm) of the process, at most 15 bytes.
        comm: String,
        /// The user id of the process.
        uid: u32,
        /// The evidence that the process belongs to the job:
        ///
        /// - `registered`: a client named the process in a call.
        /// - `cgroup`: the process is in the cgroup of the job, or has the group id that Grid Engine gave to the job.
        /// - `parent`: the parent of the process belongs to the job.
        /// - `session`: the session or process group belongs to the job.
        /// - `provision`: the process matches the rule of a provision (cores that pjwd keeps for a service).
        /// - `environment`: a variable in the environment names the job.
        /// - `adopted`: the user of the process has exactly one job, and the option `adopt_strays` is on.
        evidence: String,
        /// The threads of the process.
        threads: Vec<Thread>,
        /// The number of the address space of the process: processes with the same number share one. `None` if the
        /// process shares its address space with no other process, or if this is not known.
        #[serde(default)] address_space: Option<u32>,
    }
    /// The memory use of a job, as one reading measured it. All sizes are in bytes. The reply to the call `GetMemory`
    /// contains this value.
    Memory {
        /// The source of the sizes: `smaps` (the pages of each process) or `cgroup` (counters of the job's memory
        /// cgroup: the shared part is an estimate, and concerns anonymous memory only).
        source: String,
        /// The UTC time of the reading (RFC 3339).
        read_at: String,
        /// The time for which the reading kept a PU busy, in microseconds.
        cost_us: u64,
        /// The sum of the resident set sizes. A page that n processes map is counted n times.
        rss: u64,
        /// The sum of the proportional set sizes: each page divided by the number of processes that map it. With the
        /// source `cgroup`: the anonymous memory and the mapped files that the kernel charges to the job's cgroup.
        pss: u64,
        /// The sum of the unique set sizes: pages that no other process maps. `None` with the source `cgroup`.
        uss: Option<u64>,
        /// The part of `rss` that is shared with other processes, in permille. With the source `cgroup`: the part of
        /// the anonymous memory.
        shared_permille: u32,
        /// The sum of the sizes of the page tables.
        page_tables: u64,
        /// The memory that is swapped out.
        swap: u64,
        /// The largest memory use so far: of the job's own memory cgroup, or else of all readings. `None` if unknown.
        peak: Option<u64>,
        /// The memory that the job can still get: what its cgroup or the machine has left, whichever is less.
        available: u64,
        /// The number of address spaces. Processes that share one are counted once in all sums. A process that could
        /// not be compared with others counts as one.
        address_spaces: u32,
        /// The memory on each NUMA node, counted as in `rss`. Empty if it was not requested.
        by_node: BTreeMap<String, u64>,
        /// The processes with the most memory, at most 1,000, ascending by pid.
        processes: Vec<ProcessMemory>,
        /// The number of processes that are not in `processes`. The sums include their memory.
        more_processes: u32,
        /// The number of processes that ended during the reading.
        gone: u32,
        /// The processes whose memory could not be read. The sums do not include their memory.
        denied: Vec<MemoryDenied>,
        /// The latest readings of this job, oldest first.
        history: Vec<MemorySample>,
        /// The warning that the job will probably run out of memory, and the remedy. `None` if this is not predicted.
        warning: Option<Warning>,
        /// The processes with most of their memory on NUMA nodes where none of their hot (mostly running) threads runs.
        /// If the memory on each NUMA node was not requested, as the last sample of their pages found them: the daemon
        /// takes one about once a minute. Empty if the daemon is older than this field.
        #[serde(default)] far: Vec<FarMemory>,
        /// The address spaces whose threads wait for one another to map memory. Empty with the source `cgroup`.
        #[serde(default)] map_lock_waits: Vec<MapLockWaits>,
    }
    /// An address space whose active threads wait for one another to map memory (mmap(2), munmap(2), page faults).
    MapLockWaits {
        /// The pids of the processes that share this address space and have active threads, ascending.
        pids: Vec<u32>,
        /// The number of threads that were active: running, waiting for a PU, or in uninterruptible sleep.
        threads: u32,
        /// The diagnosis, in one sentence.
        text: String,
        /// What the user can do.
        remedy: String,
    }
    /// A process with most of its memory on NUMA nodes where none of its hot threads runs (hot: mostly running).
    FarMemory {
        /// The process id.
        pid: u32,
        /// The number of hot threads of the process: threads that run or wait for a PU most of the time.
        busy_threads: u32,
        /// The NUMA nodes in which the hot threads ran last, by the kernel's numbers.
        thread_nodes: Vec<u32>,
        /// The NUMA node with most of the far memory.
        memory_node: u32,
        /// The memory on NUMA nodes where no hot thread runs, in bytes.
        far: u64,
        /// The diagnosis, in one sentence.
        text: String,
        /// What the user can do.
        remedy: String,
    }
    /// The memory use of one process of a job. All sizes are in bytes.
    ProcessMemory {
        /// The process id.
        pid: u32,
        /// The resident set size.
        rss: u64,
        /// The proportional set size. `None` with the source `cgroup`.
        pss: Option<u64>,
        /// The unique set size. `None` with the source `cgroup`.
        uss: Option<u64>,
        /// The size of the page tables.
        page_tables: u64,
        /// The memory that is swapped out.
        swap: u64,
        /// The number of the address space: processes with the same number share one. `None` if this is unknown.
        address_space: Option<u32>,
        /// The memory on each NUMA node. Empty if it was not requested.
        by_node: BTreeMap<String, u64>,
    }
    /// A process of a job whose memory use could not be read, with the reason.
    MemoryDenied {
        /// The process id.
        pid: u32,
        /// The user id of the process.
        uid: u32,
        /// The reason, in one sentence.
        why: String,
    }
    /// An earlier reading of the memory use of a job: its time and the measured sums. All sizes are in bytes.
    MemorySample {
        /// The UTC time of the reading (RFC 3339).
        time: String,
        /// The source of the sizes: `smaps` or `cgroup`, as in [`Memory::source`].
        source: String,
        /// The sum of the resident set sizes.
        rss: u64,
        /// The sum of the proportional set sizes. With the source `cgroup`: as in [`Memory::pss`].
        pss: u64,
        /// The shared part, in permille.
        shared_permille: u32,
        /// The number of processes.
        processes: u32,
    }
    /// A thread of a process that belongs to a job, with its CPU demand and its affinity mask.
    Thread {
        /// The thread id.
        tid: u32,
        /// The name (comm) of the thread, at most 15 bytes.
        comm: String,
        /// The kernel's letter for the state of the thread, such as `R` (running) or `S` (sleeping), as in
        /// `/proc/PID/stat`.
        state: String,
        /// The CPU demand of the thread: the share of time for which it runs or waits for a PU, in permille.
        demand: u32,
        /// Whether the thread is hot: it runs or waits for a PU most of the time.
        hot: bool,
        /// The PU on which the thread ran last.
        last_cpu: u32,
        /// The PUs on which the thread may run (its effective affinity mask), in the kernel's list format.
        allowed: String,
        /// The PU to which pjwd has pinned the thread. `None` if the thread is not pinned.
        pinned: Option<u32>,
        /// The reason why the thread has this affinity mask, in one sentence for users.
        because: String,
    }
    /// An event in the life of the daemon, of a job or of a process, such as a job that ended.
    Event {
        /// The UTC time of the event (RFC 3339).
        time: String,
        /// The name of the kind of event, such as `confined` or `violation`.
        event: String,
        /// The id of the job that the event concerns. Empty if the event concerns no single job.
        job: String,
        /// The description of the event, in one sentence.
        text: String,
        /// The id of the process that the event concerns. `None` if the event concerns no single process.
        pid: Option<u32>,
        /// The id of the thread that the event concerns. `None` if the event concerns no single thread.
        tid: Option<u32>,
        /// The PUs that the event concerns, in the kernel's list format. `None` if the event concerns no PUs.
        cpus: Option<String>,
    }
    /// A change of an affinity mask or a cpuset that the daemon would make next.
    Action {
        /// The kind of change. Changes of a mask: `confine` (to the PUs of the job), `repair` (confine again), `pin`
        /// (to one PU), `float` (end a pin), `unbind` (from PUs with too many running threads), `rebind` (end an
        /// unbind), `override` (replace the program's mask), `keep-off` (keep off the PUs of jobs) or `restore` (the
        /// original mask). Changes of a cpuset: `raise` (create, or change its PUs), `admit` (move a process in),
        /// `return` (move a process back), `open` (remove the limit) or `raze` (remove).
        action: String,
        /// The id of the job.
        job: String,
        /// The process id. 0 for a change of a cpuset that moves no process.
        pid: u32,
        /// The thread id. For a change of a cpuset, the same number as `pid`.
        tid: u32,
        /// The effective mask of the thread before the change. For a change of a cpuset, a cgroup path: of
        /// the cpuset, or of the cgroup that the process leaves.
        from: String,
        /// The effective mask of the thread after the change. For a new cpuset, its PUs. For a moved process,
        /// the path of the cgroup that it enters. Empty if a cpuset loses its limit or is removed.
        to: String,
        /// The reason for the change, in one sentence.
        why: String,
    }
    /// A warning in the reply to the call `Plan`. Most such warnings describe a change of affinity masks or cpusets
    /// that the daemon does not make, and the reason.
    Abstained {
        /// The name of the condition, for scripts.
        code: String,
        /// The id of the job that the change concerns. Empty if the change concerns no single job.
        job: String,
        /// The id of the process that the change concerns. `None` if the change concerns no single process.
        pid: Option<u32>,
        /// The change that is not made, and the reason, in one sentence.
        why: String,
        /// What the user can do.
        remedy: String,
    }
    /// The move of a job to other cores by a defragmentation. A defragmentation makes room for larger requests for
    /// cores.
    Move {
        /// The id of the job.
        job: String,
        /// The PUs that are granted to the job before the move, in the kernel's list format.
        from: String,
        /// The PUs that are granted to the job after the move: as many cores as before, of the same kinds.
        to: String,
        /// The benefit of the move, in one sentence.
        why: String,
    }
    /// The topology of a machine: its parts as a tree, with counts, kinds of core and devices.
    Topology {
        /// The number of packages.
        packages: u32,
        /// The number of dies. 0 if each package has only one die.
        #[serde(default)] dies: u32,
        /// The number of NUMA nodes with PUs: each is the nearest NUMA node of at least one PU.
        numa_nodes: u32,
        /// The number of NUMA nodes without PUs, such as CXL memory: none of them is the nearest NUMA node of a PU.
        #[serde(default)] memory_nodes: u32,
        /// The number of L3 caches.
        l3: u32,
        /// The number of physical cores.
        cores: u32,
        /// The number of PUs (logical CPUs).
        pus: u32,
        /// The numbers of PUs per core that occur on this machine, each number once: `[1, 2]` if some cores
        /// have one PU and others two.
        #[serde(default)] smt: Vec<u32>,
        /// The number of kinds of core. 1 if all cores are alike.
        kinds: u32,
        /// The kinds of core, the most efficient first. Empty if all cores are alike.
        #[serde(default)] core_kinds: Vec<CoreKind>,
        /// The online PUs of the machine, in the kernel's list format.
        cpus: String,
        /// The PUs that are offline, or that hwloc could not see when the topology was read.
        #[serde(default)] offline: String,
        /// The online PUs on which the process that read the topology may not run, because of its own cpuset.
        #[serde(default)] disallowed: String,
        /// The devices of the machine: GPUs, network cards and others.
        #[serde(default)] devices: Vec<Device>,
        /// The largest requests for cores that the free cores can serve now. `None` if the topology does not
        /// come from a running daemon.
        #[serde(default)] fits: Option<Fits>,
        /// The outermost parts of the machine, such as its packages. Each contains its own parts.
        tree: Vec<Domain>,
    }
    /// A part of the machine: a package, a die, a NUMA node, an L3 cache or a core.
    Domain {
        /// The kind of the part: `package`, `die`, `numa_node`, `l3` or `core`.
        kind: String,
        /// The number that identifies the part among the parts of its kind.
        number: u32,
        /// The PUs of the part, in the kernel's list format. For a NUMA node without PUs, the PUs near its memory.
        cpus: String,
        /// The local memory of a NUMA node, in bytes. 0 for a part of another kind.
        memory_bytes: u64,
        /// The index in [`Topology::core_kinds`] of the kind of this core. `None` if the part is not a core,
        /// or if all cores of the machine are alike.
        #[serde(default)] core_kind: Option<u32>,
        /// The number of free cores in this part. `None` if the topology does not come from a running daemon.
        #[serde(default)] fits: Option<u32>,
        /// The parts that this part contains. Empty for a core.
        children: Vec<Domain>,
    }
    /// A kind of core on a machine with several kinds, such as performance cores and efficiency cores.
    CoreKind {
        /// The name of the kind: `efficiency`, `performance`, or the vendor's name.
        name: String,
        /// The PUs of all cores of this kind, in the kernel's list format.
        cpus: String,
    }
    /// A device, such as a GPU or a network card, with the PUs and NUMA nodes near it.
    Device {
        /// The class of the device: `gpu`, `coprocessor`, `network` or `storage`.
        class: String,
        /// The names of the device in the operating system, such as `card0`. Empty without a driver.
        names: Vec<String>,
        /// The PCI address of the device. Empty if the device has none.
        address: String,
        /// The vendor and the model of the device, as text. Empty if unknown.
        model: String,
        /// The PUs near the device, in the kernel's list format.
        cpus: String,
        /// The kernel's numbers of the NUMA nodes near the device.
        numa_nodes: Vec<u32>,
    }
}
