//! The commands of `gateway`.

pub mod banner;
pub mod chat;
pub mod commands;
pub mod doctor;
pub mod probe;
pub mod records;
pub mod reload;
pub mod serve;
pub mod workers;
