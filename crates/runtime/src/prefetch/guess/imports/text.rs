//! Imports found as text: words after `import` and `require`, quoted paths.

/// Names that are taken from one file.
pub(super) const NAMES: usize = 1024;

/// Longest name or path of interest.
pub(super) const LONGEST: usize = 256;

/// Python's imports outside of functions: `a.b`, `.c`, each followed by the names imported from it.
pub(super) fn python(source: &[u8]) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    // Indentation of the function whose lines are skipped.
    let mut function: Option<usize> = None;
    for line in source.split(|byte| *byte == b'\n') {
        let indent = line.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let line = &line[indent..];
        if line.is_empty() || function.is_some_and(|function| indent > function) {
            continue;
        }
        function = (line.starts_with(b"def ") || line.starts_with(b"async def ")).then_some(indent);
        let words = line.split(|byte| byte.is_ascii_whitespace() || b",();".contains(byte));
        let mut words = words.filter(|word| !word.is_empty()).take_while(|word| word[0] != b'#');
        match words.next() {
            Some(b"import") => {
                let mut is_alias = false;
                names.extend(words.filter(|word| {
                    let is_name = !std::mem::replace(&mut is_alias, *word == b"as");
                    is_name && *word != b"as"
                }));
            }
            Some(b"from") => {
                let Some(module) = words.next() else { continue };
                names.push(module);
                names.extend(words.filter(|word| !matches!(*word, b"import" | b"as" | b"*")));
            }
            _ => {}
        }
    }
    bounded(names)
}

/// Python: modules that a `.pth` file loads: `import os; on and __import__('hack')`. Its other
/// lines are directories.
pub(super) fn python_site(source: &[u8]) -> Vec<Vec<u8>> {
    let mut names = python(source);
    names.extend(quoted(source, |before, _| before.ends_with(b"__import__(")));
    names
}

/// Quoted words of a script that `keep` accepts, given the end of the text before them on the line,
/// and the word.
pub(super) fn quoted(source: &[u8], keep: impl Fn(&[u8], &[u8]) -> bool) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    for line in source.split(|byte| *byte == b'\n') {
        let mut at = 0;
        while let Some(open) = line[at..].iter().position(|byte| b"\"'`".contains(byte)) {
            let open = at + open;
            let rest = &line[open + 1..];
            let Some(len) = rest.iter().position(|byte| *byte == line[open]) else { break };
            let word = &rest[..len];
            let before = &line[open.saturating_sub(LONGEST)..open];
            if !word.is_empty() && keep(before.trim_ascii(), word) {
                names.push(word);
            }
            at = open + len + 2;
            if at > line.len() || names.len() > NAMES {
                break;
            }
        }
    }
    bounded(names)
}

/// JavaScript: required or imported modules.
pub(super) fn javascript(source: &[u8]) -> Vec<Vec<u8>> {
    const BEFORE: [&[u8]; 4] = [b"require", b"require.resolve", b"import", b"from"];
    quoted(source, |before, _| {
        let before = before.strip_suffix(b"(").unwrap_or(before).trim_ascii_end();
        BEFORE.iter().any(|word| before.ends_with(word))
    })
}

/// JavaScript: quoted names that packages have and other words hardly: `@babel/core`, `babel-jest`.
pub(super) fn javascript_packages(source: &[u8]) -> Vec<Vec<u8>> {
    let is_part =
        |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"@/._-".contains(byte);
    quoted(source, |_, word| {
        word.iter().all(is_part)
            && word.strip_prefix(b"@").is_none_or(|rest| rest.contains(&b'/'))
            && word.iter().any(|byte| b"@-".contains(byte))
            && word[0] != b'.'
    })
}

/// Ruby: required files, even if loaded later.
pub(super) fn ruby(source: &[u8]) -> Vec<Vec<u8>> {
    after_words(source, &[b"require", b"load", b"autoload"])
}

/// Ruby: required files by their paths from the script's directory on.
pub(super) fn ruby_relative(source: &[u8]) -> Vec<Vec<u8>> {
    after_words(source, &[b"require_relative"])
}

/// Quoted words with one of `words` before them on the line.
fn after_words(source: &[u8], words: &[&[u8]]) -> Vec<Vec<u8>> {
    quoted(source, |before, _| {
        let before = before.strip_suffix(b"(").unwrap_or(before);
        let mut parts = before.split(|byte| byte.is_ascii_whitespace() || b"(.;".contains(byte));
        parts.any(|part| words.contains(&part))
    })
}

