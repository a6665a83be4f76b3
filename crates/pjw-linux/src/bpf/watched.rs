//! The processes that are watched, and which of them a pass met.
//!
//! The kernel's map has a slot number for each, which its records bring back: so that a process was met is noted
//! without looking anything up.

use std::collections::{BTreeMap, BTreeSet};

use aya::maps::{HashMap, MapData, MapError};
use pjw_core::process::Pid;

use super::{MOST_WATCHED, WatchError};

/// `struct watched` of `tasks.bpf.c`: slot, first and last pass that met it.
type Value = [u32; 3];

#[derive(Debug)]
pub(super) struct Watched {
    map: HashMap<MapData, u32, Value>,
    slots: BTreeMap<Pid, u32>,
    /// By slot: the last pass that met its process.
    met: Vec<u32>,
    free: Vec<u32>,
}

impl Watched {
    pub(super) fn new(map: HashMap<MapData, u32, Value>) -> Self {
        Self { map, slots: BTreeMap::new(), met: Vec::new(), free: Vec::new() }
    }

    /// Watches these processes and no others. Until the next pass a new one counts as met in the last, `pass`.
    pub(super) fn set(&mut self, processes: &BTreeSet<Pid>, pass: u32) -> Result<(), WatchError> {
        if processes.len() > MOST_WATCHED as usize {
            return Err(WatchError::TooMany { asked: processes.len() });
        }
        let gone: Vec<Pid> = self.slots.keys().filter(|pid| !processes.contains(pid)).copied().collect();
        for pid in gone {
            match self.map.remove(&pid.0) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(error) => return Err(refused(pid, &error)),
            }
            self.free.extend(self.slots.remove(&pid));
        }
        for &pid in processes {
            if self.slots.contains_key(&pid) {
                continue;
            }
            // There are fewer than MOST_WATCHED, so the number fits.
            let slot = self.free.last().copied().unwrap_or(u32::try_from(self.met.len()).unwrap_or(u32::MAX));
            self.map.insert(pid.0, [slot, 0, 0], 0).map_err(|error| refused(pid, &error))?;
            if self.free.pop().is_none() {
                self.met.push(pass);
            }
            self.note(slot, pass);
            self.slots.insert(pid, slot);
        }
        Ok(())
    }

    /// A pass met the process in this slot.
    pub(super) fn note(&mut self, slot: u32, pass: u32) {
        if let Some(met) = self.met.get_mut(slot as usize) {
            *met = pass;
        }
    }

    /// Those that a pass did not meet.
    pub(super) fn not_met(&self, pass: u32) -> impl Iterator<Item = Pid> {
        let met = move |slot: u32| self.met.get(slot as usize) == Some(&pass);
        self.slots.iter().filter(move |(_, slot)| !met(**slot)).map(|(pid, _)| *pid)
    }
}

fn refused(pid: Pid, error: &MapError) -> WatchError {
    WatchError::Kernel { pid, why: super::scan::chain(error) }
}
