//! The rules of a mask entry, one by one, and against a model of the kernel.

use proptest::prelude::*;

use super::*;
use crate::basics::StartTime;
use crate::testing::set;

const SECOND: u64 = 1_000_000_000;

fn machine() -> CpuSet {
    set("0-7")
}

/// The limits of a mask: each set of PUs that was possible, the present one first.
fn limits(possible: &[&str]) -> MaskLimits {
    limits_of(possible.iter().map(|cpus| set(cpus)))
}

fn limits_of(possible: impl IntoIterator<Item = CpuSet>) -> MaskLimits {
    MaskLimits {
        possible: possible.into_iter().collect(),
        machine: machine(),
        have_changed: false,
        may_be_reset: false,
    }
}

fn everything() -> MaskLimits {
    limits(&["0-7"])
}

fn first(seen: &str) -> MaskEntry {
    MaskEntry::from_first_reading(&set(seen), &everything(), Nanos(1))
}

fn read(entry: &mut MaskEntry, seen: &str, limits: &MaskLimits, at: u64) -> MaskReading {
    entry.note_reading(&set(seen), limits, Nanos(at))
}

/// An entry of a thread that had every PU and for which pjw requested 0-3 at the time 2.
fn confined() -> MaskEntry {
    let mut entry = first("0-7");
    entry.begin_write(set("0-3"), set("0-7"), Nanos(2));
    entry.end_write(&set("0-3"), &set("0-3"), &everything());
    entry
}

fn masks(entry: &MaskEntry) -> Vec<CpuSet> {
    entry.possible_requests().map(|request| request.mask.clone()).collect()
}

fn at(moment: u64) -> BirthTime {
    BirthTime { earliest: Nanos(moment), latest: Nanos(moment) }
}

#[test]
fn the_kernel_shows_what_is_possible_of_a_request_or_everything_possible_if_nothing_is() {
    assert_eq!(effective_mask(&set("0-3"), &set("2-5")), set("2-3"));
    assert_eq!(effective_mask(&set("0-1"), &set("2-5")), set("2-5"));
}

#[test]
fn a_thread_that_has_every_possible_pu_requested_every_pu_of_the_machine() {
    let entry = MaskEntry::from_first_reading(&set("0-3"), &limits(&["0-3"]), Nanos(1));
    assert_eq!((entry.requested(), entry.original()), (Some(&machine()), &machine()));
    let entry = MaskEntry::from_first_reading(&set("0-2"), &limits(&["0-3"]), Nanos(1));
    assert_eq!(entry.requested(), Some(&set("0-2")));
    let entry = MaskEntry::from_first_reading(&set("0-2"), &limits(&["0-3", "0-1"]), Nanos(1));
    assert_eq!(entry.requested(), Some(&set("0-2")), "no limit leaves this of every PU");
    assert!(entry.is_from_program() && !entry.needs_restore() && entry.journaled_since().is_none());
}

#[test]
fn a_predicted_mask_was_written_by_no_program() {
    let mut entry = confined();
    for (seen, possible) in [("0-3", "0-7"), ("2-3", "2-7"), ("4-7", "4-7"), ("0-3", "0-7")] {
        assert_eq!(
            read(&mut entry, seen, &limits(&[possible]), 3),
            MaskReading::Predicted,
            "{seen} of {possible}"
        );
        assert_eq!((entry.requested(), entry.original()), (Some(&set("0-3")), &machine()));
    }
    assert!(!entry.is_from_program() && entry.needs_restore());
}

#[test]
fn a_mask_that_some_earlier_limit_predicts_was_written_by_no_program() {
    let mut entry = confined();
    assert_eq!(read(&mut entry, "0-2", &limits(&["0-7", "0-2"]), 3), MaskReading::Predicted);
    assert_eq!(read(&mut entry, "0-2", &everything(), 4), MaskReading::Written);
}

