//! The processes that are watched: a set in the kernel, and what is known to be in it.

use std::collections::BTreeSet;

use aya::maps::{HashMap, MapData, MapError};
use pjw_core::process::Pid;

use super::object::stopped;
use super::{MOST_WATCHED, PassError};

#[derive(Debug)]
pub(super) struct Watched {
    map: HashMap<MapData, u32, u32>,
    pids: BTreeSet<Pid>,
}

impl Watched {
    pub(super) fn new(map: HashMap<MapData, u32, u32>) -> Self {
        Self { map, pids: BTreeSet::new() }
    }

    /// Watches these processes and no others.
    pub(super) fn set(&mut self, processes: &BTreeSet<Pid>) -> Result<(), PassError> {
        if processes.len() > MOST_WATCHED as usize {
            return Err(PassError::TooMany { asked: processes.len() });
        }
        let gone: Vec<Pid> = self.pids.difference(processes).copied().collect();
        for pid in gone {
            match self.map.remove(&pid.0) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(stopped("watching", &error)),
            }
            self.pids.remove(&pid);
        }
        for &pid in processes {
            if self.pids.contains(&pid) {
                continue;
            }
            self.map.insert(pid.0, 0, 0).map_err(|error| stopped("watching", &error))?;
            self.pids.insert(pid);
        }
        Ok(())
    }
}
