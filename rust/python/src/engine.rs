//! The engine as Python sees it: arrays, ids and events.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chairlift_core as core;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice};

use crate::buffers::Pinned;
use crate::errors::{EngineClosed, at_input, to_python};
use crate::geometry::reach_of;

/// Signals are looked at this often while a reader waits.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Sizes and bounds of an engine.
#[pyclass(frozen)]
pub struct EngineConfig(core::EngineConfig);

#[pymethods]
impl EngineConfig {
    #[new]
    #[pyo3(signature = (*, page_size, num_blocks, groups, max_requests_per_batch, max_batch_tokens, vocab_size,
        max_cache_reads=None, safety_margin=0.15, scheduler_type="fifo", max_positions=None, max_queue_size=0,
        max_output_bytes=None, seed=0, match_unit=None, cache_eviction="lru", swap_blocks=0, tenant_weights=None, first_regime=None,
        hash_bits=128))]
    #[allow(clippy::too_many_arguments)] // keyword-only fields
    fn new(
        page_size: u32,
        num_blocks: u32,
        groups: Vec<(String, u32)>,
        max_requests_per_batch: u32,
        max_batch_tokens: u32,
        vocab_size: u32,
        max_cache_reads: Option<u64>,
        safety_margin: f64,
        scheduler_type: &str,
        max_positions: Option<u32>,
        max_queue_size: usize,
        max_output_bytes: Option<u64>,
        seed: u64,
        match_unit: Option<u32>,
        cache_eviction: &str,
        swap_blocks: u32,
        tenant_weights: Option<Vec<(String, f64)>>,
        first_regime: Option<u32>,
        hash_bits: u32,
    ) -> PyResult<Self> {
        let policy = match scheduler_type {
            "fifo" => core::Policy::Fifo,
            "prefill_first" => core::Policy::PrefillFirst,
            other => {
                let message = format!("scheduler_type is {other:?}, but must be 'fifo' or 'prefill_first'");
                return Err(PyValueError::new_err(message));
            }
        };
        let cache_eviction = match cache_eviction {
            "lru" => core::Eviction::Lru,
            "lifo" => core::Eviction::Lifo,
            other => {
                let message = format!("cache_eviction is {other:?}, but must be 'lru' or 'lifo'");
                return Err(PyValueError::new_err(message));
            }
        };
        let groups = groups.iter().map(|(form, tokens)| reach_of(form, *tokens)).collect::<PyResult<_>>()?;
        let config = core::EngineConfig {
            page_size,
            num_blocks,
            groups,
            max_requests_per_batch,
            max_batch_tokens,
            max_cache_reads,
            safety_margin,
            policy,
            fairness: tenant_weights.map_or(core::Fairness::Arrival, core::Fairness::Tenants),
            vocab_size,
            max_positions,
            first_regime,
            max_queue_size,
            max_output_bytes,
            seed,
            match_unit: match_unit.unwrap_or_else(|| core::EngineConfig::default_match_unit(page_size)),
            cache_eviction,
            swap_blocks,
            hash_bits,
        };
        config.validate().map_err(to_python)?;
        Ok(Self(config))
    }

    #[getter]
    fn match_unit(&self) -> u32 {
        self.0.match_unit
    }
}

/// How a request's tokens are chosen: greedy, or a draw after temperature, top-k and top-p.
#[pyclass(frozen, eq)]
#[derive(PartialEq)]
pub struct Sampling(core::Sampling);

#[pymethods]
impl Sampling {
    #[staticmethod]
    fn greedy() -> Self {
        Self(core::Sampling::Greedy)
    }

    #[staticmethod]
    #[pyo3(signature = (temperature=1.0, top_k=0, top_p=1.0))]
    fn draw(temperature: f32, top_k: u32, top_p: f32) -> PyResult<Self> {
        if !(temperature > 0.0 && temperature.is_finite()) {
            return Err(PyValueError::new_err(format!("temperature is {temperature}, but must be above 0")));
        }
        if !(0.0..=1.0).contains(&top_p) {
            return Err(PyValueError::new_err(format!(
                "top_p is {top_p}, but must be above 0 and at most 1"
            )));
        }
        Ok(Self(core::Sampling::Draw { temperature, top_k, top_p }))
    }
}

