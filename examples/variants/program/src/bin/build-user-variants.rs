//! Builds the bundle of the example's variants: `cargo run -p example-variants-program --bin build-user-variants`.
//!
//! It needs the nightly toolchain and the library source; where one is missing, it says how to get it and ends with 2.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Parser;
use example_variants::{Chunked, DistanceBias};
use oxattn_build::{Assembler, BuildError, DeviceCrate, Toolchain};

#[derive(Parser)]
struct Arguments {
    /// Where the bundle goes.
    #[arg(long, default_value = "target/user-variants.bundle")]
    out: PathBuf,
    /// rustup's name of the nightly toolchain.
    #[arg(long, default_value = "nightly")]
    toolchain: String,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            if error.is_missing_toolchain() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), BuildError> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../device");
    let device = DeviceCrate::new(folder, "target/user-variants").variant::<Chunked>().variant::<DistanceBias>();
    let toolchain = Toolchain::find(&arguments.toolchain)?;
    let note = &mut |line: &str| eprintln!("{line}");
    let built = device.build(&toolchain, Assembler::find(None)?.as_ref(), note)?;
    let bytes = built.write(&arguments.out)?;
    println!("{}: {} kernels, {bytes} bytes", arguments.out.display(), built.kernels.len());
    Ok(())
}
