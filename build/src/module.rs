//! rustc's PTX, cut into one module for each kernel.
//!
//! In: the text of a whole crate. Out, for a kernel: the header, the declarations it uses (and those they use) and
//! its own `.entry`, with the launch bounds that rustc has no attribute for. The driver compiles whole modules, so
//! a program that runs three kernels should not wait for sixty. Comments are dropped. An error is the reason in words.

use std::collections::{BTreeMap, BTreeSet};

use kernels_gpu::abi::manifest::LaunchBounds;
use kernels_gpu::abi::parameters::CacheMaps;

/// A parsed module.
pub struct Module {
    /// `.version`, `.target` and `.address_size`, one a line.
    header: String,
    /// What is declared or defined outside entries, by name, in the module's order.
    declarations: Vec<(String, String)>,
    /// Text of each `.entry`, by name.
    entries: BTreeMap<String, String>,
}

impl Module {
    /// Reads a module as LLVM prints it.
    pub fn parse(text: &str) -> Result<Module, String> {
        let text = without_comments(text);
        let mut module = Module { header: String::new(), declarations: Vec::new(), entries: BTreeMap::new() };
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let first_line = rest.lines().next().unwrap_or_default();
            let end = if [".version", ".target", ".address_size"].iter().any(|word| first_line.starts_with(word)) {
                module.header += first_line;
                module.header.push('\n');
                first_line.len()
            } else {
                let end = item_length(rest).ok_or_else(|| format!("unfinished: {first_line}"))?;
                module.add(&rest[..end])?;
                end
            };
            rest = rest[end..].trim_start();
        }
        if module.header.lines().count() != 3 {
            return Err(format!("no .version, .target and .address_size, but {:?}", module.header));
        }
        Ok(module)
    }

    fn add(&mut self, item: &str) -> Result<(), String> {
        let name = item_name(item).ok_or_else(|| format!("no name in: {item}"))?.to_owned();
        if is(item, ".entry") {
            self.entries.insert(name, item.to_owned());
        } else {
            self.declarations.push((name, item.to_owned()));
        }
        Ok(())
    }

    /// The entries' names, sorted.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Whether there is an entry of that name.
    pub fn has_kernel(&self, symbol: &str) -> bool {
        self.entries.contains_key(symbol)
    }

    /// A module of `symbol` alone, with its launch bounds.
    pub fn kernel(&self, symbol: &str, launch: &LaunchBounds) -> Result<String, String> {
        let entry = self.entries.get(symbol).ok_or_else(|| format!("no .entry {symbol}"))?;
        let mut used: BTreeSet<&str> = BTreeSet::new();
        let mut unread = vec![entry.as_str()];
        while let Some(text) = unread.pop() {
            let words: BTreeSet<&str> = identifiers(text).collect();
            for (name, declaration) in &self.declarations {
                if words.contains(name.as_str()) && used.insert(name) {
                    unread.push(declaration);
                }
            }
        }
        let mut text = self.header.clone();
        for (name, declaration) in &self.declarations {
            if used.contains(name.as_str()) {
                text += declaration;
                text.push('\n');
            }
        }
        text += &with_bounds(entry, launch)?;
        text.push('\n');
        Ok(text)
    }
}

/// Writes the bounds between the parameters and the body.
fn with_bounds(entry: &str, launch: &LaunchBounds) -> Result<String, String> {
    let body = entry.find('{').ok_or("an .entry without a body")?;
    let signature = entry[..body].trim_end();
    if !signature.ends_with(')') {
        return Err(format!("an .entry with directives of its own: {signature}"));
    }
    let signature = with_aligned_maps(signature);
    let LaunchBounds { threads, blocks_per_multiprocessor, .. } = launch;
    Ok(format!("{signature}\n.maxntid {threads}, 1, 1\n.minnctapersm {blocks_per_multiprocessor}\n{}", &entry[body..]))
}

/// Aligns tensor maps, which the hardware reads in place, to their 64 bytes: rustc knows no parameter of more than 16.
/// They are the third parameter; a user-defined variant's own may have their size.
fn with_aligned_maps(signature: &str) -> String {
    let size = format!("_param_2[{}]", size_of::<CacheMaps>());
    let line = |line: &str| match line.trim_end_matches(',').ends_with(&size) {
        true => line.replace(".align 8 ", ".align 64 "),
        false => line.to_owned(),
    };
    signature.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Drops `//` comments, trailing blanks and empty lines. LLVM writes no other comments and, without debug
/// information, no strings.
fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim_end());
    lines.filter(|line| !line.is_empty()).flat_map(|line| [line, "\n"]).collect()
}

/// Bytes of the item at the start of `text`: up to a `;` outside brackets, or the `}` that closes a body.
fn item_length(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, character) in text.char_indices() {
        match character {
            '{' | '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.checked_sub(1)?,
            '}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 && (is(&text[..at], ".entry") || is(&text[..at], ".func")) {
                    return Some(at + 1);
                }
            }
            ';' if depth == 0 => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Whether the item's linkage words end in `kind`.