/// Ruby: patterns of scripts that are all loaded, from the script's directory on:
/// `Dir["#{__dir__}/tags/*.rb"]`, `require_all "commands"`.
pub(super) fn ruby_patterns(source: &[u8]) -> Vec<Vec<u8>> {
    let named = quoted(source, |_, word| word.contains(&b'*') && word.ends_with(b".rb"));
    let named = named.into_iter().filter_map(|pattern| {
        // What is inserted before it is the directory of the script.
        let start = pattern.iter().rposition(|byte| *byte == b'}').map_or(0, |at| at + 1);
        let pattern = pattern[start..].strip_prefix(b"/").unwrap_or(&pattern[start..]);
        let is_near = !pattern.windows(2).any(|part| part == b".." || part == b"**");
        (pattern.contains(&b'/') && is_near).then(|| pattern.to_vec())
    });
    let all = quoted(source, |before, _| before.trim_ascii().ends_with(b"require_all"));
    named.chain(all.into_iter().map(|path| [&path[..], b"/*.rb"].concat())).collect()
}

/// Ruby: the gem and the program that a script which RubyGems has made loads.
pub(super) fn ruby_program(source: &[u8]) -> Option<[Vec<u8>; 2]> {
    let words = quoted(source, |before, _| before.windows(9).any(|part| part == b"bin_path("));
    words.get(..2)?.to_vec().try_into().ok()
}

/// Perl: modules that are used or required, as paths.
pub(super) fn perl(source: &[u8]) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    for line in source.split(|byte| *byte == b'\n') {
        let line = line.trim_ascii_start();
        if matches!(line, b"__END__" | b"__DATA__") {
            break;
        }
        if line.starts_with(b"#") {
            continue;
        }
        let split = |byte: &u8| byte.is_ascii_whitespace() || b"\"'(){};,[]".contains(byte);
        let mut words = line.split(split).filter(|word| !word.is_empty());
        match words.next() {
            Some(b"use" | b"require") => {}
            // `eval { require A::B; 1 } or …`
            Some(_) if words.any(|word| word == b"require") => {}
            _ => continue,
        }
        let Some(first) = words.next() else { continue };
        names.push(path_of_perl(first));
        if matches!(first, b"parent" | b"base" | b"Mojo::Base") {
            names.extend(words.filter(|word| *word != b"qw").map(path_of_perl));
        }
    }
    bounded(names.iter().flatten().map(Vec::as_slice).collect())
}

/// `A::B` as `A/B.pm`.
pub(super) fn path_of_perl(name: &[u8]) -> Option<Vec<u8>> {
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_:".contains(byte);
    if !name.first()?.is_ascii_alphabetic() || !name.iter().all(is_name) {
        return None;
    }
    let parts: Vec<_> = name.split(|byte| *byte == b':').filter(|part| !part.is_empty()).collect();
    Some([parts.join(&b'/'), b".pm".to_vec()].concat())
}

/// Lua: required modules, also in protected calls.
pub(super) fn lua(source: &[u8]) -> Vec<Vec<u8>> {
    quoted(source, |before, _| {
        let before = before.strip_suffix(b"(").or(before.strip_suffix(b",")).unwrap_or(before);
        // Prosody's modules have a function of their own that may fail.
        [&b"require"[..], b"softreq"].iter().any(|word| before.trim_ascii_end().ends_with(word))
    })
}

/// Lua: directories that a script names, and those of its search paths: `/lib/?.lua;./?.lua`.
pub(super) fn lua_places(source: &[u8]) -> Vec<Vec<u8>> {
    let is_place = |text: &[u8]| text.starts_with(b"/") || text.contains(&b'?');
    let texts = quoted(source, |_, text| text.len() > 1 && is_place(text));
    let templates = texts.iter().flat_map(|text| text.split(|byte| *byte == b';'));
    let place = |text: &[u8]| text.split(|byte| *byte == b'?').next().map(<[u8]>::to_vec);
    templates.filter_map(place).filter(|place| !place.is_empty()).collect()
}

/// R: packages that are attached or loaded.
pub(super) fn r(source: &[u8]) -> Vec<Vec<u8>> {
    const CALLS: [&[u8]; 4] = [b"library(", b"require(", b"requireNamespace(", b"loadNamespace("];
    let mut names = Vec::new();
    for call in CALLS {
        let mut rest = source;
        while let Some(at) = rest.windows(call.len()).position(|window| window == call) {
            rest = &rest[at + call.len()..];
            let word = rest.trim_ascii_start();
            let word = word.strip_prefix(b"\"").or(word.strip_prefix(b"'")).unwrap_or(word);
            let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'.';
            let len = word.iter().take_while(|byte| is_name(byte)).count();
            names.push(&word[..len]);
            if names.len() > NAMES {
                break;
            }
        }
    }
    bounded(names)
}

