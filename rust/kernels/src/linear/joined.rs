//! Linear layers of one input whose results become one, column by column: an activation of one of them times the other.
//!
//! Each part of the columns is computed of some rows by all layers, into memory that stays near, and goes from there to
//! the output: the layers' own results never leave the second cache.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::vectors::rows_at_once;
use super::{Matrix, PackedLinear, Product, READY, RunPanels, Scratch, Way, even_parts};
use crate::attention::Invalid;
use crate::element::{Dtype, Element};
use crate::numbers::Numbers;
use crate::rowwise::{Program, Rows};
use crate::simd;
use crate::team::Team;

/// Layers that are joined, at most.
pub const MOST_LAYERS: usize = 4;

/// Layers of one input, and the program that computes the output of their results.
#[derive(Clone, Copy, Debug)]
pub struct Joined<'a> {
    layers: &'a [&'a PackedLinear],
    program: &'a Program,
}

impl<'a> Joined<'a> {
    /// Layers and a program with an input for each of them and one output.
    ///
    /// # Errors
    /// Layers that differ in their sizes, element types or instruction sets, or a program that does not compute each
    /// column of its output from that column of its inputs.
    pub fn new(layers: &'a [&'a PackedLinear], program: &'a Program) -> Result<Self, Invalid> {
        let (Some((first, others)), true) = (layers.split_first(), layers.len() <= MOST_LAYERS) else {
            return Err(Invalid::new(format!("{} layers: 1 to {MOST_LAYERS} can be joined", layers.len())));
        };
        for other in others {
            let kind = |linear: &PackedLinear| (linear.out_size, linear.in_size, linear.dtype, linear.isa);
            if kind(first) != kind(other) {
                return Err(Invalid::new(format!(
                    "layers of {:?} and {:?}: all must be of the same shape, type and instructions",
                    kind(first),
                    kind(other)
                )));
            }
        }
        if !program.is_columnwise(first.out_size) {
            return Err(Invalid::new(format!(
                "the program does not compute each of {} columns from the same column of its inputs",
                first.out_size
            )));
        }
        if (program.inputs().len(), program.outputs().len()) != (layers.len(), 1) {
            return Err(Invalid::new(format!(
                "a program of {} inputs and {} outputs for {} layers: {0} and 1 are expected",
                program.inputs().len(),
                program.outputs().len(),
                layers.len()
            )));
        }
        Ok(Self { layers, program })
    }

    /// `input` `[rows, in]` to `out` `[rows, out]`, with a bias of `out` elements for each layer that has one.
    ///
    /// # Errors
    /// What does not fit together; nothing is read or written then.
    ///
    /// # Safety
    /// As of [`PackedLinear::call`].
    pub unsafe fn call(
        &self,
        input: &Matrix,
        biases: &[Option<Matrix>],
        out: &Matrix,
        team: Team,
        threads: usize,
    ) -> Result<(), Invalid> {
        if biases.len() != self.layers.len() {
            return Err(Invalid::new(format!("{} biases of {} layers", biases.len(), self.layers.len())));
        }
        for (linear, bias) in self.layers.iter().zip(biases) {
            linear.check(input, bias.as_ref(), out)?;
        }
        if input.rows == 0 {
            return Ok(());
        }
        // SAFETY: as promised by the caller, of elements of that type.
        unsafe {
            match self.layers[0].dtype {
                Dtype::F32 => self.call_in::<f32>(input, biases, out, team, threads),
                Dtype::Bf16 => self.call_in::<bf16>(input, biases, out, team, threads),
                Dtype::F16 => self.call_in::<f16>(input, biases, out, team, threads),
            }
        }
        Ok(())
    }

    unsafe fn call_in<E: Element>(
        &self,
        input: &Matrix,
        biases: &[Option<Matrix>],
        out: &Matrix,
        team: Team,
        threads: usize,
    ) {
        let first = self.layers[0];
        let (panels, each) = first.parts(self.layers.len() * input.rows, threads);
        let mut copy = READY.take();
        // SAFETY: as promised by the caller.
        let input = unsafe { first.ready::<E>(input, &mut copy, team, threads) };
        let call = Call::<E> {
            layers: self.layers,
            biases,
            input,
            out: *out,
            rows_at_once: even_parts(input.rows, rows_at_once(first.isa, first.row_bytes())),
            element: PhantomData,
        };
        // Two widths: that of most parts, and that of the last one.
        let columns_of =
            |part: usize| part * each * first.width..first.out_size.min((part + 1) * each * first.width);
        let last = panels.div_ceil(each) - 1;
        let programs =
            [self.program.narrowed(columns_of(0).len()), self.program.narrowed(columns_of(last).len())];
        team.share_out(threads, last + 1, &|_, part| {
            let program = &programs[usize::from(part == last)];
            let panels = part * each..panels.min((part + 1) * each);
            // SAFETY: the call was checked, and each part writes columns of its own.
            unsafe { call.part(panels, columns_of(part), program) };
        });
        READY.set(copy);
    }
}

