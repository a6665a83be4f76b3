//! Who asks for which PUs: a program in the kernel at the end of sched_setaffinity(2), and the ring it writes into.

use std::io;

use aya::Ebpf;
use aya::maps::{Array, MapData, RingBuf};
use aya::programs::fexit::FExitLink;
use aya::programs::{FExit, ProgramError};
use nix::unistd::gettid;
use pjw_core::cpuset::CpuSet;
use pjw_core::process::{Pid, Tid};
use pjw_core::snapshot::{Asked, Nanos};

use super::object::{Ground, refused, take_map, unavailable};
use super::record::{comm, u32_at, u64_at};
use super::{AsksUnavailable, Heard, ScanUnavailable};
use crate::affinity;

/// The function of the kernel, and the program's name.
const FUNCTION: &str = "sched_setaffinity";
const PROGRAM: &str = "asked";
/// `max_entries` of the ring; a machine of longer pages rounds it up, and is read in more looks.
const RING_BYTES: usize = 65_536;
/// What the kernel writes before each record of a ring.
const RING_HEADER_BYTES: usize = 8;
/// `offsetof(struct ask, mask)`.
const HEADER_BYTES: usize = 48;

/// `struct listening` of `tasks.bpf.c`: whose calls are not told; or whether no others are; bytes of a mask; records that
/// did not fit.
type Listening = [u64; 4];

fn listening(check: bool, mask_bytes: usize) -> Listening {
    [std::process::id().into(), check.into(), mask_bytes as u64, 0]
}

/// Tells who called sched_setaffinity(2): see the [module](super). Dropping it removes the program.
pub struct Asks {
    ring: RingBuf<MapData>,
    orders: Array<MapData, Listening>,
    /// How many records did not fit, as of the last time that was read.
    lost: u64,
    _link: FExitLink,
}

impl std::fmt::Debug for Asks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asks").field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Asks {
    /// Loads and attaches the program, and checks that it tells of a call of ours. After that, calls of this process are
    /// not told.
    ///
    /// # Errors
    /// What is missing here, and what to do about it.
    pub fn load() -> Result<Self, AsksUnavailable> {
        Self::load_on(&Ground::find()?)
    }

    pub(super) fn load_on(ground: &Ground) -> Result<Self, AsksUnavailable> {
        let mut object = ground.load(1, |object, btf| {
            let loaded = program(object).and_then(|program| program.load(FUNCTION, btf));
            loaded.map_err(|error| match unavailable("verifying", &error) {
                ScanUnavailable::KernelTooOld { .. } => refused("finding it", &error),
                other => other,
            })
        })?;
        let mut orders: Array<MapData, Listening> =
            take_map(&mut object, "LISTENING")?.try_into().map_err(|error| refused("LISTENING", &error))?;
        let listen = |orders: &mut Array<MapData, Listening>, check| {
            let order = listening(check, ground.mask_bytes);
            orders.set(0, order, 0).map_err(|error| refused("listening", &error))
        };
        listen(&mut orders, true)?;
        let attach = |program: &mut FExit| program.attach().and_then(|link| program.take_link(link));
        let link = program(&mut object).and_then(attach).map_err(|error| unavailable("attaching", &error))?;
        let ring = take_map(&mut object, "ASKS")?.try_into().map_err(|error| refused("ASKS", &error))?;
        let mut asks = Self { ring, orders, lost: 0, _link: link };
        asks.check()?;
        listen(&mut asks.orders, false)?;
        Ok(asks)
    }

    /// What came in since the last time, in no system call unless the ring was half full. A caller that goes on while
    /// this reads is not waited for.
    pub fn hear(&mut self) -> Heard {
        let mut heard = Heard::default();
        let mut read = 0;
        while read < RING_BYTES
            && let Some(record) = self.ring.next()
        {
            read += RING_HEADER_BYTES + record.len();
            heard.asked.extend(asked(&record));
        }
        // It was full at some time since, or nothing is lost.
        if read >= RING_BYTES / 2
            && let Ok([_, _, _, lost]) = self.orders.get(&0, 0)
        {
            heard.lost = lost.saturating_sub(self.lost);
            self.lost = lost;
        }
        heard
    }

    /// Asks for the mask that we have, on a thread that ends with it: the kernel remembers who asked.
    fn check(&mut self) -> Result<(), AsksUnavailable> {
        let ask = || {
            let tid = Tid(gettid().as_raw().cast_unsigned());
            let mask = affinity::get(tid)?;
            affinity::set(tid, &mask).map(|()| (tid, mask))
        };
        let done = std::thread::scope(|scope| scope.spawn(ask).join());
        let (tid, mask) = match done {
            Ok(done) => done.map_err(|errno| refused("asking for our own mask", &io::Error::from(errno)))?,
            Err(_) => return Err(AsksUnavailable::Deaf { told: String::from("nothing: the check failed") }),
        };
        let told = self.hear().asked;
        let ours = Pid(std::process::id());
        let is_right = |asked: &Asked| {
            (asked.process, asked.caller) == (ours, tid) && asked.target.is_none() && asked.cpus == mask
        };
        // While it is checked nobody else is told: a job that asks all the time can't drown us.
        if told.iter().any(is_right) {
            Ok(())
        } else {
            Err(AsksUnavailable::Deaf { told: format!("{told:?}") })
        }
    }
}

