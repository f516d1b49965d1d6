//! The oracle: attention, merge and append as their definitions read, in f64, one row at a time.
//!
//! In: closures that give the rows of queries, keys and values by logical position, so that pages, strides and
//! plans do not exist here. Out: [`State`]s. It shares no code with the executors or the kernels, makes no attempt
//! at speed, and stands for "correct" in tests and when a replay checks sampled rows.
//!
//! A row that sees no key is output 0 with LSE -inf.

use std::f64::consts::LN_2;

/// One (query token, query head) row of an attention, or part of one: its output and LSE.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// The values' weighted mean, `[head_dim]`.
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of `exp(score)`.
    pub lse: f64,
}

impl State {
    /// The LSE in base 2.
    pub fn lse2(&self) -> f64 {
        self.lse / LN_2
    }
}

/// One request, its tokens and heads counted from 0.
pub struct Request<'a> {
    /// New tokens; the last of them is at position `kv_len - 1`.
    pub query_len: usize,
    /// Cached tokens.
    pub kv_len: usize,
    /// Query heads that share a KV head.
    pub group: usize,
    /// Multiplies the raw scores.
    pub softmax_scale: f64,
    /// Whether token `t` sees key `k` only where `k <= t + kv_len - query_len`.
    pub causal: bool,
    /// The query of (token, query head), `[head_dim]`.
    pub q: &'a dyn Fn(usize, usize) -> Vec<f64>,
    /// The key of (position, KV head), `[head_dim]`.
    pub k: &'a dyn Fn(usize, usize) -> Vec<f64>,
    /// The value of (position, KV head), `[head_dim]`.
    pub v: &'a dyn Fn(usize, usize) -> Vec<f64>,
}

impl Request<'_> {
    /// Whether query token `token` sees the key at `position`.
    pub fn visible(&self, token: usize, position: usize) -> bool {
        position < self.kv_len && (!self.causal || position + self.query_len <= token + self.kv_len)
    }

    /// The row of query token `token` and query head `head`.
    pub fn attend(&self, token: usize, head: usize) -> State {
        let q = (self.q)(token, head);
        let kv_head = head / self.group;
        let positions: Vec<usize> = (0..self.kv_len).filter(|&position| self.visible(token, position)).collect();
        let scores: Vec<f64> =
            positions.iter().map(|&position| self.softmax_scale * dot(&q, &(self.k)(position, kv_head))).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if largest == f64::NEG_INFINITY {
            return State { out: vec![0.0; q.len()], lse: f64::NEG_INFINITY };
        }
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; q.len()];
        for (weight, &position) in weights.iter().zip(&positions) {
            for (out, v) in out.iter_mut().zip((self.v)(position, kv_head)) {
                *out += weight / sum * v;
            }
        }
        State { out, lse: largest + sum.ln() }
    }
}

/// The state of a row whose keys are those of all `states`, none of them in two. `states` must not be empty.
pub fn merge(states: &[State]) -> State {
    let head_dim = states[0].out.len();
    let largest = states.iter().map(|state| state.lse).fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return State { out: vec![0.0; head_dim], lse: f64::NEG_INFINITY };
    }
    let weights: Vec<f64> = states.iter().map(|state| (state.lse - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let out = (0..head_dim)
        .map(|column| weights.iter().zip(states).map(|(weight, state)| weight / sum * state.out[column]).sum())
        .collect();
    State { out, lse: largest + sum.ln() }
}

/// One of K and V: `pool[page][offset][kv_head]` is a row.
pub type Pool = Vec<Vec<Vec<Vec<f64>>>>;

/// Writes a token's rows, one a KV head, at `position` of the request whose page ids are `pages`.
pub fn append(pool: &mut Pool, pages: &[u32], position: usize, rows: &[Vec<f64>]) {
    let page_size = pool[0].len();
    let page = pages[position / page_size] as usize;
    pool[page][position % page_size] = rows.to_vec();
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} is not {b}");
    }

    /// Keys 0, ln 3 and 0 against a query of 1, worked by hand.
    #[test]
    fn a_row_worked_by_hand() {
        let keys = [0.0, 3f64.ln(), 0.0];
        let values = [10.0, 20.0, 60.0];
        let k = |position: usize, _: usize| vec![keys[position]];
        let v = |position: usize, _: usize| vec![values[position]];
        let q = |_: usize, _: usize| vec![1.0];
        let request =
            Request { query_len: 1, kv_len: 3, group: 1, softmax_scale: 1.0, causal: true, q: &q, k: &k, v: &v };
        let state = request.attend(0, 0);
        close(state.out[0], (10.0 + 3.0 * 20.0 + 60.0) / 5.0);
        close(state.lse, 5f64.ln());
        close(state.lse2(), 5f64.log2());
    }

    #[test]
    fn causal_is_bottom_right_and_blind_rows_are_empty() {
        let rows = |position: usize, _: usize| vec![position as f64];
        let zero = |_: usize, _: usize| vec![0.0];
        let (query_len, kv_len) = (4, 2);
        let request =
            Request { query_len, kv_len, group: 1, softmax_scale: 1.0, causal: true, q: &zero, k: &rows, v: &rows };
        let states: Vec<State> = (0..query_len).map(|token| request.attend(token, 0)).collect();
        assert_eq!(states[0], State { out: vec![0.0], lse: f64::NEG_INFINITY });
        assert_eq!(states[1], states[0]);
        assert_eq!(states[2], State { out: vec![0.0], lse: 0.0 });
        close(states[3].out[0], 0.5);
        close(states[3].lse, LN_2);
    }

    #[test]
    fn merge_weighs_by_lse_and_ignores_empty_states() {
        let empty = State { out: vec![0.0], lse: f64::NEG_INFINITY };
        let one = State { out: vec![1.0], lse: 0.0 };
        let three = State { out: vec![5.0], lse: 3f64.ln() };
        assert_eq!(merge(&[empty.clone(), empty.clone()]), empty);
        assert_eq!(merge(&[empty.clone(), one.clone(), empty]), one);
        let both = merge(&[one, three]);
        close(both.out[0], 4.0);
        close(both.lse, 4f64.ln());
    }

    #[test]
    fn append_finds_the_cell_past_a_page_edge() {
        let mut pool: Pool = vec![vec![vec![vec![0.0]]; 4]; 3];
        append(&mut pool, &[2, 0], 3, &[vec![3.0]]);
        append(&mut pool, &[2, 0], 4, &[vec![4.0]]);
        let mut expected: Pool = vec![vec![vec![vec![0.0]]; 4]; 3];
        expected[2][3][0][0] = 3.0;
        expected[0][0][0][0] = 4.0;
        assert_eq!(pool, expected);
    }
}
