//! Whether each placement lies inside the caller's own mask, and so inside its cpuset and on PUs that are online.

use std::collections::HashSet;
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::cpuset::CpuSet;

use super::error::CheckError;
use crate::instance::Instance;
use crate::own_policy::own_mask;

const ONLINE: &str = "/sys/devices/system/cpu/online";

/// Checks the CPUs in the placement of each instance: there must be at least one CPU, and all must be in the affinity
/// mask of the calling thread. A placement that several instances share is checked once.
pub(super) fn check_masks(instances: &[Instance]) -> Result<(), CheckError> {
    let allowed = own_mask().map_err(unreadable)?;
    let mut checked = HashSet::new();
    for instance in instances {
        if !checked.insert(Arc::as_ptr(&instance.placement)) {
            continue;
        }
        let Some(cpus) = &instance.placement.cpus else { continue };
        if let Some(why) = mask_error_text(cpus, &allowed, online) {
            return Err(CheckError::InvalidMask { rank: instance.rank, cpus: cpus.clone(), why, allowed });
        }
    }
    Ok(())
}

/// Returns the CPUs that are online. `None` if the kernel does not tell.
fn online() -> Option<CpuSet> {
    std::fs::read_to_string(ONLINE).ok().and_then(|list| list.trim().parse().ok())
}

/// Returns the reason why a process can't get the affinity mask `cpus`: the mask is empty, or contains CPUs that are
/// not in `allowed`. `None` if the process can get the mask. `online` returns the online CPUs, and is called only if a
/// CPU is not in `allowed`. If such a CPU is offline, the reason says so.
fn mask_error_text(
    cpus: &CpuSet,
    allowed: &CpuSet,
    online: impl FnOnce() -> Option<CpuSet>,
) -> Option<String> {
    if cpus.is_empty() {
        return Some("a process needs at least one CPU".to_owned());
    }
    let outside = cpus.difference(allowed);
    if outside.is_empty() {
        return None;
    }
    let offline = online().map(|online| outside.difference(&online)).unwrap_or_default();
    Some(if offline.is_empty() {
        format!("this process may not run on {outside}")
    } else {
        format!("{offline} is not online")
    })
}

fn unreadable(errno: Errno) -> CheckError {
    CheckError::SystemCall { what: "the affinity mask of this process can't be read", errno }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(cpus: &str, allowed: &str, online: Option<&str>) -> Option<String> {
        let online = online.map(|list| list.parse().unwrap());
        mask_error_text(&cpus.parse().unwrap(), &allowed.parse().unwrap(), || online)
    }

    #[test]
    fn the_cpus_of_a_placement_that_are_offline_are_named() {
        assert_eq!(why("1-2", "0-3", None), None);
        assert_eq!(why("2-5", "0-3", Some("0-4")), Some("5 is not online".to_owned()));
        assert_eq!(why("4-7", "", Some("0-3")), Some("4-7 is not online".to_owned()));
    }

    #[test]
    fn a_cpu_that_is_online_and_outside_of_the_own_mask_is_named() {
        assert_eq!(why("2-5", "0-3", Some("0-7")), Some("this process may not run on 4-5".to_owned()));
        assert_eq!(why("5", "0-3", None), Some("this process may not run on 5".to_owned()));
        assert_eq!(why("", "0-3", Some("0-3")), Some("a process needs at least one CPU".to_owned()));
    }
}
