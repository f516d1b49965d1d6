//! The house rules, each a function from a file's path and text to its breaches.
//!
//! What must be told from comments and strings is read as tokens, the rest line by line. The rules hold for this
//! file too, so patterns and tests spell what they forbid in pieces.

use proc_macro2::{TokenStream, TokenTree};
use regex::Regex;

/// Larger files belong elsewhere: a clone pays for them for ever.
const LARGEST_FILE_BYTES: u64 = 4 << 20;

/// Where `unsafe` is part of the job.
const UNSAFE_FOLDERS: [&str; 4] = ["simt/", "kernels-gpu/", "host/src/driver", "host/src/cpu"];

/// Where code for the GPU lies.
const DEVICE_FOLDERS: [&str; 2] = ["kernels-gpu/src/", "simt/src/"];

/// One line a breach: `path:line: message`.
pub type Breaches = Vec<String>;

/// The rule for a file of any kind.
pub fn size(path: &str, bytes: u64) -> Option<String> {
    (bytes > LARGEST_FILE_BYTES).then(|| format!("{path}: {bytes} bytes; at most {LARGEST_FILE_BYTES} are tracked"))
}

/// Every rule for a text file.
pub fn text(path: &str, text: &str) -> Breaches {
    let mut breaches = machine_paths(path, text);
    breaches.extend(unfinished(path, text));
    if path != "Cargo.lock" {
        breaches.extend(package_hosts(path, text));
    }
    if path.ends_with(".rs") {
        breaches.extend(module_doc(path, text));
        breaches.extend(float_arrays(path, text));
        match text.parse::<TokenStream>() {
            Ok(tokens) => {
                breaches.extend(unsafe_code(path, text, tokens.clone()));
                breaches.extend(pure_collectives(path, tokens));
            }
            Err(error) => breaches.push(format!("{path}:{}: not Rust: {error}", error.span().start().line)),
        }
    }
    breaches
}

/// A path of one machine is of no use on another.
fn machine_paths(path: &str, text: &str) -> Breaches {
    lines_with(path, text, r"(^|[^A-Za-z0-9_.])/(work|root|farm|home)/[A-Za-z.]", "a path of one machine")
}

/// Where packages come from is the business of the machine's settings.
fn package_hosts(path: &str, text: &str) -> Breaches {
    let hosts = r"(?i)\b(index|static)\.crates\.[i]o\b|\bpypi\.[o]rg\b|\bpythonhosted\.[o]rg\b|\bartifactor[y]\b|\bstatic\.rust-lang\.[o]rg\b|\.interna[l]\b[:/]";
    lines_with(path, text, hosts, "a package host's address")
}

/// Nothing is left for later.
fn unfinished(path: &str, text: &str) -> Breaches {
    let marks = r"\b(tod[o]|unimplemente[d])!\s*[(\[{]|\b(TOD[O]|FIXM[E])\b";
    lines_with(path, text, marks, "a mark of unfinished work")
}

/// Every module says what it is.
fn module_doc(path: &str, text: &str) -> Breaches {
    let documented = text.lines().find(|line| !line.trim().is_empty()).is_some_and(|line| line.starts_with("//!"));
    if documented { Vec::new() } else { vec![format!("{path}:1: a module opens with `//!` lines")] }
}

/// rustc fills a float array in a loop, which keeps a long one in local memory; `core::mem::zeroed` does not. This
/// finds the usual spelling early; the audit of the PTX refuses local memory however it came about.
fn float_arrays(path: &str, text: &str) -> Breaches {
    let device = DEVICE_FOLDERS.iter().any(|folder| path.starts_with(folder));
    if !device || path.starts_with("simt/src/emulator") || path.ends_with("tests.rs") {
        return Vec::new();
    }
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    lines_with(path, code, r"^([^/]|/[^/])*\[-?0(\.0?)?_?f32; ", "a float array initialiser; use `zeroed`")
}

