//! The outbox: how events reach the readers. An event stays until one reader takes it.
//!
//! A reader that waits for one request gets that request's events before readers of the common queue do.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::ids::RequestId;
use crate::sequence::Finish;

/// All that a request produced.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The generated tokens.
    pub tokens: Vec<i32>,
    /// One a token where they were asked for, else empty.
    pub logprobs: Vec<f32>,
    /// Time of each token where they were asked for, else empty.
    pub timestamps: Vec<f64>,
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
    },
    /// The terminal event: exactly one a request, and its last.
    End(Output),
}

/// News, and whose.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The request.
    pub request: RequestId,
    /// The news.
    pub news: News,
}

/// What a reader comes back with.
#[derive(Debug, Clone, PartialEq)]
pub enum Taken {
    /// An event, now the reader's.
    Event(Event),
    /// None came in time.
    Timeout,
    /// None is there and none will come: the engine died of this.
    Closed(String),
}

#[derive(Debug, Default)]
struct Shelf {
    /// Events of each request, oldest first, with their place in the common order.
    by_request: HashMap<RequestId, VecDeque<(u64, News)>>,
    /// The common order. An entry whose event was taken by a reader of its request is stale.
    order: VecDeque<(u64, RequestId)>,
    next_place: u64,
    /// Readers waiting for one request.
    claims: HashMap<RequestId, usize>,
    closed: Option<String>,
}

impl Shelf {
    fn take_from(&mut self, request: RequestId) -> Option<Event> {
        let events = self.by_request.get_mut(&request)?;
        let (_, news) = events.pop_front()?;
        if events.is_empty() {
            self.by_request.remove(&request);
            if self.by_request.is_empty() {
                self.order.clear();
            }
        }
        Some(Event { request, news })
    }

    fn take_next(&mut self) -> Option<Event> {
        let mut at = 0;
        while let Some(&(place, request)) = self.order.get(at) {
            let front = self.by_request.get(&request).and_then(|events| events.front());
            // Later events of the request stand later in the order, so a front that is younger means: taken.
            if front.is_none_or(|&(stamp, _)| stamp > place) {
                self.order.remove(at);
            } else if self.claims.contains_key(&request) {
                at += 1;
            } else {
                self.order.remove(at);
                return self.take_from(request);
            }
        }
        None
    }
}

/// One writer, many readers.
#[derive(Debug, Default)]
pub struct Outbox {
    shelf: Mutex<Shelf>,
    delivered: Condvar,
}

impl Outbox {
    /// Puts events out, in order, and empties the given buffer.
    pub(crate) fn deliver(&self, events: &mut Vec<Event>) {
        if events.is_empty() {
            return;
        }
        let mut shelf = self.lock();
        for Event { request, news } in events.drain(..) {
            let place = shelf.next_place;
            shelf.next_place += 1;
            shelf.order.push_back((place, request));
            shelf.by_request.entry(request).or_default().push_back((place, news));
        }
        drop(shelf);
        self.delivered.notify_all();
    }

    /// The oldest event of that request.
    pub fn take_for(&self, request: RequestId, timeout: Duration) -> Taken {
        let mut shelf = self.lock();
        *shelf.claims.entry(request).or_default() += 1;
        let taken;
        (shelf, taken) = self.wait(shelf, timeout, |shelf| shelf.take_from(request));
        if let Some(claims) = shelf.claims.get_mut(&request) {
            *claims -= 1;
            if *claims == 0 {
                shelf.claims.remove(&request);
            }
        }
        taken
    }

    /// The oldest event that nobody waits for by its request.
    pub fn take_next(&self, timeout: Duration) -> Taken {
        self.wait(self.lock(), timeout, Shelf::take_next).1
    }

    /// Nothing will come any more: readers without an event get the cause.
    pub fn close(&self, cause: &str) {
        self.lock().closed.get_or_insert_with(|| cause.to_owned());
        self.delivered.notify_all();
    }

    /// Events will come again.
    pub fn reopen(&self) {
        self.lock().closed = None;
    }

    /// Events that nobody took yet.
    pub fn len(&self) -> usize {
        self.lock().by_request.values().map(VecDeque::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lock().by_request.is_empty()
    }

    fn wait<'a>(
        &'a self,
        mut shelf: MutexGuard<'a, Shelf>,
        timeout: Duration,
        take: impl Fn(&mut Shelf) -> Option<Event>,
    ) -> (MutexGuard<'a, Shelf>, Taken) {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = take(&mut shelf) {
                return (shelf, Taken::Event(event));
            }
            if let Some(cause) = &shelf.closed {
                let taken = Taken::Closed(cause.clone());
                return (shelf, taken);
            }
            let left =
                deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return (shelf, Taken::Timeout);
            }
            (shelf, _) = self.delivered.wait_timeout(shelf, left).unwrap_or_else(PoisonError::into_inner);
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
        Event { request: RequestId(request), news: News::Token { token, logprob: None, time: 0.0 } }
    }

    fn outbox(events: &[(u64, i32)]) -> Outbox {
        let outbox = Outbox::default();
        outbox.deliver(&mut events.iter().map(|&(request, id)| token(request, id)).collect());
        outbox
    }

    #[test]
    fn a_reader_of_one_request_leaves_the_others_their_order() {
        let outbox = outbox(&[(0, 10), (1, 11), (0, 12), (1, 13)]);
        assert_eq!(outbox.take_for(RequestId(1), Duration::ZERO), Taken::Event(token(1, 11)));
        for expected in [token(0, 10), token(0, 12), token(1, 13)] {
            assert_eq!(outbox.take_next(Duration::ZERO), Taken::Event(expected));
        }
        assert_eq!(outbox.take_next(Duration::ZERO), Taken::Timeout);
        assert!(outbox.is_empty());
    }

    #[test]
    fn a_closed_outbox_hands_out_what_is_there_and_then_the_cause() {
        let outbox = outbox(&[(0, 1)]);
        outbox.close("gone");
        assert_eq!(outbox.take_for(RequestId(5), Duration::MAX), Taken::Closed("gone".into()));
        assert_eq!(outbox.take_next(Duration::MAX), Taken::Event(token(0, 1)));
        assert_eq!(outbox.take_next(Duration::MAX), Taken::Closed("gone".into()));
    }

    #[test]
    fn a_claimed_request_is_not_for_the_common_queue() {
        let outbox = std::sync::Arc::new(Outbox::default());
        let reader = {
            let outbox = outbox.clone();
            std::thread::spawn(move || outbox.take_for(RequestId(7), Duration::from_secs(20)))
        };
        while !outbox.lock().claims.contains_key(&RequestId(7)) {
            std::thread::yield_now();
        }
        outbox.deliver(&mut vec![token(7, 1), token(8, 2)]);
        assert_eq!(outbox.take_next(Duration::ZERO), Taken::Event(token(8, 2)));
        assert_eq!(reader.join().unwrap(), Taken::Event(token(7, 1)));
    }
}
