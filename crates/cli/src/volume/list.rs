//! `volume list`: the volumes and snapshots of pools, with the columns and options of `zfs list`.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::io::Write;

use blockyard_yard::size::Bytes;
use blockyard_yard::volumes::{HoldView, VolumeView};
use serde::Serialize;
use serde_json::json;

use super::pool::ReadOnlyAccess;
use super::shown;
use crate::args::{ListedKind, PoolsArgs, VolumeHoldsArgs, VolumeListArgs, VolumePoolArgs};
use crate::devices::{client, print_json};
use crate::failure::{Code, Failure};
use crate::human::{Columns, date, rounded, terminal_width};

/// A volume or snapshot in JSON.
#[derive(Serialize)]
struct ListedVolume<'r> {
    /// The path of its pool, as the column has it.
    pool: &'r str,
    #[serde(flatten)]
    view: &'r VolumeView,
}

impl ListedVolume<'_> {
    fn of(row: &ListRow) -> ListedVolume<'_> {
        ListedVolume { pool: &row.pool, view: &row.view }
    }
}

/// What a cell shows.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ListCell {
    /// There is nothing to show.
    None,
    Text(String),
    /// A size in bytes.
    Bytes(u64),
    Count(u64),
    /// Seconds since 1970.
    Time(u64),
    /// Hundredths.
    Ratio(u64),
}

impl ListCell {
    fn bytes(bytes: Option<u64>) -> ListCell {
        bytes.map_or(ListCell::None, ListCell::Bytes)
    }

    fn text(text: Option<&str>) -> ListCell {
        text.map_or(ListCell::None, |text| ListCell::Text(text.to_owned()))
    }

    fn print(&self, exactly: bool) -> String {
        match self {
            ListCell::None => "-".to_owned(),
            ListCell::Text(text) => text.clone(),
            ListCell::Bytes(number) | ListCell::Time(number) if exactly => number.to_string(),
            ListCell::Bytes(bytes) => rounded(*bytes),
            ListCell::Count(count) => count.to_string(),
            ListCell::Time(seconds) => date(*seconds),
            ListCell::Ratio(ratio) if exactly => format!("{}.{:02}", ratio / 100, ratio % 100),
            ListCell::Ratio(ratio) => format!("{}.{:02}x", ratio / 100, ratio % 100),
        }
    }

    fn compare(&self, other: &ListCell) -> Ordering {
        let number = |cell: &ListCell| match cell {
            ListCell::Bytes(number) | ListCell::Count(number) | ListCell::Time(number) => {
                Some(*number)
            }
            ListCell::Ratio(number) => Some(*number),
            ListCell::None | ListCell::Text(_) => None,
        };
        match (self, other) {
            (ListCell::Text(one), ListCell::Text(other)) => one.cmp(other),
            // Cells without a value come first.
            _ => number(self).cmp(&number(other)),
        }
    }
}

/// A volume or snapshot, and its pool.
struct ListRow {
    pool: String,
    view: VolumeView,
    /// How deep it is in the tree of clones.
    depth: usize,
}

/// A column: its name for `-o` and `-s`, other names of it, and its cells.
struct Column {
    name: &'static str,
    others: &'static [&'static str],
    heading: &'static str,
    cell: fn(&ListRow) -> ListCell,
}

/// The columns that are shown without `-o`.
const USUAL: [&str; 7] = ["name", "used", "refer", "avail", "size", "origin", "created"];

/// The columns of `-o space`.
const SPACE: [&str; 6] = ["name", "avail", "used", "usedsnap", "usedds", "usedrefreserv"];

/// The usual columns that a terminal that is too narrow does not show, the first ones first.
const OPTIONAL: [&str; 4] = ["CREATED", "ORIGIN", "SIZE", "AVAIL"];

