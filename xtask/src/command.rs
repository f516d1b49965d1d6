//! Other programs, run to the end: their output, or an error that quotes them.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, bail};

pub use oxattn_build::command::capture;
use oxattn_build::command::shown;

/// Runs `command` with its output going to the terminal.
pub fn show(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

/// The cargo that runs this program, started in the workspace's root.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}
