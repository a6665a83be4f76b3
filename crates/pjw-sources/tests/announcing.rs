//! The interpretation of the variables and arguments of hooks: recorded ones, and hostile ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)] // a test may fail

use pjw_core::job::CpuRequest;
use pjw_core::snapshot::BatchAttributes;
use pjw_sources::LocalHost;
use pjw_sources::announcement::{self, HookInputError, JobAnnouncement, JobOwner};
use pjw_sources::task::{self, SlurmTaskCpus};

const PROLOG: &str = include_str!("fixtures/slurm-prolog.environ.txt");
const EPILOG: &str = include_str!("fixtures/slurm-epilog.environ.txt");
const STEP: &str = include_str!("fixtures/slurm-task-prolog-step.environ.txt");
const BATCH: &str = include_str!("fixtures/slurm-task-prolog-batch.environ.txt");
const OPENLAVA: &str = include_str!("fixtures/openlava-job.environ.txt");
const GRID_ENGINE: &str = include_str!("fixtures/sge-job.environ.txt");

fn attributes(text: &str, more: &[(&str, &str)]) -> BatchAttributes {
    let pair = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    let lines = text.lines().filter_map(|line| line.split_once('='));
    BatchAttributes {
        environ: lines.chain(more.iter().copied()).map(pair).collect(),
        ..BatchAttributes::default()
    }
}

fn host() -> LocalHost {
    LocalHost { name: "n1.example.org".to_owned(), flux_user: None }
}

/// The announcement of a hook, or the reason why there is none, as text.
fn describe(announcement_text: Result<JobAnnouncement, HookInputError>) -> String {
    let JobAnnouncement { job, alias, owner, cpu_request } = match announcement_text {
        Ok(announcement_text) => announcement_text,
        Err(error) => return format!("no job: {error}"),
    };
    let alias = alias.map(|alias| format!(" alias {alias}")).unwrap_or_default();
    let owner = match owner {
        Ok(JobOwner::Uid(uid)) => format!("user {uid}"),
        Ok(JobOwner::Name(name)) => format!("user {name:?}"),
        Err(error) => format!("nobody: {error}"),
    };
    let request = match cpu_request {
        Ok(CpuRequest::Pus(n)) => format!("{n} PUs"),
        Ok(CpuRequest::Cores(n)) => format!("{n} cores"),
        Ok(CpuRequest::Exactly(cpus)) => format!("PUs {cpus}"),
        Err(error) => format!("nothing: {error}"),
    };
    format!("{job}{alias}, {owner}, {request}")
}

fn slurm(more: &[(&str, &str)]) -> String {
    describe(announcement::from_slurm(&attributes(PROLOG, more), &host()))
}

#[test]
fn the_variables_of_the_prolog_and_the_epilog_of_slurm_give_the_same_job() {
    assert_eq!(slurm(&[]), "slurm:4, user 1001, 2 PUs");
    assert_eq!(
        describe(announcement::from_slurm(&attributes(EPILOG, &[]), &host())),
        "slurm:4, user 1001, 2 PUs"
    );
    let sluid = slurm(&[("SLURM_JOB_SLUID", "s1KZ0000000000")]);
    assert_eq!(sluid, "slurm:4 alias slurm:s1KZ0000000000, user 1001, 2 PUs");
    let other = slurm(&[("SLURM_JOB_CPUS_PER_NODE", "8(x2),3"), ("SLURM_NODELIST", "a[1-2],n1")]);
    assert_eq!(other, "slurm:4, user 1001, 3 PUs");
}

#[test]
fn an_error_names_the_variable_and_only_the_beginning_of_its_value() {
    let long = "7".repeat(5_000);
    let announcement_text = slurm(&[("SLURM_JOB_ID", &long)]);
    assert!(
        announcement_text.starts_with("no job: SLURM_JOB_ID names no job") && announcement_text.len() < 150,
        "{announcement_text}"
    );
    for uid in ["1 2", "+1001"] {
        assert!(slurm(&[("SLURM_JOB_UID", uid)]).contains("nobody: SLURM_JOB_UID names no user"), "{uid}");
    }
    assert!(
        slurm(&[("SLURM_JOB_CPUS_PER_NODE", "2,2(x")]).contains("nothing: SLURM_JOB_CPUS_PER_NODE: part 2")
    );
    let huge_list = [("SLURM_JOB_CPUS_PER_NODE", "1,2"), ("SLURM_NODELIST", "n[1-9999999999]")];
    assert!(slurm(&huge_list).contains("more nodes than any cluster has"));
    assert_eq!(describe(announcement::from_slurm(&BatchAttributes::default(), &host())), {
        "no job: SLURM_JOB_ID is not set: check that the scheduler calls this hook as the right kind of hook"
    });
}

