//! The `plan` command on whole batches.

use super::*;
use clap::Parser;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    arguments: Arguments,
}

fn arguments(line: &str) -> Arguments {
    Command::try_parse_from(std::iter::once("plan").chain(line.split_whitespace())).unwrap().arguments
}

fn drawn(line: &str) -> String {
    let arguments = arguments(line);
    let mut planner = planner(&arguments).unwrap();
    let kv_lens = &arguments.kv_lens.0;
    let page_indptr = page_indptr(kv_lens, arguments.attention.page_size).unwrap();
    let table = PageTable::csr(arguments.attention.page_size, &page_indptr, kv_lens).unwrap();
    picture(planner.plan(&table, QueryLengths::uniform(arguments.query_len)).unwrap(), kv_lens)
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
    let explained = |line: &str| {
        let arguments = arguments(line);
        let mut planner = planner(&arguments).unwrap();
        let kv_lens = &arguments.kv_lens.0;
        let page_indptr = page_indptr(kv_lens, arguments.attention.page_size).unwrap();
        let table = PageTable::csr(arguments.attention.page_size, &page_indptr, kv_lens).unwrap();
        planner.plan(&table, QueryLengths::uniform(arguments.query_len)).unwrap().explain()
    };
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
        let error = planner(&arguments(line)).unwrap_err().to_string();
        assert!(error.starts_with(message), "{line}: {error}");
    }
    let error = page_indptr(&[u32::MAX; 2], 1).unwrap_err().to_string();
    assert_eq!(error, "the batch has 8589934590 pages; supported are at most 4294967295");
}
