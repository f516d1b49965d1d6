//! Registers: what the compiler keeps in them, and `setmaxnreg`, by which warpgroups pass them to each other (sm_90a
//! only).
//!
//! A kernel starts with the same number in every thread; producers give most of theirs up, then consumers take more. A
//! multiple of 8 from 24 to 256; over a block no more than the 65536 registers there are. ptxas heeds it only in a
//! kernel with launch bounds.
use crate::body;

/// The same value, which the compiler takes for another one at each call. On any GPU.
///
/// What follows from it is worked out where it is used, not before a loop that does not change it, where each such value
/// would take a register for as long as the loop runs.
#[inline(always)]
pub fn anew(value: u32) -> u32 {
    body::anew(value)
}

/// Gives registers up: from here on `REGISTERS` are enough for this warpgroup.
///
/// # Safety
/// The 128 threads of a warpgroup reach this call together; the kernel had at least as many until now.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn lower_register_limit<const REGISTERS: u32>() {
    const { assert!(is_limit(REGISTERS), "a multiple of 8 from 24 to 256") }
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::setmaxnreg_dec::<REGISTERS>() }
}

/// Takes registers, waiting until others have given up enough.
///
/// # Safety
/// The 128 threads of a warpgroup reach this call together; the kernel had at most as many until now.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub unsafe fn raise_register_limit<const REGISTERS: u32>() {
    const { assert!(is_limit(REGISTERS), "a multiple of 8 from 24 to 256") }
    // SAFETY: the caller's contract is this function's own.
    unsafe { body::setmaxnreg_inc::<REGISTERS>() }
}

const fn is_limit(registers: u32) -> bool {
    registers.is_multiple_of(8) && registers >= 24 && registers <= 256
}

/// Keeps the machine's compiler from moving what comes before below what comes after, and the other way round: `ptxas`
/// otherwise moves the wait for a product up to where the product was started, so that nothing overlaps with it. Any value
/// does that the compiler does not know.
#[inline(always)]
pub fn keep_order(value: u32) {
    body::keep_order(value)
}
