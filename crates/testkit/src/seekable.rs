//! Layers of eStargz and zstd:chunked, written straight from their descriptions, without the code
//! under test.

use std::io::Write as _;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use lazuli_image::Algorithm;
use serde_json::{Map, Value, json};

use crate::{
    oci::Layer,
    tarball::{Body, Entry},
};

/// Which format a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// eStargz: gzip, TOC in a tar, footer of 51 bytes.
    Estargz,
    /// The same with the footer of 47 bytes that came before.
    OldEstargz,
    /// zstd:chunked as stargz-snapshotter writes it.
    StargzChunked,
    /// zstd:chunked as containers/storage writes it: pieces end anywhere, nothing else is in their
    /// frames.
    ContainersChunked,
}

/// How a layer is written.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Which format.
    pub format: Format,
    /// Bytes of a piece; of [`Format::ContainersChunked`] a bound.
    pub chunk_size: usize,
    /// Pieces share a member or frame until it has so many bytes.
    pub min_chunk_size: usize,
    /// A landmark comes before the entry with this number.
    pub landmark: Option<usize>,
}

impl Options {
    /// The format with pieces of 4 MiB, each in a member of its own.
    pub fn new(format: Format) -> Self {
        Options { format, chunk_size: 4 << 20, min_chunk_size: 0, landmark: None }
    }
}