const COLUMNS: [Column; 18] = [
    Column {
        name: "name",
        others: &[],
        heading: "NAME",
        cell: |it| ListCell::Text(it.view.name.clone()),
    },
    Column {
        name: "pool",
        others: &[],
        heading: "POOL",
        cell: |it| ListCell::Text(it.pool.clone()),
    },
    Column {
        name: "type",
        others: &[],
        heading: "TYPE",
        cell: |it| ListCell::Text(if it.view.snapshot { "snapshot" } else { "volume" }.to_owned()),
    },
    Column {
        name: "used",
        others: &[],
        heading: "USED",
        cell: |it| ListCell::bytes(it.view.used_bytes),
    },
    Column {
        name: "refer",
        others: &["referenced"],
        heading: "REFER",
        cell: |it| ListCell::bytes(it.view.stored_bytes),
    },
    Column {
        name: "avail",
        others: &["available"],
        heading: "AVAIL",
        cell: |it| ListCell::bytes(it.view.available_bytes),
    },
    Column {
        name: "size",
        others: &["volsize"],
        heading: "SIZE",
        cell: |it| ListCell::Bytes(it.view.size_bytes),
    },
    Column {
        name: "origin",
        others: &[],
        heading: "ORIGIN",
        cell: |it| ListCell::text(it.view.origin.as_deref()),
    },
    Column {
        name: "created",
        others: &["creation"],
        heading: "CREATED",
        cell: |it| it.view.created.map_or(ListCell::None, ListCell::Time),
    },
    Column {
        name: "volblocksize",
        others: &["volblock"],
        heading: "VOLBLOCKSIZE",
        cell: |it| ListCell::Bytes(it.view.volblocksize_bytes.into()),
    },
    Column {
        name: "reserv",
        others: &["reservation", "refreservation", "refreserv"],
        heading: "RESERV",
        cell: |it| ListCell::bytes(Some(it.view.reservation_bytes).filter(|_| !it.view.snapshot)),
    },
    Column {
        name: "device",
        others: &[],
        heading: "DEVICE",
        cell: |it| ListCell::Text(if it.view.in_use { "yes" } else { "no" }.to_owned()),
    },
    Column {
        name: "usedsnap",
        others: &["usedbysnapshots"],
        heading: "USEDSNAP",
        cell: |it| ListCell::bytes(it.view.snapshots_bytes),
    },
    Column {
        name: "usedds",
        others: &["usedbydataset"],
        heading: "USEDDS",
        cell: |it| ListCell::bytes(used_by_volume(&it.view)),
    },
    Column {
        name: "usedrefreserv",
        others: &["usedbyrefreservation"],
        heading: "USEDREFRESERV",
        cell: |it| ListCell::bytes(it.view.unused_reservation_bytes),
    },
    Column {
        name: "lrefer",
        others: &["logicalreferenced"],
        heading: "LREFER",
        cell: |it| ListCell::bytes(it.view.referenced_bytes),
    },
    Column {
        name: "ratio",
        others: &["refratio", "refcompressratio", "compressratio"],
        heading: "RATIO",
        cell: |it| ratio(&it.view),
    },
    Column {
        name: "holds",
        others: &["userrefs"],
        heading: "HOLDS",
        cell: |it| match it.view.snapshot {
            true => ListCell::Count(it.view.holds.len() as u64),
            false => ListCell::None,
        },
    },
];

/// The part of the used bytes of a volume that it refers to itself.
fn used_by_volume(view: &VolumeView) -> Option<u64> {
    let (snapshots, unused) = (view.snapshots_bytes?, view.unused_reservation_bytes?);
    Some(view.used_bytes?.saturating_sub(snapshots).saturating_sub(unused))
}

/// The length before compression to the stored length.
fn ratio(view: &VolumeView) -> ListCell {
    match (view.referenced_bytes, view.stored_bytes) {
        (Some(plain), Some(stored)) => {
            let ratio = (u128::from(plain) * 100).checked_div(u128::from(stored)).unwrap_or(100);
            ListCell::Ratio(ratio as u64)
        }
        _ => ListCell::None,
    }
}

/// The column of this name.
fn column(option: &str, name: &str) -> Result<&'static Column, Failure> {
    let is_it = |it: &&Column| it.name == name || it.others.contains(&name);
    COLUMNS.iter().find(is_it).ok_or_else(|| {
        let known: Vec<&str> = COLUMNS.iter().map(|it| it.name).collect();
        let also = if option == "-o" { "; or `space` or `all` for several" } else { "" };
        let known = known.join(", ");
        let text = format!("invalid {option} `{name}`: expected one of {known}{also}");
        Failure::new(Code::Usage, text)
    })
}

/// The columns that are to be shown.
fn columns(args: &VolumeListArgs, pools: usize) -> Result<Vec<&'static Column>, Failure> {
    if args.output.is_empty() {
        let pool = if pools > 1 { &["pool"][..] } else { &[] };
        return USUAL.iter().chain(pool).map(|name| column("-o", name)).collect();
    }
    let mut all = Vec::new();
    for name in &args.output {
        match name.as_str() {
            "space" => all.extend(SPACE),
            "all" => all.extend(COLUMNS.iter().map(|it| it.name)),
            name => all.push(name),
        }
    }
    all.into_iter().map(|name| column("-o", name)).collect()
}

