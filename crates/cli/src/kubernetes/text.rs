//! Messages for people: bounded, and without control characters of terminals.

/// Bytes of a message. The API server refuses events with more than 1024.
const LIMIT: usize = 1000;

/// `text` without control characters, which names of files and images may have, and not longer than
/// a message may be.
pub(super) fn plain(text: &str) -> String {
    let mut plain = String::new();
    for character in text.chars() {
        let character = if character.is_control() { '\u{fffd}' } else { character };
        if plain.len() + character.len_utf8() > LIMIT {
            break;
        }
        plain.push(character);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_short_and_change_no_terminal() {
        assert_eq!(plain("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(plain(&"é".repeat(LIMIT)).len(), LIMIT);
    }
}
