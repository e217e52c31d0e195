//! Guesses over forged trees.

mod constants;
mod corpus;
mod forge;
mod imports;
mod settings;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use async_trait::async_trait;
use proptest::prelude::*;
use serde_json::json;
use tokio::task::yield_now;

use self::forge::{Forged, Image, program, shared};
use super::{
    Content, Piece, READING,
    elf::{Obstacle, Parts},
    guess,
    paths::Paths,
    state::{AFTER_CODE, ARCHIVE, BYTES, Guess},
};

/// The usual tree of a program with libraries, to which tests add files.
fn usual() -> Image {
    Image::default()
        .link("/bin", "usr/bin")
        .link("/lib", "usr/lib")
        .link("/lib64", "/usr/lib64")
        .link("/usr/lib64/ld-linux-x86-64.so.2", "../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2")
        .file("/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", &shared(&[]))
        .file("/usr/lib/x86_64-linux-gnu/libc.so.6", &shared(&["ld-linux-x86-64.so.2"]))
}

const LINKER: &str = "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
const LIBC: &str = "/usr/lib/x86_64-linux-gnu/libc.so.6";

#[test]
fn a_program_brings_its_libraries() {
    let image = usual()
        .program("/usr/bin/tool-2", &program(&["liba.so.1", "libmissing.so", "libc.so.6"]))
        .link("/usr/local/bin/tool", "../../bin/tool-2")
        .link("/usr/lib/liba.so.1", "liba.so.1.2")
        .file("/usr/lib/liba.so.1.2", &shared(&["libb.so"]))
        .file("/usr/lib/x86_64-linux-gnu/libb.so", &shared(&["libc.so.6", "liba.so.1"]))
        .file("/usr/lib/libb.so", b"found later")
        .file("/etc/passwd", b"root:x:0:0")
        .file("/etc/ld.so.cache", b"cache")
        .file("/usr/lib/libother.so", &shared(&[]));
    let guessed = image.guessed(&json!({ "config": { "Cmd": ["tool", "--flag"] } }));
    let libb = "/usr/lib/x86_64-linux-gnu/libb.so";
    let expected = [
        "/usr/bin/tool-2",
        "/etc/passwd",
        LINKER,
        "/etc/ld.so.cache",
        "/usr/lib/liba.so.1.2",
        LIBC,
        libb,
    ];
    assert_eq!(guessed, expected);
}

#[test]
fn libraries_are_looked_for_as_the_linker_does() {
    let needs = |needed: &'static [&'static str], rpath: &'static str, runpath: &'static str| {
        Forged { needed, rpath, runpath, ..Forged::default() }.bytes()
    };
    let config = |libraries: &str| {
        json!({ "config": {
            "Entrypoint": ["/opt/app/bin/app"], "Env": [format!("LD_LIBRARY_PATH={libraries}")],
        }})
    };
    let image = |app: &[u8], below: &[u8]| {
        usual()
            .program("/opt/app/bin/app", app)
            .file("/opt/app/lib/liba.so", below)
            .file("/opt/app/lib/libb.so", b"1")
            .file("/opt/other/libb.so", b"2")
            .file("/usr/lib/libb.so", b"3")
            .file("/etc/ld.so.conf.d/app.conf", b"# more\n/opt/conf:/opt/configured\n")
            .file("/opt/configured/libb.so", b"4")
    };
    let own = "$ORIGIN/../lib";
    for (rpath, runpath, environment, below, expected) in [
        // An RPATH holds for the libraries of libraries, a RUNPATH does not.
        (own, "", "", "", "/opt/app/lib/libb.so"),
        ("", "${ORIGIN}/../lib", "", "", "/opt/configured/libb.so"),
        ("", own, "", "$ORIGIN", "/opt/app/lib/libb.so"),
        ("/nothing:/opt/app/lib", "", "/opt/other", "", "/opt/app/lib/libb.so"),
        // With a RUNPATH, the environment takes precedence, and an RPATH is ignored.
        ("", own, "relative:/opt/other", "$ORIGIN", "/opt/other/libb.so"),
        ("/opt/other", own, "", "", "/opt/configured/libb.so"),
    ] {
        let image = image(
            &Forged { needed: &["liba.so"], rpath, runpath, ..Forged::default() }.bytes(),
            &Forged { needed: &["libb.so"], runpath: below, ..Forged::default() }.bytes(),
        );
        let guessed = image.guessed(&config(environment));
        assert_eq!(guessed[1..], ["/opt/app/lib/liba.so", expected], "{rpath} {runpath}");
    }
    // A path is not looked for, and musl has the names of its directories elsewhere.
    let image = usual()
        .program("/opt/app/bin/app", &needs(&["/opt/liba.so", "libb.so"], "", ""))
        .file("/opt/liba.so", b"")
        .file("/etc/ld-musl-x86_64.path", b"/lib:/musl\n")
        .file("/musl/libb.so", b"5");
    assert_eq!(image.guessed(&config(""))[1..], ["/musl/libb.so"], "an empty file has no bytes");
}

