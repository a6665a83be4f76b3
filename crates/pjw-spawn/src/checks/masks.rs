//! Whether each placement lies inside the caller's own mask, and so inside its cpuset and on PUs that are online.

use std::collections::HashSet;
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;

use super::error::CheckError;
use crate::instance::Instance;
use crate::own_policy::own_mask;

const ONLINE: &str = "/sys/devices/system/cpu/online";

/// Checks each placement once.
pub(super) fn check_masks(instances: &[Instance]) -> Result<(), CheckError> {
    let allowed = own_mask().map_err(unreadable)?;
    let mut checked = HashSet::new();
    for instance in instances.iter().filter(|other| checked.insert(Arc::as_ptr(&other.placement))) {
        let Some(cpus) = &instance.placement.cpus else { continue };
        if let Some(why) = why_outside(cpus, &allowed) {
            return Err(CheckError::InvalidMask { rank: instance.rank, cpus: cpus.clone(), why, allowed });
        }
    }
    Ok(())
}

fn why_outside(cpus: &CpuSet, allowed: &CpuSet) -> Option<String> {
    if cpus.is_empty() {
        return Some("a process needs at least one CPU".to_owned());
    }
    let outside = cpus.difference(allowed);
    if outside.is_empty() {
        return None;
    }
    let online: Option<CpuSet> =
        std::fs::read_to_string(ONLINE).ok().and_then(|list| list.trim().parse().ok());
    let offline = online.map(|online| outside.difference(&online)).unwrap_or_default();
    Some(if offline.is_empty() {
        format!("this process may not run on {outside}")
    } else {
        format!("{offline} is not online")
    })
}

fn unreadable(errno: Errno) -> CheckError {
    CheckError::SystemCall { what: "the affinity mask of this process can't be read", errno }
}
