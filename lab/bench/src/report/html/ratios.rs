//! The comparisons of the page: each ratio with its interval, drawn on a common scale.

use super::{escaped, number, push};
use crate::report::view::{NO_FIGURE, Section, has_figure, heading};
use crate::results::Ratio;
use crate::stats::{AimState, ComparisonVerdict};

/// The optional columns, left out if they would be empty.
#[derive(Clone, Copy)]
struct Columns {
    published: bool,
    aims: bool,
    limits: bool,
}

/// The table of an experiment's comparisons.
pub(super) fn ratios(page: &mut String, section: &Section<'_>) {
    let ratios: Vec<(usize, &Ratio)> = section.ratios().collect();
    if ratios.is_empty() {
        return;
    }
    let figures = ratios.iter().filter(|(_, ratio)| has_figure(ratio));
    let ends = figures.flat_map(|(_, ratio)| [ratio.low, ratio.high]);
    let scale = ends.fold(1.0_f64, |most, end| most.max(end.max(end.recip())));
    let has = |of: &dyn Fn(&Ratio) -> bool| ratios.iter().any(|(_, ratio)| of(ratio));
    let columns = Columns {
        published: has(&|ratio| ratio.published.is_some()),
        aims: has(&|ratio| ratio.aim.is_some()),
        limits: has(&|ratio| limited_by(section, ratio).is_some()),
    };
    page.push_str(
        "<h3>What it says</h3>\n<p class=\"soft\">How many times better the first is than the \
         second; above 1 it is better. The bar is the 95&nbsp;% confidence interval, the line \
         is 1.</p>\n\
         <div class=\"wide\"><table>\n<tr><th>workload</th><th class=\"number\">jobs</th>\
         <th>compared</th><th>by</th><th class=\"number\">ratio</th><th>interval</th><th></th>\
         <th>verdict</th>",
    );
    let optional = [
        (columns.published, "<th class=\"number\">published</th>"),
        (columns.aims, "<th>aim</th>"),
        (columns.limits, "<th>limited by</th>"),
    ];
    page.extend(optional.iter().filter(|(is_shown, _)| *is_shown).map(|(_, heading)| *heading));
    page.push_str("</tr>\n");
    for (at, ratio) in ratios {
        row(page, section, at, ratio, scale, columns);
    }
    page.push_str("</table></div>\n");
}

/// The limit of the variant that is compared with the reference.
fn limited_by<'a>(section: &Section<'a>, ratio: &Ratio) -> Option<&'a str> {
    section.limited_by(&ratio.after, &ratio.workload, ratio.jobs)
}

fn row(
    page: &mut String,
    section: &Section<'_>,
    at: usize,
    ratio: &Ratio,
    scale: f64,
    columns: Columns,
) {
    let path = |field: &str| format!("/runs/{}/ratios/{at}/{field}", section.run);
    let times = |field: &str, value: f64| number(&path(field), value, "ratio");
    let (median, spread, bar) = match has_figure(ratio) {
        true => (
            times("median", ratio.median),
            format!("{} to {}", times("low", ratio.low), times("high", ratio.high)),
            interval(ratio, scale),
        ),
        false => (NO_FIGURE.to_owned(), String::new(), String::new()),
    };
    let (class, verdict) = match ratio.verdict {
        ComparisonVerdict::Faster => ("faster", "better"),
        ComparisonVerdict::Slower => ("slower", "worse"),
        _ => ("even", ratio.verdict.name()),
    };
    let cost = ratio.cost.map(|cost| number(&path("cost"), cost, &ratio.unit));
    let verdict = cost.map_or(verdict.to_owned(), |cost| format!("costs {cost}"));
    push(
        page,
        format_args!(
            "<tr><td>{}</td><td class=\"number\">{}</td><td>{} to {}</td><td>{}</td>\
             <td class=\"number\">{median}</td><td class=\"spread\">{spread}</td>\
             <td class=\"{class}\">{bar}</td>\
             <td><span class=\"badge {class}\">{verdict}</span></td>",
            escaped(&ratio.workload),
            number(&path("jobs"), f64::from(ratio.jobs), "count"),
            escaped(&ratio.after),
            escaped(&ratio.before),
            escaped(&heading(&ratio.metric)),
        ),
    );
    if columns.published {
        let published = ratio.published.map(|value| times("published", value));
        push(page, format_args!("<td class=\"number\">{}</td>", published.unwrap_or_default()));
    }
    if columns.aims {
        let aim = match (ratio.aim, ratio.aim_state) {
            (Some(aim), Some(state)) => {
                let word = state.name();
                let class = match state {
                    AimState::Met => "met",
                    AimState::NotMet => "not-met",
                    AimState::Open => "even",
                };
                format!("{} <span class=\"badge {class}\">{word}</span>", times("aim", aim))
            }
            _ => String::new(),
        };
        push(page, format_args!("<td>{aim}</td>"));
    }
    if columns.limits {
        let limit = escaped(limited_by(section, ratio).unwrap_or_default());
        push(page, format_args!("<td>{limit}</td>"));
    }
    page.push_str("</tr>\n");
}

/// An interval on a logarithmic scale with 1 in the middle.
fn interval(ratio: &Ratio, scale: f64) -> String {
    let place = |value: f64| 50.0 + 48.0 * value.ln() / (scale * 1.02).ln();
    let (low, middle, high) = (place(ratio.low), place(ratio.median), place(ratio.high));
    let width = high - low;
    format!(
        "<span class=\"interval\"><u style=\"left:50%\"></u>\
         <i style=\"left:{low:.1}%;width:{width:.1}%\"></i>\
         <b style=\"left:{middle:.1}%\"></b></span>"
    )
}
