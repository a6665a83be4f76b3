//! The imports of each module of a crate from other modules of the same crate.
//!
//! The imports are read from the source text: `use` trees, paths in code that begin with `crate`, `self` or `super`,
//! and paths that begin with a child module or an imported name. For a re-export, the import counts for the module
//! that defines the item. Test code is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::source::Source;

/// The path of a module below the root of its crate, for example `["state", "pool"]`. The path of the root is empty.
pub(crate) type Module = Vec<String>;

/// The modules of one crate and their imports.
pub(crate) struct Imports {
    /// The file of each module.
    pub(crate) files: BTreeMap<Module, PathBuf>,
    /// For each module, the modules that it imports, each with the first line that imports it.
    pub(crate) of: BTreeMap<Module, BTreeMap<Module, usize>>,
}

/// The names in one module.
#[derive(Default)]
struct Names {
    /// Items that the module defines.
    defined: BTreeSet<String>,
    /// Imported names, each with its path.
    imported: BTreeMap<String, Vec<String>>,
    /// Imported paths that end with `*`.
    globs: Vec<Vec<String>>,
    /// Paths in `use` declarations and in code, each with its line.
    paths: Vec<(Vec<String>, usize)>,
}

/// The most re-exports that are followed one after the other.
const MAX_REEXPORTS: usize = 8;
/// Keywords that are followed by the name of an item.
const ITEMS: [&str; 10] =
    ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "mod", "macro_rules"];

impl Imports {
    /// Reads the files of one crate. `src` is its directory, relative to the root of the workspace.
    pub(crate) fn of_crate(src: &Path, sources: &[Source]) -> Self {
        let mut files = BTreeMap::new();
        let mut names = BTreeMap::new();
        let has_lib = sources.iter().any(|source| source.path == src.join("lib.rs"));
        for source in sources.iter().filter(|source| source.path.starts_with(src)) {
            let Some(module) = module_of(source.path.strip_prefix(src).unwrap(), has_lib) else { continue };
            if source.is_test.iter().all(|is_test| *is_test) {
                continue;
            }
            names.insert(module.clone(), Names::read(source));
            files.insert(module, source.path.clone());
        }
        let of = names.iter().map(|(module, own)| (module.clone(), imports(module, own, &names))).collect();
        Self { files, of }
    }

    /// Returns each import cycle once, as a text with the lines of its imports.
    pub(crate) fn cycles(&self) -> Vec<String> {
        let mut reported: BTreeSet<&Module> = BTreeSet::new();
        let mut cycles = Vec::new();
        for module in self.of.keys() {
            if reported.contains(module) {
                continue;
            }
            if let Some(cycle) = self.cycle_through(module) {
                reported.extend(cycle.iter().copied());
                let arrows = cycle.iter().zip(cycle.iter().cycle().skip(1));
                let arrows = arrows
                    .map(|(from, to)| format!("{} imports {}", self.location(from, to), display_name(to)));
                cycles.push(arrows.collect::<Vec<_>>().join("; "));
            }
        }
        cycles
    }

    /// Returns the shortest import cycle that contains the module `start`.
    fn cycle_through(&self, start: &Module) -> Option<Vec<&Module>> {
        let (start, _) = self.of.get_key_value(start)?;
        let mut reached: BTreeMap<&Module, &Module> = BTreeMap::new();
        let mut next = std::collections::VecDeque::from([start]);
        while let Some(at) = next.pop_front() {
            for to in self.of.get(at)?.keys() {
                if to == start {
                    let mut cycle = vec![at];
                    while *cycle.last()? != start {
                        cycle.push(reached[cycle.last()?]);
                    }
                    cycle.reverse();
                    return Some(cycle);
                }
                if !reached.contains_key(to) {
                    reached.insert(to, at);
                    next.push_back(to);
                }
            }
        }
        None
    }

    /// Returns the file and the line where the module `from` imports the module `to`.
    pub(crate) fn location(&self, from: &Module, to: &Module) -> String {
        format!("{}:{}", self.files[from].display(), self.of[from][to])
    }
}

/// Returns the name of a module for a message.
pub(crate) fn display_name(module: &Module) -> String {
    if module.is_empty() { "the crate's root".to_owned() } else { module.join("::") }
}

