//! What procfs tells of processes, as proc(5) numbers the fields of `/proc/<pid>/stat`.

use std::fs;

use crate::reap::ExitStatus;

/// One process, at the moment of the look.
#[derive(Debug, Clone)]
pub(crate) struct Stat {
    pub pid: i32,
    pub state: char,
    pub parent: i32,
    pub process_group: i32,
    pub session: i32,
    pub cpu_ticks: u64,
    pub threads: u32,
    /// In clock ticks since boot. Together with the pid it names one process for good.
    pub start: u64,
    /// As `waitpid` would report it; meaningful for a zombie.
    pub exit_status: ExitStatus,
}

impl Stat {
    pub(crate) fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command name, in parentheses, may hold anything, also spaces and parentheses.
        let fields: Vec<&str> = stat.get(stat.rfind(')')? + 2..)?.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            pid,
            state: field(3)?.chars().next()?,
            parent: field(4)?.parse().ok()?,
            process_group: field(5)?.parse().ok()?,
            session: field(6)?.parse().ok()?,
            cpu_ticks: field(14)?.parse::<u64>().ok()? + field(15)?.parse::<u64>().ok()?,
            threads: field(20)?.parse().ok()?,
            start: field(22)?.parse().ok()?,
            exit_status: ExitStatus::from_wait(field(52)?.parse().ok()?),
        })
    }

    pub(crate) fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// Every process of this PID namespace.
pub(crate) fn all() -> impl Iterator<Item = Stat> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Stat::read)
}

/// All members of a process group.
pub(crate) fn members(process_group: i32) -> impl Iterator<Item = Stat> {
    all().filter(move |stat| stat.process_group == process_group)
}

pub(crate) fn group_has_living_member(process_group: i32) -> bool {
    members(process_group).any(|member| !member.is_zombie())
}

/// How many processes and threads have been started on this machine since it was.
pub(crate) fn forks() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let count = stat.lines().find_map(|line| line.strip_prefix("processes "));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// The children of a process with one thread. `None` where Linux was built without that list.
pub(crate) fn children(pid: i32) -> Option<Vec<i32>> {
    let listing = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    Some(
        listing
            .split_ascii_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect(),
    )
}

/// The children of a process, whichever of its threads has started them; none where Linux was built without that list.
pub(crate) fn children_of_all_threads(pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let listings = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let pids = listings.flat_map(|listing| {
        let pids = listing.split_ascii_whitespace().filter_map(|pid| pid.parse().ok());
        pids.collect::<Vec<_>>()
    });
    pids.collect()
}

/// What the process was started with, and for a fork what it inherited. `None`: it may not be read, or the process is gone.
pub(crate) fn environment(pid: i32) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{pid}/environ")).ok()
}

/// The command line as a person would type it; the name in brackets where there is none.
pub(crate) fn command(pid: i32) -> String {
    const LONGEST: usize = 200;
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&arguments);
    let mut text = text.trim_end_matches('\0').replace('\0', " ");
    if text.is_empty() {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        return format!("[{}]", name.trim_end());
    }
    if text.len() > LONGEST {
        text.truncate(text.floor_char_boundary(LONGEST));
        text.push('…');
    }
    text
}
