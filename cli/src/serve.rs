//! A serving loop over a trace, without the attention: who runs in each step, and which pages they hold.
//!
//! In: requests, a batch limit and a pool of pages. Out: for each step the running requests with their pages; a step
//! decodes one token of each. Requests are admitted in order of arrival, the whole trace counting as arrived, as soon
//! as the batch has room and the pool can hold the request to its last token, so a running request never waits for a
//! page. The first request that does not fit holds back those behind it.
//!
//! Prompts whose leading blocks are known to be equal share the pages that these fill, as long as one of them runs: an
//! engine's prefix cache without a memory. Requests stand in the batch in the order of their blocks, so that those that
//! share most are neighbours.
//!
//! Invariant: a page is free, belongs to one running request, or holds a part of a prompt that all its owners have. Pages
//! come from a shuffled free list, since a cache that has served for a while is scattered.

use crate::trace::{BLOCK_TOKENS, Request};
use std::collections::HashMap;
use std::sync::Arc;

/// What bounds the loop.
#[derive(Clone, Copy, Debug)]
pub struct ServeLimits {
    /// Requests that may run at once.
    pub batch: usize,
    /// Pages in the pool.
    pub pages: u32,
    /// Tokens of a page.
    pub page_size_tokens: u32,
    /// Of the shuffled free list.
    pub seed: u64,
}

/// A request the loop cannot serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// One request is larger than the pool.
    #[error(
        "request {request} of the trace needs {needed_pages} pages for its {tokens} tokens; the pool has {pool_pages}"
    )]
    TooLarge {
        /// Its row in the trace, from 0.
        request: usize,
        /// Prompt and output together.
        tokens: u64,
        /// Pages of its last step.
        needed_pages: u64,
        /// Pages there are.
        pool_pages: u32,
    },
    /// Page ids are 32 bits.
    #[error("the trace needs {needed_pages} pages at once; supported are at most {}", u32::MAX)]
    TooManyPages {
        /// Pages of the fullest step.
        needed_pages: u64,
    },
}

/// A request in the batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// Its row in the trace, from 0.
    pub request: usize,
    /// Tokens in the cache before the first step.
    pub prompt_tokens: u32,
    /// Steps it runs for.
    pub output_tokens: u32,
    /// Tokens decoded, the step's own included.
    pub generated_tokens: u32,
    /// Its pages, in order of position; as many as `kv_len_tokens` needs.
    pub pages: Vec<u32>,
    /// The hashes of its prompt's blocks, if they are known.
    pub prompt_blocks: Arc<[u64]>,
    /// Leading tokens of the prompt that others had in the cache when it was admitted.
    pub cached_tokens: u32,
}

impl Running {
    /// Keys in the cache in this step, the new token's own included.
    pub fn kv_len_tokens(&self) -> u32 {
        self.prompt_tokens + self.generated_tokens
    }

    /// Whether this step is its first, so that the prompt has yet to be put into the cache.
    pub fn is_new(&self) -> bool {
        self.generated_tokens == 1
    }

    /// The hash of the prompt's block that a position lies in; `None` past the prompt, and where hashes are not known.
    pub fn block(&self, position: u32) -> Option<u64> {
        let block = self.prompt_blocks.get((position / BLOCK_TOKENS) as usize).copied();
        block.filter(|_| position < self.prompt_tokens)
    }
}

/// What a full page of a prompt holds: the hash of the block that its last token lies in, which counts all tokens before,
/// and which page of the prompt it is.
type Content = (u64, u32);

/// A page in the cache for all whose prompts begin alike.
#[derive(Debug)]
struct CachedPage {
    page: u32,
    owners: u32,
}

/// The page table of a step, as arrays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    /// Keys of each request.
    pub kv_lens: Vec<u32>,
    /// Where the page ids of each request begin, and the end of the last one's.
    pub page_begin: Vec<u32>,
    /// The page ids of one request after another.
    pub page_ids: Vec<u32>,
}

