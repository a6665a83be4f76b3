//! Walls of the warden's own, in v1 or v2, with real processes and threads.

use nix::errno::Errno;
use pjw_core::cpuset::Pu;
use pjw_core::process::StartTime;
use pjw_core::wall::Bounds;

use super::yard::*;
use crate::affinity;
use crate::cgroup::{Mounts, Residents};
use crate::walls::*;

#[test]
fn no_thread_gets_out_of_a_wall_whatever_it_asks_for() {
    let Some(mut yard) = yard() else { return };
    let (first, last, all) = (yard.first(), yard.last(), yard.all.clone());
    let (crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);
    let wall = wall("holds", &first);

    assert_eq!(yard.raise(&wall), done(first.clone()));
    assert_eq!(yard.admit(process, &wall), DONE);
    assert_eq!(yard.masks(process), shown(&first));
    for tid in yard.proc.tids(process.pid).unwrap() {
        affinity::set_all(tid).unwrap();
        affinity::set(tid, &all).unwrap();
        assert_eq!(affinity::set(tid, &last), Err(Errno::EINVAL));
    }
    assert_eq!(yard.masks(process), shown(&first));

    let elsewhere = Wall { bounds: Bounds::cpus(last.clone()), ..wall.clone() };
    assert_eq!(yard.raise(&elsewhere), done(last.clone()));
    assert_eq!(yard.masks(process), shown(&last));
    let wider = Wall { bounds: Bounds::cpus(all.clone()), ..wall.clone() };
    assert_eq!(yard.raise(&wider), done(all.clone()));
    assert_eq!(yard.masks(process), shown(&all));

    assert_eq!(yard.raise(&wall), done(first));
    assert_eq!(yard.open(&wall), done(all.clone()));
    assert_eq!(yard.masks(process), shown(&all));
    assert!(hint(yard.raze(&wall)).contains("processes are still in it"));
    assert_eq!(yard.send_back(process, &wall, &home), DONE);
    assert_eq!(yard.home(process), home);
    assert_eq!(yard.raze(&wall), DONE);
    assert!(!yard.group(&wall).exists());
    crowd.end();
}

#[test]
fn every_change_may_be_repeated() {
    let Some(mut yard) = yard() else { return };
    let first = yard.first();
    let (crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);
    let wall = wall("twice", &first);
    for _ in 0..2 {
        assert_eq!(yard.raise(&wall), done(first.clone()));
    }
    let admit = WallChange::Admit { process, from: home.clone(), to: wall.path.clone() };
    assert_eq!([yard.make(&admit), yard.make(&admit)], [DONE, DONE]);
    let all = yard.all.clone();
    assert_eq!([yard.open(&wall), yard.open(&wall)], [done(all.clone()), done(all)]);
    assert_eq!([yard.send_back(process, &wall, &home), yard.send_back(process, &wall, &home)], [DONE, DONE]);
    assert_eq!([yard.raze(&wall), yard.raze(&wall)], [DONE, DONE]);
    assert_eq!(yard.open(&wall), WallOutcome::Gone);
    crowd.end();
}

#[test]
fn the_last_wall_leaves_nothing_behind() {
    let Some(mut yard) = yard() else { return };
    let base = yard.tree.group(pjw_core::wall::OWN_DIRECTORY).unwrap();
    if base.exists() {
        skip("another warden has walls here");
        return;
    }
    let switches = yard.tree.top().read("cgroup.subtree_control");
    let (one, two) = (wall("one", &yard.first()), wall("two", &yard.last()));
    assert_eq!(yard.raise(&one), done(yard.first()));
    assert_eq!(yard.raise(&two), done(yard.last()));
    assert_eq!(yard.raze(&one), DONE);
    assert!(base.exists());
    assert_eq!(yard.raze(&two), DONE);
    assert!(!base.exists());
    assert_eq!(yard.tree.top().read("cgroup.subtree_control"), switches);
}

#[test]
fn what_somebody_else_switched_on_stays_on() {
    let Some(mut yard) = yard().filter(|yard| yard.tree.unified) else { return };
    let top = yard.tree.top();
    if top.read("cgroup.subtree_control").unwrap().contains("cpuset") {
        return;
    }
    top.write("cgroup.subtree_control", "+cpuset").unwrap();
    let wall = wall("guest", &yard.first());
    assert_eq!(yard.raise(&wall), done(yard.first()));
    assert_eq!(yard.raze(&wall), DONE);
    assert!(top.read("cgroup.subtree_control").unwrap().contains("cpuset"));
    top.write("cgroup.subtree_control", "-cpuset").unwrap();

    // Switched on by the warden, and used by another since: it stays on too.
    assert_eq!(yard.raise(&wall), done(yard.first()));
    let other = yard.tree.group(&format!("/test-{}-other", std::process::id())).unwrap();
    other.make().unwrap();
    other.write("cpuset.cpus", &yard.last().to_string()).unwrap();
    assert_eq!(yard.raze(&wall), DONE);
    assert_eq!(other.list("cpuset.cpus").unwrap(), yard.last());
    other.remove().unwrap();
    top.write("cgroup.subtree_control", "-cpuset").unwrap();
}

