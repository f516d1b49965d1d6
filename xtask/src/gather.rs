//! `cargo xtask gather`: what a machine without cargo needs, in one folder.
//!
//! In: the workspace. Out: `carry/` (ignored by git) with the command line `oxattn`, every test binary as
//! `test_<folder>_<target>`, every bench as `bench_<target>`, all built for release and stripped, and `MANIFEST`:
//! commit, each file's size, and the newest glibc symbol version they ask for. The kernels need no file of their own:
//! the bundle is inside the binaries. A bench measures only when started with `--bench`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use regex::bytes::Regex;
use serde_json::Value;

use crate::command::{capture, cargo};

const FOLDER: &str = "carry";

/// A built program and its name in the folder.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Program {
    name: String,
    path: PathBuf,
}

pub fn run(root: &Path) -> Result<()> {
    let mut programs = BTreeSet::new();
    // The same packages both times, so that cargo settles on the same features and builds their libraries once.
    for verb in [&["build", "--bins"][..], &["test", "--no-run", "--lib", "--bins", "--tests", "--benches"]] {
        let mut cargo = cargo(root);
        cargo.args(verb).args(["--release", "--workspace", "--exclude", "xtask", "--quiet"]);
        eprintln!("cargo {} --release", verb.join(" "));
        programs.extend(executables(&capture(cargo.args(["--message-format", "json"]))?.stdout)?);
    }
    ensure!(!programs.is_empty(), "cargo built no program");
    let folder = root.join(FOLDER);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    let mut manifest = format!("commit {}\n", commit(root)?);
    let mut versions = BTreeSet::new();
    for program in &programs {
        let copy = folder.join(&program.name);
        fs::copy(&program.path, &copy).with_context(|| format!("cannot copy {}", program.path.display()))?;
        capture(Command::new("strip").arg(&copy)).context("gather needs binutils' strip")?;
        let bytes = fs::read(&copy)?;
        versions.extend(glibc_versions(&bytes));
        manifest += &format!("file {} {} bytes\n", program.name, bytes.len());
    }
    let newest = versions.last().map_or("none".to_owned(), |(major, minor)| format!("{major}.{minor}"));
    manifest += &format!("glibc {newest}\n");
    fs::write(folder.join("MANIFEST"), &manifest)?;
    print!("{manifest}");
    Ok(())
}

/// The programs of cargo's JSON messages, named by what they are, their package and target.
fn executables(messages: &str) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line)?;
        let Some(path) = message["executable"].as_str() else { continue };
        let target = message["target"]["name"].as_str().context("a cargo message without a target")?;
        let manifest = Path::new(message["manifest_path"].as_str().context("a cargo message without a manifest")?);
        let package = manifest.parent().and_then(Path::file_name).context("a manifest without a folder")?;
        let name = if message["target"]["kind"][0] == "bench" {
            format!("bench_{target}")
        } else if message["profile"]["test"] == true {
            format!("test_{}_{target}", package.to_string_lossy())
        } else {
            target.to_owned()
        };
        programs.push(Program { name, path: path.into() });
    }
    Ok(programs)
}

/// The glibc versions a program names in its symbol table.
fn glibc_versions(program: &[u8]) -> BTreeSet<(u32, u32)> {
    let pattern = Regex::new(r"GLIBC_(\d+)\.(\d+)").expect("a constant pattern");
    let number = |bytes: &[u8]| std::str::from_utf8(bytes).ok()?.parse().ok();
    pattern.captures_iter(program).filter_map(|found| Some((number(&found[1])?, number(&found[2])?))).collect()
}

/// The commit, with a mark where the working tree has changes.
fn commit(root: &Path) -> Result<String> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]);
    Ok(capture(&mut git)?.stdout.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGES: &str = r#"
{"manifest_path":"x/host/Cargo.toml","target":{"kind":["lib"],"name":"oxattn"},"profile":{"test":false},"executable":null}
{"manifest_path":"x/host/Cargo.toml","target":{"kind":["lib"],"name":"oxattn"},"profile":{"test":true},"executable":"x/a"}
{"manifest_path":"x/cli/Cargo.toml","target":{"kind":["bin"],"name":"oxattn"},"profile":{"test":true},"executable":"x/b"}
{"manifest_path":"x/cli/Cargo.toml","target":{"kind":["bin"],"name":"oxattn"},"profile":{"test":false},"executable":"x/c"}
{"manifest_path":"x/benches/Cargo.toml","target":{"kind":["bench"],"name":"plan"},"profile":{"test":true},"executable":"x/d"}
{"reason":"build-finished","success":true}
"#;

    #[test]
    fn programs_of_one_target_name_stay_apart() {
        let names: Vec<String> = executables(MESSAGES).unwrap().into_iter().map(|program| program.name).collect();
        assert_eq!(names, ["test_host_oxattn", "test_cli_oxattn", "oxattn", "bench_plan"]);
    }

    #[test]
    fn the_newest_glibc_is_by_number() {
        let versions = glibc_versions(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0GLIBCXX_3.4\0");
        assert_eq!(versions.last(), Some(&(2, 34)));
        assert_eq!(versions.len(), 3);
    }
}
