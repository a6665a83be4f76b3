//! The core map as text.

use insta::assert_snapshot;

use super::super::samples::{self, COLOURED_TERMINAL, PLAIN_TERMINAL, cores, job};
use super::*;

fn map(cores: &[Core], free: &str, jobs: &[Job], term: Terminal) -> String {
    let pool = Pool { free: free.into(), ..Pool::default() };
    core_map_text(cores, &PuHolders::new(&pool, jobs), term)
}

/// Whatever the machine, no line is longer than the terminal is wide.
fn assert_fits(map: &str, width: usize) {
    for line in map.lines() {
        assert!(text::char_count(line) <= width, "{} columns: {line}", text::char_count(line));
    }
}

#[test]
fn two_cores_are_one_line() {
    let map = map(&cores(2, 1, 2, 2, 2), "1", &[job("manual:a", "0")], PLAIN_TERMINAL);
    assert_snapshot!(map, @"package 0 node 0  0-1  a.");
}

#[test]
fn a_core_is_a_cell_and_a_node_a_line() {
    let status = samples::status();
    let holders = PuHolders::new(&status.pool, &status.jobs);
    assert_snapshot!(core_map_text(&status.cores, &holders, PLAIN_TERMINAL), @r"
    package 0 node 0  0-7   #aa.
    package 1 node 1  8-15  ....
    ");
}

#[test]
fn a_lent_core_is_not_held_by_several_jobs_and_a_borrowed_free_core_has_its_borrower() {
    let owner = Job { lent: "0".into(), ..job("manual:a", "0-1") };
    let borrower = Job { borrowed: "0,2".into(), ..job("manual:b", "0,2") };
    assert_snapshot!(map(&cores(4, 1, 4, 4, 4), "2-3", &[owner, borrower], PLAIN_TERMINAL), @"package 0 node 0  0-3  ~ab.");
}

#[test]
fn a_core_that_several_jobs_hold_is_shown_as_such_also_if_it_is_borrowed() {
    let borrower = Job { borrowed: "0".into(), ..job("manual:c", "0") };
    let jobs = [job("manual:a", "0"), job("manual:b", "0"), borrower];
    assert_snapshot!(map(&cores(2, 1, 2, 2, 2), "1", &jobs, PLAIN_TERMINAL), @"package 0 node 0  0-1  !.");
}

#[test]
fn a_housekeeping_core_that_a_besteffort_job_shares_is_housekeeping() {
    let pool = Pool { housekeeping: "0".into(), allocated: "1".into(), ..Pool::default() };
    let jobs = [Job { class: "besteffort".into(), ..job("manual:a", "0") }, job("manual:b", "1")];
    let holders = PuHolders::new(&pool, &jobs);
    assert_snapshot!(core_map_text(&cores(2, 1, 2, 2, 2), &holders, PLAIN_TERMINAL), @"package 0 node 0  0-1  #b");
}

#[test]
fn l3s_are_set_apart() {
    assert_snapshot!(map(&cores(32, 2, 4, 16, 32), "16-63", &[job("manual:a", "0-15")], PLAIN_TERMINAL), @r"
    package 0 node 0  0-31   aaaa│aaaa│....│....
    package 0 node 1  32-63  ....│....│....│....
    ");
}

#[test]
fn two_hundred_and_fifty_six_cores_fit_the_page() {
    let jobs = [job("manual:a", "0-63"), job("manual:b", "128-200")];
    let map = map(&cores(256, 1, 16, 64, 128), "64-127,201-255", &jobs, PLAIN_TERMINAL);
    assert_fits(&map, 80);
    assert_snapshot!(map, @r"
    package 0 node 0  0-63     aaaaaaaa aaaaaaaa│aaaaaaaa aaaaaaaa│aaaaaaaa aaaaaaaa
                               aaaaaaaa aaaaaaaa
    package 0 node 1  64-127   ........ ........│........ ........│........ ........
                               ........ ........
    package 1 node 2  128-191  bbbbbbbb bbbbbbbb│bbbbbbbb bbbbbbbb│bbbbbbbb bbbbbbbb
                               bbbbbbbb bbbbbbbb
    package 1 node 3  192-255  bbbbbbbb b.......│........ ........│........ ........
                               ........ ........
    ");
}

#[test]
fn one_large_l3_is_broken_between_blocks() {
    let map = map(&cores(128, 2, 128, 128, 128), "0-255", &[], PLAIN_TERMINAL);
    assert_fits(&map, 80);
    assert_snapshot!(map, @r"
    package 0 node 0  0-255  ........ ........ ........ ........ ........ ........
                             ........ ........ ........ ........ ........ ........
                             ........ ........ ........ ........
    ");
}

#[test]
fn a_map_larger_than_a_screen_is_shown_as_lists() {
    let jobs = [job("manual:a", "0-63"), job("manual:b", "100-1599")];
    let map = map(&cores(2048, 1, 8, 64, 1024), "64-99,1600-2047", &jobs, PLAIN_TERMINAL);
    assert_fits(&map, 80);
    assert_snapshot!(map.lines().take(4).collect::<Vec<_>>().join("\n"), @r"
    package 0 node 0: a 0-63
    package 0 node 1: b 100-127, . 64-99
    package 0 node 2: b 128-191
    package 0 node 3: b 192-255
    ");
}

#[test]
fn a_page_that_is_too_narrow_still_shows_every_core() {
    let map = map(&cores(40, 1, 40, 40, 40), "0-39", &[], Terminal { width: 10, has_colours: false });
    assert_eq!(map.matches('.').count(), 40);
}

#[test]
fn every_kind_of_holder_has_its_sign() {
    let pool =
        Pool { housekeeping: "0".into(), free: "1".into(), allocated: "2-3".into(), ..Pool::default() };
    let holders = PuHolders::new(&pool, &[job("manual:a", "2-3"), job("manual:b", "3")]);
    assert_snapshot!(core_map_text(&cores(5, 1, 5, 5, 5), &holders, PLAIN_TERMINAL), @"package 0 node 0  0-4  #.a!x");
}

#[test]
fn siblings_of_two_jobs_make_a_shared_core_and_half_a_core_is_a_core() {
    let jobs = [job("manual:a", "0,2"), job("manual:b", "1")];
    assert_snapshot!(map(&cores(2, 2, 2, 2, 2), "3", &jobs, PLAIN_TERMINAL), @"package 0 node 0  0-3  !a");
}

#[test]
fn jobs_beyond_the_letters_share_a_sign() {
    assert_eq!([0, 25, 26, 61, 62, 1_000].map(job_symbol), ['a', 'z', 'A', '9', '*', '*']);
}

#[test]
fn a_machine_without_packages_or_nodes_is_a_machine() {
    let core = |n: u32| Core { cpus: n.to_string(), ..Core::default() };
    assert_snapshot!(map(&[core(0), core(1)], "0-1", &[], PLAIN_TERMINAL), @"machine  0-1  ..");
}

#[test]
fn colours_change_nothing_but_the_colour() {
    let status = samples::status();
    let holders = PuHolders::new(&status.pool, &status.jobs);
    let coloured = core_map_text(&status.cores, &holders, COLOURED_TERMINAL);
    assert!(coloured.contains("\x1b[32ma\x1b[0m"), "{coloured:?}");
    assert_eq!(samples::without_colour(&coloured), core_map_text(&status.cores, &holders, PLAIN_TERMINAL));
}
