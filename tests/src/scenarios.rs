//! What every device has to do, through the public API. [`device_tests`](crate::device_tests) makes tests of them.
//!
//! Letters and numbers name faults found in other libraries' public trackers, as in [`cases`](crate::cases).
//!
//! Unsafe: the operators take addresses; each scenario owns the memory behind its own.

#![allow(missing_docs, reason = "a scenario says by its name what it is about")]

use crate::block_sparse::{self, SparseFixture, sparse_cases};
use crate::cases::{Case, Pages, among_others, cases, paged, prompt, split_cases};
use crate::checks::{PAGES, PageIdCase, append_checks, page_id_cases};
use crate::fixture::{Fixture, Lse, Outputs, Tensors};
use crate::layout::{LAYOUTS, Layout};
use crate::multi_item;
use crate::new_tokens::append_cases;
use crate::number::{bits, decode, encode, row_error, row_tolerance, value};
use crate::plans::limits_for;
use crate::prefixes::prefix_cases;
use crate::public_api::{Public, Setup, check_append, plan, report, run_alone, workspace};
use crate::random::Random;
use crate::rope::rope_cases;
use crate::rope_append::rope_append_cases;
use crate::rotary::{rotary_cases, rotary_prefix_cases};
use crate::states::merge_cases;
use crate::variants::Modifiers;
use oxattn::config::{AttentionConfig, DType};
use oxattn::operators::{Append, Destination, State, append, merge_state};
use oxattn::rope::{Rope, RopeAppend, RopeConfig, RopePositions, RopeRun, Rotate};
use oxattn::tensor::CacheRows;
use oxattn::{
    Attention, Device, Error, Kernel, KvMemory, Limits, Lse2, LseE, MaskForm, MaskMemory, PageIndices, PageTable,
    PagedCache, QueryLengths, QueryPositions, Rows, Run, SplitMode, Stream, Streaming, Values, VariantInputs,
    Workspace, oracle, single,
};

/// Makes a test of every scenario, on the device that an expression of type `Option<&Device>` (or what derefs to it)
/// gives.
#[macro_export]
macro_rules! device_tests {
    ($device:expr) => {
        $crate::device_tests!($device;
            every_case_is_the_oracle_s_answer_balanced,
            every_case_is_the_oracle_s_answer_batch_invariant,
            every_case_is_the_oracle_s_answer_in_fixed_splits,
            every_case_is_the_oracle_s_answer_unsplit,
            shared_prefixes_change_no_answer,
            every_block_sparse_pattern_is_the_oracle_s,
            an_item_is_scored_as_in_a_prompt_of_its_own,
            every_merge_is_the_oracle_s,
            every_append_writes_its_cells_and_nothing_else,
            every_rotation_is_the_oracle_s,
            every_rotated_append_is_the_oracle_s_and_that_of_two_launches,
            f11_pairs_turn_as_worked_by_hand,
            e1_a_plan_over_another_runs_alone,
            e1_graphs_have_room_for_the_largest_batch,
            e7_plans_in_quick_succession_do_not_mix,
            e8_two_streams_with_two_workspaces_do_not_mix,
            h1_batch_mates_change_no_bit_of_a_request,
            h1_chunks_of_a_prompt_change_no_bit_of_it,
            h1_variants_do_not_see_batch_mates,
            h1_windows_do_not_see_how_a_prompt_is_cut,
            h2_fifty_runs_agree_in_every_bit,
            a_window_of_everything_changes_no_bit,
            c12_a_mask_is_its_run_s_alone,
            a_plan_serves_many_layers,
            a_run_sees_what_was_appended_before_it,
            a_plan_runs_on_another_thread,
            counts_of_arrivals_are_zero_after_a_run,
            empty_tensors_are_fine,
            block_tables_and_uniform_lengths_plan_alike,
            ragged_keys_change_no_bit,
            ragged_keys_run_as_in_graphs,
            one_request_in_one_call_is_a_batch_of_one,
            b18_rows_that_do_not_match_are_refused,
            ragged_keys_that_do_not_match_are_refused,
            ragged_and_paged_are_not_mixed,
            inputs_of_variants_that_do_not_match_are_refused,
            inputs_of_norms_and_rotations_that_do_not_match_are_refused,
            a_stream_without_end_goes_by_places_in_the_cache,
            block_sparse_runs_that_do_not_match_are_refused,
            plans_that_do_not_match_are_refused,
            configurations_no_kernel_runs_are_refused,
            prefill_kernels_that_there_are_not_are_refused,
            merges_and_appends_that_do_not_match_are_refused,
            rotations_that_do_not_match_are_refused,
            rotated_appends_that_do_not_match_are_refused,
            more_memory_than_there_is_is_refused,
            page_ids_out_of_range_are_reported,
            tokens_without_a_place_are_reported,
            checks_that_do_not_match_are_refused,
        );
    };
    ($device:expr; $($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                if let Some(device) = $device {
                    $crate::scenarios::$name(&device);
                }
            }
        )*
    };
}

/// A stream of its own for work on `device`.
pub fn new_stream(device: &Device) -> Stream {
    match device.as_cuda() {
        None => Stream::default(),
        Some(cuda) => {
            cuda.context().bind().unwrap();
            Stream::create().unwrap()
        }
    }
}

/// Query tokens of a case.
fn tokens(case: &Case) -> usize {
    *case.query_begin().last().unwrap() as usize
}

fn check(fixture: &Fixture, outputs: &Outputs, what: &str) {
    if let Err(difference) = fixture.check(outputs) {
        panic!("{}, {what}: {difference}", fixture.case.name);
    }
}

/// All cases but those whose cache begins before its memory, which no caller can own.
fn every_case(device: &Device, mode: SplitMode) {
    let mut table = cases();
    table.extend(split_cases());
    table.extend(rotary_cases());
    for (index, case) in table.iter().filter(|case| case.pages != Pages::HighIds).enumerate() {
        let fixture = Fixture::new(case);
        let has_lse = case.config.sigmoid_bias.is_none();
        let lse = if has_lse { [Lse::Two, Lse::E, Lse::None][index % 3] } else { Lse::None };
        check(&fixture, &run_alone(device, &fixture, mode, lse), &format!("{mode:?}"));
    }
}

pub fn every_case_is_the_oracle_s_answer_balanced(device: &Device) {
    every_case(device, SplitMode::Balanced);
}

pub fn every_case_is_the_oracle_s_answer_batch_invariant(device: &Device) {
    every_case(device, SplitMode::BatchInvariant);
}

pub fn every_case_is_the_oracle_s_answer_in_fixed_splits(device: &Device) {
    every_case(device, SplitMode::FixedSplit { tokens: 100 });
}

pub fn every_case_is_the_oracle_s_answer_unsplit(device: &Device) {
    every_case(device, SplitMode::Unsplit);
}

/// Keys that requests have in common, read once for several of them where that pays.
pub fn shared_prefixes_change_no_answer(device: &Device) {
    let (mut shared, mut cases) = (0, prefix_cases());
    cases.extend(rotary_prefix_cases());
    for (index, case) in cases.iter().enumerate() {
        let mode = if index % 4 == 3 { SplitMode::Unsplit } else { SplitMode::Balanced };
        let fixture = Fixture::new(case);
        let tensors = fixture.tensors(device, [Lse::Two, Lse::E, Lse::None][index % 3], tokens(case));
        let mut setup = Setup::new(device, &[case], mode);
        check(&fixture, &setup.outputs(&fixture, &tensors, Stream::default()), &format!("{mode:?}"));
        let plan = setup.attention.latest_plan().unwrap();
        shared += usize::from(plan.sharing().shared_requests > 0);
    }
    assert!(shared >= 30, "{shared} of {} plans share something", cases.len());
}

pub fn every_block_sparse_pattern_is_the_oracle_s(device: &Device) {
    for case in sparse_cases() {
        let fixture = SparseFixture::new(&case);
        let modes =
            [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 64 }, SplitMode::Unsplit];
        let outputs = modes.map(|mode| fixture.run(device, Some(mode)));
        for (mode, outputs) in modes.iter().zip(&outputs) {
            if let Err(difference) = fixture.check(outputs) {
                panic!("{}, {mode:?}: {difference}", case.name);
            }
        }
        assert!(fixture.run(device, None) == outputs[0], "{}, in one call", case.name);
    }
}

pub fn an_item_is_scored_as_in_a_prompt_of_its_own(device: &Device) {
    multi_item::check_items(device);
}

pub fn every_merge_is_the_oracle_s(device: &Device) {
    for case in merge_cases().iter().filter(|case| case.in_place || case.mask.is_none()) {
        for pairs in [true, false] {
            if let Err(difference) = crate::states::check(case, &Public { device, pairs }) {
                panic!("{}, pairs {pairs}: {difference}", case.name);
            }
        }
    }
}

pub fn every_append_writes_its_cells_and_nothing_else(device: &Device) {
    for case in append_cases() {
        if let Err(difference) = crate::new_tokens::check(&case, &Public { device, pairs: false }) {
            panic!("{}: {difference}", case.name);
        }
    }
}

/// E1, E4: what a workspace held before a plan, be it 0xff or a larger plan, is not run.
pub fn e1_a_plan_over_another_runs_alone(device: &Device) {
    let (long, short) = (among_others(32, 5), among_others(2, 0));
    let mut setup = Setup::new(device, &[&long, &short], SplitMode::Balanced);
    for case in [&long, &short, &long] {
        let fixture = Fixture::new(case);
        let tensors = fixture.tensors(device, Lse::Two, tokens(case));
        check(&fixture, &setup.outputs(&fixture, &tensors, Stream::default()), "over another plan");
    }
}

