//! Text in columns, and numbers as people read them.

use std::io::{self, Write};

/// Rows of cells, each column as wide as its widest cell.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new<T: Into<String>>(headings: impl IntoIterator<Item = T>) -> Table {
        Table { rows: vec![headings.into_iter().map(T::into).collect()] }
    }

    /// Adds a row.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(T::into).collect());
    }

    /// Prints the table: the first `left` columns aligned to the left, the others to the right.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn print(&self, left: usize, out: &mut impl Write) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                if column > 0 {
                    line.push_str("  ");
                }
                let width = widths[column];
                match column < left {
                    true => line.push_str(&format!("{cell:<width$}")),
                    false => line.push_str(&format!("{cell:>width$}")),
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A time in nanoseconds, with about three digits and a unit.
pub fn duration(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns}ns"),
        1_000..1_000_000 => format!("{:.1}us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2}ms", ns as f64 / 1e6),
        _ => format!("{:.2}s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["name", "n"]);
        table.row(["a".to_owned(), "1".to_owned()]);
        table.row(["longer".to_owned(), "100".to_owned()]);
        let mut out = Vec::new();
        table.print(1, &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "name      n\na         1\nlonger  100\n");
    }

    #[test]
    fn times_have_their_unit() {
        let cases = [
            (0, "0ns"),
            (999, "999ns"),
            (1500, "1.5us"),
            (2_500_000, "2.50ms"),
            (3_000_000_000, "3.00s"),
        ];
        for (ns, text) in cases {
            assert_eq!(duration(ns), text);
        }
    }
}
