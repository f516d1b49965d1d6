//! What a kernel's PTX must not hold, and how many `.sync` instructions it holds.
//!
//! LLVM may copy `asm!` across a divergent branch, which is silent and deadlocks; a copied collective shows as one
//! more `.sync` instruction. The expected counts are a committed file, so a change of any is seen in review.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use kernels_gpu::abi::tile::Family;

use crate::error::BuildError;

/// `.sync` instructions by the first part of their name.
pub type SyncCounts = BTreeMap<String, u32>;
/// Of every kernel, in the order of the file.
pub type Counts = BTreeMap<(Family, String), SyncCounts>;

/// What one kernel shows.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Of its `.sync` instructions.
    pub sync: SyncCounts,
    /// What it must not hold, in words.
    pub problems: Vec<String>,
}

/// Reads the module of one kernel. Local memory and calls are refused everywhere; accesses that do not name their
/// state space, which cost a run-time check, in hot kernels.
pub fn kernel(ptx: &str, hot: bool) -> Findings {
    let mut findings = Findings::default();
    let mut local = 0;
    let mut calls = 0;
    let mut generic = BTreeMap::<&str, u32>::new();
    for statement in body(ptx).split(';').map(instruction) {
        let opcode = statement.split_whitespace().next().unwrap_or_default();
        let parts: Vec<&str> = opcode.split('.').collect();
        match parts[0] {
            "" if opcode == ".local" => local += 1,
            "call" => calls += 1,
            "ld" | "st" | "atom" | "red" if !names_state_space(&parts) => *generic.entry(parts[0]).or_default() += 1,
            _ => {}
        }
        if is_collective(&parts) {
            *findings.sync.entry(parts[0].to_owned()).or_default() += 1;
        }
    }
    if local > 0 || ptx.contains("__local_depot") {
        findings.problems.push("uses local memory".to_owned());
    }
    if calls > 0 {
        findings.problems.push(format!("{calls} calls"));
    }
    if hot {
        findings
            .problems
            .extend(generic.iter().map(|(opcode, count)| format!("{count} {opcode} without a state space")));
    }
    findings
}

/// What follows the entry's opening bracket.
fn body(ptx: &str) -> &str {
    let entry = ptx.find(".entry").map_or(ptx, |at| &ptx[at..]);
    entry.split_once('{').map_or(entry, |(_, body)| body)
}

/// A statement less opening brackets, labels and its predicate.
fn instruction(statement: &str) -> &str {
    let mut rest = statement.trim_start();
    loop {
        let word = rest.split_whitespace().next().unwrap_or_default();
        let skipped = if rest.starts_with(['{', '}']) {
            1
        } else if word.ends_with(':') || word.starts_with('@') {
            word.len()
        } else {
            return rest;
        };
        rest = rest[skipped..].trim_start();
    }
}

fn names_state_space(parts: &[&str]) -> bool {
    let spaces = ["global", "shared", "local", "const", "param"];
    parts.iter().any(|part| spaces.contains(&part.split("::").next().unwrap_or_default()))
}

/// `.sync` instructions and block barriers. `bar.warp.sync` only anchors others and moves freely.
fn is_collective(parts: &[&str]) -> bool {
    let barrier = matches!(parts[0], "bar" | "barrier");
    (barrier || parts.contains(&"sync")) && !(barrier && parts.get(1) == Some(&"warp"))
}

/// Compares `counts` with the file, or writes it; differences are added to `problems`.
pub fn compare(path: &Path, counts: &Counts, accept: bool, problems: &mut Vec<String>) -> Result<(), BuildError> {
    let text = render(counts);
    if accept {
        return fs::write(path, text).map_err(BuildError::file(path));
    }
    let expected = fs::read_to_string(path).unwrap_or_default();
    if expected != text {
        let old: BTreeSet<&str> = expected.lines().collect();
        let new: BTreeSet<&str> = text.lines().collect();
        problems.extend(old.difference(&new).map(|line| format!("expected .sync counts:  {line}")));
        problems.extend(new.difference(&old).map(|line| format!("this build's counts:    {line}")));
        problems.push("if these counts are right, run again with --accept-audit and commit the file".to_owned());
    }
    Ok(())
}

