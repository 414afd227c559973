//! Reads the zip archives that PyTorch writes: entries by name, weights as slices of the mapped file.
//!
//! This is a reader of our own for two reasons: weights must stay pages of the file (PyTorch stores them uncompressed), and
//! a directory may lie. So the directory is checked against the entries before anything is read: names are plain relative
//! paths and unique, sizes agree in both places, no two entries share a byte, and none reaches into the directory. The
//! directory bounds how much an entry inflates, and the size of the file bounds all entries together. Checksums are
//! verified when content is read ([`Archive::content`]). They are not verified when it is only mapped
//! ([`Archive::mapped`]), because that would touch every weight.
//!
//! Source: PKWARE APPNOTE 6.3.9 (§4.3 layout, §4.5.3 zip64).

use crate::frontend::file::map;
use bytes::Bytes;
use ckpt_passes::{Error, Result};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::path::Path;

/// The largest number of entries. PyTorch writes one for each tensor and two for each source file.
const MAX_ENTRIES: u64 = 1 << 20;

/// All inflated entries may take this many bytes, and [`INFLATED_PER_BYTE`] more for each byte of the file.
const INFLATED_BASE_BYTES: u64 = 64 << 20;
const INFLATED_PER_BYTE: u64 = 8;

/// The largest ratio by which deflate shrinks data.
const MAX_RATIO: u64 = 1032;

const END_BYTES: usize = 22;
const END_64_BYTES: usize = 56;
const LOCATOR_64_BYTES: usize = 20;
const DIRECTORY_ENTRY_BYTES: usize = 46;
const LOCAL_HEADER_BYTES: usize = 30;

/// An opened archive. Names are relative to its root folder, which is named like the file that was saved.
pub struct Archive {
    bytes: Bytes,
    entries: BTreeMap<String, Entry>,
    inflated_bytes: Cell<u64>,
}

struct Entry {
    deflated: bool,
    crc: u32,
    /// The offset of the data, which may be compressed.
    start: usize,
    stored_bytes: usize,
    /// The size of the content.
    size_bytes: u64,
}

fn bad(message: impl Into<String>) -> Box<Error> {
    Error::model("archive", message)
}

/// Returns true if a file that begins with `head` may be an archive.
pub fn may_be_archive(head: &[u8]) -> bool {
    head.starts_with(b"PK\x03\x04")
}

impl Archive {
    /// Maps a file and reads its directory.
    ///
    /// # Errors
    /// See [`Archive::read`]; a file that cannot be mapped.
    pub fn open(path: &Path) -> Result<Archive> {
        Archive::read(map(path)?).map_err(|e| e.at(path.display().to_string()))
    }

