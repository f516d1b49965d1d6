//! What patterns become, worked by hand, and every refusal.

use super::*;
use crate::config::DType;

fn config() -> AttentionConfig {
    AttentionConfig::ragged(4, 2, 64).non_causal()
}

/// Blocks of 4 queries and 4 keys over 7 queries and 10 keys: both last blocks are short.
fn bsr<'a>(indptr: &'a [u32], indices: &'a [u32]) -> Bsr<'a> {
    Bsr::new(7, 10, 4, 4, indptr, indices)
}

/// The bits of a mask as rows of text, each request's in turn.
fn rows(sparse: &BlockSparse) -> Vec<String> {
    let (mut rows, mut bit) = (Vec::new(), 0);
    for (request, &kv_len) in sparse.kv_lens.iter().enumerate() {
        for _ in 0..sparse.query_lengths().len_of(request) {
            let is_set = |bit: usize| sparse.mask_bits()[bit / 8] >> (bit % 8) & 1 == 1;
            rows.push((bit..bit + kv_len as usize).map(|bit| if is_set(bit) { '1' } else { '.' }).collect());
            bit += kv_len as usize;
        }
        bit = bit.next_multiple_of(8);
    }
    assert_eq!(sparse.mask_bits().len(), bit / 8);
    rows
}

#[test]
fn row_blocks_are_requests_and_column_blocks_pages() {
    let sparse = BlockSparse::bsr(config(), &bsr(&[0, 3, 3], &[2, 0, 1])).unwrap();
    // 2 divides blocks of 4 and 10 keys; block 2 is keys 8 and 9, page 4.
    assert_eq!(sparse.page_indices(), [4, 0, 1, 2, 3]);
    let table = sparse.page_table().unwrap();
    assert_eq!((table.page_size_tokens(), table.kv_lens()), (2, &[10, 0][..]));
    assert_eq!([0, 1].map(|request| sparse.query_lengths().len_of(request)), [4, 3]);
    let limits = Limits { max_requests: 2, max_query_tokens: 7, max_kv_len_tokens: 10, max_kv_tokens: 10 };
    assert_eq!(sparse.limits(), limits);
    let config = AttentionConfig { ragged: false, page_size_tokens: 2, ..config() };
    assert_eq!((*sparse.config(), sparse.mask_bits()), (config, &[][..]));
    table.validate_pages(sparse.page_indices(), 5).unwrap();
}

#[test]
fn the_causal_rule_is_a_mask_only_where_it_cuts() {
    let causal = AttentionConfig { causal: true, ..config() };
    // Query 0 sees keys 0 to 3, query 4 keys 0 to 7.
    let whole = BlockSparse::bsr(causal, &bsr(&[0, 1, 3], &[0, 0, 1])).unwrap();
    assert_eq!((whole.config().mask, whole.config().causal), (None, false));
    let cut = BlockSparse::bsr(causal, &bsr(&[0, 2, 4], &[0, 1, 2, 0])).unwrap();
    assert_eq!(cut.config().mask, Some(MaskForm::Bits));
    let expected = ["1111....", "11111...", "111111..", "1111111.", "..1111", "1.1111", "111111"];
    assert_eq!(rows(&cut), expected);
    // More queries than keys: the first rows see nothing, and blocks in the future are masked.
    let few = BlockSparse::bsr(causal, &Bsr::new(4, 2, 2, 1, &[0u32, 2, 4], &[1u32, 0, 1, 0])).unwrap();
    assert_eq!(rows(&few), ["..", "..", ".1", "11"]);
}

#[test]
fn the_causal_rule_stays_one_where_each_request_s_is_the_same() {
    let causal = AttentionConfig { causal: true, ..config() };
    type Arrays<'a> = (&'a [u32], &'a [u32]);
    let kept = |config: AttentionConfig, bsr: Bsr<'_>| {
        let sparse = BlockSparse::bsr(config, &bsr).unwrap();
        (sparse.config().causal, sparse.config().mask.is_some())
    };
    // 10 queries and keys in blocks of 4, the last short; then row blocks of two column blocks.
    let square: fn(Arrays<'static>) -> Bsr<'static> = |(indptr, indices)| Bsr::new(10, 10, 4, 4, indptr, indices);
    for (expected, bsr) in [
        ((true, false), square((&[0, 1, 3, 5], &[0, 0, 1, 0, 2]))),
        ((true, false), square((&[0, 1, 3, 5], &[0, 0, 1, 1, 2]))),
        // Its own block first, not at all, or beside the future.
        ((false, true), square((&[0, 1, 3, 5], &[0, 1, 0, 1, 2]))),
        ((false, true), square((&[0, 1, 2, 4], &[0, 0, 1, 2]))),
        ((false, true), square((&[0, 2, 4, 5], &[0, 1, 0, 1, 2]))),
        // No block is cut.
        ((false, false), square((&[0, 0, 1, 2], &[0, 1]))),
        ((false, true), Bsr::new(7, 10, 4, 2, &[0u32, 4, 8], &[0u32, 1, 2, 3, 0, 2, 3, 4])),
    ] {
        assert_eq!(kept(causal, bsr), expected, "{bsr:?}");
        let masked = causal.with_mask(MaskForm::Bits);
        assert_eq!(kept(masked, bsr), (false, true), "{bsr:?}");
    }
    let aligned = Bsr::new(8, 12, 4, 2, &[0u32, 3, 6], &[0u32, 2, 3, 1, 4, 5]);
    assert_eq!(kept(causal, aligned), (true, false));
    assert_eq!(kept(causal, square((&[0, 1, 3, 5], &[0, 0, 1, 0, 2])).with_mask(&[true; 80])), (false, true));
}

