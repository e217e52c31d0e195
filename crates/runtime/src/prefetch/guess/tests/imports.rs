//! Closures of imports over forged trees.

use serde_json::json;

use super::{
    super::imports::{dotnet_forge, java_forge, pyc_forge},
    LIBC, LINKER,
    forge::{Image, program, shared},
    sorted, usual,
};

/// The guesses for `command` in `/srv`, without the program itself.
fn guessed(image: &Image, command: &[&str], program: &str) -> Vec<String> {
    let config = json!({ "config": { "Cmd": command, "WorkingDir": "/srv" } });
    let mut guessed = image.guessed(&config);
    guessed.retain(|path| path != program);
    sorted(guessed)
}

#[test]
fn python_brings_what_its_modules_import() {
    let library = "/usr/lib/python3.11";
    let packages = "/usr/lib/python3.11/site-packages";
    let image = usual()
        .program("/usr/bin/python3.11", b"")
        .link("/usr/bin/python3", "python3.11")
        .file("/srv/main.py", b"import json\nfrom web import serve\nfrom own import *\n")
        .file("/srv/own.py", b"def later():\n    import unused\n")
        .file("/srv/unused.py", b"x")
        .file(&format!("{library}/json/__init__.py"), b"from .decoder import JSONDecoder\n")
        .file(&format!("{library}/json/decoder.py"), b"import re\n")
        .file(&format!("{library}/json/tool.py"), b"import argparse\n")
        .file(&format!("{library}/re.py"), b"# nothing\n")
        .file(&format!("{library}/argparse.py"), b"# nothing\n")
        .file(&format!("{packages}/web/__init__.py"), b"# nothing\n")
        .file(&format!("{packages}/web/serve.py"), b"from .. import web\nfrom . import fast\n")
        .file(&format!("{packages}/web/fast.cpython-311-x86_64-linux-gnu.so"), b"\x7fELF")
        // Stubs do not hide the module of the same name.
        .file(&format!("{packages}/web/fast/__init__.pyi"), b"# not read\n")
        .file(&format!("{packages}/other/__init__.py"), b"# not imported\n");
    let expected = [
        "/srv/main.py".to_owned(),
        "/srv/own.py".into(),
        format!("{library}/json/__init__.py"),
        format!("{library}/json/decoder.py"),
        format!("{library}/re.py"),
        format!("{packages}/web/__init__.py"),
        format!("{packages}/web/fast.cpython-311-x86_64-linux-gnu.so"),
        format!("{packages}/web/serve.py"),
    ];
    assert_eq!(guessed(&image, &["python3", "main.py"], "/usr/bin/python3.11"), expected);
    let of_text = guessed(&image, &["python3", "-c", "import web.serve"], "/usr/bin/python3.11");
    assert_eq!(of_text, expected[5..]);
    let of_module = guessed(&image, &["python3", "-m", "json.tool"], "/usr/bin/python3.11");
    assert!(of_module.contains(&format!("{library}/argparse.py")), "{of_module:?}");
}

#[test]
fn python_brings_what_it_loads_before_its_program() {
    let packages = "/usr/lib/python3.11/site-packages";
    let vendored = format!("{packages}/setuptools/_vendor/parts.py");
    let library = format!("{packages}/fast.cpython-311-x86_64-linux-gnu.so");
    let image = usual()
        .program("/usr/bin/python3.11", b"")
        .file("/srv/main.py", b"import fast\nimport tools\n")
        .file(&format!("{packages}/hack.pth"), b"import os; on and __import__('hack')")
        .file(&format!("{packages}/hack/__init__.py"), b"1")
        // What it imports is in the source from which it was made.
        .file(&format!("{packages}/fast.py"), b"import slow")
        .file(&library, b"\x7fELF")
        .file(&format!("{packages}/tools.py"), b"import parts")
        .file(&vendored, b"1")
        .file(&format!("{packages}/slow.py"), b"1")
        .file(&format!("{packages}/unused.py"), b"1");
    let expected = [
        "/srv/main.py".to_owned(),
        library,
        format!("{packages}/fast.py"),
        format!("{packages}/hack.pth"),
        format!("{packages}/hack/__init__.py"),
        vendored,
        format!("{packages}/slow.py"),
        format!("{packages}/tools.py"),
    ];
    assert_eq!(guessed(&image, &["python3.11", "main.py"], "/usr/bin/python3.11"), expected);
}

#[test]
fn a_command_may_run_the_program_of_its_verb() {
    let image = usual()
        .program("/usr/bin/tool", b"#!/usr/bin/python3\n")
        .program("/usr/bin/tool-serve", b"#!/usr/bin/python3\nimport web\n")
        .program("/usr/bin/python3", b"no ELF")
        .file("/srv/serve", b"a file of this name");
    let found = guessed(&image, &["tool", "serve"], "/usr/bin/tool");
    assert_eq!(found, ["/srv/serve", "/usr/bin/python3", "/usr/bin/tool-serve"]);
}

