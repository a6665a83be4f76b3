//! One process as a look finds it, and what is remembered of it until the next one.
//!
//! What was told by a pass of the kernel's task scan is not read again; what wasn't is read in /proc. A thread's `stat` is
//! read only if the thread ran. A look takes memory for a process, and for a thread only where it is new, or where its mask
//! is of more than 128 PUs.

use std::mem;
use std::sync::Arc;

use nix::errno::Errno;
use pjw_core::cpuset::Pu;
use pjw_core::process::{Comm, Pid, ProcessId, StartTime, Tid, Uid};
use pjw_core::snapshot::{Marks, Process, Thread};

use super::told::ToldProcess;
use super::{LinuxNode, is_absent};
use crate::affinity;
use crate::errno::{Meaning, meaning};
use crate::procfs::{SchedStat, Stat};

/// A process's threads are listed again until two lists agree, so often at most: a process that makes threads
/// as fast as it can is looked at again in the next round.
const MOST_LISTS: usize = 4;
/// After so many full looks a process's cgroups are read though it seems to be where it was.
pub(super) const PLACE_LASTS: u32 = 7;

/// What is remembered of a process between two looks.
#[derive(Debug)]
pub(super) struct Acquaintance {
    id: ProcessId,
    uid: Uid,
    pub(super) marks: Marks,
    /// Where the marks say it is in the hierarchy of the cpusets.
    cgroup: Option<Arc<str>>,
    /// The program whose marks these are; `None` before they are read.
    program: Option<Program>,
    /// By their numbers.
    threads: Vec<ThreadFacts>,
    /// How many threads it had.
    pub(super) thread_count: usize,
    /// [`crate::bpf::TaskRecord::place`] of the last pass before its cgroups were read; 0 if none told it.
    pub(super) told: u64,
    /// The place that its cgroups are believed to be at; 0 if they are to be read.
    pub(super) place: u64,
}

/// What a look begins with: who a process is and what it does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Face {
    pub(super) start: StartTime,
    pub(super) parent: Pid,
    pub(super) group: Pid,
    pub(super) session: Pid,
    pub(super) comm: Comm,
    pub(super) kernel: bool,
    pub(super) state: char,
    pub(super) stack: u64,
}

impl From<Stat> for Face {
    fn from(stat: Stat) -> Self {
        let Stat { start, parent, group, session, comm, kernel, state, stack, .. } = stat;
        Self { start, parent, group, session, comm, kernel, state, stack }
    }
}

/// What tells one exec of a process from the next, without an event that says so: a new name, or another address
/// of the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Program {
    comm: Comm,
    stack: u64,
}

/// What is remembered of a thread: read again only when it ran.
#[derive(Debug, Clone, Copy)]
struct ThreadFacts {
    tid: Tid,
    start: StartTime,
    comm: Comm,
    state: char,
    last_cpu: Pu,
    ran: SchedStat,
}

/// Who is asked for what all threads of a process have in common.
#[derive(Debug, Clone, Copy)]
struct Speaker {
    /// Its first thread, or another one if that has ended.
    voice: Pid,
    /// Another number as soon as it is in another cgroup, 0 if nobody told it.
    place: u64,
}

