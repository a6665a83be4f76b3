//! Cgroups of the bench, in a mounted hierarchy: cgroup v1 if it has the controller, else cgroup v2 if its root
//! delegates the controller (`cgroup.subtree_control`). The bench changes nothing else in the hierarchy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use pjw_core::cpuset::CpuSet;
use pjw_linux::cgroup::CgroupMounts;

/// How long the removal of a cgroup is tried: a cgroup holds an ended process until the process is waited for.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A cgroup that a bench has created. Dropping this value removes the cgroup. All processes of the cgroup must have
/// ended by then.
#[derive(Debug)]
pub struct Cgroup {
    dir: PathBuf,
    /// Whether the cgroup is in cgroup v2.
    unified: bool,
}

impl Cgroup {
    /// Makes a cgroup with the controller `controller`, for example `cpu`. `name` becomes a part of its name. Uses
    /// cgroup v1 if a mounted hierarchy has the controller, and otherwise cgroup v2.
    ///
    /// # Errors
    /// If no hierarchy has the controller, or if the cgroup can't be made. The error is the reason why a bench skips a
    /// measurement.
    pub fn new(controller: &str, name: &str) -> anyhow::Result<Self> {
        let mounts = CgroupMounts::read();
        let has = |options: &str| options.split(',').any(|option| option == controller);
        let v1_root = mounts.v1_mounts.iter().find(|(options, _)| has(options)).map(|(_, root)| root.clone());
        let is_delegated = |root: &Path| {
            let text = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
            text.split_ascii_whitespace().any(|name| name == controller)
        };
        let (root, unified) = match (v1_root, mounts.v2_mount_point) {
            (Some(root), _) => (root, false),
            (None, Some(root)) if is_delegated(&root) => (root, true),
            _ => bail!("no cgroup hierarchy here has the {controller} controller"),
        };
        let dir = root.join(format!("pjw_bench_{}_{name}", std::process::id()));
        fs::create_dir(&dir).with_context(|| format!("can't make {}", dir.display()))?;
        Ok(Self { dir, unified })
    }

    /// Returns the name of the cgroup. The cgroup is directly below the root of its hierarchy.
    #[must_use]
    pub fn name(&self) -> String {
        self.dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns the name of the file that contains the CPU weight of the cgroup: `cpu.weight` in cgroup v2, `cpu.shares`
    /// in cgroup v1.
    #[must_use]
    pub fn weight_file(&self) -> &'static str {
        if self.unified { "cpu.weight" } else { "cpu.shares" }
    }

    /// Sets the CPU weight of the cgroup in proportion to `cores`, the number of cores that its processes should get.
    /// The kernel's default weight stands for one core.
    ///
    /// # Errors
    /// If the kernel refuses the value.
    pub fn set_weight(&self, cores: usize) -> anyhow::Result<()> {
        let (weight_per_core, max_weight) = if self.unified { (100, 10_000) } else { (1024, 262_144) };
        self.write(self.weight_file(), &(cores * weight_per_core).min(max_weight).to_string())
    }

    /// Gives the processes of the cgroup idle priority (`cpu.idle`): they run only while no other process wants the
    /// CPU. Needs Linux 5.15.
    ///
    /// # Errors
    /// If the kernel has no file `cpu.idle`, or refuses the value.
    pub fn set_idle(&self) -> anyhow::Result<()> {
        self.write("cpu.idle", "1")
    }

    /// Sets the cpuset of the cgroup to the PUs (logical CPUs) `cpus`. In cgroup v1, also sets the memory nodes of the
    /// cgroup to those of its parent.
    ///
    /// # Errors
    /// If the kernel refuses a value.
    pub fn set_cpus(&self, cpus: &CpuSet) -> anyhow::Result<()> {
        let parent = self.dir.parent().context("the cgroup has no parent")?;
        if !self.unified {
            let memory = fs::read_to_string(parent.join("cpuset.mems")).context("can't read cpuset.mems")?;
            self.write("cpuset.mems", memory.trim())?;
        }
        self.write("cpuset.cpus", &cpus.to_string())
    }

    /// Moves the process `pid` into the cgroup, and then into the root cgroup of the hierarchy.
    ///
    /// # Errors
    /// If the kernel refuses one of the moves.
    pub fn move_in_and_back(&self, pid: u32) -> anyhow::Result<()> {
        self.move_in(pid)?;
        self.move_back(pid)
    }

    /// Moves the process `pid` into the cgroup.
    ///
    /// # Errors
    /// If the kernel refuses the move.
    pub fn move_in(&self, pid: u32) -> anyhow::Result<()> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Moves the process `pid` into the root cgroup of the hierarchy.
    ///
    /// # Errors
    /// If the kernel refuses the move.
    pub fn move_back(&self, pid: u32) -> anyhow::Result<()> {
        let root = self.dir.parent().context("a group has a parent")?.join("cgroup.procs");
        fs::write(&root, pid.to_string()).with_context(|| format!("can't write {}", root.display()))
    }

    fn write(&self, file: &str, text: &str) -> anyhow::Result<()> {
        let path = self.dir.join(file);
        fs::write(&path, text).with_context(|| format!("can't write {text:?} to {}", path.display()))
    }

    /// Returns a command that runs a program in the cgroup, so that the program is in the cgroup from its first
    /// instruction. The caller appends the program and its arguments to the command.
    #[must_use]
    pub fn run_command(&self) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + REMOVAL_TIMEOUT;
        while fs::remove_dir(&self.dir).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_controller_is_an_error_that_names_it() {
        let error = Cgroup::new("no-such-controller", "x").unwrap_err();
        assert!(error.to_string().contains("no-such-controller"), "{error}");
    }

    #[test]
    fn a_command_runs_in_its_cgroup_which_is_removed_afterwards() {
        let group = match Cgroup::new("cpu", "test") {
            Ok(group) => group,
            // Without root, or without a delegated controller, there is nothing to test.
            Err(error) => return println!("skipped: {error:#}"),
        };
        group.set_weight(2).unwrap();
        let output = group.run_command().args(["cat", "/proc/self/cgroup"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(&group.name()), "{text}");
        let dir = group.dir.clone();
        drop(group);
        assert!(!dir.exists());
    }
}
