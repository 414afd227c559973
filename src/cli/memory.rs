//! Turns a failed allocation into a message and exit code 5, where Rust would end the program by a signal.
//!
//! libtorch reports its own failed allocations as errors with the node. All other allocations cannot return an error: the
//! process ends at the allocation, without unwinding.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Cursor, Write};

/// The exit code of [`ckpt_passes::error::Kind::Environment`].
const EXIT: i32 = 5;

/// The system's allocator, which ends the process where it fails.
struct Checked;

#[global_allocator]
static MEMORY: Checked = Checked;

// SAFETY: passes every call to the system's allocator and returns its block, which is never null.
unsafe impl GlobalAlloc for Checked {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        given(unsafe { System.realloc(block, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        unsafe { System.dealloc(block, layout) }
    }
}

fn given(block: *mut u8, bytes: usize) -> *mut u8 {
    match block.is_null() {
        true => refuse(bytes),
        false => block,
    }
}

/// Prints the size of the request and exits. Nothing here allocates.
#[cold]
fn refuse(bytes: usize) -> ! {
    let mut line = Cursor::new([0u8; 96]);
    let _ = writeln!(line, "error[memory]: cannot allocate {bytes} bytes");
    let length = line.position() as usize;
    let line = line.into_inner();
    // SAFETY: the pointer and length are those of `line`; the second call does not return.
    unsafe {
        libc::write(2, line.as_ptr().cast(), length);
        libc::_exit(EXIT)
    }
}