/// An entry as both formats can say it: text in names and times in whole seconds. `None` if its
/// names are no text.
pub fn storable(mut entry: Entry) -> Option<Entry> {
    let names = match &entry.body {
        Body::Symlink(target) | Body::HardLink(target) => vec![&entry.path, target],
        _ => vec![&entry.path],
    };
    if names.into_iter().any(|name| std::str::from_utf8(name).is_err()) {
        return None;
    }
    if let Body::Sparse { size, pieces, .. } = &entry.body {
        let mut content = vec![0; *size as usize];
        for (offset, bytes) in pieces {
            content[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        entry.body = Body::File(content);
    }
    entry.mtime.1 = 0;
    Some(entry)
}

/// Writes a layer of these entries.
pub fn write(entries: &[Entry], options: &Options) -> Layer {
    write_forged(entries, options, |_| {})
}

/// The same, with entries of the table of contents changed before it is written. The annotation has
/// the digest of the changed one.
pub fn write_forged(
    entries: &[Entry],
    options: &Options,
    forge: impl FnOnce(&mut Vec<Value>),
) -> Layer {
    let mut writer = Writer {
        options: *options,
        stored: Vec::new(),
        tar: Vec::new(),
        pending: Vec::new(),
        has_payload: false,
        toc: Vec::new(),
    };
    let landmark = Entry::file(".prefetch.landmark", [0x0f]);
    for (number, entry) in entries.iter().enumerate() {
        if options.landmark == Some(number) {
            writer.entry(&landmark);
        }
        writer.entry(entry);
    }
    forge(&mut writer.toc);
    writer.finish()
}

struct Writer {
    options: Options,
    stored: Vec<u8>,
    tar: Vec<u8>,
    /// Decoded content of the member or frame being filled.
    pending: Vec<u8>,
    /// Whether there is a file's content in it.
    has_payload: bool,
    toc: Vec<Value>,
}

impl Writer {
    fn is_gzip(&self) -> bool {
        matches!(self.options.format, Format::Estargz | Format::OldEstargz)
    }

    fn pack(&self, bytes: &[u8]) -> Vec<u8> {
        if self.is_gzip() { gzip(bytes) } else { zstd::bulk::compress(bytes, 3).unwrap() }
    }

    fn flush(&mut self) {
        if !self.pending.is_empty() {
            self.stored.extend(self.pack(&self.pending));
            self.pending.clear();
        }
        self.has_payload = false;
    }

    fn put(&mut self, bytes: &[u8]) {
        self.tar.extend_from_slice(bytes);
        self.pending.extend_from_slice(bytes);
    }

    fn entry(&mut self, entry: &Entry) {
        let mut bytes = Vec::new();
        entry.write(&mut bytes);
        let Body::File(content) = &entry.body else {
            self.toc.push(describe(entry, Map::new()));
            return self.put(&bytes);
        };
        let head = bytes.len() - content.len().next_multiple_of(512);
        self.put(&bytes[..head]);
        let mut fields = Map::new();
        if !content.is_empty() {
            fields.insert("size".into(), content.len().into());
            fields.insert("digest".into(), digest(content).into());
        }
        let first = self.toc.len();
        let (mut rest, mut number) = (&content[..], 0);
        let is_containers = self.options.format == Format::ContainersChunked;
        while !rest.is_empty() {
            let size = match is_containers {
                // Borders of which nothing is known.
                true => self.options.chunk_size / 3 + number * 7919 % self.options.chunk_size,
                false => self.options.chunk_size,
            };
            let (piece, later) = rest.split_at(size.min(rest.len()));
            if !self.has_payload || self.pending.len() >= self.options.min_chunk_size {
                self.flush();
            }
            let mut said = Map::new();
            let mut say = |key: &str, value: Value| said.insert(key.into(), value);
            say("offset", self.stored.len().into());
            if !self.pending.is_empty() {
                say("innerOffset", self.pending.len().into());
            }
            let (is_only, at) = (piece.len() == content.len(), content.len() - rest.len());
            if !(is_only && is_containers) {
                say("chunkDigest", digest(piece).into());
                // The last piece of a file of eStargz goes on to its end.
                if at > 0 {
                    say("chunkOffset", at.into());
                }
                if !later.is_empty() || is_containers {
                    say("chunkSize", piece.len().into());
                }
            }
            self.put(piece);
            self.has_payload = true;
            if is_containers {
                self.flush();
            }
            if number == 0 {
                let mut fields = fields.clone();
                fields.extend(said);
                self.toc.push(describe(entry, fields));
            } else {
                said.insert("type".into(), "chunk".into());
                said.insert("name".into(), text(&entry.path).into());
                self.toc.push(Value::Object(said));
            }
            (rest, number) = (later, number + 1);
        }
        if is_containers && number > 0 {
            self.toc[first]["endOffset"] = self.stored.len().into();
        }
        if number == 0 {
            self.toc.push(describe(entry, fields));
        }
        self.put(&bytes[head + content.len()..]);
    }

    fn finish(mut self) -> Layer {
        let json = json!({ "version": 1, "entries": self.toc }).to_string().into_bytes();
        let annotations = match self.options.format {
            Format::Estargz | Format::OldEstargz => self.finish_gzip(&json),
            Format::StargzChunked => self.finish_zstd(&json, b"GnUlInUx"),
            Format::ContainersChunked => self.finish_zstd(&json, b"GNUlInUx"),
        };
        let media_type = match self.is_gzip() {
            true => "application/vnd.oci.image.layer.v1.tar+gzip",
            false => "application/vnd.oci.image.layer.v1.tar+zstd",
        };
        Layer::stored_as(self.tar, self.stored, media_type, annotations)
    }

    fn finish_gzip(&mut self, json: &[u8]) -> Vec<(&'static str, String)> {
        self.flush();
        let at = self.stored.len();
        let mut toc = Vec::new();
        Entry::file("stargz.index.json", json).write(&mut toc);
        toc.extend([0; 1024]);
        self.put(&toc);
        self.flush();
        let (head, id): (&[u8], &[u8]) = match self.options.format {
            Format::OldEstargz => (b"\x16\0", b""),
            _ => (b"\x1a\0", b"SG\x16\0"),
        };
        let place = format!("{at:016x}STARGZ");
        let empty = b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0";
        let footer = [b"\x1f\x8b\x08\x04\0\0\0\0\0\xff", head, id, place.as_bytes(), empty];
        self.stored.extend(footer.concat());
        vec![("containerd.io/snapshot/stargz/toc.digest", digest(json))]
    }

    fn finish_zstd(&mut self, json: &[u8], magic: &[u8; 8]) -> Vec<(&'static str, String)> {
        self.put(&[0; 1024]);
        self.flush();
        let stored = zstd::bulk::compress(json, 3).unwrap();
        let at = self.stored.len() + 8;
        self.skippable(&stored);
        let numbers = [at, stored.len(), json.len(), 1];
        let mut footer: Vec<u8> =
            numbers.iter().flat_map(|number| (*number as u64).to_le_bytes()).collect();
        let is_containers = self.options.format == Format::ContainersChunked;
        if is_containers {
            // No reader that is tested needs what it takes to make the tar again.
            let split = self.stored.len() as u64 + 8;
            self.skippable(b"tar-split");
            footer.extend([split, 9, 9].iter().flat_map(|number| number.to_le_bytes()));
        }
        footer.extend(magic);
        self.skippable(&footer);
        let position = format!("{at}:{}:{}:1", stored.len(), json.len());
        match is_containers {
            true => vec![
                ("io.github.containers.zstd-chunked.manifest-checksum", digest(&stored)),
                ("io.github.containers.zstd-chunked.manifest-position", position),
            ],
            false => vec![
                ("containerd.io/snapshot/stargz/toc.digest", digest(json)),
                ("io.containers.zstd-chunked.manifest-checksum", digest(&stored)),
                ("io.containers.zstd-chunked.manifest-position", position),
            ],
        }
    }

    fn skippable(&mut self, payload: &[u8]) {
        self.stored.extend(b"\x50\x2a\x4d\x18");
        self.stored.extend((payload.len() as u32).to_le_bytes());
        self.stored.extend(payload);
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn digest(bytes: &[u8]) -> String {
    Algorithm::Sha256.digest(bytes).to_string()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("names are text")
}

/// The entry of a table of contents.
fn describe(entry: &Entry, mut fields: Map<String, Value>) -> Value {
    let mut say = |key: &str, value: Value| {
        if value != 0 {
            fields.insert(key.into(), value);
        }
    };
    let mut device = |kind: &'static str, major: u32, minor: u32| {
        say("devMajor", major.into());
        say("devMinor", minor.into());
        kind
    };
    let kind = match &entry.body {
        Body::File(_) => "reg",
        Body::Directory => "dir",
        Body::Symlink(_) => "symlink",
        Body::HardLink(_) => "hardlink",
        Body::Char(major, minor) => device("char", *major, *minor),
        Body::Block(major, minor) => device("block", *major, *minor),
        Body::Fifo => "fifo",
        Body::Sparse { .. } => panic!("a tar has no sparse files here"),
    };
    say("type", kind.into());
    say("name", text(&entry.path).into());
    if let Body::Symlink(target) | Body::HardLink(target) = &entry.body {
        say("linkName", text(target).into());
    }
    say("mode", entry.mode.into());
    say("uid", entry.uid.into());
    say("gid", entry.gid.into());
    say("modtime", time(entry.mtime.0).into());
    let xattr = |(key, value): &(Vec<u8>, Vec<u8>)| {
        let name = text(key).strip_prefix("SCHILY.xattr.")?;
        Some((name.to_owned(), Value::from(BASE64.encode(value))))
    };
    let xattrs: Map<_, _> = entry.records.iter().filter_map(xattr).collect();
    if !xattrs.is_empty() {
        say("xattrs", xattrs.into());
    }
    Value::Object(fields)
}

/// RFC 3339, counted day by day.
fn time(seconds: i64) -> String {
    let (mut days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let is_leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let of_year = |year| if is_leap(year) { 366 } else { 365 };
    let mut year = 1970;
    while days < 0 {
        year -= 1;
        days += of_year(year);
    }
    while days >= of_year(year) {
        days -= of_year(year);
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days + 1)
}
