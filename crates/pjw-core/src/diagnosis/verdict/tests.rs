//! Six jobs with planted faults and good ones: the verdict, its sentence and the remedy.

use super::*;
use crate::basics::{CpuSet, Uid, UnixMillis};
use crate::terms::{JobUsage, UsageSample};
use crate::testing::job;

const SECOND: u64 = 1_000_000_000;

/// A job on this number of cores with one PU each. Each part is a number of seconds in which it used so many permille
/// of one PU, waited so many, and had so many hot threads.
fn report(id: &str, cores: u32, parts: &[(u64, u64, u64, u32)]) -> JobReport {
    report_of(id, (cores, 1), parts, false)
}

fn report_of(
    id: &str,
    (cores, pus_per_core): (u32, u32),
    parts: &[(u64, u64, u64, u32)],
    has_bound_waiters: bool,
) -> JobReport {
    let mut usage = JobUsage { tasks: Some(1), ..JobUsage::default() };
    for &(length, cpu, wait, hot_threads) in parts {
        let pus = cores * pus_per_core;
        let (cpu_ns, wait_ns) = (cpu * SECOND / 1000, wait * SECOND / 1000);
        let held_ns = u64::from(cores) * SECOND;
        let length_ns = SECOND;
        let sample = UsageSample {
            length_ns,
            cpu_ns,
            wait_ns,
            cores,
            pus,
            held_ns,
            without_pus_ns: 0,
            hot_threads,
            has_bound_waiters,
        };
        (0..length).for_each(|_| usage.add_sample(&sample));
        usage.cpu_ns += cpu_ns * length;
    }
    usage.end_serial_phase();
    JobReport {
        id: job(id),
        owner: Uid(1000),
        cpus: CpuSet::new(),
        is_provision: false,
        is_borrower: false,
        started: UnixMillis(0),
        ended: UnixMillis(0),
        wall_ns: usage.sampled_ns,
        usage,
        incomplete_reason: None,
    }
}

fn judged(report: &JobReport) -> (&'static str, String) {
    let verdict = judge_ended_job(report).unwrap();
    (verdict.kind.name(), verdict.advice.join(" "))
}

#[test]
fn a_good_job_is_fine_without_advice() {
    for parts in [&[(100, 3900, 100, 4)][..], &[(5, 900, 0, 1), (95, 3800, 50, 4)], &[(60, 2700, 0, 3)]] {
        assert_eq!(judged(&report("slurm:1", 4, parts)), ("fine", String::new()), "{parts:?}");
    }
    assert_eq!(
        judged(&report_of("slurm:1", (4, 2), &[(60, 3900, 0, 4)], false)).0,
        "fine",
        "one thread per core"
    );
    assert_eq!(
        judged(&report_of("slurm:1", (4, 2), &[(60, 7900, 300, 8)], false)).0,
        "fine",
        "one thread per PU"
    );
    for (cores, helpers) in [(16, &[(60, 15_900, 9000, 16)][..]), (1, &[(60, 1000, 600, 1)])] {
        let report = report("slurm:1", cores, helpers);
        assert_eq!(judged(&report), ("fine", String::new()), "{cores} hot threads and helpers");
    }
}

#[test]
fn fault_1_fewer_threads_than_cores() {
    let (word, advice) = judged(&report("slurm:1", 16, &[(120, 3100, 0, 4)]));
    assert_eq!(
        (word, advice.as_str()),
        ("serial", "Of 16 cores 3.1 were used: ask for `--cpus-per-task=4`.")
    );
    // The second one: the start of the job and the clocks add some permille.
    for used in [1000, 1004] {
        let (word, advice) = judged(&report("manual:a", 2, &[(120, used, 0, 1)]));
        assert_eq!((word, advice.as_str()), ("serial", "Of 2 cores 1.0 were used: ask for `--cores 1`."));
    }
}

#[test]
fn fault_1_a_second_thread_at_times_is_no_reason_to_ask_for_one_core_more() {
    let (word, advice) = judged(&report("manual:a", 2, &[(114, 1000, 0, 1), (6, 2000, 0, 2)]));
    assert_eq!(word, "serial");
    assert!(advice.contains("ask for `--cores 1`"), "{advice}");
}

