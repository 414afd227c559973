//! Raw bytes of every kind, lent and copied, and every refusal.

use crate::support::torch::alone;
use ckpt_torch::tch::{Device, Kind, Tensor};
use ckpt_torch::{ErrorKind, Op, args, bytes, storage_id};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const KINDS: [Kind; 12] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2,
];

/// Bytes at a chosen distance from 64-byte alignment, which count their deaths.
struct Placed<'a> {
    buffer: Vec<u8>,
    start: usize,
    len: usize,
    deaths: &'a AtomicUsize,
}

impl<'a> Placed<'a> {
    fn new(contents: &[u8], offset: usize, deaths: &'a AtomicUsize) -> Self {
        let mut buffer = vec![0; contents.len() + 128];
        let start = buffer.as_ptr().align_offset(64) + offset;
        buffer[start..start + contents.len()].copy_from_slice(contents);
        Placed {
            buffer,
            start,
            len: contents.len(),
            deaths,
        }
    }
}

impl AsRef<[u8]> for Placed<'_> {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[self.start..self.start + self.len]
    }
}

impl Drop for Placed<'_> {
    fn drop(&mut self) {
        self.deaths.fetch_add(1, Ordering::SeqCst);
    }
}

fn contents(len: usize, kind: Kind) -> Vec<u8> {
    let modulus = if kind == Kind::Bool { 2 } else { 256 };
    (0..len).map(|k| ((k * 37 + 11) % modulus) as u8).collect()
}

#[test]
fn bytes_of_every_kind_round_trip() {
    alone();
    for kind in KINDS {
        let element = bytes::element_bytes(kind).unwrap();
        assert_eq!(element, kind.elt_size_in_bytes());
        for dims in [&[][..], &[1], &[0], &[2, 3, 4], &[5, 0, 2]] {
            let len = element * dims.iter().product::<i64>() as usize;
            let given = contents(len, kind);
            let mut tensor = bytes::copy_from(&given, kind, dims).unwrap();
            assert_eq!((tensor.kind(), tensor.size()), (kind, dims.to_vec()));
            assert_eq!(bytes::read(&tensor).unwrap(), given);
            let other: Vec<u8> = given.iter().rev().copied().collect();
            bytes::copy(&bytes::copy_from(&other, kind, dims).unwrap(), &mut tensor).unwrap();
            assert_eq!(bytes::read(&tensor).unwrap(), other);
        }
    }
}

#[test]
fn bytes_mean_the_values_they_should() {
    alone();
    let floats: Vec<u8> = [1.5f32, -2.0]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let tensor = bytes::copy_from(&floats, Kind::Float, &[2]).unwrap();
    assert_eq!(Vec::<f32>::try_from(&tensor).unwrap(), [1.5, -2.0]);
    // 1.0 is 0x3f80 as bfloat16 and 0x3c00 as half.
    let bf16 = bytes::copy_from(&[0x80, 0x3f], Kind::BFloat16, &[1]).unwrap();
    let half = bytes::copy_from(&[0x00, 0x3c], Kind::Half, &[1]).unwrap();
    assert_eq!(
        (bf16.double_value(&[0]), half.double_value(&[0])),
        (1.0, 1.0)
    );
}

