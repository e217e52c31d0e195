//! How to serve an image: sources, fetch, cache, kernel drivers, daemon.
