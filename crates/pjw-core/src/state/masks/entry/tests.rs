//! The rules of a mask entry, one by one.

use super::*;
use crate::basics::StartTime;
use crate::state::masks::request::effective_mask;
use crate::testing::cpu_set;

const SECOND: u64 = 1_000_000_000;

pub(super) fn machine() -> CpuSet {
    cpu_set("0-7")
}

/// The limits of a mask: each set of PUs that was possible, the present one first.
fn limits(possible: &[&str]) -> MaskLimits {
    limits_of(possible.iter().map(|cpus| cpu_set(cpus)))
}

pub(super) fn limits_of(possible: impl IntoIterator<Item = CpuSet>) -> MaskLimits {
    MaskLimits {
        possible_cpus: possible.into_iter().collect(),
        machine_cpus: machine(),
        may_have_changed: false,
        kernel_may_have_reset_mask: false,
    }
}

fn everything() -> MaskLimits {
    limits(&["0-7"])
}

pub(super) fn first(seen: &str) -> MaskEntry {
    MaskEntry::from_first_reading(&cpu_set(seen), &everything(), Nanos(1))
}

fn read(entry: &mut MaskEntry, seen: &str, limits: &MaskLimits, at: u64) -> MaskComparison {
    entry.record_reading(&cpu_set(seen), limits, Nanos(at))
}

/// An entry of a thread that had every PU and for which pjw requested 0-3 at the time 2.
fn confined() -> MaskEntry {
    let mut entry = first("0-7");
    entry.add_intended_request(cpu_set("0-3"), cpu_set("0-7"), Nanos(2));
    entry.record_request_done(&cpu_set("0-3"), &cpu_set("0-3"), &everything());
    entry
}

pub(super) fn masks(entry: &MaskEntry) -> Vec<CpuSet> {
    entry.last_request_candidates().map(|request| request.mask.clone()).collect()
}

fn at(moment: u64) -> BirthTime {
    BirthTime { earliest: Nanos(moment), latest: Nanos(moment) }
}

#[test]
fn the_kernel_shows_what_is_possible_of_a_request_or_everything_possible_if_nothing_is() {
    assert_eq!(effective_mask(&cpu_set("0-3"), &cpu_set("2-5")), cpu_set("2-3"));
    assert_eq!(effective_mask(&cpu_set("0-1"), &cpu_set("2-5")), cpu_set("2-5"));
}

#[test]
fn a_thread_that_has_every_possible_pu_requested_every_pu_of_the_machine() {
    let entry = MaskEntry::from_first_reading(&cpu_set("0-3"), &limits(&["0-3"]), Nanos(1));
    assert_eq!((entry.requested_mask(), entry.original_mask()), (Some(&machine()), &machine()));
    let entry = MaskEntry::from_first_reading(&cpu_set("0-2"), &limits(&["0-3"]), Nanos(1));
    assert_eq!(entry.requested_mask(), Some(&cpu_set("0-2")));
    let entry = MaskEntry::from_first_reading(&cpu_set("0-2"), &limits(&["0-3", "0-1"]), Nanos(1));
    assert_eq!(entry.requested_mask(), Some(&cpu_set("0-2")), "no limit leaves this of every PU");
    assert!(entry.is_mask_from_program() && !entry.needs_restore() && entry.journaled_since().is_none());
}

#[test]
fn a_predicted_mask_was_written_by_no_program() {
    let mut entry = confined();
    for (seen, possible) in [("0-3", "0-7"), ("2-3", "2-7"), ("4-7", "4-7"), ("0-3", "0-7")] {
        assert_eq!(
            read(&mut entry, seen, &limits(&[possible]), 3),
            MaskComparison::Predicted,
            "{seen} of {possible}"
        );
        assert_eq!((entry.requested_mask(), entry.original_mask()), (Some(&cpu_set("0-3")), &machine()));
    }
    assert!(!entry.is_mask_from_program() && entry.needs_restore());
}

#[test]
fn a_mask_that_some_earlier_limit_predicts_was_written_by_no_program() {
    let mut entry = confined();
    assert_eq!(read(&mut entry, "0-2", &limits(&["0-7", "0-2"]), 3), MaskComparison::Predicted);
    assert_eq!(read(&mut entry, "0-2", &everything(), 4), MaskComparison::ChangedByProgram);
}

