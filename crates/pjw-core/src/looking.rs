//! Where the next cycle has to look, and where a glance is enough.
//!
//! Every regular cycle looks at whoever runs, is being put back or was not seen yet. Sleepers are named too, by the cgroup
//! they live in: the node looks at them only if they ran, or if their masks are not what they were. Masks and cgroups of
//! sleepers that somebody else changes are found by the node's samples and at the next full look.
//!
//! A rescan looks at everybody else too who may have changed: nobody changes without an event, or running. One of eight
//! looks at everything, whether anything changed or not, and so does each while events are not heard, or while something
//! is open that only a full look settles.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::cpuset::CpuSet;
use crate::job::JobId;
use crate::process::Pid;
use crate::snapshot::{Look, Scope, Sleepers, Watch};
use crate::state::{Member, WardenState};
use crate::wall::lies_in;

impl WardenState {
    /// What every regular cycle looks at: the threads of all watched processes and the jobs' directories; in a
    /// full look, every process of the node too.
    #[must_use]
    pub fn regular_look(&self, full: bool) -> Look {
        let cgroups = self.job_cgroups();
        if full {
            let threads_of = self.watched_pids();
            return Look { scope: Scope::Full, threads_of, cgroups, watch: Arc::default() };
        }
        let threads_of: BTreeSet<Pid> = self.members.awake().chain(self.leaving.keys().copied()).collect();
        let watch = self.watch();
        Look { scope: Scope::Partial(threads_of.clone()), threads_of, cgroups, watch }
    }

    /// A full look that reads no threads of sleepers, but of a few in turn.
    #[must_use]
    pub fn full_rescan(&self) -> Look {
        Look { watch: self.watch(), ..self.regular_look(true) }
    }

    /// The rescan that is due because it is time. Who was born since the last one, and is in nobody's job, is for the caller
    /// to add.
    pub fn rescan(&mut self) -> Look {
        if self.rescans_left == 0 || self.full_look_due || !self.is_settled() {
            return self.full_rescan();
        }
        self.rescans_left -= 1;
        let strangers = self.processes.values().map(|known| &known.process);
        let strangers = strangers.filter(|process| !process.kernel).map(|process| process.id.pid);
        let strangers = strangers.filter(|&pid| self.watched(pid).is_none()).collect();
        let groups = self.watch().groups.clone();
        Look { watch: Arc::new(Watch { groups, strangers }), ..self.regular_look(false) }
    }

    /// Whether events tell of everybody, every job has what it asked for, and nothing is to be put back or tried again.
    fn is_settled(&self) -> bool {
        let are_served = self.jobs.values().all(|job| job.grant.is_some() && !job.let_go);
        let may_be_moved = self.watch().groups.iter().any(|group| group.within.is_some());
        let is_open = !self.leaving.is_empty() || !self.unclear.is_empty() || !self.walls.are_at_rest();
        self.births_heard_since.is_some() && are_served && !may_be_moved && !is_open
    }

    fn watch(&self) -> Arc<Watch> {
        Arc::clone(self.sleepers.get_or_init(|| Arc::new(self.sleepers())))
    }

    /// The processes whose threads a full look reads: members, and those still to be put back.
    #[must_use]
    pub fn watched_pids(&self) -> BTreeSet<Pid> {
        self.members.keys().chain(self.leaving.keys()).copied().collect()
    }

    /// The scheduler's directories of the known jobs, and the walls.
    #[must_use]
    pub fn job_cgroups(&self) -> BTreeSet<String> {
        let schedulers = self.jobs.values().filter_map(|job| job.cgroup.clone());
        schedulers.chain(self.walls.paths().map(str::to_owned)).collect()
    }

    /// Those of them that nobody has looked at yet.
    pub(crate) fn unseen_places(&self) -> BTreeSet<String> {
        self.job_cgroups().into_iter().filter(|path| !self.places.contains_key(path)).collect()
    }

    /// Who sleeps, by the cgroup of their job where they live in it.
    fn sleepers(&self) -> Watch {
        let mut groups: BTreeMap<(&JobId, bool, bool), Vec<Pid>> = BTreeMap::new();
        for job in self.jobs.keys() {
            let home = self.home_of(job);
            let place = |pid: &Pid| self.processes.get(pid)?.process.cgroup.as_deref();
            let inside = |pid: &Pid| home.zip(place(pid)).is_some_and(|(home, place)| lies_in(place, home));
            for member in self.members.asleep_of(job) {
                let pid = member.id.pid;
                let key = (job, inside(&pid), self.is_kept_by_masks(member));
                groups.entry(key).or_default().push(pid);
            }
        }
        let sleepers = groups.into_iter().map(|((job, inside, masked), pids)| {
            let cgroup = self.home_of(job).filter(|_| inside).map(str::to_owned);
            let within = self.cpus_of(job).filter(|_| masked).cloned();
            Sleepers { cgroup, within, pids }
        });
        Watch { groups: sleepers.collect(), strangers: Vec::new() }
    }

    /// Whether its masks, and nothing else, keep all threads of a member on its job's cores.
    fn is_kept_by_masks(&self, member: &Member) -> bool {
        let inside = |cpus: &CpuSet| member.threads.values().all(|thread| thread.allowed.is_subset(cpus));
        !self.is_walled(member) && self.cpus_of(&member.job).is_some_and(inside)
    }

    fn cpus_of(&self, job: &JobId) -> Option<&CpuSet> {
        Some(&self.jobs.get(job)?.grant.as_ref()?.cpus)
    }

    /// The cgroup in which only the job's processes live.
    fn home_of(&self, job: &JobId) -> Option<&str> {
        let wall = self.walls.of(job).map(|built| built.wall.path.as_str());
        wall.or_else(|| self.jobs.get(job)?.cgroup.as_deref())
    }
}
