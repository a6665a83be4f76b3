//! Claims by cgroup: directories that name a job, and directories that do not.

use crate::test_process::TestProcess;

/// Cgroups of jobs: (path of a process, job, directory of the job).
const JOBS: &[(&str, &str, &str)] = &[
    // Slurm, v2: in steps, below tasks, without a step, several slurmds, another slice, in a container.
    (
        "/system.slice/slurmstepd.scope/job_12/step_0/user/task_0",
        "slurm:12",
        "/system.slice/slurmstepd.scope/job_12",
    ),
    (
        "/system.slice/slurmstepd.scope/job_12/step_batch/user/task_0/own/sub",
        "slurm:12",
        "/system.slice/slurmstepd.scope/job_12",
    ),
    ("/system.slice/slurmstepd.scope/job_12", "slurm:12", "/system.slice/slurmstepd.scope/job_12"),
    ("/a.slice/n1_slurmstepd.scope/job_7/step_extern", "slurm:7", "/a.slice/n1_slurmstepd.scope/job_7"),
    (
        "/docker/0a1b/system.slice/slurmstepd.scope/job_7/step_0+1/user",
        "slurm:7",
        "/docker/0a1b/system.slice/slurmstepd.scope/job_7",
    ),
    ("/../../slurmstepd.scope/job_7/step_0", "slurm:7", "/../../slurmstepd.scope/job_7"),
    // Slurm 26.05: named by SLUID.
    (
        "/system.slice/slurmstepd.scope/s1KZ8M3Q4T9W2X/step_0/user/task_0",
        "slurm:s1KZ8M3Q4T9W2X",
        "/system.slice/slurmstepd.scope/s1KZ8M3Q4T9W2X",
    ),
    // Slurm, v1.
    ("/slurm/uid_1000/job_12/step_0/task_0", "slurm:12", "/slurm/uid_1000/job_12"),
    ("/slurm_n1/uid_1000/job_12", "slurm:12", "/slurm_n1/uid_1000/job_12"),
    // LSF.
    ("/lsf/clusterA/job.204.7.1700000000", "lsf:204", "/lsf/clusterA/job.204.7.1700000000"),
    ("/lsf/clusterA/job.204[3].7.1700000000/x", "lsf:204[3]", "/lsf/clusterA/job.204[3].7.1700000000"),
    ("/lsf/clusterA/job.204", "lsf:204", "/lsf/clusterA/job.204"),
    // PBS.
    ("/pbs_jobs.service/jobid/123.server", "pbs:123.server", "/pbs_jobs.service/jobid/123.server"),
    ("/mine.service/jobid/124[3].srv/x", "pbs:124[3].srv", "/mine.service/jobid/124[3].srv"),
    ("/torque/88.srv.example.org/R0.t0", "pbs:88.srv.example.org", "/torque/88.srv.example.org"),
    // Grid Engine.
    ("/sge/31.1/4711", "sge:31.1", "/sge/31.1"),
    ("/system.slice/sge-31.2.scope", "sge:31.2", "/system.slice/sge-31.2.scope"),
    ("/system.slice/sge-31.2.service/x", "sge:31.2", "/system.slice/sge-31.2.service"),
    (
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012.31.master.scope",
        "sge:31.1",
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012.31.master.scope",
    ),
    (
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-31.4.slice/ocs8012.31.4.2.n1.scope",
        "sge:31.4",
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-31.4.slice",
    ),
    (
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-31.slice/ocs8012.31-1.n1.scope",
        "sge:31.1",
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012-jobs-31.slice",
    ),
    (
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012.31-1.n1.scope",
        "sge:31.1",
        "/ocs8012.slice/ocs8012-jobs.slice/ocs8012.31-1.n1.scope",
    ),
    // HTCondor.
    (
        "/system.slice/condor.service/htcondor/_var_execute_slot1_1@n1.example.org/slot1_1@n1.example.scope",
        "condor:slot1_1@n1.example.org",
        "/system.slice/condor.service/htcondor/_var_execute_slot1_1@n1.example.org",
    ),
    (
        "/htcondor/_scratch_slots_gpu3@n1/sub",
        "condor:_scratch_slots_gpu3@n1",
        "/htcondor/_scratch_slots_gpu3@n1",
    ),
    ("/htcondor/condor_x_slot2@n1", "condor:slot2@n1", "/htcondor/condor_x_slot2@n1"),
    // Flux, below the service manager of its user.
    (
        "/user.slice/user-64.slice/user@64.service/app.slice/imp-shell-0-fABC.service",
        "flux:fABC",
        "/user.slice/user-64.slice/user@64.service/app.slice/imp-shell-0-fABC.service",
    ),
    // OAR.
    ("/oar/alice_77", "oar:77", "/oar/alice_77"),
    ("/oar/bob_smith_77/x", "oar:77", "/oar/bob_smith_77"),
];

