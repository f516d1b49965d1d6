//! `mbarrier`: barriers that live in shared memory, counted in arrivals and in bytes of bulk copies. sm_90 only.
//!
//! A barrier passes from one *phase* to the next when as many threads have arrived as it was initialised for and all
//! the bytes they announced have landed. Waiting is by the parity of the phase: the first is 0, so a wait for parity 1
//! passes at once on a new barrier, which is how the producer of a ring of stages begins. What a thread did before it
//! arrived is ordered before what a thread does after it has waited for that phase.
//!
//! The invariant: nobody arrives for a phase before the last one is complete, and nobody waits for a parity that two
//! phases could mean. Waits are a thread's own: lanes of a warp may differ, and meet again at their next collective.
use crate::{body, shared::Shared};

/// The address of a barrier: 8 bytes of shared memory at a multiple of 8.
#[derive(Clone, Copy)]
pub struct Mbarrier(u32);

impl Mbarrier {
    /// The barrier at an address. It exists from [`initialise`](Self::initialise) on.
    #[inline(always)]
    pub fn new(at: Shared<u64>) -> Self {
        Mbarrier(at.address())
    }

    /// Makes the barrier, each of whose phases takes `arrivals` (1 to 2^20 - 1). One thread does this; the others use
    /// it after a block barrier, bulk copies after [`fence_mbarrier_initialisation`] and that barrier.
    ///
    /// # Safety
    /// The eight bytes are inside shared memory, aligned, and hold no other live barrier.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn initialise(self, arrivals: u32) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mbarrier_init(self.0, arrivals) }
    }

    /// Ends the barrier's life: the bytes may be used for something else.
    ///
    /// # Safety
    /// The barrier lives, and nobody uses it any more.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn invalidate(self) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mbarrier_inval(self.0) }
    }

    /// Arrives once for the current phase.
    ///
    /// # Safety
    /// The barrier lives, and the phase has an arrival left.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn arrive(self) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mbarrier_arrive(self.0) }
    }

    /// Arrives once for the current phase and announces `bytes` that bulk copies will bring to it.
    ///
    /// # Safety
    /// As [`arrive`](Self::arrive); copies of exactly as many bytes complete on the phase.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn arrive_and_expect_bytes(self, bytes: u32) {
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mbarrier_arrive_expect_tx(self.0, bytes) }
    }

    /// Waits until the phase with this parity (0 or 1) is complete: passes while the barrier is in a phase of the
    /// other.
    ///
    /// # Safety
    /// The barrier lives.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn wait(self, parity: u32) {
        debug_assert!(parity < 2, "a parity is 0 or 1");
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mbarrier_wait(self.0, parity) }
    }

    /// Whether the phase with this parity (0 or 1) is complete; if so, it counts as waited for.
    ///
    /// # Safety
    /// The barrier lives.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn is_complete(self, parity: u32) -> bool {
        debug_assert!(parity < 2, "a parity is 0 or 1");
        // SAFETY: the caller's contract is this function's own.
        unsafe { body::mbarrier_test_wait(self.0, parity) }
    }

    /// The address, for bulk copies.
    #[inline(always)]
    pub fn address(self) -> u32 {
        self.0
    }
}

/// Makes this thread's initialisations of barriers visible to bulk copies that are issued after a barrier that follows.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn fence_mbarrier_initialisation() {
    body::fence_mbarrier_init()
}
