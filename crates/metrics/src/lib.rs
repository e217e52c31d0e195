//! The metrics of a daemon for Prometheus: OpenMetrics over HTTP.
//!
//! ```text
//! measure() ─▶ families ─▶ one text, fresh for a second ─▶ GET /metrics
//! ```
//!
//! Names and labels are known when the program is built: what images and registries choose never
//! becomes a label. The server is bounded: connections are few, short, and answered once;
//! [`answer_all`] is the same for other pages.
#![forbid(unsafe_code)]

mod address;
mod connections;
mod family;
#[cfg(fuzzing)]
pub mod fuzz;
mod server;

pub use self::{
    address::{Address, InvalidAddress, Listener},
    connections::{Limits, answer_all},
    family::{Family, Kind, Labels, Sample, Unit, Value, encode},
    server::{Measure, serve},
};
