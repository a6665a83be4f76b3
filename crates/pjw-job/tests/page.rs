//! The page of a core map with a writer and readers, in real files and mappings.

#![allow(clippy::unwrap_used)] // a test may fail

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pjw_core::cpuset::{CpuSet, Pu};
use pjw_job::layout::{COREMAP_BYTES, CoreMapContent};
use pjw_job::{CORE_MAP_FILE_NAME, CoreMapError, CoreMapReader, CoreMapWriter, CoresSource, Job, WantError};

/// A temporary directory of a job.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn page(&self) -> PathBuf {
        self.path().join(CORE_MAP_FILE_NAME)
    }

    fn create(&self, content: &CoreMapContent) -> CoreMapWriter {
        CoreMapWriter::create(&self.page(), &self.path().join("temporary"), content).unwrap()
    }
}

/// A content in which every field follows from the epoch.
fn content(epoch: u64) -> CoreMapContent {
    let cpu = u32::try_from(epoch % 200).unwrap();
    let range = |first: u32| CpuSet::from_range(Pu(first), Pu(first + cpu));
    CoreMapContent {
        epoch,
        is_live: true,
        is_truncated: false,
        own: range(0),
        borrowed: range(200),
        leaving: range(300),
        lent: range(400),
        leaving_at_ns: Some(epoch * 3),
        core_count: cpu,
    }
}

#[test]
fn a_reader_never_reads_parts_of_two_maps() {
    const READS: u64 = 10_000_000;
    const CHANGES: u64 = 100_000;
    // The number of changes that the reader must see, so that it reads while the writer writes.
    const MIN_CHANGES_SEEN: u64 = 1000;
    let directory = Directory::new();
    let mut writer = directory.create(&content(1));
    let reader = CoreMapReader::open(&directory.page()).unwrap();
    let is_written = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let (mut reads, mut seen, mut expected) = (0_u64, 0_u64, content(1));
            while reads < READS || seen < MIN_CHANGES_SEEN || !is_written.load(Ordering::Relaxed) {
                let read = match reader.read() {
                    Ok(read) => read,
                    // On a busy machine, the writer may lose its PU for long in the middle of a change.
                    Err(CoreMapError::Unfinished) => continue,
                    Err(error) => panic!("{error}"),
                };
                if read.epoch != expected.epoch {
                    assert!(read.epoch > expected.epoch, "the epoch went back");
                    (expected, seen) = (content(read.epoch), seen + 1);
                }
                assert_eq!(read, expected, "read {reads}");
                reads += 1;
            }
        });
        // The changes go on until the reader has read enough.
        let mut epoch = 1;
        while epoch <= CHANGES || !reading.is_finished() {
            epoch += 1;
            writer.write(&content(epoch)).unwrap();
            is_written.store(epoch > CHANGES, Ordering::Relaxed);
        }
        reading.join().unwrap();
        epoch
    });
    assert_eq!(reader.read().unwrap(), content(last));
}

#[test]
fn the_next_change_wakes_a_waiting_reader() {
    let directory = Directory::new();
    let mut writer = directory.create(&content(1));
    let job = Job::in_directory(directory.path());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| job.wait_for_change(1, None).unwrap());
        // The reader sees the change whether it is before or during the wait.
        writer.write(&content(2)).unwrap();
        assert_eq!(waiting.join().unwrap().epoch, 2);
    });
    assert_eq!(job.wait_for_change(1, None).unwrap().epoch, 2, "a change before the wait counts");
    assert_eq!(
        job.wait_for_change(2, Some(Duration::from_millis(1))),
        None,
        "the time passes without a change"
    );
}

#[test]
fn a_program_without_a_core_map_has_the_cores_of_its_mask() {
    let directory = Directory::new();
    let job = Job::in_directory(directory.path());
    let cores = job.cores();
    assert_eq!((cores.epoch, cores.source), (0, CoresSource::AffinityMask));
    assert!(!cores.cpus.is_empty() && cores.own == cores.cpus && cores.borrowed.is_empty());
    assert_eq!(job.wait_for_change(0, Some(Duration::from_millis(1))), None);
    assert!(
        matches!(job.set_wanted_cores(1), Err(WantError::NoJob)),
        "there is no job whose daemon could read the number"
    );
    assert!(job.has_cpu(cores.cpus.first().unwrap()));
    let _writer = directory.create(&content(5));
    let found = job.wait_for_change(0, None).unwrap();
    assert_eq!(
        (found.epoch, found.source),
        (5, CoresSource::CoreMap),
        "a map that is published later is used"
    );
}

