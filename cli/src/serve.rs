//! A serving loop over a trace, without the attention: who runs in each step, and which pages they hold.
//!
//! In: requests, a batch limit and a pool of pages. Out: for each step the running requests with their pages; a step
//! decodes one token of each. Requests are admitted in order of arrival, the whole trace counting as arrived, as soon
//! as the batch has room and the pool can hold the request to its last token, so a running request never waits for a
//! page. The first request that does not fit holds back those behind it.
//!
//! Invariant: a page is free or belongs to one running request. Pages come from a shuffled free list, since a cache
//! that has served for a while is scattered.

use crate::trace::Request;

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
#[derive(Clone, Debug, PartialEq, Eq)]
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
}

/// The loop's state between two steps.
#[derive(Debug)]
pub struct Serving {
    limits: ServeLimits,
    /// Rows of the trace not yet admitted, the next one last.
    waiting: Vec<(usize, Request)>,
    running: Vec<Running>,
    free_pages: Vec<u32>,
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
        Ok(Serving { limits, waiting: in_order(requests), running: Vec::new(), free_pages, promised_pages: 0 })
    }

    /// Ends the step before and begins the next: finished requests leave with their pages, waiting ones are admitted,
    /// and each running one has a page for its next token. `None` when the trace is done.
    pub fn next_step(&mut self) -> Option<&[Running]> {
        let free_pages = &mut self.free_pages;
        self.running.retain_mut(|running| {
            let finished = running.generated_tokens == running.output_tokens;
            if finished {
                free_pages.append(&mut running.pages);
            }
            !finished
        });
        while self.running.len() < self.limits.batch
            && let Some(&(index, request)) = self.waiting.last()
            && self.promised_pages + last_pages(&request, self.limits.page_size_tokens) <= self.free_pages.len() as u64
        {
            self.waiting.pop();
            self.promised_pages += last_pages(&request, self.limits.page_size_tokens);
            self.running.push(Running {
                request: index,
                prompt_tokens: request.prompt_tokens,
                output_tokens: request.output_tokens,
                generated_tokens: 0,
                pages: Vec::new(),
            });
        }
        for running in &mut self.running {
            running.generated_tokens += 1;
            let wanted = running.kv_len_tokens().div_ceil(self.limits.page_size_tokens) as usize;
            let taken = wanted - running.pages.len();
            running.pages.extend(self.free_pages.drain(self.free_pages.len() - taken..));
            self.promised_pages -= taken as u64;
        }
        (!self.running.is_empty()).then_some(&self.running)
    }
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

/// Runs the loop ahead without pages, for `steps` steps at most.
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
    let mut waiting: Vec<_> = requests.iter().copied().enumerate().collect();
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
            .map(|&(prompt_tokens, output_tokens)| Request { arrival_ms: None, prompt_tokens, output_tokens })
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
