//! The sources that PTX depends on, and the hash of them and the flags that tells whether a bundle is fresh.
//!
//! In: a device crate's Cargo.toml. Out: the packages that cargo compiles for the GPU, and one hash over their Rust
//! files, their Cargo.toml and the compiler's flags. `simt`'s emulator is left out: it never reaches a GPU.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use kernels_gpu::abi::{manifest::BUNDLE_VERSION, tile::Family};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{
    command::capture,
    compile::{self, TARGET},
    error::BuildError,
};

const NOT_DEVICE_CODE: &str = "simt/src/emulator";

/// The packages of a device crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sources {
    /// The workspace's root folder.
    pub workspace: PathBuf,
    /// Name and folder of each package, the crate's own among them, sorted.
    pub packages: Vec<(String, PathBuf)>,
}

impl Sources {
    /// Asks cargo.
    pub fn find(manifest: &Path) -> Result<Sources, BuildError> {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["metadata", "--format-version=1", "--filter-platform", TARGET, "--manifest-path"]).arg(manifest);
        let missing = |missing| move || BuildError::Metadata { manifest: manifest.to_owned(), missing };
        let printed = capture(&mut cargo)?.stdout;
        let metadata: Value = serde_json::from_str(&printed).map_err(|_| missing("JSON")())?;
        let workspace = metadata["workspace_root"].as_str().ok_or_else(missing("workspace_root"))?.into();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let packages = list(&metadata["packages"]);
        let nodes = list(&metadata["resolve"]["nodes"]);
        let absolute = fs::canonicalize(manifest).map_err(BuildError::file(manifest))?;
        let own = packages.iter().find(|package| {
            package["manifest_path"].as_str().and_then(|path| fs::canonicalize(path).ok()) == Some(absolute.clone())
        });
        let mut unread = vec![own.ok_or_else(missing("package of that manifest"))?["id"].clone()];
        let mut found: Vec<Value> = Vec::new();
        while let Some(id) = unread.pop() {
            if found.contains(&id) {
                continue;
            }
            let node = nodes.iter().find(|node| node["id"] == id).ok_or_else(missing("node of a dependency"))?;
            let is_normal =
                |dependency: &Value| list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
            unread.extend(list(&node["deps"]).iter().filter(|of| is_normal(of)).map(|of| of["pkg"].clone()));
            found.push(id);
        }
        let mut sources = Sources { workspace, packages: Vec::new() };
        for package in packages.iter().filter(|package| found.contains(&package["id"])) {
            let name = package["name"].as_str().ok_or_else(missing("name of a package"))?;
            let manifest = package["manifest_path"].as_str().ok_or_else(missing("manifest_path of a package"))?;
            let folder = Path::new(manifest).parent().ok_or_else(missing("folder of a package"))?;
            sources.packages.push((name.to_owned(), folder.to_owned()));
        }
        sources.packages.sort();
        Ok(sources)
    }

    /// Every file that counts: its name, which says the package and not where that lies, and its path.
    pub fn files(&self) -> Result<Vec<(String, PathBuf)>, BuildError> {
        let mut files = Vec::new();
        for (name, folder) in &self.packages {
            files.push((format!("{name}/Cargo.toml"), folder.join("Cargo.toml")));
            collect(&format!("{name}/src"), &folder.join("src"), &mut files)?;
        }
        files.sort();
        Ok(files)
    }

    /// SHA-256 in hexadecimal.
    pub fn hash(&self) -> Result<String, BuildError> {
        let mut hasher = Sha256::new();
        for (name, path) in self.files()? {
            field(&mut hasher, name.as_bytes());
            field(&mut hasher, &fs::read(&path).map_err(BuildError::file(&path))?);
        }
        for family in Family::ALL {
            for flag in compile::flags(family) {
                field(&mut hasher, flag.as_bytes());
            }
        }
        field(&mut hasher, &BUNDLE_VERSION.to_le_bytes());
        Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Length first, so that no two lists of fields hash alike.
fn field(hasher: &mut Sha256, bytes: &[u8]) {
    hasher.update((bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn collect(name: &str, folder: &Path, files: &mut Vec<(String, PathBuf)>) -> Result<(), BuildError> {
    if name == NOT_DEVICE_CODE {
        return Ok(());
    }
    for entry in fs::read_dir(folder).map_err(BuildError::file(folder))? {
        let entry = entry.map_err(BuildError::file(folder))?;
        let (name, path) = (format!("{name}/{}", entry.file_name().to_string_lossy()), entry.path());
        if path.is_dir() {
            collect(&name, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push((name, path));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two packages of four files in a folder of their own, removed at the end.
    struct Scratch(PathBuf);
    impl Scratch {
        fn new(name: &str) -> Scratch {
            let folder = std::env::temp_dir().join(format!("oxattn-build-source-{name}-{}", std::process::id()));
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
        fn hash(&self) -> String {
            let packages = ["kernels-gpu", "simt"].map(|name| (name.to_owned(), self.0.join(name))).to_vec();
            Sources { workspace: self.0.clone(), packages }.hash().unwrap()
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
        let first = scratch.hash();
        assert_eq!(first.len(), 64);
        assert_eq!(scratch.change("simt/src/emulator/mod.rs", "changed").hash(), first);
        assert_eq!(scratch.change("kernels-gpu/src/notes.txt", "new").hash(), first);
        assert_ne!(scratch.change("kernels-gpu/src/abi/mod.rs", "changed").hash(), first);
        assert_eq!(scratch.change("kernels-gpu/src/abi/mod.rs", "e").hash(), first);
        assert_ne!(scratch.change("kernels-gpu/Cargo.toml", "changed").hash(), first);
    }

    #[test]
    fn a_crate_is_compiled_with_what_it_depends_on_on_a_gpu() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let sources = Sources::find(&root.join("kernels-gpu/Cargo.toml")).unwrap();
        let names: Vec<&str> = sources.packages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((names, sources.workspace.as_path()), (vec!["kernels-gpu", "simt"], root));
        let files = sources.files().unwrap();
        let holds = |name: &str| files.iter().any(|(file, _)| file == name);
        assert!(holds("kernels-gpu/src/abi/plan.rs") && holds("simt/Cargo.toml") && !holds("simt/src/emulator/mod.rs"));
    }
}
