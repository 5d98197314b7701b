//! `top` on a terminal: a summary, a page with a sorted table, and the keys.

use std::cmp::Ordering;
use std::time::Duration;

use blockyard_yard::activity::Activity;
use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, Tabs};

use super::DELAYS;
use super::pages::{TopCell, TopPage, summary};

const KEYS: &str = "1-5 or Tab: page   < >: sort   r: reverse   up, down: scroll   + -: interval   \
                    p: pause   q: quit";

/// The state of the screen.
#[derive(Debug)]
pub(crate) struct Screen {
    activity: Activity,
    /// The time between two samples.
    pub(crate) delay: Duration,
    pub(crate) is_paused: bool,
    /// Why the last sample failed.
    pub(crate) error: Option<String>,
    page: TopPage,
    /// The column by which each page is sorted; in the yard's order without one.
    sorted_by: [Option<usize>; TopPage::ALL.len()],
    is_reversed: bool,
    /// The first row that is shown.
    top: usize,
}

impl Screen {
    pub(crate) fn new(activity: Activity, delay: Duration) -> Screen {
        Screen {
            activity,
            delay,
            is_paused: false,
            error: None,
            page: TopPage::Devices,
            sorted_by: [None; TopPage::ALL.len()],
            is_reversed: false,
            top: 0,
        }
    }

    /// Whether the page of zones is shown.
    pub(crate) fn shows_zones(&self) -> bool {
        self.page == TopPage::Zones
    }

    /// Whether the page of zones is shown and no sample has had zones yet.
    pub(crate) fn lacks_zones(&self) -> bool {
        self.shows_zones() && self.activity.zones.is_empty()
    }

    /// Shows a new activity.
    pub(crate) fn update(&mut self, activity: Activity) {
        (self.activity, self.error) = (activity, None);
    }

    /// Does what a key asks for; `false` if it ends the program.
    pub(crate) fn press(&mut self, key: KeyEvent) -> bool {
        let columns = self.page.headings().len();
        let sorted_by = &mut self.sorted_by[self.page as usize];
        let at = self.page as usize;
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Char('>' | '.') | KeyCode::Right => {
                *sorted_by = match *sorted_by {
                    None => Some(0),
                    Some(column) => Some(column + 1).filter(|column| *column < columns),
                };
            }
            KeyCode::Char('<' | ',') | KeyCode::Left => {
                *sorted_by = match *sorted_by {
                    None => Some(columns - 1),
                    Some(column) => column.checked_sub(1),
                };
            }
            KeyCode::Char('+') => self.delay = (self.delay * 2).min(*DELAYS.end()),
            KeyCode::Char('-') => self.delay = (self.delay / 2).max(*DELAYS.start()),
            KeyCode::Down => self.top += 1,
            KeyCode::Up => self.top = self.top.saturating_sub(1),
            KeyCode::Tab => self.turn_to(TopPage::ALL[(at + 1) % TopPage::ALL.len()]),
            KeyCode::BackTab => {
                self.turn_to(TopPage::ALL[(at + TopPage::ALL.len() - 1) % TopPage::ALL.len()]);
            }
            KeyCode::Char(digit @ '1'..='5') => {
                self.turn_to(TopPage::ALL[digit as usize - '1' as usize]);
            }
            _ => {}
        }
        true
    }

    fn turn_to(&mut self, page: TopPage) {
        (self.page, self.top) = (page, 0);
    }

    /// The rows of the page in the order that the user has chosen: numbers from the greatest, text
    /// from A to Z, unless reversed.
    fn rows(&self) -> Vec<Vec<TopCell>> {
        let mut rows = self.page.rows(&self.activity);
        if let Some(column) = self.sorted_by[self.page as usize] {
            rows.sort_by(|a, b| in_order(&a[column], &b[column]));
        }
        if self.is_reversed {
            rows.reverse();
        }
        rows
    }

    /// Draws everything.
    pub(crate) fn draw(&mut self, frame: &mut Frame<'_>) {
        let lines = [1, 1, 1, 0, 1].map(|lines| match lines {
            0 => Constraint::Min(1),
            lines => Constraint::Length(lines),
        });
        let [head, tabs, state, body, keys] = Layout::vertical(lines).areas(frame.area());
        frame.render_widget(Paragraph::new(summary(&self.activity)), head);
        let titles = (1..).zip(TopPage::ALL).map(|(key, page)| format!("{key} {}", page.title()));
        let chosen = Style::new().add_modifier(Modifier::REVERSED);
        let titles = Tabs::new(titles).select(self.page as usize).highlight_style(chosen);
        frame.render_widget(titles, tabs);
        let message = match (&self.error, self.is_paused) {
            (Some(error), _) => Line::styled(error.clone(), Style::new().fg(Color::Red)),
            (None, true) => Line::from("paused"),
            (None, false) => Line::from(format!("every {} s", self.delay.as_secs_f64())),
        };
        frame.render_widget(Paragraph::new(message), state);
        frame.render_widget(Paragraph::new(KEYS), keys);
        let rows = self.rows();
        let shown = usize::from(body.height).saturating_sub(1);
        self.top = self.top.min(rows.len().saturating_sub(shown));
        let table = self.table(&rows[self.top..]);
        frame.render_widget(table, body);
    }

    fn table(&self, rows: &[Vec<TopCell>]) -> Table<'static> {
        let (headings, text_columns) = (self.page.headings(), self.page.text_columns());
        let sorted_by = self.sorted_by[self.page as usize];
        let align = |column: usize, text: String| match column < text_columns {
            true => Text::from(text),
            false => Text::from(text).right_aligned(),
        };
        let width = |column: usize| {
            let cells = rows.iter().map(|row| row[column].text.chars().count());
            let longest = cells.chain([headings[column].chars().count()]).max().unwrap_or(0);
            Constraint::Length(longest as u16)
        };
        let widths: Vec<_> = (0..headings.len()).map(width).collect();
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let head = headings.iter().enumerate().map(|(column, heading)| {
            let cell = Cell::from(align(column, (*heading).to_owned()));
            match sorted_by == Some(column) {
                true => cell.style(bold.add_modifier(Modifier::REVERSED)),
                false => cell.style(bold),
            }
        });
        let head = Row::new(head.collect::<Vec<_>>());
        let body = rows.iter().map(|row| {
            let cells = row.iter().enumerate();
            Row::new(
                cells.map(|(column, cell)| align(column, cell.text.clone())).collect::<Vec<_>>(),
            )
        });
        Table::new(body.collect::<Vec<_>>(), widths).header(head).column_spacing(2)
    }
}

