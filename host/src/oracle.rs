//! The oracle: attention, merge and append as their definitions read, in f64, one row at a time.
//!
//! In: closures that give the rows of queries, keys and values by logical position, so that pages, strides and
//! plans do not exist here. Out: [`State`]s. It shares no code with the executors or the kernels, makes no attempt
//! at speed, and stands for "correct" in tests and when a replay checks sampled rows.
//!
//! A row that sees no key is output 0 with LSE -inf, or its sink's where it has one.

use std::f64::consts::LN_2;

/// One (query token, query head) row of an attention, or part of one: its output and LSE.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// The values' weighted mean, `[value_head_dim]`.
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

/// An RMS norm of rows: `x / sqrt(mean(x^2) + epsilon) * weight`.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// Added to the mean square.
    pub epsilon: f64,
    /// Of an element of a row.
    pub weight: &'a dyn Fn(usize) -> f64,
}

/// A rotary embedding.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// First elements of a row, which are rotated.
    pub dim: usize,
    /// Whether pair `i` is elements `2 i` and `2 i + 1`, and not `i` and `i + dim / 2`.
    pub interleaved: bool,
    /// Of a pair: radians from a position to the next.
    pub frequency: &'a dyn Fn(usize) -> f64,
}

/// What an attention does beside or instead of plain softmax; by default nothing.
#[derive(Clone, Copy, Default)]
pub struct Rules<'a> {
    /// Position `p` sees key `k` only where `k >= p - window_left`.
    pub window_left: Option<usize>,
    /// Position `p` sees key `k` only where `k <= p + window_right`.
    pub window_right: Option<usize>,
    /// Whether (query token, position) may meet.
    pub mask: Option<&'a dyn Fn(usize, usize) -> bool>,
    /// Divides the scaled scores.
    pub temperature: Option<f64>,
    /// Scaled scores `s` become `cap * tanh(s / cap)`.
    pub soft_cap: Option<f64>,
    /// Of a query head: `slope * (k - p)` is added to a logit.
    pub alibi_slope: Option<&'a dyn Fn(usize) -> f64>,
    /// Of a query head, a query's position and a key: what a user-defined variant adds to the logit.
    pub bias: Option<&'a dyn Fn(usize, i64, usize) -> f64>,
    /// Of a query head: a logit that counts in the softmax and has no value.
    pub sink: Option<&'a dyn Fn(usize) -> f64>,
    /// Query rows are normalised.
    pub query_norm: Option<Norm<'a>>,
    /// Key rows are.
    pub key_norm: Option<Norm<'a>>,
    /// Both are rotated then, keys by their positions.
    pub rotation: Option<Rotation<'a>>,
    /// Of a query token: what its row is rotated by, if not by its position.
    pub query_position: Option<&'a dyn Fn(usize) -> i64>,
    /// Weights are `sigmoid(logit + bias)`, not a softmax; there is no LSE, which reads 0.
    pub sigmoid_bias: Option<f64>,
}

impl Rules<'_> {
    /// A query row at `position` as it meets the keys.
    pub fn changed_query(&self, position: i64, row: Vec<f64>) -> Vec<f64> {
        changed(self.query_norm, self.rotation, position, row)
    }

    /// A key row at `position` as it meets the queries.
    pub fn changed_key(&self, position: i64, row: Vec<f64>) -> Vec<f64> {
        changed(self.key_norm, self.rotation, position, row)
    }
}

/// A row normalised and then rotated.
fn changed(norm: Option<Norm<'_>>, rotation: Option<Rotation<'_>>, position: i64, mut row: Vec<f64>) -> Vec<f64> {
    if let Some(Norm { epsilon, weight }) = norm {
        let mean = dot(&row, &row) / row.len() as f64;
        row.iter_mut().enumerate().for_each(|(column, x)| *x *= weight(column) / (mean + epsilon).sqrt());
    }
    if let Some(Rotation { dim, interleaved, frequency }) = rotation {
        for pair in 0..dim / 2 {
            let (first, second) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + dim / 2) };
            let (sine, cosine) = (position as f64 * frequency(pair)).sin_cos();
            let (a, b) = (row[first], row[second]);
            (row[first], row[second]) = (a * cosine - b * sine, a * sine + b * cosine);
        }
    }
    row
}

