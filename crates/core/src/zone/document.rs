//! Reads the tables of docs/zones.md, so that tests can compare them with the code.
//!
//! Test code, shared by crates through `#[path]`.

use std::collections::BTreeMap;

/// A table's cells by (row, column).
pub(crate) type Table = BTreeMap<(String, String), String>;

/// The first table below the heading.
pub(crate) fn table(heading: &str) -> Table {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/zones.md");
    let text = std::fs::read_to_string(path).expect("docs/zones.md is there");
    let rows: Vec<Vec<String>> = text
        .lines()
        .skip_while(|line| line.trim_start_matches('#').trim() != heading)
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let inner = line.trim().trim_matches('|');
            inner.split('|').map(|cell| cell.trim().replace('`', "")).collect()
        })
        .collect();
    assert!(rows.len() > 2, "docs/zones.md has no table under `{heading}`");
    let mut table = Table::new();
    for row in &rows[2..] {
        assert_eq!(row.len(), rows[0].len(), "{heading}: a row of another length: {row:?}");
        for (column, cell) in rows[0].iter().zip(row).skip(1) {
            let old = table.insert((row[0].clone(), column.clone()), cell.clone());
            assert!(old.is_none(), "{heading}: `{}` stands there twice", row[0]);
        }
    }
    table
}
