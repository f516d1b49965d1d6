//! oxattn's command line.
mod plan;
mod serve;
mod svg;
mod trace;
fn main() {}
