//! The control server: permissions, and the answers to calls on the socket.
//!
//! Every user may read. Root, the user of the daemon and the members of `admin_groups` may change everything. The crate
//! `pjw-core` decides which changes other users may make, except in clear cases ([`crate::control::admission`]). Calls
//! for the status and for past events are answered here, at once. Commands and detailed queries go to the event loop.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pjw_core::command::{AssignCommand, Caller, Command, ProvisionCommand, Reply as CommandReply};
use pjw_core::event::{Event, EventKind};
use pjw_core::ids::{Pid, Tid, Uid};
use pjw_core::job::{JobId, Provision, ProvisionRule};
use pjw_core::plan::Warning;
use pjw_core::refusal::Refusal;
use pjw_ipc::call::{self, Call, CallError, Reply};
use pjw_ipc::refused_provision::refused_provision_reasons;
use pjw_ipc::server::{Peer, Replies, Service};
use pjw_ipc::wire;
use tokio::sync::{oneshot, watch};

use super::admin_groups::{in_any_group, watch_admin_groups};
use super::admission::{self, RateLimiter, RefusalLog};
use super::assign::assign_command;
use super::inbox::{EventLoopMessage, MessageSender};
use super::query::{MemberDetails, PageCursor, Query, QueryAnswer, ThreadDetails};
use super::refused_provision::{explain_refused_provision, refusal_text};
use super::settings::ControlSettings;
use crate::memory::reader::MemoryReaders;
use crate::memory::records::MemoryRecords;
use crate::view::history::EventHistory;
use crate::view::status::{PublishedStatus, StatusReceiver};
use crate::view::to_wire::{defrag_to_wire, event_to_wire, evidence_name};
use crate::view::topology_tree;

/// The largest number of members on a page.
const MAX_MEMBERS_PER_PAGE: usize = 500;
/// The number of members on a page if the client asks for no number.
const DEFAULT_MEMBERS_PER_PAGE: usize = 100;

/// The time from the exit of the last process of a job until the job has ended, on a machine that is not overloaded.
const END_WAIT: Duration = Duration::from_millis(200);

/// The service behind pjwd's control socket: for each call, checks what the client is allowed to do, and computes the
/// reply.
#[derive(Debug)]
pub struct ControlService {
    pub(super) outbox: MessageSender,
    pub(super) status: watch::Receiver<Arc<PublishedStatus>>,
    topology: watch::Receiver<Arc<wire::Topology>>,
    history: RefCell<EventHistory>,
    pub(super) settings: watch::Receiver<ControlSettings>,
    rate_limiter: RefCell<RateLimiter>,
    refusal_log: RefCell<RefusalLog>,
    pub(super) memory_readers: MemoryReaders,
    pub(super) memory_records: Rc<RefCell<MemoryRecords>>,
    /// The warnings about memory that the event loop publishes.
    pub(super) memory_warnings: RefCell<Vec<Warning>>,
}

impl ControlService {
    /// Makes the service for the calls of clients. Also returns a future, which the caller must run for as long as the
    /// service runs. The future stores each event of the daemon in the service, so that clients can read past events.
    ///
    /// - `published` receives the status, the topology and the events from the event loop. The service answers calls
    ///   about these values without the event loop.
    /// - `outbox` sends the commands and detailed queries of clients to the event loop: each is an
    ///   [`EventLoopMessage`].
    /// - `settings` receives the configuration: who is an administrator, what other users are allowed to do, and how
    ///   often pjwd measures the memory use of jobs by itself, without a request of a client.
    pub fn new(
        outbox: MessageSender,
        published: StatusReceiver,
        settings: watch::Receiver<ControlSettings>,
    ) -> (Rc<Self>, impl Future<Output = ()>) {
        let StatusReceiver { status, topology, mut events } = published;
        let control = Rc::new(Self {
            outbox,
            status,
            topology,
            history: RefCell::default(),
            settings,
            rate_limiter: RefCell::default(),
            refusal_log: RefCell::default(),
            memory_readers: MemoryReaders::default(),
            memory_records: Rc::default(),
            memory_warnings: RefCell::default(),
        });
        let recorder = Rc::clone(&control);
        let record_events = async move {
            while let Some(event) = events.recv().await {
                recorder.record(event);
            }
        };
        (control, record_events)
    }

    fn record(&self, event: Arc<wire::Event>) {
        if event.event == EventKind::Ended.name()
            && let Ok(job) = event.job.parse()
        {
            self.remove_memory_readings(&job);
        }
        self.history.borrow_mut().record(event, &self.status.borrow().jobs);
    }