#[test]
fn a_mask_that_is_not_predicted_was_written_by_the_program() {
    let mut entry = confined();
    assert_eq!(read(&mut entry, "0-3", &everything(), 3), MaskReading::Predicted);
    assert_eq!(read(&mut entry, "5", &everything(), 4), MaskReading::Written);
    assert_eq!((entry.requested(), entry.original()), (Some(&set("5")), &set("5")));
    assert!(entry.is_from_program() && entry.is_overridden_by_program() && entry.pinned_pu().is_none());
    // It stays the program's until pjw requests another mask.
    assert_eq!(read(&mut entry, "5", &everything(), 5), MaskReading::Predicted);
    assert!(entry.is_from_program());
}

#[test]
fn a_mask_that_the_program_requested_before_pjw_began_is_no_attempt_to_leave() {
    let mut entry = first("0-7");
    assert_eq!(read(&mut entry, "5", &everything(), 4), MaskReading::Written);
    assert!(entry.start_journaling(Nanos(9)));
    assert!(!entry.is_overridden_by_program());
}

#[test]
fn a_mask_that_the_program_requested_after_pjw_is_not_in_the_journal() {
    let mut entry = first("0-7");
    entry.begin_write(set("0-3"), set("0-7"), Nanos(2));
    assert!(!entry.start_journaling(Nanos(3)));
    assert_eq!(read(&mut entry, "5", &everything(), 4), MaskReading::Written);
    assert!(entry.start_journaling(Nanos(5)) && !entry.start_journaling(Nanos(6)));
    assert_eq!(entry.journaled_since(), Some(Nanos(2)));
}

#[test]
fn of_several_candidates_a_reading_removes_those_that_do_not_predict_it() {
    let mut entry = first("0-7");
    entry.begin_write(set("0-3"), set("0-7"), Nanos(2));
    assert_eq!((masks(&entry), entry.requested()), (vec![set("0-7"), set("0-3")], None));
    // The cpuset hides which of them was requested.
    assert_eq!(read(&mut entry, "0-3", &limits(&["0-3"]), 3), MaskReading::Predicted);
    assert_eq!(masks(&entry).len(), 2);
    assert_eq!(read(&mut entry, "0-7", &everything(), 4), MaskReading::Predicted);
    assert_eq!(entry.requested(), Some(&set("0-7")));
    assert!(entry.is_from_program());
}

fn recorded(mask: CpuSet, original: CpuSet) -> MaskRequest {
    MaskRequest { mask, original, by: MaskWriter::Warden, since: Nanos(2) }
}

#[test]
fn candidates_of_one_mask_are_certain_and_the_newest_decides_what_a_release_puts_back() {
    let mut entry = MaskEntry::from_record(recorded(set("1"), set("0-7")));
    entry.add_recorded_request(recorded(set("1"), set("1")));
    assert_eq!((entry.requested(), entry.original()), (Some(&set("1")), &set("1")));
}

#[test]
fn a_recorded_entry_holds_only_so_many_candidates() {
    let mut entry = MaskEntry::from_record(recorded(set("0"), set("0-7")));
    (0..20).for_each(|pu| entry.add_recorded_request(recorded(CpuSet::from(Pu(pu % 8)), set("0-7"))));
    assert!(masks(&entry).len() <= EARLIER_REQUESTS);
}

#[test]
fn a_cpuset_that_pjw_does_not_read_narrows_a_write_and_its_result_is_predicted_from_then_on() {
    let mut entry = first("0-7");
    entry.begin_write(set("0-3"), set("0-7"), Nanos(2));
    entry.end_write(&set("0-3"), &set("2-3"), &everything());
    assert_eq!(read(&mut entry, "2-3", &everything(), 3), MaskReading::Predicted);
    assert_eq!(read(&mut entry, "2", &limits(&["0-2,4-7"]), 4), MaskReading::Predicted);
    assert_eq!(read(&mut entry, "0-3", &everything(), 5), MaskReading::Predicted);
    assert_eq!(read(&mut entry, "1-3", &everything(), 6), MaskReading::Written);
}

