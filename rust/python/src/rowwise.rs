//! Runs of element-wise operators on the CPU.

use chairlift_kernels::element::Dtype;
use chairlift_kernels::rowwise::{Binary, Instruction, Operand, Place, Program, Rows, Step, Unary};
use chairlift_kernels::team::Team;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::{check_run, to_python};
use crate::machine::{isa_of, team_of};
use crate::tensor::Tensor;

/// (register, groups, length)
type PyPlace = (usize, usize, usize);

/// A register, or a number.
#[derive(FromPyObject)]
enum PyOperand {
    Place(PyPlace),
    Number(f32),
}

/// (operation, operands, groups, length, dtype, start)
type PyInstruction = (String, Vec<PyOperand>, usize, usize, String, usize);
/// (groups, length, dimension of the rows or None)
type PyInput = (usize, usize, Option<usize>);
/// (register, groups, length, dimension of the rows)
type PyOutput = (usize, usize, usize, usize);

/// A program over the rows of tensors; see `_native.pyi`.
#[pyclass(module = "chairlift._native", frozen)]
pub struct RowProgram {
    pub(crate) inner: Program,
    /// Of each input, the dimension of its rows; None: all rows are the same.
    input_dimensions: Vec<Option<usize>>,
    output_dimensions: Vec<usize>,
    team: Team,
    threads: usize,
}

#[pymethods]
impl RowProgram {
    #[new]
    #[pyo3(signature = (inputs, instructions, outputs, num_threads, isa=None, team=None))]
    fn new(
        inputs: Vec<PyInput>,
        instructions: Vec<PyInstruction>,
        outputs: Vec<PyOutput>,
        num_threads: usize,
        isa: Option<&str>,
        team: Option<&str>,
    ) -> PyResult<Self> {
        let (isa, team) = (isa_of(isa)?, team_of(team)?);
        let places = inputs.iter().enumerate();
        let places =
            places.map(|(register, &(groups, length, _))| Place { register, groups, length }).collect();
        let steps = instructions.into_iter().enumerate();
        let steps = steps
            .map(|(index, instruction)| read_instruction(inputs.len() + index, instruction))
            .collect::<PyResult<_>>()?;
        let results =
            outputs.iter().map(|&(register, groups, length, _)| Place { register, groups, length }).collect();
        Ok(Self {
            inner: Program::new(places, steps, results, isa).map_err(to_python)?,
            input_dimensions: inputs.into_iter().map(|(.., dimension)| dimension).collect(),
            output_dimensions: outputs.into_iter().map(|(.., dimension)| dimension).collect(),
            team,
            threads: num_threads.max(1),
        })
    }

    fn run(&self, py: Python<'_>, inputs: Vec<Tensor<'_>>, outputs: Vec<Tensor<'_>>) -> PyResult<()> {
        if inputs.len() != self.input_dimensions.len() || outputs.len() != self.output_dimensions.len() {
            return Err(PyValueError::new_err(format!(
                "{} inputs and {} outputs: {} and {} are expected",
                inputs.len(),
                outputs.len(),
                self.input_dimensions.len(),
                self.output_dimensions.len()
            )));
        }
        let mut count = None;
        let mut rows = Vec::with_capacity(inputs.len() + outputs.len());
        let places = self.inner.inputs().iter().chain(self.inner.outputs());
        let dimensions =
            self.input_dimensions.iter().copied().chain(self.output_dimensions.iter().copied().map(Some));
        for ((tensor, &place), dimension) in inputs.iter().chain(&outputs).zip(places).zip(dimensions) {
            let (of_tensor, number) = rows_of(tensor, place, dimension)?;
            if number.is_some() && count.is_some() && number != count {
                return Err(PyValueError::new_err(format!(
                    "tensors of {} and of {} rows",
                    count.unwrap_or(0),
                    number.unwrap_or(0)
                )));
            }
            count = count.or(number);
            rows.push(of_tensor);
        }
        let call = Shared((rows, count.unwrap_or(1)));
        let given = inputs.len();
        py.detach(|| {
            let Shared((rows, count)) = &call;
            let (given, taken) = rows.split_at(given);
            // SAFETY: the tensors are held by this function and have those rows; the caller promises that nobody else
            // touches them, and that results overlap nothing; see `_native.pyi`.
            unsafe { self.inner.run(given, taken, *count, self.team, self.threads) }
        })
        .map_err(to_python)
    }
}

