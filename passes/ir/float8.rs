//! Floating-point types of 8 bits (ONNX, "Float stored in 8 bits"; OCP OFP8, arXiv 2209.05433; FNUZ: arXiv 2206.02915).

use super::ty::DType;

/// The layout of a type: a sign, an exponent, a mantissa.
struct Form {
    mantissa_bits: i32,
    bias: i32,
    /// The code of the largest number.
    greatest: u8,
    /// The code of infinity, where the type has one.
    infinity: Option<u8>,
    nan: u8,
    /// Zero has no sign.
    unsigned_zero: bool,
}

fn form(dtype: DType) -> Option<Form> {
    let form = |mantissa_bits, bias, greatest, infinity, nan| Form {
        mantissa_bits,
        bias,
        greatest,
        infinity,
        nan,
        unsigned_zero: nan == 0x80,
    };
    Some(match dtype {
        DType::F8E4M3FN => form(3, 7, 0x7e, None, 0x7f),
        DType::F8E5M2 => form(2, 15, 0x7b, Some(0x7c), 0x7e),
        DType::F8E4M3FNUZ => form(3, 8, 0x7f, None, 0x80),
        DType::F8E5M2FNUZ => form(2, 16, 0x7f, None, 0x80),
        _ => return None,
    })
}

/// Returns the number of a code; 0 for a type of another size.
pub fn decoded(dtype: DType, code: u8) -> f64 {
    let Some(form) = form(dtype) else { return 0.0 };
    let (sign, rest) = (code & 0x80, code & 0x7f);
    if rest > form.greatest || (form.unsigned_zero && code == form.nan) {
        return match form.infinity == Some(rest) {
            true if sign == 0 => f64::INFINITY,
            true => f64::NEG_INFINITY,
            false => f64::NAN,
        };
    }
    let (exponent, mantissa) = (
        i32::from(rest >> form.mantissa_bits),
        rest & ((1 << form.mantissa_bits) - 1),
    );
    let part = f64::from(mantissa);
    let unit = 2f64.powi(exponent.max(1) - form.bias - form.mantissa_bits);
    let number = match exponent {
        0 => part * unit,
        _ => (part + 2f64.powi(form.mantissa_bits)) * unit,
    };
    if sign == 0 { number } else { -number }
}

/// Returns the code nearest to a number, halves to even. A number beyond the largest becomes the largest with `saturate`,
/// else infinity, or NaN where the type has no infinity.
pub fn encoded(dtype: DType, number: f64, saturate: bool) -> u8 {
    let Some(form) = form(dtype) else { return 0 };
    if number.is_nan() {
        return form.nan;
    }
    let size = number.abs();
    // The exponent of a float64; what is below the least normal number has the unit of that number.
    let exponent = (size.to_bits() >> 52) as i32 - 1023;
    let exponent = exponent.max(1 - form.bias);
    let units = (size / 2f64.powi(exponent - form.mantissa_bits)).round_ties_even();
    // A mantissa that rounds up to the next power of two carries into the exponent.
    let code = f64::from((exponent + form.bias - 1) << form.mantissa_bits) + units;
    let sign = if number.is_sign_negative() { 0x80 } else { 0 };
    match code <= f64::from(form.greatest) {
        true if code == 0.0 && form.unsigned_zero => 0,
        true => code as u8 | sign,
        false if saturate => form.greatest | sign,
        false => form.infinity.map_or(form.nan, |code| code | sign),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back_and_the_largest_numbers_are_those_of_the_formats() {
        for (dtype, greatest, least) in [
            (DType::F8E4M3FN, 448.0, 2f64.powi(-9)),
            (DType::F8E5M2, 57344.0, 2f64.powi(-16)),
            (DType::F8E4M3FNUZ, 240.0, 2f64.powi(-10)),
            (DType::F8E5M2FNUZ, 57344.0, 2f64.powi(-17)),
        ] {
            for code in 0..=255u8 {
                let number = decoded(dtype, code);
                if !number.is_nan() {
                    assert_eq!(encoded(dtype, number, false), code, "{dtype} {code:#x}");
                }
            }
            let finite = (0..=255)
                .map(|code| decoded(dtype, code))
                .filter(|x| x.is_finite());
            assert_eq!(finite.clone().fold(0.0, f64::max), greatest);
            assert_eq!(finite.filter(|x| *x > 0.0).fold(1.0, f64::min), least);
            assert!(decoded(dtype, encoded(dtype, f64::NAN, true)).is_nan());
            assert_eq!(decoded(dtype, encoded(dtype, -1e9, true)), -greatest);
            assert_eq!(
                decoded(dtype, encoded(dtype, f64::INFINITY, true)),
                greatest
            );
            assert!(!decoded(dtype, encoded(dtype, 1e9, false)).is_finite());
        }
    }

    #[test]
    fn numbers_between_two_codes_round_to_the_nearer_and_halves_to_even() {
        let round = |dtype, x| decoded(dtype, encoded(dtype, x, false));
        assert_eq!(round(DType::F8E4M3FN, 1.0625), 1.0);
        assert_eq!(round(DType::F8E4M3FN, 1.0626), 1.125);
        assert_eq!(round(DType::F8E4M3FN, 1.1875), 1.25);
        assert_eq!(round(DType::F8E4M3FN, 464.0), 448.0);
        assert!(round(DType::F8E4M3FN, 464.1).is_nan());
        assert_eq!(round(DType::F8E5M2, 61439.0), 57344.0);
        assert_eq!(round(DType::F8E5M2, 61440.0), f64::INFINITY);
        assert_eq!(round(DType::F8E4M3FN, 2f64.powi(-10)), 0.0);
        assert_eq!(round(DType::F8E4M3FN, 1.1 * 2f64.powi(-10)), 2f64.powi(-9));
        assert_eq!(encoded(DType::F8E4M3FNUZ, -1e-9, false), 0);
        assert_eq!(encoded(DType::F8E4M3FN, -1e-9, false), 0x80);
    }
}
