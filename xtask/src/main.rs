//! The project's own verbs, one module each.
//!
//! [`ptx`] builds the kernels into the bundle and proves it fresh. `cargo xtask <verb> --help` lists the options.

mod command;
mod ptx;

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
    }
}

/// The folder that holds the workspace's Cargo.toml.
fn workspace_root() -> Result<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").context("run this through `cargo xtask`")?;
    PathBuf::from(package).parent().map(PathBuf::from).context("xtask lies in the workspace's root folder")
}