#[test]
fn a_job_directory_names_its_job_below_any_other_directory() {
    for (path, job, directory) in JOBS {
        let expected = format!("{job} by cgroup {directory}");
        assert_eq!(TestProcess::of("a.out").in_cgroup(path).claims_text(), expected, "{path}");
        let in_container = format!("/kubepods/pod1{path}");
        assert_eq!(
            TestProcess::of("a.out").in_cgroup(&in_container).claims_text(),
            format!("{job} by cgroup /kubepods/pod1{directory}"),
            "{in_container}"
        );
    }
}

#[test]
fn job_directories_below_the_service_manager_of_a_user_make_no_claim() {
    for (path, job, _) in JOBS {
        let below_user_manager = format!("/user.slice/user-1000.slice/user@1000.service/app.slice{path}");
        assert_eq!(
            TestProcess::of("a.out").in_cgroup(&below_user_manager).claims_text(),
            "nothing",
            "{job} in {below_user_manager}"
        );
    }
    let flux = "/user.slice/user-1000.slice/user@1000.service/imp-shell-0-fABC.service";
    assert_eq!(TestProcess::of("a.out").in_cgroup(flux).claims_text(), "nothing");
    assert_eq!(
        TestProcess::of("a.out").in_cgroup("/system.slice/imp-shell-0-fABC.service").claims_text(),
        "nothing"
    );
}

#[test]
fn the_outermost_job_directory_decides_because_a_job_may_make_directories_inside() {
    let cases = [
        (
            "/system.slice/slurmstepd.scope/job_5/step_0/user/task_0/slurmstepd.scope/job_6",
            "slurm:5 by cgroup /system.slice/slurmstepd.scope/job_5",
        ),
        ("/htcondor/_x_slot1@n1/slurmstepd.scope/job_6", "condor:slot1@n1 by cgroup /htcondor/_x_slot1@n1"),
        ("/htcondor/_x_slot1@n1/slurm/system", "condor:slot1@n1 by cgroup /htcondor/_x_slot1@n1"),
        ("/slurm/uid_7/job_5/step_0/sge/1.1", "slurm:5 by cgroup /slurm/uid_7/job_5"),
    ];
    for (path, expected) in cases {
        assert_eq!(TestProcess::of("a.out").in_cgroup(path).claims_text(), expected, "{path}");
    }
}

