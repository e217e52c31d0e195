//! Guesses from the image alone which files a container's start reads.
//!
//! The config names the program. The program names its dynamic linker and its libraries, or its
//! interpreter; libraries name libraries. What else is read follows from names: of locales in the
//! environment, of the files next to an interpreter.
//!
//! ```text
//! config ─▶ command ─▶ paths ─▶ file ─┬─ ELF ─▶ linker ─▶ libraries ─▶ …
//!                                     ├─ #! and shell scripts ─▶ programs ─▶ …
//!                                     ├─ modules ─▶ imports ─▶ modules ─▶ …
//!                                     ├─ settings ─▶ settings, plug-ins ─▶ …
//!                                     ├─ constants ─▶ files, directories, commands
//!                                     └─ habits ─▶ files
//! ```
//!
//! Nothing of the image is believed: a wrong guess costs bytes, and how many it may cost is
//! bounded.

mod command;
mod constants;
mod elf;
#[cfg(fuzzing)]
pub(crate) mod fuzz {
    pub use super::{
        constants::fuzz::constants, elf::fuzz::elf, imports::fuzz::imports,
        settings::fuzz::settings,
    };
}
mod habits;
mod imports;
mod known_settings;
mod linker;
mod modules;
mod paths;
mod settings;
mod shells;
mod state;
#[cfg(test)]
mod tests;

use std::{mem, ops::Range};

use async_trait::async_trait;
use futures_util::{FutureExt as _, StreamExt, future::join_all, stream::FuturesUnordered};
use lazuli_image::{Decoded, erofs::Nid, rafs::Bootstrap};
use serde_json::Value;
use tokio::task::{spawn_blocking, yield_now};

use self::{
    elf::{Obstacle, Parts},
    imports::{Classes, Place},
    paths::Found,
    state::{Guess, Seen, Visit},
};

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The file.
    pub(crate) file: Nid,
    /// The range in the file; not empty, and not beyond its end.
    pub(crate) range: Range<u64>,
}

/// The places of a piece's bytes: position of the blob, place in it.
pub(crate) fn extents<B: AsRef<[u8]>>(
    bootstrap: &Bootstrap<B>,
    piece: &Piece,
) -> Vec<(usize, Range<Decoded>)> {
    let mut extents = Vec::new();
    let mut at = piece.range.start;
    while at < piece.range.end {
        // A damaged image is found out elsewhere.
        let Ok(Some(extent)) = bootstrap.extent(piece.file, at) else { break };
        let len = extent.len.min(piece.range.end - at);
        let end = Decoded(extent.start.0 + len);
        extents.push((usize::from(extent.blob.0), extent.start..end));
        at += len;
    }
    extents
}

/// The source of the files' bytes for the guess.
#[async_trait]
pub(crate) trait Content: Send + Sync {
    /// Reads `piece`, at most 4 MiB, waiting for its bytes; `None` on failure.
    async fn read(&self, piece: &Piece) -> Option<Vec<u8>>;

    /// Waits for the path of a file in which the start has missed something; `None` if no more will
    /// be.
    async fn missed(&self) -> Option<Vec<u8>> {
        None
    }

    /// The start runs this program.
    fn note_program(&self, _: Nid) {}

    /// Returns whether everything is at hand, as where the image is made.
    fn is_at_hand(&self) -> bool {
        false
    }
}

/// Files that are looked into at the same time.
const LOOKING: usize = 256;

/// Bytes of such files that are read at the same time, without further tables of programs. Only
/// archives and class loaders, which are read whole, reach this.
const READING: u64 = 32 << 20;

/// Reads for which one file is looked into: headers and dynamic section, with names in several
/// places.
const READS: usize = 12;

