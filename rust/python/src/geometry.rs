//! Kinds to groups.

use chairlift_core::{EngineConfig, Geometry, Kind, Reach};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::to_python;

/// `(kind, first call, end call)` of each group.
type Groups = Vec<(usize, u32, u32)>;

/// The match unit of the prefix cache unless another is set.
#[pyfunction]
pub fn default_match_unit(page_size: u32) -> u32 {
    EngineConfig::default_match_unit(page_size)
}

/// `[(num_calls, page_bytes)]` to `(block_bytes, padding_bytes, groups)`.
#[pyfunction]
pub fn split_into_groups(kinds: Vec<(u32, u64)>) -> PyResult<(u64, u64, Groups)> {
    let kinds: Vec<_> =
        kinds.into_iter().map(|(num_calls, page_bytes)| Kind { num_calls, page_bytes }).collect();
    let split = Geometry::split(&kinds).map_err(to_python)?;
    let groups =
        split.groups.into_iter().map(|group| (group.kind, group.calls.start, group.calls.end)).collect();
    Ok((split.block_bytes, split.padding_bytes, groups))
}

/// A reach from its form and its tokens.
pub fn reach_of(form: &str, tokens: u32) -> PyResult<Reach> {
    match form {
        "full" => Ok(Reach::Full),
        "window" => Ok(Reach::Window(tokens)),
        "chunk" => Ok(Reach::Chunk(tokens)),
        other => Err(PyValueError::new_err(format!(
            "a group's reach is {other:?}, but must be 'full', 'window' or 'chunk'"
        ))),
    }
}