#[test]
fn the_end_of_the_job_wakes_a_waiting_reader_which_gets_the_cores_of_its_mask() {
    let directory = Directory::new();
    let writer = directory.create(&content(1));
    let job = Job::in_directory(directory.path());
    assert_eq!(job.cores().source, CoresSource::CoreMap);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| job.wait_for_change(1, None).unwrap());
        std::fs::remove_file(directory.page()).unwrap();
        writer.mark_not_live().unwrap();
        assert_eq!(waiting.join().unwrap().source, CoresSource::AffinityMask);
    });
    assert_eq!(job.cores().source, CoresSource::AffinityMask);
}

#[test]
fn readers_of_an_old_page_find_the_page_that_replaced_it() {
    let directory = Directory::new();
    let old = directory.create(&content(7));
    let job = Job::in_directory(directory.path());
    assert_eq!(job.cores().epoch, 7);
    let _new = directory.create(&content(8));
    old.mark_not_live().unwrap();
    assert_eq!(job.cores().epoch, 8);
}

#[test]
fn a_page_that_has_ended_is_empty_also_if_its_file_is_gone_or_its_last_write_is_unfinished() {
    for sequence in [2, 3] {
        let directory = Directory::new();
        let writer = directory.create(&content(7));
        let reader = CoreMapReader::open(&directory.page()).unwrap();
        set_sequence(&directory, sequence);
        std::fs::remove_file(directory.page()).unwrap();
        writer.mark_not_live().unwrap();
        assert_eq!(reader.read().unwrap(), CoreMapContent { epoch: 8, ..CoreMapContent::default() });
        assert_eq!(reader.has_cpu(Pu(0)), None);
    }
}

/// Returns how many descriptors of this process belong to files in `directory`.
fn open_files_in(directory: &Path) -> usize {
    let directory = directory.canonicalize().unwrap();
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok());
    targets.filter(|target| target.starts_with(&directory)).count()
}

#[test]
fn a_writer_keeps_no_descriptor_of_its_file() {
    let directory = Directory::new();
    let file = File::create(directory.path().join("other")).unwrap();
    assert_eq!(open_files_in(directory.path()), 1, "an open file is found");
    drop(file);
    let mut first = directory.create(&content(1));
    first.write(&content(2)).unwrap();
    let mut second = CoreMapWriter::open(&directory.page()).unwrap().unwrap();
    second.write(&content(3)).unwrap();
    assert_eq!(open_files_in(directory.path()), 0);
}

#[test]
fn a_writer_writes_no_file_that_replaced_its_own() {
    let directory = Directory::new();
    let mut first = directory.create(&content(1));
    let _second = directory.create(&content(2));
    assert!(first.write(&content(3)).is_err());
    let reader = CoreMapReader::open(&directory.page()).unwrap();
    assert_eq!(reader.read().unwrap(), content(2));
    std::fs::remove_file(directory.page()).unwrap();
    assert!(first.write(&content(3)).is_err() && !directory.page().exists());
}

#[test]
fn a_page_that_a_killed_writer_left_unfinished_is_finished_by_the_next_one() {
    let directory = Directory::new();
    drop(directory.create(&content(4)));
    let file = OpenOptions::new().write(true).open(directory.page()).unwrap();
    file.write_all_at(&1_u32.to_ne_bytes(), 16).unwrap();
    let reader = CoreMapReader::open(&directory.page()).unwrap();
    assert!(matches!(reader.read(), Err(CoreMapError::Unfinished)), "a reader does not wait for ever");
    assert_eq!(reader.has_cpu(Pu(0)), None);
    let mut writer = CoreMapWriter::open(&directory.page()).unwrap().unwrap();
    assert_eq!(writer.content().epoch, 4);
    writer.write(&content(5)).unwrap();
    assert_eq!(reader.read().unwrap(), content(5), "the mapping of the reader is still the page");
}

/// Sets the sequence counter of the page. An odd number says that a write is not complete.
fn set_sequence(directory: &Directory, sequence: u32) {
    let file = OpenOptions::new().write(true).open(directory.page()).unwrap();
    file.write_all_at(&sequence.to_ne_bytes(), 16).unwrap();
}