#[test]
fn ruby_brings_all_that_a_pattern_names() {
    let gems = "/usr/share/rubygems-integration/all/gems";
    let inner = format!("{gems}/inner-1.0/lib/inner");
    let image = usual()
        .program("/usr/bin/ruby3.1", b"")
        .file("/srv/app.rb", b"require 'web'\nrequire 'deep'\n")
        .file(
            &format!("{gems}/web-1.0/lib/web.rb"),
            b"Dir[\"#{__dir__}/web/tags/*.rb\"].each { |file| require file }\n",
        )
        .file(&format!("{gems}/web-1.0/lib/web/tags/a.rb"), b"1")
        .file(&format!("{gems}/web-1.0/lib/web/unused.rb"), b"1")
        .file(&format!("{inner}/inner.rb"), b"1")
        .file(&format!("{inner}/deep.rb"), b"1");
    let expected = [
        "/srv/app.rb".to_owned(),
        format!("{inner}/deep.rb"),
        format!("{gems}/web-1.0/lib/web.rb"),
        format!("{gems}/web-1.0/lib/web/tags/a.rb"),
    ];
    assert_eq!(guessed(&image, &["ruby3.1", "app.rb"], "/usr/bin/ruby3.1"), expected);
}

#[test]
fn python_brings_the_application_that_a_server_is_told_to_load() {
    let packages = "/usr/lib/python3.11/site-packages";
    let image = usual()
        .program("/usr/bin/python3.11", b"")
        .program("/usr/bin/serve", b"#!/usr/bin/python3.11\nfrom server import run\n")
        .file(
            &format!("{packages}/server/__init__.py"),
            b"KINDS = {'one': 'server.kinds.One', 'two': 'server.loop:Two', 'no': 'server.a:b:c'}\n",
        )
        .file(&format!("{packages}/server/kinds.py"), b"class One: pass\n")
        .file(&format!("{packages}/server/loop.py"), b"class Two: pass\n")
        .file(&format!("{packages}/server/a.py"), b"# not named\n")
        .file(&format!("{packages}/forms/__init__.py"), b"# named in settings\n")
        .file("/srv/site/__init__.py", b"# a package\n")
        .file("/srv/site/wsgi.py", b"setdefault('SETTINGS', 'site.settings')\n")
        .file("/srv/site/settings.py", b"APPS = ['forms', 'none']\n");
    let expected = [
        "/srv/site/__init__.py".to_owned(),
        "/srv/site/settings.py".into(),
        "/srv/site/wsgi.py".into(),
        format!("{packages}/forms/__init__.py"),
        format!("{packages}/server/__init__.py"),
        format!("{packages}/server/kinds.py"),
        format!("{packages}/server/loop.py"),
    ];
    assert_eq!(guessed(&image, &["serve", "site.wsgi"], "/usr/bin/serve"), expected);
}

#[test]
fn names_in_compiled_python_may_be_relative() {
    let (library, web) = ("/usr/lib/python3.11", "/usr/lib/python3.11/site-packages/web");
    let image = |module: &str, content: &[u8]| {
        usual()
            .program("/usr/bin/python3.11", b"")
            .file(&format!("{web}/{module}"), content)
            .file(&format!("{web}/own.py"), b"# beside it\n")
            .file(&format!("{library}/own.py"), b"# of the same name\n")
    };
    let run =
        |image: &Image| guessed(image, &["python3.11", "-c", "import web"], "/usr/bin/python3.11");
    let [beside, of_library] = [format!("{web}/own.py"), format!("{library}/own.py")];
    // `from . import own`
    let compiled = "__pycache__/__init__.cpython-311.pyc";
    let found = run(&image(compiled, &pyc_forge::compiled()));
    assert_eq!(found, [of_library.clone(), format!("{web}/{compiled}"), beside]);
    let found = run(&image("__init__.py", b"import own\n"));
    assert_eq!(found, [of_library, format!("{web}/__init__.py")]);
}

#[test]
fn python_brings_the_plug_ins_that_it_looks_for() {
    let packages = "/usr/lib/python3.11/site-packages";
    let list = format!("{packages}/plug-1.0.dist-info/entry_points.txt");
    let image = |main: &[u8]| {
        usual()
            .program("/usr/bin/python3.11", b"")
            .file("/srv/main.py", main)
            .file(&list, b"[app]\nplug = plug:run\n")
            .file(&format!("{packages}/plug-1.0.dist-info/RECORD"), b"plug.py,,\n")
    };
    let run =
        |main: &[u8]| guessed(&image(main), &["python3.11", "main.py"], "/usr/bin/python3.11");
    let main = "/srv/main.py".to_owned();
    let looks = b"from importlib.metadata import entry_points\n";
    assert_eq!(run(looks), [main.clone(), list.clone()]);
    assert_eq!(run(b"from importlib.metadata import version\n"), [main]);
}

#[test]
fn javascript_brings_packages_by_their_manifests() {
    let modules = "/srv/node_modules";
    let image = usual()
        .program("/usr/bin/node", b"")
        .file("/srv/index.js", b"const a = require('a'); require('./lib/b'); import('@s/c/d');")
        .file("/srv/lib/b.js", b"require('a/extra.json')")
        .file(&format!("{modules}/a/package.json"), b"{\"main\": \"./dist/main\"}")
        .file(&format!("{modules}/a/dist/main.js"), b"require('deep')")
        .file(&format!("{modules}/a/dist/unused.js"), b"0")
        .file(&format!("{modules}/a/extra.json"), b"{}")
        .file(&format!("{modules}/a/node_modules/deep/index.js"), b"0")
        .file(&format!("{modules}/@s/c/d.js"), b"require('.'); r = 'plug-in'; s = 'unused'")
        .file(&format!("{modules}/@s/c/index.js"), b"require.resolve('./e')")
        .file(&format!("{modules}/@s/c/e.js"), b"0")
        .file(&format!("{modules}/plug-in/index.js"), b"0")
        .file(&format!("{modules}/unused/index.js"), b"0")
        // Says of which kind the modules of the application are.
        .file("/srv/package.json", b"{}");
    let expected = [
        "/srv/index.js".to_owned(),
        "/srv/lib/b.js".into(),
        format!("{modules}/@s/c/d.js"),
        format!("{modules}/@s/c/e.js"),
        format!("{modules}/@s/c/index.js"),
        format!("{modules}/a/dist/main.js"),
        format!("{modules}/a/extra.json"),
        format!("{modules}/a/node_modules/deep/index.js"),
        format!("{modules}/a/package.json"),
        format!("{modules}/plug-in/index.js"),
        "/srv/package.json".into(),
    ];
    assert_eq!(guessed(&image, &["node", "index.js"], "/usr/bin/node"), expected);
}