#[test]
fn a_directory_that_only_resembles_a_job_makes_no_claim() {
    let paths = [
        "/",
        "",
        "slurmstepd.scope/job_1",
        "/system.slice/slurmd.service",
        "/system.slice/slurmstepd.scope",
        "/system.slice/slurmstepd.scope/job_",
        "/system.slice/slurmstepd.scope/job_0",
        "/system.slice/slurmstepd.scope/job_007",
        "/system.slice/slurmstepd.scope/job_-1",
        "/system.slice/slurmstepd.scope/job_1x",
        "/system.slice/slurmstepd.scope/job_1\n",
        "/system.slice/slurmstepd.scope/x/job_1",
        "/system.slice/slurmstepd.scope/job_123456789012345678901",
        "/system.slice/slurmstepd.scope/job_5/step_0/user/task_0 (deleted)",
        "/system.slice/xslurmstepd.scope/job_1",
        "/system.slice/slurmstepd.scope/s1KZ8M3Q4T9W2",
        "/system.slice/slurmstepd.scope/s1KZ8M3Q4T9W2U",
        "/system.slice/slurmstepd.scope/uid_1/job_1",
        "/slurm/uid_x/job_1",
        "/slurm/uid_+1/job_1",
        "/slurm/job_1",
        "/slurm/uid_1/s1KZ8M3Q4T9W2X",
        "/lsf/clusterA/job.x.1",
        "/lsf/clusterA/job.7[.1",
        "/lsf/clusterA/job.7[x].1",
        "/lsf/job.7.1",
        "/pbs_jobs.service/jobid",
        "/pbs_jobs.service/jobid/server",
        "/pbs_jobs.service/jobid/1 2.srv",
        "/jobid/1.srv",
        "/torque",
        "/sge/31",
        "/sge/0",
        "/sge/31.undefined",
        "/ocs.slice/other-jobs.slice/other.31.scope",
        "/ocs.slice/ocs-shepherds.scope",
        "/ocs.slice/ocs-jobs.slice/other.31.scope",
        "/htcondor",
        "/htcondor/leaf",
        "/system.slice/condor.service/leaf",
        "/oar/77",
        "/oar/_77",
        "/oar/alice_x",
        "/user.slice/user-64.slice/user@64.service/imp-shell-x-fABC.service",
        "/user.slice/user-64.slice/user@64.service/imp-shell-+0-fABC.service",
        "/user.slice/user-64.slice/user@64.service/imp-shell-0-fA0C.service",
        "/user.slice/user-64.slice/user@64.service/imp-shell-0-f123456789abc.service",
        "/user.slice/user-64.slice/user@64.service/shell-0-fABC.service",
    ];
    for path in paths {
        assert_eq!(TestProcess::of("a.out").in_cgroup(path).claims_text(), "nothing", "{path:?}");
    }
}

#[test]
fn of_the_hierarchies_that_name_a_job_the_one_of_the_highest_rank_decides() {
    let v1 = TestProcess::of("a.out")
        .on_line("name=systemd", "/system.slice/slurmd.service")
        .on_line("cpu,cpuacct", "/slurm/uid_1/job_4")
        .on_line("memory", "/slurm/uid_1/job_3")
        .on_line("freezer", "/slurm/uid_1/job_2")
        .on_line("", "/system.slice/slurmd.service");
    assert_eq!(v1.claims_text(), "slurm:2 by cgroup /slurm/uid_1/job_2");
    let with_cpuset = v1.on_line("cpuset", "/slurm/uid_1/job_1");
    assert_eq!(with_cpuset.claims_text(), "slurm:1 by cgroup /slurm/uid_1/job_1");
    let unified = with_cpuset.on_line("", "/slurmstepd.scope/job_9");
    assert_eq!(unified.claims_text(), "slurm:9 by cgroup /slurmstepd.scope/job_9");
    let devices = TestProcess::of("a.out").on_line("devices", "/slurm/uid_1/job_4");
    assert_eq!(devices.claims_text(), "nothing");
}

#[test]
fn directories_of_the_scheduler_itself_name_no_job() {
    let cases = [
        ("slurmstepd", "/system.slice/slurmstepd.scope/system", "launcher of slurm"),
        ("slurmd", "/slurm/system", "helper of slurm"),
        ("slurmstepd", "/system.slice/slurmstepd.scope/job_5/step_0/slurm", "launcher of slurm"),
        ("bash", "/system.slice/slurmstepd.scope/job_5/step_0/slurm", "helper of slurm"),
    ];
    for (comm, path, expected) in cases {
        let test_process = TestProcess::of(comm).in_cgroup(path).with("SLURM_JOB_ID", "5");
        assert_eq!(test_process.claims_text(), expected, "{comm} in {path}");
    }
}

#[test]
fn the_placeholder_of_the_extern_step_is_a_helper() {
    let external = "/system.slice/slurmstepd.scope/job_5/step_extern/user/task_0";
    let claim = "slurm:5 by cgroup /system.slice/slurmstepd.scope/job_5";
    let placeholder = TestProcess::of("sleep").run_as("sleep 100000000").in_cgroup(external);
    assert_eq!(placeholder.claims_text(), format!("helper of slurm; {claim}"));
    let others = [
        TestProcess::of("sleep").run_as("sleep 60").in_cgroup(external),
        TestProcess::of("bash").run_as("sleep 100000000").in_cgroup(external),
        TestProcess::of("sleep")
            .run_as("sleep 100000000")
            .in_cgroup("/system.slice/slurmstepd.scope/job_5/step_0/user/task_0"),
    ];
    for other in others {
        assert_eq!(other.claims_text(), claim);
    }
}
