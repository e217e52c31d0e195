//! What programs and libraries are known to read when they start, besides themselves and their libraries.

use super::paths::{Found, matches};

/// Files that go with others.
struct Habit {
    /// The programs and libraries whose habit it is, by their real names, with `*` for any part of a name.
    of: &'static [&'static str],
    /// What they read: patterns of paths (see [`Paths::matching`](super::paths::Paths::matching)) in which `$DIR` is the directory
    /// of the program or library and `$NAME` its name. Of alternatives with `|` between them the first that is in the image counts.
    reads: &'static [&'static str],
}

/// What every container reads: who its user is is asked by the runtime, the rest by C libraries.
pub(super) const EVERYBODY: [&str; 4] =
    ["/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime"];

/// Seen in traces of the images in docs/prefetch.md, unless noted.
const HABITS: [Habit; 11] = [
    Habit { of: &["ld-linux*"], reads: &["/etc/ld.so.cache", "/etc/ld.so.preload"] },
    Habit { of: &["libc.so*"], reads: &["$DIR/gconv/gconv-modules.cache"] },
    Habit {
        of: &["libcrypto.so*"],
        reads: &[
            "/usr/lib/ssl/openssl.cnf|/usr/local/ssl/openssl.cnf|/etc/ssl/openssl.cnf|/etc/pki/tls/openssl.cnf",
        ],
    },
    Habit {
        of: &["python3*", "pypy3*"],
        reads: &[
            "$DIR/../lib/$NAME/encodings/__pycache__/__init__.*.pyc|$DIR/../lib/$NAME/encodings/__init__.py",
            "$DIR/../lib/$NAME/encodings/__pycache__/aliases.*.pyc|$DIR/../lib/$NAME/encodings/aliases.py",
            "$DIR/../lib/$NAME/encodings/__pycache__/utf_8.*.pyc|$DIR/../lib/$NAME/encodings/utf_8.py",
            "$DIR/../lib/$NAME/__pycache__/sitecustomize.*.pyc",
            "$DIR/../lib/$NAME/site-packages/*.pth",
            "$DIR/../lib/python3/dist-packages/*.pth",
            "$DIR/../lib/$NAME/site-packages/_distutils_hack/__pycache__/__init__.*.pyc",
            "$DIR/../lib/python3/dist-packages/_distutils_hack/__pycache__/__init__.*.pyc",
            // An interpreter in the C locale makes itself one with UTF-8.
            "/usr/lib/locale/C.utf8/LC_CTYPE",
        ],
    },
    Habit {
        of: &["perl*"],
        reads: &["$DIR/../lib/*/perl-base/strict.pm", "$DIR/../lib/*/perl-base/warnings.pm"],
    },
    Habit {
        of: &["node"],
        reads: &[
            "/usr/share/nodejs/acorn/dist/acorn.js",
            "/usr/share/nodejs/acorn-walk/dist/walk.js",
            "/usr/share/nodejs/cjs-module-lexer/lexer.js",
            "/usr/share/nodejs/cjs-module-lexer/dist/lexer.js",
            "/usr/share/nodejs/undici/undici-fetch.js",
        ],
    },
    Habit {
        of: &["java"],
        reads: &[
            "$DIR/../lib/jvm.cfg",
            "$DIR/../lib/server/libjvm.so",
            "$DIR/../lib/server/classes.jsa",
            "$DIR/../lib/libjava.so",
            "$DIR/../lib/libjimage.so",
            "$DIR/../lib/modules",
            "$DIR/../conf/security/java.security",
        ],
    },
    Habit {
        of: &["nginx"],
        reads: &[
            "/etc/nginx/nginx.conf",
            "/etc/nginx/mime.types",
            "/etc/nginx/conf.d/*.conf",
            "/etc/nginx/modules-enabled/*.conf",
            "/etc/nginx/sites-enabled/*",
            "/usr/share/nginx/html/index.html",
            "/var/www/html/index*.html",
        ],
    },
    Habit {
        of: &["initdb"],
        reads: &[
            "/usr/share/postgresql/*/*",
            "/usr/share/postgresql/*/extension/plpgsql*",
            "$DIR/../lib/dict_snowball.so",
            "$DIR/../lib/plpgsql.so",
            "/usr/bin/locale",
        ],
    },
    Habit {
        of: &["gcc*", "*-gcc-*"],
        reads: &[
            "$DIR/../lib/gcc/*/*/cc1",
            "$DIR/../lib/gcc/*/*/collect2",
            "$DIR/../lib/gcc/*/*/liblto_plugin.so",
            "$DIR/as",
            "$DIR/ld",
            "$DIR/../lib/gcc/*/*/crt*.o",
            "$DIR/../lib/*-linux-*/*crt*.o",
        ],
    },
    Habit {
        of: &["postgres"],
        reads: &["/usr/share/postgresql/*/timezonesets/Default", "/etc/host.conf"],
    },
];

/// The patterns of the files of a locale, as the environment names it, each with its alternatives.
pub(super) fn locale(name: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let mut parts = name.split(|byte| *byte == b'.');
    let language = parts.next().unwrap_or_default();
    let charset = parts.next().unwrap_or_default().to_ascii_lowercase();
    let charset: Vec<u8> = charset.into_iter().filter(u8::is_ascii_alphanumeric).collect();
    if matches!(language, b"C" | b"POSIX") && charset.is_empty()
        || name.iter().any(|byte| b"*/".contains(byte))
    {
        return Vec::new();
    }
    let directory = [b"/usr/lib/locale/", language, b".", &charset].concat();
    let of = |pattern: &str| [&directory, pattern.as_bytes()].concat();
    let archive = b"/usr/lib/locale/locale-archive".to_vec();
    vec![vec![of("/LC_*"), archive], vec![of("/LC_MESSAGES/*")]]
}

/// The patterns of what goes with `file`, each with its alternatives.
pub(super) fn habits(file: &Found) -> impl Iterator<Item = Vec<Vec<u8>>> {
    let name = file.name();
    let known =
        HABITS.iter().filter(|habit| habit.of.iter().any(|of| matches(of.as_bytes(), name)));
    known.flat_map(|habit| habit.reads).map(|reads| alternatives(reads, file))
}

fn alternatives(reads: &str, file: &Found) -> Vec<Vec<u8>> {
    let fill = |pattern: &str| {
        let parts = pattern.split('/').map(|part| match part {
            "$DIR" => file.directory(),
            "$NAME" => file.name(),
            part => part.as_bytes(),
        });
        parts.collect::<Vec<_>>().join(&b'/')
    };
    reads.split('|').map(fill).collect()
}
