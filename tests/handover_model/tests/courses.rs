//! The courses that the worker's own legs are held against are those of the model as it is.
//!
//! `BALEEN_RECORD_COURSES=1 cargo test -p baleen-handover-model` writes them anew.

use std::fs;
use std::path::Path;

use baleen_handover_model::courses::courses;

const NUM_COURSES: u64 = 150;

#[test]
fn recorded_courses_are_those_of_the_model() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("courses.jsonl");
    let made = courses(NUM_COURSES);
    if std::env::var_os("BALEEN_RECORD_COURSES").is_some() {
        assert!(fs::write(&path, &made).is_ok(), "courses.jsonl cannot be written");
    }
    let recorded = fs::read_to_string(&path);
    assert!(recorded.is_ok(), "{} cannot be read: {recorded:?}", path.display());
    assert!(
        recorded.is_ok_and(|recorded| recorded == made),
        "courses.jsonl is not what the model gives: record it anew"
    );
}
