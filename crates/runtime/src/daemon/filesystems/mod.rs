//! File systems of images as the kernel has them, and their page cache.

pub(super) mod attachment;
pub(super) mod direct_reads;
pub(super) mod fuse_blobs;
pub(super) mod mounted;
pub(super) mod stale_pages;
pub(super) mod users;
