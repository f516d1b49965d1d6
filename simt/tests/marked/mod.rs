//! Finds source lines by the comment that ends them, for tests that expect an error to name a line.

/// The line of `source` that ends with `// marker`.
pub fn line_of(source: &str, marker: &str) -> u32 {
    let comment = format!("// {marker}");
    let mut lines = (1..).zip(source.lines()).filter(|(_, line)| line.ends_with(&comment));
    let (line, _) = lines.next().unwrap_or_else(|| panic!("no line is marked {marker}"));
    assert!(lines.next().is_none(), "two lines are marked {marker}");
    line
}
