//! Files that well-known programs and libraries read at their start, besides libraries.

use super::paths::{Found, matches};

/// Files that go with others.
struct Habit {
    /// Real names of the programs and libraries with this habit; `*` stands for any part of a name.
    of: &'static [&'static str],
    /// Patterns of the paths that they read (see
    /// [`Paths::matching`](super::paths::Paths::matching)). `$DIR` stands for the directory of the
    /// program or library, `$NAME` for its name, `$APP` for the directory of its script. Of
    /// alternatives separated by `|`, the first that exists in the image counts.
    reads: &'static [&'static str],
}

/// Files that every container reads: users and groups for the runtime, the rest for C libraries.
pub(super) const EVERY_CONTAINER: [&str; 4] =
    ["/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime"];

/// Seen in starts of the images in docs/measurements/prefetch.md.
const HABITS: [Habit; 21] = [
    Habit { of: &["ld-linux*"], reads: &["/etc/ld.so.cache", "/etc/ld.so.preload"] },
    // The second is read before the first name of a host is looked up.
    Habit { of: &["libc.so*"], reads: &["$DIR/gconv/gconv-modules.cache", "/etc/host.conf"] },
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
            // In the C locale, an interpreter switches to UTF-8 by itself.
            "/usr/lib/locale/C.utf8/LC_CTYPE",
        ],
    },
    Habit {
        of: &["erlexec"],
        reads: &[
            "$DIR/beam.smp|$DIR/beam",
            "$DIR/erl_child_setup",
            "$DIR/inet_gethost",
            "$DIR/../../bin/start.boot|$DIR/../../bin/start_clean.boot",
            "/etc/protocols",
        ],
    },
    Habit {
        of: &["ruby*"],
        reads: &[
            "$DIR/../lib/ruby/vendor_ruby/rubygems.rb|$DIR/../lib/ruby/*/rubygems.rb",
            "$DIR/../lib/ruby/*/rubygems/*.rb",
            "$DIR/../lib/ruby/*/rubygems/core_ext/*.rb",
            "$DIR/../lib/ruby/*/rubygems/defaults/*.rb",
            "$DIR/../lib/ruby/*/rubygems/util/list.rb",
            "$DIR/../lib/ruby/gems/*/specifications/default/*.gemspec",
            "$DIR/../lib/ruby/*/monitor.rb",
            "$DIR/../lib/ruby/*/error_highlight.rb",
            "$DIR/../lib/ruby/*/error_highlight/**/*.rb",
            "$DIR/../lib/ruby/*/did_you_mean.rb",
            "$DIR/../lib/ruby/*/did_you_mean/**/*.rb",
            "$DIR/../lib/*/ruby/*/rbconfig.rb|$DIR/../lib/ruby/*/*-linux*/rbconfig.rb",
            "$DIR/../lib/*/ruby/*/monitor.so|$DIR/../lib/ruby/*/*-linux*/monitor.so",
            "$DIR/../lib/*/ruby/*/enc/encdb.so|$DIR/../lib/ruby/*/*-linux*/enc/encdb.so",
            "$DIR/../lib/*/ruby/*/enc/trans/transdb.so|$DIR/../lib/ruby/*/*-linux*/enc/trans/transdb.so",
        ],
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
        of: &["java", "javac", "jar"],
        reads: &[
            "$DIR/../lib/jvm.cfg",
            "$DIR/../lib/server/libjvm.so",
            "$DIR/../lib/server/classes.jsa",
            "$DIR/../lib/libjava.so",
            "$DIR/../lib/libjimage.so",
            "$DIR/../lib/libjsvml.so",
            "$DIR/../lib/libnet.so",
            "$DIR/../lib/libnio.so",
            "$DIR/../lib/libzip.so",
            "$DIR/../lib/modules",
            "$DIR/../lib/tzdb.dat",
            "$DIR/../conf/security/java.security",
            "$DIR/../conf/net.properties",
        ],
    },
    Habit {
        of: &["libfontconfig.so*"],
        reads: &["/etc/fonts/fonts.conf", "/etc/fonts/conf.d/*.conf"],
    },
    // It loads all of them to find out which ways to log in there are.
    Habit { of: &["libsasl2.so*"], reads: &["$DIR/sasl2/*.so"] },
    Habit { of: &["libhostpolicy.so"], reads: &["/etc/os-release"] },
    Habit {
        of: &["libSystem.Globalization.Native.so", "System.Globalization.Native.so"],
        // ICU, and the index of its data, of which little else is read.
        reads: &[
            "/usr/lib/*-linux-*/libicuuc.so.*|/usr/lib/libicuuc.so.*|/usr/lib64/libicuuc.so.*",
            "/usr/lib/*-linux-*/libicui18n.so.*|/usr/lib/libicui18n.so.*|/usr/lib64/libicui18n.so.*",
            "/usr/lib/*-linux-*/libicudata.so.*|/usr/lib/libicudata.so.*|/usr/lib64/libicudata.so.*",
        ],
    },
    Habit { of: &["mono*"], reads: &["/etc/mono/config", "$DIR/../lib/mono/4.5/mscorlib.dll"] },
    Habit {
        of: &["nginx"],
        reads: &["/usr/share/nginx/html/index.html", "/var/www/html/index*.html"],
    },
    Habit {
        of: &["apache2ctl", "apachectl"],
        reads: &["$DIR/apache2|$DIR/httpd", "/etc/apache2/envvars"],
    },
    Habit { of: &["apache2"], reads: &["/etc/mime.types"] },
    Habit { of: &["httpd"], reads: &["$DIR/../conf/httpd.conf", "$DIR/../conf/mime.types"] },
    Habit {
        of: &["php*", "libphp*"],
        reads: &[
            "/etc/php/*/*/php.ini|/usr/local/etc/php/php.ini",
            "/etc/php/*/*/conf.d/*.ini|/usr/local/etc/php/conf.d/*.ini",
            "/usr/lib/php/20*/*.so|/usr/local/lib/php/extensions/*/*.so",
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
        // Its own programs are in libexec from Debian 13 on, and as gcc's makefiles install them.
        reads: &[
            "$DIR/../libexec/gcc/*/*/cc1|$DIR/../lib/gcc/*/*/cc1",
            "$DIR/../libexec/gcc/*/*/collect2|$DIR/../lib/gcc/*/*/collect2",
            "$DIR/../libexec/gcc/*/*/liblto_plugin.so|$DIR/../lib/gcc/*/*/liblto_plugin.so",
            "$DIR/as",
            "$DIR/ld",
            "$DIR/../lib/gcc/*/*/crt*.o",
            "$DIR/../lib/*-linux-*/*crt*.o",
        ],
    },
    Habit { of: &["postgres"], reads: &["/usr/share/postgresql/*/timezonesets/Default"] },
];

