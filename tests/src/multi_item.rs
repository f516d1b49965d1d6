//! Prompts of several items: their masks as FlashInfer's kernels state the rule, and what the masks are for.
//!
//! Unsafe: the operators take addresses; the scenario owns the memory behind its own.

use crate::cases::Case;
use crate::number::{bits, row_error, row_tolerance, value};
use crate::random::Random;
use oxattn::config::{AttentionConfig, DType};
use oxattn::rope::{Rope, RopeConfig, RopePositions, RopeRun};
use oxattn::{Buffer, Device, MaskForm, MaskMemory, MultiItem, Rows, Run, Stream, VariantInputs, pack_mask, single};

/// Prefix and items.
const PROMPTS: [(u32, &[u32]); 3] = [(17, &[16, 18]), (16, &[15, 30, 32]), (0, &[3, 0, 5])];

/// Tokens of a prompt.
fn kv_len(prefix_len: u32, item_lens: &[u32]) -> u32 {
    prefix_len + 1 + item_lens.iter().map(|len| len + 1).sum::<u32>()
}

/// Whether a query sees a key, by each token's place in its item, 0 for a delimiter: of what is before it, itself
/// included, a token after the prefix sees the prefix and as many keys as its place says.
fn is_seen(prefix_len: u32, item_lens: &[u32], query: u32, key: u32) -> bool {
    let places = item_lens.iter().flat_map(|&len| 0..len + 1).chain([0]);
    let places: Vec<u32> = places.collect();
    key <= query && (query < prefix_len || key < prefix_len || query < key + places[(query - prefix_len) as usize])
}

/// Two of FlashInfer's, and one without a prefix, after their prefix and whole.
pub fn multi_item_cases() -> Vec<Case> {
    let prompts =
        PROMPTS.map(|(prefix_len, items)| (MultiItem::new(kv_len(prefix_len, items), prefix_len, items), items));
    let prompts = prompts.map(|(prompt, items)| (prompt.unwrap(), kv_len(0, items)));
    let kv_lens = prompts.each_ref().map(|(prompt, _)| prompt.kv_len_tokens());
    let case = |name: &str, query_lens: [u32; 3], causal: bool| {
        let case = Case::new("", (8, 2), 128, 5, &query_lens, &kv_lens);
        let mut case = case.changed(format!("several items, {name}"), |config| {
            let config = if causal { config } else { config.non_causal() };
            config.with_mask(MaskForm::Bits)
        });
        let lens = query_lens.iter().zip(&prompts);
        case.modifiers.masks = lens.map(|(&len, (prompt, _))| prompt.mask(len).unwrap()).collect();
        case
    };
    let items = prompts.each_ref().map(|&(_, items)| items);
    vec![case("the prefix cached", items, true), case("whole prompts", kv_lens, true), case("not causal", items, false)]
}

/// A prompt's mask, element by element.
pub fn check_masks() {
    for (prefix_len, items) in PROMPTS.into_iter().chain([(5, &[] as &[u32]), (0, &[]), (1, &[1]), (40, &[0, 0, 7])]) {
        let kv_len = kv_len(prefix_len, items);
        let prompt = MultiItem::new(kv_len, prefix_len, items).unwrap();
        for query_len in [kv_len, kv_len - prefix_len, 1, 0] {
            let elements = (kv_len - query_len..kv_len).flat_map(|query| (0..kv_len).map(move |key| (query, key)));
            let expected: Vec<bool> = elements.map(|(query, key)| is_seen(prefix_len, items, query, key)).collect();
            assert!(prompt.mask(query_len).unwrap() == expected, "{prefix_len}, {items:?}, {query_len} queries");
        }
    }
}

const HEADS: (u32, u32) = (4, 2);
const DIM: usize = 64;

