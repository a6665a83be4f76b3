//! The report of a job that has ended, as it is sent, stored and printed as JSON.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The report of a job that has ended: how long the job ran, and how it used its cores and its memory. The daemon
/// sends such reports as the reply to the call `GetReports`. The field names are part of the public JSON format.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// The id of the job, such as `slurm:7`. Several reports may have the same id.
    pub id: String,
    /// The user id of the owner.
    pub owner: u32,
    /// The CPUs that the job held last, as a CPU list such as `0-3,8`. Empty if it never held any.
    pub cpus: String,
    /// The largest number of cores that the job held at one time.
    pub cores: u32,
    /// The time at which pjw detected or created the job, in the format of RFC 3339, in UTC.
    pub started: String,
    /// The time at which the job ended or was released, in the format of RFC 3339, in UTC.
    pub ended: String,
    /// The time from the beginning to the end of the job, in seconds.
    pub wall_s: Thousandths,
    /// The CPU time of all processes of the job, including ended processes, in seconds.
    pub cpu_s: Thousandths,
    /// The time for which runnable threads waited while cores of their own job idled, summed over the threads, in
    /// seconds.
    pub waited_s: Thousandths,
    /// The time for which the job held no core, in seconds, for example because it waited for cores or was frozen. 0 in
    /// a report of an older pjwd.
    #[serde(default)]
    pub without_cores_s: Thousandths,
    /// The CPU time that the processes of the job used while it held no core, in seconds. 0 in a report of an older
    /// pjwd.
    #[serde(default)]
    pub without_cores_cpu_s: Thousandths,
    /// The mean number of cores that the job held while it held any. 0 in a report of an older pjwd.
    #[serde(default)]
    pub cores_held_mean: Thousandths,
    /// The mean number of CPUs (hardware threads) that the job held while it held any. 0 in a report of an older pjwd.
    #[serde(default)]
    pub cpus_held_mean: Thousandths,
    /// The mean number of CPUs that the job used while it held cores.
    pub cores_used_mean: Thousandths,
    /// The 95th percentile of the number of CPUs that the job used while it held cores: it used more CPUs for at most
    /// 5 % of this time.
    pub cores_used_p95: Thousandths,
    /// The time for which the job used each number of CPUs while it held cores, in ascending order of the numbers. At
    /// most 18 entries. Empty in a report of an older version of pjwd.
    #[serde(default)]
    pub use_levels: Vec<UseLevel>,
    /// The largest number of hot threads: threads that ran or waited for a CPU most of the time.
    pub threads_max: u32,
    /// The mean number of hot threads (threads that ran or waited for a CPU most of the time) while the job held cores.
    /// 0 in a report of an older version of pjwd.
    #[serde(default)]
    pub threads_mean: Thousandths,
    /// The total length of the serial phases, in seconds. In a serial phase, a job with two or more cores runs only one
    /// thread for at least 10 s.
    pub serial_s: Thousandths,
    /// The number of serial phases. 0 in a report of an older version of pjwd.
    #[serde(default)]
    pub serial_phases: u32,
    /// The length of the longest serial phase, in seconds. 0 in a report of an older version of pjwd.
    #[serde(default)]
    pub serial_longest_s: Thousandths,
    /// The number of repairs by pjw. Most repairs restore an affinity mask, a cpuset or the cgroup of a process that
    /// another program had changed. A few give other CPUs to threads that their program had bound to overloaded CPUs.
    pub repairs: u32,
    /// The number of attempts by programs of the job to leave the cores of the job.
    pub violations: u32,
    /// The largest memory use of the job, in bytes. `None` if the memory use was not measured. `memory_peak_source`
    /// names the method.
    pub memory_peak: Option<u64>,
    /// The method by which `memory_peak` was measured. `None` if the memory use was not measured, or if an older
    /// version of pjwd made the report.
    ///
    /// - `cgroup`: the largest memory use of the job's cgroup, as the kernel recorded it.
    /// - `smaps`: the largest sum of the proportional set sizes (PSS) of the job's processes in one measurement. The
    ///   job may have used more memory between two measurements.
    /// - `rss`: the largest sum of the resident set sizes (RSS) in one measurement. A shared page counts several times.
    #[serde(default)]
    pub memory_peak_source: Option<String>,
    /// The memory limit of the job's cgroup, in bytes. A batch system sets this limit to the memory that the job
    /// requested. `None` if the cgroup has no limit, or if an older version of pjwd made the report.
    #[serde(default)]
    pub memory_limit: Option<u64>,
    /// The share of the job's memory that several processes map, in permille. The value is the last exact one, or the
    /// last estimate if there is no exact one. `None` if this share was never measured.
    pub shared_permille: Option<u32>,
    /// The method by which `shared_permille` was measured. `smaps`: exact, as a share of the sum of the resident set
    /// sizes. `cgroup`: an estimate, as a share of the anonymous memory. `None` if `shared_permille` is `None`.
    #[serde(default)]
    pub shared_source: Option<String>,
    /// The verdict (how well the job used its cores):
    ///
    /// - `serial`: fewer threads ran than the job had cores.
    /// - `oversubscribed`: more threads wanted to run than the job had CPUs.
    /// - `bound`: threads waited although cores of the job were idle, because their program had bound them to other
    ///   cores.
    /// - `waiting`: the threads waited for something other than a core, or for other programs on the cores of the job.
    /// - `fine`: the job used its cores.
    ///
    /// `None` if pjw gave no verdict. Examples are a job that ran or held cores for less than 10 s, and a provision
    /// (cores that pjw keeps for a service, which may be idle).
    pub verdict: Option<String>,
    /// The reason why `verdict` is `None`, as a part of a sentence. `None` if the report has a verdict, or if an older
    /// version of pjwd made the report.
    #[serde(default)]
    pub no_verdict: Option<String>,
    /// One sentence for each problem of the job, with its remedy. Empty if the job had no problem.
    pub advice: Vec<String>,
    /// One sentence with the reason why the values of this report are incomplete. `None` if all values are complete.
    #[serde(default)]
    pub incomplete: Option<String>,
}

