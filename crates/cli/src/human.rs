//! Numbers and tables for people: sizes, times, shares, and tables that fit the terminal.

pub(crate) use blockyard_yard::size::rounded;
pub(crate) use blockyard_yard::time_text::date;

use std::io::{self, IsTerminal, Write};

use blockyard_yard::table::Table;

/// Widest bar of a histogram, in characters.
const BAR_MAX: usize = 40;

/// Width of tables without a terminal, in characters.
pub(crate) const WIDTH: usize = 80;

/// A number of bytes for people, rounded to three digits as in `zfs list`, and exactly.
pub(crate) fn exact(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", rounded(bytes))
}

/// A part of a whole in percent, rounded down: 100 % only if nothing is missing.
pub(crate) fn percent(part: u64, whole: u64) -> u64 {
    (u128::from(part) * 100 / u128::from(whole.max(1))) as u64
}

/// A bar whose length is to [`BAR_MAX`] as `count` is to `most`; any count but 0 has a bar.
pub(crate) fn bar(count: u64, most: u64) -> String {
    let len = (u128::from(count) * BAR_MAX as u128).div_ceil(u128::from(most.max(1)));
    "#".repeat(len as usize)
}

/// The width of the terminal that standard output is, in characters.
pub(crate) fn terminal_width() -> Option<usize> {
    if !io::stdout().is_terminal() {
        return None;
    }
    let (width, _) = ratatui::crossterm::terminal::size().ok()?;
    Some(usize::from(width)).filter(|width| *width > 0)
}

/// Prints a table whose columns that do not fit a terminal follow below. Without one, lines are as
/// long as they are, for programs that read them.
pub(crate) fn print_table(table: Table, texts: &[&str], out: &mut impl Write) -> io::Result<()> {
    match terminal_width() {
        Some(width) => table.print_within(width, texts, out),
        None => table.print(texts, out),
    }
}

/// Rows of cells with headings, the first column and those with the headings `texts` aligned to the
/// left.
pub(crate) struct Columns {
    pub(crate) headings: Vec<&'static str>,
    pub(crate) texts: &'static [&'static str],
    pub(crate) rows: Vec<Vec<String>>,
}

impl Columns {
    /// Prints the table. Of a table that is wider than `width`, the columns that `optional` names
    /// are left out, the first ones first, until it fits; other columns that do not fit follow
    /// below.
    pub(crate) fn print(
        mut self,
        optional: &[&str],
        width: Option<usize>,
        out: &mut impl Write,
    ) -> io::Result<()> {
        for heading in optional {
            if width.is_none_or(|width| self.width() <= width) {
                break;
            }
            if let Some(at) = self.headings.iter().position(|it| it == heading) {
                self.headings.remove(at);
                self.rows.iter_mut().for_each(|row| _ = row.remove(at));
            }
        }
        let texts = self.texts;
        match width {
            Some(width) => self.table().print_within(width, texts, out),
            None => self.table().print(texts, out),
        }
    }

    /// Prints the table in lines that are no longer than those of the terminal, or than 80
    /// characters without one; columns that do not fit follow below.
    pub(crate) fn print_wrapped(self, out: &mut impl Write) -> io::Result<()> {
        let texts = self.texts;
        self.table().print_within(terminal_width().unwrap_or(WIDTH), texts, out)
    }

    fn table(self) -> Table {
        let mut table = Table::new(self.headings);
        self.rows.into_iter().for_each(|row| table.row(row));
        table
    }

    /// Prints the rows alone, aligned.
    pub(crate) fn print_aligned(self, out: &mut impl Write) -> io::Result<()> {
        let mut lines = Vec::new();
        let texts = self.texts;
        self.table().print(texts, &mut lines)?;
        let end = lines.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        out.write_all(&lines[end..])
    }

    /// Prints the rows alone, with a tab between cells, for scripts.
    pub(crate) fn print_bare(&self, out: &mut impl Write) -> io::Result<()> {
        self.rows.iter().try_for_each(|row| writeln!(out, "{}", row.join("\t")))
    }

    /// The width of the table, with two spaces between columns.
    fn width(&self) -> usize {
        let of = |(at, heading): (usize, &&str)| {
            let cells = self.rows.iter().map(|row| row[at].chars().count());
            cells.chain([heading.chars().count()]).max().unwrap_or(0)
        };
        let columns = self.headings.iter().enumerate().map(of);
        columns.sum::<usize>() + 2 * self.headings.len().saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits_and_a_unit() {
        for (bytes, want) in [
            (0, "0"),
            (512, "512"),
            (1 << 20, "1M"),
            (64 << 20, "64M"),
            (1536, "1.50k"),
            (21_388_845_056, "19.9G"),
            (123 << 30 | 1, "123G"),
            (10 << 30 | 1, "10.0G"),
            (u64::MAX, "16.0E"),
        ] {
            assert_eq!(rounded(bytes), want, "{bytes}");
        }
    }

    #[test]
    fn dates_are_those_of_date_u() {
        for (seconds, want) in [
            (0, "1970-01-01 00:00"),
            (951_782_400, "2000-02-29 00:00"),
            (951_868_799, "2000-02-29 23:59"),
            (4_107_542_400, "2100-03-01 00:00"),
            (1_796_055_600, "2026-11-30 16:20"),
        ] {
            assert_eq!(date(seconds), want, "{seconds}");
        }
    }

    #[test]
    fn shares_and_bars_have_bounds() {
        assert_eq!((percent(0, 0), percent(999, 1000), percent(u64::MAX, u64::MAX)), (0, 99, 100));
        assert_eq!((bar(0, 9).len(), bar(1, 1 << 40).len(), bar(9, 9).len()), (0, 1, BAR_MAX));
    }

    #[test]
    fn a_table_that_is_too_wide_loses_columns_in_order() {
        let print = |width| {
            let headings = vec!["NAME", "USED", "ORIGIN", "CREATED"];
            let row = ["v0", "1M", "a@b", "today"].map(str::to_owned).to_vec();
            let mut out = Vec::new();
            let columns = Columns { headings, texts: &["ORIGIN", "CREATED"], rows: vec![row] };
            columns.print(&["CREATED", "ORIGIN"], width, &mut out).unwrap();
            String::from_utf8(out).unwrap().lines().next().unwrap().to_owned()
        };
        assert_eq!(print(None), "NAME  USED  ORIGIN  CREATED");
        assert_eq!(print(Some(27)), "NAME  USED  ORIGIN  CREATED");
        assert_eq!(print(Some(26)), "NAME  USED  ORIGIN");
        assert_eq!(print(Some(10)), "NAME  USED");
    }
}
