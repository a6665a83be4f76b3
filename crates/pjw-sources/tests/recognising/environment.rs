//! Claims by variables of the environment and by names of programs, and values that are ignored.

use std::collections::BTreeSet;

use pjw_core::ids::Comm;
use pjw_core::job::JobSource;
use pjw_core::snapshot::JobIdAttribute;
use pjw_sources::{batch_system_of_launcher, job_variable_names};

use crate::test_process::{TestProcess, describe};

#[test]
fn variables_give_the_number_of_tasks_of_a_job() {
    let cases = [
        ("SLURM_JOB_ID=12 SLURM_TASKS_PER_NODE=2(x3)", "slurm:12 by environment, 2 tasks"),
        (
            "SLURM_JOB_ID=12 SLURM_TASKS_PER_NODE=2,3 SLURM_JOB_NODELIST=n[1-2] SLURMD_NODENAME=n2",
            "slurm:12 by environment, 3 tasks",
        ),
        ("SLURM_JOB_ID=12 SLURM_TASKS_PER_NODE=many", "slurm:12 by environment"),
        ("FLUX_JOB_ID=f1 FLUX_JOB_SIZE=8 FLUX_JOB_NNODES=2", "flux:f1 by environment, 4 tasks"),
        ("FLUX_JOB_ID=f1 FLUX_JOB_SIZE=7 FLUX_JOB_NNODES=2", "flux:f1 by environment"),
        ("FLUX_JOB_ID=f1 FLUX_JOB_SIZE=7 FLUX_JOB_NNODES=0", "flux:f1 by environment"),
        ("FLUX_JOB_ID=f1 FLUX_JOB_SIZE=+8 FLUX_JOB_NNODES=2", "flux:f1 by environment"),
    ];
    for (variables, expected) in cases {
        assert_eq!(TestProcess::of("a").with_all(variables).claims_text(), expected, "{variables}");
    }
}

#[test]
fn variables_give_a_job_and_its_number_of_cores_or_pus() {
    let cases = [
        // Slurm: the count of this position in the list, of all nodes, of the batch step, and none of another step.
        ("SLURM_JOB_ID=12", "slurm:12 by environment"),
        ("SLURM_JOBID=12", "slurm:12 by environment"),
        ("SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=4(x2)", "slurm:12 by environment, 4 PUs"),
        (
            "SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=4(x2),8 SLURM_JOB_NODELIST=n[1-3] SLURMD_NODENAME=n3",
            "slurm:12 by environment, 8 PUs",
        ),
        (
            "SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=72,36 SLURM_JOB_NODELIST=login2,n[1-1]",
            "slurm:12 by environment, 36 PUs",
        ),
        (
            "SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=72,36 SLURM_NODELIST=n1.example.org,n2",
            "slurm:12 by environment, 72 PUs",
        ),
        (
            "SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=72,36 SLURM_JOB_NODELIST=n[7-8]",
            "slurm:12 by environment",
        ),
        (
            "SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=72,36 SLURM_JOB_NODELIST=n[1-3]",
            "slurm:12 by environment",
        ),
        ("SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=72,36", "slurm:12 by environment"),
        ("SLURM_JOB_ID=12 SLURM_CPUS_ON_NODE=2", "slurm:12 by environment, 2 PUs"),
        ("SLURM_JOB_ID=12 SLURM_CPUS_ON_NODE=2 SLURM_STEP_ID=0", "slurm:12 by environment"),
        ("SLURM_JOB_ID=12 SLURM_SCRIPT_CONTEXT=prolog_task", "slurm:12 by environment"),
        ("SLURM_JOB_ID=12 SLURM_SCRIPT_CONTEXT=prolog_slurmd", "nothing"),
        ("SLURM_JOB_ID=12 SLURM_SCRIPT_CONTEXT=epilog_slurmd", "nothing"),
        // LSF.
        ("LSB_JOBID=102 LSB_JOBINDEX=0", "lsf:102 by environment (own group)"),
        ("LSB_JOBID=102", "lsf:102 by environment (own group)"),
        ("LSB_JOBID=102 LSB_JOBINDEX=3", "lsf:102[3] by environment (own group)"),
        ("LSB_JOBID=102 LSB_JOBINDEX=x", "nothing"),
        ("LSB_JOBID=102 LSB_HOSTS=n1", "lsf:102 by environment (own group), 1 cores"),
        ("LSB_JOBID=102 LSB_DJOB_NUMPROC=4", "lsf:102 by environment (own group)"),
        // PBS.
        ("PBS_JOBID=124[3].srv NCPUS=4", "pbs:124[3].srv by environment (own session)"),
        (
            "PBS_JOBID=7.srv PBS_NUM_PPN=4 PBS_NUM_NODES=1 PBS_NP=4",
            "pbs:7.srv by environment (own session), 4 cores",
        ),
        ("PBS_JOBID=7.srv PBS_NUM_PPN=4 PBS_NUM_NODES=2 PBS_NP=8", "pbs:7.srv by environment (own session)"),
        ("PBS_JOBID=7.srv PBS_NUM_PPN=1 PBS_NUM_NODES=1 PBS_NP=8", "pbs:7.srv by environment (own session)"),
        ("PBS_JOBID=7.srv PBS_NUM_NODES=1", "pbs:7.srv by environment (own session)"),
        // Grid Engine.
        ("JOB_ID=31 SGE_TASK_ID=undefined", "sge:31.1 by environment (own session)"),
        ("JOB_ID=31 SGE_TASK_ID=4 NSLOTS=8 NHOSTS=1", "sge:31.4 by environment (own session), 8 cores"),
        ("JOB_ID=31 SGE_TASK_ID=4 NSLOTS=8 NHOSTS=2", "sge:31.4 by environment (own session)"),
        ("JOB_ID=31 SGE_TASK_ID=4 NSLOTS=8", "sge:31.4 by environment (own session)"),
        ("JOB_ID=31", "nothing"),
        (include_str!("../fixtures/sge-job.environ.txt"), "sge:17.1 by environment (own session), 2 cores"),
        // HTCondor, Flux, OAR.
        ("_CONDOR_SLOT=slot1_1 OMP_NUM_THREADS=4", "condor:slot1_1 by environment"),
        ("FLUX_JOB_ID=fABC", "flux:fABC by environment"),
        ("FLUX_JOB_ID=ƒABC", "flux:fABC by environment"),
        ("FLUX_JOB_ID=ƒ", "nothing"),
        ("FLUX_JOB_ID=12345", "nothing"),
        ("OAR_JOB_ID=77", "oar:77 by environment"),
        ("OAR_JOBID=77", "oar:77 by environment"),
    ];
    for (variables, expected) in cases {
        assert_eq!(TestProcess::of("a.out").with_all(variables).claims_text(), expected, "{variables}");
    }
}

