//! Names in the constants of programs.

use serde_json::json;

use super::{
    forge::{Forged, program, shared},
    usual,
};

/// An ELF file with texts.
fn with(elf: &[u8], texts: &[&str]) -> Vec<u8> {
    [elf, b"\0", texts.join("\0").as_bytes(), b"\0"].concat()
}

#[test]
fn the_maker_finds_files_that_programs_name() {
    let texts = [
        "/etc/tools/a.conf",
        "plugins.list",
        "libseldom.so.1",
        "twice.txt",
        "/usr/bin/other",
        "/usr/bin/big",
        "big.dat",
    ];
    let config = json!({ "config": { "Cmd": ["tool"] } });
    let image = usual()
        .program("/usr/bin/tool", &with(&program(&["libz.so", "libc.so.6"]), &texts))
        .program("/usr/bin/other", &program(&[]))
        .program("/usr/bin/big", &with(&program(&[]), &["x".repeat(256 << 10).as_str()]))
        .file("/etc/tools/a.conf", b"settings")
        .file("/usr/share/tools/plugins.list", b"one")
        .file("/usr/lib/x86_64-linux-gnu/libz.so", &with(&shared(&[]), &["messages.msg"]))
        .file("/usr/share/tools/messages.msg", b"text")
        .file("/usr/lib/x86_64-linux-gnu/libseldom.so.1", &shared(&[]))
        .file("/usr/share/a/twice.txt", b"1")
        .file("/usr/share/b/twice.txt", b"2")
        .file("/usr/share/big.dat", &vec![b'x'; (128 << 10) + 1]);
    let by_node = image.guessed(&config);
    let by_maker = image.guessed_by_maker(&config);
    let added = [
        "/etc/tools/a.conf",
        "/usr/bin/other",
        "/usr/share/tools/plugins.list",
        "/usr/share/tools/messages.msg",
    ];
    assert_eq!(by_maker, [&by_node[..], &added.map(str::to_owned)].concat());
}

#[test]
fn the_maker_finds_what_a_program_names_of_the_files_beside_it() {
    let texts = ["tool", "helper", "data.bin", "libplug.so", "other"];
    let config = json!({ "config": { "Cmd": ["/opt/tool/tool"] } });
    let big = vec![b'x'; 300 << 10];
    let image = usual()
        .program("/opt/tool/tool", &with(&program(&["libc.so.6"]), &texts))
        .program("/opt/tool/helper", &program(&["libz.so"]))
        .file("/opt/tool/data.bin", &big)
        .file("/opt/tool/unnamed.bin", &big)
        .file("/opt/tool/libplug.so", &shared(&[]))
        .file("/usr/lib/x86_64-linux-gnu/libz.so", &shared(&[]))
        .program("/usr/bin/tool", &with(&program(&["libc.so.6"]), &texts))
        .program("/usr/bin/other", &program(&[]));
    let of_system = json!({ "config": { "Cmd": ["tool"], "Env": ["PATH=/links:/usr/sbin"] } });
    let image = image.link("/links", "/usr/bin");
    assert_eq!(image.guessed_by_maker(&of_system), image.guessed(&of_system));
    let by_node = image.guessed(&config);
    let by_maker = image.guessed_by_maker(&config);
    let added = [
        "/opt/tool/data.bin",
        "/opt/tool/helper",
        "/opt/tool/libplug.so",
        "/usr/lib/x86_64-linux-gnu/libz.so",
    ];
    assert_eq!(by_maker, [&by_node[..], &added.map(str::to_owned)].concat());
}

#[test]
fn a_program_that_names_itself_is_guessed_once() {
    const MIB: u64 = 1 << 20;
    let mut big = Forged { code: Some(2 * MIB..4 * MIB), ..Forged::default() }.bytes();
    big.resize(20 << 20, 0);
    let image = usual().program("/opt/tool/tool", &with(&big, &["tool"]));
    let config = json!({ "config": { "Cmd": ["/opt/tool/tool"] } });
    assert_eq!(image.guessed_by_maker(&config), image.guessed(&config));
}

#[test]
fn the_maker_finds_commands_that_a_program_gives_to_a_shell() {
    let texts = ["exec cc -shared -o %o %s", "run ls"];
    let config = json!({ "config": { "Cmd": ["tool"] } });
    let image = usual()
        .program("/usr/bin/tool", &with(&program(&["libz.so", "libc.so.6"]), &texts))
        .file("/usr/lib/x86_64-linux-gnu/libz.so", &with(&shared(&[]), &["exec ls"]))
        .program("/bin/sh", &program(&[]))
        .program("/usr/bin/cc", &program(&[]))
        .program("/usr/bin/ls", &program(&[]));
    let by_node = image.guessed(&config);
    let by_maker = image.guessed_by_maker(&config);
    let added = ["/bin/sh", "/usr/bin/cc"].map(str::to_owned);
    assert_eq!(by_maker, [&by_node[..], &added].concat());
}

#[test]
fn the_maker_follows_compiled_modules_of_python() {
    let packages = "/usr/lib/python3/dist-packages";
    let module = |name: &str| format!("{packages}/fast/{name}.cpython-311-x86_64-linux-gnu.so");
    let texts = ["fast.other", "fast.missing", "json", "plain.py"];
    let image = usual()
        .program("/usr/bin/python3.11", &program(&["libc.so.6"]))
        .file("/app.py", b"import fast.core\n")
        .file(&format!("{packages}/fast/__init__.py"), b"")
        .file(&module("core"), &with(&shared(&[]), &texts))
        .file(&module("other"), &with(&shared(&[]), &["slow.text"]))
        .file(&module("unused"), &shared(&[]))
        .file(&format!("{packages}/slow/__init__.py"), b"import fast.core")
        .file(&format!("{packages}/slow/text.py"), b"1")
        .file("/usr/lib/python3.11/json.py", b"");
    let config = json!({ "config": { "Cmd": ["python3.11", "/app.py"] } });
    let by_node = image.guessed(&config);
    let by_maker = image.guessed_by_maker(&config);
    let added = [
        module("other"),
        format!("{packages}/slow/__init__.py"),
        format!("{packages}/slow/text.py"),
    ];
    assert!(by_node.contains(&module("core")), "{by_node:?}");
    assert_eq!(by_maker, [&by_node[..], &added].concat());
}