/// Returns the module of a file below `src`. `None` for the root of another target.
fn module_of(path: &Path, has_lib: bool) -> Option<Module> {
    let mut module: Module =
        path.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if module[0] == "bin" || (has_lib && module == ["main"]) {
        return None;
    }
    if ["mod", "lib", "main"].contains(&module.last()?.as_str()) {
        module.pop();
    }
    Some(module)
}

/// Returns the imports of a module: the modules that define the names in its paths, each with the line of the path.
fn imports(module: &Module, own: &Names, names: &BTreeMap<Module, Names>) -> BTreeMap<Module, usize> {
    let mut imports = BTreeMap::new();
    for (path, line) in &own.paths {
        if let Some((target, true)) = resolve(module, path, names, MAX_REEXPORTS)
            && target != *module
        {
            imports.entry(target).or_insert(*line);
        }
    }
    imports
}

/// Resolves a path in a module. Returns the module at its end, and whether the path names an item in that module and
/// not only the module itself. `None` if the path leaves the crate.
fn resolve(
    module: &Module,
    path: &[String],
    names: &BTreeMap<Module, Names>,
    reexports: usize,
) -> Option<(Module, bool)> {
    let mut rest = path;
    let mut at = module.clone();
    match path.first()?.as_str() {
        "crate" => (at, rest) = (Module::new(), &path[1..]),
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                at.pop()?;
                rest = &rest[1..];
            }
        }
        first => {
            let child = [at.as_slice(), &[first.to_owned()]].concat();
            if !names.contains_key(&child) && !names.get(&at)?.imported.contains_key(first) {
                return None;
            }
        }
    }
    while let Some(part) = rest.first() {
        let child = [at.as_slice(), std::slice::from_ref(part)].concat();
        if names.contains_key(&child) {
            (at, rest) = (child, &rest[1..]);
            continue;
        }
        let here = names.get(&at)?;
        if part == "self" {
            rest = &rest[1..];
            continue;
        }
        if part == "*" || here.defined.contains(part) || reexports == 0 {
            return Some((at, true));
        }
        if let Some(imported) = here.imported.get(part) {
            let rest_of_path = [imported.as_slice(), &rest[1..]].concat();
            return resolve(&at, &rest_of_path, names, reexports - 1);
        }
        let through_glob = here.globs.iter().find_map(|glob| {
            let (target, _) = resolve(&at, &glob[..glob.len() - 1], names, reexports - 1)?;
            let there = names.get(&target)?;
            let known = there.defined.contains(part) || there.imported.contains_key(part);
            known.then(|| resolve(&target, &[&["self".to_owned()], rest].concat(), names, reexports - 1))
        });
        return through_glob.unwrap_or(Some((at, true)));
    }
    Some((at, false))
}

impl Names {
    fn read(source: &Source) -> Self {
        let tokens = tokens(source);
        let mut names = Self::default();
        let mut at = 0;
        while at < tokens.len() {
            let (token, line) = (&tokens[at].0, tokens[at].1);
            let after = tokens.get(at + 1).map_or("", |(token, _)| token.as_str());
            if token == "use" && after != "<" {
                at = names.read_use(&tokens, at + 1, &[]);
                continue;
            }
            if ITEMS.contains(&token.as_str()) {
                let name = if after == "!" { tokens.get(at + 2) } else { tokens.get(at + 1) };
                names.defined.extend(name.map(|(name, _)| name.clone()));
                at += 2;
                continue;
            }
            let begins = is_name(token) && (at == 0 || !["::", "."].contains(&tokens[at - 1].0.as_str()));
            if begins && after == "::" {
                let mut path = vec![token.clone()];
                while tokens.get(at + 1).is_some_and(|(token, _)| token == "::")
                    && tokens.get(at + 2).is_some_and(|(token, _)| is_name(token))
                {
                    path.push(tokens[at + 2].0.clone());
                    at += 2;
                }
                names.paths.push((path, line));
            }
            at += 1;
        }
        names
    }