#[test]
fn php_brings_classes_from_the_arrays_of_class_loaders() {
    let map = b"<?php return array(\n'A\\\\B' => $vendorDir . '/a/B.php',\n\
        'A\\\\D' => $vendorDir . '/a/D.php',\n'A\\\\E' => $vendorDir . '/a/E.php',\n\
        'C\\\\' => array($vendorDir . '/c/src'),\n\
        '0123456789abcdef0123456789abcdef' => $vendorDir . '/c/functions.php');\n\
        require __DIR__ . '/more.php';";
    let image = usual()
        .program("/usr/bin/php8.2", b"")
        .file("/srv/a.php", b"<?php require 'vendor/autoload.php'; A\\B::run(); new C\\F;")
        .file("/srv/vendor/autoload.php", b"<?php require __DIR__ . '/composer/autoload_map.php';")
        .file("/srv/vendor/composer/autoload_map.php", map)
        .file("/srv/vendor/a/B.php", b"<?php\nnamespace A;\nclass B extends D {}")
        .file("/srv/vendor/a/D.php", b"<?php")
        .file("/srv/vendor/a/E.php", b"<?php")
        .file("/srv/vendor/c/src/F.php", b"<?php")
        .file("/srv/vendor/c/functions.php", b"<?php")
        .file("/srv/vendor/composer/more.php", b"<?php");
    let expected = [
        "/srv/a.php",
        "/srv/vendor/a/B.php",
        "/srv/vendor/a/D.php",
        "/srv/vendor/autoload.php",
        "/srv/vendor/c/functions.php",
        "/srv/vendor/c/src/F.php",
        "/srv/vendor/composer/autoload_map.php",
        "/srv/vendor/composer/more.php",
    ];
    assert_eq!(guessed(&image, &["php8.2", "a.php"], "/usr/bin/php8.2"), expected);
}

#[test]
fn ruby_looks_for_gems_before_it_looks_beside_the_script() {
    let gems = "/usr/share/rubygems-integration/all";
    let image = usual()
        .program("/usr/bin/ruby3.1", b"")
        .file("/srv/app.rb", b"require './own'\nrequire 'app/inner'\n")
        .file("/srv/own.rb", b"1")
        .file("/srv/app/inner.rb", b"require 'web'\nrequire 'beside'\n")
        .file("/srv/app/web.rb", b"1")
        .file("/srv/app/beside.rb", b"1")
        .file(&format!("{gems}/gems/web-1.0/lib/web.rb"), b"require 'web/base'")
        .file(&format!("{gems}/gems/web-1.0/lib/web/base.rb"), b"1")
        .file(&format!("{gems}/specifications/web-1.0.gemspec"), b"described")
        .file(&format!("{gems}/specifications/other-1.0.gemspec"), b"described");
    let expected = [
        "/srv/app.rb".to_owned(),
        "/srv/app/beside.rb".into(),
        "/srv/app/inner.rb".into(),
        "/srv/own.rb".into(),
        format!("{gems}/gems/web-1.0/lib/web.rb"),
        format!("{gems}/gems/web-1.0/lib/web/base.rb"),
        format!("{gems}/specifications/other-1.0.gemspec"),
        format!("{gems}/specifications/web-1.0.gemspec"),
    ];
    assert_eq!(guessed(&image, &["ruby3.1", "app.rb"], "/usr/bin/ruby3.1"), expected);
    let image = image.file("/srv/alone.rb", b"require_relative 'app/web'");
    let expected = ["/srv/alone.rb", "/srv/app/web.rb"];
    assert_eq!(guessed(&image, &["ruby3.1", "alone.rb"], "/usr/bin/ruby3.1"), expected);
}

