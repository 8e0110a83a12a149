//! The outbox: how events reach the readers. An event stays until one reader takes it.
//!
//! A reader that waits for one request gets that request's events before readers of the common queue do, and a listener
//! that was named for it before both.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::ids::RequestId;
use crate::sequence::Finish;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// All that a request produced.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The prompt.
    pub prompt: Vec<i32>,
    /// The generated tokens.
    pub tokens: Vec<i32>,
    /// One a token where they were asked for, else empty.
    pub logprobs: Vec<f32>,
    /// Time of each token where they were asked for, else empty.
    pub timestamps: Vec<f64>,
    /// The versions of the weights that chose the tokens: each with the place of the first token that it chose, from 0
    /// on. Empty without tokens.
    pub epochs: Vec<(u32, u64)>,
    /// Tokens of the prompt whose K and V were found in the prefix cache when it was first admitted.
    pub cached_tokens: u32,
    /// How it ended.
    pub finish: Finish,
    /// When it was first planned; `None` if it never was.
    pub started: Option<f64>,
    /// When it ended.
    pub ended: f64,
}

/// News of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// One more token of a streaming request that goes on.
    Token {
        /// The token.
        token: i32,
        /// The logarithm of its probability where asked for.
        logprob: Option<f32>,
        /// When its step was committed.
        time: f64,
        /// The version of the weights that chose it.
        epoch: u64,
    },
    /// The terminal event: exactly one a request, and its last. Boxed, as the many tokens are small.
    End(Box<Output>),
}

impl News {
    /// What it takes in memory, until somebody takes it.
    fn bytes(&self) -> u64 {
        let lists = match self {
            News::Token { .. } => 0,
            News::End(output) => {
                size_of::<Output>()
                    + size_of_val(&output.prompt[..])
                    + size_of_val(&output.tokens[..])
                    + size_of_val(&output.logprobs[..])
                    + size_of_val(&output.timestamps[..])
                    + size_of_val(&output.epochs[..])
            }
        };
        (size_of::<(u64, Self)>() + lists) as u64
    }
}

/// News, and whose.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The request.
    pub request: RequestId,
    /// The news.
    pub news: News,
}

/// What a reader that waited comes back with.
#[derive(Debug, Clone, PartialEq)]
pub enum Waited {
    /// There is an event to take, unless another reader is faster.
    Ready,
    /// None came in time.
    Timeout,
    /// The request's terminal event was taken by another reader: there will be no more.
    Gone,
    /// None is there and none will come, for this reason.
    Closed(String),
}

/// A map by request. Ids are ordinals that nobody outside can choose: one multiplication spreads them well enough.
type ById<T> = HashMap<RequestId, T, BuildHasherDefault<OrdinalHasher>>;

#[derive(Debug, Default)]
struct OrdinalHasher(u64);

impl Hasher for OrdinalHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, ordinal: u64) {
        // 2^64 over the golden ratio (Knuth, The Art of Computer Programming 3, 6.4).
        self.0 = (self.0 ^ ordinal).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Who takes the events of some requests as they come: an event loop, say. Numbered by the caller.
type Listener = u64;

/// What a listener has to take.
#[derive(Debug, Default)]
struct Line {
    /// Whose events came, in order; some may have been taken otherwise.
    ready: VecDeque<RequestId>,
    /// Whether the listener is in `untold`, or was told and has not taken all.
    told: bool,
}

#[derive(Debug, Default)]
struct Shelf {
    /// Events of each request, oldest first, with their place in the common order. Kept until the last is taken, so
    /// that a stream does not make its queue anew for every token.
    by_request: ById<VecDeque<(u64, News)>>,
    /// The common order. An entry whose event was taken by a reader of its request is stale.
    order: VecDeque<(u64, RequestId)>,
    /// Events that nobody took: the entries of `order` that are not stale.
    len: usize,
    /// What they take in memory.
    bytes: u64,
    next_place: u64,
    /// Readers of one request. Its terminal event, once taken, ends them all.
    claims: ById<usize>,
    /// Requests whose events a listener takes.
    heard_by: ById<Listener>,
    lines: HashMap<Listener, Line>,
    /// Listeners that are to be told that there is something for them.
    untold: Vec<Listener>,
    closed: Option<String>,
}

impl Shelf {
    fn put(&mut self, request: RequestId, news: News) {
        self.bytes += news.bytes();
        self.order.push_back((self.next_place, request));
        self.by_request.entry(request).or_default().push_back((self.next_place, news));
        self.next_place += 1;
        self.len += 1;
        self.tell(request);
    }

