//! What the compiler keeps in registers.
use crate::body;

/// The same value, which the compiler takes for another one at each call.
///
/// What follows from it is worked out where it is used, not before a loop that does not change it, where each such value
/// would take a register for as long as the loop runs.
#[inline(always)]
pub fn anew(value: u32) -> u32 {
    body::anew(value)
}
