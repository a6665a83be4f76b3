//! The key `run.variables`: valid lists, and the error messages for all others.

use super::{Config, ConfigError};

fn read(text: &str) -> Result<Vec<String>, String> {
    match Config::parse_in_test("pjwd.toml", text) {
        Ok(config) => Ok(config.settings().cpu_count_variables.iter().map(ToString::to_string).collect()),
        Err(errors) => Err(errors.iter().map(ConfigError::to_string).collect::<Vec<_>>().join("\n")),
    }
}

#[test]
fn the_list_replaces_the_defaults() {
    let own = read("[run]\nvariables = ['NTHREADS=cores', \"GOMAXPROCS=pus\"]").unwrap();
    assert_eq!(own, ["NTHREADS=cores", "GOMAXPROCS=pus"]);
    assert!(read("run.variables = []").unwrap().is_empty(), "no variable is set");
    assert!(read("").unwrap().contains(&"OMP_NUM_THREADS=cores".to_owned()));
}

#[test]
fn an_unknown_unit_is_reported_with_its_line_and_column() {
    let text = read("[run]\nvariables = [\n    \"OMP_NUM_THREADS=cores\",\n    \"GOMAXPROCS=threads\",\n]")
        .unwrap_err();
    assert_eq!(
        text,
        "pjwd.toml:4:5: run.variables: \"threads\" is no unit of GOMAXPROCS: write cores or pus\n  \
         4 |     \"GOMAXPROCS=threads\",\n    \
         |     ^^^^^^^^^^^^^^^^^^^^"
    );
}

#[test]
fn a_malformed_entry_is_reported_with_its_line_and_column() {
    let wrong = |list: &str| read(&format!("[run]\nvariables = {list}")).unwrap_err();
    for (list, column, reason) in [
        ("['A=cores', 'OMP_NUM_THREADS']", 25, "has no unit: write NAME=cores or NAME=pus"),
        ("['=cores']", 14, "is not the name of a variable"),
        ("['A=cores', '1A=cores']", 25, "is not the name of a variable"),
        ("['A=cores', 'B=pus', 'A=pus']", 34, "A is listed twice"),
        ("['LD_PRELOAD=cores']", 14, "has another meaning"),
        ("['A=cores', 7]", 25, "write a list such as"),
        ("'OMP_NUM_THREADS=cores'", 13, "write a list such as"),
        ("['\u{1b}[2J=cores']", 15, ""),
    ] {
        let text = wrong(list);
        assert!(text.starts_with(&format!("pjwd.toml:2:{column}: ")), "{list}: {text}");
        assert!(text.contains(reason) && !text.contains('\u{1b}'), "{list}: {text}");
    }
    let long = format!("['{}=cores']", "x".repeat(5_000));
    assert!(wrong(&long).len() < 1_000, "{}", wrong(&long));
    let many: Vec<String> = (0..65).map(|n| format!("'A{n}=cores'")).collect();
    assert!(wrong(&format!("[{}]", many.join(","))).contains("65 variables are too many: list at most 64"));
}

#[test]
fn each_wrong_entry_is_reported_with_its_column() {
    let text = read("[run]\nvariables = ['A=cores', 'A=pus', 'B', 7, 'C=pus']").unwrap_err();
    let places: Vec<&str> =
        text.lines().filter(|line| line.starts_with("pjwd")).map(|line| &line[..14]).collect();
    assert_eq!(places, ["pjwd.toml:2:25", "pjwd.toml:2:34", "pjwd.toml:2:39"], "{text}");
}
