//! Kernels before 6.2: they forget the affinity mask of a thread when its cpuset changes.

use super::*;

#[test]
fn a_mask_that_an_older_kernel_forgets_when_a_cpuset_changes_is_restored() {
    let mut node = Node::on_older_kernel(EnforcementMethod::Auto);
    let pid = node.spawn(Pid(1), "/");
    assert!(node.bind(pid, "1"));
    node.assign("a", 2, &[pid]);
    assert_eq!(node.mask(pid).0, "1", "the mask of the program is within the grant");
    node.assign("a", 4, &[]);
    assert_eq!((node.cpuset("/pjw/a"), node.mask(pid).0), ("0-3".into(), "1".into()));
    node.release("a");
    assert_eq!((node.mask(pid).0, node.cgroup(pid)), ("1".into(), "/".into()));
}

#[test]
fn a_mask_that_an_older_kernel_forgets_in_hotplug_is_restored() {
    let mut node = Node::on_older_kernel(EnforcementMethod::Auto);
    let pid = node.spawn(Pid(1), "/");
    let unbound = node.spawn(pid, "/");
    node.assign("a", 2, &[pid]);
    assert!(node.bind(pid, "0"));
    node.cycle(&[]);
    node.world().toggle_pu(Pu(1));
    assert_eq!(node.mask(pid).1, "0-7", "the kernel forgot the requested mask");
    node.cycle(&[]);
    assert_eq!((node.cpuset("/pjw/a"), node.mask(pid).0), ("0,2".into(), "0".into()));
    node.world().toggle_pu(Pu(1));
    node.cycle(&[]);
    assert_eq!((node.cpuset("/pjw/a"), node.mask(pid).0), ("0,2".into(), "0".into()));
    assert_eq!(node.mask(unbound).0, "0,2", "a mask that only a cpuset narrowed is no binding");
    node.release("a");
    assert_eq!((node.mask(pid).0, node.cgroup(pid)), ("0".into(), "/".into()));
    assert_eq!(node.mask(unbound).0, "0-7");
}

#[test]
fn a_thread_that_gives_up_its_binding_on_an_older_kernel_is_not_bound_again() {
    let mut node = Node::on_older_kernel(EnforcementMethod::Auto);
    let pid = node.spawn(Pid(1), "/");
    node.assign("a", 2, &[pid]);
    assert!(node.bind(pid, "0"));
    node.cycle(&[]);
    assert!(node.bind(pid, "0-7"));
    node.cycle(&[]);
    assert_eq!(node.mask(pid).0, "0-1");
}

#[test]
fn a_child_that_is_born_between_the_move_of_its_parent_and_a_scan_gets_the_binding_of_its_parent() {
    let mut node = Node::on_older_kernel(EnforcementMethod::Affinity);
    let parent = node.spawn(Pid(1), LOGIN);
    assert!(node.bind(parent, "5"));
    node.assign("a", 2, &[parent]);
    node.cycle(&[]);
    assert_eq!(node.mask(parent).0, "1");
    node.world().move_process(parent, "/");
    let child = node.world().spawn(parent, ALICE);
    assert_eq!(node.mask(child).0, "0-7", "the kernel forgot the mask of the parent");
    node.cycle(&[]);
    node.cycle(&[]);
    assert_eq!(node.mask(child).0, "1");
    node.release("a");
    assert_eq!(node.mask(child), ("5".into(), "5".into()));
}
