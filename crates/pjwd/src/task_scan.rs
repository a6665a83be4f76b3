//! Whether the kernel's own program tells of threads, or /proc does: chosen at the start, and when the key changes.

use pjw_linux::bpf::TaskScan;
use pjw_linux::own_cost::give_memory_back;
use tracing::info;

use crate::config::Scan;

/// The task scan, if it is wanted and may be had; the log says which, and why not.
pub(crate) fn chosen(scan: Scan) -> Option<TaskScan> {
    let loaded = match scan {
        Scan::Proc => return None,
        Scan::Auto => TaskScan::load(),
    };
    // To load it, the kernel's description of all its types was read: megabytes that are not needed any more.
    give_memory_back();
    match loaded {
        Ok(scan) => {
            info!("the kernel tells of many threads at once (BPF task scan)");
            Some(scan)
        }
        Err(why) => {
            info!("many threads are looked at in /proc: {why}");
            None
        }
    }
}
