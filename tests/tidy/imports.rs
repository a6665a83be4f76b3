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
    /// Items that the module defines, without its child modules.
    defined: BTreeSet<String>,
    /// Imported names, each with its paths. There are several if the path depends on a feature.
    imported: BTreeMap<String, Vec<Vec<String>>>,
    /// The paths before `*` in imports of all names of a module.
    globs: Vec<Vec<String>>,
    /// Paths in `use` declarations and in code, each with its line.
    paths: Vec<(Vec<String>, usize)>,
}

/// The most re-exports that are followed one after the other.
const MAX_REEXPORTS: usize = 8;
/// Keywords that are followed by the name of an item.
const ITEMS: [&str; 9] = ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "macro_rules"];

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
        for target in definers(module, path, names, MAX_REEXPORTS, false) {
            if target != *module {
                imports.entry(target).or_insert(*line);
            }
        }
    }
    imports
}

/// Returns the modules that define the item at the end of a path in `module`, however many re-exports lead there. Empty
/// if the path leaves the crate, or names a module. `reexports` is the number of re-exports that may follow.
///
/// If the item is in no list, as one that a macro makes, the last module in the path counts as the one that defines it.
/// With `is_guess`, it does not: the item may also be in another module.
fn definers(
    module: &Module,
    path: &[String],
    names: &BTreeMap<Module, Names>,
    reexports: usize,
    is_guess: bool,
) -> BTreeSet<Module> {
    let none = BTreeSet::new();
    let Some((mut at, mut rest)) = begin_of_path(module, path) else { return none };
    while rest.len() > 1
        && let Some(child) = child_module(&at, &rest[0], names)
    {
        (at, rest) = (child, &rest[1..]);
    }
    let (Some(here), Some(name)) = (names.get(&at), rest.first()) else { return none };
    if here.defined.contains(name) {
        return BTreeSet::from([at]);
    }
    if reexports == 0 {
        return none;
    }
    if let Some(paths) = here.imported.get(name) {
        let paths = paths.iter().map(|path| [path.as_slice(), &rest[1..]].concat());
        return paths.flat_map(|path| definers(&at, &path, names, reexports - 1, false)).collect();
    }
    if child_module(&at, name, names).is_some() {
        return none;
    }
    let paths = here.globs.iter().map(|glob| [glob.as_slice(), rest].concat());
    let found: BTreeSet<Module> =
        paths.flat_map(|path| definers(&at, &path, names, reexports - 1, true)).collect();
    // A name without a module before it, which is not found, is another crate.
    let is_in_crate = rest.len() < path.len();
    if found.is_empty() && is_in_crate && !is_guess { BTreeSet::from([at]) } else { found }
}

/// Returns the module where a path begins that is written in `module`, and the rest of the path. `None` if it begins
/// above the crate.
fn begin_of_path<'a>(module: &Module, path: &'a [String]) -> Option<(Module, &'a [String])> {
    let (mut at, mut rest) = (module.clone(), path);
    match path.first()?.as_str() {
        "crate" => (at, rest) = (Module::new(), &path[1..]),
        "self" => rest = &path[1..],
        _ => {}
    }
    while rest.first().is_some_and(|part| part == "super") {
        at.pop()?;
        rest = &rest[1..];
    }
    Some((at, rest))
}

/// Returns the child module of `module` with this name, if there is one.
fn child_module(module: &Module, name: &str, names: &BTreeMap<Module, Names>) -> Option<Module> {
    let child = [module.as_slice(), &[name.to_owned()]].concat();
    names.contains_key(&child).then_some(child)
}

impl Names {
    fn read(source: &Source) -> Self {
        let tokens = tokens(source);
        let mut names = Self::default();
        let (mut at, mut depth) = (0, 0_usize);
        while at < tokens.len() {
            let (token, line) = (&tokens[at].0, tokens[at].1);
            let after = tokens.get(at + 1).map_or("", |(token, _)| token.as_str());
            if token == "use" && after != "<" {
                at = names.read_use(&tokens, at + 1, &[]);
                continue;
            }
            match token.as_str() {
                "{" => depth += 1,
                "}" => depth = depth.saturating_sub(1),
                // Other modules can't import a method, or an item in a function.
                item if depth == 0 && ITEMS.contains(&item) => {
                    let name = if after == "!" { tokens.get(at + 2) } else { tokens.get(at + 1) };
                    names.defined.extend(name.map(|(name, _)| name.clone()));
                }
                _ => {}
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
        if let Some((_, module)) = path.split_last().filter(|(last, _)| *last == "*") {
            self.globs.push(module.to_owned());
        } else {
            if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            let name = name.or_else(|| path.last().cloned()).unwrap_or_default();
            self.imported.entry(name).or_default().push(path.clone());
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
    fn an_item_is_found_through_several_re_exports() {
        let imports = crate_of(&[
            ("lib.rs", "mod a; mod top;"),
            ("a/mod.rs", "mod b; mod c;\npub use b::*; pub use self::c::{Third as Fourth, made};"),
            ("a/b/mod.rs", "mod deep;\npub use deep::*;"),
            ("a/b/deep.rs", "pub const fn first() {}\nmod deeper;\npub use deeper::Second;"),
            ("a/b/deep/deeper.rs", "pub struct Second;"),
            ("a/c.rs", "pub struct Third;\nmake_function!(made);\nimpl Third { fn first() {} }"),
            ("top.rs", "use crate::a::first;\nuse crate::a;\nfn f() { a::Second::new(); a::Fourth::new(); }"),
        ]);
        assert_eq!(imported(&imports, "top"), ["a::b::deep", "a::b::deep::deeper", "a::c"]);
        assert_eq!(imported(&imports, "a"), ["a::b", "a::c"]);
    }

    /// Asserts that two modules import each other: `a::b` by its path, and `d` by a re-export of `a`.
    #[track_caller]
    fn assert_cycle_by_re_export(a: &str, b: &str, d: &str) {
        let imports = crate_of(&[
            ("lib.rs", "mod a; mod d;"),
            ("a/mod.rs", a),
            ("a/b.rs", b),
            ("a/c.rs", "pub struct Method;\nimpl Method { pub fn item() {} }"),
            ("a/off.rs", "pub fn item() {}"),
            ("d.rs", d),
        ]);
        assert_eq!(imported(&imports, "a::b"), ["d"]);
        assert!(imported(&imports, "d").contains(&"a::b".to_owned()), "{:?}", imports.of);
        assert_eq!(imports.cycles().len(), 1);
    }

    #[test]
    fn an_import_by_a_re_export_can_close_a_cycle() {
        let (b, d) = ("use crate::d::Dee;\npub fn item() {}", "pub struct Dee;\nuse crate::a::item;");
        assert_cycle_by_re_export("mod b;\npub use b::item;", b, d);
        // The method of another module is not the item.
        assert_cycle_by_re_export("mod b; mod c;\npub use self::{c::*, b::*};", b, d);
        // The name depends on a feature.
        let by_feature = "mod b; mod off;\n#[cfg(feature = \"x\")]\npub use b::item;\n\
            #[cfg(not(feature = \"x\"))]\npub use off::item;";
        assert_cycle_by_re_export(by_feature, b, d);
        // The item has the name of its module.
        let (b, d) =
            ("use crate::d::Dee;\npub fn b() {}", "pub struct Dee;\nuse crate::a::b;\nfn f() { b(); }");
        assert_cycle_by_re_export("mod b;\npub use b::b;", b, d);
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