#[test]
fn ruby_perl_and_php_bring_what_they_require() {
    let ruby = usual()
        .program("/usr/bin/ruby3.1", b"")
        .file("/srv/app.rb", b"require 'web'\nrequire_relative 'own'\n")
        .file("/srv/own.rb", b"")
        .file("/usr/share/rubygems-integration/all/gems/web-1.0/lib/web.rb", b"require 'web/base'")
        .file("/usr/share/rubygems-integration/all/gems/web-1.0/lib/web/base.rb", b"1")
        .file("/usr/share/rubygems-integration/all/gems/web-1.0/lib/web/unused.rb", b"1");
    let found = guessed(&ruby, &["ruby3.1", "app.rb"], "/usr/bin/ruby3.1");
    let gem = "/usr/share/rubygems-integration/all/gems/web-1.0/lib";
    assert_eq!(found, ["/srv/app.rb", &format!("{gem}/web.rb"), &format!("{gem}/web/base.rb")]);

    let stub = b"#!/usr/bin/ruby3.1\nload Gem.activate_bin_path('web', 'serve', version)\n";
    let specification = "/usr/share/rubygems-integration/all/specifications/web-1.0.gemspec";
    let ruby = ruby
        .program("/usr/bin/serve", stub)
        .file(specification, b"described")
        .file("/usr/share/rubygems-integration/all/gems/web-1.0/exe/serve", b"require 'web/base'");
    let expected = [
        "/usr/share/rubygems-integration/all/gems/web-1.0/exe/serve".to_owned(),
        format!("{gem}/web.rb"),
        format!("{gem}/web/base.rb"),
        specification.into(),
    ];
    assert_eq!(guessed(&ruby, &["serve"], "/usr/bin/serve"), expected);

    let perl = usual()
        .program("/usr/bin/perl", b"")
        .file("/srv/app.pl", b"use Web::Lite;\n")
        .file("/usr/share/perl5/Web/Lite.pm", b"use POSIX;\n")
        .file("/usr/lib/x86_64-linux-gnu/perl/5.36/POSIX.pm", b"1;")
        .file("/usr/lib/x86_64-linux-gnu/perl/5.36/auto/POSIX/POSIX.so", b"\x7fELF")
        .file("/usr/share/perl5/Web/Unused.pm", b"1;");
    let expected = [
        "/srv/app.pl",
        "/usr/lib/x86_64-linux-gnu/perl/5.36/POSIX.pm",
        "/usr/lib/x86_64-linux-gnu/perl/5.36/auto/POSIX/POSIX.so",
        "/usr/share/perl5/Web/Lite.pm",
    ];
    assert_eq!(guessed(&perl, &["perl", "app.pl"], "/usr/bin/perl"), expected);

    let php = usual()
        .program("/usr/bin/php8.2", b"")
        .file("/srv/index.php", b"<?php require __DIR__ . '/inc/init.php';")
        .file("/srv/inc/init.php", b"<?php include(BASE . 'conf/main.php'); new own\\web\\Page();")
        .file("/srv/src/web/Page.php", b"<?php namespace own\\web; class Page extends Part {}")
        .file("/srv/src/web/Part.php", b"<?php")
        .file("/srv/conf/main.php", b"<?php")
        .file("/srv/conf/unused.php", b"<?php");
    let expected = [
        "/srv/conf/main.php",
        "/srv/inc/init.php",
        "/srv/index.php",
        "/srv/src/web/Page.php",
        "/srv/src/web/Part.php",
    ];
    assert_eq!(guessed(&php, &["php8.2", "index.php"], "/usr/bin/php8.2"), expected);
}

#[test]
fn a_web_server_brings_the_application_that_its_configuration_names() {
    let image = usual()
        .program("/usr/sbin/apache2", b"")
        .file(
            "/etc/apache2/conf-enabled/app.conf",
            b"Alias /app /usr/share/app\n# Alias /b /usr/share/b\n",
        )
        .file("/usr/share/app/index.php", b"<?php require 'inc.php';")
        .file("/usr/share/app/inc.php", b"<?php")
        .file("/usr/share/b/index.php", b"<?php");
    let expected = [
        "/etc/apache2/conf-enabled/app.conf",
        "/usr/share/app/inc.php",
        "/usr/share/app/index.php",
    ];
    assert_eq!(guessed(&image, &["apache2"], "/usr/sbin/apache2"), expected);
}

#[test]
fn r_brings_the_packages_that_are_attached() {
    let library = "/usr/lib/R/library";
    let image = usual()
        .program("/usr/bin/Rscript", b"")
        .program(
            "/usr/bin/R",
            b"#!/bin/sh\nR_HOME=/usr/lib/R\nR_HOME=/usr/lib64/R\n. \"${R_HOME}/etc/ldpaths\"\n\
                exec \"${R_HOME}/bin/exec/R\" \"${@}\"\n",
        )
        .file("/usr/lib/R/etc/ldpaths", b": ${D=${R_HOME}/lib}\nLD_LIBRARY_PATH=\"/more:${D}\"\n")
        .program("/usr/lib/R/bin/exec/R", &program(&["libR.so"]))
        .file("/usr/lib/R/lib/libR.so", b"\x7fELF")
        .file(&format!("{library}/plot/DESCRIPTION"), b"Imports: grid\n")
        .file(&format!("{library}/plot/R/plot.rdb"), b"1")
        .file(&format!("{library}/grid/DESCRIPTION"), b"Package: grid\n")
        .file(&format!("{library}/grid/libs/grid.so"), b"\x7fELF")
        .file(&format!("{library}/unused/DESCRIPTION"), b"Package: unused\n");
    let found = guessed(&image, &["Rscript", "-e", "library(plot)"], "/usr/bin/Rscript");
    let expected = [
        "/usr/bin/R".to_owned(),
        "/usr/lib/R/bin/exec/R".into(),
        "/usr/lib/R/etc/ldpaths".into(),
        "/usr/lib/R/lib/libR.so".into(),
        format!("{library}/grid/DESCRIPTION"),
        format!("{library}/grid/libs/grid.so"),
        format!("{library}/plot/DESCRIPTION"),
        format!("{library}/plot/R/plot.rdb"),
        LINKER.into(),
    ];
    assert_eq!(found, expected);
}