    /// Reads the directory of an archive.
    ///
    /// # Errors
    /// `archive` for a directory that is damaged, lies, or uses what PyTorch does not write.
    pub fn read(bytes: Bytes) -> Result<Archive> {
        let directory = Directory::find(&bytes)?;
        let mut entries = BTreeMap::new();
        let mut spans = Vec::new();
        let mut root: Option<String> = None;
        let mut at = directory.start;
        for _ in 0..directory.entries {
            let (listed, next) = Listed::read(&bytes, at, directory.end)?;
            at = next;
            let (entry, span) = listed.locate(&bytes, directory.start)?;
            spans.push(span);
            let Some(name) = listed.plain_name()? else {
                continue; // a folder
            };
            let Some((folder, name)) = name.split_once('/') else {
                return Err(bad("an entry is outside the archive's folder").found(shown(name)));
            };
            if *root.get_or_insert_with(|| folder.into()) != *folder {
                return Err(bad("the archive has several root folders")
                    .expected("one, as PyTorch writes")
                    .found(format!(
                        "{} and {}",
                        shown(root.as_deref().unwrap_or("")),
                        shown(folder)
                    )));
            }
            match entries.entry(name.to_string()) {
                Slot::Vacant(slot) => slot.insert(entry),
                Slot::Occupied(_) => {
                    return Err(bad(format!("the entry {} is there twice", shown(name))));
                }
            };
        }
        if at != directory.end {
            return Err(bad("the directory of the archive has the wrong size")
                .expected(format!("{} bytes", directory.end - directory.start))
                .found(format!("{} bytes", at - directory.start)));
        }
        spans.sort_unstable();
        if let Some(pair) = spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            return Err(bad("two entries of the archive overlap").found(format!(
                "one ends at byte {}, the next begins at byte {}",
                pair[0].1, pair[1].0
            )));
        }
        Ok(Archive {
            bytes,
            entries,
            inflated_bytes: Cell::new(0),
        })
    }

    /// Returns all names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns true if there is an entry of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Returns the size of an entry's content by the directory. Reading the entry verifies it.
    pub fn size_bytes(&self, name: &str) -> Option<u64> {
        self.entries.get(name).map(|e| e.size_bytes)
    }

    /// Returns the content of an entry of at most `limit_bytes` and verifies its checksum.
    ///
    /// # Errors
    /// An entry that is missing, too large, or damaged.
    pub fn content(&self, name: &str, limit_bytes: u64) -> Result<Bytes> {
        let entry = self.entry(name)?;
        if entry.size_bytes > limit_bytes {
            return Err(bad(format!("the entry {} is too large", shown(name)))
                .expected(format!("at most {limit_bytes} bytes"))
                .found(format!("{} bytes", entry.size_bytes)));
        }
        let content = self.mapped(name)?;
        let mut crc = flate2::Crc::new();
        crc.update(&content);
        if crc.sum() != entry.crc {
            return Err(bad(format!(
                "the entry {} is damaged: its checksum is wrong",
                shown(name)
            )));
        }
        Ok(content)
    }

    /// Returns the content of a text entry.
    ///
    /// # Errors
    /// See [`Archive::content`]; a text that is not UTF-8.
    pub fn text(&self, name: &str, limit_bytes: u64) -> Result<String> {
        let bytes = self.content(name, limit_bytes)?;
        String::from_utf8(bytes.to_vec())
            .map_err(|e| bad(format!("the entry {} is not UTF-8: {e}", shown(name))))
    }

    /// Returns the content of a stored entry without reading it: a slice of the mapped file. A compressed entry, which PyTorch
    /// does not write for weights, is inflated into memory.
    ///
    /// # Errors
    /// An entry that is missing or does not inflate to its size.
    pub fn mapped(&self, name: &str) -> Result<Bytes> {
        let entry = self.entry(name)?;
        let data = self
            .bytes
            .slice(entry.start..entry.start + entry.stored_bytes);
        if !entry.deflated {
            return Ok(data);
        }
        let limit = INFLATED_BASE_BYTES.saturating_add(INFLATED_PER_BYTE * self.bytes.len() as u64);
        let total = self.inflated_bytes.get().saturating_add(entry.size_bytes);
        if total > limit {
            return Err(bad("the archive inflates to too much")
                .expected(format!("at most {limit} bytes"))
                .found(format!("{total} bytes up to {}", shown(name)))
                .help("save the model with torch.jit.save or torch.export.save, which store weights uncompressed"));
        }
        self.inflated_bytes.set(total);
        inflate(&data, entry.size_bytes).map_err(|e| e.at(format!("entry {}", shown(name))))
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.entries
            .get(name)
            .ok_or_else(|| bad(format!("the archive has no entry {}", shown(name))))
    }
}

/// Inflates data to exactly `size_bytes`.
fn inflate(data: &[u8], size_bytes: u64) -> Result<Bytes> {
    let wrong = |found: String| {
        bad("a compressed entry has the wrong size")
            .expected(format!("{size_bytes} bytes"))
            .found(found)
    };
    if size_bytes > (data.len() as u64 + 1).saturating_mul(MAX_RATIO) {
        return Err(wrong(format!(
            "{} compressed bytes, which cannot hold that",
            data.len()
        )));
    }
    // The buffer has one byte more than expected, which shows an entry that is longer.
    let mut content = vec![0; size_bytes as usize + 1];
    let mut inflater = flate2::Decompress::new(false);
    let status = inflater
        .decompress(data, &mut content, flate2::FlushDecompress::Finish)
        .map_err(|e| bad(format!("a compressed entry is damaged: {e}")))?;
    if status != flate2::Status::StreamEnd || inflater.total_out() != size_bytes {
        return Err(wrong(format!("{} or more", inflater.total_out())));
    }
    if inflater.total_in() != data.len() as u64 {
        return Err(wrong(format!(
            "{} bytes behind the end",
            data.len() as u64 - inflater.total_in()
        )));
    }
    content.truncate(size_bytes as usize);
    Ok(Bytes::from(content))
}

/// The place of the directory, and the number of its entries.
struct Directory {
    start: usize,
    end: usize,
    entries: u64,
}

