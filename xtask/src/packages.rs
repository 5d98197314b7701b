//! What a package says of the crates in its programs: their licences, and a bill of materials.
//!
//! Both come from `cargo metadata`: the crates that the packaged programs use at run time, on the
//! system that this one runs on. `cargo metadata` unites the features of all members of the
//! workspace, so the lists may name a crate that a program was built without.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

/// The packages whose programs and libraries are shipped.
const SHIPPED: [&str; 2] = ["blockyard", "blockyard-fio-engine"];

/// Licences that ask for no more than their text and the names of the authors.
const PERMISSIVE: [&str; 11] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Licences of code in C and assembler that crates contain and compile, which are not in the
/// crate's own folder. Of the two licences of zstd we take BSD-3-Clause.
const BUNDLED: [(&str, &str); 3] = [
    ("lz4-sys", "liblz4/lib/LICENSE"),
    ("ring", "third_party/fiat/LICENSE"),
    ("zstd-sys", "zstd/LICENSE"),
];

/// How the names of licence files begin.
const LICENCE_FILES: [&str; 6] =
    ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// A crate of a shipped program.
#[derive(Debug)]
struct Component {
    name: String,
    version: String,
    /// An SPDX expression.
    licence: String,
    folder: PathBuf,
    /// SHA-256 of the crate's archive; a crate of this workspace has none.
    checksum: Option<String>,
    is_own: bool,
    /// The ids of the crates that it uses.
    uses: Vec<String>,
}

impl Component {
    fn title(&self) -> String {
        format!("{} {}", self.name, self.version)
    }
}

/// Writes `copyright` and `sbom.cdx.json` into a folder.
///
/// # Errors
/// If a crate has a licence that is not permissive, or no text of its licence.
pub(crate) fn write(root: &Path, into: &Path) -> Result<(), Box<dyn Error>> {
    let components = components(root)?;
    let copyright = copyright(root, &components)?;
    std::fs::write(into.join("copyright"), copyright)?;
    let bill = serde_json::to_string_pretty(&bill_of_materials(&components))?;
    std::fs::write(into.join("sbom.cdx.json"), bill + "\n")?;
    Ok(())
}

/// The crates of the shipped programs, by their ids.
fn components(root: &Path) -> Result<BTreeMap<String, Component>, Box<dyn Error>> {
    let host = run(root, "rustc", &["-vV"])?;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc: no host")?;
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let args = ["metadata", "--locked", "--format-version=1", "--filter-platform", host];
    let metadata: Value = serde_json::from_str(&run(root, &cargo, &args)?)?;
    let lock: toml::Table = std::fs::read_to_string(root.join("Cargo.lock"))?.parse()?;
    let packages = by_id(&metadata["packages"]);
    let nodes = by_id(&metadata["resolve"]["nodes"]);
    let is_shipped = |id: &&str| SHIPPED.iter().any(|name| packages[*id]["name"] == **name);
    let mut open: Vec<&str> = packages.keys().copied().filter(is_shipped).collect();
    let mut found = BTreeMap::new();
    while let Some(id) = open.pop() {
        if found.contains_key(id) {
            continue;
        }
        let uses: Vec<&str> = used_at_run_time(nodes[id]).collect();
        open.extend(&uses);
        found.insert(id.to_owned(), component(packages[id], &lock, &uses)?);
    }
    Ok(found)
}

fn run(root: &Path, program: &str, args: &[&str]) -> Result<String, Box<dyn Error>> {
    let output = Command::new(program).args(args).current_dir(root).output()?;
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout)?),
        false => {
            let errors = String::from_utf8_lossy(&output.stderr);
            Err(format!("{program} {}: {errors}", args.join(" ")).into())
        }
    }
}

fn by_id(list: &Value) -> BTreeMap<&str, &Value> {
    let list = list.as_array().into_iter().flatten();
    list.filter_map(|entry| Some((entry["id"].as_str()?, entry))).collect()
}

/// The ids of the crates that a node uses, except those that only its build or its tests use.
fn used_at_run_time(node: &Value) -> impl Iterator<Item = &str> {
    let is_normal = |kind: &Value| kind["kind"].is_null();
    let uses = node["deps"].as_array().into_iter().flatten();
    uses.filter(move |it| it["dep_kinds"].as_array().into_iter().flatten().any(is_normal))
        .filter_map(|it| it["pkg"].as_str())
}

