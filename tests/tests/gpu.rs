//! What every device has to do, and what only a GPU can, on GPU 0. Where there is none, the tests say so and pass.
//!
//! Unsafe: a copy takes addresses; its test owns the memory behind them.

use kernels_gpu::abi::tile::Family;
use oxattn::config::AttentionConfig;
use oxattn::{Attention, Device, Kernel, Limits, PageIndices, SplitMode, Stream};
use oxattn_tests::cases::{Case, Pages, paged};
use oxattn_tests::device_tests;
use oxattn_tests::fixture::{Fixture, Lse, Outputs, Tensors};
use oxattn_tests::grid::{batch_append, batch_decode, batch_invariant, graph_decode, mixed, tensor_core_decode};
use oxattn_tests::lab::{check_graphs, check_invariant, check_points};
use oxattn_tests::layout::{LAYOUTS, Layout};
use oxattn_tests::merge_grid::{check_many_states, pairs};
use oxattn_tests::plans::limits_for;
use oxattn_tests::prompts::{prefill_cases, prefill_prefix_cases};
use oxattn_tests::public_api::{Public, Setup, report};
use oxattn_tests::scenarios::{new_stream, refused, short_and_long};
use std::io::Write;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The GPU, for one test at a time: a context must not be waited for while another thread captures a stream of it.
struct Gpu(Device, #[allow(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Deref for Gpu {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.0
    }
}

fn gpu() -> Option<Gpu> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let device = DEVICE.get_or_init(|| {
        Device::cuda(0)
            // Past the harness, which keeps what passing tests print.
            .inspect_err(|error| drop(writeln!(std::io::stderr(), "skipped: {error}")))
            .ok()
    });
    device.clone().map(|device| Gpu(device, turn))
}

device_tests!(gpu());

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = Device::cuda(1 << 20).unwrap_err().to_string();
    assert!(!error.is_empty());
}

/// A buffer is filled once the call returns, also for streams that do not wait for the default one.
#[test]
fn a_fill_is_there_for_every_stream() {
    let Some(device) = gpu() else { return };
    let stream = new_stream(&device);
    const BYTES: usize = 1 << 30;
    const TAIL: usize = 1 << 20;
    let tail = device.upload(&vec![0u8; TAIL]).unwrap();
    let buffer = device.allocate(BYTES).unwrap();
    buffer.fill(7).unwrap();
    // SAFETY: both live until the download, which waits.
    unsafe { stream.copy(tail.address(), buffer.address() + (BYTES - TAIL) as u64, TAIL) }.unwrap();
    assert!(tail.download::<u8>().unwrap().iter().all(|&byte| byte == 7));
}

/// E1: a graph captured once, over a plan that is refreshed in place. Two layers, so that one waits for the other
/// inside the graph.
#[test]
fn e1_a_graph_follows_the_plan() {
    let Some(device) = gpu() else { return };
    follow_plans(&device, short_and_long());
}

/// The same without pages: rows begin elsewhere with every plan.
#[test]
fn e1_a_graph_follows_the_plan_of_ragged_keys() {
    let Some(device) = gpu() else { return };
    follow_plans(&device, short_and_long().map(|case| Case { pages: Pages::Adjacent, ..case.ragged() }));
}

/// A plan that shares prefixes and one that does not, of the same lengths.
#[test]
fn e1_a_graph_follows_the_plan_of_shared_prefixes() {
    let Some(device) = gpu() else { return };
    let cases = [700, 0].map(|prefix| {
        let mut case = Case {
            name: format!("E1: {prefix} keys in common"),
            query_lens: vec![1; 24],
            kv_lens: (0..24).map(|request| 710 + request).collect(),
            seeds: (0..24).collect(),
            shared_tokens: (0..24).map(|request| if request == 0 { 0 } else { prefix }).collect(),
            ..paged(16, Layout::Together)
        };
        case.config = case.config.with_shared_prefixes(1).always_sharing();
        case
    });
    follow_plans(&device, cases);
}

