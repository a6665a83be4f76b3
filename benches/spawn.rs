//! What the start of a process in a group costs: CPU time and rate, by the schemes of the pspawn slides, by
//! posix_spawn(3), and by pjw-spawn with exec and with templates. Then a program with many libraries, a program that
//! writes its pages, and the number of PUs that start processes.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::path::{Path, PathBuf};

use anyhow::Context;
use pjw_benches::load::compiled::{compile_image, compile_small, compile_with_libraries};
use pjw_benches::measure::chart::Chart;
use pjw_benches::measure::results::{Figure, print_line, target_directory};
use pjw_benches::measure::start_cost::StartCost;
use pjw_benches::peers::spawn_schemes::{Parent, SpawnSchemes};
use pjw_benches::programs::interrupt::StopSignal;
use pjw_benches::programs::spawned_group::SpawnedGroup;
use pjw_benches::setup::effort::Effort;
use pjw_benches::setup::parts::run_parts;
use pjw_benches::setup::prepare_scale;
use pjw_core::cpuset::CpuSet;
use tempfile::TempDir;

/// The schemes of the C program: the name in the results, the name in the program, and whether the scheme copies the
/// page tables of the parent.
const PEERS: [(&str, &str, bool); 9] = [
    ("sfork", "sfork", true),
    ("afork", "afork", true),
    ("pfork", "pfork", true),
    ("vfork", "vfork", false),
    (POSIX_SPAWN, "posix_spawn", false),
    ("posix_spawn on each PU", "posix_spawn_per_pu", false),
    (LIMIT, "limit", false),
    (FORK, "fork", true),
    (FORK_PER_PU, FORK_LOOPS, true),
];
const POSIX_SPAWN: &str = "posix_spawn, then mask";
const LIMIT: &str = "limit: bare vfork loops";
const FORK: &str = "bare fork loop, no exec";
const FORK_PER_PU: &str = "the same on each PU";
/// The name of [`FORK_PER_PU`] in the C program.
const FORK_LOOPS: &str = "fork_per_pu";
const SYNCHRONOUS: &str = "pjw-spawn";
const ASYNCHRONOUS: &str = "pjw-spawn, asynchronous";
const TEMPLATE: &str = "pjw-spawn, template";
const LATE: &str = "pjw-spawn, late fork";
const LATE_LIMIT: &str = "bare fork loop of the same program on each PU";
/// The largest group of a scheme that copies the page tables of a large parent.
const MAX_COPIES: u32 = 100;
/// The number of processes with a large image that run at the same time.
const IMAGES_AT_ONCE: u32 = 20;
/// The LD_LIBRARY_PATH of slide 17.
const LONG_PATH: &str = "/home/user/opt/open64/x86_open64-4.2.5/lib:/home/user/opt/mpi/openmpi-1.5.3-openf90/lib/:\
    /home/user/opt/open64/x86_open64-4.2.5/open64-gcc-4.2.0/lib/:/home/user/x86_open64-4.2.5/lib/gcc-lib/\
    x86_64-open64-linux/4.2.5:/home/GotoBLAS2/1.13_bsd:/home/cuda/cuda4.0.11/lib64:/home/cuda/cuda4.0.11/lib:\
    /home/user/opt/open64/x86_open64-4.2.5/lib:/home/user/opt/mpi/openmpi-1.5.3-openf90/lib/:/opt/cuda/lib64";

fn main() -> anyhow::Result<()> {
    let bench = Bench::prepare()?;
    run_parts(
        "spawn",
        &bench,
        &[("schemes", schemes), ("late", late), ("libraries", libraries), ("pages", pages), ("pus", pus)],
    )
}

struct Bench {
    effort: Effort,
    interrupt: StopSignal,
    pus: CpuSet,
    directory: TempDir,
    peers: SpawnSchemes,
    /// The path of a small program that ends at once.
    small: PathBuf,
}

/// Returns one value of a cost.
type Value = fn(&StartCost) -> f64;

/// A way to start a group of processes.
struct Scheme<'a> {
    name: &'static str,
    /// Whether the scheme copies the page tables of the parent.
    copies_parent: bool,
    /// Starts a group with this number of processes, and returns the cost of each process.
    run: Box<dyn Fn(u32) -> anyhow::Result<StartCost> + 'a>,
}

