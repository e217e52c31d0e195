//! Gives freed memory back to the kernel.

/// Freed blocks of this many bytes or more go back to the kernel; at the end of the heap, at most
/// this much free memory is kept.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 << 10;

/// Makes glibc return large freed blocks to the kernel at once. The limits are glibc's own
/// defaults, but unless they are set, it raises them to the largest block ever freed and then keeps
/// all smaller ones in each thread's arena: a third of a conversion's memory.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes two numbers, and may be called at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, LARGE);
    }
}
