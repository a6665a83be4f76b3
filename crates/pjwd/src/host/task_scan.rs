//! The BPF programs that read many threads at once and report affinity requests. They are loaded at the start and
//! when the key `scan` changes.

use pjw_linux::{bpf, node::LinuxMachine, sys::own_usage::trim_heap};
use tracing::info;

use crate::config::ScanInterface;

/// Loads the two BPF programs for `node`, the interface to the machine, if the setting `scan` allows BPF. One program
/// reads many threads at once. The other reports affinity requests (calls of sched_setaffinity(2)). A program that
/// the kernel does not accept is left out. Without the first program, `node` reads threads in /proc. Logs which
/// programs are used, and why the others are not.
pub(crate) fn load_bpf_programs(scan: ScanInterface, node: &mut LinuxMachine) {
    let (task_scan, affinity_monitor) = match scan {
        ScanInterface::Proc => {
            info!(
                "affinity requests beyond a job's cpuset are reported only for threads that were pinned: scan = \"proc\""
            );
            (None, None)
        }
        ScanInterface::Auto => load_available_programs(),
    };
    node.set_task_scan(task_scan);
    node.set_affinity_monitor(affinity_monitor);
}

/// Loads the BPF programs that this kernel supports. Returns `None` for a program that can't be loaded. Logs for each
/// program whether it is used.
fn load_available_programs() -> (Option<bpf::TaskScan>, Option<bpf::AffinityMonitor>) {
    let (task_scan, affinity_monitor) = bpf::load_programs();
    // Loading reads the BTF of the kernel, several megabytes that are not needed any more.
    trim_heap();
    match &task_scan {
        Ok(_) => info!("many threads at once are read with a BPF program (task scan)"),
        Err(why) => info!("threads are read in /proc: {why}"),
    }
    match &affinity_monitor {
        Ok(_) => {
            info!("affinity requests beyond a job's cpuset are reported (BPF program on sched_setaffinity)");
        }
        Err(why) => {
            info!(
                "affinity requests beyond a job's cpuset are reported only for threads that were pinned: {why}"
            );
        }
    }
    (task_scan.ok(), affinity_monitor.ok())
}
