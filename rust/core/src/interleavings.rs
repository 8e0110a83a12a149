//! Small programs of threads on the inbox and the outbox, each played through in every interleaving by a model
//! checker. It needs a build of its own:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p chairlift-core --lib interleavings
//! ```
//!
//! The programs wait only for what must come, and no wait ends by itself (see `sync.rs`): a wake-up that is lost in
//! one interleaving is a deadlock there, which the checker reports.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use loom::thread::{JoinHandle, spawn};

use crate::config::EngineConfig;
use crate::error::{Error, Result};
use crate::ids::RequestId;
use crate::inbox::{Inbox, Message};
use crate::outbox::{Event, News, Outbox, Output, Waited};
use crate::sequence::{Finish, Request};

/// A thread of the program.
fn beside<S: 'static, T: 'static>(shared: &Arc<S>, work: impl FnOnce(&S) -> T + 'static) -> JoinHandle<T> {
    let shared = shared.clone();
    spawn(move || work(&shared))
}

fn inbox(max_queue_size: usize) -> Arc<Inbox> {
    let config = EngineConfig { vocab_size: 97, max_queue_size, ..EngineConfig::default() };
    Arc::new(Inbox::new(&config, std::sync::Arc::default()))
}

fn submit(inbox: &Inbox) -> Result<RequestId> {
    inbox.submit(Request { prompt: vec![5], ..Request::default() })
}

/// What the engine's side has read.
#[derive(Default)]
struct Read {
    submitted: Vec<RequestId>,
    cancelled: Vec<RequestId>,
}

impl Read {
    fn take(&mut self, inbox: &Inbox) {
        let mut mail = VecDeque::new();
        inbox.take(&mut mail);
        for message in mail {
            match message {
                Message::Submit(id, ..) => self.submitted.push(id),
                Message::Cancel(id) => self.cancelled.push(id),
            }
        }
    }

    fn len(&self) -> usize {
        self.submitted.len() + self.cancelled.len()
    }
}

#[test]
fn every_message_wakes_the_engine_and_is_read_once() {
    loom::model(|| {
        let inbox = inbox(0);
        let gives_up = beside(&inbox, |inbox| {
            let id = submit(inbox).unwrap();
            inbox.cancel(id);
            id
        });
        let stays = beside(&inbox, |inbox| submit(inbox).unwrap());
        let mut read = Read::default();
        while read.len() < 3 {
            let before = read.len();
            assert!(inbox.wait(Duration::MAX));
            read.take(&inbox);
            assert!(read.len() > before, "woken for nothing");
            // Else a cancellation would find nothing to cancel.
            assert!(read.cancelled.iter().all(|id| read.submitted.contains(id)));
        }
        let gives_up = gives_up.join().unwrap();
        let mut submitted = [gives_up, stays.join().unwrap()];
        submitted.sort();
        assert_eq!((read.submitted, read.cancelled), (submitted.to_vec(), vec![gives_up]));
        assert!(inbox.is_empty());
    });
}

#[test]
fn a_wake_ends_the_wait_that_is_on_or_else_the_next() {
    loom::model(|| {
        let inbox = inbox(0);
        let waker = beside(&inbox, Inbox::wake);
        assert!(inbox.wait(Duration::MAX));
        waker.join().unwrap();
        assert!(!inbox.wait(Duration::ZERO));
    });
}

#[test]
fn a_wake_that_races_with_a_request_leaves_the_request_to_be_read() {
    loom::model(|| {
        let inbox = inbox(0);
        let waker = beside(&inbox, Inbox::wake);
        let submitter = beside(&inbox, |inbox| submit(inbox).unwrap());
        let mut read = Read::default();
        while read.len() == 0 {
            assert!(inbox.wait(Duration::MAX));
            read.take(&inbox);
        }
        waker.join().unwrap();
        assert_eq!(read.submitted, [submitter.join().unwrap()]);
        assert!(inbox.is_empty());
    });
}

fn submit_and_cancel(inbox: &Inbox) -> Result<RequestId> {
    submit(inbox).inspect(|&id| inbox.cancel(id))
}

/// What was read of an inbox up to its close, against what those who submitted were told.
fn check_closed(inbox: &Inbox, read: &Read, submitted: impl IntoIterator<Item = Result<RequestId>>) {
    let cause = Error::Closed { cause: "the end".into() };
    let mut accepted = Vec::new();
    for result in submitted {
        match result {
            Ok(id) => accepted.push(id),
            Err(error) => assert_eq!(error, cause),
        }
    }
    accepted.sort();
    assert_eq!(read.submitted, accepted);
    assert_eq!(inbox.queued(), accepted.len());
    assert_eq!(submit(inbox), Err(cause));
    let mut later = Read::default();
    later.take(inbox);
    assert_eq!(later.submitted, []);
}