    /// There is one more event of a request: its listener, if it has one, is to know.
    fn tell(&mut self, request: RequestId) {
        let Some(&listener) = self.heard_by.get(&request) else { return };
        let line = self.lines.entry(listener).or_default();
        line.ready.push_back(request);
        if !std::mem::replace(&mut line.told, true) {
            self.untold.push(listener);
        }
    }

    fn take(&mut self, request: RequestId) -> Option<Event> {
        let events = self.by_request.get_mut(&request)?;
        let (_, news) = events.pop_front()?;
        if events.is_empty() {
            // Back to its beginning: the next event of a stream comes to where the last one was, still in the cache.
            events.clear();
        }
        self.len -= 1;
        self.bytes -= news.bytes();
        if matches!(news, News::End(_)) {
            self.by_request.remove(&request);
            self.claims.remove(&request);
            self.heard_by.remove(&request);
        }
        // Half of it stale: each entry is looked at once for every one that was taken.
        if self.order.len() > 2 * self.len + 64 {
            let by_request = &self.by_request;
            self.order.retain(|&entry| is_there(by_request, entry));
        }
        Some(Event { request, news })
    }

    fn has(&self, request: RequestId) -> bool {
        self.by_request.get(&request).is_some_and(|events| !events.is_empty())
    }

    fn next_unclaimed(&mut self) -> Option<RequestId> {
        while self.order.front().is_some_and(|&entry| !is_there(&self.by_request, entry)) {
            self.order.pop_front();
        }
        let unclaimed = |entry: &&(u64, RequestId)| {
            !self.claims.contains_key(&entry.1) && !self.heard_by.contains_key(&entry.1)
        };
        let mut there =
            self.order.iter().filter(unclaimed).filter(|&&entry| is_there(&self.by_request, entry));
        there.next().map(|&(_, request)| request)
    }
}

/// Whether an entry's event is still to be taken: events of a request are taken in order.
fn is_there(by_request: &ById<VecDeque<(u64, News)>>, (place, request): (u64, RequestId)) -> bool {
    by_request.get(&request).and_then(VecDeque::front).is_some_and(|&(first, _)| first <= place)
}

/// One writer, many readers. To wait and to take are two calls: a reader that keeps books of its own takes under its
/// own lock.
#[derive(Debug, Default)]
pub struct Outbox {
    shelf: Mutex<Shelf>,
    changed: Condvar,
}

impl Outbox {
    /// Puts events out, in order, and empties the given buffer.
    pub(crate) fn deliver(&self, events: &mut Vec<Event>) {
        if events.is_empty() {
            return;
        }
        let mut shelf = self.lock();
        for Event { request, news } in events.drain(..) {
            shelf.put(request, news);
        }
        drop(shelf);
        self.changed.notify_all();
    }

    /// Reserves the events of a request for those that ask for them by name, until as many calls of
    /// [`Outbox::unclaim`] or the taking of its terminal event.
    pub fn claim(&self, request: RequestId) {
        *self.lock().claims.entry(request).or_default() += 1;
    }

    /// Ends one [`Outbox::claim`].
    pub fn unclaim(&self, request: RequestId) {
        let mut shelf = self.lock();
        if let Some(claims) = shelf.claims.get_mut(&request) {
            *claims -= 1;
            if *claims == 0 {
                shelf.claims.remove(&request);
                // What it reserved is for the common queue again.
                self.changed.notify_all();
            }
        }
    }

    /// Takes the oldest event of that request, if there is one.
    pub fn take_for(&self, request: RequestId) -> Option<Event> {
        // Whoever waits for this request was woken by the event itself.
        self.lock().take(request)
    }

    /// Takes the oldest event that nobody claims, if there is one.
    pub fn take_next(&self) -> Option<Event> {
        let mut shelf = self.lock();
        let request = shelf.next_unclaimed()?;
        shelf.take(request)
    }

    /// Names a listener for a request: its events, those that are there too, are for that one alone, until
    /// [`Outbox::unlisten`] or the taking of its terminal event. Another one takes the place of the first.
    pub fn listen(&self, request: RequestId, listener: u64) {
        let mut shelf = self.lock();
        shelf.heard_by.insert(request, listener);
        for _ in 0..shelf.by_request.get(&request).map_or(0, VecDeque::len) {
            shelf.tell(request);
        }
        drop(shelf);
        self.changed.notify_all();
    }

    /// Ends [`Outbox::listen`]: what was not taken is for the other readers again.
    pub fn unlisten(&self, request: RequestId) {
        if self.lock().heard_by.remove(&request).is_some() {
            self.changed.notify_all();
        }
    }