/// E1's two batches: one request of 8192 keys must not be run with a plan made for 2, nor the other way round. The
/// cache lies so that its strides do not depend on how many pages there are.
pub fn short_and_long() -> [Case; 2] {
    [[2, 2], [8192, 40]].map(|kv_lens| Case {
        name: format!("E1: {kv_lens:?} keys"),
        kv_lens: kv_lens.to_vec(),
        query_lens: vec![1, 2],
        seeds: vec![kv_lens[0] as u64, 1],
        ..paged(16, Layout::Together)
    })
}

/// What is captured into a graph is given tensors of the limits' size; a plan of fewer tokens leaves the rest alone.
pub fn e1_graphs_have_room_for_the_largest_batch(device: &Device) {
    let [short, long] = short_and_long();
    let wide = Case { query_lens: vec![3, 4], ..long.clone() };
    let mut setup = Setup::for_graphs(device, &[&short, &long, &wide], SplitMode::Balanced);
    let fixture = Fixture::new(&long);
    let tensors = fixture.tensors(device, Lse::E, 7);
    check(&fixture, &setup.outputs(&fixture, &tensors, Stream::default()), "with room for 7 tokens");
    let tight = fixture.tensors(device, Lse::E, 3);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    refused(setup.run(&planned, &tight.run, Stream::default()), "lse.tokens is 3; this call needs 7");
}

/// E7: eight uploads may be on their way; the ninth waits for the first. Nothing waits for anything here but at the
/// end, and each run has outputs of its own.
pub fn e7_plans_in_quick_succession_do_not_mix(device: &Device) {
    let [short, long] = short_and_long();
    let mut setup = Setup::new(device, &[&short, &long], SplitMode::Balanced);
    let stream = new_stream(device);
    let fixtures = [Fixture::new(&short), Fixture::new(&long)];
    let runs = [0, 1].map(|which| fixtures[which].tensors_of_layers(device, Lse::Two, 3, 30));
    for (short, long) in runs[0].iter().zip(&runs[1]) {
        for (fixture, tensors) in fixtures.iter().zip([short, long]) {
            let planned = setup.plan(fixture, stream).unwrap();
            setup.run(&planned, &tensors.run, stream).unwrap();
        }
    }
    device.synchronize().unwrap();
    for (fixture, runs) in fixtures.iter().zip(&runs) {
        all_agree(fixture, runs);
    }
}

/// Every one of `runs` is the oracle's answer, and they agree in every bit.
fn all_agree(fixture: &Fixture, runs: &[Tensors]) {
    let first = runs[0].download(fixture);
    check(fixture, &first, "run 0");
    for (index, run) in runs.iter().enumerate() {
        assert!(run.download(fixture).bits() == first.bits(), "{}: run {index} differs from run 0", fixture.case.name);
    }
}

/// E8: one attention, two streams, a workspace for each.
pub fn e8_two_streams_with_two_workspaces_do_not_mix(device: &Device) {
    let batches = [among_others(32, 5), among_others(64, 60)];
    let fixtures = [Fixture::new(&batches[0]), Fixture::new(&batches[1])];
    let limits = limits_for(&[&batches[0], &batches[1]]);
    let mut attention = Attention::new(device, batches[0].config, SplitMode::Balanced, limits).unwrap();
    let mut places = [(); 2].map(|()| (workspace(device, &attention), new_stream(device)));
    let tensors = [0, 1].map(|which| {
        let fixture: &Fixture = &fixtures[which];
        fixture.tensors_of_layers(device, Lse::Two, tokens(&fixture.case), 100)
    });
    for (first, second) in tensors[0].iter().zip(&tensors[1]) {
        for ((tensors, fixture), ((_, workspace), stream)) in
            [first, second].into_iter().zip(&fixtures).zip(&mut places)
        {
            let planned = plan(&mut attention, fixture, workspace, *stream).unwrap();
            // SAFETY: everything lives until it is downloaded, which waits.
            unsafe { attention.run(&planned, &tensors.run, workspace, *stream).unwrap() };
        }
    }
    device.synchronize().unwrap();
    for (fixture, tensors) in fixtures.iter().zip(&tensors) {
        all_agree(fixture, tensors);
    }
}

pub fn h1_batch_mates_change_no_bit_of_a_request(device: &Device) {
    for mode in [SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 256 }, SplitMode::Unsplit] {
        let row_of = |batch, at| {
            let fixture = Fixture::new(&among_others(batch, at));
            let outputs = run_alone(device, &fixture, mode, Lse::Two);
            (0..4).map(|head| fixture.row(&outputs, at, 0, head)).collect::<Vec<_>>()
        };
        let alone = row_of(1, 0);
        for (batch, at) in [(2, 0), (2, 1), (32, 17), (256, 255)] {
            assert!(row_of(batch, at) == alone, "number {at} of {batch}, {mode:?}");
        }
    }
}

pub fn h1_chunks_of_a_prompt_change_no_bit_of_it(device: &Device) {
    let rows = |begin, end| {
        let fixture = Fixture::new(&prompt(begin, end));
        let outputs = run_alone(device, &fixture, SplitMode::FixedSplit { tokens: 64 }, Lse::Two);
        check(&fixture, &outputs, "a chunk");
        (0..(end - begin) as usize)
            .flat_map(|token| (0..4).map(move |head| (token, head)))
            .map(|(token, head)| fixture.row(&outputs, 0, token, head))
            .collect::<Vec<_>>()
    };
    let whole = rows(0, 300);
    assert!([rows(0, 128), rows(128, 300)].concat() == whole);
}

/// Everything a config can do at once.
fn all_together(config: AttentionConfig) -> AttentionConfig {
    let config = config.with_window(Some(700), None).with_mask(MaskForm::Bits).with_soft_cap(20.0);
    config.with_alibi().with_sinks().with_temperatures()
}

pub fn h1_variants_do_not_see_batch_mates(device: &Device) {
    let row_of = |mode, batch, at| {
        let case = among_others(batch, at);
        let fixture = Fixture::new(&case.changed("H1: all together", all_together));
        let outputs = run_alone(device, &fixture, mode, Lse::Two);
        (0..4).map(|head| fixture.row(&outputs, at, 0, head)).collect::<Vec<_>>()
    };
    for mode in [SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 256 }, SplitMode::Unsplit] {
        let alone = row_of(mode, 1, 0);
        for (batch, at) in [(2, 1), (32, 17)] {
            assert!(row_of(mode, batch, at) == alone, "number {at} of {batch}, {mode:?}");
        }
    }
}

/// Pieces end at the same keys whichever window begins a row tile.
pub fn h1_windows_do_not_see_how_a_prompt_is_cut(device: &Device) {
    let rows = |begin, end| {
        let windowed = |config: AttentionConfig| config.with_window(Some(150), None).with_sinks();
        let case = prompt(begin, end).changed("H1: a chunk under a window", windowed).sinks(|head| head as f32);
        // The values of token 6 cancel so far under head 3 that rounding the weights to bf16 is off by 4.1e-3 there.
        let fixture = Fixture::new(&case.f16());
        let outputs = run_alone(device, &fixture, SplitMode::FixedSplit { tokens: 128 }, Lse::Two);
        check(&fixture, &outputs, "a chunk");
        (0..(end - begin) as usize)
            .flat_map(|token| (0..4).map(move |head| (token, head)))
            .map(|(token, head)| fixture.row(&outputs, 0, token, head))
            .collect::<Vec<_>>()
    };
    let whole = rows(0, 600);
    assert!([rows(0, 130), rows(130, 131), rows(131, 600)].concat() == whole);
}

