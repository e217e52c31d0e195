//! Events that registries send to `lazuli serve-convert`. Errors are fine; panics are bugs, and so
//! is an image of another registry.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code, unreachable_pub, reason = "a file of the command, which is no library")]
#[path = "../../crates/cli/src/serve_convert/events.rs"]
mod events;

fuzz_target!(|body: &[u8]| {
    let registry = "registry.example:5000";
    let Ok(events) = events::parse(body, registry) else { return };
    for image in events.images {
        assert_eq!(image.registry(), registry);
        let text = image.to_string();
        assert_eq!(text.parse(), Ok(image), "{text}");
    }
});
