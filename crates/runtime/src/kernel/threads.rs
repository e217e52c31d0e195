//! Finds threads in the kernel, and those that cgroup v1 has frozen.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// How the name of the kernel function begins in which a reader waits for a fanotify group.
const FANOTIFY: &str = "fanotify";

/// The state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadState {
    /// It sleeps in the kernel's wait for an answer, or is frozen there. A reader that a cgroup v1
    /// freezer has frozen stays in this wait after the answer, until it is thawed.
    Waits,
    /// It runs, or could if it got a processor, and has used one for this many ticks of 10 ms so
    /// far.
    Runs(u64),
    /// It sleeps anywhere else.
    Elsewhere,
    /// It has ended.
    Gone,
}

/// Returns the state of the thread with this number.
pub(crate) fn find(thread: i32) -> ThreadState {
    at(&Path::new("/proc").join(thread.to_string()))
}

/// The threads that a freezer of cgroup v1 holds in the wait for an answer. Where its groups cannot
/// be seen, all threads that wait.
pub(crate) fn frozen() -> io::Result<Vec<i32>> {
    // name, hierarchy, groups, whether it is enabled
    let controllers = fs::read_to_string("/proc/cgroups")?;
    let freezer = controllers.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let hierarchy = freezer.into_iter().find(|fields| fields.first() == Some(&"freezer"));
    if hierarchy.is_none_or(|fields| fields.get(1) == Some(&"0")) {
        return Ok(Vec::new());
    }
    let threads = match freezer_of(&fs::read_to_string("/proc/self/mounts")?) {
        Some(root) => frozen_below(root),
        None => numbers_in(Path::new("/proc"))
            .flat_map(|process| {
                numbers_in(&Path::new("/proc").join(process.to_string()).join("task"))
            })
            .collect(),
    };
    Ok(threads.into_iter().filter(|thread| find(*thread) == ThreadState::Waits).collect())
}

/// Returns the mountpoint of the freezer's groups, from a table like /proc/self/mounts.
fn freezer_of(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (at, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        (kind == "cgroup" && options.split(',').any(|option| option == "freezer"))
            .then(|| at.into())
    })
}

/// The threads of every group that is not thawed. A group that disappears meanwhile has none.
fn frozen_below(root: PathBuf) -> Vec<i32> {
    let (mut groups, mut frozen) = (vec![root], Vec::new());
    while let Some(group) = groups.pop() {
        let state = fs::read_to_string(group.join("freezer.state"));
        // The root has no state: it cannot be frozen.
        if state.is_ok_and(|state| state.trim() != "THAWED") {
            let tasks = fs::read_to_string(group.join("tasks")).unwrap_or_default();
            frozen.extend(tasks.lines().filter_map(|thread| thread.parse::<i32>().ok()));
        }
        let entries = fs::read_dir(&group).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        groups.extend(below.map(|entry| entry.path()));
    }
    frozen
}

/// The names in a directory that are numbers.
fn numbers_in(dir: &Path) -> impl Iterator<Item = i32> + use<> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn at(thread: &Path) -> ThreadState {
    let Ok(stat) = fs::read_to_string(thread.join("stat")) else { return ThreadState::Gone };
    match state(&stat) {
        Some('Z' | 'X') => ThreadState::Gone,
        // Killable and frozen sleepers look like this. The kernel names the function only if it was
        // built with names.
        Some('D') => match fs::read_to_string(thread.join("wchan")) {
            Ok(name) if name != "0" && !name.starts_with(FANOTIFY) => ThreadState::Elsewhere,
            _ => ThreadState::Waits,
        },
        Some('R') => ThreadState::Runs(ticks(&stat).unwrap_or(0)),
        _ => ThreadState::Elsewhere,
    }
}

/// `4711 (name) D …`; a name may have spaces and parentheses.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// Processor time, as programs and the kernel used it for the thread: the twelfth and thirteenth
/// field after the name's, `utime` and `stime`.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_follows_the_name() {
        assert_eq!(state("1 (cat) D 2 3"), Some('D'));
        assert_eq!(state("1 (a) S (b) R 2 3"), Some('R'));
        assert_eq!((state("1 (cat)"), state("")), (None, None));
    }

    #[test]
    fn processor_time_is_of_programs_and_kernel() {
        let stat = "7 (a) b) R 1 2 3 4 5 6 7 8 9 10 110 12 20 0";
        assert_eq!(ticks(stat), Some(122));
        assert_eq!(ticks("7 (a) R 1 2"), None);
    }

    #[test]
    fn the_freezer_is_where_the_kernel_says() {
        let table = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
            cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0\n\
            cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0\n";
        assert_eq!(freezer_of(table), Some("/sys/fs/cgroup/freezer".into()));
        let unified = "cgroup2 /sys/fs/cgroup cgroup2 rw,freezer 0 0\ncut short\n";
        assert_eq!(freezer_of(unified), None);
    }

    #[test]
    fn a_running_thread_runs() {
        let own = fs::read_link("/proc/thread-self").unwrap();
        let own = own.file_name().unwrap().to_str().unwrap().parse().unwrap();
        assert!(matches!(find(own), ThreadState::Runs(_)));
        // Above the largest number that Linux gives.
        assert_eq!(find(1 << 30), ThreadState::Gone);
    }
}
