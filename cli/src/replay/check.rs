//! Compares sampled output rows with the f64 oracle, which computes them from the request's values by position: it
//! sees no page, no plan and no cache.

use super::values::{Place, Source, Tensor, Values};
use crate::serve::Running;
use oxattn::{AttentionConfig, oracle};

/// An output row to check.
#[derive(Clone, Copy, Debug)]
pub struct Sampled {
    /// Of the request in the step.
    pub index: usize,
    pub layer: u32,
    /// Query head.
    pub head: u32,
}

/// Draws rows, checks them, remembers the worst.
pub struct Checker {
    config: AttentionConfig,
    values: Values,
    random: fastrand::Rng,
    /// Rows compared so far.
    pub checked_rows: u64,
    /// The largest error so far, and where it was. An error that is not a number is larger than any.
    pub worst: Option<(f64, String)>,
}

impl Checker {
    pub fn new(config: AttentionConfig, values: Values) -> Checker {
        // Another sequence than that of the shuffled pages.
        let random = fastrand::Rng::with_seed(!values.seed);
        Checker { config, values, random, checked_rows: 0, worst: None }
    }

    /// `count` random output rows of a step.
    pub fn sample(&mut self, running: &[Running], layers: u32, count: u32) -> Vec<Sampled> {
        let mut row = || Sampled {
            index: self.random.usize(..running.len()),
            layer: self.random.u32(..layers),
            head: self.random.u32(..self.config.query_heads),
        };
        (0..count).map(|_| row()).collect()
    }

    /// Checks `found`, the output bits `[head_dim]` of a request's newest query token in a layer and head.
    pub fn check(&mut self, step: u64, running: &Running, layer: u32, head: u32, found: &[u16]) {
        let expected = self.expected(running, layer, head);
        let error = relative_error(&expected, found.iter().map(|&bits| self.values.number(bits)));
        self.checked_rows += 1;
        let worse = |&(worst, _): &(f64, String)| error > worst || (error.is_nan() && !worst.is_nan());
        if self.worst.as_ref().is_none_or(worse) {
            let (request, keys) = (running.request, running.kv_len_tokens());
            let row = format!("step {step}, layer {layer}, request {request}, query head {head}, {keys} keys");
            self.worst = Some((error, row));
        }
    }

    fn expected(&self, running: &Running, layer: u32, head: u32) -> Vec<f64> {
        let row = |tensor, position: usize, head: usize| {
            let (position, head) = (position as u32, head as u32);
            let place = Place { layer, source: Source::of(running, position), position, head };
            self.values.exact(tensor, place, self.config.head_dim as usize)
        };
        let kv_len = running.kv_len_tokens() as usize;
        let request = oracle::Request {
            query_len: 1,
            kv_len,
            group: self.config.group() as usize,
            value_head_dim: self.config.value_head_dim as usize,
            softmax_scale: self.config.softmax_scale as f64,
            causal: self.config.causal,
            rules: oracle::Rules::default(),
            q: &|_, head| row(Tensor::Query, kv_len - 1, head),
            k: &|position, head| row(Tensor::Key, position, head),
            v: &|position, head| row(Tensor::Value, position, head),
        };
        request.attend(0, head as usize).out
    }
}

/// Length of the difference over the length of what was expected.
fn relative_error(expected: &[f64], found: impl Iterator<Item = f64>) -> f64 {
    let difference: f64 = expected.iter().zip(found).map(|(expected, found)| (found - expected).powi(2)).sum();
    let length: f64 = expected.iter().map(|expected| expected * expected).sum();
    (difference / length).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use oxattn::DType;

    fn checker() -> Checker {
        Checker::new(AttentionConfig::new(4, 2, 64, 16), Values { seed: 3, dtype: DType::Bf16 })
    }

    #[test]
    fn errors_are_relative_to_the_length() {
        assert_eq!(relative_error(&[3.0, 4.0], [3.0, 4.0].into_iter()), 0.0);
        assert_eq!(relative_error(&[3.0, 4.0], [3.0, 4.5].into_iter()), 0.1);
        assert_eq!(relative_error(&[3.0, 4.0], [0.0, 0.0].into_iter()), 1.0);
    }

    #[test]
    fn a_single_key_gives_its_value_and_a_wrong_row_is_the_worst() {
        let mut checker = checker();
        // Query heads 2 and 3 share KV head 1.
        let running = Running { request: 5, generated_tokens: 1, ..Running::default() };
        let place = Place { layer: 1, source: Source::Request(5), position: 0, head: 1 };
        let mut value = vec![0; 64];
        checker.values.fill(Tensor::Value, place, &mut value);
        checker.check(7, &running, 1, 3, &value);
        assert_eq!(checker.worst, Some((0.0, "step 7, layer 1, request 5, query head 3, 1 keys".to_owned())));

        let mut other = vec![0; 64];
        checker.values.fill(Tensor::Value, Place { head: 0, ..place }, &mut other);
        checker.check(8, &running, 1, 3, &other);
        let (error, row) = checker.worst.clone().unwrap();
        assert!(error > 0.5 && row.starts_with("step 8,"), "{error} {row}");

        other[9] = bf16::NAN.to_bits();
        checker.check(9, &running, 1, 3, &other);
        checker.check(10, &running, 1, 3, &value);
        let (error, row) = checker.worst.clone().unwrap();
        assert!(error.is_nan() && row.starts_with("step 9,"), "{error} {row}");
        assert_eq!(checker.checked_rows, 4);
    }
}
