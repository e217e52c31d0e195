//! One image: opens, reads, signs and stores it. Nothing here prints, except progress.

pub(crate) mod copy;
pub(crate) mod guess;
pub(crate) mod hot_blob;
pub(crate) mod index_repository;
pub(crate) mod open;
pub(crate) mod push;
pub(crate) mod read_chunks;
pub(crate) mod scratch;
pub(crate) mod sign;
pub(crate) mod trace;