impl Directory {
    fn find(bytes: &[u8]) -> Result<Directory> {
        let end = find_end(bytes)?;
        let field = |offset: usize| u64::from(u16_at(bytes, end + offset));
        let wide = |offset: usize| u64::from(u32_at(bytes, end + offset));
        let (disk, directory_disk) = (field(4), field(6));
        let (mut here, mut entries) = (field(8), field(10));
        let (mut size, mut start) = (wide(12), wide(16));
        let mut limit = end;
        let mut disks = disk != directory_disk || (disk != 0 && disk != 0xffff);
        if here == 0xffff || entries == 0xffff || size == 0xffff_ffff || start == 0xffff_ffff {
            let locator = end
                .checked_sub(LOCATOR_64_BYTES)
                .filter(|at| bytes[*at..].starts_with(b"PK\x06\x07"))
                .ok_or_else(|| bad("the archive's zip64 record is missing"))?;
            let record = usize::try_from(u64_at(bytes, locator + 8))
                .ok()
                .filter(|at| at.checked_add(END_64_BYTES).is_some_and(|e| e <= locator))
                .filter(|at| bytes[*at..].starts_with(b"PK\x06\x06"))
                .ok_or_else(|| bad("the archive's zip64 record is not where it should be"))?;
            disks = u32_at(bytes, record + 16) != u32_at(bytes, record + 20);
            here = u64_at(bytes, record + 24);
            entries = u64_at(bytes, record + 32);
            size = u64_at(bytes, record + 40);
            start = u64_at(bytes, record + 48);
            limit = record;
        }
        if disks || here != entries {
            return Err(bad("the archive is one of several parts"));
        }
        if entries > MAX_ENTRIES || entries > size / DIRECTORY_ENTRY_BYTES as u64 {
            return Err(bad(format!(
                "the archive lists {entries} entries in {size} bytes"
            )));
        }
        match start.checked_add(size) {
            Some(end) if end <= limit as u64 => Ok(Directory {
                start: start as usize,
                end: end as usize,
                entries,
            }),
            _ => Err(bad("the archive's directory is not inside the file")
                .found(format!("{size} bytes from byte {start} of {}", bytes.len()))),
        }
    }
}

/// Finds the end record: the last one whose comment ends with the file.
fn find_end(bytes: &[u8]) -> Result<usize> {
    let first = bytes
        .len()
        .saturating_sub(END_BYTES + usize::from(u16::MAX));
    let last = bytes.len().checked_sub(END_BYTES);
    last.and_then(|last| {
        (first..=last).rev().find(|at| {
            bytes[*at..].starts_with(b"PK\x05\x06")
                && at + END_BYTES + usize::from(u16_at(bytes, at + 20)) == bytes.len()
        })
    })
    .ok_or_else(|| {
        bad("the archive is not complete: it has no directory").help("copy or save the file again")
    })
}

/// One line of the directory.
struct Listed<'a> {
    name: &'a [u8],
    flags: u16,
    method: u16,
    crc: u32,
    stored_bytes: u64,
    size_bytes: u64,
    header: u64,
}

impl<'a> Listed<'a> {
    /// Reads the entry at `at`. Also returns the offset of the next one.
    fn read(bytes: &'a [u8], at: usize, end: usize) -> Result<(Listed<'a>, usize)> {
        let cut = || bad("the archive's directory is cut off");
        let fixed = at + DIRECTORY_ENTRY_BYTES;
        if fixed > end || !bytes[at..].starts_with(b"PK\x01\x02") {
            return Err(cut());
        }
        let length = |offset: usize| usize::from(u16_at(bytes, at + offset));
        let (name_bytes, extra_bytes, comment_bytes) = (length(28), length(30), length(32));
        let next = fixed + name_bytes + extra_bytes + comment_bytes;
        if next > end {
            return Err(cut());
        }
        let mut listed = Listed {
            name: &bytes[fixed..fixed + name_bytes],
            flags: u16_at(bytes, at + 8),
            method: u16_at(bytes, at + 10),
            crc: u32_at(bytes, at + 16),
            stored_bytes: u32_at(bytes, at + 20).into(),
            size_bytes: u32_at(bytes, at + 24).into(),
            header: u32_at(bytes, at + 42).into(),
        };
        listed.widen(&bytes[fixed + name_bytes..fixed + name_bytes + extra_bytes])?;
        Ok((listed, next))
    }

