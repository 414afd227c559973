//! The graph of modules: which module names items of which other module, read from the sources as text.
//!
//! A module depends on another if it names an item that the other defines, through any chain of imports and
//! re-exports. `mod` declarations and re-exports alone are no dependency, and test modules are left out. Two rules
//! follow: no cycle between modules, and, for each module, no cycle between the subtrees of its children, so that
//! folders depend one way too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A crate of the workspace: its name in paths and the file of its root module.
pub struct Crate {
    pub name: String,
    pub root: PathBuf,
}

/// One module of a crate. Inline modules count as part of the module that holds them.
#[derive(Default)]
struct Module {
    /// `ckpt_passes::plan::solve`.
    path: Vec<String>,
    /// Names of child modules that have a file of their own.
    children: BTreeSet<String>,
    /// Names of items that the module defines itself.
    items: BTreeSet<String>,
    /// Imported name → path as written, from the crate, `self` or `super`. Re-exports are among them.
    imports: BTreeMap<String, Vec<String>>,
    /// Paths of `use path::*`.
    globs: Vec<Vec<String>>,
    /// Paths in expressions and types, as written.
    paths: BTreeSet<Vec<String>>,
    /// Identifiers that stand alone in the code, outside `use`.
    words: BTreeSet<String>,
}

/// Modules and the modules that each depends on, by path.
pub struct ModuleGraph {
    edges: BTreeMap<String, BTreeSet<String>>,
}

impl ModuleGraph {
    /// Reads the modules of `crates`, starting at their root files.
    pub fn read(crates: &[Crate]) -> ModuleGraph {
        let mut modules = BTreeMap::new();
        for known in crates {
            let is_root = true;
            read_module(&known.root, is_root, vec![known.name.clone()], &mut modules);
        }
        let mut edges = BTreeMap::new();
        for module in modules.values() {
            let targets = edges
                .entry(module.path.join("::"))
                .or_insert_with(BTreeSet::new);
            for path in module.references() {
                if let Some(target) = resolve(&modules, &module.path, &path, 0)
                    && target != module.path
                {
                    targets.insert(target.join("::"));
                }
            }
        }
        ModuleGraph { edges }
    }

    /// Number of modules.
    pub fn len(&self) -> usize {
        self.edges.len()
    }

    /// Every set of modules that depend on each other, and every set of sibling subtrees that do.
    pub fn cycles(&self) -> Vec<Vec<String>> {
        let mut cycles = components(&self.edges);
        let parents: BTreeSet<&str> = self
            .edges
            .keys()
            .filter_map(|path| path.rsplit_once("::"))
            .map(|(parent, _)| parent)
            .collect();
        for parent in parents {
            let child = |path: &str| {
                let rest = path.strip_prefix(parent)?.strip_prefix("::")?;
                let name = rest.split("::").next()?;
                Some(format!("{parent}::{name}"))
            };
            let mut siblings: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for (from, targets) in &self.edges {
                let Some(a) = child(from) else { continue };
                let reached = siblings.entry(a.clone()).or_default();
                reached.extend(targets.iter().filter_map(|t| child(t)).filter(|b| *b != a));
            }
            for cycle in components(&siblings) {
                if !cycles.contains(&cycle) {
                    cycles.push(cycle);
                }
            }
        }
        cycles
    }

    /// Edges inside a cycle, one a line, for the message of a failed test.
    pub fn shown(&self, cycle: &[String]) -> String {
        let inside = |path: &str| {
            let holds = |c: &&String| {
                path == c.as_str()
                    || path
                        .strip_prefix(c.as_str())
                        .is_some_and(|r| r.starts_with("::"))
            };
            cycle.iter().filter(holds).max_by_key(|c| c.len())
        };
        let mut text = format!("{} modules:\n", cycle.len());
        for (from, targets) in &self.edges {
            for to in targets {
                if let (Some(a), Some(b)) = (inside(from), inside(to))
                    && a != b
                {
                    text.push_str(&format!("  {from} -> {to}\n"));
                }
            }
        }
        text
    }
}

