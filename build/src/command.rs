//! Other programs, run to the end: their output, or an error that quotes them.

use std::process::Command;

/// What a program printed.
pub struct Printed {
    /// On its standard output.
    pub stdout: String,
    /// On its standard error.
    pub stderr: String,
}

/// A program that did not do its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// It is not there, or not a program.
    #[error("cannot start {program}: {source}")]
    Start {
        /// Its name.
        program: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// It ended with an error.
    #[error("{command} ended with {status}:\n{printed}")]
    Failed {
        /// The whole command line.
        command: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// Its last lines.
        printed: String,
    },
}

/// Runs `command` and collects what it prints; its failure is an error with its last lines.
pub fn capture(command: &mut Command) -> Result<Printed, CommandError> {
    let started = command.output();
    let program = command.get_program().to_string_lossy().into_owned();
    let output = started.map_err(|source| CommandError::Start { program, source })?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        let printed = tail(&format!("{stdout}{stderr}"), 60);
        return Err(CommandError::Failed { command: shown(command), status: output.status, printed });
    }
    Ok(Printed { stdout, stderr })
}

/// The command line, as one would type it.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
