//! Asks containerd as Kubernetes does, for scripts.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

use std::{
    env, fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
};

use lazuli_testkit::{
    cri::{Client, Login, Output},
    pause,
};

const USAGE: &str = "\
usage: cri SOCKET VERB ...        (SOCKET: containerd's, an absolute path)
    pull IMAGE                    CRI_LOGIN=USER:PASSWORD in the environment is the pull secret
    run NAME IMAGE COMMAND...     in a pod of its own, to its end; the pod is removed
    start NAME IMAGE COMMAND...   likewise, but it goes on; prints the names of sandbox and container. CRI_LOGS=DIR
                                  in the environment: what it prints goes to DIR/log
    exec CONTAINER COMMAND...
    stop SANDBOX
    rm SANDBOX                    stops it first
    ps                            sandbox and container, image, state
    images
    rmi IMAGE
    CRI_RUNTIME=HANDLER in the environment: pulls and starts for this runtime of containerd's configuration
usage: cri pause NAME FILE        write a sandbox image, which `ctr image import` then knows as NAME";

type Error = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match answer(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cri: {error}");
            let mut source = error.source();
            while let Some(error) = source {
                eprintln!("cri: because: {error}");
                source = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn answer(arguments: &[&str]) -> Result<ExitCode, Error> {
    match arguments {
        ["pause", name, file] => {
            let written = fs::write(file, pause::archive(name)?);
            written.map_err(|error| format!("{file}: {error}"))?;
            Ok(ExitCode::SUCCESS)
        }
        [socket, verb, rest @ ..] if socket.starts_with('/') => {
            let mut client = Client::connect(Path::new(socket))?;
            if let Ok(handler) = env::var("CRI_RUNTIME") {
                client = client.with_runtime(&handler);
            }
            ask(&client, verb, rest)
        }
        _ => usage(),
    }
}

fn ask(client: &Client, verb: &str, arguments: &[&str]) -> Result<ExitCode, Error> {
    match (verb, arguments) {
        ("pull", [image]) => println!("{}", client.pull(image, login()?.as_ref())?),
        ("run", [name, image, command @ ..]) => return show(client.run(name, image, command)?),
        ("start", [name, image, command @ ..]) => {
            let logs = env::var_os("CRI_LOGS").map(PathBuf::from);
            let pod = client.start_logged(name, image, command, logs.as_deref())?;
            println!("{} {}", pod.sandbox, pod.container);
        }
        ("exec", [container, command @ ..]) if !command.is_empty() => {
            return show(client.exec(container, command)?);
        }
        ("stop", [sandbox]) => client.stop(sandbox)?,
        ("rm", [sandbox]) => client.remove(sandbox)?,
        ("ps", []) => {
            for found in client.list()? {
                let state = found.state();
                let image = found.image.map(|image| image.image).unwrap_or_default();
                let state = state.as_str_name().trim_start_matches("CONTAINER_").to_lowercase();
                println!("{} {} {image} {state}", found.pod_sandbox_id, found.id);
            }
        }
        ("images", []) => {
            for image in client.images()? {
                println!("{} {} {}", image.id, image.size, image.repo_tags.join(","));
            }
        }
        ("rmi", [image]) => client.remove_image(image)?,
        _ => return usage(),
    }
    Ok(ExitCode::SUCCESS)
}

fn usage() -> Result<ExitCode, Error> {
    eprintln!("{USAGE}");
    Ok(ExitCode::from(2))
}

/// Not an argument, which every process of the machine sees.
fn login() -> Result<Option<Login>, Error> {
    let Ok(login) = env::var("CRI_LOGIN") else { return Ok(None) };
    let (user, password) = login.split_once(':').ok_or("CRI_LOGIN: not USER:PASSWORD")?;
    Ok(Some(Login { user: user.to_owned(), password: password.to_owned() }))
}

/// The outputs of a command, and its exit status.
fn show(output: Output) -> Result<ExitCode, Error> {
    io::stdout().write_all(&output.stdout)?;
    io::stderr().write_all(&output.stderr)?;
    Ok(ExitCode::from(u8::try_from(output.status).unwrap_or(u8::MAX)))
}
