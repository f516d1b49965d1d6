//! The emulator: runs a kernel on the CPU, thread by thread, and is stricter than the hardware.
//!
//! A kernel, some memory and a shape of launch go in; out comes a [`Report`] of what the hardware would have paid,
//! or the first rule that the kernel broke, with source lines and threads. A kernel that breaks no rule under a few
//! seeds and input shapes is right about its synchronisation: the order of memory accesses is checked against the
//! memory model, not against the order in which things happened to run.
//!
//! ```
//! use simt::{block::sync_threads, shared::Shared, thread::thread_idx_x};
//! use simt::emulator::{EmulatorError, GlobalMemory, Launch};
//!
//! /// Reverses 64 numbers through shared memory.
//! fn reverse(ordered: bool) -> Result<Vec<u32>, EmulatorError> {
//!     let input: Vec<u32> = (0..64).collect();
//!     let mut output = vec![0; 64];
//!     let mut memory = GlobalMemory::new();
//!     let source = memory.read_only(&input);
//!     let target = memory.uninitialised(&mut output);
//!     let launch = Launch { grid_blocks: 1, block_threads: 64, shared_bytes: 256, seed: 1 };
//!     launch.run(&mut memory, || unsafe {
//!         let (thread, shared) = (thread_idx_x(), Shared::<u32>::dynamic());
//!         shared.add(thread).store(source.add(thread as u64).load());
//!         if ordered {
//!             sync_threads();
//!         }
//!         target.add(thread as u64).store(shared.add(63 - thread).load());
//!     })?;
//!     Ok(output)
//! }
//!
//! assert_eq!(reverse(true)?[..3], [63, 62, 61]);
//! // Without the barrier a thread reads what its partner has not written, or not in any order.
//! assert!(matches!(
//!     reverse(false),
//!     Err(EmulatorError::Uninitialised { .. } | EmulatorError::DataRace { .. })
//! ));
//! # Ok::<(), EmulatorError>(())
//! ```
//!
//! # How it runs
//!
//! Every GPU thread is a coroutine with 256 KiB of stack on the calling OS thread. A thread runs until it meets a
//! warp collective or a barrier; then another goes on, picked by the seed. Blocks run one after another, in an order
//! that the seed picks too. The same seed gives the same run. A kernel in which one block waits for another cannot
//! make progress here and ends at the step limit.
//!
//! # The rules
//!
//! * **Bounds.** An access lies inside the block's dynamic shared memory or inside one region of the
//!   [`GlobalMemory`], is aligned to its size, and does not write what is read-only.
//! * **Poison.** A byte is written before it is read: shared memory in every block anew, global memory where it was
//!   registered as uninitialised.
//! * **Order.** Two accesses to one byte, one of them a write, are ordered. Order comes from a thread's own program,
//!   from `sync_warp`, `sync_threads` and named barriers among the threads that take part (from those that only arrive
//!   to those that wait), from `mbarrier`s (from those that arrive to those that wait for the phase), and from atomics:
//!   an acquire-and-release atomic passes on what its own thread did and had learned to whoever next touches the same
//!   address so. Shuffles, votes, `ldmatrix` and `mma` order nothing; neither does a relaxed atomic. Unordered stores
//!   of one and the same value are a race too. `ldmatrix` reads for the whole warp, so even the lane that wrote a row
//!   needs a `sync_warp` before it. One launch is ordered before the next.
//! * **Rendezvous.** The 32 lanes of a warp stand at the same call, or have all exited: a lane that waits elsewhere,
//!   or has returned early, is an error. All warps of a block that have not exited meet at the same call of
//!   `sync_threads`; the warps of a named barrier may come from different ones. The four warps of a warpgroup meet at a
//!   `wgmma` and at a register limit. At an `mbarrier` each thread waits on its own. Waiting that cannot end is an
//!   error that lists who waits where.
//! * **Asynchronous copies** take effect at the wait of the thread that issued them, no earlier. Until then an access
//!   to their destination is an error, and a write to their source is a race; afterwards the bytes are that thread's
//!   writes, and others need a barrier.
//! * **`wgmma`** reads its operands and gives its results at the wait that covers it, no earlier. A product comes after
//!   a `wgmma::fence`, is the same for all 128 threads, and is waited for before the kernel ends. Its operands are
//!   written and ordered before it, and what was written by stores or `copy_async_16` is fenced: `fence_proxy_async` by
//!   the writer after the write, then a barrier. Until the wait a write to an operand is an error, and the accumulators
//!   hold NaNs that are known again: storing one, changing some and handing them on, or settling them early is an
//!   error.
//! * **Bulk copies** land at the first wait for the `mbarrier` phase they complete on, stores at their thread's wait.
//!   The bytes are there for who has waited for the phase, and for nobody else until ordered after one who has. Until
//!   then the destination is nobody's to touch and the source nobody's to write. A phase was told to expect exactly the
//!   bytes that come. What a copy overwrites or reads in shared memory, and the barrier it completes on, is fenced like
//!   operands of `wgmma`. Tensor maps are the emulator's own ([`TensorMapDescription`]); what they describe is live
//!   memory.
//! * **Constant loads** read no byte that a thread of the launch has written before.
//! * A thread that makes more than 2^22 accesses and collectives is taken to loop for ever, and a panic of the kernel
//!   is an error with its message.
//!
//! # What it does not see
//!
//! A loop that calls nothing of this crate. Bytes between registered regions that happen to lie in another one. A
//! race that this input does not exercise. Two relaxed atomics by different threads, after which a plain read is
//! ordered with only the first. A write to a bulk copy's global source after the copy has landed, by a thread that is
//! not ordered after it; global memory written by the launch and read by a bulk copy without a fence. Arithmetic on
//! accumulators in flight whose result is dropped. Timing, caches and register pressure.
//!
//! # Source lines
//!
//! are those of the calls of the face. A helper that wraps them can be marked `#[track_caller]` to be named by its
//! caller's line.
mod arithmetic;
pub(crate) mod body;
mod clock;
mod counters;
mod error;
mod global;
mod launch;
mod machine;
mod random;
mod shadow;
mod shared;
mod site;
mod tensor;
mod tensor_map;
mod traffic;
mod wgmma;

pub use counters::Counters;
pub use error::{Access, AccessKind, Earlier, EmulatorError, Operation, Place, Space, Waiting};
pub use global::{GlobalMemory, RawAccess};
pub use launch::{Launch, Report};
pub use tensor_map::{TensorMapDescription, TensorMapError};
