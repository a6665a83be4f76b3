//! Hostile environments, command lines and program names: no panic, no id that cannot be printed, no claim by cgroup.

use std::collections::BTreeSet;

use pjw_core::ids::{Comm, Uid};
use pjw_core::job::JobSource;
use pjw_core::process_cgroups::ProcessCgroups;
use pjw_core::snapshot::{BatchAttributes, JobIdAttribute};
use pjw_sources::{LocalHost, counts, hostlist, job_variable_names, recognise_jobs};
use proptest::prelude::*;

use crate::test_process::TestProcess;

const ID_VARIABLES: [&str; 7] =
    ["SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID", "_CONDOR_SLOT", "FLUX_JOB_ID", "OAR_JOB_ID"];

#[test]
fn an_id_that_no_scheduler_gives_makes_no_claim() {
    let long = "1".repeat(10_000);
    let invalid_ids =
        ["", " ", "0", "-1", "1 2", "1\n2", "1\u{1b}[2J", "../../etc", "é", "$(reboot)", "\"|;'", &long];
    for variable in ID_VARIABLES {
        for id in invalid_ids {
            let claims_text =
                TestProcess::of("a").with(variable, id).with("SGE_TASK_ID", "undefined").claims_text();
            // The name of a slot may be a number.
            let is_valid = variable == "_CONDOR_SLOT" && (id == "0" || id == "-1");
            assert_eq!(claims_text == "nothing", !is_valid, "{variable}={id:?}: {claims_text}");
        }
    }
}

#[test]
fn the_name_of_a_job_is_not_read_whatever_it_contains() {
    let name = "sh -c 'echo \"$LSB_JOBID\" | tee /tmp/x' ; LSB_JOBID=9\nSLURM_JOB_ID=1";
    let test_process = TestProcess::of("a").with("LSB_JOBID", "102").with("LSB_JOBNAME", name).run_as(name);
    assert_eq!(test_process.claims_text(), "lsf:102 by environment (own group)");
}

#[test]
fn a_list_of_billions_of_nodes_gives_no_count() {
    let lists = [
        "n[1-99999999999]",
        "n[0-9999999999]",
        "n[0-9999][0-9999][0-9999]",
        "n[",
        "n1,,n2",
        "n[1-2],n[1-9999999999]",
    ];
    for list_of_nodes in lists {
        let test_process = TestProcess::of("a").with_all("SLURM_JOB_ID=12 SLURM_JOB_CPUS_PER_NODE=1,2");
        assert_eq!(
            test_process.with("SLURM_JOB_NODELIST", list_of_nodes).claims_text(),
            "slurm:12 by environment",
            "{list_of_nodes}"
        );
    }
}

/// Text that consists of parts of valid input, so that it passes the first checks.
fn job_like_text() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "/slurmstepd.scope/job_5",
        "/step_0",
        "/slurm/uid_1/job_6",
        "/sge/1.1",
        "/oar/a_7",
        "/lsf/c/job.8[2].1",
        "/htcondor/_x_slot1@n1",
        "/torque/9.srv",
        "/user@64.service/imp-shell-0-fA.service",
        "job_",
        "step_",
        "slurm",
        "slurmstepd.scope",
        "_slurmstepd.scope",
        "uid_",
        "/",
        "system",
        "extern",
        "lsf",
        "job.",
        "[",
        "]",
        ".",
        "-",
        ",",
        "(x",
        ")",
        "jobid",
        ".service",
        "torque",
        "sge",
        "sge-",
        ".scope",
        ".slice",
        "-jobs",
        "htcondor",
        "_slot",
        "@",
        "imp-shell-",
        "user@",
        "64",
        "0",
        "1",
        "12",
        "9999999999",
        "f",
        "ƒ",
        "oar",
        "_",
        " ",
        "n",
        "n1",
        "é",
        "\n",
        "\0",
        "undefined",
        " (deleted)",
        "..",
    ]);
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![job_like_text(), any::<String>()]
}

