//! Name patterns: `*` stands for any run of characters, `?` for one.

/// Whether `name` matches `pattern` as a whole. Linear in `name` for each `*`, by backtracking to the last one only.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (p, n): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut i, mut j) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while j < n.len() {
        if i < p.len() && p[i] == '*' {
            star = Some((i, j));
            i += 1;
        } else if i < p.len() && (p[i] == '?' || p[i] == n[j]) {
            i += 1;
            j += 1;
        } else if let Some((at, from)) = star {
            star = Some((at, from + 1));
            i = at + 1;
            j = from + 1;
        } else {
            return false;
        }
    }
    p[i..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_and_question_marks() {
        assert!(matches("layers.*.mlp", "layers.10.mlp"));
        assert!(matches("*", ""));
        assert!(matches("a?c*", "abcdef"));
        assert!(!matches("a?c", "abbc"));
        assert!(!matches("layers.*.mlp", "layers.10.mlp.gate"));
        assert!(matches("*a*b", "xaxbxab"));
    }
}
