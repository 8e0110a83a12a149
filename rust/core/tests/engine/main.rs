//! The engine, driven step by step with a device that believes only the arena.

#![allow(clippy::unwrap_used)]

mod device;
mod fairness;
mod oracle;
mod stories;
mod traces;
mod twin;