#[test]
fn an_engine_that_closes_reads_every_request_that_was_taken_and_the_others_get_the_cause() {
    loom::model(|| {
        let inbox = inbox(0);
        let submitters = [beside(&inbox, submit), beside(&inbox, submit_and_cancel)];
        let mut read = Read::default();
        inbox.close("the end");
        read.take(&inbox);
        let submitted = submitters.map(|submitter| submitter.join().unwrap());
        check_closed(&inbox, &read, submitted);
    });
}

#[test]
fn an_engine_that_is_closed_and_woken_reads_every_request_that_was_taken() {
    loom::model(|| {
        let inbox = inbox(0);
        let submitter = beside(&inbox, submit);
        let closer = beside(&inbox, |inbox| {
            inbox.close("the end");
            inbox.wake();
        });
        let mut read = Read::default();
        while inbox.closed().is_none() {
            assert!(inbox.wait(Duration::MAX));
            read.take(&inbox);
        }
        // What came between the last reading and the close.
        read.take(&inbox);
        closer.join().unwrap();
        check_closed(&inbox, &read, [submitter.join().unwrap()]);
    });
}

#[test]
fn of_two_that_race_for_the_last_place_in_the_queue_one_gets_it() {
    loom::model(|| {
        let inbox = inbox(1);
        let other = beside(&inbox, submit);
        let mine = submit(&inbox);
        let other = other.join().unwrap();
        let (accepted, refused) = if mine.is_ok() { (mine, other) } else { (other, mine) };
        assert_eq!(refused, Err(Error::QueueFull { waiting: 1, wanted: 1, limit: 1 }));
        let mut read = Read::default();
        read.take(&inbox);
        assert_eq!(read.submitted, [accepted.unwrap()]);
        assert_eq!(inbox.queued(), 1);
    });
}

#[test]
fn the_queue_keeps_its_bound_while_requests_come_and_leave() {
    loom::model(|| {
        let inbox = inbox(1);
        let submitter = |inbox: &Inbox| {
            let submitted = submit(inbox);
            assert!(inbox.queued() <= 1);
            submitted
        };
        let submitters = [beside(&inbox, submitter), beside(&inbox, submitter)];
        let mut read = Read::default();
        assert!(inbox.wait(Duration::MAX));
        read.take(&inbox);
        assert_eq!(read.len(), 1);
        inbox.left_queue();
        let submitted = submitters.map(|submitter| submitter.join().unwrap());
        read.take(&inbox);
        let mut accepted = Vec::new();
        for result in submitted {
            match result {
                Ok(id) => accepted.push(id),
                Err(error) => assert_eq!(error, Error::QueueFull { waiting: 1, wanted: 1, limit: 1 }),
            }
        }
        accepted.sort();
        assert_eq!(read.submitted, accepted);
        assert_eq!(inbox.queued(), accepted.len() - 1);
    });
}

const ONE: RequestId = RequestId(1);
const OTHER: RequestId = RequestId(2);

fn token(request: RequestId, token: i32) -> Event {
    Event { request, news: News::Token { token, logprob: None, time: 0.0, epoch: 0 } }
}

fn end(request: RequestId) -> Event {
    let (tokens, logprobs, timestamps) = (vec![], vec![], vec![]);
    let output = Output {
        prompt: vec![],
        tokens,
        logprobs,
        timestamps,
        epochs: vec![],
        cached_tokens: 0,
        finish: Finish::Stop,
        started: None,
        ended: 0.0,
    };
    Event { request, news: News::End(Box::new(output)) }
}

/// A reader of the common queue: the first event that it gets hold of, or why there is none.
fn next(outbox: &Outbox) -> std::result::Result<Event, Waited> {
    loop {
        match outbox.wait_next(Duration::MAX) {
            // Another may be faster.
            Waited::Ready => match outbox.take_next() {
                Some(event) => return Ok(event),
                None => continue,
            },
            other => return Err(other),
        }
    }
}

/// A reader of one request: all events that it gets hold of up to the terminal one, and what told it that no more come
/// if another took that.
fn all_of(outbox: &Outbox, request: RequestId) -> (Vec<Event>, Option<Waited>) {
    let mut events = Vec::new();
    loop {
        match outbox.wait_for(request, Duration::MAX) {
            Waited::Ready => events.extend(outbox.take_for(request)),
            other => return (events, Some(other)),
        }
        if events.last().is_some_and(|event| matches!(event.news, News::End(_))) {
            return (events, None);
        }
    }
}

