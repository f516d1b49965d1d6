//! `512x63,100000`: the KV lengths of a batch on the command line, each with how often it repeats.

use std::str::FromStr;

/// Requests a batch may name on the command line: far more than any engine runs at once, and few enough that a
/// mistyped count does not fill the memory.
const MAX_REQUESTS: usize = 1 << 20;

/// KV lengths in tokens, one a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLens(pub Vec<u32>);

impl FromStr for KvLens {
    type Err = String;

    fn from_str(text: &str) -> Result<KvLens, String> {
        let mut kv_lens = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (length, count) = part.split_once('x').unwrap_or((part, "1"));
            let number = |what: &str, text: &str| {
                text.trim().parse::<u32>().map_err(|_| {
                    format!("`{part}`: {what} `{text}` is not a whole number; write a length as 512, or 512x63 for 63 of them")
                })
            };
            let length = number("length", length)?;
            let count = number("count", count)? as usize;
            if count > MAX_REQUESTS - kv_lens.len() {
                return Err(format!("`{part}`: more than {MAX_REQUESTS} requests"));
            }
            kv_lens.resize(kv_lens.len() + count, length);
        }
        Ok(KvLens(kv_lens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_repeat() {
        assert_eq!("7".parse(), Ok(KvLens(vec![7])));
        assert_eq!("5x3, 9,0x2".parse(), Ok(KvLens(vec![5, 5, 5, 9, 0, 0])));
        assert_eq!("512x63,100000".parse::<KvLens>().unwrap().0.len(), 64);
        assert_eq!("5x0".parse(), Ok(KvLens(vec![])));
    }

    #[test]
    fn other_text_is_refused_with_the_part() {
        for (text, start) in [
            ("", "``: length `` is not a whole number"),
            ("5,,6", "``: length `` is not"),
            ("5,-6", "`-6`: length `-6` is not"),
            ("5x", "`5x`: count `` is not"),
            ("5x2x3", "`5x2x3`: count `2x3` is not"),
            ("4294967296", "`4294967296`: length `4294967296` is not"),
            ("1x1048577", "`1x1048577`: more than 1048576 requests"),
            ("1x1048576,1", "`1`: more than 1048576 requests"),
        ] {
            let error = text.parse::<KvLens>().unwrap_err();
            assert!(error.starts_with(start), "{text:?}: {error}");
        }
    }
}
