//! What a kernel is asked to run on, by name.

use chairlift_kernels::isa::Isa;
use chairlift_kernels::team::Team;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The instruction set of that name; None: the best of this machine.
pub fn isa_of(name: Option<&str>) -> PyResult<Isa> {
    name.map_or_else(
        || Ok(Isa::best()),
        |name| name.parse().map_err(|error| PyValueError::new_err(format!("{error}"))),
    )
}

/// The threads of that name; None: the best of this process.
pub fn team_of(name: Option<&str>) -> PyResult<Team> {
    name.map_or_else(
        || Ok(Team::of_process()),
        |name| name.parse().map_err(|error| PyValueError::new_err(format!("{error}"))),
    )
}