impl Tables {
    /// Of a step's requests.
    pub fn new(running: &[Running]) -> Tables {
        let mut page_begin = vec![0];
        for running in running {
            page_begin.push(page_begin[page_begin.len() - 1] + running.pages.len() as u32);
        }
        Tables {
            kv_lens: running.iter().map(Running::kv_len_tokens).collect(),
            page_begin,
            page_ids: running.iter().flat_map(|running| running.pages.iter().copied()).collect(),
        }
    }

    /// The first `batch` requests of a trace in flight together, each at the first token it decodes.
    pub fn in_flight(requests: &[Request], batch: usize, page_size_tokens: u32) -> Result<Tables, ServeError> {
        let Forecast { pages, .. } = forecast(requests, batch, page_size_tokens, Some(1))?;
        let limits = ServeLimits { batch, pages, page_size_tokens, seed: 1 };
        Ok(Tables::new(Serving::new(requests, limits)?.next_step().unwrap_or_default()))
    }
}

/// The loop's state between two steps.
#[derive(Debug)]
pub struct Serving {
    limits: ServeLimits,
    /// Rows of the trace not yet admitted, the next one last.
    waiting: Vec<(usize, Request)>,
    running: Vec<Running>,
    free_pages: Vec<u32>,
    cached: HashMap<Content, CachedPage>,
    /// Pages the running requests will still take from `free_pages`.
    promised_pages: u64,
}

impl Serving {
    /// A loop with every request waiting. Refuses a request that the pool cannot hold by itself.
    pub fn new(requests: &[Request], limits: ServeLimits) -> Result<Serving, ServeError> {
        for (index, request) in requests.iter().enumerate() {
            let needed_pages = last_pages(request, limits.page_size_tokens);
            if needed_pages > limits.pages as u64 {
                return Err(ServeError::TooLarge {
                    request: index,
                    tokens: request.prompt_tokens as u64 + request.output_tokens as u64,
                    needed_pages,
                    pool_pages: limits.pages,
                });
            }
        }
        let mut free_pages: Vec<u32> = (0..limits.pages).collect();
        fastrand::Rng::with_seed(limits.seed).shuffle(&mut free_pages);
        Ok(Serving {
            limits,
            waiting: in_order(requests),
            running: Vec::new(),
            free_pages,
            cached: HashMap::new(),
            promised_pages: 0,
        })
    }

    /// Ends the step before and begins the next: finished requests leave with their pages, waiting ones are admitted,
    /// and each running one has a page for its next token. `None` when the trace is done.
    pub fn next_step(&mut self) -> Option<&[Running]> {
        let finished = self.running.extract_if(.., |running| running.generated_tokens == running.output_tokens);
        for running in finished.collect::<Vec<_>>() {
            self.release(running);
        }
        while self.running.len() < self.limits.batch
            && let Some((index, request)) = self.waiting.pop()
        {
            if let Err(request) = self.admit(index, request) {
                self.waiting.push((index, request));
                break;
            }
        }
        self.running.sort_by(|a, b| a.prompt_blocks.cmp(&b.prompt_blocks));
        for running in &mut self.running {
            running.generated_tokens += 1;
            let wanted = running.kv_len_tokens().div_ceil(self.limits.page_size_tokens) as usize;
            let taken = wanted - running.pages.len();
            running.pages.extend(self.free_pages.drain(self.free_pages.len() - taken..));
            self.promised_pages -= taken as u64;
        }
        (!self.running.is_empty()).then_some(&self.running)
    }