/// Attention over rotated queries and keys of `tokens`, whose numbers depend on what they are.
fn attend(device: &Device, tokens: &[u64], positions: &[i32], mask: Option<&[bool]>) -> Vec<u16> {
    let rows = |role: u64, heads: u32| -> Vec<u16> {
        let row = |&token: &u64| {
            let mut random = Random::keyed(&[role, token]);
            (0..heads as usize * DIM).map(move |_| bits(DType::Bf16, random.normal()))
        };
        tokens.iter().flat_map(row).collect()
    };
    let upload = |role, heads| device.upload(&rows(role, heads)).unwrap();
    let (q, k, v, out) = (upload(0, HEADS.0), upload(1, HEADS.1), upload(2, HEADS.1), upload(3, HEADS.0));
    let view = |memory: &Buffer, heads| {
        Rows::contiguous(memory.address(), DType::Bf16, tokens.len() as u64, heads, DIM as u32)
    };
    let positions = device.upload(positions).unwrap();
    let rope = Rope::new(device, RopeConfig::new(DIM as u32)).unwrap();
    let ids = RopePositions::Ids { address: positions.address() };
    // SAFETY: everything lives until the download, which waits.
    unsafe { rope.apply(&RopeRun::in_place(view(&q, HEADS.0), view(&k, HEADS.1), ids), Stream::default()) }.unwrap();

    let bits = mask.map(pack_mask).unwrap_or_default();
    let memory = device.upload(&bits).unwrap();
    let mask_memory = MaskMemory { address: memory.address(), bytes: bits.len() as u64 };
    let config = AttentionConfig::ragged(HEADS.0, HEADS.1, DIM as u32);
    let config = if mask.is_some() { config.with_mask(MaskForm::Bits) } else { config };
    let run = Run::ragged(view(&q, HEADS.0), view(&k, HEADS.1), view(&v, HEADS.1), view(&out, HEADS.0));
    let run = run.with_variant(VariantInputs { mask: mask.map(|_| mask_memory), ..VariantInputs::default() });
    // SAFETY: as above.
    unsafe { single::prefill(device, config, tokens.len() as u32, &run, Stream::default()) }.unwrap();
    out.download().unwrap()
}

/// An item's rows are those of a prompt of prefix and item alone, rotations included.
pub fn check_items(device: &Device) {
    const DELIMITER: u64 = 0;
    let (prefix, items) = ((100..109).collect::<Vec<u64>>(), [vec![1, 2, 3, 4, 5], vec![6], (7..19).collect()]);
    let mut tokens = [prefix.clone(), vec![DELIMITER]].concat();
    items.iter().for_each(|item| tokens.extend(item.iter().chain([&DELIMITER])));
    let lens = items.each_ref().map(|item| item.len() as u32);
    let prompt = MultiItem::new(tokens.len() as u32, prefix.len() as u32, &lens).unwrap();
    let kv_len = prompt.kv_len_tokens();
    let (mask, positions) = (prompt.mask(kv_len).unwrap(), prompt.positions(kv_len).unwrap());
    let together = attend(device, &tokens, &positions, Some(&mask));
    let mut begin = prefix.len() + 1;
    for item in &items {
        let alone: Vec<u64> = prefix.iter().chain(item).copied().collect();
        let positions: Vec<i32> = (0..alone.len() as i32).collect();
        let alone = attend(device, &alone, &positions, None);
        let row_elements = HEADS.0 as usize * DIM;
        let rows = |out: &[u16], first: usize| -> Vec<f64> {
            let rows = &out[first * row_elements..][..item.len() * row_elements];
            rows.iter().map(|&bits| value(DType::Bf16, bits) as f64).collect()
        };
        let (got, expected) = (rows(&together, begin), rows(&alone, prefix.len()));
        for (row, (got, expected)) in got.chunks(DIM).zip(expected.chunks(DIM)).enumerate() {
            let error = row_error(got, expected);
            assert!(error <= row_tolerance(DType::Bf16), "item at {begin}, row {row}: off by {error:.2e}");
        }
        begin += item.len() + 1;
    }
}