#[test]
fn a_write_that_a_known_cpuset_limits_says_nothing_of_the_masks_under_another_cpuset() {
    let mut entry = first("0-7");
    entry.begin_write(machine(), set("0-7"), Nanos(2));
    entry.end_write(&machine(), &set("0-3"), &limits(&["0-3"]));
    assert_eq!(read(&mut entry, "0-1", &limits(&["0-1,4-5", "0-3"]), 3), MaskReading::Written);
}

#[test]
fn a_child_begins_with_a_request_that_held_when_it_was_born() {
    let mut entry = confined();
    entry.note_same_reading(Nanos(4));
    let requests = |moment| {
        entry.requests_inherited_at(at(moment)).map(|request| request.mask.clone()).collect::<Vec<_>>()
    };
    assert_eq!(requests(1), [machine()], "before the write");
    assert_eq!(requests(3), [machine(), set("0-3")], "the write may not have been carried out yet");
    assert_eq!(requests(BirthTime::FORK_TIME.0 + 5), [set("0-3")], "a reading after the write was before");
    assert!(MaskEntry::from_inherited([], at(5)).is_none());
}

#[test]
fn a_child_that_has_a_mask_of_pjw_gets_the_original_of_its_parent_back() {
    let parent = confined();
    let mut child = MaskEntry::from_inherited(parent.requests_inherited_at(at(3)).cloned(), at(3)).unwrap();
    assert_eq!(read(&mut child, "0-3", &everything(), 4), MaskReading::Predicted);
    assert_eq!((child.original(), child.journaled_since()), (&machine(), Some(Nanos(2))));
    assert!(child.needs_restore());
    let mut other = MaskEntry::from_inherited(parent.requests_inherited_at(at(3)).cloned(), at(3)).unwrap();
    assert_eq!(read(&mut other, "5", &everything(), 4), MaskReading::Written);
    assert_eq!((other.original(), other.needs_restore()), (&set("5"), false));
}

#[test]
fn what_a_scan_saw_was_born_before_the_decision_that_followed_except_if_it_cannot_be_older() {
    let birth = |earliest, latest| BirthTime { earliest: Nanos(earliest), latest: Nanos(latest) };
    assert!(birth(1, 4).is_before(Nanos(5)) && birth(1, 5).is_before(Nanos(5)));
    assert!(!birth(5, 5).is_before(Nanos(5)) && !birth(1, 6).is_before(Nanos(5)));
    let tick = BirthTime::from_start_time(StartTime(100), Some(Nanos(SECOND + 3)));
    assert_eq!(tick, birth(SECOND, SECOND + 3));
    assert_eq!(BirthTime::from_start_time(StartTime(100), None).latest, StartTime(100).latest());
}

#[test]
fn a_write_on_a_process_that_was_being_born_may_be_undone_by_the_kernel() {
    let mut entry =
        MaskEntry::from_inherited(first("0-7").requests_inherited_at(at(3)).cloned(), at(3)).unwrap();
    entry.begin_write(set("0-3"), set("0-7"), Nanos(4));
    entry.end_write(&set("0-3"), &set("0-3"), &everything());
    entry.reopen_inherited_requests();
    assert_eq!(masks(&entry), [machine(), set("0-3")]);
    let mut late = entry.clone();
    assert_eq!(
        read(&mut late, "0-7", &everything(), 5),
        MaskReading::Predicted,
        "the parent's mask was copied again"
    );
    assert_eq!(read(&mut entry, "0-3", &everything(), 5), MaskReading::Predicted);
    assert_eq!(read(&mut entry, "0-7", &everything(), 6), MaskReading::Written, "the birth is over");
}

