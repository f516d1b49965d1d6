//! The 16-bit number formats of the tensor cores, as plain newtypes over their bits.
//!
//! `half` is software emulation on the GPU (a dozen instructions a conversion), so device code has its own
//! types; hosts convert at the edge. Both are `repr(transparent)` over `u16`.

/// bfloat16: the upper half of an IEEE binary32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// IEEE binary16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);
