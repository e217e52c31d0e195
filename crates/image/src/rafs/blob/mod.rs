//! The tail of a data blob: what describes the chunks once more, in the blob itself.
//!
//! ```text
//! chunks |H| CI table | CI header |H| digest array |H| bootstrap |H| table of contents |H|
//! ```
//! `H` is a [footer](super::footer). Upstream reads the CI table and header to find chunks, and the
//! digest array to verify them. Only the blob of a single layer holds a
//! [bootstrap](super::embedded).

mod check;
mod ci_table;
mod packed;
mod section;
mod write;

pub use self::{
    check::{
        check_blob, check_ci_entries, check_ci_header, check_ci_table, check_ci_units, ci_table_of,
        meta_file,
    },
    ci_table::written_meta_file,
    write::{Tail, bare_bootstrap, blob_tail, layer_tail},
};
pub(super) use self::{
    section::{IndexSections, Section, write_toc},
    write::{compressed_ci, write_ci, write_digests, write_skeleton},
};