/// A short batch and a long one, in turn.
fn follow_plans(device: &Device, cases: [Case; 2]) {
    let tokens = cases.iter().map(|case| *case.query_begin().last().unwrap() as usize).max().unwrap();
    let fixtures = cases.map(|case| Fixture::new(&case));
    let cases = [&fixtures[0].case, &fixtures[1].case];
    for mode in [SplitMode::Balanced, SplitMode::BatchInvariant] {
        let mut setup = Setup::for_graphs(device, &cases, mode);
        let stream = new_stream(device);
        // The long batch's memory holds the short one's too.
        let layers = [(); 2].map(|()| fixtures[1].tensors(device, Lse::Two, tokens));
        let planned = setup.plan(&fixtures[0], stream).unwrap();
        stream.begin_capture().unwrap();
        let captured: Vec<_> = layers.iter().map(|layer| setup.run(&planned, &layer.run, stream)).collect();
        let graph = stream.end_capture().unwrap();
        captured.into_iter().for_each(|result| result.unwrap());
        for turn in 0..12 {
            let fixture = &fixtures[[0, 1, 1, 0][turn % 4]];
            layers.iter().for_each(|layer| layer.load(fixture));
            let planned = setup.plan(fixture, stream).unwrap();
            graph.launch(stream).unwrap();
            stream.synchronize().unwrap();
            let replayed = layers.each_ref().map(|layer| layer.download(fixture));
            if let Err(difference) = fixture.check(&replayed[0]) {
                panic!("{}, {mode:?}, turn {turn}: {difference}", fixture.case.name);
            }
            assert!(replayed[1].bits() == replayed[0].bits(), "turn {turn}");
            layers[0].clear();
            setup.run(&planned, &layers[0].run, stream).unwrap();
            assert!(layers[0].download(fixture).bits() == replayed[0].bits(), "turn {turn}");
        }
    }
}

/// Whether the GPU is a Hopper, which alone has prefill kernels.
fn has_prefill(device: &Device) -> bool {
    let is_hopper = device.as_cuda().is_some_and(|cuda| cuda.family() == Family::Sm90a);
    if !is_hopper {
        drop(writeln!(std::io::stderr(), "skipped: {} has no prefill kernels", device.describe()));
    }
    is_hopper
}

type Build = fn(&Device, AttentionConfig, SplitMode, Limits) -> Result<Attention, oxattn::Error>;

/// Plans and runs every case of a table by the prefill kernels, as `run` does; `graphs` are for the limits'
/// tokens.
fn check_prefill(
    cases: Vec<Case>,
    mode: SplitMode,
    (build, graphs): (Build, bool),
    run: impl Fn(&mut Setup, &Fixture, &Tensors, Stream) -> Outputs,
) {
    let Some(device) = gpu() else { return };
    if !has_prefill(&device) {
        return;
    }
    let stream = new_stream(&device);
    // A graph reads a mask of the limits' bytes, and these cases have one of their own.
    let fits = |case: &&Case| case.pages != Pages::HighIds && !(graphs && case.config.mask.is_some());
    for (index, case) in cases.iter().filter(fits).enumerate() {
        let fixture = Fixture::new(case);
        let mut limits = limits_for(&[case]);
        if case.config.ragged {
            // Rows that no request owns lie between theirs.
            limits.max_kv_tokens = limits.max_kv_tokens.max(fixture.page_begin.last().map_or(0, |&rows| rows as u64));
        }
        let tokens = if graphs { limits.max_query_tokens } else { *case.query_begin().last().unwrap() };
        let attention = build(&device, case.config, mode, limits).unwrap().with_kernel(Kernel::Prefill).unwrap();
        let mut setup = Setup::of(&device, attention);
        let has_lse = case.config.sigmoid_bias.is_none();
        let lse = if has_lse { [Lse::Two, Lse::E, Lse::None][index % 3] } else { Lse::None };
        let tensors = fixture.tensors(&device, lse, tokens as usize);
        let outputs = run(&mut setup, &fixture, &tensors, stream);
        if let Err(difference) = fixture.check(&outputs) {
            panic!("{}, {mode:?}: {difference}", case.name);
        }
    }
}

fn run_prefill(setup: &mut Setup, fixture: &Fixture, tensors: &Tensors, stream: Stream) -> Outputs {
    let planned = setup.plan(fixture, stream).unwrap();
    assert_eq!(planned.kernel(), Kernel::Prefill);
    setup.run(&planned, &tensors.run, stream).unwrap();
    stream.synchronize().unwrap();
    tensors.download(fixture)
}

