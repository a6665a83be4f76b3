//! The program in the kernel: loaded, told what to report, read.

use std::fs::File;
use std::io::{self, Read};

use aya::Ebpf;
use aya::maps::{Array, MapData};
use aya::programs::{Iter, ProgramError};

use super::object::{Ground, refused, stopped, take_map, unavailable};
use super::record;
use super::watched::Watched;
use super::{MOST_WATCHED, PassError, PassSummary, ScanUnavailable, TaskRecord, Whom, self_check};
use crate::online::Online;

/// Twice what the kernel keeps of an iterator's output.
const BUFFER_BYTES: usize = 65_536;

/// `struct pass` of `tasks.bpf.c`: mode, bytes of a mask; tasks that were reported, and that were passed over.
type PassValue = [u64; 4];

/// A program in the kernel that tells of every task: see the [module](super). Dropping it removes it.
pub struct TaskScan {
    program: Ebpf,
    pass: Array<MapData, PassValue>,
    watched: Watched,
    mask_bytes: usize,
    online: Online,
    buffer: Vec<u8>,
    words: Vec<u64>,
}

impl std::fmt::Debug for TaskScan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskScan").field("watched", &self.watched).finish_non_exhaustive()
    }
}

impl TaskScan {
    /// Loads the program, which takes some 100 ms, and compares what it tells of our own task with /proc.
    ///
    /// # Errors
    /// What is missing here, and what to do about it.
    pub fn load() -> Result<Self, ScanUnavailable> {
        Self::load_on(&Ground::find()?)
    }

    pub(super) fn load_on(ground: &Ground) -> Result<Self, ScanUnavailable> {
        let online = Online::open().map_err(|error| refused("the online PUs", &error))?;
        let mut program = ground.load(MOST_WATCHED, |object, btf| {
            let loaded = iterator(object).and_then(|iterator| iterator.load("task", btf));
            loaded.map_err(|error| unavailable("verifying", &error))
        })?;
        let mut scan = Self {
            pass: Array::try_from(take_map(&mut program, "PASS")?)
                .map_err(|error| refused("PASS", &error))?,
            watched: Watched::new(
                take_map(&mut program, "WATCHED_TGIDS")?
                    .try_into()
                    .map_err(|error| refused("WATCHED_TGIDS", &error))?,
            ),
            program,
            mask_bytes: ground.mask_bytes,
            online,
            buffer: vec![0; BUFFER_BYTES],
            words: Vec::new(),
        };
        self_check::run(&mut scan)?;
        Ok(scan)
    }

    /// Has the kernel walk its tasks, and calls `each` for those that were asked for, by rising thread number.
    ///
    /// A pass is no snapshot: tasks are born and die meanwhile, and those born late may be missed.
    ///
    /// # Errors
    /// If the kernel refuses to go on.
    pub fn pass(
        &mut self,
        whom: Whom<'_>,
        each: &mut impl FnMut(TaskRecord<'_>),
    ) -> Result<PassSummary, PassError> {
        self.online.read().map_err(|error| stopped("the online PUs", &error))?;
        let (mode, processes) = match whom {
            Whom::Everybody(processes) => (0, processes),
            Whom::These(processes) => (1, processes),
        };
        self.watched.set(processes)?;
        let order = [mode, self.mask_bytes as u64, 0, 0];
        self.pass.set(0, order, 0).map_err(|error| stopped("beginning", &error))?;
        let file = self.open().map_err(|error| stopped("opening", &error))?;
        self.read(file, each)?;
        let [_, _, reported, passed_over] =
            self.pass.get(&0, 0).map_err(|error| stopped("ending", &error))?;
        Ok(PassSummary { reported, passed_over })
    }

    /// A file that, when read, makes the kernel walk its tasks once.
    fn open(&mut self) -> Result<File, ProgramError> {
        let program = iterator(&mut self.program)?;
        let link = program.attach()?;
        let file = program.take_link(link)?.into_file();
        file.map_err(|error| ProgramError::IOError(io::Error::other(error)))
    }

    fn read(&mut self, mut file: File, each: &mut impl FnMut(TaskRecord<'_>)) -> Result<(), PassError> {
        let mut filled = 0;
        loop {
            match file.read(&mut self.buffer[filled..]) {
                Ok(0) if filled == 0 => return Ok(()),
                Ok(0) => return Err(PassError::Malformed),
                Ok(length) => filled += length,
                // After a million tasks of which none was reported the kernel lets others run.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(stopped("reading", &error)),
            }
            let mut rest = &self.buffer[..filled];
            while let Some((record, others)) = record::first(rest).map_err(|_| PassError::Malformed)? {
                rest = others;
                record::decode_mask(record.mask, self.online.set().words(), &mut self.words);
                each(TaskRecord { allowed_words: &self.words, ..record.task });
            }
            // The kernel ends a read with a whole record, unless the buffer is too short.
            let left = rest.len();
            self.buffer.copy_within(filled - left..filled, 0);
            filled = left;
        }
    }
}

fn iterator(program: &mut Ebpf) -> Result<&mut Iter, ProgramError> {
    program.program_mut("scan").ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pjw_core::process::Pid;

    use super::*;

    #[test]
    fn masks_as_long_as_the_longest_are_told_and_compared() {
        let Some(mut scan) = crate::bpf::tests::scan() else { return };
        scan.mask_bytes = record::MASK_BYTES;
        let us = BTreeSet::from([Pid(std::process::id())]);
        let ours = pjw_core::process::Tid(nix::unistd::gettid().as_raw().cast_unsigned());
        let mut told = Vec::new();
        let summary = scan.pass(Whom::These(&us), &mut |task| told.push((task.tid, task.allowed()))).unwrap();
        assert_eq!(summary.reported, told.len() as u64);
        let allowed = told.into_iter().find(|(tid, _)| *tid == ours).unwrap().1;
        assert_eq!(allowed, crate::affinity::get(ours).unwrap());
    }
}
