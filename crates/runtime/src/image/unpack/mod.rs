//! The bootstrap layer: a tar with `image/image.boot` in it, compressed with zstd, or with gzip by
//! others.

mod error;
mod headers;
mod meta;

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Seek as _},
    path::{Path, PathBuf},
};

use flate2::bufread::MultiGzDecoder;
use lazuli_image::{
    Algorithm, BlobIndex, Digest, FormatError, Hasher,
    rafs::{
        self, BlobRecord, Bootstrap, Placed,
        layout::{MAX_ROWS, Origin},
        v5,
    },
};
use lazuli_sys::mmap::{FinishedFile, Map};

pub(super) use self::error::BOOTSTRAP_LIMIT;
pub use self::error::UnpackError;
use self::{error::LAYER_LIMIT, headers::Described};
use super::{
    chunk_limit::{self, Purpose, Reservation},
    point_files,
};

/// How zstd begins, RFC 8878.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Bytes that are read and written at a time.
const PIECE: usize = 256 << 10;

/// The bootstrap's names in the layer: since Nydus 2.0, and before.
const NAMES: [&[u8]; 2] = [b"image/image.boot", b"image.boot"];

/// A bootstrap in a file, and the CI tables of version 2 that came with it.
#[derive(Debug)]
pub(super) struct Unpacked {
    path: PathBuf,
    bootstrap: Bootstrap<Map>,
    reservation: Reservation,
    tables: Vec<(BlobIndex, Vec<u8>)>,
    diff_id: Digest,
}

impl Unpacked {
    /// What the bootstrap says of its blobs.
    pub(super) fn records(&self) -> Vec<BlobRecord> {
        self.bootstrap.blob_records()
    }

    /// Blobs whose chunks' places are only in CI tables, which did not come with the bootstrap.
    pub(super) fn wanted(&self) -> Vec<(BlobIndex, BlobRecord)> {
        let is_here = |blob: &BlobIndex| self.tables.iter().any(|(index, _)| index == blob);
        let wanted = self.bootstrap.unplaced().iter().filter(|blob| !is_here(blob));
        let records = self.bootstrap.blob_records();
        wanted.map(|blob| (*blob, records[usize::from(blob.0)].clone())).collect()
    }

    /// SHA-256 of the whole tar: the layer's DiffID in the image's configuration. For a bootstrap
    /// file, which came without a tar, that of the file.
    pub(super) fn diff_id(&self) -> Digest {
        self.diff_id
    }

    /// Gives it the CI table of a blob.
    pub(super) fn give(&mut self, blob: BlobIndex, table: Vec<u8>) {
        self.tables.push((blob, table));
    }

    /// Opens the bootstrap with all chunks placed, after checking it against its CI tables of
    /// version 2.
    pub(super) fn open(self) -> Result<(Bootstrap<Map>, Reservation), UnpackError> {
        let Unpacked { path, mut bootstrap, mut reservation, tables, .. } = self;
        if !bootstrap.unplaced().is_empty() {
            let placed =
                rafs::place_chunks(bootstrap.bytes(), &tables).map_err(UnpackError::Format)?;
            let Placed { at, table, points } = placed;
            let (before, rest) = bootstrap.bytes().split_at(at as usize);
            let content = before.chain(&table[..]).chain(&rest[table.len()..]);
            // The old file remains mapped.
            fs::remove_file(&path)?;
            let file = FinishedFile::create(&path, BufReader::with_capacity(PIECE, content))?;
            drop((bootstrap, reservation));
            point_files::write(&path, &points)?;
            (bootstrap, reservation) = open(file, &path)?.map_err(UnpackError::Format)?;
        }
        let attached = point_files::attach(&path, &mut bootstrap);
        attached.map_err(|unusable| UnpackError::Io(unusable.problem))?;
        if !tables.is_empty() {
            let records = bootstrap.blob_records();
            for (BlobIndex(index), table) in &tables {
                let record = &records[usize::from(*index)];
                rafs::check_ci_table(record, table).map_err(|source| UnpackError::Meta {
                    blob: record.blob.id.hex().to_string(),
                    source,
                })?;
            }
        }
        Ok((bootstrap, reservation))
    }
}

