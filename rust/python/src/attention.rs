//! Paged attention on the CPU.

use chairlift_core::Reach;
use chairlift_kernels::attention::{Call, Invalid, NewRows, Pages, Rows, StepRows, Table};
use chairlift_kernels::element::Dtype;
use chairlift_kernels::isa::Isa;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::geometry::reach_of;
use crate::machine::{isa_of, team_of};
use crate::tensor::Tensor;

/// The instruction sets that the kernels are compiled for and this machine has, the best first.
#[pyfunction]
pub fn instruction_sets() -> Vec<&'static str> {
    Isa::available().map(Isa::name).collect()
}

/// Attention over the pages of a step; see `_native.pyi`.
#[pyclass(module = "chairlift._native")]
pub struct PagedAttention {
    inner: chairlift_kernels::attention::PagedAttention,
    threads: usize,
}

#[pymethods]
impl PagedAttention {
    #[new]
    #[pyo3(signature = (page_size, groups, num_threads, isa=None, team=None))]
    fn new(
        page_size: usize,
        groups: Vec<(String, u32)>,
        num_threads: usize,
        isa: Option<&str>,
        team: Option<&str>,
    ) -> PyResult<Self> {
        let reaches: Vec<Reach> =
            groups.iter().map(|(form, tokens)| reach_of(form, *tokens)).collect::<PyResult<_>>()?;
        let (isa, team) = (isa_of(isa)?, team_of(team)?);
        let inner = chairlift_kernels::attention::PagedAttention::new(page_size, &reaches, isa, team)
            .map_err(to_python)?;
        Ok(Self { inner, threads: num_threads.max(1) })
    }

    #[getter]
    fn isa(&self) -> &'static str {
        self.inner.isa().name()
    }

    #[getter]
    fn team(&self) -> &'static str {
        self.inner.team().name()
    }

    fn begin(
        &mut self,
        cu_seqlens: Tensor<'_>,
        kv_lens: Tensor<'_>,
        decodes: usize,
        block_tables: Vec<Tensor<'_>>,
        write_slots: Vec<Tensor<'_>>,
    ) -> PyResult<()> {
        if block_tables.len() != write_slots.len() {
            return Err(PyValueError::new_err(format!(
                "{} block tables and {} groups of write slots",
                block_tables.len(),
                write_slots.len()
            )));
        }
        // SAFETY: the caller promises that nobody writes them during the call; see `_native.pyi`.
        unsafe {
            let (_, cu_seqlens) = cu_seqlens.as_i32::<1>("cu_seqlens")?;
            let (_, kv_lens) = kv_lens.as_i32::<1>("kv_lens")?;
            let mut groups = Vec::with_capacity(block_tables.len());
            for (table, slots) in block_tables.iter().zip(&write_slots) {
                let ([_, pages], blocks) = table.as_i32::<2>("a block table")?;
                let (_, slots) = slots.as_i32::<1>("write slots")?;
                groups.push((Table { blocks, pages }, slots));
            }
            self.inner.begin(StepRows { cu_seqlens, kv_lens, decodes }, &groups).map_err(to_python)
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the tensors of an attention call")]
    #[pyo3(signature = (group, k_pages, v_pages, query, out, *, scale, key=None, value=None, softcap=None, sinks=None))]
    fn attend(
        &mut self,
        py: Python<'_>,
        group: usize,
        k_pages: Tensor<'_>,
        v_pages: Tensor<'_>,
        query: Tensor<'_>,
        out: Tensor<'_>,
        scale: f32,
        key: Option<Tensor<'_>>,
        value: Option<Tensor<'_>>,
        softcap: Option<f32>,
        sinks: Option<Tensor<'_>>,
    ) -> PyResult<()> {
        let dtype = query.dtype("query")?;
        let new = match (&key, &value) {
            (Some(key), Some(value)) => {
                Some(NewRows { k: rows(key, "key", dtype)?, v: rows(value, "value", dtype)? })
            }
            (None, None) => None,
            _ => return Err(PyValueError::new_err("key and value come together or not at all")),
        };
        let sinks = match &sinks {
            // SAFETY: as above.
            Some(sinks) => Some(unsafe { sinks.as_f32::<1>("sinks") }?.1),
            None => None,
        };
        let call = Shared(Call {
            dtype,
            k_pages: pages(&k_pages, "k_pages", dtype)?,
            v_pages: pages(&v_pages, "v_pages", dtype)?,
            new,
            query: rows(&query, "query", dtype)?,
            out: rows(&out, "out", dtype)?,
            scale,
            softcap,
            sinks,
        });
        let (inner, threads) = (&mut self.inner, self.threads);
        py.detach(|| {
            let call = &call;
            // SAFETY: the tensors are held by this function, and were checked to be of one type; the caller promises
            // that nobody else touches them, and that results overlap nothing; see `_native.pyi`.
            unsafe { inner.attend(group, &call.0, threads) }
        })
        .map_err(to_python)
    }
}

/// A call that another thread may run, as its tensors' owner waits.
struct Shared<'a>(Call<'a>);
// SAFETY: its pointers are to memory that this module's functions hold for as long as they wait.
unsafe impl Sync for Shared<'_> {}

pub(crate) fn to_python(invalid: Invalid) -> PyErr {
    PyValueError::new_err(invalid.to_string())
}

fn check_dtype(tensor: &Tensor<'_>, name: &str, dtype: Dtype) -> PyResult<()> {
    let own = tensor.dtype(name)?;
    if own != dtype {
        return Err(PyValueError::new_err(format!("{name} is of {own:?}, and the queries of {dtype:?}")));
    }
    Ok(())
}

/// The last dimension of a kernel's tensor is read as a run.
pub(crate) fn check_run(name: &str, size: usize, stride: usize) -> PyResult<()> {
    if size > 1 && stride != 1 {
        return Err(PyValueError::new_err(format!(
            "the last dimension of {name} has stride {stride}, not 1"
        )));
    }
    Ok(())
}

fn rows(tensor: &Tensor<'_>, name: &str, dtype: Dtype) -> PyResult<Rows> {
    check_dtype(tensor, name, dtype)?;
    let ([heads, tokens, size], [head_stride, token_stride, stride]) = tensor.layout(name)?;
    check_run(name, size, stride)?;
    Ok(Rows { data: tensor.data(), heads, tokens, size, token_stride, head_stride })
}

fn pages(tensor: &Tensor<'_>, name: &str, dtype: Dtype) -> PyResult<Pages> {
    check_dtype(tensor, name, dtype)?;
    let ([blocks, page_size, kv_heads, size], [block_stride, token_stride, head_stride, stride]) =
        tensor.layout(name)?;
    check_run(name, size, stride)?;
    Ok(Pages {
        data: tensor.data(),
        blocks,
        page_size,
        kv_heads,
        block_stride,
        token_stride,
        head_stride,
        size,
    })
}
