//! The commands of `gateway`.

pub mod banner;
pub mod probe;
pub mod records;
pub mod serve;