/// Captures a run, then replays it with the plan of the capture and with a later one.
fn replay_prefill(setup: &mut Setup, fixture: &Fixture, tensors: &Tensors, stream: Stream) -> Outputs {
    let planned = setup.plan(fixture, stream).unwrap();
    assert_eq!(planned.kernel(), Kernel::Prefill);
    stream.begin_capture().unwrap();
    let captured = setup.run(&planned, &tensors.run, stream);
    let graph = stream.end_capture().unwrap();
    captured.unwrap();
    let replays = [0, 1].map(|turn| {
        if turn == 1 {
            setup.plan(fixture, stream).unwrap();
        }
        tensors.clear();
        graph.launch(stream).unwrap();
        stream.synchronize().unwrap();
        tensors.download(fixture)
    });
    assert!(replays[0].bits() == replays[1].bits(), "{}", fixture.case.name);
    replays[1].clone()
}

#[test]
fn shared_prefixes_change_no_answer_of_a_prefill() {
    for mode in [SplitMode::Balanced, SplitMode::Unsplit] {
        check_prefill(prefill_prefix_cases(), mode, (Attention::new, false), run_prefill);
    }
}

#[test]
fn every_prefill_is_the_oracle_s_answer_balanced() {
    check_prefill(prefill_cases(), SplitMode::Balanced, (Attention::new, false), run_prefill);
}

#[test]
fn every_prefill_is_the_oracle_s_answer_unsplit() {
    check_prefill(prefill_cases(), SplitMode::Unsplit, (Attention::new, false), run_prefill);
}

#[test]
fn every_prefill_is_the_oracle_s_answer_in_a_graph() {
    check_prefill(prefill_cases(), SplitMode::Balanced, (Attention::for_graphs, true), replay_prefill);
}

#[test]
fn every_unsplit_prefill_is_the_oracle_s_answer_in_a_graph() {
    check_prefill(prefill_cases(), SplitMode::Unsplit, (Attention::for_graphs, true), replay_prefill);
}

/// A check that was captured once checks every later plan.
#[test]
fn a_captured_check_follows_the_plan() {
    let Some(device) = gpu() else { return };
    let stream = new_stream(&device);
    let batch = |kv_lens: &[u32]| Case {
        kv_lens: kv_lens.to_vec(),
        query_lens: vec![1; kv_lens.len()],
        seeds: vec![0; kv_lens.len()],
        ..paged(16, LAYOUTS[0])
    };
    // Ids 0 to 511, and the last one of the long batch is that of a page that a cache of 511 pages does not have.
    let ids: Vec<u32> = (0..512).collect();
    let memory = device.upload(&ids).unwrap();
    let ids = PageIndices { address: memory.address(), len: 512 };
    let (short, long) = (batch(&[40, 20]), batch(&[8192]));
    let mut setup = Setup::for_graphs(&device, &[&short, &long], SplitMode::Balanced);
    let report = report(&device);
    let planned = setup.plan_lens(&short, &[0, 3, 5], stream).unwrap();
    stream.begin_capture().unwrap();
    let captured = setup.check_page_ids(&planned, &ids, 511, &report, stream);
    let graph = stream.end_capture().unwrap();
    captured.unwrap();
    let page_begin: [&[u32]; 2] = [&[0, 3, 5], &[0, 512]];
    for turn in [0, 1, 1, 0, 1] {
        setup.plan_lens([&short, &long][turn], page_begin[turn], stream).unwrap();
        graph.launch(stream).unwrap();
        stream.synchronize().unwrap();
        let wrong = "page_indices[511] is 511; supported are values below 511; 1 in all are out of range";
        let expected = [Ok(()), Err(wrong.to_owned())][turn].clone();
        assert_eq!(report.verdict().map_err(|error| error.to_string()), expected);
    }

    let mut setup = Setup::new(&device, &[&short], SplitMode::Balanced);
    let planned = setup.plan_lens(&short, &[0, 3, 5], stream).unwrap();
    stream.begin_capture().unwrap();
    let captured = setup.check_page_ids(&planned, &ids, 511, &report, stream);
    drop(stream.end_capture().unwrap());
    let message = "check_page_ids was called while its stream is captured into a graph; make it with \
                   Attention::for_graphs";
    refused(captured, message);
}