/// Copies the bootstrap out of `layer` to the new file `to`, translates it from RAFS v5 if
/// necessary, and checks the `.blob.meta` files behind it. Always reads `layer` to its end, so that
/// a reader which checks a digest there can do so: its error explains every other one.
pub(super) fn unpack(layer: impl Read, to: &Path) -> Result<Unpacked, UnpackError> {
    let mut layer = BufReader::with_capacity(PIECE, layer);
    let mut tables = Vec::new();
    let unpacked = search(&mut layer, to, &mut tables);
    io::copy(&mut layer, &mut io::sink())?;
    let (opened, diff_id) = unpacked?;
    let (bootstrap, reservation) =
        opened.ok_or(UnpackError::Missing)?.map_err(UnpackError::Format)?;
    Ok(Unpacked { path: to.to_owned(), bootstrap, reservation, tables, diff_id })
}

/// SHA-256 of the first `size` bytes of a file.
pub(super) fn sha256(mut file: &File, size: u64) -> io::Result<Digest> {
    file.rewind()?;
    let mut content = Hashed { inner: file.take(size), hasher: Algorithm::Sha256.hasher() };
    io::copy(&mut content, &mut io::sink())?;
    Ok(content.hasher.finish())
}

/// Copies a bootstrap file, of `size` bytes and with this SHA-256, to the new file `to`, and
/// translates it from RAFS v5 if necessary.
pub(super) fn copy(
    from: &File,
    (size, digest): (u64, Digest),
    to: &Path,
) -> Result<Unpacked, UnpackError> {
    let mut from = from;
    from.rewind()?;
    let mut content = Hashed { inner: from.take(size), hasher: Algorithm::Sha256.hasher() };
    let file = FinishedFile::create(to, BufReader::with_capacity(PIECE, &mut content))?;
    if content.hasher.finish() != digest {
        return Err(UnpackError::Changed);
    }
    let (bootstrap, reservation) = open(file, to)?.map_err(UnpackError::Format)?;
    let (path, tables) = (to.to_owned(), Vec::new());
    Ok(Unpacked { path, bootstrap, reservation, tables, diff_id: digest })
}

type Opened = Result<(Bootstrap<Map>, Reservation), FormatError>;

/// A reader that hashes its input.
struct Hashed<R> {
    inner: R,
    hasher: Hasher,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}

/// The bootstrap in `layer`, and the digest of the tar that the layer holds, to the tar's last
/// byte.
fn search(
    layer: &mut impl BufRead,
    to: &Path,
    tables: &mut Vec<(BlobIndex, Vec<u8>)>,
) -> Result<(Option<Opened>, Digest), UnpackError> {
    let layer: Box<dyn Read + '_> = match layer.fill_buf()?.starts_with(&ZSTD_MAGIC) {
        true => Box::new(zstd::Decoder::with_buffer(layer)?),
        false => Box::new(MultiGzDecoder::new(layer)),
    };
    // One byte more distinguishes a longer tar from one of exactly this size.
    let mut tar = Hashed { inner: layer.take(LAYER_LIMIT + 1), hasher: Algorithm::Sha256.hasher() };
    let bootstrap = search_tar(&mut tar, to, tables)?;
    // Archivers append more zeros than a reader of entries consumes.
    io::copy(&mut tar, &mut io::sink())?;
    if tar.inner.limit() == 0 {
        return Err(UnpackError::LayerTooLarge);
    }
    Ok((bootstrap, tar.hasher.finish()))
}

fn search_tar(
    tar: &mut impl Read,
    to: &Path,
    tables: &mut Vec<(BlobIndex, Vec<u8>)>,
) -> Result<Option<Opened>, UnpackError> {
    let mut archive = tar::Archive::new(tar);
    let mut bootstrap = None;
    let mut described = Described::default();
    // Raw, since the archive itself would read a name of any size into memory.
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        if described.take(&mut entry)? {
            continue;
        }
        let path = std::mem::take(&mut described).name_of(&entry)?;
        let name = path.strip_prefix(b"./").unwrap_or(&path);
        if !NAMES.contains(&name) {
            // Without a sound bootstrap there is nothing to compare with.
            if let (Some(Ok((bootstrap, _))), Some(id)) = (&bootstrap, meta::blob_of(name))
                && let Some((blob, table)) = meta::check(&mut entry, id, bootstrap)?
                && !tables.iter().any(|(known, _)| *known == blob)
            {
                tables.push((blob, table));
            }
            continue;
        }
        if bootstrap.is_some() {
            return Err(UnpackError::Twice);
        }
        if entry.size() > BOOTSTRAP_LIMIT {
            return Err(UnpackError::TooLarge(entry.size()));
        }
        let file = FinishedFile::create(to, BufReader::with_capacity(PIECE, entry))?;
        bootstrap = Some(open(file, to)?);
    }
    Ok(bootstrap)
}