/// A call, checked.
struct Call<'a, E> {
    layers: &'a [&'a PackedLinear],
    biases: &'a [Option<Matrix>],
    /// As the layers read it.
    input: Matrix,
    out: Matrix,
    rows_at_once: usize,
    element: PhantomData<E>,
}

// SAFETY: its pointers are to tensors that the call's maker keeps, and each thread writes columns of its own.
unsafe impl<E: Sync> Sync for Call<'_, E> {}

impl<E: Element> Call<'_, E> {
    /// Some panels.
    ///
    /// # Safety
    /// The program must be that of so many columns, the panels and columns the call's.
    unsafe fn part(&self, panels: Range<usize>, columns: Range<usize>, program: &Program) {
        thread_local! {
            static RESULTS: std::cell::RefCell<Numbers> = std::cell::RefCell::default();
        }
        let isa = self.layers[0].isa;
        let given_bytes = match self.layers[0].way {
            Way::Lanes => size_of::<f32>(),
            Way::Tiles | Way::Pairs => size_of::<E>(),
        };
        // As many elements as numbers are room enough.
        let row_stride = panels.len() * self.layers[0].width;
        let layer_size = self.rows_at_once * row_stride;
        RESULTS.with_borrow_mut(|results| {
            let results = results.room(self.layers.len() * layer_size).cast::<E>();
            for first in (0..self.input.rows).step_by(self.rows_at_once) {
                let rows = self.rows_at_once.min(self.input.rows - first);
                let mut of_layers =
                    [Rows { data: results.cast(), dtype: E::DTYPE, row_stride, group_stride: columns.len() };
                        MOST_LAYERS];
                // SAFETY: within the tensors and the results; the machine has the instructions.
                unsafe {
                    for (index, (linear, bias)) in self.layers.iter().zip(self.biases).enumerate() {
                        let to = results.add(index * layer_size);
                        let product = Product::<E> {
                            linear,
                            input: Matrix {
                                data: self.input.data.add(first * self.input.row_stride * given_bytes),
                                rows,
                                ..self.input
                            },
                            bias: bias.map(|bias| bias.data.cast_const().cast()),
                            // As if all columns were there.
                            out: Matrix {
                                data: to.wrapping_sub(columns.start).cast(),
                                rows,
                                columns: self.out.columns,
                                row_stride,
                            },
                            element: PhantomData,
                        };
                        let panels = panels.clone();
                        Scratch::of_thread(|scratch| {
                            simd::run(isa, RunPanels { call: &product, panels, scratch });
                        });
                        of_layers[index].data = to.cast();
                    }
                    let out = Rows {
                        data: self
                            .out
                            .data
                            .cast::<E>()
                            .add(first * self.out.row_stride + columns.start)
                            .cast(),
                        dtype: E::DTYPE,
                        row_stride: self.out.row_stride,
                        group_stride: columns.len(),
                    };
                    program.run_here(&of_layers[..self.layers.len()], &[out], 0..rows);
                }
            }
        });
    }
}
