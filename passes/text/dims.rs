//! Sizes and types as text, and the expressions that exporters write as names of dimensions.
//!
//! Sizes are built with the arithmetic of [`Dim`], so they are canonical: `1 + seq` is `seq + 1`. Nesting and the size
//! of polynomials are limited, because a short text can describe an enormous product.

use super::scan::Scan;
use crate::error::Result;
use crate::ir::{Atom, DType, Dim, Ty};

/// Deepest nesting of an expression.
const MAX_DEPTH: usize = 64;
/// Most terms of a polynomial, and most factors of one term.
const MAX_TERMS: usize = 128;

/// A size in the text form.
///
/// # Errors
/// `error[parse]` with the column.
pub fn parse_dim(text: &str) -> Result<Dim> {
    let mut s = Scan::new(text);
    s.lines();
    let dim = dim(&mut s)?;
    s.lines();
    if !s.at_end() {
        return Err(s.unexpected("the end of the size"));
    }
    Ok(dim)
}

/// Reads the name that a model file gives a dimension: `seq`, or an expression such as `seq + 1` or `2*s0 - 1`.
///
/// Exporters print sums with spaces around the sign, so a name such as `sequence-length` stays one name. Whatever
/// cannot be read as an expression is a name as a whole.
pub fn parse_dim_param(name: &str) -> Dim {
    let bytes = name.as_bytes();
    let is_operator = |i: usize| {
        let before = name[..i].trim_end_matches(' ');
        let is_sign = before.is_empty() || before.ends_with(['(', ',']);
        is_sign || (name[..i].ends_with(' ') && bytes.get(i + 1) == Some(&b' '))
    };
    let glued = (0..bytes.len()).any(|i| matches!(bytes[i], b'+' | b'-') && !is_operator(i));
    // `?x` and quotes belong to our own text form, not to files.
    if glued || name.contains(['?', '"', ';', '\n']) {
        return Dim::symbol(name);
    }
    match parse_dim(name) {
        // A lone number is still a name: the file had another field for numbers.
        Ok(dim) if dim.as_const().is_none() => dim,
        _ => Dim::symbol(name),
    }
}

/// `f32[batch, seq, 64]`.
pub(super) fn ty(s: &mut Scan) -> Result<Ty> {
    s.blanks();
    let word = s.peek_word();
    let Some(dtype) = DType::from_name(word) else {
        return Err(s.unexpected("a type"));
    };
    s.expect_word(word)?;
    s.expect("[")?;
    let mut dims = Vec::new();
    if !s.eat("]") {
        loop {
            dims.push(dim(s)?);
            if s.eat("]") {
                break;
            }
            s.expect(",")?;
        }
    }
    Ok(Ty::new(dtype, dims))
}

/// A size.
pub(super) fn dim(s: &mut Scan) -> Result<Dim> {
    sum(s, 0)
}

fn sum(s: &mut Scan, depth: usize) -> Result<Dim> {
    if depth > MAX_DEPTH {
        return Err(s.fail("the size is nested too deeply"));
    }
    let mut total = product(s, depth)?;
    loop {
        s.blanks();
        total = match s.peek() {
            Some(b'+') => {
                s.at += 1;
                total.add(&product(s, depth)?)
            }
            Some(b'-') => {
                s.at += 1;
                total.sub(&product(s, depth)?)
            }
            _ => return Ok(total),
        };
        check(s, &total)?;
    }
}

fn check(s: &Scan, dim: &Dim) -> Result<()> {
    let terms = dim.terms();
    if terms.len() > MAX_TERMS || terms.iter().any(|(m, _)| m.len() > MAX_TERMS) {
        return Err(s.fail("the size is too large an expression"));
    }
    Ok(())
}

/// Signs bind tighter than products, as in the languages that print such expressions.
fn product(s: &mut Scan, depth: usize) -> Result<Dim> {
    let negative = s.eat("-");
    let mut result = factor(s, depth, negative)?;
    loop {
        if s.eat("//") {
            let other = factor(s, depth, false)?;
            if other == Dim::ZERO {
                return Err(s.fail("division by zero"));
            }
            result = result.div(&other);
        } else if s.eat("%") {
            let other = factor(s, depth, false)?;
            result = result.modulo(&other);
        } else if s.eat("*") {
            let other = factor(s, depth, false)?;
            // Checked before: the product of two long sums is longer than either.
            if result.terms().len() * other.terms().len() > MAX_TERMS * 4 {
                return Err(s.fail("the size is too large an expression"));
            }
            result = result.mul(&other);
        } else {
            return Ok(result);
        }
        check(s, &result)?;
    }
}

fn factor(s: &mut Scan, depth: usize, negative: bool) -> Result<Dim> {
    s.blanks();
    match s.peek() {
        Some(c) if c.is_ascii_digit() => {
            let start = s.at;
            let n = s.uint()? as i128;
            let n = if negative { -n } else { n };
            i64::try_from(n)
                .map(Dim::from)
                .map_err(|_| s.fail_at(start, "the number is too large"))
        }
        _ if negative => Ok(Dim::ZERO.sub(&factor(s, depth, false)?)),
        Some(b'(') => {
            s.expect("(")?;
            let inner = sum(s, depth + 1)?;
            s.expect(")")?;
            Ok(inner)
        }
        Some(b'?') => {
            s.expect("?")?;
            Ok(Dim::data(&s.word_or_string("the name of a size")?))
        }
        Some(b'"') => Ok(Dim::symbol(&s.string()?)),
        _ => {
            let start = s.at;
            let word = s.word("a size")?;
            if !s.eat("(") {
                return Ok(Dim::symbol(word));
            }
            let a = sum(s, depth + 1)?;
            s.expect(",")?;
            let b = sum(s, depth + 1)?;
            s.expect(")")?;
            let result = match word {
                "floordiv" => a.div(&b),
                "ceildiv" => a.ceil_div(&b),
                "mod" | "Mod" => a.modulo(&b),
                "min" | "Min" => a.smaller(&b),
                "max" | "Max" => a.larger(&b),
                "broadcast" => a.broadcast(&b).unwrap_or_else(|| {
                    let (a, b) = if a <= b { (a, b) } else { (b, a) };
                    Dim::from_atom(Atom::Broadcast(a, b))
                }),
                _ => {
                    return Err(s
                        .fail_at(start, format!("`{word}` is not a function of sizes"))
                        .expected("floordiv, ceildiv, mod, min, max or broadcast"));
                }
            };
            check(s, &result)?;
            Ok(result)
        }
    }
}
