//! The command without a GPU: which batches, what is written of their times, and what is refused.

use super::*;
use clap::Parser;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    arguments: Arguments,
}

fn parsed(line: &str) -> Result<Arguments, String> {
    let words = std::iter::once("tune").chain(line.split_whitespace());
    Command::try_parse_from(words).map(|command| command.arguments).map_err(|error| error.to_string())
}

fn definitions(name: &str) -> String {
    format!("{}/../benches/definitions/{name}.jsonl", env!("CARGO_MANIFEST_DIR"))
}

fn machine() -> Machine {
    Machine::new("NVIDIA H200", 13000, "5eed")
}

/// Cases of a command line, with `attend` and `prefill` microseconds for each in turn.
fn tuned(line: &str, times: &[[Option<f64>; 2]]) -> Result<Outcome, TuneError> {
    let cases = cases(&parsed(line).unwrap()).unwrap();
    assert_eq!(cases.len(), times.len());
    tune(&cases, machine(), |case, kernel| {
        let index = cases.iter().position(|found| found.case == case.case).unwrap();
        Ok(times[index][usize::from(kernel == Kernel::Prefill)])
    })
}

#[test]
fn shapes_and_cases_name_the_batches() {
    let default = cases(&parsed("").unwrap()).unwrap();
    assert_eq!(default.len(), SHAPES.len());
    assert!(
        default.iter().all(|case| (case.query_heads, case.kv_heads, case.head_dim, case.page_size) == (32, 8, 128, 16))
    );
    let shapes =
        cases(&parsed("--shapes 8:1024x3,1:64+2:65 --query-heads 8 --head-dim 64 --page-size 32").unwrap()).unwrap();
    assert_eq!(shapes.iter().map(|case| case.case.as_str()).collect::<Vec<_>>(), ["8:1024x3", "1:64+2:65"]);
    assert_eq!((shapes[0].query_heads, shapes[0].head_dim, shapes[0].page_size), (8, 64, 32));
    let all = cases(&parsed(&format!("--cases {}", definitions("prefill"))).unwrap()).unwrap();
    let mixed = cases(&parsed(&format!("--cases {} --sections mixed", definitions("prefill"))).unwrap()).unwrap();
    assert!(!mixed.is_empty() && mixed.len() < all.len());
}

#[test]
fn each_batch_is_an_entry_that_the_library_finds() {
    let times = [[Some(72.0), Some(69.0)], [Some(255.25), Some(261.0004)], [Some(9.0), None]];
    let outcome = tuned("--shapes 8:1024x64,5:4096x64,9:50", &times).unwrap();
    let text = outcome.tuning.to_string();
    assert_eq!(
        text,
        "oxattn tuning 1\ncard NVIDIA H200\ndriver 13000\nbundle 5eed\nentries 2\n\
         dtype bf16 head_dim 128 kv_heads 8 group 4 variant plain page 16 requests 64 rows 1024 keys 262144 prompts 0/1 \
         attend_ns 255250 prefill_ns 261000 batches 1\n\
         dtype bf16 head_dim 128 kv_heads 8 group 4 variant plain page 16 requests 64 rows 2048 keys 65536 prompts 1/1 \
         attend_ns 72000 prefill_ns 69000 batches 1\n"
    );
    let table = outcome.table();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "batch      attend us  prefill us  faster");
    assert_eq!(lines[1], "8:1024x64       72.0        69.0  prefill");
    assert_eq!(lines[2], "5:4096x64      255.2       261.0  attend");
    assert_eq!(lines[3], "9:50             9.0           -  attend, the only one");
    // What the planner will look for.
    let config = parsed("").unwrap().attention.config();
    let page_table = PageTable::block_table(16, 64, &[1024u32; 64]).unwrap();
    let times = outcome.tuning.times(&config, &page_table, QueryLengths::uniform(8)).unwrap();
    assert_eq!(times.unwrap().faster(), Kernel::Prefill);
}

#[test]
fn a_file_is_written_whole_and_read_again() {
    let outcome = tuned("--shapes 8:1024x64", &[[Some(72.0), Some(69.0)]]).unwrap();
    let folder = std::env::temp_dir().join(format!("oxattn-tune-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("tuning.txt");
    write(&outcome.tuning, &path).unwrap();
    assert_eq!(Tuning::load(&path).unwrap(), outcome.tuning);
    let names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["tuning.txt"]);
    // The same times are the same bytes, and the device says that they are not of it.
    let first = std::fs::read(&path).unwrap();
    write(&tuned("--shapes 8:1024x64", &[[Some(72.0), Some(69.0)]]).unwrap().tuning, &path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), first);
    let device = Device::cpu().load_tuning(&path).unwrap();
    let reason = device.tuning().unwrap().unwrap_err().to_string();
    assert_eq!(reason, "its times are of the card NVIDIA H200; this is cpu");
    std::fs::write(&path, &first[..first.len() - 9]).unwrap();
    let error = Device::cpu().load_tuning(&path).err().unwrap().to_string();
    assert!(error.ends_with("tuning.txt: line 6: the line has no end"), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_cannot_be_tuned_is_refused() {
    let error = |line: &str| cases(&parsed(line).unwrap()).unwrap_err().to_string();
    assert_eq!(error("--dtype f16"), "dtype is f16; tuning times bf16");
    let decode = definitions("serving");
    assert_eq!(
        error(&format!("--cases {decode} --sections prefix")),
        "section prefix cannot be tuned; decode, replay, prefill, append-chunk, mixed can"
    );
    assert_eq!(error(&format!("--cases {decode} --sections mixed")), "there is no case of the sections mixed");
    assert!(error("--cases no/such/file").starts_with("cases no/such/file: "));
    for line in [
        "--shapes 5",
        "--sections decode",
        &format!("--cases {decode} --shapes 1:5"),
        &format!("--cases {decode} --head-dim 64"),
    ] {
        assert!(parsed(line).is_err(), "{line}");
    }
    let only = tuned("--shapes 8:1024x64 --page-size 4", &[[Some(72.0), None]]).unwrap_err().to_string();
    assert!(only.starts_with("there is nothing to choose: "), "{only}");
    let wrong = tune(&cases(&parsed("--shapes 8:1024").unwrap()).unwrap(), machine(), |case, kernel| {
        Err(TuneError::Wrong { case: case.case.clone(), kernel, error: 0.5 })
    });
    assert_eq!(wrong.unwrap_err().to_string(), "8:1024: the prefill kernel's answer is wrong: relative error 5.0e-1");
}

/// Without a GPU the command says why it does nothing.
#[test]
fn a_machine_without_a_gpu_is_told_so() {
    if Device::cuda(0).is_err() {
        let error = run(&parsed("--out no/such/folder/tuning.txt").unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("tuning times the kernels on a GPU, and there is none to be had: "), "{error}");
    }
}