/// The habits of interpreters that are given a script. The modules that it imports are followed,
/// see [`super::imports`].
const WITH_SCRIPT: [Habit; 1] = [
    // Files of most servers, and then those of Jetty.
    Habit {
        of: &["java"],
        reads: &[
            "$DIR/../lib/libextnet.so",
            "$DIR/../lib/libmanagement*.so",
            "$APP/lib/*.jar",
            "$APP/lib/*/*.jar",
            "$APP/start.ini",
            "$APP/modules/*.mod",
            "$APP/etc/*.xml",
        ],
    },
];

/// How much is read of the beginning of a big file that is no program or library, where that is
/// known. Java's `modules`, 123 MiB in version 17, begins with its index and java.base: each start
/// needs some of all of the first 26 MiB.
pub(super) fn head(file: &Found) -> Option<u64> {
    file.path.ends_with(b"/lib/modules").then_some(26 << 20)
}

/// Returns whether a file is settings, see [`super::settings`]. Most configuration of libraries
/// names nothing that is loaded.
pub(super) fn is_settings(file: &Found) -> bool {
    file.name() == b"httpd.conf"
}

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

/// The patterns of files that go with `file`, each with its alternatives.
pub(super) fn habits(file: &Found) -> impl Iterator<Item = Vec<Vec<u8>>> {
    known(&HABITS, file).map(|reads| alternatives(reads, file, b""))
}

/// The patterns of files that `interpreter` reads for a script in the directory `application`.
pub(super) fn with_script(
    interpreter: &Found,
    application: &[u8],
) -> impl Iterator<Item = Vec<Vec<u8>>> {
    // Beside a script in / or /usr are the system's libraries, not its own.
    let has_libraries = !matches!(application, b"/" | b"/usr");
    known(&WITH_SCRIPT, interpreter)
        .filter(move |reads| has_libraries || !reads.starts_with("$APP/lib/"))
        .map(move |reads| alternatives(reads, interpreter, application))
}

fn known(habits: &'static [Habit], file: &Found) -> impl Iterator<Item = &'static str> {
    let is_one_of = |of: &[&str]| of.iter().any(|of| matches(of.as_bytes(), file.name()));
    habits.iter().filter(move |habit| is_one_of(habit.of)).flat_map(|habit| habit.reads).copied()
}

fn alternatives(reads: &str, file: &Found, application: &[u8]) -> Vec<Vec<u8>> {
    let fill = |pattern: &str| {
        let parts = pattern.split('/').map(|part| match part {
            "$DIR" => file.directory(),
            "$NAME" => file.name(),
            "$APP" => application,
            part => part.as_bytes(),
        });
        parts.collect::<Vec<_>>().join(&b'/')
    };
    reads.split('|').map(fill).collect()
}
