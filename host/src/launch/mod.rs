//! From a plan to running kernels: [`bundle`] holds their code.

pub mod bundle;