fn program(object: &mut Ebpf) -> Result<&mut FExit, ProgramError> {
    object.program_mut(PROGRAM).ok_or(ProgramError::UnexpectedProgramType)?.try_into()
}

/// One record; `None` if it is none.
fn asked(record: &[u8]) -> Option<Asked> {
    let (header, mask) = record.split_first_chunk::<HEADER_BYTES>()?;
    let (caller, whom) = (u32_at(header, 0), u32_at(header, 12));
    let words: Vec<u64> = mask.chunks_exact(8).map(|word| u64_at(word, 0)).collect();
    Some(Asked {
        caller: Tid(caller),
        process: Pid(u32_at(header, 4)),
        parent: Pid(u32_at(header, 8)),
        comm: comm(&header[32..]),
        at: Nanos(u64_at(header, 24)),
        target: Some(Tid(whom)).filter(|_| whom != 0 && whom != caller),
        cpus: CpuSet::from_words(&words),
        refused: u64_at(header, 16) != 0,
    })
}

#[cfg(test)]
mod tests {
    use pjw_core::process::Comm;

    use super::*;

    #[test]
    fn a_record_is_read_with_a_mask_of_any_length() {
        let mut record: Vec<u8> = [7_u32, 6, 5, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        record.extend((-22_i64).to_ne_bytes());
        record.extend(9_u64.to_ne_bytes());
        record.extend(b"mpirun\0\0\0\0\0\0\0\0\0\0");
        let mut expected = Asked {
            caller: Tid(7),
            process: Pid(6),
            parent: Pid(5),
            comm: Comm::from("mpirun"),
            at: Nanos(9),
            target: None,
            cpus: CpuSet::new(),
            refused: true,
        };
        assert_eq!(asked(&record), Some(expected.clone()));
        for end in 0..record.len() {
            assert_eq!(asked(&record[..end]), None, "{end}");
        }
        record.extend([0_u64; 99].into_iter().flat_map(u64::to_ne_bytes));
        record.extend(0b101_u64.to_ne_bytes());
        expected.cpus = "6336,6338".parse().unwrap();
        assert_eq!(asked(&record), Some(expected));
    }

    #[test]
    fn whoever_names_itself_asks_for_itself() {
        let target = |whom: u32| {
            let record = [[7_u32, 6, 5, whom].map(u32::to_ne_bytes).concat(), vec![0; 32]].concat();
            asked(&record).unwrap().target
        };
        assert_eq!([target(0), target(7), target(6)], [None, None, Some(Tid(6))]);
    }
}
