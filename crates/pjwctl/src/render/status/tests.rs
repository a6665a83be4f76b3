//! The status as text.

use insta::assert_snapshot;
use pjw_ipc::wire::{Fits, Lending, Node, Pool};

use super::super::samples::{
    self, COLOURED_TERMINAL, PLAIN_TERMINAL, job, names, now, warning, without_colour,
};
use super::*;

fn text_of(status: &Status, term: Terminal) -> String {
    status_text(status, &names(), now(), term)
}

fn troubled() -> Status {
    let mut status = samples::status();
    status.mode = "observe".into();
    status.jobs.push(job("slurm:7", ""));
    status.warnings = vec![
        warning(
            "unserved",
            "slurm:7",
            "4 cores were asked for and 3 are free: its processes run unconfined",
            "release a job, or wait",
        ),
        warning(
            "stray",
            "manual:a",
            "process 4711 (bash) of user 1000 belongs to no job",
            "pjwctl assign manual:a --pid 4711",
        ),
    ];
    status
}

#[test]
fn an_idle_machine_is_a_few_lines() {
    let mut status = samples::status();
    status.node =
        Node { hostname: "tiny".into(), cpus: "0-1".into(), cores: 2, packages: 1, numa_nodes: 1, l3: 1 };
    status.pool = Pool { free: "0-1".into(), ..Pool::default() };
    status.fits = Fits { l3: 2, numa_node: 2, package: 2, machine: 2 };
    status.jobs = Vec::new();
    status.cores = samples::cores(2, 1, 2, 2, 2);
    assert_snapshot!(text_of(&status, PLAIN_TERMINAL), @r"
    tiny: pjwd 0.1.0, mode enforce, discovery by netlink, pid 812
    1 package, 1 NUMA node, 1 L3, 2 cores, CPUs 0-1
    free: 2 of 2 cores (CPUs 0-1); fits in one L3: 2, NUMA node: 2, package: 2

    package 0 node 0  0-1  ..
    . free

    no jobs
    ");
}

#[test]
fn the_status_has_the_map_the_jobs_and_the_free_cores() {
    assert_snapshot!(text_of(&samples::status(), PLAIN_TERMINAL), @r"
    node7: pjwd 0.1.0, mode enforce, discovery by netlink, pid 812
    2 packages, 2 NUMA nodes, 2 L3s, 8 cores, CPUs 0-15
    free: 5 of 8 cores (CPUs 6-15); fits in one L3: 4, NUMA node: 4, package: 4

    package 0 node 0  0-7   #aa.
    package 1 node 1  8-15  ....
    . free   # housekeeping

      job      owner cores cpus procs threads hot pinned viol since
    a manual:a alice     2 2-5      1      12   2      2    0    5m
    ");
}

#[test]
fn warnings_come_last_with_their_remedies() {
    assert_snapshot!(text_of(&troubled(), PLAIN_TERMINAL), @r"
    node7: pjwd 0.1.0, mode observe (changes nothing), discovery by netlink, pid 812
    2 packages, 2 NUMA nodes, 2 L3s, 8 cores, CPUs 0-15
    free: 5 of 8 cores (CPUs 6-15); fits in one L3: 4, NUMA node: 4, package: 4

    package 0 node 0  0-7   #aa.
    package 1 node 1  8-15  ....
    . free   # housekeeping

      job      owner cores cpus      procs threads hot pinned viol since
    a manual:a alice     2 2-5           1      12   2      2    0    5m
    b slurm:7  alice     - (waiting)     1      12   2      2    0    5m

    ! slurm:7: 4 cores were asked for and 3 are free: its processes run unconfined
      → release a job, or wait
    ! manual:a: process 4711 (bash) of user 1000 belongs to no job
      → pjwctl assign manual:a --pid 4711
    ");
}

#[test]
fn a_broken_promise_is_red_and_a_notice_is_not() {
    let coloured = text_of(&troubled(), COLOURED_TERMINAL);
    assert!(coloured.contains("\x1b[1m\x1b[31m! slurm:7"), "{coloured}");
    assert!(coloured.contains("\x1b[33m! manual:a"), "{coloured}");
    assert_eq!(without_colour(&coloured), text_of(&troubled(), PLAIN_TERMINAL));
}

#[test]
fn a_full_machine_of_many_cores_and_jobs_fits_eighty_columns() {
    let mut status = troubled();
    status.node =
        Node { hostname: "big".into(), cpus: "0-511".into(), cores: 256, packages: 2, numa_nodes: 8, l3: 32 };
    status.pool = Pool { allocated: "0-511".into(), ..Pool::default() };
    status.fits = Fits::default();
    status.cores = samples::cores(256, 2, 8, 32, 128);
    status.jobs = (0..32)
        .map(|n| job(&format!("slurm:{}", 1_000_000 + n), &format!("{}-{}", n * 16, n * 16 + 15)))
        .collect();
    let text = text_of(&status, PLAIN_TERMINAL);
    for line in text.lines() {
        assert!(text::char_count(line) <= 80, "{} columns: {line}", text::char_count(line));
    }
    assert_snapshot!(text.lines().take(16).collect::<Vec<_>>().join("\n"), @r"
    big: pjwd 0.1.0, mode observe (changes nothing), discovery by netlink, pid 812
    2 packages, 8 NUMA nodes, 32 L3s, 256 cores, CPUs 0-511
    free: no core of 256

    package 0 node 0  0-63     aaaaaaaa│bbbbbbbb│cccccccc│dddddddd
    package 0 node 1  64-127   eeeeeeee│ffffffff│gggggggg│hhhhhhhh
    package 0 node 2  128-191  iiiiiiii│jjjjjjjj│kkkkkkkk│llllllll
    package 0 node 3  192-255  mmmmmmmm│nnnnnnnn│oooooooo│pppppppp
    package 1 node 4  256-319  qqqqqqqq│rrrrrrrr│ssssssss│tttttttt
    package 1 node 5  320-383  uuuuuuuu│vvvvvvvv│wwwwwwww│xxxxxxxx
    package 1 node 6  384-447  yyyyyyyy│zzzzzzzz│AAAAAAAA│BBBBBBBB
    package 1 node 7  448-511  CCCCCCCC│DDDDDDDD│EEEEEEEE│FFFFFFFF

      job           owner cores cpus    procs threads hot pinned viol since
    a slurm:1000000 alice    16 0-15        1      12   2      2    0    5m
    b slurm:1000001 alice    16 16-31       1      12   2      2    0    5m
    ");
}

#[test]
fn the_status_says_why_owners_of_lent_cores_are_sampled() {
    let text = |why_not: &str, demand: &str| {
        let why_sampled = "this process lacks CAP_BPF".into();
        let lending = Lending { why_not: why_not.into(), demand: demand.into(), why_sampled };
        text_of(&Status { lending: Some(lending), ..samples::status() }, PLAIN_TERMINAL)
    };
    let told = text("", "sampled");
    assert!(
        told.contains("lent cores: their owners are sampled each 2 ms") && told.contains("CAP_BPF"),
        "{told}"
    );
    assert!(!text("", "reported").contains("CAP_BPF"));
    assert!(!text("lending.enabled = false", "sampled").contains("CAP_BPF"), "nothing is lent");
}