#[test]
fn what_runs_as_another_user_is_followed() {
    let script = b"#!/bin/sh\nsu -s /bin/dash -c \"first --all\" - user\n\
        runuser -u user -- second -c option\n";
    let image = usual()
        .program("/usr/bin/sh", b"")
        .program("/usr/bin/su", &program(&[]))
        .program("/usr/bin/runuser", &program(&[]))
        .program("/usr/bin/dash", &program(&[]))
        .program("/usr/bin/first", &program(&[]))
        .program("/usr/bin/second", &program(&[]))
        .program("/usr/bin/start", script);
    let guessed = image.guessed(&json!({ "config": { "Cmd": ["start"] } }));
    for expected in ["/usr/bin/first", "/usr/bin/second", "/usr/bin/dash"] {
        assert!(guessed.iter().any(|path| path == expected), "{expected}: {guessed:?}");
    }
}

#[test]
fn a_program_beside_its_script_is_found_without_the_directory() {
    let script = b"#!/bin/sh\nif false; then GDB='gdb --args'; fi\nhere=$(ls -l \"$0\" | sed 's/.* //')\nexec $GDB \"$here/main\" \"$@\"\n";
    let image = usual()
        .program("/usr/bin/sh", b"")
        .program("/usr/lib/office/program/office", script)
        .link("/usr/bin/office", "../lib/office/program/office")
        .program("/usr/lib/office/program/main", &program(&[]))
        .program("/usr/lib/office/main", &program(&[]));
    let guessed = image.guessed(&json!({ "config": { "Cmd": ["office"] } }));
    let expected = ["/usr/lib/office/program/office", "/usr/lib/office/program/main", LINKER];
    assert_eq!(guessed, expected);
}

#[test]
fn scripts_bring_interpreters_and_what_they_run() {
    let script =
        b"#!/bin/sh -e\n[ \"$1\" ] || exit 1\nif setup --all; then\n  exec server \"$@\"\nfi\n";
    let image = usual()
        .program("/usr/bin/sh", &program(&["libc.so.6"]))
        .program("/usr/bin/setup", b"#!/usr/bin/env python3\nimport os\n")
        .program("/usr/bin/env", &program(&[]))
        .program("/usr/bin/python3", &program(&[]))
        .file("/usr/lib/python3/os.py", b"import stat")
        .file("/usr/lib/python3/stat.py", b"# nothing")
        .file("/usr/lib/python3/encodings/__pycache__/__init__.cpython-311.pyc", b"compiled")
        .file("/usr/lib/python3/encodings/__init__.py", b"source")
        .file("/usr/lib/python3/encodings/aliases.py", b"only source")
        .program("/usr/bin/server", &program(&[]))
        .program("/usr/bin/worker", &program(&[]))
        .program("/usr/bin/unused", &program(&[]))
        .program("/entrypoint.sh", script)
        .file("/srv/worker.conf", b"text");
    let config = json!({ "config": {
        "Entrypoint": ["./entrypoint.sh"],
        "Cmd": ["worker", "--config=worker.conf"],
        "WorkingDir": "/srv/..",
    }});
    let expected = [
        "/entrypoint.sh",
        "/usr/bin/sh",
        "/usr/bin/setup",
        "/usr/bin/server",
        "/usr/bin/worker",
        LINKER,
        LIBC,
        "/usr/bin/env",
        "/usr/bin/python3",
        "/usr/lib/python3/encodings/__pycache__/__init__.cpython-311.pyc",
        "/usr/lib/python3/encodings/aliases.py",
        "/usr/lib/python3/os.py",
        "/usr/lib/python3/stat.py",
    ];
    assert_eq!(sorted(image.guessed(&config)), sorted(expected.map(str::to_owned).to_vec()));
}