#[test]
fn the_variables_of_slurm_give_the_cpus_of_a_task_its_step_and_its_job() {
    let of = |text, more: &[(&str, &str)]| task::read_slurm_task_cpus(&attributes(text, more), &host());
    let recorded =
        SlurmTaskCpus { cpus_per_task: Some(2), step_cpus: Some(2), job_cpus: Some(2), task_count: 1 };
    assert_eq!((of(STEP, &[]), of(BATCH, &[])), (recorded, recorded));
    let step = of(STEP, &[("SLURM_STEP_TASKS_PER_NODE", "4(x2),3"), ("SLURM_STEP_NODELIST", "a[1-2],n1")]);
    assert_eq!(step.task_count, 3);
    assert_eq!(
        of(BATCH, &[("SLURM_TASKS_PER_NODE", "6")]).task_count,
        6,
        "the batch script starts all tasks of the node"
    );
    let invalid =
        [("SLURM_CPUS_PER_TASK", "-1"), ("SLURM_CPUS_ON_NODE", "x"), ("SLURM_STEP_TASKS_PER_NODE", "0")];
    let nothing = SlurmTaskCpus { cpus_per_task: None, step_cpus: None, job_cpus: Some(2), task_count: 1 };
    assert_eq!(of(STEP, &invalid), nothing);
    assert_eq!(
        task::read_slurm_task_cpus(&BatchAttributes::default(), &host()),
        SlurmTaskCpus { job_cpus: None, ..nothing }
    );
}

#[test]
fn the_variables_of_lsf_give_the_job_its_user_and_its_cores_on_this_node() {
    let lsf = |more: &[(&str, &str)]| describe(announcement::from_lsf(&attributes(OPENLAVA, more), &host()));
    assert_eq!(lsf(&[]), "lsf:204, user \"nobody\", 2 cores");
    assert_eq!(lsf(&[("LSB_JOBINDEX", "3")]), "lsf:204[3], user \"nobody\", 2 cores");
    assert_eq!(lsf(&[("LSB_MCPU_HOSTS", "a 4 n1 3")]), "lsf:204, user \"nobody\", 3 cores");
    assert!(lsf(&[("LSB_MCPU_HOSTS", "a 4")]).contains("LSB_MCPU_HOSTS does not name this node, n1"));
    assert!(lsf(&[("LSB_MCPU_HOSTS", "n1 2 n2")]).contains("word 4 of the list of hosts"));
    assert!(lsf(&[("LSB_JOB_EXECUSER", "a:b")]).contains("names no user"));
    assert!(lsf(&[("LSB_JOBINDEX", "-1")]).starts_with("no job: LSB_JOBID"));
}

#[test]
fn the_arguments_of_openpbs_give_the_job_its_user_and_its_pus_on_this_node() {
    let pbs = |words: &[&str]| describe(announcement::from_openpbs(words));
    let one = "(n1:ncpus=2:mem=1048576kb)";
    assert_eq!(pbs(&["123.srv", "alice", one, "n1"]), "pbs:123.srv, user \"alice\", 2 PUs");
    let several = "(n1[0]:ncpus=4:mem=4gb+n1[1]:mem=2gb)+(n1[1]:ncpus=3+n10:ncpus=1)";
    assert_eq!(pbs(&["124[3].srv", "alice", several, "n1"]), "pbs:124[3].srv, user \"alice\", 7 PUs");
    assert!(pbs(&["1.srv", "alice", one, "n2"]).contains("exec_vnode does not name this node, n2"));
    assert!(pbs(&["1.srv", "alice", "(n1:ncpus=-2)", "n1"]).contains("part 1 of the list of counts"));
    assert!(pbs(&["1.srv", "alice", "(n1:mem=2gb)", "n1"]).contains("a job cannot have 0 cores"));
    assert!(pbs(&["1.srv"]).starts_with("pbs:1.srv, nobody"), "the job id is enough to end the job");
    assert!(pbs(&["a b"]).starts_with("no job: the first argument names no job"));
    assert!(pbs(&[]).starts_with("no job: the first argument is not set"));
}

#[test]
fn the_cores_of_a_torque_job_come_from_the_argument_with_its_limits() {
    let torque = |limits: &str, hosts: &str| {
        describe(announcement::from_torque(&[
            "7.srv", "alice", "users", "name", limits, "batch", "", "/job", hosts,
        ]))
    };
    let announcement_text = |rest: &str| format!("pbs:7.srv, user \"alice\", {rest}");
    assert_eq!(torque("neednodes=1:ppn=2,nodes=1:ppn=2,walltime=60", ""), announcement_text("2 cores"));
    assert_eq!(torque("nodes=1,walltime=60", "n1"), announcement_text("1 cores"));
    assert_eq!(torque("nodes=n1:ppn=3", "n1"), announcement_text("3 cores"));
    assert_eq!(torque("nodes=2:ppn=4", "n1,n2"), announcement_text("4 cores"));
    for (limits, hosts) in
        [("nodes=2:ppn=4", "n1"), ("nodes=1:ppn=4+1:ppn=2", "n1,n2"), ("walltime=60", "n1")]
    {
        assert!(torque(limits, hosts).contains("does not give its hook"), "{limits} {hosts}");
    }
    assert!(torque("nodes=1:ppn=many", "").contains("not a whole number above 0"));
    assert!(
        describe(announcement::from_torque(&["7.srv", "alice"])).contains("does not give its hook"),
        "an old version passes fewer arguments"
    );
}

