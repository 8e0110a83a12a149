//! Work shared out over threads.
//!
//! torch computes in an OpenMP team whose threads wait awake for their next region. A pool of our own would fight them
//! for the cores: its workers wake on a core where another waits busily. So the kernels run inside the very team of the
//! calling thread, where the process has GNU OpenMP (as torch's builds for Linux have); elsewhere in rayon's pool.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ffi::{c_uint, c_void};
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// `GOMP_parallel(body, data, threads, flags)`: the call that GCC compiles `#pragma omp parallel` to. It returns when
/// every thread of the team has run `body(data)`.
type GompParallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// Threads that run one body together.
#[derive(Clone, Copy, Debug)]
pub enum Team {
    /// The OpenMP team of the calling thread.
    OpenMp(GompParallel),
    /// rayon's pool.
    Rayon,
    /// The calling thread alone.
    Serial,
}

impl Team {
    /// The best one for this process.
    ///
    /// In a process forked from one that asked before, where rayon's threads no longer exist, it is [`Team::Serial`]
    /// in place of [`Team::Rayon`].
    #[must_use]
    pub fn of_process() -> Self {
        static FOUND: OnceLock<(Team, u32)> = OnceLock::new();
        let process = std::process::id();
        let (team, found_in) =
            *FOUND.get_or_init(|| (gomp_parallel().map_or(Team::Rayon, Team::OpenMp), process));
        match team {
            Self::Rayon if found_in != process => Self::Serial,
            team => team,
        }
    }

    /// What it is called, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenMp(_) => "OpenMP",
            Self::Rayon => "rayon",
            Self::Serial => "serial",
        }
    }

    /// Runs `body(worker)` once on each of at most `threads` threads, worker numbers from 0; returns when all are done.
    ///
    /// A runtime may give fewer threads than asked for, so no body may wait for another one.
    ///
    /// # Panics
    /// If a body panics, here, after all have ended.
    pub fn run(self, threads: usize, body: &(dyn Fn(usize) + Sync)) {
        if threads <= 1 {
            return body(0);
        }
        match self {
            Self::OpenMp(parallel) => run_in_openmp(parallel, threads, body),
            Self::Rayon => rayon::scope(|scope| {
                for worker in 1..threads {
                    scope.spawn(move |_| body(worker));
                }
                body(0);
            }),
            Self::Serial => body(0),
        }
    }

    /// Runs `task(worker, index)` for every index below `tasks`, each taken by the next thread that is free.
    ///
    /// # Panics
    /// As [`Team::run`].
    pub fn share_out(self, threads: usize, tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        let next = AtomicUsize::new(0);
        self.run(threads.min(tasks), &|worker| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= tasks {
                    return;
                }
                task(worker, index);
            }
        });
    }
}

/// Threads were asked for that this process does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchTeam(String);

impl fmt::Display for NoSuchTeam {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "threads {:?} are unknown or not of this process: \"OpenMP\" (where GNU OpenMP is loaded), \"rayon\" and \"serial\" are possible",
            self.0
        )
    }
}

impl std::error::Error for NoSuchTeam {}

impl FromStr for Team {
    type Err = NoSuchTeam;

    fn from_str(name: &str) -> Result<Self, NoSuchTeam> {
        let teams = [Self::Rayon, Self::Serial].into_iter().chain(gomp_parallel().map(Self::OpenMp));
        teams.into_iter().find(|team| team.name() == name).ok_or_else(|| NoSuchTeam(name.to_owned()))
    }
}

/// What the threads of a region share.
struct Region<'body> {
    body: &'body (dyn Fn(usize) + Sync),
    workers: AtomicUsize,
    panicked: Mutex<Option<Box<dyn Any + Send>>>,
}

fn run_in_openmp(parallel: GompParallel, threads: usize, body: &(dyn Fn(usize) + Sync)) {
    extern "C" fn enter(data: *mut c_void) {
        // SAFETY: `data` is the region below, which outlives the call that runs this.
        let region = unsafe { &*data.cast::<Region<'_>>() };
        let worker = region.workers.fetch_add(1, Ordering::Relaxed);
        // C knows no unwinding.
        if let Err(cause) = panic::catch_unwind(AssertUnwindSafe(|| (region.body)(worker))) {
            *region.panicked.lock().unwrap_or_else(PoisonError::into_inner) = Some(cause);
        }
    }

    let region = Region { body, workers: AtomicUsize::new(0), panicked: Mutex::new(None) };
    let threads = c_uint::try_from(threads).unwrap_or(c_uint::MAX);
    // SAFETY: the function is the runtime's own, with the signature of its ABI; it returns after the last thread has
    // left `enter`, so the region is borrowed for that long only. Its fields are shared soundly: a Sync body, an
    // atomic and a mutex.
    unsafe { parallel(enter, (&raw const region).cast_mut().cast(), threads, 0) };
    let panicked = region.panicked.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(cause) = panicked {
        panic::resume_unwind(cause);
    }
}

/// The entry of the GNU OpenMP that this process has loaded, if it has.
fn gomp_parallel() -> Option<GompParallel> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut paths = maps.lines().filter_map(|line| line.split_ascii_whitespace().nth(5)).filter(|path| {
        let name = path.rsplit('/').next();
        name.is_some_and(|name| name.starts_with("libgomp"))
    });
    // Other packages may have brought one of their own: torch's is the one whose threads are awake.
    let first = paths.next()?;
    let path = std::iter::once(first).chain(paths).find(|path| path.contains("/torch")).unwrap_or(first);
    // SAFETY: the library is loaded already, so no initialiser of it runs now.
    let library = unsafe { libloading::Library::new(path) }.ok()?;
    // SAFETY: that symbol of libgomp has this signature since GCC 4.9, as part of its ABI.
    let parallel = unsafe { library.get::<GompParallel>(b"GOMP_parallel") }.map(|symbol| *symbol);
    // It stays loaded for as long as the process lives.
    std::mem::forget(library);
    parallel.ok()
}

/// One value for each worker, each used by that worker alone.
#[derive(Debug)]
pub struct PerWorker<T>(Vec<UnsafeCell<T>>);

// SAFETY: a cell is only reached through `of`, whose caller promises that no two threads use the same worker's.
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T: Default> PerWorker<T> {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Makes room for so many workers.
    pub fn reserve(&mut self, workers: usize) {
        if self.0.len() < workers {
            self.0.resize_with(workers, UnsafeCell::default);
        }
    }

    /// The value of a worker.
    ///
    /// # Safety
    /// No other reference to the same worker's value may exist: to be called by that worker of a [`Team::run`].
    ///
    /// # Panics
    /// If there is no room for that worker.
    #[must_use]
    #[expect(clippy::mut_from_ref, reason = "a cell; see the promise above")]
    pub unsafe fn of(&self, worker: usize) -> &mut T {
        // SAFETY: promised by the caller.
        unsafe { &mut *self.0[worker].get() }
    }
}

impl<T: Default> Default for PerWorker<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for team in [Team::Rayon, Team::Serial, Team::of_process()] {
            let ran: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
            team.share_out(3, ran.len(), &|worker, index| {
                assert!(worker < 3);
                ran[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(ran.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    #[should_panic(expected = "task 7")]
    fn a_panic_comes_out_in_the_caller() {
        Team::Rayon.share_out(2, 10, &|_, index| assert!(index != 7, "task {index}"));
    }
}