/// Rows that another thread may read and write, as their tensors' owner waits.
struct Shared((Vec<Rows>, usize));
// SAFETY: their pointers are to memory that this module's functions hold for as long as they wait.
unsafe impl Sync for Shared {}

fn read_instruction(register: usize, instruction: PyInstruction) -> PyResult<Instruction> {
    let (name, operands, groups, length, dtype, start) = instruction;
    let dtype = match dtype.as_str() {
        "float32" => Dtype::F32,
        "bfloat16" => Dtype::Bf16,
        "float16" => Dtype::F16,
        _ => {
            return Err(PyValueError::new_err(format!(
                "a result of {dtype}: float32, bfloat16 and float16 are possible"
            )));
        }
    };
    let operands: Vec<Operand> = operands
        .into_iter()
        .map(|operand| match operand {
            PyOperand::Place(place) => Operand::Place(read_place(place)),
            PyOperand::Number(number) => Operand::Number(number),
        })
        .collect();
    let binary = match name.as_str() {
        "add" => Some(Binary::Add),
        "sub" => Some(Binary::Sub),
        "mul" => Some(Binary::Mul),
        "div" => Some(Binary::Div),
        _ => None,
    };
    let unary = match name.as_str() {
        "copy" => Some(Unary::Copy),
        "neg" => Some(Unary::Neg),
        "square" => Some(Unary::Square),
        "sqrt" => Some(Unary::Sqrt),
        "rsqrt" => Some(Unary::Rsqrt),
        "exp" => Some(Unary::Exp),
        "tanh" => Some(Unary::Tanh),
        "sigmoid" => Some(Unary::Sigmoid),
        "silu" => Some(Unary::Silu),
        "relu" => Some(Unary::Relu),
        "gelu_tanh" => Some(Unary::GeluTanh),
        _ => None,
    };
    let step = match (binary, unary, operands.as_slice(), name.as_str()) {
        (Some(op), _, &[a, b], _) => Step::Binary(op, a, b),
        (_, Some(op), &[a], _) => Step::Unary(op, a),
        (.., &[Operand::Place(from)], "mean") => Step::Mean(from),
        (.., &[Operand::Place(from)], "slice") => Step::Slice(from, start),
        (.., parts, "cat") => {
            let parts = parts.iter().map(|part| match part {
                Operand::Place(place) => Ok(*place),
                Operand::Number(number) => {
                    Err(PyValueError::new_err(format!("{number} is no part of a cat")))
                }
            });
            Step::Cat(parts.collect::<PyResult<_>>()?)
        }
        _ => {
            return Err(PyValueError::new_err(format!(
                "there is no operation {name:?} of {} such operands",
                operands.len()
            )));
        }
    };
    Ok(Instruction { step, to: Place { register, groups, length }, dtype })
}

fn read_place((register, groups, length): PyPlace) -> Place {
    Place { register, groups, length }
}

/// A tensor's rows, and how many there are; None where all are the same.
fn rows_of(tensor: &Tensor<'_>, place: Place, dimension: Option<usize>) -> PyResult<(Rows, Option<usize>)> {
    let layout = tensor.any_layout("a tensor of the program")?;
    let wrong = || {
        let sizes: Vec<usize> = layout.iter().map(|&(size, _)| size).collect();
        PyValueError::new_err(format!(
            "a tensor of {sizes:?}: rows (dimension {dimension:?}) of {} groups of {} are expected",
            place.groups, place.length
        ))
    };
    let mut rows = Rows {
        data: tensor.data(),
        dtype: tensor.dtype("a tensor of the program")?,
        row_stride: 0,
        group_stride: place.length,
    };
    let mut count = None;
    let mut groups = 1;
    let mut length = 1;
    let last = layout.len().checked_sub(1);
    for (index, &(size, stride)) in layout.iter().enumerate() {
        if Some(index) == dimension {
            (count, rows.row_stride) = (Some(size), stride);
        } else if Some(index) == last {
            check_run("a tensor of the program", size, stride)?;
            length = size;
        } else if size != 1 {
            if groups != 1 {
                return Err(wrong());
            }
            (groups, rows.group_stride) = (size, stride);
        }
    }
    if (groups, length) != (place.groups, place.length) || count.is_some() != dimension.is_some() {
        return Err(wrong());
    }
    // Rows that are all the same in memory are read once.
    Ok((rows, count))
}
