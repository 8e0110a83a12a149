//! Typed ids: a block number cannot pass for a row number, a stale sequence handle cannot pass for a live one.

use std::fmt;

/// A block of the pool, from 0; the two trash blocks follow the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub(crate) u32);

impl BlockId {
    /// The block's number, as it stands in block tables.
    pub fn get(self) -> u32 {
        self.0
    }
}

/// A sequence's place in the device-resident tables, the same from admission to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(pub(crate) u32);

impl RowId {
    /// The row's number, `0 .. max_requests_per_batch`; the row after the last is trash.
    pub fn get(self) -> u32 {
        self.0
    }
}

/// A request, in order of submission over the engine's life. Never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(crate) u64);

impl RequestId {
    /// The ordinal of the request, from 0.
    pub fn get(self) -> u64 {
        self.0
    }

    /// The id with that ordinal. An ordinal that no request has simply names nothing.
    pub fn from_ordinal(ordinal: u64) -> Self {
        Self(ordinal)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

slotmap::new_key_type! {
    /// One stream of tokens in the engine. Carries a generation: the key of a sequence that ended names nothing.
    pub struct SeqId;
}

/// One of the two I/O buffer sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// The first buffer set.
    A,
    /// The second buffer set.
    B,
}

impl Slot {
    /// Both slots, in order.
    pub const ALL: [Slot; 2] = [Slot::A, Slot::B];

    /// The other one.
    pub fn other(self) -> Self {
        match self {
            Slot::A => Slot::B,
            Slot::B => Slot::A,
        }
    }

    /// 0 for A, 1 for B.
    pub fn index(self) -> usize {
        match self {
            Slot::A => 0,
            Slot::B => 1,
        }
    }
}