    /// Checks whether the Unix groups in the configuration key `admin_groups` exist. Sends a warning for each missing
    /// group to the event loop. The check is made at the start of the daemon, and after each reload of the
    /// configuration. While a group is missing, the check is also made once a minute. Returns when the event loop has
    /// ended.
    pub async fn watch_admin_groups(self: Rc<Self>) {
        watch_admin_groups(self.settings.clone(), self.outbox.clone()).await;
    }

    /// Returns the user of the client `peer`, and whether this user is an administrator: root, the user of the
    /// daemon, or a member of one of the configured groups.
    pub(super) async fn caller(&self, peer: Peer) -> Caller {
        let uid = Uid(peer.uid);
        if peer.is_of_root_or_own_user() {
            return Caller { uid, is_admin: true };
        }
        let groups = self.settings.borrow().rules.admin_groups.clone();
        if groups.is_empty() {
            return Caller { uid, is_admin: false };
        }
        // The name service may contact a remote server. The lookup must not block the thread that serves all clients.
        let looked_up = tokio::task::spawn_blocking(move || in_any_group(peer, &groups)).await;
        Caller { uid, is_admin: looked_up.unwrap_or(false) }
    }

    /// Executes `command` in the event loop, and returns the reply. Does not ask the event loop if the answer is
    /// clear from the published status ([`admission`]). If the caller is no administrator and the command is refused,
    /// also records an event about the job, unless [`Refusal::is_reported`] returns false.
    ///
    /// # Errors
    /// If the command is refused, if its caller has sent too many commands, or if the event loop has ended.
    async fn execute_command(&self, command: Command) -> Result<CommandReply, CallError> {
        let caller = admission::caller_of(&command);
        if !self.rate_limiter.borrow_mut().admit(&command, Instant::now()) {
            let why = admission::rate_limit_message();
            self.refusal_log.borrow_mut().record(caller.uid, &why, Instant::now());
            return Err(CallError::Busy(why));
        }
        let job = match &command {
            Command::Assign(AssignCommand { job, .. })
            | Command::Release { job, .. }
            | Command::Undo { job, .. }
            | Command::Want { job, .. }
            | Command::Provision(ProvisionCommand { job, .. }) => Some(job.clone()),
            Command::ReleaseAll { .. } | Command::Defrag { .. } => None,
        };
        let early_answer = admission::answer_without_event_loop(
            &self.settings.borrow().rules,
            &self.status.borrow().jobs,
            &command,
        );
        let answer = match early_answer.or_else(|| admission::refusal_of_thread_ids(&command).map(Err)) {
            Some(answer) => answer,
            None => self.call_loop(|reply| EventLoopMessage::Command { command, reply }).await?,
        };
        if let (Err(refusal), Some(job), false) = (&answer, job, caller.is_admin)
            && refusal.is_reported()
        {
            let event = event_to_wire(&Event::new(EventKind::Refused, refusal.to_string()).with_job(&job));
            self.refusal_log.borrow_mut().record(caller.uid, &event.text, Instant::now());
            self.record(Arc::new(event));
        }
        answer.map_err(|refusal| match refusal {
            Refusal::JobNotOwned { .. }
            | Refusal::ProcessNotOwned { .. }
            | Refusal::AssignNeedsAdmin
            | Refusal::JobForOtherUser { .. }
            | Refusal::SchedulerJobByUser { .. }
            | Refusal::ProvisionNeedsAdmin
            | Refusal::ProvisionOfAdmin { .. }
            | Refusal::DefragNeedsAdmin => CallError::NotAllowed(refusal.to_string()),
            Refusal::Stopping => stopping(),
            refusal @ Refusal::WouldFreeze { .. } => CallError::WouldFreeze(refusal.to_string()),
            refusal => CallError::Refused(refusal_text(&refusal, &self.status.borrow())),
        })
    }