/// The kernels of variants that hide and change nothing are those of plain attention, bit by bit where items are short.
/// Tall items of plain attention scale a score and subtract the maximum in one instruction, which rounds once less: there
/// the LSE agrees to 1e-5.
pub fn a_window_of_everything_changes_no_bit(device: &Device) {
    for (case, is_short) in
        [(&split_cases()[0], true), (&among_others(32, 5), true), (&split_cases()[1], false), (&prompt(0, 200), false)]
    {
        let wide = case.clone().changed("a window of everything", |config| config.with_window(Some(u32::MAX), None));
        let [plain, wide] = [case, &wide].map(|case| {
            let fixture = Fixture::new(case);
            let outputs = run_alone(device, &fixture, SplitMode::BatchInvariant, Lse::E);
            check(&fixture, &outputs, "a window of everything");
            (outputs.bits().0.to_vec(), outputs.bits().1.to_vec())
        });
        assert!(!is_short || plain == wide, "{}", case.name);
        let is_near = |(a, b): (&u32, &u32)| a == b || (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-5;
        assert!(plain.1.iter().zip(&wide.1).all(is_near), "{}: the LSE", case.name);
    }
}

/// C12: one plan, two masks.
pub fn c12_a_mask_is_its_run_s_alone(device: &Device) {
    let with_mask = |config: AttentionConfig| config.non_causal().with_mask(MaskForm::Bits);
    let case = Case { query_lens: vec![4, 3], kv_lens: vec![15, 300], seeds: vec![0, 1], ..paged(16, LAYOUTS[0]) };
    let first = case.changed("C12: any mask", with_mask);
    let second = first.clone().masked(|_, token, key| (token + key) % 2 == 0);
    let fixtures = [&first, &second].map(Fixture::new);
    let mut setup = Setup::new(device, &[&first], SplitMode::Balanced);
    let planned = setup.plan(&fixtures[0], Stream::default()).unwrap();
    let layers = fixtures.each_ref().map(|fixture| fixture.tensors(device, Lse::Two, 7));
    for layer in &layers {
        setup.run(&planned, &layer.run, Stream::default()).unwrap();
    }
    for (fixture, layer) in fixtures.iter().zip(&layers) {
        check(fixture, &layer.download(fixture), "one of two masks");
    }
}

pub fn h2_fifty_runs_agree_in_every_bit(device: &Device) {
    for case in [&split_cases()[1], &among_others(64, 3), &prompt(0, 300)] {
        let fixture = Fixture::new(case);
        let mut setup = Setup::new(device, &[case], SplitMode::Balanced);
        let tensors = fixture.tensors(device, Lse::Two, tokens(case));
        let first = setup.outputs(&fixture, &tensors, Stream::default());
        check(&fixture, &first, "the first of fifty");
        for turn in 1..50 {
            tensors.clear();
            let outputs = setup.outputs(&fixture, &tensors, Stream::default());
            assert!(outputs.bits() == first.bits(), "{}, turn {turn}", case.name);
        }
    }
}

/// One plan, many layers: the counts of arrivals are ready for the next launch, without a new plan.
pub fn a_plan_serves_many_layers(device: &Device) {
    let case = among_others(32, 5);
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let stream = new_stream(device);
    let layers = fixture.tensors_of_layers(device, Lse::Two, tokens(&case), 20);
    let planned = setup.plan(&fixture, stream).unwrap();
    for layer in &layers {
        setup.run(&planned, &layer.run, stream).unwrap();
    }
    all_agree(&fixture, &layers);
}

pub fn every_rotation_is_the_oracle_s(device: &Device) {
    for case in rope_cases() {
        if let Err(difference) = crate::rope::check(&case, &Public { device, pairs: false }) {
            panic!("{}: {difference}", case.name);
        }
    }
}

pub fn every_rotated_append_is_the_oracle_s_and_that_of_two_launches(device: &Device) {
    for case in rope_append_cases() {
        if let Err(difference) = crate::rope_append::check(&case, &Public { device, pairs: false }) {
            panic!("{}: {difference}", case.name);
        }
    }
}

pub fn f11_pairs_turn_as_worked_by_hand(device: &Device) {
    crate::rope::check_by_hand(&Public { device, pairs: false });
}

/// Each layer of a step: append, then attend, with nothing between them but the stream.
pub fn a_run_sees_what_was_appended_before_it(device: &Device) {
    let case =
        Case { query_lens: vec![1, 3, 8], kv_lens: vec![700, 35, 8], seeds: vec![5, 6, 7], ..paged(16, LAYOUTS[1]) };
    let mut fixture = Fixture::new(&case);
    let new = fixture.take_new_tokens();
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let stream = new_stream(device);
    let [k, v] = [&new.k, &new.v].map(|rows| device.upload(rows).unwrap());
    let slots = device.upload(&new.slots).unwrap();
    let layers: Vec<Tensors> = (0..20).map(|_| fixture.tensors(device, Lse::Two, tokens(&case))).collect();
    let planned = setup.plan(&fixture, stream).unwrap();
    let config = case.config;
    let rows = |address| Rows::contiguous(address, config.dtype, 12, config.kv_heads, config.head_dim);
    for layer in &layers {
        let destination = Destination::Slots { address: slots.address() };
        let arguments = Append { k: rows(k.address()), v: rows(v.address()), cache: layer.paged().0, destination };
        // SAFETY: everything lives until it is downloaded, which waits.
        unsafe { append(device, &config, &arguments, stream) }.unwrap();
        setup.run(&planned, &layer.run, stream).unwrap();
    }
    for (index, layer) in layers.iter().enumerate() {
        check(&fixture, &layer.download(&fixture), &format!("layer {index}"));
    }
}

/// Engines plan and run on threads of their own.
pub fn a_plan_runs_on_another_thread(device: &Device) {
    let case = paged(16, LAYOUTS[0]);
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, tokens(&case));
    let first = setup.outputs(&fixture, &tensors, Stream::default());
    check(&fixture, &first, "on this thread");
    let run = &tensors.run;
    for _ in 0..2 {
        tensors.clear();
        let setup = &mut setup;
        let (page_begin, case) = (&fixture.page_begin, &case);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let table = PageTable::csr(16, page_begin, &case.kv_lens).unwrap();
                let query_begin = case.query_begin();
                let queries = QueryLengths::indptr(&query_begin).unwrap();
                let Setup { attention, workspace, .. } = setup;
                let planned = attention.plan(&table, queries, workspace, Stream::default()).unwrap();
                setup.run(&planned, run, Stream::default()).unwrap();
            });
        });
        assert!(tensors.download(&fixture).bits() == first.bits());
    }
}

pub fn counts_of_arrivals_are_zero_after_a_run(device: &Device) {
    for mode in [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 64 }] {
        let case = among_others(32, 5);
        let fixture = Fixture::new(&case);
        let mut setup = Setup::new(device, &[&case], mode);
        let tensors = fixture.tensors(device, Lse::Two, tokens(&case));
        setup.outputs(&fixture, &tensors, Stream::default());
        let header = setup.attention.latest_plan().unwrap().header();
        assert!(header.groups > 0, "{mode:?} cuts a request of 3000 keys among short ones");
        let begin = setup.attention.workspace_layout().arrivals_offset_bytes as usize;
        assert!(setup.memory()[begin..][..4 * header.groups as usize].iter().all(|&byte| byte == 0), "{mode:?}");
    }
}

/// Nothing to upload, to plan, to run, to append.
pub fn empty_tensors_are_fine(device: &Device) {
    let empty = device.upload::<f32>(&[]).unwrap();
    assert_eq!(empty.download::<f32>().unwrap(), []);
    empty.fill(0).unwrap();
    let config = AttentionConfig::new(8, 2, 128, 16);
    let limits = Limits { max_requests: 1, max_query_tokens: 1, max_kv_len_tokens: 1, max_kv_tokens: 1 };
    for attention in [Attention::new, Attention::for_graphs] {
        let mut attention = attention(device, config, SplitMode::Balanced, limits).unwrap();
        let (_memory, mut workspace) = workspace(device, &attention);
        let table = PageTable::csr(16, &[0u32], &[0u32; 0]).unwrap();
        let planned = attention.plan(&table, QueryLengths::uniform(1), &mut workspace, Stream::default()).unwrap();
        assert_eq!((planned.query_tokens, planned.page_index_len), (0, 0));
    }
    let mut attention = Attention::new(device, config, SplitMode::Balanced, limits).unwrap();
    let (_memory, mut workspace) = workspace(device, &attention);
    let table = PageTable::csr(16, &[0u32], &[0u32; 0]).unwrap();
    let planned = attention.plan(&table, QueryLengths::uniform(1), &mut workspace, Stream::default()).unwrap();
    let rows = Rows::contiguous(0, DType::Bf16, 0, 8, 128);
    let cache = PagedCache::separate(0, 0, 0, oxattn::Layout::Nhd, &config);
    let run = Run {
        q: rows,
        kv: KvMemory::Paged { cache, page_indices: PageIndices { address: 0, len: 0 } },
        out: rows,
        lse: Some(Lse2::contiguous(0, 0, 8).into()),
        variant: VariantInputs::default(),
    };
    // SAFETY: there is nothing to read or write.
    unsafe { attention.run(&planned, &run, &mut workspace, Stream::default()) }.unwrap();
    let new = Rows::contiguous(0, DType::F32, 0, 2, 128);
    let arguments = Append { k: new, v: new, cache, destination: Destination::Slots { address: 0 } };
    // SAFETY: as above.
    unsafe { append(device, &config, &arguments, Stream::default()) }.unwrap();
    let rope = Rope::new(device, RopeConfig::new(128)).unwrap();
    let run = RopeRun::in_place(rows, Rows { dtype: DType::Bf16, ..new }, RopePositions::Ids { address: 0 });
    // SAFETY: as above.
    unsafe { rope.apply(&run, Stream::default()) }.unwrap();
    let new = Rows { dtype: DType::Bf16, ..new };
    let run = RopeAppend::in_place(rows, Append { k: new, v: new, ..arguments });
    let run = run.with_positions(RopePositions::Ids { address: 0 });
    // SAFETY: as above.
    unsafe { rope.apply_and_append(&config, &run, Stream::default()) }.unwrap();
}

/// The same batch as CSR and indptr, and as a block table with one query token each, is the same plan.
pub fn block_tables_and_uniform_lengths_plan_alike(device: &Device) {
    let case = Case { query_lens: vec![1; 3], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, 3);
    let csr = setup.outputs(&fixture, &tensors, Stream::default());
    check(&fixture, &csr, "as CSR");

    tensors.clear();
    let pages_of = |request: usize| {
        let range = fixture.page_begin[request] as usize..fixture.page_begin[request + 1] as usize;
        let mut pages: Vec<i32> = fixture.page_indices[range].iter().map(|&page| page as i32).collect();
        pages.resize(5, -1);
        pages
    };
    let block_table: Vec<i32> = (0..3).flat_map(pages_of).collect();
    let block_table = device.upload(&block_table).unwrap();
    let table = PageTable::block_table(16, 5, &[35i32, 16, 48]).unwrap();
    let Setup { attention, workspace, .. } = &mut setup;
    let planned = attention.plan(&table, QueryLengths::uniform(1), workspace, Stream::default()).unwrap();
    let page_indices = PageIndices { address: block_table.address(), len: 15 };
    let run = Run { kv: KvMemory::Paged { cache: tensors.paged().0, page_indices }, ..tensors.run };
    setup.run(&planned, &run, Stream::default()).unwrap();
    assert!(tensors.download(&fixture).bits() == csr.bits());
}