/// Opens a bootstrap. One of RAFS v5 is replaced with its translation, at `path`.
fn open(file: FinishedFile, path: &Path) -> Result<Opened, UnpackError> {
    let map = Map::of(file)?;
    if !v5::is_v5(map.as_ref()) {
        // Only a bootstrap translated here may lack the tables of v6.
        let own = |opened: (Bootstrap<Map>, Reservation)| match opened.0.origin() {
            Origin::V6 => Ok(opened),
            _ => Err(FormatError::new("superblock", 1024, "a label that no image may have")),
        };
        return Ok(parse(map)?.and_then(own));
    }
    let translated = match v5::translate(map.as_ref()) {
        Ok(translated) => translated,
        Err(error) => return Ok(Err(error)),
    };
    drop(map);
    fs::remove_file(path)?;
    parse(Map::of(FinishedFile::create(path, &translated[..])?)?)
}

/// Opens a bootstrap that was made on this node.
pub(super) fn open_own(file: FinishedFile) -> Result<(Bootstrap<Map>, Reservation), UnpackError> {
    parse(Map::of(file)?)?.map_err(UnpackError::Format)
}

/// Reads the tables, if there is room for them.
fn parse(map: Map) -> Result<Opened, UnpackError> {
    let count = match rafs::chunk_rows(map.as_ref()) {
        Ok(count) => count,
        Err(error) => return Ok(Err(error)),
    };
    let reservation = chunk_limit::reserve(count.min(MAX_ROWS), Purpose::New)
        .map_err(|left| UnpackError::TooManyChunks { count, left })?;
    Ok(Bootstrap::open(map).map(|bootstrap| (bootstrap, reservation)))
}

#[cfg(fuzzing)]
pub(crate) mod fuzz {
    /// A compressed tar with a bootstrap.
    pub fn bootstrap_layer(layer: &[u8]) {
        let path = format!("/dev/shm/lazuli-fuzz-{}", std::process::id());
        let path = std::path::Path::new(&path);
        if let Ok(unpacked) = super::unpack(layer, path) {
            let _ = unpacked.open();
        }
        let _ = std::fs::remove_file(path);
        let _ = super::point_files::remove(path);
    }
}

