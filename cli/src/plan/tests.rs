//! The `plan` command on whole batches.

use super::*;
use clap::Parser;
use oxattn::NotShared;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    arguments: Arguments,
}

fn arguments(line: &str) -> Arguments {
    Command::try_parse_from(std::iter::once("plan").chain(line.split_whitespace())).unwrap().arguments
}

fn drawn(line: &str) -> String {
    with_plan(line, |plan, batch| picture(plan, &batch.kv_lens))
}

fn with_plan<R>(line: &str, with: impl FnOnce(&Plan, &Batch) -> R) -> R {
    let arguments = arguments(line);
    let batch = Batch::new(&arguments).unwrap();
    let mut planner = planner(&arguments, &batch.kv_lens).unwrap();
    let table = batch.table(&arguments).unwrap();
    with(planner.plan(&table, QueryLengths::uniform(arguments.query_len)).unwrap(), &batch)
}

/// A trace of the project.
fn trace_of(name: &str) -> String {
    format!("{}/../data/traces/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_trace_is_drawn_with_the_keys_that_its_prompts_have_in_common() {
    let line = format!("--trace {}", trace_of("mooncake_conversation_grouped.jsonl"));
    let (apart, shared) = (drawn(&line), drawn(&format!("{line} --share-prefixes 2")));
    // Prompts of 1,738,997 tokens, and a new one each.
    assert!(apart.contains("64 requests, 1,739,061 keys, 32/8 heads of 128: "));
    let makespan = |svg: &str| -> f64 {
        let (_, makespan) = svg.split_once("makespan ").unwrap();
        makespan.split_once('<').unwrap().0.replace(',', "").parse().unwrap()
    };
    // 13 groups read their prefixes once.
    assert!(makespan(&shared) < 0.5 * makespan(&apart), "{} and {}", makespan(&shared), makespan(&apart));
    let sharing = with_plan(&format!("{line} --share-prefixes 2"), |plan, _| plan.sharing());
    assert_eq!((sharing.shared_requests, sharing.not_shared), (64, None));
    // Neighbours of a trace have little in common: of its first 64 a block, which is not worth a level.
    let line = format!("--trace {} --share-prefixes 1", trace_of("mooncake_conversation_sample.jsonl"));
    with_plan(&line, |plan, batch| {
        assert_eq!(batch.shared_tokens, [&[0][..], &[512; 63]].concat());
        assert_eq!(plan.sharing().not_shared, Some(NotShared::DoesNotPay));
    });
}

#[test]
fn a_trace_or_lengths_are_given_not_both() {
    for line in ["", "--kv-lens 5 --trace t", "--kv-lens 5 --share-prefixes 1", "--kv-lens 5 --batch 3"] {
        assert!(Command::try_parse_from(std::iter::once("plan").chain(line.split_whitespace())).is_err(), "{line}");
    }
    let error = Batch::new(&arguments("--trace no/such/trace")).err().unwrap().to_string();
    assert!(error.starts_with("trace no/such/trace: the file cannot be read: "), "{error}");
}

#[test]
fn the_long_request_of_a_skewed_batch_is_cut_and_drawn_as_such() {
    let balanced = drawn("--kv-lens 512x63,100000");
    assert!(balanced.contains("64 requests, 132,256 keys, 32/8 heads of 128: "));
    assert!(balanced.contains(" items for 33 teams of 8 blocks"));
    assert!(balanced.contains("<title>split: "));
    // 100,000 keys are 1563 tiles of 64, 512 are 8, and an item costs 1 more: 1564 + 63 * 9 = 2131 tiles for 33 teams.
    // No schedule ends before tile 65, and the planner's at most 3 after the mean of 64.6.
    let (_, makespan) = balanced.split_once("makespan ").unwrap();
    let makespan: u32 = makespan.split_once('<').unwrap().0.parse().unwrap();
    assert!((65..=67).contains(&makespan), "{makespan}");
    // Uncut, one team reads the long request.
    let unsplit = drawn("--kv-lens 512x63,100000 --mode unsplit");
    assert!(unsplit.contains("64 items for 33 teams of 8 blocks"));
    assert!(unsplit.contains("unsplit: 0 of 64 row tiles cut, "));
    assert!(unsplit.contains("makespan 1,564<"));
    assert!(!unsplit.contains("<title>split: "));
}

/// The explanation says how long it will take on the GPU that the arguments describe.
#[test]
fn the_time_is_predicted_for_the_bandwidth_given() {
    let explained = |line: &str| with_plan(line, |plan, _| plan.explain());
    let fast = explained("--kv-lens 8192x64");
    let slow = explained("--kv-lens 8192x64 --gb-per-s 2000");
    assert_eq!((fast.read_gb_per_s, slow.read_gb_per_s), (Some(4700), Some(2000)));
    assert!(fast.to_string().ends_with(" us predicted, where memory is read at 4700 GB/s"), "{fast}");
    assert!(slow.predicted_us > fast.predicted_us);
    assert!(Command::try_parse_from("plan --kv-lens 5 --gb-per-s 0".split_whitespace()).is_err());
}

#[test]
fn odd_batches_are_drawn_too() {
    for line in
        ["--kv-lens 0x3", "--kv-lens 5x0", "--kv-lens 1 --blocks 1", "--kv-lens 3,700 --query-len 9 --head-dim 64"]
    {
        assert!(drawn(line).ends_with("</svg>\n"), "{line}");
    }
}

#[test]
fn what_cannot_be_planned_is_refused_with_the_field() {
    for (line, message) in [
        ("--kv-lens 5 --head-dim 100", "head_dim is 100; supported are"),
        ("--kv-lens 5 --page-size 0", "page_size_tokens is 0"),
        ("--kv-lens 5 --blocks 0", "target.blocks is 0"),
        (
            "--kv-lens 5x1000000 --query-len 5000",
            "the batch has 5000000000 query tokens; supported are at most 4294967295",
        ),
    ] {
        let arguments = arguments(line);
        let planner = Batch::new(&arguments).and_then(|batch| planner(&arguments, &batch.kv_lens));
        let error = planner.err().unwrap().to_string();
        assert!(error.starts_with(message), "{line}: {error}");
    }
    let error = page_indptr(&[u32::MAX; 2], 1).unwrap_err().to_string();
    assert_eq!(error, "the batch has 8589934590 pages; supported are at most 4294967295");
}
