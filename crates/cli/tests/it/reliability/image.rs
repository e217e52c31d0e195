//! An image that stays cold for a while: thousands of chunks with known content, behind a registry
//! that takes its time.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use lazuli_testkit::{
    content,
    oci::{Compression, Image, Layer},
    odd,
    reading::{PAYLOAD, PLACEHOLDER, Readable},
    registry::FakeRegistry,
};

use crate::lazuli::Lazuli;

/// Latency of a request to a nearby registry.
pub(crate) const LATENCY: Duration = Duration::from_millis(5);

/// Number of small files, which have one chunk each: so many that eight readers need seconds.
const SMALL_FILES: u64 = 1800;
const SMALL_SIZE: u64 = 60_000;
/// Files of many chunks.
const BIG_FILES: u64 = 9;
const BIG_SIZE: u64 = (4 << 20) + 5;
const PROGRAMS: u64 = 24;
/// Blobs of the image.
const LAYERS: u64 = 3;

/// An image in a registry of its own.
pub(crate) struct ColdImage {
    pub(crate) registry: FakeRegistry,
    /// Its name.
    pub(crate) name: String,
    /// Files with content, by their paths in the image.
    pub(crate) files: Vec<Readable>,
    /// Programs that check themselves.
    pub(crate) programs: Vec<Readable>,
    /// Digest of the programs' machine code.
    pub(crate) code: String,
    /// Bytes of all files.
    pub(crate) size: u64,
}

impl ColdImage {
    /// The image that all tests of this process share.
    pub(crate) fn shared() -> &'static ColdImage {
        static IMAGE: OnceLock<ColdImage> = OnceLock::new();
        IMAGE.get_or_init(ColdImage::make)
    }

    fn make() -> Self {
        let registry = FakeRegistry::start().unwrap();
        let program = fs::read(built("selfcheck")).unwrap();
        let code = Command::new(built("selfcheck")).arg("code").output().unwrap();
        let mut image = ColdImage {
            name: format!("{}/cold:latest", registry.host()),
            registry,
            files: Vec::new(),
            programs: Vec::new(),
            code: String::from_utf8(code.stdout).unwrap().trim().to_owned(),
            size: 0,
        };
        let layers: Vec<Layer> = (0..LAYERS).map(|layer| image.layer(layer, &program)).collect();
        let lazuli = Lazuli::new();
        Image::new(layers).write_layout(&lazuli.path("source"), "x").unwrap();
        lazuli.ok(["convert", "oci:source:x", &image.name]);
        image.size = image.files.iter().chain(&image.programs).map(|file| file.size).sum();
        image.registry.set_latency(LATENCY);
        image
    }

    /// The files of one layer, noted and written as a tar.
    fn layer(&mut self, layer: u64, program: &[u8]) -> Layer {
        let mut tar = tar::Builder::new(Vec::new());
        let mut add = |kind: &str, index: u64, mode: u32, content: &[u8]| {
            let path = PathBuf::from(format!("{kind}-{index}"));
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(mode);
            tar.append_data(&mut header, &path, content).unwrap();
            Readable { path, seed: seed(kind, index), size: content.len() as u64 }
        };
        // Without it programs of two layers would lie at the same place of their blobs. They share
        // a chunk, so the driver `loop` would refuse the image.
        add("shift", layer, 0o644, &odd::random(seed("shift", layer), 1 + 4096 * layer as usize));
        let own = |count: u64| (0..count).filter(move |index| index % LAYERS == layer);
        for (kind, count, size) in
            [("small", SMALL_FILES, SMALL_SIZE), ("big", BIG_FILES, BIG_SIZE)]
        {
            for index in own(count) {
                let content = odd::random(seed(kind, index), size as usize);
                self.files.push(add(kind, index, 0o644, &content));
            }
        }
        for index in own(PROGRAMS) {
            let content = with_payload(program, seed("program", index));
            self.programs.push(add("program", index, 0o755, &content));
        }
        Layer::new(tar.into_inner().unwrap(), Compression::None)
    }

    /// The same files below a mount point.
    pub(crate) fn files_at(&self, mountpoint: &Path) -> Vec<Readable> {
        below(&self.files, mountpoint)
    }

    /// The same programs below a mount point.
    pub(crate) fn programs_at(&self, mountpoint: &Path) -> Vec<Readable> {
        below(&self.programs, mountpoint)
    }
}

fn below(files: &[Readable], mountpoint: &Path) -> Vec<Readable> {
    let at = |file: &Readable| Readable { path: mountpoint.join(&file.path), ..file.clone() };
    files.iter().map(at).collect()
}

/// Far apart, so that no content is a part of another one.
fn seed(kind: &str, index: u64) -> u64 {
    u64::from(kind.as_bytes()[0]) << 56 | index << 24
}

/// `selfcheck` with the content of a seed in it, and without debug information.
fn with_payload(program: &[u8], seed: u64) -> Vec<u8> {
    let mut program = program[..loaded_end(program)].to_vec();
    let at = program.windows(PAYLOAD).step_by(1).position(|window| {
        window[0] == PLACEHOLDER && window.iter().all(|byte| *byte == PLACEHOLDER)
    });
    content::fill(seed, 0, &mut program[at.expect("the payload")..][..PAYLOAD]);
    program
}

/// The end of the last loaded segment of a 64-bit ELF file.
fn loaded_end(elf: &[u8]) -> usize {
    let word = |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().unwrap()) as usize;
    let half = |at: usize| usize::from(u16::from_le_bytes([elf[at], elf[at + 1]]));
    let (headers, size, count) = (word(32), half(54), half(56));
    let segments = (0..count).map(|index| headers + index * size);
    let loaded = segments.filter(|at| elf[*at..*at + 4] == 1_u32.to_le_bytes());
    loaded.map(|at| word(at + 8) + word(at + 32)).max().expect("an ELF program")
}

/// A program of the test kit. A run of all tests builds it, a run of this package's tests does not.
pub(crate) fn built(name: &str) -> PathBuf {
    static BUILD: OnceLock<()> = OnceLock::new();
    let path = Path::new(env!("CARGO_BIN_EXE_lazuli")).with_file_name(name);
    BUILD.get_or_init(|| {
        if !path.exists() {
            let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
            let build =
                cargo.args(["build", "--quiet", "--locked", "-p", "lazuli-testkit", "--bins"]);
            assert!(build.status().unwrap().success(), "cannot build {name}");
        }
    });
    path
}
