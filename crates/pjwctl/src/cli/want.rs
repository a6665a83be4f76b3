//! The options of `pjwctl want`.

use clap::Args;

use super::json::JsonArg;
use super::number::is_too_large;

/// The examples and remarks below the help of `pjwctl want`.
pub(super) const EXAMPLES: &str = "Examples:\n  \
    pjwctl want web 2          the job can use two cores at present\n  \
    pjwctl want web default    it wants what it was granted\n\n\
    Prints the job and the number that counts: at most what the job may have. The job keeps its grant. A program in the \
    job can write the number into the file want of its job instead (docs/coremap.md). For the owner of the job and for \
    administrators.";

/// The command line options of `pjwctl want`, which tells pjwd how many cores a job wants at present.
#[derive(Debug, Clone, Args)]
pub struct WantArgs {
    /// The job, as in slurm:123 or mytest
    pub job: String,
    /// The number of cores, 0 for none at present, or default for what the job was granted
    #[arg(value_name = "N|default", value_parser = wanted_cores)]
    pub cores: WantedCoresArg,
    /// Whether JSON is printed.
    #[command(flatten)]
    pub json: JsonArg,
}

/// The argument of `pjwctl want`: the number of cores that a job wants at present. `None` stands for the word
/// `default`: the job then wants all cores that pjwd or the batch system chose for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedCoresArg(pub Option<u32>);

fn wanted_cores(text: &str) -> Result<WantedCoresArg, String> {
    if text == "default" {
        return Ok(WantedCoresArg(None));
    }
    text.parse().map(|number| WantedCoresArg(Some(number))).map_err(|_| {
        if is_too_large(text) {
            format!("give a number of cores up to {}, or default", u32::MAX)
        } else {
            "give a number of cores, or default".to_owned()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_or_the_word_default_is_accepted_and_nothing_else() {
        assert_eq!(wanted_cores("4"), Ok(WantedCoresArg(Some(4))));
        assert_eq!(wanted_cores("default"), Ok(WantedCoresArg(None)));
        for text in ["", "-1", "four", "1.5", "99999999999"] {
            assert!(wanted_cores(text).is_err(), "{text:?}");
        }
        let refusal = wanted_cores("4294967296").unwrap_err();
        assert_eq!(refusal, "give a number of cores up to 4294967295, or default");
    }
}
