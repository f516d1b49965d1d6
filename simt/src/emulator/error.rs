//! What the emulator reports: one variant for each rule a kernel can break, with the places that broke it.
use std::{fmt, ops::Range, panic::Location};

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
    /// A load through the read-only path.
    LoadConstant,
    /// One row of an `ldmatrix`, read on behalf of the whole warp; the thread is the one that gave the address.
    LoadMatrix,
    /// A store of one thread.
    Store,
    /// An atomic read-modify-write.
    Atomic,
    /// An asynchronous copy: it reads global memory and writes shared memory.
    AsyncCopy,
    /// Sixteen bytes of an operand of `wgmma`, read on behalf of a whole warp.
    Wgmma,
    /// An operation on an `mbarrier`.
    Mbarrier,
    /// A bulk copy, by tensor map or plain: it reads or writes shared memory through the async proxy.
    BulkCopy,
}

impl AccessKind {
    /// Whether the access goes through the async proxy, which does not see what the generic one has not fenced.
    #[inline]
    pub(super) fn is_async_proxy(self) -> bool {
        matches!(self, AccessKind::Wgmma | AccessKind::BulkCopy)
    }
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

/// An earlier access, as far as it is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Earlier {
    /// Load, store or other.
    pub kind: AccessKind,
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
    /// A product of `wgmma`.
    Wgmma {
        /// Its N.
        columns: u32,
    },
    /// `wgmma::fence`.
    WgmmaFence,
    /// `wgmma::commit_group`.
    WgmmaCommit,
    /// `wgmma::wait_group`.
    WgmmaWait {
        /// Groups that may stay unfinished.
        pending: u32,
    },
    /// `raise_register_limit`.
    RaiseRegisterLimit {
        /// Registers a thread will have.
        registers: u32,
    },
    /// `lower_register_limit`.
    LowerRegisterLimit {
        /// Registers a thread will have.
        registers: u32,
    },
    /// `Mbarrier::wait`. Each thread waits on its own.
    MbarrierWait {
        /// Shared address of the barrier.
        address: u32,
        /// The parity of the phase waited for.
        parity: u32,
    },
    /// `sync_threads`.
    SyncThreads,
    /// `sync_named_barrier`.
    NamedBarrier {
        /// Barrier id, 1 to 15.
        id: u32,
        /// Threads it waits for.
        threads: u32,
    },
    /// `arrive_named_barrier`.
    NamedBarrierArrive {
        /// Barrier id, 1 to 15.
        id: u32,
        /// Threads it counts.
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
    #[error("out of bounds: {access}; {}", Nearest(.nearest))]
    OutOfBounds {
        /// The access.
        access: Access,
        /// Addresses of the memory that ends or begins closest to it; `None` where there is none at all.
        nearest: Option<Range<u64>>,
    },
    /// The address is not a multiple of the access's size (of 16 at both ends of an asynchronous copy).
    #[error("misaligned: {access}, wanted a multiple of {alignment}")]
    Misaligned {
        /// The access.
        access: Access,
        /// What the address must be a multiple of.
        alignment: u32,
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
    /// Two accesses to one byte, at least one of them a write, with nothing that orders them.
    #[error("data race on byte {byte:#x}: {second} is not ordered after the {first}")]
    DataRace {
        /// Address of the first byte in common.
        byte: u64,
        /// The access that happened to run first.
        first: Earlier,
        /// The other.
        second: Access,
    },
    /// A load through the read-only path of a byte that this launch has written.
    #[error("not constant: {load} reads what the {store} wrote in the same launch")]
    NotConstant {
        /// The load.
        load: Access,
        /// The write.
        store: Earlier,
    },
    /// Shared memory that an unfinished asynchronous copy will write was touched.
    #[error("unfinished copy: {access} touches bytes that the {copy} will write and its thread has not waited for")]
    UnfinishedCopy {
        /// The copy.
        copy: Earlier,
        /// The access that came too early.
        access: Access,
    },
    /// `wgmma` or a bulk copy touches shared memory through the async proxy that was written through the generic one,
    /// without a `fence_proxy_async` of the writer (or, for a barrier, `fence_mbarrier_initialisation`) and a barrier
    /// in between.
    #[error(
        "missing fence between the proxies: {read} touches what the {write} wrote, and its thread has not fenced it"
    )]
    MissingProxyFence {
        /// The write.
        write: Earlier,
        /// What touches it.
        read: Access,
    },
    /// Bytes that an unfinished `wgmma` may still read were overwritten.
    #[error("unfinished wgmma: {access} overwrites an operand of the product of {product}, which is not waited for")]
    UnfinishedProduct {
        /// The product, with the first thread of a warp that has not waited.
        product: Place,
        /// The write that came too early.
        access: Access,
    },
    /// Bytes that an unfinished bulk copy may still read were overwritten.
    #[error("unfinished bulk copy: {access} overwrites the source of the copy of {copy}, which is not waited for")]
    UnfinishedSource {
        /// The copy.
        copy: Place,
        /// The write that came too early.
        access: Access,
    },
    /// The address a tensor copy got holds no tensor map of the emulator's.
    #[error("no tensor map at global {address:#x}; {place}")]
    NoTensorMap {
        /// The address.
        address: u64,
        /// Who and where.
        place: Place,
    },
    /// A tensor copy with another number of coordinates than its map has dimensions.
    #[error("a tensor map of {wanted} dimensions, and {found} coordinates; {place}")]
    TensorRank {
        /// Coordinates given.
        found: u32,
        /// Dimensions of the map.
        wanted: u32,
        /// Who and where.
        place: Place,
    },
    /// A bulk copy of a size that is no multiple of 16.
    #[error("bulk copy of {bytes} bytes, supported are multiples of 16; {place}")]
    BulkSize {
        /// The value found.
        bytes: u32,
        /// Who and where.
        place: Place,
    },
    /// The bytes an `mbarrier`'s phase was told to expect are not those that were copied.
    #[error("mbarrier: {expected} bytes announced (last at {announced}), {copied} copied; {place}")]
    MbarrierBytes {
        /// Announced for the phase.
        expected: u64,
        /// Where the last were announced.
        announced: &'static Location<'static>,
        /// Bytes of the copies that complete on it.
        copied: u64,
        /// The wait that cannot end, or the copy that was too much.
        place: Place,
    },
    /// Accumulators were read or changed before the product that writes them was waited for and settled.
    #[error("accumulators in flight: used at {place}; the product of {product} is not waited for")]
    AccumulatorsInFlight {
        /// The latest product that writes them.
        product: Place,
        /// Who touched them, and where.
        place: Place,
    },
    /// A warp exited with a product that it has not waited for, or a block with bulk copies.
    #[error("a {kind} that nobody waits for: {place}")]
    NeverWaited {
        /// `Wgmma` or `BulkCopy`.
        kind: AccessKind,
        /// The product or the copy.
        place: Place,
    },
    /// No `wgmma::fence` between a warp's start, or its last wait, and a product.
    #[error("wgmma without a fence since the warp's start or its last wait; {place}")]
    WgmmaNotFenced {
        /// The product.
        place: Place,
    },
    /// The threads of a warpgroup gave different operands where all must give the same.
    #[error("wgmma: {field} differs from that of the warpgroup's first thread; {place}")]
    WgmmaNotUniform {
        /// Name of the argument.
        field: &'static str,
        /// The first thread that differs.
        place: Place,
    },
    /// The warps of a warpgroup stand at different products, or there are fewer than four.
    #[error("divergence in block {block}, warpgroup {warpgroup}: {}", WaitList(.waiting))]
    WarpgroupDivergence {
        /// The block.
        block: u32,
        /// Index of the warpgroup in the block.
        warpgroup: u32,
        /// Where each thread of it is.
        waiting: Vec<Waiting>,
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
    /// The warps of a block met at different calls of `sync_threads`.
    #[error("mismatched sync_threads in block {block}: {}", WaitList(.waiting))]
    MismatchedBarrier {
        /// The block.
        block: u32,
        /// Where each thread of the block is.
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
        /// `id`, `threads` or `arrivals`.
        field: &'static str,
        /// The value found.
        found: u32,
        /// What would have been right.
        wanted: String,
        /// Who and where.
        place: Place,
    },
    /// A register limit that contradicts the warpgroup's earlier one, or that the block cannot have.
    #[error("register limit: {registers}, wanted {wanted}; {place}")]
    RegisterLimit {
        /// The value found.
        registers: u32,
        /// What would have been right.
        wanted: String,
        /// Who and where.
        place: Place,
    },
    /// An `mbarrier` was made for no arrivals, or for more than its counter holds.
    #[error("mbarrier for {arrivals} arrivals, supported is 1 to 1048575; {place}")]
    MbarrierCount {
        /// The value found.
        arrivals: u32,
        /// Who and where.
        place: Place,
    },
    /// There is no `mbarrier` at the address.
    #[error("no mbarrier at shared {address:#x}; {place}")]
    MbarrierMissing {
        /// The address.
        address: u32,
        /// Who and where.
        place: Place,
    },
    /// An `mbarrier` was made where one lives.
    #[error("the mbarrier at shared {address:#x} is initialised again while it lives; {place}")]
    MbarrierAlive {
        /// The address.
        address: u32,
        /// Who and where.
        place: Place,
    },
    /// More arrivals than a phase of an `mbarrier` has, while its bytes are not complete.
    #[error("mbarrier: an arrival after all {arrivals} of the phase; {place}")]
    MbarrierOverrun {
        /// Arrivals of a phase.
        arrivals: u32,
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

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AccessKind::Load => "load",
            AccessKind::LoadConstant => "constant load",
            AccessKind::LoadMatrix => "ldmatrix row",
            AccessKind::Store => "store",
            AccessKind::Atomic => "atomic",
            AccessKind::AsyncCopy => "asynchronous copy",
            AccessKind::Wgmma => "wgmma operand",
            AccessKind::Mbarrier => "mbarrier operation",
            AccessKind::BulkCopy => "bulk copy",
        })
    }
}