impl Module {
    /// All paths that the module's code names. An import that no code mentions is a re-export and names nothing.
    fn references(&self) -> Vec<Vec<String>> {
        let mut found: Vec<Vec<String>> = self.paths.iter().cloned().collect();
        for (name, path) in &self.imports {
            if self.words.contains(name) {
                found.push(path.clone());
            }
        }
        for glob in &self.globs {
            for word in &self.words {
                if !self.items.contains(word) && !self.imports.contains_key(word) {
                    found.push([glob.clone(), vec![word.clone()]].concat());
                }
            }
        }
        found
    }
}

/// The module that defines what `path`, written in the module `from`, names; `None` for other crates.
fn resolve(
    modules: &BTreeMap<Vec<String>, Module>,
    from: &[String],
    path: &[String],
    depth: usize,
) -> Option<Vec<String>> {
    const MOST_REEXPORTS: usize = 8;
    if depth > MOST_REEXPORTS {
        return None;
    }
    let mut at: Vec<String> = from.to_vec();
    let mut rest = path;
    loop {
        match rest.first().map(String::as_str) {
            Some("crate") => at.truncate(1),
            Some("self") => {}
            Some("super") => {
                at.pop();
            }
            _ => break,
        }
        rest = &rest[1..];
    }
    let is_plain = rest.len() == path.len();
    let first = rest.first()?;
    if is_plain {
        let here = &modules[from];
        if modules.contains_key(std::slice::from_ref(first)) {
            at = vec![first.clone()];
            rest = &rest[1..];
        } else if !here.children.contains(first) {
            // A name that is imported; what is defined here or comes from another crate is of no interest.
            let path = [here.imports.get(first)?.clone(), rest[1..].to_vec()].concat();
            return match path.first() {
                Some(same) if same == first => None,
                _ => resolve(modules, from, &path, depth + 1),
            };
        }
    }
    let mut module = modules.get(&at)?;
    while let Some(name) = rest.first() {
        if module.items.contains(name) {
            return Some(module.path.clone());
        }
        if module.children.contains(name) {
            at.push(name.clone());
            module = modules.get(&at)?;
            rest = &rest[1..];
            continue;
        }
        if let Some(path) = module.imports.get(name) {
            let path = [path.clone(), rest[1..].to_vec()].concat();
            if path.first() == Some(name) && !modules.contains_key(std::slice::from_ref(name)) {
                return None;
            }
            return resolve(modules, &module.path, &path, depth + 1);
        }
        return module.globs.iter().find_map(|glob| {
            let path = [glob.as_slice(), rest].concat();
            resolve(modules, &module.path, &path, depth + 1)
        });
    }
    // A module alone: whoever imports it names its items by another path.
    None
}

