//! What a process has used, at its end and while it lives.

use std::fs;
use std::io;

use crate::process_tree::{self, Root};
use crate::procfs::Stat;

/// What a process and the children it waited for have used, told at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResourceUsage {
    /// Largest resident size, in bytes, of the process or of one of those children; `None` where Linux does not know it (see
    /// [`crate::reap::reap`]).
    pub max_rss_bytes: Option<u64>,
    pub user_ms: u64,
    pub system_ms: u64,
}

impl From<&libc::rusage> for ResourceUsage {
    fn from(usage: &libc::rusage) -> Self {
        let ms = |time: libc::timeval| u64::try_from(time.tv_sec * 1000 + time.tv_usec / 1000).unwrap_or(0);
        Self {
            // Linux counts in KiB.
            max_rss_bytes: u64::try_from(usage.ru_maxrss).ok().map(|kib| kib * 1024),
            user_ms: ms(usage.ru_utime),
            system_ms: ms(usage.ru_stime),
        }
    }
}

/// What a living process uses, read from procfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LiveUsage {
    pub rss_bytes: u64,
    /// Proportional set size: memory shared with others counts by its share.
    pub pss_bytes: u64,
    /// User and system time so far.
    pub cpu_ms: u64,
    pub threads: u32,
    /// Of its whole tree, itself included.
    pub processes: u32,
}

/// Memory of a process that is no file's, in bytes: resident, and what it has asked for as `RLIMIT_DATA` counts it (heap and
/// private writable mappings, used or not).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub resident: u64,
    pub data: u64,
}

pub(crate) fn memory(pid: i32) -> Option<Memory> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let bytes = |key: &str| kilobytes(&status, key);
    Some(Memory {
        resident: bytes("RssAnon:")? + bytes("RssShmem:")?,
        data: bytes("VmData:")?,
    })
}

/// The figure that procfs gives in kB, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

/// The resident memory of a process, in bytes.
pub fn rss(pid: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * page_bytes())
}

/// Memory of a process that is no file's, what it shares with others counted by its share. Takes a look at every page table.
pub(crate) fn memory_by_share(pid: i32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    match (kilobytes(&rollup, "Pss_Anon:"), kilobytes(&rollup, "Pss_Shmem:")) {
        (Some(anonymous), Some(shared)) => Some(anonymous + shared),
        // Before Linux 5.10 files are counted too.
        _ => kilobytes(&rollup, "Pss:"),
    }
}

/// Resident memory of a process that is no file's, in bytes, what it shares with others included.
pub fn anonymous(pid: i32) -> Option<u64> {
    memory(pid).map(|memory| memory.resident)
}

/// Memory that a process shares with nobody, in bytes: of a copy, what it or its original has written since. Takes a look at
/// every page table.
pub fn unshared(pid: i32) -> Option<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    Some(kilobytes(&rollup, "Private_Clean:")? + kilobytes(&rollup, "Private_Dirty:")?)
}

/// Reads the usage of a life. The caller makes sure that the pid is not reused meanwhile.
pub fn live(root: &Root) -> io::Result<LiveUsage> {
    let pid = root.pid;
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let bytes = |key: &str| kilobytes(&rollup, key).unwrap_or(0);
    let stat = Stat::read(pid).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    Ok(LiveUsage {
        rss_bytes: bytes("Rss:"),
        pss_bytes: bytes("Pss:"),
        cpu_ms: stat.cpu_ticks * 1000 / ticks_per_second(),
        threads: stat.threads,
        processes: process_tree::count(root),
    })
}

/// The largest resident size so far of this very process, rounded up by what the figure may lag behind: Linux counts pages per
/// CPU and adds them up now and then.
pub fn own_peak() -> u64 {
    const LAG_BYTES_PER_CPU: u64 = 256 * 1024;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = kilobytes(&status, "VmHWM:").unwrap_or(0);
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    peak + LAG_BYTES_PER_CPU * u64::try_from(cpus).unwrap_or(1)
}

fn page_bytes() -> u64 {
    // SAFETY: no arguments beyond an integer.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) })
        .ok()
        .filter(|bytes| *bytes > 0)
        .unwrap_or(4096)
}

fn ticks_per_second() -> u64 {
    // SAFETY: no arguments beyond an integer.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) })
        .ok()
        .filter(|ticks| *ticks > 0)
        .unwrap_or(100)
}
