//! Host cost of a plan: what every decode step pays before its first kernel.
//!
//! 32 query heads on 8 KV heads, head dim 128, pages of 16 tokens, for 264 blocks (132 multiprocessors of two), one
//! query token a request. `uniform` has 8192 keys a request; `chat` takes the lengths of the suite's plan section.
//! Each plan is checked to fill its queues before it is timed.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use oxattn::{AttentionConfig, Limits, PageTable, Planner, QueryLengths, SplitMode, Target};

const DEFINITIONS: &str = include_str!("../definitions/serving.jsonl");

/// The `kv_lens` of the suite's case for a planned decode batch of `requests`.
fn chat_kv_lens(requests: usize) -> Vec<u32> {
    let case = format!("plan decode b{requests} ");
    let line = DEFINITIONS.lines().find(|line| line.contains(&case)).expect("the suite plans this batch");
    let kv_lens = line.split("\"kv_lens\": \"").nth(1).and_then(|rest| rest.split('"').next()).expect("lengths");
    let number = |text: &str| text.parse().expect("a length, or a length x a count");
    let runs = kv_lens.split(',').map(|run| run.split_once('x').unwrap_or((run, "1")));
    runs.flat_map(|(kv_len, count)| vec![number(kv_len); number(count) as usize]).collect()
}

fn batches() -> impl Iterator<Item = (&'static str, Vec<u32>)> {
    let batch = |requests| [("uniform", vec![8192; requests]), ("chat", chat_kv_lens(requests))];
    [64, 256, 1024].into_iter().flat_map(batch)
}

fn limits(kv_lens: &[u32], query_tokens: u32) -> Limits {
    Limits {
        max_requests: kv_lens.len() as u32,
        max_query_tokens: query_tokens,
        max_kv_len_tokens: 131_072,
        max_kv_tokens: 1 << 24,
    }
}

fn page_indptr(kv_lens: &[u32]) -> Vec<u32> {
    let mut indptr = vec![0];
    for kv_len in kv_lens {
        indptr.push(indptr[indptr.len() - 1] + kv_len.div_ceil(16));
    }
    indptr
}

fn plan(criterion: &mut Criterion) {
    let config = AttentionConfig::new(32, 8, 128, 16);
    let target = Target::new(264, 64);
    for (name, mode) in [("balanced", SplitMode::Balanced), ("invariant", SplitMode::BatchInvariant)] {
        let mut group = criterion.benchmark_group(format!("plan/{name}"));
        for (lengths, kv_lens) in batches() {
            let indptr = page_indptr(&kv_lens);
            let table = PageTable::csr(16, &indptr, &kv_lens).expect("consistent");
            let mut planner =
                Planner::new(config, target, mode, limits(&kv_lens, kv_lens.len() as u32)).expect("representable");
            let balance = planner.plan(&table, QueryLengths::uniform(1)).expect("within limits").balance();
            assert!(
                balance.efficiency() > 0.95 || mode != SplitMode::Balanced,
                "{lengths} {}: {:.3}",
                kv_lens.len(),
                balance.efficiency()
            );
            group.bench_function(BenchmarkId::new(lengths, kv_lens.len()), |bencher| {
                bencher.iter(|| planner.plan(black_box(&table), QueryLengths::uniform(1)).map(|plan| plan.epoch()));
            });
        }
    }
}

/// A chunk of 512 tokens over 8192 keys beside 64 decodes of 4096.
fn mixed_phases(criterion: &mut Criterion) {
    let mut kv_lens = vec![4096; 64];
    kv_lens.push(8192);
    let mut query_indptr: Vec<u32> = (0..=64).collect();
    query_indptr.push(64 + 512);
    let indptr = page_indptr(&kv_lens);
    let table = PageTable::csr(16, &indptr, &kv_lens).expect("consistent");
    let query = QueryLengths::indptr(&query_indptr).expect("consistent");
    let config = AttentionConfig::new(32, 8, 128, 16);
    let limits = limits(&kv_lens, 64 + 512);
    let mut planner = Planner::new(config, Target::new(264, 64), SplitMode::Balanced, limits).expect("representable");
    criterion.bench_function("plan/balanced/64 decodes and a chunk", |bencher| {
        bencher.iter(|| planner.plan(black_box(&table), query).map(|plan| plan.epoch()));
    });
}

/// 256 decodes of 4096 keys, which share a prompt of 2048, and eight each a document of 1920 more.
fn shared_prefixes(criterion: &mut Criterion) {
    let kv_lens = vec![4096; 256];
    let shared_tokens: Vec<u32> = (0..256)
        .map(|request| match request {
            0 => 0,
            _ if request % 8 == 0 => 2048,
            _ => 3968,
        })
        .collect();
    let indptr = page_indptr(&kv_lens);
    let table = PageTable::csr(16, &indptr, &kv_lens).expect("consistent");
    let table = table.with_shared_prefixes(&shared_tokens).expect("as long as the keys");
    let config = AttentionConfig::new(32, 8, 128, 16).with_shared_prefixes(2);
    let target = Target::new(264, 64).with_tall_rows(128);
    let mut planner = Planner::new(config, target, SplitMode::Balanced, limits(&kv_lens, 256)).expect("representable");
    criterion.bench_function("plan/balanced/256 decodes that share", |bencher| {
        bencher.iter(|| planner.plan(black_box(&table), QueryLengths::uniform(1)).map(|plan| plan.epoch()));
    });
}

fn page_table(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("page table");
    for (lengths, kv_lens) in batches() {
        let indptr = page_indptr(&kv_lens);
        group.bench_function(BenchmarkId::new(lengths, kv_lens.len()), |bencher| {
            bencher.iter(|| PageTable::csr(16, black_box(&indptr), black_box(&kv_lens)).map(|table| table.requests()));
        });
    }
}

criterion_group!(benches, plan, mixed_phases, shared_prefixes, page_table);
criterion_main!(benches);