/// Sets of two or more nodes that reach each other.
fn components(edges: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<String>> {
    let names: Vec<&String> = edges.keys().collect();
    let index: BTreeMap<&String, usize> = names.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    let targets: Vec<Vec<usize>> = names
        .iter()
        .map(|n| {
            edges[*n]
                .iter()
                .filter_map(|t| index.get(t).copied())
                .collect()
        })
        .collect();
    let mut sources = vec![Vec::new(); names.len()];
    for (from, to) in targets.iter().enumerate() {
        to.iter().for_each(|t| sources[*t].push(from));
    }
    // Kosaraju: finish order of the graph, then components of its reverse.
    let mut seen = vec![false; names.len()];
    let mut finished = Vec::new();
    for start in 0..names.len() {
        visit(start, &targets, &mut seen, &mut finished);
    }
    let mut seen = vec![false; names.len()];
    let mut found = Vec::new();
    for start in finished.into_iter().rev() {
        let mut component = Vec::new();
        visit(start, &sources, &mut seen, &mut component);
        if component.len() > 1 {
            component.sort_unstable();
            found.push(component.into_iter().map(|i| names[i].clone()).collect());
        }
    }
    found
}

/// Appends what is reachable from `start` to `finished`, in the order in which a depth-first search leaves it.
fn visit(start: usize, edges: &[Vec<usize>], seen: &mut [bool], finished: &mut Vec<usize>) {
    if std::mem::replace(&mut seen[start], true) {
        return;
    }
    let mut stack = vec![(start, 0)];
    while let Some((node, next)) = stack.pop() {
        match edges[node].get(next) {
            Some(to) => {
                stack.push((node, next + 1));
                if !std::mem::replace(&mut seen[*to], true) {
                    stack.push((*to, 0));
                }
            }
            None => finished.push(node),
        }
    }
}

/// Reads the module in `file` and the files of its children into `modules`.
fn read_module(
    file: &Path,
    is_root: bool,
    path: Vec<String>,
    modules: &mut BTreeMap<Vec<String>, Module>,
) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut module = Module {
        path: path.clone(),
        ..Module::default()
    };
    let tokens = tokens(&text);
    let mut at = 0;
    items(&tokens, &mut at, &mut module);
    let folder = file.parent().unwrap();
    let name = file.file_stem().unwrap();
    let folder = match is_root || name == "mod" {
        true => folder.to_path_buf(),
        false => folder.join(name),
    };
    let mut children = Vec::new();
    for child in &module.children {
        let flat = folder.join(format!("{child}.rs"));
        let nested = folder.join(child).join("mod.rs");
        let found = [flat, nested].into_iter().find(|f| f.is_file());
        children.extend(found.map(|f| (f, [path.clone(), vec![child.clone()]].concat())));
    }
    let with_files: BTreeSet<String> = children
        .iter()
        .map(|(_, path)| path[path.len() - 1].clone())
        .collect();
    module.children = with_files;
    modules.insert(path, module);
    for (file, path) in children {
        read_module(&file, false, path, modules);
    }
}

/// Splits Rust into identifiers and punctuation; comments, literals and lifetimes are dropped.
fn tokens(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let mut found = Vec::new();
    let mut i = 0;
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    while i < chars.len() {
        let c = chars[i];
        let next = chars.get(i + 1).copied().unwrap_or(' ');
        if c == '/' && next == '/' {
            while i < chars.len() && chars[i] != '\n' {
                i += 1;
            }
        } else if c == '/' && next == '*' {
            let mut depth = 0;
            while i < chars.len() {
                match (chars[i], chars.get(i + 1)) {
                    ('/', Some('*')) => depth += 1,
                    ('*', Some('/')) => depth -= 1,
                    _ => {}
                }
                i += 1;
                if depth == 0 {
                    break;
                }
            }
            i += 1;
        } else if let Some(end) = raw_string(&chars, i) {
            i = end;
        } else if c == '"' {
            i += 1;
            while i < chars.len() && chars[i] != '"' {
                i += if chars[i] == '\\' { 2 } else { 1 };
            }
            i += 1;
        } else if c == '\'' {
            // A character literal closes within a few characters, a lifetime does not.
            if next == '\\' {
                i += 3;
                while i < chars.len() && chars[i - 1] != '\'' {
                    i += 1;
                }
            } else if chars.get(i + 2) == Some(&'\'') {
                i += 3;
            } else {
                i += 1;
                while i < chars.len() && is_word(chars[i]) {
                    i += 1;
                }
            }
        } else if is_word(c) {
            let start = i;
            while i < chars.len() && is_word(chars[i]) {
                i += 1;
            }
            found.push(chars[start..i].iter().collect());
        } else if c == ':' && next == ':' {
            found.push("::".into());
            i += 2;
        } else {
            if !c.is_whitespace() {
                found.push(c.to_string());
            }
            i += 1;
        }
    }
    found
}

/// The end of a raw string that starts at `at`, if one does.
fn raw_string(chars: &[char], at: usize) -> Option<usize> {
    if at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_') {
        return None;
    }
    let mut i = at;
    if chars[i] == 'b' {
        i += 1;
    }
    if chars.get(i) != Some(&'r') {
        return None;
    }
    i += 1;
    let hashes = chars[i..].iter().take_while(|c| **c == '#').count();
    i += hashes;
    if chars.get(i) != Some(&'"') {
        return None;
    }
    i += 1;
    while i < chars.len() {
        let closes = chars[i] == '"' && chars[i + 1..].iter().take(hashes).all(|c| *c == '#');
        i += 1;
        if closes {
            return Some(i + hashes);
        }
    }
    Some(i)
}

