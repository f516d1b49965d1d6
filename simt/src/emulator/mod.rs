//! The face's host body: an emulator of a thread block that is stricter than the hardware.
mod arithmetic;
pub(crate) mod body;
mod counters;
mod error;
mod global;
mod launch;
mod machine;
mod random;
mod shared;
mod tensor;

pub use counters::Counters;
pub use error::{Access, AccessKind, EmulatorError, Operation, Place, Space, Waiting};
pub use global::GlobalMemory;
pub use launch::{Launch, Report};
