//! `pjwctl spawn` without the options that say which cores the instances get.

use std::collections::BTreeSet;

use pjw_tests::daemon::Daemon;
use serde_json::Value;

use crate::processes::has_two_cores;

#[test]
fn without_a_number_of_cores_each_instance_has_a_whole_core_of_its_own() {
    if !has_two_cores() {
        return;
    }
    let daemon = Daemon::start("");
    let cores: BTreeSet<String> = daemon.status().cores.into_iter().map(|core| core.cpus).collect();
    let output = daemon.pjwctl(&["spawn", "-n", "2", "--json", "--", "true"]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let instances = report["instances"].as_array().unwrap().iter();
    let parts: BTreeSet<String> =
        instances.map(|instance| instance["cpus"].as_str().unwrap().to_owned()).collect();
    assert!(parts.len() == 2 && parts.is_subset(&cores), "the parts {parts:?}, the cores {cores:?}");
}
