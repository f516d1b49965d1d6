//! How long a plan will take: a model of memory bandwidth, fitted to one H200.
//!
//! In: the bytes that each queue's blocks read, and the rate at which the device reads. Out: microseconds of one call
//! with warm caches. A call takes [`START_US`]; then each block with work left reads at [`BLOCK_GB_PER_S`], or at an
//! equal share of what the device reads where that is less. So an uneven plan ends at the block's rate, not the
//! device's. Bytes that several row tiles of a request read come from memory once and from the L2 cache after that.
//!
//! Left out: computing, the fold of split rows, and what a page costs. So there is no prediction for plans with tall
//! items, which compute for longer than they read. Predicted over measured time, bf16, in pages of 16
//! (`docs/bench-decode.md`): 0.94 to 1.08 for 32 query heads on 8 KV heads of 128, split or not, the skewed batch 0.96,
//! and uncut 1.01. The worst of other decodes is 0.75: 64 query heads, one request of 8192 keys, where the fold counts
//! most.

use super::Plan;

/// From the launch to the first tile, and from the last one to the end.
const START_US: f64 = 5.2;

/// What a block reads alone: a queue of 100,000 keys, 51.2 MB a block, takes it 1362 us.
const BLOCK_GB_PER_S: f64 = 37.6;

/// Part of what reading alone reaches that long even batches reach.
const READ_PART: f64 = 0.97;

impl Plan {
    /// Microseconds that a run of the plan takes on a GPU that reads `read_gb_per_s` gigabytes a second, within a tenth
    /// for most decodes on an H200; 0 if there is nothing to run, and nothing for a plan with tall items.
    pub fn predict_us(&self, read_gb_per_s: f64) -> Option<f64> {
        if self.totals.tall_units > 0 {
            return None;
        }
        if self.items().is_empty() {
            return Some(0.0);
        }
        let teams = self.target.teams(self.config.kv_heads);
        let key_bytes = self.config.key_and_value_bytes();
        let block_key_bytes = (key_bytes * teams.heads_per_block as u64) as f64;
        let keys_of = |items: &[_]| items.iter().map(super::explain::keys).sum::<u64>();
        let mut queue_keys: Vec<u64> = self.queues().map(keys_of).collect();
        queue_keys.sort_unstable();
        let read_keys: u64 = queue_keys.iter().sum();
        let kv_tokens = self.totals.kv_tokens - self.sharing.saved_kv_tokens;
        let from_memory = (kv_tokens as f64 / read_keys.max(1) as f64).min(1.0);

        // From the emptiest queue to the fullest: until each ends, it and all after it read side by side.
        let (mut us, mut ended_keys) = (START_US, 0);
        for (ended, &keys) in queue_keys.iter().enumerate() {
            let blocks = (queue_keys.len() - ended) as f64 * teams.blocks as f64;
            let share_gb_per_s = READ_PART * read_gb_per_s / (blocks * from_memory);
            let bytes = (keys - ended_keys) as f64 * block_key_bytes;
            us += bytes / (1e3 * share_gb_per_s.min(BLOCK_GB_PER_S));
            ended_keys = keys;
        }
        Some(us)
    }
}

#[cfg(test)]
mod tests {
    use crate::{AttentionConfig, Explain, Limits, PageTable, Planner, QueryLengths, SplitMode, Target};
    use kernels_gpu::abi::tile::{AttendTile, Family};

    /// An H200 that reads `read_gb_per_s`, with 32 query heads on 8 KV heads of 128.
    fn explained(kv_lens: &[u32], query_len: u32, mode: SplitMode, read_gb_per_s: u32) -> Explain {
        // Short items alone.
        let target = Target::for_tile(132, AttendTile::new(128, Family::Sm90a).unwrap(), true).with_tall_rows(0);
        let limits =
            Limits { max_requests: 256, max_query_tokens: 1024, max_kv_len_tokens: 131_072, max_kv_tokens: 1 << 20 };
        let config = AttentionConfig::new(32, 8, 128, 16);
        let mut planner = Planner::new(config, target.with_read_gb_per_s(read_gb_per_s), mode, limits).unwrap();
        let table = PageTable::block_table(16, 8192, kv_lens).unwrap();
        planner.plan(&table, QueryLengths::uniform(query_len)).unwrap().explain()
    }