fn attributes(trusted_cgroups: bool) -> impl Strategy<Value = BatchAttributes> {
    let names: Vec<&'static str> = job_variable_names().into_iter().collect();
    let name = prop::sample::select(names).prop_map(str::to_owned);
    let controllers = prop::sample::select(vec!["", "cpuset", "name=systemd", "freezer", "cpu,cpuacct", "x"]);
    let line = (controllers, text()).prop_map(move |(controllers, path)| {
        let top = if trusted_cgroups { "" } else { "/user.slice/user-7.slice/user@7.service" };
        (controllers.to_owned(), format!("{top}/{path}"))
    });
    let (lines, variables) =
        (prop::collection::vec(line, 0..4), prop::collection::btree_map(name, text(), 0..8));
    (lines, variables, any::<Vec<u32>>(), text()).prop_map(|(lines, environ, groups, command_line)| {
        let cgroups = ProcessCgroups { lines };
        BatchAttributes { cgroups, environ, supplementary_groups: groups, command_line }
    })
}

fn is_at_or_below(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn host() -> impl Strategy<Value = LocalHost> {
    (text(), any::<Option<u32>>()).prop_map(|(name, user)| LocalHost { name, flux_user: user.map(Uid) })
}

proptest! {
    #[test]
    fn hostile_attributes_cause_no_panic_and_no_claim_by_a_path_that_is_not_theirs(
        comm in any::<Vec<u8>>(), attributes in attributes(true), host in host()
    ) {
        let enabled = JobSource::ALL.iter().copied().collect();
        let claims = recognise_jobs(&Comm::new(&comm), &attributes, &host, &enabled).job_references;
        for (at, claim) in claims.iter().enumerate() {
            if let JobIdAttribute::Cgroup(path) = &claim.kind {
                prop_assert_eq!(at, 0);
                prop_assert!(attributes.cgroups.lines.iter().any(|(_, cgroup_path)| is_at_or_below(cgroup_path, path)), "{}", path);
            }
        }
        let kinds: BTreeSet<_> = claims
            .iter()
            .map(|claim| (matches!(claim.kind, JobIdAttribute::Cgroup(_)), claim.job.source()))
            .collect();
        prop_assert_eq!(kinds.len(), claims.len());
    }

    #[test]
    fn no_cgroup_below_the_service_manager_of_a_user_makes_a_claim(
        comm in any::<Vec<u8>>(), attributes in attributes(false)
    ) {
        let host = LocalHost { name: "n1".to_owned(), flux_user: Some(Uid(64)) };
        let enabled = JobSource::ALL.iter().copied().collect();
        let claims = recognise_jobs(&Comm::new(&comm), &attributes, &host, &enabled).job_references;
        let by_cgroup = claims.iter().filter(|claim| matches!(claim.kind, JobIdAttribute::Cgroup(_))).count();
        prop_assert_eq!(by_cgroup, 0);
    }

    #[test]
    fn the_parsers_accept_any_text_without_a_panic(
        list in text(), name in text(), index in any::<u32>(), nodes in any::<u32>()
    ) {
        if let Ok(position) = hostlist::find_node(&list, &name) {
            prop_assert!(position.index.is_none_or(|index| index < position.node_count));
        }
        let _ = counts::count_if_same_on_all_nodes(&list);
        let _ = counts::count_of_node(&list, index, nodes);
        let _ = counts::slot_count_of_host_in_pairs(&list, &name);
        let _ = counts::slot_count_of_host_in_list(&list, &name);
    }

    #[test]
    fn every_node_of_a_list_is_found_at_its_position(low in 0_u32..120, size in 1_u32..200, width in 1_usize..5) {
        let high = low + size - 1;
        let list = format!("login,n[{low:0width$}-{high:0width$}]x,z");
        for (place, number) in (low..=high).enumerate() {
            let position = hostlist::find_node(&list, &format!("n{number:0width$}x.example.org"));
            let expected = hostlist::NodePosition { index: u32::try_from(place + 1).ok(), node_count: size + 2 };
            prop_assert_eq!(position, Ok(expected));
        }
    }
}
