//! Settings of servers over forged trees.

use serde_json::{Value, json};

use super::{
    LIBC, LINKER,
    forge::{Image, program, shared},
    sorted, usual,
};

/// A server whose settings, plug-ins and data are where Debian has them.
fn server(settings: &str) -> Image {
    usual()
        .program("/usr/sbin/served", &program(&["libc.so.6"]))
        .file("/etc/serve/serve.conf", settings.as_bytes())
        .file("/etc/serve/mods-available/pap", b"pap {\n}\n")
        .file("/etc/serve/mods-available/ldap", b"ldap {\n}\n")
        .file("/etc/serve/sites-available/main/site", b"1")
        .link("/etc/serve/sites-enabled/main", "../sites-available/main")
        .link("/etc/serve/mods-enabled/pap", "../mods-available/pap")
        .file("/var/lib/serve/dictionary", b"$INCLUDE dictionary.rfc\n# dictionary.old\n")
        .file("/var/lib/serve/dictionary.rfc", b"1")
        .file("/var/lib/serve/dictionary.rfc.1", b"1")
        .file("/var/lib/serve/dictionary.old", b"1")
        .file("/usr/lib/serve/rlm_pap.so", &shared(&["libc.so.6", "libpap.so"]))
        .file("/usr/lib/x86_64-linux-gnu/libpap.so", &shared(&[]))
        .file("/usr/lib/serve/rlm_ldap.so", &shared(&[]))
        .file("/usr/lib/serve/libEngine-2.so.1", &shared(&[]))
        .link("/usr/lib/serve/libEngine.so", "libEngine-2.so.1")
        .file("/usr/lib/serve/libEngine.la", b"1")
        .file("/usr/lib/other/pap.so", &shared(&[]))
}

fn config(command: &[&str]) -> Value {
    json!({ "config": { "Cmd": command } })
}

/// What is guessed besides the program and the C library.
fn guessed(image: &Image, command: &[&str]) -> Vec<String> {
    let mut found = image.guessed(&config(command));
    found.retain(|path| ![LINKER, LIBC, "/usr/sbin/served"].contains(&&**path));
    sorted(found)
}

#[test]
fn settings_bring_the_plugins_and_the_files_that_they_name() {
    let settings = "engine = Engine\n; ldap\ninclude /var/lib/serve/dictionary.*.1\n\
        include /var/lib/serve/dictionary\n";
    let expected = [
        "/etc/serve/mods-available/pap",
        "/etc/serve/serve.conf",
        "/etc/serve/sites-available/main/site",
        "/usr/lib/serve/libEngine-2.so.1",
        "/usr/lib/serve/libEngine.la",
        "/usr/lib/serve/rlm_pap.so",
        "/usr/lib/x86_64-linux-gnu/libpap.so",
        "/var/lib/serve/dictionary",
        "/var/lib/serve/dictionary.rfc",
        "/var/lib/serve/dictionary.rfc.1",
    ];
    assert_eq!(guessed(&server(settings), &["served"]), expected);
}

#[test]
fn a_server_is_told_where_its_settings_are() {
    let image = server("")
        .file("/srv/own.conf", b"moduledir /usr/lib/other\nload pap\n")
        .file("/srv/unread.conf", b"1");
    let found = guessed(&image, &["served", "--config=/srv/own.conf"]);
    for (path, is_expected) in
        [("/srv/own.conf", true), ("/usr/lib/other/pap.so", true), ("/srv/unread.conf", false)]
    {
        assert_eq!(found.iter().any(|found| found == path), is_expected, "{path}: {found:?}");
    }
}

#[test]
fn constants_of_a_server_name_its_directories() {
    let texts = b"\0/etc/engine/3.0\0/usr/lib/x86_64-linux-gnu/fire/plugins\0";
    let image = usual()
        .program("/usr/sbin/database", &[&program(&["libc.so.6"])[..], texts].concat())
        .file("/etc/database.conf", b"Udr = Legacy\n")
        .file("/etc/engine/3.0/databases.conf", b"Providers = Remote, Engine13\n")
        .file("/usr/lib/x86_64-linux-gnu/fire/plugins/libLegacy.so", &shared(&[]))
        .file("/usr/lib/x86_64-linux-gnu/fire/plugins/libEngine13.so", &shared(&[]))
        .file("/usr/lib/x86_64-linux-gnu/fire/plugins/libOther.so", &shared(&[]))
        .file("/usr/lib/x86_64-linux-gnu/libRemote.so", &shared(&[]));
    let config = config(&["database"]);
    let by_node = image.guessed(&config);
    let added = [
        "/etc/engine/3.0/databases.conf",
        "/usr/lib/x86_64-linux-gnu/fire/plugins/libLegacy.so",
        "/usr/lib/x86_64-linux-gnu/fire/plugins/libEngine13.so",
    ];
    let by_maker = image.guessed_by_maker(&config);
    assert_eq!(by_maker, [&by_node[..], &added.map(str::to_owned)].concat());
}