fn component(
    package: &Value,
    lock: &toml::Table,
    uses: &[&str],
) -> Result<Component, Box<dyn Error>> {
    let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let (name, version, licence) = (text("name"), text("version"), normal(&text("license")));
    if !is_permissive(&licence) {
        return Err(format!(
            "{name} {version}: invalid licence `{licence}`: expected one of {}",
            PERMISSIVE.join(", ")
        )
        .into());
    }
    let is_own = package["source"].is_null();
    let locked = lock["package"].as_array().into_iter().flatten();
    let is_it = |it: &&toml::Value| {
        it["name"].as_str() == Some(&name) && it["version"].as_str() == Some(&version)
    };
    let checksum = locked.clone().find(is_it).and_then(|it| it.get("checksum")?.as_str());
    let checksum = checksum.filter(|_| !is_own).map(str::to_owned);
    let folder = PathBuf::from(text("manifest_path")).parent().map(Path::to_owned);
    let mut uses: Vec<String> = uses.iter().map(|&id| id.to_owned()).collect();
    uses.sort_unstable();
    uses.dedup();
    let folder = folder.ok_or("cargo metadata: no folder")?;
    Ok(Component { name, version, licence, folder, checksum, is_own, uses })
}

/// An SPDX expression, of one in a manifest that may be older: there `/` is OR.
fn normal(expression: &str) -> String {
    let is_operator = |word: &str| matches!(&*word.to_uppercase(), "OR" | "AND" | "WITH");
    let text = expression.replace('/', " OR ");
    let words = text.split_whitespace();
    let words = words.map(|word| if is_operator(word) { word.to_uppercase() } else { word.into() });
    words.collect::<Vec<String>>().join(" ")
}

/// Whether permissive licences alone can fulfil an SPDX expression (SPDX 2.3, annex D).
fn is_permissive(expression: &str) -> bool {
    let text = expression.replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut rest = &words[..];
    any_of(&mut rest) == Some(true) && rest.is_empty()
}

fn any_of(words: &mut &[&str]) -> Option<bool> {
    let mut allowed = all_of(words)?;
    while take(words, "OR") {
        allowed |= all_of(words)?;
    }
    Some(allowed)
}

fn all_of(words: &mut &[&str]) -> Option<bool> {
    let mut allowed = one_of(words)?;
    while take(words, "AND") {
        allowed &= one_of(words)?;
    }
    Some(allowed)
}

fn one_of(words: &mut &[&str]) -> Option<bool> {
    if take(words, "(") {
        let allowed = any_of(words)?;
        return take(words, ")").then_some(allowed);
    }
    let (name, rest) = words.split_first()?;
    *words = rest;
    if !take(words, "WITH") {
        return Some(PERMISSIVE.contains(name));
    }
    let (exception, rest) = words.split_first()?;
    *words = rest;
    Some(PERMISSIVE.contains(&&*format!("{name} WITH {exception}")))
}

fn take(words: &mut &[&str], word: &str) -> bool {
    let is_next = words.first() == Some(&word);
    *words = &words[usize::from(is_next)..];
    is_next
}