#[test]
fn fault_2_a_serial_part_after_a_parallel_one() {
    let (word, advice) = judged(&report("lsf:7", 8, &[(100, 7900, 0, 8), (300, 990, 0, 1)]));
    assert_eq!(word, "serial");
    assert_eq!(
        advice,
        "Of 8 cores 2.7 were used: for 300 s of 400 s one thread ran alone. Let more threads do that part, or ask for `-n 3`."
    );
}

#[test]
fn fault_3_more_threads_than_cores() {
    let (word, advice) = judged(&report("slurm:1", 4, &[(60, 3990, 32_000, 36)]));
    assert_eq!(word, "oversubscribed");
    assert_eq!(
        advice,
        "36 threads want to run on 4 cores: set OMP_NUM_THREADS=4 (divided by the number of ranks, if there are several) or the \
         program's own number of threads, or ask for `--cpus-per-task=36`."
    );
    let (_, advice) = judged(&report_of("slurm:1", (4, 2), &[(60, 7990, 8000, 16)], false));
    assert!(advice.ends_with("or ask for `--cpus-per-task=16`."), "Slurm counts PUs: {advice}");
    let (_, advice) = judged(&report_of("lsf:1", (4, 2), &[(60, 7990, 8000, 16)], false));
    assert!(advice.ends_with("or ask for `-n 8`."), "two threads for each core: {advice}");
}

#[test]
fn fault_3_with_a_serial_part_in_each_step() {
    let (word, advice) = judged(&report("slurm:1", 4, &[(60, 2800, 20_000, 36)]));
    assert_eq!(word, "oversubscribed");
    assert!(advice.starts_with("36 threads want to run on 4 cores"), "{advice}");
}

#[test]
fn fault_3_with_processes_that_end_before_they_are_hot() {
    let (word, advice) = judged(&report("slurm:1", 4, &[(60, 3900, 12_000, 2)]));
    assert_eq!(word, "oversubscribed");
    assert_eq!(
        advice,
        "On average 16 threads of short processes want to run on 4 cores: start no more at a time than the job has CPUs \
         (make -j4), or ask for `--cpus-per-task=16`."
    );
}

#[test]
fn fault_3_with_threads_that_start_and_end_one_after_the_other() {
    let team = &[(3, 3990, 1000, 5), (2, 3990, 2500, 6), (8, 3990, 4000, 8), (2, 3990, 1000, 5)];
    let (word, advice) = judged(&report("slurm:1", 4, team));
    assert_eq!(word, "oversubscribed");
    assert!(advice.starts_with("8 threads want to run on 4 cores"), "{advice}");
}

#[test]
fn fault_3_with_many_hot_threads_for_a_moment_only_is_told_by_what_lasted() {
    let make = &[(50, 3900, 12_000, 2), (1, 3990, 36_000, 40), (9, 3900, 12_000, 3)];
    let (word, advice) = judged(&report("slurm:1", 4, make));
    assert_eq!(word, "oversubscribed");
    assert!(advice.contains("of short processes") && !advice.contains("OMP_NUM_THREADS"), "{advice}");
    let team = &[(1, 3990, 36_000, 40), (50, 3990, 4000, 8), (9, 3990, 12_000, 3)];
    let (word, advice) = judged(&report("slurm:1", 4, team));
    assert_eq!(word, "oversubscribed");
    assert!(advice.starts_with("8 threads want to run on 4 cores: set OMP_NUM_THREADS=4"), "{advice}");
    let (word, _) = judged(&report("slurm:1", 4, &[(50, 3900, 100, 4), (5, 3990, 36_000, 40)]));
    assert_eq!(word, "fine", "a tenth of the time");
}

#[test]
fn fault_4_threads_that_their_program_bound_to_one_core() {
    let (word, advice) = judged(&report_of("slurm:1", (4, 1), &[(60, 1000, 3000, 4)], true));
    assert_eq!(word, "bound");
    assert_eq!(
        advice,
        "For 60.0 s of 60.0 s threads waited beside idle cores because their own program or its launcher had bound them: do not bind \
         them, or to different cores each (`srun --cpus-per-task=4`, `srun --cpu-bind=none`, OMP_PROC_BIND=false, mpirun \
         --bind-to none)."
    );
}