#[test]
fn aligned_bytes_are_lent_and_others_copied() {
    alone();
    static DEATHS: AtomicUsize = AtomicUsize::new(0);
    for (kind, offset) in KINDS
        .into_iter()
        .flat_map(|kind| [(kind, 0), (kind, 8), (kind, 1)])
    {
        DEATHS.store(0, Ordering::SeqCst);
        let given = contents(24 * bytes::element_bytes(kind).unwrap(), kind);
        let owner = Arc::new(Placed::new(&given, offset, &DEATHS));
        let data = owner.as_ref().as_ref().as_ptr();
        let tensor = bytes::from_bytes(owner, kind, &[2, 3, 4]).unwrap();
        let is_lent = tensor.data_ptr().cast_const().cast() == data;
        assert_eq!(is_lent, offset == 0);
        assert_eq!(DEATHS.load(Ordering::SeqCst), usize::from(!is_lent));
        assert_eq!(
            (tensor.kind(), tensor.size(), bytes::read(&tensor).unwrap()),
            (kind, vec![2, 3, 4], given.clone())
        );
        // A view keeps the owner alive, also on another thread; the last one releases it, once.
        let view = tensor.transpose(0, 2);
        assert_eq!(storage_id(&view).unwrap(), storage_id(&tensor).unwrap());
        drop(tensor);
        assert_eq!(DEATHS.load(Ordering::SeqCst), usize::from(!is_lent));
        std::thread::spawn(move || drop(view)).join().unwrap();
        assert_eq!(DEATHS.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn lent_bytes_are_never_written() {
    alone();
    static DEATHS: AtomicUsize = AtomicUsize::new(0);
    let owner = Arc::new(Placed::new(&[0; 16], 0, &DEATHS));
    let mut lent = bytes::from_bytes(owner.clone(), Kind::Float, &[4]).unwrap();
    let ones = Tensor::ones([4], (Kind::Float, Device::Cpu));
    let add = Op::find("aten::add_.Tensor").unwrap();
    let foreach = Op::find("aten::_foreach_add_.Scalar").unwrap();
    let out = Op::find("aten::add.out").unwrap();
    let view = lent.slice(0, 1, 3, 1);
    let refused = [
        add.call(args![&lent, &ones]),
        add.call(args![&view, 1.0]),
        add.call(args![&view, &ones.slice(0, 0, 2, 1)]),
        foreach.call(args![&[&ones, &lent], 1]),
        out.call(args![&ones, &ones, 1, &lent]),
    ];
    for result in refused {
        assert_eq!(result.unwrap_err().kind, ErrorKind::Refused);
    }
    assert_eq!(
        bytes::copy(&ones, &mut lent).unwrap_err().kind,
        ErrorKind::Refused
    );
    assert_eq!(owner.as_ref().as_ref(), [0; 16]);
    assert_eq!(
        ones.double_value(&[0]),
        1.0,
        "a refused call writes nothing"
    );
    // Reading is as ever.
    let sum = Op::find("aten::add.Tensor")
        .unwrap()
        .call_one(args![&lent, &ones])
        .unwrap();
    assert_eq!(sum.double_value(&[3]), 1.0);
}

#[test]
fn what_does_not_fit_is_refused_and_the_owner_released() {
    alone();
    static DEATHS: AtomicUsize = AtomicUsize::new(0);
    let cases: [(usize, Kind, &[i64]); 8] = [
        (15, Kind::Float, &[4]),
        (17, Kind::Float, &[4]),
        (16, Kind::Float, &[-4]),
        (16, Kind::Float, &[-2, -2]),
        (0, Kind::Float, &[i64::MAX, i64::MAX]),
        (1, Kind::Float, &[]),
        (16, Kind::ComplexFloat, &[2]),
        (4, Kind::QUInt8, &[4]),
    ];
    for (count, (len, kind, dims)) in cases.into_iter().enumerate() {
        let given = vec![0; len];
        assert_eq!(
            bytes::copy_from(&given, kind, dims).unwrap_err().kind,
            ErrorKind::Refused,
            "{kind:?} {dims:?}"
        );
        let owner = Arc::new(Placed::new(&given, 0, &DEATHS));
        assert_eq!(
            bytes::from_bytes(owner, kind, dims).unwrap_err().kind,
            ErrorKind::Refused
        );
        assert_eq!(DEATHS.load(Ordering::SeqCst), count + 1);
    }
    assert!(
        bytes::copy_from(&[0, 1, 2], Kind::Bool, &[3])
            .unwrap_err()
            .message
            .contains("byte 2")
    );
}

#[test]
fn only_contiguous_plain_tensors_have_bytes() {
    alone();
    let x = Tensor::from_slice(&[1f32, 2., 3., 4.]).reshape([2, 2]);
    let sparse = x.to_sparse(None::<ckpt_torch::tch::Layout>, None::<i64>, None::<i64>);
    for tensor in [
        x.tr(),
        Tensor::new(),
        x.to_kind(Kind::ComplexFloat),
        x.quantize_per_tensor(0.5, 0, Kind::QUInt8),
        sparse,
    ] {
        assert_eq!(bytes::read(&tensor).unwrap_err().kind, ErrorKind::Refused);
    }
    assert_eq!(
        bytes::read(&x.slice(0, 1, 2, 1)).unwrap(),
        [3f32, 4.]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<_>>()
    );
}
