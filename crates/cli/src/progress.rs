//! Progress of long work, on stderr; nothing when that is not a terminal.

use std::{borrow::Cow, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lazuli_builder::Progress;

/// A bar of bytes, or a spinner when the total is not known.
pub(crate) fn bytes(total: Option<u64>, what: impl Into<Cow<'static, str>>) -> ProgressBar {
    let bar = ProgressBar::hidden();
    show(&bar, total, what);
    bar
}

/// The same of a bar that was hidden.
pub(crate) fn show(bar: &ProgressBar, total: Option<u64>, what: impl Into<Cow<'static, str>>) {
    let template = match total {
        Some(total) => {
            bar.set_length(total);
            "{msg:12} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}"
        }
        None => "{msg:12} {spinner} {binary_bytes} {binary_bytes_per_sec}",
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.expect("a constant template").progress_chars("=> "));
    bar.set_message(what);
    bar.enable_steady_tick(Duration::from_millis(200));
}

/// Shows how a build reads its layers.
pub(crate) struct Reading<'a>(pub(crate) &'a ProgressBar);

impl Progress for Reading<'_> {
    fn bytes_read(&self, _layer: usize, bytes: u64) {
        self.0.inc(bytes);
    }

    fn layer_done(&self, _layer: usize) {}
}
