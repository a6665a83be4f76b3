//! The options of `pjwctl topology`.

use std::path::PathBuf;

use clap::Args;

use super::json::JsonArg;

/// The command line options of `pjwctl topology`, which shows the machine as a tree or a drawing.
#[derive(Debug, Args)]
pub struct TopologyArgs {
    /// A machine in hwloc's XML format
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    pub input: Option<PathBuf>,
    /// A machine in hwloc's synthetic format
    #[arg(long, value_name = "DESCRIPTION")]
    pub synthetic: Option<String>,
    /// Write a drawing in SVG instead of printing the tree; - is standard output
    #[arg(long = "svg", value_name = "FILE", conflicts_with = "json")]
    pub svg_file: Option<PathBuf>,
    /// Whether the topology is printed as JSON instead of text.
    #[command(flatten)]
    pub json: JsonArg,
}
