//! Texts of the control tokens that prompts and outputs of the whole family are made of.

pub const BEGIN_OF_SENTENCE: &str = "<｜begin▁of▁sentence｜>";
pub const END_OF_SENTENCE: &str = "<｜end▁of▁sentence｜>";
pub const USER: &str = "<｜User｜>";
pub const ASSISTANT: &str = "<｜Assistant｜>";
pub const THINK_OPEN: &str = "<think>";
pub const THINK_CLOSE: &str = "</think>";
/// Stands in every tag of tool-call markup, and nowhere else.
pub const DSML: &str = "｜DSML｜";
