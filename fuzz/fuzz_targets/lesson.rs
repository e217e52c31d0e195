//! Errors are fine; panics are bugs, and so is a lesson that does not survive being written and
//! read again, up to what does not fit.
#![no_main]

use lazuli_image::Lesson;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(lesson) = Lesson::decode(data) {
        let again = Lesson::decode(&lesson.encode()).expect("what was written can be read");
        assert_eq!(again.chunks(), &lesson.chunks()[..again.chunks().len()]);
    }
});