#[test]
fn shells_and_wrappers_bring_what_they_run() {
    let image = usual()
        .program("/usr/bin/sh", b"\x7fELF, but damaged")
        .program("/usr/bin/tini", b"#!")
        .program("/usr/bin/a", b"a")
        .program("/usr/bin/b", b"b")
        .file("/run.sh", b"a; FOO=1 b")
        .program("/usr/bin/as", b"#!/usr/bin/sh\nexec \"$2\"\n")
        .program("/usr/bin/self", b"#!/usr/bin/self\n")
        .program("/usr/bin/more", b"#!/usr/bin/sh\nmore x \"$@\"\n")
        .file("/data", b"data");
    for (command, expected) in [
        (json!(["sh", "-c", "cd / && a | b"]), &["/usr/bin/sh", "/usr/bin/a", "/usr/bin/b"][..]),
        (json!(["sh", "-exc", "b"]), &["/usr/bin/sh", "/usr/bin/b"]),
        (json!(["tini", "-g", "--", "a", "/data"]), &["/usr/bin/tini", "/usr/bin/a", "/data"]),
        (json!(["/bin/sh", "/run.sh"]), &["/usr/bin/sh", "/run.sh", "/usr/bin/a", "/usr/bin/b"]),
        (
            json!(["sh", "-c", "as x a; as x b"]),
            &["/usr/bin/sh", "/usr/bin/as", "/usr/bin/a", "/usr/bin/b"],
        ),
        (json!(["a", "b", "data"]), &["/usr/bin/a", "/data"]),
        (json!(["self"]), &["/usr/bin/self"]),
        (json!(["more"]), &["/usr/bin/more", "/usr/bin/sh"]),
        (json!(["missing"]), &[]),
        (json!(["/usr"]), &[]),
        (json!(["/data"]), &[]),
        (json!([]), &[]),
        (json!("sh"), &[]),
        (json!([7, null]), &[]),
    ] {
        let config = json!({ "config": { "Cmd": command } });
        assert_eq!(image.guessed(&config), expected, "{config}");
    }
    assert!(image.guessed(&json!(null)).is_empty());
}

