//! How to make a lazy image: sources, layer overlay, chunk deduplication, packing.