#[test]
fn the_inner_mask_follows_the_blocks_listed() {
    // Of each block, elements where row is column.
    let mask: Vec<bool> = (0..3 * 16).map(|element| element % 16 / 4 == element % 4).collect();
    let sparse = BlockSparse::bsr(config(), &bsr(&[0, 2, 3], &[2, 1, 0]).with_mask(&mask)).unwrap();
    assert_eq!(rows(&sparse), ["1.1...", ".1.1..", "....1.", ".....1", "1...", ".1..", "..1."]);
    // Elements of even sum, and query 3 sees keys up to 6 of block 1.
    let mask: Vec<bool> = (0..3 * 16).map(|element| (element / 4 + element) % 2 == 0).collect();
    let causal = AttentionConfig { causal: true, ..config() };
    let sparse = BlockSparse::bsr(causal, &bsr(&[0, 2, 3], &[2, 1, 0]).with_mask(&mask)).unwrap();
    assert_eq!(rows(&sparse), ["......", "......", "..1...", "...1..", "1.1.", ".1.1", "1.1."]);
}

#[test]
fn a_config_with_a_mask_keeps_it() {
    let masked = config().with_mask(MaskForm::Bits);
    let sparse = BlockSparse::bsr(masked, &bsr(&[0, 1, 2], &[0, 2])).unwrap();
    assert_eq!(
        (sparse.config().mask, rows(&sparse)),
        (Some(MaskForm::Bits), ["1111", "1111", "1111", "1111", "11", "11", "11"].map(String::from).to_vec())
    );
}

/// Two heads, 3 queries as 1 + 2 and 3 + 0, 4 keys as 1 + 3 and 2 + 2.
fn variable(layout: Layout) -> VariableBlocks<'static> {
    VariableBlocks {
        query_tokens: 3,
        kv_tokens: 4,
        row_block_tokens: &[1, 2, 3, 0],
        column_block_tokens: &[1, 3, 2, 2],
        block_map: &[false, true, true, true, false, true, true, true],
        layout,
    }
}

#[test]
fn heads_of_variable_blocks_are_requests() {
    let nhd = BlockSparse::variable(config(), &variable(Layout::Nhd)).unwrap();
    assert_eq!(nhd.page_indices(), [2, 4, 6, 0, 2, 4, 6, 5, 7, 1, 3, 5, 7]);
    let hnd = BlockSparse::variable(config(), &variable(Layout::Hnd)).unwrap();
    assert_eq!(hnd.page_indices(), [1, 2, 3, 0, 1, 2, 3, 6, 7, 4, 5, 6, 7]);
    for sparse in [nhd, hnd] {
        assert_eq!(sparse.page_table().unwrap().kv_lens(), [3, 4, 2, 4]);
        assert_eq!([0, 1, 2, 3].map(|request| sparse.query_lengths().len_of(request)), [1, 2, 3, 0]);
        let AttentionConfig { query_heads, kv_heads, page_size_tokens, .. } = *sparse.config();
        assert_eq!((query_heads, kv_heads, page_size_tokens), (2, 1, 1));
        sparse.page_table().unwrap().validate_pages(sparse.page_indices(), 8).unwrap();
    }
    let causal = AttentionConfig { causal: true, ..config() };
    let sparse = BlockSparse::variable(causal, &variable(Layout::Nhd)).unwrap();
    assert_eq!(rows(&sparse), ["1..", "111.", "1111", "..", "1.", "11"]);
}

