//! Values of the metrics outputs: the path of the text file, and the addresses of the HTTP endpoint.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Component, Path, PathBuf};

use toml::de::DeValue;

use super::problem::quote_and_cut;
use super::values::{self, ValueError};

/// The longest path in bytes: PATH_MAX of Linux, minus room for the name of the temporary file.
const MAX_PATH_BYTES: usize = 4000;
/// The largest number of addresses.
const MAX_ADDRESSES: usize = 8;

/// Parses the value of the configuration key `metrics.textfile`: the path of the file to which pjwd writes its metrics
/// for node_exporter. The path must be absolute and end in `.prom`. Its directory need not exist, because it may be
/// mounted later. Returns `None` for an empty value.
///
/// # Errors
/// If the value is not such a path.
pub(super) fn parse_textfile_path(value: &DeValue<'_>) -> Result<Option<PathBuf>, ValueError> {
    let wanted = "an absolute path that ends in .prom, such as \"/var/lib/prometheus/node-exporter/pjw.prom\", or \"\" for none";
    let text = values::parse_text(value, wanted)?;
    if text.is_empty() {
        return Ok(None);
    }
    let path = Path::new(text);
    let has_parent_component = path.components().any(|part| part == Component::ParentDir);
    let is_prom_file = path.extension().is_some_and(|extension| extension == "prom") && !text.ends_with('/');
    let is_usable_text = text.len() <= MAX_PATH_BYTES && !text.contains(char::is_control);
    let is_allowed = path.is_absolute() && is_prom_file && !has_parent_component && is_usable_text;
    if is_allowed { Ok(Some(path.to_owned())) } else { Err(ValueError::not_allowed(value, wanted)) }
}

/// Returns `path`, the path of the metrics file, in the syntax of the configuration file. `None` gives an empty string
/// in quotation marks.
pub(super) fn show_textfile(path: &Option<PathBuf>) -> String {
    format!("{:?}", path.as_ref().map(|path| path.display().to_string()).unwrap_or_default())
}

/// Parses the value of the configuration key `metrics.listen`: the addresses at which pjwd serves its metrics over
/// HTTP, each with a port. A port without an address means the loopback address. Host names are refused, because their
/// addresses can change.
///
/// # Errors
/// If the value is not a list of such addresses, has too many of them, or has one of them twice.
pub(super) fn parse_listen_addresses(value: &DeValue<'_>) -> Result<Vec<SocketAddr>, Vec<ValueError>> {
    let wanted = "a list of addresses with ports, such as [\"127.0.0.1:9844\"], or of ports of the loopback address, \
                  such as [\"9844\"]";
    let items = value.as_array().ok_or_else(|| ValueError::not_allowed(value, wanted))?;
    if items.len() > MAX_ADDRESSES {
        let text = format!("{} addresses are too many: list at most {MAX_ADDRESSES}", items.len());
        return Err(ValueError::with_message(text).into());
    }
    values::parse_each(items, |item, addresses: &[SocketAddr]| {
        let text = values::parse_text(item, wanted)?;
        let address = parse_address(text).ok_or_else(|| {
            ValueError::with_message(format!(
                "{} is not an address with a port: write {wanted}",
                quote_and_cut(text)
            ))
        })?;
        if addresses.contains(&address) {
            let text = format!("the address {address} is listed twice: list each address once");
            return Err(ValueError::with_message(text));
        }
        Ok(address)
    })
}

/// Parses an address with a port, or a port of the loopback address. `None` if `text` is neither, or if the port is 0.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let is_port = text.bytes().all(|byte| byte.is_ascii_digit());
    let address = if is_port {
        SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), text.parse().ok()?)
    } else {
        text.parse().ok()?
    };
    (address.port() != 0).then_some(address)
}

/// Returns `addresses` as a list in the syntax of the configuration file.
pub(super) fn show_addresses(addresses: &[SocketAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    format!("{texts:?}")
}
