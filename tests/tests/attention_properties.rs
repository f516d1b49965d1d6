//! Properties of attention over random batches, on the host executor and on the kernels under the emulator.

use kernels_gpu::abi::tile::{ATTEND_HEAD_DIMS, AttendTile, Family, Teams};
use oxattn::config::{AttentionConfig, DType};
use oxattn::{MaskForm, SplitMode, Target};
use oxattn_tests::cases::{Case, Pages, Unused, Values, paged};
use oxattn_tests::executors::{Cpu, Emulator};
use oxattn_tests::fixture::{Fixture, Lse};
use oxattn_tests::layout::LAYOUTS;
use oxattn_tests::plans::{forced_split, planned};
use oxattn_tests::variants::Modifiers;
use proptest::prelude::*;

/// Up to `requests` requests of fewer than `query_lens` tokens and `kv_lens` keys.
fn batches(requests: usize, query_lens: u32, kv_lens: u32, head_dims: &[u32]) -> impl Strategy<Value = Case> + use<> {
    let lens = prop::collection::vec((0..query_lens, 0..kv_lens), 0..=requests);
    let shape = (1u32..12, 1u32..4, prop::sample::select(head_dims.to_vec()), 1u32..70);
    let rest = (0..LAYOUTS.len(), any::<(bool, bool)>(), changes());
    (lens, shape, rest).prop_map(|(lens, shape, (layout, (causal, f16), changes))| {
        let (group, kv_heads, head_dim, page_size) = shape;
        let config = AttentionConfig::new(group * kv_heads, kv_heads, head_dim, page_size);
        let config = if causal { config } else { config.non_causal() };
        let (query_lens, kv_lens): (Vec<u32>, Vec<u32>) = lens.into_iter().unzip();
        let case = Case {
            name: "random".into(),
            config: config.with_dtype(if f16 { DType::F16 } else { DType::Bf16 }),
            seeds: (0..kv_lens.len() as u64).collect(),
            shared_tokens: Vec::new(),
            query_lens,
            kv_lens,
            layout: LAYOUTS[layout],
            values: Values::Normal,
            unused: Unused::Nan,
            pages: Pages::Scattered,
            query_row_elements: None,
            modifiers: Modifiers::default(),
        };
        case.changed("random", |config| changes.iter().fold(config, |config, change| change(config)))
    })
}

type Change = fn(AttentionConfig) -> AttentionConfig;

/// Some of what a config can do beside plain attention; half of the time nothing.
fn changes() -> impl Strategy<Value = Vec<Change>> {
    let all: [Change; 9] = [
        |config| config.with_window(Some(0), config.window_right),
        |config| config.with_window(Some(70), config.window_right),
        |config| config.with_window(config.window_left, Some(2)),
        |config| config.with_window(config.window_left, Some(50)),
        |config| config.with_mask(MaskForm::Bits),
        |config| config.with_soft_cap(2.0),
        AttentionConfig::with_alibi,
        AttentionConfig::with_sinks,
        AttentionConfig::with_temperatures,
    ];
    prop_oneof![Just(Vec::new()), prop::sample::subsequence(all.to_vec(), 0..4)]
}

fn modes() -> impl Strategy<Value = SplitMode> {
    let fixed = (1u32..200).prop_map(|tokens| SplitMode::FixedSplit { tokens });
    prop_oneof![Just(SplitMode::Balanced), Just(SplitMode::BatchInvariant), fixed, Just(SplitMode::Unsplit)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_plan_of_any_batch_is_the_oracle_s_answer(
        case in batches(5, 20, 300, &[64, 80]), mode in modes(), blocks in 1u32..300, tile in 1u32..9, pieces in 1u32..9,
        tall in 0u32..4,
    ) {
        let mut fixture = Fixture::new(&case);
        let target = Target::new(blocks, 16 * tile).with_tall_rows(32 * tall);
        let by_hand = forced_split(&case, &fixture.page_begin, pieces, Teams::new(case.config.kv_heads, blocks), 32 * tall);
        for mut plan in [planned(&case, &fixture.page_begin, target, mode), by_hand] {
            let outputs = fixture.run(&Cpu, &mut plan, Lse::E);
            prop_assert_eq!(fixture.check(&outputs), Ok(()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_plan_of_any_batch_makes_a_kernel_break_a_rule(
        case in batches(4, 7, 200, &ATTEND_HEAD_DIMS), mode in modes(), blocks in 1u32..20, pieces in 1u32..9,
        seed: u64, hopper: bool,
    ) {
        let family = if hopper { Family::Sm90a } else { Family::Sm80 };
        let tile = AttendTile::new(case.config.head_dim, family).unwrap();
        let mut fixture = Fixture::new(&case);
        let target = Target::new(blocks, tile.tile_tokens()).with_tall_rows(tile.tall_rows(case.config.is_plain()));
        let by_hand = forced_split(&case, &fixture.page_begin, pieces, target.teams(case.config.kv_heads), tile.tall_rows(case.config.is_plain()));
        for mut plan in [planned(&case, &fixture.page_begin, target, mode), by_hand] {
            let outputs = fixture.run(&Emulator::new(family, seed), &mut plan, Lse::E);
            prop_assert_eq!(fixture.check(&outputs), Ok(()));
        }
    }
}

/// The generator's rows are its seeds' alone: the tables of bit-equal runs rest on it.
#[test]
fn numbers_depend_on_seed_and_position() {
    let case = paged(16, LAYOUTS[0]);
    let mut moved = case.clone();
    moved.seeds.swap(0, 1);
    let (a, b) = (Fixture::new(&case), Fixture::new(&case));
    assert_eq!(a.expected(0, 0, 0), b.expected(0, 0, 0));
    assert_ne!(a.expected(0, 0, 0), Fixture::new(&moved).expected(0, 0, 0));
}