#[test]
fn java_brings_the_archives_beside_its_own() {
    const KIB: u64 = 1 << 10;
    let java = "/usr/lib/jvm/17/bin/java";
    let image = usual()
        .program(java, b"")
        .link("/usr/bin/java", "../lib/jvm/17/bin/java")
        .file("/usr/lib/jvm/17/lib/modules", &vec![0; 27 << 20])
        .file("/usr/share/java/start.jar", b"main")
        .link("/opt/server/start.jar", "/usr/share/java/start.jar")
        .link("/opt/server/lib/ext/small.jar", "/usr/share/java/small.jar")
        .file("/usr/share/java/small.jar", &[0; 1 << 20])
        .file("/usr/share/java/other.jar", b"unused")
        .file("/opt/server/lib/big.jar", &[0; 5 << 20]);
    let config =
        json!({ "config": { "Cmd": ["java", "-jar", "start.jar"], "WorkingDir": "/opt/server" } });
    let kib = |(path, range): (String, std::ops::Range<u64>)| {
        (path, range.start / KIB, range.end.div_ceil(KIB))
    };
    let guessed: Vec<_> = image.pieces(&config).into_iter().map(kib).collect();
    let expected = [
        ("/usr/lib/jvm/17/lib/modules", 0, 1 << 10),
        ("/usr/share/java/start.jar", 0, 1),
        ("/opt/server/lib/big.jar", 0, 1 << 10),
        ("/opt/server/lib/big.jar", 4 << 10, 5 << 10),
        ("/usr/share/java/small.jar", 0, 1 << 10),
        ("/usr/lib/jvm/17/lib/modules", 1 << 10, 26 << 10),
    ];
    assert_eq!(guessed, expected.map(|(path, start, end)| (path.to_owned(), start, end)));
    // By absolute name too; and the system's own directories are not beside a script in the root.
    let config = json!({ "config": { "Cmd": ["java", "-jar", "/opt/server/start.jar"] } });
    assert_eq!(image.pieces(&config).len(), expected.len());
    let image = usual()
        .program("/usr/bin/java", b"")
        .file("/app.jar", b"main")
        .file("/usr/lib/system.jar", b"system's")
        .file("/etc/app.xml", b"found once");
    let config = json!({ "config": { "Cmd": ["java", "-jar", "/app.jar"] } });
    assert_eq!(image.guessed(&config), ["/app.jar", "/etc/app.xml"]);
}

#[test]
fn configuration_brings_modules() {
    let module = |name: &str| format!("/usr/local/apache2/modules/{name}.so");
    let text = "# LoadModule a modules/unused.so\nLoadModule b \"modules/dir.so\"\nLoadModule c /usr/lib/ssl.so\n";
    let image = usual()
        .program("/usr/local/apache2/bin/httpd", &program(&[]))
        .file("/usr/local/apache2/conf/httpd.conf", text.as_bytes())
        .file(&module("unused"), &shared(&[]))
        .file(&module("dir"), &shared(&["libdir.so"]))
        .file("/usr/lib/ssl.so", &shared(&[]))
        .file("/usr/lib/libdir.so", &shared(&[]));
    let guessed = image.guessed(&json!({ "config": { "Cmd": ["/usr/local/apache2/bin/httpd"] } }));
    let expected = [
        "/usr/local/apache2/bin/httpd",
        "/usr/local/apache2/conf/httpd.conf",
        LINKER,
        &module("dir"),
        "/usr/lib/ssl.so",
        "/usr/lib/libdir.so",
    ];
    assert_eq!(sorted(guessed), sorted(expected.map(str::to_owned).to_vec()));
}

#[test]
fn compilers_bring_their_own_programs() {
    for own in ["lib", "libexec"] {
        let path = |name: &str| format!("/usr/{own}/gcc/x86_64-linux-gnu/13/{name}");
        let image = usual()
            .program("/usr/bin/x86_64-linux-gnu-gcc-13", b"")
            .link("/usr/bin/gcc", "x86_64-linux-gnu-gcc-13")
            .file(&path("cc1"), b"compiler")
            .file(&path("collect2"), b"linker")
            .file(&path("lto1"), b"not at -O2")
            .file("/usr/lib/gcc/x86_64-linux-gnu/13/crtbegin.o", b"first");
        let config = json!({ "config": { "Cmd": ["gcc", "a.c"] } });
        let expected =
            [path("cc1"), path("collect2"), "/usr/lib/gcc/x86_64-linux-gnu/13/crtbegin.o".into()];
        assert_eq!(image.guessed(&config), expected, "{own}");
    }
}

