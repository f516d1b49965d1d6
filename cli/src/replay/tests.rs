//! The `replay` command on small traces.

use super::*;
use clap::Parser;

/// An option given again replaces the one before.
#[derive(Parser)]
#[command(args_override_self = true)]
struct Command {
    #[command(flatten)]
    arguments: Arguments,
}

fn arguments(line: &str) -> Arguments {
    Command::try_parse_from(["replay", "trace"].into_iter().chain(line.split_whitespace())).unwrap().arguments
}

fn requests(lengths: &[(u32, u32)]) -> Vec<Request> {
    lengths
        .iter()
        .map(|&(prompt_tokens, output_tokens)| Request { prompt_tokens, output_tokens, ..Request::default() })
        .collect()
}

const SMALL: &str = "--device cpu --query-heads 4 --kv-heads 2 --head-dim 64 --batch 3 --steps 0 --check-rows 4";

/// Prompts about the borders of pages (16) and tiles (64), and one long enough to be cut.
const LENGTHS: [(u32, u32); 8] = [(1, 3), (15, 4), (16, 2), (17, 9), (1700, 5), (63, 2), (64, 3), (130, 1)];

#[test]
fn every_shape_and_mode_stays_within_tolerance() {
    for options in [
        "",
        "--layers 3",
        "--mode batch-invariant",
        "--mode fixed:64",
        "--mode unsplit",
        "--dtype f16",
        "--page-size 1",
        "--page-size 7 --layers 2",
        "--query-heads 6 --kv-heads 2 --head-dim 96",
        "--seed 5 --batch 8",
    ] {
        let arguments = arguments(&format!("{SMALL} {options}"));
        let report = replay(&requests(&LENGTHS), &arguments).unwrap();
        assert!(report.passed, "{options}: {report}");
        assert!(report.worst_error.is_some());
        assert_eq!(report.tokens, 29, "{options}");
        assert_eq!((report.requests_run, report.requests_in_trace), (8, 8));
        assert_eq!(report.checked_rows, 4 * report.steps, "{options}");
    }
}

#[test]
fn figures_are_what_the_trace_says() {
    // Two requests at once: keys 6 + 4, then 7 + 9, then 10.
    let line = format!("{SMALL} --batch 2 --layers 2");
    let report = replay(&requests(&[(5, 2), (3, 1), (8, 2)]), &arguments(&line)).unwrap();
    assert_eq!((report.steps, report.tokens, report.layers), (3, 5, 2));
    // 36 keys of 2 heads of 64, K and V, 2 bytes, 2 layers.
    assert_eq!(report.kv_bytes, 36 * 2 * 64 * 2 * 2 * 2);
    assert_eq!((report.batch.median, report.batch.max), (2.0, 2.0));
    // Longest over mean: 6 / 5, 9 / 8, 1.
    assert_eq!(report.skew.max, 1.2);
    assert_eq!(report.pages, 2);
}

#[test]
fn the_step_limit_ends_a_replay() {
    let line = format!("{SMALL} --steps 2");
    let report = replay(&requests(&LENGTHS), &arguments(&line)).unwrap();
    assert_eq!((report.steps, report.tokens), (2, 6));
    assert_eq!(report.requests_run, 3);
}

#[test]
fn a_pool_too_small_for_a_request_and_a_wrong_shape_are_refused() {
    let error = replay(&requests(&LENGTHS), &arguments(&format!("{SMALL} --pages 9"))).unwrap_err();
    assert_eq!(error.to_string(), "request 4 of the trace needs 107 pages for its 1705 tokens; the pool has 9");
    let error = replay(&requests(&LENGTHS), &arguments(&format!("{SMALL} --head-dim 65"))).unwrap_err();
    assert!(error.to_string().starts_with("head_dim is 65; supported are"), "{error}");
    let error = replay(&requests(&LENGTHS), &arguments(&format!("{SMALL} --page-size 0"))).unwrap_err();
    assert_eq!(error.to_string(), "page_size_tokens is 0; it must be at least 1");
}

#[test]
fn text_and_json_hold_the_same_figures() {
    let report = replay(&requests(&LENGTHS), &arguments(SMALL)).unwrap();
    let text = report.to_string();
    for name in ["device", "mode", "steps", "plan", "append", "run", "KV read", "balance", "error"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name} is missing in\n{text}");
    }
    let json: serde_json::Value = serde_json::to_value(&report).unwrap();
    assert_eq!(json["tokens"], 29);
    assert_eq!(json["passed"], true);
    assert!(json["plan_us"]["p99"].is_number() && json["worst_error"].is_number());
}

