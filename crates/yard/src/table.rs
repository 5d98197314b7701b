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

    /// Prints the table: the first column and those with the headings `texts` aligned to the left,
    /// the others to the right.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn print(&self, texts: &[&str], out: &mut impl Write) -> io::Result<()> {
        let widths = self.widths();
        let columns: Vec<usize> = (0..widths.len()).collect();
        self.rows.iter().try_for_each(|row| self.print_row(row, &columns, &widths, texts, out))
    }

    /// Prints the table as [`Table::print`] does, but no line is longer than `width`: columns that
    /// do not fit follow in blocks below, each of which begins with the first column. If that one
    /// takes more than half of the width, its cells lose their beginnings, down to the length of
    /// the heading. A column that is wider than `width` alone is printed all the same.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn print_within(
        mut self,
        width: usize,
        texts: &[&str],
        out: &mut impl Write,
    ) -> io::Result<()> {
        let heading = self.rows.first().and_then(|headings| headings.first());
        let most = heading.map_or(0, |heading| heading.chars().count()).max(width / 2);
        let widths = self.widths();
        if widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1) > width {
            for first in self.rows.iter_mut().filter_map(|row| row.first_mut()) {
                let extra = first.chars().count().saturating_sub(most);
                if extra > 0 {
                    *first = std::iter::once('…').chain(first.chars().skip(extra + 1)).collect();
                }
            }
        }
        let widths = self.widths();
        let (mut begin, mut is_first) = (1, true);
        while is_first || begin < widths.len() {
            let mut columns = vec![0];
            let mut used = widths.first().copied().unwrap_or(0);
            while let Some(next) = widths.get(begin)
                && (columns.len() == 1 || used + 2 + next <= width)
            {
                columns.push(begin);
                used += 2 + next;
                begin += 1;
            }
            if !std::mem::take(&mut is_first) {
                writeln!(out)?;
            }
            let mut rows = self.rows.iter();
            rows.try_for_each(|row| self.print_row(row, &columns, &widths, texts, out))?;
        }
        Ok(())
    }

    /// The width of each column.
    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        (0..columns).map(width).collect()
    }

    fn print_row(
        &self,
        row: &[String],
        columns: &[usize],
        widths: &[usize],
        texts: &[&str],
        out: &mut impl Write,
    ) -> io::Result<()> {
        let is_text = |column: usize| {
            let heading = self.rows.first().and_then(|headings| headings.get(column));
            column == 0 || heading.is_some_and(|heading| texts.contains(&heading.as_str()))
        };
        let mut line = String::new();
        for (at, &column) in columns.iter().enumerate() {
            let Some(cell) = row.get(column) else { continue };
            if at > 0 {
                line.push_str("  ");
            }
            let width = widths[column];
            match is_text(column) {
                true => line.push_str(&format!("{cell:<width$}")),
                false => line.push_str(&format!("{cell:>width$}")),
            }
        }
        writeln!(out, "{}", line.trim_end())
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
        table.print(&[], &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "name      n\na         1\nlonger  100\n");
    }

    #[test]
    fn columns_that_do_not_fit_follow_below() {
        let printed = |name: &str, width| {
            let mut table = Table::new(["name", "state", "count", "bytes"]);
            table.row([name, "ok", "1", "17"]);
            let mut out = Vec::new();
            table.print_within(width, &["state"], &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let whole = "name  state  count  bytes\na     ok         1     17\n";
        let blocks = "name  state  count\na     ok         1\n\nname  bytes\na        17\n";
        assert_eq!((printed("a", 25).as_str(), printed("a", 24).as_str()), (whole, blocks));
        let cut = printed("/a/very/long/pool", 22);
        assert!(cut.lines().all(|line| line.chars().count() <= 22), "{cut}");
        assert!(cut.contains("…/long/pool"), "{cut}");
        // A table that just fits is printed whole, also if its first column is wide.
        let mut table = Table::new(["name", "n"]);
        table.row(["/srv/pools", "1"]);
        let mut out = Vec::new();
        table.print_within("/srv/pools  1".len(), &[], &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "name        n\n/srv/pools  1\n");
        // A column that does not fit at all is printed all the same.
        assert_eq!(printed("a", 3).matches("name").count(), 3);
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
