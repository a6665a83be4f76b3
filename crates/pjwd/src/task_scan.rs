//! Whether the kernel's own programs tell of threads, and of who asks for which CPUs, or /proc does: chosen at the start,
//! and when the key changes.

use pjw_linux::bpf;
use pjw_linux::node::LinuxNode;
use pjw_linux::own_cost::give_memory_back;
use tracing::info;

use crate::config::Scan;

/// Has the node look by them, if that is wanted and may be had; the log says which, and why not.
pub(crate) fn choose(scan: Scan, node: &mut LinuxNode) {
    let (scan, asks) = match scan {
        Scan::Proc => {
            info!(
                "who asks for more than the cpuset of its job is told only if it had been pinned: scan = \"proc\""
            );
            (None, None)
        }
        Scan::Auto => loaded(),
    };
    node.use_task_scan(scan);
    node.use_asks(asks);
}

fn loaded() -> (Option<bpf::TaskScan>, Option<bpf::Asks>) {
    let (scan, asks) = bpf::load();
    // To load them, the kernel's description of all its types was read: megabytes that are not needed any more.
    give_memory_back();
    match &scan {
        Ok(_) => info!("the kernel tells of many threads at once (BPF task scan)"),
        Err(why) => info!("many threads are looked at in /proc: {why}"),
    }
    match &asks {
        Ok(_) => {
            info!("who asks for more than the cpuset of its job is told (BPF program at sched_setaffinity)");
        }
        Err(why) => {
            info!("who asks for more than the cpuset of its job is told only if it had been pinned: {why}");
        }
    }
    (scan.ok(), asks.ok())
}