fn render(counts: &Counts) -> String {
    let mut text = String::from(
        "# .sync instructions of each kernel's PTX, by the first part of their name; bar.warp.sync is not counted.\n\
         # Written by `cargo xtask ptx --accept-audit`; a build that differs fails.\n",
    );
    for ((family, symbol), sync) in counts {
        text += &format!("{} {symbol}", family.name());
        for (opcode, count) in sync {
            text += &format!(" {opcode}={count}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(body: &str) -> String {
        format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 s[];\n\
             .visible .entry k(\n.param .u64 k_param_0\n)\n.maxntid 96, 1, 1\n{{\n{body}\nret;\n}}\n"
        )
    }

    fn counted(body: &str) -> Vec<(String, u32)> {
        kernel(&entry(body), true).sync.into_iter().collect()
    }

    #[test]
    fn collectives_are_counted_wherever_they_stand() {
        let body = "\
            .reg .pred %p<2>;\n\
            shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;\n\
            @%p1 bra $L__BB0_2;\n\
            $L__BB0_1: shfl.sync.idx.b32 %r1|%p1, %r2, 1, 31, -1;\n\
            bar.warp.sync -1;\n\
            bar.sync 0;\n\
            barrier.sync 1, 64;\n\
            bar.arrive 2, 64;\n\
            { .reg .b16 l; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2}, {%r1}, {%r2}, {%f1, %f2}; }\n\
            @!%p1 ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];\n\
            $L__BB0_2:\n\
            vote.sync.ballot.b32 %r1, %p1, -1;\n";
        let expected = [("bar", 2), ("barrier", 1), ("ldmatrix", 1), ("mma", 1), ("shfl", 2), ("vote", 1)];
        assert_eq!(counted(body), expected.map(|(name, count)| (name.to_owned(), count)));
        assert!(kernel(&entry(body), true).problems.is_empty());
    }

    #[test]
    fn the_first_instruction_of_a_body_counts() {
        assert_eq!(counted("bar.sync 0;"), [("bar".to_owned(), 1)]);
    }

    #[test]
    fn refusals_name_what_they_found() {
        let problems = |body: &str, hot: bool| kernel(&entry(body), hot).problems;
        let none: [&str; 0] = [];
        assert_eq!(problems(".local .align 4 .b8 __local_depot0[64];", false), ["uses local memory"]);
        assert_eq!(problems("mov.b64 %SPL, __local_depot0;", false), ["uses local memory"]);
        assert_eq!(problems("call.uni (retval0), helper, (param0);", false), ["1 calls"]);
        assert_eq!(
            problems("ld.b32 %r1, [%rd1];\n@%p1 ld.v4.b32 {%r1}, [%rd1];", true),
            ["2 ld without a state space"]
        );
        assert_eq!(problems("st.relaxed.gpu.b32 [%rd1], %r1;", true), ["1 st without a state space"]);
        assert_eq!(problems("ld.b32 %r1, [%rd1];", false), none);
        for body in [
            "ld.param.b64 %rd1, [k_param_0];",
            "ld.global.nc.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];",
            "st.shared::cta.b32 [%r1], %r2;",
            "atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], %r2;",
        ] {
            assert_eq!(problems(body, true), none, "{body}");
        }
    }

    #[test]
    fn the_file_lists_families_then_symbols() {
        let counts = Counts::from([
            ((Family::Sm90a, "a".to_owned()), SyncCounts::from([("mma".to_owned(), 4), ("bar".to_owned(), 1)])),
            ((Family::Sm80, "b".to_owned()), SyncCounts::new()),
        ]);
        let lines: Vec<String> = render(&counts).lines().skip(2).map(String::from).collect();
        assert_eq!(lines, ["sm_80 b", "sm_90a a bar=1 mma=4"]);
    }
}
