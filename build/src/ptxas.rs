//! `ptxas`: registers, stack and spills of each kernel, and machine code.
//!
//! Optional: the bundle needs no assembler. Where one is found, its counts go into the manifest and its complaints
//! fail the build.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use crate::{command::capture, error::BuildError};

/// Lists the `ptxas` of an installed Python package.
const PYTHON_SEARCH: &str = "
import glob, os, nvidia
for folder in nvidia.__path__:
    for path in sorted(glob.glob(os.path.join(folder, '*', 'bin', 'ptxas'))):
        print(path)
";

/// A `ptxas` that runs.
#[derive(Clone, Debug)]
pub struct Assembler {
    /// Where it lies.
    pub path: PathBuf,
}

/// One kernel to assemble.
pub(crate) struct Job {
    architecture: String,
    ptx: String,
    /// `<folder>/<architecture>/<symbol>.ptx`
    file: PathBuf,
}

/// What came out.
pub(crate) struct Assembled {
    pub resources: Resources,
    pub cubin: Vec<u8>,
}

/// What `ptxas -v` says of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub registers: u32,
    pub stack_bytes: u32,
    pub spill_bytes: u32,
    /// Lines with a C75xx code: a pipeline it had to serialise, a directive it ignored.
    pub warnings: Vec<String>,
}

impl Assembler {
    /// The named one, or the first of the Python package and PATH; `None` where there is none.
    pub fn find(named: Option<&Path>) -> Result<Option<Assembler>, BuildError> {
        let works = |path: &Path| capture(Command::new(path).arg("--version"));
        if let Some(path) = named {
            works(path).map_err(|source| BuildError::NotAssembler { path: path.to_owned(), source })?;
            return Ok(Some(Assembler { path: path.to_owned() }));
        }
        let python = capture(Command::new("python3").args(["-c", PYTHON_SEARCH])).map(|printed| printed.stdout);
        let candidates = python.unwrap_or_default();
        let candidates = candidates.lines().chain(std::iter::once("ptxas")).map(PathBuf::from);
        Ok(candidates.into_iter().find(|path| works(path).is_ok()).map(|path| Assembler { path }))
    }

    /// Assembles all jobs, as many at a time as there are processors; results are in the jobs' order.
    pub(crate) fn run(&self, jobs: &[Job]) -> Result<Vec<Assembled>, BuildError> {
        let workers = thread::available_parallelism().map_or(1, usize::from).min(jobs.len().max(1));
        let next = AtomicUsize::new(0);
        let mut done: Vec<(usize, Assembled)> = thread::scope(|scope| {
            let work = || -> Result<Vec<(usize, Assembled)>, BuildError> {
                let mut done = Vec::new();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { return Ok(done) };
                    done.push((index, self.assemble(job)?));
                }
            };
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            let results = workers.into_iter().map(|worker| worker.join().expect("a worker returns its errors"));
            results.collect::<Result<Vec<_>, BuildError>>().map(|parts| parts.into_iter().flatten().collect())
        })?;
        done.sort_by_key(|(index, _)| *index);
        Ok(done.into_iter().map(|(_, assembled)| assembled).collect())
    }

    fn assemble(&self, job: &Job) -> Result<Assembled, BuildError> {
        let cubin = job.file.with_extension("cubin");
        if let Some(folder) = job.file.parent() {
            fs::create_dir_all(folder).map_err(BuildError::file(folder))?;
        }
        fs::write(&job.file, &job.ptx).map_err(BuildError::file(&job.file))?;
        let mut ptxas = Command::new(&self.path);
        ptxas.arg("-v").arg(format!("-arch={}", job.architecture)).arg("-o").arg(&cubin).arg(&job.file);
        let printed = capture(&mut ptxas)?;
        let resources = Resources::read(&printed.stderr).or_else(|| Resources::read(&printed.stdout));
        let resources = resources.ok_or_else(|| BuildError::AssemblerSilent { file: job.file.clone() })?;
        Ok(Assembled { resources, cubin: fs::read(&cubin).map_err(BuildError::file(&cubin))? })
    }
}

impl Job {
    pub fn new(folder: &Path, symbol: &str, ptx: &str, architecture: &str) -> Job {
        let file = folder.join(architecture).join(format!("{symbol}.ptx"));
        Job { architecture: architecture.to_owned(), ptx: ptx.to_owned(), file }
    }
}

impl Resources {
    /// Reads the lines of `ptxas -v` for one kernel; `None` without a line on registers.
    fn read(text: &str) -> Option<Resources> {
        let before = |line: &str, unit: &str| -> Option<u32> {
            line[..line.find(unit)?].split_whitespace().next_back()?.parse().ok()
        };
        let mut resources = Resources::default();
        let mut seen = false;
        for line in text.lines() {
            if let Some(registers) = before(line, " registers") {
                resources.registers = registers;
                seen = true;
            }
            if let Some(stack) = before(line, " bytes stack frame") {
                resources.stack_bytes = stack;
                let stores = before(line, " bytes spill stores").unwrap_or(0);
                resources.spill_bytes = stores + before(line, " bytes spill loads").unwrap_or(0);
            }
            if line.contains("(C75") {
                resources.warnings.push(line.trim().to_owned());
            }
        }
        seen.then_some(resources)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbose_output_is_read() {
        let text = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored
ptxas info    : Function properties for k
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size, 16 bytes smem
";
        let resources = Resources::read(text).unwrap();
        assert_eq!((resources.registers, resources.stack_bytes, resources.spill_bytes), (168, 16, 20));
        assert_eq!(resources.warnings.len(), 1);
        assert!(resources.warnings[0].contains("C7508"));
        assert_eq!(Resources::read("ptxas info    : 0 bytes gmem\n"), None);
    }
}
