//! The control server's side of the daemon: who may do what, and which answer comes from where.
//!
//! Everybody may look. Root, the user the daemon runs as and the members of `admin_groups` may change anything;
//! whether others may change what is their own is decided with the wish itself (`pjw_core`), unless it is clear before
//! (see [`crate::admission`]). Views and past events
//! are answered here, at once; wishes and detailed questions go to the loop.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use nix::unistd::{Group, Uid, User, getgrouplist};
use pjw_core::command::{Assign, Caller, Command, Refusal, Reply as Served};
use pjw_core::cpuset::CpuSet;
use pjw_core::event::{Event, EventKind};
use pjw_core::job::{Amount, Class, JobId, Placement};
use pjw_core::process::{Pid, Tid};
use pjw_ipc::call::{self, Call, CallError, Reply};
use pjw_ipc::server::{Answer as Said, Peer, Service};
use pjw_ipc::wire;
use tokio::sync::{oneshot, watch};

use crate::admission::{self, Rates, Refusals, Rules};
use crate::events::{Message, Outbox};
use crate::past::Past;
use crate::publish::{Published, defrag_on_the_wire, event_on_the_wire, evidence_on_the_wire};
use crate::question::{Answer, MemberFacts, Place, Question, ThreadFacts};
use crate::tree;

/// The largest and the usual page of members.
const PAGE: (usize, usize) = (500, 100);

/// The daemon as the server's service.
#[derive(Debug)]
pub struct Control {
    outbox: Outbox,
    view: watch::Receiver<Arc<wire::Status>>,
    machine: watch::Receiver<Arc<wire::Topology>>,
    past: RefCell<Past>,
    rules: watch::Receiver<Rules>,
    rates: RefCell<Rates>,
    refusals: RefCell<Refusals>,
}

impl Control {
    /// A service that answers from what is published and asks the loop for the rest. The future remembers events
    /// for as long as it is polled.
    pub fn new(
        outbox: Outbox,
        published: Published,
        rules: watch::Receiver<Rules>,
    ) -> (Rc<Self>, impl Future<Output = ()>) {
        let Published { view, machine, mut events } = published;
        let control = Rc::new(Self {
            outbox,
            view,
            machine,
            past: RefCell::default(),
            rules,
            rates: RefCell::default(),
            refusals: RefCell::default(),
        });
        let listening = Rc::clone(&control);
        let remember = async move {
            while let Some(event) = events.recv().await {
                listening.note(event);
            }
        };
        (control, remember)
    }

    fn note(&self, event: Arc<wire::Event>) {
        let view = self.view.borrow();
        self.past.borrow_mut().note(event, view.jobs.iter().map(|job| job.id.as_str()));
    }

    async fn caller(&self, peer: Peer) -> Caller {
        let uid = pjw_core::process::Uid(peer.uid);
        if peer.uid == 0 || peer.uid == Uid::effective().as_raw() {
            return Caller { uid, admin: true };
        }
        let groups = self.rules.borrow().admin_groups.clone();
        if groups.is_empty() {
            return Caller { uid, admin: false };
        }
        // The name service may ask a server far away: not on the thread that serves everybody.
        let looked_up = tokio::task::spawn_blocking(move || in_any_group(peer, &groups)).await;
        Caller { uid, admin: looked_up.unwrap_or(false) }
    }