/// Runs blocking work on a thread of its own.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, UnpackError> + Send + 'static,
) -> Result<T, UnpackError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| Err(UnpackError::Io(io::Error::other(panic))))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};
    use lazuli_image::rafs::BootstrapOptions;
    use lazuli_testkit::{packed, v5};

    use super::{error::EXTENSION_LIMIT, *};

    fn layer(name: &str, size: u64, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_path(name).unwrap();
        header.set_size(size);
        header.set_cksum();
        let padding = vec![0; 1024 + 512 - content.len() % 512];
        [header.as_bytes(), content, &padding].concat()
    }

    fn gzip(tar: &[u8]) -> Vec<u8> {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(tar).unwrap();
        gzip.finish().unwrap()
    }

    fn zstd(tar: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(tar, 1).unwrap()
    }

    #[test]
    fn finds_the_bootstrap_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let names = ["image/image.boot", "./image/image.boot", "image.boot"];
        for (pack, kind) in [(gzip as fn(&[u8]) -> Vec<u8>, "gzip"), (zstd, "zstd")] {
            for (index, name) in names.iter().enumerate() {
                let to = directory.path().join(format!("{kind}{index}"));
                let unpacked = unpack(&pack(&layer(name, 5, b"hello"))[..], &to).map(drop);
                assert!(matches!(unpacked, Err(UnpackError::Format(_))), "{unpacked:?}");
                assert_eq!(std::fs::read(to).unwrap(), b"hello");
            }
            let to = directory.path().join("none");
            let unpacked = |tar: &[u8]| unpack(&pack(tar)[..], &to).map(drop);
            assert!(matches!(unpacked(&layer("a", 1, b"x")), Err(UnpackError::Missing)));
            let huge = layer("image.boot", BOOTSTRAP_LIMIT + 1, b"x");
            assert!(matches!(unpacked(&huge), Err(UnpackError::TooLarge(_))));
            let whole = pack(&layer("image.boot", 5, b"hello"));
            assert!(matches!(unpack(&whole[..20], &to), Err(UnpackError::Io(_))));
        }
    }

    /// A member of this kind.
    fn member(kind: u8, size: u64, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_path("a").unwrap();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(size);
        header.set_cksum();
        let padding = content.len().next_multiple_of(512) - content.len();
        [header.as_bytes(), content, &vec![0; padding]].concat()
    }

    #[test]
    fn names_come_from_the_headers_before_a_member() {
        let directory = tempfile::tempdir().unwrap();
        let record = b"25 path=image/image.boot\n";
        for (number, headers) in [
            member(b'L', 17, b"image/image.boot\0"),
            member(b'x', 25, record),
            [member(b'g', 25, record), member(b'L', 17, b"image/image.boot\0")].concat(),
            [member(b'K', 3, b"abc"), member(b'x', 25, record)].concat(),
        ]
        .into_iter()
        .enumerate()
        {
            let to = directory.path().join(number.to_string());
            let tar = [headers, member(b'0', 5, b"hello"), vec![0; 1024]].concat();
            let error = unpack(&zstd(&tar)[..], &to).unwrap_err();
            assert!(matches!(error, UnpackError::Format(_)), "{number}: {error}");
            assert_eq!(std::fs::read(to).unwrap(), b"hello");
        }
    }

    #[test]
    fn headers_are_bounded_and_unequivocal() {
        let directory = tempfile::tempdir().unwrap();
        let rest = [member(b'0', 5, b"hello"), vec![0; 1024]].concat();
        let long = EXTENSION_LIMIT + 1;
        for (headers, expected) in [
            (member(b'L', long, &vec![b'a'; long as usize]), "65537 bytes; the limit is 65536"),
            (member(b'x', 2 << 30, b"never read"), "2147483648 bytes"),
            ([member(b'L', 1, b"a"), member(b'L', 1, b"b")].concat(), "two headers of a kind"),
            (member(b'x', 9, b"9 size=6\n"), "two sizes"),
            (member(b'S', 0, b""), "sparse"),
            (member(b'x', 3, b"abc"), "malformed pax"),
        ] {
            let to = directory.path().join("bootstrap");
            let error = unpack(&zstd(&[headers, rest.clone()].concat())[..], &to).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    /// Data behind the last entry belongs to the layer too, however it is compressed.
    #[test]
    fn diff_id_is_of_the_whole_tar() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), b"content").unwrap();
        let bootstrap = packed::pack(directory.path()).unwrap().bootstrap;
        let mut tar = layer("image/image.boot", bootstrap.len() as u64, &bootstrap);
        tar.extend([0; 20 << 10]);
        tar.extend(b"trailing");
        let two = [zstd(&tar[..700]), zstd(&tar[700..])].concat();
        for (number, layer) in [gzip(&tar), zstd(&tar), two].iter().enumerate() {
            let unpacked = unpack(&layer[..], &directory.path().join(number.to_string())).unwrap();
            assert_eq!(unpacked.diff_id(), Algorithm::Sha256.digest(&tar), "{number}");
        }
    }

    #[test]
    fn v5_becomes_v6() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), b"content").unwrap();
        let made = Bootstrap::open(packed::pack(directory.path()).unwrap().bootstrap).unwrap();
        let options = BootstrapOptions::default();
        let mut old = v5::write(&made.tree().unwrap(), made.blobs(), &options);
        let to = directory.path().join("bootstrap");
        let tar = |old: &[u8]| layer("image/image.boot", old.len() as u64, old);
        let image = |old: &[u8]| zstd(&tar(old));
        let unpacked = unpack(&image(&old)[..], &to).unwrap();
        assert_eq!(unpacked.diff_id(), Algorithm::Sha256.digest(&tar(&old)));
        let (unpacked, _) = unpacked.open().unwrap();
        assert_eq!((unpacked.version(), unpacked.inode_count()), (5, 2));
        assert!(unpacked.bytes() == fs::read(&to).unwrap());
        let error = unpack(&image(unpacked.bytes())[..], &directory.path().join("v6")).unwrap_err();
        assert!(error.to_string().contains("a label that no image may have"), "{error}");
        old[5] = 4;
        let to = directory.path().join("v4");
        let error = unpack(&image(&old)[..], &to).unwrap_err().to_string();
        assert!(error.contains("version 0x400"), "{error}");
    }
}