#[test]
fn an_old_kernel_may_replace_a_request_when_the_limits_change_and_the_original_stays() {
    let reset = |possible: &[&str]| MaskLimits { may_be_reset: true, ..limits(possible) };
    let mut entry = first("1");
    assert_eq!(read(&mut entry, "0-2", &reset(&["0-2", "0-3"]), 3), MaskReading::Predicted);
    assert_eq!((entry.requested(), entry.original()), (Some(&machine()), &set("1")));
    assert!(!entry.is_from_program() && entry.needs_restore(), "a release puts the program's mask back");
    let mut entry = first("1");
    assert_eq!(
        read(&mut entry, "0", &reset(&["0-2", "0-3"]), 3),
        MaskReading::Written,
        "no kernel writes this"
    );
    assert_eq!(entry.original(), &set("0"));
    let mut entry = first("1");
    assert_eq!(
        read(&mut entry, "0-2", &limits(&["0-3", "0-4"]), 3),
        MaskReading::Written,
        "newer kernels never do"
    );
}

#[test]
fn requests_that_an_old_kernel_wrote_are_attributed_to_it_later_back_to_one_that_it_cannot_have_written() {
    let mut entry = first("1");
    for (at, seen) in [(10, "0-1"), (11, "0-1,4")] {
        assert_eq!(read(&mut entry, seen, &everything(), at), MaskReading::Written);
    }
    let mut chosen = entry.clone();
    let written = [set("0-1"), set("0-1,4")];
    entry.attribute_to_kernel(&machine(), |mask, shown_at| shown_at >= Nanos(10) && written.contains(mask));
    assert_eq!((entry.original(), entry.is_from_program()), (&set("1"), false));
    chosen.attribute_to_kernel(&machine(), |mask, _| *mask == written[1]);
    assert_eq!((chosen.original(), chosen.is_from_program()), (&set("0-1"), false));
    let before = chosen.clone();
    chosen.attribute_to_kernel(&machine(), |_, _| false);
    assert_eq!(chosen, before);
}

#[test]
fn a_cancelled_write_is_no_candidate_any_more() {
    let mut entry = first("5");
    let before = entry.clone();
    entry.begin_write(set("0-3"), set("5"), Nanos(2));
    assert_eq!(entry.journaled_since(), Some(Nanos(2)));
    entry.cancel_write(&set("0-3"));
    assert_eq!(entry, before);
    let mut entry = confined();
    entry.begin_write(set("2"), set("0-7"), Nanos(4));
    entry.cancel_write(&set("2"));
    assert_eq!((entry.requested(), entry.journaled_since()), (Some(&set("0-3")), Some(Nanos(2))));
}

#[test]
fn a_cancelled_write_of_a_mask_that_may_be_requested_already_leaves_it_a_candidate() {
    let mut entry = MaskEntry::from_record(recorded(set("0-1"), set("0-7")));
    entry.add_recorded_request(recorded(set("0-3"), set("0-7")));
    let before = masks(&entry);
    for _ in 0..3 {
        entry.begin_write(set("0-1"), set("0-7"), Nanos(4));
        entry.cancel_write(&set("0-1"));
    }
    assert_eq!(masks(&entry), before);
    (0..20).for_each(|now| entry.begin_write(set("0-1"), set("0-7"), Nanos(now)));
    assert!(masks(&entry).len() <= 3, "refused writes do not add up");
}

#[test]
fn an_original_mask_that_the_cpuset_forbids_is_not_tried_again_until_another_mask_is_read() {
    let mut entry = confined();
    entry.begin_write(set("0-7"), set("0-7"), Nanos(4));
    entry.note_original_unreachable(&set("4-5"), &limits(&["4-5"]));
    assert!(entry.is_restored());
    assert_eq!(read(&mut entry, "4-5", &limits(&["4-5"]), 5), MaskReading::Predicted);
    assert!(entry.is_restored());
    assert_eq!(
        read(&mut entry, "0-3", &everything(), 6),
        MaskReading::Predicted,
        "the request of before is in force"
    );
    assert!(!entry.is_restored() && entry.needs_restore());
}