    /// Reads one tree of a `use` declaration. Returns the index of the token at its end.
    fn read_use(&mut self, tokens: &[(String, usize)], mut at: usize, before: &[String]) -> usize {
        let mut path = before.to_vec();
        let mut name = None;
        while let Some((token, line)) = tokens.get(at) {
            match token.as_str() {
                "::" => {}
                "{" => {
                    while tokens.get(at).is_some_and(|(token, _)| token != "}") {
                        at = self.read_use(tokens, at + 1, &path);
                    }
                    return at + 1;
                }
                "as" => {
                    name = tokens.get(at + 1).map(|(name, _)| name.clone());
                    at += 1;
                }
                "," | "}" | ";" => {
                    self.import(path, name, *line, before.len());
                    return at;
                }
                part => path.push(part.to_owned()),
            }
            at += 1;
        }
        at
    }

    fn import(&mut self, mut path: Vec<String>, name: Option<String>, line: usize, before: usize) {
        if path.len() == before {
            return;
        }
        if path.last().is_some_and(|last| last == "*") {
            self.globs.push(path.clone());
        } else {
            if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            let name = name.or_else(|| path.last().cloned()).unwrap_or_default();
            self.imported.insert(name, path.clone());
        }
        self.paths.push((path, line));
    }
}

/// Returns the names and signs in the code of the product, each with its line.
fn tokens(source: &Source) -> Vec<(String, usize)> {
    let mut tokens: Vec<(String, usize)> = Vec::new();
    for (number, line) in source.product() {
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            let mut token = c.to_string();
            if is_name(&token) {
                while let Some(more) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    token.push(more);
                }
            } else if c == ':' && chars.next_if_eq(&':').is_some() {
                token.push(':');
            } else if c.is_whitespace() {
                continue;
            }
            tokens.push((token, number));
        }
    }
    tokens
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crate_of(files: &[(&str, &str)]) -> Imports {
        let src = Path::new("crates/x/src");
        let sources: Vec<Source> =
            files.iter().map(|(path, text)| Source::new(&src.join(path), text, false)).collect();
        Imports::of_crate(src, &sources)
    }

    fn imported(imports: &Imports, module: &str) -> Vec<String> {
        let module: Module = module.split("::").map(str::to_owned).collect();
        imports.of[&module].keys().map(display_name).collect()
    }

    #[test]
    fn use_trees_and_paths_in_code_are_imports() {
        let imports = crate_of(&[
            ("lib.rs", "mod a; mod b; mod c; mod d;"),
            ("a.rs", "use crate::{b::{Bee, self as bee}, c::Sea as C};\nfn f() { crate::d::g(); bee::h(); }"),
            ("b.rs", "use std::fmt::{self, Write};\npub struct Bee;\nfn h() { fmt::x(); }"),
            (
                "c.rs",
                "// use crate::a::f;\n#[cfg(test)]\nmod tests {\n    use crate::a::f;\n}\npub struct Sea;",
            ),
            ("d.rs", "pub fn g() -> &'static str { \"crate::a::f\" }"),
        ]);
        assert_eq!(imported(&imports, "a"), ["b", "c", "d"]);
        assert!(imported(&imports, "b").is_empty() && imported(&imports, "c").is_empty());
        assert!(imports.cycles().is_empty());
    }

    #[test]
    fn a_re_export_leads_to_the_module_that_defines_the_item() {
        let imports = crate_of(&[
            ("lib.rs", "mod basics; mod top;\npub use basics::time; pub use basics::*;"),
            ("basics/mod.rs", "pub mod time;\npub use time::Nanos; pub fn own() {}"),
            ("basics/time.rs", "pub struct Nanos; pub struct Moment;"),
            ("top.rs", "use crate::time::Moment;\nuse crate::Nanos;\nfn f() { crate::own(); }"),
        ]);
        assert_eq!(imported(&imports, "top"), ["basics", "basics::time"]);
    }

    #[test]
    fn a_parent_and_its_child_can_form_a_cycle() {
        let imports = crate_of(&[
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod b;\npub(super) struct Scene;\nfn f() { b::g(); }"),
            ("a/b.rs", "use super::Scene;\npub(super) fn g() {}"),
        ]);
        let cycles = imports.cycles();
        assert_eq!(cycles.len(), 1, "{cycles:?}");
        assert!(cycles[0].contains("crates/x/src/a/b.rs:1 imports a"), "{cycles:?}");
    }
}