    async fn command(&self, command: Command) -> Result<Served, CallError> {
        let caller = admission::caller(&command);
        if !caller.admin && !self.rates.borrow_mut().admit(caller.uid, Instant::now()) {
            let why = admission::too_often();
            self.refusals.borrow_mut().note(caller.uid, &why, Instant::now());
            return Err(CallError::Busy(why));
        }
        let job = match &command {
            Command::Assign(Assign { job, .. }) | Command::Release { job, .. } => Some(job.clone()),
            Command::ReleaseAll { .. } | Command::Defrag { .. } => None,
        };
        let foregone = admission::foregone(&self.rules.borrow(), &self.view.borrow().jobs, &command);
        let answer = match foregone {
            Some(answer) => answer,
            None => self.obeyed(command).await.ok_or_else(stopping)?,
        };
        if let (Err(refusal), Some(job), false) = (&answer, job, caller.admin) {
            let event = event_on_the_wire(&Event::new(EventKind::Refused, refusal.to_string()).of(&job));
            self.refusals.borrow_mut().note(caller.uid, &event.text, Instant::now());
            self.note(Arc::new(event));
        }
        answer.map_err(|refusal| match refusal {
            Refusal::NotYourJob { .. }
            | Refusal::NotYourProcess { .. }
            | Refusal::UsersMayNot
            | Refusal::NotYoursToGive { .. }
            | Refusal::MovesAreForAdmins => CallError::NotAllowed(refusal.to_string()),
            Refusal::Stopping => stopping(),
            refusal => CallError::Refused(refusal.to_string()),
        })
    }

    /// What the loop says; nothing if it is gone.
    async fn obeyed(&self, command: Command) -> Option<Result<Served, Refusal>> {
        let (reply, answer) = oneshot::channel();
        if !self.outbox.send(Message::Command { command, reply }) {
            return None;
        }
        answer.await.ok()
    }

    async fn ask(&self, question: Question) -> Result<Answer, CallError> {
        let (answer, told) = oneshot::channel();
        if !self.outbox.send(Message::Question { question, answer }) {
            return Err(stopping());
        }
        told.await.map_err(|_| stopping())
    }

    async fn assign(&self, peer: Peer, wish: call::Assign) -> Result<Reply, CallError> {
        let caller = self.caller(peer).await;
        let id = job_id(&wish.job)?;
        let assign = Assign {
            job: id.clone(),
            amount: amount(&wish)?,
            placement: wish.policy.as_deref().map(placement).transpose()?,
            class: wish.class.as_deref().map(class).transpose()?,
            near: wish.near,
            bind_memory: wish.bind_memory,
            isolated: wish.isolated,
            pids: wish.pids.unwrap_or_default().into_iter().map(Pid).collect(),
            session: wish.session.map(Pid),
            fresh: wish.fresh.unwrap_or(false),
            owner: wish.owner.map(pjw_core::process::Uid),
            caller,
        };
        match self.command(Command::Assign(assign)).await? {
            Served::Assigned(_) => self.published_job(&id).map(|job| Reply::Job { job }),
            Served::Released(_) | Served::Moved(_) => {
                Err(CallError::Refused(format!("{id} ended as it was assigned")))
            }
        }
    }

    /// The machine, with what is free of it now.
    fn topology(&self) -> wire::Topology {
        let view = self.view.borrow();
        tree::with_fits(wire::Topology::clone(&self.machine.borrow()), &view.fits, &view.pool)
    }

    /// The job as the view that was just published has it. It may have ended since.
    fn published_job(&self, id: &JobId) -> Result<wire::Job, CallError> {
        let name = id.to_string();
        let found = self.view.borrow().jobs.iter().find(|job| job.id == name).cloned();
        found.ok_or_else(|| CallError::Refused(Refusal::NoSuchJob { job: id.clone() }.to_string()))
    }

    async fn detail(&self, wish: call::GetJob) -> Result<Reply, CallError> {
        let id = job_id(&wish.job)?;
        let job = self.published_job(&id)?;
        let (most, usual) = PAGE;
        let limit = wish.limit.map_or(usual, |limit| (limit as usize).clamp(1, most));
        let after = wish.after.map(|pid| Place { pid: Pid(pid), tid: wish.after_tid.map(Tid) });
        let question = Question::Members { job: id.clone(), after, limit };
        let Answer::Members(Some((members, next))) = self.ask(question).await? else {
            return Err(CallError::Refused(Refusal::NoSuchJob { job: id }.to_string()));
        };
        let members = members.into_iter().map(member_on_the_wire).collect();
        let history = if after.is_none() { self.past.borrow().of_job(&job.id) } else { Vec::new() };
        let (next_tid, next) = (next.and_then(|next| next.tid).map(|tid| tid.0), next.map(|next| next.pid.0));
        Ok(Reply::JobDetail(Box::new(call::JobDetail { job, members, history, next, next_tid })))
    }