#[test]
fn a_mask_that_is_not_predicted_was_written_by_the_program() {
    let mut entry = confined();
    assert_eq!(read(&mut entry, "0-3", &everything(), 3), MaskComparison::Predicted);
    assert_eq!(read(&mut entry, "5", &everything(), 4), MaskComparison::ChangedByProgram);
    assert_eq!((entry.requested_mask(), entry.original_mask()), (Some(&cpu_set("5")), &cpu_set("5")));
    assert!(entry.is_mask_from_program() && entry.is_overridden_by_program() && entry.pinned_pu().is_none());
    // It stays the program's until pjw requests another mask.
    assert_eq!(read(&mut entry, "5", &everything(), 5), MaskComparison::Predicted);
    assert!(entry.is_mask_from_program());
}

#[test]
fn a_mask_that_the_program_requested_before_pjw_began_is_no_attempt_to_leave() {
    let mut entry = first("0-7");
    assert_eq!(read(&mut entry, "5", &everything(), 4), MaskComparison::ChangedByProgram);
    assert!(entry.mark_journaled(Nanos(9)));
    assert!(!entry.is_overridden_by_program());
}

#[test]
fn a_mask_that_the_program_requested_after_pjw_is_not_in_the_journal() {
    let mut entry = first("0-7");
    entry.add_intended_request(cpu_set("0-3"), cpu_set("0-7"), Nanos(2));
    assert!(!entry.mark_journaled(Nanos(3)));
    assert_eq!(read(&mut entry, "5", &everything(), 4), MaskComparison::ChangedByProgram);
    assert!(entry.mark_journaled(Nanos(5)) && !entry.mark_journaled(Nanos(6)));
    assert_eq!(entry.journaled_since(), Some(Nanos(2)));
}

#[test]
fn of_several_candidates_a_reading_removes_those_that_do_not_predict_it() {
    let mut entry = first("0-7");
    entry.add_intended_request(cpu_set("0-3"), cpu_set("0-7"), Nanos(2));
    assert_eq!((masks(&entry), entry.requested_mask()), (vec![cpu_set("0-7"), cpu_set("0-3")], None));
    // The cpuset hides which of them was requested.
    assert_eq!(read(&mut entry, "0-3", &limits(&["0-3"]), 3), MaskComparison::Predicted);
    assert_eq!(masks(&entry).len(), 2);
    assert_eq!(read(&mut entry, "0-7", &everything(), 4), MaskComparison::Predicted);
    assert_eq!(entry.requested_mask(), Some(&cpu_set("0-7")));
    assert!(entry.is_mask_from_program());
}

fn recorded(mask: CpuSet, original: CpuSet) -> MaskRequest {
    MaskRequest { mask, original_mask: original, writer: MaskWriter::Warden, requested_at: Nanos(2) }
}

#[test]
fn candidates_of_one_mask_are_certain_and_the_newest_decides_what_a_release_puts_back() {
    let mut entry = MaskEntry::from_record(recorded(cpu_set("1"), cpu_set("0-7")));
    entry.add_recorded_request(recorded(cpu_set("1"), cpu_set("1")));
    assert_eq!((entry.requested_mask(), entry.original_mask()), (Some(&cpu_set("1")), &cpu_set("1")));
}

#[test]
fn a_recorded_entry_holds_only_so_many_candidates() {
    let mut entry = MaskEntry::from_record(recorded(cpu_set("0"), cpu_set("0-7")));
    (0..20).for_each(|pu| entry.add_recorded_request(recorded(CpuSet::from(Pu(pu % 8)), cpu_set("0-7"))));
    assert!(masks(&entry).len() <= EARLIER_REQUESTS);
}

#[test]
fn a_cpuset_that_pjw_does_not_read_narrows_a_write_and_its_result_is_predicted_from_then_on() {
    let mut entry = first("0-7");
    entry.add_intended_request(cpu_set("0-3"), cpu_set("0-7"), Nanos(2));
    entry.record_request_done(&cpu_set("0-3"), &cpu_set("2-3"), &everything());
    assert_eq!(read(&mut entry, "2-3", &everything(), 3), MaskComparison::Predicted);
    assert_eq!(read(&mut entry, "2", &limits(&["0-2,4-7"]), 4), MaskComparison::Predicted);
    assert_eq!(read(&mut entry, "0-3", &everything(), 5), MaskComparison::Predicted);
    assert_eq!(read(&mut entry, "1-3", &everything(), 6), MaskComparison::ChangedByProgram);
}

