//! Images while they are served: their blobs in the cache, and the routes to their sources.

pub(super) mod image;
pub(super) mod images;
pub(super) mod possession;
pub(super) mod refresh_routes;
pub(super) mod route;