#[test]
fn the_environment_names_a_locale() {
    let image = usual()
        .program("/usr/bin/a", b"a")
        .file("/usr/lib/locale/C.utf8/LC_CTYPE", b"1")
        .file("/usr/lib/locale/C.utf8/LC_MESSAGES/SYS_LC_MESSAGES", b"2")
        .file("/usr/lib/locale/locale-archive", b"3");
    let directory = "/usr/lib/locale/C.utf8";
    let both =
        [format!("{directory}/LC_CTYPE"), format!("{directory}/LC_MESSAGES/SYS_LC_MESSAGES")];
    for (locale, expected) in [
        ("LANG=C.UTF-8", &both[..]),
        ("LANG=en_US.UTF-8", &["/usr/lib/locale/locale-archive".to_owned()]),
        ("LC_ALL=C", &[]),
        ("LANG=", &[]),
        ("LANG=*.*", &[]),
        ("LANG=../../../../usr/bin/a.", &[]),
    ] {
        let config = json!({ "config": { "Cmd": ["a"], "Env": [locale] } });
        let guessed = image.guessed(&config);
        assert_eq!(guessed[1..], *expected, "{locale}");
    }
}

#[test]
fn of_big_libraries_without_code_both_ends_are_guessed() {
    const MIB: u64 = 1 << 20;
    let mut data = Forged { code: Some(MIB..MIB + 4096), ..Forged::default() }.bytes();
    data.resize(18 << 20, 0);
    let image =
        usual().program("/usr/bin/a", &program(&["libdata.so"])).file("/usr/lib/libdata.so", &data);
    let pieces = image.pieces(&json!({ "config": { "Cmd": ["a"] } }));
    let of_data = pieces.iter().filter(|(path, _)| path == "/usr/lib/libdata.so");
    let of_data: Vec<_> = of_data.map(|(_, range)| range.clone()).collect();
    assert_eq!(of_data, [0..MIB, 16 * MIB..18 * MIB, MIB..MIB + 4096]);
}

#[test]
fn constants_of_big_libraries_come_last() {
    const MIB: u64 = 1 << 20;
    let mut big = Forged { code: Some(4 * MIB..6 * MIB), ..Forged::default() }.bytes();
    big.resize(18 << 20, 0);
    let image = usual()
        .program("/usr/bin/a", &program(&["libbig.so", "libsmall.so"]))
        .file("/usr/lib/libbig.so", &big)
        .file("/usr/lib/libsmall.so", &shared(&[]));
    let pieces = image.pieces(&json!({ "config": { "Cmd": ["a"] } }));
    let of_big = pieces.iter().filter(|(path, _)| path == "/usr/lib/libbig.so");
    let of_big: Vec<_> = of_big.map(|(_, range)| (range.start / MIB, range.end / MIB)).collect();
    assert_eq!(of_big, [(0, 1), (16, 18), (4, 6), (1, 4), (6, 16)]);
    let last = pieces[pieces.len() - 2..].iter().map(|(path, _)| path.as_str());
    assert_eq!(last.collect::<Vec<_>>(), ["/usr/lib/libbig.so"; 2]);
}

#[test]
fn libraries_come_before_the_rest_of_a_big_programs_code() {
    const MIB: u64 = 1 << 20;
    let forged =
        Forged { code: Some(2 * MIB..76 * MIB), needed: &["libsmall.so"], ..Forged::default() };
    let mut big = forged.bytes();
    big.resize(80 << 20, 0);
    let image = usual().program("/usr/bin/a", &big).file("/usr/lib/libsmall.so", &shared(&[]));
    let pieces = image.pieces(&json!({ "config": { "Cmd": ["a"] } }));
    let at = |path: &str, start: u64| {
        pieces.iter().position(|(of, range)| of == path && range.start == start * MIB).unwrap()
    };
    assert!(at("/usr/bin/a", 2) < at("/usr/lib/libsmall.so", 0));
    assert!(at("/usr/lib/libsmall.so", 0) < at("/usr/bin/a", 66));
    assert_eq!(pieces[at("/usr/bin/a", 66)].1.end, 76 * MIB);
}