    /// Lets a request run, or gives it back where the pool cannot hold it to its last token.
    fn admit(&mut self, index: usize, request: Request) -> Result<(), Request> {
        let page_size_tokens = self.limits.page_size_tokens;
        let contents = contents(request.prompt_tokens, &request.prompt_blocks, page_size_tokens);
        let cached = contents.iter().take_while(|content| self.cached.contains_key(content)).count();
        let needed_pages = last_pages(&request, page_size_tokens) - cached as u64;
        if self.promised_pages + needed_pages > self.free_pages.len() as u64 {
            return Err(request);
        }
        // The others of its full pages are there for those admitted after it.
        self.promised_pages += needed_pages - (contents.len() - cached) as u64;
        let mut pages = Vec::new();
        for content in contents {
            let free_pages = &mut self.free_pages;
            let of_all = self.cached.entry(content).or_insert_with(|| CachedPage {
                page: free_pages.pop().expect("as many are free as are promised"),
                owners: 0,
            });
            of_all.owners += 1;
            pages.push(of_all.page);
        }
        self.running.push(Running {
            request: index,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            generated_tokens: 0,
            pages,
            prompt_blocks: request.prompt_blocks,
            cached_tokens: cached as u32 * page_size_tokens,
        });
        Ok(())
    }

    /// Frees the pages that nobody else has.
    fn release(&mut self, running: Running) {
        let contents = contents(running.prompt_tokens, &running.prompt_blocks, self.limits.page_size_tokens);
        for content in &contents {
            if let Some(of_all) = self.cached.get_mut(content) {
                of_all.owners -= 1;
                if of_all.owners == 0 {
                    self.free_pages.push(of_all.page);
                    self.cached.remove(content);
                }
            }
        }
        self.free_pages.extend(&running.pages[contents.len()..]);
    }

    /// Pages that the requests of a step may name together at most: with shared ones more than the pool has.
    pub fn most_named_pages(requests: &[Request], limits: ServeLimits) -> u64 {
        if requests.iter().all(|request| request.prompt_blocks.is_empty()) {
            return limits.pages as u64;
        }
        let mut pages: Vec<u64> = requests.iter().map(|request| last_pages(request, limits.page_size_tokens)).collect();
        pages.sort_unstable_by(|a, b| b.cmp(a));
        pages.iter().take(limits.batch).sum()
    }
}

/// What the full pages of a prompt hold, where that is known. The last page, which decoding fills up, is the request's own.
fn contents(prompt_tokens: u32, prompt_blocks: &[u64], page_size_tokens: u32) -> Vec<Content> {
    let pages = if prompt_blocks.is_empty() { 0 } else { prompt_tokens / page_size_tokens };
    let last_token = |page: u32| (page + 1) * page_size_tokens - 1;
    (0..pages).map(|page| (prompt_blocks[(last_token(page) / BLOCK_TOKENS) as usize], page)).collect()
}

/// What a replay will need and do when pages hold nobody back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// The fewest pages with which every request is admitted as soon as the batch has room, and in which the largest
    /// request of the trace fits.
    pub pages: u32,
    /// Steps until the trace is done, or the limit given.
    pub steps: u64,
}

/// Runs the loop ahead without pages, for `steps` steps at most, as if no page were shared.
pub fn forecast(
    requests: &[Request],
    batch: usize,
    page_size_tokens: u32,
    steps: Option<u64>,
) -> Result<Forecast, ServeError> {
    let limit = steps.unwrap_or(u64::MAX);
    let mut waiting = in_order(requests);
    // (steps left, pages at its last step) of each running request.
    let mut running: Vec<(u32, u64)> = Vec::new();
    let mut needed_pages =
        requests.iter().map(|request| last_pages(request, page_size_tokens)).max().unwrap_or_default();
    let mut step = 0;
    while step < limit {
        while running.len() < batch
            && let Some((_, request)) = waiting.pop()
        {
            running.push((request.output_tokens, last_pages(&request, page_size_tokens)));
        }
        needed_pages = needed_pages.max(running.iter().map(|&(_, pages)| pages).sum());
        // To the next step in which somebody leaves.
        let Some(skipped) = running.iter().map(|&(left, _)| left).min() else { break };
        step += skipped as u64;
        running.retain_mut(|(left, _)| {
            *left -= skipped;
            *left > 0
        });
    }
    let pages = u32::try_from(needed_pages).map_err(|_| ServeError::TooManyPages { needed_pages })?;
    Ok(Forecast { pages, steps: step.min(limit) })
}

