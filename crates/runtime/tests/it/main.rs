//! Integration tests of the runtime, in one binary.

mod fanotify;
mod sample;
