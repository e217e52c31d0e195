//! Containers on lazily mounted images.

use std::{
    io::{BufRead, BufReader},
    net::TcpListener,
    process::Stdio,
};

use lazuli_testkit::kernel::{Feature, require};
use rustix::process::{Pid, Signal, kill_process};

use crate::lazuli::{Lazuli, corpus};

fn prepared(image: &str) -> Option<Lazuli> {
    if !require(Feature::Root) || !require(Feature::Program("runc")) {
        return None;
    }
    let layout = corpus(image)?;
    let lazuli = Lazuli::new();
    lazuli.ok(["convert", &format!("oci:{}", layout.display()), "oci:lazy:image"]);
    Some(lazuli)
}

/// Nothing of a container is left: no bundle, no mount.
#[track_caller]
fn nothing_left(lazuli: &Lazuli) {
    let bundles = std::fs::read_dir(lazuli.root().join("run")).unwrap();
    let bundles: Vec<_> = bundles.map(|entry| entry.unwrap().file_name()).collect();
    assert!(bundles.iter().all(|name| name == ".runc"), "{bundles:?}");
    assert_eq!(lazuli.status()["mounts"].as_array().unwrap().len(), 0);
}

#[test]
fn a_run_passes_on_output_and_exit_code_and_leaves_nothing() {
    let Some(lazuli) = prepared("busybox") else { return };
    for driver in ["fanotify", "fuse"] {
        let script = "echo out; echo err >&2; echo written > /new; cat /new; exit 7";
        let arguments = ["run", "oci:lazy:image", "--driver", driver, "--", "sh", "-c", script];
        let output = lazuli.output(arguments);
        assert_eq!(output.status.code(), Some(7), "{output:?}{}", lazuli.log());
        assert_eq!(output.stdout, b"out\nwritten\n");
        assert_eq!(output.stderr, b"err\n");
        nothing_left(&lazuli);
    }
}

/// By either version: limits can be read, and nothing can be changed.
#[test]
fn containers_see_their_own_control_group() {
    let Some(lazuli) = prepared("busybox") else { return };
    let script = "cut -d: -f3 /proc/self/cgroup | sort -u; ls /sys/fs/cgroup | grep -c .; \
                  for at in /sys/fs/cgroup/*/; do mkdir $at/new 2>/dev/null && echo $at; done";
    let output = lazuli.output(["run", "oci:lazy:image", "--", "sh", "-c", script]);
    let text = String::from_utf8(output.stdout).unwrap();
    let [group, entries] = &text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    assert_eq!(*group, "/");
    assert!(entries.parse::<usize>().unwrap() > 1, "{text}");
    nothing_left(&lazuli);
}

/// Without a network there is a loopback device, all of whose ports are free for any user.
#[test]
fn containers_have_the_hosts_network_or_none() {
    let Some(lazuli) = prepared("busybox") else { return };
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let run = |network: &str, script: &str| {
        lazuli.output(["run", "oci:lazy:image", "--network", network, "--", "sh", "-c", script])
    };
    let listen = format!("nc -l -p {port} -e echo answer");
    let script = format!(
        "cat /proc/sys/net/ipv4/ip_unprivileged_port_start; \
         {listen} & for again in $(seq 100); do nc 127.0.0.1 {port} </dev/null && break; sleep 0.1; done"
    );
    let alone = run("none", &script);
    assert_eq!(String::from_utf8_lossy(&alone.stdout), "0\nanswer\n", "{alone:?}");
    let shared = run("host", &listen);
    assert!(String::from_utf8_lossy(&shared.stderr).contains("in use"), "{shared:?}");
    nothing_left(&lazuli);
}

/// As in Docker: a seccomp filter, limits, and nothing to see of the node's interrupts.
#[test]
fn containers_have_a_seccomp_filter_and_limits() {
    let Some(lazuli) = prepared("busybox") else { return };
    let script = "grep ^Seccomp: /proc/self/status; unshare -m true 2>/dev/null; echo unshare $?; \
                  wc -c < /proc/interrupts; readlink /proc/self/ns/user; \
                  cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max 2>/dev/null; \
                  cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; \
                  mknod /null c 1 3 2>/dev/null; echo mknod $?";
    let run = |options: &[&str]| {
        let arguments = ["run", "oci:lazy:image"].into_iter().chain(options.iter().copied());
        let output = lazuli.output(arguments.chain(["--", "sh", "-c", script]));
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 7, "{output:?}{}", lazuli.log());
        lines
    };
    let own = std::fs::read_link("/proc/self/ns/user").unwrap().display().to_string();
    let plain = run(&[]);
    assert_eq!(plain[..5], ["Seccomp:\t2", "unshare 1", "0", &own, "2048"], "{plain:?}");
    assert_eq!(plain[6], "mknod 0");
    let narrow =
        run(&["--pids-limit", "20", "--memory", "64m", "--user-namespace", "--network", "none"]);
    assert_eq!(narrow[..3], plain[..3]);
    assert_ne!(narrow[3], own);
    assert_eq!(narrow[4..], ["20", "67108864", "mknod 1"], "{narrow:?}");
    nothing_left(&lazuli);
}

