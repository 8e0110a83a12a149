//! The engine, driven step by step with a device that believes only the arena.

#![allow(clippy::unwrap_used)]

mod attacks;
mod device;
mod driver;
mod fairness;
mod flight_stories;
mod oracle;
mod prefix_stories;
mod pressure_stories;
mod regimes;
mod retry_stories;
mod stories;
mod traces;
mod twin;
