//! Walls that systemd makes, where it is the first process of the machine.

use std::path::PathBuf;
use std::process::Command;

use pjw_core::cpuset::Pu;
use pjw_core::wall::{Bounds, SLICE};

use super::yard::*;
use crate::affinity;
use crate::cgroup::{Mounts, Residents};
use crate::systemd::{Door, Manager};
use crate::walls::*;

fn scope(name: &str, cpus: &CpuSet) -> Wall {
    wall_of(Mason::Systemd, name, Bounds::cpus(cpus.clone()))
}

fn systemctl(words: &[&str]) -> String {
    let output = Command::new("systemctl").args(words).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn unit(wall: &Wall) -> String {
    wall.path.rsplit('/').next().unwrap().to_owned()
}

/// Until systemd has forgotten a scope: it ends once its last process has left.
fn gone(yard: &mut Yard, wall: &Wall) {
    until("the scope can be removed", || yard.raze(wall) == DONE);
    until("the scope's directory is gone", || !yard.group(wall).exists());
    let unit = unit(wall);
    until("the scope's name is free", || systemctl(&["show", "-P", "LoadState", &unit]) == "not-found");
}

#[test]
fn no_thread_gets_out_of_a_scope_and_nobody_dies_of_its_end() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let (first, last, all) = (yard.first(), yard.last(), yard.all.clone());
    let (mut crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);
    let wall = scope("holds", &first);

    assert_eq!(yard.found(&wall, &[process]), done(first.clone()));
    assert_eq!(yard.home(process), wall.path);
    assert_eq!(yard.masks(process), shown(&first));
    for tid in yard.proc.tids(process.pid).unwrap() {
        affinity::set_all(tid).unwrap();
        assert!(affinity::set(tid, &last).is_err());
    }
    assert_eq!(yard.masks(process), shown(&first));
    assert_eq!(yard.found(&wall, &[process]), done(first), "again");

    let elsewhere = Wall { bounds: Bounds::cpus(last.clone()), ..wall.clone() };
    assert_eq!(yard.raise(&elsewhere), done(last.clone()));
    assert_eq!(yard.masks(process), shown(&last));
    systemctl(&["daemon-reload"]);
    assert_eq!(yard.group(&wall).effective_cpus().unwrap(), last);

    assert_eq!([yard.open(&wall), yard.open(&wall)], [done(all.clone()), done(all.clone())]);
    assert_eq!(yard.masks(process), shown(&all));
    assert!(hint(yard.raze(&wall)).contains("processes are still in it"));
    assert_eq!(yard.send_back(process, &wall, &home), DONE);
    gone(&mut yard, &wall);
    assert_eq!(crowd.0.try_wait().unwrap(), None, "it lives on");
    assert_eq!(yard.home(process), home);
    assert_eq!(yard.open(&wall), WallOutcome::Gone);
    crowd.end();
}

#[test]
fn the_last_scope_takes_the_slice_with_it() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let slice = yard.tree.group(&format!("/{SLICE}")).unwrap();
    if slice.exists() {
        skip("another warden has walls here");
        return;
    }
    let (one, two) = (Crowd::start(&mut yard), Crowd::start(&mut yard));
    let walls = [scope("one", &yard.first()), scope("two", &yard.last())];
    assert_eq!(yard.found(&walls[0], &[one.1]), done(yard.first()));
    assert_eq!(yard.found(&walls[1], &[two.1]), done(yard.last()));
    one.0.end();
    gone(&mut yard, &walls[0]);
    assert!(slice.exists());
    two.0.end();
    gone(&mut yard, &walls[1]);
    until("the slice is gone", || !slice.exists());
}

#[test]
fn a_scope_is_delegated_unlimited_and_survives_a_process_that_ran_out_of_memory() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    let wall = scope("shape", &yard.first());
    assert_eq!(yard.found(&wall, &[process]), done(yard.first()));
    let unit = unit(&wall);
    let show = |property: &str| systemctl(&["show", "-P", property, &unit]);
    assert_eq!([show("Slice"), show("Transient"), show("Delegate")], [SLICE, "yes", "yes"]);
    assert_eq!(show("DelegateControllers"), "cpuset");
    assert_eq!([show("TasksMax"), show("CollectMode")], ["infinity", "inactive-or-failed"]);
    assert_eq!(show("AllowedCPUs").parse::<CpuSet>().unwrap(), yard.first());
    let at_want = show("OOMPolicy");
    assert!(at_want.is_empty() || at_want == "continue", "{at_want}");
    crowd.end();
    gone(&mut yard, &wall);
}

#[test]
fn more_processes_are_admitted_to_a_scope_and_the_dead_found_none() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let (founder, first) = Crowd::start(&mut yard);
    let (guest, second) = Crowd::start(&mut yard);
    let (dead, late) = Crowd::start(&mut yard);
    dead.end();
    let wall = scope("guests", &yard.first());
    assert_eq!(yard.found(&wall, &[late]), WallOutcome::Gone);
    assert_eq!(yard.found(&wall, &[]), WallOutcome::Gone);
    assert!(!yard.group(&wall).exists());

    assert_eq!(yard.found(&wall, &[late, first]), done(yard.first()));
    assert_eq!(yard.admit(second, &wall), DONE);
    assert_eq!(yard.masks(second), shown(&yard.first()));
    founder.end();
    assert_eq!(yard.raise(&wall), done(yard.first()), "without its founder");
    guest.end();
    gone(&mut yard, &wall);
}

