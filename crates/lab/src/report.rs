//! Results for people: text on the terminal, a page of HTML, the same as Markdown.
//!
//! All three are made from the same [`view`] of the JSON results, and format numbers alike.

pub mod text;
pub mod view;
