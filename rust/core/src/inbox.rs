//! The inbox: how requests and cancellations of any thread reach the engine's thread.
//!
//! A request is checked here, in its submitter's thread, so that a bad one reaches nobody else.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::config::EngineConfig;
use crate::error::{Error, Result};
use crate::hash::{Key, PrefixHasher};
use crate::ids::RequestId;
use crate::outbox::Outbox;
use crate::sequence::Request;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What the engine's thread finds in the inbox.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // nearly all are submits: a box would be one more allocation for each
pub(crate) enum Message {
    /// The first id, and the keys of the prompt.
    Submit(RequestId, Request, Key, Vec<Key>),
    Cancel(RequestId),
}

impl Message {
    fn sequences(&self) -> u32 {
        match self {
            Message::Submit(_, request, ..) => request.n,
            Message::Cancel(_) => 0,
        }
    }

    fn prompt(&self) -> &[i32] {
        match self {
            Message::Submit(_, request, ..) => &request.prompt,
            Message::Cancel(_) => &[],
        }
    }
}

#[derive(Debug, Default)]
struct Mail {
    messages: VecDeque<Message>,
    closed: Option<String>,
    woken: bool,
}

/// Many writers, one reader.
#[derive(Debug)]
pub struct Inbox {
    mail: Mutex<Mail>,
    arrived: Condvar,
    next_ordinal: AtomicU64,
    /// Requests submitted and not yet admitted for the first time.
    queued: AtomicUsize,
    vocab_size: u32,
    max_positions: Option<u32>,
    capacity_tokens: u64,
    num_blocks: u32,
    page_size: u32,
    max_queue_size: usize,
    first_regime: Option<u32>,
    hasher: PrefixHasher,
    /// Where outputs wait, and how many bytes of them may when another request comes.
    outbox: Arc<Outbox>,
    max_output_bytes: Option<u64>,
}

impl Inbox {
    pub(crate) fn new(config: &EngineConfig, outbox: Arc<Outbox>) -> Self {
        Self {
            mail: Mutex::default(),
            arrived: Condvar::new(),
            next_ordinal: AtomicU64::new(0),
            queued: AtomicUsize::new(0),
            vocab_size: config.vocab_size,
            max_positions: config.max_positions,
            capacity_tokens: config.capacity_tokens(),
            num_blocks: config.num_blocks,
            page_size: config.page_size,
            max_queue_size: config.max_queue_size,
            first_regime: config.first_regime,
            hasher: PrefixHasher::new(config),
            outbox,
            max_output_bytes: config.max_output_bytes,
        }
    }

    /// Token ids as the engine keeps them.
    ///
    /// # Errors
    /// [`Error::TokenOutsideVocabulary`] for the first id that no token has.
    pub fn tokens(&self, ids: impl IntoIterator<Item = i64>) -> Result<Vec<i32>> {
        let vocab_size = self.vocab_size;
        ids.into_iter()
            .enumerate()
            .map(|(position, token)| match i32::try_from(token) {
                Ok(id) if id >= 0 && (id as u32) < vocab_size => Ok(id),
                _ => Err(Error::TokenOutsideVocabulary { position, token, vocab_size }),
            })
            .collect()
    }