/// E2: grid and addresses of an attention that was not made for graphs may change under a captured one.
#[test]
fn e2_captures_that_would_go_stale_are_refused() {
    let Some(device) = gpu() else { return };
    let case = paged(16, LAYOUTS[0]);
    let fixture = Fixture::new(&case);
    let tensors = fixture.tensors(&device, Lse::Two, 6);
    let stream = new_stream(&device);

    let mut setup = Setup::new(&device, &[&case], SplitMode::Balanced);
    let planned = setup.plan(&fixture, stream).unwrap();
    stream.begin_capture().unwrap();
    let run = setup.run(&planned, &tensors.run, stream);
    let plan = setup.plan(&fixture, stream);
    drop(stream.end_capture().unwrap());
    refused(run, "run was called while its stream is captured into a graph; make it with Attention::for_graphs");
    let remedy = "plan was called while its stream is captured into a graph; plan before the capture, and again before \
                  each replay";
    refused(plan, remedy);

    let mut setup = Setup::for_graphs(&device, &[&case], SplitMode::Balanced);
    let planned = setup.plan(&fixture, stream).unwrap();
    stream.begin_capture().unwrap();
    let plan = setup.plan(&fixture, stream);
    let run = setup.run(&planned, &tensors.run, stream);
    let graph = stream.end_capture().unwrap();
    refused(plan, remedy);
    // A refused plan left the one before it.
    run.unwrap();
    graph.launch(stream).unwrap();
    stream.synchronize().unwrap();
    fixture.check(&tensors.download(&fixture)).unwrap();
}

/// FlashInfer's grids, every point of them.
#[test]
fn flashinfer_s_decode_grid() {
    let Some(device) = gpu() else { return };
    check_points(&device, &batch_decode());
    check_points(&device, &tensor_core_decode());
}

#[test]
fn flashinfer_s_decode_grid_under_graphs() {
    let Some(device) = gpu() else { return };
    check_graphs(&device, &graph_decode(), new_stream(&device));
}

#[test]
fn flashinfer_s_append_grid() {
    let Some(device) = gpu() else { return };
    check_points(&device, &batch_append());
}

#[test]
fn flashinfer_s_mixed_batches() {
    let Some(device) = gpu() else { return };
    check_points(&device, &mixed());
}

#[test]
fn flashinfer_s_batch_invariance_grid() {
    let Some(device) = gpu() else { return };
    check_invariant(&device, &batch_invariant());
}

#[test]
fn flashinfer_s_merge_grid() {
    let Some(device) = gpu() else { return };
    check_many_states(&device, 2048);
    for case in pairs(50) {
        if let Err(difference) = oxattn_tests::states::check(&case, &Public { device: &device, pairs: true }) {
            panic!("{}: {difference}", case.name);
        }
    }
}

/// D12: memory of the host, pinned or not, where the device's is needed.
#[test]
fn d12_host_memory_is_refused() {
    let Some(device) = gpu() else { return };
    let case = Case { query_lens: vec![1; 3], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let fixture = Fixture::new(&case);
    let host_tensors = fixture.tensors(&Device::cpu(), Lse::Two, 3);
    let host = host_tensors.run;
    let mut setup = Setup::new(&device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(&device, Lse::Two, 3);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    let mut run = tensors.run;
    let mut try_with = |run: &oxattn::Run, tensor: &str, address: u64| {
        let message = format!(
            "{tensor}'s address {address:#x} is not memory the CUDA driver knows; this call needs memory of cuda:0"
        );
        refused(setup.run(&planned, run, Stream::default()), &message);
    };
    try_with(&oxattn::Run { q: host.q, ..run }, "q", host.q.address);
    try_with(&oxattn::Run { out: host.out, ..run }, "out", host.out.address);
    let ((cache, page_indices), (host_cache, host_ids)) = (tensors.paged(), host_tensors.paged());
    let paged = |cache, page_indices| oxattn::Run { kv: oxattn::KvMemory::Paged { cache, page_indices }, ..run };
    try_with(&paged(host_cache, page_indices), "cache.k", host_cache.k.address);
    try_with(&paged(cache, host_ids), "page_indices", host_ids.address);

    device.as_cuda().unwrap().context().bind().unwrap();
    let mut pinned = oxattn::driver::PinnedMemory::new(1 << 16).unwrap();
    run.q.address = pinned.as_mut_slice().as_ptr() as u64;
    let refusal = setup.run(&planned, &run, Stream::default()).unwrap_err().to_string();
    assert!(refusal.ends_with("is pinned host memory; this call needs memory of cuda:0"), "{refusal}");

    setup.run(&planned, &tensors.run, Stream::default()).unwrap();
    fixture.check(&tensors.download(&fixture)).unwrap();
}