/// One request, its tokens and heads counted from 0.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// New tokens; the last of them is at position `kv_len - 1`.
    pub query_len: usize,
    /// Cached tokens.
    pub kv_len: usize,
    /// Query heads that share a KV head.
    pub group: usize,
    /// Elements of a value, and of an output.
    pub value_head_dim: usize,
    /// Multiplies the raw scores.
    pub softmax_scale: f64,
    /// Whether token `t` sees key `k` only where `k <= t + kv_len - query_len`.
    pub causal: bool,
    /// The rest.
    pub rules: Rules<'a>,
    /// The query of (token, query head), `[head_dim]`.
    pub q: &'a dyn Fn(usize, usize) -> Vec<f64>,
    /// The key of (position, KV head), `[head_dim]`.
    pub k: &'a dyn Fn(usize, usize) -> Vec<f64>,
    /// The value of (position, KV head), `[value_head_dim]`.
    pub v: &'a dyn Fn(usize, usize) -> Vec<f64>,
}

impl Request<'_> {
    /// Position of a query token among the keys.
    fn position(&self, token: usize) -> i64 {
        token as i64 + self.kv_len as i64 - self.query_len as i64
    }

    /// Whether query token `token` sees the key at `position`.
    pub fn visible(&self, token: usize, position: usize) -> bool {
        let Rules { window_left, window_right, mask, .. } = self.rules;
        let behind = self.position(token) - position as i64;
        position < self.kv_len
            && (!self.causal || behind >= 0)
            && window_left.is_none_or(|left| behind <= left as i64)
            && window_right.is_none_or(|right| -behind <= right as i64)
            && mask.is_none_or(|mask| mask(token, position))
    }

    fn logit(&self, token: usize, head: usize, position: usize, q: &[f64]) -> f64 {
        let Rules { temperature, soft_cap, alibi_slope, bias, .. } = self.rules;
        let k = self.rules.changed_key(position as i64, (self.k)(position, head / self.group));
        let mut logit = self.softmax_scale * dot(q, &k);
        if let Some(temperature) = temperature {
            logit /= temperature;
        }
        if let Some(cap) = soft_cap {
            logit = cap * (logit / cap).tanh();
        }
        if let Some(slope) = alibi_slope {
            logit += slope(head) * (position as i64 - self.position(token)) as f64;
        }
        if let Some(bias) = bias {
            logit += bias(head, self.position(token), position);
        }
        logit
    }

    /// The row of query token `token` and query head `head`.
    pub fn attend(&self, token: usize, head: usize) -> State {
        let position = self.rules.query_position.map_or(self.position(token), |position| position(token));
        let q = self.rules.changed_query(position, (self.q)(token, head));
        let positions: Vec<usize> = (0..self.kv_len).filter(|&position| self.visible(token, position)).collect();
        let logits: Vec<f64> = positions.iter().map(|&position| self.logit(token, head, position, &q)).collect();
        let values = |weights: &[f64]| {
            let mut out = vec![0.0; self.value_head_dim];
            for (weight, &position) in weights.iter().zip(&positions) {
                for (out, v) in out.iter_mut().zip((self.v)(position, head / self.group)) {
                    *out += weight * v;
                }
            }
            out
        };
        if let Some(bias) = self.rules.sigmoid_bias {
            let weights: Vec<f64> = logits.iter().map(|logit| 1.0 / (1.0 + (-logit - bias).exp())).collect();
            return State { out: values(&weights), lse: 0.0 };
        }
        let sink = self.rules.sink.map_or(f64::NEG_INFINITY, |sink| sink(head));
        let largest = logits.iter().copied().fold(sink, f64::max);
        if largest == f64::NEG_INFINITY {
            return State { out: vec![0.0; self.value_head_dim], lse: f64::NEG_INFINITY };
        }
        let sum = logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>() + (sink - largest).exp();
        let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp() / sum).collect();
        State { out: values(&weights), lse: largest + sum.ln() }
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
        let request = Request {
            query_len: 1,
            kv_len: 3,
            group: 1,
            value_head_dim: 1,
            softmax_scale: 1.0,
            causal: true,
            rules: Rules::default(),
            q: &q,
            k: &k,
            v: &v,
        };
        let state = request.attend(0, 0);
        close(state.out[0], (10.0 + 3.0 * 20.0 + 60.0) / 5.0);
        close(state.lse, 5f64.ln());
        close(state.lse2(), 5f64.log2());

        // The last two keys, a sink that weighs 4, logits of 0 and -1 * ln 3.
        let slope = |_: usize| -(3f64.ln());
        let sink = |_: usize| 4f64.ln();
        let window_left = Some(1);
        let rules = Rules { window_left, alibi_slope: Some(&slope), sink: Some(&sink), ..Rules::default() };
        let state = Request { rules, ..request }.attend(0, 0);
        // Key 1 is one before the query: its logit is ln 3 + ln 3.
        close(state.out[0], (9.0 * 20.0 + 60.0) / 14.0);
        close(state.lse, 14f64.ln());

        // A bias is the caller's; this one is the slope's.
        let bias = |_: usize, position: i64, key: usize| slope(0) * (key as i64 - position) as f64;
        let biased = Rules { alibi_slope: None, bias: Some(&bias), ..rules };
        assert_eq!(Request { rules: biased, ..request }.attend(0, 0), state);

        let rules = Rules { soft_cap: Some(0.5), temperature: Some(2.0), ..Rules::default() };
        let state = Request { rules, ..request }.attend(0, 0);
        let middle = (0.5 * 3f64.ln().tanh()).exp();
        close(state.lse, (2.0 + middle).ln());

        let mask = |_: usize, position: usize| position == 1;
        let rules = Rules { mask: Some(&mask), sigmoid_bias: Some(-(3f64.ln())), ..Rules::default() };
        close(Request { rules, ..request }.attend(0, 0).out[0], 10.0);
    }

    /// Rows of 4: a norm with mean square 4, then a quarter turn for each position of the first pair, and none of the rest.
    #[test]
    fn rows_are_normalised_and_then_rotated() {
        let quarter = |_: usize| std::f64::consts::FRAC_PI_2;
        let weight = |column: usize| [1.0, 2.0, 3.0, 4.0][column];
        let norm = Norm { epsilon: 5.0, weight: &weight };
        let rotation = Rotation { dim: 2, interleaved: false, frequency: &quarter };
        let rules = Rules { key_norm: Some(norm), rotation: Some(rotation), ..Rules::default() };
        let near = |got: Vec<f64>, wanted: [f64; 4]| {
            got.iter().zip(wanted).for_each(|(&got, wanted)| close(got, wanted));
        };
        let row = || vec![2.0, -2.0, 2.0, -2.0];
        // 2 / 3 by the norm, then (x, y) becomes (-y, x), and (-x, -y).
        near(rules.changed_key(1, row()), [4.0 / 3.0, 2.0 / 3.0, 2.0, -8.0 / 3.0]);
        near(rules.changed_key(-2, row()), [-2.0 / 3.0, 4.0 / 3.0, 2.0, -8.0 / 3.0]);
        near(rules.changed_query(1, row()), [2.0, 2.0, 2.0, -2.0]);
        let of_four = |interleaved| Rules {
            rotation: Some(Rotation { dim: 4, interleaved, frequency: &quarter }),
            ..Rules::default()
        };
        near(of_four(false).changed_query(1, vec![1.0, 2.0, 3.0, 4.0]), [-3.0, -4.0, 1.0, 2.0]);
        near(of_four(true).changed_query(1, vec![1.0, 2.0, 3.0, 4.0]), [-2.0, 1.0, -4.0, 3.0]);

        // A token two positions from its own place sees the keys turned by as much.
        let (q, k) = (|_: usize, _: usize| vec![1.0, 0.0], |_: usize, _: usize| vec![0.0, 1.0]);
        let request = |query_position| Request {
            query_len: 1,
            kv_len: 1,
            group: 1,
            value_head_dim: 2,
            softmax_scale: 1.0,
            causal: true,
            rules: Rules { query_position, ..of_two(&quarter) },
            q: &q,
            k: &k,
            v: &k,
        };
        fn of_two(frequency: &dyn Fn(usize) -> f64) -> Rules<'_> {
            let rotation = Some(Rotation { dim: 2, interleaved: true, frequency });
            Rules { rotation, ..Rules::default() }
        }
        close(request(None).attend(0, 0).lse, 0.0);
        close(request(Some(&|_| 1)).attend(0, 0).lse, 1.0);
        close(request(Some(&|_| -1)).attend(0, 0).lse, -1.0);
    }

    #[test]
    fn causal_is_bottom_right_and_blind_rows_are_empty() {
        let rows = |position: usize, _: usize| vec![position as f64];
        let zero = |_: usize, _: usize| vec![0.0];
        let (query_len, kv_len) = (4, 2);
        let request = Request {
            query_len,
            kv_len,
            group: 1,
            value_head_dim: 1,
            softmax_scale: 1.0,
            causal: true,
            rules: Rules::default(),
            q: &zero,
            k: &rows,
            v: &rows,
        };
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
