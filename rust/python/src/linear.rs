//! Linear layers on the CPU.

use chairlift_kernels::linear::{Joined, Matrix};
use chairlift_kernels::team::Team;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::attention::{check_run, to_python};
use crate::machine::{isa_of, team_of};
use crate::rowwise::RowProgram;
use crate::tensor::Tensor;

/// The packed copy of a linear layer's weight; see `_native.pyi`.
#[pyclass(module = "chairlift._native", frozen)]
pub struct PackedLinear {
    inner: chairlift_kernels::linear::PackedLinear,
    team: Team,
    threads: usize,
}

#[pymethods]
impl PackedLinear {
    #[new]
    #[pyo3(signature = (weight, num_threads, isa=None, team=None))]
    fn new(
        py: Python<'_>,
        weight: Tensor<'_>,
        num_threads: usize,
        isa: Option<&str>,
        team: Option<&str>,
    ) -> PyResult<Self> {
        let (isa, team) = (isa_of(isa)?, team_of(team)?);
        let dtype = weight.dtype("weight")?;
        let matrix = Shared([matrix(&weight, "weight")?]);
        let threads = num_threads.max(1);
        let inner = py
            .detach(|| {
                let Shared([matrix]) = &matrix;
                // SAFETY: the tensor is held by this function; the caller promises that nobody writes it meanwhile.
                unsafe { chairlift_kernels::linear::PackedLinear::new(dtype, matrix, isa, team, threads) }
            })
            .map_err(to_python)?;
        Ok(Self { inner, team, threads })
    }

    #[getter]
    fn isa(&self) -> &'static str {
        self.inner.isa().name()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.num_bytes()
    }

    #[pyo3(signature = (input, out, bias=None))]
    fn multiply(
        &self,
        py: Python<'_>,
        input: Tensor<'_>,
        out: Tensor<'_>,
        bias: Option<Tensor<'_>>,
    ) -> PyResult<()> {
        let given = [("input", &input), ("out", &out)];
        for (name, tensor) in given.into_iter().chain(bias.as_ref().map(|bias| ("bias", bias))) {
            self.check_dtype(name, tensor)?;
        }
        let call = Shared((
            matrix(&input, "input")?,
            bias.as_ref().map(|bias| row(bias, "bias")).transpose()?,
            matrix(&out, "out")?,
        ));
        py.detach(|| {
            let Shared((input, bias, out)) = &call;
            // SAFETY: the tensors are held by this function, and of the weight's type; the caller promises that nobody
            // else touches them, and that results overlap nothing; see `_native.pyi`.
            unsafe { self.inner.call(input, bias.as_ref(), out, self.team, self.threads) }
        })
        .map_err(to_python)
    }
}

impl PackedLinear {
    fn check_dtype(&self, name: &str, tensor: &Tensor<'_>) -> PyResult<()> {
        let (dtype, expected) = (tensor.dtype(name)?, self.inner.dtype());
        match dtype == expected {
            true => Ok(()),
            false => {
                Err(PyTypeError::new_err(format!("{name} is of {dtype:?}, and the weight of {expected:?}")))
            }
        }
    }
}

/// Linear layers of one input whose results become one; see `_native.pyi`.
#[pyclass(module = "chairlift._native", frozen)]
pub struct JoinedLinears {
    layers: Vec<Py<PackedLinear>>,
    program: Py<RowProgram>,
}

#[pymethods]
impl JoinedLinears {
    #[new]
    fn new(layers: Vec<Py<PackedLinear>>, program: Py<RowProgram>) -> PyResult<Self> {
        let joined = Self { layers, program };
        Joined::new(&joined.layers(), &joined.program.get().inner).map_err(to_python)?;
        Ok(joined)
    }

    fn multiply(
        &self,
        py: Python<'_>,
        input: Tensor<'_>,
        out: Tensor<'_>,
        biases: Vec<Option<Tensor<'_>>>,
    ) -> PyResult<()> {
        let first = self.layers[0].get();
        let given = [("input", &input), ("out", &out)];
        for (name, tensor) in given.into_iter().chain(biases.iter().flatten().map(|bias| ("a bias", bias))) {
            first.check_dtype(name, tensor)?;
        }
        let rows_of = |bias: &Option<Tensor<'_>>| bias.as_ref().map(|bias| row(bias, "a bias")).transpose();
        let call = Shared((
            matrix(&input, "input")?,
            biases.iter().map(rows_of).collect::<PyResult<Vec<_>>>()?,
            matrix(&out, "out")?,
        ));
        py.detach(|| {
            let Shared((input, biases, out)) = &call;
            let layers = self.layers();
            let joined = Joined::new(&layers, &self.program.get().inner)?;
            // SAFETY: as in `PackedLinear::multiply`.
            unsafe { joined.call(input, biases, out, first.team, first.threads) }
        })
        .map_err(to_python)
    }
}

impl JoinedLinears {
    fn layers(&self) -> Vec<&chairlift_kernels::linear::PackedLinear> {
        self.layers.iter().map(|layer| &layer.get().inner).collect()
    }
}

/// The column of each row's largest element; see `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (of, out, num_threads, isa=None))]
pub fn largest(
    py: Python<'_>,
    of: Tensor<'_>,
    out: Tensor<'_>,
    num_threads: usize,
    isa: Option<&str>,
) -> PyResult<()> {
    let (isa, team) = (isa_of(isa)?, team_of(None)?);
    let dtype = of.dtype("of")?;
    let matrix = Shared(matrix(&of, "of")?);
    // SAFETY: held by this function; the caller promises that nobody else touches it; see `_native.pyi`.
    let (_, out) = unsafe { out.as_i64_mut::<1>("out") }?;
    py.detach(|| {
        let Shared(matrix) = &matrix;
        // SAFETY: as for `out`.
        unsafe { chairlift_kernels::largest::largest(matrix, dtype, out, isa, team, num_threads.max(1)) }
    })
    .map_err(to_python)
}

/// Matrices that another thread may read and write, as their tensors' owner waits.
struct Shared<T>(T);
// SAFETY: their pointers are to memory that this module's functions hold for as long as they wait.
unsafe impl<T> Sync for Shared<T> {}

/// Rows of a tensor whose dimensions but the last can be taken together.
fn matrix(tensor: &Tensor<'_>, name: &str) -> PyResult<Matrix> {
    let layout = tensor.any_layout(name)?;
    let Some(((columns, stride), leading)) = layout.split_last() else {
        return Err(PyValueError::new_err(format!("{name} is a number, not rows of them")));
    };
    check_run(name, *columns, *stride)?;
    let (mut rows, mut row_stride) = (1, *columns);
    for &(size, stride) in leading.iter().rev() {
        if size == 1 {
            continue;
        }
        if rows > 1 && stride != rows * row_stride {
            return Err(PyValueError::new_err(format!("the rows of {name} do not lie at equal distances")));
        }
        if rows == 1 {
            row_stride = stride;
        }
        rows *= size;
    }
    Ok(Matrix { data: tensor.data(), rows, columns: *columns, row_stride })
}

fn row(tensor: &Tensor<'_>, name: &str) -> PyResult<Matrix> {
    let ([columns], [stride]) = tensor.layout(name)?;
    check_run(name, columns, stride)?;
    Ok(Matrix { data: tensor.data(), rows: 1, columns, row_stride: columns })
}