#[test]
fn a_program_keeps_the_cores_that_it_read_last_while_the_page_is_unfinished() {
    let directory = Directory::new();
    let first = directory.create(&content(4));
    let job = Job::in_directory(directory.path());
    assert_eq!(job.cores().epoch, 4);
    set_sequence(&directory, 1);
    let cores = job.cores();
    assert_eq!((cores.epoch, cores.source, cores.own), (4, CoresSource::CoreMap, content(4).own));
    assert!(job.has_cpu(Pu(204)) && !job.has_cpu(Pu(205)));
    assert_eq!(job.wait_for_change(4, Some(Duration::from_millis(1))), None, "nothing has changed");
    let without_reading = Job::in_directory(directory.path());
    assert_eq!(without_reading.cores().source, CoresSource::AffinityMask);
    set_sequence(&directory, 2);
    // The new page is unfinished too, so that no reading tells that the old one has ended.
    let second = directory.create(&content(5));
    set_sequence(&directory, 1);
    first.mark_not_live().unwrap();
    assert_eq!(job.cores().epoch, 4);
    std::fs::remove_file(directory.page()).unwrap();
    assert_eq!(job.cores().source, CoresSource::AffinityMask, "the job has ended");
    drop(second);
    let mut third = directory.create(&content(6));
    assert_eq!(job.wait_for_change(4, None).unwrap().epoch, 6);
    third.write(&content(7)).unwrap();
    assert_eq!(job.wait_for_change(6, None).unwrap().epoch, 7);
    set_sequence(&directory, 1);
    assert_eq!(job.cores().epoch, 7, "the content after the last change was read");
}

#[test]
fn a_truncated_page_is_an_error_of_the_writer_and_does_not_end_its_process() {
    let directory = Directory::new();
    let mut writer = directory.create(&content(1));
    File::options().write(true).open(directory.page()).unwrap().set_len(0).unwrap();
    assert!(writer.write(&content(2)).is_err());
    drop(writer);
    assert!(CoreMapWriter::open(&directory.page()).unwrap().is_none());
    assert!(matches!(CoreMapReader::open(&directory.page()), Err(CoreMapError::Unknown { .. })));
}

#[test]
fn links_and_foreign_files_are_neither_read_nor_written() {
    let directory = Directory::new();
    let target = directory.path().join("target");
    let page = content(1).encode(0);
    std::fs::write(&target, page).unwrap();
    symlink(&target, directory.page()).unwrap();
    assert!(CoreMapWriter::open(&directory.page()).unwrap().is_none(), "a symbolic link");
    assert!(CoreMapReader::open(&directory.page()).is_err());
    std::fs::remove_file(directory.page()).unwrap();
    std::fs::hard_link(&target, directory.page()).unwrap();
    assert!(CoreMapWriter::open(&directory.page()).unwrap().is_none(), "a file with a second hard link");
    let _writer = directory.create(&content(2));
    assert_eq!(std::fs::read(&target).unwrap(), page, "a file at the path is replaced and not written");
    let mut unknown = page;
    unknown[8] = 9;
    for (bytes, what) in [
        (&unknown[..], "a later version"),
        (&page[..100], "a short file"),
        (&[0; COREMAP_BYTES][..], "zeros"),
    ] {
        std::fs::remove_file(directory.page()).unwrap();
        std::fs::write(directory.page(), bytes).unwrap();
        assert!(CoreMapWriter::open(&directory.page()).unwrap().is_none(), "{what}");
        assert!(
            matches!(CoreMapReader::open(&directory.page()), Err(CoreMapError::Unknown { .. })),
            "{what}"
        );
    }
}

#[test]
fn a_reader_looks_up_one_cpu_without_a_copy_of_the_map() {
    let directory = Directory::new();
    let mut writer = directory.create(&content(10));
    let reader = CoreMapReader::open(&directory.page()).unwrap();
    let has = |cpu: u32| reader.has_cpu(Pu(cpu));
    assert_eq!((has(10), has(11), has(210), has(305)), (Some(true), Some(false), Some(true), Some(false)));
    writer.write(&content(11)).unwrap();
    assert_eq!(has(11), Some(true));
    assert_eq!(has(9000), None, "the sets have no such CPU");
}

#[test]
fn the_recommended_number_of_threads_excludes_leaving_cpus_and_is_never_zero() {
    let directory = Directory::new();
    let set = |list: &str| list.parse::<CpuSet>().unwrap();
    let with_leaving_cpu =
        CoreMapContent { borrowed: set("2-3"), leaving: set("3"), own: set("0-1"), ..content(1) };
    let mut writer = directory.create(&with_leaving_cpu);
    let job = Job::in_directory(directory.path());
    assert_eq!((job.cores().recommended_thread_count(), job.cores().cpus), (3, set("0-3")));
    let without_cpus = CoreMapContent { own: set(""), borrowed: set(""), leaving: set(""), ..content(2) };
    writer.write(&without_cpus).unwrap();
    assert_eq!(job.cores().recommended_thread_count(), 1);
}

#[test]
fn a_wait_without_a_daemon_ends_when_its_time_has_passed() {
    let directory = Directory::new();
    let job = Job::in_directory(&directory.path().join("none"));
    let begun = Instant::now();
    assert_eq!(job.wait_for_change(0, Some(Duration::from_millis(20))), None);
    assert!(begun.elapsed() >= Duration::from_millis(20));
}