#[test]
fn the_list_of_hosts_of_lsf_may_end_in_a_blank() {
    let test_process = TestProcess::of("a.out").with("LSB_JOBID", "102").with("LSB_MCPU_HOSTS", "n1 4 n2 8 ");
    assert_eq!(test_process.claims_text(), "lsf:102 by environment (own group), 4 cores");
    let without_this_host = test_process.with("LSB_MCPU_HOSTS", "n2 8 ").with("LSB_HOSTS", "n1 n1");
    assert_eq!(without_this_host.claims_text(), "lsf:102 by environment (own group)");
}

#[test]
fn a_count_that_no_machine_can_have_is_ignored() {
    for count in ["0", "65537", "4294967295", "4294967296", "-1", "+4", "four", "4.5", "", " 4"] {
        let cases = [
            TestProcess::of("a").with("SLURM_JOB_ID", "1").with("SLURM_CPUS_ON_NODE", count),
            TestProcess::of("a").with("SLURM_JOB_ID", "1").with("SLURM_JOB_CPUS_PER_NODE", count),
            TestProcess::of("a").with("LSB_JOBID", "1").with("LSB_MCPU_HOSTS", &format!("n1 {count}")),
            TestProcess::of("a").with_all("JOB_ID=1 SGE_TASK_ID=1 NHOSTS=1").with("NSLOTS", count),
            TestProcess::of("a")
                .with_all("PBS_JOBID=1 PBS_NUM_NODES=1")
                .with("PBS_NP", count)
                .with("PBS_NUM_PPN", count),
        ];
        for test_process in cases {
            let claims = test_process.claims().job_references;
            // For LSF " 4" is a pair of its own, because blanks separate the tokens.
            let claims_text = claims[0].cpu_request.is_some()
                && !(count == " 4" && claims[0].job.source() == JobSource::Lsf);
            assert!(!claims_text, "{count:?}: {claims:?}");
        }
    }
}

#[test]
fn a_variable_with_a_job_id_makes_only_a_claim_by_environment() {
    let test_process = TestProcess::of("a.out")
        .in_cgroup("/user.slice/user-1000.slice/session-3.scope")
        .with("SLURM_JOB_ID", "4");
    let claims = test_process.claims().job_references;
    assert!(
        matches!(claims[..], [ref claim] if matches!(claim.kind, JobIdAttribute::Environment { .. })),
        "{claims:?}"
    );
}

