use proptest::prelude::*;

use super::{StopMatcher, StopStrings};

/// What came out after each push, what `finish` added, and the stop string found.
fn run(stop: &[&str], include_stop: bool, chunks: &[&str]) -> (Vec<String>, String, Option<String>) {
    let mut matcher = StopMatcher::new(StopStrings::new(stop), include_stop);
    let mut pieces = Vec::new();
    for chunk in chunks {
        let mut out = String::new();
        matcher.push(chunk, &mut out);
        pieces.push(out);
    }
    let mut rest = String::new();
    matcher.finish(&mut rest);
    (pieces, rest, matcher.found().map(str::to_owned))
}

fn whole(stop: &[&str], include_stop: bool, text: &str) -> (String, Option<String>) {
    let (pieces, rest, found) = run(stop, include_stop, &[text]);
    (pieces.concat() + &rest, found)
}

#[test]
fn text_is_cut_before_the_match() {
    assert_eq!(whole(&["END"], false, "go on END now"), ("go on ".to_owned(), Some("END".to_owned())));
    assert_eq!(whole(&["END"], true, "go on END now"), ("go on END".to_owned(), Some("END".to_owned())));
    assert_eq!(whole(&["END"], false, "go on EN"), ("go on EN".to_owned(), None));
    assert_eq!(whole(&[], false, "END"), ("END".to_owned(), None));
}

#[test]
fn only_what_may_become_a_match_is_held_back() {
    let (pieces, rest, found) = run(&["</s>"], false, &["a<", "/", "b", "</", "s", "x", "<"]);
    assert_eq!(pieces, ["a", "", "</b", "", "", "</sx", ""]);
    assert_eq!((rest.as_str(), found), ("<", None));
}

#[test]
fn nothing_follows_a_match() {
    let (pieces, rest, found) = run(&["ab"], false, &["xa", "b", "more", "ab"]);
    assert_eq!(pieces, ["x", "", "", ""]);
    assert_eq!((rest.as_str(), found.as_deref()), ("", Some("ab")));
}

#[test]
fn the_first_complete_match_wins_and_of_equals_the_longest() {
    assert_eq!(whole(&["abc", "b"], false, "abc"), ("a".to_owned(), Some("b".to_owned())));
    assert_eq!(whole(&["c", "bc"], false, "abc"), ("a".to_owned(), Some("bc".to_owned())));
    assert_eq!(whole(&["ab", "abcd"], false, "abcd"), (String::new(), Some("ab".to_owned())));
}

#[test]
fn a_match_may_begin_inside_a_failed_one() {
    assert_eq!(whole(&["aab"], false, "aaab"), ("a".to_owned(), Some("aab".to_owned())));
    assert_eq!(whole(&["\n\nQ:"], false, "A\n\n\nQ:"), ("A\n".to_owned(), Some("\n\nQ:".to_owned())));
    assert_eq!(whole(&["ababac"], false, "abababac"), ("ab".to_owned(), Some("ababac".to_owned())));
}

#[test]
fn characters_that_share_bytes_are_not_confused() {
    let (pieces, rest, found) = run(&["é"], false, &["è", "ê", "e"]);
    assert_eq!(pieces, ["è", "ê", "e"]);
    assert_eq!((rest.as_str(), found), ("", None));
    assert_eq!(whole(&["鯨"], false, "白鯨記"), ("白".to_owned(), Some("鯨".to_owned())));
}

#[test]
fn empty_stop_strings_never_match() {
    assert!(StopStrings::new(&[""]).is_empty());
    assert_eq!(whole(&["", "x"], false, "ax"), ("a".to_owned(), Some("x".to_owned())));
}

/// The rule in its simplest form: try every end, at each end the longest pattern.
fn specification(stop: &[String], include_stop: bool, text: &str) -> (String, Option<String>) {
    let ends = text.char_indices().map(|(at, letter)| at + letter.len_utf8());
    for end in ends {
        let mut complete: Vec<&String> =
            stop.iter().filter(|pattern| text[..end].ends_with(pattern.as_str())).collect();
        complete.sort_by_key(|pattern| pattern.len());
        if let Some(pattern) = complete.pop() {
            let cut = if include_stop { end } else { end - pattern.len() };
            return (text[..cut].to_owned(), Some(pattern.clone()));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #[test]
    fn any_chunking_gives_what_the_rule_says(
        chunks in prop::collection::vec("[abé]{0,4}", 0..12),
        stop in prop::collection::vec("[abé]{1,4}", 0..4),
        include_stop: bool,
    ) {
        let expected = specification(&stop, include_stop, &chunks.concat());
        let stop: Vec<&str> = stop.iter().map(String::as_str).collect();
        let chunks: Vec<&str> = chunks.iter().map(String::as_str).collect();
        let (pieces, rest, found) = run(&stop, include_stop, &chunks);
        prop_assert_eq!((pieces.concat() + &rest, found), expected);
    }

    #[test]
    fn what_is_held_back_could_become_a_match(
        chunks in prop::collection::vec("[ab]{0,3}", 0..12),
        stop in prop::collection::vec("[ab]{2,5}", 1..4),
    ) {
        let patterns: Vec<&str> = stop.iter().map(String::as_str).collect();
        let mut matcher = StopMatcher::new(StopStrings::new(&patterns), false);
        let (mut text, mut out) = (String::new(), String::new());
        for chunk in &chunks {
            text.push_str(chunk);
            matcher.push(chunk, &mut out);
            if matcher.found().is_some() {
                break;
            }
            let longest = (0..=text.len())
                .rev()
                .find(|len| {
                    let tail = &text[text.len() - len..];
                    stop.iter().any(|pattern| pattern.len() > *len && pattern.starts_with(tail))
                });
            prop_assert_eq!(Some(text.len() - out.len()), longest);
        }
    }
}
