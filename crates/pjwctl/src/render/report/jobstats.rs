//! The summary of a job as jobstats (Princeton University) stores it in Slurm's field AdminComment: `JS1:` and the
//! base64 form of gzipped JSON, or `JS1:Short` for a job that was too short to measure. reportseff and jobstats read
//! this.
//!
//! The gzip member holds the JSON uncompressed (RFC 1951, 3.2.4): it is about 150 bytes long, and every reader takes
//! it.

use pjw_core::cpuset::CpuSet;
use pjw_ipc::report::{Report, Thousandths};
use serde_json::json;

/// jobstats gives no summary of a job of less than this time, in thousandths of a second.
const MIN_WALL: u64 = 60_000;

/// Returns a summary of how an ended job used this node, in the format in which the tool jobstats stores summaries in
/// Slurm's field AdminComment. For a job of less than a minute, the text says only that the job was short.
/// `host_name` is the host name of the node. The text also contains the total memory that the job could use, in bytes.
/// This is the memory limit in `report`. If the job had no memory limit, it is `total_memory_bytes`, which must be the
/// memory of the node.
#[must_use]
pub fn jobstats_line(report: &Report, host_name: &str, total_memory_bytes: u64) -> String {
    if report.wall_s.0 < MIN_WALL {
        return "JS1:Short\n".to_owned();
    }
    let node = json!({
        "cpus": ((mean_pus_over_run(report) + 500) / 1000).max(u64::from(report.cores > 0)),
        "total_time": report.cpu_s,
        "used_memory": exact_memory_peak(report).unwrap_or(0),
        "total_memory": report.memory_limit.unwrap_or(total_memory_bytes),
    });
    let short_name = host_name.split('.').next().unwrap_or(host_name);
    let summary = json!({ "gpus": 0, "nodes": { short_name: node }, "total_time": report.wall_s.0 / 1000 });
    format!("JS1:{}\n", base64(&gzip(summary.to_string().as_bytes())))
}

/// Returns the largest memory use of the job. `None` if it is unknown, or if it is a sum of resident sizes: this sum
/// counts a page once for each process that shares it, so it can be many times the memory of the job.
fn exact_memory_peak(report: &Report) -> Option<u64> {
    report.memory_peak.filter(|_| report.memory_peak_source.as_deref() != Some("rss"))
}

/// Returns the mean number of PUs (logical CPUs) that the job held over its whole run time, in thousandths. A reader
/// multiplies the number by the run time, and compares the product with the CPU time.
fn mean_pus_over_run(report: &Report) -> u64 {
    let held = u128::from(held_pus(report).0) * u128::from(time_with_cores(report).0);
    u64::try_from(held / u128::from(report.wall_s.0.max(1))).unwrap_or(u64::MAX)
}

/// Returns the time for which the job held cores.
pub(super) fn time_with_cores(report: &Report) -> Thousandths {
    Thousandths(report.wall_s.0.saturating_sub(report.without_cores_s.0))
}

/// Returns the mean number of PUs (logical CPUs) that the job held while it held cores, in thousandths. If `report`
/// does not contain the mean, returns the number of PUs that the job held last, but at least the number of its cores.
pub(super) fn held_pus(report: &Report) -> Thousandths {
    if report.cpus_held_mean.0 > 0 {
        return report.cpus_held_mean;
    }
    let pus = report.cpus.parse::<CpuSet>().map_or(0, |cpus| cpus.len());
    let pus = u64::try_from(pus).unwrap_or(u64::MAX).max(u64::from(report.cores));
    Thousandths(pus.saturating_mul(1000))
}

/// Returns a gzip member (RFC 1952) that contains `bytes` in stored blocks, which are not compressed.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    // Magic number, method deflate, no flags, no time, no extra flags, unknown system.
    let mut member = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    let blocks = bytes.chunks(usize::from(u16::MAX));
    let last = blocks.len().saturating_sub(1);
    for (n, block) in blocks.enumerate() {
        let length = u16::try_from(block.len()).unwrap_or(u16::MAX);
        member.push(u8::from(n == last));
        member.extend(length.to_le_bytes());
        member.extend((!length).to_le_bytes());
        member.extend(block);
    }
    member.extend(crc32(bytes).to_le_bytes());
    member.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
    member
}

/// The checksum of RFC 1952, section 8.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

/// Returns `bytes` as base64 text with padding (RFC 4648).
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let byte = |n: usize| u32::from(group.get(n).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for n in 0..4 {
            let index = (bits >> (18 - 6 * n)) as usize & 63;
            text.push(if n <= group.len() { char::from(ALPHABET[index]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use serde_json::Value;

    use super::*;

    #[test]
    fn base64_and_crc32_have_the_values_of_their_standards() {
        let forms = ["", "f", "fo", "foo", "foob", "fooba", "foobar"].map(|text| base64(text.as_bytes()));
        assert_eq!(
            forms,
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"],
            "RFC 4648, section 10"
        );
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn a_job_of_less_than_a_minute_is_short() {
        let report = Report { wall_s: Thousandths(59_999), ..Report::default() };
        assert_eq!(jobstats_line(&report, "n1", 1), "JS1:Short\n");
    }

    #[test]
    fn gzip_and_base64_read_the_line_back() {
        let report = Report {
            cores: 4,
            cpu_s: Thousandths(123_456),
            wall_s: Thousandths(61_900),
            memory_peak: Some(4096),
            ..Report::default()
        };
        assert_eq!(summary(&report)["nodes"]["n1"]["cpus"], 4);
        let resized = Report { cpus: "0-3".into(), cpus_held_mean: Thousandths(2510), ..report.clone() };
        assert_eq!(summary(&resized)["nodes"]["n1"]["cpus"], 3, "held on average");
        let node = json!({ "cpus": 4, "total_time": 123.456, "used_memory": 4096, "total_memory": 1 << 30 });
        assert_eq!(summary(&report), json!({ "gpus": 0, "nodes": { "n1": node }, "total_time": 61 }));
        let waited = Report { without_cores_s: Thousandths(30_950), ..report.clone() };
        assert_eq!(summary(&waited)["nodes"]["n1"]["cpus"], 2, "four for half of the time");
        let source = |name: &str| Report { memory_peak_source: Some(name.into()), ..report.clone() };
        let used = |report| summary(&report)["nodes"]["n1"]["used_memory"].clone();
        assert_eq!(["cgroup", "smaps", "rss"].map(|name| used(source(name))), [4096, 4096, 0]);
        let limited = Report { memory_limit: Some(8192), ..report };
        assert_eq!(summary(&limited)["nodes"]["n1"]["total_memory"], 8192);
    }

    /// The summary in the line, as other programs decode it.
    fn summary(report: &Report) -> Value {
        let line = jobstats_line(report, "n1.cluster", 1 << 30);
        let text = line.trim_end().strip_prefix("JS1:").unwrap();
        let mut shell = Command::new("sh")
            .args(["-c", "base64 -d | gzip -dc"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = shell.wait_with_output().unwrap();
        assert!(output.status.success());
        serde_json::from_slice(&output.stdout).unwrap()
    }
}
