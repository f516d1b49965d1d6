//! The project's own verbs, one module each.
//!
//! [`ptx`] builds the kernels into the bundle and proves it fresh, [`tidy`] checks format, lints and the house
//! rules, [`gather`] collects what a machine without cargo needs, [`report`] writes up the records of the GPU suite.
//! `cargo xtask <verb> --help` lists the options.

mod command;
mod gather;
mod ptx;
mod report;
mod tidy;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "oxattn's own verbs")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Build every kernel to PTX, audit it, and write host/bundle/kernels.bundle.
    Ptx(ptx::Arguments),
    /// Check format, lints, documentation and the house rules.
    Tidy,
    /// Collect release binaries of the tests, the benches and the command line into carry/.
    Gather,
    /// Write the picture and the tables of the GPU suite's records.
    Report(report::Arguments),
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<()> {
    let root = workspace_root()?;
    match arguments.verb {
        Verb::Ptx(arguments) => ptx::run(&root, &arguments),
        Verb::Tidy => tidy::run(&root),
        Verb::Gather => gather::run(&root),
        Verb::Report(arguments) => report::run(&arguments),
    }
}

/// The folder that holds the workspace's Cargo.toml.
fn workspace_root() -> Result<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").context("run this through `cargo xtask`")?;
    PathBuf::from(package).parent().map(PathBuf::from).context("xtask lies in the workspace's root folder")
}
