//! What is recognised, as tables: a path or an environment, and what it means.

use proptest::prelude::*;

use super::*;

fn host() -> Host {
    Host { name: "n2.cluster.example".to_owned() }
}

fn all() -> BTreeSet<Source> {
    Source::ALL.into_iter().collect()
}

fn show(claims: &Claims) -> String {
    let role = match claims.role {
        Role::Ordinary => String::new(),
        role => format!("{role:?} "),
    };
    let one = |claim: &Claim| {
        let mark = match &claim.mark {
            Mark::Cgroup(path) => format!("in {path}"),
            Mark::ExtraGroup(group) => format!("group {group}"),
            Mark::Environment { own } => format!("says {own:?}"),
        };
        let amount = match &claim.amount {
            None => String::new(),
            Some(Amount::Cores(n)) => format!(" {n} cores"),
            Some(Amount::Pus(n)) => format!(" {n} PUs"),
            Some(Amount::Exactly(cpus)) => format!(" {cpus}"),
        };
        format!("{} {mark}{amount}", claim.job)
    };
    format!("{role}{}", claims.claims.iter().map(one).collect::<Vec<_>>().join("; "))
}

fn path(path: &str) -> String {
    let marks = Marks { cgroups: vec![(String::new(), path.to_owned())], ..Marks::default() };
    show(&recognise(&Comm::from("sh"), &marks, &host(), &all()))
}

fn environment(variables: &[(&str, &str)]) -> String {
    let environ = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let marks = Marks { environ, ..Marks::default() };
    show(&recognise(&Comm::from("sh"), &marks, &host(), &all()))
}

#[test]
fn slurms_directories() {
    let scope = "/system.slice/slurmstepd.scope";
    for (given, expected) in [
        ("/job_12/step_0/user/task_0", "slurm:12 in /system.slice/slurmstepd.scope/job_12"),
        ("/job_12/step_batch/user/task_special", "slurm:12 in /system.slice/slurmstepd.scope/job_12"),
        ("/job_12/step_0/user/task_0/own/below", "slurm:12 in /system.slice/slurmstepd.scope/job_12"),
        ("/job_12/step_0/slurm", "Helper(Slurm) slurm:12 in /system.slice/slurmstepd.scope/job_12"),
        ("/system", ""),
        ("/job_", ""),
        ("/job_x1", ""),
        (
            "/s0123456789ABC/step_0/user/task_0",
            "slurm:s0123456789ABC in /system.slice/slurmstepd.scope/s0123456789ABC",
        ),
        ("/s0123456789ABL/step_0", ""),
    ] {
        assert_eq!(path(&format!("{scope}{given}")), expected, "{given}");
    }
    for (given, expected) in [
        (
            "/system.slice/n2_slurmstepd.scope/job_4/step_0/user/task_0",
            "slurm:4 in /system.slice/n2_slurmstepd.scope/job_4",
        ),
        (
            "/docker/abc/system.slice/slurmstepd.scope/job_4",
            "slurm:4 in /docker/abc/system.slice/slurmstepd.scope/job_4",
        ),
        ("/slurm/uid_1001/job_4/step_0/task_1", "slurm:4 in /slurm/uid_1001/job_4"),
        ("/slurm_n2/uid_1001/job_4", "slurm:4 in /slurm_n2/uid_1001/job_4"),
        ("/system.slice/slurmd.service", ""),
        ("/job_4/step_0", ""),
    ] {
        assert_eq!(path(given), expected, "{given}");
    }
}