/// A planned step: its sizes, and where each section lies in the arena.
#[pyclass(frozen)]
pub struct Step(core::Step);

#[pymethods]
impl Step {
    #[getter]
    fn slot(&self) -> usize {
        self.0.slot.index()
    }

    #[getter]
    fn second_regime(&self) -> bool {
        self.0.second_regime
    }

    #[getter]
    fn rows(&self) -> usize {
        self.0.shape.rows
    }

    #[getter]
    fn decodes(&self) -> usize {
        self.0.shape.decodes
    }

    #[getter]
    fn tokens(&self) -> usize {
        self.0.shape.tokens
    }

    #[getter]
    fn sampled(&self) -> usize {
        self.0.shape.sampled
    }

    /// Where each section lies, in the arena's order.
    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let at = &self.0.layout;
        let sections = [
            ("rows", &at.rows),
            ("cu_seqlens", &at.cu_seqlens),
            ("kv_lens", &at.kv_lens),
            ("tokens", &at.tokens),
            ("positions", &at.positions),
            ("write_slots", &at.write_slots),
            ("logits_rows", &at.logits_rows),
            ("draws", &at.draws),
            ("table_changes", &at.table_changes),
            ("row_changes", &at.row_changes),
            ("carry_overs", &at.carry_overs),
            ("copies", &at.copies),
            ("swap_outs", &at.swap_outs),
            ("swap_ins", &at.swap_ins),
        ];
        let layout = PyDict::new(py);
        for (name, range) in sections {
            layout.set_item(name, PySlice::new(py, range.start as isize, range.end as isize, 1))?;
        }
        Ok(layout)
    }
}

/// News of one request: one more token, or its end.
#[pyclass(frozen, get_all)]
pub struct Event {
    request: u64,
    /// `None` for a token; `stop`, `length`, `cancelled` or `error` for the end.
    finish_reason: Option<&'static str>,
    error: Option<String>,
    prompt: Vec<i32>,
    tokens: Vec<i32>,
    logprobs: Vec<f32>,
    timestamps: Vec<f64>,
    epochs: Vec<(u32, u64)>,
    cached_tokens: u32,
    started: Option<f64>,
    ended: Option<f64>,
}

impl From<core::Event> for Event {
    fn from(event: core::Event) -> Self {
        let request = event.request.get();
        match event.news {
            core::News::Token { token, logprob, time, epoch } => Self {
                request,
                finish_reason: None,
                error: None,
                prompt: Vec::new(),
                tokens: vec![token],
                logprobs: logprob.into_iter().collect(),
                timestamps: vec![time],
                epochs: vec![(0, epoch)],
                cached_tokens: 0,
                started: None,
                ended: None,
            },
            core::News::End(output) => {
                let (finish_reason, error) = match output.finish {
                    core::Finish::Stop => ("stop", None),
                    core::Finish::Length => ("length", None),
                    core::Finish::Cancelled => ("cancelled", None),
                    core::Finish::Failed(cause) => ("error", Some(cause)),
                };
                Self {
                    request,
                    finish_reason: Some(finish_reason),
                    error,
                    prompt: output.prompt,
                    tokens: output.tokens,
                    logprobs: output.logprobs,
                    timestamps: output.timestamps,
                    epochs: output.epochs,
                    cached_tokens: output.cached_tokens,
                    started: output.started,
                    ended: Some(output.ended),
                }
            }
        }
    }
}

/// A sequence as it stands.
#[pyclass(frozen, get_all)]
pub struct Live {
    request: u64,
    parent: u64,
    /// `pending`, `prefilling` or `decoding`.
    phase: &'static str,
    prompt: u32,
    generated: u32,
    computed: u32,
    blocks: u32,
    on_host: bool,
    priority: i32,
    started: Option<f64>,
}