/// Decodes, chunks and prompts, short items and tall ones, in pages of 16 tokens.
fn batch_of_all_kinds(layout: Layout) -> Case {
    let (query_lens, kv_lens) = (vec![1, 5, 0, 70, 1, 2], vec![300, 71, 3, 70, 1, 0]);
    Case { query_lens, kv_lens, seeds: (0..6).collect(), ..paged(16, layout) }
}

/// Without pages, with and without rows between the requests' and NaN there, a request's keys are the same keys.
pub fn ragged_keys_change_no_bit(device: &Device) {
    for mode in [SplitMode::Balanced, SplitMode::BatchInvariant, SplitMode::FixedSplit { tokens: 64 }] {
        for causal in [true, false] {
            let base = |layout| {
                let case = batch_of_all_kinds(layout);
                if causal { case } else { case.non_causal() }
            };
            let paged = run_alone(device, &Fixture::new(&base(LAYOUTS[0])), mode, Lse::Two);
            for (layout, pages) in LAYOUTS.into_iter().zip([Pages::Scattered, Pages::Adjacent].into_iter().cycle()) {
                let fixture = Fixture::new(&Case { pages, ..base(layout).ragged() });
                let ragged = run_alone(device, &fixture, mode, Lse::Two);
                check(&fixture, &ragged, &format!("ragged, {mode:?}"));
                assert!(ragged.bits() == paged.bits(), "{layout:?}, {pages:?}, {mode:?}, causal {causal}");
            }
        }
    }
}

/// Plans in turn over the same tensors, which have rows for the limits' keys.
pub fn ragged_keys_run_as_in_graphs(device: &Device) {
    let [short, long] = short_and_long().map(|case| Case { pages: Pages::Adjacent, ..case.ragged() });
    let mut setup = Setup::for_graphs(device, &[&short, &long], SplitMode::Balanced);
    let fixtures = [&short, &long].map(Fixture::new);
    let tensors = fixtures[1].tensors(device, Lse::E, 3);
    for fixture in [&fixtures[1], &fixtures[0], &fixtures[1]] {
        tensors.load(fixture);
        check(fixture, &setup.outputs(fixture, &tensors, Stream::default()), "as in graphs");
    }
}

pub fn one_request_in_one_call_is_a_batch_of_one(device: &Device) {
    for (query_len, kv_len) in [(1, 600), (40, 40), (3, 50), (2, 0)] {
        let (query_lens, kv_lens, seeds) = (vec![query_len], vec![kv_len], vec![0]);
        let case = Case { query_lens, kv_lens, seeds, ..paged(16, LAYOUTS[1]) };
        for case in [case.clone(), case.ragged()] {
            let fixture = Fixture::new(&case);
            let batch = run_alone(device, &fixture, SplitMode::Balanced, Lse::Two);
            let tensors = fixture.tensors(device, Lse::Two, query_len as usize);
            let (config, run, stream) = (case.config, &tensors.run, Stream::default());
            // SAFETY: the tensors live until they are downloaded.
            unsafe { single::prefill(device, config, kv_len, run, stream) }.unwrap();
            let prefill = tensors.download(&fixture);
            check(&fixture, &prefill, "in one call");
            assert!(prefill.bits() == batch.bits(), "{query_len} tokens, {kv_len} keys");
            tensors.clear();
            // SAFETY: as above.
            let decoded = unsafe { single::decode(device, config, kv_len, run, stream) };
            if query_len == 1 {
                decoded.unwrap();
                assert!(tensors.download(&fixture).bits() == batch.bits(), "decode, {kv_len} keys");
            } else {
                refused(decoded, &format!("q.tokens is {query_len}; this call needs 1"));
            }
            // SAFETY: refused before a launch.
            let too_many = unsafe { single::prefill(device, config, kv_len + 64, run, stream) };
            let refusal = too_many.unwrap_err().to_string();
            let rows = format!(
                "this call needs {}",
                if case.config.ragged { kv_len + 64 } else { (kv_len + 64).div_ceil(16) }
            );
            assert!(refusal.ends_with(&rows), "{refusal}");
        }
    }
}

/// Ragged keys and values, tensor by tensor, and the outputs stay as they were.
pub fn ragged_keys_that_do_not_match_are_refused(device: &Device) {
    let case = Case { query_lens: vec![1; 3], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[3]) }.ragged();
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, 3);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    // 35 + 2, 16 + 1 and 48 rows.
    assert_eq!((planned.kv_rows, planned.page_index_len), (102, 0));
    let run = tensors.run;
    let KvMemory::Ragged { k, v } = run.kv else { panic!("a ragged case's") };
    let ragged = |k: Rows, v: Rows| Run { kv: KvMemory::Ragged { k, v }, ..run };
    let odd = k.address + 2;
    let unfit = [
        (ragged(Rows { tokens: 101, ..k }, v), "k.tokens is 101; this call needs 102".to_owned()),
        (ragged(k, Rows { tokens: 101, ..v }), "v.tokens is 101; this call needs 102".into()),
        (ragged(Rows { heads: 4, ..k }, v), "k.heads is 4; this call needs 2".into()),
        (ragged(k, Rows { head_dim: 128, ..v }), "v.head_dim is 128; this call needs 64".into()),
        (ragged(Rows { dtype: DType::F16, ..k }, v), "k is f16; this call needs bf16".into()),
        (ragged(k, Rows { dtype: DType::F32, ..v }), "v is f32; this call needs bf16".into()),
        (ragged(Rows { address: 0, ..k }, v), "k has elements but its address is 0".into()),
        (ragged(Rows { address: odd, ..k }, v), format!("k.address is {odd} bytes, which is not a multiple of 16")),
        (ragged(k, v.with_strides(129, 64)), "v.token_stride is 258 bytes, which is not a multiple of 16".into()),
        (ragged(k, v.with_strides(128, 65)), "v.head_stride is 130 bytes, which is not a multiple of 16".into()),
        (ragged(k.with_strides(i64::MAX, 64), v), "k.token_stride does not fit 64-bit bytes".into()),
        (ragged(k.with_strides(1 << 60, 64), v), "k.tokens * token_stride does not fit 64-bit bytes".into()),
    ];
    for (run, message) in &unfit {
        refused(setup.run(&planned, run, Stream::default()), message);
    }
    let outputs = tensors.download(&fixture);
    assert!(outputs.bits().0.iter().all(|&bits| bits == u16::MAX));
    // Rows to spare, as many in V as it likes.
    setup.run(&planned, &ragged(Rows { tokens: 102, ..k }, v), Stream::default()).unwrap();
    check(&fixture, &tensors.download(&fixture), "after refusals");

    // In graphs: rows for all the keys that a later plan may have, and no plan of more rows, spare ones among them.
    let adjacent = Case { pages: Pages::Adjacent, ..case.clone() };
    let mut graphs = Setup::for_graphs(device, &[&adjacent], SplitMode::Balanced);
    refused(graphs.plan(&fixture, Stream::default()), "batch has 102 rows of keys; the planner's max_kv_tokens is 99");
    let short = Case { kv_lens: vec![1, 1, 1], ..adjacent };
    let planned = graphs.plan(&Fixture::new(&short), Stream::default()).unwrap();
    let few = ragged(Rows { tokens: 98, ..k }, v);
    refused(graphs.run(&planned, &few, Stream::default()), "k.tokens is 98; this call needs 99");
}

