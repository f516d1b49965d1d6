//! Plans: the planner's, and ones made by hand, where every tile of 16 rows meets its keys whole or in a fixed number
//! of pieces.

use crate::buffer::Buffer;
use crate::cases::Case;
use kernels_gpu::abi::plan::{DIRECT, MergeRow, PLAN_MAGIC, PlanHeader, WorkItem};
use kernels_gpu::abi::tile::ATTEND_TILE_ROWS;
use oxattn::{Limits, PageTable, Planner, QueryLengths, SplitMode, Target};

/// A plan image in memory.
pub struct PlanImage {
    /// The bytes.
    pub image: Buffer,
}

impl PlanImage {
    /// A workspace for `planner`'s images, all 0xff.
    pub fn unplanned(planner: &Planner) -> PlanImage {
        PlanImage { image: Buffer::filled(planner.workspace_size().image_bytes as usize, 0xff) }
    }

    /// Plans `case`, whose page ids start at `page_begin`, over whatever the image held before.
    pub fn plan(&mut self, planner: &mut Planner, case: &Case, page_begin: &[u32]) {
        let table = PageTable::csr(case.config.page_size_tokens, page_begin, &case.kv_lens).unwrap();
        let query_begin = case.query_begin();
        let plan = planner.plan(&table, QueryLengths::indptr(&query_begin).unwrap()).unwrap();
        let bytes = plan.image();
        self.image.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    }

    /// The image of these queues.
    pub fn of_queues(queues: &[Vec<WorkItem>], merge_rows: &[MergeRow], partial_rows: u32) -> PlanImage {
        let mut queue_begin = vec![0u32];
        queue_begin.extend(queues.iter().scan(0, |sum, queue| {
            *sum += queue.len() as u32;
            Some(*sum)
        }));
        let items = queues.concat();
        let queue_begin_offset = size_of::<PlanHeader>();
        let items_offset = (queue_begin_offset + 4 * queue_begin.len()).next_multiple_of(16);
        let merge_rows_offset = items_offset + size_of_val(items.as_slice());
        let image_bytes = merge_rows_offset + size_of_val(merge_rows);
        let header = PlanHeader {
            magic: PLAN_MAGIC,
            queues: queues.len() as u32,
            items: items.len() as u32,
            merge_rows: merge_rows.len() as u32,
            partial_rows,
            queue_begin_offset_bytes: queue_begin_offset as u32,
            items_offset_bytes: items_offset as u32,
            merge_rows_offset_bytes: merge_rows_offset as u32,
            epoch: 1,
            image_bytes: image_bytes as u64,
        };
        let mut image = Buffer::filled(image_bytes, 0xff);
        let mut put = |offset: usize, bytes: &[u8]| {
            image.as_mut_slice::<u8>()[offset..][..bytes.len()].copy_from_slice(bytes);
        };
        put(0, bytemuck::bytes_of(&header));
        put(queue_begin_offset, bytemuck::cast_slice(&queue_begin));
        put(items_offset, bytemuck::cast_slice(&items));
        put(merge_rows_offset, bytemuck::cast_slice(merge_rows));
        PlanImage { image }
    }

    /// What the image holds.
    pub fn header(&self) -> PlanHeader {
        *bytemuck::from_bytes(&self.image.as_slice::<u8>()[..size_of::<PlanHeader>()])
    }
}

/// A planner with room for any of `cases`, which share a configuration.
pub fn planner_for(cases: &[&Case], target: Target, mode: SplitMode) -> Planner {
    let largest = |of: &dyn Fn(&Case) -> u64| cases.iter().map(|case| of(case)).max().unwrap().max(1);
    let limits = Limits {
        max_requests: largest(&|case| case.kv_lens.len() as u64) as u32,
        max_query_tokens: largest(&|case| *case.query_begin().last().unwrap() as u64) as u32,
        max_kv_len_tokens: largest(&|case| case.kv_lens.iter().copied().max().unwrap_or(0) as u64) as u32,
        max_kv_tokens: largest(&|case| case.kv_lens.iter().map(|&len| len as u64).sum()),
    };
    Planner::new(cases[0].config, target, mode, limits).unwrap()
}

/// The planner's plan of `case`.
pub fn planned(case: &Case, page_begin: &[u32], target: Target, mode: SplitMode) -> PlanImage {
    let mut planner = planner_for(&[case], target, mode);
    let mut image = PlanImage::unplanned(&planner);
    image.plan(&mut planner, case, page_begin);
    image
}

/// The keys of every tile in `pieces` pieces, empty ones included; one piece writes its output directly. Items go
/// round `queues` queues. `page_begin` is where each request's page ids start.
pub fn forced_split(case: &Case, page_begin: &[u32], pieces: u32, queues: usize) -> PlanImage {
    let group = case.config.group();
    let query_begin = case.query_begin();
    let mut queue_items = vec![Vec::new(); queues];
    let (mut merge_rows, mut partial_rows, mut items) = (Vec::new(), 0, 0);
    for (request, (&query_len, &kv_len)) in case.query_lens.iter().zip(&case.kv_lens).enumerate() {
        for kv_head in 0..case.config.kv_heads {
            for row_begin in (0..query_len * group).step_by(ATTEND_TILE_ROWS as usize) {
                let rows = (query_len * group - row_begin).min(ATTEND_TILE_ROWS);
                for piece in 0..pieces {
                    let cut = |piece: u32| (kv_len as u64 * piece as u64 / pieces as u64) as u32;
                    let item = WorkItem {
                        request: request as u32,
                        query_begin_tokens: query_begin[request],
                        row_begin,
                        rows_and_head: WorkItem::pack(rows, kv_head),
                        kv_begin_tokens: cut(piece),
                        kv_end_tokens: cut(piece + 1),
                        kv_len_tokens: kv_len,
                        query_len_tokens: query_len,
                        page_begin: page_begin[request],
                        partial_begin: if pieces == 1 { DIRECT } else { partial_rows + piece },
                        partial_stride: pieces,
                        tile_rows: ATTEND_TILE_ROWS,
                    };
                    queue_items[items % queues].push(item);
                    items += 1;
                }
                if pieces > 1 {
                    merge_rows.extend((row_begin..row_begin + rows).map(|row| MergeRow {
                        token: query_begin[request] + row / group,
                        head: kv_head * group + row % group,
                        partial_begin: partial_rows + (row - row_begin) * pieces,
                        count: pieces,
                    }));
                    partial_rows += rows * pieces;
                }
            }
        }
    }
    PlanImage::of_queues(&queue_items, &merge_rows, partial_rows)
}
