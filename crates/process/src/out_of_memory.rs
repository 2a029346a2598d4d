//! What Linux tells of its OOM killer: the kernel log, the counter of a memory cgroup (v1 and v2), the machine's counter.
//!
//! Nothing here decides whose death it was; a [`Witness`] does. The counters rise before a victim is signalled; the log is written just after.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::marker::pid_namespace;

/// The initial PID namespace has this inode, `PROC_PID_INIT_INO`. The kernel log names processes by their pids there.
const INITIAL_PID_NAMESPACE: u32 = 0xEFFF_FFFC;

/// What is known of a process that was ended by a SIGKILL which its owner did not send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub out_of_memory: bool,
    pub evidence: Vec<String>,
}

/// Who can say whether the OOM killer took a process. Every owner of processes asks the same one, because a counter that rose
/// once explains one death.
pub trait Witness: Send + Sync {
    /// A process may be asked about from now on. Must be called within the runtime.
    fn began(self: Arc<Self>, pid: i32);

    /// To be asked before `ended`.
    fn finding(&self, pid: i32) -> Pin<Box<dyn Future<Output = Finding> + Send + '_>>;

    /// It has ended, and its pid is about to be given up.
    fn ended(&self, pid: i32);
}

/// One victim, as the kernel log names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kill {
    pub pid: i32,
    pub name: String,
    /// The line of the log.
    pub line: String,
}

/// The kernel log, from the moment it was opened.
#[derive(Debug)]
pub struct KernelLog {
    file: AsyncFd<LogFile>,
}

#[derive(Debug)]
struct LogFile(File);

impl AsRawFd for LogFile {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl KernelLog {
    /// Opens the log for what is written from now on, registered with the running tokio runtime. The error says for people why
    /// it cannot serve.
    pub fn open() -> Result<Self, String> {
        if pid_namespace() != Some(INITIAL_PID_NAMESPACE) {
            return Err("the kernel log names processes by the pids of another PID namespace".to_owned());
        }
        let open = || -> io::Result<Self> {
            let mut file = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
                .open("/dev/kmsg")?;
            file.seek(SeekFrom::End(0))?;
            // SAFETY: the raw descriptor comes from a `File` that this value owns and never replaces, so it stays open and the
            // same for as long as the registration.
            let file = unsafe { AsyncFd::register_with_interest(LogFile(file), Interest::READABLE) }?;
            Ok(Self { file })
        };
        open().map_err(|error| format!("the kernel log (/dev/kmsg) cannot be read: {error}"))
    }

    /// Waits for new lines and returns the kills among them. Fails when the log cannot be read any more.
    pub async fn kills(&self) -> io::Result<Vec<Kill>> {
        loop {
            let mut ready = self.file.readable().await?;
            let found = self.kills_now()?;
            ready.clear_ready();
            if !found.is_empty() {
                return Ok(found);
            }
        }
    }