/// The total time for which a job used a certain number of CPUs. For example, the job used 3 CPUs for 120 s in total.
/// The report of a job ([`Report`]) contains a list of these values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct UseLevel {
    /// The number of CPUs. The number is rounded to whole CPUs if the job has up to 16 CPUs. In a larger job, it is
    /// rounded to a sixteenth of the CPUs of the job.
    pub cpus: u32,
    /// The total time for which the job used this number of CPUs, in seconds.
    pub seconds: Thousandths,
}

/// A number with three decimal places, stored as the number of thousandths. For example, `Thousandths(12345)` is
/// 12.345, and its JSON is the number `12.345`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Thousandths(pub u64);

impl Serialize for Thousandths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Exact up to 2^53 thousandths.
        #[allow(clippy::cast_precision_loss)]
        serializer.serialize_f64(self.0 as f64 / 1000.0)
    }
}

impl<'de> Deserialize<'de> for Thousandths {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let thousandths = (f64::deserialize(deserializer)? * 1000.0).round();
        if !(0.0..=9e15).contains(&thousandths) {
            return Err(serde::de::Error::custom("a number from 0 to 9e12 was expected"));
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        Ok(Self(thousandths as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousandths_are_json_numbers_and_read_back_exactly() {
        for thousandths in [0, 1, 12_345, 100_000, 86_400_000 * 365] {
            let text = serde_json::to_string(&Thousandths(thousandths)).unwrap();
            assert_eq!(
                serde_json::from_str::<Thousandths>(&text).unwrap(),
                Thousandths(thousandths),
                "{text}"
            );
        }
        assert_eq!(serde_json::to_string(&Thousandths(12_345)).unwrap(), "12.345");
        for wrong in ["-1", "1e30", "\"1\"", "null"] {
            assert!(serde_json::from_str::<Thousandths>(wrong).is_err(), "{wrong}");
        }
    }
}
