//! Which instructions a kernel is compiled for. Chosen at run time, so that one wheel runs everywhere.

use std::fmt;
use std::hint::black_box;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Instant;

use crate::simd::{self, Kernel, Simd};

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// What [`Isa::Avx512Bf16`] has, and products of bf16 matrices in tile registers (AMX).
    AmxBf16,
    /// AVX-512 (F, BW, DQ, VL) with the dot products of bf16 pairs.
    Avx512Bf16,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// The vectors that every 64-bit ARM has.
    Neon,
    /// Whatever the compiler makes of plain Rust.
    Plain,
}

impl Isa {
    const ALL: [Self; 6] =
        [Self::AmxBf16, Self::Avx512Bf16, Self::Avx512, Self::Avx2, Self::Neon, Self::Plain];

    /// The best one of this machine.
    #[must_use]
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let mut available = Self::available();
            available.next().unwrap_or(Self::Plain)
        })
    }

    /// Those that this machine can run, the best first: dot products of bf16 pairs come after plain AVX-512 where they
    /// are slower than products in fp32, as they are on some processors.
    pub fn available() -> impl Iterator<Item = Self> {
        let mut all = Self::ALL;
        if Self::Avx512Bf16.runs_here() && !pairs_are_fast() {
            all.swap(1, 2);
        }
        all.into_iter().filter(|isa| isa.runs_here())
    }

    /// Whether this machine has its instructions.
    #[must_use]
    pub fn runs_here(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let runs = match self {
            Self::AmxBf16 => Self::Avx512Bf16.runs_here() && has_tiles(),
            Self::Avx512Bf16 => Self::Avx512.runs_here() && is_x86_feature_detected!("avx512bf16"),
            Self::Avx512 => {
                Self::Avx2.runs_here()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Neon => false,
            Self::Plain => true,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let runs = match self {
            Self::Neon => cfg!(target_arch = "aarch64"),
            Self::Plain => true,
            Self::AmxBf16 | Self::Avx512Bf16 | Self::Avx512 | Self::Avx2 => false,
        };
        runs
    }

    /// Its name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AmxBf16 => "amx_bf16",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Plain => "plain",
        }
    }
}

/// Whether a dot product of bf16 pairs takes clearly less than two products in fp32, as measured once.
fn pairs_are_fast() -> bool {
    /// Part of the time of two products that one may take.
    const MOST: f64 = 0.9;
    static FAST: OnceLock<bool> = OnceLock::new();
    *FAST.get_or_init(|| {
        let (mut pairs, mut products) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..8 {
            // SAFETY: the machine has the instructions: this is asked of none else.
            unsafe {
                simd::run(Isa::Avx512Bf16, Rate { in_pairs: true, seconds: &mut pairs });
                simd::run(Isa::Avx512Bf16, Rate { in_pairs: false, seconds: &mut products });
            }
        }
        pairs < MOST * 2.0 * products
    })
}

/// The shortest time of some thousand products.
struct Rate<'a> {
    in_pairs: bool,
    seconds: &'a mut f64,
}

impl Kernel for Rate<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the machine has the instructions, as promised by the caller.
        unsafe {
            let mut sums = [S::splat(0.0); 12];
            let factor = black_box(S::splat(0.0));
            let start = Instant::now();
            for _ in 0..512 {
                for sum in &mut sums {
                    *sum = match self.in_pairs {
                        true => S::dot_bf16_pair(*sum, 0, factor),
                        false => S::mul_add(factor, factor, *sum),
                    };
                }
            }
            let seconds = start.elapsed().as_secs_f64();
            *self.seconds = self.seconds.min(seconds);
            black_box(sums);
        }
    }
}

/// Whether there are tile registers that multiply bf16, and the system lets this process use them.
#[cfg(target_arch = "x86_64")]
fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    /// AMX-BF16 and AMX-TILE, of leaf 7.
    const TILES: u32 = 1 << 22 | 1 << 24;
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let has = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES == TILES;
        has && tiles_are_permitted()
    })
}

/// Asks for the tile registers, which Linux keeps only for processes that did.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_are_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: asks for a permission, for this process and good; memory is not touched.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn tiles_are_permitted() -> bool {
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// An instruction set was asked for that is unknown, or not of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoSuchIsa(String);

impl fmt::Display for NoSuchIsa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = Isa::available().map(Isa::name).collect();
        write!(
            formatter,
            "instruction set {:?} is unknown or not of this machine, which has {}",
            self.0,
            names.join(", ")
        )
    }
}

impl std::error::Error for NoSuchIsa {}

impl FromStr for Isa {
    type Err = NoSuchIsa;

    fn from_str(name: &str) -> Result<Self, NoSuchIsa> {
        Self::available().find(|isa| isa.name() == name).ok_or_else(|| NoSuchIsa(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_name_reads_back() {
        for isa in Isa::available() {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
    }

    #[test]
    fn the_best_is_the_first_of_those_that_run_here() {
        assert_eq!(Isa::available().next(), Some(Isa::best()));
        let available: Vec<_> = Isa::available().collect();
        assert!(Isa::ALL.iter().all(|isa| available.contains(isa) == isa.runs_here()));
    }

    #[test]
    fn what_runs_nowhere_or_not_here_is_refused_by_name() {
        let error = "mmx".parse::<Isa>().expect_err("nobody compiles for it");
        assert!(error.to_string().contains("\"mmx\""), "{error}");
        assert!(error.to_string().contains("plain"), "{error}");
    }
}