#[test]
fn a_scope_that_cannot_be_leaves_its_founder_at_home() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);
    let wall = scope("beyond", &CpuSet::from(Pu(8000)));
    hint(yard.found(&wall, &[process]));
    assert_eq!(yard.home(process), home);
    gone(&mut yard, &wall);

    // One that stands keeps what it has.
    let known = scope("known", &yard.first());
    assert_eq!(yard.found(&known, &[process]), done(yard.first()));
    hint(yard.raise(&Wall { bounds: Bounds::cpus(CpuSet::from(Pu(8000))), ..known.clone() }));
    assert_eq!(yard.group(&known).effective_cpus().unwrap(), yard.first());
    assert_eq!(yard.home(process), known.path);
    crowd.end();
    gone(&mut yard, &known);
}

#[test]
fn a_scope_whose_controller_was_switched_off_is_repaired_or_razed() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    let (wall, first, all) = (scope("off", &yard.first()), yard.first(), yard.all.clone());
    let slice = yard.tree.group(&format!("/{SLICE}")).unwrap();
    assert_eq!(yard.found(&wall, &[process]), done(first.clone()));

    slice.write("cgroup.subtree_control", "-cpuset").unwrap();
    assert!(yard.group(&wall).files().is_err());
    assert_eq!(yard.raise(&wall), done(first.clone()), "systemd does not know of that");
    assert_eq!(yard.masks(process), shown(&first));

    let told = |words: &str| {
        systemctl(&["set-property", "--runtime", SLICE, &format!("DisableControllers={words}")])
    };
    told("cpuset");
    until("systemd takes the controller away", || yard.group(&wall).files().is_err());
    assert!(hint(yard.raise(&wall)).contains("DisableControllers"));
    assert_eq!([yard.open(&wall), yard.raze(&wall)], [done(all.clone()), DONE]);
    assert_eq!((yard.home(process), yard.masks(process)), (wall.path.clone(), shown(&all)), "where it was");
    let (other, second) = Crowd::start(&mut yard);
    let home = yard.home(second);
    assert!(hint(yard.found(&scope("none", &first), &[second])).contains("DisableControllers"));
    assert_eq!(yard.home(second), home);

    told("");
    assert_eq!(yard.masks(process), shown(&all), "systemd brings no old cpuset back");
    assert_eq!(yard.raise(&wall), done(first));
    systemctl(&["revert", SLICE]);
    other.end();
    crowd.end();
    gone(&mut yard, &wall);
}

#[test]
fn memory_comes_from_the_nodes_of_a_scope() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    let nodes = yard.tree.top().effective_mems().unwrap();
    let node = CpuSet::from(nodes.last().unwrap());
    let free = scope("memory", &yard.first());
    let bounds = Bounds { mems: Some(node.clone()), ..free.bounds.clone() };
    let bound = Wall { bounds, ..free.clone() };
    let group = yard.group(&free);
    assert_eq!(yard.found(&bound, &[process]), done(yard.first()));
    assert_eq!(group.effective_mems().unwrap(), node);
    assert_eq!(yard.raise(&free), done(yard.first()));
    assert_eq!(group.effective_mems().unwrap(), nodes);
    assert_eq!(yard.raise(&bound), done(yard.first()));
    assert_eq!(yard.open(&bound), done(yard.all.clone()));
    assert_eq!(group.effective_mems().unwrap(), nodes);
    crowd.end();
    gone(&mut yard, &bound);
}

#[test]
fn an_isolated_scope_has_its_cpus_alone() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    let (first, last, all) = (yard.first(), yard.last(), yard.all.clone());
    let wall = wall_of(Mason::Systemd, "alone", isolated(&last));
    let group = yard.group(&wall);
    for _ in 0..2 {
        assert_eq!(yard.found(&wall, &[process]), done(last.clone()));
    }
    assert_eq!(group.read("cpuset.cpus.partition").unwrap(), "isolated");
    assert_eq!(yard.tree.top().effective_cpus().unwrap(), all.difference(&last));
    assert!(
        Mounts::find()
            .look(&wall.path, &mut Residents::default())
            .unwrap()
            .here()
            .unwrap()
            .cpuset
            .as_ref()
            .unwrap()
            .isolated
    );
    systemctl(&["daemon-reload"]);
    assert_eq!(group.read("cpuset.cpus.partition").unwrap(), "isolated");
    let moved = Wall { bounds: isolated(&first), ..wall.clone() };
    assert_eq!(yard.raise(&moved), done(first));
    assert_eq!(yard.open(&moved), done(all.clone()));
    assert_eq!(group.read("cpuset.cpus.partition").unwrap(), "member");
    crowd.end();
    gone(&mut yard, &wall);
    assert_eq!(yard.tree.top().effective_cpus().unwrap(), all);
}

#[test]
fn systemd_is_reached_without_a_bus() {
    let Some(mut yard) = yard_of(Mason::Systemd) else { return };
    yard.systemd = Manager::behind(vec![
        Door::Bus(PathBuf::from("/nonexistent/bus")),
        Door::Direct(PathBuf::from("/run/systemd/private")),
    ]);
    let (crowd, process) = Crowd::start(&mut yard);
    let wall = scope("direct", &yard.first());
    assert_eq!(yard.found(&wall, &[process]), done(yard.first()));
    // Often enough to meet a systemd that reads more than one piece at once.
    for cpus in std::iter::repeat_n([yard.last(), yard.first()], 10).flatten() {
        let moved = Wall { bounds: Bounds::cpus(cpus.clone()), ..wall.clone() };
        assert_eq!(yard.raise(&moved), done(cpus));
    }
    crowd.end();
    gone(&mut yard, &wall);
}