#[test]
fn a_write_that_a_known_cpuset_limits_says_nothing_of_the_masks_under_another_cpuset() {
    let mut entry = first("0-7");
    entry.add_intended_request(machine(), cpu_set("0-7"), Nanos(2));
    entry.record_request_done(&machine(), &cpu_set("0-3"), &limits(&["0-3"]));
    assert_eq!(read(&mut entry, "0-1", &limits(&["0-1,4-5", "0-3"]), 3), MaskComparison::ChangedByProgram);
}

#[test]
fn a_child_begins_with_a_request_that_held_when_it_was_born() {
    let mut entry = confined();
    entry.record_unchanged_reading(Nanos(4));
    let requests = |moment| {
        entry.requests_for_child_born_at(at(moment)).map(|request| request.mask.clone()).collect::<Vec<_>>()
    };
    assert_eq!(requests(1), [machine()], "before the write");
    assert_eq!(requests(3), [machine(), cpu_set("0-3")], "the write may not have been carried out yet");
    assert_eq!(
        requests(BirthTime::MAX_FORK_TIME.0 + 5),
        [cpu_set("0-3")],
        "a reading after the write was before"
    );
    assert!(MaskEntry::from_inherited([], at(5)).is_none());
}

#[test]
fn a_child_that_has_a_mask_of_pjw_gets_the_original_of_its_parent_back() {
    let parent = confined();
    let mut child =
        MaskEntry::from_inherited(parent.requests_for_child_born_at(at(3)).cloned(), at(3)).unwrap();
    assert_eq!(read(&mut child, "0-3", &everything(), 4), MaskComparison::Predicted);
    assert_eq!((child.original_mask(), child.journaled_since()), (&machine(), Some(Nanos(2))));
    assert!(child.needs_restore());
    let mut other =
        MaskEntry::from_inherited(parent.requests_for_child_born_at(at(3)).cloned(), at(3)).unwrap();
    assert_eq!(read(&mut other, "5", &everything(), 4), MaskComparison::ChangedByProgram);
    assert_eq!((other.original_mask(), other.needs_restore()), (&cpu_set("5"), false));
}

#[test]
fn what_a_scan_saw_was_born_before_the_decision_that_followed_except_if_it_cannot_be_older() {
    let birth = |earliest, latest| BirthTime { earliest: Nanos(earliest), latest: Nanos(latest) };
    assert!(birth(1, 4).is_before(Nanos(5)) && birth(1, 5).is_before(Nanos(5)));
    assert!(!birth(5, 5).is_before(Nanos(5)) && !birth(1, 6).is_before(Nanos(5)));
    let tick = BirthTime::from_start_time(StartTime(100), Some(Nanos(SECOND + 3)));
    assert_eq!(tick, birth(SECOND, SECOND + 3));
    assert_eq!(BirthTime::from_start_time(StartTime(100), None).latest, StartTime(100).latest_time());
}

#[test]
fn a_write_on_a_process_that_was_being_born_may_be_undone_by_the_kernel() {
    let mut entry =
        MaskEntry::from_inherited(first("0-7").requests_for_child_born_at(at(3)).cloned(), at(3)).unwrap();
    entry.add_intended_request(cpu_set("0-3"), cpu_set("0-7"), Nanos(4));
    entry.record_request_done(&cpu_set("0-3"), &cpu_set("0-3"), &everything());
    entry.record_possible_reset_by_fork();
    assert_eq!(masks(&entry), [machine(), cpu_set("0-3")]);
    let mut late = entry.clone();
    assert_eq!(
        read(&mut late, "0-7", &everything(), 5),
        MaskComparison::Predicted,
        "the parent's mask was copied again"
    );
    assert_eq!(read(&mut entry, "0-3", &everything(), 5), MaskComparison::Predicted);
    assert_eq!(
        read(&mut entry, "0-7", &everything(), 6),
        MaskComparison::ChangedByProgram,
        "the birth is over"
    );
}

