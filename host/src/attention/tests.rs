//! Which kernel a batch gets, on the host's stand-in for a Hopper GPU: plans only.
//!
//! Unsafe: workspaces are raw addresses, here of buffers that live as long.

use super::*;
use crate::device::Buffer;
use crate::tuning::{Machine, Tuning, TuningMismatch};
use std::time::Duration;

const LIMITS: Limits =
    Limits { max_requests: 64, max_query_tokens: 1024, max_kv_len_tokens: 4096, max_kv_tokens: 1 << 18 };

/// 64 requests of so many query tokens and 1024 keys.
fn batch(query_tokens: u32) -> (PageTable<'static>, QueryLengths<'static>) {
    (PageTable::block_table(16, 64, &[1024u32; 64]).unwrap(), QueryLengths::uniform(query_tokens))
}

fn config() -> AttentionConfig {
    AttentionConfig::new(32, 8, 128, 16)
}

/// Says that decodes are faster by the prefill kernel and prompts by the attend kernel: what no rule would.
fn tuning(machine: Machine) -> Tuning {
    let mut tuning = Tuning::new(machine);
    for (query_tokens, us) in [(1, [90, 70]), (16, [50, 60])] {
        let ((table, queries), [attend, prefill]) = (batch(query_tokens), us.map(Duration::from_micros));
        tuning.record(&config(), &table, queries, attend, prefill).unwrap();
    }
    tuning
}

/// An attention as on a GPU of 132 multiprocessors, with a workspace.
fn attention(device: &Device, config: AttentionConfig, mode: SplitMode) -> (Attention, Workspace, Buffer) {
    let prefill = Prefill::new(config, 132, mode, LIMITS).unwrap();
    let mut attention = Attention::new(device, config, mode, LIMITS).unwrap();
    attention.measured = Attention::measured(device, &config, mode, prefill.is_some());
    attention.prefill = prefill;
    let memory = device.allocate(attention.workspace_bytes() as usize).unwrap();
    // SAFETY: the caller keeps the buffer as long.
    let workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
    (attention, workspace, memory)
}

/// The kernel of a batch and why, of which `suitable_kernel` and the explanation must know.
fn chosen(device: &Device, config: AttentionConfig, mode: SplitMode, query_tokens: u32) -> (Kernel, Choice) {
    let (mut attention, mut workspace, _memory) = attention(device, config, mode);
    let (table, queries) = batch(query_tokens);
    let suitable = attention.suitable_kernel(&table, queries).unwrap();
    let planned = attention.plan(&table, queries, &mut workspace, Stream::default()).unwrap();
    assert_eq!(planned.kernel(), suitable);
    let explanation = attention.explain().unwrap();
    assert_eq!((explanation.kernel, explanation.choice), (planned.kernel(), planned.choice()));
    assert_eq!(explanation.plan, attention.latest_plan().unwrap().explain());
    (planned.kernel(), planned.choice())
}

#[test]
fn measured_times_decide_where_there_are_some() {
    let plain = Device::cpu();
    let tuned = Device::cpu().with_tuning(tuning(plain.machine()));
    assert!(matches!(tuned.tuning(), Some(Ok(found)) if found.len() == 2));
    assert!(plain.tuning().is_none());
    let balanced = SplitMode::Balanced;
    for (query_tokens, by_rule, by_times) in
        [(1, Kernel::Attend, Kernel::Prefill), (16, Kernel::Prefill, Kernel::Attend)]
    {
        assert_eq!(chosen(&plain, config(), balanced, query_tokens), (by_rule, Choice::Lengths));
        let (kernel, choice) = chosen(&tuned, config(), balanced, query_tokens);
        assert_eq!(kernel, by_times);
        assert!(matches!(choice, Choice::Tuning(times) if times.faster() == by_times && times.batches == 1));
        // A clone chooses alike.
        assert_eq!(chosen(&tuned.clone(), config(), balanced, query_tokens), (kernel, choice));
    }
    // What was not measured goes by the rule: other lengths, attentions, and modes.
    assert_eq!(chosen(&tuned, config(), balanced, 4), (Kernel::Attend, Choice::Lengths));
    assert_eq!(chosen(&tuned, config().with_soft_cap(9.0), balanced, 1), (Kernel::Attend, Choice::Lengths));
    assert_eq!(chosen(&tuned, config(), SplitMode::Unsplit, 16), (Kernel::Prefill, Choice::Lengths));
    assert_eq!(chosen(&tuned, config(), SplitMode::BatchInvariant, 16), (Kernel::Attend, Choice::Only));
}