impl From<core::Live> for Live {
    fn from(live: core::Live) -> Self {
        Self {
            request: live.request.get(),
            parent: live.parent.get(),
            phase: match live.phase {
                core::Phase::Pending => "pending",
                core::Phase::Prefilling => "prefilling",
                core::Phase::Decoding => "decoding",
            },
            prompt: live.prompt,
            generated: live.generated,
            computed: live.computed,
            blocks: live.blocks,
            on_host: live.on_host,
            priority: live.priority,
            started: live.started,
        }
    }
}

/// The buffers of one slot.
struct SlotBuffers {
    arena: Pinned<i32>,
    tokens: Pinned<i32>,
    logprobs: Pinned<f32>,
}

struct Inner {
    engine: core::Engine,
    slots: [Option<SlotBuffers>; 2],
}

/// Scheduler, block manager and step planner.
#[pyclass(frozen)]
pub struct Engine {
    inner: Mutex<Inner>,
    inbox: Arc<core::Inbox>,
    outbox: Arc<core::Outbox>,
    counters: Arc<core::Counters>,
    arena_capacity: usize,
    advance_ns: AtomicU64,
}

impl Engine {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits in slices, so that Ctrl-C gets through. True: there is something to take (or to find out).
    fn wait(
        py: Python<'_>,
        timeout_s: Option<f64>,
        wait: impl Fn(Duration) -> core::Waited + Sync,
    ) -> PyResult<bool> {
        let timeout = match timeout_s {
            None => Duration::MAX,
            Some(seconds) => Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX),
        };
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            match py.detach(|| wait(left.min(SIGNAL_INTERVAL))) {
                core::Waited::Ready | core::Waited::Gone => return Ok(true),
                core::Waited::Closed(cause) => return Err(EngineClosed::new_err(cause)),
                core::Waited::Timeout if left <= SIGNAL_INTERVAL => return Ok(false),
                core::Waited::Timeout => py.check_signals()?,
            }
        }
    }
}

fn slot(index: usize) -> PyResult<core::Slot> {
    let slot = core::Slot::ALL.get(index).copied();
    slot.ok_or_else(|| PyValueError::new_err(format!("slot is {index}, but must be 0 or 1")))
}

fn unbound(slot: core::Slot) -> core::Error {
    core::Error::SlotMisused { slot, problem: "has no buffers: call bind_slot first" }
}

#[pymethods]
impl Engine {
    #[new]
    fn new(config: &EngineConfig) -> PyResult<Self> {
        let engine = core::Engine::new(config.0.clone()).map_err(to_python)?;
        Ok(Self {
            inbox: engine.inbox(),
            outbox: engine.outbox(),
            counters: engine.counters(),
            arena_capacity: engine.arena_capacity(),
            advance_ns: AtomicU64::new(0),
            inner: Mutex::new(Inner { engine, slots: [None, None] }),
        })
    }

    #[getter]
    fn token_capacity(&self) -> u64 {
        self.inbox.capacity_tokens()
    }

    #[getter]
    fn advance_ns(&self) -> u64 {
        self.advance_ns.load(Ordering::Relaxed)
    }

    #[getter]
    fn arena_capacity(&self) -> usize {
        self.arena_capacity
    }

    fn bind_slot(
        &self,
        slot_index: usize,
        arena: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        logprobs: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let slot = slot(slot_index)?;
        let buffers = SlotBuffers {
            arena: Pinned::new(arena, "arena")?,
            tokens: Pinned::new(tokens, "tokens")?,
            logprobs: Pinned::new(logprobs, "logprobs")?,
        };
        let ranges = [buffers.arena.address(), buffers.tokens.address(), buffers.logprobs.address()];
        let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let mut inner = self.lock();
        // What the engine writes must be nobody else's, those of the other slot included.
        let others = inner.slots.iter().enumerate().filter(|&(other, _)| other != slot.index());
        let taken: Vec<_> = others
            .flat_map(|(_, other)| other)
            .flat_map(|other| [other.arena.address(), other.tokens.address(), other.logprobs.address()])
            .collect();
        let clash = ranges
            .iter()
            .enumerate()
            .any(|(n, range)| ranges[..n].iter().chain(&taken).any(|other| overlap(range, other)));
        if clash {
            return Err(PyValueError::new_err("the buffers of the slots must not overlap"));
        }
        if inner.engine.has_step_in_flight() {
            return Err(PyRuntimeError::new_err("buffers cannot change while a step is in flight"));
        }
        inner.slots[slot.index()] = Some(buffers);
        Ok(())
    }

