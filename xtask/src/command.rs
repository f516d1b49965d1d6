//! Other programs, run to the end: their output, or an error that quotes them.

use std::process::Command;

use anyhow::{Context, Result, bail};

/// What a program printed.
pub struct Printed {
    pub stdout: String,
    pub stderr: String,
}

/// Runs `command` and collects what it prints; its failure is an error with its last lines.
pub fn capture(command: &mut Command) -> Result<Printed> {
    let output = command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        bail!("{} ended with {}:\n{}", shown(command), output.status, tail(&format!("{stdout}{stderr}"), 60));
    }
    Ok(Printed { stdout, stderr })
}

/// Runs `command` with its output going to the terminal.
pub fn show(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
