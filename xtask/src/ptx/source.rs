//! The hash that tells whether the bundle is fresh: over every source file the PTX depends on, and the flags.
//!
//! The emulator's files are left out: they never reach a GPU.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use kernels_gpu::abi::{manifest::BUNDLE_VERSION, tile::Family};
use sha2::{Digest, Sha256};

use super::compile;

const FOLDERS: [&str; 2] = ["simt/src", "kernels-gpu/src"];
const FILES: [&str; 2] = ["simt/Cargo.toml", "kernels-gpu/Cargo.toml"];
const NOT_DEVICE_CODE: &str = "simt/src/emulator";

/// SHA-256 in hexadecimal.
pub fn hash(root: &Path) -> Result<String> {
    let mut files: Vec<PathBuf> = FILES.iter().map(PathBuf::from).collect();
    for folder in FOLDERS {
        collect(root, Path::new(folder), &mut files)?;
    }
    files.sort();
    let mut hasher = Sha256::new();
    for file in &files {
        let text = fs::read(root.join(file)).with_context(|| format!("cannot read {}", file.display()))?;
        field(&mut hasher, file.to_string_lossy().replace('\\', "/").as_bytes());
        field(&mut hasher, &text);
    }
    for family in Family::ALL {
        for flag in compile::flags(family) {
            field(&mut hasher, flag.as_bytes());
        }
    }
    field(&mut hasher, &BUNDLE_VERSION.to_le_bytes());
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Length first, so that no two lists of fields hash alike.
fn field(hasher: &mut Sha256, bytes: &[u8]) {
    hasher.update((bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn collect(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if folder == Path::new(NOT_DEVICE_CODE) {
        return Ok(());
    }
    for entry in fs::read_dir(root.join(folder)).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            collect(root, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A workspace of four files in a folder of its own, removed at the end.
    struct Scratch(PathBuf);
    impl Scratch {
        fn new(name: &str) -> Scratch {
            let folder = std::env::temp_dir().join(format!("xtask-source-{name}-{}", std::process::id()));
            for (file, text) in [
                ("simt/Cargo.toml", "a"),
                ("kernels-gpu/Cargo.toml", "b"),
                ("simt/src/lib.rs", "c"),
                ("simt/src/emulator/mod.rs", "d"),
                ("kernels-gpu/src/abi/mod.rs", "e"),
            ] {
                let path = folder.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Scratch(folder)
        }
        fn change(&self, file: &str, text: &str) -> &Self {
            fs::write(self.0.join(file), text).unwrap();
            self
        }
    }
    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn device_sources_count_and_the_emulator_does_not() {
        let scratch = Scratch::new("count");
        let first = hash(&scratch.0).unwrap();
        assert_eq!(first.len(), 64);
        assert_eq!(hash(&scratch.change("simt/src/emulator/mod.rs", "changed").0).unwrap(), first);
        assert_eq!(hash(&scratch.change("kernels-gpu/src/notes.txt", "new").0).unwrap(), first);
        assert_ne!(hash(&scratch.change("kernels-gpu/src/abi/mod.rs", "changed").0).unwrap(), first);
        assert_eq!(hash(&scratch.change("kernels-gpu/src/abi/mod.rs", "e").0).unwrap(), first);
        assert_ne!(hash(&scratch.change("kernels-gpu/Cargo.toml", "changed").0).unwrap(), first);
    }
}
