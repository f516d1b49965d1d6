//! What a replay found out, as text for people and as JSON for programs: the same fields in both.

use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// The outcome of a replay. Times are of the host's clock, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The device in words.
    pub device: String,
    /// The split mode in words.
    pub mode: String,
    /// Requests read from the trace.
    pub requests_in_trace: usize,
    /// Requests that ran at least one step.
    pub requests_run: usize,
    /// Steps run.
    pub steps: u64,
    /// Layers of each step.
    pub layers: u32,
    /// Tokens decoded.
    pub tokens: u64,
    /// Requests in a step.
    pub batch: Spread,
    /// Longest KV length of a step over its mean.
    pub skew: Spread,
    /// Pages in the pool.
    pub pages: u32,
    /// One `plan` call, which is one step.
    pub plan_us: Spread,
    /// One `run` of one layer, to its end.
    pub run_us: Spread,
    /// Appending the new keys and values of one layer.
    pub append_us: Spread,
    /// All runs together.
    pub run_total_us: f64,
    /// Keys of all requests in all steps, of one layer.
    pub kv_tokens: u64,
    /// Those of them that were not read once more, as they were read for another request.
    pub saved_kv_tokens: u64,
    /// Prompt tokens that others had in the cache when a request was admitted, of one layer.
    pub cached_prompt_tokens: u64,
    /// Why a plan read nothing for several requests though levels were asked for; the latest such plan's reason.
    pub not_shared: Option<String>,
    /// Keys and values that the runs had to read.
    pub kv_bytes: u64,
    /// `kv_bytes` over `run_total_us`.
    pub gigabytes_per_second: f64,
    /// The fullest queue over the mean queue, of each plan; 1 is perfect.
    pub balance: Spread,
    /// Work items that hold only part of their rows' keys, of each plan.
    pub split_items: Spread,
    /// Output rows compared with the f64 oracle.
    pub checked_rows: u64,
    /// The largest relative L2 error among them; `null` in JSON if none was checked or it is not a number.
    pub worst_error: Option<f64>,
    /// Where that row was.
    pub worst_row: Option<String>,
    /// The largest error allowed for the dtype.
    pub tolerance: f64,
    /// Whether every row checked is within tolerance.
    pub passed: bool,
}

/// Median, 99th percentile and maximum of what was recorded each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Half are at most this.
    pub median: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// All are at most this.
    pub max: f64,
}

/// Values to be summed up by a [`Spread`].
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// One more value.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// One more time, in microseconds.
    pub fn push_time(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e6);
    }

    /// All values together.
    pub fn sum(&self) -> f64 {
        self.0.iter().sum()
    }

    /// Nearest-rank quantiles; zeros if nothing was recorded.
    pub fn spread(&self) -> Spread {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let quantile = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100);
            sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Spread { median: quantile(50), p99: quantile(99), max: quantile(100) }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, text: String| writeln!(formatter, "{name:<12} {text}");
        line("device", self.device.clone())?;
        line("mode", self.mode.clone())?;
        line(
            "steps",
            format!(
                "{} of {} layer{}, {} tokens of {} requests (the trace has {})",
                self.steps,
                self.layers,
                if self.layers == 1 { "" } else { "s" },
                self.tokens,
                self.requests_run,
                self.requests_in_trace
            ),
        )?;
        line("batch", format!("median {:.0}, most {:.0} requests", self.batch.median, self.batch.max))?;
        line(
            "skew",
            format!("longest over mean KV length: median {:.2}, most {:.2}", self.skew.median, self.skew.max),
        )?;
        line("pages", format!("{}", self.pages))?;
        line("plan", times(&self.plan_us, "once a step"))?;
        line("append", times(&self.append_us, "each layer"))?;
        line("run", times(&self.run_us, "each layer"))?;
        line(
            "KV read",
            format!(
                "{:.3} GB in {:.3} s: {:.2} GB/s",
                self.kv_bytes as f64 / 1e9,
                self.run_total_us / 1e6,
                self.gigabytes_per_second
            ),
        )?;
        let reason = self.not_shared.as_ref().map(|reason| format!("; in some steps none: {reason}"));
        if self.cached_prompt_tokens > 0 || self.saved_kv_tokens > 0 || reason.is_some() {
            line(
                "shared",
                format!(
                    "{} of {} keys not read once more, {} prompt tokens found in the cache{}",
                    self.saved_kv_tokens,
                    self.kv_tokens,
                    self.cached_prompt_tokens,
                    reason.unwrap_or_default()
                ),
            )?;
        }
        line(
            "balance",
            format!(
                "fullest over mean queue: median {:.3}, worst {:.3}; split items: median {:.0}, most {:.0}",
                self.balance.median, self.balance.max, self.split_items.median, self.split_items.max
            ),
        )?;
        match (self.worst_error, &self.worst_row) {
            (Some(error), Some(row)) => line(
                "error",
                format!(
                    "worst of {} rows {error:.2e} relative L2 ({row}); {} {:.0e}",
                    self.checked_rows,
                    if self.passed { "within" } else { "EXCEEDS" },
                    self.tolerance
                ),
            ),
            _ => line("error", "no row checked".to_owned()),
        }
    }
}

fn times(spread: &Spread, of_what: &str) -> String {
    format!("median {:.1} us, p99 {:.1} us ({of_what})", spread.median, spread.p99)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let spread = |values: &[f64]| Samples(values.to_vec()).spread();
        assert_eq!(spread(&[]), Spread { median: 0.0, p99: 0.0, max: 0.0 });
        assert_eq!(spread(&[5.0]), Spread { median: 5.0, p99: 5.0, max: 5.0 });
        assert_eq!(spread(&[3.0, 1.0, 2.0, 4.0]), Spread { median: 2.0, p99: 4.0, max: 4.0 });
        let hundred: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(spread(&hundred), Spread { median: 100.0, p99: 198.0, max: 200.0 });
    }
}