/// Guesses the reads of the image's start, and passes them to `wanted` in the order in which to
/// fetch them, as soon as they are known: several times, and no byte twice. Goes on from files in
/// which something was missed, and ends when nothing more follows.
///
/// `config` is the image's configuration. `content` is asked for a few blocks of each program and
/// library, and for all of them if everything is at hand.
pub(crate) async fn guess<B: AsRef<[u8]> + Sync>(
    config: &Value,
    bootstrap: &Bootstrap<B>,
    content: &dyn Content,
    mut wanted: impl FnMut(Vec<Piece>) + Send,
) {
    let mut guess = Guess::new(config, bootstrap);
    let configuration = guess.configuration();
    wanted(guess.take_wanted());
    guess.take_programs().into_iter().for_each(|program| content.note_program(program));
    for text in join_all(configuration.iter().map(|piece| content.read(piece))).await {
        guess.linker.configure(&text.unwrap_or_default());
    }
    follow(&mut guess, content, &mut wanted).await;
    wanted(guess.take_doubtful());
    if guess.classes.image().is_some() {
        follow_classes(&mut guess, content, &mut wanted).await;
    }
    while let Some(path) = content.missed().await {
        guess.open(&path);
        follow(&mut guess, content, &mut wanted).await;
        wanted(guess.take_doubtful());
    }
}

/// Looks into files until nothing more follows.
async fn follow<B: AsRef<[u8]> + Sync>(
    guess: &mut Guess<'_, B>,
    content: &dyn Content,
    wanted: &mut (impl FnMut(Vec<Piece>) + Send),
) {
    let mut looking = FuturesUnordered::new();
    let mut reading = 0;
    loop {
        while looking.len() < LOOKING
            && reading < READING
            && let Some(visit) = guess.unseen.pop_front()
        {
            reading += visit.bytes();
            looking.push(look(content, visit));
        }
        let mut next = looking.next().await;
        if next.is_none() && !guess.follow_scripts() {
            // Less likely than all that was followed so far.
            guess.want_late();
            let search = content.is_at_hand().then(|| guess.take_search()).flatten();
            let Some(search) = search else { break };
            let names = constants::names(content, &search).await;
            guess.follow_constants(&search, &names);
        }
        while let Some((visit, seen)) = next {
            reading -= visit.bytes();
            guess.follow(&visit, seen);
            // Files that are known at the same time are requested together.
            next = looking.next().now_or_never().flatten();
        }
        guess.take_programs().into_iter().for_each(|program| content.note_program(program));
        let pieces = guess.take_wanted();
        if !pieces.is_empty() {
            wanted(pieces);
            // It is asked for in few requests before each file is read by itself.
            yield_now().await;
        }
    }
}

/// Looks for classes of Java in its run-time image until no more are found.
async fn follow_classes<B: AsRef<[u8]> + Sync>(
    guess: &mut Guess<'_, B>,
    content: &dyn Content,
    wanted: &mut (impl FnMut(Vec<Piece>) + Send),
) {
    let mut places = find_classes(&mut guess.classes, Classes::begin).await;
    while !places.is_empty() {
        let (pieces, classes) = guess.take_classes(&places);
        wanted(pieces);
        let contents = join_all(classes.iter().map(|class| content.read(class))).await;
        let contents: Vec<_> = contents.into_iter().flatten().collect();
        let go_on = move |classes: &mut Classes| classes.go_on(&contents);
        places = find_classes(&mut guess.classes, go_on).await;
    }
}

/// Looks for classes beside the tasks: thousands of them take some ten milliseconds.
async fn find_classes(
    classes: &mut Classes,
    find: impl FnOnce(&mut Classes) -> Vec<Place> + Send + 'static,
) -> Vec<Place> {
    let mut taken = mem::take(classes);
    let found = spawn_blocking(move || (find(&mut taken), taken)).await;
    let Ok((places, taken)) = found else { return Vec::new() };
    *classes = taken;
    places
}

async fn look(content: &dyn Content, visit: Visit) -> (Visit, Seen) {
    let Found { nid, size, .. } = visit.file;
    if visit.is_text() {
        let piece = Piece { file: nid, range: 0..visit.bytes() };
        return (visit, content.read(&piece).await.map_or(Seen::Nothing, Seen::Text));
    }
    let mut parts = Parts::new(size);
    for _ in 0..READS {
        match parts.elf() {
            Ok(elf) => return (visit, Seen::Elf(elf)),
            Err(Obstacle::Unsound) => break,
            Err(Obstacle::Missing(range)) => {
                let piece = Piece { file: nid, range };
                let Some(bytes) = content.read(&piece).await else { break };
                if piece.range.start == 0 && !bytes.starts_with(elf::MAGIC) {
                    return (visit, Seen::Text(bytes));
                }
                parts.add(piece.range.start, bytes);
            }
        }
    }
    (visit, Seen::Nothing)
}