impl LinuxNode {
    /// Looks at one process, with what a pass told of it, if one did.
    ///
    /// # Errors
    /// `ESRCH` if it is gone, or over and only not waited for.
    pub(super) fn look_at(
        &mut self,
        pid: Pid,
        with_threads: bool,
        told: Option<ToldProcess>,
    ) -> Result<Process, Errno> {
        let face = match &told {
            Some(told) => told.face,
            // The first thread's own stat: the process's would sum over all threads, which costs time for each.
            None => Face::from(self.proc.thread_stat(pid, Tid(pid.0))?),
        };
        let id = ProcessId { pid, start: face.start };
        let is_known = self.known.get(&pid).is_some_and(|known| known.id == id);
        if !is_known {
            self.meet(id);
        }
        // A first thread that has ended no longer shows where its process is, and what it is.
        let voice = if matches!(face.state, 'Z' | 'X') { self.survivor(pid)? } else { pid };
        let told_by_voice = told.as_ref().filter(|_| voice == pid);
        let place = told_by_voice.map_or(0, |told| told.place);
        let mask = match told_by_voice {
            Some(told) => Some(told.mask.clone()),
            None => affinity::get(Tid(voice.0)).ok(),
        };
        let marks = self.fresh_marks(&face, id, Speaker { voice, place }, !is_known)?;
        let threads = match told {
            Some(told) => {
                self.note_told(pid, &told);
                told.threads.filter(|_| !face.kernel)
            }
            None => (with_threads && !face.kernel).then(|| self.threads_of(pid)).transpose()?,
        };
        let known = self.known.get(&pid).ok_or(Errno::ESRCH)?;
        Ok(Process {
            id,
            parent: face.parent,
            group: face.group,
            session: face.session,
            uid: known.uid,
            comm: face.comm,
            kernel: face.kernel,
            mask,
            cgroup: known.cgroup.clone(),
            marks,
            claims: None,
            threads,
            quiet_until: None,
        })
    }

    fn meet(&mut self, id: ProcessId) {
        let known = Acquaintance {
            id,
            // That of a process that is no kernel thread comes with its marks.
            uid: Uid::ROOT,
            marks: Marks::default(),
            cgroup: None,
            program: None,
            threads: Vec::new(),
            thread_count: 1,
            told: 0,
            place: 0,
        };
        self.known.insert(id.pid, known);
    }

    /// What was read of its threads in /proc is old now.
    fn note_told(&mut self, pid: Pid, told: &ToldProcess) {
        if let Some(known) = self.known.get_mut(&pid) {
            known.uid = told.uid;
            known.thread_count = told.thread_count.unwrap_or(known.thread_count);
            known.threads = Vec::new();
        }
    }

    /// Before a full look: whose cgroups are to be read again though their place is the same. All, if there is a hierarchy
    /// more or less, of which no place tells; else some of them, so that whatever else a place does not tell (a cgroup that
    /// was renamed in v1) is known after some full looks.
    pub(super) fn forget_places(&mut self, all: bool) {
        self.full_looks = self.full_looks.wrapping_add(1);
        for (pid, known) in &mut self.known {
            if all || pid.0.wrapping_add(self.full_looks).is_multiple_of(PLACE_LASTS) {
                known.place = 0;
            }
        }
    }

    /// Reads anew whose a process is: a login runs no other program between its user's and its own.
    pub(super) fn ask_whose(&mut self, pid: Pid) {
        if let Some(known) = self.known.get_mut(&pid)
            && let Ok(status) = self.proc.status(pid)
        {
            known.uid = Uid(status.uid);
        }
    }

    /// Another thread of a process whose first one has ended.
    ///
    /// # Errors
    /// `ESRCH` if there is none: then nobody has waited for the process, and that is all that is left of it.
    fn survivor(&mut self, pid: Pid) -> Result<Pid, Errno> {
        let others = self.proc.tids(pid)?.into_iter().filter(|tid| tid.0 != pid.0);
        others.map(|tid| Pid(tid.0)).next().ok_or(Errno::ESRCH)
    }

