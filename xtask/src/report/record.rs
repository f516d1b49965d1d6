//! A record: one header line, then one JSON object a measured row.
//!
//! Fields that a report does not show are ignored, and so are sections whose name begins with an underscore.

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

pub struct Record {
    /// The file's name, without its folder.
    pub name: String,
    pub header: Map<String, Value>,
    pub rows: Vec<Row>,
}

/// One case as one peer ran it; microseconds of a call, and the GB/s of the bytes that had to move.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    pub section: String,
    pub case: String,
    pub peer: String,
    /// Absent when the case failed or its answer was wrong.
    pub us: Option<f64>,
    pub us_cold: Option<f64>,
    /// A plan's time until the GPU is idle again.
    pub us_until_idle: Option<f64>,
    pub gbps: Option<f64>,
    pub tflops: Option<f64>,
    pub of_ceiling: Option<f64>,
}

impl Record {
    pub fn parse(name: &str, text: &str) -> Result<Record> {
        let mut header = None;
        let mut rows = Vec::new();
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let place = || format!("line {}", index + 1);
            let object: Map<String, Value> = serde_json::from_str(line).with_context(place)?;
            let section = object.get("section").and_then(Value::as_str).with_context(place)?;
            if section == "_info" && header.is_none() {
                header = Some(object);
            } else if !section.starts_with('_') {
                rows.push(Row::new(&object).with_context(place)?);
            }
        }
        let header = header.context("no header line, an object with \"section\": \"_info\"")?;
        Ok(Record { name: name.to_owned(), header, rows })
    }

    /// A field of the header as it is to be read, a string without its quotes.
    pub fn info(&self, field: &str) -> Option<String> {
        self.header.get(field).map(plain)
    }
}

/// A value as text, a string without its quotes.
pub fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl Row {
    fn new(object: &Map<String, Value>) -> Result<Row> {
        let text = |field: &str| {
            let value = object.get(field).and_then(Value::as_str);
            value.map(str::to_owned).with_context(|| format!("no string in the field {field:?}"))
        };
        let sound = !object.contains_key("error") && object.get("ok").is_none_or(|ok| *ok == Value::Bool(true));
        let number = |field: &str| object.get(field).and_then(Value::as_f64).filter(|_| sound);
        let row = Row {
            section: text("section")?,
            case: text("case")?,
            peer: text("peer")?,
            us: number("us"),
            us_cold: number("us_cold"),
            us_until_idle: number("us_until_idle"),
            gbps: number("gbps"),
            tflops: number("tflops"),
            of_ceiling: number("of_ceiling"),
        };
        ensure!(row.us.is_none_or(|us| us > 0.0), "us is {:?}; a time is above 0", row.us);
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_or_failed_row_has_no_time() {
        let text = r#"
{"section": "_info", "card": "H200", "sms": 132}
{"section": "decode", "case": "a", "peer": "p", "us": 5.0, "ok": true}
{"section": "decode", "case": "b", "peer": "p", "us": 5.0, "ok": false}
{"section": "decode", "case": "c", "peer": "p", "us": 5.0, "error": "died"}
{"section": "plan", "case": "d", "peer": "p", "us": 7}
{"section": "_jit", "modules": []}
"#;
        let record = Record::parse("r.jsonl", text).unwrap();
        let times: Vec<_> = record.rows.iter().map(|row| (row.case.as_str(), row.us)).collect();
        assert_eq!(times, [("a", Some(5.0)), ("b", None), ("c", None), ("d", Some(7.0))]);
        assert_eq!(record.info("card").as_deref(), Some("H200"));
        assert_eq!(record.info("sms").as_deref(), Some("132"));
        assert_eq!(record.info("driver"), None);
    }

    #[test]
    fn what_is_no_record_is_refused_with_its_place() {
        let refused = |text| format!("{:#}", Record::parse("r.jsonl", text).err().unwrap());
        assert!(refused(r#"{"section": "decode", "case": "a", "peer": "p"}"#).contains("no header line"));
        assert!(refused("{\"section\": \"_info\"}\n{\"section\": \"decode\"}").contains("line 2"));
        let negative =
            "{\"section\": \"_info\"}\n{\"section\": \"decode\", \"case\": \"a\", \"peer\": \"p\", \"us\": 0}";
        assert!(refused(negative).contains("above 0"));
    }
}