    fn predicted_us(kv_lens: &[u32], mode: SplitMode, read_gb_per_s: u32) -> f64 {
        explained(kv_lens, 1, mode, read_gb_per_s).predicted_us.unwrap()
    }

    fn skewed() -> Vec<u32> {
        [vec![512; 63], vec![100_000]].concat()
    }

    /// What the GPU suite measured on 2026-11-30, read-only ceiling 4630 GB/s.
    #[test]
    fn predictions_are_within_a_tenth_of_what_an_h200_took() {
        for (kv_lens, mode, measured_us) in [
            (vec![1024], SplitMode::Balanced, 6.42),
            (vec![8192], SplitMode::Balanced, 13.5),
            (vec![32_768], SplitMode::Balanced, 37.1),
            (vec![131_072], SplitMode::Balanced, 128.1),
            (vec![1024; 16], SplitMode::Balanced, 21.1),
            (vec![8192; 16], SplitMode::Balanced, 129.9),
            (vec![1024; 64], SplitMode::Balanced, 65.3),
            (vec![8192; 64], SplitMode::Balanced, 494.6),
            (vec![1024; 256], SplitMode::Balanced, 247.4),
            (skewed(), SplitMode::Balanced, 131.2),
            (skewed(), SplitMode::Unsplit, 1367.1),
        ] {
            let predicted_us = predicted_us(&kv_lens, mode, 4630);
            let ratio = predicted_us / measured_us;
            assert!((1.0 / 1.1..1.1).contains(&ratio), "{mode:?} {kv_lens:?}: {predicted_us:.1} for {measured_us} us");
        }
    }

    #[test]
    fn bandwidth_helps_even_plans_and_not_one_long_queue() {
        let even = |gb_per_s| predicted_us(&[8192; 64], SplitMode::Balanced, gb_per_s);
        assert!((even(2353) / even(4706) - 2.0).abs() < 0.02);
        let uncut = |gb_per_s| predicted_us(&skewed(), SplitMode::Unsplit, gb_per_s);
        // The short requests share what there is; they take 2% of the time.
        assert!((uncut(2353) / uncut(4706) - 1.0).abs() < 0.03);
        assert_eq!(predicted_us(&[], SplitMode::Balanced, 4706), 0.0);
        assert_eq!(explained(&[8192], 1, SplitMode::Balanced, 0).predicted_us, None);
    }

    #[test]
    fn what_is_computed_for_longer_than_it_is_read_is_not_predicted() {
        let target = Target::for_tile(132, AttendTile::new(128, Family::Sm90a).unwrap(), true);
        let limits = Limits { max_requests: 1, max_query_tokens: 512, max_kv_len_tokens: 8192, max_kv_tokens: 8192 };
        let config = AttentionConfig::new(32, 8, 128, 16);
        let mut planner = Planner::new(config, target.with_read_gb_per_s(4706), SplitMode::Balanced, limits).unwrap();
        let table = PageTable::block_table(16, 512, &[8192u32]).unwrap();
        let plan = planner.plan(&table, QueryLengths::uniform(512)).unwrap();
        assert_eq!((plan.predict_us(4706.0), plan.explain().predicted_us), (None, None));
        assert!(plan.explain().tall_units > 0);
    }

    /// 128 row tiles read the same keys, which come from memory once.
    #[test]
    fn what_row_tiles_share_is_read_at_the_blocks_own_rate() {
        let chunk = explained(&[8192], 512, SplitMode::Balanced, 4706);
        assert_eq!(chunk.units, 128);
        let us = |gb_per_s: f64| chunk.kv_bytes as f64 / (1e3 * gb_per_s);
        let predicted_us = chunk.predicted_us.unwrap();
        assert!(predicted_us < us(4706.0), "{chunk}");
        assert!((us(264.0 * 37.6)..1.2 * us(264.0 * 37.6)).contains(&predicted_us), "{chunk}");
    }
}