/// The packages that an R package's DESCRIPTION requires.
pub(super) fn r_needs(description: &[u8]) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let mut is_needed = false;
    for line in description.split(|byte| *byte == b'\n') {
        let mut list = line;
        if !line.first().is_some_and(u8::is_ascii_whitespace) {
            let needed =
                [&b"Depends:"[..], b"Imports:"].iter().find_map(|at| line.strip_prefix(*at));
            is_needed = needed.is_some();
            list = needed.unwrap_or_default();
        }
        if is_needed {
            let items = list.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
            let end = |item: &[u8]| item.iter().position(|byte| b" (".contains(byte));
            let word = |item: &[u8]| end(item).unwrap_or(item.len());
            names.extend(items.map(|item| &item[..word(item)]).filter(|name| !name.is_empty()));
        }
    }
    bounded(names)
}

pub(super) fn bounded(names: Vec<&[u8]>) -> Vec<Vec<u8>> {
    let fits = |name: &&[u8]| (1..=LONGEST).contains(&name.len());
    names.into_iter().filter(fits).take(NAMES).map(<[u8]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(names: Vec<Vec<u8>>) -> Vec<String> {
        names.into_iter().map(|name| String::from_utf8(name).unwrap()).collect()
    }

    #[test]
    fn imports_are_found_as_each_language_writes_them() {
        let python = python(
            b"import os, sys as system  # not this\nfrom .own import (a,\n   b)\ntry:\n    import fast\n\
              except ImportError:\n    pass\ndef f():\n    import later\nclass A:\n    from x import y\n",
        );
        assert_eq!(texts(python), ["os", "sys", ".own", "a", "fast", "x", "y"]);
        let javascript = javascript(
            b"const a = require('a/b'), c = require(\"./c\");\nimport d from 'd';\nexport * from \"e\";\n\
              import('f');\nlog('not');\nimport 'g'\n",
        );
        assert_eq!(texts(javascript), ["a/b", "./c", "d", "e", "f", "g"]);
        let ruby =
            ruby(b"require 'a/b'\n  require_relative(\"c\")\nautoload :D, 'd'\nputs 'not'\n");
        assert_eq!(texts(ruby), ["a/b", "d"]);
        assert_eq!(texts(ruby_relative(b"require 'a'\n  require_relative(\"c\")")), ["c"]);
        let site = python_site(b"/opt/more\nimport sys;on = 1; on and __import__('a.hack')\n");
        assert_eq!(
            texts(site),
            ["sys", "on", "=", "1", "on", "and", "__import__", "'a.hack'", "a.hack"]
        );
        let patterns = ruby_patterns(
            b"Dir[\"#{__dir__}/tags/*.rb\"].each { |f| require f }\nrequire_all 'a/b'\nx = '*.rb'",
        );
        assert_eq!(texts(patterns), ["tags/*.rb", "a/b/*.rb"]);
        let perl = perl(
            b"use strict;\nuse parent qw(A::B);\nuse Mojo::Base 'C';\nrequire D;\neval { require F::G };\nuse 5.10;\n__END__\nuse E;",
        );
        let expected =
            ["strict.pm", "parent.pm", "A/B.pm", "Mojo/Base.pm", "C.pm", "D.pm", "F/G.pm"];
        assert_eq!(texts(perl), expected);
        let lua_names =
            lua(b"local a = require 'a.b'\npcall(require, \"c\")\nsoftreq(\"d\")\nrequired 'e'");
        assert_eq!(texts(lua_names), ["a.b", "c", "d"]);
        let places = lua_places(b"D='/opt/app'\npackage.path = './x/?.lua;/y/?/init.lua'");
        assert_eq!(texts(places), ["/opt/app", "./x/", "/y/"]);
        let r = r(b"library(ggplot2); suppressMessages(require(\"dplyr\"))");
        assert_eq!(texts(r), ["ggplot2", "dplyr"]);
        let needs = r_needs(
            b"Package: a\nDepends: R (>= 3.3)\nImports: cli, glue,\n  rlang (>= 1)\nSuggests: b\n",
        );
        assert_eq!(texts(needs), ["R", "cli", "glue", "rlang"]);
    }

    #[test]
    fn quotes_without_an_end_are_passed_over() {
        for source in [&b"require('"[..], b"'", b"require(\"a", b"''", b"import \"\""] {
            assert!(javascript(source).is_empty());
        }
    }
}