/// The results of the schemes. Each entry has the name of a scheme and a list: a number of processes, and the cost of
/// each of them.
type Results = Vec<(&'static str, Vec<(u32, StartCost)>)>;

impl Bench {
    fn prepare() -> anyhow::Result<Self> {
        let (effort, interrupt) = (Effort::from_arguments(), StopSignal::install()?);
        let pus = prepare_scale(&interrupt)?.usable_pus;
        let directory = tempfile::tempdir().context("can't make a directory for the programs")?;
        let (peers, small) = (SpawnSchemes::compile(directory.path())?, compile_small(directory.path())?);
        Ok(Self { effort, interrupt, pus, directory, peers, small })
    }

    /// Returns the schemes of the C program.
    fn peers<'a>(&'a self, parent: Parent<'a>, program: &'a Path) -> Vec<Scheme<'a>> {
        let scheme = |(name, word, copies_parent)| Scheme {
            name,
            copies_parent,
            run: Box::new(move |count| self.peers.run(word, count, parent, program)),
        };
        PEERS.map(scheme).into()
    }

    /// Runs the schemes in turns, and returns the medians. `counts` has the numbers of processes, each with the largest
    /// number of rounds. A scheme whose rounds differ little has fewer rounds. A scheme that copies the page tables of
    /// the parent starts at most `max_copies` processes.
    fn measure(
        &self,
        schemes: &[Scheme<'_>],
        counts: &[(u32, usize)],
        max_copies: u32,
    ) -> anyhow::Result<Results> {
        let mut results: Results = schemes.iter().map(|scheme| (scheme.name, Vec::new())).collect();
        for &(count, rounds) in counts {
            let mut costs = vec![Vec::new(); schemes.len()];
            for _ in 0..rounds {
                for (scheme, costs) in schemes.iter().zip(&mut costs) {
                    self.interrupt.check()?;
                    let is_too_large = scheme.copies_parent && count > max_copies;
                    if !is_too_large && !StartCost::are_settled(costs) {
                        costs.push((scheme.run)(count).with_context(|| scheme.name)?);
                    }
                }
            }
            for ((_, results), costs) in results.iter_mut().zip(&costs) {
                results.extend(StartCost::median(costs).map(|cost| (count, cost)));
            }
        }
        Ok(results)
    }
}

/// Returns the schemes of pjw-spawn: one process after the other, several at once, and forks from a template.
fn pjw_schemes<'a>(group: &'a SpawnedGroup, templates: &'a SpawnedGroup) -> [Scheme<'a>; 3] {
    let scheme = |name, run: Box<dyn Fn(u32) -> anyhow::Result<()> + 'a>| Scheme {
        name,
        copies_parent: false,
        run: Box::new(move |count| StartCost::measure(count, || run(count))),
    };
    [
        scheme(SYNCHRONOUS, Box::new(|count| group.spawn(count))),
        scheme(ASYNCHRONOUS, Box::new(|count| group.start(count))),
        scheme(TEMPLATE, Box::new(|count| templates.start(count))),
    ]
}

/// Measures all schemes for several numbers of processes, sizes of the parent and environments. Prints the tables,
/// writes the charts, and returns the figures.
fn schemes(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let long: Vec<(String, String)> = (0..500)
        .map(|number| (format!("VARIABLE_{number:03}"), "v".repeat(87)))
        .chain([("LD_LIBRARY_PATH".into(), LONG_PATH.into())])
        .collect();
    let quick = bench.effort == Effort::Quick;
    let many_counts: &[(u32, usize)] = &[(1, 15), (2, 9), (5, 9), (10, 9), (100, 5), (1000, 3), (2000, 3)];
    let few_counts: &[(u32, usize)] = &[(100, 3), (1000, 3)];
    let large_mb = bench.effort.pick(8, 512);
    // The memory of the parent, its environment, the name of the environment, and the numbers of processes.
    let parents = [
        (0, &[][..], "empty", many_counts),
        (0, &long[..], "long", few_counts),
        (large_mb, &[][..], "empty", few_counts),
        (large_mb, &long[..], "long", &few_counts[..1]),
    ];
    let mut figures = Vec::new();
    let mut small_parent = None;
    for (ballast_mb, environment, environment_name, counts) in parents {
        let counts = if quick { &[(1, 1), (20, 1)] } else { counts };
        let results = measure_with_parent(bench, ballast_mb, environment, counts)?;
        let title = format!("parent of {ballast_mb} MB, {environment_name} environment");
        print_table(&title, &results)?;
        let file = format!("spawn-schemes-{ballast_mb}mb-{environment_name}");
        write_charts(&file, &title, "processes", &results)?;
        figures.extend(against_posix_spawn(&title, &results)?);
        if environment_name != "empty" {
            continue;
        }
        let (count, cost) = at_most(&results, ASYNCHRONOUS, 1000)?;
        if let Some(small) = small_parent {
            let name = format!("{ASYNCHRONOUS}, {count} processes, parent of {ballast_mb} MB: CPU");
            figures.push(Figure::new(&name, cost.cpu_us, "us", "parent of 0 MB", small));
        } else {
            figures.extend(against_bounds(&results)?);
            small_parent = Some(cost.cpu_us);
        }
    }
    Ok(figures)
}

