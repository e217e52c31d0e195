//! Tests of the format as a whole: through its own reader, the kernel and `fsck.erofs`.

mod batches;
mod codec;
mod ext4;
mod hostile;
mod kernel;
mod round_trip;
mod snapshot;
mod support;
mod tail;
mod v5;
mod vectors;
