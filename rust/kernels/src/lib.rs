//! CPU kernels of chairlift.
//!
//! This crate is where the unsafe code is: it reads tensors by pointer and stride, with the instructions that the
//! machine has ([`isa`]), on the threads that torch computes with ([`team`]). Whatever comes in is checked once, at the
//! entry of a kernel; from there on indices are trusted.

#![deny(missing_docs)]

pub mod attention;
pub mod element;
mod factors;
pub mod isa;
pub mod largest;
pub mod linear;
mod math;
mod memory;
mod numbers;
pub mod rowwise;
mod simd;
pub mod team;
#[cfg(target_arch = "x86_64")]
mod tiles;
