//! The report as one page of HTML that needs no network.
//!
//! The page contains the results as JSON. Every number in its tables has the JSON pointer of its
//! value (`data-path`), so that a test can compare the two; the script draws its plots from the
//! same JSON. Tables and bars do not need the script.

mod bars;
mod figures;
mod ratios;
mod tables;

use std::fmt::Write;

use crate::quantity;
use crate::report::view::{self, Section};
use crate::results::Results;

const UPLOT_CSS: &str = include_str!("../../../../crates/yard/assets/uplot/uPlot-1.6.32.min.css");
const UPLOT_JS: &str =
    include_str!("../../../../crates/yard/assets/uplot/uPlot-1.6.32.iife.min.js");
const UPLOT_LICENCE: &str =
    include_str!("../../../../crates/yard/assets/uplot/uPlot-1.6.32.LICENSE");
const PAGE_CSS: &str = include_str!("../../assets/page.css");
const PAGE_JS: &str = include_str!("../../assets/page.js");

/// The page of some runs.
///
/// # Errors
/// If the results cannot be written as JSON.
pub fn page(runs: &[Results]) -> Result<String, serde_json::Error> {
    let sections = Section::all(runs);
    let mut body = String::new();
    header(&mut body, runs, &sections);
    body.push_str("<main>\n");
    tables::runs(&mut body, runs);
    for section in &sections {
        experiment(&mut body, section);
    }
    body.push_str("</main>\n");
    body.push_str(
        "<footer><p>Plots by uPlot 1.6.32, MIT licence; its text is in the page's source. The \
         results that all of this was made from are in the page, as JSON, in the element \
         <code>results</code>.</p></footer>\n",
    );
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Blockyard lab</title>\n<style>{UPLOT_CSS}</style>\n<style>{PAGE_CSS}</style>\n\
         </head>\n<body>\n{body}\
         <script type=\"application/json\" id=\"results\">{}</script>\n\
         <!--\nuPlot 1.6.32\n{UPLOT_LICENCE}\n-->\n<script>{UPLOT_JS}</script>\n\
         <script>{PAGE_JS}</script>\n</body>\n</html>\n",
        embedded(runs)?,
    ))
}

/// The results as the page contains them, without a sequence that ends a script element.
fn embedded(runs: &[Results]) -> Result<String, serde_json::Error> {
    let json = serde_json::to_string(&serde_json::json!({ "runs": runs }))?;
    Ok(json.replace('<', "\\u003c"))
}

fn header(page: &mut String, runs: &[Results], sections: &[Section<'_>]) {
    let when: Vec<&str> = runs.iter().map(|run| run.started.as_str()).collect();
    let when = when.iter().max().copied().unwrap_or_default();
    let program = runs.first().map_or("", |run| &run.program);
    let (program, when) = (escaped(program), escaped(when));
    push(page, format_args!("<header>\n<h1>Blockyard lab</h1>\n"));
    push(page, format_args!("<p class=\"soft\">{program}, {when}</p>\n<nav>"));
    push(page, format_args!("<a href=\"#runs\">runs</a>"));
    for section in sections {
        let (id, name) = (id(section), escaped(&section.info.name));
        push(page, format_args!(" <a href=\"#{id}\">{name}</a>"));
    }
    page.push_str("</nav>\n</header>\n");
}

fn experiment(page: &mut String, section: &Section<'_>) {
    let (info, results) = (section.info, section.results);
    let (id, name) = (id(section), escaped(&info.name));
    push(page, format_args!("<section id=\"{id}\">\n<h2>{name}: {}</h2>\n", escaped(&info.title)));
    push(page, format_args!("<p>{}</p>\n", escaped(&info.about)));
    let (rounds, seconds) = (info.rounds, quantity::quantity(info.seconds * 1e9, "ns"));
    push(page, format_args!("<p class=\"soft\">{rounds} rounds, {seconds} each"));
    let marks = [
        (results.quick, "a first look"),
        (!results.only.is_empty(), "only some of its cells"),
        (info.interrupted, "interrupted"),
    ];
    for (is, mark) in marks {
        if is {
            push(page, format_args!(" <span class=\"badge mark\">{mark}</span>"));
        }
    }
    page.push_str("</p>\n");
    if let Some(others) = section.others() {
        push(page, format_args!("<p class=\"soft\">{}</p>\n", escaped(&others)));
    }
    tables::variants(page, section);
    ratios::ratios(page, section);
    figures::figures(page, section);
    for grid in section.grids() {
        tables::grid(page, section, &grid);
    }
    tables::fractions(page, section);
    tables::rooms(page, section);
    tables::not_measured(page, section);
    tables::notes(page, section);
    page.push_str("</section>\n");
}

/// The anchor of an experiment in the page.
fn id(section: &Section<'_>) -> String {
    let name: String = section.info.name.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
    format!("run{}-{name}", section.run)
}

/// The colour of a variant, as a CSS value.
fn colour(section: &Section<'_>, variant: &str) -> String {
    let at = section.info.variants.iter().position(|other| other.name == variant);
    format!("var(--series-{})", at.unwrap_or(0) % 8)
}

/// A number with the JSON pointer of its value.
fn number(path: &str, value: f64, unit: &str) -> String {
    let unit_text = escaped(unit);
    let text = escaped(&shown(value, unit));
    format!("<span data-path=\"{path}\" data-unit=\"{unit_text}\">{text}</span>")
}

/// A value as the page shows it. `unit` is a unit, or one of `ratio`, `count`, `percent` and
/// `deviation`.
pub(crate) fn shown(value: f64, unit: &str) -> String {
    match unit {
        "ratio" => quantity::ratio(value),
        "count" => quantity::count(value as u64),
        "percent" => view::percent(value),
        "deviation" => format!("{:+.1} %", value * 100.0),
        unit => quantity::quantity(value, unit),
    }
}

/// Text with escaped markup, for an element or an attribute.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Writes into a string, which cannot fail.
fn push(page: &mut String, text: std::fmt::Arguments<'_>) {
    page.write_fmt(text).expect("a string takes all");
}
