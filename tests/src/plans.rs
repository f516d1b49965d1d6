//! Plans: the planner's, and ones made by hand, where every tile of 16 rows meets its keys whole or in a fixed number
//! of pieces.

use crate::buffer::{Access, Buffer, Region};
use crate::cases::{Case, Pages};
use kernels_gpu::abi::plan::{PLAN_MAGIC, PlanHeader, WorkItem};
use kernels_gpu::abi::tile::{ATTEND_TILE_ROWS, Teams};
use oxattn::{Limits, PageTable, PageTableError, Planner, QueryLengths, SplitMode, Target};

/// A plan image in memory.
pub struct PlanImage {
    /// The bytes.
    pub image: Buffer,
    /// The blocks that walk it.
    pub teams: Teams,
    /// Where the first rows of ragged keys and values start.
    pub first_kv_rows_offset_bytes: u64,
}

impl PlanImage {
    /// A workspace for the images of `planner`, which is for `kv_heads` heads on `target`, all 0xff.
    pub fn unplanned(planner: &Planner, target: Target, kv_heads: u32) -> PlanImage {
        let image = Buffer::filled(planner.workspace_size().image_bytes as usize, 0xff);
        let first_kv_rows_offset_bytes = planner.workspace_size().first_kv_rows_offset_bytes;
        PlanImage { image, teams: target.teams(kv_heads), first_kv_rows_offset_bytes }
    }

    /// Plans `case`, whose page ids start at `page_begin`, over whatever the image held before.
    pub fn plan(&mut self, planner: &mut Planner, case: &Case, page_begin: &[u32]) {
        let table = table_of(case, page_begin).unwrap();
        let query_begin = case.query_begin();
        let plan = planner.plan(&table, QueryLengths::indptr(&query_begin).unwrap()).unwrap();
        let bytes = plan.image();
        self.image.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    }

    /// The image of these queues, one a team of `teams`: tall items, then short ones. `first_kv_rows` are those of ragged
    /// keys. What lies between its arrays is 0xff.
    pub fn of_queues(
        teams: Teams,
        queues: &[[Vec<WorkItem>; 2]],
        groups: u32,
        partial_rows: u32,
        first_kv_rows: &[u32],
    ) -> PlanImage {
        assert_eq!(queues.len(), teams.teams as usize);
        let mut queue_begin = vec![0u32];
        queue_begin.extend(queues.as_flattened().iter().scan(0, |sum, run| {
            *sum += run.len() as u32;
            Some(*sum)
        }));
        let items = queues.as_flattened().concat();
        let arrivals = vec![0u32; groups as usize];
        let arrivals_offset = size_of::<PlanHeader>();
        let queue_begin_offset = (arrivals_offset + 4 * arrivals.len()).next_multiple_of(16);
        let first_kv_rows_offset = (queue_begin_offset + 4 * queue_begin.len()).next_multiple_of(16);
        let items_offset = (first_kv_rows_offset + size_of_val(first_kv_rows)).next_multiple_of(16);
        let image_bytes = items_offset + size_of_val(items.as_slice());
        let header = PlanHeader {
            magic: PLAN_MAGIC,
            teams: teams.teams,
            items: items.len() as u32,
            groups,
            partial_rows,
            arrivals_offset_bytes: arrivals_offset as u32,
            queue_begin_offset_bytes: queue_begin_offset as u32,
            items_offset_bytes: items_offset as u32,
            folds: 0,
            folds_offset_bytes: 0,
            epoch: 1,
            image_bytes: image_bytes as u64,
        };
        let mut image = Buffer::filled(image_bytes, 0xff);
        let mut put = |offset: usize, bytes: &[u8]| {
            image.as_mut_slice::<u8>()[offset..][..bytes.len()].copy_from_slice(bytes);
        };
        put(0, bytemuck::bytes_of(&header));
        put(arrivals_offset, bytemuck::cast_slice(&arrivals));
        put(queue_begin_offset, bytemuck::cast_slice(&queue_begin));
        put(first_kv_rows_offset, bytemuck::cast_slice(first_kv_rows));
        put(items_offset, bytemuck::cast_slice(&items));
        PlanImage { image, teams, first_kv_rows_offset_bytes: first_kv_rows_offset as u64 }
    }

    /// What the image holds.
    pub fn header(&self) -> PlanHeader {
        *bytemuck::from_bytes(&self.image.as_slice::<u8>()[..size_of::<PlanHeader>()])
    }

    /// The work items.
    pub fn items(&self) -> &[WorkItem] {
        let header = self.header();
        let bytes = &self.image.as_slice::<u8>()[header.items_offset_bytes as usize..];
        bytemuck::cast_slice(&bytes[..header.items as usize * size_of::<WorkItem>()])
    }

    /// The counts of arrived pieces, zero between launches.
    pub fn arrivals(&self) -> &[u32] {
        let header = self.header();
        let bytes = &self.image.as_slice::<u8>()[header.arrivals_offset_bytes as usize..];
        bytemuck::cast_slice(&bytes[..4 * header.groups as usize])
    }