    /// Whether a request would be taken, but for the bounds on those that wait and on outputs.
    ///
    /// # Errors
    /// What [`Inbox::submit`] would say.
    pub fn check(&self, prompt: &[i32], max_new_tokens: i64) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let outside = |&token: &i32| token < 0 || token as u32 >= self.vocab_size;
        if let Some(position) = prompt.iter().position(outside) {
            let token = i64::from(prompt[position]);
            return Err(Error::TokenOutsideVocabulary { position, token, vocab_size: self.vocab_size });
        }
        if max_new_tokens < 1 {
            return Err(Error::InvalidMaxNewTokens { value: max_new_tokens });
        }
        if let Some(max_positions) = self.max_positions
            && prompt.len() as u64 + 1 > u64::from(max_positions)
        {
            return Err(Error::PromptExceedsPositions { prompt: prompt.len(), max_positions });
        }
        if prompt.len() as u64 + 1 > self.capacity_tokens {
            return Err(Error::PromptExceedsPool {
                prompt: prompt.len(),
                capacity: self.capacity_tokens,
                num_blocks: self.num_blocks,
                page_size: self.page_size,
            });
        }
        Ok(())
    }

    /// Hands a request over. Each of its sequences gets exactly one terminal event, whatever happens. Returns the id of
    /// the first; those of the others follow.
    ///
    /// # Errors
    /// An [`Error`] that names what is wrong with the request; [`Error::QueueFull`], [`Error::OutputsFull`] or
    /// [`Error::Closed`] otherwise.
    pub fn submit(&self, request: Request) -> Result<RequestId> {
        self.submit_all(vec![request], false).map_err(|(_, error)| error)
    }

    /// Hands several requests over, or none of them. Returns the id of the first sequence of the first; those of the
    /// others follow, in the order given.
    ///
    /// # Arguments
    /// * `sorts` - they come to the engine in the order of their tokens, so that those that begin alike are neighbours.
    ///
    /// # Errors
    /// As [`Inbox::submit`], with the place of the request that is at fault.
    pub fn submit_all(&self, requests: Vec<Request>, sorts: bool) -> Result<RequestId, (usize, Error)> {
        let mut messages = Vec::with_capacity(requests.len());
        let mut sequences = 0;
        for (place, request) in requests.into_iter().enumerate() {
            self.check(&request.prompt, request.max_new_tokens).map_err(|error| (place, error))?;
            if request.n == 0 {
                return Err((place, Error::InvalidN { value: request.n }));
            }
            // Hashed here, by the thread that submits.
            let mut root = self.hasher.root(&request.cache_salt, &request.adapter);
            if self.first_regime.is_some_and(|longest| request.prompt.len() > longest as usize) {
                root = self.hasher.second_regime(root);
            }
            let keys = self.hasher.chain(root, &request.prompt);
            messages.push(Message::Submit(RequestId(sequences), request, root, keys));
            sequences += u64::from(messages.last().map_or(0, Message::sequences));
        }
        if sorts {
            messages.sort_by(|one, other| one.prompt().cmp(other.prompt()));
        }
        if let Some(limit) = self.max_output_bytes {
            let bytes = self.outbox.bytes();
            if bytes > limit {
                return Err((0, Error::OutputsFull { bytes, limit }));
            }
        }
        let mut mail = self.lock();
        if let Some(cause) = &mail.closed {
            return Err((0, Error::Closed { cause: cause.clone() }));
        }
        let (waiting, wanted, limit) = (self.queued(), sequences as usize, self.max_queue_size);
        if limit > 0 && waiting + wanted > limit {
            return Err((0, Error::QueueFull { waiting, wanted, limit }));
        }
        self.queued.fetch_add(sequences as usize, Ordering::Relaxed);
        let first = self.next_ordinal.fetch_add(sequences, Ordering::Relaxed);
        for message in &mut messages {
            if let Message::Submit(id, ..) = message {
                id.0 += first;
            }
        }
        mail.messages.extend(messages);
        drop(mail);
        self.arrived.notify_one();
        Ok(RequestId(first))
    }

    /// Asks for the end of a request. One that ended already, or never was, is left alone.
    pub fn cancel(&self, request: RequestId) {
        self.lock().messages.push_back(Message::Cancel(request));
        self.arrived.notify_one();
    }

    /// Takes no more requests: every later [`Inbox::submit`] gets the cause. The first cause stays.
    pub fn close(&self, cause: &str) {
        self.lock().closed.get_or_insert_with(|| cause.to_owned());
    }

    /// Takes requests again.
    pub fn reopen(&self) {
        self.lock().closed = None;
    }

    /// Why it is closed, if it is.
    pub fn closed(&self) -> Option<String> {
        self.lock().closed.clone()
    }

    /// Waits until there is a message or [`Inbox::wake`] was called, at most `timeout`. Tells whether there was.
    pub fn wait(&self, timeout: Duration) -> bool {
        let idle = |mail: &mut Mail| mail.messages.is_empty() && !mail.woken;
        let (mut mail, _) = self
            .arrived
            .wait_timeout_while(self.lock(), timeout, idle)
            .unwrap_or_else(PoisonError::into_inner);
        let woken = std::mem::take(&mut mail.woken);
        woken || !mail.messages.is_empty()
    }

    /// Ends a [`Inbox::wait`], now or the next one.
    pub fn wake(&self) {
        self.lock().woken = true;
        self.arrived.notify_one();
    }

    /// Whether no message waits.
    pub fn is_empty(&self) -> bool {
        self.lock().messages.is_empty()
    }

    pub(crate) fn next_id(&self) -> RequestId {
        RequestId(self.next_ordinal.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn take(&self, into: &mut VecDeque<Message>) {
        std::mem::swap(&mut self.lock().messages, into);
    }

    /// A request left the queue, for a row or for good.
    pub(crate) fn left_queue(&self) {
        self.queued.fetch_sub(1, Ordering::Relaxed);
    }

    /// A first admission was undone.
    pub(crate) fn back_in_queue(&self) {
        self.queued.fetch_add(1, Ordering::Relaxed);
    }

    /// Tokens of one sequence that an empty pool bears.
    pub fn capacity_tokens(&self) -> u64 {
        self.capacity_tokens
    }

    /// Requests submitted and not yet admitted for the first time.
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    pub(crate) fn submitted(&self) -> u64 {
        self.next_ordinal.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