#[test]
fn shell_scripts_lead_to_java_and_its_class_path() {
    let script = b"#!/bin/sh\nHOME_=$(cd \"$(dirname \"$0\")/..\" && pwd)\n. \"$HOME_/conf/env\"\n\
        for jar in \"$HOME_\"/lib/*.jar; do CP=$CP:$jar; done\n\
        exec ${JAVA:-java} -cp \"$CP\" -Dapp.home=\"/opt/server\" Main \"$@\"\n";
    let image = usual()
        .program("/opt/app/bin/start", script)
        .program("/opt/jre/bin/java", b"java")
        .file("/opt/app/conf/env", b"JAVA=/opt/jre/bin/java\n")
        .file("/opt/app/lib/a.jar", b"PK")
        .file("/opt/app/lib/b.jar", b"PK")
        .file("/opt/app/other/c.jar", b"PK")
        .file("/opt/server/lib/d.jar", b"PK")
        .file("/opt/run/start.jar", b"PK")
        .file("/opt/run/lib/e.jar", b"PK");
    let found = guessed(&image, &["/opt/app/bin/start"], "/opt/app/bin/start");
    let expected = [
        "/opt/app/conf/env",
        "/opt/app/lib/a.jar",
        "/opt/app/lib/b.jar",
        "/opt/jre/bin/java",
        "/opt/server/lib/d.jar",
    ];
    assert_eq!(found, expected);
    let image = image.file("/opt/broker/bin/run.jar", b"PK").file("/opt/broker/lib/f.jar", b"PK");
    let found = guessed(&image, &["/opt/jre/bin/java", "-jar", "/opt/broker/bin/run.jar"], "");
    assert_eq!(found, ["/opt/broker/bin/run.jar", "/opt/broker/lib/f.jar", "/opt/jre/bin/java"]);
    let command = ["/opt/jre/bin/java", "-Dapp.home=/opt/server", "-jar", "/opt/run/start.jar"];
    let expected = ["/opt/run/lib/e.jar", "/opt/run/start.jar", "/opt/server/lib/d.jar"];
    assert_eq!(guessed(&image, &command, "/opt/jre/bin/java"), expected);
}

#[test]
fn java_brings_the_parts_of_its_image_with_the_classes_that_a_program_names() {
    const MIB: u64 = 1 << 20;
    let class = java_forge::class(&[], &[]);
    let (far, main) = (vec![0; 28 << 20], java_forge::class(&["log/Logger"], &[]));
    let names = [["java.base", "pad", "Pad"], ["log", "log", "Logger"], ["xml", "xml", "Parser"]];
    let modules = java_forge::image(&names, &[far.clone(), class.clone(), far]);
    let image = usual()
        .program("/opt/jre/bin/java", b"")
        .file("/opt/jre/lib/modules", &modules)
        .file("/opt/app/main.jar", &java_forge::archive(&[("app/Main.class", &main)]));
    let command = ["/opt/jre/bin/java", "-cp", "/opt/app/main.jar", "app.Main"];
    let pieces = image.pieces(&json!({ "config": { "Cmd": command } }));
    let parts = pieces.iter().filter(|(path, _)| path == "/opt/jre/lib/modules");
    let parts: Vec<_> = parts.map(|(_, range)| range.clone()).collect();
    let end = modules.len() as u64;
    let block = 128 << 10;
    let logger = 55 * MIB / 2..57 * MIB / 2 + block;
    assert_eq!(parts, [0..MIB, MIB..26 * MIB, logger, (end - 1) / block * block..end]);
}

#[test]
fn modules_that_import_each_other_end() {
    let mut image = usual().program("/usr/bin/python3", b"");
    for at in 0..50 {
        let text = format!("import m{}\nimport m{}\n", (at + 1) % 50, (at + 7) % 50);
        image = image.file(&format!("/srv/m{at}.py"), text.as_bytes());
    }
    let found = guessed(&image, &["python3", "m0.py"], "/usr/bin/python3");
    assert_eq!(found.len(), 50);
}

#[test]
fn erlang_brings_what_it_boots_and_the_modules_that_its_command_names() {
    let root = "/usr/lib/erlang";
    let atom = |name: &str| [&[b'd', 0, name.len() as u8], name.as_bytes()].concat();
    let path = b"$ROOT/lib/kernel-8.5/ebin";
    let boot = [
        &[131, b'l', 0, 0, 0, 3][..],
        &atom("application"),
        &[b'k', 0, path.len() as u8],
        path,
        &atom("kernel_load_completed"),
    ];
    let image = usual()
        .program("/usr/bin/erl", b"#!/bin/sh\nexec /usr/lib/erlang/erts-13/bin/erlexec \"$@\"\n")
        .program(&format!("{root}/erts-13/bin/erlexec"), b"")
        .file(&format!("{root}/bin/start.boot"), &boot.concat())
        .file(&format!("{root}/lib/kernel-8.5/ebin/application.beam"), b"FOR1")
        .file(&format!("{root}/lib/kernel-8.5/ebin/unused.beam"), b"FOR1")
        .file(&format!("{root}/lib/stdlib-4.2/ebin/lists.beam"), b"FOR1")
        .file("/opt/app/ebin/main.beam", &compiled("main", [["lists", "map"]]));
    let command = ["erl", "-pa", "/opt/app/ebin", "-s", "main", "start"];
    let expected = [
        "/opt/app/ebin/main.beam".to_owned(),
        format!("{root}/bin/start.boot"),
        format!("{root}/lib/kernel-8.5/ebin/application.beam"),
        format!("{root}/lib/stdlib-4.2/ebin/lists.beam"),
    ];
    assert_eq!(guessed(&image, &command, "/usr/bin/erl"), expected);
}

