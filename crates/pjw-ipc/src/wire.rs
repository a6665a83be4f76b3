//! The types of the interface, as they stand on the wire and in `pjwctl --json`.
//!
//! Their field names are public: fields may be added, but renaming or removing one needs a new [`SCHEMA`] and an
//! entry in the CHANGELOG. A test compares them with the `.varlink` file.

use serde::{Deserialize, Serialize};

/// The number of the form of [`Status`].
pub const SCHEMA: u32 = 1;

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
    /// The whole machine in one answer.
    Status {
        /// [`SCHEMA`].
        schema: u32,
        /// The daemon's version.
        version: String,
        /// The daemon's process.
        pid: u32,
        /// `enforce` or `observe`.
        mode: String,
        /// How new processes are found: `netlink` or `polling`.
        discovery: String,
        /// The machine.
        node: Node,
        /// Who holds what.
        pool: Pool,
        /// What still fits where.
        fits: Fits,
        /// The jobs.
        jobs: Vec<Job>,
        /// What a person should know.
        warnings: Vec<Warning>,
        /// Every core, in the machine's order.
        cores: Vec<Core>,
    }
    /// The machine, counted.
    Node {
        /// Its name.
        hostname: String,
        /// Its PUs.
        cpus: String,
        /// Physical cores.
        cores: u32,
        /// Packages.
        packages: u32,
        /// NUMA nodes with PUs.
        numa_nodes: u32,
        /// L3 caches.
        l3: u32,
    }
    /// Who holds what.
    Pool {
        /// PUs that no job ever gets.
        housekeeping: String,
        /// PUs that nobody holds.
        free: String,
        /// PUs that jobs hold.
        allocated: String,
    }
    /// The largest request, in cores, that fits one such domain.
    Fits {
        /// One L3.
        l3: u32,
        /// One NUMA node.
        numa_node: u32,
        /// One package.
        package: u32,
        /// The machine.
        machine: u32,
    }
    /// A physical core and where it is.
    Core {
        /// Its PUs.
        cpus: String,
        /// Its package's number.
        package: Option<u32>,
        /// Its NUMA node's number.
        numa_node: Option<u32>,
        /// Its L3's number.
        l3: Option<u32>,
    }
    /// A job.
    Job {
        /// `source:id`.
        id: String,
        /// Its source.
        source: String,
        /// Its user.
        owner: u32,
        /// `running`, `reserved` (no process yet), `waiting` (for cores) or `observed` (count unknown).
        state: String,
        /// `guaranteed`, `normal` or `besteffort`.
        class: String,
        /// How many cores of this machine it asked for, whatever it counted in; 0 if nobody said.
        requested_cores: u32,
        /// What it holds.
        cpus: String,
        /// `warden` or `scheduler`.
        granted_by: String,
        /// Whether another job holds some of them too.
        shared: bool,
        /// `cpuset`, `affinity` or `none`.
        enforcement: String,
        /// How many processes belong to it.
        processes: u32,
        /// How many threads those have.
        threads: u32,
        /// How many of them run most of the time.
        hot: u32,
        /// How many are pinned.
        pinned: u32,
        /// How many are outside its cores now.
        violations: u32,
        /// How many processes of its user belong to no job, and how many of its own are outside its scheduler's cgroup.
        strays: u32,
        /// Since when it is known.
        since: String,
    }
    /// Something a person should know.
    Warning {
        /// Its name for scripts.
        code: String,
        /// The job it concerns; empty for the machine.
        job: String,
        /// What is the matter.
        text: String,
        /// What to do.
        remedy: String,
    }
    /// A process of a job.
    Member {
        /// Its number.
        pid: u32,
        /// When it started, in clock ticks since boot.
        start_time: u64,
        /// Its name.
        comm: String,
        /// Its user.
        uid: u32,
        /// How it is known to belong to the job: `registered`, `cgroup`, `parent`, `session`, `environment` or `adopted`.
        evidence: String,
        /// Its threads.
        threads: Vec<Thread>,
    }
    /// A thread of a member.
    Thread {
        /// Its number.
        tid: u32,
        /// Its name.
        comm: String,
        /// The kernel's letter for its state.
        state: String,
        /// How much it wants a PU, in permille.
        demand: u32,
        /// Whether it counts as running.
        hot: bool,
        /// Where it last ran.
        last_cpu: u32,
        /// Where it may run.
        allowed: String,
        /// The PU it is pinned to.
        pinned: Option<u32>,
        /// Why it may run there.
        because: String,
    }
    /// Something that happened.
    Event {
        /// When.
        time: String,
        /// What kind of event.
        event: String,
        /// To which job; empty for the machine.
        job: String,
        /// In one sentence.
        text: String,
        /// To which process.
        pid: Option<u32>,
        /// To which thread.
        tid: Option<u32>,
        /// With which PUs.
        cpus: Option<String>,
    }
    /// A change that the next cycle would make.
    Action {
        /// `confine`, `repair`, `pin`, `float` or `restore`.
        action: String,
        /// For which job.
        job: String,
        /// Of which process.
        pid: u32,
        /// Of which thread.
        tid: u32,
        /// The mask it has.
        from: String,
        /// The mask it would get.
        to: String,
        /// Why.
        why: String,
    }
    /// Something that is not done.
    Abstained {
        /// Its name for scripts.
        code: String,
        /// The job it concerns; empty for the machine.
        job: String,
        /// The process it concerns.
        pid: Option<u32>,
        /// What and why.
        why: String,
        /// What to do.
        remedy: String,
    }
    /// A job that goes elsewhere so that larger requests fit.
    Move {
        /// Which job.
        job: String,
        /// What it holds before.
        from: String,
        /// What it holds after: as many, of cores of the same kinds.
        to: String,
        /// What that is good for.
        why: String,
    }
    /// The machine as a tree.
    Topology {
        /// Packages.
        packages: u32,
        /// Pieces of silicon, where packages are made of several; else 0.
        #[serde(default)] dies: u32,
        /// NUMA nodes near which there are PUs.
        numa_nodes: u32,
        /// NUMA nodes that are the nearest of no PU: memory alone.
        #[serde(default)] memory_nodes: u32,
        /// L3 caches.
        l3: u32,
        /// Physical cores.
        cores: u32,
        /// PUs.
        pus: u32,
        /// How many PUs cores have, each number once.
        #[serde(default)] smt: Vec<u32>,
        /// Kinds of core.
        kinds: u32,
        /// The kinds, the most efficient first; empty where all cores are alike as far as anybody knows.
        #[serde(default)] core_kinds: Vec<CoreKind>,
        /// All PUs.
        cpus: String,
        /// PUs that don't run, or were hidden from whoever saved the topology.
        #[serde(default)] offline: String,
        /// PUs that the daemon's own cpuset forbids.
        #[serde(default)] disallowed: String,
        /// Graphics and network cards and the like.
        #[serde(default)] devices: Vec<Device>,
        /// The largest request that still fits one domain of each level; only of a machine with a warden.
        #[serde(default)] fits: Option<Fits>,
        /// The largest parts, with the parts in them.
        tree: Vec<Domain>,
    }
    /// A part of the machine.
    Domain {
        /// `package`, `die`, `numa_node`, `l3` or `core`.
        kind: String,
        /// Its number.
        number: u32,
        /// Its PUs; of a NUMA node that is memory alone, those near it.
        cpus: String,
        /// Its local memory.
        memory_bytes: u64,
        /// Of a core on a machine of several kinds: its place in `core_kinds`.
        #[serde(default)] core_kind: Option<u32>,
        /// How many of its cores are free: the largest request that fits it; only of a machine with a warden.
        #[serde(default)] fits: Option<u32>,
        /// The parts in it.
        children: Vec<Domain>,
    }
    /// A kind of core.
    CoreKind {
        /// `efficiency`, `performance`, or what the vendor says.
        name: String,
        /// Its PUs.
        cpus: String,
    }
    /// A device and where it hangs.
    Device {
        /// `gpu`, `coprocessor`, `network` or `storage`.
        class: String,
        /// What the system calls it.
        names: Vec<String>,
        /// Its PCI address; empty where it has none.
        address: String,
        /// Maker and model, where known.
        model: String,
        /// The PUs near it.
        cpus: String,
        /// The NUMA nodes near it.
        numa_nodes: Vec<u32>,
    }
}
