//! Values that are places: where metrics are written, and where they are asked for.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Component, Path, PathBuf};

use toml::de::DeValue;

use super::problem::quoted;
use super::values::{self, Wrong};

/// The longest path that is taken, in bytes (PATH_MAX), with room for the temporary file's name.
const PATH_MAX: usize = 4000;
/// So many addresses may be named.
const ADDRESSES_MAX: usize = 8;

/// A path for node_exporter's textfile collector, which reads nothing but `*.prom`. Whether its directory is there
/// is not asked: it may be mounted late.
pub(super) fn textfile(value: &DeValue<'_>) -> Result<Option<PathBuf>, Wrong> {
    let wanted = "an absolute path that ends in .prom, such as \"/var/lib/prometheus/node-exporter/pjw.prom\", or \"\" for none";
    let text = values::text(value, wanted)?;
    if text.is_empty() {
        return Ok(None);
    }
    let path = Path::new(text);
    let climbs = path.components().any(|part| part == Component::ParentDir);
    let is_file = path.extension().is_some_and(|extension| extension == "prom") && !text.ends_with('/');
    let odd = text.len() > PATH_MAX || text.contains(char::is_control);
    if !path.is_absolute() || !is_file || climbs || odd {
        return Err(Wrong::kind(value, wanted));
    }
    Ok(Some(path.to_owned()))
}

/// The path as it would stand in a file.
pub(super) fn show_textfile(path: Option<&Path>) -> String {
    format!("{:?}", path.map(|path| path.display().to_string()).unwrap_or_default())
}

/// Addresses with ports; a port alone is one of the loopback address. Names of hosts are not taken: what they mean
/// is for others to say, and may change.
pub(super) fn addresses(value: &DeValue<'_>) -> Result<Vec<SocketAddr>, Wrong> {
    let wanted = "a list of addresses with ports, such as [\"127.0.0.1:9844\"], or of ports of the loopback address, \
                  such as [\"9844\"]";
    let items = value.as_array().ok_or_else(|| Wrong::kind(value, wanted))?;
    if items.len() > ADDRESSES_MAX {
        return Err(Wrong::because(format!(
            "{} addresses are too many: name at most {ADDRESSES_MAX}",
            items.len()
        )));
    }
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for item in items.iter() {
        let text = values::text(item.get_ref(), wanted)?;
        let address = address(text).ok_or_else(|| {
            Wrong::because(format!("{} is not an address with a port: write {wanted}", quoted(text)))
        })?;
        if addresses.contains(&address) {
            let text = format!("the address {address} stands twice: name each address once");
            return Err(Wrong::because(text));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

fn address(text: &str) -> Option<SocketAddr> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let port = || Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), text.parse().ok()?));
    let address = if digits { port() } else { text.parse().ok() };
    address.filter(|address: &SocketAddr| address.port() != 0)
}

/// The addresses as they would stand in a file.
pub(super) fn show_addresses(addresses: &[SocketAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    format!("{texts:?}")
}