#[test]
fn without_arguments_the_images_own_command_runs() {
    let Some(lazuli) = prepared("busybox") else { return };
    let output = lazuli.output(["run", "--stats", "oci:lazy:image"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout, b"hello\n");
    let statistics = String::from_utf8(output.stderr).unwrap();
    assert!(statistics.contains("requests"), "{statistics}");
}

#[test]
fn a_container_has_the_images_environment_user_and_directory() {
    let Some(lazuli) = prepared("redis") else { return };
    let script = "pwd; id -u; echo $PATH; cat /proc/1/comm";
    let output = lazuli.ok(["run", "oci:lazy:image", "--", "sh", "-c", script]);
    let lines: Vec<_> = output.lines().collect();
    assert_eq!(lines.len(), 4, "{output}");
    assert!(lines[0].starts_with('/') && lines[2].contains("/usr/bin"), "{output}");
}

#[test]
fn interrupted_containers_leave_nothing() {
    let Some(lazuli) = prepared("busybox") else { return };
    for signal in [Signal::INT, Signal::TERM] {
        let script = "trap 'exit 9' INT TERM; echo up; while :; do sleep 1; done";
        let mut command = lazuli.command(["run", "oci:lazy:image", "--", "sh", "-c", script]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(9), "{signal:?}");
        nothing_left(&lazuli);
    }
}

#[test]
fn a_killed_run_is_swept_by_the_next() {
    let Some(lazuli) = prepared("busybox") else { return };
    let script = "echo up; sleep 60";
    let mut command = lazuli.command(["run", "oci:lazy:image", "--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    lazuli.ok(["run", "oci:lazy:image", "--", "true"]);
    nothing_left(&lazuli);
}

#[test]
fn an_image_that_cannot_be_mounted_gives_exit_code_125() {
    let Some(lazuli) = prepared("busybox") else { return };
    let output = lazuli.output(["run", "oci:lazy:nothing", "--", "true"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("nothing"), "{output:?}");
    nothing_left(&lazuli);
}

#[test]
fn commands_that_cannot_run_have_dockers_exit_codes() {
    let Some(lazuli) = prepared("busybox") else { return };
    for (command, code) in [("no-such-program", 127), ("/usr", 126), ("true", 0), ("false", 1)] {
        let output = lazuli.output(["run", "oci:lazy:image", "--", command]);
        assert_eq!(output.status.code(), Some(code), "{command}: {output:?}");
    }
    nothing_left(&lazuli);
}

#[test]
fn other_signals_reach_the_command() {
    let Some(lazuli) = prepared("busybox") else { return };
    let script = "trap 'exit 11' USR1; echo up; while :; do sleep 1; done";
    let mut command = lazuli.command(["run", "oci:lazy:image", "--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    kill_process(Pid::from_child(&child), Signal::USR1).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(11));
    nothing_left(&lazuli);
}

#[test]
fn a_signal_ends_a_run_whose_registry_does_not_answer() {
    let Some(lazuli) = prepared("busybox") else { return };
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let image = format!("{}/silent:x", silent.local_addr().unwrap());
    let mut child = lazuli.command(["run", &image]).stdin(Stdio::null()).spawn().unwrap();
    let _connection = silent.accept().unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    // The daemon gives the pull up, too: nothing holds up an orderly end.
    std::thread::sleep(std::time::Duration::from_millis(500));
    lazuli.ok(["stop"]);
}

#[test]
fn concurrent_runs_with_a_linked_state_directory_succeed() {
    let Some(lazuli) = prepared("busybox") else { return };
    let lazuli = lazuli.behind_a_link();
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                assert_eq!(lazuli.ok(["run", "oci:lazy:image", "--", "echo", "here"]), "here\n");
            });
        }
    });
    nothing_left(&lazuli);
}