    /// Takes the oldest event for a listener. After `None` the listener is told again of what comes.
    pub fn take_heard(&self, listener: u64) -> Option<Event> {
        let mut shelf = self.lock();
        loop {
            let Some(request) = shelf.lines.get_mut(&listener)?.ready.pop_front() else {
                shelf.lines.remove(&listener);
                shelf.untold.retain(|&other| other != listener);
                return None;
            };
            if shelf.heard_by.get(&request) == Some(&listener)
                && let Some(event) = shelf.take(request)
            {
                return Some(event);
            }
        }
    }

    /// Waits until a listener is to be told of events.
    pub fn wait_heard(&self, timeout: Duration) -> Waited {
        self.wait(timeout, |shelf| (!shelf.untold.is_empty()).then_some(Waited::Ready))
    }

    /// The listeners that are to be told. Each is named once, until it has taken all.
    pub fn take_untold(&self) -> Vec<u64> {
        std::mem::take(&mut self.lock().untold)
    }

    /// Waits for an event of a claimed request.
    pub fn wait_for(&self, request: RequestId, timeout: Duration) -> Waited {
        self.wait(timeout, |shelf| {
            if shelf.has(request) {
                Some(Waited::Ready)
            } else if shelf.claims.contains_key(&request) {
                None
            } else {
                Some(Waited::Gone)
            }
        })
    }

    /// Waits for an event that nobody claims.
    pub fn wait_next(&self, timeout: Duration) -> Waited {
        self.wait(timeout, |shelf| shelf.next_unclaimed().map(|_| Waited::Ready))
    }

    /// Nothing will come any more: readers without an event get the cause.
    pub fn close(&self, cause: &str) {
        self.lock().closed.get_or_insert_with(|| cause.to_owned());
        self.changed.notify_all();
    }

    /// Events will come again.
    pub fn reopen(&self) {
        self.lock().closed = None;
    }

