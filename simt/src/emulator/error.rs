//! What the emulator reports: one variant for each rule a kernel can break, with the places that broke it.
use std::{fmt, panic::Location};

/// Which memory an access went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// The block's shared memory; addresses are those of [`Shared`](crate::shared::Shared).
    Shared,
    /// Device memory; addresses are host addresses.
    Global,
}

/// What an access did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AccessKind {
    /// A load of one thread.
    Load,
    /// A store of one thread.
    Store,
    /// An atomic read-modify-write.
    Atomic,
    /// An asynchronous copy: it reads global memory and writes shared memory.
    AsyncCopy,
    /// One row of an `ldmatrix`, read on behalf of the whole warp.
    LoadMatrix,
}

/// A source line, and the thread that ran it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The call of a `simt` function, as far as `#[track_caller]` reaches.
    pub location: &'static Location<'static>,
    /// Index of the thread in its block.
    pub thread: u32,
    /// Index of the block in the grid.
    pub block: u32,
}

/// One memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The memory.
    pub space: Space,
    /// Load, store or other.
    pub kind: AccessKind,
    /// First byte: a shared-window or a host address.
    pub address: u64,
    /// Bytes touched.
    pub bytes: u32,
    /// Who and where.
    pub place: Place,
}

/// A rendezvous point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// `shuffle_xor_*`.
    ShuffleXor,
    /// `shuffle_u32`.
    Shuffle,
    /// `vote_ballot`.
    Ballot,
    /// `sync_warp`.
    SyncWarp,
    /// `load_matrix_x4`.
    LoadMatrix,
    /// `load_matrix_x4_transposed`.
    LoadMatrixTransposed,
    /// `mma` on bf16.
    MmaBf16,
    /// `mma` on f16.
    MmaF16,
    /// `sync_threads`.
    SyncThreads,
    /// `sync_named_barrier`.
    NamedBarrier {
        /// Barrier id, 1 to 15.
        id: u32,
        /// Threads it waits for.
        threads: u32,
    },
}

/// Threads that stand at one rendezvous point, or have exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The point; `None` for threads that have exited.
    pub point: Option<(Operation, &'static Location<'static>)>,
    /// Indices of the threads in their block, ascending.
    pub threads: Vec<u32>,
}

/// The first rule a launch broke. Execution stops there.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EmulatorError {
    /// The launch itself is impossible.
    #[error("launch: {field} is {found}, supported is {supported}")]
    InvalidLaunch {
        /// Name of the [`Launch`](crate::emulator::Launch) field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What is supported.
        supported: &'static str,
    },
    /// The host could not give a coroutine its stack.
    #[error("no memory for the stack of a thread: {reason}")]
    NoStack {
        /// The operating system's reason.
        reason: String,
    },
    /// An access outside the block's shared memory or outside every registered global region.
    #[error("out of bounds: {access}")]
    OutOfBounds {
        /// The access.
        access: Access,
    },
    /// The address is not a multiple of the access's size.
    #[error("misaligned: {access}, wanted a multiple of {}", .access.bytes)]
    Misaligned {
        /// The access.
        access: Access,
    },
    /// A write into a region registered as read-only.
    #[error("read-only memory: {access}")]
    ReadOnly {
        /// The access.
        access: Access,
    },
    /// A read of a byte that nobody wrote.
    #[error("uninitialised: {access}; nobody has written byte {byte:#x}")]
    Uninitialised {
        /// The read.
        access: Access,
        /// Address of the first such byte.
        byte: u64,
    },
    /// Shared memory that an unfinished asynchronous copy will write was touched.
    #[error("unfinished copy: {access} touches bytes of the {copy}, which its thread has not waited for")]
    UnfinishedCopy {
        /// The copy.
        copy: Access,
        /// The access that came too early.
        access: Access,
    },
    /// `copy_async_16` was asked to read more than 16 bytes.
    #[error("copy_async_16: source_bytes is {source_bytes}, supported is 0 to 16; {place}")]
    CopySize {
        /// The value found.
        source_bytes: u32,
        /// Who and where.
        place: Place,
    },
    /// The lanes of a warp stand at different points, or some have exited: nobody can go on.
    #[error("divergence in block {block}, warp {warp}: {}", WaitList(.waiting))]
    Divergence {
        /// The block.
        block: u32,
        /// Index of the warp in the block.
        warp: u32,
        /// Where each lane of the warp is.
        waiting: Vec<Waiting>,
    },
    /// Every thread of the block waits, and no wait can be satisfied.
    #[error("deadlock in block {block}: {}", WaitList(.waiting))]
    Deadlock {
        /// The block.
        block: u32,
        /// Where each thread of the block is.
        waiting: Vec<Waiting>,
    },
    /// A named barrier was called with an impossible id or thread count, or with a count its phase does not have.
    #[error("named barrier: {field} is {found}, wanted {wanted}; {place}")]
    NamedBarrier {
        /// `id` or `threads`.
        field: &'static str,
        /// The value found.
        found: u32,
        /// What would have been right.
        wanted: String,
        /// Who and where.
        place: Place,
    },
    /// A thread made more calls than the launch allows; the loop may never end.
    #[error("more than {limit} memory accesses and collectives in one thread; {place}")]
    StepLimit {
        /// The launch's limit.
        limit: u64,
        /// The call that exceeded it.
        place: Place,
    },
    /// The kernel itself panicked.
    #[error("the kernel panicked in block {block}, thread {thread}: {message}")]
    KernelPanic {
        /// The panic's message.
        message: String,
        /// Index of the thread in its block.
        thread: u32,
        /// Index of the block in the grid.
        block: u32,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}, thread {}, {}", self.block, self.thread, self.location)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            AccessKind::Load => "load",
            AccessKind::Store => "store",
            AccessKind::Atomic => "atomic",
            AccessKind::AsyncCopy => "asynchronous copy",
            AccessKind::LoadMatrix => "ldmatrix row",
        };
        let space = match self.space {
            Space::Shared => "shared",
            Space::Global => "global",
        };
        write!(f, "{kind} of {} bytes at {space} {:#x} ({})", self.bytes, self.address, self.place)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::ShuffleXor => f.write_str("shuffle_xor"),
            Operation::Shuffle => f.write_str("shuffle"),
            Operation::Ballot => f.write_str("vote_ballot"),
            Operation::SyncWarp => f.write_str("sync_warp"),
            Operation::LoadMatrix => f.write_str("load_matrix_x4"),
            Operation::LoadMatrixTransposed => f.write_str("load_matrix_x4_transposed"),
            Operation::MmaBf16 => f.write_str("mma_m16n8k16_bf16"),
            Operation::MmaF16 => f.write_str("mma_m16n8k16_f16"),
            Operation::SyncThreads => f.write_str("sync_threads"),
            Operation::NamedBarrier { id, threads } => write!(f, "named barrier {id} for {threads} threads"),
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.threads.len() == 1 { "thread " } else { "threads " })?;
        let mut rest = self.threads.as_slice();
        let mut separator = "";
        while let Some(&first) = rest.first() {
            let length = rest.iter().zip(first..).take_while(|(found, wanted)| **found == *wanted).count();
            let last = rest[length - 1];
            match length {
                1 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ", ";
            rest = &rest[length..];
        }
        match &self.point {
            Some((operation, location)) => write!(f, " at {operation} ({location})"),
            None => f.write_str(" exited"),
        }
    }
}

struct WaitList<'a>(&'a [Waiting]);

impl fmt::Display for WaitList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, waiting) in self.0.iter().enumerate() {
            write!(f, "{}{waiting}", if index == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