#[test]
fn the_option_against_a_binding_is_that_of_the_system_that_binds() {
    let options = |id: &str, tasks| {
        let usage = JobUsage { pus_max: 8, cores_max: 4, tasks: Some(tasks), ..JobUsage::default() };
        launcher_options(&job(id), &usage)
    };
    assert_eq!(options("slurm:1", 2), "`srun --cpus-per-task=4`, `srun --cpu-bind=none`, ");
    assert_eq!(options("slurm:1", 8), "`srun --cpu-bind=none`, ", "each task has one CPU already");
    assert_eq!(options("flux:f1", 1), "`-o cpu-affinity=off`, ");
    assert_eq!(options("lsf:1", 2), "`-R \"affinity[core(2)]\"`, ");
    assert_eq!(options("sge:1", 1), "no `-binding`, ");
    for id in ["pbs:1", "condor:1.0", "oar:1", "a"] {
        assert_eq!(options(id, 1), "", "{id}");
    }
}

#[test]
fn fault_5_threads_that_wait_for_something_else() {
    let (word, advice) = judged(&report("pbs:1.srv", 4, &[(90, 100, 0, 0), (10, 1000, 0, 1)]));
    assert_eq!(word, "waiting");
    assert!(
        advice.contains("For 90.0 s of 100 s no thread ran") && advice.ends_with("`-l select=1:ncpus=1`."),
        "{advice}"
    );
    let (word, advice) = judged(&report("slurm:1", 1, &[(100, 100, 0, 0)]));
    assert_eq!(word, "waiting");
    assert!(advice.ends_with("not for its core."), "{advice}");
}

#[test]
fn fault_6_other_programs_on_the_cores_of_the_job() {
    let (word, advice) = judged(&report("slurm:1", 4, &[(60, 2000, 2000, 4)]));
    assert_eq!(word, "waiting");
    assert!(advice.contains("cores of their own job that other programs used"), "{advice}");
    let borrower = JobReport { is_borrower: true, ..report("slurm:1", 4, &[(60, 2000, 2000, 4)]) };
    let (word, advice) = judged(&borrower);
    assert_eq!(word, "waiting");
    assert!(advice.contains("that the job had borrowed") && !advice.contains("administrator"), "{advice}");
}

#[test]
fn each_scheduler_has_its_own_option() {
    let usage = JobUsage { pus_max: 8, cores_max: 4, tasks: Some(1), ..JobUsage::default() };
    let option = |id: &str| option_for_cores(&job(id), 3, &usage).unwrap();
    let ids = ["slurm:1", "pbs:1", "lsf:1", "sge:1", "condor:1.0", "flux:f1", "oar:1", "a"];
    assert_eq!(
        ids.map(option),
        [
            "`--cpus-per-task=6`",
            "`-l select=1:ncpus=6`",
            "`-n 3`",
            "`-pe NAME 3`, with the name of the parallel environment",
            "`request_cpus = 3`",
            "`--cores-per-task=3`",
            "`-l core=3`",
            "`--cores 3`"
        ]
    );
}

#[test]
fn more_cores_are_asked_for_by_the_option_of_each_scheduler() {
    let usage = |tasks| JobUsage { pus_max: 8, cores_max: 4, tasks, ..JobUsage::default() };
    let option = |id: &str, tasks| option_for_more_cores(&job(id), 9, &usage(tasks)).unwrap();
    assert_eq!(option("slurm:1", Some(2)), "`--cpus-per-task=9` for each of 2 tasks");
    assert_eq!(option("flux:f1", Some(1)), "`--cores-per-task=9`");
    assert_eq!(
        option("slurm:1", None),
        "`--cpus-per-task=18`, divided by the number of tasks on a node, if there are several"
    );
    assert_eq!(
        (option("pbs:1", None), option("a", None)),
        ("`-l select=1:ncpus=18`".into(), "`--cores 9`".into())
    );
    assert_eq!(option_for_more_cores(&job("slurm:1"), 4, &usage(Some(1))), None, "the job has so many");
}