/// `unsafe` stays where it is expected, or the file says why it does not.
fn unsafe_code(path: &str, text: &str, tokens: TokenStream) -> Breaches {
    let expected = UNSAFE_FOLDERS.iter().any(|folder| path.starts_with(folder));
    if expected || text.lines().any(|line| line.starts_with("//! Unsafe: ")) {
        return Vec::new();
    }
    let mut lines = Vec::new();
    each_token(tokens, &mut |token, _| {
        if let TokenTree::Ident(word) = token
            && word == "unsafe"
        {
            lines.push(word.span().start().line);
        }
    });
    // One breach a file: one line mends it.
    let first = lines.first().map(|line| {
        let places = UNSAFE_FOLDERS.join(", ");
        format!("{path}:{line}: {} `unsafe` outside {places}, in a module without a line `//! Unsafe: `", lines.len())
    });
    first.into_iter().collect()
}

/// LLVM may move a pure `asm!` under a branch, which a collective does not survive.
fn pure_collectives(path: &str, tokens: TokenStream) -> Breaches {
    let mut lines = Vec::new();
    each_token(tokens, &mut |token, before| {
        let is_asm = matches!(before, [TokenTree::Ident(name), TokenTree::Punct(mark)]
            if name == "asm" && mark.as_char() == '!');
        if let TokenTree::Group(arguments) = token
            && is_asm
        {
            let text = arguments.stream().to_string();
            let pure = Regex::new(r"options\s*\([^)]*\bpure\b").expect("a constant pattern").is_match(&text);
            if pure && (text.contains(".sync") || text.contains("mma")) {
                lines.push(arguments.span_open().start().line);
            }
        }
    });
    lines.into_iter().map(|line| format!("{path}:{line}: a collective with options(pure)")).collect()
}

/// Calls `visit` with every token, however deep, and up to two tokens before it.
fn each_token(tokens: TokenStream, visit: &mut impl FnMut(&TokenTree, &[TokenTree])) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (index, token) in tokens.iter().enumerate() {
        visit(token, &tokens[index.saturating_sub(2)..index]);
        if let TokenTree::Group(group) = token {
            each_token(group.stream(), visit);
        }
    }
}