impl fmt::Display for Earlier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind, self.place)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let space = match self.space {
            Space::Shared => "shared",
            Space::Global => "global",
        };
        write!(f, "{} of {} bytes at {space} {:#x} ({})", self.kind, self.bytes, self.address, self.place)
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
            Operation::Wgmma { columns } => write!(f, "wgmma m64n{columns}k16"),
            Operation::WgmmaFence => f.write_str("wgmma fence"),
            Operation::WgmmaCommit => f.write_str("wgmma commit_group"),
            Operation::WgmmaWait { pending } => write!(f, "wgmma wait_group {pending}"),
            Operation::RaiseRegisterLimit { registers } => write!(f, "raise_register_limit to {registers}"),
            Operation::LowerRegisterLimit { registers } => write!(f, "lower_register_limit to {registers}"),
            Operation::MbarrierWait { address, parity } => {
                write!(f, "a wait for parity {parity} of the mbarrier at shared {address:#x}")
            }
            Operation::SyncThreads => f.write_str("sync_threads"),
            Operation::NamedBarrier { id, threads } => write!(f, "named barrier {id} for {threads} threads"),
            Operation::NamedBarrierArrive { id, threads } => {
                write!(f, "arrival at named barrier {id} for {threads} threads")
            }
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

struct Nearest<'a>(&'a Option<Range<u64>>);

impl fmt::Display for Nearest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(Range { start, end }) => {
                write!(f, "the nearest memory is {} bytes at {start:#x} to {end:#x}", end - start)
            }
            None => f.write_str("no memory is registered"),
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
