//! `cargo xtask tidy`: format, lints, documentation, and the house rules that no tool of Rust's knows.
//!
//! In: the files git tracks or would track. Out: silence, or one line for each breach, with file and line. The rules
//! are plain functions over a file's text ([`rules`]).

mod rules;

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};

use crate::command::{capture, cargo, show};

pub fn run(root: &Path) -> Result<()> {
    let mut doc = cargo(root);
    doc.args(["doc", "--quiet", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-Dwarnings");
    let lint = |of: &[&str]| show(cargo(root).args(["clippy", "--quiet"]).args(of).args(["--", "-Dwarnings"]));
    let checks = [
        house_rules(root),
        show(cargo(root).args(["fmt", "--all", "--", "--check"])),
        lint(&["--workspace", "--all-targets"]),
        // The library as an engine takes it: planning alone, and with each executor.
        lint(&["-p", "oxattn", "--no-default-features"]),
        lint(&["-p", "oxattn", "--no-default-features", "--features", "cpu"]),
        lint(&["-p", "oxattn", "--no-default-features", "--features", "cuda"]),
        lint(&["-p", "oxattn", "--no-default-features", "--features", "emulator"]),
        show(&mut doc),
    ];
    let failures: Vec<String> = checks.into_iter().filter_map(Result::err).map(|error| format!("{error:#}")).collect();
    ensure!(failures.is_empty(), "tidy:\n{}", failures.join("\n"));
    Ok(())
}

/// Reads every file of the project and applies the rules.
fn house_rules(root: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"]);
    let listed = capture(&mut git).context("tidy asks git for the project's files")?.stdout;
    let mut breaches = Vec::new();
    let mut files = 0;
    for path in listed.split_terminator('\0') {
        // A file removed in the working tree is still listed.
        let Ok(bytes) = fs::read(root.join(path)) else { continue };
        files += 1;
        breaches.extend(rules::size(path, bytes.len() as u64));
        if let Ok(text) = String::from_utf8(bytes) {
            breaches.extend(rules::text(path, &text));
        }
    }
    if !breaches.is_empty() {
        breaches.sort();
        bail!("{} breaches of the house rules:\n{}", breaches.len(), breaches.join("\n"));
    }
    eprintln!("house rules: {files} files keep to them");
    Ok(())
}
