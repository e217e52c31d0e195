//! All unsafe code and raw kernel interfaces: fanotify, mount API, mmap.