    /// The image's memory: a launch counts in `arrivals` and only reads the rest.
    pub fn regions(&mut self) -> [Region; 3] {
        let (header, whole) = (self.header(), self.image.region(Access::Read));
        let counts =
            header.arrivals_offset_bytes as usize..header.arrivals_offset_bytes as usize + 4 * header.groups as usize;
        let part = |range: std::ops::Range<usize>, access| Region {
            address: whole.address + range.start as u64,
            bytes: range.len(),
            access,
        };
        [
            part(0..counts.start, Access::Read),
            part(counts.clone(), Access::Update),
            part(counts.end..whole.bytes, Access::Read),
        ]
    }
}

/// The table of `case`, whose page ids, or rows, start at `page_begin`.
pub fn table_of<'a>(case: &'a Case, page_begin: &'a [u32]) -> Result<PageTable<'a>, PageTableError> {
    match (case.config.ragged, case.pages) {
        (false, _) if !case.shared_tokens.is_empty() => {
            let table = PageTable::csr(case.config.page_size_tokens, page_begin, &case.kv_lens)?;
            table.with_shared_prefixes(&case.shared_tokens)
        }
        (false, _) => PageTable::csr(case.config.page_size_tokens, page_begin, &case.kv_lens),
        (true, Pages::Adjacent) => PageTable::ragged(page_begin),
        (true, _) => PageTable::ragged_with_lens(page_begin, &case.kv_lens),
    }
}

/// The least limits that hold each of `cases`.
pub fn limits_for(cases: &[&Case]) -> Limits {
    let largest = |of: &dyn Fn(&Case) -> u64| cases.iter().map(|case| of(case)).max().unwrap().max(1);
    Limits {
        max_requests: largest(&|case| case.kv_lens.len() as u64) as u32,
        max_query_tokens: largest(&|case| *case.query_begin().last().unwrap() as u64) as u32,
        max_kv_len_tokens: largest(&|case| case.kv_lens.iter().copied().max().unwrap_or(0) as u64) as u32,
        max_kv_tokens: largest(&|case| case.kv_lens.iter().map(|&len| len as u64).sum()),
    }
}

/// A planner with room for any of `cases`, which share a configuration.
pub fn planner_for(cases: &[&Case], target: Target, mode: SplitMode) -> Planner {
    Planner::new(cases[0].config, target, mode, limits_for(cases)).unwrap()
}

/// The planner's plan of `case`.
pub fn planned(case: &Case, page_begin: &[u32], target: Target, mode: SplitMode) -> PlanImage {
    let mut planner = planner_for(&[case], target, mode);
    let mut image = PlanImage::unplanned(&planner, target, case.config.kv_heads);
    image.plan(&mut planner, case, page_begin);
    image
}

/// The keys of every tile in `pieces` pieces, empty ones included; one piece writes its output directly. Items go
/// round the queues of `teams`. `page_begin` is where each request's page ids, or rows, start. Requests of more than 16 rows have
/// tall tiles of `tall_rows`, if that is not 0.
pub fn forced_split(case: &Case, page_begin: &[u32], pieces: u32, teams: Teams, tall_rows: u32) -> PlanImage {
    forced_split_in_steps(case, page_begin, (pieces, 1), teams, tall_rows)
}

/// The same with cuts at multiples of `step_tokens`.
pub fn forced_split_in_steps(
    case: &Case,
    page_begin: &[u32],
    (pieces, step_tokens): (u32, u32),
    teams: Teams,
    tall_rows: u32,
) -> PlanImage {
    let (group, kv_heads) = (case.config.group(), case.config.kv_heads);
    let query_begin = case.query_begin();
    let mut queues = vec![[const { Vec::new() }; 2]; teams.teams as usize];
    let (mut groups, mut partial_rows, mut items) = (0, 0, 0);
    for (request, (&query_len, &kv_len)) in case.query_lens.iter().zip(&case.kv_lens).enumerate() {
        let is_tall = tall_rows > 0 && query_len * group > ATTEND_TILE_ROWS;
        let tile_rows = if is_tall { tall_rows } else { ATTEND_TILE_ROWS };
        for row_begin in (0..query_len * group).step_by(tile_rows as usize) {
            let rows = (query_len * group - row_begin).min(tile_rows);
            for piece in 0..pieces {
                let cut = |piece: u32| match (kv_len as u64 * piece as u64 / pieces as u64) as u32 {
                    tokens if piece < pieces => tokens / step_tokens * step_tokens,
                    tokens => tokens,
                };
                let item = WorkItem {
                    request: request as u32,
                    query_begin_tokens: query_begin[request],
                    row_begin,
                    rows,
                    kv_begin_tokens: cut(piece),
                    kv_end_tokens: cut(piece + 1),
                    query_position: kv_len as i32 - query_len as i32,
                    page_begin: if case.config.ragged { request as u32 } else { page_begin[request] },
                    pieces,
                    piece,
                    partial_begin: partial_rows,
                    group: groups,
                };
                queues[items % teams.teams as usize][usize::from(!is_tall)].push(item);
                items += 1;
            }
            if pieces > 1 {
                groups += kv_heads;
                partial_rows += kv_heads * rows * pieces;
            }
        }
    }
    let first_kv_rows = if case.config.ragged { page_begin } else { &[] };
    PlanImage::of_queues(teams, &queues, groups, partial_rows, first_kv_rows)
}
