//! What the arithmetic of sizes promises.

use super::*;

fn s(name: &str) -> Dim {
    Dim::symbol(name)
}

fn n(value: i64) -> Dim {
    Dim::from(value)
}

#[test]
fn equal_expressions_are_equal_values() {
    let a = s("b").add(&n(1)).mul(&s("s").sub(&n(1)));
    let b = s("b").mul(&s("s")).add(&s("s")).sub(&s("b")).sub(&n(1));
    assert_eq!(a, b);
    assert_eq!(a.to_string(), "-b + b*s + s - 1");
}

#[test]
fn division_cancels_products() {
    let total = Dim::product([&s("b"), &s("s"), &n(64)]);
    assert_eq!(total.div(&n(16).mul(&s("b"))), s("s").mul(&n(4)));
    assert_eq!(
        s("s").add(&n(1)).mul(&s("b")).div(&s("s").add(&n(1))),
        s("b")
    );
    assert_eq!(s("s").div(&n(2)).to_string(), "floordiv(s, 2)");
    assert_eq!(n(-7).div(&n(2)), n(-4));
    // What is common and never 0 is cancelled.
    let padded = s("s").add(&n(1));
    let whole = Dim::product([&n(64), &s("b"), &padded]);
    assert_eq!(whole.div(&n(4096).mul(&s("b"))), padded.div(&n(64)));
    let lowest = |a: Dim, b: Dim| a.div(&b).to_string();
    assert_eq!(lowest(s("s").mul(&n(4)), n(6)), "floordiv(2*s, 3)");
    assert_eq!(s("s").mul(&n(4)).div(&s("s").mul(&n(6))), n(0));
    let squared = s("b").mul(&s("b"));
    assert_eq!(
        lowest(squared.mul(&n(3)), squared.mul(&s("s"))),
        "floordiv(3, s)"
    );
    assert_eq!(lowest(s("b").mul(&n(3)), squared), "floordiv(3, b)");
    // A quotient has a value only where its divisor is 1 or more.
    let chunks = s("s").div(&n(4));
    let more = chunks.mul(&n(4)).add(&n(4)).smaller(&n(8));
    let rows = chunks.mul(&n(4)).sub(&more).add(&n(8));
    assert_eq!(rows.div(&chunks), n(4));
    // A size that depends on data may be 0: then there is no quotient.
    let data = Dim::data("nz");
    assert_eq!(
        lowest(data.mul(&n(3)), data.mul(&s("s"))),
        "floordiv(3*?nz, s*?nz)"
    );
}

#[test]
fn min_and_max_use_that_sizes_are_positive() {
    assert_eq!(s("s").smaller(&n(1)), n(1));
    assert_eq!(s("s").smaller(&s("s").add(&n(1))), s("s"));
    assert_eq!(Dim::data("nz").smaller(&n(1)).to_string(), "min(1, ?nz)");
    assert_eq!(s("s").larger(&n(0)), s("s"));
}

#[test]
fn broadcast_follows_valid_runs_only() {
    assert_eq!(s("s").broadcast(&n(1)), Some(s("s")));
    assert_eq!(n(3).broadcast(&n(4)), None);
    assert_eq!(s("s").broadcast(&n(4)), Some(n(4)));
    assert_eq!(s("s").smaller(&n(128)).broadcast(&s("s")), Some(s("s")));
    // The last 64, or all, of s: a slice that begins at max(0, s - 64), or in a table of 64 at max(0, 64 - s).
    let last = n(64).sub(&n(64).sub(&s("s")).larger(&n(0)));
    assert_eq!(last.to_string(), "-max(0, -s + 64) + 64");
    assert_eq!(last.broadcast(&s("s")), Some(s("s")));
    assert_eq!(s("s").broadcast(&last), Some(s("s")));
    // min(y, s - 1) is 0 where s is 1, and then broadcasts to 0 with y = 1.
    let y = s("y");
    let least = y.smaller(&s("s").sub(&n(1)));
    let env = |name: &str| matches!(name, "y" | "s").then_some(1);
    assert_eq!(least.broadcast(&y).unwrap().eval(&env), Some(0));
    assert_eq!(
        s("a").broadcast(&s("b")).unwrap().to_string(),
        "broadcast(a, b)"
    );
}

#[test]
fn unknown_is_not_yes() {
    assert_eq!(s("a").same(&s("b")), Same::Unknown);
    assert_eq!(s("a").same(&s("a").add(&n(1))), Same::No);
    assert_eq!(n(0).same(&s("a")), Same::No);
    assert_eq!(n(0).same(&Dim::data("a")), Same::Unknown);
}

