//! Reports of results: text on the terminal, a page of HTML, and Markdown.
//!
//! All three use the same [`view`] of the JSON results, and format numbers alike.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::LabError;
use crate::results::{Index, Results};

pub mod html;
pub mod markdown;
pub mod reference_rows;
pub mod text;
pub mod view;

/// The runs whose results a report shows: these files, or the latest of a directory.
///
/// # Errors
/// If a file cannot be read, or there is none.
pub fn runs(files: &[PathBuf], directory: &Path) -> Result<Vec<Results>, LabError> {
    if !files.is_empty() {
        return files.iter().map(|file| Results::read(file)).collect();
    }
    let mut wanted: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (experiment, file) in Index::read(directory)?.latest {
        wanted.entry(file).or_default().push(experiment);
    }
    if wanted.is_empty() {
        let how = "`blockyard-lab run NAME` writes them, `--from DIR` says where they are";
        return Err(LabError::missing(format!("results in {}", directory.display()), how));
    }
    let runs = wanted.into_iter().map(|(file, experiments)| {
        // Only the name is used, because the index must not refer to another directory.
        let name = Path::new(&file).file_name().unwrap_or_default();
        let mut results = Results::read(&directory.join(name))?;
        results.retain(|name| experiments.iter().any(|other| other == name));
        Ok(results)
    });
    runs.collect()
}
