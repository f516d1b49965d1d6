//! oxattn's command line.
mod plan;
mod replay;
mod serve;
mod svg;
mod trace;
fn main() {}
