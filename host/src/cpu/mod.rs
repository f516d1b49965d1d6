//! The host executor: the kernels' jobs on the host's cores, in f32, from the same parameters.
//!
//! In: a launch's parameters as `kernels_gpu::abi` lays them out, every address a host address. Out: what the GPU
//! would have written, within rounding; two runs agree bit for bit. Items, heads and tokens are shared out to
//! rayon's threads, each of which keeps its scratch.
//!
//! The functions are `unsafe` with one contract: **the parameters describe live memory as `kernels_gpu::abi` says**.
//! Every address is that of initialised memory of the stated shape and strides, aligned for its elements; plan, page
//! ids and slots stay within it; nothing else writes it during the call, and what the call writes nothing else reads
//! but, where said, the call itself.

mod append;
mod attend;
mod memory;
mod merge;
mod rope;
mod rope_append;
mod rotary;
mod validate;

pub use append::{append, positions};
pub use attend::attend;
pub use merge::merge_states;
pub use rope::rope;
pub use rope_append::rope_append;
pub use validate::{check_append, check_page_ids};
