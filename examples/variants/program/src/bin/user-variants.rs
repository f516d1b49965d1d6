//! Checks the example's variants on a device: `cargo run -p example-variants-program -- --device cuda:0`.

use std::{error::Error, fs, path::PathBuf, process::ExitCode};

use clap::Parser;
use example_variants::{Chunked, DistanceBias};
use example_variants_program::{cases, largest_error, prefill_cases, tolerance};
use oxattn::custom::Family;
use oxattn::{ArgumentError, Device};

#[derive(Parser)]
struct Arguments {
    /// `emulator`, or `cuda:0` and so on.
    #[arg(long, default_value = "emulator")]
    device: String,
    /// What build-user-variants wrote; the emulator needs none.
    #[arg(long, default_value = "target/user-variants.bundle")]
    bundle: PathBuf,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("error: {wrong} cases are wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a line for each case and returns how many are wrong.
fn run(arguments: &Arguments) -> Result<u32, Box<dyn Error>> {
    let device = device(arguments)?;
    println!("{}: {}", arguments.device, device.describe());
    let mut wrong = 0;
    for case in cases().into_iter().chain(prefill_cases()) {
        let error = match largest_error(&device, &case) {
            Err(oxattn::Error::Argument(refusal @ ArgumentError::NoPrefillKernel { .. })) => {
                println!("{}: {refusal}", case.name);
                continue;
            }
            error => error?,
        };
        let tolerance = tolerance(&case.config);
        println!("{}: largest error of a row {error:.1e}, {tolerance:.0e} allowed", case.name);
        wrong += u32::from(error > tolerance);
    }
    Ok(wrong)
}

fn device(arguments: &Arguments) -> Result<Device, Box<dyn Error>> {
    if arguments.device == "emulator" {
        let device = Device::cpu();
        device.emulate::<Chunked>(Family::Sm90a, 0)?;
        device.emulate::<DistanceBias>(Family::Sm90a, 0)?;
        return Ok(device);
    }
    let ordinal = arguments.device.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
    let unknown = || format!("--device is {}; emulator and cuda:N are supported", arguments.device);
    let device = Device::cuda(ordinal.ok_or_else(unknown)?)?;
    let path = &arguments.bundle;
    let bundle = fs::read(path).map_err(|error| format!("{}: {error}; run build-user-variants", path.display()))?;
    device.load_bundle(&bundle)?;
    Ok(device)
}
