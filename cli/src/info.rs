//! `oxattn info`: what this machine can run. One line a fact; what is missing says why.

use kernels_gpu::abi::manifest::Image;
use kernels_gpu::abi::tile::Family;
use oxattn::launch::{EMBEDDED, bundle::Bundle};
use oxattn::{Device, driver};

/// Describe the machine: executors, driver, GPUs, and the kernels inside the program.
#[derive(Debug, clap::Args)]
pub struct Arguments {}

/// Runs the subcommand.
pub fn run(_: &Arguments) -> std::io::Result<()> {
    let mut text = String::new();
    for (name, fact) in facts() {
        text += &format!("{name:<10} {fact}\n");
    }
    crate::print(&text)
}

fn facts() -> Vec<(String, String)> {
    let mut facts = vec![
        ("oxattn".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("executor".to_owned(), Device::cpu().describe()),
        ("kernels".to_owned(), kernels()),
    ];
    let count = match driver::open().and_then(|()| Ok((driver::version()?, driver::device_count()?))) {
        Ok((version, count)) => {
            facts.push(("driver".to_owned(), format!("CUDA {}.{}", version / 1000, version % 1000 / 10)));
            count
        }
        Err(error) => {
            facts.push(("driver".to_owned(), error.to_string()));
            0
        }
    };
    facts.extend((0..count).map(|ordinal| (format!("cuda:{ordinal}"), gpu(ordinal))));
    facts
}

/// The bundle inside the program.
fn kernels() -> String {
    let bundle = match Bundle::parse(EMBEDDED) {
        Ok(bundle) => bundle,
        Err(error) => return error.to_string(),
    };
    let manifest = bundle.manifest();
    let counts = Family::ALL.map(|family| {
        let of_family = manifest.kernels.iter().filter(|record| record.family == family && record.image == Image::Ptx);
        format!("{} for {}", of_family.count(), family.name())
    });
    let short = |hash: &str| hash.chars().take(12).collect::<String>();
    let (source, compiler) = (short(&manifest.source_hash), short(&manifest.compiler));
    format!("{}; {} bytes; source {source}, rustc {compiler}", counts.join(", "), EMBEDDED.len())
}

fn gpu(ordinal: u32) -> String {
    let gibibytes = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let properties = match driver::properties(ordinal) {
        Ok(properties) => properties,
        Err(error) => return error.to_string(),
    };
    let (major, minor) = properties.capability;
    let hardware = format!(
        "{}, compute capability {major}.{minor}, {} multiprocessors, {:.1} GiB at {} GB/s, {} KiB of shared memory a block, {} MiB L2",
        properties.name,
        properties.multiprocessors,
        gibibytes(properties.memory_bytes),
        properties.memory_gb_per_s,
        properties.shared_bytes_per_block >> 10,
        properties.l2_bytes >> 20
    );
    match Device::cuda(ordinal) {
        Ok(device) => match device.as_cuda() {
            Some(cuda) => format!("{hardware}; runs the {} kernels", cuda.family().name()),
            None => hardware,
        },
        Err(error) => format!("{hardware}; not usable: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundle_inside_the_program_opens_and_every_fact_is_one_line() {
        let facts = facts();
        let fact = |name: &str| &facts.iter().find(|(found, _)| found == name).unwrap().1;
        let kernels = fact("kernels");
        assert!(kernels.contains(" for sm_80, ") && kernels.contains(" for sm_90a; "), "{kernels}");
        assert!(!kernels.starts_with('0') && !kernels.contains(" 0 for"), "{kernels}");
        assert!(fact("executor").starts_with("cpu, "));
        assert!(!fact("driver").is_empty());
        assert!(facts.iter().all(|(_, fact)| !fact.contains('\n')));
    }
}
