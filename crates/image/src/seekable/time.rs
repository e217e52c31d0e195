//! Times of RFC 3339, as tables of contents have them.

use crate::Mtime;

/// The time that `text` names, such as `2024-02-29T23:59:59.5+01:00`.
pub(super) fn parse(text: &str) -> Option<Mtime> {
    let (date, rest) = text.split_at_checked(11)?;
    let (time, rest) = rest.split_at_checked(8)?;
    let [year, month, day] = numbers(date.strip_suffix(['T', 't'])?, '-', [4, 2, 2])?;
    let [hour, minute, second] = numbers(time, ':', [2, 2, 2])?;
    let (fraction, zone) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?),
        None => ("", rest),
    };
    let nanoseconds = match fraction {
        "" if rest.starts_with('.') => return None,
        "" => 0,
        digits => format!("{digits:0<9}").get(..9)?.parse().ok()?,
    };
    let east = match zone {
        "Z" | "z" => 0,
        _ => {
            let (sign, zone) = zone.split_at_checked(1)?;
            let [hours, minutes] = numbers(zone, ':', [2, 2])?;
            let east = hours * 60 + minutes;
            match sign {
                "+" => east,
                "-" => -east,
                _ => return None,
            }
        }
    };
    let fits = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    let days = days(year, month, day);
    let seconds = days * 86_400 + hour * 3600 + (minute - east) * 60 + second;
    fits.then_some(Mtime { seconds, nanoseconds })
}

/// Numbers of so many digits, with `between` between them.
fn numbers<const N: usize>(text: &str, between: char, digits: [usize; N]) -> Option<[i64; N]> {
    let mut parts = text.split(between);
    let mut found = [0; N];
    for (number, digits) in found.iter_mut().zip(digits) {
        let part = parts.next().filter(|part| part.len() == digits)?;
        *number = part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok())??;
    }
    parts.next().is_none().then_some(found)
}

/// Days from 1970-01-01 to this day of the Gregorian calendar. Years begin in March, so that a leap
/// day is the last one.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // 719,468 days lie between 0000-03-01 and 1970-01-01.
    year * 365 + leap_days + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_become_seconds() {
        for (text, seconds, nanoseconds) in [
            ("1970-01-01T00:00:00Z", 0, 0),
            ("2024-02-29T23:59:59Z", 1_709_251_199, 0),
            ("2024-03-01T00:59:59.25+01:00", 1_709_251_199, 250_000_000),
            ("2023-11-14T17:13:20.123456789-05:00", 1_700_000_000, 123_456_789),
            ("0001-01-01T00:00:00Z", -62_135_596_800, 0),
            ("1969-12-31T23:59:59z", -1, 0),
        ] {
            assert_eq!(parse(text), Some(Mtime { seconds, nanoseconds }), "{text}");
        }
        for text in [
            "",
            "2024-02-29",
            "2024-02-29T23:59:59",
            "2024-02-29T23:59:59.Z",
            "2024-02-29T23:59:59.5",
            "2024-13-29T23:59:59Z",
            "2024-02-29T24:59:59Z",
            "2024-02-29T23:59:59+1:00",
            "2024-02-29 23:59:59Z",
            "+024-02-29T23:59:59Z",
            "2024-02-29T23:59:59Zx",
            "2024-02-2éT23:59:59Z",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
