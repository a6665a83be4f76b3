//! The event loop's answers to queries for details.

use std::time::Instant;

use pjw_core::allocate::defrag::plan_defrag;
use tokio::sync::oneshot;

use super::EventLoop;
use crate::control::query::{self, Query, QueryAnswer};
use crate::view::to_wire::{defrag_to_wire, plan_to_wire};

impl EventLoop {
    /// Sends the results of dry runs (computations of changes without making them) to the clients that wait for these
    /// results. One dry run computes the changes that the next cycle would make, and another one the moves of a
    /// defragmentation. Does nothing if no client waits.
    pub(super) fn answer_dry_runs(&mut self) {
        let Self { dry_runs, defrags, warden, .. } = self;
        dry_runs.answer_all(Instant::now, || {
            let (plan, plan_warnings) = warden.dry_run();
            plan_to_wire(&plan, &plan_warnings)
        });
        defrags.answer_all(Instant::now, || defrag_to_wire(&plan_defrag(warden.state(), warden.policy())));
    }

    /// Answers `query`, a request of a client for details, from the present state of the jobs. Sends the reply to the
    /// client through the channel `answer_sender`. A query for a dry run is answered later, by
    /// [`EventLoop::answer_dry_runs`].
    pub(super) fn answer_query(&mut self, query: Query, answer_sender: oneshot::Sender<QueryAnswer>) {
        let (state, policy) = (self.warden.state(), self.warden.policy());
        let reply = match query {
            Query::Members { job, after, limit } => query::members_page(state, &job, after, limit),
            Query::MemberProcesses(id) => query::member_processes(state, &id),
            Query::ProcessesToSample { job, order } => query::processes_to_sample(state, &job, &order),
            Query::RemoteNumaMemory { job, by_node } => {
                query::processes_with_remote_numa_memory(state, &job, by_node)
            }
            Query::JobReasons(id) => query::explain_job(state, policy, &id),
            Query::ProcessReasons { pid, after } => query::explain_process(state, policy, pid, after),
            Query::Reports { job, last } => {
                let job = job.map(|job| job.to_string());
                QueryAnswer::Reports(self.warden.journal().reports.reports(job.as_deref(), last))
            }
            Query::Plan { fresh } => return self.dry_runs.enqueue(answer_sender, fresh),
            Query::Defrag { fresh } => return self.defrags.enqueue(answer_sender, fresh),
        };
        // The client may have disconnected.
        let _ = answer_sender.send(reply);
    }
}
