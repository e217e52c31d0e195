//! What the API answers, in upstream's words.

use lazuli_runtime::daemon::MountStatus;
use serde_json::{Value, json};

use super::service::Service;

/// Sizes of upstream's tables: kinds of operations, and classes of sizes and times.
const OPERATIONS: usize = 18;
const CLASSES: usize = 8;

pub(super) fn daemon(service: &Service) -> Value {
    json!({
        "id": service.identity.id,
        "version": {
            "package_ver": env!("CARGO_PKG_VERSION"),
            // What `--version` says as well.
            "git_commit": env!("CARGO_PKG_VERSION"),
            "build_time": "",
            "profile": "lazuli",
            "rustc": "",
        },
        "supervisor": service.identity.supervisor,
        "state": service.phase(),
        "backend_collection": {},
    })
}

/// Operations on files: none is counted, since the kernel carries them out by itself.
pub(super) fn operations(place: &str) -> Value {
    let (operations, classes) = ([0; OPERATIONS], [0; CLASSES]);
    json!({
        "id": place,
        "files_account_enabled": false,
        "access_pattern_enabled": false,
        "measure_latency": false,
        "data_read": 0,
        "block_count_read": classes,
        "fop_hits": operations,
        "fop_errors": operations,
        "fop_cumulative_latency_total": operations,
        "read_latency_dist": classes,
        "nr_opens": 0,
    })
}

/// The image's part of the node's cache. Bytes are counted as they are stored in the registry.
pub(super) fn cache(place: &str, mount: &MountStatus) -> Value {
    json!({
        "id": place,
        "underlying_files": [],
        "store_path": "",
        "partial_hits": 0,
        "whole_hits": 0,
        "total": 0,
        "entries_count": mount.chunks_ready,
        "prefetch_data_amount": mount.bytes_fetched,
        "prefetch_requests_count": mount.requests,
        "prefetch_workers": 0,
        "prefetch_unmerged_chunks": 0,
        "prefetch_cumulative_time_millis": 0,
        "prefetch_begin_time_secs": 0,
        "prefetch_begin_time_millis": 0,
        "prefetch_end_time_secs": 0,
        "prefetch_end_time_millis": 0,
        "buffered_backend_size": 0,
        "data_all_ready": mount.bytes_missing == 0,
    })
}
