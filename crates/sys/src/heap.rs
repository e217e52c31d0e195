//! Gives freed memory back to the kernel.

/// Bytes of a block that is not kept, and of free memory at the end of the heap that is.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 << 10;

/// Has large blocks given back to the kernel as soon as they are freed. Those are glibc's own
/// limits, but without being told it raises them to the largest block that was ever freed, and then
/// keeps all smaller ones in the arena of each thread: a third of what a conversion takes.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes two numbers, and may be called at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, LARGE);
    }
}
