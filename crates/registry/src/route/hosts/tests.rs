use std::{fs, path::Path};

use super::*;

/// A directory with these files, and the servers it yields for a registry.
struct Rig(tempfile::TempDir);

impl Rig {
    fn new(files: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Rig(directory)
    }

    fn servers(&self, image: &str) -> Result<Vec<Server>, HostsError> {
        let hosts = Hosts::new(self.0.path().to_str().unwrap());
        hosts.servers(&image.parse().unwrap(), false)
    }

    /// The servers of an image, with their capabilities.
    fn roots(&self, image: &str) -> Vec<String> {
        let may = |server: &Server| {
            let Capabilities { pull, resolve, push, referrers } = server.may;
            let letters = [(pull, 'p'), (resolve, 'r'), (push, 'w'), (referrers, 'a')];
            letters.iter().filter(|(may, _)| *may).map(|(_, letter)| letter).collect::<String>()
        };
        let servers = self.servers(image).unwrap();
        servers.iter().map(|server| format!("{} {}", server.root, may(server))).collect()
    }
}

fn toml(text: &str) -> Rig {
    Rig::new(&[("r.example/hosts.toml", text)])
}

#[test]
fn without_a_file_the_registry_is_where_its_name_says() {
    let rig = Rig::new(&[("other.example/hosts.toml", "nonsense")]);
    for (image, root, skips) in [
        ("debian", "https://registry-1.docker.io/v2/", false),
        ("r.example/a", "https://r.example/v2/", false),
        ("r.example:5000/a", "https://r.example:5000/v2/", false),
        ("localhost:5000/a", "http://localhost:5000/v2/", false),
        ("127.0.0.1:5000/a", "http://127.0.0.1:5000/v2/", false),
        ("[::1]:5000/a", "http://[::1]:5000/v2/", false),
        ("localhost/a", "https://localhost/v2/", true),
        ("127.0.0.1:443/a", "https://127.0.0.1/v2/", true),
    ] {
        assert_eq!(rig.roots(image), [format!("{root} prwa")], "{image}");
        assert_eq!(rig.servers(image).unwrap()[0].tls.skip_verify, skips, "{image}");
    }
    let plain = Hosts::default().servers(&"r.example/a".parse().unwrap(), true).unwrap();
    assert_eq!(plain[0].root.as_str(), "http://r.example/v2/");
}

#[test]
fn hosts_are_asked_in_the_order_of_the_file() {
    let rig = toml(
        r#"
server = "https://real.example"
capabilities = ["pull", "resolve"]
[host."https://z.example"]
  capabilities = ["pull"]
[host."http://a.example:5000/path/"]
  capabilities = ["Pull", "Resolve"]
  [host."http://a.example:5000/path/".header]
    x-one = "1"
    x-two = ["2", "3"]
[host."m.example/v2"]
[host."https://b.example/api/registry"]
  override_path = true
  dial_timeout = "1m1.5s"
  capabilities = ["push", "referrers"]
"#,
    );
    let expected = [
        "https://z.example/v2/ p",
        "http://a.example:5000/path/v2/ pr",
        "https://m.example/v2/ prwa",
        "https://b.example/api/registry/ wa",
        "https://real.example/v2/ pr",
    ];
    assert_eq!(rig.roots("r.example/a"), expected);
    let servers = rig.servers("r.example/a").unwrap();
    assert_eq!(servers[1].headers.get_all("x-two").iter().collect::<Vec<_>>(), ["2", "3"]);
    assert_eq!(servers[3].connect, Some(Duration::from_millis(61_500)));
    let shown = format!("{servers:?}");
    assert!(shown.contains("Server(https://b.example/api/registry/)"), "{shown}");
    assert!(!shown.contains("x-two"), "{shown}");
    // Only mirrors: the registry itself is the server then.
    let rig = toml("[host.\"https://z.example\"]\n");
    assert_eq!(
        rig.roots("r.example/a"),
        ["https://z.example/v2/ prwa", "https://r.example/v2/ prwa"]
    );
    assert_eq!(
        toml("server = 'https://docker.io'").roots("r.example/a"),
        ["https://registry-1.docker.io/v2/ prwa"]
    );
}

#[test]
fn the_most_particular_directory_counts() {
    let server = |name: &str| format!("server = 'https://{name}.example'\n");
    let [both, colon, any, second] = ["both", "colon", "any", "second"].map(server);
    let rig = Rig::new(&[
        ("one/r.example_5000_/hosts.toml", &both),
        ("one/r.example:5000/hosts.toml", &colon),
        ("one/r.example:5001/hosts.toml", &colon),
        ("one/_default/hosts.toml", &any),
        ("two/s.example/hosts.toml", &second),
        ("two/t.example/hosts.toml", ""),
    ]);
    let hosts = |directories: &[&str]| {
        let paths = directories.iter().map(|d| rig.0.path().join(d).display().to_string());
        Hosts::new(&paths.collect::<Vec<_>>().join(":"))
    };
    let at = |directories: &[&str], image: &str| {
        let servers = hosts(directories).servers(&image.parse().unwrap(), false).unwrap();
        servers[0].root.to_string()
    };
    assert_eq!(at(&["one"], "r.example:5000/a"), "https://both.example/v2/");
    assert_eq!(at(&["one"], "r.example:5001/a"), "https://colon.example/v2/");
    assert_eq!(at(&["one"], "r.example/a"), "https://any.example/v2/");
    // The default of an earlier directory wins over a later directory's entry for this registry, as
    // in containerd.
    assert_eq!(at(&["one", "two"], "s.example/a"), "https://any.example/v2/");
    assert_eq!(at(&["two", "one"], "s.example/a"), "https://second.example/v2/");
    assert_eq!(at(&["two", "one"], "t.example/a"), "https://t.example/v2/");
    assert_eq!(at(&["absent", ""], "r.example/a"), "https://r.example/v2/");
}