    /// Sends a message to the event loop, and waits for the answer. `message` makes the message from the sender
    /// through which the event loop answers. Fails if the event loop has ended.
    async fn call_loop<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> EventLoopMessage,
    ) -> Result<T, CallError> {
        let (sender, answer) = oneshot::channel();
        if !self.outbox.send(message(sender)) {
            return Err(stopping());
        }
        answer.await.map_err(|_| stopping())
    }

    /// Sends `query` to the event loop, and waits for the answer. Fails if the event loop has ended.
    pub(super) async fn query_loop(&self, query: Query) -> Result<QueryAnswer, CallError> {
        self.call_loop(|answer| EventLoopMessage::Query { query, answer }).await
    }

    /// Answers the call `Assign` of the client `peer`: assigns cores and processes to a job, and returns the job.
    /// Fails if the command is refused. Also fails if the job has ended between the assignment and the reply.
    async fn assign(&self, peer: Peer, request: call::Assign) -> Result<Reply, CallError> {
        let caller = self.caller(peer).await;
        let id = parse_job_id_argument(&request.job)?;
        let assign = assign_command(request, id.clone(), caller)?;
        match self.execute_command(Command::Assign(assign)).await? {
            CommandReply::Assigned(_) => {
                let ended = format!(
                    "{id} has ended already, with its last process or by a release: pjwctl events shows which"
                );
                self.published_job(&id).map(|job| Reply::Job { job }).map_err(|_| CallError::Refused(ended))
            }
            CommandReply::Released(_) | CommandReply::Moved(_) | CommandReply::Wanted(_) => {
                Err(CallError::Refused(format!("{id} ended as it was assigned")))
            }
        }
    }

    async fn want(&self, peer: Peer, request: call::Want) -> Result<Reply, CallError> {
        let (job, caller) = (parse_job_id_argument(&request.job)?, self.caller(peer).await);
        let id = job.clone();
        self.execute_command(Command::Want { job, cores: request.cores, caller }).await?;
        self.published_job(&id).map(|job| Reply::Job { job })
    }

    async fn provision(&self, peer: Peer, request: call::Provision) -> Result<Reply, CallError> {
        let (job, caller) = (parse_job_id_argument(&request.job)?, self.caller(peer).await);
        // The client has replaced the name of the user by its id.
        let rule = request.rule.as_deref().map(|rule| ProvisionRule::parse(rule, |_| None)).transpose();
        let rule = rule.map_err(|error| CallError::Refused(error.to_string()))?;
        let provision = Provision { rule, from_config: false };
        let id = job.clone();
        let command = ProvisionCommand { job, cores: request.cores, provision, caller };
        self.execute_command(Command::Provision(command)).await?;
        self.published_job(&id).map(|job| Reply::Job { job })
    }

    /// The topology, with the cores that are free now.
    fn topology(&self) -> wire::Topology {
        let status = self.status.borrow();
        topology_tree::add_free_core_counts(
            wire::Topology::clone(&self.topology.borrow()),
            &status.summary.fits,
            &status.summary.pool,
        )
    }

    /// Returns the job `id` from the last published status. The error says that there is no such job, for example after
    /// its end. If `id` is a provision of the configuration that pjwd refused, the error has the reason and the remedy.
    pub(super) fn published_job(&self, id: &JobId) -> Result<wire::Job, CallError> {
        let (name, status) = (id.to_string(), self.status.borrow());
        let found = status.jobs.iter().find(|job| job.id == name).cloned();
        found.map(Arc::unwrap_or_clone).ok_or_else(|| {
            let refusal = Refusal::NoSuchJob { job: id.clone() };
            CallError::Refused(refusal_text(&refusal, &status))
        })
    }

    /// Answers the call `GetJob`: returns the job, and one page of its processes with their threads. The first page
    /// also has the events of the job. The page begins after the process and the thread that `request` names. Fails
    /// if there is no such job.
    async fn job_detail(&self, request: call::GetJob) -> Result<Reply, CallError> {
        let id = parse_job_id_argument(&request.job)?;
        let job = self.published_job(&id)?;
        let limit = request.limit.map_or(DEFAULT_MEMBERS_PER_PAGE, |limit| limit as usize);
        let limit = limit.clamp(1, MAX_MEMBERS_PER_PAGE);
        let after = request.after.map(|pid| PageCursor { pid: Pid(pid), tid: request.after_tid.map(Tid) });
        let query = Query::Members { job: id.clone(), after, limit };
        let QueryAnswer::Members(Some((members, next))) = self.query_loop(query).await? else {
            return Err(CallError::Refused(Refusal::NoSuchJob { job: id }.to_string()));
        };
        let members = members.into_iter().map(member_to_wire).collect();
        let history = if after.is_none() { self.history.borrow().events_of_job(&job) } else { Vec::new() };
        let (last_tid, last_pid) =
            (next.and_then(|next| next.tid).map(|tid| tid.0), next.map(|next| next.pid.0));
        Ok(Reply::JobDetail(Box::new(call::GetJobReply { job, members, history, last_pid, last_tid })))
    }

    /// Answers the call `ExplainJob`: returns the reasons why a job holds its cores or none. Of a provision of the
    /// configuration that was refused, returns the reason. Fails if there is neither.
    async fn explain_job(&self, name: &str) -> Result<Reply, CallError> {
        let id = parse_job_id_argument(name)?;
        let refused = refused_provision_reasons(&id.to_string(), &self.status.borrow().warnings);
        match self.published_job(&id) {
            Err(no_job) if refused.is_empty() => return Err(no_job),
            Err(_) => return Ok(Reply::JobReasons(explain_refused_provision(&id, refused))),
            Ok(_) => {}
        }
        let QueryAnswer::JobReasons(Some(mut reasons)) =
            self.query_loop(Query::JobReasons(id.clone())).await?
        else {
            return Err(CallError::Refused(Refusal::NoSuchJob { job: id }.to_string()));
        };
        reasons.grant_reasons.extend(refused);
        Ok(Reply::JobReasons(self.add_memory_findings(&id, reasons).await))
    }

    /// Answers the call `ExplainPid`: returns the reasons why a process belongs to its job or to no job, and one page
    /// of its threads with the reasons for their affinity masks. Fails if there is no such process.
    async fn explain_pid(&self, request: call::ExplainPid) -> Result<Reply, CallError> {
        let pid = request.pid;
        let query = Query::ProcessReasons { pid: Pid(pid), after: request.after_tid.map(Tid) };
        let QueryAnswer::ProcessReasons(reasons) = self.query_loop(query).await? else {
            return Err(stopping());
        };
        if !reasons.process_exists {
            return Err(CallError::Refused(Refusal::NoSuchProcess { pid: Pid(pid) }.to_string()));
        }
        Ok(Reply::PidReasons(call::ExplainPidReply {
            pid,
            job: reasons.job.map(|job| job.to_string()),
            membership_reasons: reasons.membership_reasons,
            threads: reasons.threads.into_iter().map(thread_to_wire).collect(),
            last_tid: reasons.continue_after.map(|tid| tid.0),
        }))
    }

    /// Waits for at most [`END_WAIT`] until the job `job` has ended: its last process may have exited just now. Does
    /// not wait for the end of a released job or of a provision, because these stay without a process.
    async fn wait_for_end(&self, job: &JobId) {
        let (mut status, id) = (self.status.clone(), job.to_string());
        let stays = |job: &wire::Job| job.state == "released" || job.provision.is_some();
        let has_ended =
            |status: &Arc<PublishedStatus>| status.jobs.iter().all(|job| job.id != id || stays(job));
        let ended = tokio::time::timeout(END_WAIT, status.wait_for(has_ended)).await;
        // The caller finds out whether the job has ended.
        drop(ended);
    }

    /// Returns the reports of ended jobs. If `request` names a job, returns only the reports of this job, and first
    /// waits up to [`END_WAIT`] for its end. Fails if a named job then has no report, because it has not ended or
    /// because none is kept.
    async fn find_reports(&self, request: call::GetReports) -> Result<Reply, CallError> {
        if request.last == Some(0) {
            return Err(CallError::Refused("0 reports were asked for: ask for at least 1".to_owned()));
        }
        let job = request.job.as_deref().map(parse_job_id_argument).transpose()?;
        if let Some(job) = &job {
            self.wait_for_end(job).await;
        }
        let query = Query::Reports { job: job.clone(), last: request.last };
        let QueryAnswer::Reports(reports) = self.query_loop(query).await? else { return Err(stopping()) };
        match job.filter(|_| reports.is_empty()) {
            None => Ok(Reply::Reports { reports }),
            Some(job) if self.published_job(&job).is_ok() => Err(CallError::Refused(format!(
                "{job} has not ended, and has no report yet: pjwctl show {job} shows what it does"
            ))),
            Some(job) => Err(CallError::Refused(format!(
                "there is no report of {job}: pjwctl jobs --ended lists the jobs that have one"
            ))),
        }
    }

    /// Answers `Plan` or `PlanDefrag`. `query` makes the query; an administrator gets a new dry run.
    async fn dry_run(&self, peer: Peer, query: fn(bool) -> Query) -> Result<Reply, CallError> {
        let fresh = self.caller(peer).await.is_admin;
        match self.query_loop(query(fresh)).await? {
            QueryAnswer::Plan(plan) => Ok(Reply::Plan(plan)),
            QueryAnswer::Defrag(defrag) => Ok(Reply::Defrag(defrag)),
            _ => Err(stopping()),
        }
    }

    async fn defrag(&self, peer: Peer) -> Result<Reply, CallError> {
        let caller = self.caller(peer).await;
        match self.execute_command(Command::Defrag { caller }).await? {
            CommandReply::Moved(defrag) => Ok(Reply::Defrag(Arc::new(defrag_to_wire(&defrag)))),
            _ => Err(stopping()),
        }
    }

    async fn reload(&self, peer: Peer) -> Result<Reply, CallError> {
        if !self.caller(peer).await.is_admin {
            let why = "only an administrator may reload the configuration";
            return Err(CallError::NotAllowed(why.to_owned()));
        }
        let changes = self.call_loop(|reply| EventLoopMessage::Reload { reply }).await?;
        changes.map(|changes| Reply::Reloaded { changes }).map_err(CallError::Refused)
    }
}