/// Measures all schemes with a parent that has `ballast_mb` MB of memory and the variables `environment`. `counts` has
/// the numbers of processes, each with the number of rounds.
fn measure_with_parent(
    bench: &Bench,
    ballast_mb: usize,
    environment: &[(String, String)],
    counts: &[(u32, usize)],
) -> anyhow::Result<Results> {
    let parent = Parent { ballast_mb, environment, pus: &bench.pus };
    let group = SpawnedGroup::new(&bench.small, "small", environment, &bench.pus)?;
    let templates = SpawnedGroup::new(&bench.small, "small", environment, &bench.pus)?.with_templates();
    let ballast = vec![1_u8; ballast_mb << 20];
    let mut schemes = bench.peers(parent, &bench.small);
    schemes.extend(pjw_schemes(&group, &templates));
    let max_copies = if ballast_mb > 0 { MAX_COPIES } else { u32::MAX };
    let results = bench.measure(&schemes, counts, max_copies);
    drop(black_box(ballast));
    results
}

/// Returns the figures that compare the CPU time of each scheme with that of posix_spawn(3), for the largest number of
/// processes that the scheme was measured with. Schemes of pjw-spawn also have a figure of the rate.
fn against_posix_spawn(title: &str, results: &Results) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, costs) in results.iter().filter(|(name, _)| *name != POSIX_SPAWN) {
        let (count, cost) = *costs.last().context("nothing was measured")?;
        let (_, peer) = at_most(results, POSIX_SPAWN, count)?;
        let title = format!("{name}, {count} processes, {title}");
        figures.push(Figure::new(&format!("{title}: CPU"), cost.cpu_us, "us", POSIX_SPAWN, peer.cpu_us));
        if [SYNCHRONOUS, ASYNCHRONOUS, TEMPLATE].contains(name) {
            figures.push(Figure::new(&format!("{title}: rate"), cost.rate, "1/s", POSIX_SPAWN, peer.rate));
        }
    }
    Ok(figures)
}

/// Returns the figures that compare the schemes of pjw-spawn with bare loops in C, which are the limit.
fn against_bounds(results: &Results) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, bound) in [(SYNCHRONOUS, LIMIT), (ASYNCHRONOUS, LIMIT), (TEMPLATE, FORK_PER_PU)] {
        let (count, cost) = at_most(results, name, u32::MAX)?;
        let (_, bound_cost) = at_most(results, bound, u32::MAX)?;
        let title = format!("{name}, {count} processes");
        figures.push(Figure::new(&format!("{title}: CPU"), cost.cpu_us, "us", bound, bound_cost.cpu_us));
        figures.push(Figure::new(&format!("{title}: rate"), cost.rate, "1/s", bound, bound_cost.rate));
    }
    Ok(figures)
}

/// Returns the cost of a scheme with the largest number of processes that is not above `most`.
fn at_most(results: &Results, scheme: &str, most: u32) -> anyhow::Result<(u32, StartCost)> {
    let costs = results.iter().find(|(name, _)| *name == scheme);
    let cost = costs.and_then(|(_, costs)| costs.iter().rev().find(|(count, _)| *count <= most));
    cost.copied().with_context(|| format!("{scheme} was not measured"))
}

fn print_table(title: &str, results: &Results) -> anyhow::Result<()> {
    print_line(&format!("\n{title}: us of CPU for each process, and processes per second"))?;
    for (name, costs) in results {
        let cells: String = costs
            .iter()
            .map(|(x, cost)| format!("  {x:>5}: {:>8.0} us {:>6.0}/s", cost.cpu_us, cost.rate))
            .collect();
        print_line(&format!("{name:<25}{cells}"))?;
    }
    Ok(())
}