#[test]
fn a_row_past_the_tolerance_fails_the_command() {
    assert_eq!(tolerance(DType::Bf16), 4e-3);
    assert_eq!(tolerance(DType::F16), 5e-4);
    let mut report = replay(&requests(&[(5, 1)]), &arguments(SMALL)).unwrap();
    assert!(outcome(&report, DType::Bf16).is_ok());
    (report.worst_error, report.passed) = (Some(f64::NAN), false);
    let error = outcome(&report, DType::Bf16).unwrap_err().to_string();
    assert!(
        error.starts_with("the worst relative L2 error, NaN, is past the tolerance of 4e-3 for bf16: step 0"),
        "{error}"
    );
}

/// Prompts that begin alike: three with 1024 tokens in common, two of them with 1536, and one alone, not in this order.
fn alike() -> Vec<Request> {
    let request = |prompt_tokens, output_tokens, blocks: &[u64]| Request {
        prompt_tokens,
        output_tokens,
        prompt_blocks: blocks.into(),
        ..Request::default()
    };
    vec![
        request(1700, 6, &[1, 2, 3, 4]),
        request(600, 4, &[9, 10]),
        request(1200, 5, &[1, 2, 7]),
        request(1540, 3, &[1, 2, 3, 8]),
        // Admitted when the others have begun.
        request(1100, 3, &[1, 2, 11]),
    ]
}

const SHARING: &str = "--device cpu --query-heads 4 --kv-heads 2 --head-dim 64 --batch 4 --steps 0 --check-rows 8";

#[test]
fn prompts_that_begin_alike_share_pages_and_reads() {
    for options in [
        "",
        "--page-size 64 --layers 2",
        "--page-size 7",
        "--page-size 1024",
        "--dtype f16 --mode unsplit",
        "--pages 175",
    ] {
        let run = |share: &str| replay(&alike(), &arguments(&format!("{SHARING} {options} {share}"))).unwrap();
        let (apart, shared) = (run(""), run("--share-prefixes 2"));
        for report in [&apart, &shared] {
            assert!(report.passed, "{options}: {report}");
            assert_eq!((report.tokens, report.requests_run), (21, 5));
            // In a pool of 175 pages requests name more pages than there are.
            // Full pages of 1024 tokens and, of one pair, of 1536.
            let size = arguments(options).attention.page_size;
            let cached = [1024, 1024, 1536].map(|tokens| (tokens / size * size) as u64);
            assert_eq!(report.cached_prompt_tokens, cached.iter().sum::<u64>(), "{options}");
        }
        assert_eq!((apart.saved_kv_tokens, apart.kv_tokens), (0, shared.kv_tokens), "{options}");
    }
}

#[test]
fn a_plan_of_one_level_saves_less_than_one_of_two() {
    let saved = |levels: u32| {
        // Many decodes of a long prompt, so that it pays.
        let requests: Vec<Request> = (0..24)
            .map(|request| (request, 10 + request / 2))
            .map(|(request, pair)| Request {
                prompt_tokens: 3100,
                output_tokens: 1,
                // 1024 tokens of all, 2048 more of a pair, and the request's own.
                prompt_blocks: [1, 2]
                    .into_iter()
                    .chain((0..4).map(|block| 100 * pair + block))
                    .chain([10_000 + request])
                    .collect(),
                ..Request::default()
            })
            .collect();
        let line = format!("{SHARING} --batch 24 --share-prefixes {levels}");
        let report = replay(&requests, &arguments(&line)).unwrap();
        assert!(report.passed, "{report}");
        assert_eq!(report.kv_bytes, (report.kv_tokens - report.saved_kv_tokens) * 2 * 2 * 64 * 2);
        report.saved_kv_tokens
    };
    let (none, one, two) = (saved(0), saved(1), saved(2));
    assert!(none == 0 && 0 < one && one < two && two <= 23 * 1024 + 12 * 2048, "{none} {one} {two}");
}

/// The first of the sample's groups of requests with long prefixes in common, by one small head.
#[test]
fn a_group_of_the_sample_is_served_with_a_third_of_its_reads() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/traces/mooncake_conversation_grouped.jsonl");
    let mut requests = trace::read(path.as_ref()).unwrap();
    requests.sort_by(|a, b| a.prompt_blocks.cmp(&b.prompt_blocks));
    requests.truncate(11);
    requests.iter_mut().for_each(|request| request.arrival_ms = None);
    let line = "--device cpu --query-heads 2 --kv-heads 1 --head-dim 64 --batch 11 --steps 2 --share-prefixes 2";
    let report = replay(&requests, &arguments(line)).unwrap();
    assert!(report.passed, "{report}");
    assert_eq!((report.tokens, report.not_shared.as_deref()), (22, None));
    assert!(3 * report.saved_kv_tokens > 2 * report.kv_tokens, "{report}");
}

#[test]
fn nothing_to_share_is_refused() {
    let error = replay(&requests(&LENGTHS), &arguments(&format!("{SMALL} --share-prefixes 1"))).unwrap_err();
    assert!(error.to_string().starts_with("--share-prefixes is 1, but the trace does not say"), "{error}");
}