    async fn explain_job(&self, name: &str) -> Result<Reply, CallError> {
        let id = job_id(name)?;
        self.published_job(&id)?;
        let Answer::Job(Some(reasons)) = self.ask(Question::Job(id.clone())).await? else {
            return Err(CallError::Refused(Refusal::NoSuchJob { job: id }.to_string()));
        };
        Ok(Reply::JobReasons(call::JobReasons {
            job: id.to_string(),
            cpus: reasons.cpus.to_string(),
            because: reasons.because,
            runner_up: reasons.runner_up,
        }))
    }

    async fn explain_pid(&self, wish: call::PidNumber) -> Result<Reply, CallError> {
        let pid = wish.pid;
        let question = Question::Process { pid: Pid(pid), after: wish.after_tid.map(Tid) };
        let Answer::Process(reasons) = self.ask(question).await? else {
            return Err(stopping());
        };
        if !reasons.known {
            return Err(CallError::Refused(Refusal::NoSuchProcess { pid: Pid(pid) }.to_string()));
        }
        Ok(Reply::PidReasons(call::PidReasons {
            pid,
            job: reasons.job.map(|job| job.to_string()),
            because: reasons.because,
            threads: reasons.threads.into_iter().map(thread_on_the_wire).collect(),
            next_tid: reasons.next.map(|tid| tid.0),
        }))
    }

    async fn plan(&self, peer: Peer) -> Result<Reply, CallError> {
        let fresh = self.caller(peer).await.admin;
        match self.ask(Question::Plan { fresh }).await? {
            Answer::Plan(plan) => Ok(Reply::Plan(plan)),
            _ => Err(stopping()),
        }
    }

    async fn plan_defrag(&self, peer: Peer) -> Result<Reply, CallError> {
        let fresh = self.caller(peer).await.admin;
        match self.ask(Question::Defrag { fresh }).await? {
            Answer::Defrag(healing) => Ok(Reply::Defrag(healing)),
            _ => Err(stopping()),
        }
    }

    async fn defrag(&self, peer: Peer) -> Result<Reply, CallError> {
        let caller = self.caller(peer).await;
        match self.command(Command::Defrag { caller }).await? {
            Served::Moved(healing) => Ok(Reply::Defrag(Arc::new(defrag_on_the_wire(&healing)))),
            _ => Err(stopping()),
        }
    }

    async fn reload(&self, peer: Peer) -> Result<Reply, CallError> {
        if !self.caller(peer).await.admin {
            return Err(CallError::NotAllowed(
                "only an administrator may reload the configuration".to_owned(),
            ));
        }
        let (reply, answer) = oneshot::channel();
        if !self.outbox.send(Message::Reload { reply }) {
            return Err(stopping());
        }
        match answer.await {
            Ok(Ok(changes)) => Ok(Reply::Reloaded { changes }),
            Ok(Err(why)) => Err(CallError::Refused(why)),
            Err(_) => Err(stopping()),
        }
    }
}

impl Service for Control {
    async fn call(&self, peer: Peer, call: Call, _more: bool) -> Result<Said, CallError> {
        let reply = match call {
            Call::GetStatus => Reply::Status { status: Arc::clone(&self.view.borrow()) },
            Call::ListJobs => Reply::Jobs { jobs: self.view.borrow().jobs.clone() },
            Call::GetTopology => Reply::Topology { topology: self.topology() },
            Call::GetJob(wish) => self.detail(wish).await?,
            Call::Assign(wish) => self.assign(peer, wish).await?,
            Call::Release(wish) => {
                let job = job_id(&wish.job)?;
                let caller = self.caller(peer).await;
                released(self.command(Command::Release { job, caller }).await?)
            }
            Call::ReleaseAll => {
                let caller = self.caller(peer).await;
                released(self.command(Command::ReleaseAll { caller }).await?)
            }
            Call::ExplainJob(wish) => self.explain_job(&wish.job).await?,
            Call::ExplainPid(wish) => self.explain_pid(wish).await?,
            Call::Plan => self.plan(peer).await?,
            Call::PlanDefrag => self.plan_defrag(peer).await?,
            Call::Defrag => self.defrag(peer).await?,
            Call::Events(wish) => {
                return Ok(Said::Many(self.past.borrow().tell(wish.follow.unwrap_or(false))));
            }
            Call::Reload => self.reload(peer).await?,
        };
        Ok(Said::Once(Box::new(reply)))
    }
}

