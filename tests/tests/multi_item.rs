//! Masks of prompts of several items, by FlashInfer's rule. What they do is in the tables of every executor.

use oxattn_tests::multi_item::check_masks;

#[test]
fn masks_are_by_each_token_s_place_in_its_item() {
    check_masks();
}