pub(super) fn list(args: &VolumeListArgs, out: &mut impl Write) -> Result<(), Failure> {
    // Wrong names of columns are refused before anything is counted.
    let orders = orders(args)?;
    columns(args, 1)?;
    let pools = pools(&args.pools)?;
    let count = pools.len();
    let mut rows = Vec::new();
    for (pool, access) in pools {
        for copy in access.copies().iter().filter(|copy| !copy.good) {
            eprintln!("blockyard: {}", shown(copy));
        }
        let views = access.volumes(None)?;
        if views.iter().any(|view| view.used_bytes.is_none()) {
            eprintln!("blockyard: {pool}: a page of a map cannot be read; sizes are missing");
        }
        rows.extend(views.into_iter().map(|view| ListRow { pool: pool.clone(), view, depth: 0 }));
    }
    sort(&mut rows, &orders);
    if args.recursive {
        rows = tree(rows);
    }
    rows.retain(|row| args.kinds.is_empty() || args.kinds.iter().any(|it| it.has(&row.view)));
    if args.pools.talk.json {
        let views: Vec<_> = rows.iter().map(ListedVolume::of).collect();
        return print_json(&views, out);
    }
    let columns = columns(args, count)?;
    let cells = |row: &ListRow| {
        let cell = |column: &&Column| {
            let cell = (column.cell)(row).print(args.script.parsable);
            match column.name {
                "name" if !args.script.scripted => format!("{}{cell}", "  ".repeat(row.depth)),
                _ => cell,
            }
        };
        columns.iter().map(cell).collect()
    };
    let headings = columns.iter().map(|it| it.heading).collect();
    let texts = &["POOL", "TYPE", "ORIGIN", "CREATED", "DEVICE"];
    let table = Columns { headings, texts, rows: rows.iter().map(cells).collect() };
    if args.script.scripted {
        return Ok(table.print_bare(out)?);
    }
    // Columns that were asked for are all shown.
    let width = terminal_width().filter(|_| args.output.is_empty());
    Ok(table.print(&OPTIONAL, width, out)?)
}

/// The pools that are named, or all that the yard has open.
fn pools(args: &PoolsArgs) -> Result<Vec<(String, ReadOnlyAccess)>, Failure> {
    let named = |pool: &std::path::PathBuf| {
        let (degraded, talk) = (args.degraded, args.talk.clone());
        let named = VolumePoolArgs { pool: pool.clone(), degraded, take_over: false, talk };
        let access = ReadOnlyAccess::find(&named)?;
        Ok((pool.display().to_string(), access))
    };
    if !args.pools.is_empty() {
        return args.pools.iter().map(named).collect();
    }
    let pools = client(&args.talk).pools()?.into_iter();
    let open = pools.map(|pool| {
        let access = ReadOnlyAccess::There(client(&args.talk), pool.path.clone().into());
        (pool.path, access)
    });
    Ok(open.collect())
}

/// The columns to sort by, and whether in descending order.
fn orders(args: &VolumeListArgs) -> Result<Vec<(&'static Column, bool)>, Failure> {
    let up = args.sort.iter().map(|name| Ok((column("-s", name)?, false)));
    up.chain(args.sort_down.iter().map(|name| Ok((column("-S", name)?, true)))).collect()
}