#[test]
fn other_schedulers_directories() {
    for (given, expected) in [
        ("/lsf/c1/job.203.17.1795", "lsf:203 in /lsf/c1/job.203.17.1795"),
        ("/lsf/c1/job.204[3].17", "lsf:204[3] in /lsf/c1/job.204[3].17"),
        ("/pbs_jobs.service/jobid/124[3].srv", "pbs:124[3].srv in /pbs_jobs.service/jobid/124[3].srv"),
        ("/torque/99.srv/R0.t1", "pbs:99.srv in /torque/99.srv"),
        ("/sge/77.1/4711", "sge:77 in /sge/77.1"),
        ("/sge/77.2/4711", "sge:77.2 in /sge/77.2"),
        ("/system.slice/sge-77.1.scope", "sge:77 in /system.slice/sge-77.1.scope"),
        (
            "/ocs8012.slice/ocs8012-jobs.slice/ocs8012.31.master.scope",
            "sge:31 in /ocs8012.slice/ocs8012-jobs.slice/ocs8012.31.master.scope",
        ),
        (
            "/ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-31.slice/ocs8012.31.5.scope",
            "sge:31.5 in /ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-31.slice/ocs8012.31.5.scope",
        ),
        (
            "/system.slice/condor.service/htcondor/_var_lib_condor_execute_slot1_1@n2/x.scope",
            "condor:slot1_1 in /system.slice/condor.service/htcondor/_var_lib_condor_execute_slot1_1@n2",
        ),
        (
            "/user.slice/user-990.slice/user@990.service/imp-shell-0-fABC.service",
            "flux:fABC in /user.slice/user-990.slice/user@990.service/imp-shell-0-fABC.service",
        ),
        ("/user.slice/user-990.slice/user@990.service/shell-0-fABC.service", ""),
        ("/oar/jane_doe_4711", "oar:4711 in /oar/jane_doe_4711"),
        ("/user.slice/user-1001.slice/session-3.scope", ""),
    ] {
        assert_eq!(path(given), expected, "{given}");
    }
}

#[test]
fn a_path_that_a_user_can_make_names_no_job() {
    assert_eq!(path("/user.slice/user-1001.slice/user@1001.service/slurmstepd.scope/job_7/step_0"), "");
}

#[test]
fn the_unified_hierarchy_counts_first_then_those_that_schedulers_use() {
    let marks = Marks {
        cgroups: vec![
            ("freezer".to_owned(), "/slurm/uid_1/job_2/step_0".to_owned()),
            ("cpu,cpuacct".to_owned(), "/".to_owned()),
            (String::new(), "/user.slice".to_owned()),
        ],
        ..Marks::default()
    };
    let claims = recognise(&Comm::from("sh"), &marks, &host(), &all());
    assert_eq!(show(&claims), "slurm:2 in /slurm/uid_1/job_2");
}

#[test]
fn environments_and_counts() {
    let nodes = ("SLURM_JOB_NODELIST", "n[1-3],x7");
    for (variables, expected) in [
        (vec![("SLURM_JOB_ID", "7"), ("SLURM_CPUS_ON_NODE", "4")], "slurm:7 says Nothing 4 PUs"),
        (
            vec![("SLURM_JOB_ID", "7"), ("SLURM_CPUS_ON_NODE", "4"), ("SLURM_STEP_ID", "0")],
            "slurm:7 says Nothing",
        ),
        (
            vec![("SLURM_JOB_ID", "7"), ("SLURM_JOB_CPUS_PER_NODE", "72(x2),36(x2)"), nodes],
            "slurm:7 says Nothing 72 PUs",
        ),
        (
            vec![
                ("SLURM_JOB_ID", "7"),
                ("SLURM_JOB_CPUS_PER_NODE", "8(x2),4"),
                nodes,
                ("SLURMD_NODENAME", "n3"),
            ],
            "slurm:7 says Nothing 4 PUs",
        ),
        (vec![("SLURM_JOB_ID", "7"), ("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")], "slurm:7 says Nothing"),
        (
            vec![("LSB_JOBID", "203"), ("LSB_JOBINDEX", "0"), ("LSB_MCPU_HOSTS", "n1 4 n2 8 ")],
            "lsf:203 says Group 8 cores",
        ),
        (
            vec![("LSB_JOBID", "203"), ("LSB_JOBINDEX", "4"), ("LSB_MCPU_HOSTS", "n1 4 n3 8")],
            "lsf:203[4] says Group",
        ),
        (vec![("PBS_JOBID", "124[3].srv"), ("NCPUS", "6")], "pbs:124[3].srv says Session 6 cores"),
        (
            vec![("PBS_JOBID", "9.srv"), ("NCPUS", "1"), ("PBS_NUM_PPN", "8")],
            "pbs:9.srv says Session 8 cores",
        ),
        (
            vec![
                ("SGE_ROOT", "/o"),
                ("JOB_ID", "5"),
                ("SGE_TASK_ID", "undefined"),
                ("NSLOTS", "4"),
                ("NHOSTS", "1"),
            ],
            "sge:5 says Session 4 cores",
        ),
        (
            vec![("SGE_ROOT", "/o"), ("JOB_ID", "5"), ("SGE_TASK_ID", "9"), ("NSLOTS", "4"), ("NHOSTS", "2")],
            "sge:5.9 says Session",
        ),
        (vec![("JOB_ID", "5"), ("NSLOTS", "4")], ""),
        (vec![("_CONDOR_SLOT", "slot1_2@n2")], "condor:slot1_2 says Nothing"),
        (vec![("FLUX_JOB_ID", "\u{192}ABC")], "flux:fABC says Nothing"),
        (vec![("OAR_JOB_ID", "4711")], "oar:4711 says Nothing"),
        (vec![("PJW_JOB", "manual:mine")], "manual:mine says Nothing"),
        (vec![("PJW_JOB", "slurm:1")], ""),
    ] {
        assert_eq!(environment(&variables), expected, "{variables:?}");
    }
}