fn stopping() -> CallError {
    CallError::Busy(Refusal::Stopping.to_string())
}

fn released(served: Served) -> Reply {
    let released = match served {
        Served::Released(jobs) => jobs.iter().map(ToString::to_string).collect(),
        Served::Assigned(_) | Served::Moved(_) => Vec::new(),
    };
    Reply::Released { released }
}

fn job_id(text: &str) -> Result<JobId, CallError> {
    text.parse().map_err(|error: pjw_core::job::JobIdError| CallError::Refused(error.to_string()))
}

fn amount(wish: &call::Assign) -> Result<Option<Amount>, CallError> {
    let by_pus = match wish.smt.as_deref() {
        None | Some("whole") => false,
        Some("pus") => true,
        Some(_) => return Err(CallError::InvalidParameter("smt".to_owned())),
    };
    match (wish.cores, &wish.cpus) {
        (Some(_), Some(_)) => {
            Err(CallError::Refused("give either a count of cores or a CPU list, not both".to_owned()))
        }
        (None, Some(list)) => {
            let cpus: Result<CpuSet, _> = list.parse();
            cpus.map(|cpus| Some(Amount::Exactly(cpus)))
                .map_err(|error| CallError::Refused(error.to_string()))
        }
        (Some(n), None) if by_pus => Ok(Some(Amount::Pus(n))),
        (Some(n), None) => Ok(Some(Amount::Cores(n))),
        (None, None) => Ok(None),
    }
}

fn placement(text: &str) -> Result<Placement, CallError> {
    match text {
        "pack" => Ok(Placement::Pack),
        "spread" => Ok(Placement::Spread),
        "explicit" => Ok(Placement::Explicit),
        _ => Err(CallError::InvalidParameter("policy".to_owned())),
    }
}

fn class(text: &str) -> Result<Class, CallError> {
    match text {
        "guaranteed" => Ok(Class::Guaranteed),
        "normal" => Ok(Class::Normal),
        "besteffort" => Ok(Class::Besteffort),
        _ => Err(CallError::InvalidParameter("class".to_owned())),
    }
}

fn in_any_group(peer: Peer, groups: &[String]) -> bool {
    let Ok(Some(user)) = User::from_uid(Uid::from_raw(peer.uid)) else { return false };
    let Ok(name) = std::ffi::CString::new(user.name) else { return false };
    let mine = getgrouplist(&name, user.gid).unwrap_or_default();
    let named = groups.iter().filter_map(|group| Group::from_name(group).ok().flatten());
    named.into_iter().any(|group| mine.contains(&group.gid))
}

fn member_on_the_wire(facts: MemberFacts) -> wire::Member {
    wire::Member {
        pid: facts.id.pid.0,
        start_time: facts.id.start.0,
        comm: facts.process.as_ref().map(|process| process.comm.to_string()).unwrap_or_default(),
        uid: facts.process.as_ref().map(|process| process.uid.0).unwrap_or_default(),
        evidence: evidence_on_the_wire(facts.evidence).to_owned(),
        threads: facts.threads.into_iter().map(thread_on_the_wire).collect(),
    }
}

fn thread_on_the_wire(facts: ThreadFacts) -> wire::Thread {
    let ThreadFacts { tid, thread, pinned, because } = facts;
    wire::Thread {
        tid: tid.0,
        comm: thread.comm.to_string(),
        state: thread.state.to_string(),
        demand: thread.demand.permille,
        hot: thread.demand.hot,
        last_cpu: thread.last_cpu.0,
        allowed: thread.allowed.to_string(),
        pinned: pinned.map(|pu| pu.0),
        because,
    }
}