#[test]
fn the_explanation_says_what_was_measured() {
    let device = Device::cpu();
    let device = device.clone().with_tuning(tuning(device.machine()));
    let (mut attention, mut workspace, _memory) = attention(&device, config(), SplitMode::Balanced);
    assert!(attention.explain().is_none());
    let (table, queries) = batch(1);
    attention.plan(&table, queries, &mut workspace, Stream::default()).unwrap();
    let text = attention.explain().unwrap().to_string();
    let first =
        "kernel    prefill: chosen by tuning: a batch like this took 90.0 us by attend, 70.0 by prefill\nbatch     64";
    assert!(text.starts_with(first), "{text}");
    let (mut attention, mut workspace, _memory) = self::attention(&Device::cpu(), config(), SplitMode::Balanced);
    attention.plan(&table, queries, &mut workspace, Stream::default()).unwrap();
    let text = attention.explain().unwrap().to_string();
    assert!(text.starts_with("kernel    attend: chosen by the batch's lengths\nbatch     64"), "{text}");
}

#[test]
fn the_caller_and_graphs_choose_before_any_times() {
    let device = Device::cpu();
    let device = device.clone().with_tuning(tuning(device.machine()));
    let (table, queries) = batch(1);
    let (given, mut workspace, _memory) = attention(&device, config(), SplitMode::Balanced);
    let mut given = given.with_kernel(Kernel::Attend).unwrap();
    let planned = given.plan(&table, queries, &mut workspace, Stream::default()).unwrap();
    assert_eq!((planned.kernel(), planned.choice()), (Kernel::Attend, Choice::Given));
    let mut graphs = Attention::for_graphs(&device, config(), SplitMode::Balanced, LIMITS).unwrap();
    let planned = graphs.plan(&table, queries, &mut workspace, Stream::default()).unwrap();
    assert_eq!((planned.kernel(), planned.choice()), (Kernel::Attend, Choice::Graphs));
}

/// Batches that share prefixes are not those that were measured; those that do not share, for all that they have in common,
/// are.
#[test]
fn batches_that_share_are_the_prefill_kernel_s() {
    let device = Device::cpu();
    let device = device.clone().with_tuning(tuning(device.machine()));
    let sharing = config().with_shared_prefixes(1);
    let (mut attention, ..) = attention(&device, sharing, SplitMode::Balanced);
    let (table, queries) = batch(1);
    let lengths = BatchLengths::new(&table, queries, &config());
    let mut shared_tokens = [0u32; 64];
    let mut choice_with = |shared_tokens: &[u32; 64]| {
        let table = table.clone().with_shared_prefixes(shared_tokens).unwrap();
        attention.suitable(&table, queries, &lengths)
    };
    let alone = choice_with(&shared_tokens);
    assert!(matches!(alone, (Kernel::Prefill, Choice::Tuning(_))), "{alone:?}");
    shared_tokens[7] = 512;
    assert_eq!(choice_with(&shared_tokens), alone, "two requests' 512 keys are too few");
    shared_tokens[1..].fill(896);
    assert_eq!(choice_with(&shared_tokens), (Kernel::Prefill, Choice::SharedPrefixes));
}

#[test]
fn times_of_another_machine_decide_nothing_and_the_device_says_why() {
    let card = Machine::new("NVIDIA H200", 13000, "5eed");
    let device = Device::cpu().with_tuning(tuning(card));
    let reason = TuningMismatch::Card { measured: "NVIDIA H200".into(), here: "cpu".into() };
    assert_eq!(device.tuning().unwrap().unwrap_err(), &reason);
    assert_eq!(chosen(&device, config(), SplitMode::Balanced, 1), (Kernel::Attend, Choice::Lengths));
    let error = Device::cpu().load_tuning("no/such/tuning").err().unwrap().to_string();
    assert!(error.starts_with("tuning no/such/tuning: "), "{error}");
}
