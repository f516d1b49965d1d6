//! oxattn's command line.
mod bench;

use clap::Parser;
use std::io::Write;

#[derive(Parser)]
enum Command {
    Bench(bench::Arguments),
}

fn main() -> std::process::ExitCode {
    let Command::Bench(arguments) = Command::parse();
    match bench::run(&arguments) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> std::io::Result<()> {
    std::io::stdout().lock().write_all(text.as_bytes())
}
