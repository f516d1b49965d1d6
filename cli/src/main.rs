//! The program `oxattn`: replay a serving trace, draw a schedule, describe the machine, time and tune it.
//!
//! One module a subcommand; `trace` and `serve` say what is served, `engine` runs the library. Results go to standard
//! output, progress and errors to standard error. The exit code is 0 when all went well, 1 when a step failed or a
//! result is wrong, 2 when the command line was not understood.

mod arguments;
mod bench;
mod engine;
mod info;
mod plan;
mod replay;
mod serve;
mod svg;
mod trace;
mod tune;

use clap::{Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "oxattn", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Replay(replay::Arguments),
    Plan(plan::Arguments),
    Info(info::Arguments),
    Bench(bench::Arguments),
    Tune(tune::Arguments),
}

fn main() -> ExitCode {
    let result: Result<(), Box<dyn std::error::Error>> = match Arguments::parse().command {
        Command::Replay(arguments) => replay::run(&arguments).map_err(Into::into),
        Command::Plan(arguments) => plan::run(&arguments).map_err(Into::into),
        Command::Info(arguments) => info::run(&arguments).map_err(Into::into),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments).map_err(Into::into),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to standard output. A reader that has seen enough, such as `head`, is no error.
fn print(text: &str) -> std::io::Result<()> {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