/// Numbers from the greatest, before text from A to Z.
fn in_order(a: &TopCell, b: &TopCell) -> Ordering {
    match (a.number, b.number) {
        (Some(a), Some(b)) => b.total_cmp(&a),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => a.text.cmp(&b.text),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::top::fixture::sample;

    fn screen() -> Screen {
        let mut after = sample(12, 1);
        let mut other = after.stats[0].clone();
        other.device = "busy".to_owned();
        other.ops.get_mut("read").unwrap().ops = 5000;
        other.age_ns = 2_000_000_000;
        after.stats.insert(0, other);
        Screen::new(Activity::new(&sample(10, 1), &after), Duration::from_secs(1))
    }

    fn drawn(screen: &mut Screen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn press(screen: &mut Screen, key: char) -> bool {
        screen.press(KeyEvent::from(KeyCode::Char(key)))
    }

    #[test]
    fn the_screen_has_a_summary_the_pages_a_table_and_the_keys() {
        let lines = drawn(&mut screen(), 110, 8);
        assert_eq!(
            lines[0],
            "pid 1   2.60k IOPS   CPU 50%   192.3us of CPU per I/O   memory 20.0M"
        );
        assert_eq!(lines[1], " 1 Devices │ 2 Zones │ 3 RAM disks │ 4 Pools │ 5 Clients");
        assert_eq!(lines[2], "every 1 s");
        assert!(lines[3].starts_with("DEVICE    r/s  w/s  rMB/s  wMB/s  r_await"), "{}", lines[3]);
        assert!(lines[4].starts_with("busy    2.50k    0"), "{}", lines[4]);
        assert!(lines[5].starts_with("d         100    0"), "{}", lines[5]);
        assert!(lines[7].contains("q: quit"), "{}", lines[7]);
    }

    #[test]
    fn keys_sort_and_turn_pages() {
        let mut screen = screen();
        for _ in 0..2 {
            assert!(press(&mut screen, '>'));
        }
        assert_eq!(screen.rows()[0][0].text, "busy", "sorted by reads");
        press(&mut screen, 'r');
        assert_eq!(screen.rows()[0][0].text, "d");
        press(&mut screen, '4');
        assert!(drawn(&mut screen, 110, 8)[4].starts_with("/srv/pool  good"));
        press(&mut screen, 'p');
        assert_eq!(drawn(&mut screen, 110, 8)[2], "paused");
        press(&mut screen, '+');
        assert_eq!(screen.delay, Duration::from_secs(2));
        assert!(!press(&mut screen, 'q'));
        assert!(!screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }

    #[test]
    fn every_key_and_size_of_the_terminal_is_accepted() {
        let mut screen = screen();
        screen.error = Some("no yard answers".to_owned());
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let code = match random.u8(..8) {
                0 => KeyCode::Tab,
                1 => KeyCode::BackTab,
                2 => KeyCode::Up,
                3 => KeyCode::Down,
                4 => KeyCode::Left,
                5 => KeyCode::Right,
                _ => KeyCode::Char(random.char(' '..='~')),
            };
            screen.press(KeyEvent::from(code));
            drawn(&mut screen, random.u16(1..200), random.u16(1..20));
        }
    }
}