/// An attention is over pages or over rows, and so are its tables, its runs and its checks.
pub fn ragged_and_paged_are_not_mixed(device: &Device) {
    let paged = Case { query_lens: vec![1; 3], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let ragged = paged.clone().ragged();
    let fixtures = [&paged, &ragged].map(Fixture::new);
    let [on_paged, on_ragged] = fixtures.each_ref().map(|fixture| fixture.tensors(device, Lse::Two, 3));
    let mut setups = [&paged, &ragged].map(|case| Setup::new(device, &[case], SplitMode::Balanced));
    let stream = Stream::default();
    refused(
        setups[0].plan(&fixtures[1], stream),
        "page table is ragged; the planner's config has pages of 16 tokens, not AttentionConfig::ragged",
    );
    let message = "page table has pages of 16 tokens; the planner's config is ragged, which takes PageTable::ragged";
    refused(setups[1].plan(&fixtures[0], stream), message);
    // Pages of one token are pages.
    let single_pages = Fixture::new(&Case { config: AttentionConfig::new(4, 2, 64, 1), ..paged.clone() });
    refused(setups[1].plan(&single_pages, stream), &message.replace("16", "1"));

    let [planned_paged, planned_ragged] = [0, 1].map(|which| setups[which].plan(&fixtures[which], stream).unwrap());
    let message = "this call brings k and v without pages, which the attention does not read; make it with \
                   AttentionConfig::ragged";
    refused(setups[0].run(&planned_paged, &on_ragged.run, stream), message);
    let no_cache =
        "this call brings a paged cache, which the attention does not read; make it with AttentionConfig::new";
    refused(setups[1].run(&planned_ragged, &on_paged.run, stream), no_cache);
    let report = report(device);
    let (cache, ids) = on_paged.paged();
    refused(
        setups[1].check_page_ids(&planned_ragged, &ids, 100, &report, stream),
        "this call brings page_indices, which the attention does not read; make it with AttentionConfig::new",
    );
    let new = Rows::contiguous(on_paged.run.q.address, DType::Bf16, 1, 2, 64);
    let arguments = Append { k: new, v: new, cache, destination: Destination::Slots { address: 4096 } };
    // SAFETY: refused before a launch.
    refused(unsafe { append(device, &ragged.config, &arguments, stream) }, no_cache);
    for (which, (planned, tensors)) in [(planned_paged, &on_paged), (planned_ragged, &on_ragged)].iter().enumerate() {
        setups[which].run(planned, &tensors.run, stream).unwrap();
        check(&fixtures[which], &tensors.download(&fixtures[which]), "after refusals");
    }

    // A captured call follows plans that have page ids where this one has none.
    let mut graphs = Setup::for_graphs(device, &[&paged], SplitMode::Balanced);
    let empty = Fixture::new(&Case { kv_lens: vec![0; 3], ..paged });
    let planned = graphs.plan(&empty, stream).unwrap();
    let page_indices = PageIndices { address: 0, len: 0 };
    let run = Run { kv: KvMemory::Paged { cache, page_indices }, ..on_paged.run };
    refused(graphs.run(&planned, &run, stream), "page_indices has elements but its address is 0");
}

/// Holds a refusal's message.
pub fn refused<T: std::fmt::Debug>(result: Result<T, Error>, message: &str) {
    assert_eq!(result.expect_err(message).to_string(), message);
}

/// B18, D6, D12 and their like: what does not fit the plan, tensor by tensor, and the outputs stay as they were.
pub fn b18_rows_that_do_not_match_are_refused(device: &Device) {
    let case = Case { query_lens: vec![1; 3], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, 3);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    let run = tensors.run;
    let (PagedCache { k, v }, page_indices) = tensors.paged();
    let q = run.q;
    let with_q = |q: Rows| Run { q, ..run };
    let paged =
        |cache: PagedCache, page_indices: PageIndices| Run { kv: KvMemory::Paged { cache, page_indices }, ..run };
    let with_cache = |k: CacheRows, v: CacheRows| paged(PagedCache { k, v }, page_indices);
    let lse = |tokens, heads| Run { lse: Some(LseE::contiguous(1 << 12, tokens, heads).into()), ..run };
    let odd = q.address + 2;
    for (run, message) in [
        (with_q(Rows { tokens: 2, ..q }), "q.tokens is 2; this call needs 3".into()),
        (with_q(Rows { tokens: 4, ..q }), "q.tokens is 4; this call needs 3".into()),
        (with_q(Rows { heads: 2, ..q }), "q.heads is 2; this call needs 4".into()),
        (with_q(Rows { head_dim: 128, ..q }), "q.head_dim is 128; this call needs 64".into()),
        (with_q(Rows { dtype: DType::F16, ..q }), "q is f16; this call needs bf16".into()),
        (with_q(Rows { dtype: DType::F32, ..q }), "q is f32; this call needs bf16".into()),
        (with_q(Rows { address: odd, ..q }), format!("q.address is {odd} bytes, which is not a multiple of 16")),
        (with_q(Rows { address: 0, ..q }), "q has elements but its address is 0".into()),
        (with_q(q.with_strides(257, 64)), "q.token_stride is 514 bytes, which is not a multiple of 16".into()),
        (with_q(q.with_strides(i64::MAX, 64)), "q.token_stride does not fit 64-bit bytes".into()),
        (Run { out: Rows { tokens: 2, ..run.out }, ..run }, "out.tokens is 2; this call needs 3".into()),
        (Run { out: Rows { dtype: DType::F32, ..run.out }, ..run }, "out is f32; this call needs bf16".into()),
        (lse(2, 4), "lse.tokens is 2; this call needs 3".into()),
        (lse(3, 8), "lse.heads is 8; this call needs 4".into()),
        (with_cache(CacheRows { dtype: DType::F16, ..k }, v), "cache.k is f16; this call needs bf16".into()),
        (with_cache(k, CacheRows { dtype: DType::F16, ..v }), "cache.v is f16; this call needs bf16".into()),
        (with_cache(CacheRows { kv_heads: 4, ..k }, v), "cache.k.kv_heads is 4; this call needs 2".into()),
        (
            with_cache(CacheRows { page_size_tokens: 8, ..k }, v),
            "cache.k.page_size_tokens is 8; this call needs 16".into(),
        ),
        (with_cache(k, CacheRows { pages: 2, ..v }), format!("cache.v.pages is 2; this call needs {}", k.pages)),
        (
            paged(PagedCache { k, v }, PageIndices { len: 6, ..page_indices }),
            "page_indices.len is 6; this call needs 7".into(),
        ),
    ] {
        refused(setup.run(&planned, &run, Stream::default()), &message);
    }
    let outputs = tensors.download(&fixture);
    assert!(
        outputs.bits().0.iter().all(|&bits| bits == u16::MAX) && outputs.bits().1.iter().all(|&bits| bits == u32::MAX)
    );
    setup.run(&planned, &run, Stream::default()).unwrap();
    check(&fixture, &tensors.download(&fixture), "after refusals");
}

/// What a config reads at run time is there, in the length it needs, and nothing else is.
pub fn inputs_of_variants_that_do_not_match_are_refused(device: &Device) {
    let case = Case { query_lens: vec![1, 2, 1], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let case = Case { seeds: vec![0, 1, 2], ..case }.changed("all together", all_together);
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, 4);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    // 35 bits, 2 * 16 and 48: each request begins a byte.
    assert_eq!((planned.requests, planned.mask_bytes), (3, 5 + 4 + 6));
    let run = tensors.run;
    let given = run.variant;
    let (sinks, mask) = (given.sinks.unwrap(), given.mask.unwrap());
    let short = |len| Some(Values { len, ..sinks });
    let odd = Some(Values { address: sinks.address + 2, ..sinks });
    for (variant, message) in [
        (VariantInputs::default(), "the attention was made with_sinks; this call needs variant.sinks".to_owned()),
        (
            VariantInputs { alibi_slopes: None, ..given },
            "the attention was made with_alibi; this call needs variant.alibi_slopes".into(),
        ),
        (
            VariantInputs { temperatures: None, ..given },
            "the attention was made with_temperatures; this call needs variant.temperatures".into(),
        ),
        (
            VariantInputs { mask: None, ..given },
            "the attention was made with_mask; this call needs variant.mask".into(),
        ),
        (VariantInputs { sinks: short(3), ..given }, "variant.sinks.len is 3; this call needs 4".into()),
        (VariantInputs { alibi_slopes: short(3), ..given }, "variant.alibi_slopes.len is 3; this call needs 4".into()),
        (VariantInputs { temperatures: short(2), ..given }, "variant.temperatures.len is 2; this call needs 3".into()),
        (
            VariantInputs { mask: Some(MaskMemory { bytes: 14, ..mask }), ..given },
            "variant.mask.bytes is 14; this call needs 15".into(),
        ),
        (
            VariantInputs { mask: Some(MaskMemory { address: 0, ..mask }), ..given },
            "variant.mask has elements but its address is 0".into(),
        ),
        (
            VariantInputs { sinks: odd, ..given },
            format!("variant.sinks.address is {} bytes, which is not a multiple of 4", sinks.address + 2),
        ),
    ] {
        refused(setup.run(&planned, &run.with_variant(variant), Stream::default()), &message);
    }
    setup.run(&planned, &run, Stream::default()).unwrap();
    check(&fixture, &tensors.download(&fixture), "after refusals");

    // In graphs: 4 tokens of at most 48 keys, and a byte a request.
    let mut graphs = Setup::for_graphs(device, &[&case], SplitMode::Balanced);
    let planned = graphs.plan(&fixture, Stream::default()).unwrap();
    refused(graphs.run(&planned, &run, Stream::default()), "variant.mask.bytes is 15; this call needs 27");

    let plain = Case { modifiers: Modifiers::default(), ..case.clone() };
    let plain = Case { config: AttentionConfig::new(4, 2, 64, 16), ..plain };
    let mut setup = Setup::new(device, &[&plain], SplitMode::Balanced);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    let message = "this call brings variant.sinks, which the attention does not read; make it with_sinks";
    refused(setup.run(&planned, &run, Stream::default()), message);
    let own = run.with_variant(VariantInputs::default()).with_custom_parameters(&[7u32; 3]);
    let message = "this call brings variant.custom, which the attention does not read; make it with_custom_variant";
    refused(setup.run(&planned, &own, Stream::default()), message);
    let sigmoid = Case { config: plain.config.with_sigmoid(0.0), ..plain };
    let mut setup = Setup::new(device, &[&sigmoid], SplitMode::Balanced);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    let run = run.with_variant(VariantInputs::default());
    let message = "lse was asked for; an attention made with_sigmoid has none";
    refused(setup.run(&planned, &run, Stream::default()), message);
}

/// Weights of norms and positions, as the config reads them.
pub fn inputs_of_norms_and_rotations_that_do_not_match_are_refused(device: &Device) {
    let case = Case { query_lens: vec![1, 2, 1], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let case = Case { seeds: vec![0, 1, 2], ..case }.changed("norms and rope", |config| {
        config.with_rope(RopeConfig::new(64)).with_rope_positions().with_query_norm(1e-6).with_key_norm(1e-6)
    });
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, 4);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    let run = tensors.run;
    let given = run.variant;
    let (weights, positions) = (given.key_norm.unwrap(), given.rope_positions.unwrap());
    for (variant, message) in [
        (
            VariantInputs { rope_positions: None, ..given },
            "the attention was made with_rope_positions; this call needs variant.rope_positions".to_owned(),
        ),
        (
            VariantInputs { query_norm: None, ..given },
            "the attention was made with_query_norm; this call needs variant.query_norm".into(),
        ),
        (
            VariantInputs { key_norm: None, ..given },
            "the attention was made with_key_norm; this call needs variant.key_norm".into(),
        ),
        (
            VariantInputs { rope_positions: Some(QueryPositions { len: 3, ..positions }), ..given },
            "variant.rope_positions.len is 3; this call needs 4".into(),
        ),
        (
            VariantInputs { key_norm: Some(Values { len: 63, ..weights }), ..given },
            "variant.key_norm.len is 63; this call needs 64".into(),
        ),
        (
            VariantInputs { key_norm: Some(Values { address: weights.address + 4, ..weights }), ..given },
            format!("variant.key_norm.address is {} bytes, which is not a multiple of 16", weights.address + 4),
        ),
    ] {
        refused(setup.run(&planned, &run.with_variant(variant), Stream::default()), &message);
    }
    setup.run(&planned, &run, Stream::default()).unwrap();
    check(&fixture, &tensors.download(&fixture), "after refusals");

    let plain = Case { config: AttentionConfig::new(4, 2, 64, 16), ..case.clone() };
    let mut setup = Setup::new(device, &[&plain], SplitMode::Balanced);
    let planned = setup.plan(&fixture, Stream::default()).unwrap();
    let message =
        "this call brings variant.rope_positions, which the attention does not read; make it with_rope_positions";
    refused(setup.run(&planned, &run, Stream::default()), message);
}

/// A stream without end, token by token: pages between sinks and window go, and what is left is attended to by new places,
/// as the oracle does it over the keys that stay.
pub fn a_stream_without_end_goes_by_places_in_the_cache(device: &Device) {
    const STEPS: u32 = 70;
    let (head_dim, page_size) = (64, 5);
    let config = AttentionConfig::new(2, 1, head_dim, page_size).with_rope(RopeConfig::new(head_dim));
    let streaming = Streaming::new(3, 17, page_size).unwrap();
    let most = streaming.most_kv_len_tokens() as u32;
    let limits = Limits { max_requests: 1, max_query_tokens: 1, max_kv_len_tokens: most, max_kv_tokens: most as u64 };
    let pool_pages = STEPS.div_ceil(page_size);
    let row = |role: u64, token: u32| -> Vec<f32> {
        let mut random = Random::keyed(&[role, token as u64]);
        (0..head_dim).map(|_| value(DType::Bf16, bits(DType::Bf16, random.normal()))).collect()
    };
    // Token `t` has slot `t` of the pool for good.
    let cache = |role| encode(DType::Bf16, &(0..pool_pages * page_size).flat_map(|t| row(role, t)).collect::<Vec<_>>());
    let (k, v) = (device.upload(&cache(1)).unwrap(), device.upload(&cache(2)).unwrap());
    let out = device.allocate(2 * 2 * head_dim as usize).unwrap();
    let mut attention = Attention::new(device, config, SplitMode::Balanced, limits).unwrap();
    let memory = device.allocate(attention.workspace_bytes() as usize).unwrap();
    // SAFETY: the buffer is live and used for nothing else.
    let mut workspace = unsafe { Workspace::new(memory.address(), memory.bytes() as u64) };
    let (mut pages, mut kv_len, mut dropped) = (Vec::new(), 0, 0);
    for token in 0..STEPS {
        if kv_len % page_size == 0 {
            pages.push(token / page_size);
        }
        kv_len += 1;
        let gone = streaming.pages_to_drop(kv_len);
        kv_len -= page_size * gone.len() as u32;
        dropped += gone.len();
        pages.drain(gone);

        let queries: Vec<f32> = (0..2).flat_map(|head| row(3 + head, token)).collect();
        let q = device.upload(&encode(DType::Bf16, &queries)).unwrap();
        let page_ids = device.upload(&pages).unwrap();
        let (indptr, kv_lens) = ([0, pages.len() as u32], [kv_len]);
        let table = PageTable::csr(page_size, &indptr, &kv_lens).unwrap();
        let stream = Stream::default();
        let planned = attention.plan(&table, QueryLengths::uniform(1), &mut workspace, stream).unwrap();
        let run = Run::new(
            Rows::contiguous(q.address(), DType::Bf16, 1, 2, head_dim),
            PagedCache::separate(k.address(), v.address(), pool_pages as u64, oxattn::Layout::Nhd, &config),
            PageIndices { address: page_ids.address(), len: pages.len() as u64 },
            Rows::contiguous(out.address(), DType::Bf16, 1, 2, head_dim),
        );
        // SAFETY: the tensors are live until the download, which waits; page ids are below the pool's pages.
        unsafe { attention.run(&planned, &run, &mut workspace, stream) }.unwrap();
        let out = decode(DType::Bf16, &out.download::<u8>().unwrap());

        // The keys that stay, of the whole stream's, by where they stand now.
        let kept: Vec<u32> = pages.iter().flat_map(|page| page * page_size..(page + 1) * page_size).collect();
        let exact = |role: u64, token: u32| row(role, token).into_iter().map(f64::from).collect::<Vec<f64>>();
        let frequency = |pair: usize| 1e4f64.powf(-2.0 * pair as f64 / head_dim as f64);
        let rotation = oracle::Rotation { dim: head_dim as usize, interleaved: false, frequency: &frequency };
        let rules = oracle::Rules { rotation: Some(rotation), ..oracle::Rules::default() };
        // As the device rounds it.
        let settled = |row: Vec<f64>| -> Vec<f64> {
            let rounded = |x: f64| value(DType::Bf16, bits(DType::Bf16, x as f32)) as f64;
            if device.as_cuda().is_some() { row.into_iter().map(rounded).collect() } else { row }
        };
        let request = oracle::Request {
            query_len: 1,
            kv_len: kv_len as usize,
            group: 2,
            value_head_dim: head_dim as usize,
            softmax_scale: config.softmax_scale as f64,
            causal: true,
            rules: oracle::Rules::default(),
            q: &|_, head| settled(rules.changed_query(kv_len as i64 - 1, exact(3 + head as u64, token))),
            k: &|place, _| settled(rules.changed_key(place as i64, exact(1, kept[place]))),
            v: &|place, _| exact(2, kept[place]),
        };
        for head in 0..2 {
            let expected = request.attend(0, head).out;
            let error = row_error(&out[head * head_dim as usize..][..head_dim as usize], &expected);
            assert!(error <= row_tolerance(DType::Bf16), "token {token}, head {head}: {error:.1e}");
        }
    }
    assert_eq!((dropped, kv_len), (9, 25));
}

pub fn block_sparse_runs_that_do_not_match_are_refused(device: &Device) {
    block_sparse::check_refusals(device);
}

/// A plan that was replaced, that lies elsewhere, or that there is no room for.
pub fn plans_that_do_not_match_are_refused(device: &Device) {
    let case = Case { query_lens: vec![1; 3], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let fixture = Fixture::new(&case);
    let stream = Stream::default();
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, 3);

    // A receipt of another attention is not this one's.
    let foreign = Setup::new(device, &[&case], SplitMode::Balanced).plan(&fixture, stream).unwrap();
    refused(setup.run(&foreign, &tensors.run, stream), "run was called before plan");
    let first = setup.plan(&fixture, stream).unwrap();
    let second = setup.plan(&fixture, stream).unwrap();
    assert_eq!((first.epoch, second.epoch), (1, 2));
    let stale = "the plan of epoch 1 was replaced by the plan of epoch 2";
    refused(setup.run(&first, &tensors.run, stream), stale);
    let (_memory, other) = workspace(device, &setup.attention);
    let memory = std::mem::replace(&mut setup.workspace, other);
    let refusal = setup.run(&second, &tensors.run, stream).unwrap_err().to_string();
    assert!(refusal.starts_with("the plan lies in the workspace at 0x"), "{refusal}");
    setup.workspace = memory;
    setup.run(&second, &tensors.run, stream).unwrap();
    check(&fixture, &tensors.download(&fixture), "after refusals");
    refused(setup.run(&foreign, &tensors.run, stream), "the plan was made by another attention");

    // Another attention's plan in the same workspace, of the same epoch.
    let mut rival = Setup::new(device, &[&case], SplitMode::Balanced);
    for _ in 0..2 {
        plan(&mut rival.attention, &fixture, &mut setup.workspace, stream).unwrap();
    }
    let refusal = setup.run(&second, &tensors.run, stream).unwrap_err().to_string();
    assert!(refusal.ends_with("no longer holds this plan; plan again"), "{refusal}");
    let second = setup.plan(&fixture, stream).unwrap();
    setup.run(&second, &tensors.run, stream).unwrap();

    let mut replanned = |table: PageTable<'_>, query_len, message: &str| {
        let Setup { attention, workspace, .. } = &mut setup;
        refused(attention.plan(&table, QueryLengths::uniform(query_len), workspace, stream), message);
        // A refused plan leaves none.
        refused(setup.run(&second, &tensors.run, stream), "run was called before plan");
    };
    fn table(page_size: u32, kv_lens: &[u32]) -> PageTable<'_> {
        PageTable::block_table(page_size, 5, kv_lens).unwrap()
    }
    replanned(table(16, &[1; 4]), 1, "batch has 4 requests; the planner's max_requests is 3");
    replanned(table(16, &[49, 1, 1]), 1, "kv_len of request 0 is 49; the planner's max_kv_len_tokens is 48");
    replanned(table(16, &[48; 3]), 1, "batch has 144 keys; the planner's max_kv_tokens is 99");
    replanned(table(16, &[1; 3]), 2, "batch has 6 query tokens; the planner's max_query_tokens is 3");
    replanned(table(8, &[1; 3]), 1, "page table has pages of 8 tokens; the planner's config has page_size_tokens = 16");

    let bytes = setup.attention.workspace_bytes();
    let memory = device.allocate(bytes as usize + 16).unwrap();
    let mut plan_in = |address, bytes| {
        // SAFETY: refused before anything is written.
        let mut workspace = unsafe { Workspace::new(address, bytes) };
        plan(&mut setup.attention, &fixture, &mut workspace, stream)
    };
    refused(
        plan_in(memory.address(), bytes - 1),
        &format!("workspace has {} bytes; the planner's limits need {bytes}", bytes - 1),
    );
    let odd = memory.address() + 8;
    refused(plan_in(odd, bytes), &format!("workspace address {odd:#x} is not a multiple of 16 bytes"));
}