#[test]
fn errors_name_the_file_the_key_and_what_is_right() {
    let long: String = (0..10).map(|n| format!("[host.'https://m{n}.example']\n")).collect();
    for (text, expected) in [
        ("server = ", "line 1: "),
        ("\n\nserver = 'a'\nserver = 'b'", "line 4: "),
        ("server = 1", "server is of type integer, expected a string"),
        ("server = 'ftp://a.example'", "no address of a server, expected https://HOST"),
        ("server = 'https://'", "server is no URL"),
        ("server = 'https://me:secret@a.example'", "server is an address with a login"),
        ("host = 'a'", "host is of type string, expected a table"),
        ("[host]\na = 1", "host.\"a\" is of type integer, expected a table"),
        ("[host.'https://a b']", "host.\"https://a b\" is no URL"),
        ("capabilities = ['pul']", "capabilities has `pul`, expected pull, resolve, push"),
        ("capabilities = 'push,'", "capabilities has `push,`"),
        ("[host.a]\ncapabilities = [1]", "host.\"a\".capabilities is of type integer"),
        ("skip_verify = 'yes'", "skip_verify is of type string, expected true or false"),
        ("override_path = 1", "override_path is of type integer"),
        ("client = [['a', 'b', 'c']]", "client is of type array, expected a file, or a list"),
        ("client = 7", "client is of type integer"),
        ("ca = [['secret']]", "ca is of type array, expected a string or a list"),
        ("[header]\n'a b' = 'secret'", "header.a b is no name of a header"),
        ("[header]\na = \"secret\\n\"", "header.a is no value of a header"),
        ("[header]\na = { secret = 1 }", "header.a is of type table"),
        ("dial_timeout = '5'", "dial_timeout is `5`, expected a time as in 1s"),
        ("dial_timeout = '-5s'", "dial_timeout is `-5s`"),
        ("dial_timeout = 5", "dial_timeout is of type integer, expected a string"),
        (&long, "10 hosts are too many, expected at most 8"),
    ] {
        // Keys that only matter with a server are read with one.
        let text = if text.starts_with("override") {
            format!("server = 'a'\n{text}")
        } else {
            text.to_owned()
        };
        let rig = toml(&text);
        let error = rig.servers("r.example/a").unwrap_err().to_string();
        assert!(error.contains("r.example/hosts.toml: "), "{text}: {error}");
        assert!(error.contains(expected), "{text}: {error}");
        assert!(!error.contains("secret"), "{text}: {error}");
        rig.servers("s.example/a").unwrap();
    }
    let rig = Rig::new(&[("r.example/hosts.toml", &"#".repeat(FILE_LIMIT as usize + 1))]);
    assert!(rig.servers("r.example/a").unwrap_err().to_string().contains("too many"));
    let rig = Rig::new(&[("r.example/hosts.toml/file", "")]);
    assert!(rig.servers("r.example/a").unwrap_err().to_string().contains("expected a file"));
    let rig = Rig::new(&[("r.example", "")]);
    let error = rig.servers("r.example/a").unwrap_err().to_string();
    assert!(error.contains("r.example"), "{error}");
}

#[test]
fn files_of_certificates_are_named_with_the_key_that_names_them() {
    let not_one = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n";
    let rig = Rig::new(&[
        ("a.example/hosts.toml", "ca = ['absent.crt']"),
        ("b.example/hosts.toml", "[host.'https://x']\nca = '../text'"),
        ("c.example/hosts.toml", "client = '../not-one'"),
        ("d.example/ca.crt", "no certificate"),
        ("e.example/client.cert", not_one),
        ("text", "no certificate"),
        ("not-one", not_one),
    ]);
    for (image, parts) in [
        (
            "a.example/i",
            &["a.example/absent.crt: there is no such file (ca in ", "a.example/hosts.toml)"][..],
        ),
        (
            "b.example/i",
            &["text: expected certificates in PEM, found none", "host.\"https://x\".ca in "],
        ),
        ("c.example/i", &["not-one: ", "client in "]),
        ("d.example/i", &["d.example/ca.crt: expected certificates in PEM, found none"]),
        ("e.example/i", &["e.example/client.cert: "]),
    ] {
        let error = rig.servers(image).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn unknown_keys_are_ignored_with_one_warning() {
    let text = "frobnicate = 1\n[host.'https://z.example']\nserver = 'x'\n";
    let (configured, unknown) = file::parse(Path::new("/hosts.toml"), text.as_bytes()).unwrap();
    assert_eq!(unknown, ["frobnicate", "host.\"https://z.example\".server"]);
    assert_eq!(configured.hosts.len(), 1);
}
