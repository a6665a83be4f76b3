//! `explain`: the reasons, one sentence for each.

use std::collections::BTreeMap;

use pjw_ipc::call::{ExplainJobReply, ExplainPidReply};
use pjw_ipc::wire::Thread;

use super::text::{count_with_noun, cpus_phrase, escape_control_characters, wrap_text};
use super::{Terminal, show, style};

/// Returns the text of `pjwctl explain JOB`: the CPUs of the job, why pjwd chose these CPUs, and the second-best
/// choice of CPUs.
#[must_use]
pub fn grant_explanation_text(reasons: &ExplainJobReply, term: Terminal) -> String {
    let holds = cpus_phrase(&reasons.cpus, usize::MAX);
    let mut text = title(&reasons.job, &format!(": {holds}"), term) + &bullets(&reasons.grant_reasons, term);
    if !reasons.second_best.is_empty() {
        text += &wrap_text(&format!("runner-up: {}", reasons.second_best), term.width, "- ", "  ");
    }
    text
}

/// Returns the text of `pjwctl explain PID`: why the process belongs to its job, and why each of its threads has its
/// affinity mask. Threads with the same reason are listed in one sentence.
#[must_use]
pub fn process_reasons_text(reasons: &ExplainPidReply, term: Terminal) -> String {
    let job = reasons
        .job
        .as_ref()
        .map_or(": in no job".to_owned(), |job| format!(": in {}", escape_control_characters(job)));
    let mut text =
        title(&format!("process {}", reasons.pid), &job, term) + &bullets(&reasons.membership_reasons, term);
    if !reasons.threads.is_empty() {
        text += "\n";
        text += &show::threads_table(&reasons.threads, term);
        text += &reasons_of_threads(&reasons.threads, term);
    }
    text
}

/// Returns a line with `subject` in the style of a heading, and `text` after it.
fn title(subject: &str, text: &str, term: Terminal) -> String {
    format!(
        "{}{}\n",
        style::apply_style(&escape_control_characters(subject), style::HEADING, term),
        escape_control_characters(text)
    )
}

/// Returns a list with one entry for each sentence.
fn bullets(sentences: &[String], term: Terminal) -> String {
    sentences.iter().map(|sentence| wrap_text(sentence, term.width, "- ", "  ")).collect()
}

/// Returns the reasons for the affinity masks of `threads` as a list. Threads with the same reason are one entry: a
/// single thread with its id, several threads as their number and the first id. Threads without a reason are left
/// out.
fn reasons_of_threads(threads: &[Thread], term: Terminal) -> String {
    let mut by_reason: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for thread in threads.iter().filter(|thread| !thread.because.is_empty()) {
        by_reason.entry(&thread.because).or_default().push(thread.tid);
    }
    let mut reasons: Vec<(&str, Vec<u32>)> = by_reason.into_iter().collect();
    reasons.sort_by_key(|(_, tids)| tids.first().copied());
    let sentence = |(reason, tids): &(&str, Vec<u32>)| {
        let who = match tids.as_slice() {
            [tid] => format!("thread {tid}"),
            [first, ..] => {
                format!("{} ({first}, …)", count_with_noun(tids.len() as u64, "thread", "threads"))
            }
            [] => String::new(),
        };
        wrap_text(&format!("{who}: {reason}"), term.width, "- ", "  ")
    };
    reasons.iter().map(sentence).collect()
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::samples;
    use super::*;

    #[test]
    fn a_job_is_explained_with_the_second_best_choice() {
        let reasons = ExplainJobReply {
            job: "manual:a".into(),
            cpus: "2-3".into(),
            grant_reasons: vec![
                "manual:a holds CPUs 2-3, granted by pjwd".into(),
                "L3#0 is the smallest part of the machine that holds 2 cores, and the choice that leaves \
                 the largest hole whole"
                    .into(),
            ],
            second_best: "8-9 in L3#1".into(),
        };
        assert_snapshot!(grant_explanation_text(&reasons, samples::PLAIN_TERMINAL), @r"
        manual:a: CPUs 2-3
        - manual:a holds CPUs 2-3, granted by pjwd
        - L3#0 is the smallest part of the machine that holds 2 cores, and the choice
          that leaves the largest hole whole
        - runner-up: 8-9 in L3#1
        ");
    }

    #[test]
    fn threads_with_the_same_reason_share_a_sentence() {
        let reasons = ExplainPidReply {
            pid: 100,
            job: Some("manual:a".into()),
            membership_reasons: vec!["it was registered".into()],
            threads: samples::threads(),
            last_tid: None,
        };
        assert_snapshot!(process_reasons_text(&reasons, samples::PLAIN_TERMINAL), @r"
        process 100: in manual:a
        - it was registered

               tid st  demand   cpu  allowed CPUs      name
               100 R    99.8%     3  3 (pinned)        solver
               101 S     0.3%     2  2-3               io
               102 S     0.3%     2  2-3               evil\u{1b}[2J\nname
        - thread 100: it wants a CPU 99.8% of the time: one of 2 hot threads on 2 cores
        - 2 threads (101, …): it sleeps most of the time and floats on its job's cores
        ");
    }

    #[test]
    fn a_process_of_no_job_is_explained_too() {
        let membership_reasons = vec!["no command registered process 1".into()];
        let reasons =
            ExplainPidReply { pid: 1, job: None, membership_reasons, threads: Vec::new(), last_tid: None };
        assert_snapshot!(process_reasons_text(&reasons, samples::PLAIN_TERMINAL), @r"
        process 1: in no job
        - no command registered process 1
        ");
    }
}