pub fn configurations_no_kernel_runs_are_refused(device: &Device) {
    let limits = Limits { max_requests: 1, max_query_tokens: 1, max_kv_len_tokens: 1, max_kv_tokens: 1 };
    let config = AttentionConfig::new(8, 2, 128, 16);
    for (config, message) in [
        (config.with_dtype(DType::F32), "dtype is f32; supported are bf16 and f16"),
        (AttentionConfig::new(3, 2, 128, 16), "query_heads is 3, which is not a multiple of kv_heads = 2"),
        (AttentionConfig::new(0, 2, 128, 16), "query_heads is 0; it must be at least 1"),
        (AttentionConfig::new(129, 1, 128, 16), "query_heads / kv_heads is 129; supported is at most 128"),
        (AttentionConfig::new(8, 2, 128, 1025), "page_size_tokens is 1025; supported is at most 1024"),
        (AttentionConfig::new(8, 2, 12, 16), "head_dim is 12; supported are multiples of 8 from 8 to 512"),
        (AttentionConfig::new(8, 2, 0, 16), "head_dim is 0; supported are multiples of 8 from 8 to 512"),
        (config.with_value_head_dim(520), "value_head_dim is 520; supported are multiples of 8 from 8 to 512"),
        (config.with_softmax_scale(f32::INFINITY), "softmax_scale is inf; it must be finite"),
    ] {
        refused(Attention::new(device, config, SplitMode::Balanced, limits), message);
        refused(Attention::for_graphs(device, config, SplitMode::Unsplit, limits), message);
    }
    let zero = SplitMode::FixedSplit { tokens: 0 };
    refused(Attention::new(device, config, zero, limits), "FixedSplit tokens is 0; it must be at least 1");
}