#[test]
fn an_original_mask_that_the_cpuset_forbade_is_tried_again_if_the_cpuset_changes_and_the_mask_does_not() {
    let mut entry = confined();
    entry.end_write(&set("4-5"), &set("4-5"), &everything());
    entry.begin_write(set("0-1"), set("0-1"), Nanos(4));
    entry.note_original_unreachable(&set("4-5"), &limits(&["4-5"]));
    read(&mut entry, "4-5", &limits(&["4-5"]), 5);
    assert!(entry.is_restored());
    let changed = MaskLimits { have_changed: true, ..limits(&["4-5"]) };
    for limits in [everything(), changed] {
        let mut entry = entry.clone();
        read(&mut entry, "4-5", &limits, 6);
        assert!(!entry.is_restored());
    }
}

#[test]
fn a_release_may_have_to_restore_a_mask_while_it_is_unknown_whether_an_earlier_restore_was_done() {
    let mut parent = confined();
    parent.begin_write(set("0-7"), set("0-7"), Nanos(4));
    let mut child = MaskEntry::from_inherited(parent.requests_inherited_at(at(5)).cloned(), at(5)).unwrap();
    assert_eq!(
        read(&mut child, "0-1", &limits(&["0-1"]), 6),
        MaskReading::Predicted,
        "both requests show this"
    );
    assert!(child.needs_restore() && !child.is_restored() && child.journaled_since().is_some());
}

/// What can happen to a mask between two readings.
#[derive(Debug, Clone)]
enum Step {
    /// The program requests a mask.
    Program(CpuSet),
    /// pjw requests a mask.
    Warden(CpuSet),
    /// pjw was about to request a mask, and whether the write is known not to be tried.
    Planned(CpuSet, bool),
    /// The cpuset changes.
    Cpuset(CpuSet),
    /// The online PUs change.
    Online(CpuSet),
    Read,
}

/// A kernel since Linux 6.2 with one thread, and the entry that pjw keeps of the thread.
struct Kernel {
    requested: CpuSet,
    cpuset: CpuSet,
    online: CpuSet,
    /// Each set that was possible since the last reading, the oldest first.
    possible: Vec<CpuSet>,
    entry: MaskEntry,
    /// Whether the program requested a mask since the last reading.
    has_program_written: bool,
    /// Whether the readings say which mask is requested. They do not if the program requested a mask that looks like another.
    is_known: bool,
    now: u64,
}

impl Kernel {
    fn new() -> Self {
        Self {
            requested: machine(),
            cpuset: machine(),
            online: machine(),
            possible: vec![machine()],
            entry: first("0-7"),
            has_program_written: false,
            is_known: true,
            now: 1,
        }
    }

    fn possible(&self) -> CpuSet {
        let left = self.cpuset.intersection(&self.online);
        if left.is_empty() { self.online.clone() } else { left }
    }

    fn take(&mut self, step: Step) -> Result<(), TestCaseError> {
        self.now += 1;
        let now = Nanos(self.now);
        let original = self.entry.original().clone();
        match step {
            // The kernel refuses a mask of which nothing is possible.
            Step::Program(mask) if mask.intersects(&self.possible()) => {
                self.requested = mask;
                self.has_program_written = true;
            }
            Step::Warden(mask) if mask.intersects(&self.possible()) => {
                self.entry.begin_write(mask.clone(), original, now);
                self.requested = mask.clone();
                let limits = limits_of([self.possible()]);
                self.entry.end_write(&mask, &effective_mask(&mask, &self.possible()), &limits);
                (self.has_program_written, self.is_known) = (false, true);
            }
            Step::Planned(mask, is_cancelled) => {
                self.entry.begin_write(mask.clone(), original, now);
                if is_cancelled {
                    self.entry.cancel_write(&mask);
                }
            }
            Step::Cpuset(cpus) => self.cpuset = cpus,
            Step::Online(cpus) => self.online = cpus,
            Step::Read => return self.read(now),
            Step::Program(_) | Step::Warden(_) => {}
        }
        let possible = self.possible();
        if self.possible.last() != Some(&possible) {
            self.possible.push(possible);
        }
        Ok(())
    }