/// A module of Erlang that calls these functions.
fn compiled<const N: usize>(name: &str, calls: [[&str; 2]; N]) -> Vec<u8> {
    let atoms = [&[name], calls.as_flattened(), &["modules"]].concat();
    let mut table = (atoms.len() as u32).to_be_bytes().to_vec();
    atoms.iter().for_each(|atom| table.extend([&[atom.len() as u8], atom.as_bytes()].concat()));
    let table = (b"AtU8", table);
    let called = (0..N as u32).flat_map(|call| [2 * call + 2, 2 * call + 3, 1]);
    let calls =
        (b"ImpT", [N as u32].into_iter().chain(called).flat_map(u32::to_be_bytes).collect());
    let mut file = b"FOR1\0\0\0\0BEAM".to_vec();
    for (name, mut part) in [table, calls] {
        file.extend([name, &(part.len() as u32).to_be_bytes()[..]].concat());
        part.resize(part.len().next_multiple_of(4), 0);
        file.extend(part);
    }
    file
}

/// An installation of Erlang, and a script that starts a server with libraries beside it.
fn server(plugins: &str) -> Image {
    let script =
        b"#!/bin/sh\nreal() {\n cd \"$1\" && pwd\n}\nHOME_=\"$(real \"/opt/server/sbin/..\")\"\n\
        export ERL_LIBS=\"$HOME_/plugins\"\nexec erl -boot none -s rabbit boot\n";
    usual()
        .program("/usr/bin/erl", b"#!/bin/sh\nexec /usr/lib/erlang/erts-13/bin/erlexec \"$@\"\n")
        .program("/usr/lib/erlang/erts-13/bin/erlexec", b"")
        .file("/usr/lib/erlang/lib/crypto-5/ebin/crypto.app", b"{modules, [crypto]}")
        .file("/usr/lib/erlang/lib/crypto-5/ebin/crypto.beam", &compiled("crypto", []))
        .file("/usr/lib/erlang/lib/crypto-5/priv/lib/crypto.so", &shared(&["libc.so.6"]))
        .program("/opt/server/sbin/server", script)
        .file("/etc/rabbitmq/enabled_plugins", plugins.as_bytes())
        .file(
            "/opt/server/plugins/rabbit-3/ebin/rabbit.app",
            b"{application, rabbit, [{applications, [crypto]}, {modules, [rabbit, other]}]}.",
        )
        .file("/opt/server/plugins/rabbit-3/ebin/other.beam", &compiled("other", []))
        .file(
            "/opt/server/plugins/web-1/ebin/web.app",
            b"{application, web, [{modules, [web, web_app]}, {mod, {web_app, []}}]}.",
        )
        .file("/opt/server/plugins/web-1/ebin/web.beam", &compiled("web", []))
        .file("/opt/server/plugins/web-1/ebin/web_app.beam", &compiled("web_app", []))
}

const BOOTED: &str = "/opt/server/plugins/rabbit-3/ebin/rabbit.beam";

/// What is guessed for a server, without programs and the C library.
fn guessed_of_server(image: &Image) -> Vec<String> {
    let mut found = guessed(image, &["/opt/server/sbin/server"], "/opt/server/sbin/server");
    found.retain(|path| !path.contains("/bin/") && path != LINKER && path != LIBC);
    found
}

#[test]
fn erlang_brings_the_applications_that_the_one_it_starts_needs() {
    let image = server("[].").file(BOOTED, &compiled("rabbit", []));
    let expected = [
        "/etc/rabbitmq/enabled_plugins",
        "/opt/server/plugins/rabbit-3/ebin/rabbit.app",
        BOOTED,
        // Of applications that are not started, only this is read.
        "/opt/server/plugins/web-1/ebin/web.app",
        "/usr/lib/erlang/lib/crypto-5/ebin/crypto.app",
        "/usr/lib/erlang/lib/crypto-5/priv/lib/crypto.so",
    ];
    assert_eq!(guessed_of_server(&image), expected);
    let image = server("[web].").file(BOOTED, &compiled("rabbit", []));
    let more = guessed_of_server(&image).into_iter().filter(|path| !expected.contains(&&**path));
    assert_eq!(more.collect::<Vec<_>>(), ["/opt/server/plugins/web-1/ebin/web_app.beam"]);
}

#[test]
fn erlang_brings_all_modules_of_applications_if_it_asks_for_them() {
    let image = server("[web].").file(BOOTED, &compiled("rabbit", [["application", "get_key"]]));
    let mut found = guessed_of_server(&image);
    found.retain(|path| path.ends_with(".beam"));
    let expected = [
        "/opt/server/plugins/rabbit-3/ebin/other.beam",
        BOOTED,
        "/opt/server/plugins/web-1/ebin/web.beam",
        "/opt/server/plugins/web-1/ebin/web_app.beam",
        "/usr/lib/erlang/lib/crypto-5/ebin/crypto.beam",
    ];
    assert_eq!(found, expected);
}