/// Pages, head dims and split modes without a prefill kernel have none on any device, and the CPU has none at all.
pub fn prefill_kernels_that_there_are_not_are_refused(device: &Device) {
    let limits = Limits { max_requests: 1, max_query_tokens: 1, max_kv_len_tokens: 1, max_kv_tokens: 1 };
    let config = |head_dim: u32, page: u32| AttentionConfig::new(8, 2, head_dim, page);
    let never = [
        (config(128, 12), SplitMode::Balanced),
        (config(264, 16), SplitMode::Balanced),
        (config(64, 16).with_value_head_dim(512), SplitMode::Balanced),
        (config(128, 16), SplitMode::BatchInvariant),
        (config(128, 16), SplitMode::FixedSplit { tokens: 64 }),
        (config(96, 16).with_rope(RopeConfig::new(96)), SplitMode::Balanced),
        (config(96, 16).with_key_norm(1e-6), SplitMode::Unsplit),
    ];
    let padded = (config(96, 16).with_value_head_dim(40), SplitMode::Balanced);
    let on_gpus = [(config(128, 16), SplitMode::Balanced), (config(64, 8), SplitMode::Unsplit), padded];
    for (config, mode) in never.iter().chain(on_gpus.iter().filter(|_| device.is_cpu())) {
        let message = format!(
            "no prefill kernel for head_dim {}, value_head_dim {} and page_size_tokens {} here; it needs a Hopper GPU, \
             head dims up to 256, pages of a multiple of 8 tokens, SplitMode::Balanced or Unsplit, with rope or norms head \
             dim 64, 128 or 256, and of a custom variant a kernel in its bundle",
            config.head_dim, config.value_head_dim, config.page_size_tokens
        );
        for attention in [Attention::new, Attention::for_graphs] {
            refused(attention(device, *config, *mode, limits).unwrap().with_kernel(Kernel::Prefill), &message);
            attention(device, *config, *mode, limits).unwrap().with_kernel(Kernel::Attend).unwrap();
        }
    }
}

pub fn more_memory_than_there_is_is_refused(device: &Device) {
    // The first is as much as an allocation may be, and past it with its alignment; no address space holds the second.
    for bytes in [isize::MAX as usize, 1 << 62] {
        let refusal = device.allocate(bytes).map(|memory| memory.address()).unwrap_err();
        if device.is_cpu() {
            assert!(matches!(refusal, oxattn::Error::OutOfMemory { bytes: got } if got == bytes as u64), "{refusal}");
        }
    }
    device.upload(&[1u8]).unwrap();
}

pub fn merges_and_appends_that_do_not_match_are_refused(device: &Device) {
    let memory = device.allocate(1 << 16).unwrap();
    let at = memory.address();
    let state = |tokens: u64, heads: u32, head_dim: u32, dtype: DType| State {
        out: Rows::contiguous(at, dtype, tokens, heads, head_dim),
        lse: Lse2::contiguous(at + (1 << 15), tokens, heads),
    };
    let good = state(2, 3, 64, DType::F32);
    let strided = State { out: good.out.with_strides(3 * 64 + 4, 64), ..good };
    let narrow = State { out: good.out.with_strides(3 * 64 + 1, 64), ..good };
    let wide = state(1, 1, 520, DType::F32);
    let uneven = state(2, 3, 68, DType::F32);
    for (a, b, merged, message) in [
        (good, state(2, 3, 64, DType::F16), good, "b.out is f16; this call needs f32"),
        (good, good, state(2, 3, 64, DType::Bf16), "merged.out is bf16; this call needs f32"),
        (good, state(1, 3, 64, DType::F32), good, "b.out.tokens is 1; this call needs 2"),
        (good, good, state(2, 2, 64, DType::F32), "merged.out.heads is 2; this call needs 3"),
        (good, strided, good, "b.out.token_stride (bytes) is 784; this call needs 768"),
        (narrow, good, good, "a.out.token_stride is 772 bytes, which is not a multiple of 16"),
        (wide, wide, wide, "out.head_dim is 520; supported is at most 512"),
        (uneven, uneven, uneven, "out.head_dim is 68 bytes, which is not a multiple of 8"),
    ] {
        // SAFETY: refused before a launch.
        refused(unsafe { merge_state(device, &a, &b, &merged, Stream::default()) }, message);
    }

    let config = AttentionConfig::new(2, 2, 64, 4);
    let cache = PagedCache::separate(at, at + (1 << 14), 4, oxattn::Layout::Hnd, &config);
    let new = Rows::contiguous(at, DType::F32, 3, 2, 64);
    let slots = Destination::Slots { address: at };
    let good = Append { k: new, v: new, cache, destination: slots };
    let f16 = CacheRows { dtype: DType::F16, ..cache.v };
    for (arguments, message) in [
        (Append { v: Rows { dtype: DType::Bf16, ..new }, ..good }, "v is bf16; this call needs f32"),
        (Append { v: Rows { tokens: 2, ..new }, ..good }, "v.tokens is 2; this call needs 3"),
        (Append { k: Rows { heads: 4, ..new }, ..good }, "k.heads is 4; this call needs 2"),
        (Append { cache: PagedCache { v: f16, ..cache }, ..good }, "cache.v is f16; this call needs bf16"),
        (
            Append { k: Rows { tokens: 1 << 28, ..new }, ..good },
            "k.tokens is 268435456; supported is at most 134217727",
        ),
        (Append { destination: Destination::Slots { address: 0 }, ..good }, "slots has elements but its address is 0"),
    ] {
        // SAFETY: refused before a launch.
        refused(unsafe { append(device, &config, &arguments, Stream::default()) }, message);
    }
}

pub fn rotations_that_do_not_match_are_refused(device: &Device) {
    let memory = device.allocate(1 << 16).unwrap();
    let at = memory.address();
    let rows = |heads: u32| Rows::contiguous(at, DType::Bf16, 3, heads, 64);
    let elsewhere = |rows: Rows| Rows { address: at + (1 << 15), ..rows };
    let ids = RopePositions::Ids { address: at };
    let good = RopeRun::in_place(rows(4), elsewhere(rows(2)), ids);
    let q = |input: Rows, output: Rows| RopeRun { q: Some(Rotate::into(input, output)), ..good };
    let k = |k: Rows| RopeRun { k: Some(Rotate::in_place(k)), ..good };
    let at_offsets = |request_count: u32, query_begin: u64, offsets: u64| RopeRun {
        positions: RopePositions::Offsets { request_count, query_begin, offsets },
        ..good
    };
    let rope = Rope::new(device, RopeConfig::new(64)).unwrap();
    for (run, message) in [
        (RopeRun { q: None, k: None, ..good }, "neither q nor k was given; this call needs one of them"),
        (k(Rows { tokens: 2, ..elsewhere(rows(2)) }), "k.tokens is 2; this call needs 3"),
        (k(Rows { head_dim: 128, ..elsewhere(rows(2)) }), "k.head_dim is 128; this call needs 64"),
        (k(Rows { dtype: DType::F16, ..elsewhere(rows(2)) }), "k is f16; this call needs bf16"),
        (k(Rows { address: at + 8, ..rows(2) }), "k.address is ADDRESS bytes, which is not a multiple of 16"),
        (k(Rows { address: 0, ..rows(2) }), "k has elements but its address is 0"),
        (q(rows(4), elsewhere(rows(3))), "q_out.heads is 3; this call needs 4"),
        (q(rows(4), Rows { dtype: DType::F32, ..elsewhere(rows(4)) }), "q_out is f32; this call needs bf16"),
        (q(rows(4), rows(4).with_strides(512, 64)), "q_out.token_stride (bytes) is 1024; this call needs 512"),
        (q(rows(4).with_strides(260, 64), rows(4)), "q.token_stride is 520 bytes, which is not a multiple of 16"),
        (
            q(Rows { tokens: 1 << 29, ..rows(4) }, Rows { tokens: 1 << 29, ..rows(4) }),
            "k.tokens is 3; this call needs 536870912",
        ),
        (
            RopeRun { k: None, ..q(Rows { tokens: 1 << 30, ..rows(4) }, Rows { tokens: 1 << 30, ..rows(4) }) },
            "tokens is 1073741824; supported is at most 536870911",
        ),
        (
            RopeRun { positions: RopePositions::Ids { address: 0 }, ..good },
            "positions has elements but its address is 0",
        ),
        (at_offsets(1, 0, at), "query_begin has elements but its address is 0"),
        (at_offsets(1, at, 0), "offsets has elements but its address is 0"),
        (at_offsets(1, at, at + 2), "offsets.address is ADDRESS bytes, which is not a multiple of 4"),
    ] {
        // SAFETY: refused before a launch.
        let refusal = unsafe { rope.apply(&run, Stream::default()) }.expect_err(message).to_string();
        let address = |misplaced: u64| message.replace("ADDRESS", &misplaced.to_string());
        assert!([address(at + 8), address(at + 2)].contains(&refusal), "{refusal}, not {message}");
    }
    let misplaced = Rope::new(device, RopeConfig::new(64).with_cos_sin_cache(at + 4, 8)).unwrap();
    let message = format!("cos_sin.address is {} bytes, which is not a multiple of 16", at + 4);
    // SAFETY: as above.
    refused(unsafe { misplaced.apply(&good, Stream::default()) }, &message);
    let message = "rotary_dim is 128; supported are multiples of 16 from 16 to head_dim = 64";
    refused(Rope::new(device, RopeConfig::new(64).with_rotary_dim(128)), message);
    // What was refused was not written.
    assert!(memory.download::<u8>().unwrap().iter().all(|&byte| byte == 0));
}

