//! Near misses: the known words that are most like a word nobody knows.

/// Up to `most` of the known words, nearest first: fewest edits (insert, delete, replace, swap neighbours), upper and
/// lower case alike; of equally near ones the first in alphabetical order. Words that share too little are left out.
pub fn nearest<'a>(
    word: &str,
    known: impl IntoIterator<Item = &'a str>,
    most: usize,
) -> Vec<&'a str> {
    let wanted: Vec<char> = word.to_lowercase().chars().collect();
    let mut found: Vec<(usize, &str)> = known
        .into_iter()
        .filter_map(|name| {
            let letters: Vec<char> = name.to_lowercase().chars().collect();
            let limit = wanted.len().max(letters.len()).div_ceil(3);
            let far = wanted.len().abs_diff(letters.len()) > limit;
            let edits = if far {
                limit + 1
            } else {
                edits(&wanted, &letters)
            };
            (edits <= limit).then_some((edits, name))
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(most).map(|(_, name)| name).collect()
}

/// Optimal string alignment distance.
fn edits(a: &[char], b: &[char]) -> usize {
    let mut rows = vec![vec![0usize; b.len() + 1]; a.len() + 1];
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        rows[i][0] = i;
        for j in 1..=b.len() {
            let same = a[i - 1] == b[j - 1];
            let mut least = (rows[i - 1][j] + 1)
                .min(rows[i][j - 1] + 1)
                .min(rows[i - 1][j - 1] + !same as usize);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_come_first() {
        let ops = ["MatMul", "Mul", "Softmax", "Gemm", "Gelu", "Erf"];
        assert_eq!(nearest("matmull", ops, 3), ["MatMul"]);
        assert_eq!(nearest("Gleu", ops, 3), ["Gelu"]);
        assert_eq!(nearest("softmaxx", ops, 1), ["Softmax"]);
        assert!(nearest("Convolution", ops, 3).is_empty());
        assert!(nearest("", ops, 3).is_empty());
        assert_eq!(edits(&['a', 'b'], &['b', 'a']), 1);
    }
}
