//! Ordinary layers that have a table of contents: eStargz and zstd:chunked.
//!
//! Both are tars whose content is compressed piece by piece, with a *table of contents* (TOC) at
//! the end: JSON, with the metadata of each file, and for each piece the stored place and the
//! digest. An annotation in the image's manifest has the digest of the TOC, so the TOC is covered
//! by the image's own.
//!
//! ```text
//! eStargz:      gzip members │ member with a tar of the TOC │ footer: an empty member
//! zstd:chunked: zstd frames  │ skippable frames: TOC, tar-split (not in stargz' dialect), footer
//! ```
//!
//! `docs/format.md` has the fields.

mod estargz;
mod layer;
mod toc;

pub use estargz::{footer, toc_of_member};
pub use layer::{FrameDigest, MAX_TOC, SeekableLayer, TocPlace, toc_of_frame};
pub use toc::{MAX_ENTRIES, TocEntry, TocKind, Xattrs, read_toc};
