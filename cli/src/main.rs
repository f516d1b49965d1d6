//! oxattn's command line.
mod serve;
mod trace;
fn main() {}