fn is(item: &str, kind: &str) -> bool {
    item.split_whitespace().take(3).any(|word| word == kind)
}

/// The declared name: after `.entry` or `.func` and its result, or the last word before size and initialiser.
fn item_name(item: &str) -> Option<&str> {
    let head = match item.find(".func").or_else(|| item.find(".entry")) {
        Some(at) => {
            let signature = item[at..].split_once(char::is_whitespace)?.1.trim_start();
            let after_result = match signature.strip_prefix('(') {
                Some(result) => result.split_once(')')?.1.trim_start(),
                None => signature,
            };
            after_result.split(['(', '{', ';']).next()?
        }
        None => item.split(['=', '[', ';']).next()?.trim_end().rsplit(char::is_whitespace).next()?,
    };
    Some(head.trim()).filter(|name| !name.is_empty())
}

/// The words of `text` that could be names.
fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !(character.is_ascii_alphanumeric() || "_$%".contains(character)))
        .filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
//
// Generated by LLVM NVPTX Back-End
//

.version 8.0
.target sm_90a
.address_size 64

\t// .globl\tfirst                    // -- Begin function first
.extern .shared .align 1024 .b8 dynamic_shared[];
.global .align 4 .b8 table[8] = {1, 0, 0, 0, 2, 0, 0, 0};
.visible .global .align 8 .u64 pointer = table;
.extern .func (.param .b32 result) helper(.param .b64 a);
                                        // @first
.visible .entry first(
\t.param .align 8 .b8 first_param_0[16]
)
{
\t.reg .b32 \t%r<3>;

\t// begin inline asm
\tmov.u32 %r1, dynamic_shared;
\t// end inline asm
\t{ .reg .b16 l; mov.b32 {l, l}, %r1; }
\tret;
                                        // -- End function
}
.visible .entry second()                // @second
{
\t.reg .b64 \t%rd<2>;
\tld.global.b64 \t%rd1, [pointer];
\tret;
}
";
    const BOUNDS: LaunchBounds = LaunchBounds { threads: 96, blocks_per_multiprocessor: 3, shared_bytes: 0 };

    #[test]
    fn a_kernel_takes_only_what_it_uses() {
        let module = Module::parse(TEXT).unwrap();
        assert_eq!(module.kernels().collect::<Vec<_>>(), ["first", "second"]);
        assert_eq!(
            module.kernel("first", &BOUNDS).unwrap(),
            "\
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic_shared[];
.visible .entry first(
\t.param .align 8 .b8 first_param_0[16]
)
.maxntid 96, 1, 1
.minnctapersm 3
{
\t.reg .b32 \t%r<3>;
\tmov.u32 %r1, dynamic_shared;
\t{ .reg .b16 l; mov.b32 {l, l}, %r1; }
\tret;
}
"
        );
    }

    #[test]
    fn declarations_bring_their_own() {
        let second = Module::parse(TEXT).unwrap().kernel("second", &BOUNDS).unwrap();
        assert!(second.contains(".global .align 4 .b8 table[8] = {1, 0, 0, 0, 2, 0, 0, 0};\n"));
        assert!(second.contains(".visible .global .align 8 .u64 pointer = table;\n.visible .entry second()\n.maxntid"));
        assert!(!second.contains("dynamic_shared") && !second.contains("helper"));
    }

    #[test]
    fn names_are_found_in_every_kind_of_item() {
        for (item, name) in [
            (".extern .shared .align 1024 .b8 dynamic_shared[];", "dynamic_shared"),
            (".global .align 4 .u32 counter;", "counter"),
            (".global .align 4 .u32 counter = 4;", "counter"),
            (".visible .entry kernel(\n.param .u64 a\n)\n{ }", "kernel"),
            (".visible .entry kernel()\n{ }", "kernel"),
            (".func helper(.param .b32 a) { }", "helper"),
            (".extern .func (.param .b32 result) helper\n(.param .b64 a);", "helper"),
            (".func _RNv4core()\n{ }", "_RNv4core"),
        ] {
            assert_eq!(item_name(item), Some(name), "{item}");
        }
    }

    #[test]
    fn tensor_maps_are_aligned() {
        let entry = "\
.visible .entry third(
\t.param .align 8 .b8 third_param_0[240],
\t.param .align 8 .b8 third_param_2[256],
\t.param .align 8 .b8 third_param_3[256]
)
{
\tret;
}
";
        let module = Module::parse(&format!("{TEXT}{entry}")).unwrap();
        let third = module.kernel("third", &BOUNDS).unwrap();
        assert!(third.contains(".align 8 .b8 third_param_0[240],\n\t.param .align 64 .b8 third_param_2[256],\n"));
        assert!(third.contains("\t.param .align 8 .b8 third_param_3[256]\n)"));
    }

    #[test]
    fn broken_text_is_refused() {
        assert!(Module::parse(".version 8.0\n.target sm_80\n").is_err());
        assert!(Module::parse(&TEXT[..TEXT.len() - 4]).is_err());
        let module = Module::parse(TEXT).unwrap();
        assert!(module.kernel("third", &BOUNDS).is_err());
    }
}