impl Service for ControlService {
    async fn call(&self, peer: Peer, call: Call, _more: bool) -> Result<Replies, CallError> {
        let reply = match call {
            Call::GetStatus => Reply::Status { status: self.status.borrow().to_wire() },
            Call::ListJobs => Reply::Jobs { jobs: self.status.borrow().to_wire().jobs.clone() },
            Call::GetReports(request) => self.find_reports(request).await?,
            Call::GetTopology => Reply::Topology { topology: self.topology() },
            Call::GetJob(request) => self.job_detail(request).await?,
            Call::GetMemory(request) => self.answer_get_memory(peer, request).await?,
            Call::Assign(request) => self.assign(peer, request).await?,
            Call::Release(request) => {
                let job = parse_job_id_argument(&request.job)?;
                let caller = self.caller(peer).await;
                released(self.execute_command(Command::Release { job, caller }).await?)
            }
            Call::Want(request) => self.want(peer, request).await?,
            Call::Provision(request) => self.provision(peer, request).await?,
            Call::ReleaseAll => {
                let caller = self.caller(peer).await;
                released(self.execute_command(Command::ReleaseAll { caller }).await?)
            }
            Call::ExplainJob(request) => self.explain_job(&request.job).await?,
            Call::ExplainPid(request) => self.explain_pid(request).await?,
            Call::Plan => self.dry_run(peer, |fresh| Query::Plan { fresh }).await?,
            Call::PlanDefrag => self.dry_run(peer, |fresh| Query::Defrag { fresh }).await?,
            Call::Defrag => self.defrag(peer).await?,
            Call::Events(request) => {
                return Ok(Replies::Stream(self.history.borrow().subscribe(request.follow.unwrap_or(false))));
            }
            Call::Reload => self.reload(peer).await?,
        };
        Ok(Replies::Single(Box::new(reply)))
    }
}

