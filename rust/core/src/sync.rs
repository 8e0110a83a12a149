//! The locks of the inbox and the outbox: the standard library's, or a model checker's where it plays through the
//! interleavings of their threads (`interleavings.rs`).

#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(all(test, loom))]
pub(crate) use modelled::Condvar;

#[cfg(all(test, loom))]
mod modelled {
    use std::sync::{LockResult, PoisonError};
    use std::time::Duration;

    use super::MutexGuard;

    /// The model has no clock: a timeout of zero is over at once and any other never is. So a wake-up that is lost
    /// is reported as a deadlock, where a timeout would have covered it up.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub fn new() -> Self {
            Self::default()
        }

        /// The flag tells whether the time is over.
        pub fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            timeout: Duration,
        ) -> LockResult<(MutexGuard<'a, T>, bool)> {
            if timeout.is_zero() {
                return Ok((guard, true));
            }
            let guard = self.0.wait(guard).unwrap_or_else(PoisonError::into_inner);
            Ok((guard, false))
        }

        pub fn wait_timeout_while<'a, T>(
            &self,
            mut guard: MutexGuard<'a, T>,
            timeout: Duration,
            mut condition: impl FnMut(&mut T) -> bool,
        ) -> LockResult<(MutexGuard<'a, T>, bool)> {
            let mut is_over = false;
            while !is_over && condition(&mut guard) {
                (guard, is_over) = self.wait_timeout(guard, timeout)?;
            }
            Ok((guard, is_over))
        }

        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
