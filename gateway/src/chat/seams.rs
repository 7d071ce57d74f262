//! Content out of which markup was left, handed on so that what remains never spells a marker.
//!
//! Leaving markup out makes neighbours of texts that were apart: `｜DS` before a stray tag and `ML｜` behind it would
//! read as a marker. Of such a pair the part behind is left out too. Only that part is ever held back, and only where
//! the content before the seam ends with the beginning of a marker; a marker's spelling without a seam in it is text.

use super::markers::Marker;

/// The end of the content so far.
#[derive(Debug)]
pub(super) struct Seams {
    /// What must not be spelled. They begin with one byte that occurs nowhere else in them but at their very end.
    markers: &'static [Marker],
    /// The unfinished marker that the content ends with, or nothing.
    open: String,
    /// How much of `open` stands before the seam; the rest is held back.
    shown: usize,
    is_seamed: bool,
}

impl Seams {
    pub(super) fn new(markers: &'static [Marker]) -> Self {
        Self { markers, open: String::new(), shown: 0, is_seamed: false }
    }

    /// Appends content to `out`. Time is linear in `text`.
    pub(super) fn push(&mut self, text: &str, out: &mut String) {
        if !self.is_seamed {
            out.push_str(text);
            self.note_end(text);
            return;
        }
        for (at, c) in text.char_indices() {
            self.open.push(c);
            let begun = || self.markers.iter().filter(|marker| marker.text().starts_with(&self.open));
            if begun().any(|marker| marker.text().len() == self.open.len()) {
                self.open.truncate(self.shown);
            } else if begun().next().is_none() {
                self.open.pop();
                self.flush(out);
                out.push_str(&text[at..]);
                self.note_end(&text[at..]);
                return;
            }
        }
    }

    /// Markup is left out here.
    pub(super) fn leave_out(&mut self) {
        if !self.is_seamed {
            self.shown = self.open.len();
            self.is_seamed = self.shown > 0;
        }
    }

    /// Ends the content: what was held back completes no marker.
    pub(super) fn flush(&mut self, out: &mut String) {
        if self.is_seamed {
            out.push_str(&self.open[self.shown..]);
        }
        self.open.clear();
        self.is_seamed = false;
    }

    /// Remembers the unfinished marker that the content ends with now that `text` was appended.
    fn note_end(&mut self, text: &str) {
        if !self.open.is_empty() && self.begins_marker(text.as_bytes()) {
            self.open.push_str(text);
            return;
        }
        self.open.clear();
        let longest = self.markers.iter().map(|marker| marker.text().len()).max().unwrap_or(0);
        let end = &text.as_bytes()[text.len().saturating_sub(longest)..];
        let first = self.markers.first().map_or(0, |marker| marker.text().as_bytes()[0]);
        if let Some(at) = memchr::memrchr(first, end)
            && self.begins_marker(&end[at..])
        {
            self.open.push_str(&text[text.len() - end.len() + at..]);
        }
    }

    /// Whether `open` and then `text` are a marker's beginning, but not all of it.
    fn begins_marker(&self, text: &[u8]) -> bool {
        let rests = self.markers.iter().filter_map(|marker| marker.text().strip_prefix(&*self.open));
        rests.map(str::as_bytes).any(|rest| rest.len() > text.len() && rest.starts_with(text))
    }
}

#[cfg(test)]
mod tests {
    use super::Seams;
    use crate::chat::markers::Marker;

    /// What is left of texts with markup between them, each text in one push or by character.
    fn join(markers: &'static [Marker], texts: &[&str]) -> String {
        let read = |divide: fn(&str) -> Vec<String>| {
            let (mut seams, mut out) = (Seams::new(markers), String::new());
            for (number, text) in texts.iter().enumerate() {
                if number > 0 {
                    seams.leave_out();
                }
                divide(text).iter().for_each(|chunk| seams.push(chunk, &mut out));
            }
            seams.flush(&mut out);
            out
        };
        let whole = read(|text| vec![text.to_owned()]);
        assert_eq!(read(|text| text.chars().map(String::from).collect()), whole, "{texts:?}");
        whole
    }

    fn dsml(texts: &[&str]) -> String {
        join(&[Marker::Dsml], texts)
    }

    #[test]
    fn what_would_complete_a_marker_behind_a_seam_is_left_out() {
        assert_eq!(dsml(&["a ｜DS", "ML｜ b"]), "a ｜DS b");
        assert_eq!(dsml(&["｜DS", "ML｜ML｜", "ML｜"]), "｜DS");
        assert_eq!(dsml(&["｜DSML", "｜DSML", "｜"]), "｜DSMLDSML｜");
        assert_eq!(dsml(&["｜", "D", "S", "M", "L", "｜", "."]), "｜.");
    }

    #[test]
    fn all_other_text_stays() {
        for texts in
            [&["｜DS", "MX"][..], &["｜DS", "M", "L"], &["｜DSM", "｜", "D"], &["", "ML｜"], &["｜DS ", "ML｜"]]
        {
            assert_eq!(dsml(texts), texts.concat());
        }
        assert_eq!(dsml(&["typed ｜DSML｜", "DSML"]), "typed ｜DSML｜DSML", "the last bar may begin one more");
        assert_eq!(dsml(&["typed ｜DSML｜", "DSML｜"]), "typed ｜DSML｜");
    }

    #[test]
    fn any_of_several_markers_is_kept_from_being_spelled() {
        let markers = &[Marker::CallEnd, Marker::CallsEnd, Marker::Separator];
        assert_eq!(join(markers, &["<｜tool▁call", "s▁end｜>."]), "<｜tool▁call.");
        assert_eq!(join(markers, &["<｜tool▁", "s", "ep｜>"]), "<｜tool▁");
        assert_eq!(join(markers, &["<｜tool▁", "set"]), "<｜tool▁set");
    }
}
