//! Masks of those who have no part in a change.

use super::super::bystanders::Bound;
use super::yard::*;
use crate::affinity;
use crate::walls::*;

/// The threads of a process, all bound to these PUs once.
fn bound(yard: &mut Yard, process: ProcessId, mask: &CpuSet) -> Vec<Bound> {
    let tids = yard.proc.tids(process.pid).unwrap();
    let bound = |tid| {
        let start = yard.proc.thread_stat(process.pid, tid).unwrap().start;
        Bound { pid: process.pid, tid, start, mask: mask.clone(), left: mask.clone() }
    };
    tids.into_iter().map(bound).collect()
}

#[test]
fn only_a_mask_that_the_kernel_forgot_is_put_back() {
    let Some(mut yard) = yard() else { return };
    let (first, last) = (yard.first(), yard.last());
    let (crowd, process) = Crowd::start(&mut yard);
    let were = bound(&mut yard, process, &first);
    let chooser = were.last().unwrap().tid;
    affinity::set(chooser, &last).unwrap();

    Bystanders::put_back(&mut yard.site(), were, "/pjw/other");
    for tid in yard.proc.tids(process.pid).unwrap() {
        let expected = if tid == chooser { &last } else { &first };
        assert_eq!(affinity::get(tid).unwrap(), *expected, "thread {tid}");
    }
    crowd.end();
}

#[test]
fn nobody_is_looked_at_where_the_kernel_remembers_masks() {
    let Some(mut yard) = yard() else { return };
    let (crowd, process) = Crowd::start(&mut yard);
    affinity::set(pjw_core::process::Tid(process.pid.0), &yard.last()).unwrap();
    // A v2 hierarchy in which nothing is switched on: the first wall reaches everybody.
    let top = tempfile::tempdir().unwrap();
    yard.tree = Tree { root: top.path().to_owned(), unified: true };
    let raise = WallChange::Raise { wall: wall("reaches", &yard.first()), founders: Vec::new() };
    for (masks_last, sees) in [(false, true), (true, false)] {
        yard.bystanders = Bystanders::new(masks_last);
        let seen = Bystanders::before(&mut yard.site(), &raise);
        assert_eq!(seen.iter().any(|bound| bound.pid == process.pid), sees, "{masks_last}");
    }
    crowd.end();
}

#[test]
fn who_could_not_have_its_cpus_gets_them_when_they_are_back() {
    let Some(mut yard) = yard() else { return };
    let (first, last) = (yard.first(), yard.last());
    let (crowd, process) = Crowd::start(&mut yard);
    let home = yard.home(process);
    // What a partition does to everybody outside.
    let rest = wall("rest", &first);
    assert_eq!(yard.raise(&rest), done(first.clone()));
    assert_eq!(yard.admit(process, &rest), DONE);
    let were = bound(&mut yard, process, &last);
    Bystanders::put_back(&mut yard.site(), were, "/pjw/other");
    assert_eq!(yard.masks(process), shown(&first));

    let all = yard.all.clone();
    assert_eq!(yard.open(&rest), done(all));
    let raise = WallChange::Raise { wall: wall("next", &first), founders: Vec::new() };
    let real = yard.tree.clone();
    let top = tempfile::tempdir().unwrap();
    yard.tree = Tree { root: top.path().to_owned(), unified: true };
    let seen = Bystanders::before(&mut yard.site(), &raise);
    yard.tree = real;
    Bystanders::put_back(&mut yard.site(), seen, "/pjw/other");
    assert_eq!(yard.masks(process), shown(&last));
    assert_eq!(yard.send_back(process, &rest, &home), DONE);
    assert_eq!(yard.raze(&rest), DONE);
    crowd.end();
}