/// Reads items at the level of a module, up to the end or the brace that closes an inline module.
fn items(tokens: &[String], at: &mut usize, module: &mut Module) {
    let mut is_test = false;
    let token = |i: usize| tokens.get(i).map_or("", String::as_str);
    while *at < tokens.len() {
        match token(*at) {
            "#" => {
                let end = closing(tokens, *at + 1 + usize::from(token(*at + 1) == "!"));
                let attribute = &tokens[*at..end];
                let has = |w: &str| attribute.iter().any(|t| t == w);
                is_test |= has("cfg") && has("test") && !has("not") && !has("any");
                *at = end;
                continue;
            }
            "pub" => {
                let end = *at + 1;
                *at = if token(end) == "(" {
                    closing(tokens, end)
                } else {
                    end
                };
                continue;
            }
            "}" => return,
            "use" => {
                *at += 1;
                let end = (*at..).find(|i| token(*i) == ";").unwrap();
                if !is_test {
                    import(&tokens[*at..end], Vec::new(), module);
                }
                *at = end + 1;
                is_test = false;
                continue;
            }
            "mod" if token(*at + 2) == ";" => {
                if !is_test {
                    module.children.insert(tokens[*at + 1].clone());
                }
                *at += 3;
                is_test = false;
                continue;
            }
            "mod" if token(*at + 2) == "{" => {
                let end = closing(tokens, *at + 2);
                if !is_test {
                    let mut inside = *at + 3;
                    module.items.insert(tokens[*at + 1].clone());
                    items(tokens, &mut inside, module);
                }
                *at = end;
                is_test = false;
                continue;
            }
            _ => {}
        }
        // Any other item runs to its `;` or its braces. A test-only item is skipped whole.
        let end = item_end(tokens, *at);
        if !is_test {
            if let Some(name) = defined(&tokens[*at..end]) {
                module.items.insert(name);
            }
            code(&tokens[*at..end], module);
        }
        is_test = false;
        *at = end.max(*at + 1);
    }
}

/// One past the end of the item that starts at `at`.
fn item_end(tokens: &[String], at: usize) -> usize {
    // `const X: T = T { … };` ends at its `;`. Everything else with braces ends at the closing one.
    let is_head = |t: &&str| !matches!(*t, ":" | "=" | "{" | "(" | ";");
    let mut head = tokens[at..].iter().map(String::as_str).take_while(is_head);
    let is_value =
        head.clone().any(|t| matches!(t, "const" | "static")) && !head.any(|t| t == "fn");
    let mut i = at;
    while i < tokens.len() {
        match tokens[i].as_str() {
            ";" => return i + 1,
            "{" => {
                let end = closing(tokens, i);
                if !is_value {
                    return end;
                }
                i = end;
            }
            "(" | "[" => i = closing(tokens, i),
            "}" => return i,
            _ => i += 1,
        }
    }
    i
}