    /// The marks, if they changed since the last look. What may not be read leaves no mark.
    fn fresh_marks(
        &mut self,
        face: &Face,
        ProcessId { pid, .. }: ProcessId,
        Speaker { voice, place }: Speaker,
        first: bool,
    ) -> Result<Option<Marks>, Errno> {
        if face.kernel {
            return Ok(first.then(Marks::default));
        }
        let stack = if voice == pid { face.stack } else { self.proc.thread_stat(pid, Tid(voice.0))?.stack };
        let program = Some(Program { comm: face.comm, stack });
        let known = self.known.get_mut(&pid).ok_or(Errno::ESRCH)?;
        if known.program == program && place != 0 && known.place == place {
            return Ok(None);
        }
        let cgroups = self.proc.cgroups(voice)?;
        let stays = known.marks.cgroups == cgroups;
        // Whoever moves between the pass and this file was told at another place than it is read at: so both have to say
        // twice what they say.
        if place != 0 {
            known.place = if stays && known.told == place { place } else { 0 };
            known.told = place;
        } else if !stays {
            (known.place, known.told) = (0, 0);
        }
        if known.program == program && stays {
            return Ok(None);
        }
        let environ = match self.proc.environ(voice, &self.wanted) {
            Err(errno) if meaning(errno) == Meaning::Gone => return Err(errno),
            environ => environ.unwrap_or_default(),
        };
        let status = self.proc.status(voice)?;
        let command_line = self.proc.command_line(voice)?;
        let marks = Marks { cgroups, environ, groups: status.groups, command_line };
        known.uid = Uid(status.uid);
        known.program = program;
        known.cgroup = marks.cpuset_path().map(Arc::from);
        known.marks = marks.clone();
        Ok(Some(marks))
    }

    fn threads_of(&mut self, pid: Pid) -> Result<Vec<Thread>, Errno> {
        let remembered =
            self.known.get_mut(&pid).map(|known| mem::take(&mut known.threads)).unwrap_or_default();
        let before = |tid| {
            let found = remembered.binary_search_by_key(&tid, |facts: &ThreadFacts| facts.tid);
            found.ok().map(|at| remembered[at])
        };
        let mut facts: Vec<ThreadFacts> = Vec::with_capacity(remembered.len());
        let mut threads: Vec<Thread> = Vec::with_capacity(remembered.len());
        for _ in 0..MOST_LISTS {
            let met = threads.len();
            let mut grown = false;
            for tid in self.proc.tids(pid)? {
                if threads[..met].binary_search_by_key(&tid, |thread| thread.tid).is_ok() {
                    continue;
                }
                grown = true;
                match self.thread(pid, tid, before(tid)) {
                    Ok((thread, fact)) => {
                        threads.push(thread);
                        facts.push(fact);
                    }
                    // A thread that ends while it is read is not there.
                    Err(errno) if is_absent(errno) => {}
                    Err(errno) => return Err(errno),
                }
            }
            if !grown {
                break;
            }
            // A list that changes while it is read may name a thread twice.
            threads.sort_unstable_by_key(|thread| thread.tid);
            threads.dedup_by_key(|thread| thread.tid);
            facts.sort_unstable_by_key(|facts| facts.tid);
            facts.dedup_by_key(|facts| facts.tid);
        }
        if let Some(known) = self.known.get_mut(&pid) {
            known.thread_count = facts.len();
            known.threads = facts;
        }
        Ok(threads)
    }

    fn thread(
        &mut self,
        pid: Pid,
        tid: Tid,
        before: Option<ThreadFacts>,
    ) -> Result<(Thread, ThreadFacts), Errno> {
        let ran = if self.schedstat { Some(self.proc.schedstat(pid, tid)?) } else { None };
        let facts = match before {
            Some(facts) if Some(facts.ran) == ran => facts,
            _ => {
                let stat = self.proc.thread_stat(pid, tid)?;
                let by_ticks = SchedStat { run_ns: stat.run_ticks * self.ns_per_tick, wait_ns: 0 };
                ThreadFacts {
                    tid,
                    start: stat.start,
                    comm: stat.comm,
                    state: stat.state,
                    last_cpu: stat.last_cpu,
                    ran: ran.unwrap_or(by_ticks),
                }
            }
        };
        let ThreadFacts { start, comm, state, last_cpu, ran: SchedStat { run_ns, wait_ns }, .. } = facts;
        let allowed = affinity::get(tid)?;
        Ok((Thread { tid, start, comm, state, last_cpu, run_ns, wait_ns, allowed }, facts))
    }
}