#[test]
fn evaluation_agrees_with_arithmetic() {
    let env = |name: &str| match name {
        "b" => Some(3),
        "s" => Some(7),
        _ => None,
    };
    let d = s("b")
        .mul(&s("s"))
        .add(&s("s").div(&n(2)))
        .sub(&s("s").modulo(&n(4)));
    assert_eq!(d.eval(&env), Some(21 + 3 - 3));
    assert_eq!(s("x").eval(&env), None);
    assert_eq!(s("b").broadcast(&s("s")).unwrap().eval(&env), None);
}

#[test]
fn a_size_that_is_rounded_by_padding_is_a_multiple() {
    // s + (4 - s mod 4) mod 4, as a model pads its sequence to chunks of 4.
    let (size, by) = (s("s"), n(4));
    let pad = by.sub(&size.modulo(&by)).modulo(&by);
    assert_eq!(pad.to_string(), "mod(-s, 4)");
    let padded = size.add(&pad);
    assert_eq!(padded.to_string(), "4*floordiv(s + 3, 4)");
    assert_eq!(padded.div(&padded.div(&by)), by);
    assert_eq!(padded.bounds().0, Some(4));
    assert_eq!(padded.add(&pad).div(&by), padded.div(&by));
    assert_eq!(size.sub(&size.modulo(&by)).to_string(), "4*floordiv(s, 4)");
    assert_eq!(n(7).sub(&size).div(&by).to_string(), "floordiv(-s + 7, 4)");
    assert_eq!(n(0).sub(&size).div(&by).to_string(), "-floordiv(s + 3, 4)");
    // What is rounded up is no less than the size, and what is rounded down no more.
    let down = size.div(&by).mul(&by);
    assert_eq!(
        (padded.smaller(&size), padded.larger(&size)),
        (size.clone(), padded.clone())
    );
    assert_eq!(
        (down.smaller(&size), down.larger(&size)),
        (down.clone(), size.clone())
    );
    assert_eq!(padded.smaller(&size.add(&n(3))), padded);
    assert_eq!(
        padded.smaller(&size.add(&n(2))).to_string(),
        "min(s + 2, 4*floordiv(s + 3, 4))"
    );
    for value in 1..20 {
        let env = |_: &str| Some(value);
        let up = (value + 3) / 4 * 4;
        assert_eq!(
            (padded.eval(&env), pad.eval(&env)),
            (Some(up), Some(up - value))
        );
        let both = size.mul(&n(3)).modulo(&by).sub(&size).add(&n(1));
        assert_eq!(both.eval(&env), Some(3 * value % 4 - value + 1));
    }
}

/// Bounds of sums whose choices and quotients cancel with other terms.
#[test]
fn bounds_see_what_cancels() {
    let q = s("s").div(&n(4));
    let first = q.smaller(&n(1));
    assert_eq!(first.smaller(&q), first);
    assert_eq!(first.larger(&q), q);
    // All but the first, written in two ways.
    let (rest, other) = (q.sub(&first), q.sub(&n(1)).larger(&n(0)));
    assert_eq!(rest.same(&other), Same::Yes);
    assert_eq!(rest.broadcast(&other), Some(other.clone()));
    assert_eq!(first.add(&other).same(&q), Same::Yes);
    // The padding of a window of 3 by steps of 2.
    let covered = s("s").add(&n(1)).div(&n(2)).mul(&n(2));
    let total = covered.add(&n(1)).sub(&s("s"));
    assert_eq!(total.bounds(), (Some(1), Some(2)));
    assert_eq!(total.div(&n(2)).bounds(), (Some(0), Some(1)));
    assert_eq!(n(0).sub(&total).bounds(), (Some(-2), Some(-1)));
}

/// What a convolution with a kernel of 2 adds to a sequence is cut off again: both have the size that the sequence had.
#[test]
fn no_size_is_negative() {
    let frames = s("s").sub(&n(10)).div(&n(5)).add(&n(1));
    assert_eq!(frames.to_string(), "floordiv(s, 5) - 1");
    let longer = frames.add(&n(1));
    let cut = longer.sub(&n(1)).larger(&n(0)).clamped(&longer);
    assert_eq!(cut.to_string(), "max(0, floordiv(s, 5) - 1)");
    assert_eq!(cut.broadcast(&frames), Some(frames.clone()));
    assert_eq!(frames.broadcast(&cut), Some(frames));
    assert_eq!(s("s").clamped(&n(4)).to_string(), "min(4, s)");
}