/// Writes two charts of the results: the CPU time of a process, and the number of processes per second. `file` is the
/// beginning of the file names.
fn write_charts(file: &str, title: &str, x_label: &str, results: &Results) -> anyhow::Result<()> {
    let kinds: [(&str, &str, Value); 2] =
        [("cpu", "CPU time, us", |cost| cost.cpu_us), ("rate", "processes per second", |cost| cost.rate)];
    for (kind, y_label, value) in kinds {
        let line = |costs: &[(u32, StartCost)]| {
            costs.iter().map(|(x, cost)| (f64::from(*x), value(cost))).collect::<Vec<_>>()
        };
        let lines = results.iter().map(|(name, costs)| (String::from(*name), line(costs))).collect();
        let chart = Chart { title: title.into(), x_label: x_label.into(), y_label: y_label.into(), lines };
        chart.write(&target_directory()?, &format!("{file}-{kind}"))?;
    }
    Ok(())
}

/// Measures late forks of a program with pjw-spawn, and a loop of fork(2) in the same program. Writes the charts, and
/// returns the figures.
fn late(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let forks = SpawnSchemes::compile_late(bench.directory.path())?;
    let group = SpawnedGroup::new(forks.program(), "late", &[], &bench.pus)?.with_late_forks();
    let parent = Parent { ballast_mb: 0, environment: &[], pus: &bench.pus };
    let schemes = [
        Scheme {
            name: LATE,
            copies_parent: false,
            run: Box::new(|count| StartCost::measure(count, || group.start(count))),
        },
        Scheme {
            name: LATE_LIMIT,
            copies_parent: false,
            run: Box::new(|count| forks.run(FORK_LOOPS, count, parent, forks.program())),
        },
    ];
    let counts: &[(u32, usize)] = bench.effort.pick(&[(20, 1)], &[(100, 7), (1000, 5), (2000, 5)]);
    let results = bench.measure(&schemes, counts, u32::MAX)?;
    print_table("late forks", &results)?;
    write_charts("spawn-late", "late forks", "processes", &results)?;
    let (count, own) = at_most(&results, LATE, u32::MAX)?;
    let (_, bare) = at_most(&results, LATE_LIMIT, u32::MAX)?;
    let title = format!("{LATE}, {count} processes");
    Ok(vec![
        Figure::new(&format!("{title}: CPU"), own.cpu_us, "us", LATE_LIMIT, bare.cpu_us),
        Figure::new(&format!("{title}: rate"), own.rate, "1/s", LATE_LIMIT, bare.rate),
    ])
}

/// Measures the start of a program with many libraries by exec and from a template. Writes the charts, and returns the
/// figures. The environment is not empty, because the template sets `LD_BIND_NOW` in the place of another variable.
fn libraries(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let libraries = bench.effort.pick(50, 495);
    let program = compile_with_libraries(bench.directory.path(), libraries)?;
    let counts: &[(u32, usize)] = bench.effort.pick(&[(8, 1)], &[(10, 3), (100, 3)]);
    let environment = [("PATH".to_owned(), "/usr/bin:/bin".to_owned())];
    let group = SpawnedGroup::new(&program, "many", &environment, &bench.pus)?;
    let templates = SpawnedGroup::new(&program, "many", &environment, &bench.pus)?.with_templates();
    let parent = Parent { ballast_mb: 0, environment: &environment, pus: &bench.pus };
    let mut schemes = bench.peers(parent, &program);
    schemes.retain(|scheme| scheme.name == POSIX_SPAWN);
    schemes.extend(pjw_schemes(&group, &templates));
    let results = bench.measure(&schemes, counts, u32::MAX)?;
    let title = format!("a program with {libraries} libraries");
    print_table(&title, &results)?;
    write_charts("spawn-libraries", &title, "processes", &results)?;
    against_posix_spawn(&title, &results)
}

/// Measures the start of a program with a large image by exec and from a template, for several shares of pages that the
/// program writes. Prints from which share on exec is cheaper. Writes the charts, and returns the figures.
fn pages(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let (megabytes, rounds) = bench.effort.pick((10, 1), (100, 10));
    let program = compile_image(bench.directory.path(), megabytes)?;
    let mut results: Results = vec![(ASYNCHRONOUS, Vec::new()), (TEMPLATE, Vec::new())];
    for share in [0, 1, 10, 50, 100] {
        let group = || SpawnedGroup::new(&program, &share.to_string(), &[], &bench.pus);
        let ways = [group()?, group()?.with_templates()];
        let mut costs = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (way, costs) in ways.iter().zip(&mut costs) {
                bench.interrupt.check()?;
                costs.push(StartCost::measure(IMAGES_AT_ONCE, || way.start(IMAGES_AT_ONCE))?);
            }
        }
        for ((_, results), costs) in results.iter_mut().zip(&costs) {
            results.extend(StartCost::median(costs).map(|cost| (share, cost)));
        }
    }
    let title = format!("a program of {megabytes} MB, by the share of its pages that it writes, in %");
    print_table(&title, &results)?;
    write_charts("spawn-pages", &title, "pages written, %", &results)?;
    print_line(&match break_even(&results[0].1, &results[1].1) {
        Some(share) => format!("exec is cheaper than a template from {share:.0} % of the pages on"),
        None => "a template is cheaper than exec at every share".into(),
    })?;
    let pairs = || results[0].1.iter().zip(&results[1].1);
    let good = pairs().filter(|((_, exec), (_, template))| template.cpu_us <= 1.1 * exec.cpu_us).count();
    print_line(&format!(
        "--proxy auto takes a template: the cheaper way, or at most 10 % above it, at {good} of {} shares",
        pairs().count()
    ))?;
    let figures = pairs().map(|((share, exec), (_, template))| {
        let name = format!("template, {megabytes} MB, {share} % of the pages written: CPU");
        Figure::new(&name, template.cpu_us, "us", "exec", exec.cpu_us)
    });
    Ok(figures.collect())
}