#[test]
fn a_wall_without_a_cpu_of_this_machine_is_refused_and_nothing_is_left() {
    let Some(mut yard) = yard() else { return };
    let beyond = CpuSet::from(Pu(8000));
    let nowhere = wall("nowhere", &beyond);
    assert!(hint(yard.raise(&nowhere)).contains("8000") || !yard.group(&nowhere).exists());
    assert!(!yard.group(&nowhere).exists());

    let first = yard.first();
    let known = wall("known", &first);
    assert_eq!(yard.raise(&known), done(first.clone()));
    let moved = Wall { bounds: Bounds::cpus(beyond), ..known.clone() };
    hint(yard.raise(&moved));
    assert_eq!(yard.group(&known).effective_cpus().unwrap(), first);
    let mems = Some(CpuSet::from(Pu(63)));
    let no_memory = Wall { bounds: Bounds { mems, ..Bounds::cpus(yard.last()) }, ..known.clone() };
    hint(yard.raise(&no_memory));
    assert_eq!(yard.group(&known).effective_cpus().unwrap(), first);
    assert_eq!(yard.raze(&known), DONE);
}

#[test]
fn memory_comes_from_the_nodes_of_a_wall() {
    let Some(mut yard) = yard() else { return };
    let nodes = yard.tree.top().effective_mems().unwrap();
    let node = CpuSet::from(nodes.last().unwrap());
    let open = wall("memory", &yard.first());
    let bound = Wall { bounds: Bounds { mems: Some(node.clone()), ..open.bounds.clone() }, ..open.clone() };
    let group = yard.group(&open);
    let (crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);

    assert_eq!(yard.raise(&bound), done(yard.first()));
    assert_eq!(yard.admit(process, &bound), DONE);
    assert_eq!(group.effective_mems().unwrap(), node);
    assert_eq!(yard.raise(&open), done(yard.first()));
    assert_eq!(group.effective_mems().unwrap(), nodes, "no longer asked for");
    assert_eq!(yard.raise(&bound), done(yard.first()));
    yard.open(&bound);
    assert_eq!(group.effective_mems().unwrap(), nodes);
    assert_eq!(yard.send_back(process, &bound, &home), DONE);
    assert_eq!(yard.raze(&bound), DONE);
    crowd.end();
}

#[test]
fn only_the_process_that_was_meant_is_moved() {
    let Some(mut yard) = yard() else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);
    let wall = wall("meant", &yard.first());
    yard.raise(&wall);
    let to = wall.path.clone();

    let another = ProcessId { start: StartTime(process.start.0 + 1), ..process };
    let admit = |process, from: &str| WallChange::Admit { process, from: from.to_owned(), to: to.clone() };
    assert_eq!(yard.make(&admit(another, &home)), WallOutcome::Gone, "another of its number");
    assert_eq!(yard.make(&admit(process, "/elsewhere")), WallOutcome::Gone, "somebody moved it");
    assert_eq!(yard.home(process), home);
    assert_eq!(yard.make(&admit(process, &home)), DONE);

    let next = super::yard::wall("next", &yard.first());
    yard.raise(&next);
    let from_the_top = WallChange::Admit { process, from: "/".to_owned(), to: next.path.clone() };
    assert_eq!(yard.make(&from_the_top), WallOutcome::Gone, "it is no longer at the top itself");
    assert_eq!((yard.home(process), yard.raze(&next)), (wall.path.clone(), DONE));

    assert!(hint(yard.send_back(process, &wall, "/test-gone")).contains("/test-gone: it is gone"));
    assert_eq!(yard.home(process), wall.path);
    crowd.end();
    assert_eq!(yard.make(&admit(process, &home)), WallOutcome::Gone, "it ended");
    until("the wall is empty", || yard.raze(&wall) == DONE);
}

#[test]
fn a_process_cannot_enter_a_wall_that_is_gone() {
    let Some(mut yard) = yard() else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    let wall = wall("absent", &yard.first());
    assert!(hint(yard.admit(process, &wall)).contains("it is gone"));
    crowd.end();
}

#[test]
fn paths_that_climb_or_are_not_the_wardens_are_refused() {
    let Some(mut yard) = yard() else { return };
    for path in ["/pjw/../x", "/..", "/", "x", "/pjw/.", "/slice/x", "/pjw", "/pjw/", "/pjw/a/b", "/pjwx"] {
        let stray = Wall { path: path.to_owned(), ..wall("path", &yard.first()) };
        let what = hint(yard.raise(&stray));
        assert!(!what.is_empty(), "{path}");
        hint(yard.raze(&stray));
    }
}

