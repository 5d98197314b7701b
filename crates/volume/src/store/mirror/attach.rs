//! A second copy for a pool that has one, or whose other one is lost.

use std::path::Path;

use super::Mirror;
use super::assemble::{CopiesError, Given, Terms, has_pool, label_empty, read_label};
use crate::error::VolumeError;
use crate::format::label::{FILE, Label};
use crate::store::Directory;

/// What an empty directory may have: itself, the lock that was made just now, and what a file
/// system brings along.
const EMPTY: [&str; 5] = [".", "..", "lock", "lost+found", "copy.new"];

/// Makes an empty directory the second copy of a pool, and puts both together; see
/// [`Mirror::assemble`].
///
/// # Errors
/// If the one has no pool or two copies, the other one is not empty, or one cannot be written.
pub fn attach<D: Directory>(
    directory: D,
    path: &Path,
    empty: D,
    other: &Path,
) -> Result<Mirror<D>, VolumeError> {
    let (title, other_title) = (path.display().to_string(), other.display().to_string());
    if !has_pool(&directory)? {
        let wanted = "the directory of a pool".to_owned();
        return Err(VolumeError::Invalid { field: "path", value: title, wanted });
    }
    let known = read_label(&directory)?.map(|(label, _)| label);
    if let Some(label) = &known
        && !label.is_good()
    {
        let missing = label.other.display().to_string();
        return Err(CopiesError::Behind { path: title, missing }.into());
    }
    if let Some(label) = known.as_ref().filter(|label| label.is_other_good()) {
        let other = label.other.display().to_string();
        return Err(CopiesError::Paired { path: title, other }.into());
    }
    // One that was begun to be made equal may go on.
    let begun = match (&known, read_label(&empty)?) {
        (Some(label), Some((begun, _))) => begun.set == label.set && !begun.is_good(),
        (_, None) => false,
        (None, Some(_)) => {
            let what = format!("a copy (`{FILE}`)");
            return Err(CopiesError::NotEmpty { path: other_title, what }.into());
        }
    };
    if !begun {
        let names = empty.names();
        let names = names.map_err(VolumeError::io(format!("cannot list `{other_title}`")))?;
        if let Some(name) = names.iter().find(|name| !EMPTY.contains(&name.as_str())) {
            let what = format!("`{name}`");
            return Err(CopiesError::NotEmpty { path: other_title, what }.into());
        }
    }
    let (number, generation) =
        known.as_ref().map_or((0, 1), |label| (label.number, label.generation.saturating_add(1)));
    // Generations order two copies: one that belonged to the pool before is a stranger now.
    let set = match known.filter(|_| begun) {
        Some(label) => label.set,
        None => {
            let doing = VolumeError::io(format!("cannot write `{title}/{FILE}`"));
            directory.fresh_id().map_err(doing)?
        }
    };
    let good = std::array::from_fn(|at| at == number);
    let label = Label { set, number, generation, good, other: other.to_owned() };
    // The pool's first: a power cut between the two leaves one of which nobody knows anything.
    label_empty(&directory, &label, path)?;
    let second = Label { number: 1 - number, other: path.to_owned(), ..label };
    label_empty(&empty, &second, other)?;
    let given = [
        Given { directory: Some(directory), path: path.to_owned() },
        Given { directory: Some(empty), path: other.to_owned() },
    ];
    let mirror = Mirror::assemble(given, Terms::Use { degraded: false })?;
    // An opening goes on alone where one cannot be made equal; this was asked for.
    match mirror.status().into_iter().find(|copy| !copy.is_good) {
        None => Ok(mirror),
        Some(copy) => {
            let why = copy.why.unwrap_or_default();
            Err(CopiesError::NotEqual { path: copy.path, why }.into())
        }
    }
}