    fn advance(
        &self,
        py: Python<'_>,
        done: Option<usize>,
        next: Option<usize>,
        now: f64,
    ) -> PyResult<Option<Step>> {
        let (done, next) = (done.map(slot).transpose()?, next.map(slot).transpose()?);
        let advanced = py.detach(|| {
            let start = Instant::now();
            let mut inner = self.lock();
            let Inner { engine, slots } = &mut *inner;
            let buffers = |slot: core::Slot| slots[slot.index()].as_ref().ok_or_else(|| unbound(slot));
            let results = match done {
                Some(slot) => {
                    let buffers = buffers(slot)?;
                    // SAFETY: the caller says that the step's results have arrived: nobody writes them any more.
                    let (tokens, logprobs) =
                        unsafe { (buffers.tokens.as_slice(), buffers.logprobs.as_slice()) };
                    Some(core::Results { slot, tokens, logprobs })
                }
                None => None,
            };
            let arena = match next {
                Some(slot) => {
                    let buffers = buffers(slot)?;
                    // SAFETY: the slot's step is committed or there was none, so its arena is the engine's to write.
                    Some((slot, unsafe { buffers.arena.as_mut_slice() }))
                }
                None => None,
            };
            let step = engine.advance(results, arena, now);
            self.advance_ns.store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            step
        });
        Ok(advanced.map_err(to_python)?.map(Step))
    }

    #[pyo3(signature = (slot_index, now, cause=None, *, out_of_memory=false))]
    fn abandon(
        &self,
        py: Python<'_>,
        slot_index: usize,
        now: f64,
        cause: Option<&str>,
        out_of_memory: bool,
    ) -> PyResult<()> {
        let slot = slot(slot_index)?;
        let why = match (cause, out_of_memory) {
            (None, false) => core::Abandoned::Withdrawn,
            (Some(cause), false) => core::Abandoned::Raised(cause),
            (Some(cause), true) => core::Abandoned::OutOfMemory(cause),
            (None, true) => {
                return Err(PyValueError::new_err(
                    "out_of_memory is True without a cause: give the cause that its row ends with",
                ));
            }
        };
        py.detach(|| self.lock().engine.abandon(slot, why, now)).map_err(to_python)
    }

    /// See `core::Engine::let_in`.
    fn let_in(&self, py: Python<'_>, fresh: bool) {
        py.detach(|| self.lock().engine.let_in(fresh));
    }

    #[getter]
    fn admitted(&self, py: Python<'_>) -> usize {
        py.detach(|| self.lock().engine.admitted())
    }

    fn cancel_all(&self, py: Python<'_>, now: f64) {
        py.detach(|| self.lock().engine.cancel_all(now));
    }

