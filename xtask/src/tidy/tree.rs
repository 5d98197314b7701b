//! The tree that the rules read: every text file of the project, in memory.
//!
//! The rules take this and not a folder, so that a test hands them a bad sample of a few lines.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

/// Folders that hold nothing written by us.
const SKIPPED: [&str; 5] = [".git", "target", "corpus", "artifacts", "node_modules"];

/// Files by their path from the root, with `/` between folders.
#[derive(Default)]
pub(crate) struct Tree {
    files: BTreeMap<String, SourceFile>,
}

/// One file: its text, and its syntax where it is Rust.
pub(crate) struct SourceFile {
    /// Empty when the file is not text.
    pub(crate) text: String,
    /// Nothing for other languages and for a file that does not parse (the compiler says why).
    pub(crate) syntax: Option<syn::File>,
}

impl Tree {
    /// Reads everything below `root`.
    pub(crate) fn read(root: &Path) -> io::Result<Tree> {
        let mut tree = Tree::default();
        let mut folders = vec![(root.to_path_buf(), String::new())];
        while let Some((folder, prefix)) = folders.pop() {
            for entry in fs::read_dir(&folder)? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if SKIPPED.contains(&name.as_str()) {
                    continue;
                }
                let path = format!("{prefix}{name}");
                if entry.file_type()?.is_dir() {
                    folders.push((entry.path(), format!("{path}/")));
                } else if entry.file_type()?.is_file() {
                    tree.add(path, String::from_utf8(fs::read(entry.path())?).unwrap_or_default());
                }
            }
        }
        Ok(tree)
    }

    /// A tree of samples, for the tests of the rules.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Tree {
        let mut tree = Tree::default();
        for (path, text) in files {
            tree.add((*path).into(), (*text).into());
        }
        tree
    }

    fn add(&mut self, path: String, text: String) {
        let syntax = path.ends_with(".rs").then(|| syn::parse_file(&text).ok()).flatten();
        self.files.insert(path, SourceFile { text, syntax });
    }

    /// All files, by path.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &SourceFile)> {
        self.files.iter().map(|(path, file)| (path.as_str(), file))
    }

    /// The files whose name ends so.
    pub(crate) fn ending<'a>(
        &'a self,
        end: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a SourceFile)> {
        self.files().filter(move |(path, _)| path.ends_with(end))
    }

    /// The file at `path`.
    pub(crate) fn get(&self, path: &str) -> Option<&SourceFile> {
        self.files.get(path)
    }

    /// Whether `path` is a file or a folder of the tree.
    pub(crate) fn holds(&self, path: &str) -> bool {
        let folder = format!("{}/", path.trim_end_matches('/'));
        self.files.contains_key(path)
            || self
                .files
                .range(folder.clone()..)
                .next()
                .is_some_and(|(p, _)| p.starts_with(&folder))
    }
}

/// The folder of a file, without a slash at its end; empty for the root.
pub(crate) fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// `relative`, seen from `folder`, with `.` and `..` resolved.
pub(crate) fn join(folder: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
    for part in relative.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_held_by_their_files() {
        let tree = Tree::of(&[("crates/core/src/lib.rs", ""), ("Makefile", "")]);
        for path in ["Makefile", "crates", "crates/", "crates/core/src", "crates/core/src/lib.rs"] {
            assert!(tree.holds(path), "{path}");
        }
        for path in ["crates/cor", "Make", "docs/"] {
            assert!(!tree.holds(path), "{path}");
        }
    }

    #[test]
    fn relative_paths_are_resolved() {
        assert_eq!(join("docs/decisions", "../locks.md"), "docs/locks.md");
        assert_eq!(join("", "./docs/locks.md"), "docs/locks.md");
        assert_eq!(join(folder_of("README.md"), "docs"), "docs");
    }
}