#[test]
fn erlang_in_embedded_mode_brings_all_modules_of_its_boot_file() {
    let atom = |name: &str| [&[b'd', 0, name.len() as u8], name.as_bytes()].concat();
    let path = b"$ROOT/lib/web-1/ebin";
    let boot = [
        &[131, b'l', 0, 0, 0, 3, b'k', 0, path.len() as u8][..],
        path,
        &atom("kernel_load_completed"),
        &atom("web"),
    ];
    let image = usual()
        .program("/opt/release/erts-13/bin/erlexec", b"")
        .file("/opt/release/releases/1/start.boot", &boot.concat())
        .file("/opt/release/lib/web-1/ebin/web.beam", &compiled("web", [["erlang", "load_nif"]]))
        .file("/opt/release/lib/web-1/priv/web.so", &shared(&[]));
    let program = "/opt/release/erts-13/bin/erlexec";
    let command = [program, "-boot", "/opt/release/releases/1/start", "-mode", "interactive"];
    assert_eq!(guessed(&image, &command, program), ["/opt/release/releases/1/start.boot"]);
    let command = [&command[..4], &["embedded"]].concat();
    let expected = [
        "/opt/release/lib/web-1/ebin/web.beam",
        "/opt/release/lib/web-1/priv/web.so",
        "/opt/release/releases/1/start.boot",
    ];
    assert_eq!(guessed(&image, &command, program), expected);
}

/// An installation of .NET in two versions, and a program in /srv.
fn with_dotnet() -> Image {
    let mut image = usual()
        .program("/usr/lib/dotnet/dotnet", &program(&[]))
        .link("/usr/bin/dotnet", "../lib/dotnet/dotnet")
        .file("/usr/lib/dotnet/host/fxr/9.0.1/libhostfxr.so", &shared(&[]))
        .file("/usr/lib/dotnet/host/fxr/8.0.2/libhostfxr.so", &shared(&[]))
        .file("/srv/app.runtimeconfig.json", CONFIGURATION)
        .file("/srv/app.deps.json", b"{}")
        .file("/srv/app.dll", &dotnet_forge::assembly(&["System.Runtime", "Own"], &[]))
        .file("/srv/Own.dll", &dotnet_forge::assembly(&["Deep"], &["native"]))
        .file("/srv/Deep.dll", &dotnet_forge::assembly(&["Deeper"], &[]))
        .file("/srv/Deeper.dll", &dotnet_forge::assembly(&[], &[]))
        .file("/srv/libnative.so", &shared(&[]));
    for version in ["8.0.2", "9.0.1"] {
        let framework = format!("/usr/lib/dotnet/shared/Microsoft.NETCore.App/{version}");
        image = image
            .file(&format!("{framework}/Microsoft.NETCore.App.deps.json"), b"{}")
            .file(&format!("{framework}/libhostpolicy.so"), &shared(&[]))
            .file(&format!("{framework}/libcoreclr.so"), &shared(&[]))
            .file(&format!("{framework}/System.Private.CoreLib.dll"), b"MZ")
            .file(&format!("{framework}/System.Runtime.dll"), b"MZ")
            .file(&format!("{framework}/System.Unused.dll"), b"MZ");
    }
    image
}

const CONFIGURATION: &[u8] = br#"{"runtimeOptions": {"framework":
    {"name": "Microsoft.NETCore.App", "version": "8.0.0"}}}"#;

/// What is guessed with it, without programs.
const WITH_DOTNET: [&str; 12] = [
    "/srv/Deep.dll",
    "/srv/Own.dll",
    "/srv/app.deps.json",
    "/srv/app.dll",
    "/srv/app.runtimeconfig.json",
    "/srv/libnative.so",
    "/usr/lib/dotnet/host/fxr/9.0.1/libhostfxr.so",
    "/usr/lib/dotnet/shared/Microsoft.NETCore.App/8.0.2/Microsoft.NETCore.App.deps.json",
    "/usr/lib/dotnet/shared/Microsoft.NETCore.App/8.0.2/System.Private.CoreLib.dll",
    "/usr/lib/dotnet/shared/Microsoft.NETCore.App/8.0.2/System.Runtime.dll",
    "/usr/lib/dotnet/shared/Microsoft.NETCore.App/8.0.2/libcoreclr.so",
    "/usr/lib/dotnet/shared/Microsoft.NETCore.App/8.0.2/libhostpolicy.so",
];

/// The guesses for `command` in `/srv`, without the program and what each program brings.
fn guessed_of_dotnet(image: &Image, command: &[&str], program: &str) -> Vec<String> {
    let mut found = guessed(image, command, program);
    found.retain(|path| path != LINKER && path != LIBC);
    found
}

#[test]
fn dotnet_brings_its_run_time_and_two_steps_of_assemblies() {
    let image = with_dotnet();
    for command in [&["dotnet", "app.dll"][..], &["dotnet", "exec", "/srv/app.dll", "serve"]] {
        assert_eq!(guessed_of_dotnet(&image, command, "/usr/lib/dotnet/dotnet"), WITH_DOTNET);
    }
    let configured = with_dotnet().program("/srv/app", &program(&[]));
    assert_eq!(guessed_of_dotnet(&configured, &["./app"], "/srv/app"), WITH_DOTNET);
}

#[test]
fn a_program_of_dotnet_finds_the_installation_that_its_environment_names() {
    let image = usual()
        .program("/srv/app", &program(&[]))
        .file("/srv/app.runtimeconfig.json", CONFIGURATION)
        .file("/opt/net/shared/Microsoft.NETCore.App/8.1.0/libcoreclr.so", &shared(&[]));
    let config = json!({ "config": { "Cmd": ["/srv/app"], "Env": ["DOTNET_ROOT=/opt/net"] } });
    let guessed = image.guessed(&config);
    let library = "/opt/net/shared/Microsoft.NETCore.App/8.1.0/libcoreclr.so";
    assert!(guessed.iter().any(|path| path == library), "{guessed:?}");
}

