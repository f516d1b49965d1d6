//! Checks the example's variants on a device: `cargo run -p example-variants-program -- --device cuda:0`.

use std::{error::Error, fs, path::PathBuf};

use clap::Parser;
use example_variants::{Chunked, DistanceBias};
use example_variants_program::{cases, largest_error, tolerance};
use oxattn::Device;
use oxattn::custom::Family;

#[derive(Parser)]
struct Arguments {
    /// `emulator`, or `cuda:0` and so on.
    #[arg(long, default_value = "emulator")]
    device: String,
    /// What build-user-variants wrote; the emulator needs none.
    #[arg(long, default_value = "target/user-variants.bundle")]
    bundle: PathBuf,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let device = match arguments.device.strip_prefix("cuda:") {
        Some(ordinal) => {
            let device = Device::cuda(ordinal.parse()?)?;
            let bundle =
                fs::read(&arguments.bundle).map_err(|error| format!("{}: {error}", arguments.bundle.display()))?;
            device.load_bundle(&bundle)?;
            device
        }
        None if arguments.device == "emulator" => {
            let device = Device::cpu();
            device.emulate::<Chunked>(Family::Sm90a, 0)?;
            device.emulate::<DistanceBias>(Family::Sm90a, 0)?;
            device
        }
        None => return Err(format!("--device {}: emulator and cuda:0 are supported", arguments.device).into()),
    };
    println!("{}", device.describe());
    let mut wrong = 0;
    for case in cases() {
        let (error, tolerance) = (largest_error(&device, &case)?, tolerance(&case.config));
        println!("{}: largest error of a row {error:.1e}, {tolerance:.0e} allowed", case.name);
        wrong += u32::from(error > tolerance);
    }
    if wrong > 0 { Err(format!("{wrong} cases are wrong").into()) } else { Ok(()) }
}