/// Returns the share from which exec is cheaper than a template, on straight lines between the measured shares.
fn break_even(exec: &[(u32, StartCost)], template: &[(u32, StartCost)]) -> Option<f64> {
    // For each share, the CPU time that a template saves.
    let gains: Vec<(f64, f64)> = exec
        .iter()
        .zip(template)
        .map(|((share, exec), (_, template))| (f64::from(*share), exec.cpu_us - template.cpu_us))
        .collect();
    let &(first_share, first_gain) = gains.first()?;
    if first_gain <= 0.0 {
        return Some(first_share);
    }
    gains.windows(2).find_map(|pair| {
        let [(from, gain), (to, next)] = *pair else { return None };
        (gain > 0.0 && next <= 0.0).then(|| from + (to - from) * gain / (gain - next))
    })
}

/// Measures the rate of started processes for several numbers of PUs that start them. Writes the charts, and returns
/// the figures.
fn pus(bench: &Bench) -> anyhow::Result<Vec<Figure>> {
    let all_pus: Vec<_> = bench.pus.iter().collect();
    let mut numbers: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n < all_pus.len()).collect();
    numbers.push(all_pus.len());
    let mut merged: Results = Vec::new();
    for number in numbers {
        let pus: CpuSet = all_pus[..number].iter().copied().collect();
        let parent = Parent { ballast_mb: 0, environment: &[], pus: &pus };
        let group = SpawnedGroup::new(&bench.small, "small", &[], &pus)?;
        let templates = SpawnedGroup::new(&bench.small, "small", &[], &pus)?.with_templates();
        let mut schemes = bench.peers(parent, &bench.small);
        schemes.retain(|scheme| ["posix_spawn on each PU", POSIX_SPAWN, LIMIT].contains(&scheme.name));
        schemes.extend(pjw_schemes(&group, &templates));
        let count = u32::try_from(number)? * bench.effort.pick(10, 500);
        let results = bench.measure(&schemes, &[(count, bench.effort.pick(1, 5))], u32::MAX)?;
        if merged.is_empty() {
            merged = results.iter().map(|(name, _)| (*name, Vec::new())).collect();
        }
        for ((_, merged), (_, costs)) in merged.iter_mut().zip(&results) {
            merged.extend(costs.iter().map(|(_, cost)| (u32::try_from(number).unwrap_or(u32::MAX), *cost)));
        }
    }
    let title = "by the number of PUs that start processes";
    print_table(title, &merged)?;
    write_charts("spawn-pus", title, "PUs", &merged)?;
    let rate = |name: &str, pus: u32| at_most(&merged, name, pus).map(|(_, cost)| cost.rate);
    for (number, serial) in
        merged.iter().find(|(name, _)| *name == POSIX_SPAWN).map_or(&[][..], |(_, costs)| costs)
    {
        let [own, template] =
            [rate(ASYNCHRONOUS, *number)?, rate(TEMPLATE, *number)?].map(|rate| rate / serial.rate);
        print_line(&format!(
            "on {number} PUs: {own:.2} times the rate of one posix_spawn after the other, {template:.2} times with templates"
        ))?;
    }
    let most = u32::try_from(all_pus.len())?;
    let mut figures = Vec::new();
    for name in [ASYNCHRONOUS, TEMPLATE, POSIX_SPAWN] {
        let title = format!("{name}, {most} PUs: rate");
        figures.push(Figure::new(&title, rate(name, most)?, "1/s", "one PU", rate(name, 1)?));
    }
    Ok(figures)
}
