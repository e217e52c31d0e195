use anyhow::{Result, bail};
use clap::Args;
use indicatif::{BinaryBytes, HumanDuration};
use lazuli_runtime::daemon::{MirrorStatus, SnapshotsStatus, Status};

use crate::{Session, daemon};

/// Show mounted images and the data fetched for them
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// For programs; docs/cli.md describes it
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(session: &Session, arguments: &Arguments) -> Result<()> {
    let Some(mut daemon) = daemon::connect_if_needed(session)? else {
        bail!("no daemon runs on {}", session.root.display());
    };
    let status = daemon::status(&mut daemon)?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print(&status);
    }
    Ok(())
}

fn print(status: &Status) {
    let daemon = &status.daemon;
    println!(
        "daemon   {} (keeper {}, worker {}), up {}",
        daemon.version,
        daemon.keeper_pid,
        daemon.worker_pid,
        HumanDuration(std::time::Duration::from_secs(daemon.uptime_seconds))
    );
    if let Some(last) = &daemon.last_exit {
        println!("         {} workers died; the last one: {last}", daemon.restarts);
    }
    println!("driver   {}: {}", name(daemon.driver), daemon.driver_reason);
    println!(
        "cache    {} in {} blobs at {}",
        BinaryBytes(daemon.cache.bytes_used),
        daemon.cache.blobs,
        daemon.cache.directory.display()
    );
    if let Some(max) = daemon.cache.max_bytes {
        let over = if daemon.cache.over_budget { ", exceeded: all of it is in use" } else { "" };
        println!(
            "budget   {}{over}; {} given up",
            BinaryBytes(max),
            BinaryBytes(daemon.cache.evicted_bytes)
        );
    }
    if let Some(snapshots) = &status.snapshots {
        print_snapshots(snapshots);
    }
    if let Some(mirror) = &status.mirror {
        let MirrorStatus { listen, hits, misses, stale, bytes } = mirror;
        println!(
            "mirror   {listen}: {misses} questions to registries, {hits} answered from memory, {} passed on",
            BinaryBytes(*bytes)
        );
        if *stale > 0 {
            println!("         {stale} answered while a registry was away");
        }
    }
    if status.mounts.is_empty() {
        println!("nothing is mounted");
    }
    for mount in &status.mounts {
        #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
        let share = 100.0 * mount.chunks_ready as f64 / mount.chunks_total.max(1) as f64;
        println!("");
        println!("{}", mount.mountpoint.display());
        println!("  image    {}", mount.image);
        println!("  digest   {}", mount.manifest_digest);
        println!("  driver   {}: {}", name(mount.driver), mount.driver_reason);
        println!(
            "  fetched  {} of {} in {} requests",
            BinaryBytes(mount.bytes_fetched),
            BinaryBytes(mount.bytes_total),
            mount.requests
        );
        if mount.bytes_copied > 0 {
            println!("  copied   {} from other images here", BinaryBytes(mount.bytes_copied));
        }
        println!(
            "  ready    {} of {} chunks ({share:.1} %)",
            mount.chunks_ready, mount.chunks_total
        );
        if mount.bytes_missing > 0 {
            let when = match mount.complete_in_seconds {
                Some(seconds) => format!(
                    ", here in about {}",
                    HumanDuration(std::time::Duration::from_secs(seconds))
                ),
                None => String::new(),
            };
            println!(
                "  missing  {}: reads of it need a registry{when}",
                BinaryBytes(mount.bytes_missing)
            );
        }
        println!("  events   {}", mount.events);
        if let Some(snapshot) = &mount.snapshot {
            println!("  snapshot {}", snapshot.name);
            println!("  used by  {}", containers(&snapshot.containers));
        }
        if mount.stale_pages > 0 {
            println!(
                "  STALE    {} pages may show zeros: end the programs there",
                mount.stale_pages
            );
        }
    }
}

fn print_snapshots(snapshots: &SnapshotsStatus) {
    let SnapshotsStatus { committed, active, views, former, removed, error } = snapshots;
    if let Some(error) = error {
        println!("for containerd: {error}");
        return;
    }
    println!("for containerd: {committed} layers, {active} snapshots of containers, {views} views");
    if *former > 0 {
        println!("         {former} of them from before containerd's state was deleted");
    }
    if *removed > 0 {
        println!("         {removed} removed, but not deleted yet or still mounted somewhere");
    }
}

/// As many as fit in two lines.
const SHOWN: usize = 3;

fn containers(keys: &[String]) -> String {
    match keys {
        [] => "no container".to_owned(),
        keys if keys.len() <= SHOWN => keys.join(", "),
        keys => format!("{} and {} more", keys[..SHOWN].join(", "), keys.len() - SHOWN),
    }
}

fn name(driver: lazuli_runtime::daemon::DriverChoice) -> &'static str {
    use lazuli_runtime::daemon::DriverChoice::{Auto, Disks, Ext4, Fanotify, Fuse, Loop};
    match driver {
        Auto => "auto",
        Fanotify => "fanotify",
        Loop => "loop",
        Ext4 => "ext4",
        Fuse => "fuse",
        Disks => "disks",
    }
}
