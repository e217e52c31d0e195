//! Commits answers: decodes, checks and writes chunks.
//!
//! Chunks of one unit are decoded once; workers get jobs of whole units.

use std::{cell::RefCell, sync::Arc};

use lazuli_image::{
    Chunk, Stored,
    codec::Decoder,
    units::{self, UnitChunks},
};

use super::{super::single_flight::Lease, CachedBlob};
use crate::{error::ReadError, sharing::workers::Priority, source::race::Answer};

/// Decoded bytes that one worker takes on at a time.
pub(super) const JOB: u64 = 1 << 20;

thread_local! {
    /// One decoder for each worker thread.
    static DECODER: RefCell<Decoder> = RefCell::new(Decoder::new());
}

/// The result of committing chunks of an answer.
#[derive(Default)]
pub(super) struct Committed {
    /// Chunks whose bytes are wrong.
    pub(super) wrong: Vec<(Lease, ReadError)>,
    /// Why others could not be kept.
    pub(super) failed: Option<ReadError>,
}

/// Decodes the stored bytes of `chunk`, to `buffer` unless they are raw: its unit as far as the
/// chunk.
fn decode<'a>(
    blob: &CachedBlob,
    chunk: &Chunk,
    stored: &'a [u8],
    buffer: &'a mut Vec<u8>,
) -> Result<&'a [u8], ReadError> {
    let unit = blob.layout.blob().unit(chunk);
    DECODER
        .with_borrow_mut(|decoder| decoder.unit(&unit, stored, buffer))
        .map_err(|error| corrupt(blob, chunk, error.to_string()))
}

fn corrupt(blob: &CachedBlob, chunk: &Chunk, problem: String) -> ReadError {
    let range = chunk.stored..chunk.stored_end();
    ReadError::Corrupt { blob: blob.id(), chunk: chunk.number, range, problem }
}

/// Takes a chunk out of the decoded `unit`, and checks it.
fn verified<'a>(blob: &CachedBlob, chunk: &Chunk, unit: &'a [u8]) -> Result<&'a [u8], ReadError> {
    chunk.verified(unit).map_err(|error| corrupt(blob, chunk, error.to_string()))
}

/// Takes a chunk out of the decoded `unit`, checks it, writes it and marks it ready. Blocks.
fn accept(blob: &Arc<CachedBlob>, at: usize, unit: &[u8]) -> Result<(), ReadError> {
    blob.keep(at, verified(blob, blob.chunk(at), unit)?)
}

/// Groups chunks by the unit that they are decoded from.
pub(super) fn units(
    blob: &CachedBlob,
    leases: Vec<Lease>,
) -> impl Iterator<Item = UnitChunks<Lease>> {
    units::units(leases, |lease| blob.chunk(lease.chunk()))
}

/// Cuts work on chunks into jobs for one worker each.
pub(super) fn jobs(blob: &CachedBlob, leases: Vec<Lease>) -> Vec<Vec<Lease>> {
    large(blob, units(blob, leases))
}

/// Puts units together to jobs for one worker each.
pub(super) fn large(
    blob: &CachedBlob,
    units: impl IntoIterator<Item = UnitChunks<Lease>>,
) -> Vec<Vec<Lease>> {
    let mut jobs: Vec<Vec<Lease>> = Vec::new();
    let mut size = JOB;
    for unit in units {
        let decoded = u64::from(blob.chunk(unit.furthest().chunk()).unit_size());
        match jobs.last_mut() {
            Some(job) if size + decoded <= JOB => job.extend(unit.into_chunks()),
            _ => {
                size = 0;
                jobs.push(unit.into_chunks());
            }
        }
        size += decoded;
    }
    jobs
}

/// Commits some chunks of an answer that begins at `start`, and finishes the leases of those that
/// are right.
pub(super) async fn commit(
    blob: &Arc<CachedBlob>,
    answer: &Arc<Answer>,
    start: Stored,
    leases: Vec<Lease>,
) -> Committed {
    let priority = match leases.iter().any(Lease::is_wanted) {
        true => Priority::Reader,
        false => Priority::Background,
    };
    let (worker, from) = (blob.clone(), answer.clone());
    let accept_all = move || {
        let (mut committed, mut buffer) = (Committed::default(), Vec::new());
        for unit in units(&worker, leases) {
            let chunk = worker.chunk(unit.furthest().chunk());
            let at = (chunk.stored.0 - start.0) as usize;
            let bytes = &from.bytes[at..at + chunk.stored_size as usize];
            let decoded = decode(&worker, chunk, bytes, &mut buffer);
            for lease in unit.into_chunks() {
                let accept_it = |decoded: &&[u8]| accept(&worker, lease.chunk(), decoded);
                match decoded.as_ref().map_err(Clone::clone).and_then(accept_it) {
                    Err(error @ ReadError::Corrupt { .. }) => committed.wrong.push((lease, error)),
                    result => {
                        from.source.was_right();
                        committed.failed = committed.failed.or(result.clone().err());
                        lease.finish(result);
                    }
                }
            }
        }
        committed
    };
    blob.run(priority, accept_all).await
}

/// Commits the only chunk of an answer.
pub(super) async fn commit_one(
    blob: &Arc<CachedBlob>,
    at: usize,
    answer: Answer,
) -> Result<(), ReadError> {
    let worker = blob.clone();
    let decode_and_accept = move || {
        let mut buffer = Vec::new();
        let decoded = decode(&worker, worker.chunk(at), &answer.bytes, &mut buffer)?;
        accept(&worker, at, decoded)
    };
    blob.run(Priority::Reader, decode_and_accept).await
}

/// Checks the only chunk of an answer, and keeps nothing.
pub(super) async fn check_one(
    blob: &Arc<CachedBlob>,
    at: usize,
    answer: Answer,
) -> Result<(), ReadError> {
    let worker = blob.clone();
    let decode_and_check = move || {
        let (chunk, mut buffer) = (worker.chunk(at), Vec::new());
        let decoded = decode(&worker, chunk, &answer.bytes, &mut buffer)?;
        verified(&worker, chunk, decoded).map(drop)
    };
    blob.run(Priority::Reader, decode_and_check).await
}
