//! The affinity masks of pjwd's own threads: they stay off the cores that owners have lent.
//!
//! An owner's thread that wakes up on a lent core preempts the borrower at once. If a thread of pjwd then preempts the
//! owner's thread, the kernel may let the borrower run next, for up to 4 ms: a thread that is not eligible is not picked,
//! whatever the weights are (`pick_eevdf` in kernel/sched/fair.c, Linux 6.6 and later). Only a wake-up has a special case for
//! idle priority. And pjwd runs right after each first wake-up of an idle owner, because the BPF program reports it.

use std::fs;

use nix::errno::Errno;
use nix::unistd::gettid;
use pjw_core::cpuset::CpuSet;
use pjw_core::ids::Tid;
use pjw_linux::sys::affinity;
use tracing::debug;

/// The affinity masks of the threads of pjwd. While cores are lent, the masks leave these cores out.
#[derive(Debug, Default)]
pub(super) struct OwnAffinity {
    /// The mask that the event loop had before it was changed first. `None` before that.
    original: Option<CpuSet>,
    /// The lent PUs that the masks leave out now.
    avoided: CpuSet,
}

impl OwnAffinity {
    /// Restricts all threads of this process to the PUs of the original mask that are not in `lent`. `lent` are the PUs
    /// that jobs lend to other jobs. If no PU would be left, or if `lent` is empty, the threads get the original mask. Does
    /// nothing if `lent` is the same as at the last call. A refusal by the kernel is logged at the level debug.
    pub(super) fn avoid(&mut self, lent: &CpuSet) {
        if *lent == self.avoided {
            return;
        }
        let original = match &self.original {
            Some(original) => original,
            None => match affinity::get_mask(Tid(gettid().as_raw().unsigned_abs())) {
                Ok(mask) => self.original.insert(mask),
                Err(error) => return debug!(%error, "the own affinity mask can't be read"),
            },
        };
        let mask = mask_without(original, lent);
        let mut is_refused = false;
        for tid in own_threads() {
            // A thread that has ended needs no mask.
            if let Err(error) = affinity::set_mask(tid, &mask)
                && error != Errno::ESRCH
            {
                is_refused = true;
                debug!(%error, cpus = %mask, "the own threads can't stay off lent CPUs");
            }
        }
        if is_refused {
            return;
        }
        self.avoided.clone_from(lent);
        if lent.is_empty() {
            // It is read again at the next lending: an administrator may change it meanwhile.
            self.original = None;
        }
    }
}

/// The PUs of `original` that are not lent; all of `original` if each of them is lent.
fn mask_without(original: &CpuSet, lent: &CpuSet) -> CpuSet {
    let left = original.difference(lent);
    if left.is_empty() { original.clone() } else { left }
}

fn own_threads() -> Vec<Tid> {
    let entries = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Tid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_has_no_lent_pu_unless_all_are_lent() {
        let mask = |lent: &str| mask_without(&"0-3".parse().unwrap(), &lent.parse().unwrap()).to_string();
        assert_eq!(mask(""), "0-3");
        assert_eq!(mask("1,3"), "0,2");
        assert_eq!(mask("4"), "0-3");
        assert_eq!(mask("0-7"), "0-3");
    }
}
