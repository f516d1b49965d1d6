//! One table of cases for every executor, checked against the f64 oracle.
//!
//! [`cases`] says what to compute ([`prompts`] the same for the prefill kernels), [`fixture`] lays it out in memory and
//! knows the oracle's answer, [`plans`] cuts it into work items by hand, [`executors`] is the seam to what runs it.
//! [`states`] and [`new_tokens`] do the same for merges and appends, [`rope`] for rotations, [`rope_append`] for both
//! in one, [`checks`] for the checks of values on the device, [`block_sparse`] for patterns of blocks, [`multi_item`]
//! for prompts of several items, [`rotary`] for norms and rotations inside attention. [`public_api`] runs all of it
//! through the library's own operators, and [`scenarios`] are the tests that every device has to pass. [`grid`] and
//! [`merge_grid`] are FlashInfer's own grids, whole; [`lab`] runs the former.

pub mod block_sparse;
pub mod buffer;
pub mod cases;
pub mod checks;
pub mod executors;
pub mod fixture;
pub mod grid;
pub mod lab;
pub mod layout;
pub mod merge_grid;
pub mod multi_item;
pub mod new_tokens;
pub mod number;
pub mod periodic;
pub mod plans;
pub mod prefixes;
pub mod prompts;
pub mod public_api;
pub mod random;
pub mod rope;
pub mod rope_append;
pub mod rotary;
pub mod scenarios;
pub mod states;
pub mod variants;