#[test]
fn the_code_of_one_program_leaves_room_for_what_follows() {
    let packed = usual().program("/usr/bin/a", &program(&[])).pack();
    let mut guess = Guess::new(&json!({ "config": { "Cmd": ["a"] } }), &packed.bootstrap);
    let file = guess.paths.file(b"/", b"/usr/bin/a").unwrap().nid;
    guess.take_wanted();
    guess.late.push(Piece { file, range: 0..2 * BYTES });
    guess.want_late();
    let wanted = guess.take_wanted();
    assert_eq!(wanted.len(), 1);
    let len = wanted[0].range.end;
    assert!((BYTES / 2..=BYTES - AFTER_CODE).contains(&len), "{len}");
}

/// A server loads plug-ins that its settings name.
#[test]
fn a_library_that_was_missed_brings_its_libraries() {
    let plugin = "/opt/plugins/libengine.so";
    let image = usual()
        .program("/usr/bin/a", &program(&["libc.so.6"]))
        .file(plugin, &shared(&["libicu.so", "libc.so.6"]))
        .file("/usr/lib/libicu.so", &shared(&["libdata.so"]))
        .file("/usr/lib/libdata.so", &shared(&[]))
        .file("/opt/plugins/data.txt", b"text")
        .file("/opt/plugins/other.so", &shared(&[]));
    let config = json!({ "config": { "Cmd": ["a"] } });
    let before = image.guessed(&config);
    let missed = ["/opt/plugins/data.txt", plugin, "/nowhere", plugin, LIBC];
    let after = image.guessed_after(&config, &missed);
    assert_eq!(after[..before.len()], before);
    let expected = [plugin, "/usr/lib/libicu.so", "/usr/lib/libdata.so"];
    assert_eq!(after[before.len()..], expected);
}

#[test]
fn an_unreadable_directory_ends_only_its_own_branch() {
    struct Nothing;
    #[async_trait]
    impl Content for Nothing {
        async fn read(&self, _: &Piece) -> Option<Vec<u8>> {
            None
        }
    }
    let image = usual().program("/usr/bin/a", &program(&["libc.so.6"])).file("/etc/group", b"x");
    let packed = image.pack();
    let mut count = 0;
    let config = json!({ "config": { "Cmd": ["a"] } });
    let task = guess(&config, &packed.bootstrap, &Nothing, |pieces| count += pieces.len());
    fn spawned<T: Send>(task: T) -> T {
        task
    }
    forge::block_on(spawned(task));
    assert_eq!(count, 2);
}

#[test]
fn archives_are_read_a_few_at_a_time() {
    #[derive(Default)]
    struct Slow {
        reading: AtomicU64,
        most: AtomicU64,
    }
    #[async_trait]
    impl Content for Slow {
        async fn read(&self, piece: &Piece) -> Option<Vec<u8>> {
            let len = piece.range.end - piece.range.start;
            let reading = self.reading.fetch_add(len, Relaxed) + len;
            self.most.fetch_max(reading, Relaxed);
            yield_now().await;
            self.reading.fetch_sub(len, Relaxed);
            None
        }
    }
    const ARCHIVES: u64 = 12;
    let mut image = usual().program("/usr/bin/java", b"");
    for at in 0..ARCHIVES {
        image = image.file(&format!("/app/{at}.jar"), &vec![0; ARCHIVE as usize]);
    }
    let packed = image.pack();
    let (slow, mut bytes) = (Slow::default(), 0);
    let config = json!({ "config": { "Cmd": ["java", "-cp", "/app/*", "Main"] } });
    let wanted = |pieces: Vec<Piece>| {
        bytes += pieces.iter().map(|piece| piece.range.end - piece.range.start).sum::<u64>();
    };
    forge::block_on(guess(&config, &packed.bootstrap, &slow, wanted));
    assert!(bytes >= ARCHIVES * ARCHIVE, "{bytes}");
    let most = slow.most.into_inner();
    assert!((READING..READING + ARCHIVE).contains(&most), "{most}");
}