#[test]
fn the_cgroup_of_a_scheduler_is_narrowed_and_found_again_as_it_was() {
    let Some(mut yard) = yard() else { return };
    let (first, all) = (yard.first(), yard.all.clone());
    // In v2 the controller is switched on where a scheduler narrows its jobs; a wall does that here.
    let holder = wall("holder", &all);
    yard.raise(&holder);
    let path = format!("/test-{}-scheduler", std::process::id());
    let wall = Wall { mason: Mason::Scheduler, path, ..wall("job", &first) };
    assert_eq!([yard.raise(&wall), yard.open(&wall)], [WallOutcome::Gone, WallOutcome::Gone]);
    assert_eq!(yard.raze(&wall), DONE, "nothing of the warden's is left there");

    let group = yard.group(&wall);
    group.make().unwrap();
    if !yard.tree.unified {
        group.write("cpuset.mems", &yard.tree.top().effective_mems().unwrap().to_string()).unwrap();
        group.write("cpuset.cpus", &all.to_string()).unwrap();
    }
    let found = group.files().unwrap();
    assert_eq!(yard.raise(&wall), done(first.clone()));
    assert_eq!(yard.open(&wall), done(all.clone()));
    assert_eq!(group.files().unwrap(), found);

    let (crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);
    assert_eq!(yard.admit(process, &wall), DONE);
    assert_eq!(yard.raise(&wall), done(first));
    assert_eq!(yard.open(&wall), done(all), "a cgroup with processes in it gets the list of the one above");
    yard.send_back(process, &wall, &home);
    assert_eq!(yard.raze(&wall), DONE);
    assert!(group.exists(), "it is the scheduler's");
    group.remove().unwrap();
    assert_eq!(yard.raze(&holder), DONE);
    crowd.end();
}

#[test]
fn v1_gets_back_above_the_walls_what_a_hotplug_took() {
    let Some(mut yard) = yard().filter(|yard| !yard.tree.unified) else { return };
    let base = yard.tree.group(pjw_core::wall::OWN_DIRECTORY).unwrap();
    let (first, last) = (yard.first(), yard.last());
    let one = wall("before", &first);
    assert_eq!(yard.raise(&one), done(first.clone()));
    // What the kernel does when the other CPUs go off.
    if base.write("cpuset.cpus", &first.to_string()).is_err() {
        skip("another warden has walls here");
        assert_eq!(yard.raze(&one), DONE);
        return;
    }
    let two = wall("after", &last);
    assert_eq!(yard.raise(&two), done(last));
    assert_eq!(base.list("cpuset.cpus").unwrap(), yard.all);
    assert_eq!([yard.raze(&one), yard.raze(&two)], [DONE, DONE]);
}

#[test]
fn an_isolated_wall_has_its_cpus_alone_or_says_why_not() {
    let Some(mut yard) = yard() else { return };
    let (last, all) = (yard.last(), yard.all.clone());
    let (wall, below) = (wall_of(Mason::Warden, "alone", isolated(&last)), wall("below", &last));
    let group = yard.group(&wall);
    let top = yard.tree.top();
    if !yard.tree.unified {
        assert!(hint(yard.raise(&wall)).contains("can't be isolated"));
        assert!(!group.exists());
        return;
    }
    for _ in 0..2 {
        assert_eq!(yard.raise(&wall), done(last.clone()));
    }
    assert_eq!(group.read("cpuset.cpus.partition").unwrap(), "isolated");
    assert_eq!(top.effective_cpus().unwrap(), all.difference(&last));
    let seen = Mounts::find().look(&wall.path, &mut Residents::default()).unwrap();
    assert!(seen.here().unwrap().cpuset.as_ref().unwrap().isolated);

    // The whole machine can't be a partition: what it was before counts again.
    let greedy = Wall { bounds: Bounds { cpus: all.clone(), ..wall.bounds.clone() }, ..wall.clone() };
    let said = hint(yard.raise(&greedy));
    assert!(said.contains("can't be isolated") || said.contains("can't get"), "{said}");
    assert_eq!(group.effective_cpus().unwrap(), last);
    assert_eq!(group.read("cpuset.cpus.partition").unwrap(), "isolated");

    assert_eq!(yard.open(&wall), done(all.clone()));
    assert_eq!(yard.raze(&wall), DONE);
    assert_eq!(top.effective_cpus().unwrap(), all);

    // Below a group that is no partition there can be none.
    let below = Wall { bounds: wall.bounds.clone(), ..below };
    assert!(hint(yard.raise(&below)).contains("can't be isolated"));
    assert!(!yard.group(&below).exists());
}
