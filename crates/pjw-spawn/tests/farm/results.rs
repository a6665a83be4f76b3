//! Results: each is delivered once, in order of the items or of completion.

use std::collections::BTreeSet;
use std::time::Duration;

use pjw_spawn::farm::{ItemResult, NextResult, Outcome, WorkerCpus};

use super::{bytes_of, compute, farm};

#[test]
fn each_result_is_delivered_once_in_the_order_of_completion() {
    for (workers, chunk) in [(1, 1), (3, 1), (3, 16)] {
        let farm = farm(workers).chunk(chunk).ring_bytes(4096);
        let running = farm.start(2000, |item, result| {
            result.extend_from_slice(&bytes_of(item.number));
            Ok(())
        });
        let mut numbers = BTreeSet::new();
        for result in running.unwrap() {
            let ItemResult { number, outcome } = result.unwrap();
            assert_eq!(outcome, Outcome::Done(bytes_of(number)));
            assert!(numbers.insert(number), "item {number} was delivered twice");
        }
        assert_eq!(numbers, (0..2000).collect());
    }
}

#[test]
fn a_farm_in_order_delivers_results_in_order_although_early_items_take_longer() {
    let farm = farm(3).in_order().window(16);
    let running = farm.start(300, |item, result| {
        compute(Duration::from_micros(if item.number % 16 == 0 { 1000 } else { 20 }));
        result.extend_from_slice(&item.number.to_ne_bytes());
        Ok(())
    });
    let results: Vec<ItemResult> = running.unwrap().collect::<Result<_, _>>().unwrap();
    for (number, result) in (0..300_u64).zip(&results) {
        assert_eq!(*result, ItemResult { number, outcome: Outcome::Done(number.to_ne_bytes().to_vec()) });
    }
    assert_eq!(results.len(), 300);
}

#[test]
fn a_result_may_be_larger_than_the_shared_memory() {
    let running = farm(2).ring_bytes(4096).start(5, |item, result| {
        result.resize(1_000_000 + usize::try_from(item.number).unwrap(), 7);
        Ok(())
    });
    let mut lengths = BTreeSet::new();
    for result in running.unwrap() {
        let Outcome::Done(bytes) = result.unwrap().outcome else { panic!("it was not computed") };
        assert!(bytes.iter().all(|byte| *byte == 7));
        lengths.insert(bytes.len());
    }
    assert_eq!(lengths, (1_000_000..1_000_005).collect());
}

#[test]
fn an_error_of_the_work_function_is_delivered_with_its_code_and_its_bytes() {
    let running = farm(2).start(10, |item, result| {
        result.push(1);
        if item.number == 4 { Err(-17) } else { Ok(()) }
    });
    let mut running = running.unwrap();
    let failed: Vec<ItemResult> = running
        .by_ref()
        .map(Result::unwrap)
        .filter(|result| !matches!(result.outcome, Outcome::Done(_)))
        .collect();
    assert_eq!(failed, [ItemResult { number: 4, outcome: Outcome::Failed { code: -17, bytes: vec![1] } }]);
    assert_eq!((running.progress().failed, running.progress().delivered), (1, 10));
}

#[test]
fn progress_has_the_total_number_of_items_and_of_delivered_results() {
    let mut running = farm(2).start(100, |_, _| Ok(())).unwrap();
    assert_eq!(running.progress().total, Some(100));
    assert_eq!(running.progress().workers, 2);
    let mut count = 0;
    while let NextResult::Result(_) = running.next_within(None).unwrap() {
        count += 1;
        assert!(running.progress().delivered >= count);
    }
    let progress = running.progress();
    assert_eq!((progress.delivered, progress.failed, progress.workers, progress.replaced), (100, 0, 0, 0));
}

#[test]
fn a_wait_with_a_time_limit_ends_without_a_result_when_the_time_has_passed() {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let mut running =
        farm(1).start(1, |_, _| nix::unistd::read(&reader, &mut [0]).map(drop).map_err(|_| 1)).unwrap();
    assert_eq!(running.next_within(Some(Duration::from_millis(1))).unwrap(), NextResult::TimedOut);
    nix::unistd::write(&writer, &[1]).unwrap();
    // A time that no clock can reach is no limit.
    assert!(matches!(running.next_within(Some(Duration::MAX)).unwrap(), NextResult::Result(_)));
    assert_eq!(running.next_within(None).unwrap(), NextResult::End);
    assert_eq!(running.next_within(None).unwrap(), NextResult::End);
}

#[test]
fn there_are_not_more_workers_than_items_and_none_without_items() {
    let running = farm(8).start(3, |_, _| Ok(())).unwrap();
    assert_eq!(running.worker_pids().len(), 3);
    assert_eq!(running.count(), 3);
    let running = farm(8).start(0, |_, _| Ok(())).unwrap();
    assert!(running.worker_pids().is_empty());
    assert_eq!(running.count(), 0);
}

#[test]
fn each_worker_runs_on_one_pu_of_the_masters_mask() {
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
    let is_allowed = |pu| allowed.is_set(pu).unwrap_or(false);
    let pus: Vec<usize> = (0..nix::sched::CpuSet::count()).filter(|pu| is_allowed(*pu)).collect();
    let workers = u32::try_from(pus.len()).unwrap();
    let farm = farm(workers).cpus(WorkerCpus::OnePuEach);
    let running = farm.start(200, |item, result| {
        let own =
            nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).map_err(|errno| errno as i32)?;
        let own = (0..nix::sched::CpuSet::count()).filter(|pu| own.is_set(*pu).unwrap_or(false));
        result
            .extend(own.flat_map(|pu| [item.worker, u32::try_from(pu).unwrap()]).flat_map(u32::to_ne_bytes));
        compute(Duration::from_micros(100));
        Ok(())
    });
    let mut worker_pus = BTreeSet::new();
    for result in running.unwrap() {
        let Outcome::Done(bytes) = result.unwrap().outcome else { panic!("it was not computed") };
        let numbers: Vec<u32> =
            bytes.chunks(4).map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap())).collect();
        let [worker, pu] = numbers[..] else { panic!("worker and PU: {numbers:?}") };
        assert!(pus.contains(&(pu as usize)));
        worker_pus.insert((worker, pu));
    }
    let distinct: BTreeSet<u32> = worker_pus.iter().map(|(_, pu)| *pu).collect();
    assert_eq!(distinct.len(), worker_pus.len(), "two workers share a PU: {worker_pus:?}");
}