pub fn rotated_appends_that_do_not_match_are_refused(device: &Device) {
    let memory = device.allocate(1 << 16).unwrap();
    let at = memory.address();
    let config = AttentionConfig::new(4, 2, 64, 4);
    let rows = |heads: u32| Rows::contiguous(at, DType::Bf16, 3, heads, 64);
    let cache = PagedCache::separate(at + (1 << 14), at + (1 << 15), 4, oxattn::Layout::Nhd, &config);
    let append = Append { k: rows(2), v: rows(2), cache, destination: Destination::Slots { address: at } };
    let good = RopeAppend::in_place(rows(4), append).with_positions(RopePositions::Ids { address: at });
    let q = |rows: Rows| RopeAppend { q: Some(Rotate::in_place(rows)), ..good };
    let k = |k: Rows| RopeAppend { append: Append { k, ..append }, ..good };
    let f32_rows = |heads: u32| Rows { dtype: DType::F32, ..rows(heads) };
    let f16_cache = PagedCache { k: CacheRows { dtype: DType::F16, ..cache.k }, ..cache };
    let f32_cache = PagedCache { v: CacheRows { dtype: DType::F32, ..cache.v }, ..cache };
    let many = Rows { tokens: 1 << 28, ..rows(4) };
    let narrow = Rows { head_dim: 128, ..rows(4) };
    let rope = Rope::new(device, RopeConfig::new(64)).unwrap();
    let refused_by = |rope: &Rope, run: &RopeAppend, message: &str| {
        // SAFETY: refused before a launch.
        refused(unsafe { rope.apply_and_append(&config, run, Stream::default()) }, message);
    };
    for (run, message) in [
        (q(rows(6)), "q.heads is 6; this call needs 4"),
        (q(Rows { tokens: 2, ..rows(4) }), "q.tokens is 2; this call needs 3"),
        (q(narrow), "q.head_dim is 128; this call needs 64"),
        (q(f32_rows(4)), "k is bf16; this call needs f32"),
        (k(rows(4)), "k.heads is 4; this call needs 2"),
        (k(f32_rows(2)), "v is bf16; this call needs f32"),
        (k(Rows { address: 0, ..rows(2) }), "k has elements but its address is 0"),
        (
            RopeAppend { q: Some(Rotate::into(rows(4), rows(4).with_strides(512, 64))), ..good },
            "q_out.token_stride (bytes) is 1024; this call needs 512",
        ),
        (RopeAppend { append: Append { cache: f16_cache, ..append }, ..good }, "cache.k is f16; this call needs bf16"),
        (RopeAppend { append: Append { cache: f32_cache, ..append }, ..good }, "cache.v is f32; this call needs bf16"),
        (
            RopeAppend { positions: None, ..good },
            "positions is None and the destination is by slots; supported with None is a destination by positions",
        ),
        (good.with_positions(RopePositions::Ids { address: 0 }), "positions has elements but its address is 0"),
        (
            RopeAppend { append: Append { destination: Destination::Slots { address: 0 }, ..append }, ..good },
            "slots has elements but its address is 0",
        ),
        (
            RopeAppend { append: Append { k: many, ..append }, ..good },
            "k.tokens is 268435456; supported is at most 134217727",
        ),
    ] {
        refused_by(&rope, &run, message);
    }
    let wide = Rope::new(device, RopeConfig::new(128)).unwrap();
    refused_by(&wide, &good, "rope.head_dim is 128; this call needs 64");
    let misplaced = Rope::new(device, RopeConfig::new(64).with_cos_sin_cache(at + 4, 8)).unwrap();
    let message = format!("cos_sin.address is {} bytes, which is not a multiple of 16", at + 4);
    refused_by(&misplaced, &good, &message);
    let in_f32 = config.with_dtype(DType::F32);
    // SAFETY: as above.
    let unsupported = unsafe { rope.apply_and_append(&in_f32, &good, Stream::default()) };
    refused(unsupported, "dtype is f32; supported are bf16 and f16");
    // What was refused was not written.
    assert!(memory.download::<u8>().unwrap().iter().all(|&byte| byte == 0));
}

/// A third of the table, which has no period of three.
pub fn page_ids_out_of_range_are_reported(device: &Device) {
    for case in page_id_cases().iter().step_by(3) {
        let PageIdCase { batch, mode, page_begin, page_indices, expected, .. } = case;
        let mut setup = Setup::new(device, &[batch], *mode);
        let ids = device.upload(page_indices).unwrap();
        let planned = setup.plan_lens(batch, page_begin, Stream::default()).unwrap();
        let ids = PageIndices { address: ids.address(), len: page_indices.len() as u64 };
        let report = report(device);
        setup.check_page_ids(&planned, &ids, PAGES as u64, &report, Stream::default()).unwrap();
        assert_eq!(&report.verdict(), expected, "{}", case.name);
    }
}

pub fn tokens_without_a_place_are_reported(device: &Device) {
    for case in append_checks() {
        let report = report(device);
        check_append(device, &case, &report).unwrap();
        assert_eq!(report.verdict(), case.expected, "{}", case.name);
    }
}

/// What can be told on the host is refused there, and no report is written.
pub fn checks_that_do_not_match_are_refused(device: &Device) {
    let case = Case { query_lens: vec![1; 3], kv_lens: vec![35, 16, 48], ..paged(16, LAYOUTS[0]) };
    let fixture = Fixture::new(&case);
    let mut setup = Setup::new(device, &[&case], SplitMode::Balanced);
    let tensors = fixture.tensors(device, Lse::Two, 3);
    let ids = tensors.paged().1;
    let report = report(device);
    let stream = Stream::default();
    let first = setup.plan(&fixture, stream).unwrap();
    let planned = setup.plan(&fixture, stream).unwrap();
    let stale = setup.check_page_ids(&first, &ids, 100, &report, stream);
    refused(stale, "the plan of epoch 1 was replaced by the plan of epoch 2");
    let short = setup.check_page_ids(&planned, &PageIndices { len: 6, ..ids }, 100, &report, stream);
    refused(short, "page_indices.len is 6; this call needs 7");
    let absent = setup.check_page_ids(&planned, &PageIndices { address: 0, ..ids }, 100, &report, stream);
    refused(absent, "page_indices has elements but its address is 0");
    let odd = report.memory.address() + 4;
    // SAFETY: refused before a launch.
    let misaligned = unsafe { setup.attention.check_page_ids(&planned, &ids, 100, odd, &mut setup.workspace, stream) };
    refused(misaligned, &format!("report.address is {odd} bytes, which is not a multiple of 8"));
    refused(
        report.verdict().map_err(Error::from),
        "the report's first word is 3435973836, which no check writes; has the check run?",
    );

    let config = AttentionConfig::new(2, 2, 64, 4);
    let cache = PagedCache::separate(4096, 4096, 4, oxattn::Layout::Nhd, &config);
    let new = Rows::contiguous(4096, DType::F32, 3, 2, 64);
    let good = Append { k: new, v: new, cache, destination: Destination::Slots { address: ids.address } };
    let check = |arguments: &Append, report: u64| {
        // SAFETY: refused before a launch.
        unsafe { oxattn::validate::check_append(device, &config, arguments, 1, report, stream) }
    };
    refused(check(&good, 0), "report has elements but its address is 0");
    let absent = Append { destination: Destination::Slots { address: 0 }, ..good };
    refused(check(&absent, report.memory.address()), "slots has elements but its address is 0");
    let many = Append { k: Rows { tokens: 1 << 31, ..new }, ..good };
    refused(check(&many, report.memory.address()), "k.tokens is 2147483648; supported is at most 2147483647");

    setup.check_page_ids(&planned, &ids, u64::MAX, &report, stream).unwrap();
    assert_eq!(report.verdict(), Ok(()));
}