/// The licences of the program and of the crates in it; a text that several have is there once.
fn copyright(
    root: &Path,
    components: &BTreeMap<String, Component>,
) -> Result<String, Box<dyn Error>> {
    let own = std::fs::read_to_string(root.join("LICENSE"))?;
    let mut text = format!(
        "Blockyard\n\n{own}\nThe program contains code of these crates, each under its licence. \
         Where it offers several,\nBlockyard takes any of them that is permissive.\n\n"
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut foreign: Vec<&Component> = components.values().filter(|it| !it.is_own).collect();
    foreign.sort_unstable_by_key(|it| (&it.name, &it.version));
    for component in foreign {
        text += &format!("  {}: {}\n", component.title(), component.licence);
        for licence in licence_texts(component)? {
            texts.entry(licence).or_default().push(component.title());
        }
    }
    for (licence, titles) in &texts {
        text += &format!("\n{}\n{}\n\n{licence}\n", "-".repeat(80), titles.join(", "));
    }
    Ok(text)
}

/// The texts of a crate's licences, without white space at the ends of lines.
fn licence_texts(component: &Component) -> Result<Vec<String>, Box<dyn Error>> {
    let mut paths = Vec::new();
    for entry in component.folder.read_dir()? {
        let path = entry?.path();
        let name = path.file_name().map(|it| it.to_string_lossy().to_uppercase());
        let name = name.unwrap_or_default();
        if path.is_file() && LICENCE_FILES.iter().any(|start| name.starts_with(start)) {
            paths.push(path);
        }
    }
    let bundled = BUNDLED.iter().filter(|(name, _)| component.name == *name);
    paths.extend(bundled.map(|(_, path)| component.folder.join(path)));
    paths.sort_unstable();
    let mut texts = Vec::new();
    for path in &paths {
        let text = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        texts.push(text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n"));
    }
    if texts.is_empty() {
        // Its archive has no text; Debian has that of one licence.
        if !component.licence.contains("Apache-2.0") || component.licence.contains("AND") {
            return Err(format!("{}: no text of its licence", component.title()).into());
        }
        texts.push("Apache License 2.0, see /usr/share/common-licenses/Apache-2.0".into());
    }
    Ok(texts)
}

/// The crates as CycloneDX 1.5, without a time and a serial number, which no two builds share.
fn bill_of_materials(components: &BTreeMap<String, Component>) -> Value {
    let reference = |it: &Component| format!("{}@{}", it.name, it.version);
    let entry = |it: &Component| {
        let mut entry = json!({
            "type": if it.name == SHIPPED[0] { "application" } else { "library" },
            "bom-ref": reference(it),
            "name": it.name,
            "version": it.version,
            "licenses": [{ "expression": it.licence }],
        });
        if let Some(checksum) = &it.checksum {
            entry["purl"] = format!("pkg:cargo/{}@{}", it.name, it.version).into();
            entry["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        entry
    };
    let mut list: Vec<&Component> = components.values().collect();
    list.sort_unstable_by_key(|it| (&it.name, &it.version));
    let main = list.iter().find(|it| it.name == SHIPPED[0]).map(|it| entry(it));
    let others = list.iter().filter(|it| it.name != SHIPPED[0]);
    let uses = |it: &Component| {
        let mut uses: Vec<String> = it.uses.iter().map(|id| reference(&components[id])).collect();
        uses.sort_unstable();
        json!({ "ref": reference(it), "dependsOn": uses })
    };
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": main },
        "components": others.map(|it| entry(it)).collect::<Vec<_>>(),
        "dependencies": list.iter().map(|it| uses(it)).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_that_are_permissive_pass() {
        for expression in [
            "MIT",
            "MIT/Apache-2.0",
            "MIT or Apache-2.0",
            "MIT OR LGPL-2.1-or-later",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception",
            "GPL-3.0-only OR (ISC AND Zlib)",
        ] {
            assert!(is_permissive(&normal(expression)), "{expression}");
        }
    }

    #[test]
    fn licences_that_are_not_permissive_or_not_understood_are_refused() {
        for expression in [
            "",
            "GPL-2.0-only",
            "MIT AND GPL-2.0-only",
            "(MIT OR Apache-2.0) AND LGPL-2.1-or-later",
            "GPL-2.0-only WITH Classpath-exception-2.0",
            "MIT WITH Classpath-exception-2.0",
            "MIT Apache-2.0",
            "(MIT",
            "MIT OR",
            "MIT)",
        ] {
            assert!(!is_permissive(&normal(expression)), "{expression}");
        }
    }

    /// What `cargo install` and registries show.
    #[test]
    fn crate_of_the_program_says_what_it_is() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let args = ["metadata", "--locked", "--format-version=1", "--no-deps"];
        let metadata: Value = serde_json::from_str(&run(root, &cargo, &args).unwrap()).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let package = packages.iter().find(|it| it["name"] == SHIPPED[0]).unwrap();
        assert_eq!(package["license"], "MIT");
        assert_eq!(package["rust_version"], "1.95");
        assert!(package["description"].as_str().unwrap().len() > 20);
        let readme = package["readme"].as_str().unwrap();
        let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        assert!(folder.join(readme).exists(), "{readme}");
        let programs: Vec<&Value> = package["targets"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|it| it["kind"][0] == "bin")
            .map(|it| &it["name"])
            .collect();
        assert_eq!(programs, ["blockyard"]);
        // A registry takes five of each, and keywords of 20 letters, digits, `-`, `_` and `+`.
        for list in ["keywords", "categories"] {
            let words = package[list].as_array().unwrap();
            assert!((1..=5).contains(&words.len()), "{list}: {words:?}");
        }
        for keyword in package["keywords"].as_array().unwrap() {
            let keyword = keyword.as_str().unwrap();
            let is_valid = |c: char| c.is_ascii_alphanumeric() || "-_+".contains(c);
            assert!(keyword.len() <= 20 && keyword.chars().all(is_valid), "{keyword}");
        }
    }

    #[test]
    fn bill_has_every_crate_once_with_its_licence_and_what_it_uses() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let components = components(root).unwrap();
        let bill = bill_of_materials(&components);
        assert_eq!(bill["metadata"]["component"]["name"], "blockyard");
        let list = bill["components"].as_array().unwrap();
        assert_eq!(list.len() + 1, components.len());
        let libc = list.iter().find(|it| it["name"] == "libc").unwrap();
        assert_eq!(libc["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(libc["hashes"][0]["content"].as_str().map(str::len), Some(64));
        assert!(list.iter().all(|it| it["name"] != "loom" && it["name"] != "blockyard-testing"));
        let copyright = copyright(root, &components).unwrap();
        for part in ["  libc ", "Yann Collet", "Meta Platforms", "Apache License"] {
            assert!(copyright.contains(part), "{part}");
        }
    }
}