#[test]
fn links_lead_where_the_kernel_goes_and_no_further() {
    let mut image = Image::default()
        .file("/a/b/file", b"x")
        .link("/up", "a/b/../../a/./b//file")
        .link("/out", "../../../a/b/file")
        .link("/a/absolute", "/a/b")
        .link("/loop", "loop")
        .link("/ping", "/pong")
        .link("/pong", "/ping")
        .link("/dangling", "nowhere")
        .link("/through", "a/b/file/more")
        .link("/0", "/a/b/file")
        .file("/a/test/file", b"no directory of a start");
    for number in 0..41 {
        image = image.link(&format!("/{}", number + 1), &format!("/{number}"));
    }
    let packed = image.pack();
    let mut paths = Paths::new(&packed.bootstrap);
    for (path, expected) in [
        ("/a/b/file", true),
        ("a/b/file", true),
        ("/up", true),
        ("/out", true),
        ("/a/absolute/file", true),
        ("/../..//a/b/file", true),
        ("/loop", false),
        ("/ping", false),
        ("/dangling", false),
        ("/through", false),
        ("/a", false),
        ("/", false),
        ("", false),
        ("/39", true),
        ("/40", false),
    ] {
        let found = paths.file(b"/", path.as_bytes());
        assert_eq!(found.is_some(), expected, "{path}");
        if let Some(found) = found {
            assert_eq!((&*found.path, found.directory()), (&b"/a/b/file"[..], &b"/a/b"[..]));
        }
    }
    assert_eq!(paths.matching(b"/*/*/f*e").len(), 3);
    assert_eq!(paths.matching(b"/**/file").len(), 1);
    assert!(paths.file(b"/", "/a/..".repeat(2000).as_bytes()).is_none());
    // A search that asks too much gets no more answers.
    for at in 0..100_000 {
        paths.file(b"/", format!("/a/b/{at}").as_bytes());
    }
    assert!(paths.file(b"/", b"/a/b/file").is_none() && paths.matching(b"/*").is_empty());
}

fn sorted(mut paths: Vec<String>) -> Vec<String> {
    paths.sort();
    paths
}

/// Reads a file in parts, as the guess does.
fn read(file: &[u8]) -> Option<super::elf::Elf> {
    let mut parts = Parts::new(file.len() as u64);
    for _ in 0..1000 {
        match parts.elf() {
            Ok(elf) => return Some(elf),
            Err(Obstacle::Unsound) => return None,
            Err(Obstacle::Missing(range)) => {
                assert!(range.end - range.start <= 128 << 10, "{range:?}");
                let bytes = file[range.start as usize..range.end as usize].to_vec();
                parts.add(range.start, bytes);
            }
        }
    }
    panic!("the same bytes are missing again and again");
}

#[test]
fn elf_files_that_end_early_are_refused() {
    let file = program(&["libc.so.6", "libm.so.6"]);
    assert_eq!(read(&file).unwrap().needed, ["libc.so.6", "libm.so.6"].map(Vec::from));
    for len in 0..file.len() {
        let elf = read(&file[..len]);
        assert!(elf.is_none_or(|elf| elf.needed.len() <= 2), "{len}");
    }
}

proptest! {
    #[test]
    fn no_bytes_break_anything(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        text in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut file = program(&["libc.so.6"]);
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        let _ = read(&file);
        let sources = Default::default();
        let started = super::imports::Started {
            path: b"/run",
            arguments: &[],
            environment: &[],
            sources: &sources,
        };
        let script = super::imports::shell(&text, started, &mut |_| false);
        prop_assert!(script.commands.iter().all(|words| !words.is_empty()));
        let _ = super::command::shebang(&[b"#!", text.as_slice()].concat());
    }
}