#[test]
fn rows_become_pages() {
    let sparse = BlockSparse::bsr(config(), &bsr(&[0, 1, 2], &[0, 2])).unwrap();
    let k = Rows::contiguous(4096, DType::Bf16, 10, 2, 64).with_strides(640, 64);
    let cache = sparse.cache(k, Rows { address: 8192, ..k }).unwrap();
    let CacheRows { pages, page_stride, token_stride, head_stride, .. } = cache.k;
    assert_eq!((pages, page_stride, token_stride, head_stride), (5, 1280, 640, 64));
    assert_eq!((cache.k.address, cache.v.address), (4096, 8192));
    cache.views(sparse.config()).unwrap();

    for (layout, [token, head], row) in [
        (Layout::Nhd, [128, 64], 64),
        (Layout::Nhd, [144, 72], 72),
        (Layout::Hnd, [64, 256], 64),
        (Layout::Hnd, [80, 320], 80),
    ] {
        let sparse = BlockSparse::variable(config(), &variable(layout)).unwrap();
        let k = Rows::contiguous(4096, DType::Bf16, 4, 2, 64).with_strides(token, head);
        let cache = sparse.cache(k, k).unwrap();
        assert_eq!((cache.k.pages, cache.k.page_stride), (8, row));
        cache.views(sparse.config()).unwrap();
    }
    // One head, or one key, has one stride.
    let one_head = AttentionConfig::ragged(2, 1, 64).non_causal();
    let blocks = VariableBlocks {
        row_block_tokens: &[3],
        column_block_tokens: &[4],
        block_map: &[true],
        ..variable(Layout::Nhd)
    };
    let sparse = BlockSparse::variable(one_head, &blocks).unwrap();
    let k = Rows::contiguous(4096, DType::Bf16, 4, 1, 64).with_strides(640, -1);
    assert_eq!(sparse.cache(k, k).unwrap().k.page_stride, 640);
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let sparse = BlockSparse::bsr(config(), &bsr(&[0, 1, 2], &[0, 2])).unwrap();
    let fine = Rows::contiguous(4096, DType::Bf16, 10, 2, 64);
    for (rows, message) in [
        (Rows { tokens: 11, ..fine }, "v.tokens is 11; this call needs 10"),
        (Rows { heads: 1, ..fine }, "v.heads is 1; this call needs 2"),
        (Rows { head_dim: 128, ..fine }, "v.head_dim is 128; this call needs 64"),
        (Rows { dtype: DType::F16, ..fine }, "v is f16; this call needs bf16"),
    ] {
        assert_eq!(sparse.cache(fine, rows).unwrap_err().to_string(), message);
    }
    let wider_values = BlockSparse::bsr(config().with_value_head_dim(128), &bsr(&[0, 1, 2], &[0, 2])).unwrap();
    let values = Rows::contiguous(4096, DType::Bf16, 10, 2, 128);
    wider_values.cache(fine, values).unwrap().views(wider_values.config()).unwrap();
    for (k, v, message) in [
        (fine, fine, "v.head_dim is 64; this call needs 128"),
        (values, values, "k.head_dim is 128; this call needs 64"),
    ] {
        assert_eq!(wider_values.cache(k, v).unwrap_err().to_string(), message);
    }
    let far = fine.with_strides(i64::MAX / 2, 64);
    assert!(sparse.cache(far, far).unwrap().views(sparse.config()).is_err());
    let fine = Rows::contiguous(4096, DType::Bf16, 4, 2, 64);
    for (layout, message) in [
        (Layout::Nhd, "k.token_stride is 192; with Nhd rows of 2 heads it must be 128"),
        (Layout::Hnd, "k.head_stride is 64; with Hnd rows of 2 heads it must be 768"),
    ] {
        let sparse = BlockSparse::variable(config(), &variable(layout)).unwrap();
        assert_eq!(sparse.cache(fine.with_strides(192, 64), fine).unwrap_err().to_string(), message);
    }
}

