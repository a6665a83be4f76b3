//! The NUMA nodes of the processes of a job: which are chosen in a cycle, and which are recorded.

use super::thread_plan::ThreadPlan;
use crate::basics::{CpuSet, Pid, ProcessId, Pu, ThreadId, prelude::*};
use crate::machine::{NumaNodeRule, Topology, numa_nodes_of_cpus};
use crate::phases::draft::CycleDraft;
use crate::phases::membership::ancestors;
use crate::phases::pinning::within_job::{HotProcess, choose_nodes, node_containing};
use crate::state::{Member, WardenState};
use crate::terms::{Job, JobId, OversubscriptionPolicy};

/// The NUMA nodes that this cycle chooses for the processes of one job, by the rule that the job requested
/// (`--within-job`).
#[derive(Debug, Default)]
pub(super) struct ChosenNodes {
    /// Whether the job requests a rule now. Without one, the nodes that were recorded earlier have no effect.
    has_rule: bool,
    /// The processes for which no node was recorded before, each with its node, in the order of the choices.
    chosen: Vec<(Pid, u32)>,
}

impl ChosenNodes {
    /// Chooses a NUMA node for each process of the job `id` that has hot threads (threads that run or wait for a PU
    /// most of the time) and no recorded node in `grant`. `grant` is the set of PUs (logical CPUs) that the job holds,
    /// and `plans` has its threads. Chooses no nodes if the job requested no rule (`--within-job`), if `grant` is in a
    /// single node, or if this cycle does not pin the job's threads.
    pub(super) fn choose(
        draft: &CycleDraft<'_>,
        id: &JobId,
        grant: &CpuSet,
        plans: &[ThreadPlan<'_>],
    ) -> Self {
        let state = &*draft.state;
        let request = state.jobs.get(id).and_then(|job| job.request.as_ref());
        let rule = request.map_or(NumaNodeRule::Default, |request| request.within_job);
        if rule == NumaNodeRule::Default {
            return Self::default();
        }
        let hot: Vec<&ThreadPlan<'_>> = plans.iter().filter(|plan| plan.thread.demand.is_hot).collect();
        let nodes = numa_nodes_of_cpus(&state.topology, grant);
        let is_placed = |member: &Member| {
            member.numa_node.is_some_and(|number| nodes.iter().any(|node| node.number == number))
        };
        if nodes.len() < 2
            || hot.iter().all(|plan| is_placed(plan.member))
            || !are_pinned(draft, id, grant, &hot)
        {
            return Self { has_rule: true, chosen: Vec::new() };
        }
        // The other rules do not depend on the node of the parent.
        let needs_parent = matches!(rule, NumaNodeRule::Fill | NumaNodeRule::Packed);
        let mut hot_processes: BTreeMap<Pid, HotProcess> = BTreeMap::new();
        for plan in hot {
            let ProcessId { pid, start } = plan.id.process;
            let follows_parent = needs_parent && !is_placed(plan.member);
            let process = hot_processes.entry(pid).or_insert_with(|| HotProcess {
                pid,
                start,
                numa_node: plan.member.numa_node,
                ancestors: if follows_parent { members_above(state, plan.member) } else { Vec::new() },
                hot_threads: Vec::new(),
                last_cpu: plan.thread.last_cpu,
            });
            let pin = plan.pinned_pu(grant).map(CpuSet::from);
            process.hot_threads.push(pin.unwrap_or_else(|| plan.mask_without_pin(grant).clone()));
        }
        let last = state.members.last_node_of(id);
        let chosen = choose_nodes(&state.topology, grant, rule, hot_processes.into_values().collect(), last);
        Self { has_rule: true, chosen }
    }

    /// Returns whether the job requested a rule for the NUMA nodes of its processes (`--within-job`).
    pub(super) fn has_rule(&self) -> bool {
        self.has_rule
    }

    /// Returns the number of the NUMA node to whose PUs (logical CPUs) pjw pins the threads of the process `member`, as
    /// far as these PUs are free. `None` if the job requested no rule, or if the process has no node.
    pub(super) fn preferred_node(&self, member: &Member) -> Option<u32> {
        let chosen = self.chosen.iter().find(|(pid, _)| *pid == member.id.pid).map(|&(_, node)| node);
        chosen.or(member.numa_node).filter(|_| self.has_rule)
    }

    /// Returns the NUMA nodes to record for the processes for which this cycle chose a node. Each item is a pid and the
    /// number of the node on which the process runs from now on. This is the chosen node, or another node if the chosen
    /// node was full.
    ///
    /// - `grant` has the PUs (logical CPUs) of the job, and `plans` has its threads.
    /// - `pins` has the PU of each pinned thread.
    ///
    /// The result lacks a process if none of its hot threads (threads that run or wait for a PU most of the time) is
    /// restricted to one node, by a pin or by its program.
    pub(super) fn nodes_to_record(
        &self,
        topology: &Topology,
        grant: &CpuSet,
        plans: &[ThreadPlan<'_>],
        pins: &BTreeMap<ThreadId, Pu>,
    ) -> Vec<(Pid, u32)> {
        if self.chosen.is_empty() {
            return Vec::new();
        }
        let mut nodes: BTreeMap<Pid, BTreeSet<u32>> = BTreeMap::new();
        for plan in plans.iter().filter(|plan| plan.thread.demand.is_hot) {
            let pin = pins.get(&plan.id).copied().map(CpuSet::from);
            let node =
                node_containing(topology, pin.as_ref().unwrap_or_else(|| plan.mask_without_pin(grant)));
            nodes.entry(plan.id.process.pid).or_default().extend(node);
        }
        let to_record = |&(pid, chosen): &(Pid, u32)| {
            let used = nodes.get(&pid)?;
            let node = if used.contains(&chosen) { chosen } else { *used.first()? };
            Some((pid, node))
        };
        self.chosen.iter().filter_map(to_record).collect()
    }
}

/// Whether [`super::choose_pins_of_job`] pins the hot threads `hot` of the job `id`, which holds the PUs `grant`.
fn are_pinned(draft: &CycleDraft<'_>, id: &JobId, grant: &CpuSet, hot: &[&ThreadPlan<'_>]) -> bool {
    let floats = draft.policy.oversubscription == OversubscriptionPolicy::Float && hot.len() > grant.len();
    let is_borrower = draft.state.jobs.get(id).is_some_and(Job::is_borrower);
    !is_borrower
        && (draft.state.cpusets.has_isolated_partition(id) || (draft.policy.pin_hot_threads && !floats))
}

/// The ancestors of a process in the same job, the parent first, each with the NUMA node that was recorded for it.
fn members_above(state: &WardenState, member: &Member) -> Vec<(Pid, Option<u32>)> {
    let pids = state.process(member.id.pid).into_iter().flat_map(|process| ancestors(state, process));
    let members = pids.map_while(|known| state.members.get(&known.process.id.pid));
    let in_job = members.take_while(|above| above.job == member.job);
    in_job.map(|above| (above.id.pid, above.numa_node)).collect()
}