#[test]
fn a_program_of_dotnet_may_have_its_run_time_beside_it() {
    let image = usual()
        .program("/srv/app", &program(&[]))
        .file(
            "/srv/app.runtimeconfig.json",
            br#"{"runtimeOptions": {"includedFrameworks": [
                {"name": "Microsoft.NETCore.App", "version": "8.0.0"}]}}"#,
        )
        .file("/srv/app.dll", &dotnet_forge::assembly(&["System.Runtime"], &[]))
        .file("/srv/System.Runtime.dll", b"MZ")
        .file("/srv/System.Unused.dll", b"MZ")
        .file("/srv/libhostfxr.so", &shared(&[]))
        .file("/srv/libcoreclr.so", &shared(&[]));
    let expected = [
        "/srv/System.Runtime.dll",
        "/srv/app.dll",
        "/srv/app.runtimeconfig.json",
        "/srv/libcoreclr.so",
        "/srv/libhostfxr.so",
    ];
    assert_eq!(guessed_of_dotnet(&image, &["./app"], "/srv/app"), expected);
}

#[test]
fn mono_brings_assemblies_of_its_own_directories() {
    let core = "/usr/lib/mono/gac/System.Core/4.0.0.0__b7/System.Core.dll";
    let image = usual()
        .program("/usr/bin/mono-sgen", &program(&[]))
        .link("/usr/bin/mono", "mono-sgen")
        .program("/usr/bin/tool", b"#!/bin/sh\nexec /usr/bin/mono /srv/tool.exe \"$@\"\n")
        .file("/srv/tool.exe", &dotnet_forge::assembly(&["mscorlib", "System.Core", "Own"], &[]))
        .file("/srv/lib/Own.dll", &dotnet_forge::assembly(&["Cached"], &[]))
        .file("/usr/lib/mono/4.5/mscorlib.dll", b"MZ")
        .file("/usr/lib/mono/4.5/System.Unused.dll", b"MZ")
        .file(core, b"MZ")
        .link("/usr/lib/mono/4.5/System.Core.dll", "../gac/System.Core/4.0.0.0__b7/System.Core.dll")
        .file("/usr/lib/mono/gac/Cached/1.0.0.0__b7/Cached.dll", b"MZ")
        .file("/etc/mono/config", b"<configuration/>");
    let expected = [
        "/etc/mono/config",
        "/srv/lib/Own.dll",
        "/srv/tool.exe",
        "/usr/bin/mono-sgen",
        "/usr/lib/mono/4.5/mscorlib.dll",
        "/usr/lib/mono/gac/Cached/1.0.0.0__b7/Cached.dll",
        core,
    ];
    let config = json!({ "config": { "Cmd": ["tool"], "Env": ["MONO_PATH=/srv/lib"] } });
    let mut found = sorted(image.guessed(&config));
    found.retain(|path| expected.contains(&path.as_str()) || path.contains("mono"));
    assert_eq!(found, expected);
}

#[test]
fn lua_brings_what_its_modules_require() {
    let script = b"#!/usr/bin/env lua\nSOURCES='/opt/app'\npackage.path = SOURCES..'/?.lua;'\n\
        local log = require \"util.log\"\nlocal ok, fast = pcall(require, 'fast')\nrequire('set')\n";
    let image = usual()
        .program("/usr/bin/lua5.4", b"")
        .link("/usr/bin/lua", "lua5.4")
        .program("/usr/bin/env", b"")
        .program("/usr/bin/app", script)
        .file("/opt/app/util/log.lua", b"require 'util.text'")
        .file("/opt/app/util/text.lua", b"-- nothing")
        .file("/opt/app/util/unused.lua", b"-- nothing")
        .file("/usr/lib/x86_64-linux-gnu/liblua-fast.so.0.1", &shared(&["libc.so.6"]))
        .link("/usr/lib/x86_64-linux-gnu/lua/5.4/fast.so", "../../liblua-fast.so.0.1")
        .file("/usr/lib/x86_64-linux-gnu/lua/5.3/fast.so", &shared(&["libc.so.6"]))
        .file("/usr/share/lua/5.4/set/init.lua", b"-- nothing");
    let expected = [
        "/opt/app/util/log.lua",
        "/opt/app/util/text.lua",
        LIBC,
        "/usr/lib/x86_64-linux-gnu/liblua-fast.so.0.1",
        "/usr/share/lua/5.4/set/init.lua",
    ];
    let mut found = guessed(&image, &["app"], "/usr/bin/app");
    found.retain(|path| path != LINKER);
    assert_eq!(found, expected);
    let found = guessed(&image, &["lua", "-l", "set"], "/usr/bin/lua5.4");
    assert_eq!(found, ["/usr/share/lua/5.4/set/init.lua"]);
}

#[test]
fn missed_modules_bring_what_they_import() {
    let image = usual()
        .program("/usr/bin/python3.11", b"")
        .file("/srv/main.py", b"import importlib\nimportlib.import_module('plug' + 'in')\n")
        .file("/srv/plugin.py", b"import helper\n")
        .file("/srv/helper.py", b"# nothing\n")
        .file("/srv/unused.py", b"# nothing\n")
        .file("/srv/notes.txt", b"import unused\n");
    let config = json!({ "config": { "Cmd": ["python3.11", "main.py"], "WorkingDir": "/srv" } });
    let before = image.guessed(&config);
    let after = image.guessed_after(&config, &["/srv/notes.txt", "/srv/plugin.py"]);
    assert_eq!(after[before.len()..], ["/srv/plugin.py", "/srv/helper.py"]);
}