/// One past the bracket that closes the one at `at`.
fn closing(tokens: &[String], at: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(at) {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => {
                depth -= 1;
                if depth == 0 {
                    return i + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// The name of the item in `tokens`, if it defines one.
fn defined(tokens: &[String]) -> Option<String> {
    const WORDS: &[&str] = &[
        "fn", "struct", "enum", "trait", "type", "const", "static", "union",
    ];
    let head = tokens.iter().take(12);
    for (i, token) in head.enumerate() {
        if token == "impl" || token == "{" || token == "=" {
            return None;
        }
        if token == "macro_rules" {
            return tokens.get(i + 2).cloned();
        }
        let next = tokens.get(i + 1).map_or("", String::as_str);
        if WORDS.contains(&token.as_str()) && !WORDS.contains(&next) && next != "unsafe" {
            let at = if next == "mut" { i + 2 } else { i + 1 };
            return tokens.get(at).cloned();
        }
    }
    None
}

/// Records the paths and words of an item, and the imports of its functions.
fn code(tokens: &[String], module: &mut Module) {
    let is_name = |t: &str| t.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let mut i = 0;
    while i < tokens.len() {
        if tokens[i] == "use" {
            let end = (i..tokens.len()).find(|e| tokens[*e] == ";");
            if let Some(end) = end {
                import(&tokens[i + 1..end], Vec::new(), module);
                i = end + 1;
                continue;
            }
        }
        if !is_name(&tokens[i]) {
            i += 1;
            continue;
        }
        let is_field = i > 0 && tokens[i - 1] == ".";
        let mut path = vec![tokens[i].clone()];
        i += 1;
        while i + 1 < tokens.len() && tokens[i] == "::" && is_name(&tokens[i + 1]) {
            path.push(tokens[i + 1].clone());
            i += 2;
        }
        if is_field {
            continue;
        }
        module.words.insert(path[0].clone());
        if path.len() > 1 {
            module.paths.insert(path);
        }
    }
}

/// Expands a `use` tree into imports.
fn import(tree: &[String], prefix: Vec<String>, module: &mut Module) {
    let mut path = prefix;
    let mut i = 0;
    while i < tree.len() {
        match tree[i].as_str() {
            "::" => i += 1,
            "*" => {
                module.globs.push(path);
                return;
            }
            "{" => {
                let end = closing(tree, i) - 1;
                let mut start = i + 1;
                let mut depth = 0;
                for at in i + 1..=end {
                    match tree[at].as_str() {
                        "{" => depth += 1,
                        "}" if at < end => depth -= 1,
                        _ => {}
                    }
                    if (tree[at] == "," && depth == 0) || at == end {
                        if start < at {
                            import(&tree[start..at], path.clone(), module);
                        }
                        start = at + 1;
                    }
                }
                return;
            }
            "as" => {
                module.imports.insert(tree[i + 1].clone(), path);
                return;
            }
            "self" if !path.is_empty() && i > 0 || tree[i] == "self" && !path.is_empty() => i += 1,
            name => {
                path.push(name.to_string());
                i += 1;
            }
        }
    }
    if let Some(name) = path.last().cloned() {
        module.imports.insert(name, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(files: &[(&str, &str)]) -> ModuleGraph {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = folder.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        ModuleGraph::read(&[Crate {
            name: "c".into(),
            root: folder.path().join("lib.rs"),
        }])
    }

    #[test]
    fn finds_a_cycle_through_a_re_export() {
        let graph = graph(&[
            ("lib.rs", "pub mod a; pub mod b; pub use b::Thing;"),
            ("a.rs", "use crate::Thing; pub struct A(Thing);"),
            (
                "b.rs",
                "pub struct Thing; impl Thing { fn f(_: super::a::A) {} }",
            ),
        ]);
        assert_eq!(graph.cycles(), [["c::a", "c::b"]]);
    }

    #[test]
    fn a_re_export_and_a_test_are_no_dependency() {
        let graph = graph(&[
            ("lib.rs", "pub mod a; pub mod b; pub use a::A;"),
            (
                "a.rs",
                "pub struct A;\npub fn f() -> impl Iterator<Item = A> { None.into_iter() }\n\
                 #[cfg(test)]\nmod tests { use crate::b::B; }",
            ),
            (
                "b.rs",
                "//! See [`crate::a`].\npub struct B(crate::A, &'static str); // crate::b::B",
            ),
        ]);
        assert!(graph.cycles().is_empty());
        assert_eq!(graph.len(), 3);
    }

    #[test]
    fn folders_may_not_depend_on_each_other() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod low; mod high;"),
            ("a/low.rs", "pub fn low() {}"),
            (
                "a/high.rs",
                "use crate::b::middle; pub fn high() { middle() }",
            ),
            ("b.rs", "use crate::a::low; pub fn middle() { low::low() }"),
        ]);
        assert_eq!(graph.cycles(), [["c::a", "c::b"]]);
    }

    #[test]
    fn a_parent_and_its_child_may_not_use_each_other() {
        let graph = graph(&[
            ("lib.rs", "mod a; pub fn f() { a::g() }  pub struct S;"),
            ("a.rs", "use super::*; pub fn g() -> S { S }"),
        ]);
        assert_eq!(graph.cycles(), [["c", "c::a"]]);
    }
}