#[test]
fn patterns_that_do_not_hold_together_are_refused() {
    let cases: Vec<(Bsr<'_>, &str)> = vec![
        (Bsr { row_block_tokens: 0, ..bsr(&[0, 0, 0], &[]) }, "row_block_tokens is 0; it must be at least 1"),
        (Bsr { column_block_tokens: 0, ..bsr(&[0, 0, 0], &[]) }, "column_block_tokens is 0; it must be at least 1"),
        (bsr(&[0, 1], &[0]), "indptr has 2 entries; expected 3"),
        (bsr(&[], &[]), "indptr has 0 entries; expected 3"),
        (bsr(&[1, 1, 1], &[0]), "indptr[0] is 1; it must be 0"),
        (bsr(&[0, 2, 1], &[0, 1]), "indptr falls from 2 to 1 at request 1; it must not decrease"),
        (bsr(&[0, 1, 2], &[0]), "indices has 1 entries; expected 2"),
        (bsr(&[0, 1, 2], &[0, 1, 2]), "indices has 3 entries; expected 2"),
        (bsr(&[0, 1, 2], &[2, 3]), "row block 1 lists column block 3; there are 3"),
        (bsr(&[0, 1, 4], &[2, 0, 2, 0]), "row block 1 lists column block 0 twice"),
        (Bsr::new(7, 10, 4, 4, &[0i32, -1, 0], &[0i32; 0]), "indptr[1] is -1; it must not be negative"),
        (Bsr::new(7, 10, 4, 4, &[0i32, 1, 1], &[-2i32]), "indices[0] is -2; it must not be negative"),
        (bsr(&[0, 1, 1], &[0]).with_mask(&[true; 15]), "mask has 15 entries; expected 16"),
    ];
    for (bsr, message) in cases {
        assert_eq!(BlockSparse::bsr(config(), &bsr).unwrap_err().to_string(), message);
    }
    let fine = variable(Layout::Nhd);
    let cases: Vec<(VariableBlocks<'_>, &str)> = vec![
        (
            VariableBlocks { row_block_tokens: &[1, 2, 3], ..fine },
            "row_block_tokens has 3 entries, which is not a multiple of kv_heads = 2",
        ),
        (
            VariableBlocks { column_block_tokens: &[4], ..fine },
            "column_block_tokens has 1 entries, which is not a multiple of kv_heads = 2",
        ),
        (
            VariableBlocks { row_block_tokens: &[1, 2, 3, 1], ..fine },
            "row_block_tokens of KV head 1 add up to 4; there are 3 tokens",
        ),
        (
            VariableBlocks { column_block_tokens: &[u32::MAX, 1, 2, 2], ..fine },
            "column_block_tokens of KV head 0 add up to 4294967296; there are 4 tokens",
        ),
        (
            VariableBlocks { row_block_tokens: &[], ..fine },
            "row_block_tokens of KV head 0 add up to 0; there are 3 tokens",
        ),
        (VariableBlocks { block_map: &[true; 7], ..fine }, "block_map has 7 entries; expected 8"),
        (
            VariableBlocks { kv_tokens: 1 << 31, column_block_tokens: &[1 << 31, 0, 0, 1 << 31], ..fine },
            "kv_tokens * kv_heads is 4294967296; supported is at most 4294967295",
        ),
    ];
    for (blocks, message) in cases {
        assert_eq!(BlockSparse::variable(config(), &blocks).unwrap_err().to_string(), message);
    }
}

#[test]
fn more_than_a_plan_can_name_is_refused() {
    // Two row blocks of 2^31 keys in pages of 1.
    let keys = (1 << 31) - 1;
    let bsr = Bsr::new(3, keys, 1, keys - 1, &[0u32, 2, 4, 6], &[0u32, 1, 0, 1, 0, 1]);
    let error = BlockSparse::bsr(config(), &bsr).unwrap_err().to_string();
    assert_eq!(error, "page ids is 6442450941; supported is at most 4294967295");
    let bsr = Bsr::new(1, u32::MAX - 1023, 1, 1 << 31, &[0u32, 2], &[0u32, 1]);
    let error = BlockSparse::bsr(config(), &bsr).unwrap_err().to_string();
    assert_eq!(error, "kv_len of request 0 is 4294966272; supported is at most 2147483647");
}

#[test]
fn attentions_that_read_positions_are_refused() {
    let pattern = bsr(&[0, 0, 0], &[]);
    let positions = "is set; it reads positions, which blocks that are listed do not keep";
    for (config, message) in [
        (config().with_window(Some(3), None), format!("window_left {positions}")),
        (config().with_window(None, Some(3)), format!("window_right {positions}")),
        (config().with_alibi(), format!("alibi {positions}")),
        (config().with_rope(crate::RopeConfig::new(64)), format!("rope {positions}")),
        (config().with_custom_variant("near"), format!("custom_variant {positions}")),
        (config().with_mask(MaskForm::Bytes), "mask is set; masks of block-sparse patterns are MaskForm::Bits".into()),
        (
            AttentionConfig::new(4, 2, 64, 16),
            "the attention has pages of 16 tokens; block-sparse patterns take AttentionConfig::ragged".into(),
        ),
        (AttentionConfig::ragged(4, 2, 63), "head_dim is 63; supported are multiples of 8 from 8 to 512".into()),
    ] {
        assert_eq!(BlockSparse::bsr(config, &pattern).unwrap_err().to_string(), message);
        assert_eq!(BlockSparse::variable(config, &variable(Layout::Nhd)).unwrap_err().to_string(), message);
    }
    let error = BlockSparse::variable(config().with_sinks(), &variable(Layout::Nhd)).unwrap_err().to_string();
    assert_eq!(error, "sinks is set; the KV heads of variable blocks are requests, which share their sinks");
}
