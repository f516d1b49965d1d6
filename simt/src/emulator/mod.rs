//! The face's host body: an emulator of a thread block that is stricter than the hardware.
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
mod traffic;

pub use counters::Counters;
pub use error::{Access, AccessKind, Earlier, EmulatorError, Operation, Place, Space, Waiting};
pub use global::GlobalMemory;
pub use launch::{Launch, Report};