#[test]
fn the_cores_that_a_job_needs_are_divided_by_its_tasks() {
    let option = |id: &str, needed: u64, (cores_max, pus_max): (u32, u32), tasks: Option<u32>| {
        option_for_cores(&job(id), needed, &JobUsage { cores_max, pus_max, tasks, ..JobUsage::default() })
            .unwrap()
    };
    assert_eq!(option("slurm:1", 4, (16, 16), Some(2)), "`--cpus-per-task=2` for each of 2 tasks");
    assert_eq!(
        option("slurm:1", 5, (16, 16), Some(2)),
        "`--cpus-per-task=3` for each of 2 tasks",
        "rounded up"
    );
    assert_eq!(
        option("slurm:1", 4, (16, 32), Some(2)),
        "`--cpus-per-task=4` for each of 2 tasks",
        "Slurm counts PUs"
    );
    assert_eq!(option("slurm:1", 3, (16, 16), Some(16)), "`--ntasks-per-node=3`", "each task has one core");
    assert_eq!(option("slurm:1", 3, (16, 16), Some(8)), "`--cpus-per-task=1` for each of 8 tasks");
    assert_eq!(option("flux:f1", 4, (16, 32), Some(2)), "`--cores-per-task=2` for each of 2 tasks");
    assert_eq!(option("flux:f1", 3, (16, 32), Some(16)), "`--tasks-per-node=3`");
    for tasks in [None, Some(0)] {
        assert_eq!(
            option("slurm:1", 4, (16, 16), tasks),
            "`--cpus-per-task=4`, divided by the number of tasks on a node, if there are several"
        );
    }
}

#[test]
fn no_job_is_told_to_ask_for_what_it_has() {
    let report_with = |tasks, used| {
        let report = report("slurm:1", 16, &[(50, used, 0, 15), (100, 4000, 0, 4)]);
        JobReport { usage: JobUsage { tasks, ..report.usage }, ..report }
    };
    let (word, advice) = judged(&report_with(Some(2), 14_900));
    assert_eq!((word, advice.as_str()), ("serial", "Of 16 cores 7.6 were used."), "15 CPUs are 8 for each");
    let (_, advice) = judged(&report_with(Some(2), 13_900));
    assert_eq!(advice, "Of 16 cores 7.3 were used: ask for `--cpus-per-task=7` for each of 2 tasks.");
    let (_, advice) = judged(&report_with(Some(1), 14_900));
    assert_eq!(advice, "Of 16 cores 7.6 were used: ask for `--cpus-per-task=15`.");
    let (word, advice) = judged(&report("manual:a", 2, &[(50, 2000, 0, 2), (100, 900, 0, 1)]));
    assert_eq!((word, advice.contains("ask for")), ("serial", false), "{advice}");
    for tasks in 1..40 {
        for needed in 1..40 {
            let usage = JobUsage { cores_max: 16, pus_max: 16, tasks: Some(tasks), ..JobUsage::default() };
            let Some(option) = option_for_cores(&job("slurm:1"), needed, &usage) else { continue };
            let count: String =
                option.chars().skip_while(|c| *c != '=').skip(1).take_while(char::is_ascii_digit).collect();
            let count: u32 = count.parse().unwrap();
            let is_less = if option.contains("--cpus-per-task") { count * tasks < 16 } else { count < tasks };
            assert!(is_less, "{needed} for {tasks} tasks: {option}");
        }
    }
}

#[test]
fn no_verdict_without_enough_to_judge() {
    assert_eq!(judge_ended_job(&report("a", 4, &[(9, 1000, 0, 1)])), None, "too short");
    assert_eq!(judge_ended_job(&report("a", 4, &[(60, 0, 0, 0)])), None, "nothing ran");
    assert_eq!(judge_ended_job(&report("a", 0, &[(60, 1000, 0, 1)])), None, "no cores");
    let provision = JobReport { is_provision: true, ..report("a", 4, &[(60, 100, 0, 0)]) };
    assert_eq!(judge_ended_job(&provision), None);
    let late = JobReport { wall_ns: 60 * SECOND, ..report("a", 4, &[(9, 1000, 0, 1)]) };
    for (report, why) in [
        (report("a", 4, &[(9, 1000, 0, 1)]), "it ran for less than 10 s"),
        (late, "its use of CPUs was measured for less than 10 s"),
        (report("a", 4, &[(60, 0, 0, 0)]), "it used no CPU time"),
        (report("a", 0, &[(60, 1000, 0, 1)]), "it held no cores"),
        (provision, "it was a provision, whose cores may be idle"),
    ] {
        assert_eq!(why_not_judged(&report), Some(why));
    }
    assert_eq!(why_not_judged(&report("a", 4, &[(60, 3900, 0, 4)])), None);
}