    fn read(&mut self, now: Nanos) -> Result<(), TestCaseError> {
        let seen = effective_mask(&self.requested, &self.possible());
        let limits = limits_of(self.possible.drain(..).rev());
        self.possible.push(limits.possible[0].clone());
        let looks_like =
            |mask: &CpuSet| limits.possible.iter().any(|possible| effective_mask(mask, possible) == seen);
        if self.has_program_written {
            let is_new = !masks(&self.entry).iter().any(looks_like);
            let is_whole = limits.possible.contains(&seen);
            self.is_known =
                is_new && if is_whole { self.requested == machine() } else { self.requested == seen };
        }
        let reading = self.entry.note_reading(&seen, &limits, now);
        let candidates = masks(&self.entry);
        let context = format!("{} shown as {seen}, {reading:?}: {candidates:?}", self.requested);
        prop_assert!(candidates.iter().any(looks_like), "no candidate predicts {context}");
        if self.is_known {
            prop_assert!(candidates.contains(&self.requested), "not a candidate: {context}");
            let expected =
                if self.has_program_written { MaskReading::Written } else { MaskReading::Predicted };
            prop_assert_eq!(reading, expected, "{}", context);
        }
        self.has_program_written = false;
        Ok(())
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pus = || proptest::collection::btree_set(0_u32..8, 1..9);
    let mask = || pus().prop_map(|pus| pus.into_iter().map(Pu).collect::<CpuSet>());
    let program = prop_oneof![2 => mask(), 1 => Just(machine())];
    let step = prop_oneof![
        2 => program.prop_map(Step::Program),
        2 => mask().prop_map(Step::Warden),
        1 => (mask(), any::<bool>()).prop_map(|(mask, is_cancelled)| Step::Planned(mask, is_cancelled)),
        2 => mask().prop_map(Step::Cpuset),
        1 => mask().prop_map(Step::Online),
        5 => Just(Step::Read),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #[test]
    fn the_true_request_is_among_the_candidates_after_each_reading(steps in steps()) {
        let mut kernel = Kernel::new();
        for step in steps {
            kernel.take(step)?;
        }
    }
}

#[test]
fn a_child_may_have_a_mask_that_was_replaced_while_it_was_being_forked() {
    let mut parent = confined();
    let restored_at = parent.last_read_at();
    parent.begin_write(machine(), machine(), restored_at);
    parent.end_write(&machine(), &machine(), &everything());
    read(&mut parent, "0-7", &everything(), restored_at.0 + 1);
    let inherited = |after: u64| {
        let birth = at(restored_at.0 + 1 + after);
        parent.requests_inherited_at(birth).map(|request| request.mask.clone()).collect::<Vec<_>>()
    };
    assert!(inherited(1_000_000).contains(&set("0-3")), "the kernel copies the mask when a fork begins");
    assert_eq!(inherited(BirthTime::FORK_TIME.0 + 1), [machine()], "no fork takes that long");
}

#[test]
fn a_recorded_request_that_a_reading_excludes_may_still_be_that_of_a_child() {
    let request = |mask: &str, since| MaskRequest {
        mask: set(mask),
        original: machine(),
        by: MaskWriter::Warden,
        since: Nanos(since),
    };
    let mut parent = MaskEntry::from_record(request("0-1", 2));
    parent.add_recorded_request(request("0-7", 4));
    assert_eq!(read(&mut parent, "0-7", &everything(), 6), MaskReading::Predicted);
    assert_eq!(masks(&parent), [machine()]);
    let inherited: Vec<CpuSet> =
        parent.requests_inherited_at(at(5)).map(|known| known.mask.clone()).collect();
    assert_eq!(inherited, [set("0-1"), machine()]);
}