#[test]
fn an_old_kernel_may_replace_a_request_when_the_limits_change_and_the_original_stays() {
    let reset = |possible: &[&str]| MaskLimits { kernel_may_have_reset_mask: true, ..limits(possible) };
    let mut entry = first("1");
    assert_eq!(read(&mut entry, "0-2", &reset(&["0-2", "0-3"]), 3), MaskComparison::Predicted);
    assert_eq!((entry.requested_mask(), entry.original_mask()), (Some(&machine()), &cpu_set("1")));
    assert!(!entry.is_mask_from_program() && entry.needs_restore(), "a release puts the program's mask back");
    let mut entry = first("1");
    assert_eq!(
        read(&mut entry, "0", &reset(&["0-2", "0-3"]), 3),
        MaskComparison::ChangedByProgram,
        "no kernel writes this"
    );
    assert_eq!(entry.original_mask(), &cpu_set("0"));
    let mut entry = first("1");
    assert_eq!(
        read(&mut entry, "0-2", &limits(&["0-3", "0-4"]), 3),
        MaskComparison::ChangedByProgram,
        "newer kernels never do"
    );
}

#[test]
fn requests_that_an_old_kernel_wrote_are_attributed_to_it_later_back_to_one_that_it_cannot_have_written() {
    let mut entry = first("1");
    for (at, seen) in [(10, "0-1"), (11, "0-1,4")] {
        assert_eq!(read(&mut entry, seen, &everything(), at), MaskComparison::ChangedByProgram);
    }
    let mut chosen = entry.clone();
    let written = [cpu_set("0-1"), cpu_set("0-1,4")];
    entry.attribute_to_kernel(&machine(), |mask, shown_at| shown_at >= Nanos(10) && written.contains(mask));
    assert_eq!((entry.original_mask(), entry.is_mask_from_program()), (&cpu_set("1"), false));
    chosen.attribute_to_kernel(&machine(), |mask, _| *mask == written[1]);
    assert_eq!((chosen.original_mask(), chosen.is_mask_from_program()), (&cpu_set("0-1"), false));
    let before = chosen.clone();
    chosen.attribute_to_kernel(&machine(), |_, _| false);
    assert_eq!(chosen, before);
}

#[test]
fn a_cancelled_write_is_no_candidate_any_more() {
    let mut entry = first("5");
    let before = entry.clone();
    entry.add_intended_request(cpu_set("0-3"), cpu_set("5"), Nanos(2));
    assert_eq!(entry.journaled_since(), Some(Nanos(2)));
    entry.cancel_intended_request(&cpu_set("0-3"));
    assert_eq!(entry, before);
    let mut entry = confined();
    entry.add_intended_request(cpu_set("2"), cpu_set("0-7"), Nanos(4));
    entry.cancel_intended_request(&cpu_set("2"));
    assert_eq!((entry.requested_mask(), entry.journaled_since()), (Some(&cpu_set("0-3")), Some(Nanos(2))));
}

#[test]
fn a_refused_write_is_no_candidate_any_more_and_its_record_stays_in_the_journal() {
    let mut entry = first("5");
    entry.add_intended_request(cpu_set("0-3"), cpu_set("5"), Nanos(2));
    entry.record_request_refused(&cpu_set("0-3"));
    assert_eq!((masks(&entry), entry.journaled_since()), (vec![cpu_set("5")], Some(Nanos(2))));
    // The cpuset to which the process moves then hides which of the two was requested.
    assert_eq!(read(&mut entry, "0-3", &limits(&["0-3"]), 3), MaskComparison::Predicted);
    assert!(entry.is_mask_from_program());
    entry.record_request_refused(&cpu_set("5"));
    assert_eq!(masks(&entry), [cpu_set("5")], "a request that was made before stays");
}

#[test]
fn a_cancelled_write_of_a_mask_that_may_be_requested_already_leaves_it_a_candidate() {
    let mut entry = MaskEntry::from_record(recorded(cpu_set("0-1"), cpu_set("0-7")));
    entry.add_recorded_request(recorded(cpu_set("0-3"), cpu_set("0-7")));
    let before = masks(&entry);
    for _ in 0..3 {
        entry.add_intended_request(cpu_set("0-1"), cpu_set("0-7"), Nanos(4));
        entry.cancel_intended_request(&cpu_set("0-1"));
    }
    assert_eq!(masks(&entry), before);
    (0..20).for_each(|now| entry.add_intended_request(cpu_set("0-1"), cpu_set("0-7"), Nanos(now)));
    assert!(masks(&entry).len() <= 3, "refused writes do not add up");
}

