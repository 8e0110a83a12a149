//! The one place where the core's errors become Python exceptions.

use chairlift_core::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    chairlift._native,
    QueueFull,
    PyRuntimeError,
    "The waiting queue is at its bound (`max_queue_size`), or outputs that nobody took are at theirs (`output_space`). \
     The request was not taken; try again later."
);
pyo3::create_exception!(
    chairlift._native,
    EngineClosed,
    PyRuntimeError,
    "The engine takes no requests or has no more events. The message tells the cause."
);

/// A user's mistake is a `ValueError`, a state of the engine a `RuntimeError`.
pub fn to_python(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::EmptyPrompt
        | Error::TokenOutsideVocabulary { .. }
        | Error::PromptExceedsPool { .. }
        | Error::PromptExceedsPositions { .. }
        | Error::InvalidMaxNewTokens { .. }
        | Error::InvalidN { .. }
        | Error::InvalidConfig { .. } => PyValueError::new_err(message),
        Error::QueueFull { .. } | Error::OutputsFull { .. } => QueueFull::new_err(message),
        Error::Closed { .. } => EngineClosed::new_err(message),
        _ => PyRuntimeError::new_err(message),
    }
}

/// The same, naming the input that is at fault.
pub fn at_input(place: usize, error: Error) -> PyErr {
    match error {
        Error::QueueFull { .. } | Error::OutputsFull { .. } | Error::Closed { .. } => to_python(error),
        _ => PyValueError::new_err(format!("inputs[{place}]: {error}")),
    }
}