fn stopping() -> CallError {
    CallError::Busy(Refusal::Stopping.to_string())
}

fn released(reply: CommandReply) -> Reply {
    let released = match reply {
        CommandReply::Released(jobs) => jobs.iter().map(ToString::to_string).collect(),
        CommandReply::Assigned(_) | CommandReply::Moved(_) | CommandReply::Wanted(_) => Vec::new(),
    };
    Reply::Released { released }
}

/// Parses the job id `text`, such as `slurm:17`. The error is the reply to the client.
pub(super) fn parse_job_id_argument(text: &str) -> Result<JobId, CallError> {
    text.parse().map_err(|error: pjw_core::job::JobIdError| CallError::Refused(error.to_string()))
}

fn member_to_wire(details: MemberDetails) -> wire::Member {
    wire::Member {
        pid: details.id.pid.0,
        start_time: details.id.start.0,
        comm: details.process.as_ref().map(|process| process.comm.to_string()).unwrap_or_default(),
        uid: details.process.as_ref().map(|process| process.uid.0).unwrap_or_default(),
        evidence: evidence_name(details.evidence).to_owned(),
        threads: details.threads.into_iter().map(thread_to_wire).collect(),
        address_space: details.address_space,
    }
}

fn thread_to_wire(details: ThreadDetails) -> wire::Thread {
    let ThreadDetails { tid, thread, pinned_pu, mask_reason } = details;
    wire::Thread {
        tid: tid.0,
        comm: thread.comm.to_string(),
        state: thread.state.to_string(),
        demand: thread.demand.permille,
        hot: thread.demand.is_hot,
        last_cpu: thread.last_cpu.0,
        allowed: thread.effective_mask.to_string(),
        pinned: pinned_pu.map(|pu| pu.0),
        because: mask_reason,
    }
}