#[test]
fn an_original_mask_that_the_cpuset_forbids_is_not_tried_again_until_another_mask_is_read() {
    let mut entry = confined();
    entry.add_intended_request(cpu_set("0-7"), cpu_set("0-7"), Nanos(4));
    entry.record_original_refused(&cpu_set("4-5"), &limits(&["4-5"]));
    assert!(entry.needs_no_restore());
    assert_eq!(read(&mut entry, "4-5", &limits(&["4-5"]), 5), MaskComparison::Predicted);
    assert!(entry.needs_no_restore());
    assert_eq!(
        read(&mut entry, "0-3", &everything(), 6),
        MaskComparison::Predicted,
        "the request of before is in force"
    );
    assert!(!entry.needs_no_restore() && entry.needs_restore());
}

#[test]
fn an_original_mask_that_the_cpuset_forbade_is_tried_again_if_the_cpuset_changes_and_the_mask_does_not() {
    let mut entry = confined();
    entry.record_request_done(&cpu_set("4-5"), &cpu_set("4-5"), &everything());
    entry.add_intended_request(cpu_set("0-1"), cpu_set("0-1"), Nanos(4));
    entry.record_original_refused(&cpu_set("4-5"), &limits(&["4-5"]));
    read(&mut entry, "4-5", &limits(&["4-5"]), 5);
    assert!(entry.needs_no_restore());
    let changed = MaskLimits { may_have_changed: true, ..limits(&["4-5"]) };
    for limits in [everything(), changed] {
        let mut entry = entry.clone();
        read(&mut entry, "4-5", &limits, 6);
        assert!(!entry.needs_no_restore());
    }
}

#[test]
fn a_release_may_have_to_restore_a_mask_while_it_is_unknown_whether_an_earlier_restore_was_done() {
    let mut parent = confined();
    parent.add_intended_request(cpu_set("0-7"), cpu_set("0-7"), Nanos(4));
    let mut child =
        MaskEntry::from_inherited(parent.requests_for_child_born_at(at(5)).cloned(), at(5)).unwrap();
    assert_eq!(
        read(&mut child, "0-1", &limits(&["0-1"]), 6),
        MaskComparison::Predicted,
        "both requests show this"
    );
    assert!(child.needs_restore() && !child.needs_no_restore() && child.journaled_since().is_some());
}

#[test]
fn a_child_may_have_a_mask_that_was_replaced_while_it_was_being_forked() {
    let mut parent = confined();
    let restored_at = parent.last_read_at();
    parent.add_intended_request(machine(), machine(), restored_at);
    parent.record_request_done(&machine(), &machine(), &everything());
    read(&mut parent, "0-7", &everything(), restored_at.0 + 1);
    let inherited = |after: u64| {
        let birth = at(restored_at.0 + 1 + after);
        parent.requests_for_child_born_at(birth).map(|request| request.mask.clone()).collect::<Vec<_>>()
    };
    assert!(inherited(1_000_000).contains(&cpu_set("0-3")), "the kernel copies the mask when a fork begins");
    assert_eq!(inherited(BirthTime::MAX_FORK_TIME.0 + 1), [machine()], "no fork takes that long");
}

#[test]
fn a_recorded_request_that_a_reading_excludes_may_still_be_that_of_a_child() {
    let request = |mask: &str, since| MaskRequest {
        mask: cpu_set(mask),
        original_mask: machine(),
        writer: MaskWriter::Warden,
        requested_at: Nanos(since),
    };
    let mut parent = MaskEntry::from_record(request("0-1", 2));
    parent.add_recorded_request(request("0-7", 4));
    assert_eq!(read(&mut parent, "0-7", &everything(), 6), MaskComparison::Predicted);
    assert_eq!(masks(&parent), [machine()]);
    let inherited: Vec<CpuSet> =
        parent.requests_for_child_born_at(at(5)).map(|known| known.mask.clone()).collect();
    assert_eq!(inherited, [cpu_set("0-1"), machine()]);
}