#[test]
fn an_environment_that_contradicts_the_cgroup_makes_no_claim() {
    let job_5 = || TestProcess::of("a.out").in_cgroup("/slurmstepd.scope/job_5/step_0/user/task_0");
    let by_cgroup = "slurm:5 by cgroup /slurmstepd.scope/job_5";
    let with_other_id = job_5().with_all("SLURM_JOB_ID=6 SLURM_JOB_CPUS_PER_NODE=64");
    assert_eq!(with_other_id.claims_text(), by_cgroup);
    let with_same_id = job_5().with_all("SLURM_JOB_ID=5 SLURM_JOB_CPUS_PER_NODE=2");
    assert_eq!(with_same_id.claims_text(), format!("{by_cgroup}, 2 PUs; slurm:5 by environment, 2 PUs"));
    let with_id_of_flux = job_5().with_all("FLUX_JOB_ID=fABC");
    assert_eq!(with_id_of_flux.claims_text(), format!("{by_cgroup}; flux:fABC by environment"));
}

#[test]
fn a_job_named_by_sluid_gets_its_count_from_the_environment_that_names_it() {
    let job = || TestProcess::of("a.out").in_cgroup("/slurmstepd.scope/s1KZ8M3Q4T9W2X/step_0/user/task_0");
    let by_cgroup = "slurm:s1KZ8M3Q4T9W2X by cgroup /slurmstepd.scope/s1KZ8M3Q4T9W2X";
    let with_same_sluid =
        job().with_all("SLURM_JOB_ID=5 SLURM_JOB_SLUID=s1KZ8M3Q4T9W2X SLURM_JOB_CPUS_PER_NODE=2");
    assert_eq!(with_same_sluid.claims_text(), format!("{by_cgroup}, 2 PUs"));
    let with_other_sluid =
        job().with_all("SLURM_JOB_ID=5 SLURM_JOB_SLUID=s1KZ8M3Q4T9W2Y SLURM_JOB_CPUS_PER_NODE=2");
    assert_eq!(with_other_sluid.claims_text(), by_cgroup);
}

#[test]
fn a_supplementary_group_adds_nothing_to_a_claim_by_environment() {
    let test_process =
        TestProcess::of("a.out").in_groups(&[20_001]).with_all("JOB_ID=31 SGE_TASK_ID=undefined");
    assert_eq!(test_process.claims_text(), "sge:31.1 by environment (own session)");
}

#[test]
fn disabled_sources_are_ignored() {
    let test_process =
        TestProcess::of("slurmstepd").in_cgroup("/slurmstepd.scope/job_5/step_0").with_all("LSB_JOBID=1");
    let lsf_only = BTreeSet::from([JobSource::Lsf]);
    assert_eq!(describe(&test_process.claims_among(&lsf_only)), "lsf:1 by environment (own group)");
    assert_eq!(describe(&test_process.claims_among(&BTreeSet::new())), "nothing");
}

#[test]
fn launchers_are_recognised_by_the_name_that_the_kernel_keeps() {
    let cases = [
        ("slurmstepd", Some(JobSource::Slurm)),
        ("res", Some(JobSource::Lsf)),
        ("sbatchd", Some(JobSource::Lsf)),
        ("pbs_mom", Some(JobSource::Pbs)),
        ("sge_shepherd", Some(JobSource::Sge)),
        ("condor_starter", Some(JobSource::Condor)),
        ("flux-shell", Some(JobSource::Flux)),
        ("flux-imp", Some(JobSource::Flux)),
        ("oarexec", Some(JobSource::Oar)),
        ("slurmd", None),
        ("resx", None),
        ("", None),
    ];
    for (name, source) in cases {
        assert_eq!(batch_system_of_launcher(&Comm::from(name)), source, "{name}");
    }
    assert_eq!(TestProcess::of("sge_shepherd").claims_text(), "launcher of sge");
}

#[test]
fn the_variables_to_read_are_those_of_all_systems() {
    let wanted = job_variable_names();
    for name in
        ["SLURM_JOB_ID", "LSB_MCPU_HOSTS", "PBS_JOBID", "JOB_ID", "_CONDOR_SLOT", "FLUX_JOB_ID", "OAR_JOB_ID"]
    {
        assert!(wanted.contains(name), "{name}");
    }
    assert!(!wanted.contains("LSB_JOBNAME"), "it holds command lines, and nothing that pjw needs");
}

#[test]
fn the_cpus_on_which_pjwctl_spawn_started_a_process_are_recognised_if_they_are_a_cpu_list() {
    for (value, expected) in [("0-3,8", Some("0-3,8")), ("", None), ("x", None), ("3-1", None)] {
        let process = TestProcess::of("solver").with("PJW_CPUS", value);
        assert_eq!(process.claims().start_cpus, None, "a process of pjwctl run");
        let identity = process.with("PJW_RANK", "0").claims();
        assert_eq!(identity.start_cpus.map(|cpus| cpus.to_string()).as_deref(), expected, "{value}");
    }
}