#[test]
fn events_delivered_together_go_to_one_waiting_reader_each() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        let readers = [beside(&outbox, next), beside(&outbox, next)];
        outbox.deliver(&mut vec![end(ONE), end(OTHER)]);
        let mut taken = readers.map(|reader| reader.join().unwrap().unwrap());
        taken.sort_by_key(|event| event.request);
        assert_eq!(taken, [end(ONE), end(OTHER)]);
        assert!(outbox.is_empty());
    });
}

#[test]
fn an_event_goes_to_one_of_a_reader_by_name_and_one_of_the_common_queue() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        let by_name = beside(&outbox, |outbox| outbox.take_for(ONE));
        let common = beside(&outbox, Outbox::take_next);
        outbox.deliver(&mut vec![end(ONE)]);
        let taken = [by_name, common].map(|reader| reader.join().unwrap());
        // Both may have come too early.
        let taken: Vec<_> = taken.into_iter().flatten().chain(outbox.take_next()).collect();
        assert_eq!(taken, [end(ONE)]);
        assert!(outbox.is_empty());
    });
}

#[test]
fn who_claims_a_request_gets_its_events_and_the_common_queue_the_others() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        outbox.claim(ONE);
        let by_name = beside(&outbox, |outbox| all_of(outbox, ONE));
        let common = beside(&outbox, next);
        outbox.deliver(&mut vec![end(ONE), end(OTHER)]);
        assert_eq!(by_name.join().unwrap(), (vec![end(ONE)], None));
        assert_eq!(common.join().unwrap(), Ok(end(OTHER)));
        assert!(outbox.is_empty());
    });
}

#[test]
fn a_stream_reaches_the_one_who_claims_it_whole_and_in_order() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        outbox.claim(ONE);
        let by_name = beside(&outbox, |outbox| all_of(outbox, ONE));
        for event in [token(ONE, 7), token(ONE, 8), end(ONE)] {
            outbox.deliver(&mut vec![event]);
        }
        let stream = vec![token(ONE, 7), token(ONE, 8), end(ONE)];
        assert_eq!(by_name.join().unwrap(), (stream, None));
        assert!(outbox.is_empty());
    });
}

#[test]
fn of_two_that_claim_a_request_one_gets_its_end_and_the_other_is_told() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        let reader = |outbox: &Outbox| {
            let read = all_of(outbox, ONE);
            outbox.unclaim(ONE);
            read
        };
        // A claim is made while its request lives.
        outbox.claim(ONE);
        outbox.claim(ONE);
        let readers = [beside(&outbox, reader), beside(&outbox, reader)];
        outbox.deliver(&mut vec![end(ONE)]);
        let mut read = readers.map(|reader| reader.join().unwrap());
        read.sort_by_key(|(events, _)| events.len());
        assert_eq!(read, [(vec![], Some(Waited::Gone)), (vec![end(ONE)], None)]);
        assert!(outbox.is_empty());
    });
}

#[test]
fn a_close_wakes_every_reader() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        outbox.claim(ONE);
        let by_name = beside(&outbox, |outbox| all_of(outbox, ONE));
        let common = beside(&outbox, next);
        outbox.close("the end");
        let closed = Waited::Closed("the end".into());
        assert_eq!(by_name.join().unwrap(), (vec![], Some(closed.clone())));
        assert_eq!(common.join().unwrap(), Err(closed));
    });
}

#[test]
fn what_was_delivered_before_the_close_comes_before_the_cause() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        outbox.claim(ONE);
        let by_name = beside(&outbox, |outbox| all_of(outbox, ONE));
        outbox.deliver(&mut vec![token(ONE, 7)]);
        outbox.close("the end");
        let closed = Waited::Closed("the end".into());
        assert_eq!(by_name.join().unwrap(), (vec![token(ONE, 7)], Some(closed)));
        assert!(outbox.is_empty());
    });
}

#[test]
fn what_a_claim_reserved_goes_to_the_waiting_reader_of_the_common_queue_when_it_ends() {
    loom::model(|| {
        let outbox = Arc::new(Outbox::default());
        outbox.claim(ONE);
        let common = beside(&outbox, next);
        let gives_up = beside(&outbox, |outbox| outbox.unclaim(ONE));
        outbox.deliver(&mut vec![token(ONE, 7)]);
        gives_up.join().unwrap();
        assert_eq!(common.join().unwrap(), Ok(token(ONE, 7)));
        assert!(outbox.is_empty());
    });
}