#[test]
fn a_child_may_be_as_old_as_the_first_of_several_equal_requests_in_the_journal() {
    let request = |mask: &str, since| MaskRequest {
        mask: cpu_set(mask),
        original_mask: machine(),
        writer: MaskWriter::Warden,
        requested_at: Nanos(since),
    };
    let mut parent = MaskEntry::from_record(request("0", 2));
    for (mask, since) in [("1", 4), ("0", 6), ("1", 8)] {
        parent.add_recorded_request(request(mask, since));
    }
    assert_eq!(read(&mut parent, "1", &everything(), 10), MaskComparison::Predicted);
    let inherited: Vec<CpuSet> =
        parent.requests_for_child_born_at(at(3)).map(|known| known.mask.clone()).collect();
    assert!(inherited.contains(&cpu_set("0")), "{inherited:?}");
}

#[test]
fn a_mask_that_only_contains_the_new_cpuset_is_the_programs_own_while_the_cpuset_changes() {
    let changing = limits(&["3", "0-7"]);
    let own = MaskEntry::from_first_reading(&cpu_set("1-3,7"), &changing, Nanos(1));
    assert_eq!(*own.original_mask(), cpu_set("1-3,7"));
    for whole in ["3", "0-7"] {
        let entry = MaskEntry::from_first_reading(&cpu_set(whole), &changing, Nanos(1));
        assert_eq!(*entry.original_mask(), machine(), "{whole}");
    }
}

#[test]
fn a_cancelled_write_leaves_the_earlier_record_of_a_mask_that_the_kernel_replaced() {
    let mut entry = first("1");
    assert!(entry.mark_journaled(Nanos(2)));
    let limits = MaskLimits { kernel_may_have_reset_mask: true, ..limits(&["0-3"]) };
    assert_eq!(read(&mut entry, "0-3", &limits, 3), MaskComparison::Predicted);
    entry.add_intended_request(cpu_set("1"), cpu_set("1"), Nanos(3));
    entry.cancel_intended_request(&cpu_set("1"));
    assert_eq!((entry.journaled_since(), entry.original_mask()), (Some(Nanos(2)), &cpu_set("1")));
}

#[test]
fn a_request_of_the_program_that_a_cancelled_write_was_to_replace_is_still_to_be_journaled() {
    let mut entry = confined();
    read(&mut entry, "5", &everything(), 3);
    entry.add_intended_request(cpu_set("0-3"), cpu_set("5"), Nanos(4));
    entry.cancel_intended_request(&cpu_set("0-3"));
    assert!(entry.mark_journaled(Nanos(5)));
}

#[test]
fn after_a_restart_the_newest_record_says_which_mask_the_program_requested_last() {
    // The kernel had replaced mask 0 by every PU. The program requested every PU only before the last record.
    let mut entry = MaskEntry::from_record(recorded(cpu_set("0-7"), cpu_set("0")));
    entry.add_recorded_request(recorded(cpu_set("2-3"), cpu_set("0")));
    entry.add_recorded_request(recorded(cpu_set("2-4"), cpu_set("0-7")));
    let mut not_written = entry.clone();
    assert_eq!(read(&mut not_written, "0-7", &everything(), 5), MaskComparison::Predicted);
    assert_eq!((not_written.original_mask(), not_written.is_mask_from_program()), (&cpu_set("0-7"), true));
    assert_eq!(read(&mut entry, "2-3", &everything(), 5), MaskComparison::Predicted);
    assert_eq!(entry.original_mask(), &cpu_set("0"));
}

#[test]
fn a_thread_is_not_restored_while_a_request_of_pjw_may_be_the_last_one() {
    let requests = [("1", MaskWriter::Warden), ("0-7", MaskWriter::Program)].map(|(mask, writer)| {
        let (mask, original_mask, requested_at) = (cpu_set(mask), cpu_set("0-7"), Nanos(3));
        MaskRequest { mask, original_mask, writer, requested_at }
    });
    let birth = BirthTime { earliest: Nanos(4), latest: Nanos(4) };
    let mut entry = MaskEntry::from_inherited(requests, birth).unwrap();
    // In the cpuset 1, both requests show the same mask.
    read(&mut entry, "1", &limits(&["1"]), 5);
    assert!(!entry.needs_no_restore());
    read(&mut entry, "0-7", &everything(), 6);
    assert!(entry.needs_no_restore());
}
