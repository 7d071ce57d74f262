//! Chooses the worker of a request from the pool's snapshot. Policies are pure: they see loads and name one.

pub mod least_load;
