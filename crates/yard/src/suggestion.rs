//! Suggestions for an unknown word: the nearest known one, for "did you mean".

use strsim::damerau_levenshtein;

/// The nearest candidate to `word`, if one is near enough: at most a third of its letters differ,
/// and at least one letter may.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // No name is this long; the bound also limits the work below.
    if word.len() > 64 {
        return None;
    }
    let word = word.to_ascii_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (damerau_levenshtein(&word, &candidate.to_ascii_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// `; did you mean ...?`, or an empty text.
pub fn suggestion<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    match nearest(word, candidates) {
        Some(candidate) => format!("; did you mean `{candidate}`?"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_is_recognised() {
        let keys = ["zone_size", "zone_capacity", "zoned", "size", "bs"];
        assert_eq!(nearest("zonesize", keys), Some("zone_size"));
        assert_eq!(nearest("zoen_size", keys), Some("zone_size"));
        assert_eq!(nearest("SIZE", keys), Some("size"));
        assert_eq!(nearest("colour", keys), None);
        assert_eq!(nearest("", keys), None);
        assert_eq!(nearest(&"x".repeat(100_000), keys), None);
    }

    #[test]
    fn a_suggestion_is_a_question_or_nothing() {
        assert_eq!(suggestion("nulll", ["null"]), "; did you mean `null`?");
        assert_eq!(suggestion("zvol", ["null"]), "");
    }
}
