//! Builds the bundle of the example's variants: `cargo run -p example-variants-program --bin build-user-variants`.
//!
//! It needs the nightly toolchain and the library source; where one is missing, the error says how to get it.

use std::{
    error::Error,
    path::{Path, PathBuf},
};

use clap::Parser;
use example_variants::{Chunked, DistanceBias};
use oxattn_build::{Assembler, DeviceCrate, Toolchain};

#[derive(Parser)]
struct Arguments {
    /// Where the bundle goes.
    #[arg(long, default_value = "target/user-variants.bundle")]
    out: PathBuf,
    /// rustup's name of the nightly toolchain.
    #[arg(long, default_value = "nightly")]
    toolchain: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../device");
    let device = DeviceCrate::new(folder, "target/user-variants").variant::<Chunked>().variant::<DistanceBias>();
    let toolchain = Toolchain::find(&arguments.toolchain)?;
    let note = &mut |line: &str| eprintln!("{line}");
    let built = device.build(&toolchain, Assembler::find(None)?.as_ref(), false, note)?;
    let bytes = built.write(&arguments.out)?;
    println!("{}: {} kernels, {bytes} bytes", arguments.out.display(), built.kernels.len());
    Ok(())
}
