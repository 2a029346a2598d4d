//! The marker: a variable in the environment of every life and of all that a life starts, by which a process tree is found
//! whatever group, session or parent its members have.
//!
//! It names the host too, by what cannot come again (PID namespace, pid, start time, a random number), so that what is left of
//! a host that is gone can be told from what belongs to another one.

use std::fs;

use crate::procfs::{self, Stat};

/// Carried by all that a host starts.
pub const VARIABLE: &str = "KERNELHOST_LIFE";
/// A process that has left its kernel's process group and carries this, set to anything but nothing, is not ended with it.
pub const OPT_OUT: &str = "KERNELHOST_DETACHED";

/// Above all generations.
const COPY: u32 = 1 << 31;

/// Names one host. Every marker of its lives begins with it, and all have the same length: a forked life writes its own over
/// that of its template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMark(String);

impl HostMark {
    /// A mark that no other host has, on this machine or in another container of it.
    pub fn new() -> Self {
        let pid = std::process::id();
        let start = Stat::read(i32::try_from(pid).unwrap_or(0)).map_or(0, |stat| stat.start);
        Self(format!(
            "{:08x}-{pid:08x}-{start:016x}-{:08x}",
            pid_namespace().unwrap_or(0),
            random()
        ))
    }

    /// The marker of a life.
    pub fn of_life(&self, kernel: u32, generation: u32) -> String {
        format!("{}-{kernel:08x}-{generation:08x}", self.0)
    }

    /// The marker of a frozen copy of one of a kernel's lives: no generation has the number.
    pub fn of_copy(&self, kernel: u32, copy: u32) -> String {
        self.of_life(kernel, COPY | copy)
    }

    /// The marker of what serves the host itself: no kernel has the number.
    pub fn of_servant(&self) -> String {
        self.of_life(u32::MAX, 0)
    }
}

impl Default for HostMark {
    fn default() -> Self {
        Self::new()
    }
}

/// What a marker says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    namespace: u32,
    pub host_pid: i32,
    host_start: u64,
    /// `None`: it serves the host itself.
    pub kernel: Option<u32>,
    pub generation: u32,
}

impl Marker {
    pub fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.split('-').collect();
        let [namespace, host_pid, host_start, _random, kernel, generation] = fields[..] else {
            return None;
        };
        let number = |text: &str| u32::from_str_radix(text, 16).ok();
        Some(Self {
            namespace: number(namespace)?,
            host_pid: i32::try_from(number(host_pid)?).ok()?,
            host_start: u64::from_str_radix(host_start, 16).ok()?,
            kernel: number(kernel).filter(|kernel| *kernel != u32::MAX),
            generation: number(generation)?,
        })
    }

    /// Whether the host's process is still there. `None`: it is of another PID namespace, from where its pid means nothing.
    pub fn host_is_alive(&self) -> Option<bool> {
        (pid_namespace() == Some(self.namespace))
            .then(|| Stat::read(self.host_pid).is_some_and(|stat| stat.start == self.host_start && !stat.is_zombie()))
    }
}

/// What the environment of a process says of whom it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Belonging {
    Marked {
        marker: String,
        detached: bool,
    },
    /// It carries no marker: it was started with an environment of its own, or is nobody's.
    Unmarked {
        detached: bool,
    },
    /// Its environment may not be read.
    Hidden,
}

/// Whether a process carries exactly this marker.
pub fn is_on(pid: i32, marker: &str) -> bool {
    matches!(belonging(pid), Belonging::Marked { marker: found, .. } if found == marker)
}

pub(crate) fn belonging(pid: i32) -> Belonging {
    match procfs::environment(pid) {
        Some(environment) => of_environment(&environment),
        None => Belonging::Hidden,
    }
}

fn of_environment(environment: &[u8]) -> Belonging {
    let value = |name: &str| {
        environment
            .split(|byte| *byte == 0)
            .find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    let detached = value(OPT_OUT).is_some_and(|value| !value.is_empty());
    match value(VARIABLE) {
        Some(marker) => Belonging::Marked {
            marker: String::from_utf8_lossy(marker).into_owned(),
            detached,
        },
        None => Belonging::Unmarked { detached },
    }
}

/// The inode of this process's PID namespace.
pub(crate) fn pid_namespace() -> Option<u32> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    let text = link.to_str()?;
    text.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

fn random() -> u32 {
    let mut bytes = [0; 4];
    // SAFETY: the buffer is valid for the length given.
    let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    if filled == 4 {
        u32::from_ne_bytes(bytes)
    } else {
        // Early in the life of a machine there may be no randomness yet; two hosts of one process still differ.
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_says_whose_it_is_and_whether_that_host_lives() {
        let host = HostMark::new();
        let marker = Marker::parse(&host.of_life(7, 3)).unwrap();
        assert_eq!((marker.kernel, marker.generation), (Some(7), 3));
        assert_eq!(marker.host_pid, i32::try_from(std::process::id()).unwrap());
        assert_eq!(marker.host_is_alive(), Some(true));
        assert_eq!(Marker::parse(&host.of_servant()).unwrap().kernel, None);
        let reused = Marker {
            host_start: 1,
            ..marker.clone()
        };
        assert_eq!(
            reused.host_is_alive(),
            Some(false),
            "the same pid at another time is another process"
        );
        let elsewhere = Marker { namespace: 1, ..marker };
        assert_eq!(elsewhere.host_is_alive(), None);
    }

    #[test]
    fn all_markers_are_of_one_length_and_no_two_hosts_share_one() {
        let (one, other) = (HostMark::new(), HostMark::new());
        assert_ne!(one, other);
        assert_eq!(one.of_life(0, 1).len(), one.of_life(u32::MAX - 1, u32::MAX).len());
        assert_eq!(one.of_servant().len(), other.of_life(1, 1).len());
    }

    #[test]
    fn what_is_no_marker_is_none() {
        for text in ["", "1-2", "x-1-1-1-1-1", "1-2-3-4-5-6-7"] {
            assert_eq!(Marker::parse(text), None, "{text}");
        }
    }

    #[test]
    fn an_environment_tells_whom_a_process_belongs_to() {
        let marked = |detached| Belonging::Marked {
            marker: "m".to_owned(),
            detached,
        };
        assert_eq!(of_environment(b"A=1\0KERNELHOST_LIFE=m\0B=2\0"), marked(false));
        assert_eq!(
            of_environment(b"KERNELHOST_LIFE=m\0KERNELHOST_DETACHED=1\0"),
            marked(true)
        );
        assert_eq!(
            of_environment(b"KERNELHOST_LIFE=m\0KERNELHOST_DETACHED=\0"),
            marked(false)
        );
        assert_eq!(
            of_environment(b"MY_KERNELHOST_LIFE=m\0"),
            Belonging::Unmarked { detached: false }
        );
        assert_eq!(of_environment(b""), Belonging::Unmarked { detached: false });
    }
}