#[test]
fn hostile_environments_make_no_claim_and_no_count() {
    let long = "9".repeat(10_000);
    for value in ["", " ", "a b", "1\n2", "../1", "\"x|y\"", &long] {
        assert_eq!(environment(&[("SLURM_JOB_ID", value)]), "", "{value:.20}");
    }
    for count in ["0", "-1", "x", "65537", "99999999999999", "1e3"] {
        assert_eq!(
            environment(&[("SLURM_JOB_ID", "1"), ("SLURM_CPUS_ON_NODE", count)]),
            "slurm:1 says Nothing"
        );
    }
}

#[test]
fn host_lists_are_counted_without_being_unrolled_without_end() {
    assert_eq!(count::position("n[1-3,07],login2", "login2"), Ok(4));
    assert_eq!(count::position("n[08-11]", "n10"), Ok(2));
    for list in ["n[1-99999999999]", "n[1", "n[b-c]", "n[3-1]"] {
        assert!(matches!(count::position(list, "n2"), Err(count::CountError::NotAHostList(_))), "{list}");
    }
    assert_eq!(count::repeated("4(x2),8", 2), Ok(8));
    for text in ["", "4(x", "4(x0)", "4(x2)", "x(x2)", "4(x99999999999)"] {
        assert!(count::repeated(text, 2).is_err(), "{text}");
    }
}

#[test]
fn launchers_are_known_by_name_and_helpers_by_place() {
    for (name, expected) in [
        ("slurmstepd", "Launcher(Slurm) "),
        ("res", "Launcher(Lsf) "),
        ("pbs_mom", "Launcher(Pbs) "),
        ("sge_shepherd", "Launcher(Sge) "),
        ("condor_starter", "Launcher(Condor) "),
        ("flux-shell", "Launcher(Flux) "),
        ("bash", ""),
    ] {
        assert_eq!(show(&recognise(&Comm::from(name), &Marks::default(), &host(), &all())), expected);
    }
    let marks = Marks {
        cgroups: vec![(
            String::new(),
            "/system.slice/slurmstepd.scope/job_4/step_extern/user/task_special".to_owned(),
        )],
        command_line: "sleep 100000000".to_owned(),
        ..Marks::default()
    };
    let claims = recognise(&Comm::from("sleep"), &marks, &host(), &all());
    assert_eq!(claims.role, Role::Helper(Source::Slurm));
}

#[test]
fn a_source_that_is_off_is_not_looked_for() {
    let environ = BTreeMap::from([("SLURM_JOB_ID".to_owned(), "7".to_owned())]);
    let marks = Marks { environ, ..Marks::default() };
    let enabled = BTreeSet::from([Source::Pbs]);
    assert_eq!(recognise(&Comm::from("slurmstepd"), &marks, &host(), &enabled), Claims::default());
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,60}", host in "[a-z0-9.]{0,12}") {
        path(&text);
        for scheduler in SCHEDULERS {
            for name in scheduler.variables {
                environment(&[(name, &text)]);
            }
        }
        let _ = (count::position(&text, &host), count::repeated(&text, 3));
    }
}