fn lines_with(path: &str, text: &str, pattern: &str, message: &str) -> Breaches {
    let pattern = Regex::new(pattern).expect("a constant pattern");
    let lines = text.lines().enumerate().filter(|(_, line)| pattern.is_match(line));
    lines.map(|(index, line)| format!("{path}:{}: {message}: {}", index + 1, line.trim())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines `text` breaks a rule in, when it stands at `path`.
    fn lines(path: &str, text: &str) -> Vec<usize> {
        super::text(path, text).iter().map(|breach| breach.split(':').nth(1).unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn a_tidy_module_passes() {
        let text = "//! Adds.\n\n/// The sum.\npub fn add(a: u32, b: u32) -> u32 {\n    a + b\n}\n";
        assert_eq!(lines("host/src/add.rs", text), [0; 0]);
    }

    #[test]
    fn machine_paths_are_found_in_any_file() {
        for path in [concat!("/ho", "me/someone/x"), concat!("see /wo", "rk/a"), concat!("\"/ro", "ot/.cargo\"")] {
            assert_eq!(lines("docs/a.md", &format!("first\n{path}\n")), [2], "{path}");
        }
        for fine in ["/usr/src", "docs.rs/work/a", "a/home/b", "/home", "`/work/` alone"] {
            assert_eq!(lines("docs/a.md", fine), [0; 0], "{fine}");
        }
    }

    #[test]
    fn package_hosts_are_found_except_in_the_lock_file() {
        let line = concat!("https://py", "pi.org/simple");
        assert_eq!(lines("docs/a.md", line), [1]);
        assert_eq!(lines("docs/a.md", concat!("sparse+https://index.cra", "tes.io/")), [1]);
        assert_eq!(lines("docs/a.md", concat!("http://mirror.corp.inter", "nal/simple")), [1]);
        assert_eq!(lines("Cargo.lock", line), [0; 0]);
        assert_eq!(lines("docs/a.md", "see crates.io for `half`; internal names"), [0; 0]);
    }

    #[test]
    fn unfinished_work_is_found() {
        for mark in [
            concat!("TO", "DO: later"),
            concat!("# FIX", "ME"),
            concat!("to", "do!()"),
            concat!("unimplemen", "ted!(\"x\")"),
        ] {
            assert_eq!(lines("docs/a.md", mark), [1], "{mark}");
        }
        assert_eq!(lines("docs/a.md", "a todo list, unimplemented by others"), [0; 0]);
    }

    #[test]
    fn a_module_without_documentation_is_found() {
        assert_eq!(lines("host/src/a.rs", "use std::fs;\n"), [1]);
        assert_eq!(lines("host/src/a.rs", "// A comment.\n"), [1]);
        assert_eq!(lines("host/src/a.rs", ""), [1]);
        assert_eq!(lines("host/src/a.txt", "use std::fs;\n"), [0; 0]);
    }

    #[test]
    fn unsafe_code_needs_its_place_or_a_reason() {
        let code = "//! Doc.\n// unsafe in a comment\nconst A: &str = \"unsafe\";\nfn f() {\n    unsafe { g() }\n    unsafe { g() }\n}\n";
        assert_eq!(lines("host/src/plan.rs", code), [5]);
        assert_eq!(lines("host/src/driver/mod.rs", code), [0; 0]);
        assert_eq!(lines("kernels-gpu/src/attend.rs", code), [0; 0]);
        assert_eq!(lines("host/src/plan.rs", &format!("//! Doc.\n//! Unsafe: C calls this.\n{code}")), [0; 0]);
    }

    #[test]
    fn float_arrays_are_found_in_device_code() {
        for code in ["let a = [0f32; 4];", "let a = [0.0f32; N];", "let a = [[0.0_f32; 4]; 8];", "f([0_f32; 2])"] {
            let text = format!("//! Doc.\n{code}\n");
            assert_eq!(lines("kernels-gpu/src/attend.rs", &text), [2], "{code}");
            assert_eq!(lines("host/src/cpu/attend.rs", &text), [0; 0], "{code}");
            assert_eq!(lines("simt/src/emulator/mma.rs", &text), [0; 0], "{code}");
            assert_eq!(lines("kernels-gpu/src/a.rs", &format!("//! Doc.\n#[cfg(test)]\nmod t {{ {code} }}\n")), [0; 0]);
        }
        for code in [
            "let a = [0u32; 4];",
            "let a = [0; 4];",
            "let a: [f32; 4];",
            "let a = [0.0; 4];",
            "// as [0f32; 4] would",
            "let a = [1.0; 4];",
        ] {
            assert_eq!(lines("kernels-gpu/src/attend.rs", &format!("//! Doc.\n{code}\n")), [0; 0], "{code}");
        }
    }

    #[test]
    fn pure_collectives_are_found() {
        let with = |template: &str, options: &str| {
            format!(
                "//! Doc.\nfn f() {{\n    asm!(\"{template} {{0}}\",\n        out(reg32) r, options({options}));\n}}\n"
            )
        };
        assert_eq!(lines("simt/src/ptx/mod.rs", &with("shfl.sync.idx.b32", "pure, nomem")), [3]);
        assert_eq!(lines("simt/src/ptx/mod.rs", &with("mma.m16n8k16", "nomem, pure")), [3]);
        assert_eq!(lines("simt/src/ptx/mod.rs", &with("mma.sync.aligned", "nomem, nostack")), [0; 0]);
        assert_eq!(lines("simt/src/ptx/mod.rs", &with("fma.rn.f32", "pure, nomem")), [0; 0]);
    }

    #[test]
    fn large_files_are_refused() {
        assert_eq!(size("a.bin", 4 << 20), None);
        assert!(size("a.bin", (4 << 20) + 1).is_some());
    }
}