/// Random expressions have the values of their arithmetic at all small sizes; bounds and equality hold.
#[test]
fn random_expressions_keep_their_values() {
    let mut state = 7u64;
    let mut random = |below: u64| {
        let (factor, more) = (6364136223846793005, 1442695040888963407);
        state = state.wrapping_mul(factor).wrapping_add(more);
        (state >> 33) % below
    };
    let pairs = (1..7i64).flat_map(|a| (1..7i64).map(move |b| (a, b)));
    let sizes: Vec<[i64; 3]> = pairs.map(|(a, b)| [a, b, (a * b) % 5]).collect();
    let column = |i: usize| sizes.iter().map(|of| Some(of[i])).collect::<Vec<_>>();
    for _ in 0..4000 {
        let number = |value: i64| (n(value), vec![Some(value); sizes.len()]);
        let mut pool = vec![
            (s("a"), column(0)),
            (s("b"), column(1)),
            (Dim::data("d"), column(2)),
            number(1),
            number(3),
        ];
        for _ in 0..6 {
            let (x, y) = (random(99) as usize, random(99) as usize);
            let ((x, xs), (y, ys)) = (&pool[x % pool.len()], &pool[y % pool.len()]);
            let by = random(4) as i64 + 1;
            let both = |f: fn(i64, i64) -> Option<i64>| {
                let pairs = xs.iter().zip(ys);
                pairs.map(|(x, y)| f((*x)?, (*y)?)).collect::<Vec<_>>()
            };
            let each = |f: &dyn Fn(i64) -> i64| xs.iter().map(|x| x.map(f)).collect::<Vec<_>>();
            pool.push(match random(8) {
                0 => (x.add(y), both(|x, y| Some(x + y))),
                1 | 2 => (x.sub(y), both(|x, y| Some(x - y))),
                3 => (x.mul(&n(by)), each(&|x| x * by)),
                4 if y.bounds().0.is_some_and(|lo| lo >= 0) => {
                    let quotient = |x, y| (y > 0).then(|| floor_div(x, y));
                    (x.div(y), both(quotient))
                }
                4 => (x.div(&n(by)), each(&|x| floor_div(x, by))),
                5 => (x.modulo(&n(by)), each(&|x| x.rem_euclid(by))),
                6 => (x.smaller(y), both(|x, y| Some(x.min(y)))),
                _ => (x.larger(y), both(|x, y| Some(x.max(y)))),
            });
        }
        let ((x, xs), (y, ys)) = (&pool[pool.len() - 1], &pool[pool.len() - 2]);
        let ((lo, hi), same) = (x.bounds(), x.same(y));
        for (of, (found, other)) in sizes.iter().zip(xs.iter().zip(ys)) {
            // A division by zero has no value.
            let (Some(found), Some(other)) = (*found, *other) else {
                continue;
            };
            let size = |name: &str| Some(of[["a", "b", "d"].iter().position(|n| *n == name)?]);
            assert_eq!(x.eval(&size), Some(found), "{x} at {of:?}");
            let holds = lo.is_none_or(|lo| lo <= found) && hi.is_none_or(|hi| found <= hi);
            assert!(holds, "{x} is {found} at {of:?}, not in {lo:?}, {hi:?}");
            match same {
                Same::Yes => assert_eq!(found, other, "{x} and {y} at {of:?}"),
                Same::No => assert_ne!(found, other, "{x} and {y} at {of:?}"),
                Same::Unknown => {}
            }
        }
    }
}

#[test]
fn chunks_of_an_axis_have_lengths_that_are_not_negative() {
    let (n, m) = (Dim::symbol("n"), Dim::symbol("m"));
    for count in [3, 64] {
        let start = |i: i64| n.mul(&Dim::from(i)).div(&Dim::from(count));
        for i in 0..count {
            let length = m.mul(&start(i + 1).sub(&start(i)));
            assert_eq!(
                length.bounds().0.map(|least| least >= 0),
                Some(true),
                "{length}"
            );
            let double = length.mul(&Dim::from(2));
            assert!(double.bounds().0.is_some_and(|least| least >= 0));
            // What may be negative is not bounded.
            let back = start(i).sub(&start(i + 1)).mul(&m);
            assert_eq!(back.bounds().0, None, "{back}");
        }
    }
    let a = n.div(&Dim::from(2)).sub(&n.div(&Dim::from(3))).mul(&m);
    assert!(a.bounds().0.is_some());
    let b = n.div(&Dim::from(3)).sub(&n.div(&Dim::from(2))).mul(&m);
    assert_eq!(b.bounds().0, None);
    // The factors around the quotients differ.
    let c = m.mul(&m).mul(&Dim::symbol("k")).mul(&n);
    let d = m.mul(&Dim::symbol("k")).mul(&Dim::symbol("k"));
    let e = c.sub(&d.mul(&n.div(&Dim::from(2))));
    assert_eq!(e.bounds().0, None, "{e}");
}