#[test]
fn plugins_that_are_scripts_are_followed_as_their_program_is() {
    let image = usual()
        .program("/usr/bin/lua5.4", b"")
        .program("/usr/bin/chat", b"#!/usr/bin/lua5.4\nHOME = '/usr/lib/chat'\nrequire 'start'")
        .file("/etc/chat/chat.cfg.lua", b"modules_enabled = {\n \"roster\";\n -- \"old\";\n}\n")
        .file("/usr/lib/chat/modules/mod_roster.lua", b"require 'util.set'\n")
        .file("/usr/lib/chat/modules/mod_old.lua", b"1")
        .file("/usr/lib/chat/start.lua", b"1")
        .file("/usr/lib/chat/util/set.lua", b"1");
    let found = guessed(&image, &["chat"]);
    let expected = [
        "/etc/chat/chat.cfg.lua",
        "/usr/bin/chat",
        "/usr/lib/chat/modules/mod_roster.lua",
        "/usr/lib/chat/start.lua",
        "/usr/lib/chat/util/set.lua",
    ];
    assert_eq!(found, expected);
}

#[test]
fn settings_name_modules() {
    let image = usual()
        .program("/usr/bin/perl", b"")
        .program("/usr/bin/judge", b"#!/usr/bin/perl -T\n")
        .file("/etc/judge/judge.pre", b"loadplugin Judge::Plugin::SPF\n#loadplugin Judge::Old\n")
        .file("/usr/share/perl5/Judge/Plugin/SPF.pm", b"use Judge::Base;\n")
        .file("/usr/share/perl5/Judge/Base.pm", b"1;")
        .file("/usr/share/perl5/Judge/Old.pm", b"1;");
    let found = guessed(&image, &["judge"]);
    let expected = [
        "/etc/judge/judge.pre",
        "/usr/bin/judge",
        "/usr/share/perl5/Judge/Base.pm",
        "/usr/share/perl5/Judge/Plugin/SPF.pm",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_program_has_settings_where_it_starts_and_data_by_its_name() {
    let image = usual()
        .program("/usr/bin/node", b"")
        .program("/app/node_modules/.bin/lint", b"#!/usr/bin/env node\n")
        .program("/usr/bin/env", b"")
        .file("/app/lint.config.mjs", b"import rules from './rules.mjs'\n")
        .file("/app/rules.mjs", b"1")
        .file("/app/.lintrc.json", b"1")
        .file("/app/other.config.mjs", b"1")
        .file("/usr/share/lint/words", b"1")
        .file("/usr/share/lint/examples/more", b"1");
    let expected = [
        "/app/.lintrc.json",
        "/app/lint.config.mjs",
        "/app/node_modules/.bin/lint",
        "/app/rules.mjs",
        "/usr/share/lint/words",
    ];
    let path = "PATH=/app/node_modules/.bin:/usr/bin";
    let run = |command: [&str; 2]| {
        let config = json!({ "Cmd": command, "Env": [path], "WorkingDir": "/app" });
        sorted(image.guessed(&json!({ "config": config })))
    };
    assert_eq!(run(["lint", "."]), expected);
    // A script has no data of its own.
    assert_eq!(run(["node", "node_modules/.bin/lint"]), expected[..4]);
}

#[test]
fn patterns_of_what_a_program_handles_are_not_followed() {
    let settings = "test = **/*.conf\nhosts = *.example\nignore = build/**/x\n";
    let image = server(settings).file("/etc/a.example", b"1").file("/etc/build/x", b"1");
    let found = guessed(&image, &["served"]);
    for path in ["/etc/a.example", "/etc/build/x"] {
        assert!(!found.iter().any(|found| found == path), "{path}: {found:?}");
    }
}

#[test]
fn of_many_settings_those_directly_in_the_directory_are_read() {
    let mut image = server("include rules/7.rule\n");
    for at in 0..300 {
        image = image.file(&format!("/etc/serve/rules/{at}.rule"), b"1");
    }
    let found = guessed(&image, &["served"]);
    let rules = found.iter().filter(|path| path.ends_with(".rule"));
    assert_eq!(rules.collect::<Vec<_>>(), ["/etc/serve/rules/7.rule"]);
    assert!(found.iter().any(|path| path == "/etc/serve/serve.conf"), "{found:?}");
}

#[test]
fn settings_may_be_executable_where_every_file_is() {
    let image = usual()
        .program("/usr/sbin/served", &program(&["libc.so.6"]))
        .program("/etc/serve/serve.conf", b"pap\n")
        .program("/etc/serve/hook", b"#!/bin/sh\n")
        .program("/usr/lib/serve/pap.so", &shared(&[]));
    let found = guessed(&image, &["served"]);
    assert_eq!(found, ["/etc/serve/serve.conf", "/usr/lib/serve/pap.so"]);
}

#[test]
fn settings_that_nothing_named_are_followed_when_they_are_missed() {
    let image = server("");
    let before = image.guessed(&config(&["served"]));
    let after = image.guessed_after(&config(&["served"]), &["/var/lib/serve/dictionary"]);
    let added = ["/var/lib/serve/dictionary", "/var/lib/serve/dictionary.rfc"];
    assert_eq!(after[before.len()..], added);
}

#[test]
fn directories_of_data_are_no_settings() {
    let mut image = server("certificates = /etc/ssl/certs\n");
    for at in 0..100 {
        image = image.file(&format!("/etc/ssl/certs/{at}.pem"), b"1");
    }
    let found = guessed(&image, &["served"]);
    assert!(!found.iter().any(|path| path.ends_with(".pem")), "{found:?}");
}
