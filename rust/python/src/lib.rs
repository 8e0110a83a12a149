//! `chairlift._native`: thin bindings. Nothing is decided here; `python/chairlift/_native.pyi` documents the boundary.

mod attention;
mod buffers;
mod digest;
mod engine;
mod errors;
mod geometry;
mod linear;
mod machine;
mod rowwise;
mod tensor;

use pyo3::prelude::*;

/// The engine of chairlift, in Rust.
#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::attention::{PagedAttention, instruction_sets};
    #[pymodule_export]
    use crate::digest::digests;
    #[pymodule_export]
    use crate::engine::{Engine, EngineConfig, Event, Live, Sampling, Step};
    #[pymodule_export]
    use crate::errors::{EngineClosed, QueueFull};
    #[pymodule_export]
    use crate::geometry::{default_match_unit, split_into_groups};

    #[pymodule_export]
    use crate::linear::{JoinedLinears, PackedLinear, largest};

    #[pymodule_export]
    use crate::rowwise::RowProgram;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("NUM_TRASH_BLOCKS", chairlift_core::NUM_TRASH_BLOCKS)
    }
}