    /// Events that nobody took yet.
    pub fn len(&self) -> usize {
        self.lock().len
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn wait(&self, timeout: Duration, look: impl Fn(&mut Shelf) -> Option<Waited>) -> Waited {
        let deadline = Instant::now().checked_add(timeout);
        let mut shelf = self.lock();
        loop {
            if let Some(waited) = look(&mut shelf) {
                return waited;
            }
            if let Some(cause) = &shelf.closed {
                return Waited::Closed(cause.clone());
            }
            let left =
                deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Waited::Timeout;
            }
            (shelf, _) = self.changed.wait_timeout(shelf, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(request: u64, token: i32) -> Event {
        Event { request: RequestId(request), news: News::Token { token, logprob: None, time: 0.0, epoch: 0 } }
    }

    fn end(request: u64) -> Event {
        let output = Output {
            prompt: vec![],
            tokens: vec![],
            logprobs: vec![],
            timestamps: vec![],
            epochs: vec![],
            cached_tokens: 0,
            finish: Finish::Stop,
            started: None,
            ended: 0.0,
        };
        Event { request: RequestId(request), news: News::End(Box::new(output)) }
    }

    fn outbox(events: &[Event]) -> Outbox {
        let outbox = Outbox::default();
        outbox.deliver(&mut events.to_vec());
        outbox
    }

    #[test]
    fn a_reader_of_one_request_leaves_the_others_their_order() {
        let outbox = outbox(&[token(0, 10), token(1, 11), token(0, 12), token(1, 13)]);
        assert_eq!(outbox.take_for(RequestId(1)), Some(token(1, 11)));
        for expected in [token(0, 10), token(0, 12), token(1, 13)] {
            assert_eq!(outbox.take_next(), Some(expected));
        }
        assert_eq!(outbox.take_next(), None);
        assert_eq!(outbox.wait_next(Duration::ZERO), Waited::Timeout);
        assert!(outbox.is_empty());
        assert_eq!(outbox.bytes(), 0);
    }

    #[test]
    fn a_closed_outbox_hands_out_what_is_there_and_then_the_cause() {
        let outbox = outbox(&[token(0, 1)]);
        outbox.close("gone");
        outbox.claim(RequestId(5));
        assert_eq!(outbox.wait_for(RequestId(5), Duration::MAX), Waited::Closed("gone".into()));
        assert_eq!(outbox.wait_next(Duration::MAX), Waited::Ready);
        assert_eq!(outbox.take_next(), Some(token(0, 1)));
        assert_eq!(outbox.wait_next(Duration::MAX), Waited::Closed("gone".into()));
    }

    #[test]
    fn a_claimed_request_is_not_for_the_common_queue_until_the_claim_ends() {
        let outbox = outbox(&[token(7, 1), token(8, 2)]);
        outbox.claim(RequestId(7));
        assert_eq!(outbox.take_next(), Some(token(8, 2)));
        assert_eq!(outbox.take_next(), None);
        outbox.unclaim(RequestId(7));
        assert_eq!(outbox.take_next(), Some(token(7, 1)));
    }

    #[test]
    fn who_waits_for_a_request_that_another_reader_took_to_its_end_is_told() {
        let outbox = std::sync::Arc::new(outbox(&[]));
        outbox.claim(RequestId(3));
        outbox.claim(RequestId(3));
        let waiting = {
            let outbox = outbox.clone();
            std::thread::spawn(move || outbox.wait_for(RequestId(3), Duration::from_secs(60)))
        };
        outbox.deliver(&mut vec![end(3)]);
        let taken = outbox.take_for(RequestId(3));
        assert_eq!(taken, Some(end(3)));
        let waited = waiting.join().unwrap();
        assert!(matches!(waited, Waited::Ready | Waited::Gone));
        assert_eq!(outbox.wait_for(RequestId(3), Duration::MAX), Waited::Gone);
        outbox.unclaim(RequestId(3));
    }

    #[test]
    fn an_output_that_nobody_takes_costs_the_others_nothing() {
        let outbox = outbox(&[end(0)]);
        for n in 0..1000 {
            outbox.deliver(&mut vec![token(1, n)]);
            outbox.take_for(RequestId(1));
        }
        assert_eq!(outbox.len(), 1);
        assert!(outbox.lock().order.len() < 100);
    }

    #[test]
    fn a_listener_is_told_once_and_gets_what_was_there_before_it_too() {
        let outbox = outbox(&[token(7, 1), token(8, 2)]);
        outbox.listen(RequestId(7), 30);
        outbox.deliver(&mut vec![token(7, 3), token(9, 4), end(7)]);
        assert_eq!(outbox.wait_heard(Duration::ZERO), Waited::Ready);
        assert_eq!(outbox.take_untold(), [30]);
        assert_eq!(outbox.wait_heard(Duration::ZERO), Waited::Timeout);
        // The others are for whoever comes.
        assert_eq!(outbox.take_next(), Some(token(8, 2)));
        assert_eq!(outbox.take_next(), Some(token(9, 4)));
        assert_eq!(outbox.take_next(), None);
        for expected in [token(7, 1), token(7, 3)] {
            assert_eq!(outbox.take_heard(30), Some(expected));
        }
        assert_eq!(outbox.take_heard(31), None);
        assert_eq!(outbox.take_heard(30), Some(end(7)));
        assert_eq!(outbox.take_heard(30), None);
        assert!(outbox.is_empty());
        let shelf = outbox.lock();
        assert!(shelf.heard_by.is_empty() && shelf.lines.is_empty(), "nothing is left of it");
    }

    #[test]
    fn a_listener_that_took_all_is_told_again() {
        let outbox = outbox(&[]);
        outbox.listen(RequestId(1), 5);
        outbox.listen(RequestId(2), 5);
        for n in 0..3 {
            outbox.deliver(&mut vec![token(1, n), token(2, n)]);
            assert_eq!(outbox.take_untold(), [5]);
            assert_eq!(outbox.take_heard(5), Some(token(1, n)));
            outbox.deliver(&mut vec![token(2, n + 10)]);
            assert_eq!(outbox.take_untold(), [], "it has not taken all yet");
            assert_eq!(outbox.take_heard(5), Some(token(2, n)));
            assert_eq!(outbox.take_heard(5), Some(token(2, n + 10)));
            assert_eq!(outbox.take_heard(5), None);
        }
    }

    #[test]
    fn events_of_a_listener_that_is_gone_are_for_the_others() {
        let outbox = outbox(&[]);
        outbox.listen(RequestId(1), 5);
        outbox.deliver(&mut vec![token(1, 10), token(1, 11)]);
        assert_eq!(outbox.take_heard(5), Some(token(1, 10)));
        assert_eq!(outbox.wait_next(Duration::ZERO), Waited::Timeout);
        outbox.unlisten(RequestId(1));
        assert_eq!(outbox.take_next(), Some(token(1, 11)));
        assert_eq!(outbox.take_heard(5), None);
        // Another one takes its place.
        outbox.listen(RequestId(2), 5);
        outbox.deliver(&mut vec![token(2, 1)]);
        outbox.listen(RequestId(2), 6);
        assert_eq!(outbox.take_untold(), [5, 6]);
        assert_eq!(outbox.take_heard(5), None);
        assert_eq!(outbox.take_heard(6), Some(token(2, 1)));
    }
}
