//! What the tests of kernels share: tensors between pages that nobody may touch, and numbers to fill them with.

use chairlift_kernels::element::Dtype;
use half::{bf16, f16};

mod guarded {
    //! Memory with a page on either side that nobody may touch.

    pub struct Guarded {
        map: *mut u8,
        mapped: usize,
        data: *mut u8,
        len: usize,
    }

    impl Guarded {
        /// `len` bytes that end where the forbidden page begins, or begin where one ends.
        pub fn new(len: usize, at_end: bool) -> Self {
            // SAFETY: plain system calls on memory of our own.
            unsafe {
                let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).expect("a page size");
                let inner = len.next_multiple_of(page).max(page);
                let mapped = inner + 2 * page;
                let map = libc::mmap(
                    std::ptr::null_mut(),
                    mapped,
                    libc::PROT_NONE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
                assert_ne!(map, libc::MAP_FAILED);
                let start = map.cast::<u8>().add(page);
                assert_eq!(libc::mprotect(start.cast(), inner, libc::PROT_READ | libc::PROT_WRITE), 0);
                let data = if at_end { start.add(inner - len) } else { start };
                Self { map: map.cast(), mapped, data, len }
            }
        }

        pub fn data(&self) -> *mut u8 {
            self.data
        }

        pub fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: mapped, and ours.
            unsafe { std::slice::from_raw_parts_mut(self.data, self.len) }
        }
    }

    impl Drop for Guarded {
        fn drop(&mut self) {
            // SAFETY: the mapping of `new`.
            unsafe { libc::munmap(self.map.cast(), self.mapped) };
        }
    }
}

use guarded::Guarded;

/// A tensor of some dtype in guarded memory, all NaN at first.
pub struct Tensor {
    pub memory: Guarded,
    pub dtype: Dtype,
}

impl Tensor {
    pub fn new(elements: usize, dtype: Dtype, at_end: bool) -> Self {
        let mut tensor = Self { memory: Guarded::new(elements * dtype.bytes(), at_end), dtype };
        for index in 0..elements {
            tensor.set(index, f32::NAN);
        }
        tensor
    }

    /// Writes a number and returns it as rounded to the dtype.
    pub fn set(&mut self, index: usize, value: f32) -> f64 {
        let at = index * self.dtype.bytes();
        let bytes = self.memory.bytes();
        match self.dtype {
            Dtype::F32 => {
                bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
                f64::from(value)
            }
            Dtype::Bf16 => {
                let value = bf16::from_f32(value);
                bytes[at..at + 2].copy_from_slice(&value.to_ne_bytes());
                value.to_f64()
            }
            Dtype::F16 => {
                let value = f16::from_f32(value);
                bytes[at..at + 2].copy_from_slice(&value.to_ne_bytes());
                value.to_f64()
            }
        }
    }

    pub fn get(&mut self, index: usize) -> f64 {
        let at = index * self.dtype.bytes();
        let bytes = self.memory.bytes();
        match self.dtype {
            Dtype::F32 => f64::from(f32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))),
            Dtype::Bf16 => bf16::from_ne_bytes(bytes[at..at + 2].try_into().expect("2 bytes")).to_f64(),
            Dtype::F16 => f16::from_ne_bytes(bytes[at..at + 2].try_into().expect("2 bytes")).to_f64(),
        }
    }
}

/// Numbers that look random: normal enough for scores that are neither flat nor all at one key.
pub struct Noise(pub u64);

impl Noise {
    pub fn next(&mut self) -> f32 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }
}

/// Cases of a property: `CHAIRLIFT_KERNEL_CASES`, or so many.
pub fn cases(usual: u32) -> u32 {
    std::env::var("CHAIRLIFT_KERNEL_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(usual)
}