/// Sorts by these columns, and by pool and name otherwise: the snapshots of a volume follow it in
/// the order in which they were created.
fn sort(rows: &mut [ListRow], orders: &[(&'static Column, bool)]) {
    let volume = |row: &ListRow| row.view.name.split('@').next().unwrap_or_default().to_owned();
    // The sort is stable, and each pool lists its volumes and snapshots in order of creation.
    rows.sort_by_cached_key(|row| (row.pool.clone(), volume(row), row.view.snapshot));
    for (column, is_down) in orders.iter().rev() {
        rows.sort_by(|one, other| {
            let order = (column.cell)(one).compare(&(column.cell)(other));
            if *is_down { order.reverse() } else { order }
        });
    }
}

/// Orders rows as a tree: under each volume its snapshots, under each snapshot its clones.
fn tree(rows: Vec<ListRow>) -> Vec<ListRow> {
    let names: HashMap<(&str, &str), usize> = (0..)
        .zip(&rows)
        .map(|(at, row)| ((row.pool.as_str(), row.view.name.as_str()), at))
        .collect();
    let mut below: HashMap<usize, Vec<usize>> = HashMap::new();
    let mut tops = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        let above = match row.view.name.split_once('@') {
            Some((volume, _)) => Some(volume),
            None => row.view.origin.as_deref(),
        };
        match above.and_then(|above| names.get(&(row.pool.as_str(), above))) {
            Some(above) => below.entry(*above).or_default().push(at),
            None => tops.push(at),
        }
    }
    let mut order = Vec::new();
    let mut next: Vec<(usize, usize)> = tops.into_iter().rev().map(|at| (at, 0)).collect();
    while let Some((at, depth)) = next.pop() {
        order.push((at, depth));
        let under = below.remove(&at).unwrap_or_default();
        next.extend(under.into_iter().rev().map(|at| (at, depth + 1)));
    }
    let mut rows: Vec<Option<ListRow>> = rows.into_iter().map(Some).collect();
    let take = |(at, depth): (usize, usize)| rows[at].take().map(|row| ListRow { depth, ..row });
    order.into_iter().filter_map(take).collect()
}

impl ListedKind {
    fn has(self, view: &VolumeView) -> bool {
        match self {
            ListedKind::All => true,
            ListedKind::Volume => !view.snapshot,
            ListedKind::Snapshot => view.snapshot,
        }
    }
}

/// Prints the holds of a snapshot, or of all snapshots of a pool, with the columns of `zfs holds`.
pub(super) fn holds(args: &VolumeHoldsArgs, out: &mut impl Write) -> Result<(), Failure> {
    let views = ReadOnlyAccess::find(&args.pool)?.volumes(args.name.as_deref())?;
    if args.pool.talk.json {
        let of = |view: &VolumeView| json!({ "name": view.name, "holds": view.holds });
        let held = views.iter().filter(|view| !view.holds.is_empty());
        return print_json(&held.map(of).collect::<Vec<_>>(), out);
    }
    let rows = views.iter().flat_map(|view| {
        let row = |hold: &HoldView| vec![view.name.clone(), hold.tag.clone(), date(hold.created)];
        view.holds.iter().map(row)
    });
    let headings = vec!["NAME", "TAG", "CREATED"];
    let table = Columns { headings, texts: &["TAG", "CREATED"], rows: rows.collect() };
    Ok(table.print(&["CREATED"], terminal_width(), out)?)
}

/// The exact block size of a volume: `16k`.
pub(super) fn block_size(view: &VolumeView) -> String {
    Bytes(view.volblocksize_bytes.into()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, origin: Option<&str>, used: u64) -> ListRow {
        let view = VolumeView {
            name: name.to_owned(),
            snapshot: name.contains('@'),
            origin: origin.map(str::to_owned),
            used_bytes: Some(used),
            ..VolumeView::default()
        };
        ListRow { pool: "/p".to_owned(), view, depth: 0 }
    }

    fn rows() -> Vec<ListRow> {
        vec![
            row("v0", None, 5),
            row("v0@b", None, 1),
            row("v0@a", None, 2),
            row("try", Some("v0@b"), 3),
            row("try@x", None, 0),
            row("lone", Some("v9@gone"), 9),
        ]
    }

    fn names(rows: &[ListRow]) -> Vec<(&str, usize)> {
        rows.iter().map(|row| (row.view.name.as_str(), row.depth)).collect()
    }

    #[test]
    fn a_tree_has_clones_under_their_origin() {
        let mut all = rows();
        sort(&mut all, &[]);
        let flat = ["lone", "try", "try@x", "v0", "v0@b", "v0@a"].map(|name| (name, 0));
        assert_eq!(names(&all), flat);
        let tree = tree(all);
        let wanted = [("lone", 0), ("v0", 0), ("v0@b", 1), ("try", 2), ("try@x", 3), ("v0@a", 1)];
        assert_eq!(names(&tree), wanted);
    }

    #[test]
    fn rows_are_sorted_by_the_first_column_first() {
        let mut all = rows();
        sort(
            &mut all,
            &[(column("-s", "type").unwrap(), true), (column("-s", "used").unwrap(), false)],
        );
        let wanted = ["try", "v0", "lone", "try@x", "v0@b", "v0@a"].map(|name| (name, 0));
        assert_eq!(names(&all), wanted);
        let Err(Failure::Said(_, error)) = column("-s", "x") else { panic!("it is known") };
        assert!(error.starts_with("invalid -s `x`: expected one of name, pool, "), "{error}");
    }

    #[test]
    fn cells_are_for_people_or_exact() {
        let print = |cell: ListCell| (cell.print(false), cell.print(true));
        let both = |one: &str, other: &str| (one.to_owned(), other.to_owned());
        assert_eq!(print(ListCell::Bytes(1536)), both("1.50k", "1536"));
        assert_eq!(print(ListCell::Time(60)), both("1970-01-01 00:01", "60"));
        assert_eq!(print(ListCell::Ratio(205)), both("2.05x", "2.05"));
        assert_eq!(print(ListCell::None), both("-", "-"));
    }
}