#[test]
fn the_summary_has_the_figures_the_word_and_the_remedy() {
    let bad = report("slurm:1", 16, &[(120, 3100, 0, 4)]);
    assert_eq!(
        ended_job_summary(&bad, judge_ended_job(&bad).as_ref()),
        "serial: ran for 120 s and used 372 s of CPU time, 3.1 of 16 cores on average. Of 16 cores 3.1 were used: ask for \
         `--cpus-per-task=4`"
    );
    let short = report("a", 1, &[(2, 1000, 0, 1)]);
    assert_eq!(
        ended_job_summary(&short, judge_ended_job(&short).as_ref()),
        "ran for 2.0 s and used 2.0 s of CPU time, 1.0 of 1 core on average"
    );
}

#[test]
fn the_times_in_a_summary_are_rounded_as_in_the_report() {
    let short = report("a", 1, &[(2, 1000, 0, 1)]);
    let usage = JobUsage { cpu_ns: 149_600_000, ..short.usage };
    let rounded = JobReport { wall_ns: 2_250_000_000, usage, ..short };
    let text = ended_job_summary(&rounded, None);
    assert!(text.starts_with("ran for 2.3 s and used 0.2 s of CPU time, "), "{text}");
    let longer = JobReport { wall_ns: 22_184_000_000, ..rounded };
    let text = ended_job_summary(&longer, None);
    assert!(text.starts_with("ran for 22.2 s and "), "{text}");
}

/// The report on a job that ran for so many seconds without a core, and then on one core. It used half a PU first, and
/// then so many permille of one.
fn report_after_wait(waited: u64, (seconds, used, displaced): (u64, u64, u64)) -> JobReport {
    let cores = u32::from(seconds > 0);
    let held = report("a", cores, &[(seconds, used, displaced, 1)]);
    let mut usage = held.usage;
    let waiting = UsageSample { length_ns: SECOND, cpu_ns: SECOND / 2, ..UsageSample::default() };
    (0..waited).for_each(|_| usage.add_sample(&waiting));
    usage.cpu_ns += waited * SECOND / 2;
    JobReport { wall_ns: usage.sampled_ns, usage, ..held }
}

#[test]
fn a_job_that_waited_for_cores_is_judged_by_its_time_on_cores() {
    let report = report_after_wait(15, (20, 1000, 0));
    assert_eq!((report.mean_used_pus_permille(), report.mean_held_cores_permille()), (1000, 1000));
    assert_eq!(report.time_with_pus_ns(), 20 * SECOND);
    assert_eq!(judged(&report), ("fine", String::new()));
    assert_eq!(
        ended_job_summary(&report, judge_ended_job(&report).as_ref()),
        "fine: ran for 35.0 s, 15.0 s of it without a core, and used 27.5 s of CPU time, 1.0 of 1 core on average"
    );
    let displaced = report_after_wait(100, (20, 500, 500));
    let (word, advice) = judged(&displaced);
    assert_eq!(word, "waiting", "a sixth of all time, and all of the time on cores");
    assert!(advice.starts_with("For 20.0 s of 20.0 s threads waited for cores"), "{advice}");
}

#[test]
fn a_job_that_held_cores_for_a_short_time_has_no_verdict_and_one_without_cores_no_mean() {
    let short = report_after_wait(15, (7, 500, 500));
    assert_eq!(why_not_judged(&short), Some("it held cores for less than 10 s"));
    assert_eq!(judge_ended_job(&short), None);
    let never = report_after_wait(14, (0, 0, 0));
    assert_eq!(why_not_judged(&never), Some("it held no cores"));
    assert_eq!((never.mean_used_pus_permille(), never.time_by_used_pus()), (0, Vec::new()));
    assert_eq!(ended_job_summary(&never, None), "ran for 14.0 s without a core and used 7.0 s of CPU time");
}