    fn recompute_all(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.lock().engine.recompute_all()).map_err(to_python)
    }

    fn fail_all(&self, py: Python<'_>, cause: &str, now: f64) {
        py.detach(|| self.lock().engine.fail_all(cause, now));
    }

    #[getter]
    fn is_idle(&self, py: Python<'_>) -> bool {
        py.detach(|| self.lock().engine.is_idle())
    }

    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.lock().engine.check_integrity()).map_err(to_python)
    }

    fn check(&self, py: Python<'_>, prompt: PyBuffer<i64>, max_new_tokens: i64) -> PyResult<()> {
        let prompt = self.inbox.tokens(prompt.to_vec(py)?).map_err(to_python)?;
        self.inbox.check(&prompt, max_new_tokens).map_err(to_python)
    }

    #[pyo3(signature = (prompt, *, max_new_tokens, n=1, eos=Vec::new(), sampling=None, priority=0, seed=None,
        tenant="", cache_salt="", adapter="", streaming=false, record_timestamps=false, record_logprobs=false))]
    #[allow(clippy::too_many_arguments)] // keyword-only fields
    fn submit(
        &self,
        py: Python<'_>,
        prompt: PyBuffer<i64>,
        max_new_tokens: i64,
        n: u32,
        eos: Vec<i32>,
        sampling: Option<&Sampling>,
        priority: i32,
        seed: Option<u64>,
        tenant: &str,
        cache_salt: &str,
        adapter: &str,
        streaming: bool,
        record_timestamps: bool,
        record_logprobs: bool,
    ) -> PyResult<u64> {
        let request = core::Request {
            prompt: self.inbox.tokens(prompt.to_vec(py)?).map_err(to_python)?,
            max_new_tokens,
            n,
            eos: eos.into(),
            sampling: sampling.map_or(core::Sampling::Greedy, |sampling| sampling.0),
            priority,
            seed,
            tenant: tenant.to_owned(),
            cache_salt: cache_salt.to_owned(),
            adapter: adapter.to_owned(),
            streaming,
            record_timestamps,
            record_logprobs,
        };
        let id = py.detach(|| self.inbox.submit(request)).map_err(to_python)?;
        Ok(id.get())
    }

    #[pyo3(signature = (tokens, lengths, max_new_tokens, *, n=1, eos=Vec::new(), sampling=None, priority=0, tenant="",
        cache_salt="", streaming=false, record_timestamps=false, record_logprobs=false, sorts=false))]
    #[allow(clippy::too_many_arguments)] // keyword-only fields
    fn submit_many(
        &self,
        py: Python<'_>,
        tokens: PyBuffer<i64>,
        lengths: PyBuffer<i64>,
        max_new_tokens: PyBuffer<i64>,
        n: u32,
        eos: Vec<i32>,
        sampling: Option<&Sampling>,
        priority: i32,
        tenant: &str,
        cache_salt: &str,
        streaming: bool,
        record_timestamps: bool,
        record_logprobs: bool,
        sorts: bool,
    ) -> PyResult<u64> {
        let (lengths, bounds) = (lengths.to_vec(py)?, max_new_tokens.to_vec(py)?);
        let tokens =
            tokens.as_slice(py).ok_or_else(|| PyValueError::new_err("the tokens must be contiguous"))?;
        let whole = lengths.iter().try_fold(0_usize, |sum, &len| sum.checked_add(usize::try_from(len).ok()?));
        if whole != Some(tokens.len()) || lengths.len() != bounds.len() || lengths.is_empty() {
            return Err(PyValueError::new_err(format!(
                "{} tokens in {} prompts with {} bounds: lengths must add up to the tokens, with a bound for each prompt",
                tokens.len(),
                lengths.len(),
                bounds.len()
            )));
        }
        let like = core::Request {
            n,
            eos: eos.into(),
            sampling: sampling.map_or(core::Sampling::Greedy, |sampling| sampling.0),
            priority,
            tenant: tenant.to_owned(),
            cache_salt: cache_salt.to_owned(),
            streaming,
            record_timestamps,
            record_logprobs,
            ..core::Request::default()
        };
        // Copied while the GIL is held, as nobody else then writes them; checked and hashed when it is released.
        let mut left = tokens;
        let mut requests = Vec::with_capacity(lengths.len());
        for (place, (&len, &max_new_tokens)) in lengths.iter().zip(&bounds).enumerate() {
            let (prompt, rest) = left.split_at(len as usize);
            left = rest;
            let prompt = self.inbox.tokens(prompt.iter().map(|token| token.get()));
            let prompt = prompt.map_err(|error| at_input(place, error))?;
            requests.push(core::Request { prompt, max_new_tokens, ..like.clone() });
        }
        let first = py.detach(|| self.inbox.submit_all(requests, sorts));
        first.map(core::RequestId::get).map_err(|(place, error)| at_input(place, error))
    }

    fn new_epoch(&self, py: Python<'_>) {
        py.detach(|| self.lock().engine.new_epoch());
    }

    fn refuse(&self, py: Python<'_>, cause: &str, now: f64) -> u64 {
        py.detach(|| self.lock().engine.refuse(cause, now)).get()
    }

    fn cancel(&self, request: u64) {
        self.inbox.cancel(core::RequestId::from_ordinal(request));
    }

    fn close_inbox(&self, cause: &str) {
        self.inbox.close(cause);
    }

    fn close_outbox(&self, cause: &str) {
        self.outbox.close(cause);
    }

    fn reopen(&self) {
        self.inbox.reopen();
        self.outbox.reopen();
    }

    fn wait_for_work(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
        py.detach(|| self.inbox.wait(timeout))
    }

    fn wake(&self) {
        self.inbox.wake();
    }

    fn claim(&self, request: u64) {
        self.outbox.claim(core::RequestId::from_ordinal(request));
    }

    fn unclaim(&self, request: u64) {
        self.outbox.unclaim(core::RequestId::from_ordinal(request));
    }

    #[pyo3(signature = (request, timeout_s=None))]
    fn wait_for(&self, py: Python<'_>, request: u64, timeout_s: Option<f64>) -> PyResult<bool> {
        let request = core::RequestId::from_ordinal(request);
        Self::wait(py, timeout_s, |timeout| self.outbox.wait_for(request, timeout))
    }

    #[pyo3(signature = (timeout_s=None))]
    fn wait_next(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        Self::wait(py, timeout_s, |timeout| self.outbox.wait_next(timeout))
    }

    fn take_for(&self, request: u64) -> Option<Event> {
        self.outbox.take_for(core::RequestId::from_ordinal(request)).map(Event::from)
    }

    fn take_next(&self) -> Option<Event> {
        self.outbox.take_next().map(Event::from)
    }

    fn live(&self, py: Python<'_>) -> Vec<Live> {
        let live = py.detach(|| self.lock().engine.live());
        live.into_iter().map(Live::from).collect()
    }

    fn live_one(&self, py: Python<'_>, request: u64) -> Option<Live> {
        let request = core::RequestId::from_ordinal(request);
        py.detach(|| self.lock().engine.live_one(request)).map(Live::from)
    }

    fn tokens_of(&self, py: Python<'_>, request: u64) -> Option<Vec<i32>> {
        let request = core::RequestId::from_ordinal(request);
        py.detach(|| self.lock().engine.tokens_of(request))
    }

    fn listen(&self, request: u64, listener: u64) {
        self.outbox.listen(core::RequestId::from_ordinal(request), listener);
    }

    fn unlisten(&self, request: u64) {
        self.outbox.unlisten(core::RequestId::from_ordinal(request));
    }

    fn take_heard(&self, listener: u64) -> Option<Event> {
        self.outbox.take_heard(listener).map(Event::from)
    }

    /// Waits in one go: signals are the main thread's, which does not wait here.
    fn wait_heard(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Vec<u64>> {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
        match py.detach(|| self.outbox.wait_heard(timeout)) {
            core::Waited::Closed(cause) => Err(EngineClosed::new_err(cause)),
            _ => Ok(self.outbox.take_untold()),
        }
    }

    #[getter]
    fn queued(&self) -> usize {
        self.inbox.queued()
    }

    #[getter]
    fn undelivered(&self) -> usize {
        self.outbox.len()
    }

    /// Owned, cached and retiring blocks of each group.
    fn blocks_by_group(&self) -> Vec<(u32, u32, u32)> {
        let counts = self.counters.by_group();
        counts.iter().map(|counts| (counts.owned, counts.cached, counts.retiring)).collect()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in self.counters.snapshot().entries() {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }
}