#[test]
fn the_cores_of_a_grid_engine_job_are_its_slots_on_this_host() {
    let environ = "JOB_ID=31\nSGE_TASK_ID=undefined\nNSLOTS=6\nNHOSTS=2\n";
    let sge = |text: &str, more: &[(&str, &str)], file: Option<&str>| {
        describe(announcement::from_sge(&attributes(text, more), &host(), Some("alice"), file))
    };
    let recorded = Some("n1 2 main@n1 UNDEFINED\n");
    assert_eq!(sge(GRID_ENGINE, &[], recorded), "sge:17.1, user \"alice\", 2 cores");
    assert_eq!(sge(GRID_ENGINE, &[], None), "sge:17.1, user \"alice\", 2 cores");
    let file = "n2.example.org 2 all.q@n2.example.org UNDEFINED\nn1.example.org 4 all.q@n1 0,0:0,1\n";
    assert_eq!(sge(environ, &[], Some(file)), "sge:31.1, user \"alice\", 4 cores");
    assert!(
        sge(environ, &[], None).contains("sge does not give its hook"),
        "without the file, 6 slots on two hosts give no count for this host"
    );
    assert_eq!(sge(environ, &[("NHOSTS", "1")], None), "sge:31.1, user \"alice\", 6 cores");
    assert_eq!(sge(environ, &[("SGE_TASK_ID", "5")], Some(file)), "sge:31.5, user \"alice\", 4 cores");
    let of_a_user = Some("n1 64 q r\n");
    assert_eq!(
        sge(environ, &[("NSLOTS", "1")], of_a_user),
        "sge:31.1, user \"alice\", 1 cores",
        "at most NSLOTS"
    );
    assert!(sge(environ, &[], Some("n2 2 q r\n")).contains("PE_HOSTFILE does not name this node"));
    for slots in ["-6", "+6"] {
        let text = sge(environ, &[("NSLOTS", slots), ("NHOSTS", "1")], None);
        assert!(text.contains("NSLOTS is not a whole number"), "{slots}: {text}");
    }
    assert!(
        describe(announcement::from_sge(&attributes(environ, &[]), &host(), None, None))
            .contains("nobody: the first")
    );
    assert!(sge(environ, &[("JOB_ID", "0")], None).starts_with("no job"));
}

#[test]
fn the_cores_and_the_user_of_an_htcondor_job_come_from_its_ads() {
    let slot = attributes("_CONDOR_SLOT=slot1_3", &[]);
    let machine = "Arch = \"X86_64\"\ncpus = 4\nTotalCpus = 16.0\n";
    let announcement_text =
        describe(announcement::from_condor(&slot, machine, "Owner = \"alice\"\nCmd = \"/bin/true\"\n"));
    assert_eq!(announcement_text, "condor:slot1_3, user \"alice\", 4 cores");
    let announcement_text = describe(announcement::from_condor(&slot, "Cpus = 4.5\n", "Owner = alice\n"));
    assert!(
        announcement_text.contains("nobody: Owner in the job's ad is not set")
            && announcement_text.contains("not a whole"),
        "{announcement_text}"
    );
    assert!(describe(announcement::from_condor(&slot, "", "")).contains("condor does not give its hook"));
    let named = |name: &str| {
        describe(announcement::from_condor(&slot, &format!("Name = \"{name}\"\nCpus = 1\n"), ""))
    };
    let full = named("slot1_3@n1.example.org");
    assert!(full.starts_with("condor:slot1_3@n1.example.org alias condor:slot1_3, "), "{full}");
    assert!(
        named("slot1_4@n1.example.org").starts_with("condor:slot1_3, "),
        "the ad of another slot is ignored"
    );
    let bad = attributes("_CONDOR_SLOT=slot 1", &[]);
    assert!(describe(announcement::from_condor(&bad, "", "")).starts_with("no job: _CONDOR_SLOT"));
}

#[test]
fn the_variables_of_flux_give_the_job_and_its_user_and_no_count() {
    let flux = |id: &str, user: &str| {
        let environ = [("FLUX_JOB_ID", id), ("FLUX_JOB_USERID", user)];
        describe(announcement::from_flux(&attributes("", &environ)))
    };
    let no_count = "nothing: flux does not give its hook the number of cores of the job on this node: call the hook with --cores N";
    assert_eq!(flux("ƒ3ETxsR9H", "1001"), format!("flux:f3ETxsR9H, user 1001, {no_count}"));
    assert!(flux("f3ETxsR9H", "").contains("nobody: FLUX_JOB_USERID is not set"));
    assert!(flux("12345", "1001").starts_with("no job: FLUX_JOB_ID"));
}