    /// The kills among the lines that have come since the last look.
    fn kills_now(&self) -> io::Result<Vec<Kill>> {
        // The longest record that Linux hands out.
        let mut record = [0; 8192];
        let mut found = Vec::new();
        loop {
            match (&self.file.get_ref().0).read(&mut record) {
                Ok(0) => return Ok(found),
                Ok(count) => found.extend(kill_in(&String::from_utf8_lossy(&record[..count]))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(found),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Lines were overwritten before they were read. The next read goes on behind the gap.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// `…;Memory cgroup out of memory: Killed process 4711 (python3) total-vm:…`; older kernels write the first words on a line
/// of their own.
fn kill_in(record: &str) -> Option<Kill> {
    // A continuation line holds `KEY=value` of the device that spoke; none of these is of interest.
    let line = record.split_once(';')?.1.lines().next()?;
    let victim = line.split_once("Killed process ")?.1;
    let (pid, rest) = victim.split_once(' ')?;
    let name = rest.split_once('(').and_then(|(_, rest)| rest.split_once(')'))?.0;
    Some(Kill {
        pid: pid.trim_end_matches(',').parse().ok()?,
        name: name.to_owned(),
        line: line.to_owned(),
    })
}

/// How many processes the OOM killer has taken on this machine since it was started. `None` before Linux 4.13.
pub fn kills_on_this_machine() -> Option<u64> {
    counter(&fs::read_to_string("/proc/vmstat").ok()?, "oom_kill")
}

/// The memory cgroup of a process and the file that counts its OOM kills.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MemoryCgroup {
    /// As `/proc/<pid>/cgroup` names it.
    pub name: String,
    pub counter: PathBuf,
}

impl MemoryCgroup {
    /// The cgroup in which a process is counted. `None`: there is none, or its files are not to be seen from here.
    pub fn of(pid: i32) -> Option<Self> {
        let membership = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let found = locate(&membership, &mounts)?;
        found.counter.exists().then_some(found)
    }

    /// How many of its processes the OOM killer has taken.
    pub fn kills(&self) -> io::Result<u64> {
        let text = fs::read_to_string(&self.counter)?;
        counter(&text, "oom_kill").ok_or_else(|| io::Error::other("it has no line \"oom_kill\""))
    }
}

fn counter(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(key, _)| *key == name)?.1.trim().parse().ok()
}

/// Version 1 has a hierarchy for memory; where there is none, it is counted in version 2.
fn locate(membership: &str, mounts: &str) -> Option<MemoryCgroup> {
    let line = |wanted: &dyn Fn(&str) -> bool| {
        let mut lines = membership.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            fields.next()?;
            Some((fields.next()?, fields.next()?))
        });
        lines.find(|(controllers, _)| wanted(controllers)).map(|(_, path)| path)
    };
    let first = line(&|controllers| controllers.split(',').any(|each| each == "memory"));
    let (path, kind, option, file) = match first {
        Some(path) => (path, "cgroup", "memory", "memory.oom_control"),
        None => (line(&str::is_empty)?, "cgroup2", "", "memory.events"),
    };
    let folder = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let (found, options) = (right.next()?, right.nth(1)?);
        if found != kind || (!option.is_empty() && !options.split(',').any(|each| each == option)) {
            return None;
        }
        let fields: Vec<&str> = left.split(' ').collect();
        let (root, mount_point) = (*fields.get(3)?, *fields.get(4)?);
        // What is mounted may be only a part of the hierarchy.
        let below = if root == "/" { path } else { path.strip_prefix(root)? };
        Some(Path::new(mount_point).join(below.trim_start_matches('/')))
    })?;
    Some(MemoryCgroup {
        name: path.to_owned(),
        counter: folder.join(file),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_names_its_victims() {
        let line = "Memory cgroup out of memory: Killed process 4542 (python3) total-vm:75364kB, anon-rss:65152kB";
        let kill = kill_in(&format!("3,1234,5306474311,-;{line}\n SUBSYSTEM=x\n"));
        assert_eq!(
            kill,
            Some(Kill {
                pid: 4542,
                name: "python3".to_owned(),
                line: line.to_owned()
            })
        );
        let old = kill_in("3,1,2,-;Killed process 77, UID 0, (my (odd name) total-vm:1kB");
        assert_eq!(old.map(|kill| kill.pid), Some(77));
        for other in [
            "6,1,2,-;usb 1-1: new device",
            "no record",
            "3,1,2,-;Killed process x (y) z",
            "",
        ] {
            assert_eq!(kill_in(other), None, "{other}");
        }
    }

    const MOUNTS: &str = "\
        24 1 0:22 / /proc rw - proc proc rw\n\
        30 25 0:26 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n\
        31 25 0:27 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory\n";

    #[test]
    fn version_1_is_found_before_version_2() {
        let found = locate("4:memory:/a/b\n0::/\n", MOUNTS);
        let counter = PathBuf::from("/sys/fs/cgroup/memory/a/b/memory.oom_control");
        assert_eq!(
            found,
            Some(MemoryCgroup {
                name: "/a/b".to_owned(),
                counter
            })
        );
    }

    #[test]
    fn version_2_is_found_also_where_only_a_part_of_it_is_mounted() {
        let counter = |membership: &str, mounts: &str| locate(membership, mounts).map(|found| found.counter);
        assert_eq!(
            counter("0::/user.slice/x\n", MOUNTS),
            Some(PathBuf::from("/sys/fs/cgroup/unified/user.slice/x/memory.events"))
        );
        let part = "30 25 0:26 /docker/c1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(
            counter("0::/docker/c1/k\n", part),
            Some(PathBuf::from("/sys/fs/cgroup/k/memory.events"))
        );
        assert_eq!(counter("0::/elsewhere\n", part), None);
        assert_eq!(counter("", MOUNTS), None);
    }

    #[test]
    fn counters_of_both_versions_are_read() {
        assert_eq!(
            counter("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "oom_kill"),
            Some(3)
        );
        assert_eq!(
            counter("low 0\noom 2\noom_kill 1\noom_group_kill 0\n", "oom_kill"),
            Some(1)
        );
        assert_eq!(counter("oom_kill_disable 0\n", "oom_kill"), None);
    }
}