    /// Takes the numbers that do not fit into 32 bits from the zip64 field, which holds only those, in this order.
    fn widen(&mut self, extra: &[u8]) -> Result<()> {
        let numbers = [
            &mut self.size_bytes,
            &mut self.stored_bytes,
            &mut self.header,
        ];
        let mut wanting: Vec<&mut u64> =
            numbers.into_iter().filter(|n| **n == 0xffff_ffff).collect();
        if wanting.is_empty() {
            return Ok(());
        }
        let mut rest = extra;
        while rest.len() >= 4 {
            let (id, size) = (u16_at(rest, 0), usize::from(u16_at(rest, 2)));
            let Some(field) = rest.get(4..4 + size) else {
                break;
            };
            if id == 1 && size >= 8 * wanting.len() {
                for (i, number) in wanting.iter_mut().enumerate() {
                    **number = u64_at(field, 8 * i);
                }
                return Ok(());
            }
            rest = &rest[4 + size..];
        }
        Err(bad("an entry's zip64 field is missing").found(shown_bytes(self.name)))
    }

    /// Returns the name; nothing for a folder.
    fn plain_name(&self) -> Result<Option<&'a str>> {
        let wrong = |why: &str| bad(format!("an entry's name {why}")).found(shown_bytes(self.name));
        let name = std::str::from_utf8(self.name).map_err(|_| wrong("is not UTF-8"))?;
        if name.contains(['\\', '\0']) || name.starts_with('/') {
            return Err(wrong("is not a relative path"));
        }
        let (path, folder) = match name.strip_suffix('/') {
            Some(path) => (path, true),
            None => (name, false),
        };
        if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(wrong("is not a plain path"));
        }
        if folder && (self.size_bytes != 0 || self.stored_bytes != 0) {
            return Err(wrong("is a folder's, but the entry has content"));
        }
        Ok((!folder).then_some(name))
    }

    /// Finds the entry's data and checks its header. Also returns the range of bytes of header and data.
    fn locate(&self, bytes: &[u8], limit: usize) -> Result<(Entry, (usize, usize))> {
        let wrong = |why: String| bad(why).at(format!("entry {}", shown_bytes(self.name)));
        if self.flags & 0x2041 != 0 {
            return Err(wrong("an entry is encrypted".into()));
        }
        let deflated = match self.method {
            0 => false,
            8 => true,
            other => {
                return Err(
                    wrong(format!("compression method {other} is not supported"))
                        .expected("stored or deflated"),
                );
            }
        };
        if !deflated && self.stored_bytes != self.size_bytes {
            return Err(wrong("a stored entry has two sizes".into()).found(format!(
                "{} and {} bytes",
                self.stored_bytes, self.size_bytes
            )));
        }
        let outside = || wrong("an entry is not inside the file".into());
        let header = usize::try_from(self.header).map_err(|_| outside())?;
        let name_at = header
            .checked_add(LOCAL_HEADER_BYTES)
            .filter(|at| *at <= limit)
            .ok_or_else(outside)?;
        if !bytes[header..].starts_with(b"PK\x03\x04") {
            return Err(wrong(
                "an entry's header is not where the directory says".into(),
            ));
        }
        let name_bytes = usize::from(u16_at(bytes, header + 26));
        let extra_bytes = usize::from(u16_at(bytes, header + 28));
        if bytes[name_at..limit].get(..name_bytes) != Some(self.name)
            || u16_at(bytes, header + 8) != self.method
        {
            return Err(wrong(
                "an entry and the directory disagree about what it is".into(),
            ));
        }
        // With bit 3 set, the sizes follow the data. Sizes that are all ones stand in the zip64 field.
        if u16_at(bytes, header + 6) & 8 == 0 {
            let own = [u32_at(bytes, header + 18), u32_at(bytes, header + 22)];
            for (own, listed) in own.into_iter().zip([self.stored_bytes, self.size_bytes]) {
                if own != u32::MAX && u64::from(own) != listed {
                    return Err(
                        wrong("an entry and the directory disagree about its size".into())
                            .found(format!("{own} and {listed} bytes")),
                    );
                }
            }
        }
        let start = name_at + name_bytes + extra_bytes;
        let end = usize::try_from(self.stored_bytes)
            .ok()
            .and_then(|n| start.checked_add(n))
            .filter(|end| *end <= limit)
            .ok_or_else(outside)?;
        let entry = Entry {
            deflated,
            crc: self.crc,
            start,
            stored_bytes: end - start,
            size_bytes: self.size_bytes,
        };
        Ok((entry, (header, end)))
    }
}

/// Returns a name for messages: quoted, escaped, and short.
fn shown(name: &str) -> String {
    let short: String = name.chars().take(120).collect();
    format!("{short:?}")
}

fn shown_bytes(name: &[u8]) -> String {
    shown(&String::from_utf8_lossy(name))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests;
