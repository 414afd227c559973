//! Pickles good and bad, by their bytes.

use super::*;

fn any(_: &str, _: &str) -> bool {
    true
}

fn run(bytes: &[u8]) -> Result<Pickle> {
    load(bytes, &any)
}

#[test]
fn data_is_built() {
    // (True, -2, 3.5, 'ab', [1, 300], {'k': None}, 1 << 40), by protocol 2.
    let bytes = b"\x80\x02(\x88J\xfe\xff\xff\xffG@\x0c\0\0\0\0\0\0X\x02\0\0\0abq\0](K\x01M\x2c\x01e}h\0Ns\x8a\x06\0\0\0\0\0\x01t.";
    let pickle = run(bytes).unwrap();
    let items = pickle.items(pickle.root()).unwrap().to_vec();
    assert_eq!(pickle.get(items[0]), &Object::Bool(true));
    assert_eq!(pickle.int(items[1]), Some(-2));
    assert_eq!(pickle.get(items[2]), &Object::Float(3.5));
    assert_eq!(pickle.str(items[3]), Some("ab"));
    let list = pickle.items(items[4]).unwrap();
    assert_eq!(
        (pickle.int(list[0]), pickle.int(list[1])),
        (Some(1), Some(300))
    );
    assert!(matches!(pickle.get(items[5]), Object::Dict(d) if d[0].0 == items[3]));
    assert_eq!(pickle.int(items[6]), Some(1 << 40));
}

#[test]
fn objects_and_their_state() {
    // An object of m.C with state {}, then an OrderedDict in which 1 is 2.
    let pickle = run(b"\x80\x02(cm\nC\n)\x81}bccollections\nOrderedDict\n)RK\x01K\x02st.").unwrap();
    let items = pickle.items(pickle.root()).unwrap();
    let Object::Instance { class, state, .. } = pickle.get(items[0]) else {
        panic!("{:?}", pickle.get(items[0]));
    };
    assert_eq!(pickle.global(*class), Some(("m", "C")));
    assert_eq!(pickle.get(state.unwrap()), &Object::Dict(Vec::new()));
    assert!(matches!(pickle.get(items[1]), Object::Dict(d) if d.len() == 1));
}

#[test]
fn longs() {
    assert_eq!(long(&[]), Some(0));
    assert_eq!(long(&[0xff]), Some(-1));
    assert_eq!(long(&[0xff, 0]), Some(255));
    assert_eq!(long(&[0; 20]), Some(0));
    assert_eq!(long(&i64::MIN.to_le_bytes()), Some(i64::MIN));
    assert_eq!(long(&[0, 0, 0, 0, 0, 0, 0, 0x80, 0]), None);
    assert_eq!(long(&[0, 0, 0, 0, 0, 0, 0, 0, 1]), None);
}

#[test]
fn nothing_is_called() {
    let attack = b"\x80\x02cposix\nsystem\nX\x04\0\0\0true\x85R.";
    let error = load(attack, &|module, _| module.starts_with("__torch__")).unwrap_err();
    assert!(error.to_string().contains("posix.system"), "{error}");
    // By the stack, too.
    let attack = b"\x80\x04\x8c\x05posix\x8c\x06system\x93.";
    assert!(load(attack, &|module, _| module.starts_with("__torch__")).is_err());
    // What was called is noted down, and cannot be called again.
    assert!(run(b"\x80\x02cm\nf\n)R.").is_ok());
    assert!(run(b"\x80\x02cm\nf\n)R)R.").is_err());
    assert!(run(b"\x80\x02cm\nf\nK\x01R.").is_err());
}

#[test]
fn damage_is_refused() {
    for bytes in [
        b"".as_slice(),
        b"\x80\x02",
        b"\x80\x09N.",
        b".",
        b"(.",
        b"N(.",
        b"t.",
        b"K\x01K\x02a.",
        b"](K\x01u.",
        b"}(K\x01u.",
        b"N}b.",
        b"h\0.",
        b"X\xff\xff\xff\xffab.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffab.",
        b"X\x01\0\0\0\xff.",
        b"cm\nf",
        b"I1\n.",
        b"P1\n.",
        b"K\x01\x86.",
    ] {
        let error = run(bytes).unwrap_err();
        assert_eq!(error.code(), "pickle", "{bytes:?}");
    }
}

#[test]
fn depth_and_cycles_are_harmless() {
    // A tuple in a tuple, a million times; a list in itself.
    let mut deep = b"\x80\x02)".to_vec();
    deep.resize(1_000_000, 0x85);
    deep.push(b'.');
    assert!(run(&deep).is_ok());
    let cycle = run(b"\x80\x02]q\0h\0a.").unwrap();
    assert_eq!(cycle.items(cycle.root()).unwrap(), [cycle.root()]);
}