/// Rows with their place in the trace, the first to arrive last.
fn in_order(requests: &[Request]) -> Vec<(usize, Request)> {
    let mut waiting: Vec<_> = requests.iter().cloned().enumerate().collect();
    waiting.sort_by_key(|(_, request)| request.arrival_ms);
    waiting.reverse();
    waiting
}

/// Pages a request holds in its last step.
fn last_pages(request: &Request, page_size_tokens: u32) -> u64 {
    (request.prompt_tokens as u64 + request.output_tokens as u64).div_ceil(page_size_tokens as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn requests(lengths: &[(u32, u32)]) -> Vec<Request> {
        lengths
            .iter()
            .map(|&(prompt_tokens, output_tokens)| Request { prompt_tokens, output_tokens, ..Request::default() })
            .collect()
    }

    fn limits(batch: usize, pages: u32) -> ServeLimits {
        ServeLimits { batch, pages, page_size_tokens: 4, seed: 7 }
    }

    /// Who runs in each step, with its keys.
    fn schedule(serving: &mut Serving) -> Vec<Vec<(usize, u32)>> {
        let mut steps = Vec::new();
        while let Some(running) = serving.next_step() {
            steps.push(running.iter().map(|running| (running.request, running.kv_len_tokens())).collect());
        }
        steps
    }

    #[test]
    fn requests_enter_in_order_as_others_leave() {
        let trace = requests(&[(5, 2), (3, 1), (8, 3)]);
        let mut serving = Serving::new(&trace, limits(2, 100)).unwrap();
        assert_eq!(schedule(&mut serving), [vec![(0, 6), (1, 4)], vec![(0, 7), (2, 9)], vec![(2, 10)], vec![(2, 11)]]);
    }

    #[test]
    fn arrival_times_decide_the_order_and_ties_keep_the_file_order() {
        let mut trace = requests(&[(1, 1), (1, 1), (1, 1), (1, 1)]);
        for (request, arrival_ms) in trace.iter_mut().zip([30, 10, 20, 10]) {
            request.arrival_ms = Some(arrival_ms);
        }
        let order: Vec<usize> =
            schedule(&mut Serving::new(&trace, limits(1, 1)).unwrap()).iter().map(|step| step[0].0).collect();
        assert_eq!(order, [1, 3, 2, 0]);
    }

    #[test]
    fn a_request_waits_until_the_pool_can_hold_its_last_token() {
        // 3 + 2 tokens are 2 pages of 4 at the end, though 1 at first: of 3 pages the second request gets none until
        // the first leaves. The small third one stays behind it.
        let trace = requests(&[(3, 2), (3, 2), (1, 1)]);
        let mut serving = Serving::new(&trace, limits(3, 3)).unwrap();
        assert_eq!(schedule(&mut serving), [vec![(0, 4)], vec![(0, 5)], vec![(1, 4), (2, 2)], vec![(1, 5)]]);
    }

    #[test]
    fn a_request_larger_than_the_pool_is_refused_by_name() {
        let error = Serving::new(&requests(&[(1, 1), (15, 2)]), limits(2, 4)).unwrap_err();
        assert_eq!(error.to_string(), "request 1 of the trace needs 5 pages for its 17 tokens; the pool has 4");
    }

    #[test]
    fn no_page_has_two_owners_and_all_are_free_at_the_end() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let lengths: Vec<(u32, u32)> = (0..60).map(|_| (random.u32(1..90), random.u32(1..30))).collect();
            let trace = requests(&lengths);
            let limits = ServeLimits { batch: 9, pages: 120, page_size_tokens: 1 + random.u32(1..7), seed };
            let mut serving = Serving::new(&trace, limits).unwrap();
            let mut decoded = vec![0; trace.len()];
            let mut held: Vec<Vec<u32>> = vec![Vec::new(); trace.len()];
            while let Some(running) = serving.next_step() {
                assert!(running.len() <= limits.batch);
                let mut owned = HashSet::new();
                for running in running {
                    decoded[running.request] += 1;
                    assert_eq!(running.generated_tokens, decoded[running.request]);
                    assert_eq!(running.is_new(), decoded[running.request] == 1);
                    assert_eq!(
                        running.kv_len_tokens(),
                        trace[running.request].prompt_tokens + decoded[running.request]
                    );
                    assert_eq!(running.pages.len() as u32, running.kv_len_tokens().div_ceil(limits.page_size_tokens));
                    // Pages written in earlier steps stay where they are.
                    assert!(running.pages.starts_with(&held[running.request]));
                    held[running.request].clone_from(&running.pages);
                    for &page in &running.pages {
                        assert!(page < limits.pages && owned.insert(page), "page {page} has two owners");
                    }
                }
                assert_eq!(owned.len() + serving.free_pages.len(), limits.pages as usize);
            }
            assert!(decoded.iter().zip(&trace).all(|(&decoded, request)| decoded == request.output_tokens));
            assert_eq!(serving.promised_pages, 0);
            let free: HashSet<u32> = serving.free_pages.iter().copied().collect();
            assert_eq!((free.len(), serving.free_pages.len()), (120, 120));
        }
    }

    #[test]
    fn equal_prompts_share_full_pages_while_one_of_them_runs() {
        let with_blocks = |prompt_tokens, output_tokens, blocks: &[u64]| Request {
            prompt_tokens,
            output_tokens,
            prompt_blocks: blocks.into(),
            ..Request::default()
        };
        // Pages of 512: the third begins like the first two, which stand apart in the trace.
        let trace = [
            with_blocks(1300, 2, &[1, 2, 3]),
            with_blocks(600, 1, &[7, 8]),
            with_blocks(1100, 3, &[1, 2, 4]),
            with_blocks(700, 2, &[1, 5]),
        ];
        let limits = ServeLimits { batch: 3, pages: 8, page_size_tokens: 512, seed: 7 };
        assert_eq!(Serving::most_named_pages(&trace, limits), 3 + 3 + 2);
        let mut serving = Serving::new(&trace, limits).unwrap();
        // In the order of their blocks.
        let step = |serving: &mut Serving| -> Vec<Running> { serving.next_step().unwrap().to_vec() };
        let first = step(&mut serving);
        assert_eq!(first.iter().map(|running| running.request).collect::<Vec<_>>(), [0, 2, 1]);
        assert_eq!(first.iter().map(|running| running.cached_tokens).collect::<Vec<_>>(), [0, 1024, 0]);
        assert_eq!(first[0].pages[..2], first[1].pages[..2]);
        assert_ne!(first[0].pages[2], first[1].pages[2]);
        assert_eq!(first[1].block(1024), Some(4));
        assert_eq!(first[1].block(1100), None);
        // 3 pages, 1 more, and 2.
        assert_eq!(serving.free_pages.len(), 2);
        let second = step(&mut serving);
        assert_eq!(second.iter().map(|running| running.request).collect::<Vec<_>>(), [0, 2, 3]);
        assert_eq!(second[2].cached_tokens, 512);
        assert_eq!(second[2].pages[0], first[0].pages[0]);
        // The first leaves, and the two others keep what they have of it.
        let third = step(&mut serving);
        assert_eq!(third.iter().map(|running| running.request).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(third[0].pages[..2], first[0].pages[..2]);
        assert_eq!(serving.free_pages.len(), 8 - 4);
        assert!(serving.next_step().is_none() && serving.cached.is_empty());
        assert_eq!(serving.free_pages.iter().collect::<HashSet<_>>().len(), 8);
    }

    #[test]
    fn a_pool_too_small_for_all_apart_holds_them_together() {
        let equal =
            Request { prompt_tokens: 1024, output_tokens: 1, prompt_blocks: [1, 2].into(), ..Request::default() };
        let limits = ServeLimits { batch: 4, pages: 5, page_size_tokens: 512, seed: 7 };
        // Two pages in common and one each: three fit.
        let steps = schedule(&mut Serving::new(&vec![equal; 4], limits).unwrap());
        assert_eq!(steps.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
    }

    #[test]
    fn pages_are_shared_by_equal_prefixes_alone() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let trace: Vec<Request> = (0..40)
                .map(|_| {
                    let prompt_tokens = random.u32(1..3000);
                    // Chained: a block's hash spells those before it.
                    let chained = (0..prompt_tokens.div_ceil(BLOCK_TOKENS)).scan(1, |hash, _| {
                        *hash = 3 * *hash + random.u64(..2);
                        Some(*hash)
                    });
                    let prompt_blocks = chained.collect();
                    Request { prompt_tokens, output_tokens: random.u32(1..30), prompt_blocks, ..Request::default() }
                })
                .collect();
            let limits = ServeLimits { batch: 9, pages: 700, page_size_tokens: 1 + random.u32(4..700), seed };
            let mut serving = Serving::new(&trace, limits).unwrap();
            while let Some(running) = serving.next_step() {
                assert!(running.is_sorted_by(|a, b| a.prompt_blocks <= b.prompt_blocks));
                let mut contents: HashMap<u32, (u32, Option<u64>)> = HashMap::new();
                let mut named = 0;
                for running in running {
                    named += running.pages.len() as u64;
                    for (position, &page) in running.pages.iter().enumerate() {
                        let end = (position as u32 + 1) * limits.page_size_tokens;
                        let content = (position as u32, running.block(end - 1));
                        // Seen twice: the same full page of the prompt.
                        if let Some(before) = contents.insert(page, content) {
                            assert!(before == content && content.1.is_some(), "page {page} of {before:?}, {content:?}");
                        }
                    }
                }
                assert!(named <= Serving::most_named_pages(&trace, limits));
                assert_eq!(contents.len() + serving.free_pages.len(), limits.pages as usize);
            }
            assert_eq!((serving.promised_pages, serving.cached.len()), (0, 0));
            assert_eq!(serving.free_pages.iter().collect::<HashSet<_>>().len(), limits.pages as usize);
        }
    }

    #[test]
    fn pages_are_scattered_and_the_seed_decides_how() {
        let pages = |seed| {
            let mut serving = Serving::new(&requests(&[(255, 1)]), ServeLimits { seed, ..limits(1, 64) }).unwrap();
            serving.next_step().unwrap()[0].pages.clone()
        };
        assert_eq!(pages(1), pages(1));
        assert_ne!(pages(1), pages(2));
        let neighbours = pages(1).windows(2).filter(|pair| pair[1] == pair[0].wrapping_add(1)).count();
        assert!(neighbours < 8, "{neighbours} of 63 pages follow their neighbour");
    }

    #[test]
    fn the_pool_asked_for_is_the_smallest_that_holds_nobody_back() {
        let trace = requests(&[(5, 2), (3, 1), (8, 3), (30, 1), (2, 9), (9, 9)]);
        for batch in 1..=6 {
            let Forecast { pages, steps } = forecast(&trace, batch, 4, None).unwrap();
            let unbounded = schedule(&mut Serving::new(&trace, limits(batch, 1000)).unwrap());
            assert_eq!(steps, unbounded.len() as u64);
            assert_eq!(forecast(&trace, batch, 4, Some(3)).unwrap().steps, 3);
            assert_eq!(schedule(&mut Serving::new(&trace, limits(batch, pages)).unwrap()), unbounded, "batch {batch}");
            let smaller = Serving::new(&trace, limits(batch, pages - 1));
            assert!(smaller.is_err() || schedule(&mut smaller.unwrap()) != unbounded, "batch {batch}, {pages} pages");
        }
        // One step of the first two: 2 pages and 1; the largest request still has to fit.
        assert_eq!(forecast(&trace, 2, 4, Some(1)), Ok(Forecast { pages: 8, steps: 1 }));
        assert_eq!(forecast(&[], 2, 4, None), Ok(Forecast { pages: 0, steps: 0 }));
    }
}
