//! `8:4096x64` or `1:4096x128+512:8192`: a batch on the command line, as query tokens and keys of requests.

use std::str::FromStr;

use crate::bench::case::Case;

/// Requests a batch may name: far more than any engine runs at once.
const MAX_REQUESTS: u64 = 1 << 16;

/// A batch: requests that are alike, by query tokens, keys, and how many they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    text: String,
    runs: Vec<[u32; 3]>,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Shape, String> {
        let mut runs = Vec::new();
        for part in text.split('+').map(str::trim) {
            let refuse =
                |why: &str| format!("`{part}`: {why}; write requests as QUERY:KEYS or QUERY:KEYSxCOUNT, 8:4096x64 say");
            let (query, keys) = part.split_once(':').ok_or_else(|| refuse("there is no colon"))?;
            let (keys, count) = keys.split_once('x').unwrap_or((keys, "1"));
            let number = |what: &str, text: &str| {
                let number = text.trim().parse().ok().filter(|&number: &u32| number > 0);
                number.ok_or_else(|| refuse(&format!("{what} `{text}` is not a whole number from 1 on")))
            };
            let run = [number("query tokens", query)?, number("keys", keys)?, number("count", count)?];
            if run[0] > run[1] {
                return Err(refuse("a request has more query tokens than keys"));
            }
            runs.push(run);
        }
        if runs.iter().map(|run| run[2] as u64).sum::<u64>() > MAX_REQUESTS {
            return Err(format!("`{text}`: more than {MAX_REQUESTS} requests"));
        }
        Ok(Shape { text: text.to_owned(), runs })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl Shape {
    /// The same as a case of the suite, of heads and pages as in `attention`.
    pub fn case(&self, attention: &Case) -> Case {
        let column = |index: usize| {
            self.runs.iter().map(|run| format!("{}x{}", run[index], run[2])).collect::<Vec<_>>().join(",")
        };
        Case {
            section: "mixed".to_owned(),
            case: self.text.clone(),
            query_lens: column(0),
            kv_lens: column(1),
            ..attention.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_a_case() {
        let shape: Shape = "1:4096x3+512:8192".parse().unwrap();
        let case = shape.case(&Case { query_heads: 32, ..Case::default() });
        assert_eq!(
            (case.query_lens().unwrap(), case.kv_lens().unwrap()),
            (vec![1, 1, 1, 512], vec![4096, 4096, 4096, 8192])
        );
        assert_eq!((case.query_heads, case.case.as_str()), (32, "1:4096x3+512:8192"));
        assert_eq!(shape.to_string(), "1:4096x3+512:8192");
    }

    #[test]
    fn other_text_is_refused_with_the_part() {
        for (text, start) in [
            ("", "``: there is no colon; write requests as"),
            ("4096", "`4096`: there is no colon"),
            ("1:5+", "``: there is no colon"),
            ("0:5", "`0:5`: query tokens `0` is not a whole number from 1 on"),
            ("1:5+1:-5", "`1:-5`: keys `-5` is not"),
            ("1:5x0", "`1:5x0`: count `0` is not"),
            ("6:5", "`6:5`: a request has more query tokens than keys"),
            ("1:5x65536+1:5", "`1:5x65536+1:5`: more than 65536 requests"),
        ] {
            let error = text.parse::<Shape>().unwrap_err();
            assert!(error.starts_with(start), "{text:?}: {error}");
        }
    }
}
